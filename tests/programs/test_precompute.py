"""`python -m sd_lightning.precompute`, and training on the store that it makes."""

import functools
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load
from transformers import CLIPTextModel

from places import SUPPORT
from sd_lightning import generate, precompute, train
from sd_lightning.apps.store_upkeep import verify
from sd_lightning.data.store.layout import Generation, Recipe
from small_store import write_photos, write_picture

SMALL = ["trainer.max_steps=6", "data.batch_size=16", "data.num_workers=0", "callbacks.samples=null", "logger=csv"]


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, precompute)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of 20 pictures of 40 x 32 pixels."""
    return write_photos(tmp_path / "photos")


def of(photos: Path, *more: str) -> list[str]:
    return ["data=images", f"data.train_data_dir={photos}", "data.resolution=32", "data.center_crop=true", *more]


def losses(run: Path) -> list[float]:
    import csv

    with open(next(run.rglob("metrics.csv"))) as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def files(store: Path) -> dict[str, bytes]:
    found = sorted(path for path in store.rglob("*.safetensors"))
    return {str(path.relative_to(store)): path.read_bytes() for path in found}


def test_training_on_a_store_is_training_with_cached_latents(
    cli: Any, call_main: Any, photos: Path, tmp_path: Path
) -> None:
    code, out = cli(*of(photos, "store=latents", "dtype=float32", "workers=1"))
    assert code == 0
    assert "train 19, val 1" in out and "19 added" in out.replace("20 added", "19 added")
    assert out.splitlines()[-1] == "train on it: python -m sd_lightning.train data=latents data.store=latents"
    for name, data in (
        ("cached", of(photos, "data.cache_latents=true")),
        ("stored", ["data=latents", "data.store=latents"]),
    ):
        code, out = call_main(train, *data, *SMALL, f"output_dir=runs/{name}", "trainer.log_every_n_steps=1")
        assert code == 0, out
    ours, theirs = losses(tmp_path / "runs/stored"), losses(tmp_path / "runs/cached")
    assert len(ours) == 6 and ours == theirs


def test_training_precompute_and_generate_compute_frozen_float32_networks_exactly(
    cli: Any, call_main: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 is allowed around them: by torch in convolutions, and by the run for the denoiser."""
    seen: list[tuple[str, str, bool]] = []

    def noting(network: Any, method: str) -> None:
        plain = getattr(network, method)

        def noted(network: Any, *args: Any, **kwargs: Any) -> Any:
            if not next(network.parameters()).is_meta:  # not a forecast
                seen.append((method, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            return plain(network, *args, **kwargs)

        monkeypatch.setattr(network, method, noted)

    noting(AutoencoderKL, "encode")
    noting(AutoencoderKL, "decode")
    noting(CLIPTextModel, "forward")
    training = [*SMALL, "trainer.max_steps=1", "speed.allow_tf32=true", "module.train_text_encoder=false"]
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for program, arguments, methods in (
            (precompute, of(photos, "store=latents", "workers=1", "text=true"), {"encode", "forward"}),
            (train, of(photos, *training), {"encode", "forward"}),
            (generate, ["run=runs/tiny-images", "prompts=[a]", "num_inference_steps=1"], {"forward", "decode"}),
        ):
            seen.clear()
            code, out = call_main(program, *arguments)
            assert code == 0, out
            assert {method for method, *_ in seen} >= methods, program
            assert {(precision, tf32) for _, precision, tf32 in seen} == {("highest", False)}, program
        assert torch.backends.cudnn.allow_tf32, "the setting of the run is back"
    finally:
        torch.set_float32_matmul_precision(settings[0])
        torch.backends.cudnn.allow_tf32 = settings[1]


def test_several_workers_write_the_same_bytes_as_one(cli: Any, photos: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        assert cli(*of(photos, f"store=by-{workers}", f"workers={workers}", "shard_mb=0.005"))[0] == 0
    assert files(tmp_path / "by-1") == files(tmp_path / "by-3") and len(files(tmp_path / "by-1")) > 6


@pytest.mark.slow
def test_workers_that_are_spawned_as_on_cuda_write_the_same_bytes(
    cli: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = of(photos, "shard_mb=0.005", "text=true")
    assert cli(*command, "store=here", "workers=1")[0] == 0
    get_context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: get_context("spawn"))
    code, out = cli(*command, "store=spawned", "workers=2")
    assert code == 0, out
    assert files(tmp_path / "here") == files(tmp_path / "spawned")


@pytest.mark.gpu
def test_a_gpu_encodes_as_the_cpu_does(cli: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = of(photos, "dtype=float32", "text=true", "data.num_val_samples=0", "workers=auto")
    assert cli(*command, "store=gpu")[0] == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli(*command, "store=cpu")[0] == 0
    ours, theirs = ({name: load(data) for name, data in files(tmp_path / store).items()} for store in ("gpu", "cpu"))
    assert ours.keys() == theirs.keys()
    for name, file in theirs.items():
        torch.testing.assert_close(ours[name], file, rtol=1e-3, atol=1e-3)


def test_a_second_job_encodes_only_what_is_new_and_prune_frees_the_rest(cli: Any, photos: Path, tmp_path: Path) -> None:
    command = of(photos, "store=latents", "workers=1", "shard_mb=0.002", "data.num_val_samples=0")
    cli(*command)
    _, out = cli(*command)
    assert "20 kept, 0 added, 0 removed" in out and "0 images encoded" in out
    write_picture(photos, "new", colour=3)
    (photos / "07.png").unlink()
    _, out = cli(*command)
    assert "19 kept, 1 added, 1 removed" in out and "1 images encoded" in out
    before = files(tmp_path / "latents")
    _, out = cli("prune", "store=latents")
    assert "would be freed; to do it: python -m sd_lightning.precompute prune store=latents dry_run=false" in out
    assert files(tmp_path / "latents") == before
    _, out = cli("prune", "store=latents", "dry_run=false")
    assert "are freed" in out
    assert sum(map(len, files(tmp_path / "latents").values())) < sum(map(len, before.values()))
    assert "20 kept, 0 added" in cli(*command)[1]
    assert cli("verify", "store=latents")[1].endswith("all files are what was written\n")


def test_an_altered_file_is_found_and_made_again(
    cli: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = of(photos, "store=latents", "workers=1", "shard_mb=0.002", "data.num_val_samples=0")
    cli(*command)
    whole = files(tmp_path / "latents")
    path = next((tmp_path / "latents").rglob("latents/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-30] ^= 255
    path.write_bytes(data)
    assert verify("latents", dry_run=True) == 1 and path.exists()
    assert "1 broken and 0 missing files; delete the broken ones with" in capsys.readouterr().out
    assert cli("verify", "store=latents", "dry_run=false")[0] == 1 and not path.exists()
    assert verify("latents", dry_run=True) == 1
    out = capsys.readouterr().out
    assert f"/latents/{path.name}: it is not there, although samples need it\n" in out
    assert out.endswith("0 broken and 1 missing files; run precompute again, which encodes only what is missing\n")
    samples = next((tmp_path / "latents").rglob("samples/*.safetensors"))
    samples.unlink()
    assert verify("latents", dry_run=True) == 1
    assert f"/samples/{samples.name}: it is not there" in capsys.readouterr().out
    cli(*command)
    assert (
        files(tmp_path / "latents").items()
        >= {
            path.relative_to(tmp_path / "latents").as_posix(): whole[path.relative_to(tmp_path / "latents").as_posix()]
        }.items()
    )
    assert cli("workers=1", "verify", "store=latents")[0] == 0, "settings may stand before the action"


def test_variants_serve_a_random_crop(cli: Any, call_main: Any, photos: Path) -> None:
    crop = ["data.center_crop=false", "data.random_flip=true"]
    assert cli(*of(photos)[:-1], *crop, "variants=3", "store=latents", "workers=1")[0] == 0
    data = ["data=latents", "data.store=latents", "data.center_crop=false", "data.random_flip=true"]
    assert call_main(train, *data, *SMALL, "output_dir=runs/random")[0] == 0


@pytest.mark.holds("stores", of="tiny")
def test_buckets_are_stored_and_trained_on(cli: Any, call_main: Any, photos: Path, tmp_path: Path) -> None:
    for i in range(8):
        write_picture(photos, f"tall-{i}", colour=i)
        Image.new("RGB", (20, 60), (i, 2 * i, 3 * i)).save(photos / f"tall-{i}.png")
    buckets = [f"data.{name}" for name in ("enable_bucket=true", "min_bucket_reso=16", "max_bucket_reso=64")]
    code, out = cli(*of(photos, "store=latents", *buckets, "data.bucket_reso_steps=8", "workers=1"))
    assert code == 0 and "data.enable_bucket=true (" in out and "27 added" in out.replace("28 added", "27 added")
    data = ["data=latents", "data.store=latents", "data.drop_last=false"]
    assert call_main(train, *data, *SMALL, "output_dir=runs/buckets", "trainer.max_steps=8")[0] == 0


def refused(answer: tuple[int, str]) -> str:
    """Return the message of a refusal."""
    code, error = answer
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    return error


def test_refusals_of_precompute(cli: Any, photos: Path, tmp_path: Path) -> None:
    for given, words in (
        (["store=latents", "variants=2"], "variants=2, but every encoding of an image is the same"),
        (["store=latents", "dtype=int8"], "dtype=int8"),
        (["store=latents", "workers=0"], "workers=0; expected auto, or 1 or more"),
        (["store=latents", "shard_mb=0"], "shard_mb=0"),
        (["store=ftp://somewhere"], "ftp:// is not known"),
        (["store=latents", "data.caption_prefix=sks"], "data.caption_prefix=sks, which a store does not hold; give it"),
        (["store=latents", "data.enable_wildcard=true"], "data.enable_wildcard=true, which a store does not hold"),
        ([], "store has no value"),
    ):
        assert words in refused(cli(*of(photos), *given))
    assert "no latent store" in refused(cli("prune", "store=nothing"))
    photo = ["data=dreambooth", f"data.instance_data_dir={photos}", "store=latents", "data.resolution=32"]
    pairs = ["data.class_prompts=[a picture]", f"data.class_data_dir={photos}"]
    assert "pictures of its class" in refused(cli(*photo, *pairs))
    assert not (tmp_path / "latents").exists()


def test_refusals_of_training_on_a_store(cli: Any, call_main: Any, photos: Path, tmp_path: Path) -> None:
    training = functools.partial(call_main, train, "data=latents", "data.store=latents", *SMALL)
    assert "there is no latent store" in refused(training())
    cli(*of(photos, "store=latents", "workers=1"))
    for given, words in (
        ("data.resolution=64", "no recipes for data.resolution=64"),
        ("data.center_crop=false", "run precompute with data.center_crop=false variants=4"),
        ("data.random_flip=true", "run precompute with data.random_flip=true variants=4"),
        ("data.enable_bucket=true", "run precompute with data.enable_bucket=true\n"),
    ):
        assert words in refused(training(given))
    cli(*of(photos, "store=latents", "workers=1", "dtype=bfloat16"))
    assert "has 2 recipes" in refused(training())
    chosen = next((tmp_path / "latents/recipes").iterdir())
    choice = f"data.recipe={chosen.stem[:6]}"
    assert training(choice, "output_dir=runs/chosen")[0] == 0
    recipe = json.loads(chosen.read_text())
    for change, words in (
        ({"vae": "0" * 32}, "was made with another VAE"),
        ({"family": "OtherPipeline"}, "was made for a OtherPipeline, but model= is a StableDiffusionPipeline"),
    ):
        other = Recipe(**recipe | change)
        (tmp_path / "latents" / "recipes" / f"{other.fingerprint}.json").write_text(other.to_json())
        shutil.copytree(tmp_path / "latents" / chosen.stem, tmp_path / "latents" / other.fingerprint)
        assert words in refused(training(f"data.recipe={other.fingerprint}"))
    generation = next((tmp_path / "latents" / chosen.stem).rglob("generations/*.json"))
    generation.write_text(Generation(1).to_json())
    assert "has no samples to train on" in refused(training(choice))


@pytest.mark.full("kills")
@pytest.mark.parametrize("workers", [1, 3])
def test_killed_twenty_times_it_writes_what_an_undisturbed_job_writes(
    workers: int, tmp_path: Path, run_python: Any
) -> None:
    """Each job is killed with its workers at a random time; at most one file per worker is made again."""
    done = run_python(SUPPORT / "killed_precompute.py", tmp_path, str(workers), "20", timeout=600, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["killed"] == 20
    assert 0 < counts["most_cut_off"] <= workers and counts["encoded_again"] == 0
    undisturbed = files(tmp_path / "undisturbed")
    assert len(undisturbed) > 20
    for number in range(counts["stores"]):
        assert files(tmp_path / f"disturbed-{number}") == undisturbed
