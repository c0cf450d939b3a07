"""randomness.py: known answers, independence of batch and device, and distribution."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from sd_lightning._errors import UsageError
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import (
    Purpose,
    _sqrt_minus_two_log,
    _square_root,
    integers,
    normal,
    philox4x32,
    uniform,
)

# kat_vectors of Random123: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEED = 0x123456789ABCDEF


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in unbounded Python integers, as written in the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def reference_words(seed: int, epoch: int, index: int, purpose: int, numel: int) -> list[int]:
    words: list[int] = []
    for block in range(math.ceil(numel / 4)):
        counter = [block, index & 0xFFFFFFFF, epoch, purpose | (index >> 32) << 8]
        words += reference_philox(counter, [seed & 0xFFFFFFFF, seed >> 32])
    return words[:numel]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    words = tuple(torch.tensor([word]) for word in hex_words(counter))
    key0, key1 = hex_words(key)
    output = philox4x32(words, (key0, key1))
    assert [int(word) for word in output] == hex_words(expected)


def test_philox_broadcasts_and_equals_python_integers_on_random_counters() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2**32, (3, 5, 1), generator=generator)
    block = torch.randint(0, 2**32, (1, 7), generator=generator)
    key = (0xDEADBEEF, 0x8BADF00D)
    output = philox4x32((block, *rows.unbind(0)), key)
    assert output[0].shape == (5, 7)
    for i in range(5):
        for j in range(7):
            counter = [int(block[0, j]), *(int(row[i, 0]) for row in rows)]
            assert [int(word[i, j]) for word in output] == reference_philox(counter, list(key))


def test_words_come_from_seed_epoch_index_purpose_and_position() -> None:
    index = torch.tensor([0, 7, 2**32 + 5, 2**40])
    epoch = torch.tensor([0, 3, 2**32 - 1, 1])
    numbers = uniform(SEED, epoch, index, Purpose.CROP, (3, 2))
    for row, i, e in zip(numbers, index.tolist(), epoch.tolist(), strict=True):
        words = reference_words(SEED, e, i, Purpose.CROP, 6)
        assert row.flatten().tolist() == [(word >> 8) / 2**24 for word in words]


def test_integers_scale_the_words() -> None:
    numbers = integers(SEED, 2, torch.tensor([9]), Purpose.TIMESTEP, 1000, (5,))
    words = reference_words(SEED, 2, 9, Purpose.TIMESTEP, 5)
    assert numbers.tolist() == [[word * 1000 >> 32 for word in words]]


def test_normal_is_box_muller_of_the_words() -> None:
    shape = (4, 64, 64)
    numbers = normal(SEED, 1, torch.tensor([3]), Purpose.NOISE, shape).flatten().double().numpy()
    words = np.array(reference_words(SEED, 1, 3, Purpose.NOISE, math.prod(shape)), dtype=np.float64)
    radius = np.sqrt(-2 * np.log((words[0::2] + 1) / 2**32))
    angle = np.pi * (words[1::2] / 2**31 - 1)
    np.testing.assert_allclose(numbers[0::2], radius * np.cos(angle), atol=5e-6)
    np.testing.assert_allclose(numbers[1::2], radius * np.sin(angle), atol=5e-6)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 5, 7)])
def test_numbers_do_not_depend_on_batch_order_or_split(shape: tuple[int, ...]) -> None:
    index = torch.arange(100, 133)
    epoch = index % 3
    whole = normal(SEED, epoch, index, Purpose.NOISE, shape)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(SEED, epoch[order], index[order], Purpose.NOISE, shape), whole[order])
    for size in (1, 2, 5, 13):
        parts = [
            normal(SEED, e, i, Purpose.NOISE, shape) for e, i in zip(epoch.split(size), index.split(size), strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_a_longer_shape_continues_a_shorter_one() -> None:
    index = torch.arange(5)
    longest = normal(SEED, 0, index, Purpose.NOISE, (23,))
    for length in range(1, 23):
        shorter = normal(SEED, 0, index, Purpose.NOISE, (length,))
        assert torch.equal(shorter, longest[:, :length])


def test_epoch_may_be_an_int_or_a_tensor_of_any_integer_type() -> None:
    index = torch.arange(6, dtype=torch.int32)
    expected = uniform(SEED, 4, index, Purpose.FLIP)
    assert torch.equal(uniform(SEED, torch.tensor(4), index, Purpose.FLIP), expected)
    assert torch.equal(uniform(SEED, torch.full((6,), 4, dtype=torch.int16), index, Purpose.FLIP), expected)


def test_seed_epoch_index_and_purpose_all_give_other_numbers() -> None:
    index = torch.arange(8)
    base = uniform(SEED, 0, index, Purpose.NOISE, (8,))
    others = [
        uniform(SEED + 1, 0, index, Purpose.NOISE, (8,)),
        uniform(SEED + 2**32, 0, index, Purpose.NOISE, (8,)),
        uniform(SEED, 1, index, Purpose.NOISE, (8,)),
        uniform(SEED, 0, index + 8, Purpose.NOISE, (8,)),
        uniform(SEED, 0, index + 2**32, Purpose.NOISE, (8,)),
        *(uniform(SEED, 0, index, p, (8,)) for p in Purpose if p != Purpose.NOISE),
    ]
    for other in others:
        assert not torch.isclose(base, other, atol=1e-6).any()


def test_normals_have_the_moments_tails_and_independence_of_a_normal() -> None:
    numbers = normal(7, 0, torch.arange(512), Purpose.NOISE, (4, 16, 16)).double()
    count = numbers.numel()
    assert torch.isfinite(numbers).all()
    for power, moment in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)]:
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) / count)
        assert abs(float((numbers**power).mean()) - moment) < 4 * spread
    edges = torch.linspace(-4, 4, 81, dtype=torch.float64)
    cumulative = (1 + torch.erf(edges / math.sqrt(2))) / 2
    empirical = torch.searchsorted(numbers.flatten().sort().values, edges) / count
    assert (empirical - cumulative).abs().max() < 2 / math.sqrt(count)
    flat = numbers.flatten(1)
    for lag in (1, 2, 3, 4, 16, 256):
        assert abs(float((flat[:, lag:] * flat[:, :-lag]).mean())) < 4 / math.sqrt(count - 512 * lag)
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 4 / math.sqrt(count)


def test_uniforms_and_integers_are_uniform() -> None:
    index = torch.arange(100_000)
    numbers = uniform(7, 0, index, Purpose.CROP)
    assert numbers.min() >= 0 and numbers.max() < 1
    drawn = integers(7, 0, index, Purpose.TIMESTEP, 50)
    for counts in (torch.bincount((numbers * 50).long()), torch.bincount(drawn)):
        assert len(counts) == 50
        chi_squared = float(((counts - 2000.0) ** 2 / 2000.0).sum())
        assert 20 < chi_squared < 95  # 49 degrees of freedom, p = 1e-4 on either side


def test_the_extreme_words_give_finite_normals(monkeypatch: pytest.MonkeyPatch) -> None:
    extreme = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    pairs = torch.cartesian_prod(torch.tensor(extreme), torch.tensor(extreme)).view(-1, 1, 2)
    words = (pairs[..., 0], pairs[..., 1], pairs[..., 0], pairs[..., 1])
    monkeypatch.setattr("sd_lightning.diffusion.randomness._words", lambda *_: words)
    numbers = normal(0, 0, torch.arange(len(pairs)), Purpose.NOISE, (4,))
    assert torch.isfinite(numbers).all()
    assert 6.65 < float(numbers.abs().max()) < 6.67


def test_numbers_are_pinned_because_a_resumed_run_must_draw_the_same() -> None:
    numbers = normal(42, 3, torch.tensor([5, 2**33]), Purpose.NOISE, (4, 9, 9))
    assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest() == PINNED_NORMALS


def test_float_steps_are_accurate_and_independent_of_length_and_alignment() -> None:
    numbers = torch.rand(10_007, generator=torch.Generator().manual_seed(0)) * 45
    roots = _square_root(numbers)
    ulps = np.spacing(roots.numpy()).astype(np.float64)
    error = np.abs(roots.double().numpy() - np.sqrt(numbers.double().numpy()))
    assert (error / ulps).max() <= 1
    assert 0 <= float(_square_root(torch.zeros(1))) < 1e-15
    words = torch.randint(0, 2**32, (10_007,), generator=torch.Generator().manual_seed(1))
    radii = _sqrt_minus_two_log(words.clone())
    expected = (-2 * ((words + 1).float().double() / 2**32).log()).sqrt()
    assert ((radii.double() - expected).abs() / expected).max() < 4e-7
    for begin, end in [(1, 8), (3, 1000), (5, 38)]:
        assert torch.equal(_square_root(numbers[begin:end]), roots[begin:end])
        assert torch.equal(_sqrt_minus_two_log(words[begin:end].clone()), radii[begin:end])


def test_tensors_and_arrays_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes with numpy arrays, other devices with tensors."""
    index = torch.tensor([0, 7, 2**32 + 5])

    def draw() -> list[torch.Tensor]:
        return [
            normal(SEED, index, index, Purpose.NOISE, (4, 33, 31)),
            uniform(SEED, 1, index, Purpose.CROP, (1001,)),
            integers(SEED, 1, index, Purpose.TIMESTEP, 1000, (1001,)),
        ]

    def tensor_words(
        seed: int, epoch: torch.Tensor | int, index: torch.Tensor, purpose: Purpose, shape: tuple
    ) -> tuple:
        epoch = epoch if isinstance(epoch, torch.Tensor) else torch.full_like(index, epoch)
        block = torch.arange(-(-math.prod(shape) // 4)).view(1, -1)
        counter = randomness._counter(block, index.view(-1, 1), epoch.view(-1, 1), purpose)
        return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))

    expected = draw()
    monkeypatch.setattr(randomness, "_words", tensor_words)
    for drawn, numbers in zip(draw(), expected, strict=True):
        assert torch.equal(drawn, numbers)


def test_drawing_leaves_the_global_generator_and_defaults_alone() -> None:
    expected = normal(SEED, 0, torch.arange(4), Purpose.NOISE, (5,))
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            drawn = normal(SEED, 0, torch.arange(4), Purpose.NOISE, (5,))
    finally:
        torch.set_default_dtype(torch.float32)
    assert drawn.dtype == torch.float32 and torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_empty_batch_gives_an_empty_tensor() -> None:
    assert normal(0, 0, torch.empty(0, dtype=torch.int64), Purpose.NOISE, (4, 3)).shape == (0, 4, 3)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=rf"seed={seed}; expected 0 <= seed < 2\*\*64"):
        uniform(seed, 0, torch.arange(2), Purpose.CROP)


@pytest.mark.parametrize("high", [0, 2**31 + 1])
def test_an_integer_range_that_cannot_be_drawn_is_refused(high: int) -> None:
    with pytest.raises(UsageError, match=rf"high={high}; expected 1 <= high <= 2\*\*31"):
        integers(0, 0, torch.arange(2), Purpose.TIMESTEP, high)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits_as_the_cpu_without_waiting() -> None:
    index = torch.arange(32)
    for shape in [(), (4, 33, 31)]:
        expected = normal(SEED, index, index, Purpose.NOISE, shape)
        on_gpu = index.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = normal(SEED, on_gpu, on_gpu, Purpose.NOISE, shape)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert drawn.is_cuda and torch.equal(drawn.cpu(), expected)
    expected = integers(SEED, 1, index, Purpose.TIMESTEP, 1000)
    assert torch.equal(integers(SEED, 1, index.cuda(), Purpose.TIMESTEP, 1000).cpu(), expected)


PINNED_NORMALS = "9d2594f74a07eb701726acce2ee9d7d73de0aeb81b13f4f6dbb423070855d939"
