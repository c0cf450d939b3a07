"""``Family``: everything that differs between kinds of latent-diffusion models."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families.latents import LatentSpace, vae_factor
from sd_lightning.models.families.lora_names import LoraNames
from sd_lightning.models.families.sampling import said_once, scheduler_class

if TYPE_CHECKING:
    from PIL import Image

Layout = Literal["v1", "v2", "xl"]
"""Names of weights in a single-file checkpoint."""
Conditioning = dict[str, Any]
"""Encoded captions, the denoiser's input: tensors whose first dimension is the batch, possibly in nested dicts."""
SIZE_MULTIPLE = 8
"""Heights and widths of images, in pixels, are multiples of it: diffusers' pipelines refuse others."""
TILE = 256
"""Side of the tiles of tiled decoding, pixels. diffusers uses the native size of the VAE, 512 or more, so that an
image of 512 x 512 would be a single tile."""
SIZES = ("original_size", "crop_top_left", "target_size")
"""Batch entries for families that condition on sizes: (height, width) in pixels per image, (B, 2)."""


class Batch(TypedDict, total=False):
    """Samples on their way to the loss; frozen encoders replace pixels and captions. Every tensor begins with (B,)."""

    epoch: Tensor
    """(B,) int64."""
    index: Tensor
    """(B,) int64, global sample index."""
    pixel_values: Tensor
    """(B, 3, H, W) in [-1, 1]."""
    latent_moments: Tensor
    """(B, 2C, h, w), from which latents are sampled."""
    latents: Tensor
    """(B, C, h, w), scaled to about unit variance."""
    input_ids: dict[str, Tensor]
    """Token ids (B, L) by text encoder."""
    text_embeddings: Conditioning
    """Encoded captions, without what depends on the image."""
    conditioning: Conditioning
    original_size: Tensor
    crop_top_left: Tensor
    target_size: Tensor
    wrong_input_ids: dict[str, Tensor]
    """Token ids of other samples' captions, in validation."""
    wrong_text_embeddings: Conditioning
    wrong_conditioning: Conditioning
    loss_weight: Tensor
    """(B,), in training."""
    sample_weight: Tensor
    """(B,), in validation: 0 for samples that fill up a batch."""


def join_conditioning(parts: Sequence[Mapping[str, Any]]) -> Conditioning:
    """Concatenate the conditioning of several batches."""
    return {
        key: join_conditioning([part[key] for part in parts])
        if isinstance(value, Mapping)
        else torch.cat([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def map_conditioning(conditioning: Mapping[str, Any], fn: Callable[[Tensor], Any]) -> Conditioning:
    """Apply ``fn`` to every tensor of a (nested) conditioning dictionary, or of a batch; keep other values."""
    return {
        k: map_conditioning(v, fn) if isinstance(v, Mapping) else fn(v) if isinstance(v, Tensor) else v
        for k, v in conditioning.items()
    }


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

    @property
    def is_of_transformers(self) -> bool:
        return self.library == "transformers"

    @property
    def weights_file(self) -> str:
        """Name of a network's weight file in a pipeline folder."""
        return "model.safetensors" if self.is_of_transformers else "diffusion_pytorch_model.safetensors"

    def load_class(self) -> Any:
        """Return the class; importing its library may take seconds."""
        return getattr(importlib.import_module(self.library), self.class_name)

    def instantiate(self, *, seed: int | None = None) -> nn.Module:
        """Build a network from its configuration, with random weights.

        Args:
            seed: Seed of the weights, drawn without a change of the global generator; None draws from that one.
        """
        if seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.instantiate()
        cls = self.load_class()
        network: nn.Module = (
            cls(cls.config_class(**self.config)) if self.is_of_transformers else cls.from_config(dict(self.config))
        )
        return network

    def saved_config(self) -> dict[str, Any]:
        """Return the JSON content of the configuration file."""
        if not self.is_of_transformers:
            return {**self.config, "_class_name": self.class_name, "_diffusers_version": version("diffusers")}
        model_type = self.load_class().config_class.model_type
        return {"architectures": [self.class_name], "model_type": model_type, **self.config}

    def file_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Map the tensor names of a network in memory to the keys in its weight file.

        transformers 5 dropped the ``text_model.`` prefix of ``CLIPTextModel`` in memory and reads files with or
        without it. Files on the hub and all other front ends have it, so we write it.
        """
        prefix = "text_model." if self.class_name == "CLIPTextModel" else ""
        return {name: name if name.startswith("text_model.") else prefix + name for name in names}


@dataclass(frozen=True)
class Part:
    """The classes allowed for a part of a pipeline; a ``model_index.json`` that names another one is refused."""

    library: str
    classes: tuple[str, ...]
    """Allowed class names; tokenizers that ship with the package are of the first."""

    def named(self, tokenizer: Any) -> tuple[str, str]:
        """Return library and class of a tokenizer, as in ``model_index.json``."""
        known = (name for name in self.classes if type(tokenizer) is Component(self.library, name).load_class())
        return self.library, next(known, self.classes[0])


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
    has_tiny_vae: bool = False
    """Whether the VAE gets the trained weights that ship with the package."""

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
    trains_text_encoders: bool = True
    """Whether text encoders may be trained; chat models are too large, and made for more than captions."""
    has_attention_masks: bool = False
    """Whether :meth:`tokenize` gives, beside ids, where they are no padding."""
    most_tokens: int | None = None
    """Tokens per caption, where the tokenizer would read more."""
    chat_template: str | None = None
    """Of the tokenizers of models built without files."""
    no_guidance: float = 1.0
    """The pipeline's ``guidance_scale`` up to which it draws without guidance."""
    example_scheduler: str = "DDIMScheduler"
    """A scheduler that the pipeline can sample with, for messages."""
    lora_targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Name endings of the denoiser's layers that get LoRA adapters by default, ``*`` for any number: those of
    diffusers' DreamBooth script for the family."""
    lora_names: LoraNames = LoraNames()
    """Names of these layers in other front ends; the default is that of UNets, for which all accept diffusers'."""
    masks_padding: bool = False
    """Whether padded tokens never reach the denoiser's result: stores then leave out their embeddings."""
    vae_overflows: bool = False
    """Whether diffusers' pipeline decodes in float32 instead of float16 if the VAE has ``force_upcast``."""

    # Parts

    @cached_property
    def text_encoders(self) -> tuple[str, ...]:
        """Names of the text encoders."""
        return tuple(filter(self.is_text_encoder, self.parts))

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """Names of all networks."""
        return tuple(name for name in self.parts if not name.startswith("tokenizer"))

    def named(self, names: Iterable[str]) -> set[str]:
        """Return the networks that names and the roles "denoiser", "text_encoders" and "all" stand for."""
        roles = {"all": self.networks, "denoiser": (self.denoiser,), "text_encoders": self.text_encoders}
        return {network for name in names for network in roles.get(name, (name,))}

    @staticmethod
    def is_text_encoder(network: str) -> bool:
        """Return whether this is the name of a text encoder."""
        return network.startswith("text_encoder")

    @staticmethod
    def tokenizer_of(text_encoder: str) -> str:
        """Return the name of a text encoder's tokenizer."""
        return text_encoder.replace("text_encoder", "tokenizer")

    @abstractmethod
    def resolution(self, components: Mapping[str, Component]) -> int:
        """Return the native image size of a model: side in pixels."""

    def refusal_to_train(self, options: Mapping[str, Any]) -> str | None:
        """Return why a pipeline with these options of ``model_index.json`` cannot be trained, and the remedy."""
        return None

    def check_trained_text(self, setting: str) -> None:
        """Check that text encoders may be trained, as a setting asks for: "train_text_encoder=true".

        Raises:
            UsageError: They are chat models.
        """
        if not self.trains_text_encoders:
            raise UsageError(
                f"module got {setting} and a {self.pipeline_class}, whose text encoder is a chat model that stays "
                f"frozen; leave {setting.partition('=')[0]} out"
            )

    # Captions

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        """Return what the tokenizer reads for captions; it may have a chat template."""
        return list(captions)

    def max_length(self, tokenizer: Any) -> int:
        """Return the number of tokens per caption."""
        length = int(tokenizer.model_max_length)
        return length if self.most_tokens is None else min(length, self.most_tokens)

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, L), int64, padded and truncated, by text encoder; L may differ between encoders.

        With :attr:`has_attention_masks`, ``<text encoder>_mask`` (B, L) is 1 for tokens and 0 for padding.
        """
        found: dict[str, Tensor] = {}
        for name in self.text_encoders:
            tokenizer = tokenizers[self.tokenizer_of(name)]
            length = {"padding": "max_length", "truncation": True, "max_length": self.max_length(tokenizer)}
            if self.masks_padding:  # what is left out is the end; some published tokenizers pad in front
                length["padding_side"] = "right"
            made = tokenizer(self.prompts(tokenizer, captions), **length, return_tensors="pt")
            found[name] = made.input_ids
            if self.has_attention_masks:
                found[f"{name}_mask"] = made.attention_mask
        return found

    @abstractmethod
    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Encode captions: the part of the conditioning that depends on nothing else, so that it can be stored.

        Args:
            text_encoders: By name.
            input_ids: From :meth:`tokenize`.

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

    def draws_in_float32(self, network: nn.Module) -> bool:
        """Return whether diffusers' pipeline computes with a network in float32 instead of float16."""
        config: Any = network.config
        return self.vae_overflows and bool(getattr(config, "force_upcast", False))

    def latent_space(self, vae: Any) -> LatentSpace:
        """Return how a VAE's encoded images become latents, shifted and scaled to about unit variance.

        Args:
            vae: The network; on the meta device, shapes are known but no statistics that it has as buffers.
        """
        config: Mapping[str, Any] = vae.config
        return LatentSpace(
            channels=int(config.get("latent_channels", 4)),
            factor=vae_factor(config),
            shift=float(config.get("shift_factor") or 0.0),
            scale=float(config.get("scaling_factor", 0.18215)),
        )

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        """Return the number of pixels of which the sides of images are multiples."""
        return SIZE_MULTIPLE

    def largest_side(self, vae_config: Mapping[str, Any], denoiser_config: Mapping[str, Any]) -> int | None:
        """Return the largest side of images, in pixels, whose positions the denoiser knows; None for no limit."""
        return None

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) in [-1, 1]; latents are made from the result, and stores keep it.

        The default is the moments of the VAE's posterior: mean and log-variance (B, 2C, h, w).
        """
        moments: Tensor = vae.encode(pixel_values).latent_dist.parameters
        return moments

    def image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens that the denoiser makes of latents (h, w), which dynamic noise shifts go by."""
        return height * width

    @contextmanager
    def decoding_in_tiles(self, vae: Any, tiling: bool) -> Iterator[None]:
        """If ``tiling``, make the VAE decode in overlapping tiles of at most ``TILE`` pixels per side."""
        names = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size")
        before = {name: getattr(vae, name) for name in names}
        if tiling:
            vae.enable_tiling()
            vae.tile_sample_min_size = min(TILE, vae.tile_sample_min_size)
            vae.tile_latent_min_size = vae.tile_sample_min_size // vae_factor(vae.config)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(vae, name, value)

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

    def sampling_scheduler(self, component: Component, name: str | None = None) -> Any:
        """Build a sampling scheduler of a model's configuration.

        Args:
            component: The model's own scheduler.
            name: Class name or short name ("ddim", "euler", "dpmsolver++", …) of another scheduler.

        Raises:
            UsageError: diffusers has no such scheduler, or the pipeline cannot sample with it.
        """
        import diffusers

        class_name = component.class_name if name is None else scheduler_class(name)
        try:
            with said_once():
                scheduler = getattr(diffusers, class_name).from_config(dict(component.config))
        except Exception as error:  # a missing package, or values of unexpected types
            raise UsageError(f"scheduler={name or class_name}: cannot be built ({error}); choose another") from error
        if not self.samples_with(scheduler):
            raise UsageError(
                f"scheduler={name or class_name}: {self.pipeline_class} cannot sample with it; choose another, such as "
                f"{self.example_scheduler}"
            )
        return scheduler

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

    def single_file_layout(self, components: Mapping[str, Component]) -> Layout | None:
        """Return the original one-file layout of the family's models, None if there is none."""
        return None
