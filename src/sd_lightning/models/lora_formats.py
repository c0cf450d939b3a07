"""LoRA files of other front ends: kohya's format, with the layer names of each front end.

A layer has ``<name>.lora_down.weight``, ``<name>.lora_up.weight`` and ``<name>.alpha``; its output is scaled by
``alpha / rank``. ``<name>`` has underscores for dots, after ``lora_unet_`` for the denoiser, ``lora_te_`` for the text
encoder, ``lora_te1_`` and ``lora_te2_`` if there are two. DoRA's magnitudes are ``<name>.dora_scale`` (O, 1, ...), as
LyCORIS has them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.models import lycoris
from sd_lightning.models.families import Component, Family
from sd_lightning.models.families.lora_names import FrontEnd
from sd_lightning.models.families.single_file import model_spec
from sd_lightning.models.lora import MAGNITUDE, METADATA, Adapters, unscaled
from sd_lightning.models.lora_file import AdaptedLayer, LoraFile, alpha_of, trained_scales
from sd_lightning.storage.deferred_weights import Adapter
from sd_lightning.storage.streamed_tensor import StreamedTensor, content_digest
from sd_lightning.storage.untrusted import parse_json

FILE_NAME = "lora.safetensors"

Networks = Mapping[str, Mapping[str, StreamedTensor]]
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of weights (O, ...), by network and by the layer's name in weight files."""
_Parts = Sequence[tuple[AdaptedLayer | None, int]]
"""The layers that a front end joins, each with its number of outputs; None for one without an adapter."""


def front_end_tensors(
    file: LoraFile, networks: Networks, family: Family, front_end: FrontEnd
) -> dict[str, StreamedTensor]:
    """Return adapters by the keys that a front end reads.

    Layers that are one in the front end become one adapter of the sum of their ranks, exactly: ``lora_up`` is
    block-diagonal, with zeros for layers without adapters. ``alpha`` is that of the training.

    Args:
        file: The adapters.
        networks: By network, the tensors of its weight file.
        family: Of the pipeline.
        front_end: "kohya" or "comfyui".

    Raises:
        UsageError: The adapters do not fit the networks, are not plain LoRA, or the front end has no such layer.
    """
    if lycoris.by_layer(file.tensors):
        key_of = partial(front_end_key, family=family, front_end=front_end)
        return lycoris.front_end_tensors(file.tensors, key_of, who=file.path, front_end=front_end)
    groups: dict[str, _Parts] = {}
    bases: dict[str, list[StreamedTensor]] = {}
    adapted = {(each.network, each.layer): each for each in file.layers(networks)}
    if front_end == "comfyui" and any(each.magnitude is not None for each in adapted.values()):
        raise UsageError(
            f"{file.path}: these adapters are DoRA's, and ComfyUI divides by the norms of the original weights, not of "
            "the changed ones; write format=single_file or merge_lora=true for the sum, or format=kohya for LyCORIS"
        )
    for network, layer in adapted:
        named = front_end_key(network, layer, family, front_end)
        if named is None:
            raise UsageError(
                f"{file.path}: {front_end} has no name for the adapter of {network}.{layer}; train without it "
                "(lora.target_modules), or write format=diffusers"
            )
        key, layers = named
        bases[key] = [networks[network][f"{part}.weight"] for part in layers]
        groups[key] = [(adapted.get((network, part)), base.shape[0]) for part, base in zip(layers, bases[key])]
    tensors: dict[str, StreamedTensor] = {}
    for key, parts in groups.items():
        first = next(part for part, _ in parts if part is not None)
        given = {part.down.shape[0] for part, _ in parts if part is not None}
        none = given.pop() if len(given) == 1 else 0  # rank of the zeros for a layer without an adapter
        ranks_of = [none if part is None else part.down.shape[0] for part, _ in parts]
        ranks, outputs = sum(ranks_of), sum(rows for _, rows in parts)
        # It has one scale: that of the training, or if those differ, which the weights then include, 1.
        scales = {part.scale * part.trained_scale for part, _ in parts if part is not None}
        scale = scales.pop() if len(scales) == 1 else None
        down = (ranks, *first.down.shape[1:])
        up = (outputs, ranks, *first.up.shape[2:])
        lowered = partial(_up, parts, up, ranks_of, scale)
        tensors[f"{key}.lora_down.weight"] = StreamedTensor.of(partial(_down, parts, ranks_of), first.down.dtype, down)
        tensors[f"{key}.lora_up.weight"] = StreamedTensor.of(lowered, first.up.dtype, up)
        tensors[f"{key}.alpha"] = StreamedTensor.of(torch.tensor(ranks * (1.0 if scale is None else scale)))
        if first.magnitude is not None:
            norms, shape = partial(_magnitudes, parts, bases[key]), (outputs, *[1] * (len(first.weight.shape) - 1))
            tensors[f"{key}.dora_scale"] = StreamedTensor.of(norms, first.magnitude.dtype, shape)
    return tensors


def front_end_key(network: str, layer: str, family: Family, front_end: FrontEnd) -> tuple[str, list[str]] | None:
    """Return what a front end's keys of a layer begin with, and the layers that are one there; None if it has none."""
    named = family.lora_names.of(layer, front_end) if network == family.denoiser else (layer, [layer])
    return None if named is None else (f"{_prefix(network, family)}_{named[0]}".replace(".", "_"), named[1])


def front_end_metadata(
    file: LoraFile,
    tensors: Mapping[str, StreamedTensor],
    family: Family,
    components: Mapping[str, Component],
    *,
    title: str,
    prediction_type: str,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Return the header of a front end's file: ``modelspec.*`` and the ``ss_*`` that kohya's tools show.

    The date is that of the adapters' file, so that a second export is the same.

    Args:
        file: The adapters.
        tensors: Of :func:`front_end_tensors`.
        family: Of the pipeline.
        components: Of its networks.
        title: Name of the adapters.
        prediction_type: As in a scheduler's configuration.
        dtype: As in :func:`write_streamed`.
    """
    factors = {key: set(parts) for key, parts in lycoris.by_layer(file.tensors).items()}
    kinds = set()
    for key, parts in factors.items():
        inner = next((file.tensors[f"{key}.{each}"] for each in ("hada_w1_b", "lokr_w2_b") if each in parts), None)
        own_alpha = f"{file.tensors[f'{key}.alpha'].read().item():.7g}"
        kinds.add((own_alpha if inner is None else str(inner.shape[0]), own_alpha))
    for key, tensor in file.tensors.items():
        if ".lora_A." in key:
            network, _, layer = key.removesuffix(".lora_A.weight").partition(".")
            scale = file.scale_of(network, layer, tensor.shape[0]) * file.trained_scale(f"{network}.{layer}")
            kinds.add((str(tensor.shape[0]), f"{scale * tensor.shape[0]:.12g}"))
    own = {"ss_network_module": "networks.lora"}
    if factors:
        algorithm = "loha" if any("hada_w1_a" in parts for parts in factors.values()) else "lokr"
        own = {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps({"algo": algorithm})}
    rank, alpha = kinds.pop() if len(kinds) == 1 else ("Dynamic", "Dynamic")  # as in `resize_lora.py` of sd-scripts
    spec, version = model_spec(
        family,
        components,
        title=title,
        prediction_type=prediction_type,
        date=datetime.fromtimestamp(int(file.path.stat().st_mtime), UTC),
    )
    return spec | {
        **own,
        "modelspec.architecture": f"{spec['modelspec.architecture']}/lora",
        "modelspec.hash_sha256": f"0x{content_digest(tensors, dtype)}",
        "ss_base_model_version": version,
        "ss_network_dim": rank,
        "ss_network_alpha": alpha,
        "ss_output_name": title,
    }


def _prefix(network: str, family: Family) -> str:
    if network == family.denoiser:
        return "lora_unet"
    return "lora_te" if len(family.text_encoders) == 1 else f"lora_te{family.text_encoders.index(network) + 1}"


def _down(parts: _Parts, ranks: Sequence[int]) -> Tensor:
    shape = next(part for part, _ in parts if part is not None).down.shape
    none = (torch.zeros(rank, *shape[1:]) for rank in ranks)
    return torch.cat([zeros if part is None else part.down.read() for (part, _), zeros in zip(parts, none)])


def _up(parts: _Parts, shape: tuple[int, ...], ranks: Sequence[int], scale: float | None) -> Tensor:
    blocks = []
    for (part, rows), rank in zip(parts, ranks, strict=True):
        up = torch.zeros(rows, rank) if part is None else part.up.read().flatten(1)
        if part is not None:
            up = up * part.scale if scale is None else unscaled(up, part.trained_scale)
        blocks.append(up)
    return torch.block_diag(*blocks).view(shape)


def _magnitudes(parts: _Parts, bases: Sequence[StreamedTensor]) -> Tensor:
    """Return the magnitudes of joined layers; those of one without an adapter are the norms of its rows."""
    norms: list[Tensor] = []
    for (part, _), base in zip(parts, bases, strict=True):
        own = None if part is None else part.magnitude
        norms.append(torch.linalg.vector_norm(base.read().float().flatten(1), dim=1) if own is None else own.read())
    return torch.cat([each.float().reshape(-1) for each in norms])


def read_adapters(
    stored: Mapping[str, Tensor], metadata: Mapping[str, str], shapes: Shapes, family: Family
) -> Adapters | None:
    """Return the adapters of a file in diffusers' format, or in that of :func:`front_end_tensors`.

    Args:
        stored: The file's tensors.
        metadata: Strings of its header.
        shapes: The layers that may have adapters.
        family: Of the model.

    Returns:
        The adapters; None if the file has keys, shapes or settings that these formats do not have.
    """
    factors = lycoris.by_layer(stored)
    for front_end in (None, *get_args(FrontEnd)):
        of_family = partial(_of_front_end, family=family, front_end=front_end)
        with suppress(
            RuntimeError, AttributeError, TypeError, ValueError, ZeroDivisionError, KeyError, re.error
        ):  # not what keys tell
            if factors:
                found = _of_lycoris(dict(factors), shapes, family, front_end)
            else:
                found = (of_family if front_end else _of_diffusers)(dict(stored), metadata, shapes)
            if found is not None:
                return found
    return None


def _of_lycoris(
    left: dict[str, dict[str, Tensor]], shapes: Shapes, family: Family, front_end: FrontEnd | None
) -> Adapters | None:
    found: Adapters = {}
    for network, layers in shapes.items():
        for layer, shape in layers.items():
            named = front_end_key(network, layer, family, front_end) if front_end else (f"{network}.{layer}", [layer])
            if named is not None and len(named[1]) == 1 and named[0] in left:
                found.setdefault(network, {})[layer] = lycoris.read_factors(left.pop(named[0]), shape)
    return None if left or not found else found


def _of_diffusers(left: dict[str, Tensor], metadata: Mapping[str, str], shapes: Shapes) -> Adapters | None:
    settings, trained_of = parse_json(metadata.get(METADATA, "{}")), trained_scales(metadata)
    found: Adapters = {}
    for network, layers in shapes.items():
        for layer in (each for each in layers if f"{network}.{each}.lora_B.weight" in left):
            ends = ("lora_A.weight", "lora_B.weight", MAGNITUDE)
            down, up, norms = (left.pop(f"{network}.{layer}.{end}", None) for end in ends)
            if down is None or up is None:
                return None
            trained = trained_of.get(f"{network}.{layer}", trained_of[""])
            told = alpha_of({f"{network}.lora_alpha": len(down)} | settings, network, layer)
            found.setdefault(network, {})[layer] = Adapter(
                down.reshape(-1, *layers[layer][1:]),
                unscaled(up.reshape(*_up_shape(layers[layer], len(down))), trained),
                float(f"{told * trained:.12g}"),
                None if norms is None else norms.reshape(layers[layer][0]),
            )
    return None if left or not found else found


def _of_front_end(
    left: dict[str, Tensor], metadata: Mapping[str, str], shapes: Shapes, *, family: Family, front_end: FrontEnd
) -> Adapters | None:
    found: Adapters = {}
    recorded = float("nan")
    with suppress(ValueError):  # kohya's tools write "None", too
        recorded = float(metadata.get("ss_network_alpha", "nan"))
    named = ((n, front_end_key(n, layer, family, front_end)) for n, layers in shapes.items() for layer in layers)
    for network, (key, layers) in {each[0]: (network, each) for network, each in named if each is not None}.values():
        if f"{key}.lora_up.weight" not in left:
            continue
        ends = ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale")
        down, up, alpha, norms = (left.pop(f"{key}.{end}", None) for end in ends)
        if down is None or up is None:
            return None
        weights = [shapes[network][layer] for layer in layers]
        rows = [weight[0] for weight in weights]
        blocks, ranks = up.flatten(1).split(rows), len(down) // len(layers)
        own_of = _blocks(blocks, [ranks] * len(rows)) or _blocks(blocks, _ranks(blocks))
        scale = 1.0
        if alpha is not None:
            shorter = float(f"{alpha.item():.7g}")  # as 0.3, which was rounded to float32
            told = (recorded * (len(rows) if own_of else 1), *([shorter] if alpha.dtype == torch.float32 else []))
            same = (each for each in told if torch.tensor(each, dtype=alpha.dtype) == alpha)  # which may be rounded
            scale = next(same, alpha.item()) / len(down)
        for i, (layer, weight, block) in enumerate(zip(layers, weights, blocks, strict=True)):
            own = own_of[i] if own_of else slice(None)
            if len(layers) > 1 and not (down[own].any() or block[:, own].any()):
                continue  # it has none
            rank, scaled = len(down[own]), None if norms is None else norms.reshape(-1).split(rows)[i]
            found.setdefault(network, {})[layer] = Adapter(
                down[own].reshape(rank, *weight[1:]),
                block[:, own].reshape(*_up_shape(weight, rank)),
                float(f"{scale * rank:.12g}"),
                scaled,
            )
    return None if left or not found else found


def _ranks(blocks: Sequence[Tensor]) -> list[int]:
    """Return how many columns each block of rows has values in, if no other has; zeros go with what is before."""
    has = torch.stack([block.any(0) for block in blocks]).int()
    last = has.argmax(0).cummax(0).values
    in_turn = (has.sum(0) < 2).all() and ((last == has.argmax(0)) | ~has.any(0)).all()
    return last.bincount(minlength=len(blocks)).tolist() if in_turn else []


def _blocks(blocks: Sequence[Tensor], ranks: Sequence[int]) -> list[slice]:
    """Return the columns of each block of rows, if these are diagonal, as we join layers; else nothing."""
    ends = list(itertools.accumulate(ranks))
    found = [slice(end - rank, end) for end, rank in zip(ends, ranks)]
    others = (block[:, own] for i, block in enumerate(blocks) for j, own in enumerate(found) if i != j)
    is_whole = ends[-1:] == [blocks[0].shape[1]]
    return found if is_whole and not any(each.any() for each in others) else []


def _up_shape(weight: Sequence[int], rank: int) -> tuple[int, ...]:
    return (weight[0], rank, *[1] * (len(weight) - 2))
