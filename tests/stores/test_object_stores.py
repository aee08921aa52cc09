"""Object stores and web servers: against servers of S3, and with every answer that a network can spoil."""

from __future__ import annotations

import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fastshard.common import codes
from fastshard.common.errors import FastshardError
from fault_proxy import Fault, FaultProxy, Recorder, Request, is_read
from gcs_server import GcsServer
from holding import HANG
from memory_store import MemoryStore
from servers import ACCESS_KEY, SECRET_KEY, S3Server, free_ports, moto_server, rclone_server, seaweedfs_server
from store_suite import FILES, Fixture, StorePromises

pytest.importorskip("obstore")

from fastshard.stores import objects
from fastshard.stores.objects import ObjectStore
from fastshard.stores.store import StoredFile, read_range

#: In every request's headers or addresses, and in no message.
SESSION_TOKEN = "SESSION-MARKER-0123456789"
QUERY = "QUERY-MARKER-0123456789"
BEARER = "BEARER-MARKER-0123456789"
SECRETS = (SECRET_KEY, SESSION_TOKEN, QUERY, BEARER, ACCESS_KEY)
#: Seconds after which a request that never succeeds is given up: however slow this host is, it fails.
SOON = 2.0
#: Options by which no answer comes too late: the deadline ends repetitions alone.
PATIENT = {"timeout": f"{HANG:g}s", "connect_timeout": f"{HANG:g}s"}
#: Faults by which nothing comes.
LATE = (Fault.DRIP, Fault.SILENT)
DATA = random.Random(7).randbytes(200_000)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of this host: neither credentials, nor proxies, nor the metadata service of a cloud."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")


# One server for the file: `scope="module"` also has xdist run the file in one process.
def _module(server: Callable[[], AbstractContextManager[S3Server]]) -> Callable[[], Iterator[S3Server]]:
    def start() -> Iterator[S3Server]:
        with server() as started:
            yield started

    return start


moto = pytest.fixture(scope="module", name="moto")(_module(moto_server))
seaweedfs = pytest.fixture(scope="module", name="seaweedfs")(_module(seaweedfs_server))
rclone = pytest.fixture(scope="module", name="rclone")(_module(rclone_server))
_numbers = itertools.count()


def new_bucket(server: S3Server, files: dict[str, bytes]) -> str:
    name = f"bucket-{next(_numbers)}"
    server.make_bucket(name, files)
    return name


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto.url) as started:
        yield started


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return new_bucket(moto, {"run/a.bin": DATA, "run/b.bin": b"b"})


def make_public(server: S3Server, bucket: str, key: str = "run/a.bin") -> None:
    """Lets everybody read a file, by an address without a signature."""
    server.client().put_object_acl(Bucket=bucket, Key=key, ACL="public-read")


def spoiled(
    moto: S3Server, proxy: FaultProxy, bucket: str, deadline: float = HANG, **more: str
) -> tuple[ObjectStore, StoredFile]:
    """A store behind the proxy with one file, which was listed while nothing was spoiled."""
    options = moto.options | {"endpoint": proxy.url, "session_token": SESSION_TOKEN} | more
    store = ObjectStore(f"s3://{bucket}/run", options, deadline=deadline)
    file = store.list_files()[0]
    proxy.clear()
    return store, file


def fails(
    call: Callable[[], object], code: str, *words: str, at: str | None = None, help: str | None = None
) -> FastshardError:
    """Calls, expects one finding, and looks for secrets in all that can be seen of it."""
    with pytest.raises(FastshardError) as caught:
        call()
    error = caught.value
    assert [finding.code for finding in error.findings] == [code], str(error)
    shown = [str(error), repr(error), repr([f.to_dict() for f in error.findings])]
    chain: BaseException | None = error
    while chain is not None:
        shown += [str(chain), repr(chain), *traceback.format_exception(chain)]
        chain = chain.__cause__ or chain.__context__
    for secret in SECRETS:
        assert not any(secret in text for text in shown), secret
    for word in words:
        assert word in str(error) or word in (error.got or ""), (word, str(error), error.got)
    assert at is None or error.path == at
    assert error.findings[0].advice
    assert help is None or help in (error.findings[0].advice or "")
    return error


# --- the promises


_made: set[str] = set()


def made_of(server: S3Server, endpoint: str | None = None) -> Fixture:
    """A folder of the one bucket of a server: SeaweedFS keeps volumes apart for each bucket."""
    options = server.options | {"endpoint": endpoint or server.url}
    client = server.client()
    if server.url not in _made:
        _made.add(server.url)
        client.create_bucket(Bucket="promises")
    root = f"some/run-{next(_numbers)}"
    for path, content in FILES.items():
        client.put_object(Bucket="promises", Key=f"{root}/{path}", Body=content)
    client.put_object(Bucket="promises", Key=f"{root}-2/other", Body=b"of another run")
    return Fixture(
        ObjectStore(f"s3://promises/{root}", options, deadline=HANG),
        lambda path, content: client.put_object(Bucket="promises", Key=f"{root}/{path}", Body=content),
        lambda path: client.delete_object(Bucket="promises", Key=f"{root}/{path}"),
        ObjectStore(f"s3://promises/{root}-", options, deadline=HANG),
    )


class TestMemory(StorePromises):
    @pytest.fixture
    def made(self) -> Fixture:
        store = MemoryStore(FILES)
        return Fixture(store, store.put, store.remove, MemoryStore(address="memory://missing"))


class TestMoto(StorePromises):
    @pytest.fixture
    def made(self, moto: S3Server) -> Fixture:
        return made_of(moto)


@pytest.mark.slow
class TestSeaweedFS(StorePromises):
    @pytest.fixture
    def made(self, seaweedfs: S3Server) -> Fixture:
        return made_of(seaweedfs)


@pytest.mark.slow
class TestRclone(StorePromises):
    """It serves stale files in spite of If-Match: the answer's ETag shows it.

    Parts come with status 200, which the proxy corrects.
    """

    @pytest.fixture
    def made(self, rclone: S3Server) -> Iterator[Fixture]:
        with FaultProxy(rclone.url) as proxy:
            proxy.inject(Fault.PARTIAL_206)
            yield made_of(rclone, proxy.url)


@pytest.mark.slow
def test_rclone_by_itself_is_refused(rclone: S3Server) -> None:
    made = made_of(rclone)
    file = made.store.list_files()[0]
    fails(lambda: read_range(made.store, file, 0, 1), codes.IO, "status 200")


class TestGcs(StorePromises):
    @pytest.fixture
    def made(self) -> Iterator[Fixture]:
        with GcsServer(BEARER) as server:
            for path, content in FILES.items():
                server.put("bkt", f"run/{path}", content)
            yield Fixture(
                ObjectStore("gs://bkt/run", server.options, deadline=HANG),
                lambda path, content: server.put("bkt", f"run/{path}", content),
                lambda path: server.buckets["bkt"].pop(f"run/{path}") and None,
                ObjectStore("gs://bkt/other", server.options, deadline=HANG),
            )

    def test_pages_are_joined(self, made: Fixture) -> None:
        assert len(made.store.list_files()) > GcsServer.page


# --- addresses


@pytest.mark.parametrize("address", ["az://c/p", "abfs://c@account/p", "abfss://c/p", "AZ://c/p"])
def test_azure_is_refused_by_name(address: str) -> None:
    scheme = address.partition(":")[0].lower()
    fails(lambda: ObjectStore(address), codes.UNSUPPORTED, f"{scheme}:// addresses", "Azure")


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("ftp://host/x", codes.UNSUPPORTED),
        ("bucket/path", codes.USAGE),
        ("s3://", codes.USAGE),
        ("s3:///key", codes.USAGE),
        (f"s3://user:{SECRET_KEY}@bucket/key", codes.USAGE),
        ("s3://bucket/a/../b", codes.USAGE),
        ("s3://bucket/a//b", codes.USAGE),
        ("gs://bucket/./b", codes.USAGE),
        (f"https://user:{SECRET_KEY}@host/file", codes.USAGE),
        (f"https://host/?sig={QUERY}", codes.USAGE),
        ("https://host/folder/", codes.USAGE),
        ("https://host/a%2Fb", codes.USAGE),
        ("https:///file", codes.USAGE),
        ("https://[host/file", codes.USAGE),
        ("https://host/" + "n" * 256, codes.USAGE),
    ],
)
def test_an_address_that_cannot_be_read_is_refused(address: str, code: str) -> None:
    fails(lambda: ObjectStore(address), code)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/a b%20", "gs://bucket/a b%20"),
        (f"https://host:8443/a/file.bin?sig={QUERY}", "https://host:8443/a/file.bin"),
    ],
)
def test_an_address_is_shown_without_its_query(address: str, shown: str) -> None:
    store = ObjectStore(address)
    assert (store.address, store.revision) == (shown, None)
    assert QUERY not in repr(store) and shown in repr(store)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    error = fails(lambda: ObjectStore("s3://bucket/run"), codes.UNSUPPORTED, "s3://")
    assert "'obstore>=" in str(error)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"no_such_option": SECRET_KEY}, "'no_such_option' is unknown"),
        ({"skip_signature": SECRET_KEY}, "'skip_signature'"),
        ({"allow_http": SECRET_KEY}, "'allow_http'"),
        ({"timeout": SECRET_KEY}, "'timeout'"),
    ],
)
def test_an_option_that_is_not_valid_is_named_without_its_value(options: dict[str, str], word: str) -> None:
    fails(lambda: ObjectStore("s3://bucket/run", options), codes.USAGE, word)


@pytest.mark.parametrize(
    ("address", "option"),
    [
        ("https://host/x", "region"),
        ("s3://bucket/x", "aws_bucket"),
        ("s3://bucket/x", "bucket"),
        ("gs://bucket/x", "bucket_name"),
    ],
)
def test_an_option_that_does_not_apply_is_refused(address: str, option: str) -> None:
    fails(lambda: ObjectStore(address, {option: "other"}), codes.USAGE, f"'{option}' does not apply")


def test_an_environment_that_is_not_valid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "perhaps")
    fails(lambda: ObjectStore("s3://bucket/run"), codes.USAGE, "the environment's settings for S3")


def test_the_bucket_of_the_environment_is_not_read(
    moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_BUCKET", "another")
    store = ObjectStore(f"s3://{bucket}/run", moto.options, deadline=HANG)
    assert [file.path for file in store.list_files()] == ["a.bin", "b.bin"]


def test_the_environment_configures_it(moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    store = ObjectStore(f"s3://{bucket}/run", deadline=HANG)
    assert [file.path for file in store.list_files()] == ["a.bin", "b.bin"]


def test_http_is_refused_unless_it_is_allowed(moto: S3Server, bucket: str) -> None:
    options = {name: value for name, value in moto.options.items() if name != "allow_http"}
    store = ObjectStore(f"s3://{bucket}/run", options, deadline=HANG)
    fails(store.list_files, codes.USAGE, "http://", help="AWS_ALLOW_HTTP=true")


# --- lists


def test_a_file_is_read_by_its_own_address(moto: S3Server, bucket: str) -> None:
    store = ObjectStore(f"s3://{bucket}/run/a.bin", moto.options, deadline=HANG)
    (file,) = store.list_files()
    assert (file.path, file.size) == ("a.bin", len(DATA))
    assert read_range(store, file, 5, 100) == DATA[5:105]


@pytest.mark.parametrize("address", ["run", "run/a.bin", "", "run/"])
def test_what_another_process_listed_is_read(moto: S3Server, bucket: str, address: str) -> None:
    """A file, a folder, a bucket: without a list of its own, too."""
    listed = ObjectStore(f"s3://{bucket}/{address}", moto.options, deadline=HANG).list_files()[0]
    store = ObjectStore(f"s3://{bucket}/{address}", moto.options, deadline=HANG)
    assert read_range(store, listed, 5, 100) == DATA[5:105]


def test_a_folder_with_a_file_of_its_own_name_is_read(moto: S3Server) -> None:
    name = new_bucket(moto, {"run/run": DATA})
    listed = ObjectStore(f"s3://{name}/run", moto.options, deadline=HANG).list_files()[0]
    assert listed.path == "run"
    store = ObjectStore(f"s3://{name}/run", moto.options, deadline=HANG)
    assert read_range(store, listed, 5, 100) == DATA[5:105]


def test_an_address_of_a_file_and_of_a_folder_is_refused(moto: S3Server) -> None:
    name = new_bucket(moto, {"run": b"a file", "run/x": b"x"})
    store = ObjectStore(f"s3://{name}/run", moto.options, deadline=HANG)
    fails(store.list_files, codes.UNSUPPORTED, "both a file and a directory")
    folder = ObjectStore(f"s3://{name}/run/", moto.options, deadline=HANG)
    assert [file.path for file in folder.list_files()] == ["x"]


def test_markers_of_folders_are_no_files(moto: S3Server) -> None:
    files = {
        "run": b"",
        "run/": b"",
        "run/x": b"x",
        "run/empty": b"",
        "run/sub/": b"",
        "run/sub/y": b"y",
        "run/bare/": b"",
        "run/two": b"two",
        "run/two/": b"",
    }
    store = ObjectStore(f"s3://{new_bucket(moto, files)}/run", moto.options, deadline=HANG)
    listed = store.list_files()
    assert [(file.path, file.size) for file in listed] == [
        ("empty", 0),
        ("sub/y", 1),
        ("two", 3),
        ("x", 1),
    ]
    assert read_range(store, listed[2], 0, 3) == b"two"


@pytest.mark.parametrize(
    ("key", "quoted"),
    [
        ("run/a//b", "'run/a//b'"),
        ("run/a/../b", "'run/a/../b'"),
        ("run/./b", "'run/./b'"),
        ('run/a\x01"\\é', "'run/a\\x01\"\\\\\\xe9'"),
        ("run/" + "n" * 256, ascii("run/" + "n" * 256)),
        ("run/" + "é" * 128, ascii("run/" + "é" * 128)),
    ],
    ids=["empty part", "parent", "here", "control character", "long", "long in bytes"],
)
def test_a_key_that_no_file_can_have_is_named(moto: S3Server, key: str, quoted: str) -> None:
    name = new_bucket(moto, {"run/good": b"1", key: b"1"})
    store = ObjectStore(f"s3://{name}/run", moto.options, deadline=HANG)
    fails(store.list_files, codes.UNSUPPORTED, quoted)


def test_a_path_with_a_nul_is_refused() -> None:
    assert objects._refuse_path("a\0b") == "it has a NUL"


def test_a_key_that_is_a_file_and_a_folder_is_named(moto: S3Server) -> None:
    name = new_bucket(moto, {"run/x": b"a file", "run/x/y": b"y"})
    store = ObjectStore(f"s3://{name}/run", moto.options, deadline=HANG)
    fails(store.list_files, codes.UNSUPPORTED, "'run/x'", "both a file and a directory")


def test_pages_of_a_list_are_joined(
    moto: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    name = new_bucket(moto, {f"run/{at:02}": bytes(at) for at in range(1, 11)})
    store = ObjectStore(f"s3://{name}/run", moto.options | {"endpoint": proxy.url}, deadline=HANG)
    assert [(file.path, file.size) for file in store.list_files()] == [
        (f"{at:02}", at) for at in range(1, 11)
    ]
    assert len([request for request in proxy.requests if "list-type=2" in request.path]) == 4


def test_a_page_that_fails_is_asked_for_again(
    moto: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    name = new_bucket(moto, {f"run/{at}": b"1" for at in range(8)})
    proxy.inject(Fault.STATUS_503, 2, lambda request: "continuation-token" in request.path)
    proxy.inject(Fault.RESET, 2, lambda request: "continuation-token" in request.path)
    store = ObjectStore(f"s3://{name}/run", moto.options | {"endpoint": proxy.url}, deadline=HANG)
    assert [file.path for file in store.list_files()] == [str(at) for at in range(8)]


def test_more_objects_than_are_read_are_refused(
    moto: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert objects.MOST_FILES == 1_000_000
    monkeypatch.setattr(objects, "MOST_FILES", 1)
    store = ObjectStore(f"s3://{bucket}/run", moto.options, deadline=HANG)
    fails(
        store.list_files,
        codes.UNSUPPORTED,
        f"s3://{bucket}/run: has more than 1 objects",
        help="narrower prefix",
    )


@pytest.mark.parametrize("address", ["", "/run", "/run/", "/run/a.bin"])
def test_a_missing_bucket_is_refused(moto: S3Server, address: str) -> None:
    store = ObjectStore(f"s3://no-such-bucket{address}", moto.options, deadline=HANG)
    fails(store.list_files, codes.NO_SUCH_PATH, "s3://no-such-bucket", help="bucket")


def test_a_file_is_found_without_the_right_to_list(moto: S3Server, proxy: FaultProxy, bucket: str) -> None:
    proxy.inject(Fault.STATUS_403, when=lambda request: "list-type=" in request.path)
    options = moto.options | {"endpoint": proxy.url}
    store = ObjectStore(f"s3://{bucket}/run/a.bin", options, deadline=HANG)
    assert [file.path for file in store.list_files()] == ["a.bin"]
    fails(ObjectStore(f"s3://{bucket}/run", options, deadline=HANG).list_files, codes.PERMISSION, "403")


def test_a_folder_is_found_without_the_right_to_see_its_name(
    moto: S3Server, proxy: FaultProxy, bucket: str
) -> None:
    proxy.inject(Fault.STATUS_403, when=lambda request: request.method == "HEAD")
    options = moto.options | {"endpoint": proxy.url}
    store = ObjectStore(f"s3://{bucket}/run", options, deadline=HANG)
    assert [file.path for file in store.list_files()] == ["a.bin", "b.bin"]
    fails(ObjectStore(f"s3://{bucket}/no", options, deadline=HANG).list_files, codes.PERMISSION, "403")


# --- faults that pass


@pytest.mark.parametrize("fault", [Fault.STATUS_500, Fault.STATUS_503, Fault.RESET, Fault.SHORT])
@pytest.mark.parametrize("times", [1, 3])
def test_a_fault_that_passes_is_not_seen(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault, times: int
) -> None:
    store, file = spoiled(moto, proxy, bucket)
    proxy.inject(fault, times)
    assert read_range(store, file, 1000, 150_000) == DATA[1000:151_000]
    assert len(proxy.requests) == times + 1
    assert all(request.headers["if-match"] == file.identity for request in proxy.requests)


def test_large_ranges_are_read_in_pieces(
    moto: S3Server, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE", 30_000)
    store, file = spoiled(moto, proxy, bucket)
    assert read_range(store, file, 10, 100_000) == DATA[10:100_010]
    assert [request.headers["range"] for request in proxy.requests] == [
        "bytes=10-30009",
        "bytes=30010-60009",
        "bytes=60010-90009",
        "bytes=90010-100009",
    ]


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.SHORT, Fault.STATUS_503])
def test_a_file_replaced_between_two_requests_is_no_mixture(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault
) -> None:
    """The first half of one object came when the connection broke; the other half is of another object."""
    store, file = spoiled(moto, proxy, bucket)
    requests = 0

    def replace_before_the_second(request: Request) -> bool:
        nonlocal requests
        requests += 1
        if requests == 2:
            moto.client().put_object(Bucket=bucket, Key="run/a.bin", Body=bytes(len(DATA)))
        return requests == 1

    proxy.inject(fault, when=replace_before_the_second)
    fails(
        lambda: read_range(store, file, 0, 100_000),
        codes.SOURCE_CHANGED,
        "no longer",
        at=f"s3://{bucket}/run/a.bin",
    )
    assert requests == 2


def test_a_server_that_ignores_conditions_serves_no_replaced_file(
    moto: S3Server, proxy: FaultProxy, bucket: str
) -> None:
    store, file = spoiled(moto, proxy, bucket)
    proxy.inject(Fault.CONDITION_IGNORED)
    assert read_range(store, file, 0, 100) == DATA[:100]
    moto.client().put_object(Bucket=bucket, Key="run/a.bin", Body=bytes(len(DATA)))
    fails(lambda: read_range(store, file, 0, 100), codes.SOURCE_CHANGED, "no longer")


# --- faults that stay


@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        (Fault.STATUS_500, codes.IO, "status 500"),
        (Fault.STATUS_503, codes.IO, "status 503 (SlowDown)"),
        (Fault.STATUS_403, codes.PERMISSION, "status 403 (AccessDenied)"),
        (Fault.REGION_301, codes.PERMISSION, "another region"),
        (Fault.REGION_400, codes.PERMISSION, "AWS_REGION=eu-west-1"),
        (Fault.RESET, codes.IO, "was interrupted"),
        (Fault.SHORT, codes.IO, "was interrupted"),
        (Fault.LYING_LENGTH, codes.IO, "another length"),
        (Fault.LONG_BODY, codes.IO, "bytes 0 to 100001"),
        (Fault.RANGE_IGNORED, codes.IO, "a complete file or a page"),
        (Fault.HTML, codes.IO, "a complete file or a page"),
        (Fault.DRIP, codes.IO, "did not arrive within 2 seconds"),
        (Fault.SILENT, codes.IO, "did not arrive within 2 seconds"),
    ],
)
def test_a_fault_that_stays_is_one_finding(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault, code: str, word: str
) -> None:
    _, file = spoiled(moto, proxy, bucket)
    options = moto.options | {"endpoint": proxy.url, "session_token": SESSION_TOKEN}
    options |= {} if fault in LATE else PATIENT
    store = ObjectStore(f"s3://{bucket}/run/", options, deadline=SOON)
    proxy.inject(fault)
    fails(lambda: read_range(store, file, 0, 100_000), code, word, at=f"s3://{bucket}/run/a.bin")


@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        (Fault.STATUS_503, codes.IO, "status 503"),
        (Fault.STATUS_403, codes.PERMISSION, "status 403"),
        (Fault.REGION_301, codes.PERMISSION, "another region"),
        (Fault.REGION_400, codes.PERMISSION, "another region"),
        # obstore reads a page as an empty list.
        (Fault.HTML, codes.NO_SUCH_PATH, "endpoint"),
        (Fault.LYING_LENGTH, codes.IO, "has no list of files"),
        (Fault.RESET, codes.IO, "was interrupted"),
        (Fault.SILENT, codes.IO, "did not arrive"),
        (Fault.DRIP, codes.IO, "did not arrive"),
    ],
)
@pytest.mark.parametrize("end", ["/", ""], ids=["of a folder", "of a file or a folder"])
def test_a_list_that_fails_is_one_finding(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault, code: str, word: str, end: str
) -> None:
    # What spoils a body leaves answers without one as they are.
    bodies = (Fault.HTML, Fault.LYING_LENGTH, Fault.RESET, Fault.DRIP)
    proxy.inject(fault, when=lambda request: request.method == "GET" or fault not in bodies)
    options = moto.options | {"endpoint": proxy.url, "session_token": SESSION_TOKEN}
    options |= {} if fault in LATE else PATIENT
    store = ObjectStore(f"s3://{bucket}/run{end}", options, deadline=SOON)
    fails(store.list_files, code, word, at=f"s3://{bucket}/run")


def test_a_server_that_cannot_be_reached_is_one_finding() -> None:
    options = {
        "endpoint": f"http://127.0.0.1:{free_ports(1)[0]}",
        "allow_http": "true",
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
    }
    store = ObjectStore("s3://bucket/run", options | PATIENT, deadline=SOON)
    fails(store.list_files, codes.IO, "cannot be reached", at="s3://bucket/run")


@pytest.mark.parametrize(("profile", "help"), [(None, "AWS_SKIP_SIGNATURE"), ("mine", "export-credentials")])
def test_without_credentials_there_is_one_finding(
    moto: S3Server, bucket: str, profile: str | None, help: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    options = {"endpoint": moto.url, "allow_http": "true"}
    options["metadata_endpoint"] = os.environ["AWS_METADATA_ENDPOINT"]
    store = ObjectStore(f"s3://{bucket}/run", options | PATIENT, deadline=SOON)
    fails(store.list_files, codes.PERMISSION, "needs credentials for S3", help=help)


def test_a_wrong_token_of_gcs_is_refused() -> None:
    with GcsServer("another") as server:
        server.put("bkt", "run/x", b"x")
        store = ObjectStore("gs://bkt/run", server.options | {"bearer_token": BEARER}, deadline=HANG)
        fails(store.list_files, codes.PERMISSION, "status 403")


def test_nothing_is_logged(
    moto: S3Server, proxy: FaultProxy, bucket: str, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    store, file = spoiled(moto, proxy, bucket)
    proxy.inject(Fault.STATUS_403)
    fails(lambda: read_range(store, file, 0, 10), codes.PERMISSION)
    written = capfd.readouterr()
    assert not any(secret in written.out + written.err + caplog.text for secret in SECRETS)
    assert not any(secret in repr(store) for secret in SECRETS)


# --- redirects


def test_a_redirect_to_another_host_brings_it_no_signature(
    moto: S3Server, proxy: FaultProxy, bucket: str
) -> None:
    """obstore follows it. Without the secret key, which is never sent, a session token is of no use."""
    store, file = spoiled(moto, proxy, bucket)
    with Recorder() as other:
        proxy.inject(Fault.REDIRECT_HOST, to=other.url)
        fails(lambda: read_range(store, file, 0, 100), codes.IO)
        assert other.requests
        for request in other.requests:
            assert "authorization" not in request.headers
            assert SECRET_KEY not in repr(request) and ACCESS_KEY not in repr(request)
            assert "x-amz-signature" not in request.path.lower()
            # An obstore that leaves it out, or stays, is better: `fastshard.stores.objects` says so then.
            assert request.headers["x-amz-security-token"] == SESSION_TOKEN


def test_a_redirect_brings_another_host_no_bearer_token() -> None:
    with GcsServer(BEARER) as server, FaultProxy(server.url) as proxy, Recorder() as other:
        server.put("bkt", "run/x", DATA)
        store = ObjectStore("gs://bkt/run", server.options | {"base_url": proxy.url}, deadline=HANG)
        (file,) = store.list_files()
        proxy.inject(Fault.REDIRECT_HOST, to=other.url)
        fails(lambda: read_range(store, file, 0, 100), codes.IO)
        assert other.requests
        assert not any(BEARER in repr(request) for request in other.requests)


def test_data_of_another_host_is_not_taken(moto: S3Server, proxy: FaultProxy, bucket: str) -> None:
    """Another object of this size, which everybody may read."""
    other = new_bucket(moto, {"run/a.bin": bytes(len(DATA))})
    make_public(moto, other)
    store, file = spoiled(moto, proxy, bucket)
    proxy.inject(Fault.REDIRECT_FILE, to=f"{moto.url}/{other}/run/a.bin")
    fails(lambda: read_range(store, file, 0, 100), codes.SOURCE_CHANGED)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "gopher://127.0.0.1/x"])
def test_a_redirect_to_a_file_is_not_followed(
    moto: S3Server, proxy: FaultProxy, bucket: str, target: str
) -> None:
    store, file = spoiled(moto, proxy, bucket)
    proxy.inject(Fault.REDIRECT_FILE, to=target)
    fails(
        lambda: read_range(store, file, 0, 100),
        codes.IO,
        "redirects to an address that fastshard does not follow",
    )
    web = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin", deadline=HANG)
    fails(web.list_files, codes.IO, "redirects to an address that fastshard does not follow")


# --- files of web servers


def test_a_file_of_a_web_server_is_read(moto: S3Server, bucket: str) -> None:
    """By an address that is signed for reading alone, as a query."""
    client = moto.client()
    address = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "run/a.bin"})
    store = ObjectStore(address, deadline=HANG)
    (file,) = store.list_files()
    assert (file.path, file.size) == ("a.bin", len(DATA))
    assert file.modified_ns > 0
    assert read_range(store, file, 100, 5000) == DATA[100:5100]
    client.put_object(Bucket=bucket, Key="run/a.bin", Body=bytes(len(DATA)))
    fails(
        lambda: read_range(store, file, 100, 5000), codes.SOURCE_CHANGED, at=f"{moto.url}/{bucket}/run/a.bin"
    )
    client.delete_object(Bucket=bucket, Key="run/a.bin")
    fails(lambda: read_range(store, file, 100, 5000), codes.SOURCE_CHANGED)
    fails(store.list_files, codes.NO_SUCH_PATH, at=f"{moto.url}/{bucket}/run/a.bin")


@pytest.mark.parametrize(
    ("fault", "start"), [(Fault.NO_ETAG, "modified 20"), (Fault.WEAK_ETAG, 'W/"')], ids=["time", "weak ETag"]
)
def test_a_web_server_without_a_strong_etag_serves_no_replaced_file(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault, start: str
) -> None:
    make_public(moto, bucket)
    proxy.inject(fault)
    store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin", deadline=HANG)
    (file,) = store.list_files()
    assert file.identity.startswith(start)
    assert read_range(store, file, 100, 5000) == DATA[100:5100]
    moto.client().put_object(Bucket=bucket, Key="run/a.bin", Body=bytes(300_000), ACL="public-read")
    fails(lambda: read_range(store, file, 100, 5000), codes.SOURCE_CHANGED, at=store.address)


def test_a_file_without_any_mark_of_its_content_is_refused(
    moto: S3Server, proxy: FaultProxy, bucket: str
) -> None:
    make_public(moto, bucket)
    proxy.inject(Fault.NO_MARKS)
    store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin", deadline=HANG)
    fails(store.list_files, codes.UNSUPPORTED, "neither an ETag nor a modification time", at=store.address)


def test_an_empty_file_of_a_web_server_is_listed(moto: S3Server) -> None:
    name = new_bucket(moto, {"a b+%.bin": b""})
    make_public(moto, name, "a b+%.bin")
    (file,) = ObjectStore(f"{moto.url}/{name}/a%20b+%25.bin", deadline=HANG).list_files()
    assert (file.path, file.size) == ("a b+%.bin", 0)


@pytest.mark.parametrize("fault", [Fault.HTML, Fault.RANGE_IGNORED])
def test_a_web_server_without_ranges_is_refused(
    moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault
) -> None:
    make_public(moto, bucket)
    proxy.inject(fault)
    store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin?sig={QUERY}", deadline=HANG)
    fails(store.list_files, codes.IO, "a complete file or a page", at=f"{proxy.url}/{bucket}/run/a.bin")


@pytest.mark.parametrize("fault", [Fault.STATUS_500, Fault.STATUS_403, Fault.RESET, Fault.SILENT])
def test_no_query_is_in_a_message(moto: S3Server, proxy: FaultProxy, bucket: str, fault: Fault) -> None:
    make_public(moto, bucket)
    proxy.inject(fault)
    options = {} if fault in LATE else PATIENT
    store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin?sig={QUERY}", options, deadline=SOON)
    code = codes.PERMISSION if fault is Fault.STATUS_403 else codes.IO
    fails(store.list_files, code, at=f"{proxy.url}/{bucket}/run/a.bin")


def test_a_query_is_not_sent_to_another_host(moto: S3Server, proxy: FaultProxy, bucket: str) -> None:
    """Clients name the address that they came from, with its query."""
    with Recorder() as other:
        proxy.inject(Fault.REDIRECT_HOST, to=other.url)
        store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin?sig={QUERY}", deadline=HANG)
        fails(store.list_files, codes.UNSUPPORTED, "redirects", "status 307")
        file = StoredFile("a.bin", len(DATA), '"x"')
        fails(lambda: read_range(store, file, 0, 1), codes.UNSUPPORTED, "redirects")
        assert other.requests == []


def test_a_redirect_without_a_query_is_followed(moto: S3Server, proxy: FaultProxy, bucket: str) -> None:
    """As servers of large files send their readers to others."""
    make_public(moto, bucket)
    proxy.inject(Fault.REDIRECT_HOST, to=moto.url)
    store = ObjectStore(f"{proxy.url}/{bucket}/run/a.bin", deadline=HANG)
    (file,) = store.list_files()
    assert read_range(store, file, 100, 5000) == DATA[100:5100]


def test_is_read_knows_lists() -> None:
    assert is_read(Request("GET", "/b/x", {})) and not is_read(Request("GET", "/b?list-type=2", {}))
    assert not is_read(Request("HEAD", "/b/x", {}))
