"""Which of diffusers' schedulers can sample, by the names that people use."""

from __future__ import annotations

import inspect
from typing import Any

from sd_lightning._errors import UsageError


def scheduler_class(name: str) -> str:
    """Return the diffusers class of a scheduler given by class name or short name.

    Raises:
        UsageError: diffusers has no such scheduler.
    """
    import diffusers

    known = {n for n in dir(diffusers) if n.endswith("Scheduler") and not n.startswith("Flax")}
    short = {
        "ddim": "DDIMScheduler",
        "ddpm": "DDPMScheduler",
        "pndm": "PNDMScheduler",
        "lms": "LMSDiscreteScheduler",
        "euler": "EulerDiscreteScheduler",
        "euler_a": "EulerAncestralDiscreteScheduler",
        "heun": "HeunDiscreteScheduler",
        "dpmsolver++": "DPMSolverMultistepScheduler",
        "unipc": "UniPCMultistepScheduler",
        "deis": "DEISMultistepScheduler",
    }
    chosen = short.get(name.lower(), name)
    if chosen not in known:
        raise UsageError(
            f"scheduler={name}: diffusers has no such scheduler; expected {', '.join(short)} or a class name such as "
            "DDIMScheduler"
        )
    return chosen


def samples_stable_diffusion(scheduler: Any) -> bool:
    """Tell whether a scheduler has what the pipelines call: ``step(noise_pred, t, latents, …)`` and its company."""
    if not all(hasattr(scheduler, name) for name in ("step", "scale_model_input", "init_noise_sigma", "order")):
        return False
    parameters = list(inspect.signature(scheduler.step).parameters.values())
    return len(parameters) >= 3 and all(p.default is not p.empty for p in parameters[3:] if p.kind != p.VAR_KEYWORD)
