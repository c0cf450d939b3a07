"""Gradient accumulation: reduce after each micro-batch, or keep whole gradients and reduce them once per step."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from sd_lightning.gemini.auto import AutoPlacement, fast_tier_bytes
from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import Plan, whole_gradient_bytes
from sd_lightning.gemini.probe import peak_allocated, peak_resident
from sd_lightning.gemini.tiers import mib

log = logging.getLogger(__name__)

_USABLE = 0.9
"""Usable part of the fast tier. The rest is for fragmentation and collective buffers, as with ``memory_cap=0.9``."""


class Accumulation:
    """Choice per step between reducing each micro-batch and reducing all of them once (setting ``reduce_once``).

    With ``"auto"``, ``placement=auto`` keeps whole gradients if its plan leaves room for them under ``memory_cap``.
    ``placement=static`` has no cap: the first step reduces each micro-batch, and the least spare memory of any rank
    decides for all later steps. All ranks take the same decision, and it holds until the optimizer steps. Exception: a
    move to a plan without room for whole gradients, such as for a measurement, reduces the kept gradients first.

    Args:
        engine: Owns the gradients.
        auto: Places the chunks; None with ``placement=static``.
    """

    def __init__(self, engine: ChunkedNetworks, auto: AutoPlacement | None) -> None:
        self._engine = engine
        self._auto = auto
        self._whole_bytes = whole_gradient_bytes(engine.layouts)
        self._keeps: bool | None = None
        """The decision for the current step."""
        self._has_stepped = False
        self._measured: int | None = None
        self._told: bool | None = None

    def keeps_gradients(self) -> bool:
        """Return whether this step keeps whole gradients between micro-batches; a collective call."""
        if self._keeps is None:
            self._keeps, message = self._decide()
            if message and self._keeps is not self._told:
                log.info("Gemini: %s", message)
                self._told = self._keeps
        return self._keeps

    def end_step(self) -> None:
        """Note that an optimizer has stepped."""
        self._keeps, self._has_stepped = None, True

    def make_room(self, plan: Plan) -> None:
        """Reduce the kept gradients now if the new plan has no room for them; a collective call."""
        engine = self._engine
        if self._keeps and engine.config.reduce_once == "auto" and not plan.keeps_gradients:
            engine.runtime.reducer.flush()
            engine.runtime.reducer.keeps_gradients = self._keeps = False

    def _decide(self) -> tuple[bool, str]:
        """Return the decision and what to tell about it; nothing before the first measurement."""
        engine, mode = self._engine, self._engine.config.reduce_once
        whole = mib(self._whole_bytes)
        if mode != "auto":
            once = f"gradients of all micro-batches are reduced once; until then they take {whole}"
            each = f"each micro-batch is reduced; with {whole} to spare, reduce_once=true does it once"
            return mode, once if mode else each
        if engine.collectives.is_alone:
            return False, "each micro-batch is added up at once: there are no other ranks to reduce over"
        spare = self._spare_bytes()
        if spare is None:
            return False, ""
        keeps = self._whole_bytes <= spare if self._auto is None else engine.plan.keeps_gradients
        once = f"micro-batches are reduced once, in float32: {whole} of the {mib(spare)} to spare"
        each = f"each micro-batch is reduced: whole gradients take {whole}, and {mib(max(spare, 0))} are to spare"
        return keeps, once if keeps else each

    def _spare_bytes(self) -> int | None:
        """Return the spare bytes of the fast tier on the rank with the least; None before the first measurement."""
        engine = self._engine
        if self._auto is not None:
            return self._auto.spare_bytes
        if self._measured is None and self._has_stepped:
            own = spare_bytes(engine.memory, engine.collectives.world_size)
            least = engine.collectives.all_reduce(torch.tensor([own], dtype=torch.int64), dist.ReduceOp.MIN)
            self._measured = int(least)
        return self._measured


def spare_bytes(memory: Memory, world_size: int) -> int:
    """Return the bytes that this process can still take of its fast tier, beyond its peak so far."""
    if not memory.on_accelerator:
        peak = peak_resident()
        return 0 if peak is None else int(_USABLE * fast_tier_bytes(memory.device, world_size)) - peak
    module = torch.get_device_module(memory.device)
    free, _ = module.mem_get_info(memory.device)
    reachable = free + module.memory_reserved(memory.device)
    return int(_USABLE * reachable) - peak_allocated(memory.device)
