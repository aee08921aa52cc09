"""AutoTP: ranks merged by the map of pieces in the model file (compared with real ones in
tests/real_deepspeed)."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, read_result
from zero_maker import TAG, Tensors, edit, save

TP = 2
#: name -> (shape, the dimension divided, parts along it)
PARAMETERS: dict[str, tuple[list[int], int | None, list[int]]] = {
    "embed.weight": ([8, 6], None, []),
    "layers.0.q.weight": ([4, 6], 0, []),
    "layers.0.qkv.weight": ([12, 6], 0, [4, 4, 4]),
    "layers.0.grouped.bias": ([8], 0, [4, 2, 2]),
    "layers.0.o.weight": ([6, 4], 1, []),
    "norm.weight": ([6], None, []),
    "head.weight": ([8, 6], 0, []),
}


def whole() -> Tensors:
    torch.manual_seed(9)
    return {name: torch.randn(shape).bfloat16() for name, (shape, *_) in PARAMETERS.items()}


def strides(shape: list[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def spans(name: str, rank: int) -> list[tuple[int, int]]:
    """(first, extent) of each part that a rank has, along the dimension."""
    shape, d, parts = PARAMETERS[name]
    if d is None:
        return [(0, shape[0])]
    found, at = [], 0
    for part in parts or [shape[d]]:
        found.append((at + rank * part // TP, part // TP))
        at += part
    return found


def local(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    d = PARAMETERS[name][1] or 0
    return torch.cat([tensor.narrow(d, *span) for span in spans(name, rank)], d).contiguous()


def mapped(name: str) -> dict[str, Any]:
    """What DeepSpeed 0.19.8 writes of a parameter. source: checkpoint/affine.py (ParamAffineMap.to_dict)"""
    shape, d, _ = PARAMETERS[name]
    ranks: dict[int, Any] = {}
    for rank in range(TP):
        held = list(local(name, torch.empty(shape), rank).shape)
        pieces, at, k = [], 0, d or 0
        for first, extent in spans(name, rank):
            block = [extent if i == k else n for i, n in enumerate(shape)]
            source, dest = [first * strides(shape)[k], strides(shape)], [at * strides(held)[k], strides(held)]
            locations = [rank] if d is not None else list(range(TP))
            pieces.append({"shape": block, "source": source, "dest": dest, "locations": locations})
            at += extent
        ranks[rank] = {"shard_shape": held, "pieces": pieces}
    return {"logical_shape": shape, "ranks": ranks}


def write(root: Path) -> Path:
    (root / TAG).mkdir(parents=True)
    (root / "latest").write_text(TAG)
    params = {f"^{re.escape(name)}$": mapped(name) for name in PARAMETERS}
    for rank in range(TP):
        state = {
            "module": OrderedDict((n, local(n, t, rank)) for n, t in whole().items()),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": None,
            "shared_params": None,
            "global_steps": 7,
            "dp_world_size": 1,
            "mp_world_size": TP,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": TP},
            "ds_config": {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": TP}},
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.4,
                "affine_map": {"version": 1, "params": params},
                "autotp_unsupported_parameter_patterns": {},
            },
        }
        save(state, root / TAG / f"mp_rank_{rank:02d}_model_states.pt")
    return root


def change(root: Path, what: Any) -> None:
    for rank in range(TP):
        edit(root / TAG / f"mp_rank_{rank:02d}_model_states.pt", what)


def test_parameters_are_whole(tmp_path: Path) -> None:
    ran = cli("merge", write(tmp_path / "ckpt"), tmp_path / "out")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == set(PARAMETERS)
    assert all(torch.equal(have[name], tensor) for name, tensor in whole().items())


def test_what_ranks_hold_alike_is_compared(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt")
    edit(root / TAG / "mp_rank_01_model_states.pt", lambda s: s["module"]["norm.weight"].add_(1))
    assert_refused(root, tmp_path / "out", "FS302", tensor="norm.weight")


def test_a_rank_is_missing(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt")
    (root / TAG / "mp_rank_01_model_states.pt").unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="mp_rank_01")


def entry(state: Any, name: str) -> Any:
    return state["universal_checkpoint_info"]["affine_map"]["params"][f"^{re.escape(name)}$"]


def scaled(state: Any) -> None:
    for rank in entry(state, "norm.weight")["ranks"].values():
        rank["pieces"][0]["scale"] = 0.5


def uneven(state: Any) -> None:
    ranks = entry(state, "head.weight")["ranks"]
    for rank, (first, rows) in enumerate([(0, 5), (5, 3)]):
        piece = ranks[rank]["pieces"][0]
        ranks[rank]["shard_shape"], piece["shape"], piece["source"] = (
            [rows, 6],
            [rows, 6],
            [first * 6, [6, 1]],
        )


def swapped(state: Any) -> None:
    ranks = entry(state, "head.weight")["ranks"]
    ranks[0]["pieces"], ranks[1]["pieces"] = ranks[1]["pieces"], ranks[0]["pieces"]


def interleaved(state: Any) -> None:
    for rank in entry(state, "layers.0.q.weight")["ranks"].values():
        rank["pieces"][0]["source"][1] = [12, 1]


def forgotten(state: Any) -> None:
    del state["universal_checkpoint_info"]["affine_map"]["params"]["^norm\\.weight$"]


def newer(state: Any) -> None:
    state["universal_checkpoint_info"]["affine_map"]["version"] = 2


def older(state: Any) -> None:
    del state["universal_checkpoint_info"]


def unsupported(state: Any) -> None:
    told = state["universal_checkpoint_info"]["autotp_unsupported_parameter_patterns"]
    told["^norm\\.weight$"] = "a layout of its own"


@pytest.mark.parametrize(
    "what",
    [scaled, uneven, swapped, interleaved, forgotten, newer, older, unsupported],
    ids=lambda f: f.__name__,
)
def test_other_divisions_are_refused(what: Any, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt")
    change(root, what)
    assert_refused(root, tmp_path / "out", "FS514", exit=2, help="ds_to_universal")
