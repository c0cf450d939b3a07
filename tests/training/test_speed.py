"""Every switch for precision and speed has the effect that its name says, and the model computes the same."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import small_training as small
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError, _conf
from sd_lightning.apps import planning
from sd_lightning.apps import train as cli
from sd_lightning.apps.preflight import check_trainer
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.callbacks import EMA
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.storage.checkpoint import checkpoint_path
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.training.speed import Speed, use_attention_kernel
from small_models import TINY_TRANSFORMERS, for_ragged_captions
from suites import keep


@pytest.fixture(autouse=True)
def _process_wide_settings() -> Iterator[None]:
    yield
    Speed().apply_({})


def composed(*overrides: str) -> Any:
    """Compose the training configuration."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        return RunSpec.of(compose("train", ["name=x", *overrides]))


def built(*overrides: str) -> SDLightningModule:
    """Build the module as the command line does, with its switches applied."""
    module = cli.build_module(composed("module.train_text_encoder=true", *overrides))
    assert isinstance(module, SDLightningModule)
    return module


class Ops(TorchDispatchMode):
    """Records the names of the operations that reach a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Records losses, and of the UNet's first convolution the output's dtype and layout."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.activations: set[tuple[torch.dtype, bool]] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            self.activations.add((output.dtype, output.is_contiguous(memory_format=torch.channels_last)))

        self.handle = pl_module.unet.conv_in.register_forward_hook(hook)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.losses.append(float(pl_module.last_loss))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.handle.remove()


def _forward(module: SDLightningModule, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    latents, text = torch.randn(4, 4, 8, 8, device=device), torch.randn(4, 8, 64, device=device)
    timesteps = torch.tensor([1, 300, 600, 999], device=device)
    return module.unet(latents, timesteps, encoder_hidden_states=text).sample.float().square().mean()


def test_bf16_mixed_computes_activations_in_bfloat16_on_float32_weights() -> None:
    watched: dict[str, Watch] = {}
    for precision in ("32-true", "bf16-mixed"):
        watched[precision], module = Watch(), small.module()
        trainer = small.fit(module, small.data(), 3, watched[precision], precision=precision)
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        assert {s["exp_avg"].dtype for s in trainer.optimizers[0].state.values()} == {torch.float32}
    assert {dtype for dtype, _ in watched["32-true"].activations} == {torch.float32}
    assert {dtype for dtype, _ in watched["bf16-mixed"].activations} == {torch.bfloat16}
    assert watched["bf16-mixed"].losses == pytest.approx(watched["32-true"].losses, rel=0.05)
    assert watched["bf16-mixed"].losses != watched["32-true"].losses


def test_16_mixed_is_refused_on_a_cpu_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("built")

    for name in ("build_trainer", "build_module"):
        monkeypatch.setattr(cli, name, refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    spec = composed("trainer.precision=16-mixed", f"output_dir={tmp_path}/run")
    with pytest.raises(UsageError, match=r"trainer.precision=16-mixed needs a CUDA device.*bf16-mixed or 32"):
        cli.run(spec)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_offload"])
def test_16_mixed_is_refused_under_fsdp_where_there_is_a_cuda_device(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"precision=16-mixed: FSDP2 does not scale losses.*write .*=bf16-mixed"):
        check_trainer(composed(f"strategy={strategy}", "trainer.precision=16-mixed"))
    check_trainer(composed("trainer.precision=16-mixed"))  # other strategies scale
    check_trainer(composed(f"strategy={strategy}", "trainer.precision=bf16-mixed"))


def test_fused_adamw_clips_after_a_scaler_has_unscaled() -> None:
    """What 16-mixed does on a GPU, step by step, with a scaler on the CPU."""
    results = []
    for scale in (1.0, 2.0**10):
        module = small.module()
        optimizer: Any = module.configure_optimizers()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for bad in (False, True, False):
            optimizer.zero_grad()
            scaler.scale(_forward(module) * (float("inf") if bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.unet.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.param_groups[0]["fused"] and scaler.get_scale() == scale / 2  # backed off once
        results.append(small.weights(module))
    for name, weight in results[0].items():
        torch.testing.assert_close(results[1][name], weight, rtol=1e-4, atol=1e-6)
    assert not small.same(results[0], small.weights(small.module()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speed.attention=flash"], "speed.attention=flash computes in 16 bits, but trainer.precision=32-true"),
        (["speed.channels_last=true", "optimizer=adamw8bit"], "bitsandbytes.* contiguous weights only; write speed"),
        (
            ["speed.channels_last=true", "strategy=fsdp_offload"],
            "FSDPStrategy keeps weights row by row, .*; write speed",
        ),
        (
            ["speed.channels_last=true", "strategy=gemini"],
            "GeminiStrategy keeps weights row by row, .*=false or",
        ),
        (["speed.channels_last=true", "strategy=deepspeed_zero3"], "DeepSpeedStrategy keeps weights row by row"),
        (
            ["strategy.step_in_backward=true"],
            "trainer.gradient_clip_val=1.0; .*write trainer.gradient_clip_val=null, or",
        ),
        (
            ["strategy.step_in_backward=running_norm", "trainer.accumulate_grad_batches=2", "data.batch_size=16"],
            "accumulate_grad_batches=2; .*write trainer.accumulate_grad_batches=1",
        ),
        (["strategy.step_in_backward=running_norm", "trainer.precision=16-mixed"], "float16: .*take bfloat16"),
        (["strategy.master=split"], "master=split for .* computed with in float32; .*set precision=bf16-mixed"),
        (["strategy.gradient_dtype=bfloat16"], "gradient_dtype=bfloat16 and compute_dtype=torch.float32"),
    ],
)
def test_switches_that_cannot_work_together_are_refused_before_anything_is_built(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    offloaded = ["strategy=gemini_offload"] * overrides[0].startswith("strategy.")
    with pytest.raises(UsageError, match=message):
        check_trainer(composed(*offloaded, *overrides))
    check_trainer(composed("trainer.precision=bf16-mixed", "speed.attention=flash"))
    check_trainer(composed("experiment=little_host_memory", "data.store=store"))


def _saved_bytes(compute: Callable[[], Tensor]) -> int:
    """Return the bytes of distinct storages that autograd keeps for backward, and run backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute()
    loss.backward()
    return sum(kept.values())


def test_gradient_checkpointing_keeps_fewer_activations_and_the_same_gradients() -> None:
    plain, checkpointed = built(), built("speed.gradient_checkpointing=true")

    def text(module: SDLightningModule) -> Tensor:
        (encoder,) = module.latent_diffusion.text_encoders.values()
        return encoder(torch.arange(32).view(4, 8))[0].square().mean()

    for compute, share in ((_forward, 0.5), (text, 0.7)):
        weights = sum(p.numel() * 4 for p in plain.parameters())
        usual, fewer = (_saved_bytes(lambda m=m, c=compute: c(m)) for m in (plain, checkpointed))
        assert 0 < fewer < share * usual, f"{fewer} of {usual} bytes kept ({weights} bytes of weights)"
    for (name, ours), theirs in zip(plain.named_parameters(), checkpointed.parameters()):
        if ours.grad is not None:
            torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-5, atol=1e-7, msg=name)


LIMIT = 0.03
"""GB; activations of 32 samples take 0.044, and 0.017 with all blocks recomputed."""


def limited(*overrides: str, limit: float | str = LIMIT) -> RunSpec:
    """Return a run with a limit of activations, and with what blocks keep."""
    spec = composed(f"speed.gradient_checkpointing={limit}", *overrides)
    return replace(spec, recomputation=planning.recomputation(spec))


def test_a_limit_of_activations_is_kept_and_trains_bit_for_bit_alike(caplog: pytest.LogCaptureFixture) -> None:
    peaks, losses = [], []
    with caplog.at_level("INFO"):
        specs = [composed("data.batch_size=32"), limited("data.batch_size=32")]
    for spec in specs:
        watch, module = Watch(), cli.build_module(spec)
        with torch.autograd.profiler.profile(profile_memory=True) as profiled:
            small.fit(module, small.data(batch_size=32), 2, watch)
        results: Any = profiled.kineto_results
        events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
        peaks.append(max(itertools.accumulate(size for _, size in events)))
        losses.append(watch.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert specs[1].recomputation is not None and len(set(specs[1].recomputation.kept.values())) > 1
    assert peaks[0] - peaks[1] > 0.8 * (0.044 - LIMIT) * 1e9
    (message,) = [each.getMessage() for each in caplog.records if "gradient_checkpointing" in each.getMessage()]
    assert re.search(
        r"=0.03: activations take 0.02\d+ GB; of the blocks, .*(products|convolutions).*; recomputing takes "
        r"\d+.\d % of forward and "
        r"backward \(assumed, from the data sheet: NVIDIA A100-SXM4-80GB\)",
        message,
    )


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (
            (),
            {"limit": 0.001},
            "64 sample.* activations take 0.0.* GB even if .* write trainer.accumulate_grad_batches=2",
        ),
        (
            (),
            {"limit": "auto"},
            "=auto fills the memory of a GPU, and there is none; write GB of activations, e.g. 2.5",
        ),
        ((), {"limit": -1}, "gradient_checkpointing=-1; expected true, false, auto, or GB of activations"),
        (("data.resolution=null",), {}, "needs the size of the images; write data.resolution="),
        (
            ("model._target_=builtins.dict",),
            {},
            "memory of model._target_=builtins.dict cannot be predicted; write .*=true",
        ),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(overrides: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        limited(*overrides, **options)


def test_auto_fills_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(gigabytes: float) -> dict[str, Any]:
        cuda = {
            "is_available": lambda: True,
            "get_device_name": lambda: "of no table",
            "get_device_properties": lambda _: SimpleNamespace(total_memory=gigabytes * 1e9),
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return dict(limited("strategy=gemini", limit="auto").recomputation.kept)  # type: ignore

    assert kept(80) == {}
    assert 0 < len(kept(0.68)) <= len(kept(0.67)), "0.6 GB of them are the allowance for context and workspaces"
    with pytest.raises(
        UsageError, match=r"=auto: with 64 .*, a step takes 0.6\d+ GB even if all blocks .* limit is 0.5"
    ):
        kept(0.52)


def test_a_placement_that_is_measured_in_the_run_has_no_limit() -> None:
    with pytest.raises(UsageError, match="chooses what it offloads by measurements .* write strategy=gemini"):
        limited("strategy=gemini_auto")


def test_gradient_checkpointing_refuses_a_network_without_blocks() -> None:
    with pytest.raises(UsageError, match="gradient_checkpointing=true: Linear has no blocks"):
        Speed(gradient_checkpointing=True).apply_({"linear": nn.Linear(2, 2)})


@pytest.mark.parametrize(("kernel", "fused"), [("auto", True), ("flash", True), ("math", False)])
def test_the_attention_kernel_that_is_named_computes(kernel: str, fused: bool) -> None:
    module = built(f"speed.attention={kernel}")
    with Ops() as ops:
        _forward(module).backward()
    flash = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
    assert (flash <= ops.names) == fused and (not flash & ops.names) == (not fused)
    assert ("_safe_softmax" in ops.names) == (not fused)
    cuda = torch.backends.cuda
    enabled = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    assert enabled == (fused, kernel == "auto", kernel == "auto", True)


def test_all_attention_kernels_give_the_same_loss() -> None:
    losses = [_forward(built(f"speed.attention={kernel}")).item() for kernel in ("auto", "flash", "math")]
    assert losses[0] == losses[1] and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels need the CUDA device that is here")
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_that_a_cpu_does_not_have_is_refused(kernel: str) -> None:
    with pytest.raises(
        UsageError, match=f"attention='{kernel}' but there is no CUDA device; write attention=auto, math or flash"
    ):
        Speed(attention=kernel)  # type: ignore[arg-type]


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(UsageError, match="attention='xformers'; expected one of auto, math, flash, efficient, cudnn"):
        Speed(attention="xformers")  # type: ignore[arg-type]


def _nhwc(tensors: Mapping[Any, Tensor]) -> set[bool]:
    wide = [t for t in tensors.values() if t.dim() == 4 and t.shape[1] > 1 and t.shape[2] > 1]
    assert wide
    return {t.is_contiguous(memory_format=torch.channels_last) for t in wide}


def test_channels_last_lasts_through_training_average_checkpoint_and_resume(tmp_path: Path) -> None:
    def run(name: str, max_steps: int, resume: Path | None = None) -> tuple[Path, Watch]:
        module, watch, ema = small.module(), Watch(), EMA(0.9)
        Speed(channels_last=True).apply_(module.trained_networks())
        saving = small.Saving(tmp_path / name, (2,), resume=resume)
        trainer = small.fit(module, small.data(), max_steps, ema, watch, saving)
        states = trainer.optimizers[0].state
        for tensors in (
            dict(module.named_parameters()),  # the average by now
            {name: s.master for name, s in zip(ema.shadow, ema._weights.parameter_shards())},  # type: ignore[union-attr]
            ema.shadow,
            {p: s["exp_avg"] for p, s in states.items()},
        ):
            assert _nhwc(tensors) == {True}
        ema._swap_out()  # the trained weights
        assert _nhwc(dict(module.named_parameters())) == {True}
        assert watch.activations == {(torch.float32, True)}
        assert saving.last_saved is not None
        return saving.last_saved, watch

    straight, watch = run("straight", 4)
    resumed, _ = run("resumed", 4, resume=checkpoint_path(tmp_path / "straight", 2))
    small.assert_bitwise_equal(resumed, straight)
    plain = Watch()
    small.fit(small.module(), small.data(), 4, plain)
    assert plain.activations == {(torch.float32, False)}
    assert watch.losses == pytest.approx(plain.losses, rel=1e-3)


def test_fsdp_refuses_channels_last_by_the_name_of_the_weight_before_torch_does() -> None:
    module = small.module()
    FSDPStrategy().check(small.trainer_of(1), module)
    Speed(channels_last=True).apply_(module.trained_networks())
    with pytest.raises(UsageError, match=r"got unet\.conv_in\.weight.*channels_last=false"):
        FSDPStrategy().check(small.trainer_of(1), module)


def test_tf32_is_allowed_when_asked_for_and_not_otherwise() -> None:
    for allowed in (True, False):
        built(f"speed.allow_tf32={str(allowed).lower()}")
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.cudnn.allow_tf32 is allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    keep(
        [("gemini_offload", "aot_eager_decomp_partition")],
        [("gemini_offload", "aot_eager_decomp_partition"), ("gemini_offload", "inductor"), ("auto", "inductor")],
        "platform",
    ),
)
def test_compiled_blocks_train_with_nearly_the_same_loss_and_draw_uncompiled(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backend does all that Inductor does but the code for the machine, which takes it a minute."""
    from diffusers import UNet2DConditionModel

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    def graphs() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    losses = []
    offloaded = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 0}
    for compiled in (False, True):
        torch._dynamo.reset()
        model = LatentDiffusion.build("tiny")
        config = dict(model.components["unet"].config)
        config |= {"block_out_channels": [32], "down_block_types": ["CrossAttnDownBlock2D"]}
        config |= {"up_block_types": ["CrossAttnUpBlock2D"]}  # one level: a minute of compiling, not three
        model.components["unet"] = replace(model.components["unet"], config=config)
        torch.manual_seed(0)
        model.networks["unet"] = UNet2DConditionModel(**config)
        sgd = partial(torch.optim.SGD, lr=0.1)  # Adam makes much of small differences
        module, watch, begin = SDLightningModule(model, optimizer=sgd), Watch(), graphs()
        Speed(compile_blocks=compiled).apply_(module.trained_networks())
        strategy = GeminiStrategy(**offloaded) if compiled and name == "gemini_offload" else "auto"
        small.fit(module, small.data(), 3, EMA(0.9), watch, strategy=strategy)
        trained = graphs() - begin
        # Equal blocks share a graph; without the switch there is none.
        assert 0 < trained < len(repeated_blocks(module.unet)) if compiled else trained == 0
        module.sample("the digit two", num_inference_steps=2)
        assert graphs() - begin == trained
        losses.append(watch.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.full("platform")
@pytest.mark.parametrize("name", TINY_TRANSFORMERS)
def test_compiled_blocks_of_transformers_train_as_eager_ones_whatever_the_length_of_captions(name: str) -> None:
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        begin = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        module = small.module(for_ragged_captions(name, seed=1), train_text_encoder=False)
        Speed(compile_blocks=compiled).apply_(module.trained_networks())
        small.fit(module, small.data(source=small.RaggedDigits), 4)
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > begin) == compiled
        assert module.last_loss is not None
        losses.append(float(module.last_loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_blocks_are_compiled_in_the_chosen_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch, "compile", lambda call, *, dynamic, mode: modes.append(mode) or call)
    for mode in ("default", "max-autotune-no-cudagraphs"):
        networks = {"unet": LatentDiffusion.build("tiny", device="meta").denoiser}
        Speed(compile_blocks=True, inductor_mode=mode).apply_(networks)  # type: ignore[arg-type]
    assert set(modes) == {"default", "max-autotune-no-cudagraphs"}
    with pytest.raises(UsageError, match="inductor_mode='fast'; expected default or max-autotune-no-cudagraphs"):
        Speed(compile_blocks=True, inductor_mode="fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing is compiled; write compile_blocks=true"):
        Speed(inductor_mode="max-autotune-no-cudagraphs")


def _step(module: SDLightningModule) -> tuple[torch.optim.Optimizer, set[str]]:
    configured: Any = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Ops() as ops:
        optimizer.step()
    return optimizer, ops.names


@pytest.mark.parametrize("fused", [True, False])
def test_fused_adamw_steps_in_one_operation(fused: bool) -> None:
    optimizer, ops = _step(built(f"optimizer.fused={str(fused).lower()}"))
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["fused"] is fused
    assert ("_fused_adamw_" in ops) == fused


def test_8_bit_adamw_is_refused_where_it_cannot_step_shards() -> None:
    with pytest.raises(UsageError, match="AdamW8bit cannot step the shards of FSDP2.*choose optimizer=adamw, or"):
        FSDPStrategy().check(small.trainer_of(1), built("optimizer=adamw8bit"))


def test_8_bit_adamw_keeps_bytes_for_large_tensors_and_trains_nearly_alike(tmp_path: Path) -> None:
    configuration = ("optimizer=adamw8bit", "optimizer.lr=2e-3")
    watched: dict[str, Watch] = {}
    for name, overrides in (("8 bit", configuration), ("32 bit", ("optimizer.lr=2e-3",))):
        module, watched[name] = built("seed=3", "lr_scheduler=none", *overrides), Watch()
        trainer = small.fit(module, small.data(), 5, watched[name])
        if name == "8 bit":
            for parameter, state in trainer.optimizers[0].state.items():
                large = parameter.numel() >= 4096
                assert state["state1"].dtype == state["state2"].dtype == (torch.uint8 if large else torch.float32)
    assert watched["8 bit"].losses == pytest.approx(watched["32 bit"].losses, rel=0.03)
    assert watched["8 bit"].losses != watched["32 bit"].losses


def test_8_bit_adamw_resumes_nearly_where_it_was(tmp_path: Path) -> None:
    from bitsandbytes.optim import AdamW8bit

    def eight_bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return AdamW8bit(groups, lr=2e-3)

    straight = small.train(tmp_path / "straight", 6, save=(3,), optimizer=eight_bit)
    resumed = small.train(
        tmp_path / "resumed", 6, resume=checkpoint_path(tmp_path / "straight", 3), optimizer=eight_bit
    )
    ours, theirs = small.stored(resumed), small.stored(straight)
    assert ours.keys() == theirs.keys() and {tensor.dtype for tensor in ours.values()} == {torch.float32}
    start = small.stored(checkpoint_path(tmp_path / "straight", 3))
    for name in ("master/unet.up_blocks.0.resnets.0.conv1.weight", "master/unet.conv_in.weight"):
        moved, apart = (theirs[name] - start[name]).norm(), (ours[name] - theirs[name]).norm()
        assert apart < 0.05 * moved


def _on_cuda(*overrides: str) -> SDLightningModule:
    return built(*overrides).to("cuda")


@pytest.mark.gpu
def test_cuda_the_gradient_scaler_resumes(tmp_path: Path) -> None:
    def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-3)

    options: dict[str, Any] = {"accelerator": "cuda", "precision": "16-mixed", "optimizer": adamw}
    straight = small.train(tmp_path / "straight", 6, save=(3,), **options)
    left = checkpoint_path(tmp_path / "straight", 3)
    scaler = small.trainer_state(left)["precision"]
    assert scaler["_growth_tracker"] == 3 and scaler["scale"] == 65536.0
    resumed = small.train(tmp_path / "resumed", 6, resume=left, **options)
    assert small.trainer_state(resumed)["precision"] == small.trainer_state(straight)["precision"]
    assert small.trainer_state(resumed)["precision"]["_growth_tracker"] == 6


@pytest.mark.gpu
def test_cuda_bf16_mixed_computes_activations_in_bfloat16() -> None:
    watch = Watch()
    small.fit(small.module(), small.data(), 2, watch, accelerator="cuda", precision="bf16-mixed")
    assert {dtype for dtype, _ in watch.activations} == {torch.bfloat16}


@pytest.mark.gpu
def test_cuda_gradient_checkpointing_lowers_the_peak_of_memory() -> None:
    def peak(module: SDLightningModule) -> int:
        torch.cuda.reset_peak_memory_stats()
        latents, text = torch.randn(64, 4, 32, 32, device="cuda"), torch.randn(64, 8, 64, device="cuda")
        timesteps = torch.zeros(64, dtype=torch.int64, device="cuda")
        module.unet(latents, timesteps, encoder_hidden_states=text).sample.square().mean().backward()
        return torch.cuda.max_memory_allocated()

    assert peak(_on_cuda("speed.gradient_checkpointing=true")) < 0.7 * peak(_on_cuda())


@pytest.mark.gpu
def test_cuda_tf32_rounds_matrix_products_when_it_is_allowed() -> None:
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    exact = a.double() @ b.double()
    Speed(allow_tf32=False).apply_({})
    fine = (a @ b - exact).abs().max()
    Speed(allow_tf32=True).apply_({})
    assert (a @ b - exact).abs().max() > 10 * fine


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("flash", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
        ("math", "_safe_softmax"),
    ],
)
def test_cuda_the_attention_kernel_that_is_named_computes_and_a_whole_step_runs(kernel: Any, op: str) -> None:
    use_attention_kernel(kernel)
    query = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    with Ops() as ops:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert op in ops.names
    # The frozen encoders compute in float32, for which the math kernel stands in.
    module, watch = small.module(train_text_encoder=False), Watch()
    Speed(attention=kernel).apply_(module.trained_networks())
    small.fit(module, small.data(cache_latents=False), 2, watch, accelerator="cuda", precision="bf16-mixed")
    assert len(watch.losses) == 2


@pytest.mark.gpu
def test_cuda_8_bit_adamw_takes_a_quarter_of_the_state_and_resumes(tmp_path: Path) -> None:
    from bitsandbytes.optim import AdamW8bit

    def eight_bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return AdamW8bit(groups, lr=2e-3)

    module = small.module(optimizer=eight_bit)
    trainer = small.trainer_of(1, accelerator="cuda")
    trainer.fit(module, small.data())
    states = trainer.optimizers[0].state
    assert all(s["state1"].dtype == torch.uint8 for p, s in states.items() if p.numel() >= 4096)
    options: dict[str, Any] = {"accelerator": "cuda", "optimizer": eight_bit}
    straight = small.train(tmp_path / "straight", 6, save=(3,), **options)
    resumed = small.train(tmp_path / "resumed", 6, resume=checkpoint_path(tmp_path / "straight", 3), **options)
    ours, theirs = small.stored(resumed), small.stored(straight)
    name = "master/unet.up_blocks.0.resnets.0.conv1.weight"
    assert (ours[name] - theirs[name]).norm() < 0.01 * theirs[name].norm()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_cuda_compiled_blocks_train_as_eager_ones() -> None:
    from torch._dynamo.utils import counters

    losses = {}
    for compiled in (False, True):
        module, watch = small.module(), Watch()
        Speed(compile_blocks=compiled).apply_(module.trained_networks())
        small.fit(module, small.data(), 4, watch, accelerator="cuda", precision="bf16-mixed")
        losses[compiled] = watch.losses
    assert losses[True] == pytest.approx(losses[False], rel=1e-2)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
