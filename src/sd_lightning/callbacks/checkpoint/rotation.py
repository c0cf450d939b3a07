"""Postponing of checkpoints while the loss is not finite, and deletion of old ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sd_lightning.storage import checkpoint


@dataclass
class Rotation:
    """Checkpoints to keep: the newest, and the last one before non-finite losses.

    The latter is kept until all losses from one checkpoint to the next are finite.
    """

    newest: Path | None = None
    """The checkpoint that was saved last, or restored."""
    due: int | None = None
    """Step of a postponed checkpoint, which is saved after the next finite loss."""
    _loss_is_bad: bool = False
    """Whether any loss since the newest checkpoint was not finite."""
    _before: Path | None = None
    """The last checkpoint before such losses, while it is kept."""

    def after_step(self, num_bad_steps: int) -> bool:
        """Record the number of bad steps in a row, and return whether a postponed checkpoint can be saved now."""
        self._loss_is_bad |= num_bad_steps > 0
        if self._loss_is_bad and self._before is None:
            self._before = self.newest
        return self.due is not None and not num_bad_steps

    def put_off(self, step: int) -> None:
        """Postpone the checkpoint of a step whose loss is not finite."""
        self.due, self._loss_is_bad = step, True

    def saved(self, path: Path) -> None:
        """Record a new checkpoint."""
        if not self._loss_is_bad:
            self._before = None
        self.newest, self.due, self._loss_is_bad = path, None, False

    def prune(self, run_dir: Path, keep: int) -> None:
        """Delete all checkpoints except the newest ``keep`` and the last one before non-finite losses."""
        checkpoint.prune(run_dir, keep, trusted=self.newest, also=self._before)
