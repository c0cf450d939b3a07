"""Training steps per second with encoding done before, in the trainer, and by encoders on a Ray cluster.

The tiny model trains on digits, batch 32, one thread per process, on this machine alone. `offline` reads latents and
text embeddings from a store; `on_the_fly` encodes in its steps; `ray_1` has one encoder on a Ray cluster, which shares
the cores with it, so that its figure says little of two machines. Encoders that wait instead of computing take little
of a core: with N of them, steps per second are to be the least of the trainer's own (`offline`) and N times an
encoder's, which takes 2.5 times as long for a batch as the trainer, reading included. So the bar holds for what a batch
from elsewhere costs the trainer more than one of a store, and for encoders left idle. It takes two idle cores: on one,
what the encoders and Ray's own processes compute for a batch (18 ms in a step of 120) is added to the trainer's step.
All sides are processes that stay alive and take turns, a block of steps each. The median block has no end of an epoch
in it, where the first batch is waited for.

The published gains of latents from a store are those of Stable Diffusion 2 on A100, whose encoders are larger.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from encoder_turns import OFFLINE, ON_THE_FLY, RAY, WAITING, encoders_of
from published import PUBLISHED
from timing import interleaved, ratios

NUMBERS = (1, 2, 4)
SIDES = (OFFLINE, ON_THE_FLY, f"{RAY}_1", *(f"{WAITING}_{number}" for number in NUMBERS))
BARS = {f"{WAITING}_{number}_off_by": "<= 0.05" for number in NUMBERS}
TABLE = {
    "steps per second from a store to encoding on the fly: tiny; published, SD 2 on A100 at 256², 512²": (
        "{offline_gain} ×; {published_256} ×, {published_512} ×"
    ),
    "the same with an encoder on Ray that shares the two cores of the trainer": "{ray_gain} ×",
    "with encoders that wait, off the least of trainer and N encoders by: N = 1; 2; 4": (
        "{waiting_1_off_by:.1%}; {waiting_2_off_by:.1%}; {waiting_4_off_by:.1%}"
    ),
    "steps per second: store; on the fly; Ray, 1 encoder; 1, 2, 4 that wait; one of these alone": (
        "{offline}; {on_the_fly}; {ray_1}; {waiting_1}, {waiting_2}, {waiting_4}; {encoder}"
    ),
}
SCRIPT = Path(__file__).resolve().parents[1] / "encoder_turns.py"
SLOWER = 2.5
"""Seconds of a waiting encoder's batch to those of the trainer's step."""


class Side:
    """A training in a process of its own, which makes a block of steps when it is asked to."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        """Start it."""
        self.name, self.steps = name, steps
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(folder), str(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.log = folder / f"{name}.log"

    def result(self) -> float:
        """Wait for the steps per second of the block that was asked for."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"online_encoders: {self.name} has ended:\n{self.log.read_text()[-3000:]}")
        return self.steps / float(line)

    def block(self) -> float:
        """Return the steps per second of another block."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.result()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def cluster(num_cpus: int) -> Iterator[None]:
    """Have a Ray cluster on this machine, with as many logical CPUs as there are encoders, and name it to processes."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    context = ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()


def measure(rounds: int = 5, steps: int = 10, sides: Sequence[str] = SIDES) -> dict[str, float | list[float]]:
    """Let the sides take turns.

    Args:
        rounds: Blocks of each side that count.
        steps: Of a block.
        sides: Of :data:`SIDES`.
    """
    num_encoders = sum(map(encoders_of, sides))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "seconds").write_text("0")
        if num_encoders:
            stack.enter_context(cluster(num_encoders))
        running = {}
        for side in sorted(sides, key=OFFLINE.__eq__):  # the others start meanwhile
            if side == OFFLINE:
                precompute(folder / "store")
            running[side] = Side(side, folder, steps)
            stack.callback(running[side].close)
        for each in running.values():
            each.result()  # the first block, as soon as it is there
        seconds = SLOWER / statistics.median(running[OFFLINE].block() for _ in range(3))
        (folder / "seconds").write_text(str(seconds))
        taken = interleaved({side: running[side].block for side in sides}, rounds=rounds)
    return summarize(taken, encoder=1 / seconds)


def precompute(store: Path) -> None:
    """Encode the digits and their captions."""
    options = ["data=digits", "model=tiny", f"store={store}", "text=true", "workers=1"]
    subprocess.run([sys.executable, "-m", "sd_lightning.precompute", *options], check=True, stdout=sys.stderr)


def summarize(taken: Mapping[str, list[float]], *, encoder: float) -> dict[str, float | list[float]]:
    """Turn the steps per second of each side, and of a waiting encoder, into metrics."""
    metrics: dict[str, float | list[float]] = {**taken, "encoder": encoder}
    for gain, side in (("offline_gain", OFFLINE), ("ray_gain", f"{RAY}_1")):
        if side in taken and ON_THE_FLY in taken:
            metrics[gain] = ratios(taken[side], taken[ON_THE_FLY])
    for number in NUMBERS:
        side = f"{WAITING}_{number}"
        if side in taken:
            expected = [min(trainer, number * encoder) for trainer in taken[OFFLINE]]
            metrics[f"{side}_to_least"] = ratios(taken[side], expected)
            metrics[f"{side}_off_by"] = abs(statistics.median(ratios(taken[side], expected)) - 1)
    published = {size: PUBLISHED[f"anyscale_{size}"].figure for size in (256, 512)}
    return metrics | {f"published_{size}": figure for size, figure in published.items()}
