"""Train a latent-diffusion model: ``python -m sd_lightning.train [key=value …]``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sd_lightning import _conf
from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.preflight import LOAD_MODEL, check_model, is_lightning_checkpoint, parts_of, preflight
from sd_lightning.storage import checkpoint, runs

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from omegaconf import DictConfig

    from sd_lightning.models.latent_diffusion import LatentDiffusion

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
    check_model(cfg)
    datamodule = _conf.instantiate(cfg.data)
    module = build_module(cfg)
    check_parts(trainer, module, datamodule)
    open_run(cfg, run_dir, trainer)
    from sd_lightning.strategies.processes.group import parting

    with parting(trainer):
        trainer.fit(module, datamodule)
        with locked(trainer, run_dir):
            if trained:
                catch_up(trainer, module, datamodule)
            return finish(trainer, run_dir)


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
    from sd_lightning.training.precision import precision_options

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
    if is_lightning_checkpoint(cfg.init_from):
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
        **{name: part for name, part in parts_of(cfg).items() if part is not None},
    )


def _trained_networks(cfg: DictConfig) -> tuple[str, ...]:
    """Name the networks that are trained as they are in their files."""
    grows = cfg.get("learned_token") is not None  # a row is added to the text encoder's weights
    return ("unet", *(_TEXT_ENCODERS if cfg.module.train_text_encoder and not grows else ()))


def deferral(cfg: DictConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the argument of the model that leaves the weights of networks in their files, where that is possible."""
    if cfg.model["_target_"] != LOAD_MODEL or is_lightning_checkpoint(cfg.init_from):
        return {}  # a Lightning checkpoint is loaded before there is a trainer
    return {"deferred": tuple(names)}


def check_parts(trainer: pl.Trainer, module: Any, datamodule: Any) -> None:
    """Check what shows only when the parts are there, but must not wait until they are at work."""
    from sd_lightning.callbacks import EngineMemory, PortableCheckpoint, SampleGrid
    from sd_lightning.strategies import engine_of

    memory = _callback(trainer, EngineMemory)
    if memory is not None:
        memory.check(trainer.strategy)
    datamodule.check_batches(trainer.num_devices * trainer.num_nodes, trainer.accumulate_grad_batches)
    module.configure_optimizers()  # makes no states yet
    saving = _callback(trainer, PortableCheckpoint)
    saving.check_resume(module, datamodule)
    if is_first_process():  # it looks at files; the others hear of it before the first step
        saving.check_data(datamodule)
    engine_of(trainer.strategy).check(trainer, module)
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


@contextmanager
def locked(trainer: pl.Trainer, run_dir: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory, as ``fit`` did, while its results are made."""
    if trainer.is_global_zero:
        runs.lock(run_dir)
        runs.go_back(run_dir, trainer.global_step)  # fit does, too, where there is something to train
    try:
        yield
    finally:
        runs.unlock(run_dir)


def catch_up(trainer: pl.Trainer, module: pl.LightningModule, datamodule: Any) -> None:
    """Validate and draw for a run that was killed between its last checkpoint and its results."""
    from sd_lightning.callbacks import SampleGrid

    if datamodule.source_val is not None and trainer.limit_val_batches:
        trainer.validate(module, datamodule, verbose=False)
    if module.device != trainer.strategy.root_device:  # some strategies leave it in host memory
        module.to(trainer.strategy.root_device)
    samples = _callback(trainer, SampleGrid)
    if samples is not None:
        samples.on_train_end(trainer, module)


def finish(trainer: pl.Trainer, run_dir: Path) -> int:
    """Publish the pipeline, write summary and report, and tell where everything is."""
    from sd_lightning.callbacks import PortableCheckpoint, StopOnSignal
    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED

    bad_samples = trainer.datamodule.gather_bad_samples()  # type: ignore[attr-defined]
    saved = _callback(trainer, PortableCheckpoint).last_saved
    stop = _callback(trainer, StopOnSignal)
    if not trainer.is_global_zero:
        return EXIT_INTERRUPTED if stop is not None and stop.stopped else 0
    if stop is not None and stop.stopped:
        step, at = trainer.global_step, None if saved is None else checkpoint.step_of(saved)
        told = f"saved {saved}" if at == step else f"not saved, since its loss is not finite; the last is {saved}"
        print(f"stopped by a signal at step {step}; {told}; resume=auto continues")
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
    gap, why = metrics.get("val/caption_gap"), trainer.datamodule.no_caption_gap  # type: ignore[attr-defined]
    return {
        "steps": trainer.global_step,
        "train_seconds": round(checkpoints.train_seconds, 2),
        "images_per_second": speed.get("images_per_second"),
        "data_wait": speed.get("data_wait"),
        "peak_memory_gib": speed.get("peak_memory_gib"),
        "mfu": speed.get("mfu"),
        "final_loss": checkpoints.loss,
        "val_loss": metrics.get("val/loss"),
        "caption_gap": gap,
        "no_caption_gap": None if gap is not None else why or "nothing was validated",
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
    from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME

    lines = [f"steps              {summary['steps']} in {summary['train_seconds']:.0f} s"]
    if summary["images_per_second"]:
        lines.append(f"images per second  {summary['images_per_second']:.0f}")
    if summary["caption_gap"] is not None:
        lines.append(f"caption gap        {summary['caption_gap']:.3f} (0: the model ignores its prompts)")
    else:
        lines.append(f"caption gap        not measured: {summary['no_caption_gap']}")
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
