"""SDLightningModule: the training of a latent-diffusion model as Lightning hooks, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.objective import NoisyBatch, Objective
from sd_lightning.models.adapters.learned_token import LearnedToken
from sd_lightning.models.adapters.lora import Lora
from sd_lightning.models.encoder import Dtype, LatentEncoder
from sd_lightning.models.families import Conditioning
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.base import engine_of
from sd_lightning.training.flops import training_flops_per_sample
from sd_lightning.training.parameters import choose_trained, parameter_groups

if TYPE_CHECKING:
    from PIL import Image

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


class SDLightningModule(pl.LightningModule):
    """Train the denoiser, and the text encoder(s) if wished, of a latent-diffusion model.

    Only trained networks are submodules. Frozen encoders live in :attr:`encoder`, where no strategy sees them.
    The module knows no strategy: strategies ask :meth:`trained_networks`.

    Args:
        latent_diffusion: The model.
        objective: What is predicted and how the loss is weighted; the model's own prediction type by default.
        optimizer: Parameter groups -> optimizer; AdamW with learning rate 1e-4 if not given.
        lr_scheduler: Optimizer -> learning-rate scheduler, stepped after every optimizer step.
        train_text_encoder: Train the text encoder(s) too.
        text_encoder_lr: Learning rate of the text encoder(s), if another than the denoiser's.
        encoder_dtype: What the frozen encoders compute in.
        offload_encoders: Keep the frozen encoders in host memory while they have nothing to encode.
        lora: Train adapters of the networks in the place of their weights.
        learned_token: Also train a new word of the text encoder(s); without ``train_text_encoder`` nothing else there.
        seed: Seed of noise, timesteps, crops, …: all randomness of the run.
    """

    keeps_batches = True
    """Batches stay float32 under every precision: the encoders and the noise own theirs, and networks are given what
    they compute in."""

    def __init__(
        self,
        latent_diffusion: LatentDiffusion,
        *,
        objective: Objective | None = None,
        optimizer: OptimizerFactory = _adamw,
        lr_scheduler: SchedulerFactory | None = None,
        train_text_encoder: bool = False,
        text_encoder_lr: float | None = None,
        encoder_dtype: Dtype = "float32",
        offload_encoders: bool = False,
        lora: Lora | None = None,
        learned_token: LearnedToken | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if text_encoder_lr is not None and not train_text_encoder and learned_token is None:
            raise UsageError(
                f"SDLightningModule got text_encoder_lr={text_encoder_lr} but the text encoder is frozen; "
                "set train_text_encoder=true or leave text_encoder_lr out"
            )
        if text_encoder_lr is not None and not text_encoder_lr >= 0:
            raise UsageError(
                f"SDLightningModule got text_encoder_lr={text_encoder_lr}; expected a number of at least 0, e.g. "
                "text_encoder_lr=1e-5"
            )
        if not 0 <= seed < 2**63:
            raise UsageError(f"SDLightningModule got seed={seed}; expected 0 to 2**63 - 1, e.g. seed=0")
        if learned_token is not None:
            learned_token.apply_(latent_diffusion)
        has_text = train_text_encoder or learned_token is not None
        self.latent_diffusion = latent_diffusion
        self.objective = (objective or Objective()).resolve(latent_diffusion.scheduler_config)
        self.schedule = self.objective.noise_schedule(latent_diffusion.scheduler_config)
        self.encoder = LatentEncoder(
            latent_diffusion, train_text_encoder=has_text, dtype=encoder_dtype, offload=offload_encoders
        )
        self.seed = seed
        self.text_encoder_lr = text_encoder_lr
        self.lora = lora
        self.learned_token = learned_token
        self._optimizer_factory = optimizer
        self._scheduler_factory = lr_scheduler
        self._loss: Tensor | None = None
        latent_diffusion.use_scheduler(self.objective.scheduler_overrides(latent_diffusion.scheduler_config))
        self.add_module(latent_diffusion.family.denoiser, latent_diffusion.denoiser)
        self._text_encoder_names: tuple[str, ...] = ()
        if has_text:
            self._text_encoder_names = tuple(latent_diffusion.text_encoders)
            for name, network in latent_diffusion.text_encoders.items():
                self.add_module(name, network)
        frozen = latent_diffusion.deferred.keys() - self.trained_networks().keys()
        if frozen:
            raise UsageError(
                f"SDLightningModule got a model with deferred weights of {', '.join(sorted(frozen))}, which it does "
                "not train; defer trained networks only"
            )
        choose_trained(latent_diffusion, self.trained_networks(), lora=lora, train_text_encoder=train_text_encoder)

    def trained_networks(self) -> dict[str, nn.Module]:
        """Return the networks that are trained, by name, in the order in which they run: what strategies shard."""
        names = (*self._text_encoder_names, self.latent_diffusion.family.denoiser)
        return {name: self.get_submodule(name) for name in names}

    @property
    def denoiser(self) -> nn.Module:
        """The network that predicts: a UNet, a transformer."""
        return self.get_submodule(self.latent_diffusion.family.denoiser)

    def setup(self, stage: str) -> None:
        """Read weights that are still in their files, unless the strategy does, once it has sharded the networks."""
        strategy = self.trainer.strategy
        if engine_of(strategy).loads_weights or not self.latent_diffusion.deferred:
            return
        strategy.precision_plugin.convert_module(self)  # as strategies do later: the type that weights are read in
        for name, network in self.trained_networks().items():
            weights = self.take_deferred(name)
            if weights is not None:
                weights.fill_(network, strategy.root_device)

    def take_deferred(self, name: str) -> DeferredWeights | None:
        """Return the weights of a trained network that are still in their files, once: the caller reads them."""
        return self.latent_diffusion.deferred.pop(name, None)

    def cpu(self) -> Self:
        """Move to host memory, as Lightning does at the end, also of a run that failed before weights were read."""
        return self if self.latent_diffusion.deferred else super().cpu()

    def on_fit_start(self) -> None:
        self._to_device()

    def on_validation_start(self) -> None:
        self._to_device()

    def on_test_start(self) -> None:
        self._to_device()

    def _to_device(self) -> None:
        """Bring to the strategy's device what the strategy does not know of, or has not moved."""
        device = self.trainer.strategy.root_device
        if device.type != "cpu" and device != self.device:
            # Engines that place weights themselves (FSDP2 with offloading, ZeRO-3 from files) never call Module.to(),
            # which would move the weights as well.
            self._device = device
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
        self.encoder.to(self.device)
        self.schedule = self.schedule.to(self.device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make what is left of global randomness (dropout) a function of seed, step and rank, so resumes are exact."""
        self._check_accumulation()
        seed = hash((self.seed, self.global_step, batch_idx, self.global_rank)) % 2**63
        # torch.manual_seed queues a call, with a formatted stack, for every kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def _check_accumulation(self) -> None:
        """Refuse callbacks that change the accumulation: the data's batches were divided by it when the fit began."""
        trainer: Any = self.trainer
        sampler = getattr(trainer.datamodule, "train_sampler", None)
        if sampler is not None and sampler.accumulate != trainer.accumulate_grad_batches:
            raise UsageError(
                f"trainer.accumulate_grad_batches became {trainer.accumulate_grad_batches} during the fit, which began "
                f"with {sampler.accumulate}: data.batch_size={sampler.global_batch_size} is the global batch, and the "
                "data are divided for the first; leave GradientAccumulationScheduler out and write "
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}"
            )

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Encode images and captions with the frozen encoders."""
        return self.encoder(batch, seed=self.seed)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch with ``latents`` (B, C, h, w) and conditioning or token ids."""
        loss = self.training_loss(batch)
        self._loss = loss.detach()
        if self._is_logging_step():
            count = len(batch["latents"])
            self.log("train/loss", self._loss, batch_size=count, sync_dist=self.trainer.world_size > 1)
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=count)
        return loss

    def _is_logging_step(self) -> bool:
        """Whether metrics of this step are read: by loggers at their interval, or where an epoch or the run ends.

        A callback that monitors one of them, as ModelCheckpoint may, reads it at any time. Logging costs half a
        millisecond, and with several processes a barrier, so it is not done for nobody.
        """
        trainer: Any = self.trainer
        step, every = self.global_step + 1, trainer.log_every_n_steps
        if trainer.is_last_batch or step == trainer.max_steps or (every > 0 and step % every == 0):
            return True
        return any(str(getattr(callback, "monitor", None)).startswith("train/") for callback in trainer.callbacks)

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean training loss of an encoded batch, without side effects.

        Samples weigh what ``loss_weight`` (B,) of the batch says, if it is there.
        """
        losses = self._sample_losses(self._add_noise(batch), self._conditioning(batch))
        return (losses * batch["loss_weight"]).mean() if "loss_weight" in batch else losses.mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the held-out loss and the caption gap as ``val/loss`` and ``val/caption_gap``.

        The caption gap is the loss with wrong captions minus the loss with the right ones, on the noisier half of the
        schedule, where the caption matters. A model that ignores its prompts has a gap of zero, long before that
        shows in pictures. Batches without ``wrong_input_ids`` measure none.
        """
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log what :meth:`validation_step` does as ``test/loss`` and ``test/caption_gap``."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Any], prefix: str) -> None:
        conditioning = self._conditioning(batch)
        losses = self._sample_losses(self._add_noise(batch), conditioning)
        metrics = {"loss": losses}
        if "wrong_input_ids" in batch:
            noisy = self._add_noise(batch, min_timestep=self.schedule.num_train_timesteps // 2)
            right = self._sample_losses(noisy, conditioning)
            metrics["caption_gap"] = self._sample_losses(noisy, self._conditioning(batch, prefix="wrong_")) - right
        # Samples that only fill the last batches up, so that all ranks make the same calls, weigh nothing.
        weight = batch.get("sample_weight", torch.ones_like(losses))
        count = int(weight.sum())
        for name, values in metrics.items():
            mean = (values * weight).sum() / max(count, 1)
            self.log(f"{prefix}/{name}", mean, batch_size=count, sync_dist=True)

    @property
    def last_loss(self) -> Tensor | None:
        """This rank's loss of the last training step, detached."""
        return self._loss

    def _add_noise(self, batch: dict[str, Any], *, min_timestep: int = 0) -> NoisyBatch:
        return self.objective.prepare(
            batch["latents"],
            seed=self.seed,
            epoch=batch["epoch"],
            index=batch["index"],
            schedule=self.schedule,
            min_timestep=min_timestep,
        )

    def _conditioning(self, batch: dict[str, Any], *, prefix: str = "") -> Conditioning:
        if prefix + "conditioning" in batch:
            return batch[prefix + "conditioning"]
        encoders = {name: self.get_submodule(name) for name in self._text_encoder_names}
        return self.latent_diffusion.condition(encoders, {**batch, "input_ids": batch[prefix + "input_ids"]})

    def _sample_losses(self, noisy: NoisyBatch, conditioning: Conditioning) -> Tensor:
        dtype = next(self.denoiser.parameters()).dtype  # an engine may compute in another one than float32
        latents, conditioning = noisy.noisy_latents.to(dtype), map_conditioning(conditioning, lambda t: t.to(dtype))
        prediction = self.latent_diffusion.family.denoise(self.denoiser, latents, noisy.timesteps, conditioning)
        return self.objective.loss(prediction, noisy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        text_encoders = {name: self.get_submodule(name) for name in self._text_encoder_names}
        optimizer = self._optimizer_factory(parameter_groups(self.denoiser, text_encoders, self.text_encoder_lr))
        # Fused optimizers would take unscaling upon themselves, after gradients are clipped: Lightning then refuses to
        # clip in mixed precision, even in bfloat16, where nothing is scaled.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if self._scheduler_factory is None:
            return optimizer
        scheduler = self._scheduler_factory(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            # Lightning would step it after the callbacks of the step, and a checkpoint written by one be a step behind.
            config |= {"reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step the scheduler; ``ReduceLROnPlateau`` watches the training loss."""
        if isinstance(scheduler, ReduceLROnPlateau):
            metric = self.trainer.strategy.reduce(self._loss, reduce_op="mean")
        super().lr_scheduler_step(scheduler, metric)

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        seed: int = 0,
        negative_prompt: str = "",
        options: SamplingOptions | None = None,
        **sampling: Any,
    ) -> list[Image.Image]:
        """Draw one picture per prompt.

        Args:
            prompts: One caption or several.
            seed: The first picture's seed; the following pictures count up from it.
            negative_prompt: What guidance leads away from.
            options: See :class:`sd_lightning.SamplingOptions`.
            **sampling: Fields of the options by name, e.g. ``num_inference_steps=12, guidance_scale=3``.

        Raises:
            UsageError: An option is unknown or cannot work.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = range(seed, seed + len(prompts))
        chosen = SamplingOptions.chosen(options, sampling)
        return self.sample_seeded(prompts, seeds, chosen, negative_prompt=negative_prompt)

    def sample_seeded(
        self, prompts: Sequence[str], seeds: Sequence[int], options: SamplingOptions, *, negative_prompt: str = ""
    ) -> list[Image.Image]:
        """Draw one picture per prompt and seed, in the trainer's precision while one is attached."""
        plugin = None if self._trainer is None else self.trainer.precision_plugin
        try:
            with contextlib.nullcontext() if plugin is None else plugin.forward_context():
                return generate(
                    self.latent_diffusion,
                    prompts,
                    seeds=seeds,
                    options=options,
                    negative_prompt=negative_prompt,
                    device=self.device,
                )
        finally:
            if self.encoder.offload:
                self.encoder.to(self.encoder.device)  # back to where they wait

    def flops_per_sample(self, batch: dict[str, Any]) -> int:
        """Floating-point operations of one training step for one sample of ``batch``, forward and backward."""
        conditioning = self._conditioning(batch) if "conditioning" in batch else None
        return training_flops_per_sample(self.latent_diffusion, batch["latents"], conditioning)
