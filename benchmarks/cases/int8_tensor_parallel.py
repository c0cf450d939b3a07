"""int8 divided among processes: memory of each while it reads, error and time against one device; GB per card.

sd21, and FLUX.1-dev with one block of each kind, its text encoders with one layer: real widths, random weights. The GB
per card are counted from shapes: FLUX.1-dev, Qwen-Image, and a stack of BLOOM's 176 billion weights.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torchrun import torchrun

if TYPE_CHECKING:
    from torch import Tensor

CUTS: dict[str, dict[str, dict[str, Any]]] = {
    "sd21": {},
    "flux1_dev": {
        "transformer": {"num_layers": 1, "num_single_layers": 1},
        "text_encoder": {"num_hidden_layers": 1},
        "text_encoder_2": {"num_layers": 1},
    },
}
"""Architecture -> network -> changes of its configuration."""
BARS = {f"{name}_{figure}_{size}": bar for name in CUTS for size in (2, 4)
        for figure, bar in (("error", "<= 1e-3"), ("peak_over_part", "<= 1.1"))}  # fmt: skip
CARDS = (1, 2, 4, 8)
STACKS = ("flux1_dev", "qwen_image", "bloom")
TABLE = {
    "int8 on two processes, sd21; a cut of FLUX.1-dev: GB of each one's weights; peak while reading, less one layer, "
    "to them": "{sd21_part_gb_2}, {flux1_dev_part_gb_2}; {sd21_peak_over_part_2} ×, {flux1_dev_peak_over_part_2} ×",
    "the same on four": "{sd21_part_gb_4}, {flux1_dev_part_gb_4}; {sd21_peak_over_part_4} ×, "
    "{flux1_dev_peak_over_part_4} ×",
    "the same, error of the denoiser's output to one device's int8: two; four; two by LLM.int8": (
        "{sd21_error_2:.1e}, {flux1_dev_error_2:.1e}; {sd21_error_4:.1e}, {flux1_dev_error_4:.1e}; "
        "{sd21_error_bitsandbytes_2:.1e}, {flux1_dev_error_bitsandbytes_2:.1e}"
    ),
    "a call of the denoiser on two processes to one with two threads": "{sd21_time} ×; {flux1_dev_time} ×",
    **{
        f"GB of {name} per card, int8 on 1; 2; 4; 8 cards (bf16 on 1; 8)": "; ".join(
            f"{{{key}_int8_gb_{size}}}" for size in CARDS
        )
        + f" ({{{key}_bf16_gb_1}}; {{{key}_bf16_gb_8}})"
        for key, name in zip(STACKS, ("FLUX.1-dev", "Qwen-Image", "BLOOM-176B"), strict=True)
    },
}


def measure(
    *,
    sizes: Sequence[int] = (2, 4),
    side: int = 256,
    rounds: int = 5,
    cuts: Mapping[str, Any] = CUTS,
    stacks: Sequence[str] = STACKS,
) -> dict[str, float | list[float]]:
    """Measure both pipelines on each number of processes, time on the first alone; count the cards' GB.

    Args:
        sizes: Numbers of processes.
        side: Of the picture, in pixels.
        rounds: Calls that are timed, in turns with one device's.
        cuts: As :data:`CUTS`.
        stacks: What is counted from shapes.
    """
    metrics: dict[str, float | list[float]] = dict(gb_per_card(stacks))
    for name, changes in cuts.items():
        with tempfile.TemporaryDirectory() as folder:
            write(name, changes, Path(folder))
            for size in sizes:
                timed = rounds if size == sizes[0] else 0
                ranks: Any = torchrun("tensor_parallel_ranks.py", size, folder, side, timed)
                metrics |= _figures(name, size, ranks)
    return metrics


def _figures(name: str, size: int, ranks: list[dict[str, Any]]) -> dict[str, float | list[float]]:
    over = max((rank["peak"] - rank["layer"]) / rank["weights"] for rank in ranks)
    found: dict[str, float | list[float]] = {
        f"{name}_part_gb_{size}": max(rank["weights"] for rank in ranks) / 1e9,
        f"{name}_peak_gb_{size}": max(rank["peak"] for rank in ranks) / 1e9,
        f"{name}_peak_over_part_{size}": over,
        f"{name}_error_{size}": ranks[0]["error_weight_only"],
        f"{name}_error_bitsandbytes_{size}": ranks[0]["error_bitsandbytes"],
    }
    if ranks[0]["one"]:
        found[f"{name}_time"] = [ours / one for ours, one in zip(ranks[0]["ours"], ranks[0]["one"], strict=True)]
        found |= {f"{name}_seconds": ranks[0]["ours"], f"{name}_seconds_one": ranks[0]["one"]}
    return found


def write(name: str, changes: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write a pipeline of random weights in float16, no network of which is ever in memory."""
    import torch

    from sd_lightning import LatentDiffusion
    from sd_lightning.models.families import architecture
    from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed

    given = architecture(name)
    networks = {key: replace(each, config=each.config | changes.get(key, {})) for key, each in given.networks.items()}
    model = LatentDiffusion.build(replace(given, networks=networks), device="meta")
    model.save_pretrained(folder, skip=list(model.networks))
    for key, network in model.networks.items():
        component, state = model.components[key], network.state_dict()
        names = component.file_keys(state)
        tensors = {
            names[each]: StreamedTensor(torch.float16, tuple(t.shape), partial(_values, tuple(t.shape), each))
            for each, t in state.items()
        }
        write_streamed(folder / key / component.weights_file, tensors)


def _values(shape: tuple[int, ...], name: str) -> Iterator[Tensor]:
    """Weights whose outputs are as large as their inputs; norms that change nothing."""
    import torch

    if len(shape) < 2:
        yield torch.full((max(1, shape[0] if shape else 1),), float(name.endswith("weight")), dtype=torch.float16)
        return
    numel, fan_in = torch.Size(shape).numel(), torch.Size(shape[1:]).numel()
    block = torch.randn(2**22, generator=torch.Generator().manual_seed(numel)) * fan_in**-0.5
    half = block.half()
    for begin in range(0, numel, len(half)):
        yield half[: min(len(half), numel - begin)]


def gb_per_card(stacks: Sequence[str] = STACKS) -> dict[str, float]:
    """Count from shapes what the weights take on each of several cards: text encoders, denoiser and VAE."""
    from sd_lightning import LatentDiffusion
    from sd_lightning.planner.passes import weight_bytes
    from sd_lightning.quantization import Int8, quantize_
    from sd_lightning.quantization.int8 import EXCLUDED
    from sd_lightning.quantization.tensor_parallel import TensorParallel

    found = {}
    for name in stacks:
        whole: Any = bloom() if name == "bloom" else LatentDiffusion.build(name, device="meta")
        for size, precision in itertools.product(CARDS, ("bf16", "int8")):
            model = copy.deepcopy(whole)
            left_out = EXCLUDED if precision == "int8" else tuple(model.networks)
            quantize_(model, Int8(dtype="bfloat16", exclude=left_out), tensor_parallel=TensorParallel(0, size))
            found[f"{name}_{precision}_gb_{size}"] = sum(map(weight_bytes, model.networks.values())) / 1e9
    return found


def bloom() -> SimpleNamespace:
    """Return BLOOM-176B on the meta device, as `quantize_` takes several networks, with a plan for its layers."""
    import torch
    from transformers import BloomConfig, BloomModel

    from sd_lightning.quantization.tensor_parallel import Plan, Style

    columns, rows = Style("colwise"), Style("rowwise")
    plan = Plan(
        {
            "word_embeddings": Style("embedding_rowwise"),
            "h.*.self_attention.query_key_value": columns,
            "h.*.self_attention.dense": rows,
            "h.*.mlp.dense_h_to_4h": columns,
            "h.*.mlp.dense_4h_to_h": rows,
        },
        heads=("num_heads",),
    )
    with torch.device("meta"):
        network = BloomModel(BloomConfig(vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112))
    return SimpleNamespace(
        networks={"bloom": network},
        deferred={},
        draws_in_float32=lambda name: False,
        tensor_parallel_plan=lambda name: plan,
    )
