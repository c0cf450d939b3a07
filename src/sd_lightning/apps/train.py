"""The training program: build the parts, fit, and write the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning import _conf
from sd_lightning._console import quiet_libraries
from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.preflight import (
    LOAD_MODEL,
    Parts,
    averages_by_lightning,
    check_model,
    is_lightning_checkpoint,
    preflight,
)
from sd_lightning.apps.results import callback_of, catch_up, checkpoints_of, finish, locked
from sd_lightning.apps.trainer_checks import check_trainer, left_to_planner
from sd_lightning.planner.segments import use_expandable_segments
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.atomic import new_file
from sd_lightning.storage.run_folder import PLAN

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy
    from omegaconf import DictConfig

    from sd_lightning.apps.auto import Chosen
    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.models.latent_diffusion import LatentDiffusion
    from sd_lightning.training.module import SDLightningModule

    Prepare = Callable[[DictConfig, Strategy, Parts], None]

log = logging.getLogger(__name__)


def train(cfg: DictConfig, *, prepare: Prepare | None = None) -> int:
    """Train a latent-diffusion model.

    Args:
        cfg: The configuration.
        prepare: Called with ``cfg``, the strategy and the parts after all checks that need neither data nor model,
            before these are built.

    Returns:
        Exit code: 0, or 75 if a signal stopped the run and ``resume=auto`` continues it.
    """
    use_expandable_segments()
    run_dir = Path(cfg.output_dir)
    resume, parts = preflight(cfg, run_dir)
    trained = resume is not None and cfg.trainer.max_steps <= checkpoint.step_of(resume)
    if resume is not None and trained and runs.is_finished(run_dir, checkpoint.step_of(resume)):
        log.info("%s is complete; raise trainer.max_steps to train on, results are in %s", resume, run_dir)
        return 0
    quiet_libraries()
    chosen, parts = planned(cfg, parts, resume)
    trainer = build_trainer(cfg, resume)
    check_model(cfg)
    parts = with_recomputation(cfg, trainer.strategy, parts, chosen)
    if prepare is not None:
        prepare(cfg, trainer.strategy, parts)
    datamodule = _conf.instantiate(cfg.data)
    module = build_module(cfg, parts)
    check_parts(trainer, module, datamodule)
    open_run(cfg, run_dir, trainer, chosen)
    from sd_lightning.strategies.processes.group import process_group_shutdown

    with process_group_shutdown(trainer):
        try:
            trainer.fit(module, datamodule)
        except torch.OutOfMemoryError as error:
            if chosen is None:
                raise
            raise chosen.out_of_memory() from error
        saving = checkpoints_of(trainer)
        with locked(trainer, saving.folder):
            if saving.restored is not None and trainer.max_steps <= checkpoint.step_of(saving.restored):
                catch_up(trainer, module, datamodule)
            return finish(trainer, datamodule, run_dir)


def planned(cfg: DictConfig, parts: Parts, resume: Path | None) -> tuple[Chosen | None, Parts]:
    """Let the planner choose what the configuration leaves to it, and print the choice."""
    if not left_to_planner(cfg):
        return None, parts
    from sd_lightning.apps import auto
    from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state

    check_model(cfg)
    chosen = auto.choose(
        cfg, parts, batch_size=None if resume is None else read_trainer_state(resume)["position"]["batch_size"]
    )
    check_trainer(cfg)
    if is_first_process():
        print(*chosen.lines(), sep="\n")
    return chosen, replace(parts, speed=_conf.instantiate(cfg.speed))


def with_recomputation(cfg: DictConfig, strategy: Strategy, parts: Parts, chosen: Chosen | None = None) -> Parts:
    """Choose what blocks keep for backward, if ``speed.gradient_checkpointing`` is a limit."""
    if not parts.speed.limits_activations:
        return parts
    from sd_lightning.apps.planning import recomputation

    return replace(parts, recomputation=recomputation(cfg, strategy, parts, None if chosen is None else chosen.plans))


def build_trainer(cfg: DictConfig, resume: Path | None) -> pl.Trainer:
    """Build the trainer with the configured callbacks, loggers and strategy."""
    chosen = {name: node for name, node in cfg.callbacks.items() if node is not None}
    given = {"checkpoint": {"resume": resume}}
    callbacks = [_conf.instantiate(node, **given.get(name, {})) for name, node in chosen.items()]
    nodes = [node for node in (cfg.get("logger") or {}).values() if node is not None]
    if any(node["_target_"].endswith("WandbLogger") for node in nodes):
        require("wandb", extra="loggers", who="logger=wandb")  # Lightning looks for it only at the first metric
    loggers = [_conf.instantiate(node) for node in nodes]
    options = {"num_sanity_val_steps": 0, "enable_model_summary": False, "default_root_dir": cfg.output_dir}
    strategy = _conf.instantiate(cfg.strategy)
    from sd_lightning.training.precision import precision_options

    return _conf.instantiate(
        cfg.trainer,
        strategy=strategy,
        **{"precision": None, **precision_options(cfg.trainer.precision, strategy)},
        callbacks=callbacks,
        logger=loggers or False,
        use_distributed_sampler=False,
        **{key: value for key, value in options.items() if key not in cfg.trainer},
    )


def build_module(cfg: DictConfig, parts: Parts) -> SDLightningModule:
    """Build the model, wrap it for training, and apply the speed switches."""
    grows = cfg.get("learned_token") is not None  # a row is added to the weights that the text encoder's file holds
    deferred = ("denoiser", "text_encoders") if cfg.module.train_text_encoder and not grows else ("denoiser",)
    module = wrap(cfg, _conf.instantiate(cfg.model, **deferral(cfg, deferred)), parts)
    if is_lightning_checkpoint(cfg.init_from):
        runs.load_lightning_checkpoint(cfg.init_from, module)
    chosen = parts.recomputation
    parts.speed.apply_(module.trained_networks(), None if chosen is None else chosen.kept)
    return module


def wrap(cfg: DictConfig, latent_diffusion: LatentDiffusion, parts: Parts) -> SDLightningModule:
    """Wrap a model for training, with LoRA adapters and a learned token if configured."""
    optional = {"lora": parts.lora, "learned_token": parts.learned_token}  # users' own modules need not accept these
    return _conf.instantiate(
        cfg.module,
        latent_diffusion=latent_diffusion,
        objective=parts.objective,
        optimizer=parts.optimizer,
        lr_scheduler=parts.lr_scheduler,
        **{name: part for name, part in optional.items() if part is not None},
    )


def deferral(cfg: DictConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the model argument that defers loading the weights of networks, or nothing where it is impossible."""
    if cfg.model["_target_"] != LOAD_MODEL or is_lightning_checkpoint(cfg.init_from):
        return {}  # a Lightning checkpoint is loaded into whole weights
    if averages_by_lightning(cfg):
        return {}  # it copies the module before a strategy has read its weights
    return {"deferred": tuple(names)}


def check_parts(trainer: pl.Trainer, module: SDLightningModule, datamodule: SDDataModule) -> None:
    """Check before training that trainer, module, data and the checkpoint to resume fit together.

    Raises:
        UsageError: They do not.
    """
    from sd_lightning.callbacks import EngineMemory, SampleGrid
    from sd_lightning.strategies import engine_of

    memory = callback_of(trainer, EngineMemory)
    if memory is not None:
        memory.check(trainer.strategy)
    datamodule.check_batches(trainer.num_devices * trainer.num_nodes, trainer.accumulate_grad_batches)
    datamodule.check_model(module.latent_diffusion, train_text_encoder=module.encoder.train_text_encoder)
    saving = checkpoints_of(trainer)
    saving.check_resume(module, datamodule)
    if is_first_process():  # it reads files; the other ranks get the result before the first step
        saving.check_data(datamodule)
    engine_of(trainer.strategy).check(trainer, module)
    samples = callback_of(trainer, SampleGrid)
    if samples is not None:
        samples.options.check(module.latent_diffusion)
    batches = datamodule.most_batches_per_epoch * trainer.accumulate_grad_batches
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int) and interval > batches:
        raise UsageError(
            f"trainer.val_check_interval={interval}: an epoch has only {batches} forward passes; write "
            "trainer.check_val_every_n_epoch=null to count on over epochs, or a smaller number"
        )


def open_run(cfg: DictConfig, run_dir: Path, trainer: pl.Trainer, chosen: Chosen | None) -> None:
    """Create the run's directory, write the configuration and the plan into it, and start the loggers."""
    from omegaconf import OmegaConf

    if not trainer.is_global_zero:
        return  # the others wait for rank 0 before they look into it
    checkpoints_of(trainer).folder.open(overwrite=cfg.overwrite)
    with new_file(run_dir / "config.yaml") as tmp:  # a link of that name is replaced, not followed
        tmp.write_text(OmegaConf.to_yaml(cfg))
    if chosen is not None:
        chosen.write(run_dir)
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
