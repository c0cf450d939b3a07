"""Our training step against a bare PyTorch loop of the same model, data and optimizer, in turns in one process."""

import contextlib
import sys
import tempfile
from typing import Any

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
    from sd_lightning.apps.preflight import Parts

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
    trainer = train.build_trainer(cfg, None)
    trainer.callbacks.append(turns)  # last, so that the hooks of the others are inside our block
    trainer.fit(train.build_module(cfg, Parts.build(cfg)), _conf.instantiate(cfg.data))
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
    return summarize(pairs, steps=steps)


def summarize(pairs: list[tuple[float, float]], *, steps: int) -> dict[str, float]:
    """Turn block times in seconds into metrics."""
    taken = {
        "ratio": [ours / bare for ours, bare in pairs],
        "step_ms": [1e3 * ours / steps for ours, _ in pairs],
        "bare_step_ms": [1e3 * bare / steps for _, bare in pairs],
    }
    return medians(taken) | {"spread": spread(taken["ratio"]), "blocks": len(pairs), "steps_per_block": steps}
