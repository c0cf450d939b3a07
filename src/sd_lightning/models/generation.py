"""Generate images from prompts with a diffusers pipeline, for samples in training and ``generate``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Family
from sd_lightning.models.families.sampling import is_new, said_once, scheduler_class
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.offloading import Offload, check_offload, offloading
from sd_lightning.models.tf32 import products_of

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingOptions:
    """Settings for generating images, named as in diffusers' pipelines."""

    num_inference_steps: int | None = None
    """The family's own if not given."""
    guidance_scale: float | None = None
    """The family's own if not given. As the model's pipeline counts it: 1 is none, but where guidance is added to the
    caption's prediction, 0 is."""
    scheduler: str | None = None
    """Scheduler in place of the model's: "ddim", "euler", "dpmsolver++", … or a class name of diffusers."""
    batch_size: int = 16
    """Images per network call (twice that with guidance); the images do not depend on it."""
    height: int | None = None
    width: int | None = None
    """Size in pixels; the model's own if not given."""
    vae_tiling: bool = False
    """Decode images that are larger than a tile in overlapping tiles: less memory, slightly different images."""

    def __post_init__(self) -> None:
        for name in ("num_inference_steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"sampling got {name}={value}; expected at least 1, e.g. {name}=16")
        if self.scheduler is not None:
            scheduler_class(self.scheduler)
        if self.guidance_scale is not None and self.guidance_scale < 0:
            raise UsageError(
                f"sampling got guidance_scale={self.guidance_scale}; expected at least 0, e.g. guidance_scale=7.5"
            )

    @classmethod
    def chosen(cls, options: SamplingOptions | None, settings: Mapping[str, Any]) -> SamplingOptions:
        """Return ``options``, or the options made from the keyword arguments of ``sample``.

        Raises:
            UsageError: Both are given, or a setting is unknown or invalid.
        """
        if options is not None and settings:
            raise UsageError(f"sample got both options= and {', '.join(settings)}; give one of the two")
        unknown = settings.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise UsageError(
                f"sample got {', '.join(sorted(unknown))}; expected only {', '.join(cls.__dataclass_fields__)}"
            )
        return options or cls(**settings)

    def resolve(
        self,
        family: Family,
        pipeline_options: Mapping[str, Any],
        denoiser_config: Mapping[str, Any],
        *,
        negative_prompt: str = "",
    ) -> Self:
        """Return the options with the family's own steps and guidance where none are given.

        Args:
            family: The model's.
            pipeline_options: Of the model, from ``model_index.json``; a distilled one has no guidance.
            denoiser_config: Of the model, which may take guidance as an input.
            negative_prompt: Caption that guidance steers away from.

        Raises:
            UsageError: There is a negative prompt, but no guidance.
        """
        steps, scale = self.num_inference_steps, self.guidance_scale
        scale = family.guidance_scale if scale is None else scale
        if pipeline_options.get(family.distilled_by) and not family.distilled_takes_guidance:
            is_asked = self.guidance_scale is not None and scale > family.no_guidance
            if is_asked and is_new(family.pipeline_class, "guidance"):
                log.warning(
                    "sampling got guidance_scale=%g and a distilled %s, which draws without guidance; leave "
                    "guidance_scale out",
                    *(scale, family.pipeline_class),
                )
            scale = family.no_guidance
        is_embedded = family.embeds_guidance(denoiser_config)
        if negative_prompt and (is_embedded or scale <= family.no_guidance):
            how = "in one pass (its denoiser takes the guidance_scale)" if is_embedded else "without guidance"
            raise UsageError(
                f"sampling got negative_prompt={negative_prompt!r} and a {family.pipeline_class} that draws {how} "
                f"(guidance_scale={scale:g}), which has no use for it; leave negative_prompt out"
            )
        return replace(self, num_inference_steps=steps or family.num_inference_steps, guidance_scale=scale)

    def check(self, latent_diffusion: LatentDiffusion) -> None:
        """Check, before any image is generated, that the model can be sampled with these options.

        Raises:
            UsageError: The scheduler does not work with this model, or not with this number of steps.
        """
        denoiser: Any = latent_diffusion.denoiser
        options = self.resolve(latent_diffusion.family, latent_diffusion.pipeline_options, denoiser.config)
        options.check_sizes(latent_diffusion.family, latent_diffusion.vae.config, denoiser.config)
        scheduler = latent_diffusion.sampling_scheduler(self.scheduler)
        options.check_steps(scheduler.config)
        of_size = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}  # the pipeline knows the number
        steps = options.num_inference_steps
        try:
            with said_once():
                scheduler.set_timesteps(steps, **of_size)
                _ = scheduler.timesteps
        except (ValueError, IndexError) as error:
            raise UsageError(
                f"sampling got num_inference_steps={steps}, with which {type(scheduler).__name__} "
                f"cannot work ({error}); give another number or scheduler, e.g. num_inference_steps=25"
            ) from error

    def check_sizes(
        self, family: Family, vae_config: Mapping[str, Any], denoiser_config: Mapping[str, Any] | None = None
    ) -> None:
        """Refuse heights and widths that the model does not take; see :meth:`Family.check_sizes`."""
        for name in ("height", "width"):
            if (side := getattr(self, name)) is not None:
                family.check_sizes(
                    side, vae_config=vae_config, denoiser_config=denoiser_config, setting=name, who="sampling got "
                )

    def check_steps(self, scheduler_config: Mapping[str, Any]) -> None:
        """Refuse more inference steps than training timesteps: some would be repeated, or lie between two of them.

        Raises:
            UsageError: There are more.
        """
        most = scheduler_config.get("num_train_timesteps", 1000)  # as in diffusers
        if self.num_inference_steps is not None and self.num_inference_steps > most:
            raise UsageError(
                f"sampling got num_inference_steps={self.num_inference_steps}, more than the {most} steps that the "
                f"model was trained with; expected 1 to {most}, e.g. num_inference_steps={min(most, 25)}"
            )


def generate(
    latent_diffusion: LatentDiffusion,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    options: SamplingOptions | None = None,
    negative_prompt: str = "",
    inputs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    offload: Offload | None = None,
) -> list[Image.Image]:
    """Generate one image per prompt.

    Each image has its own random generator, so it depends on its prompt and seed but not on the other images of the
    batch (up to the rounding of batched kernels, below 1/255).

    Args:
        latent_diffusion: The model.
        prompts: One caption per image.
        seeds: One seed per image.
        options: Steps, guidance, scheduler, batch size, image size.
        negative_prompt: Caption that guidance steers away from.
        inputs: Pictures to begin with, and the strength; see :meth:`Family.draw`.
        device: Device to compute on; the denoiser's if not given.
        offload: "blocks" keeps the weights in host memory; see :func:`sd_lightning.models.offloading.offloading`. The
            images are bitwise the same, but on a CPU for weights that are mapped from float files: these may begin at
            any byte there, and kernels choose by alignment, so rounding may differ (by 1/255).

    Raises:
        UsageError: The number of seeds differs, the model cannot be sampled with these options, there is a negative
            prompt but no guidance, or the device cannot offload or is not given beside a GPU.
    """
    from torch.distributed.tensor import DTensor

    denoiser: Any = latent_diffusion.denoiser
    options = (options or SamplingOptions()).resolve(
        latent_diffusion.family, latent_diffusion.pipeline_options, denoiser.config, negative_prompt=negative_prompt
    )
    if len(seeds) != len(prompts):
        raise UsageError(f"generate got {len(prompts)} prompts and {len(seeds)} seeds; expected as many")
    options.check(latent_diffusion)
    home = next(latent_diffusion.denoiser.parameters()).device
    check_offload(offload, device or home)
    if offload is not None and device is None and home.type == "cpu" and torch.cuda.is_available():
        raise UsageError(f'generate got offload={offload} and no device; write device=torch.device("cuda"), or "cpu"')
    device = device or home
    with said_once():
        pipeline: Any = latent_diffusion.pipeline(scheduler=options.scheduler)
    networks = list(latent_diffusion.networks.values())
    for network in networks:
        # FSDP places its weights itself.
        if offload is None and not any(isinstance(p, DTensor) for p in network.parameters()):
            network.to(device)
    where = {"device": device, "_execution_device": device}  # not that of weights, which may be on the host
    pipeline.__class__ = type(type(pipeline).__name__, (type(pipeline),), where)
    frozen = latent_diffusion.family.frozen  # the family calls them, and casts their embeddings
    dtypes = {next(each.parameters()).dtype for name, each in latent_diffusion.networks.items() if name not in frozen}
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    images: list[Image.Image] = []
    vae = latent_diffusion.vae
    with (
        contextlib.ExitStack() as modes,
        said_once(),
        torch.no_grad(),
        # Networks may differ in dtype: half-precision encoders, a float32 denoiser.
        # Autocast would keep cast weights on the device.
        contextlib.nullcontext()
        if len(dtypes) == 1
        else torch.autocast(device.type, dtype=narrowest, cache_enabled=offload is None),
        products_of(narrowest),
        _decoding_as_is(vae, device),
        latent_diffusion.family.decoding_in_tiles(vae, options.vae_tiling),
        contextlib.nullcontext() if offload is None else offloading(latent_diffusion, device),
    ):
        for network in networks:
            modes.callback(network.train, network.training)
            network.eval()
        for begin in range(0, len(prompts), options.batch_size):
            batch = slice(begin, begin + options.batch_size)
            images += latent_diffusion.family.draw(
                pipeline,
                prompts[batch],
                negative_prompt=negative_prompt,
                generators=[torch.Generator().manual_seed(seed) for seed in seeds[batch]],
                num_inference_steps=options.num_inference_steps,
                guidance_scale=options.guidance_scale,
                height=options.height,
                width=options.width,
                **(inputs or {}),
            )
    return images


@contextlib.contextmanager
def _decoding_as_is(vae: nn.Module, device: torch.device) -> Iterator[None]:
    """Make the VAE decode in its own dtype, without autocast: some overflow in half precision (``force_upcast``)."""
    decode: Callable[..., Any] = vae.decode  # type: ignore[assignment]
    dtype = next(vae.parameters()).dtype

    def as_is(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return decode(latents.to(device, dtype), *args, **kwargs)  # diffusers moves them to where weights are

    vae.decode = as_is  # type: ignore[assignment]
    try:
        yield
    finally:
        del vae.decode
