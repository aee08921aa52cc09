"""Damaged GPT-NeoX checkpoints: refused with the file, rank or tensor named, and nothing written."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

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
    few_steps,
    files_of,
    flip_payload,
    layer_file,
    load_pt,
    rank_file,
)
from neox_maker import Spec, write
from test_neox_parallel import edit_yaml

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
    assert {Path(file).name for file in files_of(ran.errors)} == {
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
        assert len(files_of(ran.having("FS101", rank="1", file="layer_"))) == 6


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
    assert_refused(ckpt, out, "FS316", file=file)


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
    # The names inside say it at once; without them the values do.
    ran = assert_refused(ckpt, out, "FS113", command=command, options=options, rank="1")
    assert ran.having("FS113", file=layer_file(2, 1)) and ran.having("FS113", file=layer_file(3, 1))
    # Only a tolerance for drift needs to tell the two apart.
    code, options = "FS305" if options else "FS302", (*options, "--accept", "renamed")
    ran = assert_refused(ckpt, out, code, command=command, options=options, message="of tp 0 and tp 1")
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
    """All ranks of layer 3 hold layer 2: every shape and every replica fits; the names inside tell, and the
    bytes."""
    ckpt = copy(base, tmp_path / "ckpt")
    assert not cli("verify", ckpt).having("FS304")
    for rank in range(ranks):
        shutil.copy(ckpt / STEP / layer_file(2, rank), ckpt / STEP / layer_file(3, rank))
    assert_refused(ckpt, out, "FS303", file="layer_03")
    assert_refused(ckpt, out, "FS303", file="layer_03", options=("--accept", "renamed"))
    for command in (("merge", ckpt, out), ("verify", ckpt)):
        ran = cli(*command, "--accept", "copies")
        assert ran.code == 0
        found = ran.having("FS303", file="layer_03")
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


# Configs and values that are not what they should be: one finding, whatever asks for them.

#: Eight lists of nine, each of them nine times the one before.
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
TARGETS = ["gpt_neox", "hf"]


@pytest.mark.parametrize("place", ["saved", "given"])
@pytest.mark.parametrize(
    "text",
    [
        "x: 2024-02-30",
        "x: 0b_",
        "x: !!float a",
        "x: !!bool a",
        "x: !!timestamp a",
        "x: !!int",
        "x: !!set [a]",
        "x: 99999999999999999999999",
        "x: &a [*a]",
        "x: [" * 3000,
        BOMB,
        f"{BOMB}norm: *a8",
        "x: \0",
        "? [1]: {}",
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_does_not_fit_is_one_finding(text: str, place: str, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    given = tmp_path / "given.yml"
    (given if place == "given" else root / "global_step7/configs/z.yml").write_text(text)
    options = ("--config", given) if place == "given" else ()
    for command in (("merge",), ("convert", "--to", "gpt_neox")):
        ran = assert_refused(root, tmp_path / "out", "FS211", exit=2, command=command, options=options)
        assert len(ran.errors) == 1 and len(ran.errors[0]["message"]) < 300


def test_config_of_json_has_bounds_too(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    (tmp_path / "given.json").write_text('{"hidden_size": 99999999999999999999}')
    assert_refused(root, tmp_path / "out", "FS211", exit=2, options=("--config", tmp_path / "given.json"))


@pytest.mark.parametrize(
    "key, value, to",
    [
        ("attention_config", 5, "hf"),
        ("attention_config", [[["global"], 12], 5, None, {}], "hf"),
        ("attention_config", [], "hf"),
        ("sliding_window_width", "7", "hf"),
        ("max_position_embeddings", 1.5, "hf"),
        ("rotary_emb_base", 10000.5, "hf"),
        ("norm", ["layernorm"], "hf"),
        ("activation", ["gelu"], "hf"),
        ("activation", {"gelu": 1}, "gpt_neox"),
        ("intermediate_size", "abc", "gpt_neox"),
        ("intermediate_size", float("inf"), "gpt_neox"),
        ("intermediate_size", float("nan"), "gpt_neox"),
        ("mlp_multiple_of", "abc", "gpt_neox"),
        ("mlp_multiple_of", 0, "gpt_neox"),
        ("expansion_factor", "abc", "gpt_neox"),
        ("make_vocab_size_divisible_by", 1 << 40, "gpt_neox"),
        ("make_vocab_size_divisible_by", "abc", "gpt_neox"),
        ("num_layers", 1 << 60, "gpt_neox"),
        ("tokenizer_type", 2024, "gpt_neox"),
        ("tokenizer_type", {"a": None}, "gpt_neox"),
        ("max_position_embeddings", 1 << 60, "gpt_neox"),
    ],
    ids=str,
)
def test_value_of_another_kind_is_one_finding(key: str, value: Any, to: str, tmp_path: Path) -> None:
    """In the saved config of a run whose rank files carry no arguments."""
    root = write(tmp_path / "ckpt", Spec())
    for rank in (0, 1):
        edit_pt(root / "global_step7" / rank_file(rank), lambda state: state.pop("args"))
    edit_yaml(root, **{key: value})
    command = ("convert", "--to", to)
    ran = assert_refused(root, tmp_path / "out", "FS211", exit=2, command=command, message=f"config: {key}")
    assert len(ran.errors) == 1


def test_date_as_the_name_of_a_tokenizer_is_one_finding(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    for rank in (0, 1):
        edit_pt(root / "global_step7" / rank_file(rank), lambda state: state.pop("args"))
    path = root / "global_step7/configs/config.yml"
    for name in ("2024-01-01", "!!set {a}"):
        path.write_text(f"{path.read_text()}\ntokenizer_type: {name}\n")
        options = ("--to", "gpt_neox")
        assert_refused(root, tmp_path / "out", "FS211", exit=2, command=("convert",), options=options)


@pytest.mark.parametrize("state", [[1, 2], "abc", 5, None])
def test_arguments_that_are_no_arguments_are_passed_over(state: Any, tmp_path: Path) -> None:
    """A dict of the file with a key that stands for an object's class, and an object with another state."""
    root = write(tmp_path / "ckpt", Spec())
    for rank in (0, 1):
        edit_pt(
            root / "global_step7" / rank_file(rank),
            lambda content: content["args"].update({"__class__": "x", "state": state}),
        )
    assert cli("merge", root, tmp_path / "out").code == 0
    for rank in (0, 1):
        edit_pt(root / "global_step7" / rank_file(rank), lambda content: content.update(args=torch.Size([1])))
    assert cli("merge", root, tmp_path / "other").code == 0


def test_arguments_of_a_namespace_are_compared(tmp_path: Path, out: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    for rank in (0, 1):
        edit_pt(
            root / "global_step7" / rank_file(rank),
            lambda state, rank=rank: state.update(
                args=argparse.Namespace(**state["args"] | {"hidden_size": 64 + 8 * rank})
            ),
        )
    assert_refused(root, out, "FS110", file=rank_file(1), message="args.hidden_size")


def test_name_that_is_no_text_is_shown_escaped(tmp_path: Path, out: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    (root / "global_step7/configs" / os.fsdecode(b"\xff\xfe.yml")).write_text("num-layers: 3\n")
    for as_json in (True, False):
        ran = cli("merge", root, out, json_output=as_json)
        assert ran.code == 1 and "\\udcff\\udcfe.yml" in (ran.errors[0]["file"] if as_json else ran.err)


def test_more_values_than_are_looked_at_are_said(tmp_path: Path, out: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    file = root / "global_step7" / rank_file(0)
    edit_pt(file, lambda state: state.update(history=[1.0] * 250_000))
    ran = cli("merge", root, out)
    (said,) = ran.having("FS109", message="holds more data")
    assert (ran.code, said["severity"]) == (0, "warning") and said["file"].endswith(rank_file(0))


@pytest.mark.parametrize(
    "options",
    [("--tp", 10**30), ("--pp", 1 << 17), ("--make-vocab-size-divisible-by", 10**23)],
    ids=lambda options: options[0],
)
def test_degrees_that_no_run_has_are_refused(options: tuple[object, ...], tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    command = ("convert", "--to", "gpt_neox")
    assert_refused(root, tmp_path / "out", "FS515", exit=2, command=command, options=options)


# Numbers of another world: told in few words, and with few steps of work for each thing that is named, if
# any.


def unstated(root: Path, *keys: str) -> Path:
    """Takes keys out of the arguments and the saved config."""
    for file in (root / "global_step7").glob("mp_rank_*"):
        edit_pt(file, lambda state: [state["args"].pop(key, None) for key in keys])
    edit_yaml(root, **dict.fromkeys(keys))
    return root


@pytest.mark.parametrize("key, most", [("num_layers", 1 << 14), ("model_parallel_size", 1 << 16)])
@few_steps(32 << 16)
def test_many_files_that_are_not_there_are_told_in_few_words(key: str, most: int, tmp_path: Path) -> None:
    root = unstated(write(tmp_path / "ckpt", Spec()), key)
    edit_yaml(root, **{key: most})
    ran = cli("inspect", root)
    assert len(ran.errors) < 40 and len(ran.out) < 30_000
    said = ran.having("FS103" if key == "num_layers" else "FS101")
    assert any(f" to {most + 1 if key == 'num_layers' else most - 1}" in str(f) for f in said)
    edit_yaml(root, **{key: most + 1})
    assert_refused(root, tmp_path / "out", "FS211", exit=2, message=key)
    unstated(root, "num_layers", "model_parallel_size")
    edit_yaml(root, num_layers=1 << 12, model_parallel_size=1 << 12)
    assert_refused(root, tmp_path / "out", "FS211", exit=2, message="num_layers times model_parallel_size")
    edit_yaml(root, num_layers=None, model_parallel_size=None)
    step = root / "global_step7"
    shutil.copy(step / layer_file(2, 0), step / layer_file(16_000, 60_000))
    assert_refused(root, tmp_path / "out", "FS211", exit=2, message="num_layers times model_parallel_size")


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "sequential"])
@few_steps(40_000)
def test_rank_that_no_run_has_is_a_leftover(pipeline: bool, tmp_path: Path) -> None:
    root = unstated(write(tmp_path / "ckpt", Spec(), pipeline=pipeline), "model_parallel_size")
    step = root / "global_step7"
    stray = layer_file(2, 9_999_999) if pipeline else rank_file(9_999_999)
    shutil.copy(step / (layer_file(2, 0) if pipeline else rank_file(0)), step / stray)
    ran = cli("inspect", root)
    assert ran.doc["topology"] == {"tp": 2} and ran.errors == []
    assert ran.having("FS108", file=stray)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@few_steps(40_000)
def test_layers_are_counted_where_nothing_states_them(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings are looked for from the working directory upwards, and this repository's are long.
    monkeypatch.chdir(tmp_path)
    root = unstated(write(tmp_path / "ckpt", Spec(tied=tied)), "num_layers")
    assert cli("merge", root, tmp_path / "out").code == 0
    step = root / "global_step7"
    shutil.copy(step / layer_file(2, 0), step / "layer_99999999999999999999999-model_00-model_states.pt")
    assert_refused(root, tmp_path / "other", "FS108", file="layer_99999999999999999999999")


@few_steps(4 << 20)
def test_many_rank_files_that_are_not_there_are_one_finding(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    for rank in (0, 1):
        edit_pt(root / "global_step7" / rank_file(rank), lambda state: state.update(mp_world_size=1 << 20))
    (said,) = cli("inspect", root).having("FS101")
    assert (said["severity"], said["rank"]) == ("warning", "mp rank 2 to 1048575")
