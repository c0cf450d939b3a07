"""The private parts of Lightning that callbacks use are there: a release that changes one fails here, by its name."""

import lightning.pytorch as pl
import pytest

from sd_lightning.callbacks import lightning_loops
from sd_lightning.callbacks.lightning_loops import FETCH, SIGTERM_BROADCAST


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


def test_the_loop_has_what_signals_and_loggers_need(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop
    assert SIGTERM_BROADCAST in vars(type(loop)), "no longer asks before every batch"
    assert vars(trainer._signal_connector)["received_sigterm"] is trainer.received_sigterm is False
    assert loop._batches_that_stepped == 0 and type(loop).__name__ in FETCH


def test_signals_are_taken_over_and_given_back(trainer: pl.Trainer) -> None:
    trainer._signal_connector.received_sigterm = True
    assert lightning_loops.take_over_sigterm(trainer) and not trainer.received_sigterm
    assert SIGTERM_BROADCAST in vars(trainer.fit_loop.epoch_loop)
    lightning_loops.give_back_sigterm(trainer)
    assert SIGTERM_BROADCAST not in vars(trainer.fit_loop.epoch_loop)


def test_a_position_sets_counters_that_the_loop_has(trainer: pl.Trainer) -> None:
    known = trainer.fit_loop.state_dict()
    lightning_loops.set_position(trainer, epoch=2, steps_in_epoch=3, optimizer_steps=13)
    assert trainer.fit_loop.state_dict().keys() == known.keys()
    assert (trainer.global_step, trainer.current_epoch) == (13, 2)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert (progress.current.ready, progress.total.ready) == (3, 13)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 13
