"""A stand-in for the Hugging Face hub on the loopback: the paths and headers that huggingface_hub uses.

It can gate or hide a repository, cut a connection in the middle of a file, and answer with any status.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MAIN = "main"


@dataclass
class Repo:
    """One repository: the directory of each revision. token: what a request must carry, if it is private.

    is_gated: files, but not the listing, need the token. listed_sizes: what the listing says of some files,
    whatever is true.
    """

    revisions: dict[str, Path]
    token: str | None = None
    is_gated: bool = False
    listed_sizes: dict[str, int] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        """The commit hash of a branch, a tag or a commit hash; None if there is none."""
        commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in self.revisions}
        return commits.get(revision) or next((c for c in commits.values() if c == revision), None)

    def directory(self, commit: str) -> Path:
        return next(path for name, path in self.revisions.items() if self.commit(name) == commit)


@dataclass
class HubDouble:
    """The state of the stand-in; tests change it. url: for HF_ENDPOINT.

    cuts: file name to the number of bytes after which its next download breaks off, once. resets: whether the
    connection is reset then, rather than closed. status: answered to everything, if set.
    requests: method, path and Range header of each request.
    """

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    resets: bool = False
    status: int | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def downloads(self) -> list[tuple[str, str | None]]:
        """File name and Range of each download, in order."""
        return [
            (path.rpartition("/")[2], byte_range)
            for method, path, byte_range in self.requests
            if method == "GET" and "/resolve/" in path
        ]


@contextlib.contextmanager
def hub_double(**repos: Path | Repo) -> Iterator[HubDouble]:
    """Serve `repos` (org__name for org/name) until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = HubDouble(f"http://127.0.0.1:{server.server_port}")
    for name, repo in repos.items():
        hub.repos[name.replace("__", "/")] = Repo({MAIN: repo}) if isinstance(repo, Path) else repo
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_API = re.compile(r"/api/models/(?P<repo>[^/]+(?:/[^/]+)??)(?:/(?P<what>revision|tree)/(?P<revision>.+?))?/?")
_FILE = re.compile(r"/(?P<repo>[^/]+(?:/[^/]+)??)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubDouble:
        hub: HubDouble = self.server.hub  # type: ignore[attr-defined]
        return hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status is not None:
            self._error(self.hub.status)
        elif found := _API.fullmatch(path):
            self._answer_api(found)
        elif found := _FILE.fullmatch(path):
            self._answer_file(found)
        else:
            self._error(404)

    def _answer_api(self, found: re.Match[str]) -> None:
        repo, commit = self._find(found["repo"], found["revision"] or MAIN, is_file=False)
        if repo is None or commit is None:
            return
        directory = repo.directory(commit)
        if found["what"] != "tree":
            self._json({"id": found["repo"], "modelId": found["repo"], "sha": commit, "siblings": []})
            return
        present = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        sizes = {name: path.stat().st_size for name, path in present.items()} | repo.listed_sizes
        self._json(
            [
                {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()}
                for name, size in sorted(sizes.items())
            ]
        )

    def _answer_file(self, found: re.Match[str]) -> None:
        repo, commit = self._find(found["repo"], found["revision"], is_file=True)
        if repo is None or commit is None:
            return
        path = repo.directory(commit) / found["file"]
        if not path.is_file():
            self._error(404, "EntryNotFound", commit)
            return
        content = path.read_bytes()
        start = 0
        if byte_range := self.headers.get("Range"):
            start = int(byte_range.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self._send(path.name, content[start:])

    def _send(self, name: str, content: bytes) -> None:
        cut = self.hub.cuts.pop(name, None)
        self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            if self.hub.resets:
                # Closing with unread time zero sends a reset instead of an end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    def _find(self, name: str, revision: str, *, is_file: bool) -> tuple[Repo | None, str | None]:
        """The repository and the commit, or an error was sent."""
        repo = self.hub.repos.get(name)
        has_token = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo is None or (repo.token is not None and not repo.is_gated and not has_token):
            self._error(401, "RepoNotFound")  # the hub does not tell a private one from none
            return None, None
        if repo.is_gated and is_file and not has_token:
            self._error(403 if "Authorization" in self.headers else 401, "GatedRepo")
            return None, None
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        return repo, commit

    def _error(self, status: int, code: str | None = None, commit: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
