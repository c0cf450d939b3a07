"""Train a latent-diffusion model: ``python -m sd_lightning.train [key=value …]``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning import _conf, checkpoint, runs
from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

GIVEN = {
    "module": {"latent_diffusion", "objective", "optimizer", "lr_scheduler"},
    "trainer": {"strategy", "callbacks", "logger"},
    "callbacks.checkpoint": {"resume"},
}
_PRECISIONS = ("32", "32-true", "bf16-mixed", "16-mixed")


def train(cfg: DictConfig) -> int:
    """Run the main job: build, fit, and write what a person looks at afterwards.

    Returns:
        Exit code: 0, or 75 if a signal stopped the run and ``resume=auto`` continues it.
    """
    run_dir = Path(cfg.output_dir)
    resume = preflight(cfg, run_dir)
    if resume is not None and 0 <= cfg.trainer.max_steps <= checkpoint.step_of(resume):
        log.info("%s is complete; raise trainer.max_steps to train on, results are in %s", resume, run_dir)
        return 0
    quiet_libraries()
    trainer = build_trainer(cfg, resume)
    datamodule = _conf.instantiate(cfg.data)
    module = build_module(cfg)
    _write_config(cfg, run_dir)
    trainer.fit(module, datamodule)
    return finish(trainer, run_dir, cfg)


# ---------------------------------------------------------------------- before anything is built


def preflight(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Refuse what cannot work before data or processes are touched.

    Returns:
        The checkpoint to resume, if any.
    """
    check_trainer(cfg)
    if not isinstance(cfg.overwrite, bool):
        raise UsageError(f"overwrite={cfg.overwrite}: expected true or false")
    for name in ("resume", "init_from", "output_dir"):
        if not isinstance(cfg[name], str | None):
            raise UsageError(f"{name}={cfg[name]}: expected a path; write {name}=runs/<name>")
    if cfg.resume is not None and cfg.init_from is not None:
        raise UsageError(
            f"got resume={cfg.resume} and init_from={cfg.init_from}; resume continues a run, init_from starts a new "
            "one from weights: give one of the two"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UsageError(f"got overwrite=true and resume={cfg.resume}; give one of the two")
    if cfg.init_from is not None:
        cfg.model.pretrained = str(runs.find_pipeline(cfg.init_from, who="init_from"))
    resume = None if cfg.resume is None else runs.find_checkpoint(cfg.resume, run_dir)
    if _is_first_process():
        runs.prepare(run_dir, resuming=cfg.resume is not None, overwrite=cfg.overwrite)
    return resume


def check_trainer(cfg: DictConfig) -> None:
    """Check precision, devices and batch size against each other and against this machine."""
    import torch

    from sd_lightning.data.sampler import micro_batch_size

    trainer = cfg.trainer
    precision = str(trainer.precision)
    if precision not in _PRECISIONS:
        raise UsageError(f"trainer.precision={precision}: expected one of {', '.join(_PRECISIONS)}")
    cuda = torch.cuda.device_count() if trainer.accelerator in ("auto", "cuda", "gpu") else 0
    if precision == "16-mixed" and not cuda:
        raise UsageError(
            "trainer.precision=16-mixed needs a CUDA device, and Lightning would silently compute in bfloat16 on CPU; "
            "write trainer.precision=bf16-mixed or 32"
        )
    if trainer.accelerator in ("cuda", "gpu") and not cuda:
        raise UsageError(f"trainer.accelerator={trainer.accelerator}: there is no CUDA device; write cpu or auto")
    devices = _num_devices(trainer.devices, cuda)
    if cuda and devices > cuda:
        raise UsageError(
            f"trainer.devices={devices}: this machine has {cuda} CUDA device(s); write trainer.devices={cuda}"
        )
    processes = devices * trainer.num_nodes
    if processes > 1 and cfg.strategy["_target_"].endswith(".single"):
        raise UsageError(
            f"strategy=single is one process, but trainer.devices={trainer.devices} trainer.num_nodes="
            f"{trainer.num_nodes} ask for {processes}; add strategy=ddp"
        )
    for name in ("accumulate_grad_batches", "max_steps"):
        if trainer[name] < 1:
            raise UsageError(f"trainer.{name}={trainer[name]}: expected at least 1")
    micro_batch_size(cfg.data.batch_size, processes, trainer.accumulate_grad_batches)


def _num_devices(devices: Any, cuda: int) -> int:
    if isinstance(devices, int) and devices >= 1:
        return devices
    if devices in ("auto", -1, "-1"):
        return max(cuda, 1)
    if isinstance(devices, str) and devices.isdecimal() and int(devices) >= 1:
        return int(devices)
    if not isinstance(devices, (int, str)) and len(devices):
        return len(devices)
    raise UsageError(f"trainer.devices={devices}: expected a number of at least 1, a list of indices, or auto")


def _is_first_process() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


# ---------------------------------------------------------------------- building


def build_trainer(cfg: DictConfig, resume: Path | None) -> pl.Trainer:
    """Build Lightning's trainer with our callbacks, loggers and strategy."""
    callbacks = []
    for name, node in cfg.callbacks.items():
        given = {"resume": resume} if name == "checkpoint" else {}
        callbacks.append(_conf.instantiate(node, **given))
    loggers = [_conf.instantiate(node) for node in (cfg.logger or {}).values()]
    options = {
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        "default_root_dir": cfg.output_dir,
    }
    return _conf.instantiate(
        cfg.trainer, strategy=_conf.instantiate(cfg.strategy), callbacks=callbacks, logger=loggers or False, **options
    )


def build_module(cfg: DictConfig) -> pl.LightningModule:
    """Build the model, apply the speed switches, and wrap it for training."""
    latent_diffusion = _conf.instantiate(cfg.model)
    module = _conf.instantiate(
        cfg.module,
        latent_diffusion=latent_diffusion,
        objective=_conf.instantiate(cfg.objective),
        optimizer=_conf.instantiate(cfg.optimizer),
        lr_scheduler=_conf.instantiate(cfg.lr_scheduler),
    )
    _conf.instantiate(cfg.speed).apply_(module.trained_networks().values())
    return module


def _write_config(cfg: DictConfig, run_dir: Path) -> None:
    from omegaconf import OmegaConf

    if _is_first_process():
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(cfg))


# ---------------------------------------------------------------------- afterwards


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
    return {
        "steps": trainer.global_step,
        "train_seconds": round(_callback(trainer, PortableCheckpoint).train_seconds, 2),
        "images_per_second": speed.get("images_per_second"),
        "data_wait": speed.get("data_wait"),
        "peak_memory_gib": speed.get("peak_memory_gib"),
        "mfu": speed.get("mfu"),
        "final_loss": metrics.get("train/loss"),
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
    lines += [
        f"pictures           {run_dir}/samples/",
        f"pipeline           {summary['pipeline']} (diffusers: DiffusionPipeline.from_pretrained)",
        f"report             {run_dir}/report.html",
    ]
    print("\n".join(lines))


def _callback(trainer: pl.Trainer, kind: type) -> Any:
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def main() -> None:
    _conf.main("train", train, given=GIVEN)


if __name__ == "__main__":
    main()
