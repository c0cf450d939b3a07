"""The console: other libraries' advice is kept off it, its reader may leave, and tables and bars look the same."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_ADVICE = (
    r".*does not have many workers.*",  # tiny data sets are read in the training process on purpose
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*checkpoint.*use_reentrant.*",
    r".*Experiment logs directory .* exists and is not empty.*",  # resuming
    r".*not be a power of 2.*",
    r".*torch\.distributed\.[\w.]+`? is deprecated.*",  # DeepSpeed's calls, and Lightning's
    r"Image size \(\d+ pixels\) exceeds limit.*",  # such images are reported as bad samples
    r"Mismatch dtype between input and weight.*",  # of norms whose result is float32
    r".*overridden `on_after_batch_transfer` in `LightningModule`.*",  # intended: the datamodule has the "before" hook
)


def quiet_libraries() -> None:
    """Silence advertisements and advice of libraries; for entry points only, as the settings are global."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):  # on import they overwrite the level set below
        os.environ.setdefault(name, "error")
    for name in ("diffusers", "transformers", "bitsandbytes", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_no_advice)
    for pattern in _ADVICE:
        warnings.filterwarnings("ignore", message=pattern)


def _no_advice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(
        word in message
        for word in ("litlogger", "TPU available", "HPU available", "GPU available", "was configured so")
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; a reader that has seen enough, such as ``head``, ends the output but not the program."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def aligned(rows: Sequence[Sequence[str]], at_left: Collection[int] | None = None) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: Cells; the first row may be a header.
        at_left: Columns of text, which begin at the left; numbers end at the right. By default the first, and those
            with a space or ``=`` in the last row.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if at_left is None:
        at_left = [i for i in range(len(widths)) if i == 0 or " " in rows[-1][i] or "=" in rows[-1][i]]
    lines = (
        "  ".join(cell.ljust(w) if i in at_left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    )
    return [line.rstrip() for line in lines]


def start_bar(activity: str, total: int | None, done: int = 0) -> Progress | None:
    """Start a bar that shows an activity, how much of it is done, and a ``text``.

    Returns:
        None in a file, a pipe or a notebook, where plain lines tell the progress.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    console = Console()
    if not console.is_terminal or console.is_jupyter:
        return None
    bar = Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(None, complete_style="cyan", finished_style="green", table_column=Column(ratio=1)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", style="dim", markup=False),
        console=console,
        refresh_per_second=2,
        expand=True,
    )
    bar.add_task(activity, total=total, completed=done, text="")
    bar.start()
    return bar
