"""DeepSpeed ZeRO as a Lightning strategy."""

from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy", "deepspeed"]

deepspeed = DeepSpeedStrategy
"""Its name as a ``_target_``, which the files of runs hold."""
