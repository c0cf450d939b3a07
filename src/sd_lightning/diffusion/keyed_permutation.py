"""A permutation of any length, computed at single positions.

It is a Feistel network over pairs of unequal halves (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): a position is written as ``left * width + right``, and each round adds a keyed hash of one half to the
other. ``height * width`` is at least the length and at most a square root more, so that few results lie outside the
range. Those are permuted again until they lie inside (cycle walking), which keeps the map a permutation.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import Purpose

LONGEST = 2**62
_ROUNDS = 12  # fewer leave a measurable preference among the permutations of six
# The finalizer of splitmix64 (variant 13 of Stafford, "Better bit mixing").
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class KeyedPermutation:
    """A permutation of ``range(length)`` in constant memory, a pure function of its arguments."""

    def __init__(self, length: int, *, seed: int, epoch: int, stream: int = 0) -> None:
        """Derive the keys of the rounds.

        Args:
            length: Length of the permutation, at most 2**62.
            seed: In [0, 2**64).
            epoch: Index of the pass over the data.
            stream: Number that tells apart the permutations of one epoch.

        Raises:
            UsageError: The seed is out of range.
        """
        assert 0 <= length <= LONGEST, f"no permutation of length {length}"
        self._length = np.uint64(length)
        self._height = np.uint64(math.isqrt(length) + 1)
        self._width = np.uint64(-(-length // int(self._height)) or 1)
        shape = (2 * _ROUNDS,)
        words = randomness.integers(seed, epoch, torch.tensor([stream]), Purpose.SHUFFLE, 2**31, shape)[0].numpy()
        self._keys = (words[::2] << 32 | words[1::2]).astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return what stands at ``positions``.

        Args:
            positions: (N,) int64, in ``range(length)``.

        Returns:
            (N,) int64.
        """
        values = positions.astype(np.uint64)
        assert not (values >= self._length).any(), f"positions beyond range({self._length})"
        values = self._permute(values)
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            values[outside] = self._permute(values[outside])
            outside = outside[values[outside] >= self._length]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self._width)
        for first, second in self._keys.reshape(-1, 2):
            left = _shifted(left, right, first, self._height)
            right = _shifted(right, left, second, self._width)
        return left * self._width + right


def _shifted(half: np.ndarray, other: np.ndarray, key: np.uint64, modulus: np.uint64) -> np.ndarray:
    """Add a hash of the other half to ``half``, modulo ``modulus``."""
    half = half + (_mixed(other + key) >> np.uint64(32)) * modulus // np.uint64(2**32)
    # The difference wraps to a huge number where the sum is below the modulus.
    shifted: np.ndarray = np.minimum(half, half - modulus)
    return shifted


def _mixed(words: np.ndarray) -> np.ndarray:
    """Hash 64-bit words, a bijection; overwrites ``words``."""
    words ^= words >> np.uint64(30)
    words *= _MULTIPLIERS[0]
    words ^= words >> np.uint64(27)
    words *= _MULTIPLIERS[1]
    words ^= words >> np.uint64(31)
    return words
