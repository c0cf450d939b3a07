"""Adapters on a base in float32, int8 and NF4, on the digits: five photos of a new glyph, and what the model knew."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

BASES = ("float32", "int8", "nf4")
POINT = 0.01
BARS = {
    "subject_float32": ">= 0.95",  # pictures of the subject's prompt that show the subject, mean of the seeds
    "digits_float32": ">= 0.9",  # pictures of digits' prompts that show that digit
    **{f"{key}_lost_{base}": f"<= {POINT}" for key in ("subject", "digits", "accuracy") for base in BASES[1:]},
}
TABLE = {
    "LoRA on a base in float32; int8; NF4, mean of the seeds: pictures of a new glyph that show it": (
        "{subject_float32:.1%}; {subject_int8:.1%}; {subject_nf4:.1%}"
    ),
    "the same: prompted digits that are right beside it": "{digits_float32:.1%}; {digits_int8:.1%}; {digits_nf4:.1%}",
    "adapters on the digits, drawn with the base that they were trained on: prompted digits that are right": (
        "{accuracy_float32:.1%}; {accuracy_int8:.1%}; {accuracy_nf4:.1%}"
    ),
}
SEEDS = tuple(range(int(os.environ.get("SD_LIGHTNING_SEEDS", "3"))))
ADAPTERS = ("trainable=lora", "lora.rank=16", "module.train_text_encoder=false")
TARGETS = "lora.target_modules=[to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2]"


def measure() -> dict[str, float]:
    """Train the digits once, or take the run that SD_LIGHTNING_TRAINED_RUN names, and teach it the glyph on each base.

    The pipeline's files have the original weights: subject and digits are drawn with these and the adapters. The
    accuracy is that of runs' own pictures, drawn with the quantised base.
    """
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tests" / "support")]
    from dreambooth_quality import _run, _teach

    from glyph import GlyphJudge, write_photos

    judge = GlyphJudge()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos")
        trained = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
        if not trained:
            trained = str(folder / "digits")
            _run("train", f"output_dir={trained}", folder=folder)
        source = Path(trained).resolve()
        metrics: dict[str, float] = {}
        for base in BASES:
            options = (*ADAPTERS, TARGETS, f"base={'null' if base == 'float32' else base}")
            found = [_taught(folder / base, source, judge, seed, options, _teach) for seed in SEEDS]
            for key in ("subject", "digits"):
                metrics[f"{key}_{base}"] = sum(shares[key] for shares in found) / len(found)
            run = folder / f"{base}-on"
            run_options = (f"output_dir={run}", f"init_from={source}", "trainer.max_steps=60", "optimizer.lr=1e-3")
            _run("train", *run_options, *options, folder=folder)
            metrics[f"accuracy_{base}"] = json.loads((run / "summary.json").read_text())["prompted_accuracy"]
    for base in BASES[1:]:
        for key in ("subject", "digits", "accuracy"):
            metrics[f"{key}_lost_{base}"] = metrics[f"{key}_float32"] - metrics[f"{key}_{base}"]
    return metrics


def _taught(
    folder: Path, source: Path, judge: Any, seed: int, options: tuple[str, ...], teach: Any
) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    photos = folder / "photos"
    if not photos.exists():  # class images, which the base draws, are each base's own
        photos.symlink_to(folder.parent / "photos")
    shares: dict[str, float] = teach(folder, source, judge, f"seed={seed}", *options, "learning_rate=2e-3")
    return shares
