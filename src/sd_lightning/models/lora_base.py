"""The weights that adapters were trained on, of which their file tells some, and those that they are added to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from sd_lightning._launchers import is_first_process
from sd_lightning.models.families.sampling import is_new
from sd_lightning.storage.deferred_weights import DeferredWeights

log = logging.getLogger(__name__)

_SAME_BASE = 0.01
"""Relative difference between copies of weights in different dtypes, at most; that of bfloat16 is 0.002."""


def compare_bases(
    bases: Mapping[Path, Mapping[str, Sequence[float]]],
    folder: Path | str,
    name: str,
    network: nn.Module,
    unread: DeferredWeights | None,
) -> None:
    """Warn of adapters that were trained on other weights; they are not refused, as a fine-tuned model may be meant.

    Args:
        bases: By file of adapters, the first values of weights that they were trained on, by network and name.
        folder: Of the model, or what to call it.
        name: Of a network.
        network: It has its values, unless these are unread.
        unread: Its weights, if they are still in files.
    """
    for file, recorded in bases.items():
        ours, theirs = torch.empty(0), torch.empty(0)
        for key, weight in network.named_parameters():
            if told := recorded.get(f"{name}.{key}", [])[: weight.numel()]:
                values = weight.detach().reshape(-1)[: len(told)] if unread is None else unread.first(key, len(told))
                ours, theirs = torch.cat([ours, values]), torch.cat([theirs, torch.tensor(told)])
        difference = torch.dist(ours, theirs) / theirs.norm()
        if difference > _SAME_BASE and is_first_process() and is_new("base", file, folder):
            log.warning(
                "%s: these adapters were trained on other weights than those of %s: they differ by %.0f %% where the "
                "file tells. That is fine for a model that was fine-tuned or distilled from theirs; otherwise give "
                "model.pretrained=<the model that they were trained on>",
                *(file, folder, 100 * difference),
            )
    if unread is not None:
        unread.close()
