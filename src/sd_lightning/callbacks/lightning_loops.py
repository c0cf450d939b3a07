"""What our callbacks reach inside Lightning, which has no public way to it.

All private names of Lightning that callbacks use are here; ``tests/callbacks/test_lightning_loops.py`` names the one
that a release has changed.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
"""Name under which Lightning profiles the fetch of a training batch."""
SIGTERM_BROADCAST = "_broadcast_sigterm_tensor"
"""Method of Lightning's loop: before every batch it asks all processes for its own signal, waiting for the devices."""


def take_over_sigterm(trainer: Trainer) -> bool:
    """Leave a fit's signals to a callback; return whether one has come during the data's preparation."""
    vars(trainer.fit_loop.epoch_loop)[SIGTERM_BROADCAST] = lambda: None
    has_come = trainer.received_sigterm  # Lightning would exit without a checkpoint
    trainer._signal_connector.received_sigterm = False
    return has_come


def give_back_sigterm(trainer: Trainer) -> None:
    """Leave signals to Lightning again."""
    vars(trainer.fit_loop.epoch_loop).pop(SIGTERM_BROADCAST, None)


def set_logged_step(trainer: Trainer) -> None:
    """Let loggers count the optimizer's steps.

    On resume, Lightning skips a validation that was due at the checkpoint, but counts a logger step for it.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def set_position(trainer: Trainer, epoch: int, steps_in_epoch: int, optimizer_steps: int) -> None:
    """Set the counters of Lightning's loops, for this run's accumulation."""
    batches, total = (steps * trainer.accumulate_grad_batches for steps in (steps_in_epoch, optimizer_steps))
    # Lightning counts an epoch as started in its middle, but not at its beginning.
    started = epoch + (1 if steps_in_epoch else 0)
    epochs = {"ready": started, "started": started, "processed": epoch, "completed": epoch}
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    state["epoch_progress"] = dict.fromkeys(("total", "current"), epochs)
    state["epoch_loop.batch_progress"] = {
        "total": dict.fromkeys(("ready", "started", "processed", "completed"), total),
        "current": dict.fromkeys(("ready", "started", "processed", "completed"), batches),
        "is_last_batch": False,
    }
    steps = {"total": optimizer_steps, "current": steps_in_epoch}
    state["epoch_loop.automatic_optimization.optim_progress"] = {
        "optimizer": {
            "step": {scope: {"ready": n, "completed": n} for scope, n in steps.items()},
            "zero_grad": {scope: {"ready": n, "started": n, "completed": n} for scope, n in steps.items()},
        }
    }
    state["epoch_loop.scheduler_progress"] = {scope: {"ready": n, "completed": n} for scope, n in steps.items()}
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": optimizer_steps}
    trainer.fit_loop.load_state_dict(state)
