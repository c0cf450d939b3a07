"""Float32 functions that give the same bits on every device, CPU type and build of torch.

They use only exactly rounded operations (``+``, ``*``, ``/`` and integer to float conversion, each its own kernel): the
logarithm, sine and even square root of maths libraries differ in the last bit.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)

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
