"""DeepSpeed ZeRO-3 with optimizer states on a disk: the folder of swap files, and their training state."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import LazyTensor
from sd_lightning.strategies.deepspeed.state import Fragment, Zero3State

log = logging.getLogger(__name__)

_PREFIX = "sd-lightning-swap-"
_LOCK = "in-use"
_BLOCK = 4096


def check_swap_path(path: str | None) -> Path:
    """Check that DeepSpeed can swap to a folder: it exists, is writable, and supports direct I/O.

    Raises:
        UsageError: DeepSpeed cannot swap there.
    """
    who = f"strategy.nvme_path={path}"
    if path is None:
        raise UsageError(
            f"{who}: swapping to nvme needs a folder on a fast local disk; write strategy.nvme_path=/local_nvme"
        )
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{who}: there is no such folder; make it, or give one on a fast local disk")
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}test-", dir=folder) as trial:
            _write_directly(Path(trial) / "block")
    except PermissionError as error:
        user = os.environ.get("USER") or f"user {os.getuid()}"
        raise UsageError(f"{who}: this user cannot write there; give a folder that {user} may write to") from error
    except OSError as error:
        raise UsageError(
            f"{who}: DeepSpeed cannot swap there ({error.strerror}); give a folder on a local disk with direct I/O"
        ) from error
    return folder


def _write_directly(path: Path) -> None:
    """Write a block with direct I/O, as DeepSpeed does; not every file system supports it."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, _BLOCK) as aligned:
            os.write(file, aligned)
    finally:
        os.close(file)


class SwapFolder:
    """A folder for this process's swap files alone, which is removed when the run ends.

    DeepSpeed names files by parameter alone and never removes them. The next run removes the folders of killed runs: a
    live process holds a lock in its folder.
    """

    def __init__(self, parent: Path) -> None:
        self._remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the files; a second call does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    @staticmethod
    def _remove_abandoned(parent: Path) -> None:
        for folder in parent.glob(f"{_PREFIX}*"):
            try:
                lock = os.open(folder / _LOCK, os.O_RDWR)
            except OSError:
                continue  # just being created, another user's, or the trial of check_swap_path
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed %s, which a killed run had left", folder)
            except OSError:
                pass  # its run is alive
            finally:
                os.close(lock)


class SwappedZero3State(Zero3State):
    """Training state of ZeRO-3 with float32 weights and optimizer states in swap files between steps.

    Reads go straight to the files, one range at a time. Writes pass through DeepSpeed's own buffers, one flat tensor at
    a time. Small flat tensors (under 1 MiB) are never swapped.
    """

    @override
    def _master(self, fragment: Fragment) -> LazyTensor:
        swapped = self._is_swapped(fragment.group)
        return self._in_file(self._flats()[fragment.group], fragment) if swapped else super()._master(fragment)

    @override
    def _states(self, fragment: Fragment) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
        if not self._is_swapped(fragment.group):
            return super()._states(fragment)
        states: dict[str, LazyTensor] = {}
        scalars: dict[str, Any] = {}
        for kind, value in self.zero.optimizer.state.get(self._flats()[fragment.group], {}).items():
            if hasattr(value, "ds_id"):  # DeepSpeed's mark of what it swaps
                states[kind] = self._in_file(value, fragment)
            else:
                scalars[kind] = torch.tensor(float(value)) if kind == "step" else value
        return states, scalars

    def _is_swapped(self, group: int) -> bool:
        return bool(self.zero._swappable_optimizer_subgroup(group))

    def _in_file(self, flat: Any, fragment: Fragment) -> LazyTensor:
        return partial(self._read, flat.ds_id, fragment.offset, fragment.end - fragment.begin)

    def _read(self, ds_id: str, offset: int, numel: int) -> Tensor:
        path = Path(self.zero.optimizer_swapper.swap_folder) / f"{ds_id}.tensor.swp"
        return torch.from_numpy(np.fromfile(path, dtype=np.float32, count=numel, offset=4 * offset))

    @override
    def _master_flat(self, group: int) -> Tensor:
        if not self._is_swapped(group):
            return super()._master_flat(group)
        flat: Any = self._flats()[group]
        return self._read(flat.ds_id, 0, self.zero.fp16_partitioned_groups_flat_numel[group])

    @override
    @contextmanager
    def _resident(self, group: int) -> Iterator[Tensor]:
        if not self._is_swapped(group):
            yield self._flats()[group]
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield self._flats()[group]
        finally:
            self.zero._optimizer_states_and_gradient_swap_out(group)
