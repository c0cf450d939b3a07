"""The Inception network of FID and KID, as TensorFlow's graph of 2015-12-05 has it.

Its weights come in a file that the user has: pytorch-fid's ``pt_inception-2015-12-05-6726825d.pth``, or that of
torch-fidelity, ``weights-inception-2015-12-05-6726825d.pth``. Of torchvision's Inception v3, which gives other
distances, it differs in three points: averages leave padding out, the last block pools by the maximum, and there are
1008 classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning._errors import UsageError

NUM_FEATURES = 2048
SIDE = 299
"""Height and width of the input, in pixels."""
NUM_WEIGHTS = 21_785_568
"""Weights of the convolutions and norms, without running statistics and classes."""
NUM_CLASSES = 1008

_BLOCKS = ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")
_HALVING = ("6a", "7a")
_NORM = ("running_mean", "running_var", "weight", "bias")
_BRANCHES = ("1x1", "5x5", "3x3", "7x7", "3x3dbl", "7x7dbl", "7x7x3")
"""Branches of the blocks, in the order of their channels; each block has two or three of them."""


class FIDInception(nn.Module):
    """Inception v3 up to its last average: images (B, 3, 299, 299) in [-1, 1) -> features (B, 2048).

    Args:
        weights: By the names of torchvision's layers, which give the structure: ``Mixed_6b.branch7x7_2.conv.weight`` is
            of the second convolution of a branch, and 2a and 2b stand side by side.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        kept = {key.replace(".", "/"): each for key, each in weights.items() if not key.startswith("fc.")}
        self._weights = nn.ParameterDict({k: nn.Parameter(v, requires_grad=False) for k, v in kept.items()})
        layers = sorted({key.rsplit(".", 2)[0] for key in weights})
        self._chains = {
            (block, branch): [n for n in layers if re.fullmatch(rf"Mixed_{block}.branch{branch}(_\d[ab]?)?", n)]
            for block in _BLOCKS
            for branch in _BRANCHES
        }

    def forward(self, images: Tensor) -> Tensor:
        images = self._convolve("Conv2d_1a_3x3", images, stride=2, padded=False)
        images = self._convolve("Conv2d_2a_3x3", images, padded=False)
        images = F.max_pool2d(self._convolve("Conv2d_2b_3x3", images), 3, stride=2)
        images = self._convolve("Conv2d_3b_1x1", images)
        images = F.max_pool2d(self._convolve("Conv2d_4a_3x3", images, padded=False), 3, stride=2)
        for block in _BLOCKS:
            images = self._mixed(block, images)
        return images.mean((2, 3))

    def _mixed(self, block: str, images: Tensor) -> Tensor:
        """Return the outputs of a block's branches, one after the other in channels."""
        outputs, halves = [], block in _HALVING
        for chain in filter(None, (self._chains[block, branch] for branch in _BRANCHES)):
            ends = [name for name in chain if name[-1] in "ab"]
            out = images
            for name in chain[: len(chain) - len(ends)]:
                last = halves and name == chain[-1]
                out = self._convolve(name, out, stride=1 + last, padded=not last)
            outputs += [self._convolve(end, out) for end in ends] or [out]
        if halves:
            return torch.cat([*outputs, F.max_pool2d(images, 3, stride=2)], 1)
        if block == _BLOCKS[-1]:
            pooled = F.max_pool2d(images, 3, stride=1, padding=1)
        else:
            pooled = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
        return torch.cat([*outputs, self._convolve(f"Mixed_{block}.branch_pool", pooled)], 1)

    def _convolve(self, name: str, images: Tensor, *, stride: int = 1, padded: bool = True) -> Tensor:
        """Convolve, normalise with the running statistics, and rectify."""
        key = name.replace(".", "/")
        kernel = self._weights[f"{key}/conv/weight"]
        padding = (kernel.shape[2] // 2, kernel.shape[3] // 2) if padded else (0, 0)
        mean, var, scale, shift = (self._weights[f"{key}/bn/{each}"] for each in _NORM)
        convolved = F.conv2d(images, kernel, None, stride, padding)
        return F.relu(F.batch_norm(convolved, mean, var, scale, shift, eps=0.001))


def read_inception(file: Path) -> FIDInception:
    """Read FID's network from a file of PyTorch's or safetensors.

    Raises:
        UsageError: The file cannot be read, or holds another network.
    """
    remedy = "give pytorch-fid's pt_inception-2015-12-05-6726825d.pth, or the folder of a vision model"
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(file)
        else:
            weights = dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file raises one of many
        raise UsageError(
            f"features={file} cannot be read as weights ({type(error).__name__}); expected those of FID's Inception; "
            f"{remedy}"
        ) from error
    shapes = {key: each.shape for key, each in weights.items() if isinstance(each, Tensor)}
    trained = [shape for key, shape in shapes.items() if re.search(r"\.(conv|bn)\.(weight|bias)$", key)]
    classes = shapes.get("fc.bias", (NUM_CLASSES,))
    if sum(map(math.prod, trained)) != NUM_WEIGHTS or classes[0] != NUM_CLASSES:
        raise UsageError(
            f"features={file} holds another network, or one of {classes[0]} classes; expected FID's Inception, with "
            f"{NUM_WEIGHTS} weights and {NUM_CLASSES} classes; {remedy}"
        )
    return FIDInception(weights)
