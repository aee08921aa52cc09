"""Large holes of sparse files in the place of tensors are named within seconds, and nothing of them is
read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers import cli

GIB = 1 << 30
#: Rows of a hole that would take hours to read: 8 TiB in all, half of what ext4 can hold in a file.
ENDLESS = 1 << 21


def write_sparse(folder: Path, rows: int, *, columns: int = 1 << 20, filled: int = 0) -> Path:
    """A safetensors file with a tensor `w` that nobody wrote but its first bytes, and a tensor `norm` that
    somebody did."""
    folder.mkdir()
    size = rows * columns * 4
    entries = {
        "w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]},
        "norm": {"dtype": "F32", "shape": [4], "data_offsets": [size, size + 16]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        file.write(bytes(range(1, 256)) * (filled // 255))
        file.seek(begin + size)
        file.write(struct.pack("<4f", 1, 2, 3, 4))
    return folder


def findings_of(*argv: object) -> tuple[int, list[dict[str, Any]]]:
    ran = cli(*argv)
    return ran.code, ran.findings


VERBS = {
    "verify": ["verify", "IN"],
    "merge": ["merge", "IN", "OUT"],
    "stats": ["stats", "IN"],
    "manifest": ["manifest", "IN"],
    "diff": ["diff", "IN", "OTHER"],
    "inspect": ["inspect", "IN"],
    "plan": ["plan", "IN"],
    "subset": ["verify", "IN", "--subset", "1/1000"],
}


@pytest.mark.parametrize("argv", VERBS.values(), ids=VERBS)
def test_data_that_nobody_wrote_is_named(argv: list[str], tmp_path: Path) -> None:
    source = write_sparse(tmp_path / "in", ENDLESS)
    other = write_sparse(tmp_path / "other", 4)
    places = {"IN": source, "OTHER": other, "OUT": tmp_path / "out"}
    code, findings = findings_of(*[places.get(word, word) for word in argv])
    (finding,) = [f for f in findings if f["code"] == "FS317"]
    assert code == 1 and finding["severity"] == "error"
    assert (finding["file"], finding["tensor"]) == ("model.safetensors", "w")
    assert finding["run"][0].endswith("--accept holes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "other"]


@pytest.mark.parametrize(
    ("rows", "columns", "filled"),
    [(1024, 1 << 18, 0), (1025, 1 << 18, 1 << 20)],
    ids=["1 GiB", "less beside data"],
)
def test_smaller_holes_are_read(rows: int, columns: int, filled: int, tmp_path: Path) -> None:
    """Exactly 1 GiB, and a little more of which the first MiB was written."""
    source = write_sparse(tmp_path / "in", rows, columns=columns, filled=filled)
    code, findings = findings_of("inspect", source)
    assert code == 0 and not [f for f in findings if f["code"] == "FS317"]


def test_holes_that_nothing_is_made_of_do_not_matter(tmp_path: Path) -> None:
    source = write_sparse(tmp_path / "in", ENDLESS)
    for argv in (["--include", "norm"], ["--exclude", "w"]):
        code, findings = findings_of("verify", source, *argv)
        assert code == 0 and not [f for f in findings if f["code"] == "FS317"]


def test_holes_on_purpose_are_accepted_and_a_manifest_speaks_for_them(tmp_path: Path) -> None:
    """What --sparse has written is verified against its manifest, converted again, and refused without it."""
    source = write_sparse(tmp_path / "in", 1025, columns=1 << 18)
    out = tmp_path / "out"
    code, findings = findings_of("merge", source, out, "--accept", "holes", "--sparse")
    (finding,) = [f for f in findings if f["code"] == "FS317"]
    assert (code, finding["severity"], finding["decided"]) == (0, "warning", "accept holes")
    assert (out / "model.safetensors").stat().st_blocks * 512 < GIB
    assert findings_of("verify", out)[0] == 0
    (out / "fastshard.manifest.json").unlink()
    code, findings = findings_of("verify", out)
    assert code == 1 and "FS317" in {f["code"] for f in findings}
