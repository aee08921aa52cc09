"""An endpoint with the hub's interface, as far as repositories are read: two servers on free ports, the hub
and the network of storage (CDN) to which it redirects for files in LFS.

source: huggingface_hub hf_api.py, file_download.py and utils/_http.py, which read these answers
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from holding import HANG

PAGE = b"<html><title>Sign in</title></html>" + b" " * 100


@dataclass
class Repo:
    """Commits with their files, and the names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Adds a commit, to which the names then lead."""
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs.update(dict.fromkeys(refs or ("main",), sha))
        return sha


@dataclass(frozen=True)
class Fault:
    """What is answered once in the place of what was asked for: a status, or a ``kind`` of body."""

    kind: str = "status"
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A request as it came: to ``api``, ``resolve`` or ``cdn``."""

    place: str
    method: str
    target: str
    headers: dict[str, str]


class HubServer:
    """The state of the endpoint, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: dict[str, set[str]] = {}
        self.moved: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {"api": [], "resolve": [], "cdn": []}
        self.seen: list[Seen] = []
        self.page_size = 1000
        self.entries: list[dict[str, Any]] = []
        self.valid: set[str] = set()
        self.signed = 0
        self.connections = 0
        #: How links to the next page begin, if not with the endpoint.
        self.mirrored = ""
        self.lock = threading.Lock()
        self.released = threading.Event()

    def repo(self, name: str, **kinds: bool) -> Repo:
        return self.repos.setdefault(name, Repo(**kinds))

    def fail(self, place: str, *faults: Fault) -> None:
        self.faults[place] += faults

    def expire(self) -> None:
        """No address that was signed is valid any more."""
        with self.lock:
            self.valid.clear()

    def at(self, place: str, method: str = "GET") -> list[Seen]:
        return [seen for seen in self.seen if (seen.place, seen.method) == (place, method)]

    def take(self, place: str) -> Fault | None:
        with self.lock:
            return self.faults[place].pop(0) if self.faults[place] else None

    def sign(self, content: bytes) -> str:
        with self.lock:
            self.signed += 1
            signature = f"SIGNATURE{self.signed}"
            self.valid.add(signature)
        sha = hashlib.sha256(content).hexdigest()
        return f"{self.cdn}/blobs/{sha}?Expires=1&X-Signature={signature}"

    endpoint: str
    cdn: str


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def in_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as listings have it."""
    row: dict[str, Any] = {"type": "file", "oid": blob_id(content), "size": len(content), "path": path}
    if in_lfs(path):
        row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return row


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, words: str) -> None:
        self.send(status, b"{}", X_Error_Code=code, X_Error_Message=words)

    def note(self, place: str) -> Fault | None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.seen.append(Seen(place, self.command, self.path, headers))
        return None if self.command == "HEAD" else self.hub.take(place)

    def serve(self, content: bytes, fault: Fault | None, **headers: str) -> None:
        """Sends a file, or the range of it that is asked for; or what a fault makes of it."""
        kind = fault.kind if fault else ""
        first, last = 0, len(content) - 1
        asked = self.headers.get("Range")
        if asked and kind != "range ignored":
            start, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
            if first > last:
                return self.send(416, Content_Range=f"bytes */{len(content)}")
            if kind == "another range":
                first, last = first + 1, last + 1
            total = len(content) + (kind == "another size")
            headers["Content_Range"] = f"bytes {first}-{last}/{total}"
        body = content[first : last + 1]
        if kind == "compressed":
            headers["Content_Encoding"] = "gzip"
        if kind in ("reset", "short"):
            self.send_response(206 if asked else 200)
            for name, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if kind == "reset":
                # Closed with a reset in the place of an end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RD)
        status = 206 if "Content_Range" in headers else 200
        if kind == "longer":
            # Ends with the connection, without a length.
            self.send_response(status)
            self.send_header("Content-Range", headers["Content_Range"])
            self.end_headers()
            self.wfile.write(body + b"more")
            self.close_connection = True
            return None
        return self.send(status, body, Accept_Ranges="bytes", **headers)

    def fails(self, fault: Fault | None) -> bool:
        """Answers with a fault that needs no file."""
        if fault is None:
            return False
        if fault.kind == "status":
            self.send(fault.status, b"busy", **fault.headers)
        elif fault.kind == "page":
            self.send(200, PAGE, Content_Type="text/html; charset=utf-8", **fault.headers)
        elif fault.kind == "silent":
            self.hub.released.wait(HANG)
            self.close_connection = True
        else:
            return False
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def process_request(self, request: Any, client_address: Any) -> None:
        self.hub.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that went away, as they do where an answer is wrong."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Cdn(_Handler):
    def do_GET(self) -> None:
        fault = self.note("cdn")
        url = urlsplit(self.path)
        if self.fails(fault):
            return None
        if parse_qs(url.query)["X-Signature"][0] not in self.hub.valid:
            return self.send(403, b"<Error><Code>AccessDenied</Code></Error>")
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                for content in files.values():
                    if url.path == f"/blobs/{hashlib.sha256(content).hexdigest()}":
                        return self.serve(content, fault, ETag='"of-the-store"')
        return self.send(404)


class _Endpoint(_Handler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.posted = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        parts = url.path[1:].split("/")
        is_api = parts[:2] == ["api", "models"]
        fault = self.note("api" if is_api else "resolve")
        if is_api:
            parts = parts[2:]
        if self.fails(fault):
            return None
        name, (kind, revision, *rest) = (
            "/".join(parts[:2]),
            [*parts[2:], "revision", "main"][: max(len(parts) - 2, 2)],
        )
        if name in self.hub.moved:
            return self.send(307, b"moved", Location=self.path.replace(name, self.hub.moved[name]))
        repo = self.hub.repos.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        granted = name in self.hub.tokens.get(token, ())
        if repo is None or (repo.private and not granted):
            words = "Repository not found" if token else "Invalid username or password."
            return self.refuse(404 if token else 401, "RepoNotFound", words)
        revision = unquote(revision)
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, path = repo.commits[commit], unquote("/".join(rest))
        if not is_api:
            return self.resolve(repo, granted, commit, path, fault)
        if kind == "revision":
            siblings = [{"rfilename": one} for one in files]
            return self.json(
                fault, {"_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": siblings}
            )
        rows = [entry(one, content) for one, content in files.items()]
        folders = {one.rsplit("/", depth)[0] for one in files for depth in range(1, one.count("/") + 1)}
        rows += [
            {"type": "directory", "oid": blob_id(one.encode()), "size": 0, "path": one} for one in folders
        ]
        rows += self.hub.entries
        if kind == "paths-info":
            return self.json(fault, [row for row in rows if row["path"] in self.posted["paths"]])
        below = [row for row in rows if not path or row["path"].startswith(f"{path}/")]
        if path and not below:
            return self.refuse(404, "EntryNotFound", f"{path} does not exist")
        start = int(parse_qs(url.query).get("cursor", ["0"])[0])
        end = start + self.hub.page_size
        link = f'<{self.hub.mirrored or self.hub.endpoint}{url.path}?recursive=true&cursor={end}>; rel="next"'
        return self.json(fault, below[start:end], link if end < len(below) else "")

    do_POST = do_HEAD = do_GET

    def json(self, fault: Fault | None, value: Any, link: str = "") -> None:
        headers = {"Link": link} if link else {}
        self.serve(json.dumps(value).encode(), fault, Content_Type="application/json", **headers)

    def resolve(self, repo: Repo, granted: bool, commit: str, path: str, fault: Fault | None) -> None:
        if repo.gated and not granted:
            status = 403 if self.headers.get("Authorization") else 401
            return self.refuse(status, "GatedRepo", "Access to model is restricted.")
        content = repo.commits[commit].get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        stated = {"X_Repo_Commit": commit}
        if not in_lfs(path):
            return self.serve(content, fault, ETag=f'"{blob_id(content)}"', **stated)
        stated["X_Linked_Size"] = str(len(content))
        stated["X_Linked_Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        location = self.hub.sign(content)
        return self.send(
            302, b"Found", **{"Location": location, **stated, **(fault.headers if fault else {})}
        )


@contextmanager
def serving_hub() -> Iterator[HubServer]:
    """Starts the endpoint and its CDN, and stops both."""
    hub = HubServer()
    servers = []
    for handler, address in ((_Endpoint, "127.0.0.1"), (_Cdn, "localhost")):
        server = _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": hub}))
        server.hub = hub
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append((server, f"http://{address}:{server.server_port}"))
    (_, hub.endpoint), (_, hub.cdn) = servers
    try:
        yield hub
    finally:
        hub.released.set()
        for server, _ in servers:
            server.shutdown()
            server.server_close()
