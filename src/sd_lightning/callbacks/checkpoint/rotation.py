"""Which steps are saved amid losses that are not finite, and which checkpoints stay on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sd_lightning.storage import checkpoint


@dataclass
class Rotation:
    """Keep the newest checkpoints, and the last one from before bad losses until the run has gone well again."""

    newest: Path | None = None
    """What was saved last, or restored."""
    due: int | None = None
    """Step whose checkpoint was not saved because of the loss, and is still owed."""
    _loss_is_bad: bool = False
    """Whether there was a loss that is not finite since the newest checkpoint."""
    _before: Path | None = None
    """The last checkpoint from before such losses, for as long as it is kept."""

    def after_step(self, num_bad_steps: int) -> bool:
        """Note how many steps in a row were bad, and return whether an owed checkpoint can be saved now."""
        self._loss_is_bad |= num_bad_steps > 0
        if self._loss_is_bad and self._before is None:
            self._before = self.newest
        return self.due is not None and not num_bad_steps

    def put_off(self, step: int) -> None:
        """Owe the checkpoint of a step whose loss is not finite."""
        self.due, self._loss_is_bad = step, True

    def saved(self, path: Path) -> None:
        """Note a new checkpoint."""
        if not self._loss_is_bad:
            self._before = None
        self.newest, self.due, self._loss_is_bad = path, None, False

    def prune(self, run_dir: Path, keep: int) -> None:
        """Delete all but the newest ``keep`` checkpoints, and the one from before bad losses."""
        checkpoint.prune(run_dir, keep, trusted=self.newest, also=self._before)
