"""Files that ship with the package: the trained VAE and the tokenizer of the ``tiny`` model.

``python tests/support/make_tiny.py`` of the checkout regenerates them.
"""

from pathlib import Path

TINY_VAE = Path(__file__).parent / "tiny" / "vae"
TINY_TOKENIZER = Path(__file__).parent / "tiny" / "tokenizer"
