"""The order in which units are used, recorded in one pass and expected of the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence


class Tracer:
    """Record the units that a pass uses, and predict what comes next.

    A pass is one forward and backward, or one forward without gradients. The future is known for as long as a pass
    does what the one of its kind before it did; once it differs, nothing is predicted until the next pass.

    Args:
        chunks_of: Chunk indices of each unit.
    """

    NEVER = 1 << 62

    def __init__(self, chunks_of: Sequence[Sequence[int]]) -> None:
        self._chunks_of = chunks_of
        # By the kind of the pass: sampling in between does not make training forget its order.
        self._expected_of: dict[bool, list[int]] = {True: [], False: []}
        self._uses_of: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
        self._with_gradients = True
        self._current: list[int] = []
        self._is_known = False
        """Whether the pass has followed the expected one so far."""

    @property
    def order(self) -> list[int]:
        """Units of the last complete pass of the kind under way."""
        return list(self._expected)

    @property
    def _expected(self) -> list[int]:
        return self._expected_of[self._with_gradients]

    @property
    def current_start(self) -> int | None:
        """The unit that the pass under way began with."""
        return self._current[0] if self._current else None

    def begin(self, *, with_gradients: bool) -> None:
        """Note that a network is called outside of a backward pass: another kind of pass ends the one before it."""
        if with_gradients != self._with_gradients:
            self.end_pass()
            self._with_gradients = with_gradients
            self._is_known = bool(self._expected)

    def use(self, unit: int) -> None:
        """Note that a unit is used now."""
        position = len(self._current)
        self._current.append(unit)
        if self._is_known and (position >= len(self._expected) or self._expected[position] != unit):
            self._is_known = False

    def end_pass(self) -> None:
        """Expect what was recorded of the next pass."""
        if not self._current:
            return
        if self._current != self._expected:
            self._expected_of[self._with_gradients] = self._current
            uses = self._uses_of[self._with_gradients] = {}
            for position, unit in enumerate(self._expected):
                for chunk in self._chunks_of[unit]:
                    uses.setdefault(chunk, []).append(position)
        self._current = []
        self._is_known = True

    def forget(self) -> None:
        """Predict nothing until a pass has been seen: after a failure ranks may have recorded different ones."""
        self._expected_of = {True: [], False: []}
        self._uses_of = {True: {}, False: {}}
        self._current = []
        self._is_known = False

    def next_use(self, chunk: int) -> int:
        """Return the position at which a chunk is used next, ``NEVER`` if it is not or nothing is known."""
        if not self._is_known:
            return self.NEVER
        uses = self._uses_of[self._with_gradients].get(chunk, [])
        index = bisect_right(uses, len(self._current) - 1)
        return uses[index] if index < len(uses) else self.NEVER

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """Yield (position, chunk) of what is used after now, in order."""
        if not self._is_known:
            return
        for position in range(len(self._current), len(self._expected)):
            for chunk in self._chunks_of[self._expected[position]]:
                yield position, chunk
