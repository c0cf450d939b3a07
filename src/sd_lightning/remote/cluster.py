"""The connection to a Ray cluster, and what it has."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning._imports import require

_ANSWER_SECONDS = 10.0
"""How long the head of a cluster may take to accept a connection."""
_START = "start one with: ray start --head, and give the host:port that it prints"


def connect(who: str, address: str | None = None, *, num_cpus: int | None = None) -> Any:
    """Connect this process to a Ray cluster, unless it is connected already, and return the module ``ray``.

    Args:
        who: The setting that needs Ray, for messages: ``"launcher=ray"``.
        address: ``host:port`` of the cluster's head, or ``"auto"`` for the one that runs on this machine. None: the
            one that the environment variable RAY_ADDRESS names, else a new one on this machine, which ends with this
            process.
        num_cpus: Logical CPUs of a new cluster; None for as many as this machine has.

    Raises:
        UsageError: Ray is not installed, or no cluster answers at the address.
    """
    ray = require("ray", extra="ray", who=who)
    if ray.is_initialized():
        return ray
    named = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": named}
    if named:
        _check_answers(who, named)
    else:
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    try:
        ray.init(**options, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"at {named}" if named else "on this machine"
        raise UsageError(
            f"{who}: Ray cannot start {where} ({type(error).__name__}: {error}); {_START}; if the cluster has a token, "
            "set RAY_AUTH_MODE=token, and have it in ~/.ray/auth_token"
        ) from error
    return ray


def _check_answers(who: str, address: str) -> None:
    """Raise a ``UsageError`` unless something listens at the address: Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", "ray://host:port", ...: Ray's own
    try:
        with socket.create_connection((host.rpartition("/")[2], int(port)), timeout=_ANSWER_SECONDS):
            return
    except OSError as error:
        raise UsageError(
            f"{who}: no Ray cluster answers at {address} ({error.strerror or error}); {_START}, or leave the address "
            "out for a cluster on this machine"
        ) from error


def machines_with(labels: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Return the machines of the connected cluster, as Ray describes them, that live and have labels.

    Args:
        labels: Label -> value, or Ray's ``!value``, ``in(a, b)`` or ``!in(a, b)``; None for all machines.
    """
    import ray

    machines = [node for node in ray.nodes() if node["Alive"]]
    for label, value in (labels or {}).items():
        values = re.split(r"[(,)]\s*", value.lstrip("!"))
        machines = [node for node in machines if (node["Labels"].get(label) in values) != value.startswith("!")]
    return machines


def check_resources(
    who: str, wanted: Mapping[str, float], *, setting: str, labels: Mapping[str, str] | None = None
) -> None:
    """Check that the connected cluster has resources in total, by Ray's names: ``{"CPU": 8, "GPU": 8}``.

    A cluster that an autoscaler manages, which names the group of each machine, is not refused: machines may come.

    Args:
        who: What asks for them, for the message.
        wanted: Resource -> number.
        setting: What to write smaller.
        labels: See :func:`machines_with`.

    Raises:
        UsageError: It has fewer.
    """
    if any("ray.io/node-group" in node["Labels"] for node in machines_with(None)):
        return
    machines = machines_with(labels)
    where = f" with the label(s) {dict(labels)}" if labels else ""
    for name, number in wanted.items():
        there = sum(node["Resources"].get(name, 0.0) for node in machines)
        if there < number:
            raise UsageError(
                f"{who} asks for {number:g} {name}; the Ray cluster has {there:g} on {len(machines)} machine(s){where}"
                f"; write a smaller {setting}{' or other labels' if labels else ''}, or add machines with: ray start "
                "--address=<head>"
            )


def package_versions() -> dict[str, str]:
    """Return the versions of the packages in this process that decide what is computed; those of builds left out."""
    import sd_lightning

    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers")}
    versions["sd_lightning"] = sd_lightning.__version__
    return {name: version.partition("+")[0] for name, version in versions.items()}


def check_versions(who: str, versions: Mapping[str, str]) -> None:
    """Check, in a worker, that its packages are those of the driver.

    Args:
        who: What has started the worker, for the message.
        versions: From :func:`package_versions`, called in the driver.

    Raises:
        UsageError: One is another; the machine is named.
    """
    here = package_versions()
    for name, version in versions.items():
        if here[name] != version:
            raise UsageError(
                f"{who}: the machine {socket.gethostname()} has {name} {here[name]}; expected {version}, as where the "
                "program was started; install the same versions on every machine"
            )


def value_of(ref: Any) -> Any:
    """Return what a task has returned; wait for it.

    Raises:
        UsageError: The task, or one that it has waited for, has raised it.
        RayError: It has raised something else, or its process or machine has died.
    """
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause: Any = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        raise cause if isinstance(cause, UsageError) else error from None
