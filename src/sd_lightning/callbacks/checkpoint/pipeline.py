"""The pipeline in a checkpoint: trained weights streamed out of the state just written, the rest hard-linked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sd_lightning.models.adapters.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.adapters.lora import adapted_weights, is_adapter, merge, plain_names
from sd_lightning.models.pipeline_folder import file_keys, weights_file
from sd_lightning.storage import checkpoint
from sd_lightning.storage.tensor_store import Computed, ShardedTensors, stream_network

Sources = dict[str, str | Tensor | Computed]


def frozen_weights_file(run_dir: Path, name: str) -> Path:
    """Where a run keeps the weights of a trained network that are not trained."""
    return run_dir / "frozen-weights" / f"{name}.safetensors"


def write_pipeline(run_dir: Path, tmp: Path, pl_module: Any, *, averaged: bool) -> dict[str, str]:
    """Write ``pipeline/`` of a checkpoint whose ``state/`` is complete.

    Args:
        run_dir: Directory of the run, with ``frozen/``.
        tmp: The checkpoint.
        pl_module: The module; only names and shapes of its networks are used, and weights that no engine has taken
            apart.
        averaged: Export the average.

    Returns:
        SHA-256 by path of files that were written.
    """
    lora = getattr(pl_module, "lora", None)
    component_of = pl_module.latent_diffusion.components
    networks = pl_module.trained_networks()
    digests = {}
    with ShardedTensors(tmp / "state") as store:
        weights = {name: _Weights(store, run_dir, name, network, averaged) for name, network in networks.items()}
        checkpoint.hard_link_tree(run_dir / "frozen", tmp / "pipeline")
        for name, network in networks.items():
            file = Path(name, weights_file(component_of[name]))
            plain = plain_names(weights[name].state)
            keys = file_keys(component_of[name], plain)
            merged = weights[name].merged(network) if lora is not None and lora.merge else {}
            sources: Sources = {keys[k]: merged.get(live, weights[name].source(live)) for k, live in plain.items()}
            if all(isinstance(source, Tensor) for source in sources.values()):  # adapters alone are trained
                _share(store, sources, run_dir / "frozen" / file, tmp / "pipeline" / file)
            else:
                path = f"pipeline/{file.as_posix()}"
                (tmp / path).unlink(missing_ok=True)  # linked: this run did not merge its adapters until it was resumed
                digests[path] = stream_network(store, sources, tmp / path)
        if lora is not None and not lora.merge:
            path = f"pipeline/{LORA_NAME}"
            adapters = {name: each.adapters() for name, each in weights.items()}
            digests[path] = lora.write(tmp / path, adapters, component_of)
        word = getattr(pl_module, "learned_token", None)
        if word is not None:
            path = f"pipeline/{WORD_NAME}"
            rows = {name: weights[name].last_row(key) for name, key in word.names(networks).items()}
            digests[path] = word.write(tmp / path, rows)
    return digests


def _share(store: ShardedTensors, sources: Sources, shared: Path, target: Path) -> None:
    """Link a file that no training changes, once it has been written among the run's frozen parts."""
    if not shared.exists():
        part = shared.with_name(f".tmp-{secrets.token_hex(4)}")
        stream_network(store, sources, part)
        part.rename(shared)
    if not target.exists():
        checkpoint.hard_link(shared, target)


class _Weights:
    """The weights of one trained network, wherever they are: in the state, in a file of frozen ones, or live."""

    def __init__(self, store: ShardedTensors, run_dir: Path, name: str, network: nn.Module, averaged: bool) -> None:
        self._store = store
        self._prefix = f"{'ema' if averaged else 'master'}/{name}."
        self._frozen = _read(frozen_weights_file(run_dir, name))
        self.state: Mapping[str, Tensor] = network.state_dict()

    def source(self, key: str) -> str | Tensor:
        """Return the key in the store, or the tensor: frozen weights and buffers are not in the store."""
        stored = self._prefix + key
        return stored if stored in self._store else self._frozen.get(key, self.state[key])

    def load(self, key: str) -> Tensor:
        source = self.source(key)
        if isinstance(source, Tensor):
            return source.detach().cpu()
        tensor = torch.empty(self._store.shape(source), dtype=self._store.dtype(source))
        self._store.read_into(source, tensor)
        return tensor

    def last_row(self, key: str) -> Tensor:
        source = self.source(key)
        if isinstance(source, Tensor):
            return source.detach()[-1:].cpu()
        rows, dim = self._store.shape(source)
        row = torch.empty(1, dim, dtype=self._store.dtype(source))
        self._store.read_into(source, row, (rows - 1) * dim, rows * dim)
        return row

    def merged(self, network: nn.Module) -> Sources:
        """Return, by their names in memory, the weights that have adapters, with these added when they are written."""
        found: Sources = {}
        for key, scale in adapted_weights(network).items():
            source = self.source(key)
            assert isinstance(source, Tensor)
            found[key] = Computed(tuple(source.shape), source.dtype, partial(merge, key, scale, self.load))
        return found

    def adapters(self) -> dict[str, Tensor]:
        return {key: self.load(key) for key in self.state if is_adapter(key)}


def _read(path: Path) -> dict[str, Tensor]:
    """Map a file's tensors into memory; none if there is no file."""
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}
