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
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.order import Batch, BatchKeys, Key
from sd_lightning.data.workers import Loaders
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.remote.cluster import connect, package_versions
from sd_lightning.remote.encoder_pool import WHO, EncoderPool, check_room, usage_error
from sd_lightning.state.ranks import gathered, on_rank_zero, rank_and_world_size
from sd_lightning.storage import far_runs

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.data.batch import CaptionedImages
    from sd_lightning.data.source import Source

log = logging.getLogger(__name__)

_PLACE_SECONDS = 600.0
"""How long a run waits at its start for encoders to get a place on the cluster, of which others may take a part."""
_LONG_WAIT_SECONDS = 60.0
"""After this, and each time it has doubled, a process says that it waits."""


class RayEncoders(Loaders):
    """Builds loaders whose batches are read and encoded on a Ray cluster; ``loaders=`` of :class:`LoaderOptions`.

    The encoders start with the first loader. They end with the fit, or with this process. The cluster is that of
    RAY_ADDRESS, else a new one on this machine.

    Args:
        num_encoders: Encoders of all training processes together.
        resources: What each one reserves, by Ray's names: ``{"CPU": 2, "GPU": 0.5}``. A CPU by default, and a GPU if
            the cluster has any; with a GPU, or a part of one, it encodes there.
        labels: Labels of the machines that may be used: ``{"ray.io/accelerator-type": "A10G"}``.
        run: Folder of the run, by which :func:`resize` knows it.

    """

    def __init__(
        self,
        num_encoders: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        run: str | Path = ".",
    ) -> None:
        self.num_encoders = num_encoders
        self._resources = None if resources is None else {"CPU": 1.0, **resources}
        self._labels = {name: str(value) for name, value in (labels or {}).items()}  # YAML has numbers
        self._run = str(Path(run).absolute())
        self._options = LoaderOptions()
        self._pool: Any = None
        self._name = ""
        self._waits: Counter[str] = Counter()

    def take(self, options: LoaderOptions, sources: Sequence[Source], *, in_memory: bool) -> None:
        """Take the user's options; see :class:`Loaders`."""
        if in_memory or any(source.latents is not None for source in sources):
            remedy = "write data.cache_latents=false" if in_memory else "train on the images themselves"
            raise UsageError(f"{WHO}: the images are encoded before training; {remedy}, or leave data.encoders out")
        if options.num_workers not in ("auto", 0):
            raise UsageError(
                f"data.num_workers={options.num_workers} has no effect with {WHO}, whose encoders read the images; "
                "leave it out, or raise data.num_encoders"
            )
        self._options = options

    def connect(self) -> None:
        """Connect to the cluster, and check that it has room for the encoders.

        Raises:
            UsageError: There is no cluster, or it has not.
        """
        cpus = math.ceil(self.num_encoders * (self._resources or {}).get("CPU", 1))
        ray = connect(WHO, num_cpus=max(cpus, os.cpu_count() or 1))
        if self._resources is None:
            self._resources = {"CPU": 1.0, **({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {})}
        check_room(self.num_encoders, self._resources, self._labels)

    def build(self, dataset: CaptionedImages, batches: BatchKeys, trainer: pl.Trainer) -> Any:
        """Build the loader of a dataset for a trainer's process; the first call starts the encoders."""
        number, name, address = on_rank_zero(lambda: self._publish(dataset, trainer.lightning_module))
        pool = connect(WHO, address).get_actor(name, namespace=self._run)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        pin = on_cuda if self._options.pin_memory is None else self._options.pin_memory
        ask = partial(pool.encode.remote, number)
        waits = Counter[str]() if dataset.wrong_captions else self._waits  # those of validation do not count
        ahead = self._options.prefetch_factor or 2
        return EncodedLoader(dataset, batches, ask, self.num_encoders, ahead=ahead, pin=pin, waits=waits)

    def _publish(self, dataset: CaptionedImages, module: Any) -> tuple[int, str, str]:
        """Give the encoders a data set; return its number, the name of their pool, and the cluster's address."""
        import ray

        self.connect()
        address = ray.get_runtime_context().gcs_address
        if not self._pool:
            self._start(module.encoder)
            nodes = _answer(self._pool.living.remote(self.num_encoders, _PLACE_SECONDS), "encoders to start")
            log.info("data: encoders on the Ray cluster at %s: %s", address, ", ".join(sorted(nodes)))
        model, part = module.latent_diffusion, copy.copy(dataset)
        part.tokenize = partial(model.family.tokenize, model.tokenizers)  # without the networks
        return _answer(self._pool.publish.remote([ray.put(part)])), self._name, address

    def _start(self, encoder: Any) -> None:
        import ray

        others = {**(self._resources or {})}
        options: dict[str, Any] = {"num_cpus": others.pop("CPU"), "num_gpus": others.pop("GPU", 0), "resources": others}
        options["label_selector"] = self._labels
        if not options["num_gpus"]:  # on the CPU the bits of a sum depend on the number of threads
            threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
            options["runtime_env"] = {"env_vars": threads}
        arguments, sent = (os.getcwd(), package_versions()), [ray.put(encoder.portable())]
        here, self._name = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}, uuid.uuid4().hex
        remote: Any = ray.remote
        pool = remote(num_cpus=0, label_selector=here, name=self._name, namespace=self._run)(EncoderPool)
        self._pool = pool.remote(options, self._resources, arguments, sent)
        _answer(self._pool.resize.remote(self.num_encoders))

    def close(self) -> None:
        """End the encoders."""
        if self._pool is not None:
            import ray

            ray.kill(self._pool)
            self._pool = None

    def waits(self) -> str | None:
        """Return how long training waited and encoders worked, as shares of the time; None before the second batch.

        A collective call.
        """
        total = sum(gathered(self._waits), Counter())
        # Encoders that mostly wait themselves, as between short epochs, are enough.
        are_too_few = total["encoders"] > 0.1 * total["seconds"] and total["busy"] > 0.5 * total["available"]
        remedy = "; raise data.num_encoders" if are_too_few else ""
        return (total or None) and (
            f"trainer waited {total['encoders'] / total['seconds']:.0%} for encoders, "
            f"{total['network'] / total['seconds']:.0%} for the network; "
            f"encoders busy {min(total['busy'] / total['available'], 1):.0%}{remedy}"
        )


@dataclass(eq=False)
class EncodedLoader:
    """Loader of encoded batches for one training process, in order; used as a ``DataLoader``."""

    dataset: CaptionedImages
    batch_sampler: BatchKeys
    """Keys of the batches of this process."""
    ask: Callable[[list[Key]], Any]
    """Asks the ``EncoderPool`` for a batch."""
    num_encoders: int
    """Encoders that live."""
    ahead: int
    """Batches in flight for each encoder, over all processes; one more is in flight for each process."""
    pin: bool
    """Whether batches are put into page-locked memory."""
    waits: Counter[str]
    """Seconds from the first batch on, those waited for encoders and network, those that encoders worked for this
    process, and those that they had for it."""
    num_workers = 0
    _iterator = None
    _last = 0.0

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        import ray

        keys, flying, world_size = iter(self.batch_sampler), deque[tuple[list[Key], Any]](), rank_and_world_size()[1]
        while True:
            window = 1 + max(2, math.ceil(self.ahead * self.num_encoders / world_size))  # one waits for its turn
            flying.extend((each, self.ask(each)) for each in islice(keys, max(window - len(flying), 0)))
            if not flying:
                return
            asked, (wanted, answer) = time.perf_counter(), flying.popleft()
            for _, following in islice(flying, 1):
                with suppress(UsageError):  # until it is its turn
                    if ray.wait([following], timeout=0)[0]:  # it comes here while this one is trained on
                        ray.wait(_answer(following)[0], timeout=0)
            (reference,), busy, self.num_encoders = _answer(answer, "a batch")
            ready = time.perf_counter()
            try:
                batch = ray.get(reference)
            except ray.exceptions.ObjectLostError:  # its machine has left
                flying.appendleft((wanted, self.ask(wanted)))
                continue
            now = time.perf_counter()
            if self._last:  # the very first batch was not waited for by a step
                seconds = now - self._last
                noted: dict[str, Any] = {"seconds": seconds, "encoders": ready - asked, "network": now - ready}
                noted |= {"busy": busy, "available": seconds * self.num_encoders / world_size}
                self.waits.update(noted)
            self._last = now
            yield map_conditioning(batch, torch.Tensor.pin_memory) if self.pin else batch


def resize(run: str | Path, num_encoders: int) -> None:
    """Change the number of encoders of a run while it trains, from any process that reaches the Ray cluster.

    That is the cluster of RAY_ADDRESS, else the one on this machine.

    Args:
        run: The run's ``output_dir``, or its URL.
        num_encoders: Encoders that it shall have.

    Raises:
        UsageError: No such run has encoders there, or the cluster has no room.
    """
    folder = far_runs.working_folder(str(run)) if far_runs.is_url(run) else Path(run)
    ray = connect("resize", os.environ.get("RAY_ADDRESS") or "auto")
    actors = ray.util.list_named_actors(all_namespaces=True)
    pools = [ray.get_actor(**each) for each in actors if each["namespace"] == str(folder.absolute())]
    if not pools:
        raise UsageError(
            f"resize got run={run}; no run in that folder has encoders on this Ray cluster; expected the output_dir of "
            f"one that trains with {WHO}"
        )
    for pool in pools:
        _answer(pool.resize.remote(num_encoders))


def _answer(answer: Any, what: str = "the encoders") -> Any:
    """Return what the pool answers; say from time to time what is waited for.

    Raises:
        UsageError: It has raised one, or died.
    """
    import ray

    limit = _LONG_WAIT_SECONDS
    while not ray.wait([answer], timeout=limit)[0]:
        log.warning("data: waiting for %s for %.0f s", what, limit)
        limit *= 2
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        raise usage_error(error, "the pool of encoders beside rank 0") from error
