"""Host memory that each kind of offloading really takes on a GPU, beside what its strategy declares.

The network has 35 million weights. "host" is what the machine lost of its available memory, "resident" what the kernel
counts for the process, and "pinned" what torch's allocator of pinned memory holds, which rounds up to powers of two;
what is page-locked elsewhere is only in the first. All are taken after two steps, beyond what was there when CUDA was
ready.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from lines import Measured

NAMES = ("fsdp_offload", "deepspeed_zero2_offload", "deepspeed_zero3_offload", "gemini_offload")
BARS: dict[str, str] = {}
TABLE = {
    "host GB of offloading on a GPU, taken; declared: FSDP2; ZeRO-2; ZeRO-3; Gemini": "; ".join(
        f"{{{name}_host_gb}}, {{{name}_declared_gb}}" for name in NAMES
    ),
}
DRY: dict[str, Any] = {"names": ("gemini_offload",), "accelerator": "cpu"}
_STEPS = 2
_COMMAND = "import sys; from cases.offload_gpu import taken; taken(*sys.argv[1:])"


def measure(*, names: tuple[str, ...] = NAMES, accelerator: str = "cuda") -> Iterator[Measured]:
    """Train two steps under each strategy, in a process of its own; yield all metrics after each.

    Args:
        names: Of `memory_forecast.STRATEGIES`.
        accelerator: On "cpu", what would be on the device counts as well.
    """
    metrics: dict[str, float | list[float] | str] = {}
    paths = os.pathsep.join(sys.path)
    for name in names:
        environment = os.environ | {"DS_ACCELERATOR": accelerator, "PYTHONPATH": paths}
        command = [sys.executable, "-W", "ignore", "-c", _COMMAND, name, accelerator]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        metrics |= {f"{name}_{key}_gb": value / 1e9 for key, value in found.items()}
        print(name, found, file=sys.stderr, flush=True)
        yield metrics


def taken(name: str, accelerator: str) -> None:
    """Train; print bytes by kind as the last line."""
    import lightning.pytorch as pl
    import psutil
    import torch
    from torch.utils.data import DataLoader

    from memory_forecast import OPTIMIZER, STRATEGIES
    from sd_lightning import SDLightningModule
    from sd_lightning.strategies.processes.group import leave_process_group
    from unet_35m import build, make_batches

    found: dict[str, int] = {}

    class Look(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            found["host"] = before[0] - psutil.virtual_memory().available
            found["resident"] = psutil.Process().memory_info().rss - before[1]

    if accelerator == "cuda":
        torch.zeros(1, device="cuda")
    before = psutil.virtual_memory().available, psutil.Process().memory_info().rss
    module, strategy = SDLightningModule(build(), optimizer=OPTIMIZER), STRATEGIES[name]()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_steps=_STEPS,
        callbacks=[Look()],
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    batches: Any = make_batches(4, 0, 1)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    if accelerator == "cuda":
        found["pinned"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    found["declared"] = _declared(name)
    leave_process_group()
    print(json.dumps(found), flush=True)


def _declared(name: str) -> int:
    """Return the bytes that the strategy declares to hold in host memory."""
    from memory_forecast import OPTIMIZER, STRATEGIES
    from sd_lightning.planner.forecast import Forecaster
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.strategies import engine_of
    from unet_35m import BATCH_SIZE, LATENTS, build

    model = build()
    run = TrainingRun(BATCH_SIZE, LATENTS[-1] * model.latent_space.stride, "32-true", optimizer=OPTIMIZER)
    footprint: Any = engine_of(STRATEGIES[name]()).footprint(Forecaster(model, run).workload)
    return sum(each.nbytes for each in footprint.host)
