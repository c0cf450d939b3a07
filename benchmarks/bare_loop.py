"""A bare PyTorch loop for the tiny model and the digits, and the callback that lets a trainer take turns with it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import DDPMScheduler
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from sd_lightning import LatentDiffusion
from sd_lightning.callbacks.steps import paused
from sd_lightning.data.latent_table import encode_source
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.encoder import LatentEncoder


class BareLoop:
    """What one writes by hand for this model and these data: no hooks, no logging, no guards.

    Args:
        optimizer: Parameters -> optimizer.
        lr_scheduler: Optimizer -> scheduler, stepped after every step.
        batch_size: Samples per step.
        clip: Largest norm of the gradient.
        ema_decay: Decay of the average of the weights.
        proportion_empty_prompts: Captions dropped.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr_scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler],
        *,
        batch_size: int,
        clip: float,
        ema_decay: float,
        proportion_empty_prompts: float,
    ) -> None:
        model = LatentDiffusion.build("tiny")
        self.unet: nn.Module = model.denoiser.train()
        self.text_encoder: nn.Module = model.text_encoders["text_encoder"].train()
        self.parameters = [*self.unet.parameters(), *self.text_encoder.parameters()]
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = optimizer(self.parameters)
        self.lr_scheduler = lr_scheduler(self.optimizer)
        self.noise_scheduler = DDPMScheduler.from_config(model.scheduler_config)
        self.batch_size, self.clip, self.ema_decay = batch_size, clip, ema_decay
        self.proportion_empty_prompts = proportion_empty_prompts
        self.scaling_factor = float(model.vae.config.scaling_factor)
        self.moments, self.input_ids, self.empty_ids = tables(model, Digits("train"))
        self._batches = self.batches()

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            self.step(*next(self._batches))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield moments (B, 2C, h, w) and token ids (B, L) for ever."""
        while True:
            for index in torch.randperm(len(self.moments)).split(self.batch_size):
                if len(index) < self.batch_size:
                    continue
                caption = torch.randint(self.input_ids.shape[1], (self.batch_size,))
                input_ids = self.input_ids[index, caption]
                input_ids[torch.rand(self.batch_size) < self.proportion_empty_prompts] = self.empty_ids
                yield self.moments[index], input_ids

    def step(self, moments: Tensor, input_ids: Tensor) -> None:
        """Make one optimizer step."""
        mean, log_variance = moments.chunk(2, dim=1)
        latents = (mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)) * self.scaling_factor
        timesteps = torch.randint(len(self.noise_scheduler.alphas_cumprod), (len(latents),))
        loss = self.loss(latents, torch.randn_like(latents), timesteps, input_ids)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.lr_scheduler.step()
        torch._foreach_lerp_(self.ema, self.parameters, 1.0 - self.ema_decay)

    def loss(self, latents: Tensor, noise: Tensor, timesteps: Tensor, input_ids: Tensor) -> Tensor:
        """Return the mean squared error of the predicted velocity."""
        noisy_latents = self.noise_scheduler.add_noise(latents, noise, timesteps)
        target = self.noise_scheduler.get_velocity(latents, noise, timesteps)
        hidden = self.text_encoder(input_ids)[0]
        prediction = self.unet(noisy_latents, timesteps, encoder_hidden_states=hidden).sample
        return nn.functional.mse_loss(prediction, target)


def tables(model: LatentDiffusion, digits: Digits) -> tuple[Tensor, Tensor, Tensor]:
    """Return moments (N, 2C, h, w), token ids (N, captions, L) and the token ids of the empty caption (L,)."""
    encoder = LatentEncoder(model, train_text_encoder=True)
    table = encode_source(digits, encoder, ImageOptions(32, center_crop=True), device=torch.device("cpu"))
    moments = table.batch(range(len(digits)), epoch=torch.zeros(len(digits)))["latent_moments"]
    captions = [digits.captions(i) for i in range(len(digits))]
    input_ids = model.tokenize([text for each in captions for text in each])["text_encoder"]
    return moments, input_ids.view(len(digits), len(captions[0]), -1), model.tokenize([""])["text_encoder"][0]


class Turns(Callback):
    """After every ``steps`` optimizer steps of the trainer let the other loop do as many, and time both blocks.

    The trainer's block begins where the other's ended, inside the last hook of a step, so it holds everything that
    Lightning and the callbacks before this one do between that hook and the same hook ``steps`` later.
    """

    def __init__(
        self,
        other: Callable[[int], object],
        *,
        steps: int,
        warm_up: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.other, self.steps, self.now = other, steps, now
        self.pairs: list[tuple[float, float]] = []
        """(seconds of the trainer, seconds of the other), in the order they were taken, without the warm-up."""
        self._to_drop = warm_up
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.steps:
            return
        ours = self.now() - self._began
        with paused(trainer, "running the bare loop"):
            begin = self.now()
            self.other(self.steps)
            other = self.now() - begin
        if self._to_drop:
            self._to_drop -= 1
        else:
            self.pairs.append((ours, other))
        self._began = self.now()
