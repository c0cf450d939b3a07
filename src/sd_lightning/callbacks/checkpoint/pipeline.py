"""What a checkpoint holds of a latent-diffusion model, beside the state that it has of any LightningModule.

In ``pipeline/`` trained weights are streamed from the state just written; the rest is hard-linked to the run's folder:
``frozen/`` has the parts that are not trained and a quantised base's original weights, ``frozen-weights/`` what else is
not trained within trained networks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora import Lora, adapted_weights, is_adapter, weight_names
from sd_lightning.quantization.base import original_shape
from sd_lightning.quantization.layers import Int8Layer, int8_layers
from sd_lightning.storage import atomic, checkpoint
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.safetensors_file import bytes_of
from sd_lightning.storage.streamed_tensor import StreamedTensor, file_tensors, write_streamed
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies.base import is_whole

_SAMPLE = 64
"""Number of values of each frozen weight to compare; another model differs in nearly all of them."""
_BASE_WEIGHTS, _BASE_VALUES = 16, 4
"""Number of weights, at most, and of values of each, that a file of adapters tells of its base."""


class AdaptedModel(Protocol):
    """What says which weights are trained, and what they mean: a module, or the specification of a run."""

    @property
    def lora(self) -> Lora | None:
        """Adapters that are trained in place of the networks' weights."""

    @property
    def learned_token(self) -> LearnedToken | None:
        """A word whose embedding is trained."""


@runtime_checkable
class PipelineModule(AdaptedModel, Protocol):
    """A LightningModule whose checkpoints hold a pipeline, such as ``SDLightningModule``."""

    latent_diffusion: LatentDiffusion
    seed: int
    """Seed of noise, timesteps and dropout; a run resumes with the same."""

    def trained_networks(self) -> dict[str, nn.Module]:
        """Return the networks with trained weights, by name."""


def trained_parts(model: AdaptedModel) -> dict[str, Any]:
    """Return the settings that define the meaning of trained weights, by configuration key.

    Names and shapes do not show them: adapters with another alpha have the same shapes, but another effect.
    Dropout is left out; like the learning rate, it may change.
    """
    lora, learned_token = model.lora, model.learned_token
    parts: dict[str, Any] = {"trainable": "full" if lora is None else "lora"}
    if lora is not None:
        parts["lora.type"] = lora.type
        parts["lora.rank"] = lora.rank
        parts["lora.alpha"] = lora.effective_alpha
        for key in ("rank_pattern", "alpha_pattern"):
            parts[f"lora.{key}"] = dict(getattr(lora, key) or {})
        parts["lora.target_modules"] = lora.target_modules and sorted(lora.target_modules)
        parts["lora.text_encoder_target_modules"] = sorted(lora.text_encoder_target_modules)
        parts["lora.base"] = lora.base or "null"  # None would be left open
        parts["lora.use_dora"] = lora.use_dora
    parts["learn_token"] = learned_token is not None
    if learned_token is not None:
        parts["placeholder_token"] = learned_token.placeholder_token
    return parts


def check_same_parts(saved: Mapping[str, Any], model: AdaptedModel, path: Path) -> None:
    """Check that the settings of a checkpoint's run equal those of the run that resumes it.

    Args:
        saved: The checkpoint's ``trainer.json``.
        model: What the run trains.
        path: The checkpoint.

    Raises:
        UsageError: They differ; the message names the first.
    """
    ours = trained_parts(model)
    for key, value in saved["trained_parts"].items():
        is_open = key in ours and ours[key] is None  # the module, once it is built, has the family's choice
        if ours.get(key) != value and not is_open:
            raise UsageError(
                f"resume={path}: {key}={_written(ours.get(key))}, but the checkpoint's run used {key}="
                f"{_written(value)}, which its weights are trained for; write {key}={_written(value)}, or start a new "
                "run from its pipeline with init_from="
            )


def _written(value: Any) -> str:
    """Format a setting as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{each}" for key, each in value.items()) + "}"
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def fingerprints(module: PipelineModule) -> dict[str, str]:
    """Return a digest of the first values of each frozen weight, by network, and by dtype unless it is float32.

    The dtype is that of the file, or what an encoder was cast to since. Networks that are sharded are left out, and
    trained ones that are not in float32: engines round those. A quantised base has a digest of its own.
    """
    model, trained = module.latent_diffusion, module.trained_networks()
    digests = {}
    for name, network in model.networks.items():
        if base := dict(int8_layers(network)):
            digests[f"{name}'s base"] = _base_digest(base, model.originals.get(name))
        weights = {k: p for k, p in network.named_parameters() if name not in trained or not p.requires_grad}
        dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in weights.values()})
        is_float32 = dtypes == ["float32"]
        if not weights or not all(map(is_whole, weights.values())) or (name in trained and not is_float32):
            continue
        deferred = model.deferred.get(name)
        digest = hashlib.sha256()
        for key, weight in weights.items():
            digest.update(bytes_of(_first_values(key, weight.detach(), deferred)))
        if deferred is not None:
            deferred.close()
        digests[name if is_float32 else f"{name} in {' and '.join(dtypes)}"] = digest.hexdigest()
    return digests


def _base_digest(layers: Mapping[str, Int8Layer], originals: DeferredWeights | None) -> str:
    """Return a digest of the first values of quantised layers, or of what they were, if files have that."""
    digest = hashlib.sha256()
    for key, layer in layers.items():
        if originals is None:
            values = torch.cat([_first_values(key, each, None).float() for each in (layer.weight, layer.weight_scale)])
        else:
            values = originals.first(f"{key}.weight", min(_SAMPLE, math.prod(original_shape(layer))))
        digest.update(bytes_of(values))
    if originals is not None:
        originals.close()
    return digest.hexdigest()


def _first_values(key: str, weight: Tensor, deferred: DeferredWeights | None) -> Tensor:
    count = min(_SAMPLE, weight.numel())
    if weight.is_meta and deferred is not None:
        return deferred.first(key, count)
    rows = weight[: -(-count * weight.shape[0] // weight.numel())] if weight.dim() else weight
    return rows.contiguous().reshape(-1)[:count].cpu()


def check_same_frozen(saved: Mapping[str, Any], module: PipelineModule, path: Path) -> None:
    """Check that the frozen weights are those of the checkpoint's run.

    Args:
        saved: The checkpoint's ``trainer.json``.
        module: Module of the run.
        path: The checkpoint.

    Raises:
        UsageError: They differ.
    """
    ours, theirs = fingerprints(module), saved["frozen"]
    differing = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    if differing:
        raise UsageError(
            f"resume={path}: the frozen weights of {', '.join(differing)} are not those that the checkpoint's run "
            "began with, and a checkpoint restores only what is trained; give the model.pretrained= that stands in "
            "that run's config.yaml"
        )


def frozen_weights_file(run_dir: Path, name: str) -> Path:
    """Return the path of the frozen weights of a trained network."""
    return run_dir / "frozen-weights" / f"{name}.safetensors"


def write_frozen_weights(run_dir: Path, module: PipelineModule) -> None:
    """Write the frozen weights of each trained network in float32, before an engine shards or rounds them.

    Deferred weights are copied from their files in slices.

    Raises:
        UsageError: The disk is full.
    """
    for name, network in module.trained_networks().items():
        frozen = {key: p.detach() for key, p in network.named_parameters() if not p.requires_grad}
        if not frozen or not all(is_whole(weight) for weight in frozen.values()):
            continue
        if name in module.latent_diffusion.originals:
            continue  # a quantised base: `write_frozen_parts` copies its files
        deferred = module.latent_diffusion.deferred.get(name)
        path = frozen_weights_file(run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        closed: AbstractContextManager[object] = nullcontext() if deferred is None else closing(deferred)
        with closed, checkpoint.naming_full_disk(run_dir, 0), atomic.new_file(path) as part:
            tensors = {key: _frozen_tensor(key, weight, deferred) for key, weight in frozen.items()}
            write_streamed(part, tensors, dtype=torch.float32)


def _frozen_tensor(key: str, weight: Tensor, deferred: DeferredWeights | None) -> StreamedTensor:
    return deferred.streamed(key) if weight.is_meta and deferred is not None else StreamedTensor.of(weight)


def write_frozen_parts(run_dir: Path, module: PipelineModule) -> None:
    """Save the pipeline without the trained networks' weights; all checkpoints of the run share it.

    What a quantised network was is copied from its files, which may be deleted or changed during the run.
    """
    model, networks = module.latent_diffusion, module.trained_networks()
    with checkpoint.naming_full_disk(run_dir, 0), atomic.new_folder(run_dir / "frozen") as tmp:
        model.save_pretrained(tmp, skip=tuple(networks))
        for name, files in model.originals.items():
            plain = weight_names(networks[name])
            keys = model.components[name].file_keys(plain)
            with closing(files):
                path = tmp / name / model.components[name].weights_file
                write_streamed(path, {keys[key]: files.streamed(live) for key, live in plain.items()})


def write_pipeline(run_dir: Path, tmp: Path, module: PipelineModule, *, averaged: bool) -> dict[str, str]:
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
        weights = {
            name: _Weights(store, run_dir, name, network, averaged, component_of[name])
            for name, network in networks.items()
        }
        atomic.hard_link_tree(run_dir / "frozen", tmp / "pipeline")
        for name, network in networks.items():
            file = Path(name, component_of[name].weights_file)
            plain, keys = weights[name].plain, weights[name].keys
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
            base = {k: v for name, each in networks.items() for k, v in weights[name].base_values(name, each).items()}
            digests[path] = lora.write(tmp / path, adapters, component_of, base_values=base)
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
    """Weights of one trained network, from the saved state, files that the run has written, or the live module."""

    def __init__(
        self,
        store: ShardedTensors,
        run_dir: Path,
        name: str,
        network: nn.Module,
        averaged: bool,
        component: Component,
    ) -> None:
        self._store = store
        self._prefix = f"{'ema' if averaged else 'master'}/{name}."
        frozen = frozen_weights_file(run_dir, name)
        self._frozen = load_file(frozen) if frozen.exists() else {}  # memory-mapped
        # Names and shapes of what Gemini has in chunks.
        self.state: Mapping[str, Tensor] = network.state_dict(keep_vars=True)
        self._base = {f"{key}.weight": layer for key, layer in int8_layers(network)}
        self.plain = weight_names(network)
        self.keys = component.file_keys(self.plain)
        shared = run_dir / "frozen" / name / component.weights_file
        stored = file_tensors(shared) if shared.exists() else {}
        self._shared = {live: stored[self.keys[plain]] for plain, live in self.plain.items() if stored}

    def is_trained(self, key: str) -> bool:
        return self._prefix + key in self._store

    def source(self, key: str) -> StreamedTensor:
        if self.is_trained(key):
            return self._store.streamed(self._prefix + key)
        if key in self._shared:
            return self._shared[key]
        if key in self._base:  # there are no files: what quantisation has left
            layer = self._base[key]
            values = partial(layer.dequantized, torch.float32)
            return StreamedTensor.of(values, torch.float32, original_shape(layer))
        return StreamedTensor.of(self._kept(key))

    def read(self, key: str) -> Tensor:
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
            key: StreamedTensor.of(partial(merged, self.read), source.dtype, tuple(source.shape))
            for key, merged in adapted_weights(network).items()
            for source in [self.source(key)]
        }

    def base_values(self, name: str, network: nn.Module) -> dict[str, list[float]]:
        """Return the first values of some weights that have adapters, by network and plain name."""
        adapted = adapted_weights(network)
        plain = [key for key, live in self.plain.items() if live in adapted]
        chosen = plain[:: -(-len(plain) // _BASE_WEIGHTS) or 1]
        first = {key: next(self.source(self.plain[key]).slices()).reshape(-1)[:_BASE_VALUES].tolist() for key in chosen}
        return {f"{name}.{key}": [float(f"{value:.5g}") for value in values] for key, values in first.items()}

    def adapters(self) -> dict[str, Tensor]:
        return {key: self.read(key) for key in self.state if is_adapter(key)}

    def _kept(self, key: str) -> Tensor:
        """Return a frozen weight or a buffer: neither is in the store."""
        return self._frozen.get(key, self.state[key])
