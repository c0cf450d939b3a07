"""DeepSpeed on this machine: its import, its extensions, which are compiled here, and a folder for its swap files."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.strategies.compilers import compiler, install_command, missing_tool, nvcc, search_path

log = logging.getLogger(__name__)

Extension = Literal["cpu_adam", "async_io"]

_BUILDERS: dict[str, str] = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
}
_ASKED_BY: dict[Extension, tuple[str, str]] = {
    "cpu_adam": ("strategy.cpu_adam=true", "strategy.cpu_adam=false to step with torch's optimizer"),
    "async_io": ("strategy.offload_optimizer=nvme", "strategy.offload_optimizer=cpu"),
}
"""Extension -> the setting that needs it, and what to write to do without."""
_ABANDONED_SECONDS = 3600.0
"""Age at which a lock is taken for that of a killed process."""


def import_deepspeed(who: str) -> ModuleType:
    """Import DeepSpeed for the devices that this machine has.

    Raises:
        UsageError: DeepSpeed is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
    deepspeed = require("deepspeed", extra="deepspeed", who=who)
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    return deepspeed


def check_buildable(extension: Extension) -> None:
    """Check before processes start that an extension can be compiled here.

    Raises:
        UsageError: Something is missing; the message says how to install it, and how to do without.
    """
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(extension, False):
        return
    missing = missing_tool()
    if missing is None and extension == "async_io":
        missing = _missing_for_async_io()
    if missing is not None:
        who, instead = _ASKED_BY[extension]
        raise UsageError(
            f"{who}: DeepSpeed compiles {extension} for it, and there is no {missing[0]}; install it with: "
            f"{missing[1]}, or write {instead}"
        )


def _missing_for_async_io() -> tuple[str, str] | None:
    if not _links_with_libaio():
        return "libaio", install_command("libaio-dev", "libaio-devel", "libaio")
    if torch.version.cuda and torch.cuda.is_available() and nvcc() is None:
        remedy = f"conda install -c nvidia cuda-toolkit={torch.version.cuda}, or NVIDIA's installer of that version"
        return "CUDA toolkit (nvcc in the folder of CUDA_HOME)", remedy
    return None


def _links_with_libaio() -> bool:
    flags = [*os.environ.get("CFLAGS", "").split(), "-xc", "-", *os.environ.get("LDFLAGS", "").split(), "-laio"]
    source = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"
    command = [shutil.which(compiler(), path=search_path()) or compiler(), *flags, "-o", os.devnull]
    try:
        return subprocess.run(command, input=source, text=True, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build(extensions: Iterable[Extension]) -> None:
    """Compile extensions that are not compiled on this machine yet, and log it.

    Raises:
        UsageError: The compiler fails; the message holds its first error.
    """
    import deepspeed.ops.op_builder as builders

    os.environ["PATH"] = search_path()
    names = [part for name in extensions for part in (("pin_memory", name) if name == "async_io" else (name,))]
    for name in names:
        start, compiled = time.monotonic(), _is_compiled(name)
        if not compiled:
            log.info("compiling DeepSpeed's %s for this machine (once; some minutes)%s", name, _waiting_for(name))
        try:
            getattr(builders, _BUILDERS[name])().load(verbose=False)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise UsageError(
                f"compiling DeepSpeed's {name} failed: {first.strip()}; build it alone for the whole message: "
                f"python -c 'from deepspeed.ops.op_builder import {_BUILDERS[name]} as B; B().load()'"
            ) from error
        if not compiled:
            log.info("compiled %s in %.0f s", name, time.monotonic() - start)


def _folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _is_compiled(name: str) -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(name, False)) or (_folder(name) / f"{name}.so").is_file()


def _waiting_for(name: str) -> str:
    """Return a log suffix about another process's lock, which torch waits for; delete an abandoned lock."""
    lock = _folder(name) / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > _ABANDONED_SECONDS:
        lock.unlink(missing_ok=True)
    return f": waiting for another process that does it; if there is none, delete {lock}" if lock.exists() else " …"


_PREFIX = "sd-lightning-swap-"
_LOCK = "in-use"


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
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}test-", dir=path) as trial:
            file = os.open(Path(trial) / "block", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)  # as DeepSpeed writes
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as aligned:
                    os.write(file, aligned)
            finally:
                os.close(file)
    except OSError as error:
        raise UsageError(
            f"{who}: DeepSpeed cannot swap there ({error.strerror}); give a folder on a fast local disk with direct "
            "I/O, in which this user may write"
        ) from error
    return Path(path)


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
