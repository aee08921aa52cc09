"""A server of S3 that serves a folder of this host behind a latency: lists, and reads of ranges.

It serves sparse files of any size: no server that keeps its own copy can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


def _describe(folder: Path, path: Path) -> str:
    status = path.stat()
    moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
    key = escape(path.relative_to(folder).as_posix())
    return (
        f"<Contents><Key>{key}</Key><LastModified>{moment}</LastModified><ETag>&quot;{status.st_mtime_ns}&quot;"
        f"</ETag><Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


@contextmanager
def serve_folder(folder: Path, bucket: str, latency: float) -> Iterator[tuple[str, list[int]]]:
    """Serve a folder as a bucket; the list gets the bytes of each answer.

    Args:
        folder: the folder.
        bucket: the bucket's name.
        latency: seconds until each answer.
    """
    served: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A body that follows its header must not wait for the client's acknowledgement.
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            time.sleep(latency)
            served.append(len(content))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            key = unquote(parts.path).removeprefix(f"/{bucket}").strip("/")
            if not key:
                return self._list(parse_qs(parts.query))
            path = folder / key
            if not path.is_file():
                return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            status = path.stat()
            etag = f'"{status.st_mtime_ns}"'
            if self.headers.get("If-Match", etag) != etag:
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            first, last = 0, status.st_size - 1
            if asked := self.headers.get("Range"):
                low, high = asked.removeprefix("bytes=").split("-")
                first, last = int(low), min(int(high or last), last)
            with path.open("rb") as file:
                file.seek(first)
                content = file.read(last + 1 - first)
            moment = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime))
            headers = {"ETag": etag, "Last-Modified": moment}
            if asked:
                headers["Content-Range"] = f"bytes {first}-{last}/{status.st_size}"
            self._answer(206 if asked else 200, content, headers)

        def _list(self, query: dict[str, list[str]]) -> None:
            prefix = query.get("prefix", [""])[0]
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            found = [path for path in files if path.relative_to(folder).as_posix().startswith(prefix)]
            entries = "".join(_describe(folder, path) for path in found)
            answer = (
                '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
                f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            )
            self._answer(200, answer.encode(), {"Content-Type": "application/xml"})

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # 64 connections that come at once are taken: one that is refused comes again after a second.
        request_queue_size = 1024

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served
    finally:
        server.shutdown()
        server.server_close()
