"""Print the oldest releases that pyproject.toml allows, as constraints for pip.

    python .ci/oldest.py [torch==2.13.0 …]     an argument takes the place of the line of its package

Of a package that several extras name, the largest lower bound counts.
"""

import re
import sys
import tomllib
from pathlib import Path


def oldest(project: dict, others: list[str]) -> dict[str, str]:
    """Return a constraint for each package by its name; ``others`` take the place of ours."""
    requirements = [
        *project["dependencies"],
        *(r for group in project["optional-dependencies"].values() for r in group),
    ]
    bounds: dict[str, str] = {}
    for requirement in requirements:
        name, extras_and_bound = re.fullmatch(r"([\w.-]+)(.*?)(?:;.*)?", requirement).groups()
        bound = extras_and_bound.partition(">=")[2].strip()
        if bound and numbers(bound) > numbers(bounds.get(name, "0")):
            bounds[name] = bound
    found = {name: f"{name}=={bound}" for name, bound in bounds.items()}
    return found | {re.match(r"[\w.-]+", other).group(): other for other in others}


def numbers(version: str) -> list[int]:
    """Return a version's numbers, to compare it with another one."""
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    print("\n".join(oldest(tomllib.loads(text)["project"], sys.argv[1:]).values()))
