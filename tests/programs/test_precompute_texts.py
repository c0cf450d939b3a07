"""`python -m sd_lightning.precompute` with text embeddings."""

import csv
import functools
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning import precompute, train
from sd_lightning.apps.precompute import predicted_texts
from sd_lightning.data.source import Source
from sd_lightning.data.store.texts import TextEncoder, Tokenizing
from sd_lightning.models.families.stable_diffusion import StableDiffusion
from sd_lightning.storage.object_store import open_location
from small_store import tokenize


class PlainEncoder:
    def embed(self, input_ids: Any) -> dict[str, Any]:
        return {"hidden": input_ids["text_encoder"][:, :, None].expand(-1, -1, 8).float()}


class Captions:
    """A source of captions alone."""

    def __init__(self, captions: list[list[str]]) -> None:
        self.all = captions

    def __len__(self) -> int:
        return len(self.all)

    def captions(self, index: int) -> list[str]:
        return self.all[index]


SMALL = ["trainer.max_steps=4", "data.batch_size=8", "data.num_workers=0", "callbacks.samples=null", "logger=csv"]


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Call precompute on a folder of 20 pictures."""
    (tmp_path / "photos").mkdir()
    for i in range(20):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{i:02}.png")
        (tmp_path / f"photos/{i:02}.txt").write_text(f"{i} pictures")
    return functools.partial(call_main, precompute)


DATA = ["data=images", "data.train_data_dir=photos", "data.resolution=32", "data.center_crop=true"]


def metrics(run: Path) -> dict[str, list[float]]:
    """Return the values of each metric in their order."""
    with open(next(run.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    names = ("train/loss", "val/loss", "val/caption_gap")
    return {name: [float(row[name]) for row in rows if row.get(name)] for name in names}


def texts(store: Path) -> dict[str, bytes]:
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in sorted(store.rglob("texts/*/*"))}


def test_training_on_embeddings_is_training_on_captions(
    cli: Any, call_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = [*DATA, "store=latents", "dtype=float32", "shard_mb=0.005", "workers=1", "data.num_val_samples=6"]
    assert cli(*command)[0] == 0 and not texts(tmp_path / "latents")
    training = [
        "data=latents",
        "data.store=latents",
        *SMALL,
        "module.train_text_encoder=false",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=2",
    ]
    code, out = call_main(train, *training, "output_dir=runs/captions")
    assert code == 0, out
    assert "captions are encoded in every step" in caplog.text

    code, out = cli(*command, "text=true")
    assert code == 0, out
    assert "20 kept, 0 added" in out and "texts: 21 different captions encoded" in out
    assert "2048 bytes of text embeddings for each of 21 different captions: 4.3e-05 GB more" in out
    size = sum(map(len, texts(tmp_path / "latents").values()))
    assert 21 * 2048 < size < 21 * 2048 * 1.3
    assert "texts: 0 different captions encoded" in cli(*command, "text=true")[1]

    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(StableDiffusion, "embed", lambda *_: pytest.fail("a caption was encoded"))
        code, out = call_main(train, *training, "output_dir=runs/texts")
    assert code == 0, out
    assert "stored text embeddings are used" in caplog.text
    ours, theirs = metrics(tmp_path / "runs/texts"), metrics(tmp_path / "runs/captions")
    for name, values in theirs.items():  # on some CPUs, a row of a product depends on the number of rows
        assert values and ours[name] == pytest.approx(values, abs=1e-5), name

    caplog.clear()
    code, out = call_main(train, *training, "module.train_text_encoder=true", "output_dir=runs/trained")
    assert code == 0, out
    assert "the text encoders are trained" in caplog.text
    training.append("data.tag_separator=p")  # "7 pictures"
    assert call_main(train, *training, "data.tag_dropout=0.5", "module.train_text_encoder=true", "output_dir=t")[0] == 0
    code, out = call_main(train, *training, "data.shuffle_tags=true", "output_dir=runs/shuffled")
    assert code == 2 and "data.shuffle_tags=true changes captions, and this store has the text encoders' output" in out
    assert "train on another store, made with text=false" in out


def test_several_workers_write_the_same_embeddings_as_one(cli: Any, tmp_path: Path) -> None:
    for workers in (1, 3):
        assert cli(*DATA, f"store=by-{workers}", f"workers={workers}", "shard_mb=0.005", "text=true")[0] == 0
    assert texts(tmp_path / "by-1") == texts(tmp_path / "by-3") and len(texts(tmp_path / "by-1")) >= 3


def test_prune_deletes_the_embeddings_of_one_model_when_told_to(cli: Any, tmp_path: Path) -> None:
    command = [*DATA, "store=latents", "workers=1", "text=true", "shard_mb=0.005"]
    assert cli(*command)[0] == 0
    kind = next((tmp_path / "latents").rglob("texts/*"))
    other = kind.with_name("t0123")
    shutil.copytree(kind, other)
    shutil.copytree(kind.parents[1] / "places" / kind.name, kind.parents[1] / "places" / other.name)
    before = texts(tmp_path / "latents")
    code, out = cli("prune", "store=latents")
    assert code == 0 and out.endswith("0 MB would be freed\n")
    assert f"texts/{kind.name}: {len(before) // 2} files" in out and "texts/t0123: " in out
    code, out = cli("prune", "store=latents", "drop_texts=t01")
    assert f"texts/t0123: {len(before) // 2} files" in out and "MB, to be deleted" in out
    assert "prune store=latents drop_texts=t01 dry_run=false" in out and texts(tmp_path / "latents") == before
    cli("prune", "store=latents", "drop_texts=t01", "dry_run=false")
    assert texts(tmp_path / "latents") == {name: data for name, data in before.items() if "t0123" not in name}
    for given, count in (("t", 1), ("t01", 0)):
        code, out = cli("prune", "store=latents", f"drop_texts={given}")
        assert (code == 0) == (count == 1) and ("0 kinds of text embeddings begin; expected one of" in out) == (
            not count
        )
    assert {path.parent.name for path in (tmp_path / "latents").rglob("places/*/*")} == {kind.name}
    text = next(kind.iterdir())
    text.write_bytes(text.read_bytes()[:-9])
    assert cli("verify", "store=latents", "dry_run=false")[0] == 1 and not text.exists()
    code, out = cli("verify", "store=latents")
    assert code == 0 and re.search(f"{kind.name}: the captions of [12] sample files have no embeddings, so", out)
    assert re.search(r"texts: [1-4] different captions encoded", cli(*command)[1])
    assert cli("verify", "store=latents") == (0, "latents: all files are what was written\n")


def test_settings_of_another_action_are_refused(cli: Any) -> None:
    for given, words in (
        (["prune", "store=latents", "text=true"], "precompute prune got text=true; expected it only with encoding;"),
        (["verify", "store=latents", "drop_texts=t1"], "precompute verify got drop_texts=t1; expected it only with"),
        ([*DATA, "store=latents", "dry_run=false"], "precompute got dry_run=false; expected it only with precompute"),
        (["prune", "store=nothing"], "no latent store"),
    ):
        code, error = cli(*given)
        assert code == 2 and error.count("\n") == 1 and error.startswith("error: ") and words in error, error


def test_the_size_is_said_first_and_what_does_not_fit_is_refused(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    for i in range(20):
        (tmp_path / f"photos/{i:02}.txt").write_text(f"class {i % 2}")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=23_000))
    code, out = cli(*DATA, "store=latents", "workers=1", "text=true")
    assert (
        code == 2
        and "needs 0.00 GB for latents and text embeddings, but " in out
        and "or text=false (training then" in out
    )
    assert not list((tmp_path / "latents").rglob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=24_000))
    code, out = cli(*DATA, "store=latents", "workers=1", "text=true")
    assert code == 0 and "for each of 3 different captions: 3.07e-06 GB more" in out
    assert "2.36e-05 GB for latents and text embeddings, 2.4e-05 GB free" in out, out
    assert "3.07e-06 GB for text embeddings of 3 captions" in out and "3 different captions encoded" in out
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    code, out = cli(*DATA, "store=latents", "workers=1", "text=true")
    assert code == 0, "all is there already"


@pytest.mark.parametrize(
    ("count", "repeats", "least", "most"), [(4000, 1, 3000, 4001), (4000, 400, 9, 13), (900, 1, 901, 901)]
)
def test_different_captions_are_counted_from_some_samples(
    count: int, repeats: int, least: int, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = [[f"caption {i // repeats}"] for i in range(count)]
    folder = open_location("store", key="store")
    encoder = TextEncoder(PlainEncoder(), "texts/t0", folder, "float16", torch.device("cpu"))  # type: ignore[arg-type]
    caption_bytes, num_bytes = predicted_texts(
        encoder, Tokenizing(tokenize, ""), [cast(Source, Captions(captions))], 1000
    )
    assert caption_bytes == 128 and least <= num_bytes / 128 <= most
    said = capsys.readouterr().out
    assert ("about" in said) == (count > 1000) and f"{num_bytes / 1000:.3g} times the latents" in said
    assert "plan captions=" in said and "text=false" not in said, "what to do is for the planner to say"
