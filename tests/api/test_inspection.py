"""What Python's functions beside the verbs return: inspect, ls, gc."""

from __future__ import annotations

import json
from pathlib import Path

import fastshard
import pytest
from helpers import FIXTURES, HF, NEOX, STEP, cli, copy, edit_safetensors, layer_file


@pytest.mark.parametrize("root", [HF, NEOX], ids=["hf", "neox"])
def test_inspect_says_what_the_verb_prints(root: Path) -> None:
    seen, printed = fastshard.inspect(root), cli("inspect", root, "-v").doc
    outputs = printed.pop("outputs")
    assert seen.to_dict().items() <= printed.items()
    assert [row.to_dict() for row in seen.outputs] == outputs
    assert seen.complete and repr(seen).endswith("complete by headers>")


def test_inspect_of_a_broken_checkpoint_is_a_result_with_findings(tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "ckpt")
    (root / STEP / layer_file(3, 1)).unlink()
    seen = fastshard.inspect(root)
    assert not seen.complete and [f.code for f in seen.findings if f.severity == "error"] == ["FS101"]
    assert "NOT complete" in repr(seen)


def test_ls_filters_as_the_verb_does() -> None:
    rows = fastshard.ls(HF)
    assert [row.to_dict() for row in rows] == [
        {key: row[key] for key in ("name", "dtype", "shape", "bytes", "pieces")}
        for row in cli("ls", HF, "--sort", "file").doc["outputs"]
    ]
    norms = fastshard.ls(fastshard.open(HF), glob=["*norm*"], layer=[1], dtype=["bfloat16"])
    assert norms and all("norm" in row.name and row.layer == 1 and row.dtype == "BF16" for row in norms)
    assert all(row.nbytes > 1000 for row in fastshard.ls(HF, larger_than=1000))
    with pytest.raises(fastshard.CannotRunError, match=r"did you mean model\.norm"):
        fastshard.ls(HF, glob=["model.norm.weigh"])


def test_gc_returns_what_was_left(tmp_path: Path) -> None:
    assert fastshard.clean(tmp_path / "out") == []
    run = fastshard.split(HF, tmp_path / "out", parts=2)
    (left,) = fastshard.clean(tmp_path / "out")
    assert (left.run, left.fate) == (run.id, "resumable")
    assert fastshard.make_part(tmp_path / "out", 0, run.id) and fastshard.make_part(
        tmp_path / "out", 1, run.id
    )
    assert len(fastshard.commit(tmp_path / "out", run.id)) == 39
    assert [left.fate for left in fastshard.clean(tmp_path / "out")] == []


def test_a_result_is_held_against_the_names_of_its_own_manifest(tmp_path: Path) -> None:
    """No config and no other layers say that these tensors must be there; the manifest beside them does."""
    out = tmp_path / "out"
    assert cli("merge", FIXTURES / "sharded/dcp_fsdp2", out, "--max-shard-size", "100kB").code == 0
    assert cli("inspect", out).code == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    file = out / index["weight_map"]["scalar0d"]
    edit_safetensors(file, lambda tensors: tensors.pop("scalar0d"))
    ran = cli("inspect", out)
    assert ran.code == 3 and ran.having("FS102", file=file.name, tensor="scalar0d"), ran.findings
    file.unlink()
    ran = cli("inspect", out)
    assert ran.code == 3 and ran.having("FS101", file=file.name), ran.findings
