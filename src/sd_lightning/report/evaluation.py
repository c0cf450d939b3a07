"""``evaluation.json``: how good a run's pictures are, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_lightning.report.drawing import number
from sd_lightning.storage.runs import EVALUATION, newest_step
from sd_lightning.storage.untrusted import read_json

HEAD = ("metric", "value", "95 % interval", "pictures", "note")


def read_evaluation(run_dir: Path) -> dict[str, Any]:
    """Return what was measured of a run as it is now; an empty dictionary if nothing was, or it cannot be read."""
    try:
        found = read_json(run_dir / EVALUATION)
        whole = table(found) and circumstances(found)
        return found if whole and newest_step(run_dir) in (-1, found["steps"]) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def table(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of a table, with the columns of ``HEAD``."""

    def line(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
        value, low, high = (number(each[key]) for key in ("value", "low", "high"))
        note = "; ".join(filter(None, (each["features"] and f"by {each['features']}", each["note"])))
        return name, value, f"{low} to {high}", str(each["count"]), note

    return [line(*each) for each in record["metrics"].items()]


def circumstances(record: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return by metric what has to be the same for two runs to be comparable in it."""
    settings = {name: each for name, each in record.get("settings", {}).items() if name not in ("model", "weights")}
    facts = [settings, *(record.get(name) for name in ("num_samples", "data", "seed"))]
    networks = {name: each["features"] for name, each in record.get("metrics", {}).items()}
    return {(name, json.dumps([facts, network], sort_keys=True)) for name, network in networks.items()}
