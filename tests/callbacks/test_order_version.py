"""A checkpoint records the version of the order of its epoch: a resumed run ends the epoch in it, and no other."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import small_training as small
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import EMA
from sd_lightning.callbacks.checkpoint import trainer_state
from sd_lightning.data.order import EpochOrder
from sd_lightning.storage.checkpoint import checkpoint_path

SEED, NUM, BATCH = 3, 43, small.BATCH_SIZE


class _Seen(Callback):
    """The samples of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((int(batch["epoch"][0]), batch["index"].tolist()))


def samples(epoch: int, number: int, version: int) -> tuple[int, list[int]]:
    positions = torch.arange(number * BATCH, (number + 1) * BATCH).numpy()
    return epoch, EpochOrder(NUM, seed=SEED, epoch=epoch, version=version).at(positions).tolist()


def test_a_run_of_an_earlier_release_ends_its_epoch_in_the_order_it_began_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.train(tmp_path / "run", 2)

    def of_before(path: Path) -> dict[str, Any]:
        saved = read(path)
        if path == start:
            saved["position"]["order_version"] = 1
        return saved

    read, start = trainer_state.read_trainer_state, checkpoint_path(tmp_path / "run", 2)
    monkeypatch.setattr(trainer_state, "read_trainer_state", of_before)
    seen = _Seen()
    saving = small.Saving(tmp_path / "run", (3, 5), resume=start)
    small.fit(small.module(), small.data(), 7, EMA(0.9), saving, seen)
    assert seen.steps == [*(samples(0, g, 1) for g in (2, 3, 4)), *(samples(1, g, 2) for g in (0, 1))]
    states = {step: small.trainer_state(checkpoint_path(tmp_path / "run", step)) for step in (3, 5, 7)}
    assert {step: state["position"]["order_version"] for step, state in states.items()} == {3: 1, 5: 2, 7: 2}
    assert {state["format"] for state in states.values()} == {2}
    again = _Seen()
    saving = small.Saving(tmp_path / "again", resume=checkpoint_path(tmp_path / "run", 3))
    small.fit(small.module(), small.data(), 6, EMA(0.9), saving, again)
    assert again.steps == seen.steps[1:4]


def test_a_checkpoint_of_a_later_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_later(path: Path) -> dict[str, Any]:
        saved = read(path)
        saved["position"]["order_version"] = 9
        return saved

    (tmp_path / "trainer.json").write_text('{"format": 3}')
    with pytest.raises(UsageError, match="checkpoint format 3; expected 2; update sd-lightning"):
        trainer_state.read_trainer_state(tmp_path)
    path, read = small.train(tmp_path / "run", 1), trainer_state.read_trainer_state
    monkeypatch.setattr(trainer_state, "read_trainer_state", of_later)
    with pytest.raises(UsageError, match="order version 9; expected 1 to 2; update sd-lightning, or start a new run"):
        small.train(tmp_path / "again", 2, resume=path)
