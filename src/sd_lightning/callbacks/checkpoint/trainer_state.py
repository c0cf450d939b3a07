"""A checkpoint's ``trainer.json``: content, reading, and comparison with the run that resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.scheduler_state import (
    GROUP_RATES,
    STATE_RATES,
    scale_rates,
    scale_scheduler,
    scheduler_state,
)
from sd_lightning.data.contract import ResumableData
from sd_lightning.data.order import ORDER_VERSION, UNVERSIONED
from sd_lightning.state.shards import OptimizerGroups
from sd_lightning.storage import checkpoint, typed_json
from sd_lightning.strategies import training_state

if TYPE_CHECKING:
    from sd_lightning.models.learned_token import LearnedToken
    from sd_lightning.models.lora import Lora
    from sd_lightning.training.module import SDLightningModule

FORMAT = 2
"""Version of ``trainer.json``. The first recorded no version of the order of samples."""
_TOO_LARGE = 2**63
"""No run counts so far."""
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
    seed: int
    order_version: int = UNVERSIONED
    """Version of the order of ``epoch``."""

    @classmethod
    def of(cls, trainer: pl.Trainer) -> RunPosition:
        """Return the position of a running trainer."""
        data: ResumableData = trainer.datamodule  # type: ignore[attr-defined]
        sampler = data.train_sampler
        assert sampler is not None
        steps = trainer.global_step
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
            samples_per_epoch=sampler.samples_per_epoch,
            seed=cast("SDLightningModule", trainer.lightning_module).seed,
            order_version=sampler.order_version if done else ORDER_VERSION,
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
        self, trainer: pl.Trainer, module: SDLightningModule, parameters: dict[str, Any], bad_samples: dict[str, str]
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
            "trained_parts": trained_parts(module.lora, module.learned_token),
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
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {c.state_key: state for c in callbacks if (state := c.state_dict())}


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
    given = saved.get("format")
    if given not in (1, FORMAT):
        raise UsageError(f"{path}: checkpoint format {given}; expected 1 or {FORMAT}; update sd-lightning")
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
    yield from ((key, saved.get(key), dict) for key in ("position", "parameters", "precision", "callbacks"))
    yield from ((key, saved.get(key), list) for key in ("optimizer_groups", "schedulers"))
    yield "train_seconds", saved.get("train_seconds"), float | int
    optional: dict[str, type] = dict.fromkeys(("data", "bad_samples", "trained_parts", "frozen"), dict)
    optional |= {"optimizers": list, "configured_groups": list}
    yield from ((key, saved[key], kind) for key, kind in optional.items() if saved.get(key) is not None)
    yield from ((f"optimizers[{n}]", name, str) for n, name in enumerate(saved.get("optimizers") or []))
    known = {each.name: each.default is MISSING for each in fields(RunPosition)}
    for key in {key for key, is_needed in known.items() if is_needed} | saved["position"].keys():
        yield f"position.{key}", saved["position"].get(key) if key in known else None, int
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
        for number, groups in enumerate(saved.get(key) or []):
            yield f"{key}[{number}]", groups, list
            yield from _places_of_groups(f"{key}[{number}]", groups)
            for n, group in enumerate(groups if key == "optimizer_groups" else []):
                yield f"{key}[{number}][{n}].params", group.get("params"), list
                yield from ((f"{key}[{number}][{n}].params", name, str) for name in group["params"])
    counts = [len(groups) for groups in saved["optimizer_groups"]]
    if saved.get("optimizers") and len(saved["optimizers"]) != len(counts):
        yield "optimizers", None, list
    if saved.get("configured_groups") and [len(groups) for groups in saved["configured_groups"]] != counts:
        yield "configured_groups", None, list
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


def trained_parts(lora: Lora | None, learned_token: LearnedToken | None) -> dict[str, Any]:
    """Return the settings that define the meaning of trained weights, by configuration key.

    Names and shapes do not show them: adapters with another alpha have the same shapes, but another effect.
    Dropout is left out; like the learning rate, it may change.
    """
    parts: dict[str, Any] = {"trainable": "full" if lora is None else "lora"}
    if lora is not None:
        parts["lora.rank"] = lora.rank
        parts["lora.alpha"] = lora.effective_alpha
        parts["lora.target_modules"] = sorted(lora.target_modules)
        parts["lora.text_encoder_target_modules"] = sorted(lora.text_encoder_target_modules)
    parts["learn_token"] = learned_token is not None
    if learned_token is not None:
        parts["placeholder_token"] = learned_token.placeholder_token
    return parts


def check_same_parts(saved: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Check that the settings of a checkpoint's run equal those of the run that resumes it.

    Args:
        saved: The checkpoint's ``trainer.json``; one of an earlier release has no such settings to compare.
        ours: From :func:`trained_parts`.
        path: The checkpoint.

    Raises:
        UsageError: They differ; the message names the first.
    """
    theirs = saved.get("trained_parts", ours)
    for key, value in theirs.items():
        if ours.get(key) != value:
            raise UsageError(
                f"resume={path}: {key}={_written(ours.get(key))}, but the checkpoint's run used {key}="
                f"{_written(value)}, which its weights are trained for; write {key}={_written(value)}, or start a new "
                "run from its pipeline with init_from="
            )


_SCHEDULED = ("params", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")


def configured_groups(groups: OptimizerGroups) -> OptimizerGroups:
    """Return optimizer groups as configured, from ``TrainingState.optimizer_groups`` before the first step.

    If a scheduler has already set ``lr``, ``initial_lr`` is the configured rate.
    """
    return [
        [
            {key: value for key, value in group.items() if key not in _SCHEDULED}
            | {"lr": group.get("initial_lr", group.get("lr"))}
            for group in optimizer
        ]
        for optimizer in groups
    ]


def adopt_settings(saved: dict[str, Any], configured: OptimizerGroups) -> str:
    """Write the optimizer settings that a resumed run has changed into the saved groups and schedules.

    Unchanged settings stay as saved, bit for bit. A new learning rate rescales the current, scheduled one.

    Args:
        saved: The checkpoint's ``trainer.json``, which is changed.
        configured: From :func:`configured_groups`, of the run that resumes.

    Returns:
        The differences, such as ``lr 0.001 -> 1e-05``. A checkpoint of an earlier release, without configured groups,
        is not changed.
    """
    groups = saved["optimizer_groups"]
    theirs = saved.get("configured_groups") or configured_groups(groups)
    changes: dict[str, None] = {}
    for optimizer, (ours, old) in enumerate(zip(configured, theirs)):
        for number, (new, before) in enumerate(zip(ours, old)):
            for key in (k for k in new if k in before and not _equal(new[k], before[k])):
                changes[f"{key} {before[key]} -> {new[key]}"] = None
                if "configured_groups" in saved:
                    _adopt(saved, (optimizer, number), key, before[key], new[key])
    return ", ".join(changes)


def _adopt(saved: dict[str, Any], where: tuple[int, int], key: str, old: Any, new: Any) -> None:
    optimizer, number = where
    group = saved["optimizer_groups"][optimizer][number]
    if key == "lr":
        scale_rates(group, old, new)
    else:
        group[key] = new
    # All belong to the module's only optimizer; one with other groups is refused when it is loaded.
    for scheduler in (each for each in saved["schedulers"] if number < len(each["groups"])):
        if key == "lr":
            scale_scheduler(scheduler, number, old, new)
        elif key in scheduler["groups"][number]:
            scheduler["groups"][number][key] = new


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether settings are equal; engines write pairs as lists or tuples."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)


def _written(value: Any) -> str:
    """Format a setting as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
