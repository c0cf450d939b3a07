"""What the datamodule, the callbacks and the trained module ask of each other.

``SDDataModule`` satisfies all three protocols of data. Our callbacks work with other datamodules, too:
``PortableCheckpoint`` needs ``ResumableData``; without ``ComparableData`` it does not look for changed samples on
resume, without ``CountedData`` it saves no bad samples. The other callbacks need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.data.fingerprint import Change, Fingerprint
    from sd_lightning.data.sampler import GlobalBatchSampler
    from sd_lightning.models.encoder import LatentEncoder
    from sd_lightning.models.latent_diffusion import LatentDiffusion


@runtime_checkable
class ResumableData(Protocol):
    """Data that say where a run stands, and go on from there."""

    batch_size: int
    """Samples per optimizer step, over all processes."""
    train_sampler: GlobalBatchSampler | None
    """The sampler of the training loader, once there is one."""

    def resume(self, epoch: int, batches_done: int) -> None:
        """Continue ``epoch`` after its first ``batches_done`` global batches; called before the first batch."""


def global_batch_size(trainer: pl.Trainer) -> int | None:
    """Return samples per optimizer step over all processes, if the trainer's data tell.

    A ``batch_size`` of other datamodules is not read: in most of them it is that of one process.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.batch_size if isinstance(data, ResumableData) else None


@runtime_checkable
class ComparableData(Protocol):
    """Data that tell whether they have changed between a checkpoint and its resume."""

    changed: str
    """"accept": a run may be resumed in the middle of an epoch that holds other samples by now."""

    def fingerprint(self) -> Fingerprint:
        """Return what the training set is, for a checkpoint."""

    def change_since(self, saved: Mapping[str, Any]) -> Change | None:
        """Return how the training set has changed since a fingerprint was taken, if it has."""


@runtime_checkable
class CountedData(Protocol):
    """Data that count the samples which cannot be used."""

    def gather_bad_samples(self) -> dict[str, str]:
        """Return the bad samples that any rank has met, and why they are bad; a collective call."""

    def still_bad(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Return which bad samples of an earlier start are still there and cannot be used yet."""

    def recall_bad(self, bad: Mapping[str, str]) -> None:
        """Count bad samples of earlier starts; raise ``UsageError`` if they are too many with those of this start."""


@runtime_checkable
class TrainedModule(Protocol):
    """What ``SDDataModule`` asks of the module that is trained on its batches."""

    seed: int
    """Seed of all randomness in the data."""
    latent_diffusion: LatentDiffusion
    """Turns captions into token ids."""
    encoder: LatentEncoder
    """Encodes images once, for ``cache_latents``."""
