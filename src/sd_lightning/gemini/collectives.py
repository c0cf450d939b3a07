"""The engine's collectives: one implementation per backend, with bytes counted and the order recorded.

gloo's own ``all_gather`` and ``reduce_scatter`` copy the whole buffer internally. Sending each shard directly to its
destination moves the same bytes in a third of the time (two ranks, 33.5 M floats in 16 pieces: 60 against 180 ms to
gather, 90 against 385 ms to reduce; gloo's all_reduce takes 132 ms). It also sums in rank order, so the result does not
depend on how parameters are packed. nccl has neither problem and uses its own collectives.

Gradients are summed in ``reduce_dtype`` or their own type, whichever is wider. Exchanged shards are sent in their own
type and widened by the receiver; nccl sums in the type that it sends, so gradients are widened before.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sd_lightning._errors import UsageError

_MEETINGS = itertools.count(1)
"""Numbers of meetings: of this process, since engines share their group's store."""


class Pending:
    """A collective in progress."""

    def __init__(self, works: Sequence[dist.Work] = (), finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Order later operations after the collective."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None


class Collectives:
    """Collectives over one process group, or over a single rank without one.

    Args:
        group: The ranks that share the chunks; by default the default group, if there is one.
        device: The device of the chunks.
        reduce_dtype: Type in which gradients of narrower types are summed.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.is_alone = has_no_peers(group)
        """Whether collectives are left out: they would change nothing."""
        self.device = device
        self.reduce_dtype = reduce_dtype
        self.gathered_bytes = 0
        """Bytes received by this rank in all-gathers: ``(world_size - 1) / world_size`` of each buffer."""
        self.reduced_bytes = 0
        """Bytes received by this rank in reduce-scatters."""
        self.count = 0
        self._peers = [] if group is None else dist.get_process_group_ranks(group)
        self._sequence = hashlib.sha256()
        """Digest of all collectives so far, with their order and chunks; the same on every rank."""
        self.patience_seconds = 300.0
        """How long ranks wait for each other in hooks."""
        self._backend = backend = "" if group is None else str(dist.get_backend_config(group))
        self.is_direct = not self.is_alone and exchanges_shards(device, backend)
        """Whether ranks exchange shards point to point: waiting then blocks the host, and not the current stream."""
        # Small all-reduces run on the host if a backend supports it, so that no kernel waits for them.
        self._control = torch.device("cpu") if not backend or "gloo" in backend or "fake" in backend else device

    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of type ``dtype`` are summed over the ranks."""
        is_wider = not self.is_alone and self.reduce_dtype.itemsize > dtype.itemsize
        return self.reduce_dtype if is_wider else dtype

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which :meth:`reduce_scatter` expects gradients."""
        return dtype if self.is_direct else self.summed_dtype(dtype)

    @property
    def widest_sent_dtype(self) -> torch.dtype | None:
        """The type to which narrower gradients are widened before sending; None if they are not widened."""
        return None if self.is_direct or self.is_alone else self.reduce_dtype

    def shard(self, buffer: Tensor) -> Tensor:
        """Return this rank's part of a flat buffer."""
        return self._part(buffer, self.rank)

    def all_gather(self, buffer: Tensor, chunk: int) -> Pending:
        """All-gather the shards of all ranks into a chunk's flat buffer, in place."""
        self._record("all_gather", buffer, chunk)
        if self.is_alone:
            return Pending()
        self.gathered_bytes += self._crossing(buffer)
        if not self.is_direct:
            work = dist.all_gather_into_tensor(buffer, self.shard(buffer), group=self.group, async_op=True)
            return Pending([work])
        works = []
        for target, source in self._partners():
            works += self._exchange(self.shard(buffer), target, self._part(buffer, source), source)
        return Pending(works)

    def reduce_scatter(self, buffer: Tensor, chunk: int) -> tuple[Pending, Tensor]:
        """Reduce-scatter a chunk's flat buffer into this rank's shard; the buffer becomes undefined.

        Args:
            buffer: Has the type of :meth:`sent_dtype`.
            chunk: The chunk's index.

        Returns:
            The pending collective, and the shard that then holds the sums: a view of the buffer, or separate memory.
        """
        self._record("reduce_scatter", buffer, chunk)
        own = self.shard(buffer)
        if self.is_alone:
            return Pending(), own
        self.reduced_bytes += self._crossing(buffer)
        if not self.is_direct:
            work = dist.reduce_scatter_tensor(own, buffer, group=self.group, async_op=True)
            return Pending([work]), own
        received: dict[int, Tensor] = {}
        works = []
        for target, source in self._partners():
            received[source] = torch.empty_like(own)
            works += self._exchange(self._part(buffer, target), target, received[source], source)
        dtype = self.summed_dtype(own.dtype)
        total = own if dtype == own.dtype else torch.empty_like(own, dtype=dtype)
        return Pending(works, lambda: self._sum(total, own, received)), total

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return a small tensor reduced over the ranks, on its original device."""
        self._record("all_reduce", values)
        if self.is_alone:
            return values
        on_control = values.to(self._control, copy=True)
        dist.all_reduce(on_control, op=op, group=self.group)
        return on_control.to(values.device)

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place on its device; with nccl the host does not wait."""
        self._record("sum_on_device", value)
        if not self.is_alone:
            dist.all_reduce(value, group=self.group)
        return value

    def agree(self, description: str) -> bool:
        """Return whether all ranks give the same description, with one small all-reduce."""
        digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:7], "big")
        most, least = self.all_reduce(torch.tensor([digest, -digest]), dist.ReduceOp.MAX).tolist()
        return bool(most == -least)

    def meet(self, action: str) -> None:
        """Wait until all ranks have come to the same point of user code, before collectives that hooks begin.

        Raises:
            UsageError: Another rank has not come within ``patience_seconds``, or to another point.
        """
        if self.world_size == 1 or "fake" in self._backend:
            return
        assert self.group is not None
        store = dist.distributed_c10d._get_process_group_store(self.group)
        number = next(_MEETINGS)
        keys = [f"gemini/meeting/{number}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], action)
        try:
            store.wait(keys, timedelta(seconds=self.patience_seconds))
        except dist.DistStoreError as error:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise UsageError(
                f"Gemini: rank {self.rank} {action} outside of the forward pass, and ranks {absent} did not do so "
                f"within {self.patience_seconds:.0f} s; expected the same on every rank, as weights are gathered from "
                "all: do not ask for the rank (is_global_zero) before it, only before writing to logs and files"
            ) from error
        others = [store.get(key).decode() for key in keys]
        if any(other != action for other in others):
            raise UsageError(
                f"Gemini: rank {self.rank} {action} outside of the forward pass, while other ranks do something else "
                f"({', '.join(sorted({*others} - {action}))}); expected the same on every rank"
            )
        store.delete_key(f"gemini/meeting/{number - 1}/{self.rank}")  # all ranks have left that one

    def require_agreement(self, subject: str, description: str) -> None:
        """Check that all ranks made the same decision.

        Raises:
            UsageError: The decisions differ.
        """
        if not self.agree(description):
            raise UsageError(
                f"Gemini: the ranks disagree on {subject}; expected the same model, settings and inputs' shapes on "
                f"every rank; rank {self.rank} has {description[:300]}"
            )

    def sum_with_order(self, values: Tensor) -> Tensor:
        """Sum a few float64 values over the ranks, and check in the same message that they ran the same collectives.

        A rank that calls blocks in another order mixes up chunks of the same size in its gathers and reductions. The
        sums of a digest and of its square show whether the digest is the same on all ranks (Cauchy-Schwarz).

        Raises:
            UsageError: The ranks ran different collectives; raised on every rank.
        """
        mark = int.from_bytes(self._sequence.digest()[:4], "big") >> 12  # 20 bits: exact in float64, also squared
        summed = self.all_reduce(torch.cat([values, values.new_tensor([mark, mark**2])]))
        total, squares = (int(value) for value in summed[-2:].tolist())
        if total**2 != squares * self.world_size:
            self._sequence = hashlib.sha256()  # after abort() the ranks may start again
            raise UsageError(
                "Gemini: the ranks called the blocks of a network in different orders, and so mixed up their weights "
                "and gradients; nothing was stepped; expected the same blocks in the same order on every rank; let "
                "nothing that differs between ranks (data, their own random numbers) choose which block comes next"
            )
        return summed[:-2]

    def _part(self, buffer: Tensor, rank: int) -> Tensor:
        numel = buffer.numel() // self.world_size
        return buffer.narrow(0, rank * numel, numel)

    def _crossing(self, buffer: Tensor) -> int:
        return buffer.nbytes // self.world_size * (self.world_size - 1)

    def _partners(self) -> list[tuple[int, int]]:
        """Return pairs (rank to send to, rank to receive from), in order."""
        size = self.world_size
        return [((self.rank + distance) % size, (self.rank - distance) % size) for distance in range(1, size)]

    def _exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> list[dist.Work]:
        """Send to one rank and receive from another; the tag, the collective's number, keeps messages apart."""
        tag = self.count % 2**20
        works = [
            dist.isend(sent, self._peers[target], group=self.group, tag=tag),
            dist.irecv(received, self._peers[source], group=self.group, tag=tag),
        ]
        return [work for work in works if work is not None]

    def _sum(self, total: Tensor, own: Tensor, received: dict[int, Tensor]) -> None:
        """Add in rank order on every rank, so that the sums do not depend on the packing."""
        wide = torch.promote_types(own.dtype, torch.float32)
        if self.world_size == 2 and own.dtype == wide:
            total.add_(received[1 - self.rank])
            return
        parts = [own if rank == self.rank else received[rank] for rank in range(self.world_size)]
        summed = parts[0].to(wide)
        for part in parts[1:]:
            summed = summed + part
        total.copy_(summed)

    def _record(self, name: str, buffer: Tensor, chunk: int = -1) -> None:
        self.count += 1
        self._sequence.update(f"{name}:{chunk}:{buffer.numel()}:{buffer.dtype};".encode())


def has_no_peers(group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank is the only one."""
    return group is None or dist.get_world_size(group) == 1


def exchanges_shards(device: torch.device, backend: str) -> bool:
    """Return whether ranks exchange shards point to point instead of calling the backend's collectives."""
    return device.type == "cpu" or "nccl" not in backend
