"""Configurations, composed as the command line does."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from omegaconf import DictConfig

from sd_lightning import _conf

Compose = Callable[..., DictConfig]
"""(program, *arguments) -> the configuration that the program's task receives."""


def registered(program: str) -> _conf.Program:
    return importlib.import_module(f"sd_lightning.{program}").PROGRAM


def compose(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> DictConfig:
    """Return what a program's task receives: composed, checked and resolved."""
    received: list[DictConfig] = []
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    _conf.main(replace(registered(program), task=received.append))
    return received[0]
