"""Run diffusers' own training script where torchvision is not installed, and write the times of its steps.

    python benchmarks/diffusers_peer.py STAMPS.json SCRIPT [ARGUMENT…]

The script is the user's copy of `examples/text_to_image/train_text_to_image.py`. It imports `torchvision.transforms`;
not every platform has a build of torchvision beside its torch, so without one the classes below take its place. They
do the same with PIL and torch and leave out torchvision's checks, so the script is no slower with them. Its AdamW is
torch's fused one and its networks are channels_last: both are faster on a CPU, and an engineer would edit them in.
"""

import enum
import importlib.util
import random
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from step_stamps import record


class InterpolationMode(enum.Enum):
    """torchvision's names of PIL's filters."""

    NEAREST = Image.Resampling.NEAREST
    BILINEAR = Image.Resampling.BILINEAR
    BICUBIC = Image.Resampling.BICUBIC
    BOX = Image.Resampling.BOX
    HAMMING = Image.Resampling.HAMMING
    LANCZOS = Image.Resampling.LANCZOS


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class Resize:
    """Make the shorter side ``size`` pixels long; leave an image of that size as it is."""

    def __init__(self, size: int, interpolation: InterpolationMode = InterpolationMode.BILINEAR) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Image.Image:
        shorter = min(image.size)
        if shorter == self.size:
            return image
        width, height = (self.size * side // shorter for side in image.size)
        return image.resize((width, height), self.interpolation.value)


class CenterCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (round((side - self.size) / 2) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


class RandomCrop(CenterCrop):
    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (random.randint(0, side - self.size) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


class RandomHorizontalFlip:
    def __call__(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


class ToTensor:
    """PIL image -> (C, H, W) float32 in [0, 1]."""

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return image.sub(self.mean).div_(self.std)


def stand_in_for_torchvision() -> None:
    """Let ``from torchvision import transforms`` find this module, unless there is a torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        torchvision = ModuleType("torchvision")
        torchvision.transforms = sys.modules[__name__]  # type: ignore[attr-defined]
        sys.modules["torchvision"] = torchvision


def speed_up() -> None:
    """Let the script have a fused AdamW and networks in the NHWC layout, as ours has them."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    plain = torch.optim.AdamW

    class FusedAdamW(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, fused=True)

    torch.optim.AdamW = FusedAdamW  # type: ignore[misc]
    for network in (UNet2DConditionModel, AutoencoderKL):
        load = network.from_pretrained

        def channels_last(*args: Any, load: Callable[..., Any] = load, **kwargs: Any) -> Any:
            return load(*args, **kwargs).to(memory_format=torch.channels_last)

        network.from_pretrained = channels_last


def main() -> None:
    """The command line."""
    # They look for torchvision when they are imported and would believe in the stand-in.
    import datasets  # noqa: F401
    import diffusers.utils
    import transformers  # noqa: F401

    speed_up()
    record(Path(sys.argv[1]))
    stand_in_for_torchvision()
    # The script of one release runs with the library of another.
    diffusers.utils.check_min_version = lambda version: None
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
