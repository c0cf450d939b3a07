"""The benchmark runner and its report; the figures themselves are not a matter of tests."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """(run, report, timing) of the benchmarks folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    modules = [importlib.import_module(name) for name in ("run", "report", "timing")]
    for module in modules:
        monkeypatch.delitem(sys.modules, module.__name__)
    return modules[0], modules[1], modules[2]


def test_every_case_says_what_it_measures_and_its_bars(tools: tuple[ModuleType, ...]) -> None:
    run = tools[0]
    assert {"import_time", "step_overhead", "vs_diffusers"} <= set(run.case_names())
    for name in run.case_names():
        case = run.load_case(name)
        assert case.__doc__
        assert callable(case.measure)
        for bar in case.BARS.values():
            sign, limit = bar.split()
            assert sign in run.COMPARE and float(limit) > 0


def test_the_gpu_sweep_of_gemini_runs_on_the_cpu_too(
    tools: tuple[ModuleType, ...],
) -> None:
    case = tools[0].load_case("gemini_gpu")
    metrics = case.measure(architectures=("tiny",), batches=(2,), steps=1, device="cpu")
    assert all(metrics[f"tiny_b2_{name}_fits"] == 1 for name in ("autocast", *case.SWEEP))
    # Half of the gradients go to the host as bfloat16, and half of the weights come back.
    assert 0 < metrics["tiny_b2_half_optim_fast_to_slow_gib"] < metrics["tiny_b2_optim_fast_to_slow_gib"]
    assert "tiny_b2_resident_fast_to_slow_gib" not in metrics


def test_unknown_case_is_one_line(tools: tuple[ModuleType, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools[0].main(["import_tme"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks/run.py: no case import_tme; there are ")
    assert "import_time" in error and error.count("\n") == 1


def test_a_run_appends_a_line_with_all_fields(
    tools: tuple[ModuleType, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tools[0]
    case = ModuleType("probe")
    case.measure, case.BARS = lambda: {"ratio": 1.25}, {"ratio": "<= 1.1"}  # type: ignore[attr-defined]
    monkeypatch.setattr(run, "load_case", lambda name: case)
    monkeypatch.setattr(run, "case_names", lambda: ["probe"])
    assert run.main(["probe", "--results", str(tmp_path)]) == 0
    assert run.main(["probe", "--results", str(tmp_path), "--check"]) == 1
    assert "probe: bar missed: ratio is 1.25; the bar is <= 1.1" in capsys.readouterr().err
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0].keys() == {"case", "metrics", "hardware", "versions", "commit", "date"}
    assert rows[0]["metrics"] == {"ratio": 1.25}
    assert {"cpu", "cores", "memory_gib"} <= rows[0]["hardware"].keys()
    assert file.stem == run.hardware_slug(rows[0]["hardware"])


def test_report_shows_the_newest_line_of_each_machine(
    tools: tuple[ModuleType, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tools[1]

    def line(date: str, ratio: float, **machine: str | int) -> str:
        hardware = {"cpu": "Intel(R) Xeon(R) CPU @ 2.2GHz", "cores": 2, "memory_gib": 8.0} | machine
        row = {"case": "import_time", "metrics": {"ratio": ratio}, "hardware": hardware, "date": date}
        return json.dumps(row | {"versions": {"torch": "2.13.0"}, "commit": "0123456789abcdef-dirty"})

    (tmp_path / "a.jsonl").write_text(
        line("2026-01-01T00:00:00", 1.5) + "\n" + line("2026-02-01T00:00:00", 1.02) + "\n"
    )
    (tmp_path / "b.jsonl").write_text(line("2026-01-15T00:00:00", 1.3, gpu="NVIDIA H100", gpus=1) + "\n")
    assert report.main(["--results", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2
    assert "| 1x-nvidia-h100 |" in rows[0] and "ratio 1.3 |" in rows[0] and "| no |" in rows[0]
    assert "| 2-cores-intel-xeon |" in rows[1] and "ratio 1.02 |" in rows[1] and "| yes |" in rows[1]
    assert "0123456789-dirty" in rows[1]
    first = (tmp_path / "import_time.svg").read_bytes()
    assert b"<svg" in first
    report.main(["--results", str(tmp_path)])
    assert (tmp_path / "import_time.svg").read_bytes() == first
    assert "import_time.svg" in (tmp_path / "README.md").read_text()


def test_sides_take_turns_and_warm_up_is_dropped(tools: tuple[ModuleType, ...]) -> None:
    timing = tools[2]
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    taken = timing.interleaved({"a": side("a"), "b": side("b")}, rounds=3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert taken == {"a": [4, 5, 8], "b": [3, 6, 7]}
    assert timing.medians(taken) == {"a": 5, "b": 6}


def test_a_case_without_what_it_needs_is_skipped_with_one_line(
    tools: tuple[ModuleType, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DIFFUSERS_SCRIPT", raising=False)
    assert tools[0].main(["vs_diffusers", "--check", "--results", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert error.startswith("vs_diffusers: skipped; set DIFFUSERS_SCRIPT=<the path of examples/text_to_image/")
    assert error.count("\n") == 1 and not out and not list(tmp_path.iterdir())
    monkeypatch.setenv("DIFFUSERS_SCRIPT", str(tmp_path / "absent.py"))
    with pytest.raises(SystemExit, match="absent.py: there is no such file; expected the path of examples/"):
        tools[0].main(["vs_diffusers", "--results", str(tmp_path)])


# ---------------------------------------------------------------------- step_overhead


def test_the_trainer_and_the_bare_loop_take_turns_and_each_pays_for_its_own_block(
    tools: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bare_loop", raising=False)
    bare_loop = importlib.import_module("bare_loop")
    clock = 0.0
    asked: list[int] = []

    def other(steps: int) -> None:
        nonlocal clock
        asked.append(steps)
        clock += 100.0

    turns = bare_loop.Turns(other, steps=2, warm_up=1, now=lambda: clock)
    trainer: Any = SimpleNamespace(global_step=0, callbacks=[turns])
    turns.on_train_start(trainer, None)
    for step in range(1, 8):
        clock += step
        trainer.global_step = step
        turns.on_train_batch_end(trainer, None, None, None, 0)
    assert asked == [2, 2, 2]
    assert turns.pairs == [(3 + 4, 100), (5 + 6, 100)]


def test_our_side_of_step_overhead_is_the_default_training_step(tools: tuple[ModuleType, ...], tmp_path: Path) -> None:
    case = tools[0].load_case("step_overhead")
    cfg = case.compose(str(tmp_path), max_steps=44)
    assert set(cfg.callbacks) == {"progress", "throughput", "ema", "stop_on_signal", "loss_guard"}
    assert set(cfg.logger) == {"csv"}
    assert cfg.optimizer["_target_"] == "torch.optim.AdamW" and cfg.optimizer.fused
    assert cfg.lr_scheduler["_target_"].endswith(".cosine")
    assert cfg.module.train_text_encoder and cfg.data.cache_latents and cfg.data.batch_size == 64
    trainer = cfg.trainer
    assert (trainer.precision, trainer.gradient_clip_val, trainer.log_every_n_steps) == ("32-true", 1.0, 10)
    assert trainer.max_steps == 44


def test_step_overhead_compares_pairs_not_totals(tools: tuple[ModuleType, ...]) -> None:
    case = tools[0].load_case("step_overhead")
    # A slow minute of the machine hits both halves of a pair.
    metrics = case.summarize([(1.1, 1.0), (1.3, 1.0), (9.6, 8.0)], steps=5)
    assert metrics["ratio"] == pytest.approx(1.2)
    assert metrics["step_ms"] == pytest.approx(260) and metrics["bare_step_ms"] == pytest.approx(200)
    assert (metrics["blocks"], metrics["steps_per_block"]) == (3, 5)


def test_the_bare_loop_trains_the_same_parameters_on_the_same_loss(
    tools: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sd_lightning import LatentDiffusion, SDLightningModule
    from sd_lightning.randomness import Purpose, normal

    monkeypatch.delitem(sys.modules, "bare_loop", raising=False)
    bare_loop = importlib.import_module("bare_loop")
    model = LatentDiffusion.build("tiny")
    captions = model.tokenize(["a handwritten three", "the digit four"])[:, 0]
    few = (torch.randn(6, 8, 8, 8), captions[None].expand(6, 2, -1).contiguous(), model.tokenize([""])[0, 0])
    monkeypatch.setattr(bare_loop, "tables", lambda *_: few)
    bare = bare_loop.BareLoop(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        batch_size=4, clip=1.0, ema_decay=0.9, proportion_empty_prompts=0.5,
    )  # fmt: skip
    module = SDLightningModule(model, train_text_encoder=True, seed=3)
    ours = [p for p in module.parameters() if p.requires_grad]
    assert sum(p.numel() for p in bare.parameters) == sum(p.numel() for p in ours)

    index, latents = torch.arange(4), torch.randn(4, 4, 8, 8)
    batch = {"latents": latents, "epoch": torch.zeros(4, dtype=torch.int64), "index": index}
    noisy = module._add_noise(batch)
    input_ids = captions[[0, 1, 1, 0]]
    conditioning = module._conditioning({**batch, "input_ids": input_ids[:, None]})
    expected = module._sample_losses(noisy, conditioning).mean()
    noise = normal(3, 0, index, Purpose.NOISE, (4, 8, 8))
    assert torch.allclose(bare.loss(latents, noise, noisy.timesteps, input_ids), expected, rtol=1e-5)

    moments, ids = next(bare.batches())
    assert moments.shape == (4, 8, 8, 8) and ids.shape == (4, captions.shape[1])
    before = [p.detach().clone() for p in bare.parameters]
    bare.run(2)
    moved = [float((p - old).detach().abs().max()) for p, old in zip(bare.parameters, before)]
    averaged = [float((e - old).detach().abs().max()) for e, old in zip(bare.ema, before)]
    assert max(moved) > 0 and all(0 <= average <= move for average, move in zip(averaged, moved))
    assert max(averaged) > 0


# ---------------------------------------------------------------------- vs_diffusers


def test_both_sides_of_vs_diffusers_get_the_same_settings(tools: tuple[ModuleType, ...], tmp_path: Path) -> None:
    import hydra

    from sd_lightning import _conf

    case = tools[0].load_case("vs_diffusers")
    _, *arguments = case.peer_command("script.py", tmp_path, steps=7)
    peer: dict[str, Any] = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    for cached in (False, True):
        program, *overrides = case.our_command(tmp_path, steps=7, cached=cached)
        assert program == "sd_lightning.train"
        with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
            cfg = hydra.compose("train", [*overrides, "name=unused"])
        assert cfg.data.cache_latents is cached
        assert cfg.model.pretrained == peer["pretrained_model_name_or_path"]
        assert cfg.data.train_data_dir == peer["train_data_dir"]
        assert str(cfg.data.resolution) == peer["resolution"] and cfg.data.center_crop and "center_crop" in peer
        assert not cfg.data.random_flip and "random_flip" not in peer
        assert str(cfg.data.batch_size) == peer["train_batch_size"]
        assert str(cfg.data.num_workers) == peer["dataloader_num_workers"]
        assert cfg.trainer.max_steps == 7 == int(peer["max_train_steps"])
        assert cfg.optimizer.lr == float(peer["learning_rate"])
        assert cfg.trainer.gradient_clip_val == float(peer["max_grad_norm"])
        assert cfg.trainer.precision == "32-true" and peer["mixed_precision"] == "no"
        assert not cfg.module.train_text_encoder
        assert "ema" in cfg.callbacks and {"use_ema", "foreach_ema"} <= peer.keys()
        # Nothing but training inside the timed part.
        assert "samples" not in cfg.callbacks and "validation_prompts" not in peer
        assert cfg.callbacks.checkpoint.every_n_steps == 0 and int(peer["checkpointing_steps"]) > 7
        assert cfg.data.num_val_samples == 0


def test_the_image_folder_holds_whole_batches(
    tools: tuple[ModuleType, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sd_lightning.data.images import ImageFolder

    case = tools[0].load_case("vs_diffusers")
    assert case.STEPS_PER_EPOCH * case.BATCH_SIZE <= 1797
    monkeypatch.setattr(case, "STEPS_PER_EPOCH", 1)
    case.write_images(tmp_path / "images")
    source = ImageFolder(tmp_path / "images")
    assert len(source) == case.BATCH_SIZE and not source.dropped
    assert source.image(0).size == (case.RESOLUTION, case.RESOLUTION)
    assert source.captions(0)[0].startswith("a handwritten ")


def test_rates_and_speedups_come_from_the_stamps(tools: tuple[ModuleType, ...]) -> None:
    case = tools[0].load_case("vs_diffusers")
    # Two slow steps, then 0.5 s each: 64 images in half a second.
    assert case.steady_images_per_second([10.0, 20.0, 20.5, 21.0, 21.5], warm_up=2) == pytest.approx(128)

    def runs(*figures: tuple[float, float]) -> list[Any]:
        return [case.Measured(*figure) for figure in figures]

    metrics = case.summarize(
        {
            "diffusers": runs((100, 30), (110, 33), (90, 27)),
            "ours": runs((150, 20), (140, 21), (160, 10)),
            "ours_cached": runs((200, 15), (200, 15), (200, 15)),
        }
    )
    assert (metrics["speedup"], metrics["speedup_cached"]) == pytest.approx((1.5, 2.0))
    assert (metrics["whole_process_ratio"], metrics["whole_process_ratio_cached"]) == pytest.approx((1.5, 2.0))
    assert (metrics["diffusers_images_per_second"], metrics["ours_images_per_second"]) == (100, 150)


def test_the_stand_in_prepares_images_as_our_own_transform_does(tools: tuple[ModuleType, ...]) -> None:
    import numpy as np
    import torch
    from PIL import Image

    from sd_lightning.data.transform import place, to_model_range

    stand_in = importlib.import_module("diffusers_peer")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8))
    prepare = stand_in.Compose(
        [
            stand_in.Resize(16, interpolation=stand_in.InterpolationMode.LANCZOS),
            stand_in.CenterCrop(16),
            stand_in.Lambda(lambda same: same),
            stand_in.ToTensor(),
            stand_in.Normalize([0.5], [0.5]),
        ]
    )
    expected = to_model_range(torch.from_numpy(place(image, 16).pixels.copy())[None])[0]
    assert torch.allclose(prepare(image), expected, atol=1e-6)
    small = image.resize((16, 16))
    assert stand_in.Resize(16)(small) is small
    assert stand_in.RandomCrop(16)(image).size == (16, 16)
    assert stand_in.RandomHorizontalFlip()(small).size == (16, 16)


_PROGRAM = """
import sys
import torch

{before}
assert sys.argv[1:] == ["--steps=3"], sys.argv
weight = torch.nn.Parameter(torch.ones(1))
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()  # a check of settings before the training
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.grad = torch.ones(1)
    optimizer.step()
"""


def check_stamps(launcher: str, program: str, folder: Path) -> None:
    stamps = folder / "stamps.json"
    command = [sys.executable, str(BENCHMARKS / launcher), str(stamps), program, "--steps=3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = json.loads(stamps.read_text())
    assert len(times) == 3 and times == sorted(times)


def test_every_optimizer_step_of_a_program_leaves_a_stamp(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM.format(before=""))
    check_stamps("step_stamps.py", "program", tmp_path)


@pytest.mark.slow
def test_the_peer_finds_torchvision_transforms_and_no_check_of_versions(tmp_path: Path) -> None:
    before = """
from diffusers.utils import check_min_version
from torchvision import transforms
check_min_version("99.0")
assert "lanczos" in [name.lower() for name in dir(transforms.InterpolationMode)]
"""
    (tmp_path / "script.py").write_text(_PROGRAM.format(before=before))
    check_stamps("diffusers_peer.py", "script.py", tmp_path)
