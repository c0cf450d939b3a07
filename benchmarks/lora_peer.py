"""Run one of diffusers' DreamBooth LoRA scripts, and write the times of its steps or what each step was given.

    python benchmarks/lora_peer.py times STAMPS.json SCRIPT [ARGUMENT…]
    python benchmarks/lora_peer.py inputs INPUTS.pt SCRIPT [ARGUMENT…]

The script is the user's copy of `examples/dreambooth/train_dreambooth_lora_flux2_klein.py` or `…_z_image.py`. Without
torchvision, the functions below take its place; AdamW is torch's fused one: see `diffusers_peer.py`. The scripts name
Qwen2's tokenizer, whose rules are not those of the tiny models; here they read the tokenizer that the model has.

INPUTS.pt becomes `{"latents", "noise", "u", "losses"}`, one entry per step, and `"adapters"`, those at the beginning:
encoded images before shift and scale, noise, the numbers that timesteps are looked up by, losses.
"""

import atexit
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import diffusers_peer
from diffusers_peer import CenterCrop, InterpolationMode, Normalize, ToTensor, speed_up, stand_in_for_torchvision
from step_stamps import record

__all__ = ["InterpolationMode", "functional", "main"]
functional = SimpleNamespace(
    resize=lambda image, size, interpolation: image.resize(size[::-1], interpolation.value),
    center_crop=lambda image, size: CenterCrop(size[0])(image),
    to_tensor=ToTensor(),
    normalize=lambda image, mean, std: Normalize(mean, std)(image),
)
"""What the scripts use of `torchvision.transforms.functional`."""


def record_inputs(path: Path) -> None:
    """From now on note what this process trains on; write it to ``path`` at its exit."""
    import diffusers
    from accelerate import Accelerator
    from diffusers import training_utils

    found: dict[str, Any] = {name: [] for name in ("latents", "noise", "u", "losses")}

    def noting(name: str, function: Callable[..., Any], of: Callable[[Any], Tensor] = Tensor.clone) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            found[name].append(of(made).detach())
            return made

        return call

    training_utils.compute_density_for_timestep_sampling = noting(
        "u", training_utils.compute_density_for_timestep_sampling
    )
    torch.randn_like = noting("noise", torch.randn_like)
    for vae in (diffusers.AutoencoderKL, diffusers.AutoencoderKLFlux2):
        vae.encode = noting("latents", vae.encode, lambda made: made.latent_dist.mode().clone())
    backward = Accelerator.backward

    def note_loss(self: Any, loss: Tensor, **kwargs: Any) -> None:
        if not found["losses"]:
            (network,) = self._models
            adapters = {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}
            found["adapters"] = adapters
        found["losses"].append(float(loss.detach()))
        backward(self, loss, **kwargs)

    Accelerator.backward = note_loss
    atexit.register(lambda: torch.save(found, path))


def main() -> None:
    """The command line."""
    # They look for torchvision when they are imported and would believe in the stand-in.
    import datasets  # noqa: F401
    import diffusers.utils
    import transformers

    what, path, *sys.argv = sys.argv[1:]
    speed_up()
    {"times": record, "inputs": record_inputs}[what](Path(path))
    stand_in_for_torchvision()
    if getattr(sys.modules["torchvision"], "transforms", None) is diffusers_peer:
        sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"] = sys.modules[__name__]  # type: ignore[attr-defined]
    for tokenizer in (transformers.Qwen2Tokenizer, transformers.Qwen2TokenizerFast):
        tokenizer.from_pretrained = transformers.PreTrainedTokenizerFast.from_pretrained
    # The script of one release runs with the library of another.
    diffusers.utils.check_min_version = lambda version: None
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
