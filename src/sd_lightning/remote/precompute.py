"""Encode latent and text files on a Ray cluster: actors encode, on a GPU or a part of one, and tasks decode on CPUs.

An encoder has one file at a time, whose next groups of images are decoded meanwhile. One that dies is started again,
and the first that is free encodes its file; a file that is there is never written anew.

Ray Data is not used: a latent file is made of whole groups of images, in order and in one place, and there it would be
one row. All images of a file would be in memory, decoded, where a few groups are enough.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.store.encoding import EncodeTask, Loaded, ShardEncoder
from sd_lightning.data.store.texts import TextEncoder, TextTask
from sd_lightning.remote.cluster import check_resources, check_versions, connect, package_versions, value_of
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage.location import Location

log = logging.getLogger(__name__)

Task = EncodeTask | TextTask
_WHO = "launcher=ray"
_AHEAD = 16
"""Groups of images that are decoded, or being decoded, ahead of each encoder."""
_REMEDY = "nothing is lost: look at the cluster (ray status), and run precompute again"


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
    who = f"{_WHO} with {count} workers, and a CPU that decodes,"
    check_resources(who, {"GPU": count * gpus, "CPU": cpus}, setting="launcher.num_workers")
    labels = dict(launcher.labels) if launcher.labels else None
    options = {"num_cpus": launcher.cpus_per_worker, "num_gpus": gpus, "label_selector": labels}
    return partial(RayWorkers, launcher=launcher, options=options, root=root)


class RayWorkers:
    """Encodes latent and text files on a Ray cluster; :func:`reserve` has connected to it."""

    def __init__(
        self, shard: ShardEncoder, texts: TextEncoder | None, launcher: Ray, options: Mapping[str, Any], root: Location
    ) -> None:
        """Start the encoders, wait until all have started, and print where they are.

        Args:
            shard: Copied to each; its networks are in host memory.
            texts: Encoder of captions, if they are to be encoded; copied likewise.
            launcher: How many, and how often one may die.
            options: What Ray reserves for each.
            root: The folder of the store.

        Raises:
            UsageError: An encoder cannot work where it is, or does not start.
        """
        import ray

        self._ray, self._launcher, self._root = ray, launcher, root
        self._probe = None if root.path("") is None else f".tmp-workers-{secrets.token_hex(4)}"
        if self._probe is not None:
            root.create(self._probe, b"")
        # References in a tuple are fetched by the processes themselves, after they have looked at their packages.
        refs = ray.put((replace(shard, sources={}), texts)), ray.put(replace(shard, encoder=cast(Any, None)))
        self._arguments = partial(_join, os.getcwd(), package_versions()), refs, root, self._probe
        self._actor_class = ray.remote(**options)(EncoderActor)
        self._actors: dict[int, Any] = {}
        self._machines: dict[int, str] = {}
        self._failures = Counter[int]()  # of each encoder since it has finished a file
        self._free: list[int] = []
        self._again = deque[Task]()
        self._running: dict[Any, tuple[int, Task | None]] = {}  # None: the encoder starts
        try:
            for number in range(1, launcher.worker_range[1] + 1):
                self._start(number)
            while len(self._free) < len(self._actors):
                deque(self._wait())
        except BaseException:
            self.close()
            raise
        where = ", ".join(f"{count} on {name}" for name, count in sorted(Counter(self._machines.values()).items()))
        address = ray.get_runtime_context().gcs_address
        print(f"{_WHO}: {len(self._actors)} workers of the cluster at {address} encode: {where}", flush=True)

    def __call__(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Encode files, and yield each when it is in the store.

        Raises:
            UsageError: An image or the store is unusable, or an encoder keeps dying.
        """
        left = iter(tasks)
        while True:
            while self._free and (task := self._again.popleft() if self._again else next(left, None)) is not None:
                number = self._free.pop()
                self._running[self._actors[number].encode.remote(task)] = number, task
            if self._free and all(task is None for _, task in self._running.values()):
                return
            yield from self._wait()

    embed = __call__

    def close(self) -> None:
        """End the encoders; files that are being encoded are dropped."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._probe is not None:
            self._root.delete(self._probe)

    def _start(self, number: int) -> None:
        self._actors[number] = self._actor_class.remote()
        self._running[self._actors[number].start.remote(*self._arguments)] = number, None

    def _wait(self) -> Iterator[Any]:
        """Wait until something has happened, and yield the result if it is a file."""
        seconds = self._launcher.start_seconds
        done, others = self._ray.wait(list(self._running), timeout=seconds)
        if not done and all(task is None for _, task in self._running.values()):
            raise UsageError(
                f"{_WHO}: {len(others)} of {len(self._actors)} workers have not started within {seconds:g} s; expected "
                "free CPUs and GPUs on machines with launcher.labels; write a smaller launcher.num_workers or a larger "
                f"launcher.start_seconds; {_REMEDY}"
            )
        for ref in done:
            number, task = self._running.pop(ref)
            try:
                value = value_of(ref)
            except self._ray.exceptions.RayError as error:
                self._again.extend([] if task is None else [task])
                self._restart(number, error)
                continue
            self._free.append(number)
            if task is None:
                self._machines[number] = value
            else:
                self._failures[number] = 0
                yield value

    def _restart(self, number: int, error: Exception) -> None:
        self._failures[number] += not getattr(error, "preempted", False)
        most, machine = self._launcher.max_failures, self._machines.get(number, "a machine that it did not name")
        death = f"{_WHO}: worker {number} on {machine} has died ({str(error).strip().splitlines()[-1].strip()[:200]})"
        if self._failures[number] > most >= 0:
            raise UsageError(
                f"{death}, {self._failures[number]} times without a file done; expected at most launcher.max_failures="
                f"{most} times; look at the memory and the GPU of that machine; {_REMEDY}"
            )
        log.warning("%s; it is started again", death)
        self._ray.kill(self._actors[number])
        self._start(number)


class EncoderActor:
    """Encodes files in a process of the cluster."""

    def start(self, join: Callable[[], None], refs: tuple[Any, Any], root: Location, probe: str | None) -> str:
        """Fetch the networks, and return the name of the machine.

        Args:
            join: Makes this process one of the job.
            refs: References to the encoders without data, and to the encoder without networks, which loads images.
            root: The folder of the store.
            probe: A file in it, if it has to be a folder that all machines share.

        Raises:
            UsageError: It cannot work here.
        """
        import ray

        join()
        who = f"{_WHO}: the machine {socket.gethostname()}"
        if probe is not None and root.size(probe) is None:
            raise UsageError(
                f"{who} does not see the folder store={root.url}; expected one that all machines share, under the same "
                "path; mount it there, or write store=s3://bucket/folder"
            )
        try:
            root.check_writable()
        except UsageError as error:
            raise UsageError(f"{who} cannot use the store: {error}") from error
        torch.set_num_threads(1)  # as locally, so that the bits do not depend on where they are computed
        device = torch.device("cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else "cpu")
        shard, texts = ray.get(refs[0])
        shard.encoder.to(device)
        load = ray.remote(_load)
        self._shard = replace(
            shard,
            device=device,
            num_threads=_AHEAD,
            load_elsewhere=lambda task, group: load.remote(join, refs, task, group).future(),
        )
        self._texts = None if texts is None else replace(texts, device=device)
        return who.rpartition(" ")[2]

    def encode(self, task: Any) -> Any:
        """Encode a file, and return what is known of it."""
        encode: Any = self._shard if isinstance(task, EncodeTask) else self._texts
        return encode(task)


def _join(folder: str, versions: Mapping[str, str]) -> None:
    """Make this process one of a job: with the driver's packages, and in its folder, for relative paths of data."""
    check_versions(_WHO, versions)
    with suppress(OSError):  # data that are not there are noticed
        os.chdir(folder)


_shards: dict[Any, ShardEncoder] = {}
"""In a process that loads images: reference -> what it refers to."""


def _load(join: Callable[[], None], refs: tuple[Any, Any], task: EncodeTask, group: range) -> list[Loaded]:
    if refs[1] not in _shards:
        join()
        _shards[refs[1]] = value_of(refs[1])
    return _shards[refs[1]].load(task, group)
