"""What the captions of a training cost, and whether to store their embeddings or to encode them in the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sd_lightning.models.encoder import CACHED_CAPTIONS_BYTES
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.passes import caption_numel
from sd_lightning.planner.search import Search, TrainingPlan

READABLE = 1e9
"""Bytes per second that a store delivers to a machine: a local disk or a fast network; assumed."""
NEGLIGIBLE = 0.02
"""Part of a step's time below which encoding captions is not worth a store, if its memory is not."""
_SMALL = 0.1
"""Part of a GPU's memory below which text encoders are not worth a store."""
_STORED_BYTES = 2
"""Per number, with precompute's default dtype."""


@dataclass(frozen=True)
class TextBill:
    """The captions of a training: their size in a store, and the time to encode and to read them."""

    caption_bytes: int
    """Of a caption's embeddings in a store; with padding, which a store may leave out."""
    latents_bytes: int
    """Of its image's latents in a store."""
    drops_padding: bool
    """Whether a store leaves out what is made of padding."""
    captions: int | None
    """Different captions of the data set; None if not known."""
    seconds: float
    """To encode a caption on a GPU of the training."""
    share: float
    """Part of a step's time that this takes."""
    read_per_second: float
    """Bytes that all GPUs of the training would read from a store per second."""
    memory_share: float
    """Part of a GPU's memory that the text encoders take during the training."""
    needs_images: bool
    """Whether the denoiser also takes what is made of images, so that no store has all."""

    @classmethod
    def of(cls, search: Search, plan: TrainingPlan, captions: int | None = None) -> TextBill:
        """Return the bill of a plan whose text encoders are not trained."""
        model, run, count = search.model_with_encoders, plan.run, plan.cluster.count
        size = math.prod(model.latent_space.encoded_shape(run.resolution, run.resolution))
        caption_bytes = _STORED_BYTES * caption_numel(model)
        seconds = search.seconds_to_encode_captions(run.batch_size)
        sample = count / plan.images_per_second
        stays = run.encodes and not run.offload_encoders
        weights = sum(p.numel() for network in model.text_encoders.values() for p in network.parameters())
        rest = max(sample - seconds, 1e-9) if run.encodes else sample
        return cls(
            caption_bytes,
            _STORED_BYTES * size,
            model.family.masks_padding,
            captions,
            seconds,
            seconds / (rest + seconds),
            count * caption_bytes / rest,
            stays * run.encoder_dtype.itemsize * weights / plan.cluster.memory,
            model.family.image_channels > 0,
        )

    @property
    def choice(self) -> str:
        """Return "cache": encode each caption once, in the run; "online": in every step; "trim" or "store"."""
        if self.captions is not None and self.captions * self.caption_bytes <= CACHED_CAPTIONS_BYTES:
            return "cache"
        is_cheap = self.share < NEGLIGIBLE and self.memory_share < _SMALL
        if is_cheap or self.needs_images or self.read_per_second > READABLE:
            return "online"
        return "trim" if self.drops_padding else "store"

    def line(self) -> str:
        """Return all this as a line of text."""
        many = "" if self.captions is None else f", {self.captions * self.caption_bytes / GB:,.3g} GB of all"
        at_most = "at most " if self.drops_padding else ""
        how = {
            "cache": "encode each once, in the run, whose cache holds them all (module.offload_encoders=true)",
            "online": "encode them in each step (text=false)",
            "store": "store them (precompute text=true, then encoders=none)",
            "trim": "store them, without padding (precompute text=true, then encoders=none)",
        }[self.choice]
        ratio = self.caption_bytes / self.latents_bytes
        sizes = f"{self.caption_bytes / 1e6:.3g} MB per caption, {ratio:.3g} times its latents{many}"
        encoding = f"{100 * self.share:.2g} % of a step and {100 * self.memory_share:.0f} % of the GPU's memory"
        reading = f"{self.read_per_second / GB:.2g} of an assumed {READABLE / GB:g} GB/s"
        return f"text: {at_most}{sizes}; encoding takes {encoding}, reading {reading}: {how}"
