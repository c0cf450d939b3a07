"""Noise schedules, objectives and randomness: pure functions of tensors and numbers."""
