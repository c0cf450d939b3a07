"""DistributedDataParallel: a copy of the model per process, gradients averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.planner.footprint import Footprint, Holding, When, Workload, replicated
from sd_lightning.quantization.layers import int8_layers
from sd_lightning.strategies.base import EngineStrategy
from sd_lightning.strategies.processes.group import WatchedProcesses, timeout_of
from sd_lightning.strategies.restoring import gather_whole

Compression = Literal["none", "fp16", "bf16"]


class DDPStrategy(EngineStrategy, WatchedProcesses, LightningDDPStrategy):
    """Lightning's DDP with the options that matter here.

    Args:
        static_graph: Every step uses the same parameters, so DDP may skip the search for unused ones.
        find_unused_parameters: Search for trained parameters without a part in the loss, after every forward pass.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are reduced.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves one copy of them.
        compression: Send gradients in half precision; "fp16" or "bf16" halve the traffic and round the gradients.
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.

    Raises:
        UsageError: ``bucket_cap_mb`` or ``timeout_seconds`` is not positive, or ``compression`` is unknown.
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
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        check_at_least("DDPStrategy", 1, bucket_cap_mb=bucket_cap_mb)
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        """Whether each parameter was trained when DDP was built."""
        self._has_views, self._bucket = gradient_as_bucket_view, bucket_cap_mb * 2**20
        hooks = {"none": None, "fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        if compression not in hooks:
            raise UsageError(f"DDPStrategy got compression={compression!r}; expected one of {', '.join(hooks)}")
        super().__init__(
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            ddp_comm_hook=hooks[compression],
            timeout=timeout_of("DDPStrategy", timeout_seconds),
        )

    @override
    def footprint(self, workload: Workload) -> Footprint:
        """Count the buckets, which DDP keeps, and replaces by others after the first step."""
        copies = replicated(workload, buckets=self._has_views)
        gradients = workload.lightning_dtype.itemsize * sum(weight.numel for weight in workload.trained)
        buckets = [Holding("new buckets", gradients, When.UPDATE)]
        if not self._has_views:
            buckets.append(Holding("buckets", gradients))
        sent = gradients if self._ddp_comm_hook is None else gradients * 2 // workload.lightning_dtype.itemsize
        traffic = replace(
            copies.traffic,
            all_reduced=sent,
            threaded=True,
            collectives=1 + sent // self._bucket,
            copied=2 * gradients * (not self._has_views),
        )
        return replace(copies, device=[*copies.device, *buckets], traffic=traffic)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        gather_whole(self.lightning_module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        # DDP reduces the gradients of the parameters that were trained when it was built.
        if self._trained != [parameter.requires_grad for parameter in self._parameters]:
            self.model = self.lightning_module
            self.configure_ddp()
        return super().training_step(*args, **kwargs)

    @override
    def teardown(self) -> None:
        self._parameters, self._trained = [], []
        super().teardown()

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        self._parameters = list(model.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        ignored = [f"{path}.{name}" for path, layer in int8_layers(model) for name in layer._buffers]
        if ignored:  # the weights of a quantised base, which are constant
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        # Lightning does it on a side stream, and torch then warns that gradients are accumulated on another one.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is None or self.root_device.type == "cuda":
            super()._register_ddp_hooks()
            return
        assert isinstance(self.model, DistributedDataParallel)
        # Lightning silently ignores hooks on other devices. The lambda hides the bf16 hook's name, which torch refuses.
        self.model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
