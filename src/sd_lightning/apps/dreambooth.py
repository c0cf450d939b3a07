"""Teach a model a subject from a few photos: check photos and prompts, draw the class images, and train."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import class_images, train
from sd_lightning.apps import dreambooth_checks as checks
from sd_lightning.apps.preflight import LOAD_MODEL, Parts, is_lightning_checkpoint
from sd_lightning.apps.trainer_checks import cuda_devices, num_processes
from sd_lightning.data.sources.dreambooth import check_readable, find_photos, ignored_photos
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.latent_diffusion import LatentDiffusion

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from omegaconf import DictConfig

    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.planner.memory_forecast import Forecast

log = logging.getLogger(__name__)

_ADAMW_8BIT = "bitsandbytes.optim.AdamW8bit"


def run(cfg: DictConfig) -> int:
    """Check the photos and prompts, draw the class images that are missing, and train.

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
    """Say what memory the run will take, and complete the class images."""
    checks.check_base(cfg)
    if is_first_process():
        checks.check_drawing(cfg)
        predicted = predict_memory(cfg, strategy, parts)
        if predicted is not None:
            print("predicted peak of memory per process", *predicted.lines(), sep="\n  ")
    complete_class_images(cfg, parts)


def predict_memory(cfg: DictConfig, strategy: Strategy, parts: Parts) -> Forecast | None:
    """Return the memory that a run with ``strategy=gemini`` in bf16-true will take; None for other settings.

    The sizes are those of the pipeline that is loaded, on one process for each device.
    """
    from sd_lightning.planner import memory_forecast
    from sd_lightning.strategies.gemini import GeminiStrategy

    if not isinstance(strategy, GeminiStrategy) or strategy.config.placement != "static" or cfg.learn_token:
        return None
    if cfg.trainer.precision != "bf16-true" or cfg.model["_target_"] != LOAD_MODEL:
        return None
    pretrained, world_size = cfg.model.pretrained, num_processes(cfg)
    if pretrained is None:
        model = LatentDiffusion.build(cfg.model.architecture, device="meta")
    else:
        model = LatentDiffusion.describe(pretrained, revision=cfg.model.get("revision"), vae=cfg.model.get("vae"))
    has_files = pretrained is not None and not Path(pretrained, LORA_NAME).is_file()  # adapters are added to the whole
    ema, samples = cfg.callbacks.get("ema"), cfg.callbacks.get("samples")
    num_samples = 0 if samples is None else len(samples.prompts or ()) or 2 * samples.columns
    training = memory_forecast.Training(
        batch_size=cfg.data.batch_size // (world_size * cfg.trainer.accumulate_grad_batches),
        resolution=cfg.data.resolution,
        train_text_encoder=cfg.module.train_text_encoder,
        lora=parts.lora,
        optimizer=parts.optimizer,  # type: ignore[arg-type]
        gradient_checkpointing=cfg.speed.gradient_checkpointing,
        encoder_dtype=getattr(torch, cfg.module.encoder_dtype),
        averages=ema is not None,
        offload_averages=ema is not None and ema.get("offload", False),
        offload_encoders=cfg.module.offload_encoders,
        cache_latents=cfg.data.cache_latents,
        sample_batch_size=min(cfg.sampling.batch_size, -(-num_samples // world_size)),
        drawn_size=(cfg.sampling.get("height") or model.resolution, cfg.sampling.get("width") or model.resolution),
        vae_tiling=bool(cfg.sampling.get("vae_tiling")),
        num_images=cfg.num_class_images * cfg.with_prior_preservation + 10,
        world_size=world_size,
        prior_batch_size=cfg.sample_batch_size * cfg.with_prior_preservation,
        prior_dtype=getattr(torch, cfg.prior_generation_precision or "bfloat16"),
        from_files=bool(train.deferral(cfg, ["all"])) and has_files,
    )
    return memory_forecast.forecast(model, training, strategy.config)


def strip_slash(cfg: DictConfig) -> None:
    """Let ``output_dir=runs/dog/`` mean ``runs/dog``, also where it is part of the default of ``class_data_dir``."""
    stripped = cfg.output_dir.rstrip("/") or cfg.output_dir
    for node in (cfg, cfg.data):
        if node.class_data_dir == f"{cfg.output_dir}-class-images":
            node.class_data_dir = f"{stripped}-class-images"
    cfg.output_dir = stripped


def learn_token(cfg: DictConfig, captions: Sequence[str]) -> None:
    """Let the module learn a new word, which every caption has to contain.

    Raises:
        UsageError: One does not, or it is no word.
    """
    from omegaconf import OmegaConf

    checks.check_token(cfg.placeholder_token, captions)
    settings = {"placeholder_token": cfg.placeholder_token, "initializer_token": cfg.initializer_token}
    node = {"_target_": "sd_lightning.models.adapters.learned_token.LearnedToken", **settings}
    OmegaConf.update(cfg, "learned_token", node, force_add=True)


def use_8bit_adam(cfg: DictConfig) -> None:
    """Put ``optimizer=adamw8bit`` in the place of AdamW, with its settings.

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


def complete_class_images(cfg: DictConfig, parts: Parts) -> None:
    """Draw the class images that are missing, on the first process; the others wait for them."""
    prompts: Sequence[str] = list(cfg.data.class_prompts)
    folder, count = cfg.class_data_dir, cfg.num_class_images
    if not prompts:
        return
    if not is_first_process():
        class_images.wait_for(folder, prompts, count)
        return
    base = checks.base_of(cfg)
    missing = class_images.missing_pictures(folder, prompts, count, seed=cfg.seed)
    if base is not None:
        class_images.warn_of_other_models(folder, prompts, count, source=base)
    if not missing:
        log.info("class images: all %d are in %s", count, folder)
        return
    if base is None:
        raise UsageError(
            f"dreambooth got resume={cfg.resume} with {len(missing)} of {count} class images missing in {folder}, and "
            "no config.yaml that says which model the run started from; add model.pretrained=<that model>, which draws "
            "them"
        )
    sampling: SamplingOptions = _conf.instantiate(cfg.sampling, batch_size=cfg.sample_batch_size)
    model = load_base(cfg, parts)
    log.info("class images: drawing %d of %d in %s", len(missing), count, folder)
    device = torch.device("cuda" if cuda_devices(cfg) else "cpu")
    precision = cfg.prior_generation_precision or ("bfloat16" if device.type == "cuda" else "float32")
    if precision != "float32":
        cast(model, getattr(torch, precision))
    model.read_deferred(device)
    class_images.draw(model, missing, options=sampling, device=device, source=base)


def load_base(cfg: DictConfig, parts: Parts) -> LatentDiffusion:
    """Load the model that a run starts from, with weights still in their files where that is possible.

    Raises:
        UsageError: What is to be trained does not fit into it.
    """
    if is_lightning_checkpoint(cfg.init_from):  # its weights have the names of what is trained
        return train.build_module(cfg, parts).latent_diffusion
    model: LatentDiffusion = _conf.instantiate(cfg.model, **train.deferral(cfg, ["all"]))
    twin = type(model)(
        model.meta_networks(tuple(model.networks)),  # takes neither time nor memory
        tokenizers=copy.deepcopy(model.tokenizers),
        components=copy.deepcopy(model.components),
        pipeline_class=model.pipeline_class,
    )
    train.wrap(cfg, twin, parts)
    return model


def cast(model: LatentDiffusion, dtype: torch.dtype) -> None:
    """Let a model compute in half precision, but for a VAE that overflows in float16."""
    for name, network in model.networks.items():
        if not (name == "vae" and dtype == torch.float16 and model.vae.config.get("force_upcast", False)):
            torch.nn.Module.to(network, dtype=dtype)  # diffusers' own method warns
