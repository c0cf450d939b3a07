"""Rebuild the files of the ``tiny`` models: a tokenizer for their captions and VAEs trained on the digits.

    python tests/support/make_tiny.py FOLDER

Takes about a quarter of an hour on one CPU core. The measured ``scaling_factor``, ``latents_mean`` and ``latents_std``
are also in the files ``models/architectures/tiny*.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from sd_lightning.models.families import architecture

_STEPS, _BATCH_SIZE, _LEARNING_RATE, _KL_WEIGHT = 400, 64, 3e-3, 1e-4


def make_tokenizer(corpus: list[str], *, max_length: int) -> Any:
    """Return a CLIP tokenizer that covers every byte, with merges learnt from a few captions."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), bytes_])
    bpe.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=4096, min_frequency=0, end_of_word_suffix="</w>", show_progress=False)
    )
    merges = [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(letter + "</w>" for letter in alphabet), *(a + b for a, b in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)  # type: ignore[arg-type]


def train_vae(vae: Any, images: Tensor, *, rounds: int = 1, seed: int = 0) -> None:
    """Train a tiny VAE on images (N, C, …) in [-1, 1], for a number of times ``_STEPS``."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=rounds * _STEPS, pct_start=0.1
    )
    for step in range(rounds * _STEPS):
        batch = images[torch.randint(len(images), (_BATCH_SIZE,), generator=generator)]
        posterior = vae.encode(batch).latent_dist
        reconstruction = vae.decode(posterior.sample(generator=generator)).sample
        loss = F.mse_loss(reconstruction, batch) + _KL_WEIGHT * posterior.kl().mean() / posterior.mean[0, 0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.5f}")


def drawn_strokes(count: int, *, seed: int = 0) -> Tensor:
    """Return pictures (N, 3, 32, 32) in [-1, 1] of up to six straight strokes, in pixels of 8 x 8 as the digits are."""
    generator = torch.Generator().manual_seed(seed)
    start, way = (torch.randint(*span, (count, 6, 1, 2), generator=generator) for span in ((0, 8), (-1, 2)))
    length = torch.randint(2, 9, (count, 6, 1), generator=generator)
    strokes = torch.randint(2, 7, (count, 1, 1), generator=generator)
    points = start + way * torch.arange(8)[:, None]  # (N, strokes, points of one, 2)
    drawn = (torch.arange(8) < length) & (torch.arange(6)[:, None] < strokes) & ((points >= 0) & (points < 8)).all(-1)
    pixel = torch.where(drawn, points @ torch.tensor([8, 1]), 64)  # the last one takes what is not drawn
    pixels = torch.zeros(count, 65).scatter(1, pixel.flatten(1), 1.0)[:, :64].view(-1, 1, 8, 8)
    pixels = pixels * torch.empty(count, 1, 1, 1).uniform_(0.65, 1.0, generator=generator)
    return F.interpolate(pixels, (32, 32), mode="bilinear").expand(-1, 3, -1, -1) * 2 - 1


def scaled_vae(images: Tensor) -> Any:
    """Return the trained VAE of most families; latents get unit variance through ``scaling_factor``."""
    vae: Any = architecture("tiny").networks["vae"].instantiate(seed=0)
    train_vae(vae, images)
    with torch.no_grad():
        posterior = vae.encode(images[:512]).latent_dist
        rms = (posterior.mean.square().mean() + posterior.var.mean()).sqrt()
    vae.register_to_config(scaling_factor=float(1 / rms))
    return vae


def film_vae(images: Tensor) -> Any:
    """Return the trained VAE of Qwen-Image, in float16; each channel has its own statistics.

    One frame never meets weights for earlier ones: they are zeros.
    """
    films = images.unsqueeze(2)
    vae: Any = architecture("tiny_qwen_image").networks["vae"].instantiate(seed=0)
    train_vae(vae, films)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, torch.nn.Conv3d):
                module.weight[:, :, :-1] = 0
        vae.half().float()
        posterior = vae.encode(films).latent_dist
        variance = posterior.mean.var((0, 2, 3, 4), correction=0) + posterior.var.mean((0, 2, 3, 4))
    vae.register_to_config(
        latents_mean=posterior.mean.mean((0, 2, 3, 4)).tolist(), latents_std=variance.sqrt().tolist()
    )
    return vae.half()


def rgba_vae(images: Tensor) -> Any:
    """Return the trained VAE of Qwen-Image 2.1, in float16; its first and last layers give digits unit variance.

    An image is four tokens: trained on digits alone, it would pass nothing else. Half of what it is trained on are
    strokes, and digits mirrored and turned; the glyph of the tests is not among them.
    """
    turned = [part.rot90(quarters, (2, 3)) for quarters, part in enumerate(images.flip(3).chunk(4))]
    more = torch.cat([images, images, *turned, drawn_strokes(len(images))])
    films, more = (F.pad(each, (0, 0, 0, 0, 0, 1), value=1.0).unsqueeze(2) for each in (images, more))
    vae: Any = architecture("tiny_qwen_image_21").networks["vae"].instantiate(seed=0)
    train_vae(vae, more, rounds=5)
    with torch.no_grad():
        posterior = vae.encode(films).latent_dist
        mean = posterior.mean.mean((0, 2, 3, 4))
        std = (posterior.mean.var((0, 2, 3, 4), correction=0) + posterior.var.mean((0, 2, 3, 4))).sqrt()
        inner, outer = vae.quant_conv, vae.post_quant_conv
        outer.bias += outer.weight[..., 0, 0] @ mean
        outer.weight *= std[:, None, None]
        inner.bias -= torch.cat([mean, 2 * std.log()])
        for part in (inner.weight, inner.bias):
            part[: len(std)] /= std.view(-1, *[1] * (part.ndim - 1))
    return vae.half()


def patch_statistics(vae: Any, images: Tensor) -> dict[str, Tensor]:
    """Return mean and variance of the channels of 2 x 2 patches of latents, the ``bn`` of AutoencoderKLFlux2."""
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
        patches = F.pixel_unshuffle(posterior.mean, 2)
        noise = F.pixel_unshuffle(posterior.var, 2).mean((0, 2, 3))
    variance = patches.var((0, 2, 3), correction=0) + noise
    count = torch.tensor(1)
    return {"bn.running_mean": patches.mean((0, 2, 3)), "bn.running_var": variance, "bn.num_batches_tracked": count}


def main(folder: Path) -> None:
    from sd_lightning.data.sources import digits
    from sd_lightning.data.transform import place, to_model_range

    source = digits.Digits("train")
    corpus = sorted({caption for index in range(len(source)) for caption in source.captions(index)})
    corpus += ["a handwritten sks digit", "sks", "glyph", "symbol", "a handwritten glyph"]
    tokenizer = make_tokenizer(corpus, max_length=architecture("tiny").length_of("text_encoder"))
    tokenizer.save_pretrained(folder / "tokenizer")
    pixels = [torch.from_numpy(place(source.image(i), (32, 32)).pixels.copy()) for i in range(len(source))]
    images = to_model_range(torch.stack(pixels))
    vae = scaled_vae(images)
    vae.save_pretrained(folder / "vae")
    film_vae(images).save_pretrained(folder / "film_vae")
    rgba_vae(images).save_pretrained(folder / "rgba_vae")
    save_file(patch_statistics(vae, images), folder / "vae" / "patch_statistics.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
