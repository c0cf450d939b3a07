"""One of two ranks that share a device, over gloo: what rank 1 has given the device never ends.

``python hung_kernel.py cuda RANK PORT``; with "cpu", rank 1 waits in C, as it would for a device.
"""

import ctypes
import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from sd_lightning.strategies.ddp import DDPStrategy
from small_training import data, fit, module

TIMEOUT = 10.0  # seconds


class Hangs(Callback):
    """The third step of rank 1."""

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            print("hangs now", flush=True)
            wait_for_a_kernel(pl_module.device)


def wait_for_a_kernel(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(2**62)
        torch.cuda.synchronize()
    else:
        ctypes.CDLL(None).pause()


if __name__ == "__main__":
    accelerator, rank, port = sys.argv[1:]
    # Two machines of one device each, which are one: a rank's device is that of its local rank.
    os.environ |= {"NODE_RANK": rank, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    strategy = DDPStrategy(timeout_seconds=TIMEOUT)
    strategy._process_group_backend = "gloo"
    fit(module(), data(cache_latents=False), 4, Hangs(), strategy=strategy, accelerator=accelerator, num_nodes=2)
