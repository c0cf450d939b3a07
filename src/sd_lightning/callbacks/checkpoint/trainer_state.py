"""What a checkpoint's ``trainer.json`` says: writing and reading it, and whether it is of the run at hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.position import RunPosition
from sd_lightning.callbacks.checkpoint.scheduler_state import scale_rates, scale_scheduler, scheduler_state
from sd_lightning.state.shards import OptimizerGroups
from sd_lightning.storage import checkpoint, typed_json
from sd_lightning.strategies import training_state

if TYPE_CHECKING:
    from sd_lightning.models.adapters.learned_token import LearnedToken
    from sd_lightning.models.adapters.lora import Lora
    from sd_lightning.training.module import SDLightningModule

FORMAT = 1


@dataclass
class RunRecord:
    """What neither the trainer nor the module can tell of a run, and every checkpoint of it says."""

    frozen: dict[str, str] = field(default_factory=dict)
    """Digests of weights that are not trained, by network."""
    configured: OptimizerGroups = field(default_factory=list)
    """What the configuration says of optimizer groups."""
    data: dict[str, Any] | None = None
    """Fingerprint of the training set when the fit began, on rank 0."""
    loss: float | None = None
    """Training loss of the step that the newest checkpoint is of, the mean over all processes."""
    train_seconds: float = 0.0
    """Seconds that the run spent in ``fit`` until the clock was last read, earlier sessions included."""
    _clock: float = 0.0

    def start_clock(self) -> None:
        """Begin to count seconds of training."""
        self._clock = time.perf_counter()

    def read_clock(self) -> float:
        """Return the seconds of training until now."""
        now = time.perf_counter()
        self.train_seconds += now - self._clock
        self._clock = now
        return self.train_seconds

    def trainer_state(
        self, trainer: pl.Trainer, module: SDLightningModule, parameters: dict[str, Any], bad_samples: dict[str, str]
    ) -> dict[str, Any]:
        """Return what ``trainer.json`` holds.

        Args:
            trainer: The running trainer.
            module: Its module.
            parameters: What is saved of each parameter, by name.
            bad_samples: Samples that could not be used, and why.
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
    """Return the states of the trainer's callbacks that have one."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {c.state_key: state for c in callbacks if (state := c.state_dict())}


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``trainer.json``.

    Raises:
        UsageError: It is missing, unreadable or of a later format.
    """
    try:
        saved: dict[str, Any] = typed_json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a checkpoint that can be resumed ({error}); give runs/<name>") from error
    if saved.get("format") != FORMAT:
        raise UsageError(f"{path}: checkpoint format {saved.get('format')}; expected {FORMAT}; update sd-lightning")
    return saved


def check_same_model(saved: Mapping[str, Any], ours: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Compare the trained parameters of a checkpoint with the shapes of the model's by name.

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
    """Return the settings that give trained weights their meaning, by the keys that they are given with.

    Names and shapes of the weights do not tell them: adapters of another alpha are as large, and add something else.
    Dropout is not among them; like the learning rate, it may change.
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
    """Compare the settings of a checkpoint's run with those of a run that is to continue it.

    Args:
        saved: The checkpoint's ``trainer.json``; an earlier release wrote no such settings, which are not compared.
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
    """Return what the configuration says of optimizer groups: ``TrainingState.optimizer_groups`` before the first step.

    A scheduler may have set the learning rate already, and then keeps the configured one.
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
    """Put what a resumed run configures otherwise than the saved one into the groups and schedules that it will load.

    Settings that stay are left as they were saved, bit for bit. A new learning rate scales what schedules have made of
    the old one.

    Args:
        saved: The checkpoint's ``trainer.json``, which is changed.
        configured: From :func:`configured_groups`, of the run that resumes.

    Returns:
        What has changed, such as ``lr 0.001 -> 1e-05``. Of a checkpoint of an earlier release, which does not say what
        was configured, nothing changes.
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
    for scheduler in saved["schedulers"]:  # all of the one optimizer that a module has
        if key == "lr":
            scale_scheduler(scheduler, number, old, new)
        elif key in scheduler["groups"][number]:
            scheduler["groups"][number][key] = new


def _equal(ours: Any, theirs: Any) -> bool:
    """Compare settings; engines write pairs as lists or tuples."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)


def _written(value: Any) -> str:
    """Return a setting as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
