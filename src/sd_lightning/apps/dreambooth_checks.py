"""Which model DreamBooth starts from, and which settings it refuses before time or memory is spent on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning import _conf, train
from sd_lightning._conf.annotations import as_override
from sd_lightning._errors import UsageError
from sd_lightning.apps.preflight import LOAD_MODEL, is_lightning_checkpoint, is_resumed

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sd_lightning.models.latent_diffusion import LatentDiffusion

_SWITCHES = {
    "learn_token": ("placeholder_token", "initializer_token"),
    "with_prior_preservation": (
        *("class_prompt", "class_prompts", "class_data_dir", "num_class_images", "sample_batch_size"),
        *("prior_loss_weight", "prior_generation_precision"),
    ),
}
"""Settings that nothing reads without the one they stand behind."""


def check_used(cfg: DictConfig) -> None:
    """Refuse settings of the command line that nothing reads, as their switch was forgotten.

    Raises:
        UsageError: There are some.
    """
    from omegaconf import OmegaConf

    given, values = _conf.overridden_keys(), OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    for switch, names in _SWITCHES.items():
        unused = [name for name in names if name in given and values[name]]
        if unused and not cfg[switch] and switch not in given:  # switched off by hand, they are meant to rest
            shown = " ".join(f"{name}={as_override(values[name])}" for name in unused)
            raise UsageError(
                f"dreambooth got {shown}, which nothing uses without {switch}; add {switch}=true, or leave "
                f"{', '.join(unused)} out"
            )


def check_folders(cfg: DictConfig) -> None:
    """Refuse to let class images lie among the photos of the subject, or in no folder of their own.

    Raises:
        UsageError: They would.
    """
    if cfg.with_prior_preservation and not cfg.class_data_dir:
        raise UsageError(
            "dreambooth got class_data_dir= without a value; expected a folder for the class images; leave "
            "class_data_dir out"
        )
    photos, pictures = (Path(cfg[name]).resolve() for name in ("instance_data_dir", "class_data_dir"))
    if cfg.with_prior_preservation and (photos.is_relative_to(pictures) or pictures.is_relative_to(photos)):
        how = "the same folder" if photos == pictures else "one inside the other"
        raise UsageError(
            f"dreambooth got class_data_dir={cfg.class_data_dir} and instance_data_dir={cfg.instance_data_dir}, {how}; "
            "expected two folders apart, or photos of the subject and pictures of its class are taken for each other; "
            "leave class_data_dir out, or choose another class_data_dir=<folder>"
        )


def check_base(cfg: DictConfig) -> None:
    """Refuse to teach a subject to random weights.

    Raises:
        UsageError: No model was given to start from, and there is no run to continue.
    """
    if base_of(cfg) is None and cfg.init_from is None and not is_resumed(cfg):
        raise UsageError(
            f"dreambooth got model.pretrained=null and no init_from, and a subject cannot be taught to the random "
            f"weights of {cfg.model.architecture}; expected a trained model; add model.pretrained=<hub id or folder>, "
            "or init_from=<run or pipeline folder>"
        )


def base_of(cfg: DictConfig) -> str | None:
    """Return the name of the model that a run starts from; None if nothing names one."""
    if is_lightning_checkpoint(cfg.init_from):
        return str(cfg.init_from)
    base = cfg.model.get("pretrained")
    if base is None and cfg.model["_target_"] != LOAD_MODEL:
        base = cfg.model["_target_"]
    return None if base is None else str(base)


def load_base(cfg: DictConfig, networks: tuple[str, ...]) -> LatentDiffusion:
    """Load the model that a run starts from, with weights still in their files where that is possible.

    Raises:
        UsageError: What is to be trained does not fit into it.
    """
    if is_lightning_checkpoint(cfg.init_from):  # its weights have the names of what is trained
        trained: LatentDiffusion = train.build_module(cfg).latent_diffusion  # type: ignore[assignment]
        return trained
    model: LatentDiffusion = _conf.instantiate(cfg.model, **train.deferral(cfg, networks))
    twin = type(model)(
        model.meta_networks(tuple(model.networks)),  # takes neither time nor memory
        tokenizers=copy.deepcopy(model.tokenizers),
        components=copy.deepcopy(model.components),
        pipeline_class=model.pipeline_class,
    )
    train.wrap(cfg, twin)
    return model
