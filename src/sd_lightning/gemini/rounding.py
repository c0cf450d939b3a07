"""bfloat16 weights from float32 ones: with the bits that rounding drops beside them, or rounded stochastically."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_TIE = 0x8000
_ROW = 256
_UP = 0x10000
"""The distance of two bfloat16 values, in the last place of float32."""


def split(values: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Split float32 values without loss into bfloat16 values and 16 bits each.

    ``upper`` is rounded to the nearest, ties to even, like every conversion of torch. ``lower`` has the low bits of
    float32, which as a signed number are also the distance from ``upper``: it is in [-32768, 32767]. One distance is
    missing: a tie that is rounded down is 32768 above. So 65537 values round to an even upper half, and 65535 to an odd
    one; no 16 bits tell them apart. Such ties are listed: 1 in 2**17 trained weights, 1 in 16 just read from float16.

    Args:
        values: float32 (N,), on the host.
        upper: bfloat16 (N,), filled; NaN stays NaN, other values come back to the bit, with the sign of zero.
        lower: int16 (N,), filled.

    Returns:
        int32, the indices of ties that were rounded down.
    """
    bits = values.view(torch.int32)
    upper.copy_(values)
    lower.copy_(bits)
    # Comparing all bits takes longer than everything else; the minimum of a row of ``lower`` takes no time.
    whole = len(lower) // _ROW * _ROW
    rows = (lower[:whole].view(-1, _ROW).amin(1) == -_TIE).nonzero()
    if _ROW * len(rows) > len(lower) // 16:  # weights read from float16 have ties in every row
        return (bits.bitwise_and(_UP | 0xFFFF) == _TIE).nonzero().view(-1).to(torch.int32)
    near = torch.cat([(rows * _ROW + torch.arange(_ROW)).view(-1), torch.arange(whole, len(lower))])
    return near[bits[near] & (_UP | 0xFFFF) == _TIE].to(torch.int32)


def join(upper: Tensor, lower: Tensor, ties: Tensor, out: Tensor) -> None:
    """Write the values that :func:`split` was given to ``out``, float32 (N,)."""
    bits = out.view(torch.int32)
    bits.copy_(upper.view(torch.int16)).bitwise_left_shift_(16)
    bits.add_(lower.to(torch.int32))  # 1.5 times as fast as without the conversion
    bits[ties] += _UP


def round_stochastically(values: Tensor, keys: tuple[int, int], first: int, out: Tensor) -> None:
    """Round float32 values to one of the two bfloat16 values around them, so that the expectation is the value.

    The upper one is taken with the probability that the low 16 bits say (Gupta et al. 2015, arXiv:1502.02551, section
    3). The random number of an element is a function of the keys and its index alone. Values that bfloat16 has, and
    infinities, stay; NaN stays NaN.

    Args:
        values: float32 (N,); overwritten.
        keys: Two numbers in [0, 2**31).
        first: Index of the first element; even.
        out: bfloat16 (N,), filled.
    """
    values.nan_to_num_(torch.nan, torch.inf, -torch.inf)  # a NaN with all bits set would be rounded up to -0
    bits = values.view(torch.int32)
    bits += _TIE
    bits += hashed(values.numel(), keys, first, values.device).to(torch.int32)  # in [-32768, 32767]
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def keys_of(seed: int, step: int, name: str) -> tuple[int, int]:
    """Return the keys of the random numbers of what is rounded under a name in a step."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") >> 1, int.from_bytes(digest[4:], "little") >> 1


_MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))
"""Shifts and factors of ``lowbias32``, a bijection of 32-bit words (C. Wellons, "Prospecting for hash functions")."""


def hashed(numel: int, keys: tuple[int, int], first: int, device: torch.device) -> Tensor:
    """Return random int16 numbers by index, two from each word, which is mixed with one key before each factor."""
    words = torch.arange(first // 2, (first + numel + 1) // 2, dtype=torch.int32, device=device)
    shifted = torch.empty_like(words)
    for key, (shift, factor) in zip((*keys, 0), _MIXERS):
        words ^= key
        torch.bitwise_right_shift(words, shift, out=shifted)
        shifted &= 2 ** (32 - shift) - 1  # the shift repeats the sign bit
        words ^= shifted
        words *= factor
    return words.view(torch.int16)[:numel]
