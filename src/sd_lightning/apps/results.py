"""Results of a run: the pipeline, ``summary.json``, the report, and a summary on the console."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lycoris import by_layer
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.far_runs import name_of
from sd_lightning.storage.runs import PLAN
from sd_lightning.storage.streamed_tensor import file_tensors

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.apps.run_spec import RunSpec
    from sd_lightning.callbacks import PortableCheckpoint
    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.storage.runs import RunFolder
    from sd_lightning.training.module import SDLightningModule

CallbackT = TypeVar("CallbackT", bound="pl.Callback")


def callback_of(trainer: pl.Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the trainer's callback of a class, if it has one."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def checkpoints_of(trainer: pl.Trainer) -> PortableCheckpoint:
    """Return the callback that saves checkpoints; the pre-flight refuses runs without one."""
    from sd_lightning.callbacks import PortableCheckpoint

    callback = callback_of(trainer, PortableCheckpoint)
    assert callback is not None
    return callback


@contextmanager
def locked(trainer: pl.Trainer, folder: RunFolder) -> Iterator[None]:
    """Lock a run's directory while its results are written, as ``fit`` did before."""
    if trainer.is_global_zero:
        folder.lock()
        runs.go_back(folder.path, trainer.global_step)  # fit does this too, if it has steps to train
        if (uploads := checkpoints_of(trainer).uploads) is not None:
            uploads.begin()
    try:
        yield
    finally:
        folder.unlock()


def catch_up(trainer: pl.Trainer, module: SDLightningModule, datamodule: SDDataModule) -> None:
    """Validate and draw samples for a run that was killed between its last checkpoint and its results."""
    from sd_lightning.callbacks import SampleGrid

    if datamodule.source_val is not None and trainer.limit_val_batches:
        trainer.validate(module, datamodule, verbose=False)
    if module.device != trainer.strategy.root_device:  # some strategies leave it in host memory
        module.to(trainer.strategy.root_device)
    samples = callback_of(trainer, SampleGrid)
    if samples is not None:
        samples.on_train_end(trainer, module)


def finish(trainer: pl.Trainer, datamodule: SDDataModule, spec: RunSpec) -> int:
    """Publish the pipeline, write summary and report, and print their paths.

    Returns:
        Exit code: 0, or 75 if a signal stopped the run.
    """
    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED, stopped_by_signal
    from sd_lightning.report import read_metrics, write_report

    bad_samples, waits = datamodule.bad.gather(), datamodule.loaders.waits()
    saved, is_stopped = checkpoints_of(trainer).last_saved, stopped_by_signal(trainer)
    if not trainer.is_global_zero:
        return EXIT_INTERRUPTED if is_stopped else 0
    if is_stopped:
        step, at = trainer.global_step, None if saved is None else checkpoint.step_of(saved)
        name = saved and name_of(saved)
        state = f"saved {name}" if at == step else f"not saved, since its loss is not finite; the last is {name}"
        print(f"stopped by a signal at step {step}; {state}; resume=auto continues")
        return EXIT_INTERRUPTED
    assert saved is not None
    run_dir = spec.output_dir
    saved, best = checkpoints_of(trainer).result or saved, checkpoints_of(trainer).best
    pipeline = runs.publish_pipeline(run_dir, saved)
    summary = _summary(trainer, datamodule, spec) | ({} if waits is None else {"encoders": waits})
    summary |= {} if best is None else best.summary()
    summary |= {
        "bad_samples": len(bad_samples),
        "bad_sample_names": sorted(bad_samples)[:100],
        "checkpoint": name_of(saved),
        "pipeline": str(pipeline) if spec.url is None else name_of(saved / "pipeline"),
    }
    on_cpu = trainer.strategy.root_device.type == "cpu"
    summary["plan"] = _against_plan(run_dir / PLAN, summary, on_cpu=on_cpu)
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    metrics = read_metrics(run_dir / "logs") if (run_dir / "logs").exists() else {}
    write_report(run_dir, summary, metrics, spec.yaml())
    print("\n".join(_lines(summary, run_dir)))
    return 0


def _summary(trainer: pl.Trainer, datamodule: SDDataModule, spec: RunSpec) -> dict[str, Any]:
    """Return the figures of ``summary.json``, and what a comparison of runs needs beside them.

    None marks values that were not measured.
    """
    from sd_lightning.apps.settings import preset_name
    from sd_lightning.callbacks import SampleGrid, Throughput
    from sd_lightning.planner.calibration import device_name

    checkpoints, metrics = checkpoints_of(trainer), trainer.callback_metrics
    samples, throughput = callback_of(trainer, SampleGrid), callback_of(trainer, Throughput)
    speed = throughput.summary() if throughput is not None else {}
    accuracy = samples.prompted_accuracy if samples is not None else None
    loss, gap = (float(metrics[name]) if name in metrics else None for name in ("val/loss", "val/caption_gap"))
    return {
        "steps": trainer.global_step,
        "train_seconds": round(checkpoints.train_seconds, 2),
        **{name: speed.get(name) for name in ("images_per_second", "data_wait", "peak_memory_gib", "mfu")},
        "final_loss": checkpoints.loss,
        "val_loss": loss,
        "caption_gap": gap,
        "no_caption_gap": None if gap is not None else datamodule.no_caption_gap or "nothing was validated",
        "prompted_accuracy": accuracy,
        "prompted_accuracy_samples": samples.accuracy_samples if samples is not None and accuracy is not None else 0,
        "hardware": device_name(of_cpu=trainer.strategy.root_device.type == "cpu"),
        "devices": trainer.world_size,
        "batch_size": datamodule.batch_size,
        "strategy": preset_name("strategy", spec["strategy"]),
        "precision": spec["trainer.precision"],
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def _against_plan(file: Path, summary: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any] | None:
    """Return predicted and measured memory and time of a run with ``strategy=auto``; None without a plan.

    Args:
        file: The run's ``plan.json``.
        summary: What was measured.
        on_cpu: Whether the measured memory is that of the process, of which the device's is a part.
    """
    if not file.is_file():
        return None
    plans = json.loads(file.read_text(encoding="utf-8"))
    plan, rate, peak = plans["plans"][0], summary["images_per_second"], summary["peak_memory_gib"]
    predicted = plan["device_peak"] + plan["host_peak"] * on_cpu
    return {
        "options": " ".join(plan["options"]),
        "speeds": plans["speeds"],
        "memory_gb": {"predicted": predicted / 1e9, "measured": peak and peak * 2**30 / 1e9},
        "step_seconds": {"predicted": plan["seconds"]["step"], "measured": rate and summary["batch_size"] / rate},
    }


def _line_of_plan(plan: Mapping[str, Any]) -> str:
    """Return predicted and measured values side by side."""
    memory, seconds = plan["memory_gb"], plan["step_seconds"]
    measured = ["not measured" if m is None else f"{m:.3g} measured" for m in (memory["measured"], seconds["measured"])]
    return (
        f"{memory['predicted']:.3g} GB predicted, {measured[0]}; "
        f"{seconds['predicted']:.3g} s a step predicted ({plan['speeds']}), {measured[1]}"
    )


def _lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return the summary's lines for the console."""
    rate, gap, bad = (summary[name] for name in ("images_per_second", "caption_gap", "bad_samples"))
    accuracy, num_drawn = (summary[name] for name in ("prompted_accuracy", "prompted_accuracy_samples"))
    pipeline = run_dir / "pipeline"
    measured = f"not measured: {summary['no_caption_gap']}"
    file = pipeline / LORA_NAME
    lora = f"; then pipeline.load_lora_weights('{pipeline}')" if file.is_file() else ""
    if lora and by_layer(file_tensors(file)):
        lora = "; its LoHa or LoKr: generate run=, or export format=comfyui or merge_lora=true"
    shown = {
        "steps": f"{summary['steps']} in {summary['train_seconds']:.0f} s",
        "images per second": rate and f"{rate:.0f}",
        "caption gap": measured if gap is None else f"{gap:.3f} (0: the model ignores its prompts)",
        "best": summary.get("best_step")
        and f"{summary['monitor']} {summary['best_value']:.5g} at step {summary['best_step']}",
        "prompted accuracy": None if accuracy is None else f"{accuracy:.1%} of {num_drawn} pictures",
        "encoders": summary.get("encoders"),
        "plan": summary["plan"] and _line_of_plan(summary["plan"]),
        "bad samples": bad and f"{bad} left out, named in summary.json",
        "pictures": (run_dir / "samples").is_dir() and f"{run_dir}/samples/",
        "pipeline": f"{pipeline} (diffusers: DiffusionPipeline.from_pretrained{lora})",
        "report": f"{run_dir}/report.html",
    }
    return [f"{name:<18} {text}" for name, text in shown.items() if text]
