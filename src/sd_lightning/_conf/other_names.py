"""Settings by the names they have in diffusers' and kohya's training scripts."""

from __future__ import annotations

OTHER_NAMES = {
    "pretrained_model_name_or_path": "model.pretrained",
    "train_batch_size": "data.batch_size",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "mixed_precision": "trainer.precision",
    "max_train_steps": "trainer.max_steps",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "trainer.gradient_clip_val",
    "lr_warmup_steps": "lr_scheduler.warmup_steps",
    "dataloader_num_workers": "data.num_workers",
    "checkpointing_steps": "callbacks.checkpoint.every_n_steps",
    "checkpoints_total_limit": "callbacks.checkpoint.keep",
    "resume_from_checkpoint": "resume",
    "rank": "lora.rank",
    "network_dim": "lora.rank",
    "network_alpha": "lora.alpha",
}
"""Theirs -> ours."""
VALUES = {
    "trainer.precision": {"fp16": "16-mixed", "bf16": "bf16-mixed", "no": "32-true"},
    "resume": {"latest": "auto"},
}
"""Of ours: their values -> ours."""


def in_our_words(key: str, value: str) -> tuple[str, str] | None:
    """Return our name of a setting and its value, or None if it has no other name."""
    ours = OTHER_NAMES.get(key)
    return None if ours is None else (ours, VALUES.get(ours, {}).get(value, value))
