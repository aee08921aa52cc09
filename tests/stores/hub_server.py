"""An endpoint with the hub's interface, as far as repositories are read and get commits: two servers on free
ports, the hub and the network of storage (CDN) to which it redirects for files in LFS, and which takes them.

source: huggingface_hub hf_api.py, _commit_api.py, lfs.py, file_download.py and utils/_http.py, which send
    these requests and read these answers
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from holding import HANG

#: What the interface of a repository has for uploads.
WRITING = ("refs", "commits", "preupload", "branch", "commit")
PAGE = b"<html><title>Sign in</title></html>" + b" " * 100


@dataclass
class Repo:
    """Commits with their files, and the names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    #: The commit before each.
    parents: dict[str, str | None] = field(default_factory=dict)
    #: Names of commits that are tags.
    tags: set[str] = field(default_factory=set)

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Adds a commit, to which the names then lead."""
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.parents[sha] = self.refs.get((refs or ("main",))[0])
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
        self.faults: dict[str, list[Fault]] = {}
        #: Tokens that may only read, and what the hub says of the rights of all others.
        self.readers: set[str] = set()
        #: Objects in LFS that were uploaded, by SHA-256, and the parts of those that are not complete.
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        #: Bytes of a part of an upload; None to take objects in one.
        self.part_size: int | None = None
        #: Called before the hub answers at a place.
        self.hooks: dict[str, Callable[[], object]] = {}
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
        self.faults.setdefault(place, []).extend(faults)

    def expire(self) -> None:
        """No address that was signed is valid any more."""
        with self.lock:
            self.valid.clear()

    def at(self, place: str, method: str = "GET") -> list[Seen]:
        return [seen for seen in self.seen if (seen.place, seen.method) == (place, method)]

    def take(self, place: str) -> Fault | None:
        with self.lock:
            return self.faults[place].pop(0) if self.faults.get(place) else None

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


def list_refs(repo: Repo) -> dict[str, Any]:
    """The names of commits, as the hub lists them by their kinds."""
    refs: dict[str, Any] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
    for name, commit in repo.refs.items():
        is_request = name.startswith("refs/pr/")
        kind = "tags" if name in repo.tags else "pullRequests" if is_request else "branches"
        ref = {"branches": f"refs/heads/{name}", "tags": f"refs/tags/{name}"}.get(kind, name)
        row = {"name": name.removeprefix("refs/pr/"), "ref": ref, "targetCommit": commit}
        refs[kind].append(row)
    return refs


def find_place(method: str, path: str) -> str | None:
    """Which request of an upload it is; None for those that read files."""
    parts = path.strip("/").split("/")
    if parts[-1] in ("complete", "verify") and len(parts) == 1:
        return parts[0]
    if parts[:2] in (["api", "whoami-v2"], ["api", "validate-yaml"]):
        return {"whoami-v2": "whoami", "validate-yaml": "yaml"}[parts[1]]
    if path.endswith(".git/info/lfs/objects/batch"):
        return "batch"
    if parts[:2] == ["api", "models"] and parts[4:5] and parts[4] in WRITING:
        return parts[4] if method != "GET" or parts[4] in ("refs", "commits") else None
    return None


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

    def reset(self) -> None:
        """Closes the connection with a reset in the place of an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RD)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while length := int(self.rfile.readline(), 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return body


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

    def do_PUT(self) -> None:
        """Takes an object, or a part of one."""
        fault, body = self.note("put"), self.read_body()
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if self.fails(fault):
            return None
        if query["X-Signature"][0] not in self.hub.valid:
            return self.send(403, b"<Error><Code>AccessDenied</Code></Error>")
        sha, kind = url.path.rpartition("/")[2], fault.kind if fault else ""
        if kind == "reset":
            return self.reset()
        if kind == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        with self.hub.lock:
            if "part" in query:
                self.hub.parts.setdefault(sha, {})[int(query["part"][0])] = body
            elif kind != "lose":
                self.hub.objects[sha] = body
        return self.send(200, b"", ETag=f'"{hashlib.md5(body).hexdigest()}"')


class _Endpoint(_Handler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if (place := find_place(self.command, url.path)) is not None:
            return self.write(place, url.path, parse_qs(url.query))
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

    do_POST = do_HEAD = do_DELETE = do_GET

    def write(self, place: str, path: str, query: dict[str, list[str]]) -> None:
        """Answers a request of an upload."""
        fault, body = self.note(place), self.read_body()
        if place in self.hub.hooks:
            self.hub.hooks.pop(place)()
        if self.fails(fault):
            return None
        kind = fault.kind if fault else ""
        if kind == "reset":
            return self.reset()
        if place == "complete":
            # Its address is signed.
            return self.complete(json.loads(body))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.tokens:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if place == "whoami":
            role = "read" if token in self.hub.readers else "write"
            return self.json(None, {"name": "user", "auth": {"accessToken": {"role": role}}})
        if place == "yaml":
            return self.json(None, {"errors": [], "warnings": [{"message": "empty metadata"}]})
        if place == "verify":
            return self.send(200, b"{}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2]).removesuffix(".git")
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and name not in self.hub.tokens[token]):
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if place == "refs":
            return self.json(None, list_refs(repo))
        if place == "commits":
            found: list[str] = []
            at: str | None = repo.refs.get(unquote(parts[3]), parts[3])
            while at:
                found.append(at)
                at = repo.parents[at]
            return self.json(None, [{"id": one, "title": "", "authors": []} for one in found])
        # Objects may come from everybody, if they are for no branch.
        asks = "create_pr" in query or (place == "batch" and "ref" not in json.loads(body))
        if token in self.hub.readers or (name not in self.hub.tokens[token] and not asks):
            return self.refuse(403, "", "Forbidden: pass a token with the correct permissions")
        if place == "batch":
            return self.json(None, {"objects": [self.offer(one) for one in json.loads(body)["objects"]]})
        revision = unquote(parts[3])
        if place == "branch":
            if self.command == "DELETE":
                repo.refs.pop(revision)
                return self.send(200, b"{}")
            if revision in repo.refs:
                return self.send(409, b'{"error":"exists"}')
            start = json.loads(body).get("startingPoint") or "main"
            repo.refs[revision] = repo.refs.get(start, start)
            return self.reset() if kind == "lost" else self.send(200, b"{}")
        if revision not in repo.refs:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if place == "preupload":
            return self.preupload(repo, repo.refs[revision], json.loads(body)["files"])
        return self.make_commit(
            name, repo, revision, asks, [json.loads(line) for line in body.splitlines()], kind
        )

    def preupload(self, repo: Repo, commit: str, files: list[dict[str, Any]]) -> None:
        there = repo.commits[commit]
        ignored = there.get(".gitignore", b"").decode().split()
        rows = []
        for file in files:
            path, content = file["path"], there.get(file["path"])
            is_large = in_lfs(path)
            oid = None if content is None else entry(path, content).get("lfs", entry(path, content))["oid"]
            mode = "lfs" if is_large else "regular"
            rows.append({"path": path, "uploadMode": mode, "shouldIgnore": path in ignored, "oid": oid})
        self.json(None, {"files": rows})

    def offer(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Says where an object goes: in one, or in parts."""
        sha, size = wanted["oid"], wanted["size"]
        offered: dict[str, Any] = {"oid": sha, "size": size}
        if sha in self.hub.objects:
            return offered
        with self.hub.lock:
            self.hub.signed += 1
            signature = f"SIGNATURE{self.hub.signed}"
            self.hub.valid.add(signature)
        href = f"{self.hub.cdn}/upload/{sha}?X-Signature={signature}"
        upload: dict[str, Any] = {"href": href}
        if self.hub.part_size is not None:
            numbers = range(1, -(-size // self.hub.part_size) + 1)
            urls = {str(number): f"{href}&part={number}" for number in numbers}
            complete = f"{self.hub.endpoint}/complete?X-Signature={signature}"
            upload = {"href": complete, "header": {"chunk_size": str(self.hub.part_size), **urls}}
        return offered | {"actions": {"upload": upload, "verify": {"href": f"{self.hub.endpoint}/verify"}}}

    def complete(self, asked: dict[str, Any]) -> None:
        parts = self.hub.parts.pop(asked["oid"])
        assert [part["partNumber"] for part in asked["parts"]] == sorted(parts)
        self.hub.objects[asked["oid"]] = b"".join(parts[number] for number in sorted(parts))
        self.send(200, b"{}")

    def make_commit(
        self, name: str, repo: Repo, revision: str, asks: bool, lines: list[dict[str, Any]], kind: str
    ) -> None:
        header = lines[0]["value"]
        parent = header.get("parentCommit", repo.refs[revision])
        if parent != repo.refs[revision] and not asks:
            return self.refuse(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[parent])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] in self.hub.objects:
                files[value["path"]] = self.hub.objects[value["oid"]]
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        ref = f"refs/pr/{number}" if asks else revision
        repo.refs.setdefault(ref, parent)
        sha = repo.commit(files, ref)
        repo.parents[sha] = parent
        page = f"{self.hub.endpoint}/{name}"
        request = f"{page}/discussions/{number}" if asks else None
        made = {"commitOid": sha, "commitUrl": f"{page}/commit/{sha}", "pullRequestUrl": request}
        if kind == "lost":
            return self.reset()
        return self.json(None, {"success": True, **made})

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
