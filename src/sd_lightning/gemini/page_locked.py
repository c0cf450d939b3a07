"""Page-locked host memory in whole pages, apart from torch's own."""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.placement import mib

log = logging.getLogger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``."""
_LAST_COPIES_S = 5.0
"""Seconds that the end of the process waits for copies; the device may hang."""

_left: list[Tensor] = []
"""Memory that could not be unlocked: it is never freed, since the device may still use it."""


def whole_pages(nbytes: int) -> int:
    """Return the bytes that page-locked memory of this engine takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PageLocked:
    """Blocks of whole pages that are locked when allocated, and unlocked before they are freed.

    torch's own allocator of page-locked memory is left alone: it rounds sizes up to powers of two, which takes up to
    twice the memory. Its setting against that, which holds for the whole process, may hand out blocks that are too
    small. It also keeps what is freed until the process ends.

    torch knows nothing of this memory: whoever unlocks it, or uses it again, waits for the copies before.

    Args:
        module: The device module, ``torch.cuda``.
        device: Copies from and to the memory.
        streams: Streams of these copies; they are waited for if the owner is lost, or the process ends.
    """

    def __init__(self, module: Any, device: torch.device, streams: Sequence[Any]) -> None:
        self._module = module
        self._device = device
        self._locked: dict[int, Tensor] = {}
        """By address."""
        weakref.finalize(self, _unlock_rest, self._locked, module, device, streams, os.getpid())

    @property
    def nbytes(self) -> int:
        """Bytes that are locked."""
        return sum(memory.nbytes for memory in self._locked.values())

    def allocate(self, nbytes: int) -> Tensor:
        """Return locked memory.

        Args:
            nbytes: At least 1; whole pages are locked.

        Raises:
            UsageError: There is not enough memory, or the system does not let the process lock more.
        """
        try:
            pages = mmap.mmap(-1, whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._refusal(nbytes, str(error)) from error
        # A forked process, such as a worker of a data loader, would copy all locked pages.
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        cudart = self._module.cudart()
        with self._module.device(self._device):
            code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        if int(code) != 0:
            raise self._refusal(nbytes, str(cudart.cudaGetErrorString(code)))
        self._locked[memory.data_ptr()] = memory
        return memory[:nbytes]

    def unlock(self, memory: Tensor) -> None:
        """Unlock memory, or a view of all of it, that no copy uses any more; it is freed with its last view."""
        if memory.nbytes:
            _unlock(self._module, self._device, self._locked.pop(memory.data_ptr()))

    def _refusal(self, nbytes: int, reason: str) -> UsageError:
        return UsageError(
            f"Gemini could not page-lock {mib(nbytes)} of host memory beside the {mib(self.nbytes)} it has ({reason}); "
            "expected room for all that is offloaded; lower offload_optim_frac and offload_param_frac, free host "
            "memory, or raise the system's limit (ulimit -l; docker run --ulimit memlock=-1)"
        )


def _unlock(module: Any, device: torch.device, memory: Tensor) -> None:
    with module.device(device):  # another thread, such as the garbage collector's, may be on another device
        code = module.cudart().cudaHostUnregister(memory.data_ptr())
    if int(code) != 0:
        _leave([memory], f"CUDA error {int(code)}")


def _unlock_rest(
    locked: dict[int, Tensor], module: Any, device: torch.device, streams: Sequence[Any], process: int
) -> None:
    """Unlock what is still locked when its owner is gone or the process ends; do nothing in a forked process."""
    if os.getpid() != process:
        _left.extend(locked.values())  # its addresses may be in use for something else
        return
    if locked and not _are_idle(streams):
        _leave(list(locked.values()), f"its copies did not end within {_LAST_COPIES_S:g} s, or failed")
        return
    while locked:
        _unlock(module, device, locked.popitem()[1])


def _leave(memory: list[Tensor], reason: str) -> None:
    _left.extend(memory)
    log.warning("Gemini leaves %s of host memory page-locked: %s", mib(sum(m.nbytes for m in memory)), reason)


def _are_idle(streams: Sequence[Any]) -> bool:
    """Return whether copies are done, or will be in a moment."""
    until = time.monotonic() + _LAST_COPIES_S
    try:
        while not all(stream.query() for stream in streams):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    except RuntimeError:  # the device has failed
        return False
    return True
