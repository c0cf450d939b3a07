"""int8 inference: weights take a quarter of their float32 memory."""

from sd_lightning.quantization.config import Int8
from sd_lightning.quantization.model import dequantize_, quantize_, replace_module

__all__ = ["Int8", "dequantize_", "quantize_", "replace_module"]
