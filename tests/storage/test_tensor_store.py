"""Streaming safetensors: the same bits at any split, strides and dtype, in flat memory."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage import safetensors_file, streamed_tensor, tensor_store
from sd_lightning.storage.safetensors_file import file_bytes, flat_blocks, read_header
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_file, write_streamed, write_tensors
from sd_lightning.storage.tensor_store import ShardedTensors, merge_index, write_shards


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that tiny tensors need many slices."""
    for module in (safetensors_file, streamed_tensor, tensor_store):
        monkeypatch.setattr(module, "SLICE_BYTES", 64)


def a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (count,), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def strided_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    conv = torch.randn(6, 5, 3, 3)
    return {
        "contiguous": conv,
        "channels_last": conv.to(memory_format=torch.channels_last),
        "transposed": torch.randn(37, 23).t(),
        "permuted": torch.randn(3, 4, 5, 6).permute(2, 0, 3, 1),
        "every_other": torch.randn(100)[::2],
        "expanded": torch.randn(1, 7).expand(9, 7),
        "inner_window": torch.randn(20, 20)[3:17, 5:9],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "long_rows": torch.randn(50, 3).t(),
    }


def split_ranges(numel: int, num_parts: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = [0, *sorted(rng.randrange(numel + 1) for _ in range(num_parts - 1)), numel]
    return list(zip(cuts, cuts[1:]))


def write_store(directory: Path, tensors: dict[str, Tensor], world_size: int, seed: int = 0) -> dict[str, str]:
    """Every rank owns a random range of every tensor."""
    rng = random.Random(seed)
    entries: list[list[TensorRange]] = [[] for _ in range(world_size)]
    for key, tensor in tensors.items():
        for rank, (begin, end) in enumerate(split_ranges(tensor.numel(), world_size, rng)):
            flat = tensor.reshape(-1)[begin:end] if world_size > 1 else tensor
            entries[rank].append(TensorRange(key, tuple(tensor.shape), begin, end, flat))
    for rank in reversed(range(world_size)):
        write_shards(directory, rank, world_size, entries[rank])
    return merge_index(directory, world_size)


@pytest.mark.parametrize("name", strided_tensors())
def test_flat_blocks_are_the_row_major_range_without_copies(name: str) -> None:
    tensor = strided_tensors()[name]
    reference = tensor.reshape(-1)
    rng = random.Random(1)
    for _ in range(40):
        begin, end = sorted(rng.randrange(tensor.numel() + 1) for _ in range(2))
        max_numel = rng.choice([1, 3, 7, 50, 1000])
        blocks = list(flat_blocks(tensor, begin, end, max_numel))
        assert all(0 < block.numel() <= max_numel for block in blocks)
        assert all(block.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for block in blocks)
        joined = torch.cat([block.reshape(-1) for block in blocks]) if blocks else reference[:0]
        assert torch.equal(joined, reference[begin:end])


def test_file_opens_with_safetensors_and_holds_every_dtype_and_shape(tmp_path: Path, small_slices: None) -> None:
    tensors = {
        f"{dtype}-{shape}".removeprefix("torch."): a_tensor(dtype, shape)
        for dtype in safetensors_file.NAME_OF_DTYPE
        for shape in [(), (3,), (0, 2), (5, 7)]
    }
    streams = {key: StreamedTensor.of(tensor) for key, tensor in tensors.items()}
    digest = write_file(tmp_path / "a.safetensors", streams, metadata={"format": "pt"})
    assert digest == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        assert all(same_bits(file.get_tensor(key), tensor) for key, tensor in tensors.items())


def part_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda begin, end: data[begin:end]


def test_a_file_in_memory_has_the_bytes_that_safetensors_writes() -> None:
    tensors = {
        f"{shape}-{dtype}": a_tensor(dtype, shape)
        for shape in [(), (3,), (0, 2), (5, 7)]
        for dtype in reversed(safetensors_file.NAME_OF_DTYPE)
    }
    for metadata in ({}, {"about": 'ü "quoted"\n'}):
        data = file_bytes(tensors, metadata)
        assert data == save(tensors, metadata or None)
        header = read_header(part_of(data), len(data))
        assert header.metadata == metadata and header.end == len(data) and header.columns.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "."),
        (b"[]", "no JSON object"),
        (b'{"x": {}}', "tells no tensors"),
        (b'{"x": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}', "tells no tensors"),
        (b'{"x": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}}', "tells no tensors"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "ends within 'x'"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}', "ends within 'x'"),
    ],
)
def test_a_header_that_tells_no_tensors_is_refused(header: bytes, reason: str) -> None:
    data = len(header).to_bytes(8, "little") + header
    with pytest.raises(ValueError, match=reason):
        read_header(part_of(data), len(data))
    with pytest.raises(ValueError, match="truncated"):
        read_header(part_of(data), len(data) - 1)
    with pytest.raises(ValueError, match="the format allows 100,000,000"):
        read_header(lambda begin, end: (2**60).to_bytes(8, "little"))


def test_writer_keeps_every_tensor_aligned(tmp_path: Path) -> None:
    wide = StreamedTensor.of(torch.ones(1), torch.float64)  # converted when it is written
    streams = {"bytes": StreamedTensor.of(torch.ones(3, dtype=torch.uint8)), "wide": wide}
    write_file(tmp_path / "a.safetensors", streams)
    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    offsets = {name: entry["data_offsets"] for name, entry in json.loads(content[8 : 8 + length]).items()}
    assert offsets == {"wide": [0, 8], "bytes": [8, 11]}
    assert torch.equal(load_file(tmp_path / "a.safetensors")["wide"], torch.ones(1, dtype=torch.float64))


def test_writer_refuses_another_size_and_two_ranges_of_one_name(tmp_path: Path) -> None:
    for count in (1, 3):
        with pytest.raises(ValueError, match=rf"'a' got {count} values; expected shape \(2,\)"):
            write_file(tmp_path / f"{count}", {"a": StreamedTensor.of(torch.zeros(count), shape=(2,))})
    twice = [TensorRange("a", (4,), 0, 2, torch.zeros(2))] * 2
    with pytest.raises(ValueError, match="cannot hold two tensors named 'a@0'"):
        write_shards(tmp_path, 0, 1, twice)


def test_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Tensor 'phase' has dtype torch.complex64"):
        write_file(tmp_path / "a.safetensors", {"phase": StreamedTensor.of(torch.zeros(2, dtype=torch.complex64))})
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_any_range_reads_back_bit_exact_whatever_the_split(tmp_path: Path, small_slices: None, world_size: int) -> None:
    tensors = strided_tensors()
    digests = write_store(tmp_path, tensors, world_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*digests, "index.json"])
    for name, digest in digests.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    rng = random.Random(2)
    with ShardedTensors(tmp_path) as reader:
        assert sorted(reader.keys()) == sorted(tensors)
        for key, tensor in tensors.items():
            assert reader.shape(key) == tuple(tensor.shape)
            for begin, end in split_ranges(tensor.numel(), 4, rng):
                out = torch.full((2, end - begin), torch.nan).t()[:, 0]
                reader.read_into(key, out, begin, end)
                assert torch.equal(out, tensor.reshape(-1)[begin:end])


@pytest.mark.parametrize("name", [name for name in strided_tensors() if name != "expanded"])
def test_read_into_fills_tensors_of_any_strides(tmp_path: Path, small_slices: None, name: str) -> None:
    tensor = strided_tensors()[name]
    write_store(tmp_path, {"x": tensor}, 3)
    out = torch.empty_strided(tensor.shape, tensor.stride()).fill_(torch.nan)
    with ShardedTensors(tmp_path) as reader:
        reader.read_into("x", out)
    assert torch.equal(out, tensor)


def test_read_into_converts_to_the_dtype_of_the_target(tmp_path: Path) -> None:
    master = torch.randn(1000)
    write_store(tmp_path, {"x": master}, 2)
    weights = torch.nn.Parameter(torch.empty(10, 100, dtype=torch.bfloat16))
    with ShardedTensors(tmp_path) as reader:
        reader.read_into("x", weights, 0, 1000)
    assert torch.equal(weights.detach().view(-1), master.bfloat16())


WRITTEN_BEFORE = {
    "index.json": "af7e40b5a3ec2c97fa1244c4a631276e233f0c9660a529a2f49326760498abfa",
    "n.safetensors": "90bc4ddf211f7eca456a90f23df2144fc91edbab318a7b5fef93f9a3fab284c7",
    "shard-00000-of-00002.safetensors": "b18fb00d9953d61045b33a5eacea56a002dce41a37f76e970930cabe9a4f738d",
    "shard-00001-of-00002.safetensors": "f8983f82cf3785580f2664c14279578edb405482dd01e141cb3c194c72b96816",
}
"""SHA-256 of what commit d7823e6, with another writer, made of the same tensors."""


def test_files_are_those_of_earlier_releases_byte_for_byte(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    half = torch.arange(10, dtype=torch.bfloat16)
    for rank in range(2):
        begin = 12 * rank
        ranges = [TensorRange("master/unet.w", (2, 3, 2, 2), begin, begin + 12, weight[rank])]
        ranges.append(TensorRange("exp_avg/unet.b", (10,), 10 * rank, 10, half[10 * rank :]))
        if rank == 0:
            ranges.append(TensorRange("ema/unet.s", (), 0, 1, lambda: torch.tensor(2.5), torch.float32))
        write_shards(tmp_path, rank, 2, ranges)
    merge_index(tmp_path, 2)
    write_tensors(tmp_path / "n.safetensors", {"half": half, "w": weight, "ids": torch.arange(3)})
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert found == WRITTEN_BEFORE


def test_several_pieces_of_one_tensor_on_one_rank(tmp_path: Path) -> None:
    values = torch.arange(10.0)
    pieces = [TensorRange("x", (2, 5), begin, end, values[begin:end]) for begin, end in [(6, 10), (0, 0), (0, 6)]]
    write_shards(tmp_path, 0, 1, pieces)
    merge_index(tmp_path, 1)
    out = torch.empty(2, 5)
    with ShardedTensors(tmp_path) as reader:
        reader.read_into("x", out)
    assert torch.equal(out.view(-1), values)


def test_made_tensors_live_one_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make(value: int) -> Callable[[], Tensor]:
        def build() -> Tensor:
            gc.collect()
            assert not any(ref() is not None for ref in alive)
            tensor = torch.full((4,), float(value))
            alive.append(weakref.ref(tensor))
            return tensor

        return build

    write_shards(tmp_path, 0, 1, [TensorRange(f"t{i}", (4,), 0, 4, make(i), torch.float32) for i in range(3)])
    merge_index(tmp_path, 1)
    assert load_file(tmp_path / "shard-00000-of-00001.safetensors")["t2"].tolist() == [2.0] * 4
    with pytest.raises(ValueError, match="give its dtype"):
        write_shards(tmp_path, 0, 1, [TensorRange("t", (4,), 0, 4, make(0))])


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 4), (5, 10)], r"Elements \[4, 5\) of 'x' were written not at all"),
        ([(0, 6), (5, 10)], r"Elements \[5, 6\) of 'x' were written twice"),
        ([(0, 4), (4, 9)], r"Elements \[9, 10\) of 'x' were written not at all"),
        ([(0, 10), (0, 10)], r"Elements \[0, 10\) of 'x' were written twice"),
    ],
)
def test_merge_demands_every_element_exactly_once(tmp_path: Path, ranges: list[tuple[int, int]], message: str) -> None:
    for rank, (begin, end) in enumerate(ranges):
        write_shards(tmp_path, rank, 2, [TensorRange("x", (10,), begin, end, torch.zeros(end - begin))])
    with pytest.raises(ValueError, match=message):
        merge_index(tmp_path, 2)


def test_merge_refuses_ranks_that_disagree_or_are_absent(tmp_path: Path) -> None:
    write_shards(tmp_path, 0, 2, [TensorRange("x", (10,), 0, 5, torch.zeros(5))])
    with pytest.raises(UsageError, match="Rank 0 does not find .*shard-00001-of-00002.json.*output_dir"):
        merge_index(tmp_path, 2)
    write_shards(tmp_path, 1, 2, [TensorRange("x", (5, 2), 5, 10, torch.zeros(5))])
    with pytest.raises(ValueError, match="Ranks disagree on the dtype or shape of 'x'"):
        merge_index(tmp_path, 2)


def test_reader_errors_name_the_tensor(tmp_path: Path) -> None:
    write_store(tmp_path, {"x": torch.randn(6, 5), "y": torch.randn(4)}, 2)
    with ShardedTensors(tmp_path) as reader:
        with pytest.raises(UsageError, match="Tensor 'z' is not in .*2 others are"):
            reader.read_into("z", torch.empty(4))
        with pytest.raises(UsageError, match=r"'y' in .* has shape \(4,\); cannot read \[2, 6\) into shape \(4,\)"):
            reader.read_into("y", torch.empty(4), 2, 6)
        with pytest.raises(UsageError, match=r"'y' .* cannot read \[0, 4\) into shape \(3,\)"):
            reader.read_into("y", torch.empty(3))


def test_reader_names_a_hole_and_a_damaged_file(tmp_path: Path) -> None:
    write_store(tmp_path, {"x": torch.randn(6, 50)}, 2)
    index_path, out = tmp_path / "index.json", torch.empty(6, 50)
    index = json.loads(index_path.read_text())
    first, second = index["x"]["pieces"]
    index_path.write_text(json.dumps({"x": index["x"] | {"pieces": [second]}}))
    with ShardedTensors(tmp_path) as reader, pytest.raises(UsageError, match=r"'x' has no values for \[0, "):
        reader.read_into("x", out)
    index_path.write_text(json.dumps({"x": index["x"] | {"pieces": [first | {"end": first["end"] - 1}, second]}}))
    with ShardedTensors(tmp_path) as reader, pytest.raises(UsageError, match="'x' cannot be read .* another size"):
        reader.read_into("x", out)
    index_path.write_text(json.dumps(index))
    shard = tmp_path / "shard-00001-of-00002.safetensors"
    content = shard.read_bytes()
    for length, message in [(len(content) - 1, "'x': .* ends too early"), (20, "'x' cannot be read"), (3, "'x'")]:
        shard.write_bytes(content[:length])
        with ShardedTensors(tmp_path) as reader, pytest.raises(UsageError, match=message):
            reader.read_into("x", out)
    for text in ["{", '{"x": {}}', "[]"]:
        index_path.write_text(text)
        with pytest.raises(UsageError, match="index.json cannot be read"):
            ShardedTensors(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_streamed_network_equals_the_one_safetensors_writes(
    tmp_path: Path, small_slices: None, dtype: torch.dtype | None
) -> None:
    weights = {f"layer.{name}": tensor for name, tensor in strided_tensors().items()}
    ids = torch.arange(7)
    write_store(tmp_path, {f"unet.{key}/ema": tensor for key, tensor in weights.items()}, 2)
    with ShardedTensors(tmp_path) as reader:
        sources = {key: reader.streamed(f"unet.{key}/ema") for key in weights}
        sources["position_ids"] = StreamedTensor.of(ids)
        digest = write_streamed(tmp_path / "net.safetensors", sources, dtype=dtype)
    assert digest == hashlib.sha256((tmp_path / "net.safetensors").read_bytes()).hexdigest()
    reference = {key: tensor.to(dtype or tensor.dtype).contiguous() for key, tensor in weights.items()}
    save_file(reference | {"position_ids": ids}, tmp_path / "reference.safetensors", {"format": "pt"})
    loaded, expected = load_file(tmp_path / "net.safetensors"), load_file(tmp_path / "reference.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(same_bits(loaded[key], expected[key]) for key in expected)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


MEMORY_SCRIPT = """
import resource, sys
import torch
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage.streamed_tensor import write_streamed
from sd_lightning.storage.tensor_store import ShardedTensors, merge_index, write_shards

torch.set_num_threads(1)
path, mib, strided = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "strided"
tensors = [torch.full((mib, 256, 1024), float(i)) for i in range(4)]
if strided:
    tensors = [tensor.permute(1, 2, 0) for tensor in tensors]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
write_shards(path, 0, 1, [TensorRange(f"t{i}", tuple(t.shape), 0, t.numel(), t) for i, t in enumerate(tensors)])
merge_index(path, 1)
with ShardedTensors(path) as reader:
    for i, tensor in enumerate(tensors):
        reader.read_into(f"t{i}", tensor.zero_())
        assert (tensor[0] == i).all() and (tensor[-1] == i).all()
    sources = {f"t{i}": reader.streamed(f"t{i}") for i in range(4)}
    write_streamed(path + "/network.safetensors", sources, dtype=torch.bfloat16)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="measures ru_maxrss, which Windows lacks")
@pytest.mark.parametrize(
    ("mib", "layout"), [(64, "plain"), (64, "strided"), pytest.param(256, "plain", marks=pytest.mark.slow)]
)
def test_saving_and_loading_hold_no_second_copy_in_memory(tmp_path: Path, mib: int, layout: str) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), str(mib), layout]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # The promise is the largest tensor + 256 MiB; slices of 16 MiB need far less.
    assert int(result.stdout) <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "scalar", "inner_window"])
def test_gpu_tensors_are_written_and_filled(tmp_path: Path, small_slices: None, name: str) -> None:
    tensor = strided_tensors()[name]
    on_gpu = torch.empty_strided(tensor.shape, tensor.stride(), device="cuda").copy_(tensor)
    write_store(tmp_path, {"x": on_gpu}, 1)
    out = torch.empty_strided(tensor.shape, tensor.stride(), device="cuda").fill_(torch.nan)
    with ShardedTensors(tmp_path) as reader:
        reader.read_into("x", out)
    assert torch.equal(out.cpu(), tensor)
