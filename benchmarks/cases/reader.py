"""Records per second of a latent store against a bare loop of `os.preadv` over the same bytes, and other formats.

A record is a latent of a 256 x 256 image in float16 and its 77 token ids. Store and bare loop read the records in the
order of a shuffled epoch, the others in the order that each is built for: Parquet and webdataset from begin to end,
Lance by `take` in the shuffled order. Everything is in the page cache, and one thread reads.
"""

import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sd_lightning.data.order import EpochOrder
from sd_lightning.data.store.encoding import latent_file
from sd_lightning.data.store.files import name_of
from sd_lightning.data.store.layout import LATENTS, SAMPLES, Generation, LatentStore, Recipe, SampleEntry
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.data.store.sample_file import Sample, SampleRows
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.object_store import open_location
from timing import interleaved, ratios

BARS = {"ratio": ">= 0.8"}
TABLE = {
    "records per second of a latent store to those of a bare `preadv` loop over the same bytes": "{ratio} ×",
    "records per second: store; bare loop; Parquet; webdataset; Lance": (
        "{store_records_per_second:.0f}; {preadv_records_per_second:.0f}; {parquet_records_per_second:.0f}; "
        "{webdataset_records_per_second:.0f}; {lance_records_per_second:.0f}"
    ),
}

LATENT = (4, 32, 32)
TOKENS = 77
BATCH = 64
FILE_ROWS = 2048


def peers() -> dict[str, dict[str, str]]:
    """Return what is read beside the store."""
    return {
        "pyarrow": {"rows": "64 per row group, fixed_size_binary, uncompressed"},
        "webdataset": {"rows": "a .npy and a .ids per sample"},
        "pylance": {"rows": "fixed-size lists, take of 64"},
    }


def measure(records: int = 16384, rounds: int = 9) -> dict[str, list[float]]:
    """Interleaved runs; `ratio` is the bare loop's time over the store's."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        random = np.random.default_rng(0)
        latents = random.standard_normal((records, *LATENT), np.float32).astype(np.float16)
        ids = random.integers(0, 49408, (records, TOKENS), np.int32)
        order = EpochOrder(records, seed=0, epoch=0).at(np.arange(records))
        store = write_store(here / "store", latents, ids)
        sides: dict[str, Callable[[], None]] = {
            "store": partial(read_store, store, order),
            "preadv": BareLoop(store, order),
            "parquet": partial(read_parquet, write_parquet(here, latents, ids)),
            "webdataset": partial(read_tars, write_tars(here, latents, ids)),
            "lance": partial(read_lance, write_lance(here, latents, ids), order),
        }
        taken = interleaved({name: partial(seconds_of, side) for name, side in sides.items()}, rounds=rounds)
    return {
        "ratio": ratios(taken["preadv"], taken["store"]),
        **{f"{name}_records_per_second": [records / each for each in figures] for name, figures in taken.items()},
    }


def seconds_of(side: Callable[[], None]) -> float:
    """Seconds of one pass."""
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def write_store(folder: Path, latents: np.ndarray, ids: np.ndarray) -> StoreReader:
    """Write a store as precompute does."""
    recipe = Recipe("StableDiffusionPipeline", "0" * 32, 256, latents="draw")
    store = LatentStore(open_location(folder, key="store"), recipe)
    entries = []
    for begin in range(0, len(latents), FILE_ROWS):
        end = min(begin + FILE_ROWS, len(latents))
        rows = SampleRows.of(
            [
                Sample(i, f"{i}", f"{i}.png", i.to_bytes(16, "big"), [f"the caption of image {i}"], (1, 1))
                for i in range(begin, end)
            ],
            shape=0,
        )
        tensors = {
            "latents": torch.from_numpy(latents[begin:end]),
            "sizes": torch.zeros(end - begin, 4, dtype=torch.int32),
            "images": torch.from_numpy(rows.images.copy()),
        }
        data = latent_file(tensors, recipe, {})
        store.put(LATENTS, f"{begin}", data)
        place = np.stack([np.zeros(end - begin, np.int64), np.arange(end - begin)], axis=1)
        samples = rows.to_bytes([(f"{begin}", len(data))], place, {"text_encoder": torch.from_numpy(ids[begin:end])})
        store.put(SAMPLES, name_of(samples), samples)
        entries.append(SampleEntry(name_of(samples), end - begin, len(samples), 0, "", "", ""))
    store.commit(Generation(1, {"train": entries}))
    return StoreReader(store, store.generation(), "train", FileCache(folder / "cache", 10**9))


def read_store(store: StoreReader, order: np.ndarray) -> None:
    """Read all records in batches."""
    for begin in range(0, len(order), BATCH):
        index = order[begin : begin + BATCH]
        store.read_latents(index)
        store.token_ids(index, np.zeros(len(index), np.int64))


class BareLoop:
    """The least that reading these records from these files can be: two calls of `preadv` for each."""

    def __init__(self, store: StoreReader, order: np.ndarray) -> None:
        self._fds, self._offsets = [], []
        for number, entry in enumerate(store.entries):
            folder = store.store.folder
            for path, column in (
                (folder.path(f"{LATENTS}/{number * FILE_ROWS}.safetensors"), "latents"),
                (folder.path(f"{SAMPLES}/{entry.name}.safetensors"), "input_ids.text_encoder"),
            ):
                fd = os.open(str(path), os.O_RDONLY)
                length = int.from_bytes(os.pread(fd, 8, 0), "little")
                import json

                header = json.loads(os.pread(fd, length, 8))
                self._fds.append(fd)
                self._offsets.append(8 + length + header[column]["data_offsets"][0])
        self._order = order.tolist()

    def __call__(self) -> None:
        latent_bytes, ids_bytes = 2 * int(np.prod(LATENT)), 4 * TOKENS
        fds, offsets, preadv = self._fds, self._offsets, os.preadv
        for begin in range(0, len(self._order), BATCH):
            latents = [memoryview(part) for part in np.empty((BATCH, latent_bytes), np.uint8)]
            ids = [memoryview(part) for part in np.empty((BATCH, ids_bytes), np.uint8)]
            for place, index in enumerate(self._order[begin : begin + BATCH]):
                file, row = divmod(index, FILE_ROWS)
                preadv(fds[2 * file], [latents[place]], offsets[2 * file] + row * latent_bytes)
                preadv(fds[2 * file + 1], [ids[place]], offsets[2 * file + 1] + row * ids_bytes)


def write_parquet(folder: Path, latents: np.ndarray, ids: np.ndarray) -> Path:
    """Write one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: np.ndarray) -> pa.Array:
        width = values[0].nbytes
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(values)])

    path = folder / "records.parquet"
    table = pa.table({"latents": column(latents), "ids": column(ids)})
    pq.write_table(table, path, row_group_size=64, compression="none", use_dictionary=False)
    return path


def read_parquet(path: Path) -> None:
    """Read all row groups."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)
    for number in range(file.num_row_groups):
        table = file.read_row_group(number, use_threads=False)
        for name, dtype, shape in (("latents", np.float16, LATENT), ("ids", np.int32, (TOKENS,))):
            array = table.column(name).combine_chunks()
            torch.from_numpy(np.frombuffer(array.buffers()[1], dtype).reshape(-1, *shape).copy())


def write_tars(folder: Path, latents: np.ndarray, ids: np.ndarray) -> list[Path]:
    """Write tar files in webdataset's convention."""
    paths = []
    for begin in range(0, len(latents), FILE_ROWS):
        paths.append(folder / f"{begin:06}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for i in range(begin, min(begin + FILE_ROWS, len(latents))):
                for suffix, data in (("npy", _npy(latents[i])), ("ids", ids[i].tobytes())):
                    member = tarfile.TarInfo(f"{i:06}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read_tars(paths: list[Path]) -> None:
    """Read all samples with webdataset, in batches."""
    import webdataset

    def decoded(sample: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
        return np.load(io.BytesIO(sample["npy"])), np.frombuffer(sample["ids"], np.int32)

    data = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).map(decoded)
    for batch in _batches(iter(data)):
        torch.from_numpy(np.stack([latent for latent, _ in batch]))
        torch.from_numpy(np.stack([ids for _, ids in batch]))


def _batches(samples: Iterator[tuple[np.ndarray, np.ndarray]]) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def write_lance(folder: Path, latents: np.ndarray, ids: np.ndarray) -> str:
    """Write one Lance data set."""
    import lance
    import pyarrow as pa

    def column(values: np.ndarray) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)

    path = str(folder / "records.lance")
    lance.write_dataset(pa.table({"latents": column(latents), "ids": column(ids)}), path)
    return path


def read_lance(path: str, order: np.ndarray) -> None:
    """Take all rows in the shuffled order, in batches."""
    import lance

    data = lance.dataset(path)
    for begin in range(0, len(order), BATCH):
        table = data.take(order[begin : begin + BATCH].tolist())
        for name in ("latents", "ids"):
            torch.from_numpy(table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False).copy())
