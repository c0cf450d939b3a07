"""Building, loading and saving of :class:`LatentDiffusion` in the diffusers folder layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models import assets, families
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.adapters.lora import adapted_weights, merged_state_dict
from sd_lightning.models.adapters.lora_file import check_settings
from sd_lightning.models.components import (
    defer_network,
    instantiate,
    load_network,
    load_tokenizer,
    meta_network,
    no_progress_bar,
)
from sd_lightning.models.families import Architecture, Component, Family, contradiction, family_of
from sd_lightning.models.families.sampling import scheduler_names
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.pipeline_folder import (
    check_unused,
    file_keys,
    find_configs,
    find_folder,
    first_line,
    read_component,
    read_json,
    saved_config,
    weights_file,
    write_json,
)
from sd_lightning.quantization.folder import load_int8_network, stored_int8
from sd_lightning.quantization.model import int8_config, int8_record
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.streamed_tensor import write_tensors


def build(architecture: str | Architecture, *, seed: int = 0, device: str | torch.device = "cpu") -> LatentDiffusion:
    """Build a model from its configuration, with random weights.

    The ``tiny`` model gets the trained VAE that ships with the package. Nothing is downloaded, so there is no CLIP
    vocabulary: every architecture gets the shipped byte-level tokenizer.

    Args:
        architecture: "tiny", "sd15", "sd21", "sdxl" or an :class:`Architecture`.
        seed: Seed of the random weights; the global generator is not changed.
        device: Device of the weights; "meta" allocates none.

    Raises:
        UsageError: The name is not known.
    """
    from transformers import CLIPTokenizer

    is_tiny = architecture == "tiny"
    if isinstance(architecture, str):
        architecture = families.architecture(architecture, who="LatentDiffusion.build")
    family = family_of(architecture.pipeline_class, who="LatentDiffusion.build")
    components = dict(copy.deepcopy(architecture.networks))  # the model may change its own record
    tokenizers: dict[str, Any] = {}
    for name in family.text_encoders:
        tokenizer = CLIPTokenizer.from_pretrained(assets.TINY_TOKENIZER, model_max_length=architecture.length_of(name))
        tokenizers[family.tokenizer_of(name)] = tokenizer
        ids = {f"{t}_token_id": getattr(tokenizer, f"{t}_token_id") for t in ("bos", "eos", "pad")}
        config = {"vocab_size": len(tokenizer), **components[name].config, **ids}
        components[name] = replace(components[name], config=config)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        networks = {name: instantiate(component) for name, component in components.items()}
        if architecture.token_embedding_std is not None:
            embedding = networks["text_encoder"].get_input_embeddings().weight  # type: ignore[operator]
            nn.init.normal_(embedding, std=architecture.token_embedding_std)
    if is_tiny and torch.device(device).type != "meta":
        networks["vae"], components["vae"] = load_network(components["vae"], assets.TINY_VAE)
    return LatentDiffusion(
        networks,
        tokenizers=tokenizers,
        components={**components, "scheduler": architecture.scheduler},
        pipeline_class=architecture.pipeline_class,
    )


def from_pretrained(
    pretrained_model_name_or_path: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    vae: str | Path | None = None,
    deferred: Sequence[str] = (),
) -> LatentDiffusion:
    """Load a pipeline in the diffusers layout, in float32, or in int8 if it was saved in int8.

    LoRA adapters that a run with ``trainable=lora`` saved in the folder are merged into the weights.

    Args:
        pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
        revision: Branch, tag or commit on the hub.
        variant: File variant, e.g. "fp16".
        vae: Another VAE (a folder or repository id), e.g. "madebyollin/sdxl-vae-fp16-fix".
        deferred: Networks to build on the meta device. They cannot compute until a trainer is set up, when each
            process reads the weights that it keeps. Names of networks, "denoiser", "text_encoders" or "all"; names
            that the pipeline does not have are ignored.

    Raises:
        UsageError: The pipeline does not exist, or a part of it is missing or unreadable.
    """
    root = find_folder(pretrained_model_name_or_path, revision=revision, variant=variant)
    weights: dict[str, DeferredWeights] = {}
    adapters = (root / LORA_NAME).is_file()

    def load(name: str, component: Component, family: Family) -> tuple[nn.Module, Component]:
        if name == "vae" and vae is not None:
            return load_network(component, Path(vae))
        if (int8 := stored_int8(root / name)) is not None:
            return load_int8_network(component, root / name, int8, overflows=family.vae_overflows, variant=variant)
        if name in family.named(deferred) and not adapters:
            network, described, weights[name] = defer_network(component, root / name, variant=variant)
            return network, described
        return load_network(component, root / name, variant=variant)

    model = _from_folder(root, load)
    model.deferred = weights
    if adapters:
        _add_adapters(model, root)
    return model


def describe(
    pretrained_model_name_or_path: str | Path, *, revision: str | None = None, vae: str | Path | None = None
) -> LatentDiffusion:
    """Build the networks of a pipeline on the meta device, from its configuration files alone.

    Args:
        pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
        revision: Branch, tag or commit on the hub.
        vae: Another VAE (a folder or repository id).

    Raises:
        UsageError: The pipeline does not exist, or a part of it is missing or unreadable.
    """
    root = find_configs(pretrained_model_name_or_path, revision=revision)
    return _from_folder(
        root, lambda name, part, _: meta_network(part, root / name if vae is None or name != "vae" else Path(vae))
    )


def save_pretrained(model: LatentDiffusion, folder: str | Path, *, skip: Sequence[str] = ()) -> None:
    """Write a pipeline folder in the diffusers layout (safetensors).

    Args:
        model: The model.
        folder: Folder to write into; created if it does not exist.
        skip: Networks whose weights are not written (their configuration is).

    Raises:
        UsageError: Weights are deferred, sharded by a strategy, or in int8 with LoRA on top.
    """
    model.check_is_read("save_pretrained", skip=skip)
    _check_can_merge(model)
    folder, family = Path(folder), model.family
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokenizer in model.tokenizers.items():
        tokenizer.save_pretrained(folder / name)
    index: dict[str, Any] = {"_class_name": model.pipeline_class, "_diffusers_version": version("diffusers")}
    index |= dict.fromkeys(family.absent, [None, None])
    index |= {name: [family.parts[name].library, family.parts[name].classes[0]] for name in model.tokenizers}
    index |= model.pipeline_options
    for name, component in model.components.items():
        index[name] = [component.library, component.class_name]
        (folder / name).mkdir(exist_ok=True)
        record = int8_record(model.networks[name]) if name in model.networks else {}
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        write_json(folder / name / file, saved_config(component) | record)
        if name in model.networks and name not in skip:
            state = merged_state_dict(model.networks[name])
            _check_is_in_memory(name, state)
            keys = file_keys(component, state)
            write_tensors(folder / name / weights_file(component), {keys[k]: v for k, v in state.items()})
    write_json(folder / "model_index.json", index)


def load_model(
    *,
    architecture: str,
    pretrained: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    vae: str | None = None,
    seed: int = 0,
    fresh_denoiser: bool = False,
    deferred: Sequence[str] = (),
) -> LatentDiffusion:
    """Load the ``pretrained`` weights if given, otherwise build the architecture with random weights.

    ``deferred`` and ``fresh_denoiser``, which gives the denoiser random weights, apply to pretrained weights only.

    Raises:
        UsageError: Options of pretrained weights are given without ``pretrained``, or :func:`check_pretrained`,
            :func:`build` or :func:`from_pretrained` raises.
    """
    if pretrained is not None:
        check_pretrained(architecture, pretrained, revision=revision)
        unread = (*deferred, "denoiser") if fresh_denoiser else deferred
        model = from_pretrained(pretrained, revision=revision, variant=variant, vae=vae, deferred=unread)
        if fresh_denoiser:
            name = model.family.denoiser
            model.networks[name] = instantiate(model.components[name], seed=seed)
            model.deferred.pop(name, None)
        return model
    check_unused(revision=revision, variant=variant, vae=vae, fresh_denoiser=fresh_denoiser)
    return build(architecture, seed=seed)


def check_pretrained(architecture: str, pretrained: str, *, revision: str | None = None) -> None:
    """Check from its configuration files that a pipeline fits ``model=`` and can be trained.

    Raises:
        UsageError: It belongs to another ``model=``, its weights are in int8, or it does not exist.
    """
    families.architecture(architecture, who="model")
    root = find_configs(pretrained, revision=revision)
    family = family_of(str(read_json(root / "model_index.json").get("_class_name")), who=str(root))
    denoiser = read_json(root / family.denoiser / "config.json")
    found = contradiction(architecture, family.pipeline_class, denoiser)
    if found is not None:
        raise UsageError(f"model={architecture}, but {pretrained} holds {found[0]}; write model={found[1]}")
    if any(stored_int8(root / name) for name in family.networks):
        raise UsageError(
            f"model.pretrained={pretrained}: its weights are in int8, which cannot be trained; give the pipeline that "
            "it was made from"
        )


def _from_folder(root: Path, load: Callable[[str, Component, Family], tuple[nn.Module, Component]]) -> LatentDiffusion:
    """Build a model from a pipeline folder; ``load`` builds each network from name, record and family."""
    index = read_json(root / "model_index.json")
    family = family_of(str(index.get("_class_name")), who=str(root))
    scheduler = read_scheduler(root / "scheduler" / "scheduler_config.json")
    records = {name: read_component(index, name, family, root) for name in family.parts}
    networks: dict[str, nn.Module] = {}
    components: dict[str, Component] = {}
    for name in family.networks:
        networks[name], components[name] = load(name, records[name], family)
    components["scheduler"] = scheduler
    tokenizers = {name: load_tokenizer(root / name, records[name]) for name in records if name not in networks}
    return LatentDiffusion(
        networks,
        tokenizers=tokenizers,
        components=components,
        pipeline_class=family.pipeline_class,
        pipeline_options={key: index.get(key, absent) for key, absent in family.stored_options.items()},
    )


def read_scheduler(file: Path) -> Component:
    """Read a scheduler's record; its class is one of diffusers' schedulers.

    Raises:
        UsageError: It names another class, a value is of another kind, or the file is missing or damaged.
    """
    config = read_json(file)
    for key, kinds in _OF_SCHEDULER.items():
        if not isinstance(config.get(key, kinds[0]()), kinds):
            raise UsageError(
                f"{file}: {key}={config[key]!r}; expected a value of the kind {kinds[0].__name__}; copy or download "
                "that file again"
            )
    name = config.pop("_class_name", None)
    if not isinstance(name, str) or name not in scheduler_names():
        raise UsageError(
            f"{file}: _class_name is {name!r}; expected a scheduler of diffusers, such as DDIMScheduler; copy or "
            "download that file again"
        )
    return Component("diffusers", name, config)


_OF_SCHEDULER: dict[str, tuple[type, ...]] = {
    "num_train_timesteps": (int,),
    "beta_start": (float, int),
    "beta_end": (float, int),
    "beta_schedule": (str,),
    "prediction_type": (str,),
}
"""Values that we read ourselves."""


def _add_adapters(model: LatentDiffusion, folder: Path) -> None:
    """Merge the adapters of ``pytorch_lora_weights.safetensors`` into the weights."""
    check_settings(folder / LORA_NAME)
    pipeline: Any = model.pipeline()
    try:
        with no_progress_bar():
            pipeline.load_lora_weights(folder, weight_name=LORA_NAME, use_safetensors=True)
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
    except Exception as error:  # values of unexpected types raise anything
        raise UsageError(
            f"{folder / LORA_NAME}: these adapters do not fit the model beside them ({first_line(error)}); copy the "
            "file again, or delete it to load the model without"
        ) from error


def _check_can_merge(model: LatentDiffusion) -> None:
    """Raise if a network in int8 has LoRA adapters: they cannot be merged into int8 weights."""
    names = sorted(n for n, network in model.networks.items() if int8_config(network) and adapted_weights(network))
    if names:
        raise UsageError(
            f"LatentDiffusion.save_pretrained: {', '.join(names)} in int8 with LoRA on top; save the model with "
            "LoRA first, then load and quantize_ it, or take LoRA off"
        )


def _check_is_in_memory(network: str, state: Mapping[str, torch.Tensor]) -> None:
    """Raise if an engine has freed the memory of weights."""
    for name, tensor in state.items():
        if type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UsageError(
                f"save_pretrained: {network}.{name} is in shards of the training strategy; use the folder pipeline/ of "
                "a checkpoint, or call trainer.strategy.engine.restore() in every process before"
            )
