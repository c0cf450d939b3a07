"""Train a latent-diffusion model: ``python -m sd_lightning.train [key=value …]``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sd_lightning import _conf, checkpoint, runs
from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning._launchers import check_started_processes, is_first_process

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from omegaconf import DictConfig

    from sd_lightning.latent_diffusion import LatentDiffusion

log = logging.getLogger("sd_lightning.train")  # __name__ is "__main__" under python -m

GIVEN = {
    "model": {"deferred"},
    "module": {"latent_diffusion", "objective", "optimizer", "lr_scheduler", "lora", "learned_token"},
    "trainer": {"strategy", "callbacks", "logger", "use_distributed_sampler"},
    "callbacks.checkpoint": {"resume"},
}
"""Arguments that are passed here and not in the configuration, by section."""
HINTS = {
    "name": str,
    "output_dir": str,
    "resume": str | None,
    "init_from": str | None,
    "overwrite": bool,
    "seed": int,
    "merge_lora": bool,
    "trainer.precision": Literal[32, "32-true", "bf16-mixed", "bf16-true", "16-mixed"],
    "trainer.gradient_clip_val": float | None,
    "trainer.val_check_interval": float | None,
    "trainer.log_every_n_steps": int,
}
"""Types of what belongs to no target's signature, or is narrower here."""
_SECTIONS = (
    *("model", "module", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "data", "speed", "sampling"),
    "callbacks.checkpoint",
)
"""What a run cannot do without."""
LOAD_MODEL = "sd_lightning.latent_diffusion.load_model"
"""What a program of one's own may put in its place need not know of deferred weights."""
_TEXT_ENCODERS = ("text_encoder", "text_encoder_2")


def train(cfg: DictConfig, *, prepare: Callable[[DictConfig], None] | None = None) -> int:
    """Run the main job: build, fit, and write what a person looks at afterwards.

    Args:
        cfg: The configuration.
        prepare: Called when all has been checked that can be, before anything is built.

    Returns:
        Exit code: 0, or 75 if a signal stopped the run and ``resume=auto`` continues it.
    """
    run_dir = Path(cfg.output_dir)
    resume = preflight(cfg, run_dir)
    trained = resume is not None and cfg.trainer.max_steps <= checkpoint.step_of(resume)
    if resume is not None and trained and runs.is_finished(run_dir, checkpoint.step_of(resume)):
        log.info("%s is complete; raise trainer.max_steps to train on, results are in %s", resume, run_dir)
        return 0
    quiet_libraries()
    if prepare is not None:
        prepare(cfg)
    trainer = build_trainer(cfg, resume)
    datamodule = _conf.instantiate(cfg.data)
    module = build_module(cfg)
    check_parts(trainer, module, datamodule)
    open_run(cfg, run_dir, trainer)
    from sd_lightning.strategies.processes import parting

    with parting(trainer):
        trainer.fit(module, datamodule)
        if trained:
            catch_up(trainer, module, datamodule)
        return finish(trainer, run_dir, cfg)


# ---------------------------------------------------------------------- before anything is built


def preflight(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Refuse what cannot work before data, processes or the output folder are touched.

    Returns:
        The checkpoint to resume, if any.
    """
    _check_keys(cfg)
    adopt_engine_file(cfg)
    check_trainer(cfg)
    if cfg.resume is not None and cfg.init_from is not None:
        raise UsageError(
            f"got resume={cfg.resume} and init_from={cfg.init_from}; resume continues a run, init_from starts a new "
            "one from weights: give one of the two"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UsageError(f"got overwrite=true and resume={cfg.resume}; give one of the two")
    if _is_lightning_checkpoint(cfg.init_from):
        runs.check_lightning_checkpoint(cfg.init_from)
    elif cfg.init_from is not None:
        cfg.model.pretrained = str(runs.find_pipeline(cfg.init_from, who="init_from"))
    resume = None if cfg.resume is None else runs.find_checkpoint(cfg.resume, run_dir)
    if resume is not None:  # as when the module is there, before time is spent on that or on class images
        from sd_lightning.trainer_state import check_same_parts, read_trainer_state, trained_parts

        check_same_parts(read_trainer_state(resume), trained_parts(**_parts(cfg)), resume)
    if is_first_process():
        runs.check_output_dir(run_dir, resuming=cfg.resume is not None, overwrite=cfg.overwrite, reads=_reads(cfg))
    elif cfg.resume is None and not cfg.overwrite:
        runs.check_unused(run_dir)  # this run has no checkpoint before all its processes are in it
    return resume


def _reads(cfg: DictConfig) -> dict[str, str]:
    """Return the settings that may name a file or folder which the run reads, with their values."""
    given = {"init_from": cfg.init_from, "model.pretrained": cfg.model.pretrained}
    given |= {f"data.{key}": value for key, value in cfg.data.items()}
    return {key: value for key, value in given.items() if isinstance(value, str)}


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
    from sd_lightning.strategies import deepspeed_config, deepspeed_precedence

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


def _is_lightning_checkpoint(path: str | None) -> bool:
    return path is not None and path.endswith(runs.LIGHTNING_SUFFIX)


# ---------------------------------------------------------------------- building


def build_trainer(cfg: DictConfig, resume: Path | None) -> pl.Trainer:
    """Build Lightning's trainer with our callbacks, loggers and strategy."""
    callbacks = []
    for name, node in cfg.callbacks.items():
        given = {"resume": resume} if name == "checkpoint" else {}
        if node is not None:
            callbacks.append(_conf.instantiate(node, **given))
    nodes = [node for node in (cfg.get("logger") or {}).values() if node is not None]
    if any(node["_target_"].endswith("WandbLogger") for node in nodes):
        require("wandb", extra="loggers", who="logger=wandb")  # Lightning looks for it only at the first metric
    loggers = [_conf.instantiate(node) for node in nodes]
    options = {
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "default_root_dir": cfg.output_dir,
    }
    strategy = _conf.instantiate(cfg.strategy)
    from sd_lightning.precision import precision_options

    return _conf.instantiate(
        cfg.trainer,
        strategy=strategy,
        **{"precision": None, **precision_options(cfg.trainer.precision, strategy)},
        callbacks=callbacks,
        logger=loggers or False,
        use_distributed_sampler=False,
        **{key: value for key, value in options.items() if key not in cfg.trainer},
    )


def build_module(cfg: DictConfig) -> pl.LightningModule:
    """Build the model, apply the speed switches, and wrap it for training."""
    module = wrap(cfg, _conf.instantiate(cfg.model, **deferral(cfg, _trained_networks(cfg))))
    if _is_lightning_checkpoint(cfg.init_from):
        runs.load_lightning_checkpoint(cfg.init_from, module)
    _conf.instantiate(cfg.speed).apply_(module.trained_networks().values())
    return module


def wrap(cfg: DictConfig, latent_diffusion: LatentDiffusion) -> Any:
    """Wrap a model for training, with what is trained beside, or in the place of, its own weights."""
    return _conf.instantiate(
        cfg.module,
        latent_diffusion=latent_diffusion,
        objective=_conf.instantiate(cfg.objective),
        optimizer=_conf.instantiate(cfg.optimizer),
        lr_scheduler=_conf.instantiate(cfg.lr_scheduler),
        **{name: part for name, part in _parts(cfg).items() if part is not None},
    )


def _parts(cfg: DictConfig) -> dict[str, Any]:
    """Build what is trained beside, or in the place of, the networks' own weights."""
    return {n: None if cfg.get(n) is None else _conf.instantiate(cfg[n]) for n in ("lora", "learned_token")}


def _trained_networks(cfg: DictConfig) -> tuple[str, ...]:
    """Name the networks that are trained as they are in their files."""
    grows = cfg.get("learned_token") is not None  # a row is added to the text encoder's weights
    return ("unet", *(_TEXT_ENCODERS if cfg.module.train_text_encoder and not grows else ()))


def deferral(cfg: DictConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the argument of the model that leaves the weights of networks in their files, where that is possible."""
    if cfg.model["_target_"] != LOAD_MODEL or _is_lightning_checkpoint(cfg.init_from):
        return {}  # a Lightning checkpoint is loaded before there is a trainer
    return {"deferred": tuple(names)}


def check_parts(trainer: pl.Trainer, module: Any, datamodule: Any) -> None:
    """Check what shows only when the parts are there, but must not wait until they are at work."""
    from sd_lightning.callbacks import PortableCheckpoint, SampleGrid

    datamodule.check_batches(trainer.num_devices * trainer.num_nodes, trainer.accumulate_grad_batches)
    module.configure_optimizers()  # makes no states yet
    _callback(trainer, PortableCheckpoint).check_resume(module, datamodule)
    if hasattr(trainer.strategy, "check"):
        trainer.strategy.check(trainer, module)
    samples = _callback(trainer, SampleGrid)
    if samples is not None:
        samples.options.check(module.latent_diffusion)
    batches = datamodule.num_train_samples // datamodule.batch_size * trainer.accumulate_grad_batches
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int) and interval > batches:
        raise UsageError(
            f"trainer.val_check_interval={interval}: an epoch has only {batches} forward passes; write "
            "trainer.check_val_every_n_epoch=null to count on over epochs, or a smaller number"
        )


def open_run(cfg: DictConfig, run_dir: Path, trainer: pl.Trainer) -> None:
    """Make the run's directory, write the configuration into it, and start the loggers."""
    from omegaconf import OmegaConf

    if not trainer.is_global_zero:
        return  # the others wait for rank 0 before they look into it
    runs.prepare(run_dir, overwrite=cfg.overwrite)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    for logger in trainer.loggers:
        try:
            _ = logger.experiment  # type: ignore[attr-defined]
        except Exception as error:  # W&B without a key or a network, a broken database, ...
            raise UsageError(
                f"logger: {type(logger).__name__} cannot start ({type(error).__name__}: {error}); mend that, or write "
                "logger=default"
            ) from error


# ---------------------------------------------------------------------- afterwards


def catch_up(trainer: pl.Trainer, module: pl.LightningModule, datamodule: Any) -> None:
    """Validate and draw for a run that was killed between its last checkpoint and its results."""
    from sd_lightning.callbacks import SampleGrid

    if datamodule.source_val is not None and trainer.limit_val_batches:
        trainer.validate(module, datamodule, verbose=False)
    module.to(trainer.strategy.root_device)  # Lightning leaves it in host memory
    samples = _callback(trainer, SampleGrid)
    if samples is not None:
        samples.on_train_end(trainer, module)


def finish(trainer: pl.Trainer, run_dir: Path, cfg: DictConfig) -> int:
    """Publish the pipeline, write summary and report, and tell where everything is."""
    from sd_lightning.callbacks import PortableCheckpoint, StopOnSignal
    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED

    bad_samples = trainer.datamodule.gather_bad_samples()  # type: ignore[attr-defined]
    saved = _callback(trainer, PortableCheckpoint).last_saved
    stop = _callback(trainer, StopOnSignal)
    if not trainer.is_global_zero:
        return EXIT_INTERRUPTED if stop is not None and stop.stopped else 0
    if stop is not None and stop.stopped:
        print(f"stopped by a signal at step {trainer.global_step}; saved {saved}; resume=auto continues")
        return EXIT_INTERRUPTED
    pipeline = runs.publish_pipeline(run_dir, saved)
    summary = summarize(trainer, bad_samples) | {"checkpoint": str(saved), "pipeline": str(pipeline)}
    write_results(run_dir, summary)
    _print_results(summary, run_dir)
    return 0


def summarize(trainer: pl.Trainer, bad_samples: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``summary.json`` holds besides paths; None stands for what was not measured."""
    from sd_lightning.callbacks import PortableCheckpoint, SampleGrid, Throughput

    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    samples = _callback(trainer, SampleGrid)
    throughput = _callback(trainer, Throughput)
    speed = throughput.summary() if throughput is not None else {}
    accuracy = samples.prompted_accuracy if samples is not None else None
    checkpoints = _callback(trainer, PortableCheckpoint)
    return {
        "steps": trainer.global_step,
        "train_seconds": round(checkpoints.train_seconds, 2),
        "images_per_second": speed.get("images_per_second"),
        "data_wait": speed.get("data_wait"),
        "peak_memory_gib": speed.get("peak_memory_gib"),
        "mfu": speed.get("mfu"),
        "final_loss": checkpoints.loss,
        "val_loss": metrics.get("val/loss"),
        "caption_gap": metrics.get("val/caption_gap"),
        "prompted_accuracy": accuracy,
        "prompted_accuracy_samples": samples.accuracy_samples if samples is not None and accuracy is not None else 0,
        "bad_samples": len(bad_samples),
        "bad_sample_names": sorted(bad_samples)[:100],
    }


def write_results(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` and ``report.html``."""
    from sd_lightning.report import read_metrics, write_report

    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    metrics = read_metrics(run_dir / "logs") if (run_dir / "logs").exists() else {}
    write_report(run_dir, summary, metrics, (run_dir / "config.yaml").read_text())


def _print_results(summary: Mapping[str, Any], run_dir: Path) -> None:
    from sd_lightning.lora import WEIGHTS_NAME as LORA_NAME

    lines = [f"steps              {summary['steps']} in {summary['train_seconds']:.0f} s"]
    if summary["images_per_second"]:
        lines.append(f"images per second  {summary['images_per_second']:.0f}")
    if summary["caption_gap"] is not None:
        lines.append(f"caption gap        {summary['caption_gap']:.3f} (0: the model ignores its prompts)")
    if summary["prompted_accuracy"] is not None:
        lines.append(
            f"prompted accuracy  {summary['prompted_accuracy']:.1%} of {summary['prompted_accuracy_samples']} pictures"
        )
    if summary["bad_samples"]:
        lines.append(f"bad samples        {summary['bad_samples']} left out, named in summary.json")
    pipeline = summary["pipeline"]
    lora = f"; then pipeline.load_lora_weights('{pipeline}')" if Path(pipeline, LORA_NAME).is_file() else ""
    lines += [
        f"pictures           {run_dir}/samples/",
        f"pipeline           {pipeline} (diffusers: DiffusionPipeline.from_pretrained{lora})",
        f"report             {run_dir}/report.html",
    ]
    print("\n".join(lines))


def _callback(trainer: pl.Trainer, kind: type) -> Any:
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def main() -> None:
    _conf.main("train", train, given=GIVEN, hints=HINTS)


if __name__ == "__main__":
    main()
