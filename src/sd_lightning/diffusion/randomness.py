"""Random numbers that depend on the sample, not on the process.

Every number is a pure function of (seed, epoch, sample index, purpose, position inside the
sample). It does not depend on rank, world size, worker, batch size, batch order, device or
on what was drawn before, so losses are comparable between strategies and a resumed run needs
no generator state.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) in int64 operations. Its 128-bit counter and 64-bit key are used as::

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (block of four words inside the sample, index & 0xffffffff,
               epoch & 0xffffffff, purpose | (index >> 32) << 8)

Floats are made by :mod:`sd_lightning.diffusion.exact_float`, with the same bits everywhere.

On the CPU, numpy computes the numbers: a draw is some two hundred small operations, and each takes numpy a third of
torch's time. On other devices the same code runs on tensors, so it uses only operations that both support.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.exact_float import Array, box_muller, float32

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD_MASK = 0xFFFFFFFF
NUMPY_DEVICE = "cpu"
"""Type of the device on which numpy computes."""


class Purpose(IntEnum):
    """What a random number is for; each purpose is a stream of its own.

    The values are part of the format of a run: changing one changes what a resumed run draws.
    """

    NOISE = 0
    TIMESTEP = 1
    VAE_SAMPLE = 2
    CROP = 3
    FLIP = 4
    CAPTION = 5
    OFFSET_NOISE = 7
    INPUT_PERTURBATION = 8
    SHUFFLE = 9
    SAMPLING_LATENTS = 10
    BUCKETS = 11


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Encrypt 128-bit counters to 128 random bits each with Philox4x32-10.

    Args:
        counter: Four int64 tensors (or numpy arrays) of 32-bit words in [0, 2**32), broadcastable together.
        key: Two 32-bit words.

    Returns:
        Four int64 tensors (arrays) of the broadcast shape, each word in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # 32 x 32 -> 64 bits in wrapping int64. The high word is the arithmetic shift, masked;
        # low words are left unmasked, since only words that are multiplied must be clean.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        # The first operation on each word is out of place, because it broadcasts the words.
        c0 = (product1 >> 32) ^ c1
        c0 ^= k0
        c0 &= WORD_MASK
        c2 = (product0 >> 32) ^ c3
        c2 ^= k1
        c2 &= WORD_MASK
        c1, c3 = product1, product0
        k0 = (k0 + KEY_INCREMENTS[0]) & WORD_MASK
        k1 = (k1 + KEY_INCREMENTS[1]) & WORD_MASK
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK


def uniform(seed: int, epoch: Tensor | int, index: Tensor, purpose: Purpose, shape: tuple[int, ...] = ()) -> Tensor:
    """Draw uniform numbers in [0, 1), exact multiples of 2**-24.

    Args:
        seed: In [0, 2**64).
        epoch: An int, or an integer tensor () or (B,).
        index: Global sample indices (B,), integer; its device is where the numbers are made.
        purpose: The stream.
        shape: Shape of one sample's numbers.

    Returns:
        float32 (B, *shape). A longer shape continues a shorter one in row-major order.

    Raises:
        UsageError: If the seed is out of range.
    """
    words = _stack(_words(seed, epoch, index, purpose, shape))
    numbers = float32(words >> 8)
    numbers *= 2.0**-24
    return _cut(numbers, shape)


def normal(seed: int, epoch: Tensor | int, index: Tensor, purpose: Purpose, shape: tuple[int, ...] = ()) -> Tensor:
    """Draw standard normal numbers, always finite (|z| <= 6.67), by Box and Muller (1958).

    Args:
        seed: In [0, 2**64).
        epoch: An int, or an integer tensor () or (B,).
        index: Global sample indices (B,), integer; its device is where the numbers are made.
        purpose: The stream.
        shape: Shape of one sample's numbers, e.g. ``(C, H, W)``.

    Returns:
        float32 (B, *shape). A longer shape continues a shorter one in row-major order.

    Raises:
        UsageError: If the seed is out of range.
    """
    words = _words(seed, epoch, index, purpose, shape)
    radius_words, angle_words = _stack(words[::2]), _stack(words[1::2])
    return _cut(_stack(box_muller(radius_words, angle_words)), shape)


def integers(
    seed: int, epoch: Tensor | int, index: Tensor, purpose: Purpose, high: int, shape: tuple[int, ...] = ()
) -> Tensor:
    """Draw integers in [0, high); no value's probability is off by more than 2**-32.

    Args:
        seed: In [0, 2**64).
        epoch: An int, or an integer tensor () or (B,).
        index: Global sample indices (B,), integer; its device is where the numbers are made.
        purpose: The stream.
        high: Exclusive upper end, in [1, 2**31].
        shape: Shape of one sample's numbers.

    Returns:
        int64 (B, *shape).

    Raises:
        UsageError: If the seed or ``high`` is out of range.
    """
    if not 1 <= high <= 2**31:
        raise UsageError(f"randomness.integers got high={high}; expected 1 <= high <= 2**31.")
    words = _stack(_words(seed, epoch, index, purpose, shape))
    return _cut(words * high >> 32, shape)


def permutation(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Return a permutation of ``range(num_samples)``, a pure function of the arguments.

    Args:
        seed: In [0, 2**64).
        epoch: Index of the pass over the data.
        num_samples: Length of the permutation.

    Returns:
        int64 (num_samples,) on the CPU.

    Raises:
        UsageError: If the seed is out of range.
    """
    keys = torch.empty(num_samples, dtype=torch.int64)
    # Slices keep the temporaries of a data set of hundreds of millions of images small.
    slice_length = 2**20
    for begin in range(0, num_samples, slice_length):
        index = torch.arange(begin, min(begin + slice_length, num_samples))
        word0, word1, _, _ = _words(seed, epoch, index, Purpose.SHUFFLE, ())
        keys[begin : begin + slice_length] = torch.as_tensor(word0 << 31 ^ word1).squeeze(1)
    # Two equal 63-bit keys are all but impossible; a stable sort settles even those.
    return torch.argsort(keys, stable=True)


def _words(
    seed: int, epoch: Tensor | int, index: Tensor, purpose: Purpose, shape: tuple[int, ...]
) -> tuple[Any, Any, Any, Any]:
    """Return the four words (B, blocks) of the blocks that cover ``shape`` for each sample; numpy arrays on the CPU."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"randomness got seed={seed}; expected 0 <= seed < 2**64. Choose another seed.")
    index = index.to(torch.int64).view(-1, 1)
    if isinstance(epoch, Tensor):
        epoch = epoch.to(device=index.device, dtype=torch.int64).view(-1, 1)
    else:
        epoch = torch.full_like(index, epoch)
    block = torch.arange(math.ceil(math.prod(shape) / 4), device=index.device).view(1, -1)
    key = (seed & WORD_MASK, seed >> 32)
    if index.device.type != NUMPY_DEVICE:
        return philox4x32(_counter(block, index, epoch, purpose), key)
    return philox4x32(_counter(block.numpy(), index.numpy(), epoch.numpy(), purpose), key)


def _counter(block: Array, index: Array, epoch: Array, purpose: Purpose) -> tuple[Array, Array, Array, Array]:
    # Python scalars throughout: a small host tensor would make a CUDA stream wait.
    return block, index & WORD_MASK, epoch & WORD_MASK, (index >> 32 << 8) | int(purpose)


def _cut(numbers: Tensor | np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Reshape (B, blocks, ...) to the tensor (B, *shape), dropping the unused end of the last block."""
    numel = math.prod(shape)
    flat = torch.as_tensor(numbers).flatten(1)
    if flat.shape[1] != numel:
        flat = flat[:, :numel].contiguous()
    return flat.view(numbers.shape[0], *shape)


def _stack(parts: tuple[Array, ...]) -> Array:
    return np.stack(parts, axis=-1) if isinstance(parts[0], np.ndarray) else torch.stack(parts, dim=-1)
