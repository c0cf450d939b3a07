"""Lightning callbacks: EMA, portable checkpoints, samples, throughput, progress, guards."""

from sd_lightning.callbacks.checkpoint.callback import PortableCheckpoint
from sd_lightning.callbacks.ema import EMA
from sd_lightning.callbacks.evaluation import Evaluation
from sd_lightning.callbacks.guards import NonFiniteLossGuard, StopOnSignal
from sd_lightning.callbacks.progress import TrainingProgress
from sd_lightning.callbacks.samples import SampleGrid
from sd_lightning.callbacks.throughput import EngineMemory, Throughput

__all__ = [
    "EMA",
    "EngineMemory",
    "Evaluation",
    "NonFiniteLossGuard",
    "PortableCheckpoint",
    "SampleGrid",
    "StopOnSignal",
    "Throughput",
    "TrainingProgress",
]
