"""Options that change a model's speed and memory, and 16-bit weights; results differ at most by rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from torch import nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.models.checkpointing import SavedActivations, recompute_
from sd_lightning.models.families.blocks import enable_gradient_checkpointing, recomputable, repeated_blocks
from sd_lightning.models.tf32 import allow_tf32
from sd_lightning.strategies.base import engine_of

AttentionKernel = Literal["auto", "math", "flash", "efficient", "cudnn"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class Speed:
    """Speed and memory options, applied to the trained networks from outside."""

    gradient_checkpointing: bool | float | Literal["auto"] = False
    """Recompute activations in backward instead of keeping them: True, all of every block; or as few as bring the
    activations of a pass below this many GB (10**9 bytes); "auto": what the rest leaves of the GPU's memory."""
    channels_last: bool = False
    """Keep convolution weights and activations in the NHWC layout."""
    compile_blocks: bool = False
    """Compile the repeated blocks with torch.compile for training, one graph per kind and shape of block."""
    inductor_mode: CompileMode = "default"
    """How: "max-autotune-no-cudagraphs" times several kernels for each product and keeps the fastest."""
    attention: AttentionKernel = "auto"
    """Kernel of scaled_dot_product_attention, with the math kernel as fallback (the VAE's heads are too wide for
    flash). "auto" leaves the choice to torch."""
    allow_tf32: bool = False
    """Let CUDA matrix products and convolutions of float32 tensors use TensorFloat-32; frozen encoders go by their
    dtype."""

    def __post_init__(self) -> None:
        if self.attention not in (kernels := get_args(AttentionKernel)):
            raise UsageError(f"Speed got attention={self.attention!r}; expected one of {', '.join(kernels)}")
        if self.inductor_mode not in (modes := get_args(CompileMode)):
            raise UsageError(f"Speed got inductor_mode={self.inductor_mode!r}; expected {' or '.join(modes)}")
        if self.inductor_mode != "default" and not self.compile_blocks:
            raise UsageError(
                f"Speed got inductor_mode={self.inductor_mode} but nothing is compiled; write compile_blocks=true, or "
                "leave inductor_mode out"
            )
        if not (self.gradient_checkpointing == "auto" or self.gradient_checkpointing >= 0):
            raise UsageError(
                f"Speed got gradient_checkpointing={self.gradient_checkpointing}; expected true, false, auto, or GB of "
                "activations, e.g. 6.5"
            )
        if self.attention in ("efficient", "cudnn") and not torch.cuda.is_available():
            raise UsageError(
                f"Speed got attention={self.attention!r} but there is no CUDA device; "
                "write attention=auto, math or flash"
            )

    @property
    def limits_activations(self) -> bool:
        """Whether ``gradient_checkpointing`` is a limit, for which what blocks keep is chosen."""
        return not isinstance(self.gradient_checkpointing, bool)

    def apply_(self, networks: Mapping[str, nn.Module], kept: Mapping[str, SavedActivations] | None = None) -> None:
        """Apply the options to the networks in place; attention kernel and TF32 are set for the whole process.

        Args:
            networks: The trained networks by name.
            kept: What blocks keep, chosen for the limit that ``gradient_checkpointing`` is.

        Raises:
            UsageError: ``gradient_checkpointing`` is a limit, and nothing was chosen; or a network has no blocks.
        """
        if self.limits_activations:
            if kept is None:
                raise UsageError(
                    f"Speed got gradient_checkpointing={self.gradient_checkpointing}, a limit, but apply_() got no "
                    "kept=; choose it with sd_lightning.planner.checkpointing.choose, or write True"
                )
            recompute_(recomputable(networks), kept)
        for network in networks.values():
            if self.gradient_checkpointing is True:
                enable_gradient_checkpointing(network)
            if self.channels_last:
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if self.compile_blocks:
                _compile_blocks(network, self.inductor_mode)
        allow_tf32(self.allow_tf32)
        use_attention_kernel(self.attention)


def use_attention_kernel(name: AttentionKernel) -> None:
    """Allow scaled_dot_product_attention only one kernel besides the math kernel; "auto" allows all.

    The setting is global, not a context around the forward pass, because gradient checkpointing repeats the forward
    pass in backward.
    """
    cuda = torch.backends.cuda
    cuda.enable_math_sdp(True)
    cuda.enable_flash_sdp(name in ("auto", "flash"))
    cuda.enable_mem_efficient_sdp(name in ("auto", "efficient"))
    cuda.enable_cudnn_sdp(name in ("auto", "cudnn"))


def _compile_blocks(network: nn.Module, mode: CompileMode) -> None:
    """Compile the blocks for training; in evaluation, which has many batch sizes, they run uncompiled."""
    blocks = repeated_blocks(network)
    # Blocks of one kind and shape share a graph. The limit counts all kinds together; beyond it they run uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
    for block in blocks.values():
        # Not dynamic: a block called with two shapes would get one dynamic graph, on which torch 2.13's inductor fails.
        compiled = torch.compile(block._call_impl, dynamic=False, mode=mode)
        block._compiled_call_impl = partial(_call, block, compiled)


def _call(block: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compiled(*args, **kwargs) if block.training else block._call_impl(*args, **kwargs)


class HalfWeights(HalfPrecision):
    """Precision plugin for ``precision="bf16-true"`` that casts only the trained networks to 16 bits.

    Lightning's plugin also casts the batch and makes 16 bits the default dtype. Latents, noise and timesteps then lose
    more precision than by casting the network's inputs. Here they stay float32 until the network's call.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def precision_options(precision: Any, strategy: Strategy | str) -> dict[str, Any]:
    """Return the arguments of ``Trainer`` that set a precision; engines bring their own plugins."""
    if precision in ("bf16-true", "16-true") and not engine_of(strategy).owns_precision:
        return {"plugins": [HalfWeights(precision)]}
    return {"precision": precision}
