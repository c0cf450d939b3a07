"""The settings of a training run that its memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.models.lora import Lora
from sd_lightning.planner.footprint import OptimizerFactory


@dataclass(frozen=True)
class TrainingRun:
    """Settings of a run, with one process per device."""

    batch_size: int
    """Samples per forward pass and process."""
    resolution: int
    """Side of the images, pixels."""
    precision: str = "bf16-mixed"
    """Lightning's name: "32-true", "bf16-mixed", "bf16-true", "16-mixed"."""
    world_size: int = 1
    accumulate: int = 1
    """Forward passes per step."""
    train_text_encoder: bool = False
    lora: Lora | None = None
    preserves: bool = False
    """Whether predictions for other captions are held to those without adapters: three passes instead of one."""
    optimizer: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-5)
    """Parameters -> optimizer."""
    gradient_checkpointing: bool = False
    """Whether all blocks keep their inputs only."""
    kept: Mapping[str, SavedActivations] = field(default_factory=dict)
    """What blocks keep for backward, by network and name of the block: "unet.mid_block.resnets.0"; otherwise all."""
    encoder_dtype: torch.dtype = torch.float32
    averages: bool = False
    """Whether an EMA of the weights is kept."""
    offload_averages: bool = False
    """Whether the EMA is in host memory instead of beside the master weights."""
    encodes: bool = True
    """Whether all frozen encoders are loaded; with a store, only those of text that compute beside trained ones are."""
    offload_encoders: bool = False
    """Whether frozen encoders are on the device only while they encode, one image at a time."""
    random_captions: bool = False
    """Whether captions are others in every epoch, so that offloaded encoders remember none."""
    cache_latents: bool = False
    """Whether images are encoded before training instead of in each step."""
    num_images: int = 100
    """Images whose moments are cached in host memory with ``cache_latents``."""
    drawn_size: tuple[int | None, int | None] = (None, None)
    """Height and width of generated images, pixels; None: the model's."""
    vae_tiling: bool = False
    """Whether generated images are decoded in tiles."""
    sample_batch_size: int = 0
    """Images generated at a time during and after training; 0 for none."""
    prior_batch_size: int = 0
    """Class images generated at a time before training; 0 for none."""
    prior_dtype: torch.dtype = torch.bfloat16
    """Dtype in which class images are generated."""
    loaded_per_second: float | None = None
    """Images that the data loader delivers per process; None if it is never waited for."""
    from_files: bool = True
    """Whether weights are read from files tensor by tensor, not built as a whole model."""


class TakesMemory:
    """Interface of callbacks whose memory is predicted."""

    def add_memory(self, run: TrainingRun) -> TrainingRun:
        """Return the settings of a run with this callback."""
        raise NotImplementedError
