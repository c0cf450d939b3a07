"""`Family`: everything that differs between kinds of latent-diffusion models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families import autoencoder

if TYPE_CHECKING:
    from PIL import Image

    from sd_lightning.models.families.single_file import Layout

Conditioning = dict[str, Any]
"""What the denoiser knows of a caption: tensors whose first axis is the batch, possibly in nested dictionaries."""
SIZES = ("original_size", "crop_top_left", "target_size")
"""Per image (height, width) in pixels, (B, 2): what a batch holds for families that condition on sizes."""


@dataclass(frozen=True)
class Component:
    """A part of a model as a pipeline folder records it: library, class and configuration."""

    library: str
    """Module that has the class: "diffusers", "transformers"."""
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The classes that a part of a pipeline may have. A ``model_index.json`` that names another one is refused."""

    library: str
    classes: tuple[str, ...]
    """The first one is what is written."""


@dataclass(frozen=True)
class Architecture:
    """A model that can be built without files."""

    pipeline_class: str
    """Names the family."""
    networks: Mapping[str, Component]
    scheduler: Component
    max_length: int | Mapping[str, int] = 77
    """Tokens per caption; by text encoder where they differ."""
    token_embedding_std: float | None = None
    """Standard deviation that token embeddings are re-initialised with; None keeps the library's."""

    def length_of(self, text_encoder: str) -> int:
        """Return the tokens per caption of a text encoder."""
        return self.max_length if isinstance(self.max_length, int) else self.max_length[text_encoder]


class Family(ABC):
    """A kind of latent-diffusion model: its parts, and how captions, pixels and noise become what they compute on.

    A subclass is one file in ``models/families/``, registered with :func:`register`. Nothing else in the package
    knows what the denoiser is called, how many text encoders there are, or what shape latents have.
    """

    pipeline_class: str
    """Class of the pipeline that samples; its name in ``model_index.json`` names the family."""
    denoiser: str
    """Name of the network that predicts: "unet", "transformer"."""
    parts: Mapping[str, Part]
    """Networks and tokenizers of a pipeline by name. A ``text_encoder…`` has the ``tokenizer…`` of the same ending."""
    absent: tuple[str, ...] = ()
    """Parts that the pipeline may do without, and that are never written."""
    pipeline_options: Mapping[str, Any] = {}
    """Arguments of the pipeline that are not parts, as models that are built here have them."""
    stored_options: Mapping[str, Any] = {}
    """Those of them that are read from a folder's ``model_index.json``, with what their absence there means."""
    block_classes: tuple[str, ...] = ()
    """Names of the classes of the denoiser's and the text encoders' repeated blocks."""
    architectures: Mapping[str, Architecture] = {}
    """Models that can be built without files, by the name that ``model=`` knows them by."""
    width_key: str = ""
    """Key of the denoiser's configuration that tells the architectures of the family apart."""
    vae_overflows: bool = False
    """Whether the VAE overflows in float16 where its configuration has ``force_upcast``."""

    # What there is

    @cached_property
    def text_encoders(self) -> tuple[str, ...]:
        """Names of the text encoders."""
        return tuple(name for name in self.parts if name.startswith("text_encoder"))

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """Names of all networks."""
        return tuple(name for name in self.parts if not name.startswith("tokenizer"))

    @staticmethod
    def tokenizer_of(text_encoder: str) -> str:
        """Return the name of a text encoder's tokenizer."""
        return text_encoder.replace("text_encoder", "tokenizer")

    @abstractmethod
    def resolution(self, components: Mapping[str, Component]) -> int:
        """Return the side of the images that a model was made for, pixels."""

    # Captions

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, L), int64, padded and truncated, by text encoder; L may differ between them."""
        return {
            name: tokenizers[self.tokenizer_of(name)](
                list(captions), padding="max_length", truncation=True, return_tensors="pt"
            ).input_ids
            for name in self.text_encoders
        }

    @abstractmethod
    def condition(self, text_encoders: Mapping[str, nn.Module], batch: Mapping[str, Any]) -> Conditioning:
        """Encode captions.

        Args:
            text_encoders: By name.
            batch: ``input_ids``, by text encoder (B, L), and :data:`SIZES`.
        """

    # Pixels

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        """Encode (B, 3, H, W) in [-1, 1] to what latents are drawn from; this is what caches keep.

        Here the moments of a posterior, mean and log-variance (B, 2C, h, w).
        """
        return autoencoder.moments(vae, pixel_values)

    def latents(self, vae_config: Mapping[str, Any], encoded: Tensor, noise: Tensor) -> Tensor:
        """Draw latents from what :meth:`encode` returns, scaled to about unit variance.

        Args:
            vae_config: Configuration of the VAE.
            encoded: (B, 2C, h, w), float32.
            noise: Standard normal of :meth:`latent_shape`, (B, C, h, w).
        """
        return autoencoder.latents(vae_config, encoded, noise)

    def latent_shape(self, components: Mapping[str, Component], height: int, width: int) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of the latents of an image of so many pixels."""
        config = components["vae"].config
        scale = autoencoder.scale_factor(config)
        return int(config.get("latent_channels", 4)), height // scale, width // scale

    def decoding_in_tiles(self, vae: Any, tiling: bool) -> AbstractContextManager[None]:
        """Let the VAE decode pictures in overlapping tiles, which takes less memory, while the context lasts."""
        return autoencoder.decoding_in_tiles(vae, tiling)

    # Noise

    @abstractmethod
    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        """Predict what the objective asks for, (B, C, h, w), whatever packing, ids or sign the network has inside.

        Args:
            denoiser: The network.
            noisy_latents: (B, C, h, w).
            timesteps: (B,) or scalar, in [0, T]; whole numbers, or real ones for flow matching.
            conditioning: From :meth:`condition`.
        """

    # Sampling

    def pipeline_type(self) -> Any:
        """Return the class of the pipeline."""
        import diffusers

        return getattr(diffusers, self.pipeline_class)

    def samples_with(self, scheduler: Any) -> bool:
        """Return whether the pipeline can sample with a scheduler of diffusers."""
        return True

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        *,
        negative_prompt: str,
        generators: list[torch.Generator],
        **options: Any,
    ) -> list[Image.Image]:
        """Draw one picture per prompt.

        Args:
            pipeline: Of :meth:`pipeline_type`.
            prompts: One caption per picture.
            negative_prompt: What guidance leads away from; "" for nothing.
            generators: One per picture.
            **options: ``num_inference_steps``, ``guidance_scale``, ``height``, ``width``.
        """
        images: list[Image.Image] = pipeline(
            prompt=list(prompts),
            # None, not "": some pipelines have a special embedding for no negative prompt.
            negative_prompt=[negative_prompt] * len(prompts) if negative_prompt else None,
            generator=generators,
            **options,
        ).images
        return images

    # Files

    def embedding_keys(self, placeholder_token: str) -> tuple[str, ...]:
        """Return the keys, by text encoder, that diffusers' textual inversion file has for a learned word."""
        return (placeholder_token,)

    def single_file_layout(self, text_encoder_config: Mapping[str, Any]) -> Layout | None:
        """Return the original one-file layout that models of the family have; None if they have none."""
        return None
