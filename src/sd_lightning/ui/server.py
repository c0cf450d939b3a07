"""The server of the page: where it listens, whom it lets in, and what a browser may do with what it sends."""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning._errors import UsageError
from sd_lightning._imports import require

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from omegaconf import DictConfig

COOKIE = "sd_lightning_token"
MAX_BODY = 512 * 2**20
"""Most bytes of a request: photos of one upload together."""
READ_ONLY = r"/|/(new|runs|try|stores)(/[^/]*)?"
"""Pages to which other sites may link: they start no program."""
PAGE_POLICY = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def run(cfg: DictConfig) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        UsageError: A package is missing, the port is taken, or another server shows the folder.
    """
    for package in ("uvicorn", "fastapi", "jinja2", "python_multipart"):
        require(package, extra="ui", who="ui")
    import uvicorn

    from sd_lightning.ui.pages import Site

    host, port, missing = cfg.host, cfg.port, [each for each in cfg.folders if not Path(each).is_dir()]
    if missing:
        raise UsageError(f"ui got folders with {missing[0]}, which is no folder; leave it out, or make it")
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    token = cfg.token or (None if is_local else secrets.token_urlsafe(18))
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    listening, folders = listen(host, port), [Path(each).absolute() for each in cfg.folders]
    site = Site(Path(cfg.runs).absolute(), folders)
    with site.queue.locked("server") as lock:
        if lock is None:
            raise UsageError(
                f"ui got runs={cfg.runs}, which another server shows; end that, or give another runs=<folder>"
            )
        site.queue.jobs()  # goes on with those that wait
        query = f"?token={token}" if token else ""
        print(f"open http://{name}:{port}/{query}   (Ctrl-C ends the page; what it has started goes on)", flush=True)
        app = guarded(site.app(), host if is_local else None, token)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False)).run(sockets=[listening])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        UsageError: The port is taken, or the address is not this machine's.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"ui got host={host} port={port}, where it cannot listen ({error}); write port={min(port + 1, 65535)}, or "
            "end what listens there"
        ) from error


def guarded(app: FastAPI, local_host: str | None, token: str | None) -> FastAPI:
    """Refuse requests from other sites, to other host names, without the token, or that are too large.

    Args:
        app: The page.
        local_host: Where it listens, on this machine alone; None: anywhere, and any host name is let in.
        token: What lets in; None: nothing is asked for.
    """
    from fastapi.responses import PlainTextResponse, RedirectResponse

    names = {local_host, "localhost", "127.0.0.1", "[::1]", f"[{local_host}]"}

    def refusal(request: Request) -> str | None:
        headers, host = request.headers, request.headers.get("host", "")
        changes = request.method not in ("GET", "HEAD")
        is_own = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        is_link = headers.get("sec-fetch-mode") == "navigate" and re.fullmatch(READ_ONLY, request.url.path)
        if local_host is not None and host.rpartition(":")[0] not in names and host not in names:
            return f"this page is at {local_host}, and not at {host}"  # a name of others that leads here
        is_sent = changes and headers.get("origin") not in (f"http://{host}", f"https://{host}")
        if is_sent or not is_own and (changes or not is_link):
            return "another site sent this request"
        given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            return "the token is missing or wrong: open the address that the server has printed"
        has_end = "transfer-encoding" not in headers
        if changes and not (has_end and 0 <= int(headers.get("content-length", -1)) <= MAX_BODY):
            return f"too large: at most {MAX_BODY // 2**20} MB at once"
        return None

    async def check(request: Request, call_next: Callable[[Any], Awaitable[Response]]) -> Response:
        why = refusal(request)
        if why is not None:
            return PlainTextResponse(why, status_code=403)
        if token is not None and "token" in request.query_params:
            response: Response = RedirectResponse(str(request.url.remove_query_params("token")))
            response.set_cookie(COOKIE, token, httponly=True, samesite="lax")
        else:
            response = await call_next(request)
        response.headers.setdefault("Content-Security-Policy", PAGE_POLICY)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.middleware("http")(check)
    return app
