"""Calibration: what is measured is kept in a file, and plans are made with it."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composing import Compose
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.apps import plan as planning_app
from sd_lightning.planner import measuring, plan
from sd_lightning.planner.calibration import Calibration, device_name, file_of, hardware, hardware_here, load
from sd_lightning.planner.devices import DTYPES, Cluster, load_device
from sd_lightning.planner.footprint import Candidate, Traffic
from sd_lightning.planner.measuring import Effort, Stopwatch, calibrate, measured_links
from sd_lightning.planner.passes import training_pass
from sd_lightning.planner.roofline import COLLECTIVES, KINDS_OF_PRODUCTS, Curve, Speeds, Work, step_time
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Search
from sd_lightning.strategies.presets import candidates

LINKS = ("all-gather", "reduce-scatter", "all-reduce")
ASSUMED = "link, hooks, what threads hide assumed"
QUICK = Effort(least=1e-4, longest=1.0, sizes=2, stepped=2**20, links=False)


@pytest.fixture(scope="module")
def measured() -> Calibration:
    """This machine, measured in a moment."""
    return calibrate("2026-11-24", QUICK)


def test_all_figures_are_measured_and_kept_in_a_file(measured: Calibration, tmp_path: Path) -> None:
    measured.write(tmp_path / "devices" / "this.json")
    found = load(tmp_path / "devices" / "this.json")
    assert found.speeds == measured.speeds and found.device == measured.device
    assert found.torch_version == torch.__version__ and found.date == "2026-11-24"
    speeds = found.speeds
    assert {kind for kind, _ in speeds.flops} > set(KINDS_OF_PRODUCTS) and {dtype for _, dtype in speeds.flops} == set(
        DTYPES
    )
    assert len(speeds.bandwidth.sizes) == 2 == len(speeds.flops["matmul", "float32"].rates)
    rates = (speeds.update_bandwidth, speeds.to_device, speeds.to_host, *speeds.link.values(), speeds.host_updates)
    assert min(rates) > 1e6 and 1e-8 < speeds.launch < 1e-2
    assert speeds.provenance == f"calibrated on 2026-11-24 ({ASSUMED})" and not speeds.overlaps
    assert min(found.device.memory, found.device.host_memory) > 1e9 and found.device.name == device_name()


@pytest.mark.slow
def test_collectives_are_measured_between_two_processes() -> None:
    found = measured_links()
    assert found is not None
    rates, start = found
    assert tuple(rates) == COLLECTIVES and all(1e7 < rate < 1e12 for rate in rates.values())
    assert 1e-6 < start < 1e-1


def _one_fails(rank: int, *_: object) -> None:
    if rank == 1:
        raise OSError("no link")
    time.sleep(300)  # waits for the other


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_measure_links", _one_fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    began = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="(?s)Process 1 .*no link"):
        measured_links()
    assert time.monotonic() - began < 200


def test_a_collective_is_timed_among_others_after_the_first_which_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def run() -> None:
        calls.append(None)
        now[0] += 0.3 if len(calls) == 1 else 0.002

    def barrier() -> None:
        now[0] += 0.5  # the other rank is late

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measuring.dist, "barrier", barrier)
    assert measuring._seconds_of_collective(Stopwatch(torch.device("cpu"), Effort()), run, 10) == pytest.approx(0.002)
    assert len(calls) == 1 + 10 * measuring._ROUNDS_OF_COLLECTIVES


def test_a_stopwatch_returns_the_seconds_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def run() -> None:
        calls.append(None)
        now[0] += 0.004 if len(calls) > 1 else 0.1  # the first call chooses kernels

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    assert Stopwatch(torch.device("cpu"), Effort(least=0.02)).seconds(run) == pytest.approx(0.004)
    assert len(calls) == 1 + 1 + 3 * 5
    lasting = iter((0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.1, 0.0, 1.3))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(lasting))
    watch = Stopwatch(torch.device("cpu"), Effort(longest=2.0))
    assert watch.seconds(lambda: None) == pytest.approx(1.1) and watch.spread == pytest.approx(0.3 / 1.1)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    calls.clear()
    watch = Stopwatch(torch.device("cpu"), Effort(least=0.02, longest=0.05))
    assert watch.seconds(run) == pytest.approx(0.004), "what only the first call takes does not count"
    calls.clear()
    assert Stopwatch(torch.device("cpu"), Effort(longest=0.003)).seconds(run) == pytest.approx(0.004), (
        "too long to repeat"
    )
    assert len(calls) == 2


def test_launches_count_on_a_cpu_and_are_hidden_by_a_gpu() -> None:
    watches = (Stopwatch(torch.device(device), Effort()) for device in ("cpu", "cuda"))
    assert [watch.busy(8e-6, 6e-6) for watch in watches] == pytest.approx([2e-6, 8e-6])


@pytest.mark.parametrize("device", ["cuda", "cpu", "the host"])
def test_an_update_is_timed_fused_beyond_the_caches_and_without_its_launches(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped: list[Any] = []

    class Adam:
        def __init__(self, weights: list[torch.nn.Parameter], *, lr: float, fused: bool) -> None:
            assert fused
            self.numel = sum(weight.numel() for weight in weights)

        def step(self) -> None:
            stepped.append(self.numel)

    stepped: list[int] = []
    monkeypatch.setattr(torch.optim, "AdamW", Adam)
    monkeypatch.setattr(measuring.torch, "zeros", lambda numel, **_: torch.empty(numel, device="meta"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, _: clipped.append(weights))
    launch, per_element = 5e-3, 1e-9

    def seconds(watch: Stopwatch, run: Callable[[], object]) -> float:
        run()
        busy = per_element * stepped[-1]
        return max(launch, busy) if watch.device.type == "cuda" else launch + busy

    monkeypatch.setattr(Stopwatch, "seconds", seconds)
    if device == "the host":
        assert measuring.host_updates(Effort()) == pytest.approx(1 / per_element)
    else:
        moved = measuring.BYTES_PER_UPDATE + measuring.BYTES_PER_CLIP
        watch = Stopwatch(torch.device(device), Effort())
        assert measuring.update_bandwidth(watch) == pytest.approx(moved / per_element)
    assert stepped[0] >= 64 * 2**20 and bool(clipped) is (device != "the host")


def test_a_rate_is_interpolated_between_sizes() -> None:
    curve = Curve((1e3, 1e5, 1e7), (1e6, 1e8, 4e8))
    assert curve.at(np.array([1e3, 1e5, 1e7])) == pytest.approx([1e6, 1e8, 4e8])
    assert curve.at(np.array([0, 1e2, 1e9])) == pytest.approx([1e6, 1e6, 4e8])
    assert curve.at(np.array([1e4])) == pytest.approx([1e7])
    sizes = np.geomspace(1e2, 1e8, 50)
    assert (np.diff(curve.at(sizes)) >= 0).all() and (np.diff(sizes / curve.at(sizes)) >= -1e-12).all()


def test_predicted_seconds_follow_the_measured_ones() -> None:
    tiny = LatentDiffusion.build("tiny", device="meta")
    trace = training_pass(tiny, TrainingRun(1, 32), torch.bfloat16, None)
    table = Speeds.of(load_device("a100-80gb"))
    work = Work(world_size=2, accumulate=1, encoding=0.0, averaged=0)

    def time(speeds: Speeds, **traffic: int) -> Any:
        return step_time(trace, 4096, Traffic(**traffic), speeds, work)

    def changed(names: set[str], factor: float) -> Speeds:
        flops = {key: curve.divided(1 / factor) if key[0] in names else curve for key, curve in table.flops.items()}
        flops |= {
            (f"{kind}_backward", dtype): flops[kind, dtype].divided(1 / factor)
            for kind, dtype in table.flops
            if f"{kind}_backward" in names
        }
        return replace(table, flops=flops)

    plain = time(table)
    slower = time(changed({"convolution_backward"}, 0.01))
    assert slower.forward == pytest.approx(plain.forward) and slower.backward > 2 * plain.backward
    slower = time(changed({"convolution"}, 0.01))
    assert slower.forward > 2 * plain.forward and slower.backward > 2 * plain.backward
    of_a_cpu = replace(table, source="calibrated on 2026-11-24", overlaps=False)
    assert time(of_a_cpu.shared_by(4)).backward > 2 * time(of_a_cpu).backward
    assert time(replace(table, functions=table.functions.divided(100))).forward > plain.forward
    late = dict.fromkeys(("elementwise", "convolution"), 0.001)
    waits = time(replace(table, latency=late, overlaps=False)).forward
    assert waits > plain.forward + 1e-3 * sum(each.cost.kind == "convolution" for each in trace.operations)
    given_back = time(replace(table, fresh=1e9))
    assert given_back.total - plain.total == pytest.approx(
        float((trace.live(4096) + trace.ready() * trace.gradient_bytes).max()) / 1e9
    )
    slow_data = step_time(trace, 4096, Traffic(), table, replace(work, accumulate=3, loading=plain.total))
    assert slow_data.total == pytest.approx(3 * plain.total)
    slow_data = step_time(trace, 4096, Traffic(), table, replace(work, loading=10 * plain.total))
    assert slow_data.total == pytest.approx(10 * plain.total) and slow_data.forward == plain.forward
    on_cpu = replace(table, overlaps=False, collective=1e-3)
    alone = time(on_cpu).waiting
    assert time(on_cpu, collectives=7).waiting - alone == pytest.approx(7e-3)
    assert time(on_cpu, collectives=8, threaded=True).waiting - alone == pytest.approx(4e-3), "half is hidden"
    assert time(on_cpu, hooks=50).waiting - alone == pytest.approx(5e-3) and time(table, hooks=50) == plain
    assert time(table, copied=10**9).backward == pytest.approx(plain.backward + 2e9 / table.bandwidth.best)
    shown = replace(table, overlaps=False)
    assert time(table, gathered=10**6).waiting == 0
    waited = time(shown, gathered=10**6).waiting - time(shown).waiting
    assert waited == pytest.approx(0.5 * 10**6 / table.link["all_gather"])


def test_plans_are_made_with_a_calibration(measured: Calibration, tmp_path: Path) -> None:
    slow = replace(measured, device=load_device("t4"), speeds=measured.speeds.shared_by(10))
    tiny = LatentDiffusion.build("tiny", device="meta")
    found = []
    for name, each in (("here", replace(measured, device=slow.device)), ("slow", slow)):
        each.write(tmp_path / f"{name}.json")
        found.append(plan(tiny, str(tmp_path / f"{name}.json"), candidates=candidates(), batch_size=64))
    fast, slower = (each.best[0].images_per_second for each in found)
    assert fast > 2 * slower and found[0].speeds == measured.speeds


def test_processes_share_the_cores_that_were_measured_for_updates_in_host_memory(tmp_path: Path) -> None:
    table = load_device("a100-80gb")
    assumed = Speeds.of(table)
    measured = replace(assumed, source="calibrated on 2026-11-24")
    assert measured.shared_by(8) == replace(measured, host_updates=measured.host_updates / 8)
    assert assumed.shared_by(8) == assumed, "a table has the figures of each GPU"
    file = tmp_path / "node.json"
    Calibration(table, measured, "2026-11-24", torch.__version__).write(file)
    tiny = LatentDiffusion.build("tiny", device="meta")
    seconds = {}
    options: Any = {"batch_size": 64, "candidates": [_named("fsdp_offload")], "checkpointing": False}
    for name, speeds in (("measured", hardware(str(file))[1]), ("assumed", None)):
        search = Search(tiny, TrainingRun(1, 32), Cluster(table, 8), speeds=speeds, **options)
        seconds[name] = search.plans().best[0].time.update
        (again,) = search.within(search.cluster.memory).plans().best
        assert again.time.update == seconds[name], "shared once"
    assert seconds["measured"] == pytest.approx(8 * seconds["assumed"])


def test_an_average_in_host_memory_takes_time_there() -> None:
    tiny = LatentDiffusion.build("tiny", device="meta")
    speeds = Speeds.of(load_device("a100-80gb"))

    def update(name: str, **options: bool) -> float:
        run = TrainingRun(8, 32, encodes=False, **options)  # type: ignore[arg-type]
        found = plan(tiny, "a100-80gb", run=run, batch_size=8, candidates=[_named(name)], checkpointing=False)
        return found.best[0].time.update

    numel = sum(parameter.numel() for parameter in tiny.denoiser.parameters())
    on_host = numel * 12 / (28 * speeds.host_updates)
    for name in ("deepspeed_zero2_offload", "gemini_offload", "fsdp_offload"):
        assert update(name, averages=True) - update(name) == pytest.approx(on_host, rel=0.05)
    fetching = numel * 4 / speeds.to_host
    moved = update("single", averages=True, offload_averages=True) - update("single")
    assert moved == pytest.approx(on_host + fetching, rel=0.01)
    on_device = update("single", averages=True) - update("single")
    assert on_device == pytest.approx(numel * 12 / speeds.update_bandwidth)


def _named(name: str) -> Candidate:
    return next(each for each in candidates() if each.strategy == name)


def test_the_program_measures_and_plans_for_this_machine_use_it(
    compose: Compose,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    measured: Calibration,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "calibrate", lambda *_: measured)
    assert planning_app.run(compose("plan", "action=calibrate")) == 0
    text = capsys.readouterr().out
    assert file_of(device_name()).is_file() and f"written to {file_of(device_name())}" in text
    assert "convolution, backward, bfloat16" in text and "float16  " not in text.replace("bfloat16", "")
    links = [line.split() for line in text.splitlines() if "between devices" in line]
    assert links == [[name, "between", "devices", "not", "measured", "GB/s"] for name in LINKS]

    planning_app.run(compose("plan", "model=tiny", "optimizer.fused=false", "data.batch_size=8"))
    text = capsys.readouterr().out
    assert (
        f"on 1 x {device_name()}" in text
        and f"seconds are calibrated on 2026-11-24 ({ASSUMED})" in text
        and "CUDA" not in text
    )


def test_the_file_of_another_device_is_refused(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no table for this machine's .*; run python -m sd_lightning.plan calibrate"):
        hardware_here()
    replace(measured, torch_version="1.0").write(file_of(device_name()))
    assert hardware_here() == (measured.device, measured.speeds)
    assert "calibrated with torch 1.0, and this is torch" in caplog.text
    replace(measured, device=load_device("t4")).write(file_of(device_name()))
    with pytest.raises(UsageError, match="is the calibration of Tesla T4, and this machine has .*; delete it, or run"):
        hardware_here()


def _without(*keys: str) -> Callable[[Any], None]:
    def change(written: Any) -> None:
        *path, last = keys
        for key in path:
            written = written[key]
        del written[last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda written: written.update(format=1),
            "has format 1, and .* reads format 5; run .* calibrate .* again$",
        ),
        (_without("speeds", "functions"), "is no calibration: KeyError: 'functions'; run"),
        (_without("speeds", "launch"), "is no calibration: KeyError: 'launch'; run"),
        (
            _without("speeds", "flops", "attention/bfloat16"),
            "is no calibration: ValueError: no flops of attention/bfloat16",
        ),
        (lambda written: written["speeds"]["bandwidth"]["rates"].append(1.0), "as many sizes as rates"),
        (lambda written: written["device"].update(memory_gib=-1), "memory_gib=-1; expected a number above 0"),
    ],
)
def test_broken_files_are_refused(
    measured: Calibration, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    measured.write(file)
    written = json.loads(file.read_text())
    change(written)
    file.write_text(json.dumps(written))
    with pytest.raises(UsageError, match=message):
        load(file)


def test_files_that_are_no_json_or_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file; run python -m sd_lightning.plan calibrate on that"):
        load(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": 1')
    with pytest.raises(UsageError, match="is no calibration: JSONDecodeError"):
        load(tmp_path / "torn.json")


def test_calibrate_refuses_settings_of_plans(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        (["gpu=t4"], "plan calibrate got gpu; it measures this machine, whatever is trained; leave it out"),
        (["output=here.html"], "plan calibrate got output=here.html; expected a file that ends with .json"),
    ):
        with pytest.raises(UsageError, match=message):
            planning_app.run(compose("plan", "action=calibrate", *options))


@pytest.mark.gpu
def test_cuda_this_gpu_is_measured() -> None:
    found = calibrate("2026-11-24")
    assert found.device.name == torch.cuda.get_device_name() and found.speeds.overlaps
    assert found.speeds.flops["matmul", "bfloat16"].best > found.speeds.flops["matmul", "float32"].best
    assert found.speeds.to_device < found.speeds.bandwidth.best
