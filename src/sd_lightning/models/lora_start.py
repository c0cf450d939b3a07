"""Adapters that a training goes on from: a LoRA file of this package, diffusers, kohya's tools or ComfyUI."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd_lightning._conf.annotations import as_override
from sd_lightning._errors import UsageError
from sd_lightning.models.loading import PipelineParts, read_lora
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, layer_names, matching
from sd_lightning.models.lora_formats import FILE_NAME
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
        UsageError: The file has no adapters of the model or several ranks, or a setting contradicts it.
    """
    who = f"init_lora={file}"
    adapters = read_lora(parts, file, who)
    texts = [name for name in adapters if parts.family.is_text_encoder(name)]
    if texts and not train_text_encoder:
        raise UsageError(
            f"{who}: it has adapters of {' and '.join(texts)}, and the run trains none of them; write "
            "train_text_encoder=true (of train: module.train_text_encoder=true)"
        )
    kinds = {(len(a.down), a.alpha, a.magnitude is not None) for each in adapters.values() for a in each.values()}
    if len(kinds) > 1:
        shown = ", ".join(f"rank {rank} with alpha {alpha:g}" for rank, alpha, _ in sorted(kinds)[:4])
        raise UsageError(f"{who}: its layers differ ({shown}); expected one rank and alpha; give another file")
    rank, alpha, use_dora = kinds.pop()
    values: dict[str, Any] = {"rank": rank, "alpha": alpha, "use_dora": use_dora}
    for name in (parts.family.denoiser, *texts[:1]):
        if name in adapters:
            key, layers = lora.setting_of(name), layer_names(parts.networks[name])
            asked = getattr(lora.of_family(parts.family), key)
            is_same = matching(asked, layers) == adapters[name].keys()
            values[key] = list(asked) if is_same else _endings(adapters[name], layers)
    for key in given:
        ours: Any = getattr(lora, key)
        if key in values and ours is not None and (list(ours) if "modules" in key else ours) != values[key]:
            raise UsageError(
                f"got lora.{key}={as_override(ours)} and {who}, whose adapters have {key}={as_override(values[key])}; "
                f"leave lora.{key} out, or start without init_lora"
            )
    return replace(lora, init=file, **values)


def _endings(layers: Collection[str], others: Collection[str]) -> list[str]:
    """Return the shortest endings of names that these layers have, and no others."""
    found: dict[str, None] = {}
    for layer in layers:
        parts = layer.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1) if not parts[-count].isdecimal()]
        found[next((each for each in endings if matching([each], others) <= set(layers)), layer)] = None
    return list(found)
