"""Our training step against a bare PyTorch loop: same model, data, dtype, optimizer and EMA, in turns in one process."""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from timing import medians, spread

BARS = {"ratio": "<= 1.03"}

# The main job as conf/train.yaml builds it, without what is no training step: validation, pictures, checkpoints.
OVERRIDES = (
    "name=step_overhead",
    "model=tiny",
    "data=digits",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.limit_val_batches=0",
    "+trainer.enable_checkpointing=false",
    "~callbacks.samples",
    "~callbacks.checkpoint",
)


class BareLoop:
    """What one writes by hand for this model and these data: no hooks, no logging, no guards.

    Args:
        optimizer: Parameters -> optimizer.
        lr_scheduler: Optimizer -> scheduler, stepped after every step.
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
        from diffusers import DDPMScheduler

        from sd_lightning import LatentDiffusion

        model = LatentDiffusion.build("tiny")
        self.unet: nn.Module = model.unet.train()
        self.text_encoder: nn.Module = model.text_encoders["text_encoder"].train()
        self.parameters = [*self.unet.parameters(), *self.text_encoder.parameters()]
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = optimizer(self.parameters)
        self.lr_scheduler = lr_scheduler(self.optimizer)
        self.noise_scheduler = DDPMScheduler.from_config(model.scheduler_config)
        self.batch_size, self.clip, self.ema_decay = batch_size, clip, ema_decay
        self.proportion_empty_prompts = proportion_empty_prompts
        self.scaling_factor = float(model.vae.config.scaling_factor)
        self.moments, self.input_ids, self.empty_ids = _tables(model)
        self.batches = self._batches()

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            self._step(*next(self.batches))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for index in torch.randperm(len(self.moments)).split(self.batch_size):
                if len(index) < self.batch_size:
                    continue
                caption = torch.randint(self.input_ids.shape[1], (self.batch_size,))
                input_ids = self.input_ids[index, caption]
                input_ids[torch.rand(self.batch_size) < self.proportion_empty_prompts] = self.empty_ids
                yield self.moments[index], input_ids

    def _step(self, moments: Tensor, input_ids: Tensor) -> None:
        mean, log_variance = moments.chunk(2, dim=1)
        latents = (mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)) * self.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(len(self.noise_scheduler.alphas_cumprod), (len(latents),))
        noisy_latents = self.noise_scheduler.add_noise(latents, noise, timesteps)
        target = self.noise_scheduler.get_velocity(latents, noise, timesteps)
        hidden = self.text_encoder(input_ids)[0]
        prediction = self.unet(noisy_latents, timesteps, encoder_hidden_states=hidden).sample
        self.optimizer.zero_grad()
        nn.functional.mse_loss(prediction, target).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.lr_scheduler.step()
        torch._foreach_lerp_(self.ema, self.parameters, 1.0 - self.ema_decay)


def _tables(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return moments (N, 2C, h, w) and token ids (N, captions, L) of all digits, and those of the empty caption."""
    from sd_lightning.data.digits import Digits
    from sd_lightning.data.latent_table import encode_source
    from sd_lightning.encoder import LatentEncoder

    digits = Digits("train")
    encode = LatentEncoder(model, train_text_encoder=True).encode_moments
    moments = encode_source(digits, encode, resolution=32, device=torch.device("cpu")).moments
    captions = [digits.captions(i) for i in range(len(digits))]
    input_ids = model.tokenize([text for each in captions for text in each])[:, 0]
    return moments, input_ids.view(len(digits), len(captions[0]), -1), model.tokenize([""])[0, 0]


class Turns(Callback):
    """After every ``steps`` optimizer steps of the trainer let the other loop do as many, and time both blocks.

    The trainer's block begins where the other's ended, inside the last hook of a step, so it holds everything that
    Lightning and our callbacks do between that hook and the same hook ``steps`` later.
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
        self._to_drop = warm_up
        self._began = 0.0
        self.pairs: list[tuple[float, float]] = []
        """(seconds of ours, seconds of the other), in the order they were taken, without the warm-up."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        from sd_lightning.callbacks.throughput import paused

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


def compose(output_dir: str, *, max_steps: int) -> Any:
    """Return the resolved configuration of the main job for this comparison."""
    import hydra
    from omegaconf import OmegaConf

    from sd_lightning import _conf

    # The schedule is longer than the run: a learning rate that ends at its final fraction is no different in time.
    overrides = [*OVERRIDES, f"output_dir={output_dir}", f"trainer.max_steps={max_steps}"]
    with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        cfg = hydra.compose("train", overrides)
    OmegaConf.resolve(cfg)
    return cfg


def train_in_turns(cfg: Any, *, steps: int, warm_up: int) -> list[tuple[float, float]]:
    """Run the configured training and the bare loop in turns; return the pairs of block times in seconds."""
    from sd_lightning import _conf, train

    bare = BareLoop(
        _conf.instantiate(cfg.optimizer),
        _conf.instantiate(cfg.lr_scheduler),
        batch_size=cfg.data.batch_size,
        clip=cfg.trainer.gradient_clip_val,
        ema_decay=cfg.callbacks.ema.decay,
        proportion_empty_prompts=cfg.data.proportion_empty_prompts,
    )
    turns = Turns(bare.run, steps=steps, warm_up=warm_up)
    trainer = train.build_trainer(cfg, None)
    trainer.callbacks.append(turns)  # last, so that the hooks of the others are inside our block
    trainer.fit(train.build_module(cfg), _conf.instantiate(cfg.data))
    return turns.pairs


def measure(blocks: int = 40, steps: int = 5, warm_up: int = 4) -> dict[str, float]:
    """Median over block pairs of our time by the bare loop's; the step times are medians, too.

    Args:
        blocks: Pairs of blocks that count.
        steps: Optimizer steps per block.
        warm_up: Pairs before those.
    """
    # What the run prints is for people; stdout carries the result.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        cfg = compose(folder, max_steps=steps * (warm_up + blocks))
        pairs = train_in_turns(cfg, steps=steps, warm_up=warm_up)
    taken = {
        "ratio": [ours / bare for ours, bare in pairs],
        "step_ms": [1e3 * ours / steps for ours, _ in pairs],
        "bare_step_ms": [1e3 * bare / steps for _, bare in pairs],
    }
    return medians(taken) | {"spread": spread(taken["ratio"]), "blocks": len(pairs), "threads": torch.get_num_threads()}
