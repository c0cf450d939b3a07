"""Bytes of this process: what its tensors hold, and how much a piece of work needed beyond that. Linux only."""

import ctypes
import gc
import re
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

Storages = dict[int, int]
"""Address of a storage in host memory -> its bytes."""


def storages() -> Storages:
    """Return every storage that a tensor of Python's refers to."""
    gc.collect()
    found: Storages = {}
    for each in gc.get_objects():
        kind = type(each)
        # A DTensor has no memory of its own; its local tensor is listed, too.
        if not issubclass(kind, Tensor) or issubclass(kind, DTensor) or each.device.type != "cpu":
            continue
        storage = each.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def bytes_beyond(before: Storages) -> int:
    """Return the bytes of all storages that were not there before."""
    return sum(size for address, size in storages().items() if before.get(address) != size)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_at_once() -> None:
    """Make glibc return every freed block of 64 KiB or more, so that the memory in use is what is allocated."""
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 2**16)


def begin_peak() -> int:
    """Give unused memory back and forget the highest use so far; return the bytes in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes in use since :func:`begin_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found.group(1)) * 1024
