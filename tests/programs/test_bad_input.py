"""What a person can get wrong on the command line: one line that says how to mend it, and nothing touched on disk."""

import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from refusals import call, contents, refuse, remove_new
from sd_lightning.apps import dreambooth, export, generate, train
from sd_lightning.storage import checkpoint
from sd_lightning.storage.runs import RunFolder

TABLE = """
# keys
$ train bogus=1
error: bogus=1 … no key 'bogus' … top-level keys are
then train
$ train data.bach_size=4
error: data.bach_size=4 … no key … write data.batch_size=4
then train data.batch_size=4
$ train +trainer.strategy=ddp
error: trainer.strategy=ddp … sets this argument … choose with strategy=<option>
then train strategy=ddp
$ train lora=4
error: lora=4 … expected a section … write trainable=lora lora.rank=4, or lora=null
then train trainable=lora lora.rank=4
$ train train_batch_size=4
error: no key 'train_batch_size' … write data.batch_size=4
then train data.batch_size=4
$ dreambooth epochs=2
error: no key 'epochs' … write max_train_steps=<n>
then dreambooth max_train_steps=3 instance_data_dir=few
$ generate steps=3
error: no key 'steps' … write num_inference_steps=3
then generate num_inference_steps=3
$ generate 'prompts=[a cat&co, seven]'
error: cannot read … 'prompts=["a cat&co",seven]'
then generate 'prompts=["a cat&co",seven]'
$ dreambooth
error: dreambooth got no photos … write instance_data_dir=<folder
then dreambooth instance_data_dir=few
$ dreambooth merge_lora=true
error: no key 'merge_lora' … write trainable=lora merge_lora=true
then dreambooth trainable=lora merge_lora=true instance_data_dir=few
$ train ~callbacks.checkpoint
error: callbacks.checkpoint is missing … expected a section … leave it as it was
then train
$ train callbacks.ema=3
error: callbacks.ema=3 … expected a section … callbacks.ema=null to go without
then train callbacks.ema=null
$ generate sede=1
error: sede=1 … no key … write seed=1
then generate seed=1
$ train objective.timestep_sampling=uniform
error: objective.timestep_sampling=uniform … no key … write objective.weighting_scheme=none
then train objective.weighting_scheme=none
# groups
$ train model=sd16
error: model=sd16 … no such option … available: flux1_dev, klein_4b, klein_9b, krea2
then train model=sd15
$ train model=stabilityai/stable-diffusion-2-1
error: write model=sd21 model.pretrained=stabilityai/stable-diffusion-2
then train model=sd21 model.pretrained=stabilityai/stable-diffusion-2-1
$ train --strategy auto
error: unrecognized arguments: --strategy … write strategy=auto,
then train strategy=auto
$ train experiment=dreambooth_8gb
error: of dreambooth, not of train … sd_lightning.dreambooth experiment=dreambooth_8
then dreambooth experiment=dreambooth_8gb instance_data_dir=few
$ train quantization=int8
error: no group 'quantization' … write python -m sd_lightning.generate quantization=int8
then generate quantization=int8
$ generate strategy=ddp
error: no group 'strategy' … of train and dreambooth … leave it out
then generate
$ generate model=sd15
error: no group 'model' … write run=runs/<name>, or model.pretrained=
then generate run=runs/x
$ export model=sd15
error: no group 'model' … write run=runs/<name>
then export run=runs/x
$ train logger=null
error: logger=null … is a group of configs … available: csv, default, wandb
then train logger=csv
$ train --cfg jobb
error: --cfg … 'jobb' … 'job', 'hydra', 'all'
then train --cfg job
# types
$ train data.batch_size=hello
error: data.batch_size=hello … expected int … write data.batch_size=64
then train data.batch_size=64
$ train optimizer=adamw8bit optimizer.lr=fast
error: optimizer: cannot build it … lr=fast … leave out optimizer.lr
then train optimizer=adamw8bit
$ train callbacks.samples.prompts=seven
error: prompts=seven … expected a list of str … prompts=[seven]
then train callbacks.samples.prompts=[seven]
$ train output_dir=3
error: output_dir=3 … expected str … write 'output_dir=runs/${name}'
then train 'output_dir=runs/${name}'
$ train resume=true
error: resume=true … expected str or null … write resume=auto
then train resume=auto
$ generate run=run prompts=3
error: prompts=3 … expected a list of str … write prompts=['"3"']
then generate run=run prompts=['"3"']
# missing values
$ train data=images
error: data.train_data_dir has no value … give one: data.train_data_dir=<value>
then train data=images data.train_data_dir=few
$ generate run=run prompts=blank.txt
error: got no prompts … write 'prompts=[a handwritten three]'
then generate run=run 'prompts=[a handwritten three]'
# numbers
$ train optimizer.lr=-1
error: optimizer.lr=-1 … expected a number of at least 0 … write optimizer.lr=1e-5
then train optimizer.lr=1e-5
$ train optimizer.lr=nan
error: optimizer.lr=nan … expected a finite number … write optimizer.lr=0.002
then train optimizer.lr=0.002
$ train optimizer.betas=[0.9,2]
error: optimizer: cannot build … Invalid beta parameter at index 1: 2 … leave out optimizer.betas
then train
$ train lr_scheduler.warmup_steps=-1
error: lr_scheduler got warmup_steps=-1 … expected at least 0
then train lr_scheduler.warmup_steps=0
$ train lr_scheduler.final_fraction=2
error: lr_scheduler=cosine got final_fraction=2 … expected a number in [0, 1]
then train lr_scheduler.final_fraction=0.1
$ train module.text_encoder_lr=-1
error: text_encoder_lr=-1 … expected a number of at least 0 … text_encoder_lr=1e-5
then train module.text_encoder_lr=1e-5
$ train callbacks.samples.columns=0
error: SampleGrid got columns=0 … expected at least 1
then train callbacks.samples.columns=1
$ train seed=-1
error: seed=-1 … expected a whole number from 0 … write seed=0
then train seed=0
$ train trainer.max_steps=0
error: trainer.max_steps=0 … expected at least 1 … write trainer.max_steps=1
then train trainer.max_steps=1
$ train trainer.num_nodes=0
error: trainer.num_nodes=0 … expected at least 1 … write trainer.num_nodes=1
then train trainer.num_nodes=1
$ train trainer.devices=0
error: trainer.devices=0 … expected a number of at least 1 … write trainer.devices=1
then train trainer.devices=1
$ train trainer.val_check_interval=0
error: val_check_interval=0 … expected … write trainer.val_check_interval=60
then train trainer.val_check_interval=60
$ train trainer.gradient_clip_val=-1
error: gradient_clip_val=-1 … expected a norm of at least 0 … null for no
then train trainer.gradient_clip_val=1
$ train trainer.limit_val_batches=-1
error: trainer: … limit_val_batches … has to be in … change
then train
$ generate run=run prompts=[a] seed=-1
error: seed=-1 … expected a whole number from 0 … seed=0
then generate run=run prompts=[a] seed=0
$ generate run=run prompts=[a,b] seed=9223372036854775807
error: seed=9223372036854775807 … expected a whole number from 0 to 2**63 - 2
then generate run=run prompts=[a,b] seed=0
# what a constructor raises
$ train +optimizer.foreach=true
error: optimizer: … `fused` and `foreach` … leave out optimizer.foreach
then train
$ train optimizer.fused=false +optimizer.differentiable=true
error: AdamW cannot step on the CPU … leave out optimizer.fused and optimizer.differentiable
then train
$ train optimizer._target_=torch.optim.SparseAdam ~optimizer.fused ~optimizer.weight_decay
error: SparseAdam … does not support dense gradients … leave out optimizer._target_
then train
$ train +trainer.profiler=fast
error: trainer: … profiler … leave out trainer.profiler
then train
$ generate run=run prompts=[a] device=meta
error: device=meta … not there … write device=cpu
then generate run=run prompts=[a] device=cpu
# combinations
$ train trainer.precision=fp16
error: trainer.precision=fp16 … expected one of 32 … write trainer.precision=16-mixed
then train trainer.precision=16-mixed
$ train strategy=ddp trainer.devices=2 data.batch_size=1
error: data.batch_size=1 … 2 process(es) … write data.batch_size=2 or more
then train strategy=ddp trainer.devices=2 data.batch_size=2
$ train strategy=ddp trainer.devices=4096
error: trainer.devices=4096 … CPU core(s) … write trainer.devices=
then train strategy=ddp trainer.devices=CPUS
$ train data.batch_size=5000
error: data.batch_size=5000 … larger than the training set … write data.batch_size=1437
then train data.batch_size=1437
$ train trainer.devices=2
error: strategy=single is one process … trainer.devices=2 … add strategy=ddp
then train trainer.devices=2 strategy=ddp
$ train +trainer.max_epochs=3
error: trainer.max_epochs=3 … expected only … write trainer.max_steps=<n>
then train trainer.max_steps=3
$ train trainer.check_val_every_n_epoch=1
error: trainer.val_check_interval=60 … only 22 forward passes … check_val_every_n_epoch=null
then train trainer.check_val_every_n_epoch=null
$ train output_dir=run resume=auto init_from=torn
error: resume=auto and init_from=torn … give one of the two
then train output_dir=run resume=auto
$ train resume=auto overwrite=true
error: overwrite=true and resume=auto … give one of the two
then train resume=auto
$ train init_from=run model.fresh_denoiser=true
error: init_from=run and model.fresh_denoiser=true … replaces the weights … write model.fresh_denoiser=false
then train init_from=run model.fresh_denoiser=false
$ train sampling.scheduler=FlowMatchEulerDiscreteScheduler
error: scheduler=FlowMatch … cannot sample … choose another
then train
$ generate run=run model.revision=x prompts=[a]
error: model.revision=x with run=run … leave it out
then generate run=run prompts=[a]
$ generate run=run prompts=[a] scheduler=pndm num_inference_steps=3
error: num_inference_steps=3 … PNDMScheduler … give another number
then generate run=run prompts=[a] scheduler=pndm num_inference_steps=25
# without CUDA
$ train trainer.accelerator=cuda
error: trainer.accelerator=cuda … no CUDA device … write cpu or auto
then train trainer.accelerator=cpu
# files and folders
$ train data=images data.train_data_dir=column data.caption_column=file_name
error: caption_column=file_name, which names the image … data.caption_column=caption
then train data=images data.train_data_dir=column data.caption_column=caption
$ train data=images data.train_data_dir=few data.max_image_pixels=9
error: data.max_image_pixels=9 … at least the 262144 pixels … write data.max_image_pixels=128000000
then train data=images data.train_data_dir=few data.max_image_pixels=128000000
$ train data=images data.train_data_dir=few data.num_val_samples=9
error: num_val_samples=9 … expected 0 to 2 … null
then train data=images data.train_data_dir=few data.num_val_samples=null
$ train output_dir=run
error: output_dir=run already holds a run … resume=auto … overwrite=true
then train output_dir=run resume=auto
$ train output_dir=run overwrite=true init_from=run
error: init_from=run is output_dir=run … expected two folders apart … write output_dir=run-2
then train overwrite=true init_from=run output_dir=run-2
$ train output_dir=
error: output_dir=: it is empty … expected a folder … write output_dir=runs/new
then train output_dir=runs/new
$ train output_dir=file/run
error: output_dir=file/run … cannot be written … choose another output_dir
then train output_dir=new
$ train output_dir=run overwrite=true data=images data.train_data_dir=nowhere
error: there is no folder 'nowhere'
then train output_dir=run overwrite=true data=images data.train_data_dir=few
$ train output_dir=/
error: output_dir=/: it is the root folder … expected a folder of its own … output_dir=runs/
then train output_dir=runs/new
$ train 'output_dir="~/a"'
error: output_dir=~/a: only a shell knows ~ … expected a whole path … output_dir=/
then train output_dir=new
$ train output_dir=few
error: output_dir=few holds … 0.png, 0.txt, … and 1 more (6 in all) … output_dir=few/run
then train output_dir=few/run
$ train output_dir=torn overwrite=true
error: output_dir=torn holds … model_index.json … write output_dir=torn/run
then train overwrite=true output_dir=torn/run
$ train output_dir=torn model.pretrained=torn
error: model.pretrained=torn is output_dir=torn … output_dir=torn-2
then train model.pretrained=torn output_dir=torn-2
$ train output_dir=run resume=auto data=images data.train_data_dir=run/samples
error: data.train_data_dir=run/samples lies in output_dir=run … write output_dir=run-2
then train resume=auto data=images data.train_data_dir=run/samples output_dir=run-2
$ train data=huggingface data.dataset_name=few output_dir=few/run
error: data.dataset_name=few: output_dir=few/run lies in it … write output_dir=few-runs/run
then train data=huggingface data.dataset_name=few output_dir=few-runs/run
$ dreambooth instance_data_dir=few instance_prompt=x output_dir=run overwrite=true model=tiny \
model.pretrained=good class_data_dir=run/class with_prior_preservation=true class_prompt=y
error: class_data_dir=run/class lies in output_dir=run … write output_dir=run-2
then dreambooth instance_data_dir=few instance_prompt=x overwrite=true model=tiny model.pretrained=good \
class_data_dir=run/class with_prior_preservation=true class_prompt=y output_dir=run-2
$ dreambooth instance_data_dir=few instance_prompt=x model=tiny model.pretrained=good class_data_dir= \
with_prior_preservation=true class_prompt=y
error: class_data_dir= without a value … leave class_data_dir out
then dreambooth instance_data_dir=few instance_prompt=x model=tiny model.pretrained=good \
with_prior_preservation=true class_prompt=y
$ train output_dir=/ resume=nowhere
error: output_dir=/: it is the root folder
then train output_dir=runs/new
$ train resume=nowhere
error: resume=nowhere … no such folder … expected auto, a run or one of its checkpoints
then train resume=run
$ train resume=empty
error: resume=empty … no valid checkpoint … expected a run or one of its checkpoints
then train resume=run
$ train resume=run data.batch_size=32
error: data.batch_size=32 … data.batch_size=64 … or start a new run
then train resume=run data.batch_size=64
$ train model.pretrained=nowhere/at/all
error: model.pretrained=nowhere/at/all … no such folder … or a hub id such as
then train model.pretrained=run/pipeline
$ train model.pretrained=run/pipeline +model.vae=nowhere
error: nowhere … AutoencoderKL
then train model.pretrained=run/pipeline
$ generate run=run prompts='"3"'
error: prompts='3' … not a file … write 'prompts=["3"]'
then generate run=run 'prompts=["3"]'
$ generate run=run prompts=latin1.txt
error: prompts=latin1.txt … UTF-8 … save it as UTF-8
then generate run=run prompts=utf8.txt
"""
"""Command line, words of its message in their order, and what a person who follows the message writes next."""
CASES = re.findall(r"^\$ (.*)\nerror: (.*)\nthen (.*)$", TABLE.replace("CPUS", str(os.cpu_count())), flags=re.MULTILINE)
OWN_CHOICE = (
    *("<", "choose another", "expected a", "give ", "Give ", "available: ", "save it as UTF-8", "cpu or auto"),
    *("or a class name", "copy or download"),
)
"""How messages ask for a value that only the person knows."""
FLOW = {
    "train": [("train", name) for name in ("run", "build_trainer", "build_module", "check_parts", "open_run")],
    "dreambooth": [("dreambooth", "run")],
    "generate": [("generate", name) for name in ("run", "read_prompts", "find_device", "load_model", "generate")],
    "export": [("export", "run")],
}
"""Functions that a program enters one after the other, each when all checks before it have passed."""
# (package, command line, words)
WITHOUT_PACKAGE = [
    ("wandb", "train logger=wandb", "logger=wandb", "'wandb' is not installed", "pip install 'sd-lightning[loggers]'"),
    (
        *("datasets", "train data=huggingface data.dataset_name=x"),
        *("data=huggingface", "'datasets' is not installed", "pip install 'sd-lightning[datasets]'"),
    ),
    (
        *("pyarrow", "train data=parquet data.train_data_dir=few"),
        *("data=parquet", "'pyarrow' is not installed", "pip install 'sd-lightning[parquet]'"),
    ),
    (
        *("deepspeed", "train strategy=deepspeed_zero2"),
        *("'deepspeed' is not installed", "pip install 'sd-lightning[deepspeed]'"),
    ),
    ("bitsandbytes", "train optimizer=adamw8bit", "bitsandbytes.optim.AdamW8bit", "not installed", "install it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all cases run in: a trained run and all kinds of broken things."""
    root = tmp_path_factory.mktemp("bad_input")
    before = Path.cwd()
    os.chdir(root)
    code = call(
        "train output_dir=run trainer.max_steps=1 trainer.limit_val_batches=0 callbacks.samples.columns=1 "
        "callbacks.samples.accuracy_samples=0 sampling.num_inference_steps=1 data.cache_latents=false"
    )
    assert code == 0, code
    for name in ("empty", "column", "few"):
        Path(name).mkdir()
    Image.new("RGB", (32, 32)).save("column/0.png")
    Path("utf8.txt").write_text("une pièce", encoding="utf-8")
    Path("file").write_text("in the way")
    Path("blank.txt").write_text("\n \n")
    Path("latin1.txt").write_bytes("une pièce".encode("latin-1"))
    Path("column/metadata.jsonl").write_text('{"file_name": "0.png", "caption": "x"}\n')
    for i in range(3):
        Image.new("RGB", (32, 32)).save(f"few/{i}.png")
        Path(f"few/{i}.txt").write_text("black")
    for name in ("good", "torn"):
        shutil.copytree("run/pipeline", name)
    weights = Path("torn/unet/diffusion_pytorch_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100_000])
    yield root
    os.chdir(before)


PASSED: dict[str, int] = {}
"""How many functions of ``FLOW`` a mended command has entered before it was stopped: many mistakes have one remedy."""


class Reached(BaseException):
    """A command has passed the checks that matter; what follows would take time."""


def follow(monkeypatch: pytest.MonkeyPatch, stop_after: int) -> list[str]:
    """Note which functions of ``FLOW`` programs enter, and end them when they enter one more than ``stop_after``."""
    entered: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            entered.append(name)
            if len(entered) > stop_after:
                raise Reached(name)
            return function(*args, **kwargs)

        return noted

    modules = {"train": train, "dreambooth": dreambooth, "generate": generate, "export": export}
    for program, name in (each for flow in FLOW.values() for each in flow):
        monkeypatch.setattr(modules[program], name, noting(name, getattr(modules[program], name)))
    return entered


def assert_remedy_is_in(message: str, command: str, mended: str) -> None:
    """Assert that the message says what to change in a command to get the mended one."""
    other_program = command.split()[0] != mended.split()[0]
    assert not other_program or f"sd_lightning.{mended.split()[0]} " in message
    before, after = shlex.split(command)[1:], shlex.split(mended)[1:]
    needed = ("data.train_data_dir=few", "instance_data_dir=few")  # before and after
    added = [token for token in after if token not in before and token not in needed]
    for token in added:
        _, _, last = token.partition("=")[0].rpartition(".")
        short = f"{last}={token.partition('=')[2]}"  # a constructor does not know where it stands in the configuration
        said = any(each in message for each in (token, short, shlex.quote(token))) or '"' in token
        assert said or any(word in message for word in OWN_CHOICE), f"nothing of {token} in: {message}"
    if not added and not other_program:
        ways = ("leave", "give one of the two", "give it", "no keys below it", "top-level keys are")
        assert any(way in message for way in ways) or any(word in message for word in OWN_CHOICE), message


def test_every_case_of_the_table_is_read() -> None:
    assert len({command for command, _, _ in CASES}) == len(CASES) == TABLE.count("\n$ ")


@pytest.mark.parametrize(("command", "words", "mended"), CASES, ids=[command for command, _, _ in CASES])
def test_mistake_is_one_line_and_touches_nothing(
    command: str,
    words: str,
    mended: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who does what the line says gets past the check that has refused: the run stops at the next one's entry."""
    if "accelerator=cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here, so this is no mistake")
    with monkeypatch.context() as patch:
        entered = follow(patch, stop_after=99)
        message = refuse(command, tuple(words.split(" … ")), folder, capfd)
    assert_remedy_is_in(message, command, mended)
    if PASSED.get(mended, -1) >= len(entered):
        return
    before = contents(folder)
    follow(monkeypatch, stop_after=len(entered))
    try:
        code = call(mended)
    except Reached:
        PASSED[mended] = len(entered)
        return
    finally:
        remove_new(before, folder)
    assert code == 0, f"{mended}: {code}: {capfd.readouterr().err}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("objective=flow objective.snr_gamma=5", ("snr_gamma=5",)),
        ("optimizer.betas=[0.9,2]", ("Invalid beta parameter at index 1: 2",)),
        ("lr_scheduler.final_fraction=2", ("final_fraction=2", "expected a number in [0, 1]")),
        ("callbacks.ema.decay=1.5", ("EMA got decay=1.5",)),
    ],
)
def test_settings_are_refused_before_data_and_model_take_time(
    setting: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unreachable = "data=images data.train_data_dir=nowhere model.pretrained=nowhere/at/all"
    refuse(f"train {unreachable} {setting}", words, folder, capfd)


class Blocker:
    """Finds no package of one name, as if it were not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("package", "command", "words"), [(p, c, tuple(w)) for p, c, *w in WITHOUT_PACKAGE], ids=lambda v: str(v)[:20]
)
def test_missing_package_is_named_with_its_remedy(
    package: str,
    command: str,
    words: tuple[str, ...],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(package), *sys.meta_path])
    refuse(command, words, folder, capfd)


def test_damaged_checkpoint_is_named_before_the_run_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder / "run", damaged)
    (newest,) = checkpoint.all_checkpoints(damaged)
    with open(newest / "trainer.json", "a") as file:
        file.write(" ")
    before = contents(damaged)
    capfd.readouterr()
    assert call(f"train resume={damaged}") == 2
    warning, error = capfd.readouterr().err.splitlines()
    assert "trainer.json has" in warning and str(newest) in warning
    assert error == f"error: resume={damaged}: no valid checkpoint in it; expected a run or one of its checkpoints"
    assert call(f"train resume={newest}") == 2
    assert f"error: resume={newest}: the checkpoint is damaged: trainer.json has" in capfd.readouterr().err
    assert contents(damaged) == before


def test_overwrite_deletes_what_a_run_left_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(folder / "run", run_dir)
    (run_dir / "photos").mkdir()
    (run_dir / "photos/me.jpg").touch()
    folder_of_run = RunFolder(run_dir)
    folder_of_run.open(overwrite=False)
    assert set(os.listdir(run_dir)) - {".lock"} == {*os.listdir(folder / "run"), "photos"}
    folder_of_run.open(overwrite=True)
    left = contents(run_dir).keys() - {str(run_dir / ".lock")}
    assert left == {str(run_dir / name) for name in ("photos", "photos/me.jpg", ".sd_lightning")}
    assert (folder / "run/pipeline/model_index.json").exists()


def test_logger_that_cannot_start_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def refuse_to_start(self: CSVLogger) -> None:
        raise ConnectionError("no route to the server")

    monkeypatch.setattr(CSVLogger, "experiment", property(refuse_to_start))
    assert call("train output_dir=unlogged logger=csv") == 2
    shutil.rmtree("unlogged")
    err = capfd.readouterr().err
    assert "error: logger: CSVLogger cannot start (ConnectionError: no route to the server)" in err
    assert "write logger=default" in err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_resuming_a_finished_run_says_so_and_touches_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -m`, where the module's name is not its own."""
    before = contents(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", "output_dir=run", "resume=auto", "trainer.max_steps=1"])
    runpy.run_module("sd_lightning.train", run_name="__main__")
    assert "is complete; raise trainer.max_steps to train on" in capfd.readouterr().err
    assert contents(folder) == before
