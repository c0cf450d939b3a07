"""Export of a trained model, as a pipeline folder or as one file.

It works on files only: it needs neither the strategy nor the world size of the run, builds no network, and holds at
most a few slices of a tensor in memory.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning.apps import hub
from sd_lightning.models.components import refuse_int8
from sd_lightning.models.families import Component, Family, family_of
from sd_lightning.models.families.lora_names import FrontEnd
from sd_lightning.models.families.single_file import layout_of, model_spec, original_tensors
from sd_lightning.models.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora import is_adapter, plain_names
from sd_lightning.models.lora_file import LoraFile
from sd_lightning.models.lora_formats import FILE_NAME as LORA_FILE_NAME
from sd_lightning.models.lora_formats import front_end_metadata, front_end_tensors
from sd_lightning.models.lycoris import by_layer
from sd_lightning.models.pipeline_folder import parts_in, read_component, read_json, write_json
from sd_lightning.quantization.int8 import read_record
from sd_lightning.storage import atomic, checkpoint, far_runs, runs, streamed_tensor
from sd_lightning.storage.atomic import check_new_folder, complete_or_absent
from sd_lightning.storage.streamed_tensor import StreamedTensor, converted_dtype, write_streamed
from sd_lightning.storage.tensor_store import ShardedTensors

if TYPE_CHECKING:
    from omegaconf import DictConfig

Format = Literal["diffusers", "single_file", "ema", "non_ema", FrontEnd]
Dtype = Literal["float32", "bfloat16", "float16"]

SINGLE_FILE_NAME = "model.safetensors"

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".msgpack")


@dataclass(frozen=True)
class ExportRequest:
    """Settings of the export; ``conf/export.yaml`` explains the keys."""

    run: str
    format: Format = "diffusers"
    output_dir: str = "exported"
    merge_lora: bool = False
    dtype: Dtype | None = None
    push_to_hub: str | None = None
    hub_private: bool = True

    @property
    def front_end(self) -> FrontEnd | None:
        """The program that reads the LoRA file, of the formats that write nothing else."""
        return next((each for each in get_args(FrontEnd) if each == self.format), None)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)


@dataclass(frozen=True)
class ExportSource:
    """Location of a model to export."""

    pipeline: Path
    """Folder in the diffusers layout; a checkpoint's has the averaged weights if there is an EMA."""
    checkpoint: Path | None = None
    """The checkpoint that contains it; None for a separate pipeline folder."""

    @property
    def run_dir(self) -> Path | None:
        """The run that it lies in, if it lies in one."""
        return runs.run_of(self.pipeline)


@dataclass(frozen=True)
class Network:
    """One network of a model."""

    component: Component
    """Its component, with the configuration from its file."""
    tensors: dict[str, StreamedTensor]
    """Tensors by the keys of the weight file."""
    is_source: bool = True
    """Whether the tensors are those of the source's pipeline."""

    def stays(self, dtype: torch.dtype | None) -> bool:
        """Return whether the weight file can be used unchanged."""
        return self.is_source and all(converted_dtype(t, dtype) == t.dtype for t in self.tensors.values())

    def changed(self, tensors: Mapping[str, StreamedTensor]) -> Network:
        """Return the network with some tensors replaced; itself if there are none."""
        return replace(self, tensors=self.tensors | dict(tensors), is_source=False) if tensors else self


@dataclass(frozen=True)
class Model:
    """Model to export."""

    networks: dict[str, Network]
    adapters: LoraFile | None = None
    """Adapters of a LoRA run, unless they are merged into the networks."""
    word: Path | None = None
    """File of a learned word's embedding, unless the text encoders hold another one."""


def run(cfg: DictConfig) -> int:
    """Export a model; the output folder is written under a temporary name and renamed when complete."""
    request: ExportRequest = _conf.instantiate(cfg)
    output_dir = check_new_folder(request.output_dir, key="output_dir")
    source = find_source(request.run)
    if request.push_to_hub is not None:
        hub.check(request.push_to_hub, source.run_dir, private=request.hub_private)
    write = {"single_file": write_single_file, request.front_end: write_lora}.get(request.format, write_pipeline)
    with ExitStack() as opened:
        model = read_model(source, request, opened)
        with complete_or_absent(output_dir, setting=f"output_dir={request.output_dir}") as folder:
            write(source, model, folder, request)
    size = sum(file.stat().st_size for file in output_dir.rglob("*") if file.is_file())
    print(f"{far_runs.name_of(source.checkpoint or source.pipeline)} -> {request.output_dir} ({size / 1e9:.3g} GB)")
    if request.format == "single_file":
        file = f"{request.output_dir}/{SINGLE_FILE_NAME}"
        print(f"diffusers: from_single_file('{file}', config='{request.output_dir}/config')")
    elif request.front_end is not None:
        print(f"{request.front_end}: {request.output_dir}/{LORA_FILE_NAME}, at strength 1")
    elif model.adapters is not None:
        path = request.output_dir
        print(f"diffusers: pipeline = from_pretrained('{path}'), then pipeline.load_lora_weights('{path}')")
    if request.push_to_hub is not None:
        again = f"delete {request.output_dir}, and write the same command again"
        return hub.push(output_dir, request.push_to_hub, source.run_dir, private=request.hub_private, again=again)
    return 0


def find_source(path: str | os.PathLike[str]) -> ExportSource:
    """Find the model of a run (its newest valid checkpoint), a checkpoint or a pipeline folder, here or in a bucket.

    Raises:
        UsageError: There is none, or the checkpoint is damaged.
    """
    root = far_runs.fetch(os.fspath(path), who="run", pipeline=True) if far_runs.is_url(path) else Path(path)
    if (root / "model_index.json").is_file():
        return ExportSource(root)
    if (root / checkpoint.MANIFEST_NAME).is_file():
        problems = [] if far_runs.is_copy(root) else checkpoint.verify(root)  # copies are, as they are fetched
        if problems:
            raise UsageError(
                f"run={path}: the checkpoint is damaged: {problems[0]}; give an earlier one, or the run itself"
            )
        return ExportSource(root / "pipeline", root)
    newest = runs.result_checkpoint(root)
    if newest is not None:
        return ExportSource(newest / "pipeline", newest)
    return ExportSource(runs.find_pipeline(path, who="run"))


def read_model(source: ExportSource, request: ExportRequest, opened: ExitStack) -> Model:
    """Return the model with the weights that ``request.format`` selects.

    ``opened`` keeps the checkpoint's tensor store open until the weights have been read.

    Raises:
        UsageError: The selected weights do not exist, or files are missing or damaged.
    """
    index = read_json(source.pipeline / "model_index.json")
    family = family_of(str(index.get("_class_name")), who=f"run={request.run}")
    names = [name for name in parts_in(index, family) if name in family.networks]
    networks = {name: _read_network(name, index, family, source, request) for name in names}
    lora_file, word = (source.pipeline / name for name in (LORA_NAME, WORD_NAME))
    adapters = LoraFile.read(lora_file) if lora_file.is_file() else None
    model = Model(networks, adapters, word if word.is_file() else None)
    if request.merge_lora and request.front_end:
        raise UsageError(
            f"run={request.run}: got merge_lora=true with format={request.format}, a file of the adapters alone; leave "
            "merge_lora out, or write format=single_file for the sum"
        )
    if (request.merge_lora or request.front_end) and model.adapters is None:
        given = f"format={request.format}" if request.front_end else "merge_lora=true"
        raise UsageError(
            f"run={request.run}: got {given}, but {source.pipeline} has no {LORA_NAME}: it was trained without "
            f"adapters, or these are merged already; leave {given.partition('=')[0]} out"
        )
    is_folder = not request.front_end and request.format != "single_file"
    if is_folder and not request.merge_lora and model.adapters is not None and by_layer(model.adapters.tensors):
        raise UsageError(
            f"run={request.run}: its adapters are LoHa or LoKr, of which diffusers reads LoKr of some families alone; "
            "add merge_lora=true, or write format=kohya or format=comfyui"
        )
    if request.format in ("ema", "non_ema"):
        model = _chosen(model, source, request, opened)
    if model.adapters is not None and (request.merge_lora or request.format == "single_file"):
        merged = model.adapters.merged({name: network.tensors for name, network in model.networks.items()})
        networks = {name: network.changed(merged.get(name, {})) for name, network in model.networks.items()}
        return replace(model, networks=networks, adapters=None)
    return model


def _read_network(
    name: str, index: Mapping[str, Any], family: Family, source: ExportSource, request: ExportRequest
) -> Network:
    component = read_component(index, name, family, source.pipeline)
    config = read_json(source.pipeline / name / "config.json")
    tensors = streamed_tensor.file_tensors(source.pipeline / name / component.weights_file)
    is_recorded = read_record(config, str(source.pipeline / name)) is not None
    if not is_recorded:
        refuse_int8(source.pipeline / name, {key: tensor.dtype for key, tensor in tensors.items()})
    elif request.format != "diffusers" or request.dtype or request.merge_lora:
        raise UsageError(
            f"run={request.run}: its weights are in int8, which only format=diffusers dtype=null merge_lora=false can "
            "hold; export the pipeline that it was made from"
        )
    return Network(replace(component, config=config), tensors)


def _chosen(model: Model, source: ExportSource, request: ExportRequest, opened: ExitStack) -> Model:
    """Return the model with the trained weights or their average, as ``request.format`` selects."""
    if source.checkpoint is None:
        raise UsageError(
            f"run={request.run}: a pipeline folder holds one set of weights, so format={request.format} has no choice; "
            "give the run or one of its checkpoints, or write format=diffusers"
        )
    store = opened.enter_context(ShardedTensors(source.checkpoint / "state"))
    has_average = any(key.startswith("ema/") for key in store.keys())
    if request.format == "ema" and not has_average:
        raise UsageError(
            f"run={request.run}: {source.checkpoint.name} has no averaged weights, its run had callbacks.ema=null; "
            "write format=non_ema"
        )
    if request.format == "ema" or not has_average:
        return model
    if model.adapters is None and any(map(is_adapter, store.keys())):
        raise UsageError(
            f"run={request.run}: the run had merge_lora=true, so {source.checkpoint.name} holds weights with the "
            "average of the adapters added, and none without; write format=ema, or resume the run with merge_lora=false"
        )
    components = {name: network.component for name, network in model.networks.items()}
    adapters = model.adapters and model.adapters.trained(store, components)
    return Model({name: _trained(name, network, store) for name, network in model.networks.items()}, adapters)


def _trained(name: str, network: Network, store: ShardedTensors) -> Network:
    """Return the network with the trained weights instead of their average."""
    prefix = f"master/{name}."
    stored = plain_names(key.removeprefix(prefix) for key in store.keys() if key.startswith(prefix))
    keys = network.component.file_keys(stored)
    return network.changed({keys[plain]: store.streamed(prefix + live) for plain, live in stored.items()})


def write_pipeline(source: ExportSource, model: Model, folder: Path, request: ExportRequest) -> None:
    """Write a folder in the diffusers layout; unchanged weights are hard-linked from the source."""
    dtype = request.torch_dtype
    changed = {name: network for name, network in model.networks.items() if not network.stays(dtype)}
    _check_space((tensor for network in changed.values() for tensor in network.tensors.values()), request)
    _place_parts(source.pipeline, folder, without_weights=changed)
    for name, network in changed.items():
        component = network.component
        write_streamed(folder / name / component.weights_file, network.tensors, dtype=dtype)
        stale = {"dtype", "torch_dtype"} & component.config.keys()
        if stale and request.dtype is not None:  # transformers would convert back to it
            config = component.config | dict.fromkeys(stale, request.dtype)
            write_json(folder / name / "config.json", config)
    if model.adapters is not None and model.adapters.stays(dtype):
        atomic.hard_link(model.adapters.path, folder / LORA_NAME)
    elif model.adapters is not None:
        write_streamed(folder / LORA_NAME, model.adapters.tensors, dtype=dtype, metadata=model.adapters.metadata)
    if model.word is not None:
        atomic.hard_link(model.word, folder / WORD_NAME)


def write_single_file(source: ExportSource, model: Model, folder: Path, request: ExportRequest) -> None:
    """Write all networks into one file with the original names, and the other parts into ``config/``.

    Other programs read the file only; diffusers needs both unless the model is one of the published ones.
    """
    index, networks = read_json(source.pipeline / "model_index.json"), model.networks
    who = f"run={request.run} format=single_file"
    family = family_of(index["_class_name"], who=who)
    layout = layout_of(family, {name: network.component for name, network in networks.items()}, who=who)
    tensors = original_tensors({name: network.tensors for name, network in networks.items()}, layout, who=who)
    _check_space(tensors.values(), request)
    components = {name: _with_defaults(networks[name].component) for name in (family.denoiser, "vae")}
    scheduler = read_json(source.pipeline / "scheduler" / "scheduler_config.json")
    title, prediction_type = Path(request.output_dir).name, scheduler.get("prediction_type", "epsilon")
    networks_of = {name: network.component for name, network in networks.items()} | components
    metadata, _ = model_spec(family, networks_of, title=title, prediction_type=prediction_type)
    write_streamed(folder / SINGLE_FILE_NAME, tensors, dtype=request.torch_dtype, metadata=metadata)
    _place_parts(source.pipeline, folder / "config", without_weights=index)
    for name, component in components.items():
        write_json(folder / "config" / name / "config.json", component.config)


def write_lora(source: ExportSource, model: Model, folder: Path, request: ExportRequest) -> None:
    """Write the adapters alone, for a front end: one file, and beside it that of a learned word."""
    assert model.adapters is not None and request.front_end is not None
    index = read_json(source.pipeline / "model_index.json")
    family = family_of(index["_class_name"], who=f"run={request.run}")
    networks = {name: network.tensors for name, network in model.networks.items()}
    tensors = front_end_tensors(model.adapters, networks, family, request.front_end)
    _check_space(tensors.values(), request)
    components = {name: network.component for name, network in model.networks.items()}
    components |= {name: _with_defaults(components[name]) for name in (family.denoiser, "vae")}
    scheduler = read_json(source.pipeline / "scheduler" / "scheduler_config.json")
    metadata = front_end_metadata(
        model.adapters,
        tensors,
        family,
        components,
        title=(source.run_dir or Path(request.run)).name or "lora",
        prediction_type=scheduler.get("prediction_type", "flow"),
        dtype=request.torch_dtype,
    )
    write_streamed(folder / LORA_FILE_NAME, tensors, dtype=request.torch_dtype, metadata=metadata)
    if model.word is not None:
        atomic.hard_link(model.word, folder / WORD_NAME)


def _with_defaults(component: Component) -> Component:
    """Return the component with its class's defaults, which diffusers' single-file converter does not fill in."""
    parameters = inspect.signature(component.load_class().__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return replace(component, config=defaults | component.config)


def _place_parts(pipeline: Path, folder: Path, *, without_weights: Iterable[str]) -> None:
    """Place a pipeline's files in another folder: weights as hard links, files that users may edit as copies."""
    folder.mkdir(exist_ok=True)
    shutil.copy2(pipeline / "model_index.json", folder)
    index = read_json(pipeline / "model_index.json")
    for part in (path for path in pipeline.iterdir() if path.is_dir() and path.name in index):
        (folder / part.name).mkdir()
        for file in (file for file in part.iterdir() if file.is_file()):
            target = folder / part.name / file.name
            if not file.name.endswith(_WEIGHTS):
                shutil.copy2(file, target)
            elif part.name not in without_weights:
                atomic.hard_link(file, target)


def _check_space(tensors: Iterable[StreamedTensor], request: ExportRequest) -> None:
    size = sum(t.numel * converted_dtype(t, request.torch_dtype).itemsize for t in tensors)
    atomic.check_free_space(request.output_dir, size, f"format={request.format}", purpose="the export")
