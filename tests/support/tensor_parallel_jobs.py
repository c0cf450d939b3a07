"""Jobs for :mod:`ranks`: int8 models divided among the processes, beside the same model on one device.

:func:`write_model` writes the pipelines that jobs read.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_lightning import LatentDiffusion
from sd_lightning._errors import UsageError
from sd_lightning.models.families import Architecture
from sd_lightning.models.families.base import SIZES
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.models.lora import METADATA
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.quantization.int8 import int8_configs
from sd_lightning.quantization.tensor_parallel import Plan, TensorParallel
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed

Config = Int8 | dict[str, Int8]
CAPTIONS = ["a handwritten three", "a drawing of a eight, in blue"]


def write_model(architecture: str | Architecture, folder: Path) -> LatentDiffusion:
    """Write a model all of whose weights and biases count: no layer begins with zeros."""
    model = LatentDiffusion.build(architecture, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, network in model.networks.items():
            for key, each in network.named_parameters() if name != "vae" else ():
                if each.dim() > 1:
                    each.normal_(0, 1 if "embed" in key else each[0].numel() ** -0.5, generator=generator)
                elif key.endswith("bias"):
                    each.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def write_lora(folder: Path, file: Path) -> None:
    """Write adapters of the denoiser of a pipeline, in diffusers' format, whose alpha is not their rank."""
    from peft import LoraConfig

    model = LatentDiffusion.from_pretrained(folder)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=list(model.family.lora_targets))
    model.denoiser.add_adapter(config)  # type: ignore[operator]
    generator, prefix = torch.Generator().manual_seed(6), model.family.denoiser
    tensors = {
        f"{prefix}.{key.replace('.default', '')}": torch.randn(each.shape, generator=generator) / 4
        for key, each in model.denoiser.state_dict().items()
        if ".lora_" in key
    }
    settings = {f"{prefix}.{key}": value for key, value in (("r", 3), ("lora_alpha", 5))}
    settings[f"{prefix}.target_modules"] = list(model.family.lora_targets)
    save_file(tensors, file, metadata={"format": "pt", METADATA: json.dumps(settings)})


def outputs(model: LatentDiffusion) -> dict[str, Tensor]:
    """Return what the text encoders make of captions, and what the denoiser predicts."""
    generator = torch.Generator().manual_seed(5)
    batch: dict[str, Any] = {"input_ids": model.tokenize(CAPTIONS)}
    batch |= dict.fromkeys(SIZES, torch.tensor([[64, 64], [64, 48]]))
    latents = torch.randn(2, model.latent_space.channels, 8, 8, generator=generator)
    dtype = next(model.denoiser.parameters()).dtype
    with torch.no_grad():
        conditioning = model.condition(model.text_encoders, batch)
        given = map_conditioning(conditioning, lambda each: each.to(dtype) if each.is_floating_point() else each)
        times = torch.tensor([100.0, 700.0])
        predicted = model.family.denoise(model.denoiser, latents.to(dtype), times, given)
    texts = {key: each for key, each in conditioning.items() if isinstance(each, Tensor) and each.is_floating_point()}
    return {**texts, "prediction": predicted}


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative error, infinite if it is not a number."""
    return float(((ours.float() - theirs.float()).norm() / theirs.float().norm()).nan_to_num(float("inf")))


def tensor_bytes(network: nn.Module) -> int:
    tensors = {id(each): each for each in (*network.parameters(), *network.buffers())}
    return sum(each.nbytes for each in tensors.values())


def digest(found: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in found.values())).hexdigest()


def prepare(accelerator: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Divide the model of a folder, in float or int8, and compare it with one device's.

    A job has ``folder``; it may have ``config`` (of :class:`Int8`), ``lora``, ``without`` (the pattern of a layer that
    the plan forgets) and ``raises`` (whether the message of an error is what is found).
    """
    parallel = TensorParallel(dist.get_rank(), dist.get_world_size())
    deferred = LatentDiffusion.from_pretrained(job["folder"], deferred=["all"], lora=job.get("lora"))
    config: Config = int8_configs(deferred) or Int8(**job.get("config", {}))
    if "without" in job:
        return _mutated(job, deferred, config, parallel)
    if job.get("measure"):
        return _measured(deferred, config, parallel)
    try:
        ours = quantize_(deferred, config, tensor_parallel=parallel)
    except UsageError as found:
        if job.get("raises"):
            return {"message": str(found), "deferred": sorted(deferred.deferred)}
        raise
    whole = quantize_(LatentDiffusion.from_pretrained(job["folder"], lora=job.get("lora")), config)
    on_meta = quantize_(LatentDiffusion.describe(job["folder"]), config, tensor_parallel=parallel)
    mine, reference = outputs(ours), outputs(whole)
    exact = outputs(LatentDiffusion.from_pretrained(job["folder"])) if job.get("exact") else {}
    return {
        "exact": {key: [error(mine[key], each), error(reference[key], each)] for key, each in exact.items()},
        "errors": {key: error(mine[key], reference[key]) for key in reference},
        "digest": digest(mine),
        "bytes": {name: tensor_bytes(network) for name, network in ours.networks.items()},
        "predicted": {name: tensor_bytes(network) for name, network in on_meta.networks.items()},
        "whole": {name: tensor_bytes(network) for name, network in whole.networks.items()},
    }


def _measured(model: LatentDiffusion, config: Config, parallel: TensorParallel) -> dict[str, Any]:
    """Return what this process needed while it read its part, and what the part and the largest weight take."""
    from loading_driver import begin_peak, status

    layer = max(each.numel() for network in model.networks.values() for each in network.parameters())
    dist.barrier()
    base = begin_peak()
    quantize_(model, config, tensor_parallel=parallel)
    peak = status("VmHWM") - base
    return {"peak": peak, "own": sum(tensor_bytes(each) for each in model.networks.values()), "layer": layer}


def write_random(architecture: str | Architecture, folder: Path) -> None:
    """Write a pipeline with random weights in float16, of which a slice is in memory at a time."""
    from int8_driver import _random as values

    model = LatentDiffusion.build(architecture, device="meta")
    model.save_pretrained(folder, skip=list(model.networks))
    for name, network in model.networks.items():
        component, state = model.components[name], network.state_dict()
        keys = component.file_keys(state)
        tensors = {
            keys[key]: StreamedTensor(torch.float16, tuple(each.shape), partial(values, each.numel()))
            for key, each in state.items()
        }
        write_streamed(folder / name / component.weights_file, tensors)


def _mutated(
    job: Mapping[str, Any], model: LatentDiffusion, config: Config, parallel: TensorParallel
) -> dict[str, Any]:
    """Return the error with a plan that forgets a layer, infinite if it fails."""
    known = type(model).tensor_parallel_plan

    def forgets(self: LatentDiffusion, name: str) -> Plan:
        plan = known(self, name)
        styles = {key: style for key, style in plan.styles.items() if key != job["without"]}
        return Plan(styles, plan.heads, plan.must_divide)

    with mock.patch.object(LatentDiffusion, "tensor_parallel_plan", forgets):
        quantize_(model, config, tensor_parallel=parallel)
    reference = outputs(quantize_(LatentDiffusion.from_pretrained(job["folder"]), config))
    try:
        mine = outputs(model)
    except RuntimeError as failure:  # shapes that do not fit, in every rank
        return {"error": float("inf"), "message": str(failure)[:200], "rank": os.environ["RANK"]}
    return {"error": max(error(mine[key], reference[key]) for key in reference)}
