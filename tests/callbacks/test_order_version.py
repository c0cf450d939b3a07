"""A checkpoint records the version of the order of its epochs: a position in another order is none in ours."""

from pathlib import Path
from typing import Any

import pytest

import small_training as small
from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint import trainer_state


@pytest.mark.parametrize("version", [1, 9])
def test_a_checkpoint_of_another_order_is_refused(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(path: Path) -> dict[str, Any]:
        saved = read(path)
        saved["position"]["order_version"] = version
        return saved

    path, read = small.train(tmp_path / "run", 1), trainer_state.read_trainer_state
    monkeypatch.setattr(trainer_state, "read_trainer_state", of_another)
    with pytest.raises(UsageError, match=f"order version {version}; expected 2; install the release that saved it, or"):
        small.train(tmp_path / "again", 2, resume=path)


@pytest.mark.parametrize(("version", "remedy"), [(1, "start from its pipeline with init_from="), (3, "update sd-")])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, version: int, remedy: str) -> None:
    (tmp_path / "trainer.json").write_text(f'{{"format": {version}}}')
    with pytest.raises(UsageError, match=f"checkpoint format {version}; expected 2; {remedy}"):
        trainer_state.read_trainer_state(tmp_path)
