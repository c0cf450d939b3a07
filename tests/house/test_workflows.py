"""The workflows run what `.ci/run` runs, on the Pythons that the package names, and with other releases."""

import re
import runpy
import tomllib
from typing import Any

import pytest
import yaml

from places import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
JOBS: dict[str, Any] = yaml.safe_load((REPO / ".github/workflows/tests.yml").read_text())["jobs"]


def targets_of_ci() -> list[str]:
    """The make targets of `.ci/run`, in order."""
    loop = re.search(r"^for target in (.+); do$", (REPO / ".ci/run").read_text(), re.MULTILINE)
    assert loop is not None
    return loop[1].split()


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_the_workflow_runs_the_commands_of_ci() -> None:
    matrix = JOBS["ci"]["strategy"]["matrix"]
    at_once = " ".join(targets_of_ci()).replace("test-all", "test test-slow")  # each has a machine of its own
    assert matrix["target"] == at_once.split()
    assert 'make "$target" PYTEST_ARGS=--no-skips ||' in (REPO / ".ci/run").read_text()
    assert commands("ci") == ['make ${{ matrix.target }} PYTHON=python PYTEST_ARGS="$PYTEST_ARGS"']
    pythons = [
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python ::")
    ]
    assert matrix["python"] == pythons == ["3.11", "3.12", "3.13"]


def test_the_workflow_tests_the_newest_and_the_oldest_releases() -> None:
    rows = JOBS["releases"]["strategy"]["matrix"]["include"]
    assert [row["target"] for row in rows] == ["test-newest", "test-oldest"]
    assert commands("releases") == ["make ${{ matrix.target }} PYTHON=python"]
    rules = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (REPO / "Makefile").read_text(), re.MULTILINE))
    assert {*targets_of_ci(), "test-newest", "test-oldest"} <= rules


def test_the_oldest_releases_are_the_lower_bounds() -> None:
    oldest = runpy.run_path(str(REPO / ".ci/oldest.py"))["oldest"]
    found = oldest(PROJECT, ["torch==2.13.0"])
    assert found["torch"] == "torch==2.13.0" and found["diffusers"] == "diffusers==0.42"
    assert found["ray"].startswith("ray==") and found["deepspeed"].startswith("deepspeed=="), "of extras and platforms"
    twice = {"dependencies": ["a>=1.9"], "optional-dependencies": {"x": ["a[more]>=1.10; os_name == 'nt'", "me[x]"]}}
    assert oldest(twice, []) == {"a": "a==1.10"}


def test_files_that_workers_begin_with_are_there(pytestconfig: pytest.Config) -> None:
    longest = pytestconfig.pluginmanager.get_plugin(str(REPO / "conftest.py")).LONGEST  # type: ignore[union-attr]
    assert [name for name in longest if not (REPO / "tests" / name).is_file()] == []
    assert "--dist loadfile --no-loadscope-reorder" in (REPO / "Makefile").read_text(), "else by the number of tests"
