"""Jobs for :mod:`ranks`: training of small networks with the Gemini engine and with plain torch.

:func:`run_ranks` is the call for tests; :func:`train` does one job in this process.
"""

import hashlib
import math
import os
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import held_out_models
import ranks
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.layout import Reader
from sd_lightning.gemini.placement import Demand, smallest_budget

BATCH, WIDTH, CLASSES, STEPS = 8, 24, 6, 12
PLACEMENTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "kept_gathered": {"shard_param_frac": 0.0},
    "half_gathered": {"shard_param_frac": 0.5},
    "small_budget": {"gathered_budget": 12_000},
    "far_prefetch": {"prefetch": 8},
    "no_budget_no_prefetch": {"prefetch": 0},
    "budget_0": {"gathered_budget": 0, "prefetch": 4},
    "half_offloaded": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "gathered_budget": 20_000},
    "optimizer_offloaded": {"offload_optim_frac": 1.0, "shard_param_frac": 0.0},
    "all_offloaded": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 16_000, "prefetch": 1},
    "parameters_offloaded": {"offload_param_frac": 1.0},
    "disk": {"offload_optim_frac": 1.0, "disk_optim_frac": 0.5, "offload_param_frac": 1.0},
    "disk_all": {"offload_optim_frac": 1.0, "disk_optim_frac": 1.0, "shard_param_frac": 0.0},
    "auto_all": {"placement": "auto", "memory_cap": 0.5},
    "auto_some": {"placement": "auto", "memory_cap": "220KiB"},
    "auto_least": {"placement": "auto", "memory_cap": "165KiB"},
}
OPTIMIZERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "RMSprop": (("centered", True), ("momentum", 0.9), ("weight_decay", 0.05)),
    "NAdam": (("decoupled_weight_decay", True), ("weight_decay", 0.05)),
    "Adagrad": (("lr", 1e-2), ("initial_accumulator_value", 0.1), ("lr_decay", 0.01)),
    "ASGD": (("lr", 1e-2), ("lambd", 1e-2), ("t0", 5.0)),
    "RAdam": (("foreach", True), ("lr", 1e-2)),
    "Adamax": (("maximize", False),),
    "Adadelta": (("lr", 0.3),),
    "Rprop": (),
    "Adam": (("amsgrad", True),),
}
"""With settings that matter: the engine steps flat ranges by the user's own class."""
BUDGETED = {"offload_optim_frac": 0.5, "offload_param_frac": 0.3, "gathered_budget": 16_000}


@dataclass
class Job:
    """One training."""

    name: str
    engine: str = "gemini"
    """``gemini``, ``ddp``, or ``torch``: one process with the whole batch."""
    network: str = "blocks"
    """``blocks``, ``pair`` of two networks, ``lora`` with frozen weights below trained ones, ``twins``, ``direct``,
    ``unet``, or one of ``held_out_models.MODELS``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    steps: int = STEPS
    optimizer: str = "AdamW"
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the optimizer, by name."""
    clip: float | None = None
    accumulate: int = 1
    """Micro-batches per step, each of ``BATCH`` samples over all ranks."""
    split: int = 1
    """Passes that a batch is divided into: another order of summation and nothing else."""
    frozen: bool = False
    unused: str = ""
    """``everywhere`` or ``one_rank``: where a branch of each block is not used."""
    skips: str = ""
    """What some ranks do with some blocks in some steps: ``branch``, ``no_grad``, ``detached``, ``held`` or
    ``dropped``; see :class:`Skipping`."""
    penalised: bool = False
    """The last of two ranks has a backward pass of its own for a penalty on a block's weight."""
    checkpointed: bool = False
    checkpoints: str = ""
    """Of a held-out model: ``reentrant`` or ``saved``."""
    compiled: str = ""
    """``block``: each block's ``_call_impl``."""
    two_groups: bool = False
    two_optimizers: bool = False
    meta: bool = False
    dtype: str = "float32"
    loss_factor: float = 1.0
    factor_rank: int | None = None
    """The only rank whose loss is multiplied; all if not given."""
    act: str = ""
    """What happens between steps; see :func:`_act`."""
    native: bool = False
    """The backend's own collectives, which are taken with nccl."""


class Block(nn.Module):
    """A residual block with a branch that may stay unused, and odd sizes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.extra = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        hidden = self.norm(x)
        if with_extra:
            hidden = hidden + self.extra(hidden)
        return x + self.down(F.gelu(self.up(hidden))) * self.scale


class Blocks(nn.Module):
    """A root with a parameter of its own, tied input and output weights, and a stack of blocks."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(CLASSES, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH, 37 + 8 * i) for i in range(num_blocks))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.tied = nn.Linear(WIDTH, CLASSES, bias=False)
        self.tied.weight = nn.Parameter(self.embed.weight.detach().T.clone())
        self.retied = nn.Linear(WIDTH, CLASSES, bias=False)
        self.retied.weight = self.tied.weight
        self.checkpointed = False
        self.with_extra = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, self.with_extra, use_reentrant=False)
            else:
                hidden = block(hidden, self.with_extra)
            hidden = hidden * self.gain
        return self.head(hidden) + self.tied(hidden) + self.retied(hidden.tanh())


class Pair(nn.Module):
    """Two networks that are trained together, as an encoder and what it conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(CLASSES, 19), nn.GELU(), nn.Linear(19, CLASSES))
        self.blocks = Blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.encoder(x))


class Twins(nn.Module):
    """Layers of one size, called in an order that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = x + self.blocks[index](x).tanh()
        return x


class Droppable(Block):
    """A block that may return its input."""

    is_dropped = False

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        return x if self.is_dropped else super().forward(x, with_extra)


class Direct(nn.Module):
    """A root with a parameter of its own that returns what its last layer returns; one block returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CLASSES, WIDTH)
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Droppable(WIDTH, 37 + 8 * i) for i in range(4))
        self.blocks[2].is_dropped = True
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Skipping(Blocks):
    """Blocks of which some do not go backward, in another way on each rank.

    ``branch``: a low-rank correction, the only trained weights before the head, is left out; ``no_grad``: a block
    runs without gradients; ``detached``: what it returns is detached; ``held``: and kept; ``dropped``: it is not
    called.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.skipped: set[int] = set()
        self.kept: list[Tensor] = []
        if how == "branch":
            for module in (self.embed, self.blocks):
                module.requires_grad_(False)
            self.gain.requires_grad_(False)
            for index in (1, 3):
                self.blocks[index].up = LowRank(self.blocks[index].up)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        self.kept.clear()
        for index, block in enumerate(self.blocks):
            is_skipped = index in self.skipped
            if self.how == "branch" and isinstance(block.up, LowRank):
                block.up.is_used = not is_skipped
            if is_skipped and self.how == "dropped":
                continue
            with torch.no_grad() if is_skipped and self.how == "no_grad" else nullcontext():
                output = block(hidden)
            if is_skipped and self.how in ("detached", "held"):
                if self.how == "held":
                    self.kept.append(output)
                output = hidden + output.detach()
            hidden = output * self.gain
        return self.head(hidden) + self.tied(hidden)


class LowRank(nn.Module):
    """A frozen layer and a trained correction of rank 2 (Hu et al. 2021, equation 3)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.first = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
        self.second = nn.Parameter(torch.zeros(layer.out_features, 2))
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_used:
            return self.layer(x)
        return self.layer(x) + F.linear(F.linear(x, self.first), self.second)


def build(job: Job) -> nn.Module:
    """Return the network of a job, with the same weights everywhere."""
    network = _build(job)
    return network.double() if job.dtype == "float64" else network


def _build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    if job.network == "unet":
        from sd_lightning.models.latent_diffusion import LatentDiffusion

        network: nn.Module = LatentDiffusion.build("tiny", seed=0).denoiser
        if job.checkpointed:
            network.enable_gradient_checkpointing()
        network.train()
    elif job.network in held_out_models.MODELS:
        network = held_out_models.build(job.network, job.checkpoints)
    elif job.skips:
        network = Skipping(job.skips)
    elif job.network == "pair":
        network = Pair()
    elif job.network == "twins":
        network = Twins()
    elif job.network == "direct":
        network = Direct()
    elif job.network == "lora":
        network = Blocks().requires_grad_(False)
        for block in network.blocks:
            block.up = LowRank(block.up)
    else:
        network = Blocks()
        network.checkpointed = job.checkpointed
    if job.frozen:
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(not any(part in name for part in ("blocks.1", "blocks.0.up")))
    return network


def inputs(step: int, job: Job) -> tuple[Tensor, ...]:
    """Return the joined batch of a micro-step."""
    generator = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if job.network in held_out_models.MODELS:
        return held_out_models.inputs(job.network, generator)
    if job.network == "unet":
        latents, noise = normal(BATCH, 4, 8, 8), normal(BATCH, 4, 8, 8)
        return latents, torch.randint(0, 1000, (BATCH,), generator=generator), normal(BATCH, 8, 64), noise
    length = 9 if job.act == "longer" and step >= 8 else 5
    return normal(BATCH, length, CLASSES), normal(BATCH, length, CLASSES)


def loss_of(network: nn.Module, batch: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the mean squared error of a batch."""
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    if isinstance(network, held_out_models.HeldOut):
        output = network(*batch)
        return F.mse_loss(output, torch.linspace(-2.0, 2.0, output.shape[1]).expand_as(output))
    if len(batch) == 4:
        latents, timesteps, text, noise = batch
        return F.mse_loss(network(latents, timesteps, text).sample.float(), noise.float())
    prediction = network(batch[0])
    wide = torch.promote_types(prediction.dtype, torch.float32)
    return F.mse_loss(prediction.to(wide), batch[1].to(wide))


def optimizers_of(job: Job, network: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the user's optimizers, made after the engine."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    settings: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9} if job.optimizer == "SGD" else {"lr": 1e-3}
    if job.optimizer in ("AdamW", "Adam", "SGD"):
        settings |= {"fused": True, "weight_decay": 0.05}
    if job.network in held_out_models.MODELS:
        settings["eps"] = 1e-4  # gradients that are 0 but for rounding, as of a key's bias, move nothing
    settings |= dict(job.settings)
    if job.optimizer.startswith("AdamW8bit"):
        import bitsandbytes

        # The networks here are small: quantise all but the smallest parameters.
        cls, settings = bitsandbytes.optim.AdamW8bit, {"lr": 1e-3, "weight_decay": 0.05, "min_8bit_size": 30}
    else:
        cls = getattr(torch.optim, job.optimizer)
    if job.two_optimizers:
        return [cls(parameters[::2], **settings), cls(parameters[1::2], **(settings | {"lr": 3e-3}))]
    if job.two_groups:
        groups = [{"params": parameters[::3]}, {"params": parameters[1::3], "lr": 5e-3}, {"params": parameters[2::3]}]
        groups[2]["weight_decay"] = 0.0
        return [cls(groups, **settings)]
    return [cls(parameters, **settings)]


@dataclass
class Findings:
    """What a job found on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float]
    notes: dict[str, Any]

    @property
    def digest(self) -> str:
        """The weights, as something to compare bit for bit."""
        flat = (self.weights[name].reshape(-1).view(torch.uint8) for name in sorted(self.weights))
        content = b"".join(each.numpy().tobytes() for each in flat)
        return hashlib.sha256(content).hexdigest()


class Training:
    """One job on one rank."""

    def __init__(self, job: Job, rank: int = 0, world_size: int = 1) -> None:
        self.job, self.rank, self.world_size = job, rank, world_size
        self.network = build(job)
        self.notes: dict[str, Any] = {}
        self.engine: GeminiEngine | None = None
        self.norms: list[float] = []
        self.folder: str | None = None
        if job.compiled:
            for block in self.network.blocks:
                block._compiled_call_impl = torch.compile(block._call_impl, backend="aot_eager")
        self.trained: nn.Module = self.network
        if job.engine == "gemini":
            self.engine = self._engine()
            self.trained = self.network  # the one with weights, where it was on the meta device
        elif job.engine == "ddp":
            unused = bool(job.unused or job.skips)
            self.trained = nn.parallel.DistributedDataParallel(self.network, find_unused_parameters=unused)
        self.begin_fit()
        self.dtype = getattr(torch, job.dtype)

    def begin_fit(self) -> None:
        """Begin with new optimizers."""
        self.optimizers = optimizers_of(self.job, self.network)
        # Schedulers drive the user's own optimizer, as in Lightning.
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) for optimizer in self.optimizers]
        if self.engine is not None:
            self.engine.drop_optimizers()
            self.optimizers = [self.engine.optimizer(inner) for inner in self.optimizers]
            for optimizer in self.optimizers if self.engine.config.step_in_backward == "running_norm" else ():
                optimizer.early.max_norm = self.job.clip

    def _engine(self) -> GeminiEngine:
        job = self.job
        config = {"chunk_numel": 60_000 if job.network == "unet" else 1500} | job.config
        for name in config.keys() & {"reduce_dtype", "gradient_dtype"}:
            config[name] = getattr(torch, config[name])
        if job.dtype not in ("float32", "float64"):
            config["compute_dtype"] = getattr(torch, job.dtype)
        reader: Reader | None = None
        if job.meta:
            values = {n: t.clone() for n, t in self.network.state_dict().items()}
            self.notes["read"] = read = []
            with torch.device("meta"):
                self.network = Blocks()

            def reader(name: str, begin: int, end: int) -> Tensor:
                read.append(end - begin)
                return values[name].reshape(-1)[begin:end]

        if config.get("disk_optim_frac"):
            config["offload_dir"] = self.folder = tempfile.mkdtemp(prefix="gemini-test-")
        networks = dict(self.network.named_children()) if job.network == "pair" else {"": self.network}
        return GeminiEngine(networks, GeminiConfig(**config), reader=reader, blocks=self._blocks())

    def _blocks(self) -> list[nn.Module] | None:
        if self.job.network != "unet":
            return None
        from sd_lightning.models.families.blocks import repeated_blocks

        return list(repeated_blocks(self.network).values())

    def run(self) -> Findings:
        losses = []
        for step in range(self.job.steps):
            if self.job.act == "refit" and step == 10:
                self.begin_fit()
            if self.engine is not None:
                _act(self, step)
            losses.append(self.step(step))
        if self.engine is not None:
            _note(self)
        if self.engine is not None:
            weights = weights_of(self.engine)
            self.notes["files"] = [] if self.folder is None else os.listdir(self.folder)
            self.engine.close()
        else:
            weights = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        return Findings(losses, weights, self.norms, self.notes)

    def step(self, step: int) -> float:
        """Train one step; return the mean loss over all ranks."""
        job = self.job
        total = torch.zeros(())
        for micro in range(job.accumulate):
            is_last = micro == job.accumulate - 1
            syncs = self.engine.no_sync() if self.engine is not None and not is_last else nullcontext()
            with syncs:
                total += self.micro_step(step * job.accumulate + micro)
        self._clip()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if self.world_size > 1 and job.engine != "torch":
            dist.all_reduce(total)
            total /= self.world_size
        return float(total)

    def micro_step(self, index: int) -> Tensor:
        job = self.job
        shares = self.world_size if job.engine != "torch" else job.split
        ranks = [self.rank] if job.engine != "torch" else range(shares)
        total = torch.zeros(())
        for rank in ranks:
            size = BATCH // shares
            batch = tuple(t[rank * size : (rank + 1) * size] for t in inputs(index, job))
            if job.unused:
                uses = job.unused == "one_rank" and rank == 0 if shares > 1 else job.unused == "one_rank"
                self.network.with_extra = uses
            if job.skips:
                self.network.skipped = [set(), {1} if rank else set(), {1, 3} if rank else {2}, {0, 3}][index % 4]
            loss = loss_of(self.trained, batch, self.dtype) / job.accumulate
            factor = job.loss_factor if job.factor_rank in (None, rank) else 1.0
            scaled = loss * factor / (shares if job.engine == "torch" else 1)
            backward = self.engine.backward if self.engine is not None else Tensor.backward
            backward(scaled)
            if job.penalised and self.engine is not None:
                self.optimizers[0].grad_norm()  # what the ranks agree on here is outdated on one of them
            if job.penalised and rank == shares - 1:
                penalty = 0.1 * self.network.blocks[0].up.weight.square().sum()
                backward(penalty / 2 if job.engine == "torch" else penalty)
            total += loss.detach() / (shares if job.engine == "torch" else 1)
        return total

    def _clip(self) -> None:
        if self.job.clip is None:
            return
        for optimizer in self.optimizers:
            if self.engine is not None:
                norm = optimizer.clip_grad_norm_(self.job.clip)
            else:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                norm = torch.nn.utils.clip_grad_norm_(parameters, self.job.clip)
            self.norms.append(float(norm))


def _act(training: Training, step: int) -> None:
    """Do what the job asks for before a step."""
    job, engine = training.job, training.engine
    assert engine is not None
    if job.act == "longer" and step == 10:
        engine.ledger.peak = Counter(engine.ledger.current)  # the plan for shorter inputs could take more
    if job.act == "sample" and step % 3 == 2:
        for _ in range(3):
            with torch.inference_mode():
                loss_of(training.network, inputs(1000 + step, job), training.dtype)
    if job.act == "swap" and step % 3 == 1:
        owned = engine.state.parameter_shards()
        engine.state.swap_in({(s.name, s.begin): torch.full((s.end - s.begin,), 0.01) for s in owned})
        with torch.no_grad():
            swapped = loss_of(training.network, inputs(7, job), training.dtype)
        training.notes["swapped_loss"] = float(swapped)
        engine.state.swap_out()
    if job.act == "drop" and step % 4 == 2:
        training.micro_step(800)
        for optimizer in training.optimizers:
            optimizer.zero_grad()
    if job.act in ("raise", "refit") and step % 4 == 2:
        _fail_in_backward(training, step)
    if job.act == "reorder" and step == 2:
        _call_in_another_order(training)
    if job.act == "accumulate_then_raise" and step % 4 == 2:
        training.micro_step(500)
        _fail_in_backward(training, step)


def _call_in_another_order(training: Training) -> None:
    """Try a step in which the last rank calls two layers of one size the other way round."""
    assert training.engine is not None
    training.network.eval()  # in training, ranks take part in what others call
    if training.rank == training.world_size - 1:
        training.network.order = [0, 2, 1, 3]
    try:
        training.micro_step(700)
        training.optimizers[0].step()
    except UsageError as error:
        training.notes["refused"] = str(error)
    training.engine.abort()
    training.network.order = [0, 1, 2, 3]
    training.network.train()


def _fail_in_backward(training: Training, step: int) -> None:
    """Begin a backward pass that ends in an exception in the middle of the network."""

    def fail(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return _Fails.apply(output)

    handle = training.network.blocks[1].register_forward_hook(fail)
    try:
        training.micro_step(900 + step)
    except ZeroDivisionError:
        training.notes["failed"] = training.notes.get("failed", 0) + 1
    finally:
        handle.remove()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def _note(training: Training) -> None:
    """Measure the engine at rest, after a last step."""
    engine = training.engine
    assert engine is not None
    engine.synchronize()
    ledger = engine.ledger
    training.notes |= {
        "at_rest": {str(tier): count for tier, count in ledger.current.items() if count},
        "kinds": {f"{tier}/{kind}": count for (tier, kind), count in ledger.by_kind.items() if count},
        "gathered_peak": ledger.kind_peak["fast", "gathered"],
        "largest_unit": _largest_unit_bytes(engine),
        "sequence": engine.collectives._sequence.hexdigest(),
        "statistics": engine.statistics(),
        "num_chunks": len(engine.chunks),
        "numel": sum(layout.numel for layout in engine.layouts if layout.is_trained),
        "frozen_numel": sum(layout.numel for layout in engine.layouts if not layout.is_trained),
        "plan": {} if engine.auto is None else _plan(engine),
        "skipped": 0 if engine.loss_scale is None else engine.loss_scale.state_dict()["skipped"],
    }


def _largest_unit_bytes(engine: GeminiEngine) -> int:
    """The most bytes that one unit, with the containers around it, gathers temporarily."""
    demand = Demand(0, 0, (), engine.chunks_around_units(), engine.collectives.world_size)
    return smallest_budget(engine.layouts, engine.plan.chunks, demand)


def _plan(engine: GeminiEngine) -> dict[str, Any]:
    """What placement=auto has decided."""
    assert engine.auto is not None
    trained = [place for chunk, place in zip(engine.chunks, engine.plan.chunks) if chunk.is_trained]
    return {
        "cap": engine.auto.cap_bytes,
        "non_model": engine.auto.non_model_bytes,
        "budget": engine.plan.gathered_budget,
        "slow_optimizers": sum(place.optim_tier == "slow" for place in trained),
        "slow_weights": sum(place.param_tier == "slow" for place in trained),
        "moves": engine.num_moves,
        "peak": engine.ledger.peak["fast"],
    }


def weights_of(engine: GeminiEngine) -> dict[str, Tensor]:
    """Return whole weights by name; a collective call."""
    return {engine.name_of(parameter): weight for parameter, weight in engine.whole_weights()}


def train(job: Job, rank: int = 0, world_size: int = 1) -> Findings:
    """Run one job in this process."""
    takes_own = mock.patch("sd_lightning.gemini.collectives.exchanges_shards", return_value=False)
    with takes_own if job.native else nullcontext():
        return Training(job, rank, world_size).run()


def run_ranks(world_size: int, jobs: list[Job], folder: Path, *, timeout: float = 600) -> list[dict[str, Findings]]:
    """Run jobs on several ranks; return each rank's findings by the name of the job."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {job.name: str(folder / f"weights-{index}") for index, job in enumerate(jobs)}
    orders = {job.name: {"job": asdict(job), "weights": files[job.name]} for job in jobs}
    of_ranks = ranks.run_jobs_of_all("gemini_jobs", orders, folder, world_size=world_size, timeout=timeout)
    return [
        {name: Findings(**found, weights=load_file(f"{files[name]}-{rank}")) for name, found in each.items()}
        for rank, each in enumerate(of_ranks)
    ]


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Do a job on this rank; write the weights beside what the others write."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    findings = train(Job(**order["job"]), rank, dist.get_world_size())
    save_file({n: t.contiguous() for n, t in findings.weights.items()}, f"{order['weights']}-{rank}")
    return {"losses": findings.losses, "norms": findings.norms, "notes": findings.notes}


def distance(one: Findings, other: Findings) -> tuple[float, float]:
    """The largest difference of losses, and the root mean square of that of the weights."""
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    assert one.weights.keys() == other.weights.keys()
    squares = sum((one.weights[n] - w).double().square().sum().item() for n, w in other.weights.items())
    return losses, math.sqrt(squares / sum(w.numel() for w in other.weights.values()))
