"""DreamBooth on the digits: five photos of a new glyph, three seeds, with several class prompts and without any."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

BARS = {
    "subject_worst": ">= 0.95",  # pictures of the subject's prompt that show the subject
    "digits_worst": ">= 0.9",  # pictures of digits' prompts that show that digit
    "generic_is_subject_worst": "<= 0.1",  # pictures of the caption that fits all digits that show the subject
    "no_prior_digits": "<= 0.2",  # what this guards against
}
TABLE = {
    "five photos of a new glyph, worst of three seeds: pictures that show it; prompted digits that are right; generic "
    "captions that draw the glyph; prompted digits without prior preservation": (
        "{subject_worst:.0%}; {digits_worst:.0%}; {generic_is_subject_worst:.0%}; {no_prior_digits:.0%}"
    ),
}
SUBJECT = "a handwritten sks digit"
SEEDS = (0, 1, 2)
NO_PRIOR = ("with_prior_preservation=false", "class_prompts=[]", "data.batch_size=10")


def measure() -> dict[str, float]:
    """Train the digits once, or take the run that SD_LIGHTNING_TRAINED_RUN names, and teach it the glyph."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from glyph import GlyphJudge, write_photos

    judge = GlyphJudge()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos")
        trained = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
        if not trained:
            trained = str(folder / "digits")
            _run("train", f"output_dir={trained}", folder=folder)
        found = [_teach(folder, Path(trained).resolve(), judge, f"seed={seed}") for seed in SEEDS]
        without = _teach(folder, Path(trained).resolve(), judge, *NO_PRIOR)
    return {
        "subject_worst": min(shares["subject"] for shares in found),
        "digits_worst": min(shares["digits"] for shares in found),
        "generic_is_subject_worst": max(shares["generic"] for shares in found),
        **{f"no_prior_{key}": share for key, share in without.items()},
    }


def _teach(folder: Path, trained: Path, judge: Any, *options: str) -> dict[str, float]:
    """Return how often each kind of prompt is drawn as its label says."""
    from glyph import GLYPH
    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.data.sources.digits import GENERIC_CAPTION, PROMPTS
    from sd_lightning.models.generation import generate

    run_dir = folder / options[0].replace("=", "-")
    preset = ("experiment=dreambooth_tiny", f"init_from={trained}", "instance_data_dir=photos")
    texts = (f"instance_prompt={SUBJECT}", "class_data_dir=pictures", f"output_dir={run_dir}")
    _run("dreambooth", *preset, *texts, *options, folder=folder)
    model = LatentDiffusion.from_pretrained(run_dir / "pipeline")
    prompts = [SUBJECT] * 60 + list(PROMPTS) * 20 + [GENERIC_CAPTION] * 60
    sampling = SamplingOptions(num_inference_steps=12, guidance_scale=3.0, batch_size=100)
    seeds = range(1000, 1000 + len(prompts))
    subject, digits, generic = np.split(judge(generate(model, prompts, seeds=seeds, options=sampling)), [60, 260])
    return {
        "subject": float((subject == GLYPH).mean()),
        "digits": float((digits == np.arange(200) % 10).mean()),
        "generic": float((generic == GLYPH).mean()),
    }


def _run(program: str, *arguments: str, folder: Path) -> None:
    command = [sys.executable, "-m", f"sd_lightning.{program}", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
