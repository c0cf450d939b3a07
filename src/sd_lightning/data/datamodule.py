"""The datamodule: joins a source, the sampler and the trainer; the only data file that knows Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer

from sd_lightning._errors import UsageError
from sd_lightning.data.digits import Digits
from sd_lightning.data.dreambooth import Picture, SubjectAndClass, find_class_pictures, find_photos
from sd_lightning.data.fingerprint import Change, change, fingerprint
from sd_lightning.data.images import HuggingFaceImages, ImageFolder
from sd_lightning.data.latent_table import LatentTable, encode_source
from sd_lightning.data.loader import EpochLoader, LoaderOptions, WholeBatchLoader
from sd_lightning.data.sampler import GlobalBatchSampler, Key
from sd_lightning.data.samples import CaptionedImages, ImageOptions
from sd_lightning.data.source import BadSample, Source, SourceSubset, hold_out
from sd_lightning.data.transform import MAX_IMAGE_PIXELS

log = logging.getLogger(__name__)

_NAMED = 20
"""Bad samples that warnings and errors name."""
_LOOKED_AT = 1000
"""Samples whose captions tell how many the tokenizer cuts."""


class SDDataModule(LightningDataModule):
    """Batches for ``SDLightningModule`` (what they hold: ``CaptionedImages``).

    ``batch_size`` is global: one optimizer step consumes so many samples on all processes together,
    whatever their number and the gradient accumulation. From the trainer come the rank, the number
    of data-parallel processes and the accumulation; from its module ``seed``,
    ``latent_diffusion.tokenize`` and, for ``cache_latents``, ``encoder.encode_moments``.

    Attributes:
        batch_size: The global batch.
        bad_samples: Names of the samples that could not be used, and why (on this rank, so far).
        train_sampler: The sampler of the training loader, once there is one.
        no_caption_gap: Why the validation measures no caption gap; None if it does.
    """

    def __init__(
        self,
        source_train: Source,
        source_val: Source | None = None,
        *,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        images: ImageOptions | None = None,
        loader: LoaderOptions | None = None,
        max_bad_fraction: float = 0.01,
        changed: Literal["refuse", "accept"] = "refuse",
        cache_latents: bool = False,
    ) -> None:
        """Check the options against each other and the sources.

        Args:
            source_train: Captioned images to train on.
            source_val: Held-out ones; without them there is no validation.
            batch_size: Samples per optimizer step, over all processes.
            val_batch_size: Validation samples per process and batch; default ``batch_size``.
            images: Size, augmentation and caption dropout.
            loader: DataLoader options.
            max_bad_fraction: Stop the run when more than this fraction of the samples cannot be used. Every rank
                counts its own; they are added up at the start of each epoch.
            changed: Whether a run may be resumed in the middle of an epoch that holds other samples by now.
            cache_latents: Encode all images once, before the first step, and keep the latents in
                host memory.

        Raises:
            UsageError: The options cannot work together, or too many samples are bad already.
        """
        super().__init__()
        self.source_train, self.source_val = source_train, source_val
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.images = images or ImageOptions()
        self.loader_options = loader or LoaderOptions()
        self.max_bad_fraction = max_bad_fraction
        self.changed = changed
        self.cache_latents = cache_latents
        self.bad_samples: dict[str, str] = {}
        self.train_sampler: GlobalBatchSampler | None = None
        self.no_caption_gap: str | None = "nothing was validated"
        self._told_of_long_captions = False
        self._latents: dict[int, tuple[object, LatentTable]] = {}
        self._position: tuple[int, int] | None = None
        self._fingerprint: dict[str, Any] | None = None
        self._check_options()
        for source in filter(None, (source_train, source_val)):
            self._count_bad(source.dropped)

    def _check_options(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"data.batch_size={self.batch_size}: expected 1 or more; write data.batch_size=64")
        if self.val_batch_size is not None and self.val_batch_size < 1:
            raise UsageError(
                f"data.val_batch_size={self.val_batch_size}: expected 1 or more; write data.val_batch_size=64"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise UsageError(
                f"data.max_bad_fraction={self.max_bad_fraction}: expected a fraction in [0, 1]; "
                "write data.max_bad_fraction=0.01"
            )
        if self.changed not in ("refuse", "accept"):
            raise UsageError(f"data.changed={self.changed}: expected refuse or accept; write data.changed=refuse")
        if self.cache_latents and (self.images.random_flip or not self.images.center_crop):
            random = "data.random_flip=true" if self.images.random_flip else "data.center_crop=false"
            raise UsageError(
                f"data.cache_latents=true encodes each image once, but {random} changes it every epoch; write "
                "data.center_crop=true data.random_flip=false, or data.cache_latents=false"
            )

    def check_batches(self, world_size: int, accumulate: int) -> None:
        """Check that the training set fills a global batch on that many processes.

        Raises:
            UsageError: It does not, or the batch cannot be divided among them.
        """
        GlobalBatchSampler(
            len(self.source_train), batch_size=self.batch_size, world_size=world_size, accumulate=accumulate, seed=0
        )

    @property
    def num_train_samples(self) -> int:
        """Length of the training source."""
        return len(self.source_train)

    def fingerprint(self) -> dict[str, Any]:
        """Return what the training set is, as when this was first asked for; see ``data/fingerprint.py``."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.source_train)
        return self._fingerprint

    def change_since(self, saved: Mapping[str, Any]) -> Change | None:
        """Return what of the training set is another than when a fingerprint was taken, if anything."""
        return change(saved, self.fingerprint(), self.source_train)

    def resume(self, epoch: int, batches_done: int) -> None:
        """Continue ``epoch`` after its first ``batches_done`` global batches; call before the first batch.

        Args:
            epoch: Epoch to continue.
            batches_done: Optimizer steps already taken in it.

        Raises:
            UsageError: The epoch does not have that many batches.
        """
        self._position = (epoch, batches_done)
        if self.train_sampler is not None:
            self.train_sampler.resume(epoch, batches_done)

    def train_dataloader(self) -> EpochLoader:
        """Return the loader over this rank's part of every global batch."""
        world_size, rank = self._data_parallel()
        self.train_sampler = GlobalBatchSampler(
            len(self.source_train),
            batch_size=self.batch_size,
            world_size=world_size,
            rank=rank,
            accumulate=self._attached().accumulate_grad_batches,
            seed=self._module().seed,
            shuffle=not self._attached().overfit_batches,  # type: ignore[attr-defined]
            together=getattr(self.source_train, "together", 1),
        )
        if self._position is not None:
            self.train_sampler.resume(*self._position)
        self._tell_of_long_captions()
        dataset = self._dataset(self.source_train, self.images)
        loader = self.loader_options.build(dataset, self.train_sampler, on_cuda=self._device().type == "cuda")
        return EpochLoader(loader, self.train_sampler, on_start=self._compare_bad)

    def val_dataloader(self) -> WholeBatchLoader | list[Any]:
        """Return the loader over this rank's share of the held-out images, in order, nothing random.

        The shares are equally large, as sharded networks need: with W processes, N % W samples are left out.
        """
        if self.source_val is None:
            # No validation is what was asked for; Lightning asks whether it was intended.
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            self.no_caption_gap = "no data are held out"
            return []
        world_size, rank = self._data_parallel()
        dataset = self._dataset(self.source_val, self.images.evaluation(), wrong_captions=True)
        self._check_caption_gap(dataset)
        batches = validation_batches(len(self.source_val), self.val_batch_size or self.batch_size, world_size, rank)
        return WholeBatchLoader(self.loader_options.build(dataset, batches, on_cuda=self._device().type == "cuda"))

    def test_dataloader(self) -> WholeBatchLoader | list[Any]:
        """Return the held-out images again: training does not select by them."""
        return self.val_dataloader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Take the bad samples out of a batch and count them (Lightning calls this in the main process)."""
        if not (isinstance(batch, dict) and "bad" in batch):
            return batch
        source = self.source_train if self._attached().training else self.source_val
        assert source is not None
        self._count_bad({source.name(index): reason for index, reason in batch.pop("bad")})
        if "index" not in batch:
            raise UsageError(f"data: none of the {len(source)} images can be read: {self._list_bad()}")
        if self._attached().training:
            self._position = None
            batch.pop("captions", None)  # Lightning would look into every string for tensors to move
        return batch

    def gather_bad_samples(self) -> dict[str, str]:
        """Return the bad samples that any rank has met; a collective call."""
        if dist.is_available() and dist.is_initialized():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self.bad_samples)
            for part in parts:
                self.bad_samples |= part
        return self.bad_samples

    def still_bad(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Return which of the samples that an earlier start could not use are still there and cannot be used yet."""
        unknown = saved.keys() - self.bad_samples.keys()
        found: dict[str, str] = {}
        for source in filter(None, (self.source_train, self.source_val)) if unknown else ():
            distinct: Source = getattr(source, "distinct", source)
            for index in range(len(distinct)):
                if distinct.name(index) in unknown:
                    try:
                        distinct.captions(index)
                        distinct.image(index)
                    except BadSample as reason:
                        found[distinct.name(index)] = str(reason)
        return found

    def recall_bad(self, bad: Mapping[str, str]) -> None:
        """Count samples that earlier starts of the run could not use.

        Raises:
            UsageError: They are too many with those of this start.
        """
        self._count_bad(bad)

    def _compare_bad(self) -> None:
        """Stop all ranks when what each of them tolerates is too much together; once per epoch."""
        self.gather_bad_samples()
        self._check_bad()

    def _dataset(self, source: Source, images: ImageOptions, *, wrong_captions: bool = False) -> CaptionedImages:
        module = self._module()
        return CaptionedImages(
            source,
            module.latent_diffusion.tokenize,
            options=images,
            seed=module.seed,
            wrong_captions=wrong_captions,
            latents=self._latent_table(source) if self.cache_latents else None,
            max_bad=self._max_bad(),
        )

    def _check_caption_gap(self, dataset: CaptionedImages) -> None:
        """Say if there is no caption gap to measure: all ranks leave it out then, or none."""
        was = self.no_caption_gap
        if self.images.proportion_empty_prompts == 1:
            self.no_caption_gap = "the model is trained without captions (data.proportion_empty_prompts=1)"
        elif not self._attached().strategy.reduce_boolean_decision(dataset.has_wrong_captions):
            self.no_caption_gap = "all held-out captions are the same to the tokenizer"
        else:
            self.no_caption_gap = None
        dataset.has_wrong_captions = self.no_caption_gap is None
        if self.no_caption_gap not in (None, was) and self._attached().is_global_zero:
            log.warning("data: the caption gap is not measured: %s", self.no_caption_gap)

    def _tell_of_long_captions(self) -> None:
        """Say once which share of the training captions the tokenizer cuts, as far as a look at some tells."""
        if self._told_of_long_captions or not self._attached().is_global_zero:
            return
        self._told_of_long_captions = True
        total = len(self.source_train)
        captions: list[str] = []
        for i in range(min(_LOOKED_AT, total)):
            with suppress(BadSample):
                captions += self.source_train.captions(i * total // min(_LOOKED_AT, total))
        cut = self._module().latent_diffusion.truncated(captions)
        if captions:
            level = logging.WARNING if any(cut) else logging.INFO
            of = "" if total <= _LOOKED_AT else f" of {_LOOKED_AT} samples"
            share = sum(cut) / len(cut)
            log.log(level, "data: %.1f %% of the captions%s are longer than the tokenizer reads", 100 * share, of)

    def _latent_table(self, source: Source) -> LatentTable:
        """Encode a source once for an encoder, however often its loader is asked for."""
        encoder = self._module().encoder
        known = self._latents.get(id(source))
        if known is None or known[0] is not encoder:
            table = encode_source(
                getattr(source, "distinct", source),
                encoder.encode_moments,
                resolution=self.images.resolution,
                device=self._device(),
                num_workers=self.loader_options.num_workers,
                max_pixels=self.images.max_image_pixels,
            )
            if hasattr(source, "rows"):
                table = table.of_samples(source.rows)
            self._latents[id(source)] = known = (encoder, table)
        self._count_bad({source.name(index): reason for index, reason in known[1].bad})
        return known[1]

    def _attached(self) -> Trainer:
        """Return the trainer whose processes and module this datamodule serves."""
        if self.trainer is None:
            raise UsageError("SDDataModule got no trainer; its loaders exist inside trainer.fit(module, datamodule)")
        return self.trainer

    def _module(self) -> Any:
        module = self._attached().lightning_module
        if not all(hasattr(module, name) for name in ("seed", "latent_diffusion", "encoder")):
            raise UsageError(
                f"SDDataModule got a {type(module).__name__} to train; expected an SDLightningModule, whose seed, "
                "tokenizer and encoder it uses; pass one to trainer.fit"
            )
        return module

    def _data_parallel(self) -> tuple[int, int]:
        """Return the number of data-parallel processes and the number of this one."""
        parallel = self._attached().distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return parallel["num_replicas"], parallel["rank"]

    def _device(self) -> torch.device:
        return self._attached().strategy.root_device

    def _max_bad(self) -> int:
        sources = [source for source in (self.source_train, self.source_val) if source is not None]
        dropped = {name for source in sources for name in source.dropped}
        return int(self.max_bad_fraction * (sum(map(len, sources)) + len(dropped)))

    def _count_bad(self, bad: Mapping[str, str]) -> None:
        """Remember bad samples; warn of each once, the first twenty by name."""
        for name, reason in bad.items():
            if name in self.bad_samples:
                continue
            self.bad_samples[name] = reason
            if len(self.bad_samples) <= _NAMED:
                log.warning("data: %s is left out: %s", name, reason)
            elif len(self.bad_samples) == _NAMED + 1:
                log.warning("data: more than %d samples are left out; further ones are only counted", _NAMED)
        self._check_bad()

    def _check_bad(self) -> None:
        if len(self.bad_samples) > self._max_bad():
            raise UsageError(
                f"data: {len(self.bad_samples)} samples cannot be used, more than data.max_bad_fraction="
                f"{self.max_bad_fraction} allows ({self._max_bad()}): {self._list_bad()}; mend or remove them, "
                "or raise data.max_bad_fraction"
            )

    def _list_bad(self) -> str:
        shown = [f"{name} ({reason})" for name, reason in list(self.bad_samples.items())[:_NAMED]]
        more = len(self.bad_samples) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")


def validation_batches(num_samples: int, batch_size: int, world_size: int = 1, rank: int = 0) -> list[list[Key]]:
    """Return this rank's batches of validation keys (epoch 0): its contiguous, equally large share."""
    share = max(1, num_samples // world_size)
    keys = [(0, (rank * share + i) % num_samples) for i in range(share)]
    return [keys[i : i + batch_size] for i in range(0, share, batch_size)]


# The builders below take flat arguments, more of them than elsewhere: they are the keys of conf/data/*.yaml, and so
# the command line (`data.batch_size=64`).


def digits_data(
    *,
    num_val_samples: int = 128,
    batch_size: int = 64,
    val_batch_size: int | None = None,
    resolution: int = 32,
    center_crop: bool = True,
    random_flip: bool = False,
    proportion_empty_prompts: float = 0.1,
    cache_latents: bool = True,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    max_bad_fraction: float = 0.01,
    changed: Literal["refuse", "accept"] = "refuse",
) -> SDDataModule:
    """Build the embedded digits (``Digits``), validated on the first ``num_val_samples`` of the 360 held out."""
    held_out = Digits("val")
    if not 1 <= num_val_samples <= len(held_out):
        raise UsageError(
            f"data.num_val_samples={num_val_samples}: expected 1 to {len(held_out)}; write data.num_val_samples=128"
        )
    return SDDataModule(
        Digits("train"),
        SourceSubset(held_out, range(num_val_samples)),
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        images=ImageOptions(resolution, center_crop, random_flip, proportion_empty_prompts),
        loader=LoaderOptions(num_workers, pin_memory, persistent_workers, prefetch_factor),
        max_bad_fraction=max_bad_fraction,
        changed=changed,
        cache_latents=cache_latents,
    )


def image_folder_data(
    train_data_dir: str,
    val_data_dir: str | None = None,
    *,
    num_val_samples: int | None = None,
    caption_column: str = "text",
    batch_size: int = 16,
    val_batch_size: int | None = None,
    resolution: int = 512,
    center_crop: bool = False,
    random_flip: bool = False,
    proportion_empty_prompts: float = 0.1,
    cache_latents: bool = False,
    num_workers: int = 4,
    pin_memory: bool | None = None,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    max_bad_fraction: float = 0.01,
    changed: Literal["refuse", "accept"] = "refuse",
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> SDDataModule:
    """Build a folder of images (``ImageFolder``); without a val folder ``hold_out`` splits ``num_val_samples`` off."""
    train: Source = ImageFolder(train_data_dir, caption_column=caption_column, max_image_pixels=max_image_pixels)
    val: Source | None
    if val_data_dir is None:
        train, val = hold_out(train, num_val_samples)
    else:
        val = ImageFolder(val_data_dir, caption_column=caption_column, max_image_pixels=max_image_pixels)
    return SDDataModule(
        train,
        val,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        images=ImageOptions(resolution, center_crop, random_flip, proportion_empty_prompts, max_image_pixels),
        loader=LoaderOptions(num_workers, pin_memory, persistent_workers, prefetch_factor),
        max_bad_fraction=max_bad_fraction,
        changed=changed,
        cache_latents=cache_latents,
    )


def huggingface_data(
    dataset_name: str,
    *,
    split: str = "train",
    val_split: str | None = None,
    num_val_samples: int | None = None,
    image_column: str = "image",
    caption_column: str = "text",
    batch_size: int = 16,
    val_batch_size: int | None = None,
    resolution: int = 512,
    center_crop: bool = False,
    random_flip: bool = False,
    proportion_empty_prompts: float = 0.1,
    cache_latents: bool = False,
    num_workers: int = 4,
    pin_memory: bool | None = None,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    max_bad_fraction: float = 0.01,
    changed: Literal["refuse", "accept"] = "refuse",
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> SDDataModule:
    """Build a Hugging Face dataset (``HuggingFaceImages``); ``num_val_samples`` as in ``image_folder_data``."""
    options: dict[str, Any] = {
        "image_column": image_column,
        "caption_column": caption_column,
        "max_image_pixels": max_image_pixels,
    }
    train: Source = HuggingFaceImages(dataset_name, split=split, **options)
    val: Source | None
    if val_split is None:
        train, val = hold_out(train, num_val_samples)
    else:
        val = HuggingFaceImages(dataset_name, split=val_split, **options)
    return SDDataModule(
        train,
        val,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        images=ImageOptions(resolution, center_crop, random_flip, proportion_empty_prompts, max_image_pixels),
        loader=LoaderOptions(num_workers, pin_memory, persistent_workers, prefetch_factor),
        max_bad_fraction=max_bad_fraction,
        changed=changed,
        cache_latents=cache_latents,
    )


def dreambooth_data(
    instance_data_dir: str,
    instance_prompt: str | None = None,
    *,
    class_data_dir: str | None = None,
    class_prompts: list[str] | None = None,
    num_class_images: int = 100,
    prior_loss_weight: float = 1.0,
    batch_size: int = 2,
    resolution: int = 512,
    center_crop: bool = True,
    random_flip: bool = False,
    proportion_empty_prompts: float = 0.0,
    cache_latents: bool = True,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    max_bad_fraction: float = 0.01,
    changed: Literal["refuse", "accept"] = "refuse",
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> SDDataModule:
    """Build photos of a subject, beside pictures of its class (``SubjectAndClass``) where there are class prompts."""
    photos = find_photos(instance_data_dir, instance_prompt)
    pictures: list[Picture] = []
    if class_prompts:
        if class_data_dir is None:
            raise UsageError(
                "data.class_prompts without data.class_data_dir; write data.class_data_dir=<folder>, where the "
                "pictures of the class lie"
            )
        pictures = find_class_pictures(class_data_dir, class_prompts, num_class_images)
        if not pictures:
            raise UsageError(
                f"data.class_data_dir={class_data_dir} has no pictures of {class_prompts[0]!r}; draw them with python "
                "-m sd_lightning.dreambooth, or leave data.class_prompts out"
            )
    return SDDataModule(
        SubjectAndClass(
            photos,
            pictures,
            prior_loss_weight=prior_loss_weight,
            min_samples=16 * batch_size,
            max_image_pixels=max_image_pixels,
        ),
        batch_size=batch_size,
        images=ImageOptions(resolution, center_crop, random_flip, proportion_empty_prompts, max_image_pixels),
        loader=LoaderOptions(num_workers, pin_memory, persistent_workers, prefetch_factor),
        max_bad_fraction=max_bad_fraction,
        changed=changed,
        cache_latents=cache_latents,
    )
