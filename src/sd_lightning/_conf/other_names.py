"""Other names of settings: from diffusers' and kohya's scripts, from Lightning, and by habit."""

from __future__ import annotations

import re
from typing import Any

OTHER_NAMES = (
    ("pretrained_model_name_or_path", "model.pretrained"),
    ("train_data_dir", "instance_data_dir"),
    ("train_data_dir", "data.train_data_dir"),
    ("dataset_name", "data.dataset_name"),
    ("train_batch_size", "data.batch_size"),
    ("gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
    ("mixed_precision", "trainer.precision"),
    ("precision", "trainer.precision"),
    ("max_train_steps", "trainer.max_steps"),
    ("trainer.gpus", "trainer.devices"),
    ("gpus", "trainer.devices"),
    ("num_gpus", "trainer.devices"),
    ("trainer.strategy", "strategy"),
    *((name, "max_train_steps=<n>") for name in ("epochs", "max_epochs", "num_train_epochs", "trainer.max_epochs")),
    *((name, "trainer.max_steps=<n>") for name in ("epochs", "max_epochs", "num_train_epochs", "trainer.max_epochs")),
    ("steps", "num_inference_steps"),
    ("steps", "max_train_steps"),
    ("steps", "trainer.max_steps"),
    ("prompt", "prompts"),
    ("learning_rate", "optimizer.lr"),
    ("max_grad_norm", "trainer.gradient_clip_val"),
    ("lr_warmup_steps", "lr_scheduler.warmup_steps"),
    ("dataloader_num_workers", "data.num_workers"),
    ("checkpointing_steps", "callbacks.checkpoint.every_n_steps"),
    ("checkpoints_total_limit", "callbacks.checkpoint.keep"),
    ("resume_from_checkpoint", "resume"),
    ("rank", "lora.rank"),
    ("network_dim", "lora.rank"),
    ("network_alpha", "lora.alpha"),
)
"""Their name and ours; the first of ours that the program has is used. ``=<n>``: their value has another meaning."""
VALUES = {
    "trainer.precision": {
        **dict.fromkeys(("fp16", "float16", "16"), "16-mixed"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16-mixed"),
        **dict.fromkeys(("fp32", "float32", "no"), "32"),
    },
    "resume": {"latest": "auto", "True": "auto"},
    "data": {"imagefolder": "images", "image_folder": "images", "folder": "images"},
    "strategy": {
        "zero1": "deepspeed_zero1",
        "deepspeed": "deepspeed_zero2",
        **{f"deepspeed_stage_{stage}": f"deepspeed_zero{stage}" for stage in (1, 2, 3)},
    },
}
"""Our setting or group -> {their value: our value}."""
_MODELS = {"sdxl": r"xl", "sd21": r"(diffusion|sd)[-_]?v?2", "sd15": r"(diffusion|sd)[-_]?v?1"}


def in_our_words(key: str, value: str) -> list[tuple[str, str]]:
    """Return our names for another tool's setting, each with its value; none if it is unknown."""
    found = (ours.partition("=")[::2] for theirs, ours in OTHER_NAMES if theirs == key)
    return [(ours, other or our_value(ours, value)) for ours, other in found]


def our_value(key: str, value: Any) -> str:
    """Return our spelling of a value of one of our settings."""
    return VALUES.get(key, {}).get(str(value), str(value))


def model_like(name: str) -> str:
    """Return the option of the group ``model`` that a pretrained model most likely needs."""
    found = (option for option, pattern in _MODELS.items() if re.search(pattern, name.lower()))
    return next(found, "<sd15, sd21 or sdxl>")
