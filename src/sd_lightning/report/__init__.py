"""Human-readable results of a run: image grids, metric series and the self-contained ``report.html``.

Nothing here imports Lightning: the inputs are PIL images, the ``metrics.csv`` that Lightning's ``CSVLogger`` writes and
a mapping of summary values. So a report can be rebuilt from a run folder alone.
"""

from sd_lightning.report.grid import image_grid
from sd_lightning.report.metrics import Series, read_metrics
from sd_lightning.report.page import write_report

__all__ = ["Series", "image_grid", "read_metrics", "write_report"]
