"""A server on the loopback that speaks as much of the Hugging Face hub's protocol as a download takes."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Commit:
    """The files of a repository at a commit; those that end in .safetensors or .bin are large files (LFS)."""

    hash: str
    files: dict[str, bytes]

    def etag(self, name: str) -> str:
        """What the client stores a file under: sha256 of a large one, git's hash of a small one."""
        content = self.files[name]
        if self.large(name):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @staticmethod
    def large(name: str) -> bool:
        return name.endswith((".safetensors", ".bin"))


@dataclass
class Hub:
    """Repositories, the faults that requests meet, and the requests that came."""

    url: str
    repositories: dict[str, dict[str, Commit]] = field(default_factory=dict)
    """Commits by revision (branch, tag and their own hash)."""
    faults: list[tuple[str, object]] = field(default_factory=list)
    """(where, what): the first that fits a request is taken out and done to it. Where: ``api``, ``HEAD`` or ``GET``,
    for the last two with the end of a file's name after a space. What: a status, (status, headers), ``hang``, ``cut``
    (the connection ends in the middle), ``short`` (half the content and its length), ``wrong`` (one byte differs)."""
    requests: list[str] = field(default_factory=list)
    """``api``, or method and file's name, with the range that was asked for."""
    released: threading.Event = field(default_factory=threading.Event)

    def publish(self, repository: str, folder: Path, revision: str = "main") -> Commit:
        """Put the files of a folder up as the newest commit of a branch."""
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        digest = hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()
        commit = Commit(digest, files)
        self.repositories.setdefault(repository, {}).update({revision: commit, digest: commit})
        return commit

    def fault(self, where: str, what: object, times: int = 1) -> None:
        self.faults += [(where, what)] * times

    def take_fault(self, request: str) -> object:
        for i, (where, _) in enumerate(self.faults):
            kind, _, name = where.partition(" ")
            if request.split(" ")[0] == kind and request.endswith(name):
                return self.faults.pop(i)[1]
        return None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.hub.requests.append("api")
            fault = self.hub.take_fault("api")
            return self.fail(fault) if fault else self.describe(found[1], found[2] or "main")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            commit = self.hub.repositories.get(found[1], {}).get(found[2])
            return self.resolve(commit, found[3])
        found = re.fullmatch(r"/content/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        return self.serve(self.hub.repositories[found[1]][found[2]], found[3])

    def describe(self, repository: str, revision: str) -> None:
        commits = self.hub.repositories.get(repository)
        if commits is None:  # the hub does not tell a stranger whether a repository is private or is not
            return self.answer(401, {"X-Error-Message": "Invalid username or password."})
        if revision not in commits:
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        commit = commits[revision]
        said = {
            "_id": "0", "id": repository, "sha": commit.hash, "private": False, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": name} for name in commit.files],
        }  # fmt: skip
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(said).encode())

    def resolve(self, commit: Commit | None, name: str) -> None:
        """A file's address: small ones are here, large ones on a content network of another name."""
        if self.command == "HEAD":
            self.hub.requests.append(f"HEAD {name}")
            if fault := self.hub.take_fault(f"HEAD {name}"):
                return self.fail(fault)
        if commit is None or name not in commit.files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit.hash, "Accept-Ranges": "bytes"}
        if not commit.large(name):
            return self.serve(commit, name, headers | {"ETag": f'"{commit.etag(name)}"'})
        repository = next(key for key, value in self.hub.repositories.items() if commit in value.values())
        port = urlsplit(self.hub.url).port
        return self.answer(302, headers | {
            "X-Linked-Etag": f'"{commit.etag(name)}"', "X-Linked-Size": str(len(commit.files[name])),
            "Location": f"http://localhost:{port}/content/{repository}/{commit.hash}/{name}",
        })  # fmt: skip

    def serve(self, commit: Commit, name: str, headers: dict[str, str] | None = None) -> None:
        content, headers = commit.files[name], dict(headers or {})
        if self.command == "HEAD":
            return self.answer(200, headers | {"Content-Length": str(len(content))})
        asked = self.headers.get("Range", "")
        self.hub.requests.append(f"GET {name} {asked}".rstrip())
        fault = self.hub.take_fault(f"GET {name}")
        if fault == "short":
            content = content[: len(content) // 2]
        elif fault == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return None
        elif fault:
            return self.fail(fault)
        if found := re.fullmatch(r"bytes=(\d+)-", asked):
            start = int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self.answer(206, headers, content[start:])
        return self.answer(200, headers, content)

    def fail(self, fault: object) -> None:
        if fault == "hang":
            self.hub.released.wait(60)
            self.close_connection = True
            return
        status, headers = fault if isinstance(fault, tuple) else (fault, {})
        self.answer(status, headers)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that listens until the block ends."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
