"""Actors of a Ray cluster that read and encode batches for the training processes of a run.

``EncoderPool`` is one small actor on the machine of rank 0, which passes the batches that ranks ask for to the
``Encoder`` actors. It owns these: they end with it, and it ends with rank 0, in whatever way. One that
dies is replaced, and meanwhile another one gets its batches. Ray's own restarts would hide deaths during the start.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning.remote.cluster import check_resources, check_versions

if TYPE_CHECKING:
    import torch

    from sd_lightning.data.batch import CaptionedImages
    from sd_lightning.data.order import Batch, Key
    from sd_lightning.models.encoder import LatentEncoder

WHO = "data.encoders=ray"
_MOST_DEATHS = 3
"""Processes of an encoder that may die without a batch between them before the run gives up."""


class EncoderPool:
    """The encoders of a run, an actor."""

    def __init__(
        self, options: Mapping[str, Any], resources: Mapping[str, float], arguments: Any, encoder: Any
    ) -> None:
        """Take what all encoders have in common.

        Args:
            options: Of Ray's actors.
            resources: What each reserves.
            arguments: Of :class:`Encoder`.
            encoder: A reference to a portable ``LatentEncoder``, in a list.
        """
        self._options, self._resources, self._arguments, self._encoder = options, resources, arguments, encoder
        self._numbers = itertools.count()
        self._encoders: dict[int, Any] = {}
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._nodes: dict[int, str] = {}
        """Machine of each encoder that lives and has its networks, as far as one knows."""
        self._calls: Counter[int] = Counter()
        """Batches that each one has to encode."""
        self._deaths: Counter[int] = Counter()
        """Processes of each one that have died since its last batch."""
        self._trouble: str | None = None
        self._datasets: list[Sequence[Any]] = []

    async def resize(self, num_encoders: int) -> None:
        """Start or end encoders, at first those that do not live.

        Raises:
            UsageError: The cluster has no room for them.
        """
        import ray

        check_room(num_encoders, self._resources, self._options["label_selector"])
        while len(self._encoders) < num_encoders:
            self._add(next(self._numbers))
        for number in sorted(self._encoders, key=lambda number: number not in self._nodes)[num_encoders:]:
            self._starts.pop(number).cancel()
            self._nodes.pop(number, None)
            ray.kill(self._encoders.pop(number))

    def _add(self, number: int) -> None:
        import ray

        self._encoders[number] = ray.remote(**self._options)(Encoder).remote(*self._arguments)
        self._starts[number] = asyncio.create_task(self._start(number))

    async def _start(self, number: int) -> None:
        """Wait until an encoder has a place and its networks."""
        import ray

        encoder, node = self._encoders[number], "a machine"
        try:
            node = await encoder.node.remote()
            await encoder.load.remote(self._encoder)
            self._nodes[number] = node
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", True):  # it has raised an error, as another one would
                self._trouble = self._trouble or str(usage_error(error, f"encoder {number} on {node}"))
            else:
                self._replace(number, node, error)

    def _replace(self, number: int, node: str, error: Exception) -> None:
        """Start another encoder in the stead of one that has died."""
        import ray

        self._deaths[number] += not getattr(error, "preempted", False)
        if self._deaths[number] >= _MOST_DEATHS:
            name = f"encoder {number} on {node}, {_MOST_DEATHS} times without a batch between,"
            self._trouble = str(usage_error(error, name))
            return
        ray.kill(self._encoders[number])
        self._add(number)

    async def living(self, least: int, seconds: float = math.inf) -> list[str]:
        """Return the machines of the encoders that live, as soon as there are so many; wait at most some seconds.

        Raises:
            UsageError: One cannot start or keeps dying, or they get no place on the cluster.
        """
        import ray

        end = time.monotonic() + seconds
        while self._trouble or len(self._nodes) < least:
            if self._trouble:
                raise UsageError(self._trouble)
            if time.monotonic() > end:
                free = {name: n for name, n in ray.available_resources().items() if ":" not in name}
                raise UsageError(
                    f"{WHO}: {len(self._nodes)} of {len(self._encoders)} encoder(s) have got a place and their "
                    f"networks on the Ray cluster in {seconds:.0f} s; {free} are free; write a smaller "
                    "data.num_encoders, or add machines with: ray start --address=<head>"
                )
            await asyncio.sleep(0.1)
        return [*self._nodes.values()]

    async def publish(self, dataset: Sequence[Any]) -> int:
        """Take the reference to a data set, in a list; return its number."""
        self._datasets.append(dataset)
        return len(self._datasets) - 1

    async def encode(self, dataset: int, keys: Sequence[Key]) -> tuple[Any, float, int]:
        """Let the encoder that has least to do encode a batch, and another one if it dies.

        Returns:
            A list with a reference to the batch, the seconds that it took, and how many encoders live.

        Raises:
            UsageError: It cannot be encoded.
        """
        import ray

        while True:
            await self.living(1)
            number = min(self._nodes, key=lambda each: self._calls[each])
            node, encode = self._nodes[number], self._encoders[number].encode.options(num_returns=2)
            batch, seconds = encode.remote(self._encoder, self._datasets[dataset], keys)
            self._calls[number] += 1
            try:
                answer = await seconds
                del self._deaths[number]
                return [batch], answer, len(self._nodes)
            except ray.exceptions.RayTaskError as error:
                raise usage_error(error, f"encoder {number} on {node}") from error
            except ray.exceptions.RayError as error:
                if self._nodes.pop(number, None) is not None:  # else another call has noticed, or it was ended
                    self._replace(number, node, error)
            finally:
                self._calls[number] -= 1


class Encoder:
    """An encoder, an actor."""

    def __init__(self, folder: str, versions: Mapping[str, str]) -> None:
        """Check the machine.

        Args:
            folder: Working directory of the training, for relative paths.
            versions: Of the training's packages.
        """
        import ray

        check_versions(WHO, versions)
        quiet_libraries()
        if os.path.isdir(folder):
            os.chdir(folder)
        self._node = ray.util.get_node_ip_address()
        self._datasets: dict[Any, CaptionedImages] = {}
        self._encoder: Any = None

    def node(self) -> str:
        """Return the address of the machine."""
        return self._node

    def load(self, encoder: Sequence[Any]) -> None:
        """Load the networks, if this process has not."""
        import ray
        import torch

        if self._encoder is None:
            self._encoder = ray.get(encoder[0]).to(torch.device("cuda" if ray.get_gpu_ids() else "cpu"))

    def encode(self, encoder: Sequence[Any], dataset: Sequence[Any], keys: Sequence[Key]) -> tuple[Batch, float]:
        """Return a batch with its images and captions encoded, and the seconds that it took."""
        import ray

        start = time.perf_counter()
        self.load(encoder)
        if dataset[0] not in self._datasets:
            self._datasets[dataset[0]] = ray.get(dataset[0])
        images = self._datasets[dataset[0]]
        batch = packed(self._encoder, images.__getitems__(keys), seed=images.seed)
        batch["bad"] = [(index, f"{reason} (on {self._node})") for index, reason in batch["bad"]]
        return batch, time.perf_counter() - start


def check_room(num_encoders: int, resources: Mapping[str, float], labels: Mapping[str, str]) -> None:
    """Raise a ``UsageError`` if that is no number of encoders, or the machines have not what they reserve."""
    if num_encoders < 1:
        raise UsageError(f"data.num_encoders={num_encoders}: expected 1 or more; write data.num_encoders=8")
    wanted = {name: num_encoders * each for name, each in resources.items()}
    check_resources(WHO, wanted, setting="data.num_encoders", labels=labels)


def usage_error(error: Exception, who: str) -> UsageError:
    """Return what an actor has raised, or how it was lost, as one line."""
    cause = getattr(error, "cause", None)
    text = (str(error) if cause is None else f"{type(cause).__name__}: {cause}").strip()
    if own := text.partition(f"{UsageError.__name__}: ")[2]:
        return UsageError(own)
    lines = [line for line in text.splitlines() if "actor never ran" not in line]  # the line before says why
    reason = lines[-1 if cause is None else 0].strip().rstrip(".")
    return UsageError(f"{WHO}: {who} failed: {reason}; see Ray's log of it and mend that, or leave data.encoders out")


def packed(encoder: LatentEncoder, batch: Batch, *, seed: int) -> Batch:
    """Return a batch with its images and captions encoded, in host memory; ``seed`` is the run's.

    The networks compute in the encoder's type, and their results are widened to float32: they travel in that type,
    unless bits would be lost (a VAE that stays in float32).
    """
    import torch

    from sd_lightning.models.families.conditioning import map_conditioning

    def narrow(value: torch.Tensor) -> torch.Tensor:
        small = value.to(encoder.dtype)
        return small.cpu() if torch.equal(small.to(value.dtype), value) else value.cpu()

    if "index" not in batch:  # nothing of it can be read
        return batch
    here: Any = map_conditioning(batch, lambda value: value.to(encoder.device))
    encoded = encoder.encode(here, seed=seed)
    made = {name: each for name, each in encoded.items() if name not in batch}
    kept = encoded.keys() - made.keys() - ({"input_ids"} if "text_embeddings" in made else set())
    return {name: batch[name] for name in kept} | map_conditioning(made, narrow)
