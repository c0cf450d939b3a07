"""Encode latent and text files on a Ray cluster: actors encode, on a GPU or a part of one, and tasks decode on CPUs.

An encoder has one file at a time, whose next groups of images are decoded meanwhile. One that dies, alone or with its
machine, is started again where there is room, and the first that is free encodes its file. A file that is there is
never written anew. Ray's own retries are not used: while a machine leaves they are used up within seconds.

Ray Data is not used: a latent file is made of whole groups of images, in order and in one place, and there it would be
one row. All images of a file would be in memory, decoded, where a few groups are enough.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, cast

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.store.encoding import EncodeTask, Loaded, ShardEncoder
from sd_lightning.data.store.texts import TextEncoder, TextTask
from sd_lightning.remote.cluster import check_resources, check_versions, connect, package_versions, value_of
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage.location import Location

log = logging.getLogger(__name__)

_WHO = "launcher=ray"
_AHEAD = 16
"""Groups of images that are decoded, or being decoded, ahead of each encoder."""


def reserve(launcher: Ray, root: Location) -> Callable[..., RayWorkers]:
    """Connect to the cluster, and return what starts the encoders there: :class:`RayWorkers` without what they encode.

    Raises:
        UsageError: There is no cluster, it has too little, or an option makes no sense for encoders.
    """
    count, gpus = launcher.worker_range[1], launcher.gpus_per_worker
    if launcher.num_workers != count or (gpus or 0) > 1:
        raise UsageError(
            f"precompute got launcher.num_workers={launcher.num_workers} launcher.gpus_per_worker={gpus}; expected one "
            "number of workers, with a GPU or a part of one each; write for instance launcher.num_workers=8"
        )
    cpus = math.ceil(count * launcher.cpus_per_worker) + 1
    ray = connect(_WHO, launcher.address, num_cpus=max(cpus, os.cpu_count() or 1))
    if gpus is None:
        gpus = min(ray.cluster_resources().get("GPU", 0), 1)
    who, each = f"{_WHO} with {count} workers", {"CPU": launcher.cpus_per_worker, "GPU": gpus}
    check_resources(f"{who}, and a CPU that decodes,", {"CPU": cpus}, setting="launcher.num_workers")
    wanted = {name: count * number for name, number in each.items()}
    check_resources(who, wanted, setting="launcher.num_workers", labels=launcher.labels)
    return partial(RayWorkers, launcher=launcher, gpus=gpus, root=root)


class RayWorkers:
    """Encodes latent and text files on a Ray cluster; :func:`reserve` has connected to it."""

    def __init__(
        self, shard: ShardEncoder, texts: TextEncoder | None, launcher: Ray, gpus: float, root: Location
    ) -> None:
        """Start the encoders, wait until all have started, and print where they are.

        Args:
            shard: Copied to each; its networks are in host memory.
            texts: Encoder of captions, if they are to be encoded; copied likewise.
            launcher: How many, and how often one may die over a file.
            gpus: Reserved for each.
            root: The folder of the store.

        Raises:
            UsageError: An encoder cannot work where it is, or does not start.
        """
        import ray

        self._ray, self._launcher, self._root = ray, launcher, root
        # References in a tuple are fetched by the processes themselves, after they have looked at their packages.
        self._refs = ray.put((replace(shard, sources={}), texts)), ray.put(replace(shard, encoder=cast(Any, None)))
        actor: Any = ray.remote(
            num_cpus=launcher.cpus_per_worker,
            num_gpus=gpus,
            label_selector=dict(launcher.labels or {}),
        )(EncoderActor)
        self._new = partial(actor.remote, partial(_join, os.getcwd(), package_versions()), self._refs)
        self._mark = f".tmp-workers-{secrets.token_hex(8)}"
        """File of the store that shows a worker, whenever it starts, that its store is the driver's."""
        self._actors, self._machines = dict[int, Any](), dict[int, str]()
        self._left: Iterator[EncodeTask | TextTask] = iter(())
        self._idle, self._deaths = list[int](), Counter[int]()  # since a file was finished
        self._running: dict[Any, tuple[int, EncodeTask | TextTask | None]] = {}  # None: the encoder starts
        root.create(self._mark, b"")
        try:
            for number in range(launcher.worker_range[1]):
                self._start(number)
            while self._running:
                list(self._results())
        except BaseException:
            self.close()
            raise
        workers = f"{len(self._actors)} worker{'s' * (len(self._actors) > 1)}"
        address, machines = ray.get_runtime_context().gcs_address, ", ".join(sorted(set(self._machines.values())))
        print(f"{_WHO}: {workers} of the cluster at {address}, on {machines}", flush=True)

    def __call__(self, tasks: Iterable[EncodeTask | TextTask]) -> Iterator[Any]:
        """Encode files, and yield each when it is in the store.

        Raises:
            UsageError: An image or the store is unusable, or an encoder keeps dying.
        """
        self._left = iter(tasks)
        while True:
            while self._idle and (task := next(self._left, None)) is not None:
                number = self._idle.pop()
                self._running[self._actors[number].encode.remote(task)] = number, task
            if self._idle and self._starting() == len(self._running):
                return
            yield from self._results()

    embed = __call__

    def close(self) -> None:
        """End the encoders; files that are being encoded are dropped."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        with suppress(UsageError):  # users of a bucket may be allowed to delete nothing
            self._root.delete(self._mark)

    def _results(self) -> Iterator[Any]:
        """Wait until files are encoded, or encoders have started or died; yield the results of files."""
        done, _ = self._ray.wait([*self._running], timeout=self._launcher.start_seconds)
        if not done and self._starting() == len(self._running):
            raise UsageError(
                f"{_WHO}: {self._starting()} of {len(self._actors)} workers have not started within "
                f"launcher.start_seconds={self._launcher.start_seconds:g}; expected free CPUs, one of them to decode, "
                "and GPUs on machines with launcher.labels; ray status shows what other jobs hold: end them, add "
                "machines, or write a smaller launcher.num_workers"
            )
        for ref in done:
            number, task = self._running.pop(ref)
            try:
                value = value_of(ref)
            except self._ray.exceptions.RayError as error:
                self._left = self._left if task is None else chain([task], self._left)
                self._replace(number, error)
                continue
            self._idle.append(number)
            if task is None:
                self._machines[number] = value
            else:
                del self._deaths[number]
                yield value

    def _starting(self) -> int:
        return sum(task is None for _, task in self._running.values())

    def _start(self, number: int) -> None:
        self._actors[number] = self._new()
        self._running[self._actors[number].start.remote(self._root, self._mark)] = number, None

    def _replace(self, number: int, error: Exception) -> None:
        """Start an encoder again that has died."""
        self._deaths[number] += not getattr(error, "preempted", False)
        where = f" on {self._machines.pop(number)}" if number in self._machines else ""
        cause, most = getattr(error, "cause", error), self._launcher.max_failures
        reason = " ".join(str(cause).split())[:400]
        death = f"{_WHO}: a worker{where} failed ({type(cause).__name__}: {reason})"
        if self._deaths[number] > most >= 0:
            raise UsageError(
                f"{death}, {self._deaths[number]} times without a file done; expected at most launcher.max_failures="
                f"{most}; look at the memory and the GPU there; nothing is lost: run precompute again"
            )
        log.warning("%s; it is started again", death)
        self._ray.kill(self._actors[number])
        self._start(number)


class EncoderActor:
    """Encodes files in a process of the cluster."""

    def __init__(self, join: Callable[[], None], refs: tuple[Any, Any]) -> None:
        """Take what it needs.

        Args:
            join: Makes this process one of the job.
            refs: References to the encoders without data, and to the encoder without networks, which loads images.
        """
        self._join, self._refs = join, refs

    def start(self, root: Location, mark: str) -> str:
        """Look for a file in the folder of the store, and return the name of the machine.

        Raises:
            UsageError: It cannot work here.
        """
        self._encoders  # noqa: B018  tells at once what is wrong
        machine = socket.gethostname()
        try:
            if is_there := root.size(mark) is not None:
                root.check_writable()
        except UsageError as error:
            raise UsageError(f"{_WHO}: the machine {machine} cannot use the store: {error}") from error
        if not is_there:
            raise UsageError(
                f"{_WHO}: the machine {machine} does not see the folder store={root.url}; expected one that all "
                "machines share, under the same path; mount it there, or write store=s3://bucket/folder"
            )
        return machine

    def encode(self, task: EncodeTask | TextTask) -> Any:
        """Encode a file, and return what is known of it."""
        return self._encoders[type(task)](task)

    @cached_property
    def _encoders(self) -> dict[type, Any]:
        """By what they encode; fetched once."""
        import ray

        self._join()
        torch.set_num_threads(1)  # as locally, so that the bits do not depend on where they are computed
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        shard, texts = ray.get(self._refs[0])
        shard.encoder.to(device)
        load = partial(ray.remote(_load).remote, self._join, self._refs)
        value_of(load(None, range(0)))  # waits until a CPU is free
        there = replace(shard, device=device, num_threads=_AHEAD, load_elsewhere=lambda *group: load(*group).future())
        return {EncodeTask: there, TextTask: texts and replace(texts, device=device)}


def _join(folder: str, versions: Mapping[str, str]) -> None:
    """Make this process one of a job: with the driver's packages, and in its folder, for relative paths of data."""
    check_versions(_WHO, versions)
    if os.path.isdir(folder):
        os.chdir(folder)


_shards: dict[Any, ShardEncoder] = {}
"""In a process that loads images: reference -> what it refers to."""


def _load(join: Callable[[], None], refs: tuple[Any, Any], task: Any, group: range) -> list[Loaded]:
    """Load images in a process of the cluster; an empty group only shows that it can."""
    if refs[1] not in _shards:
        join()
        _shards[refs[1]] = value_of(refs[1])
    return _shards[refs[1]].load(task, group)
