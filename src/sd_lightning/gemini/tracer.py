"""In which order a pass uses units, and so which chunks come next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence


class Tracer:
    """Record of the units that a pass uses, and prediction of the next ones.

    A pass is one forward and backward, or one forward without gradients. Units are predicted while a pass repeats the
    previous pass of its kind. Once it differs, nothing is predicted until the next pass.

    Args:
        chunks_of: Chunk indices of each unit.
    """

    NEVER = 1 << 62

    def __init__(self, chunks_of: Sequence[Sequence[int]]) -> None:
        self._chunks_of = chunks_of
        self._with_gradients = True
        self._current: list[int] = []
        self.forget()

    @property
    def order(self) -> list[int]:
        """Units of the last complete pass of the current kind; they are expected in the next one."""
        return self._order_of[self._with_gradients]

    @property
    def current_start(self) -> int | None:
        """The first unit of the current pass."""
        return self._current[0] if self._current else None

    def begin(self, *, with_gradients: bool) -> None:
        """Note a network call outside of a backward pass; a pass of another kind ends the previous one."""
        if with_gradients != self._with_gradients:
            self.end_pass()
            self._with_gradients = with_gradients
            self._is_known = bool(self.order)

    def use(self, unit: int) -> None:
        """Note that a unit is used now."""
        position = len(self._current)
        self._current.append(unit)
        if self._is_known and (position >= len(self.order) or self.order[position] != unit):
            self._is_known = False

    def end_pass(self) -> None:
        """Expect the recorded order in the next pass."""
        if not self._current:
            return
        if self._current != self.order:
            self._order_of[self._with_gradients] = self._current
            uses = self._uses_of[self._with_gradients] = {}
            for position, unit in enumerate(self.order):
                for chunk in self._chunks_of[unit]:
                    uses.setdefault(chunk, []).append(position)
        self._current = []
        self._is_known = True

    def forget(self) -> None:
        """Discard all recorded orders: ranks may have recorded different ones, for example after a failure."""
        # By the kind of the pass, so that sampling in between does not discard the order of training.
        self._order_of: dict[bool, list[int]] = {True: [], False: []}
        self._uses_of: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
        self._current = []
        self._is_known = False
        """Whether the pass has followed the expected order so far."""

    def next_use(self, chunk: int) -> int:
        """Return the position of a chunk's next use; ``NEVER`` if there is none or nothing is predicted."""
        if not self._is_known:
            return self.NEVER
        uses = self._uses_of[self._with_gradients].get(chunk, [])
        index = bisect_right(uses, len(self._current) - 1)
        return uses[index] if index < len(uses) else self.NEVER

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """Yield (position, chunk) of the next uses, in order."""
        if not self._is_known:
            return
        for position in range(len(self._current), len(self.order)):
            for chunk in self._chunks_of[self.order[position]]:
                yield position, chunk
