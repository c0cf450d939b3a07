"""Import of DeepSpeed, and compilation of its extensions."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning._imports import require

log = logging.getLogger(__name__)

Extension = Literal["cpu_adam", "async_io"]

_BUILDERS: dict[str, str] = {
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
}
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


def check_buildable(extension: Extension, who: str, *, instead: str) -> None:
    """Check before processes start that an extension can be compiled here.

    Args:
        extension: Its name.
        who: What asks for it, e.g. ``"strategy.cpu_adam=true"``.
        instead: The setting to write to do without it.

    Raises:
        UsageError: Something is missing; the message says how to install it.
    """
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(extension, False):
        return
    problem = f"{who}: DeepSpeed compiles {extension} for it, and there is no"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        missing, remedy = f"C++ compiler ({compiler})", _install("g++", "gcc-c++", "cxx-compiler")
    elif not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing, remedy = "Python.h", _install("python3-dev", "python3-devel", "python")
    elif shutil.which("ninja", path=_search_path()) is None:
        missing, remedy = "ninja", "pip install ninja"
    elif extension == "async_io" and not _links_with_libaio(compiler):
        missing, remedy = "libaio", _install("libaio-dev", "libaio-devel", "libaio")
    elif extension == "async_io" and torch.version.cuda and torch.cuda.is_available() and not _has_cuda_toolkit():
        missing = "CUDA toolkit (nvcc in the folder of CUDA_HOME)"
        remedy = f"conda install -c nvidia cuda-toolkit={torch.version.cuda}, or NVIDIA's installer of that version"
    else:
        return
    raise UsageError(f"{problem} {missing}; install it with: {remedy}, or write {instead}")


def _install(apt: str, dnf: str, conda: str) -> str:
    return f"apt-get install {apt} (Fedora: dnf install {dnf}; conda: conda install -c conda-forge {conda})"


def build(extensions: Iterable[Extension]) -> None:
    """Compile extensions that are not compiled on this machine yet, and log it.

    Raises:
        UsageError: The compiler fails; the message holds its first error.
    """
    import deepspeed.ops.op_builder as builders

    os.environ["PATH"] = _search_path()
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


def _search_path() -> str:
    """Return ``PATH`` with this environment's scripts, where pip puts ninja."""
    path, scripts = os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")
    return path if scripts in path.split(os.pathsep) else os.pathsep.join([path, scripts])


def _has_cuda_toolkit() -> bool:
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return home is not None and shutil.which("nvcc", path=os.path.join(home, "bin")) is not None


def _links_with_libaio(compiler: str) -> bool:
    flags = [*os.environ.get("CFLAGS", "").split(), "-xc", "-", *os.environ.get("LDFLAGS", "").split(), "-laio"]
    source = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"
    try:
        done = subprocess.run(
            [compiler, *flags, "-o", os.devnull], input=source, text=True, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


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
