"""The planning program: what it prints and writes, and what it refuses."""

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composing import Compose
from sd_lightning import LatentDiffusion, UsageError, _conf
from sd_lightning import plan as program
from sd_lightning.apps import plan, planning, preflight
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.segments import Reserved

TINY = ("model=tiny", "gpu=t4", "optimizer.fused=false")


def planned(compose: Compose, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return exit code and output."""
    options = options if any(each.startswith("output=") for each in options) else (*options, "output=null")
    code = plan.run(compose("plan", *TINY, *options))
    return code, capsys.readouterr().out


def test_a_plan_is_a_table_a_command_and_a_file(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    options = ("gpus=2", "images=1e6", "price=0.5", "data.batch_size=64", f"output={file}")
    code, text = planned(compose, capsys, *options)
    lines = text.splitlines()
    assert code == 0
    assert lines[0].startswith("tiny at 32 x 32, all weights, bf16-mixed, AdamW, on 2 x Tesla T4 (15 GiB")
    header = lines[2].split()
    assert header[0] == "strategy" and header[-3:] == ["$/million", "days", "dollars"]
    written = json.loads(file.read_text(encoding="utf-8"))
    best = written["plans"][0]
    command = next(line for line in lines if line.startswith("fastest: ")).removeprefix("fastest: ")
    assert command == written["command"] and command.endswith(" ".join(best["options"]))
    assert "data.batch_size=64" in best["options"]
    assert best["global_batch"] == 64 and best["fits"] and written["speeds"] == "assumed, from the data sheet"
    speed, price = best["images_per_second"], 0.5
    assert best["dollars_per_million"] == pytest.approx(1e6 / speed / 3600 * price * 2)
    assert best["device_peak"] == max(sum(phase.values()) for phase in best["device_bytes"].values())
    assert best["seconds"]["step"] == pytest.approx(64 / speed)
    days, dollars = (float(cell.replace(",", "")) for cell in lines[3].split()[-2:])
    assert days == pytest.approx(1e6 / speed / 86400, abs=0.051) and dollars == pytest.approx(
        best["dollars_per_million"], abs=0.51
    )
    assert "seconds are assumed, from the data sheet" in text


def test_one_strategy_and_its_settings_can_be_asked_for(
    compose: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    options = ("strategy=gemini", "strategy.offload_optim_frac=0.5", f"output={file}")
    monkeypatch.setattr("sys.argv", ["plan", *TINY, *options])
    code, text = planned(compose, capsys, *options)
    assert code == 0 and "strategy=gemini strategy.offload_optim_frac=0.5 data.batch_size=" in text
    assert "ddp" not in text and "zero" not in text
    (only,) = json.loads(file.read_text(encoding="utf-8"))["plans"]
    states = [
        side["optimizer states"] for side in (only["device_bytes"]["a training step"], only["host_bytes"]["training"])
    ]
    assert 0.8 < states[0] / states[1] < 1.2, "half of them"


ONE = "strategy=single"
COMMANDS = [
    [ONE],
    [ONE, "trainable=lora", "lora.rank=8", "lora.target_modules=[to_k,to_q]"],
    ["strategy=fsdp", "gpus=2", "data.batch_size=64", "module.train_text_encoder=true", "ema=false", "seed=7"],
    ["strategy=gemini", "strategy.offload_optim_frac=0.5", "trainer.precision=32-true", "encoders=text"],
    [ONE, "data.resolution=64", "speed.gradient_checkpointing=auto", "speed.allow_tf32=false", "optimizer.lr=1e-4"],
    [ONE, "encoders=[l4]", "data.batch_size=64"],
    [ONE, "optimizer=sgd", "module.encoder_dtype=float32", "module.offload_encoders=true", "trainable=full"],
    [ONE, "speed.gradient_checkpointing=true", "optimizer.betas=[0.8, 0.95]"],
]


@pytest.mark.parametrize("options", [*COMMANDS, pytest.param([], marks=pytest.mark.slow)], ids=" ".join)
def test_the_printed_command_trains_what_was_planned(
    options: list[str], compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It passes all checks of `train`, which would make the same plan for it."""
    file = tmp_path / "plan.json"
    given = [each for each in TINY if "optimizer=sgd" not in options or "fused" not in each]
    cfg = compose("plan", *given, *options, f"output={file}")
    assert plan.run(cfg) == 0
    planned = RunSpec.of(cfg)
    wanted = plan.run_of(planned, planned.model.describe())
    written = json.loads(file.read_text(encoding="utf-8"))
    _, _, program, *words = shlex.split(written["command"])
    best = written["plans"][0]
    train = compose("train", *words, "logger=csv")
    assert program == "sd_lightning.train"
    spec = preflight.preflight(RunSpec.of(train))
    ours = planning.run_of(spec, spec.model.describe(), spec.num_processes)
    assert (ours.batch_size, ours.accumulate, ours.world_size) == (best["micro_batch"], best["accumulate"], cfg.gpus)
    same = ("resolution", "precision", "train_text_encoder", "lora", "encoder_dtype", "averages")
    for name in (*same, "cache_latents"):
        assert getattr(ours, name) == getattr(wanted, name), name
    assert ours.offload_encoders == (wanted.offload_encoders or "data.encoders=ray" in words)
    assert train.optimizer == cfg.optimizer and train.model == cfg.model and train.seed == cfg.seed
    assert train.speed.allow_tf32 == cfg.speed.allow_tf32
    assert train.speed.gradient_checkpointing == best["gradient_checkpointing"]
    assert cfg.get("strategy") is None or train.strategy == cfg.strategy


def test_the_command_names_where_pictures_come_from_that_are_no_digits(compose: Compose) -> None:
    options = ("strategy=single", "data.batch_size=4", "trainer.precision=bf16-mixed")
    cfg = compose("plan", "model=sd15", "gpu=rtx-3060", "trainable=lora", "encoders=text")
    command = plan.train_command(RunSpec.of(cfg), replace(TrainingRun(1, 512), cache_latents=True), options)
    assert command.startswith("python -m sd_lightning.train model=sd15 trainable=lora data=images data.train_data_dir=")
    assert "data.cache_latents=true" in command and "data.center_crop=true" in command
    cfg = compose("plan", "model=sd15", "gpu=rtx-3060", "encoders=none")
    assert "data=latents data.store=store" in plan.train_command(
        RunSpec.of(cfg), TrainingRun(1, 512, averages=True), options
    )


def test_settings_change_the_plan(compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def best(*options: str) -> dict[str, Any]:
        file = tmp_path / "plan.json"
        planned(compose, capsys, "strategy=single", "data.batch_size=8", f"output={file}", *options)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["plans"][0]
        return found

    base = best()
    parts = base["device_bytes"]["a training step"]
    assert parts["EMA"] and parts["encoders"]
    assert "EMA" not in best("ema=false")["device_bytes"]["a training step"]
    none = best("encoders=none")
    assert "encoding" not in none["device_bytes"] and none["seconds"]["encoding"] == 0
    assert 0 < best("encoders=text")["seconds"]["encoding"] < base["seconds"]["encoding"]
    assert best("speed.gradient_checkpointing=true")["gradient_checkpointing"] is True
    assert best("speed.gradient_checkpointing=auto")["gradient_checkpointing"] is False, "everything fits"
    large = best("data.resolution=64")
    assert large["device_bytes"]["a training step"]["activations"] > 2 * parts["activations"]
    lora = best("trainable=lora")
    assert lora["device_bytes"]["the optimizer's step"]["optimizer states"] < 0.2 * parts["optimizer states"]
    text = best("module.train_text_encoder=true")
    assert text["device_bytes"]["the optimizer's step"]["weights"] > parts["weights"]
    pure = best("trainer.precision=bf16-true")
    assert pure["device_bytes"]["the optimizer's step"]["weights"] == parts["weights"] // 2


def test_a_pipeline_folder_is_planned_by_its_own_sizes(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    LatentDiffusion.build("tiny").save_pretrained(tmp_path / "model")
    code, text = planned(compose, capsys, f"model.pretrained={tmp_path / 'model'}", "strategy=single")
    assert code == 0 and text.startswith(f"{tmp_path / 'model'} at 32 x 32")


def test_what_does_not_fit_is_told_with_what_would(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    card = tmp_path / "small.yaml"
    table = Path(_conf.config_dir(), "devices", "t4.yaml").read_text(encoding="utf-8")
    card.write_text(table.replace("\nmemory_gib: 15", "\nmemory_gib: 0.57", 1))
    code, text = planned(compose, capsys, f"gpu={card}")
    assert code == 1 and "nothing fits" in text and "GB of GPU memory more" in text
    assert "it fits with one of these:" in text and "  gpu=rtx-3060  strategy=single" in text
    code, text = planned(compose, capsys, "host_gb=0.5")
    assert code == 1 and "GB of host memory more" in text and "  host_gb=3 " in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["gpu=rtx-306"], "gpu=rtx-306: no such GPU; the nearest are rtx-3060"),
        (["price=-1"], "plan got price=-1; expected a number above 0; write price=2.5"),
        (["images=0"], "plan got images=0; expected a number above 0; write images=1e6"),
        (["loader=0"], "plan got loader=0; expected a number above 0; write loader=200"),
        (["host_gb=-2"], "plan got host_gb=-2; expected a number above 0"),
        (["data.resolution=101"], "plan got data.resolution=101; expected a multiple of 8 pixels, e.g. 512"),
        (["output=plan.txt"], "plan got output=plan.txt; expected a file that ends with .html or .json"),
        (
            ["encoders=[]"],
            r"plan got encoders=\[\]; expected GPUs beside the trainers, e.g. 'encoders=\[a10g,l4\]'; or all",
        ),
        (["encoders=[t4,a10]"], "encoders=a10: no such GPU; the nearest are a10g.* and write encoders=<that file>"),
        (["encoders=[no.json]"], "encoders=no.json: there is no such file; .*, or write encoders=<name of a table>"),
        (["gpus=0"], "plan got gpus=0; expected at least 1"),
        (["data.batch_size=3", "gpus=2"], r"plan got data.batch_size=3 for 2 GPU\(s\); expected a multiple of 2"),
        (
            ["strategy=single", "gpus=2"],
            "plan got strategy=single and gpus=2; at most 1 is expected; write strategy=ddp",
        ),
        (
            ["strategy=gemini_auto"],
            "nothing can be predicted: gemini_auto chooses what it offloads by measuring a step",
        ),
        (
            ["strategy=gemini_offload", "strategy.step_in_backward=true"],
            "step_in_backward=true and trainer.gradient_clip_val=1.0; .*write trainer.gradient_clip_val=null",
        ),
        (
            ["strategy=gemini_offload", "strategy.master=split", "trainer.precision=32-true"],
            "master=split for .* computed with in float32; .*set precision=bf16-mixed",
        ),
        (["gpu=a10000", "model.pretrained=nowhere"], "gpu=a10000: no such GPU; the nearest are a100-80gb"),
        (["model=tiny_klein", "module.train_text_encoder=true"], "train_text_encoder=true.* stays frozen"),
        (["gpu=null"], "has no table for this machine.*calibrate here, .*; or write gpu=<name>, one of a100-40gb"),
    ],
)
def test_bad_input_names_what_was_given_and_the_remedy(compose: Compose, options: list[str], told: str) -> None:
    if options == ["gpu=null"] and torch.cuda.is_available():
        options = ["gpu=none"]
        told = "gpu=none: no such GPU"
    with pytest.raises(UsageError, match=told):
        plan.run(compose("plan", *TINY, *options))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["calibrat"],
            "plan got 'calibrat'; expected an action (plan, calibrate) or settings as key=value; write plan calibrate",
        ),
        (["calibrate", "gpu=a100", "plan"], "error: plan got action= twice, as words or as settings; write it once"),
    ],
)
def test_words_that_are_no_single_action_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.setattr("sys.argv", ["plan", *words])
    with pytest.raises(SystemExit, match="2"):
        _conf.main(program.PROGRAM)
    assert told in capsys.readouterr().err


def test_an_action_may_stand_behind_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["plan", "gpu=no-such-gpu", "calibrate", "--cfg", "job"])
    _conf.main(program.PROGRAM)
    assert "\naction: calibrate\n" in capsys.readouterr().out


def test_a_gpu_of_this_machine_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A10G")
    assert plan.hardware_of(None)[0].memory_gib == 22.5
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA Z1")
    with pytest.raises(
        UsageError, match="has no table for this machine's NVIDIA Z1.*calibrate here.*; or write gpu=<name>"
    ):
        plan.hardware_of(None)


def test_dollars_say_whose_price_they_are_from(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("strategy=single", f"output={tmp_path / 'plan.json'}")
    _, text = planned(compose, capsys, *options)
    source = "AWS g4dn.xlarge, on demand, us-east-1, August 2026"
    assert f"dollars: 0.526 per hour and GPU, {source}" in text and "$/million" in text
    assert json.loads((tmp_path / "plan.json").read_text())["price_source"] == source
    _, text = planned(compose, capsys, *options, "price=2")
    assert "dollars: 2 per hour and GPU, given" in text
    _, text = planned(compose, capsys, *options, "gpu=rtx-3060")
    assert "dollars:" not in text and "$/million" not in text


def test_no_plan_is_faster_than_the_data_loader(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {}
    for loader in ("null", "100"):
        file = tmp_path / f"{loader}.json"
        planned(compose, capsys, "strategy=single", "data.batch_size=64", f"loader={loader}", f"output={file}")
        found[loader] = json.loads(file.read_text())["plans"][0]["images_per_second"]
    assert found["null"] > 200 and found["100"] == pytest.approx(100)


def test_encoders_on_other_gpus_have_a_bill_beside_those_of_the_trainers(
    compose: Compose, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def written(*options: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "plan.json"
        strategy = ("strategy=ddp", "gpus=2", "data.batch_size=64", "price=2")
        code, text = planned(compose, capsys, *strategy, *options, f"output={file}")
        assert code == 0
        return json.loads(file.read_text(encoding="utf-8")), text

    data, text = written("encoders=[l4,a10g,l4]")
    speed = {each: written(f"encoders={each}")[0]["plans"][0]["images_per_second"] for each in ("all", "none")}
    own, *others = data["encoders"]
    assert data["plans"][0]["images_per_second"] == speed["none"], "trainers encode nothing"
    assert own["encoders"] == "the trainers, in their steps"
    assert own["images_per_second"] == speed["all"] < speed["none"]
    assert [each["encoders"] for each in others] == ["NVIDIA L4", "NVIDIA A10G"]
    hours = 1e6 / speed["none"] / 3600
    for each, price in zip(others, (0.805, 1.006)):
        needed = speed["none"] / each["encoder_images_per_second"]
        assert needed <= each["num_encoders"] < needed + 1
        assert each["dollars"] == pytest.approx(hours * (2 * 2 + each["num_encoders"] * price))
    cells = next(line for line in text.splitlines() if line.startswith("NVIDIA L4 ")).split()
    assert cells[2] == f"{others[0]['num_encoders']}" and cells[-1] == f"{others[0]['dollars']:,.2f}"
    cheapest = min(others, key=lambda each: each["dollars"])["num_encoders"]
    assert data["command"].endswith(f"data.encoders=ray data.num_encoders={cheapest} module.offload_encoders=true")
    assert "a forecast, not measured on a GPU: most published times are met within 35 %" in text
    assert written("encoders=none")[0]["encoders"] == []

    data, text = written("encoders=[rtx-4090]", "loader=7")
    own, beside = data["encoders"]
    assert own["images_per_second"] == pytest.approx(2 * 7), "each trainer waits for its reader"
    assert beside["encoder_images_per_second"] == 7 and beside["images_per_second"] == speed["none"]
    assert beside["dollars"] is None and re.search(r"^NVIDIA GeForce RTX 4090 .* – +–$", text, re.MULTILINE)


def test_what_the_allocator_loses_is_told_if_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    best = SimpleNamespace(memory=SimpleNamespace(device=10 * 10**9), cluster=SimpleNamespace(memory=11 * 10**9))
    plans: Any = SimpleNamespace(best=[best], speeds=SimpleNamespace(overlaps=True))
    monkeypatch.setattr(plan, "smallest", lambda _: None)
    monkeypatch.setattr(plan, "speedup_of_memory", lambda *_: None)

    def told(lost: int) -> list[str]:
        search: Any = SimpleNamespace(segments=lambda _: Reserved(peak=lost))
        return plan.hint_lines(search, plans)

    assert told(10**7) == []
    (line,) = told(5 * 10**8)
    assert line.startswith("train sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; without it, CUDA's allocator")
    assert line.endswith("loses 0.5 GB more between the blocks of the fastest plan")
    assert told(2 * 10**9)[0].endswith(", which does not fit then")
    best.memory.device = 10**9
    assert told(4 * 10**7) == [], "0.0 GB is not told"


def test_train_has_the_allocator_grow_its_segments_as_plans_assume(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sd_lightning.apps import train

    class Stop(Exception):
        pass

    def stop(*_: Any) -> Any:
        raise Stop

    monkeypatch.setattr(train, "preflight", stop)  # before which no memory is taken
    cfg = compose("train", "model=tiny")

    def settings(**given: str) -> tuple[str | None, ...]:
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        for name in names:
            monkeypatch.setenv(name, given.get(name, ""))
            if name not in given:
                monkeypatch.delenv(name)
        with pytest.raises(Stop):
            train.train(cfg)
        return tuple(os.environ.get(name) for name in names)

    assert settings() == ("expandable_segments:True", None)
    assert settings(PYTORCH_ALLOC_CONF="expandable_segments:True,x:1") == (None, "expandable_segments:True,x:1")
    assert not caplog.records
    assert settings(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync") == ("backend:cudaMallocAsync", None)
    assert "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: without expandable_segments:True" in caplog.text
