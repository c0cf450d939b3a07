"""Route portable checkpoints to PortableCheckpoint in strategies that read checkpoints their own way."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from sd_lightning.storage import checkpoint


class TakesCheckpointFolders(Strategy):
    """Mixin: ``ckpt_path=`` may be one of our checkpoints; ``PortableCheckpoint`` has set the ``checkpoint_io``."""

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if checkpoint.is_portable(checkpoint_path):
            return self.checkpoint_io.load_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
