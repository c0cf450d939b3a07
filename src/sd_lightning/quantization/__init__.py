"""int8 inference: the weights of a model in a quarter of the memory that float32 takes."""

from sd_lightning.quantization.config import Int8
from sd_lightning.quantization.model import dequantize_, quantize_, replace_module

__all__ = ["Int8", "dequantize_", "quantize_", "replace_module"]
