"""The self-contained ``report.html`` of a run."""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from PIL import Image

from sd_lightning.report.charts import render_charts
from sd_lightning.report.document import rows, section, tiles, write_document
from sd_lightning.report.drawing import number
from sd_lightning.report.evaluation import HEAD, read_evaluation, table
from sd_lightning.report.memory import TIMELINE_NAME, memory_section
from sd_lightning.report.metrics import Series
from sd_lightning.report.plan import plan_section
from sd_lightning.storage.runs import PLAN

log = logging.getLogger(__name__)

_MAX_GRIDS = 12
"""Limit on the sample grids shown besides the last one; more are subsampled evenly."""
_HERO_PIXELS = 1600
_THUMB_PIXELS = 640
_PNG_BYTES = 400_000
"""Pictures larger than this as PNG are stored as JPEG, so that the page stays small enough to mail."""


def write_report(
    run_dir: str | Path, summary: Mapping[str, Any], metrics: Mapping[str, Series], resolved_config: str
) -> Path:
    """Write ``report.html``: one file that opens anywhere, without a network and without JavaScript.

    It shows the key numbers, the sample grids ``samples/step-*.png`` of the run folder, loss, caption gap, throughput
    and learning rate by step, an evaluation, the plan, the whole summary, and the configuration; and what is missing.

    Args:
        run_dir: The run's folder; its name is the title.
        summary: Contents of ``summary.json``. If present, ``prompted_accuracy``, ``caption_gap`` (or
            ``no_caption_gap``, why it was not measured), ``final_loss``, ``images_per_second``, ``peak_memory_gib``,
            ``train_seconds``, ``steps`` and ``bad_samples`` are shown at the top; ``prompted_accuracy_samples`` gives
            the accuracy its confidence interval.
        metrics: Points by metric name, as :func:`~sd_lightning.report.read_metrics` returns them.
        resolved_config: The configuration as YAML.

    Returns:
        The path of the report. An earlier report is replaced atomically.
    """
    run_dir = Path(run_dir)
    lead = [_lead(summary), _tiles(summary)]
    sections = [
        section("Samples", _samples(run_dir / "samples")),
        section(
            "Training",
            render_charts(metrics) if metrics else '<p class="absent">No metrics were logged in this run.</p>',
        ),
        section("Evaluation", rows(HEAD, table(found))) if (found := read_evaluation(run_dir)) else "",
        _plan(run_dir / PLAN, summary),
        memory_section(run_dir / TIMELINE_NAME),
        section("Summary", _summary_table(summary)),
        section("Configuration", _config(resolved_config)),
    ]
    return write_document(
        run_dir / "report.html", run_dir.resolve().name, "training report", "\n".join(lead) + "".join(sections)
    )


def _plan(file: Path, summary: Mapping[str, Any]) -> str:
    return plan_section(json.loads(file.read_text(encoding="utf-8")), summary.get("plan")) if file.is_file() else ""


def _lead(summary: Mapping[str, Any]) -> str:
    parts = ["Training report"]
    if isinstance(steps := summary.get("steps"), int):
        parts.append(f"{steps:,} optimizer steps")
    if _is_number(seconds := summary.get("train_seconds")):
        parts.append(f"{_duration(seconds)} of training")
    text = f'<p class="lead">{html.escape(" · ".join(parts))}</p>'
    if waits := summary.get("encoders"):
        text += f"<p>Encoders: {html.escape(waits)}.</p>"
    bad = summary.get("bad_samples")
    count = bad if isinstance(bad, int) else len(bad) if isinstance(bad, Mapping | list | tuple) else 0
    if count:
        verb = "sample of the data was" if count == 1 else "samples of the data were"
        text += f'<p class="warn">{count:,} {verb} unusable and skipped.</p>'
    return text


def _tiles(summary: Mapping[str, Any]) -> str:
    shown = []
    for key, label, form in (
        ("prompted_accuracy", "prompted accuracy", lambda v: f"{100 * v:.1f} %"),
        ("caption_gap", "caption gap", "{:.3f}".format),
        ("final_loss", "loss of the last step, not smoothed", "{:.4g}".format),
        ("images_per_second", "images per second", number),
        ("peak_memory_gib", "GiB peak memory", "{:.2f}".format),
    ):
        value, count = summary.get(key), summary.get("prompted_accuracy_samples")
        if _is_number(value):
            if key == "prompted_accuracy" and isinstance(count, int) and count > 0 and 0 <= value <= 1:
                low, high = wilson_interval(value, count)
                label += f"\n{100 * low:.1f}–{100 * high:.1f} %, n = {count:,}"
            shown.append((form(value), label))
        elif key == "caption_gap" and summary.get("no_caption_gap"):
            shown.append(("—", f"{label} not measured\n{summary['no_caption_gap']}"))
    return tiles(shown)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share seen in ``count`` trials (Wilson 1927)."""
    z = 1.959964
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _samples(folder: Path) -> str:
    grids = sorted((int(found[1]), path) for path in folder.glob("step-*.png") if (found := _STEP.fullmatch(path.name)))
    if not grids:
        return '<p class="absent">No sample grids were written (<code>samples/step-*.png</code>).</p>'
    *earlier, last = grids
    shown = earlier
    if len(earlier) > _MAX_GRIDS:
        shown = [earlier[round(i * (len(earlier) - 1) / (_MAX_GRIDS - 1))] for i in range(_MAX_GRIDS)]
    hero, aspect = _picture(*last, _HERO_PIXELS)
    out = f'<figure class="card hero">{hero}<figcaption>After {last[0]:,} steps</figcaption></figure>'
    strip = [
        f"<figure>{_picture(step, path, _THUMB_PIXELS)[0]}<figcaption>step {step:,}</figcaption></figure>"
        for step, path in shown
    ]
    if strip:
        # Wide sheets need wide thumbnails for the same tile size.
        width = min(480, round(150 * math.sqrt(max(1.0, aspect))))
        out += f'<div class="strip" style="--thumb: {width}px">{"".join(strip)}</div>'
    if len(shown) < len(earlier):
        out += f'<p class="note">{len(shown)} of {len(earlier)} earlier grids; all are in <code>samples</code>.</p>'
    return out


_STEP = re.compile(r"step-(\d+)\.png")


def _picture(step: int, path: Path, max_pixels: int) -> tuple[str, float]:
    """Return the picture as an HTML element with embedded data, and its aspect ratio (width / height)."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except OSError as error:  # a run killed while it wrote the picture
        log.warning("write_report cannot show %s: %s", path, error)
        return f'<p class="absent">{html.escape(path.name)} cannot be read.</p>', 1.0
    if max(image.size) > max_pixels:
        image.thumbnail((max_pixels, max_pixels), Image.Resampling.LANCZOS)
    stream, kind = io.BytesIO(), "png"
    image.save(stream, "PNG", optimize=True)
    if stream.tell() > _PNG_BYTES:
        stream, kind = io.BytesIO(), "jpeg"
        image.save(stream, "JPEG", quality=90)
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    size = f'width="{image.width}" height="{image.height}"'
    return (
        f'<img src="data:image/{kind};base64,{data}" alt="Sample grid at step {step}" {size}>',
        image.width / image.height,
    )


def _summary_table(summary: Mapping[str, Any]) -> str:
    if not summary:
        return '<p class="absent">The run has no summary.</p>'
    lines = "".join(
        f"<tr><th scope=row><code>{html.escape(str(key))}</code></th><td>{_cell(str(key), value)}</td></tr>"
        for key, value in summary.items()
    )
    return f'<div class="card scroll"><table>{lines}</table></div>'


def _cell(key: str, value: Any) -> str:
    if value is None:
        return '<span class="lead">—</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}" + (f" ({_duration(value)})" if key.endswith("seconds") and value >= 60 else "")
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return html.escape(", ".join(map(str, value))) or "none"
    if isinstance(value, Mapping | list | tuple) and value:
        return f"<pre>{html.escape(json.dumps(value, indent=1, default=str, ensure_ascii=False))}</pre>"
    return "none" if isinstance(value, Mapping) else html.escape(str(value))


def _config(resolved_config: str) -> str:
    if not resolved_config.strip():
        return '<p class="absent">No configuration was recorded.</p>'
    lines = len(resolved_config.strip().splitlines())
    return (
        f'<details class="card"><summary>Resolved configuration, {lines:,} lines</summary>'
        f"<pre>{html.escape(resolved_config)}</pre></details>"
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"
