"""The benchmark runner and its report; the figures themselves are not a matter of tests."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import lines
import report
import run
import timing
from places import REPO

BENCHMARKS = REPO / "benchmarks"


def a_case(**members: Any) -> ModuleType:
    """Return a case; a member that is not given is empty."""
    case = ModuleType("probe")
    vars(case).update({"BARS": {}, "TABLE": {}} | members)
    return case


def test_every_case_says_what_it_measures_its_bars_and_its_peers() -> None:
    assert {"import_time", "step_overhead", "vs_diffusers", "loading", "adamw8bit"} <= set(run.case_names())
    for name in run.case_names():
        case = run.load_case(name)
        assert case.__doc__
        assert callable(case.measure)
        for bar in case.BARS.values():
            sign, limit = bar.split()
            assert sign in lines.COMPARE and float(limit) > 0
        assert case.TABLE, "the figures of every case are shown"
        if not name.startswith("vs_diffusers"):  # which read the versions of scripts
            assert all(isinstance(settings, dict) for settings in getattr(case, "peers", dict)().values())


def test_peers_of_deepspeed_get_buckets_of_the_size_of_the_model() -> None:
    import torch
    from diffusers import UNet2DConditionModel

    import hand_written
    import unet_35m

    with torch.device("meta"):
        sizes = [p.numel() for p in UNet2DConditionModel.from_config(unet_35m.UNET).parameters()]
    for name in ("gemini", "strategies"):
        zero = run.load_case(name).peers()["deepspeed"]["zero_optimization"]
        assert max(sizes) < zero["reduce_bucket_size"] == zero["allgather_bucket_size"] < sum(sizes) / 4
    assert hand_written.zero_optimization(stage=3, offload=True, live=10)["stage3_max_live_parameters"] == 10


def test_precompute_and_a_plain_loop_encode_the_same_photos(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from sd_lightning import LatentDiffusion

    case = run.load_case("precompute")
    case.write_photos(tmp_path / "photos", 3)
    case.plain_loop(tmp_path / "photos", LatentDiffusion.build("tiny").vae.eval(), tmp_path / "plain")
    case.job(tmp_path / "photos", tmp_path / "store", workers=1)
    (plain,), (ours,) = (tmp_path / "plain").iterdir(), (tmp_path / "store").rglob("latents/*.safetensors")
    theirs, rows = (load_file(path)["latents"].float() for path in (plain, ours))
    assert torch.allclose(rows, theirs, atol=1e-2)
    assert case.Recorded.last.images == 3 and case.Recorded.last.seconds["encode"] > 0


def test_unknown_case_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["import_tme"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks/run.py: no case import_tme; there are ")
    assert "import_time" in error and error.count("\n") == 1


def test_a_run_appends_a_line_with_all_fields(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = a_case(
        measure=lambda scale=1.0: {"ratio": [1.25 * scale, 1.2 * scale, 1.3 * scale], "count": 2},
        BARS={"ratio": "<= 1.4"},
        peers=lambda: {"torch": {"fused": True}, "a script": {"version": "abc"}},
        REVISION=3,
    )
    monkeypatch.setattr(run, "load_case", lambda name: case)
    monkeypatch.setattr(run, "case_names", lambda: ["probe"])
    assert run.main(["probe", "--results", str(tmp_path)]) == 0
    assert run.main(["probe", "--results", str(tmp_path), "--set", "scale=2"]) == 1
    assert "probe: bar missed: ratio is 2.5; the bar is <= 1.4" in capsys.readouterr().err
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0]["metrics"] == {"ratio": 1.25, "count": 2}
    assert rows[0]["spread"] == {"ratio": pytest.approx(0.1)} and rows[0]["rounds"] == 3
    import torch

    assert rows[0]["peers"] == {
        "torch": {"version": torch.__version__, "fused": True},
        "a script": {"version": "abc"},
    }
    assert (rows[0]["arguments"], rows[1]["arguments"]) == ({}, {"scale": 2})
    assert rows[0]["case"] == "probe" and rows[0]["revision"] == 3
    assert {"python", "torch", "lightning"} <= rows[0]["versions"].keys()
    assert {"commit", "date"} <= rows[0].keys()
    assert {"cpu", "cores", "memory_gib"} <= rows[0]["hardware"].keys()
    assert file.stem == lines.hardware_slug(rows[0]["hardware"])


def test_a_run_that_is_stopped_leaves_a_line_and_goes_on_after_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[str] = []

    def measure(done: Any) -> Iterator[dict[str, float]]:
        found = dict(done)
        for name in ("one", "two", "three"):
            if name in done:
                continue
            if name == "three" and "one" not in done:
                raise KeyboardInterrupt  # the time is over
            measured.append(name)
            found[name] = float(len(measured))
            yield found

    monkeypatch.setattr(run, "load_case", lambda name: a_case(measure=measure))
    monkeypatch.setattr(run, "case_names", lambda: ["probe"])
    monkeypatch.setattr(lines, "_commit", lambda: "0123456789abcdef")
    with pytest.raises(KeyboardInterrupt):
        run.main(["probe", "--results", str(tmp_path)])
    (row,) = lines.read_rows(tmp_path)
    assert row["unfinished"] and row["metrics"] == {"one": 1, "two": 2} and capsys.readouterr().out == ""
    assert report.newest([{**row, "metrics": {"old": 1}, "unfinished": False}, row], "case")[("probe",)]["metrics"] == {
        "old": 1
    }, "a whole line is shown rather than a newer one that is not"
    assert run.main(["probe", "--results", str(tmp_path)]) == 0
    (row,) = lines.read_rows(tmp_path)
    assert measured == ["one", "two", "three"] and row["metrics"] == {"one": 1, "two": 2, "three": 3}
    assert "unfinished" not in row and json.loads(capsys.readouterr().out) == {
        key: value for key, value in row.items() if key != "machine"
    }
    assert list(tmp_path.iterdir()) == [tmp_path / f"{row['machine']}.jsonl"]


def test_the_commit_may_be_named_where_git_does_not_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "HERE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert lines.Origin.now().commit == "unknown"
    monkeypatch.setenv("GPU_COMMIT", "89abcdef01")
    assert lines.Origin.now().commit == "89abcdef01"
    monkeypatch.undo()
    monkeypatch.setenv("GPU_COMMIT", "89abcdef01")
    assert lines.Origin.now().commit == "89abcdef01", "the checkout here is of another commit"


def test_the_commit_is_read_before_measuring_and_new_files_make_it_dirty(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (folder / "case.py").write_text("1")

    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "status.showUntrackedFiles=no"]
        done = subprocess.run(["git", "-C", str(tmp_path), *author, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    monkeypatch.setattr(lines, "HERE", folder)
    monkeypatch.setattr(run, "case_names", lambda: ["probe"])

    def measured(then: Callable[[], object]) -> dict[str, Any]:
        case = a_case(measure=lambda: {"ratio": 1.0, "done": float(bool(then()))})
        monkeypatch.setattr(run, "load_case", lambda name: case)
        assert run.main(["probe", "--dry-run"]) == 0
        row: dict[str, Any] = json.loads(capsys.readouterr().out)
        return row

    (folder / "results" / "a.jsonl").write_text("a line changes nothing that is measured")
    assert measured(lambda: (folder / "case.py").write_text("2"))["commit"] == head
    assert measured(lambda: git("checkout", "."))["commit"] == f"{head}-dirty"
    (tmp_path / "new.py").write_text("")
    assert measured(lambda: 0)["commit"] == f"{head}-dirty"


def a_line(date: str, ratio: float, *, spread: float = 0.0, **more: Any) -> dict[str, Any]:
    hardware = {"cpu": "Intel(R) Xeon(R) CPU @ 2.2GHz", "cores": 2, "memory_gib": 8.0} | more.pop("hardware", {})
    row = {"case": "import_time", "metrics": {"ratio": ratio}, "spread": {"ratio": spread}, "hardware": hardware}
    return row | {"date": date, "versions": {"torch": "2.13.0"}, "commit": "0123456789abcdef"} | more


def test_report_shows_the_newest_clean_line_of_each_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    def write(name: str, *rows: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    dirty = a_line("2026-03-01T00:00:00", 0.5, commit="0123456789abcdef-dirty")
    other = a_line("2026-03-02T00:00:00", 0.6, revision=7)
    trial = a_line("2026-03-03T00:00:00", 0.7, arguments={"rounds": 1})
    write("a.jsonl", a_line("2026-01-01T00:00:00", 1.5), a_line("2026-02-01T00:00:00", 1.02), dirty, other, trial)
    write("b.jsonl", a_line("2026-01-15T00:00:00", 1.3, hardware={"gpu": "NVIDIA H100", "gpus": 1}))
    assert report.main(["--results", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2
    assert "1x-nvidia-h100 |" in rows[0] and "ratio 1.30 " in rows[0] and "| ratio: no |" in rows[0]
    assert "2-cores-intel-xeon |" in rows[1] and "ratio 1.02 " in rows[1] and "| yes |" in rows[1]
    assert "01234567, 2026-02-01" in rows[1]
    first = (tmp_path / "import_time.svg").read_bytes()
    assert b"<svg" in first
    report.main(["--results", str(tmp_path)])
    assert (tmp_path / "import_time.svg").read_bytes() == first
    assert "import_time.svg" in (tmp_path / "README.md").read_text()


def test_a_report_of_nothing_but_dirty_lines_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(a_line("2026-01-01T00:00:00", 1.0, commit="0123-dirty")) + "\n")
    assert report.main(["--results", str(tmp_path)]) == 2
    assert "no lines of a commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [(1.0, 0.05, "yes"), (1.2, 0.05, "no"), (1.09, 0.05, "within noise"), (1.11, 0.05, "within noise")],
)
def test_a_bar_closer_than_the_spread_is_within_noise_and_the_median_decides_the_exit_code(
    ratio: float, spread: float, verdict: str
) -> None:
    row = a_line("2026-01-01T00:00:00", ratio, spread=spread)
    assert lines.verdict("<= 1.1", "ratio", row) == verdict
    missed = lines.missed_bars({"ratio": "<= 1.1"}, row)
    assert bool(missed) == (ratio > 1.1)
    assert all(("within noise: spread 0.05" in text) == (verdict == "within noise") for text in missed)
    assert lines.verdict("<= 1.1", "other", row) == "not measured"


def test_a_table_shows_figures_with_their_spread_bars_and_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"ours to theirs; share": "{ratio} ×; {share:.0%}", "theirs": "{theirs} ms", "absent": "{absent} s"}
    case = a_case(TABLE=table, BARS={"ratio": "<= 1.1", "share": ">= 0.9"})
    monkeypatch.setattr(report, "load_case", lambda name: case)
    monkeypatch.setattr(report, "case_names", lambda: ["import_time", "other"])
    row = a_line("2026-01-01T00:00:00", 1.08, spread=0.031) | {"machine": "2-cores"}
    row["metrics"] |= {"share": 0.95, "theirs": 1234.5}
    cells = [line.split(" | ") for line in report.case_table([row]).splitlines()[2:]]
    assert cells[0][1:-1] == ["ours to theirs; share", "1.08 ± 0.03 ×; 95%", "≤ 1.1; ≥ 0.9", "within noise: ratio"]
    assert cells[1][2] == "1234 ms" and cells[2][2] == "– s"
    assert cells[0][-1] == "01234567, 2026-01-01, 2-cores |"
    assert cells[3][1:4] == ["ours to theirs; share", "not measured yet", "≤ 1.1; ≥ 0.9"]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/costs.md"])
def test_the_tables_of_the_pages_are_those_of_the_newest_lines(page: str) -> None:
    path = REPO / page
    text = path.read_text(encoding="utf-8")
    expected = report.with_tables(text, report.tables(lines.read_rows(lines.RESULTS))[path], who=page)
    assert text == expected, "write it with: python benchmarks/report.py --readme"


def test_a_page_without_markers_says_which() -> None:
    with pytest.raises(SystemExit, match="a page: expected <!-- benchmarks --> and below it"):
        report.with_tables("no table here", {"benchmarks": "| a |\n"}, who="a page")


def test_sides_take_turns_and_warm_up_is_dropped() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    taken = timing.interleaved({"a": side("a"), "b": side("b")}, rounds=3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert taken == {"a": [4, 5, 8], "b": [3, 6, 7]}
    assert timing.fastest(taken, ["b", "a"]) == "a"
    assert timing.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0


def test_a_case_without_what_it_needs_is_skipped_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DIFFUSERS_SCRIPT", raising=False)
    assert run.main(["vs_diffusers", "--results", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert error.startswith("vs_diffusers: skipped; set DIFFUSERS_SCRIPT=<the path of examples/text_to_image/")
    assert error.count("\n") == 1 and not out and not list(tmp_path.iterdir())
    monkeypatch.setenv("DIFFUSERS_SCRIPT", str(tmp_path / "absent.py"))
    with pytest.raises(SystemExit, match="absent.py: there is no such file; expected the path of examples/"):
        run.main(["vs_diffusers", "--results", str(tmp_path)])


def test_the_trainer_and_the_bare_loop_take_turns_and_each_pays_for_its_own_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bare_loop

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


def test_our_side_of_step_overhead_is_the_default_training_step(tmp_path: Path) -> None:
    case = run.load_case("step_overhead")
    cfg = case.compose(str(tmp_path), max_steps=44)
    assert set(cfg.callbacks) == {"progress", "throughput", "ema", "stop_on_signal", "loss_guard"}
    assert set(cfg.logger) == {"csv"}
    assert cfg.optimizer["_target_"] == "torch.optim.AdamW" and cfg.optimizer.fused
    assert cfg.lr_scheduler["_target_"].endswith(".cosine")
    assert cfg.module.train_text_encoder and cfg.data.cache_latents and cfg.data.batch_size == 64
    trainer = cfg.trainer
    assert (trainer.precision, trainer.gradient_clip_val, trainer.log_every_n_steps) == ("32-true", 1.0, 10)
    assert trainer.max_steps == 44


def test_step_overhead_compares_pairs_not_totals() -> None:
    case = run.load_case("step_overhead")
    # A slow minute of the machine hits both halves of a pair.
    metrics = case.summarize([(1.1, 1.0), (1.3, 1.0), (9.6, 8.0)], steps=5)
    assert metrics["ratio"] == pytest.approx([1.1, 1.3, 1.2])
    assert metrics["step_ms"][1] == pytest.approx(260) and metrics["bare_step_ms"][1] == pytest.approx(200)
    assert metrics["steps_per_block"] == 5


def test_the_bare_loop_trains_the_same_parameters_on_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import bare_loop
    from sd_lightning import LatentDiffusion, SDLightningModule
    from sd_lightning.diffusion.randomness import Purpose, normal

    model = LatentDiffusion.build("tiny")
    captions = model.tokenize(["a handwritten three", "the digit four"])["text_encoder"]
    few = (
        torch.randn(6, 8, 8, 8),
        captions[None].expand(6, 2, -1).contiguous(),
        model.tokenize([""])["text_encoder"][0],
    )
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
    input_ids = captions[[0, 1, 1, 0]]
    expected = module.training_loss(batch | {"input_ids": {"text_encoder": input_ids}})
    noisy = module.objective.prepare(latents, epoch=0, index=index, seed=3, schedule=module.schedule)
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


@pytest.mark.parametrize("name", run.load_case("vs_diffusers_klein").FAMILIES)
def test_both_sides_of_vs_diffusers_klein_get_the_same_settings(tmp_path: Path, name: str) -> None:
    import hydra

    from sd_lightning import _conf

    case = run.load_case("vs_diffusers_klein")
    _, *arguments = case.peer_command(name, tmp_path, steps=7)
    peer: dict[str, Any] = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    program, *overrides = case.our_command(name, tmp_path, steps=7)
    with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        cfg = hydra.compose("dreambooth", [*overrides, "name=unused"])
    assert program == "sd_lightning.dreambooth" and cfg.model.architecture == name
    assert cfg.model.pretrained == peer["pretrained_model_name_or_path"]
    assert str(cfg.data.resolution) == peer["resolution"] and cfg.data.center_crop and "center_crop" in peer
    assert str(cfg.data.batch_size) == peer["train_batch_size"] and cfg.data.cache_latents
    assert cfg.trainer.max_steps == 7 == int(peer["max_train_steps"]) and str(cfg.lora.rank) == peer["rank"]
    assert cfg.optimizer.lr == float(peer["learning_rate"]) and cfg.trainer.gradient_clip_val == 1.0
    assert cfg.trainer.precision == "32-true" and peer["mixed_precision"] == "no" and "ema" not in cfg.callbacks


def test_vs_diffusers_klein_refuses_a_script_from_before_the_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = run.load_case("vs_diffusers_klein")
    monkeypatch.setenv("DIFFUSERS_DREAMBOOTH", str(tmp_path))
    with pytest.raises(SystemExit, match="flux2_klein.py: there is no such file; set DIFFUSERS_DREAMBOOTH to the fol"):
        case.script_of("tiny_klein")
    script = tmp_path / case.FAMILIES["tiny_klein"]
    script.write_text('check_min_version("0.38.0.dev0")')
    with pytest.raises(SystemExit, match="not a script for diffusers 0.39 or newer; set DIFFUSERS_DREAMBOOTH to"):
        case.script_of("tiny_klein")
    script.write_text('check_min_version("0.40.0.dev0")')
    assert case.script_of("tiny_klein") == script


def test_both_sides_of_vs_diffusers_get_the_same_settings(tmp_path: Path) -> None:
    import hydra

    from sd_lightning import _conf

    case = run.load_case("vs_diffusers")
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
        assert cfg.speed.channels_last and cfg.optimizer.fused, "as diffusers_peer.py gives them to the peer"
        # Nothing but training inside the timed part.
        assert "samples" not in cfg.callbacks and "validation_prompts" not in peer
        assert cfg.callbacks.checkpoint.every_n_steps == 0 and int(peer["checkpointing_steps"]) > 7
        assert cfg.data.num_val_samples == 0


def test_the_image_folder_holds_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lightning.data.sources.images import ImageFolder

    case = run.load_case("vs_diffusers")
    assert case.STEPS_PER_EPOCH * case.BATCH_SIZE <= 1797
    monkeypatch.setattr(case, "STEPS_PER_EPOCH", 1)
    case.write_images(tmp_path / "images")
    source = ImageFolder(tmp_path / "images")
    assert len(source) == case.BATCH_SIZE and not source.dropped
    assert source.image(0).size == (case.RESOLUTION, case.RESOLUTION)
    assert source.captions(0)[0].startswith("a handwritten ")


def test_steps_are_taken_apart_and_the_faster_peer_counts() -> None:
    case = run.load_case("vs_diffusers")
    # Two slow steps, then 0.5 s each, of which the denoiser takes 0.4, 0.3 and 0.4.
    stamps = {
        "steps": [10.0, 20.0, 20.5, 21.0, 21.5],
        "denoiser": [9.0, 9.0, 0.4, 0.3, 0.4],
        "encoders": [0.5, 0.5, 0.05, 0.05, 0.05],
        "optimizer": [0.1, 0.1, 0.02, 0.02, 0.02],
    }
    a_run = case.of_stamps(stamps, warm_up=2, seconds=30.0)
    assert (a_run.step_ms, a_run.denoiser_ms, a_run.outside_ms) == pytest.approx((500, 400, 100))
    assert (a_run.encoders_ms, a_run.optimizer_ms, a_run.rest_ms) == pytest.approx((50, 20, 30))

    def runs(*figures: tuple[float, float, float]) -> list[Any]:
        return [case.Measured(step, 100.0, 2.0, 1.0, rest + 3, rest, seconds) for step, rest, seconds in figures]

    metrics = case.summarize(
        {
            "diffusers_alone": runs((160, 47, 30), (170, 52, 33)),
            "diffusers_prefetch": runs((150, 37, 30), (150, 47, 33)),
            "ours": runs((120, 17, 20), (125, 17, 22)),
            "ours_cached": runs((100, 1, 15), (100, 2, 15)),
        }
    )
    assert metrics["peer_workers"] == 1
    assert metrics["outside_vs_diffusers"] == pytest.approx([0.5, 0.4])
    assert metrics["outside_cached_vs_diffusers"] == pytest.approx([0.1, 0.1])
    assert metrics["rest_vs_diffusers"] == pytest.approx([17 / 37, 17 / 47])
    assert metrics["speedup"] == pytest.approx([1.25, 1.2])
    assert metrics["whole_process_ratio"] == pytest.approx([1.5, 1.5])
    assert metrics["diffusers_images_per_second"] == pytest.approx([64e3 / 150] * 2)


def test_gemini_is_measured_by_the_best_setting_of_each_peer() -> None:
    case = run.load_case("gemini")
    names = {name for names in case.VARIANTS.values() for name in names}
    names |= {name for pair in case.COMPARED for name in pair if name not in case.VARIANTS}
    taken = {
        name: {"seconds": [2.0, 4.0], "losses": [0.1], "bytes_at_rest": 1, "bytes_peak": 100}
        | dict.fromkeys(case.FORMS)
        for name in names
    }
    taken["gathered"]["seconds"] = [1.0, 2.0]
    taken["fsdp2_prefetch"]["seconds"] = [1.0, 4.0]
    taken["offloaded"] |= {"bytes_peak": 60}
    taken["zero3_offload_budget"] |= {"bytes_peak": 50, "seconds": [3.0, 5.0]}
    metrics = case.summarize(taken)
    assert metrics["gathered_vs_fsdp2"] == pytest.approx([1.0, 0.5])
    assert metrics["gathered_vs_zero3"] == pytest.approx([0.5, 0.5])
    assert metrics["offloaded_vs_zero3_offload"] == pytest.approx([1.0, 1.0])
    assert metrics["offloaded_peak_vs_zero3_offload"] == pytest.approx(1.2)
    assert metrics["offloaded_peak_vs_fsdp2_offload"] == pytest.approx(0.6)


def test_fsdp2_with_prefetch_computes_the_same_and_blocks_are_in_the_order_of_the_forward_pass() -> None:
    import torch
    import torch.distributed as dist

    import hand_written
    from sd_lightning import LatentDiffusion

    unet = LatentDiffusion.build("tiny").denoiser
    called: list[Any] = []
    blocks = hand_written._blocks(unet)
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: called.append(module))
    inputs = (torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.randn(2, 8, 64))
    unet(*inputs)
    assert len(blocks) > 4 and called == blocks

    recipe = hand_written.Recipe(lambda network, batch: network(*batch).sample.square().mean(), 1e-3, 1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses = {
            name: [float(step(inputs)) for _ in range(3)]
            for name, step in {
                "ddp": hand_written.ddp(LatentDiffusion.build("tiny").denoiser, recipe),
                "plain": hand_written.fsdp2(LatentDiffusion.build("tiny").denoiser, recipe),
                "prefetch": hand_written.fsdp2(
                    LatentDiffusion.build("tiny").denoiser, recipe, reshard_after_forward=False, prefetch=True
                ),
            }.items()
        }
    finally:
        dist.destroy_process_group()
    assert losses["prefetch"] == pytest.approx(losses["plain"])
    assert losses["plain"] == pytest.approx(losses["ddp"], rel=1e-4), "whose kernels are those of channels_last"
    assert losses["plain"][2] < losses["plain"][0]


def test_outliers_are_in_some_blocks_and_leave_no_trace() -> None:
    import torch

    import int8_networks as networks
    from sd_lightning.quantization import Int8, quantize_

    small = {"block_out_channels": [32, 64], "layers_per_block": 1, "attention_head_dim": 4}
    small |= {"down_block_types": ["CrossAttnDownBlock2D"] * 2, "up_block_types": ["CrossAttnUpBlock2D"] * 2}
    unet, call = networks.network("unet", **small), networks.unet_call(side=8)
    assert call(unet).shape == (2, 4, 8, 8) and networks.unet_call(side=8, rows=1)(unet).shape == (1, 4, 8, 8)
    plain = call(unet)
    with networks.outliers(unet):
        assert not torch.equal(call(unet), plain)
    assert torch.equal(call(unet), plain)
    quantize_(unet, Int8(linear="bitsandbytes"))
    with networks.outliers(unet):
        assert 0.05 < networks.share_with_outliers(unet, call) < 0.95
    assert networks.share_with_outliers(unet, call) < 0.05
    other = networks.network("unet", gaussian=True, **small).conv_out.weight
    uniform = networks.network("unet", **small).conv_out.weight
    assert float(other.std()) == pytest.approx(float(uniform.std()), rel=0.1)
    assert float(other.abs().max()) > 1.5 * float(uniform.abs().max())


def test_the_stand_in_prepares_images_as_our_own_transform_does() -> None:
    import numpy as np
    import torch
    from PIL import Image

    import diffusers_peer as stand_in
    from sd_lightning.data.transform import place, to_model_range

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
    expected = to_model_range(torch.from_numpy(place(image, (16, 16)).pixels.copy())[None])[0]
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
    found = json.loads(stamps.read_text())
    assert len(found["steps"]) == 3 and found["steps"] == sorted(found["steps"])
    assert found["denoiser"] == found["encoders"] == [0.0] * 3
    assert all(0 < taken < 1 for taken in found["optimizer"])


def test_every_optimizer_step_of_a_program_leaves_a_stamp(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM.format(before=""))
    check_stamps("step_stamps.py", "program", tmp_path)


def test_forward_and_backward_of_the_denoiser_are_timed_in_each_step(tmp_path: Path) -> None:
    program = """
import time
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn


def forward(self, x):  # of the class, but what it computes is slow
    time.sleep(0.2)
    return (Slow.apply(x * self.weight),)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


def encode(self, x):
    time.sleep(0.05)


timed = AutoencoderKL.encode
timed.__closure__[[*timed.__code__.co_freevars].index("function")].cell_contents = encode
timed = UNet2DConditionModel.forward
timed.__closure__[[*timed.__code__.co_freevars].index("forward")].cell_contents = forward
unet = UNet2DConditionModel.__new__(UNet2DConditionModel)
nn.Module.__init__(unet)
unet.weight = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(unet.parameters(), lr=0.1)
for _ in range(2):
    with torch.no_grad():
        unet(torch.ones(1))
    AutoencoderKL.encode(None, None)
    (unet(torch.ones(1))[0] * 2).sum().backward()
    time.sleep(0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(BENCHMARKS / "step_stamps.py"), str(tmp_path / "stamps.json"), "program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "stamps.json").read_text())
    inside = found["denoiser"][1]
    assert inside > 0.49 and found["steps"][1] - found["steps"][0] - inside > 0.29
    assert 0.05 <= found["encoders"][1] < 0.2


@pytest.mark.slow
def test_the_peer_finds_torchvision_transforms_and_no_check_of_versions(tmp_path: Path) -> None:
    before = """
from diffusers.utils import check_min_version
from torchvision import transforms
check_min_version("99.0")
assert "lanczos" in [name.lower() for name in dir(transforms.InterpolationMode)]
assert torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1).defaults["fused"]
"""
    (tmp_path / "script.py").write_text(_PROGRAM.format(before=before))
    check_stamps("diffusers_peer.py", "script.py", tmp_path)


def test_a_group_of_layers_is_in_int8_alone() -> None:
    import torch
    from torch import nn

    from cases import int8_layers

    torch.manual_seed(0)
    network = nn.ModuleDict({"conv_in": nn.Linear(8, 8), "conv_out": nn.Linear(8, 2)})
    x, weights = torch.randn(4, 8), [each.weight for each in network.values()]
    with torch.no_grad():
        errors = {
            pattern: int8_layers._errors(network, lambda each: each["conv_out"](each["conv_in"](x)), pattern)
            for pattern in ("^conv_in", "^conv_out", "")
        }
    assert [each["weights"] for each in errors.values()] == [64, 16, 80]
    assert all(0 < each[kernel] < 0.05 for each in errors.values() for kernel in int8_layers.KERNELS)
    assert all(each.weight is weight for each, weight in zip(network.values(), weights)), "as it was"
