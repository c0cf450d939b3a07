"""Bytes of model state per process in closed form: weights, gradients and AdamW's moments under each strategy.

Formulas of Rajbhandari et al. 2020, arXiv:1910.02054, section 3, adapted to what each engine keeps at its peak, the
optimizer step. ``benchmarks/run.py model_state`` measures them. Activations, frozen networks, buckets and gathered
blocks are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from sd_lightning._errors import UsageError


@dataclass(frozen=True)
class Form:
    """Bytes per trained parameter, in bfloat16 with float32 master weights."""

    whole: float = 0
    """On the device of every process."""
    sharded: float = 0
    """Divided among the devices of all processes."""
    host: float = 0
    """Divided among the processes, in host memory."""


FORMS = {
    "single": Form(whole=16),  # float32 weights, gradients and two moments; autocast casts on the fly
    "ddp": Form(whole=16),
    "fsdp": Form(sharded=16),
    "fsdp_offload": Form(host=16),
    "deepspeed_zero1": Form(whole=4, sharded=12),  # bfloat16 weights and gradients; master weights and moments
    "deepspeed_zero2": Form(whole=2, sharded=14),
    "deepspeed_zero2_offload": Form(whole=2, host=16),  # gradients are float32 on the host
    "deepspeed_zero3": Form(sharded=16),
    "deepspeed_zero3_offload": Form(host=20),  # gradients in bfloat16 and in float32
    "gemini": Form(sharded=18),  # gradients accumulate in float32
    "gemini_gathered": Form(whole=2, sharded=16),  # shard_param_frac=0
    "gemini_offload": Form(host=18),
}
"""By strategy configuration name."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state of one process."""

    device: float
    host: float


def state_bytes(strategy: str, parameters: int, world_size: int) -> StateBytes:
    """Return the bytes of model state of each process.

    Args:
        strategy: One of ``FORMS``.
        parameters: Number of trained parameters of the whole model.
        world_size: Number of processes.

    Raises:
        UsageError: ``FORMS`` does not have that strategy.
    """
    if strategy not in FORMS:
        raise UsageError(f"state_bytes got strategy={strategy!r}; expected one of {', '.join(FORMS)}")
    form = FORMS[strategy]
    return StateBytes(
        device=parameters * (form.whole + form.sharded / world_size), host=parameters * form.host / world_size
    )
