"""A result in a store appears whole or not at all, whatever fails and whoever dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from bucket_store import BucketStore, buckets_served
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.conversion import prefix_leftovers
from fastshard.conversion.distributed import split_runs
from fastshard.stores import claims, registry, result_prefix
from holding import HANG
from safetensors.numpy import save_file

#: Elements of a tensor: files are large enough to be recorded as complete.
ELEMENTS = 300_000
SHARDS = 3
LAST = "model.safetensors.index.json"
MANIFEST = "fastshard.manifest.json"
CLAIM = ".fastshard/claim"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BucketStore]]:
    monkeypatch.setattr(result_prefix, "_PAUSE", 0.0)
    monkeypatch.setattr(claims, "BEAT", 0.05)
    with buckets_served() as bucket:
        yield bucket


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def write_source(folder: Path, value: float = 0.0) -> Path:
    folder.mkdir()
    random = np.random.default_rng(7)
    tensors = {f"layers.{i}.weight": random.standard_normal(ELEMENTS, np.float32) for i in range(SHARDS)}
    tensors["layers.0.weight"][5] += value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def merge(source: Path, out: object, **options: Any) -> Any:
    return fastshard.merge(source, out, max_shard_size="1500KB", **options)


def read_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def address_of(path: Path) -> str:
    return f"bucket://{path}"


def assert_is_result(path: Path, source: Path, tmp_path: Path) -> None:
    """The prefix has exactly what a run on a disk writes."""
    expected = tmp_path / "on-disk"
    if not expected.exists():
        merge(source, expected)
    on_disk, stored = read_files(expected), read_files(path)
    manifests = [json.loads(files.pop(MANIFEST)) for files in (on_disk, stored)]
    assert stored == on_disk
    assert len(stored) == SHARDS + 1
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    names = [[(f["name"], f["size"], f.get("identity")) for f in m["files"]] for m in manifests]
    assert names[0] == names[1]
    assert fastshard.verify(address_of(path)).ok


def assert_nobody_takes_it_for_a_result(path: Path) -> None:
    """The prefix is empty, or readers refuse it."""
    if not read_files(path):
        return
    with pytest.raises(FastshardError) as caught:
        fastshard.open(address_of(path))
    assert caught.value.code == codes.LEFTOVER_RUN


def test_a_result_is_the_same_as_on_a_disk(bucket: type[BucketStore], source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    bucket.hook = staticmethod(lambda what, path, done: seen.append((what, path)) if done else None)
    merge(source, address_of(tmp_path / "out"))
    written = [path for what, path in seen if what in ("put", "upload") and path != CLAIM]
    files = [f"model-0000{i}-of-0000{SHARDS}.safetensors" for i in range(1, SHARDS + 1)]
    assert sorted(path for path in written if ".fastshard" not in path)[-2:] == [files[-1], LAST]
    assert written[-2:] == [MANIFEST, LAST]
    first = next(path for what, path in seen if what == "put")
    assert first == CLAIM
    assert seen[-1] == ("remove", CLAIM)
    bucket.hook = staticmethod(lambda what, path, done: None)
    assert_is_result(tmp_path / "out", source, tmp_path)


def test_the_only_file_appears_last(bucket: type[BucketStore], source: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    bucket.hook = staticmethod(
        lambda what, path, done: seen.append(path) if done and what in ("put", "upload") else None
    )
    fastshard.merge(source, address_of(tmp_path / "out"))
    assert [path for path in seen if path != CLAIM] == [MANIFEST, "model.safetensors"]
    fastshard.merge(source, tmp_path / "on-disk")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "on-disk" / name).read_bytes()


def test_the_marker_of_an_orbax_step_appears_last(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    """Orbax's readers of a bucket take a step for complete as soon as it has the marker."""
    seen: list[str] = []
    bucket.hook = staticmethod(
        lambda what, path, done: seen.append(path) if done and what in ("put", "upload") else None
    )
    fastshard.convert(source, address_of(tmp_path / "out"), to="orbax")
    item, step = [path for path in seen if path.endswith("/commit_success.txt")]
    written = [path for path in seen if not path.startswith(".fastshard/")]
    assert written[-3:] == [MANIFEST, item, step] and step.count("/") == item.count("/") - 1
    assert fastshard.verify(tmp_path / "out").ok


def test_an_occupied_prefix_is_refused_and_stays(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(FastshardError, match=r"notes\.txt") as caught:
        merge(source, address_of(tmp_path / "out"))
    assert caught.value.code == codes.OUT_EXISTS
    assert read_files(tmp_path / "out") == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overwrite": True}, "--overwrite"),
        ({"sparse": True}, "--sparse"),
        ({"rank": 0, "world": 2}, "--rank"),
        ({"rank": 0, "world": 2, "node_local": True}, "--node-local"),
    ],
)
def test_what_a_store_does_not_take_is_refused(
    bucket: type[BucketStore], source: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(FastshardError, match=words) as caught:
        merge(source, address_of(tmp_path / "out"), **options)
    assert caught.value.code == codes.UNSUPPORTED
    assert not (tmp_path / "out").exists()


def test_a_result_that_is_wrong_leaves_nothing(bucket: type[BucketStore], tmp_path: Path) -> None:
    source = write_source(tmp_path / "broken", np.nan)
    with pytest.raises(FastshardError) as caught:
        merge(source, address_of(tmp_path / "out"))
    assert caught.value.code == codes.NON_FINITE
    assert read_files(tmp_path / "out") == {}


def test_a_store_without_conditions_is_accepted_by_name_alone(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    bucket.has_conditions = False
    with pytest.raises(FastshardError, match="overwrites an object") as caught:
        merge(source, address_of(tmp_path / "out"))
    assert caught.value.code == codes.UNSUPPORTED
    assert caught.value.findings[0].run == ("--accept unconditional",)
    assert read_files(tmp_path / "out") == {}
    manifest = merge(source, address_of(tmp_path / "out"), accept=["unconditional"])
    assert [f.severity for f in manifest.findings if "conditional writes" in f.message] == ["warning"]
    assert_is_result(tmp_path / "out", source, tmp_path)


def test_an_object_that_appears_or_is_replaced_prevents_the_result(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    first = f"model-00001-of-0000{SHARDS}.safetensors"
    for name, words in ((first, "was replaced"), ("other.safetensors", "did not write")):
        out = tmp_path / f"out-{name}"

        def spoil(what: str, path: str, done: bool, out: Path = out, name: str = name) -> None:
            if what == "put" and done and path.endswith(f"done/{first}"):
                (out / name).write_bytes((out / first).read_bytes())
                os.utime(out / name, ns=(1, 1))

        bucket.hook = staticmethod(spoil)
        with pytest.raises(FastshardError, match=words) as caught:
            merge(source, address_of(out))
        assert caught.value.code == codes.PUBLISH_CONFLICT
        bucket.hook = staticmethod(lambda what, path, done: None)
        left = set(read_files(out))
        # What another has put there is not this run's to remove.
        assert left == (set() if name == first else {name})


class Broken(Exception):
    """What a client of a store raises unexpectedly."""


def count_operations(bucket: type[BucketStore], source: Path, out: Path) -> int:
    seen: list[str] = []
    bucket.hook = staticmethod(lambda what, path, done: seen.append(what))
    merge(source, address_of(out), threads=1)
    return len(seen)


@pytest.mark.parametrize("error", ["io", "broken"])
def test_whatever_operation_fails_the_result_is_whole_or_nobody_takes_it_for_one(
    bucket: type[BucketStore], source: Path, tmp_path: Path, error: str
) -> None:
    total = count_operations(bucket, source, tmp_path / "counted")
    assert total > 30
    outcomes = set()
    for at in range(total):
        out = tmp_path / f"out{at}"
        seen = [0]

        def fail(what: str, path: str, done: bool, at: int = at, seen: list[int] = seen) -> None:
            seen[0] += 1
            if seen[0] - 1 == at:
                if error == "broken":
                    raise Broken
                raise FastshardError.of(codes.IO, "the network is down", file=path)

        bucket.hook = staticmethod(fail)
        try:
            manifest = merge(source, address_of(out), threads=1)
            outcomes.add("published")
            if (out / CLAIM).exists():
                # It could not be removed.
                assert codes.LEFTOVER_RUN in [finding.code for finding in manifest.findings]
                bucket.hook = staticmethod(lambda what, path, done: None)
                assert fastshard.verify(address_of(out)).ok
                merge(source, address_of(out), resume=True)
        except FastshardError as failed:
            assert failed.code in (codes.IO, codes.INTERNAL), failed
            outcomes.add(failed.code)
            bucket.hook = staticmethod(lambda what, path, done: None)
            assert_nobody_takes_it_for_a_result(out)
            merge(source, address_of(out), resume=True)
        except Broken:
            outcomes.add("raised")
            bucket.hook = staticmethod(lambda what, path, done: None)
            assert_nobody_takes_it_for_a_result(out)
            merge(source, address_of(out), resume=True)
        bucket.hook = staticmethod(lambda what, path, done: None)
        assert_is_result(out, source, tmp_path)
    assert "published" in outcomes


CHILD = """
import os, signal, sys
sys.path[:0] = {paths!r}
import fastshard
from bucket_store import BucketStore, serve_buckets
from fastshard.conversion.distributed import split_runs
from fastshard.stores import claims, registry, result_prefix
serve_buckets()
seen, at = [0], int(sys.argv[3])
def die(what, path, done):
    seen[0] += 1
    if seen[0] - 1 == at:
        os.kill(os.getpid(), signal.SIGKILL)
BucketStore.hook = staticmethod(die)
resume = sys.argv[4] == "resume"
fastshard.merge(sys.argv[1], "bucket://" + sys.argv[2], max_shard_size="1500KB", threads=1, resume=resume)
"""


def run_child(source: Path, out: Path, at: int, resume: bool = False) -> int:
    paths = [path for path in sys.path if path]
    command = [sys.executable, "-c", CHILD.format(paths=paths), source, out, at, "resume" if resume else ""]
    done = subprocess.run([str(word) for word in command], timeout=HANG, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
def test_whenever_a_run_is_killed_it_is_continued(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    total = count_operations(bucket, source, tmp_path / "counted")
    bucket.hook = staticmethod(lambda what, path, done: None)
    for at in range(total):
        out = tmp_path / f"out{at}"
        if run_child(source, out, at) == 0:
            # Its threads took another order.
            continue
        claimed = (out / CLAIM).exists()
        if not (claimed and (out / LAST).exists()):
            assert_nobody_takes_it_for_a_result(out) if claimed or not (out / LAST).exists() else None
        # Killed once more while it is continued.
        run_child(source, out, at // 2, resume=True) if claimed else None
        if (out / CLAIM).exists() or not (out / LAST).exists():
            merge(source, address_of(out), resume=True)
        assert_is_result(out, source, tmp_path)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave_two_files(bucket: type[BucketStore], source: Path, out: Path) -> None:
    """Interrupt a run once two files are recorded as complete."""
    recorded: list[str] = []

    def stop(what: str, path: str, done: bool) -> None:
        if what == "put" and done and "/done/" in path:
            recorded.append(path)
        if what == "upload" and not done and path.startswith("model-00003"):
            wait_until(lambda: len(recorded) == 2)
            raise FastshardError.of(codes.IO, "the network is down", file=path)

    bucket.hook = staticmethod(stop)
    with pytest.raises(FastshardError) as caught:
        merge(source, address_of(out), threads=1)
    assert [f.code for f in caught.value.findings] == [codes.IO, codes.LEFTOVER_RUN]
    assert caught.value.findings[1].run[0] == "--resume"
    bucket.hook = staticmethod(lambda what, path, done: None)


def test_a_run_that_is_continued_uploads_what_is_not_complete(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    leave_two_files(bucket, source, tmp_path / "out")
    assert_nobody_takes_it_for_a_result(tmp_path / "out")
    uploads: list[str] = []
    bucket.hook = staticmethod(
        lambda what, path, done: uploads.append(path) if what == "upload" and done else None
    )
    merge(source, address_of(tmp_path / "out"), resume=True)
    assert uploads == [f"model-0000{SHARDS}-of-0000{SHARDS}.safetensors"]
    assert_is_result(tmp_path / "out", source, tmp_path)


def test_a_complete_object_that_changed_is_uploaded_again(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    leave_two_files(bucket, source, out)
    (out / f"model-00001-of-0000{SHARDS}.safetensors").write_bytes(b"of somebody else")
    merge(source, address_of(out), resume=True)
    assert_is_result(out, source, tmp_path)


def test_without_resume_and_with_another_plan_a_claim_is_refused(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    leave_two_files(bucket, source, out)
    before = read_files(out)
    for options in ({}, {"resume": True, "exclude": ["layers.1.*"]}):
        with pytest.raises(FastshardError) as caught:
            merge(source, address_of(out), **options)
        assert caught.value.code == codes.LEFTOVER_RUN
        assert caught.value.findings[0].run[-1].startswith(f"fastshard clean {address_of(out)} --abandon")
    assert read_files(out) == before


def test_the_claim_of_a_live_run_is_not_taken_over(
    bucket: type[BucketStore], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    store = BucketStore(address_of(out), {})
    alive = result_prefix.ResultPrefix(store, "0" * 64, ["a"], "a", beat=0.01)

    def sleep(_: float) -> None:
        # However long a beat takes on a busy machine.
        before = (out / CLAIM).read_bytes()
        wait_until(lambda: (out / CLAIM).read_bytes() != before)

    with pytest.raises(FastshardError) as caught:
        result_prefix.ResultPrefix(store, "0" * 64, ["a"], "a", resume=True, beat=0.05, sleep=sleep)
    assert caught.value.code == codes.LOCKED
    alive.leave()
    # Nobody beats any more, although the process lives.
    heir = result_prefix.ResultPrefix(store, "0" * 64, ["a"], "a", resume=True, beat=0.01)
    # The first one finds out, and removes nothing of the other's.
    assert alive.check([]) is not None
    assert alive.abandon() == []
    assert (out / CLAIM).exists()
    assert heir.abandon() == []
    assert read_files(out) == {}


def test_of_two_that_claim_at_once_one_wins(bucket: type[BucketStore], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other: list[result_prefix.ResultPrefix] = []

    def overtake(what: str, path: str, done: bool) -> None:
        if what == "put" and path == CLAIM and not done and not other:
            other.append(None)  # type: ignore[arg-type]
            other[0] = result_prefix.ResultPrefix(BucketStore(address_of(out), {}), "0" * 64, ["a"], "a")

    bucket.hook = staticmethod(overtake)
    with pytest.raises(FastshardError, match="another run has claimed") as caught:
        merge(source, address_of(out))
    assert caught.value.code == codes.OUT_EXISTS
    assert other[0].abandon() == []


def test_an_interrupted_run_says_how_it_is_continued(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    def wait(what: str, path: str, done: bool) -> None:
        # The run is still at work when the interrupt comes.
        if what == "upload" and not done:
            time.sleep(0.3)

    bucket.hook = staticmethod(wait)
    with pytest.raises(KeyboardInterrupt) as caught:
        merge(source, address_of(out), progress=interrupt)
    bucket.hook = staticmethod(lambda what, path, done: None)
    codes_found = [finding.code for finding in caught.value.findings]
    assert codes.LEFTOVER_RUN in codes_found
    assert_nobody_takes_it_for_a_result(out)
    merge(source, address_of(out), resume=True)
    assert_is_result(out, source, tmp_path)


def test_a_destination_inside_the_source_is_refused(
    bucket: type[BucketStore], source: Path, tmp_path: Path
) -> None:
    merge(source, address_of(tmp_path / "out"))
    with pytest.raises(FastshardError) as caught:
        merge(address_of(tmp_path / "out"), address_of(tmp_path / "out/inside"))  # type: ignore[arg-type]
    assert caught.value.code == codes.OUT_INSIDE_SOURCE


def test_clean_removes_what_no_run_continues(
    bucket: type[BucketStore], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_leftovers, "_LOOK", 0.01)
    out = tmp_path / "out"
    assert fastshard.clean(address_of(out)) == []
    leave_two_files(bucket, source, out)
    before = read_files(out)
    (left,) = fastshard.clean(address_of(out), timeout=0.1)
    assert left.fate == "resumable"
    assert left.bytes == sum(map(len, before.values()))
    with pytest.raises(FastshardError) as caught:
        fastshard.clean(address_of(out), abandon="0" * 16)
    assert caught.value.code == codes.NO_SUCH_PATH
    assert left.run is not None
    (dry,) = fastshard.clean(address_of(out), abandon=left.run[:16], timeout=0.1, dry_run=True)
    assert dry.fate == "removed"
    assert read_files(out) == before
    (out / "notes.txt").write_text("mine")
    (gone,) = fastshard.clean(address_of(out), abandon=left.run[:16], timeout=0.1)
    assert gone.fate == "removed"
    # What the run did not write stays.
    assert read_files(out) == {"notes.txt": b"mine"}


def test_clean_leaves_a_run_at_work_and_a_result_in_place(
    bucket: type[BucketStore], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_leftovers, "_LOOK", 0.05)
    out = tmp_path / "out"
    alive = result_prefix.ResultPrefix(BucketStore(address_of(out), {}), "0" * 64, ["a"], "a", beat=0.01)
    (left,) = fastshard.clean(address_of(out), timeout=HANG)
    assert left.fate == "at_work"
    assert (out / CLAIM).exists()
    alive.abandon()
    merge(source, address_of(out))
    (out / CLAIM).parent.mkdir(exist_ok=True)
    claim = claims.Claim("0" * 32, "0" * 64, "{}", (LAST,), LAST)
    (out / CLAIM).write_bytes(claim.to_bytes())
    (left,) = fastshard.clean(address_of(out))
    assert left.fate == "removed"
    assert_is_result(out, source, tmp_path)


def test_storage_options_reach_the_stores_of_a_call_and_nothing_else(
    bucket: type[BucketStore],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[dict[str, str]] = []

    class Recording(BucketStore):
        def __init__(self, address: str, options: Any) -> None:
            seen.append(dict(options))
            super().__init__(address, options)

    monkeypatch.setitem(registry.OPENERS, "bucket", Recording)
    monkeypatch.setitem(registry.WRITERS, "bucket", Recording)
    caplog.set_level(logging.DEBUG, logger="fastshard")
    settings = {"endpoint": "https://example.org", "secret_access_key": "SECRET-MARKER"}
    merge(source, address_of(tmp_path / "one"), storage_options=settings)
    manifest = merge(address_of(tmp_path / "one"), address_of(tmp_path / "two"), storage_options=settings)
    fastshard.open(address_of(tmp_path / "two"), storage_options=settings)
    fastshard.verify(address_of(tmp_path / "two"), storage_options=settings)
    assert fastshard.clean(address_of(tmp_path / "two"), storage_options=settings) == []
    assert len(seen) > 4
    assert all(options == settings for options in seen)
    texts = [
        *read_files(tmp_path / "two").values(),
        json.dumps(manifest.document).encode(),
        caplog.text,
    ]
    assert not any("SECRET-MARKER" in str(text) for text in texts)
    for wrong in ({"endpoint": 7}, ["endpoint=x"], "SECRET-MARKER"):
        with pytest.raises(FastshardError, match="storage_options") as caught:
            fastshard.open(address_of(tmp_path / "two"), storage_options=wrong)
        assert caught.value.code == codes.USAGE
        assert "SECRET-MARKER" not in str(caught.value)
    with pytest.raises(FastshardError, match="storage_options"):
        split_runs.split(source, tmp_path / "three", None, parts=2, storage_options=settings)
