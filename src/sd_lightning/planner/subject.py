"""What is trained, as forecasts see it: a latent-diffusion model, or any module with example inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.footprint import Weight
from sd_lightning.planner.passes import trained_networks, training_pass, weights_of
from sd_lightning.planner.recording import record
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.trace import Trace
from sd_lightning.quantization.base import base_bytes

Module = TypeVar("Module", bound=nn.Module)
Step = Callable[[Any, Any], Any]
"""(module, its example inputs) -> tensors; the loss is the sum of those that depend on the weights."""


class Subject(Protocol):
    """What is trained."""

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """All networks by the first part of their parameters' names, also frozen ones."""

    def weights(self, run: TrainingRun) -> list[Weight]:
        """Return the weights of the trained networks, in their order."""

    def trace(self, run: TrainingRun, dtype: torch.dtype, autocast: torch.dtype | None) -> Trace:
        """Trace forward and backward of a pass; see :func:`sd_lightning.planner.passes.training_pass`."""

    def frozen_bytes(self, run: TrainingRun, dtype: torch.dtype) -> int:
        """Return the bytes of what no strategy shards, and no encoder holds, if its weights have this dtype."""


class DiffusionSubject:
    """A latent-diffusion model."""

    def __init__(self, model: LatentDiffusion) -> None:
        self.model = model

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        return self.model.networks

    def weights(self, run: TrainingRun) -> list[Weight]:
        return weights_of(trained_networks(self.model, run, torch.float32))

    def trace(self, run: TrainingRun, dtype: torch.dtype, autocast: torch.dtype | None) -> Trace:
        return training_pass(self.model, run, dtype, autocast)

    def frozen_bytes(self, run: TrainingRun, dtype: torch.dtype) -> int:
        if run.lora is None or run.lora.base is None:
            return 0  # but for the encoders, which forecasts count
        return sum(map(base_bytes, trained_networks(self.model, run, dtype).values()))


class ModuleSubject:
    """Any module, traced with its example inputs at their own batch size; it is not changed.

    Args:
        module: On any device.
        inputs: Example inputs; only shapes and dtypes of tensors are used. Tensors of numbers are not read.
        networks: Names of its submodules that strategies shard.
        blocks: Blocks of these that strategies gather one at a time.
        steps: Ways to compute a loss from the inputs, by name; of those that work on the meta device, the one with
            the most arithmetic counts.

    Raises:
        UsageError: None of them works.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        networks: Sequence[str],
        blocks: Sequence[nn.Module],
        steps: Mapping[str, Step],
    ) -> None:
        self._module = module
        self._inputs = inputs
        chosen = {id(block) for block in blocks}
        self._blocks = [name for name, part in module.named_modules() if id(part) in chosen]
        self._sharded = {id(p) for name in networks for p in module.get_submodule(name).parameters()}
        failed: list[str] = []
        traces: dict[str, Trace] = {}
        for name, step in steps.items():
            try:
                traces[name] = self._traced(step, torch.float32, None)
            except Exception as error:  # of the user's code, which may do anything
                failed.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if not traces:
            raise UsageError(
                f"{type(module).__name__} cannot be traced with its example inputs on the meta device, where tensors "
                f"have shapes but no values ({'; '.join(failed)}); make one of them work there, or choose a strategy "
                "yourself"
            )
        # A step that takes the example for another kind of batch does less than the module's forward.
        self.how = max(traces, key=lambda name: traces[name].flops.constant.sum())
        self._step = steps[self.how]
        self._traces: dict[tuple[torch.dtype, torch.dtype | None], Trace] = {(torch.float32, None): traces[self.how]}

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        return dict(self._module.named_children())

    def weights(self, run: TrainingRun) -> list[Weight]:
        blocks = {id(p): name for name in self._blocks for p in self._module.get_submodule(name).parameters()}
        return [
            Weight(name, tuple(parameter.shape), parameter.requires_grad, blocks.get(id(parameter), ""))
            for name, parameter in self._module.named_parameters()
            if id(parameter) in self._sharded or parameter.requires_grad
        ]

    def trace(self, run: TrainingRun, dtype: torch.dtype, autocast: torch.dtype | None) -> Trace:
        if (dtype, autocast) not in self._traces:
            self._traces[dtype, autocast] = self._traced(self._step, dtype, autocast)
        return self._traces[dtype, autocast]

    def _traced(self, compute: Step, dtype: torch.dtype, autocast: torch.dtype | None) -> Trace:
        module = stand_in(self._module, lambda tensor: torch.empty_like(tensor, device="meta"))
        for part in module.modules():  # not Module.to(), which modules override
            nn.Module._apply(part, lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)
        inputs = tree_map(lambda value: _on_meta(value, dtype), self._inputs)

        def step() -> Tensor:
            return _loss(compute(module, inputs))

        blocks = {name: module.get_submodule(name) for name in self._blocks}
        with torch.device("meta"), _default_dtype(dtype if autocast is None else torch.float32), _Unpadded():
            return record(step, blocks=blocks, parameters=module.parameters(), autocast=autocast)

    def frozen_bytes(self, run: TrainingRun, dtype: torch.dtype) -> int:
        parameters = (p for p in self._module.parameters() if id(p) not in self._sharded and not p.requires_grad)
        return sum(
            tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
            for tensor in chain(parameters, self._module.buffers())
        )


def stand_in(module: Module, make: Callable[[Tensor], Tensor]) -> Module:
    """Return a copy of a module with other tensors in place of its parameters and buffers; theirs are not copied.

    Args:
        module: The module.
        make: Tensor -> the one in its place.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = make(buffer)
    return copy.deepcopy(module, memo)


def _on_meta(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="meta", dtype=dtype if value.is_floating_point() else value.dtype)


def _loss(outputs: Any) -> Tensor:
    """Return a scalar that depends on all outputs that depend on weights."""
    if isinstance(outputs, Mapping):  # outputs of transformers are no trees to torch before their package says so
        outputs = outputs["loss"] if isinstance(outputs.get("loss"), Tensor) else list(outputs.values())
    tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
    if not tensors:
        raise ValueError("it returns no tensor that depends on trained weights")
    return sum((tensor.float().sum() for tensor in tensors[1:]), tensors[0].float().sum())


class _Unpadded(TorchFunctionMode):
    """Answers questions about tensors of truth values, which have none on the meta device, with yes.

    Models of transformers ask whether a mask lets everything through. Kernels of attention take as long with a mask.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__bool__) and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
