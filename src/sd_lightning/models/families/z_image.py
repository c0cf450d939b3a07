"""Z-Image: a transformer of one stream of image and caption tokens, Qwen3 and the VAE of Flux.1 (arXiv 2511.22699).

Time, sign and tokens are those of Tongyi-MAI's reference, as diffusers has them. The sizes of ``z_image`` are those of
the published base checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families.base import Architecture, Component, Conditioning, Part
from sd_lightning.models.families.stable_diffusion import TINY_SCALING, TINY_VAE, VAE, vae
from sd_lightning.models.families.transformer import (
    CHAT_TOKENIZER,
    QWEN3,
    TransformerFamily,
    flow_euler,
    qwen3,
    tiny_qwen3,
)

MULTIPLE = 32
"""The network fills up the tokens of a caption, and those of an image, to a multiple of it with learned tokens."""
OF_LISTS = ("patchify_and_embed", "_prepare_sequence", "_build_unified_sequence", "unpatchify")
"""The network's methods that loop over samples."""


class ZImage(TransformerFamily):
    """Z-Image. Padding of captions is dropped: the denoiser takes a list of captions of several lengths."""

    pipeline_class = "ZImagePipeline"
    parts = {
        "transformer": Part("diffusers", ("ZImageTransformer2DModel",)),
        "vae": VAE,
        "text_encoder": QWEN3,
        "tokenizer": CHAT_TOKENIZER,
    }
    width_key = "dim"
    masks_padding = True
    no_guidance = 0.0  # cond + s * (cond - uncond)
    thinks = True

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the penultimate hidden state, ``cap_feats`` (B, L, D), and ``cap_mask`` (B, L), 0 where padded."""
        ids, mask = input_ids["text_encoder"], input_ids["text_encoder_mask"]
        feats = self.hidden_states(text_encoders["text_encoder"], ids, mask)[-2]
        return {"cap_feats": feats, "cap_mask": mask.to(feats.dtype)}

    def prompt_embeds(self, conditioning: Conditioning) -> list[Tensor]:
        lengths = conditioning["cap_mask"].bool().sum(1).tolist()  # a sum in bfloat16 would be rounded
        return [feats[:length] for feats, length in zip(conditioning["cap_feats"], lengths, strict=True)]

    def denoise(
        self, denoiser: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count = len(noisy_latents)
        time = (1000 - timesteps.expand(count)) / 1000
        feats, images = conditioning["cap_feats"], noisy_latents.unsqueeze(2)  # a picture is a film of one frame
        if not feats.is_meta:  # there, masks have no values, and every caption is as long as it may be
            captions = self.prompt_embeds(dict(conditioning))
            if len({len(each) for each in captions}) > 1:
                made = denoiser(list(images), time, captions, return_dict=False)[0]
                return -torch.stack(made).squeeze(2)
            feats = feats[:, : len(captions[0])]
        with _as_one(denoiser, count):
            made = denoiser([images], time, [feats], return_dict=False)[0]
        return -made[0].squeeze(2)

    architectures = {
        "tiny_z_image": Architecture(
            pipeline_class,
            networks={
                "transformer": Component(
                    "diffusers",
                    "ZImageTransformer2DModel",
                    {
                        "in_channels": 4,
                        "dim": 64,
                        "n_layers": 3,
                        "n_refiner_layers": 1,
                        "n_heads": 4,
                        "n_kv_heads": 4,
                        "cap_feat_dim": 32,
                        "axes_dims": [8, 4, 4],
                        "axes_lens": [256, 64, 64],
                    },
                ),
                "vae": vae(**TINY_VAE, scaling_factor=TINY_SCALING, shift_factor=0.0),
                "text_encoder": tiny_qwen3(3, class_name="Qwen3Model"),
            },
            scheduler=flow_euler(shift=1.0),
            max_length=16,
            token_embedding_std=1.0,
            has_tiny_vae=True,
        ),
        "z_image": Architecture(
            pipeline_class,
            networks={
                "transformer": Component("diffusers", "ZImageTransformer2DModel"),
                "vae": vae(
                    latent_channels=16,
                    scaling_factor=0.3611,
                    shift_factor=0.1159,
                    sample_size=1024,
                    use_quant_conv=False,
                    use_post_quant_conv=False,
                ),
                "text_encoder": qwen3(
                    2560, 36, class_name="Qwen3Model", intermediate_size=9728, tie_word_embeddings=True
                ),
            },
            scheduler=flow_euler(shift=6.0),
            max_length=512,
        ),
    }


@contextmanager
def _as_one(network: Any, count: int) -> Iterator[None]:
    """Make the network's forward take ``count`` images and captions of one length each as one tensor, not as a list.

    It computes the same numbers, in fewer and larger steps.
    """

    def padded(tokens: Tensor, grid: tuple[int, int, int], start: tuple[int, int, int]) -> tuple[Tensor, ...]:
        """Return tokens (B * N, D), position ids (N, 3) and the mask of filled up tokens (N,)."""
        one, ids, is_filled, *_ = network._pad_with_ids(tokens[0], grid, start, tokens.device)
        missing = len(one) - tokens.shape[1]
        return torch.cat([tokens, tokens[:, -1:].expand(-1, missing, -1)], dim=1).flatten(0, 1), ids, is_filled

    def patchify(images: list[Tensor], captions: list[Tensor], size: int, frames: int) -> tuple[Any, ...]:
        # The batch takes the place of the frames: patches come one image after the other.
        patches, _, (_, h, w) = network._patchify_image(images[0].squeeze(2).transpose(0, 1), size, frames)
        length = captions[0].shape[1] + -captions[0].shape[1] % MULTIPLE
        caption, caption_ids, caption_fill = padded(captions[0], (length, 1, 1), (1, 0, 0))
        image, image_ids, image_fill = padded(patches.unflatten(0, (count, -1)), (1, h, w), (length + 1, 0, 0))
        shape = images[0].shape[2:]
        return [image], [caption], [shape], [image_ids], [caption_ids], [image_fill], [caption_fill]

    def prepare(feats: list[Tensor], ids: list[Tensor], fill: list[Tensor], token: Tensor, *_: Any) -> tuple[Any, ...]:
        tokens = torch.where(fill[0].unsqueeze(-1), token, feats[0].unflatten(0, (count, -1)))
        return tokens, network.rope_embedder(ids[0][: tokens.shape[1]]).expand(count, -1, -1), None, None, None

    def unified(image: Tensor, image_freqs: Tensor, _: Any, __: Any, caption: Tensor, freqs: Tensor, *___: Any) -> Any:
        return torch.cat([image, caption], dim=1), torch.cat([image_freqs, freqs], dim=1), None, None

    def unpatchify(tokens: list[Tensor], sizes: list[tuple[int, ...]], size: int, frames: int, _: Any) -> list[Tensor]:
        _, height, width = sizes[0]
        h, w = height // size, width // size
        patches = torch.stack(tokens)[:, : h * w].unflatten(1, (h, w)).unflatten(3, (size, size, -1))
        return [patches.permute(0, 5, 1, 3, 2, 4).reshape(count, -1, 1, height, width)]

    vars(network).update(zip(OF_LISTS, (patchify, prepare, unified, unpatchify), strict=True))
    try:
        yield
    finally:
        for name in OF_LISTS:
            vars(network).pop(name)
