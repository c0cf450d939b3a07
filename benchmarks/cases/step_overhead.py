"""Our training step against a bare PyTorch loop of the same model, data and optimizer, in turns in one process."""

import contextlib
import sys
import tempfile
from typing import Any

from timing import ratios

BARS = {"ratio": "<= 1.03"}
TABLE = {"our training step to a bare PyTorch loop, same model, data, optimizer and EMA": "{ratio} ×; {step_ms} ms"}

# The main job as conf/train.yaml builds it, without what is no training step: validation, pictures, checkpoints.
OVERRIDES = (
    "name=step_overhead",
    "model=tiny",
    "data=digits",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.limit_val_batches=0",
    "~callbacks.samples",
    "~callbacks.checkpoint",
    "+trainer.enable_checkpointing=false",  # or Lightning saves, where no callback of ours does
)


def compose(output_dir: str, *, max_steps: int) -> Any:
    """Return the resolved configuration of our side."""
    import hydra
    from omegaconf import OmegaConf

    from sd_lightning import _conf

    overrides = [*OVERRIDES, f"output_dir={output_dir}", f"trainer.max_steps={max_steps}"]
    with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        cfg = hydra.compose("train", overrides)
    OmegaConf.resolve(cfg)
    return cfg


def train_in_turns(cfg: Any, *, steps: int, warm_up: int) -> list[tuple[float, float]]:
    """Run the configured training and the bare loop in turns; return the pairs of block times in seconds."""
    from bare_loop import BareLoop, Turns
    from sd_lightning import _conf
    from sd_lightning._console import quiet_libraries
    from sd_lightning.apps import train
    from sd_lightning.apps.run_spec import RunSpec

    quiet_libraries()
    bare = BareLoop(
        _conf.instantiate(cfg.optimizer),
        _conf.instantiate(cfg.lr_scheduler),
        batch_size=cfg.data.batch_size,
        clip=cfg.trainer.gradient_clip_val,
        ema_decay=cfg.callbacks.ema.decay,
        proportion_empty_prompts=cfg.data.proportion_empty_prompts,
    )
    turns = Turns(bare.run, steps=steps, warm_up=warm_up)
    trainer = train.build_trainer(spec := RunSpec.of(cfg))
    trainer.callbacks.append(turns)  # last, so that the hooks of the others are inside our block
    trainer.fit(train.build_module(spec), spec.build("data"))
    return turns.pairs


def peers() -> dict[str, dict[str, Any]]:
    """Return the bare loop: it gets our optimizer, schedule, batch size, clipping and EMA from the same settings."""
    return {"torch": {"optimizer": "AdamW(fused=True)", "ema": "_foreach_lerp_", "latents": "encoded once"}}


def measure(blocks: int = 40, steps: int = 5, warm_up: int = 4) -> dict[str, float | list[float]]:
    """Our time by the bare loop's, block by block.

    Args:
        blocks: Pairs of blocks that count.
        steps: Optimizer steps per block.
        warm_up: Pairs before those.
    """
    # What the run prints is for people; stdout carries the result.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        cfg = compose(folder, max_steps=steps * (warm_up + blocks))
        pairs = train_in_turns(cfg, steps=steps, warm_up=warm_up)
    return summarize(pairs, steps=steps)


def summarize(pairs: list[tuple[float, float]], *, steps: int) -> dict[str, float | list[float]]:
    """Turn block times in seconds into metrics."""
    ours, bare = ([block[side] for block in pairs] for side in (0, 1))
    return {
        "ratio": ratios(ours, bare),
        "step_ms": [1e3 * block / steps for block in ours],
        "bare_step_ms": [1e3 * block / steps for block in bare],
        "steps_per_block": steps,
    }
