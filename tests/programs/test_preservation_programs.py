"""``preservation=`` of the programs: what a run logs and resumes, and what is refused before anything is read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glyph import write_photos
from refusals import call, refuse
from sd_lightning import LatentDiffusion
from sd_lightning.report import read_metrics
from sd_lightning.storage import checkpoint
from small_training import assert_bitwise_equal

COMMAND = (
    "dreambooth experiment=dreambooth_tiny init_from=base sampling.num_inference_steps=1 logger=csv data.batch_size=4 "
    "class_data_dir=pictures class_prompts=[] instance_data_dir=photos 'instance_prompt=a sks digit' "
    "trainable=lora train_text_encoder=false trainer.log_every_n_steps=1 "
)
OFF = "with_prior_preservation=false"
WORDS = "preservation=class 'preservation.words={sks digit:digit}'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root, before = tmp_path_factory.mktemp("preservation"), Path.cwd()
    os.chdir(root)
    write_photos(root / "photos", 4)
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    yield root
    os.chdir(before)


def test_a_run_logs_what_it_preserves_and_resumes_bit_for_bit(folder: Path) -> None:
    assert call(f"{COMMAND} {OFF} {WORDS} max_train_steps=4 output_dir=run") == 0
    logged = {name: values for name, values in read_metrics(folder / "run").items() if "preservation" in name}
    ((name, curve),) = logged.items()
    assert name == "train/preservation_loss" and len(curve) == 4
    assert curve[0][1] < 1e-10 < curve[3][1], "adapters begin at zero"
    assert call(f"{COMMAND} {OFF} {WORDS} max_train_steps=2 output_dir=resumed") == 0
    assert call(f"{COMMAND} {OFF} {WORDS} max_train_steps=4 output_dir=resumed resume=auto") == 0
    straight, resumed = (checkpoint.all_checkpoints(each)[-1] for each in ("run", "resumed"))
    assert_bitwise_equal(resumed, straight)
    token = "'instance_prompt=a S* digit' learn_token=true 'preservation.words={S*:\"\"}' max_train_steps=1"
    assert call(f"{COMMAND} {OFF} preservation=class {token} output_dir=token") == 0
    blank = f"{COMMAND} {OFF} preservation=blank preservation.weight=100 max_train_steps=4"
    assert call(f"{blank} output_dir=resumed resume=auto overwrite=false max_train_steps=5") == 0


BAD = [
    (f"{OFF} trainable=full preservation=blank", "preservation needs adapters", "write trainable=lora"),
    (WORDS, "preservation and with_prior_preservation=true", "write with_prior_preservation=false"),
    (f"{OFF} preservation=class", "preservation got neither words nor prompts", "preservation.words={sks dog:dog}"),
    (f"{OFF} {WORDS} 'preservation.prompts=[a]'", "preservation got both words and prompts"),
    (f"{OFF} preservation=class 'preservation.words={{zwx:a}}'", "none of zwx is always in the caption 'a sks digit'"),
    (f"{OFF} preservation=class preservation.words=sks", "preservation.words=sks", "a dictionary"),
    (f"{OFF} preservation=class 'preservation.words={{sks:1}}'", "a dictionary of str to str or null"),
    (f"{OFF} 'lora.rank_pattern={{0:8}}'", "expected a dictionary of str to int or null"),
    (f"{OFF} preservation=class 'preservation.prompts=a digit'", "write 'preservation.prompts=[a digit]'"),
    (f"{OFF} {WORDS} preservation.weight=-1", "preservation.weight=-1: expected a number above 0"),
    (
        f"{OFF} preservation=class learn_token=true placeholder_token=sks 'preservation.prompts=[a sks]'",
        "learn_token=true",
    ),
    (f"{OFF} preservation=calss", "preservation=calss"),
]


@pytest.mark.parametrize(("options", "words"), [(c, tuple(w)) for c, *w in BAD], ids=[c for c, *_ in BAD])
def test_mistake_is_one_line_and_touches_nothing(
    options: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse(f"{COMMAND} output_dir=bad {options}", words, folder, capfd)
