"""Loaders whose batches come encoded from actors of a Ray cluster, in the order of the run's own sampler.

Each training process keeps a few batches in flight and takes them in order. Which encoder has read a batch, and how
often one has died over it, does not matter: samples are pure functions of their keys.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.order import Batch, BatchKeys, Key
from sd_lightning.data.workers import PRECOMPUTE
from sd_lightning.remote.cluster import connect
from sd_lightning.remote.encoder_pool import WHO, EncoderPool, check_room, unpacked
from sd_lightning.state.ranks import gathered, on_rank_zero, rank_and_world_size
from sd_lightning.storage import far_runs

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.data.batch import CaptionedImages
    from sd_lightning.data.source import Source
    from sd_lightning.data.transform import ImageOptions
    from sd_lightning.models.encoder import LatentEncoder

log = logging.getLogger(__name__)

_NAMESPACE = "sd_lightning"
"""Of Ray's names: pools are named for their runs."""
_TAKEN_SECONDS = 30
"""How long the name of a run that has just died may stay taken."""
_POLL_SECONDS = 1.0
"""How often a process asks which encoders there are, and while it waits whether one keeps dying."""
_PLACE_SECONDS = 600.0
"""How long all encoders may take to get a place on the cluster, of which others may take a part."""
_LONG_WAIT_SECONDS = 60.0
"""After this, and each time it has doubled, a process says that it waits."""


class RayEncoders:
    """Builds loaders whose batches are read and encoded on a Ray cluster; ``loaders=`` of :class:`SDDataModule`.

    The encoders start with the first loader, and end with this process or its connection (``ray.shutdown()``).

    Args:
        num_encoders: Encoders of all training processes together.
        resources: What each one reserves, by Ray's names: ``{"CPU": 2, "GPU": 0.5}``. A CPU by default, and a GPU if
            the cluster has any; with a GPU, or a part of one, it encodes there.
        labels: Labels of the machines that may be used: ``{"ray.io/accelerator-type": "A10G"}``.
        run: Folder of the run, by which :func:`resize` knows it.
        address: ``host:port`` of the cluster's head; by default RAY_ADDRESS, else a new cluster on this machine.

    """

    def __init__(
        self,
        num_encoders: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        run: str | Path | None = None,
        address: str | None = None,
    ) -> None:
        self.num_encoders = num_encoders
        self._resources = None if resources is None else {"CPU": 1.0, **resources}
        self._labels = dict(labels or {})
        self._name = str(Path(run or f"{os.getpid()}-{id(self)}").absolute())
        self._address = address
        self._options = LoaderOptions()
        self._pool: Any = None
        self._sent: dict[int, tuple[LatentEncoder, Any]] = {}
        """Encoders in Ray's memory, by the object that they are copies of."""
        self._waits: Counter[str] = Counter()

    def check(self, options: LoaderOptions, sources: Sequence[Source], *, cache_latents: bool) -> None:
        """Take the user's options; see ``LoaderBuilder``."""
        if cache_latents or any(source.latents is not None for source in sources):
            remedy = "write data.cache_latents=false" if cache_latents else "train on the images themselves"
            raise UsageError(f"{WHO}: the images are encoded before training; {remedy}, or leave data.encoders out")
        for name in ("num_workers", "persistent_workers"):
            if getattr(options, name) not in ("auto", 0):
                raise UsageError(
                    f"data.{name}={str(getattr(options, name)).lower()} has no effect with {WHO}, whose encoders read "
                    "the images; leave it out, or raise data.num_encoders"
                )
        self._options = options

    def connect(self) -> None:
        """Connect to the cluster, and check that it has room for the encoders.

        Raises:
            UsageError: There is no cluster, or it has not.
        """
        cpus = math.ceil(self.num_encoders * (self._resources or {}).get("CPU", 1))
        ray = connect(WHO, self._address, num_cpus=max(cpus, os.cpu_count() or 1))
        if self._resources is None:
            self._resources = {"CPU": 1.0, **({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {})}
        check_room(self.num_encoders, self._resources)
        labels = [node["Labels"] for node in ray.nodes() if node["Alive"]]
        if not any(self._labels.items() <= each.items() for each in labels):
            raise UsageError(
                f"data.encoder_labels={self._labels}: no machine of the Ray cluster has these labels, but {labels[0]}; "
                "write others, or start machines with: ray start --address=<head> --labels=<key>=<value>"
            )

    def build(self, dataset: CaptionedImages, batches: BatchKeys, trainer: pl.Trainer) -> EncodedLoader:
        """Build the loader of a dataset for a trainer's process; the first call starts the encoders."""
        work, address = on_rank_zero(lambda: self._publish(dataset, trainer.lightning_module))
        pool = connect(WHO, address).get_actor(self._name, namespace=_NAMESPACE)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        pin = on_cuda if self._options.pin_memory is None else self._options.pin_memory
        waits = Counter[str]() if dataset.wrong_captions else self._waits  # those of validation do not count
        return EncodedLoader(dataset, batches, pool, work, self._options.prefetch_factor or 2, pin, waits)

    def _publish(self, dataset: CaptionedImages, module: Any) -> tuple[int, str]:
        """Give the encoders a data set and a module's encoder; return their number and the cluster's address."""
        import ray

        self.connect()
        if self._pool is None:
            self._pool = self._start()
        encoder, model, part = module.encoder, module.latent_diffusion, copy.copy(dataset)
        part.tokenize = partial(model.family.tokenize, model.tokenizers)  # without the networks
        if id(encoder) not in self._sent:
            self._sent[id(encoder)] = encoder, ray.put(encoder.portable())
        references = ray.put(part), self._sent[id(encoder)][1]
        return ray.get(self._pool.publish.remote(references)), ray.get_runtime_context().gcs_address

    def _start(self) -> Any:
        """Start the encoders, and tell where they are."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._resources is not None
        others = {**self._resources}
        cpus, gpus = others.pop("CPU"), others.pop("GPU", 0)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": others,
            "label_selector": self._labels,
            "max_restarts": -1,
            "max_task_retries": -1,
        }
        if not gpus:  # on the CPU the bits of a sum depend on the number of threads
            threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
            options["runtime_env"] = {"env_vars": threads}
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote
        pool = remote(num_cpus=0, name=self._name, namespace=_NAMESPACE, scheduling_strategy=here)(EncoderPool)
        for left in reversed(range(_TAKEN_SECONDS)):
            try:
                actor = pool.remote(options, self._resources, os.getcwd())
                break
            except ValueError as error:  # the name is taken
                if not left:
                    raise UsageError(
                        f"{WHO}: another run in {self._name} has encoders on this Ray cluster; end that one, or write "
                        "another output_dir"
                    ) from error
                time.sleep(1)
        _result(actor.resize.remote(self.num_encoders), "the pool")
        nodes = [each.node.remote() for each in _result(actor.members.remote(), "the pool").values()]
        _wait(actor, nodes, "a place for all encoders on the Ray cluster", most=_PLACE_SECONDS)
        counts = Counter(_result(nodes, "an encoder")).items()
        where = ", ".join(f"{number} on {node}" for node, number in sorted(counts))
        log.info("data: encoders on the Ray cluster at %s: %s", ray.get_runtime_context().gcs_address, where)
        return actor

    def bottleneck_remedy(self, images: ImageOptions, latents_bytes: int | None) -> str | None:
        """Return what makes batches arrive sooner; see ``TunableData``."""
        waits, number = self._waits, int(self._waits["number"])
        if waits["encoders"] <= waits["network"]:
            return PRECOMPUTE if waits["network"] else None
        own = max(1 - waits["encoders"] / waits["seconds"], 0.1)  # of its time the trainer needs itself
        return f"data.num_encoders={max(number + 1, math.ceil(number / own))}"

    def waits(self) -> dict[str, float] | None:
        """Return how long training waited and encoders worked, as shares of the time, and the bytes per second.

        A collective call; None before the second batch.
        """
        parts = gathered(self._waits)
        total, number = sum(parts, Counter()), int(self._waits["number"])
        return (
            None
            if not total["seconds"]
            else {
                "num_encoders": number,
                "waited_for_encoders": total["encoders"] / total["seconds"],
                "waited_for_network": total["network"] / total["seconds"],
                "encoders_busy": min(total["busy"] * len(parts) / total["seconds"] / number, 1.0),
                "bytes_per_second": total["bytes"] * len(parts) / total["seconds"],
            }
        )


@dataclass(eq=False)
class EncodedLoader:
    """Loader of encoded batches for one training process, in order; used as a ``DataLoader``."""

    dataset: CaptionedImages
    batch_sampler: BatchKeys
    """Keys of the batches of this process."""
    pool: Any
    """The ``EncoderPool``."""
    work: int
    """Number of the data set there."""
    ahead: int
    """Batches in flight for each encoder, over all processes."""
    pin: bool
    """Whether batches are put into page-locked memory."""
    waits: Counter[str]
    """Seconds from the first batch on, those waited for encoders and network, those that encoders worked; bytes."""
    num_workers = 0
    _iterator = None
    _members: dict[int, Any] = field(default_factory=dict)
    _asked: float = 0.0
    _answer: Any = None
    _turn: int = 0

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        self._look(wait=True)
        keys, last, flying = iter(self.batch_sampler), None, deque[_Call]()
        self._turn, world_size = rank_and_world_size()
        while True:
            self._look()
            window = max(2, math.ceil(self.ahead * len(self._members) / world_size))
            while len(flying) < window and (each := next(keys, None)) is not None:
                flying.append(self._send(each, flying))
            if not flying:
                return
            asked = time.perf_counter()
            packed, busy, ready = self._take(flying)
            batch, size = unpacked(packed, pin=self.pin)
            now = time.perf_counter()
            if last is not None:  # the first batch also waits for the networks
                noted = {"seconds": now - last, "encoders": ready - asked, "network": now - ready, "busy": busy}
                self.waits.update(noted | {"bytes": size})
            self.waits["number"], last = len(self._members), now
            yield batch

    def _look(self, *, wait: bool = False) -> None:
        """Learn from time to time which encoders there are; unless told to, without waiting for the answer."""
        import ray

        now = time.monotonic()
        if wait or (self._answer is None and now - self._asked > _POLL_SECONDS):
            self._asked, self._answer = now, self.pool.members.remote()
        if self._answer is not None and (wait or ray.wait([self._answer], timeout=0)[0]):
            members, self._answer = _result(self._answer, "the pool of encoders beside rank 0"), None
            if self._members and len(members) != len(self._members) and rank_and_world_size()[0] == 0:
                log.info("data: %d encoders, before %d", len(members), len(self._members))
            self._members = members

    def _send(self, keys: list[Key], flying: Sequence[_Call]) -> _Call:
        """Ask the encoder that has least to do for a batch; of equals, the next in turn."""
        import ray

        answers, waiting = {call.answer: call.number for call in flying}, []
        if answers:
            waiting = ray.wait([*answers], num_returns=len(answers), timeout=0, fetch_local=False)[1]
            ray.wait([*answers], num_returns=len(answers), timeout=0)  # what is encoded comes here meanwhile
        load, numbers = Counter(answers[each] for each in waiting), deque(self._members)
        self._turn += 1
        numbers.rotate(self._turn)
        number = min(numbers, key=lambda each: load[each])
        return _Call(number, keys, self._members[number].encode.remote(self.work, keys))

    def _take(self, flying: deque[_Call]) -> tuple[Batch, float, float]:
        """Return the next batch as it was sent, the encoder's seconds, and when it was ready."""
        import ray

        while True:
            call = flying.popleft()
            _wait(self.pool, [call.answer], f"encoder {call.number}")
            ready = time.perf_counter()
            try:
                return *ray.get(call.answer), ready
            except ray.exceptions.RayActorError as error:
                self._look(wait=True)
                if call.number in self._members:
                    _refuse(error, f"encoder {call.number}")
            except ray.exceptions.RayTaskError as error:
                _refuse(error, f"encoder {call.number}")
            flying.appendleft(self._send(call.keys, flying))  # its encoder was ended


@dataclass(frozen=True)
class _Call:
    """A batch in flight."""

    number: int
    """Of the encoder."""
    keys: list[Key]
    answer: Any


def resize(run: str | Path, num_encoders: int, *, address: str | None = None) -> None:
    """Change the number of encoders of a run while it trains, from any process that reaches the Ray cluster.

    Args:
        run: The run's ``output_dir``, or its URL.
        num_encoders: Encoders that it shall have.
        address: ``host:port`` of the cluster's head; by default RAY_ADDRESS, else the cluster on this machine.

    Raises:
        UsageError: No such run has encoders there, or the cluster has no room.
    """
    folder = far_runs.working_folder(str(run)) if far_runs.is_url(run) else Path(run)
    ray = connect("resize", address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        pool = ray.get_actor(str(folder.absolute()), namespace=_NAMESPACE)
    except ValueError as error:
        raise UsageError(
            f"resize got run={run}; no run in that folder has encoders on this Ray cluster; expected the output_dir of "
            f"one that trains with {WHO}"
        ) from error
    _result(pool.resize.remote(num_encoders), "the pool")


def _wait(pool: Any, answers: list[Any], what: str, *, most: float = math.inf) -> None:
    """Wait until encoders have answered, wherever the answers are; say so from time to time.

    Raises:
        UsageError: An encoder keeps dying, or it takes more than ``most`` seconds.
    """
    import ray

    begun, limit = time.monotonic(), _LONG_WAIT_SECONDS
    while ray.wait(answers, num_returns=len(answers), timeout=_POLL_SECONDS, fetch_local=False)[1]:
        trouble = _result(pool.trouble.remote(), "the pool of encoders beside rank 0")
        if trouble is not None:
            raise UsageError(trouble)
        if time.monotonic() - begun > most:
            free = {name: n for name, n in ray.available_resources().items() if ":" not in name}
            raise UsageError(
                f"{WHO}: after {most:.0f} s there is not {what}, where {free} are free; write a smaller "
                "data.num_encoders, or add machines with: ray start --address=<head>"
            )
        if time.monotonic() - begun > limit:
            log.warning("data: waiting for %s for %.0f s", what, limit)
            limit *= 2


def _result(answer: Any, who: str) -> Any:
    """Return what an actor answers.

    Raises:
        UsageError: It has raised something, or died.
    """
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        _refuse(error, who)


def _refuse(error: Exception, who: str) -> NoReturn:
    """Raise what an actor has raised, or died of, as one line.

    Raises:
        UsageError: Always.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, UsageError):
        raise UsageError(str(cause)) from error
    reason = str(error).strip().splitlines()[-1].strip()  # behind the stack
    raise UsageError(f"{WHO}: {who} failed: {reason}; mend that, or leave data.encoders out") from error
