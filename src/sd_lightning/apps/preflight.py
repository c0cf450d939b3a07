"""What a run refuses before data, processes or the output folder are touched."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf
from sd_lightning._conf.instantiate import leave_out
from sd_lightning._errors import UsageError
from sd_lightning._launchers import check_started_processes, is_first_process
from sd_lightning.storage import checkpoint, run_folder, runs
from sd_lightning.storage.new_folder import check_place, unused

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

_SECTIONS = (
    *("model", "module", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "data", "speed", "sampling"),
    "callbacks.checkpoint",
)
"""What a run cannot do without."""
LOAD_MODEL = "sd_lightning.loading.load_model"
"""What a program of one's own may put in its place need not know of deferred weights, nor of architectures."""
_OF_PRETRAINED = ("pretrained", "revision", "variant", "vae")


def preflight(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Refuse what cannot work before data, processes or the output folder are touched.

    Returns:
        The checkpoint to resume, if any.
    """
    check_place(cfg.output_dir, key="output_dir")
    _check_keys(cfg)
    is_own = adopt_base(cfg)
    adopt_engine_file(cfg)
    check_trainer(cfg)
    if cfg.resume is not None and cfg.init_from is not None and not is_own:
        raise UsageError(
            f"got resume={cfg.resume} and init_from={cfg.init_from}; resume continues a run, init_from starts a new "
            "one from weights: give one of the two"
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
    if resume is not None:  # as when the module is there, before time is spent on that or on class images
        from sd_lightning.callbacks.checkpoint.trainer_state import check_same_parts, read_trainer_state, trained_parts

        check_same_parts(read_trainer_state(resume), trained_parts(**parts_of(cfg)), resume)
    build_small_parts(cfg)
    # A run that is continued elsewhere is a new one there.
    resuming = cfg.resume == "auto" or (resume is not None and runs.holds(run_dir, resume))
    if is_first_process():
        reads = _reads(cfg, resumed=resume is not None and runs.holds(run_dir, resume))
        _check_scanned(cfg, run_dir)
        runs.check_output_dir(run_dir, resuming=resuming, overwrite=cfg.overwrite, reads=reads)
    elif not resuming and not cfg.overwrite:
        runs.check_unused(run_dir)  # this run has no checkpoint before all its processes are in it
    return resume


def adopt_base(cfg: DictConfig) -> bool:
    """Let a resumed run have the model that stands in its own ``config.yaml``, whether it is given again or not.

    So the command that has started a run continues it with ``resume=auto``; where there is no run yet, it starts one.

    Returns:
        Whether ``init_from`` is given, and is what the run that is resumed was started from.
    """
    from omegaconf import OmegaConf

    if cfg.resume is None:
        return False
    if not is_resumed(cfg):
        if cfg.init_from is not None:
            cfg.resume = None
        return False
    root = Path(cfg.output_dir if cfg.resume == "auto" else cfg.resume)
    file = next((f for f in (root / "config.yaml", root.parent.parent / "config.yaml") if f.is_file()), None)
    started: Any = OmegaConf.create() if file is None else OmegaConf.load(file)
    is_same = cfg.init_from is not None and cfg.init_from == started.get("init_from")
    model: Any = OmegaConf.select(started, "model") or {}
    base = model.get("pretrained")
    if is_lightning_checkpoint(cfg.init_from) or base is None:
        return is_same
    if model.get("_target_") != cfg.model.get("_target_"):
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


def is_resumed(cfg: DictConfig) -> bool:
    """Whether there is something to continue; the first checkpoint of a run waits for all of its processes."""
    if cfg.resume != "auto":
        return cfg.resume is not None
    return run_folder.is_run(Path(cfg.output_dir)) and bool(checkpoint.all_checkpoints(cfg.output_dir))


def _reads(cfg: DictConfig, *, resumed: bool) -> dict[str, str]:
    """Return the settings that name a file or folder which the run reads, with their values.

    The model of a run that is resumed may be the run's own.
    """
    given = {key: value for key, value in cfg.data.items() if isinstance(value, str)}
    reads = {key if key in cfg else f"data.{key}": value for key, value in given.items() if key.endswith("_dir")}
    reads |= {f"data.{key}": value for key, value in given.items() if not key.endswith("_dir")}
    if not resumed:
        reads |= {"init_from": cfg.init_from} | {f"model.{key}": cfg.model.get(key) for key in ("pretrained", "vae")}
    # What is not there is no path: the name of a column, a hub id. Folders of class images may be still to come.
    return {k: v for k, v in reads.items() if v and (k.endswith("_dir") or os.path.exists(v))}


def _check_scanned(cfg: DictConfig, run_dir: Path) -> None:
    """Refuse a run inside a folder that ``datasets`` scans as a whole: its pictures would become data."""
    from sd_lightning.data.images import is_saved_dataset

    name = cfg.data.get("dataset_name")
    if not name or not Path(name).is_dir() or is_saved_dataset(name):
        return
    if run_dir.resolve().is_relative_to(Path(name).resolve()):
        raise UsageError(
            f"data.dataset_name={name}: output_dir={run_dir} lies in it, and the run's pictures would become data; "
            f"expected two folders apart; write output_dir={unused(f'{Path(name)}-runs/{run_dir.name}')}"
        )


def _check_keys(cfg: DictConfig) -> None:
    """Check what no target's signature tells: the top-level values, and that no section was removed."""
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
        raise UsageError(f"seed={cfg.seed}: expected a whole number from 0 to 2**63 - 1; write seed=0")
    rate = cfg.optimizer.get("lr")
    if isinstance(rate, int | float) and rate < 0:
        name = "learning_rate" if "learning_rate" in cfg else "optimizer.lr"
        raise UsageError(f"{name}={rate}: expected a number of at least 0; write {name}=1e-5, for instance")
    if cfg.lora is not None and not OmegaConf.is_dict(cfg.lora):
        raise UsageError(f"lora={cfg.lora}: expected a section; write trainable=lora lora.rank=4, or lora=null")


def adopt_engine_file(cfg: DictConfig) -> None:
    """Let explicit values of a user's DeepSpeed file replace defaults that the command line has left alone."""
    import torch
    from omegaconf import OmegaConf

    source: Any = OmegaConf.to_container(cfg.strategy).get("config")  # type: ignore[union-attr]
    if source is None:
        return
    from sd_lightning.strategies.deepspeed import config as deepspeed_config
    from sd_lightning.strategies.deepspeed import precedence as deepspeed_precedence

    config, _ = deepspeed_config.load(source)  # the strategy shows the warnings
    cuda = torch.cuda.device_count() if cfg.trainer.accelerator in ("auto", "cuda", "gpu") else 0
    changes = deepspeed_precedence.settle(
        config,
        OmegaConf.to_container(cfg),  # type: ignore[arg-type]
        _conf.overridden_keys(),
        world_size=_num_devices(cfg.trainer.devices, cuda) * cfg.trainer.num_nodes,
        on_cuda=cuda > 0,
        who=deepspeed_config.name_of(source),
    )
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
        log.info("%s sets %s=%s", deepspeed_config.name_of(source), key, value)


def check_trainer(cfg: DictConfig) -> None:
    """Check precision, devices and batch size against each other and against this machine."""
    import torch

    from sd_lightning.data.sampler import micro_batch_size

    trainer = cfg.trainer
    cuda = torch.cuda.device_count() if trainer.accelerator in ("auto", "cuda", "gpu") else 0
    if trainer.precision == "16-mixed" and not cuda:
        raise UsageError(
            "trainer.precision=16-mixed needs a CUDA device, and Lightning would silently compute in bfloat16 on CPU; "
            "write trainer.precision=bf16-mixed or 32"
        )
    check_speed(cfg, on_cuda=cuda > 0)
    if trainer.accelerator in ("cuda", "gpu") and not cuda:
        raise UsageError(f"trainer.accelerator={trainer.accelerator}: there is no CUDA device; write cpu or auto")
    for name in ("accumulate_grad_batches", "max_steps", "num_nodes"):
        if trainer[name] < 1:
            given = "max_train_steps" if name == "max_steps" and "max_train_steps" in cfg else f"trainer.{name}"
            raise UsageError(f"{given}={trainer[name]}: expected at least 1; write {given}=1")
    for name in ("limit_train_batches", "overfit_batches", "min_steps", "min_epochs", "max_epochs"):
        if trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name}={trainer[name]}: expected only trainer.max_steps to say how long a run is, over whole "
                "epochs; write trainer.max_steps=<n> instead"
            )
    if trainer.get("log_every_n_steps", 1) < 0:
        raise UsageError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps}: expected at least 0; write "
            "trainer.log_every_n_steps=10, or 0 for no logs"
        )
    epochs = trainer.get("check_val_every_n_epoch")
    if epochs is not None and epochs < 1:
        raise UsageError(
            f"trainer.check_val_every_n_epoch={epochs}: expected at least 1; write trainer.check_val_every_n_epoch=1, "
            "or trainer.limit_val_batches=0 for no validation"
        )
    interval = trainer.get("val_check_interval")
    if interval is not None and not (isinstance(interval, int) and interval >= 1) and not 0 < interval <= 1:
        raise UsageError(
            f"trainer.val_check_interval={interval}: expected a number of forward passes of at least 1, or a fraction "
            "of an epoch; write trainer.val_check_interval=60, or trainer.limit_val_batches=0 for no validation"
        )
    if (trainer.get("gradient_clip_val") or 0) < 0:
        raise UsageError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: expected a norm of at least 0; write "
            "trainer.gradient_clip_val=1, or null for no clipping"
        )
    devices = _num_devices(trainer.devices, cuda)
    if cuda and devices > cuda:
        raise UsageError(
            f"trainer.devices={devices}: this machine has {cuda} CUDA device(s); write trainer.devices={cuda}"
        )
    cores = os.cpu_count() or 1
    if not cuda and devices > cores:
        raise UsageError(
            f"trainer.devices={devices}: this machine has no CUDA device and {cores} CPU core(s); write "
            f"trainer.devices={cores}"
        )
    if str(trainer.precision).startswith("16") and cfg.strategy["_target_"].endswith(".FSDPStrategy"):
        raise UsageError(
            f"trainer.precision={trainer.precision}: FSDP2 does not scale losses, and float16 underflows without; "
            "write trainer.precision=bf16-mixed"
        )
    check_started_processes(devices, trainer.num_nodes)
    processes = devices * trainer.num_nodes
    if processes > 1 and cfg.strategy["_target_"].endswith(".single"):
        raise UsageError(
            f"strategy=single is one process, but trainer.devices={trainer.devices} trainer.num_nodes="
            f"{trainer.num_nodes} ask for {processes}; add strategy=ddp"
        )
    micro_batch_size(cfg.data.batch_size, processes, trainer.accumulate_grad_batches)


def check_speed(cfg: DictConfig, *, on_cuda: bool) -> None:
    """Check switches against each other that libraries would refuse, or undo, at the first step."""
    precision = str(cfg.trainer.precision)
    if on_cuda and cfg.speed.attention in ("flash", "cudnn") and not precision.endswith("-mixed"):
        raise UsageError(
            f"speed.attention={cfg.speed.attention} computes in 16 bits, but trainer.precision={precision}; write "
            "trainer.precision=bf16-mixed or speed.attention=efficient"
        )
    if cfg.speed.channels_last and str(cfg.optimizer["_target_"]).startswith("bitsandbytes."):
        raise UsageError(
            f"speed.channels_last=true: {cfg.optimizer['_target_']} works on contiguous weights only; write "
            "speed.channels_last=false or optimizer=adamw"
        )


def num_processes(cfg: DictConfig) -> int:
    """Return the number of processes that a run asks for."""
    import torch

    cuda = torch.cuda.device_count() if cfg.trainer.accelerator in ("auto", "cuda", "gpu") else 0
    return _num_devices(cfg.trainer.devices, cuda) * cfg.trainer.num_nodes


def _num_devices(devices: Any, cuda: int) -> int:
    if isinstance(devices, int) and devices >= 1:
        return devices
    if devices in ("auto", -1, "-1"):
        return max(cuda, 1)
    if isinstance(devices, str) and devices.isdecimal() and int(devices) >= 1:
        return int(devices)
    if not isinstance(devices, (int, str)) and len(devices):
        return len(devices)
    raise UsageError(
        f"trainer.devices={devices}: expected a number of at least 1, a list of indices, or auto; write "
        "trainer.devices=1"
    )


def is_lightning_checkpoint(path: str | None) -> bool:
    return path is not None and path.endswith(runs.LIGHTNING_SUFFIX)


def build_small_parts(cfg: DictConfig) -> None:
    """Build what needs neither model nor data, and forget it: its complaints come before those take their time.

    Raises:
        UsageError: Settings of the objective, the optimizer, the schedule or the speed switches cannot work.
    """
    import torch

    _conf.instantiate(cfg.objective)
    _conf.instantiate(cfg.speed)
    target = str(cfg.optimizer["_target_"])
    if not target.startswith(("torch.optim.", "bitsandbytes.optim.")):
        return  # it may want parameters of other shapes
    optimizer = _conf.instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2, 2))])
    _check_steps(cfg, optimizer)
    if str(cfg.lr_scheduler["_target_"]).startswith(("torch.optim.", "sd_lightning.")):
        _conf.instantiate(cfg.lr_scheduler)(optimizer)


def check_model(cfg: DictConfig) -> None:
    """Refuse a pipeline that ``model=`` does not name, before time is spent on the data or on class images.

    Raises:
        UsageError: ``model=`` names another one, or it cannot be trained.
    """
    if cfg.model["_target_"] == LOAD_MODEL and cfg.model.pretrained is not None:
        from sd_lightning.loading import check_pretrained

        check_pretrained(cfg.model.architecture, cfg.model.pretrained, revision=cfg.model.get("revision"))


def _check_steps(cfg: DictConfig, optimizer: Any) -> None:
    """Let an optimizer that will run on the CPU take a step: some settings are refused only there."""
    import torch

    if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))
    except Exception as error:
        named = [key for key in cfg.optimizer if re.search(rf"\b{re.escape(str(key))}\b", str(error))]
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} cannot step on the CPU with these arguments: {error} "
            f"({type(error).__name__}); {leave_out('optimizer', named) or 'write optimizer=adamw'}"
        ) from error


def parts_of(cfg: DictConfig) -> dict[str, Any]:
    """Build what is trained beside, or in the place of, the networks' own weights."""
    return {n: None if cfg.get(n) is None else _conf.instantiate(cfg[n]) for n in ("lora", "learned_token")}
