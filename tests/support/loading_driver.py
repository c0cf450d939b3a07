"""Loads and saves under several strategies in one set of processes, and tells the memory that each rank needed.

``torchrun --nproc-per-node N loading_driver.py JOBS.json RESULTS.json``: RESULTS gets, per job, one entry per rank.
:func:`torchrun` is the call for tests, :func:`write_pipeline` makes a pipeline folder of any size.
"""

import ctypes
import gc
import json
import math
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

import strategy_table
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.callbacks import PortableCheckpoint
from sd_lightning.callbacks.checkpoint.pipeline import frozen_weights_file
from sd_lightning.models.families import Component, architecture, family_of
from sd_lightning.models.lora import Lora, plain_names
from sd_lightning.state.shards import SavedParameter
from sd_lightning.storage import runs
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies import training_state
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy
from sd_lightning.training.speed import precision_options
from small_training import adamw, data, fit, trainer_of

_PERIOD = 2039
_BLOCK = _PERIOD * 4096
PART = {
    "sample_size": 8,
    "block_out_channels": [320, 640, 640],
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
}
"""The blocks of sd21, some of them: what takes DDP and DeepSpeed too long with all of it."""
WIDE: dict[str, dict[str, Any]] = {
    "tiny_klein": {
        "num_attention_heads": 10,
        "attention_head_dim": 64,
        "axes_dims_rope": [16, 16, 16, 16],
        "num_single_layers": 12,
    },
    "tiny_z_image": {
        "dim": 640,
        "n_heads": 10,
        "n_kv_heads": 10,
        "axes_dims": [32, 16, 16],
        "n_layers": 12,
    },
    "tiny_qwen_image": {
        "num_attention_heads": 6,
        "attention_head_dim": 64,
        "axes_dims_rope": [16, 24, 24],
        "num_layers": 12,
    },
    "tiny_krea2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "attention_head_dim": 64,
        "axes_dims_rope": [16, 24, 24],
        "intermediate_size": 1365,
        "num_layers": 12,
    },
    "tiny_qwen_image_21": {
        "num_attention_heads": 10,
        "attention_head_dim": 64,
        "axes_dims_rope": [16, 24, 24],
        "num_layers": 12,
    },
    "tiny_sd3": {
        "num_attention_heads": 8,
        "attention_head_dim": 64,
        "caption_projection_dim": 512,
        "num_layers": 10,
    },
    "tiny_flux": {
        "num_attention_heads": 8,
        "attention_head_dim": 64,
        "axes_dims_rope": [16, 24, 24],
        "num_single_layers": 12,
    },
}
"""Transformers wide enough for their memory to be seen among all else that a process has."""


def values_at(name: str, index: Tensor) -> Tensor:
    """Return the weights at flat indices of a parameter, exact in float16 and of the size that real ones have."""
    return ((index + zlib.crc32(name.encode()) % _PERIOD) % _PERIOD - _PERIOD // 2).float() / 2**15


def write_pipeline(folder: Path, base: str = "tiny", **config: Any) -> None:
    """Write a pipeline with tiny frozen parts and a denoiser in float16, of which nothing is ever in memory as a whole.

    Args:
        folder: Written into.
        base: Tiny architecture; the denoiser of "tiny" itself is sd21's.
        **config: What the denoiser's configuration has beside that.
    """
    tiny = architecture(base)
    networks = dict(tiny.networks)
    if base == "tiny":
        networks["unet"] = architecture("sd21").networks["unet"]
        clip = {**tiny.networks["text_encoder"].config, "hidden_size": 1024, "num_hidden_layers": 1}
        networks["text_encoder"] = Component("transformers", "CLIPTextModel", clip)
    name = family_of(tiny.pipeline_class, who="write_pipeline").denoiser
    networks[name] = replace(networks[name], config={**networks[name].config, **config})
    model = LatentDiffusion.build(replace(tiny, networks=networks), device="meta")
    small = LatentDiffusion.build(replace(tiny, networks=networks | {name: tiny.networks[name]}))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.denoiser.state_dict().items()}
    model.networks |= {each: small.networks[each] for each in networks if each != name}
    model.save_pretrained(folder, skip=(name,))
    ramp = values_at("", torch.arange(_BLOCK + _PERIOD) - zlib.crc32(b"") % _PERIOD).half()
    tensors = {
        key: StreamedTensor(torch.float16, shape, partial(_slices, ramp, key, math.prod(shape)))
        for key, shape in shapes.items()
    }
    write_streamed(folder / name / "diffusion_pytorch_model.safetensors", tensors)


def _slices(ramp: Tensor, name: str, numel: int) -> Iterator[Tensor]:
    phase = zlib.crc32(name.encode()) % _PERIOD
    for start in range(0, numel, _BLOCK):
        yield ramp[phase : phase + min(_BLOCK, numel - start)]


def begin_peak() -> int:
    """Give unused memory back and let the kernel forget the peak (a child's starts at its parent's); bytes in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """Return ``VmRSS`` (bytes in use now) or ``VmHWM`` (the most since :func:`begin_peak`)."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Measured(PortableCheckpoint):
    """Fills the moments instead of training, saves, loads what was saved, and notes what each needed."""

    def __init__(self, job: dict[str, Any], base: int) -> None:
        super().__init__(job["run_dir"], every_n_steps=0)
        self.job = job
        self.base = base
        self.found: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            runs.mark(self.run_dir)
        self.found["largest"] = max(4 * p.numel() for p in pl_module.denoiser.parameters())
        self.found["whole"] = sum(4 * p.numel() for p in pl_module.denoiser.parameters() if p.requires_grad)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found["peak"] = status("VmHWM") - self.base
        self.found["weights"] = status("VmRSS") - self.base
        shards = training_state(trainer).parameter_shards()
        self.found["own"] = sum(4 * (shard.end - shard.begin) for shard in shards)
        engine = getattr(trainer.strategy, "engine", None)
        chunks = [] if engine is None else engine.chunks
        self.found["shard"] = sum(4 * chunk.bounds.numel for chunk in chunks) or self.found["own"]  # with padding
        self.found["differing"] = [shard.name for shard in shards if not _is_as_written(shard)]
        super().on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.job["save"]:
            return
        super().on_train_start(trainer, pl_module)
        for group in trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                moments = {kind: torch.full_like(parameter, 0.5) for kind in ("exp_avg", "exp_avg_sq")}
                trainer.optimizers[0].state[parameter] = {"step": torch.tensor(1.0), **moments}
        before = begin_peak()
        self.found["with_moments"] = before - self.base
        saved = self.save(trainer, pl_module)
        self.found["saving"] = status("VmHWM") - before
        before = begin_peak()
        self._load(trainer, saved)
        self.found["loading"] = status("VmHWM") - before

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """There is nothing new to save."""

    def _load(self, trainer: Any, saved: Path) -> None:
        state = training_state(trainer)
        kinds = {"exp_avg", "exp_avg_sq"}
        parameters = {
            shard.name: SavedParameter(shard.shape, dict.fromkeys(kinds, shard.shape), {"step": torch.tensor(1.0)})
            for shard in state.parameter_shards()
        }
        with ShardedTensors(saved / "state") as store:

            def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
                store.read_into(f"{kind}/{name}", out, begin, end)

            state.load(parameters, state.optimizer_groups(), read)


def _is_as_written(shard: Any) -> bool:
    count = min(shard.end - shard.begin, 4096)
    index = torch.linspace(0, max(shard.end - shard.begin - 1, 0), count, dtype=torch.float64).long()
    name = shard.name.partition(".")[2]
    return torch.equal(shard.master.reshape(-1)[index], values_at(name, index + shard.begin))


class MeasuredLora(PortableCheckpoint):
    """Notes what a run keeps of a UNet with adapters, and the most that it needed until it was set up."""

    def __init__(self, job: dict[str, Any], base: int) -> None:
        super().__init__(job["run_dir"], every_n_steps=0)
        self.base = base
        self.found: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.found["largest"] = max(4 * p.numel() for p in pl_module.denoiser.parameters())
        self.found["float32"] = sum(4 * p.numel() for p in pl_module.denoiser.parameters())
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found["peak"] = status("VmHWM") - self.base
        engine = getattr(trainer.strategy, "engine", None)
        if engine is None:
            self.found["kept"] = sum(p.nbytes for p in pl_module.denoiser.parameters())
        else:
            statistics = engine.statistics()
            self.found["kept"] = sum(n for k, n in statistics.items() if k.startswith("bytes/"))
        self.found["differing"] = []
        for plain, name in plain_names(pl_module.unet.state_dict()).items():
            if plain.endswith(("conv_in.weight", "to_q.weight", "to_k.weight")):  # adapters are put around to_q
                parameter = pl_module.unet.get_parameter(name)
                whole = parameter.detach()
                if engine is not None:
                    whole = next(weight for each, weight in engine.whole_weights() if each is parameter)
                expected = values_at(plain, torch.arange(whole.numel())).bfloat16()
                if not torch.equal(whole.reshape(-1), expected):
                    self.found["differing"].append(plain)
        self.found["saved"] = self._saved_differing()
        super().on_fit_start(trainer, pl_module)

    def _saved_differing(self) -> list[str]:
        """Compare some of the frozen weights that the run keeps for its pipelines, which are not rounded."""
        with safe_open(frozen_weights_file(self.run_dir, "unet"), framework="pt") as file:
            keys = [key for key in file.keys() if "base_layer.weight" in key or "conv_in" in key][::20]
            plain = [key.replace(".base_layer.", ".") for key in keys]
            return [
                key
                for key, name in zip(keys, plain, strict=True)
                if not torch.equal(
                    (found := file.get_tensor(key)).reshape(-1), values_at(name, torch.arange(found.numel()))
                )
            ]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """There is nothing new to save."""


class Untrained(SDLightningModule):
    """Ends every epoch before its first batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:  # type: ignore[override]
        return -1


class SetUpDDP(DDPStrategy):
    """DDP that notes what there was before it made its own buffers."""

    def setup(self, trainer: Any) -> None:
        self.peak = status("VmHWM")
        super().setup(trainer)


class SetUpZero3(DeepSpeedStrategy):
    """ZeRO-3 that notes what there was before the engine flattened the partitions."""

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.peak = status("VmHWM")
        return super()._setup_model_and_optimizer(*args, **kwargs)


def strategy_of(name: str) -> Any:
    """Return a strategy; of DDP and ZeRO-3, which need more for a moment, one that notes what there was before."""
    replaced: dict[type, type] = {DDPStrategy: SetUpDDP}
    if name.startswith("zero3"):
        replaced[DeepSpeedStrategy] = SetUpZero3
    return strategy_table.strategy_of(
        {"gemini": "gemini_default", "fsdp_replicas": "hsdp"}.get(name, name), replaced=replaced
    )


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Set a strategy up with a model whose weights are in files; save and load as the job says."""
    base = begin_peak()
    strategy = strategy_of(job["strategy"])
    measured = Measured(job, base)
    # Gemini allocates moments when it is set up, torch's optimizers and so the others in the first step.
    optimizer = partial(torch.optim.SGD, lr=0.1) if job["strategy"] == "gemini" else adamw
    module = Untrained(LatentDiffusion.from_pretrained(job["folder"], deferred=("denoiser",)), optimizer=optimizer)
    fit(module, data(batch_size=2), 1, measured, strategy=strategy, devices=2, max_epochs=1)
    if hasattr(strategy, "peak"):
        measured.found["before_engine"] = strategy.peak - base
    return measured.found


def measure_lora(job: dict[str, Any]) -> dict[str, Any]:
    """Set a strategy up that keeps frozen weights in bfloat16."""
    base = begin_peak()
    measured = MeasuredLora(job, base)
    model = LatentDiffusion.from_pretrained(job["folder"], deferred=("unet",) if job["deferred"] else ())
    module = Untrained(model, optimizer=partial(torch.optim.SGD, lr=0.1), lora=Lora(target_modules=["to_q", "to_v"]))
    strategy = strategy_of(job["strategy"])
    options = {"max_epochs": 1, **precision_options("bf16-true", strategy)}
    fit(module, data(batch_size=2), 1, measured, strategy=strategy, devices=2, **options)
    if hasattr(strategy, "peak"):  # DDP then sends all weights once, 250 MiB at a time
        measured.found["peak"] = strategy.peak - base
    return measured.found


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train a step from weights in files or in memory, or only validate; return checkpoint and metrics."""
    trained = ("denoiser",) if job.get("frozen_text") else ("denoiser", "text_encoders")
    names = trained if job["deferred"] else ()
    model = LatentDiffusion.from_pretrained(job["folder"], deferred=names)
    lora = Lora(rank=3, target_modules=job.get("targets", ["to_q", "to_v", "conv1"])) if job.get("lora") else None
    module = SDLightningModule(model, optimizer=adamw, train_text_encoder=len(trained) > 1, lora=lora)
    checkpoint = PortableCheckpoint(job["run_dir"], every_n_steps=0)
    options: dict[str, Any] = {"precision": job.get("precision", "32-true"), "limit_val_batches": 1}
    options |= {"accelerator": job.get("accelerator", "cpu"), "devices": job.get("devices", 2)}
    trainer = trainer_of(1, checkpoint, strategy=strategy_of(job["strategy"]), **options)
    if job["do"] == "validate":
        return {"metrics": trainer.validate(module, data(), verbose=False)[0]}
    trainer.fit(module, data())
    return {"checkpoint": str(checkpoint.last_saved)}


def torchrun(jobs: list[dict[str, Any]], folder: Path, *, timeout: int) -> list[list[dict[str, Any]]]:
    """Run jobs of this file on two gloo processes; return, per job, what each rank found."""
    job_file, result_file = folder / "jobs.json", folder / "results.json"
    job_file.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # Freed tensors go back to the system at once: what is measured is what is alive, and not holes between tensors.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    done = subprocess.run(
        [*command, str(job_file), str(result_file)], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results: list[list[dict[str, Any]]] = json.loads(result_file.read_text())
    return results


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job; return what this rank found."""
    return {"measure": measure, "measure_lora": measure_lora}.get(job["do"], train)(job)


if __name__ == "__main__":
    results, start = [], time.perf_counter()
    for each in json.loads(Path(sys.argv[1]).read_text()):
        mine = run(each)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine)
        results.append(everyone)
        print(f"{time.perf_counter() - start:.1f} s: {each} {mine}", flush=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
