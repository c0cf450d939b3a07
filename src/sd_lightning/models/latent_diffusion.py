"""The model: networks, tokenizers and scheduler configuration of a latent-diffusion model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.models import families
from sd_lightning.models.families import Architecture, Component, Conditioning
from sd_lightning.models.families.latents import LatentSpace
from sd_lightning.models.families.sampling import is_new
from sd_lightning.models.loading import (
    PipelineParts,
    build_parts,
    check_pretrained,
    describe_parts,
    load_parts,
    save_parts,
)
from sd_lightning.quantization.base import fill_base_

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

log = logging.getLogger(__name__)


class LatentDiffusion(PipelineParts):
    """The networks and tokenizers of a latent-diffusion model, and a record of each part's class and configuration.

    Training, generation and export take this object. It is not an ``nn.Module``:
    :class:`sd_lightning.SDLightningModule` decides which of its networks a trainer sees.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._token_ids: dict[str, dict[str, Tensor]] = {}

    @classmethod
    def build(
        cls, architecture: str | Architecture, *, seed: int = 0, device: str | torch.device = "cpu"
    ) -> LatentDiffusion:
        """Build a model from its configuration, with random weights.

        The tiny models, given by name, get the trained VAE that ships with the package. Nothing is downloaded, so there
        is no CLIP vocabulary: every architecture gets the shipped byte-level tokenizer.

        Args:
            architecture: "tiny", "sd15", "sdxl", "klein_4b", … or an :class:`Architecture`.
            seed: Seed of the random weights; the global generator is not changed.
            device: Device of the weights; "meta" allocates none.

        Raises:
            UsageError: The name is not known.
        """
        return cls(**vars(build_parts(architecture, seed=seed, device=device)))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        variant: str | None = None,
        vae: str | Path | None = None,
        deferred: Sequence[str] = (),
        lora: str | Path | None = None,
        lora_weight: float | None = None,
    ) -> LatentDiffusion:
        """Load a pipeline in the diffusers layout, in the precision that it was saved in, or else in float32.

        Adapters that a run saved in the folder are merged into the weights.

        Args:
            pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
            revision: Branch, tag or commit on the hub.
            variant: File variant, e.g. "fp16".
            vae: Another VAE (a folder or repository id), e.g. "madebyollin/sdxl-vae-fp16-fix".
            deferred: Networks to build on the meta device. They cannot compute until a trainer is set up, when each
                process reads the weights that it keeps. Names of networks, or "denoiser", "text_encoders",
                "trainable" or "all"; names that the pipeline does not have are ignored, and all are if there are
                adapters to merge that are not plain LoRA.
            lora: A LoRA file in any format that diffusers reads; its adapters are merged into the weights, into
                deferred ones when they are read.
            lora_weight: Share of the change by ``lora``, or else by the folder's own adapters, that is merged: 0 leaves
                the weights as they were, 1 is as trained, which None is, too.

        Raises:
            UsageError: The pipeline does not exist, a part of it is missing or unreadable, or adapters do not fit.
        """
        options: dict[str, Any] = {"revision": revision, "variant": variant, "vae": vae, "deferred": deferred}
        options["lora_weight"] = lora_weight
        lora = None if lora is None else Path(lora)
        return cls(**vars(load_parts(pretrained_model_name_or_path, **options, lora=lora)))

    @classmethod
    def describe(
        cls, pretrained_model_name_or_path: str | Path, *, revision: str | None = None, vae: str | Path | None = None
    ) -> LatentDiffusion:
        """Build the networks of a pipeline on the meta device, from its configuration files alone.

        Args:
            pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
            revision: Branch, tag or commit on the hub.
            vae: Another VAE (a folder or repository id).

        Raises:
            UsageError: The pipeline does not exist, or a part of it is missing or unreadable.
        """
        return cls(**vars(describe_parts(pretrained_model_name_or_path, revision=revision, vae=vae)))

    def save_pretrained(self, folder: str | Path, *, skip: Sequence[str] = ()) -> None:
        """Write a pipeline folder in the diffusers layout (safetensors).

        Args:
            folder: Folder to write into; created if it does not exist.
            skip: Networks whose weights are not written (their configuration is).

        Raises:
            UsageError: Weights are deferred, sharded by a strategy, or adapters cannot be merged into them.
        """
        self.check_is_read("save_pretrained", skip=skip)
        save_parts(self, Path(folder), skip=skip)

    @property
    def denoiser(self) -> nn.Module:
        """The denoising network: a UNet or a transformer."""
        return self.networks[self.family.denoiser]

    @property
    def vae(self) -> Any:
        return self.networks["vae"]

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        return {name: self.networks[name] for name in self.family.text_encoders if name in self.networks}

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """Configuration of noise schedule and sampling scheduler, with its ``_class_name``."""
        scheduler = self.components["scheduler"]
        return {**scheduler.config, "_class_name": scheduler.class_name}

    @property
    def resolution(self) -> int:
        """Native image size of the model: side in pixels."""
        return self.family.resolution(self.components)

    @property
    def latent_space(self) -> LatentSpace:
        """How encoded images become latents, and their shapes; see :meth:`Family.latent_space`."""
        return self.family.latent_space(self.vae)

    def draws_in_float32(self, network: str) -> bool:
        """Return whether that network computes in float32 instead of float16; see :meth:`Family.draws_in_float32`."""
        return self.family.draws_in_float32(network, self.networks[network])

    def use_scheduler(self, overrides: Mapping[str, Any]) -> None:
        """Change the scheduler that the model samples with, also once exported.

        Args:
            overrides: Configuration entries; ``_class_name`` replaces the scheduler's class.
        """
        old = self.components["scheduler"]
        config = {**old.config, **overrides}
        class_name = config.pop("_class_name", old.class_name)
        self.components["scheduler"] = Component("diffusers", class_name, config)

    def condition(self, text_encoders: Mapping[str, nn.Module], batch: Mapping[str, Any]) -> Conditioning:
        """Encode the captions of a batch; see :meth:`Family.condition`."""
        return self.family.condition(text_encoders, batch)

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, L), and masks where the family has them; see :meth:`Family.tokenize`."""
        for caption in set(captions) - self._token_ids.keys():
            if len(self._token_ids) > 100_000:
                self._token_ids.clear()
            self._token_ids[caption] = self.family.tokenize(self.tokenizers, [caption])
        made = [self._token_ids[caption] for caption in captions]
        return {name: torch.cat([each[name] for each in made]) for name in made[0]}

    def truncated(self, captions: Sequence[str]) -> list[bool]:
        """Return, for each caption, whether :meth:`tokenize` truncates it for any text encoder."""
        family = self.family
        tokenizers = [self.tokenizers[family.tokenizer_of(name)] for name in self.text_encoders]
        limits = [(tokenizer, family.max_length(tokenizer)) for tokenizer in tokenizers]
        long = {
            caption
            for caption in set(captions)
            for tokenizer, limit in limits
            for prompt in family.prompts(tokenizer, [caption])
            if len(tokenizer(prompt, truncation=True, max_length=limit + 1).input_ids) > limit
        }
        return [caption in long for caption in captions]

    def forget_tokens(self) -> None:
        """Clear the cache of token ids, after a tokenizer has changed."""
        self._token_ids.clear()

    def pipeline(self, *, scheduler: str | None = None) -> DiffusionPipeline:
        """Return a diffusers pipeline that uses these networks (no copies).

        Args:
            scheduler: Class name or short name ("ddim", "euler", "dpmsolver++", …) of another scheduler.
        """
        self.check_is_read("pipeline")
        return super().pipeline(scheduler=scheduler)

    def sampling_scheduler(self, name: str | None = None) -> Any:
        """Build the sampling scheduler: the model's own, or the one named; see :meth:`Family.sampling_scheduler`."""
        return self.family.sampling_scheduler(self.components["scheduler"], name)

    def read_deferred(self, device: str | torch.device) -> None:
        """Read all deferred weights onto a device, each in the dtype that its parameter has now."""
        self.read_base()
        for name in list(self.deferred):
            self.deferred.pop(name).fill_(self.networks[name].eval(), torch.device(device))

    def read_base(self) -> None:
        """Quantise the weights that are in files of networks on whose quantised weights adapters are trained."""
        for name, files in self.originals.items():
            fill_base_(self.networks[name], files)

    def check_is_read(self, who: str, *, skip: Sequence[str] = ()) -> None:
        """Check that no network, except those in ``skip``, has deferred weights.

        Raises:
            UsageError: Some are; the message names ``LatentDiffusion.<who>``.
        """
        names = sorted(self.deferred.keys() - set(skip))
        if names:
            raise UsageError(
                f"LatentDiffusion.{who}: the weights of {', '.join(names)} are still in files; expected them in "
                "memory; call quantize_(model), model.read_deferred(device) or trainer.fit first, or leave out "
                "deferred= of from_pretrained"
            )


def load_model(
    *,
    architecture: str,
    pretrained: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    vae: str | None = None,
    seed: int = 0,
    fresh_denoiser: bool = False,
    deferred: Sequence[str] = (),
) -> LatentDiffusion:
    """Load the ``pretrained`` weights if given, otherwise build the architecture with random weights.

    ``deferred`` and ``fresh_denoiser``, which gives the denoiser random weights, apply to pretrained weights only.

    Raises:
        UsageError: Options of pretrained weights are given without ``pretrained``, or :func:`check_pretrained`,
            :meth:`LatentDiffusion.build` or :meth:`LatentDiffusion.from_pretrained` raises.
    """
    if pretrained is not None:
        check_pretrained(architecture, pretrained, revision=revision)
        licence = families.architecture(architecture).licence
        if licence and is_first_process() and is_new("licence", architecture):
            log.info("model=%s: the licence of the published weights is %s", architecture, licence)
        unread = (*deferred, "denoiser") if fresh_denoiser else deferred
        model = LatentDiffusion.from_pretrained(
            pretrained, revision=revision, variant=variant, vae=vae, deferred=unread
        )
        if fresh_denoiser:
            name = model.family.denoiser
            model.networks[name] = model.components[name].instantiate(seed=seed)
            model.deferred.pop(name, None)
        return model
    check_unused(revision=revision, variant=variant, vae=vae, fresh_denoiser=fresh_denoiser)
    return LatentDiffusion.build(architecture, seed=seed)


def check_unused(**options: Any) -> None:
    """Check that no option of a pretrained pipeline is set, where there is none.

    Raises:
        UsageError: One is.
    """
    given = [f"{name}={'true' if value is True else value}" for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"model got {', '.join(given)} without pretrained weights; add model.pretrained=<hub id or folder>"
        )
