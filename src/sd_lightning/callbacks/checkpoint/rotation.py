"""Postponing of checkpoints while the loss is not finite, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sd_lightning.callbacks.guards import BadSteps


@dataclass
class Rotation:
    """Checkpoints to keep: the newest, and the last one before non-finite losses.

    The latter is kept until all losses from one checkpoint to the next are finite.
    """

    newest: Path | None = None
    """The checkpoint that was saved last, or restored."""
    due: int | None = None
    """Step of a postponed checkpoint, which is saved after the next finite loss."""
    before: Path | None = None
    """The last checkpoint before non-finite losses, while it is kept."""
    _loss_is_bad: bool = False
    """Whether any loss since the newest checkpoint was not finite."""
    _total_bad: int = 0
    """Number of bad steps of the fit when last told."""

    def after_step(self, bad: BadSteps) -> bool:
        """Record the bad steps so far, and return whether a postponed checkpoint can be saved now."""
        self._loss_is_bad |= bad.total > self._total_bad
        self._total_bad = bad.total
        if self._loss_is_bad and self.before is None:
            self.before = self.newest
        return self.due is not None and not bad.in_a_row

    def put_off(self, step: int) -> None:
        """Postpone the checkpoint of a step whose loss is not finite."""
        self.due, self._loss_is_bad = step, True

    def saved(self, path: Path) -> None:
        """Record a new checkpoint."""
        if not self._loss_is_bad:
            self.before = None
        self.newest, self.due, self._loss_is_bad = path, None, False
