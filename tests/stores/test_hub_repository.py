"""A repository of the hub as a store, over an endpoint of the tests' own and the real huggingface_hub."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastshard import FastshardError
from fastshard.stores import hub_requests
from fastshard.stores.hub import HubRepository
from fastshard.stores.store import StoredFile, read_range
from holding import HANG

pytest.importorskip("huggingface_hub")

import huggingface_hub
from hub_server import Fault, HubServer, blob_id, entry, serving_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.utils._http import default_client_factory

WEIGHTS = bytes(range(251)) * 4000
CONFIG = b'{"model_type": "llama"}'
FILES = {
    "config.json": CONFIG,
    "model.safetensors": WEIGHTS,
    "step 2/a#b?.safetensors": WEIGHTS[::-1],
    "step 2/deep/note.txt": b"note",
    "README.md": b"",
}
NAME = "org/name"
TOKEN = "hf_MARKERMARKERMARKER"
_BEGINS = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP", "http", "ALL_PROXY", "all_proxy", "SSL_")


class Time:
    """A clock that stands still but for the waits."""

    def __init__(self, step: float = 0.0) -> None:
        self.waits: list[float] = []
        self.passed, self.step = 0.0, step

    def now(self) -> float:
        self.passed += self.step
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.passed += seconds


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The endpoint with a repository; nothing of this user's settings is seen."""
    for name in [name for name in os.environ if name.startswith(_BEGINS)]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    # Read by the library when it was imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    # However busy this host is.
    monkeypatch.setattr(hub_requests, "_SILENCE", HANG)
    monkeypatch.setattr(hub_requests, "_CONNECT", HANG)
    huggingface_hub.close_session()
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.repo(NAME).commit(FILES)
        yield server
    huggingface_hub.close_session()


def opened(address: str = f"hf://{NAME}", **options: Any) -> HubRepository:
    time = options.pop("time", None) or Time()
    return HubRepository(address, now=time.now, sleep=time.sleep, **options)


def listed(store: HubRepository) -> dict[str, StoredFile]:
    return {file.path: file for file in store.list_files()}


def read(
    store: HubRepository, path: str = "model.safetensors", offset: int = 1000, length: int = 5000
) -> bytes:
    return read_range(store, listed(store)[path], offset, length)


def refused(code: str, call: Any, *args: Any, **options: Any) -> FastshardError:
    with pytest.raises(FastshardError) as caught:
        call(*args, **options)
    error = caught.value
    assert (error.code, len(error.findings)) == (code, 1)
    assert error.findings[0].help
    return error


# --- the endpoint itself


def test_the_endpoint_serves_the_library(hub: HubServer) -> None:
    api = HfApi(endpoint=hub.endpoint, token=False)
    hub.page_size = 2
    assert api.repo_info(NAME).sha == hub.repos[NAME].refs["main"]
    tree = {row.path for row in api.list_repo_tree(NAME, recursive=True)}
    assert tree == {*FILES, "step 2", "step 2/deep"}
    for path in ("model.safetensors", "config.json"):
        there = huggingface_hub.hf_hub_download(NAME, path, endpoint=hub.endpoint, token=False)
        assert Path(there).read_bytes() == FILES[path]


# --- addresses and revisions


def test_a_revision_is_resolved_to_its_commit(hub: HubServer) -> None:
    repo = hub.repos[NAME]
    main = repo.refs["main"]
    other = repo.commit({"config.json": b"other"}, "v1", "feature/x")
    for address, commit in {
        f"hf://{NAME}": main,
        f"hf://models/{NAME}@main": main,
        f"hf://{NAME}@v1": other,
        f"hf://{NAME}@feature%2Fx": other,
        f"hf://{NAME}@{main}": main,
    }.items():
        store = opened(address)
        assert (store.revision, store.address) == (commit, address)
        assert address in repr(store) and commit in repr(store)


@pytest.mark.parametrize(
    ("address", "code"),
    {
        "hf://name": "FS515",
        "hf://models/name": "FS515",
        "hf://": "FS515",
        "s3://bucket/name": "FS515",
        "hf://org/name@": "FS515",
        "hf://org/name@a%20b": "FS515",
        "hf://org/name@refs/pr/1": "FS515",
        "hf://org//name": "FS515",
        "hf://org/name/../other": "FS515",
        "hf://org/name/a//b": "FS515",
        "hf://org/na me": "FS515",
        "hf://org/name/\udcff": "FS515",
        "hf://datasets/org/name": "FS514",
        "hf://spaces/org/name": "FS514",
    }.items(),
)
def test_other_addresses_are_refused(hub: HubServer, address: str, code: str) -> None:
    refused(code, opened, address)
    assert hub.seen == []


def test_slashes_of_a_revision_are_shown_encoded(hub: HubServer) -> None:
    assert "refs%2Fpr%2F1" in str(refused("FS515", opened, "hf://org/name@refs/pr/1/folder"))


def test_what_precedes_an_at_sign_is_not_repeated(hub: HubServer) -> None:
    assert TOKEN not in str(refused("FS515", opened, f"hf://{TOKEN}@org/name"))


@pytest.mark.parametrize("endpoint", ["ftp://host", "https://user:secret@host", "http://[", "host"])
def test_other_endpoints_are_refused(hub: HubServer, endpoint: str) -> None:
    assert "secret" not in str(refused("FS515", opened, endpoint=endpoint))


def test_a_branch_that_moves_changes_nothing_that_was_resolved(hub: HubServer) -> None:
    store = opened()
    hub.repos[NAME].commit({"model.safetensors": b"new" * 5000, "more.txt": b"more"})
    assert set(listed(store)) == set(FILES)
    assert read(store) == WEIGHTS[1000:6000]
    assert opened().revision != store.revision
    places = [seen.target for seen in (*hub.at("api"), *hub.at("resolve"))]
    assert [target for target in places if "main" in target] == ["/api/models/org/name/revision/main"] * 2


def test_a_repository_that_was_renamed_is_read(hub: HubServer) -> None:
    hub.moved["org/before"] = NAME
    store = opened("hf://org/before")
    assert (read(store), read(store, "config.json", 0, 5)) == (WEIGHTS[1000:6000], CONFIG[:5])


# --- listings


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_files_are_listed_as_the_library_lists_them(hub: HubServer, page_size: int) -> None:
    hub.page_size = page_size
    store = opened()
    files = store.list_files()
    infos = HfApi(endpoint=hub.endpoint, token=False).get_paths_info(NAME, list(FILES))
    stated = {row.path: (row.size, row.blob_id, row.lfs.sha256 if row.lfs else None) for row in infos}
    assert {f.path: (f.size, f.identity.split("/")[1], f.sha256) for f in files} == stated
    assert {f.identity.split("/")[0] for f in files} == {store.revision}
    assert [f.path for f in files] == sorted(FILES)
    assert listed(store)["model.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def test_pages_are_asked_for_at_the_endpoint_alone(hub: HubServer) -> None:
    """A mirror repeats the links of the hub, and the token is sent with each request."""
    hub.page_size, hub.mirrored = 2, "https://mirrored.invalid"
    hub.tokens[TOKEN] = set()
    assert set(listed(opened(token=TOKEN))) == set(FILES)
    assert len(hub.at("api")) == 5


def test_a_folder_is_a_root(hub: HubServer) -> None:
    store = opened(f"hf://{NAME}/step 2/")
    assert sorted(listed(store)) == ["a#b?.safetensors", "deep/note.txt"]
    assert read(store, "a#b?.safetensors") == WEIGHTS[::-1][1000:6000]
    assert store.address == f"hf://{NAME}/step 2"


@pytest.mark.parametrize("path", ["config.json", "step 2/deep/note.txt"])
def test_a_file_is_listed_alone(hub: HubServer, path: str) -> None:
    store = opened(f"hf://{NAME}@main/{path}")
    name = path.rsplit("/")[-1]
    assert list(listed(store)) == [name]
    assert read(store, name, 1, 3) == FILES[path][1:4]
    del hub.repos[NAME].commits[store.revision]
    file = StoredFile(name, 9, f"{store.revision}/0")
    assert refused("FS506", read_range, store, file, 0, 1).path == store.address


@pytest.mark.parametrize(
    "path", ["../up", "/etc/passwd", "a/../b", "a//b", "./a", "a\0b", "x" * 256, "a/" * 2100 + "b", "\ud800"]
)
def test_paths_that_no_file_can_have_are_refused(hub: HubServer, path: str) -> None:
    hub.entries.append(entry(path, b""))
    refused("FS514", opened().list_files)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "config.json"},
        {"path": None},
        {"oid": 7},
        {"size": -1},
        {"size": True},
        {"size": "7"},
        {"lfs": {"oid": "abc", "size": 3}},
        {"lfs": ["abc"]},
    ],
    ids=str,
)
def test_malformed_listings_are_refused(hub: HubServer, changes: dict[str, Any]) -> None:
    hub.entries.append({**entry("one.txt", b"1"), **changes})
    refused("FS507", opened().list_files)


def test_a_file_outside_of_the_folder_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(f"hf://{NAME}/step 2")
    monkeypatch.setattr(store._hub, "list_tree", lambda *_: [entry("config.json", b"")])
    refused("FS507", store.list_files)


def test_too_many_files_are_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_requests, "_MOST_FILES", 6)
    hub.page_size = 2
    assert "more than 6 files" in str(refused("FS514", opened().list_files))


def test_a_listing_without_an_end_is_refused(hub: HubServer) -> None:
    hub.page_size = 0
    assert "do not end" in str(refused("FS507", opened().list_files))


def test_an_empty_repository_is_refused(hub: HubServer) -> None:
    hub.repo("org/empty").commit({})
    refused("FS501", lambda: opened("hf://org/empty").list_files())


# --- reading


@pytest.mark.parametrize("path", sorted(FILES))
def test_ranges_are_read(hub: HubServer, path: str) -> None:
    store, content = opened(), FILES[path]
    size = len(content)
    for offset, length in {
        (0, size),
        (0, size // 2),
        (size // 3, size // 3),
        (size, 0),
        (max(size - 1, 0), size > 0),
    }:
        got = read(store, path, offset, int(length))
        assert got == content[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, len(CONFIG) + 1), (len(CONFIG), 1)])
def test_a_range_outside_of_the_file_is_a_mistake_of_the_caller(
    hub: HubServer, offset: int, length: int
) -> None:
    with pytest.raises(ValueError, match="are outside the"):
        read(opened(), "config.json", offset, length)


def test_a_file_of_another_commit_is_refused(hub: HubServer) -> None:
    file = listed(opened())["config.json"]
    hub.repos[NAME].commit({"config.json": CONFIG[::-1]})
    assert "another commit" in str(refused("FS506", read_range, opened(), file, 0, 4))


def test_a_signed_address_is_kept_and_renewed(hub: HubServer) -> None:
    store = opened()
    file = listed(store)["model.safetensors"]
    for start in range(0, 5000, 1000):
        assert read_range(store, file, start, 1000) == WEIGHTS[start : start + 1000]
    assert (len(hub.at("resolve")), len(hub.at("cdn"))) == (1, 5)
    hub.expire()
    assert read_range(store, file, 7, 10) == WEIGHTS[7:17]
    assert read_range(store, file, 8, 10) == WEIGHTS[8:18]
    assert (len(hub.at("resolve")), len(hub.at("cdn"))) == (2, 8)


def test_a_signed_address_that_is_refused_at_once_is_an_error(hub: HubServer) -> None:
    hub.fail("cdn", Fault(status=403))
    assert "status 403" in str(refused("FS507", read, opened()))


def test_a_kept_address_whose_host_fails_is_asked_for_again(hub: HubServer) -> None:
    store = opened()
    read(store)
    hub.fail("cdn", Fault(status=503))
    assert read(store) == WEIGHTS[1000:6000]
    assert len(hub.at("resolve")) == 2


def test_connections_are_used_again(hub: HubServer) -> None:
    library = hub_requests.http_library()
    huggingface_hub.set_client_factory(lambda: library.Client(limits=library.Limits(keepalive_expiry=None)))
    try:
        store = opened()
        file = listed(store)["model.safetensors"]
        for start in range(5):
            read_range(store, file, start, 1000)
            hub.expire()
        assert (len(hub.at("resolve")), len(hub.at("cdn")), hub.connections) == (5, 9, 2)
    finally:
        huggingface_hub.set_client_factory(default_client_factory)


def test_threads_read_in_parallel(hub: HubServer) -> None:
    store = opened()
    file = listed(store)["model.safetensors"]
    hub.fail("cdn", *[Fault("reset")] * 5, *[Fault()] * 5)
    starts = range(0, len(WEIGHTS), 50_000)
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(
            lambda at: read_range(store, file, at, min(50_000, file.size - at)), starts, timeout=HANG
        )
        assert b"".join(parts) == WEIGHTS


# --- the cache and the environment


def test_files_of_the_cache_are_read_from_there(hub: HubServer) -> None:
    for path in ("model.safetensors", "config.json"):
        huggingface_hub.hf_hub_download(
            NAME, path, endpoint=hub.endpoint, token=False, cache_dir=Path(os.environ["HF_HOME"], "hub")
        )
    store = opened()
    file = listed(store)["model.safetensors"]
    hub.seen.clear()
    assert read_range(store, file, 5, 100) == WEIGHTS[5:105]
    assert hub.seen == []
    # At another commit the cache has nothing.
    hub.repos[NAME].commit({"model.safetensors": WEIGHTS[:2000]})
    assert read(opened(), offset=5, length=100) == WEIGHTS[5:105]
    assert len(hub.at("cdn")) == 1


@pytest.mark.parametrize("size", [3000, len(WEIGHTS) + 1])
def test_a_file_of_another_size_in_the_cache_is_not_used(hub: HubServer, size: int) -> None:
    cache = Path(os.environ["HF_HOME"], "hub")
    path = huggingface_hub.hf_hub_download(
        NAME, "model.safetensors", endpoint=hub.endpoint, token=False, cache_dir=cache
    )
    Path(path).write_bytes(b"x" * size)
    assert read(opened()) == WEIGHTS[1000:6000]
    shutil.rmtree(cache)
    assert read(opened()) == WEIGHTS[1000:6000]


@pytest.mark.parametrize("source", ["HF_TOKEN", "file", "argument"])
def test_the_token_is_sent_to_the_endpoint_alone(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    hub.repo("org/private", private=True).commit(FILES)
    hub.tokens[TOKEN] = {"org/private"}
    if source == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    elif source == "file":
        Path(constants.HF_TOKEN_PATH).parent.mkdir()
        Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    store = opened("hf://org/private", token=TOKEN if source == "argument" else None)
    assert read(store) == read(store, offset=1000) == WEIGHTS[1000:6000]
    assert len(hub.at("cdn")) == 2
    for seen in hub.seen:
        assert seen.headers.get("authorization") == (None if seen.place == "cdn" else f"Bearer {TOKEN}")
        assert seen.headers["user-agent"].startswith("fastshard/") and "hf_hub/" in seen.headers["user-agent"]


def test_no_token_is_sent_where_the_user_forbids_it(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert read(opened()) == WEIGHTS[1000:6000]
    assert {seen.headers.get("authorization") for seen in hub.seen} == {None}


def test_offline_nothing_is_asked(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    file = listed(store)["config.json"]
    hub.seen.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for call in (opened, store.list_files, lambda: read_range(store, file, 0, 5)):
        assert "HF_HUB_OFFLINE" in str(refused("FS507", call))
    assert hub.seen == []


@pytest.mark.parametrize("missing", ["all of it", "a new one"])
def test_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "all of it":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    else:
        monkeypatch.setattr(huggingface_hub, "__version__", "0.36.0")
    assert "pip install 'fastshard[cloud]'" in str(refused("FS514", opened))


# --- errors that pass

PASSING = [
    Fault(status=408),
    Fault(status=429),
    Fault(status=429, headers={"Retry-After": "7"}),
    Fault(status=429, headers={"RateLimit": '"api";r=0;t=9'}),
    Fault(status=500),
    Fault(status=502),
    Fault(status=503, headers={"Retry-After": "5"}),
    Fault(status=504),
    Fault("reset"),
    Fault("short"),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
@pytest.mark.parametrize("place", ["api", "resolve", "cdn"])
def test_errors_that_pass_are_retried(hub: HubServer, place: str, fault: Fault) -> None:
    time = Time()
    path = "model.safetensors" if place == "cdn" else "config.json"
    hub.fail(place, fault)
    store = opened(time=time)
    assert read(store, path, 3, 15) == FILES[path][3:18]
    assert len(time.waits) == 1
    seconds = fault.headers.get("Retry-After") or (fault.headers.get("RateLimit") or "=0").rpartition("=")[2]
    assert time.waits[0] >= float(seconds)


def test_what_came_before_an_error_is_not_read_again(hub: HubServer) -> None:
    hub.fail("cdn", Fault("short"), Fault("short"))
    assert read(opened(), offset=0, length=8000) == WEIGHTS[:8000]
    ranges = [seen.headers["range"] for seen in hub.at("cdn")]
    assert ranges == ["bytes=0-7999", "bytes=4000-7999", "bytes=6000-7999"]


@pytest.mark.parametrize("place", ["api", "resolve", "cdn"])
def test_errors_that_stay_are_reported_after_the_deadline(hub: HubServer, place: str) -> None:
    time = Time()
    hub.fail(place, *[Fault()] * 1000)
    assert "status 503" in str(refused("FS507", lambda: read(opened(time=time))))
    assert len(time.waits) > 5 and 40 < time.passed <= 61


def test_a_wait_beyond_the_deadline_is_reported_at_once(hub: HubServer) -> None:
    time = Time()
    hub.fail("api", Fault(status=429, headers={"Retry-After": "3600"}))
    assert "3600 seconds" in str(refused("FS507", opened, time=time))
    assert time.waits == []


def test_a_server_that_is_silent_does_not_hang_the_read(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    file = listed(store)["config.json"]
    monkeypatch.setattr(hub_requests, "_SILENCE", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0)
    hub.fail("resolve", *[Fault("silent")] * 1000)
    assert "does not answer" in str(refused("FS507", read_range, store, file, 0, 5))


def test_data_that_comes_too_slowly_does_not_hang_the_read(hub: HubServer) -> None:
    store = opened(time=Time(step=31.0))
    file = StoredFile("model.safetensors", len(WEIGHTS), f"{store.revision}/{blob_id(WEIGHTS)}")
    assert "too slowly" in str(refused("FS507", read_range, store, file, 0, len(WEIGHTS)))


def test_an_endpoint_that_cannot_be_reached_is_named(hub: HubServer) -> None:
    with socket.socket() as taken:
        # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        time = Time()
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        error = refused("FS507", opened, endpoint=endpoint, time=time)
    assert "127.0.0.1 cannot be reached" in str(error) and "HF_ENDPOINT" in str(error)
    assert len(time.waits) == 3


def test_an_endpoint_that_goes_away_is_waited_for(hub: HubServer) -> None:
    time = Time()
    store = opened(time=time)
    file = listed(store)["config.json"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store._hub._endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot be reached" in str(refused("FS507", read_range, store, file, 0, 5))
    assert len(time.waits) > 5 and 40 < time.passed <= 61


# --- answers that are wrong


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub: HubServer) -> None:
    hub.fail("cdn", Fault("range ignored"))
    assert read(opened(), offset=0, length=100) == WEIGHTS[:100]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("range ignored"), "ignores ranges"),
        (Fault("page"), "HTML page"),
        (Fault("another range"), "another range"),
        (Fault("compressed"), "compressed"),
        (Fault("longer"), "longer"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_wrong_answers_are_refused(hub: HubServer, fault: Fault, words: str, path: str) -> None:
    hub.fail("cdn" if path == "model.safetensors" else "resolve", fault)
    assert words in str(refused("FS507", read, opened(), path, 2, 9))


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_file_of_another_size_is_a_changed_source(hub: HubServer, path: str) -> None:
    hub.fail("cdn" if path == "model.safetensors" else "resolve", Fault("another size"))
    assert refused("FS506", read, opened(), path, 2, 9).got == f"{len(FILES[path]) + 1} bytes"


def test_an_answer_without_an_end_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    monkeypatch.setattr(hub_requests, "_MOST_BYTES", 100)
    assert "more than 100 bytes" in str(refused("FS507", store.list_files))


def test_an_endpoint_with_encryption_does_not_lead_out_of_it(hub: HubServer) -> None:
    store = opened()
    file = listed(store)["model.safetensors"]
    # As if what answers here were an endpoint with encryption.
    store._hub._is_encrypted = True
    assert "without encryption" in str(refused("FS507", read_range, store, file, 0, 5))
    assert hub.at("cdn") == []


def test_a_page_in_place_of_an_answer_is_no_hub(hub: HubServer) -> None:
    hub.fail("api", Fault("page"))
    assert "HTML page" in str(refused("FS507", opened))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"X_Repo_Commit": "1" * 40}, "FS506"),
        ({"X_Linked_Size": "5"}, "FS506"),
        ({"X_Linked_Size": "9" * 18}, "FS506"),
        ({"X_Linked_Etag": f'"{"0" * 64}"'}, "FS506"),
        ({"Location": "file:///etc/passwd"}, "FS507"),
        ({"Location": "http://["}, "FS507"),
        ({"Location": "FTP://host/x"}, "FS507"),
        ({"Location": "/org/name/resolve/main/model.safetensors"}, "FS506"),
    ],
    ids=str,
)
def test_what_is_stated_beside_the_data_is_checked(
    hub: HubServer, headers: dict[str, str], code: str
) -> None:
    hub.fail("resolve", *[Fault("headers", headers=headers)] * 20)
    if "main" in headers.get("Location", ""):
        store = opened()
        file = listed(store)["model.safetensors"]
        hub.repos[NAME].commit({"model.safetensors": WEIGHTS[::-1]})
        refused(code, read_range, store, file, 0, 10)
    else:
        refused(code, read, opened())
    assert hub.at("cdn") == []


def test_numbers_without_an_end_are_no_numbers(hub: HubServer) -> None:
    hub.fail("resolve", Fault("headers", headers={"X_Linked_Size": "9" * 5000}))
    assert read(opened()) == WEIGHTS[1000:6000]


def test_redirects_that_do_not_end_are_refused(hub: HubServer) -> None:
    store = opened()
    there = f"/{NAME}/resolve/{store.revision}/model.safetensors"
    hub.fail("resolve", *[Fault("headers", headers={"Location": there})] * 100)
    assert "redirects" in str(refused("FS507", read, store))


# --- what users may not read, or what is missing


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_gated_repository_names_the_page_where_access_is_asked_for(
    hub: HubServer, token: str | None
) -> None:
    hub.repo("org/gated", gated=True).commit(FILES)
    hub.tokens[TOKEN] = set()
    error = refused("FS502", read, opened("hf://org/gated", token=token))
    assert f"{hub.endpoint}/org/gated" in str(error) and "hf auth login" in str(error)
    hub.tokens[TOKEN] = {"org/gated"}
    assert read(opened("hf://org/gated", token=TOKEN)) == WEIGHTS[1000:6000]


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("name", ["org/private", "org/missing"])
def test_a_private_repository_looks_like_a_missing_one(hub: HubServer, name: str, token: str | None) -> None:
    hub.repo("org/private", private=True).commit(FILES)
    hub.tokens[TOKEN] = set()
    error = refused("FS501", opened, f"hf://{name}", token=token)
    assert "private" in str(error) and "hf auth login" in str(error)


def test_a_token_that_is_not_valid_is_refused(hub: HubServer) -> None:
    assert "rejects the token as invalid" in str(refused("FS502", opened, token=TOKEN))
    refused("FS502", opened, token="two\nlines")


def test_a_refusal_without_a_reason_is_a_missing_right(hub: HubServer) -> None:
    hub.fail("api", Fault(status=403))
    refused("FS502", opened)


@pytest.mark.parametrize("address", [f"hf://{NAME}@gone", f"hf://{NAME}@{'0' * 40}"])
def test_a_missing_revision_is_named(hub: HubServer, address: str) -> None:
    assert address.partition("@")[2] in str(refused("FS501", opened, address))


def test_a_missing_path_is_named(hub: HubServer) -> None:
    assert "gone/model" in str(refused("FS501", opened, f"hf://{NAME}/gone/model"))


def test_a_commit_that_vanished_is_a_changed_source(hub: HubServer) -> None:
    store = opened()
    file = listed(store)["config.json"]
    del hub.repos[NAME].commits[store.revision]
    refused("FS506", store.list_files)
    assert "the commit is no longer in the repository" in str(refused("FS506", read_range, store, file, 0, 4))


def test_a_file_that_vanished_is_a_changed_source(hub: HubServer) -> None:
    store = opened()
    file = listed(store)["config.json"]
    del hub.repos[NAME].commits[store.revision]["config.json"]
    assert refused("FS506", read_range, store, file, 0, 4).path == f"hf://{NAME}/config.json"


# --- secrets


def test_no_token_and_no_signature_is_said_or_logged(
    hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repo("org/private", private=True).commit(FILES)
    hub.tokens[TOKEN] = {"org/private"}
    library = logging.getLogger("huggingface_hub")
    before = library.level
    library.setLevel(logging.DEBUG)
    library.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG):
            store = opened("hf://org/private", token=TOKEN)
            file = listed(store)["model.safetensors"]
            read_range(store, file, 0, 10)
            said = [repr(store), str(vars(store)), str(file)]
            for fault in (
                *[Fault(status=status) for status in (400, 403, 404, 416, 418)],
                *[Fault(kind) for kind in ("page", "range ignored", "another range", "compressed")],
                *[Fault(status=503, headers={"Retry-After": "3600"})],
            ):
                for place in ("resolve", "cdn"):
                    store = opened("hf://org/private", token=TOKEN)
                    hub.fail(place, fault)
                    path = "config.json" if place == "resolve" else "model.safetensors"
                    with pytest.raises(FastshardError) as caught:
                        read_range(store, listed(store)[path], 2, 10)
                    said += _all_of(caught.value)
            hub.fail("cdn", *[Fault("reset")] * 200)
            said += _all_of(
                refused("FS507", read_range, opened("hf://org/private", token=TOKEN), file, 2, 10)
            )
            said += _all_of(refused("FS502", opened, token=f"{TOKEN}\n{TOKEN}"))
    finally:
        library.removeHandler(caplog.handler)
        library.setLevel(before)
    loggers = {record.name for record in caplog.records}
    assert "huggingface_hub.utils._http" in loggers and any(name.startswith("httpcore") for name in loggers)
    assert f"{hub.cdn}/blobs/" in caplog.text, "nothing was logged of the signed addresses"
    for text in (*said, caplog.text):
        assert "MARKER" not in text and "SIGNATURE" not in text


def _all_of(error: BaseException) -> list[str]:
    assert error.__cause__ is None and error.__context__ is None
    return [str(error), repr(error), "".join(traceback.format_exception(error))]


def test_logs_of_other_requests_are_left_alone(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    read(opened())
    with caplog.at_level(logging.INFO):
        huggingface_hub.get_session().get(f"{hub.endpoint}/api/models/{NAME}?seen=1")
    assert "?seen=1" in caplog.text
