"""GPT-NeoX at tp 1, 4 and 8, pipeline and sequential: against an independent merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_refused, cli, edit_pt, rank_file, read_result
from neox_maker import ROW_BIAS, Spec, hf_name, make_shards, merge, write

FORMS = [pytest.param(True, id="pipeline"), pytest.param(False, id="sequential")]


def same_bits(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(have) == set(want)
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert have[name].shape == tensor.shape, name
        assert torch.equal(have[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("pipeline", FORMS)
@pytest.mark.parametrize("residual", [True, False], ids=["parallel_residual", "sequential_residual"])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_merge_and_conversion_equal_a_plain_torch_merge(
    tp: int, residual: bool, pipeline: bool, tmp_path: Path
) -> None:
    spec = Spec(tp=tp, residual=residual, seed=tp, dtype=torch.bfloat16)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards, pipeline=pipeline)
    want = merge(shards, residual=residual)
    assert want["0.word_embeddings.weight"].shape[0] == spec.padded
    assert cli("merge", root, tmp_path / "merged").code == 0
    same_bits(read_result(tmp_path / "merged"), want)
    assert cli("convert", root, tmp_path / "hf", "--to", "hf").code == 0
    same_bits(read_result(tmp_path / "hf"), {hf_name(k, spec.layers): v for k, v in want.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_row_biases_are_summed_in_float32_in_rank_order_and_rounded_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    spec = Spec(tp=4, dtype=dtype, seed=9)
    shards = make_shards(spec)
    # Values at which rounding after each addition, or another order, gives another result.
    for layer in (2, 3):
        for name in ROW_BIAS:
            for rank, shard in enumerate(shards):
                bias = shard[f"{layer}.{name}"]
                bias[:32] = torch.tensor([256.0, 1.0, 1.0, 1.0][rank], dtype=dtype)
                bias[32:40] = torch.tensor([3e4, -3e4, 2.0**-10, 2.0**-20][rank], dtype=dtype)
    want = merge(shards, residual=True)
    rounded = shards[0]["2.attention.dense.bias"]
    for shard in shards[1:]:
        rounded = rounded + shard["2.attention.dense.bias"]
    assert not torch.equal(rounded, want["2.attention.dense.bias"]), "the case does not tell the two apart"
    root = write(tmp_path / "ckpt", spec, shards)
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), want)


def test_many_layers_and_ranks_are_ordered_by_number(tmp_path: Path) -> None:
    spec = Spec(tp=16, layers=11, hidden=32, heads=16, inner=64, vocab=2048, dtype=torch.bfloat16)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=True))


def test_three_digit_layers(tmp_path: Path) -> None:
    spec = Spec(tp=1, layers=100, hidden=8, heads=2, inner=8, vocab=128)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    assert (root / "global_step7/layer_101-model_00-model_states.pt").exists()
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    want = {hf_name(k, 100): v for k, v in merge(shards, residual=True).items()}
    same_bits(read_result(tmp_path / "out"), want)


def edit_yaml(root: Path, **changes: object) -> None:
    path = root / "global_step7/configs/config.yml"
    config = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        config.pop(key.replace("_", "-"), None)
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")], ids=["merge", "convert"])
def test_unknown_residual_with_biases_is_refused_not_guessed(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    root = write(tmp_path / "ckpt", Spec())
    edit_yaml(root, gpt_j_residual=None)
    assert_refused(root, tmp_path / "out", "FS209", exit=2, command=command)


def test_unknown_residual_does_not_matter_when_all_row_biases_are_zero(tmp_path: Path) -> None:
    spec = Spec(zero_row_bias=True)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    edit_yaml(root, gpt_j_residual=None)
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=True))


def test_one_rank_with_biases_is_enough_to_refuse(tmp_path: Path) -> None:
    spec = Spec(zero_row_bias=True)
    shards = make_shards(spec)
    shards[1]["3.mlp.linear2.bias"][17] = 1e-3
    root = write(tmp_path / "ckpt", spec, shards)
    edit_yaml(root, gpt_j_residual=None)
    assert_refused(root, tmp_path / "out", "FS209", exit=2, tensor="3.mlp.linear2.bias")


def test_config_given_states_what_the_saved_one_does_not(tmp_path: Path) -> None:
    spec = Spec()
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    edit_yaml(root, gpt_j_residual=None)
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(spec.config()))
    assert cli("merge", root, tmp_path / "out", "--config", tmp_path / "mine.yml").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=True))


def test_tied_head_is_one_tensor_and_said_in_the_config(tmp_path: Path) -> None:
    spec = Spec(tp=4, tied=True)
    root = write(tmp_path / "ckpt", spec)
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    assert "embed_out.weight" not in read_result(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


def test_head_that_the_config_calls_for_is_missed(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tied=True))
    edit_yaml(root, no_weight_tying=True)
    ran = assert_refused(root, tmp_path / "out", "FS103", exit=3, file="layer_06")
    assert "layer_06" in ran.having("FS103")[0]["file"]


def test_config_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    edit_yaml(root, hidden_size=128)
    assert_refused(root, tmp_path / "out", "FS215", exit=1, file="config.yml")


def test_rank_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())

    def change(state: dict) -> None:
        state["args"]["num_layers"] = 3

    edit_pt(root / "global_step7" / rank_file(1), change)
    assert_refused(root, tmp_path / "out", "FS110", exit=1, file=rank_file(1))


def test_vocabulary_beyond_the_padded_one_is_refused(tmp_path: Path) -> None:
    spec = Spec()
    root = write(tmp_path / "ckpt", spec)
    options = ("--vocab-size", spec.padded + 1)
    ran = assert_refused(root, tmp_path / "out", "FS211", exit=2, options=options)
    assert str(spec.padded) in json.dumps(ran.findings)
