"""DeepSpeed ZeRO as a Lightning strategy."""

from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy, deepspeed

__all__ = ["DeepSpeedStrategy", "deepspeed"]
