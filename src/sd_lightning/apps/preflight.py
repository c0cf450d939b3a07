"""Checks of a run before data, processes or the output folder are touched."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf
from sd_lightning._conf.instantiate import leave_out
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.trainer_checks import check_trainer, cuda_devices, left_to_planner, num_processes, refuse
from sd_lightning.storage import checkpoint, run_folder, runs, untrusted
from sd_lightning.storage.new_folder import check_place, unused

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.adapters.learned_token import LearnedToken
    from sd_lightning.models.adapters.lora import Lora
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.planner.checkpointing import Recomputation
    from sd_lightning.training.module import OptimizerFactory, SchedulerFactory
    from sd_lightning.training.speed import Speed

log = logging.getLogger(__name__)

_SECTIONS = (
    *("model", "module", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "data", "speed", "sampling"),
    "callbacks.checkpoint",
)
"""Sections that every run needs."""
LOAD_MODEL = "sd_lightning.loading.load_model"
"""Default target of ``model``. Users' own targets need not support deferred weights or ``architecture``."""
_OF_PRETRAINED = ("pretrained", "revision", "variant", "vae")


@dataclass(frozen=True)
class Parts:
    """Parts that need neither model nor data: built once, before anything slow."""

    objective: Objective
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory
    speed: Speed
    lora: Lora | None
    learned_token: LearnedToken | None
    recomputation: Recomputation | None = None
    """What blocks keep for backward, if ``speed.gradient_checkpointing`` is a limit."""

    @classmethod
    def build(cls, cfg: DictConfig) -> Parts:
        """Build the parts, and try the optimizer and the schedule on a small parameter.

        Raises:
            UsageError: Their settings are invalid.
        """
        names = ("objective", "speed", "optimizer", "lr_scheduler", "lora", "learned_token")
        parts = cls(**{name: _conf.instantiate(cfg.get(name)) for name in names})
        if str(cfg.optimizer["_target_"]).startswith(("torch.optim.", "bitsandbytes.optim.")):
            import torch  # other optimizers may need other parameter shapes

            optimizer = parts.optimizer([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}])
            _check_step(cfg, optimizer)
            if str(cfg.lr_scheduler["_target_"]).startswith(("torch.optim.", "sd_lightning.")):
                parts.lr_scheduler(optimizer)
        return parts


def averages_by_lightning(cfg: DictConfig) -> bool:
    """Return whether a callback of Lightning's averages the weights: ``WeightAveraging`` or ``EMAWeightAveraging``."""
    nodes = (node for node in cfg.callbacks.values() if node is not None)
    return any(str(node["_target_"]).endswith("WeightAveraging") for node in nodes)


def _check_step(cfg: DictConfig, optimizer: torch.optim.Optimizer) -> None:
    """Take a trial step with an optimizer that will run on the CPU: some settings fail only there."""
    import torch

    if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return
    try:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception as error:
        named = [key for key in cfg.optimizer if re.search(rf"\b{re.escape(str(key))}\b", str(error))]
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} cannot step on the CPU with these arguments: {error} "
            f"({type(error).__name__}); {leave_out('optimizer', named) or 'write optimizer=adamw'}"
        ) from error


def preflight(cfg: DictConfig, run_dir: Path) -> tuple[Path | None, Parts]:
    """Check the configuration before data, processes or the output folder are touched.

    Returns:
        The checkpoint to resume, if any, and the parts that need neither model nor data.
    """
    check_place(cfg.output_dir, key="output_dir")
    _check_keys(cfg)
    is_own = adopt_base(cfg)
    adopt_engine_file(cfg)
    if left_to_planner(cfg):
        from sd_lightning.apps import auto  # imports the planner

        auto.check(cfg)
    check_trainer(cfg)
    if cfg.resume is not None and cfg.init_from is not None and not is_own:
        raise UsageError(
            f"got resume={cfg.resume} and init_from={cfg.init_from}; resume continues a run, init_from starts a new "
            "one from weights: give one of the two"
        )
    if cfg.init_from is not None and not is_own and cfg.model.get("fresh_denoiser"):
        raise UsageError(
            f"got init_from={cfg.init_from} and model.fresh_denoiser=true, which replaces the weights that it starts "
            "from; write model.fresh_denoiser=false"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UsageError(f"got overwrite=true and resume={cfg.resume}; give one of the two")
    if is_lightning_checkpoint(cfg.init_from):
        runs.check_lightning_checkpoint(cfg.init_from)
    elif cfg.init_from is not None and not is_own:
        cfg.model.pretrained = str(runs.find_pipeline(cfg.init_from, who="init_from"))
    resume = None
    if cfg.resume is not None:
        resume = runs.find_checkpoint(cfg.resume, run_dir, thorough=is_first_process())
    parts = Parts.build(cfg)
    if resume is not None:  # repeated when the module is built; here before slow work such as class images
        from sd_lightning.callbacks.checkpoint.trainer_state import check_same_parts, read_trainer_state, trained_parts

        check_same_parts(read_trainer_state(resume), trained_parts(parts.lora, parts.learned_token), resume)
    is_continued = resume is not None and runs.holds(run_dir, resume)  # in another folder it is a new run
    resuming = cfg.resume == "auto" or is_continued
    if is_first_process():
        reads = _reads(cfg, resumed=is_continued)
        _check_scanned(cfg, run_dir)
        runs.check_output_dir(run_dir, resuming=resuming, overwrite=cfg.overwrite, reads=reads)
    elif not resuming and not cfg.overwrite:
        runs.check_unused(run_dir)  # this run saves no checkpoint before all its processes have joined
    return resume, parts


def adopt_base(cfg: DictConfig) -> bool:
    """Set the model of a resumed run from the run's own ``config.yaml``, whether it is given again or not.

    So the command that started a run continues it with ``resume=auto``; if there is no run yet, it starts one.

    Returns:
        Whether ``init_from`` is given, and the resumed run was started from it.
    """
    from omegaconf import OmegaConf

    if cfg.resume is None:
        return False
    if not is_resumed(cfg):
        if cfg.init_from is not None:
            cfg.resume = None
        return False
    started, model = _started(cfg)
    is_same = cfg.init_from is not None and cfg.init_from == started.get("init_from")
    base = model.get("pretrained")
    if is_lightning_checkpoint(cfg.init_from) or base is None:
        return is_same
    if _conf.current_name(str(model.get("_target_"))) != cfg.model.get("_target_"):
        return False
    if cfg.init_from is not None and not is_same:
        again = runs.find_pipeline(cfg.init_from, who="init_from")
        if again.resolve() != Path(base).resolve():
            return False
    elif cfg.init_from is None and cfg.model.pretrained is not None:
        return False
    for key in _OF_PRETRAINED:
        if model.get(key) is not None:
            OmegaConf.update(cfg.model, key, model[key], force_add=True)
    log.info("resume=%s: the run started from %s", cfg.resume, base)
    return cfg.init_from is not None


def _started(cfg: DictConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a resumed run's ``config.yaml`` says, and of its model what is adopted: plain text only.

    Others may have written it, and what is adopted becomes a part of our configuration, which is instantiated.

    Raises:
        UsageError: It cannot be read, or has another kind of value there.
    """
    root = Path(cfg.output_dir if cfg.resume == "auto" else cfg.resume)
    file = next((f for f in (root / "config.yaml", root.parent.parent / "config.yaml") if f.is_file()), None)
    if file is None:
        return {}, {}
    try:
        started = untrusted.read_yaml(file)
        if started is None:  # left by a kill of an earlier release, which wrote the file in place
            return {}, {}
        model = started.get("model") if isinstance(started, dict) else None
        if not isinstance(model, dict):
            raise ValueError("expected a run's settings, with those of its model")
        return started, {key: _plain_text(model, key) for key in ("_target_", *_OF_PRETRAINED)}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"resume={cfg.resume}: {file}: {error}; copy the file from the run again, or delete it and give model= as "
            "the run had it"
        ) from error


def _plain_text(model: Mapping[str, Any], key: str) -> str | None:
    """Return a value that is a text or null; an interpolation of OmegaConf would read this machine's environment."""
    value = model.get(key)
    if value is not None and (not isinstance(value, str) or "${" in value):
        kind = "a text with ${…}" if isinstance(value, str) else f"a {type(value).__name__}"
        raise ValueError(f"model.{key} is {kind}; expected plain text or null")
    return value


def is_resumed(cfg: DictConfig) -> bool:
    """Return whether there is a run to resume; its first checkpoint is written after all processes have joined."""
    if cfg.resume != "auto":
        return cfg.resume is not None
    return run_folder.is_run(Path(cfg.output_dir)) and bool(checkpoint.all_checkpoints(cfg.output_dir))


def _reads(cfg: DictConfig, *, resumed: bool) -> dict[str, str]:
    """Return the settings that name a file or folder which the run reads, with their values.

    The model of a resumed run is left out: it may lie in the run's own folder.
    """
    given = {key: value for key, value in cfg.data.items() if isinstance(value, str)}
    reads = {key if key in cfg else f"data.{key}": value for key, value in given.items() if key.endswith("_dir")}
    reads |= {f"data.{key}": value for key, value in given.items() if not key.endswith("_dir")}
    if not resumed:
        reads |= {"init_from": cfg.init_from} | {f"model.{key}": cfg.model.get(key) for key in ("pretrained", "vae")}
    # Values that do not exist are no paths (column names, hub ids), except folders of class images to be drawn.
    return {k: v for k, v in reads.items() if v and (k.endswith("_dir") or os.path.exists(v))}


def _check_scanned(cfg: DictConfig, run_dir: Path) -> None:
    """Raise if the run is inside a folder that ``datasets`` scans: its pictures would become data."""
    from sd_lightning.data.sources.huggingface import is_saved_dataset

    name = cfg.data.get("dataset_name")
    if not name or not Path(name).is_dir() or is_saved_dataset(name):
        return
    if run_dir.resolve().is_relative_to(Path(name).resolve()):
        raise UsageError(
            f"data.dataset_name={name}: output_dir={run_dir} lies in it, and the run's pictures would become data; "
            f"expected two folders apart; write output_dir={unused(f'{Path(name)}-runs/{run_dir.name}')}"
        )


def _check_keys(cfg: DictConfig) -> None:
    """Check what no target's signature covers: the top-level values, and that no section was removed."""
    from omegaconf import OmegaConf

    for name in _SECTIONS:
        node = OmegaConf.select(cfg, name)
        if not OmegaConf.is_dict(node) or "_target_" not in node:
            given = "is missing" if node is None else f"is {node}"
            raise UsageError(f"{name} {given}: expected a section with _target_, what to build; leave it as it was")
    for name in ("callbacks", "logger"):
        for key, node in (cfg.get(name) or {}).items():
            if node is not None and not (OmegaConf.is_dict(node) and "_target_" in node):
                raise UsageError(
                    f"{name}.{key}={node}: expected a section with _target_, or null; write {name}.{key}=null to go "
                    "without"
                )
    if not 0 <= cfg.seed < 2**63:
        refuse("seed", cfg.seed, "a whole number from 0 to 2**63 - 1", "0")
    rate = cfg.optimizer.get("lr")
    if isinstance(rate, int | float) and rate < 0:
        name = "learning_rate" if "learning_rate" in cfg else "optimizer.lr"
        refuse(name, rate, "a number of at least 0", "1e-5, for instance")
    if cfg.lora is not None and not OmegaConf.is_dict(cfg.lora):
        raise UsageError(f"lora={cfg.lora}: expected a section; write trainable=lora lora.rank=4, or lora=null")


def adopt_engine_file(cfg: DictConfig) -> None:
    """Replace defaults that the command line leaves unset by the explicit values of a user's DeepSpeed file."""
    from omegaconf import OmegaConf

    source: Any = OmegaConf.to_container(cfg.strategy).get("config")  # type: ignore[union-attr]
    if source is None:
        return
    from sd_lightning.strategies.deepspeed import config as deepspeed_config
    from sd_lightning.strategies.deepspeed import precedence as deepspeed_precedence

    config, _ = deepspeed_config.load(source)  # the strategy shows the warnings
    changes = deepspeed_precedence.settle(
        config,
        OmegaConf.to_container(cfg),  # type: ignore[arg-type]
        _conf.overridden_keys(),
        world_size=num_processes(cfg),
        on_cuda=cuda_devices(cfg) > 0,
        who=deepspeed_config.name_of(source),
    )
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
        log.info("%s sets %s=%s", deepspeed_config.name_of(source), key, value)


def is_lightning_checkpoint(path: str | None) -> bool:
    """Return whether ``init_from`` names a Lightning checkpoint."""
    return path is not None and path.endswith(runs.LIGHTNING_SUFFIX)


def check_model(cfg: DictConfig) -> None:
    """Check that a pretrained pipeline has the architecture of ``model=``, before slow work on data or class images.

    Raises:
        UsageError: The pipeline has another architecture, or cannot be trained; or there is none, and a setting is
            meant for it.
    """
    if cfg.model["_target_"] != LOAD_MODEL:
        return
    if cfg.model.pretrained is None:
        from sd_lightning.models.pipeline_folder import check_unused

        check_unused(**{key: cfg.model.get(key) for key in (*_OF_PRETRAINED, "fresh_denoiser")})
    else:
        from sd_lightning.loading import check_pretrained

        check_pretrained(cfg.model.architecture, cfg.model.pretrained, revision=cfg.model.get("revision"))


def load_model(cfg: DictConfig, *, without: Sequence[str]) -> LatentDiffusion:
    """Build ``model=`` without reading the weights of its networks that are not used."""
    deferred = {"deferred": tuple(without)} if cfg.model["_target_"] == LOAD_MODEL else {}
    model: LatentDiffusion = _conf.instantiate(cfg.model, **deferred)
    return model
