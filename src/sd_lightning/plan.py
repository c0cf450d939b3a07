"""Plan a training run without a GPU: ``python -m sd_lightning.plan model=<model> gpu=<gpu> [key=value …]``."""

from __future__ import annotations

from typing import Literal

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "plan",
    "sd_lightning.apps.plan.run",
    among=PROGRAMS,
    reserved={"model": {"deferred"}},
    hints={
        "action": Literal["plan", "calibrate"],
        "gpu": str | None,
        "gpus": int,
        "host_gb": float | None,
        "images": float | None,
        "price": float | None,
        "compare": bool,
        "output": str | None,
        "encoders": Literal["all", "text", "none"] | list[str],
        "ema": bool,
        "seed": int,
        "data.batch_size": int | None,
        "data.resolution": int | None,
        "trainer.precision": Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
        "trainer.gradient_clip_val": float | None,
        "module.train_text_encoder": bool,
        "module.encoder_dtype": Literal["float32", "bfloat16", "float16"],
        "module.offload_encoders": bool,
        "speed.gradient_checkpointing": bool | Literal["auto"] | None,
        "speed.allow_tf32": bool,
    },
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
