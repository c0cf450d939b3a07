"""int8 inference: weights take a quarter of their float32 memory."""

from sd_lightning.quantization.int8 import Int8, dequantize_, quantize_, replace_module

__all__ = ["Int8", "dequantize_", "quantize_", "replace_module"]
