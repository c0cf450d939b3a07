"""Protocols between the datamodule, the callbacks and the trained module.

``SDDataModule`` implements all four data protocols. Our callbacks also work with other datamodules:
``PortableCheckpoint`` needs ``ResumableData``. Without ``ComparableData`` it does not look for changed samples on
resume; without ``CountedData`` it saves no bad samples. ``TrainingProgress`` names the remedy of ``TunableData``. The
other callbacks need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.data.batch import BadSamples
    from sd_lightning.data.fingerprint import Change, Fingerprint
    from sd_lightning.data.sampler import GlobalBatchSampler
    from sd_lightning.models.encoder import LatentEncoder
    from sd_lightning.models.latent_diffusion import LatentDiffusion


@runtime_checkable
class ResumableData(Protocol):
    """Data that can resume at a position within an epoch."""

    batch_size: int
    """Samples per optimizer step, over all processes."""
    train_sampler: GlobalBatchSampler | None
    """Sampler of the training loader; None before the loader is built."""

    def resume(self, epoch: int, batches_done: int) -> None:
        """Continue ``epoch`` after its first ``batches_done`` global batches.

        Called before the first batch.
        """


def global_batch_size(trainer: pl.Trainer) -> int | None:
    """Return the samples per optimizer step over all processes; None if the data are not ``ResumableData``.

    The ``batch_size`` of other datamodules is not read: in most of them it is the batch of one process.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.batch_size if isinstance(data, ResumableData) else None


@runtime_checkable
class ComparableData(Protocol):
    """Data that detect changes between a checkpoint and its resume."""

    changed: str
    """Whether a run may resume within an epoch whose samples have changed: "accept" or "refuse"."""

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the training set, for a checkpoint."""

    def change_since(self, saved: Mapping[str, Any]) -> Change | None:
        """Return the change of the training set since the ``saved`` fingerprint; None if unchanged."""


@runtime_checkable
class CountedData(Protocol):
    """Data that count their bad samples."""

    bad: BadSamples
    """Those that are known, with a limit on their number."""


@runtime_checkable
class TunableData(Protocol):
    """Data that know what makes them arrive sooner."""

    def bottleneck_remedy(self) -> str | None:
        """Return what to change, such as "data.num_workers=4", or the command to run first; None if nothing is left."""


@runtime_checkable
class TrainedModule(Protocol):
    """Attributes that ``SDDataModule`` needs of the module trained on its batches."""

    seed: int
    """Seed of all randomness in the data."""
    latent_diffusion: LatentDiffusion
    """Turns captions into token ids."""
    encoder: LatentEncoder
    """Encodes images once, for ``cache_latents``."""
