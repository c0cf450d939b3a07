"""The DreamBooth program: check photos and prompts, draw class images, and train."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import class_images, planning, train
from sd_lightning.apps import dreambooth_checks as checks
from sd_lightning.apps.preflight import LOAD_MODEL, Parts, is_lightning_checkpoint
from sd_lightning.apps.trainer_checks import cuda_devices, num_processes
from sd_lightning.data.sources.dreambooth import check_readable, find_photos, ignored_photos
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.meta import meta_networks

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from omegaconf import DictConfig

    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.planner.forecast import Forecast

log = logging.getLogger(__name__)

_ADAMW_8BIT = "bitsandbytes.optim.AdamW8bit"


def run(cfg: DictConfig) -> int:
    """Check the photos and prompts, draw missing class images, and train.

    Returns:
        Exit code of :func:`sd_lightning.apps.train.train`.
    """
    checks.check_used(cfg)
    checks.check_once(cfg)
    strip_slash(cfg)
    checks.check_folders(cfg)
    photos = find_photos(cfg.instance_data_dir, cfg.instance_prompt)
    captions = sorted({photo.caption for photo in photos})
    if cfg.learn_token:
        learn_token(cfg, captions)
    cfg.data.class_prompts = checks.check_prompts(cfg, captions)
    if cfg.validation_prompt is not None and cfg.callbacks.samples is not None:
        checks.warn_of_validation(cfg, captions)
        cfg.callbacks.samples.prompts = [cfg.validation_prompt] * 4
    if cfg.use_8bit_adam:
        use_8bit_adam(cfg)
    if is_first_process():
        check_readable(photos, resolution=cfg.data.resolution, max_pixels=cfg.data.max_image_pixels)
        ignored = ignored_photos(cfg.instance_data_dir)
        if ignored is not None:
            log.warning("instance_data_dir=%s: not used: %s", cfg.instance_data_dir, ignored)
    return train.train(cfg, prepare=prepare)


def prepare(cfg: DictConfig, strategy: Strategy, parts: Parts) -> None:
    """Print the predicted peak memory, and draw missing class images."""
    checks.check_base(cfg)
    if not is_first_process():
        if cfg.data.class_prompts:
            class_images.wait_for(cfg.class_data_dir, list(cfg.data.class_prompts), cfg.num_class_images)
        return
    checks.check_drawing(cfg)
    missing = missing_class_images(cfg)
    predicted = predict_memory(cfg, strategy, parts)
    if predicted is not None:
        print("predicted peak of memory per process", *predicted.lines(), sep="\n  ")
    if missing:
        draw_class_images(cfg, parts, missing)


def predict_memory(cfg: DictConfig, strategy: Strategy | str, parts: Parts) -> Forecast | None:
    """Return the memory forecast of a run with one process per device; None if it depends on measurements in the run.

    It is computed from the sizes of the loaded pipeline.
    """
    from sd_lightning.planner.forecast import Forecaster
    from sd_lightning.strategies import engine_of

    if cfg.learn_token or cfg.model["_target_"] != LOAD_MODEL:
        return None
    pretrained, model = cfg.model.pretrained, planning.described(cfg)
    has_files = pretrained is not None and not Path(pretrained, LORA_NAME).is_file()  # adapters need loaded weights
    run = replace(
        planning.run_of(cfg, parts, model, num_processes(cfg)),
        num_images=cfg.num_class_images * cfg.with_prior_preservation + 10,
        prior_batch_size=cfg.sample_batch_size * cfg.with_prior_preservation,
        prior_dtype=getattr(torch, cfg.prior_generation_precision or "bfloat16"),
        from_files=bool(train.deferral(cfg, ["all"])) and has_files,
    )
    forecaster = Forecaster(model, run)
    footprint = engine_of(strategy).footprint(forecaster.workload)
    return None if footprint is None else forecaster.forecast(footprint)


def strip_slash(cfg: DictConfig) -> None:
    """Strip a trailing slash from ``output_dir``, also where the default ``class_data_dir`` contains it."""
    stripped = cfg.output_dir.rstrip("/") or cfg.output_dir
    for node in (cfg, cfg.data):
        if node.class_data_dir == f"{cfg.output_dir}-class-images":
            node.class_data_dir = f"{stripped}-class-images"
    cfg.output_dir = stripped


def learn_token(cfg: DictConfig, captions: Sequence[str]) -> None:
    """Configure the module to learn a new word, which every caption must contain.

    Raises:
        UsageError: A caption does not contain it, or it is not a valid word.
    """
    from omegaconf import OmegaConf

    checks.check_token(cfg.placeholder_token, captions)
    settings = {"placeholder_token": cfg.placeholder_token, "initializer_token": cfg.initializer_token}
    node = {"_target_": "sd_lightning.models.adapters.learned_token.LearnedToken", **settings}
    OmegaConf.update(cfg, "learned_token", node, force_add=True)


def use_8bit_adam(cfg: DictConfig) -> None:
    """Replace AdamW by ``optimizer=adamw8bit``, with the same settings except ``fused``.

    Raises:
        UsageError: Another optimizer was chosen.
    """
    from omegaconf import OmegaConf

    if cfg.optimizer["_target_"] not in ("torch.optim.AdamW", _ADAMW_8BIT):
        raise UsageError(
            f"dreambooth got use_8bit_adam=true with optimizer._target_={cfg.optimizer['_target_']}; give one of the "
            "two"
        )
    settings = {key: value for key, value in cfg.optimizer.items() if key != "fused"}
    cfg.optimizer = OmegaConf.create({**settings, "_target_": _ADAMW_8BIT})


def missing_class_images(cfg: DictConfig) -> Sequence[class_images.Missing]:
    """Return the class images that are still to be drawn.

    Raises:
        UsageError: The folder holds other pictures, or the model that would draw them is unknown.
    """
    prompts: Sequence[str] = list(cfg.data.class_prompts)
    folder, count = cfg.class_data_dir, cfg.num_class_images
    if not prompts:
        return []
    base = checks.base_of(cfg)
    missing = class_images.missing_pictures(folder, prompts, count, seed=cfg.seed)
    if base is not None:
        class_images.warn_of_other_models(folder, prompts, count, source=base)
    if not missing:
        log.info("class images: all %d are in %s", count, folder)
    elif base is None:
        raise UsageError(
            f"dreambooth got resume={cfg.resume} with {len(missing)} of {count} class images missing in {folder}, and "
            "no config.yaml that says which model the run started from; add model.pretrained=<that model>, which draws "
            "them"
        )
    return missing


def draw_class_images(cfg: DictConfig, parts: Parts, missing: Sequence[class_images.Missing]) -> None:
    """Draw class images; the other processes wait for them."""
    folder, count, base = cfg.class_data_dir, cfg.num_class_images, checks.base_of(cfg)
    assert base is not None
    sampling: SamplingOptions = _conf.instantiate(cfg.sampling, batch_size=cfg.sample_batch_size)
    model = load_base(cfg, parts)
    log.info("class images: drawing %d of %d in %s", len(missing), count, folder)
    device = torch.device("cuda" if cuda_devices(cfg) else "cpu")
    precision = cfg.prior_generation_precision or ("bfloat16" if device.type == "cuda" else "float32")
    if precision != "float32":
        dtype = getattr(torch, precision)
        for name, network in model.networks.items():  # a VAE that overflows in float16 is not cast
            kept = model.family.vae_dtype(network, dtype) if name == "vae" else dtype
            torch.nn.Module.to(network, dtype=kept)  # diffusers' own method warns
    model.read_deferred(device)
    class_images.draw(model, missing, options=sampling, device=device, source=base)


def load_base(cfg: DictConfig, parts: Parts) -> LatentDiffusion:
    """Load the model that a run starts from, with deferred weights where possible.

    Raises:
        UsageError: The parts to train do not fit the model.
    """
    if is_lightning_checkpoint(cfg.init_from):  # its weights have the names of the training module
        return train.build_module(cfg, parts).latent_diffusion
    model: LatentDiffusion = _conf.instantiate(cfg.model, **train.deferral(cfg, ["all"]))
    twin = type(model)(
        meta_networks(model, tuple(model.networks)),  # on the meta device: no time, no memory
        tokenizers=copy.deepcopy(model.tokenizers),
        components=copy.deepcopy(model.components),
        pipeline_class=model.pipeline_class,
    )
    train.wrap(cfg, twin, parts)
    return model
