"""Base of the families with a transformer, flow matching and a chat model as text encoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sd_lightning.models.families.architecture import Component, Part
from sd_lightning.models.families.base import MASK, Family
from sd_lightning.models.families.conditioning import Conditioning, map_conditioning
from sd_lightning.models.families.latents import vae_factor

if TYPE_CHECKING:
    from PIL import Image

CHAT_TOKENIZER = Part("transformers", ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"))
QWEN3 = Part("transformers", ("Qwen3ForCausalLM", "Qwen3Model"))
FLOW_EULER = "FlowMatchEulerDiscreteScheduler"


def flow_euler(**config: Any) -> Component:
    """Return the sampling scheduler of flow matching, with diffusers' defaults for what is not given."""
    return Component("diffusers", FLOW_EULER, config)


def qwen3(width: int, layers: int, *, class_name: str = "Qwen3ForCausalLM", **config: Any) -> Component:
    """Return a Qwen3 text encoder in the proportions of the published 4B and 8B ones (arXiv 2505.09388)."""
    own = {
        "vocab_size": 151936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    return Component("transformers", class_name, own | config)


def qwen3_4b(**options: Any) -> Component:
    """Return the 4B text encoder; see :func:`qwen3`."""
    return qwen3(2560, 36, intermediate_size=9728, tie_word_embeddings=True, **options)


def tiny_qwen3(layers: int, *, class_name: str = "Qwen3ForCausalLM") -> Component:
    """Return the text encoder of the tiny models: 32 channels, and the shipped tokenizer's vocabulary."""
    config = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    component = qwen3(32, layers, class_name=class_name, tie_word_embeddings=True, **config)
    return Component("transformers", class_name, {k: v for k, v in component.config.items() if k != "vocab_size"})


class TransformerFamily(Family):
    """Base of a family with one chat model as text encoder.

    Captions are encoded for pipelines by what encodes them for training, so that both see the same.
    """

    denoiser = "transformer"
    trains_text_encoders = False
    has_attention_masks = True
    example_scheduler = FLOW_EULER
    num_inference_steps = 50
    guidance_scale = 4.0
    max_sequence_length = 512  # chat models read far more than pipelines give them
    # A plain one for the shipped tokenizer. As in the published ones, no thinking changes what the model reads.
    chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} :{% if enable_thinking is false %} ;{% endif %}{% endif %}"
    )
    patch_size = 2
    """Pixels of the VAE's latents along one side that are one token."""
    enable_thinking: bool = False
    """Whether the pipeline's prompts leave thinking on."""

    def resolution(self, components: Mapping[str, Component]) -> int:
        return int(components["vae"].config["sample_size"])

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        return vae_factor(vae_config) * self.patch_size

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        """Return the captions as a user's messages, by the tokenizer's chat template."""
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": self.enable_thinking}
        return [tokenizer.apply_chat_template([{"role": "user", "content": each}], **options) for each in captions]

    def hidden_states(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return all hidden states (B, L, D) of a chat model, without the logits that its last layer would make.

        Args:
            text_encoders: By name.
            input_ids: From :meth:`tokenize`; on the meta device, which has no values, nothing is masked.
        """
        ids, mask = input_ids["text_encoder"], input_ids[f"text_encoder{MASK}"]
        attended = {"full_attention": None} if mask.is_meta else mask  # transformers would look at the mask's values
        options = {"attention_mask": attended, "output_hidden_states": True, "use_cache": False}
        output = text_encoders["text_encoder"].base_model(ids, **options)
        states: tuple[Tensor, ...] = output.hidden_states
        return states

    def samples_with(self, scheduler: Any) -> bool:
        """Return whether it is the scheduler that the pipelines give their own sigmas to."""
        return type(scheduler).__name__ == FLOW_EULER

    @abstractmethod
    def prompt_embeds(self, conditioning: Conditioning) -> Any:
        """Return encoded captions as the pipeline takes them for ``prompt_embeds``."""

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        *,
        negative_prompt: str,
        generators: list[torch.Generator],
        **options: Any,
    ) -> list[Image.Image]:
        encoder = pipeline.text_encoder

        def encoded(captions: Sequence[str]) -> Any:
            ids = self.tokenize({"tokenizer": pipeline.tokenizer}, captions)
            on_device = {name: each.to(encoder.device) for name, each in ids.items()}
            embeddings = self.embed({"text_encoder": encoder}, on_device)
            return self.prompt_embeds(map_conditioning(embeddings, lambda t: t.to(pipeline.transformer.dtype)))

        given = {"prompt_embeds": encoded(prompts)}
        if options["guidance_scale"] > self.no_guidance:
            given["negative_prompt_embeds"] = encoded([negative_prompt] * len(prompts))
        side = int(pipeline.vae.config.sample_size)  # of their own, the pipelines draw 1024 pixels and others
        size = {name: options.pop(name) or side for name in ("height", "width")}
        images: list[Image.Image] = pipeline(**given, generator=generators, **size, **options).images
        return images
