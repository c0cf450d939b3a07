"""Frozen encoders on GPUs beside the trainers: how many keep these busy, and what both cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sd_lightning._errors import UsageError
from sd_lightning.models.encoder import images_per_call
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.devices import Device
from sd_lightning.planner.forecast import GB, Forecaster
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Search, TrainingPlan


@dataclass(frozen=True)
class EncodingBill:
    """A way to encode while a model trains, and its dollars for a million images; None if a GPU has no price."""

    encoders: str
    """For tables: "the trainers, in their steps", "NVIDIA A10G"."""
    images_per_second: float
    """Of the training."""
    trainer_dollars: float | None
    num_encoders: int = 0
    """GPUs beside the trainers, as many as keep these busy."""
    encoder_images_per_second: float | None = None
    """Of each of them."""
    encoder_dollars: float | None = 0.0

    @property
    def dollars(self) -> float | None:
        """Of both."""
        if self.trainer_dollars is None or self.encoder_dollars is None:
            return None
        return self.trainer_dollars + self.encoder_dollars


def encoding_bills(
    search: Search,
    trained: TrainingPlan,
    encoders: Sequence[tuple[Device, Speeds]],
    *,
    price: float | None = None,
    loader: float | None = None,
) -> list[EncodingBill]:
    """Return the bill of each way to encode: by the trainers, if that fits, and by each kind of GPU beside them.

    Args:
        search: For trainers that encode nothing.
        trained: One of its plans.
        encoders: Kinds of GPUs.
        price: Dollars of a trainer's GPU per hour.
        loader: Images per second that the data loader delivers to each process that encodes.
    """

    def dollars(plan: TrainingPlan) -> float | None:
        return None if price is None else plan.dollars_per_million(price)

    own = replace(search, run=replace(search.run, encodes=True, loaded_per_second=loader)).plans().best[:1]
    bills = [EncodingBill("the trainers, in their steps", plan.images_per_second, dollars(plan)) for plan in own]
    rate, at_a_time = trained.images_per_second, images_per_call(search.run.resolution, search.run.resolution)
    for device, speeds in encoders:
        each = min(1 / search.seconds_to_encode(speeds, at_a_time), loader or math.inf)
        count = math.ceil(rate / each)
        cost = device.price_per_hour and device.price_per_hour * count * 1e6 / rate / 3600
        bills.append(EncodingBill(device.name, rate, dollars(trained), count, each, cost))
    return bills


def options_of(bills: Sequence[EncodingBill]) -> list[str]:
    """Return the command line for the encoders with the smallest bill, the first if none has one.

    The trainers keep their own copy of the encoders in host memory: the plan has no room for it on the GPU.
    """
    beside = [bill for bill in bills if bill.num_encoders]
    least = min(beside, key=lambda bill: bill.encoder_dollars or math.inf, default=None)
    if least is None:
        return []
    return ["data.encoders=ray", f"data.num_encoders={least.num_encoders}", "module.offload_encoders=true"]


def check_encoders(model: LatentDiffusion, run: TrainingRun, encoders: Sequence[tuple[Device, Speeds]]) -> None:
    """Check that encoders fit into their GPUs.

    Raises:
        UsageError: One does not.
    """
    memory = Forecaster(model, run).encoder_memory if encoders else 0
    for device, _ in encoders:
        if memory > device.usable_memory:
            raise UsageError(
                f"plan got encoders on {device.name}, of whose memory {device.usable_memory / GB:.1f} GB can be used; "
                f"encoding {images_per_call(run.resolution, run.resolution)} image(s) of {run.resolution} pixels at a "
                f"time takes {memory / GB:.1f} GB; take a larger one"
            )
