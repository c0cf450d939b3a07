"""Encoders on GPUs beside the trainers: their time, memory and traffic, how many it takes, and the bill."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families.base import flat_conditioning
from sd_lightning.planner.devices import Device, load_device
from sd_lightning.planner.encoders import EncodingBill, EncodingWork, check_encoders, encoding_bills
from sd_lightning.planner.roofline import Curve, Speeds
from sd_lightning.planner.run import TrainingRun

RUN = TrainingRun(1, 32, encoder_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tiny() -> LatentDiffusion:
    return LatentDiffusion.build("tiny")


def hardware(name: str) -> tuple[Device, Speeds]:
    return load_device(name), Speeds.of(load_device(name))


def billed(work: EncodingWork, *names: str, trained: float = 1000.0, count: int = 8) -> list[EncodingBill]:
    encoders = [hardware(name) for name in names]
    return encoding_bills(work, encoders, num_trainers=count, images_per_second=trained, on_the_fly=0.8 * trained)


class HundredPerSecond(EncodingWork):
    """Encoders that are equally fast on every GPU."""

    def seconds(self, speeds: Speeds) -> float:
        return 0.01


def test_a_bill_by_hand(tiny: LatentDiffusion) -> None:
    """Trainers: $ 2 an hour each. An A10G costs $ 1.006, and 1,000 images per second take 1.1 x 10 of them."""
    own, beside, stored = billed(HundredPerSecond(tiny, RUN, 4), "a10g")
    assert own.trainer_hours == pytest.approx(8 * 1e6 / 800 / 3600)  # 2.78
    assert own.dollars(2.0, 1) == own.dollars(2.0, 30) == pytest.approx(2 * 2.7778, rel=1e-4)
    assert (beside.num_encoders, beside.encoder_images_per_second) == (11, 100)
    assert beside.trainer_hours == pytest.approx(8 * 1e6 / 1000 / 3600)  # 2.22
    assert beside.encoder_hours == pytest.approx(11 * 1e6 / 1000 / 3600)  # 3.06
    assert beside.dollars(2.0, 1) == beside.dollars(2.0, 3) == pytest.approx(4.4444 + 3.0556 * 1.006, rel=1e-4)
    assert stored.num_encoders is None and stored.encoder_hours == pytest.approx(1e6 / 100 / 3600)  # 2.78
    assert stored.dollars(2.0, 1) == pytest.approx(4.4444 + 2.7778 * 1.006, rel=1e-4)
    assert stored.dollars(2.0, 3) == pytest.approx(4.4444 + 2.7778 * 1.006 / 3, rel=1e-4)


def test_a_gpu_without_a_price_has_no_bill(tiny: LatentDiffusion) -> None:
    own, beside, stored = billed(HundredPerSecond(tiny, RUN, 4), "rtx-4090")
    assert beside.dollars(2.0, 1) is None and stored.dollars(2.0, 1) is None and own.dollars(2.0, 1) is not None
    assert all(each.dollars(None, 1) is None for each in (own, *billed(HundredPerSecond(tiny, RUN, 4), "l4")))
    assert beside.encoder_hours > 0, "its hours are known"


def test_a_reader_that_is_slower_than_the_gpu_bounds_each_encoder(tiny: LatentDiffusion) -> None:
    for loaded, count in ((None, 11), (1e6, 11), (25.0, 44)):
        _, beside, stored = billed(HundredPerSecond(tiny, replace(RUN, loaded_per_second=loaded), 4), "l4")
        assert beside.num_encoders == count and stored.encoder_hours == pytest.approx(
            1e6 / min(loaded or 100, 100) / 3600
        )


def test_arithmetic_alone_takes_the_operations_that_torch_counts(tiny: LatentDiffusion) -> None:
    endless = Curve.constant(1e30)
    speeds = Speeds.of(load_device("a10g"))
    speeds = replace(speeds, bandwidth=endless, functions=endless, launch=0.0)
    shapes = LatentDiffusion.build("tiny", device="meta")  # torch counts no attention of a CPU
    ids = {name: each.to("meta") for name, each in tiny.tokenize(["a digit"] * 3).items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shapes.vae.encode(torch.zeros(3, 3, 32, 32, device="meta"))  # type: ignore[operator]
        shapes.family.embed(shapes.text_encoders, ids)
    rate = speeds.product_rate("convolution", "bfloat16").best
    assert EncodingWork(tiny, RUN, 3).seconds(speeds) == pytest.approx(counter.get_total_flops() / 3 / rate, rel=1e-6)
    only_images = replace(RUN, train_text_encoder=True)
    assert EncodingWork(tiny, only_images, 3).seconds(speeds) < EncodingWork(tiny, RUN, 3).seconds(speeds)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_what_is_sent_is_what_the_encoder_makes(tiny: LatentDiffusion, dtype: Any, size: int) -> None:
    encoder = LatentEncoder(LatentDiffusion.build("tiny"), dtype=dtype).to(torch.device("cpu"))
    moments = encoder.encode_moments(torch.zeros(1, 3, 32, 32))
    embeddings = flat_conditioning(encoder.embed(tiny.tokenize(["seven"])))
    run = replace(RUN, encoder_dtype=getattr(torch, dtype))
    assert EncodingWork(tiny, run, 4).sent_bytes == size * (
        moments.numel() + sum(each.numel() for each in embeddings.values())
    )
    trained = EncodingWork(tiny, replace(run, train_text_encoder=True), 4)
    assert trained.sent_bytes == size * moments.numel(), "the trainer has the text encoder"


def test_more_work_takes_more_encoders_and_a_faster_gpu_fewer(tiny: LatentDiffusion) -> None:
    def count(name: str, *, resolution: int = 64, trained: float = 1e7) -> int:
        _, beside, _ = billed(EncodingWork.alone(tiny, replace(RUN, resolution=resolution)), name, trained=trained)
        return beside.num_encoders or 0

    assert count("a10g", resolution=128) > count("a10g") > count("h100") > 1
    assert count("a10g", trained=2e7) > count("a10g")
    small, large = (EncodingWork.alone(tiny, replace(RUN, resolution=side)) for side in (64, 128))
    assert large.sent_bytes > small.sent_bytes


def test_encoders_that_do_not_fit_are_named(tiny: LatentDiffusion) -> None:
    work = EncodingWork.alone(tiny, replace(RUN, resolution=512))
    assert work.num_images == 4 and work.memory > EncodingWork(tiny, work.run, 1).memory
    device, speeds = hardware("t4")
    fitting = replace(device, memory_gib=(work.memory + 2**20) / 0.97 / 2**30)
    check_encoders(work, [(fitting, speeds)])
    small = replace(device, name="Small", memory_gib=(work.memory - 2**20) / 0.97 / 2**30)
    expected = (
        r"plan got encoders on Small, of whose memory \d\.\d GB can be used; encoding 4 image\(s\) of 512 pixels at a "
        r"time takes \d\.\d GB; leave it out, or write module.encoder_dtype=bfloat16"
    )
    with pytest.raises(UsageError, match=expected):
        check_encoders(work, [(fitting, speeds), (small, speeds)])
