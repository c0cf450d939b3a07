"""The model: networks, tokenizers and scheduler configuration of a latent-diffusion model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Architecture, Component, Conditioning, Family, family_of
from sd_lightning.models.families.autoencoder import scale_factor
from sd_lightning.models.families.sampling import said_once, scheduler_class
from sd_lightning.storage.deferred_weights import DeferredWeights

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class LatentDiffusion:
    """The networks and tokenizers of a latent-diffusion model, and a record of each part's class and configuration.

    Training, generation and export take this object. It is not an ``nn.Module``:
    :class:`sd_lightning.SDLightningModule` decides which of its networks a trainer sees.

    The record (``components``) keeps the original class names for export, because sharding engines replace the classes
    of live networks.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        *,
        tokenizers: Mapping[str, Any],
        components: Mapping[str, Component],
        pipeline_class: str,
        pipeline_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Take built parts; :meth:`build` and :meth:`from_pretrained` build them.

        Args:
            networks: By the family's names: "unet", "vae", "text_encoder", …
            tokenizers: By name: "tokenizer", …
            components: One record per network and one for "scheduler".
            pipeline_class: Class of the diffusers pipeline; selects the family.
            pipeline_options: Constructor arguments of the pipeline that are not parts.

        Raises:
            UsageError: No family has that pipeline.
        """
        self.family: Family = family_of(pipeline_class, who="LatentDiffusion")
        self.networks = dict(networks)
        self.tokenizers = dict(tokenizers)
        self.components = dict(components)
        self.pipeline_class = pipeline_class
        self.pipeline_options = {**self.family.pipeline_options, **(pipeline_options or {})}
        self.deferred: dict[str, DeferredWeights] = {}
        """Unread weights of networks on the meta device; an entry is removed when it is read."""
        self._token_ids: dict[str, dict[str, Tensor]] = {}

    # sd_lightning.loading reads and writes files, and handles adapters and int8.

    @classmethod
    def build(
        cls, architecture: str | Architecture, *, seed: int = 0, device: str | torch.device = "cpu"
    ) -> LatentDiffusion:
        """Build a model with random weights; see :func:`sd_lightning.loading.build`."""
        from sd_lightning.loading import build

        return build(architecture, seed=seed, device=device)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        variant: str | None = None,
        vae: str | Path | None = None,
        deferred: Sequence[str] = (),
    ) -> LatentDiffusion:
        """Load a pipeline in the diffusers layout; see :func:`sd_lightning.loading.from_pretrained`."""
        from sd_lightning.loading import from_pretrained

        return from_pretrained(
            pretrained_model_name_or_path, revision=revision, variant=variant, vae=vae, deferred=deferred
        )

    @classmethod
    def describe(
        cls, pretrained_model_name_or_path: str | Path, *, revision: str | None = None, vae: str | Path | None = None
    ) -> LatentDiffusion:
        """Build a pipeline's networks on the meta device; see :func:`sd_lightning.loading.describe`."""
        from sd_lightning.loading import describe

        return describe(pretrained_model_name_or_path, revision=revision, vae=vae)

    def save_pretrained(self, folder: str | Path, *, skip: Sequence[str] = ()) -> None:
        """Write a pipeline folder in the diffusers layout; see :func:`sd_lightning.loading.save_pretrained`."""
        from sd_lightning.loading import save_pretrained

        save_pretrained(self, folder, skip=skip)

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
    def vae_scale_factor(self) -> int:
        """Image pixels per latent pixel along one side."""
        return scale_factor(self.components["vae"].config)

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
        """Return token ids (B, L), int64, padded and truncated, by text encoder; L may differ between encoders."""
        for caption in set(captions) - self._token_ids.keys():
            if len(self._token_ids) > 100_000:
                self._token_ids.clear()
            self._token_ids[caption] = self.family.tokenize(self.tokenizers, [caption])
        return {
            name: torch.cat([self._token_ids[caption][name] for caption in captions]) for name in self.text_encoders
        }

    def truncated(self, captions: Sequence[str]) -> list[bool]:
        """Return, for each caption, whether :meth:`tokenize` truncates it for any text encoder."""
        limits = [(tokenizer, tokenizer.model_max_length) for tokenizer in self.tokenizers.values()]
        long = {
            caption
            for caption in set(captions)
            for tokenizer, limit in limits
            if len(tokenizer(caption, truncation=True, max_length=limit + 1).input_ids) > limit
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
        parts = {**self.networks, **self.tokenizers, **dict.fromkeys(self.family.absent)}
        scheduler_object = self.sampling_scheduler(scheduler)
        pipeline = self.family.pipeline_type()(**parts, **self.pipeline_options, scheduler=scheduler_object)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def sampling_scheduler(self, name: str | None = None) -> Any:
        """Build the sampling scheduler: the model's own, or the one named.

        Raises:
            UsageError: diffusers has no such scheduler, or the model's pipeline cannot sample with it.
        """
        import diffusers

        component = self.components["scheduler"]
        class_name = component.class_name if name is None else scheduler_class(name)
        try:
            with said_once():
                scheduler = getattr(diffusers, class_name).from_config(dict(component.config))
        except Exception as error:  # a missing package, or values of unexpected types
            raise UsageError(f"scheduler={name or class_name}: cannot be built ({error}); choose another") from error
        if not self.family.samples_with(scheduler):
            raise UsageError(
                f"scheduler={name or class_name}: Stable Diffusion pipelines cannot sample with it; choose another, "
                "such as DDIMScheduler"
            )
        return scheduler

    def read_deferred(self, device: str | torch.device) -> None:
        """Read all deferred weights onto a device, each in the dtype that its parameter has now."""
        for name in list(self.deferred):
            self.deferred.pop(name).fill_(self.networks[name].eval(), torch.device(device))

    def check_is_read(self, who: str, *, skip: Sequence[str] = ()) -> None:
        """Check that no network, except those in ``skip``, has deferred weights.

        Raises:
            UsageError: Some are; the message names ``LatentDiffusion.<who>``.
        """
        names = sorted(self.deferred.keys() - set(skip))
        if names:
            raise UsageError(
                f"LatentDiffusion.{who}: the weights of {', '.join(names)} are read when a trainer is set up; call it "
                "after trainer.fit, or leave deferred= out of from_pretrained"
            )
