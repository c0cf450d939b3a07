"""The real ColossalAI's ``GeminiDDP`` as a Lightning strategy."""

from sd_lightning.strategies.colossalai.strategy import ColossalAIStrategy, colossalai

__all__ = ["ColossalAIStrategy", "colossalai"]
