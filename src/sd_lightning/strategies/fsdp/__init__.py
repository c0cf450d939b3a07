"""FSDP2 as a Lightning strategy."""

from sd_lightning.strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
