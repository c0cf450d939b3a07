"""Adapters: what is trained, and that files hold what was trained, for diffusers as for us."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import small_training as small
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.callbacks import EMA
from sd_lightning.callbacks.checkpoint import pipeline as checkpoint_pipeline
from sd_lightning.models import loading
from sd_lightning.models.families import Architecture
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, is_adapter, merged_state_dict
from sd_lightning.quantization import quantize_
from sd_lightning.quantization.tensor_parallel import TensorParallel
from small_models import SMALL_SD2, SMALL_SDXL
from small_training import stored


def adapted(architecture: str | Architecture, lora: Lora) -> SDLightningModule:
    """Return a module whose adapters do something."""
    module = SDLightningModule(LatentDiffusion.build(architecture, seed=1), train_text_encoder=True, lora=lora)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return module


def write(module: SDLightningModule, file: Path) -> None:
    """Write a module's adapters as a run does."""
    assert module.lora is not None
    networks = module.trained_networks()
    layers = {name: {k: v for k, v in n.state_dict().items() if is_adapter(k)} for name, n in networks.items()}
    module.lora.write(file, layers, module.latent_diffusion.components)


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    size = {"height": 32, "width": 32}
    return pipeline("a three", num_inference_steps=2, generator=noise, output_type="np", **size).images


def test_adapters_alone_are_trained_and_do_nothing_yet() -> None:
    plain, lora = LatentDiffusion.build("tiny", seed=1), Lora(rank=2, alpha=8)
    module = SDLightningModule(LatentDiffusion.build("tiny", seed=1), train_text_encoder=True, lora=lora)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert trained and all(is_adapter(name) for name in trained)
    assert {name.partition(".")[0] for name in trained} == {"unet", "text_encoder"}
    assert {min(p.shape) for p in trained.values()} == {2}
    grouped = [p for group in module.configure_optimizers().param_groups for p in group["params"]]  # type: ignore
    assert set(map(id, grouped)) == set(map(id, trained.values()))
    assert np.array_equal(draw(module.latent_diffusion.pipeline()), draw(plain.pipeline()))


def test_adapters_begin_with_the_same_values_whatever_happened_before() -> None:
    def first_values(seed: int) -> dict[str, Tensor]:
        torch.rand(3)
        model = LatentDiffusion.build("tiny", seed=1)
        Lora(seed=seed).of_family(model.family).apply_({"unet": model.denoiser})
        return {key: value for key, value in model.denoiser.state_dict().items() if "lora_A" in key}

    first, again, other = first_values(5), first_values(5), first_values(6)
    assert first and all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.holds("LoRA")
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("tiny", {"target_modules": ["to_q", "to_v", "conv1", "proj_in"]}),
        (SMALL_SD2, {"target_modules": ["to_k", "proj_out"]}),
        (SMALL_SDXL, {}),
    ],
    ids=["tiny with convolutions", "sd2", "sdxl"],
)
def test_diffusers_and_we_read_what_was_written(
    architecture: str | Architecture, options: dict[str, Any], tmp_path: Path
) -> None:
    lora = Lora(rank=3, alpha=4.5, **options)
    module = adapted(architecture, lora)
    model = module.latent_diffusion
    expected, base = draw(model.pipeline()), LatentDiffusion.build(architecture, seed=1)
    assert np.abs(expected - draw(base.pipeline())).max() > 0.05, "the adapters do something"
    base.save_pretrained(tmp_path)
    write(module, tmp_path / WEIGHTS_NAME)
    pipeline: Any = base.pipeline()
    pipeline.load_lora_weights(tmp_path)
    assert np.abs(draw(pipeline) - expected).max() < 5e-5, "the scale is part of the weights: rounded otherwise"
    ours = LatentDiffusion.from_pretrained(tmp_path, deferred=["unet"])
    assert set(ours.deferred) == {"unet"}
    ours.read_deferred("cpu")
    assert not any(is_adapter(key) for key in ours.denoiser.state_dict())
    for name, network in module.trained_networks().items():
        merged, read = merged_state_dict(network), ours.networks[name].state_dict()
        assert merged.keys() == read.keys()
        assert all(torch.allclose(merged[key], read[key], atol=1e-6) for key in read)
    model.save_pretrained(tmp_path / "merged")
    assert np.abs(draw(LatentDiffusion.from_pretrained(tmp_path / "merged").pipeline()) - expected).max() < 1 / 255


def test_adapters_of_a_layer_without_a_gradient_are_frozen_with_it() -> None:
    module = adapted(SMALL_SDXL, Lora())
    last = {n: p.requires_grad for n, p in module.text_encoder.named_parameters() if ".layers.2." in n}  # type: ignore
    assert last and not any(last.values()), "SDXL takes the last hidden states but one"
    assert any(p.requires_grad for n, p in module.text_encoder.named_parameters() if ".layers.1." in n)  # type: ignore


def test_adapters_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd_lightning.models.loading.load_network", lambda *_, **__: pytest.fail("read weights"))
    LatentDiffusion.build(SMALL_SDXL).save_pretrained(tmp_path)
    write(adapted("tiny", Lora()), tmp_path / WEIGHTS_NAME)
    with pytest.raises(UsageError, match=f"{WEIGHTS_NAME}: these are adapters of model=tiny; .*copy the file again"):
        LatentDiffusion.from_pretrained(tmp_path)


def test_adapters_are_added_to_another_base(tmp_path: Path) -> None:
    """Trained on one base, drawn with another."""
    module = adapted("tiny", Lora(rank=3, alpha=4.5))
    write(module, tmp_path / "lora.safetensors")
    LatentDiffusion.build("tiny", seed=2).save_pretrained(tmp_path / "turbo")
    plain = LatentDiffusion.from_pretrained(tmp_path / "turbo")
    ours = LatentDiffusion.from_pretrained(tmp_path / "turbo", lora=tmp_path / "lora.safetensors", deferred=["unet"])
    assert set(ours.deferred) == {"unet"}
    ours.read_deferred("cpu")
    base = LatentDiffusion.build("tiny", seed=1)
    for name, network in module.trained_networks().items():
        merged, before = merged_state_dict(network), base.networks[name].state_dict()
        other, read = plain.networks[name].state_dict(), ours.networks[name].state_dict()
        assert any(not torch.equal(merged[key], before[key]) for key in merged)
        assert all(torch.allclose(read[key], other[key] + merged[key] - before[key], atol=1e-6) for key in read)


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_share_of_the_adapters_is_added(use_dora: bool, tmp_path: Path) -> None:
    LatentDiffusion.build("tiny", seed=1).save_pretrained(tmp_path)
    write(adapted("tiny", Lora(rank=3, alpha=4.5, use_dora=use_dora)), tmp_path / "lora.safetensors")

    def read(weight: float | None) -> dict[str, Tensor]:
        file = tmp_path / "lora.safetensors"
        model = LatentDiffusion.from_pretrained(tmp_path, lora=file, lora_weight=weight, deferred=["unet"])
        model.read_deferred("cpu")
        return model.denoiser.state_dict()

    base = LatentDiffusion.from_pretrained(tmp_path).denoiser.state_dict()
    none, part, whole, unset, opposite = (read(weight) for weight in (0, 0.3, 1, None, -1))
    assert any(not torch.equal(whole[key], base[key]) for key in base)
    for key, value in base.items():
        assert torch.equal(none[key], value) and torch.equal(unset[key], whole[key])
        torch.testing.assert_close(part[key], value + 0.3 * (whole[key] - value), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(opposite[key], value - (whole[key] - value), atol=1e-6, rtol=1e-5)
    with pytest.raises(UsageError, match=f"lora_weight=1: .* has no {WEIGHTS_NAME}: it was trained without adapters"):
        LatentDiffusion.from_pretrained(tmp_path, lora_weight=1)


def test_adapters_that_do_not_fit_a_base_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers would leave out adapters of a missing layer without an error."""
    LatentDiffusion.build(SMALL_SDXL).save_pretrained(tmp_path / "xl")
    LatentDiffusion.build("tiny").save_pretrained(tmp_path / "tiny")
    write(adapted("tiny", Lora()), tmp_path / "tiny.safetensors")
    write(adapted(SMALL_SDXL, Lora(target_modules=["attn1.to_q"])), tmp_path / "xl.safetensors")
    state = load_file(tmp_path / "tiny.safetensors")
    deeper = {k.replace("transformer_blocks.0", "transformer_blocks.7"): v for k, v in state.items()}
    save_file(deeper, tmp_path / "deeper.safetensors")
    second = {k: v for k, v in load_file(tmp_path / "xl.safetensors").items() if k.startswith("text_encoder_2.")}
    save_file(second, tmp_path / "second.safetensors")
    (tmp_path / "text.safetensors").write_bytes(b"no weights")
    monkeypatch.setattr(loading, "load_network", None)
    for base, file, words in (
        ("xl", "tiny", r"these are adapters of model=tiny; expected adapters of layers of this StableDiffusionXLP"),
        ("tiny", "xl", r"adapters of layers of this StableDiffusionPipeline"),
        ("tiny", "second", r"rows of its up projections are of layers that the model has not"),
        ("tiny", "deeper", r"'7\.attn1\.to_k'.* not found in the base model"),
        ("tiny", "text", "text.safetensors"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            LatentDiffusion.from_pretrained(tmp_path / base, lora=tmp_path / f"{file}.safetensors")
        assert f"{file}.safetensors" in str(refused.value)


def test_adapters_that_are_in_a_folder_are_not_added_again(tmp_path: Path) -> None:
    LatentDiffusion.build("tiny").save_pretrained(tmp_path)
    write(adapted("tiny", Lora()), tmp_path / WEIGHTS_NAME)
    shutil.copyfile(tmp_path / WEIGHTS_NAME, tmp_path / "copy.safetensors")
    for name in (WEIGHTS_NAME, "copy.safetensors"):
        with pytest.raises(UsageError, match=rf"lora=.*{name}: .* has these adapters already; leave lora out"):
            LatentDiffusion.from_pretrained(tmp_path, lora=tmp_path / name)


def test_targets_are_those_of_the_family_and_stars_are_numbers() -> None:
    model = LatentDiffusion.build("tiny", seed=1)
    assert Lora().of_family(model.family).target_modules == ("to_k", "to_q", "to_v", "to_out.0")
    assert Lora(target_modules=["to_q"]).of_family(model.family).target_modules == ["to_q"]
    module = SDLightningModule(model, lora=Lora(target_modules=["down_blocks.*.resnets.0.conv1", "mid_block.*.x"]))
    names = {key.partition(".lora_")[0] for key, _ in module.unet.named_parameters() if is_adapter(key)}  # type: ignore
    plain = LatentDiffusion.build("tiny", seed=1).denoiser
    wanted = {k for k, _ in plain.named_modules() if k.startswith("down_blocks") and k.endswith("resnets.0.conv1")}
    assert len(wanted) > 1 and names == wanted


def test_the_longest_pattern_gives_a_layers_rank_and_alpha(tmp_path: Path) -> None:
    ranks = {"attn1": 6, "down_blocks": 2, "up_blocks.*.attentions": 0, "mid_block.attentions.0.transformer_blocks": 5}
    lora = Lora(rank=3, alpha=4.5, rank_pattern=ranks, alpha_pattern={"attn1": 1.5, "text_encoder": 7})
    module = adapted("tiny", lora)
    layers = {k: m for k, m in module.unet.named_modules() if hasattr(m, "lora_A")}  # type: ignore[union-attr]
    assert layers and not any(key.startswith("up_blocks") for key in layers)
    for key, layer in layers.items():
        rank = 5 if key.startswith("mid_block") else 2 if key.startswith("down_blocks") else 6
        assert len(layer.lora_A.default.weight) == rank, key
        assert layer.scaling["default"] == (1.5 if "attn1" in key else 4.5) / rank, key
    for layer in (m for m in module.text_encoder.modules() if hasattr(m, "lora_A")):  # type: ignore[union-attr]
        assert (len(layer.lora_A.default.weight), layer.scaling["default"]) == (3, 7 / 3)  # type: ignore

    model = module.latent_diffusion
    base = LatentDiffusion.build("tiny", seed=1)
    write(module, tmp_path / WEIGHTS_NAME)
    pipeline: Any = base.pipeline()
    pipeline.load_lora_weights(tmp_path)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name in ("unet", "text_encoder"):
        theirs = getattr(pipeline, name).state_dict()
        for key, value in merged_state_dict(model.networks[name]).items():
            torch.testing.assert_close(theirs[key], value, atol=1e-6, rtol=1e-5)


def train(run_dir: Path, max_steps: int, base: Path, *, resume: Path | None = None, **options: Any) -> Path:
    """Train adapters of a pipeline, and return the last checkpoint."""
    deferred = options.pop("deferred", ("unet", "text_encoder", "text_encoder_2"))
    lora = Lora(**{"rank": 2, "alpha": 3, "dropout": 0.2} | options.pop("lora", {}))
    model = LatentDiffusion.from_pretrained(base, deferred=deferred)
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True, lora=lora)
    assert module.unet.conv_in.weight.is_meta == bool(deferred)  # type: ignore[union-attr]
    saving = small.Saving(run_dir, resume=resume)
    small.fit(module, small.data(), max_steps, EMA(0.9), saving, **options)
    assert saving.last_saved is not None
    return saving.last_saved


@pytest.mark.parametrize("architecture", ["tiny", SMALL_SDXL], ids=["tiny", "sdxl"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_adapters_of_weights_in_files_are_those_of_weights_in_memory(
    architecture: str | Architecture, precision: str, tmp_path: Path
) -> None:
    LatentDiffusion.build(architecture, seed=4).save_pretrained(tmp_path / "base")
    files = train(tmp_path / "files", 2, tmp_path / "base", precision=precision)
    memory = train(tmp_path / "memory", 2, tmp_path / "base", precision=precision, deferred=())
    small.assert_bitwise_equal(files, memory)
    weights = "unet/diffusion_pytorch_model.safetensors"
    kept, base = load_file(files / "pipeline" / weights), load_file(tmp_path / "base" / weights)
    assert all(torch.equal(kept[key], base[key]) for key in base), "not rounded to what the run computes in"


def test_a_full_disk_is_told_before_frozen_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    LatentDiffusion.build("tiny", seed=4).save_pretrained(tmp_path / "base")
    monkeypatch.setattr(checkpoint_pipeline, "write_streamed", full)
    with pytest.raises(UsageError, match="the disk is full"):
        train(tmp_path / "run", 1, tmp_path / "base")


def test_adapters_are_resumed_with_their_scale_on_their_weights(tmp_path: Path) -> None:
    """Neither shows in names or shapes. Dropout is a setting of the training, as the learning rate is."""
    base, other = tmp_path / "base", tmp_path / "other"
    LatentDiffusion.build("tiny", seed=4).save_pretrained(base)
    LatentDiffusion.build("tiny", seed=5).save_pretrained(other)
    first = train(tmp_path / "run", 1, base)
    with pytest.raises(UsageError, match=r"lora.alpha=5, but the checkpoint's run used lora.alpha=3, .*lora.alpha=3"):
        train(tmp_path / "next", 2, base, resume=first, lora={"alpha": 5})
    with pytest.raises(UsageError, match=r"frozen weights of text_encoder, unet are not those .* model.pretrained="):
        train(tmp_path / "next", 2, other, resume=first)
    assert not (tmp_path / "next").exists()
    changed = train(tmp_path / "run", 2, base, resume=first, lora={"alpha": 3.0, "dropout": 0.0, "seed": 9})
    straight = train(tmp_path / "straight", 2, base)
    assert stored(changed).keys() == stored(straight).keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank=0; expected at least 1, a whole number; write lora.rank=4"),
        ({"rank": "4"}, "rank='4'; expected at least 1, a whole number"),
        ({"alpha": 0}, "alpha=0; expected a number above 0; write lora.alpha=4"),
        ({"dropout": 1.0}, "dropout=1.0; expected a number in [0, 1); write lora.dropout=0"),
        ({"text_encoder_target_modules": []}, "lora.text_encoder_target_modules=[]: no layer has such a name"),
        ({"rank_pattern": {"to_q": 1.5}}, "rank_pattern={to_q:1.5}; expected a whole number, 0 to leave layers out"),
        ({"rank_pattern": {"attn3": 2}}, "'attn3' in its name; expected names or parts of them between dots, such as"),
        (
            {"alpha_pattern": {"attn1": 0}},
            "alpha_pattern={attn1:0}; expected a number above 0; write lora.alpha_pattern={",
        ),
        ({"rank_pattern": {"text_encoder": 0}}, "leaves out all layers of text_encoder; expected a rank above 0"),
        ({"target_modules": ["to_x"]}, "lora.target_modules=['to_x']"),
        ({"target_modules": ["norm1"]}, "lora.target_modules=['norm1']"),
        ({"text_encoder_target_modules": ["token_embedding"]}, "is a Embedding; expected endings of the names of"),
    ],
)
def test_impossible_adapters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        adapted("tiny", Lora(**options))
    assert words in str(refused.value)


def test_adapters_of_text_encoders_alone(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"target_modules=\[\] trains adapters of text encoders alone, and none is trained"
    ):
        SDLightningModule(LatentDiffusion.build("tiny"), lora=Lora(target_modules=[]))
    base = tmp_path / "base"
    LatentDiffusion.build("tiny", seed=4).save_pretrained(base)
    first = train(tmp_path / "run", 1, base, lora={"target_modules": []})
    last = train(tmp_path / "run", 2, base, resume=first, lora={"target_modules": []})
    straight = train(tmp_path / "straight", 2, base, lora={"target_modules": []})
    small.assert_bitwise_equal(last, straight)
    names = load_file(last / "pipeline" / WEIGHTS_NAME)
    assert names and all(name.startswith("text_encoder.") for name in names)
    weights = "unet/diffusion_pytorch_model.safetensors"
    kept, before = load_file(last / "pipeline" / weights), load_file(base / weights)
    assert all(torch.equal(kept[key], before[key]) for key in before)
    merged = train(tmp_path / "merged", 2, base, lora={"target_modules": [], "merge": True}) / "pipeline"
    assert not (merged / WEIGHTS_NAME).exists()
    ours, read = (
        LatentDiffusion.from_pretrained(each).networks["text_encoder"].state_dict()
        for each in (last / "pipeline", merged)
    )
    for key, value in ours.items():
        torch.testing.assert_close(value, read[key], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_text_encoders_alone_train_on_a_quantised_denoiser(base: Any, tmp_path: Path) -> None:
    LatentDiffusion.build("tiny", seed=4).save_pretrained(tmp_path / "base")
    last = train(tmp_path / "run", 2, tmp_path / "base", lora={"target_modules": [], "base": base})
    weights = "unet/diffusion_pytorch_model.safetensors"
    kept, before = load_file(last / "pipeline" / weights), load_file(tmp_path / "base" / weights)
    assert all(torch.equal(kept[key], before[key]) for key in before)


def test_a_refused_target_leaves_no_adapters() -> None:
    model = LatentDiffusion.build("tiny", seed=1)
    with pytest.raises(UsageError, match="norm1 is a LayerNorm"):
        SDLightningModule(model, lora=Lora(target_modules=["to_q", "norm1"]))
    assert not any(map(is_adapter, model.denoiser.state_dict()))


def test_a_model_with_adapters_trains_in_another_module() -> None:
    model, lora = LatentDiffusion.build("tiny", seed=1), Lora(rank=2)
    first = SDLightningModule(model, lora=lora)
    again = SDLightningModule(model, lora=lora)
    trained = [name for name, p in first.named_parameters() if p.requires_grad]
    assert trained and trained == [name for name, p in again.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("deferred", [[], ["all"]], ids=["whole", "deferred"])
def test_adapters_beside_int8_weights_are_refused(deferred: list[str], tmp_path: Path) -> None:
    write(adapted("tiny", Lora(target_modules=["to_q"])), tmp_path / WEIGHTS_NAME)
    quantize_(LatentDiffusion.build("tiny")).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"{WEIGHTS_NAME}: the weights of .* are in int8, to which adapters cannot"):
        LatentDiffusion.from_pretrained(tmp_path, deferred=deferred)


def test_a_divided_model_gets_no_adapters() -> None:
    model = quantize_(LatentDiffusion.build("tiny", device="meta"), tensor_parallel=TensorParallel(0, 2))
    with pytest.raises(UsageError, match=r"Lora\.apply_ got unet divided among processes"):
        Lora(target_modules=["to_q"]).apply_({"unet": model.denoiser})
