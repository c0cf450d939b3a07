"""How near two checkpoints are."""

import math
from pathlib import Path

import torch

from sd_lightning.storage.tensor_store import ShardedTensors


def rms(one: str, other: str, kind: str = "master") -> float:
    """Root mean square of the difference of two checkpoints' tensors of a kind."""
    total, count = 0.0, 0
    with ShardedTensors(Path(one) / "state") as a, ShardedTensors(Path(other) / "state") as b:
        for key in (key for key in a.keys() if key.startswith(kind + "/")):
            tensors = torch.empty(a.shape(key)), torch.empty(a.shape(key))
            a.read_into(key, tensors[0])
            b.read_into(key, tensors[1])
            total += float((tensors[0] - tensors[1]).double().square().sum())
            count += tensors[0].numel()
    return math.sqrt(total / count)
