"""Distances between features of drawn and of real pictures, and means over pictures, with 95 % intervals.

Features are (N, D) float64; random choices have a fixed seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_lightning.report.page import wilson_interval

_Z = 1.959964
"""Standard errors to each end of a 95 % interval."""
SUBSETS = 100
_LARGEST_SUBSET = 1000
_RESAMPLES = 50


@dataclass(frozen=True)
class Estimate:
    """A metric's value with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Pictures that it is measured on."""
    note: str = ""
    features: str | None = None
    """The network that read them."""


def frechet_distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the Fréchet distance of the normal distributions fitted to two sets of features.

    ``|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½)`` (Heusel et al. 2017, arXiv 1706.08500, equation 6). With ``C = RᵀR``, the
    last trace is the sum of the singular values of ``R1 R2ᵀ``, which needs no root of a matrix that may be singular.
    """
    roots = [torch.linalg.qr((each - each.mean(0)) / math.sqrt(len(each) - 1), mode="r").R for each in (one, other)]
    covariances = sum(root.square().sum() for root in roots)
    return (
        (one.mean(0) - other.mean(0)).square().sum()
        + covariances
        - 2 * torch.linalg.svdvals(roots[0] @ roots[1].T).sum()
    )


def frechet_estimate(drawn: Tensor, real: Tensor) -> Estimate:
    """Estimate the Fréchet distance; its standard error and its bias, which falls with N, are the bootstrap's.

    The value is left as it is, since others report it so (Chong and Forsyth 2020, arXiv 1911.07023, on the bias).
    """
    value = float(frechet_distance(drawn, real))
    generator = torch.Generator().manual_seed(0)

    def resampled(of: Tensor) -> Tensor:
        return of[torch.randint(len(of), (len(of),), generator=generator)]

    again = torch.stack([frechet_distance(resampled(drawn), resampled(real)) for _ in range(_RESAMPLES)])
    bias, reach = float(again.mean()) - value, _Z * float(again.std())
    note = f"about {bias:.2g} too high with so few; only compare equal numbers of pictures"
    return Estimate(value, max(0.0, value - reach), value + reach, len(drawn), note)


def kernel_estimate(drawn: Tensor, real: Tensor) -> Estimate:
    """Estimate the kernel distance: the squared MMD with the kernel ``(xᵀy / D + 1)³``, without bias.

    The mean over random subsets (Bińkowski et al. 2018, arXiv 1801.01401, section 4). With subsets of m of n pictures,
    their deviation times ``√(m / (n - m))`` is a jackknife's standard error (Shao and Wu 1989). n is that of the
    smaller set: with many more pictures in the other, the interval is too wide rather than too narrow.
    """
    from torchmetrics.image.kid import poly_mmd

    fewest = min(len(drawn), len(real))
    size = min(_LARGEST_SUBSET, fewest // 2)
    generator = torch.Generator().manual_seed(0)

    def subset(of: Tensor) -> Tensor:
        return of[torch.randperm(len(of), generator=generator)[:size]]

    values = torch.stack([poly_mmd(subset(real), subset(drawn)) for _ in range(SUBSETS)])
    value, reach = float(values.mean()), _Z * float(values.std()) * math.sqrt(size / (fewest - size))
    return Estimate(value, value - reach, value + reach, len(drawn), f"{SUBSETS} subsets of {size}")


def mean_estimate(values: Tensor) -> Estimate:
    """Estimate a mean over pictures (N,), with 1.96 standard errors to each side."""
    value, reach = float(values.double().mean()), _Z * float(values.double().std(correction=0)) / math.sqrt(len(values))
    return Estimate(value, value - reach, value + reach, len(values))


def share_estimate(share: float, count: int) -> Estimate:
    """Estimate a share of pictures; the interval is Wilson's, which has a width where it is all of them."""
    return Estimate(share, *wilson_interval(share, count), count)
