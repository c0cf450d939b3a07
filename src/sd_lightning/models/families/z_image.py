"""Z-Image: a transformer of one stream of image and caption tokens, Qwen3 and the VAE of Flux.1 (arXiv 2511.22699).

Time, sign and tokens are those of Tongyi-MAI's reference, as diffusers has them. The sizes of ``z_image`` are those of
the published base checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.lora_names import LoraNames, block_names
from sd_lightning.models.families.stable_diffusion import VAE
from sd_lightning.models.families.tensor_parallel import attention
from sd_lightning.models.families.transformer import CHAT_TOKENIZER, QWEN3, ChatFamily

MULTIPLE = 32
"""The network fills up the tokens of a caption, and those of an image, to a multiple of it with learned tokens:
``SEQ_MULTI_OF`` of diffusers' module."""
_JOINED = {
    **{f"attention.to_{part}": "attention.qkv" for part in "qkv"},
    "attention.to_out.0": "attention.out",
    **{name: name for name in ("adaLN_modulation.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")},
}
_BLOCKS = ("layers", "noise_refiner", "context_refiner")
_LORA_NAMES = LoraNames(comfyui={k: v for each in _BLOCKS for k, v in block_names(each, each, _JOINED).items()})
"""``ZImageTransformer2DModel``: musubi-tuner has diffusers' names, ComfyUI joins queries, keys and values."""


class ZImage(ChatFamily):
    """Z-Image. Padding of captions is dropped: the denoiser takes a list of captions of several lengths."""

    pipeline_class = "ZImagePipeline"
    parts = {
        "transformer": Part("diffusers", ("ZImageTransformer2DModel",)),
        "vae": VAE,
        "text_encoder": QWEN3,
        "tokenizer": CHAT_TOKENIZER,
    }
    width_key = "dim"
    lora_names = _LORA_NAMES
    divided_layers = {**attention("*.attention"), **attention("*.feed_forward", "w1 w3", "w2")}
    divided_heads = ("heads",)
    masks_padding = True
    no_guidance = 0.0  # cond + s * (cond - uncond)
    enable_thinking = True

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the penultimate hidden state, ``cap_feats`` (B, L, D), and ``cap_mask`` (B, L), 0 where padded."""
        feats = self.hidden_states(text_encoders, input_ids)[-2]
        return {"cap_feats": feats, "cap_mask": input_ids[f"text_encoder{MASK}"].to(feats.dtype)}

    def largest_side(self, vae_config: Mapping[str, Any], denoiser_config: Mapping[str, Any]) -> int:
        return int(min(denoiser_config.get("axes_lens", (1024, 512, 512))[1:])) * self.size_multiple(vae_config)

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        lengths = conditioning["cap_mask"].bool().sum(1).tolist()  # a sum in bfloat16 would be rounded
        feats = zip(conditioning["cap_feats"], lengths, strict=True)
        return {"prompt_embeds": [each[:length] for each, length in feats]}

    def denoise(
        self, denoiser: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count = len(noisy_latents)
        time = (1000 - timesteps.expand(count)) / 1000
        feats, mask = conditioning["cap_feats"], conditioning["cap_mask"].bool()
        images = noisy_latents.unsqueeze(2)  # a picture is a film of one frame
        # On the meta device masks have no values, and every caption is as long as it may be.
        lengths = {feats.shape[1]} if mask.is_meta else {*mask.sum(1).tolist()}
        length = max(lengths) + -max(lengths) % MULTIPLE
        if min(lengths) <= length - MULTIPLE:
            given, captions = list(images), self.prompt_options(dict(conditioning))["prompt_embeds"]
            methods = _stacked(denoiser)
        else:
            missing = length - feats[:, :length].shape[1]
            given, captions = [images], [F.pad(feats[:, :length], (0, 0, 0, missing))]
            methods = _as_one(denoiser, ~F.pad(mask[:, :length], (0, missing)))
        vars(denoiser).update(methods)
        try:
            made = denoiser(given, time, captions, return_dict=False)[0]
        finally:
            for name in methods:
                vars(denoiser).pop(name)
        return -made[0].squeeze(2)


def _stacked(network: Any) -> dict[str, Callable[..., Any]]:
    """Return methods by which the network's forward takes lists and makes one tensor (B, C, 1, h, w).

    Engines count a network's outputs, of which all ranks and steps must have the same number.
    """
    unpatchify = network.unpatchify
    return {"unpatchify": lambda *given: [torch.stack(unpatchify(*given))]}


def _as_one(network: Any, filled: Tensor) -> dict[str, Callable[..., Any]]:
    """Return methods by which the network's forward takes images and captions of one length as one tensor each.

    Its own ones loop over samples. These compute the same numbers, in fewer and larger steps.

    Args:
        network: The denoiser.
        filled: (B, L), which tokens of the captions the network's own one replaces; L is a multiple of 32.
    """
    count, length = filled.shape

    def patchify(images: list[Tensor], captions: list[Tensor], size: int, frames: int) -> tuple[Any, ...]:
        device = filled.device
        # The batch takes the place of the frames: patches come one image after the other.
        patches, _, (_, h, w) = network._patchify_image(images[0].squeeze(2).transpose(0, 1), size, frames)
        tokens = patches.unflatten(0, (count, -1))
        first, ids, is_filled, *_ = network._pad_with_ids(tokens[0], (1, h, w), (length + 1, 0, 0), device)
        tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, len(first) - h * w, -1)], dim=1)
        caption_ids = network.create_coordinate_grid((length, 1, 1), (1, 0, 0), device).flatten(0, 2)
        sizes = [images[0].shape[2:]]
        flat = [tokens.flatten(0, 1)], [captions[0].flatten(0, 1)]
        return *flat, sizes, [ids], [caption_ids], [is_filled], [filled]

    def prepare(feats: list[Tensor], ids: list[Tensor], fill: list[Tensor], token: Tensor, *_: Any) -> tuple[Any, ...]:
        tokens = torch.where(fill[0].unsqueeze(-1), token, feats[0].unflatten(0, (count, -1)))
        return tokens, network.rope_embedder(ids[0]).expand(count, -1, -1), None, None, None

    def unified(image: Tensor, image_freqs: Tensor, _: Any, __: Any, caption: Tensor, freqs: Tensor, *___: Any) -> Any:
        return torch.cat([image, caption], dim=1), torch.cat([image_freqs, freqs], dim=1), None, None

    def unpatchify(tokens: list[Tensor], sizes: list[tuple[int, ...]], size: int, frames: int, _: Any) -> list[Tensor]:
        _, height, width = sizes[0]
        h, w = height // size, width // size
        patches = torch.stack(tokens)[:, : h * w].unflatten(1, (h, w)).unflatten(3, (size, size, -1))
        return [patches.permute(0, 5, 1, 3, 2, 4).reshape(count, -1, 1, height, width)]

    return {
        "patchify_and_embed": patchify,
        "_prepare_sequence": prepare,
        "_build_unified_sequence": unified,
        "unpatchify": unpatchify,
    }
