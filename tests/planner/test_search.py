"""Devices, roofline and the search for the fastest plan that fits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from places import CONF
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.planner import plan
from sd_lightning.planner.devices import Device, device_of, load_device, tables
from sd_lightning.planner.footprint import Candidate, Footprint, Traffic, Workload, replicated
from sd_lightning.planner.forecast import DEVICE_ALLOWANCE, HOST_ALLOWANCE, Forecaster
from sd_lightning.planner.passes import training_pass
from sd_lightning.planner.roofline import Curve, Speeds, Work, step_time
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans, _count_that_fit
from sd_lightning.strategies import presets

TABLES = CONF / "devices"
NOTHING = Traffic()
RUN = TrainingRun(1, 32, optimizer=partial(torch.optim.AdamW, lr=1e-4))


@pytest.fixture(scope="module")
def tiny() -> LatentDiffusion:
    return LatentDiffusion.build("tiny", device="meta")


def gpu(megabytes: float, **changes: Any) -> Device:
    """Return a GPU with this much memory beyond the allowance."""
    memory = (DEVICE_ALLOWANCE + megabytes * 1e6) / 0.97 / 2**30
    return replace(load_device("t4"), memory_gib=memory, **changes)


def searched(model: LatentDiffusion, device: Device, count: int = 1, **options: Any) -> Plans:
    return plan(model, device, count, run=RUN, **{"candidates": presets.candidates(), **options})


@pytest.mark.parametrize("name", tables())
def test_every_table_is_complete_and_its_speeds_are_below_the_data_sheets(name: str) -> None:
    device = load_device(name)
    speeds = Speeds.of(device)
    assert speeds.source == "assumed"
    assert speeds.bandwidth.best < 1e9 * device.memory_gb_per_s
    for (kind, dtype), rate in speeds.flops.items():
        assert rate.best < 1e12 * device.peak_tflops[dtype], kind
    assert device.peak_tflops["float16"] >= device.peak_tflops["tf32"] >= device.peak_tflops["float32"]


def test_there_is_a_table_of_each_gpu_that_people_rent_or_own() -> None:
    assert set(tables()) == {
        *("rtx-3060", "rtx-3090", "rtx-4090", "rtx-5090", "t4", "v100", "a10g", "l4", "l40s"),
        *("a100-40gb", "a100-80gb", "h100", "h200", "mi300x"),
    }


GOOD = yaml.safe_load((TABLES / "t4.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1], "holds a list; expected the keys name, memory_gib"),
        ({**GOOD, "memory": 3}, "memory is no key of a device table; expected memory_gib"),
        ({k: v for k, v in GOOD.items() if k != "memory_gib"}, "memory_gib is missing; copy it from a table"),
        ({**GOOD, "memory_gib": 0}, "memory_gib=0; expected a number above 0"),
        ({**GOOD, "price_per_hour": -1}, "price_per_hour=-1; expected a number above 0"),
        ({**GOOD, "reached": {"fp16": 0.2}}, "reached={'fp16': 0.2}; expected parts of the peak for float32, tf32"),
        ({**GOOD, "reached": {"float16": 0}}, "reached.float16=0; expected a number above 0"),
        ({**GOOD, "peak_tflops": {"float32": 1}}, "peak_tflops={.*}; expected a number for each of float32, tf32"),
        ({**GOOD, "peak_tflops": 8}, "peak_tflops=8; expected a number for each of float32, tf32"),
    ],
)
def test_a_wrong_table_is_refused(values: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        device_of(values, "gpu=mine.yaml")


def test_strategies_to_compare_must_be_given(tiny: LatentDiffusion) -> None:
    with pytest.raises(UsageError, match=r"plan got no candidates; .*=candidates\(\)\), with candidates from sd"):
        plan(tiny, "t4")


def test_a_table_of_ones_own_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    more = {"peak_tflops": {**GOOD["peak_tflops"], "fp8": 900}, "reached": None}
    file.write_text(yaml.safe_dump({**GOOD, "name": "Mine", "memory_gib": 7, **more}))
    mine = load_device(str(file))
    assert mine.name == "Mine" and mine.reached == {} and Speeds.of(mine).flops["matmul", "tf32"].best > 0
    file.write_text("a: [")
    with pytest.raises(UsageError, match=r"gpu=.*mine.yaml: .* is not YAML: .*; mend the file"):
        load_device(str(file))
    with pytest.raises(
        UsageError, match=r"gpu=rtx-306: no such GPU; the nearest are rtx-3060, rtx-3090.*copy conf/dev"
    ):
        load_device("rtx-306")
    with pytest.raises(UsageError, match=r"gpu=unheard: no such GPU; the nearest are "):
        load_device("unheard")


def test_a_step_takes_longer_with_more_samples_slower_memory_and_slower_links(tiny: LatentDiffusion) -> None:
    trace = training_pass(tiny, RUN, torch.float32, torch.bfloat16)
    fast = Speeds.of(load_device("h100"))

    def time(speeds: Speeds = fast, batch: int = 32768, traffic: Traffic = NOTHING, **work: Any) -> float:
        return step_time(
            trace,
            batch,
            traffic,
            speeds,
            Work(**{"world_size": 2, "accumulate": 1, "encoding": 0.0, "averaged": 0, **work}),
        ).total

    assert time(batch=4 * 32768) == pytest.approx(4 * time(), rel=0.2)
    assert time(batch=1) >= len(trace.operations) / 2 * fast.launch, "small batches wait for the host"
    half = Curve.constant(fast.bandwidth.best / 2)
    assert time(replace(fast, bandwidth=half, functions=half)) > 1.5 * time()
    gathered = Traffic(gathered=int(time() * fast.link["all_gather"] * 20))
    link = int(fast.link["all_gather"])
    assert time(traffic=gathered) > 5 * time(), "what computation cannot hide is waited for"
    assert time(traffic=Traffic(gathered=1000)) == time(), "and what it can hide is not"
    assert time(traffic=Traffic(exposed=link)) == pytest.approx(time() + 0.5), "half of it comes from others"
    assert time(traffic=Traffic(exposed=link), world_size=1) == pytest.approx(time())
    host = time(traffic=Traffic(stepped_on_host=10**9)) - time()
    assert host == pytest.approx((1 + 12 / 28) * 1e9 / fast.host_updates, rel=0.01), "with clipping"
    hooks = 10**5
    waited = time(batch=1, traffic=Traffic(hooks=hooks)) - time(batch=1)
    assert waited == pytest.approx(5 * fast.launch * hooks, rel=0.01), "nothing hides Python in small steps"
    assert time(batch=2**17, traffic=Traffic(hooks=100)) == time(batch=2**17), "in large ones the GPU's work does"
    copied = Traffic(copied=10**9, collectives=1)
    assert time(traffic=copied, world_size=1) - time(world_size=1) == pytest.approx(2e9 / fast.bandwidth.best)
    assert time(accumulate=3) == pytest.approx(3 * time(), rel=0.01)
    assert time(encoding=1.0, accumulate=2) == pytest.approx(2 * time() + 2, rel=0.01)


def test_recomputation_costs_a_forward_pass(tiny: LatentDiffusion) -> None:
    speeds = Speeds.of(load_device("a100-80gb"))
    work = Work(world_size=1, accumulate=1, encoding=0.0, averaged=0)
    plain, again = (
        step_time(
            training_pass(tiny, replace(RUN, gradient_checkpointing=c), torch.bfloat16, None),
            4096,
            Traffic(),
            speeds,
            work,
        )
        for c in (False, True)
    )
    assert again.forward == pytest.approx(plain.forward, rel=0.01)
    assert 0.6 * plain.forward < again.backward - plain.backward < 1.1 * plain.forward


@pytest.mark.parametrize("fitting", [0, 1, 2, 3, 7, 8, 9, 50, 100])
def test_the_largest_batch_that_fits_is_found_by_bisection(fitting: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= fitting

    assert _count_that_fit(range(1, 101), fits) == fitting
    assert len(asked) <= 15


def test_the_best_plan_fits_and_one_sample_more_does_not(tiny: LatentDiffusion) -> None:
    found = searched(tiny, gpu(60))
    speeds = [each.images_per_second for each in found.best]
    told_apart = 1 - found.speeds.spread
    assert speeds and all(told_apart * after <= before for before, after in zip(speeds, speeds[1:])), (
        "the fastest first"
    )
    for each in found.best:
        assert each.fits and each.memory.device <= each.cluster.memory


def test_a_global_batch_is_kept_by_accumulation(tiny: LatentDiffusion) -> None:
    (one,) = searched(tiny, gpu(40), 2, batch_size=512, candidates=[_named("ddp")]).best
    assert one.global_batch == 512 == one.run.batch_size * one.run.accumulate * 2
    assert one.run.accumulate > 1
    assert f"trainer.accumulate_grad_batches={one.run.accumulate}" in one.options()
    assert {"strategy=ddp", "data.batch_size=512", "trainer.devices=2"} <= set(one.options())
    assert {"trainer.precision=bf16-mixed", "module.encoder_dtype=float32"} <= set(one.options()), "train's differ"
    (roomy,) = searched(tiny, gpu(4000), 2, batch_size=512, candidates=[_named("ddp")]).best
    assert roomy.run.accumulate == 1


def test_a_strategy_that_steps_in_the_backward_pass_gets_no_micro_batches(tiny: LatentDiffusion) -> None:
    for early in (False, True):
        engine = partial(presets.PRESETS["gemini"].build, step_in_backward=early)
        candidates = [Candidate("gemini", engine)]
        found = searched(tiny, gpu(40), batch_size=512, candidates=candidates, checkpointing=False)
        assert all(each.run.batch_size == 512 for each in (*found.considered, *found.too_large)) is early
    (roomy,) = searched(tiny, gpu(4000), batch_size=512, candidates=candidates).best
    assert roomy.run.accumulate == 1 and not found.best and found.too_large


def test_a_smaller_card_is_given_recomputation_or_offloading(tiny: LatentDiffusion) -> None:
    sizes = (4000, 15, 8)
    best = [searched(tiny, gpu(size), batch_size=16).best for size in sizes]
    assert not best[0][0].run.gradient_checkpointing
    assert best[1] and best[1][0].images_per_second < best[0][0].images_per_second
    peaks = [plans[0].memory.device for plans in best if plans]
    assert peaks == sorted(peaks, reverse=True)


def test_a_plan_that_recomputes_some_has_the_memory_and_time_of_a_trace(tiny: LatentDiffusion) -> None:
    found = [each for each in searched(tiny, gpu(14), batch_size=16).best if each.run.kept]
    assert len(found) >= 3 and all("speed.gradient_checkpointing=auto" in each.options() for each in found)
    for each in found:
        forecaster, footprint = Forecaster(tiny, each.run), each.footprint
        assert each.memory.device == pytest.approx(forecaster.forecast(footprint).device, rel=0.01)
        work = Work(1, each.run.accumulate, each.time.encoding / each.run.accumulate, 0)
        speeds = Speeds.of(each.cluster.device)
        traced = step_time(forecaster.trace(footprint), each.run.batch_size, footprint.traffic, speeds, work)
        assert each.time.backward == pytest.approx(traced.backward, rel=0.02)
    plain = searched(tiny, gpu(14), batch_size=16, checkpointing=False).best
    assert found[0].images_per_second > plain[0].images_per_second if plain else True


def test_as_little_as_fits_is_recomputed(tiny: LatentDiffusion) -> None:
    def times(choice: Any) -> list[float]:
        options = {"batch_size": 16, "candidates": [_named("single")], "checkpointing": choice}
        return [plans.best[0].time.total for size in (18, 16) if (plans := searched(tiny, gpu(size), **options))]

    some, whole = times("auto"), times(True)
    assert len(some) == 2 and some[0] <= some[1] and all(ours <= its for ours, its in zip(some, whole))


def test_what_does_not_fit_tells_what_is_missing(tiny: LatentDiffusion) -> None:
    found = searched(tiny, gpu(0.5))
    assert not found.best and found.too_large
    assert all(not each.fits and each.run.batch_size == 1 for each in found.too_large)
    host = searched(tiny, gpu(4000), host_memory=HOST_ALLOWANCE)
    assert not host.best and all(each.memory.host > each.cluster.host for each in host.too_large)


class Steps:
    """An engine for any optimizer."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse none."""


def test_ties_prefer_the_simpler_strategy(tiny: LatentDiffusion) -> None:
    def of(name: str, change: Callable[[Footprint], Footprint] = lambda found: found) -> Candidate:
        class Engine(Steps):
            def footprint(self, workload: Workload) -> Footprint:
                return change(replicated(workload))

        return Candidate(name, Engine)

    def slower(found: Footprint) -> Footprint:
        return replace(found, traffic=replace(found.traffic, stepped_on_host=10**9))

    candidates = [of("simple"), of("equal"), of("slow", slower)]
    names = [each.candidate.strategy for each in searched(tiny, gpu(4000), candidates=candidates).best]
    assert names == ["simple", "equal", "slow"]
    names = [each.candidate.strategy for each in searched(tiny, gpu(4000), candidates=candidates[::-1]).best]
    assert names == ["equal", "simple", "slow"]


def test_a_faster_strategy_must_be_so_by_more_than_measurements_differ(tiny: LatentDiffusion) -> None:
    def of(name: str, on_host: int) -> Candidate:
        class Engine(Steps):
            def footprint(self, workload: Workload) -> Footprint:
                found = replicated(workload)
                return replace(found, traffic=replace(found.traffic, stepped_on_host=on_host))

        return Candidate(name, Engine)

    device = gpu(4000)
    measured = replace(Speeds.of(device), source="calibrated on 2026-11-24")
    step = searched(tiny, device, batch_size=16, candidates=[of("alone", 0)]).best[0].time.total
    elements = int(0.1 * step * measured.host_updates / (1 + 12 / 28))  # a tenth slower
    candidates = [of("simple", elements), of("fast", 0)]

    def first(spread: float) -> str:
        speeds = replace(measured, spread=spread)
        found = searched(tiny, device, batch_size=16, candidates=candidates, speeds=speeds).best
        return found[0].candidate.strategy

    assert first(0.0) == first(0.05) == "fast" and first(0.2) == "simple"


@pytest.mark.parametrize("batch_size", [16, None])
def test_no_engine_beats_one_process_in_training_a_tiny_model(tiny: LatentDiffusion, batch_size: int | None) -> None:
    names = ("single", "gemini", "deepspeed_zero1_offload")
    options: dict[str, Any] = {"candidates": [_named(name) for name in names], "checkpointing": False}
    found = searched(tiny, load_device("rtx-3060"), batch_size=batch_size, **options).best
    assert [each.candidate.strategy for each in found][0] == "single"


def test_a_strategy_whose_package_is_missing_is_named(tiny: LatentDiffusion) -> None:
    def missing() -> Any:
        raise UsageError("strategy=other needs the package other; pip install other")

    found = searched(tiny, gpu(4000), candidates=[Candidate("other", missing), _named("single")])
    assert found.skip_reasons == ("strategy=other needs the package other; pip install other",)
    assert [each.candidate.strategy for each in found.best] == ["single"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 5, "count": 2}, r"data.batch_size=5 for 2 GPU\(s\); expected a multiple of 2"),
        ({"batch_size": 0}, "data.batch_size=0 for 1"),
        ({"count": 0}, "gpus=0; expected at least 1"),
        ({"host_memory": -1}, "host_gb=.*; expected gigabytes per GPU, above 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(tiny: LatentDiffusion, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"plan got {told}"):
        searched(tiny, gpu(4000), options.pop("count", 1), **options)


def _named(name: str) -> Candidate:
    return next(each for each in presets.candidates() if each.strategy == name)
