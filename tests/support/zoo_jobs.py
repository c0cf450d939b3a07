"""Trains modules of the zoo under many strategies and compares each with DDP; jobs for :mod:`ranks`.

A job is ``{"case": …, "strategies": […], "devices": …}``. What a rank found, by strategy: ``"equal"``,
``"refused: <message>"``, ``"different: <where>"``, or ``"raw <error>"`` with the message that a user would see.
"""

from __future__ import annotations

import math
import traceback
import warnings
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from sd_lightning import UsageError
from strategy_table import strategy_of
from zoo_table import CASES, EPOCHS

TOLERANCE = 1e-5
RELATIVE = 1e-5
TELLING = ("FSDPStrategy", "DeepSpeedStrategy", "GeminiStrategy")
"""How a message of ours begins."""


class Losses(Callback):
    """The mean loss of every step over all ranks, where the module tells it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        if not outputs:  # optimized by hand
            return
        loss: Tensor = outputs["loss"].detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.values.append(float(loss))


def train(name: str, strategy: str, devices: int) -> dict[str, Any]:
    """Fit a module, and return all that can be seen of it."""
    warnings.filterwarnings("ignore")
    case, losses = CASES[name], Losses()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    options |= {"enable_progress_bar": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": devices}
    trainer = pl.Trainer(
        strategy=strategy_of(strategy),
        max_epochs=EPOCHS,
        callbacks=[losses, *case.callbacks()],
        **options | case.trainer,
    )
    module: Any = case.module()
    trainer.fit(module)
    found = {"loss": losses.values, "val": [float(trainer.callback_metrics["val"])], "seen": module.seen}
    for kind, named in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
        found |= {f"{kind} {key}": value.detach().double().flatten().tolist() for key, value in named}
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Name the first thing that differs from the reference, or return None."""
    if ours.keys() != theirs.keys():
        return f"other names: {sorted(ours.keys() ^ theirs.keys())}"
    for key, expected in theirs.items():
        if len(ours[key]) != len(expected):
            return f"{key}: {len(ours[key])} values, expected {len(expected)}"
        for place, (a, b) in enumerate(zip(ours[key], expected)):
            if not math.isfinite(b):
                return f"{key}[{place}]: the reference is {b}"
            if not abs(a - b) <= TOLERANCE + RELATIVE * abs(b):
                return f"{key}[{place}]: {a:.7g}, expected {b:.7g}"
    return None


def outcome(name: str, strategy: str, devices: int, reference: dict[str, Any]) -> str:
    """Train as another strategy does, and compare."""
    try:
        found = train(name, strategy, devices)
    except (UsageError, MisconfigurationException) as error:
        return f"refused: {error}"
    except Exception as error:
        if str(error).startswith(TELLING) or "/lightning/" in traceback.extract_tb(error.__traceback__)[-1].filename:
            return f"refused: {error}"  # torch's, with our remedy, or Lightning's
        print(traceback.format_exc(), flush=True)
        return f"raw {type(error).__name__}: {error}"[:1000]
    different = difference(found, reference)
    return "equal" if different is None else f"different: {different}"


def run(job: dict[str, Any]) -> dict[str, str]:
    """Do a job."""
    name, devices = job["case"], job["devices"]
    reference = train(name, "ddp_unused" if CASES[name].unused else "ddp", devices)
    return {strategy: outcome(name, strategy, devices, reference) for strategy in job["strategies"]}
