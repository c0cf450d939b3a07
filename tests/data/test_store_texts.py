"""Text embeddings in a store: those of the captions that are there, whatever has changed."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd_lightning import LatentDiffusion
from sd_lightning._errors import UsageError
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store.files import CHECKS, HASHES, StoreFile, captions_hash, row_sums, write_groups
from sd_lightning.data.store.layout import LatentStore
from sd_lightning.data.store.stored_texts import StoredTexts
from sd_lightning.data.store.texts import (
    TextEncoder,
    TextJob,
    Tokenizing,
    captions_per_file,
    missing_texts,
    real_tokens,
    text_kind,
)
from sd_lightning.data.store.upkeep import Pruning, broken_files
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.families.conditioning import flat_conditioning, nested_conditioning
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.object_store import open_location
from small_store import reader, recipe, source_of, tokenize, update, write_picture, write_pictures

KIND = "texts/t0"


class LetterEncoder:
    """An encoder whose embeddings tell the caption, as a nested dictionary."""

    def embed(self, input_ids: Any) -> dict[str, Any]:
        ids = input_ids["text_encoder"].float()
        hidden = torch.stack([ids.sin(), ids.cos(), ids], dim=2)
        return {"hidden": hidden, "added": {"pooled": ids.cumsum(1)}}


class InfiniteEncoder:
    def embed(self, input_ids: Any) -> dict[str, Any]:
        return {"hidden": torch.full((len(input_ids["text_encoder"]), 2), 1e6)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = write_pictures(tmp_path / "photos", 23)
    (folder / "004.txt").write_text("one caption\nand another one\nand a third")
    return folder


def store_of(root: Path) -> LatentStore:
    return LatentStore(open_location(root, key="store"), recipe())


def embed(
    root: Path | LatentStore,
    scratch: Path,
    *,
    encoder: Any = None,
    dtype: str = "float32",
    tokenizing: Tokenizing | None = None,
    masks: bool = False,
) -> int:
    """Encode the captions that are missing, four in a file; return how many."""
    scratch.mkdir(exist_ok=True)
    store = root if isinstance(root, LatentStore) else store_of(root)
    missing = missing_texts(store, store.generation(), KIND)
    device = torch.device("cpu")
    texts = TextEncoder(encoder or LetterEncoder(), KIND, store.folder, dtype, device, masks_padding=masks, group=3)
    job = TextJob(store, KIND, tokenizing or Tokenizing(tokenize, "bytes"), scratch, per_file=4)
    written = [texts(task).captions for task in job.tasks(missing)]
    job.place(missing)
    return sum(written)


def is_right(root: Path) -> bool:
    """Whether every stored embedding is that of its caption."""
    store = reader(root)
    texts = StoredTexts(store, KIND)
    pairs = [(i, n) for i in range(len(store)) for n in (*range(len(store.captions(i))), None)]
    order = np.random.default_rng(0).permutation(len(pairs))
    index = np.array([pairs[i][0] for i in order])
    which = [pairs[i][1] for i in order]
    captions = ["" if n is None else store.captions(int(i))[n] for i, n in zip(index, which)]
    found, right = texts.batch(index, which), LetterEncoder().embed(tokenize(captions))
    return torch.equal(found["hidden"], right["hidden"]) and torch.equal(
        found["added"]["pooled"], right["added"]["pooled"]
    )


def test_every_caption_has_its_embeddings_and_the_empty_one_too(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    assert embed(tmp_path / "store", tmp_path / "scratch") > 2
    assert is_right(tmp_path / "store")
    assert embed(tmp_path / "store", tmp_path / "scratch") == 0


def test_the_reader_is_pickled_for_workers(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    texts = StoredTexts(reader(tmp_path / "store"), KIND)
    index, which = np.array([3, 1]), [0, None]
    here = texts.batch(index, which)
    there = pickle.loads(pickle.dumps(texts)).batch(index, which)
    assert torch.equal(here["hidden"], there["hidden"])


def test_few_files_are_open_at_a_time(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd_lightning.data.store.stored_texts._MOST_OPEN", 1)
    update(tmp_path / "store", ImageFolder(photos), samples_per_file=4, portion=100)
    assert embed(tmp_path / "store", tmp_path / "scratch") > 4
    texts = StoredTexts(reader(tmp_path / "store"), KIND)
    for i in (0, 22, 9, 0):
        right = LetterEncoder().embed(tokenize([reader(tmp_path / "store").captions(i)[0]]))["hidden"]
        assert torch.equal(texts.batch(np.array([i]), [0])["hidden"], right)
    assert texts._file.cache_info().currsize == 1


def test_changed_and_new_captions_are_missing_until_they_are_encoded(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    (photos / "004.txt").write_text("one caption and another one\nand a third")
    (photos / "007.txt").write_text("something else")
    write_picture(photos, "new", colour=300)
    update(tmp_path / "store", ImageFolder(photos))
    assert StoredTexts(reader(tmp_path / "store"), KIND).num_missing
    embed(tmp_path / "store", tmp_path / "scratch")
    assert is_right(tmp_path / "store")


def test_captions_are_told_apart_by_whose_they_are_and_where_they_end() -> None:
    several = [[["a", "b"]], [["a"], ["b"]], [["a\nb"]], [["ab", ""]], [["", "ab"]], [["b", "a"]], [["a"]], [[""]], []]
    assert len(set(map(captions_hash, several))) == len(several)


def test_prune_keeps_the_embeddings_of_captions_that_are_left(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    before = set((tmp_path / "store").rglob("texts/*/*"))
    for i in range(12, 20):  # of the second portion: its samples, latents and texts
        (photos / f"{i:03}.png").unlink()
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    pruning = Pruning(store_of(tmp_path / "store"), tmp_path / "scratch")
    pruning.run()
    left = set((tmp_path / "store").rglob("texts/*/*"))
    assert before - left and before & left
    assert {path.stem for path in (tmp_path / "store").rglob("places/*/*")} == {
        captions_hash([[""]]),
        *(each.captions for each in reader(tmp_path / "store").entries),
    }
    assert is_right(tmp_path / "store"), "although sample files were written anew"
    assert embed(tmp_path / "store", tmp_path / "scratch") == 0


@pytest.mark.parametrize("how", ["truncated", "altered"])
def test_a_broken_file_is_found_deleted_and_made_again(photos: Path, tmp_path: Path, how: str) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    store = store_of(tmp_path / "store")
    assert not list(broken_files(store, tmp_path / "scratch"))
    path = sorted((tmp_path / "store").rglob("texts/*/*"))[0]
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data[: -50 if how == "truncated" else None])
    assert [name for name, _ in broken_files(store, tmp_path / "scratch")] == [f"{KIND}/{path.name}"]
    path.unlink()
    broken = dict(broken_files(store, tmp_path / "scratch"))
    assert broken and all("is not there" in reason and name.startswith("places/t0/") for name, reason in broken.items())
    for name in broken:
        (path.parents[2] / name).unlink()
    assert StoredTexts(reader(tmp_path / "store"), KIND).num_missing == len(broken)
    assert 1 <= embed(tmp_path / "store", tmp_path / "scratch") <= 4, "those of the file alone"
    assert is_right(tmp_path / "store")


def test_reading_a_file_that_was_deleted_meanwhile_says_so(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    texts = StoredTexts(reader(tmp_path / "store"), KIND)
    for path in (tmp_path / "store").rglob("texts/*/*"):
        path.unlink()
    with pytest.raises(UsageError, match="texts/.* is not there; the store was pruned or files were deleted"):
        texts.batch(np.array([0]), [0])


def test_infinite_embeddings_are_refused_with_the_remedy(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    with pytest.raises(UsageError, match="text embeddings are not finite in dtype=float16; write dtype=bfloat16"):
        embed(tmp_path / "store", tmp_path / "scratch", encoder=InfiniteEncoder(), dtype="float16")
    assert not list((tmp_path / "store").rglob("texts/*/*"))


def test_batches_have_embeddings_instead_of_token_ids(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")

    def batches(texts: bool, wrong: bool) -> dict[str, Any]:
        source = source_of(reader(tmp_path / "store"))
        source._texts = StoredTexts(source, KIND) if texts else None
        options = ImageOptions(8, center_crop=True, proportion_empty_prompts=0.0 if wrong else 0.4)
        latents = {"latents": source, "wrong_captions": wrong}
        return CaptionedImages(source, tokenize, options=options, seed=1, **latents).__getitems__(
            [(2, i) for i in range(23)]
        )

    encode: Any = LetterEncoder().embed
    plain, stored = batches(False, False), batches(True, False)
    assert "" in plain["captions"] and "input_ids" not in stored
    assert torch.equal(stored["text_embeddings"]["hidden"], encode(plain["input_ids"])["hidden"])
    plain, stored = batches(False, True), batches(True, True)
    for prefix in ("", "wrong_"):
        pooled: Tensor = stored[f"{prefix}text_embeddings"]["added"]["pooled"]
        assert torch.equal(pooled, encode(plain[f"{prefix}input_ids"])["added"]["pooled"])


def test_the_kind_tells_text_encoders_and_tokenizers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, same, other = (LatentDiffusion.build("tiny", seed=seed) for seed in (1, 1, 2))
    kind = text_kind(model)
    assert kind == text_kind(same) != text_kind(other)
    next(iter(same.text_encoders["text_encoder"].parameters())).data.view(-1)[0] += 1e-3
    assert text_kind(same) != kind
    tokenizer = model.tokenizers["tokenizer"]
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["merges"].reverse()
    model.tokenize(["a caption"])  # which sets truncation and padding
    assert text_kind(model) == kind
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(rules))
    assert text_kind(model) != kind, "the same vocabulary, other merges"
    rules["model"]["merges"].reverse()
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(rules))
    assert text_kind(model) == kind
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert text_kind(model) != kind, "another template around captions"
    tokenizer.chat_template = None
    assert text_kind(model) == kind
    with monkeypatch.context() as patch:  # a family with a shorter length than the tokenizer's, or masks
        tokenize_plain = model.family.tokenize
        patch.setattr(
            type(model.family),
            "tokenize",
            lambda _, *given: {n: ids[:, :5] for n, ids in tokenize_plain(*given).items()},
        )
        model.forget_tokens()
        assert text_kind(model) != kind
    model.forget_tokens()
    with monkeypatch.context() as patch:
        patch.setattr(type(model.family), "masks_padding", True)
        assert text_kind(model) != kind, "files without padding"
    tokenizer.model_max_length = 7
    model.forget_tokens()
    assert text_kind(model) != kind


def test_a_file_written_by_groups_is_a_safetensors_file(tmp_path: Path) -> None:
    columns = {"a": torch.randn(10, 3, 2), "b.c": torch.randn(10, 5).to(torch.bfloat16)}
    hashes = np.random.default_rng(0).integers(0, 256, (10, 16), np.uint8)
    groups = ({name: each[i : i + 4] for name, each in columns.items()} for i in range(0, 10, 4))
    size = write_groups(tmp_path / "file.safetensors", groups, hashes=hashes)
    assert size == (tmp_path / "file.safetensors").stat().st_size
    found = load_file(tmp_path / "file.safetensors")
    assert torch.equal(found.pop(CHECKS), row_sums(columns["a"]) + row_sums(columns["b.c"]))
    assert np.array_equal(found.pop(HASHES).numpy(), hashes)
    assert found.keys() == columns.keys() and all(torch.equal(found[name], columns[name]) for name in columns)


@pytest.mark.parametrize("how", ["truncated", "altered"])
def test_damaged_embeddings_are_neither_kept_nor_trained_on(how: str, photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    path = next((tmp_path / "store").rglob("texts/*/*"))
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[:-20])
        with pytest.raises(UsageError, match="truncated or altered.*verify"):
            embed(tmp_path / "store", tmp_path / "scratch")
    else:
        with open(path, "rb", buffering=0) as file:
            column = StoreFile(file, name=path.name).columns["hidden"]
        data[column.end - 1] ^= 4  # in the last row's embeddings
        path.write_bytes(data)
        with pytest.raises(UsageError, match="not those that were written.*verify"):
            is_right(tmp_path / "store")
    assert [found for found, _ in broken_files(store_of(tmp_path / "store"), tmp_path / "scratch")] == [
        f"{KIND}/{path.name}"
    ]
    path.unlink()
    assert embed(tmp_path / "store", tmp_path / "scratch") <= 4 and is_right(tmp_path / "store")


def test_nested_names_are_joined_and_parted() -> None:
    nested = {"a": torch.zeros(1), "b": {"c": torch.ones(2), "d": {"e": torch.ones(3)}}}
    flat = flat_conditioning(nested)
    assert [*flat] == ["a", "b.c", "b.d.e"] and nested_conditioning(flat) == nested


def test_embeddings_in_an_object_store_are_written_fetched_and_read(photos: Path, tmp_path: Path, s3: Any) -> None:
    root = open_location("s3://bucket/store", key="store")
    update(root, ImageFolder(photos))
    store, scratch = LatentStore(root, recipe()), tmp_path / "scratch"
    scratch.mkdir()
    embed(store, scratch)
    assert not list(scratch.iterdir())
    there = reader(root)
    there.cache = FileCache(tmp_path / "cache", 10**8)
    texts = StoredTexts(there, KIND)
    for number in range(len(there.entries)):
        texts.fetch(number)
    fetched = sum(path.stat().st_size for path in (tmp_path / "cache").glob("[!.]*"))
    needed = {file for number in range(len(there.entries)) for file in texts._places(there.entries[number].captions)[0]}
    assert fetched == sum(size for _, size in needed) + sum(texts._sizes[each.captions] for each in there.entries)
    right = LetterEncoder().embed(tokenize([there.captions(9)[0], ""]))["hidden"]
    assert torch.equal(texts.batch(np.array([9, 9]), [0, None])["hidden"], right)


def sizes_of(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("texts/*/*"))


def test_equal_captions_are_encoded_and_stored_once_whoever_has_them(photos: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(photos.glob("*.txt"))):
        path.write_text(f"class {i % 3}\nclass {i % 2}" if i < 22 else "its own")
    update(tmp_path / "store", ImageFolder(photos), samples_per_file=4)
    assert len(reader(tmp_path / "store").entries) > 4
    assert embed(tmp_path / "store", tmp_path / "scratch") == 5, "three classes, one of its own, and the empty one"
    assert is_right(tmp_path / "store")
    before = sizes_of(tmp_path / "store")
    for i in range(30):
        write_picture(photos, f"more{i:02}", colour=500 + i, caption=f"class {i % 3}")
    write_picture(photos, "new", colour=900, caption="another one")
    update(tmp_path / "store", ImageFolder(photos), samples_per_file=4)
    assert embed(tmp_path / "store", tmp_path / "scratch") == 1
    assert is_right(tmp_path / "store") and before < sizes_of(tmp_path / "store") < 1.5 * before


def test_a_job_that_was_killed_keeps_the_captions_that_it_encoded(photos: Path, tmp_path: Path) -> None:
    update(tmp_path / "store", ImageFolder(photos))
    store = store_of(tmp_path / "store")
    (tmp_path / "scratch").mkdir()
    texts = TextEncoder(LetterEncoder(), KIND, store.folder, "float32", torch.device("cpu"))  # type: ignore[arg-type]
    job = TextJob(store, KIND, Tokenizing(tokenize, "bytes"), tmp_path / "scratch", per_file=4)
    tasks = list(job.tasks(missing_texts(store, store.generation(), KIND)))
    assert [len(task) for task in tasks[:-1]] == [4] * (len(tasks) - 1)
    for task in tasks[1:3]:
        texts(task)
    assert embed(tmp_path / "store", tmp_path / "scratch") == sum(map(len, tasks)) - 8
    assert is_right(tmp_path / "store")


def test_embeddings_of_another_caption_are_never_taken(photos: Path, tmp_path: Path) -> None:
    """A file of places whose text file has other rows, as if both had been copied from two stores."""
    update(tmp_path / "store", ImageFolder(photos))
    embed(tmp_path / "store", tmp_path / "scratch")
    path = sorted((tmp_path / "store").rglob("texts/*/*"))[0]
    data = load_file(path)
    with open(path, "rb", buffering=0) as file:
        columns = StoreFile(file, name=path.name).columns
    raw = bytearray(path.read_bytes())
    for name in data.keys() - {CHECKS, HASHES}:  # every row is another one's, with its own right sum
        flat = data[name].roll(1, 0).contiguous().view(torch.uint8).numpy().tobytes()
        raw[columns[name].begin : columns[name].end] = flat
    raw[columns[CHECKS].begin : columns[CHECKS].end] = data[CHECKS].roll(1, 0).numpy().tobytes()
    path.write_bytes(raw)
    with pytest.raises(UsageError, match="not those that were written"):
        is_right(tmp_path / "store")


class MaskedEncoder(LetterEncoder):
    """An encoder of captions of different lengths; what it makes of padding tells the length of the batch."""

    def embed(self, input_ids: Any) -> dict[str, Any]:
        found = super().embed(input_ids)
        found["hidden"] = found["hidden"] + 1
        return found | {"mask": input_ids["text_encoder_mask"].float()}


def with_mask(captions: list[str]) -> dict[str, Tensor]:
    ids = tokenize(captions)["text_encoder"]
    return {"text_encoder": ids, "text_encoder_mask": (ids != 0).long()}


@pytest.mark.parametrize("masks_padding", [True, False])
def test_padding_that_never_reaches_the_denoiser_is_not_stored(
    photos: Path, tmp_path: Path, masks_padding: bool
) -> None:
    for i, path in enumerate(sorted(photos.glob("*.txt"))):
        path.write_text("abcdefghijk"[: i % 9 + 1] + f"\n{'z' * (i % 4)}{i % 10}")
    tokenizing = Tokenizing(with_mask, "mask")
    update(tmp_path / "store", ImageFolder(photos), tokenizing=tokenizing)
    embed(tmp_path / "store", tmp_path / "scratch", encoder=MaskedEncoder(), tokenizing=tokenizing, masks=masks_padding)
    store = reader(tmp_path / "store")
    pairs = [(i, n) for i in range(len(store)) for n in (0, 1, None)]
    captions = ["" if n is None else store.captions(i)[n] for i, n in pairs]
    found = StoredTexts(store, KIND).batch(np.array([i for i, _ in pairs]), [n for _, n in pairs])
    right = MaskedEncoder().embed(with_mask(captions))
    is_real = with_mask(captions)["text_encoder_mask"].bool()
    assert not is_real.all() and found["hidden"].shape == right["hidden"].shape
    assert torch.equal(found["hidden"][is_real], right["hidden"][is_real])
    assert torch.equal(found["hidden"][~is_real], right["hidden"][~is_real] * (not masks_padding))
    assert torch.equal(found["mask"], right["mask"]) and torch.equal(found["added"]["pooled"], right["added"]["pooled"])
    tokens = sum(len(load_file(path)["hidden"].flatten(0, -2)) for path in (tmp_path / "store").rglob("texts/*/*"))
    distinct = with_mask(sorted(set(captions)))["text_encoder_mask"]
    assert tokens == (distinct.sum() if masks_padding else distinct.numel())


def test_an_encoder_without_a_mask_keeps_all_tokens_beside_one_with_a_mask_of_the_same_length() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    one = {"text_encoder": torch.ones(2, 4, dtype=torch.int64), "text_encoder_mask": mask}
    assert real_tokens(one)[4].tolist() == [2, 3], "up to the last one that is kept"
    two = {**one, "text_encoder_2": torch.ones(2, 4, dtype=torch.int64), "text_encoder_3": torch.ones(2, 6)}
    assert {length: each.tolist() for length, each in real_tokens(two).items()} == {4: [4, 4], 6: [6, 6]}


def test_files_and_groups_of_large_embeddings_have_few_captions() -> None:
    assert captions_per_file(7.9e6, 128) == (16, 16)
    assert captions_per_file(118e3, 128) == (1024, 64)
    assert captions_per_file(31.5e6, 1000) == (24, 8)
    assert captions_per_file(1e9, 128) == (1, 1) and captions_per_file(10, 128) == (8192, 64)
