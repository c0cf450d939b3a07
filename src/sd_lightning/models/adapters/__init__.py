"""Weights that are trained beside or instead of a model's own: LoRA and learned tokens."""
