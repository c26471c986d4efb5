"""A hub on this machine: what huggingface_hub asks to fetch a repository and to upload a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c" * 40


class Hub:
    """Repositories in memory: (kind, OWNER/NAME) -> file -> content; and what was asked."""

    def __init__(self):
        self.repositories = {}
        self.private = {}
        self.asked = []

    def add(self, name, folder, kind="model"):
        """Puts a folder's files into a repository."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        held = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        self.repositories[kind, name] = held


class Handler(BaseHTTPRequestHandler):
    """Answers for ``hub``."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.command != "HEAD":
            headers.setdefault("Content_Length", str(len(content)))
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def parts(self):
        self.hub.asked.append(f"{self.command} {self.path}")
        return unquote(self.path.partition("?")[0]).strip("/").split("/")

    def missing(self):
        self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")

    def do_GET(self):
        parts = self.parts()
        if parts[0] == "api":
            return self.about(parts[1:])
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if kind == "dataset" else parts
        held = self.hub.repositories.get((kind, "/".join(parts[:2])))
        name = "/".join(parts[4:])
        if held is None or name not in held:
            return self.answer(404, b"", X_Error_Code="EntryNotFound")
        tag = hashlib.sha256(held[name]).hexdigest()
        size = {"Content_Length": str(len(held[name]))} if self.command == "HEAD" else {}
        self.answer(200, held[name], ETag=f'"{tag}"', X_Repo_Commit=COMMIT, **size)

    do_HEAD = do_GET

    def about(self, parts):
        kind, name = parts[0].removesuffix("s"), "/".join(parts[1:3])
        held = self.hub.repositories.get((kind, name))
        if held is None:
            return self.missing()
        if parts[3:4] == ["tree"]:
            listed = [
                {"type": "file", "path": path, "size": len(text), "oid": "0" * 40}
                for path, text in held.items()
            ]
            return self.answer(200, listed)
        siblings = [{"rfilename": path} for path in held]
        self.answer(200, {"id": name, "sha": COMMIT, "siblings": siblings})

    def do_POST(self):
        parts = self.parts()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self.answer(401, {"error": "log in"})
        if parts == ["api", "validate-yaml"]:
            return self.answer(200, {"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            kind = asked.get("type") or "model"
            owner = asked.get("organization") or "me"
            name = f"{owner}/{asked['name']}"
            self.hub.repositories.setdefault((kind, name), {})
            self.hub.private[name] = asked.get("private", asked.get("visibility") == "private")
            return self.answer(200, {"url": f"http://127.0.0.1/{name}", "id": name})
        kind, name = parts[1].removesuffix("s"), "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        assert parts[4] == "commit", parts
        for line in body.decode().splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                content = base64.b64decode(row["value"]["content"])
                self.hub.repositories[kind, name][row["value"]["path"]] = content
        url = f"http://127.0.0.1/{name}/commit/{COMMIT}"
        self.answer(200, {"commitUrl": url, "commitOid": COMMIT, "success": True})


@contextmanager
def serving(monkeypatch, cache):
    """A :class:`Hub` that huggingface_hub takes for the real one, with a cache of its own."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
