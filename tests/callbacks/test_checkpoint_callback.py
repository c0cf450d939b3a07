"""What a run leaves on disk: complete, small, without pickles, and never worth less than before the last save."""

import json
import logging
import os
import re
import shutil
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors import safe_open

import small_training as small
from places import SUPPORT
from sd_lightning import SDLightningModule, UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.storage import runs, typed_json
from sd_lightning.storage.checkpoint import all_checkpoints, checkpoint_path, verify

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that saved after each and kept the newest two; its text encoder is frozen."""
    folder = tmp_path_factory.mktemp("run")
    saving = PortableCheckpoint(folder, every_n_steps=1, keep=2)
    small.fit(small.module(train_text_encoder=False), small.data(), 4, EMA(0.9), saving)
    return folder


def test_the_newest_n_are_kept_and_nothing_else(run_dir: Path) -> None:
    assert sorted(os.listdir(run_dir)) == [".sd_lightning", "checkpoints", "frozen"]
    assert sorted(os.listdir(run_dir / "checkpoints")) == ["step-00000003", "step-00000004"]
    assert not any(verify(path) for path in all_checkpoints(run_dir))


def test_frozen_parts_are_stored_once_and_trained_ones_in_every_checkpoint(run_dir: Path) -> None:
    paths = all_checkpoints(run_dir)
    for name in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "model_index.json"):
        files = [(path / "pipeline" / name).stat() for path in paths] + [(run_dir / "frozen" / name).stat()]
        assert {file.st_nlink for file in files} == {3} and len({file.st_ino for file in files}) == 1
    trained = "unet/diffusion_pytorch_model.safetensors"
    assert len({(path / "pipeline" / trained).stat().st_ino for path in paths}) == 2
    assert not (run_dir / "frozen" / trained).exists()


def test_frozen_parts_are_as_they_were_read_although_encoders_are_cast_and_freed(tmp_path: Path) -> None:
    def parts(resume: Path | None = None) -> tuple[Any, ...]:
        module = small.module(train_text_encoder=False, encoder_dtype="bfloat16")
        return module, small.data(), PortableCheckpoint(tmp_path, every_n_steps=0, resume=resume)

    file = tmp_path / "frozen/vae/diffusion_pytorch_model.safetensors"
    module, data, saving = parts()
    trainer = small.fit(module, data, 1, saving)
    written = file.read_bytes()
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, data)  # the encoders are in bfloat16 by now
    assert file.read_bytes() == written and saving.last_saved == checkpoint_path(tmp_path, 2)
    shutil.rmtree(tmp_path / "frozen")  # as on another machine
    module, data, saving = parts(saving.last_saved)
    small.fit(module, data, 3, saving)
    assert file.read_bytes() == written
    module.encoder.is_idle = True
    module.encoder.to(torch.device("cpu"))
    with pytest.raises(UsageError, match=r"vae\..* has no values in memory.*from_pretrained"):
        module.latent_diffusion.save_pretrained(tmp_path / "other")


def with_vae(scale: float) -> SDLightningModule:
    model = small.module(train_text_encoder=False)
    with torch.no_grad():
        for parameter in model.latent_diffusion.vae.parameters():
            parameter.mul_(scale)
    return model


def test_each_module_of_a_trainer_has_its_own_frozen_parts(tmp_path: Path) -> None:
    first, second = with_vae(1.0), with_vae(1.5)
    saving, files = small.Saving(tmp_path), []
    trainer = small.fit(first, small.data(), 1, saving)
    for steps, module in ((2, second), (3, first)):
        assert saving.last_saved is not None
        files.append((saving.last_saved / "pipeline/vae/diffusion_pytorch_model.safetensors").read_bytes())
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, small.data())
    assert saving.last_saved is not None
    last = (saving.last_saved / "pipeline/vae/diffusion_pytorch_model.safetensors").read_bytes()
    assert files[0] == last != files[1]


def test_a_model_that_is_refused_leaves_nothing_in_anothers_run(tmp_path: Path) -> None:
    small.fit(with_vae(1.0), small.data(), 1, small.Saving(tmp_path))
    shutil.rmtree(tmp_path / "frozen")
    with pytest.raises(UsageError, match="already holds a run"):
        small.fit(with_vae(1.5), small.data(), 1, small.Saving(tmp_path))
    assert not (tmp_path / "frozen").exists()


def test_nothing_in_a_checkpoint_is_a_pickle_or_an_archive(run_dir: Path) -> None:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    files.remove(run_dir / ".sd_lightning")
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        content = path.read_bytes()
        assert not zipfile.is_zipfile(path)  # what torch.save writes
        if path.suffix == ".json":
            json.loads(content)
        else:
            with safe_open(path, "pt") as tensors:
                assert list(tensors.keys())


def test_a_checkpoint_is_read_without_unpickling(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    import pickle

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    saving = PortableCheckpoint(tmp_path, every_n_steps=0, resume=checkpoint_path(run_dir, 4))
    trainer = small.fit(small.module(train_text_encoder=False), small.data(), 5, EMA(0.9), saving)
    assert trainer.global_step == 5


def test_the_state_is_flat_float32_with_every_weight_moment_and_average(run_dir: Path) -> None:
    index = json.loads((checkpoint_path(run_dir, 4) / "state/index.json").read_text())
    names = [name for name, _ in small.module(train_text_encoder=False).named_parameters()]
    assert index.keys() == {f"{kind}/{name}" for name in names for kind in ("master", "exp_avg", "exp_avg_sq", "ema")}
    assert {entry["dtype"] for entry in index.values()} == {"F32"}
    with safe_open(checkpoint_path(run_dir, 4) / "state/shard-00000-of-00001.safetensors", "pt") as tensors:
        assert {len(tensors.get_slice(key).get_shape()) for key in tensors.keys()} == {1}


def test_the_pipeline_folder_holds_the_average(run_dir: Path) -> None:
    stored = small.stored(checkpoint_path(run_dir, 4))
    with safe_open(checkpoint_path(run_dir, 4) / "pipeline/unet/diffusion_pytorch_model.safetensors", "pt") as unet:
        for key in unet.keys():
            assert torch.equal(unet.get_tensor(key), stored[f"ema/unet.{key}"])
    assert not torch.equal(stored["ema/unet.conv_in.weight"], stored["master/unet.conv_in.weight"])


def test_the_end_of_a_run_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    for every, steps in ((0, ["step-00000003"]), (2, ["step-00000002", "step-00000003"])):
        run = tmp_path / f"every-{every}"
        small.fit(small.module(), small.data(), 3, PortableCheckpoint(run, every_n_steps=every))
        assert [path.name for path in all_checkpoints(run)] == steps


def test_the_end_of_a_run_limited_by_epochs_is_saved_too(tmp_path: Path) -> None:
    small.fit(small.module(), small.data(), -1, PortableCheckpoint(tmp_path, every_n_steps=0), max_epochs=1)
    (path,) = all_checkpoints(tmp_path)
    position = small.trainer_state(path)["position"]
    assert (position["optimizer_steps"], position["epoch"], position["steps_in_epoch"]) == (5, 1, 0)


class _AtEnd(Callback):
    """Stands in for the last pictures, which take a while."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise KeyError("killed while the last pictures were drawn")


def test_the_last_step_is_on_disk_before_the_last_pictures_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        small.fit(small.module(), small.data(), 2, _AtEnd(), PortableCheckpoint(tmp_path, every_n_steps=0))
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000002"]


def test_seconds_of_training_add_up_over_sessions(tmp_path: Path) -> None:
    first = PortableCheckpoint(tmp_path, every_n_steps=0)
    small.fit(small.module(), small.data(), 1, first)
    second = PortableCheckpoint(tmp_path, every_n_steps=0, resume=first.last_saved)
    small.fit(small.module(), small.data(), 2, second)
    saved = [typed_json.loads((p / "trainer.json").read_text())["train_seconds"] for p in all_checkpoints(tmp_path)]
    assert 0 < saved[0] <= first.train_seconds and saved[0] < saved[1] <= second.train_seconds


def test_the_size_of_a_checkpoint_is_told_at_the_start_and_is_an_upper_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="sd_lightning"):
        small.fit(small.module(), small.data(), 1, EMA(0.9), PortableCheckpoint(tmp_path, keep=2))
    (line,) = [m for m in caplog.messages if m.startswith("a checkpoint takes up to")]
    told = re.fullmatch(
        r"a checkpoint takes up to (\S+) GB \(\+ (\S+) GB of frozen parts, once\); the newest 2 are kept", line
    )
    assert told is not None
    (path,) = all_checkpoints(tmp_path)
    frozen = sum(f.stat().st_size for f in (tmp_path / "frozen").rglob("*") if f.is_file())
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) - frozen
    assert float(told[2]) == pytest.approx(frozen / 1e9, rel=0.01)
    assert 0.9 * float(told[1]) <= size / 1e9 <= 1.1 * float(told[1])


def test_a_disk_without_room_for_two_checkpoints_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"checkpoints needs? .* 0.01 GB free; .*output_dir"):
        small.fit(small.module(), small.data(), 1, PortableCheckpoint(tmp_path))
    assert not all_checkpoints(tmp_path)


class _Unsavable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}


def test_a_callback_whose_state_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = small.module()
    before = small.weights(module)
    with pytest.raises(UsageError, match="_Unsavable.*function: cannot store"):
        small.fit(module, small.data(), 1, _Unsavable(), PortableCheckpoint(tmp_path))
    assert small.same(small.weights(module), before)


@pytest.mark.parametrize(
    ("options", "message"), [({"every_n_steps": -1}, "every_n_steps=-1; expected 0"), ({"keep": 0}, "keep=0; expected")]
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=f"PortableCheckpoint got {message}"):
        PortableCheckpoint(tmp_path, **options)  # type: ignore[arg-type]


def test_a_run_that_goes_back_keeps_what_it_saves_and_sets_its_old_future_aside(tmp_path: Path) -> None:
    small.train(tmp_path, 4, save=(1, 2, 3))
    saving = small.Saving(tmp_path, resume=checkpoint_path(tmp_path, 1), keep=1)
    small.fit(small.module(), small.data(), 2, EMA(0.9), saving)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert [name[:23] for name in names] == [*(f"set-aside-step-0000000{n}" for n in (2, 3, 4)), "step-00000002"]
    assert runs.find_checkpoint("auto", tmp_path) == saving.last_saved == checkpoint_path(tmp_path, 2)


def test_another_run_is_refused_where_one_lies_already(tmp_path: Path) -> None:
    small.train(tmp_path / "a", 1)
    small.train(tmp_path / "b", 2)
    before = sorted((tmp_path / "a").rglob("*"))
    for resume in (None, checkpoint_path(tmp_path / "b", 2)):
        with pytest.raises(UsageError, match="already holds a run; continue it with resume='.*step-00000001', or give"):
            small.train(tmp_path / "a", 3, resume=resume)
    assert sorted((tmp_path / "a").rglob("*")) == before


def test_a_run_whose_checkpoints_lie_behind_a_link_goes_on(tmp_path: Path) -> None:
    small.train(tmp_path / "run", 1)
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere")
    resume = runs.find_checkpoint("auto", tmp_path / "run")
    assert small.train(tmp_path / "run", 2, resume=resume) == checkpoint_path(tmp_path / "run", 2)


class _OwnData(pl.LightningDataModule):
    def train_dataloader(self) -> list[Any]:
        return []


def test_data_that_do_not_say_where_a_run_stands_are_refused_before_the_first_step(tmp_path: Path) -> None:
    data: Any = _OwnData()
    with pytest.raises(UsageError, match="got a _OwnData as datamodule; expected an SDDataModule"):
        small.fit(small.module(), data, 1, PortableCheckpoint(tmp_path / "run"))
    trainer = small.trainer_of(1, PortableCheckpoint(tmp_path / "run"))
    with pytest.raises(UsageError, match="got no datamodule; expected an SDDataModule"):
        trainer.fit(small.module(), [])
    assert not (tmp_path / "run").exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    for name in (".tmp-step-00000007-00ff00ff", ".trash-step-00000001-00ff00ff"):
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    (tmp_path / ".tmp-frozen").mkdir()
    runs.mark(tmp_path)
    small.fit(small.module(), small.data(), 1, PortableCheckpoint(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".sd_lightning", "checkpoints", "frozen"]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def _script(text: str) -> str:
    return f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n" + textwrap.dedent(text)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_disk_that_fills_up_during_a_save_leaves_the_last_good_checkpoint(tmp_path: Path, run_python: Run) -> None:
    script = _script("""
        import resource, signal
        import small_training as small
        from pathlib import Path
        from sd_lightning import UsageError
        from sd_lightning.callbacks import EMA, PortableCheckpoint
        from lightning.pytorch.callbacks import Callback

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() then fails with EFBIG

        class FillsUp(Callback):
            def on_train_batch_start(self, trainer, *args):
                if trainer.global_step == 3:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))

        run = Path(sys.argv[1])
        try:
            small.fit(small.module(), small.data(), 6, EMA(0.9), FillsUp(), PortableCheckpoint(run, every_n_steps=2))
        except UsageError as error:
            print(error)
            sys.exit(3)
    """)
    done = run_python("-c", script, str(tmp_path))
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Saving")]
    good = tmp_path / "checkpoints" / "step-00000002"
    assert "Saving the checkpoint of step 4" in line and f"The last good checkpoint is {good};" in line
    assert "resume=auto" in line
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"] and not verify(good)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="reads the peak of resident memory from /proc")
def test_saving_and_restoring_take_little_memory_beside_the_model(tmp_path: Path, run_python: Run) -> None:
    """152 M trained parameters: 2.4 GB of state. The largest tensor is 58 MB."""
    script = _script("""
        import dataclasses, threading, time
        import torch
        import small_training as small
        from pathlib import Path
        from sd_lightning import LatentDiffusion
        from sd_lightning.callbacks import EMA, PortableCheckpoint

        def resident():
            pages = Path("/proc/self/statm").read_text().split()[1]
            return int(pages) * 4096

        class Peak:
            def __enter__(self):
                self.before = self.peak = resident()
                self.going = True
                self.thread = threading.Thread(target=self.watch)
                self.thread.start()
                return self
            def watch(self):
                while self.going:
                    self.peak = max(self.peak, resident())
                    time.sleep(0.002)
            def __exit__(self, *args):
                self.going = False
                self.thread.join()

        def build():
            from diffusers import UNet2DConditionModel
            module = small.module(LatentDiffusion.build("tiny"), train_text_encoder=False)
            model = module.latent_diffusion
            config = dict(model.components["unet"].config, block_out_channels=[448, 896])
            model.components["unet"] = dataclasses.replace(model.components["unet"], config=config)
            model.networks["unet"] = module.unet = UNet2DConditionModel(**config)
            return module

        class Measured(PortableCheckpoint):
            def save(self, *args):
                with Peak() as memory:
                    path = super().save(*args)
                print("save", memory.peak - memory.before)
                return path
            def restore(self, *args):
                with Peak() as memory:
                    super().restore(*args)
                print("restore", memory.peak - memory.before)

        run = Path(sys.argv[1])
        module = build()
        print("parameters", sum(p.numel() for p in module.parameters()))
        print("largest", max(p.numel() for p in module.parameters()) * 4)
        saving = Measured(run, every_n_steps=0)
        small.fit(module, small.data(batch_size=1), 1, EMA(0.9), saving)
        del module
        resuming = Measured(run, every_n_steps=0, resume=saving.last_saved)
        small.fit(build(), small.data(batch_size=1), 1, EMA(0.9), resuming)  # all steps are done
    """)
    done = run_python("-c", script, str(tmp_path), check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    numbers = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    assert numbers["parameters"] > 150e6
    allowed = numbers["largest"] + 256 * 2**20
    assert numbers["save"] <= allowed
    # Adam's moments come into being while a checkpoint is restored; everything else is filled in place.
    assert numbers["restore"] <= 8 * numbers["parameters"] + allowed
