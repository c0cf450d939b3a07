"""What users' hooks see of weights and gradients under DeepSpeed, and what becomes of weights that they write."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.base import is_partitioned

_ANY: Any = Tensor  # whose attributes are properties, which no type says
_ABOUT_GRADIENTS = {_ANY.grad.__get__, _ANY.grad.__set__}
_HARMLESS = {
    *(_ANY.requires_grad.__get__, _ANY.requires_grad.__set__, Tensor.requires_grad_),
    *(_ANY.device.__get__, _ANY.dtype.__get__, _ANY.layout.__get__, _ANY.is_leaf.__get__, Tensor.untyped_storage),
}
_KNOW_PARTS = ("deepspeed.", "sd_lightning.", "torch.optim.")
_MOVES = ("_apply", "convert", "compute_should_use_set_data", "zero_grad")
"""Functions of ``nn.Module`` that send parameters to devices, or drop gradients: parts are as good as wholes there."""


class TouchedWeights(TorchFunctionMode):
    """Notes the parameters that a hook uses, gathers those of ZeRO-3 until the hook ends, and refuses gradients.

    Gathering is a collective call: all ranks must use the same parameters.

    Args:
        hook: "Class.name" of the hook, for the message.
        names: Names of the engine's parameters.
        gathered: Takes the contexts in which parameters are whole.
    """

    def __init__(self, hook: str, names: Mapping[nn.Parameter, str], gathered: ExitStack) -> None:
        super().__init__()
        self.touched: set[str] = set()
        self._hook, self._known, self._gathered = hook, names, gathered

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        place = caller.f_globals.get("__name__", "")
        moves = place == "torch.nn.modules.module" and caller.f_code.co_name in _MOVES
        if func in _HARMLESS or moves or place.startswith(_KNOW_PARTS):
            return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter) and each in self._known:
                self._touch(each, func)
        return func(*args, **kwargs)

    def _touch(self, parameter: nn.Parameter, func: Callable[..., Any]) -> None:
        if func in _ABOUT_GRADIENTS:
            raise UsageError(
                f"{self._hook} uses the gradient of {self._known[parameter]}, which DeepSpeed keeps to itself; clip "
                "with trainer.gradient_clip_val, or take strategy=fsdp or ddp"
            )
        self.touched.add(self._known[parameter])
        status: Any = parameter
        if is_partitioned(parameter) and status.ds_status.name == "NOT_AVAILABLE":
            import deepspeed

            self._gathered.enter_context(deepspeed.zero.GatheredParameters([parameter], modifier_rank=0))


@contextmanager
def whole_in_hook(hook: str, names: Mapping[nn.Parameter, str], adopt: Callable[[set[str]], None]) -> Iterator[None]:
    """Run a hook in which weights are whole, and hand over the names of those that it may have written.

    Args:
        hook: "Class.name" of the hook, for messages.
        names: Names of the engine's parameters.
        adopt: Takes over written weights.

    Raises:
        UsageError: The hook uses gradients, or changes what is trained.
    """
    before = [parameter.requires_grad for parameter in names]
    with ExitStack() as gathered:
        with TouchedWeights(hook, names, gathered) as mode:
            yield
    for (parameter, name), was_trained in zip(names.items(), before, strict=True):
        if parameter.requires_grad != was_trained:
            raise UsageError(
                f"{hook} changed requires_grad of {name}, and DeepSpeed trains what it got at the start; freeze and "
                "unfreeze before fit, or take strategy=fsdp or ddp"
            )
    if mode.touched:
        adopt(mode.touched)


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about an error of torch that comes of weights that ZeRO-3 has emptied; None for others."""
    if type(error) is not RuntimeError or not re.search(r"\[0\]|must be a matrix|tensor \w \(0\)", str(error)):
        return None
    return (
        "DeepSpeedStrategy: at stage 3 weights are empty outside of a network's forward, and "
        f"{type(error).__name__} came of that: {str(error).splitlines()[0]}; use a weight in the forward of the "
        "network that has it (for a penalty on weights, the optimizer's weight_decay), or take strategy=deepspeed_zero2"
    )
