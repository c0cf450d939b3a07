"""A run, resolved once: what Hydra composed, as plain settings and the objects that are built from them."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning.storage import checkpoint, far_runs

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import Strategy

    from sd_lightning.data.preservation import Preservation
    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.models.learned_token import LearnedToken
    from sd_lightning.models.lora import Lora
    from sd_lightning.planner.checkpointing import Recomputation
    from sd_lightning.remote import launchers
    from sd_lightning.training.module import OptimizerFactory, SchedulerFactory
    from sd_lightning.training.speed import Speed

AUTO = "auto"
_ABSENT = object()
_PATHS = ("dir", "path", "file")
"""Ends of the names of settings that are paths."""
_PLACES = ("resume", "init_from", "init_lora", "init", "pretrained", "vae", "store", "dataset_name", "config")
"""Settings that may be paths, or names on a hub."""
OF_PRETRAINED = ("pretrained", "revision", "variant", "vae")
"""Arguments of ``load_model`` that name a pretrained model."""


@dataclass(frozen=True)
class ModelSource:
    """Where the model of a run comes from; reading it may take minutes, so it is built when it is asked for."""

    builder: _conf.Builder

    @cached_property
    def is_ours(self) -> bool:
        """Whether our :func:`load_model` builds it; users' own functions need not take its options."""
        from sd_lightning.models.latent_diffusion import load_model

        return self.builder.target is load_model

    @property
    def target(self) -> str:
        """Dotted name of the function."""
        return str(self.builder.node["_target_"])

    def get(self, name: str) -> Any:
        """Return an argument of the function; None if it is not set."""
        return self.builder.arguments.get(name)

    def check(self, trained_text: Mapping[str, bool] | None = None) -> None:
        """Check that a pretrained pipeline has the architecture of ``model=``, before slow work on data or pictures.

        Args:
            trained_text: What text encoders are trained for; see :meth:`Family.check_trained_text`.

        Raises:
            UsageError: The pipeline has another architecture, or it or its text encoders cannot be trained; or there is
                none, and a setting is meant for it.
        """
        if not self.is_ours:
            return
        if self.get("pretrained") is None:
            from sd_lightning.models.latent_diffusion import check_unused

            check_unused(**{key: self.get(key) for key in (*OF_PRETRAINED, "fresh_denoiser")})
        else:
            from sd_lightning.models.loading import check_pretrained

            check_pretrained(self.get("architecture"), self.get("pretrained"), revision=self.get("revision"))
        if trained_text is not None:
            from sd_lightning.models.families import architecture, family_of

            family = family_of(architecture(self.get("architecture")).pipeline_class, who="model")
            family.check_trained_text(**trained_text)

    def describe(self) -> LatentDiffusion:
        """Return the model without weights, on the meta device."""
        from sd_lightning.models.latent_diffusion import LatentDiffusion

        if self.get("pretrained") is None:
            return LatentDiffusion.build(self.get("architecture"), device="meta")
        return LatentDiffusion.describe(self.get("pretrained"), revision=self.get("revision"), vae=self.get("vae"))


@dataclass(frozen=True)
class RunSpec:
    """A run of a training program.

    :meth:`of` ends Hydra. From there on nothing changes: :meth:`with_settings` returns another run, with the objects
    of sections that differ built anew. Each object is built once, when it is first asked for; a section that cannot
    be built raises a UsageError then. A run can be pickled: the other process builds its own objects.
    """

    settings: Mapping[str, Any]
    """What ``config.yaml`` says: sections by name, plain values, nothing left to interpolate."""
    overridden: frozenset[str] = frozenset()
    """Keys and groups that the command line sets, not the defaults."""
    resume: Path | None = None
    """The checkpoint that is continued."""
    resumed_batch: int | None = None
    """Samples per step of the run that is continued."""
    recomputation: Recomputation | None = None
    """What blocks keep for backward, if ``speed.gradient_checkpointing`` is a limit."""
    _built: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, cfg: Any) -> Self:
        """Return the run of a composed configuration and of this process's command line."""
        from omegaconf import OmegaConf

        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        place = settings.get("output_dir")
        if isinstance(place, str) and "://" in place and not place.startswith("file://"):
            if len(place.strip("/").split("/")) < 4:
                refuse("output_dir", place, "a folder in a bucket", f"{place.rstrip('/')}/runs/a")
            starts = {key: settings[key] for key in ("resume", "init_from") if key in settings}  # others' runs
            settings = _replaced(settings, place, str(far_runs.working_folder(place))) | starts
        return cls(settings, frozenset(_conf.overridden_keys()))

    def __getitem__(self, path: str) -> Any:
        """Return the setting or section at a dotted path.

        Raises:
            UsageError: There is none: the command line has removed it.
        """
        value = self.get(path, _ABSENT)
        if value is _ABSENT:
            raise UsageError(f"{path} is missing: expected a value; leave it as it was, without ~{path}")
        return value

    def get(self, path: str, default: Any = None) -> Any:
        """Return the setting or section at a dotted path, or a default."""
        node: Any = self.settings
        for key in path.split("."):
            node = node.get(key, _ABSENT) if isinstance(node, Mapping) else _ABSENT
        return default if node is _ABSENT else node

    def with_settings(self, changes: Mapping[str, Any]) -> RunSpec:
        """Return this run with other values at dotted paths; what is built from other sections is kept."""
        settings: Any = copy.deepcopy(self.settings)
        for path, value in changes.items():
            *sections, key = path.split(".")
            node = settings
            for each in sections:
                node = node[each]
            node[key] = value
        changed = {path.partition(".")[0] for path in changes}
        return dataclasses.replace(self, settings=settings, _built=self._built_without(changed))

    def with_absolute_paths(self) -> RunSpec:
        """Return this run for processes with another working directory.

        Absolute become ``…dir``, ``…path`` and ``…file`` settings, what lies in ``output_dir``, and names of models,
        data and files that exist on this disk; not URLs.
        """
        inside = f"{self['output_dir']}{os.sep}"

        def absolute(node: Any, key: str = "") -> Any:
            if isinstance(node, Mapping):
                return {name: absolute(each, str(name)) for name, each in node.items()}
            if isinstance(node, list):
                return [absolute(each, key) for each in node]
            if not isinstance(node, str) or not node or "://" in node:
                return node
            is_path = key.endswith(_PATHS) or node.startswith(inside) or (key in _PLACES and os.path.exists(node))
            return os.path.abspath(node) if is_path else node

        return dataclasses.replace(self, settings=absolute(self.settings), _built={})

    def resuming(self, checkpoint: Path, *, batch_size: int) -> RunSpec:
        """Return this run as the continuation of a checkpoint, of a run with a batch size."""
        built = self._built_without({"callbacks"})
        return dataclasses.replace(self, resume=checkpoint, resumed_batch=batch_size, _built=built)

    def _built_without(self, sections: set[str]) -> dict[str, Any]:
        return {name: each for name, each in self._built.items() if name not in sections}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": {}}

    def _part(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self.build(name)
        return self._built[name]

    def build(self, path: str, **kwargs: Any) -> Any:
        """Build the object of a section; keyword arguments override the section's; None if there is no section."""
        value = self.get(path)
        return None if value is None else _conf.instantiate(_conf.section(path, value), **kwargs)

    @property
    def strategy(self) -> Strategy | str:
        """The strategy; "auto" is Lightning's for one process."""
        return self._part("strategy")

    @property
    def objective(self) -> Objective:
        return self._part("objective")

    @property
    def optimizer(self) -> OptimizerFactory:
        """Parameter groups -> optimizer: a :class:`~sd_lightning._conf.Builder` if the section is ``_partial_``."""
        return self._part("optimizer")

    @property
    def lr_scheduler(self) -> SchedulerFactory:
        """Optimizer -> learning-rate scheduler; a :class:`~sd_lightning._conf.Builder` like the optimizer."""
        return self._part("lr_scheduler")

    @property
    def speed(self) -> Speed:
        return self._part("speed")

    @property
    def launcher(self) -> launchers.Local | launchers.Ray:
        """Who starts the processes."""
        return self._part("launcher")

    @property
    def lora(self) -> Lora | None:
        return self._part("lora")

    @property
    def trained_text(self) -> dict[str, bool]:
        """What text encoders are trained for, as :meth:`Family.check_trained_text` takes it."""
        train_text_encoder = bool(self.get("module.train_text_encoder"))
        return {"train_text_encoder": train_text_encoder, "learns_token": bool(self.get("learned_token"))}

    @property
    def learned_token(self) -> LearnedToken | None:
        return self._part("learned_token")

    @property
    def preservation(self) -> Preservation | None:
        return self._part("preservation")

    @property
    def model(self) -> ModelSource:
        if "model" not in self._built:
            self._built["model"] = ModelSource(_conf.builder(_conf.section("model", self["model"])))
        return self._built["model"]

    @property
    def can_defer(self) -> bool:
        """Whether weights may be read when the strategy has placed the networks, not with the model.

        A checkpoint of Lightning's is loaded into whole weights, and Lightning's averages copy the module before a
        strategy has read them.
        """
        return self.model.is_ours and not self.starts_from_lightning and not self.averages_by_lightning

    def load_model(self, *, deferred: Sequence[str]) -> LatentDiffusion:
        """Build or load the model.

        Args:
            deferred: Networks whose weights are read later or never, where that is possible.
        """
        return self.model.builder(**({"deferred": tuple(deferred)} if self.can_defer else {}))

    @property
    def callbacks(self) -> Mapping[str, Callback]:
        """The callbacks, by name, of a run that :func:`~sd_lightning.apps.preflight.preflight` has looked at."""
        if "callbacks" not in self._built:
            names = [name for name, node in (self.get("callbacks") or {}).items() if node is not None]
            resume = {"checkpoint": {"resume": self.resume}}
            self._built["callbacks"] = {n: self.build(f"callbacks.{n}", **resume.get(n, {})) for n in names}
        return self._built["callbacks"]

    @property
    def output_dir(self) -> Path:
        """Folder of the run; on this machine, also if the run is in a bucket."""
        return Path(self["output_dir"])

    @property
    def url(self) -> str | None:
        """Where the run is if ``output_dir`` is in an object store."""
        return far_runs.url_of(self.output_dir)

    @property
    def starts_from_lightning(self) -> bool:
        """Whether ``init_from`` is a checkpoint of Lightning."""
        return str(self.get("init_from") or "").endswith(checkpoint.LIGHTNING_SUFFIX)

    @property
    def averages_by_lightning(self) -> bool:
        """Whether a callback of Lightning's averages the weights: ``WeightAveraging`` or ``EMAWeightAveraging``."""
        from lightning.pytorch.callbacks import WeightAveraging

        return any(isinstance(callback, WeightAveraging) for callback in self.callbacks.values())

    @property
    def cuda_devices(self) -> int:
        """Number of CUDA devices that the run may use."""
        import torch

        return torch.cuda.device_count() if self["trainer.accelerator"] in ("auto", "cuda", "gpu") else 0

    @property
    def devices(self) -> int:
        """Number of processes on each machine.

        Raises:
            UsageError: ``trainer.devices`` is no number of devices.
        """
        devices = self["trainer.devices"]
        if devices in ("auto", -1, "-1"):
            return max(self.cuda_devices, 1)
        if isinstance(devices, int | str):
            number = int(devices) if isinstance(devices, int) or devices.isdecimal() else 0
        else:
            number = len(devices)
        if number < 1:
            refuse("trainer.devices", devices, "a number of at least 1, a list of indices, or auto", "1")
        return number

    @property
    def num_processes(self) -> int:
        """Number of processes on all machines."""
        return self.devices * int(self["trainer.num_nodes"])

    def left_to_planner(self) -> list[str]:
        """Return the settings that the planner chooses: ``["strategy=auto", "data.batch_size=auto"]``, or fewer."""
        is_auto = {"strategy": self.chooses_strategy, "data.batch_size": self["data.batch_size"] == AUTO}
        return [f"{name}=auto" for name, each in is_auto.items() if each]

    @property
    def chooses_strategy(self) -> bool:
        """Whether ``strategy=auto`` is to choose another strategy."""
        from sd_lightning.strategies import AutoStrategy

        return isinstance(self.strategy, AutoStrategy)

    def yaml(self) -> str:
        """Return the settings as ``config.yaml``."""
        from omegaconf import OmegaConf

        settings = _replaced(self.settings, self["output_dir"], far_runs.name_of(self["output_dir"]))
        return OmegaConf.to_yaml(OmegaConf.create(dict(settings)))


def _replaced(node: Any, old: str, new: str) -> Any:
    """Return settings in which a run has another folder; also the folder for class images, which lies beside it."""
    if isinstance(node, Mapping):
        return {key: _replaced(value, old, new) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, old, new) for value in node]
    return new if node == old else f"{new}-class-images" if node == f"{old}-class-images" else node


def target_of(factory: Callable[..., Any]) -> Any:
    """Return what a factory builds: the class or function of a ``_partial_`` section, or the factory itself."""
    return factory.target if isinstance(factory, _conf.Builder) else factory


def refuse(setting: str, value: Any, expected: str, remedy: str) -> None:
    """Raise an error for a value.

    Raises:
        UsageError: Always.
    """
    raise UsageError(f"{setting}={value}: expected {expected}; write {setting}={remedy}")
