"""Measure how good a trained run's pictures are, beside images that were held out, and write it into its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment
from PIL import Image
from torch import Tensor

from sd_lightning import _conf
from sd_lightning._conf.check import leaves
from sd_lightning._console import aligned, print_lines
from sd_lightning._errors import UsageError
from sd_lightning.apps import class_images
from sd_lightning.apps.class_images import MissingPicture
from sd_lightning.apps.compared_run import read_part
from sd_lightning.apps.generate import GenerationRequest, checked_options, find_device, load_model, picture_settings
from sd_lightning.apps.pictures import settings_of
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.apps.settings import options as presets_of
from sd_lightning.callbacks.samples import first_captions
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.fingerprint import file_evidence, fingerprint
from sd_lightning.data.loading import ENCODER_FIELDS
from sd_lightning.data.source import BadSample
from sd_lightning.data.transform import place
from sd_lightning.data.workers import Loaders
from sd_lightning.models.image_features import ImageFeatures
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.quantization import quantize_
from sd_lightning.report import read_metrics, write_report
from sd_lightning.report.evaluation import HEAD, read_evaluation, table
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.atomic import check_new_folder, write_whole
from sd_lightning.storage.untrusted import read_json, read_yaml
from sd_lightning.training.estimates import Estimate, frechet_estimate, kernel_estimate, mean_estimate, share_estimate
from sd_lightning.training.evaluation import EvaluationOptions, held_out
from sd_lightning.training.module import SDLightningModule

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class EvaluationRequest(EvaluationOptions):
    """Settings of the evaluation; ``conf/evaluate.yaml`` explains the keys."""

    run: str = ""
    data: SDDataModule | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    batch_size: int = 16
    device: str = "auto"
    output_dir: str | None = None

    def generation(self, pipeline: Path, spec: RunSpec, data: SDDataModule) -> GenerationRequest:
        """Return how to draw: as the run does where nothing is given, squares as large as its images."""
        names = ("num_inference_steps", "guidance_scale", "scheduler")
        given = {name: spec.get(f"sampling.{name}") for name in names}
        given |= {name: each for name in names if (each := getattr(self, name)) is not None}
        given |= dict.fromkeys(("height", "width"), data.images.resolution)
        given |= {name: getattr(self, name) for name in ("seed", "device", "batch_size")}
        return GenerationRequest(run=str(pipeline), vae_tiling=spec.get("sampling.vae_tiling", False), **given)


def run(cfg: DictConfig) -> int:
    """Evaluate a run."""
    return evaluate(_conf.instantiate(cfg))


def evaluate(request: EvaluationRequest) -> int:
    """Draw the pictures that are missing, measure, print a table and write ``evaluation.json``; return 0."""
    run_dir, device = Path(request.run), find_device(request.device, who="evaluate")
    pipeline = runs.find_pipeline(request.run, who="run")
    spec = RunSpec(read_part((runs.run_of(pipeline) or pipeline) / "config.yaml", read_yaml, who="evaluate"))
    data = request.data or _data_of(spec, request.run)
    if data.loader_options.loaders is not None:  # encoders elsewhere, of a training that has ended
        data.loaders = Loaders()
        data.loaders.take(data.loader_options, (), in_memory=False)
    source, features = held_out(data), request.read_features(data, device)
    classifier = data.source_train.classifier
    generation = request.generation(pipeline, spec, data)
    place_of_run = run_dir if runs.is_run(run_dir) else None
    output_dir = Path(request.output_dir or (place_of_run or Path()) / "evaluation")
    options, _ = checked_options(generation, pipeline)
    weights = [file_evidence(file, thorough=True) for file in sorted(pipeline.rglob("*.safetensors"))]
    folder = _opened(output_dir, request.run)
    try:
        model, int8 = load_model(generation, device)
        if int8:
            quantize_(model, int8)
            print("the caption gap is not measured of int8 weights")
        estimates = {} if int8 else _caption_gap(model, data, spec, device)
        wanted: list[MissingPicture] = []
        if features is not None or classifier is not None:
            captions = islice(cycle(first_captions(source, data.images.written)), request.num_samples or len(source))
            wanted = [
                MissingPicture(caption, output_dir / f"{i:06d}.png", request.seed + i)
                for i, caption in enumerate(captions)
            ]
        settings = picture_settings(generation, options, model.sampling_scheduler(options.scheduler))
        settings |= {"model": request.run, "weights": weights}
        missing = [each for each in wanted if not _is_drawn(each, settings)]
        if wanted:
            print(f"{len(wanted)} pictures in {output_dir}/, of which {len(missing)} are drawn now", flush=True)
        class_images.draw(
            model, missing, options=options, device=device, settings=settings, what="pictures", setting="output_dir"
        )
        if classifier is not None:
            estimates |= _prompted_accuracy(classifier, wanted, data.images.written)
        if features is not None:
            estimates = _of_pictures(features, request, wanted, data) | estimates
    finally:
        folder.unlock()
    home = pipeline.parent  # a checkpoint, or the run
    record = {
        "run": request.run,
        "steps": checkpoint.step_of(home) if checkpoint.is_step(home.name) else runs.finished_step(home),
        "date": datetime.now(UTC).date().isoformat(),
        "num_samples": len(wanted),
        "held_out": len(source),
        "data": {name: each for name, each in fingerprint(source).items() if name not in ("samples", "held_out")},
        "seed": request.seed,
        "settings": settings,
        "metrics": {name: asdict(each) for name, each in estimates.items()},
    }
    _write(place_of_run or output_dir, record)
    return 0


def _data_of(spec: RunSpec, run: str) -> SDDataModule:
    if (found := _not_built(spec, "data")) is not None:
        raise UsageError(
            f"evaluate got run={run}, which has no config.yaml that names data of this package, without ${{…}} (others "
            f"may have written it, and it has {found}); add data=images data.train_data_dir=<folder>, or data=<yours>"
        )
    here = {name: each for name, each in spec["data"].items() if name not in ENCODER_FIELDS}
    return RunSpec({"data": here}).build("data")


def _not_built(spec: RunSpec, section: str) -> str | None:
    """Return the setting by which a section would run foreign code or read the environment; None if none would."""
    presets = [each["_target_"] for each in presets_of(section).values()]
    values = {f"{section}._target_": None, **dict(leaves({section: spec.get(section)}))}
    targets = {key for key in values if key.endswith("_target_")}
    bad = (key for key, each in values.items() if "${" in str(each) or (key in targets and each not in presets))
    return next((f"{key}={values[key]}" for key in bad), None)


def _opened(output_dir: Path, run: str) -> runs.RunFolder:
    """Lock the pictures' folder.

    Raises:
        UsageError: It holds anything else, pictures of another run, or another process is at work in it.
    """
    check_new_folder(str(output_dir), key="output_dir", may_exist=True)
    runs.check_ours(output_dir, others=("[0-9]*.png", runs.EVALUATION))
    found = next(output_dir.glob("*.png"), None)
    owner = run if found is None or output_dir.is_relative_to(run) else settings_of(found).get("model")
    if runs.is_run(output_dir) or Path(str(owner)).resolve() != Path(run).resolve():
        what = "a run" if runs.is_run(output_dir) else f"pictures of {owner or 'another program'}"
        raise UsageError(
            f"output_dir={output_dir} holds {what}, of which some would be replaced; expected a folder for the "
            f"evaluation of run={run} alone; choose another output_dir=<folder>"
        )
    folder = runs.RunFolder(output_dir)
    folder.lock()
    return folder


def _is_drawn(picture: MissingPicture, settings: Mapping[str, Any]) -> bool:
    """Return whether a picture is there with these settings, wherever its run was then."""
    own = {**settings, "prompt": picture.prompt, "seed": picture.seed}
    return {**settings_of(picture.path), "model": settings["model"]} == json.loads(json.dumps(own))


def _of_pictures(
    features: ImageFeatures, request: EvaluationRequest, pictures: Sequence[MissingPicture], data: SDDataModule
) -> dict[str, Estimate]:
    """Return the metrics of drawn pictures that a feature network reads."""

    def features_of(images: Iterator[Image.Image]) -> Tensor:
        batches = iter(lambda: list(islice(images, request.batch_size)), [])
        return torch.cat([features.images(batch) for batch in batches])

    out, drawn = {}, features_of(Image.open(each.path) for each in pictures)
    real = features_of(_held_out_squares(data)) if {"fid", "kid"} & {*request.metrics} else drawn
    if "fid" in request.metrics:
        out[features.metric("F")] = frechet_estimate(drawn, real)
    if "kid" in request.metrics:
        out[features.metric("K")] = kernel_estimate(drawn, real)
    if "clip_score" in request.metrics:
        scores = features.caption_scores(drawn, [each.prompt for each in pictures])
        out[f"{features.name} score"] = mean_estimate(scores)
    return {name: replace(each, features=request.features) for name, each in out.items()}


def _held_out_squares(data: SDDataModule) -> Iterator[Image.Image]:
    """Yield the held-out images, cut to squares as large as the drawn pictures."""
    source, side, most = held_out(data), data.images.resolution, data.images.max_image_pixels
    for index in range(len(source)):
        try:
            yield Image.fromarray(place(source.image(index), (side, side), max_pixels=most).pixels)
        except BadSample as error:
            data.bad.count({source.name(index): str(error)})


def _prompted_accuracy(
    classifier: Any, pictures: Sequence[MissingPicture], written: Callable[[str], str]
) -> dict[str, Estimate]:
    """Return the share of pictures that show their prompt, of the prompts that the classifier knows."""
    labels = {written(prompt): label for prompt, label in zip(*classifier.prompts(len(pictures)))}
    judged = [each for each in pictures if each.prompt in labels]
    if not judged:
        return {}
    images = [Image.open(each.path).convert("RGB") for each in judged]  # which closes the file
    share = classifier.accuracy(images, [labels[each.prompt] for each in judged])
    return {"prompted accuracy": share_estimate(share, len(judged))}


def _caption_gap(
    model: LatentDiffusion, data: SDDataModule, spec: RunSpec, device: torch.device
) -> dict[str, Estimate]:
    """Return the caption gap as the run's validation measures it, if it can be measured."""
    if spec.get("objective") and (found := _not_built(spec, "objective")) is not None:
        print(f"the caption gap is not measured with {found}: others may have written it, so it is not built")
        return {}
    kept: list[Tensor] = []

    def keep(trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        if (gaps := outputs.get("caption_gap")) is not None:
            kept.append(gaps[batch.get("sample_weight", torch.ones_like(gaps)) > 0].cpu())

    module = SDLightningModule(model, objective=spec.objective, seed=spec.get("seed", 0))
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    devices = 1 if device.type == "cpu" else [device.index or 0]
    alone = [LightningEnvironment()]  # under SLURM, Lightning would ask for a device for each task
    options |= {"callbacks": [LambdaCallback(on_validation_batch_end=keep)], "plugins": alone}
    trainer = pl.Trainer(accelerator=device.type, devices=devices, enable_checkpointing=False, **options)
    trainer.validate(module, data, verbose=False)
    return {"caption gap": mean_estimate(torch.cat(kept))} if kept else {}


def _write(folder: Path, record: dict[str, Any]) -> None:
    """Print the metrics, and write them: beside those of earlier calls on the same pictures."""
    known = read_evaluation(folder)
    same = ("num_samples", "data", "seed", "settings")
    if all(known.get(key) == json.loads(json.dumps(record[key])) for key in same):
        record["metrics"] = {**known["metrics"], **record["metrics"]}
    write_whole(folder / runs.EVALUATION, json.dumps(record, indent=1) + "\n")
    if (folder / "summary.json").is_file():
        metrics = read_metrics(folder / "logs") if (folder / "logs").exists() else {}
        write_report(folder, read_json(folder / "summary.json"), metrics, (folder / "config.yaml").read_text("utf-8"))
    print_lines([*aligned([HEAD, *table(record)], at_left=(0, 4)), f"written to {folder / runs.EVALUATION}"])
