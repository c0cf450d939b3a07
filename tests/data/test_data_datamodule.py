"""Datamodule in a real Trainer: every run sees the same samples, exactly once, whoever reads and wherever it stops.

Ranks are played one after the other in this process (`RankTrainer`); a real process group is in the slow test.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor

import small_training
from ranks import run_jobs_of_all
from sd_lightning import train
from sd_lightning._errors import UsageError
from sd_lightning.data.builders import digits_data
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.sampler import validation_batches
from sd_lightning.data.source import BadSample
from sd_lightning.data.transform import ImageOptions
from square_data import BATCH, NUM, RankTrainer, Recorder, Squares, datamodule, tokenize, trainer


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def samples_of(runs: list[Recorder], accumulate: int) -> list[list[tuple[int, int, str]]]:
    """Join the ranks' micro-batches to what each optimizer step saw, in the sampler's order."""
    micro = [sum(parts, []) for parts in zip(*(run.steps for run in runs), strict=True)]
    return [sum(micro[i : i + accumulate], []) for i in range(0, len(micro), accumulate)]


def fit(
    max_steps: int,
    *,
    world: int = 1,
    accumulate: int = 1,
    num_workers: int = 0,
    resume: Callable[[RankTrainer, SDDataModule], None] | None = None,
    **options: Any,
) -> list[list[tuple[int, int, str]]]:
    """Train on every rank in turn; return the samples of each optimizer step."""
    runs = []
    for rank in range(world):
        module, data = Recorder(), datamodule(num_workers, **options)
        made = trainer(max_steps, accumulate, (world, rank))
        if resume is not None:
            resume(made, data)
        made.fit(module, data)
        runs.append(module)
    return samples_of(runs, accumulate)


@pytest.fixture(scope="module")
def uninterrupted() -> list[list[tuple[int, int, str]]]:
    """Seven steps of one process: two epochs and a third of the next."""
    return fit(7)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 2), (4, 1), (4, 2)])
def test_every_division_sees_the_same_bits(
    uninterrupted: list[list[tuple[int, int, str]]], world: int, accumulate: int, num_workers: int
) -> None:
    assert fit(7, world=world, accumulate=accumulate, num_workers=num_workers) == uninterrupted


def test_epochs_differ_and_repeat_no_sample(uninterrupted: list[list[tuple[int, int, str]]]) -> None:
    first, second = (sum(uninterrupted[i : i + 3], []) for i in (0, 3))
    assert {epoch for epoch, _, _ in first} == {0} and {epoch for epoch, _, _ in second} == {1}
    assert len({index for _, index, _ in first}) == len(first) == 24
    hashes = [{index: digest for _, index, digest in part} for part in (first, second)]
    common = hashes[0].keys() & hashes[1].keys()
    assert len(common) >= 20 and sum(hashes[0][i] != hashes[1][i] for i in common) > len(common) // 2


@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (2, 2), (3, 0), (4, 2), (6, 0)])
def test_run_that_lightning_ended_resumes_with_exactly_the_unseen_samples(
    uninterrupted: list[list[tuple[int, int, str]]], tmp_path: Path, stop: int, num_workers: int
) -> None:
    module, accumulate = Recorder(), 2
    stopped = trainer(stop, accumulate)
    stopped.fit(module, datamodule(num_workers))
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = Recorder()
    trainer(7, accumulate).fit(resumed, datamodule(num_workers), ckpt_path=str(tmp_path / "stopped.ckpt"))
    assert samples_of([module], accumulate) == uninterrupted[:stop]
    assert samples_of([resumed], accumulate) == uninterrupted[stop:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_run_killed_after_a_lightning_checkpoint_resumes_with_exactly_the_unseen_samples(
    uninterrupted: list[list[tuple[int, int, str]]], tmp_path: Path, num_workers: int
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer(7, 2, callbacks=[saver], enable_checkpointing=True).fit(Recorder(), datamodule(num_workers))
    for step in range(1, 7) if num_workers == 0 else (2, 4):
        resumed = Recorder()
        trainer(7, 2).fit(resumed, datamodule(num_workers), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert samples_of([resumed], 2) == uninterrupted[step:], f"killed after step {step}"


@pytest.mark.parametrize(
    ("stop", "world", "accumulate", "num_workers"),
    [(1, 1, 1, 0), (2, 2, 2, 0), (3, 4, 1, 0), (4, 1, 4, 2), (5, 2, 1, 2)],
)
def test_derived_position_resumes_at_another_world_size(
    uninterrupted: list[list[tuple[int, int, str]]], stop: int, world: int, accumulate: int, num_workers: int
) -> None:
    def resume(made: RankTrainer, data: SDDataModule) -> None:
        data.resume(*divmod(stop, 3))

    resumed = fit(7 - stop, world=world, accumulate=accumulate, num_workers=num_workers, resume=resume)
    assert resumed == uninterrupted[stop:]


def test_resume_up_to_the_first_batch_reaches_worker_processes(uninterrupted: list[list[tuple[int, int, str]]]) -> None:
    class ResumeAtStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.datamodule.resume(0, 2)

    module = Recorder()
    trainer(3, callbacks=[ResumeAtStart()]).fit(module, datamodule(num_workers=2))
    assert samples_of([module], 1) == uninterrupted[2:5]


def test_second_fit_starts_from_the_beginning(uninterrupted: list[list[tuple[int, int, str]]]) -> None:
    data = datamodule()
    data.resume(0, 2)
    trainer(1).fit(Recorder(), data)
    again = Recorder()
    trainer(2).fit(again, data)
    assert samples_of([again], 1) == uninterrupted[:2]


def test_batch_holds_what_the_module_reads() -> None:
    module = Recorder()
    trainer(1).fit(module, datamodule())
    batch = module.last
    shapes = {key: (tuple(value.shape), value.dtype) for key, value in batch.items() if isinstance(value, Tensor)}
    assert {name: tuple(ids.shape) for name, ids in batch["input_ids"].items()} == {
        "text_encoder": (BATCH, 3),
        "text_encoder_2": (BATCH, 5),
    }
    pair = ((BATCH, 2), torch.int64)
    assert shapes == {
        "pixel_values": ((BATCH, 3, 16, 16), torch.float32),
        "epoch": ((BATCH,), torch.int64),
        "index": ((BATCH,), torch.int64),
        "original_size": pair,
        "crop_top_left": pair,
        "target_size": pair,
    }
    assert "bad" not in batch and "captions" not in batch
    assert batch["original_size"][0].tolist() == [20, 30] and batch["target_size"][0].tolist() == [16, 16]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_broken_image_is_replaced_counted_and_named_once(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    data = datamodule(num_workers, source=Squares(broken=(4, 5)), max_bad_fraction=0.1)
    module = Recorder()
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        trainer(6).fit(module, data)
    assert data.bad.found == data.bad.gather() == {"square-4": "torn", "square-5": "torn"}
    named = [record.getMessage() for record in caplog.records]
    assert sorted(named) == [f"data: square-{i} is left out: torn" for i in (4, 5)]
    whole = fit(6)
    assert [[key[:2] for key in step] for step in samples_of([module], 1)] == [[k[:2] for k in step] for step in whole]
    differing = {new[1] for a, b in zip(samples_of([module], 1), whole) for new, old in zip(a, b) if new != old}
    assert differing == {4, 5}


@pytest.mark.parametrize("cache", [False, True])
def test_too_many_broken_images_stop_the_run_with_the_list(cache: bool) -> None:
    images = ImageOptions(16, center_crop=True)
    data = datamodule(source=Squares(broken=(4, 5, 9)), max_bad_fraction=0.1, cache_latents=cache, images=images)
    with pytest.raises(UsageError, match=r"3 samples cannot be used, .*max_bad_fraction=0.1 .*square-\d \(torn\)"):
        trainer(6).fit(Recorder(), data)


def test_only_broken_images_stop_the_run_even_if_all_may_be_bad() -> None:
    data = datamodule(source=Squares(broken=tuple(range(NUM))), max_bad_fraction=1.0)
    with pytest.raises(UsageError, match="none of the 26 images can be read: square-.* and 6 more"):
        trainer(1).fit(Recorder(), data)


def test_dropped_entries_of_a_source_count_before_training() -> None:
    source = Squares()
    source.dropped = {"a.png": "there is no file a.png"}
    with pytest.raises(UsageError, match=r"1 samples cannot be used.*a.png \(there is no file a.png\)"):
        datamodule(source=source)
    assert datamodule(source=source, max_bad_fraction=0.1).bad.found == source.dropped


def test_cached_latents_are_the_encoded_pixels_and_are_encoded_once() -> None:
    images = ImageOptions(16, center_crop=True, proportion_empty_prompts=0.3)
    broken = Squares(broken=(4, 25))
    options: dict[str, Any] = {"source": broken, "val": Squares(5), "images": images, "max_bad_fraction": 0.2}
    cached, plain = Recorder(), Recorder()
    data = datamodule(cache_latents=True, **options)
    trainer(7, check_val_every_n_epoch=1).fit(cached, data)
    assert cached.num_encoded == NUM - 2 + 5
    trainer(7).fit(plain, datamodule(**options))
    assert torch.equal(cached.last["latent_moments"], plain._encode(plain.last["pixel_values"]))
    assert equal(cached.last["input_ids"], plain.last["input_ids"])
    for key in ("original_size", "crop_top_left", "target_size", "index"):
        assert torch.equal(cached.last[key], plain.last[key])
    assert data.bad.found == {"square-4": "torn", "square-25": "torn"}
    trainer(1).fit(cached, data)
    assert cached.num_encoded == NUM - 2 + 5
    other = Recorder()
    trainer(1).fit(other, data)
    assert other.num_encoded == NUM - 2 + 5, "another encoder must not train on the latents of the first"


def test_cached_latents_are_the_same_at_every_world_size() -> None:
    images = ImageOptions(16, center_crop=True)
    one = fit(3, images=images, cache_latents=True)
    assert fit(3, images=images, cache_latents=True, world=2, accumulate=2, num_workers=2) == one


def test_validation_is_in_order_without_randomness_and_with_wrong_captions() -> None:
    module = Recorder()
    trainer(3).fit(module, datamodule(val=Squares(5), loader=LoaderOptions(val_batch_size=2)))
    batches = module.val_batches[:3]
    assert [batch["index"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    captions = sum((batch["captions"] for batch in batches), [])
    assert captions == [f"first {i}" for i in range(5)]
    wrong = {name: torch.cat([batch["wrong_input_ids"][name] for batch in batches]) for name in tokenize(["any"])}
    assert equal(wrong, tokenize([f"first {i}" for i in (1, 2, 3, 4, 0)]))
    assert all(batch["crop_top_left"].tolist() == [[0, 4]] * len(batch["index"]) for batch in batches)


class Captioned(Squares):
    """Squares with one caption each."""

    def __init__(self, *captions: str) -> None:
        super().__init__(len(captions))
        self._captions = captions

    def captions(self, index: int) -> list[str]:
        if not self._captions[index]:
            raise BadSample("no caption")
        return [self._captions[index]]


def validate(val: Squares, *, together: bool = True, **options: Any) -> tuple[SDDataModule, list[dict[str, Any]]]:
    """Validate with a tokenizer that reads small letters only; ``together``: whether other ranks measure a gap."""
    module = Recorder()
    module.latent_diffusion.tokenize = lambda captions: tokenize([caption.lower() for caption in captions])
    data, made = datamodule(val=val, **options), trainer(1)
    agree = made.strategy.reduce_boolean_decision
    made.strategy.reduce_boolean_decision = lambda decision, all=True: agree(decision, all) and together
    made.validate(module, data, verbose=False)
    return data, module.val_batches


def test_a_wrong_caption_has_other_token_ids() -> None:
    data, (batch,) = validate(Captioned("One", "ONE", "", "one", "two"), max_bad_fraction=0.5)
    assert batch["captions"] == ["One", "ONE", "one", "one", "two"]
    assert equal(batch["wrong_input_ids"], tokenize(["two", "two", "two", "two", "one"]))
    assert data.no_caption_gap is None


@pytest.mark.parametrize(
    ("captions", "empty", "together", "why"),
    [
        (("One", "ONE", "one"), 0.3, True, "all held-out captions are the same to the tokenizer"),
        (("one", "two"), 0.3, False, "all held-out captions are the same to the tokenizer"),
        (("one", "two"), 1.0, True, "the model is trained without captions (data.proportion_empty_prompts=1)"),
    ],
)
def test_a_caption_gap_that_cannot_be_measured_is_said_and_left_out(
    captions: tuple[str, ...], empty: float, together: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    images = ImageOptions(16, proportion_empty_prompts=empty)
    data, (batch,) = validate(Captioned(*captions), together=together, images=images, max_bad_fraction=0.5)
    assert "wrong_input_ids" not in batch and data.no_caption_gap == why
    data.val_dataloader()
    assert [r.getMessage() for r in caplog.records if r.name.startswith("sd_lightning")] == [
        f"data: the caption gap is not measured: {why}"
    ]


def test_a_run_tells_how_many_captions_are_cut_and_that_it_has_no_caption_gap(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "few").mkdir()
    for i in range(6):
        Image.new("RGB", (32, 32)).save(tmp_path / f"few/{i}.png")
        text = "a handwritten three" if i == 4 else f"a very long caption of one and the same black square {i}"
        (tmp_path / f"few/{i}.txt").write_text(text)
    options = "data=images data.train_data_dir=few data.num_val_samples=2 data.batch_size=2 data.resolution=32"
    options += " output_dir=run trainer.max_steps=4 trainer.val_check_interval=2 callbacks.samples=null"
    code, out = call_main(train, *options.split(), "data.num_workers=0", "trainer.check_val_every_n_epoch=null")
    assert code == 0
    why = "all held-out captions are the same to the tokenizer"
    assert f"caption gap        not measured: {why}" in out
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("data: ")] == [
        "data: 75.0 % of the captions are longer than the tokenizer reads",
        f"data: the caption gap is not measured: {why}",
    ]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["caption_gap"] is None and summary["no_caption_gap"] == why and summary["val_loss"] > 0
    assert f"caption gap not measured<br>{why}" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_validation_shares_are_equal_and_disjoint(world: int) -> None:
    shares = [validation_batches(10, 3, world, rank) for rank in range(world)]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    indices = [index for share in shares for batch in share for _, index in batch]
    assert indices == list(range(10 // world * world))


def test_fewer_validation_images_than_ranks_are_repeated() -> None:
    assert [validation_batches(2, 8, 3, rank) for rank in range(3)] == [[[(0, 0)]], [[(0, 1)]], [[(0, 0)]]]


def test_worker_processes_end_with_the_run() -> None:
    import multiprocessing

    data = datamodule(loader=LoaderOptions(2, persistent_workers=True, prefetch_factor=4))
    module = Recorder()
    trainer(4).fit(module, data)
    assert samples_of([module], 1) == fit(4)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: datamodule(source=range(9)), "got a range; expected a source; make .*data.source.Source its base"),
        (lambda: datamodule(batch_size=0), "data.batch_size=0: expected 1 or more"),
        (lambda: digits_data(val_batch_size=0), "data.val_batch_size=0"),
        (lambda: datamodule(max_bad_fraction=1.5), r"data.max_bad_fraction=1.5: expected a fraction in \[0, 1\]"),
        (lambda: datamodule(cache_latents=True), "cache_latents=true .* data.random_flip=true changes it"),
        (lambda: digits_data(center_crop=False), "cache_latents=true .* data.center_crop=false changes it"),
        (lambda: ImageOptions(100), "data.resolution=100: .* multiple of 8.* write data.resolution=96"),
        (lambda: ImageOptions(proportion_empty_prompts=2), "data.proportion_empty_prompts=2"),
        (lambda: LoaderOptions(-1), "data.num_workers=-1"),
        (lambda: LoaderOptions(0, persistent_workers=True), "persistent_workers=true has no effect .*num_workers=0"),
        (lambda: LoaderOptions(0, prefetch_factor=2), "prefetch_factor=2 has no effect"),
        (lambda: LoaderOptions(1, prefetch_factor=0), "prefetch_factor=0: expected 1 or more"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_another_module_is_refused() -> None:
    with pytest.raises(UsageError, match="got a BoringModel to train; expected an SDLightningModule"):
        from lightning.pytorch.demos.boring_classes import BoringModel

        trainer(1).fit(BoringModel(), datamodule())


@pytest.mark.slow
def test_two_real_processes_share_the_encoding_and_see_the_same_bits(tmp_path: Path) -> None:
    ranks = [each["shared"] for each in run_jobs_of_all("square_data", {"shared": {}}, tmp_path, world_size=2)]
    images = ImageOptions(16, center_crop=True, proportion_empty_prompts=0.3)
    one = fit(9, images=images, cache_latents=True, source=Squares(70, (4, 33)), max_bad_fraction=0.1)
    assert [a + b for a, b in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True)] == json.loads(json.dumps(one))
    assert (ranks[0]["shown"][-1], ranks[1]["shown"][-1]) == ([0, 1, 2], [3, 4, 5])
    for rank in ranks:
        assert "data: 12 samples cannot be used" in rank["error"] and "allows (10)" in rank["error"]
        assert rank["steps"] == 8, "stopped at the start of the second epoch"
        assert rank["bad"] == {"square-4": "torn", "square-33": "torn"}


class _Batches(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["index"].tolist())


def test_overfitting_sees_the_same_batches_in_every_epoch() -> None:
    for number in (1, 2):
        batches = _Batches()
        small_training.fit(small_training.module(), small_training.data(), 4, batches, overfit_batches=number)
        assert batches.seen == [list(range(8 * i, 8 * i + 8)) for i in range(number)] * (4 // number)
