"""Time of the planner on two cores, after imports: all strategies for SDXL on eight GPUs, and one prediction."""

import time
from collections.abc import Callable

BARS = {"plan_s": "<= 10", "prediction_s": "<= 2"}
TABLE = {"planner, SDXL: all strategies on eight GPUs; one prediction": "{plan_s} s; {prediction_s} s"}


def measure() -> dict[str, float | list[float]]:
    """Each with a new model: traces of a model are remembered."""
    import deepspeed  # noqa: F401  counted as an import
    import torch

    from sd_lightning import LatentDiffusion
    from sd_lightning.planner import plan
    from sd_lightning.planner.forecast import Forecaster
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.strategies.gemini import GeminiStrategy
    from sd_lightning.strategies.presets import candidates

    torch.zeros(2, device="meta").sum()
    run = TrainingRun(1, 1024, averages=True, encoder_dtype=torch.bfloat16)

    def seconds(act: Callable[[LatentDiffusion], None]) -> float:
        model = LatentDiffusion.build("sdxl", device="meta")
        started = time.perf_counter()
        act(model)
        return time.perf_counter() - started

    def all_strategies(model: LatentDiffusion) -> None:
        assert len(plan(model, "a100-80gb", 8, run=run, candidates=candidates()).best) > 10

    def one(model: LatentDiffusion) -> None:
        forecaster = Forecaster(model, run)
        footprint = GeminiStrategy().footprint(forecaster.workload)
        assert footprint is not None and forecaster.forecast(footprint).device > 0

    return {"plan_s": seconds(all_strategies), "prediction_s": [seconds(one) for _ in range(5)]}
