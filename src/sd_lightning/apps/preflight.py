"""What a run's settings take from elsewhere before anything is built: a resumed run, the engine's own file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import checks
from sd_lightning.apps.run_spec import OF_PRETRAINED, RunSpec
from sd_lightning.storage import checkpoint, runs, untrusted
from sd_lightning.storage.atomic import check_place

log = logging.getLogger(__name__)


def preflight(spec: RunSpec) -> RunSpec:
    """Check a run before data, processes or the output folder are touched.

    Returns:
        The run, with the checkpoint that it resumes, and with what its settings take from that run and from the
        engine's own file.

    Raises:
        UsageError: A setting is invalid, or two contradict each other.
    """
    check_place(spec["output_dir"], key="output_dir")
    checks.check_sections(spec)
    spec, is_own = adopt_base(spec)
    spec = adopt_engine_file(spec)
    if spec.left_to_planner():
        from sd_lightning.apps import auto  # imports the planner

        auto.check(spec)
    checks.check_trainer(spec)
    resume, init_from = spec["resume"], spec["init_from"]
    if resume is not None and init_from is not None and not is_own:
        raise UsageError(
            f"got resume={resume} and init_from={init_from}; resume continues a run, init_from starts a new one from "
            "weights: give one of the two"
        )
    if init_from is not None and not is_own and spec.model.get("fresh_denoiser"):
        raise UsageError(
            f"got init_from={init_from} and model.fresh_denoiser=true, which replaces the weights that it starts from; "
            "write model.fresh_denoiser=false"
        )
    if spec["overwrite"] and resume is not None:
        raise UsageError(f"got overwrite=true and resume={resume}; give one of the two")
    if spec.starts_from_lightning:
        checkpoint.check_lightning_checkpoint(init_from)
    elif init_from is not None and not is_own:
        spec = spec.with_settings({"model.pretrained": str(runs.find_pipeline(init_from, who="init_from"))})
    run_dir = spec.output_dir
    if resume is not None:
        spec = spec.resuming(runs.find_checkpoint(resume, run_dir, thorough=is_first_process()))
    checks.check_parts(spec)
    if spec.resume is not None:  # repeated when the module is built; here before slow work such as class images
        from sd_lightning.callbacks.checkpoint.pipeline import check_same_parts
        from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state

        check_same_parts(read_trainer_state(spec.resume), spec, spec.resume)
    is_continued = spec.resume is not None and runs.holds(run_dir, spec.resume)  # in another folder it is a new run
    resuming = resume == "auto" or is_continued
    if is_first_process():
        reads = checks.paths_read(spec, resumed=is_continued)
        checks.check_not_scanned(spec)
        runs.check_output_dir(run_dir, resuming=resuming, overwrite=spec["overwrite"], reads=reads)
    elif not resuming and not spec["overwrite"]:
        runs.check_unused(run_dir)  # this run saves no checkpoint before all its processes have joined
    return spec


def adopt_base(spec: RunSpec) -> tuple[RunSpec, bool]:
    """Take the model of a resumed run from the run's own ``config.yaml``, whether it is given again or not.

    So the command that started a run continues it with ``resume=auto``; if there is no run yet, it starts one.

    Returns:
        The run, and whether ``init_from`` is given and the resumed run was started from it.
    """
    resume, init_from = spec["resume"], spec["init_from"]
    if resume is None:
        return spec, False
    if not is_resumed(spec):
        return (spec if init_from is None else spec.with_settings({"resume": None})), False
    started, model = _started(spec)
    is_same = init_from is not None and init_from == started.get("init_from")
    base = model.get("pretrained")
    if spec.starts_from_lightning or base is None:
        return spec, is_same
    if model.get("_target_") != spec.model.target:
        return spec, False
    if init_from is not None and not is_same:
        if runs.find_pipeline(init_from, who="init_from").resolve() != Path(base).resolve():
            return spec, False
    elif init_from is None and spec.model.get("pretrained") is not None:
        return spec, False
    log.info("resume=%s: the run started from %s", resume, base)
    adopted = {f"model.{key}": model[key] for key in OF_PRETRAINED if model.get(key) is not None}
    return spec.with_settings(adopted), init_from is not None


def _started(spec: RunSpec) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a resumed run's ``config.yaml`` says, and of its model what is adopted: plain text only.

    Others may have written it, and what is adopted becomes a part of our configuration, which is instantiated.

    Raises:
        UsageError: It cannot be read, or has another kind of value there.
    """
    resume = spec["resume"]
    root = spec.output_dir if resume == "auto" else Path(resume)
    file = next((f for f in (root / "config.yaml", root.parent.parent / "config.yaml") if f.is_file()), None)
    if file is None:
        return {}, {}
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


def is_resumed(spec: RunSpec) -> bool:
    """Return whether there is a run to resume; its first checkpoint is written after all processes have joined."""
    if spec["resume"] != "auto":
        return spec["resume"] is not None
    return runs.is_run(spec.output_dir) and bool(checkpoint.all_checkpoints(spec["output_dir"]))


def adopt_engine_file(spec: RunSpec) -> RunSpec:
    """Replace defaults that the command line leaves unset by the explicit values of a user's DeepSpeed file."""
    source = spec.get("strategy.config")
    if source is None:
        return spec
    from sd_lightning.strategies.deepspeed import config as deepspeed_config
    from sd_lightning.strategies.deepspeed import precedence as deepspeed_precedence

    config, _ = deepspeed_config.load(source)  # the strategy shows the warnings
    changes = deepspeed_precedence.settle(
        config,
        spec.settings,
        spec.given,
        world_size=spec.num_processes,
        on_cuda=spec.cuda_devices > 0,
        who=deepspeed_config.name_of(source),
    )
    for key, value in changes.items():
        log.info("%s sets %s=%s", deepspeed_config.name_of(source), key, value)
    return spec.with_settings(changes)
