"""Bases of the families with a transformer and flow matching, and of those with a chat model as text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Component, Part
from sd_lightning.models.families.base import MASK, Family
from sd_lightning.models.families.conditioning import Conditioning, map_conditioning
from sd_lightning.models.families.latents import vae_factor

if TYPE_CHECKING:
    from PIL import Image

CHAT_TOKENIZER = Part("transformers", ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"))
QWEN3 = Part("transformers", ("Qwen3ForCausalLM", "Qwen3Model"))
T5 = Part("transformers", ("T5EncoderModel",))
T5_TOKENIZER = Part("transformers", ("PreTrainedTokenizerFast", "T5TokenizerFast", "T5Tokenizer"))
"""The shipped tokenizer is no unigram model, which the others are."""
FLOW_EULER = "FlowMatchEulerDiscreteScheduler"


def to_tokens(latents: Tensor, size: int) -> Tensor:
    """Return latents (B, C, h, w) as tokens (B, h/size * w/size, C * size²): patches, row by row."""
    return F.pixel_unshuffle(latents, size).flatten(2).mT


def to_latents(tokens: Tensor, height: int, width: int, size: int) -> Tensor:
    """Return what :func:`to_tokens` was given: latents (B, C, height, width)."""
    return F.pixel_shuffle(tokens.mT.unflatten(2, (height // size, width // size)), size)


def image_positions(rows: int, columns: int, axes: int, device: torch.device) -> Tensor:
    """Return positions (rows * columns, axes) of an image's tokens: 0, row, column, and 0 on further axes."""
    positions = torch.zeros(rows, columns, axes, device=device)
    positions[..., 1] = torch.arange(rows, device=device)[:, None]
    positions[..., 2] = torch.arange(columns, device=device)
    return positions.flatten(0, 1)


class TransformerFamily(Family):
    """Base of a family with a transformer, trained by flow matching.

    Captions are encoded for pipelines by what encodes them for training, so that both see the same.
    """

    denoiser = "transformer"
    example_scheduler = FLOW_EULER
    num_inference_steps = 50
    guidance_scale = 4.0
    guidance_option: str = "guidance_scale"
    """The pipeline's argument for the scale of classifier-free guidance."""
    width_key = "num_attention_heads"
    patch_size = 2
    """Side of the squares of the denoiser's latents that are one token."""

    def resolution(self, components: Mapping[str, Component]) -> int:
        return int(components["vae"].config["sample_size"])

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        return vae_factor(vae_config) * self.patch_size

    def image_tokens(self, height: int, width: int) -> int:
        return height * width // self.patch_size**2

    def samples_with(self, scheduler: Any) -> bool:
        """Return whether it is the scheduler that the pipelines give their own sigmas to."""
        return type(scheduler).__name__ == FLOW_EULER

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        """Return encoded captions as arguments of the pipeline; "negative_" goes before those of guidance."""
        names = {"encoder_hidden_states": "prompt_embeds", "pooled_projections": "pooled_prompt_embeds"}
        names["encoder_hidden_states_mask"] = "prompt_embeds_mask"
        return {names[key]: value.bool() if key.endswith(MASK) else value for key, value in conditioning.items()}

    def token_inputs(self, denoiser: Any, latents: Tensor, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a denoiser of tokens takes beside those of noisy latents (B, C, h, w), and time."""
        raise NotImplementedError(f"{type(self).__name__}.token_inputs")

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        size, (count, _, height, width) = self.patch_size, noisy_latents.shape
        tokens, times = to_tokens(noisy_latents, size), timesteps.expand(count) / 1000
        inputs = self.token_inputs(denoiser, noisy_latents, conditioning)
        return to_latents(denoiser(tokens, timestep=times, return_dict=False, **inputs)[0], height, width, size)

    def encode_prompts(self, pipeline: Any, captions: Sequence[str]) -> dict[str, Any]:
        """Return captions as arguments of the pipeline, encoded as for training, on its device and in its dtype."""
        encoders = {name: each for name in self.text_encoders if (each := getattr(pipeline, name)) is not None}
        parts = {self.tokenizer_of(name): getattr(pipeline, self.tokenizer_of(name)) for name in encoders}
        tokenizers = {name: getattr(part, "tokenizer", part) for name, part in parts.items()}
        device = pipeline._execution_device
        ids = map_conditioning(self.tokenize(tokenizers, captions), lambda t: t.to(device))
        with torch.autocast(device.type, enabled=False):  # as for training
            embeddings = self.embed(encoders, ids)
        return self.prompt_options(map_conditioning(embeddings, lambda t: t.to(pipeline.transformer.dtype)))

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        *,
        negative_prompt: str,
        generators: list[torch.Generator],
        **options: Any,
    ) -> list[Image.Image]:
        guidance_scale = options.pop("guidance_scale")
        given = self.encode_prompts(pipeline, prompts)
        is_embedded = self.embeds_guidance(pipeline.transformer.config)
        if guidance_scale > self.no_guidance and not is_embedded:
            negative = self.encode_prompts(pipeline, [negative_prompt] * len(prompts))
            given |= {f"negative_{name}": value for name, value in negative.items()}
        given["guidance_scale" if is_embedded else self.guidance_option] = guidance_scale
        parts = ("vae", "scheduler")
        configs = {name: Component("diffusers", "", dict(getattr(pipeline, name).config)) for name in parts}
        side = self.resolution(configs)  # of their own, the pipelines draw 1024 pixels and others
        size = {name: options.pop(name) or side for name in ("height", "width")}
        return pipeline(**given, generator=generators, **size, **options).images


class ChatFamily(TransformerFamily):
    """Base of a family with one chat model as text encoder, which stays frozen."""

    frozen = ("text_encoder",)
    has_attention_masks = True
    max_sequence_length = 512  # chat models read far more than pipelines give them
    # A plain one for the shipped tokenizer. As in the published ones, no thinking changes what the model reads.
    chat_template: str | None = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} :{% if enable_thinking is false %} ;{% endif %}{% endif %}"
    )
    enable_thinking: bool = False
    """``enable_thinking`` of the chat template, as the pipeline gives it."""

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        """Return the captions as a user's messages, by the tokenizer's chat template."""
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": self.enable_thinking}
        return [tokenizer.apply_chat_template([{"role": "user", "content": each}], **options) for each in captions]

    def hidden_states(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return all hidden states (B, L, D) of a chat model, without the logits that its last layer would make.

        Of models that also see, only the language model computes.

        Args:
            text_encoders: By name.
            input_ids: From :meth:`tokenize`; on the meta device, which has no values, nothing is masked.
        """
        ids, mask = input_ids["text_encoder"], input_ids[f"text_encoder{MASK}"]
        # transformers would look at the values of a mask (B, L), not at those of one (B, 1, L, L)
        attended = mask.bool()[:, None, None].expand(-1, 1, mask.shape[1], -1) if mask.is_meta else mask
        options = {"attention_mask": attended, "output_hidden_states": True, "use_cache": False}
        return text_encoders["text_encoder"].get_decoder()(ids, **options).hidden_states
