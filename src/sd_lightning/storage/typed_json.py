"""JSON that preserves Python types and executes no code when it is read.

Plain JSON turns ``MultiStepLR``'s integer milestones into strings, tuples into lists, and has no tensors. Here, such
values are written as an object with the key ``"$type"``; everything else is ordinary JSON.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import parse_json

TAG = "$type"

MAX_TENSOR_BYTES = 16 * 2**20
"""Larger tensors belong in the tensor store: JSON text would hold them in memory three times."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# An explicit list: some of torch's dtypes (quantised, less than a byte) crash the process when a
# tensor of them is read.
_TENSOR_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


def dumps(obj: object) -> str:
    """Write an object as typed JSON.

    Args:
        obj: Built from None, bool, int, float, str, list, tuple, set, frozenset, dict, OrderedDict,
            Counter, ``torch.Tensor`` (kept on the CPU, without its graph), ``torch.dtype``, numpy
            scalars and numeric arrays. A path becomes a string. Subclasses are refused: they would
            be read as another type.

    Raises:
        UsageError: The object holds another type; the message gives its place, as in
            ``schedulers[0].foo: cannot store …``.
    """
    try:
        return json.dumps(_encode(obj, ""), allow_nan=False)
    except RecursionError:
        raise UsageError("typed_json cannot store an object that contains itself; store its parts.") from None


def loads(text: str) -> Any:
    """Read the output of ``dumps``; the result holds only the types listed there.

    Raises:
        UsageError: The text is not typed JSON (truncated, altered, or from another program).
    """
    try:
        return _decode(parse_json(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise UsageError(f"typed_json cannot read this text ({error}); expected the output of dumps.") from error


def _encode(obj: Any, path: str) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, str):
        return obj
    if kind is float:
        return obj if math.isfinite(obj) else {TAG: "float", "value": repr(obj)}
    if kind is list:
        return [_encode(value, f"{path}[{i}]") for i, value in enumerate(obj)]
    if kind is tuple:
        return {TAG: "tuple", "items": _encode(list(obj), path)}
    if kind in (set, frozenset):
        # Sorted, so that equal sets give equal files.
        items = [_encode(value, f"{path}{{}}") for value in obj]
        return {TAG: kind.__name__, "items": sorted(items, key=json.dumps)}
    if kind in (dict, collections.OrderedDict, collections.Counter):
        return _encode_mapping(obj, path)
    if isinstance(obj, PurePath):
        return str(obj)
    if isinstance(obj, torch.dtype):
        return {TAG: "dtype", "value": str(obj)}
    if kind in (Tensor, torch.nn.Parameter):
        return _encode_tensor(obj, path)
    if kind.__module__ == "numpy":
        encoded = _encode_numpy(obj)
        if encoded is not None:
            return encoded
    raise UsageError(
        f"{path or 'object'}: cannot store {kind}; expected numbers, strings, containers or tensors. "
        "Store what it is made of."
    )


def _encode_mapping(obj: dict[Any, Any], path: str) -> Any:
    def place(key: object) -> str:
        return (f"{path}.{key}" if path else key) if isinstance(key, str) else f"{path}[{key!r}]"

    if type(obj) is dict and TAG not in obj and all(type(key) is str for key in obj):
        return {key: _encode(value, place(key)) for key, value in obj.items()}
    items = [[_encode(key, f"key of {place(key)}"), _encode(value, place(key))] for key, value in obj.items()]
    return {TAG: type(obj).__name__, "items": items}


def _encode_tensor(tensor: Tensor, path: str) -> dict[str, Any]:
    who = f"{path or 'object'}: cannot store a tensor of shape {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_meta or str(tensor.dtype) not in _TENSOR_DTYPES:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise UsageError(f"{who}, {kind}; expected a dense tensor with values.")
    if tensor.nbytes > MAX_TENSOR_BYTES:
        raise UsageError(f"{who} as JSON; expected at most {MAX_TENSOR_BYTES:,} bytes. Use the tensor store.")
    # clone: a contiguous tensor of one element may have any stride, which view(uint8) refuses.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return {TAG: "tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "data": _text(data)}


def _encode_numpy(obj: Any) -> dict[str, Any] | None:
    import numpy as np

    numeric = isinstance(obj, np.generic | np.ndarray) and obj.dtype.kind in "biufc" and obj.dtype.isnative
    if not numeric or obj.nbytes > MAX_TENSOR_BYTES or type(obj) is not (np.ndarray if obj.shape else type(obj)):
        return None
    kind = "ndarray" if isinstance(obj, np.ndarray) else "numpy"
    return {TAG: kind, "dtype": obj.dtype.str, "shape": list(obj.shape), "data": _text(obj.tobytes())}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(obj: Any) -> Any:
    if isinstance(obj, list):
        return [_decode(value) for value in obj]
    if not isinstance(obj, dict):
        return obj
    if TAG not in obj:
        return {key: _decode(value) for key, value in obj.items()}
    kind = obj[TAG]
    if kind not in _DECODERS:
        raise ValueError(f"unknown {TAG} {kind!r}")
    return _DECODERS[kind](obj)


def _decode_tensor(obj: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(obj["data"], validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.clone().view(_TENSOR_DTYPES[obj["dtype"]]).view(obj["shape"])


def _decode_numpy(obj: dict[str, Any]) -> Any:
    import numpy as np

    dtype = np.dtype(obj["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"unknown numpy dtype {obj['dtype']!r}")
    array = np.frombuffer(base64.b64decode(obj["data"], validate=True), dtype).reshape(obj["shape"]).copy()
    return array if obj[TAG] == "ndarray" else array[()]


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda obj: float(obj["value"]),
    "tuple": lambda obj: tuple(_decode(obj["items"])),
    "set": lambda obj: set(_decode(obj["items"])),
    "frozenset": lambda obj: frozenset(_decode(obj["items"])),
    "dict": lambda obj: dict(_decode(obj["items"])),
    "OrderedDict": lambda obj: collections.OrderedDict(_decode(obj["items"])),
    "Counter": lambda obj: collections.Counter(dict(_decode(obj["items"]))),  # Counter(pairs) would count the pairs
    "dtype": lambda obj: _DTYPES[obj["value"]],
    "tensor": _decode_tensor,
    "ndarray": _decode_numpy,
    "numpy": _decode_numpy,
}
