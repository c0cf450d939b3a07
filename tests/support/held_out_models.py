"""Tiny models that nobody here wrote: of transformers and diffusers, from configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, TOKENS, PIXELS = 8, 6, 50, 8
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}


class HeldOut(nn.Module):
    """A model that is called as its users call it, and returns one tensor of shape (B, N).

    Args:
        model: Of transformers or diffusers.
        call: Returns the tensors to train, of the model and its inputs.
    """

    def __init__(self, model: nn.Module, call: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat([output.flatten(1) for output in self.call(self.model, *inputs)], dim=1)


def _bert() -> HeldOut:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=TOKENS, num_hidden_layers=3, max_position_embeddings=16, **_ENCODER, **_NO_DROPOUT)
    return HeldOut(BertForMaskedLM(config), lambda model, ids, mask: [model(input_ids=ids, attention_mask=mask).logits])


def _gpt2() -> HeldOut:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=3, n_head=2, **dropouts)
    return HeldOut(
        GPT2LMHeadModel(config), lambda model, ids, mask: [model(ids, attention_mask=mask, use_cache=False).logits]
    )


def _t5() -> HeldOut:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=TOKENS, dropout_rate=0.0, tie_word_embeddings=True, use_cache=False, **sizes)
    return HeldOut(
        T5ForConditionalGeneration(config),
        lambda model, ids, mask: [model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits],
    )


def _albert() -> HeldOut:
    from transformers import AlbertConfig, AlbertForMaskedLM

    groups = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2, "embedding_size": 16}
    config = AlbertConfig(vocab_size=TOKENS, max_position_embeddings=16, **groups, **_ENCODER, **_NO_DROPOUT)
    return HeldOut(
        AlbertForMaskedLM(config), lambda model, ids, mask: [model(input_ids=ids, attention_mask=mask).logits]
    )


def _clip() -> HeldOut:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": TOKENS, "num_hidden_layers": 2, "max_position_embeddings": 16, "projection_dim": 24}
    vision = {"image_size": PIXELS, "patch_size": 4, "num_hidden_layers": 2, "projection_dim": 24}
    config = CLIPConfig(
        text_config=text | _ENCODER | {"eos_token_id": TOKENS - 1}, vision_config=vision | _ENCODER, projection_dim=24
    )

    def call(model: nn.Module, ids: Tensor, mask: Tensor, pixels: Tensor) -> list[Tensor]:
        output = model(input_ids=ids, attention_mask=mask, pixel_values=pixels)
        return [output.text_embeds, output.image_embeds, output.vision_model_output.last_hidden_state]

    return HeldOut(CLIPModel(config), call)


def _vit() -> HeldOut:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(image_size=PIXELS, patch_size=4, num_hidden_layers=3, **_ENCODER, **_NO_DROPOUT)

    def call(model: nn.Module, ids: Tensor, mask: Tensor, pixels: Tensor) -> list[Tensor]:
        output = model(pixel_values=pixels, output_hidden_states=True)
        return [output.pooler_output, output.hidden_states[1]]

    return HeldOut(ViTModel(config), call)


def _flux() -> HeldOut:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip

    def call(model: nn.Module, latents: Tensor, text: Tensor, pooled: Tensor, times: Tensor) -> list[Tensor]:
        text_ids, image_ids = torch.zeros(text.shape[1], 3), torch.zeros(latents.shape[1], 3)
        image_ids[:, 1] = torch.arange(latents.shape[1])
        output = model(
            hidden_states=latents, encoder_hidden_states=text, pooled_projections=pooled, timestep=times,
            guidance=times * 3, img_ids=image_ids, txt_ids=text_ids,
        )  # fmt: skip
        return [output.sample]

    return HeldOut(model, call)


def _sd3() -> HeldOut:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=PIXELS, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=32, pooled_projection_dim=10, pos_embed_max_size=8,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip

    def call(model: nn.Module, latents: Tensor, text: Tensor, pooled: Tensor, times: Tensor) -> list[Tensor]:
        image = latents.unflatten(1, (PIXELS, PIXELS)).permute(0, 3, 1, 2)
        return [model(image, encoder_hidden_states=text, pooled_projections=pooled, timestep=times * 999).sample]

    return HeldOut(model, call)


MODELS: dict[str, Callable[[], HeldOut]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "albert": _albert,
    "clip": _clip,
    "vit": _vit,
    "flux": _flux,
    "sd3": _sd3,
}


def build(name: str, checkpoints: str = "") -> HeldOut:
    """Return a model in training mode.

    Args:
        name: Of ``MODELS``.
        checkpoints: Whether its blocks are computed again in the backward pass: ``reentrant``, ``saved`` (by the
            hooks of saved tensors), or not, if empty.
    """
    network = MODELS[name]().train()
    for parameter in network.parameters():
        if parameter.dim() > 1 or not parameter.any():
            nn.init.normal_(parameter, std=0.2)  # large enough for gradients that are not lost in rounding
    model = network.model
    if not checkpoints or not getattr(model, "supports_gradient_checkpointing", True):
        return network
    reentrant = checkpoints == "reentrant"
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing(partial(_checkpoint, use_reentrant=reentrant))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return network


def _checkpoint(module: nn.Module, *inputs: Tensor, use_reentrant: bool) -> Tensor:
    return checkpoint(module.__call__, *inputs, use_reentrant=use_reentrant)


def inputs(name: str, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return a batch."""
    if name in ("flux", "sd3"):
        shapes = (BATCH, PIXELS * PIXELS, 4), (BATCH, LENGTH, 12), (BATCH, 10)
        times = torch.rand(BATCH, generator=generator)
        return *(torch.randn(*shape, generator=generator) for shape in shapes), times
    ids = torch.randint(0, TOKENS, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, -2:] = 0
    if name not in ("clip", "vit"):
        return ids, mask
    return ids, mask, torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
