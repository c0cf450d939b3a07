"""Selection of the trained parameters, and the optimizer's parameter groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_lightning._launchers import is_first_process
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.loading import read_lora
from sd_lightning.models.lora import (
    Adapters,
    Lora,
    begin_magnitudes_,
    freeze_unused,
    plain_names,
    weight_names,
)
from sd_lightning.models.lora_base import compare_bases
from sd_lightning.models.lora_file import check_settings
from sd_lightning.models.meta import meta_twin, unused_parameters
from sd_lightning.quantization.base import hide_base_
from sd_lightning.quantization.layers import refuse_quantised
from sd_lightning.storage.deferred_weights import DeferredWeights

log = logging.getLogger(__name__)

_SAME = 1e-5
"""Relative difference of weights that are those of the files, with adapters added in another order."""


def choose_trained(
    model: LatentDiffusion, networks: Mapping[str, nn.Module], *, lora: Lora | None, train_text_encoder: bool
) -> None:
    """Set ``requires_grad`` on the trained parameters, except those that never get a gradient.

    Args:
        model: The model.
        networks: Its denoiser, and the text encoders with trained parameters.
        lora: Adapters to insert into the networks and train instead of their weights.
        train_text_encoder: Train the text encoders' weights, not only learned tokens.
    """
    adapted = {n: network for n, network in networks.items() if network is model.denoiser or train_text_encoder}
    start = {} if lora is None or lora.init is None else _start(model, adapted, Path(lora.init))
    for name, network in networks.items():
        refuse_quantised(network, "SDLightningModule")
        network.requires_grad_(name in adapted).train()
    if lora is not None:
        denoiser = model.family.denoiser
        if lora.base is not None:
            originals = model.deferred.get(denoiser) or _files_of(model)
            lora.quantize_base_(model.denoiser)
            if originals is not None:
                model.originals[denoiser] = originals
            elif is_first_process() and not any(p.is_meta for p in model.denoiser.parameters()):
                log.warning(
                    "base=%s: no file has the weights of %s as they are, so exports will have what quantisation leaves "
                    "of them; for the original ones train on a folder of save_pretrained, or of sd_lightning.export "
                    "with merge_lora=true",
                    *(lora.base, denoiser),
                )
        lora.apply_(adapted)
        hide_base_(model.denoiser)
        for name, network in adapted.items():
            if name in model.originals:
                model.originals[name] = model.originals[name].renamed(weight_names(network))
            if name in model.deferred:  # without the base, which `setup` of the module reads
                model.deferred[name] = model.deferred[name].renamed(plain_names(network.state_dict()))
            files = model.originals.get(name) or model.deferred.get(name)
            if lora.use_dora and files is not None:
                begin_magnitudes_(network, files)
        lora.begin_(adapted, start)
    for parameter in LearnedToken.parameters(networks):
        parameter.requires_grad_(True)
    freeze_unused(model.denoiser, model.family.unused_parameters(model.denoiser))
    for name, unused in unused_parameters(model).items() if train_text_encoder else ():
        freeze_unused(model.networks[name], unused)


def _start(model: LatentDiffusion, networks: Mapping[str, nn.Module], file: Path) -> Adapters:
    """Return the adapters that the training goes on from, and warn if they are of other weights."""
    adapters, bases = read_lora(meta_twin(model), file, f"init_lora={file}"), {file: check_settings(file)}
    for name, network in networks.items():
        compare_bases(bases, "this model", name, network, model.deferred.get(name))
    return adapters


def _files_of(model: LatentDiffusion) -> DeferredWeights | None:
    """Return the files of a denoiser in memory; None if there are none, or its weights were changed since."""
    if model.defer_denoiser is None:
        return None
    _, _, files = model.defer_denoiser()
    with closing(files):
        for name, weight in model.denoiser.named_parameters():
            ours = weight.detach().cpu()
            theirs = torch.empty_like(ours)
            try:
                files.read(name, theirs)
            except KeyError:  # a parameter that was added in Python
                return None
            if torch.dist(ours, theirs) > _SAME * theirs.norm():
                return None
    return files


def parameter_groups(
    denoiser: nn.Module, text_encoders: Mapping[str, nn.Module], text_encoder_lr: float | None
) -> list[dict[str, Any]]:
    """Return the optimizer's groups: the denoiser, the text encoders, and their learned tokens without weight decay.

    Args:
        denoiser: Its trained parameters are the first group.
        text_encoders: The text encoders with trained parameters.
        text_encoder_lr: Their learning rate; the denoiser's if not given.
    """
    words = {id(parameter) for parameter in LearnedToken.parameters(text_encoders)}
    parameters = [p for network in text_encoders.values() for p in network.parameters() if p.requires_grad]
    rate = {} if text_encoder_lr is None else {"lr": text_encoder_lr}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in denoiser.parameters() if p.requires_grad]},
        {"params": [p for p in parameters if id(p) not in words], **rate},
        # Weight decay would also shrink the embeddings of all other tokens.
        {"params": [p for p in parameters if id(p) in words], **rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]
