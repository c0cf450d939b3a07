"""Actors of a Ray cluster that read and encode batches for the training processes of a run.

``EncoderPool`` is one small actor on the machine of rank 0. It starts the ``Encoder`` actors and owns them: they end
with it, and it ends with rank 0, in whatever way. An encoder whose process dies is started again by Ray, which also
repeats the calls that it had not answered.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning.remote.cluster import check_resources, check_versions, package_versions

if TYPE_CHECKING:
    from sd_lightning.data.batch import CaptionedImages
    from sd_lightning.data.order import Batch, Key
    from sd_lightning.models.encoder import LatentEncoder

WHO = "data.encoders=ray"
_MOST_RESTARTS = 3
"""Restarts of an encoder, without a batch between them, before the run gives up."""


class EncoderPool:
    """The encoders of a run, an actor."""

    def __init__(self, options: Mapping[str, Any], resources: Mapping[str, float], folder: str) -> None:
        """Take what all encoders have in common.

        Args:
            options: Of Ray's actors.
            resources: What each reserves.
            folder: Working directory of the training, for relative paths.
        """
        self._options, self._resources, self._folder = dict(options), resources, folder
        self._numbers = itertools.count()
        self._encoders: dict[int, Any] = {}
        self._work: list[tuple[Any, Any]] = []
        self._starts: dict[int, list[tuple[str, str]]] = {}
        """Node and process of each start since the last batch, by encoder."""

    def resize(self, num_encoders: int) -> None:
        """Start or end encoders; calls to those that end fail, and are sent to others.

        Raises:
            UsageError: The cluster has no room for them.
        """
        import ray

        check_room(num_encoders, self._resources)
        versions, me = package_versions(), ray.get_runtime_context().current_actor
        while len(self._encoders) < num_encoders:
            number = next(self._numbers)
            self._encoders[number] = ray.remote(**self._options)(Encoder).remote(me, number, self._folder, versions)
        for number in [*self._encoders][num_encoders:]:
            ray.kill(self._encoders.pop(number))

    def members(self) -> dict[int, Any]:
        """Return the encoders by number."""
        return self._encoders

    def publish(self, references: tuple[Any, Any]) -> int:
        """Take references to a data set and to the ``LatentEncoder`` for it; return their number."""
        self._work.append(references)
        return len(self._work) - 1

    def work(self, number: int) -> tuple[Any, Any]:
        """Return what was published."""
        return self._work[number]

    def started(self, number: int, node: str, worker_id: str) -> None:
        """Note that the process of an encoder has started."""
        self._starts.setdefault(number, []).append((node, worker_id))

    def worked(self, number: int) -> None:
        """Note that an encoder has encoded a batch since it has started."""
        del self._starts[number][:-1]

    def trouble(self) -> str | None:
        """Return which encoder keeps dying and how, if there is one."""
        for number in self._encoders:
            ended = self._starts.get(number, [])[:-1]
            if len(ended) >= _MOST_RESTARTS:
                node, worker_id = ended[-1]
                return (
                    f"{WHO}: encoder {number} on {node} was restarted {len(ended)} times without a batch between; its "
                    f"last process: {_end_of(worker_id)}; write a smaller data.num_encoders if memory is short, or "
                    "see Ray's log of it"
                )
        return None


class Encoder:
    """An encoder, an actor."""

    def __init__(self, pool: Any, number: int, folder: str, versions: Mapping[str, str]) -> None:
        import ray

        check_versions(WHO, versions)
        quiet_libraries()
        if os.path.isdir(folder):
            os.chdir(folder)
        self._pool, self._number, self._node = pool, number, ray.util.get_node_ip_address()
        self._work: dict[int, tuple[CaptionedImages, LatentEncoder]] = {}
        self._encoders: dict[Any, LatentEncoder] = {}
        self._has_worked = False
        ray.get(pool.started.remote(number, self._node, ray.get_runtime_context().get_worker_id()))

    def node(self) -> str:
        """Return the address of the machine."""
        return self._node

    def encode(self, work: int, keys: Sequence[Key]) -> tuple[Batch, float]:
        """Return a batch with its images and captions encoded, as bytes, and the seconds that it took."""
        start = time.perf_counter()
        if work not in self._work:
            self._work[work] = self._loaded(work)
        dataset, encoder = self._work[work]
        batch = packed(encoder, dataset.__getitems__(keys))
        batch["bad"] = [(index, f"{reason} (on {self._node})") for index, reason in batch["bad"]]
        if not self._has_worked:
            self._has_worked = True
            self._pool.worked.remote(self._number)
        return batch, time.perf_counter() - start

    def _loaded(self, work: int) -> tuple[CaptionedImages, LatentEncoder]:
        import ray
        import torch

        dataset, encoder = ray.get(self._pool.work.remote(work))
        if encoder not in self._encoders:
            self._encoders = {encoder: ray.get(encoder).to(torch.device("cuda" if ray.get_gpu_ids() else "cpu"))}
        return ray.get(dataset), self._encoders[encoder]


def check_room(num_encoders: int, resources: Mapping[str, float]) -> None:
    """Raise a ``UsageError`` if that is no number of encoders, or the cluster has not what they reserve."""
    if num_encoders < 1:
        raise UsageError(f"data.num_encoders={num_encoders}: expected 1 or more; write data.num_encoders=8")
    wanted = {name: num_encoders * each for name, each in resources.items()}
    check_resources(WHO, wanted, setting="data.num_encoders")


def _end_of(worker_id: str) -> str:
    """Return how a process of the cluster has ended, as Ray has recorded it."""
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]

    workers = map(WorkerTableData.FromString, state._connect_and_get_accessor().get_worker_table())
    ends = [each.exit_detail for each in workers if each.worker_address.worker_id.hex() == worker_id]
    return (ends[0] if ends else "").partition(" Some common causes")[0].rstrip(". \n") or "killed"


def packed(encoder: LatentEncoder, batch: Batch) -> Batch:
    """Return a batch with its images and captions encoded, every tensor as its bytes, type and layout.

    The networks compute in the encoder's type, and their results are widened to float32: they travel in that type,
    unless bits would be lost (a VAE that stays in float32).
    """
    import torch

    from sd_lightning.models.families.base import map_conditioning

    def pack(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        narrow = value.to(encoder.dtype) if value.is_floating_point() else value
        value = narrow if torch.equal(narrow.to(value.dtype), value) else value
        order = sorted(range(value.ndim), key=value.stride, reverse=True)  # networks compute by the layout
        return value.cpu().permute(order).contiguous().view(torch.uint8).numpy(), value.dtype, order

    if "index" in batch:  # else nothing of it can be read
        there = map_conditioning(
            batch, lambda each: each.to(encoder.device) if isinstance(each, torch.Tensor) else each
        )
        batch = dict(encoder.encode(there))  # type: ignore[arg-type]
        if "text_embeddings" in batch:
            del batch["input_ids"]
    return map_conditioning(batch, pack)


def unpacked(batch: Batch, *, pin: bool) -> tuple[Batch, int]:
    """Return a batch that an encoder has sent, floating-point tensors as float32, and the bytes that it took.

    Args:
        batch: From :meth:`Encoder.encode`.
        pin: Whether to put it into page-locked memory.
    """
    import torch

    from sd_lightning.models.families.base import map_conditioning

    sizes = []

    def unpack(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        array, dtype, order = value
        sizes.append(array.nbytes)
        tensor = torch.from_numpy(array.copy()).view(dtype)  # the array is in Ray's memory
        tensor = tensor.permute([order.index(dim) for dim in range(tensor.ndim)])
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        return tensor.pin_memory() if pin else tensor

    return map_conditioning(batch, unpack), sum(sizes)
