"""``Family``: everything that differs between kinds of latent-diffusion models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families.architecture import Architecture, Component, Part, shipped_architectures
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import Encode, LatentSpace, Normal, vae_factor
from sd_lightning.models.families.lora_names import LoraNames
from sd_lightning.models.families.sampling import said_once, scheduler_class
from sd_lightning.models.families.tensor_parallel import TEXT_ENCODERS, published_plan
from sd_lightning.quantization.tensor_parallel import Plan, Style

if TYPE_CHECKING:
    from PIL import Image

Layout = Literal["v1", "v2", "xl"]
"""Names of weights in a single-file checkpoint."""
SIZE_MULTIPLE = 8
"""Heights and widths of images, in pixels, are multiples of it: diffusers' pipelines refuse others."""
TILE = 256
"""Side of the tiles of tiled decoding, pixels. diffusers uses the native size of the VAE, 512 or more, so that an
image of 512 x 512 would be a single tile."""
MASK = "_mask"
"""End of the names of masks beside token ids: "text_encoder_mask"."""
SIZES = ("original_size", "crop_top_left", "target_size")
"""Batch entries for families that condition on sizes: (height, width) in pixels per image, (B, 2)."""


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
    width_key: str = ""
    """Key of the denoiser's configuration that tells the family's architectures apart."""
    optional: tuple[str, ...] = ()
    """Text encoders that a pipeline may lack, with their tokenizers."""
    frozen: tuple[str, ...] = ()
    """Text encoders that are never trained: chat models and T5 are too large, and made for more than captions."""
    has_attention_masks: bool = False
    """Whether :meth:`tokenize` gives, beside ids, where they are no padding."""
    max_sequence_length: int | None = None
    """Tokens per caption, where the tokenizer would read more."""
    chat_template: str | None = None
    """Of the tokenizers of models built without files."""
    num_inference_steps: int = 25
    """Steps of drawing, where none are chosen."""
    guidance_scale: float = 7.5
    """Guidance of drawing, where none is chosen."""
    no_guidance: float = 1.0
    """The pipeline's ``guidance_scale`` up to which it draws without guidance."""
    guides_in_turn: bool = False
    """Whether the pipeline calls the denoiser twice a step for guidance, not once with twice the samples."""
    example_scheduler: str = "DDIMScheduler"
    """A scheduler that the pipeline can sample with, for messages."""
    divided_layers: Mapping[str, Style] = {}
    """Layers of the denoiser that several processes divide, beside those of diffusers' plan; see :class:`Plan`."""
    divided_heads: tuple[str, ...] = ()
    """Attributes of its attention modules that count heads, where shapes alone do not tell their number."""
    lora_targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Name endings of the denoiser's layers that get LoRA adapters by default, ``*`` for any number: those of
    diffusers' DreamBooth script for the family."""
    lora_names: LoraNames = LoraNames()
    """Names of these layers in other front ends; the default is that of UNets, for which all accept diffusers'."""
    select_layers: tuple[int, ...] = ()
    """Hidden states of the text encoder that are encoded captions, where ``model_index.json`` names them."""
    masks_padding: bool = False
    """Whether padded tokens never reach the denoiser's result: stores then leave out their embeddings."""
    vae_overflows: bool = False
    """Whether diffusers' pipeline decodes in float32 instead of float16 if the VAE has ``force_upcast``."""
    distilled_by: str = "is_distilled"
    """Option of ``model_index.json`` that tells a distilled checkpoint, made to draw in few steps without guidance."""
    distilled_takes_guidance: bool = False
    """Whether the pipeline of a distilled checkpoint uses a guidance scale that it is given."""
    base_checkpoint: str = ""
    """What to train instead of such a one."""
    image_channels: int = 0
    """Channels that the denoiser takes beside noisy latents, made of the image in each step: a mask, a depth map."""
    drawn_from: tuple[str, ...] = ()
    """Pictures that :meth:`draw` may begin with, all of them or none: "image", "mask"."""

    @cached_property
    def architectures(self) -> Mapping[str, Architecture]:
        """Architectures by their ``model=`` name: those that ship for the pipeline class. A subclass may set others."""
        known = shipped_architectures().items()
        return {name: each for name, each in known if each.pipeline_class == self.pipeline_class}

    def published(self, components: Mapping[str, Component]) -> Architecture | None:
        """Return the architecture of published weights that a model has, by its width; None if it has none."""
        width = components[self.denoiser].config.get(self.width_key)
        ours = [each for each in self.architectures.values() if not each.is_tiny]
        widths = [each.networks[self.denoiser].config.get(self.width_key) for each in ours]
        return next((each for each, theirs in zip(ours, widths, strict=True) if theirs == width), None)

    # Parts

    @cached_property
    def text_encoders(self) -> tuple[str, ...]:
        """Names of the text encoders."""
        return tuple(filter(self.is_text_encoder, self.parts))

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """Names of all networks."""
        others = {"feature_extractor", *map(self.tokenizer_of, self.text_encoders)}
        return tuple(name for name in self.parts if name not in others)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the networks that may be trained, in execution order."""
        return *(name for name in self.text_encoders if name not in self.frozen), self.denoiser

    def named(self, names: Iterable[str]) -> set[str]:
        """Return the networks that names and the roles "denoiser", "text_encoders", "trainable", "all" stand for."""
        roles = {"all": self.networks, "denoiser": (self.denoiser,), "text_encoders": self.text_encoders}
        roles["trainable"] = self.trainable
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

    def processors(self, components: Mapping[str, Component]) -> dict[str, Any]:
        """Return the image processors, by name, of a model built without files."""
        return {}

    def of_options(self, options: Mapping[str, Any]) -> Family:
        """Return the family of models with these options of ``model_index.json``, of which some change how it works."""
        return self

    def check_trained_text(self, *, train_text_encoder: bool, learns_token: bool) -> None:
        """Check that text encoders may be trained, if they are, or if a token is learned.

        Raises:
            UsageError: All stay frozen; or one does, which would not know the token.
        """
        if learns_token and self.frozen:
            given, setting = "a learned_token", "learned_token (of dreambooth: learn_token)"
        elif train_text_encoder and len(self.frozen) == len(self.text_encoders):
            given, setting = "train_text_encoder=true", "train_text_encoder (of train: module.train_text_encoder)"
        else:
            return
        raise UsageError(
            f"SDLightningModule got {given} and a {self.pipeline_class}, whose {self.frozen[-1]} is a language model "
            f"that stays frozen; leave out {setting}"
        )

    def unused_parameters(self, denoiser: nn.Module) -> list[str]:
        """Return the names of weights of the denoiser that its prediction does not depend on, which stay frozen.

        DistributedDataParallel would wait for their gradients.
        """
        return []

    # Captions

    def adapt(self, tokenizer: Any) -> None:
        """Make the tokenizer that ships with the package one of this family, for models built without files."""
        tokenizer.chat_template = self.chat_template

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        """Return what the tokenizer reads for captions; it may have a chat template."""
        return list(captions)

    def max_length(self, tokenizer: Any) -> int:
        """Return the number of tokens per caption."""
        length = int(tokenizer.model_max_length)
        return length if self.max_sequence_length is None else min(length, self.max_sequence_length)

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, L), int64, padded and truncated, by text encoder; L may differ between encoders.

        With :attr:`has_attention_masks`, ``<text encoder>_mask`` (B, L) is 1 for tokens and 0 for padding.
        """
        found: dict[str, Tensor] = {}
        for name in [each for each in self.text_encoders if self.tokenizer_of(each) in tokenizers]:
            tokenizer = tokenizers[self.tokenizer_of(name)]
            length = {"padding": "max_length", "truncation": True, "max_length": self.max_length(tokenizer)}
            if self.masks_padding:  # what is left out is the end; some published tokenizers pad in front
                length["padding_side"] = "right"
            made = tokenizer(self.prompts(tokenizer, captions), **length, return_tensors="pt")
            found[name] = made.input_ids
            if self.has_attention_masks:
                found[f"{name}{MASK}"] = made.attention_mask
        return found

    def for_pipeline(self, tokenizers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the pipeline takes for the tokenizers."""
        return tokenizers

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
            batch: With :data:`SIZES`, and ``image_channels`` where the family has any.
        """
        return dict(embeddings)

    def condition(self, text_encoders: Mapping[str, nn.Module], batch: Mapping[str, Any]) -> Conditioning:
        """Encode captions, and join the rest: :meth:`embed`, then :meth:`conditioning`.

        Args:
            text_encoders: By name.
            batch: ``input_ids``, from :meth:`tokenize`, and what :meth:`conditioning` takes.
        """
        return self.conditioning(self.embed(text_encoders, batch["input_ids"]), batch)

    # Pixels

    def vae_dtype(self, vae: nn.Module, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype for a VAE in a model of ``dtype``: float32 if it may overflow (``force_upcast``)."""
        config: Mapping[str, Any] = vae.config  # type: ignore[assignment]
        overflows = dtype == torch.float16 and config.get("force_upcast", False)
        return torch.float32 if overflows else dtype

    def draws_in_float32(self, name: str, network: nn.Module) -> bool:
        """Return whether a network, in int8 too, computes in float32 instead of float16, in which it overflows."""
        if self.is_text_encoder(name):  # the list of transformers; diffusers has one of what is sensitive to rounding
            return bool(getattr(network, "_keep_in_fp32_modules", None))
        config: Any = network.config
        return self.vae_overflows and bool(getattr(config, "force_upcast", False))

    def tensor_parallel_plan(self, name: str, network: nn.Module) -> Plan:
        """Return what of a network several processes divide."""
        if self.is_text_encoder(name):
            return TEXT_ENCODERS
        if name != self.denoiser:
            return Plan({})
        return Plan({**published_plan(network), **self.divided_layers}, self.divided_heads, must_divide=True)

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

    def check_sizes(
        self,
        *sides: int,
        vae_config: Mapping[str, Any],
        denoiser_config: Mapping[str, Any] | None = None,
        setting: str,
        who: str = "",
    ) -> None:
        """Check that a model takes images of some sides, in pixels.

        Args:
            *sides: Heights and widths.
            vae_config: Of the model's VAE.
            denoiser_config: Of its denoiser, which may know only so many positions; None does not look at it.
            setting: The setting of the sides, for the message.
            who: What the message begins with.

        Raises:
            UsageError: The VAE and the patches of the denoiser cannot divide one, or it is too large.
        """
        multiple = self.size_multiple(vae_config)
        most = None if denoiser_config is None else self.largest_side(vae_config, denoiser_config)
        for side in sides:
            if most is not None and side > most:
                raise UsageError(
                    f"{who}{setting}={side}: the {self.denoiser} of this {self.pipeline_class} knows the positions of "
                    f"images with sides of up to {most} pixels; write {setting}={most}"
                )
            if side < multiple or side % multiple:
                raise UsageError(
                    f"{who}{setting}={side}: a {self.pipeline_class} of this VAE takes images with sides that are "
                    f"multiples of {multiple} pixels; write {setting}={max(round(side / multiple), 1) * multiple}"
                )

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        """Encode images (B, 3, H, W) in [-1, 1]; latents are made from the result, and stores keep it.

        The default is the moments of the VAE's posterior: mean and log-variance (B, 2C, h, w).
        """
        return vae.encode(pixel_values).latent_dist.parameters

    def image_inputs(self, pixels: Tensor, parts: Mapping[str, Any], latents: Encode, uniform: Normal) -> Tensor:
        """Return the :attr:`image_channels` (B, N, h, w) that the denoiser takes of images; the default has none.

        Args:
            pixels: (B, 3, H, W) in [-1, 1].
            parts: Networks, tokenizers and image processors by name.
            latents: Encodes images.
            uniform: As :data:`Normal`, but draws numbers in [0, 1).
        """
        raise NotImplementedError(f"{type(self).__name__}.image_inputs")

    def check_latents(self, who: str) -> None:
        """Check that the denoiser can be trained on latents and captions alone.

        Raises:
            UsageError: It also takes what is made of images; the message begins with ``who``.
        """
        if self.image_channels:
            raise UsageError(
                f"{who}: a {self.pipeline_class} is trained with masks or depth maps that are made of the images in "
                "each step, so latents are not enough; train on images, with data.cache_latents=false"
            )

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Return the images (B, 3, H, W) of the VAE's own latents, from :meth:`LatentSpace.decodable`."""
        return vae.decode(latents).sample

    def image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens that the denoiser makes of latents (h, w), which dynamic noise shifts go by."""
        return height * width

    @contextmanager
    def decoding_in_tiles(self, vae: Any, tiling: bool) -> Iterator[None]:
        """If ``tiling``, make the VAE decode in overlapping tiles of at most ``TILE`` pixels per side."""
        names = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size")
        before = {name: getattr(vae, name) for name in names if hasattr(vae, name)}
        if tiling:
            vae.enable_tiling()
        if tiling and len(before) == len(names):  # those of the VAEs of films have 256 pixels
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

        Hides the network's own packing of pixels, position ids and sign.

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

    def embeds_guidance(self, denoiser_config: Mapping[str, Any]) -> bool:
        """Return whether a denoiser takes the guidance scale as an input, and draws in one pass per step."""
        return False

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
            file = "" if name else "the model's scheduler_config.json names it: copy that file again, or "
            raise UsageError(
                f"scheduler={name or class_name}: {self.pipeline_class} cannot sample with it; {file}choose another, "
                f"such as {self.example_scheduler}"
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
            **options: ``num_inference_steps``, ``guidance_scale``, ``height``, ``width``; the pictures of
                :attr:`drawn_from`, and with them ``strength``, the share of the steps to take, in (0, 1].
        """
        return pipeline(
            prompt=list(prompts),
            # None, not "": some pipelines have a special embedding for no negative prompt.
            negative_prompt=[negative_prompt] * len(prompts) if negative_prompt else None,
            generator=generators,
            **options,
        ).images

    # Files

    def embedding_keys(self, placeholder_token: str) -> tuple[str, ...]:
        """Return the keys of a learned token in diffusers' textual inversion file, one per text encoder."""
        return (placeholder_token,)

    def single_file_layout(self, components: Mapping[str, Component]) -> Layout | None:
        """Return the original one-file layout of the family's models, None if there is none."""
        return None
