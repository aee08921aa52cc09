"""What a finding says to do fits the checkpoint: whole tensors are of no rank, and columns are no rows."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import HF, TP4, cli, copy, edit_safetensors

SECOND = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


def test_a_tensor_that_a_folder_of_whole_tensors_lacks_is_of_no_rank(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    (root / INDEX).unlink()
    edit_safetensors(root / SECOND, lambda t: t.__delitem__("model.layers.1.self_attn.q_proj.weight"))
    (found,) = cli("inspect", root).errors
    assert found["code"] == "FS102" and "rank" not in found["help"] and "node" not in found["help"]


def test_a_layer_that_a_folder_of_whole_tensors_lacks_is_of_no_stage(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    (root / INDEX).unlink()

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    edit_safetensors(root / SECOND, drop)
    (found,) = cli("inspect", root).errors
    assert found["code"] == "FS103" and "stage" not in found["help"]


def test_a_tensor_that_a_rank_lacks_is_on_its_node(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    (root / "layout.json").unlink()
    name = "model.layers.1.mlp.up_proj.weight"
    edit_safetensors(root / "tp_rank_01.safetensors", lambda t: t.__delitem__(name))
    found = next(f for f in cli("inspect", root).errors if f.get("tensor") == name)
    assert (found["rank"], found["help"]) == (
        "tp 1",
        "copy the file of this rank from the node that wrote it",
    )


def test_columns_that_are_lost_are_no_rows(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    root = copy(HF, tmp_path / "columns")
    edit_safetensors(root / SECOND, lambda t: t.update({name: t[name][:, :16].contiguous()}))
    (found,) = cli("inspect", root).errors
    assert found["code"] == "FS208" and found["message"].endswith("48 of 64 columns are lost")
    name = "model.layers.1.self_attn.q_proj.weight"
    root = copy(HF, tmp_path / "rows")
    edit_safetensors(root / SECOND, lambda t: t.update({name: t[name][:16].contiguous()}))
    (found,) = cli("inspect", root).errors
    assert found["code"] == "FS208" and found["message"].endswith("48 of 64 rows are lost")
