"""Adapters on quantised weights on one GPU, as `experiment=qlora` has them: predicted against measured memory and time.

At their published size, with random weights, which are quantised on the GPU here. See `families_gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cases import families_gpu
from cases.families_gpu import Setting
from lines import Measured

BARS = {"memory_off_by": "<= 0.1"}
_setting = partial(Setting, strategy="gemini", batch_size=1, precision="bf16-true", rank=16)
SETTINGS = (
    _setting("sdxl", resolution=1024, base="nf4"),
    _setting("sdxl", resolution=1024, base="int8"),
    _setting("klein_4b", resolution=1024, base="nf4"),
    _setting("klein_4b", resolution=1024, base="int8"),
    _setting("krea2", base="nf4"),
    _setting("krea2", base="int8"),
)


def _table(metric: str) -> str:
    nf4, int8 = (["{" + f"{each}_{metric}" + "}" for each in SETTINGS[first::2]] for first in (0, 1))
    return "; ".join(f"{a}, {b}" for a, b in zip(nf4, int8))


TABLE = {
    "LoRA on NF4, on int8, on a GPU, batch 1, GB: SDXL at 1024; klein-4B at 1024; Krea 2 at 512": _table("gb"),
    "the same, predicted by measured; largest error": _table("memory") + "; {memory_off_by}",
    "the same, images per second": _table("images_per_second"),
    "the same, predicted by measured time": _table("time"),
}
DRY: dict[str, Any] = {
    "settings": (Setting("tiny_klein", "gemini", 2, 32, "bf16-true", rank=2, base="nf4"),),
    "steps": 4,
    "device": "h200",
    "processes": 0,
}


def measure(
    *, settings: tuple[Setting, ...] = SETTINGS, steps: int = 6, device: str | None = None, processes: int = 8
) -> Iterator[Measured]:
    """Train some steps under every setting; the arguments of `families_gpu`."""
    return families_gpu.measure(settings=settings, steps=steps, device=device, processes=processes)
