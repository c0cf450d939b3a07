"""What hooks read and write of weights in parts: small weights, of which some ranks have no part, and views."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranks import run_jobs_of_all
from sd_lightning.strategies.fsdp.tensors import WholeWhereNeeded

CASES = (
    *(f"SmallWeights:{each}" for each in ("fsdp", "fsdp_offload", "gemini_default", "gemini_offload")),
    *(f"SmallReadings:{each}" for each in ("zero1", "zero2", "zero3")),
    *(f"WritesViews:{each}" for each in ("fsdp", "fsdp_offload", "zero1", "zero3")),
)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("deepspeed")
    references = [f"{module}:ddp" for module in dict.fromkeys(case.partition(":")[0] for case in CASES)]
    jobs = {case: dict(zip(("module", "strategy"), case.split(":"))) | {"devices": 2} for case in [*references, *CASES]}
    return run_jobs_of_all("hook_jobs", jobs, tmp_path_factory.mktemp("hooks"), world_size=2, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hooks_read_and_write_parts_as_they_would_whole_weights(found: Found, case: str) -> None:
    for rank in found:
        ours, theirs = rank[case], rank[f"{case.partition(':')[0]}:ddp"]
        assert "refused" not in ours, ours
        assert ours["noted"] == pytest.approx(theirs["noted"], rel=1e-5, abs=1e-5)
        assert ours["weights"].keys() == theirs["weights"].keys()
        for name, sums in theirs["weights"].items():
            assert ours["weights"][name] == pytest.approx(sums, rel=1e-5, abs=5e-5), name


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, dist.DistError])
def test_an_error_of_one_rank_alone_gathers_nothing(shards: DTensor, error: type[Exception]) -> None:
    """Other ranks would not gather with it; of any other error of torch the operation is done again with wholes."""
    calls = list[type]()

    def fails(weight: torch.Tensor, with_what: type[Exception]) -> float:
        calls.append(type(weight))
        if isinstance(weight, DTensor):
            raise with_what("no")
        return float(weight.sum())

    with WholeWhereNeeded() as mode:
        with pytest.raises(error, match="no"):
            mode.__torch_function__(fails, (), (shards, error))
        assert calls == [DTensor]
        assert mode.__torch_function__(fails, (), (shards, RuntimeError)) == 6.0
    assert calls == [DTensor, DTensor, torch.Tensor]


@pytest.fixture
def shards() -> Iterator[DTensor]:
    """A weight of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield DTensor.from_local(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()
