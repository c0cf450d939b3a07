"""Qwen-Image 2.1: a transformer of one stream, in which an image sees its caption and no caption sees an image.

Positions, time and text are those of the Qwen team's reference, as diffusers has them. The sizes of ``qwen_image_21``
are those of the published checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import vae_factor
from sd_lightning.models.families.qwen_image import QwenImage
from sd_lightning.models.families.tensor_parallel import modulation

SLOT_SIZE = 2
"""Side of the squares of an image's tokens that are one token of a chat model that sees; they divide images."""
PREFIX = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
PREFIX_TOKENS = 14
"""Of :data:`PREFIX`, by the published tokenizer; the pipeline counts them."""
PROCESSOR_FILES = {
    "preprocessor_config.json": '{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}\n',
    "video_preprocessor_config.json": '{"video_processor_type": "Qwen3VLVideoProcessor"}\n',
}
"""A processor's files beside those of its tokenizer, for models built without files."""


class QwenImage21(QwenImage):
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
    pipeline_options = stored_options = {"sample_sigmas": None}
    divided_layers = modulation("modulation.1")
    distilled_by, base_checkpoint = "sample_sigmas", "the base checkpoint, Qwen/Qwen-Image-2.1"
    # The published model is made to draw without guidance.
    num_inference_steps, guidance_scale, patch_size = 40, 1.0, 1
    prefix, prefix_tokens, max_sequence_length = PREFIX, PREFIX_TOKENS, 512 + PREFIX_TOKENS
    words = rf"Com|pre|hend|{QwenImage.words}"
    chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}<|im_end|>\n{% endfor %}"

    def of_options(self, options: Mapping[str, Any]) -> QwenImage21:
        made = copy.copy(self)
        made.num_inference_steps = len(options.get("sample_sigmas") or ()) or self.num_inference_steps
        return made

    def unused_parameters(self, denoiser: nn.Module) -> list[str]:
        return []

    # Captions

    @staticmethod
    def tokenizer_of(text_encoder: str) -> str:
        return "processor"

    def adapt(self, tokenizer: Any) -> None:
        tokenizer.add_tokens(["<|image_pad|>"])
        super().adapt(tokenizer)
        tokenizer.chat_template, tokenizer.processor_files = self.chat_template, PROCESSOR_FILES

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        return super().prompts(tokenizer, [f"<|im_start|>user\n{caption or ' '}" for caption in captions])

    def for_pipeline(self, tokenizers: Mapping[str, Any]) -> dict[str, Any]:
        return {name: TextProcessor(tokenizer) for name, tokenizer in tokenizers.items()}

    def embed(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the last hidden state before its norm, ``encoder_hidden_states`` (B, L, D), and its mask (B, L)."""
        norm = text_encoders["text_encoder"].get_decoder().norm
        handle = norm.register_forward_hook(lambda module, inputs, output: inputs[0])
        try:
            return super().embed(text_encoders, input_ids)
        finally:
            handle.remove()

    # Pixels

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        return vae_factor(vae_config) * SLOT_SIZE

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        return super().encode(vae, F.pad(pixel_values, (0, 0, 0, 0, 0, 1), value=1.0))

    # Noise

    def denoise(
        self, denoiser: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count, _, height, width = noisy_latents.shape
        mask = conditioning["encoder_hidden_states_mask"].bool()
        length, host = mask.shape[1], "cpu" if mask.is_meta else mask.device
        image = torch.tensor([False] * length + [True] * (height * width // SLOT_SIZE**2)).to(host)
        slots = {"img_mask": image.expand(count, -1), "img_shapes": [[(1, height, width)]] * count}
        tokens, times = noisy_latents.flatten(2).mT, timesteps.expand(count) / 1000
        methods = _layout(denoiser, mask, height, width)
        vars(denoiser).update(methods)
        try:
            made: Tensor = denoiser(tokens, timestep=times, return_dict=False, **slots, **conditioning)[0]
        finally:
            for name in methods:
                vars(denoiser).pop(name)
        return made[:, length:].mT.unflatten(2, (height, width))

    # Sampling

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        longest = int(conditioning["encoder_hidden_states_mask"].bool().sum(1).max())
        return super().prompt_options({name: each[:, :longest] for name, each in conditioning.items()})

    def draw(self, pipeline: Any, prompts: Sequence[str], **options: Any) -> list[Any]:
        """Draw captions of one length together: the pipeline gives all images the positions after the longest."""
        from PIL import Image

        own, steps = pipeline.config.sample_sigmas, options["num_inference_steps"]
        if own and steps != len(own):
            options["sigmas"] = torch.linspace(1.0, 1 / steps, steps).tolist()
        mask = self.tokenize({"processor": pipeline.processor.tokenizer}, prompts)[f"text_encoder{MASK}"]
        lengths, generators = mask.sum(1).tolist(), options.pop("generators")
        drawn: dict[int, Image.Image] = {}
        for length in set(lengths):
            same = [i for i, each in enumerate(lengths) if each == length]
            noise = [generators[i] for i in same]
            images = super().draw(pipeline, [prompts[i] for i in same], generators=noise, **options)
            drawn |= zip(same, images, strict=True)
        pairs = [(Image.new("RGBA", image.size, "white"), image) for _, image in sorted(drawn.items())]
        return [Image.alpha_composite(*pair).convert("RGB") for pair in pairs]


class TextProcessor:
    """What the pipeline calls of ``Qwen3VLProcessor`` for captions; that one needs torchvision, to see."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[Any]:
        return [self.tokenizer.apply_chat_template(conversation, **options)]


class _Image(SimpleNamespace):
    """The mask (S,) of an image's tokens: ``view`` where it is used, ``outside`` on the host, to count."""

    def __invert__(self) -> Any:
        return self.outside


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
    axes = zip(network.pos_embed.freqs, (frame, *grid), strict=True)
    rotary = torch.cat([table.to(device)[index].expand(count, -1, -1) for table, index in axes], dim=-1)
    # (B, S, D), where the network has (S, D) for all samples
    image = torch.tensor([False] * length + [True] * (height * width))
    metadata = image.long() - 1, _Image(view=image.to(device).view, outside=~image)
    factors = SimpleNamespace(unsqueeze=lambda dim: rotary.unsqueeze(dim + 1))
    return {"pos_embed": lambda *_, **__: factors, "build_token_metadata": lambda *_: metadata}
