"""Forecasts of a run that preserves predictions: twice the samples in the trained pass, and a pass without adapters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import small_training
from composing import Compose
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.apps.planning import run_of
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.data.preservation import Preservation
from sd_lightning.models.lora import Lora
from sd_lightning.planner.passes import encoding_traces, training_pass
from sd_lightning.planner.run import TrainingRun

RUN = TrainingRun(2, 32, "32-true", lora=Lora(rank=2), encodes=False)


@pytest.mark.parametrize(("architecture", "texts"), [("tiny", True), ("tiny_klein", False), ("tiny_z_image", False)])
def test_a_step_takes_the_memory_of_twice_the_samples_and_the_work_of_seven_thirds(
    architecture: str, texts: bool
) -> None:
    model = LatentDiffusion.build(architecture, device="meta")
    run = replace(RUN, train_text_encoder=texts)
    plain, kept = (training_pass(model, replace(run, preserves=each), torch.float32, None) for each in (False, True))
    for size in (2, 6):
        assert kept.peak(size) == pytest.approx(plain.peak(2 * size), rel=0.05)
        flops = [int(trace.flops.at(size).sum()) for trace in (plain, kept)]
        backward = [int(trace.flops.at(size)[trace.is_backward].sum()) for trace in (plain, kept)]
        assert backward[1] == pytest.approx(2 * backward[0], rel=0.01)
        forward = [total - part for total, part in zip(flops, backward)]
        assert 2.6 < forward[1] / forward[0] < 3, "without adapters a pass is a little cheaper"


def test_captions_are_encoded_twice_and_a_run_tells_the_planner(compose: Compose) -> None:
    model = LatentDiffusion.build("tiny", device="meta")
    assert len(encoding_traces(model, replace(RUN, preserves=True), 2)) == len(encoding_traces(model, RUN, 2)) + 1
    words: Any = ("trainable=lora", "preservation=blank")
    assert run_of(RunSpec.of(compose("plan", *words, "data.batch_size=4")), model, 1).preserves
    assert run_of(RunSpec.of(compose("train", *words)), model, 1).preserves
    assert not run_of(RunSpec.of(compose("train", "trainable=lora")), model, 1).preserves
    with pytest.raises(UsageError, match="preservation needs adapters, .* write trainable=lora"):
        run_of(RunSpec.of(compose("plan", "preservation=blank")), model, 1)
    module = small_training.module(lora=Lora(rank=2), preservation=Preservation(prompts=[""]))
    trainer: Any = small_training.trainer_of(1)
    trainer.datamodule = small_training.data()
    assert module.run_settings(trainer)["preserves"]
