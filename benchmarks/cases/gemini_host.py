"""Gemini's options for host memory, everything offloaded in bfloat16: bytes per weight and step time, in turns."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from timing import interleaved, ratios

_SMALL: dict[str, Any] = {"optimizer": "AdamW8bit", "step_in_backward": True, "gradient_dtype": "bfloat16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "today": {},
    "narrow": {"gradient_dtype": "bfloat16"},
    "early": {"step_in_backward": True},
    "early_narrow": {"step_in_backward": True, "gradient_dtype": "bfloat16"},
    "running_norm": {"step_in_backward": "running_norm"},
    "states_8bit": {"optimizer": "AdamW8bit"},
    "split": {"master": "split"},
    "rounded": {"master": "bfloat16"},
    "least_split": {**_SMALL, "master": "split"},
    "least": {**_SMALL, "master": "bfloat16"},
}
"""Beside offloading: settings of the engine, and the optimizer if it is not AdamW."""
BARS = {
    "today_bytes": "== 18",
    "early_bytes": "<= 14.5",
    "narrow_bytes": "<= 16.1",
    "split_bytes": "<= 16.1",
    "rounded_bytes": "<= 14.1",
    "least_split_bytes": "<= 6.5",
    "least_bytes": "<= 4.5",
    "early_time": "<= 1.15",
    "narrow_time": "<= 1.15",
    "split_time": "<= 1.5",
    "states_8bit_time": "<= 3",
    "early_same": "== 1",
    "narrow_same": "== 1",
    "split_same": "== 1",
}
TABLE = {
    "Gemini's host memory, bytes per offloaded weight at the peak: as before; bfloat16 gradients; step in backward; "
    "8-bit states; split master; bfloat16 master; all with split master; all with bfloat16 master": (
        "{today_bytes}; {narrow_bytes}; {early_bytes}; {states_8bit_bytes}; {split_bytes}; {rounded_bytes}; "
        "{least_split_bytes}; {least_bytes}"
    ),
    "its step to the one as before, in the same order; last, clipped by the running norm": (
        "{narrow_time} ×; {early_time} ×; {states_8bit_time} ×; {split_time} ×; {rounded_time} ×; "
        "{least_split_time} ×; {least_time} ×; {running_norm_time} ×"
    ),
}


def peers() -> dict[str, dict[str, Any]]:
    """Return the packages whose optimizers are stepped."""
    return {"torch": {"optimizer": "AdamW(fused=True)"}, "bitsandbytes": {"optimizer": "AdamW8bit(), on the host ours"}}


def measure(rounds: int = 7, count: int = 96, side: int = 768) -> dict[str, Any]:
    """Train a stack of linear layers, each in a chunk of its own.

    Args:
        rounds: Steps of each option that count; one of each comes before.
        count: Number of layers: 57 million weights by default, about 10 GB with all options' engines.
        side: Width of the layers.
    """
    import torch

    from sd_lightning.gemini.placement import Tier

    made = {name: _made(dict(settings), count, side) for name, settings in OPTIONS.items()}
    batch = torch.randn(4, side, generator=torch.Generator().manual_seed(0)).bfloat16()

    def seconds(name: str) -> float:
        engine, optimizer = made[name]
        begin = time.perf_counter()
        engine.backward(engine.networks[""](batch).float().square().mean())
        if name == "running_norm":
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return time.perf_counter() - begin

    taken = interleaved({name: partial(seconds, name) for name in OPTIONS}, rounds=rounds)
    found: dict[str, Any] = {}
    numel = count * side**2
    weights = {name: [whole for _, whole in engine.whole_weights()] for name, (engine, _) in made.items()}
    for name, (engine, _) in made.items():
        found[f"{name}_bytes"] = engine.ledger.peak[Tier.SLOW] / numel
        found[f"{name}_rest_bytes"] = engine.ledger.current[Tier.SLOW] / numel
        found[f"{name}_ms"] = [1e3 * each for each in taken[name]]
        found[f"{name}_time"] = ratios(taken[name], taken["today"])
        pairs = zip(weights[name], weights["today"], strict=True)
        found[f"{name}_same"] = int(all(torch.equal(one, other) for one, other in pairs))
        engine.close()
    return found


def _made(settings: dict[str, Any], count: int, side: int) -> tuple[Any, Any]:
    """Return an engine with everything on the host, and its optimizer."""
    import bitsandbytes
    import torch

    from sd_lightning.gemini import GeminiConfig, GeminiEngine

    torch.manual_seed(0)

    class Residual(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x) / count**0.5

    network = torch.nn.Sequential(*(Residual(side, side, bias=False) for _ in range(count)))
    kind = settings.pop("optimizer", "AdamW")
    settings["gradient_dtype"] = getattr(torch, settings.get("gradient_dtype", "float32"))
    config = GeminiConfig(
        offload_optim_frac=1.0,
        offload_param_frac=1.0,
        gathered_budget=8 * side**2,
        chunk_numel=side**2,
        compute_dtype=torch.bfloat16,
        **settings,
    )
    engine = GeminiEngine({"": network}, config)
    if kind == "AdamW":
        inner: Any = torch.optim.AdamW(network.parameters(), lr=1e-4)
    else:
        inner = bitsandbytes.optim.AdamW8bit(network.parameters(), lr=1e-4)
    optimizer = engine.optimizer(inner)
    optimizer.early.max_norm = 1.0 if config.step_in_backward == "running_norm" else None
    return engine, optimizer
