"""``SDLightningModule``: training of a latent-diffusion model as Lightning hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sd_lightning._errors import UsageError
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.preservation import Preservation, check_adapters
from sd_lightning.diffusion.objective import Objective
from sd_lightning.diffusion.prediction import Schedule
from sd_lightning.models.checkpointing import SavedActivations, kept_by
from sd_lightning.models.encoder import Dtype, LatentEncoder
from sd_lightning.models.families.blocks import recomputable
from sd_lightning.models.families.conditioning import Batch
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.lora import Lora
from sd_lightning.models.meta import training_flops_per_sample
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.base import engine_of, gradient_scaler, takes_found_inf
from sd_lightning.training.losses import DiffusionLoss
from sd_lightning.training.optimizers import TwoSidedOptimizer
from sd_lightning.training.parameters import choose_trained, parameter_groups

if TYPE_CHECKING:
    from PIL import Image

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def _is_two_sided(optimizer: Any) -> TypeGuard[TwoSidedOptimizer]:
    return isinstance(optimizer, TwoSidedOptimizer)


def _mean(mean: Tensor | None, loss: Tensor, before: int) -> Tensor:
    """Return the mean loss of accumulated batches, given that of those before, and their number."""
    loss = loss.detach()
    return loss if mean is None or not before else mean + (loss - mean) / (before + 1)


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


class SDLightningModule(pl.LightningModule):
    """Lightning module that trains the denoiser, and optionally the text encoder(s), of a latent-diffusion model.

    Only trained networks are submodules. Frozen encoders live in :attr:`encoder`, hidden from strategies. The module
    does not depend on the strategy; strategies call :meth:`trained_networks`.

    Args:
        latent_diffusion: The model.
        objective: Prediction type and loss weighting; the model's own prediction type by default.
        optimizer: Parameter groups -> optimizer; AdamW with learning rate 1e-4 if not given.
        lr_scheduler: Optimizer -> learning-rate scheduler, stepped after every optimizer step.
        train_text_encoder: Train the text encoder(s) too.
        text_encoder_lr: Learning rate of the text encoder(s); the denoiser's if not given.
        encoder_dtype: Compute dtype of the frozen encoders.
        offload_encoders: Keep the frozen encoders in host memory while they do not encode.
        lora: Train adapters instead of the networks' weights.
        learned_token: Also train a new token; without ``train_text_encoder`` nothing else in the text encoder(s).
        preservation: Captions whose predictions stay those without adapters: another part of the loss. Needs ``lora``.
        seed: Seed of noise, timesteps, crops, …: all randomness of the run.
    """

    keeps_batches = True
    """Batches stay float32 under every precision; inputs are cast right before each network."""

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
        preservation: Preservation | None = None,
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
        check_adapters(preservation, lora)
        if not 0 <= seed < 2**63:
            raise UsageError(f"SDLightningModule got seed={seed}; expected 0 to 2**63 - 1, e.g. seed=0")
        has_text = train_text_encoder or learned_token is not None
        learns_token = learned_token is not None
        latent_diffusion.family.check_trained_text(train_text_encoder=train_text_encoder, learns_token=learns_token)
        if learned_token is not None:
            learned_token.apply_(latent_diffusion)
        self.latent_diffusion = latent_diffusion
        self.objective = (objective or Objective()).resolve(latent_diffusion.scheduler_config)
        self.encoder = LatentEncoder(
            latent_diffusion, train_text_encoder=has_text, dtype=encoder_dtype, offload=offload_encoders
        )
        self._losses = DiffusionLoss(latent_diffusion, self.objective, seed=seed, frozen=self.encoder.beside_trained)
        self.seed = seed
        self.text_encoder_lr = text_encoder_lr
        self.lora = lora and lora.of_family(latent_diffusion.family)
        self.learned_token = learned_token
        self.preservation = preservation
        self._optimizer_factory = optimizer
        self._scheduler_factory = lr_scheduler
        self.last_loss: Tensor | None = None
        """Loss of the last training step on this rank, the mean over its accumulated batches so far; detached."""
        self.last_preservation_loss: Tensor | None = None
        """The same of what ``preservation`` adds to it, without its weight."""
        self._preserved: Tensor | None = None
        latent_diffusion.use_scheduler(self.objective.scheduler_overrides(latent_diffusion.scheduler_config))
        latent_diffusion.sampling_scheduler()  # raises if no pipeline could draw what is trained
        self.add_module(latent_diffusion.family.denoiser, latent_diffusion.denoiser)
        self._text_encoder_names = latent_diffusion.family.trainable[:-1] if has_text else ()
        for name in self._text_encoder_names:
            self.add_module(name, latent_diffusion.networks[name])
        frozen = latent_diffusion.deferred.keys() - self.trained_networks().keys()
        if frozen:
            raise UsageError(
                f"SDLightningModule got a model with deferred weights of {', '.join(sorted(frozen))}, which it does "
                "not train; defer trained networks only"
            )
        choose_trained(latent_diffusion, self.trained_networks(), lora=self.lora, train_text_encoder=train_text_encoder)

    def trained_networks(self) -> dict[str, nn.Module]:
        """Return the trained networks by name, in execution order; strategies shard these."""
        names = (*self._text_encoder_names, self.latent_diffusion.family.denoiser)
        return {name: self.get_submodule(name) for name in names}

    @property
    def denoiser(self) -> nn.Module:
        """The denoising network: a UNet or a transformer."""
        return self.get_submodule(self.latent_diffusion.family.denoiser)

    @property
    def schedule(self) -> Schedule:
        """The noise schedule of the objective."""
        return self._losses.schedule

    def setup(self, stage: str) -> None:
        """Cast and move the encoders before trained weights take memory; read these, unless the strategy does so."""
        strategy = self.trainer.strategy
        if stage == "fit":
            self.encoder.to(strategy.root_device)
        self.latent_diffusion.read_base()
        if engine_of(strategy).loads_weights or not self.latent_diffusion.deferred:
            return
        strategy.precision_plugin.convert_module(self)  # sets the dtype that weights are read in; strategies repeat it
        for name, network in self.trained_networks().items():
            weights = self.take_deferred(name)
            if weights is not None:
                weights.fill_(network, strategy.root_device)

    def take_deferred(self, name: str) -> DeferredWeights | None:
        """Remove and return the deferred weights of a trained network, for the caller to read; None if it has none."""
        self.latent_diffusion.read_base()  # if an override of `setup` has not
        return self.latent_diffusion.deferred.pop(name, None)

    def run_settings(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return what module and data know of a run, for predictions of its memory and time.

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
        if self.learned_token is not None:
            raise UsageError(
                "AutoStrategy cannot predict the memory of a learned token; choose a strategy yourself, e.g. "
                "strategy=ddp"
            )
        networks = self.trained_networks()
        kept = {name: kept_by([block]).pop() for name, block in recomputable(networks).items()}
        checkpointed = (getattr(part, "gradient_checkpointing", False) for part in self.denoiser.modules())
        return {
            "batch_size": data.batch_size,
            "resolution": data.images.resolution,
            "train_text_encoder": len(networks) > 1,
            "lora": self.lora,
            "preserves": self.preservation is not None,
            "gradient_checkpointing": any(each is True for each in checkpointed),
            "kept": {name: each for name, each in kept.items() if each is not SavedActivations.ALL},
            "encoder_dtype": self.encoder.dtype,
            "offload_encoders": self.encoder.offload,
            "cache_latents": data.cache_latents,
            "from_files": bool(self.latent_diffusion.deferred or self.latent_diffusion.originals),
        }

    def cpu(self) -> Self:
        """Move to host memory; do nothing while weights are deferred, as Lightning calls this after failed runs too."""
        return self if self.latent_diffusion.deferred else super().cpu()

    def on_fit_start(self) -> None:
        """Move encoder and noise schedule to the strategy's device, and buffers if the strategy has not moved them."""
        device = self.trainer.strategy.root_device
        if device.type != "cpu" and device != self.device:
            # Engines that place weights themselves (FSDP2 with offloading, ZeRO-3 from files) never call Module.to().
            # It would move the weights too, so only the buffers are moved here.
            self._device = device
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
        self.encoder.to(self.device)
        self._losses.to(self.device)

    on_validation_start = on_test_start = on_fit_start

    def on_train_batch_end(self, *_: Any) -> None:
        self._evaluate_optimizers()  # before averages take the weights' place for a validation amid accumulation

    def _evaluate_optimizers(self) -> None:
        """Let schedule-free optimizers bring the weights to those to validate, draw and save with."""
        for optimizer in filter(_is_two_sided, self.trainer.optimizers):
            optimizer.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the global generators (dropout) from seed, step and rank, so that resuming is exact.

        Raises:
            UsageError: A callback changed ``accumulate_grad_batches``, by which the sampler has divided the batches.
        """
        # Any Lightning data module may be there; SDDataModule has a sampler of its own.
        sampler = getattr(self.trainer.datamodule, "train_sampler", None)  # type: ignore[attr-defined]
        passes = self.trainer.accumulate_grad_batches
        if sampler is not None and sampler.accumulate != passes:
            raise UsageError(
                f"trainer.accumulate_grad_batches became {passes} during the fit, which began with "
                f"{sampler.accumulate}: data.batch_size={sampler.order.batch_size} is the global batch, and the data "
                "are divided for the first; leave GradientAccumulationScheduler out and write "
                f"trainer.accumulate_grad_batches={passes}"
            )
        for optimizer in filter(_is_two_sided, self.trainer.optimizers):
            optimizer.train()
        seed = hash((self.seed, self.global_step, batch_idx, self.global_rank)) % 2**63
        # Not torch.manual_seed: it queues a call, with a formatted stack, for every kind of device not in use.
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Encode images and captions with the frozen encoders."""
        return self.encoder(batch, seed=self.seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch with ``latents`` (B, C, h, w) and conditioning or token ids."""
        loss, before = self.training_loss(batch), batch_idx % self.trainer.accumulate_grad_batches
        self.last_loss = _mean(self.last_loss, loss, before)
        if self._preserved is not None:
            self.last_preservation_loss = _mean(self.last_preservation_loss, self._preserved, before)
        if self._is_logging_step():
            count = len(batch["latents"])
            self.log("train/loss", self.last_loss, batch_size=count, sync_dist=self.trainer.world_size > 1)
            if self.last_preservation_loss is not None:
                mean = self.last_preservation_loss
                self.log("train/preservation_loss", mean, batch_size=count, sync_dist=self.trainer.world_size > 1)
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=count)
        return loss

    def _is_logging_step(self) -> bool:
        """Return whether metrics of this step are read: at the logging interval, or at the end of an epoch or the run.

        A callback that monitors one of them, such as ModelCheckpoint, may read it at any step. Metrics that nobody
        reads are not logged, because logging costs half a millisecond, and with several processes a barrier.
        """
        trainer: Any = self.trainer
        step, every = trainer.global_step + 1, trainer.log_every_n_steps
        if trainer.is_last_batch or step == trainer.max_steps or (every > 0 and step % every == 0):
            return True
        return any(str(getattr(callback, "monitor", None)).startswith("train/") for callback in trainer.callbacks)

    def training_loss(self, batch: Batch) -> Tensor:
        """Return the mean training loss of an encoded batch, weighted by its ``loss_weight`` (B,) if it has one."""
        if self.preservation is None:
            return self._losses.mean(self.trained_networks(), batch)
        loss, preserved = self._losses.preserving(self.trained_networks(), batch)
        self._preserved = preserved.detach()
        return loss + self.preservation.weight * preserved

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Log and return (B,) the held-out loss and the caption gap as ``val/loss`` and ``val/caption_gap``.

        The caption gap is the loss with wrong captions minus the loss with the right ones, on the noisier half of the
        schedule, where captions matter most. A model that ignores its prompts has a gap of zero; the gap shows this
        long before images do. Batches without ``wrong_input_ids`` log no gap.
        """
        return self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the metrics of :meth:`validation_step` as ``test/loss`` and ``test/caption_gap``."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Batch, prefix: str) -> dict[str, Tensor]:
        metrics = self._losses.held_out(self.trained_networks(), batch)
        # Padding samples, which fill up the last batches so that all ranks make the same calls, have weight 0.
        weight = batch.get("sample_weight", torch.ones_like(metrics["loss"]))
        count = int(weight.sum())
        for name, values in metrics.items():
            mean = (values * weight).sum() / max(count, 1)
            self.log(f"{prefix}/{name}", mean, batch_size=count, sync_dist=True)
        return metrics

    def configure_optimizers(self) -> OptimizerLRScheduler:
        text_encoders = {name: self.get_submodule(name) for name in self._text_encoder_names}
        optimizer = self._optimizer_factory(parameter_groups(self.denoiser, text_encoders, self.text_encoder_lr))
        if not takes_found_inf(optimizer):  # a gradient scaler then reads, every step, whether to take it
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if self._scheduler_factory is None:
            return optimizer
        scheduler = self._scheduler_factory(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            # Lightning would step it after the step's callbacks, so their checkpoints would be one step behind.
            config |= {"reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step; a gradient scaler unscales the gradients right after the backward pass, for fused optimizers too.

        Lightning leaves that to fused optimizers, and then callbacks and clipping see scaled gradients. The scaler then
        hands them what it found, without waiting for the device.
        """
        scaler = gradient_scaler(self.trainer.precision_plugin)
        stepped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if scaler is None or optimizer_closure is None or not takes_found_inf(stepped):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self._evaluate_optimizers()  # before callbacks save or draw
            return

        def closure() -> Any:
            result = optimizer_closure()
            if result is not None:
                scaler.unscale_(stepped)
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip; Lightning refuses to in mixed precision if the optimizer is fused, but its gradients are unscaled."""
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, MixedPrecision):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or GradClipAlgorithmType.NORM)
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step the scheduler; ``ReduceLROnPlateau`` watches the training loss."""
        if isinstance(scheduler, ReduceLROnPlateau):
            metric = self.trainer.strategy.reduce(self.last_loss, reduce_op="mean")
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
        """Generate one image per prompt.

        Args:
            prompts: One caption or several.
            seed: Seed of the first image; the following images use ``seed + 1``, ``seed + 2``, …
            negative_prompt: Caption that guidance steers away from.
            options: See :class:`sd_lightning.SamplingOptions`.
            **sampling: Fields of the options by name, e.g. ``num_inference_steps=12, guidance_scale=3``.

        Raises:
            UsageError: An option is unknown or invalid.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = range(seed, seed + len(prompts))
        chosen = SamplingOptions.chosen(options, sampling)
        return self.sample_seeded(prompts, seeds, chosen, negative_prompt=negative_prompt)

    def sample_seeded(
        self, prompts: Sequence[str], seeds: Sequence[int], options: SamplingOptions, *, negative_prompt: str = ""
    ) -> list[Image.Image]:
        """Generate one image per prompt and seed, in the trainer's precision if a trainer is attached."""
        self.encoder.check_is_kept()
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
                self.encoder.to(self.encoder.device)  # moves the encoders back to host memory

    def flops_per_sample(self, batch: Batch) -> int:
        """Return the floating-point operations of forward and backward for one sample of ``batch``."""
        flops = training_flops_per_sample(self.latent_diffusion, batch["latents"], batch.get("conditioning"))
        return flops if self.preservation is None else flops * 7 // 3  # twice the samples, and a forward pass more
