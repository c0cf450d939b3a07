"""LoHa and LoKr, adapters of LyCORIS (arXiv 2309.14859) that peft trains: their factors in memory and in files.

A layer has ``<name>.hada_w1_a``, … or ``<name>.lokr_w1``, …, and ``<name>.alpha``, by the names of LyCORIS and with its
meaning, see :class:`~sd_lightning.storage.deferred_weights.Factors`. ``<name>`` is ``unet.mid_block…`` in a run's
pipeline, and that of a front end in its files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.deferred_weights import Factors
from sd_lightning.storage.streamed_tensor import StreamedTensor

Kind = Literal["lora", "loha", "lokr"]
Value = TypeVar("Value")
_KEY = re.compile(r"(?P<layer>.+)\.(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|alpha)")


def by_layer(tensors: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Return factors and alpha by layer and name; nothing if others are among them, or there are none."""
    found: dict[str, dict[str, Value]] = {}
    for key, value in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            return {}
        found.setdefault(match["layer"], {})[match["part"]] = value
    return found if all(parts.keys() - {"alpha"} for parts in found.values()) else {}


def read_factors(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Factors:
    """Return a layer's factors, given what a file has of it and its weight's shape.

    Raises:
        ValueError: They do not fit the weight.
        RuntimeError, KeyError: Nor one another.
    """
    values = {name: each for name, each in parts.items() if name != "alpha"}
    alpha = float(parts["alpha"]) if "alpha" in parts else Factors(values, 1.0).rank
    found = Factors(values, float(f"{alpha:.7g}"))  # as 0.3, which was rounded to float32
    if found.shape != (shape[0], math.prod(shape[1:])):
        raise ValueError(f"they are of a weight {found.shape}")
    return found


def begin_(layer: Any, adapter: str, factors: Factors, who: str) -> None:
    """Give the factors of peft's layer the values of others of the same shapes.

    Raises:
        UsageError: They have other shapes.
    """
    named = {name: getattr(layer, name) for name in layer.adapter_layer_names}
    own = {name: each[adapter] for name, each in named.items() if adapter in each}
    ours, theirs = ({k: tuple(v.shape) for k, v in sorted(each.items())} for each in (own, factors.values))
    if ours != theirs:
        raise UsageError(
            f"{who} has factors {theirs}; expected {ours}, as of LyCORIS with factor=-1, decompose_both=false and "
            "use_tucker=false; start with other adapters, or without"
        )
    for name, values in factors.values.items():
        own[name].copy_(values)


def merged(
    tensors: Mapping[str, StreamedTensor], networks: Mapping[str, Mapping[str, StreamedTensor]], who: object
) -> dict[str, dict[str, StreamedTensor]]:
    """Return, by network, the weights that have factors in a pipeline's file, merged when they are read.

    Raises:
        UsageError: There is no such weight.
    """
    found: dict[str, dict[str, StreamedTensor]] = {}
    for key, parts in by_layer(tensors).items():
        network, _, layer = key.partition(".")
        weight = networks.get(network, {}).get(f"{layer}.weight")
        if weight is None:
            raise UsageError(f"{who}: the pipeline beside it has no {key}; copy the file again")
        merge = StreamedTensor(weight.dtype, weight.shape, partial(_merge, weight, parts, f"{who}: {key}"))
        found.setdefault(network, {})[f"{layer}.weight"] = merge
    return found


def _merge(weight: StreamedTensor, parts: Mapping[str, StreamedTensor], who: str) -> Iterator[Tensor]:
    try:
        factors = read_factors({name: each.read() for name, each in parts.items()}, tuple(weight.shape))
    except (ValueError, RuntimeError, KeyError) as error:
        raise UsageError(f"{who} does not fit its weight ({error}); copy the file again") from error
    values = weight.read().float().reshape(-1)
    factors.add_(values, 0)
    yield values.to(weight.dtype)


def front_end_tensors(
    tensors: Mapping[str, StreamedTensor],
    key_of: Callable[[str, str], tuple[str, list[str]] | None],
    *,
    who: object,
    front_end: str,
) -> dict[str, StreamedTensor]:
    """Return factors by the keys of a front end, given what returns these, and the layers that are one there.

    Raises:
        UsageError: The front end has no such layer, or joins it with others.
    """
    found: dict[str, StreamedTensor] = {}
    for name, parts in by_layer(tensors).items():
        network, _, layer = name.partition(".")
        key, layers = key_of(network, layer) or ("", [])
        if len(layers) != 1:
            problem = f"joins {' and '.join(layers)}, and factors cannot be" if layers else f"has no name for {name}"
            raise UsageError(
                f"{who}: {front_end} {problem}; write format=single_file or merge_lora=true for the sum, or train "
                "without these layers (lora.target_modules)"
            )
        found |= {f"{key}.{part}": tensor for part, tensor in parts.items()}
    return found
