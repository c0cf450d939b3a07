"""What adapters leave of the digits beside five photos of a new glyph, by what is preserved: three seeds of each."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_OFF = ("with_prior_preservation=false", "class_prompts=[]", "data.batch_size=10")
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PROMPTS = ",".join(["a handwritten digit"] * 10 + [f"a handwritten {digit}" for digit in _DIGITS])
WAYS = {
    "none": _OFF,
    "blank": (*_OFF, "preservation=blank"),
    "word": (*_OFF, "preservation=class", "preservation.words={sks digit:digit}"),
    "prompts": (*_OFF, "preservation=class", f"preservation.prompts=[{_PROMPTS}]"),
    "images": (),  # of the class prompts of experiment=dreambooth_tiny, which are the prompts above
}
BARS = {
    "subject_prompts": ">= 0.95",  # pictures of the subject's prompt that show the subject, mean of the seeds
    "digits_prompts": ">= 0.9",  # pictures of digits' prompts that show that digit
}
_NAMES = "; ".join(("nothing", "the empty caption", "the class by a word", "20 class prompts", "class images"))
TABLE = {
    f"LoRA on five photos of a new glyph, mean of three seeds; preserved: {_NAMES}: pictures that show it": "; ".join(
        f"{{subject_{way}:.0%}}" for way in WAYS
    ),
    "the same: prompted digits that are right beside it": "; ".join(f"{{digits_{way}:.1%}}" for way in WAYS),
    "the same, the seed with the fewest": "; ".join(f"{{digits_{way}_worst:.1%}}" for way in WAYS),
}
SEEDS = (0, 1, 2)


def measure(max_steps: int = 90) -> dict[str, float]:
    """Train the digits once, or take the run that SD_LIGHTNING_TRAINED_RUN names, and teach it the glyph each way.

    Args:
        max_steps: Steps of each run on the glyph.
    """
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tests" / "support")]
    from dreambooth_quality import _run, _teach
    from qlora_quality import ADAPTERS, TARGETS, _taught

    from glyph import GlyphJudge, write_photos

    judge: Any = GlyphJudge()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos")
        trained = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
        if not trained:
            trained = str(folder / "digits-run")
            _run("train", f"output_dir={trained}", folder=folder)
        source = Path(trained).resolve()
        for way, given in WAYS.items():
            options = (*ADAPTERS, TARGETS, f"max_train_steps={max_steps}", *given)
            found = [_taught(folder / way, source, judge, seed, options, _teach) for seed in SEEDS]
            for key in ("subject", "digits", "generic"):
                metrics[f"{key}_{way}"] = sum(shares[key] for shares in found) / len(found)
            metrics[f"digits_{way}_worst"] = min(shares["digits"] for shares in found)
    return metrics
