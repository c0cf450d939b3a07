"""DistributedDataParallel: a copy of the model per process, gradients averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.base import EngineStrategy
from sd_lightning.strategies.processes.group import WatchedProcesses, timeout_of
from sd_lightning.strategies.restoring import put_together

Compression = Literal["none", "fp16", "bf16"]


class DDPStrategy(EngineStrategy, WatchedProcesses, LightningDDPStrategy):
    """Lightning's DDP with the options that matter here.

    Args:
        static_graph: The same parameters are used in every step: DDP may then skip looking for unused ones.
        find_unused_parameters: Some trained parameters take no part in the loss: look for them after every forward.
        bucket_cap_mb: MiB of gradients that are reduced together.
        gradient_as_bucket_view: Let gradients be views of the buckets: saves their size once.
        compression: Send gradients in half precision; "fp16" or "bf16" halve the traffic and round the gradients.
        timeout_seconds: A collective that takes longer, or a rank that is silent that long, ends the run.
    """

    def __init__(
        self,
        *,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        gradient_as_bucket_view: bool = True,
        compression: Compression = "none",
        timeout_seconds: float = 1800.0,
    ) -> None:
        if bucket_cap_mb < 1:
            raise UsageError(f"DDPStrategy got bucket_cap_mb={bucket_cap_mb}; expected at least 1")
        super().__init__(
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            ddp_comm_hook=compression_hook(compression),
            timeout=timeout_of("DDPStrategy", timeout_seconds),
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        put_together(self.lightning_module)

    @override
    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is None or self.root_device.type == "cuda":
            super()._register_ddp_hooks()
            return
        assert isinstance(self.model, DistributedDataParallel)
        # Lightning ignores hooks elsewhere, without a word; and torch refuses that for bfloat16 by its name.
        self.model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


def compression_hook(name: Compression) -> Callable[..., Any] | None:
    """Return torch's communication hook of that name.

    Raises:
        UsageError: There is none.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"none": None, "fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if name not in hooks:
        raise UsageError(f"DDPStrategy got compression={name!r}; expected one of {', '.join(hooks)}")
    return hooks[name]
