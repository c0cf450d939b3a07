"""Frozen encoders: outside the trained module, exact whatever surrounds them, and the same cached or on the fly."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import sd_lightning.models.encoder as encoder_module
import small_training
from host_waits import DEVICE, HostWaits
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.data.transform import place, to_model_range
from sd_lightning.diffusion.randomness import Purpose, normal
from sd_lightning.models.components import load_network
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families import Component
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.models.tf32 import products_of
from shaped_data import picture
from small_models import SMALL_SDXL

ARCHITECTURES = {"sd": "tiny", "sdxl": SMALL_SDXL}
ENCODERS = {"sd": {"text_encoder"}, "sdxl": {"text_encoder", "text_encoder_2"}}


@pytest.fixture(scope="module")
def tiny() -> LatentDiffusion:
    return LatentDiffusion.build("tiny")


def digits(num: int = 6) -> dict[str, Any]:
    """A batch as the data module makes it."""
    source = small_training.data().source_train
    images = np.stack([np.asarray(source.image(i).resize((32, 32))) for i in range(num)])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    return {
        "pixel_values": pixels / 127.5 - 1,
        "epoch": torch.arange(num) % 2,
        "index": torch.arange(num) * 7,
        "original_size": torch.full((num, 2), 8),
        "crop_top_left": torch.zeros(num, 2, dtype=torch.int64),
        "target_size": torch.full((num, 2), 32),
    }


def with_tokens(model: LatentDiffusion, batch: dict[str, Any]) -> dict[str, Any]:
    captions = [f"a handwritten {n}" for n in ("one", "two", "three", "four", "five", "six")]
    return {**batch, "input_ids": model.tokenize(captions[: len(batch["index"])])}


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested dictionary, in order."""
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors(part)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_module_holds_the_trained_networks_only(family: str, train_text_encoder: bool) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    module = SDLightningModule(model, train_text_encoder=train_text_encoder)
    trained = {"unet"} | (ENCODERS[family] if train_text_encoder else set())
    assert module.trained_networks().keys() == trained
    expected = {f"{n}.{key}": value for n in trained for key, value in model.networks[n].state_dict().items()}
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(state[key].data_ptr() == expected[key].data_ptr() for key in state)
    parameters = {id(p) for p in module.parameters()}
    assert parameters == {id(p) for n in trained for p in model.networks[n].parameters()}
    for name, network in model.networks.items():
        assert network.training == (name in trained)
        assert any(p.requires_grad for p in network.parameters()) == (name in trained)


def test_frozen_encoders_stay_in_evaluation_mode_when_the_module_trains() -> None:
    module = SDLightningModule(LatentDiffusion.build("tiny"))
    module.train()
    assert not any(network.training for network in module.encoder.networks)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_encoders_compute_in_float32_without_gradients_inside_autocast(family: str) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    encoder = LatentEncoder(model)
    batch = with_tokens(model, digits())
    outside = encoder(batch, seed=0)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        inside = encoder(batch, seed=0)
    for ours, theirs in zip(tensors(inside), tensors(outside), strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
    for produced in (inside["latents"], *tensors(inside["conditioning"])):
        assert produced.dtype == torch.float32


@pytest.mark.parametrize("force_upcast", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_vae_that_overflows_in_float16_stays_in_float32(dtype: Any, force_upcast: bool) -> None:
    model = LatentDiffusion.build("tiny")
    model.vae.register_to_config(force_upcast=force_upcast)
    LatentEncoder(model, dtype=dtype).to(torch.device("cpu"))
    kept = dtype == "float16" and force_upcast
    assert model.vae.dtype == (torch.float32 if kept else getattr(torch, dtype))
    assert model.text_encoders["text_encoder"].dtype == getattr(torch, dtype)
    assert model.denoiser.dtype == torch.float32


def test_vae_built_from_a_configuration_without_the_key_is_as_careful_as_a_loaded_one() -> None:
    model = LatentDiffusion.build(SMALL_SDXL)
    assert "force_upcast" not in model.components["vae"].config
    LatentEncoder(model, dtype="float16").to(torch.device("cpu"))
    assert model.vae.dtype == torch.float32  # diffusers' default is force_upcast=True


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_encoders_give_float32_close_to_the_exact_values(dtype: Any) -> None:
    exact_model, model = LatentDiffusion.build("tiny"), LatentDiffusion.build("tiny")
    model.vae.register_to_config(force_upcast=False)
    encoder = LatentEncoder(model, dtype=dtype).to(torch.device("cpu"))
    batch = with_tokens(model, digits())
    exact = LatentEncoder(exact_model)(batch, seed=0)
    half = encoder(batch, seed=0)
    for ours, theirs in zip(
        [half["latents"], *tensors(half["conditioning"])], [exact["latents"], *tensors(exact["conditioning"])]
    ):
        assert ours.dtype == torch.float32
        error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert 0 < error < 0.03


def test_moments_are_those_of_diffusers_posterior(tiny: LatentDiffusion) -> None:
    encoder, batch = LatentEncoder(tiny), digits()
    moments = encoder.encode_moments(batch["pixel_values"])
    with torch.no_grad():
        posterior = tiny.vae.encode(batch["pixel_values"]).latent_dist
    assert moments.shape == (6, 8, 8, 8)
    assert torch.equal(moments, posterior.parameters)


def test_latents_are_scaled_draws_from_the_posterior(tiny: LatentDiffusion) -> None:
    encoder, batch = LatentEncoder(tiny), digits()
    # Variances from tiny to large: those of a trained VAE are too small to tell a wrong formula.
    mean, log_variance = encoder.encode_moments(batch["pixel_values"]).chunk(2, dim=1)
    moments = torch.cat([mean, torch.linspace(-40, 4, mean.numel()).view_as(log_variance)], dim=1)
    posterior = DiagonalGaussianDistribution(moments)
    noise = normal(5, batch["epoch"], batch["index"], Purpose.VAE_SAMPLE, (4, 8, 8))
    expected = (posterior.mean + posterior.std * noise) * tiny.vae.config.scaling_factor
    latents = encoder.latents(moments, seed=5, epoch=batch["epoch"], index=batch["index"])
    torch.testing.assert_close(latents, expected, rtol=1e-6, atol=1e-6)


def test_latents_of_the_digits_have_unit_variance(tiny: LatentDiffusion) -> None:
    batch = digits(32)
    encoder = LatentEncoder(tiny)
    latents = encoder.latents(
        encoder.encode_moments(batch["pixel_values"]), seed=0, epoch=batch["epoch"], index=batch["index"]
    )
    assert latents.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.1)


def test_draw_belongs_to_the_sample_and_not_to_its_batch(tiny: LatentDiffusion) -> None:
    encoder, batch = LatentEncoder(tiny), digits()
    moments = encoder.encode_moments(batch["pixel_values"])

    def draw(rows: list[int], *, seed: int = 1, epoch: int = 0) -> Tensor:
        return encoder.latents(moments[rows], seed=seed, epoch=batch["epoch"][rows] + epoch, index=batch["index"][rows])

    together = draw([0, 1, 2, 3, 4, 5])
    assert torch.equal(draw([4, 1]), together[[4, 1]])
    assert torch.equal(torch.cat([draw([i]) for i in range(6)]), together)
    for other in (draw([0, 1, 2, 3, 4, 5], seed=2), draw([0, 1, 2, 3, 4, 5], epoch=2)):
        assert (other != together).flatten(1).any(1).all()


def test_cached_moments_give_the_latents_of_encoding_on_the_fly(tiny: LatentDiffusion) -> None:
    encoder = LatentEncoder(tiny, train_text_encoder=True)
    batch = digits()
    cached = {k: v for k, v in batch.items() if k != "pixel_values"}
    cached["latent_moments"] = encoder.encode_moments(batch["pixel_values"])
    on_the_fly = encoder(batch, seed=3)
    assert torch.equal(encoder(cached, seed=3)["latents"], on_the_fly["latents"])
    assert "pixel_values" not in on_the_fly and "latent_moments" not in on_the_fly
    assert "pixel_values" in batch  # the caller's batch is left as it was


class KeepLatents(Callback):
    def __init__(self) -> None:
        self.latents: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.latents.append(batch["latents"])


def test_a_run_with_cached_latents_sees_the_latents_of_a_run_without() -> None:
    seen = []
    for cache_latents in (True, False):
        keep = KeepLatents()
        small_training.fit(small_training.module(), small_training.data(cache_latents=cache_latents), 6, keep)
        seen.append(torch.stack(keep.latents))
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-5)  # encoded in other batches


@pytest.mark.parametrize(("side", "calls"), [(512, [4, 1]), (1024, [1, 1, 1, 1, 1])])
def test_large_images_are_encoded_a_few_at_a_time(
    side: int, calls: list[int], tiny: LatentDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def encode(pixels: Tensor) -> SimpleNamespace:
        found.append(len(pixels))
        return SimpleNamespace(latent_dist=SimpleNamespace(parameters=pixels[:, :, :1, :1]))

    monkeypatch.setattr(tiny.vae, "encode", encode)
    pixels = torch.arange(5.0)[:, None, None, None].expand(5, 3, side, side)
    assert LatentEncoder(tiny).encode_moments(pixels)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert found == calls


def test_moments_do_not_depend_on_how_many_images_are_encoded_at_a_time(
    tiny: LatentDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = digits()["pixel_values"]
    together = LatentEncoder(tiny).encode_moments(pixels)
    monkeypatch.setattr("sd_lightning.models.encoder._PIXELS_PER_CALL", 4 * 32 * 32)
    torch.testing.assert_close(LatentEncoder(tiny).encode_moments(pixels), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_validation_batch_gets_the_conditioning_of_the_wrong_captions_too(family: str) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    encoder = LatentEncoder(model)
    batch = with_tokens(model, digits())
    encoded = encoder(
        {**batch, "wrong_input_ids": {n: ids.roll(1, 0) for n, ids in batch["input_ids"].items()}}, seed=0
    )
    right, wrong = (encoded[key]["encoder_hidden_states"] for key in ("conditioning", "wrong_conditioning"))
    torch.testing.assert_close(wrong, right.roll(1, 0), rtol=0, atol=1e-6)
    assert (wrong != right).flatten(1).any(1).all()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_stored_embeddings_take_the_place_of_token_ids(family: str) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    encoder = LatentEncoder(model)
    batch = with_tokens(model, digits())
    batch["wrong_input_ids"] = {name: ids.roll(1, 0) for name, ids in batch["input_ids"].items()}
    stored = {f"{prefix}text_embeddings": encoder.embed(batch[f"{prefix}input_ids"]) for prefix in ("", "wrong_")}
    expected = encoder(batch, seed=0)
    del batch["input_ids"]
    found = encoder({**batch, **stored}, seed=0)
    assert found.keys() == expected.keys() - {"input_ids"}
    for key in ("conditioning", "wrong_conditioning"):
        for ours, theirs in zip(tensors(found[key]), tensors(expected[key]), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [lambda batch: batch, lambda batch: {**batch, "wrong_input_ids": batch["input_ids"]}])
def test_trained_text_encoder_is_left_to_the_trainer(
    tiny: LatentDiffusion, make: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    batch = make(with_tokens(tiny, digits()))
    encoded = LatentEncoder(tiny, train_text_encoder=True)(batch, seed=0)
    assert encoded.keys() == (batch.keys() - {"pixel_values"}) | {"latents"}
    assert encoded["input_ids"] is batch["input_ids"]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_offloaded_encoders_encode_the_same_and_each_caption_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    batch = with_tokens(model, digits())
    for ids in batch["input_ids"].values():
        ids[3:] = ids[:3]  # three captions, twice each
    batch["original_size"][5] = 9  # which SDXL is conditioned on, too
    batch["wrong_input_ids"] = {name: ids.flip(0) for name, ids in batch["input_ids"].items()}
    expected = LatentEncoder(model)(batch, seed=1)
    encoder = LatentEncoder(model, offload=True).to(torch.device("cpu"))
    encoded: list[int] = []
    embed = model.family.embed
    monkeypatch.setattr(
        model.family,
        "embed",
        lambda encoders, ids: encoded.append(len(ids["text_encoder"])) or embed(encoders, ids),
    )
    for _ in range(2):
        found = encoder(batch, seed=1)
        for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert sum(encoded) == 3, "captions, in both batches together"


def test_copies_of_offloaded_encoders_come_to_the_device_and_nothing_is_copied_back(
    monkeypatch: pytest.MonkeyPatch, tiny: LatentDiffusion
) -> None:
    encoder = LatentEncoder(tiny, offload=True).to(torch.device("cpu"))
    batch = with_tokens(tiny, digits())
    expected = encoder(batch, seed=1)
    encoder._captions.clear()
    encoder.device = DEVICE
    networks = {name: tiny.networks[name] for name in ("vae", "text_encoder")}
    home = [tensor.data_ptr() for network in networks.values() for tensor in network.state_dict().values()]
    seen: dict[str, set[torch.device]] = {}
    encode, embed = tiny.family.encode, tiny.family.embed

    def note() -> None:
        for name, network in networks.items():
            seen.setdefault(name, set()).update(tensor.device for tensor in network.state_dict().values())

    monkeypatch.setattr(tiny.family, "encode", lambda *given: (note(), encode(*given))[1])
    monkeypatch.setattr(tiny.family, "embed", lambda *given: (note(), embed(*given))[1])
    waits = HostWaits()
    with waits.counting(), torch.inference_mode():
        with waits.paused():
            there = {k: v.to(DEVICE, copy=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
        found = encoder(there, seed=1)
        assert {tensor.device for n in networks.values() for tensor in n.state_dict().values()} == {torch.device("cpu")}
    assert all(devices == {DEVICE, torch.device("cpu")} for devices in seen.values()), "one at a time"
    assert not [place for place in waits.places if "encoder.py" in place.split(" < ")[0]], waits.places
    assert home == [tensor.data_ptr() for network in networks.values() for tensor in network.state_dict().values()]
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_offloaded_encoders_are_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``to`` does for CUDA; pinning itself is pretended."""
    model = LatentDiffusion.build("tiny")
    before = {name: value.clone() for name, value in model.vae.state_dict().items()}
    asked: list[tuple[Any, torch.dtype]] = []

    def pinned(shapes: list[torch.Size], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        asked.extend((shape, dtype) for shape in shapes)
        return [torch.empty(shape, dtype=dtype) for shape in shapes]

    monkeypatch.setattr(encoder_module, "host_memory", pinned)
    monkeypatch.setattr(encoder_module, "streams_of", lambda device: torch.cuda)
    LatentEncoder(model, offload=True).to(torch.device("cpu"))
    ours = [
        (t.shape, t.dtype) for n in (model.vae, *model.text_encoders.values()) for t in (*n.parameters(), *n.buffers())
    ]
    assert sorted(map(str, asked)) == sorted(map(str, ours))
    assert all(torch.equal(value, before[name]) for name, value in model.vae.state_dict().items())
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    LatentEncoder(model, offload=True).to(torch.device("cpu"))
    assert len(asked) == len(ours), "nothing is copied again"


@pytest.mark.gpu
def test_nothing_of_offloaded_encoders_stays_on_the_gpu(tiny: LatentDiffusion) -> None:
    encoder = LatentEncoder(tiny, offload=True).to(torch.device("cuda"))
    batch = with_tokens(tiny, digits())
    encoder(map_conditioning(batch, Tensor.cuda), seed=1)
    assert {p.device.type for network in encoder.networks for p in network.parameters()} == {"cpu"}


def test_a_run_with_offloaded_encoders_trains_alike() -> None:
    losses = []
    for offload in (False, True):
        module = small_training.module(train_text_encoder=False, offload_encoders=offload)
        trainer = small_training.fit(module, small_training.data(), 3)
        losses.append(float(module.last_loss))  # type: ignore[arg-type]
        module.sample("a handwritten two", num_inference_steps=1)
        assert trainer.global_step == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_images_of_any_shape_are_encoded_as_diffusers_does(family: str) -> None:
    model = LatentDiffusion.build(ARCHITECTURES[family])
    images = picture(9), picture(10)  # 40 x 90, in the bucket of 24 x 40
    pixels = [to_model_range(torch.from_numpy(place(image, (24, 40)).pixels.copy())[None]) for image in images]
    sizes = {"original_size": [40, 90], "crop_top_left": [0, 7], "target_size": [24, 40]}
    batch = {
        "pixel_values": torch.cat(pixels),
        "epoch": torch.tensor([0, 1]),
        "index": torch.tensor([5, 6]),
        **{name: torch.tensor([size, size]) for name, size in sizes.items()},
    }
    ours = LatentEncoder(model)(with_tokens(model, batch), seed=3)
    with torch.no_grad():
        theirs = model.vae.encode(torch.cat(pixels)).latent_dist
    noise = normal(3, batch["epoch"], batch["index"], Purpose.VAE_SAMPLE, (4, 6, 10))
    expected = (theirs.mean + theirs.std * noise) * model.vae.config.scaling_factor
    assert ours["latents"].shape == (2, 4, 6, 10) and torch.allclose(ours["latents"], expected, atol=1e-6)
    if family == "sdxl":  # StableDiffusionXLPipeline adds original size, crop and target size in this order
        assert (
            ours["conditioning"]["added_cond_kwargs"]["time_ids"].tolist() == [[40.0, 90.0, 0.0, 7.0, 24.0, 40.0]] * 2
        )


def test_tf32_is_switched_off_beside_torchs_newer_settings_too() -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with products_of(torch.float32):
            assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
        assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", before[1])
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


def test_cached_captions_take_no_more_than_their_bytes_and_the_oldest_go_first(
    tiny: LatentDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LatentEncoder(tiny, offload=True).to(torch.device("cpu"))
    captions = [f"a handwritten {i}" for i in range(5)]
    right = encoder.embed(tiny.tokenize(captions))
    row = sum(each[0].nbytes for each in tensors(right))
    encoder = LatentEncoder(tiny, offload=True).to(torch.device("cpu"))
    monkeypatch.setattr(encoder_module, "CACHED_CAPTIONS_BYTES", 3 * row)
    encoded: list[int] = []
    embed = tiny.family.embed
    monkeypatch.setattr(
        tiny.family, "embed", lambda parts, ids: (encoded.append(len(ids["text_encoder"])), embed(parts, ids))[1]
    )
    for wanted, new in (([0, 1, 2], 3), ([0], 0), ([3], 1), ([0, 2, 3], 0), ([1], 1), ([0, 1, 2, 3, 4, 4], 2)):
        encoded.clear()
        found = encoder.embed(tiny.tokenize([captions[i] for i in wanted]))
        assert sum(encoded) == new, wanted
        for ours, theirs in zip(tensors(found), tensors(right), strict=True):
            assert torch.allclose(ours, theirs[wanted], atol=1e-5)
        assert sum(each.nbytes for kept in encoder._captions.values() for each in tensors(kept)) <= 3 * row
        assert encoder._cached_bytes == row * len(encoder._captions)


def test_language_models_are_never_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read as they were saved and cast a weight at a time; rotary frequencies keep their precision."""
    component = Component(
        "transformers",
        "Qwen3Model",
        {"vocab_size": 64, "hidden_size": 3072, "intermediate_size": 3072, "num_hidden_layers": 1, "head_dim": 64}
        | {"num_attention_heads": 48, "num_key_value_heads": 48},
    )  # weights of more than 32 MB in float32: the C library gives freed ones back at once
    saved = component.instantiate(seed=0).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "text_encoder")  # type: ignore[operator]
    num_bytes = sum(each.nbytes for each in saved.parameters())

    def peak(work: Callable[[], Any]) -> tuple[Any, int]:
        Path("/proc/self/clear_refs").write_text("5")
        before = int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
        found = work()
        after = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
        return found, (after - before) * 1024

    (read, _), took = peak(lambda: load_network(component, tmp_path / "text_encoder", as_saved=True))
    assert {each.dtype for each in read.parameters()} == {torch.bfloat16} and num_bytes > 1e8
    assert took < 1.5 * num_bytes, "in float32 alone it is twice as much"
    whole, _ = load_network(component, tmp_path / "text_encoder")
    assert {each.dtype for each in whole.parameters()} == {torch.float32}
    model = LatentDiffusion.build("tiny")
    model.networks["text_encoder"] = whole
    encoder = LatentEncoder(model, dtype="bfloat16")
    _, took = peak(lambda: encoder.to(torch.device("cpu")))
    assert took < 0.5 * num_bytes, "a weight at a time"
    for ours, theirs in zip(whole.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert whole.rotary_emb.inv_freq.dtype == torch.float32
    plain = component.instantiate(seed=0)
    assert torch.equal(whole.rotary_emb.inv_freq, plain.rotary_emb.inv_freq)  # type: ignore[union-attr]
