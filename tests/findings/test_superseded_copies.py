"""Tensors that several files of an index hold: overlays of edited models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import cli, read_result
from safetensors import safe_open
from safetensors.torch import save_file

A, B, C = "a.safetensors", "b.safetensors", "c.safetensors"


def folder(at: Path, files: dict[str, dict[str, torch.Tensor]], **index: str) -> Path:
    at.mkdir(parents=True)
    for name, content in files.items():
        save_file({n: t.clone() for n, t in content.items()}, at / name, {"format": "pt"})
    (at / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return at


def loaded(at: Path) -> dict[str, torch.Tensor]:
    """What transformers ends with: every tensor of every listed file, in the order of the files' names."""
    index = json.loads((at / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(index.values())):
        with safe_open(at / file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return found


OLD, NEW = torch.zeros(4, 4) + 1, torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize("holder", [A, B])
def test_the_copy_that_the_index_names_is_taken(holder: str, tmp_path: Path) -> None:
    values = {
        A: {"x.weight": OLD if holder == B else NEW, "y.weight": OLD},
        B: {"x.weight": NEW if holder == B else OLD},
    }
    values[B]["z.weight"] = OLD
    ckpt = folder(tmp_path / "ckpt", values, **{"x.weight": holder, "y.weight": A, "z.weight": B})
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0, ran.out
    (finding,) = ran.having("FS206", severity="warning")
    assert (
        finding["tensor"] == "x.weight"
        and finding["file"] == holder
        and (A in finding["got"] and B in finding["got"])
    )
    assert torch.equal(read_result(tmp_path / "out")["x.weight"], NEW)
    # A loader of the folder itself takes the last file.
    ran = cli("verify", ckpt)
    (finding,) = (f for f in ran.having("FS206") if f["severity"] != "note")
    is_loaded = torch.equal(loaded(ckpt)["x.weight"], NEW)
    assert finding["severity"] == ("warning" if is_loaded else "error") and ran.code == (
        0 if is_loaded else 1
    ), ran.out
    assert cli("verify", tmp_path / "out").code == 0


def test_equal_copies_are_a_note(tmp_path: Path) -> None:
    ckpt = folder(
        tmp_path / "ckpt",
        {A: {"x.weight": NEW, "y.weight": OLD}, B: {"x.weight": NEW, "z.weight": OLD}},
        **{"x.weight": A, "y.weight": A, "z.weight": B},
    )
    for command in (("verify", ckpt), ("merge", ckpt, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0 and [f["severity"] for f in ran.having("FS206")] == ["note"], ran.out
    assert torch.equal(read_result(tmp_path / "out")["x.weight"], NEW)


def test_of_three_copies_each_is_compared(tmp_path: Path) -> None:
    files = {
        A: {"x.weight": OLD, "p.weight": OLD},
        B: {"x.weight": NEW, "q.weight": OLD},
        C: {"x.weight": OLD, "r.weight": OLD},
    }
    ckpt = folder(tmp_path / "ckpt", files, **{"x.weight": B, "p.weight": A, "q.weight": B, "r.weight": C})
    ran = cli("verify", ckpt)
    assert ran.code == 1 and [f["severity"] for f in ran.having("FS206") if f["severity"] != "note"] == [
        "error",
        "warning",
    ], ran.out
    assert cli("merge", ckpt, tmp_path / "out").code == 0
    assert torch.equal(read_result(tmp_path / "out")["x.weight"], NEW)


def test_another_shape_is_another_copy(tmp_path: Path) -> None:
    ckpt = folder(
        tmp_path / "ckpt",
        {A: {"x.weight": OLD[:2], "y.weight": OLD}, B: {"x.weight": NEW}},
        **{"x.weight": B, "y.weight": A},
    )
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0 and ran.having("FS206", severity="warning"), ran.out
    assert torch.equal(read_result(tmp_path / "out")["x.weight"], NEW)


def test_a_file_that_the_index_does_not_list_is_not_read(tmp_path: Path) -> None:
    ckpt = folder(
        tmp_path / "ckpt", {A: {"x.weight": NEW}, B: {"x.weight": OLD, "y.weight": OLD}}, **{"x.weight": A}
    )
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 0 and not ran.having("FS206"), ran.out
    assert read_result(tmp_path / "out").keys() == {"x.weight"}


def test_no_copy_that_no_index_names_is_chosen(tmp_path: Path) -> None:
    """Two files with a tensor that the index does not name."""
    ckpt = folder(
        tmp_path / "ckpt",
        {A: {"x.weight": NEW, "y.weight": OLD}, B: {"x.weight": OLD, "z.weight": OLD}},
        **{"y.weight": A, "z.weight": B},
    )
    ran = cli("merge", ckpt, tmp_path / "out")
    assert ran.code == 1 and ran.having("FS206", severity="error"), ran.out
    assert "remove" not in ran.having("FS206")[0].get("help", "") and not (tmp_path / "out").exists()
