"""Families of latent-diffusion models, one file each.

To add a family, subclass :class:`Family` and :func:`register` it before models are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.families.architecture import Architecture, Component, Part
from sd_lightning.models.families.base import Family
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.flux1 import Flux1
from sd_lightning.models.families.flux2 import Flux2Klein
from sd_lightning.models.families.inpainting_and_depth import DepthToImage, Inpainting
from sd_lightning.models.families.krea2 import Krea2
from sd_lightning.models.families.qwen_image import QwenImage
from sd_lightning.models.families.qwen_image21 import QwenImage21
from sd_lightning.models.families.sd3 import StableDiffusion3
from sd_lightning.models.families.sdxl import SDXL
from sd_lightning.models.families.stable_diffusion import StableDiffusion
from sd_lightning.models.families.z_image import ZImage

FAMILIES: dict[str, Family] = {
    family.pipeline_class: family
    for family in (
        StableDiffusion(),
        Inpainting(),
        DepthToImage(),
        SDXL(),
        StableDiffusion3(),
        Flux1(),
        Flux2Klein(),
        ZImage(),
        QwenImage(),
        QwenImage21(),
        Krea2(),
    )
}
"""By pipeline class."""


def register(family: Family) -> None:
    """Register a family, to load its pipelines and build its architectures by name."""
    FAMILIES[family.pipeline_class] = family


def family_of(pipeline_class: str, *, who: str) -> Family:
    """Return the family of a pipeline class.

    Raises:
        UsageError: No family has that class; the message begins with ``who``.
    """
    if pipeline_class not in FAMILIES:
        raise UsageError(
            f"{who}: got a {pipeline_class}; expected {' or '.join(FAMILIES)}; give a pipeline of these, or add a "
            "family: subclass sd_lightning.models.families.Family and register() it"
        )
    return FAMILIES[pipeline_class]


def architecture(name: str, *, who: str = "LatentDiffusion.build") -> Architecture:
    """Return the architecture of that name.

    Raises:
        UsageError: The name is not known; the message begins with ``who``.
    """
    known = {name: each for family in FAMILIES.values() for name, each in family.architectures.items()}
    if name not in known:
        raise UsageError(f"{who} got architecture={name!r}; expected one of {', '.join(known)}")
    return known[name]


def contradiction(name: str, pipeline_class: str, denoiser_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return how a pipeline contradicts an architecture, and the name of the architecture that it has.

    The pipeline class must match. Within one family, :attr:`Family.width_key` of the denoiser's configuration must
    match too, unless no architecture of the family has the pipeline's value. Other sizes are not compared.

    Args:
        name: Name of the architecture.
        pipeline_class: Class of the pipeline.
        denoiser_config: Configuration of the pipeline's denoiser.

    Returns:
        (description of the pipeline, name of its architecture), None if they agree.
    """
    family = family_of(pipeline_class, who=f"model={name}")
    key = family.width_key
    widths = {n: each.networks[family.denoiser].config.get(key) for n, each in family.architectures.items()}
    width = denoiser_config.get(key)
    right = [n for n in widths if widths[n] == width]
    if name not in widths:
        return f"a {pipeline_class}", (right or [n for n in widths if not family.architectures[n].is_tiny])[0]
    if len(widths) == 1 or not right or name in right:
        return None
    return f"a {family.denoiser} with {key}={width}, not {widths[name]}", right[0]


__all__ = [
    "FAMILIES",
    "Component",
    "Conditioning",
    "Family",
    "Part",
    "Architecture",
    "contradiction",
    "family_of",
    "register",
    "architecture",
]
