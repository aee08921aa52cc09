"""What lies in the place of a file: pointers of Git LFS, saved pages, nothing, unfinished downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fastshard
import pytest
from fastshard.common import placeholder_files
from fastshard.models import sidecar_files, tokenizer
from helpers import HF, NEOX, TP4, assert_refused, cli, copy, rank_file

SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 4938985352\n"
PAGE = "\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head>" + "<p>x</p>" * 500

#: What lies there, what is said of it, and what it says of itself.
KINDS = {
    "pointer": (POINTER, "a Git LFS pointer", "135 bytes"),
    "page": (PAGE, "a web page", f"{len(PAGE)} bytes of HTML: <!DOCTYPE html> <html>"),
    "s3_error": (
        "<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "a web page",
        "AccessDenied",
    ),
    "nothing": ("", "an empty file", "0 bytes"),
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = copy(HF, tmp_path / "hf")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_told_and_no_tensor_in_them_is(hf: Path, tmp_path: Path, kind: str) -> None:
    content, what, says = KINDS[kind]
    (hf / SHARD).write_text(content)
    for verb in ("verify", "inspect"):
        ran = cli(verb, hf)
        assert ran.code == 1
        (found,) = ran.errors
        assert (found["code"], found["file"]) == ("FS316", SHARD)
        assert found["message"] == f"{what}, not weights"
        assert says in found["got"]
    assert_refused(hf, tmp_path / "out", "FS316", file=SHARD)


def test_a_pointer_says_what_it_stands_for_and_how_to_fetch_it(hf: Path) -> None:
    (hf / SHARD).write_text(POINTER)
    (found,) = cli("verify", hf).errors
    assert found["expected"] == f"4938985352 bytes, sha256 {OID}"
    assert found["run"] == [f"git lfs pull --include {SHARD}"]


def test_a_text_that_a_server_answered_is_no_header(hf: Path) -> None:
    (hf / SHARD).write_text("Entry not found")
    (found,) = cli("verify", hf).errors
    assert (found["code"], found["message"], found["got"]) == (
        "FS316",
        "a text, not weights",
        "15 bytes: Entry not found",
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (NEOX, "global_step4/layer_03-model_01-model_states.pt"),
        (TP4, rank_file(1)),
    ],
    ids=["torch", "ranks"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_other_formats(tmp_path: Path, source: Path, name: str, kind: str) -> None:
    folder = copy(source, tmp_path / "run")
    (folder / name).write_text(KINDS[kind][0])
    ran = cli("verify", folder)
    assert ran.code == 1
    assert [(f["code"], f["file"]) for f in ran.errors] == [("FS316", name)]


def test_a_checkpoint_that_is_all_pointers(hf: Path) -> None:
    files = sorted(hf.glob("*.safetensors"))
    for file in files:
        file.write_text(POINTER)
    ran = cli("verify", hf)
    (told,) = ran.errors
    assert told["code"] == "FS316" and told["files"] == [f.name for f in files]


def test_a_file_that_is_named_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content, what, _ in KINDS.values():
        file.write_text(content)
        ran = cli("verify", file)
        assert (ran.code, ran.errors[0]["code"]) == (1, "FS316")
        assert ran.errors[0]["message"] == f"{what}, not weights"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [INDEX, "config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json"]
)
def test_texts_are_told_and_the_rest_is_judged_without_them(
    hf: Path, tmp_path: Path, name: str, kind: str
) -> None:
    content, what, says = KINDS[kind]
    (hf / name).write_text(content)
    ran = cli("verify", hf)
    assert ran.code == 1
    (found,) = ran.errors
    assert (found["code"], found["file"]) == ("FS316", name)
    assert found["message"] == f"{what}, not the file itself"
    assert says in found["got"]
    assert_refused(hf, tmp_path / "out", "FS316", file=name)


def test_what_else_is_wrong_is_still_found(hf: Path) -> None:
    (hf / "config.json").write_text(POINTER)
    (hf / "model-00003-of-00004.safetensors").unlink()
    found = {(f["code"], f["file"]) for f in cli("verify", hf).errors}
    assert found == {("FS316", "config.json"), ("FS101", "model-00003-of-00004.safetensors")}


def test_files_that_nobody_reads_may_be_pointers(hf: Path) -> None:
    (hf / "original").mkdir()
    for name in (
        "original/tokenizer.model",
        "original/config.json",
        "pytorch_model-00001-of-00002.bin",
        "README.md",
    ):
        (hf / name).write_text(POINTER)
    for name in ("merges.txt", "chat_template.jinja"):
        (hf / name).touch()
    ran = cli("verify", hf)
    assert (ran.code, ran.errors) == (0, [])


@pytest.mark.parametrize("option", ["--config", "--tokenizer", "--layout", "--like"])
def test_files_that_are_named_in_options(hf: Path, tmp_path: Path, option: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(POINTER)
    ran = assert_refused(
        hf, tmp_path / "out", "FS316", command=("convert", "--to", "hf"), options=(option, file)
    )
    assert ran.errors[0]["file"] == str(file)


def test_a_folder_above_a_checkpoint_gives_no_pointer_along(hf: Path, tmp_path: Path) -> None:
    step = hf.rename(tmp_path / "checkpoint-5")
    (step / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_text(POINTER)
    assert_refused(step, tmp_path / "out", "FS316", file=str(tmp_path / "tokenizer.model"))


def test_metadata_of_dcp(tmp_path: Path) -> None:
    folder = copy(HF.parent / "dcp_tp_micro", tmp_path / "dcp")
    (folder / ".metadata").write_text(POINTER)
    ran = cli("verify", folder)
    assert (ran.code, ran.errors[0]["code"]) == (1, "FS316")


def test_every_name_that_readers_take_is_looked_at() -> None:
    names = [*tokenizer.NAMES, *sidecar_files.OTHERS, "config.json", "qwen.tiktoken", INDEX]
    assert [name for name in names if not placeholder_files.is_known(name)] == []


def beside(folder: Path, name: str) -> Path:
    return folder / f"{name}.incomplete"


def in_local_dir(folder: Path, name: str) -> Path:
    """As huggingface_hub names it since 0.26, with the random part of 2.x."""
    from huggingface_hub._local_folder import get_local_download_paths

    begun = get_local_download_paths(folder, name).incomplete_path(OID)
    return begun.with_name(f"{begun.stem}.0a1b2c3d.incomplete")


def in_older_local_dir(folder: Path, name: str) -> Path:
    return folder / ".cache/huggingface/download" / f"{name}.{OID}.incomplete"


@pytest.mark.parametrize("place", [beside, in_local_dir, in_older_local_dir])
@pytest.mark.parametrize("name", [SHARD, "model.safetensors"])
def test_unfinished_downloads(hf: Path, place: Callable[[Path, str], Path], name: str) -> None:
    if name == "model.safetensors":
        for file in [*hf.glob("*.safetensors"), hf / INDEX]:
            file.unlink()
    else:
        (hf / name).unlink()
    begun = place(hf, name)
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.write_bytes(bytes(100))
    ran = cli("verify", hf)
    assert ran.code == 1
    (found,) = ran.errors
    assert (found["code"], found["message"]) == ("FS316", "an unfinished download, not weights")
    assert found["got"].startswith("100 bytes")
    assert "hf download REPO" in found["run"][0]


def test_unfinished_downloads_in_the_cache(hf: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/abc123"
    shutil.move(hf, snapshot)
    blobs = tmp_path / "models--org--name/blobs"
    blobs.mkdir()
    (snapshot / SHARD).unlink()
    (blobs / f"{OID}.incomplete").write_bytes(bytes(100))
    ran = cli("verify", snapshot)
    # Whose download it is nothing tells: the file is missing.
    (found,) = ran.errors
    assert (ran.code, found["code"], found["file"]) == (3, "FS101", SHARD)
    assert f"{OID}.incomplete of 100 bytes" in found["got"]
    assert found["run"] == [f"hf download org/name {SHARD} --revision abc123"]
    for file in [*snapshot.glob("*.safetensors"), snapshot / INDEX]:
        file.unlink()
    ran = cli("verify", snapshot)
    (found,) = ran.errors
    assert (ran.code, found["code"]) == (1, "FS316")
    assert found["run"] == ["hf download org/name --revision abc123"]


def test_opening_says_it_too(hf: Path) -> None:
    (hf / SHARD).write_text(POINTER)
    assert [f.code for f in fastshard.open(hf).findings if f.severity == "error"] == ["FS316"]
    (hf / "config.json").write_text(PAGE)
    assert [f.code for f in fastshard.open(hf).findings if f.severity == "error"] == ["FS316", "FS316"]


def test_the_short_hash_is_that_of_the_hub() -> None:
    from huggingface_hub._local_folder import _short_hash

    assert (
        _short_hash("a.metadata") == base64.urlsafe_b64encode(hashlib.sha1(b"a.metadata").digest()).decode()
    )
