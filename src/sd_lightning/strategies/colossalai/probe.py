"""Check whether ColossalAI works on this machine: ``python -m sd_lightning.strategies.colossalai.probe``.

ColossalAI compiles CUDA extensions when it is first used, with whatever compiler it finds, and fails deep inside a run.
Each check here is one row. Compiling and the trial step run in their own processes, with a time limit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.strategies.colossalai.engine import ColossalAIEngine
from sd_lightning.strategies.colossalai.settings import ColossalAIConfig
from sd_lightning.strategies.compilers import compiler, missing_tool, nvcc, search_path

VERSION = "0.5.0"
INSTALL = f"pip install --no-deps colossalai=={VERSION} galore-torch==1.0 peft einops"
"""Without --no-deps, pip would replace torch, diffusers and transformers by releases of 2024."""
_COMMAND = "python -m sd_lightning.strategies.colossalai.probe"


@dataclass(frozen=True)
class Row:
    """The result of one check: its name, whether it passed, what was found, and the remedy."""

    check: str
    ok: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = "" if self.ok else f"; {self.remedy}"
        return f"{self.check}: {'ok' if self.ok else 'FAILED'} ({self.detail}){remedy}"


def probe(*, trial_step: bool = True, timeout_seconds: float = 900.0) -> list[Row]:
    """Check everything that ColossalAI needs, in order, up to the first failure.

    Args:
        trial_step: Also train one step of a small model.
        timeout_seconds: Time limit of each process that compiles or trains.
    """
    checks: list[Callable[[], Row]] = [
        check_version,
        functools.partial(check_import, timeout_seconds),
        check_device,
        check_nvcc,
        check_compiler,
        functools.partial(check_extension, "FusedOptimizerLoader", timeout_seconds),
        functools.partial(check_extension, "CPUAdamLoader", timeout_seconds),
    ]
    if trial_step:
        checks.append(functools.partial(check_trial_step, timeout_seconds))
    rows = []
    for check in checks:
        rows.append(check())
        if not rows[-1].ok:
            break
    return rows


@functools.cache  # called before processes start, and again in the first of each machine
def require_engine(*, timeout_seconds: float) -> None:
    """Run the probe without the trial step.

    Raises:
        UsageError: A check fails; the message holds all rows.
    """
    require(probe(trial_step=False, timeout_seconds=timeout_seconds))


def require(rows: list[Row]) -> None:
    """Raise if a check has failed.

    Raises:
        UsageError: One has; the message holds all rows.
    """
    if not all(row.ok for row in rows):
        raise UsageError(
            f"ColossalAIStrategy cannot be used here: {' | '.join(map(str, rows))}; {_COMMAND} shows this again; "
            "strategy=gemini is the engine of this package, which needs nothing installed"
        )


def check_version() -> Row:
    """Check that the installed release is the one whose internals the engine uses."""
    try:
        installed = importlib.metadata.version("colossalai")
    except importlib.metadata.PackageNotFoundError:
        return Row("colossalai", False, "not installed", f"install it with: {INSTALL}")
    return Row("colossalai", installed == VERSION, f"version {installed}", f"install {VERSION}: {INSTALL}")


def check_import(timeout_seconds: float) -> Row:
    """Check that ColossalAI imports with the installed torch."""
    failure = run_python("import colossalai.zero, colossalai.nn.optimizer", timeout_seconds)
    return Row("import", not failure, failure or f"beside torch {torch.__version__}", f"install again: {INSTALL}")


def check_device() -> Row:
    """Check that there is a CUDA device."""
    if not torch.cuda.is_available():
        remedy = "run it on a machine with a CUDA device"
        return Row("device", False, f"torch {torch.__version__} sees no CUDA device", remedy)
    return Row("device", True, f"{torch.cuda.get_device_name()}, compute capability {_capability()}")


def check_nvcc() -> Row:
    """Check the CUDA compiler's major version: torch compiles only with the one that it was built with."""
    theirs = str(torch.version.cuda)
    major = theirs.partition(".")[0]
    remedy = f"install CUDA Toolkit {major}.x (nvcc) and set CUDA_HOME to its folder"
    path = nvcc()
    if path is None:
        return Row("nvcc", False, "not found in the folder of CUDA_HOME", remedy)
    try:
        printed = subprocess.run([path, "-V"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row("nvcc", False, f"{path} does not run ({error})", remedy)
    release = re.search(r"release (\d+)\.\d+", printed)
    ours = release[0].removeprefix("release ") if release else "unknown"
    same = ours.partition(".")[0] == major
    return Row("nvcc", same, f"{path} is CUDA {ours}, torch is built with CUDA {theirs}", remedy)


def check_compiler() -> Row:
    """Check for ninja and a C++ compiler, with which torch compiles extensions."""
    missing = missing_tool()
    if missing is not None:
        return Row("compiler", False, f"no {missing[0]}", f"install it with: {missing[1]}")
    return Row("compiler", True, f"{compiler()} and ninja")


def check_extension(loader: str, timeout_seconds: float) -> Row:
    """Check that one of ColossalAI's extensions is compiled, or compile it."""
    code = f"from colossalai.kernel.kernel_loader import {loader} as Loader; Loader().load()"
    failure = run_python(code, timeout_seconds)
    remedy = f"see the whole message of: python -c '{code}'"
    return Row(loader.removesuffix("Loader"), not failure, failure or "compiled for this device", remedy)


def check_trial_step(timeout_seconds: float) -> Row:
    """Check that a training step of a small model in chunks changes its weights to finite values."""
    code = "from sd_lightning.strategies.colossalai.probe import trial_step; trial_step()"
    failure = run_python(code, timeout_seconds)
    return Row("trial step", not failure, failure or "weights changed and are finite", f"see: python -c '{code}'")


def choose_architecture() -> None:
    """Make torch compile extensions for this GPU alone, in the probe and in the run.

    Otherwise torch compiles them twice, and for architectures that this nvcc no longer supports.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _capability())


def run_python(code: str, timeout_seconds: float) -> str:
    """Run code in a new interpreter and return why it failed, or an empty string."""
    choose_architecture()
    environment = os.environ | {"PATH": search_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # one process group with its compilers, to be killed together
    )
    try:
        errors = process.communicate(timeout=timeout_seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"not done after {timeout_seconds:g} s, and ended"
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b|Error", line)]
    return (telling or lines or [f"exit code {process.returncode}"])[-1]


def trial_step() -> None:
    """Train one step of a small model with the real engine, in a process of its own.

    Raises:
        UsageError: Weights are not finite afterwards, or have not changed.
    """
    from colossalai.accelerator import get_accelerator

    device = get_accelerator().get_current_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    # Chunks smaller than the model: they are gathered and scattered.
    config = ColossalAIConfig(min_chunk_size_m=0.02, search_range_m=0.02, hidden_dim=64)
    engine = ColossalAIEngine({"network": network}, config, torch.bfloat16)
    engine.attach(torch.optim.AdamW(engine.parameters.values(), lr=1e-2), max_norm=1.0)
    before = [engine.master_range(p)[0].clone() for p in engine.parameters.values()]
    with engine.training():
        loss = network(torch.randn(8, 64, device=device, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    for old, parameter in zip(before, engine.parameters.values(), strict=True):
        new = engine.master_range(parameter)[0]
        if not torch.isfinite(new).all() or torch.equal(old, new):
            raise UsageError("ColossalAI's trial step left weights as they were, or not finite")
    dist.destroy_process_group()


def _capability() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def main() -> int:
    rows = probe()
    for row in rows:
        print(row)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
