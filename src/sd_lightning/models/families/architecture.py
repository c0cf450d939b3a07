"""Architectures: the classes and configurations of a model's parts."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Component:
    """The record of a part of a model, as in a pipeline folder: library, class and configuration."""

    library: str
    """Module of the class: "diffusers", "transformers"."""
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_of_transformers(self) -> bool:
        return self.library == "transformers"

    @property
    def weights_file(self) -> str:
        """Name of a network's weight file in a pipeline folder."""
        return "model.safetensors" if self.is_of_transformers else "diffusion_pytorch_model.safetensors"

    def load_class(self) -> Any:
        """Return the class; importing its library may take seconds."""
        # Published pipelines name classes of image processors as transformers did before version 5.
        name = self.class_name.replace("FeatureExtractor", "ImageProcessor")
        return getattr(importlib.import_module(self.library), name)

    def instantiate(self, *, seed: int | None = None) -> nn.Module:
        """Build a network from its configuration, with random weights.

        Args:
            seed: Seed of the weights, drawn without a change of the global generator; None draws from that one.
        """
        if seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.instantiate()
        cls = self.load_class()
        return cls(cls.config_class(**self.config)) if self.is_of_transformers else cls.from_config(dict(self.config))

    def saved_config(self) -> dict[str, Any]:
        """Return the JSON content of the configuration file."""
        if not self.is_of_transformers:
            return {**self.config, "_class_name": self.class_name, "_diffusers_version": version("diffusers")}
        model_type = self.load_class().config_class.model_type
        return {"architectures": [self.class_name], "model_type": model_type, **self.config}

    def file_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Map the tensor names of a network in memory to the keys in its weight file.

        transformers 5 dropped the ``text_model.`` prefix of ``CLIPTextModel`` in memory and reads files with or
        without it. Files on the hub and all other front ends have it, so we write it.
        """
        prefix = "text_model." if self.class_name == "CLIPTextModel" else ""
        return {name: name if name.startswith("text_model.") else prefix + name for name in names}


@dataclass(frozen=True)
class Part:
    """The classes allowed for a part of a pipeline; a ``model_index.json`` that names another one is refused."""

    library: str
    classes: tuple[str, ...]
    """Allowed class names; tokenizers that ship with the package are of the first."""
    loads: str | None = None
    """Class that reads the files instead: of a processor, the tokenizer alone."""

    def record_of(self, tokenizer: Any) -> tuple[str, str]:
        """Return library and class of a tokenizer, as in ``model_index.json``."""
        known = (name for name in self.classes if type(tokenizer) is Component(self.library, name).load_class())
        return self.library, next(known, self.classes[0])


@dataclass(frozen=True)
class Architecture:
    """A model configuration that can be built without files."""

    pipeline_class: str
    """Selects the family."""
    networks: Mapping[str, Component]
    scheduler: Component
    max_length: int | Mapping[str, int] = 77
    """Tokens per caption; a mapping by text encoder if they differ."""
    pipeline_options: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments of the pipeline, where they are not the family's."""
    is_tiny: bool = False
    """Whether it is small, for tests and digits; it tells captions apart before training, by large random token
    embeddings. :meth:`LatentDiffusion.build` gives its VAE the trained weights that
    ship with the package, if it is given by name."""
    shipped_vae: str = "vae"
    """Folder of these weights."""
    licence: str = ""
    """Of the published weights: "Apache 2.0". Said when they are loaded; "" where none are published."""

    known_as: tuple[str, str] = ("", "")
    """Where other programs have names for it: that of ``modelspec.architecture``, and kohya's version of the model."""
    hub_licence: Mapping[str, str] = field(default_factory=dict)
    """The same licence in the words of model cards: ``license``, and of others' licences its name and link."""

    def length_of(self, text_encoder: str) -> int:
        """Return the number of tokens per caption of a text encoder."""
        return self.max_length if isinstance(self.max_length, int) else self.max_length[text_encoder]


@functools.cache
def shipped_architectures() -> dict[str, Architecture]:
    """Return the architectures of ``models/architectures/`` by the names of their files, tiny ones first."""
    files = sorted(Path(__file__).parents[1].glob("architectures/*.json"))
    read = {file.stem: Architecture(**json.loads(file.read_text(), object_hook=_components)) for file in files}
    return dict(sorted(read.items(), key=lambda item: not item[1].is_tiny))


def _components(content: dict[str, Any]) -> Any:
    return Component(**content) if "library" in content else content
