"""Frozen networks in int8 and NF4: values, gradients, memory, and adapters that are trained on them and exported."""

import logging
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import small_training as small
from composing import Compose
from one_rank import one_rank_group
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.apps.preflight import preflight
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.callbacks import EMA
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.loading import check_pretrained
from sd_lightning.models.lora import BASE, WEIGHTS_NAME, Lora, is_adapter
from sd_lightning.models.lora_file import LoraFile
from sd_lightning.quantization import Int8, dequantize_, quantize_
from sd_lightning.quantization.base import NF4Linear, base_bytes, fill_base_, hide_base_, quantize_base_
from sd_lightning.quantization.layers import Int8Conv2d, Int8Linear, int8_layers
from sd_lightning.quantization.tensor_parallel import TensorParallel
from sd_lightning.storage.checkpoint import load_lightning_checkpoint
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.safetensors_file import open_safetensors
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from small_models import TINY_TRANSFORMERS, few_blocks

BASES = ("int8", "nf4")


class Block(nn.Module):
    """Layers of all kinds, with a weight whose rows end within blocks of 64 values."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.odd = nn.Linear(64, 96), nn.Linear(96, 18)
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.back = nn.Linear(18, 5, bias=False)  # 90 values, not whole blocks: int8

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return self.back(self.odd(self.wide(x))).sum() + self.conv(image).square().sum()


def quantised(base: Any) -> tuple[Block, Block]:
    """Return a block, and one with the same weights that is quantised."""
    torch.manual_seed(0)
    plain = Block()
    with torch.no_grad():
        plain.odd.weight[3] = 0  # a block of zeros
    network = nn.ModuleDict({"block": Block()})
    network.block.load_state_dict(plain.state_dict())
    quantize_base_(network, base, blocks=[network.block])
    return plain, network.block


def test_nf4_is_bitsandbytes_own_whatever_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    plain, whole = quantised("nf4")
    monkeypatch.setattr("sd_lightning.quantization.base._AT_A_TIME", 64)
    _, pieces = quantised("nf4")
    assert type(whole.back) is Int8Linear and type(whole.conv) is Int8Conv2d
    for name in ("wide", "odd"):
        weight, layer = getattr(plain, name).weight, getattr(whole, name)
        assert type(layer) is NF4Linear and layer.weight.nbytes == weight.numel() // 2
        blocks = weight.detach().view(-1, 64)
        theirs = dequantize_4bit(*quantize_4bit(blocks, quant_type="nf4", blocksize=64)).view_as(weight)
        assert torch.equal(layer.dequantized(torch.float32), theirs)
        assert torch.equal(getattr(pieces, name).weight, layer.weight)
        assert 0.03 < (theirs - weight).norm() / weight.norm() < 0.12


@pytest.mark.parametrize("base", BASES)
def test_gradients_are_those_of_the_dequantised_weights_which_are_not_kept(base: str) -> None:
    _, block = quantised(base)
    inputs = [torch.randn(2, 7, 64, requires_grad=True), torch.randn(2, 3, 9, 9, requires_grad=True)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = block(*inputs)
    ours = torch.autograd.grad(out, inputs)
    sizes = {tuple(layer.weight.shape) for layer in Block().children()}
    assert not any(
        tuple(each.shape) in sizes or tuple(each.t().shape if each.dim() == 2 else ()) in sizes for each in kept
    )
    weights = {name: layer.dequantized(torch.float32) for name, layer in block.named_children()}
    x, image = inputs
    y = F.linear(F.linear(x, weights["wide"], block.wide.bias), weights["odd"], block.odd.bias)
    expected = F.linear(y, weights["back"]).sum()
    expected = expected + F.conv2d(image, weights["conv"], block.conv.bias, 2, 1).square().sum()
    assert torch.allclose(out, expected, rtol=1e-5)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, inputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_a_cast_keeps_weights_and_scales(base: str) -> None:
    _, block = quantised(base)
    before = {name: layer.weight_scale.clone() for name, layer in block.named_children()}
    block.to(torch.bfloat16)
    for name, layer in block.named_children():
        assert layer.weight.dtype in (torch.int8, torch.uint8) and torch.equal(layer.weight_scale, before[name])
        assert layer.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(base: Any, value: float) -> None:
    network = nn.ModuleDict({"block": Block()})
    with torch.no_grad():
        network.block.odd.weight[16, 95] = value
    with pytest.raises(UsageError, match="the quantised base: block.odd.weight holds NaN or infinite"):
        quantize_base_(network, base, blocks=[network.block])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline in float16, as published ones are."""
    path = tmp_path_factory.mktemp("pipeline")
    few_blocks(seed=1).save_pretrained(path)
    file = path / "unet/diffusion_pytorch_model.safetensors"
    save_file({key: value.half() for key, value in load_file(file).items()}, file)
    return path


def on_base(folder: Path, lora: Lora, **options: Any) -> SDLightningModule:
    model = LatentDiffusion.from_pretrained(folder, deferred=["denoiser"])
    return small.module(model, lora=lora, train_text_encoder=False, **options)


@pytest.mark.parametrize("base", BASES)
def test_the_base_is_read_a_few_rows_at_a_time(base: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {}
    read = DeferredWeights.read

    def noted(self: Any, name: str, out: Tensor, *where: int) -> None:
        sizes[name] = max(sizes.get(name, 0), out.numel())
        read(self, name, out, *where)

    monkeypatch.setattr(DeferredWeights, "read", noted)
    monkeypatch.setattr("sd_lightning.quantization.base._AT_A_TIME", 256)
    monkeypatch.setattr("sd_lightning.quantization.layers._BLOCK_NUMEL", 256)
    module = on_base(folder, Lora(base=base, rank=2))
    layers = dict(int8_layers(module.denoiser))
    assert len(layers) > 10 and not sizes, "it is read when encoders have been cast and moved"
    fill_base_(module.denoiser, module.latent_diffusion.originals["unet"])
    for name, layer in layers.items():
        whole = layer.out_features * layer.in_features if isinstance(layer, Int8Linear) else layer.weight.numel()
        assert sizes[f"{name}.weight"] <= max(whole // layer.weight_scale.shape[0], 4096) < 2 * whole + 4096
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and all(map(is_adapter, trained))
    assert not any(
        "weight_scale" in key or layers.get(key.removesuffix(".weight").partition(".")[2])
        for key in module.state_dict()
    )


@pytest.mark.parametrize("family", ["tiny", *TINY_TRANSFORMERS])
@pytest.mark.parametrize("base", BASES)
def test_every_family_learns_on_it(family: str, base: Any) -> None:
    module = SDLightningModule(
        LatentDiffusion.build(family, seed=1),
        lora=Lora(base=base, rank=2, use_dora=base == "int8"),
        optimizer=small.adamw,
    )
    kinds = {type(layer) for _, layer in int8_layers(module.denoiser)}
    assert (NF4Linear in kinds) == (base == "nf4") and kinds & {Int8Conv2d, Int8Linear}
    plain = LatentDiffusion.build(family, device="meta").denoiser
    assert base_bytes(module.denoiser) < 1.1 * sum(p.numel() for p in plain.parameters())
    before = {name: layer.weight.clone() for name, layer in int8_layers(module.denoiser)}
    adapters = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    small.fit(module, small.data(), 2)
    assert all(torch.equal(layer.weight, before[name]) for name, layer in int8_layers(module.denoiser))
    moved = [name for name, p in module.named_parameters() if name in adapters and not torch.equal(p, adapters[name])]
    assert len(moved) > len(adapters) // 2


@pytest.mark.parametrize(
    ("lora", "kept"),
    [
        (Lora(base="nf4", rank=2), True),
        (Lora(base="int8", rank=2, use_dora=True), True),
        (Lora(base="nf4", rank=2, use_dora=True, merge=True), False),
    ],
)
def test_pipelines_have_the_original_weights(lora: Lora, kept: bool, folder: Path, tmp_path: Path) -> None:
    saving = small.Saving(tmp_path / "run")
    module = on_base(folder, lora)
    small.fit(module, small.data(), 3, saving)
    assert saving.last_saved is not None
    pipeline = saving.last_saved / "pipeline"
    file = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(folder / file), load_file(pipeline / file)
    assert {key: (v.shape, v.dtype) for key, v in before.items()} == {
        key: (v.shape, v.dtype) for key, v in after.items()
    }
    assert all(torch.equal(before[key], after[key]) for key in before) == kept
    assert (pipeline / WEIGHTS_NAME).exists() == kept
    assert not (tmp_path / "run/frozen-weights").exists(), "nothing is copied that the pipeline's files hold"
    if kept:
        assert open_safetensors(pipeline / WEIGHTS_NAME).header.metadata[BASE] == lora.base
    read = LatentDiffusion.from_pretrained(pipeline)
    assert not any(int8_layers(read.denoiser))
    change = [(after_ - before[key].float()).abs().max() for key, after_ in read.denoiser.state_dict().items()]
    assert max(change) > 1e-4, "with the adapters"
    with pytest.raises(
        UsageError,
        match=r"save_pretrained: unet is quantised, with LoRA.*PortableCheckpoint.*pipeline/",
    ):
        module.latent_diffusion.save_pretrained(tmp_path / "other")


def test_dora_is_merged_as_diffusers_does(folder: Path, tmp_path: Path) -> None:
    saving = small.Saving(tmp_path / "run")
    small.fit(on_base(folder, Lora(rank=2, alpha=3, use_dora=True)), small.data(), 3, saving)
    assert saving.last_saved is not None
    pipeline = saving.last_saved / "pipeline"
    from sd_lightning.storage.streamed_tensor import tensors_in

    theirs = LatentDiffusion.from_pretrained(pipeline).denoiser.state_dict()  # diffusers and peft merge
    unet = tensors_in(pipeline / "unet/diffusion_pytorch_model.safetensors")
    ours = LoraFile.read(pipeline / WEIGHTS_NAME).merged({"unet": unet})["unet"]
    assert ours
    for key, tensor in ours.items():
        assert torch.allclose(tensor.read().float(), theirs[key], atol=2e-3)
        assert not torch.allclose(unet[key].read().float(), theirs[key], atol=1e-6)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_dora_that_has_learned_nothing_is_the_original_model(
    base: Any, merge: bool, folder: Path, tmp_path: Path
) -> None:
    saving = small.Saving(tmp_path / "run")
    still: Any = partial(torch.optim.SGD, lr=0.0)
    small.fit(
        on_base(folder, Lora(base=base, rank=2, use_dora=True, merge=merge), optimizer=still),
        *(small.data(), 1, EMA(0.5), saving),
    )
    assert saving.last_saved is not None
    pipeline = saving.last_saved / "pipeline"
    read = LatentDiffusion.from_pretrained(pipeline).denoiser.state_dict()
    before = LatentDiffusion.from_pretrained(folder).denoiser.state_dict()
    assert max((read[key] - before[key]).norm() / before[key].norm().clamp(min=1e-9) for key in before) < 1e-3
    if not merge:
        file = LoraFile.read(pipeline / WEIGHTS_NAME)
        component = LatentDiffusion.describe(folder).components["unet"]
        with ShardedTensors(saving.last_saved / "state") as store:
            trained = file.trained(store, {"unet": component}).tensors
            names = [key for key in trained if "magnitude" in key]
            assert names and all(torch.allclose(trained[key].read(), file.tensors[key].read()) for key in names)


@pytest.mark.parametrize(("base", "other"), [("nf4", "int8"), ("int8", None)])
def test_a_run_is_resumed_on_the_same_base_only(base: Any, other: Any, folder: Path, tmp_path: Path) -> None:
    run, lora = tmp_path / "run", Lora(base=base, rank=2)
    whole = small.Saving(run, (2,))
    small.fit(on_base(folder, lora), small.data(), 4, whole)
    checkpoint = run / "checkpoints/step-00000002"
    refused = small.Saving(tmp_path / "other", resume=checkpoint)
    with pytest.raises(
        UsageError, match=rf"lora.base={other or 'null'}, but the checkpoint's run used lora.base={base}.*init_from"
    ):
        small.fit(on_base(folder, Lora(base=other, rank=2)), small.data(), 4, refused)
    rest = small.Saving(tmp_path / "rest", resume=checkpoint)
    small.fit(on_base(folder, lora), small.data(), 4, rest)
    assert rest.last_saved is not None and whole.last_saved is not None
    small.assert_bitwise_equal(rest.last_saved, whole.last_saved)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("base", BASES)
def test_a_run_is_resumed_on_the_same_weights_only(base: Any, deferred: bool, folder: Path, tmp_path: Path) -> None:
    def module(of: Path) -> SDLightningModule:
        model = LatentDiffusion.from_pretrained(of, deferred=["denoiser"])
        if not deferred:
            model.read_deferred(torch.device("cpu"))
        return small.module(model, lora=Lora(base=base, rank=2), train_text_encoder=False)

    other, file = tmp_path / "other", Path("unet/diffusion_pytorch_model.safetensors")
    shutil.copytree(folder, other)
    weights = load_file(other / file)
    name = next(key for key in weights if key.endswith("to_q.weight"))
    save_file(weights | {name: weights[name] * 1.5}, other / file)
    small.fit(module(folder), small.data(), 1, small.Saving(tmp_path / "run", (1,)))
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    with pytest.raises(UsageError, match="the frozen weights of unet's base are not those.*model.pretrained="):
        small.fit(module(other), small.data(), 2, small.Saving(tmp_path / "rest", resume=checkpoint))
    if not deferred:  # the same files, and another weight in memory
        model = LatentDiffusion.from_pretrained(folder)
        with torch.no_grad():
            model.denoiser.get_parameter(name).mul_(1.5)
        changed = small.module(model, lora=Lora(base=base, rank=2), train_text_encoder=False)
        with pytest.raises(UsageError, match="the frozen weights of unet's base are not"):
            small.fit(changed, small.data(), 2, small.Saving(tmp_path / "rest", resume=checkpoint))
    small.fit(module(folder), small.data(), 2, small.Saving(tmp_path / "rest", resume=checkpoint))


def test_the_base_is_read_when_idle_encoders_are_freed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def noted(network: nn.Module, files: DeferredWeights) -> None:
        encoders = module.encoder.networks
        seen.append({p.device.type for each in encoders for p in each.parameters()})
        fill_base_(network, files)

    monkeypatch.setattr("sd_lightning.models.latent_diffusion.fill_base_", noted)
    module = on_base(folder, Lora(base="nf4", rank=2))
    assert all(layer.weight.is_meta for _, layer in int8_layers(module.denoiser))
    module.encoder.is_idle = True
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.setup("fit")
    assert seen and {"meta"} == set.union(*seen)
    assert not any(layer.weight.is_meta for _, layer in int8_layers(module.denoiser))


@pytest.mark.parametrize("source", ["folder", "changed", "rows", "lora", "dora", "built", "lightning"])
def test_a_model_in_memory_has_its_files_or_a_warning(
    source: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, file = folder, "unet/diffusion_pytorch_model.safetensors"
    if source in ("lora", "dora"):
        saving = small.Saving(tmp_path / "first")
        small.fit(on_base(folder, Lora(rank=2, use_dora=source == "dora")), small.data(), 1, saving)
        assert saving.last_saved is not None
        start = saving.last_saved / "pipeline"
    model = few_blocks(seed=1) if source == "built" else LatentDiffusion.from_pretrained(start)
    if source in ("changed", "rows"):
        with torch.no_grad():
            next(p for p in model.denoiser.parameters() if p.dim() > 1)[source == "rows" :].mul_(1.5)
    exact = {key: value.clone() for key, value in model.denoiser.state_dict().items()}
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        module = small.module(model, lora=Lora(base="nf4", rank=2), train_text_encoder=False)
    if source == "lightning":
        small.fit(module, small.data(), 1).save_checkpoint(tmp_path / "nf4.ckpt")
        model = LatentDiffusion.from_pretrained(folder)
        module = small.module(model, lora=Lora(base="nf4", rank=2), train_text_encoder=False)
        load_lightning_checkpoint(tmp_path / "nf4.ckpt", module)
    has_files = source in ("folder", "lora", "lightning")
    warned = [
        text for each in caplog.records if "base=nf4: no file has the weights of unet" in (text := each.getMessage())
    ]
    assert len(warned) == (not has_files) and all("export with merge_lora=true" in each for each in warned)
    saving = small.Saving(tmp_path / "run")
    small.fit(module, small.data(), 1, saving)
    assert saving.last_saved is not None
    written = load_file(saving.last_saved / "pipeline" / file)
    assert all(torch.allclose(written[key].float(), exact[key], atol=1e-3) for key in exact) == has_files


def test_ddp_sends_the_buffers_of_others_but_not_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    _, block = quantised("nf4")
    hide_base_(block)
    block.register_buffer("users", torch.zeros(3), persistent=False)
    block.register_parameter("trained", nn.Parameter(torch.zeros(3)))
    strategy = DDPStrategy()
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: None)
    with one_rank_group("gloo"):
        sent = strategy._setup_model(block).modules_buffers
    assert [each.numel() for each in sent] == [3]


def test_dora_begins_as_the_norms_of_weights_that_are_not_read(folder: Path) -> None:
    lora = Lora(rank=2, use_dora=True, target_modules=["to_q", "conv1"])
    late = on_base(folder, lora)
    whole = small.module(LatentDiffusion.from_pretrained(folder), lora=lora, train_text_encoder=False)
    assert late.latent_diffusion.deferred, "the denoiser is still in its files"
    assert all(p.is_meta for name, p in late.denoiser.named_parameters() if not is_adapter(name))
    found = {name: p for name, p in whole.named_parameters() if "magnitude" in name}
    assert {p.dim() for p in found.values()} == {1, 4}
    assert all(torch.allclose(late.get_parameter(name), p, rtol=1e-5) for name, p in found.items())
    losses = [float(small.fit(each, small.data(), 3).lightning_module.last_loss) for each in (late, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["base=int4"], "base=int4: expected one of int8, nf4 or null (as lora.base); write base=nf4"),
        (["lora.base=NF4"], "lora.base=NF4: expected one of int8, nf4 or null; write lora.base=nf4"),
        (["base=INT8"], "write base=int8"),
    ],
)
def test_other_names_of_a_base_are_answered_with_ours(
    options: list[str], message: str, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compose("train", "trainable=lora", *options)
    assert message in capsys.readouterr().err


def test_two_names_of_the_base_have_one_value(compose: Compose) -> None:
    spec = RunSpec.of(compose("train", "trainable=lora", "base=nf4", "lora.base=int8", "trainer.accelerator=cpu"))
    with pytest.raises(UsageError, match=r"got base=nf4 and lora.base=int8, two names of one setting; leave lora.base"):
        preflight(spec)


class OwnSetup(SDLightningModule):
    def setup(self, stage: str) -> None:
        """Does not call that of its base class."""


@pytest.mark.parametrize("how", ["read_deferred", "own setup"])
def test_a_base_in_files_is_quantised_however_they_are_read(how: str, folder: Path) -> None:
    expected, module = (on_base(folder, Lora(base="nf4", rank=2)) for _ in range(2))
    small.fit(expected, small.data(), 1)
    if how == "read_deferred":
        module.latent_diffusion.read_deferred("cpu")
    else:
        module.__class__ = OwnSetup
    small.fit(module, small.data(), 1, strategy=GeminiStrategy() if how == "own setup" else "auto")
    ours, theirs = (dict(int8_layers(each.denoiser)) for each in (module, expected))
    assert ours and all(torch.equal(layer.weight, theirs[name].weight) for name, layer in ours.items())


def test_a_model_whose_files_are_known_can_be_pickled(folder: Path) -> None:
    module = small.module(LatentDiffusion.from_pretrained(folder), train_text_encoder=False)
    assert module.latent_diffusion.defer_denoiser is not None
    again = pickle.loads(pickle.dumps(module))
    assert small.same(small.weights(again), small.weights(module))
    assert module.encoder.portable()._model.defer_denoiser is None


class Deletes(small.Callback):
    """Deletes the folder that a model was read from, during the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_zero_grad(self, *_: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_needs_the_folder_of_its_model_at_the_start_only(merge: bool, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "source")
    saving, file = small.Saving(tmp_path / "run", (1,)), "unet/diffusion_pytorch_model.safetensors"
    module = on_base(tmp_path / "source", Lora(base="nf4", rank=2, merge=merge))
    small.fit(module, small.data(), 2, Deletes(tmp_path / "source"), saving)
    assert saving.last_saved is not None and not (tmp_path / "source").exists()
    before, after = load_file(folder / file), load_file(saving.last_saved / "pipeline" / file)
    same = [torch.equal(before[key], after[key]) for key in before]
    assert all(same) != merge and any(same)
    links = (saving.last_saved / "pipeline" / file).stat().st_nlink
    assert links == (1 if merge else 3), "the run's folder, two checkpoints: one copy on the disk"


@pytest.mark.parametrize("other", ["int8", None])
def test_a_new_run_begins_with_the_adapters_of_another_base_merged(other: Any, folder: Path, tmp_path: Path) -> None:
    first, second = small.Saving(tmp_path / "first"), small.Saving(tmp_path / "second")
    small.fit(on_base(folder, Lora(base="nf4", rank=2)), small.data(), 3, first)
    assert first.last_saved is not None
    module = on_base(first.last_saved / "pipeline", Lora(base=other, rank=2))
    merged = LatentDiffusion.from_pretrained(first.last_saved / "pipeline").denoiser.state_dict()
    assert len(list(int8_layers(module.denoiser))) == (0 if other is None else 47)
    small.fit(module, small.data(), 1, second)
    assert second.last_saved is not None
    written = load_file(second.last_saved / "pipeline/unet/diffusion_pytorch_model.safetensors")
    before = load_file(folder / "unet/diffusion_pytorch_model.safetensors")
    assert all(torch.allclose(written[key].float(), merged[key], atol=1e-3) for key in merged)
    assert any((written[key].float() - before[key].float()).abs().max() > 1e-3 for key in merged)


def test_a_checkpoint_of_lightnings_gives_adapters_to_the_same_layers_only(folder: Path, tmp_path: Path) -> None:
    def module(**lora: Any) -> SDLightningModule:
        model = LatentDiffusion.from_pretrained(folder)  # as a run that starts from such a file
        return small.module(model, lora=Lora(rank=2, **lora) if lora else None, train_text_encoder=False)

    trained = module(base="nf4")
    small.fit(trained, small.data(), 2).save_checkpoint(tmp_path / "nf4.ckpt")
    for base in BASES:
        started = module(base=base)
        load_lightning_checkpoint(tmp_path / "nf4.ckpt", started)
        ours, theirs = small.weights(started), small.weights(trained)
        assert small.same(ours, theirs) and any(is_adapter(name) for name in ours)
        small.fit(started, small.data(), 1)
    small.fit(module(), small.data(), 1).save_checkpoint(tmp_path / "full.ckpt")
    for file, other in (("nf4", {}), ("nf4", {"base": None}), ("full", {"base": "nf4"})):
        with pytest.raises(
            UsageError, match=rf"init_from=.*{file}.ckpt: .* of another model.*Give.* trainable=, base="
        ):
            load_lightning_checkpoint(tmp_path / f"{file}.ckpt", module(**other))


@pytest.mark.parametrize("base", BASES)
def test_a_base_draws_from_host_memory_and_is_restored_to_floating_point(base: Any) -> None:
    model = few_blocks(seed=1)
    quantize_base_(model.denoiser, base, blocks=repeated_blocks(model.denoiser).values())
    options = SamplingOptions(num_inference_steps=2)
    drawn = [
        np.asarray(
            generate(model, ["three"], seeds=[0], options=options, device=torch.device("cpu"), offload=offload)[0]
        )
        for offload in (None, "blocks")
    ]
    assert np.array_equal(*drawn) and drawn[0].std() > 1
    weights = {name: layer.dequantized(torch.float32) for name, layer in int8_layers(model.denoiser)}
    hide_base_(model.denoiser)
    dequantize_(model)
    state = model.denoiser.state_dict()
    assert weights and all(torch.equal(state[f"{name}.weight"], weight) for name, weight in weights.items())
    assert state.keys() == few_blocks(seed=1).denoiser.state_dict().keys()


def test_a_base_is_neither_divided_quantised_again_nor_saved_as_it_is(tmp_path: Path) -> None:
    model = few_blocks(seed=1)
    quantize_base_(model.denoiser, "nf4", blocks=repeated_blocks(model.denoiser).values())
    for options in ({}, {"config": {"vae": Int8()}, "tensor_parallel": TensorParallel(0, 1)}):
        with pytest.raises(UsageError, match="quantize_: the weights of UNet2DConditionModel are quantised already"):
            quantize_(model, **options)
    assert not any(int8_layers(model.vae))
    with pytest.raises(UsageError, match="save_pretrained: unet is quantised.* take the folder pipeline/"):
        model.save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("base", BASES)
def test_a_gpu_trains_as_the_cpu(base: Any, folder: Path) -> None:
    found = {}
    for accelerator in ("cpu", "cuda"):
        module = on_base(folder, Lora(base=base, rank=2, use_dora=True))
        losses = Losses()
        small.fit(module, small.data(), 2, losses, accelerator=accelerator)
        found[accelerator] = losses.losses, {k: v.cpu() for k, v in small.weights(module).items() if is_adapter(k)}
        layers = [layer for _, layer in int8_layers(module.denoiser)]
        assert any(isinstance(layer, NF4Linear) for layer in layers) == (base == "nf4")
    (expected, theirs), (losses_there, ours) = found.values()
    assert losses_there == pytest.approx(expected, rel=1e-4)
    errors = torch.cat([(ours[key] - theirs[key]).flatten() for key in theirs])
    assert errors.square().mean().sqrt() < 1e-4, "of steps of 2e-3"


class Losses(small.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


BAD: list[tuple[str, Callable[[LatentDiffusion], Any]]] = [
    ("weights of .* are quantised already", lambda model: SDLightningModule(quantize_(model), lora=Lora(base="nf4"))),
    ("weights of .* are quantised already", lambda model: SDLightningModule(quantize_(model))),
    ("base=fp4; expected int8, nf4", lambda model: Lora(base="fp4")),  # type: ignore[arg-type]
    (
        "conv1 is a quantised convolution, and DoRA.*names of linear layers of unet",
        lambda model: SDLightningModule(model, lora=Lora(base="int8", use_dora=True, target_modules=["conv1"])),
    ),
]


@pytest.mark.parametrize(("message", "build"), BAD, ids=["twice", "full", "name", "dora on a convolution"])
def test_what_cannot_be_is_refused(message: str, build: Callable[[LatentDiffusion], Any]) -> None:
    with pytest.raises(UsageError, match=message):
        build(few_blocks(seed=1))


def test_an_int8_folder_is_no_base(tmp_path: Path) -> None:
    quantize_(LatentDiffusion.build("tiny", seed=1)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="in int8, which cannot be trained, nor quantised again.*base=int8"):
        check_pretrained("tiny", str(tmp_path))
    shutil.rmtree(tmp_path)
