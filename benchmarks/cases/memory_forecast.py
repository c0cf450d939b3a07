"""Predicted against real peak memory of a training step under each strategy, on two gloo processes.

On the CPU, device and host are one memory. The real peak includes what Python, gloo and oneDNN allocate.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from torchrun import torchrun

WORLD_SIZE = 2
NAMES = (
    *("ddp", "fsdp", "fsdp_grad_op", "fsdp_offload", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero2_offload"),
    *("deepspeed_zero3", "deepspeed_zero3_offload", "gemini", "gemini_gathered", "gemini_offload"),
)
BARS = {f"{name}_32-true_off_by": "<= 0.05" for name in NAMES}
BARS |= {f"{name}_bf16-mixed_off_by": "<= 0.05" for name in NAMES if name.startswith(("deepspeed", "gemini"))}
TABLE = {
    "predicted to real peak in float32: DDP; FSDP2; with offloading; ZeRO-1; ZeRO-2; ZeRO-3": (
        "{ddp_32-true}; {fsdp_32-true}; {fsdp_offload_32-true}; {deepspeed_zero1_32-true}; "
        "{deepspeed_zero2_32-true}; {deepspeed_zero3_32-true}"
    ),
    "the same: ZeRO-2 and ZeRO-3 with offloading; Gemini; whole weights; offloaded": (
        "{deepspeed_zero2_offload_32-true}; {deepspeed_zero3_offload_32-true}; {gemini_32-true}; "
        "{gemini_gathered_32-true}; {gemini_offload_32-true}"
    ),
    "the same in bfloat16: ZeRO-1; ZeRO-2; ZeRO-3; Gemini; whole weights; offloaded": (
        "{deepspeed_zero1_bf16-mixed}; {deepspeed_zero2_bf16-mixed}; {deepspeed_zero3_bf16-mixed}; "
        "{gemini_bf16-mixed}; {gemini_gathered_bf16-mixed}; {gemini_offload_bf16-mixed}"
    ),
}


def measure() -> dict[str, float]:
    """Peak of the second and third step; "off_by" is the relative error."""
    metrics = {}
    for run, real in torchrun("memory_forecast.py", WORLD_SIZE).items():
        name, precision = run.split("/")
        ratio = predicted(name, precision) / real
        metrics[f"{name}_{precision}"] = ratio
        metrics[f"{name}_{precision}_off_by"] = abs(ratio - 1)
    return metrics


def predicted(name: str, precision: str) -> int:
    """Return the forecast of device and host together, without allowances."""
    from memory_forecast import OPTIMIZER, STRATEGIES
    from sd_lightning.planner.footprint import PAGE_LOCKED_ROUNDING, Holding, When
    from sd_lightning.planner.forecast import Forecaster, StepCurves
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.strategies import engine_of
    from unet_35m import BATCH_SIZE, LATENTS, build

    model = build()
    run = TrainingRun(
        BATCH_SIZE, LATENTS[-1] * model.latent_space.stride, precision, world_size=WORLD_SIZE, optimizer=OPTIMIZER
    )
    forecaster = Forecaster(model, run)
    footprint: Any = engine_of(STRATEGIES[name]()).footprint(forecaster.workload)
    all_held: list[Holding] = [*footprint.device, *footprint.host]
    holdings = [each for each in all_held if each.kind != PAGE_LOCKED_ROUNDING]  # a CPU page-locks nothing
    held: Counter[When] = Counter()
    for each in holdings:
        held[each.when] += each.nbytes
    update = held[When.AS_READY] + held[When.UPDATE]
    if name.startswith("deepspeed") and "zero3" not in name:
        update = max(update, footprint.dtype.itemsize * sum(weight.numel for weight in forecaster.workload.weights))
    step = StepCurves(forecaster.trace(footprint), replace(footprint, device=holdings)).total(BATCH_SIZE).max()
    return int(held[When.ALWAYS] + max(step, update))
