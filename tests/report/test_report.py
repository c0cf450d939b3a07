"""The report of a run: image grids, metrics out of CSV files, the page, and what loggers are given."""

import base64
import inspect
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image

import small_training as small
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import SampleGrid
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.report import image_grid, read_metrics, write_report
from sd_lightning.report.drawing import tick_labels
from sd_lightning.report.metrics import smooth, wants_log_axis
from sd_lightning.report.page import wilson_interval


def noise(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_grid_holds_every_image_unchanged_row_by_row() -> None:
    images = [noise(i, 80, 64) for i in range(5)]
    sheet = image_grid(images, 3)
    assert sheet.size == (3 * 84 + 4, 2 * 68 + 4)
    for i, image in enumerate(images):
        left, top = 4 + (i % 3) * 84, 4 + (i // 3) * 68
        assert np.array_equal(sheet.crop((left, top, left + 80, top + 64)), image)


def test_grid_enlarges_small_images_by_a_whole_factor_without_new_values() -> None:
    image = noise(0, 32, 32)
    sheet = image_grid([image], 1)
    tile = np.asarray(sheet)[4:68, 4:68]
    assert np.array_equal(tile[::2, ::2], image) and np.array_equal(tile[1::2, 1::2], image)


def test_grid_centres_images_of_other_sizes_and_modes() -> None:
    sheet = np.asarray(image_grid([noise(0, 100, 100), Image.new("L", (50, 20), 7)], 2))
    tile = sheet[4:104, 108:208]
    assert (tile[40:60, 25:75] == 7).all() and (tile[:40] == 255).all() and (tile[60:] == 255).all()


def test_captions_stand_under_their_image_and_long_ones_are_cut_to_it() -> None:
    black = Image.new("RGB", (128, 128))
    captions = ["a", "word " * 40, "x" * 200, ""]
    sheet = np.asarray(image_grid([black] * 4, 2, captions).convert("L"))
    bare = image_grid([black] * 4, 2)
    strip = (sheet.shape[0] - bare.height) // 2
    assert strip > 10
    for i, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        top, left = 4 + row * (132 + strip) + 128, 4 + column * 132
        assert (sheet[top : top + strip, left : left + 128] < 128).any() == bool(captions[i].strip())
    assert (sheet[:, 132:136] == 255).all(), "no caption reaches into the gap between two columns"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "image_grid got no images; expected at least one."),
        (([noise(0, 8, 8)], 0), "image_grid got columns=0; expected a whole number of at least 1."),
        (([noise(0, 8, 8)], 1, ["a", "b"]), "image_grid got 2 captions for 1 images; pass one for each image."),
    ],
)
def test_grid_refuses_what_it_cannot_lay_out(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        image_grid(*arguments)


def test_metrics_come_back_as_lightnings_csv_logger_wrote_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version=0, flush_logs_every_n_steps=1)
    logger.log_metrics({"train/loss": 0.5, "epoch": 0}, step=9)
    logger.save()
    logger.log_metrics({"val/loss": math.nan}, step=9)
    logger.log_metrics({"train/loss": 0.1 + 0.2, "epoch": 0}, step=19)
    logger.save()
    metrics = read_metrics(Path(logger.log_dir, "metrics.csv"))
    assert metrics["train/loss"] == [(9, 0.5), (19, 0.1 + 0.2)]
    assert [step for step, _ in metrics["val/loss"]] == [9] and math.isnan(metrics["val/loss"][0][1])
    assert set(metrics) == {"train/loss", "val/loss"}


def write_csv(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_metrics_of_a_resumed_run_are_joined_and_the_later_value_of_a_step_counts(tmp_path: Path) -> None:
    write_csv(tmp_path / "version_2" / "metrics.csv", "step,loss\n0,1.0\n10,0.9\n20,0.8\n")
    write_csv(tmp_path / "version_10" / "metrics.csv", "loss,step\n0.7,20\n0.6,30\n")
    assert read_metrics(tmp_path)["loss"] == [(0, 1.0), (10, 0.9), (20, 0.7), (30, 0.6)]


def test_metrics_survive_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    write_csv(tmp_path / "metrics.csv", "loss,lr,step\n0.5,0.1,1\n0.4,0.")
    assert read_metrics(tmp_path / "metrics.csv") == {"loss": [(1, 0.5)], "lr": [(1, 0.1)]}


def test_metrics_say_what_is_wrong_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"read_metrics got .*gone, which does not exist; expected a metrics.csv"):
        read_metrics(tmp_path / "gone")
    write_csv(tmp_path / "metrics.csv", "loss\n1\n")
    with pytest.raises(UsageError, match="no 'step' column in .*metrics.csv"):
        read_metrics(tmp_path)


def test_smoothing_keeps_a_straight_line_and_takes_out_noise() -> None:
    line = [(step, 3.0 - 0.01 * step) for step in range(0, 400, 2)]
    smoothed = smooth(line, width=4)
    assert [step for step, _ in smoothed] == [step for step, _ in line]
    assert np.allclose([v for _, v in smoothed[12:-12]], [v for _, v in line[12:-12]], atol=1e-12)
    rough = [(i, v) for i, v in enumerate(np.random.default_rng(0).normal(size=400))]
    assert np.std([v for _, v in smooth(rough, width=8)]) < 0.3


def test_log_axis_needs_positive_values_over_more_than_a_decade() -> None:
    assert wants_log_axis([1.0, 0.5, 0.05])
    assert not wants_log_axis([1.0, 0.5, 0.2])
    assert not wants_log_axis([1.0, 0.0, 0.01])
    assert not wants_log_axis([1.0] * 99 + [1e-6]), "one outlier does not decide"


def test_wilson_interval_equals_the_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 gives .2553 to .3662.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(1.0, 400)[1] == 1.0


class Page(HTMLParser):
    """What the tests look at: texts, tags and everything that could load something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def full_metrics() -> dict[str, list[tuple[int, float]]]:
    steps = range(0, 240, 4)
    return {
        "train/loss": [(s, math.exp(-s / 60) + 0.05) for s in steps],
        "val/loss": [(s, math.exp(-s / 60) + 0.06) for s in steps[::8]],
        "val/caption_gap": [(s, s / 1000) for s in steps[::8]],
        "perf/images_per_second": [(s, 300.0 + s % 7) for s in steps],
        "lr-AdamW": [(s, 1e-3) for s in steps],
        "perf/data_wait": [(s, 0.01) for s in steps],
    }


def save_grids(run: Path, steps: list[int]) -> None:
    (run / "samples").mkdir(parents=True)
    for step in steps:
        noise(step, 96, 96).save(run / "samples" / f"step-{step:08d}.png")


def test_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    save_grids(tmp_path, [60, 120])
    path = write_report(tmp_path, {"steps": 240, "final_loss": 0.05}, full_metrics(), "seed: 0\n")
    page = Page(path)
    assert path == tmp_path / "report.html"
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 2 * 5
    assert all(load.startswith(("data:image/", "#")) for load in page.loads)
    assert not re.search(r"url\((?!#)", page.source)
    assert "Not logged" not in page.text
    assert "loss of the last step, not smoothed" in page.text and "training, smoothed" in page.text
    assert list(tmp_path.glob("*.tmp")) == []


def test_report_shows_the_last_grid_first_with_its_own_pixels(tmp_path: Path) -> None:
    save_grids(tmp_path, [60, 100, 20])
    page = Page(write_report(tmp_path, {}, {}, ""))
    pictures = [load for load in page.loads if load.startswith("data:image/png;base64,")]
    decoded = [Image.open(io.BytesIO(base64.b64decode(p.partition(",")[2]))) for p in pictures]
    for picture, step in zip(decoded, [100, 20, 60], strict=True):
        assert np.array_equal(picture, noise(step, 96, 96))
    assert "After 100 steps step 20 step 60" in page.text


def test_report_thins_out_many_grids_and_shrinks_large_ones(tmp_path: Path) -> None:
    save_grids(tmp_path, list(range(1, 41)))
    noise(0, 3000, 1500).save(tmp_path / "samples" / "step-00000041.png")
    page = Page(write_report(tmp_path, {}, {}, ""))
    assert page.tags.count("img") == 13
    assert "12 of 40 earlier grids" in page.text and "step 1 " in page.text and "step 40 " in page.text
    hero = Image.open(io.BytesIO(base64.b64decode(page.loads[0].partition(",")[2])))
    assert hero.format == "JPEG" and hero.size == (1600, 800)


def test_report_says_what_is_missing_instead_of_drawing_it_empty(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, {}, {"train/loss": [(0, 1.0), (1, 0.5)]}, ""))
    for missing in ("*caption_gap", "perf/images_per_second", "train/lr", "No sample grids", "no summary", "No config"):
        assert missing in page.text
    assert page.tags.count("svg") == 2 * 1
    assert "No metrics were logged in this run." in Page(write_report(tmp_path, {}, {}, "")).text


def test_report_counts_values_that_cannot_be_drawn(tmp_path: Path) -> None:
    metrics = {
        "train/loss": [(0, 1.0), (1, math.nan), (2, math.inf), (3, 0.5)],
        "val/caption_gap": [(0, math.nan)],
    }
    page = Page(write_report(tmp_path, {"final_loss": math.nan}, metrics, ""))
    assert "2 NaN or infinite values are not drawn." in page.text
    assert "All 1 logged values are NaN or infinite: there is nothing to draw." in page.text
    assert page.tags.count("svg") == 2 * 1


def test_report_survives_a_picture_cut_by_a_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_grids(tmp_path, [10, 20])
    cut = tmp_path / "samples" / "step-00000010.png"
    cut.write_bytes(cut.read_bytes()[:500])
    assert "step-00000010.png cannot be read." in Page(write_report(tmp_path, {}, {}, "")).text
    assert "step-00000010.png" in caplog.text


def test_what_has_a_single_point_is_no_chart_and_not_missing_either(tmp_path: Path) -> None:
    metrics = {**full_metrics(), "val/prompted_accuracy": [(239, 0.9)], "val/caption_gap": [(239, 0.2)]}
    page = Page(write_report(tmp_path, {"prompted_accuracy": 0.9}, metrics, ""))
    assert page.tags.count("svg") == 2 * 4 and "Not logged" not in page.text
    assert "Prompted accuracy" not in page.text and "90.0 % prompted accuracy" in page.text


def test_charts_count_steps_as_the_pictures_do(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, {}, {"train/loss": [(0, 1.0), (1, 0.5)]}, ""))
    assert re.findall(r">(\d+)</text>", page.source) == 2 * ["1", "2"], "in the drawings for screens and phones"


@pytest.mark.parametrize(
    ("values", "percent", "texts"),
    [
        ([0, 0.0005, 0.001, 0.0015, 0.002], False, ["0.0000", "0.0005", "0.0010", "0.0015", "0.0020"]),
        ([0, 500, 1000], False, ["0", "500", "1,000"]),
        ([0, 2.5e-6, 5e-6], False, ["0.0", "2.5e-6", "5.0e-6"]),
        ([0, 0.025, 0.05], True, ["0.0 %", "2.5 %", "5.0 %"]),
        ([0, 8e-5, 1.6e-4], False, ["0.0", "0.8e-4", "1.6e-4"]),
        ([0], False, ["0"]),
        ([], False, []),
    ],
)
def test_an_axis_has_one_number_format(values: list[float], percent: bool, texts: list[str]) -> None:
    assert tick_labels(values, percent=percent) == texts


def test_report_escapes_every_text(tmp_path: Path) -> None:
    run = tmp_path / "<b>&run"
    run.mkdir()
    evil = "</pre><script>alert(1)</script> $title"
    metrics = {"lr-<i>a": [(0, 1.0), (1, 1.0)], "lr-<i>b": [(0, 2.0)]}
    page = Page(write_report(run, {evil: evil, "list": [evil]}, metrics, evil))
    assert not {"script", "b>&run", "i"} & set(page.tags)
    assert page.text.count(evil) == 4
    assert "<b>&run" in page.text and "lr-<i>a" in page.text


def test_report_leads_with_the_key_numbers(tmp_path: Path) -> None:
    summary = {
        "steps": 2400,
        "train_seconds": 3725.0,
        "prompted_accuracy": 0.965,
        "prompted_accuracy_samples": 400,
        "images_per_second": 311.4,
        "bad_samples": {"a.png": "truncated", "b.png": "empty caption"},
        "caption_gap": None,
    }
    text = Page(write_report(tmp_path, summary, {}, "")).text
    assert "2,400 optimizer steps · 1 h 2 min of training" in text
    assert "2 samples of the data were unusable and skipped." in text
    low, high = wilson_interval(0.965, 400)
    assert f"96.5 % prompted accuracy {100 * low:.1f}–{100 * high:.1f} %, n = 400" in text
    assert "311 images per second" in text
    assert "caption_gap —" in text and '"a.png": "truncated"' in text


def test_charts_take_their_colours_from_the_page_and_share_no_definitions(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, {}, full_metrics(), ""))
    charts = re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL)
    assert [re.findall('class="(.*?)"', chart)[0] for chart in charts] == 5 * ["at-wide", "at-narrow"]
    defined: set[str] = set()
    for chart in charts:
        assert not re.search(r"#[0-9a-f]{6}\b", chart), "a fixed colour is unreadable on one of the two grounds"
        assert "var(--line-1)" in chart and "optimizer step</text>" in chart
        used = set(re.findall(r"(?:url\(|href=\")#(\w+)", chart))
        assert used <= set(re.findall(r'id="(\w+)"', chart))
        assert not used & defined, "a browser would take the definition of another chart"
        defined |= used


def test_loss_is_drawn_on_a_log_axis_where_it_spans_more_than_a_decade(tmp_path: Path) -> None:
    wide = [(s, math.exp(-s / 20)) for s in range(100)]
    narrow = [(s, 1 - s / 200) for s in range(100)]
    assert ">0.05</text>" in write_report(tmp_path, {}, {"train/loss": wide}, "").read_text(encoding="utf-8")
    assert ">0.05</text>" not in write_report(tmp_path, {}, {"train/loss": narrow}, "").read_text(encoding="utf-8")


def test_report_is_the_same_text_when_written_again(tmp_path: Path) -> None:
    first = write_report(tmp_path, {"steps": 1}, full_metrics(), "a: 1").read_bytes()
    assert write_report(tmp_path, {"steps": 1}, full_metrics(), "a: 1").read_bytes() == first


class LikeWandb(DummyLogger):
    """Has the image method of W&B's logger, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(WandbLogger.log_image).bind(self, *args, **kwargs)
        self.given.append(bound.arguments)


def test_sample_grids_reach_every_logger_that_takes_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, csv, wandb = TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv"), LikeWandb()
    prompts, options = ["a handwritten one", "a handwritten two"], SamplingOptions(num_inference_steps=1)
    samples = SampleGrid(tmp_path, prompts=prompts, every_n_steps=2, columns=2, options=options)
    small.fit(small.module(), small.data(), 3, samples, logger=[board, csv, wandb])
    drawn = {step: Image.open(tmp_path / f"samples/step-{step:08d}.png") for step in (2, 3)}

    events = EventAccumulator(board.log_dir).Reload()
    assert events.Tags()["images"] == ["samples"]
    for event, (step, grid) in zip(events.Images("samples"), drawn.items(), strict=True):
        assert event.step == step and (event.width, event.height) == grid.size
        read = Image.open(io.BytesIO(event.encoded_image_string))
        assert read.format == "PNG" and np.array_equal(read, grid)

    for given, (step, grid) in zip(wandb.given, drawn.items(), strict=True):
        (image,) = given["images"]
        assert (given["key"], given["step"]) == ("samples", step) and np.array_equal(image, grid)
