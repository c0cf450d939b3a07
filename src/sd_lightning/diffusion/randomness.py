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

Floats have the same bits on every device, CPU type and build of torch: they are made with exactly rounded operations
only (``+``, ``*``, ``/`` and integer to float conversion, each its own kernel). The logarithm, sine and even square
root of maths libraries differ in the last bit.

On the CPU, numpy computes the numbers: a draw is some two hundred small operations, and each takes numpy a third of
torch's time. On other devices the same code runs on tensors, so it uses only operations that both support.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError

Array = TypeVar("Array", Tensor, np.ndarray)

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
    MASK = 12
    MASKED_SAMPLE = 13
    TAGS = 14
    PRESERVATION = 15


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


# Near-minimax polynomials, lowest power first (Chebyshev interpolation, rounded to float32).
# -2 ln(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1]: relative error 3e-8.
_MINUS_TWO_LOG1P = (
    -2.0,
    0.9999997615814209,
    -0.6666836738586426,
    0.5000430941581726,
    -0.39913955330848694,
    0.33121392130851746,
    -0.2989819049835205,
    0.2875466048717499,
    -0.17487891018390656,
)
# sin(pi/2 w) / w in powers of w**2 on [-1, 1]: absolute error 7e-9.
_SIN_HALF_PI = (
    1.5707963705062866,
    -0.6459637880325317,
    0.07968991994857788,
    -0.004674150608479977,
    0.0001516751217423007,
)
# cos(pi/2 w) in powers of w**2 on [-1, 1]: absolute error 3e-10.
_COS_HALF_PI = (
    1.0,
    -1.2337005138397217,
    0.2536693215370178,
    -0.02086268737912178,
    0.0009177238680422306,
    -2.3824535674066283e-05,
)


def box_muller(radius_word: Array, angle_word: Array) -> tuple[Array, Array]:
    """Turn pairs of random 32-bit words into pairs of independent standard normal numbers (Box and Muller, 1958).

    Args:
        radius_word: int64, in [0, 2**32).
        angle_word: int64, of the same shape.

    Returns:
        Two float32 tensors (arrays) of that shape, always finite (|z| <= 6.67).
    """
    radius = _sqrt_minus_two_log(radius_word)
    # Half the angle, in units of pi/2, in [-1, 1): the double-angle formulas then cover the
    # circle with polynomials on half of it.
    half = float32(angle_word - 2**31)
    half *= 2.0**-31
    squared = half * half
    sine = _polynomial(squared, _SIN_HALF_PI)
    sine *= half
    cosine = _polynomial(squared, _COS_HALF_PI)
    cosine *= sine
    cosine *= 2.0
    cosine *= radius
    sine *= sine
    sine *= -2.0
    sine += 1.0
    sine *= radius
    return sine, cosine


def float32(x: Array) -> Array:
    """Convert to float32."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.to(torch.float32)


def _as_int32(x: Array) -> Array:
    return x.view(np.int32 if isinstance(x, np.ndarray) else torch.int32)


def _as_float32(x: Array) -> Array:
    return x.view(np.float32 if isinstance(x, np.ndarray) else torch.float32)


def _sqrt_minus_two_log(word: Array) -> Array:
    """Return sqrt(-2 ln((word + 1) / 2**32)) in float32."""
    bits = _as_int32(float32(word + 1))
    # word + 1 = 2**exponent * (1 + fraction), with 1 + fraction in [sqrt(1/2), sqrt(2)).
    exponent = bits - 0x3F3504F3
    exponent >>= 23
    fraction = _as_float32(bits - (exponent << 23))
    fraction -= 1.0
    result = _polynomial(fraction, _MINUS_TWO_LOG1P)
    result *= fraction
    scale = float32(32 - exponent)
    scale *= 2.0 * math.log(2.0)
    result += scale
    return _square_root(result)


def _square_root(x: Array) -> Array:
    """Return sqrt(x) to one unit in the last place, for float32 x >= +0 (not -0) below 45.

    Three steps of Heron's method from a guess based on the bits. ``torch.sqrt`` on the CPU is
    MKL's, which is not exactly rounded and so differs from other builds and devices.
    """
    root = _as_float32((_as_int32(x) >> 1) + 0x1FBD1DF5)
    for _ in range(3):
        root = x / root + root
        root *= 0.5
    return root


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Evaluate a polynomial by Horner's rule, without fused multiply-adds."""
    result = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        result += coefficient
        result *= x
    result += coefficients[0]
    return result


LONGEST = 2**62
_PERMUTATION_ROUNDS = 12  # fewer leave a measurable preference among the permutations of six
# The finalizer of splitmix64 (variant 13 of Stafford, "Better bit mixing").
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class KeyedPermutation:
    """A permutation of ``range(length)`` in constant memory, a pure function of its arguments.

    It is a Feistel network over pairs of unequal halves (Black and Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002): a position is written as ``left * width + right``, and each round adds a keyed hash of one half to the
    other. ``height * width`` is at least the length and at most a square root more, so that few results lie outside the
    range. Those are permuted again until they lie inside (cycle walking), which keeps the map a permutation.
    """

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
        shape = (2 * _PERMUTATION_ROUNDS,)
        words = integers(seed, epoch, torch.tensor([stream]), Purpose.SHUFFLE, 2**31, shape)[0].numpy()
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
    words *= _MIXERS[0]
    words ^= words >> np.uint64(27)
    words *= _MIXERS[1]
    words ^= words >> np.uint64(31)
    return words
