"""The page in a real browser, Chromium: a subject is taught from upload to drawn picture, through closed windows."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from glyph import write_photos
from ranks import free_port
from sd_lightning import LatentDiffusion
from sd_lightning.storage import runs

WIDE, NARROW = (1200, 900), (420, 900)
BAD = """
const bad = [], ids = [...document.querySelectorAll("[id]")].filter(e => !e.closest("svg")).map(e => e.id);
if (new Set(ids).size !== ids.length) bad.push("an id twice: " + ids);
if (document.querySelectorAll("h1").length !== 1 || !document.documentElement.lang || !document.title) bad.push("head");
for (const e of document.querySelectorAll("input:not([type=hidden]), select"))
  if (!e.labels?.length && !e.getAttribute("aria-label")) bad.push("no label: " + e.outerHTML);
for (const e of document.querySelectorAll("img")) {
  if (!e.alt) bad.push("no alt: " + e.outerHTML);
  if (e.complete && !e.naturalWidth) bad.push("a broken picture: " + e.src);
}
for (const e of document.querySelectorAll("button, a"))
  if (!(e.textContent.trim() || e.getAttribute("aria-label"))) bad.push("no name: " + e.outerHTML);
for (const e of document.querySelectorAll("[aria-describedby]"))
  if (!document.getElementById(e.getAttribute("aria-describedby"))) bad.push("described by nothing: " + e.outerHTML);
if (document.documentElement.scrollWidth > innerWidth) bad.push("wider than the window: " + innerWidth);
return bad;
"""
"""What a keyboard, a screen reader or a phone would stumble over."""


class Visitor:
    """A window, and what a visitor does in it."""

    def __init__(self, base: str) -> None:
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"):
            options.add_argument(argument)
        found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
        options.binary_location = next(filter(None, found), "")
        driver = shutil.which("chromedriver")
        self.base, self.driver = base, webdriver.Chrome(options, webdriver.ChromeService(driver) if driver else None)
        self.resize(WIDE)

    def resize(self, size: tuple[int, int]) -> None:
        shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def wait(self, condition: Callable[[], Any], seconds: float = 90) -> Any:
        def met(_: Any) -> Any:
            try:
                return condition()
            except Exception:  # replaced while it was read
                return None

        try:
            return WebDriverWait(self.driver, seconds, poll_frequency=0.2).until(met)
        except Exception:
            raise AssertionError(self.find("body").text) from None

    def text(self) -> str:
        return self.find("main").text

    def fill(self, key: str, value: str) -> None:
        field = self.find(f'[name="{key}"]')
        if not field.is_displayed():
            self.find("summary").click()
        if field.tag_name == "select":
            Select(field).select_by_value(value)
            return
        field.clear()
        field.send_keys(value)

    def press(self, name: str) -> None:
        """Press a button by the keyboard, as those do who have no mouse."""

        def pressed() -> bool:
            button = next(each for each in self.driver.find_elements(By.TAG_NAME, "button") if each.text == name)
            button.send_keys(Keys.ENTER)
            return True

        self.wait(pressed)

    def check(self) -> None:
        """Check that all can use the page, on a wide and on a narrow window, and that nothing failed in it."""
        for size in (NARROW, WIDE):
            self.resize(size)
            assert self.driver.execute_script(BAD) == []
        assert [each for each in self.driver.get_log("browser") if each["level"] == "SEVERE"] == []  # type: ignore[attr-defined]

    def close(self) -> None:
        self.driver.quit()


class Server:
    """The page's server, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "sd_lightning.ui", f"port={free_port()}"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[1].rstrip("/")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run to start from, whose model is not trained, and photos of a subject."""
    base = tmp_path / "runs/base"
    base.mkdir(parents=True)
    runs.mark(base)
    LatentDiffusion.build("tiny").save_pretrained(base / "pipeline")
    write_photos(tmp_path / "photos", 3)
    (tmp_path / "photos/notes.png").write_text("no picture")
    yield tmp_path
    for file in (tmp_path / "runs/.ui/jobs").glob("*.json"):
        job = json.loads(file.read_text())
        if job["state"] == "running":
            os.kill(job["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_subject_is_taught_from_upload_to_drawn_picture(folder: Path) -> None:
    server = Server(folder)
    visitor = Visitor(server.url)
    try:
        visitor.open("/new")
        visitor.find("#files").send_keys("\n".join(map(str, sorted((folder / "photos").iterdir()))))
        visitor.wait(lambda: visitor.count(".photos img") == 3)
        assert "notes.png is not used: it is no picture" in visitor.text()
        visitor.find("#photos input[name=caption]").send_keys("<b>a glyph</b>", Keys.ENTER)
        visitor.wait(lambda: "<b>a glyph</b>" in (visitor.find(".photos img").get_attribute("alt") or ""))
        assert visitor.find("#init_from").get_attribute("value") == "base"
        visitor.check()

        for key, value in {
            "output_dir": "glyph",
            "learning_rate": "-1",
            "max_train_steps": "500",
            "data.batch_size": "2",
            "with_prior_preservation": "false",
            "callbacks.samples.every_n_steps": "250",
        }.items():
            visitor.fill(key, value)
        visitor.press("Check and predict")
        visitor.wait(lambda: "learning_rate=-1" in visitor.find("#learning_rate-told").text)
        assert visitor.driver.switch_to.active_element.get_attribute("id") == "learning_rate"
        visitor.fill("learning_rate", "0.001")
        visitor.press("Start")

        visitor.wait(lambda: visitor.driver.current_url.endswith("/runs/glyph"))
        visitor.wait(lambda: "running, step" in visitor.text())
        server.kill()
        assert not (folder / "runs/glyph/summary.json").exists(), "in the middle of the run"
        visitor.wait(lambda: "The server does not answer" in visitor.find("#problem").text)
        visitor.close()
        server = Server(folder)
        visitor = Visitor(server.url)
        visitor.open("/")
        visitor.driver.find_element(By.CSS_SELECTOR, "h2 a[href='/runs/glyph']").click()
        visitor.wait(lambda: "finished, step 500 of 500" in visitor.text(), 300)
        slider = visitor.find("#slider")
        slider.send_keys(Keys.HOME)
        assert visitor.find("figure img").get_attribute("alt") == "Samples after 250 steps"
        visitor.wait(lambda: visitor.count(".charts svg"))
        visitor.check()

        visitor.driver.find_element(By.LINK_TEXT, "Draw with it").click()
        visitor.fill("prompts", "a handwritten sks digit")
        visitor.fill("num_inference_steps", "2")
        visitor.press("Draw")
        visitor.wait(lambda: visitor.count(".sides img") == 2)
        assert "num_inference_steps: 2" in visitor.text()
        assert visitor.find("#prompts").get_attribute("value") == "a handwritten sks digit"
        visitor.check()
        visitor.open("/")
        visitor.find("body").send_keys(Keys.TAB)
        assert visitor.driver.switch_to.active_element.text == "Skip to the content"
        for page in ("/", "/plan", "/stores"):
            visitor.open(page)
            visitor.check()
    finally:
        visitor.close()
        server.kill()
