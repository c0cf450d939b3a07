"""ColossalAI's GeminiDDP and GeminiOptimizer around the trained networks, driven step by step, and their state."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import LazyTensor, OptimizerGroups, ParameterShard, Read, SavedParameter
from sd_lightning.strategies.colossalai.settings import OURS, WHO, ColossalAIConfig
from sd_lightning.strategies.optimizers import replace_adam
from sd_lightning.strategies.whole_tensors import FlatOptimizerState

log = logging.getLogger(__name__)


class ColossalAIEngine:
    """The trained networks in ColossalAI's chunks; parameters hold data only during a forward or backward pass.

    ``GeminiDDP.forward`` is not used, because it would round a step's inputs to 16 bits. Instead, :meth:`training` and
    :meth:`evaluating` set the hooks that gather weights.

    Args:
        networks: Trained networks by name, in host memory, float32.
        config: Arguments of ``GeminiDDP`` and ``GeminiOptimizer``.
        dtype: Compute dtype: bfloat16 or float16.
    """

    def __init__(self, networks: Mapping[str, nn.Module], config: ColossalAIConfig, dtype: torch.dtype) -> None:
        warnings.filterwarnings("ignore", module=r"colossalai\.")  # about apex, and names that torch has deprecated
        from colossalai.zero import GeminiDDP
        from colossalai.zero.gemini.chunk import TensorState

        self._hold = TensorState.HOLD
        self.dtype = dtype
        self.is_usable = True
        """False once an exception has left a step half done."""
        self.skips_step = False
        """Whether the next :meth:`step` drops the gradients."""
        container = nn.ModuleDict(dict(networks))
        named = dict(container.named_parameters())
        GeminiDDP.set_params_to_ignore(p for p in named.values() if not p.requires_grad)  # or chunk sizes count them
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        exact = {name: p.data for name, p in self.parameters.items()}  # GeminiDDP's masters come from rounded weights
        self.config = config
        self.ddp = GeminiDDP(
            container, chunk_init_device=torch.device("cpu"), mixed_precision=dtype, **config.of_engine()
        )
        self.manager = self.ddp.gemini_manager
        self.chunks = self.manager.chunk_manager
        self.optimizer: Any = None
        self.group_names: list[list[str]] = []
        for parameter in named.values():
            parameter.taken_apart = True  # type: ignore[attr-defined]
        for name, parameter in self.parameters.items():
            local, begin, end = self.master_range(parameter)
            local.copy_(exact[name].reshape(-1)[begin:end])
        self._log_layout()

    def _log_layout(self) -> None:
        weights = self.chunks.get_chunks(self.parameters.values())
        if all(chunk.keep_gathered for chunk in weights):
            log.warning(
                "ColossalAI replicates models below min_chunk_size_m, and this one is: nothing is sharded; lower "
                "strategy.min_chunk_size_m to shard it"
            )
        log.info(
            "ColossalAI packs the weights into %d chunks of %d elements on average; %d of them have their optimizer in "
            "host memory",
            len(weights),
            sum(chunk.chunk_size for chunk in weights) // len(weights),
            sum(chunk.paired_chunk.device_type == "cpu" for chunk in weights),
        )

    def attach(self, optimizer: Optimizer, *, max_norm: float) -> Optimizer:
        """Replace torch's Adam by ColossalAI's, which steps the chunks.

        Returns:
            ColossalAI's Adam, for Lightning's hooks.
        """
        from colossalai.nn.optimizer import HybridAdam
        from colossalai.zero import GeminiOptimizer

        names = {id(p): name for name, p in self.parameters.items()}
        self.group_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        adam = replace_adam(optimizer, HybridAdam)
        self.optimizer = GeminiOptimizer(adam, self.ddp, max_norm=max_norm, **self.config.of_loss_scale())
        return adam

    def master_range(self, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        """Return this rank's float32 weights of a parameter, flat, and the begin and end of their flat range."""
        return self._range(self.chunks.get_chunk(parameter).paired_chunk, parameter)

    def compute_range(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's 16-bit weights of a parameter, flat, while nothing is gathered."""
        return self._range(self.chunks.get_chunk(parameter), parameter)[0]

    def _range(self, chunk: Any, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        info = self.chunks.get_chunk(parameter).tensors_info[parameter]
        start, size = (0, chunk.chunk_size) if chunk.keep_gathered else (chunk.shard_begin, chunk.shard_size)
        start, size = int(start), int(size)  # NumPy integers, from the chunk size search
        begin = min(max(info.offset - start, 0), size)
        end = max(min(info.end - start, size), begin)
        first = begin + start - info.offset if begin < end else 0
        return chunk.payload[begin:end], first, first + end - begin

    def is_replicated(self, parameter: nn.Parameter) -> bool:
        """Return whether every rank holds the whole parameter."""
        return bool(self.chunks.get_chunk(parameter).keep_gathered)

    def refresh(self) -> None:
        """Copy the float32 weights to the 16-bit ones, between steps."""
        for chunk in self.chunks.get_chunks(self.parameters.values()):
            chunk.payload.copy_(chunk.paired_chunk.payload)
        self.written()

    def written(self) -> None:
        """Tell the engine that its 16-bit weights were written from outside."""
        for chunk in self.chunks.get_chunks(self.parameters.values()):
            chunk.optim_sync_flag = True  # else the next gather overwrites them with the float32 weights
            chunk.cpu_vis_flag = chunk.cuda_shard is None  # a page-locked copy in host memory is out of date

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Gather weights for a forward pass that :meth:`backward` follows."""
        from colossalai.tensor.param_op_hook import ColoParamOpHookManager

        self.ddp.module.zero_grad(set_to_none=True)
        self.manager.pre_iter()
        with ColoParamOpHookManager.use_hooks(*self.ddp.hooks):
            yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gather weights for forward passes without gradients, and restore the engine's step records."""
        from colossalai.tensor.param_op_hook import ColoParamOpHookManager

        collector = self.manager._mem_stats_collector
        position = collector._step_idx if collector is not None else 0
        # Shards are created here, and the next step could not write to tensors created under inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            try:
                with ColoParamOpHookManager.use_hooks(*self.ddp.hooks):
                    yield
            finally:
                self._release()
                self.manager.reset_attributes()
                type(self.manager)._get_layout_info.cache_clear()  # keyed by position in a step, and this was none
                if self.manager.is_warmup():
                    self.manager._compute_list.clear()  # it must record the order of use in training
                if collector is not None:
                    collector._step_idx = position

    def _release(self) -> None:
        """Scatter gathered chunks, also after an exception."""
        for work in self.manager._async_works.values():
            work.wait()
        self.manager._async_works.clear()
        for chunk in self.chunks.accessed_chunks:
            for parameter in chunk.get_tensors():
                chunk.tensor_trans_state(parameter, self._hold)
        self.ddp._post_forward()

    def backward(self, loss: Tensor) -> None:
        """Scale the loss, compute gradients and reduce them chunk by chunk.

        Raises:
            UsageError: A trained parameter had no gradient.
        """
        first = self.manager.is_warmup()
        try:
            # ColossalAI prints a message after the first step.
            with contextlib.redirect_stdout(io.StringIO()) if first else contextlib.nullcontext():
                self.optimizer.backward(loss)
        except RuntimeError as error:
            if "ZERO DDP error" not in str(error):
                raise
            self._refuse_unused(error)
            raise
        self._refuse_unused(None)  # else a chunk of unused parameters takes its weights for gradients
        if first:
            self._agree_on_memory()

    def _refuse_unused(self, error: Exception | None) -> None:
        unused = [name for name, p in self.parameters.items() if not p._gemini_reduced]  # type: ignore[attr-defined]
        if unused:
            raise UsageError(
                f"{WHO}: {len(unused)} trained parameters had no part in the loss ({', '.join(unused[:3])}"
                f"{', …' if len(unused) > 3 else ''}), which ColossalAI cannot train; freeze them with "
                f"requires_grad_(False), {OURS}"
            ) from error

    def _agree_on_memory(self) -> None:
        """Set every rank's measured memory to the maximum over all ranks; a collective call.

        The placement policy "auto" evicts by it, and a rank that evicts alone also gathers alone, and hangs.
        """
        collector = self.manager._mem_stats_collector
        if collector is None:
            return
        measured = collector._memstats.non_model_data_list("cuda")
        values = torch.tensor(measured, dtype=torch.int64, device=self.chunks.overflow_counter.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        measured[:] = values.tolist()

    def step(self) -> None:
        """Clip, unscale, step Adam and refresh the 16-bit weights; or drop the gradients if ``skips_step``."""
        if not self.skips_step:
            self.optimizer.step()
            return
        self.skips_step = False
        self.optimizer._clear_global_norm()  # as GeminiOptimizer.step does after an overflow
        self.optimizer.zero_grad()
        self.optimizer._update_fp16_params()

    def scaler_state(self) -> dict[str, Any]:
        """Return the loss scale in the format of torch's ``GradScaler``; empty in bfloat16."""
        scaler = getattr(self.optimizer.mix_precision_mixin, "grad_scaler", None)
        if scaler is None:
            return {}
        return {
            "scale": float(scaler.scale),
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": scaler._growth_step,
            "_hysteresis_tracker": scaler._hysteresis_step,
        }

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale of a checkpoint of this engine or of torch's ``GradScaler``."""
        scaler = getattr(self.optimizer.mix_precision_mixin, "grad_scaler", None)
        if scaler is not None and "scale" in state:
            scaler._scale.fill_(state["scale"])
            scaler._growth_step = int(state["_growth_tracker"])
            scaler._hysteresis_step = int(state.get("_hysteresis_tracker", 0))


_MOMENTS = ("exp_avg", "exp_avg_sq")


class ColossalAIState(FlatOptimizerState):
    """Training state of an engine: this rank's ranges of the float32 chunks and their Adam moments, bit for bit.

    ColossalAI's own ``state_dict`` gathers the float32 weights in 16 bits, and loading rounds the masters as well.

    Args:
        engine: The engine; without an optimizer (validation) there are no moments.
    """

    def __init__(self, engine: ColossalAIEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        """The optimizer that the state belongs to; every fit creates another."""
        self.optimizers = [] if self.optimizer is None else [self.optimizer]

    def parameter_shards(self) -> list[ParameterShard]:
        """Return this rank's ranges, as live tensors."""
        slices = self._slices()
        shards = []
        for name, parameter, master, begin, end in self._ranges():
            states: dict[str, LazyTensor] = {}
            scalars: dict[str, Any] = {}
            state = self.optimizer.optim.state.get(slices[parameter]) if parameter in slices else None
            if state:
                states = {kind: state[kind].detach() for kind in _MOMENTS}
                scalars = {"step": torch.tensor(float(state["step"]))}
            # A chunk that is kept gathered is whole on every rank.
            writes = not self.engine.is_replicated(parameter) or dist.get_rank() == 0
            shape = tuple(parameter.shape)
            shards.append(ParameterShard(name, shape, begin, end, master.detach(), states, scalars, writes))
        return shards

    @override
    def _group_names(self) -> list[list[list[str]]]:
        return [self.engine.group_names for _ in self.optimizers]

    @override
    def _inner(self, optimizer: Any) -> Any:
        return optimizer.optim

    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load the masters and Adam's moments, and refresh the 16-bit weights.

        Raises:
            UsageError: The checkpoint was written by another kind of optimizer, or by one with other groups.
        """
        if groups is not None:
            self._take_groups(groups)
        slices = self._slices()
        for name, parameter, master, begin, end in self._ranges():
            read("master", name, master, begin, end)
            if groups is not None and saved[name].states:
                self.optimizer.optim.state[slices[parameter]] = _moments(saved[name], name, master, begin, end, read)
        self.engine.refresh()

    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        """Compute with other weights; the float32 masters do not change."""
        for name, parameter, _, begin, _ in self._ranges():
            self.engine.compute_range(parameter).copy_(weights[name, begin])
        self.engine.written()
        return True

    def _restore(self, trained: bool) -> None:
        """Compute with the trained weights again: the masters, rounded as after a step."""
        self.engine.refresh()

    def _ranges(self) -> Iterator[tuple[str, nn.Parameter, Tensor, int, int]]:
        """Yield name, parameter, float32 weights, begin and end of every range that this rank holds."""
        for name, parameter in self.engine.parameters.items():
            master, begin, end = self.engine.master_range(parameter)
            if begin < end:
                yield name, parameter, master, begin, end

    def _slices(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map each parameter to the optimizer's parameter for this rank's range of it."""
        if self.optimizer is None:
            return {}
        real = self.optimizer.id_to_real_params
        return {real[number]: piece for number, piece in self.optimizer.id_to_fake_params.items()}


def _moments(saved: SavedParameter, name: str, master: Tensor, begin: int, end: int, read: Read) -> dict[str, Any]:
    if set(saved.states) != set(_MOMENTS):
        raise UsageError(
            f"{WHO} cannot resume the optimizer states {', '.join(saved.states)}: it steps with Adam; resume with the "
            "strategy that wrote them, or start a new run from the weights with init_from="
        )
    state: dict[str, Any] = {"step": int(saved.scalars["step"])}
    for kind in _MOMENTS:
        state[kind] = torch.zeros_like(master)
        read(kind, name, state[kind], begin, end)
    return state
