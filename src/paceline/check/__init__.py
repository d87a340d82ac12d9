"""Pre-flight of one run: minutes on the real target and the real data, before hours are spent. Door: `preflight`."""
