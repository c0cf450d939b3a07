"""Reads JSON and YAML that others may have written: plain data, and one kind of error for whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 100_000_000
"""Most bytes of a file, or of a safetensors header, that are read at once: the limit of the safetensors format."""


def parse_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what a JSON text holds.

    Args:
        text: The text.
        pairs: Makes each object from its pairs; a dictionary by default.

    Raises:
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not JSON, is nested too deeply or is too large.
    """
    return parse_json(_text(path))


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds: null, booleans, numbers, strings, dates, lists and mappings.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not YAML, has tags that name Python objects, has aliases, or is nested too deeply.
    """
    try:
        return yaml.load(_text(path), _PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Without aliases: nine lines of them are a list of a billion entries. We write none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it has an alias", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes; expected at most {MAX_BYTES:,}")
    return path.read_text(encoding="utf-8")
