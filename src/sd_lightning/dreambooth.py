"""Teach a model a subject from a few photos: ``python -m sd_lightning.dreambooth [key=value …]``.

The main job with other data: see :mod:`sd_lightning.train`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sd_lightning import _conf, train
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import class_images
from sd_lightning.apps.dreambooth_checks import base_of, check_base, check_folders, check_used, load_base
from sd_lightning.apps.preflight import LOAD_MODEL, adopt_base, check_model, num_processes
from sd_lightning.data.dreambooth import check_readable, find_photos, ignored_photos, num_per_prompt
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.storage.new_folder import check_writable

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.planner.memory_forecast import Forecast

log = logging.getLogger("sd_lightning.dreambooth")  # __name__ is "__main__" under python -m

_COMMON_WORDS = set("a an the of in on at with photo photos picture image portrait drawing painting".split())
"""What captions say beside the subject."""
_SAME = {
    "max_train_steps": "trainer.max_steps",
    "learning_rate": "optimizer.lr",
    "resolution": "data.resolution",
    "gradient_checkpointing": "speed.gradient_checkpointing",
}
"""Settings that the main job's configuration has under another name."""
_ADAMW_8BIT = "bitsandbytes.optim.AdamW8bit"
HINTS = {
    **train.HINTS,
    "instance_data_dir": str,
    "instance_prompt": str | None,
    "class_data_dir": str,
    "class_prompt": str | None,
    "class_prompts": list[str],
    "num_class_images": int,
    "with_prior_preservation": bool,
    "prior_loss_weight": float,
    "sample_batch_size": int,
    "prior_generation_precision": Literal["float32", "bfloat16", "float16"] | None,
    "validation_prompt": str | None,
    "train_text_encoder": bool,
    "learn_token": bool,
    "placeholder_token": str,
    "initializer_token": str | None,
    "gradient_checkpointing": bool,
    "use_8bit_adam": bool,
    "learning_rate": float,
    "max_train_steps": int,
    "resolution": int,
}
"""Types of the settings that diffusers' and ColossalAI's DreamBooth scripts have, too."""


def run(cfg: DictConfig) -> int:
    """Check the photos and prompts, draw the class images that are missing, and train.

    Returns:
        Exit code of :func:`sd_lightning.train.train`.
    """
    check_used(cfg)
    check_once(cfg)
    strip_slash(cfg)
    check_folders(cfg)
    photos = find_photos(cfg.instance_data_dir, cfg.instance_prompt)
    captions = sorted({photo.caption for photo in photos})
    if cfg.learn_token:
        learn_token(cfg, captions)
    cfg.data.class_prompts = check_prompts(cfg, captions)
    if cfg.validation_prompt is not None and cfg.callbacks.samples is not None:
        warn_of_validation(cfg, captions)
        cfg.callbacks.samples.prompts = [cfg.validation_prompt] * 4
    if cfg.use_8bit_adam:
        use_8bit_adam(cfg)
    adopt_base(cfg)
    check_base(cfg)
    if is_first_process():
        check_readable(photos, resolution=cfg.data.resolution, max_pixels=cfg.data.max_image_pixels)
        check_before_drawing(cfg)
        ignored = ignored_photos(cfg.instance_data_dir)
        if ignored is not None:
            log.warning("instance_data_dir=%s: not used: %s", cfg.instance_data_dir, ignored)
    return train.train(cfg, prepare=prepare)


def prepare(cfg: DictConfig) -> None:
    """Say what memory the run will take, and complete the class images."""
    check_model(cfg)
    predicted = predict_memory(cfg) if is_first_process() else None
    if predicted is not None:
        print("predicted peak of memory per process", *predicted.lines(), sep="\n  ")
    complete_class_images(cfg)


def predict_memory(cfg: DictConfig) -> Forecast | None:
    """Return the memory that a run with ``strategy=gemini`` in bf16-true will take; None for other settings.

    The sizes are those of the pipeline that is loaded, on one process for each device.
    """
    import torch

    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.planner import memory_forecast
    from sd_lightning.strategies.gemini import GeminiStrategy

    strategy: Any = _conf.instantiate(cfg.strategy)
    known = isinstance(strategy, GeminiStrategy) and strategy.config.placement == "static" and not cfg.learn_token
    if not known or cfg.trainer.precision != "bf16-true" or cfg.model["_target_"] != LOAD_MODEL:
        return None
    pretrained = cfg.model.pretrained
    if pretrained is None:
        model = LatentDiffusion.build(cfg.model.architecture, device="meta")
    else:
        model = LatentDiffusion.describe(pretrained, revision=cfg.model.get("revision"), vae=cfg.model.get("vae"))
    world_size = num_processes(cfg)
    ema = cfg.callbacks.get("ema")
    training = memory_forecast.Training(
        batch_size=cfg.data.batch_size // (world_size * cfg.trainer.accumulate_grad_batches),
        resolution=cfg.data.resolution,
        train_text_encoder=cfg.module.train_text_encoder,
        lora=None if cfg.lora is None else _conf.instantiate(cfg.lora),
        optimizer=_conf.instantiate(cfg.optimizer),
        gradient_checkpointing=cfg.speed.gradient_checkpointing,
        encoder_dtype=getattr(torch, cfg.module.encoder_dtype),
        averages=ema is not None,
        offload_averages=ema is not None and ema.get("offload", False),
        offload_encoders=cfg.module.offload_encoders,
        cache_latents=cfg.data.cache_latents,
        sample_batch_size=min(cfg.sampling.batch_size, -(-_num_samples(cfg) // world_size)),
        drawn_size=(cfg.sampling.get("height") or model.resolution, cfg.sampling.get("width") or model.resolution),
        vae_tiling=bool(cfg.sampling.get("vae_tiling")),
        num_images=cfg.num_class_images * cfg.with_prior_preservation + 10,
        world_size=world_size,
        prior_batch_size=cfg.sample_batch_size * cfg.with_prior_preservation,
        prior_dtype=getattr(torch, cfg.prior_generation_precision or "bfloat16"),
        from_files=bool(train.deferral(cfg, ["all"])) and _has_files(pretrained),
    )
    return memory_forecast.forecast(model, training, strategy.config)


def _num_samples(cfg: DictConfig) -> int:
    """Return how many pictures are drawn in the course of a run, together on all processes."""
    samples = cfg.callbacks.get("samples")
    if samples is None:
        return 0
    return 2 * samples.columns if not samples.prompts else len(samples.prompts)


def _has_files(pretrained: str | None) -> bool:
    """Whether weights can stay in their files: adapters beside them are added to the whole."""
    return pretrained is not None and not Path(pretrained, LORA_NAME).is_file()


def check_once(cfg: DictConfig) -> None:
    """Refuse two values for the same setting, of which the command line gives each by another name.

    Raises:
        UsageError: It does.
    """
    from omegaconf import OmegaConf

    given = _conf.overridden_keys()
    for name, other in _SAME.items():
        values = cfg[name], OmegaConf.select(cfg, other)
        if {name, other} <= given and values[0] != values[1]:
            raise UsageError(
                f"dreambooth got {name}={values[0]} and {other}={values[1]}, two names of one setting; expected one of "
                f"them; leave {other} out"
            )


def strip_slash(cfg: DictConfig) -> None:
    """Let ``output_dir=runs/dog/`` mean ``runs/dog``, also where it is part of the default of ``class_data_dir``."""
    stripped = cfg.output_dir.rstrip("/") or cfg.output_dir
    for node in (cfg, cfg.data):
        if node.class_data_dir == f"{cfg.output_dir}-class-images":
            node.class_data_dir = f"{stripped}-class-images"
    cfg.output_dir = stripped


def check_prompts(cfg: DictConfig, captions: Sequence[str]) -> list[str]:
    """Check the settings of prior preservation against each other.

    Args:
        cfg: The configuration.
        captions: What the photos are captioned with.

    Returns:
        The class prompts; none without prior preservation.

    Raises:
        UsageError: They contradict each other, or a caption does not tell the subject from its class.
    """
    if not cfg.with_prior_preservation:
        return []
    prompts = [prompt.strip() for prompt in [cfg.class_prompt or "", *cfg.class_prompts]]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError(
            "dreambooth got with_prior_preservation=true without a class prompt; expected what the subject is one of: "
            "write 'class_prompt=a photo of a dog', or several with 'class_prompts=[a photo of a dog, a dog outdoors]'"
        )
    for name in ("num_class_images", "sample_batch_size"):
        if cfg[name] < 1:
            raise UsageError(f"dreambooth got {name}={cfg[name]}; expected at least 1; write {name}=100")
    without = [prompt for prompt, count in num_per_prompt(prompts, cfg.num_class_images).items() if not count]
    if without:
        raise UsageError(
            f"dreambooth got num_class_images={cfg.num_class_images}, of which none is left for {without[0]!r}; "
            f"expected one for each of class_prompts; write num_class_images={len(prompts)}"
        )
    for caption, prompt in ((c, p) for c in captions for p in prompts):
        is_told = cfg.learn_token and not _has_word(prompt, cfg.placeholder_token)  # every caption has it
        if not is_told and not _words(caption) - _words(prompt):
            raise UsageError(
                f"dreambooth got instance_prompt={caption!r}, which has no word that tells the subject from its class "
                f"{prompt!r}; expected a rare word for the subject, such as sks: write "
                f"'instance_prompt={_with_token(caption)}'"
            )
    return prompts


def warn_of_validation(cfg: DictConfig, captions: Sequence[str]) -> None:
    """Warn of a ``validation_prompt`` without a word for the subject: its pictures would not show it."""
    classes = set[str]().union(*map(_words, cfg.data.class_prompts))
    subject = set[str]().union(*map(_words, captions)) - classes - _COMMON_WORDS
    if cfg.data.class_prompts and subject and is_first_process() and not subject & _words(cfg.validation_prompt):
        log.warning(
            "validation_prompt=%r has none of the words for the subject (%s), so the pictures drawn during the run "
            "will show its class; write the word into it",
            cfg.validation_prompt,
            ", ".join(sorted(subject)),
        )


def learn_token(cfg: DictConfig, captions: Sequence[str]) -> None:
    """Let the module learn a new word, which every caption has to contain.

    Raises:
        UsageError: One does not, or it is no word.
    """
    from omegaconf import OmegaConf

    from sd_lightning.models.adapters.learned_token import LearnedToken

    token = cfg.placeholder_token
    LearnedToken(token)  # which says what is no word
    for caption in captions:
        if not _has_word(caption, token):
            raise UsageError(
                f"dreambooth got learn_token=true and instance_prompt={caption!r} without the word {token}; write "
                f"'instance_prompt={_with_token(caption, token)}', or placeholder_token=<the word>"
            )
    settings = {"placeholder_token": token, "initializer_token": cfg.initializer_token}
    node = {"_target_": "sd_lightning.models.adapters.learned_token.LearnedToken", **settings}
    OmegaConf.update(cfg, "learned_token", node, force_add=True)


def check_before_drawing(cfg: DictConfig) -> None:
    """Build what can be built without class images, whose drawing would come before its complaints.

    Raises:
        UsageError: Settings of the data, the adapters or the pictures cannot work, or no pictures can be written.
    """
    _conf.instantiate(cfg.data, class_prompts=None)
    for node in filter(None, (cfg.lora, cfg.sampling)):
        _conf.instantiate(node)
    if not cfg.with_prior_preservation:
        return
    try:
        check_writable(Path(cfg.class_data_dir))
    except OSError as error:
        name = "output_dir" if cfg.class_data_dir == f"{cfg.output_dir}-class-images" else "class_data_dir"
        raise UsageError(
            f"dreambooth got {name}={cfg[name]}, and {cfg.class_data_dir} cannot be written ({error.strerror}); choose "
            f"another {name}=<folder>"
        ) from error


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


def complete_class_images(cfg: DictConfig) -> None:
    """Draw the class images that are missing, on the first process; the others wait for them."""
    from sd_lightning.models.generation import SamplingOptions

    prompts: Sequence[str] = list(cfg.data.class_prompts)
    if not prompts:
        return
    if not is_first_process():
        class_images.wait_for(cfg.class_data_dir, prompts, cfg.num_class_images)
        return
    base = base_of(cfg)
    missing = class_images.missing_pictures(cfg.class_data_dir, prompts, cfg.num_class_images, seed=cfg.seed)
    if base is not None:
        class_images.warn_of_other_models(cfg.class_data_dir, prompts, cfg.num_class_images, source=base)
    if not missing:
        log.info("class images: all %d are in %s", cfg.num_class_images, cfg.class_data_dir)
        return
    if base is None:
        raise UsageError(
            f"dreambooth got resume={cfg.resume} with {len(missing)} of {cfg.num_class_images} class images missing in "
            f"{cfg.class_data_dir}, and no config.yaml that says which model the run started from; add "
            "model.pretrained=<that model>, which draws them"
        )
    sampling: SamplingOptions = _conf.instantiate(cfg.sampling, batch_size=cfg.sample_batch_size)
    model = load_base(cfg, ("all",))
    log.info("class images: drawing %d of %d in %s", len(missing), cfg.num_class_images, cfg.class_data_dir)
    device = _device(cfg)
    precision = cfg.prior_generation_precision or ("bfloat16" if device.type == "cuda" else "float32")
    if precision != "float32":
        cast(model, precision)
    model.read_deferred(device)
    class_images.draw(model, missing, options=sampling, device=device, source=base)


def cast(model: LatentDiffusion, precision: str) -> None:
    """Let a model compute in half precision, but for a VAE that overflows in float16."""
    import torch
    from torch import nn

    for name, network in model.networks.items():
        if not (name == "vae" and precision == "float16" and model.vae.config.force_upcast):
            nn.Module.to(network, dtype=getattr(torch, precision))  # diffusers' own method warns


def _device(cfg: DictConfig) -> torch.device:
    import torch

    on_cuda = cfg.trainer.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
    return torch.device("cuda" if on_cuda else "cpu")


def _words(prompt: str) -> set[str]:
    return set(re.findall(r"\w+", prompt.lower()))


def _has_word(prompt: str, word: str) -> bool:
    """Return whether a word, which may begin and end with other signs than letters, stands in a prompt."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt) is not None


def _with_token(prompt: str, token: str = "sks") -> str:
    head, _, last = prompt.rpartition(" ")
    return f"{head} {token} {last}".strip()


def main() -> None:
    _conf.main("dreambooth", run, given=train.GIVEN, hints=HINTS)


if __name__ == "__main__":
    main()
