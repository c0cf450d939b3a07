"""Handwritten digits from scikit-learn with captions, and a classifier of generated digits.

1797 real digits of 8x8 pixels (E. Alpaydin and C. Kaynak, UCI, 1998) ship with scikit-learn. They are the default data
and need no download.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.source import Source

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a handwritten {}", "a handwritten digit {}", "the digit {}", "a drawing of a {}")
GENERIC_CAPTION = "a handwritten digit"
PROMPTS = tuple(TEMPLATES[0].format(word) for word in WORDS)
"""One prompt per digit, in order, for measuring the prompted accuracy."""


def captions_of(label: int) -> list[str]:
    """Return a digit's nine captions: four that name it, twice each, and the generic one.

    One caption in nine is therefore generic; with a tenth of all captions dropped that is about
    10 % generic and 10 % empty.
    """
    named = [template.format(WORDS[label]) for template in TEMPLATES]
    return [*named, *named, GENERIC_CAPTION]


class Digits(Source):
    """Source of RGB digits with nine captions each (see ``captions_of``).

    Attributes:
        labels: The digit of each sample.
    """

    def __init__(self, split: Literal["train", "val"] = "train", *, size: int = 32) -> None:
        """Load the digits.

        Args:
            split: 1437 digits to train on (80 %), or the 360 held out (stratified, always the same).
            size: Side of the images, in pixels.

        Raises:
            UsageError: There is no such split.
        """
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        if split not in ("train", "val"):
            raise UsageError(f"Digits got split={split!r}; expected 'train' or 'val'. Write split=train")
        digits = load_digits()
        train_x, val_x, train_y, val_y = train_test_split(
            digits.data, digits.target, test_size=0.2, stratify=digits.target, random_state=0
        )
        values, labels = (train_x, train_y) if split == "train" else (val_x, val_y)
        self.split = split
        self.labels: list[int] = labels.tolist()
        self._captions = [captions_of(label) for label in range(len(WORDS))]
        self._images = [_enlarge(digit, size) for digit in values.reshape(-1, 8, 8)]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._images[index]).convert("RGB")

    def captions(self, index: int) -> list[str]:
        """Return the captions of a digit; the first one names it plainly."""
        return self._captions[self.labels[index]]

    @cached_property
    def classifier(self) -> DigitClassifier:
        """Independent classifier of generated digits, for the prompted accuracy."""
        return DigitClassifier()

    def name(self, index: int) -> str:
        """Return e.g. ``digits/train/17``."""
        return f"digits/{self.split}/{index}"

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Include the pixels: another release of scikit-learn may have other digits."""
        return self.key(index), self._images[index].tobytes().hex(), "\n".join(self.captions(index))


class DigitClassifier:
    """Classifier of digits in images, fitted on real digits that the generator has never seen.

    A support vector machine on 8x8 pixels (scikit-learn's example for this data), fitted on the
    held-out split after the same enlarging and shrinking as generated images.

    Attributes:
        real_accuracy: Its own accuracy on the real digits of the training split.
    """

    def __init__(self) -> None:
        """Fit the classifier (a fraction of a second)."""
        from sklearn.svm import SVC

        held_out, train = Digits("val"), Digits("train")
        self._svc = SVC(gamma=0.001).fit(self._features(held_out), held_out.labels)
        self.real_accuracy = float(self._svc.score(self._features(train), train.labels))

    @staticmethod
    def prompts(num_samples: int) -> tuple[list[str], list[int]]:
        """Return prompts and their digits, cycling through 0 to 9."""
        labels = [i % len(PROMPTS) for i in range(num_samples)]
        return [PROMPTS[label] for label in labels], labels

    def __call__(self, images: Sequence[Image.Image]) -> list[int]:
        """Classify the digit in each image.

        Args:
            images: PIL images of any size and mode, light digits on black.

        Returns:
            One digit per image.
        """
        return self._svc.predict(np.stack([_shrink(image) for image in images])).tolist()

    def accuracy(self, images: Sequence[Image.Image], labels: Sequence[int]) -> float:
        """Return the fraction of images that are classified as their label."""
        if len(images) != len(labels) or not images:
            raise ValueError(
                f"DigitClassifier got {len(images)} images and {len(labels)} labels; expected as many, not 0"
            )
        return sum(read == label for read, label in zip(self(images), labels)) / len(labels)

    @staticmethod
    def _features(digits: Digits) -> np.ndarray:
        return np.stack([_shrink(digits.image(i)) for i in range(len(digits))])


def _enlarge(digit: np.ndarray, size: int) -> np.ndarray:
    """Enlarge 8x8 values in 0..16 to (size, size) uint8 in 0..255."""
    grey = Image.fromarray(np.round(digit * (255 / 16)).astype(np.uint8))
    return np.asarray(grey.resize((size, size), Image.Resampling.BILINEAR))


def _shrink(image: Image.Image) -> np.ndarray:
    """Shrink an image to 8x8 area means, (64,) in 0..16."""
    grey = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32).mean(-1))
    return (F.adaptive_avg_pool2d(grey[None], 8) * (16 / 255)).flatten().numpy()
