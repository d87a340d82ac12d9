"""What a run is, and storing it so that it appears whole."""
