"""A small server of the XML interface of Google Cloud Storage, as far as reading needs it.

It shows what the client asks; it proves nothing of Google's servers.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from holding import HANG

_WHEN = "Mon, 02 Nov 2026 00:00:00 GMT"


@dataclass
class GcsServer:
    """Buckets in memory; every answer of a listing has at most ``page`` objects."""

    token: str
    page: int = 3
    buckets: dict[str, dict[str, tuple[bytes, int]]] = field(default_factory=dict)
    #: Pages of listings that were asked for.
    listings: int = 0

    def __enter__(self) -> GcsServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._generation = 1_700_000_000_000_000
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
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
        self._generation += 1
        self.buckets.setdefault(bucket, {})[key] = (content, self._generation)

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
