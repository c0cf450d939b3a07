"""CUDA's caching allocator, replayed: its rules on small examples, and training steps."""

import pytest

from sd_lightning import LatentDiffusion
from sd_lightning.planner.footprint import replicated
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.segments import MIB, Allocator


def test_small_blocks_share_a_segment() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.allocate(512 * 1024)
    assert allocator.reserved.most == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved.most == 4 * MIB


@pytest.mark.parametrize(("size", "segment"), [(MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)])
def test_the_size_of_a_segment(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved.most == segment


def test_the_smallest_free_block_that_is_large_enough_is_taken_and_cut() -> None:
    allocator = Allocator()
    large, middle = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(middle)
    taken = [allocator.allocate(16 * MIB) for _ in range(2)]
    assert {each.segment for each in taken} == {middle.segment}
    assert allocator.reserved.most == 96 * MIB


def test_a_rest_of_a_megabyte_is_not_cut_off() -> None:
    allocator = Allocator()
    assert allocator.allocate(11 * MIB).size == 12 * MIB


def test_free_neighbours_are_joined() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(60 * MIB))
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.allocate(60 * MIB).segment is blocks[0].segment
    assert allocator.reserved.most == 60 * MIB


def test_a_block_between_free_ones_is_a_fragmentation_that_cannot_be_given_back() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(60 * MIB))
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(30 * MIB)
    assert (allocator.reserved.most, allocator.reserved.peak, allocator.reserved.live) == (
        90 * MIB,
        90 * MIB,
        60 * MIB,
    )
    assert allocator.reserved.fragments == 30 * MIB


def test_a_whole_free_segment_can_be_given_back() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB)
    assert (allocator.reserved.most, allocator.reserved.peak) == (130 * MIB, 70 * MIB)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_hold_what_the_trace_holds_and_the_kept_gradients(checkpointing: bool) -> None:
    model = LatentDiffusion.build("sd15", device="meta")
    forecaster = Forecaster(model, TrainingRun(4, 512, "bf16-true", gradient_checkpointing=checkpointing))
    footprint = replicated(forecaster.workload)
    found = forecaster.segments(footprint)
    memory = forecaster.forecast(footprint).on_device[0].parts
    assert found.live == pytest.approx(memory["activations"] + memory.get("gradients", 0), rel=0.02)
    assert found.live <= found.peak <= found.most
    assert found.fragments < 0.1 * found.live
