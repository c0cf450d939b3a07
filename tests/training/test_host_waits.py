"""A training step never makes the host wait for the GPU, unless it logs, saves or validates; counted without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from host_waits import DEVICE, EVERY, HostWaits, run
from ranks import run_jobs, run_jobs_of_all

STEPS, SAVED = 8, 6
QUIET = [step for step in range(1, STEPS) if step % EVERY and step != SAVED]
"""Steps that neither log nor save; an epoch has as many as there are between two logs."""


def quiet(steps: list[list[str]], *, first: int = 1) -> dict[int, list[str]]:
    """Return where the host waited in quiet steps, from the first that counts."""
    assert len(steps) == STEPS and all(steps[step - 1] for step in (EVERY, SAVED)), "nothing is counted"
    return {step: steps[step - 1] for step in QUIET if steps[step - 1] and step >= first}


def job(folder: Path, strategy: str, **options: Any) -> dict[str, Any]:
    return {"folder": str(folder), "strategy": strategy, "devices": 1, "steps": STEPS, "every_n_steps": SAVED} | options


@pytest.mark.parametrize("scaled", [True, False], ids=["16-mixed", "32-true"])
def test_one_process_waits_only_to_log_and_to_save(tmp_path: Path, scaled: bool) -> None:
    """Though the progress bar prints a line at every step, with the loss of the step before.

    With 32-true the average is in host memory.
    """
    options = {"scaled": scaled, "offload_average": not scaled, "refresh_seconds": 0.0}
    assert quiet(run(job(tmp_path / "run", "single", **options))) == {}


@pytest.mark.slow
def test_gemini_waits_only_to_log_and_to_save_unless_the_host_steps_chunks(tmp_path: Path) -> None:
    """But in the first step, which looks for weights that a forward pass writes."""
    ours = job(tmp_path / "ours", "gemini", scaled=True)
    assert quiet(run(ours), first=2) == {}
    collectives = job(tmp_path / "collectives", "gemini", scaled=True, with_collectives=True)
    assert quiet(run(collectives), first=2) == {}
    offloaded = job(tmp_path / "offloaded", "gemini", settings={"offload_optim_frac": 0.5}, steps=2)
    assert all(run(offloaded)[:1]), "the host must know the factor of clipping"


@pytest.mark.slow
def test_two_processes_wait_only_to_log_and_to_save(tmp_path: Path) -> None:
    """Gemini's ranks agree on the host on which parameters have gradients, over gloo."""
    cases = {
        "ddp": job(tmp_path / "ddp", "ddp", devices=2, scaled=True),
        "gemini": job(tmp_path / "gemini", "gemini", devices=2, trainer={"precision": "bf16-mixed"}),
    }
    for found in run_jobs_of_all("host_waits", cases, tmp_path, world_size=2):
        assert quiet(found["ddp"]) == {} == quiet(found["gemini"], first=2)


def gradient_of(there: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(4, requires_grad=True)
    (weights.to(DEVICE, non_blocking=True) * there).sum().backward()
    moved = there.clone().requires_grad_()
    (moved**2).sum().backward()
    assert moved.grad is not None
    return moved.grad


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_cuda_itself_says_so(tmp_path: Path, precision: str) -> None:
    """The first step is left out: kernels are chosen and constants are moved in it."""
    options = {"accelerator": "cuda", "trainer": {"precision": precision}, "offload_average": precision == "16-mixed"}
    cases = {name: job(tmp_path / name, name, **options) for name in ("single", "ddp", "gemini_default")}
    for name in ("ddp", "gemini_default"):  # the signals that ranks send each other, and Gemini's collectives
        cases[f"{name} with collectives"] = job(tmp_path / f"{name}-2", name, with_collectives=True, **options)
    found = run_jobs("host_waits", cases, tmp_path, world_size=1, accelerator="cuda")
    for name, steps in found.items():
        assert quiet(steps, first=2) == {}, name


@pytest.mark.parametrize(
    "act",
    [
        lambda there, host: there.sum().item(),
        lambda there, host: bool(there.isfinite().all()),
        lambda there, host: [float(value) for value in there[:1]],
        lambda there, host: there.tolist(),
        lambda there, host: there.cpu(),
        lambda there, host: torch.empty_like(there, device="cpu").copy_(there),
        lambda there, host: there.to("cpu", torch.float64),
        lambda there, host: there[there > 0],
        lambda there, host: there[torch.tensor([0])],
        lambda there, host: there.nonzero(),
        lambda there, host: host.copy_(there),
        lambda there, host: torch._foreach_copy_([host], [there]),
        lambda there, host: there.copy_(host),
        lambda there, host: host.to(DEVICE),
        lambda there, host: torch.tensor(1.0, device=DEVICE),
        lambda there, host: torch.zeros_like(there).add_(1).max().item(),
        lambda there, host: torch.zeros((), device=there.device).item(),
        lambda there, host: gradient_of(there).sum().item(),
    ],
)
def test_a_wait_is_counted(act: Callable[..., Any]) -> None:
    waits = HostWaits()
    with waits.counting():
        act(torch.ones(4, device=DEVICE), torch.ones(4))
    assert waits.count == 1, waits.places


@pytest.mark.parametrize(
    "act",
    [
        lambda there, host: host.sum().item(),
        lambda there, host: host.to("cpu").tolist(),
        lambda there, host: host.copy_(there, non_blocking=True).tolist(),
        lambda there, host: there.to("cpu", non_blocking=True).numpy(),
        lambda there, host: torch._foreach_copy_([host], [there], non_blocking=True)[0].tolist(),
        lambda there, host: there[1:] + torch.full((), 2.0, device=there.device),
        lambda there, host: torch.where(there > 0, there, 0.0),
        lambda there, host: there[torch.zeros(1, dtype=torch.long, device=there.device)],
    ],
)
def test_nothing_else_is_counted(act: Callable[..., Any]) -> None:
    waits = HostWaits()
    with waits.counting():
        act(torch.ones(4, device=DEVICE), torch.ones(4))
    assert waits.count == 0, waits.places
