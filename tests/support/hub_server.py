"""A stand-in for the Hugging Face Hub's HTTP API: who one is, repositories, and commits of small files.

As `huggingface_hub` 2.4 calls it (`hf_api.py`, `_commit_api.py`); every file is "regular", which goes into the commit
itself, so that there is neither LFS nor Xet.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Hub:
    """The state of the stand-in; tests change it."""

    url: str = ""
    role: str = "write"
    scoped: list[dict[str, Any]] = field(default_factory=list)
    """What a fine-grained token may do."""
    orgs: list[dict[str, Any]] = field(default_factory=list)
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    fails: str = ""
    """Requests whose path contains it end with 507, after which the client does not try again."""
    requests: list[str] = field(default_factory=list)

    def header(self, repo: str) -> dict[str, Any]:
        """Return the YAML header of a repository's card."""
        text = self.repos[repo].get("README.md", b"").decode()
        return dict(yaml.safe_load(text.split("---")[1])) if text.startswith("---") else {}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the stand-in in a thread."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, content: Any, **headers: str) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def begin(self) -> bool:
            hub.requests.append(f"{self.command} {self.path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid credentials"})
                return False
            if hub.fails and hub.fails in self.path:
                self.answer(507, {"error": "it fails"})
                return False
            return True

        def do_GET(self) -> None:
            if not self.begin():
                return
            if self.path == "/api/whoami-v2":
                token = {"role": hub.role, "displayName": "tests", "fineGrained": {"scoped": hub.scoped}}
                me = {"type": "user", "name": "me", "orgs": hub.orgs, "auth": {"accessToken": token}}
                self.answer(200, me)
                return
            repo = self.path.removeprefix("/api/models/").partition("?")[0].removesuffix("/revision/main")
            repo, _, is_tree = repo.partition("/tree/")
            if repo not in hub.repos:
                self.answer(404, {"error": "no such repository"}, X_Error_Code="RepoNotFound")
                return
            if is_tree:
                sizes = {name: len(content) for name, content in hub.repos[repo].items()}
                self.answer(200, [{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()])
                return
            files = [{"rfilename": name} for name in hub.repos[repo]]
            private = hub.private.get(repo, False)
            about = {"id": repo, "private": private, "siblings": files, "cardData": hub.header(repo), "sha": "0" * 40}
            self.answer(200, about)

        def do_POST(self) -> None:
            if not self.begin():
                return
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                if repo in hub.repos:
                    self.answer(409, {"error": "it exists", "url": f"{hub.url}/{repo}"})
                    return
                hub.repos[repo] = {}
                hub.private[repo] = asked.get("private") is True or asked.get("visibility") == "private"
                self.answer(200, {"url": f"{hub.url}/{repo}", "name": repo, "id": repo})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in
                         json.loads(body)["files"]]  # fmt: skip
                self.answer(200, {"files": files})
            else:
                repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    elif line["key"] == "deletedFile":
                        del hub.repos[repo][line["value"]["path"]]
                self.answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/1", "commitOid": "1" * 40, "success": True})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
