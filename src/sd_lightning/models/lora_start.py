"""Adapters that a training goes on from: a LoRA file of this package, diffusers, kohya's tools or ComfyUI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd_lightning._conf.annotations import as_override
from sd_lightning._errors import UsageError
from sd_lightning.models.loading import PipelineParts, read_lora
from sd_lightning.models.lora import WEIGHTS_NAME, Lora
from sd_lightning.models.lora_formats import FILE_NAME
from sd_lightning.models.lora_layers import layer_names, matching
from sd_lightning.storage import far_runs, runs


def find_lora(path: str, *, who: str) -> Path:
    """Return a LoRA file, given itself, a folder with one, or a run that trained one.

    Raises:
        UsageError: There is none.
    """
    root = Path(path)
    if not far_runs.is_url(path) and not root.exists():
        raise UsageError(
            f"{who}={path}: no such file or run; expected a LoRA file (.safetensors), a folder with {WEIGHTS_NAME} or "
            f"{FILE_NAME}, or a run of trainable=lora"
        )
    candidates = [root, root / WEIGHTS_NAME, root / FILE_NAME]
    if found := next((file for file in candidates if file.is_file()), None):
        if found.suffix != ".safetensors":
            raise UsageError(
                f"{who}={path}: expected a LoRA file in safetensors; others may hold code, as those of torch.save; "
                "save its tensors with safetensors.torch.save_file"
            )
        return found
    file = runs.find_pipeline(path, who=who) / WEIGHTS_NAME
    if not file.is_file():
        raise UsageError(
            f"{who}={path}: there is no {WEIGHTS_NAME}: the run trained no adapters, or merged them; give a run of "
            "trainable=lora merge_lora=false, or a LoRA file"
        )
    return file


def going_on(
    lora: Lora, file: Path, parts: PipelineParts, *, given: Collection[str] = (), train_text_encoder: bool = False
) -> Lora:
    """Return settings with which a training goes on from the adapters of a file: its rank, alpha and layers.

    Args:
        lora: The other settings.
        file: In any format that diffusers reads, and what ``sd_lightning.export`` writes.
        parts: The model; ``LatentDiffusion.describe`` gives one without weights.
        given: Names of settings that have to be the file's: "rank", "alpha", …
        train_text_encoder: Whether text encoders are trained.

    Raises:
        UsageError: The file has no adapters of the model, or a setting contradicts it.
    """
    who = f"init_lora={file}"
    adapters = read_lora(parts, file, who)
    texts = [name for name in adapters if parts.family.is_text_encoder(name)]
    if texts and not train_text_encoder:
        raise UsageError(
            f"{who}: it has adapters of {' and '.join(texts)}, and the run trains none of them; write "
            "train_text_encoder=true (of train: module.train_text_encoder=true)"
        )
    types = {a.type for each in adapters.values() for a in each.values()}
    if len(types) > 1:
        raise UsageError(f"{who}: it has adapters of several kinds, {' and '.join(sorted(types))}; give another file")
    found = {name: {k: (a.rank, a.alpha) for k, a in each.items()} for name, each in adapters.items()}
    dora = {a.magnitude is not None for each in adapters.values() for a in each.values()}
    if len(dora) > 1:
        raise UsageError(f"{who}: some of its layers have DoRA's magnitudes, and others none; give another file")
    own = lora.of_family(parts.family)
    values: dict[str, Any] = {"use_dora": dora.pop(), "type": types.pop()} | _kinds(found)
    layers = {name: layer_names(parts.networks[name]) for name in found}
    if all(own.kinds(name, layers[name]) == each for name, each in found.items()):
        values |= {key: getattr(own, key) for key in values.keys() - {"use_dora", "type"}}
    else:
        for name in (each for each in (parts.family.denoiser, *texts[:1]) if each in adapters):
            asked = getattr(own, key := lora.setting_of(name))
            is_same = matching(asked, layers[name]) == adapters[name].keys()
            values[key] = list(asked) if is_same else _endings(adapters[name], layers[name])
    if parts.family.denoiser not in adapters and lora.target_modules is None:
        values["target_modules"] = []  # or the denoiser would get new adapters
    for key in given:
        ours: Any = getattr(lora, key)
        if key in values and ours is not None and (list(ours) if "modules" in key else ours) != values[key]:
            raise UsageError(
                f"got lora.{key}={as_override(ours)} and {who}, whose adapters have {key}={as_override(values[key])}; "
                f"leave lora.{key} out, or start without init_lora"
            )
    return replace(lora, init=file, **values)


def _kinds(found: Mapping[str, Mapping[str, tuple[int, float]]]) -> dict[str, Any]:
    """Return settings of the ranks and alphas of a file's layers, by network; what most have is that of all others."""
    named = {f"{name}.{layer}": kind for name, layers in found.items() for layer, kind in layers.items()}
    rank, alpha = (Counter(each).most_common(1)[0][0] for each in zip(*named.values(), strict=True))
    ranks = {name: kind[0] for name, kind in named.items() if kind[0] != rank}
    if ranks and all(kind[0] == kind[1] for kind in named.values()):
        return {"rank": rank, "alpha": None, "rank_pattern": ranks, "alpha_pattern": None}
    alphas = {name: kind[1] for name, kind in named.items() if kind[1] != alpha}
    return {"rank": rank, "alpha": alpha, "rank_pattern": ranks or None, "alpha_pattern": alphas or None}


def _endings(layers: Collection[str], others: Collection[str]) -> list[str]:
    """Return the shortest endings of names that these layers have, and no others."""
    found: dict[str, None] = {}
    for layer in layers:
        parts = layer.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1) if not parts[-count].isdecimal()]
        found[next((each for each in endings if matching([each], others) <= set(layers)), layer)] = None
    return list(found)
