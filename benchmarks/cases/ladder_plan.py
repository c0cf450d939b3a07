"""The ladder as the planner predicts it: Stable Diffusion 2.1 at 512 x 512 pixels on eight A100 80GB.

Nothing is measured. The planner does not know the loader, the kernels of optimizer and average, and compiled layers:
it assumes the fast ones from the first rung on, and these rungs are not predicted. "Stored latents" is also predicted
for 1, 2, 4 and 8 GPUs with the same batch on each, and FSDP2 and DDP for two such machines whose network is TCP over
one card of 100 Gbit/s, or EFA over four. The rungs that NVIDIA published are predicted with its model, batches and GPU.
"""

from dataclasses import replace
from typing import Any

import ladder
from ladder_forecast import Hardware, forecasts, predicted
from lines import Measured
from published import NVIDIA_LADDER

BARS: dict[str, str] = {}
PER_GPU = 8, 32
"""Samples of a pass, before and after the rung "larger batch"."""
GPU = "a100-80gb"
COUNTS = (1, 2, 4, 8)
NETWORKS = {"tcp": 12.5e9, "efa": 50e9}
"""Bytes per second between two machines: all GPUs of a machine share them, and a ring passes them once."""
PRICED = {rung.name for rung in ladder.RUNGS if rung.is_priced}
TABLE = ladder.told("sd21 on 8 A100 80GB", memory=True) | {
    "stored latents on 1, 2, 4, 8 GPUs, predicted images per second": "; ".join(
        f"{{scaling_{count}_predicted_images_per_second}}" for count in COUNTS
    ),
    "FSDP2 on two machines of 8 GPUs: TCP; EFA; DDP: TCP; EFA": (
        "{fsdp_tcp_predicted_images_per_second}; {fsdp_efa_predicted_images_per_second}; "
        "{ema_tcp_predicted_images_per_second}; {ema_efa_predicted_images_per_second}"
    ),
    "NVIDIA's rungs, predicted images per second": "; ".join(
        f"{{nvidia_{each.rung}_predicted_images_per_second}}" for each in NVIDIA_LADDER if each.rung in PRICED
    ),
}


def measure(
    architecture: str = "sd21", resolution: int = 512, gpu: str = GPU, counts: tuple[int, ...] = COUNTS
) -> Measured:
    """Predict every rung.

    Args:
        architecture: Which model.
        resolution: Side of the images, pixels.
        gpu: Name of a device table.
        counts: Numbers of GPUs; the rungs are for the last one.
    """
    from sd_lightning.planner.calibration import hardware

    device, speeds = hardware(gpu)
    of, most = {rung.name: rung for rung in ladder.RUNGS}, counts[-1]

    def way(count: int) -> ladder.Climb:
        options = (f"model={architecture}", f"data.resolution={resolution}")
        return ladder.Climb(options, "photos", "latents", (PER_GPU[0] * count, PER_GPU[1] * count))

    def told(name: str, count: int, reached: Any = speeds) -> tuple[float, float]:
        return predicted(way(count).command(of[name], []), Hardware(device, reached, count))

    *_, metrics = forecasts(way(most), [], Hardware(device, speeds, most))
    for count in counts:
        rate, memory = told("latents", count)
        metrics |= {f"scaling_{count}_predicted_images_per_second": rate, f"scaling_{count}_predicted_gb": memory}
    for network, rate in NETWORKS.items():
        slower = replace(speeds, link={kind: min(link, rate) for kind, link in speeds.link.items()})
        for name in ("ema", "fsdp"):
            metrics[f"{name}_{network}_predicted_images_per_second"] = told(name, 2 * most, slower)[0]
    metrics |= nvidia() if gpu == GPU else {}
    described = {"gpu": device.name, "model": f"{architecture} at {resolution} x {resolution}"}
    return {**metrics, **described, "devices": most}


def nvidia() -> dict[str, float]:
    """Predict the rungs that NVIDIA published."""
    from sd_lightning.planner.calibration import hardware

    alone, of = Hardware(*hardware(GPU), 1), {rung.name: rung for rung in ladder.RUNGS}
    found = {}
    for each in NVIDIA_LADDER:
        if each.rung not in PRICED:
            continue
        options = ("model=sd15", "data.resolution=512")
        way = ladder.Climb(options, "photos", "latents", (each.batch_size, each.batch_size))
        rate, _ = predicted(way.command(of[each.rung], []), alone)
        found[f"nvidia_{each.rung}_predicted_images_per_second"] = rate
    return found
