"""What a case trained: with it, the cost tables find its figures.

A case that measures training runs on a GPU has `MEASURED: dict[str, Run]`. Its keys are beginnings of metric names: of
`plain`, a line has `plain_images_per_second`, of all GPUs, and `plain_gb`, the peak that torch's allocator held on one.
The kind of GPU is that of the line's `hardware`. A run that a line does not have, as it did not fit, is no error; nor
is one on fewer GPUs than the line's `devices`, which is not shown.

A run gets into a cell of the tables if its settings are theirs: the model's size in `cases/costs.py`, bf16-mixed, an
EMA, and images and captions encoded in the step. Others get into a table of their own in docs/costs.md.
"""

from dataclasses import dataclass

ENCODERS = {
    "all": "images and captions encoded in the step",
    "text": "captions encoded in the step, latents cached",
    "none": "nothing encoded in the step",
}
"""What encoders do in a step -> the same as text; names of the setting `encoders` of `sd_lightning.plan`."""


@dataclass(frozen=True)
class Run:
    """The settings of a measured training run."""

    model: str
    resolution: int
    """Side of the images, pixels."""
    strategy: str
    """Name of one of the planner's candidates."""
    batch_size: int
    """Samples per GPU and step."""
    gpus: int = 1
    precision: str = "bf16-mixed"
    encoders: str = "all"
    """One of :data:`ENCODERS`."""
    averages: bool = True
    """Whether an EMA of the weights is kept."""

    def __post_init__(self) -> None:
        if self.encoders not in ENCODERS:
            raise ValueError(f"Run got encoders={self.encoders}; expected one of {', '.join(ENCODERS)}")

    def __str__(self) -> str:
        """What is not said by a table's row and column."""
        average = "with EMA" if self.averages else "no EMA"
        return f"batch {self.gpus} x {self.batch_size}, {self.precision}, {average}, {ENCODERS[self.encoders]}"
