"""What the files of a pipeline's part may say: they are data, and choose no code to run and no file elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.pipeline_folder import QUANTIZATION, read_json
from sd_lightning.storage.safetensors_file import shard_names

_CODE_KEYS = ("auto_map", "custom_pipelines", "configuration_files", "transformers_weights")
"""Keys with which the libraries choose other code, or other files than those that we check."""
_QUANTIZERS = ("sd_lightning_int8", "bitsandbytes")
"""Values of ``quant_method`` whose loaders need nothing but numbers and names of dtypes."""
_ADAPTERS = "adapter_config.json"
_CONFIGS = ("config.json", "tokenizer_config.json")
REMEDY = "copy or download that file again"


def check_part(folder: Path) -> None:
    """Check the files of a part before diffusers or transformers read them.

    Raises:
        UsageError: One is damaged, or names code or files of another folder.
    """
    for file in (folder / name for name in _CONFIGS):
        if file.is_file():
            check_config(read_json(file), str(file))
    for index in folder.glob("*.safetensors.index*.json"):
        shard_names(index)
    if (folder / _ADAPTERS).exists():
        raise UsageError(
            f"{folder / _ADAPTERS}: adapters that transformers would load into the network by themselves; expected "
            "none; delete that file"
        )


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check the content of a part's configuration file.

    Raises:
        UsageError: A key names code to run; the message begins with ``where``.
    """
    for key in _CODE_KEYS:
        if config.get(key) is not None:
            raise UsageError(f"{where}: {key} names code or files to load instead; expected none; {REMEDY}")
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value):  # transformers takes it for a repository of kernels
            raise UsageError(f"{where}: {key}={value} names code of a repository; expected none; {REMEDY}")
    written_by = config.get("_diffusers_version", "0")
    if not isinstance(written_by, str) or not re.fullmatch(r"\d[\w.+]*", written_by):
        raise UsageError(f"{where}: _diffusers_version={written_by} is no version; {REMEDY}")
    record = config.get(QUANTIZATION)
    if record is None:
        return
    given = [record.get(key) for key in ("quant_method", "format")] if isinstance(record, Mapping) else [record]
    if not any(isinstance(method, str) and method in _QUANTIZERS for method in given):
        raise UsageError(
            f"{where}: {QUANTIZATION} is of {given[0]}; expected weights in floating point, or in int8 of sd_lightning "
            "or bitsandbytes; give the pipeline that it was made from"
        )
