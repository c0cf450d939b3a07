"""The real ColossalAI: settings, refusals and the probe without it; training with it over a fake accelerator, or CUDA.

The trainings drive the installed package's chunks, hooks, placement and optimizer on a machine without a GPU, through
``fake_colossalai``, which stands in for the device, its memory monitor and the compiled Adam kernels. They show nothing
about streams, page-locked memory or those kernels; the same tests run on the real device with ``-m gpu``.
"""

import importlib.metadata
import importlib.util
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import small_training as small
from places import REPO
from ranks import run_jobs
from sd_lightning import UsageError
from sd_lightning.apps import plan, train
from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.models.lora import Lora
from sd_lightning.strategies import compilers
from sd_lightning.strategies.colossalai import probe
from sd_lightning.strategies.colossalai.settings import config_of
from sd_lightning.strategies.colossalai.strategy import (
    ColossalAIConfig,
    ColossalAIStrategy,
    check_optimizers,
    check_run,
    colossalai,
)
from strategy_jobs import Losses

IS_INSTALLED = importlib.util.find_spec("colossalai") is not None
NOT_INSTALLED = f"colossalai is not installed: {probe.INSTALL}"


def test_the_line_of_2022_is_todays_automatic_placement() -> None:
    given = {"use_chunk": True, "enable_distributed_storage": True, "placement_policy": "auto"}
    assert config_of(None, given) == ColossalAIConfig(placement_policy="auto")


def test_defaults_of_2022_that_say_what_is_so_anyway_may_be_written_out() -> None:
    defaults = {
        "use_chunk": True,
        "chunk_size": None,
        "enable_distributed_storage": True,
        "placement_policy": "auto",
        "force_outputs_fp32": False,
        "gpu_margin_mem_ratio": 0.0,
        "min_chunk_size": None,
        "initial_scale": 4.0,
        "hysteresis": 3,
    }
    expected = ColossalAIConfig(placement_policy="auto", initial_scale=4.0, hysteresis=3)
    assert config_of(None, defaults) == expected


def test_arguments_change_a_given_configuration() -> None:
    config = ColossalAIConfig(offload_optim_frac=0.5, max_prefetch=1)
    assert config_of(config, {"max_prefetch": 2}) == ColossalAIConfig(offload_optim_frac=0.5, max_prefetch=2)


def test_every_setting_is_an_argument_of_the_engine_or_of_its_optimizer() -> None:
    config = ColossalAIConfig()
    assert {**config.of_engine(), **config.of_loss_scale()} == vars(config)
    assert not config.of_engine().keys() & config.of_loss_scale().keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_chunk": False}, "use_chunk=False, an argument of 2022: .* nothing but chunks"),
        ({"enable_distributed_storage": False}, "enable_distributed_storage=False, .* write shard_param_frac=0"),
        ({"chunk_size": 2**20}, "chunk_size=1048576, .* stored and never used; write min_chunk_size_m"),
        ({"min_chunk_size": 2**20}, "min_chunk_size=1048576, .* write min_chunk_size_m, in 2"),
        ({"chunk_search_range": 2**21}, "chunk_search_range=2097152, .* write search_range_m, in 2"),
        ({"chunk_search_n_grids": 4096}, "chunk_search_n_grids=4096, .* write hidden_dim"),
        ({"force_outputs_fp32": True}, "force_outputs_fp32=True, .* the loss is computed in float32"),
        ({"gpu_margin_mem_ratio": 0.5}, "gpu_margin_mem_ratio=0.5, .* averages and checkpoints lose them"),
        ({"placement_policy": "cpu"}, "placement_policy='cpu'; expected static or auto .*offload_optim_frac=1"),
        ({"shard_params": 1.0}, "shard_params=1.0; expected shard_param_frac"),
        ({"shard_param_frac": 1.5}, r"shard_param_frac=1.5; expected a fraction in \[0, 1\]"),
        (
            {"steady_cuda_cap_ratio": 0.5},
            "steady_cuda_cap_ratio=0.5 with placement_policy=static, which does not use it",
        ),
        ({"placement_policy": "auto", "shard_param_frac": 0.5}, "shard_param_frac=0.5 with placement_policy=auto"),
        ({"offload_param_frac": 1.0}, "offload_param_frac=1.0, which ColossalAI ignores unless"),
        ({"offload_param_frac": 1.0, "offload_optim_frac": 0.5}, "offload_param_frac=1.0, which ColossalAI ignores"),
        ({"max_prefetch": -1}, "max_prefetch=-1; expected at least 0"),
        ({"hidden_dim": 0}, "hidden_dim=0; expected at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"ColossalAIStrategy got .*{message}"):
        config_of(None, given)


class Module:
    automatic_optimization = True

    def __init__(self, *, is_compiled: bool = False) -> None:
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 2))
        if is_compiled:
            self.network[0].compile()

    def trained_networks(self) -> dict[str, torch.nn.Module]:
        return {"unet": self.network}


def trainer(precision: str = "bf16-mixed", **options: Any) -> Any:
    defaults = {"gradient_clip_val": None, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1}
    return SimpleNamespace(precision_plugin=SimpleNamespace(precision=precision), **defaults | options)


CLIPS = {"gradient_clip_val": 1.0}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, CLIPS),
        ({}, {"precision": "16-mixed", **CLIPS}),
        ({"offload_optim_frac": 1.0}, {}),
        ({"placement_policy": "auto"}, {}),
        ({"offload_optim_frac": 1.0}, {"precision": "16-mixed", **CLIPS}),
        ({"initial_scale": 4.0}, {"precision": "16-mixed"}),
    ],
)
def test_what_works_is_not_refused(settings: dict[str, Any], options: dict[str, Any]) -> None:
    check_run(ColossalAIConfig(**settings), trainer(**options), Module())


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"offload_optim_frac": 0.5}, CLIPS, "bf16-mixed and an optimizer in host memory, where .* ignores clipping"),
        ({"placement_policy": "auto"}, CLIPS, "ignores clipping without a word; write trainer.gradient_clip_val=null"),
        ({}, {"precision": "32-true"}, "trainer.precision=32-true: .* write trainer.precision=bf16-mixed or 16-mixed"),
        ({}, {"precision": "bf16-true"}, "trainer.precision=bf16-true: ColossalAI computes in 16 bits over float32"),
        ({"initial_scale": 4.0}, {}, "a loss scale, which bf16-mixed has not"),
        ({}, {**CLIPS, "gradient_clip_algorithm": "value"}, "clips by norm only"),
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: ColossalAI adds gradients up in 16 bits"),
    ],
)
def test_what_colossalai_would_do_wrong_is_refused(
    settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_run(ColossalAIConfig(**settings), trainer(**options), Module())


def test_modules_that_it_cannot_train_are_refused() -> None:
    with pytest.raises(UsageError, match="a compiled unet: .* write speed.compile=false"):
        check_run(ColossalAIConfig(), trainer(), Module(is_compiled=True))
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(UsageError, match="set automatic_optimization = True in Module"):
        check_run(ColossalAIConfig(), trainer(), module)


def test_only_adam_is_stepped_by_colossalais_adam() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    check_optimizers([torch.optim.AdamW(parameters)])
    check_optimizers([torch.optim.Adam(parameters)])
    for refused, name in (
        ([torch.optim.SGD(parameters, lr=0.1)], "SGD"),
        ([torch.optim.AdamW(parameters)] * 2, "AdamW, AdamW"),
        ([], "none"),
    ):
        with pytest.raises(UsageError, match=f"got the optimizer {name}: .* choose optimizer=adamw"):
            check_optimizers(refused)
    for option in ("amsgrad", "maximize"):
        with pytest.raises(UsageError, match=f"Adam has no {option}; write optimizer.{option}=false"):
            check_optimizers([torch.optim.AdamW(parameters, **{option: True})])  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that a version of ColossalAI is installed, or with None that it is not."""
    real = importlib.metadata.version

    def pretend(version: str | None) -> None:
        def look_up(name: str) -> str:
            if name != "colossalai":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", look_up)

    return pretend


@pytest.mark.parametrize(
    "build", [ColossalAIStrategy, colossalai, lambda: StrategyRegistry.get("sd_colossalai")["init"]()]
)
def test_without_the_package_the_error_says_how_to_install_it(installed: Any, build: Any) -> None:
    installed(None)
    with pytest.raises(UsageError) as raised:
        build()
    expected = (
        f"ColossalAIStrategy cannot be used here: colossalai: FAILED (not installed); install it with: {probe.INSTALL}"
    )
    assert str(raised.value).startswith(expected)
    assert "strategy=gemini is the engine of this package" in str(raised.value)


@pytest.mark.parametrize(
    ("program", "setting", "run"),
    [("plan", "gpu=t4", plan.run), ("train", "trainer.precision=bf16-mixed", train.train)],
)
def test_programs_say_how_to_install_it(installed: Any, compose: Any, program: str, setting: str, run: Any) -> None:
    installed(None)
    with pytest.raises(UsageError, match="not installed.*install it with: pip install --no-deps .*strategy=gemini is"):
        run(compose(program, "model=tiny", "strategy=colossalai", setting))


def test_another_version_is_refused(installed: Any) -> None:
    installed("0.4.9")
    with pytest.raises(UsageError, match=r"colossalai: FAILED \(version 0.4.9\); install 0.5.0: pip install --no-deps"):
        ColossalAIStrategy()


def test_settings_are_checked_before_the_package_is_looked_for(installed: Any) -> None:
    installed(None)
    with pytest.raises(UsageError, match="use_chunk=False"):
        ColossalAIStrategy(use_chunk=False)
    with pytest.raises(UsageError, match="build_timeout_seconds=0; expected a positive number"):
        ColossalAIStrategy(build_timeout_seconds=0)


def test_the_error_prints_every_row_up_to_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["check_version", "check_import", "check_device", "check_nvcc", "check_compiler"]
    for name in names:
        failed = name == "check_nvcc"
        row = probe.Row(name, not failed, f"what {name} found", f"remedy of {name}")
        monkeypatch.setattr(probe, name, lambda *_, row=row: row)
    rows = probe.probe()
    assert [row.check for row in rows] == names[:4]
    with pytest.raises(UsageError) as raised:
        probe.require_engine(timeout_seconds=1)
    assert (
        "check_version: ok (what check_version found) | check_import: ok (what check_import found) | "
        "check_device: ok (what check_device found) | "
        "check_nvcc: FAILED (what check_nvcc found); remedy of check_nvcc; python -m"
    ) in str(raised.value)


def test_the_command_prints_the_rows_and_fails_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [probe.Row("colossalai", True, "version 0.5.0"), probe.Row("device", False, "none", "use another machine")]
    monkeypatch.setattr(probe, "probe", lambda: rows)
    assert probe.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["colossalai: ok (version 0.5.0)", "device: FAILED (none); use another machine"]
    rows.pop()
    assert probe.main() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_cuda_is_named() -> None:
    row = probe.check_device()
    assert not row.ok and "sees no CUDA device" in row.detail


def fake_program(folder: Path, name: str, output: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{output}'\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("release", "is_right"), [("13.1", True), ("12.8", False)])
def test_nvcc_must_be_of_the_major_version_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, is_right: bool
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    row = probe.check_nvcc()
    assert not row.ok and row.detail == "not found in the folder of CUDA_HOME"
    assert row.remedy == "install CUDA Toolkit 13.x (nvcc) and set CUDA_HOME to its folder"
    fake_program(tmp_path / "bin", "nvcc", f"Cuda compilation tools, release {release}, V{release}.80")
    row = probe.check_nvcc()
    assert row.ok == is_right and f"is CUDA {release}, torch is built with CUDA 13.0" in row.detail


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "search_path", lambda: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert probe.check_compiler().remedy.startswith("install it with: apt-get install g++")
    fake_program(tmp_path, "c++", "14")
    assert probe.check_compiler().remedy == "install it with: pip install ninja"
    fake_program(tmp_path, "ninja", "1.13")
    assert probe.check_compiler() == probe.Row("compiler", True, "c++ and ninja")


def test_a_failing_process_is_told_by_its_last_error() -> None:
    assert probe.run_python("print('fine')", 60) == ""
    code = "import sys; sys.stderr.write('x.cu(3): error: no such type\\nninja: build stopped\\n'); sys.exit(1)"
    assert probe.run_python(code, 60) == "x.cu(3): error: no such type"
    assert probe.run_python("import nothing_of_that_name", 60).startswith("ModuleNotFoundError: No module named")


@pytest.mark.skipif(sys.platform == "win32", reason="needs process groups")
def test_a_build_that_hangs_ends_with_its_compilers(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, time; from pathlib import Path; child = subprocess.Popen(['sleep', '600']); "
        f"Path({str(pid_file)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    assert probe.run_python(code, 3) == "not done after 3 s, and ended"
    pid = int(pid_file.read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the child of the process that was ended lives on")


def test_the_makefile_installs_what_the_error_says() -> None:
    assert f"COLOSSALAI := {probe.INSTALL.partition('--no-deps ')[2]}\n" in (REPO / "Makefile").read_text()


@pytest.mark.skipif(not IS_INSTALLED, reason=NOT_INSTALLED)
def test_it_imports_beside_our_versions() -> None:
    assert probe.check_version().ok
    row = probe.check_import(120)
    assert row.ok, row


Results = dict[str, dict[str, Any]]
NOT_CLIPPED = {"gradient_clip_val": None}
ADAPTERS: dict[str, Any] = {"rank": 2, "base": "nf4"}
KEPT = [each.value for each in SavedActivations]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "offloaded": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "partly_offloaded": {"offload_optim_frac": 0.02},  # a chunk of twenty parameters counts twenty times
    "prefetched": {"max_prefetch": 1},
    "zero2": {"shard_param_frac": 0.0},
    "line_of_2022": {"use_chunk": True, "enable_distributed_storage": True, "placement_policy": "auto"},
}
"""Where things lie must not change what is computed; without clipping, as offloading demands."""


def jobs_of(folder: Path, accelerator: str, world_size: int = 1) -> dict[str, dict[str, Any]]:
    half = str(folder / "half/checkpoints/step-00000003")
    jobs: dict[str, dict[str, Any]] = {
        "reference": {"reference": True},
        "clipped": {},
        "replicated": {"strategy": {"min_chunk_size_m": 32.0}},
        "sampled": {"sample_every": 2},
        "half": {"steps": 3},
        "resumed": {"resume": half},
        "resumed_from_single": {"resume": str(folder / "single/checkpoints/step-00000002"), "steps": 3},
        "plain": {"trainer": NOT_CLIPPED},
        **{name: {"trainer": NOT_CLIPPED, "strategy": settings} for name, settings in PLACEMENTS.items()},
        "fp16": {"precision": "16-mixed", "skip_at": 3},
        "fp16_kept": {"precision": "16-mixed"},
        "fp16_offloaded": {"precision": "16-mixed", "strategy": PLACEMENTS["offloaded"]},
        "evaluated": {"steps": 3, "evaluate": True, "trainer": {"limit_val_batches": 1.0}},
        "refused": {"strategy": PLACEMENTS["offloaded"]},
        "unchecked": {"strategy": PLACEMENTS["offloaded"], "unchecked": True},
        "unused": {"unused": [3, 2]},
        "adapters": {"lora": ADAPTERS, "train_only": ".lora_", "trainer": NOT_CLIPPED},
        "kept": {
            "trainer": NOT_CLIPPED,
            "kept": KEPT,
            "speed": {"gradient_checkpointing": 1.0},
        },
    }
    if accelerator == "cuda":
        jobs["pinned"] = {"trainer": NOT_CLIPPED, "strategy": {"pin_memory": True, **PLACEMENTS["offloaded"]}}
    # The ranks measure different memory, and the device holds about half of the model.
    auto = PLACEMENTS["line_of_2022"] | {"warmup_non_model_data_ratio": 0.0}
    jobs["uneven"] = {"trainer": NOT_CLIPPED, "strategy": auto, "memory": [1_500_000, [0, 600_000]]}
    common = {"steps": 6, "devices": world_size}
    return {name: common | {"run_dir": str(folder / name)} | job for name, job in jobs.items()}


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", id="fake_accelerator"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def accelerator(request: pytest.FixtureRequest) -> str:
    """Return what to train on; skip, with the reason, what this machine has not."""
    if not IS_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    if request.param == "cuda":
        lacking = [row for row in probe.probe(trial_step=False) if not row.ok]
        if lacking and lacking[0].check in ("nvcc", "compiler"):
            pytest.skip(str(lacking[0]))
        assert not lacking, lacking
    return request.param


@pytest.fixture(scope="module")
def results(accelerator: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What many small trainings of one process found."""
    folder = tmp_path_factory.mktemp(f"colossalai-{accelerator}")
    small.train(folder / "single", 2)
    jobs = jobs_of(folder, accelerator)
    del jobs["uneven"]
    return run_jobs("colossalai_jobs", jobs, folder, world_size=1, accelerator=accelerator)


slow = pytest.mark.slow


@slow
def test_it_trains_like_adamw_on_float32_masters_of_16_bit_networks(results: Results, accelerator: str) -> None:
    losses = results["clipped"]["losses"]
    assert losses == pytest.approx(results["reference"]["losses"], rel=1e-3 if accelerator == "cpu" else 1e-2)
    assert losses != pytest.approx(results["plain"]["losses"], rel=1e-3), "clipping has an effect"
    assert losses[-1] < 0.9 * losses[0]


@slow
def test_where_things_lie_does_not_change_what_is_computed(results: Results, accelerator: str) -> None:
    for name in PLACEMENTS:
        if accelerator == "cpu":
            assert results[name]["losses"] == results["plain"]["losses"], name
        else:  # Adam is another program in host memory
            assert results[name]["losses"] == pytest.approx(results["plain"]["losses"], rel=1e-2), name


@slow
def test_what_blocks_keep_does_not_change_what_is_computed(results: Results) -> None:
    assert results["kept"]["losses"] == results["plain"]["losses"]


@slow
def test_settings_place_chunks_where_they_say(results: Results) -> None:
    seen = {name: results[name]["seen"] for name in ("plain", *PLACEMENTS)}
    assert all(len(found["chunk_sizes"]) > 5 and not any(found["replicated"]) for found in seen.values())
    assert set(seen["plain"]["weights_on"] + seen["plain"]["masters_on"]) == {"cuda"}
    assert set(seen["offloaded"]["weights_on"] + seen["offloaded"]["masters_on"]) == {"cpu"}
    assert set(seen["partly_offloaded"]["masters_on"]) == {"cpu", "cuda"}
    assert set(seen["line_of_2022"]["masters_on"]) == {"cpu"}, "auto keeps the optimizer in host memory"
    assert seen["plain"]["gathered_bytes"] < seen["zero2"]["gathered_bytes"] / 5


@slow
def test_adapters_on_a_quantised_base_learn_as_without_it(results: Results) -> None:
    losses = Losses()
    options: dict[str, Any] = {"train_text_encoder": False, "optimizer": partial(torch.optim.AdamW, lr=1e-3)}
    module = small.module(lora=Lora(**ADAPTERS), **options)
    small.fit(module, small.data(), 6, losses, **NOT_CLIPPED)
    assert results["adapters"]["losses"] == pytest.approx(losses.values, rel=2e-2)
    stored = small.stored(Path(results["adapters"]["checkpoint"]))
    assert stored and all(".lora_" in key for key in stored), "the base is in its files"
    assert max(each.abs().max() for key, each in stored.items() if key.endswith("lora_B.default.weight")) > 1e-3


@slow
def test_the_smallest_models_are_replicated_as_colossalai_does(results: Results) -> None:
    assert set(results["replicated"]["seen"]["replicated"]) == {True}
    assert results["replicated"]["losses"] == pytest.approx(results["clipped"]["losses"], rel=1e-3)


@slow
def test_masters_are_float32_and_saved_and_loaded_bit_for_bit(results: Results) -> None:
    trained = {name: found["seen"] for name, found in results.items() if "seen" in found}
    assert len(trained) > 10
    for name, seen in trained.items():
        assert seen["lossless_start"], f"{name}: the engine starts from rounded weights"
        assert seen["has_float32_masters"], name
        assert seen["saved_differing"] == [], name
        assert seen["left_gathered"] == 0, name
    for name in ("resumed", "resumed_from_single"):
        assert trained[name]["resumed_differing"] == [], name
    assert results["half"]["losses"] + results["resumed"]["losses"] == results["clipped"]["losses"]
    ours, theirs = (small.stored(Path(results[name]["checkpoint"])) for name in ("resumed", "clipped"))
    assert small.same(ours, theirs), "a resumed run ends with the same weights, moments and average"


@slow
def test_its_checkpoint_resumes_in_one_float32_process(results: Results, tmp_path: Path) -> None:
    checkpoint = Path(results["half"]["checkpoint"])
    last = small.train(tmp_path, 4, resume=checkpoint)
    theirs, ours = small.stored(checkpoint), small.stored(last)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.startswith("master/"):
            assert 0 < (value - ours[name]).abs().max() < 0.02, f"{name}: one step of Adam from there"


@slow
def test_drawing_and_validating_leave_training_bit_equal(results: Results) -> None:
    assert results["sampled"]["losses"] == results["clipped"]["losses"]
    ours, theirs = (small.stored(Path(results[name]["checkpoint"])) for name in ("sampled", "clipped"))
    assert small.same(ours, theirs)
    evaluated = results["evaluated"]
    assert evaluated["validate"]["val/loss"] == pytest.approx(evaluated["test"]["test/loss"], rel=1e-6)
    assert 0 < evaluated["validate"]["val/loss"] < 1.2


@slow
def test_float16_scales_the_loss_skips_on_request_and_clips_offloaded_weights(results: Results) -> None:
    seen = results["fp16"]["seen"]
    assert seen["skipped"], "a step that the guard against bad losses drops leaves the masters as they were"
    assert (seen["scale"]["scale"], seen["scale_after"]["_growth_tracker"]) == (2.0**16, 5)
    assert seen["norms"][0] == pytest.approx(2.0**16 * results["clipped"]["seen"]["norms"][0], rel=0.02)
    assert results["fp16_offloaded"]["losses"] == pytest.approx(results["fp16_kept"]["losses"], rel=1e-3)
    assert results["fp16_offloaded"]["losses"] != pytest.approx(results["plain"]["losses"], rel=1e-3)


@slow
def test_what_it_does_wrong_is_refused_in_a_run(results: Results) -> None:
    assert "where ColossalAI ignores clipping without a word" in results["refused"]["error"]
    assert "1 trained parameters had no part in the loss (unet.never_used)" in results["unused"]["error"]


@slow
def test_what_is_refused_would_really_lose_its_clipping(results: Results) -> None:
    assert results["unchecked"]["losses"] == results["offloaded"]["losses"] != results["clipped"]["losses"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What a few trainings of two processes found, over the fake accelerator."""
    if not IS_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    folder = tmp_path_factory.mktemp("colossalai-2")
    small.train(folder / "single", 2)
    jobs = jobs_of(folder, "cpu", 2)
    names = ("clipped", "sampled", "half", "resumed", "resumed_from_single", "plain", "uneven", *PLACEMENTS)
    return run_jobs("colossalai_jobs", {name: jobs[name] for name in names}, folder, world_size=2)


@slow
def test_two_ranks_over_a_fake_accelerator_agree_wherever_things_lie(two_ranks: Results) -> None:
    for name in ("uneven", *PLACEMENTS):
        assert two_ranks[name]["losses"] == two_ranks["plain"]["losses"], name
    assert two_ranks["sampled"]["losses"] == two_ranks["clipped"]["losses"]
    assert two_ranks["half"]["losses"] + two_ranks["resumed"]["losses"] == two_ranks["clipped"]["losses"]
    for name, found in two_ranks.items():
        seen = found["seen"]
        assert seen["lossless_start"] and seen["saved_differing"] == [] == seen.get("resumed_differing", []), name
        assert not any(seen["replicated"]), name


@slow
def test_two_ranks_over_a_fake_accelerator_shard_what_one_holds(two_ranks: Results) -> None:
    plain, zero2 = two_ranks["plain"]["seen"], two_ranks["zero2"]["seen"]
    assert plain["gathered_bytes"] == 2 * max(plain["chunk_sizes"]), "one chunk of two bytes an element at a time"
    assert zero2["gathered_bytes"] == 2 * sum(plain["chunk_sizes"])


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_the_trial_step_of_the_probe_trains_on_cuda() -> None:
    if not IS_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    rows = probe.probe()
    if rows[-1].check in ("nvcc", "compiler") and not rows[-1].ok:
        pytest.skip(str(rows[-1]))
    assert rows[-1].check == "trial step" and rows[-1].ok, "\n".join(map(str, rows))
