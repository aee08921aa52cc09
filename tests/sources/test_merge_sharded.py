"""Per-rank safetensors and Hugging Face shards: every tensor of a merge has the hash that it must have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import FIXTURES, HF, TP4, cli, copy, edit_safetensors, read_result, sha256
from safetensors.torch import save_file

NAMES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def assert_expected(out: Path, fixture: Path) -> None:
    have = read_result(out)
    want = json.loads((fixture / "expected.json").read_text())["tensors"]
    assert set(have) == set(want)
    for name, entry in want.items():
        tensor = have[name]
        assert (list(tensor.shape), tensor.dtype) == (entry["shape"], NAMES[entry["dtype"]]), name
        assert sha256(tensor) == entry["sha256"], name


def test_ranks_are_merged(tp4_fixture: Path, tmp_path: Path) -> None:
    assert cli("merge", tp4_fixture, tmp_path / "out").code == 0
    assert_expected(tmp_path / "out", tp4_fixture)


def test_ranks_are_merged_by_config_alone(tp4_fixture: Path, tmp_path: Path) -> None:
    root = copy(tp4_fixture, tmp_path / "ckpt")
    (root / "layout.json").unlink()
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_expected(tmp_path / "out", tp4_fixture)


def test_ranks_are_merged_by_layout_json_alone(tp4_fixture: Path, tmp_path: Path) -> None:
    root = copy(tp4_fixture, tmp_path / "ckpt")
    (root / "config.json").unlink()
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_expected(tmp_path / "out", tp4_fixture)


def test_without_layout_and_config_nothing_is_guessed(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    (root / "config.json").unlink()
    (root / "layout.json").unlink()
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 2
    assert ran.having("FS106")
    assert not (tmp_path / "out").exists()


def test_node_local_directories_are_one_checkpoint(tmp_path: Path) -> None:
    nodes = []
    for node in range(2):
        root = copy(TP4, tmp_path / f"node{node}")
        for rank in range(4):
            if rank // 2 != node:
                (root / f"tp_rank_{rank:02d}.safetensors").unlink()
        nodes.append(root)
    assert cli("merge", *nodes, tmp_path / "out").code == 0
    assert_expected(tmp_path / "out", TP4)


def test_hf_shards_are_merged(hf_fixture: Path, tmp_path: Path) -> None:
    assert cli("merge", hf_fixture, tmp_path / "out").code == 0
    assert_expected(tmp_path / "out", hf_fixture)


def test_hf_shards_are_resharded(hf_fixture: Path, tmp_path: Path) -> None:
    assert cli("convert", hf_fixture, tmp_path / "out", "--to", "hf", "--max-shard-size", "100KB").code == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert_expected(tmp_path / "out", hf_fixture)


def test_config_and_generation_files_go_along(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "out/generation_config.json").read_bytes() == (
        HF / "generation_config.json"
    ).read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok/tokenizer.json").write_text("{}")
    neox = FIXTURES / "gpt_neox/neox_pp_tp2"
    assert cli("convert", neox, tmp_path / "out", "--to", "hf", "--tokenizer", tmp_path / "tok").code == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_include_and_exclude_narrow_the_result(tmp_path: Path) -> None:
    options = ("--include", "*.layers.0.*", "--exclude", "*mlp*")
    assert cli("merge", HF, tmp_path / "out", *options).code == 0
    names = set(read_result(tmp_path / "out"))
    every = json.loads((HF / "expected.json").read_text())["tensors"]
    assert names == {n for n in every if ".layers.0." in n and "mlp" not in n}
    assert names


def test_pad_rows_that_are_not_zero_are_dropped_and_said(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][-6:] = 0.5

    edit_safetensors(root / "tp_rank_03.safetensors", fill)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0
    assert ran.having("FS307", tensor="model.embed_tokens.weight")
    assert_expected(tmp_path / "out", TP4)


def spoiled(root: Path, name: str, value: float) -> Path:
    """A checkpoint with one value of a rank changed."""
    ckpt = copy(TP4, root)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[7] = value

    edit_safetensors(ckpt / "tp_rank_02.safetensors", spoil)
    return ckpt


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_unless_accepted(value: float, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    root = spoiled(tmp_path / "ckpt", name, value)
    for verb in (
        ("merge", root, tmp_path / "out"),
        ("convert", root, tmp_path / "out", "--to", "dcp"),
        ("verify", root),
    ):
        ran = cli(*verb)
        (told,) = ran.having("FS306", tensor=name, severity="error", got="1")
        assert (ran.code, told["file"], told["rank"]) == (1, "tp_rank_02.safetensors", "tp 2"), ran.out
        assert not (tmp_path / "out").exists()
    ran = cli("merge", root, tmp_path / "out", "--accept", "non-finite")
    (told,) = ran.having("FS306", tensor=name)
    assert (ran.code, told["severity"], told["decided"]) == (0, "warning", "accept non-finite")
    made = read_result(tmp_path / "out")[name]
    assert int((~made.isfinite()).sum()) == 1
    # The manifest of the result says what was accepted.
    assert cli("verify", tmp_path / "out").code == 0
    # Who counts or compares them is told, and sees the figures.
    stats = cli("stats", root)
    assert stats.code == 1 and stats.having("FS306", tensor=name)
    assert cli("diff", root, root).code == 0


def test_all_shards_that_hold_what_is_not_finite_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    root = spoiled(tmp_path / "ckpt", name, float("nan"))
    edit_safetensors(root / "tp_rank_00.safetensors", lambda tensors: tensors[name].fill_(float("inf")))
    (told,) = cli("verify", root).having("FS306")
    assert told["files"] == ["tp_rank_00.safetensors", "tp_rank_02.safetensors"]
    assert told["message"] == "NaN or infinite elements in 2 of 4 shards" and told.get("rank") is None


def test_what_a_cast_made_infinite_is_in_no_file(tmp_path: Path) -> None:
    save_file({"a.weight": torch.tensor([[1.0, 1e30]])}, tmp_path / "model.safetensors")
    ran = cli("merge", tmp_path / "model.safetensors", tmp_path / "out", "--dtype", "f16")
    (told,) = ran.having("FS306", tensor="a.weight", severity="error")
    assert (ran.code, told.get("file"), told["evidence"]) == (1, None, "the stored values are finite")
    assert "too large for F16" in told["message"] and "--dtype bf16" in told["help"]


@pytest.mark.parametrize(
    ("name", "shape", "is_buffer"),
    [
        ("transformer.h.0.attn.masked_bias", (), True),
        ("transformer.h.0.attn.bias", (1, 1, 4, 4), True),
        ("model.rotary_emb.inv_freq", (4,), True),
        ("encoder.attention_mask", (4, 4), True),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("encoder.relative_position_bias_table", (4, 4), False),
        ("model.embed_tokens.weight", (4, 4), False),
    ],
)
def test_what_a_module_computes_may_be_infinite(
    name: str, shape: tuple[int, ...], is_buffer: bool, tmp_path: Path
) -> None:
    tensors = {name: torch.full(shape, float("-inf")), "a.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    ran = cli("merge", tmp_path / "model.safetensors", tmp_path / "out")
    (told,) = ran.having("FS306", tensor=name)
    assert (ran.code, told["severity"]) == ((0, "note") if is_buffer else (1, "error"))


def test_the_help_for_slices_in_several_directories_merges_them(tp4_fixture: Path, tmp_path: Path) -> None:
    """Each rank's slices are a `model.safetensors` of a directory of its own."""
    files = sorted(tp4_fixture.glob("tp_rank_*.safetensors"))
    config = tp4_fixture / "config.json"
    folders = [tmp_path / f"node{rank}" for rank in range(len(files))]
    (tmp_path / "joined").mkdir()
    for folder, file in zip(folders, files, strict=True):
        folder.mkdir()
        shutil.copy(file, folder / "model.safetensors")
        shutil.copy(config, folder)
        shutil.copy(folder / "model.safetensors", tmp_path / "joined" / file.name)
    shutil.copy(config, tmp_path / "joined")
    ran = cli("merge", *folders, tmp_path / "out")
    (finding,) = ran.having("FS106")
    assert ran.code == 2 and f"{files[0].name}, {files[1].name}" in finding["help"]
    assert cli("merge", tmp_path / "joined", tmp_path / "out").code == 0
    assert_expected(tmp_path / "out", tp4_fixture)
