"""The training program: build the parts, fit, and write the results."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import hub
from sd_lightning.apps.bucket import in_bucket
from sd_lightning.apps.preflight import check_trainer, preflight
from sd_lightning.apps.results import callback_of, catch_up, checkpoints_of, finish, locked
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.planner.segments import use_expandable_segments
from sd_lightning.remote.launchers import Ray
from sd_lightning.report.evaluation import read_evaluation
from sd_lightning.storage import checkpoint, far_runs, runs
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.runs import PLAN

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from omegaconf import DictConfig

    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.planner.choice import PlanChoice
    from sd_lightning.storage.uploads import RunUploads
    from sd_lightning.training.module import SDLightningModule

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> int:
    """Train a latent-diffusion model; return the exit code of :func:`run`."""
    return start(RunSpec.of(cfg), run)


def start(spec: RunSpec, run: Callable[..., int]) -> int:
    """Call :func:`run`, or a partial of it, where the launcher says; return its exit code."""
    if not isinstance(spec.launcher, Ray):
        return run(spec)
    from sd_lightning.apps.launching import launch

    return launch(spec, spec.launcher, run)


def run(
    spec: RunSpec,
    *,
    prepare: Callable[[RunSpec], None] | None = None,
    asked: Callable[[], bool] | None = None,
) -> int:
    """Train a latent-diffusion model.

    Args:
        spec: The run.
        prepare: Called after all checks that need neither data nor model, before these are built.
        asked: Returns whether to stop after a step, as at a signal; called at every step.

    Returns:
        Exit code: 0, 75 if a signal stopped the run and ``resume=auto`` continues it, or 1 if only its upload to the
        hub failed.
    """
    use_expandable_segments()
    return in_bucket(spec, partial(_run, spec, prepare, asked))


def _run(
    spec: RunSpec,
    prepare: Callable[[RunSpec], None] | None,
    asked: Callable[[], bool] | None,
    uploads: RunUploads | None,
) -> int:
    from sd_lightning.callbacks import SampleGrid, StopOnSignal

    spec = preflight(spec)
    run_dir, resume, choice = spec.output_dir, spec.resume, None
    if resume is not None:
        step = checkpoint.step_of(resume)
        source = resume.parents[1] if runs.holds(run_dir, resume) else run_dir
        if spec["trainer.max_steps"] <= step and runs.is_finished(source, step):
            log.info("%s is complete; raise trainer.max_steps to train on, results are in %s", resume, run_dir)
            if uploads is not None and not far_runs.is_copy(resume):  # the first time something was denied, perhaps
                uploads.open(keep=spec["callbacks.checkpoint"].get("keep", 3), step=step)
                uploads.begin()
            return conclude(spec)
    if spec.left_to_planner():
        from sd_lightning.apps.planning import choose_plan  # takes longer to import than the rest

        spec.model.check(spec.trained_text)
        spec, choice = choose_plan(spec)
        check_trainer(spec)
        if is_first_process():
            print(*choice.lines(), sep="\n")
    trainer = build_trainer(spec)
    stop = callback_of(trainer, StopOnSignal)
    if stop is not None:
        stop.asked = asked
    spec.model.check(spec.trained_text)
    if spec.speed.limits_activations:
        from sd_lightning.apps.planning import recomputation

        spec = replace(spec, recomputation=recomputation(spec, choice))
    if prepare is not None:
        prepare(spec)
    pretrained = spec.model.get("pretrained")
    checkpoints_of(trainer).pretrained_url = pretrained if far_runs.is_url(pretrained) else None
    datamodule = build_data(spec)
    datamodule.check_preservation(spec.preservation, spec.learned_token)  # before the model is read
    if spec.model.is_ours and datamodule.source_train.latents is None:
        datamodule.images.check_model(spec.model.describe())  # before a chat model is read
    module = build_module(spec)
    check_parts(trainer, module, datamodule)
    module.encoder.is_idle = not datamodule.needs_encoders and callback_of(trainer, SampleGrid) is None
    open_run(spec, trainer, choice, uploads)
    from sd_lightning.strategies.processes.group import process_group_shutdown

    with process_group_shutdown(trainer):
        try:
            trainer.fit(module, datamodule)
        except torch.OutOfMemoryError as error:
            if choice is None:
                raise
            raise choice.out_of_memory() from error
        saving = checkpoints_of(trainer)
        with locked(trainer, saving.folder):
            if saving.restored is not None and trainer.max_steps <= checkpoint.step_of(saving.restored):
                catch_up(trainer, module, datamodule)
            code = finish(trainer, datamodule, spec)
    return code or conclude(spec, datamodule)


def conclude(spec: RunSpec, data: SDDataModule | None = None) -> int:
    """Evaluate a finished run, then upload it to the hub, as its settings say.

    Args:
        spec: The run.
        data: Its data, if it has just been trained; else it is evaluated only if it is not yet, on those that its
            ``config.yaml`` names.

    Returns:
        Exit code: 0, or 1 if it could not be uploaded.
    """
    from sd_lightning.callbacks import Evaluation

    if not is_first_process():
        return 0
    options = next((each for each in spec.callbacks.values() if isinstance(each, Evaluation)), None)
    if options is not None and not (spec.output_dir / "pipeline").is_dir():
        log.warning("%s was trained on another machine, and is not evaluated here", spec.url)
    elif options is not None and (data is not None or not read_evaluation(spec.output_dir)):
        from sd_lightning.apps.evaluate import EvaluationRequest, evaluate

        device = "cuda" if spec.cuda_devices else "cpu"
        evaluate(EvaluationRequest(**asdict(options), run=str(spec.output_dir), data=data, device=device))
    return 0 if spec["push_to_hub"] is None else hub.push_run(spec)


def build_data(spec: RunSpec) -> SDDataModule:
    """Build the data, and before that what encodes them elsewhere.

    Raises:
        UsageError: Data or encoders cannot be built.
    """
    data = spec["data"]
    if data.get("encoders") != "ray":
        return spec.build("data")
    from sd_lightning.remote.encoders import RayEncoders

    settings = {name: data[f"encoder_{name}"] for name in ("resources", "labels")}
    encoders = RayEncoders(data["num_encoders"], **settings, run=spec.output_dir)
    if is_first_process():  # before data are read; the others are told the cluster
        encoders.connect()
    return spec.build("data", loaders=encoders)


def build_trainer(spec: RunSpec) -> pl.Trainer:
    """Build the trainer with the callbacks, loggers and strategy of the run."""
    from sd_lightning.training.speed import precision_options

    loggers = [spec.build(f"logger.{name}") for name, node in (spec.get("logger") or {}).items() if node is not None]
    if any(type(logger).__name__ == "WandbLogger" for logger in loggers):
        require("wandb", extra="loggers", who="logger=wandb")  # Lightning looks for it only at the first metric
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, "default_root_dir": spec["output_dir"]}
    return spec.build(
        "trainer",
        strategy=spec.strategy,
        **{"precision": None, **precision_options(spec["trainer.precision"], spec.strategy)},
        callbacks=list(spec.callbacks.values()),
        logger=loggers or False,
        use_distributed_sampler=False,
        **{key: value for key, value in options.items() if key not in spec["trainer"]},
    )


def build_module(spec: RunSpec) -> SDLightningModule:
    """Build the model, wrap it for training, and apply the speed switches."""
    grows = spec.learned_token is not None  # a row is added to the weights that the text encoder's file holds
    trains_texts = spec["module.train_text_encoder"] and not grows
    module = wrap(spec, spec.load_model(deferred=("trainable" if trains_texts else "denoiser",)))
    if spec.starts_from_lightning:
        checkpoint.load_lightning_checkpoint(spec["init_from"], module)
    spec.speed.apply_(module.trained_networks(), None if spec.recomputation is None else spec.recomputation.kept)
    return module


def wrap(spec: RunSpec, latent_diffusion: LatentDiffusion) -> SDLightningModule:
    """Wrap a model for training, with LoRA adapters, a learned token and preservation if configured."""
    # Users' own modules need not accept these.
    optional = {"lora": spec.lora, "learned_token": spec.learned_token, "preservation": spec.preservation}
    return spec.build(
        "module",
        latent_diffusion=latent_diffusion,
        objective=spec.objective,
        optimizer=spec.optimizer,
        lr_scheduler=spec.lr_scheduler,
        **{name: part for name, part in optional.items() if part is not None},
    )


def check_parts(trainer: pl.Trainer, module: SDLightningModule, datamodule: SDDataModule) -> None:
    """Check before training that trainer, module, data and the checkpoint to resume fit together.

    Raises:
        UsageError: They do not.
    """
    from sd_lightning.callbacks import EngineMemory, Evaluation, SampleGrid
    from sd_lightning.strategies import engine_of

    memory = callback_of(trainer, EngineMemory)
    if memory is not None:
        memory.check(trainer.strategy)
    num_processes, accumulate = trainer.num_devices * trainer.num_nodes, trainer.accumulate_grad_batches
    datamodule.batching.check(datamodule.source_train, num_processes, accumulate)
    datamodule.check_model(module.latent_diffusion, train_text_encoder=module.encoder.train_text_encoder)
    datamodule.check_preservation(getattr(module, "preservation", None))  # now it is known what a store has of texts
    saving = checkpoints_of(trainer)
    saving.check_resume(module, datamodule)
    if saving.best is not None:
        saving.best.check_gap(datamodule.caption_gap_problem(module.latent_diffusion.tokenize))
    if is_first_process():  # it reads files; the other ranks get the result before the first step
        saving.check_data(datamodule)
        evaluation = callback_of(trainer, Evaluation)
        if evaluation is not None:
            evaluation.read_features(datamodule, torch.device("cpu"))
    engine_of(trainer.strategy).check(trainer, module)
    samples = callback_of(trainer, SampleGrid)
    if samples is not None:
        samples.options.check(module.latent_diffusion)
    batches = datamodule.batching.most_batches(datamodule.source_train) * accumulate
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int) and interval > batches:
        raise UsageError(
            f"trainer.val_check_interval={interval}: an epoch has only {batches} forward passes; write "
            "trainer.check_val_every_n_epoch=null to count on over epochs, or a smaller number"
        )


def open_run(spec: RunSpec, trainer: pl.Trainer, choice: PlanChoice | None, uploads: RunUploads | None = None) -> None:
    """Create the run's directory, write the configuration and the plan into it, and start the loggers."""
    if not trainer.is_global_zero:
        return  # the others wait for rank 0 before they look into it
    run_dir, settings = spec.output_dir, spec.yaml()
    saving, resume = checkpoints_of(trainer), spec.resume
    saving.folder.open(overwrite=spec["overwrite"])
    if spec.url is not None and resume is not None and far_runs.working_folder(spec.url, "fetched") in resume.parents:
        far_runs.fetch_records(spec.url, run_dir, runs.is_record, who="output_dir")  # curves go on where they were
    if uploads is not None:
        step = 0 if resume is None else checkpoint.step_of(resume)
        uploads.open(keep=saving.keep, step=step)
        saving.uploads = uploads
    write_whole(run_dir / "config.yaml", settings)  # a link of that name is replaced, not followed
    if choice is not None:
        from sd_lightning.apps.plan_output import record

        plans = record(choice.plans, title=choice.who, settings="of this run, in config.yaml")
        write_whole(run_dir / PLAN, json.dumps(plans, indent=1))
    else:
        (run_dir / PLAN).unlink(missing_ok=True)  # of an earlier start of this run
    for logger in trainer.loggers:
        try:
            _ = logger.experiment  # type: ignore[attr-defined]
        except Exception as error:  # W&B without a key or a network, a broken database, ...
            raise UsageError(
                f"logger: {type(logger).__name__} cannot start ({type(error).__name__}: {error}); mend that, or write "
                "logger=default"
            ) from error
