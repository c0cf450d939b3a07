"""A process group of one rank whose collectives are not left out, so that one device runs what several would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

_COUNTED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@contextmanager
def one_rank_group(backend: str) -> Iterator[Counter[str]]:
    """Make the group, take no short cuts in the body, and count torch's collectives by name."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with with_collectives() as counts:
            yield counts
    finally:
        dist.destroy_process_group()


@contextmanager
def with_collectives() -> Iterator[Counter[str]]:
    """Let engines and callbacks run their collectives with one rank, too."""
    from sd_lightning.strategies.base import EngineStrategy

    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch("sd_lightning.gemini.collectives.has_no_peers", lambda group: group is None))
        stack.enter_context(mock.patch.object(EngineStrategy, "has_peers", True))
        for name in _COUNTED:
            stack.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        yield counts
