"""`python -m sd_lightning.evaluate`: a run's metrics, kept pictures, comparisons and reports, and what is refused."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image

from feature_networks import save_clip, save_dinov2
from ranks import run_program
from sd_lightning import LatentDiffusion, compare, evaluate, train
from sd_lightning import generate as generate_program
from sd_lightning.apps import class_images
from sd_lightning.apps.evaluate import EvaluationRequest
from sd_lightning.apps.evaluate import evaluate as evaluate_run
from sd_lightning.apps.pictures import settings_of
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.source import SourceSubset
from sd_lightning.data.sources.digits import DigitClassifier, Digits
from sd_lightning.data.transform import ImageOptions
from sd_lightning.data.workers import Loaders
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.image_features import read_image_features
from sd_lightning.training.estimates import frechet_distance, share_estimate

QUICK = ("num_inference_steps=2", "guidance_scale=3", "device=cpu")
TRAIN = (
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
    "data.num_val_samples=20",
    "data.batch_size=16",
    "callbacks.samples=null",
)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks")
    save_clip(path / "clip")
    save_dinov2(path / "dinov2")
    return path


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, evaluate)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy a finished run from."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, call_main: Any) -> Path:
    """A finished run on digits, hardly trained: runs/a of the working folder."""
    if not (trained / "a").exists():
        code, out = call_main(train, *TRAIN, "output_dir=runs/a")
        assert code == 0, out
        shutil.copytree(tmp_path / "runs/a", trained / "a")
    else:
        shutil.copytree(trained / "a", tmp_path / "runs/a")
    return Path("runs/a")


def evaluation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def test_a_run_is_measured_on_its_held_out_digits(
    cli: Any, run_dir: Path, networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = cli(f"run={run_dir}", "metrics=[fid,kid,clip_score]", f"features={networks / 'clip'}", *QUICK)
    assert code == 0, out
    assert "20 pictures in runs/a/evaluation/, of which 20 are drawn now" in out
    record = evaluation(run_dir)
    assert (record["num_samples"], record["held_out"], record["seed"]) == (20, 20, 0)
    metrics = record["metrics"]
    assert [*metrics] == ["FD-CLIP", "KD-CLIP", "CLIP score", "caption gap", "prompted accuracy"]
    assert all(each["low"] <= each["value"] <= each["high"] and each["count"] == 20 for each in metrics.values())
    assert metrics["FD-CLIP"]["features"] == str(networks / "clip") and "too high" in metrics["FD-CLIP"]["note"]
    assert all(f"{name} " in out for name in metrics)

    # The same by hand: captions and pictures of the first 20 held-out digits, seeds counting up.
    digits = Digits("val")
    prompts = [digits.captions(i)[0] for i in range(20)]
    options = SamplingOptions(num_inference_steps=2, guidance_scale=3.0, batch_size=16)
    images = generate(LatentDiffusion.from_pretrained("runs/a/pipeline"), prompts, seeds=range(20), options=options)
    for i, image in enumerate(images):
        kept = Image.open(run_dir / f"evaluation/{i:06d}.png")
        assert kept.tobytes() == image.tobytes() and settings_of(Path(kept.filename))["seed"] == i  # type: ignore[arg-type]
    clip = read_image_features(str(networks / "clip"), device=torch.device("cpu"))
    drawn, real = clip.images(images), clip.images([digits.image(i) for i in range(20)])
    assert metrics["FD-CLIP"]["value"] == pytest.approx(float(frechet_distance(drawn, real)), rel=1e-5)
    assert metrics["CLIP score"]["value"] == pytest.approx(float(clip.caption_scores(drawn, prompts).mean()), rel=1e-5)
    accuracy = DigitClassifier().accuracy(images, digits.labels[:20])
    assert metrics["prompted accuracy"]["low"] == share_estimate(accuracy, 20).low
    summary = json.loads((run_dir / "summary.json").read_text())
    assert metrics["caption gap"]["value"] == pytest.approx(summary["caption_gap"], abs=1e-6)

    page = (run_dir / "report.html").read_text()
    assert "Evaluation" in page and "FD-CLIP" in page and "95 % interval" in page


def test_a_second_call_draws_only_what_is_missing(
    cli: Any, run_dir: Path, networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    generate = class_images.generate

    def killed(model: Any, prompts: list[str], **options: Any) -> list[Image.Image]:
        if len(drawn) >= 8:
            raise KeyboardInterrupt
        drawn.extend(options["seeds"])
        return generate(model, prompts, **options)

    call = functools.partial(cli, f"run={run_dir}", "batch_size=4", "seed=7", *QUICK)
    with monkeypatch.context() as context:
        context.setattr(class_images, "generate", killed)
        assert call()[0] == 130
    assert drawn == [*range(7, 15)] and not (run_dir / "evaluation.json").exists()
    broken = run_dir / "evaluation/000003.png"
    Image.new("RGB", (32, 32)).save(broken)  # as another program would have written it over ours
    code, out = call()
    assert code == 0 and "of which 13 are drawn now" in out
    first = evaluation(run_dir)["metrics"]
    code, out = call(f"features={networks / 'dinov2'}", "metrics=[kid]")
    assert code == 0 and "of which 0 are drawn now" in out
    assert {**first, "KD-DINOv2": evaluation(run_dir)["metrics"]["KD-DINOv2"]} == evaluation(run_dir)["metrics"]
    code, out = call("num_samples=30")
    assert "30 pictures" in out and "of which 10 are drawn now" in out, "captions begin again"
    assert [*evaluation(run_dir)["metrics"]] == ["caption gap", "prompted accuracy"], "of other pictures"
    assert "of which 30 are drawn now" in call("num_samples=30", "num_inference_steps=3")[1]


def test_other_held_out_images_and_other_weights_are_measured_anew(cli: Any, run_dir: Path, call_main: Any) -> None:
    assert cli(f"run={run_dir}", *QUICK)[0] == 0
    code, out = cli(f"run={run_dir}", "data=digits", "data.num_val_samples=25", *QUICK)
    assert code == 0 and "25 pictures in runs/a/evaluation/, of which 5 are drawn now" in out
    assert evaluation(run_dir)["held_out"] == 25
    code, out = call_main(train, *TRAIN, "output_dir=runs/a", "resume=auto", "trainer.max_steps=5")
    assert code == 0, out
    shutil.copytree(run_dir, "a/c")
    assert "caption gap" not in call_main(compare, "runs/a", "a/c", "output=null")[1], "it is of earlier weights"
    assert "of which 20 are drawn now" in cli(f"run={run_dir}", *QUICK)[1]
    assert "caption gap" in call_main(compare, "runs/a", "a/c", "output=null")[1]


def test_a_run_ends_with_an_evaluation_and_runs_are_compared_by_it(
    cli: Any, call_main: Any, networks: Path, tmp_path: Path
) -> None:
    clip = f"callbacks.evaluation.features={networks / 'clip'}"
    steps = ("sampling.num_inference_steps=2", "sampling.guidance_scale=3")
    code, out = call_main(
        train, *TRAIN, *steps, "callbacks=evaluation", "callbacks.evaluation.metrics=[kid]", clip, "output_dir=runs/b"
    )
    assert code == 0, out
    assert "written to runs/b/evaluation.json" in out
    written = evaluation(Path("runs/b"))
    assert [*written["metrics"]] == ["KD-CLIP", "caption gap", "prompted accuracy"]
    code, again = cli("run=runs/b", "metrics=[kid]", f"features={networks / 'clip'}")
    assert code == 0 and "of which 0 are drawn now" in again, "as the run drew them"
    assert evaluation(Path("runs/b"))["metrics"] == written["metrics"]

    shutil.copytree("runs/b", "runs/c")
    code, table = call_main(compare, "runs/b", "runs/c", "output=page.html")
    assert code == 0 and "KD-CLIP" in table and "prompted accuracy" in table and " ± " in table
    assert "evaluations differ" not in table and "KD-CLIP" in Path("page.html").read_text()
    record = evaluation(Path("runs/c"))
    fewer = record | {"metrics": {"caption gap": record["metrics"]["caption gap"]}}
    for other, differs in ((fewer, False), (record | {"seed": 9}, True), (record | {"data": {}}, True)):
        Path("runs/c/evaluation.json").write_text(json.dumps(other))
        assert ("evaluations differ" in call_main(compare, "runs/b", "runs/c", "output=null")[1]) == differs
    for damaged in ("{", "[]", json.dumps(record | {"metrics": []}), json.dumps(record | {"settings": [1]})):
        Path("runs/c/evaluation.json").write_text(damaged)
        code, table = call_main(compare, "runs/b", "runs/c", "output=null")
        assert code == 0 and "evaluations differ" not in table, "a damaged one is none"


@pytest.mark.slow
def test_one_of_two_processes_evaluates(call_main: Any, networks: Path) -> None:
    """The other one has ended by then."""
    given = [
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "strategy=ddp",
        "callbacks=evaluation",
        "output_dir=runs/d",
    ]
    given += [
        "callbacks=evaluation",
        "callbacks.evaluation.metrics=[kid]",
        f"callbacks.evaluation.features={networks / 'clip'}",
    ]
    printed = run_program("train", *TRAIN, *given, "sampling.num_inference_steps=2")
    assert printed.count("written to runs/d/evaluation.json") == 1
    assert evaluation(Path("runs/d"))["metrics"]["KD-CLIP"]["count"] == 20


def test_a_feature_network_is_tried_before_an_earlier_run_is_overwritten(run_dir: Path, call_main: Any) -> None:
    code, err = call_main(
        train, *TRAIN, "callbacks=evaluation", "callbacks.evaluation.metrics=[kid]", "overwrite=true",
        "callbacks.evaluation.features=nowhere/clip", f"output_dir={run_dir}",
    )  # fmt: skip
    assert code == 2 and "features=nowhere/clip, which is no folder, nor within reach" in err
    assert (run_dir / "summary.json").exists() and list(run_dir.glob("checkpoints/step-*"))


def test_a_finished_run_is_evaluated_once(run_dir: Path, call_main: Any) -> None:
    again = (train, *TRAIN, "callbacks=evaluation", "resume=auto", "sampling.num_inference_steps=2")
    code, out = call_main(*again, f"output_dir={run_dir}")
    assert code == 0 and "20 are drawn now" in out and "caption gap" in evaluation(run_dir)["metrics"]
    code, out = call_main(*again, f"output_dir={run_dir}")
    assert code == 0 and "pictures in" not in out


def test_mistakes_are_told_before_a_picture_is_drawn(
    cli: Any, run_dir: Path, networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_images, "generate", lambda *args, **options: pytest.fail("drew pictures"))
    clip, dinov2 = f"features={networks / 'clip'}", f"features={networks / 'dinov2'}"
    Path("foreign").mkdir()
    Path("foreign/thesis.txt").write_text("mine")
    Path("theirs").mkdir()
    Image.new("RGB", (8, 8)).save("theirs/000000.png")
    Path("module").mkdir()
    shutil.copytree(run_dir / "pipeline", "bare")
    RUN = f"run={run_dir}"
    mistakes = [
        ([RUN, "metrics=[fidd]", clip], "metrics"),
        ([RUN, "metrics=[kid]"], "no network; expected a vision model of the hub or a folder"),
        ([RUN, clip], "no metric that reads them"),
        ([RUN, "num_samples=5"], "expected at least 10"),
        ([RUN, "metrics=[kid]", "features=runs/a/pipeline"], "gives no features of pictures"),
        ([RUN, "metrics=[clip_score]", dinov2], "reads no captions"),
        ([RUN, "metrics=[fid]", clip, "num_samples=16"], "FD-CLIP needs more than the 16 features"),
        ([RUN, "metrics=[kid]", clip, "data=digits", "data.num_val_samples=9"], "expected at least 10 of both"),
        ([RUN, "device=tpu"], "evaluate got device=tpu"),
        ([RUN, "output_dir=foreign"], "output_dir=foreign holds what no run"),
        ([RUN, "output_dir=theirs"], "holds pictures of another program"),
        ([RUN, f"output_dir={run_dir}"], "output_dir=runs/a holds a run"),
        (["run=runs/none"], "no such folder"),
        (["run=module"], "neither a finished pipeline nor a valid checkpoint"),
        (["run=bare"], "no config.yaml that names data of this package"),
        ([RUN, "model=sd15"], "run=runs/<name>"),
    ]
    for arguments, message in mistakes:
        code, err = cli(*arguments)
        line = err.strip().splitlines()[-1]
        assert code == 2 and line.startswith("error: ") and message in line, (arguments, line)
    assert [path.name for path in Path("foreign").iterdir()] == ["thesis.txt"]
    with FileLock(run_dir / "evaluation/.lock"):
        code, err = cli(RUN)
    assert code == 2 and "is at work in it" in err
    assert not (run_dir / "evaluation.json").exists()


def test_a_pipelines_folder_is_measured_where_it_is_said(cli: Any, run_dir: Path) -> None:
    run_dir.rename("moved")
    code, out = cli("run=moved/pipeline", "data=digits", "data.num_val_samples=12", "output_dir=measured", *QUICK)
    assert code == 0, out
    assert evaluation(Path("measured"))["num_samples"] == 12
    code, err = cli("run=moved", "output_dir=measured", *QUICK)
    assert code == 2 and "holds pictures of moved/pipeline" in err
    code, out = cli("run=moved/pipeline/", "data=digits", "data.num_val_samples=12", "output_dir=measured", *QUICK)
    assert code == 0 and "of which 0 are drawn now" in out, "the same folder, written otherwise"


def test_a_checkpoint_and_a_pipeline_are_measured_as_their_run(cli: Any, run_dir: Path, call_main: Any) -> None:
    """On its held-out images, with its objective; its encoders on a cluster, which is gone, are not needed."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["data"] |= {"encoders": "ray", "num_encoders": 3}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    summary = json.loads((run_dir / "summary.json").read_text())
    for number, place in enumerate(("checkpoints/step-00000004", "pipeline", "checkpoints/step-00000004/pipeline")):
        code, out = cli(f"run={run_dir}/{place}", f"output_dir=measured/{number}", *QUICK)
        assert code == 0 and "20 pictures in measured/" in out, out
        found = evaluation(Path(f"measured/{number}"))
        assert found["metrics"]["caption gap"]["value"] == pytest.approx(summary["caption_gap"], abs=1e-6)
        assert (found["held_out"], found["steps"]) == (20, 4)


def test_what_is_measured_is_of_the_checkpoint_that_was_chosen(cli: Any, run_dir: Path, call_main: Any) -> None:
    shutil.copytree(run_dir, "runs/b")
    assert cli(f"run={run_dir}", *QUICK)[0] == 0
    assert "caption gap" in call_main(compare, "runs/a", "runs/b", "output=null")[1]
    shutil.copytree(run_dir / "checkpoints/step-00000004", run_dir / "checkpoints/step-00000006")
    assert "caption gap" not in call_main(compare, "runs/a", "runs/b", "output=null")[1], "the run has gone on"
    assert cli(f"run={run_dir}", *QUICK)[0] == 0
    assert evaluation(run_dir)["steps"] == 6
    assert "caption gap" in call_main(compare, "runs/a", "runs/b", "output=null")[1]


def test_data_that_were_encoded_elsewhere_in_training_are_encoded_here(run_dir: Path) -> None:
    class Ended(Loaders):
        def build(self, dataset: Any, batches: Any, trainer: Any) -> Any:
            pytest.fail("asked for encoders that have ended")

    loader = LoaderOptions(loaders=Ended())
    held_out = SourceSubset(Digits("val"), range(12))
    data = SDDataModule(Digits("train"), held_out, images=ImageOptions(resolution=32), loader=loader)
    assert evaluate_run(EvaluationRequest(run=str(run_dir), data=data, num_inference_steps=1, device="cpu")) == 0
    assert evaluation(run_dir)["metrics"]["caption gap"]["count"] == 12


def test_photos_without_held_out_ones_need_some_that_were_kept_apart(cli: Any, run_dir: Path) -> None:
    """What the message says works as it is written."""
    for name in ("photos", "kept"):
        Path(name).mkdir()
        for i in range(4):
            Digits("val").image(i).save(f"{name}/{i}.png")
            Path(f"{name}/{i}.txt").write_text(Digits("val").captions(i)[0])
    given = (f"run={run_dir}", "data=images", "data.resolution=32", *QUICK)
    code, err = cli(*given, "data.train_data_dir=photos")
    assert code == 2 and "data.val_data_dir=<the same>" in err
    code, out = cli(*given, "data.train_data_dir=kept", "data.val_data_dir=kept")
    assert code == 0 and "caption gap" in out, out
    assert evaluation(run_dir)["held_out"] == 4


def test_metrics_of_other_held_out_images_are_not_mixed(cli: Any, run_dir: Path, networks: Path) -> None:
    """As many, with the same captions: the pictures are kept, the metrics are not."""
    for name, places in (("one", range(12)), ("two", range(12, 24)), ("train", range(24, 25))):
        Path(name).mkdir()
        for i, place in enumerate(places):
            Digits("val").image(place).save(f"{name}/{i}.png")
            Path(f"{name}/{i}.txt").write_text("a digit")
    given = ("data=images", "data.train_data_dir=train", "data.resolution=32", "data.batch_size=1", *QUICK)
    one, two = ((*given, f"data.val_data_dir={name}") for name in ("one", "two"))
    assert cli(f"run={run_dir}", "metrics=[kid]", f"features={networks / 'clip'}", *one)[0] == 0
    code, out = cli(f"run={run_dir}", "metrics=[clip_score]", f"features={networks / 'clip'}", *two)
    assert code == 0 and "of which 0 are drawn now" in out
    assert [*evaluation(run_dir)["metrics"]] == ["CLIP score"]


def test_pictures_are_those_of_the_data_and_not_of_the_samples(cli: Any, call_main: Any) -> None:
    """In size; and captions with a text before them are told apart on digits, too."""
    code, out = call_main(train, *TRAIN, "+sampling.height=64", "data.caption_prefix='see, '", "output_dir=runs/e")
    assert code == 0, out
    code, out = cli("run=runs/e", *QUICK)
    assert code == 0 and "prompted accuracy" in out
    with Image.open("runs/e/evaluation/000000.png") as picture:
        assert picture.size == (32, 32) and settings_of(Path("runs/e/evaluation/000000.png"))["prompt"][:5] == "see, "


def test_int8_weights_have_no_caption_gap_and_that_is_told(cli: Any, run_dir: Path, call_main: Any) -> None:
    code, out = call_main(generate_program, f"run={run_dir}", "quantization=int8", "save_to=int8", "device=cpu")
    assert code == 0, out
    code, out = cli("run=int8", "data=digits", "data.num_val_samples=12", "output_dir=measured", *QUICK)
    assert code == 0 and "the caption gap is not measured of int8 weights" in out
    assert [*evaluation(Path("measured"))["metrics"]] == ["prompted accuracy"]
