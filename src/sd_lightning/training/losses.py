"""Losses of encoded batches, for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.objective import NoisyBatch, Objective
from sd_lightning.diffusion.prediction import Schedule
from sd_lightning.models.families.conditioning import Batch, Conditioning, join_conditioning, map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.without_adapters import without_adapters

_KEPT = "preserved_"
Networks = Mapping[str, nn.Module]
"""The trained networks by name: the denoiser, and the text encoders that are trained."""


class DiffusionLoss:
    """Noise for latents, the denoiser's prediction, and the objective's loss of it.

    Args:
        latent_diffusion: The model.
        objective: For this model: :meth:`Objective.resolve`.
        seed: Seed of noise and timesteps.
        frozen: Text encoders beside trained ones; see :attr:`LatentEncoder.beside_trained`.
    """

    def __init__(
        self, latent_diffusion: LatentDiffusion, objective: Objective, *, seed: int, frozen: Networks | None = None
    ) -> None:
        denoiser: Any = latent_diffusion.denoiser
        if objective.guidance_scale is not None and not latent_diffusion.family.embeds_guidance(denoiser.config):
            raise UsageError(
                f"Objective got guidance_scale={objective.guidance_scale}, and the {latent_diffusion.family.denoiser} "
                f"of this {latent_diffusion.pipeline_class} does not take it; set objective.guidance_scale=null"
            )
        self._frozen = frozen or {}
        self._model = latent_diffusion
        self._objective = objective
        self._seed = seed
        self._held_out = objective.held_out()
        self.schedule = objective.noise_schedule(latent_diffusion.scheduler_config)
        """The noise schedule, on the device of :meth:`to`."""
        self._held_out_schedule = self._held_out.noise_schedule(latent_diffusion.scheduler_config)

    def to(self, device: torch.device) -> None:
        """Move the noise schedules to a device."""
        self.schedule, self._held_out_schedule = self.schedule.to(device), self._held_out_schedule.to(device)

    def mean(self, networks: Networks, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, weighted by its ``loss_weight`` (B,) if it has one.

        With a ``loss_mask`` (B, 1, h, w), the loss of a sample is the mean weighted by it.
        """
        noisy = self._noisy(batch, self._objective, self.schedule)
        losses = self._per_sample(networks, noisy, self._conditioning(networks, batch), batch.get("loss_mask"))
        return (losses * batch["loss_weight"]).mean() if "loss_weight" in batch else losses.mean()

    def preserving(self, networks: Networks, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return :meth:`mean`, and how far adapters move predictions for the ``preserved_`` captions of the batch.

        That is the mean squared distance to the predictions without adapters, for the same noisy latents, weighted by
        ``loss_weight`` as the other loss. Both come from one pass of twice the samples.
        """
        entries = {name.removeprefix(_KEPT): each for name, each in batch.items() if name.startswith(_KEPT)}
        own: Any = {name: each for name, each in batch.items() if not name.startswith(_KEPT)}
        kept: Any = own | entries
        noisy = self._noisy(batch, self._objective, self.schedule)
        with torch.no_grad(), without_adapters(networks.values()):
            target = self._predict(networks, noisy.noisy_latents, noisy.timesteps, self._conditioning(networks, kept))
        latents, timesteps = (torch.cat([each, each]) for each in (noisy.noisy_latents, noisy.timesteps))
        conditioning = self._conditioning(networks, join_conditioning([own, kept]))  # type: ignore[arg-type]
        prediction, preserved = self._predict(networks, latents, timesteps, conditioning).chunk(2)
        distance = (preserved.float() - target.float()).square().flatten(1).mean(1)
        losses = self._objective.loss(prediction, noisy, batch.get("loss_mask"))
        weight = batch.get("loss_weight", torch.ones_like(losses))
        return (losses * weight).mean(), (distance * weight).mean()

    def held_out(self, networks: Networks, batch: Batch) -> dict[str, Tensor]:
        """Return the losses (B,) of a batch as "loss", and as "caption_gap" how much wrong captions raise them.

        Timesteps and weights are those of :meth:`Objective.held_out`, so that all runs are comparable.
        The gap is measured on the noisier half of the schedule. Batches without ``wrong_input_ids`` have none.
        """
        conditioning = self._conditioning(networks, batch)
        noisy = self._noisy(batch, self._held_out, self._held_out_schedule)
        metrics = {"loss": self._per_sample(networks, noisy, conditioning)}
        if "wrong_input_ids" in batch:
            half = self.schedule.num_train_timesteps // 2
            noisy = self._noisy(batch, self._held_out, self._held_out_schedule, min_timestep=half)
            right = self._per_sample(networks, noisy, conditioning)
            wrong = self._conditioning(networks, batch, wrong=True)
            metrics["caption_gap"] = self._per_sample(networks, noisy, wrong) - right
        return metrics

    def _conditioning(self, networks: Networks, batch: Batch, *, wrong: bool = False) -> Conditioning:
        """Return the conditioning of a batch: that of the frozen text encoders, or now that of the trained ones."""
        encoded = batch.get("wrong_conditioning") if wrong else batch.get("conditioning")
        if encoded is not None:
            return encoded
        encoders = {**self._frozen, **networks}
        input_ids = batch["wrong_input_ids"] if wrong else batch["input_ids"]
        return self._model.condition(encoders, {**batch, "input_ids": input_ids})

    def _noisy(self, batch: Batch, objective: Objective, schedule: Schedule, *, min_timestep: int = 0) -> NoisyBatch:
        latents = batch["latents"]
        return objective.prepare(
            latents,
            seed=self._seed,
            epoch=batch["epoch"],
            index=batch["index"],
            schedule=schedule,
            min_timestep=min_timestep,
            image_tokens=self._model.family.image_tokens(*latents.shape[-2:]),
        )

    def _per_sample(
        self, networks: Networks, noisy: NoisyBatch, conditioning: Conditioning, mask: Tensor | None = None
    ) -> Tensor:
        prediction = self._predict(networks, noisy.noisy_latents, noisy.timesteps, conditioning)
        return self._objective.loss(prediction, noisy, mask)

    def _predict(self, networks: Networks, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        denoiser = networks[self._model.family.denoiser]
        dtype = next(denoiser.parameters()).dtype  # an engine may have cast the weights
        latents, conditioning = latents.to(dtype), map_conditioning(conditioning, lambda t: t.to(dtype))
        if self._objective.guidance_scale is not None:
            conditioning["guidance"] = latents.new_full(latents.shape[:1], self._objective.guidance_scale)
        return self._model.family.denoise(denoiser, latents, timesteps, conditioning)
