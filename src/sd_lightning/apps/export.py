"""Give a trained model to other programs, as a pipeline folder or as one file.

Works on files alone: it needs neither the strategy nor the number of processes of the run, builds no network, and
holds no more than a few slices of a tensor in memory.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf
from sd_lightning._console import quiet_libraries
from sd_lightning.apps.export_model import Model, Request, Source, find_source, read_model
from sd_lightning.models.adapters.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.architectures import Component
from sd_lightning.models.pipeline_folder import class_of, config_file, read_json, weights_file, write_json
from sd_lightning.models.single_file import family_of, model_spec, original_tensors
from sd_lightning.storage import checkpoint
from sd_lightning.storage.new_folder import check_new_folder, complete_or_absent
from sd_lightning.storage.streamed_tensor import StreamedTensor, converted_dtype, write_streamed

if TYPE_CHECKING:
    from omegaconf import DictConfig

SINGLE_FILE_NAME = "model.safetensors"

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".msgpack")


def run(cfg: DictConfig) -> int:
    """Write the export into a temporary folder, which gets its name when it is complete."""
    quiet_libraries()
    request: Request = _conf.instantiate(cfg)
    output_dir = check_new_folder(request.output_dir, key="output_dir")
    source = find_source(request.run)
    write = write_single_file if request.format == "single_file" else write_pipeline
    with ExitStack() as opened:
        model = read_model(source, request, opened)
        with complete_or_absent(output_dir, given=f"output_dir={request.output_dir}") as folder:
            write(source, model, folder, request)
    size = sum(file.stat().st_size for file in output_dir.rglob("*") if file.is_file())
    print(f"{source.checkpoint or source.pipeline} -> {request.output_dir} ({size / 1e9:.3g} GB)")
    if request.format == "single_file":
        file = f"{request.output_dir}/{SINGLE_FILE_NAME}"
        print(f"diffusers: from_single_file('{file}', config='{request.output_dir}/config')")
    elif model.adapters is not None:
        path = request.output_dir
        print(f"diffusers: pipeline = from_pretrained('{path}'), then pipeline.load_lora_weights('{path}')")
    return 0


def write_pipeline(source: Source, model: Model, folder: Path, request: Request) -> None:
    """Write a folder in the diffusers layout; weights that stay as they are share their bytes with the source."""
    dtype = request.torch_dtype
    changed = {name: network for name, network in model.networks.items() if not network.stays(dtype)}
    _check_space((tensor for network in changed.values() for tensor in network.tensors.values()), request)
    _place_parts(source.pipeline, folder, without_weights=changed)
    for name, network in changed.items():
        component = network.component
        write_streamed(folder / name / weights_file(component), network.tensors, dtype=dtype)
        stale = {"dtype", "torch_dtype"} & component.config.keys()
        if stale and request.dtype is not None:  # transformers would convert back to it
            config = component.config | dict.fromkeys(stale, request.dtype)
            write_json(folder / name / config_file(component, name), config)
    if model.adapters is not None and model.adapters.stays(dtype):
        checkpoint.hard_link(model.adapters.path, folder / LORA_NAME)
    elif model.adapters is not None:
        write_streamed(folder / LORA_NAME, model.adapters.tensors, dtype=dtype, metadata=model.adapters.metadata)
    if model.word is not None:
        checkpoint.hard_link(model.word, folder / WORD_NAME)


def write_single_file(source: Source, model: Model, folder: Path, request: Request) -> None:
    """Write all networks as one file with the original names, and ``config/``: what such a file cannot hold.

    The file is what other programs read; diffusers needs both unless the model is one of the published ones.
    """
    index, networks = read_json(source.pipeline / "model_index.json"), model.networks
    who = f"run={request.run} format=single_file"
    family = family_of(index["_class_name"], networks["text_encoder"].component.config, who=who)
    tensors = original_tensors({name: network.tensors for name, network in networks.items()}, family, who=who)
    _check_space(tensors.values(), request)
    configs = {name: _with_defaults(networks[name].component) for name in ("unet", "vae")}
    scheduler = read_json(source.pipeline / "scheduler" / "scheduler_config.json")
    metadata = model_spec(
        family,
        title=Path(request.output_dir).name,
        prediction_type=scheduler.get("prediction_type", "epsilon"),
        side=configs["unet"]["sample_size"] * 2 ** (len(configs["vae"]["block_out_channels"]) - 1),
    )
    write_streamed(folder / SINGLE_FILE_NAME, tensors, dtype=request.torch_dtype, metadata=metadata)
    _place_parts(source.pipeline, folder / "config", without_weights=index)
    for name, config in configs.items():
        write_json(folder / "config" / name / "config.json", config)


def _with_defaults(component: Component) -> dict[str, Any]:
    """Complete a diffusers configuration: its class fills gaps when it is built, the converter of one file does not."""
    parameters = inspect.signature(class_of(component).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | component.config


def _place_parts(pipeline: Path, folder: Path, *, without_weights: Iterable[str]) -> None:
    """Put the files of a pipeline into another folder: weights as hard links, what people may edit as copies."""
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
                checkpoint.hard_link(file, target)


def _check_space(tensors: Iterable[StreamedTensor], request: Request) -> None:
    size = sum(t.numel * converted_dtype(t, request.torch_dtype).itemsize for t in tensors)
    checkpoint.check_free_space(request.output_dir, size, f"format={request.format}", purpose="the export")
