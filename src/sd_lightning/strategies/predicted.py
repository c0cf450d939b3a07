"""The settings of a run that the planner reads; and what it predicts for a LightningModule that it does not know.

Modules other than ours need an ``example_input_array``, whose first dimension is the batch of one process. Its step is
traced on the meta device, where tensors have shapes but no values, in two ways: ``training_step`` with the example as
the batch, and ``forward`` with the sum of its outputs as the loss. Of those that work, the one with more arithmetic
counts. The optimizer is what ``configure_optimizers`` builds for a stand-in of the module, whose weights have one
element each but the module's trainer; it is AdamW if that fails, or if there are several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from sd_lightning._errors import UsageError
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.footprint import OptimizerFactory
from sd_lightning.planner.run import TakesMemory, TrainingRun
from sd_lightning.planner.subject import ModuleSubject, Subject, stand_in
from sd_lightning.strategies.networks import blocks_of, configured_optimizers, trained_networks


def training_run(
    batch_size: int, *, world_size: int, accumulate: int, callbacks: Iterable[Callback] = (), **settings: Any
) -> TrainingRun:
    """Return the settings of a run that its memory and time depend on: of every program, and for ``AutoStrategy``.

    Args:
        batch_size: Samples per step of all processes; the largest of their parts counts.
        world_size: Number of processes.
        accumulate: Forward passes per step.
        callbacks: Of the trainer; ours that take memory count, and Lightning's averages.
        **settings: The other fields of :class:`TrainingRun`.
    """
    size = -(-batch_size // (world_size * accumulate))
    run = TrainingRun(size, world_size=world_size, accumulate=accumulate, **settings)
    for callback in callbacks:
        if isinstance(callback, TakesMemory):
            run = callback.add_memory(run)
        elif isinstance(callback, WeightAveraging):
            run = replace(run, averages=True)
    return run


@runtime_checkable
class PlannedModule(Protocol):
    """A LightningModule whose step is predicted without a trace of its own."""

    latent_diffusion: LatentDiffusion

    def run_settings(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the arguments of :func:`training_run` that module and data know: ``batch_size``, ``resolution``, …"""


@dataclass(frozen=True)
class Predicted:
    """What a strategy is chosen for."""

    subject: LatentDiffusion | Subject
    run: TrainingRun
    how: str
    """For the log: how the step is traced, and what is assumed."""
    checked: pl.LightningModule
    """A module whose optimizers can be configured before the run begins."""


def predicted(trainer: Any, module: pl.LightningModule, run: TrainingRun | None) -> Predicted:
    """Return what is predicted for a module.

    Args:
        trainer: Whose data and callbacks count.
        module: The module; it is not changed.
        run: Settings in place of those of module and data; for an ``SDLightningModule`` only.

    Raises:
        UsageError: Settings are given for another module; or it has no example inputs, or cannot be traced with them.
    """
    processes, accumulate, how = trainer.world_size, trainer.accumulate_grad_batches, ""
    subject: LatentDiffusion | Subject
    checked = module
    if isinstance(module, PlannedModule):
        subject = module.latent_diffusion
        if run is None:
            settings = module.run_settings(trainer)
        else:
            settings = {**vars(run), "batch_size": run.batch_size * processes * accumulate}
    elif run is None:
        subject, checked = _traced(module), _stand_in(module)
        batch_size = _batch_size(module) * processes * accumulate
        settings = {"batch_size": batch_size, "resolution": 0, "encodes": False, "from_files": False}
        how = f" (traced {subject.how})"
    else:
        raise UsageError(
            f"AutoStrategy got run= for {type(module).__name__}; expected it for an SDLightningModule only: the batch "
            "of other modules is that of their example_input_array, and the rest the trainer's and the module's; leave "
            "run= out"
        )
    optimizer = _optimizer_of(checked)
    if optimizer is not None:
        settings["optimizer"] = optimizer
    elif how:
        how = f"{how[:-1]}, AdamW assumed)"
    settings |= {"world_size": processes, "accumulate": accumulate, "precision": trainer.precision}
    return Predicted(subject, training_run(**settings, callbacks=trainer.callbacks), how, checked)


def _traced(module: pl.LightningModule) -> ModuleSubject:
    if module.example_input_array is None:
        raise UsageError(
            f"AutoStrategy got {type(module).__name__} without example_input_array; expected a tensor, or a tuple or "
            "dictionary of forward's arguments, whose first dimension is the batch of one process; set it in __init__"
        )
    networks = trained_networks(module)
    steps = {"training_step": _training_step, "forward": _forward}
    if not networks and is_overridden("configure_model", module):
        raise UsageError(
            f"AutoStrategy got {type(module).__name__}, whose layers are made in configure_model, after a strategy is "
            "chosen; expected layers to trace a step with; make them in __init__, or choose a strategy yourself"
        )
    return ModuleSubject(module, module.example_input_array, list(networks), blocks_of(module, networks), steps)


def _batch_size(module: pl.LightningModule) -> int:
    """Return the first dimension of the example inputs."""
    leaves = tree_leaves(module.example_input_array)
    sizes = [len(each) for each in leaves if isinstance(each, Tensor) and each.dim()]
    if not sizes:
        raise UsageError(
            f"AutoStrategy got {type(module).__name__}.example_input_array="
            f"{type(module.example_input_array).__name__} without a tensor "
            "that has a batch; expected the arguments of forward"
        )
    return sizes[0]


def _training_step(module: Any, inputs: Any) -> Any:
    module.log = module.log_dict = _nothing
    return module.training_step(inputs, 0)


def _forward(module: Any, inputs: Any) -> Any:
    """Call a module as Lightning's summary does."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def _nothing(*_: Any, **__: Any) -> None:
    """Return nothing."""


def _stand_in(module: pl.LightningModule) -> pl.LightningModule:
    """Return a copy with weights of one element; it configures no optimizer if the module cannot before the run."""
    made: Any = stand_in(module, lambda tensor: torch.zeros([1] * tensor.dim(), dtype=tensor.dtype))
    made._trainer = _BeforeData(module.trainer)
    try:
        configured_optimizers(made)
    except Exception:  # of the user's code, which may need the trainer; the log tells that AdamW is assumed
        made.configure_optimizers = _nothing
    return made


class _BeforeData:
    """A trainer whose data are not set up for a number of steps: Lightning would lose the state of a loader then."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name == "estimated_stepping_batches":
            raise ValueError("estimated_stepping_batches is known when the run begins")
        return getattr(self._trainer, name)


def _optimizer_of(module: pl.LightningModule) -> OptimizerFactory | None:
    """Return a builder of the module's optimizer for other parameters; None if it has several, or none."""
    if len(configured_optimizers(module)) != 1:
        return None

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        (optimizer,) = configured_optimizers(module)
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "param_names"}
        optimizer.param_groups[:] = [{**group, "params": list(parameters)}]
        optimizer.state.clear()
        return optimizer

    return build
