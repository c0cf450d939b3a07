"""The parts of a model: build them, load them from a pipeline folder of diffusers, and save them in one."""

from __future__ import annotations

import contextlib
import copy
import filecmp
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models import families
from sd_lightning.models.components import (
    defer_int8_network,
    defer_network,
    fill_shipped_,
    load_network,
    load_tokenizer,
    meta_network,
    no_progress_bar,
    stored_int8,
)
from sd_lightning.models.families import Architecture, Component, Family, contradiction, family_of
from sd_lightning.models.families.sampling import scheduler_names
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora import (
    Adapters,
    adapted_weights,
    add_adapter_,
    layer_adapters,
    merged_state_dict,
    on_host,
)
from sd_lightning.models.lora_base import compare_bases
from sd_lightning.models.lora_file import LoraFile, check_settings
from sd_lightning.models.lora_formats import Shapes, read_adapters
from sd_lightning.models.pipeline_folder import (
    find_configs,
    find_folder,
    first_line,
    parts_in,
    read_component,
    read_json,
    write_json,
)
from sd_lightning.quantization.int8 import int8_config, int8_record
from sd_lightning.quantization.layers import int8_layers
from sd_lightning.quantization.tensor_parallel import Plan, check_is_whole
from sd_lightning.storage.deferred_weights import Change, DeferredWeights
from sd_lightning.storage.streamed_tensor import write_tensors

ASSETS = Path(__file__).parent / "assets"
TINY_VAE, TINY_TOKENIZER = ASSETS / "tiny" / "vae", ASSETS / "tiny" / "tokenizer"
"""Files of the ``tiny`` model that ship with the package; ``tests/support/make_tiny.py`` makes them."""


@dataclass(eq=False, repr=False)
class PipelineParts:
    """The parts of a pipeline, and the record of each one's class and configuration."""

    networks: dict[str, nn.Module]
    """By the family's names."""
    tokenizers: dict[str, Any]
    """Tokenizers and image processors, by the family's names."""
    components: dict[str, Component]
    """One record per network, and one for "scheduler". Export takes class names from it, because sharding engines
    replace the classes of live networks."""
    pipeline_class: str
    """Class of the diffusers pipeline; selects the family."""
    pipeline_options: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the pipeline that are not parts."""
    deferred: dict[str, DeferredWeights] = field(default_factory=dict)
    """Unread weights of networks on the meta device; an entry is removed when it is read."""
    originals: dict[str, DeferredWeights] = field(default_factory=dict)
    """The files of networks that were quantised to train adapters on them, for pipelines that are exported."""
    defer_denoiser: Callable[[], tuple[nn.Module, Component, DeferredWeights]] | None = None
    """Defers a denoiser that is in memory again; None if no files have its weights."""

    def __post_init__(self) -> None:
        self.pipeline_options = {**self.family.pipeline_options, **self.pipeline_options}

    @property
    def family(self) -> Family:
        """The kind of model.

        Raises:
            UsageError: No family has that pipeline.
        """
        return family_of(self.pipeline_class, who="LatentDiffusion").of_options(self.pipeline_options)

    def layer_keys(self, network: str) -> dict[str, str]:
        """Map names in memory of a network's linear and convolutional layers to those in its weight file."""
        modules = self.networks[network].named_modules()
        names = [f"{key}.weight" for key, module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
        keys = self.components[network].file_keys(names)
        return {name.removesuffix(".weight"): keys[name].removesuffix(".weight") for name in names}

    def tensor_parallel_plan(self, name: str) -> Plan:
        """Return what of a network several processes divide; see :meth:`Family.tensor_parallel_plan`."""
        return self.family.tensor_parallel_plan(name, self.networks[name])

    def pipeline(self, *, scheduler: str | None = None) -> Any:
        """Return a diffusers pipeline that uses these networks (no copies).

        Args:
            scheduler: Class name or short name ("ddim", "euler", "dpmsolver++", …) of another scheduler.
        """
        none = dict.fromkeys((*self.family.absent, *self.family.parts))
        pipeline = self.family.pipeline_type()(
            **{**none, **self.networks, **self.family.for_pipeline(self.tokenizers), **self.pipeline_options},
            scheduler=self.family.sampling_scheduler(self.components["scheduler"], scheduler),
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def build_parts(architecture: str | Architecture, *, seed: int, device: str | torch.device) -> PipelineParts:
    """Build a model from its configuration, with random weights; see :meth:`LatentDiffusion.build`."""
    by_name = isinstance(architecture, str)
    if isinstance(architecture, str):
        architecture = families.architecture(architecture)
    family = family_of(architecture.pipeline_class, who="LatentDiffusion.build")
    components = dict(copy.deepcopy(architecture.networks))  # the model may change its own record
    tokenizers = family.processors(components)
    for name in family.text_encoders:
        part = family.parts[family.tokenizer_of(name)]
        tokenizer = (
            Component(part.library, part.loads or part.classes[0])
            .load_class()
            .from_pretrained(TINY_TOKENIZER, model_max_length=architecture.length_of(name))
        )
        family.adapt(tokenizer)
        tokenizers[family.tokenizer_of(name)] = tokenizer
        ids = {f"{t}_token_id": getattr(tokenizer, f"{t}_token_id") for t in ("bos", "eos", "pad")}
        config = components[name].config
        config = config.get("text_config", config)
        config.update({"vocab_size": len(tokenizer), **config, **ids})
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        networks = {name: component.instantiate() for name, component in components.items()}
        for name in family.text_encoders if architecture.is_tiny else ():
            nn.init.normal_(networks[name].get_input_embeddings().weight)  # type: ignore[operator]
    if by_name and architecture.is_tiny and torch.device(device).type != "meta":
        components["vae"] = fill_shipped_(
            networks["vae"], components["vae"], TINY_VAE.with_name(architecture.shipped_vae)
        )
    components["scheduler"] = architecture.scheduler
    options = dict(architecture.pipeline_options)
    return PipelineParts(networks, tokenizers, components, architecture.pipeline_class, options)


def load_parts(
    pretrained: str | Path,
    *,
    revision: str | None,
    variant: str | None,
    vae: str | Path | None,
    deferred: Sequence[str],
    lora: Path | None = None,
    lora_weight: float | None = None,
) -> PipelineParts:
    """Load a pipeline in the diffusers layout; see :meth:`LatentDiffusion.from_pretrained`."""
    root = find_folder(pretrained, revision=revision, variant=variant)
    weights: dict[str, DeferredWeights] = {}
    unread: dict[str, Callable[[], tuple[nn.Module, Component, DeferredWeights]]] = {}
    bases: dict[Path, dict[str, list[float]]] = {}
    adapters: dict[str, dict[str, list[Change]]] = {}
    """By network and weight."""
    files = [root / LORA_NAME] if (root / LORA_NAME).is_file() else []
    if files and lora is not None and lora.is_file() and filecmp.cmp(lora, files[0], shallow=False):
        raise UsageError(f"lora={lora}: {root} has these adapters already; leave lora out")
    files += [] if lora is None else [lora]
    if lora_weight is not None and not files:
        raise UsageError(
            f"lora_weight={lora_weight}: {root} has no {LORA_NAME}: it was trained without adapters, or these are "
            "merged already; leave lora_weight out, or give a LoRA file or run with lora="
        )
    if files:  # before weights are read
        on_meta = _from_folder(root, lambda name, part, _: meta_network(part, root / name))
        for file in files:
            bases[file] = check_settings(file)
            for name, layers in read_lora(on_meta, file, f"lora={lora}" if file == lora else str(file)).items():
                each: Any
                for layer, each in layers.items():
                    weighted = each if file != files[-1] or lora_weight is None else replace(each, strength=lora_weight)
                    adapters.setdefault(name, {}).setdefault(f"{layer}.weight", []).append(weighted)
    is_dora = any(each.magnitude is not None for several in adapters.values() for s in several.values() for each in s)

    def load(name: str, component: Component, family: Family) -> tuple[nn.Module, Component]:
        if name == "vae" and vae is not None:
            return load_network(component, Path(vae))
        if (int8 := stored_int8(root / name)) is not None:
            if files:
                who = str(files[0]) if lora is None else f"lora={lora}"
                raise UsageError(
                    f"{who}: the weights of {root} are in int8, to which adapters cannot be added; expected adapters "
                    "of weights in floating point; give the pipeline that it was made from, with quantization=int8"
                    + (", or move that file away" if lora is None else "")
                )
            network, described, stored = defer_int8_network(component, root / name, int8, family, variant=variant)
            if name in family.named(deferred):
                weights[name] = stored
            else:
                stored.fill_(network, torch.device("cpu"))
            return network, described
        if not is_dora:
            unread[name] = partial(_defer, component, root / name, variant, bases, adapters.get(name, {}))
            if name in family.named(deferred):
                network, described, weights[name] = unread[name]()
                return network, described
        network, described = load_network(component, root / name, variant=variant, as_saved=name in family.frozen)
        compare_bases(bases, root, name, network, None)
        for weight, several in adapters.get(name, {}).items():
            for each in several:
                add_adapter_(network.get_parameter(weight).data, each)
        return network, described

    parts = _from_folder(root, load)
    parts.deferred, parts.defer_denoiser = weights, unread.get(parts.family.denoiser)
    return parts


def _defer(
    component: Component,
    folder: Path,
    variant: str | None,
    bases: Mapping[Path, Mapping[str, Sequence[float]]],
    adapters: Mapping[str, Sequence[Change]],
) -> tuple[nn.Module, Component, DeferredWeights]:
    """Defer a network, with adapters merged in."""
    network, described, stored = defer_network(component, folder, variant=variant)
    compare_bases(bases, folder.parent, folder.name, network, stored)
    return network, described, stored.with_adapters(adapters)


def describe_parts(pretrained: str | Path, *, revision: str | None, vae: str | Path | None) -> PipelineParts:
    """Build the networks of a pipeline on the meta device; see :meth:`LatentDiffusion.describe`."""
    root = find_configs(pretrained, revision=revision)
    return _from_folder(
        root, lambda name, part, _: meta_network(part, root / name if vae is None or name != "vae" else Path(vae))
    )


def save_parts(parts: PipelineParts, folder: Path, *, skip: Sequence[str]) -> None:
    """Write a pipeline folder in the diffusers layout (safetensors); see :meth:`LatentDiffusion.save_pretrained`."""
    check_is_whole(parts.networks, "LatentDiffusion.save_pretrained")
    written = {name: each for name, each in parts.networks.items() if name not in skip and any(int8_layers(each))}
    names = [name for name, each in written.items() if adapted_weights(each) or int8_config(each) is None]
    if names:
        raise UsageError(
            f"LatentDiffusion.save_pretrained: {', '.join(names)} is quantised, with LoRA on top or for it; after a "
            "training give the trainer PortableCheckpoint(run_dir) among its callbacks, and take the folder pipeline/ "
            "of its checkpoint; otherwise save the model with LoRA first, then load and quantize_ it"
        )
    family = parts.family
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokenizer in parts.tokenizers.items():
        tokenizer.save_pretrained(folder / name)
        for file, content in getattr(tokenizer, "processor_files", {}).items():
            (folder / name / file).write_text(content)
    index: dict[str, Any] = {"_class_name": parts.pipeline_class, "_diffusers_version": version("diffusers")}
    index |= dict.fromkeys((*family.absent, *family.parts), [None, None])
    index |= {name: family.parts[name].record_of(tokenizer) for name, tokenizer in parts.tokenizers.items()}
    index |= parts.pipeline_options
    for name, component in parts.components.items():
        index[name] = [component.library, component.class_name]
        (folder / name).mkdir(exist_ok=True)
        network = parts.networks.get(name)
        file = "scheduler_config.json" if network is None else "config.json"
        write_json(folder / name / file, component.saved_config() | ({} if network is None else int8_record(network)))
        if network is not None and name not in skip:
            state = merged_state_dict(network)
            _check_is_in_memory(name, state)
            keys = component.file_keys(state)
            write_tensors(folder / name / component.weights_file, {keys[k]: v for k, v in state.items()})
    write_json(folder / "model_index.json", index)


def check_pretrained(architecture: str, pretrained: str, *, revision: str | None = None) -> None:
    """Check from its configuration files that a pipeline fits ``model=`` and can be trained.

    Raises:
        UsageError: It belongs to another ``model=``, its weights are in int8, or it does not exist.
    """
    families.architecture(architecture, who="model")
    root = find_configs(pretrained, revision=revision)
    index = read_json(root / "model_index.json")
    family = family_of(str(index.get("_class_name")), who=str(root))
    denoiser = read_json(root / family.denoiser / "config.json")
    found = contradiction(architecture, family.pipeline_class, denoiser)
    if found is not None:
        raise UsageError(f"model={architecture}, but {pretrained} holds {found[0]}; write model={found[1]}")
    if index.get(family.distilled_by):
        raise UsageError(
            f"model.pretrained={pretrained}: its model_index.json has {family.distilled_by}: it draws in few steps "
            f"without guidance, which training would undo; train {family.base_checkpoint}"
        )
    if any(stored_int8(root / name) for name in parts_in(index, family) if name in family.networks):
        raise UsageError(
            f"model.pretrained={pretrained}: its weights are in int8, which cannot be trained, nor quantised again; "
            "give the pipeline that it was made from, for adapters on int8 weights with trainable=lora base=int8"
        )


def _from_folder(root: Path, load: Callable[[str, Component, Family], tuple[nn.Module, Component]]) -> PipelineParts:
    """Read a pipeline folder; ``load`` builds each network from name, record and family."""
    index = read_json(root / "model_index.json")
    family = family_of(str(index.get("_class_name")), who=str(root))
    scheduler = read_scheduler(root / "scheduler" / "scheduler_config.json")
    records = {name: read_component(index, name, family, root) for name in parts_in(index, family)}
    tokenizers = {name: load_tokenizer(root / name, records[name]) for name in records if name not in family.networks}
    for name, tokenizer in tokenizers.items():
        if family.chat_template is not None and tokenizer.chat_template is None:
            raise UsageError(
                f"{root / name}: the tokenizer has no chat template, which a {family.pipeline_class} needs; "
                "copy its chat_template.jinja, too"
            )
    loaded = {name: load(name, records[name], family) for name in family.networks if name in records}
    return PipelineParts(
        networks={name: network for name, (network, _) in loaded.items()},
        tokenizers=tokenizers,
        components={**{name: component for name, (_, component) in loaded.items()}, "scheduler": scheduler},
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


def read_lora(parts: PipelineParts, file: Path, who: str) -> Adapters:
    """Return the adapters of a LoRA file of any format, by network and by the layer's name in memory.

    Args:
        parts: A model without adapters, on the meta device.
        file: The file.
        who: What errors begin with.

    Raises:
        UsageError: The file is damaged, of another model, or of another kind of adapters.
    """
    check_settings(file)
    stored, metadata = load_file(file), LoraFile.read(file).metadata
    shapes = {name: {k: tuple(v.shape) for k, v in each.named_parameters()} for name, each in parts.networks.items()}
    keys = {name: parts.layer_keys(name) for name in parts.family.trainable if name in parts.networks}
    of_file = {name: {key: shapes[name][f"{live}.weight"] for live, key in each.items()} for name, each in keys.items()}
    found = read_adapters(stored, metadata, of_file, parts.family)
    if found is not None:
        return {n: {live: layers[key] for live, key in keys[n].items() if key in layers} for n, layers in found.items()}
    try:
        return _read_by_diffusers(parts, file, stored, shapes)
    except Exception as error:  # values of unexpected types raise anything
        raise UsageError(
            f"{who}: {_origin(stored, metadata)}; expected adapters of layers of this {parts.pipeline_class} "
            f"({first_line(error)}); give a file of this model, or the model that the file is of, copy the file again "
            "if it is damaged, or delete it if it lies in the model's folder"
        ) from error


def _read_by_diffusers(
    parts: PipelineParts, file: Path, stored: Mapping[str, torch.Tensor], shapes: Shapes
) -> Adapters:
    """Return the adapters of a file with names that only diffusers knows.

    Raises:
        ValueError: Some have no layer of their shape: diffusers would leave them out.
    """
    if any("dora_scale" in key for key in stored):
        raise ValueError("DoRA with names that diffusers reads without its magnitudes")
    pipeline = parts.pipeline()
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_progress_bar())
        for network in parts.networks.values():
            stack.enter_context(on_host(network))
        pipeline.load_lora_weights(file.parent, weight_name=file.name, use_safetensors=True)
    found = {name: layers for name, each in parts.networks.items() if (layers := layer_adapters(each))}
    pipeline.unload_lora_weights()
    for name, layer, each in ((name, *item) for name, layers in found.items() for item in layers.items()):
        shape = shapes[name][f"{layer}.weight"]
        if (each.up.shape[0], *each.down.shape[1:]) != shape:
            raise ValueError(f"{name}.{layer} has the shape {shape}")
    # Joined layers are several in diffusers, with as many rows in all.
    rows = sum(each.shape[0] for key, each in stored.items() if _UP_PROJECTION.search(key))
    missing = rows - sum(len(each.up) for layers in found.values() for each in layers.values())
    if missing > 0 or not rows:
        raise ValueError(f"{missing} of the {rows} rows of its up projections are of layers that the model has not")
    return {name: {**layers} for name, layers in found.items()}


_UP_PROJECTION = re.compile(r"lora(_B|[._]up)(\.default)?\.weight$")


def _origin(stored: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return the model that adapters are of, by the layers of the denoiser, or by what the file's header says."""
    for family in families.FAMILIES.values():
        own = {key: each for key, each in stored.items() if key.startswith((f"{family.denoiser}.", "lora_unet_"))}
        for name, architecture in family.architectures.items() if own else ():
            with torch.device("meta"):
                weights = architecture.networks[family.denoiser].instantiate().named_parameters()
            shapes = {family.denoiser: {key.removesuffix(".weight"): tuple(each.shape) for key, each in weights}}
            if read_adapters(own, metadata, shapes, family):
                return f"these are adapters of model={name}"
    told = metadata.get("modelspec.architecture") or metadata.get("ss_base_model_version")
    return f"its header says {told[:80]}" if told else "it has no adapters of a model that is known here"


def _check_is_in_memory(network: str, state: Mapping[str, torch.Tensor]) -> None:
    """Raise if an engine has freed the memory of weights."""
    for name, tensor in state.items():
        if tensor.is_meta:
            raise UsageError(
                f"save_pretrained: {network}.{name} has no values in memory: they were not read, or nothing needs them "
                "in this run; load the pipeline again with LatentDiffusion.from_pretrained"
            )
        if type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UsageError(
                f"save_pretrained: {network}.{name} is in shards of the training strategy; use the folder pipeline/ of "
                "a checkpoint, or call trainer.strategy.engine.restore() in every process before"
            )
