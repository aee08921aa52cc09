"""Stores that results are written to: each keeps the promises of `writable_suite`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from gcs_server import GcsServer
from holding import HANG
from servers import S3Server
from writable_suite import UnconditionalPromises, WritableFixture, WritablePromises

pytest.importorskip("obstore")

from fastshard.stores.object_writer import WritableObjectStore

BUCKET = "results"
_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("no_settings")


def made_of(server: S3Server) -> WritableFixture:
    """An empty prefix of the one bucket of a server, beside that of another run."""
    client = server.client()
    root = f"some/run-{next(_numbers)}"
    client.put_object(Bucket=BUCKET, Key=f"{root}-2/other", Body=b"of another run")

    def read() -> dict[str, bytes]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{root}/")
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        bodies = {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
        return {key.removeprefix(f"{root}/"): body for key, body in bodies.items()}

    def count_uploads() -> int:
        try:
            found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        except client.exceptions.NoSuchUpload:
            # Rclone's word for none, before any has begun.
            return 0
        return sum(entry["Key"].startswith(f"{root}/") for entry in found)

    return WritableFixture(
        WritableObjectStore(f"s3://{BUCKET}/{root}", server.options, deadline=HANG, upload_deadline=HANG),
        read,
        lambda path, content: client.put_object(Bucket=BUCKET, Key=f"{root}/{path}", Body=content),
        count_uploads,
    )


class TestMoto(WritablePromises):
    @pytest.fixture
    def made(self, moto: S3Server) -> WritableFixture:
        return made_of(moto)


@pytest.mark.slow
class TestSeaweedFS(WritablePromises):
    @pytest.fixture
    def made(self, seaweedfs: S3Server) -> WritableFixture:
        return made_of(seaweedfs)


class TestGcs(WritablePromises):
    @pytest.fixture
    def made(self) -> Iterator[WritableFixture]:
        with GcsServer("BEARER-MARKER-0123456789") as server:
            server.put(BUCKET, "run-2/other", b"of another run")
            objects = server.buckets[BUCKET]
            yield WritableFixture(
                WritableObjectStore(
                    f"gs://{BUCKET}/run", server.options, deadline=HANG, upload_deadline=HANG
                ),
                lambda: {
                    key.removeprefix("run/"): content
                    for key, (content, _) in objects.items()
                    if key.startswith("run/")
                },
                lambda path, content: server.put(BUCKET, f"run/{path}", content),
                lambda: len(server.uploads),
            )


@pytest.mark.slow
class TestRclone(UnconditionalPromises):
    @pytest.fixture
    def made(self, rclone: S3Server) -> WritableFixture:
        return made_of(rclone)
