"""The settings of a run in Python, for predictions of its memory and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.models.checkpointing import Kept, kept_by
from sd_lightning.models.families.blocks import recomputable
from sd_lightning.planner.run import TrainingRun

if TYPE_CHECKING:
    from sd_lightning.training.module import SDLightningModule


def planned_run(module: SDLightningModule, trainer: pl.Trainer) -> TrainingRun:
    """Return the settings of a run of a module with the trainer's data; the trainer sets precision and processes.

    Raises:
        UsageError: A learned token is trained, or the data do not tell batch size and resolution.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, SDDataModule) or data.source_train.latents is not None:
        has = "latents" if isinstance(data, SDDataModule) else type(data).__name__ if data else "only data loaders"
        raise UsageError(
            f"AutoStrategy reads batch size and resolution from an SDDataModule with images, and there is {has}; "
            "write AutoStrategy(run=TrainingRun(batch_size=<samples per pass and process>, resolution=<pixels>))"
        )
    if module.learned_token is not None:
        raise UsageError(
            "AutoStrategy cannot predict the memory of a learned token; choose a strategy yourself, e.g. strategy=ddp"
        )
    networks = module.trained_networks()
    kept = {name: kept_by([block]).pop() for name, block in recomputable(networks).items()}
    checkpointed = (getattr(part, "gradient_checkpointing", False) for part in module.denoiser.modules())
    return TrainingRun(
        batch_size=-(-data.batch_size // (trainer.world_size * trainer.accumulate_grad_batches)),
        resolution=data.images.resolution,
        train_text_encoder=len(networks) > 1,
        lora=module.lora,
        gradient_checkpointing=any(each is True for each in checkpointed),
        kept={name: what for name, what in kept.items() if what is not Kept.ALL},
        encoder_dtype=module.encoder.dtype,
        offload_encoders=module.encoder.offload,
        cache_latents=data.cache_latents,
        from_files=bool(module.latent_diffusion.deferred),
    )
