"""Functions around the calls of modules, compiled ones too, and what may look on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

Observer = Callable[[str, int], None]
"""(phase: "forward", "backward" or "end", unit): called when the weights of the unit are there."""


class Monitor(Protocol):
    """Measures what takes memory beside the chunks."""

    def access(self, phase: str, unit: int) -> None:
        """Note that a unit's weights are about to be gathered."""
        ...

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        ...

    def abort(self) -> None:
        """Forget the pass under way."""
        ...


Before = Callable[[nn.Module, Any], None]
"""(module, positional arguments)."""
After = Callable[[nn.Module, Any, Any], None]
"""(module, positional arguments, output): the output is None if the call failed."""
Undo = Callable[[], None]


def wrap_calls(module: nn.Module, before: Before, after: After) -> list[Undo]:
    """Call functions before and after each forward of a module, first and last; return what removes them."""
    compiled = module._compiled_call_impl
    if compiled is None:
        begin = module.register_forward_pre_hook(torch._dynamo.disable(before), prepend=True)
        end = module.register_forward_hook(torch._dynamo.disable(after), always_call=True)
        return [begin.remove, end.remove]

    # A compiled module calls its hooks inside the compiled region: these stay outside of it.
    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            after(module, args, output)
        return output

    module._compiled_call_impl = call
    return [partial(_restore, module, call, compiled)]


def _restore(module: nn.Module, ours: Any, compiled: Any) -> None:
    if module._compiled_call_impl is ours:
        module._compiled_call_impl = compiled
