"""Run a task from the command line: Hydra's own CLI, with errors in one line."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from sd_lightning._conf.check import check
from sd_lightning._conf.command_line import CommandLine
from sd_lightning._conf.folder import config_dir
from sd_lightning._conf.programs import check_choices, help_of
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_on_machine, is_first_process, was_started_with_others

FULL_ERROR = "HYDRA_FULL_ERROR"
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # as shells have it for Ctrl-C
_ASIDE = 3.0  # seconds before a message that is most likely a repetition

Task = Callable[[Any], int | None]


def main(
    config_name: str,
    task: Task,
    *,
    given: Mapping[str, set[str]] | None = None,
    hints: Mapping[str, Any] | None = None,
) -> None:
    """Run ``task(cfg)`` with the configuration that the command line composes.

    All of Hydra's command line works (``--cfg job``, ``--help``, ``--config-dir``, ``-cn``,
    ``-m``, tab completion). The configuration is resolved and checked against the signatures
    of its targets before the task is called. What the user did wrong (``UsageError``, errors
    of composition) becomes one line on stderr and exit code 2, Ctrl-C exit code 130; other
    exceptions keep their stack trace, as all do under ``HYDRA_FULL_ERROR=1``.

    Args:
        config_name: Name of the primary config, e.g. ``"train"``.
        task: The entry point; its return value (None is 0) is the exit code.
        given: See ``check``.
        hints: See ``check``.

    Raises:
        SystemExit: If the exit code is not 0.
    """
    wants_trace = os.environ.get(FULL_ERROR) == "1"
    sys.argv[1:] = without_launcher_arguments(sys.argv[1:])
    try:
        code = _run(config_name, task, functools.partial(check, given=given, hints=hints))
    except KeyboardInterrupt:
        if wants_trace:
            raise
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        from sd_lightning._conf.messages import explain

        message = None if wants_trace else explain(error, config_name, sys.argv[1:])
        if message is None:
            raise
        if _repeats_others():
            time.sleep(_ASIDE)
        sys.stderr.write(f"error: {message}\n")
        sys.exit(USAGE_EXIT_CODE)
    if code:
        sys.exit(code)


def _repeats_others() -> bool:
    """Whether another process on this machine meets the same mistake: launchers end the rest when one has ended."""
    distributed = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return was_started_with_others() and not is_first_on_machine() and not joined


def overridden_keys() -> set[str]:
    """Return the dotted keys and the groups that this program's command line sets."""
    overrides = CommandLine.parse("", sys.argv[1:]).overrides
    return {each.lstrip("+~").partition("=")[0].partition("@")[0] for each in overrides}


def without_launcher_arguments(arguments: Sequence[str]) -> list[str]:
    """Drop the ``--local_rank=N`` that launchers append and that Hydra would refuse."""
    kept = []
    rest = iter(arguments)
    for each in rest:
        name, _, value = each.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not value:
                next(rest, None)
        else:
            kept.append(each)
    return kept


def _run(config_name: str, task: Task, check_tree: Callable[..., None]) -> int:
    """Hand the command line to Hydra; return the exit code of the task."""
    import hydra

    _parse_arguments(sys.argv[1:], config_name)
    _prepare_choices(config_name)
    codes: list[int] = []
    failures: list[Exception] = []

    @functools.wraps(task)  # Hydra names the job after the module of the wrapped function
    def job(cfg: Any) -> None:
        # Exceptions wait here: raised inside a job, Hydra would print about them itself.
        if not failures:
            try:
                _prepare(cfg, config_name, check_tree)
                with _outside_hydra(), _environment(FULL_ERROR, users_setting):
                    codes.append(task(cfg) or 0)
            except Exception as error:
                failures.append(error)

    users_setting = os.environ.get(FULL_ERROR)
    with _environment(FULL_ERROR, "1"):  # or Hydra prints and exits instead of raising
        hydra.main(version_base="1.3", config_path=config_dir(), config_name=config_name)(job)()
    if failures:
        raise failures[0]
    return max(codes, default=0)


def _parse_arguments(arguments: Sequence[str], config_name: str) -> None:
    """Let argparse's complaints become a UsageError, before Hydra's own parser exits."""
    from hydra._internal.utils import get_args_parser

    from sd_lightning._conf.messages import option_as_setting

    def complain(message: str) -> NoReturn:
        setting = option_as_setting(message, arguments, config_name)
        remedy = f"write {setting}" if setting else "write settings as key=value"
        raise UsageError(
            f"command line: {message}; {remedy}, put options such as --cfg job before them, and see --help"
        )

    parser = get_args_parser()
    parser.allow_abbrev = False  # or --experiment would be Hydra's --experimental-rerun
    parser.error = complain  # type: ignore[method-assign]
    parser.parse_args(list(arguments))


def _prepare_choices(config_name: str) -> None:
    """Check whose groups and experiments were chosen, and let the help templates of ``conf/`` list a program's own."""
    from omegaconf import OmegaConf

    command_line = CommandLine.parse(config_name, sys.argv[1:])
    check_choices(command_line.overrides, config_name, command_line.folders, command_line.groups)
    OmegaConf.register_new_resolver("help_of", lambda program: help_of(program, config_dir()), replace=True)


def _prepare(cfg: Any, config_name: str, check_tree: Callable[..., None]) -> None:
    """Check the configuration and resolve it in place."""
    from omegaconf import OmegaConf

    from sd_lightning._conf.messages import check_additions

    command_line = CommandLine.parse(config_name, sys.argv[1:])
    check_additions(command_line)
    check_tree(cfg, default_at=command_line.default_at)
    OmegaConf.resolve(cfg)  # ${hydra:…} cannot be looked up any more once the task runs
    _log_to_console()


@contextmanager
def _outside_hydra() -> Iterator[None]:
    """Hide Hydra's traces from the task and from the processes it starts.

    Lightning's launcher starts the other ranks with this process's arguments and, where it
    sees Hydra, with its own run folder; in a multirun each rank would run all jobs again.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    arguments, config, job = sys.argv, HydraConfig.instance().cfg, HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        from hydra._internal.utils import get_args

        options = get_args(arguments[1:])
        chosen = [f"--config-dir={options.config_dir}"] if options.config_dir else []
        chosen += [f"--config-path={options.config_path}"] if options.config_path else []
        chosen += [f"--config-name={options.config_name}"] if options.config_name else []
        sys.argv = [arguments[0], *chosen, *job.overrides.task]
    environment = dict(os.environ)
    HydraConfig.instance().cfg = None
    try:
        yield
    finally:
        sys.argv = arguments
        HydraConfig.instance().cfg = config
        if job.mode == RunMode.MULTIRUN:
            _leave_process_group(environment)


def _leave_process_group(environment: Mapping[str, str]) -> None:
    """Undo a job's ``LOCAL_RANK`` and process group, or the next job would take itself for a started rank."""
    os.environ.clear()
    os.environ.update(environment)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    _set_environment(name, value)
    try:
        yield
    finally:
        _set_environment(name, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class _StderrHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time: progress bars and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


def _log_to_console() -> None:
    """Show this package's log messages on stderr; only warnings on ranks other than 0."""
    package_log = logging.getLogger("sd_lightning")
    if not package_log.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        package_log.addHandler(handler)
    package_log.setLevel(logging.INFO if is_first_process() else logging.WARNING)
