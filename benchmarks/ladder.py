"""The ladder: one training, one change at a time. A rung is `experiment=ladder_<name>`, a file of conf/experiment.

Each rung holds the changes below it. One that a machine cannot run is left out there, and what it changes is taken
back for those above it. On a CPU this also holds for compiled layers, as each run would compile for a minute or two.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[1] / "conf" / "experiment"


@dataclass(frozen=True)
class Machine:
    """What decides which rungs run."""

    on_cuda: bool
    devices: int
    """GPUs; of a CPU the processes that train."""
    has_tf32: bool
    has_bf16: bool

    @classmethod
    def here(cls, processes: int) -> "Machine":
        """Look at this machine.

        Args:
            processes: That train on a machine without a GPU.
        """
        import torch

        if torch.cuda.is_available():
            is_ampere = torch.cuda.get_device_capability()[0] >= 8
            return cls(True, torch.cuda.device_count(), is_ampere, is_ampere)
        return cls(False, processes, False, re.search(r"\b(avx512_bf16|amx_bf16)\b", _cpu_flags()) is not None)


def _cpu_flags() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


Lacks = Callable[[Machine], str | None]
"""Machine -> why it cannot run a rung, or None."""


def _tf32(machine: Machine) -> str | None:
    where = "this GPU is older than Ampere and has" if machine.on_cuda else "a CPU has"
    return None if machine.has_tf32 else f"{where} no arithmetic in TensorFloat-32"


def _bf16(machine: Machine) -> str | None:
    where = "this GPU is older than Ampere and has" if machine.on_cuda else "this CPU has"
    return None if machine.has_bf16 else f"{where} no arithmetic in bfloat16"


def _several(machine: Machine) -> str | None:
    return None if machine.devices > 1 else "one device: there is nothing to share with"


def _tunes(machine: Machine) -> str | None:
    return None if machine.on_cuda else "left to GPUs: not tried on a CPU"


def _nothing(machine: Machine) -> str | None:
    return None


@dataclass(frozen=True)
class Rung:
    """One change."""

    name: str
    title: str
    lacks: Lacks = _nothing
    undone: tuple[str, ...] = ()
    """Overrides that take the change back for the rungs above."""
    aside_on_cpu: bool = False
    """Whether the rungs above go without it on a CPU."""
    is_priced: bool = True
    """Whether the planner has a price for what it changes; without one its figure would be that of the rung below."""

    @property
    def is_stored(self) -> bool:
        """Whether it reads latents from a store."""
        return self.name in _FROM_STORE

    @property
    def file(self) -> Path:
        return EXPERIMENTS / f"ladder_{self.name}.yaml"

    @property
    def change(self) -> str:
        """What it changes, as its file says."""
        found = re.search(r"^# [^:\n]*: (.+?)\.(?: |$)", self.file.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is not None, f"{self.file.name} says nothing after a colon"
        return found[1]


_ONE_STRATEGY = ("strategy=ddp",)
RUNGS = (
    Rung("baseline", "float32"),
    Rung("tf32", "TF32", _tf32, ("speed.allow_tf32=false",)),
    Rung("bf16", "bfloat16", _bf16, ("trainer.precision=32-true", "module.encoder_dtype=float32")),
    Rung("loader", "loader", undone=("data.num_workers=0",), is_priced=False),
    Rung("adamw", "fused AdamW", undone=("optimizer.fused=false",), is_priced=False),
    Rung("fused_layers", "fused layers", undone=("speed.compile_blocks=false",), aside_on_cpu=True, is_priced=False),
    Rung("flash", "flash attention", undone=("speed.attention=math",)),
    Rung("batch", "larger batch"),
    Rung("ema", "fused EMA", is_priced=False),
    Rung("zero2", "ZeRO-2", _several, _ONE_STRATEGY),
    Rung("fsdp", "FSDP2", _several, _ONE_STRATEGY),
    Rung("latents", "stored latents"),
    Rung("compile", "tuned kernels", _tunes, ("speed.inductor_mode=default",), is_priced=False),
)
_FROM_STORE = ("latents", "compile")
_LARGER = tuple(rung.name for rung in RUNGS[[rung.name for rung in RUNGS].index("batch") :])


@dataclass(frozen=True)
class Climb:
    """What is the same on all rungs."""

    options: tuple[str, ...]
    """Overrides."""
    photos: str
    """Folder of images with captions."""
    store: str
    """Of their latents."""
    batch_sizes: tuple[int, int]
    """Before and after the rung "batch"."""

    def command(self, rung: Rung, left_out: Sequence[Rung]) -> list[str]:
        """Return the overrides that run a rung, without those of others that cannot run."""
        below = RUNGS[: RUNGS.index(rung)]
        # FSDP2 stands beside ZeRO-2, and has a strategy of its own.
        undone = [each for each in left_out if each in below and not (rung.name == "fsdp" and each.name == "zero2")]
        data = [f"data.store={self.store}"] if rung.is_stored else [f"data.train_data_dir={self.photos}"]
        batch = self.batch_sizes[rung.name in _LARGER]
        changes = dict.fromkeys(change for each in undone for change in each.undone)
        return [f"experiment=ladder_{rung.name}", *changes, *self.options, *data, f"data.batch_size={batch}"]


def table(metric: str, rungs: Sequence[Rung] = RUNGS) -> str:
    """Return the figures of a row of a case's table: a metric of some rungs."""
    return "; ".join(f"{{{rung.name}_{metric}}}" for rung in rungs)


def rows(what: str) -> dict[str, str]:
    """Return the rows of a case that trains the rungs."""
    return {
        f"{what}, images per second of {'; '.join(rung.title for rung in RUNGS)}": table("images_per_second"),
        f"{what}, peak GB of a process, in this order": table("gb"),
    }


def told(what: str, *, memory: bool = False) -> dict[str, str]:
    """Return the rows of a case that predicts them: those that have a price."""
    priced = [rung for rung in RUNGS if rung.is_priced]
    titles = "; ".join(rung.title for rung in priced)
    found = {f"{what}, predicted images per second of {titles}": table("predicted_images_per_second", priced)}
    return found | ({f"{what}, predicted peak GB, in this order": table("predicted_gb", priced)} if memory else {})
