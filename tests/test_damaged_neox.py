"""Damaged GPT-NeoX checkpoints: refused with the file, rank or tensor named, and nothing written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    NEOX,
    NEOX_SEQ,
    STEP,
    assert_refused,
    cli,
    copy,
    edit_pt,
    flip_payload,
    layer_file,
    load_pt,
    rank_file,
)
from neox_maker import Spec, write

COMMANDS = [pytest.param(("merge",), id="merge"), pytest.param(("convert", "--to", "hf"), id="convert")]
MEAN = ("--replicas", "mean")


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return copy(NEOX, tmp_path / "ckpt")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("layer", [0, 3, 6, 7])
def test_missing_shard_is_named_with_its_rank(
    ckpt: Path, out: Path, layer: int, command: tuple[str, ...]
) -> None:
    (ckpt / STEP / layer_file(layer, 1)).unlink()
    ran = assert_refused(ckpt, out, "FS101", exit=3, command=command, file=layer_file(layer, 1), rank="1")
    assert len(ran.errors) == 1, "one cause, one finding"
    assert layer_file(layer, 1) in ran.errors[0]["help"]


def test_all_missing_shards_are_named(ckpt: Path, out: Path) -> None:
    for layer, rank in ((2, 0), (3, 1), (7, 0)):
        (ckpt / STEP / layer_file(layer, rank)).unlink()
    ran = assert_refused(ckpt, out, "FS101", exit=3)
    assert {Path(f["file"]).name for f in ran.errors} == {
        layer_file(2, 0),
        layer_file(3, 1),
        layer_file(7, 0),
    }


@pytest.mark.parametrize("layer", [0, 2, 4, 6, 7])
def test_missing_layer_is_named(ckpt: Path, out: Path, layer: int) -> None:
    for rank in (0, 1):
        (ckpt / STEP / layer_file(layer, rank)).unlink()
    assert_refused(ckpt, out, "FS103", exit=3, file=layer_file(layer, 0))


def test_last_layers_are_missed_though_nothing_follows_them(ckpt: Path, out: Path) -> None:
    for layer in (4, 6, 7):
        for rank in (0, 1):
            (ckpt / STEP / layer_file(layer, rank)).unlink()
    ran = assert_refused(ckpt, out, "FS103", exit=3)
    assert len(ran.having("FS103")) == 3


@pytest.mark.parametrize("base", [NEOX, NEOX_SEQ], ids=["pipeline", "sequential"])
def test_all_files_of_rank_1_gone(base: Path, tmp_path: Path, out: Path) -> None:
    ckpt = copy(base, tmp_path / "ckpt")
    for file in [*(ckpt / STEP).glob("layer_*-model_01-*"), ckpt / STEP / rank_file(1)]:
        file.unlink()
    ran = assert_refused(ckpt, out, "FS101", exit=3, rank="1")
    if base == NEOX_SEQ:
        assert ran.having("FS101", file=rank_file(1))
    else:
        assert len(ran.having("FS101", rank="1", file="layer_")) == 6


@pytest.mark.parametrize("base", [NEOX, NEOX_SEQ], ids=["pipeline", "sequential"])
def test_all_files_of_rank_0_gone(base: Path, tmp_path: Path, out: Path) -> None:
    ckpt = copy(base, tmp_path / "ckpt")
    for file in [*(ckpt / STEP).glob("layer_*-model_00-*"), ckpt / STEP / rank_file(0)]:
        file.unlink()
    assert_refused(ckpt, out, "FS101", exit=3, rank="0")


def test_rank_file_of_the_pipeline_form_is_missed(ckpt: Path, out: Path) -> None:
    """It holds no tensor, but says which step and run the rank belongs to."""
    (ckpt / STEP / rank_file(1)).unlink()
    ran = cli("merge", ckpt, out)
    assert ran.code == 0
    (found,) = ran.having("FS101", file=rank_file(1), rank="1")
    assert found["severity"] == "warning"


@pytest.mark.parametrize("file", [layer_file(3, 1), rank_file(0)])
def test_empty_file(ckpt: Path, out: Path, file: str) -> None:
    (ckpt / STEP / file).write_bytes(b"")
    assert_refused(ckpt, out, "FS312", file=file)


@pytest.mark.parametrize("kept", [1, 3, 64, 0.1, 0.5, 0.9, -30, -22, -1])
def test_truncated_file(ckpt: Path, out: Path, kept: float) -> None:
    file = ckpt / STEP / layer_file(2, 1)
    size = file.stat().st_size
    length = size + int(kept) if kept < 0 else int(kept * size) if isinstance(kept, float) else int(kept)
    os.truncate(file, length)
    ran = cli("merge", ckpt, out)
    assert ran.code == 1
    assert {f["code"] for f in ran.errors} <= {"FS312", "FS601", "FS602", "FS604"}
    assert all(layer_file(2, 1) in f["file"] for f in ran.errors)
    assert not out.exists()


def test_bytes_after_the_end(ckpt: Path, out: Path) -> None:
    with (ckpt / STEP / layer_file(2, 1)).open("ab") as file:
        file.write(b"\0" * 512)
    assert_refused(ckpt, out, "FS312", file=layer_file(2, 1))


@pytest.mark.parametrize("options", [(), MEAN], ids=["equal", "mean"])
@pytest.mark.parametrize("command", COMMANDS)
def test_files_swapped_between_layers(
    ckpt: Path, out: Path, command: tuple[str, ...], options: tuple[str, ...]
) -> None:
    one, two = ckpt / STEP / layer_file(2, 1), ckpt / STEP / layer_file(3, 1)
    one.rename(ckpt / "x")
    two.rename(one)
    (ckpt / "x").rename(two)
    # Only a tolerance for drift needs to tell the two apart.
    code = "FS305" if options else "FS302"
    ran = assert_refused(ckpt, out, code, command=command, options=options, rank="1")
    assert ran.having(code, file=layer_file(2, 1)) and ran.having(code, file=layer_file(3, 1))


@pytest.mark.parametrize("options", [(), MEAN], ids=["equal", "mean"])
@pytest.mark.parametrize("layer", [0, 3, 7])
def test_shard_copied_over_another(ckpt: Path, out: Path, layer: int, options: tuple[str, ...]) -> None:
    shutil.copy(ckpt / STEP / layer_file(layer, 0), ckpt / STEP / layer_file(layer, 1))
    ran = assert_refused(ckpt, out, "FS303", options=options, rank="1")
    assert ran.having("FS303", file=f"layer_{layer:02d}"), ran.findings


@pytest.mark.parametrize("options", [(), MEAN], ids=["equal", "mean"])
def test_rank_copied_over_another_in_the_sequential_form(
    tmp_path: Path, out: Path, options: tuple[str, ...]
) -> None:
    ckpt = copy(NEOX_SEQ, tmp_path / "ckpt")
    shutil.copy(ckpt / STEP / rank_file(0), ckpt / STEP / rank_file(1))
    assert_refused(ckpt, out, "FS303", options=options, rank="1")


@pytest.mark.parametrize("base, ranks", [(NEOX, 2), (NEOX.parent / "neox_pp_tp1", 1)], ids=["tp2", "tp1"])
def test_layer_copied_over_another_layer_is_said(base: Path, ranks: int, tmp_path: Path, out: Path) -> None:
    """All ranks of layer 3 hold layer 2: every shape and every replica fits, and it can be meant."""
    ckpt = copy(base, tmp_path / "ckpt")
    assert not cli("verify", ckpt).having("FS304")
    for rank in range(ranks):
        shutil.copy(ckpt / STEP / layer_file(2, rank), ckpt / STEP / layer_file(3, rank))
    for command in (("merge", ckpt, out), ("verify", ckpt)):
        ran = cli(*command)
        assert ran.code == 0
        found = ran.having("FS304", file="layer_03")
        assert {Path(f["file"]).name for f in found} == {layer_file(3, rank) for rank in range(ranks)}
        assert all(f["severity"] == "warning" for f in found)


def test_layer_copied_over_another_layer_on_one_rank_is_refused(ckpt: Path, out: Path) -> None:
    shutil.copy(ckpt / STEP / layer_file(2, 1), ckpt / STEP / layer_file(3, 1))
    for options in ((), MEAN):
        ran = cli("merge", ckpt, out, *options)
        assert ran.code == 1 and not out.exists()
        assert [f for f in ran.errors if layer_file(3, 1) in f["file"]]


@pytest.mark.parametrize("base", [NEOX, NEOX_SEQ], ids=["pipeline", "sequential"])
def test_ranks_of_two_steps(base: Path, tmp_path: Path, out: Path) -> None:
    ckpt = copy(base, tmp_path / "ckpt")
    edit_pt(ckpt / STEP / rank_file(1), lambda state: state.update(iteration=3, global_steps=3))
    assert_refused(ckpt, out, "FS107", file=rank_file(1))


def test_shard_of_another_degree(tmp_path: Path, out: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tp=2))
    other = write(tmp_path / "other", Spec(tp=4))
    shutil.copy(other / "global_step7" / layer_file(3, 1), root / "global_step7" / layer_file(3, 1))
    assert_refused(root, out, "FS201", file=layer_file(3, 1), tensor="3.attention.query_key_value.weight")


def test_norm_of_another_size_is_an_axis_conflict(ckpt: Path, out: Path) -> None:
    for rank in (0, 1):
        edit_pt(
            ckpt / STEP / layer_file(3, rank),
            lambda layer: layer.update({"input_layernorm.weight": torch.ones(24, dtype=torch.bfloat16)}),
        )
    ran = cli("merge", ckpt, out)
    assert ran.code == 1 and not out.exists()
    assert ran.having("FS201", tensor="3.input_layernorm.weight") or ran.having(
        "FS203", tensor="3.input_layernorm.weight"
    )


def test_dtype_that_differs_between_ranks(ckpt: Path, out: Path) -> None:
    edit_pt(
        ckpt / STEP / layer_file(3, 1),
        lambda layer: layer.update({k: v.float() for k, v in layer.items() if k == "mlp.linear1.weight"}),
    )
    assert_refused(ckpt, out, "FS202", tensor="3.mlp.linear1.weight")


def test_tensor_that_one_rank_lacks(ckpt: Path, out: Path) -> None:
    edit_pt(ckpt / STEP / layer_file(4, 1), lambda layer: layer.pop("mlp.linear1.bias"))
    ran = cli("merge", ckpt, out)
    assert ran.code in (1, 3) and not out.exists()
    assert [f for f in ran.errors if f.get("tensor") == "4.mlp.linear1.bias"], ran.findings


def test_tensor_that_all_ranks_lack(ckpt: Path, out: Path) -> None:
    for rank in (0, 1):
        edit_pt(ckpt / STEP / layer_file(4, rank), lambda layer: layer.pop("mlp.linear2.weight"))
    assert_refused(ckpt, out, "FS102", exit=3, tensor="4.mlp.linear2.weight")


def test_optional_tensor_that_one_layer_lacks(ckpt: Path, out: Path) -> None:
    """Biases are optional for a model, not for one of its layers."""
    for rank in (0, 1):
        edit_pt(ckpt / STEP / layer_file(4, rank), lambda layer: layer.pop("mlp.linear1.bias"))
    ran = cli("merge", ckpt, out)
    assert ran.code in (1, 3), "a layer without its bias was merged"
    assert [f for f in ran.errors if f.get("tensor") == "4.mlp.linear1.bias"], ran.findings


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_tensor_is_not_lost(ckpt: Path, out: Path, command: tuple[str, ...]) -> None:
    for rank in (0, 1):
        edit_pt(
            ckpt / STEP / layer_file(3, rank),
            lambda layer: layer.update({"attention.lora_a": torch.randn(4, 8)}),
        )
    assert_refused(ckpt, out, "FS207", command=command, tensor="3.attention.lora_a")


@pytest.mark.parametrize("command", [("merge",), ("verify",), ("manifest",)], ids=lambda c: c[0])
@pytest.mark.parametrize("key", ["input_layernorm.weight", "mlp.linear1.weight", "attention.dense.bias"])
def test_flipped_bit_is_found_by_the_zip_checksum(
    ckpt: Path, out: Path, key: str, command: tuple[str, ...]
) -> None:
    file = ckpt / STEP / layer_file(3, 1)
    flip_payload(file, load_pt(file)[key])
    if command == ("merge",):
        assert_refused(ckpt, out, "FS301", file=layer_file(3, 1))
        return
    ran = cli(*command, ckpt)
    assert ran.code == 1
    assert ran.having("FS301", file=layer_file(3, 1))
    assert not (ckpt / "fastshard.manifest.json").exists()


def test_flipped_bit_in_the_arguments(ckpt: Path, out: Path) -> None:
    """The pickle member has a checksum too."""
    file = ckpt / STEP / layer_file(3, 1)
    data = bytearray(file.read_bytes())
    where = data.find(b"mlp.linear1.weight")
    data[where] ^= 1
    file.write_bytes(bytes(data))
    ran = assert_refused(ckpt, out, "FS301", file=layer_file(3, 1))
    assert ran.code == 1


def test_no_rank_file_at_all_in_the_sequential_form(tmp_path: Path, out: Path) -> None:
    ckpt = copy(NEOX_SEQ, tmp_path / "ckpt")
    for rank in (0, 1):
        (ckpt / STEP / rank_file(rank)).unlink()
    ran = cli("merge", ckpt, out)
    assert ran.code in (2, 3)
    assert not out.exists()


def test_leftover_of_a_wider_run_is_said(ckpt: Path, out: Path) -> None:
    shutil.copy(ckpt / STEP / layer_file(3, 1), ckpt / STEP / layer_file(3, 2))
    ran = cli("merge", ckpt, out)
    assert ran.having("FS108", file=layer_file(3, 2))


def test_tracker_that_points_nowhere(ckpt: Path, out: Path) -> None:
    (ckpt / "latest").write_text("global_step9")
    assert_refused(ckpt, out, "FS105", exit=3, file="latest", got="global_step9")
    assert cli("merge", ckpt, out, "--step", 4).code == 0


def test_step_that_is_not_there(ckpt: Path, out: Path) -> None:
    assert_refused(ckpt, out, "FS501", exit=2, options=("--step", 5))
