"""The one model definition: networks, tokenizers and noise schedule of a latent-diffusion model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models import assets
from sd_lightning.models.adapters.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.adapters.lora import adapted_weights, merged_state_dict
from sd_lightning.models.architectures import ARCHITECTURES, Architecture, Component, contradiction
from sd_lightning.models.conditioning import clip_conditioning, map_conditioning, sdxl_conditioning
from sd_lightning.models.pipeline_folder import (
    config_file,
    defer_network,
    file_keys,
    find_configs,
    find_folder,
    instantiate,
    load_network,
    load_tokenizer,
    meta_network,
    no_progress_bar,
    read_component,
    read_json,
    saved_config,
    weights_file,
    write_json,
)
from sd_lightning.models.sampling_schedulers import said_once, samples_stable_diffusion, scheduler_class
from sd_lightning.quantization.folder import load_int8_network, stored_int8
from sd_lightning.quantization.model import int8_config, int8_record
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.storage.streamed_tensor import write_tensors

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Conditioning = dict[str, Any]
"""Keyword arguments of the UNet besides ``sample`` and ``timestep``."""

_CONDITIONERS: dict[str, Callable[[Sequence[nn.Module], Mapping[str, Tensor]], Conditioning]] = {
    "StableDiffusionPipeline": clip_conditioning,
    "StableDiffusionXLPipeline": sdxl_conditioning,
}
_PARTS = {
    "StableDiffusionPipeline": ("unet", "vae", "text_encoder", "tokenizer"),
    "StableDiffusionXLPipeline": ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
}
# Written by save_pretrained beside the networks, never trained: what a pipeline's model_index names as absent.
_ABSENT = {"StableDiffusionPipeline": ("safety_checker", "feature_extractor", "image_encoder")}
# Arguments of the pipeline that are not parts. Captions are dropped to "" in training, so that is what a model built
# here is guided away from; the published SDXL models want zeros in its place.
_OPTIONS: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {"requires_safety_checker": False},
    "StableDiffusionXLPipeline": {"force_zeros_for_empty_prompt": False},
}


class LatentDiffusion:
    """A latent-diffusion model in parts, with a record of what each part is.

    Training, generation and everything later take this object. It is not an ``nn.Module``: which of its
    networks a trainer sees is decided by :class:`sd_lightning.SDLightningModule`.

    The record (`components`) keeps class names and configurations, because sharding engines rename the classes
    of live networks and an exported ``model_index.json`` must not show that.
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
        """Hold ready parts; use :meth:`build` or :meth:`from_pretrained` to get them.

        Args:
            networks: unet, vae, text_encoder and, for SDXL, text_encoder_2.
            tokenizers: tokenizer and, for SDXL, tokenizer_2.
            components: One record per network and one for "scheduler".
            pipeline_class: "StableDiffusionPipeline" or "StableDiffusionXLPipeline".
            pipeline_options: Arguments of the pipeline that are not parts.
        """
        _check_pipeline_class(pipeline_class, "LatentDiffusion")
        self.networks = dict(networks)
        self.tokenizers = dict(tokenizers)
        self.components = dict(components)
        self.pipeline_class = pipeline_class
        self.pipeline_options = {**_OPTIONS[pipeline_class], **(pipeline_options or {})}
        self.deferred: dict[str, DeferredWeights] = {}
        """Weights of networks that are on the meta device: strategies read them, and take them out of here."""
        self._token_ids: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ building and loading

    @classmethod
    def build(
        cls, architecture: str | Architecture, *, seed: int = 0, device: str | torch.device = "cpu"
    ) -> LatentDiffusion:
        """Build a model from its configuration, with random weights.

        The ``tiny`` model gets the trained VAE that ships with the package. Without downloads there is no CLIP
        vocabulary, so every architecture gets the shipped byte-level tokenizer.

        Args:
            architecture: "tiny", "sd15", "sd21", "sdxl" or an :class:`Architecture`.
            seed: Seed of the random weights; the global generator is left as it was.
            device: Where the weights are made; "meta" makes none.

        Raises:
            UsageError: The name is not known.
        """
        from transformers import CLIPTokenizer

        name = architecture if isinstance(architecture, str) else "custom"
        if isinstance(architecture, str):
            if architecture not in ARCHITECTURES:
                raise UsageError(
                    f"LatentDiffusion.build got architecture={architecture!r}; expected one of "
                    f"{', '.join(ARCHITECTURES)}"
                )
            architecture = ARCHITECTURES[architecture]
        tokenizer = CLIPTokenizer.from_pretrained(assets.TINY_TOKENIZER, model_max_length=architecture.max_length)
        components = copy.deepcopy(architecture.networks)  # the model's record may be changed
        for key in [k for k in components if k.startswith("text_encoder")]:
            ids = {f"{t}_token_id": getattr(tokenizer, f"{t}_token_id") for t in ("bos", "eos", "pad")}
            config = {"vocab_size": len(tokenizer), **components[key].config, **ids}
            components[key] = Component("transformers", components[key].class_name, config)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            networks = {key: instantiate(component) for key, component in components.items()}
            if architecture.token_embedding_std is not None:
                embedding = networks["text_encoder"].get_input_embeddings().weight  # type: ignore[operator]
                nn.init.normal_(embedding, std=architecture.token_embedding_std)
        if name == "tiny" and torch.device(device).type != "meta":
            networks["vae"], components["vae"] = load_network(components["vae"], assets.TINY_VAE)
        names = [k.replace("text_encoder", "tokenizer") for k in components if k.startswith("text_encoder")]
        return cls(
            networks,
            tokenizers=dict.fromkeys(names, tokenizer),
            components={**components, "scheduler": architecture.scheduler},
            pipeline_class=architecture.pipeline_class,
        )

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
        """Load a pipeline in the diffusers layout: in float32, or in int8 if it was saved so.

        Adapters that a run with ``trainable=lora`` has saved in the folder are added to the weights.

        Args:
            pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
            revision: Branch, tag or commit on the hub.
            variant: File variant, e.g. "fp16".
            vae: Another VAE (a folder or repository id), e.g. "madebyollin/sdxl-vae-fp16-fix".
            deferred: Networks to build on the meta device: their weights stay in their files until a trainer is set
                up, when every process reads what it keeps of them. Until then they cannot compute. Names that the
                pipeline does not have are left out of account.

        Raises:
            UsageError: There is no such pipeline, or a part of it is missing or unreadable.
        """
        root = find_folder(pretrained_model_name_or_path, revision=revision, variant=variant)
        weights: dict[str, DeferredWeights] = {}
        adapters = (root / LORA_NAME).is_file()

        def load(name: str, component: Component, pipeline_class: str) -> tuple[nn.Module, Component]:
            if name == "vae" and vae is not None:
                return load_network(component, Path(vae))
            if (int8 := stored_int8(root / name)) is not None:
                return load_int8_network(component, root / name, int8, pipeline_class=pipeline_class, variant=variant)
            if name in deferred and not adapters:
                network, described, weights[name] = defer_network(component, root / name, variant=variant)
                return network, described
            return load_network(component, root / name, variant=variant)

        model = cls._from_folder(root, load)
        model.deferred = weights
        if adapters:
            model._add_adapters(root)
        return model

    @classmethod
    def describe(
        cls, pretrained_model_name_or_path: str | Path, *, revision: str | None = None, vae: str | Path | None = None
    ) -> LatentDiffusion:
        """Build the networks of a pipeline on the meta device, from its configuration files: all sizes, no weights.

        Args:
            pretrained_model_name_or_path: A folder with ``model_index.json``, or a repository id of the hub.
            revision: Branch, tag or commit on the hub.
            vae: Another VAE (a folder or repository id).

        Raises:
            UsageError: There is no such pipeline, or a part of it is missing or unreadable.
        """
        root = find_configs(pretrained_model_name_or_path, revision=revision)
        return cls._from_folder(
            root, lambda name, part, _: meta_network(part, root / name if vae is None or name != "vae" else Path(vae))
        )

    @classmethod
    def _from_folder(
        cls, root: Path, load: Callable[[str, Component, str], tuple[nn.Module, Component]]
    ) -> LatentDiffusion:
        """Make a model of a pipeline folder; ``load`` makes each network of its name, record and pipeline class."""
        index = read_json(root / "model_index.json")
        pipeline_class = str(index.get("_class_name"))
        _check_pipeline_class(pipeline_class, str(root))
        scheduler = read_json(root / "scheduler" / "scheduler_config.json")
        networks: dict[str, nn.Module] = {}
        components: dict[str, Component] = {}
        tokenizers: dict[str, Any] = {}
        records = {name: read_component(index, name, root) for name in _PARTS[pipeline_class]}
        for name, component in records.items():
            if name.startswith("tokenizer"):
                tokenizers[name] = load_tokenizer(root / name)
            else:
                networks[name], components[name] = load(name, component, pipeline_class)
        components["scheduler"] = Component("diffusers", scheduler.pop("_class_name"), scheduler)
        zeros = "force_zeros_for_empty_prompt"
        options = {zeros: index.get(zeros, True)} if zeros in _OPTIONS[pipeline_class] else None
        return cls(
            networks,
            tokenizers=tokenizers,
            components=components,
            pipeline_class=pipeline_class,
            pipeline_options=options,
        )

    # ------------------------------------------------------------------ parts

    @property
    def unet(self) -> Any:
        return self.networks["unet"]

    @property
    def vae(self) -> Any:
        return self.networks["vae"]

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        return {k: v for k, v in self.networks.items() if k.startswith("text_encoder")}

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """Configuration of the noise schedule and the sampling scheduler."""
        return self.components["scheduler"].config

    @cached_property
    def condition(self) -> Callable[[Sequence[nn.Module], Mapping[str, Tensor]], Conditioning]:
        """Function (text encoders, batch) -> keyword arguments of the UNet; see :mod:`sd_lightning.models.conditioning`."""
        return _CONDITIONERS[self.pipeline_class]

    @property
    def resolution(self) -> int:
        """Side of the images the model was made for, pixels."""
        return int(self.components["unet"].config["sample_size"]) * self.vae_scale_factor

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent cell along one side."""
        return int(2 ** (len(self.components["vae"].config["block_out_channels"]) - 1))

    def use_scheduler(self, overrides: Mapping[str, Any]) -> None:
        """Change the scheduler that exported pipelines sample with.

        Args:
            overrides: Configuration entries; a ``_class_name`` replaces the scheduler's class.
        """
        old = self.components["scheduler"]
        config = {**old.config, **overrides}
        class_name = config.pop("_class_name", old.class_name)
        self.components["scheduler"] = Component("diffusers", class_name, config)

    def meta_networks(self, names: Sequence[str]) -> dict[str, nn.Module]:
        """Return copies of the named networks on the meta device: shapes without storage."""
        with torch.device("meta"):
            return {name: instantiate(self.components[name]).eval() for name in names}

    def unused_parameters(self) -> dict[str, list[str]]:
        """Return, per text encoder, the parameters that the conditioning does not depend on.

        SDXL takes the penultimate hidden states and so leaves the last layer of its first encoder out. Such a
        parameter never has a gradient, which DistributedDataParallel waits for.
        """
        networks = self.meta_networks(tuple(self.text_encoders))
        length = next(iter(self.tokenizers.values())).model_max_length
        with torch.device("meta"):
            sizes = {name: torch.empty(1, 2) for name in ("original_size", "crop_top_left", "target_size")}
            input_ids = torch.empty(1, len(networks), length, dtype=torch.int64)
            conditioning = self.condition(list(networks.values()), {"input_ids": input_ids, **sizes})
        sums: list[Tensor] = []
        map_conditioning(conditioning, lambda tensor: sums.append(tensor.sum()))
        sum(sums, torch.zeros((), device="meta")).backward()
        return {
            name: [key for key, parameter in network.named_parameters() if parameter.grad is None]
            for name, network in networks.items()
        }

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Return token ids (B, E, L), int64, for B captions, E text encoders and L tokens, padded and truncated."""
        for caption in set(captions) - self._token_ids.keys():
            if len(self._token_ids) > 100_000:
                self._token_ids.clear()
            rows = [
                tokenizer(
                    caption,
                    padding="max_length",
                    truncation=True,
                    max_length=tokenizer.model_max_length,
                    return_tensors="pt",
                ).input_ids[0]
                for tokenizer in self.tokenizers.values()
            ]
            self._token_ids[caption] = torch.stack(rows)
        return torch.stack([self._token_ids[caption] for caption in captions])

    def truncated(self, captions: Sequence[str]) -> list[bool]:
        """Tell of each caption whether :meth:`tokenize` cuts it for one of the text encoders."""
        limits = [(tokenizer, tokenizer.model_max_length) for tokenizer in self.tokenizers.values()]
        long = {
            caption
            for caption in set(captions)
            for tokenizer, limit in limits
            if len(tokenizer(caption, truncation=True, max_length=limit + 1).input_ids) > limit
        }
        return [caption in long for caption in captions]

    def forget_tokens(self) -> None:
        """Tokenize captions anew: a tokenizer has changed."""
        self._token_ids.clear()

    # ------------------------------------------------------------------ pipelines

    def pipeline(self, *, scheduler: str | None = None) -> DiffusionPipeline:
        """Return a diffusers pipeline around these very networks (no copies).

        Args:
            scheduler: Class name or short name ("ddim", "euler", "dpmsolver++", …) of another scheduler.
        """
        import diffusers

        self._check_is_read("pipeline")
        cls = getattr(diffusers, self.pipeline_class)
        absent = dict.fromkeys(_ABSENT.get(self.pipeline_class, ()))
        parts = {**self.networks, **self.tokenizers, **absent}
        pipeline = cls(**parts, **self.pipeline_options, scheduler=self.sampling_scheduler(scheduler))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def sampling_scheduler(self, name: str | None = None) -> Any:
        """Build the scheduler that images are sampled with.

        Raises:
            UsageError: diffusers has no such scheduler, or it is not one for Stable Diffusion.
        """
        import diffusers

        component = self.components["scheduler"]
        class_name = component.class_name if name is None else scheduler_class(name)
        try:
            with said_once():
                scheduler = getattr(diffusers, class_name).from_config(dict(component.config))
        except (ImportError, TypeError, ValueError, KeyError) as error:  # a missing package, arguments of its own
            raise UsageError(f"scheduler={name or class_name}: cannot be built ({error}); choose another") from error
        if not samples_stable_diffusion(scheduler):
            raise UsageError(
                f"scheduler={name or class_name}: Stable Diffusion pipelines cannot sample with it; choose another, "
                "such as DDIMScheduler"
            )
        return scheduler

    def _add_adapters(self, folder: Path) -> None:
        """Add the adapters of ``pytorch_lora_weights.safetensors`` to the weights."""
        pipeline: Any = self.pipeline()
        try:
            with no_progress_bar():
                pipeline.load_lora_weights(folder, weight_name=LORA_NAME)
                pipeline.fuse_lora()
                pipeline.unload_lora_weights()
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{folder / LORA_NAME}: these adapters do not fit the model beside them ({reason}); copy the file "
                "again, or delete it to load the model without"
            ) from error

    def save_pretrained(self, folder: str | Path, *, skip: Sequence[str] = ()) -> None:
        """Write a pipeline folder in the diffusers layout (safetensors).

        Args:
            folder: Written into; made if it does not exist.
            skip: Networks whose weights are left out (their configuration is written).
        """
        self._check_is_read("save_pretrained", skip=skip)
        self._check_can_merge()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, tokenizer in self.tokenizers.items():
            tokenizer.save_pretrained(folder / name)
        index: dict[str, Any] = {"_class_name": self.pipeline_class, "_diffusers_version": version("diffusers")}
        index |= {name: [None, None] for name in _ABSENT.get(self.pipeline_class, ())}
        index |= {name: ["transformers", "CLIPTokenizer"] for name in self.tokenizers}
        index |= self.pipeline_options
        for name, component in self.components.items():
            index[name] = [component.library, component.class_name]
            (folder / name).mkdir(exist_ok=True)
            record = int8_record(self.networks[name]) if name in self.networks else {}
            write_json(folder / name / config_file(component, name), saved_config(component) | record)
            if name in self.networks and name not in skip:
                state = merged_state_dict(self.networks[name])
                _check_is_in_memory(name, state)
                keys = file_keys(component, state)
                write_tensors(folder / name / weights_file(component), {keys[k]: v for k, v in state.items()})
        write_json(folder / "model_index.json", index)

    def _check_can_merge(self) -> None:
        """Raise if a network is in int8, which has no place for what an adapter adds."""
        names = sorted(n for n, network in self.networks.items() if int8_config(network) and adapted_weights(network))
        if names:
            raise UsageError(
                f"LatentDiffusion.save_pretrained: {', '.join(names)} in int8 with LoRA on top; save the model with "
                "LoRA first, then load and quantize_ it, or take LoRA off"
            )

    def read_deferred(self, device: str | torch.device) -> None:
        """Read the weights that are still in their files onto a device, each in the type that it has by now."""
        for name in list(self.deferred):
            self.deferred.pop(name).fill_(self.networks[name].eval(), torch.device(device))

    def _check_is_read(self, who: str, *, skip: Sequence[str] = ()) -> None:
        """Raise if weights that are needed are still in their files."""
        names = sorted(self.deferred.keys() - set(skip))
        if names:
            raise UsageError(
                f"LatentDiffusion.{who}: the weights of {', '.join(names)} are read when a trainer is set up; call it "
                "after trainer.fit, or leave deferred= out of from_pretrained"
            )


def _check_is_in_memory(network: str, state: Mapping[str, torch.Tensor]) -> None:
    """Raise if an engine has taken the memory of weights."""
    for name, tensor in state.items():
        if type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UsageError(
                f"save_pretrained: {network}.{name} is in shards of the training strategy; use the folder pipeline/ of "
                "a checkpoint, or call trainer.strategy.engine.restore() in every process before"
            )


def load_model(
    *,
    architecture: str,
    pretrained: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    vae: str | None = None,
    seed: int = 0,
    deferred: Sequence[str] = (),
) -> LatentDiffusion:
    """Load pretrained weights if they are named, otherwise build the architecture with random ones.

    Random weights are made in every process and are then there: ``deferred`` is about files.

    Raises:
        UsageError: Options of pretrained weights without ``pretrained``, or what :func:`check_pretrained` and the two
            constructors raise.
    """
    if pretrained is not None:
        check_pretrained(architecture, pretrained, revision=revision)
        return LatentDiffusion.from_pretrained(
            pretrained, revision=revision, variant=variant, vae=vae, deferred=deferred
        )
    given = {k: v for k, v in {"revision": revision, "variant": variant, "vae": vae}.items() if v is not None}
    if given:
        raise UsageError(
            f"model got {', '.join(f'{k}={v}' for k, v in given.items())} without pretrained weights; "
            "add model.pretrained=<hub id or folder>"
        )
    return LatentDiffusion.build(architecture, seed=seed)


def check_pretrained(architecture: str, pretrained: str, *, revision: str | None = None) -> None:
    """Refuse to train a pipeline that another ``model=`` names, or whose weights are in int8; reads configurations.

    Raises:
        UsageError: It is one, or there is no such pipeline.
    """
    if architecture not in ARCHITECTURES:
        raise UsageError(f"model got architecture={architecture!r}; expected one of {', '.join(ARCHITECTURES)}")
    root = find_configs(pretrained, revision=revision)
    pipeline_class = str(read_json(root / "model_index.json").get("_class_name"))
    _check_pipeline_class(pipeline_class, str(root))
    found = contradiction(architecture, pipeline_class, read_json(root / "unet" / "config.json"))
    if found is not None:
        raise UsageError(f"model={architecture}, but {pretrained} holds {found[0]}; write model={found[1]}")
    if any(stored_int8(root / name) for name in _PARTS[pipeline_class]):
        raise UsageError(
            f"model.pretrained={pretrained}: its weights are in int8, which cannot be trained; give the pipeline that "
            "it was made from"
        )


def _check_pipeline_class(name: str, who: str) -> None:
    if name not in _CONDITIONERS:
        raise UsageError(
            f"{who}: got a {name}; expected {' or '.join(_CONDITIONERS)}; give a Stable Diffusion 1.x, 2.x or XL "
            "pipeline"
        )
