"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft, trained instead of a network's own weights, and their file.

In memory peft wraps each adapted layer: ``to_q.weight`` becomes ``to_q.base_layer.weight`` beside
``to_q.lora_A.default.weight`` and ``to_q.lora_B.default.weight``. Weight files have only the plain names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models import lycoris
from sd_lightning.models.families import Component, Family
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.models.lora_layers import expanded, is_adapter, layer_names, longest, matching, name_parts
from sd_lightning.quantization.base import Base, fill_base_, original_shape, quantize_base_
from sd_lightning.quantization.int8 import row_reader
from sd_lightning.quantization.layers import Int8Conv2d, Part, int8_layers
from sd_lightning.quantization.tensor_parallel import check_is_whole
from sd_lightning.storage.deferred_weights import Adapter, Change, DeferredWeights, Factors
from sd_lightning.storage.streamed_tensor import write_tensors

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
"""File name that diffusers uses."""
METADATA = "lora_adapter_metadata"
"""Key that diffusers uses for the adapters' settings in the file's header."""
SCALE = "sd_lightning_lora_scale"
"""Key of the header: ``alpha / rank`` of the training, which the file's ``lora_B`` include."""
SCALES = "sd_lightning_lora_scales"
"""Key of the header: the same of layers where it is another, by network and layer: ``unet.mid_block…``."""
BASE = "sd_lightning_lora_base"
"""Key of the header: what the frozen weights were quantised to in the training, if they were."""
BASE_VALUES = "sd_lightning_lora_base_values"
"""Key of the header: the first values of some of the weights that the adapters were trained on, by name."""
_ADAPTER = "default"
MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class Lora:
    """Settings of the adapters, and the layers that get them."""

    type: lycoris.Kind = "lora"
    """What is trained of each layer's change: LoRA, or LoHa or LoKr of LyCORIS (arXiv 2309.14859)."""
    rank: int = 4
    alpha: float | None = None
    """The adapters' output is scaled by ``alpha / rank``; equals the layer's rank if not given."""
    rank_pattern: Mapping[str, int] | None = None
    """Ranks of layers by a part of their names between dots, "attn2" or "unet.down_blocks.0", ``*`` for any number. The
    longest pattern wins; 0 leaves layers out."""
    alpha_pattern: Mapping[str, float] | None = None
    """The same for ``alpha``."""
    dropout: float = 0.0
    target_modules: tuple[str, ...] | list[str] | None = None
    """Name endings of the denoiser's layers that get adapters, ``*`` for any number; None for the family's own; empty
    for adapters of text encoders alone."""
    text_encoder_target_modules: tuple[str, ...] | list[str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    """The same for text encoders, if they are trained."""
    merge: bool = False
    """Whether exported pipelines have the adapters merged into their weights instead of in a separate file."""
    base: Base | None = None
    """What the denoiser's frozen weights are quantised to while they are read: "int8" or "nf4"; None: they are not.
    Exported pipelines, also with ``merge``, have the original weights."""
    use_dora: bool = False
    """Also train the magnitude of each output of the adapted layers (DoRA, arXiv 2402.09353)."""
    seed: int = 0
    init: str | Path | None = None
    """LoRA file whose adapters the training goes on from. Rank, alpha and layers have to be the file's:
    :func:`~sd_lightning.models.lora_start.going_on` gives settings that are."""

    def __post_init__(self) -> None:
        if self.type not in get_args(lycoris.Kind):
            raise UsageError(f"lora got type={self.type}; expected lora, loha or lokr; write lora.type=lora")
        unlike = {"base": self.base, "use_dora": self.use_dora, "dropout": self.dropout}
        if self.type != "lora" and (given := [f"{name}={value}" for name, value in unlike.items() if value]):
            raise UsageError(
                f"lora got type={self.type} and {given[0]}, which only LoRA has here; leave "
                f"{given[0].partition('=')[0]} out, or write lora.type=lora"
            )
        if self.base not in (None, *get_args(Base)):
            raise UsageError(f"lora got base={self.base}; expected int8, nf4 or null; write base=nf4")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"lora got rank={self.rank!r}; expected at least 1, a whole number; write lora.rank=4")
        if self.alpha is not None and not self.alpha > 0:
            raise UsageError(f"lora got alpha={self.alpha}; expected a number above 0; write lora.alpha={self.rank}")
        for name, least in (("rank_pattern", 0), ("alpha_pattern", None)):
            for key, value in (getattr(self, name) or {}).items():
                is_number = isinstance(value, int if name == "rank_pattern" else int | float)
                if not is_number or isinstance(value, bool) or not (value > 0 or value == least):
                    expected = "a whole number, 0 to leave layers out" if least == 0 else "a number above 0"
                    raise UsageError(
                        f"lora got {name}={{{key}:{value}}}; expected {expected}; write lora.{name}={{{key}:8}}"
                    )
        if not 0 <= self.dropout < 1:
            raise UsageError(f"lora got dropout={self.dropout}; expected a number in [0, 1); write lora.dropout=0")

    def of_family(self, family: Family) -> Lora:
        """Return the settings with the family's targets where none are given."""
        return self if self.target_modules is not None else replace(self, target_modules=family.lora_targets)

    @property
    def effective_alpha(self) -> float:
        """``alpha``, or ``rank`` if it is not given."""
        return self.rank if self.alpha is None else self.alpha

    def quantize_base_(self, denoiser: nn.Module, files: DeferredWeights | None = None) -> None:
        """Quantise the denoiser to ``base``, if that is given, before it gets adapters; see ``quantization.base``."""
        if self.base is not None:
            quantize_base_(denoiser, self.base, blocks=repeated_blocks(denoiser).values())
            if files is not None:
                fill_base_(denoiser, files)
                quantised = {f"{name}.weight" for name, _ in int8_layers(denoiser)}
                files.fill_(denoiser, torch.device("cpu"), skip=quantised)

    def apply_(self, networks: Mapping[str, nn.Module]) -> None:
        """Freeze the networks and insert adapters; the outputs do not change yet, as a factor is zero.

        Raises:
            UsageError: No layer matches, one is neither linear nor convolutional, or a network is divided.
        """
        from peft import inject_adapter_in_model

        check_is_whole(networks, "Lora.apply_")
        for name in [
            name for name in networks if not self._targets(name) and self.setting_of(name) == "target_modules"
        ]:
            if len(networks) == 1:
                raise UsageError(
                    "lora.target_modules=[] trains adapters of text encoders alone, and none is trained; add "
                    "module.train_text_encoder=true (of dreambooth: train_text_encoder=true), or name layers of the "
                    f"{name}, as null does"
                )
            networks = {other: network.requires_grad_(other != name) for other, network in networks.items()}
            networks.pop(name)
        layers = {name: layer_names(network) for name, network in networks.items()}
        for name, network in networks.items():
            self._check_targets(name, network, layers[name])
        self._check_patterns(layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for name, network in networks.items():
                try:
                    with on_host(network):
                        inject_adapter_in_model(self._config(name, layers[name]), network, adapter_name=_ADAPTER)
                except ValueError as error:  # a rank that the groups of a convolution do not divide
                    ranks = f"lora.rank={self.rank} lora.rank_pattern={dict(self.rank_pattern or {})}"
                    raise UsageError(f"{ranks}: {error}; write another rank") from error
                for module in network.modules():
                    layer: Any = module
                    if _ADAPTER in getattr(layer, "lokr_w2", ()):  # both factors are whole: as in LyCORIS, no scale
                        layer.scaling[_ADAPTER] = 1.0
                for key, parameter in network.named_parameters():
                    parameter.requires_grad_(is_adapter(key))

    @torch.no_grad()
    def begin_(self, networks: Mapping[str, nn.Module], adapters: Adapters) -> None:
        """Give the adapters in the networks the values of others; those of a network that has none begin at zero.

        Raises:
            UsageError: They have another rank or alpha, or are of other layers or networks.
        """
        for name, others in adapters.items():
            modules: dict[str, Any] = dict(networks[name].named_modules()) if name in networks else {}
            layers = {key: module for key, module in modules.items() if _is_adapted(module)}
            kinds = {key: (each.rank, each.alpha) for key, each in others.items()}
            is_ours = {(each.type, each.magnitude is not None) for each in others.values()} == {
                (self.type, self.use_dora)
            }
            if layers.keys() != others.keys() or kinds != self.kinds(name, layers) or not is_ours:
                raise UsageError(
                    f"lora.init={self.init}: its adapters of {name} have other layers, rank or alpha, or DoRA, than "
                    "these settings; take those of sd_lightning.models.lora_start.going_on(lora, file, model)"
                )
            for key, each in others.items():
                if isinstance(each, Factors):
                    lycoris.begin_(layers[key], _ADAPTER, each, f"lora.init={self.init}: {name}.{key}")
                    continue
                assert isinstance(each, Adapter)
                layers[key].lora_A[_ADAPTER].weight.copy_(each.down)
                layers[key].lora_B[_ADAPTER].weight.copy_(each.up)
                if each.magnitude is not None:
                    magnitude = getattr(layers[key], MAGNITUDE)[_ADAPTER].weight
                    magnitude.copy_(each.magnitude.view_as(magnitude))

    def write(
        self,
        file: Path,
        layers: Mapping[str, Mapping[str, Tensor]],
        components: Mapping[str, Component],
        *,
        base_values: Mapping[str, Sequence[float]] | None = None,
    ) -> str:
        """Write ``pytorch_lora_weights.safetensors`` for diffusers' ``pipeline.load_lora_weights(folder)``.

        The weights of ``lora_B`` include ``alpha / rank``, so that programs that do not read the metadata (ComfyUI)
        draw the same. diffusers' own writer is not used: the order of its metadata changes from call to call.

        Args:
            file: Path of the file.
            layers: By network, the adapters' weights by their names in memory.
            components: Records of the networks.
            base_values: The first values of some weights of the base, by network and name: ``unet.conv_in.weight``.

        Returns:
            The SHA-256 of the file.
        """
        tensors: dict[str, Tensor] = {}
        settings: dict[str, Any] = {}
        usual, scales = self.effective_alpha / self.rank, dict[str, float]()
        for name, adapters in ((name, adapters) for name, adapters in layers.items() if adapters):
            keys = adapter_keys(name, components[name], adapters)
            if self.type != "lora":
                tensors |= {keys[key]: values for key, values in adapters.items()}
                parts_of = lycoris.by_layer({key.removesuffix(f".{_ADAPTER}"): key for key in adapters})
                for layer, kind in self.kinds(name, parts_of).items():
                    alpha = kind["lokr_w2" not in parts_of[layer]]  # the rank if alpha does not count, as in LyCORIS
                    tensors[f"{name}.{components[name].file_keys([layer])[layer]}.alpha"] = torch.tensor(float(alpha))
                continue
            adapted = list(dict.fromkeys(key.partition(".lora_")[0] for key in adapters))
            scale_of = {layer: alpha / rank for layer, (rank, alpha) in self.kinds(name, adapted).items()}
            for key, values in adapters.items():
                scale = scale_of[key.partition(".lora_")[0]] if ".lora_B." in key else usual
                tensors[keys[key]] = values * scale if ".lora_B." in key else values
                if scale != usual:
                    scales[keys[key].removesuffix(".lora_B.weight")] = scale
            # The weights include the scales.
            config = replace(self, alpha=None, alpha_pattern=None)._config(name, adapted).to_dict()
            settings |= {f"{name}.{k}": sorted(v) if isinstance(v, set) else v for k, v in config.items()}
        own = {METADATA: json.dumps(settings, sort_keys=True), SCALE: repr(usual)}
        metadata = own if self.type == "lora" else {}  # LoHa and LoKr have alpha among the tensors
        metadata |= {SCALES: json.dumps(scales, sort_keys=True)} if scales else {}
        metadata |= {} if self.base is None else {BASE: self.base}
        metadata |= {BASE_VALUES: json.dumps(base_values)} if base_values else {}
        return write_tensors(file, tensors, metadata=metadata)

    def _check_targets(self, name: str, network: nn.Module, layers: Iterable[str]) -> None:
        """Raise if there is no target, or one is neither linear nor convolutional."""
        asked, kinds = matching(self._targets(name), layers), self.kinds(name, layers)
        # peft wraps a layer that has adapters already.
        targets = {k: getattr(m, "base_layer", m) for k, m in network.named_modules() if k in kinds}
        wrong = [f"{k} is a {type(m).__name__}" for k, m in targets.items() if not isinstance(m, nn.Linear | nn.Conv2d)]
        quantised = [k for k, m in targets.items() if self.use_dora and isinstance(m, Int8Conv2d)]
        wrong += [f"{k} is a quantised convolution, and DoRA reads its weight" for k in quantised]
        if asked and not kinds:
            raise UsageError(
                f"lora.rank_pattern={dict(self.rank_pattern or {})}: it leaves out all layers of {name}; expected a "
                f"rank above 0 for some; write lora.{self.setting_of(name)}=[…] with what is to be trained"
            )
        if wrong or not targets:
            setting = self.setting_of(name)
            linear = [k.rpartition(".")[2] for k, layer in network.named_modules() if isinstance(layer, nn.Linear)]
            examples = ", ".join(ending for ending in list(dict.fromkeys(linear))[:4] if not ending.isdecimal())
            raise UsageError(
                f"lora.{setting}={list(self._targets(name))}: {wrong[0] if wrong else 'no layer has such a name'}; "
                f"expected endings of the names of linear {'' if quantised else 'or convolutional '}layers of {name}, "
                f"e.g. {examples}"
            )

    def _check_patterns(self, layers: Mapping[str, Iterable[str]]) -> None:
        """Raise if a pattern is of no layer that could have adapters."""
        asked = [f"{name}.{k}" for name, each in layers.items() for k in sorted(matching(self._targets(name), each))]
        for setting in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, setting) or ():
                if not any(longest([pattern], layer) for layer in asked):
                    raise UsageError(
                        f"lora.{setting}: no layer with adapters has {pattern!r} in its name; expected names or parts "
                        f"of them between dots, such as {', '.join(name_parts(asked)[:24])}"
                    )

    def kinds(self, network: str, layers: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Return rank and alpha of those of a network's layers that get adapters."""
        found, targets = {}, matching(self._targets(network), layers)
        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        for layer in (each for each in layers if each in targets):
            rank_key, alpha_key = (longest(each, f"{network}.{layer}") for each in (ranks, alphas))
            rank = self.rank if rank_key is None else ranks[rank_key]
            alpha = (self.alpha or rank) if alpha_key is None else alphas[alpha_key]
            if rank:
                found[layer] = rank, alpha
        return found

    @staticmethod
    def setting_of(network: str) -> str:
        """Return the setting that names a network's layers."""
        return "text_encoder_target_modules" if Family.is_text_encoder(network) else "target_modules"

    def _targets(self, network: str) -> Sequence[str]:
        targets: Sequence[str] | None = getattr(self, self.setting_of(network))
        if targets is None:
            raise UsageError(
                f"lora was applied to {network} without target_modules; write target_modules=['to_q'], "
                "or use Lora(…).of_family(model.family)"
            )
        return targets

    def _config(self, name: str, layers: Iterable[str]) -> Any:
        from peft import LoHaConfig, LoKrConfig, LoraConfig

        targets = [t for target in self._targets(name) for t in expanded(target, layers)]
        kinds, usual = self.kinds(name, layers), (self.rank, self.effective_alpha)
        left_out = sorted(matching(targets, layers) - kinds.keys())
        patterns: tuple[dict[str, float], ...] = {}, {}
        for each, default, pattern in zip((0, 1), usual, patterns):
            for value in sorted({kind[each] for kind in kinds.values()} - {default}):
                pattern[_regex(name, [layer for layer, kind in kinds.items() if kind[each] == value])] = value

        options: dict[str, Any] = {
            "r": self.rank,
            "rank_pattern": patterns[0],
            "alpha_pattern": patterns[1],
            "exclude_modules": _regex(name, left_out) if left_out else None,
            "target_modules": targets,
        }
        if self.type != "lora":
            config: Any = LoHaConfig if self.type == "loha" else LoKrConfig
            return config(alpha=self.effective_alpha, **options)
        return LoraConfig(
            lora_alpha=self.effective_alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            use_dora=self.use_dora,
            **options,
        )


def _regex(network: str, layers: Iterable[str]) -> str:
    """Return peft's pattern of layers; those of CLIP have a prefix in some versions of transformers."""
    prefix = r"(?:text_model\.)?" if Family.is_text_encoder(network) else ""
    return f"^{prefix}(?:{'|'.join(map(re.escape, layers))})$"


@contextmanager
def on_host(network: nn.Module) -> Iterator[None]:
    """Replace meta tensors by host tensors without storage: peft puts adapters on the device of the weights."""
    deferred: dict[Tensor, Tensor] = {}
    tensors: list[dict[str, Any]] = [each for m in network.modules() for each in (m._parameters, m._buffers)]
    for each in tensors:
        for key, tensor in each.items():
            if tensor is not None and tensor.is_meta:
                empty = torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                is_parameter = isinstance(tensor, nn.Parameter)
                each[key] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                deferred[each[key]] = tensor
    try:
        yield
    finally:
        for each in tensors:
            for key, tensor in each.items():
                if tensor in deferred:
                    each[key] = deferred[tensor]


@torch.no_grad()
def begin_magnitudes_(network: nn.Module, files: DeferredWeights) -> None:
    """Set the magnitudes of DoRA to the norms of rows in files, a few of which are read at a time."""
    for name, layer in network.named_modules():
        if _ADAPTER in getattr(layer, MAGNITUDE, ()):
            weight = torch.empty(original_shape(layer.base_layer), device="meta")
            rows = row_reader(weight, files, f"{name}.base_layer.weight")
            blocks = Part.of(weight.shape, 0, [(0, len(weight))]).blocks(rows, weight[0].numel())
            norms = torch.cat([torch.linalg.vector_norm(block, dim=1) for _, block in blocks])
            magnitude: Tensor = getattr(layer, MAGNITUDE)[_ADAPTER].weight
            magnitude.copy_(norms.view_as(magnitude))
    files.close()


def adapter_keys(network: str, component: Component, names: Iterable[str]) -> dict[str, str]:
    """Map the adapters' names in memory to their keys in the LoRA file, for one network."""
    keys = component.file_keys(names)
    file_keys = {name: f"{network}.{key}".replace(f".{_ADAPTER}.", ".") for name, key in keys.items()}
    return {
        name: key.replace(f"{MAGNITUDE}.weight", MAGNITUDE).removesuffix(f".{_ADAPTER}")
        for name, key in file_keys.items()
    }


def plain_names(keys: Iterable[str]) -> dict[str, str]:
    """Map plain names, as in weight files, to names in memory; adapters are left out."""
    return {key.replace(".base_layer.", "."): key for key in keys if not is_adapter(key)}


def weight_names(network: nn.Module) -> dict[str, str]:
    """Map the plain names of a network's weights, those of a quantised base too, to their names in memory."""
    return plain_names([*network.state_dict(keep_vars=True), *(f"{key}.weight" for key, _ in int8_layers(network))])


def freeze_unused(network: nn.Module, unused: Iterable[str]) -> None:
    """Freeze the parameters with these plain names, and the adapters of their layers."""
    layers = {key.rpartition(".")[0] + "." for key in unused}
    for key, parameter in network.named_parameters():
        if any(key.startswith(layer) for layer in layers):
            parameter.requires_grad_(False)


Read = Callable[[str], Tensor]
"""Name of a weight in memory -> its whole values, in host memory."""


def adapted_weights(network: nn.Module) -> dict[str, Callable[[Read], Tensor]]:
    """Map the names in memory of weights with adapters to what returns each with its adapter merged in."""
    return {
        f"{name}.base_layer.weight": partial(
            _merge, name, [k for k, _ in layer.named_parameters() if is_adapter(f".{k}")], layer.scaling[_ADAPTER]
        )
        for name, layer in network.named_modules()
        if _is_adapted(layer)
    }


def _is_adapted(layer: Any) -> bool:
    """Return whether a layer has an adapter of ours."""
    return hasattr(layer, "base_layer") and _ADAPTER in getattr(layer, "scaling", ())


def layer_adapters(network: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a network, one of each layer, by its plain name.

    Raises:
        ValueError: One is neither LoRA nor DoRA.
    """
    found: dict[str, Adapter] = {}
    for name, module in network.named_modules():
        layer: Any = module
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            ((key, down),) = layer.lora_A.items()
            norms = getattr(layer, MAGNITUDE)[key].weight.detach().view(-1) if layer.use_dora[key] else None
            if any(layer.lora_bias.values()) or (key in layer.lora_variant and norms is None):
                raise ValueError(f"the adapter of {name} is neither LoRA nor DoRA")
            alpha = float(f"{layer.scaling[key] * len(down.weight):.12g}")
            found[name] = Adapter(down.weight.detach(), layer.lora_B[key].weight.detach(), alpha, norms)
    return found


def _merge(layer: str, names: Sequence[str], scale: float, read: Read) -> Tensor:
    """Return the weight of a layer, whose adapter has parameters of these names, with it merged in."""
    values = {name.partition(f".{_ADAPTER}")[0]: read(f"{layer}.{name}") for name in names}
    weight = read(f"{layer}.base_layer.weight")
    if "lora_A" in values:
        return add_adapter(weight, values["lora_A"], values["lora_B"], scale, values.get(MAGNITUDE))
    return weight.float() + scale * Factors(values, 1.0).rows(0, len(weight)).view(weight.shape)


def add_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """Return ``W + scale * B A`` (arXiv 2106.09685, section 4.1) in float32; of DoRA, its rows by their magnitude.

    With ``V = W + scale * B A``, DoRA's weight is ``magnitude * V / |V|`` (arXiv 2402.09353, equation 5).
    """
    merged = weight.float() + scale * (up.float().flatten(1) @ down.float().flatten(1)).view(weight.shape)
    if magnitude is None:
        return merged
    factor = magnitude.float().reshape(-1) / torch.linalg.vector_norm(merged.flatten(1), dim=1)
    return merged * factor.view(-1, *[1] * (merged.dim() - 1))


def add_adapter_(weight: Tensor, adapter: Change) -> None:
    """Add an adapter to a weight in place."""
    if not isinstance(adapter, Adapter) or adapter.magnitude is None:
        adapter.add_(weight.view(-1), 0)
    else:
        changed = add_adapter(weight, adapter.down, adapter.up, adapter.scale, adapter.magnitude)
        weight.copy_(weight.float().lerp(changed, adapter.strength))


def unscaled(up: Tensor, scale: float) -> Tensor:
    """Return what :meth:`Lora.write` has multiplied by ``scale``, or what gives the same bits when multiplied."""
    if scale == 1:
        return up
    values = up.float()
    found = divided = values / scale
    for infinity in (-torch.inf, torch.inf):  # one of the three, if the product was rounded once
        near = torch.nextafter(divided, torch.full_like(divided, infinity))
        found = torch.where(found * scale == values, found, near)
    return torch.where(found * scale == values, found, divided).to(up.dtype)


def merged_state_dict(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's state dict under plain names, with the adapters merged into their weights."""
    state = network.state_dict()
    adapted = adapted_weights(network)

    def merged(key: str) -> Tensor:
        return adapted[key](state.__getitem__).to(state[key].dtype)

    return {plain: merged(key) if key in adapted else state[key] for plain, key in plain_names(state).items()}


Adapters = dict[str, dict[str, Change]]
"""By network and by the layer's name."""
