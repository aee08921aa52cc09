"""Servers that results are written to, one of each kind for a file of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import S3Server, moto_server, rclone_server, seaweedfs_server

#: The bucket that each server has.
RESULTS = "results"


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of this host: neither credentials nor proxies."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as started:
        started.make_bucket(RESULTS, {})
        # Its objects belong to the process: an earlier file of tests may have left some.
        client = started.client()
        while found := client.list_objects_v2(Bucket=RESULTS).get("Contents"):
            for one in found:
                client.delete_object(Bucket=RESULTS, Key=one["Key"])
        yield started


@pytest.fixture(scope="module")
def seaweedfs() -> Iterator[S3Server]:
    with seaweedfs_server() as started:
        started.make_bucket(RESULTS, {})
        yield started


@pytest.fixture(scope="module")
def rclone() -> Iterator[S3Server]:
    with rclone_server() as started:
        started.make_bucket(RESULTS, {})
        yield started
