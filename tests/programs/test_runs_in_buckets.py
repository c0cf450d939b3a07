"""Runs in a bucket: they are resumed on another machine bit for bit, and compared, drawn with and exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

import small_training as small
from far_places import put
from locations import opened
from refusals import call
from s3_server import S3Server
from sd_lightning._errors import UsageError
from sd_lightning.apps import hub
from sd_lightning.callbacks.checkpoint import restore
from sd_lightning.report.metrics import read_metrics
from sd_lightning.storage import far_runs, runs
from sd_lightning.storage.checkpoint import checkpoint_path

URL = "s3://bucket/runs/a"
SMALL = (
    "data.batch_size=8 trainer.limit_val_batches=0 callbacks.samples=null logger=csv trainer.log_every_n_steps=1 "
    "callbacks.checkpoint.every_n_steps=2 trainer.max_steps=4"
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at steps 2 and 4; read-only."""
    path = tmp_path_factory.mktemp("runs") / "straight"
    assert call(f"train {SMALL} output_dir={path}") == 0
    return path


@pytest.fixture
def killed(straight: Path, tmp_path: Path) -> Path:
    """The same run, of which the machine was lost after step 2 was uploaded."""
    path = tmp_path / "killed"
    shutil.copytree(straight, path)
    for name in ("pipeline", "frozen", "checkpoints/step-00000004"):
        shutil.rmtree(path / name)
    for name in ("summary.json", "report.html"):
        (path / name).unlink()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(far_runs.CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    far_runs.location_of.cache_clear()
    return tmp_path / "cache"


def losses(run: Path) -> list[tuple[int, float]]:
    return list(read_metrics(run / "logs")["train/loss"])


def test_a_run_in_a_bucket_goes_on_in_an_empty_folder(s3: S3Server, straight: Path, killed: Path) -> None:
    put(killed, URL)
    folder = far_runs.working_folder(URL)
    assert call(f"train {SMALL} resume=auto output_dir={folder}") == 0
    small.assert_bitwise_equal(checkpoint_path(folder, 4), checkpoint_path(straight, 4))
    assert losses(folder) == losses(straight) and len(losses(folder)) == 4, "the curve goes on where it was"
    assert not s3.count("GET", "/vae/"), "the frozen parts are those of the model"


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_under_another_name(
    s3: S3Server, straight: Path, killed: Path, tmp_path: Path
) -> None:
    put(killed, URL)
    assert call(f"train {SMALL} resume={URL} output_dir={tmp_path}/b") == 0
    small.assert_bitwise_equal(checkpoint_path(tmp_path / "b", 4), checkpoint_path(straight, 4))
    assert call(f"train {SMALL} resume={URL} output_dir={tmp_path}/b") == 2, "it is another run"


def test_a_finished_run_in_a_bucket_is_complete_elsewhere(
    s3: S3Server, straight: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left to do with its results is told by its URL."""
    put(straight, URL)
    caplog.set_level("INFO")
    folder = far_runs.working_folder(URL)
    assert call(f"train {SMALL} resume=auto output_dir={folder}") == 0
    assert "is complete" in caplog.text and not (folder / "checkpoints").exists()
    monkeypatch.setattr(hub, "check", lambda *_, **__: None)
    asked = "callbacks=evaluation push_to_hub=me/a hub_private=false"
    assert call(f"train {SMALL} resume=auto output_dir={folder} {asked}") == 1
    assert f"{URL} was trained on another machine, and is not evaluated here" in caplog.text
    assert f"python -m sd_lightning.export run={URL} push_to_hub=me/a hub_private=false" in caplog.text


def test_a_run_that_was_lost_before_its_results_gets_them(s3: S3Server, straight: Path) -> None:
    put(straight, URL)
    for entry in opened(URL, "test").entries():
        if not entry.name.startswith("checkpoints/"):
            opened(URL, "test").delete(entry.name)
    folder = far_runs.working_folder(URL)
    assert call(f"train {SMALL} resume=auto output_dir={folder}") == 0
    unet = "pipeline/unet/diffusion_pytorch_model.safetensors"
    assert (folder / unet).read_bytes() == (straight / unet).read_bytes()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_a_run_starts_from_a_pipeline_in_a_bucket_and_finds_it_again(
    s3: S3Server, straight: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put(straight, URL)
    start = f"train {SMALL} init_from={URL} output_dir={tmp_path}/c"
    assert call(f"{start} trainer.max_steps=2") == 0
    pretrained = yaml.safe_load((tmp_path / "c" / "config.yaml").read_text())["model"]["pretrained"]
    step = "checkpoints/step-00000004"
    assert pretrained == f"{URL}/{step}/pipeline"
    shutil.rmtree(cache)  # as on another machine
    put(straight / step, f"{URL}/checkpoints/step-00000009")  # as if the other run had gone on
    assert call(f"{start} resume=auto trainer.max_steps=3") == 0
    assert yaml.safe_load((tmp_path / "c" / "config.yaml").read_text())["model"]["pretrained"] == pretrained
    for entry in opened(URL, "test").entries(f"{step}/"):
        opened(URL, "test").delete(entry.name)
    capfd.readouterr()
    assert call(f"{start} resume=auto") == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert f"the run started from {pretrained}, which it reads again" in error and "leave init_from out" in error
    own = f"{tmp_path}/c/checkpoints/step-00000003/pipeline"
    assert call(f"train {SMALL} resume=auto output_dir={tmp_path}/c model.pretrained={own}") == 0


def test_ranks_that_start_from_other_checkpoints_of_a_run_that_goes_on_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, later = (f"{URL}/checkpoints/step-0000000{step}/pipeline" for step in (4, 6))
    monkeypatch.setattr(restore, "on_rank_zero", lambda _: first)
    restore.agree_on_pretrained(first)
    with pytest.raises(UsageError) as caught:
        restore.agree_on_pretrained(later)
    assert f"model.pretrained={later} on " in str(caught.value) and f"{first} on rank 0" in str(caught.value)
    assert str(caught.value).endswith(f"name one of its checkpoints: init_from={URL}/checkpoints/step-00000004")


def test_runs_in_a_bucket_are_compared(
    s3: S3Server, straight: Path, killed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put(straight, URL)
    put(killed, "s3://bucket/runs/b")
    s3.reset()
    assert call(f"compare {URL} s3://bucket/runs/b {straight} output=null") == 0
    out = capfd.readouterr().out
    assert out.startswith("3 runs") and "\nb is not finished" in out
    assert not s3.count("GET", "safetensors")
    assert call(f"compare {URL} s3://bucket/runs/none output=null") == 2
    assert "runs=s3://bucket/runs/none: there is nothing at that URL" in capfd.readouterr().err


def test_a_run_in_a_bucket_is_exported(s3: S3Server, straight: Path, tmp_path: Path) -> None:
    put(straight, URL)
    for form in ("diffusers", "non_ema"):
        for run, folder in ((URL, "far"), (straight, "near")):
            assert call(f"export run={run} format={form} output_dir={tmp_path}/{folder}-{form}") == 0
        far, near = tmp_path / f"far-{form}", tmp_path / f"near-{form}"
        names = {path.relative_to(near) for path in near.rglob("*") if path.is_file()}
        assert names == {path.relative_to(far) for path in far.rglob("*") if path.is_file()}
        assert all((far / name).read_bytes() == (near / name).read_bytes() for name in names)


def test_pictures_are_drawn_with_a_run_in_a_bucket(s3: S3Server, straight: Path, tmp_path: Path) -> None:
    from sd_lightning.apps.pictures import settings_of

    put(straight, URL)
    quick = "num_inference_steps=1 'prompts=[a three]'"
    assert call(f"generate run={URL} {quick} output_dir={tmp_path}/far") == 0
    assert call(f"generate run={straight} {quick} output_dir={tmp_path}/near") == 0
    far, near = (next((tmp_path / each).glob("a-three*.png")) for each in ("far", "near"))
    from PIL import Image

    assert Image.open(far).tobytes() == Image.open(near).tobytes()
    assert settings_of(far)["model"] == f"{URL}/checkpoints/step-00000004/pipeline"


@pytest.mark.parametrize("command", ["generate prompts=[a] run=", "export run=", "train resume=", "train init_from="])
def test_what_is_not_there_is_refused(s3: S3Server, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(f"{command}{URL}") == 2
    assert f"={URL}: there is no whole checkpoint" in capfd.readouterr().err


@pytest.mark.full("cluster")
def test_two_processes_go_on_bit_for_bit_and_share_a_file_that_both_need(
    s3: S3Server, tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    options = [*SMALL.split(), "strategy=ddp", "trainer.devices=2"]
    straight, folder = tmp_path / "straight", far_runs.working_folder(URL)
    run_python("-m", "sd_lightning.train", *options, f"output_dir={straight}", check=True)
    put(checkpoint_path(straight, 2), f"{URL}/checkpoints/step-00000002")
    opened(URL, "test").create(runs.MARK, (straight / runs.MARK).read_bytes())
    size = tensor_bytes(checkpoint_path(straight, 2))
    s3.reset()
    run_python("-m", "sd_lightning.train", *options, "resume=auto", f"output_dir={folder}", check=True)
    print(f"{s3.body_bytes:,} bytes of {size:,}")
    assert size <= s3.body_bytes < 1.06 * size
    small.assert_bitwise_equal(checkpoint_path(folder, 4), checkpoint_path(straight, 4))
    assert losses(folder) == losses(straight)[2:]


@pytest.mark.full("cluster")
def test_two_processes_under_fsdp_fetch_a_half_each(
    s3: S3Server, straight: Path, tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    """The one file of one process, read in ranges by two; the halves of the tiny model's tensors are close together."""
    program = tmp_path / "train.py"
    program.write_text(
        "from sd_lightning import _conf, train\nfrom sd_lightning.storage import ranged_file\n"
        "ranged_file.GAP_BYTES = 1024\nif __name__ == '__main__':\n    _conf.main(train.PROGRAM)\n"
    )
    saved = checkpoint_path(straight, 2)
    put(saved, f"{URL}/checkpoints/step-00000002")
    options = [*SMALL.split(), "strategy=fsdp", "trainer.devices=2"]
    s3.reset()
    for folder, resume in (("far", URL), ("near", saved)):
        run_python(program, *options, f"resume={resume}", f"output_dir={tmp_path}/{folder}", check=True)
    size = tensor_bytes(saved)
    print(f"{s3.body_bytes:,} bytes of {size:,} in {s3.count('GET', '.safetensors')} requests")
    assert not list(tmp_path.glob("cache/**/*.safetensors")), "no process has fetched the whole file"
    assert 0.9 * size <= s3.body_bytes < 1.2 * size
    small.assert_bitwise_equal(checkpoint_path(tmp_path / "far", 4), checkpoint_path(tmp_path / "near", 4))
    assert losses(tmp_path / "far") == losses(tmp_path / "near")


def tensor_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in (checkpoint / "state").glob("*.safetensors"))
