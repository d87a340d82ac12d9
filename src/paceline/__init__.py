"""paceline trains DFlash drafters: small block-diffusion models that make a large language model answer faster.

Read `train.py` first, then `docs/architecture.md`.
"""

__version__ = "0.1.0"
