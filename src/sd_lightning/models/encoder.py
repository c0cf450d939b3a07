"""Frozen encoders, outside the trained model: images to latents, captions to conditioning."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.randomness import Purpose, normal, uniform
from sd_lightning.models.families.conditioning import (
    Batch,
    Conditioning,
    flat_conditioning,
    join_conditioning,
    map_conditioning,
)
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.tf32 import products_of
from sd_lightning.quantization.casting import cast_
from sd_lightning.state.host import host_memory, streams_of

Dtype = Literal["float32", "bfloat16", "float16"]

CACHED_CAPTIONS_BYTES = 2 * 2**30
"""Encoded captions that are cached in host memory; those that were used longest ago go first."""
_CAPTIONS = ("", "wrong_", "preserved_")
"""Begin of the batch entries of a sample's captions: its own, another one's, and that of a ``Preservation``."""
_PIXELS_PER_CALL = 4 * 512 * 512
"""Pixels that the VAE encodes at a time: its activations for one image of 1024 x 1024 take gigabytes."""


def images_per_call(height: int, width: int) -> int:
    """Return how many images of ``height`` x ``width`` pixels the VAE encodes at a time."""
    return max(_PIXELS_PER_CALL // (height * width), 1)


def _row(values: Tensor, *, number: int) -> Tensor:
    return values[number : number + 1].clone()


def _num_bytes(conditioning: Conditioning) -> int:
    return sum(each.nbytes for each in flat_conditioning(conditioning).values())


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def _pin_(network: nn.Module, device: torch.device) -> None:
    """Move weights in host memory to pinned memory, which ``device`` reads without making the host wait."""
    tensors = [tensor for tensor in _tensors(network) if not tensor.is_pinned()]
    for dtype in {tensor.dtype for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        for tensor, memory in zip(alike, host_memory([tensor.shape for tensor in alike], device, dtype)):
            tensor.data = memory.copy_(tensor.data)


def _in_host_memory(network: nn.Module) -> nn.Module:
    """Return a copy with its tensors in host memory; those that are there already are shared."""
    copies = {
        id(t): nn.Parameter(t.detach().cpu(), False) if isinstance(t, nn.Parameter) else t.cpu()
        for t in _tensors(network)
    }
    return copy.deepcopy(network, copies)


class LatentEncoder:
    """VAE and frozen text encoder(s) of a model.

    It is not an ``nn.Module``, so that no strategy shards, checkpoints or steps its networks. It sets its own device,
    dtype, ``no_grad`` and autocast. The same object encodes during training and caches latents before it.

    Args:
        latent_diffusion: The model whose encoders to use.
        train_text_encoder: Whether the trainer has the text encoder(s); batches then keep their token ids.
        dtype: Compute dtype of the encoders. A VAE that overflows in half precision (``force_upcast``) stays in
            float32.
        offload: Keep the encoders in host memory, pinned for CUDA. A copy of each one is on the device only while it
            encodes, images one at a time. Encoded captions are cached.
    """

    def __init__(
        self,
        latent_diffusion: LatentDiffusion,
        *,
        train_text_encoder: bool = False,
        dtype: Dtype = "float32",
        offload: bool = False,
    ) -> None:
        self._model = latent_diffusion
        self.train_text_encoder = train_text_encoder
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device("cpu")
        self.offload = offload
        self.is_idle = False
        """Whether nothing will be encoded or drawn: :meth:`to` then frees the frozen networks' weights, for good."""
        self.keeps_captions = True
        """Whether offloaded text encoders remember what they made of captions, which then come again."""
        self._captions: OrderedDict[bytes, Conditioning] = OrderedDict()
        """By token ids, as the family made them, in host memory; least recently used first."""
        self._cached_bytes = 0
        for network in self.networks:
            network.requires_grad_(False).eval()

    @property
    def _has_streams(self) -> bool:
        return streams_of(self.device) is not None

    @property
    def networks(self) -> list[nn.Module]:
        """The frozen networks."""
        return list(self._frozen.values())

    @property
    def _frozen(self) -> dict[str, nn.Module]:
        model = self._model
        trained = {model.family.denoiser, *(model.text_encoders if self.train_text_encoder else ())}
        trained -= {*model.family.frozen}
        return {name: network for name, network in model.networks.items() if name not in trained}

    @property
    def beside_trained(self) -> dict[str, Any]:
        """What computes like the frozen text encoders, for the trained ones' captions; no gradient goes through."""
        frozen = filter(self._model.family.is_text_encoder, self._frozen)
        return {name: partial(self._without_gradient, self._frozen[name]) for name in frozen}

    @torch.no_grad()
    def _without_gradient(self, network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._at_work([network]):
            return network(*args, **kwargs)

    def to(self, device: torch.device) -> LatentEncoder:
        """Set the device to encode on; move the frozen networks there, or to host memory if offloaded."""
        self.device = device
        home = torch.device("cpu") if self.offload else device
        vae = self._model.vae
        for network in self.networks:
            if self.is_idle:  # buffers stay: latents may be normalised by the VAE's
                network._apply(lambda tensor: tensor.to("meta") if isinstance(tensor, nn.Parameter) else tensor)
            dtype = self._model.family.vae_dtype(vae, self.dtype) if network is vae else self.dtype
            cast_(network, dtype, home)
            if self.offload and self._has_streams and not self.is_idle:
                _pin_(network, device)
        return self

    def check_is_kept(self) -> None:
        """Raise a ``UsageError`` if nothing was to be encoded or drawn."""
        if self.is_idle:
            raise UsageError(
                "the frozen encoders were left out, since latents and text embeddings come from a store and no samples "
                "are drawn; load the model again, or keep callbacks.samples"
            )

    def portable(self) -> LatentEncoder:
        """Return an encoder of the frozen networks alone, in host memory, that can be sent to another process."""
        is_text = self._model.family.is_text_encoder
        sent = {n: each for n, each in self._frozen.items() if not (self.train_text_encoder and is_text(n))}
        networks = {name: _in_host_memory(each) for name, each in sent.items()}
        return LatentEncoder(
            replace(self._model, networks=networks, deferred={}, originals={}, defer_denoiser=None),
            train_text_encoder=self.train_text_encoder,
            dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        )

    @contextmanager
    def _at_work(self, networks: Sequence[nn.Module]) -> Iterator[None]:
        """Compute in the encoders' dtype; copies of offloaded networks are on the device while the context lasts."""
        self.check_is_kept()
        is_away = self.offload and self.device != torch.device("cpu")
        originals = [(tensor, tensor.data) for network in networks if is_away for tensor in _tensors(network)]
        try:
            for tensor, original in originals:
                tensor.data = original.to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, enabled=False), products_of(self.dtype):
                yield
        finally:
            for tensor, original in originals:  # nothing is copied back
                tensor.data = original

    def _at_a_time(self, pixels: Tensor) -> int:
        return 1 if self.offload else images_per_call(*pixels.shape[-2:])

    @torch.no_grad()
    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        """Encode images, a few at a time, to the moments of the VAE's posterior; see :meth:`Family.encode`.

        Args:
            pixel_values: (B, 3, H, W) in [-1, 1].

        Returns:
            Float32, unscaled; in most families mean and log-variance (B, 2C, h, w).
        """
        vae = self._model.vae
        with self._at_work([vae]):
            parameter = next(vae.parameters())
            parts = [
                self._model.family.encode(vae, pixels.to(parameter.device, parameter.dtype)).float()
                for pixels in pixel_values.split(self._at_a_time(pixel_values))
            ]
        return torch.cat(parts)

    def latents(self, encoded: Tensor, *, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
        """Sample latents from encoded images; the noise depends on seed, epoch and index only, not on the process.

        Args:
            encoded: From :meth:`encode_moments`.
            seed: Seed of the run.
            epoch: (B,) int64.
            index: (B,) int64, global sample index.

        Returns:
            (B, C, h, w), float32, scaled to about unit variance.
        """
        return self._model.latent_space.latents(encoded, partial(normal, seed, epoch, index, Purpose.VAE_SAMPLE))

    @torch.no_grad()
    def embed(self, input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Encode captions, given as :meth:`Family.tokenize` returns them, float32; see :meth:`Family.embed`."""
        if not self.offload:
            return map_conditioning(self._encode_captions(input_ids), Tensor.float)
        numbers = torch.cat(list(input_ids.values()), dim=1).cpu().numpy()
        keys = [row.tobytes() for row in numbers]
        used = {key: self._captions[key] for key in keys if key in self._captions}
        unknown = {key: keys.index(key) for key in keys if key not in used}
        if unknown:
            rows = list(unknown.values())
            made = self._encode_captions({name: ids[rows] for name, ids in input_ids.items()})
            used |= {key: map_conditioning(made, partial(_row, number=row)) for row, key in enumerate(unknown)}
        if self.keeps_captions:
            self._remember(used)
        # Copies to the host and to the device follow each other in one stream: the host neither waits nor looks.
        to_device = partial(Tensor.to, device=self.device, non_blocking=self._has_streams)
        here = {key: map_conditioning(row, to_device) for key, row in used.items()}
        return map_conditioning(join_conditioning([here[key] for key in keys]), Tensor.float)

    def _remember(self, used: Mapping[bytes, Conditioning]) -> None:
        """Put encoded captions into the cache, or note that they were used; the oldest ones make room."""
        for key, row in used.items():
            if key not in self._captions:
                self._captions[key] = map_conditioning(
                    row, partial(Tensor.to, device="cpu", non_blocking=self._has_streams)
                )
                self._cached_bytes += _num_bytes(row)
            self._captions.move_to_end(key)
        while self._cached_bytes > CACHED_CAPTIONS_BYTES:
            self._cached_bytes -= _num_bytes(self._captions.popitem(last=False)[1])

    def _encode_captions(self, input_ids: Mapping[str, Tensor]) -> Conditioning:
        model = self._model
        with self._at_work(list(model.text_encoders.values())):
            return model.family.embed(model.text_encoders, input_ids)

    def _conditioning(self, embeddings: Conditioning, batch: Batch) -> Conditioning:
        return map_conditioning(self._model.family.conditioning(embeddings, batch), lambda t: t.float())

    @torch.no_grad()
    def _image_inputs(self, pixels: Tensor, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
        """Return what the denoiser takes of images beside noisy latents; see :meth:`Family.image_inputs`."""
        family, parts = self._model.family, {**self._model.networks, **self._model.tokenizers}
        latents = self._model.latent_space.latents

        def made(pixels: Tensor, epoch: Tensor, index: Tensor) -> Tensor:
            noise = partial(normal, seed, epoch, index, Purpose.MASKED_SAMPLE)
            drawn = partial(uniform, seed, epoch, index, Purpose.MASK)
            return family.image_inputs(pixels, parts, lambda images: latents(self.encode_moments(images), noise), drawn)

        others = [each for name, each in self._frozen.items() if name not in ("vae", *family.text_encoders)]
        count = self._at_a_time(pixels) if others else len(pixels)  # the VAE's images are split as it encodes them
        with self._at_work(others):
            return torch.cat([*map(made, pixels.split(count), epoch.split(count), index.split(count))])

    def encode(self, batch: Batch, *, seed: int) -> Batch:
        """Encode what needs the frozen networks: add ``latent_moments`` in place of pixels, and ``text_embeddings``.

        Families with ``image_channels`` get these, too; their random numbers depend on the run's seed and the sample.

        A batch with ``wrong_input_ids`` or ``preserved_input_ids`` also gets ``wrong_text_embeddings`` or
        ``preserved_text_embeddings``. What is encoded already stays;
        token ids stay alone if the text encoder is trained.
        """
        batch = batch.copy()
        pixels = batch.pop("pixel_values", None)
        if pixels is not None and "latent_moments" not in batch:
            batch["latent_moments"] = self.encode_moments(pixels)
            if self._model.family.image_channels:
                batch["image_channels"] = self._image_inputs(pixels, seed, batch["epoch"], batch["index"])
        for name in () if self.train_text_encoder else _CAPTIONS:
            if f"{name}input_ids" in batch and f"{name}text_embeddings" not in batch:
                ids = batch[f"{name}input_ids"]  # type: ignore[literal-required]
                batch[f"{name}text_embeddings"] = self.embed(ids)  # type: ignore[literal-required]
        return batch

    def __call__(self, batch: Batch, *, seed: int) -> Batch:
        """Replace pixels (or stored moments) by ``latents``; add ``conditioning`` if the text encoder is frozen.

        A batch that has ``latents`` keeps them.

        A batch with ``wrong_input_ids`` also gets ``wrong_conditioning``, one with ``preserved_input_ids``
        ``preserved_conditioning``. Stored embeddings are used instead of token ids.
        """
        batch = self.encode(batch, seed=seed)
        moments = batch.pop("latent_moments", None)
        if moments is not None:
            batch["latents"] = self.latents(moments.float(), seed=seed, epoch=batch["epoch"], index=batch["index"])
        for name in () if self.train_text_encoder else _CAPTIONS:
            embeddings = batch.pop(f"{name}text_embeddings", None)  # type: ignore[misc]
            if embeddings is not None:
                batch[f"{name}conditioning"] = self._conditioning(map_conditioning(embeddings, Tensor.float), batch)  # type: ignore[literal-required]
        return batch
