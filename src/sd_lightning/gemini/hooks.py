"""Hooks around module calls, compiled ones too, and the interfaces of observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

Observer = Callable[[str, int], None]
"""(phase: "forward", "backward" or "end", unit): called when the weights of the unit are gathered."""


class Monitor(Protocol):
    """Measurement of the memory that is not in chunks."""

    def access(self, phase: str, unit: int) -> None:
        """Note that a unit's weights are about to be gathered."""

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""

    def abort(self) -> None:
        """Forget the current pass."""


Before = Callable[[nn.Module, Any], None]
"""(module, positional arguments)."""
After = Callable[[nn.Module, Any, Any], None]
"""(module, positional arguments, output): the output is None if the call failed."""
Undo = Callable[[], None]


def wrap_calls(module: nn.Module, before: Before, after: After) -> list[Undo]:
    """Call ``before`` first and ``after`` last in each forward of a module; return functions that remove them."""
    compiled = module._compiled_call_impl
    if compiled is None:
        begin = module.register_forward_pre_hook(torch._dynamo.disable(before), prepend=True)
        end = module.register_forward_hook(torch._dynamo.disable(after), always_call=True)
        return [begin.remove, end.remove]

    # A compiled module calls its hooks inside the compiled region; ``before`` and ``after`` must stay outside.
    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            after(module, args, output)
        return output

    def undo() -> None:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return [undo]
