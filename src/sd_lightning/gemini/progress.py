"""How far the optimizer of a parameter has come."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """What is kept once per parameter; parameters that agree in it are stepped together."""

    step: int
    """Steps so far, where they are counted by the engine; 1 where they are among the scalars."""
    scalars: tuple[tuple[str, float], ...] = ()
    """What a class of the user's keeps once per parameter, by name: NAdam's ``mu_product``."""
