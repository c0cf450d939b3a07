"""What may look on while networks compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Observer = Callable[[str, int], None]
"""(phase: "forward", "backward" or "end", unit): called when the weights of the unit are there."""


class Monitor(Protocol):
    """Measures what takes memory beside the chunks."""

    def access(self, phase: str, unit: int) -> None:
        """Note that a unit's weights are about to be gathered."""
        ...

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        ...

    def abort(self) -> None:
        """Forget the pass under way."""
        ...
