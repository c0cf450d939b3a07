"""Check a DreamBooth run without starting it, and predict it: ``python -m sd_lightning.ui.check [key=value …]``.

Settings and messages are those of ``sd_lightning.dreambooth``. The last line is the prediction, as JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning import _conf, dreambooth
from sd_lightning._errors import UsageError
from sd_lightning.apps.dreambooth import check_base, predict_memory, subject_run
from sd_lightning.apps.planning import predict_step
from sd_lightning.apps.preflight import preflight
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.planner.forecast import GB

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(cfg: DictConfig) -> int:
    """Print memory, seconds and dollars as far as they can be predicted, and why others cannot."""
    spec = preflight(subject_run(RunSpec.of(cfg)))
    check_base(spec)
    if not spec.left_to_planner():
        spec.model.check(spec.trained_text)
    spec.build("data", class_prompts=None)
    told: dict[str, Any] = {}
    notes = told["notes"] = ["without the time to draw pictures of the class, once"] * bool(spec["data.class_prompts"])
    memory = None if spec.left_to_planner() else predict_memory(spec)
    if memory is None:
        notes.append("memory and time: not predicted, as the run measures, or learns a new word")
    else:
        told |= {"device_gb": memory.device / GB, "host_gb": memory.host / GB}
        if spec.cuda_devices and memory.device > torch.cuda.get_device_properties(0).total_memory:
            notes.append("this is more than the card has: choose another preset, or a smaller resolution")
        try:
            step, price = predict_step(spec)
            told["seconds"] = step * spec["trainer.max_steps"]
            told["dollars"] = price and price * spec.num_processes * told["seconds"] / 3600
        except UsageError as error:
            notes.append(f"time: {error}")
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    _conf.main(replace(dreambooth.PROGRAM, task="sd_lightning.ui.check.run"))
