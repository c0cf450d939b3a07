"""Whether the gradients of several micro-batches are reduced one by one, or kept whole and reduced once a step."""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

from sd_lightning.gemini.auto import AutoPlacement, fast_tier_bytes
from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import Plan, whole_gradient_bytes
from sd_lightning.gemini.probe import peak_allocated
from sd_lightning.gemini.tiers import mib

log = logging.getLogger(__name__)

_USABLE = 0.9
"""Fraction of the fast tier; the rest is for fragmentation and collectives' buffers, as under ``memory_cap=0.9``."""


class Accumulation:
    """Decides for each step whether its micro-batches are reduced once, by the setting ``reduce_once``.

    With ``"auto"``, ``placement=auto`` keeps whole gradients if its plan leaves room for them under ``memory_cap``. The
    fractions of ``placement=static`` have no cap: there the first step is reduced micro-batch by micro-batch, and the
    most memory that it took on any rank decides for all steps after it. Ranks decide alike, and a decision holds until
    the optimizer steps; only a call with larger inputs, which is measured, reduces at once what has been kept.

    Args:
        engine: Owns the gradients.
        auto: Places the chunks, with ``placement=auto``.
    """

    def __init__(self, engine: ChunkedNetworks, auto: AutoPlacement | None) -> None:
        self._engine = engine
        self._auto = auto
        self._whole_bytes = whole_gradient_bytes(engine.layouts)
        self._keeps: bool | None = None
        """The decision for the step under way."""
        self._has_stepped = False
        self._measured: int | None = None
        self._told: bool | None = None

    def keeps_gradients(self) -> bool:
        """Return whether whole gradients are kept from one micro-batch of this step to the next; a collective call."""
        if self._keeps is None:
            self._keeps = self._decide()
        return self._keeps

    def end_step(self) -> None:
        """Note that an optimizer has stepped."""
        self._keeps, self._has_stepped = None, True

    def make_room(self, plan: Plan) -> None:
        """Reduce now what was kept whole, if the plan that comes has no room for it; a collective call."""
        engine = self._engine
        if self._keeps and engine.config.reduce_once == "auto" and not plan.keeps_gradients:
            engine.runtime.reducer.flush()
            engine.runtime.reducer.keeps_gradients = self._keeps = False

    def _decide(self) -> bool:
        engine, mode = self._engine, self._engine.config.reduce_once
        whole = mib(self._whole_bytes)
        if mode != "auto":
            once = f"gradients of all micro-batches are reduced once; until then they take {whole}"
            each = f"each micro-batch is reduced; with {whole} to spare, reduce_once=true does it once"
            return self._tell(mode, once if mode else each)
        if engine.collectives.world_size == 1:
            return self._tell(False, "each micro-batch is added up at once: there are no other ranks to reduce over")
        spare = self._spare_bytes()
        if spare is None:
            return False
        keeps = self._whole_bytes <= spare if self._auto is None else engine.plan.keeps_gradients
        once = f"micro-batches are reduced once, in float32: {whole} of the {mib(spare)} to spare"
        each = f"each micro-batch is reduced: whole gradients take {whole}, and {mib(max(spare, 0))} are to spare"
        return self._tell(keeps, once if keeps else each)

    def _spare_bytes(self) -> int | None:
        """Return what is left of the fast tier on the rank with the least; None if nothing has been measured yet."""
        engine = self._engine
        if self._auto is not None:
            return self._auto.spare_bytes
        if self._measured is None and self._has_stepped:
            own = spare_bytes(engine.memory, engine.collectives.world_size)
            least = engine.collectives.all_reduce(torch.tensor([own], dtype=torch.int64), dist.ReduceOp.MIN)
            self._measured = int(least)
        return self._measured

    def _tell(self, keeps: bool, message: str) -> bool:
        if keeps is not self._told:
            log.info("Gemini: %s", message)
        self._told = keeps
        return keeps


def spare_bytes(memory: Memory, world_size: int) -> int:
    """Return what this process can take of its fast tier beyond the most that it has taken so far."""
    if not memory.on_accelerator:
        if sys.platform == "win32":
            return 0  # the standard library cannot tell
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return int(_USABLE * fast_tier_bytes(memory.device, world_size)) - peak
    module = torch.get_device_module(memory.device)
    free, _ = module.mem_get_info(memory.device)
    reachable = free + module.memory_reserved(memory.device)
    return int(_USABLE * reachable) - peak_allocated(memory.device)
