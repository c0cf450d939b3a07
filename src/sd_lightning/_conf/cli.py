"""The command line of a program: Hydra's own CLI, with errors in one line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sd_lightning._conf.check import check, locate
from sd_lightning._conf.command_line import (
    CommandLine,
    Program,
    Task,
    check_words,
    config_dir,
    given_keys,
    help_of,
    with_words_as_settings,
)
from sd_lightning._conf.messages import check_additions, check_choices, explain, unreadable
from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_on_machine, is_first_process, was_started_with_others

FULL_ERROR = "HYDRA_FULL_ERROR"
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # the shells' code for Ctrl-C
_ASIDE = 3.0  # seconds to wait before a message that another process probably prints


def main(program: Program) -> None:
    """Run a program's task with the configuration that the command line composes.

    All of Hydra's command line works (``--cfg job``, ``--help``, ``--config-dir``, ``-cn``,
    ``-m``, tab completion). The configuration is resolved and checked against the signatures
    of its targets before the task is called. User errors (``UsageError``, composition errors)
    become one line on stderr and exit code 2, Ctrl-C exit code 130. Other exceptions keep
    their stack trace; under ``HYDRA_FULL_ERROR=1`` all do.

    Raises:
        SystemExit: If the exit code is not 0.
    """
    wants_trace = os.environ.get(FULL_ERROR) == "1"
    sys.argv[1:] = without_launcher_arguments(sys.argv[1:])
    sys.argv[1:] = with_words_as_settings(program, sys.argv[1:])
    command_line = CommandLine.parse(program.name, sys.argv[1:])
    try:
        code = _run(program, command_line)
    except KeyboardInterrupt:
        if wants_trace:
            raise
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        message = None if wants_trace else explain(error, command_line)
        if message is None:
            raise
        if was_started_with_others() and not is_first_on_machine() and not _joined_process_group():
            time.sleep(_ASIDE)  # another process here reports the same; its exit makes the launcher end this one
        sys.stderr.write(f"error: {message}\n")
        sys.exit(USAGE_EXIT_CODE)
    if code:
        sys.exit(code)


def _joined_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def overridden_keys() -> set[str]:
    """Return the dotted keys and the groups that this program's command line sets."""
    return {key.lstrip("~").partition("@")[0] for key in given_keys()}


def without_launcher_arguments(arguments: Sequence[str]) -> list[str]:
    """Drop the ``--local_rank=N`` that launchers append and that Hydra would refuse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank", nargs="?")
    return parser.parse_known_args(arguments)[1]


def _run(program: Program, command_line: CommandLine) -> int:
    """Hand the command line to Hydra; return the exit code of the task."""
    import hydra
    from omegaconf import OmegaConf

    if command_line.problem is not None:
        raise UsageError(unreadable(sys.argv[1:], command_line))
    check_words(program, command_line.overrides)
    check_choices(program, command_line)
    OmegaConf.register_new_resolver("help_of", lambda name: help_of(program, config_dir()), replace=True)
    codes: list[int] = []
    failures: list[Exception] = []

    def job(cfg: Any) -> None:
        # Collect exceptions: Hydra prints its own text for those raised inside a job.
        if not failures:
            try:
                task = _prepare(cfg, program, command_line)
                with _outside_hydra(), _full_error(users_setting):
                    codes.append(task(cfg) or 0)
            except Exception as error:
                failures.append(error)

    job.__module__ = f"sd_lightning.{program.name}"  # Hydra names the job after it
    users_setting = os.environ.get(FULL_ERROR)
    with _full_error("1"):  # or Hydra prints and exits instead of raising
        if command_line.is_plain:
            _run_once(program, command_line, job)
        else:
            hydra.main(version_base="1.3", config_path=config_dir(), config_name=program.name)(job)()
    if failures:
        raise failures[0]
    return max(codes, default=0)


def _run_once(program: Program, command_line: CommandLine, job: Task) -> None:
    """Run a single job like ``hydra.main``, but without its extra composition that finds the run mode."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra

    version.setbase("1.3")
    try:
        main_hydra = Hydra.create_main_hydra2(program.name, create_config_search_path(command_line.folders[0]))
        main_hydra.run(config_name=program.name, task_function=job, overrides=list(command_line.overrides))
    finally:
        GlobalHydra.instance().clear()


def _prepare(cfg: Any, program: Program, command_line: CommandLine) -> Task:
    """Check the configuration, resolve it in place, and return the task to run with it."""
    from omegaconf import OmegaConf

    log_to_console()
    check_additions(command_line)
    check(cfg, reserved=program.reserved, hints=program.hints, default_at=command_line.default_at)
    OmegaConf.resolve(cfg)  # ${hydra:…} is not available once the task runs
    return program.task if callable(program.task) else locate(program.task, program.name)


@contextmanager
def _outside_hydra() -> Iterator[None]:
    """Hide Hydra from the task and from the processes it starts.

    Lightning's launcher starts the other ranks with this process's arguments and, if it
    sees Hydra, with its own run folder. In a multirun each rank would run all jobs again.
    """
    from hydra._internal.utils import get_args
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    arguments, config, job = sys.argv, HydraConfig.instance().cfg, HydraConfig.get()
    environment = dict(os.environ)
    if job.mode == RunMode.MULTIRUN:
        options = vars(get_args(arguments[1:]))
        names = ("config_dir", "config_path", "config_name")
        chosen = [f"--{name.replace('_', '-')}={options[name]}" for name in names if options[name]]
        sys.argv = [arguments[0], *chosen, *job.overrides.task]
    HydraConfig.instance().cfg = None
    try:
        yield
    finally:
        sys.argv = arguments
        HydraConfig.instance().cfg = config
        if job.mode == RunMode.MULTIRUN:  # or the next job would see this job's rank variables
            os.environ.clear()
            os.environ.update(environment)
            if _joined_process_group():
                sys.modules["torch.distributed"].destroy_process_group()


@contextmanager
def _full_error(value: str | None) -> Iterator[None]:
    """Set ``HYDRA_FULL_ERROR`` inside the block; None removes it."""
    before = os.environ.pop(FULL_ERROR, None)
    os.environ.update({} if value is None else {FULL_ERROR: value})
    try:
        yield
    finally:
        os.environ.pop(FULL_ERROR, None)
        os.environ.update({} if before is None else {FULL_ERROR: before})


class _StderrHandler(logging.Handler):
    """Log handler that looks up ``sys.stderr`` at each record: progress bars and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


def log_to_console() -> None:
    """Show this package's log messages on stderr, only warnings on ranks other than 0, and no advice of libraries."""
    quiet_libraries()
    package_log = logging.getLogger("sd_lightning")
    if not package_log.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        package_log.addHandler(handler)
    package_log.setLevel(logging.INFO if is_first_process() else logging.WARNING)
