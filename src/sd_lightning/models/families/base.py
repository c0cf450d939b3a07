"""``Family``: everything that differs between kinds of latent-diffusion models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sd_lightning.models.families import autoencoder

if TYPE_CHECKING:
    from PIL import Image

Layout = Literal["v1", "v2", "xl"]
"""Names of weights in a single-file checkpoint."""
Conditioning = dict[str, Any]
"""Encoded captions, the denoiser's input: tensors whose first dimension is the batch, possibly in nested dicts."""
SIZES = ("original_size", "crop_top_left", "target_size")
"""Batch entries for families that condition on sizes: (height, width) in pixels per image, (B, 2)."""


def join_conditioning(parts: Sequence[Mapping[str, Any]]) -> Conditioning:
    """Concatenate the conditioning of several batches."""
    return {
        key: join_conditioning([part[key] for part in parts])
        if isinstance(value, Mapping)
        else torch.cat([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def map_conditioning(conditioning: Mapping[str, Any], fn: Callable[[Tensor], Any]) -> Conditioning:
    """Apply ``fn`` to every tensor of a (nested) conditioning dictionary."""
    return {k: map_conditioning(v, fn) if isinstance(v, Mapping) else fn(v) for k, v in conditioning.items()}


def flat_conditioning(conditioning: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a (nested) conditioning dictionary by dotted names: "added_cond_kwargs.text_embeds"."""
    flat: dict[str, Tensor] = {}
    for key, value in conditioning.items():
        inner = {"": value} if isinstance(value, Tensor) else flat_conditioning(value)
        flat |= {f"{key}.{name}".rstrip("."): tensor for name, tensor in inner.items()}
    return flat


def nested_conditioning(flat: Mapping[str, Tensor]) -> Conditioning:
    """Return what :func:`flat_conditioning` was given."""
    nested: Conditioning = {}
    for name, tensor in flat.items():
        *parents, key = name.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[key] = tensor
    return nested


@dataclass(frozen=True)
class Component:
    """The record of a part of a model, as in a pipeline folder: library, class and configuration."""

    library: str
    """Module of the class: "diffusers", "transformers"."""
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The classes allowed for a part of a pipeline; a ``model_index.json`` that names another one is refused."""

    library: str
    classes: tuple[str, ...]
    """Allowed class names; for tokenizers the first one is saved."""


@dataclass(frozen=True)
class Architecture:
    """A model configuration that can be built without files."""

    pipeline_class: str
    """Selects the family."""
    networks: Mapping[str, Component]
    scheduler: Component
    max_length: int | Mapping[str, int] = 77
    """Tokens per caption; a mapping by text encoder if they differ."""
    token_embedding_std: float | None = None
    """Standard deviation of initial token embeddings; None keeps the library's."""

    def length_of(self, text_encoder: str) -> int:
        """Return the number of tokens per caption of a text encoder."""
        return self.max_length if isinstance(self.max_length, int) else self.max_length[text_encoder]


class Family(ABC):
    """A kind of latent-diffusion model: its parts, and how it encodes captions and pixels, denoises and samples.

    A subclass is one file in ``models/families/``, registered with :func:`register`. The rest of the package does not
    depend on the denoiser's name, the number of text encoders or the shape of latents.
    """

    pipeline_class: str
    """Class of the sampling pipeline; ``model_index.json`` has its name, which selects the family."""
    denoiser: str
    """Name of the denoising network: "unet", "transformer"."""
    parts: Mapping[str, Part]
    """Networks and tokenizers of a pipeline by name; ``text_encoder<suffix>`` uses ``tokenizer<suffix>``."""
    absent: tuple[str, ...] = ()
    """Optional parts of the pipeline, never written."""
    pipeline_options: Mapping[str, Any] = {}
    """Constructor arguments of the pipeline that are not parts: the defaults of models built here."""
    stored_options: Mapping[str, Any] = {}
    """Those that are read from ``model_index.json``, each with its value for files that do not have it."""
    block_classes: tuple[str, ...] = ()
    """Class names of the repeated blocks of the denoiser and the text encoders."""
    architectures: Mapping[str, Architecture] = {}
    """Architectures by their ``model=`` name."""
    width_key: str = ""
    """Key of the denoiser's configuration that tells the family's architectures apart."""
    vae_overflows: bool = False
    """Whether diffusers' pipeline decodes in float32 instead of float16 if the VAE has ``force_upcast``."""

    # Parts

    @cached_property
    def text_encoders(self) -> tuple[str, ...]:
        """Names of the text encoders."""
        return tuple(name for name in self.parts if name.startswith("text_encoder"))

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """Names of all networks."""
        return tuple(name for name in self.parts if not name.startswith("tokenizer"))

    def named(self, names: Iterable[str]) -> set[str]:
        """Return the networks that names and the roles "denoiser", "text_encoders" and "all" stand for."""
        roles = {"all": self.networks, "denoiser": (self.denoiser,), "text_encoders": self.text_encoders}
        return {network for name in names for network in roles.get(name, (name,))}

    @staticmethod
    def tokenizer_of(text_encoder: str) -> str:
        """Return the name of a text encoder's tokenizer."""
        return text_encoder.replace("text_encoder", "tokenizer")

    @abstractmethod
    def resolution(self, components: Mapping[str, Component]) -> int:
        """Return the native image size of a model: side in pixels."""

    # Captions

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, L), int64, padded and truncated, by text encoder; L may differ between encoders."""
        return {
            name: tokenizers[self.tokenizer_of(name)](
                list(captions), padding="max_length", truncation=True, return_tensors="pt"
            ).input_ids
            for name in self.text_encoders
        }

    @abstractmethod
    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Encode captions: the part of the conditioning that depends on nothing else, so that it can be stored.

        Args:
            text_encoders: By name.
            input_ids: By text encoder, (B, L).

        Returns:
            Tensors whose first dimension is the batch, possibly in nested dicts; names have no dots.
        """

    def conditioning(self, embeddings: Mapping[str, Any], batch: Mapping[str, Any]) -> Conditioning:
        """Join the result of :meth:`embed` with what else the denoiser is conditioned on.

        Args:
            embeddings: Of the batch's captions.
            batch: With :data:`SIZES`.
        """
        return dict(embeddings)

    def condition(self, text_encoders: Mapping[str, nn.Module], batch: Mapping[str, Any]) -> Conditioning:
        """Encode captions, and join the rest: :meth:`embed`, then :meth:`conditioning`.

        Args:
            text_encoders: By name.
            batch: ``input_ids``, by text encoder (B, L), and :data:`SIZES`.
        """
        return self.conditioning(self.embed(text_encoders, batch["input_ids"]), batch)

    # Pixels

    def vae_dtype(self, vae: nn.Module, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype for a VAE in a model of ``dtype``: float32 if it may overflow (``force_upcast``)."""
        config: Mapping[str, Any] = vae.config  # type: ignore[assignment]
        overflows = dtype == torch.float16 and config.get("force_upcast", False)
        return torch.float32 if overflows else dtype

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) in [-1, 1]; latents are sampled from the result, and caches store it.

        The default is the moments of the VAE's posterior: mean and log-variance (B, 2C, h, w).
        """
        moments: Tensor = vae.encode(pixel_values).latent_dist.parameters
        return moments

    def latents(self, vae_config: Mapping[str, Any], encoded: Tensor, noise: Tensor) -> Tensor:
        """Sample latents, scaled to about unit variance, from the result of :meth:`encode`.

        The default samples the posterior (Kingma & Welling 2013, arXiv 1312.6114, section 2.4), shifts and scales.

        Args:
            vae_config: Configuration of the VAE.
            encoded: (B, 2C, h, w), float32.
            noise: Standard normal (B, C, h, w); see :meth:`latent_shape`.
        """
        mean, log_variance = encoded.chunk(2, dim=1)
        sample = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise
        return (sample - (vae_config.get("shift_factor") or 0.0)) * float(vae_config.get("scaling_factor", 0.18215))

    def latent_shape(self, components: Mapping[str, Component], height: int, width: int) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of the latents of an image of ``height`` x ``width`` pixels."""
        config = components["vae"].config
        scale = autoencoder.scale_factor(config)
        return int(config.get("latent_channels", 4)), height // scale, width // scale

    def decoding_in_tiles(self, vae: Any, tiling: bool) -> AbstractContextManager[None]:
        """Make the VAE decode in overlapping tiles, to save memory, while the context lasts."""
        return autoencoder.decoding_in_tiles(vae, tiling)

    # Noise

    @abstractmethod
    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        """Return the denoiser's prediction (B, C, h, w) in the objective's convention.

        Hides the network's own packing, position ids and sign.

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
        """Return whether the pipeline can sample with this diffusers scheduler."""
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
        """Generate one image per prompt.

        Args:
            pipeline: An instance of :meth:`pipeline_type`.
            prompts: One caption per image.
            negative_prompt: Caption that guidance steers away from; "" for none.
            generators: One per image.
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
        """Return the keys of a learned token in diffusers' textual inversion file, one per text encoder."""
        return (placeholder_token,)

    def single_file_layout(self, text_encoder_config: Mapping[str, Any]) -> Layout | None:
        """Return the original one-file layout of the family's models, None if there is none."""
        return None
