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
