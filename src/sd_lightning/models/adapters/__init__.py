"""What is trained beside, or in the place of, a model's own weights: LoRA and new words."""
