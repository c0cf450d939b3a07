"""DeepSpeed's asynchronous I/O without its compiled extension: plain files, read and written at once."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class FakeHandle:
    """What the optimizer swapper uses of ``aio_handle``."""

    def __init__(self, **options: Any) -> None:
        self._pending = 0
        self._pinned: list[Tensor] = []

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        self._pinned.append(torch.empty(numel, dtype=example.dtype))
        return self._pinned[-1]

    def free_cpu_locked_tensor(self, tensor: Tensor) -> None:
        self._pinned = [each for each in self._pinned if each is not tensor]

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(each.data_ptr() <= start < each.data_ptr() + each.nbytes for each in self._pinned)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        buffer.numpy().tofile(path)
        self._pending += 1
        return 0

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        buffer.copy_(torch.from_numpy(np.fromfile(path, dtype=buffer.numpy().dtype, count=buffer.numel())))
        self._pending += 1
        return 0

    def wait(self) -> int:
        pending, self._pending = self._pending, 0
        return pending


class FakeBuilder:
    """Stands for ``AsyncIOBuilder``."""

    aio_handle = FakeHandle

    def load(self, verbose: bool = False) -> type["FakeBuilder"]:
        return FakeBuilder


def install() -> None:
    """Let this process's swappers use the fake, and nobody ask for a compiler."""
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper

    from sd_lightning.strategies.deepspeed import settings as deepspeed_settings
    from sd_lightning.strategies.deepspeed import strategy as deepspeed

    partitioned_optimizer_swapper.AsyncIOBuilder = FakeBuilder
    deepspeed_settings.check_buildable = lambda *args, **kwargs: None  # type: ignore[assignment]
    deepspeed.build = lambda extensions: None  # type: ignore[assignment]
