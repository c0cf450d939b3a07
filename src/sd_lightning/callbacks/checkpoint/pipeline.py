"""The pipeline in a checkpoint: trained weights streamed from the state just written, the rest hard-linked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd_lightning.models.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora import adapted_weights, is_adapter, merge, plain_names
from sd_lightning.storage import atomic
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.training.module import SDLightningModule


def frozen_weights_file(run_dir: Path, name: str) -> Path:
    """Return the path of the frozen weights of a trained network."""
    return run_dir / "frozen-weights" / f"{name}.safetensors"


def write_pipeline(run_dir: Path, tmp: Path, module: SDLightningModule, *, averaged: bool) -> dict[str, str]:
    """Write ``pipeline/`` of a checkpoint whose ``state/`` is complete.

    Args:
        run_dir: Directory of the run, with ``frozen/``.
        tmp: The checkpoint's temporary folder.
        module: Gives names and shapes of its networks, and values of weights that are not sharded.
        averaged: Export the averaged weights.

    Returns:
        SHA-256 of the files written, by path.
    """
    lora, word = module.lora, module.learned_token
    component_of = module.latent_diffusion.components
    networks = module.trained_networks()
    digests = {}
    with ShardedTensors(tmp / "state") as store:
        weights = {name: _Weights(store, run_dir, name, network, averaged) for name, network in networks.items()}
        atomic.hard_link_tree(run_dir / "frozen", tmp / "pipeline")
        for name, network in networks.items():
            file = Path(name, component_of[name].weights_file)
            plain = plain_names(weights[name].state)
            keys = component_of[name].file_keys(plain)
            merged = weights[name].merged(network) if lora is not None and lora.merge else {}
            sources = {keys[k]: merged.get(live) or weights[name].source(live) for k, live in plain.items()}
            if not merged and not any(weights[name].is_trained(live) for live in plain.values()):
                _share(sources, run_dir / "frozen" / file, tmp / "pipeline" / file)
            else:
                path = f"pipeline/{file.as_posix()}"
                (tmp / path).unlink(missing_ok=True)  # a link, if adapters were not merged before the resume
                digests[path] = write_streamed(tmp / path, sources)
        if lora is not None and not lora.merge:
            path = f"pipeline/{LORA_NAME}"
            adapters = {name: each.adapters() for name, each in weights.items()}
            digests[path] = lora.write(tmp / path, adapters, component_of)
        if word is not None:
            path = f"pipeline/{WORD_NAME}"
            rows = {name: weights[name].last_row(key) for name, key in word.names(networks).items()}
            digests[path] = word.write(tmp / path, rows, module.latent_diffusion.family)
    return digests


def _share(sources: Mapping[str, StreamedTensor], shared: Path, target: Path) -> None:
    """Hard-link an untrained weight file from the run's frozen parts; write it there first if it is missing."""
    if not shared.exists():
        with atomic.new_file(shared) as part:
            write_streamed(part, sources)
    if not target.exists():
        atomic.hard_link(shared, target)


class _Weights:
    """Weights of one trained network, from the saved state, the file of frozen weights, or the live module."""

    def __init__(self, store: ShardedTensors, run_dir: Path, name: str, network: nn.Module, averaged: bool) -> None:
        self._store = store
        self._prefix = f"{'ema' if averaged else 'master'}/{name}."
        frozen = frozen_weights_file(run_dir, name)
        self._frozen = load_file(frozen) if frozen.exists() else {}  # memory-mapped
        self.state: Mapping[str, Tensor] = network.state_dict(
            keep_vars=True
        )  # names and shapes of what Gemini has in chunks

    def is_trained(self, key: str) -> bool:
        return self._prefix + key in self._store

    def source(self, key: str) -> StreamedTensor:
        return self._store.streamed(self._prefix + key) if self.is_trained(key) else StreamedTensor.of(self._kept(key))

    def load(self, key: str) -> Tensor:
        return self.source(key).read()

    def last_row(self, key: str) -> Tensor:
        if not self.is_trained(key):
            return self._kept(key).detach()[-1:].cpu()
        rows, dim = self._store.shape(self._prefix + key)
        row = torch.empty(1, dim, dtype=self._store.dtype(self._prefix + key))  # a live weight may be a DTensor
        self._store.read_into(self._prefix + key, row, (rows - 1) * dim, rows * dim)
        return row

    def merged(self, network: nn.Module) -> dict[str, StreamedTensor]:
        """Return the weights that have adapters, by live name; adapters are merged when a weight is written."""
        return {
            key: StreamedTensor.of(
                partial(merge, key, scale, self.load), self._kept(key).dtype, tuple(self._kept(key).shape)
            )
            for key, scale in adapted_weights(network).items()
        }

    def adapters(self) -> dict[str, Tensor]:
        return {key: self.load(key) for key in self.state if is_adapter(key)}

    def _kept(self, key: str) -> Tensor:
        """Return a frozen weight or a buffer: neither is in the store."""
        return self._frozen.get(key, self.state[key])
