"""sd21 from files into int8, saved, and loaded again, in a process of its own that tells the memory it needed.

``python int8_driver.py FOLDER RESULTS.json``. The pipeline is written here, with random weights in float16, the UNet
in three shards; nothing of it is ever in memory as a whole.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from loading_driver import begin_peak, status
from sd_lightning import LatentDiffusion
from sd_lightning.planner.passes import weight_bytes
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.storage.safetensors_file import SLICE_BYTES
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed

SHARDS = 3


def write_sd21(folder: Path) -> None:
    """Write the published sizes with random weights."""
    model = LatentDiffusion.build("sd21", device="meta")
    model.save_pretrained(folder, skip=list(model.networks))
    for name, network in model.networks.items():
        component = model.components[name]
        keys = component.file_keys(network.state_dict())
        tensors = {
            keys[key]: StreamedTensor(torch.float16, tuple(t.shape), partial(_random, t.numel()))
            for key, t in network.state_dict().items()
        }
        file = folder / name / component.weights_file
        if name == "unet":
            _write_shards(file, tensors)
        else:
            write_streamed(file, tensors)


def _write_shards(file: Path, tensors: dict[str, StreamedTensor]) -> None:
    names = list(tensors)
    each = -(-len(names) // SHARDS)
    weight_map = {}
    for number in range(SHARDS):
        part = names[number * each : (number + 1) * each]
        shard = f"{file.stem}-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        write_streamed(file.with_name(shard), {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(numel: int) -> Iterator[Tensor]:
    """Values of the size that real weights have; the same block again and again, from another place each time."""
    block = (torch.randn(SLICE_BYTES // 2, generator=torch.Generator().manual_seed(numel)) / 64).half()
    for start in range(0, numel, len(block)):
        yield block[: min(len(block), numel - start)]


def digests(model: LatentDiffusion) -> dict[str, float]:
    """Return a figure per tensor that hardly another tensor has."""
    return {
        f"{name}.{key}": float((t.double().view(-1) * torch.arange(1, t.numel() + 1).remainder(977)).sum())
        if t.numel() < 2**22
        else float(t.view(-1)[:: 2**10].double().sum() + t.view(-1)[7 :: 2**11].double().sum())
        for name, network in model.networks.items()
        for key, t in network.state_dict().items()
    }


def main(folder: Path, results: Path) -> None:
    torch.manual_seed(0)
    write_sd21(folder / "float16")
    LatentDiffusion.build("tiny")  # imports what loading needs
    networks = ("unet", "vae", "text_encoder")
    found: dict[str, float] = {}

    gc.collect()
    base, begin = begin_peak(), time.perf_counter()
    model = quantize_(LatentDiffusion.from_pretrained(folder / "float16", deferred=networks), Int8(dtype="float16"))
    found |= {"quantize_peak": status("VmHWM") - base, "quantize_seconds": time.perf_counter() - begin}
    found["weights"] = sum(weight_bytes(network) for network in model.networks.values())
    found["numel"] = sum(math.prod(t.shape) for n in model.networks.values() for k, t in n.state_dict().items()
                         if not k.endswith("weight_scale"))  # fmt: skip
    before = begin_peak()
    model.save_pretrained(folder / "int8")
    found["save_peak"] = status("VmHWM") - before
    first = digests(model)
    found["files"] = sum(file.stat().st_size for file in (folder / "int8").rglob("*.safetensors"))
    del model
    gc.collect()

    base, begin = begin_peak(), time.perf_counter()
    model = LatentDiffusion.from_pretrained(folder / "int8")
    found |= {"load_peak": status("VmHWM") - base, "load_seconds": time.perf_counter() - begin}
    found["same"] = float(digests(model) == first)
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
