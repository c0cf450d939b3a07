"""What the page answers: to whom, with what, and what it makes of bad input."""

import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import Image

import small_store
from made_runs import config, make_run
from sd_lightning import UsageError
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.storage.object_store import open_location
from sd_lightning.ui import fields, pages, photos, server
from sd_lightning.ui.jobs import Queue
from sd_lightning.ui.pages import Site

HOME = "http://127.0.0.1:8765"
DRAFT = "/new/0123abcd"
SUBJECT = {"output_dir": "rex", "instance_prompt": "a photo of sks dog", "experiment": "dreambooth_tiny", "card": "cpu"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A page of a folder with one finished run; jobs are kept, and not run."""
    monkeypatch.setattr(Queue, "start", lambda self, card: None)
    summary = {"final_loss": 0.5}
    made = make_run(tmp_path / "runs/made", config=config(model={"pretrained": "some/base"}), summary=summary)
    (made / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(made / "samples/step-00000040.png")
    (made / "report.html").write_text("<script>alert(1)</script>")
    return Site(tmp_path / "runs")


def client(site: Site, *, host: str | None = "127.0.0.1", token: str | None = None, **headers: str) -> TestClient:
    app = server.guarded(site.app(), host, token)
    return TestClient(app, base_url=HOME, headers={"Origin": HOME, **headers}, follow_redirects=False)


def png(size: tuple[int, int] = (8, 8), kind: str = "PNG", mode: str = "RGB", **more: Any) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **more)
    return stream.getvalue()


def upload(visitor: TestClient, *files: tuple[str, bytes]) -> str:
    return visitor.post(f"{DRAFT}/photos", files=[("files", file) for file in files]).text


def test_only_this_pages_own_requests_are_answered(site: Site) -> None:
    visitor = client(site)
    assert visitor.get("/").status_code == 200
    assert visitor.get("/", headers={"Host": "evil.example:8765"}).status_code == 403
    assert visitor.get("/runs/made", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    for origin in ("http://evil.example", "null", ""):
        assert visitor.post("/jobs/1/stop", headers={"Origin": origin}).status_code == 403
    linked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for path, code in {"/runs/made": 200, "/try": 200, "/plan": 403, "/compare": 403, "/runs/made/kohya": 403}.items():
        assert visitor.get(path, headers=linked).status_code == code, path
    assert visitor.post("/jobs/1/stop").status_code == 200
    headers = visitor.get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"


def test_a_token_lets_in_from_elsewhere(site: Site) -> None:
    visitor = client(site, host=None, token="secret", Host="other:8765", Origin="http://other:8765")
    assert visitor.get("/").status_code == 403
    assert visitor.get("/?token=wrong").status_code == 403
    answer = visitor.get("/?token=secret")
    assert answer.status_code == 307 and "token" not in answer.headers["location"]
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=lax" in answer.headers["set-cookie"]
    assert client(site, host=None, token="secret", Cookie=f"{server.COOKIE}=secret").get("/").status_code == 200


def test_nothing_outside_of_the_folders_is_shown(site: Site, tmp_path: Path) -> None:
    visitor = client(site)
    Image.new("RGB", (8, 8)).save(tmp_path / "own.png")
    (site.root / "made/samples/step-00000050.png").symlink_to(tmp_path / "own.png")
    (site.root / "linked").symlink_to(make_run(tmp_path / "elsewhere", config=None, summary={}))
    assert visitor.get("/image/made/samples/step-00000040.png").headers["content-type"] == "image/png"
    for path in (
        "made/samples/step-00000050.png",
        "../own.png",
        "%2e%2e/own.png",
        "made/config.yaml",
        "made/report.html",
    ):
        assert visitor.get(f"/image/{path}").status_code == 404, path
    for path in (
        "/runs/linked",
        "/runs/%2e%2e/report",
        "/runs/made/secret",
        "/new/..%2f..",
        "/part/app/x",
    ):
        assert visitor.get(path).status_code in (404, 405), path
    assert "linked" not in visitor.get("/").text
    make_run(site.root / 'a "b" #1', config=None, summary={})
    assert visitor.get("/runs/a%20%22b%22%20%231").status_code == 200
    assert 'href="/runs/a%20%22b%22%20%231"' in visitor.get("/").text
    for path in ("/image/%00.png", f"/image/{'a' * 300}.png", "/try?run=../elsewhere", "/try?run=%00", "/runs/%00"):
        assert visitor.get(path).status_code in (200, 404), path
    (site.root / "made/stolen").symlink_to(tmp_path)
    make_run(site.root / "links", config=None, summary=None)
    (tmp_path / "secret.html").write_text("secret")
    (site.root / "links/report.html").symlink_to(tmp_path / "secret.html")
    assert visitor.get("/runs/links/report").status_code == 404
    report = visitor.get("/runs/made/report")
    assert report.headers["content-security-policy"].startswith("sandbox; default-src 'none'")


def test_photos_are_checked_and_written_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "MAX_PIXELS", 1000)
    visitor = client(site)
    exif = Image.Exif()
    exif[0x010E] = "where it was taken"
    text = upload(
        visitor,
        ("../../a.png", png()),
        ("b.jpg", png(kind="JPEG", exif=exif)),
        ("c.svg", b"<svg onload='alert(1)'/>"),
        ("<i>.png", b"<html>"),
        ("large.png", png((50, 50))),
    )
    folder = site.own / "photos/0123abcd"
    assert sorted(path.name for path in folder.iterdir()) == ["photo-0001.png", "photo-0002.jpg"]
    assert not Image.open(folder / "photo-0002.jpg").getexif()
    assert "c.svg is not used: it is no picture" in text and "&lt;i&gt;.png is not used" in text
    assert "large.png is not used: more than" in text
    monkeypatch.setattr(photos, "MAX_PHOTOS", 2)
    assert "the most" in upload(visitor, ("d.png", png()))
    text = visitor.post(f"{DRAFT}/photos/photo-0001.png", data={"caption": '"><script>x</script>'}).text
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert (folder / "photo-0001.txt").read_text() == '"><script>x</script>'
    visitor.post(f"{DRAFT}/photos/photo-0001.png", data={"remove": "1"})
    assert sorted(path.name for path in folder.iterdir()) == ["photo-0002.jpg"]
    assert visitor.post(f"{DRAFT}/photos/..%2fform.json", data={"remove": "1"}).status_code == 404


def test_a_request_that_is_too_large_is_refused_before_it_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 100)
    assert "too large" in upload(client(site), ("a.png", png((100, 100))))
    assert "too large" in client(site).post(f"{DRAFT}/check", content=iter([b"a=1"])).text, "a body of unknown length"


def test_a_small_file_of_too_many_pixels_is_refused(site: Site) -> None:
    file = png((9000, 8000), mode="1")
    assert len(file) < 50_000 and "more than 64 million pixels" in upload(client(site), ("bomb.png", file))


def test_photos_that_are_sent_at_once_are_all_kept(tmp_path: Path) -> None:
    def send(_: int) -> list[str]:
        return photos.add_photos(tmp_path, [("a.png", io.BytesIO(png()))] * 5)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(send, range(4))] == [[]] * 4
    assert len(photos.photos(tmp_path)) == 20


def program_says(monkeypatch: pytest.MonkeyPatch, error: str = "", out: str = "{}") -> list[list[str]]:
    """Let the programs print something instead of running; return what they are called with."""
    called: list[list[str]] = []

    def program(name: str, settings: list[str], card: str = "cpu") -> tuple[str, str]:
        called.append([name, *settings])
        if not error and settings[-1].startswith("output="):
            Path(settings[-1].split('"')[1]).write_text(out)
        return out, error

    monkeypatch.setattr(pages, "program", program)
    return called


def test_a_subject_becomes_a_command_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"device_gb": 5.5, "host_gb": 8.0, "seconds": 90, "dollars": 0.25, "notes": []}
    called = program_says(monkeypatch, out=f"INFO: something\n{json.dumps(told)}\n")
    visitor = client(site)
    values = {**SUBJECT, "init_from": "made", "max_train_steps": "7", "class_prompt": 'a "dog"'}
    shown = visitor.post(f"{DRAFT}/check", data=values).text
    assert "5.50 GB" in shown and "1:30" in shown and "$0.25" in shown
    assert called[0] == [
        "ui.check",
        f'instance_data_dir="{site.own}/photos/0123abcd"',
        f'output_dir="{site.root}/rex"',
        'instance_prompt="a photo of sks dog"',
        f'init_from="{site.root}/made"',
        "experiment=dreambooth_tiny",
        "max_train_steps=7",
        'class_prompt="a \\"dog\\""',
    ]
    assert 'value="7"' in visitor.get(DRAFT).text, "the form was not kept"
    started = visitor.post(f"{DRAFT}/start", data={**values, "init_from": "some/model"})
    assert started.headers["hx-redirect"] == "/runs/rex"
    (job,) = site.queue.jobs()
    assert job.program == "dreambooth" and 'model.pretrained="some/model"' in job.settings
    assert "waits for card cpu" in visitor.get("/runs/rex").text
    assert "a job writes there already" in visitor.post(f"{DRAFT}/start", data=values).text
    (site.own / "photos/0123abcd/form.json").write_text("[")
    assert visitor.get(DRAFT).status_code == 200


@pytest.mark.parametrize("text", ["犬の写真", "null", "true", "1e5", "1_000", "a, 'b' \"c\" [d]: {e}=$f", "dog"])
def test_a_text_stays_a_text(text: str) -> None:
    prompts, prompt = (fields.setting(key, text) for key in ("prompts", "instance_prompt"))
    assert OverridesParser.create().parse_override(prompts).value() == [text]
    assert OverridesParser.create().parse_override(prompt).value() == text


@pytest.mark.parametrize(
    ("values", "key", "text"),
    [
        ({"output_dir": "../x"}, "output_dir", "expected letters, digits"),
        ({"output_dir": "made", "init_from": "made"}, "output_dir", "is a run already"),
        ({"card": "7"}, "card", "expected one of cpu"),
        ({"init_from": "/etc"}, "init_from", "nor there in the folders of this page"),
        ({"init_lora": "../other.safetensors"}, "init_lora", "nor there in the folders of this page"),
        ({"instance_prompt": "${oc.env:HOME}"}, "instance_prompt", "expected plain text"),
    ],
)
def test_a_wrong_value_is_told_beside_its_field(site: Site, values: dict[str, str], key: str, text: str) -> None:
    shown = client(site).post(f"{DRAFT}/start", data={**SUBJECT, **values}).text
    assert text in shown.split(f'id="{key}-told"')[1].split("</p>")[0]
    assert not site.queue.jobs()


def test_messages_of_programs_find_their_fields(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "dreambooth got max_train_steps=0; expected at least 1": "max_train_steps",
        "data.resolution=x: expected a whole number": "resolution",
        "got init_lora=a.safetensors, adapters of another family; give model.pretrained=<b>": "init_lora",
        "model.pretrained=user/name exists on the hub": "init_from",
        "push_to_hub=user/name: it is there already": "push_to_hub",
        "output_dir=runs/rex holds what no run of sd_lightning wrote": "output_dir",
        "dreambooth got instance_data_dir=x with no photos in it: from one the model learns the photo": None,
    }
    for message, key in said.items():
        assert fields.named(message, [each.key for each in fields.SUBJECT]) == key, message
    program_says(monkeypatch, "the optimizer cannot step")
    assert '<p class="warn" role="alert">the optimizer' in client(site).post(f"{DRAFT}/check", data=SUBJECT).text


def test_a_run_is_shown_stopped_and_resumed(site: Site) -> None:
    visitor = client(site)
    page = visitor.get("/runs/made").text
    assert ">finished</span>, step 40" in page and "<svg" in page and "step-00000040.png" in page
    folder = make_run(site.root / "rex", config=config(), summary=None)
    job = site.queue.add("dreambooth", ["a=1"], "cpu", folder)
    part = visitor.get("/part/state/rex")
    assert "waits for card cpu" in part.text
    tag = part.text.split('data-tag="')[1].split('"')[0]
    assert visitor.get(f"/part/state/rex?v={tag}").status_code == 204, "it has not changed"
    visitor.post(f"/jobs/{job.id}/stop")
    assert "cancelled" in visitor.get(f"/part/state/rex?v={tag}").text
    visitor.post("/runs/rex/resume")
    assert site.queue.jobs()[-1].settings == ["a=1", "resume=auto"]
    assert ">Cancel</button>" in visitor.get("/runs/rex").text
    twice = visitor.post("/runs/rex/resume")
    assert twice.status_code == 409 and "a job writes there already" in twice.text


def test_a_run_that_a_shell_started_is_followed(site: Site) -> None:
    folder = make_run(site.root / "rex", config=config(), summary=None)
    (metrics,) = (folder / "logs").rglob("metrics.csv")
    assert "running" in (part := client(site).get("/part/state/rex").text) and "every 2s" in part
    os.utime(metrics, (0, 0))
    assert "not finished" in (part := client(site).get("/part/state/rex").text) and "every 2s" not in part


@pytest.mark.parametrize(
    "text", ["[1]", "7", "{trainer: null, model: 3, sampling: 4}", "{trainer: {max_steps: many}}", "{"]
)
def test_a_run_with_settings_of_others_is_shown(site: Site, text: str) -> None:
    for name in ("config.yaml", "summary.json"):
        (site.root / "made" / name).write_text(text)
    visitor = client(site)
    assert [visitor.get(path).status_code for path in ("/", "/runs/made", "/try?run=made")] == [200, 200, 200]


@pytest.mark.parametrize(
    "values", [{"card": ""}, {"init_from": "a" * 5000}, {"init_lora": "a\0b"}, {"learning_rate": "\0"}]
)
def test_odd_values_are_answered(site: Site, monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    program_says(monkeypatch)
    assert client(site).post(f"{DRAFT}/check", data={**SUBJECT, **values}).status_code == 200


def test_a_job_that_failed_says_why(site: Site) -> None:
    job = site.queue.add("dreambooth", [], "cpu", site.root / "rex")
    record = site.queue.folder / f"{job.id}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "state": "ended", "code": 2}))
    site.queue.log(job).write_text("INFO: a line\nerror: resolution=3: expected <64>\n")
    assert "failed: resolution=3: expected &lt;64&gt;" in client(site).get("/runs/rex").text


def test_results_are_downloaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = client(site)
    assert visitor.get("/runs/made/kohya").status_code == 404
    (site.root / "made/pipeline").mkdir()
    (site.root / "made/pipeline/pytorch_lora_weights.safetensors").write_bytes(b"lora")
    assert visitor.get("/runs/made/diffusers").content == b"lora"
    assert b"pipeline/pytorch_lora_weights.safetensors" in visitor.get("/runs/made/pipeline").content
    program_says(monkeypatch, "export got run=<x>")
    assert "export got run=&lt;x&gt;" in visitor.get("/runs/made/kohya").text
    lora = site.root / "made/pipeline/pytorch_lora_weights.safetensors"
    exported = site.own / f"exported/made-{lora.stat().st_mtime_ns}-kohya"
    exported.mkdir(parents=True)
    assert "export got run=&lt;x&gt;" in visitor.get("/runs/made/kohya").text, "an export that was killed"
    exported.mkdir(parents=True)
    (exported / "lora.safetensors").write_bytes(b"kohya")
    assert visitor.get("/runs/made/kohya").content == b"kohya"
    os.utime(lora, ns=(0, 0))
    assert "export got run=&lt;x&gt;" in visitor.get("/runs/made/kohya").text, "it is of earlier weights"


def test_runs_are_compared(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(site.root / "rex", config=config(batch_size=32), summary={})
    answer = client(site).get("/compare?run=made&run=rex&run=..")
    assert answer.status_code == 200 and "comparison of runs" in answer.text
    assert answer.headers["content-security-policy"].startswith("sandbox")
    program_says(monkeypatch, "compare needs <two> runs")
    assert "compare needs &lt;two&gt; runs" in client(site).get("/compare?run=made").text


def test_pictures_are_drawn_with_a_run_and_with_what_it_started_from(site: Site) -> None:
    visitor = client(site)
    given = {
        "run": "made",
        "prompts": "a dog, or two",
        "seed": "3",
        "quantization": "int8",
        "lora_weight": "0.5",
        "before": "1",
    }
    assert visitor.post("/try", data=given).headers["hx-redirect"].startswith("/try?run=made&prompts=a+dog")
    before, after = site.queue.jobs()
    shared, int8 = ['prompts=["a dog, or two"]', "seed=3"], "quantization=int8"
    assert before.settings == ['model.pretrained="some/base"', *shared, int8, f'output_dir="{before.folder}"']
    own = [f'run="{site.root}/made"', *shared, "lora_weight=0.5", int8, f'output_dir="{after.folder}"']
    assert after.settings == own
    assert visitor.get("/try").text.count("waits for card cpu") == 2
    assert "is empty" in visitor.post("/try", data={}).text.split('id="run-told"')[1].split("</p>")[0]
    assert "is empty" in visitor.post("/try", data={"run": "made"}).text.split('id="prompts-told"')[1].split("</p>")[0]
    assert len(site.queue.jobs()) == 2
    refused = visitor.post("/try", data={**given, "lora": "/etc/passwd"}).text
    assert "nor there in the folders" in refused.split('id="lora-told"')[1].split("</p>")[0]


def test_captions_are_a_job_with_the_users_model(site: Site, tmp_path: Path) -> None:
    visitor = client(site)
    upload(visitor, ("a.png", png()))
    for wrong in ("", "/etc", "../elsewhere"):
        assert "caption_model=" in visitor.post(f"{DRAFT}/captions", data={"caption_model": wrong}).text
    assert (
        "Captions are being written"
        in visitor.post(f"{DRAFT}/captions", data={"caption_model": str(site.root / "made")}).text
    )
    (job,) = site.queue.jobs()
    site.queue._write(replace(job, state="ended", code=1, note="no model"))
    assert "failed: no model" in visitor.get(DRAFT).text
    (site.own / "photos/0123abcd/photo-0001.txt").write_bytes("é".encode("latin-1"))
    assert "no model" not in visitor.get(DRAFT).text, "there is nothing left to caption"
    assert (job.program, job.settings) == ("ui.photos", [str(site.own / "photos/0123abcd"), str(site.root / "made")])


def test_stores_and_their_state(site: Site, tmp_path: Path) -> None:
    assert "There are none" in client(site).get("/stores").text
    small_store.update(site.root / "store", ImageFolder(small_store.write_pictures(tmp_path / "pictures", 6)))
    small_store.LatentStore(open_location(site.root / "begun", key="store"), small_store.recipe()).create()
    (site.root / "broken/recipes").mkdir(parents=True)
    (site.root / "broken/recipes/r.json").write_text("{}")
    shown = client(site).get("/stores").text
    assert "6 samples to train on, 0 held out" in shown and "data.resolution=8" in shown
    (site.root / "linked").symlink_to(site.root.parent / "secret")
    (site.root.parent / "secret/recipes").mkdir(parents=True)
    assert "linked" not in client(site).get("/stores").text
    assert "not complete: run the same precompute again" in shown and "is no recipe of a latent store" in shown


def test_the_planner_is_a_page(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    program_says(monkeypatch, out="<svg>")
    answer = client(site).get("/plan?model=sd15&gpu=rtx-3060")
    assert answer.text == "<svg>" and answer.headers["content-security-policy"].startswith("sandbox")
    assert not [*site.own.glob("*.html")], "it was sent, and is deleted"
    called = program_says(monkeypatch, "plan got gpus=<2>; expected others")
    shown = client(site).get("/plan?model=sdxl&gpu=rtx-3060&gpus=2&images=").text
    assert called[0][:-1] == ["plan", "model=sdxl", "gpu=rtx-3060", "gpus=2"]
    assert "plan got gpus=&lt;2&gt;" in shown.split('id="gpus-told"')[1].split("</p>")[0]
    assert "expected plain text" in client(site).get("/plan?model=sdxl&gpu=${x}").text


def test_examples_are_drawn(site: Site) -> None:
    assert client(site).post(f"{DRAFT}/photos", data={"examples": "1"}).text.count("<img") == 5
    (first, *_) = (site.own / "photos/0123abcd").glob("*.png")
    assert np.asarray(Image.open(first)).std() > 20


def test_presets_are_for_the_card() -> None:
    found = [fields.preset_for(size) for size in (None, 4.0, 6.4, 12.9, 25.8, 85.0)]
    sizes = ["tiny", "tiny", "lora_6gb", "12gb", "24gb", "24gb"]
    assert found == [f"dreambooth_{size}" for size in sizes]


def test_what_keeps_the_server_from_starting_is_one_line(tmp_path: Path) -> None:
    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port={port}, where it cannot listen .*write port={port + 1}"):
            server.listen("127.0.0.1", port)
    cfg = OmegaConf.create({"runs": f"{tmp_path}/runs", "folders": [], "host": "127.0.0.1", "port": 0, "token": None})
    with Queue(tmp_path / "runs/.ui/jobs").locked("server"), pytest.raises(UsageError, match="another server shows"):
        server.run(cfg)
    with pytest.raises(UsageError, match=r"folders with none, which is no folder"):
        server.run(OmegaConf.merge(cfg, {"folders": ["none"]}))
