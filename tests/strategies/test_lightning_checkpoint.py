"""`init_from=x.ckpt`: the weights of a plain Lightning checkpoint, and nothing that could run code."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

import small_training
from sd_lightning import LatentDiffusion, UsageError, _conf, train
from sd_lightning.storage import checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what Lightning saves: `both.ckpt`, and `unet.ckpt` of a run with a frozen text encoder."""
    folder = tmp_path_factory.mktemp("lightning")
    for name, trains_text_encoder in {"both": True, "unet": False}.items():
        module = small_training.module(LatentDiffusion.build("tiny", seed=1), train_text_encoder=trains_text_encoder)
        trainer = small_training.fit(module, small_training.data(), 2)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return folder


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def call(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the training program in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(command)])
    try:
        _conf.main(train.PROGRAM)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_module_takes_the_weights_bit_for_bit(saved: Path) -> None:
    module = small_training.module(LatentDiffusion.build("tiny", seed=1))
    assert not small_training.same(module.state_dict(), state_of(saved / "both.ckpt"))
    checkpoint.load_lightning_checkpoint(saved / "both.ckpt", module)
    assert small_training.same(module.state_dict(), state_of(saved / "both.ckpt"))
    # The model around it sees them too: it is what pictures and pipelines are made of.
    unet = {f"unet.{name}": value for name, value in module.latent_diffusion.denoiser.state_dict().items()}
    assert small_training.same(unet, {k: v for k, v in state_of(saved / "both.ckpt").items() if k.startswith("unet.")})


def test_training_starts_from_the_weights_at_step_0(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate of 0 they are what the first checkpoint holds."""
    monkeypatch.chdir(tmp_path)
    quick = "trainer.limit_val_batches=0 callbacks.samples=null callbacks.ema=null data.cache_latents=false"
    code = call(
        f"output_dir=run init_from={saved / 'both.ckpt'} optimizer.lr=0 trainer.max_steps=1 {quick}", monkeypatch
    )
    assert code == 0
    (path,) = checkpoint.all_checkpoints(tmp_path / "run")
    stored = small_training.stored(path)
    masters = {k.removeprefix("master/"): v for k, v in stored.items() if k.startswith("master/")}
    assert small_training.same(masters, state_of(saved / "both.ckpt"))
    assert small_training.trainer_state(path)["position"]["optimizer_steps"] == 1


@pytest.mark.parametrize(
    ("name", "train_text_encoder", "first"),
    [
        ("both", False, r"36 of \d+ tensors differ: text_encoder\.\S+: \(\d+, 64\) in the checkpoint, absent in the"),
        ("unet", True, r"36 of \d+ tensors differ: text_encoder\.\S+: absent in the checkpoint, \(\d+, 64\) in the"),
    ],
)
def test_other_trained_networks_are_named(name: str, train_text_encoder: bool, first: str, saved: Path) -> None:
    module = small_training.module(LatentDiffusion.build("tiny", seed=1), train_text_encoder=train_text_encoder)
    before = small_training.weights(module)
    with pytest.raises(UsageError, match=first) as refused:
        checkpoint.load_lightning_checkpoint(saved / f"{name}.ckpt", module)
    assert str(refused.value).startswith(f"init_from={saved / name}.ckpt: the checkpoint is of another model; ")
    assert str(refused.value).endswith(
        "Give the model=, trainable=, base= and module.train_text_encoder of the run that saved it"
    )
    assert small_training.same(small_training.weights(module), before)


def test_other_shapes_are_named(saved: Path, tmp_path: Path) -> None:
    content = torch.load(saved / "unet.ckpt", weights_only=True)
    content["state_dict"]["unet.conv_in.weight"] = torch.zeros(32, 9, 3, 3)
    torch.save(content, tmp_path / "inpainting.ckpt")
    module = small_training.module(LatentDiffusion.build("tiny", seed=1), train_text_encoder=False)
    with pytest.raises(
        UsageError, match=r"1 of \d+ tensors differ: unet.conv_in.weight: \(32, 9, 3, 3\) in the .*, \(32, 4, 3, 3\) in"
    ):
        checkpoint.load_lightning_checkpoint(tmp_path / "inpainting.ckpt", module)


class Payload:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("init_from=nowhere.ckpt", ("init_from=nowhere.ckpt: no such file", "expected the file that Lightning's")),
        ("init_from=folder.ckpt", ("init_from=folder.ckpt: a folder", "expected the file", "or a run, checkpoint or")),
        ("init_from=text.ckpt", ("init_from=text.ckpt: cannot be read", "expected a checkpoint", "save it again")),
        ("init_from=payload.ckpt", ("init_from=payload.ckpt: cannot be read", "expected a checkpoint", "give a pipe")),
        ("init_from=bare.ckpt", ("init_from=bare.ckpt: cannot be read (KeyError: 'state_dict')", "save it again")),
        ("init_from=UNET", ("unet.ckpt: the checkpoint is of another model", "text_encoder.", "absent in the check")),
        ("resume=UNET", ("resume=", "a Lightning checkpoint, from which only weights", "write init_from=")),
        ("resume=auto init_from=UNET", ("unet.ckpt: the checkpoint is of another model",)),  # there is no run yet
    ],
)
def test_mistake_is_one_line_and_runs_nothing(
    command: str,
    words: tuple[str, ...],
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"state_dict": {}, "extra": Payload()}, tmp_path / "payload.ckpt")
    torch.save({"unet.conv_in.weight": torch.zeros(1)}, tmp_path / "bare.ckpt")
    before = set(tmp_path.iterdir())
    capfd.readouterr()
    assert call(command.replace("UNET", str(saved / "unet.ckpt")), monkeypatch) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    position = 0
    for word in words:
        found = err.find(word, position)
        assert found >= 0, f"no {word!r} after column {position} in: {err}"
        position = found + 1
    assert set(tmp_path.iterdir()) == before
