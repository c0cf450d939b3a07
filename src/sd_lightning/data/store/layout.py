"""The folder of a recipe in a store: what its latents depend on, its files, its generations, and the lock of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.order import Shape
from sd_lightning.data.store.files import ALTERED, BLANK, UNREADABLE, is_sealed, sealed
from sd_lightning.data.store.sample_file import SampleFile
from sd_lightning.storage.lease import Lease
from sd_lightning.storage.location import Location
from sd_lightning.storage.safetensors_file import Column, Header, bytes_of, read_header
from sd_lightning.storage.untrusted import parse_json

LATENTS, SAMPLES, GENERATIONS = "latents", "samples", "generations"
_RECIPES, _LOCK, _SUFFIX = "recipes", "job.json", ".safetensors"
_FORMAT = 2
"""Format of the lists of samples."""
SPLITS = frozenset({"train", "val"})
CODE_VERSION = 1
"""Version of the code between an image's bytes and its latents; raised when that code changes their values."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """Everything that the numbers of stored latents depend on.

    Raises:
        UsageError: A value is out of range.
    """

    family: str
    """Class of the model's diffusers pipeline."""
    vae: str
    """Hash of the VAE: :func:`network_hash`."""
    resolution: int
    """Side of the square images, in pixels; with buckets, the square root of the most pixels."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of aspect-ratio buckets, from tall to wide; none: all images become squares."""
    crop: Literal["center", "random"] = "center"
    """Where images of another shape are cropped."""
    flip: bool = False
    """Whether half of the encodings are mirrored."""
    variants: int = 1
    """Encodings per image, each with a crop and flip of its own."""
    latents: Literal["moments", "draw"] = "moments"
    """Moments of the VAE's posterior, from which every epoch draws, or one draw, scaled."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Type of the stored numbers."""
    compute_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type in which the VAE computes."""
    interpolation: str = "lanczos"
    code_version: int = CODE_VERSION

    def __post_init__(self) -> None:
        if self.latents not in ("moments", "draw"):
            raise UsageError(f"precompute got latents={self.latents}; expected moments or draw")
        for key in ("dtype", "compute_dtype"):
            if getattr(self, key) not in DTYPES:
                raise UsageError(f"precompute got {key}={getattr(self, key)}; expected one of {', '.join(DTYPES)}")
        if self.variants < 1:
            raise UsageError(f"precompute got variants={self.variants}; expected 1 or more encodings per image")
        if self.variants > 1 and self.crop != "random" and not self.flip:
            raise UsageError(
                f"precompute got variants={self.variants}, but every encoding of an image is the same with "
                "data.center_crop=true data.random_flip=false; write variants=1, or data.center_crop=false"
            )

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the images: the square alone without buckets."""
        return self.shapes or ((self.resolution, self.resolution),)

    @property
    def fingerprint(self) -> str:
        """Hash of all fields: "r" and 16 hexadecimal digits, which no command line takes for a number."""
        return "r" + blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the fields as JSON; equal recipes have equal text."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Recipe:
        """Read the output of :meth:`to_json`.

        Raises:
            UsageError: It is not one, or a newer version wrote it.
        """
        try:
            fields = parse_json(text)
            return cls(**{**fields, "shapes": tuple((height, width) for height, width in fields["shapes"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{where} is no recipe of a latent store ({error}); expected what sd_lightning.precompute wrote; "
                "install the version of sd_lightning that wrote it, or encode the store again"
            ) from error

    def description(self) -> str:
        """Return the recipe as the settings that make it, for messages."""
        crop = f"data.center_crop={str(self.crop == 'center').lower()}"
        flip = f"data.random_flip={str(self.flip).lower()}"
        buckets = f" data.enable_bucket=true ({len(self.shapes)} shapes)" if self.shapes else ""
        return (
            f"data.resolution={self.resolution}{buckets} {crop} {flip} variants={self.variants} latents={self.latents} "
            f"dtype={self.dtype}"
        )


def network_hash(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return a hash of a network's weights and configuration, 32 hexadecimal digits.

    Args:
        state_dict: The weights, on the CPU.
        config: Its configuration; entries that begin with "_" (versions, paths) do not count.
    """
    known = {key: value for key, value in config.items() if not key.startswith("_")}
    digest = blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(bytes_of(tensor.detach().contiguous()))
    return digest.hexdigest()


class AlteredList(UsageError):
    """A list of samples whose bytes are not those that were written."""


@dataclass(frozen=True)
class SampleEntry:
    """A sample file of a generation."""

    name: str
    rows: int
    size: int
    """Bytes."""
    shape: int
    """Number of the images' shape among those of the recipe."""
    identities: str
    """Hash of the samples' identities; with the next two the fingerprint of the data set."""
    images: str
    captions: str
    """Also the name of the files that say where their text embeddings are."""


@dataclass(frozen=True)
class Generation:
    """The samples of a store at one time."""

    number: int = 0
    splits: Mapping[str, list[SampleEntry]] = field(default_factory=dict)
    """Sample files, in order, by split: "train", "val"."""
    tokenizers: str = ""
    """Hash of the tokenizers that made the token ids."""

    def num_samples(self, split: str) -> int:
        """Return the number of samples of a split."""
        return sum(entry.rows for entry in self.splits.get(split, []))

    def to_json(self) -> str:
        """Return it as JSON, with a seal."""
        text = json.dumps({"format": _FORMAT, "seal": BLANK, **asdict(self)}, sort_keys=True)
        return sealed(text.encode()).decode()

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Generation:
        """Read the output of :meth:`to_json`.

        Raises:
            AlteredList: It is not one.
            UsageError: Another version wrote it.
        """
        try:
            fields: dict[str, Any] = parse_json(text)
            written = fields.pop("format")
            if isinstance(written, int) and written < _FORMAT:  # such lists have no seal
                raise _other_format(where, written)
            if not is_sealed(text.encode() if isinstance(text, str) else text, fields.pop("seal")):
                raise ValueError(ALTERED)
            if written != _FORMAT:
                raise _other_format(where, written)
            if not fields["splits"].keys() <= SPLITS:  # they become names of folders
                raise ValueError("it has other splits than train and val")
            splits = {split: [SampleEntry(**each) for each in entries] for split, entries in fields["splits"].items()}
            return cls(fields["number"], splits, fields["tokenizers"])
        except UsageError:
            raise
        except UNREADABLE as error:
            raise AlteredList(
                f"{where} is no list of samples of a latent store ({error}); expected what sd_lightning.precompute "
                "wrote; put back a copy of that file, or run python -m sd_lightning.precompute verify store=<store>, "
                "which tells whether there is another list to use instead"
            ) from error


def _other_format(where: str, written: Any) -> UsageError:
    return UsageError(
        f"{where} is a list of samples of format {written}, which another version of sd_lightning wrote; expected "
        f"format {_FORMAT}; install that version, or run precompute into a new store"
    )


class LatentStore:
    """The folder of one recipe.

    Attributes:
        folder: Where its files lie.
        recipe: What its latents depend on.
    """

    def __init__(self, root: Location, recipe: Recipe) -> None:
        """Name the folder; nothing is read or written."""
        self.root = root
        self.recipe = recipe
        self.folder = root.child(recipe.fingerprint)

    def create(self) -> None:
        """Write the recipe, if it is not there.

        Raises:
            UsageError: It is there, but altered.
        """
        name, text = f"{_RECIPES}/{self.recipe.fingerprint}.json", self.recipe.to_json().encode()
        if not self.root.create(name, text) and self.root.read(name) != text:
            raise _altered_recipe(self.root, name)

    def generation(self) -> Generation:
        """Return the newest generation; number 0 with no samples if there is none."""
        names = self.lists()
        if not names:
            return Generation()
        newest = max(names)
        return Generation.from_json(self.folder.read(newest), where=f"{self.folder.url}/{newest}")

    def lists(self) -> list[str]:
        """Return the paths of all generations."""
        return [entry.name for entry in self.folder.entries(f"{GENERATIONS}/") if entry.name.endswith(".json")]

    def commit(self, generation: Generation) -> None:
        """Write a generation.

        Raises:
            UsageError: Another job has written that number.
        """
        if not self.folder.create(f"{GENERATIONS}/{generation.number:08}.json", generation.to_json().encode()):
            raise UsageError(
                f"{self.folder.url}: another precompute job has committed generation {generation.number} meanwhile; "
                "nothing is lost: run precompute again"
            )

    def put(self, kind: str, name: str, data: bytes | Path) -> bool:
        """Write a file, if it is not there; return whether it was written."""
        return self.folder.create(path_of(kind, name), data)

    def present(self, kind: str) -> dict[str, int]:
        """Return name -> bytes of the files of a kind."""
        return {
            entry.name.removeprefix(f"{kind}/").removesuffix(_SUFFIX): entry.size
            for entry in self.folder.entries(f"{kind}/")
            if entry.name.endswith(_SUFFIX)
        }

    def header(self, kind: str, name: str, size: int) -> Header:
        """Return the header of a file that has to have ``size`` bytes; nothing else of it is read.

        Raises:
            UsageError: The file is truncated or altered.
        """
        with self.readable(path_of(kind, name)) as path:
            header = read_header(lambda begin, end: self.folder.read(path, begin, end))
            if header.end != size:
                raise ValueError(f"it has {size} bytes")
            return header

    def column(self, kind: str, name: str, column: Column) -> bytes:
        """Return the bytes of one column of a file; nothing else of it is read."""
        return self.folder.read(path_of(kind, name), column.begin, column.end)

    @contextmanager
    def readable(self, path: str) -> Iterator[str]:
        """Turn what is raised when a file is not what was written into a ``UsageError`` with the remedy."""
        try:
            yield path
        except UsageError:  # such as of the network
            raise
        except UNREADABLE as error:
            raise self.broken(path, str(error)) from error

    def broken(self, path: str, reason: str) -> UsageError:
        """Return the error for a file that is not what was written."""
        return UsageError(
            f"{self.folder.url}/{path} is truncated or altered ({reason}); delete it with python -m "
            f"sd_lightning.precompute verify store={self.root.url} dry_run=false, and run precompute again"
        )

    def local(self, kind: str, name: str, scratch: Path) -> Path:
        """Return a local path of a file; it is copied into ``scratch`` once if the store is not local."""
        path = self.folder.path(path_of(kind, name))
        if path is None:
            path = scratch / f"{kind}-{name}{_SUFFIX}"
            if not path.exists():
                self.folder.fetch(path_of(kind, name), path)
        return path

    @contextmanager
    def opened(self, entry: SampleEntry, scratch: Path) -> Iterator[SampleFile]:
        """Open a sample file; a copy of it in ``scratch``, if the store is not local, is deleted again."""
        path = self.local(SAMPLES, entry.name, scratch)
        with open(path, "rb", buffering=0) as handle:
            file = SampleFile(handle, name=f"{self.folder.url}/{path_of(SAMPLES, entry.name)}", size=entry.size)
            file.check()
            yield file
        if path.is_relative_to(scratch):
            path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock.

        The lock only spares two jobs the same work, and tells their users: files would stay right without it.

        Raises:
            UsageError: Another job holds it.
        """
        with Lease(self.folder, _LOCK, f"store={self.root.url}", "precompute job").held():
            self.folder.clean()
            yield


def path_of(kind: str, name: str) -> str:
    """Return the path of a file within the folder of its recipe.

    Raises:
        UsageError: The name leads out of that folder.
    """
    if not isinstance(name, str) or PurePath(name).name != name:
        raise UsageError(
            f"the latent store names a file {name!r}; expected a name without folders; somebody has altered its lists: "
            "encode the store again"
        )
    return f"{kind}/{name}{_SUFFIX}"


def recipes(root: Location) -> list[Recipe]:
    """Return the recipes of a store, sorted by fingerprint."""
    names = [entry.name for entry in root.entries(f"{_RECIPES}/") if entry.name.endswith(".json")]
    found = [Recipe.from_json(root.read(name), where=f"{root.url}/{name}") for name in names]
    for name, recipe in zip(names, found, strict=True):
        if name != f"{_RECIPES}/{recipe.fingerprint}.json":
            raise _altered_recipe(root, name)
    return found


def _altered_recipe(root: Location, name: str) -> UsageError:
    return UsageError(
        f"{root.url}/{name} is altered: its name is the hash of what precompute wrote there; delete it, and run "
        "precompute again with the same settings, which writes it anew and encodes nothing twice"
    )
