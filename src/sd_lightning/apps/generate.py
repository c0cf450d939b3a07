"""Draw pictures with a trained run or a pretrained pipeline: PNG files with their settings as metadata."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from sd_lightning import _conf
from sd_lightning._conf.annotations import list_element
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process, local_rank, sees_own_gpus
from sd_lightning.apps.pictures import write_pictures
from sd_lightning.apps.tensor_parallel import Size, check_size, joined_ranks, num_ranks
from sd_lightning.models.families import Family, family_of
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.loading import read_scheduler
from sd_lightning.models.lora_start import find_lora
from sd_lightning.models.offloading import Offload, check_offload
from sd_lightning.models.pipeline_folder import find_folder, read_json
from sd_lightning.planner.calibration import hardware_here
from sd_lightning.planner.drawing import drawing_forecast, readable_bytes
from sd_lightning.planner.passes import inference_bytes, weight_bytes
from sd_lightning.planner.roofline import Speeds
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.quantization.int8 import int8_config, int8_configs
from sd_lightning.quantization.tensor_parallel import TensorParallel
from sd_lightning.storage import far_runs, runs
from sd_lightning.storage.atomic import check_new_folder, complete_or_absent

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Pretrained:
    """A pipeline from the hub or from disk."""

    pretrained: str | None = None
    revision: str | None = None
    variant: str | None = None
    vae: str | None = None


@dataclass(frozen=True)
class GenerationRequest(SamplingOptions):
    """Settings of the generation; ``conf/generate.yaml`` explains the keys."""

    run: str | None = None
    model: Pretrained = field(default_factory=Pretrained)
    prompts: list[str] | str = ""
    negative_prompt: str = ""
    num_images_per_prompt: int = 1
    seed: int = 0
    batch_size: int = 4
    device: str = "auto"
    output_dir: str = "generated"
    columns: int | None = None
    quantization: Int8 | None = None
    offload: Offload | None = None
    tensor_parallel: Size = 1
    save_to: str | None = None
    lora: str | None = None
    lora_weight: float | None = None
    image: str | None = None
    mask: str | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.model.pretrained is None):
            given = "neither" if self.run is None else "both"
            raise UsageError(
                f"generate got {given} of run= and model.pretrained=; give run=runs/<name>, or model.pretrained=<hub "
                "id or folder>"
            )
        for name in ("num_images_per_prompt", "columns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"generate got {name}={value}; expected at least 1, e.g. {name}=4")
        if self.lora_weight is not None and not math.isfinite(self.lora_weight):
            raise UsageError(
                f"generate got lora_weight={self.lora_weight}; expected a number, 0 for none of the adapters' change; "
                "write lora_weight=0.7"
            )
        check_size(self.tensor_parallel, device=self.device, save_to=self.save_to)
        if self.save_to is not None and self.quantization is None:
            raise UsageError(
                f"generate got save_to={self.save_to} without quantization; add quantization=int8, or copy the model "
                "as it is with python -m sd_lightning.export"
            )
        if self.offload is not None and self.save_to is not None and not self.prompts:
            raise UsageError(
                f"generate got offload={self.offload} and no prompts to draw; leave it out, or add prompts"
            )
        unused = [f"model.{n}={v}" for n in ("revision", "variant") if (v := getattr(self.model, n)) is not None]
        if self.run is not None and unused:
            raise UsageError(
                f"generate got {' and '.join(unused)} with run={self.run}; a run has one version: leave it out"
            )
        super().__post_init__()

    @cached_property
    def source(self) -> str | Path:
        return self.model.pretrained or runs.find_pipeline(str(self.run), who="run")


def run(cfg: DictConfig) -> int:
    """Draw the pictures, and write each with its settings in the metadata, and a grid of all."""
    request: GenerationRequest = _conf.instantiate(cfg)
    only_save = request.save_to is not None and not request.prompts
    captions = [] if only_save else read_prompts(request.prompts)
    prompts = [p for p in captions for _ in range(request.num_images_per_prompt)]
    device = find_device(request.device)
    check_offload(request.offload, device)
    if not 0 <= request.seed <= 2**63 - len(prompts):
        raise UsageError(
            f"generate got seed={request.seed}; expected a whole number from 0 to 2**63 - {len(prompts)}, e.g. seed=0"
        )
    seeds, output_dir = range(request.seed, request.seed + len(prompts)), Path(request.output_dir)
    check_new_folder(request.output_dir, key="output_dir", may_exist=True)
    save_to = None if request.save_to is None else check_new_folder(request.save_to, key="save_to")
    folder = find_folder(request.source, revision=request.model.revision, variant=request.model.variant)
    options, inputs = checked_options(request, folder)
    model, configs = load_model(request, device)
    options.check(model)
    drawn = replace(options, batch_size=min(options.batch_size, len(prompts) or 1))
    structure = partial(_structure, request, configs)

    def rank_peak(rank: TensorParallel | None) -> int:
        return drawing_forecast(structure(rank), drawn, offload=request.offload).peak

    with joined_ranks(num_ranks(request.tensor_parallel, model, device, rank_peak), device) as rank:
        if configs:
            quantize_(model, configs, tensor_parallel=rank)
        if save_to is not None:
            with complete_or_absent(save_to, setting=f"save_to={request.save_to}") as folder:
                model.save_pretrained(folder)
            print(f"{request.source} in int8 -> {request.save_to}")
        if only_save:
            return 0
        if request.offload is not None and is_first_process():
            print(drawing_forecast(model, drawn, speeds=_speeds(device), offload=request.offload))
        output_dir.mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {"options": options, "negative_prompt": request.negative_prompt, "inputs": inputs}
        images = generate(model, prompts, seeds=seeds, device=device, offload=request.offload, **given)
        if is_first_process():
            if configs and request.offload is None:
                whole = model if rank is None else structure()
                print_memory(whole, drawn)
                if rank is not None:
                    print_rank_memory(model, whole, drawn, rank.size)
            if device.type == "cuda" and (configs or request.offload):
                print(f"measured peak on the GPU: {readable_bytes(torch.cuda.max_memory_allocated(device))}")
            settings = picture_settings(request, options, model.sampling_scheduler(request.scheduler))
            print(write_pictures(images, prompts, seeds, settings, output_dir, request.columns))
    return 0


def checked_options(request: GenerationRequest, folder: Path) -> tuple[SamplingOptions, dict[str, Any]]:
    """Return options and inputs as the pipeline in a folder has them, checked before weights are read.

    Files that are missing are reported when the model is loaded.

    Raises:
        UsageError: The pipeline cannot draw with them.
    """
    index = read_json(folder / "model_index.json")
    family = family_of(str(index.get("_class_name")), who=str(folder)).of_options(index)
    denoiser = folder / family.denoiser / "config.json"
    config = read_json(denoiser) if denoiser.is_file() else {}
    options = request.resolve(family, index, config, negative_prompt=request.negative_prompt)
    inputs = _read_inputs(options, family)
    if "image" in inputs:
        options = replace(options, width=inputs["image"].width, height=inputs["image"].height)
    schedule = folder / "scheduler" / "scheduler_config.json"
    if schedule.is_file():
        options.check_steps(read_scheduler(schedule).config)
    vae = Path(request.model.vae or folder / "vae", "config.json")
    found = read_json(vae) if vae.is_file() else {}
    if any(isinstance(found.get(key), list) for key in ("block_out_channels", "dim_mult")):
        options.check_sizes(family, found, config or None)
    return options, inputs


def _read_inputs(request: GenerationRequest, family: Family) -> dict[str, Any]:
    """Return the pictures to begin with, and the strength, as :meth:`Family.draw` takes them.

    Raises:
        UsageError: The family takes others, one cannot be read, their sizes differ, or no step is left.
    """
    given = {name: each for name in ("image", "mask", "strength") if (each := getattr(request, name)) is not None}
    names, strength, steps = sorted(given.keys() - {"strength"}), request.strength, request.num_inference_steps or 1
    if (given and not names) or tuple(names) not in ((), family.drawn_from):
        begin = " and ".join(f"{name}=<picture>" for name in family.drawn_from) or "no picture"
        raise UsageError(
            f"generate got {' '.join(f'{name}={each}' for name, each in given.items())} and a {family.pipeline_class}, "
            f"which begins with prompts alone, or with {begin}; write that, and strength= only with a picture"
        )
    if strength is not None and not 1 <= int(steps * strength) <= steps:
        raise UsageError(
            f"generate got strength={strength}; expected 1 at most, and enough for one of {steps} "
            "steps; write strength=0.7, or more num_inference_steps"
        )
    try:
        pictures = {name: Image.open(given[name]).convert("RGB") for name in names}
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        got = " ".join(f"{name}={given[name]}" for name in names)
        raise UsageError(
            f"generate got {got}, of which one cannot be read ({error}); give PNG or JPEG files"
        ) from error
    sizes = [each.size for each in pictures.values()]
    if len({*sizes, *((request.width or width, request.height or height) for width, height in sizes)}) > 1:
        raise UsageError(
            f"generate got pictures of (width, height) = {sizes}; expected one size, that of what is drawn; "
            "resize one, or leave out width= and height="
        )
    return given | pictures


def picture_settings(request: GenerationRequest, options: SamplingOptions, scheduler: Any) -> dict[str, Any]:
    """Return the settings that a picture depends on; of the less common ones those that are given.

    Other batches and other numbers of devices change its rounding, and are left out.
    """
    usual = {
        "model": far_runs.name_of(request.source),
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": options.num_inference_steps,
        "guidance_scale": options.guidance_scale,
        "scheduler": type(scheduler).__name__,
    }
    given = {name: getattr(request, name) for name in ("height", "width", "vae_tiling", "image", "mask", "strength")}
    given |= {name: getattr(request.model, name) for name in ("revision", "variant", "vae")}
    given["lora"] = request.lora
    given["quantization"] = request.quantization and asdict(request.quantization)
    weight = {} if request.lora_weight is None else {"lora_weight": request.lora_weight}
    return usual | {name: value for name, value in given.items() if value} | weight


def load_model(request: GenerationRequest, device: torch.device) -> tuple[LatentDiffusion, Int8 | dict[str, Int8]]:
    """Return the model, and the int8 settings: those asked for, or by network those it was saved with, if any.

    Its weights are still in files then: ``quantize_`` reads them a few rows at a time, and on each rank a part.
    """
    where, config, size = request.model, request.quantization, request.tensor_parallel
    lora = None if request.lora is None else find_lora(request.lora, who="lora")
    deferred = [] if config is None and size == 1 else ["all"]
    model = LatentDiffusion.from_pretrained(
        request.source,
        revision=where.revision,
        variant=where.variant,
        vae=where.vae,
        deferred=deferred,
        lora=lora,
        lora_weight=request.lora_weight,
    )
    if config is not None and config.dtype is None and device.type == "cuda":
        config = replace(config, dtype="float16")
    configs = config or int8_configs(model)
    if size == 1:
        return model, configs
    if config is None and int8_config(model.denoiser) is None:
        raise UsageError(
            f"generate got tensor_parallel={size} and weights that are not in int8; add quantization=int8, or give a "
            "folder that was saved with it"
        )
    if not model.deferred:
        raise UsageError(
            f"generate got tensor_parallel={size} and adapters that are merged into whole weights only, such as DoRA; "
            "save the model first, with quantization=int8 save_to=<folder>, and draw with model.pretrained=<folder>"
        )
    return model, configs


def _structure(
    request: GenerationRequest, configs: Int8 | dict[str, Int8], rank: TensorParallel | None = None
) -> LatentDiffusion:
    """Return the model in int8 without values, or the part of it that one rank holds."""
    where = request.model
    model = LatentDiffusion.describe(request.source, revision=where.revision, vae=where.vae)
    return quantize_(model, configs, tensor_parallel=rank)


def _speeds(device: torch.device) -> Speeds | None:
    """Return the speeds of this machine that are measured, or known from a table."""
    try:
        return hardware_here()[1] if (device.type == "cuda") == torch.cuda.is_available() else None
    except UsageError:
        return None


def print_memory(model: LatentDiffusion, options: SamplingOptions) -> None:
    """Print the memory that the model takes in int8 to draw a batch, and would take in half and full precision."""
    sizes = zip(*(_bytes(model, options, dtype) for dtype in (None, torch.float16, torch.float32)))
    weights, peak = ("{} in int8, {} in fp16, {} in fp32".format(*map(readable_bytes, each)) for each in sizes)
    height, width = (getattr(options, side) or model.resolution for side in ("height", "width"))
    count = f"{options.batch_size} picture{'s' if options.batch_size > 1 else ''} of {width}x{height} at a time"
    print(f"weights {weights}\ncomputed peak, {count}: {peak}")


def print_rank_memory(part: LatentDiffusion, whole: LatentDiffusion, options: SamplingOptions, size: int) -> None:
    """Print the memory that each of several ranks takes, and how much of it all of them take for the same weights."""
    weights, peak = _bytes(part, options)
    same = (size * weights - sum(map(weight_bytes, whole.networks.values()))) / (size - 1)
    held, shared, most = map(readable_bytes, (weights, same, peak))
    share = f"{shared} ({same / weights:.0%}) the same on all"
    print(f"on each of {size} devices: weights {held}, {share}; computed peak {most}")


def _bytes(model: LatentDiffusion, options: SamplingOptions, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Return the bytes of the weights, and of the peak."""
    height, width = (getattr(options, side) or model.resolution for side in ("height", "width"))
    tiling, count = options.vae_tiling, options.batch_size
    return inference_bytes(model, height=height, width=width, batch_size=count, dtype=dtype, vae_tiling=tiling)


def read_prompts(prompts: Any) -> list[str]:
    """Return the captions of a list, or of a text file with one caption per line.

    Raises:
        UsageError: There are none, or the file cannot be read.
    """
    if isinstance(prompts, str):
        path = Path(prompts)
        if not path.is_file():
            raise UsageError(
                f"generate got prompts={prompts!r}, which is not a file; write 'prompts=[{list_element(prompts)}]' for "
                "a caption, or give a text file with one caption per line"
            )
        try:
            captions = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"generate got prompts={prompts}, which cannot be read as UTF-8 text ({error}); save it as UTF-8"
            ) from error
    else:
        captions = [str(p) for p in prompts or []]
    captions = [caption for caption in captions if caption]
    if not captions:
        raise UsageError("generate got no prompts; write 'prompts=[a handwritten three]' or prompts=captions.txt")
    return captions


def find_device(name: str, *, who: str = "generate") -> torch.device:
    """Return the device to compute on, "auto" if need be; of several ranks each has its own.

    Raises:
        UsageError: It is not there.
    """
    given = name
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda", 0 if sees_own_gpus() else local_rank()) if name == "cuda" else torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has tensors, but no values
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UsageError(
            f"{who} got device={given}, which is not there to compute on; expected auto, cpu, or cuda "
            "where there is such a GPU; write device=cpu or auto"
        ) from error
    return device
