"""Servers of S3 on free ports of this host, which stop with the context that started them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from holding import HANG

ACCESS_KEY = "testing-access-key"
#: No message may contain it.
SECRET_KEY = "SECRET-MARKER-0123456789"
REGION = "us-east-1"


def read_folder(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder, by their paths in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@dataclass(frozen=True)
class S3Server:
    """A server that answers."""

    url: str
    #: What reaches it from `fastshard.stores.objects.ObjectStore`.
    options: dict[str, str] = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which commands find the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def client(self) -> Any:
        """A client of boto3, which shares nothing with what is tested."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}, read_timeout=HANG, connect_timeout=HANG),
        )

    def make_bucket(self, name: str, files: dict[str, bytes]) -> None:
        client = self.client()
        client.create_bucket(Bucket=name)
        for key, content in files.items():
            client.put_object(Bucket=name, Key=key, Body=content)


def options_for(url: str) -> dict[str, str]:
    return {
        "endpoint": url,
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
        "allow_http": "true",
    }


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on; all differ."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
        return ports


def _put_one_by_one(application: Callable[..., Any]) -> Callable[..., Any]:
    """Let a server carry out one PUT at a time.

    Moto looks whether an object exists and stores it in two steps, which no store does: of two requests at
    once both would win. Bodies are read before, so that a client that stalls holds up no other.
    """
    lock = threading.Lock()

    def respond(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT":
            return application(environ, start_response)
        if length := environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        with lock:
            return application(environ, start_response)

    return respond


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """Moto's server in a thread: it keeps objects in memory and asks for no credentials."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    serving = pytest.importorskip("werkzeug.serving")

    class Quiet(serving.WSGIRequestHandler):  # type: ignore[misc,name-defined]
        def log(self, *_: object, **__: object) -> None:
            pass

    made = serving.make_server(
        "127.0.0.1",
        0,
        _put_one_by_one(server.DomainDispatcherApplication(server.create_backend_app)),
        threaded=True,
        request_handler=Quiet,
    )
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{made.server_port}"
    try:
        yield S3Server(url, options_for(url))
    finally:
        made.shutdown()
        made.server_close()
        thread.join(HANG)


@contextmanager
def seaweedfs_server() -> Iterator[S3Server]:
    """SeaweedFS's ``weed server -s3``."""
    master, volume, filer, s3 = free_ports(4)
    grpc = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="weed-") as folder:
        config = Path(folder, "s3.json")
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        data = Path(folder, "data")
        data.mkdir()
        command = [
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-master.port.grpc={grpc[0]}",
            "-master.volumeSizeLimitMB=64",
            f"-volume.port={volume}",
            f"-volume.port.grpc={grpc[1]}",
            "-volume.max=400",
            "-volume.preStopSeconds=0",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={grpc[2]}",
            f"-filer.localSocket={folder}/filer.sock",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={grpc[3]}",
            f"-s3.localSocket={folder}/s3.sock",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        with _running("weed", command, s3, Path(folder, "log")) as server:
            yield server


@contextmanager
def rclone_server() -> Iterator[S3Server]:
    """``rclone serve s3`` over a folder: a server without conditions."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="rclone-") as folder:
        data = Path(folder, "data")
        data.mkdir()
        command = ["serve", "s3", "--config", "/dev/null", "--addr", f"127.0.0.1:{port}"]
        command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(data)]
        with _running("rclone", command, port, Path(folder, "log")) as server:
            yield server


@contextmanager
def _running(program: str, arguments: Sequence[str], port: int, log: Path) -> Iterator[S3Server]:
    """Starts a server, waits until it makes a bucket, and stops it with all that it started."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": str(log.parent)},
        )
    url = f"http://127.0.0.1:{port}"
    server = S3Server(url, options_for(url))
    try:
        _wait(server, process, log)
        yield server
    finally:
        # What it keeps is thrown away, and an orderly stop takes SeaweedFS a quarter of a minute.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG)


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    end = time.monotonic() + HANG
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            server.make_bucket("ready", {"answers": b"1"})
            return
        except (BotoCoreError, ClientError):
            assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
