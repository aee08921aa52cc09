"""Qwen3-Next and Qwen3.5-MoE in MaxText's form: by its converter, and as its layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import delta_maker
import moe_maker
import numpy as np
import pytest
import torch
import yaml
from fastshard import FastshardError, convert
from helpers import cli
from jax_maker import (
    SCANS,
    Tree,
    assert_same,
    converted,
    read,
    saved_orbax,
    target,
    without_step,
    written_yml,
)
from maxtext_delta import KINDS, arrange, checkpoint, compute, files, find_cycle, yml_of


def assert_back(folder: Path, tensors: Tree, kind: str) -> None:
    """The model of a result has these tensors; Qwen3-Next's experts lie apart on the hub."""
    found = read(folder)
    if kind in ("next", "cycle of two"):
        apart = {name: torch.from_numpy(array) for name, array in found.items()}
        found = {name: tensor.numpy() for name, tensor in delta_maker.stack_experts(apart).items()}
    assert_same(found, tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_there_and_back_is_bit_exact(kind: str, scan: int | None, tmp_path: Path) -> None:
    config, tensors, want = files(kind, tmp_path / "hf")
    out, findings = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    assert_same(without_step(out), arrange(tensors, config, scan))
    # The one thing to say is that MaxText divides the logits of a tied head unless the yml stops it.
    assert all("normalize_embedding_logits" in finding.message for finding in findings), findings
    assert len(findings) == config.tie_word_embeddings
    stated, expected = written_yml(tmp_path / "out"), yml_of(config)
    assert {key: stated[key] for key in expected} == expected
    assert stated["scan_layers"] is (scan is not None)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0, ran.out
    converted(tmp_path / "out", tmp_path / "back", "hf")
    assert_back(tmp_path / "back", tensors, kind)
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
    others: list[dict[str, Any]] = [{"num_experts_per_tok": 1}, {"partial_rotary_factor": 0.25}]
    others += [{"rope_max_timescale": 10}, {"normalization_layer_epsilon": 1e-2}]
    for other in others:
        wrong = compute(tree, yml | other, moe_maker.TOKENS)
        assert (wrong - want).abs().max() > 1e-4, other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_a_checkpoint_of_maxtexts_own_converts_by_the_yml_of_its_model(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    config, tensors, want = files(kind)
    source = checkpoint(kind, tmp_path / "run", scan)
    converted(source, tmp_path / "out", "hf")
    assert_back(tmp_path / "out", tensors, kind)
    assert torch.equal(moe_maker.load_logits(tmp_path / "out"), want)
    other = None if scan is not None else 1
    form, _ = converted(source, tmp_path / "other", **target(other))
    assert_same(without_step(form), arrange(tensors, config, other))
    stated, expected = written_yml(tmp_path / "other"), yml_of(config)
    assert {key: stated[key] for key in expected} == expected
    # transformers' own config says it too.
    config.save_pretrained(tmp_path / "config")
    converted(source, tmp_path / "back", "hf", config=tmp_path / "config/config.json")
    assert_back(tmp_path / "back", tensors, kind)
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


def test_the_settings_of_maxtexts_own_yml_for_images_change_nothing_in_text(tmp_path: Path) -> None:
    config, tensors, _ = files("3.5")
    source = checkpoint("3.5", tmp_path / "run", use_mrope=True, mrope_section=[1, 1, 0])
    converted(source, tmp_path / "out", "hf")
    assert_back(tmp_path / "out", tensors, "3.5")
    form, _ = converted(source, tmp_path / "form", "maxtext:unscan")
    assert_same(without_step(form), arrange(tensors, config, None))
    stated = written_yml(tmp_path / "form")
    assert stated["use_mrope"] is True and stated["mrope_section"] == [1, 1, 0]


@pytest.mark.parametrize("kind", ["next", "3.5"])
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_megatrons_checkpoint_goes_to_maxtext_and_back(kind: str, scan: int | None, tmp_path: Path) -> None:
    """Between two others than Hugging Face: the layouts meet in one hub."""
    config, tensors, want = files(kind, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", to="megatron", tp=2, ep=2)
    # Megatron's own files do not tell rows of padding from words.
    out, _ = converted(tmp_path / "megatron", tmp_path / "out", vocab_size=250, **target(scan))
    assert_same(without_step(out), arrange(tensors, config, scan))
    convert(tmp_path / "out", tmp_path / "again", to="megatron:legacy", tp=2)
    converted(tmp_path / "again", tmp_path / "back", "hf", vocab_size=250, config=tmp_path / "hf/config.json")
    assert_back(tmp_path / "back", tensors, kind)
    assert torch.allclose(moe_maker.load_logits(tmp_path / "back"), want, atol=1e-5)


def test_the_text_model_beside_a_tower_is_converted(tmp_path: Path) -> None:
    state = delta_maker.save_with_tower(
        tmp_path / "hf", "qwen3_5_moe_text", {"shared_expert_intermediate_size": 24}
    )
    _, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    (left_out,) = (finding for finding in findings if finding.code == "FS212")
    assert "model.visual.*" in left_out.message, findings
    converted(tmp_path / "out", tmp_path / "back", "hf")
    text = {
        name.replace("model.language_model.", "model."): tensor.numpy()
        for name, tensor in state.items()
        if not name.startswith("model.visual.")
    }
    assert_same(read(tmp_path / "back"), text)


def test_the_optimizers_moments_go_along_in_maxtext_alone(tmp_path: Path) -> None:
    config, tensors, _ = files("next")

    def state(scan: int | None) -> Tree:
        weights = arrange(tensors, config, scan)
        tree = dict(weights)
        for factor, slot in ((2, "mu"), (3, "nu")):
            below = f"opt_state.{slot}.params."
            tree |= {name.replace("params.params.", below): a * factor for name, a in weights.items()}
        return tree | {"opt_state.count": np.array(7, np.int32), "step": np.array(7, np.int32)}

    source = checkpoint("next", tmp_path / "run", tree=state(1))
    out, _ = converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert_same(out, state(None))
    back, _ = converted(tmp_path / "out", tmp_path / "back", "maxtext:scan", optimizer=True)
    assert_same(back, state(1))


def test_merging_keeps_every_name(tmp_path: Path) -> None:
    config, tensors, _ = files("next")
    ran = cli("merge", checkpoint("next", tmp_path / "run"), tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), arrange(tensors, config, 1))


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("stated", [True, False], ids=["yml", "no yml"])
def test_each_array_that_is_lost_is_named(scan: int | None, stated: bool, tmp_path: Path) -> None:
    config, tensors, _ = files("next")
    tree = arrange(tensors, config, scan)
    places = ("layers.layer_1.", "layers.layer_3.") if scan is not None else ("layers_5.", "layers_7.")
    lost = sorted(name for name in tree if any(place in name for place in places))
    assert len(lost) == 33
    for i, name in enumerate(lost):
        lacking = {n: a for n, a in tree.items() if n != name}
        source = checkpoint("next", tmp_path / str(i), tree=lacking)
        if not stated:
            (source / "maxtext_model.yml").unlink()
        errors = cli("verify", source).errors
        assert [(f["code"], f["tensor"]) for f in errors] == [("FS102", name)], errors
        ran = cli("convert", source, tmp_path / "out", "--to", "hf")
        assert ran.code != 0 and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_a_layer_that_is_lost_is_named(scan: int | None, tmp_path: Path) -> None:
    config, tensors, _ = files("next")
    tree = arrange(tensors, config, scan)
    for layer in ("layers.layer_2.", "layers.layer_3.") if scan is not None else ("layers_2.", "layers_3."):
        lacking = {name: array for name, array in tree.items() if f"decoder.{layer}" not in name}
        source = checkpoint("next", tmp_path / f"{layer}run", tree=lacking)
        ran = cli("verify", source)
        assert ran.code == 3 and layer.strip(".").rpartition(".")[2] in ran.out, ran.out


def test_a_stack_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    config, tensors, _ = files("next")
    tree = arrange(tensors, config, 1)
    name = "params.params.decoder.layers.layer_1.mlp.routed_experts.wi_1"
    tree[name] = tree[name][:, :-1]
    source = checkpoint("next", tmp_path / "run", tree=tree)
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
        ({"inhomogeneous_layer_cycle_interval": 2}, "inhomogeneous_layer_cycle_interval"),
        ({"inhomogeneous_layer_cycle_interval": 8}, "inhomogeneous_layer_cycle_interval"),
        ({"base_num_decoder_layers": 12}, "FS"),
        ({"num_experts": 16}, "FS2"),
        ({"head_dim": 4}, "FS2"),
        ({"base_num_kv_heads": 8}, "FS2"),
        ({"gdn_num_key_heads": 8}, "FS2"),
        ({"gdn_num_key_heads": 3}, "gdn_num_value_heads"),
        ({"gdn_key_head_dim": 12}, "FS2"),
        ({"base_moe_mlp_dim": 20}, "FS2"),
    ],
    ids=str,
)
def test_a_yml_that_contradicts_the_arrays(yml: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = checkpoint("next", tmp_path / "run", **yml)
    for to in ("hf", "maxtext:unscan"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code != 0 and named in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("key", ["partial_rotary_factor", "num_experts_per_tok", "gdn_num_key_heads"])
def test_what_decides_values_is_not_guessed(key: str, tmp_path: Path) -> None:
    source = checkpoint("next", tmp_path / "run", **{key: None})
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert [(f.code, key in f.message) for f in error.value.findings] == [("FS209", True)]


@pytest.mark.parametrize(
    "yml",
    [
        {"use_qk_norm": True},
        {"use_qk_norm_in_gdn": False},
        {"attention_bias": True},
        {"attention_sink": True},
        {"routed_bias": True},
        {"mtp_num_layers": 1},
        {"rope_type": "yarn"},
        {"rope_type": "llama3.1"},
        {"routed_score_func": "sigmoid"},
        {"attn_logits_soft_cap": 30.0},
        {"mlp_activations": ["gelu", "linear"]},
    ],
    ids=str,
)
def test_what_transformers_lacks_is_refused(yml: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        convert(checkpoint("next", tmp_path / "run", **yml), tmp_path / "out", to="hf")
    found = [(f.code, next(iter(yml)) in f.message) for f in error.value.findings]
    assert found == [("FS514", True)], error.value.findings


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3_next", {"attention_bias": True}, "biases"),
        ("qwen3_next", {"shared_expert_intermediate_size": 20}, "shared expert"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 8}, "gated delta nets"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 8}, "gated delta nets"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 4}, "gated delta nets"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "without experts"),
        ("qwen3_5_text", {}, "gated delta nets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_maxtext_does_not_compute_is_refused(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    sizes = {} if kind == "qwen3_5_text" else {"shared_expert_intermediate_size": 24}
    delta_maker.model(kind=kind, num_hidden_layers=8, **sizes | changes).save_pretrained(tmp_path / "hf")
    for to in ("maxtext", "maxtext:unscan"):
        ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", to)
        assert ran.code == 2 and {f["code"] for f in ran.errors} == {"FS514"}, ran.out
        assert named in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize(
    "yml",
    [
        {"use_qk_norm_in_gdn": False},
        {"use_qk_norm": True},
        {"rope_type": "yarn", "rope_factor": 4},
        {"rope_type": "llama3.1"},
        {"attn_logits_soft_cap": 30.0},
        {"final_logits_soft_cap": 30.0},
        {"rope_min_timescale": 2},
        {"attention_bias": True},
        {"routed_score_func": "sigmoid"},
    ],
    ids=str,
)
def test_a_yml_made_of_another_yml_keeps_what_decides_values(yml: dict[str, Any], tmp_path: Path) -> None:
    source = checkpoint("next", tmp_path / "run", **yml)
    for scan, out in ((None, "apart"), (1, "stacked")):
        converted(source, tmp_path / out, **target(scan))
        stated = written_yml(tmp_path / out)
        assert {key: stated.get(key) for key in yml} == yml
        assert cli("convert", tmp_path / out, tmp_path / "hf", "--to", "hf").code == 2


def test_a_long_cycle_is_not_scanned(tmp_path: Path) -> None:
    types = ["linear_attention"] * 8 + ["full_attention"]
    config, tensors, want = files("next", num_hidden_layers=9, layer_types=types)
    source = tmp_path / "run"
    saved_orbax(arrange(tensors, config, None), source)
    (source / "maxtext_model.yml").write_text(yaml.safe_dump(yml_of(config)))
    ran = cli("convert", source, tmp_path / "out", "--to", "maxtext:scan")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"], ran.out
    assert not (tmp_path / "out").exists()
    converted(source, tmp_path / "back", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
@pytest.mark.parametrize("stated", [True, False], ids=["yml", "no yml"])
def test_attention_that_is_lost_in_all_layers_is_an_error(
    scan: int | None, stated: bool, tmp_path: Path
) -> None:
    config, tensors, _ = files("next")
    tree = arrange(tensors, config, scan)
    lacking = {name: array for name, array in tree.items() if ".attention.attention." not in name}
    source = checkpoint("next", tmp_path / "run", tree=lacking, inhomogeneous_layer_cycle_interval=None)
    if not stated:
        (source / "maxtext_model.yml").unlink()
    ran = cli("verify", source)
    assert ran.code != 0 and ran.having("FS209"), ran.out
    for to in ("hf", "maxtext:scan", "maxtext:unscan"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code in (1, 2, 3) and not ran.having("FS520") and not (tmp_path / "out").exists(), ran.out


def test_a_config_whose_routing_maxtext_does_not_compute_is_refused(tmp_path: Path) -> None:
    config, _, _ = files("next")
    config.norm_topk_prob = False
    config.save_pretrained(tmp_path / "config")
    source = checkpoint("next", tmp_path / "run")
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf", config=tmp_path / "config/config.json")
    assert [(f.code, "norm_topk_prob" in f.message) for f in error.value.findings] == [("FS215", True)]


def test_the_layer_that_predicts_a_further_token_is_refused(tmp_path: Path) -> None:
    delta_maker.save_with_further_layer(tmp_path / "hf", shared_expert_intermediate_size=24)
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"], ran.out
    assert not (tmp_path / "out").exists()


def test_layers_that_the_cycle_does_not_divide_are_not_scanned(tmp_path: Path) -> None:
    config, tensors, want = files("next", tmp_path / "hf", num_hidden_layers=6)
    assert find_cycle(config) == 4
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
    files("next", tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext", "--rope-type", "llama3.1")
    assert ran.code == 2 and "--rope-type" in ran.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_without_a_yml_nothing_is_guessed(scan: int | None, tmp_path: Path) -> None:
    config, tensors, _ = files("next")
    source = checkpoint("next", tmp_path / "run", scan)
    (source / "maxtext_model.yml").unlink()
    assert cli("verify", source).code == 0
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert [f["code"] for f in ran.errors] == ["FS209"] and not (tmp_path / "out").exists(), ran.out
    # In MaxText's own forms the arrays say enough, but for the yml: no array shows the heads of keys.
    other = 1 if scan is None else None
    out, findings = converted(source, tmp_path / "form", **target(other))
    assert_same(without_step(out), arrange(tensors, config, other))
    stated = written_yml(tmp_path / "form")
    assert stated["decoder_block"] == "qwen3_next" and "gdn_key_head_dim" not in stated
    for key in ("gdn_num_key_heads", "partial_rotary_factor", "num_experts_per_tok"):
        assert key not in stated and any(key in finding.message for finding in findings), key
