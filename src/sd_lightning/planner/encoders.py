"""Frozen encoders as work of their own: on GPUs beside the trainers, how many keep these busy, and what both cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sd_lightning._errors import UsageError
from sd_lightning.models.encoder import images_per_call
from sd_lightning.models.families.base import flat_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.meta import meta_batch, meta_networks
from sd_lightning.planner.devices import Device
from sd_lightning.planner.forecast import DEVICE_ALLOWANCE, GB
from sd_lightning.planner.passes import encoding_traces
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.trace import Trace

HEADROOM = 1.1
"""Images per second of the encoders together to those of the trainers, so that a slow batch is made up for; assumed."""
STORED_BYTES = 2
"""Of a number in a store: float16, the default of ``precompute``."""
_MILLION = 1e6


@dataclass(frozen=True, eq=False)
class EncodingWork:
    """What frozen encoders do for images and their captions, and what they make of them."""

    model: LatentDiffusion
    run: TrainingRun
    num_images: int
    """Images and captions of a call."""

    @classmethod
    def alone(cls, model: LatentDiffusion, run: TrainingRun) -> EncodingWork:
        """Return the work of a process that only encodes: as many images at a time as ``LatentEncoder`` takes."""
        return cls(model, run, images_per_call(run.resolution, run.resolution))

    @cached_property
    def _traces(self) -> Sequence[Trace]:
        return encoding_traces(self.model, self.run, self.num_images)

    def seconds(self, speeds: Speeds) -> float:
        """Return the seconds for an image and its caption; they grow with their number."""
        if self.run.encoder_dtype != torch.float32:  # as `models.tf32.products_of` decides
            speeds = speeds.with_tf32()
        return sum(float(speeds.seconds(trace, 0).sum()) for trace in self._traces) / self.num_images

    @property
    def memory(self) -> int:
        """Bytes on the GPU of a process that only encodes."""
        frozen = [self.model.vae, *(() if self.run.train_text_encoder else self.model.text_encoders.values())]
        weights = sum(parameter.numel() for network in frozen for parameter in network.parameters())
        pixels = self.num_images * 3 * self.run.resolution**2
        held = self.run.encoder_dtype.itemsize * (weights + pixels)
        return DEVICE_ALLOWANCE + held + max(trace.peak() for trace in self._traces)

    @cached_property
    def numel(self) -> int:
        """Numbers that are made of an image and its caption: moments of the VAE's posterior, and text embeddings."""
        size = self.run.resolution
        moments = 2 * math.prod(self.model.family.latent_shape(self.model.components, size, size))
        if self.run.train_text_encoder:
            return moments
        encoders, batch = meta_networks(self.model, tuple(self.model.text_encoders)), meta_batch(self.model, 1)
        with torch.no_grad():
            embeddings = self.model.family.embed(encoders, batch["input_ids"])
        return moments + sum(tensor.numel() for tensor in flat_conditioning(embeddings).values())

    @property
    def sent_bytes(self) -> int:
        """Bytes per image that encoders elsewhere send to the trainers, in the encoders' dtype."""
        return self.numel * self.run.encoder_dtype.itemsize


@dataclass(frozen=True)
class EncodingBill:
    """A way to encode for a training, and the GPU-hours of a million images that pass through it."""

    way: str
    """For tables: "in the trainers' steps", "beside them, on NVIDIA A10G"."""
    images_per_second: float
    """Of the training."""
    trainer_hours: float
    encoder_hours: float = 0.0
    """With a store, of a million images of the data set, however often they pass."""
    encoder: Device | None = None
    """None: the trainers encode."""
    num_encoders: int | None = None
    """As many as keep the trainers busy; None into a store, which any number fills."""
    encoder_images_per_second: float | None = None
    """Of one."""

    def dollars(self, price: float | None, epochs: int) -> float | None:
        """Return the dollars for a million images that pass through training; None if a GPU has no price.

        Args:
            price: Of a trainer's GPU and hour.
            epochs: How often each image passes.
        """
        encoder_price = 0.0 if self.encoder is None else self.encoder.price_per_hour
        if price is None or encoder_price is None:
            return None
        passes = epochs if self.num_encoders is None else 1
        return self.trainer_hours * price + self.encoder_hours / passes * encoder_price


def encoding_bills(
    work: EncodingWork,
    encoders: Sequence[tuple[Device, Speeds]],
    *,
    num_trainers: int,
    images_per_second: float,
    on_the_fly: float | None,
) -> list[EncodingBill]:
    """Return the bill of each way to encode: by the trainers, and by each kind of GPU beside them and into a store.

    Args:
        work: Of an encoder; the ``loaded_per_second`` of its run bound each encoder, too.
        encoders: Kinds of GPUs.
        num_trainers: GPUs that train.
        images_per_second: Of the training where others encode.
        on_the_fly: The same where the trainers encode; None if that does not fit.
    """

    def hours(rate: float, count: int = 1) -> float:
        return count * _MILLION / rate / 3600

    bills = []
    if on_the_fly is not None:
        bills.append(EncodingBill("in the trainers' steps", on_the_fly, hours(on_the_fly, num_trainers)))
    trained = images_per_second, hours(images_per_second, num_trainers)
    for device, speeds in encoders:
        rate = min(1 / work.seconds(speeds), work.run.loaded_per_second or math.inf)
        count = math.ceil(HEADROOM * images_per_second / rate)
        busy = hours(images_per_second, count)
        bills += [
            EncodingBill(f"beside them, on {device.name}", *trained, busy, device, count, rate),
            EncodingBill(f"once on {device.name}, stored", *trained, hours(rate), device, None, rate),
        ]
    return bills


def check_encoders(work: EncodingWork, encoders: Sequence[tuple[Device, Speeds]]) -> None:
    """Check that encoders fit into their GPUs.

    Raises:
        UsageError: One does not.
    """
    for device, _ in encoders:
        if work.memory > device.usable_memory:
            raise UsageError(
                f"plan got encoders on {device.name}, of whose memory {device.usable_memory / GB:.1f} GB can be used; "
                f"encoding {work.num_images} image(s) of {work.run.resolution} pixels at a time takes "
                f"{work.memory / GB:.1f} GB; leave it out, or write module.encoder_dtype=bfloat16"
            )
