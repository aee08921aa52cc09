"""A proxy in front of a server, which spoils answers on demand, and a server that notes who comes.

.. code-block:: python

    with FaultProxy(server.url) as proxy:
        proxy.inject(Fault.STATUS_503, times=2)
        ...
        assert [request.method for request in proxy.requests] == ["GET", "GET", "GET"]
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from holding import HANG


class Fault(Enum):
    """What happens to an answer."""

    STATUS_500 = "an internal error"
    STATUS_503 = "S3's request to slow down"
    STATUS_403 = "no permission to read"
    REGION_301 = "the bucket is in another region, and no address is named"
    REGION_400 = "the signature is for another region"
    RESET = "the connection is reset in the middle of the body"
    SHORT = "the connection ends in the middle of the body"
    LYING_LENGTH = "the length that is stated is that of half of the body, which is all that comes"
    LONG_BODY = "the answer to a range states more bytes than were asked for, and has them"
    RANGE_IGNORED = "all of the file comes with status 200"
    CONDITION_IGNORED = "conditions of the request are left out"
    PARTIAL_206 = "a part that comes with status 200 has status 206"
    NO_ETAG = "the ETag is left out"
    WEAK_ETAG = "the ETag is a weak one, which meets no condition"
    NO_MARKS = "the ETag and the time of the last change are left out"
    HTML = "a page comes with status 200"
    REDIRECT_HOST = "another host is named"
    REDIRECT_FILE = "a file of this machine is named"
    DRIP = "one byte comes, and no other until the proxy ends"
    SILENT = "nothing comes until the proxy ends"
    LOST_REQUEST = "the connection is reset in the middle of the body of the request"
    LOST_ANSWER = "the server has done what it was asked to, and the connection is reset before it answers"
    NO_LIST = "the list has no entries, though there are objects"
    SHORT_LIST = "the list lacks its last entry"


@dataclass(frozen=True)
class Request:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]


def is_read(request: Request) -> bool:
    """Whether a request asks for the content of a file, not for a list of files."""
    return request.method == "GET" and "list-type=" not in request.path


def is_list(request: Request) -> bool:
    """Whether a request asks for a list of files."""
    return request.method == "GET" and "list-type=" in request.path


def is_put_of(name: str) -> Callable[[Request], bool]:
    """Whether a request puts a whole object whose key ends in a name."""

    def matches(request: Request) -> bool:
        path, _, query = request.path.partition("?")
        return request.method == "PUT" and "partNumber=" not in query and unquote(path).endswith(name)

    return matches


def is_part(request: Request) -> bool:
    """Whether a request puts a part of an upload."""
    return request.method == "PUT" and "partNumber=" in request.path


def is_begin(request: Request) -> bool:
    """Whether a request begins an upload in parts."""
    return request.method == "POST" and "uploads" in request.path.partition("?")[2].split("=")[0]


def is_removal(request: Request) -> bool:
    """Whether a request removes objects."""
    return request.method == "DELETE" or (request.method == "POST" and request.path.endswith("?delete"))


def is_completion(request: Request) -> bool:
    """Whether a request completes an upload in parts."""
    return request.method == "POST" and "uploadId=" in request.path


@dataclass
class _Injected:
    fault: Fault
    times: int | None
    when: Callable[[Request], bool]
    to: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients leave in the middle of answers."""


@dataclass
class Recorder:
    """A server that notes requests, and answers all with one small file."""

    content: bytes = b"from another host"
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                recorder.requests.append(Request(self.command, self.path, _lower(self.headers)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(recorder.content)))
                self.send_header("ETag", '"another"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(recorder.content)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(HANG)


class FaultProxy:
    """Passes requests on to a server, and spoils the answers that it is asked to spoil."""

    def __init__(self, upstream: str, rate: int | None = None) -> None:
        """``rate`` is the most bytes per second that bodies of requests are taken with, all together."""
        split = urlsplit(upstream)
        assert split.hostname and split.port
        self._upstream = (split.hostname, split.port)
        self._rate = rate
        self._taking = threading.Lock()
        self._injected: list[_Injected] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.requests: list[Request] = []
        #: Requests of which something was spoiled.
        self.spoiled: list[Request] = []

    def inject(
        self,
        fault: Fault,
        times: int | None = None,
        when: Callable[[Request], bool] = is_read,
        to: str = "",
    ) -> None:
        """Spoils the next answers, or all from now on, to the requests for which ``when`` is true."""
        with self._lock:
            self._injected.append(_Injected(fault, times, when, to))

    def clear(self) -> None:
        """Spoils no more, and forgets the requests."""
        with self._lock:
            self._injected.clear()
            self.requests.clear()
            self.spoiled.clear()

    def _take(self, request: Request) -> _Injected | None:
        with self._lock:
            self.requests.append(request)
            for injected in self._injected:
                if injected.times != 0 and injected.when(request):
                    if injected.times is not None:
                        injected.times -= 1
                    self.spoiled.append(request)
                    return injected
        return None

    def __enter__(self) -> FaultProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                request = Request(self.command, self.path, _lower(self.headers))
                length = int(self.headers.get("Content-Length") or 0)
                injected = proxy._take(request)
                if injected is not None and injected.fault is Fault.LOST_REQUEST:
                    self.rfile.read(length // 2)
                    return _reset(self)
                body = proxy._take_body(self.rfile, length)
                return proxy._answer(self, request, body, injected)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(HANG)

    def _take_body(self, stream: Any, length: int) -> bytes:
        if self._rate is None:
            return bytes(stream.read(length))
        body = b""
        while len(body) < length:
            with self._taking:
                piece = stream.read(min(length - len(body), 64 << 10))
                self._ended.wait(len(piece) / self._rate)
            if not piece:
                break
            body += piece
        return body

    def _fetch(self, request: Request, body: bytes, headers: dict[str, str]) -> tuple[Any, bytes]:
        connection = http.client.HTTPConnection(*self._upstream, timeout=HANG)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name not in ("connection", "transfer-encoding"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _answer(self, to: Any, request: Request, body: bytes, injected: _Injected | None) -> None:
        fault = injected.fault if injected else None
        match fault:
            case Fault.STATUS_500:
                return _send(to, 500, {"Content-Type": "text/plain"}, b"an internal error")
            case Fault.STATUS_503:
                text = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce</Message></Error>"
                return _send(to, 503, {"Content-Type": "application/xml"}, text)
            case Fault.STATUS_403:
                text = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>No</Message></Error>"
                return _send(to, 403, {"Content-Type": "application/xml"}, text)
            case Fault.REGION_301:
                headers = {"Content-Type": "application/xml", "x-amz-bucket-region": "eu-west-1"}
                text = b"<?xml version='1.0'?><Error><Code>PermanentRedirect</Code></Error>"
                return _send(to, 301, headers, text)
            case Fault.REGION_400:
                text = (
                    b"<?xml version='1.0'?><Error><Code>AuthorizationHeaderMalformed</Code><Message>The "
                    b"region 'us-east-1' is wrong; expecting 'eu-west-1'</Message>"
                    b"<Region>eu-west-1</Region></Error>"
                )
                return _send(to, 400, {"Content-Type": "application/xml"}, text)
            case Fault.HTML:
                page = b"<!doctype html><html><body>Sign in to this network</body></html>"
                headers = {
                    "Content-Type": "text/html",
                    "ETag": '"page"',
                    "Last-Modified": "Mon, 02 Nov 2026 00:00:00 GMT",
                }
                return _send(to, 200, headers, page)
            case Fault.REDIRECT_HOST | Fault.REDIRECT_FILE:
                assert injected
                target = f"{injected.to}{request.path}" if fault is Fault.REDIRECT_HOST else injected.to
                return _send(to, 307, {"Location": target}, b"")
            case Fault.SILENT:
                self._ended.wait(HANG)
                to.close_connection = True
                return None
        headers = dict(request.headers)
        if fault is Fault.RANGE_IGNORED:
            headers.pop("range", None)
        elif fault is Fault.CONDITION_IGNORED:
            headers = {name: value for name, value in headers.items() if not name.startswith("if-")}
        elif fault is Fault.LONG_BODY:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            headers["range"] = f"bytes={first}-{int(last) + 1}"
        answer, content = self._fetch(request, body, headers)
        if fault is Fault.LOST_ANSWER:
            return _reset(to)
        if fault in (Fault.NO_LIST, Fault.SHORT_LIST):
            entries = list(re.finditer(rb"<Contents>.*?</Contents>", content, re.DOTALL))
            for entry in reversed(entries if fault is Fault.NO_LIST else entries[-1:]):
                content = content[: entry.start()] + content[entry.end() :]
        passed = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        length = int(answer.getheader("Content-Length") or len(content))
        if fault in (Fault.NO_LIST, Fault.SHORT_LIST):
            length = len(content)
        if fault is Fault.LYING_LENGTH:
            content = content[: len(content) // 2]
            length = len(content)
        left_out = (
            {
                Fault.NO_ETAG: ("etag",),
                Fault.NO_MARKS: ("etag", "last-modified"),
            }.get(fault, ())
            if fault
            else ()
        )
        passed = {
            name: value for name, value in passed.items() if name.lower() not in ("content-length", *left_out)
        }
        if fault is Fault.WEAK_ETAG:
            passed = {n: f"W/{v}" if n.lower() == "etag" else v for n, v in passed.items()}
        if fault is Fault.PARTIAL_206 and any(name.lower() == "content-range" for name in passed):
            return _send(to, 206, passed, content, length)
        if fault in (Fault.RESET, Fault.SHORT, Fault.DRIP):
            _send(to, answer.status, passed, content[: 1 if fault is Fault.DRIP else length // 2], length)
            to.wfile.flush()
            to.close_connection = True
            if fault is Fault.DRIP:
                self._ended.wait(HANG)
            elif fault is Fault.RESET:
                return _reset(to)
            return None
        return _send(to, answer.status, passed, content, length)


def _reset(to: Any) -> None:
    """Closes without the usual exchange: the other end sees a reset."""
    to.close_connection = True
    to.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The handler's files hold the socket too.
    to.connection.shutdown(socket.SHUT_RD)
    to.connection.close()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _send(to: Any, status: int, headers: dict[str, str], content: bytes, length: int | None = None) -> None:
    to.send_response(status)
    for name, value in headers.items():
        to.send_header(name, value)
    to.send_header("Content-Length", str(len(content) if length is None else length))
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(content)
