"""Qwen-Image 2.1: a transformer of one stream, in which an image sees its caption and no caption sees an image.

Positions, time and text are those of the Qwen team's reference, as diffusers has them. The sizes of ``qwen_image_21``
are those of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Architecture, Component, Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import vae_factor
from sd_lightning.models.families.qwen import QwenFamily
from sd_lightning.models.families.transformer import flow_euler

if TYPE_CHECKING:
    from PIL import Image

SLOT = 2
"""Side of the squares of an image's tokens, each one token of a chat model that sees; sides are multiples of it."""
PREFIX = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
PREFIX_TOKENS = 14
"""Of :data:`PREFIX`, by the published tokenizer; the pipeline counts them."""
SEES = {
    "preprocessor_config.json": '{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}\n',
    "video_preprocessor_config.json": '{"video_processor_type": "Qwen3VLVideoProcessor"}\n',
}
"""A processor's files beside those of its tokenizer, for models built without files."""


def transformer(**config: Any) -> Component:
    """Return the denoiser of the published model, whose sizes are the class's own."""
    return Component("diffusers", "QwenImage21Transformer2DModel", {"num_attention_heads": 32} | config)


def qwen3_vl(mrope_section: list[int], vision_config: dict[str, Any], **config: Any) -> Component:
    """Return a Qwen3-VL text encoder (arXiv 2511.21631)."""
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": mrope_section, "mrope_interleaved": True}
    own = {"text_config": {"rope_parameters": rope, **config}, "vision_config": vision_config}
    return Component("transformers", "Qwen3VLForConditionalGeneration", own)


class QwenImage21(QwenFamily):
    """Qwen-Image 2.1, for captions alone. Each image's positions go on where its own caption ends.

    Images are trained with full alpha; those that are drawn are put on white.
    """

    pipeline_class = "QwenImage21Pipeline"
    parts = {
        "transformer": Part("diffusers", ("QwenImage21Transformer2DModel",)),
        "vae": Part("diffusers", ("AutoencoderKLQwenImage21",)),
        "text_encoder": Part("transformers", ("Qwen3VLForConditionalGeneration",)),
        "processor": Part("transformers", ("Qwen3VLProcessor",), loads="PreTrainedTokenizerFast"),
    }
    pipeline_options = {"sample_sigmas": None}
    stored_options = {"sample_sigmas": None}
    width_key = "num_attention_heads"
    guidance_option = "true_cfg_scale"
    num_inference_steps = 40
    guidance_scale = 1.0  # "meant to be sampled without guidance"
    patch_size = 1
    prefix, prefix_tokens = PREFIX, PREFIX_TOKENS
    suffix = "<|im_end|>\n<|im_start|>assistant\n"
    max_sequence_length = 512 + PREFIX_TOKENS
    words = rf"Com|pre|hend|{QwenFamily.words}"
    chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}"
    )

    def refusal_to_train(self, options: Mapping[str, Any]) -> str | None:
        if not options.get("sample_sigmas"):
            return None
        return (
            "it has sample_sigmas: it draws in few steps without guidance, which training would undo; train the base "
            "checkpoint, Qwen/Qwen-Image-2.1"
        )

    def ignores_guidance(self, options: Mapping[str, Any]) -> bool:
        return bool(options.get("sample_sigmas"))

    # Captions

    @staticmethod
    def tokenizer_of(text_encoder: str) -> str:
        return "processor"

    def adapt(self, tokenizer: Any) -> None:
        tokenizer.add_tokens(["<|image_pad|>"])
        super().adapt(tokenizer)
        tokenizer.chat_template, tokenizer.processor_files = self.chat_template, SEES

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        users = (f"<|im_start|>user\n{caption or ' '}" for caption in captions)
        return [f"{self.prefix}{user}{self.suffix}" for user in users]

    def for_pipeline(self, tokenizers: Mapping[str, Any]) -> dict[str, Any]:
        return {name: TextProcessor(tokenizer) for name, tokenizer in tokenizers.items()}

    def embed(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the last hidden state before its norm, ``encoder_hidden_states`` (B, L, D), and its mask (B, L)."""
        norm = text_encoders["text_encoder"].get_decoder().norm
        handle = norm.register_forward_hook(lambda module, inputs, output: inputs[0])
        try:
            states = self.hidden_states(text_encoders, input_ids)[-1]
        finally:
            handle.remove()
        mask = input_ids[f"text_encoder{MASK}"].to(states.dtype)
        return {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask}

    # Pixels

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        return vae_factor(vae_config) * SLOT

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        return super().encode(vae, F.pad(pixel_values, (0, 0, 0, 0, 0, 1), value=1.0))

    # Noise

    def denoise(
        self, denoiser: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count, _, height, width = noisy_latents.shape
        mask = conditioning["encoder_hidden_states_mask"].bool()
        length, host = mask.shape[1], "cpu" if mask.is_meta else mask.device
        slots = torch.arange(length + height * width // SLOT**2, device=host) >= length
        methods = _layout(denoiser, mask, height, width)
        vars(denoiser).update(methods)
        try:
            made: Tensor = denoiser(
                hidden_states=noisy_latents.flatten(2).mT,
                encoder_hidden_states=conditioning["encoder_hidden_states"],
                encoder_hidden_states_mask=mask,
                timestep=timesteps.expand(count) / 1000,
                img_shapes=[[(1, height, width)]] * count,
                img_mask=slots.expand(count, -1),
                return_dict=False,
            )[0]
        finally:
            for name in methods:
                vars(denoiser).pop(name)
        return made[:, length:].mT.unflatten(2, (height, width))

    # Sampling

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        mask = conditioning["encoder_hidden_states_mask"].bool()
        longest = int(mask.sum(1).max())
        embeds = conditioning["encoder_hidden_states"][:, :longest]
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask[:, :longest]}

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        *,
        generators: list[torch.Generator],
        num_inference_steps: int,
        **options: Any,
    ) -> list[Image.Image]:
        """Draw captions of one length together: the pipeline gives all images the positions after the longest."""
        from PIL import Image

        own = pipeline.config.sample_sigmas
        if own and num_inference_steps not in (len(own), self.num_inference_steps):
            options["sigmas"] = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        mask = self.tokenize({"processor": pipeline.processor.tokenizer}, prompts)[f"text_encoder{MASK}"]
        lengths = mask.sum(1).tolist()
        images: dict[int, Image.Image] = {}
        for length in set(lengths):
            chosen = [i for i, each in enumerate(lengths) if each == length]
            given, noise = [prompts[i] for i in chosen], [generators[i] for i in chosen]
            drawn = super().draw(pipeline, given, generators=noise, num_inference_steps=num_inference_steps, **options)
            for i, image in zip(chosen, drawn, strict=True):
                white = Image.new("RGBA", image.size, "white")
                images[i] = Image.alpha_composite(white, image).convert("RGB")
        return [images[i] for i in range(len(prompts))]

    architectures = {
        "tiny_qwen_image_21": Architecture(
            pipeline_class,
            networks={
                "transformer": transformer(
                    in_channels=16,
                    out_channels=16,
                    num_layers=4,
                    attention_head_dim=16,
                    num_attention_heads=6,
                    context_in_dim=32,
                    axes_dims_rope=[4, 6, 6],
                ),
                "vae": Component(
                    "diffusers",
                    "AutoencoderKLQwenImage21",
                    {
                        "base_dim": 4,
                        "decoder_base_dim": 4,
                        "z_dim": 16,
                        "dim_mult": [1, 2, 4, 4, 4],
                        "num_res_blocks": 1,
                        "latents_mean": [0.0] * 16,
                        "latents_std": [1.0] * 16,
                    },
                ),
                "text_encoder": qwen3_vl(
                    [2, 1, 1],
                    {
                        **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
                        **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
                    },
                    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8},
                    **{"num_attention_heads": 4, "num_key_value_heads": 2},
                ),
            },
            scheduler=flow_euler(shift=1.0, max_image_seq_len=1),
            max_length=20 + PREFIX_TOKENS,
            token_embedding_std=1.0,
            is_tiny=True,
            shipped_vae="rgba_vae",
        ),
        "qwen_image_21": Architecture(
            pipeline_class,
            networks={
                "transformer": transformer(),
                "vae": Component("diffusers", "AutoencoderKLQwenImage21", {"dim_mult": [1, 2, 4, 8, 8]}),
                "text_encoder": qwen3_vl(
                    [24, 20, 20],
                    {"out_hidden_size": 4096},
                    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128},
                    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
                    max_position_embeddings=262144,
                ),
            },
            scheduler=flow_euler(use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02),
            max_length=512 + PREFIX_TOKENS,
        ),
    }


@dataclass
class TextProcessor:
    """What the pipeline calls of ``Qwen3VLProcessor`` for captions; that one needs torchvision, to see."""

    tokenizer: Any

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[Any]:
        return [self.tokenizer.apply_chat_template(conversation, **options)]


@dataclass
class _OfSamples:
    """Rotary factors (B, S, D) in place of the network's own (S, D), which are the same for all samples."""

    factors: Tensor

    def unsqueeze(self, dim: int) -> Tensor:
        """Return the factors of all heads; the network's have no dimension of samples, so that ``dim`` is one less."""
        return self.factors.unsqueeze(dim + 1)


@dataclass
class _Image:
    """The mask (S,) of an image's tokens, where it is used, and on the host, where the network counts."""

    mask: Tensor
    counted: Tensor

    def view(self, *shape: int) -> Tensor:
        return self.mask.view(*shape)

    def __invert__(self) -> Tensor:
        return ~self.counted


def _layout(network: Any, mask: Tensor, height: int, width: int) -> dict[str, Any]:
    """Return methods by which the network's forward gives each sample positions of its own, as if it were alone.

    Its own ones count padding, so that an image would depend on the other captions of its batch.

    Args:
        network: The denoiser.
        mask: (B, L), False where captions are padded.
        height: Of the image, in tokens.
        width: Likewise.
    """
    (count, length), device = mask.shape, mask.device
    text = torch.arange(length, device=device)
    rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in (height, width))
    frame = torch.cat([text.expand(count, -1), mask.sum(1, keepdim=True).expand(-1, height * width)], dim=1)
    grid = (torch.cat([text, each]) for each in (rows.repeat_interleave(width), columns.repeat(height)))
    tables = [table.to(device) for table in network.pos_embed.freqs]
    factors = [table[index].expand(count, -1, -1) for table, index in zip(tables, (frame, *grid), strict=True)]
    rotary = _OfSamples(torch.cat(factors, dim=-1))
    image = torch.arange(length + height * width, device="cpu") >= length
    metadata = image.long() - 1, _Image(image.to(device), image)
    return {"pos_embed": lambda *_, **__: rotary, "build_token_metadata": lambda *_: metadata}
