"""Names of tensors that a target makes files of: refused before the first byte, or published and read
again."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import fastshard
import pytest
from fastshard.zarr import array_writer
from helpers import assert_refused, cli

#: How arrays are written, and whether their names become those of folders.
MERGE, OCDBT, ZARR2 = ("merge",), ("convert", "--to", "orbax"), ("convert", "--to", "orbax", "--zarr2")


def checkpoint(folder: Path, *names: str) -> Path:
    """A safetensors file of small tensors; written by hand, as the library refuses some names."""
    folder.mkdir()
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = b"".join(struct.pack("<4f", i + 1, 2, 3, 4) for i in range(len(names)))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def published(ckpt: Path, out: Path, command: tuple[str, ...]) -> None:
    """A result that its own `verify` takes, and that holds what was stored."""
    assert cli(command[0], ckpt, out, *command[1:]).code == 0
    ran = cli("verify", out)
    assert ran.code == 0, ran.out
    assert cli("diff", ckpt, out).code == 0
    with fastshard.open(ckpt) as source, fastshard.open(out) as result:
        assert {n: t.numpy().tolist() for n, t in source.items()} == {
            n: t.numpy().tolist() for n, t in result.items()
        }


#: Names that files of texts have, or that mean something elsewhere.
ANYWHERE = [
    "config.json",
    "layout.json",
    "model.safetensors.index.json",
    "latest",
    "d",
    "0",
    "c",
    "zarr.json",
    "manifest.ocdbt",
    "ocdbt.process_0",
    "_CHECKPOINT_METADATA",
    "fastshard.manifest.json",
    "a b",
    "ü",
    "x" * 255,
]
#: Names that no folder can have, or that have a meaning as one.
NO_FOLDER = {
    "NUL": "a\0b",
    "backslash": "a\\b",
    "256 bytes": "x" * 256,
    "300 bytes": "é" * 150,
    "staging": "a.fastshard-b",
    "the tree's metadata": "_METADATA",
    "the arrays' metadata": "array_metadatas",
    "the commit's marker": "commit_success.txt",
}


@pytest.mark.parametrize("command", [MERGE, OCDBT, ZARR2], ids=lambda c: c[-1])
@pytest.mark.parametrize("name", ANYWHERE, ids=lambda name: name[:20])
def test_a_name_of_something_else_is_a_name(name: str, command: tuple[str, ...], tmp_path: Path) -> None:
    published(checkpoint(tmp_path / "ckpt", name, "z"), tmp_path / "out", command)


@pytest.mark.parametrize("command", [MERGE, OCDBT], ids=lambda c: c[-1])
@pytest.mark.parametrize("name", NO_FOLDER.values(), ids=NO_FOLDER)
def test_what_is_no_files_name_is_a_name_inside_one(
    name: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    published(checkpoint(tmp_path / "ckpt", name, "z"), tmp_path / "out", command)


@pytest.mark.parametrize("name", NO_FOLDER.values(), ids=NO_FOLDER)
def test_what_is_no_files_name_is_refused_where_it_would_be_one(name: str, tmp_path: Path) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", name, "z")
    ran = assert_refused(ckpt, tmp_path / "out", "FS514", exit=2, command=ZARR2, tensor=name)
    assert "--exclude" in ran.having("FS514")[0]["help"]
    # Before anything is written: `plan` says it too, and without the tensor there is a result.
    assert cli("plan", ckpt, *ZARR2[1:]).code == 2
    assert cli("convert", ckpt, tmp_path / "out", *ZARR2[1:], "--exclude", "?" * len(name)).code == 0


def test_a_store_that_cannot_be_made_is_not_written_to_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its folder could not be removed."""
    writer, under_way = array_writer.writer(), []

    class Opening:
        def __init__(self, bad: bool) -> None:
            self.bad = bad
            under_way.append(self)

        def result(self) -> object:
            under_way.remove(self)
            if self.bad:
                raise ValueError("no such name")
            return self

    class Library:
        def open(self, spec: dict, **_: object) -> Opening:
            return Opening("bad" in spec["kvstore"]["path"])

        def Context(self, spec: dict) -> None:
            return None

    monkeypatch.setattr(writer, "_ts", Library())
    arrays = [{"key": key, "dtype": "F32", "shape": [4], "block": [4]} for key in ("a", "bad", "b", "c")]
    told = writer.begin(str(tmp_path / "store"), {"ocdbt": False, "zarr": 2}, arrays)
    assert told is not None and told[0].code == "FS507"
    assert under_way == []
