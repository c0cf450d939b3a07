"""The optimizer that steps chunks with the parameter groups of the user's optimizer, and its loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.agreement import GradientAgreement
from sd_lightning.gemini.early_steps import EarlySteps
from sd_lightning.gemini.runtime import Runtime
from sd_lightning.gemini.stepper import Stepper, step_devices
from sd_lightning.gemini.updates import update_of

_UNCLIPPED = "write trainer.gradient_clip_val=null, or step_in_backward=running_norm to clip by the norm so far"


class LossScale:
    """A factor on the loss that keeps small float16 gradients above zero (Micikevicius et al. 2018, section 3.2).

    Its numbers and defaults are those of ``torch.amp.GradScaler``. They live on the device, so that a step need not
    wait for them; reading one waits.

    Args:
        device: Of the chunks.
    """

    growth_interval = 2000
    """Steps without overflow after which the scale doubles."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._value = torch.full((), 2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), device=device)
        self._begin()

    def _begin(self) -> None:
        self.used = self._value.clone()
        """The scale of the current gradients: several optimizers may step after one backward pass."""
        self._good_steps_before = self._good_steps.clone()
        self._found_inf = torch.zeros_like(self._value)
        """1 if one of these optimizers overflowed; the scale changes once for all of them."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for backward."""
        self._begin()
        return loss * self.used

    def update(self, found_inf: Tensor) -> None:
        """Note an optimizer's step, and whether its gradients were not finite: 1 or 0."""
        found_inf = found_inf.to(self._value.device)
        self._skipped += found_inf
        self._found_inf = torch.maximum(self._found_inf, found_inf)
        self._value.copy_(self.used)
        self._good_steps.copy_(self._good_steps_before)
        torch._amp_update_scale_(self._value, self._good_steps, self._found_inf, 2.0, 0.5, self.growth_interval)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers: the scale, the steps since it changed, and the steps skipped because of overflows."""
        return {"value": float(self._value), "good_steps": int(self._good_steps), "skipped": int(self._skipped)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._value.fill_(state["value"])
        self._good_steps.fill_(int(state["good_steps"]))
        self._skipped.fill_(int(state["skipped"]))


class GeminiOptimizer(torch.optim.Optimizer):
    """Wrapper of the user's optimizer that shares its groups: schedulers made for either drive both.

    A parameter is stepped if it got a gradient on any rank, as in DDP. Others keep weights, moments and step count, as
    in torch if ``grad`` is None. A step consumes the gradients: ``zero_grad`` after it does nothing.

    Args:
        inner: An elementwise optimizer over trained parameters of the engine.
        runtime: Computes the gradients.
        loss_scale: The factor of the gradients.

    Raises:
        UsageError: The optimizer's update is not elementwise, or it steps parameters that the engine does not train.
    """

    def __init__(self, inner: torch.optim.Optimizer, runtime: Runtime, loss_scale: LossScale | None) -> None:
        self.inner = inner
        self.optimizer = inner
        """The user's optimizer, under the name where Lightning's callbacks look for a wrapped one."""
        self.stepper = Stepper(inner, runtime.chunked, update_of(inner, step_devices(runtime.chunked)))
        inner.state.clear()  # some constructors create states of whole parameters
        self.__setstate__({"state": inner.state, "defaults": inner.defaults})  # instead of groups of its own
        self._runtime = runtime
        self._reducer = runtime.reducer
        self._scaler = loss_scale
        self._agreement = GradientAgreement(runtime.chunked, runtime.reducer, self.stepper)
        self._clip: Tensor | None = None
        self._found_inf: Tensor | None = None
        self._aborts_before_clip = 0
        self._stepped_version: int | None = None
        """The version of the gradients that the last step consumed."""
        self.early = EarlySteps(runtime, self.stepper, self._agreement)
        if runtime.chunked.config.step_in_backward:
            self._reducer.step_chunk = self.early.step
        self.adopt()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's optimizer; a callback that resumes may replace them."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups
        self.adopt()

    def adopt(self) -> None:
        """Adopt the parameters and settings of all groups.

        Raises:
            UsageError: An update is not elementwise, or the engine does not train a parameter.
        """
        self.stepper.adopt()
        self._agreement.reset()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that the engine trains, to be stepped from their next gradients on; a collective call.

        Raises:
            UsageError: The engine does not train them: they were frozen when it was made.
        """
        self.inner.add_param_group(param_group)
        try:
            self.adopt()
        except UsageError:
            self.param_groups.pop()
            raise
        for parameter in self.param_groups[-1]["params"]:
            self._runtime.chunked.chunk_of[parameter].gradients.forget(parameter)
            self._reducer.touched.discard(parameter)

    @property
    def touched(self) -> set[nn.Parameter]:
        """The parameters of this optimizer that have gradients on any rank; a collective call."""
        return self._agreement.reach(with_norm=False)

    @property
    def has_stepped(self) -> bool:
        """Whether a step has consumed the gradients of the last backward pass."""
        return self._stepped_version == self._reducer.version or bool(self._reducer.complete)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether this optimizer steps a parameter."""
        return parameter in self.stepper.group_of

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights; with loss scaling, skip the step if a gradient is not finite.

        If the device steps all chunks, with torch's Adam, AdamW or SGD, it decides that, and the host does not wait.

        Args:
            closure: Computes the loss and its gradients again; called once.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made with it
        self._runtime.check_can_step()
        scaler = self._scaler
        touched = self._agreement.reach(with_norm=scaler is not None)
        self.early.finish(touched)
        self.stepper.check_frozen()
        self._runtime.accumulation.end_step()
        overflowed = None if scaler is None else self._agreement.found_inf
        if self.stepper.decides_on_device:
            reasons = [each for each in (overflowed, self._found_inf) if each is not None]
            self.stepper.step(touched, self._divisor, torch.stack(reasons).max() if reasons else None)
        elif overflowed is None or not overflowed:
            self.stepper.step(touched, float(self._divisor))
        if scaler is not None and overflowed is not None:
            scaler.update(overflowed)
        self._forget()
        self._stepped_version = self._reducer.version
        return loss

    def skip_if(self, found_inf: Tensor) -> bool:
        """Have the next step leave everything unchanged if a float32 scalar on the device is 1, without reading it.

        Returns:
            Whether it will; if not, the host must read the value, and call :meth:`zero_grad` if it is 1.
        """
        if not self.stepper.decides_on_device or self._reducer.step_chunk is not None:
            return False
        self._found_inf = found_inf
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters."""
        self._runtime.recover()
        self._runtime.access.close()
        self.early.check_nothing("to drop gradients", "call zero_grad() before the backward pass or after the step")
        self._stepped_version = None
        if not all(chunk.gradients.is_empty for chunk in self.stepper.chunks):
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters of the groups; states are in the engine's ``state.parameter_shards()``."""
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the hyper-parameters of the groups; the engine's ``state.load`` loads the states."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"{type(self.inner).__name__} got a state of {len(saved)} groups; expected one of "
                f"{len(self.param_groups)}: give the groups that it was saved with"
            )
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        self.adopt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global norm of the gradients to ``max_norm``, as part of the next step.

        Costs one pass over this rank's gradients.

        Returns:
            The norm before clipping, over all ranks, without the loss scale; on the device if that steps all chunks.
        """
        if self.early.max_norm == float(max_norm):
            return self.early.norm
        norm, before = self.grad_norm(), self._pending_clip
        coefficient = (float(max_norm) / (norm.double() + 1e-6)).clamp(max=1.0)
        self._clip = coefficient if before is None else before * coefficient
        self._aborts_before_clip = self._runtime.statistics["aborted"]
        return norm

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients over all ranks, without the loss scale."""
        self._runtime.check_can_step()
        self.early.check_nothing("for the norm of all gradients", _UNCLIPPED)
        self._agreement.reach(with_norm=True)
        norm = self._agreement.norm
        assert norm is not None
        is_double = any(chunk.layout.master_dtype == torch.float64 for chunk in self.stepper.chunks)
        dtype = torch.float64 if is_double else torch.float32
        if self._pending_clip is not None:
            norm = norm * self._pending_clip
        if self._scaler is not None:
            norm = norm / self._scaler.used.to(norm)
        return norm.to(dtype)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp all gradients to ``[-clip_value, clip_value]``; leave overflowed ones, for the step to detect."""
        self._runtime.check_can_step()
        self.early.check_nothing("to clip gradients", _UNCLIPPED)
        self._agreement.reach(with_norm=self._scaler is not None)
        bound = self._divisor * float(clip_value)  # infinite after clipping by an infinite norm
        if self._scaler is not None:
            assert isinstance(bound, Tensor)
            overflowed = self._agreement.found_inf.to(bound.device)
            bound = bound.masked_fill(overflowed > 0, math.inf)
        for chunk in self.stepper.chunks:
            chunk.gradients.wait_on_host()
            chunk.gradients.widen()
        for tensor in self.stepper.gradients():
            if isinstance(bound, Tensor) and self.stepper.decides_on_device:
                tensor.clamp_(-bound, bound)
            else:
                tensor.clamp_(-float(bound), float(bound))
        self._agreement.norm = None

    @property
    def _divisor(self) -> float | Tensor:
        """The loss scale, over the factor of clipping; 1.0 without both."""
        scale, clip = 1.0 if self._scaler is None else self._scaler.used, self._pending_clip
        if clip is None:
            return scale
        return (scale.to(clip) if isinstance(scale, Tensor) else scale) / clip

    @property
    def _pending_clip(self) -> Tensor | None:
        """The factor of norm clipping for the next step; None if there is none, or gradients were aborted since."""
        return self._clip if self._aborts_before_clip == self._runtime.statistics["aborted"] else None

    def _forget(self) -> None:
        """Drop this optimizer's gradients, and free their memory unless another optimizer has gradients in it."""
        reducer = self._reducer
        reducer.touched.difference_update(self.stepper.group_of)
        for chunk in self.stepper.chunks:
            # Another optimizer may have gradients in the chunk, unless none of its parameters has one on any rank.
            may_be_touched = self._agreement.touched is None or not reducer.touched.isdisjoint(chunk.slots)
            if may_be_touched and not all(map(self.owns, chunk.slots)):
                for parameter in filter(self.owns, chunk.slots):
                    chunk.gradients.forget(parameter)
            else:
                chunk.gradients.drop()
                reducer.late.discard(chunk.index)
        self._agreement.reset()
        self._clip = self._found_inf = None
