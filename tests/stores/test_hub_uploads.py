"""A result on the hub is one commit that holds it whole, or none, through the real huggingface_hub."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.conversion import convert as conversion
from fastshard.stores import hub_requests, hub_upload
from helpers import FIXTURES, cli
from holding import HANG

pytest.importorskip("huggingface_hub")

import huggingface_hub
from hub_server import Fault, HubServer, Repo, serving_hub
from huggingface_hub import constants
from huggingface_hub.utils import _http, are_progress_bars_disabled

HF = FIXTURES / "sharded/hf_sharded"
MEGATRON = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
NAME = "org/name"
TARGET = f"hf://{NAME}"
TOKEN = "hf_MARKERMARKERMARKER"
MANIFEST = "fastshard.manifest.json"
BEGINS = {".gitattributes": b"*.safetensors filter=lfs\n", "README.md": b"# mine\n"}
_BEGINS = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP", "http", "ALL_PROXY", "all_proxy", "SSL_")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The endpoint with an empty repository, and a token that may write to it."""
    for name in [name for name in os.environ if name.startswith(_BEGINS)]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    # Its protocol is that of another service.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_requests, "_SILENCE", HANG)
    monkeypatch.setattr(hub_requests, "_CONNECT", HANG)
    monkeypatch.setattr(hub_requests, "_PATIENCE", 1.0)
    monkeypatch.setattr(hub_upload, "_PAUSE", 0.0)
    monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0))
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(staging))
    huggingface_hub.close_session()
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.tokens[TOKEN] = {NAME}
        server.repo(NAME).commit(BEGINS)
        yield server
    huggingface_hub.close_session()


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def repo_of(hub: HubServer) -> Repo:
    return hub.repos[NAME]


def files_at(hub: HubServer, ref: str = "main") -> dict[str, bytes]:
    repo = repo_of(hub)
    return repo.commits[repo.refs[ref]]


def read_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def assert_is_result(files: dict[str, bytes], disk: Path) -> None:
    """The files are exactly those of a run on a disk, besides what was there."""
    there = {name: content for name, content in files.items() if name != ".gitattributes"}
    expected = read_files(disk)
    if "README.md" not in expected:
        assert there.pop("README.md") == BEGINS["README.md"]
    manifests = [json.loads(one.pop(MANIFEST)) for one in (there, expected)]
    assert there == expected
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    for row in (row for manifest in manifests for row in manifest["files"]):
        row.pop("mtime_ns", None)
    assert manifests[0]["files"] == manifests[1]["files"]


def refused(code: str, call: Callable[..., Any], *args: Any, **options: Any) -> FastshardError:
    with pytest.raises(FastshardError) as caught:
        call(*args, **options)
    error = caught.value
    assert error.code == code, error.findings
    assert error.findings[0].help
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    assert all(isinstance(link, FastshardError) for link in chain)
    assert TOKEN not in str(chain) and "SIGNATURE" not in str(chain)
    return error


def convert(target: str = TARGET, **options: Any) -> Any:
    return fastshard.convert(HF, target, to="hf", **options)


def assert_untouched(hub: HubServer) -> None:
    """Nobody sees anything of the run."""
    assert len(repo_of(hub).commits) == 1
    assert files_at(hub) == BEGINS
    assert set(repo_of(hub).refs) == {"main"}


# --- what is published


@pytest.mark.parametrize("part_size", [None, 100_000])
def test_a_conversion_is_one_commit(
    hub: HubServer, tmp_path: Path, staging: Path, part_size: int | None
) -> None:
    hub.part_size = part_size
    before = repo_of(hub).refs["main"]
    # All that is uploaded before the commit is in no commit.
    hub.hooks["commit"] = lambda: assert_untouched(hub)
    ran = cli("convert", MEGATRON, TARGET, "--to", "hf")
    assert ran.code == 0, ran.out + ran.err
    head = repo_of(hub).refs["main"]
    assert repo_of(hub).parents == {before: None, head: before}
    assert cli("convert", MEGATRON, tmp_path / "disk", "--to", "hf").code == 0
    assert_is_result(files_at(hub), tmp_path / "disk")
    published = [finding for finding in ran.findings if finding["code"] == codes.PUBLISHED]
    assert [finding["file"] for finding in published] == [f"{TARGET}@{head}"]
    assert "README.md" in published[0]["message"]
    assert list(staging.iterdir()) == []
    assert TOKEN not in ran.out + ran.err and "SIGNATURE" not in ran.out + ran.err
    assert cli("verify", TARGET).code == 0
    assert cli("diff", TARGET, tmp_path / "disk").code == 0


def test_a_merge_is_one_commit(hub: HubServer, tmp_path: Path) -> None:
    manifest = fastshard.merge(HF, TARGET, max_shard_size="200KB")
    fastshard.merge(HF, tmp_path / "disk", max_shard_size="200KB")
    assert len(repo_of(hub).commits) == 2
    assert_is_result(files_at(hub), tmp_path / "disk")
    assert manifest.document["files"] == json.loads(files_at(hub)[MANIFEST])["files"]
    assert cli("verify", TARGET).code == 0


def test_a_result_in_a_folder_leaves_the_rest(hub: HubServer, tmp_path: Path) -> None:
    convert()
    first = files_at(hub)
    convert(f"{TARGET}/deep/second", dtype="bf16")
    fastshard.convert(HF, tmp_path / "disk", to="hf", dtype="bf16")
    files = files_at(hub)
    below = {n.removeprefix("deep/second/"): c for n, c in files.items() if n.startswith("deep/second/")}
    assert {name: content for name, content in files.items() if "/" not in name} == first
    assert_is_result(below, tmp_path / "disk")
    assert cli("verify", f"{TARGET}/deep/second").code == 0


def test_a_branch_gets_the_commit(hub: HubServer) -> None:
    main = repo_of(hub).refs["main"]
    repo_of(hub).refs["feature/x"] = main
    convert(f"{TARGET}@feature%2Fx")
    assert repo_of(hub).refs["main"] == main
    assert "model.safetensors" in files_at(hub, "feature/x")


@pytest.mark.parametrize("fault", [None, "lost"])
def test_a_missing_branch_is_made_from_main(hub: HubServer, fault: str | None) -> None:
    main = repo_of(hub).refs["main"]
    if fault:
        hub.fail("branch", Fault(fault))
    hub.hooks["branch"] = lambda: assert_untouched(hub)
    ran = cli("convert", HF, TARGET, "--to", "hf", "--hf-branch", "new", json_output=False)
    assert ran.code == 0, ran.err
    assert f"branch new; it replaces README.md: {TARGET}@{repo_of(hub).refs['new']}" in ran.out
    assert repo_of(hub).refs["main"] == main
    assert repo_of(hub).parents[repo_of(hub).refs["new"]] == main
    assert cli("verify", f"{TARGET}@new").code == 0


def test_a_failed_commit_leaves_no_new_branch(hub: HubServer) -> None:
    hub.fail("commit", Fault(status=403))
    refused("FS502", convert, hf_branch="new")
    assert_untouched(hub)


@pytest.mark.parametrize("fault", [None, "lost"])
def test_a_pull_request_leaves_the_branch(hub: HubServer, fault: str | None) -> None:
    # Whoever may read may propose.
    hub.tokens[TOKEN] = set()
    repo = repo_of(hub)
    main = repo.refs["main"]
    repo.commit({"other": b""}, "refs/pr/1")
    if fault:
        hub.fail("commit", Fault(fault))
    manifest = convert(hf_pr=True)
    assert repo.refs["main"] == main
    assert repo.parents[repo.refs["refs/pr/2"]] == main
    assert set(repo.refs) == {"main", "refs/pr/1", "refs/pr/2"}
    assert "/discussions/2" in manifest.findings[-1].message


# --- what is refused before the work


def test_addresses_that_are_no_branch_are_refused(hub: HubServer) -> None:
    repo = repo_of(hub)
    repo.refs["v1"], repo.tags = repo.refs["main"], {"v1"}
    for address, code in {
        f"{TARGET}@v1": "FS514",
        f"{TARGET}@{repo.refs['main']}": "FS514",
        f"{TARGET}@refs%2Fpr%2F1": "FS514",
        "hf://datasets/org/name": "FS514",
        "hf://spaces/org/name": "FS514",
        "hf://buckets/org/name": "FS514",
        "hf://name": "FS515",
        f"{TARGET}/README.md": "FS504",
        f"{TARGET}/README.md/deeper": "FS504",
    }.items():
        refused(code, convert, address)
    refused("FS501", convert, f"{TARGET}@none", hf_pr=True)
    assert hub.at("preupload", "POST") == []


def test_options_that_do_not_fit_are_refused(hub: HubServer, tmp_path: Path) -> None:
    refused("FS515", convert, f"{TARGET}@a", hf_branch="b")
    refused("FS515", convert, hf_branch="a b")
    refused("FS515", convert, str(tmp_path / "out"), hf_branch="b")
    refused("FS515", fastshard.merge, HF, str(tmp_path / "out"), hf_pr=True)
    for options in ({"resume": True}, {"sparse": True}, {"rank": 0, "world": 2}, {"node_local": True}):
        refused("FS514", convert, **options)
    assert hub.seen == []
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_the_destination(hub: HubServer) -> None:
    convert()
    error = refused("FS505", fastshard.convert, TARGET, f"{TARGET}/below", to="hf")
    assert TARGET in str(error)


def test_no_token_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert refused("FS502", convert).findings[0].run == ("hf auth login",)
    assert hub.seen == []


def test_a_token_that_may_only_read_is_refused(hub: HubServer) -> None:
    hub.readers = {TOKEN}
    refused("FS502", convert)
    assert hub.at("preupload", "POST") == []


def test_an_unknown_role_is_no_obstacle(hub: HubServer) -> None:
    hub.fail("whoami", Fault(status=429))
    convert()
    assert len(repo_of(hub).commits) == 2


@pytest.mark.parametrize("kind", ["missing", "private"])
def test_a_repository_that_cannot_be_seen_is_refused(hub: HubServer, kind: str) -> None:
    if kind == "private":
        hub.tokens[TOKEN] = set()
        repo_of(hub).private = True
    else:
        del hub.repos[NAME]
    assert refused("FS501", convert).findings[0].run == (f"hf repos create {NAME} --private",)


def test_an_invalid_token_is_refused(hub: HubServer) -> None:
    hub.tokens.clear()
    refused("FS502", convert)


# --- occupied


def test_an_occupied_repository_is_refused(hub: HubServer) -> None:
    repo_of(hub).commit(BEGINS | {"weights.bin": b"older"})
    for options in ({}, {"overwrite": True}):
        assert "weights.bin" in str(refused("FS504", convert, **options))
    assert hub.at("preupload", "POST") == []


def test_licences_and_images_are_in_nobodys_way(hub: HubServer) -> None:
    others = {"LICENSE.txt": b"", "NOTICE": b"n", "assets/a.PNG": b"p", "notes.md": b"m"}
    repo_of(hub).commit(BEGINS | others)
    convert()
    assert others.items() <= files_at(hub).items()
    assert cli("verify", TARGET).code == 0


def test_an_older_result_is_replaced_in_the_same_commit(hub: HubServer, tmp_path: Path) -> None:
    fastshard.merge(HF, TARGET, max_shard_size="200KB")
    older = files_at(hub)
    assert refused("FS504", convert).findings[0].run == ("--overwrite",)
    convert(overwrite=True)
    fastshard.convert(HF, tmp_path / "disk", to="hf")
    assert_is_result(files_at(hub), tmp_path / "disk")
    assert len(repo_of(hub).commits) == 3
    assert "model.safetensors.index.json" in older.keys() - files_at(hub).keys()
    # The same once more: of what differs is the manifest alone, which has the time of the run.
    before = files_at(hub)
    convert(overwrite=True)
    after = files_at(hub)
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == {MANIFEST}
    repo_of(hub).commit(files_at(hub) | {"optimizer.pt": b"mine"})
    assert "optimizer.pt" in str(refused("FS504", convert, overwrite=True))


def test_a_manifest_that_is_none_is_no_older_result(hub: HubServer) -> None:
    repo_of(hub).commit({MANIFEST: b'{"files": [{"name": "a"}]}', "a": b""})
    refused("FS518", convert, overwrite=True)


# --- what fails


def kept_in(staging: Path) -> Path:
    (made,) = staging.iterdir()
    return made / "name"


def assert_is_kept(error: FastshardError, staging: Path, hub: HubServer) -> None:
    """The complete result is kept, and the error names it."""
    kept = kept_in(staging)
    assert fastshard.verify(kept).ok
    finding = error.findings[0]
    assert str(kept) in str(finding.help)
    assert finding.run[-1].startswith(f"hf upload {NAME} {kept} . --revision main")
    assert_untouched(hub)


@pytest.mark.parametrize(
    ("place", "status", "code"),
    [
        ("preupload", 401, "FS502"),
        ("preupload", 403, "FS502"),
        ("preupload", 404, "FS501"),
        ("batch", 413, "FS507"),
        ("put", 403, "FS502"),
        ("commit", 400, "FS507"),
        ("commit", 403, "FS502"),
        ("commit", 404, "FS501"),
        ("commit", 409, "FS516"),
        ("commit", 412, "FS516"),
        ("commit", 413, "FS507"),
    ],
)
def test_a_refusal_leaves_the_result_here(
    hub: HubServer, staging: Path, place: str, status: int, code: str
) -> None:
    hub.fail(place, Fault(status=status))
    assert_is_kept(refused(code, convert), staging, hub)


@pytest.mark.parametrize("place", ["preupload", "batch", "put", "verify", "commit"])
@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=429), Fault("reset")])
def test_an_error_that_passes_is_retried(hub: HubServer, staging: Path, place: str, fault: Fault) -> None:
    hub.fail(place, fault)
    convert()
    assert len(repo_of(hub).commits) == 2
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("fault", [Fault(status=503), Fault("reset")])
@pytest.mark.parametrize("place", ["put", "commit"])
def test_an_error_that_stays_leaves_the_result_here(
    hub: HubServer, staging: Path, place: str, fault: Fault
) -> None:
    hub.fail(place, *[fault] * 20)
    assert_is_kept(refused("FS507", convert), staging, hub)


@pytest.mark.parametrize("others", [False, True])
def test_a_lost_answer_is_no_failure(
    hub: HubServer, staging: Path, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("commit", Fault("lost"))
    if others:
        # Somebody has committed to the branch before it is looked at.
        original = HubServer.take

        def take(self: HubServer, place: str) -> Fault | None:
            if place == "refs" and len(repo_of(hub).commits) == 2:
                repo_of(hub).commit(files_at(hub) | {"later.md": b"later"})
            return original(self, place)

        monkeypatch.setattr(HubServer, "take", take)
    manifest = convert()
    assert len(hub.at("commit", "POST")) == 1
    made = list(repo_of(hub).commits)[1]
    assert manifest.findings[-1].file == f"{TARGET}@{made}"
    assert list(staging.iterdir()) == []


def test_a_branch_that_moved_is_a_conflict(hub: HubServer, staging: Path) -> None:
    hub.hooks["batch"] = lambda: repo_of(hub).commit(BEGINS | {"their.bin": b"theirs"})
    error = refused("FS516", convert)
    assert error.findings[0].expected and str(kept_in(staging)) in str(error)
    assert len(repo_of(hub).commits) == 2
    assert "model.safetensors" not in files_at(hub)


@pytest.mark.parametrize("kind", ["lose", "corrupt"])
def test_a_commit_with_something_else_is_found(hub: HubServer, staging: Path, kind: str) -> None:
    hub.fail("put", Fault(kind))
    ran = cli("convert", HF, TARGET, "--to", "hf")
    commit = repo_of(hub).refs["main"]
    (finding,) = [one for one in ran.findings if one["severity"] == "error"]
    assert (ran.code, finding["code"]) == (1, "FS517")
    assert finding["file"] == f"{TARGET}@{commit}/model.safetensors"
    assert finding["run"][0] == f"git revert {commit}"
    assert "wrote nothing" not in ran.err
    assert fastshard.verify(kept_in(staging)).ok


def test_a_commit_that_cannot_be_listed_is_named(hub: HubServer, staging: Path) -> None:
    hub.hooks["commit"] = lambda: hub.fail("api", *[Fault(status=503)] * 100)
    error = refused("FS507", convert)
    commit = repo_of(hub).refs["main"]
    assert error.findings[0].file == f"{TARGET}@{commit}"
    assert f"fastshard verify {TARGET}@{commit}" in error.findings[0].run
    assert kept_in(staging).is_dir()


def test_files_that_the_repository_ignores_are_found_before_the_commit(hub: HubServer, staging: Path) -> None:
    repo_of(hub).commit(BEGINS | {".gitignore": b"folder/config.json"})
    error = refused("FS514", convert, f"{TARGET}/folder")
    assert error.findings[0].got == "folder/config.json"
    assert len(repo_of(hub).commits) == 2 and hub.at("commit", "POST") == []
    assert (kept_in(staging).parent / "folder").is_dir()
    refused("FS504", convert)


@pytest.mark.parametrize("call", ["preupload_lfs_files", "create_commit"])
def test_an_interrupt_of_the_upload_leaves_the_result_here(
    hub: HubServer, staging: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub.HfApi, call, stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert()
    (finding,) = caught.value.findings  # type: ignore[attr-defined]
    assert finding.code == "FS510" and str(kept_in(staging)) in finding.help
    assert finding.run[0].startswith("hf upload")
    assert_untouched(hub)


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_interrupt_of_the_writing_leaves_nothing_or_all(
    hub: HubServer, staging: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if is_complete:
        monkeypatch.setattr(conversion.Job, "manifest", stop)
    else:
        monkeypatch.setattr(conversion, "_find_array_writer", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert()
    findings = getattr(caught.value, "findings", [])
    notes = str(getattr(caught.value, "__notes__", []))
    assert "--resume" not in notes and codes.PUBLISHED not in notes
    assert_untouched(hub)
    if not is_complete:
        assert (findings, list(staging.iterdir())) == ([], [])
        return
    (finding,) = findings
    assert finding.code == codes.INTERRUPTED and str(kept_in(staging)) in finding.help
    assert fastshard.verify(kept_in(staging)).ok


def test_a_callback_stops_a_run(hub: HubServer, staging: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        convert(progress=stop)
    for finding in getattr(caught.value, "findings", []):
        assert "--resume" not in str([finding.help, *finding.run])
    # By how far the run was when it was called.
    assert [path.parent for path in staging.rglob(MANIFEST)] == [one / "name" for one in staging.iterdir()]
    assert_untouched(hub)


def test_a_refused_conversion_leaves_nothing(hub: HubServer, staging: Path, tmp_path: Path) -> None:
    with pytest.raises(FastshardError):
        convert(tmp_path / "none", expect_loss=1.0)
    with pytest.raises(FastshardError):
        fastshard.convert(tmp_path / "none", TARGET, to="hf")
    assert list(staging.iterdir()) == []
    assert hub.seen == []


# --- silence


def test_neither_bars_nor_secrets_are_shown(
    hub: HubServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    huggingface_hub.utils.enable_progress_bars()
    hub.fail("put", Fault(status=503))
    convert()
    shown = capfd.readouterr()
    assert shown.out == ""
    text = shown.err + caplog.text + str([record.__dict__ for record in caplog.records])
    assert TOKEN not in text and "SIGNATURE" not in text
    assert "%|" not in shown.err
    assert not are_progress_bars_disabled()
    assert str(huggingface_hub.get_session().timeout) == "Timeout(timeout=None)"
