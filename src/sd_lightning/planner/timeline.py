"""The memory of a training step, operation by operation, and of what its peak consists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sd_lightning.models.checkpointing import KINDS
from sd_lightning.planner.footprint import Footprint
from sd_lightning.planner.forecast import GB, Forecaster, StepCurves
from sd_lightning.planner.trace import Trace

OTHERS = "others"
"""Activations of normalisations, activation functions, sums, copies and casts."""


@dataclass(frozen=True)
class Timeline:
    """The memory of one process during each operation of a forward and backward pass."""

    held: Mapping[str, np.ndarray]
    """Bytes of weights, gradients and the like, by kind."""
    activations: Mapping[str, np.ndarray]
    """Bytes by the kind of operation that made them: "attention", "convolution", "matmul", :data:`OTHERS`."""
    blocks: Sequence[str]
    """The block of each operation; "" outside of blocks."""
    is_backward: np.ndarray
    by_block: Mapping[str, int]
    """Bytes of activations at the peak, by the block that made them."""

    @property
    def total(self) -> np.ndarray:
        found: np.ndarray = sum([*self.held.values(), *self.activations.values()], np.zeros(len(self.blocks)))
        return found

    @property
    def peak(self) -> int:
        """Index of the operation with the most memory."""
        return int(self.total.argmax())

    def told(self) -> str:
        """Return what the peak consists of: "at 61 % of the operations, backward in unet.up_blocks.3: …"."""
        peak = self.peak
        kinds = {kind: float(curve[peak]) for kind, curve in self.activations.items()}
        activations = sum(kinds.values())
        ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
        of_kind = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in ordered if size)
        where = "backward" if self.is_backward[peak] else "forward"
        where += f" in {self.blocks[peak]}" if self.blocks[peak] else ""
        text = (
            f"at {100 * peak / len(self.blocks):.0f} % of the operations, {where}: {activations / GB:.2f} GB of "
            f"{self.total[peak] / GB:.2f} are activations ({of_kind})"
        )
        named = {block: size for block, size in self.by_block.items() if block}
        if not named:
            return text
        largest = max(named, key=lambda block: named[block])
        return f"{text}; {largest} made {named[largest] / GB:.2f} of them"


def timeline(forecaster: Forecaster, footprint: Footprint) -> Timeline:
    """Return the timeline of a run's step.

    Args:
        forecaster: Of the run, with what its blocks keep.
        footprint: What the strategy holds.
    """
    trace, size = forecaster.trace(footprint), forecaster.run.batch_size
    curves = StepCurves(trace, footprint)
    count = len(trace.operations)
    held = {kind: np.full(count, float(each)) for kind, each in forecaster.always(footprint).items()}
    for kind, curve in curves.curves.items():
        held[kind] = held.get(kind, np.zeros(count)) + curve
    makers = [trace.operations[index] for index in trace.born.clip(max=count - 1)]
    kinds = np.array([KINDS.get(each.cost.name, OTHERS) for each in makers])
    names = [*dict.fromkeys(KINDS.values()), OTHERS]
    activations = {name: trace.live(size, kinds == name) for name in names}
    found = Timeline(
        {kind: curve for kind, curve in held.items() if curve.any()},
        activations,
        [each.block for each in trace.operations],
        trace.is_backward,
        {},
    )
    return Timeline(found.held, activations, found.blocks, found.is_backward, _by_block(trace, size, found.peak))


def _by_block(trace: Trace, batch_size: int, peak: int) -> Mapping[str, int]:
    sizes = trace.sizes(batch_size)
    found: Counter[str] = Counter()
    for index in np.flatnonzero((trace.born <= peak) & (trace.freed > peak)).tolist():
        found[trace.operations[trace.born[index]].block] += int(sizes[index])
    return found
