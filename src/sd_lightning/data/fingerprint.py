"""Fingerprints of training sets, saved in checkpoints and compared on resume.

Each sample has three hashes: of its identity (path within the folder, or row), its image and its captions. Up to
``THOROUGH`` samples, an image is hashed by its file size and three small pieces of the file. This detects another
picture of the same name and size; a file that was only touched or copied stays the same. With more samples, opening
all files at each start would take minutes on a network disk, so an image is hashed by its file size and date. Hugging
Face datasets have their own fingerprint.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from sd_lightning.data.source import Source

Fingerprint = dict[str, Any]
"""Fingerprint of a training set; see :func:`fingerprint`."""
THOROUGH = 10_000
"""Largest number of samples for which pieces of every file are read."""
COUNTED = 100_000
"""Largest number of samples whose hashes (24 bytes each) a checkpoint holds, so that changes can be counted."""
_PIECE = 4096
_NAMED = 3
_ASPECTS = ("identities", "images", "captions")


def fingerprint(source: Source, *, order: str = "", held_out: Source | None = None) -> Fingerprint:
    """Return the fingerprint of a source, for a checkpoint.

    Args:
        source: The training set.
        order: Settings that the order of the epochs depends on, besides seed and batch size.
        held_out: The samples that were split off the same data for validation, if any.

    Returns:
        ``order``; ``num_samples``; one digest each of all identities, images and captions, in order; ``own``, the
        source's own fingerprint or None; ``samples``, the hashes (N, 3) int64, None above ``COUNTED`` samples; and
        ``held_out``, the hashes (H,) int64 of the identities held out, None above ``COUNTED`` or without any.
    """
    held = None if held_out is None or len(held_out) > COUNTED else _hashes(held_out)[:, 0].clone()
    known = {"order": order, "num_samples": len(source), "own": source.fingerprint, "held_out": held}
    if source.digests is not None and len(source) > COUNTED:
        return {**known, **source.digests, "samples": None}
    samples = _hashes(source)
    digests = {
        aspect: blake2b(samples[:, i].contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        for i, aspect in enumerate(_ASPECTS)
    }
    return {**known, **digests, "samples": samples if len(samples) <= COUNTED else None}


@dataclass(frozen=True)
class Change:
    """How a training set has changed."""

    description: str
    """What differs, for a message."""
    moves: bool
    """Whether the samples' identities or their order have changed, so that positions in an epoch differ."""
    reorders: bool
    """Whether the order of every epoch has changed, as with another number of samples or other buckets."""
    mixes: bool = False
    """Whether samples that were trained on are held out now, or the other way round."""


def change(saved: Mapping[str, Any], ours: Fingerprint, source: Source) -> Change | None:
    """Compare two fingerprints; return None if they agree.

    Args:
        saved: Fingerprint in the checkpoint.
        ours: Fingerprint of ``source``.
        source: Gives the samples' names.
    """
    moves = saved["identities"] != ours["identities"]
    # Above THOROUGH samples, images and captions are hashed from other evidence.
    is_comparable = (saved["num_samples"] <= THOROUGH) == (ours["num_samples"] <= THOROUGH)
    others = [aspect for aspect in ("images", "captions") if is_comparable and saved[aspect] != ours[aspect]]
    saved_order, order = saved["order"], ours["order"]
    mixed = _mixed(saved, ours)
    differences = []
    if saved["samples"] is not None and ours["samples"] is not None:
        differences = _counted(saved["samples"], ours["samples"], source, is_comparable)
    if not differences and moves:
        differences = [
            "other samples, or another order"
            if saved["num_samples"] == ours["num_samples"]
            else f"{ours['num_samples']} samples instead of {saved['num_samples']}"
        ]
    if not differences:
        differences = [f"other {aspect}" for aspect in others]
    if saved["own"] != ours["own"]:
        differences.append("another fingerprint of the data set, whose images may be others")
    if saved_order != order:
        differences.append(f"{order or 'no aspect-ratio buckets'} instead of {saved_order or 'none'}")
    before, now = saved.get("settings", {}), ours.get("settings", {})  # how a datamodule prepares the samples
    differences += [f"data.{k}={v} instead of {before[k]}" for k, v in now.items() if before.get(k, v) != v]
    if not differences and not mixed:
        return None
    # Another image may be in another bucket, which changes the order of all batches.
    is_sorted_anew = saved_order != order or (order != "" and (moves or "images" in others))
    reorders = is_sorted_anew or saved["num_samples"] != ours["num_samples"]
    return Change(", ".join([*differences, *mixed]), moves or is_sorted_anew, reorders, bool(mixed))


def _mixed(saved: Mapping[str, Any], ours: Fingerprint) -> list[str]:
    """Return what to tell of samples that have changed between training and validation; nothing if none has."""
    differences = []
    for one, other, text in (
        (ours, saved, "held out now were trained on"),
        (saved, ours, "trained on now were held out"),
    ):
        if one["held_out"] is not None and other["samples"] is not None:
            both = torch.isin(one["held_out"], other["samples"][:, 0])
            differences += [f"{int(both.sum())} samples that are {text}"] if both.any() else []
    return differences


def file_evidence(path: str | os.PathLike[str], *, thorough: bool) -> str:
    """Return a hash of a file's size and three pieces if ``thorough``, else its size and date; "" if unreadable."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return part_evidence(path, 0, status.st_size) if thorough else f"{status.st_size} {status.st_mtime_ns}"


def part_evidence(path: str | os.PathLike[str], begin: int, size: int) -> str:
    """Return a hash of the size and three pieces of a part of a file, which begins at ``begin``; "" if unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            digest = blake2b(f"{size} ".encode())
            for offset in (0, size // 2, max(size - _PIECE, 0)):
                file.seek(begin + offset)
                digest.update(file.read(min(_PIECE, size - offset)))
            return digest.hexdigest()
    except OSError:
        return ""


def _hashes(source: Source) -> Tensor:
    """Return the hashes of every sample, (N, 3) int64; a file shared by several samples is read once."""
    distinct, thorough = source.distinct, len(source) <= THOROUGH
    found = []
    seen: Counter[str] = Counter()
    for index in range(len(distinct)):
        identity, image, captions = distinct.evidence(index, thorough=thorough)
        seen[identity] += 1  # a photo and a class picture may have the same file name
        found.append([_hash(f"{identity} {seen[identity]}"), _hash(image), _hash(captions)])
    hashes = torch.tensor(found, dtype=torch.int64).view(-1, len(_ASPECTS))
    return hashes if source.rows is None else hashes[source.rows]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big", signed=True)


def _counted(saved: Tensor, ours: Tensor, source: Source, is_comparable: bool) -> list[str]:
    """Count the samples added, removed, replaced or recaptioned, and name some of them."""
    before = {identity: tuple(rest) for identity, *rest in saved.tolist()}
    now: dict[int, tuple[int, tuple[int, ...]]] = {}
    for index, (identity, *rest) in enumerate(ours.tolist()):
        now.setdefault(identity, (index, tuple(rest)))
    known = [(index, rest, before[identity]) for identity, (index, rest) in now.items() if identity in before]
    added = [index for identity, (index, _) in now.items() if identity not in before]
    replaced, captions = (
        [index for index, rest, old in known if is_comparable and rest[i] != old[i]] for i in range(2)
    )
    removed = len(before.keys() - now.keys())
    differences = [f"{removed} removed"] if removed else []
    for kind, indices in (("added", added), ("replaced", replaced), ("with other captions", captions)):
        if indices:
            differences.append(f"{len(indices)} {kind} ({_names(source, indices)})")
    return differences


def _names(source: Source, indices: Iterable[int]) -> str:
    chosen = list(indices)
    more = f" and {len(chosen) - _NAMED} more" if len(chosen) > _NAMED else ""
    return ", ".join(source.name(index) for index in chosen[:_NAMED]) + more
