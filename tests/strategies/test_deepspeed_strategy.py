"""Training under DeepSpeed: precision, offloading, skipped steps, swap files, and the layout all of it relies on."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import small_training as small

pytest.importorskip("deepspeed")

from ranks import run_jobs
from sd_lightning import UsageError
from sd_lightning.state.shards import SavedParameter
from sd_lightning.strategies.deepspeed import machine as deepspeed_machine
from sd_lightning.strategies.deepspeed.state import DeepSpeedState, Fragment

Results = dict[str, dict[str, Any]]

ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
OFFLOAD2 = {"stage": 2, "offload_optimizer": "cpu", "cpu_adam": False}
OFFLOAD3 = {**ZERO3, "offload_optimizer": "cpu", "offload_parameters": "cpu", "cpu_adam": False}
BF16 = {"precision": "bf16-mixed"}
FEW = {"trains": "attn2", "steps": 2}
TWICE = {"accumulate_grad_batches": 2}
CONFIG = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What many small trainings did, in one set of two processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    runs = {
        name: str(folder / name) for name in ("bf16", "bf16-again", "bf16-zero2", "nvme", "nvme-again", "few2", "few3")
    }
    (folder / "disk").mkdir()
    nvme = {**OFFLOAD3, "offload_optimizer": "nvme", "nvme_path": str(folder / "disk")}
    swapping = {"strategy": nvme, "fake_aio": True, "whole": True}
    jobs: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp, bad loss": {"bad_batch": 2},
        "ddp, twice": {"trainer": {**TWICE, "gradient_clip_val": 0.5}, "steps": 2},
        "ddp, twice, bad loss": {"trainer": TWICE, "steps": 3, "bad_batch": 3},
        "zero2": {"strategy": {"stage": 2}},
        "zero2, own config": {
            "strategy": {"config": CONFIG},
            "trainer": TWICE | {"gradient_clip_val": None},
            "steps": 2,
        },
        "zero2 offload": {"strategy": OFFLOAD2},
        "zero3 offload": {"strategy": OFFLOAD3},
        "zero2 on host": {"strategy": {"stage": 2, "cpu_checkpointing": True}, "checkpointing": True},
        "zero3 on host": {"strategy": {**ZERO3, "cpu_checkpointing": True}, "checkpointing": True},
        "zero1 bf16, sampled": {"strategy": {"stage": 1}, "trainer": BF16, "sample_after": 2},
        "zero2 bf16": {"strategy": {"stage": 2}, "trainer": BF16},
        "zero2 bf16, sampled": {"strategy": {"stage": 2}, "trainer": BF16, "sample_after": 2},
        "zero3 bf16": {"strategy": ZERO3, "trainer": BF16, "run_dir": runs["bf16"], "save_every": 2},
        "zero3 bf16, sampled": {"strategy": ZERO3, "trainer": BF16, "sample_after": 2},
        "zero3 offload bf16, sampled": {"strategy": OFFLOAD3, "trainer": BF16, "sample_after": 2},
        "zero1 bf16, bad loss": {"strategy": {"stage": 1}, "trainer": BF16, "bad_batch": 2},
        "zero2, bad loss": {"strategy": {"stage": 2}, "bad_batch": 2},
        "zero3, bad loss": {"strategy": ZERO3, "bad_batch": 2},
        "zero2 offload, bad loss": {"strategy": OFFLOAD2, "bad_batch": 2},
        "zero3 offload, bad loss": {"strategy": OFFLOAD3, "bad_batch": 2},
        "zero2, twice, bad loss": {"strategy": {"stage": 2}, "trainer": TWICE, "steps": 3, "bad_batch": 3},
        "zero3, twice, bad loss": {"strategy": ZERO3, "trainer": TWICE, "steps": 3, "bad_batch": 3},
        "zero3 offload, whole": {"strategy": OFFLOAD3, "whole": True},
        "nvme": swapping | {"run_dir": runs["nvme"], "save_every": 2, "sample_after": 3},
        "zero2 bf16, few": {**FEW, "strategy": {"stage": 2}, "trainer": BF16, "run_dir": runs["few2"]},
        "zero3, few": {**FEW, "strategy": ZERO3, "run_dir": runs["few3"]},
        "zero2, another layout": {"strategy": {"stage": 2}, "breaks_layout": True},
        "zero3, another layout": {"strategy": ZERO3, "breaks_layout": True},
    }
    for name, source, job in (
        ("zero3 bf16, resumed", "bf16", {"strategy": ZERO3, "trainer": BF16, "run_dir": runs["bf16-again"]}),
        ("zero2 bf16, resumed", "bf16", {"strategy": {"stage": 2}, "trainer": BF16, "run_dir": runs["bf16-zero2"]}),
        ("nvme, resumed", "nvme", swapping | {"run_dir": runs["nvme-again"]}),
    ):
        jobs[name] = job | {"resume": f"{runs[source]}/checkpoints/step-00000002"}
    found = run_jobs("deepspeed_jobs", jobs, folder, world_size=2, timeout=900)
    found["folder"] = {"path": str(folder)}
    return found


slow = pytest.mark.slow


@slow
def test_offloading_and_checkpointing_change_where_and_not_what(results: Results) -> None:
    reference = results["ddp"]["losses"]
    for name in ("zero2", "zero2 offload", "zero3 offload", "zero2 on host", "zero3 on host"):
        assert results[name]["losses"] == pytest.approx(reference, abs=1e-6), name
        assert results[name]["engine"]["optimizer"] == "torch.optim.adamw.AdamW"
    for name in ("zero2 on host", "zero3 on host"):
        functions = results[name]["engine"]["checkpoint_functions"]
        assert functions == ["sd_lightning.strategies.deepspeed.weights.checkpoint_on_host"]


@slow
def test_a_users_configuration_reaches_the_engine(results: Results) -> None:
    own = results["zero2, own config"]
    assert own["losses"] == pytest.approx(results["ddp, twice"]["losses"], abs=1e-6)
    engine = own["engine"]
    assert (engine["stage"], engine["accumulate"], engine["micro_batch"], engine["clip"]) == (2, 2, 2, 0.5)
    assert engine["bucket"] == 500_000
    assert own["hooks"] == 2, "hooks before a step are called once per step, not once per batch"


@slow
def test_no_extension_is_compiled_that_the_run_does_not_need(results: Results) -> None:
    for name, found in results.items():
        assert found.get("extensions", []) == [], name


@slow
@pytest.mark.parametrize("name", ["zero1 bf16, sampled", "zero2 bf16", "zero3 bf16", "zero3 offload bf16, sampled"])
def test_bf16_computes_in_bfloat16_on_float32_batches_and_exact_float32_weights(results: Results, name: str) -> None:
    found = results[name]
    assert found["engine"]["compute"] == "torch.bfloat16"
    assert found["dtypes"] == ["torch.float32"]
    assert found["initial_difference"] == 0.0, "the engine's cast has rounded the weights that the optimizer updates"
    assert found["losses"] == pytest.approx(results["ddp"]["losses"], abs=5e-3)
    assert found["losses"] != pytest.approx(results["ddp"]["losses"], abs=1e-6)


@slow
@pytest.mark.parametrize("name", ["zero2 bf16", "zero3 bf16"])
def test_drawing_pictures_leaves_no_trace_in_a_bf16_training(results: Results, name: str) -> None:
    without, sampled = results[name], results[f"{name}, sampled"]
    assert sampled["losses"] == without["losses"]
    assert (sampled["weights"], sampled["average"]) == (without["weights"], without["average"])


@slow
def test_a_bf16_training_resumes_bit_for_bit_from_its_float32_weights(results: Results) -> None:
    whole, resumed = results["zero3 bf16"], results["zero3 bf16, resumed"]
    assert resumed["losses"] == whole["losses"][2:]
    assert (resumed["weights"], resumed["average"]) == (whole["weights"][2:], whole["average"])
    assert results["zero2 bf16, resumed"]["losses"] == pytest.approx(whole["losses"][2:], abs=5e-3)


@slow
@pytest.mark.parametrize("name", ["zero2", "zero3", "zero2 offload", "zero3 offload", "zero1 bf16"])
def test_a_step_with_a_bad_loss_is_skipped(results: Results, name: str) -> None:
    found, reference = results[f"{name}, bad loss"], results["ddp, bad loss"]
    first, skipped, *_ = found["weights"]
    assert skipped == first and found["weights"][2] != first
    assert found["losses"][1] != found["losses"][1], "one rank's loss was not a number"
    ours, theirs = ([each["losses"][i] for i in (0, 2, 3)] for each in (found, reference))
    assert ours == pytest.approx(theirs, abs=5e-3 if "bf16" in name else 1e-6)


@slow
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_bad_batch_skips_all_of_its_accumulated_step(results: Results, name: str) -> None:
    found, reference = results[f"{name}, twice, bad loss"], results["ddp, twice, bad loss"]
    weights = found["weights"]
    assert weights[0] != weights[1] == weights[2] == weights[3] == weights[4] != weights[5]
    assert found["losses"][3:] == pytest.approx(reference["losses"][3:], abs=1e-6, nan_ok=True)


@slow
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_another_layout_of_the_partitions_fails_loudly(results: Results, name: str) -> None:
    """What a DeepSpeed release that packs parameters in another order would do to weights, average and checkpoints."""
    error = results[f"{name}, another layout"]["error"]
    assert error.startswith("RuntimeError: DeepSpeedState found other weights than unet.")
    assert error.endswith("this DeepSpeed release lays them out differently")


@slow
def test_optimizer_states_on_a_disk_are_those_in_memory(results: Results) -> None:
    found = results["nvme"]
    assert len(found["swap_files"]) >= 3, "nothing was swapped, so this proves nothing"
    assert {name.partition("-")[0] for name in found["swap_files"]} >= {"exp_avg", "exp_avg_sq"}
    in_memory = results["zero3 offload, whole"]
    assert (found["losses"], found["weights"]) == (in_memory["losses"], in_memory["weights"])
    assert found["average"] == in_memory["average"]
    resumed = results["nvme, resumed"]
    assert (resumed["losses"], resumed["weights"]) == (found["losses"][2:], found["weights"][2:])
    assert not list((Path(results["folder"]["path"]) / "disk").iterdir()), "swap files outlive their run"


@slow
@pytest.mark.parametrize("run", ["few2", "few3"])
def test_weights_that_are_not_trained_reach_the_pipeline_whole_and_unrounded(results: Results, run: str) -> None:
    from safetensors.torch import load_file

    checkpoint = Path(results["folder"]["path"]) / run / "checkpoints" / "step-00000002"
    saved = load_file(checkpoint / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    fresh = small.module().unet.state_dict()
    assert saved.keys() == fresh.keys()
    moved = {key for key in fresh if not torch.equal(saved[key], fresh[key])}
    assert moved and all("attn2" in key for key in moved)


class FakeBuilder:
    """An extension that compiles at once, or not at all."""

    folder: Path
    error: str | None = None
    loads = 0

    def load(self, verbose: bool) -> None:
        type(self).loads += 1
        if self.error is not None:
            raise RuntimeError(self.error)
        (self.folder / "cpu_adam.so").touch()


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeBuilder]:
    deepspeed_machine.import_deepspeed("test")
    import deepspeed.ops.op_builder as builders

    fake = type("Fake", (FakeBuilder,), {"folder": tmp_path})
    monkeypatch.setattr(builders, "CPUAdamBuilder", fake)
    monkeypatch.setattr(deepspeed_machine, "_folder", lambda name: tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return fake


def test_an_extension_is_compiled_once_with_a_progress_line(
    builder: type[FakeBuilder], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        deepspeed_machine.build(["cpu_adam"])
        deepspeed_machine.build(["cpu_adam"])
    assert builder.loads == 2
    assert [message.split(" ")[0] for message in caplog.messages] == ["compiling", "compiled"]
    assert caplog.messages[0] == "compiling DeepSpeed's cpu_adam for this machine (once; some minutes) …"


def test_a_lock_of_another_process_is_named_and_an_abandoned_one_removed(
    builder: type[FakeBuilder], caplog: pytest.LogCaptureFixture
) -> None:
    lock = builder.folder / "lock"
    lock.touch()
    with caplog.at_level(logging.INFO):
        deepspeed_machine.build(["cpu_adam"])
    assert f"waiting for another process that does it; if there is none, delete {lock}" in caplog.text
    (builder.folder / "cpu_adam.so").unlink()
    os.utime(lock, (0, 0))
    deepspeed_machine.build(["cpu_adam"])
    assert not lock.exists()


def test_a_failing_compiler_is_one_line_with_its_first_error(builder: type[FakeBuilder]) -> None:
    builder.error = (
        "Error building extension 'cpu_adam': [1/3] c++ …\nx.cpp:1: fatal error: omp.h: No such file\nninja: stopped"
    )
    with pytest.raises(UsageError, match=r"compiling DeepSpeed's cpu_adam failed: .*; build it alone") as caught:
        deepspeed_machine.build(["cpu_adam"])
    assert "\n" not in str(caught.value)


def _missing(extension: deepspeed_machine.Extension) -> str:
    deepspeed_machine.import_deepspeed("test")
    try:
        deepspeed_machine.check_buildable(extension)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.full("platform")
def test_cpu_adam_steps_as_torchs_adamw_does(tmp_path: Path) -> None:
    if _missing("cpu_adam"):
        pytest.skip(_missing("cpu_adam"))
    jobs: dict[str, dict[str, Any]] = {
        "zero2": {"strategy": OFFLOAD2},
        "zero2, cpu adam": {"strategy": {**OFFLOAD2, "cpu_adam": True}},
        "zero3, cpu adam": {"strategy": {**OFFLOAD3, "cpu_adam": True}},
    }
    compiled = not _missing("async_io") and deepspeed_machine._is_compiled("async_io")
    if compiled:  # compiling it takes minutes
        nvme = {**OFFLOAD3, "cpu_adam": True, "offload_optimizer": "nvme", "nvme_path": str(tmp_path)}
        jobs["real nvme, cpu adam"] = {"strategy": nvme}
    whole = {name: job | {"whole": True} for name, job in jobs.items()}
    found = run_jobs("deepspeed_jobs", whole, tmp_path, world_size=2)
    for name, result in found.items():
        assert result["losses"] == pytest.approx(found["zero2"]["losses"], abs=1e-6), name
        if "cpu adam" in name:
            assert result["engine"]["optimizer"].endswith("DeepSpeedCPUAdam") and "cpu_adam" in result["extensions"]
            assert result["engine"]["lr"] == found["zero2"]["engine"]["lr"]
    if compiled:
        assert found["real nvme, cpu adam"]["weights"] == found["zero3, cpu adam"]["weights"]
        assert found["real nvme, cpu adam"]["swap_files"]


class OneFlat(DeepSpeedState):
    """A flat tensor on a device that is not the CPU, without an engine."""

    def __init__(self, *, fused: bool) -> None:
        self.flat = torch.zeros(8, device="meta")
        self.zero = SimpleNamespace(optimizer=torch.optim.AdamW([self.flat]))
        self.zero.optimizer.param_groups[0]["fused"] = fused

    def _flats(self) -> list[Tensor]:
        return [self.flat]


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_resumed_count_of_steps_is_where_the_optimizer_looks(fused: bool, device: str) -> None:
    state = OneFlat(fused=fused)
    scalars, states = {"step": torch.tensor(3.0)}, {"exp_avg": (8,), "exp_avg_sq": (8,)}
    saved = {"w": SavedParameter((8,), states=states, scalars=scalars)}
    state._load_states(state.flat, [Fragment("w", (8,), 0, 8, 0, 0)], saved, lambda *_: None)
    found = state.zero.optimizer.state[state.flat]
    devices = {"step": device, "exp_avg": "meta", "exp_avg_sq": "meta"}
    assert {key: value.device.type for key, value in found.items()} == devices
