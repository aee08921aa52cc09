"""`ls` against the mapping that `fastshard.open` gives."""

from __future__ import annotations

import csv
import dataclasses
import os
import pty
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from fastshard.models.tensor_roles import order_in_layer, order_of
from helpers import FIXTURES, NEOX, STEP, cli, copy, layer_file
from safetensors.torch import load_file, save_file

LLAMA = FIXTURES / "gpt_neox/llama_gqa_pp_tp2"


def listed(*argv: object) -> list[str]:
    return [row["name"] for row in cli("ls", *argv).doc["outputs"]]


def test_it_lists_what_open_holds() -> None:
    ckpt = fastshard.open(NEOX)
    document = cli("ls", NEOX, "--sort", "file").doc
    assert [row["name"] for row in document["outputs"]] == list(ckpt)
    for row in document["outputs"]:
        tensor = ckpt[row["name"]]
        assert (row["dtype"], tuple(row["shape"]), row["bytes"]) == (
            tensor.dtype,
            tensor.shape,
            tensor.nbytes,
        )
    assert document["tensors"] == len(ckpt) and document["bytes"] == sum(t.nbytes for t in ckpt.values())


def test_the_order_is_that_of_the_model(tmp_path: Path) -> None:
    names = [
        "lm_head.w",
        "model.norm.w",
        "model.layers.10.w",
        "model.layers.9.w",
        "vision.blocks.3.w",
        "vision.blocks.12.w",
    ]
    save_file(
        {name: torch.zeros(1) for name in [*names, "model.embed_tokens.w"]}, tmp_path / "model.safetensors"
    )
    by_number = ["model.layers.9.w", "model.layers.10.w", "vision.blocks.3.w", "vision.blocks.12.w"]
    assert listed(tmp_path) == ["model.embed_tokens.w", *by_number, "model.norm.w", "lm_head.w"]


def test_filters() -> None:
    names = sorted(fastshard.open(LLAMA), key=lambda name: (order_of(name), order_in_layer(name)))
    norms = [n for n in names if "norm" in n]
    assert listed(LLAMA, "*norm*") == listed(LLAMA, "--glob", "*norm*") == norms
    assert listed(LLAMA, "--layer", 3, "*norm*") == [n for n in norms if n.startswith("3.")]
    assert listed(LLAMA, "--dtype", "bf16") == names and listed(LLAMA, "--dtype", "torch.bfloat16") == names
    sizes_of = {n: t.nbytes for n, t in fastshard.open(LLAMA).items()}
    big = [n for n in names if sizes_of[n] > 2048]
    assert listed(LLAMA, "--larger-than", "2KiB") == big
    assert listed(LLAMA, "--sort", "name") == sorted(names)
    sizes = [row["bytes"] for row in cli("ls", LLAMA, "--sort", "size").doc["outputs"]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "filters", [("--dtype", "F32"), ("--layer", "99"), ("--larger-than", "1GiB"), ("--dtype", "bfloat61")]
)
def test_filters_that_leave_nothing_are_refused(filters: tuple[str, ...]) -> None:
    ran = cli("ls", LLAMA, *filters)
    assert (ran.code, ran.findings[0]["code"]) == (2, "FS515")


def test_pages_make_the_whole() -> None:
    names = listed(NEOX)
    pages = [listed(NEOX, "--offset", at, "--limit", 7) for at in range(0, len(names) + 7, 7)]
    assert [name for page in pages for name in page] == names
    text = cli("ls", NEOX, "--offset", 7, "--limit", 7, json_output=False).out
    assert "showing 8 to 14 of 40 (continue with --offset 14)" in text
    assert "none shown" in cli("ls", NEOX, "--offset", 99, json_output=False).out
    assert cli("ls", NEOX, "--limit", -1).code == 2


@pytest.mark.parametrize("by", ["role", "layer", "dtype"])
def test_groups_count_everything_once(by: str) -> None:
    document = cli("ls", LLAMA, "--by", by).doc
    ckpt = fastshard.open(LLAMA)
    for key in ("tensors", "parameters", "bytes"):
        assert sum(group[key] for group in document["groups"]) == document[key]
    assert document["bytes"] == sum(tensor.nbytes for tensor in ckpt.values())
    assert sum(group["share"] for group in document["groups"]) == pytest.approx(1)
    if by == "layer":
        first = Counter(int(name.split(".")[0]) for name in ckpt)
        assert {g["group"]: g["tensors"] for g in document["groups"]} == dict(first)


def test_a_tree_joins_layers_that_are_alike(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up.weight": torch.zeros(4, 2) for i in range(12)}
    tensors["model.layers.5.mlp.up.weight"] = torch.zeros(4, 3)
    save_file(tensors | {"lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert cli("ls", tmp_path, "--tree", json_output=False).out.splitlines() == [
        "├─ model.layers",
        "│  ├─ [0 to 4, 6 to 11].mlp.up.weight  F32 [4, 2]",
        "│  └─ 5.mlp.up.weight  F32 [4, 3]",
        "└─ lm_head.weight  F32 [2]",
        "13 tensors, 102 parameters, 408 B",
    ]


def test_names_are_no_trap(tmp_path: Path) -> None:
    """Deep names, names with control characters, and a name that is a flag."""
    deep = ".".join("abc"[i % 3] for i in range(3000))
    tensors = {
        deep: torch.zeros(1),
        f"{deep[:-4]}.x": torch.zeros(1),
        "a\x1b[31m\nb": torch.zeros(1),
        "--by": torch.zeros(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for form in ((), ("--tree",), ("--by", "role"), ("--by", "layer")):
        ran = cli("ls", tmp_path, *form, json_output=False)
        assert ran.code == 0 and "\x1b" not in ran.out
    assert listed(tmp_path, "--glob=--by") == ["--by"]


def test_what_matches_nothing_is_said() -> None:
    ran = cli("ls", NEOX, "0.word_embedding.weight")
    assert ran.code == 2 and "did you mean 0.word_embeddings.weight?" in ran.findings[0]["help"]
    assert cli("ls", NEOX, "*nope*").code == 2
    # Two checkpoints are parts of one: neither is taken for a pattern.
    assert cli("ls", NEOX, NEOX).findings[0]["code"] != "FS515"


def test_a_checkpoint_that_is_not_whole_is_listed_and_said_to_be_so(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    ran = cli("ls", ckpt)
    assert ran.code == 3 and ran.having("FS101") and ran.doc["outputs"]


def on_terminal(command: list[str], **environment: str) -> str:
    """What a terminal of 24 lines shows of a command."""
    main, other = pty.openpty()
    env: dict[str, Any] = {**os.environ, "LINES": "24", "COLUMNS": "200", **environment}
    with subprocess.Popen(command, stdout=other, stderr=other, stdin=other, env=env):
        os.close(other)
        told = b""
        while True:
            try:
                more = os.read(main, 1 << 16)
            except OSError:
                break
            if not more:
                break
            told += more
    os.close(main)
    return told.decode()


def test_what_is_longer_than_the_screen_goes_to_the_pager(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\nexec sed 's/^/paged: /'\n")
    pager.chmod(0o755)
    command = [sys.executable, "-m", "fastshard", "ls", str(NEOX)]
    shown = on_terminal(command, PAGER=str(pager))
    assert shown.count("paged: ") == len(fastshard.open(NEOX)) + 2
    for none in ([*command, "--no-pager"], [*command, "--limit", "3"]):
        assert "paged" not in on_terminal(none, PAGER=str(pager))
    assert "word_embeddings" in on_terminal(command, PAGER="no-such-pager")


@pytest.mark.parametrize("command", ["ls", "stats", "diff"])
def test_tables_leave_out_columns_that_a_narrow_terminal_has_no_room_for(
    command: str, tmp_path: Path
) -> None:
    for name, seed in (("model", "0"), ("other", "1")):
        made = [sys.executable, "-m", "fastshard.examples", "gpt_neox", str(tmp_path / name)]
        subprocess.run(made, check=True, capture_output=True)
        if seed == "1":
            file = next((tmp_path / name).glob("*.safetensors"))
            tensors = {key: tensor * 1.5 for key, tensor in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
    others = [str(tmp_path / "other")] if command == "diff" else []
    pager = ["--no-pager"] if command == "ls" else []
    words = [sys.executable, "-m", "fastshard", command, str(tmp_path / "model"), *others, *pager]

    def longest(columns: int) -> tuple[int, str]:
        shown = on_terminal(words, COLUMNS=str(columns), NO_COLOR="1", TERM="dumb").replace("\r", "")
        rows = [line for line in shown.splitlines() if line.startswith(("TENSOR", "gpt_neox.", "..."))]
        assert len(rows) > 10, shown
        return max(map(len, rows)), rows[0]

    width, header = longest(200)
    narrow, fewer = longest(80)
    assert width > 80 >= narrow, (width, narrow)
    assert set(fewer.split()) < set(header.split())
    # What says most stays.
    assert {"ls": "SHAPE", "stats": "NaN", "diff": "MAX"}[command] in fewer


@pytest.mark.parametrize(
    "names",
    [
        # DeepSeek, Qwen, Megatron-LM, GPT-NeoX, GPT-2, Mixtral and a state space.
        [
            "input_layernorm.weight",
            "self_attn.q_a_proj.weight",
            "self_attn.q_a_layernorm.weight",
            "self_attn.q_b_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_a_layernorm.weight",
            "self_attn.kv_b_proj.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            "mlp.gate.weight",
            "mlp.experts.2.gate_proj.weight",
            "mlp.experts.10.gate_proj.weight",
            "mlp.experts.2.down_proj.weight",
        ],
        [
            "input_layernorm.weight",
            "self_attn.q_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_proj.weight",
            "self_attn.k_norm.weight",
            "self_attn.v_proj.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
        ],
        [
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            "mlp.experts.linear_fc1.weight",
            "mlp.experts.linear_fc2.weight",
        ],
        [
            "input_layernorm.weight",
            "attention.query_key_value.weight",
            "attention.dense.weight",
            "post_attention_layernorm.weight",
            "mlp.dense_h_to_4h.weight",
            "mlp.dense_4h_to_h.weight",
        ],
        [
            "ln_1.weight",
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "ln_2.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        ],
        ["norm.weight", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.out_proj.weight"],
    ],
)
def test_a_layer_is_listed_as_data_passes_it(names: list[str]) -> None:
    assert sorted(sorted(names), key=order_in_layer) == names
    backwards = names[::-1]
    backwards.sort(key=order_in_layer)
    assert backwards == names


def test_rows_for_a_spreadsheet() -> None:
    ran = cli("ls", NEOX, "--csv", json_output=False)
    rows = list(csv.DictReader(ran.out.splitlines()))
    listed = {row.name: row for row in fastshard.ls(NEOX)}
    assert ran.code == 0 and [*rows[0]] == [
        "name",
        "dtype",
        "shape",
        "elements",
        "bytes",
        "shards",
        "layer",
        "role",
    ]
    assert len(rows) == len(listed)
    for row in rows:
        known = listed[row["name"]]
        assert [int(n) for n in row["shape"].split("x")] == list(known.shape)
        assert (int(row["elements"]), int(row["bytes"])) == (known.elements, known.nbytes)
    # What pandas and polars make a table of.
    assert all(dataclasses.is_dataclass(row) for row in listed.values())
