"""A checkpoint's ``trainer.json``: its content, and how it is read."""

from __future__ import annotations

import copy
import functools
import time
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.optimizer_change import GROUP_RATES, STATE_RATES
from sd_lightning.callbacks.checkpoint.pipeline import PipelineModule, trained_parts
from sd_lightning.callbacks.steps import callbacks_of
from sd_lightning.data.contract import ResumableData
from sd_lightning.data.order import ORDER_VERSION
from sd_lightning.state.shards import OptimizerGroups
from sd_lightning.storage import checkpoint, typed_json
from sd_lightning.strategies import training_state

FORMAT = 2
"""Version of ``trainer.json``."""
_TOO_LARGE = 2**63
"""No run counts so far."""
_LISTS = ("optimizers", "optimizer_groups", "configured_groups", "schedulers")
_RATES = float | int | Tensor | None
"""Types of a learning rate: a tensor where CUDA graphs read it, None where the optimizer chooses it."""


@dataclass(frozen=True)
class RunPosition:
    """Position of a run at the end of an optimizer step."""

    optimizer_steps: int
    global_samples: int
    """Samples seen on all ranks together."""
    epoch: int
    steps_in_epoch: int
    """Optimizer steps done in ``epoch``."""
    batch_size: int
    """Global batch size."""
    samples_per_epoch: int
    seed: int | None
    """Seed of what the module draws; None if it has none of its own."""
    order_version: int
    """Version of the order of the epochs."""

    @classmethod
    def of(cls, trainer: pl.Trainer) -> RunPosition:
        """Return the position of a running trainer."""
        data: ResumableData = trainer.datamodule  # type: ignore[attr-defined]
        sampler = data.train_sampler
        assert sampler is not None
        module, steps = trainer.lightning_module, trainer.global_step
        # Not from the total of batches: a fit that ends in the middle of an epoch skips the rest of it.
        epoch, done = sampler.epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done >= min(len(sampler), trainer.num_training_batches):  # trainer.limit_train_batches ends epochs early
            epoch, done = epoch + 1, 0
        return cls(
            optimizer_steps=steps,
            global_samples=steps * data.batch_size,
            epoch=epoch,
            steps_in_epoch=done // trainer.accumulate_grad_batches,
            batch_size=data.batch_size,
            samples_per_epoch=sampler.order.samples_per_epoch,
            seed=module.seed if isinstance(module, PipelineModule) else None,
            order_version=ORDER_VERSION,
        )


@dataclass
class RunRecord:
    """State of a run for its checkpoints that neither the trainer nor the module holds."""

    frozen: dict[str, str] = field(default_factory=dict)
    """Digests of frozen weights, by network."""
    configured: OptimizerGroups = field(default_factory=list)
    """Optimizer groups as configured."""
    data: dict[str, Any] | None = None
    """Fingerprint of the training set when the fit began, on rank 0."""
    loss: float | None = None
    """Training loss at the step of the newest checkpoint, mean over all ranks."""
    train_seconds: float = 0.0
    """Seconds that the run spent in ``fit`` until the clock was last read, earlier sessions included."""
    _clock: float = 0.0

    def start_clock(self) -> None:
        """Start counting seconds of training."""
        self._clock = time.perf_counter()

    def read_clock(self) -> float:
        """Return the seconds of training so far."""
        now = time.perf_counter()
        self.train_seconds += now - self._clock
        self._clock = now
        return self.train_seconds

    def trainer_state(
        self, trainer: pl.Trainer, module: pl.LightningModule, parameters: dict[str, Any], bad_samples: dict[str, str]
    ) -> dict[str, Any]:
        """Return the content of ``trainer.json``.

        Args:
            trainer: The running trainer.
            module: Its module.
            parameters: Saved entry of each parameter, by name.
            bad_samples: Bad samples, with reasons.
        """
        state = training_state(trainer)
        return {
            "format": FORMAT,
            "position": vars(RunPosition.of(trainer)),
            "data": self.data,
            "bad_samples": bad_samples,
            "train_seconds": self.read_clock(),
            "loss": self.loss,
            "trained_parts": trained_parts(module) if isinstance(module, PipelineModule) else {},
            "frozen": self.frozen,
            "parameters": parameters,
            "optimizers": state.optimizer_names(),
            "optimizer_groups": state.optimizer_groups(),
            "configured_groups": self.configured,
            "schedulers": [scheduler_state(config.scheduler) for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": callback_states(trainer),
        }


def callback_states(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the non-empty states of the trainer's callbacks."""
    return {each.state_key: state for each in callbacks_of(trainer, pl.Callback) if (state := each.state_dict())}


def buffers_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Return the persistent buffers that a checkpoint holds, such as the running means of normalization layers.

    Those of a :class:`PipelineModule` are constants, which its pipeline holds.
    """
    if isinstance(module, PipelineModule):
        return {}
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``trainer.json``.

    Raises:
        UsageError: It is missing, unreadable or of a later format.
    """
    try:
        saved: dict[str, Any] = typed_json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a checkpoint that can be resumed ({error}); give runs/<name>") from error
    if not isinstance(saved, dict):
        raise UsageError(f"{path / 'trainer.json'}: holds no state of a run; give another checkpoint")
    version = saved.get("format")
    if version != FORMAT:
        is_older = isinstance(version, int) and version < FORMAT
        remedy = f"start from its pipeline with init_from={path / 'pipeline'}" if is_older else "update sd-lightning"
        raise UsageError(f"{path}: checkpoint format {version}; expected {FORMAT}; {remedy}")
    problem = _problem(saved)
    if problem is not None:
        raise UsageError(f"{path / 'trainer.json'}: {problem} is not what a run saves there; give another checkpoint")
    return saved


def _problem(saved: dict[str, Any]) -> str | None:
    """Return the first place whose value is not of the kind that a run saves."""
    for place, value, kind in _places(saved):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, kind) or (is_number and not abs(value) < _TOO_LARGE):  # NaN is not smaller
            return place
    return None


def _places(saved: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is read from a state: places, values and their types. A value is checked before its parts come."""
    mappings = ("position", "parameters", "precision", "callbacks", "bad_samples", "trained_parts", "frozen")
    yield from ((key, saved.get(key), dict) for key in mappings)
    yield from ((key, saved.get(key), list) for key in _LISTS)
    yield "train_seconds", saved.get("train_seconds"), float | int
    yield "data", saved.get("data", ""), dict | None
    yield "loss", saved.get("loss", ""), float | int | None
    yield from ((f"optimizers[{n}]", name, str) for n, name in enumerate(saved["optimizers"]))
    known = {each.name for each in fields(RunPosition)}
    for key in known | saved["position"].keys():
        kind = int | None if key == "seed" else int
        yield f"position.{key}", saved["position"].get(key, "") if key in known else "", kind
    for name, entry in saved["parameters"].items():
        place = f"parameters.{name}"
        yield place, entry, dict
        kinds = {"shape": list | tuple, "states": dict, "scalars": dict}
        yield from ((f"{place}.{key}", entry.get(key), kind) for key, kind in kinds.items())
        yield from ((f"{place}.{key}", None, dict) for key in entry.keys() - kinds.keys())
        for key, shape in {"shape": entry["shape"], **entry["states"]}.items():
            yield f"{place}.{key}", shape, list | tuple
            yield from ((f"{place}.{key}", side, int) for side in shape)
    for key in ("optimizer_groups", "configured_groups"):
        for number, groups in enumerate(saved[key]):
            yield f"{key}[{number}]", groups, list
            yield from _places_of_groups(f"{key}[{number}]", groups)
            for n, group in enumerate(groups if key == "optimizer_groups" else []):
                yield f"{key}[{number}][{n}].params", group.get("params"), list
                yield from ((f"{key}[{number}][{n}].params", name, str) for name in group["params"])
    counts = [len(groups) for groups in saved["optimizer_groups"]]
    yield "optimizers", saved["optimizers"] if len(saved["optimizers"]) == len(counts) else None, list
    is_same = [len(groups) for groups in saved["configured_groups"]] == counts
    yield "configured_groups", saved["configured_groups"] if is_same else None, list
    for number, scheduler in enumerate(saved["schedulers"]):
        place = f"schedulers[{number}]"
        yield place, scheduler, dict
        yield from ((f"{place}.{key}", scheduler.get(key), kind) for key, kind in (("type", str), ("groups", list)))
        yield from _places_of_schedule(f"{place}.state", scheduler.get("state"))
        yield from _places_of_groups(f"{place}.groups", scheduler["groups"])


def _places_of_schedule(where: str, state: Any) -> Iterator[tuple[str, Any, Any]]:
    yield where, state, dict
    for key in (key for key in STATE_RATES if isinstance(state.get(key), list)):
        yield from ((f"{where}.{key}", rate, _RATES) for rate in state[key])
    inner = state.get("_schedulers", [])
    yield f"{where}._schedulers", inner, list | tuple
    for number, each in enumerate(inner):
        yield from _places_of_schedule(f"{where}._schedulers[{number}]", each)


def _places_of_groups(where: str, groups: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    for number, group in enumerate(groups):
        yield f"{where}[{number}]", group, dict
        yield from ((f"{where}[{number}].{key}", group[key], _RATES) for key in GROUP_RATES if key in group)


def check_same_model(saved: Mapping[str, Any], ours: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Check that a checkpoint's trained parameters have the names and shapes of the model's.

    Raises:
        UsageError: They differ; the message names the first few.
    """
    theirs = {name: tuple(entry["shape"]) for name, entry in saved.items()}
    differing = checkpoint.shape_differences(theirs, ours)
    if differing:
        raise UsageError(
            f"resume={path}: the checkpoint is of another model; {len(differing)} trained tensors differ: "
            f"{'; '.join(differing[:3])}{'; …' if len(differing) > 3 else ''}. Give the model= and "
            "module.train_text_encoder= of that run"
        )


# Keys that schedulers set in parameter groups. Several schedulers compute the next value from the current one, so
# these values belong to their state.
_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref)


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a scheduler's state for ``typed_json``, with the values it has set in the optimizer's groups.

    Functions (``LambdaLR``'s lambdas, ``CyclicLR``'s scale function) are left out: the resumed run builds them from
    the same configuration. Callable objects keep their attributes, as in torch.
    """
    groups = [{key: group[key] for key in _GROUP_KEYS if key in group} for group in scheduler.optimizer.param_groups]
    state = _without_functions(scheduler.state_dict())
    return copy.deepcopy({"type": type(scheduler).__name__, "state": state, "groups": groups})


def load_scheduler_state(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Load a saved state into a scheduler that is built as in the saved run.

    Also sets learning rate and momentum in the optimizer's groups: load the optimizer's own state, if it holds
    groups, before.

    Raises:
        UsageError: The scheduler is of another class or its optimizer has another number of groups.
    """
    kind = type(scheduler).__name__
    if state["type"] != kind:
        raise UsageError(
            f"The checkpoint holds the state of {state['type']}, but the run has {kind}; "
            "resume with the same scheduler, or start a new run with init_from=."
        )
    groups = scheduler.optimizer.param_groups
    if len(state["groups"]) != len(groups):
        raise UsageError(
            f"The checkpoint's {kind} had {len(state['groups'])} parameter groups, the optimizer has {len(groups)}; "
            "resume with the same groups, or start a new run with init_from=."
        )
    scheduler.load_state_dict(copy.deepcopy(state["state"]))
    for group, saved in zip(groups, state["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # captured CUDA graphs read this tensor
            else:
                group[key] = copy.deepcopy(value)


def _without_functions(state: Any) -> Any:
    if type(state) is dict:
        return {key: _without_functions(value) for key, value in state.items() if not isinstance(value, _FUNCTIONS)}
    if type(state) is list:
        return [_without_functions(value) for value in state]
    return state
