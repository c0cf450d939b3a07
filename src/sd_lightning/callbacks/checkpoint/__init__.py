"""Portable checkpoints: written under one strategy and world size, resumed under any other."""
