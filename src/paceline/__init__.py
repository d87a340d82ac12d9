"""paceline trains DFlash drafters: small block-diffusion models that make a large language model answer faster.

The package is a corridor of rooms; its listing is the path the data takes. Read `train.py` first, then `docs/path.md`.
"""

__version__ = "0.1.0"
