"""Drawing with weights in host memory: the same bits, two blocks on the device at a time, and nothing left there."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretended_accelerator import Race, pretended_accelerator
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.gemini import chunk
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.placement import Kind, Tier
from sd_lightning.models import generation, offloading
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.quantization import Int8, quantize_
from small_models import SMALL_SDXL, TINY_TRANSFORMERS

PROMPTS, SEEDS = ["a handwritten three", "a one"], [5, 6]
MODELS = ["tiny", "tiny_depth", "tiny_inpainting", SMALL_SDXL, *TINY_TRANSFORMERS]


def draw(model: LatentDiffusion, *, offload: Any = None, **settings: Any) -> np.ndarray:
    options = SamplingOptions(**{"num_inference_steps": 3, "batch_size": 1, **settings})
    images = generate(model, PROMPTS, seeds=SEEDS, options=options, offload=offload, device=torch.device("cpu"))
    return np.stack([np.asarray(image) for image in images])


def rounded(tensors: list[Tensor]) -> int:
    """Bytes of different tensors, each in whole blocks of 512."""
    return sum(-(-each.nbytes // 512) * 512 for each in {id(t): t for t in tensors}.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def largest_on_device(model: LatentDiffusion) -> int:
    """Bytes of the network that takes most: what is outside of blocks, and twice the largest block."""
    sizes = []
    for name, network in model.networks.items():
        is_streamed = name == model.family.denoiser or name in model.text_encoders
        blocks = [rounded(tensors_of(block)) for block in repeated_blocks(network).values()] if is_streamed else []
        sizes.append(rounded(tensors_of(network)) - sum(blocks) + sum(2 * [max(blocks)] if blocks else []))
    return max(sizes)


class WhereComputed(TorchDispatchMode):
    """Note operations on weights that are still in the slow tier; copies to the fast tier are none."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: set[int] = set()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_view = any(each.alias_info is not None for each in func._schema.returns) and not func._schema.is_mutable
        is_copy = func is torch.ops.aten.copy_.default and leaves[1].dtype == torch.uint8  # of a flat buffer
        if not (is_view or is_copy) and any(each.untyped_storage()._cdata in self.slow for each in leaves):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """The memories that were used, while weights on the slow tier may not be computed with."""
    used: list[Memory] = []
    original = generation.offloading

    @contextmanager
    def spied(model: LatentDiffusion, device: torch.device) -> Iterator[Memory]:
        with original(model, device) as memory, WhereComputed() as computed:
            used.append(memory)
            for name, network in model.networks.items():
                computed.slow |= {each.untyped_storage()._cdata for each in tensors_of(network)}
                if (bn := getattr(network, "bn", None)) is not None and name == "vae":  # read with .to(device)
                    computed.slow -= {each.untyped_storage()._cdata for each in tensors_of(bn)}
            yield memory
            assert not computed.found, "computed on the host"

    monkeypatch.setattr(generation, "offloading", spied)
    return used


@pytest.mark.parametrize("architecture", MODELS, ids=lambda each: each if isinstance(each, str) else "small_sdxl")
def test_every_family_draws_the_same_bits_with_two_blocks_on_the_device(
    architecture: Any, memories: list[Memory]
) -> None:
    model = LatentDiffusion.build(architecture, seed=1)
    quantize_(model, Int8(dtype="bfloat16"))
    expected = draw(model)
    weights = {name: [each.clone() for each in tensors_of(network)] for name, network in model.networks.items()}
    assert (draw(model, offload="blocks") == expected).all()
    ledger = memories[0].ledger
    assert ledger.peak[Tier.FAST] == largest_on_device(model)
    assert ledger.current[Tier.FAST] == 0
    for name, network in model.networks.items():
        for ours, theirs in zip(tensors_of(network), weights[name], strict=True):
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and ours.equal(theirs), name
    assert (draw(model) == expected).all(), "the model draws as before"


CONFIGS = {
    "float32": None,
    "bitsandbytes": Int8(linear="bitsandbytes"),
    "mixed": Int8(dtype="float16", exclude=("vae", "text_encoder")),
}
SETTINGS = {"usual": {}, "large": {"batch_size": 2, "height": 64, "width": 32, "vae_tiling": True}}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_any_kernel_dtype_size_and_batch(memories: list[Memory], config: Int8 | None, settings: dict[str, Any]) -> None:
    model = LatentDiffusion.build("tiny", seed=2)
    if config is not None:
        quantize_(model, config)
    model.denoiser.to(memory_format=torch.channels_last)
    expected = draw(model, **settings)
    assert (draw(model, offload="blocks", **settings) == expected).all()
    assert memories[0].ledger.peak[Tier.FAST] == largest_on_device(model)
    assert model.denoiser.mid_block.resnets[0].time_emb_proj.weight.is_contiguous()
    assert model.denoiser.mid_block.resnets[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_cast_weights_do_not_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of different dtypes compute under autocast, which keeps what it casts of float32 weights."""
    model = LatentDiffusion.build("tiny", seed=2)
    model.text_encoders["text_encoder"].to(torch.bfloat16)
    casts: list[int] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape:
                casts.append(1)
            return func(*args, **(kwargs or {}))

    weight = model.denoiser.mid_block.attentions[0].transformer_blocks[0].ff.net[2].weight
    expected = draw(model)
    with Casts():
        assert (draw(model) == expected).all()
        kept = len(casts)
        assert (draw(model, offload="blocks") == expected).all()
    assert len(casts) - kept > kept > 0, "with offload, each call casts again"


class _Blocks(nn.Module):
    """Six blocks that are called in another order than that of registration; the last two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8 + 8 * (i == 2)) for i in range(6))
        self.blocks[5].bias = self.blocks[4].bias
        self.order = [3, 1, 0, 4, 5]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x).relu() + x
        return x


def _network(memory: Memory) -> tuple[_Blocks, Any]:
    torch.manual_seed(0)
    module = _Blocks()
    network = offloading._OffloadedNetwork(memory, module, list(module.blocks))
    for block, unit in network.units.items():
        block.register_forward_pre_hook(lambda *_, unit=unit: network.use(unit))
    return module, network


def test_the_order_is_learned_and_the_next_block_is_on_its_way() -> None:
    memory = Memory(torch.device("cpu"))
    module, network = _network(memory)
    size = 512 * 2  # a weight and a bias, each in a block of its own
    on_device, moved = 3 * 512 + 2 * (512 + 512), memory.ledger.moved
    assert [unit.nbytes for unit in network.units.values()] == [size, size, size, size, 512, 512]
    network.enter()
    assert memory.ledger.current[Tier.FAST] == on_device
    counts: list[int] = []
    for block in module.blocks:
        block.register_forward_hook(lambda *_: counts.append(moved[Tier.SLOW, Tier.FAST]))
    with torch.no_grad():
        for _ in range(3):
            begin = moved[Tier.SLOW, Tier.FAST]
            module(torch.ones(2, 8))
            copied = moved[Tier.SLOW, Tier.FAST] - begin
    assert copied == 3 * size + 2 * 512, "each block that is used is copied once, and no other"
    # While a block of the last call computes, the next one is copied; after the last one, the first of a next call.
    steps = [after - before for before, after in zip([begin, *counts[-5:]], counts[-5:])]
    assert steps == [size, size, 512, 512, size]
    assert memory.ledger.peak[Tier.FAST] == on_device
    network.leave()
    assert memory.ledger.current[Tier.FAST] == 0 and module.blocks[4].bias is module.blocks[5].bias


@contextmanager
def accelerator() -> Iterator[Any]:
    """A pretended one that also tells the reads of weights from those of the host."""
    with pretended_accelerator(with_network=False) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "Memory", chunk.Memory)
        yield device


def test_copies_and_computation_are_in_order_and_nothing_stays_locked() -> None:
    model = quantize_(LatentDiffusion.build("tiny_flux", seed=1), Int8())
    expected = draw(model)
    with accelerator() as device:
        assert (draw(model, offload="blocks") == expected).all()
        assert device.page_locks.num_locked > len(repeated_blocks(model.denoiser))
        gc.collect()
        assert not device.page_locks.sizes
    assert (draw(model) == expected).all()


@pytest.mark.parametrize("forgotten", ["join", "after"])
def test_a_block_that_is_not_waited_for_is_a_race(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    model = quantize_(LatentDiffusion.build("tiny_flux", seed=1), Int8())
    monkeypatch.setattr(Arrival, forgotten, lambda self, *_: self)
    with accelerator(), pytest.raises(Race):
        draw(model, offload="blocks")


def test_memory_that_may_not_be_locked_is_refused() -> None:
    model = LatentDiffusion.build("tiny", seed=1)
    expected = draw(model)
    with accelerator() as device:
        device.page_locks.limit = 100_000
        with pytest.raises(UsageError, match="offload=blocks.*page-locked; free host memory"):
            draw(model, offload="blocks")
    assert (draw(model) == expected).all()


def test_after_a_failure_the_model_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = quantize_(LatentDiffusion.build("tiny", seed=1), Int8())
    expected = draw(model)
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError

    hook = model.denoiser.mid_block.resnets[0].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        draw(model, offload="blocks")
    hook.remove()
    assert not any(module._forward_pre_hooks for network in model.networks.values() for module in network.modules())
    assert (draw(model) == expected).all()
    model.save_pretrained(tmp_path)
    assert (draw(LatentDiffusion.from_pretrained(tmp_path), offload="blocks") == expected).all()


def test_a_device_without_room_for_blocks_gets_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize_(LatentDiffusion.build("tiny", seed=1), Int8())
    expected, allocate, used = draw(model), Memory.allocate, []

    def full(self: Memory, tier: Tier, kind: Kind, *given: Any) -> Any:
        if kind is Kind.GATHERED:
            used.append(self)
            raise torch.OutOfMemoryError
        return allocate(self, tier, kind, *given)

    monkeypatch.setattr(Memory, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError):
        draw(model, offload="blocks")
    assert not used[0].ledger.moved[Tier.SLOW, Tier.FAST], "a copy is in flight"
    assert (draw(model) == expected).all()


def test_what_cannot_be_offloaded_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LatentDiffusion.build("tiny", seed=1)
    places = [each.data_ptr() for each in tensors_of(model.denoiser)]
    with pytest.raises(UsageError, match="offload=layers; expected None or blocks; write offload=blocks"):
        draw(model, offload="layers")
    given: dict[str, Any] = {"seeds": SEEDS, "offload": "blocks"}
    with pytest.raises(UsageError, match="offload=blocks device=mps; expected cuda or cpu"):
        generate(model, PROMPTS, device=torch.device("mps"), **given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"offload=blocks and no device.*device=torch.device\(.cuda.\)"):
        generate(model, PROMPTS, **given)
    assert places == [each.data_ptr() for each in tensors_of(model.denoiser)]


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["tiny", "tiny_flux", "tiny_klein", "tiny_qwen_image"])
def test_on_a_gpu_the_bits_are_the_same_and_the_weights_are_not_there(
    architecture: str, gpu_accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(gpu_accelerator)
    model = quantize_(LatentDiffusion.build(architecture, seed=1), Int8(dtype="bfloat16"))
    options = SamplingOptions(num_inference_steps=3)

    def drawn(offload: Any) -> tuple[np.ndarray, int]:
        for network in model.networks.values():
            network.cpu()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        images = generate(model, PROMPTS, seeds=SEEDS, options=options, device=device, offload=offload)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return np.stack([np.asarray(image) for image in images]), peak

    drawn(None)  # kernels are chosen, and workspaces taken
    expected, whole = drawn(None)
    weights = sum(rounded(tensors_of(network)) for network in model.networks.values())
    ours, peak = drawn("blocks")
    assert (ours == expected).all()
    again, after = drawn("blocks")
    assert (again == expected).all() and after == peak
    if device.type == "cuda":
        assert peak <= whole - weights + largest_on_device(model)
        assert next(model.denoiser.parameters()).device.type == "cpu"
