"""What tests of local folders and object stores share."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from sd_lightning import UsageError
from sd_lightning.storage import object_store
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location

PART = 1000
"""Bytes of a part in these tests; twice of it are uploaded in parts."""
SMALL, LARGE = b"small", bytes(range(250)) * 22


def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfer small parts, and try again at once."""
    monkeypatch.setattr(object_store, "PART_BYTES", PART)
    monkeypatch.setattr(object_store, "WAITS", (0.0,) * len(object_store.WAITS))


@functools.cache
def opened(url: str, key: str) -> Location:
    """Open a location once: of a second, most is botocore reading what S3 is."""
    return open_location(url, key=key)


def refusal(call: Callable[[], Any], *words: str) -> str:
    """Call what has to be refused in one line that holds these words in this order."""
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert re.search(".*".join(map(re.escape, words)), message), message
    return message
