"""A small server of the XML interface of Google Cloud Storage, as far as reading and writing need it.

It shows what the client asks; it proves nothing of Google's servers.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from holding import HANG

#: Status, content and headers.
_Answer = tuple[int, bytes, "dict[str, str] | None"]
_WHEN = "Mon, 02 Nov 2026 00:00:00 GMT"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients leave in the middle of requests."""


@dataclass
class GcsServer:
    """Buckets in memory; every answer of a listing has at most ``page`` objects."""

    token: str
    page: int = 3
    buckets: dict[str, dict[str, tuple[bytes, int]]] = field(default_factory=dict)
    #: Pages of listings that were asked for.
    listings: int = 0
    #: Uploads in parts that have begun and have neither been completed nor aborted: their parts by number.
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def __enter__(self) -> GcsServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            do_HEAD = do_GET

            def do_PUT(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if len(body) == length:
                    server._change(self, body)

            do_POST = do_DELETE = do_PUT

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._generation = 1_700_000_000_000_000
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(HANG)

    @property
    def options(self) -> dict[str, str]:
        return {"base_url": self.url, "bearer_token": self.token, "allow_http": "true"}

    def put(self, bucket: str, key: str, content: bytes) -> None:
        with self._lock:
            self._store(self.buckets.setdefault(bucket, {}), key, content)

    def _store(self, objects: dict[str, tuple[bytes, int]], key: str, content: bytes) -> dict[str, str]:
        """Puts an object; returns the headers of the answer."""
        self._generation += 1
        objects[key] = (content, self._generation)
        return {"ETag": _etag(content), "x-goog-generation": str(self._generation)}

    def _answer(self, to: BaseHTTPRequestHandler) -> None:
        split = urlsplit(to.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        bucket, _, key = split.path.lstrip("/").partition("/")
        if to.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(to, 403, _problem("AccessDenied"))
        objects = self.buckets.get(bucket)
        if objects is None:
            return _send(to, 404, _problem("NoSuchBucket"))
        if not key:
            return self._list(to, objects, query)
        found = objects.get(unquote(key))
        if found is None or query.get("generation", str(found[1])) != str(found[1]):
            return _send(to, 404, _problem("NoSuchKey"))
        content, generation = found
        etag = _etag(content)
        headers = {"ETag": etag, "Last-Modified": _WHEN, "x-goog-generation": str(generation)}
        if to.headers.get("If-Match", etag) != etag:
            return _send(to, 412, _problem("PreconditionFailed"))
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", to.headers.get("Range", ""))
        if span is None:
            return _send(to, 200, content, headers)
        first, last = int(span[1]), min(int(span[2]), len(content) - 1)
        if first >= len(content):
            return _send(to, 416, _problem("InvalidRange"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return _send(to, 206, content[first : last + 1], headers)

    def _change(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        split = urlsplit(to.path)
        query = {n: v[0] for n, v in parse_qs(split.query, keep_blank_values=True).items()}
        bucket, _, key = split.path.lstrip("/").partition("/")
        key = unquote(key)
        if to.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(to, 403, _problem("AccessDenied"))
        with self._lock:
            objects = self.buckets.get(bucket)
            if objects is None:
                answer: _Answer = 404, _problem("NoSuchBucket"), None
            elif "uploads" in query or "uploadId" in query:
                answer = self._change_upload(to.command, objects, key, query, body)
            else:
                condition = to.headers.get("x-goog-if-generation-match")
                answer = self._change_object(to.command, objects, key, condition, body)
        return _send(to, *answer)

    def _change_object(
        self,
        method: str,
        objects: dict[str, tuple[bytes, int]],
        key: str,
        condition: str | None,
        body: bytes,
    ) -> _Answer:
        present = objects.get(key)
        if condition is not None and condition != str(present[1] if present else 0):
            return 412, _problem("PreconditionFailed"), None
        if method == "PUT":
            return 200, b"", self._store(objects, key, body)
        if method != "DELETE":
            return 400, _problem("InvalidArgument"), None
        if present is None:
            return 404, _problem("NoSuchKey"), None
        del objects[key]
        return 204, b"", None

    def _change_upload(
        self,
        method: str,
        objects: dict[str, tuple[bytes, int]],
        key: str,
        query: dict[str, str],
        body: bytes,
    ) -> _Answer:
        """An upload in parts: it begins, a part comes, it is completed or aborted."""
        if method == "POST" and "uploads" in query:
            self._generation += 1
            name = f"upload-{self._generation}"
            self.uploads[name] = {}
            begun = (
                f"<?xml version='1.0'?><InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
            return 200, begun.encode(), None
        parts = self.uploads.get(query["uploadId"])
        if parts is None:
            return 404, _problem("NoSuchUpload"), None
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, b"", {"ETag": _etag(body)}
        del self.uploads[query["uploadId"]]
        if method == "DELETE":
            return 204, b"", None
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        content = b"".join(parts[number] for number in numbers)
        headers = self._store(objects, key, content)
        done = (
            "<?xml version='1.0'?><CompleteMultipartUploadResult>"
            f"<ETag>{escape(headers['ETag'])}</ETag></CompleteMultipartUploadResult>"
        )
        return 200, done.encode(), headers

    def _list(
        self, to: BaseHTTPRequestHandler, objects: dict[str, tuple[bytes, int]], query: dict[str, str]
    ) -> None:
        self.listings += 1
        after = query.get("continuation-token", "")
        keys = [key for key in sorted(objects) if key.startswith(query.get("prefix", "")) and key > after]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-02T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(objects[key][0]))}</ETag><Size>{len(objects[key][0])}</Size></Contents>"
            for key in keys[: self.page]
        )
        more = (
            f"<NextContinuationToken>{escape(keys[self.page - 1])}</NextContinuationToken>"
            if len(keys) > self.page
            else ""
        )
        text = f"<?xml version='1.0'?><ListBucketResult>{rows}{more}</ListBucketResult>"
        _send(to, 200, text.encode())


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _problem(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{quote(code)}</Code></Error>".encode()


def _send(
    to: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str] | None = None
) -> None:
    to.send_response(status)
    for name, value in (headers or {"Content-Type": "application/xml"}).items():
        to.send_header(name, value)
    to.send_header("Content-Length", str(len(content)))
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(content)
