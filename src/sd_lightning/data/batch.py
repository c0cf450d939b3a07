"""Dataset that builds whole batches of images, captions and sizes from ``(epoch, index)`` keys.

Torch calls ``__getitems__`` with all keys of a batch, so the random numbers of its samples are drawn in one vectorised
call. An unreadable sample is replaced by the next readable one and reported in the batch. Its position and random
numbers stay the same, and so do all other samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sd_lightning._errors import UsageError
from sd_lightning.data.order import Batch, Bucket, Key, Shape, shape_of
from sd_lightning.data.preservation import Preservation
from sd_lightning.data.source import BadSample, Source, StoredLatents
from sd_lightning.data.sources.masks import Crop, loss_weights, place_mask
from sd_lightning.data.transform import ImageOptions, Placed, any_error_is_a_bad_sample, place, to_model_range
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import Purpose
from sd_lightning.state.ranks import gathered

log = logging.getLogger(__name__)

_NAMED = 20
"""Number of bad samples that warnings and errors list by name."""
_LOOKED_AT = 1000
"""Number of samples whose captions are checked for truncation."""
Tokenize = Callable[[list[str]], dict[str, Tensor]]
"""Captions -> token ids (B, L) int64, by text encoder."""


class BadSamples:
    """The bad samples of a run, with a limit on their number.

    Attributes:
        found: Name of each bad sample -> reason.
        limit: Number of bad samples tolerated.
    """

    def __init__(self, max_fraction: float, num_samples: int, sources: Sequence[Source] = ()) -> None:
        """Start with no bad samples.

        Args:
            max_fraction: Fraction of the samples that may be bad.
            num_samples: Number of all samples, usable or not.
            sources: Where :meth:`still_bad` looks.
        """
        self._sources = sources
        self.found: dict[str, str] = {}
        self.max_fraction = max_fraction
        self.limit = int(max_fraction * num_samples)

    def count(self, bad: Mapping[str, str]) -> None:
        """Add bad samples; log each new one, only the first twenty by name.

        Raises:
            UsageError: More than ``limit`` samples are bad.
        """
        for name, reason in bad.items():
            if name in self.found:
                continue
            self.found[name] = reason
            if len(self.found) <= _NAMED:
                log.warning("data: %s is left out: %s", name, reason)
            elif len(self.found) == _NAMED + 1:
                log.warning("data: more than %d samples are left out; further ones are only counted", _NAMED)
        self.check()

    def still_bad(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Return the bad samples of an earlier start that are still there and bad, without those found by this one."""
        unknown = saved.keys() - self.found.keys()
        found: dict[str, str] = {}
        for source in self._sources if unknown else ():
            distinct = source.distinct
            for index in range(len(distinct)):
                if distinct.name(index) in unknown:
                    try:
                        distinct.captions(index)
                        distinct.image(index)
                        distinct.mask(index)
                    except BadSample as reason:
                        found[distinct.name(index)] = str(reason)
        return found

    def gather(self) -> dict[str, str]:
        """Return the bad samples of all ranks, which each now knows; a collective call."""
        for part in gathered(self.found):
            self.found |= part
        return self.found

    def check_all_ranks(self) -> None:
        """Gather the bad samples of all ranks, then :meth:`check` their total; a collective call.

        Raises:
            UsageError: More than ``limit`` samples are bad.
        """
        self.gather()
        self.check()

    def check(self) -> None:
        """Raise if too many samples are bad.

        Raises:
            UsageError: More than ``limit`` samples are bad.
        """
        if len(self.found) > self.limit:
            raise UsageError(
                f"data: {len(self.found)} samples cannot be used, more than data.max_bad_fraction={self.max_fraction} "
                f"allows ({self.limit}): {self.listed()}; mend or remove them, or raise data.max_bad_fraction"
            )

    def listed(self) -> str:
        """Return the first twenty bad samples with their reasons, for a message."""
        shown = [f"{name} ({reason})" for name, reason in list(self.found.items())[:_NAMED]]
        more = len(self.found) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")


class CaptionedImages(Dataset[Batch]):
    """Dataset of whole batches, read with lists of ``(epoch, index)`` through ``__getitems__``.

    A batch holds

    - ``pixel_values`` (B, 3, H, W) float32 in [-1, 1], or if there are stored latents ``latent_moments``
      (B, 2C, h, w) or ``latents`` (B, C, h, w) float32
    - ``input_ids`` by text encoder (B, L) int64; in validation also ``wrong_input_ids``, unless all samples have
      the same ids. ``text_embeddings`` instead, and beside ``wrong_input_ids`` ``wrong_text_embeddings``, where the
      source stores them: what ``Family.embed`` returns, in any floating-point type
    - ``preserved_input_ids`` or ``preserved_text_embeddings`` with a ``Preservation``: of its captions
    - ``epoch``, ``index`` (B,) int64: the key of the sample's randomness
    - ``original_size``, ``crop_top_left``, ``target_size`` (B, 2) int64, (height, width) in pixels
    - ``loss_weight`` (B,) float32 if the source has ``loss_weights``, or the global batch is divided unevenly
    - ``loss_mask`` (B, 1, h, w) float32 with masks: weights of the latents in the sample's loss
    - ``sample_weight`` (B,) float32 in validation with buckets: 0 for samples that only fill up a batch
    - ``captions`` list of B strings, unless their token ids were stored
    - ``bad`` list of ``(index, reason)``
    """

    def __init__(
        self,
        source: Source,
        tokenize: Tokenize,
        *,
        options: ImageOptions,
        seed: int,
        wrong_captions: bool = False,
        latents: StoredLatents | None = None,
        max_bad: int | None = None,
        buckets: Sequence[Bucket] = (),
        latent_stride: int = 1,
        preservation: Preservation | None = None,
    ) -> None:
        """Combine images, captions and randomness.

        Args:
            source: Source of images and captions.
            tokenize: Turns captions into token ids.
            options: Size, augmentation and caption dropout.
            seed: Seed of the run.
            wrong_captions: Add ``wrong_input_ids``, the first caption of the next sample whose first
                caption has other token ids, and use first captions only (validation).
            latents: Encoded images to return instead of pixels.
            max_bad: Stop replacing samples once more than this many are bad in one batch; such a batch holds only
                ``bad``.
            buckets: Shapes of the images; squares without any. All samples of a batch are of one bucket.
            latent_stride: Image pixels per latent along one side, for masks.
            preservation: Adds captions whose predictions stay as they were (training).
        """
        self.source = source
        self.tokenize = tokenize
        self.options = options
        self.seed = seed
        self.wrong_captions = wrong_captions
        self.latents = latents
        self.max_bad = len(source) if max_bad is None else max_bad
        self.buckets = buckets
        self.latent_stride = latent_stride
        self.preservation = preservation
        self._has_told = False
        self._masks: dict[int, Tensor] = {}
        """By the number of the image, of those latents that have a mask: their crop stays the same."""

    def __len__(self) -> int:
        """Return the number of samples of the source."""
        return len(self.source)

    def __getitem__(self, key: Key) -> Batch:
        """Build a batch of one."""
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """Build one batch.

        Args:
            keys: ``(epoch, index)`` of each sample, or ``(epoch, index, loss weight)``.

        Returns:
            The batch (see the class), or only ``bad`` if more than ``max_bad`` samples are bad.
        """
        epochs, indices, *uneven = zip(*keys, strict=True)
        epoch, index = torch.tensor(epochs), torch.tensor(indices)
        loss_weight = torch.tensor(uneven[0]) if uneven else None
        shape = (self.options.resolution, self.options.resolution)
        if self.buckets:
            shape = shape_of(self.buckets, keys[0][1])
        bad: dict[int, str] = {}
        if self.latents is not None:
            used = self.latents.usable(index)
            images = self.latents.batch(used, epoch=epoch)
            if self.options.masked_loss != "none":
                images["loss_mask"] = torch.stack([self._mask(i, shape)[0] for i in used])
        else:
            found = self._read_images(epoch, index, shape, bad)
            if found is None:
                return {"bad": list(bad.items())}
            images, used = found
        batch = images | {
            **self._captions(used, epoch, index),
            "epoch": epoch,
            "index": index,
            "target_size": torch.tensor([shape] * len(keys)),
            "bad": list(bad.items()),
        }
        if self.preservation is not None:
            batch |= self._preserved(self.preservation, used, batch)
        if self.source.loss_weights is not None:
            weights = self.source.loss_weights[used]
            loss_weight = weights if loss_weight is None else loss_weight * weights
        if loss_weight is not None:
            batch["sample_weight" if self.wrong_captions else "loss_weight"] = loss_weight
        if self.wrong_captions and self.has_wrong_captions:
            wrong = [self._with_wrong_caption(i) for i in used]
            batch["wrong_input_ids"] = self.tokenize([self._first_caption(i) for i in wrong])
            stored = self.source.text_embeddings(wrong, [0] * len(wrong))
            if stored is not None:
                batch["wrong_text_embeddings"] = stored
        return batch

    @cached_property
    def has_wrong_captions(self) -> bool:
        """Whether any two first captions differ in their token ids; captions are read until two differ."""
        readable = (ids for ids in map(self._first_ids, range(len(self))) if ids is not None)
        first = next(readable, None)
        return first is not None and any(not torch.equal(ids, first) for ids in readable)

    def _with_wrong_caption(self, index: int) -> int:
        """Return the next sample whose first caption has other token ids."""
        right = self._first_ids(index)
        for i in chain(range(index + 1, len(self)), range(index)):
            ids = self._first_ids(i)
            if ids is not None and right is not None and not torch.equal(ids, right):
                return i
        raise RuntimeError(f"sample {index} has no wrong caption")

    def _first_caption(self, index: int) -> str:
        return self.options.written(self.source.captions(index)[0])

    def _first_ids(self, index: int) -> Tensor | None:
        """Return the token ids of a sample's first caption for all text encoders; None if it cannot be read."""
        try:
            return torch.cat([*self.tokenize([self._first_caption(index)]).values()], dim=1)
        except BadSample:
            return None

    def _read_images(
        self, epoch: Tensor, index: Tensor, shape: Shape, bad: dict[int, str]
    ) -> tuple[dict[str, Tensor], list[int]] | None:
        """Read, crop and flip images; return them with the indices actually read, or None if too many are bad."""
        crops: list[Crop | None] = [None] * len(index)
        flips = [False] * len(index)
        if not self.options.center_crop:
            crops = randomness.uniform(self.seed, epoch, index, Purpose.CROP, (2,)).tolist()
        if self.options.random_flip:
            flips = (randomness.uniform(self.seed, epoch, index, Purpose.FLIP) < 0.5).tolist()
        placed, masks, used = [], [], []
        for requested, crop, flip in zip(index.tolist(), crops, flips):
            image = self._readable(requested, bad, shape, crop, flip)
            if image is None:
                return None
            placed.append(image[0])
            masks.append(image[1])
            used.append(image[2])
        images = {
            "pixel_values": to_model_range(torch.from_numpy(np.stack([p.pixels for p in placed]))),
            "original_size": torch.tensor([p.original_size for p in placed]),
            "crop_top_left": torch.tensor([p.crop_top_left for p in placed]),
        }
        if self.options.masked_loss != "none":
            images["loss_mask"] = torch.stack(masks)
        return images, used

    def _readable(
        self, index: int, bad: dict[int, str], shape: Shape, crop: Crop | None, flip: bool
    ) -> tuple[Placed, Tensor, int] | None:
        """Return the first readable image from ``index`` on, its mask and its index; None if too many are bad."""
        max_pixels = self.options.max_image_pixels
        for i in chain(range(index, len(self)), range(index)):
            try:
                with any_error_is_a_bad_sample():
                    self.source.captions(i)
                    image = self.source.image(i)
                    mask, at = self._mask(i, shape, crop, flip)
                    return place(image, shape, max_pixels=max_pixels, crop=at, flip=flip), mask, i
            except BadSample as reason:
                bad[i] = str(reason)
            if len(bad) > self.max_bad:
                break
        return None

    def _mask(
        self, index: int, shape: Shape, crop: Crop | None = None, flip: bool = False
    ) -> tuple[Tensor, Crop | None]:
        """Return the weights (1, h, w) of a sample's latents, 1 where it has no mask, and where to crop its image."""
        options, stride = self.options, self.latent_stride
        number = index if self.source.rows is None else int(self.source.rows[index])
        if number in self._masks:
            return self._masks[number], crop
        mask = self.source.mask(index) if options.masked_loss != "none" else None
        if mask is None:
            return torch.ones(1, shape[0] // stride, shape[1] // stride), crop
        pixels, crop = place_mask(mask, shape, max_pixels=options.max_image_pixels, crop=crop, flip=flip)
        weights = loss_weights(pixels, stride, options.unmasked_weight)
        if self.latents is not None:
            self._masks[number] = weights
        return weights, crop

    def _choose_captions(self, epoch: Tensor, index: Tensor, used: list[int]) -> list[int | None]:
        """Choose one caption of each sample by its number, or None for "" (caption dropout)."""
        if self.wrong_captions:
            return [0] * len(used)
        position, drop = randomness.uniform(self.seed, epoch, index, Purpose.CAPTION, (2,)).T.tolist()
        share, counts = self.options.proportion_empty_prompts, self.source.num_captions(used)
        return [None if d < share else int(u * count) for u, d, count in zip(position, drop, counts)]

    def _captions(self, used: list[int], epoch: Tensor, index: Tensor) -> Batch:
        """Return the batch entries of the chosen captions; those that are stored encoded are not read."""
        which = self._choose_captions(epoch, index, used)
        if self.options.changed_captions or (self.preservation is not None and self.preservation.words):
            captions = self._written(used, which, epoch, index)
            return {"input_ids": self.tokenize(captions), "captions": captions}
        embeddings = self.source.text_embeddings(used, which)
        if embeddings is not None:
            return {"text_embeddings": embeddings}
        kept = [place for place, number in enumerate(which) if number is not None]
        numbers = [number for number in which if number is not None]
        stored = self.source.token_ids([used[place] for place in kept], numbers)
        if stored is None:
            captions = ["" if n is None else self.source.captions(i)[n] for i, n in zip(used, which)]
            return {"input_ids": self.tokenize(captions), "captions": captions}
        if len(kept) < len(used):
            ids = {name: each.repeat(len(used), 1) for name, each in self.tokenize([""]).items()}
            for name, each in stored.items():
                ids[name][kept] = each
            return {"input_ids": ids}
        return {"input_ids": stored}

    def _preserved(self, preservation: Preservation, used: list[int], batch: Batch) -> Batch:
        """Return the batch entries of the captions whose predictions stay as they were."""
        stored = self.source.text_embeddings(used, [None] * len(used)) if preservation.is_blank else None
        if stored is not None:
            return {"preserved_text_embeddings": stored}
        draws = randomness.uniform(self.seed, batch["epoch"], batch["index"], Purpose.PRESERVATION).tolist()
        own = batch.get("captions", [""] * len(used))
        captions = [*map(preservation.caption, own, draws)]
        same = [caption for caption, other in zip(own, captions) if caption.split() == other.split()]
        if preservation.words and any(same) and not self._has_told:
            self._has_told = True
            log.warning("data: a caption has none of preservation.words, and is itself preserved: %s", max(same))
        return {"preserved_input_ids": self.tokenize(captions)}

    def _written(self, used: list[int], which: list[int | None], epoch: Tensor, index: Tensor) -> list[str]:
        """Return the chosen captions as the model is to read them; those of a class stay as they are."""
        captions = ["" if n is None else self.source.captions(i)[n] for i, n in zip(used, which)]
        is_prior = self.source.is_prior
        changed = [bool(text) and (is_prior is None or not is_prior[i]) for i, text in zip(used, captions)]
        count = 0 if self.wrong_captions else max(map(self.options.num_draws, captions))
        draws = randomness.uniform(self.seed, epoch, index, Purpose.TAGS, (count,)).tolist()
        written = self.options.written
        return [written(text, row) if has else text for has, text, row in zip(changed, captions, draws)]


def some_captions(source: Source, written: Callable[[str], str] = str) -> Iterator[str]:
    """Yield the captions of about 1000 samples as the model is to read them; those of a class stay as they are."""
    for i in range(0, len(source), max(len(source) // _LOOKED_AT, 1)):
        stays = source.is_prior is not None and source.is_prior[i]
        with suppress(BadSample):
            yield from map(str if stays else written, source.captions(i))


def tell_of_long_captions(
    source: Source, truncated: Callable[[list[str]], list[bool]], written: Callable[[str], str] = str
) -> None:
    """Log the share of captions that the tokenizer truncates, measured on about 1000 samples.

    Args:
        source: Source of the captions.
        truncated: Returns for each caption whether the tokenizer truncates it.
        written: Returns a caption as the model is to read it.
    """
    captions = [*some_captions(source, written)]
    cut = truncated(captions)
    if captions:
        level = logging.WARNING if any(cut) else logging.INFO
        of = "" if len(source) <= _LOOKED_AT else f" of about {_LOOKED_AT} samples"
        share = sum(cut) / len(cut)
        log.log(level, "data: %.1f %% of the captions%s are longer than the tokenizer reads", 100 * share, of)
