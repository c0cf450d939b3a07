"""Loading of portable checkpoints given as ``ckpt_path`` to ``trainer.fit``, ``validate`` and ``test``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.trainer_state import check_same_model, read_trainer_state
from sd_lightning.state.ranks import on_rank_zero
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SavedParameter
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies.base import is_whole


class CheckpointFolders(CheckpointIO):
    """``CheckpointIO`` that loads portable checkpoint folders besides Lightning's own files.

    Lightning expects a dictionary from ``CheckpointIO`` and restores its entries. For a folder this class restores the
    state itself, in the engine's layout, and returns a dictionary that changes nothing.

    Args:
        run_dir: Directory of the run.
        resume: Called with the checkpoint that ``fit`` starts from.
        trainer: The trainer.
        files: Reads and writes Lightning's files.
    """

    def __init__(self, run_dir: Path, resume: Callable[[Path], None], trainer: pl.Trainer, files: CheckpointIO) -> None:
        self._run_dir = run_dir
        self._resume = resume
        self._trainer = trainer
        self._files = files

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore a portable checkpoint folder, or load a Lightning file.

        Raises:
            UsageError: The folder holds no valid checkpoint, or one of another model.
        """
        if not checkpoint.is_portable(path):
            return self._files.load_checkpoint(path, map_location, weights_only)
        trainer = self._trainer
        found = on_rank_zero(lambda: runs.find_checkpoint(str(path), self._run_dir, who="ckpt_path"))
        assert found is not None
        if trainer.state.fn == TrainerFn.FITTING:
            self._resume(found)
        else:
            load_weights(found, trainer.lightning_module)
        unchanged = trainer.lightning_module.state_dict() if trainer.strategy.lightning_restore_optimizer else {}
        return {
            "pytorch-lightning_version": pl.__version__,
            "state_dict": unchanged,
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self._files.save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self._files.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        self._files.teardown()


def load_weights(path: Path, module: pl.LightningModule) -> None:
    """Load a checkpoint's average, or its weights if it has none, into a module's trained parameters.

    Raises:
        UsageError: The checkpoint is of another model, or the parameters are already sharded.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not all(is_whole(parameter) for parameter in parameters.values()):
        raise UsageError(
            f"ckpt_path={path}: the weights are already sharded; load them before, with LatentDiffusion.from_pretrained"
            f"('{path}/pipeline')"
        )
    saved = read_trainer_state(path)["parameters"]
    check_same_model(saved, {name: tuple(p.shape) for name, p in parameters.items()}, path)
    with ShardedTensors(path / "state") as store:

        def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
            averaged = f"ema/{name}"
            store.read_into(averaged if averaged in store else f"{kind}/{name}", out, begin, end)

        known = {name: SavedParameter(**entry) for name, entry in saved.items()}
        ReplicatedState(parameters, ()).load(known, None, read)
