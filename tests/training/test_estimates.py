"""Distances and means with their intervals, against the papers' equations and over many repetitions."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from sd_lightning.training import estimates
from sd_lightning.training.estimates import (
    frechet_distance,
    frechet_estimate,
    kernel_estimate,
    mean_estimate,
    share_estimate,
)


class Given(torch.nn.Module):
    """A feature network whose pictures are features."""

    num_features = 8

    def forward(self, features: Tensor) -> Tensor:
        return features


def normal(count: int, dim: int = 8, *, seed: int = 0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, dim) + shift


def test_frechet_distance_is_the_papers_equation_and_torchmetrics() -> None:
    drawn, real = normal(200), normal(150, seed=1, shift=0.3)
    one, other = drawn.numpy(), real.numpy()
    c1, c2 = np.cov(one.T), np.cov(other.T)
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
    value = float(frechet_distance(drawn, real))
    assert value == pytest.approx(expected, rel=1e-9)
    metric = FrechetInceptionDistance(feature=Given())
    metric.update(drawn, real=False)
    metric.update(real, real=True)
    assert value == pytest.approx(float(metric.compute()), rel=1e-9)


def test_frechet_distance_of_singular_covariances_is_known_by_hand() -> None:
    """Fewer pictures than features, where a root of a matrix is lost in rounding."""
    line = torch.zeros(5, 50, dtype=torch.float64)
    line[:, 3] = torch.tensor([-2.0, -1, 0, 1, 2])
    across = line.roll(4, dims=1)
    variance = 2.5
    assert float(frechet_distance(line, line)) == pytest.approx(0, abs=1e-12)
    assert float(frechet_distance(line, across)) == pytest.approx(2 * variance)
    assert float(frechet_distance(line, 3 * line + 1)) == pytest.approx(50 + (3 - 1) ** 2 * variance)


def test_kernel_distance_over_all_pictures_is_the_papers_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = normal(40), normal(40, seed=1, shift=0.3)

    def kernel(one: Tensor, other: Tensor) -> np.ndarray:
        return (one.numpy() @ other.numpy().T / 8 + 1) ** 3

    within = [(k.sum() - np.trace(k)) / (40 * 39) for k in (kernel(drawn, drawn), kernel(real, real))]
    expected = sum(within) - 2 * kernel(drawn, real).mean()
    monkeypatch.setattr(estimates, "SUBSETS", 4000)  # the mean over subsets is that over all pictures
    estimate = kernel_estimate(drawn, real)
    assert estimate.value == pytest.approx(expected, abs=0.03 * (estimate.high - estimate.low))
    assert estimate.note == "4000 subsets of 20"
    metric = KernelInceptionDistance(feature=Given(), subsets=500, subset_size=20)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        metric.update(drawn, real=False)
        metric.update(real, real=True)
        assert float(metric.compute()[0]) == pytest.approx(estimate.value, abs=0.1 * (estimate.high - estimate.low))


def test_intervals_are_as_wide_as_the_values_of_other_pictures_spread() -> None:
    """Known laws, drawn again and again: 95 % intervals are about four standard deviations wide."""
    runs = [(normal(120, 4, seed=2 * i), normal(120, 4, seed=2 * i + 1, shift=0.5)) for i in range(60)]
    for estimate_of in (frechet_estimate, kernel_estimate):
        found = [estimate_of(*each) for each in runs]
        spread = np.std([each.value for each in found])
        half = np.mean([(each.high - each.low) / 2 for each in found])
        assert 0.75 < half / (1.96 * spread) < 1.35, (estimate_of.__name__, half, spread)
    means = [mean_estimate(drawn[:, 0]) for drawn, _ in runs]
    assert sum(each.low <= 0 <= each.high for each in means) >= 52


def test_the_bias_of_the_frechet_distance_is_told() -> None:
    """Of the same law, the distance is all bias, which kid has none of."""
    runs = [(normal(100, 8, seed=2 * i), normal(100, 8, seed=2 * i + 1)) for i in range(20)]
    found = [frechet_estimate(*each) for each in runs]
    told = np.mean([float(each.note.split()[1]) for each in found])
    assert told == pytest.approx(np.mean([each.value for each in found]), rel=0.5)
    kernels = [kernel_estimate(*each) for each in runs]
    assert sum(each.low <= 0 <= each.high for each in kernels) >= 16


def test_a_share_of_all_has_an_interval() -> None:
    everything = share_estimate(1.0, 50)
    assert (everything.value, everything.high, everything.low) == pytest.approx((1, 1, 0.92865), abs=1e-5)
    assert (everything.count, share_estimate(0.0, 50).low) == (50, 0)


def test_the_same_pictures_give_the_same_intervals_and_leave_random_numbers_alone() -> None:
    drawn, real = normal(60), normal(50, seed=1)
    state = torch.get_rng_state()
    first = [frechet_estimate(drawn, real), kernel_estimate(drawn, real), mean_estimate(drawn[:, 1])]
    assert first == [frechet_estimate(drawn, real), kernel_estimate(drawn, real), mean_estimate(drawn[:, 1])]
    assert torch.equal(state, torch.get_rng_state())
