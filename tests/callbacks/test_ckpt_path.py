"""``ckpt_path=`` of Lightning's trainer takes our checkpoint folders, and still its own files."""

from pathlib import Path

import pytest
import torch

from sd_lightning import UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint
from small_training import Saving, assert_bitwise_equal, data, module, same, train, trainer_of, weights


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, 4, save=(2,))
    return folder


@pytest.mark.parametrize("given", ["checkpoints/step-00000002", "."])
def test_fit_continues_a_checkpoint_or_a_run_as_resume_does(run_dir: Path, given: str, tmp_path: Path) -> None:
    saving = Saving(tmp_path / "ours")
    trainer_of(6, EMA(0.9), saving).fit(module(), data(), ckpt_path=run_dir / given)
    assert saving.last_saved is not None
    step = 2 if given != "." else 4
    assert_bitwise_equal(
        saving.last_saved, train(tmp_path / "theirs", 6, resume=run_dir / f"checkpoints/step-0000000{step}")
    )


def test_evaluation_uses_the_average_that_the_checkpoint_exports(run_dir: Path, tmp_path: Path) -> None:
    trained, loaded = module(), module()
    options = {"limit_val_batches": 1, "enable_checkpointing": True}
    trainer = trainer_of(4, EMA(0.9), Saving(tmp_path), **options)
    trainer.fit(trained, data())
    expected = trainer.validate(trained, data(), verbose=False)
    evaluating = trainer_of(4, PortableCheckpoint(tmp_path), **options)
    assert evaluating.validate(loaded, data(), ckpt_path=run_dir, verbose=False) == expected
    assert same(weights(loaded), weights(trained))


def test_files_that_lightning_wrote_are_still_taken(tmp_path: Path) -> None:
    pl_module = module()
    trainer = trainer_of(3, Saving(tmp_path / "run"))
    trainer.fit(pl_module, data())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    other = module()
    again = trainer_of(3, Saving(tmp_path / "other"))
    again.fit(other, data(), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert same(weights(other), weights(pl_module)) and again.global_step == 3


def test_another_model_and_a_damaged_checkpoint_are_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_of(6, Saving(tmp_path / "ours"))
    with pytest.raises(UsageError, match="another model; .* trained tensors differ: text_encoder"):
        trainer.fit(module(train_text_encoder=False), data(), ckpt_path=run_dir)
    trainer = trainer_of(6, Saving(tmp_path / "ours"), limit_val_batches=1)
    with pytest.raises(UsageError, match="another model; .* trained tensors differ: text_encoder"):
        trainer.validate(module(train_text_encoder=False), data(), ckpt_path=run_dir, verbose=False)
    path = train(tmp_path / "run", 1)
    (path / "trainer.json").write_text("{}")
    with pytest.raises(UsageError, match="ckpt_path=.*: the checkpoint is damaged: trainer.json"):
        trainer_of(6, Saving(tmp_path / "ours")).fit(module(), data(), ckpt_path=path)
    assert torch.is_grad_enabled()
