"""Files that ship with the package: the trained VAE and the tokenizer of the ``tiny`` model.

``python -m sd_lightning.apps.make_tiny`` regenerates them.
"""

from pathlib import Path

TINY_VAE = Path(__file__).parent / "tiny" / "vae"
TINY_TOKENIZER = Path(__file__).parent / "tiny" / "tokenizer"
