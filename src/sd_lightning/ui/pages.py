"""The pages: what each address answers."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from starlette.datastructures import FormData, UploadFile

from sd_lightning._errors import UsageError
from sd_lightning.apps.pictures import settings_of
from sd_lightning.callbacks.progress import clock_time
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.planner.devices import tables
from sd_lightning.report.document import style
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.untrusted import read_json
from sd_lightning.ui import fields, photos
from sd_lightning.ui.folders import ShownRun, children, stores
from sd_lightning.ui.jobs import Job, Queue, cards, environment
from sd_lightning.ui.server import FILE_POLICY

HERE = Path(__file__).parent
TRAINS = ("dreambooth", "train")


async def _posted(request: Request) -> FormData:
    return await request.form(max_files=photos.MAX_PHOTOS, max_fields=100)


Form = Annotated[FormData, Depends(_posted)]


def program(name: str, settings: Sequence[str], card: str = "cpu") -> tuple[str, str]:
    """Run one of our programs; return what it printed, and its error, "" if it succeeded."""
    command = [sys.executable, "-m", f"sd_lightning.{name}", *settings]
    done = subprocess.run(command, env=environment(card), capture_output=True, text=True, timeout=600)
    return done.stdout, problem_in(done.stderr) or "it failed" if done.returncode else ""


def problem_in(text: str) -> str:
    """Return the message with which a program of ours ended, or else its last line."""
    errors = re.findall(r"^error: (.+)$", text, re.MULTILINE)
    return (errors or text.strip().splitlines() or [""])[-1]


class Site:
    """What the page shows: the runs in a folder, the jobs that it has started, photos and pictures.

    Args:
        root: Folder of the runs.
        folders: Others from which may be read.
    """

    def __init__(self, root: Path, folders: Sequence[Path] = ()) -> None:
        self.root, self.own = root, root / ".ui"
        self.roots = [root, *folders]
        self.queue = Queue(self.own / "jobs")
        self.html = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        self.html.globals.update(status=self.status, duration=clock_time)

    def app(self) -> FastAPI:
        """Return the application, without its guard."""
        app = FastAPI(openapi_url=None)
        for method, places in {
            "GET": {
                "/": self.index,
                "/queue": self.queue_part,
                "/new": self.new,
                "/new/{draft}": self.subject,
                "/new/{draft}/photos": self.photos_part,
                "/new/{draft}/photo/{name}": self.photo,
                "/runs/{name}": self.run,
                "/runs/{name}/{part}": self.run_part,
                "/runs/{name}/samples/{step}": self.sample,
                "/runs/{name}/get/{kind}": self.download,
                "/compare": self.compare,
                "/try": self.draw,
                "/try/pictures": self.pictures_part,
                "/try/{draft}/{side}/{name}": self.picture,
                "/stores": self.stores,
                "/plan": self.plan,
                "/style.css": self.style,
            },
            "POST": {
                "/new/{draft}/photos": self.add_photos,
                "/new/{draft}/photo/{name}": self.change_photo,
                "/new/{draft}/captions": self.caption,
                "/new/{draft}/{action}": self.check,
                "/jobs/{job_id}/stop": self.stop,
                "/runs/{name}/resume": self.resume,
                "/try": self.start_drawing,
            },
        }.items():
            for path, answer in places.items():
                app.add_api_route(path, answer, methods=[method], response_class=HTMLResponse)
        app.mount("/static", StaticFiles(directory=HERE / "static"))
        return app

    # Parts of pages.

    def page(self, name: str, **values: Any) -> HTMLResponse:
        return HTMLResponse(self.html.get_template(f"{name}.html").render(**values))

    def part(self, name: str, *values: Any) -> Markup:
        return Markup(getattr(self.html.get_template("parts.html").module, name)(*values))

    def polled(self, url: str, body: Markup, *, seconds: float = 2, moves: bool = True) -> Markup:
        """Return a part that asks for itself again, and is answered only if it has changed."""
        tag = hashlib.sha256(f"{moves}{body}".encode()).hexdigest()[:12]
        again = f' hx-get="{url}?v={tag}" hx-trigger="every {seconds}s" hx-swap="outerHTML"' if moves else ""
        return Markup(f'<div data-tag="{tag}"{again}>{body}</div>')

    def again(self, request: Request, html: Markup) -> Response:
        known = f'data-tag="{request.query_params.get("v")}"' in html
        return Response(status_code=204) if known else HTMLResponse(html)

    def jobs_of(self, folder: Path) -> list[Job]:
        return [job for job in self.queue.jobs() if Path(job.folder) == folder]

    def status(self, job: Job) -> str:
        """Return what a job does, or how it ended."""
        if job.state == "queued":
            return f"waits for card {job.card}"
        if job.state != "ended" or job.code == 0:
            return "finished" if job.code == 0 else job.state
        known = {75: "stopped, and can be resumed", -15: "stopped before its first step"}
        log = self.queue.log(job)
        text = log.read_text("utf-8", "replace") if log.is_file() else ""
        return known.get(job.code or 0) or f"failed: {job.note or problem_in(text)}"

    # The list of runs.

    def index(self) -> HTMLResponse:
        return self.page("index", runs=[ShownRun.read(path) for path in children(self.root).values()], queue=self.queued())

    def queued(self) -> Markup:
        jobs = self.queue.jobs()
        shown = [job for job in jobs if job.state in ("queued", "running")] + jobs[::-1][:3]
        return self.polled("/queue", self.part("queue", list(dict.fromkeys(map(self._shown, shown)))))

    def _shown(self, job: Job) -> tuple[str, str, str, str, str]:
        place = Path(job.folder)
        link = f"/runs/{place.name}" if place.parent == self.root else "/try" if job.program == "generate" else ""
        name = place.name if link.startswith("/runs") else job.program.removeprefix("ui.")
        return job.id, job.state, self.status(job), link, name

    def queue_part(self, request: Request) -> Response:
        return self.again(request, self.queued())

    def stop(self, job_id: str) -> Response:
        self.queue.stop(job_id)
        return Response(headers={"HX-Refresh": "true"})

    # A new subject.

    def new(self) -> RedirectResponse:
        return RedirectResponse(f"/new/{secrets.token_hex(4)}")

    def draft(self, draft: str) -> Path:
        if not re.fullmatch("[0-9a-f]{8}", draft):
            raise HTTPException(404)
        return self.own / "photos" / draft

    def subject(self, draft: str) -> HTMLResponse:
        saved = self.draft(draft) / "form.json"
        values = read_json(saved) if saved.is_file() else {}
        return self.page("new", draft=draft, photos=self.photos_of(draft), form=self.form(draft, values))

    def options(self) -> dict[str, list[tuple[str, str]]]:
        """Return the choices of all forms."""
        shown = [run for path in children(self.root).values() if (run := ShownRun.read(path)).has_pipeline]
        tiny = [("dreambooth_tiny", "DreamBooth on the tiny model, in minutes on a CPU")]
        presets = fields.options_of("experiment", "dreambooth_[0-9l]*") + fields.options_of("experiment", "dreambooth_sdxl*")
        return {
            "init_from": [(run.name, run.name) for run in shown],
            "run": [(run.name, run.name) for run in shown],
            "experiment": tiny + [(name, f"{name}: {text}") for name, text in presets],
            "model": fields.options_of("model"),
            "gpu": [(name, device.name) for name, device in tables().items()],
            "card": [(number, card.name) for number, card in cards().items()],
        }

    def form(self, draft: str, values: Mapping[str, str], message: str = "", told: Any = None) -> Markup:
        options = self.options()
        options["model"] = [("", "as the preset says"), *options["model"]]
        first = next(iter(cards().values()))
        start = {"experiment": fields.preset_for(first.memory_gb)}
        if first.memory_gb is None:  # what a newcomer without photos and without a GPU can do
            start |= {"instance_prompt": "a handwritten sks digit", "init_from": next(iter(options["init_from"]), ("",))[0]}
        shown, message = fields.filled(fields.SUBJECT, {**start, **values}, options, message)
        return self.part("subject", draft, shown, message, told, cards())

    def photos_of(self, draft: str, problems: Sequence[str] = ()) -> Markup:
        folder = self.draft(draft)
        jobs = self.jobs_of(folder)
        moves = bool(jobs) and jobs[-1].state in ("queued", "running")
        if jobs and not moves and jobs[-1].code != 0:
            problems = [*problems, self.status(jobs[-1])]
        body = self.part("photos", draft, photos.photos(folder), problems, moves)
        return self.polled(f"/new/{draft}/photos", body, moves=moves)

    def photos_part(self, request: Request, draft: str) -> Response:
        return self.again(request, self.photos_of(draft))

    def photo(self, draft: str, name: str) -> FileResponse:
        return self.file(self.draft(draft), name, r"photo-\d+\.(png|jpg)")

    def file(self, folder: Path, name: str, pattern: str) -> FileResponse:
        """Return a file of a folder; nothing that a link leads to elsewhere."""
        path = folder / name
        if not re.fullmatch(pattern, name) or path.is_symlink() or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path)

    def add_photos(self, draft: str, form: Form) -> HTMLResponse:
        folder = self.draft(draft)
        files = [(each.filename or "", each.file) for each in form.getlist("files") if isinstance(each, UploadFile)]
        if form.get("examples"):
            photos.add_examples(folder)
        return HTMLResponse(self.photos_of(draft, photos.add_photos(folder, files)))

    def change_photo(self, draft: str, name: str, form: Form) -> HTMLResponse:
        folder = self.draft(draft)
        self.photo(draft, name)
        if form.get("remove"):
            photos.write_caption(folder, name, "")
            (folder / name).unlink()
        else:
            photos.write_caption(folder, name, str(form.get("caption", "")))
        return HTMLResponse(self.photos_of(draft))

    def caption(self, draft: str, form: Form) -> HTMLResponse:
        folder, model = self.draft(draft), str(form.get("caption_model", "")).strip()
        try:
            place = Path(fields.confined("caption_model", model, self.roots))
            if not place.is_dir():
                raise UsageError(f"caption_model={model}: no such folder; expected one with a model of transformers")
        except UsageError as error:
            return HTMLResponse(self.photos_of(draft, [str(error)]))
        self.queue.add("ui.photos", [str(folder), str(place)], str(form.get("card") or next(iter(cards()))), folder)
        return HTMLResponse(self.photos_of(draft))

    def check(self, draft: str, action: str, form: Form) -> Response:
        """Check and predict a run; start it if that is asked for and nothing is wrong."""
        values = {key: value.strip() for key, value in form.items() if isinstance(value, str)}
        folder = self.draft(draft)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "form.json", json.dumps(values))
        told: Any = None
        try:
            settings = self.subject_settings(folder, values)
            out, error = program("ui.check", settings, values["card"])
            if error:
                return HTMLResponse(self.form(draft, values, error))
            told = json.loads(out.splitlines()[-1])
        except UsageError as error:
            return HTMLResponse(self.form(draft, values, str(error)))
        if action != "start":
            return HTMLResponse(self.form(draft, values, told=told))
        run = self.root / values["output_dir"]
        self.queue.add("dreambooth", settings, values["card"], run)
        return Response(headers={"HX-Redirect": f"/runs/{run.name}"})

    def subject_settings(self, folder: Path, values: Mapping[str, str]) -> list[str]:
        """Return the command line of ``dreambooth`` for a form.

        Raises:
            UsageError: A value is none, or a path elsewhere.
        """
        name = values.get("output_dir", "")
        if not re.fullmatch(r"\w[\w.-]{0,63}", name):
            raise UsageError(f"output_dir={name}: expected a name of letters, digits, - and _; write output_dir=my-subject")
        if any(job.state in ("queued", "running") for job in self.jobs_of(self.root / name)):
            raise UsageError(f"output_dir={name}: a job writes there already; choose another name")
        if values.get("card") not in cards():
            raise UsageError(f"card={values.get('card')} is not there; expected one of {', '.join(cards())}")
        settings = [fields.setting("instance_data_dir", str(folder)), fields.setting("output_dir", str(self.root / name))]
        for each in fields.SUBJECT:
            key, value = each.key, values.get(each.key, "")
            if key in ("output_dir", "card") or not value:
                continue
            if each.is_path:
                value = str(self.root / value) if value in children(self.root) else fields.confined(key, value, self.roots)
                if key == "init_from" and not Path(value).exists():
                    key = "model.pretrained"
            settings.append(fields.setting(key, value, is_text=each.is_text or each.is_path))
        return settings

    # A run.

    def shown(self, name: str) -> ShownRun:
        path = children(self.root).get(name)
        if path is None and not self.jobs_of(self.root / name):
            raise HTTPException(404)
        return ShownRun.read(path) if path is not None else ShownRun(name, self.root / name)

    def run(self, name: str) -> HTMLResponse:
        run, parts = self.shown(name), ("state", "pictures", "curves")
        others = [each for each in children(self.root) if each != name]
        return self.page("run", run=run, others=others, parts=[self.live(run, each) for each in parts])

    def live(self, run: ShownRun, part: str) -> Markup:
        """Return what changes while a run goes on: its state, its pictures or its curves."""
        jobs = [job for job in self.jobs_of(run.path) if job.program in TRAINS]
        job, line = jobs[-1] if jobs else None, ""
        moves = job is not None and job.state in ("queued", "running")
        if job is not None and moves and self.queue.log(job).is_file():
            lines = self.queue.log(job).read_text("utf-8", "replace").strip().splitlines()
            line = lines[-1] if lines else ""
        body = {
            "state": lambda: self.part("state", run, job, moves, line),
            "pictures": lambda: self.part("pictures", run),
            "curves": lambda: Markup(run.chart()),
        }[part]()
        return self.polled(f"/runs/{run.name}/{part}", body, moves=moves, seconds=10 if part == "curves" else 2)

    def run_part(self, request: Request, name: str, part: str) -> Response:
        run = self.shown(name)
        if part in ("state", "pictures", "curves"):
            return self.again(request, self.live(run, part))
        if part == "report":
            return self.sandboxed(self.file(run.path, "report.html", ".*"))
        if part == "log" and (jobs := self.jobs_of(run.path)):
            return PlainTextResponse(self.queue.log(jobs[-1]).read_text("utf-8", "replace"))
        raise HTTPException(404)

    def sandboxed(self, response: Response) -> Response:
        response.headers["Content-Security-Policy"] = FILE_POLICY
        return response

    def sample(self, name: str, step: int) -> FileResponse:
        return self.file(self.shown(name).path / "samples", f"step-{step:08d}.png", ".*")

    def resume(self, name: str) -> Response:
        jobs = [job for job in self.jobs_of(self.shown(name).path) if job.program in TRAINS]
        if not jobs:
            raise HTTPException(404)
        kept = [each for each in jobs[-1].settings if not each.startswith(("resume=", "overwrite="))]
        self.queue.add(jobs[-1].program, [*kept, "resume=auto"], jobs[-1].card, Path(jobs[-1].folder))
        return Response(headers={"HX-Refresh": "true"})

    def download(self, name: str, kind: str) -> Response:
        """Return the pipeline as a tar file, or the LoRA as one file: of diffusers, or exported for other programs."""
        run = self.shown(name)
        if kind == "pipeline" and (run.path / "pipeline").is_dir():
            command = ["tar", "-C", str(run.path), "-cf", "-", "pipeline"]
            packed = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert packed.stdout is not None
            headers = {"Content-Disposition": f'attachment; filename="{name}.tar"'}
            return StreamingResponse(packed.stdout, media_type="application/x-tar", headers=headers)
        if kind not in ("diffusers", "kohya", "comfyui") or not run.has_lora:
            raise HTTPException(404)
        file = run.path / "pipeline" / LORA_NAME
        if kind != "diffusers":
            out = self.own / "exported" / f"{name}-{run.step}-{kind}"
            if not out.is_dir():
                pairs = {"run": str(run.path), "format": kind, "output_dir": str(out)}
                _, error = program("export", [fields.setting(*pair) for pair in pairs.items()])
                if error:
                    return self.page("message", title="Export", message=error)
            file = next(out.glob("*.safetensors"))
        return FileResponse(file, filename=f"{name}-{kind}.safetensors")

    def compare(self, request: Request) -> Response:
        known, names = children(self.root), request.query_params.getlist("run")
        out = self.own / "compare.html"
        paths = ",".join(fields.setting("", str(known[name]))[1:] for name in names if name in known)
        _, error = program("compare", [f"runs=[{paths}]", fields.setting("output", str(out))])
        return self.page("message", title="Compare", message=error) if error else self.sandboxed(FileResponse(out))

    # Pictures.

    def draw(self, request: Request) -> HTMLResponse:
        shown, message = fields.filled(fields.PICTURE, request.query_params, self.options())
        return self.page("try", form=self.part("drawing", shown, message), pictures=self.pictures())

    def pictures(self) -> Markup:
        """Return all pictures that were drawn here, the newest first, with their settings or what went wrong."""
        jobs = {Path(job.folder): job for job in self.queue.jobs()}
        tries = []
        for folder in list(children(self.own / "pictures").values())[:20]:
            sides = []
            for side in (each for each in ("before", "after") if folder / each in jobs):
                files = sorted(path for path in (folder / side).glob("*.png") if not path.name.startswith("grid"))
                sides.append((side, status := self.status(jobs[folder / side]), files[:1], files and settings_of(files[0])))
            tries.append((folder.name, sides))
        moves = any(job.state in ("queued", "running") for job in jobs.values() if job.program == "generate")
        return self.polled("/try/pictures", self.part("tries", tries), moves=moves)

    def pictures_part(self, request: Request) -> Response:
        return self.again(request, self.pictures())

    def picture(self, draft: str, side: str, name: str) -> FileResponse:
        if side not in ("before", "after"):
            raise HTTPException(404)
        self.draft(draft)
        return self.file(self.own / "pictures" / draft / side, name, r"[\w.-]+\.png")

    def start_drawing(self, form: Form) -> Response:
        values = {key: value.strip() for key, value in form.items() if isinstance(value, str)}
        try:
            run = ShownRun.read(children(self.root)[values["run"]])
            shared = [f"prompts=[{fields.setting('', values['prompts'])[1:]}]"]
            for each in fields.PICTURE:
                value = values.get(each.key, "")
                if each.key in ("run", "prompts", "card", "lora_weight") or not value:
                    continue
                value = fields.confined(each.key, value, self.roots) if each.is_path else value
                shared.append(fields.setting(each.key, value, is_text=each.is_text or each.is_path))
            weight = [fields.setting("lora_weight", values["lora_weight"], is_text=False)] if values.get("lora_weight") else []
        except (KeyError, UsageError) as error:
            shown, message = fields.filled(fields.PICTURE, values, self.options(), str(error))
            return HTMLResponse(self.part("drawing", shown, message))
        folder = self.own / "pictures" / secrets.token_hex(4)
        folder.mkdir(parents=True)
        sides = {"after": [fields.setting("run", str(run.path)), *weight]}
        if values.get("before") and run.base is not None:
            sides = {"before": [fields.setting("model.pretrained", run.base)], **sides}
        for side, own in sides.items():
            settings = [*own, *shared, fields.setting("output_dir", str(folder / side))]
            self.queue.add("generate", settings, values.get("card") or next(iter(cards())), folder / side)
        return Response(headers={"HX-Redirect": "/try?" + str(form_query(values))})

    # Stores and plans.

    def stores(self) -> HTMLResponse:
        return self.page("stores", stores=stores(self.roots), roots=self.roots)

    def plan(self, request: Request) -> Response:
        """Return the planner's table for a form, or its page with charts."""
        values, out = dict(request.query_params), self.own / "plan.html"
        if "charts" in values and out.is_file():
            return self.sandboxed(FileResponse(out))
        text = error = ""
        options = self.options()
        if values.get("model"):
            try:
                given = [each.key for each in fields.PLAN if values.get(each.key)]
                settings = [fields.setting(key, values[key], is_text=False) for key in given]
                text, error = program("plan", [*settings, fields.setting("output", str(out))])
            except UsageError as refused:
                error = str(refused)
        shown, error = fields.filled(fields.PLAN, {"model": "sdxl", **values}, options, error)
        return self.page("plan", fields=shown, text=text, message=error)

    def style(self) -> Response:
        """Return the style of our reports, and what the page has beside it."""
        return Response(style() + (HERE / "static/page.css").read_text("utf-8"), media_type="text/css")


def form_query(values: Mapping[str, str]) -> str:
    """Return the values of a form as the query of an address."""
    from urllib.parse import urlencode

    return urlencode({key: value for key, value in values.items() if value})
