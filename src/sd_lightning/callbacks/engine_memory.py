"""Memory of the Gemini engine: logged counters, and a timeline of one step for the report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy

from sd_lightning._errors import UsageError
from sd_lightning.report.memory import TIMELINE_NAME
from sd_lightning.storage.atomic import new_file
from sd_lightning.strategies import EngineStrategy, engine_of


class EngineMemory(Callback):
    """Callback that logs the Gemini engine's counters and records the memory of one step, unit by unit.

    Args:
        run_dir: Directory of the run; the timeline goes to ``memory_timeline.json`` there, which the report draws.
        every_n_steps: Optimizer steps between logged values.
        trace_step: Step to record, counted from 1; the order of units is known by step 3.
    """

    def __init__(self, run_dir: str | Path, *, every_n_steps: int = 10, trace_step: int = 3) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("trace_step", trace_step)):
            if value < 1:
                raise UsageError(f"EngineMemory got {name}={value}; expected at least 1, e.g. {name}=3")
        self.run_dir = Path(run_dir)
        self.every_n_steps = every_n_steps
        self.trace_step = trace_step
        self._events: list[dict[str, Any]] | None = None
        self._is_tracing = False

    def check(self, strategy: Strategy) -> None:
        """Raise unless the strategy counts its bytes.

        Raises:
            UsageError: It does not.
        """
        if not engine_of(strategy).counts_bytes:
            raise UsageError(
                f"EngineMemory got strategy={type(strategy).__name__}, which keeps no account of its bytes; "
                "expected strategy=gemini, or leave callbacks=memory out"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer.strategy)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._events is None and trainer.global_step + 1 == self.trace_step:
            self._events, self._is_tracing = [], True
            engine = engine_of(trainer.strategy)
            engine.observe_units(partial(self._note, engine))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        engine = engine_of(trainer.strategy)
        if self._is_tracing and trainer.global_step == self.trace_step:
            self._is_tracing = False
            engine.observe_units(None)
            self._note(engine, "step", "")
            if trainer.is_global_zero:
                timeline = {"step": self.trace_step, "rank": trainer.global_rank, "events": self._events}
                with new_file(self.run_dir / TIMELINE_NAME) as tmp:
                    tmp.write_text(json.dumps(timeline), encoding="utf-8")
        if trainer.global_step % self.every_n_steps == 0:
            values = {f"gemini/{name}": float(value) for name, value in engine.statistics().items()}
            pl_module.log_dict(values, batch_size=1)

    def _note(self, engine: EngineStrategy, phase: str, unit: str) -> None:
        assert self._events is not None
        self._events.append({"phase": phase, "unit": unit, "bytes": engine.bytes_by_tier()})
