"""`python -m sd_lightning.generate`: pictures with their settings, the same in any batch, and one line per mistake."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import small_training
from sd_lightning import LatentDiffusion, export, generate
from sd_lightning.apps.pictures import file_name
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.models.generation import generate as draw
from sd_lightning.models.lora import Lora
from sd_lightning.storage import runs

QUICK = ["num_inference_steps=3", "guidance_scale=3"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, hardly trained."""
    path = tmp_path_factory.mktemp("runs") / "small"
    saving = PortableCheckpoint(path, every_n_steps=5)
    small_training.fit(small_training.module(), small_training.data(), 10, EMA(0.5), saving)
    assert saving.last_saved is not None
    runs.publish_pipeline(path, saving.last_saved)
    (path / "summary.json").write_text(json.dumps({"steps": 10}))  # what the pipeline is of
    return path


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, generate)


def pictures(folder: Path) -> dict[str, np.ndarray]:
    """Pixels of all pictures but the grid, by file name."""
    return {f.name: np.asarray(Image.open(f), dtype=int) for f in folder.glob("*.png") if f.name != "grid.png"}


def assert_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours and ours.keys() == theirs.keys()
    assert max(np.abs(ours[name] - theirs[name]).max() for name in ours) <= 1


def test_run_draws_its_prompts_with_settings_and_a_grid(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    prompts = "prompts=[a handwritten three,'über 東京']"
    code, out = cli(f"run={run_dir}", prompts, "seed=11", "negative_prompt=blurred", "scheduler=euler", *QUICK)
    assert code == 0
    assert out.splitlines()[-1] == "2 pictures in generated/, all in generated/grid.png"
    names = {"a-handwritten-three-seed-11.png": "a handwritten three", "ber-seed-12.png": "über 東京"}
    drawn = pictures(tmp_path / "generated")
    assert drawn.keys() == names.keys()
    for i, (name, prompt) in enumerate(names.items()):
        assert drawn[name].shape == (32, 32, 3)
        text = Image.open(tmp_path / "generated" / name).text  # type: ignore[attr-defined]
        assert (text["prompt"], text["seed"]) == (prompt, str(11 + i))
        assert json.loads(text["sd_lightning"]) == {
            "prompt": prompt,
            "seed": 11 + i,
            "model": str(run_dir / "pipeline"),
            "negative_prompt": "blurred",
            "num_inference_steps": 3,
            "guidance_scale": 3.0,
            "scheduler": "EulerDiscreteScheduler",
        }
    grid = Image.open(tmp_path / "generated" / "grid.png")
    assert grid.width >= 64 and grid.height >= 32


def test_picture_can_be_drawn_again_from_its_metadata(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    cli(f"run={run_dir}", "prompts=[one,two,three]", "seed=3", "output_dir=first", *QUICK)
    text = Image.open(tmp_path / "first" / "three-seed-5.png").text  # type: ignore[attr-defined]
    settings = json.loads(text["sd_lightning"])
    again = [f"{name}={settings[name]}" for name in ("seed", "num_inference_steps", "guidance_scale", "scheduler")]
    cli(f"model.pretrained={settings['model']}", f"prompts=[{settings['prompt']}]", "output_dir=again", *again)
    ours = pictures(tmp_path / "again")
    assert_alike(ours, {"three-seed-5.png": pictures(tmp_path / "first")["three-seed-5.png"]})


def test_adapters_of_a_run_are_drawn_with_another_base(
    cli: Any, call_main: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path
) -> None:
    lora = Lora(rank=2, alpha=300.0)  # strong, as it is hardly trained
    saving = small_training.Saving(tmp_path / "lora")
    small_training.fit(small_training.module(lora=lora), small_training.data(), 3, saving)
    assert saving.last_saved is not None
    runs.publish_pipeline(tmp_path / "lora", saving.last_saved)
    assert call_main(export, "run=lora", "format=kohya", "output_dir=kohya")[0] == 0
    assert cli(f"run={run_dir}", "prompts=[three]", "output_dir=plain", *QUICK)[0] == 0
    plain = pictures(tmp_path / "plain")
    drawn = {}
    for given in ("lora", "lora/pipeline/pytorch_lora_weights.safetensors", "kohya", "kohya/lora.safetensors"):
        code, _ = cli(f"run={run_dir}", f"lora={given}", "prompts=[three]", f"output_dir=drawn/{len(drawn)}", *QUICK)
        assert code == 0
        drawn[given] = pictures(tmp_path / "drawn" / str(len(drawn)))
        assert_alike(drawn["lora"], drawn[given])
    assert max(np.abs(plain[name] - drawn["lora"][name]).max() for name in plain) > 2
    picture = next((tmp_path / "drawn/0").glob("three*.png"))
    assert json.loads(Image.open(picture).text["sd_lightning"])["lora"] == "lora"  # type: ignore[attr-defined]
    for weight in ("0", "1", "0.5"):
        arguments = ("prompts=[three]", f"lora_weight={weight}", f"output_dir=drawn/w{weight}", *QUICK)
        assert cli(f"run={run_dir}", "lora=lora", *arguments)[0] == 0
        drawn[weight] = pictures(Path(f"drawn/w{weight}"))
    assert_alike(drawn["0"], plain)
    assert_alike(drawn["1"], drawn["lora"])
    assert all(max(np.abs(drawn["0.5"][n] - drawn[o][n]).max() for n in plain) > 2 for o in ("0", "1"))
    picture = next(Path("drawn/w0").glob("*three*.png"))
    assert json.loads(Image.open(picture).text["sd_lightning"])["lora_weight"] == 0  # type: ignore[attr-defined]
    code, err = cli(f"run={run_dir}", "lora_weight=0.5", "prompts=[three]", *QUICK)
    assert code == 2 and "lora_weight=0.5: " in err and "trained without adapters, or these are merged already" in err
    code, err = cli(f"run={run_dir}", f"lora={run_dir}", "prompts=[three]", *QUICK)
    assert code == 2 and "there is no pytorch_lora_weights.safetensors: the run trained no adapters" in err


def test_pictures_of_other_prompts_and_settings_are_kept(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    drawn: list[dict[str, bytes]] = []
    quick = ["num_inference_steps=1", "guidance_scale=3"]
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated/grid.png").write_text("of my garden")
    for prompt, *more in (["собака"], ["кошка"], ["кошка", "height=40"], ["кошка"]):
        assert cli(f"run={run_dir}", f"prompts=['{prompt}']", *quick, *more)[0] == 0
        drawn.append({f.name: f.read_bytes() for f in (tmp_path / "generated").glob("picture-seed-0*.png")})
    first, second, third, again = drawn
    assert list(first) == ["picture-seed-0.png"] and len(second) == 2 and len(third) == 3
    assert first.items() < second.items() < third.items(), "what was there is as it was"
    assert again.keys() == third.keys(), "the same command writes the same file"
    assert (tmp_path / "generated/grid.png").read_text() == "of my garden"
    assert {f.name for f in (tmp_path / "generated").glob("grid*")} == {"grid.png", "grid-2.png"}


def test_same_seed_gives_the_same_picture_in_any_batch(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    for batch_size in (1, 2, 5):
        cli(
            f"run={run_dir}", "prompts=[a handwritten three,a handwritten one]", "num_images_per_prompt=3",
            "scheduler=euler_a", f"batch_size={batch_size}", f"output_dir=by-{batch_size}", *QUICK,
        )  # fmt: skip
    drawn = [pictures(tmp_path / f"by-{batch_size}") for batch_size in (1, 2, 5)]
    captions = ["three"] * 3 + ["one"] * 3
    assert drawn[0].keys() == {f"a-handwritten-{word}-seed-{seed}.png" for seed, word in enumerate(captions)}
    assert_alike(drawn[0], drawn[1])
    assert_alike(drawn[0], drawn[2])


def test_prompt_file_has_a_caption_per_line(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    # As an editor on Windows writes it: byte-order mark, CRLF, an empty line at the end.
    (tmp_path / "captions.txt").write_bytes("\ufeffa handwritten three\r\n\r\n  two, or deux  \r\n".encode())
    code, _ = cli(f"model.pretrained={run_dir / 'pipeline'}", "prompts=captions.txt", *QUICK)
    assert code == 0
    assert pictures(tmp_path / "generated").keys() == {"a-handwritten-three-seed-0.png", "two-or-deux-seed-1.png"}


def test_checkpoint_and_unfinished_run_can_be_drawn_from(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "checkpoints").symlink_to(run_dir / "checkpoints")
    sources = {"finished": run_dir, "newest": checkpoints[1], "unfinished": unfinished, "earlier": checkpoints[0]}
    for name, source in sources.items():
        code, _ = cli(f"run={source}", "prompts=[three]", f"output_dir={name}", *QUICK)
        assert code == 0
    drawn = {name: pictures(tmp_path / name) for name in sources}
    assert_alike(drawn["newest"], drawn["finished"])
    assert_alike(drawn["unfinished"], drawn["finished"])
    assert any((drawn["earlier"][name] != drawn["finished"][name]).any() for name in drawn["finished"])


def test_command_line_draws_what_the_module_draws(
    run_dir: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    done = run_python(
        "-m", "sd_lightning.generate", f"run={run_dir}", "prompts=[a handwritten three]", "seed=9", *QUICK, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "1 picture in generated/, all in generated/grid.png\n")
    assert done.stderr == ""
    model = LatentDiffusion.from_pretrained(run_dir / "pipeline")
    image = draw(model, ["a handwritten three"], seeds=[9], options=SamplingOptions(3, 3.0))[0]
    name = file_name("a handwritten three", 9)
    assert_alike(pictures(tmp_path / "generated"), {name: np.asarray(image, dtype=int)})


MISTAKES: list[tuple[list[str], str]] = [
    (["prompts=[three]"], "generate got neither of run= and model.pretrained=; give run=runs/<name>, or model.pret"),
    (["run=RUN", "model.pretrained=RUN", "prompts=[a]"], "generate got both of run= and model.pretrained=; give"),
    (["run=RUN"], "generate got no prompts; write 'prompts=[a handwritten three]' or prompts=captions.txt"),
    (["run=RUN", "prompts=[]"], "generate got no prompts"),
    (["run=RUN", "prompts=empty.txt"], "generate got no prompts"),
    (["run=RUN", "prompts=binary.txt"], "generate got prompts=binary.txt, which cannot be read as UTF-8 text"),
    (["run=RUN", "prompts=a three"], "generate got prompts='a three', which is not a file; write 'prompts=[a three]'"),
    (["run=nowhere", "prompts=[a]"], "run=nowhere: no such folder; expected a run, a checkpoint or a pipeline folder"),
    (
        ["run=RUN", "prompts=[a]", "lora=none.safetensors"],
        "lora=none.safetensors: no such file or run; expected a LoRA",
    ),
    (["run=.", "prompts=[a]"], "run=.: neither a finished pipeline nor a valid checkpoint with one in it"),
    (["model.pretrained=./nowhere", "prompts=[a]"], "model.pretrained=./nowhere: no such folder; expected a folder in"),
    (["model.pretrained=.", "prompts=[a]"], "model.pretrained=.: the folder has no model_index.json; expected a"),
    (["model.pretrained=no/model", "prompts=[a]"], "model.pretrained=no/model: cannot be downloaded from the hub"),
    (["run=RUN", "prompts=[a]", "scheduler=ddimm"], "scheduler=ddimm: diffusers has no such scheduler; expected ddim"),
    (["run=RUN", "prompts=[a]", "num_inference_steps=0"], "num_inference_steps=0; expected at least 1"),
    (["run=RUN", "prompts=[a]", "num_inference_steps=x"], "num_inference_steps=x: expected int"),
    (["run=RUN", "prompts=[a]", "batch_size=0"], "batch_size=0; expected at least 1"),
    (["run=RUN", "prompts=[a]", "guidance_scale=-1"], "guidance_scale=-1; expected at least 0"),
    (
        ["run=RUN", "prompts=[a]", "height=30"],
        "height=30: a StableDiffusionPipeline of this VAE takes images with sides that are multiples of 8",
    ),
    (["run=RUN", "prompts=[a]", "num_images_per_prompt=0"], "num_images_per_prompt=0; expected at least 1"),
    (["run=RUN", "prompts=[a]", "columns=0"], "columns=0; expected at least 1"),
    *(
        (["run=RUN", "prompts=[a]", f"device={name}"], f"device={name}, which is not there to compute on; expected")
        for name in ("cuda:99", "quantum", "meta")
    ),
    (["run=RUN", "prompts=[a]", "output_dir=empty.txt"], "output_dir=empty.txt: a file is in the way; choose another"),
    (["run=RUN", "prompt=[a]"], "prompt=[a]: there is no key 'prompt'; write prompts=[a]"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_mistake_ends_in_one_line_before_anything_is_drawn(
    arguments: list[str], message: str, cli: Any, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    monkeypatch.setattr("sd_lightning.apps.generate.generate", lambda *args, **kwargs: pytest.fail("drew pictures"))
    code, err = cli(*(argument.replace("RUN", str(run_dir)) for argument in arguments))
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in err
    assert not (tmp_path / "generated").exists()


@pytest.mark.parametrize(
    ("prompt", "seed", "expected"),
    [
        ("A handwritten THREE!", 0, "a-handwritten-three-seed-0.png"),
        ("../../etc/passwd", 7, "etc-passwd-seed-7.png"),
        ("東京", 1, "picture-seed-1.png"),
        ("x" * 500, 2, f"{'x' * 60}-seed-2.png"),
    ],
)
def test_file_names_are_safe(prompt: str, seed: int, expected: str) -> None:
    assert file_name(prompt, seed) == expected


@pytest.mark.parametrize(
    "setting", ["height=30", "num_inference_steps=1001", "guidance_scale=1 negative_prompt=blurry"]
)
def test_what_the_model_cannot_draw_is_refused_before_its_weights_are_read(
    setting: str, cli: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentDiffusion, "from_pretrained", lambda *args, **kwargs: pytest.fail("read weights"))
    code, err = cli(f"run={run_dir}", "prompts=[a]", *setting.split())
    assert code != 0 and f"sampling got {setting.split()[-1].partition('=')[0]}=" in err


@pytest.mark.parametrize(
    ("architecture", "height", "words"),
    [
        ("tiny_sd3", 8000, "sides of up to"),
        ("tiny_qwen_image_21", 36, "multiples of 32"),
    ],
)
def test_sizes_are_checked_before_the_weights_of_any_family_are_read(
    architecture: str, height: int, words: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LatentDiffusion.build(architecture).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(LatentDiffusion, "from_pretrained", lambda *args, **kwargs: pytest.fail("read weights"))
    code, err = cli(f"run={tmp_path / 'model'}", "prompts=[a]", f"height={height}")
    assert code != 0 and f"sampling got height={height}" in err and words in err
