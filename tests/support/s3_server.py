"""A real S3 server (moto's) in this process, with faults on request.

Requests come over HTTP through boto3 as in use; credentials, endpoint and region come from the environment.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


@dataclass(frozen=True)
class Request:
    """A request as the server got it."""

    method: str
    path: str
    query: str


@dataclass
class Fault:
    """What happens to the requests that ``matches`` accepts, ``times`` often (-1: always).

    An error is answered instead of the request if there is a ``status``; else the server's own answer comes after
    ``delay`` seconds, or once ``gate`` is set, and is cut after ``cut`` bytes of its body; ``lost`` does what was asked
    and answers nothing.
    """

    matches: Callable[[Request], bool]
    times: int = -1
    status: str = ""
    code: str = ""
    delay: float = 0.0
    gate: threading.Event | None = None
    cut: int | None = None
    lost: bool = False
    seen: int = 0


@dataclass
class S3Server:
    """The server's middleware: counts requests and bytes, and injects faults."""

    app: Any
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    body_bytes: int = 0
    """Of all answers to GET."""
    ignores_conditions: bool = False
    """Overwrite whatever If-None-Match says, as some stores of this protocol do."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, method: str, part: str = "", **fault: Any) -> Fault:
        """Inject a fault into requests of a method of which path and query contain a part."""
        made = Fault(lambda r: r.method == method and part in f"{r.path}?{r.query}", **fault)
        self.faults.append(made)
        return made

    def deny(self, code: str, status: str = "403 Forbidden") -> Fault:
        """Answer every request from now on with an error."""
        made = Fault(lambda r: True, status=status, code=code)
        self.faults.append(made)
        return made

    def reset(self) -> None:
        """Forget faults and counts."""
        self.faults, self.requests, self.body_bytes, self.ignores_conditions = [], [], 0, False

    def count(self, method: str, part: str = "") -> int:
        """Return how many requests of a method came, of which path and query contain a part."""
        return sum(r.method == method and part in f"{r.path}?{r.query}" for r in self.requests)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        with self._lock:
            self.requests.append(request)
            fault = next((f for f in self.faults if f.times != f.seen and f.matches(request)), None)
            if fault is not None:
                fault.seen += 1
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault is None:
            return self._counted(request, self._answer(environ, start_response))
        if fault.status:
            return self._refuse(request, fault, environ, start_response)
        time.sleep(fault.delay)
        if fault.gate is not None:
            fault.gate.wait(100)
        if fault.lost:
            b"".join(self._answer(environ, lambda *_: lambda _: None))
            return self._cut([], 0, environ)
        answer = self._answer(environ, start_response)
        return self._counted(request, answer if fault.cut is None else self._cut(answer, fault.cut, environ))

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self.app(environ, start_response)
        with self._writing:  # moto looks and writes in two steps
            return self.app(environ, start_response)

    def _refuse(
        self, request: Request, fault: Fault, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = ERROR.format(code=fault.code, message=f"injected {fault.code}").encode()
        start_response(fault.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if request.method == "HEAD" else [body]

    def _counted(self, request: Request, answer: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in answer:
            if request.method == "GET":
                self.body_bytes += len(chunk)
            yield chunk

    def _cut(self, answer: Iterable[bytes], length: int, environ: dict[str, Any]) -> Iterator[bytes]:
        if part := b"".join(answer)[:length]:
            yield part
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("injected")


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing: faults are part of the test."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run the server in a thread of this process."""
    from moto.s3 import models
    from moto.server import DomainDispatcherApplication, create_backend_app

    models.S3_UPLOAD_PART_MIN_SIZE = 1  # small files take the way of large ones
    middleware = S3Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, middleware, threaded=True, request_handler=_Quiet)
    middleware.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield middleware
    finally:
        server.shutdown()
        thread.join()
