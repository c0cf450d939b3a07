"""A stand-in for the GPU under the real ColossalAI: on a machine without one its Python code runs as it is.

``install()`` gives ColossalAI an accelerator that says "cuda" and whose device is ``cpu:0``; host memory is ``cpu``.
Replaced is only what needs hardware: the copy between the two memories (which tells them apart by the device's type),
the memory monitor, and the two compiled Adam kernels. Chunks, hooks, placement, reduction and the optimizer are the
package's own. What this cannot show: streams, page-locked memory, and the compiled kernels themselves.
"""

import contextlib
import math
import types
from typing import Any

import torch
from torch import Tensor


class FakeStream:
    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _is_fast(device: torch.device) -> bool:
    return device.index == 0


def _shard_move(self: Any, device: torch.device, force_copy: bool = False, non_blocking: bool = False) -> None:
    """What ``Chunk.shard_move`` does without page-locked memory."""
    assert not self.is_gathered
    if not self.optim_sync_flag:
        assert _is_fast(device)
        self._Chunk__paired_shard_move()
        self.optim_sync_flag = True
    elif _is_fast(device) and self.cuda_shard is None:
        self.cuda_shard, self.cpu_shard = self.cpu_shard.clone(), None
    elif not _is_fast(device) and self.cuda_shard is not None:
        self.cpu_shard, self.cuda_shard, self.cpu_vis_flag = self.cuda_shard.clone(), None, True


def _close_chunk(self: Any) -> None:
    """``Chunk.close_chunk``, which takes the fake device for host memory."""
    self.original_close_chunk()
    if not self.keep_gathered and _is_fast(self.shard_device):
        self.cuda_shard, self.cpu_shard, self.cpu_vis_flag = self.cpu_shard, None, False


def _move_chunk(
    self: Any, chunk: Any, device: torch.device, force_copy: bool = False, async_move: bool = False
) -> None:
    if chunk.can_move and chunk.device_type != ("cuda" if _is_fast(device) else "cpu"):
        self._ChunkManager__sub_memory_usage(chunk.memory_usage)
        chunk.shard_move(device, force_copy)
        self._ChunkManager__add_memory_usage(chunk.memory_usage)


def adam(
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
    scale: float,
    *tensors: Tensor,
) -> None:
    """What both kernels compute: Adam in float32 on gradients divided by ``scale``, if that is positive."""
    weight, gradient, exp_avg, exp_avg_sq = tensors
    gradient = gradient.float() / scale if scale > 0 else gradient.float()
    if decay and decoupled:
        weight.mul_(1 - lr * decay)
    elif decay:
        gradient = gradient.add(weight, alpha=decay)
    exp_avg.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - betas[0] ** step))


class FakeCpuAdam:
    """The extension ``cpu_adam_x86``."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, decay: float, adamw_mode: bool) -> None:
        self.decoupled = adamw_mode

    def step(self, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, *rest: Any) -> None:
        _, *tensors, scale = rest
        adam(step, lr, (beta1, beta2), eps, decay, self.decoupled, scale, *tensors)


def _step(self: Any, closure: Any = None, div_scale: float = -1) -> None:
    """``HybridAdam.step``: the fused kernel for slices of chunks on the device, the package's own code for others."""
    from colossalai.nn.optimizer import HybridAdam

    fast: list[tuple[dict[str, Any], list[Any]]] = []
    for group in self.param_groups:
        pieces = [p for p in group["params"] if p.grad is not None and getattr(p, "on_device", False)]
        fast.append((group, pieces))
        for p in pieces:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            settings = (group["lr"], group["betas"], group["eps"], group["weight_decay"], self.adamw_mode, div_scale)
            adam(state["step"], *settings, p.data, p.grad, state["exp_avg"], state["exp_avg_sq"])
            p.grad = None
    HybridAdam.original_step(self, div_scale=div_scale)


def _mark_pieces(self: Any) -> None:
    """Say of every slice that the optimizer steps which memory it is in: by its device one cannot tell here."""
    self.original_set_grad_ptr()
    for group in self.param_groups:
        for piece in group["params"]:
            piece.on_device = self.param_to_chunk16[piece].paired_chunk.device_type == "cuda"


class FakeMonitor:
    """The memory monitor of the placement policy "auto"."""

    def start(self) -> None:
        pass

    def finish(self) -> int:
        return FakeMonitor.used

    used = 0
    """Bytes that this rank uses besides weights."""
    capacity = 2**30
    """Bytes that the fake device has."""


def install() -> None:
    """Put the stand-ins in place, once per process and before the engine is built."""
    from colossalai.accelerator import api
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class FakeAccelerator(CpuAccelerator):
        @property
        def name(self) -> str:
            return "cuda"

        def get_current_device(self) -> torch.device:
            return torch.device("cpu", 0)

        def device_count(self) -> int:
            return 1

        def Stream(self, *args: Any, **kwargs: Any) -> FakeStream:
            return FakeStream()

        def current_stream(self, *args: Any) -> FakeStream:
            return FakeStream()

        def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    api._ACCELERATOR = FakeAccelerator()
    from colossalai.legacy.utils import memory
    from colossalai.nn.optimizer import HybridAdam, cpu_adam
    from colossalai.zero import GeminiOptimizer
    from colossalai.zero.gemini.chunk import Chunk, ChunkManager
    from colossalai.zero.gemini.memory_tracer import memstats_collector

    Chunk.shard_move, ChunkManager.move_chunk = _shard_move, _move_chunk
    Chunk.original_close_chunk, Chunk.close_chunk = Chunk.close_chunk, _close_chunk
    memory.colo_device_memory_capacity = lambda device: FakeMonitor.capacity
    memstats_collector.SyncCudaMemoryMonitor = FakeMonitor
    cpu_adam.CPUAdamLoader.load = lambda self: types.SimpleNamespace(CPUAdamOptimizer=FakeCpuAdam)
    HybridAdam.original_step, HybridAdam.step = HybridAdam.step, _step
    GeminiOptimizer.original_set_grad_ptr, GeminiOptimizer._set_grad_ptr = GeminiOptimizer._set_grad_ptr, _mark_pieces
