"""Mixtures of experts and Qwen3 in MaxText's form: by its param_mapping, and as its layers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import moe_maker
import numpy as np
import pytest
import torch
from fastshard import FastshardError, convert
from helpers import FIXTURES, cli, sha256
from jax_maker import SCANS, Tree, as_numpy, assert_same, converted, read, target, without_step, written_yml
from maxtext_mixtures import KINDS, MIXTURES, MODULES, checkpoint, compute, held, hf, model, told, yml_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_there_and_back_is_bit_exact(kind: str, scan: int | None, tmp_path: Path) -> None:
    out, findings = converted(hf(kind, tmp_path / "hf"), tmp_path / "out", **target(scan))
    assert_same(without_step(out), held(kind, scan))
    assert not [f for f in findings if f.code == "FS214" or f.severity == "error"]
    stated, want = written_yml(tmp_path / "out"), yml_of(kind)
    assert {key: stated[key] for key in want} == want
    assert stated["rope_type"] == "default" and stated["scan_layers"] is (scan is not None)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0, ran.out
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf")
    assert_same(back, told(kind)[1])
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["model_type"] == kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("rope", ["default", "llama3.1"])
def test_maxtexts_layers_compute_the_logits_of_transformers(
    kind: str, scan: int | None, rope: str, tmp_path: Path
) -> None:
    tree, _ = converted(hf(kind, tmp_path / "hf"), tmp_path / "out", **target(scan), rope_type=rope)
    yml, want = written_yml(tmp_path / "out"), told(kind)[2]
    assert yml["rope_type"] == rope
    have = compute(tree, yml, moe_maker.TOKENS)
    assert (have - want).abs().max() <= 1e-4
    # What decides values is in the yml: with another one the logits are others.
    others = [{"rope_type": "default" if rope == "llama3.1" else "llama3.1"}]
    others += [{"num_experts_per_tok": 1}] if kind in MIXTURES else []
    for other in others:
        wrong = compute(tree, yml | other, moe_maker.TOKENS)
        assert (wrong - want).abs().max() > 1e-2, other
    converted(tmp_path / "out", tmp_path / "back", "hf")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_a_checkpoint_of_maxtexts_own_converts_by_the_yml_of_its_model(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    """Such a yml states no rope_type, which is default then."""
    source = checkpoint(kind, tmp_path / "run", scan)
    out, _ = converted(source, tmp_path / "out", "hf")
    assert_same(out, told(kind)[1])
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert after.config.model_type == kind
    assert torch.equal(moe_maker.logits(after), told(kind)[2])
    other, _ = converted(source, tmp_path / "other", **target(1 if scan is None else None))
    assert_same(without_step(other), held(kind, 1 if scan is None else None))
    stated, want = written_yml(tmp_path / "other"), yml_of(kind)
    assert {key: stated[key] for key in want} == want


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_comes_back(kind: str, tmp_path: Path) -> None:
    made = model(kind).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "hf")
    out, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert {a.dtype for a in without_step(out).values()} == {np.dtype(ml_dtypes.bfloat16)}
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf")
    want = load_file(tmp_path / "hf/model.safetensors")
    assert_same(back, {name: as_numpy(t) for name, t in want.items()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("stated", [True, False], ids=["yml", "no yml"])
def test_each_array_that_is_lost_is_named(kind: str, scan: int | None, stated: bool, tmp_path: Path) -> None:
    whole = [name for name in held(kind, scan) if "layers_" not in name or "layers_1." in name]
    source = checkpoint(kind, tmp_path / "run", scan)
    if not stated:
        (source / "maxtext_model.yml").unlink()
    item = source / "7/items"
    described = json.loads((item / "_METADATA").read_text())
    for name in whole:
        # Left out by the save: its metadata too.
        (item / name).rename(tmp_path / "lost")
        entries = dict(described["tree_metadata"])
        del entries[str(tuple(name.split(".")))]
        (item / "_METADATA").write_text(json.dumps(described | {"tree_metadata": entries}))
        ran = cli("plan", source, "--to", "maxtext:unscan")
        if not stated and name.endswith("logits_dense.kernel"):
            # Without a yml this is a model whose head is the embedding.
            assert ran.code == 0, ran.out
        else:
            assert ran.code == 3 and name in ran.out, (name, ran.out)
        # Lost since the save.
        (item / "_METADATA").write_text(json.dumps(described))
        if not stated:
            (tmp_path / "lost").rename(item / name)
            continue
        ran = cli("verify", source)
        assert ran.code == 3 and name in ran.out, (name, ran.out)
        (tmp_path / "lost").rename(item / name)
    assert cli("plan", source, "--to", "maxtext:unscan").code == 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3"])
def test_norms_that_are_all_lost_are_missing(kind: str, tmp_path: Path) -> None:
    tree = {
        name: a for name, a in held(kind, 1).items() if "_norm.scale" not in name.partition("attention.")[2]
    }
    assert len(tree) == len(held(kind, 1)) - 2
    ran = cli("verify", checkpoint(kind, tmp_path / "run", tree=tree))
    assert ran.code == 3 and "self_attention.query_norm.scale" in ran.out, ran.out


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_that_are_all_lost_are_missing(kind: str, tmp_path: Path) -> None:
    module = MODULES[kind][2]
    tree = {name: a for name, a in held(kind, 1).items() if module not in name}
    assert len(tree) == len(held(kind, 1)) - 4
    ran = cli("verify", checkpoint(kind, tmp_path / "run", tree=tree))
    assert ran.code == 3 and f"{module}.wi_0" in ran.out, ran.out
    (tmp_path / "run/maxtext_model.yml").unlink()
    ran = cli("verify", tmp_path / "run")
    assert ran.code == 3, ran.out


@pytest.mark.parametrize(
    ("kind", "yml", "named"),
    [
        ("mixtral", {"num_experts": 8}, "FS2"),
        ("mixtral", {"base_moe_mlp_dim": 48}, "FS2"),
        ("mixtral", {"decoder_block": "llama2"}, "decoder_block"),
        ("mixtral", {"decoder_block": "qwen3_moe"}, "decoder_block"),
        ("mixtral", {"scan_layers": False}, "scan_layers"),
        ("qwen3_moe", {"decoder_block": "mixtral"}, "decoder_block"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen3_moe", {"base_num_kv_heads": 4}, "FS2"),
        ("qwen3", {"decoder_block": "llama2"}, "decoder_block"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm"),
    ],
)
def test_a_yml_that_contradicts_the_arrays(
    kind: str, yml: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = checkpoint(kind, tmp_path / "run", **yml)
    for to in ("hf", "maxtext"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code != 0 and named in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize(
    "yml",
    [
        {"routed_score_func": "sigmoid"},
        {"use_random_routing": True},
        {"capacity_factor": 1.25, "sparse_matmul": False},
        {"mlp_activations": ["gelu", "linear"]},
    ],
    ids=lambda yml: next(iter(yml)),
)
def test_a_routing_that_transformers_lacks_is_refused(yml: dict[str, Any], tmp_path: Path) -> None:
    source = checkpoint("mixtral", tmp_path / "run", **yml)
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert error.value.code == "FS514" and next(iter(yml)) in error.value.findings[0].message


@pytest.mark.parametrize(
    "yml",
    [
        {"capacity_factor": 1.25},
        {"capacity_factor": -1.0, "sparse_matmul": False},
        {"base_moe_mlp_dim": None},
    ],
)
def test_settings_that_change_no_value_are_taken(yml: dict[str, Any], tmp_path: Path) -> None:
    out, _ = converted(checkpoint("mixtral", tmp_path / "run", **yml), tmp_path / "out", "hf")
    assert_same(out, told("mixtral")[1])


def test_weights_of_experts_that_do_not_add_up_to_1_are_refused(tmp_path: Path) -> None:
    """MaxText takes the softmax over the best experts alone, with or without norm_topk_prob."""
    source = hf("qwen3_moe", tmp_path / "hf", norm_topk_prob=False)
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and "norm_topk_prob" in finding.message
    assert finding.expected == "weights of the best experts that add up to 1"
    # So norm_topk_prob: false of a MaxText run is the same model.
    out, _ = converted(
        checkpoint("qwen3_moe", tmp_path / "run", norm_topk_prob=False), tmp_path / "same", "hf"
    )
    assert_same(out, told("qwen3_moe")[1])
    assert json.loads((tmp_path / "same/config.json").read_text())["norm_topk_prob"] is True


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mixtral", {"sliding_window": 8}, "sliding_window"),
        ("qwen3_moe", {"attention_bias": True}, "set of biases"),
    ],
)
def test_what_its_blocks_do_not_compute_is_refused(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(FastshardError) as error:
        convert(hf(kind, tmp_path / "hf", **changes), tmp_path / "out", to="maxtext")
    assert error.value.code == "FS514" and named in error.value.findings[0].message


def test_the_shared_expert_of_qwen2_is_refused(tmp_path: Path) -> None:
    moe_maker.qwen(2).save_pretrained(tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    assert any("kind of experts" in finding.message for finding in error.value.findings)


@pytest.mark.parametrize("kind", MIXTURES)
def test_how_many_experts_a_token_goes_through_is_not_guessed(kind: str, tmp_path: Path) -> None:
    source = checkpoint(kind, tmp_path / "run", num_experts_per_tok=None)
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert error.value.code == "FS209" and "num_experts_per_tok" in error.value.findings[0].message
    (source / "maxtext_model.yml").unlink()
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert error.value.code == "FS209"
    out, findings = converted(source, tmp_path / "out", "maxtext:unscan")
    assert_same(without_step(out), held(kind, None))
    assert [f for f in findings if f.severity == "warning" and "num_experts_per_tok" in f.message]
    # transformers' own config says it too.
    told(kind)[0].save_pretrained(tmp_path / "config")
    config = tmp_path / "config/config.json"
    back, _ = converted(source, tmp_path / "back", "hf", config=config)
    assert_same(back, told(kind)[1])
    converted(source, tmp_path / "again", "maxtext:unscan", config=config)
    assert written_yml(tmp_path / "again")["num_experts_per_tok"] == 2


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_optimizers_moments_go_along_in_maxtext_alone(kind: str, tmp_path: Path) -> None:
    def state(scan: int | None) -> Tree:
        tree = held(kind, scan)
        for factor, slot in ((2, "mu"), (3, "nu")):
            tree |= {
                name.replace("params.params.", f"opt_state.{slot}.params."): a * factor
                for name, a in held(kind, scan).items()
            }
        return tree | {"opt_state.count": np.array(7, np.int32), "step": np.array(7, np.int32)}

    source = checkpoint(kind, tmp_path / "run", tree=state(1))
    out, _ = converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert_same(out, state(None))
    weights, _ = converted(source, tmp_path / "weights", "hf")
    assert_same(weights, told(kind)[1])
    ran = cli("convert", hf(kind, tmp_path / "hf"), tmp_path / "no", "--to", "maxtext", "--optimizer")
    assert ran.code == 2 and not (tmp_path / "no").exists()


def test_merging_keeps_every_name(tmp_path: Path) -> None:
    source = checkpoint("mixtral", tmp_path / "run")
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), held("mixtral", 1))


def test_megatrons_mixture_goes_to_maxtext_and_back(tmp_path: Path) -> None:
    """Between two others than Hugging Face: the layouts meet in one hub."""
    convert(hf("mixtral", tmp_path / "hf"), tmp_path / "megatron", to="megatron:legacy", tp=2, ep=2)
    out, _ = converted(tmp_path / "megatron", tmp_path / "out", "maxtext", vocab_size=250)
    assert_same(without_step(out), held("mixtral", 1))
    convert(tmp_path / "out", tmp_path / "again", to="megatron:legacy", tp=2, ep=2)
    back, _ = converted(tmp_path / "again", tmp_path / "back", "hf", vocab_size=250)
    assert_same(back, told("mixtral")[1])


def test_a_mixture_that_megatron_core_saved(tmp_path: Path) -> None:
    """Its heads have 8 columns: queries are rounded on the way, all else is equal."""
    source = FIXTURES / "sharded/moe_megatron_legacy_tp2_ep2"
    _, findings = converted(source, tmp_path / "out", "maxtext", vocab_size=250)
    assert [f for f in findings if f.code == "FS214"]
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf")
    want = load_file(FIXTURES / "sharded/moe_hf_mixtral/model.safetensors")
    assert back.keys() == want.keys()
    for name, tensor in want.items():
        exact = 0 if "q_proj" not in name else 1e-6
        np.testing.assert_allclose(back[name], as_numpy(tensor), rtol=exact, atol=0, err_msg=name)
    assert any(sha256(tensor) for tensor in want.values())
