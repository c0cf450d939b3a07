"""The sides of `online_encoders`: turns, encoders that wait, and what the figures become."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import run

case = run.load_case("online_encoders")
turns = sys.modules["encoder_turns"]


def test_a_block_is_timed_behind_the_steps_that_empty_the_queue() -> None:
    clock, answers, requests = [0.0], [], [True, False]
    trainer: Any = SimpleNamespace(should_stop=False)
    callback = turns.Turns(lambda: requests.pop(0), answers.append, steps=3, first=2, now=lambda: clock[0])
    while not trainer.should_stop:
        clock[0] += 1.0 if len(answers) == 0 else 2.0
        callback.on_train_batch_end(trainer, None, None, None, 0)
        if len(answers) == 1 and clock[0] == 5.0:
            clock[0] += 100.0  # it waited for its turn
    assert answers == [3.0, 6.0] and requests == []


def test_a_waiting_encoder_waits_and_makes_what_the_real_one_makes(tmp_path: Path) -> None:
    from sd_lightning import LatentDiffusion
    from sd_lightning.models.encoder import LatentEncoder

    model, file = LatentDiffusion.build("tiny"), tmp_path / "seconds"
    file.write_text("0")
    real = LatentEncoder(model)
    waiting = turns.WaitingEncoder.of(real, file, torch.zeros(1, 3, 32, 32), model.tokenize([""]))
    pixels, ids = torch.rand(3, 3, 32, 32), model.tokenize(["one", "two", "three"])
    file.write_text("0.2")
    begin = time.perf_counter()
    moments = waiting.encode_moments(pixels)
    assert time.perf_counter() - begin >= 0.18
    assert moments.shape == real.encode_moments(pixels).shape
    (name,) = ids
    made, expected = waiting.embed(ids), real.embed(ids)
    assert {key: each.shape for key, each in made.items()} == {key: each.shape for key, each in expected.items()}
    file.write_text("0.4")
    begin = time.perf_counter()
    waiting.encode_moments(pixels)
    assert time.perf_counter() - begin >= 0.36, "the file may change while it runs"


def test_encoders_are_held_against_the_least_of_trainer_and_encoders() -> None:
    taken = {"offline": [9.0, 10.0, 11.0], "on_the_fly": [6.0, 5.0, 5.5], "ray_1": [3.0, 4.0, 5.5]}
    taken |= {"waiting_1": [3.9, 3.8, 4.0], "waiting_2": [7.0, 7.2, 7.6], "waiting_4": [9.9, 10.4, 11.0]}
    found = case.summarize(taken, encoder=4.0)
    assert found["offline_gain"] == [1.5, 2.0, 2.0] and found["ray_gain"] == [0.5, 0.8, 1.0]
    assert found["waiting_1_off_by"] == pytest.approx(0.025) and found["waiting_2_off_by"] == pytest.approx(0.1)
    assert found["waiting_4_to_least"] == pytest.approx([1.1, 1.04, 1.0]) and found[
        "waiting_4_off_by"
    ] == pytest.approx(0.04)
    assert (found["published_256"], found["published_512"]) == (1.45, 1.26)
    assert found.keys() >= case.BARS.keys()


def test_the_sides_differ_in_where_they_encode_alone(tmp_path: Path) -> None:
    own = {side: set(turns.overrides(side, tmp_path)) for side in case.SIDES}
    assert "data.num_encoders=4" in own["waiting_4"] and "data.encoders=ray" in own["ray_1"]
    assert f"data.store={tmp_path / 'store'}" in own["offline"] and "data.encoders=ray" not in own["on_the_fly"]
    assert [turns.encoders_of(side) for side in case.SIDES] == [0, 0, 1, 1, 2, 4]


@pytest.mark.slow
def test_a_side_trains_a_block_whenever_asked_and_one_that_ends_is_told(tmp_path: Path) -> None:
    side = case.Side("on_the_fly", tmp_path, 2)
    bad = case.Side("elsewhere", tmp_path, 2)
    assert side.result() > 0 and side.block() > 0
    side.close()
    assert side.process.returncode == 0
    with pytest.raises(SystemExit, match=r"(?s)online_encoders: elsewhere has ended:.*data.encoders"):
        bad.result()
    bad.close()
