"""Values of the device that the host reads one step late, so that it need not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Lagged:
    """Copies of small tensors to host memory, each read when the next one comes.

    On CUDA a copy runs on the current stream, into pinned memory. When it is read, the device has the next step's work
    queued behind it: the host waits only if it is more than that ahead. Elsewhere the copy is there at once, and is
    read as late, so that runs are the same on every device.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def swap(self, values: Tensor) -> list[float] | None:
        """Begin to copy a vector, and return the one before it; None if there is none."""
        before = self.take()
        on_cuda = values.device.type == "cuda"
        self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._copy.copy_(values, non_blocking=True)
        if on_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))
        return before

    def take(self) -> list[float] | None:
        """Return the last vector now, and forget it; None if there is none. The host waits until it is computed."""
        copy, self._copy = self._copy, None
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return None if copy is None else copy.tolist()
