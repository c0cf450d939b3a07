"""What the files of a pipeline's part may say: they are data, and choose no code to run and no file elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.models.pipeline_folder import QUANTIZATION, read_json
from sd_lightning.storage.safetensors_file import shard_names

_CODE_KEYS = (
    *("auto_map", "custom_pipelines", "configuration_files", "transformers_weights"),
    *("vocab_file", "merges_file", "tokenizer_file", "gguf_file", "tokenizer_object"),
)
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
        # transformers takes other names for repositories of kernels; older versions write a bool beside the name.
        if "_implementation" in key and not (value is None or isinstance(value, bool) or value in ("eager", "sdpa")):
            raise UsageError(f"{where}: {key}={value} may name code of a repository; expected eager or sdpa; {REMEDY}")
    written_by = config.get("_diffusers_version", "0")
    if not isinstance(written_by, str) or not re.fullmatch(r"\d[\w.+]*", written_by):
        raise UsageError(f"{where}: _diffusers_version={written_by} is no version; {REMEDY}")
    record = config.get(QUANTIZATION)
    if record is None:
        return
    # The libraries choose the loader by quant_method; our own record may have a format instead.
    method = record.get("quant_method") if isinstance(record, Mapping) else record
    chosen = record.get("format") if isinstance(record, Mapping) and method is None else method
    if not isinstance(chosen, str) or chosen not in _QUANTIZERS[: 1 if method is None else None]:
        raise UsageError(
            f"{where}: {QUANTIZATION} is of {chosen}; expected weights in floating point, or in int8 of sd_lightning "
            "or bitsandbytes; give the pipeline that it was made from"
        )
