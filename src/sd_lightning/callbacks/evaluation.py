"""Settings of an evaluation when training has ended."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl

from sd_lightning.training.evaluation import EvaluationOptions


@dataclass(eq=False)  # one is not another with the same settings, and has a hash
class Evaluation(EvaluationOptions, pl.Callback):
    """Callback that has a finished run evaluated as ``python -m sd_lightning.evaluate`` does.

    That draws with the pipeline that the run has written, on rank 0, when training has freed its memory; data and
    feature network are tried before it trains. A run that was killed in it is evaluated by the program, or by the same
    command with ``resume=auto``.
    """
