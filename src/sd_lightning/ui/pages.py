"""The pages: what each address answers."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import Depends, FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from sd_lightning._errors import UsageError
from sd_lightning.apps.pictures import settings_of
from sd_lightning.callbacks.progress import clock_time
from sd_lightning.report.document import style
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.untrusted import read_json
from sd_lightning.ui import fields, photos
from sd_lightning.ui.folders import ShownRun, children, inside, mapping, stores
from sd_lightning.ui.jobs import CPU, Job, Queue, cards, environment

HERE = Path(__file__).parent
PAGE_STYLE = HERE / "static/page.css"
FILE_POLICY = "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Of files that a run's folder holds: nothing in them runs or loads."""
KINDS = ("queue", "photos", "state", "samples", "curves", "tries")
"""Parts of pages that ask for themselves again: ``_<kind>`` returns each, and whether it will change."""


async def _posted(request: Request) -> dict[str, str]:
    form = await request.form(max_files=0, max_fields=100)
    return {key: str(value).strip() for key, value in form.items()}


Values = Annotated[dict[str, str], Depends(_posted)]


def program(name: str, settings: Sequence[str], card: str = CPU) -> tuple[str, str]:
    """Run one of our programs; return what it printed, and its error, "" if it succeeded."""
    command = [sys.executable, "-m", f"sd_lightning.{name}", *settings]
    try:
        done = subprocess.run(command, env=environment(card), capture_output=True, text=True, timeout=600)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # a setting is too long, for instance
        return "", str(error)
    return done.stdout, problem_in(done.stderr) or "it failed" if done.returncode else ""


def problem_in(text: str) -> str:
    """Return the message with which a program of ours ended, or else its last line."""
    return (re.findall(r"^error: (.+)$", text, re.MULTILINE) or text.strip().splitlines() or [""])[-1][:1000]


class Site:
    """What the page shows: the runs in a folder, the jobs that it has started, photos and pictures.

    Args:
        root: Folder of the runs.
        folders: Others from which may be read.
    """

    def __init__(self, root: Path, folders: Sequence[Path] = ()) -> None:
        self.root, self.own, self.roots = root, root / ".ui", [root, *folders]
        self.queue = Queue(self.own / "jobs")
        loader = FileSystemLoader(HERE / "templates")
        self.html = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        self.html.globals.update(status=self.status, duration=clock_time)

    def app(self) -> FastAPI:
        """Return the application, without its guard."""
        app = FastAPI(openapi_url=None)
        app.add_exception_handler(UsageError, lambda _, error: Response(str(error), 409, media_type="text/plain"))
        for method, path, answer in (
            ("GET", "/", self.index),
            ("GET", "/new", lambda: RedirectResponse(f"/new/{secrets.token_hex(4)}")),
            ("GET", "/new/{draft}", self.subject),
            ("GET", "/part/{kind}/{name}", self.part),
            ("GET", "/image/{path:path}", self.image),
            ("GET", "/runs/{name}", self.run),
            ("GET", "/runs/{name}/{part}", self.run_part),
            ("GET", "/compare", self.compare),
            ("GET", "/try", self.draw),
            ("GET", "/plan", self.plan),
            ("GET", "/stores", lambda: self.page("Stores", "stores", stores(self.roots), self.roots)),
            ("GET", "/style.css", lambda: Response(style() + PAGE_STYLE.read_text(), media_type="text/css")),
            ("POST", "/new/{draft}/photos", self.add_photos),
            ("POST", "/new/{draft}/photos/{name}", self.change_photo),
            ("POST", "/new/{draft}/captions", self.caption),
            ("POST", "/new/{draft}/{action}", self.check),
            ("POST", "/jobs/{job_id}/stop", self.stop),
            ("POST", "/runs/{name}/resume", self.resume),
            ("POST", "/try", self.start_drawing),
        ):
            app.add_api_route(path, answer, methods=[method], response_class=HTMLResponse)
        app.mount("/static", StaticFiles(directory=HERE / "static"))
        return app

    def macro(self, name: str, *values: Any) -> Markup:
        return Markup(getattr(self.html.get_template("parts.html").module, name)(*values))

    def page(self, title: str, name: str, *values: Any) -> HTMLResponse:
        return HTMLResponse(self.html.get_template("base.html").render(title=title, body=self.macro(name, *values)))

    def polled(self, kind: str, name: str = "-", *more: Any) -> Markup:
        """Return a part of a page that asks for itself again while it changes."""
        body, moves = getattr(self, f"_{kind}")(name, *more)
        tag = hashlib.sha256(f"{moves}{body}".encode()).hexdigest()[:12]
        again = f'hx-get="/part/{kind}/{quote(name)}?v={tag}" hx-trigger="every 2s" hx-swap="outerHTML"'
        return Markup(f'<div data-tag="{tag}" {again if moves else ""}>{body}</div>')

    def part(self, request: Request, kind: str, name: str) -> Response:
        """Answer a part of a page that has changed."""
        html = self.polled(kind, name) if kind in KINDS else _missing()
        is_known = f'data-tag="{request.query_params.get("v")}"' in html
        return Response(status_code=204) if is_known else HTMLResponse(html)

    def image(self, path: str) -> FileResponse:
        """Return a picture that lies below the folder of the runs, and no link leads out of it."""
        place = self.root / path
        return FileResponse(place if inside(self.root, place) and place.suffix in (".png", ".jpg") else _missing())

    def jobs_of(self, folder: Path) -> list[Job]:
        return [job for job in self.queue.jobs() if Path(job.folder) == folder]

    def status(self, job: Job) -> str:
        """Return what a job does, or how it ended."""
        if job.state != "ended":
            return f"waits for card {job.card}" if job.state == "queued" else job.state
        known = {0: "finished", 75: "stopped, and can be resumed", -15: "stopped"}
        return known.get(-1 if job.code is None else job.code, f"failed: {job.note or problem_in(self.read_log(job))}")

    def read_log(self, job: Job) -> str:
        """Return the end of what a job has printed."""
        log = self.queue.log(job)
        if not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            return file.read().decode("utf-8", "replace")

    # The list of runs, and the queue.

    def index(self) -> HTMLResponse:
        return self.page("Runs", "index", map(ShownRun, children(self.root).values()), self.polled("queue"))

    def _queue(self, _: str) -> tuple[Markup, bool]:
        jobs = self.queue.jobs()[::-1]
        shown = [(job, Path(job.folder)) for place, job in enumerate(jobs) if place < 3 or job.is_open]
        return self.macro("queue", [(job, path.name if path.parent == self.root else "") for job, path in shown]), True

    def stop(self, job_id: str) -> Response:
        self.queue.stop(job_id)
        return Response(headers={"HX-Refresh": "true"})

    # A new subject.

    def draft(self, draft: str) -> Path:
        return self.own / "photos" / draft if re.fullmatch("[0-9a-f]{8}", draft) else _missing()

    def subject(self, draft: str) -> HTMLResponse:
        form = self.form(draft, mapping(read_json, self.draft(draft) / "form.json"))
        return self.page("New subject", "new", draft, self.polled("photos", draft), form)

    def options(self) -> dict[str, list[tuple[str, str]]]:
        """Return the choices of all forms."""
        shown = [(name, name) for name, path in children(self.root).items() if ShownRun(path).has_pipeline]
        there = [(number, name) for number, (name, _) in cards().items()]
        return {"init_from": shown, "run": shown, "card": there, **fields.options()}

    def form(self, draft: str, values: Mapping[str, str], message: str = "", told: Any = None) -> Markup:
        options, (card, (_, memory)) = self.options(), next(iter(cards().items()))
        start = {"experiment": fields.preset_for(memory)}
        if card == CPU:  # what a newcomer without photos and without a GPU can do
            base = next((name for name, _ in options["init_from"]), "")
            start |= {"instance_prompt": "a handwritten sks digit", "init_from": base}
        shown, message = fields.filled(fields.SUBJECT, {**start, **values}, options, message)
        return self.macro("subject", draft, shown, message, told)

    def _photos(self, draft: str, problems: Sequence[str] = ()) -> tuple[Markup, bool]:
        folder = self.draft(draft)
        shown, last = photos.photos(folder), self.jobs_of(folder)[-1:]
        moves = any(job.is_open for job in last)
        is_done = moves or all(caption for _, caption in shown)
        told = [*problems, *(self.status(job) for job in last if job.code != 0 and not is_done)]
        return self.macro("photos", draft, shown, told, moves), moves

    def add_photos(
        self,
        draft: str,
        files: Annotated[list[UploadFile] | None, File()] = None,
        examples: Annotated[str, Form()] = "",
    ) -> HTMLResponse:
        if examples:
            photos.add_examples(self.draft(draft))
        sent = [(each.filename or "", each.file) for each in files or []]
        return HTMLResponse(self.polled("photos", draft, photos.add_photos(self.draft(draft), sent)))

    def change_photo(self, draft: str, name: str, values: Values) -> HTMLResponse:
        """Write a photo's caption, or remove the photo."""
        folder = self.draft(draft)
        if name not in dict(photos.photos(folder)):
            _missing()
        photos.write_caption(folder, name, "" if values.get("remove") else values.get("caption", ""))
        if values.get("remove"):
            (folder / name).unlink()
        return HTMLResponse(self.polled("photos", draft))

    def caption(self, draft: str, values: Values) -> HTMLResponse:
        """Caption the photos in a job."""
        folder = self.draft(draft)
        model = fields.confined("caption_model", values.get("caption_model", ""), self.roots)
        self.queue.add("ui.photos", [str(folder), model], next(iter(cards())), folder)
        return HTMLResponse(self.polled("photos", draft))

    def check(self, draft: str, action: str, values: Values) -> Response:
        """Check and predict a run; start it if that is asked for and nothing is wrong."""
        folder, out = self.draft(draft), ""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "form.json", json.dumps(values))
        try:
            settings = self.subject_settings(folder, values)
            card = values.get("card") or next(iter(cards()))
            out, error = program("ui.check", settings, card)
            if action == "start" and not error:
                self.queue.add("dreambooth", settings, card, self.root / values["output_dir"])
        except UsageError as refused:
            error = str(refused)
        if error or action != "start":
            return HTMLResponse(self.form(draft, values, error, None if error else json.loads(out.splitlines()[-1])))
        return Response(headers={"HX-Redirect": f"/runs/{values['output_dir']}"})

    def subject_settings(self, folder: Path, values: Mapping[str, str]) -> list[str]:
        """Return the command line of ``dreambooth`` for a form.

        Raises:
            UsageError: The name is none, or a path lies elsewhere.
        """
        name = values.get("output_dir", "")
        if not re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII):
            raise UsageError(f"output_dir={name}: expected letters, digits, - and _; write output_dir=my-subject")
        if name in children(self.root) and ShownRun(self.root / name).has_pipeline:
            raise UsageError(f"output_dir={name}: is a run already; write output_dir={name}-2, or resume that")
        places = {"instance_data_dir": str(folder), "output_dir": str(self.root / name)}
        own = [fields.setting(key, value) for key, value in places.items()]
        return own + self.settings(fields.SUBJECT, values, "output_dir", "card")

    def settings(self, form: Sequence[fields.Field], values: Mapping[str, str], *left_out: str) -> list[str]:
        """Return what is given in a form as settings; names of runs become their paths."""
        found = []
        for each in (field for field in form if values.get(field.key) and field.key not in left_out):
            key, value = each.key, values[each.key]
            if each.is_path:
                own = children(self.root).get(value)
                value = fields.confined(key, value, self.roots) if own is None else str(own)
                key = "model.pretrained" if key == "init_from" and not Path(value).exists() else key
            found.append(fields.setting(key, value))
        return found

    # A run.

    def shown(self, name: str) -> ShownRun:
        path = self.root / name
        return ShownRun(path) if name in children(self.root) or self.jobs_of(path) else _missing()

    def run(self, name: str) -> HTMLResponse:
        parts = [self.polled(kind, name) for kind in ("state", "samples", "curves")]
        return self.page(name, "run", name, [each for each in children(self.root) if each != name], parts)

    def job_of(self, run: ShownRun) -> Job | None:
        """Return the last start of a run's training here."""
        return next((job for job in self.jobs_of(run.path)[::-1] if job.program == "dreambooth"), None)

    def _state(self, name: str) -> tuple[Markup, bool]:
        run = self.shown(name)
        job = self.job_of(run)
        moves = job.is_open if job is not None else run.is_written
        line = problem_in(self.read_log(job)) if job is not None and moves else ""
        return self.macro("state", run, job, moves, line), moves

    def _samples(self, name: str) -> tuple[Markup, bool]:
        return self.macro("samples", self.shown(name)), self._state(name)[1]

    def _curves(self, name: str) -> tuple[Markup, bool]:
        return Markup(self.shown(name).chart()), self._state(name)[1]

    def run_part(self, name: str, part: str) -> Response:
        """Return the report, the log, the pipeline as a tar file, or the LoRA as one file, exported if necessary."""
        run, jobs = self.shown(name), self.jobs_of(self.root / name)
        if part == "report" and inside(run.path, run.path / "report.html"):
            return _sandboxed(run.path / "report.html")
        if part == "log" and jobs and self.queue.log(jobs[-1]).is_file():
            return FileResponse(self.queue.log(jobs[-1]), media_type="text/plain")
        if part == "pipeline" and (run.path / part).is_dir():
            packed = subprocess.Popen(["tar", "-C", run.path, "-cf", "-", part], stdout=subprocess.PIPE)
            headers = {"Content-Disposition": f'attachment; filename="{quote(name)}.tar"'}
            return StreamingResponse(packed.stdout or (), media_type="application/x-tar", headers=headers)
        file = run.lora if part in ("diffusers", "kohya", "comfyui") else None
        if file is not None and part != "diffusers":
            out = self.own / "exported" / f"{name}-{file.stat().st_mtime_ns}-{part}"
            if not any(out.glob("*.safetensors")):
                shutil.rmtree(out, ignore_errors=True)  # of an export that was killed
                wanted = {"run": str(run.path), "format": part, "output_dir": str(out)}
                if error := program("export", [fields.setting(*each) for each in wanted.items()])[1]:
                    return self.page("Export", "message", error)
            file = next(out.glob("*.safetensors"), None)
        return FileResponse(file or _missing(), filename=f"{name}-{part}.safetensors")

    def resume(self, name: str) -> Response:
        job = self.job_of(self.shown(name)) or _missing()
        kept = [each for each in job.settings if each != "resume=auto"]
        self.queue.add(job.program, [*kept, "resume=auto"], job.card, self.root / name)
        return Response(headers={"HX-Refresh": "true"})

    def compare(self, request: Request) -> Response:
        known, names = children(self.root), request.query_params.getlist("run")
        paths = [fields.quoted(str(known[name])) for name in names if name in known]
        out, error = self.written("compare", f"runs=[{','.join(paths)}]")
        return out or self.page("Compare", "message", error)

    def written(self, name: str, *settings: str) -> tuple[Response | None, str]:
        """Return the page that a program writes, or its error."""
        path = self.own / f"{name}-{secrets.token_hex(4)}.html"
        _, error = program(name, [*settings, fields.setting("output", str(path))])
        page = None if error else _sandboxed(path)
        path.unlink(missing_ok=True)
        return page, error

    # Pictures.

    def draw(self, request: Request) -> HTMLResponse:
        options, given = self.options(), request.query_params
        run = children(self.root).get(given.get("run") or next(iter(dict(options["run"])), ""))
        drawn = {} if run is None else ShownRun(run).section("sampling")
        values = {key: str(value) for key, value in drawn.items() if value} | dict(given)
        shown, message = fields.filled(fields.PICTURE, values, options)
        return self.page("Try", "drawing", shown, message, self.polled("tries"))

    def _tries(self, _: str) -> tuple[Markup, bool]:
        """Return the pictures that were drawn here, the newest first, with their settings or what went wrong."""
        jobs = [job for job in self.queue.jobs() if job.program == "generate"]
        tries = [[*map(self._drawn, group)] for _, group in groupby(jobs, lambda job: Path(job.folder).parent)]
        return self.macro("tries", tries[:-21:-1]), any(job.is_open for job in jobs)

    def _drawn(self, job: Job) -> tuple[Job, str, str, dict[str, Any]]:
        place = Path(job.folder)
        file = next((file for file in place.glob("*-seed-*.png") if inside(self.root, file)), None)
        return job, place.name, str(file.relative_to(self.root)) if file else "", settings_of(file) if file else {}

    def start_drawing(self, values: Values) -> Response:
        """Draw with a run, and with what it started from if that is asked for: two jobs."""
        card, folder = values.get("card") or next(iter(cards())), self.own / "pictures" / secrets.token_hex(4)
        try:
            if empty := next((key for key in ("run", "prompts") if not values.get(key)), None):
                raise UsageError(f"{empty}=: is empty; expected a model, and what it shall draw; fill it in")
            sides = {"after": self.settings(fields.PICTURE, values, "card")}
            base = ShownRun(self.root / values.get("run", "")).base if values.get("before") else None
            if base is not None:
                own = fields.setting("model.pretrained", fields.confined("model.pretrained", base, self.roots))
                sides = {"before": [own, *self.settings(fields.PICTURE, values, "card", "run", "lora_weight")], **sides}
            for side, settings in sides.items():
                place = fields.setting("output_dir", str(folder / side))
                self.queue.add("generate", [*settings, place], card, folder / side)
        except UsageError as error:
            shown, message = fields.filled(fields.PICTURE, values, self.options(), str(error))
            return HTMLResponse(self.macro("drawing", shown, message, self.polled("tries")))
        return Response(headers={"HX-Redirect": f"/try?{urlencode(values)}"})

    def plan(self, request: Request) -> Response:
        """Return the planner's form, or its page."""
        values, error = dict(request.query_params), ""
        if values.get("model"):
            try:
                out, error = self.written("plan", *self.settings(fields.PLAN, values))
                if out is not None:
                    return out
            except UsageError as refused:
                error = str(refused)
        form = fields.filled(fields.PLAN, {"model": "sdxl", **values}, self.options(), error)
        return self.page("Plan", "plan", *form)


def _sandboxed(path: Path) -> Response:
    return HTMLResponse(path.read_bytes(), headers={"Content-Security-Policy": FILE_POLICY})


def _missing() -> Any:
    raise HTTPException(404)
