"""Gemini: training in flat chunks that are sharded over ranks and placed on several tiers of memory."""

from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.engine import GeminiEngine
from sd_lightning.gemini.optimizer import GeminiOptimizer

__all__ = ["GeminiConfig", "GeminiEngine", "GeminiOptimizer"]
