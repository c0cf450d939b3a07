"""The datamodule: joins a source, the sampler and the trainer; the only data file that needs Lightning."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, Trainer

from sd_lightning._errors import UsageError
from sd_lightning.data.batch import BadSamples, CaptionedImages, Tokenize, some_captions, tell_of_long_captions
from sd_lightning.data.contract import TrainedModule
from sd_lightning.data.fingerprint import Change, Fingerprint, change, fingerprint
from sd_lightning.data.latent_table import LatentTable, encode_source
from sd_lightning.data.loading import EpochLoader, LoaderOptions, LookAhead, WholeBatchLoader
from sd_lightning.data.order import Batch
from sd_lightning.data.preservation import Preservation
from sd_lightning.data.sampler import Batching, GlobalBatchSampler
from sd_lightning.data.source import Source, SourceSubset, StoredLatents
from sd_lightning.data.sources.masks import EXPECTED
from sd_lightning.data.transform import ImageOptions
from sd_lightning.data.workers import Loaders, reading_threads
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.learned_token import LearnedToken

log = logging.getLogger(__name__)

_NOT_HELD_OUT = "no data are held out"

_KEEP = "if the GPU has room for the text encoders, module.offload_encoders=false keeps them there"


class SDDataModule(LightningDataModule):
    """Datamodule of batches for ``SDLightningModule``; see ``CaptionedImages`` for their entries.

    ``batch_size`` is global: the samples of one optimizer step over all processes, independent of their number and of
    gradient accumulation. The trainer gives the rank, the number of data-parallel processes and the accumulation; its
    module gives the attributes of ``TrainedModule``.

    Attributes:
        batch_size: The global batch.
        bad: The bad samples found so far on this rank, with their limit.
        train_sampler: Sampler of the training loader; None before the loader is built.
        no_caption_gap: Why the validation measures no caption gap; None if it does.
        loaders: Builds the loaders.
    """

    def __init__(
        self,
        source_train: Source,
        source_val: Source | None = None,
        *,
        batch_size: int = 64,
        images: ImageOptions | None = None,
        loader: LoaderOptions | None = None,
        max_bad_fraction: float = 0.01,
        changed: Literal["refuse", "accept"] = "refuse",
        cache_latents: bool = False,
    ) -> None:
        """Check the options against each other and the sources.

        Args:
            source_train: Captioned images to train on.
            source_val: Held-out images; None for no validation.
            batch_size: Samples per optimizer step, over all processes.
            images: Size, augmentation and caption dropout.
            loader: DataLoader options.
            max_bad_fraction: Stop the run when more than this fraction of the samples is bad. Every rank counts its
                own bad samples; they are all-gathered at the start of each epoch.
            changed: Whether a run may resume within an epoch whose samples have changed.
            cache_latents: Encode all images once, before the first step, into memory that a machine's processes share.

        Raises:
            UsageError: An option is invalid, options contradict each other, or too many samples are bad already.
        """
        super().__init__()
        self._sources = [source_train] if source_val is None else [source_train, source_val]
        for source in self._sources:
            if not isinstance(source, Source):
                raise UsageError(
                    f"SDDataModule got a {type(source).__name__}; expected a source; make "
                    "sd_lightning.data.source.Source its base"
                )
        self.source_train = source_train
        self.source_val = source_val
        self.batch_size = batch_size
        self.images = images or ImageOptions()
        self.loader_options = loader or LoaderOptions()
        self.loaders: Loaders = self.loader_options.loaders or Loaders()
        self.loaders.take(self.loader_options, self._sources, in_memory=cache_latents)
        self.changed = changed
        self.cache_latents = cache_latents
        self.train_sampler: GlobalBatchSampler | None = None
        self.no_caption_gap: str | None = "nothing was validated"
        self._is_described = False
        self._tables: dict[int, tuple[LatentEncoder, LatentTable]] = {}
        """By source: each is encoded once per encoder, however often loaders are built."""
        self._position: tuple[int, int] | None = None
        self._fingerprint: Fingerprint | None = None
        self._check_options(max_bad_fraction)
        dropped = {name for source in self._sources for name in source.dropped}
        self.bad = BadSamples(max_bad_fraction, sum(map(len, self._sources)) + len(dropped), self._sources)
        for source in self._sources:
            self.bad.count(source.dropped)
        drop_last = self.loader_options.drop_last
        self.batching = Batching(batch_size, self.images, drop_last=drop_last, count_bad=self.bad.count)

    def _check_options(self, max_bad_fraction: float) -> None:
        if self.batch_size < 1:
            raise UsageError(f"data.batch_size={self.batch_size}: expected 1 or more; write data.batch_size=64")
        if not 0 <= max_bad_fraction <= 1:
            raise UsageError(
                f"data.max_bad_fraction={max_bad_fraction}: expected a fraction in [0, 1]; "
                "write data.max_bad_fraction=0.01"
            )
        if self.changed not in ("refuse", "accept"):
            raise UsageError(f"data.changed={self.changed}: expected refuse or accept; write data.changed=refuse")
        if self.cache_latents:
            self.images.check_cacheable()
        masked_loss = self.images.masked_loss
        if masked_loss != "none" and not self._num_masks:
            raise UsageError(f"data.masked_loss={masked_loss}: no image to train on {EXPECTED[masked_loss]}")
        separator, captions = self.images.tag_separator, some_captions(self.source_train)
        if self.images.has_tags and not any(separator in caption for caption in captions):
            raise UsageError(
                f"data.shuffle_tags or data.tag_dropout: no caption has tags with {separator!r} between them; expected "
                "captions such as 'sks dog, beach, sunny'; leave them out, or write data.tag_separator"
            )
        if self.images.enable_bucket and self.source_train.group_size > 1:
            raise UsageError(
                f"data.enable_bucket=true: samples stay together in groups of {self.source_train.group_size}, such as "
                "a photo and a picture of its class, but a batch has one shape; write data.enable_bucket=false, or "
                "train without pictures of the class"
            )

    @property
    def _num_masks(self) -> int:
        """Number of images to train on that have a mask."""
        distinct = self.source_train.distinct
        return sum(map(distinct.has_mask, range(len(distinct))))

    def check_model(self, model: LatentDiffusion, *, train_text_encoder: bool) -> None:
        """Check that a model, with or without its text encoders, can be trained on these data.

        Raises:
            UsageError: It cannot.
        """
        if self.cache_latents or self.source_train.latents is not None:
            model.family.check_latents("data.cache_latents=true" if self.cache_latents else "data=latents")
        if self.source_train.latents is None:  # of a store, precompute has checked
            self.images.check_model(model)
        for source in self._sources:
            source.check_model(model, train_text_encoder=train_text_encoder)
        changed = self.images.changed_captions
        if changed and not self.source_train.needs_encoders:
            raise UsageError(
                f"{changed} changes captions, and this store has the text encoders' output for them as they are, which "
                "is used instead of encoding; leave it out, or train on another store, made with text=false"
            )

    def check_preservation(self, preservation: Preservation | None, learned: LearnedToken | None = None) -> None:
        """Check that a :class:`Preservation` finds its words, and its captions can be encoded, with a learned token.

        Raises:
            UsageError: They cannot, or a caption has none of its words.
        """
        if preservation is None:
            return
        if not preservation.is_blank and not self.source_train.needs_encoders:
            raise UsageError(
                "preservation=class encodes captions of the class, and this store has the text encoders' output for "
                "its own captions, so that they are not there; write preservation=blank, whose caption it has too, or "
                "train on another store, made with text=false"
            )
        captions = some_captions(self.source_train, self.images.kept)
        preservation.check(captions, token=None if learned is None else learned.placeholder_token)

    @property
    def needs_encoders(self) -> bool:
        """Whether images or captions are encoded in the run, with the model of :meth:`check_model`."""
        return any(source.needs_encoders for source in self._sources)

    @property
    def num_train_samples(self) -> int:
        """Length of the training source."""
        return len(self.source_train)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the training set, computed on the first call; see ``data/fingerprint.py``."""
        if self._fingerprint is None:
            order = self.batching.signature(self.source_train)
            train, val = self.source_train, self.source_val
            is_part = isinstance(train, SourceSubset) and isinstance(val, SourceSubset) and train.source is val.source
            found = fingerprint(train, order=order, held_out=val if is_part else None)
            self._fingerprint = found | {"settings": vars(self.images)}
        return self._fingerprint

    def change_since(self, saved: Mapping[str, Any]) -> Change | None:
        """Return the change of the training set since the ``saved`` fingerprint; None if unchanged."""
        return change(saved, self.fingerprint(), self.source_train)

    def resume(self, epoch: int, batches_done: int) -> None:
        """Continue ``epoch`` after its first ``batches_done`` global batches; call before the first batch.

        Args:
            epoch: Epoch to continue.
            batches_done: Optimizer steps already taken in it.

        Raises:
            UsageError: The epoch does not have that many batches.
        """
        self._position = epoch, batches_done
        if self.train_sampler is not None:
            self.train_sampler.resume(*self._position)

    def train_dataloader(self) -> EpochLoader:
        """Return the loader over this rank's shard of every global batch."""
        trainer = self._attached()
        world_size, rank = self._data_parallel()
        shuffle = not trainer.overfit_batches  # type: ignore[attr-defined]
        self.check_preservation(self._preservation, getattr(self._module(), "learned_token", None))
        order = self.batching.order(self.source_train, seed=self._module().seed, shuffle=shuffle)
        self.train_sampler = GlobalBatchSampler(
            order, world_size=world_size, rank=rank, accumulate=trainer.accumulate_grad_batches
        )
        if self._position is not None:
            self.train_sampler.resume(*self._position)
        if self.images.num_draws("") and self._module().encoder.offload:
            self._module().encoder.keeps_captions = self._module().encoder.train_text_encoder
        if not self._is_described and trainer.is_global_zero:
            self._is_described = True
            for line in order.described():
                log.info("data: %s", line)
            if self.images.masked_loss != "none":
                masks = (self._num_masks, len(self.source_train.distinct))
                log.info("data: %d of %d images have a mask; of others everything counts", *masks)
            if self.source_train.latents is None or self.images.changed_captions:  # of a store, precompute has told
                truncated = self._module().latent_diffusion.truncated
                tell_of_long_captions(self.source_train, truncated, self.images.written)
            if self.images.num_draws("") and not self._module().encoder.keeps_captions:
                log.warning("data: captions change at random, and each step encodes some: %s", _KEEP)
        dataset = self._dataset(self.source_train, self.images)
        loader = self.loaders.build(dataset, self.train_sampler, trainer)
        source, ahead = self.source_train, -(-self.source_train.fetched_ahead // self.batch_size)
        look_ahead = LookAhead(source.files, source.fetch, num_batches=ahead) if ahead else None
        on_start = self.bad.check_all_ranks
        return EpochLoader(loader, self.train_sampler, on_start=on_start, look_ahead=look_ahead)

    def val_dataloader(self) -> WholeBatchLoader | list[Batch]:
        """Return the loader over this rank's shard of the held-out images, in order and without randomness.

        All ranks get equally many batches, as sharded networks need. With W processes, N % W samples are dropped; with
        buckets none.
        """
        if self.source_val is None:
            # The user chose no validation; Lightning would ask whether that was intended.
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            self.no_caption_gap = _NOT_HELD_OUT
            return []
        dataset = self._dataset(self.source_val, self.images.evaluation(), wrong_captions=True)
        self._check_caption_gap(dataset)
        size = self.loader_options.val_batch_size or self.batch_size
        batches = self.batching.validation(self.source_val, size, *self._data_parallel())
        return WholeBatchLoader(self.loaders.build(dataset, batches, self._attached()))

    def test_dataloader(self) -> WholeBatchLoader | list[Batch]:
        """Return the validation loader: training selects nothing with it."""
        return self.val_dataloader()

    def teardown(self, stage: str) -> None:
        """End what the loaders have started (Lightning calls this at the end of a fit)."""
        self.loaders.close()

    def on_exception(self, exception: BaseException) -> None:
        """End what the loaders have started."""
        self.loaders.close()

    def bottleneck_remedy(self) -> str | None:
        """Return what makes the batches arrive sooner; see ``TunableData``."""
        num_bytes = None
        if self.source_train.latents is None and self.trainer is not None:
            model, side = self._module().latent_diffusion, self.images.resolution
            moments = math.prod(model.latent_space.encoded_shape(side, side))
            num_bytes = len(self.source_train.distinct) * moments * torch.float32.itemsize
        return self.loaders.bottleneck_remedy(self.images, num_bytes)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Remove the bad samples from a batch and count them (Lightning calls this in the main process)."""
        if not (isinstance(batch, dict) and "bad" in batch):
            return batch
        source = self.source_train if self._attached().training else self.source_val
        assert source is not None
        self.bad.count({source.name(index): reason for index, reason in batch.pop("bad")})
        if "index" not in batch:
            raise UsageError(f"data: none of the {len(source)} images can be read: {self.bad.listed()}")
        if self._attached().training:
            self._position = None
            batch.pop("captions", None)  # Lightning would search every string for tensors to move
        return batch

    def _dataset(self, source: Source, images: ImageOptions, *, wrong_captions: bool = False) -> CaptionedImages:
        module = self._module()
        return CaptionedImages(
            source,
            module.latent_diffusion.tokenize,
            options=images,
            seed=module.seed,
            wrong_captions=wrong_captions,
            latents=self._stored(source),
            max_bad=self.bad.limit,
            buckets=self.batching.buckets(source),
            preservation=None if wrong_captions else self._preservation,
            latent_stride=1 if images.masked_loss == "none" else module.latent_diffusion.latent_space.stride,
        )

    def _check_caption_gap(self, dataset: CaptionedImages) -> None:
        """Set ``no_caption_gap``; all ranks decide alike."""
        was = self.no_caption_gap
        is_told = self._attached().strategy.reduce_boolean_decision(dataset.has_wrong_captions)
        self.no_caption_gap = self._why_no_gap(is_told)
        dataset.has_wrong_captions = self.no_caption_gap is None
        if self.no_caption_gap not in (None, was) and self._attached().is_global_zero:
            log.warning("data: the caption gap is not measured: %s", self.no_caption_gap)

    def caption_gap_problem(self, tokenize: Tokenize) -> str | None:
        """Return why a validation will measure no caption gap, before anything is encoded; None if it will."""
        if self.source_val is None:
            return _NOT_HELD_OUT
        dataset = CaptionedImages(self.source_val, tokenize, options=self.images.evaluation(), seed=0)
        return self._why_no_gap(dataset.has_wrong_captions)

    def _why_no_gap(self, captions_differ: bool) -> str | None:
        if self.images.proportion_empty_prompts == 1:
            return "the model is trained without captions (data.proportion_empty_prompts=1)"
        return None if captions_differ else "all held-out captions are the same to the tokenizer"

    def _stored(self, source: Source) -> StoredLatents | None:
        """Return a source's own latents, or with ``cache_latents`` those encoded once; None for images."""
        if not self.cache_latents:
            return source.latents
        trainer, encoder = self._attached(), self._module().encoder
        known = self._tables.get(id(source))
        if known is None or known[0] is not encoder:
            device, num_threads = trainer.strategy.root_device, reading_threads(trainer.num_devices)
            table = encode_source(source, encoder, self.images, device=device, num_threads=num_threads)
            self._tables[id(source)] = known = (encoder, table)
        table = known[1]
        self.bad.count({source.name(index): reason for index, reason in table.bad})
        return table

    def _attached(self) -> Trainer:
        """Return the attached trainer; raise ``UsageError`` without one."""
        if self.trainer is None:
            raise UsageError("SDDataModule got no trainer; its loaders exist inside trainer.fit(module, datamodule)")
        return self.trainer

    @property
    def _preservation(self) -> Preservation | None:
        return getattr(self._module(), "preservation", None)  # users' own modules need not have one

    def _module(self) -> TrainedModule:
        module = self._attached().lightning_module
        if not isinstance(module, TrainedModule):
            raise UsageError(
                f"SDDataModule got a {type(module).__name__} to train; expected an SDLightningModule, whose seed, "
                "tokenizer and encoder it uses; pass one to trainer.fit"
            )
        return module

    def _data_parallel(self) -> tuple[int, int]:
        """Return the number of data-parallel processes and the rank of this one."""
        parallel = self._attached().distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return parallel["num_replicas"], parallel["rank"]
