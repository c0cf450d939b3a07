"""The kinds of latent-diffusion models, one file each.

A family of your own: subclass :class:`Family`, and :func:`register` it before models are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.families.base import Architecture, Component, Conditioning, Family, Part
from sd_lightning.models.families.sdxl import SDXL
from sd_lightning.models.families.stable_diffusion import StableDiffusion

FAMILIES: dict[str, Family] = {family.pipeline_class: family for family in (StableDiffusion(), SDXL())}
"""By pipeline class."""


def register(family: Family) -> None:
    """Let pipelines of a family be loaded, and its architectures be built by name."""
    FAMILIES[family.pipeline_class] = family


def family_of(pipeline_class: str, *, who: str) -> Family:
    """Return the family of a pipeline.

    Raises:
        UsageError: There is none; the message begins with ``who``.
    """
    if pipeline_class not in FAMILIES:
        raise UsageError(
            f"{who}: got a {pipeline_class}; expected {' or '.join(FAMILIES)}; give a Stable Diffusion 1.x, 2.x or XL "
            "pipeline"
        )
    return FAMILIES[pipeline_class]


def architecture(name: str, *, who: str = "LatentDiffusion.build") -> Architecture:
    """Return a model that can be built without files by its name.

    Raises:
        UsageError: There is none; the message begins with ``who``.
    """
    known = {name: each for family in FAMILIES.values() for name, each in family.architectures.items()}
    if name not in known:
        raise UsageError(f"{who} got architecture={name!r}; expected one of {', '.join(known)}")
    return known[name]


def contradiction(name: str, pipeline_class: str, denoiser_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what of a pipeline cannot be of an architecture, and the name of the one that it is of.

    The pipeline's class decides, and within one family the entry that :attr:`Family.width_key` names. A pipeline with
    a value of its own contradicts no architecture of its family. Other sizes (channels, blocks, layers) are free.

    Args:
        name: Of an architecture.
        pipeline_class: Of the pipeline.
        denoiser_config: Of the pipeline's denoiser.

    Returns:
        (what it is, the right name), None if they agree.
    """
    family = family_of(pipeline_class, who=f"model={name}")
    key = family.width_key
    widths = {n: each.networks[family.denoiser].config.get(key) for n, each in family.architectures.items()}
    width = denoiser_config.get(key)
    right = [n for n in widths if widths[n] == width]
    if name not in widths:
        return f"a {pipeline_class}", (right or [n for n in widths if n != "tiny"])[0]
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
