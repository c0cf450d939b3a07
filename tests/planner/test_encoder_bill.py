"""Encoders on GPUs beside the trainers: their time and memory, how many it takes, and the bill."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.planner.alternatives import remedies
from sd_lightning.planner.devices import Cluster, Device, load_device
from sd_lightning.planner.encoders import EncodingBill, check_encoders, encoding_bills
from sd_lightning.planner.forecast import DEVICE_ALLOWANCE, Forecaster
from sd_lightning.planner.passes import encoding_peak, encoding_traces
from sd_lightning.planner.roofline import Curve, Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Search
from sd_lightning.strategies.presets import candidates

RUN = TrainingRun(1, 32, encoder_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tiny() -> LatentDiffusion:
    return LatentDiffusion.build("tiny")


def hardware(name: str) -> tuple[Device, Speeds]:
    return load_device(name), Speeds.of(load_device(name))


def search_of(model: LatentDiffusion, run: TrainingRun = RUN) -> Search:
    """Eight T4 that train with DDP, and encode nothing."""
    ddp = [each for each in candidates() if each.name == "ddp"]
    return Search(model, replace(run, encodes=False), Cluster(load_device("t4"), 8), ddp, batch_size=256)


def billed(search: Search, *names: str, price: float | None = 2.0, loader: float | None = None) -> list[EncodingBill]:
    (trained,) = search.plans().best
    return encoding_bills(search, trained, [hardware(name) for name in names], price=price, loader=loader)


def test_a_bill_by_hand(tiny: LatentDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders with a tenth of the trainers' speed, on A10G for $ 1.006 an hour, beside eight trainers for $ 2 each."""
    search = search_of(tiny)
    (trained,) = search.plans().best
    rate = trained.images_per_second
    monkeypatch.setattr(Search, "seconds_to_encode", lambda *_: 9.5 / rate)
    own, beside = billed(search, "a10g")
    assert own.images_per_second < beside.images_per_second == rate, "trainers that encode are slower"
    assert (own.num_encoders, own.encoder_dollars) == (0, 0.0)
    assert own.dollars == own.trainer_dollars == pytest.approx(8 * 2 * 1e6 / own.images_per_second / 3600)
    assert (beside.num_encoders, beside.encoder_images_per_second) == (10, pytest.approx(rate / 9.5))
    assert beside.trainer_dollars == pytest.approx(8 * 2 * 1e6 / rate / 3600)
    assert beside.encoder_dollars == pytest.approx(10 * 1.006 * 1e6 / rate / 3600)
    assert beside.dollars == pytest.approx((16 + 10.06) * 1e6 / rate / 3600)

    own, beside = billed(search, "a10g", loader=rate / 40)
    assert own.images_per_second == pytest.approx(8 * rate / 40), "each trainer waits for its reader"
    assert beside.num_encoders == 40 and beside.images_per_second == rate, "and so does each encoder"


def test_a_gpu_without_a_price_has_no_bill(tiny: LatentDiffusion) -> None:
    own, beside = billed(search_of(tiny), "rtx-4090")
    assert beside.encoder_dollars is None and beside.dollars is None and beside.num_encoders > 0
    assert own.dollars is not None and beside.trainer_dollars is not None
    own, beside = billed(search_of(tiny), "l4", price=None)
    assert own.dollars is None and beside.dollars is None and beside.encoder_dollars is not None


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
    seconds = search_of(tiny).seconds_to_encode(speeds, 3)
    assert seconds == pytest.approx(counter.get_total_flops() / 3 / rate, rel=1e-6)
    assert search_of(tiny, replace(RUN, train_text_encoder=True)).seconds_to_encode(speeds, 3) < seconds


def test_more_work_takes_more_encoders_and_a_faster_gpu_fewer(tiny: LatentDiffusion) -> None:
    def seconds(name: str, resolution: int = 64) -> float:
        return search_of(tiny, replace(RUN, resolution=resolution)).seconds_to_encode(hardware(name)[1], 256)

    assert seconds("a10g", 128) > seconds("a10g") > seconds("h100")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_encoders_are_counted_in_the_types_that_they_have(tiny: LatentDiffusion, dtype: Any) -> None:
    """A VAE that overflows in float16, as the tiny one and SDXL's may, stays in float32."""
    run = replace(RUN, resolution=512, encoder_dtype=getattr(torch, dtype))
    encoder = LatentEncoder(LatentDiffusion.build("tiny"), dtype=dtype).to(torch.device("cpu"))
    weights = sum(parameter.nbytes for network in encoder.networks for parameter in network.parameters())
    activations = encoding_peak(tiny, run, 4)
    assert Forecaster(tiny, run).encoder_memory == DEVICE_ALLOWANCE + weights + activations
    float32 = encoding_peak(tiny, replace(run, encoder_dtype=torch.float32), 4)
    assert activations == (float32 / 2 if dtype == "bfloat16" else float32)


@pytest.mark.parametrize("name", ["tiny", "tiny_inpainting", "tiny_depth"])
def test_all_that_is_made_of_images_takes_time_and_memory(name: str) -> None:
    """Masked images pass through the VAE, too, and a depth estimator sees the images; a CPU's attention counts none."""
    model = LatentDiffusion.build(name)
    numbers = torch.arange(4)
    batch: Any = {"pixel_values": torch.zeros(4, 3, 32, 32), "epoch": numbers, "index": numbers}
    with FlopCounterMode(display=False) as counter:
        LatentEncoder(model).encode(batch, seed=0)
    run = TrainingRun(1, 32)
    assert encoding_traces(model, run, 4)[0].flops.at(0).sum() == pytest.approx(counter.get_total_flops(), rel=0.1)
    plain = encoding_peak(LatentDiffusion.build("tiny", device="meta"), run, 4)
    assert encoding_peak(model, run, 4) > plain or name == "tiny"


@pytest.mark.parametrize(("name", "remedy"), [("tiny", "text"), ("tiny_inpainting", "module.offload_encoders=true")])
def test_stored_latents_are_no_remedy_where_denoisers_take_more_of_images(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = [each for each in candidates() if each.name == "single"]
    cluster = Cluster(load_device("t4"))
    search = Search(LatentDiffusion.build(name, device="meta"), RUN, cluster, single, micro_batches=[1])
    plans = search.plans()
    monkeypatch.setattr(Search, "smallest_that_fits", lambda _: plans.best[0])
    assert next(option for option in remedies(search, plans) if "encoders=" in option).endswith(remedy)


def test_encoders_that_do_not_fit_are_named(tiny: LatentDiffusion) -> None:
    run = replace(RUN, resolution=512)
    memory = Forecaster(tiny, run).encoder_memory
    device, speeds = hardware("t4")
    fitting = replace(device, memory_gib=(memory + 2**20) / 0.97 / 2**30)
    check_encoders(tiny, run, [(fitting, speeds)])
    small = replace(device, name="Small", memory_gib=(memory - 2**20) / 0.97 / 2**30)
    expected = (
        r"plan got encoders on Small, of whose memory \d\.\d GB can be used; encoding 4 image\(s\) of 512 pixels at a "
        r"time takes \d\.\d GB; take a larger one"
    )
    with pytest.raises(UsageError, match=expected):
        check_encoders(tiny, run, [(fitting, speeds), (small, speeds)])
