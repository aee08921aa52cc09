"""Downloads from Hugging Face's hub, checked offline, and what `verify` says of how far it looked."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from helpers import HF, NEOX, cli, copy, flip_bit
from holding import interrupted_hashing
from safetensors.torch import save_file

SHARD = "model-00002-of-00004.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def etag(file: Path) -> str:
    """As the hub answers: SHA-256 of files in LFS, the id of the git blob of others."""
    content = file.read_bytes()
    return hashlib.sha256(content).hexdigest() if file.suffix == ".safetensors" else git_sha1(content)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return copy(HF, tmp_path / "hf")


@pytest.fixture
def cached(hf: Path, tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub makes it."""
    from huggingface_hub.file_download import _create_symlink

    storage = tmp_path / "hub/models--org--name"
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "blobs").mkdir()
    for file in hf.iterdir():
        blob = storage / "blobs" / etag(file)
        shutil.copyfile(file, blob)
        _create_symlink(str(blob), str(snapshot / file.name), new_blob=True)
    assert (snapshot / SHARD).is_symlink()
    return snapshot


@pytest.fixture
def local(hf: Path) -> Path:
    """A folder that was given as ``--local-dir``."""
    from huggingface_hub._local_folder import write_download_metadata

    for file in sorted(hf.iterdir()):
        write_download_metadata(hf, file.name, COMMIT, etag(file))
    return hf


def test_the_hash_of_a_git_blob_is_gits() -> None:
    assert git_sha1(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_snapshot_of_the_cache_is_checked(cached: Path) -> None:
    ran = cli("verify", cached)
    assert (ran.code, ran.errors) == (0, [])
    told = f"{len(list(cached.iterdir())) - 1} files against the hashes of the download"
    assert ran.doc["checked"] == {"ending": "contents_checked", "against": [told]}
    assert printed(cached) == [f"{cached}: OK, contents checked: {told} (exit 0)"]


def test_so_is_a_local_dir(local: Path) -> None:
    ran = cli("verify", local)
    assert (ran.code, ran.errors) == (0, [])
    assert ran.doc["checked"]["ending"] == "contents_checked"


@pytest.mark.parametrize("place", ["cached", "local"])
@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_bit_that_changed_is_found(request: pytest.FixtureRequest, place: str, name: str) -> None:
    root: Path = request.getfixturevalue(place)
    expected = etag(root / name)
    if name == SHARD:
        flip_bit(root / name, (root / name).stat().st_size - 5)
    else:
        (root / name).write_text(
            (root / name).read_text().replace('"use_cache": true', '"use_cache": false') + " "
        )
        # As damage is: without another time.
        os.utime(root / name, (1, 1))
    ran = cli("verify", root)
    assert ran.code == 1 and "checked" not in ran.doc
    (found,) = ran.errors
    kind = "sha256" if name == SHARD else "git blob sha1"
    assert (found["code"], found["file"]) == ("FS308", name)
    assert found["expected"] == f"{kind} {expected}"
    assert found["got"] == f"{kind} {etag(root / name)}"
    repository = "org/name" if place == "cached" else "REPO"
    assert f"hf download {repository} {name}" in found["run"][0]


def test_a_signal_ends_the_hashing_of_files(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastshard.common.hub_downloads._PIECE", 1)
    with interrupted_hashing(monkeypatch), pytest.raises(KeyboardInterrupt):
        fastshard.verify(local)


def test_a_text_that_was_edited_since_is_a_warning(local: Path) -> None:
    (local / "config.json").write_text((local / "config.json").read_text() + "\n")
    later = time.time() + 60
    os.utime(local / "config.json", (later, later))
    ran = cli("verify", local)
    assert ran.code == 0
    (found,) = ran.having("FS308")
    assert (found["severity"], found["file"]) == ("warning", "config.json")


def test_weights_that_were_written_since_are_an_error(local: Path) -> None:
    flip_bit(local / SHARD, (local / SHARD).stat().st_size - 5)
    later = time.time() + 60
    os.utime(local / SHARD, (later, later))
    ran = cli("verify", local)
    (found,) = ran.errors
    assert (ran.code, found["code"], found["file"]) == (1, "FS308", SHARD)
    assert "move its record away" in found["help"]


def test_a_copy_with_another_time_is_as_good(local: Path) -> None:
    later = time.time() + 60
    for file in local.glob("*.safetensors"):
        os.utime(file, (later, later))
    assert cli("verify", local).doc["checked"]["ending"] == "contents_checked"


@pytest.mark.parametrize("content", ["", "x", f"{COMMIT}\nno-hash\n1.0\n", f"{COMMIT}\n{'a' * 64}\nnever\n"])
def test_records_that_are_none_prove_nothing(local: Path, content: str) -> None:
    (local / f".cache/huggingface/download/{SHARD}.metadata").write_text(content)
    ran = cli("verify", local)
    assert ran.code == 0
    assert ran.doc["checked"]["ending"] == "complete"
    assert "3 of 4 files of tensors" in ran.doc["checked"]["against"][0]


def test_parts_of_the_work_find_it_once(local: Path) -> None:
    flip_bit(local / SHARD, (local / SHARD).stat().st_size - 5)
    found = [cli("verify", local, "--subset", f"{n}/3").having("FS308") for n in (1, 2, 3)]
    assert sum(map(len, found)) == 1


def test_one_file_of_a_snapshot(cached: Path) -> None:
    words = "verify", cached / SHARD, "--accept", "part"
    assert cli(*words).doc["checked"]["ending"] == "contents_checked"
    flip_bit(cached / SHARD, (cached / SHARD).stat().st_size - 5)
    assert cli(*words).having("FS308")


def printed(*argv: object) -> list[str]:
    return cli("verify", *argv, json_output=False).out.splitlines()


def test_complete_says_that_contents_were_not_checked(hf: Path) -> None:
    assert printed(hf) == [
        "not checked: the contents (there are no checksums)",
        f"{hf}: OK, complete (exit 0)",
    ]
    assert cli("verify", hf).doc["checked"] == {"ending": "complete"}


def test_torch_files_have_checksums_of_their_own(tmp_path: Path) -> None:
    run = copy(NEOX, tmp_path / "run")
    told = "the CRC32 checksums in the files"
    assert printed(run)[0] == f"not checked: the contents (only compared with {told})"
    assert cli("verify", run).doc["checked"] == {"ending": "complete", "against": [told]}


def test_a_manifest_checks_contents(hf: Path) -> None:
    fastshard.manifest(hf)
    assert printed(hf) == [
        f"{hf}: OK, contents checked: against the manifest fastshard.manifest.json (exit 0)"
    ]
    ran = cli("verify", hf, "--subset", "1/2")
    assert ran.doc["checked"]["part"] == "part 1 of 2"


def test_what_would_not_be_noticed_is_said(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    checked = cli("verify", tmp_path).doc["checked"]
    assert checked["ending"] == "partly_checked"
    assert checked["unnoticed"][0].startswith("nothing outside the files states which tensors must exist")
    first, *_, last = printed(tmp_path)
    assert first.startswith("not checked: nothing outside the files states")
    assert last == f"{tmp_path}: OK, no problem was found in what was checked (exit 0)"


def test_a_list_of_its_own_is_no_proof_of_what_was_never_saved(tmp_path: Path) -> None:
    run = copy(HF.parent / "dcp_fsdp2", tmp_path / "run")
    for file in run.glob("*.json"):
        file.unlink()
    checked = cli("verify", run).doc["checked"]
    assert checked["ending"] == "partly_checked"
    assert any(told.startswith("tensors that were never saved") for told in checked["unnoticed"])


def test_warnings_are_still_counted(local: Path) -> None:
    (local / "config.json").write_text((local / "config.json").read_text() + "\n")
    later = time.time() + 60
    os.utime(local / "config.json", (later, later))
    last = printed(local)[-1]
    assert last.startswith(f"{local}: OK with 1 warning, ") and "against the hashes of the download" in last


def test_no_ending_is_good_where_something_is_wrong(hf: Path) -> None:
    (hf / SHARD).unlink()
    ran = cli("verify", hf)
    assert ran.code == 3 and "checked" not in ran.doc


def test_the_function_returns_findings(hf: Path) -> None:
    assert [f for f in fastshard.verify(hf) if f.severity == "error"] == []


COMMANDS = [("merge",), ("convert", "--to", "hf")]


def ran_on(command: tuple[str, ...], source: Path, out: Path, *options: object) -> Any:
    verb, *to = command
    return cli(verb, source, out, *to, *options)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["cached", "local"])
def test_a_write_says_that_nobody_compares_the_hubs_hashes(
    request: pytest.FixtureRequest, place: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(place)
    ran = ran_on(command, source, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert "the Hub's hashes of" in ran.not_checked and f"fastshard verify {source}" in ran.not_checked
    (found,) = ran.having("FS314", severity="note")
    assert f"fastshard verify {source}" in found["run"]
    verb, *to = command
    text = cli(verb, source, tmp_path / "again", *to, json_output=False).err
    line = f"not checked: the Hub's hashes (`fastshard verify {source}` compares them)"
    assert line in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["cached", "local"])
def test_a_write_compares_the_hubs_hashes_where_it_is_asked_to(
    request: pytest.FixtureRequest, place: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(place)
    ran = ran_on(command, source, tmp_path / "out", "--check-hub")
    assert (ran.code, ran.having("FS314")) == (0, []), ran.out
    assert not any("Hub" in line for line in ran.doc.get("not_checked", []))
    flip_bit(source / SHARD, (source / SHARD).stat().st_size - 5)
    # What nobody compares is written: a flipped bit is a weight like any other.
    assert ran_on(command, source, tmp_path / "unseen").code == 0
    refused = ran_on(command, source, tmp_path / "refused", "--check-hub")
    verified = cli("verify", source)
    assert refused.code == verified.code == 1
    assert refused.errors == verified.errors
    assert [(f["code"], f["file"]) for f in refused.errors] == [("FS308", SHARD)]
    assert not (tmp_path / "refused").exists()


def test_a_companion_that_changed_is_found_too(cached: Path, tmp_path: Path) -> None:
    (cached / "config.json").write_text((cached / "config.json").read_text() + " ")
    ran = cli("merge", cached, tmp_path / "out", "--check-hub")
    assert [(f["code"], f["file"]) for f in ran.errors] == [("FS308", "config.json")]
    assert not (tmp_path / "out").exists()


def test_nothing_is_said_where_there_are_no_hashes(hf: Path, tmp_path: Path) -> None:
    ran = cli("merge", hf, tmp_path / "out")
    assert (ran.code, ran.having("FS314")) == (0, [])
    ran = cli("merge", hf, tmp_path / "asked", "--check-hub")
    assert ran.code == 0
    (found,) = ran.having("FS314", severity="note")
    assert "keeps no hash" in found["message"]


def test_a_manifest_says_more_than_the_hubs_hashes(cached: Path, tmp_path: Path) -> None:
    assert cli("manifest", cached, "-o", tmp_path / "m.json").code == 0
    ran = cli("merge", cached, tmp_path / "out", "--expect", tmp_path / "m.json")
    assert (ran.code, ran.having("FS314")) == (0, []), ran.out


def test_parts_compare_a_share_each(cached: Path, tmp_path: Path) -> None:
    flip_bit(cached / SHARD, (cached / SHARD).stat().st_size - 5)
    begun = cli("split", cached, tmp_path / "out", "--parts", 3, "--check-hub")
    assert begun.code == 0, begun.out
    parts = [cli("make-part", n, tmp_path / "out", "--run", begun.doc["run"]) for n in range(3)]
    assert sorted(part.code for part in parts) == [0, 0, 1]
    assert cli("commit", tmp_path / "out", "--run", begun.doc["run"]).code != 0


@pytest.mark.parametrize("kind", ["checkpoint", "view", "torch"])
def test_a_writer_compares_what_it_expects(kind: str, cached: Path, tmp_path: Path) -> None:
    def write(out: Path, **options: Any) -> fastshard.Writer:
        source = fastshard.open(cached, to="hf") if kind == "view" else fastshard.open(cached)
        expected = source.torch() if kind == "torch" else source
        with fastshard.Writer(out, expected=expected, **options) as writer:
            for name in source:
                writer[name] = source[name].torch()
        return writer

    for options, codes in (({}, ["FS314"]), ({"check_hub": True}, [])):
        written = write(tmp_path / f"good{len(codes)}", **options).manifest
        assert written is not None
        assert [f.code for f in written.findings if f.code == "FS314"] == codes
    flip_bit(cached / SHARD, (cached / SHARD).stat().st_size - 5)
    with pytest.raises(fastshard.FastshardError) as error:
        write(tmp_path / "bad", check_hub=True)
    assert [(f.code, f.file) for f in error.value.findings] == [("FS308", SHARD)]
    assert not (tmp_path / "bad").exists()


def test_functions_compare_too(local: Path, tmp_path: Path) -> None:
    flip_bit(local / SHARD, (local / SHARD).stat().st_size - 5)
    os.utime(local / SHARD, (1, 1))
    for function in (fastshard.merge, fastshard.convert):
        with pytest.raises(fastshard.FastshardError) as error:
            function(local, tmp_path / "out", check_hub=True)
        assert error.value.code == "FS308"
    assert not (tmp_path / "out").exists()
