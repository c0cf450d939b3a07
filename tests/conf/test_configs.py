"""Every YAML file of conf/: composed as the command line does, checked, and what it describes is built."""

import functools
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf
from PIL import Image

import small_store
from archives import image_rows, sample, write_parquet, write_tar
from composing import Compose, registered
from places import CONF
from sd_lightning import LatentDiffusion, Objective, SDDataModule, SDLightningModule, UsageError, _conf, apps
from sd_lightning._conf import messages
from sd_lightning._conf.annotations import our_value
from sd_lightning._conf.command_line import CommandLine
from sd_lightning.apps import export, generate
from sd_lightning.apps import train as train_program
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.quantization import Int8
from sd_lightning.remote.launchers import Local, Ray
from sd_lightning.training.speed import Speed

PROGRAMS = {file.stem for file in CONF.glob("*.yaml")}
FILES = sorted(str(file.relative_to(CONF).with_suffix("")) for file in CONF.glob("*/**/*.yaml"))
OPTIONS = [file for file in FILES if not file.startswith("devices/")]  # tables, read by the planner: no Hydra group
NEEDS = {
    "optimizer/prodigy": "prodigyopt",
    "optimizer/schedule_free": "schedulefree",
    "data/huggingface": "datasets",
    "data/parquet": "pyarrow",
    "logger/wandb": "wandb",
    "strategy/deepspeed": "deepspeed",
}
"""Packages of extras, by the options that need them."""


def parameter_groups() -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.ones(2))]}]


def build_model(cfg: DictConfig) -> None:
    on_meta = functools.partial(LatentDiffusion.build, device="meta")  # sdxl's weights take a minute to make
    with mock.patch.object(LatentDiffusion, "build", on_meta):
        model = _conf.instantiate(cfg.model)
    assert isinstance(model, LatentDiffusion)
    module = _conf.instantiate(cfg.module, latent_diffusion=model)
    assert isinstance(module, SDLightningModule)
    assert ("text_encoder" in module.trained_networks()) == cfg.module.train_text_encoder
    assert module.objective.prediction_type == model.scheduler_config.get("prediction_type", "flow")


def build_objective(cfg: DictConfig) -> None:
    assert isinstance(_conf.instantiate(cfg.objective), Objective)


def build_optimizer(cfg: DictConfig) -> None:
    optimizer = _conf.instantiate(cfg.optimizer)(parameter_groups())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == cfg.optimizer.lr


def build_lr_scheduler(cfg: DictConfig) -> None:
    optimizer = torch.optim.SGD(parameter_groups(), lr=1.0)
    scheduler = _conf.instantiate(cfg.lr_scheduler)(optimizer)
    rates = []
    for _ in range(cfg.trainer.max_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(1.0, abs=0.1), "the learning rate is reached"
    assert min(rates) > 0


def build_strategy(cfg: DictConfig) -> None:
    try:
        strategy = _conf.instantiate(cfg.strategy)
    except UsageError as error:
        # ColossalAI, or what DeepSpeed builds its extensions with: what is missing is named, and how to get it.
        assert re.search(r"(colossalai|async_io).*install it with: (pip|apt-get) install ", str(error)), error
        return
    assert isinstance(strategy, str | Strategy)


def build_trainer(cfg: DictConfig) -> None:
    trainer = train_program.build_trainer(RunSpec.of(cfg))
    assert isinstance(trainer, pl.Trainer)
    assert trainer.max_steps == cfg.trainer.max_steps


def build_callbacks(cfg: DictConfig) -> None:
    callbacks = [_conf.instantiate(node) for node in cfg.callbacks.values() if node is not None]
    assert callbacks and all(isinstance(callback, Callback) for callback in callbacks)


def build_launcher(cfg: DictConfig) -> None:
    assert isinstance(_conf.instantiate(cfg.launcher), Local | Ray)


def build_logger(cfg: DictConfig) -> None:
    loggers = [_conf.instantiate(node) for node in cfg.logger.values()]
    assert loggers and all(isinstance(logger, Logger) for logger in loggers)
    assert "CSVLogger" in {type(logger).__name__ for logger in loggers}, "the report reads the CSV file"


def build_data(cfg: DictConfig) -> None:
    data = _conf.instantiate(cfg.data)
    assert isinstance(data, SDDataModule)
    assert data.num_train_samples >= data.batch_size == cfg.data.batch_size
    source = data.source_train
    assert source.captions(0) and (source.latents is not None or source.image(0).mode == "RGB")


def build_quantization(cfg: DictConfig) -> None:
    assert _conf.instantiate(cfg.quantization) == Int8(), "the file repeats the defaults, for people to see and change"


def build_sampling(cfg: DictConfig) -> None:
    assert isinstance(_conf.instantiate(cfg.sampling), SamplingOptions)


def build_preservation(cfg: DictConfig) -> None:
    kept = RunSpec.of(cfg).preservation
    assert kept is None or (kept.weight, kept.is_blank) == (1.0, not kept.words)


def build_trainable(cfg: DictConfig) -> None:
    module = train_program.build_module(RunSpec.of(cfg))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert names and all((".lora_" in name) == (cfg.lora is not None) for name in names)


def build_experiment(cfg: DictConfig) -> None:
    """What an experiment chooses fits together; its model is built beside its own option."""
    for group in ("data", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "callbacks", "logger"):
        if group == "data" and cfg.get("with_prior_preservation"):
            continue  # there are no pictures of the class before the run
        BUILDERS[group](cfg)


BUILDERS: dict[str, Callable[[DictConfig], None]] = {
    "callbacks": build_callbacks,
    "data": build_data,
    "experiment": build_experiment,
    "launcher": build_launcher,
    "logger": build_logger,
    "lr_scheduler": build_lr_scheduler,
    "model": build_model,
    "objective": build_objective,
    "optimizer": build_optimizer,
    "preservation": build_preservation,
    "quantization": build_quantization,
    "sampling": build_sampling,
    "strategy": build_strategy,
    "trainable": build_trainable,
    "trainer": build_trainer,
}


def values_for(option: str, tmp_path: Path) -> list[str]:
    """Give the values that an option has no default for."""
    from_store = (
        "experiment/ladder_latents",
        "experiment/ladder_compile",
        "experiment/consumer_gpu",
        "experiment/little_host_memory",
        "experiment/qlora",
    )
    if option in ("data/images", "experiment/sd21_finetune") or (
        option.startswith("experiment/ladder_") and option not in from_store
    ):
        for i in range(20):
            Image.new("RGB", (16, 16)).save(tmp_path / f"{i}.png")
            (tmp_path / f"{i}.txt").write_text("black")
        return [f"data.train_data_dir={tmp_path}", *["data.batch_size=16"] * option.startswith("experiment/ladder_")]
    if option == "data/dreambooth" or option.startswith(("experiment/dreambooth", "experiment/auto")):
        for i in range(3):
            Image.new("RGB", (16, 16)).save(tmp_path / f"{i}.png")
        key = option.startswith("data/") * "data."
        return [f"{key}instance_data_dir={tmp_path}", f"{key}instance_prompt=a sks square"]
    if option == "data/huggingface":
        from datasets import Dataset

        digits = Digits("val")
        rows = {"image": [digits.image(i) for i in range(20)], "text": [digits.captions(i)[0] for i in range(20)]}
        Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
        return [f"data.dataset_name={tmp_path / 'saved'}"]
    if option == "data/latents" or "_pretrain_" in option or option in from_store:
        small_store.update(tmp_path / "saved", ImageFolder(small_store.write_pictures(tmp_path / "saved/photos", 20)))
        of_store = ["data.resolution=null", "data.batch_size=16", "trainer.max_steps=15000"]
        return [f"data.store={tmp_path / 'saved'}", *(of_store if option != "data/latents" else [])]
    if option == "data/webdataset":
        write_tar(tmp_path / "a.tar", {k: v for i in range(20) for k, v in sample(f"{i}", i).items()})
        return [f"data.train_data_dir={tmp_path}"]
    if option == "data/parquet":
        write_parquet(tmp_path / "a.parquet", image_rows(20))
        return [f"data.train_data_dir={tmp_path}"]
    if option.endswith("_nvme"):
        return [f"strategy.nvme_path={tmp_path}"]
    if option == "preservation/class":
        return ["preservation.words={sks dog:dog}"]
    if option == "optimizer/prodigy":
        return ["optimizer.lr=1"]  # model=tiny has a learning rate for AdamW
    return []


def need(option: str) -> None:
    for prefix, package in NEEDS.items():
        if option.startswith(prefix):
            pytest.importorskip(package, reason=f"{option} needs the package {package}")


def test_every_group_has_a_builder_here() -> None:
    assert {option.partition("/")[0] for option in OPTIONS} == BUILDERS.keys()
    assert (
        PROGRAMS
        == {"train", "dreambooth", "generate", "evaluate", "export", "precompute", "plan", "compare", "doctor", "ui"}
        == {*apps.PROGRAMS}
    ), "give it a test below"
    assert {file.suffix for file in CONF.rglob("*") if file.is_file()} == {".yaml"}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_builds(
    option: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(option)
    # sd15 and larger have gigabytes of weights; everything but their values is made on the meta device, too.
    if option.startswith("model/") and not option.startswith("model/tiny"):
        monkeypatch.setattr(LatentDiffusion, "build", functools.partial(LatentDiffusion.build, device="meta"))
    group, _, name = option.partition("/")
    programs = {"experiment/dreambooth": "dreambooth", "experiment/auto": "dreambooth", "quantization/": "generate"}
    program = next((program for start, program in programs.items() if option.startswith(start)), "train")
    cfg = compose(program, f"{group}={name}", *values_for(option, tmp_path))
    BUILDERS[group](cfg)
    assert {path.name for path in tmp_path.iterdir() if not path.suffix} <= {"saved"}, "building must not write files"


@pytest.mark.parametrize("name", [option.partition("/")[2] for option in OPTIONS if option.startswith("model/")])
def test_every_model_loads_its_own_pretrained_weights_from_a_folder(
    name: str, compose: Compose, tiny_pipeline: Path
) -> None:
    cfg = compose("train", f"model={name}", f"model.pretrained={tiny_pipeline}")
    if name not in ("tiny", "tiny_frozen"):
        with pytest.raises(UsageError, match=f"model={name}, but .* holds .*; write model=tiny"):
            _conf.instantiate(cfg.model)
        return
    model = _conf.instantiate(cfg.model)
    expected = LatentDiffusion.build("tiny", seed=5).denoiser.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.denoiser.state_dict().items())


@pytest.fixture(scope="module")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    LatentDiffusion.build("tiny", seed=5).save_pretrained(folder)
    return folder


def test_train_builds_everything_at_once(compose: Compose) -> None:
    cfg = compose("train")
    module = train_program.build_module(RunSpec.of(cfg))
    assert isinstance(_conf.instantiate(cfg.speed), Speed)
    trainer, data = train_program.build_trainer(RunSpec.of(cfg)), _conf.instantiate(cfg.data)
    train_program.check_parts(trainer, module, data)
    assert {type(c).__name__ for c in trainer.callbacks} >= {  # type: ignore[attr-defined]
        *("EMA", "NonFiniteLossGuard", "PortableCheckpoint", "SampleGrid", "StopOnSignal", "Throughput"),
        "TrainingProgress",
    }


def test_train_can_go_without_optional_parts(compose: Compose) -> None:
    cfg = compose("train", "callbacks.ema=null", "callbacks.samples=null", "logger.tensorboard=null")
    trainer = train_program.build_trainer(RunSpec.of(cfg))
    assert not {"EMA", "SampleGrid"} & {type(c).__name__ for c in trainer.callbacks}  # type: ignore[attr-defined]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger"]


def test_loggers_of_a_run_count_their_versions_apart(compose: Compose) -> None:
    loggers = [_conf.instantiate(node) for node in compose("train", "logger=default").logger.values()]
    assert [logger.root_dir for logger in loggers] == [
        f"runs/tiny-digits/logs/{name}" for name in ("csv", "tensorboard")
    ]


def test_generate_builds_its_request(compose: Compose, tiny_pipeline: Path) -> None:
    request = _conf.instantiate(compose("generate", f"run={tiny_pipeline}", "prompts=[a, b]"))
    assert isinstance(request, generate.GenerationRequest)
    assert (request.source, request.prompts) == (tiny_pipeline, ["a", "b"])
    assert (request.num_inference_steps, request.guidance_scale) == (None, None), "the model's own"


def test_export_builds_its_request(compose: Compose, tiny_pipeline: Path) -> None:
    request = _conf.instantiate(compose("export", f"run={tiny_pipeline}", "format=single_file"))
    assert isinstance(request, export.ExportRequest)
    assert (request.run, request.format, request.dtype) == (str(tiny_pipeline), "single_file", None)
    assert request.output_dir == "exported/single_file"


def test_dreambooth_takes_the_names_that_people_know(compose: Compose) -> None:
    values = {
        "learning_rate": ("optimizer.lr", 3e-4),
        "max_train_steps": ("trainer.max_steps", 7),
        "train_text_encoder": ("module.train_text_encoder", True),
        "gradient_checkpointing": ("speed.gradient_checkpointing", True),
        "resolution": ("data.resolution", 64),
        "prior_loss_weight": ("data.prior_loss_weight", 0.5),
        "num_class_images": ("data.num_class_images", 9),
        "instance_data_dir": ("data.instance_data_dir", "photos"),
        "instance_prompt": ("data.instance_prompt", "a photo of sks dog"),
        "class_data_dir": ("data.class_data_dir", "dogs"),
        "lora.rank": ("lora.rank", 16),
    }
    arguments = [f"{name}={value}" for name, (_, value) in values.items()]
    cfg = compose("dreambooth", "trainable=lora", "model=tiny", *arguments)
    assert {key: OmegaConf.select(cfg, key) for key, _ in values.values()} == dict(values.values())
    assert cfg.sampling.num_inference_steps == 12, "what a model chooses for drawing stays"


OTHER_NAMES = {
    "train": {
        "mixed_precision=bf16": "trainer.precision=bf16-mixed",
        "precision=fp16": "trainer.precision=16-mixed",
        "trainer.precison=bf16": "trainer.precision=bf16-mixed",
        "rank=8": "trainable=lora lora.rank=8",
        "lora.rank=8": "trainable=lora lora.rank=8",
        "trainer.gpus=1": "trainer.devices=1",
        "train_data_dir=foo": "data=images data.train_data_dir=foo",
        "trainer.max_epochs=3": "trainer.max_steps=<n>",
        "epochs=2": "trainer.max_steps=<n>",
        "trainer.strategy=ddp": "strategy=ddp",
        "steps=3": "trainer.max_steps=3",
        "strategy.bucket_cap_mb=25": "strategy=ddp strategy.bucket_cap_mb=25",
        "shuffle_caption=true": "data.shuffle_tags=true",
        "keep_tokens=2": "data.keep_tags=2",
        "caption_tag_dropout_rate=0.1": "data.tag_dropout=0.1",
        "caption_separator=;": "data.tag_separator=;",
        "caption_dropout_rate=0.1": "data.proportion_empty_prompts=0.1",
        "caption_extension=.caption": "data=images data.caption_extension=.caption",
        "masked_loss=true": "data=images data.masked_loss=files",
        "conditioning_data_dir=masks": "data=images data.masked_loss=files",
        "mask_min_value=0.1": "data=images data.unmasked_weight=0.1",
    },
    "dreambooth": {
        "train_data_dir=foo": "instance_data_dir=foo",
        "steps=3": "max_train_steps=3",
        "alpha_mask=true": "data.masked_loss=alpha",
        "reg_data_dir=dogs": "class_data_dir=dogs",
        "class_tokens=sks": "instance_prompt=sks",
    },
    "generate": {"prompt=cat": "'prompts=[cat]'", "prompt=3": """'prompts=["3"]'"""},
}
"""What people write by habit -> what the message tells them to write."""


@pytest.mark.parametrize("program", OTHER_NAMES)
def test_names_and_values_of_other_tools_are_answered_with_ours(program: str) -> None:
    command_line = CommandLine.parse(program, [])
    for override, ours in OTHER_NAMES[program].items():
        message = messages._unknown_key(override, override.partition("=")[0], command_line)
        assert message.endswith(f"; write {ours}"), message
    if program == "train":
        assert our_value("strategy", "deepspeed_stage_2") == "deepspeed_zero2"
        assert our_value("data", "imagefolder") == "images"
        options = {
            "--train_batch_size=4": "data.batch_size=4",
            "--experiment sd21_finetune": "experiment=sd21_finetune",
        }
        for words, ours in options.items():
            option = words.split()[0]
            assert messages._option_as_setting(option, words.split(), command_line) == ours


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_help_shows_a_programs_own_groups_settings_and_examples_that_work(
    program: str, compose: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context, pytest.raises(SystemExit) as end:
        context.setattr(sys, "argv", [f"{program}.py", "--help"])
        _conf.main(replace(registered(program), task=lambda cfg: pytest.fail("the task ran")))
        sys.exit()
    shown = capsys.readouterr().out
    assert not end.value.code and f"Usage: python -m sd_lightning.{program} " in shown
    choices = OmegaConf.load(CONF / f"{program}.yaml").defaults
    groups = [name for each in choices if each != "_self_" for name in each if not name.startswith("override")]
    assert re.findall(r"^  (\w+) \[\w+\]: \w", shown, flags=re.M) == groups
    assert ("dreambooth_8gb" in re.findall(r"\w+", shown)) == (program == "dreambooth")
    assert {"precompute": "store: ", "plan": "gpu: ", "compare": "runs: ", "ui": "runs: "}.get(
        program, "output_dir: "
    ) in shown and "_target_" not in shown
    examples = re.findall(rf"^  python -m sd_lightning\.{program}(.*)$", shown.replace("\\\n", ""), flags=re.M)
    assert len(examples) >= 2
    for example in examples:
        compose(program, *shlex.split(example))
