"""Settings of int8 inference: the layers to quantise and the kernels that multiply."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from sd_lightning._errors import UsageError

Linear = Literal["bitsandbytes", "torchao", "weight_only"]
Layer = Literal["linear", "conv2d", "embedding"]
Dtype = Literal["float32", "float16", "bfloat16"]

# `benchmarks/run.py int8_layers` measures the memory and accuracy of each of these; see docs/int8.md.
EXCLUDED = ("time_embedding", "conv_in", "conv_out", "quant_conv", "post_quant_conv", "position_embedding")
FLOAT_INPUTS = ("proj_in", "proj_out")
QUANT_METHOD = "sd_lightning_int8"
"""Value of ``quant_method`` in ``config.json``; diffusers refuses a method that it does not know."""
FORMAT = "format"
"""Key of that value in transformers' ``config.json``: it ignores an unknown ``quant_method`` but requires one."""
NUM_LAYERS = "num_layers"


@dataclass(frozen=True)
class Int8:
    """Settings of int8 weights, with one float32 scale per output channel (LLM.int8(), arXiv 2208.07339)."""

    linear: Linear = "weight_only"
    """Kernel of linear layers: weight_only (weights are dequantised on the fly), bitsandbytes (LLM.int8: activations
    also in int8, except outlier columns) or torchao (activations also in int8). Convolutions and embeddings are
    always weight_only. Only with weight_only are images independent of the batch that they are generated in: with
    int8 activations, a difference in the last bit can become a whole int8 step."""
    layers: Sequence[Layer] = ("linear", "conv2d", "embedding")
    """Kinds of layers to quantise."""
    exclude: Sequence[str] = EXCLUDED
    """Layers that are not quantised: names of modules, alone ("conv_out", "vae") or as a path ("unet.conv_in").
    Names other than the defaults must exist in the model."""
    float_inputs: Sequence[str] = FLOAT_INPUTS
    """Linear layers that are always weight_only, so that their activations stay in float; names as in ``exclude``."""
    threshold: float = 6.0
    """For bitsandbytes: activations of at least this magnitude are outliers, multiplied unquantised; 0: no outliers.
    On a GPU any other value means 1/32 of the columns, the largest, so that the host need not wait for their number."""
    dtype: Dtype | None = None
    """Dtype of all other weights and of computation; None leaves it unchanged. An SDXL pipeline's VAE that overflows
    in float16 (``force_upcast``) stays in float32."""

    def __post_init__(self) -> None:
        _check("linear", self.linear, get_args(Linear))
        _check("dtype", self.dtype, (*get_args(Dtype), None))
        for kind in self.layers:
            _check("layers", kind, get_args(Layer))
        if not self.layers or isinstance(self.layers, str):
            raise UsageError(f"Int8 got layers={self.layers!r}; expected a list of {', '.join(get_args(Layer))}")
        for name in ("exclude", "float_inputs"):
            if isinstance(value := getattr(self, name), str):
                raise UsageError(f"Int8 got {name}={value!r}; expected a list of module names: [{value}]")
        if self.threshold < 0:
            raise UsageError(f"Int8 got threshold={self.threshold}; expected at least 0, e.g. threshold=6.0 (0: none)")
        for name in ("layers", "exclude", "float_inputs"):  # tuples, so that configs compare equal
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)

    def excludes(self, name: str) -> bool:
        """Return whether a layer of this name is not quantised."""
        return _names(self.exclude, name)

    def check_names(self, layers: Collection[str]) -> None:
        """Check that all names in ``exclude`` and ``float_inputs``, except the defaults, exist in a model.

        Args:
            layers: Names of all layers that could be in int8.

        Raises:
            UsageError: No layer has such a name.
        """
        for field, usual in (("exclude", EXCLUDED), ("float_inputs", FLOAT_INPUTS)):
            for pattern in [pattern for pattern in getattr(self, field) if pattern not in usual]:
                if not any(_names([pattern], name) for name in layers):
                    raise UsageError(
                        f"Int8 got {field}={list(getattr(self, field))}, but no layer is named {pattern}; expected "
                        f"whole parts of names such as {_some(layers)}; leave {pattern} out, or correct it"
                    )

    def kernel(self, name: str) -> Linear:
        """Return the kernel of a linear layer of this name."""
        return "weight_only" if _names(self.float_inputs, name) else self.linear

    def record(self, num_layers: int) -> dict[str, Any]:
        """Return the ``quantization_config`` entry of ``config.json`` for a network with that many int8 layers."""
        return {"quant_method": QUANT_METHOD, NUM_LAYERS: num_layers, **asdict(self)}


def read_record(config: Mapping[str, Any], who: str) -> Int8 | None:
    """Read the int8 settings from a network's ``config.json``; None if it was not quantised, or by another library.

    Raises:
        UsageError: The entry is damaged, or was written by a later version.
    """
    record = config.get("quantization_config")
    if not isinstance(record, Mapping) or QUANT_METHOD not in (record.get("quant_method"), record.get(FORMAT)):
        return None
    try:
        return Int8(**{key: value for key, value in record.items() if key not in ("quant_method", FORMAT, NUM_LAYERS)})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{who}: cannot read the quantization_config ({error}); expected "
            f"{', '.join(sorted(field.name for field in fields(Int8)))}; copy that config.json again"
        ) from error


def _check(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        names = ", ".join("null" if each is None else str(each) for each in allowed)
        raise UsageError(f"Int8 got {name}={value}; expected one of {names}")


def _some(layers: Collection[str]) -> str:
    names = sorted(layers)
    return ", ".join(names[:: max(1, len(names) // 3)][:3])


def _names(patterns: Sequence[str], name: str) -> bool:
    """Return whether one of the patterns matches whole consecutive parts of a dotted name."""
    return any(f".{pattern}." in f".{name}." for pattern in patterns)
