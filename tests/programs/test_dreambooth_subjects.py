"""DreamBooth with several subjects, masks and tags from the command line: what a run reads, and what it refuses."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from glyph import write_photos
from refusals import call, refuse
from sd_lightning import LatentDiffusion
from sd_lightning.apps.dreambooth import class_prompts
from sd_lightning.data.builders import dreambooth_data
from sd_lightning.storage import checkpoint
from small_training import assert_bitwise_equal

COMMAND = (
    "dreambooth experiment=dreambooth_tiny init_from=base sampling.num_inference_steps=1 logger=csv data.batch_size=4 "
    "num_class_images=4 class_data_dir=pictures class_prompts=[] "
)
SUBJECTS = (
    "'subjects=[{dir:square,class_prompt:a handwritten two,validation_prompt:sks on a lawn},"
    "{dir:dot,prompt:a zwx digit,class_prompt:a handwritten digit}]' "
)
TAGS = "data.shuffle_tags=true data.keep_tags=1 data.tag_dropout=0.3 data.masked_loss=files data.unmasked_weight=0.1 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all commands run in: six photos with tags and masks of one subject, two of another."""
    root, before = tmp_path_factory.mktemp("subjects"), Path.cwd()
    os.chdir(root)
    write_photos(root / "square", 6)
    write_photos(root / "dot", 2)
    (root / "square/masks").mkdir()
    for i in range(6):
        Path(f"square/{i}.txt").write_text(f"sks, digit, {('one', 'two', 'three')[i % 3]}")
        mask = Image.new("L", (32, 32))
        mask.paste(255, (4, 4, 20, 28))
        mask.save(f"square/masks/{i}.png")
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    yield root
    os.chdir(before)


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    assert call(f"{COMMAND} {SUBJECTS} {TAGS} max_train_steps=4 output_dir=run") == 0
    return folder / "run"


def test_each_subject_has_pictures_of_its_class_and_samples(run: Path, folder: Path) -> None:
    classes = {path.name.rpartition("-")[0]: len(list(path.glob("*.png"))) for path in (folder / "pictures").iterdir()}
    assert classes == {"a-handwritten-two": 2, "a-handwritten-digit": 2}
    config = (run / "config.yaml").read_text()
    assert config.count("- sks on a lawn\n") == 4 and config.count("- a zwx digit\n") == 4
    assert "columns: 4\n" in config
    assert call(f"{COMMAND} {SUBJECTS} validation_prompt=all max_train_steps=1 output_dir=all") == 0
    config = Path("all/config.yaml").read_text()
    assert config.count("- sks on a lawn\n") == config.count("- all\n") == 4


def test_a_class_prompt_of_a_subject_that_is_given_for_all_too_counts_once(folder: Path) -> None:
    settings = {"subjects": [{"class_prompt": "a dog"}, {"class_prompt": "a cat"}], "class_prompt": None}
    settings |= {"class_prompts": ["a dog"], "with_prior_preservation": True, "num_class_images": 4}
    spec: Any = settings | {"sample_batch_size": 1, "learn_token": False}
    assert class_prompts(spec, ["a sks dog"]) == ["a dog", "a cat"]


def test_a_run_of_two_subjects_with_tags_and_masks_resumes_bit_for_bit(run: Path, folder: Path) -> None:
    assert call(f"{COMMAND} {SUBJECTS} {TAGS} max_train_steps=2 output_dir=resumed") == 0
    assert call(f"{COMMAND} {SUBJECTS} {TAGS} max_train_steps=4 output_dir=resumed resume=auto") == 0
    (straight,) = checkpoint.all_checkpoints(run)
    assert_bitwise_equal(checkpoint.all_checkpoints("resumed")[-1], straight)
    assert call(f"{COMMAND} {SUBJECTS} max_train_steps=4 output_dir=plain") == 0
    with pytest.raises(AssertionError):
        assert_bitwise_equal(checkpoint.all_checkpoints("plain")[-1], straight)


def test_what_a_run_tells_of_its_subjects(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(f"{COMMAND} {SUBJECTS} with_prior_preservation=false max_train_steps=1 output_dir=told") == 0
    told = capfd.readouterr().err
    assert "INFO: subject square: 6 photos, 6 of every 12 that are shown\n" in told
    assert "INFO: subject dot: 2 photos, 6 of every 12 that are shown\n" in told
    assert "INFO: trigger word 'sks': tokenizer reads " in told and "INFO: trigger word 'zwx': tokenizer" in told
    assert "data.masked_loss" not in told, "a folder of masks is not read unless asked for"


@pytest.mark.parametrize(
    ("repeats", "counts"), [((None, None), (1, 3)), ((1, 1), (1, 1)), ((2, None), (2, 6)), ((1, 5), (1, 5))]
)
def test_subjects_are_balanced_unless_their_repeats_say_otherwise(
    folder: Path, repeats: tuple[Any, Any], counts: tuple[int, int]
) -> None:
    subjects = [
        {"dir": str(folder / name), "prompt": f"a {name}", "repeats": number}
        for name, number in zip(("square", "dot"), repeats)
    ]
    source = dreambooth_data(subjects=subjects, batch_size=1, resolution=32).source_train
    seen = Counter(source.captions(i)[0] for i in range(len(source)))
    assert seen["a square"] / seen["a dot"] == 6 * counts[0] / (2 * counts[1])


def test_kohyas_folders_of_several_subjects_have_samples_of_each(folder: Path) -> None:
    for part in ("3_sks digit", "1_zwx digit"):
        write_photos(folder / "kohya" / part, 2)
    assert call(f"{COMMAND} instance_data_dir=kohya with_prior_preservation=false max_train_steps=1 output_dir=k") == 0
    config = Path("k/config.yaml").read_text()
    assert config.count("- sks digit\n") == config.count("- zwx digit\n") == 4


BAD = [
    ("", "got no photos; write instance_data_dir=<folder", "'subjects="),
    (f"{SUBJECTS} instance_data_dir=dot", "subjects and instance_data_dir or instance_prompt; write"),
    (f"{SUBJECTS} instance_prompt=sks", "subjects and instance_data_dir or instance_prompt; write"),
    ("'subjects=[{dir:dot,prompt:[x,y]}]'", "'prompt': ['x', 'y']", "texts of which"),
    ("'subjects=[{dir:dot,prompt:a sks dog, sitting}]'", 'prompt:"a sks dog, sitting"'),
    ("'subjects=[{dir:dot,prompt:x},{dir:nowhere,prompt:y}]'", "got dir=nowhere, which is not", "write dir=<folder>"),
    (f"{SUBJECTS} learn_token=true placeholder_token=digit", "2 subjects, all of which digit would name"),
    (
        "instance_data_dir=square class_prompts=[a] learn_token=true placeholder_token=digit data.tag_dropout=0.5 "
        "data.keep_tags=1",
        "instance_prompt='sks' without the word digit",
    ),
    ("instance_data_dir=square class_prompts=[digit] data.tag_dropout=0.5", "instance_prompt=''", "no word that tells"),
    ("instance_data_dir=dot instance_prompt=sks class_prompts=[digit] data.tag_dropout=0.5", "no word that tells"),
    ("instance_data_dir=dot instance_prompt=sks class_prompts=[digit] data.shuffle_tags=true", "no caption has tags"),
    ("instance_data_dir=dot instance_prompt=sks data.caption_extension=.caption", "every subject has a prompt"),
    (
        "instance_data_dir=dark instance_prompt=sks class_prompts=[a] data.masked_loss=files",
        "cannot read 1 of the 2",
        "nothing counts",
    ),
    (f"{SUBJECTS} data.val_data_dir=dot", "dot/0.png is trained on; move photos"),
    (f"{SUBJECTS} data.val_data_dir=dark", "dark/0.png has no caption", "put a .txt file with its caption beside each"),
    ("'subjects=[{prompt:x}]'", "the subject {'prompt': 'x'}", "dir has to be there", "write 'subjects="),
    ("'subjects=[{dir:dot,reps:2}]'", "'reps': 2", "expected class_prompt, dir, prompt, repeats"),
    ("'subjects=[{dir:dot,prompt:x,repeats:0}]'", "'repeats': 0", "repeats of at least 1"),
    ("'subjects=[{dir:dot,prompt:x},{dir:square,prompt:x}]'", "the subject {'dir': 'square'", "a prompt of its own"),
    ("'subjects=[{dir:null,prompt:x}]'", "the subject {'dir': None", "texts of which dir has to be there"),
    ("'subjects=[{dir:dot,prompt:5}]'", "the subject {'dir': 'dot', 'prompt': 5}", "texts of which"),
    ("'subjects=[{dir:dot,prompt:x,class_prompt:7}]'", "'class_prompt': 7", "texts of which"),
    ("'subjects=[{dir:dot,prompt:x,repeats:true}]'", "'repeats': True", "repeats of at least 1"),
    ("subjects=dot", "subjects=dot", "expected a list of"),
    (
        f"{SUBJECTS} class_data_dir=dot",
        *("class_data_dir=dot and instance_data_dir=dot", "the same folder", "choose another"),
    ),
    (
        "'subjects=[{dir:dot,prompt:a handwritten digit}]' 'class_prompts=[a handwritten digit]'",
        "no word that tells the subject from its class",
    ),
    (
        "instance_data_dir=dot instance_prompt=sks class_prompts=[digit] data.masked_loss=files",
        *("no image to train on has a mask", "photo-mask.png beside photo.jpg"),
    ),
    ("instance_data_dir=caption", "caption/0.png has 0.caption", "write data.caption_extension=.caption"),
    (f"{SUBJECTS} data.tag_dropout=2", "data.tag_dropout=2", "write data.tag_dropout=0.1"),
    ("shuffle_caption=true", "write data.shuffle_tags=true"),
    ("alpha_mask=true", "write data.masked_loss=alpha"),
    ("data.masked_loss=true", "expected one of none, files, alpha; write data.masked_loss=files"),
]


@pytest.mark.parametrize(("options", "words"), [(c, tuple(w)) for c, *w in BAD], ids=[c for c, *_ in BAD])
def test_mistake_is_one_line_and_touches_nothing(
    options: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_photos(folder / "caption", 2)
    write_photos(folder / "dark", 2)
    Image.new("L", (32, 32)).save(folder / "dark/0-mask.png")
    (folder / "caption/0.caption").write_text("sks digit")
    refuse(f"{COMMAND} output_dir=bad {options}", words, folder, capfd)


def test_a_class_prompt_of_a_subject_without_prior_preservation_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = f"dreambooth model=tiny init_from=base output_dir=bad {SUBJECTS}"
    refuse(command, ("subjects with a class_prompt", "add with_prior_preservation=true"), folder, capfd)
