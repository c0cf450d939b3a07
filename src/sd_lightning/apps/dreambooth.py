"""The DreamBooth program: check photos and prompts, draw class images, and train."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import class_images, planning, train
from sd_lightning.apps import dreambooth_checks as checks
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.data.sources.dreambooth import check_readable, find_photos, ignored_photos
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.meta import meta_networks

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.planner.forecast import Forecast

log = logging.getLogger(__name__)

_ADAMW_8BIT = "bitsandbytes.optim.AdamW8bit"
_LEARNED_TOKEN = "sd_lightning.models.learned_token.LearnedToken"


def run(cfg: DictConfig) -> int:
    """Check the photos and prompts, draw missing class images, and train.

    Returns:
        Exit code of :func:`sd_lightning.apps.train.run`.
    """
    return train.run(subject_run(RunSpec.of(cfg)), prepare=prepare)


def subject_run(spec: RunSpec) -> RunSpec:
    """Return a run with what DreamBooth's own settings mean in the words of ``train``, after checks of them.

    Raises:
        UsageError: The photos cannot be used, or settings contradict each other.
    """
    checks.check_used(spec)
    checks.check_once(spec)
    spec = strip_slash(spec)
    checks.check_folders(spec)
    photos = find_photos(spec["instance_data_dir"], spec["instance_prompt"])
    captions = sorted({photo.caption for photo in photos})
    changes: dict[str, Any] = {"data.class_prompts": checks.check_prompts(spec, captions)}
    if spec["learn_token"]:
        checks.check_token(spec["placeholder_token"], captions)
        changes["learned_token"] = {"_target_": _LEARNED_TOKEN} | {
            name: spec[name] for name in ("placeholder_token", "initializer_token")
        }
    if spec["validation_prompt"] is not None and spec.get("callbacks.samples") is not None:
        checks.warn_of_validation(spec, captions, changes["data.class_prompts"])
        changes["callbacks.samples.prompts"] = [spec["validation_prompt"]] * 4
    if spec["use_8bit_adam"]:
        changes["optimizer"] = eight_bit_adam(spec)
    spec = spec.with_settings(changes)
    if is_first_process():
        check_readable(photos, resolution=spec["data.resolution"], max_pixels=spec["data.max_image_pixels"])
        ignored = ignored_photos(spec["instance_data_dir"])
        if ignored is not None:
            log.warning("instance_data_dir=%s: not used: %s", spec["instance_data_dir"], ignored)
    return spec


def prepare(spec: RunSpec) -> None:
    """Print the predicted peak memory, and draw missing class images."""
    checks.check_base(spec)
    if not is_first_process():
        if spec["data.class_prompts"]:
            class_images.wait_for(spec["class_data_dir"], spec["data.class_prompts"], spec["num_class_images"])
        return
    checks.check_drawing(spec)
    missing = missing_class_images(spec)
    predicted = predict_memory(spec)
    if predicted is not None:
        print("predicted peak of memory per process", *predicted.lines(), sep="\n  ")
    if missing:
        draw_class_images(spec, missing)


def predict_memory(spec: RunSpec) -> Forecast | None:
    """Return the memory forecast of a run with one process per device; None if it depends on measurements in the run.

    It is computed from the sizes of the loaded pipeline.
    """
    from sd_lightning.planner.forecast import Forecaster
    from sd_lightning.strategies import engine_of

    if spec["learn_token"] or not spec.model.is_ours:
        return None
    pretrained, model = spec.model.get("pretrained"), spec.model.describe()
    has_files = pretrained is not None and not Path(pretrained, LORA_NAME).is_file()  # adapters need loaded weights
    run = replace(
        planning.run_of(spec, model),
        num_images=spec["num_class_images"] * spec["with_prior_preservation"] + 10,
        prior_batch_size=spec["sample_batch_size"] * spec["with_prior_preservation"],
        prior_dtype=getattr(torch, spec["prior_generation_precision"] or "bfloat16"),
        from_files=train.can_defer(spec) and has_files,
    )
    forecaster = Forecaster(model, run)
    footprint = engine_of(spec.strategy).footprint(forecaster.workload)
    return None if footprint is None else forecaster.forecast(footprint)


def strip_slash(spec: RunSpec) -> RunSpec:
    """Strip a trailing slash from ``output_dir``, also where the default ``class_data_dir`` contains it."""
    folder = spec["output_dir"]
    stripped = folder.rstrip("/") or folder
    pictures = [key for key in ("class_data_dir", "data.class_data_dir") if spec[key] == f"{folder}-class-images"]
    return spec.with_settings({"output_dir": stripped} | dict.fromkeys(pictures, f"{stripped}-class-images"))


def eight_bit_adam(spec: RunSpec) -> dict[str, Any]:
    """Return the section of ``optimizer=adamw8bit`` with the settings of AdamW except ``fused``.

    Raises:
        UsageError: Another optimizer was chosen.
    """
    chosen = spec["optimizer"]
    if chosen["_target_"] not in ("torch.optim.AdamW", _ADAMW_8BIT):
        raise UsageError(
            f"dreambooth got use_8bit_adam=true with optimizer._target_={chosen['_target_']}; give one of the two"
        )
    return {**{key: value for key, value in chosen.items() if key != "fused"}, "_target_": _ADAMW_8BIT}


def missing_class_images(spec: RunSpec) -> Sequence[class_images.Missing]:
    """Return the class images that are still to be drawn.

    Raises:
        UsageError: The folder holds other pictures, or the model that would draw them is unknown.
    """
    prompts: Sequence[str] = spec["data.class_prompts"]
    folder, count = spec["class_data_dir"], spec["num_class_images"]
    if not prompts:
        return []
    base = checks.base_of(spec)
    missing = class_images.missing_pictures(folder, prompts, count, seed=spec["seed"])
    if base is not None:
        class_images.warn_of_other_models(folder, prompts, count, source=base)
    if not missing:
        log.info("class images: all %d are in %s", count, folder)
    elif base is None:
        raise UsageError(
            f"dreambooth got resume={spec['resume']} with {len(missing)} of {count} class images missing in {folder}, "
            "and no config.yaml that says which model the run started from; add model.pretrained=<that model>, which "
            "draws them"
        )
    return missing


def draw_class_images(spec: RunSpec, missing: Sequence[class_images.Missing]) -> None:
    """Draw class images; the other processes wait for them."""
    folder, count, base = spec["class_data_dir"], spec["num_class_images"], checks.base_of(spec)
    assert base is not None
    sampling: SamplingOptions = spec.build("sampling", batch_size=spec["sample_batch_size"])
    model = load_base(spec)
    log.info("class images: drawing %d of %d in %s", len(missing), count, folder)
    device = torch.device("cuda" if spec.cuda_devices else "cpu")
    precision = spec["prior_generation_precision"] or ("bfloat16" if device.type == "cuda" else "float32")
    if precision != "float32":
        dtype = getattr(torch, precision)
        for name, network in model.networks.items():  # a VAE that overflows in float16 is not cast
            kept = model.family.vae_dtype(network, dtype) if name == "vae" else dtype
            torch.nn.Module.to(network, dtype=kept)  # diffusers' own method warns
    model.read_deferred(device)
    class_images.draw(model, missing, options=sampling, device=device, source=base)


def load_base(spec: RunSpec) -> LatentDiffusion:
    """Load the model that a run starts from, with deferred weights where possible.

    Raises:
        UsageError: The parts to train do not fit the model.
    """
    if spec.starts_from_lightning:  # its weights have the names of the training module
        return train.build_module(spec).latent_diffusion
    model = train.load_model(spec, ["all"])
    twin = type(model)(
        meta_networks(model, tuple(model.networks)),  # on the meta device: no time, no memory
        tokenizers=copy.deepcopy(model.tokenizers),
        components=copy.deepcopy(model.components),
        pipeline_class=model.pipeline_class,
    )
    train.wrap(spec, twin)
    return model
