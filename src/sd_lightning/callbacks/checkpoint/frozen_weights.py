"""Frozen weights of a run: saved exactly for its pipelines, and compared on resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.pipeline import frozen_weights_file
from sd_lightning.storage import atomic, checkpoint
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.safetensors_file import bytes_of
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed
from sd_lightning.strategies.base import is_whole
from sd_lightning.training.module import SDLightningModule

_SAMPLE = 64
"""Number of values of each weight to compare; another model differs in nearly all of them."""


def write_frozen_weights(run_dir: Path, module: SDLightningModule) -> None:
    """Write the frozen weights of each trained network in float32, before an engine shards or rounds them.

    Deferred weights are copied from their files in slices.

    Raises:
        UsageError: The disk is full.
    """
    for name, network in module.trained_networks().items():
        frozen = {key: p for key, p in network.named_parameters() if not p.requires_grad}
        if not frozen or not all(is_whole(weight) for weight in frozen.values()):
            continue
        deferred = module.latent_diffusion.deferred.get(name)
        path = frozen_weights_file(run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic.new_file(path) as part:
                write_streamed(
                    part, {k: _streamed(k, w.detach(), deferred) for k, w in frozen.items()}, dtype=torch.float32
                )
        except Exception as error:
            raise checkpoint.disk_full(error, run_dir, 0) or error from error
        finally:
            if deferred is not None:
                deferred.close()


def fingerprints(module: SDLightningModule) -> dict[str, str]:
    """Return a digest of the first values of each frozen weight, by network.

    Networks that are sharded or not in float32 are left out.
    """
    model, trained = module.latent_diffusion, module.trained_networks()
    found = {}
    for name, network in model.networks.items():
        weights = {k: p for k, p in network.named_parameters() if name not in trained or not p.requires_grad}
        if not weights or not all(is_whole(w) and w.dtype == torch.float32 for w in weights.values()):
            continue
        deferred = model.deferred.get(name)
        digest = hashlib.sha256()
        for key, weight in weights.items():
            digest.update(bytes_of(_first_values(key, weight.detach(), deferred)))
        if deferred is not None:
            deferred.close()
        found[name] = digest.hexdigest()
    return found


def check_same_frozen(saved: Mapping[str, Any], ours: Mapping[str, str], path: Path) -> None:
    """Check that the frozen weights are those of the checkpoint's run.

    Args:
        saved: The checkpoint's ``trainer.json``; one of an earlier release has no digests to compare.
        ours: From :func:`fingerprints`.
        path: The checkpoint.

    Raises:
        UsageError: They differ.
    """
    theirs = saved.get("frozen", {})
    differing = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    if differing:
        raise UsageError(
            f"resume={path}: the frozen weights of {', '.join(differing)} are not those that the checkpoint's run "
            "began with, and a checkpoint restores only what is trained; give the model.pretrained= that stands in "
            "that run's config.yaml"
        )


def _streamed(key: str, weight: Tensor, deferred: DeferredWeights | None) -> StreamedTensor:
    if weight.is_meta and deferred is not None:
        return deferred.streamed(key)
    return StreamedTensor.of(weight)


def _first_values(key: str, weight: Tensor, deferred: DeferredWeights | None) -> Tensor:
    count = min(_SAMPLE, weight.numel())
    if weight.is_meta and deferred is not None:
        values = torch.empty(count)
        deferred.read(key, values, 0, count)
        return values
    rows = weight[: -(-count * weight.shape[0] // weight.numel())] if weight.dim() else weight
    return rows.contiguous().reshape(-1)[:count].cpu()
