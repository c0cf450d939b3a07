"""The plan that a run takes, with its rivals, and what is said if there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sd_lightning._errors import UsageError
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.search import Plans, Search, TrainingPlan

_RIVALS = 3
_SAFER = 0.9
"""Part of the memory that a plan may take after one ran out of memory."""


@dataclass(frozen=True)
class PlanChoice:
    """The plan of a run."""

    plans: Plans
    search: Search
    who: str
    """What the planner chose for: "strategy=auto"."""
    plan: TrainingPlan

    @classmethod
    def of(cls, search: Search, who: str, remedy: Callable[[Plans], str]) -> PlanChoice:
        """Take the fastest plan that fits.

        Args:
            search: The search.
            who: What the planner chooses for: "strategy=auto".
            remedy: Plans that are too large -> what would help, for the message.

        Raises:
            UsageError: No plan fits, or none can be predicted.
        """
        plans = search.plans()
        if plans.best:
            return cls(plans, search, who, plans.best[0])
        on = f"{who} on {plans.cluster.count} x {plans.cluster.device.name}"
        if not plans.too_large:
            raise UsageError(
                f"{on}: no strategy can be planned: {'; '.join(plans.skip_reasons)}; choose a strategy and a batch size"
            )
        closest = plans.too_large[0]
        parts = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in closest.memory.device_phase.parts.items() if size)
        raise UsageError(
            f"{on}: nothing fits with {closest.run.batch_size} sample(s) per pass; the closest, "
            f"{closest.candidate.name}, lacks {closest.lacks} (GB on the device: {parts}); {remedy(plans)}"
        )

    def lines(self) -> list[str]:
        """Return the plan and its best rivals as lines of text."""
        cluster = self.plans.cluster
        first = f"{self.who} on {cluster.count} x {cluster.device.name}, seconds {self.plans.speeds.provenance}: "
        rivals = [plan for plan in self.plans.best if plan is not self.plan][:_RIVALS]
        return [first + description(self.plan), *(f"  rival: {description(plan)}" for plan in rivals)]

    def out_of_memory(self) -> UsageError:
        """Return the error of a run that ran out of the device's memory, with a plan that takes less."""
        plan, cluster = self.plan, self.plans.cluster
        safer = self.search.within(int(_SAFER * plan.memory.device)).plans().best
        remedy = f"write {' '.join(safer[0].options())}" if safer else "no plan takes less; train on a larger GPU"
        return UsageError(
            f"{self.who}: out of memory with {' '.join(plan.options())}; {cluster.memory / GB:.1f} GB should be "
            f"usable, and predicted were {plan.memory.device_phase.line().strip()}; {remedy}"
        )


def description(plan: TrainingPlan) -> str:
    """Return strategy, batch, memory and time of a plan in one line."""
    each = " on each" if plan.cluster.count > 1 else ""
    batch = f"{plan.run.accumulate} x " * (plan.run.accumulate > 1) + f"{plan.run.batch_size} samples a step{each}"
    recomputed = {False: "", True: ", all blocks recomputed", "auto": ", some blocks recomputed"}[plan.recompute]
    memory = f"{plan.memory.device / GB:.1f} GB, {plan.memory.host / GB:.1f} GB of host memory"
    time = f"{plan.time.total:.3g} s a step, {plan.images_per_second:.3g} img/s"
    return f"{plan.candidate.name}, {batch}{recomputed}: {memory}, {time}"
