"""Today's models on one GPU, at their published size, random weights: predicted against measured memory and time.

Latents and text embeddings come ready, as from a store. Memory is what torch's allocator holds at the peak; the
planner's allowance for the CUDA context is left out. Time is predicted from the GPU's data sheet, without a
calibration.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lines import Measured
from sd_lightning.quantization.base import Base
from training_runs import Run

BARS = {"memory_off_by": "<= 0.1"}


@dataclass(frozen=True)
class Setting:
    """A way to train."""

    model: str
    strategy: str = "single"
    batch_size: int = 4
    resolution: int = 512
    precision: str = "bf16-mixed"
    rank: int = 0
    """Of adapters; 0 trains all weights."""
    checkpointing: bool = True
    base: Base | None = None
    """What the frozen weights are in, beneath adapters: "nf4", "int8"."""

    def __str__(self) -> str:
        trained = f"lora{self.rank}" if self.rank else "full"
        trained += f"_{self.base}" if self.base else ""
        size = "" if self.resolution == 512 else f"_{self.resolution}px"
        precision = self.precision.replace("-", "_")
        return f"{self.model}_{trained}_{self.strategy}_{self.batch_size}_{precision}{size}"


@dataclass(frozen=True)
class Predicted:
    """What the planner says of a setting."""

    nbytes: int
    """Of torch's allocator, at the peak of a step."""
    seconds: float
    """Of a step."""
    options: dict[str, Any]
    """Of the strategy, as the planner chose them."""


SETTINGS = (
    Setting("klein_4b", rank=16, precision="bf16-true"),
    Setting("klein_4b", rank=16, precision="bf16-true", checkpointing=False, batch_size=2),
    Setting("z_image", rank=16, precision="bf16-true"),
    Setting("klein_4b", "gemini", batch_size=2),
    Setting("klein_4b", "gemini_offload"),
    Setting("sd35_medium", "gemini"),
    Setting("sd35_large", rank=16, precision="bf16-true"),
    Setting("flux1_dev", rank=16, precision="bf16-true"),
    Setting("krea2", rank=64, precision="bf16-true"),
    Setting("krea2", rank=64, precision="bf16-true", batch_size=1, resolution=1024),
    Setting("qwen_image", rank=16, precision="bf16-true", batch_size=2),
)
MEASURED = {
    str(each): Run(
        each.model,
        each.resolution,
        each.strategy,
        each.batch_size,
        precision=each.precision,
        encoders="none",
        averages=False,
    )
    for each in SETTINGS
    if not each.rank
}
TABLE = {
    "today's models on a GPU, predicted by measured, memory: klein-4B LoRA, without recomputation; Z-Image LoRA; "
    "klein-4B all weights, offloaded; largest error of all": (
        "{klein_4b_lora16_single_4_bf16_true_memory}, {klein_4b_lora16_single_2_bf16_true_memory}; "
        "{z_image_lora16_single_4_bf16_true_memory}; {klein_4b_full_gemini_2_bf16_mixed_memory}, "
        "{klein_4b_full_gemini_offload_4_bf16_mixed_memory}; {memory_off_by}"
    ),
    "the same, time": (
        "{klein_4b_lora16_single_4_bf16_true_time}, {klein_4b_lora16_single_2_bf16_true_time}; "
        "{z_image_lora16_single_4_bf16_true_time}; {klein_4b_full_gemini_2_bf16_mixed_time}, "
        "{klein_4b_full_gemini_offload_4_bf16_mixed_time}"
    ),
    "the same: Stable Diffusion 3.5 medium all weights, large LoRA; FLUX.1-dev LoRA; Krea 2 LoRA: memory; time": (
        "{sd35_medium_full_gemini_4_bf16_mixed_memory}, {sd35_large_lora16_single_4_bf16_true_memory}, "
        "{flux1_dev_lora16_single_4_bf16_true_memory}, {krea2_lora64_single_4_bf16_true_memory}; "
        "{sd35_medium_full_gemini_4_bf16_mixed_time}, {sd35_large_lora16_single_4_bf16_true_time}, "
        "{flux1_dev_lora16_single_4_bf16_true_time}, {krea2_lora64_single_4_bf16_true_time}"
    ),
    "klein-4B on a GPU, 512 x 512: GB of LoRA at batch 4, of all weights resident at batch 2, offloaded at batch 4": (
        "{klein_4b_lora16_single_4_bf16_true_gb}; {klein_4b_full_gemini_2_bf16_mixed_gb}; "
        "{klein_4b_full_gemini_offload_4_bf16_mixed_gb}"
    ),
    "the same, images per second": (
        "{klein_4b_lora16_single_4_bf16_true_images_per_second}; "
        "{klein_4b_full_gemini_2_bf16_mixed_images_per_second}; "
        "{klein_4b_full_gemini_offload_4_bf16_mixed_images_per_second}"
    ),
    "on a GPU, 512 x 512, batch 4, GB and images per second: Stable Diffusion 3.5 medium all weights, large LoRA; "
    "FLUX.1-dev LoRA; Krea 2 LoRA": (
        "{sd35_medium_full_gemini_4_bf16_mixed_gb}, {sd35_medium_full_gemini_4_bf16_mixed_images_per_second}; "
        "{sd35_large_lora16_single_4_bf16_true_gb}, {sd35_large_lora16_single_4_bf16_true_images_per_second}; "
        "{flux1_dev_lora16_single_4_bf16_true_gb}, {flux1_dev_lora16_single_4_bf16_true_images_per_second}; "
        "{krea2_lora64_single_4_bf16_true_gb}, {krea2_lora64_single_4_bf16_true_images_per_second}"
    ),
}
DRY: dict[str, Any] = {
    "device": "h200",
    "settings": (
        Setting("tiny_klein", rank=2, batch_size=2, resolution=32, precision="32-true"),
        Setting("tiny_z_image", "gemini", batch_size=2, resolution=32, precision="32-true", checkpointing=False),
    ),
    "steps": 4,
    "processes": 0,
}


def measure(
    *, settings: tuple[Setting, ...] = SETTINGS, steps: int = 6, device: str | None = None, processes: int = 8
) -> Iterator[Measured]:
    """Train some steps under every setting; yield all metrics after each run.

    A setting that fails takes no other with it; the first failure is raised at the end.

    Args:
        settings: What is trained.
        steps: Optimizer steps of each run; the first two do not count.
        device: Whose data sheet predicts the time; None: that of this GPU.
        processes: That predict meanwhile, so that the GPU does not wait; 0 predicts in this one.
    """
    metrics: dict[str, float | list[float] | str] = {}
    off: list[float] = []
    failures: list[Exception] = []
    device = device or ("h200" if "H200" in torch.cuda.get_device_name() else "h100")
    told = predictions(settings, device, processes)
    for setting, predict in zip(settings, told):
        name = str(setting)
        try:
            predicted = predict()
            seconds, peak = trained(setting, predicted.options, steps)
        except Exception as error:
            traceback.print_exc()
            failures.append(error)
            continue
        metrics[f"{name}_ms"], metrics[f"{name}_gb"] = 1e3 * seconds, peak / 1e9
        metrics[f"{name}_images_per_second"] = setting.batch_size / seconds
        metrics[f"{name}_time"] = predicted.seconds / seconds
        if peak:
            metrics[f"{name}_memory"] = predicted.nbytes / peak
            off.append(abs(predicted.nbytes / peak - 1))
        metrics["memory_off_by"] = max(off, default=0.0)
        print(name, {key: value for key, value in metrics.items() if key.startswith(name)}, file=sys.stderr, flush=True)
        yield metrics
    if failures:
        raise failures[0]


def predictions(settings: Sequence[Setting], device: str, processes: int) -> Iterator[Callable[[], Predicted]]:
    """Yield for each setting what returns, or waits for, its prediction."""
    if not processes:
        yield from (partial(planned, setting, device) for setting in settings)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from [pool.submit(planned, setting, device).result for setting in settings]


def planned(setting: Setting, device: str) -> Predicted:
    """Return the planner's prediction for a setting."""
    from sd_lightning import LatentDiffusion
    from sd_lightning.models.lora import Lora
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.search import plan
    from sd_lightning.strategies import presets

    run = TrainingRun(
        setting.batch_size,
        setting.resolution,
        setting.precision,
        lora=Lora(rank=setting.rank, base=setting.base) if setting.rank else None,
        optimizer=_optimizer(),
        encodes=False,
    )
    candidates = [each for each in presets.candidates() if each.name == setting.strategy]
    model = LatentDiffusion.build(setting.model, device="meta")
    options: dict[str, Any] = {
        "run": run,
        "candidates": candidates,
        "checkpointing": setting.checkpointing,
        "tf32": True,
    }
    result = plan(model, device, micro_batches=[setting.batch_size], **options)
    (found,) = result.best or result.too_large
    step = max(found.memory.on_device[:2], key=lambda phase: phase.nbytes)  # nothing is encoded
    return Predicted(step.nbytes - step.parts["allowance"], found.time.total, dict(found.candidate.settings))


def _optimizer() -> Any:
    return partial(torch.optim.AdamW, lr=1e-5, fused=True)


def trained(setting: Setting, chosen: dict[str, Any], steps: int) -> tuple[float, int]:
    """Train with options of the strategy; return the median seconds of a step, and the peak bytes of the allocator."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from sd_lightning import LatentDiffusion, SDLightningModule
    from sd_lightning.models.lora import Lora
    from sd_lightning.strategies import presets
    from sd_lightning.strategies.processes.group import leave_process_group
    from sd_lightning.training.speed import Speed, precision_options

    on_cuda = torch.cuda.is_available()
    gc.collect()
    model = LatentDiffusion.build(setting.model, device="meta")
    batch = _batch(model, setting)
    name = model.family.denoiser
    model.networks[name] = _denoiser(model, setting, "cuda" if on_cuda else "cpu")
    for encoder in model.text_encoders:  # the batches have what they give
        del model.networks[encoder]
    model.networks["vae"] = model.components["vae"].instantiate()
    lora = Lora(rank=setting.rank, base=setting.base) if setting.rank else None
    module = SDLightningModule(model, optimizer=_optimizer(), lora=lora, offload_encoders=True)
    if setting.strategy != "single":  # it finds weights in host memory
        module.cpu()
    Speed(gradient_checkpointing=setting.checkpointing, allow_tf32=True).apply_(module.trained_networks())
    ends: list[float] = []

    class Ends(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if on_cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if len(ends) == 2 and on_cuda:
                torch.cuda.reset_peak_memory_stats()

    (candidate,) = (each for each in presets.candidates() if each.name == setting.strategy)
    strategy = "auto" if setting.strategy == "single" else candidate.build(**chosen)
    options: dict[str, Any] = precision_options(setting.precision, strategy)
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, devices=1, max_steps=steps, callbacks=[Ends()], enable_model_summary=False, **options
    )
    batches: Any = [batch] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
    leave_process_group()
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    del trainer, module, model, strategy
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return statistics.median(after - before for before, after in zip(ends[1:], ends[2:])), peak


def _denoiser(model: Any, setting: Setting, device: str) -> nn.Module:
    """Return the denoiser with random weights, drawn on the device, which is a hundred times faster."""
    dtype = torch.bfloat16 if setting.precision == "bf16-true" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model.components[model.family.denoiser].instantiate()
    finally:
        torch.set_default_dtype(before)


def _batch(model: Any, setting: Setting) -> dict[str, Any]:
    """Return a batch of random latents and text embeddings."""
    from sd_lightning.models.families.base import SIZES
    from sd_lightning.models.families.conditioning import map_conditioning
    from sd_lightning.models.meta import meta_networks

    family, count = model.family, setting.batch_size
    ids = {name: each.expand(count, -1) for name, each in model.tokenize(["a photo of a cat"]).items()}
    with torch.no_grad():
        meta = {name: each.to("meta") for name, each in ids.items()}
        embeddings = family.embed(meta_networks(model, family.text_encoders), meta)
    masks = {tuple(each.shape) for name, each in ids.items() if name.endswith("_mask")}
    filled = map_conditioning(
        embeddings, lambda each: torch.ones(each.shape) if tuple(each.shape) in masks else torch.randn(each.shape)
    )
    return {
        "latents": torch.randn(count, *model.latent_space.shape(setting.resolution, setting.resolution)),
        "text_embeddings": filled,
        **{name: torch.full((count, 2), setting.resolution) for name in SIZES},
        "epoch": torch.zeros(count, dtype=torch.int64),
        "index": torch.arange(count),
    }
