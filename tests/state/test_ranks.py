"""What ranks tell each other, and how all of them fail when one does; other ranks' parts are stood in for."""

from typing import Any

import pytest

from sd_lightning import UsageError
from sd_lightning.state import ranks
from sd_lightning.state.ranks import failing_together, of_all_ranks, on_rank_zero


def others(monkeypatch: pytest.MonkeyPatch, *values: Any) -> None:
    """Let this be rank 1 of two, and rank 0 answer with these values, one after another."""
    answers = iter(values)
    monkeypatch.setattr(ranks, "rank_and_world_size", lambda: (1, 2))
    monkeypatch.setattr(ranks, "gathered", lambda value: [next(answers), value])


def test_alone_a_rank_raises_its_own_error_and_has_only_its_own_entries() -> None:
    with pytest.raises(KeyError, match="mine"), failing_together():
        raise KeyError("mine")
    assert of_all_ranks({"a": 1}) == {"a": 1} and on_rank_zero(lambda: 3) == 3


def test_the_error_of_another_rank_is_raised_here_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, "no space left", "no space left")
    with pytest.raises(UsageError, match="^rank 0: no space left$"), failing_together():
        pass
    with pytest.raises(KeyError, match="mine"), failing_together():
        raise KeyError("mine")


def test_rank_zero_works_for_all_and_its_file_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> None:
        raise OSError("disk is gone")

    with pytest.raises(UsageError, match="^disk is gone$"):
        on_rank_zero(unreadable)
    others(monkeypatch, None, "what it found")
    assert on_rank_zero(unreadable) == "what it found"
