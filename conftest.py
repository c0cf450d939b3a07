"""What every test shares: an offline, deterministic environment, the `gpu` skip, and the trained base model."""

import functools
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from places import REPO

START = time.time()

# Before torch is imported anywhere, and inherited by the processes that tests start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MPLBACKEND="Agg",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
    RAY_AUTH_MODE="disabled",  # the cluster of the tests is theirs alone, and leaves no token at home
    RAY_USAGE_STATS_ENABLED="0",
    CUBLAS_WORKSPACE_CONFIG=":4096:8",  # with which cuBLAS computes the same bits again
)
# Threads that wait by spinning slow each other down a hundredfold where processes outnumber cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Float sums depend on the number of threads, and two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HYDRA_FULL_ERROR", None)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")]))

# pytest shows the logs of its own process only; those of a loader's worker say why a test hangs.
os.register_at_fork(after_in_child=lambda: logging.getLogger("sd_lightning").addHandler(logging.StreamHandler()))

PARTS = {
    "matrix": "every strategy through every variation, and every pair of strategies through a checkpoint",
    "engines": "every optimizer, model, placement and launcher under every engine",
    "kills": "kills at many points, and ranks that die in every way",
    "cluster": "workers and nodes that die on a Ray cluster, and whole runs in buckets",
    "exits": "hundreds of pairs of processes that end",
    "zoo": "modules of other people under every strategy, at one and two processes",
    "quality": "trainings to their full quality, and second seeds",
    "platform": "wheels and editable installs, notebooks, compilers, models of full size",
}
"""Parts of `make test-full`: name -> what it proves. Each takes at most 40 minutes on two cores."""

LONGEST = (
    "programs/test_quality.py",  # trains the model that others wait for
    "strategies/test_strategies_common.py",
    "strategies/test_family_strategies.py",
    "programs/test_family_programs.py",
    "remote/test_encoders.py",
    "remote/test_training_ray.py",
    "strategies/test_loading_memory.py",
    "programs/test_kept_losses.py",
    "gemini/test_gemini_training.py",
    "strategies/test_lightning_defaults.py",
    "strategies/test_deepspeed_strategy.py",
    "remote/test_precompute_ray.py",
    "programs/test_far_training.py",
    "strategies/test_quantised_base_strategies.py",
    "ui/test_browser.py",
    "programs/test_dreambooth_quality.py",
    "programs/test_generate_tensor_parallel.py",
    "house/test_packaging.py",
)
"""Files of minutes: workers begin with them, so that none has one left when the others are done."""

ORIGIN = pytest.StashKey[Any]()
"""`lines.Origin` of the run of a part, from benchmarks/."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="run this part of the full suite, and nothing else")
    parser.addoption("--results", type=Path, help="folder that gets a line of benchmarks/run.py's kind about a part")
    parser.addoption("--gpu-part", help="run the `gpu` tests of this part of benchmarks/gpu_check.py, and no others")
    parser.addoption("--gpu-log", type=Path, help="file that gets a line for every `gpu` test when it ends")
    parser.addoption("--gpu-dry", action="store_true", help="on a CPU: the `gpu` tests that take `gpu_accelerator`")
    parser.addoption("--no-skips", action="store_true", help="fail where a test is skipped: all it needs is installed")


def pytest_configure(config: pytest.Config) -> None:
    """Note, before it runs, which commit a part of the full suite, or of what needs a GPU, proves."""
    if config.getoption("--part") is not None or config.getoption("--gpu-part") is not None:
        sys.path.insert(0, str(REPO / "benchmarks"))
        from lines import Origin

        config.stash[ORIGIN] = Origin.now()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Tell which commit a part of the full suite proves."""
    part = config.getoption("--part")
    return None if part is None else f"part {part} of the full suite ({PARTS[part]}) at {config.stash[ORIGIN].commit}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let ``--no-skips`` end a run in failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.getoption("--no-skips") and reporter.stats.get("skipped"):
        reporter.write_line("\nfailed: --no-skips, and tests were skipped; the summary tells why", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files that took longest; what a module's fixture takes counts as its file's."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"{sum(seconds.values()):.0f} s in {len(seconds)} files")
    for file, duration in seconds.most_common(15):
        terminalreporter.write_line(f"{duration:6.0f} s  {file}")
    options = ("--part", "--gpu-part", "--results")
    part, gpu_part, results = (terminalreporter.config.getoption(name) for name in options)
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    if (part or gpu_part) and results and any(counts.values()) and "PYTEST_XDIST_WORKER" not in os.environ:
        from lines import add_line

        alone = terminalreporter.config.getoption("markexpr").startswith("full and alone")
        seconds = round(time.time() - START)
        name = f"test_full_{part}{'_alone' if alone else ''}" if part else f"test_gpu_{gpu_part}"
        add_line(name, counts | {"seconds": seconds}, results, origin=terminalreporter.config.stash[ORIGIN])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that do not name a mark which ``-m "slow and …"`` asks for: importing all takes half a minute."""
    asked = set(config.getoption("markexpr").replace("not ", "not-").split(" and ")) & {"slow", "alone"}
    if asked and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        text = collection_path.read_text(encoding="utf-8")
        return True if any(f"mark.{name}" not in text for name in asked) else None
    return None


@pytest.hookimpl(trylast=True)  # when -m has left its part out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the suite; give long tests their time; skip `gpu` tests where there is no CUDA device."""
    chosen, gpu_part = config.getoption("--part"), config.getoption("--gpu-part")
    left_out = []
    for item in items:
        if gpu_part is not None and item.get_closest_marker("gpu"):
            from gpu_check import is_in

            if not is_in(gpu_part, item.nodeid):
                left_out.append(item)
            continue
        full = item.get_closest_marker("full")
        if full is not None and (len(full.args) != 1 or full.args[0] not in PARTS):
            raise pytest.UsageError(f"{item.nodeid} is marked full{full.args}; expected one of {', '.join(PARTS)}")
        if (full.args[0] if full is not None else None) != chosen:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = Counter(item.path for item in items)
        first = {REPO / "tests" / name: place for place, name in enumerate(LONGEST, -len(LONGEST))}
        items.sort(key=lambda item: (first.get(item.path, 0), -counts[item.path]))
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "full"))) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_part is not None:
        from gpu_check import estimates

        print("", *estimates(gpu_part, [item.nodeid for item in gpu_items]), sep="\n")
    if not gpu_items:
        return
    if config.getoption("--gpu-dry"):
        skip = pytest.mark.skip(reason="dry run: computes on CUDA itself")
        for item in gpu_items:
            mark = item.get_closest_marker("gpu")
            takes_it = "gpu_accelerator" in getattr(item, "fixturenames", ())
            if not takes_it or mark is None or not mark.kwargs.get("dry", True):
                item.add_marker(skip)
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA GPU; torch {torch.__version__} sees none")
    for item in gpu_items:
        item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let a `gpu` test leave a line when it ends, or when it is skipped or fails before it begins."""
    report: pytest.TestReport = yield  # type: ignore[misc,assignment]
    path = item.config.getoption("--gpu-log")
    if path is not None and (report.when == "call" or report.outcome != "passed"):
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(time.time() - call.start, 2)}
        if report.outcome != "passed":
            line["reason"] = str(report.longrepr)[-2000:]
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session")
def gpu_accelerator(request: pytest.FixtureRequest) -> str:
    """What `gpu` tests train on: "cuda"; in a dry run "cpu"."""
    return "cpu" if request.config.getoption("--gpu-dry") else "cuda"


@pytest.fixture(autouse=True)
def no_trace_of_a_launcher() -> Iterator[None]:
    """Forget a test's rank: later trainers would wait for other ranks, or log nothing because they are not rank 0."""
    yield
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if "lightning" in sys.modules:
        from lightning.pytorch.utilities import rank_zero_only

        rank_zero_only.rank = 0


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> None:
    """Let the garbage collector pass over what is imported, nearly all there is: it takes half a second each time.

    Once in a file: a loader that forks workers undoes it.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_left() -> Iterator[None]:
    """Destroy the process group that a training in this process leaves: tests of other files begin without one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    """Give SIGTERM its handler back: Ray leaves one that ends the process, in tests of other files, too."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(autouse=True, scope="session")
def same_bits_on_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let kernels of `gpu` tests, and of what their modules compare with, add in one order, where they can."""
    if not any(item.get_closest_marker("gpu") for item in request.session.items):
        yield
        return
    import torch

    cudnn = torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = cudnn


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout that the tests belong to."""
    return REPO


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python *args` in a process of its own and return it with `stdout` and `stderr` as text.

    Keyword arguments: `cwd`, `timeout` (seconds, default 240), `env` (added to this process's), `check` (default
    False: the test looks at `returncode`).
    """

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        timeout: float = 240,
        env: dict[str, str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            cwd=cwd,
            env=os.environ | (env or {}),
            timeout=timeout,
            capture_output=True,
            text=True,
        )
        if check and done.returncode != 0:
            pytest.fail(f"python {' '.join(map(str, args))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compose a program's configuration in an empty folder; see ``composing.Compose``."""
    import composing

    monkeypatch.chdir(tmp_path)
    return functools.partial(composing.compose, monkeypatch)


@pytest.fixture
def call_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Call a program with arguments in an empty folder; return exit code and stdout, or stderr if not 0."""
    from sd_lightning import _conf

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(program: ModuleType, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *arguments])
        capsys.readouterr()
        try:
            _conf.main(program.PROGRAM)
        except SystemExit as exit_:
            return int(exit_.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().out

    return call


@pytest.fixture(scope="session")
def trained_run(
    tmp_path_factory: pytest.TempPathFactory, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> Path:
    """The run directory of the default digits training, made once per session; treat it as read-only.

    `SD_LIGHTNING_TRAINED_RUN=<run dir>` reuses a finished one while a test is being written.
    """
    ready = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
    if ready:
        return Path(ready)
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers
    run_dir = shared / "trained" / "digits"
    with FileLock(f"{shared}/trained.lock"):
        if not (run_dir / "summary.json").exists():
            run_python("-m", "sd_lightning.train", f"output_dir={run_dir}", timeout=900, check=True)
    return run_dir


@pytest.fixture(scope="session")
def running_s3_server() -> Iterator[Any]:
    """A real S3 server in this process; take `s3` instead."""
    from s3_server import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(running_s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 server (`s3_server.S3Server`) without faults, where s3:// leads; its bucket `bucket` is empty."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running_s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    running_s3_server.reset()
    s3_backends.reset()
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket("bucket", "us-east-1")
    return running_s3_server
