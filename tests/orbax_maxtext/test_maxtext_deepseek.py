"""DeepSeek-V3 and Kimi-K2 in MaxText's form: by its converter, and as its layers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_maker
import ml_dtypes
import moe_maker
import numpy as np
import pytest
import torch
from fastshard import FastshardError, convert
from helpers import cli, read_result
from jax_maker import Tree, assert_same, converted, read, target, without_step, written_yml
from maxtext_deepseek import KINDS, ROPES, arrange, checkpoint, compute, files, yml_of
from transformers import AutoModelForCausalLM

SCANS = {"scan 1": 1, "scan 0": 0, "apart": None}
MOE = "params.params.decoder.moe_layers"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_there_and_back_is_bit_exact(kind: str, scan: int | None, tmp_path: Path) -> None:
    config, tensors, _ = files(kind, tmp_path / "hf")
    out, findings = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    assert_same(without_step(out), arrange(tensors, config, scan))
    assert not [f for f in findings if f.code == "FS214" or f.severity == "error"]
    stated, want = written_yml(tmp_path / "out"), yml_of(config)
    want.pop("mscale", None)
    assert {key: stated[key] for key in want} == want
    assert stated["scan_layers"] is (scan is not None)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0, ran.out
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf")
    assert_same(back, tensors)
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "deepseek_v3"


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
    others: list[dict[str, Any]] = [{"num_experts_per_tok": 1}, {"routed_scaling_factor": 1.0}]
    others += [{"rope_interleave": False}]
    others += [{"n_routing_groups": -1}] if kind != "yarn" else [{"mscale": 0.0}, {"rope_factor": 1}]
    for other in others:
        wrong = compute(tree, yml | other, moe_maker.TOKENS)
        assert (wrong - want).abs().max() > 1e-3, other
    converted(tmp_path / "out", tmp_path / "back", "hf")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), want)


@pytest.mark.parametrize("rope", ROPES)
def test_what_yarn_scales_is_the_same_on_both_sides(rope: str, tmp_path: Path) -> None:
    want = files("yarn", tmp_path / "hf", rope_parameters=ROPES[rope])[2]
    tree, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    have = compute(tree, written_yml(tmp_path / "out"), moe_maker.TOKENS)
    assert (have - want).abs().max() <= 1e-4
    converted(tmp_path / "out", tmp_path / "back", "hf")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert (moe_maker.logits(after) - want).abs().max() <= 1e-5


def test_under_another_model_name_maxtext_routes_otherwise(tmp_path: Path) -> None:
    """kimi-k2-1t is such a name: weights have the bias in them. So each result says what to run it with."""
    want = files("plain", tmp_path / "hf")[2]
    tree, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    wrong = compute(tree, written_yml(tmp_path / "out"), moe_maker.TOKENS, name="kimi-k2-1t")
    assert (wrong - want).abs().max() > 1e-3
    assert [f.severity for f in findings if "model_name" in f.message] == ["warning"]
    for name, told in {"kimi-k2-1t": 1, "deepseek3-671b": 0}.items():
        source = checkpoint("plain", tmp_path / name, model_name=name)
        _, findings = converted(source, tmp_path / f"{name}-hf", "hf")
        assert len([f for f in findings if "model_name" in f.message]) == told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_a_checkpoint_of_maxtexts_own_converts_by_the_yml_of_its_model(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    config, tensors, logits = files(kind)
    source = checkpoint(kind, tmp_path / "run", scan)
    out, _ = converted(source, tmp_path / "out", "hf")
    assert_same(out, tensors)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), logits)
    other = None if scan is not None else 1
    form, _ = converted(source, tmp_path / "other", **target(other))
    assert_same(without_step(form), arrange(tensors, config, other))
    stated, want = written_yml(tmp_path / "other"), yml_of(config)
    assert {key: stated[key] for key in want} == want
    # transformers' own config says it too.
    config.save_pretrained(tmp_path / "config")
    back, _ = converted(source, tmp_path / "back", "hf", config=tmp_path / "config/config.json")
    assert_same(back, tensors)


def test_kimi_k2_is_the_same_under_another_name(tmp_path: Path) -> None:
    config, tensors, _ = files("yarn", tmp_path / "hf")
    own = json.loads((tmp_path / "hf/config.json").read_text())
    named = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "hf/config.json").write_text(json.dumps(own | named))
    out, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert_same(without_step(out), arrange(tensors, config, 1))


def test_bfloat16_comes_back_and_the_bias_keeps_its_type(tmp_path: Path) -> None:
    made = deepseek_maker.model().to(torch.bfloat16)
    made.save_pretrained(tmp_path / "hf")
    out, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    types = {name.endswith("gate.bias"): a.dtype for name, a in without_step(out).items()}
    assert types[False] == np.dtype(ml_dtypes.bfloat16)
    have = read_result(tmp_path / "hf")
    converted(tmp_path / "out", tmp_path / "back", "hf")
    back = read_result(tmp_path / "back")
    assert back.keys() == have.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in have.items())


def test_the_optimizers_moments_go_along_in_maxtext_alone(tmp_path: Path) -> None:
    config, tensors, _ = files("plain")

    def state(scan: int | None) -> Tree:
        held = arrange(tensors, config, scan)
        tree = dict(held)
        for factor, slot in ((2, "mu"), (3, "nu")):
            below = f"opt_state.{slot}.params."
            tree |= {name.replace("params.params.", below): a * factor for name, a in held.items()}
        return tree | {"opt_state.count": np.array(7, np.int32), "step": np.array(7, np.int32)}

    source = checkpoint("plain", tmp_path / "run", tree=state(1))
    out, _ = converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert_same(out, state(None))
    back, _ = converted(tmp_path / "out", tmp_path / "back", "maxtext:scan", optimizer=True)
    assert_same(back, state(1))
    weights, _ = converted(source, tmp_path / "weights", "hf")
    assert_same(weights, tensors)


def test_merging_keeps_every_name(tmp_path: Path) -> None:
    config, tensors, _ = files("plain")
    ran = cli("merge", checkpoint("plain", tmp_path / "run"), tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), arrange(tensors, config, 1))


def test_deepseek_v2_is_merged_and_not_taken_for_v3(tmp_path: Path) -> None:
    """It has no bias for the choice of experts, and scores them by a softmax."""
    config, tensors, _ = files("straight")
    tree = {n: a for n, a in arrange(tensors, config, 1).items() if not n.endswith("gate.bias")}
    yml = {"routed_bias": None, "routed_score_func": "softmax"}
    source = checkpoint("straight", tmp_path / "run", tree=tree, **yml)
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), tree)
    ran = cli("convert", source, tmp_path / "hf", "--to", "hf")
    assert {f["code"] for f in ran.errors} == {"FS514"} and "routed_score_func" in ran.out, ran.out


@pytest.mark.parametrize("separator", [".", "_"])
def test_a_state_of_nnx_has_the_same_layers(separator: str, tmp_path: Path) -> None:
    """As flax NNX names it: no collections, each variable a node, layers in a list or apart."""
    config, tensors, _ = files("plain")
    names = {name: name.removeprefix("params.params.") for name in arrange(tensors, config, None)}
    held = {
        f"model.{own.replace('_layers_', f'_layers{separator}')}.value": arrange(tensors, config, None)[name]
        for name, own in names.items()
    }
    source = checkpoint("plain", tmp_path / "run", tree=held)
    out, _ = converted(source, tmp_path / "out", "hf")
    assert_same(out, tensors)
    form, _ = converted(source, tmp_path / "form", "maxtext:scan")
    assert_same(without_step(form), arrange(tensors, config, 1))


def test_megatrons_model_goes_to_maxtext_and_back(tmp_path: Path) -> None:
    """Between two others than Hugging Face: which layers are dense comes from the arguments of the run."""
    config, tensors, _ = files("yarn", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", to="megatron:legacy", tp=2, ep=2)
    out, _ = converted(tmp_path / "megatron", tmp_path / "out", "maxtext", vocab_size=250)
    assert_same(without_step(out), arrange(tensors, config, 1))
    convert(tmp_path / "out", tmp_path / "again", to="megatron:legacy", tp=2, ep=2)
    back, _ = converted(tmp_path / "again", tmp_path / "back", "hf", vocab_size=250)
    assert_same(back, tensors)


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize(
    "lost",
    [
        "moe_layers#.self_attention.wkv_b.kernel",
        "moe_layers#.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias",
        "dense_layers#.mlp.wo.kernel",
        "dense_layers#.self_attention.kv_norm.scale",
    ],
)
def test_an_array_that_one_kind_of_layers_lacks_is_named(lost: str, scan: int | None, tmp_path: Path) -> None:
    config, tensors, _ = files("straight")
    tree = arrange(tensors, config, scan)
    name = f"params.params.decoder.{lost.replace('#', '' if scan is not None else '_1')}"
    del tree[name]
    source = checkpoint("straight", tmp_path / "run", tree=tree)
    for command in (("verify", source), ("plan", source, "--to", "hf")):
        errors = cli(*command).errors
        assert [(f["code"], f["tensor"]) for f in errors] == [("FS102", name)], errors


@pytest.mark.parametrize(("kind", "layer"), [("dense", 1), ("moe", 3)])
def test_a_layer_that_is_lost_is_told_by_its_number_in_the_model(
    kind: str, layer: int, tmp_path: Path
) -> None:
    config, tensors, _ = files("straight")
    tree = {n: a for n, a in arrange(tensors, config, None).items() if f"{kind}_layers_1." not in n}
    ran = cli("verify", checkpoint("straight", tmp_path / "run", tree=tree))
    (finding,) = ran.errors
    assert finding["code"] == "FS103" and finding["layers"] == {"first": layer, "last": layer}


def test_a_stack_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    config, tensors, _ = files("plain")
    tree = arrange(tensors, config, 1)
    name = f"{MOE}.self_attention.wq_b.kernel"
    tree[name] = tree[name][:, :-1]
    source = checkpoint("plain", tmp_path / "run", tree=tree)
    for stated in (True, False):
        if not stated:
            (source / "maxtext_model.yml").unlink()
        errors = cli("verify", source).errors
        assert [f["tensor"] for f in errors] == [name], errors


@pytest.mark.parametrize(
    ("yml", "named"),
    [
        ({"decoder_block": "llama2"}, "decoder_block"),
        ({"decoder_block": "mixtral"}, "decoder_block"),
        ({"scan_layers": False}, "scan_layers"),
        ({"first_num_dense_layers": 2}, "FS2"),
        ({"base_num_decoder_layers": 5}, "FS2"),
        ({"num_experts": 16}, "FS2"),
        ({"shared_experts": 2}, "FS2"),
        ({"kv_lora_rank": 8}, "FS2"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
    ],
    ids=str,
)
def test_a_yml_that_contradicts_the_arrays(yml: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = checkpoint("plain", tmp_path / "run", **yml)
    for to in ("hf", "maxtext:unscan"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code != 0 and named in ran.out and not (tmp_path / "out").exists(), ran.out


def test_without_a_yml_nothing_is_guessed(tmp_path: Path) -> None:
    config, tensors, _ = files("plain")
    source = checkpoint("plain", tmp_path / "run")
    (source / "maxtext_model.yml").unlink()
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert [f["code"] for f in ran.errors] == ["FS209"] and "num_experts_per_tok" in ran.out, ran.out
    # In MaxText's own forms the arrays say enough.
    out, _ = converted(source, tmp_path / "form", "maxtext:unscan")
    assert_same(without_step(out), arrange(tensors, config, None))


@pytest.mark.parametrize("key", ["rope_type", "rope_factor", "original_max_position_embeddings"])
def test_what_yarn_needs_is_not_guessed(key: str, tmp_path: Path) -> None:
    source = checkpoint("yarn", tmp_path / "run", **{key: None})
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert [(f.code, key in f.message) for f in error.value.findings] == [("FS209", True)]


@pytest.mark.parametrize(
    "yml",
    [
        {"routed_score_func": "softmax"},
        {"routed_bias": False},
        {"use_random_routing": True},
        {"rope_interleave": False},
        {"rope_type": "default"},
        {"mtp_num_layers": 1},
        {"mlp_activations": ["gelu", "linear"]},
    ],
    ids=lambda yml: next(iter(yml)),
)
def test_what_transformers_lacks_is_refused(yml: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        convert(checkpoint("plain", tmp_path / "run", **yml), tmp_path / "out", to="hf")
    found = [(f.code, next(iter(yml)) in f.message) for f in error.value.findings]
    assert found == [("FS514", True)], error.value.findings


YARN = deepseek_maker.YARN


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "set of biases"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"first_k_dense_replace": 0}, "set of layers without experts"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_parameters": YARN | {"factor": 2.5}}, "rope_scaling (factor)"),
        ({"rope_parameters": YARN | {"mscale": 0.5}}, "rope_scaling (mscale)"),
        ({"rope_parameters": YARN | {"attention_factor": 1.7}}, "rope_scaling (attention_factor)"),
        ({"rope_parameters": YARN, "max_position_embeddings": 16}, "max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "base of rotary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_maxtext_does_not_compute_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    deepseek_maker.model(**changes).save_pretrained(tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and named in finding.message, finding
    assert finding.message.startswith("MaxText has no DeepSeek-V3")


def test_layers_that_predict_further_tokens_are_refused_by_name(tmp_path: Path) -> None:
    """MaxText's mtp_block has no norm before the head of its own."""
    deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and "number of MTP layers" in finding.message


def test_other_norms_of_latents_are_told(tmp_path: Path) -> None:
    """transformers' norms of the latents add 1e-6, whatever rms_norm_eps is."""
    deepseek_maker.model(rms_norm_eps=1e-5).save_pretrained(tmp_path / "hf")
    _, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    _, back = converted(tmp_path / "out", tmp_path / "back", "hf")
    for told in (findings, back):
        assert [f.severity for f in told if "norms of the latents" in f.message] == ["warning"]


def test_no_order_of_pairs_can_be_chosen(tmp_path: Path) -> None:
    files("plain", tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext", "--rope-type", "default")
    assert ran.code == 2 and "--rope-type" in ran.out and not (tmp_path / "out").exists()
