"""Train a latent-diffusion model: ``python -m sd_lightning.train [key=value …]``."""

from __future__ import annotations

from typing import Literal

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "train",
    "sd_lightning.apps.train.train",
    among=PROGRAMS,
    reserved={
        "model": {"deferred"},
        "module": {"latent_diffusion", "objective", "optimizer", "lr_scheduler"}
        | {"lora", "learned_token", "preservation"},
        "trainer": {"strategy", "callbacks", "logger", "use_distributed_sampler"},
        "callbacks.checkpoint": {"resume"},
        "data": {"loaders"},
    },
    hints={
        "name": str,
        "output_dir": str,
        "resume": str | None,
        "init_from": str | None,
        "init_lora": str | None,
        "push_to_hub": str | None,
        "hub_private": bool,
        "overwrite": bool,
        "seed": int,
        "merge_lora": bool,
        "data.batch_size": int | Literal["auto"],
        "trainer.precision": Literal[32, "32-true", "bf16-mixed", "bf16-true", "16-mixed"],
        "trainer.gradient_clip_val": float | None,
        "trainer.val_check_interval": float | None,
        "trainer.log_every_n_steps": int,
    },
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
