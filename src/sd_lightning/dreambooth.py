"""Teach a model a subject from a few photos: ``python -m sd_lightning.dreambooth [key=value …]``.

The same job as :mod:`sd_lightning.train`, with other data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from sd_lightning import _conf, train

PROGRAM = replace(
    train.PROGRAM,
    name="dreambooth",
    task="sd_lightning.apps.dreambooth.run",
    hints={
        **train.PROGRAM.hints,
        # Settings of diffusers' and ColossalAI's DreamBooth scripts that are not arguments of a Hydra target.
        "instance_data_dir": str | None,
        "subjects": list[dict[str, Any]],
        "class_data_dir": str,
        "class_prompt": str | None,
        "class_prompts": list[str],
        "with_prior_preservation": bool,
        "sample_batch_size": int,
        "prior_generation_precision": Literal["float32", "bfloat16", "float16"] | None,
        "validation_prompt": str | None,
        "learn_token": bool,
        "placeholder_token": str,
        "initializer_token": str | None,
        "use_8bit_adam": bool,
        "learning_rate": float,
        "max_train_steps": int,
    },
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
