"""``AutoStrategy``: the fastest strategy that fits, predicted before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.planner.calibration import hardware, hardware_here
from sd_lightning.planner.choice import PlanChoice
from sd_lightning.planner.devices import Cluster, Device
from sd_lightning.planner.footprint import Candidate
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans, Search, TrainingPlan
from sd_lightning.planner.segments import use_expandable_segments
from sd_lightning.strategies import presets
from sd_lightning.strategies.base import engine_of
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.predicted import Predicted, predicted
from sd_lightning.strategies.processes.group import WatchedProcesses

_COUNTS = (2, 4, 8)
"""Devices of a machine that are tried if nothing fits."""
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


class AutoStrategy(DDPStrategy):
    """Strategy that predicts memory and time of a step under all others, and becomes the fastest of those that fit.

    Usage: ``Trainer(strategy=AutoStrategy())`` or ``Trainer(strategy="sd_auto")``. At the first ``fit`` it puts the
    chosen strategy into its place in the trainer, and from there on all is as if that one had been given to the
    trainer. Before that, ``validate``, ``test`` and ``predict`` run under DDP. Of two strategies whose times differ by
    less than can be told it takes the simpler. Batch, precision and accumulation are the user's.

    It trains ``SDLightningModule``, and any LightningModule with an ``example_input_array`` whose first dimension is
    the batch of one process; :mod:`sd_lightning.strategies.predicted` says how that is traced.

    Args:
        device: Name of a device table, path of a YAML file like these or of a calibration, or the figures themselves;
            this machine's if not given.
        host_memory: Bytes of host memory per process; by default a process's share of this machine's.
        run: What an ``SDLightningModule`` with data of your own cannot know: batch size and resolution, and all else
            that memory depends on. Precision, processes, accumulation and the optimizer are the trainer's. Other
            modules are traced with their ``example_input_array``, and it is refused.
        candidates: Strategies to compare, the simplest first; all that have a name if not given.
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.

    Raises:
        UsageError: The device is unknown. At ``fit``: nothing fits, or the module cannot be traced.
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        host_memory: int | None = None,
        run: TrainingRun | None = None,
        candidates: Iterable[Candidate] | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(timeout_seconds=timeout_seconds)
        use_expandable_segments()
        self._hardware: tuple[Device, Speeds] | None = None
        if isinstance(device, str):
            self._hardware = hardware(device)
        elif device is not None:
            self._hardware = device, Speeds.of(device)
        self._host_memory, self._run = host_memory, run
        self._candidates = list(presets.candidates() if candidates is None else candidates)

    @override
    def _configure_launcher(self) -> None:
        if self.world_size > 1:  # one process needs none, also in a notebook
            super()._configure_launcher()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """Choose a strategy and put it into this one's place, before anything is set up."""
        trainer: Any = model.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            super().connect(model)
            return
        self._check(trainer)
        with isolate_rng():  # a traced step may draw random numbers
            planned = predicted(trainer, model, self._run)
            search = self._search(planned)
            choice = PlanChoice.of(search, "AutoStrategy" + planned.how, lambda _: _remedy(search))
        plan = self._become(trainer, model, planned, choice.plans)
        for line in replace(choice, plan=plan).lines():
            rank_zero_info(line)

    def _check(self, trainer: Any) -> None:
        if trainer.precision not in _PRECISIONS:
            raise UsageError(
                f"AutoStrategy got precision={trainer.precision}; expected one of {', '.join(_PRECISIONS)}, or choose "
                "another strategy"
            )
        if self.num_nodes > 1:
            raise UsageError(
                f"AutoStrategy got num_nodes={self.num_nodes}, and predicts for the devices of one machine; choose "
                "another strategy, e.g. strategy=FSDPStrategy()"
            )

    def _search(self, planned: Predicted) -> Search:
        run = planned.run
        cluster, speeds = self._cluster()
        return Search(
            planned.subject,
            run,
            cluster,
            speeds=speeds,
            batch_size=run.batch_size * run.accumulate * self.world_size,
            micro_batches=[run.batch_size],
            checkpointing=run.gradient_checkpointing,
            candidates=self._candidates,
            tf32=torch.backends.cuda.matmul.allow_tf32,
        )

    def _cluster(self) -> tuple[Cluster, Speeds]:
        """Return the devices of this run, and their speeds."""
        if self._hardware is not None:  # also of a GPU that is planned for on a CPU
            device, speeds = self._hardware
            cluster = Cluster.here(device, self.world_size, on_cpu=False)
        else:
            device, speeds = hardware_here()
            cluster = Cluster.here(device, self.world_size, on_cpu=self.root_device.type != "cuda")
        return replace(cluster, host_memory=self._host_memory or cluster.host_memory), speeds

    def _become(self, trainer: Any, module: pl.LightningModule, planned: Predicted, plans: Plans) -> TrainingPlan:
        """Give the trainer the fastest strategy that takes the module, as if it had been passed to it."""
        connector = trainer._accelerator_connector
        refused = list(plans.skip_reasons)
        for plan in plans.best:
            engine = plan.candidate.build(**plan.candidate.settings)
            strategy = engine if isinstance(engine, Strategy) else connector._choose_strategy()
            connector._strategy_flag = strategy
            try:
                connector._validate_precision_choice()
                engine_of(strategy).check(trainer, planned.checked)
                strategy.connect(module)
            except (UsageError, ValueError) as error:
                refused.append(f"{plan.candidate.name}: {error}")
                continue
            break
        else:
            raise UsageError(f"AutoStrategy: all strategies that fit refuse the run: {'; '.join(refused)}")
        if isinstance(strategy, WatchedProcesses):
            strategy._timeout = self._timeout
        # What the connector does with a strategy that the trainer is given.
        connector._init_strategy()
        connector.precision_plugin = connector._check_and_init_precision()
        connector._lazy_init_strategy()
        if self._launcher is not None:
            strategy._launcher = self._launcher  # it has started the other processes
        trainer.callbacks.insert(0, _SameChoice(plan.candidate.name))
        return plan


class _SameChoice(Callback):
    """Compares the choices of all processes once they have joined: they would wait for each other forever."""

    def __init__(self, chosen: str) -> None:
        self._chosen = chosen

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        first = trainer.strategy.broadcast(self._chosen)
        if first != self._chosen:
            raise UsageError(
                f"AutoStrategy chose {self._chosen} on rank {trainer.global_rank} and {first} on rank 0; "
                "example_input_array and the module must have the same shapes on all processes, and the machine the "
                "same memory"
            )


def _remedy(search: Search) -> str:
    """Return what would make a plan fit, in Python's words."""
    helps = [f"a batch below {search.run.batch_size} per process, or recomputed activations"]
    helps += ["precision=bf16-mixed or bf16-true"] * (search.run.precision == "32-true")
    for count in _COUNTS:
        if count > search.cluster.count:
            plan = search.with_changes(search.run, replace(search.cluster, count=count)).smallest_that_fits()
            if plan is not None:
                helps.insert(0, f"devices={count}, with {plan.candidate.name}")
                break
    return f"what may help: {'; '.join(helps)}"
