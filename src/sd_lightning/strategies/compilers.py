"""What this machine lacks to compile the C++ extensions of DeepSpeed and ColossalAI."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def compiler() -> str:
    """Return the C++ compiler that torch calls."""
    return os.environ.get("CXX", "c++")


def missing_tool() -> tuple[str, str] | None:
    """Return what is missing to compile extensions for torch, and how to install it; None if nothing is."""
    if shutil.which(compiler(), path=search_path()) is None:
        return f"C++ compiler ({compiler()})", install_command("g++", "gcc-c++", "cxx-compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python.h", install_command("python3-dev", "python3-devel", "python")
    return None if shutil.which("ninja", path=search_path()) else ("ninja", "pip install ninja")


def install_command(apt: str, dnf: str, conda: str) -> str:
    """Return the commands that install a package, whose name differs between package managers."""
    return f"apt-get install {apt} (Fedora: dnf install {dnf}; conda: conda install -c conda-forge {conda})"


def nvcc() -> str | None:
    """Return the CUDA compiler that torch calls; None if there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None


def search_path() -> str:
    """Return ``PATH`` with this environment's scripts, where pip puts ninja."""
    path, scripts = os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")
    return path if scripts in path.split(os.pathsep) else os.pathsep.join([path, scripts])
