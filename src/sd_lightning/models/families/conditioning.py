"""Operations on conditioning: nested dictionaries of tensors whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def join_conditioning(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the conditioning of several batches."""
    return {
        key: join_conditioning([part[key] for part in parts])
        if isinstance(value, Mapping)
        else torch.cat([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def map_conditioning(conditioning: Mapping[str, Any], fn: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Apply ``fn`` to every tensor of a (nested) conditioning dictionary."""
    return {k: map_conditioning(v, fn) if isinstance(v, Mapping) else fn(v) for k, v in conditioning.items()}
