"""A subject that the digits model has never seen, photos of it, and a judge that knows it from digits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sd_lightning import LatentDiffusion, SamplingOptions
from sd_lightning.data.sources.digits import GENERIC_CAPTION, PROMPTS, Digits
from sd_lightning.models.generation import generate

SUBJECT = "a handwritten sks digit"

GLYPH = 10
"""What the judge calls the subject; 0 to 9 are the digits."""
_SHAPE = ("........", ".######.", ".#....#.", ".#.##.#.", ".#.##.#.", ".#....#.", ".######.", "........")


def glyphs(count: int, seed: int) -> list[Image.Image]:
    """Draw a square with a dot: shifted by up to a pixel of 8 x 8, of varying brightness, with noise."""
    random = np.random.default_rng(seed)
    shape = np.array([[14.0 if c == "#" else 0.0 for c in row] for row in _SHAPE])
    images = []
    for _ in range(count):
        pixels = np.roll(shape, random.integers(-1, 2, 2), (0, 1)) * random.uniform(0.75, 1.1)
        pixels = (pixels + (pixels > 0) * random.normal(size=(8, 8))).clip(0, 16)
        grey = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
        images.append(grey.resize((32, 32), Image.Resampling.BILINEAR).convert("RGB"))
    return images


def write_photos(folder: Path, count: int = 5) -> Path:
    """Write photos of the glyph as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(glyphs(count, seed=0)):
        image.save(folder / f"{i}.png")
    return folder


class GlyphJudge:
    """Reads digits and the glyph in images, fitted on held-out digits and on other drawings of the glyph."""

    def __init__(self) -> None:
        from sklearn.svm import SVC

        digits, drawn = Digits("val"), glyphs(60, seed=1)
        images = [digits.image(i) for i in range(len(digits))] + drawn
        self._svc = SVC(gamma=0.001).fit(_features(images), [*digits.labels, *[GLYPH] * len(drawn)])

    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        return self._svc.predict(_features(images))


def drawn_shares(run: str | Path, *, guidance_scale: float = 3.0) -> dict[str, float]:
    """Draw with a run's pipeline; return how often each prompt is drawn as it should be."""
    prompts = [SUBJECT] * 60 + list(PROMPTS) * 20 + [GENERIC_CAPTION] * 60
    options = SamplingOptions(num_inference_steps=12, guidance_scale=guidance_scale, batch_size=200)
    model = LatentDiffusion.from_pretrained(f"{run}/pipeline")
    read = GlyphJudge()(generate(model, prompts, seeds=range(1000, 1000 + len(prompts)), options=options))
    subject, digits, generic = np.split(read, [60, 260])
    return {
        "subject": float((subject == GLYPH).mean()),
        "digits": float((digits == np.arange(200) % 10).mean()),
        "generic is the subject": float((generic == GLYPH).mean()),
        "kinds of generic": len(set(generic.tolist()) - {GLYPH}),
    }


def _features(images: Sequence[Image.Image]) -> np.ndarray:
    small = [np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=np.float64) for image in images]
    return np.stack(small).reshape(len(small), 64) * (16 / 255)
