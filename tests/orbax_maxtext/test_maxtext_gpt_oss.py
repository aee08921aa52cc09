"""gpt-oss in MaxText's form: by its converter, and as its layers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpt_oss_maker
import ml_dtypes
import moe_maker
import numpy as np
import pytest
import torch
from fastshard import FastshardError, convert
from helpers import cli, read_result
from jax_maker import SCANS, Tree, assert_same, converted, read, target, without_step, written_yml
from maxtext_gpt_oss import KINDS, arrange, checkpoint, compute, files, yml_of

YARN = gpt_oss_maker.YARN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_there_and_back_is_bit_exact(kind: str, scan: int | None, tmp_path: Path) -> None:
    config, tensors, want = files(kind, tmp_path / "hf")
    out, findings = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    assert_same(without_step(out), arrange(tensors, config, scan))
    assert not findings
    stated = written_yml(tmp_path / "out")
    told = yml_of(config)
    assert {key: stated[key] for key in told} == told
    assert stated["scan_layers"] is (scan is not None)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0, ran.out
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf")
    assert_same(back, tensors)
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_maxtexts_layers_compute_the_logits_of_transformers(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    want = files(kind, tmp_path / "hf")[2]
    tree, _ = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    yml = written_yml(tmp_path / "out")
    assert (compute(tree, yml, moe_maker.TOKENS) - want).abs().max() <= 1e-4
    # What decides values is in the yml: with another one the logits are others.
    others: list[dict[str, Any]] = [{"num_experts_per_tok": 1}, {"sliding_window_size": 12}]
    others += [{"mlp_activations_limit": 2.0}, {"rope_max_timescale": 500}]
    if kind != "plain":
        others += [{"rope_interleave": True}, {"rope_factor": 1}]
        others += [{"rope_attention_scaling": not yml["rope_attention_scaling"]}]
    for other in others:
        wrong = compute(tree, yml | other, moe_maker.TOKENS)
        assert (wrong - want).abs().max() > 1e-3, other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_a_checkpoint_of_maxtexts_own_converts_by_the_yml_of_its_model(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    config, tensors, want = files(kind)
    source = checkpoint(kind, tmp_path / "run", scan)
    out, _ = converted(source, tmp_path / "out", "hf")
    assert_same(out, tensors)
    assert torch.equal(moe_maker.load_logits(tmp_path / "out"), want)
    other = None if scan is not None else 1
    form, _ = converted(source, tmp_path / "other", **target(other))
    assert_same(without_step(form), arrange(tensors, config, other))
    stated, told = written_yml(tmp_path / "other"), yml_of(config)
    assert {key: stated[key] for key in told} == told
    # transformers' own config says it too.
    config.save_pretrained(tmp_path / "config")
    back, _ = converted(source, tmp_path / "back", "hf", config=tmp_path / "config/config.json")
    assert_same(back, tensors)
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


def test_bfloat16_and_mxfp4_come_back(tmp_path: Path) -> None:
    want = gpt_oss_maker.save_mxfp4(tmp_path / "hf")
    out, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext", dtype="bf16")
    assert {a.dtype for a in without_step(out).values()} == {np.dtype(ml_dtypes.bfloat16)}
    converted(tmp_path / "out", tmp_path / "back", "hf")
    back = read_result(tmp_path / "back")
    assert back.keys() == want.keys() and all(torch.equal(back[name], t) for name, t in want.items())


def test_torchtitans_checkpoint_goes_to_maxtext_and_back(tmp_path: Path) -> None:
    """Between two others than Hugging Face: the layouts meet in one hub."""
    config, tensors, _ = files("yarn", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "titan", to="dcp:torchtitan")
    out, _ = converted(tmp_path / "titan", tmp_path / "out", "maxtext")
    assert_same(without_step(out), arrange(tensors, config, 1))
    convert(tmp_path / "out", tmp_path / "again", to="dcp:torchtitan")
    back, _ = converted(tmp_path / "again", tmp_path / "back", "hf")
    assert_same(back, tensors)


def test_the_optimizers_moments_go_along_in_maxtext_alone(tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")

    def state(scan: int | None) -> Tree:
        held = arrange(tensors, config, scan)
        tree = dict(held)
        for factor, slot in ((2, "mu"), (3, "nu")):
            below = f"opt_state.{slot}.params."
            tree |= {name.replace("params.params.", below): a * factor for name, a in held.items()}
        return tree | {"opt_state.count": np.array(7, np.int32), "step": np.array(7, np.int32)}

    source = checkpoint("yarn", tmp_path / "run", tree=state(1))
    out, _ = converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert_same(out, state(None))
    back, _ = converted(tmp_path / "out", tmp_path / "back", "maxtext:scan", optimizer=True)
    assert_same(back, state(1))


def test_merging_keeps_every_name(tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")
    ran = cli("merge", checkpoint("yarn", tmp_path / "run"), tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), arrange(tensors, config, 1))


@pytest.mark.parametrize("separator", [".", "_"])
def test_a_state_of_nnx_has_the_same_layers(separator: str, tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")
    tree = arrange(tensors, config, None)
    names = {name: name.removeprefix("params.params.") for name in tree}
    held = {
        f"model.{own.replace('.layers_', f'.layers{separator}')}.value": tree[name]
        for name, own in names.items()
    }
    source = checkpoint("yarn", tmp_path / "run", tree=held)
    out, _ = converted(source, tmp_path / "out", "hf")
    assert_same(out, tensors)


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("stated", [True, False], ids=["yml", "no yml"])
def test_each_array_that_is_lost_is_named(scan: int | None, stated: bool, tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")
    tree = arrange(tensors, config, scan)
    one = "layers.layers_1." if scan is not None else "layers_3."
    for i, name in enumerate(sorted(name for name in tree if one in name)):
        lacking = {n: a for n, a in tree.items() if n != name}
        source = checkpoint("yarn", tmp_path / str(i), tree=lacking)
        if not stated:
            (source / "maxtext_model.yml").unlink()
        for command in (("verify", source), ("plan", source, "--to", "maxtext:unscan")):
            errors = cli(*command).errors
            assert [(f["code"], f["tensor"]) for f in errors] == [("FS102", name)], errors


def test_a_stack_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")
    tree = arrange(tensors, config, 1)
    name = "params.params.decoder.layers.layers_1.GptOssMlp.wi_1"
    tree[name] = tree[name][:, :-1]
    source = checkpoint("yarn", tmp_path / "run", tree=tree)
    for stated in (True, False):
        if not stated:
            (source / "maxtext_model.yml").unlink()
        errors = cli("verify", source).errors
        assert [f["tensor"] for f in errors] == [name], errors


@pytest.mark.parametrize(
    ("yml", "named"),
    [
        ({"decoder_block": "mixtral"}, "decoder_block"),
        ({"scan_layers": False}, "scan_layers"),
        ({"base_num_decoder_layers": 6}, "FS"),
        ({"num_experts": 8}, "FS2"),
        ({"head_dim": 8}, "FS2"),
        ({"base_num_kv_heads": 4}, "FS2"),
    ],
    ids=str,
)
def test_a_yml_that_contradicts_the_arrays(yml: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = checkpoint("yarn", tmp_path / "run", **yml)
    for to in ("hf", "maxtext:unscan"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code != 0 and named in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize(
    "key", ["sliding_window_size", "num_experts_per_tok", "rope_factor", "original_max_position_embeddings"]
)
def test_what_decides_values_is_not_guessed(key: str, tmp_path: Path) -> None:
    source = checkpoint("yarn", tmp_path / "run", **{key: None})
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert [(f.code, key in f.message) for f in error.value.findings] == [("FS209", True)]


@pytest.mark.parametrize(
    "yml",
    [
        {"mlp_activations_limit": None},
        {"mlp_activations_limit": 9.0},
        {"mlp_activations": ["silu", "linear"]},
        {"attention_sink": None},
        {"attention_bias": False},
        {"routed_bias": None},
        {"mlp_bias": None},
        {"inhomogeneous_layer_cycle_interval": 1},
        {"routed_score_func": "sigmoid"},
        {"rope_interleave": None},
        {"rope_type": "llama3.1"},
        {"attn_logits_soft_cap": 30.0},
    ],
    ids=str,
)
def test_what_transformers_lacks_is_refused(yml: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        convert(checkpoint("yarn", tmp_path / "run", **yml), tmp_path / "out", to="hf")
    found = [(f.code, next(iter(yml)) in f.message) for f in error.value.findings]
    assert found == [("FS514", True)], error.value.findings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": False}, "set of biases"),
        ({"swiglu_limit": 9.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"layer_types": ["full_attention"] * 4}, "set of layers with a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "set of layers with a sliding window"),
        ({"rope_parameters": YARN | {"factor": 2.5}}, "rope_scaling (factor)"),
        ({"rope_parameters": YARN | {"attention_factor": 1.7}}, "rope_scaling (attention_factor)"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "base of rotary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_maxtext_does_not_compute_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    gpt_oss_maker.model(**changes).save_pretrained(tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and named in finding.message, finding
    assert finding.message.startswith("MaxText has no gpt-oss")


def test_a_window_that_sees_all_positions_stays(tmp_path: Path) -> None:
    gpt_oss_maker.model(sliding_window=128).save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert written_yml(tmp_path / "out")["sliding_window_size"] == 128


def test_an_odd_number_of_layers_is_not_scanned(tmp_path: Path) -> None:
    config, tensors, want = files("yarn", tmp_path / "hf", num_hidden_layers=3)
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"], ran.out
    assert "--to maxtext:unscan" in ran.out and not (tmp_path / "out").exists()
    out, _ = converted(tmp_path / "hf", tmp_path / "apart", "maxtext:unscan")
    assert_same(without_step(out), arrange(tensors, config, None))
    ran = cli("convert", tmp_path / "apart", tmp_path / "scanned", "--to", "maxtext:scan")
    assert ran.code == 2 and not (tmp_path / "scanned").exists()
    converted(tmp_path / "apart", tmp_path / "back", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


def test_no_order_of_pairs_can_be_chosen(tmp_path: Path) -> None:
    files("yarn", tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext", "--rope-type", "llama3.1")
    assert ran.code == 2 and "--rope-type" in ran.out and not (tmp_path / "out").exists()


def test_without_a_yml_nothing_is_guessed(tmp_path: Path) -> None:
    config, tensors, _ = files("yarn")
    source = checkpoint("yarn", tmp_path / "run")
    (source / "maxtext_model.yml").unlink()
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert [f["code"] for f in ran.errors] == ["FS209"] and "num_experts_per_tok" in ran.out, ran.out
    # In MaxText's own forms the arrays say enough.
    out, _ = converted(source, tmp_path / "form", "maxtext:unscan")
    assert_same(without_step(out), arrange(tensors, config, None))
    assert json.loads(json.dumps(written_yml(tmp_path / "form")))["decoder_block"] == "gpt_oss"
