"""Blocks that keep only some of their activations compute the same, in less memory, compiled or not."""

from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.checkpointing import SavedActivations, description, recompute_
from sd_lightning.models.families.blocks import recomputable, repeated_blocks
from sd_lightning.training.speed import Speed

LESS = [each for each in SavedActivations if each is not SavedActivations.ALL]
AGAIN = {
    SavedActivations.ALL: set(),
    SavedActivations.PRODUCTS: {"native_group_norm"},
    SavedActivations.CONVOLUTIONS: {"native_group_norm", "addmm"},
    SavedActivations.INPUTS: {"native_group_norm", "addmm", "convolution"},
}
"""What a resnet block computes again in backward."""


class Ops(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def resnet(kept: SavedActivations) -> ResnetBlock2D:
    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=32, temb_channels=16, groups=8).train()
    recompute_({"block": block}, {"block": kept})
    return block


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 32, 8, 8, requires_grad=True), torch.randn(2, 16)


def gradients(networks: dict[str, nn.Module], model: LatentDiffusion) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a step through text encoder and denoiser, and all gradients."""
    torch.manual_seed(1)
    latents = torch.randn(4, *model.latent_space.shape(model.resolution, model.resolution))
    hidden = networks["text_encoder"](torch.arange(32).view(4, 8))[0]
    loss = networks["unet"](latents, torch.arange(4), encoder_hidden_states=hidden).sample.square().mean()
    loss.backward()
    found = [p.grad for network in networks.values() for p in network.parameters() if p.grad is not None]
    return loss.detach(), found


@pytest.mark.parametrize("kept", [(each,) for each in LESS] + [tuple(SavedActivations)], ids=str)
def test_no_bit_of_loss_and_gradients_changes(kept: tuple[SavedActivations, ...]) -> None:
    found = []
    for chosen in ((SavedActivations.ALL,), kept):
        torch.manual_seed(0)
        model = LatentDiffusion.build("tiny")
        networks = {name: model.networks[name].train() for name in ("text_encoder", "unet")}
        blocks = recomputable(networks)
        recompute_(blocks, {name: chosen[index % len(chosen)] for index, name in enumerate(blocks)})
        found.append(gradients(networks, model))
    (loss, plain), (other, ours) = found
    assert torch.equal(loss, other) and len(plain) == len(ours) > 100
    assert all(torch.equal(each, its) for each, its in zip(plain, ours))


@pytest.mark.parametrize("kept", SavedActivations)
def test_backward_computes_again_what_is_not_kept(kept: SavedActivations) -> None:
    output = resnet(kept)(*inputs())
    with Ops() as backward:
        output.sum().backward()
    assert backward.names & AGAIN[SavedActivations.INPUTS] == AGAIN[kept]


@pytest.mark.parametrize("kept", SavedActivations)
def test_a_block_is_compiled_as_one_graph_that_keeps_the_same(
    kept: SavedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other order, a checkpoint around a compiled block, runs uncompiled without a word."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile_, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    counters.clear()
    block, network = resnet(kept), nn.Module()
    network.blocks = nn.ModuleList([block])
    Speed(compile_blocks=True).apply_({"net": network})
    output = block(*inputs())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    with Ops() as backward:
        output.sum().backward()
    assert backward.names & (AGAIN[SavedActivations.INPUTS] - {"native_group_norm"}) == AGAIN[kept] - {
        "native_group_norm"
    }
    plain = resnet(SavedActivations.ALL)
    plain(*inputs()).sum().backward()
    for ours, theirs in zip(block.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_block_stays_a_block_of_its_class() -> None:
    block = resnet(SavedActivations.INPUTS)
    assert isinstance(block, ResnetBlock2D) and type(block).__name__ == "ResnetBlock2D"
    network = nn.Module()
    network.only = block
    assert repeated_blocks(network) == {"only": block}
    with torch.no_grad(), Ops() as ops:
        block(*inputs())
    assert "convolution" in ops.names


def test_what_is_kept_is_told_in_order() -> None:
    assert (
        description([SavedActivations.INPUTS, SavedActivations.ALL, SavedActivations.INPUTS])
        == "1 keep all, 2 keep inputs"
    )


def test_a_limit_without_a_choice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gradient_checkpointing=2.5, a limit, but apply_\(\) got no kept="):
        Speed(gradient_checkpointing=2.5).apply_({})
    with pytest.raises(UsageError, match="gradient_checkpointing=-1; expected true, false, auto, or GB"):
        Speed(gradient_checkpointing=-1)
