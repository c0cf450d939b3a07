"""Before data, model or processes: checks of a run, and what it takes from a resumed run and an engine's file."""

from __future__ import annotations

import filecmp
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf
from sd_lightning._conf.instantiate import leave_out
from sd_lightning._errors import UsageError
from sd_lightning._launchers import check_started_processes, is_first_process
from sd_lightning.apps import hub
from sd_lightning.apps.run_spec import AUTO, OF_PRETRAINED, RunSpec, refuse, target_of
from sd_lightning.data.preservation import check_adapters
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.storage import checkpoint, far_runs, runs, untrusted
from sd_lightning.storage.atomic import check_place

if TYPE_CHECKING:
    import torch

    from sd_lightning.strategies.base import RunSettings

log = logging.getLogger(__name__)

_SECTIONS = (
    *("model", "module", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "data", "speed", "sampling"),
    "callbacks.checkpoint",
)
"""Sections that every run needs."""
_MODULE = "sd_lightning.SDLightningModule"
_MONITORED = ("val/caption_gap", "val/loss")
"""What its validations log."""
_NO_VALIDATION = "or trainer.limit_val_batches=0 for no validation"
_AT_LEAST = (
    ("accumulate_grad_batches", 1, "at least 1", "1"),
    ("max_steps", 1, "at least 1", "1"),
    ("num_nodes", 1, "at least 1", "1"),
    ("log_every_n_steps", 0, "at least 0", "10, or 0 for no logs"),
    ("check_val_every_n_epoch", 1, "at least 1", f"1, {_NO_VALIDATION}"),
    ("gradient_clip_val", 0, "a norm of at least 0", "1, or null for no clipping"),
)
"""Trainer settings, each with its minimum, the wording of the minimum, and the remedy."""


def preflight(spec: RunSpec) -> RunSpec:
    """Check a run before data, processes or the output folder are touched.

    Returns:
        The run, with the checkpoint that it resumes, and with what its settings take from that run and from the
        engine's own file.

    Raises:
        UsageError: A setting is invalid, or two contradict each other.
    """
    _check_sections(spec)
    spec = adopt_engine_file(spec)
    _check_monitor(spec)
    if spec.left_to_planner():
        from sd_lightning.apps import planning  # takes longer to import than the rest

        planning.check(spec)
    check_trainer(spec)
    check_optimizer(spec)
    check_place(spec["output_dir"], key="output_dir")  # finding a checkpoint may already rename there
    spec = _with_start(spec)
    if spec["init_lora"] is not None and spec.resume is None:
        spec = _with_adapters(spec)
    _check_output_dir(spec)
    if spec["push_to_hub"] is not None and is_first_process():
        hub.check(spec["push_to_hub"], None if spec["overwrite"] else spec.output_dir, private=spec["hub_private"])
    return spec


def _check_sections(spec: RunSpec) -> None:
    """Check what no target's signature covers: that no section was removed, and the top-level values."""
    for name in _SECTIONS:
        node = spec.get(name)
        if not isinstance(node, Mapping) or "_target_" not in node:
            problem = "is missing" if node is None else f"is {node}"
            raise UsageError(f"{name} {problem}: expected a section with _target_, what to build; leave it as it was")
    for name in ("callbacks", "logger"):
        for key, node in (spec.get(name) or {}).items():
            if node is not None and not (isinstance(node, Mapping) and "_target_" in node):
                raise UsageError(
                    f"{name}.{key}={node}: expected a section with _target_, or null; write {name}.{key}=null to go "
                    "without"
                )
    if not 0 <= spec["seed"] < 2**63:
        refuse("seed", spec["seed"], "a whole number from 0 to 2**63 - 1", "0")
    rate = spec.get("optimizer.lr")
    if isinstance(rate, int | float) and rate < 0:
        name = "learning_rate" if "learning_rate" in spec.settings else "optimizer.lr"
        refuse(name, rate, "a number of at least 0", "1e-5, for instance")
    lora = spec.get("lora")
    if {"base", "lora.base"} <= spec.overridden and spec["base"] != spec["lora.base"]:
        raise UsageError(
            f"got base={spec['base']} and lora.base={spec['lora.base']}, two names of one setting; leave lora.base out"
        )
    if lora is not None and not isinstance(lora, Mapping):
        raise UsageError(f"lora={lora}: expected a section; write trainable=lora lora.rank=4, or lora=null")


def _check_monitor(spec: RunSpec) -> None:
    """Check that the metric by which the best checkpoint is kept is one of the validations of every checkpoint."""
    saving, trainer, data = spec.get("callbacks.checkpoint") or {}, spec["trainer"], spec["data"]
    if saving.get("monitor") is None:
        return
    from sd_lightning.callbacks.checkpoint.best import Best  # takes longer to import than the rest

    who = f"got callbacks.checkpoint.monitor={saving['monitor']}"
    if spec.url is not None:
        raise UsageError(
            f"{who} and output_dir={spec.url}, a bucket, which keeps the newest checkpoints alone; give a folder, or "
            "leave the monitor out"
        )
    has_photos = "instance_data_dir" not in data or data.get("val_data_dir") is not None
    if trainer.get("limit_val_batches") == 0 or not has_photos:
        raise UsageError(
            f"{who}, and nothing is validated; add data.val_data_dir=<folder of photos kept apart>, with "
            "trainer.limit_val_batches above 0, or leave the monitor out"
        )
    if spec["module._target_"] == _MODULE and saving["monitor"] not in _MONITORED:
        refuse("callbacks.checkpoint.monitor", saving["monitor"], " or ".join(_MONITORED), _MONITORED[0])
    Best(saving["monitor"], "min").check_intervals(
        saving.get("every_n_steps", 500),
        trainer.get("accumulate_grad_batches", 1),
        trainer.get("val_check_interval", 1.0),
        trainer.get("check_val_every_n_epoch", 1),
    )


def _with_start(spec: RunSpec) -> RunSpec:
    """Return a run with what it starts from: a checkpoint, other weights, or neither.

    Raises:
        UsageError: There is no such checkpoint or model, or settings contradict each other.
    """
    resume, init_from, is_own = spec["resume"], spec["init_from"], False
    changes: dict[str, Any] = {}
    continued = None
    if far_runs.is_url(resume) or (resume == "auto" and spec.url is not None):
        continued = runs.find_checkpoint(resume, spec.output_dir, thorough=is_first_process())
        resume = resume if continued is None else str(continued)
        spec = spec.with_settings({"resume": resume})
    if resume is not None:
        changes, is_own = adopted(spec)
        resume = changes.get("resume", resume)
    if resume is not None and init_from is not None and not is_own:
        raise UsageError(
            f"got resume={resume} and init_from={init_from}; resume continues a run, init_from starts a new one from "
            "weights: give one of the two"
        )
    if spec["overwrite"] and resume is not None:
        raise UsageError(f"got overwrite=true and resume={resume}; give one of the two")
    if init_from is not None and not is_own and spec.model.get("fresh_denoiser"):
        raise UsageError(
            f"got init_from={init_from} and model.fresh_denoiser=true, which replaces the weights that it starts from; "
            "write model.fresh_denoiser=false"
        )
    if spec.starts_from_lightning:
        checkpoint.check_lightning_checkpoint(init_from)
    elif init_from is not None and not is_own:
        pipeline = runs.find_pipeline(init_from, who="init_from")
        # A run's URL names another checkpoint later, and a copy is not there elsewhere.
        changes["model.pretrained"] = far_runs.name_of(pipeline) if far_runs.is_url(init_from) else str(pipeline)
    if continued is None and resume is not None:
        continued = runs.find_checkpoint(resume, spec.output_dir, thorough=is_first_process())
    if continued is None:
        return spec.with_settings(changes)
    from sd_lightning.callbacks.checkpoint.pipeline import check_same_parts
    from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state

    state = read_trainer_state(continued)
    spec = _with_its_adapters(spec, state["trained_parts"])
    check_same_parts(state, spec, continued)  # also when the module is built, after slow work such as class images
    return spec.with_settings(changes).resuming(continued, batch_size=state["position"]["batch_size"])


def _with_adapters(spec: RunSpec) -> RunSpec:
    """Return a run with the rank, alpha and layers of the adapters that it goes on from.

    Raises:
        UsageError: It trains none, or there are no such adapters of its model.
    """
    given = spec["init_lora"]
    if spec.lora is None or not spec.model.is_ours:
        raise UsageError(f"got init_lora={given}, and the run trains no adapters; add trainable=lora, or leave it out")
    from sd_lightning.models.lora_start import find_lora, going_on

    file, base = find_lora(given, who="init_lora"), Path(spec.model.get("pretrained") or "") / LORA_NAME
    if base.is_file() and filecmp.cmp(base, file, shallow=False):
        raise UsageError(
            f"got init_lora={given}, and the model that the run starts from has these adapters in it already; give "
            "model.pretrained=<the model that they were trained on>, or leave init_lora out"
        )
    settings = [key.removeprefix("lora.") for key in spec.overridden if key.startswith("lora.")]
    texts = bool(spec.get("module.train_text_encoder"))
    lora = going_on(spec.lora, file, spec.model.describe(), given=settings, train_text_encoder=texts)
    names = (
        "type",
        "rank",
        "alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_dora",
        "target_modules",
        "text_encoder_target_modules",
    )
    if is_first_process():
        log.info("init_lora=%s: adapters of rank %d, alpha %g", given, lora.rank, lora.effective_alpha)
    return spec.with_settings({"lora.init": str(file)} | {f"lora.{name}": getattr(lora, name) for name in names})


def _with_its_adapters(spec: RunSpec, parts: Mapping[str, Any]) -> RunSpec:
    """Return a resumed run with the adapters' settings of the run that it continues, if that had an ``init_lora``.

    Raises:
        UsageError: It is to go on from other adapters.
    """
    began, given = _started(spec)[0].get("init_lora"), spec["init_lora"]
    if given not in (None, began):
        raise UsageError(
            f"got resume={spec['resume']} and init_lora={given}, and that run began with init_lora={began or 'null'}; "
            "resume has its adapters: leave init_lora out, or start a new run"
        )
    if began is None or spec.lora is None:
        return spec
    kept = {k: v for k, v in parts.items() if k.startswith("lora.") and k not in spec.overridden | {"lora.base"}}
    kept["init_lora"] = began  # or it could not be resumed again
    if "$" in str(kept):
        raise UsageError(f"resume={spec['resume']}: its checkpoint has {kept}; copy it again")
    return spec.with_settings(kept)


def adopted(spec: RunSpec) -> tuple[dict[str, str | None], bool]:
    """Return what the command that started a run takes from it to continue it: its model, by its ``config.yaml``.

    Returns:
        Settings of the model, or ``resume=null`` where ``init_from`` starts the run, as there is none yet; and
        whether ``init_from`` is given and the resumed run was started from it.
    """
    resume, init_from = spec["resume"], spec["init_from"]
    if resume == "auto" and not checkpoint.all_checkpoints(spec["output_dir"]):
        # No process finds one: the first is written after all have joined.
        return ({} if init_from is None else {"resume": None}), False
    started, model = _started(spec)
    is_same = init_from is not None and init_from == started.get("init_from")
    base = model.get("pretrained")
    if spec.starts_from_lightning or base is None:
        return {}, is_same
    if model.get("_target_") != spec.model.target:
        return {}, False
    if init_from is not None and not is_same:
        pipeline = runs.find_pipeline(init_from, who="init_from")
        if far_runs.name_of(pipeline) != base and pipeline.resolve() != Path(base).resolve():
            return {}, False
    elif init_from is None and spec.model.get("pretrained") is not None:
        return {}, False
    log.info("resume=%s: the run started from %s", resume, base)
    if far_runs.is_url(base):
        try:
            runs.find_pipeline(base, who="model.pretrained")
        except UsageError as error:
            raise UsageError(
                f"resume={resume}: the run started from {base}, which it reads again: {error}; if the other run has "
                "deleted it, write model.pretrained=<a copy of it, or pipeline/ in a checkpoint of this run> and leave "
                "init_from out"
            ) from error
    return {f"model.{key}": model[key] for key in OF_PRETRAINED if model.get(key) is not None}, init_from is not None


def _started(spec: RunSpec) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a resumed run's ``config.yaml`` says, and of its model what is adopted: plain text only.

    Others may have written it, and what is adopted becomes a part of our configuration, which is instantiated.

    Raises:
        UsageError: It cannot be read, or has another kind of value there.
    """
    resume = spec["resume"]
    run_dir = runs.run_of(spec.output_dir if resume == "auto" else Path(resume))
    if run_dir is None:
        return {}, {}
    file = run_dir / "config.yaml"
    try:
        started = untrusted.read_yaml(file)
        model = started.get("model") if isinstance(started, dict) else None
        if not isinstance(model, dict):
            raise ValueError("expected a run's settings, with those of its model")
        return started, {key: _plain_text(model, key) for key in ("_target_", *OF_PRETRAINED)}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"resume={resume}: {file}: {error}; copy the file from the run again, or delete it and give model= as "
            "the run had it"
        ) from error


def _plain_text(model: Mapping[str, Any], key: str) -> str | None:
    """Return a value that is a text or null; an interpolation of OmegaConf would read this machine's environment."""
    value = model.get(key)
    if value is not None and (not isinstance(value, str) or "${" in value):
        kind = "a text with ${…}" if isinstance(value, str) else f"a {type(value).__name__}"
        raise ValueError(f"model.{key} is {kind}; expected plain text or null")
    return value


def adopt_engine_file(spec: RunSpec) -> RunSpec:
    """Replace defaults that the command line leaves unset by the explicit values of the engine's own file."""
    from sd_lightning.strategies import EngineStrategy

    strategy = _conf.builder(_conf.section("strategy", spec["strategy"])).target
    if not (isinstance(strategy, type) and issubclass(strategy, EngineStrategy)):
        return spec
    changes = strategy.settings_of_file(
        spec.settings, spec.overridden, num_processes=spec.num_processes, on_cuda=spec.cuda_devices > 0
    )
    return spec.with_settings(changes)


def check_trainer(spec: RunSpec) -> None:
    """Check precision, devices, strategy and batch size against each other and against this machine."""
    from sd_lightning.strategies import engine_of

    cuda, precision = spec.cuda_devices, str(spec["trainer.precision"])
    if precision == "16-mixed" and not cuda:
        raise UsageError(
            "trainer.precision=16-mixed needs a CUDA device, and Lightning would silently compute in bfloat16 on CPU; "
            "write trainer.precision=bf16-mixed or 32"
        )
    _check_speed(spec, precision, on_cuda=cuda > 0)
    accelerator = spec["trainer.accelerator"]
    if accelerator in ("cuda", "gpu") and not cuda:
        raise UsageError(f"trainer.accelerator={accelerator}: there is no CUDA device; write cpu or auto")
    _check_length(
        spec["trainer"], steps_key="max_train_steps" if "max_train_steps" in spec.settings else "trainer.max_steps"
    )
    devices, cores, nodes = spec.devices, os.cpu_count() or 1, spec["trainer.num_nodes"]
    if devices > (cuda or cores):
        there = f"{cuda} CUDA device(s)" if cuda else f"no CUDA device and {cores} CPU core(s)"
        raise UsageError(f"trainer.devices={devices}: this machine has {there}; write trainer.devices={cuda or cores}")
    engine_of(spec.strategy).check_settings(settings_of(spec, devices, nodes))
    check_started_processes(devices, nodes)
    from sd_lightning.data.sampler import check_division

    if spec["data.batch_size"] != AUTO:
        check_division(spec["data.batch_size"], spec.num_processes, spec["trainer.accumulate_grad_batches"])


def settings_of(spec: RunSpec, devices: int, num_nodes: int = 1) -> RunSettings:
    """Return what the strategy of a run, or of a plan, can refuse at once."""
    from sd_lightning.strategies.base import RunSettings

    return RunSettings(
        str(spec["trainer.precision"]),
        devices,
        num_nodes,
        channels_last=spec.get("speed.channels_last", False),
        accumulate_grad_batches=spec.get("trainer.accumulate_grad_batches", 1),
        gradient_clip_val=spec.get("trainer.gradient_clip_val"),
        gradient_clip_algorithm=spec.get("trainer.gradient_clip_algorithm"),
    )


def _check_length(trainer: Mapping[str, Any], *, steps_key: str) -> None:
    """Check the length of a run and its intervals."""
    for name, least, expected, remedy in _AT_LEAST:
        value = trainer.get(name)
        if value is not None and value < least:
            refuse(steps_key if name == "max_steps" else f"trainer.{name}", value, expected, remedy)
    for name in ("limit_train_batches", "overfit_batches", "min_steps", "min_epochs", "max_epochs"):
        if trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name}={trainer[name]}: expected only trainer.max_steps to say how long a run is, over whole "
                "epochs; write trainer.max_steps=<n> instead"
            )
    interval = trainer.get("val_check_interval")
    if interval is not None and not (isinstance(interval, int) and interval >= 1) and not 0 < interval <= 1:
        expected = "a number of forward passes of at least 1, or a fraction of an epoch"
        refuse("trainer.val_check_interval", interval, expected, f"60, {_NO_VALIDATION}")


def _check_speed(spec: RunSpec, precision: str, *, on_cuda: bool) -> None:
    """Check combinations of speed settings that libraries would refuse, or undo, at the first step."""
    attention, optimizer = spec.get("speed.attention"), target_of(spec.optimizer)
    if on_cuda and attention in ("flash", "cudnn") and not precision.endswith("-mixed"):
        raise UsageError(
            f"speed.attention={attention} computes in 16 bits, but trainer.precision={precision}; write "
            "trainer.precision=bf16-mixed or speed.attention=efficient"
        )
    if spec.get("speed.channels_last") and optimizer.__module__.startswith("bitsandbytes."):
        raise UsageError(
            f"speed.channels_last=true: {optimizer.__name__} of bitsandbytes works on contiguous weights only; write "
            "speed.channels_last=false or optimizer=adamw"
        )


def check_optimizer(spec: RunSpec) -> None:
    """Build the parts that need neither data nor model, and try optimizer and schedule on a small parameter.

    Raises:
        UsageError: Their settings are invalid.
    """
    _ = spec.objective, spec.speed, spec.lora, spec.learned_token
    check_adapters(spec.preservation, spec.lora)
    build, schedule = spec.optimizer, spec.lr_scheduler
    if not target_of(build).__module__.startswith(("torch.optim", "bitsandbytes.optim.", "sd_lightning.")):
        return  # others may need other parameter shapes
    import torch

    from sd_lightning.strategies.base import engine_of

    text_lr = spec["module"].get("text_encoder_lr")
    groups: list[dict[str, Any]] = [{}] if text_lr is None else [{}, {"lr": text_lr}]
    optimizer = build([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], **group} for group in groups])
    engine_of(spec.strategy).check_optimizer(optimizer)
    if spec["trainer.accelerator"] == "cpu" or not torch.cuda.is_available():
        _check_step(spec, optimizer)
    if target_of(schedule).__module__.startswith(("torch.optim.", "sd_lightning.")):
        schedule(optimizer)


def _check_step(spec: RunSpec, optimizer: torch.optim.Optimizer) -> None:
    """Take a trial step with an optimizer that will run on the CPU: some settings fail only there."""
    import torch

    from sd_lightning.training.optimizers import TwoSidedOptimizer

    try:
        if isinstance(optimizer, TwoSidedOptimizer):
            optimizer.train()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception as error:
        named = [key for key in spec["optimizer"] if re.search(rf"\b{re.escape(str(key))}\b", str(error))]
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} cannot step on the CPU with these arguments: {error} "
            f"({type(error).__name__}); {leave_out('optimizer', named) or 'write optimizer=adamw'}"
        ) from error


def _check_output_dir(spec: RunSpec) -> None:
    """Check that the run may write into its folder; only the first process reads all of it."""
    from sd_lightning.data.builders import paths_in
    from sd_lightning.data.sources.huggingface import check_not_scanned

    run_dir, dataset = spec.output_dir, spec.get("data.dataset_name")
    is_continued = spec.resume is not None and runs.holds(run_dir, spec.resume)  # in another folder it is a new run
    resuming = spec["resume"] == "auto" or is_continued
    if is_first_process():
        if dataset:
            check_not_scanned(dataset, run_dir)
        reads = {
            key if key in spec.settings and key.endswith("_dir") else f"data.{key}": path
            for key, path in paths_in(spec["data"]).items()
        }
        if not is_continued:  # then they may lie in the run's own folder
            of_model = {"init_from": spec["init_from"]}
            of_model |= {f"model.{key}": spec.model.get(key) for key in ("pretrained", "vae")}
            reads |= {key: path for key, path in of_model.items() if path and os.path.exists(path)}
        runs.check_output_dir(run_dir, resuming=resuming, overwrite=spec["overwrite"], reads=reads)
    elif not resuming and not spec["overwrite"] and spec.url is None:  # in a bucket's folder rank 0 may rename it
        runs.check_unused(run_dir)  # this run saves no checkpoint before all its processes have joined
