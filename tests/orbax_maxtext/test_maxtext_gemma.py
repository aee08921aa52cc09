"""Gemma 2 and Gemma 3 in MaxText's form: by its converter, and as its layers compute."""

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
from helpers import cli
from jax_maker import SCANS, Tree, assert_same, converted, read, target, without_step, written_yml
from maxtext_gemma import KINDS, arrange, checkpoint, compute, files, model, yml_of

FORMS = pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
#: One model of each family.
FAMILIES = pytest.mark.parametrize("kind", ["gemma2", "gemma3 cut"])
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def named(findings: list[Any]) -> list[Any]:
    """Findings besides the notes that norms are stored plus 1 and that Gemma 3 depends on a model_name."""
    return [f for f in findings if f.code != "FS214" and "only under model_name" not in f.message]


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
@ALL_KINDS
def test_there_and_back_is_bit_exact(kind: str, scan: int | None, tmp_path: Path) -> None:
    config, tensors, want = files(kind, tmp_path / "hf")
    out, findings = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    assert_same(without_step(out), arrange(tensors, config, scan))
    assert not named(findings)
    notes = {f.message.split(" and ")[0] for f in findings if f.code == "FS214"}
    assert notes == {"norms are stored plus 1", "values changed: + 1"}
    assert any("only under model_name" in f.message for f in findings) is kind.startswith("gemma3")
    settings, expected = written_yml(tmp_path / "out"), yml_of(config)
    assert {key: settings[key] for key in expected} == expected
    assert settings["scan_layers"] is (scan is not None)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0, ran.out
    # A config.json states the number whose root divides the scores; the weights of a Gemma 2 are divided.
    config.save_pretrained(tmp_path / "config")
    back, _ = converted(tmp_path / "out", tmp_path / "back", "hf", config=tmp_path / "config/config.json")
    assert_same(back, tensors)
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)
    converted(tmp_path / "out", tmp_path / "by_yml", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "by_yml"), want)


@FORMS
@ALL_KINDS
def test_maxtexts_layers_compute_the_logits_of_transformers(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    want = files(kind, tmp_path / "hf")[2]
    tree, _ = converted(tmp_path / "hf", tmp_path / "out", **target(scan))
    yml = written_yml(tmp_path / "out")
    assert (compute(tree, yml, moe_maker.TOKENS) - want).abs().max() <= 1e-4
    # What decides values is in the yml: with another one the logits are others.
    others: list[dict[str, Any]] = [{"sliding_window_size": 12}, {"normalize_embedding_logits": False}]
    others += [{"attn_logits_soft_cap": 0.0 if yml["attn_logits_soft_cap"] else 1.5}]
    others += [{"final_logits_soft_cap": 0.0 if yml["final_logits_soft_cap"] else 2.0}]
    # Without a layer that sees all positions, their rotary embedding does not matter.
    others += [{"rope_max_timescale": 50}] if kind != "gemma3 short" else []
    if kind.startswith("gemma3"):
        others += [{"local_rope_max_timescale": 50}]
        others += [{"model_name": "gemma3-4b" if yml["model_name"] == "gemma3-27b" else "gemma3-27b"}]
        others += [{"rope_linear_scaling_factor": 1.0}] if kind != "gemma3 short" else []
    for other in others:
        wrong = compute(tree, yml | other, moe_maker.TOKENS)
        assert (wrong - want).abs().max() > 1e-3, other


@FORMS
@ALL_KINDS
def test_a_checkpoint_of_maxtexts_own_converts_by_the_yml_of_its_model(
    kind: str, scan: int | None, tmp_path: Path
) -> None:
    config, tensors, want = files(kind)
    source = checkpoint(kind, tmp_path / "run", scan)
    converted(source, tmp_path / "out", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "out"), want)
    other = None if scan is not None else 1
    form, _ = converted(source, tmp_path / "other", **target(other))
    assert_same(without_step(form), arrange(tensors, config, other))
    settings, expected = written_yml(tmp_path / "other"), yml_of(config)
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize("exact", [True, False], ids=["f32", "bf16"])
def test_what_a_root_makes_of_values_is_rounded_once_and_noted(exact: bool, tmp_path: Path) -> None:
    """Of a hidden size and a number of scores whose roots are no powers of two."""
    changes = {"hidden_size": 72, "query_pre_attn_scalar": 18}
    network = model("gemma2", **changes).to(torch.float32 if exact else torch.bfloat16)
    network.save_pretrained(tmp_path / "hf")
    config, tensors, _ = files("gemma2", **changes)
    if not exact:
        tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    out, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert_same(without_step(out), arrange(tensors, config, 1))
    lines = [f.message for f in findings if f.code == "FS214" and "scaled by" in f.message]
    assert [line.split(" and ")[0] for line in lines] == [
        "queries are scaled by sqrt(18)",
        "embeddings are scaled by sqrt(72)",
    ]
    converted(tmp_path / "out", tmp_path / "back", "hf")
    step = 2.0**-7 if not exact else 1e-6
    before, after = (moe_maker.load_logits(tmp_path / folder) for folder in ("hf", "back"))
    assert (after - before).abs().max() <= 30 * step


@FAMILIES
def test_the_optimizers_moments_go_along_in_maxtext_alone(kind: str, tmp_path: Path) -> None:
    config, tensors, _ = files(kind)

    def state(scan: int | None) -> Tree:
        arrays = arrange(tensors, config, scan)
        tree = dict(arrays)
        for factor, slot in ((2, "mu"), (3, "nu")):
            below = f"opt_state.{slot}.params."
            tree |= {name.replace("params.params.", below): a * factor for name, a in arrays.items()}
        return tree | {"opt_state.count": np.array(7, np.int32), "step": np.array(7, np.int32)}

    source = checkpoint(kind, tmp_path / "run", tree=state(1))
    out, _ = converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert_same(out, state(None))
    back, _ = converted(tmp_path / "out", tmp_path / "back", "maxtext:scan", optimizer=True)
    assert_same(back, state(1))


@ALL_KINDS
def test_merging_keeps_every_name(kind: str, tmp_path: Path) -> None:
    config, tensors, _ = files(kind)
    ran = cli("merge", checkpoint(kind, tmp_path / "run"), tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), arrange(tensors, config, 1))


@pytest.mark.parametrize("separator", [".", "_"])
@FAMILIES
def test_a_state_of_nnx_has_the_same_layers(kind: str, separator: str, tmp_path: Path) -> None:
    config, tensors, want = files(kind)
    tree = arrange(tensors, config, None)
    names = {name: name.removeprefix("params.params.") for name in tree}
    arrays = {
        f"model.{own.replace('.layers_', f'.layers{separator}')}.value": tree[name]
        for name, own in names.items()
    }
    source = checkpoint(kind, tmp_path / "run", tree=arrays)
    converted(source, tmp_path / "out", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "out"), want)


@FORMS
@pytest.mark.parametrize("has_yml", [True, False], ids=["yml", "no yml"])
def test_each_array_that_is_lost_is_named(scan: int | None, has_yml: bool, tmp_path: Path) -> None:
    config, tensors, _ = files("gemma2")
    tree = arrange(tensors, config, scan)
    # One number, or one stack, is two layers: one with a window and one without.
    one = "decoder.layers." if scan is not None else "layers_1."
    lost = sorted(name for name in tree if one in name)
    assert len(lost) == 22
    for i, name in enumerate(lost):
        lacking = {n: a for n, a in tree.items() if n != name}
        source = checkpoint("gemma2", tmp_path / str(i), tree=lacking)
        if not has_yml:
            (source / "maxtext_model.yml").unlink()
        for command in (("verify", source), ("plan", source, "--to", "maxtext:unscan")):
            errors = cli(*command).errors
            assert [(f["code"], f["tensor"]) for f in errors] == [("FS102", name)], errors


@pytest.mark.parametrize("has_yml", [True, False], ids=["yml", "no yml"])
@pytest.mark.parametrize(
    ("scan", "one"),
    [
        (1, "decoder.layers.layers_5."),
        (1, "decoder.layers_remainder.layers_0."),
        (None, "decoder.layers_5."),
        (None, "decoder.layers_6."),
    ],
)
def test_each_array_of_a_cycle_that_is_lost_is_named(
    scan: int | None, one: str, has_yml: bool, tmp_path: Path
) -> None:
    config, tensors, _ = files("gemma3 cut")
    tree = arrange(tensors, config, scan)
    lost = sorted(name for name in tree if one in name)
    assert len(lost) == 13
    for i, name in enumerate(lost):
        lacking = {n: a for n, a in tree.items() if n != name}
        source = checkpoint("gemma3 cut", tmp_path / str(i), tree=lacking)
        if not has_yml:
            (source / "maxtext_model.yml").unlink()
        for command in (("verify", source), ("plan", source, "--to", "maxtext:unscan")):
            errors = cli(*command).errors
            assert [(f["code"], f["tensor"]) for f in errors] == [("FS102", name)], errors


def test_a_stack_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    config, tensors, _ = files("gemma2")
    tree = arrange(tensors, config, 1)
    name = "params.params.decoder.layers.mlp_global.wi_1.kernel"
    tree[name] = tree[name][:, :-1]
    source = checkpoint("gemma2", tmp_path / "run", tree=tree)
    for has_yml in (True, False):
        if not has_yml:
            (source / "maxtext_model.yml").unlink()
        errors = cli("verify", source).errors
        assert [f["tensor"] for f in errors] == [name], errors


@pytest.mark.parametrize(
    ("yml", "text"),
    [
        ({"decoder_block": "llama2"}, "decoder_block"),
        ({"scan_layers": False}, "scan_layers"),
        ({"base_num_decoder_layers": 4}, "FS"),
        ({"head_dim": 16}, "FS2"),
        ({"base_num_kv_heads": 1}, "FS2"),
        ({"base_emb_dim": 16}, "FS2"),
    ],
    ids=str,
)
@FAMILIES
def test_a_yml_that_contradicts_the_arrays(kind: str, yml: dict[str, Any], text: str, tmp_path: Path) -> None:
    source = checkpoint(kind, tmp_path / "run", **yml)
    for to in ("hf", "maxtext:unscan"):
        ran = cli("convert", source, tmp_path / "out", "--to", to)
        assert ran.code != 0 and text in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("gemma2", key) for key in ("attn_logits_soft_cap", "final_logits_soft_cap")),
        *(("gemma2", key) for key in ("sliding_window_size", "normalization_layer_epsilon")),
        *(("gemma3", key) for key in ("sliding_window_size", "normalization_layer_epsilon", "model_name")),
        *(("gemma3", key) for key in ("rope_max_timescale", "local_rope_max_timescale")),
        ("gemma3", "rope_linear_scaling_factor"),
    ],
)
def test_what_decides_values_is_not_guessed(kind: str, key: str, tmp_path: Path) -> None:
    source = checkpoint(kind, tmp_path / "run", **{key: None})
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert [(f.code, key in f.message) for f in error.value.findings] == [("FS209", True)]
    # In MaxText's own forms it is left as open as it is, and named.
    _, findings = converted(source, tmp_path / "form", "maxtext:unscan")
    assert sum(key in f.message for f in findings) == 1


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_a_yml_without_sizes_says_enough(kind: str, tmp_path: Path) -> None:
    want = files(kind)[2]
    sizes = dict.fromkeys(("head_dim", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads"))
    converted(checkpoint(kind, tmp_path / "run", **sizes), tmp_path / "out", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "out"), want)


@pytest.mark.parametrize("key", ["base_emb_dim", "base_num_query_heads", "base_num_kv_heads"])
def test_a_division_by_the_width_needs_its_sizes(key: str, tmp_path: Path) -> None:
    """The scores are divided as under the name gemma3-27b."""
    source = checkpoint("gemma3 cut", tmp_path / "run", **{key: None})
    with pytest.raises(FastshardError) as error:
        convert(source, tmp_path / "out", to="hf")
    assert [(f.code, key in f.message) for f in error.value.findings] == [("FS209", True)]


_OF_BOTH: list[dict[str, Any]] = [
    {"use_post_attn_norm": None},
    {"use_post_ffw_norm": False},
    {"mlp_activations": ["silu", "linear"]},
    {"normalize_embedding_logits": False},
    {"normalization_layer_epsilon": 1e-5},
    {"rope_type": "llama3.1"},
    {"moba": True},
]


@pytest.mark.parametrize(
    ("kind", "yml"),
    [
        *((kind, yml) for kind in ("gemma2", "gemma3") for yml in _OF_BOTH),
        ("gemma2", {"rope_linear_scaling_factor": 8.0}),
        ("gemma2", {"local_rope_max_timescale": 500}),
        ("gemma3", {"model_name": "gemma3-1b"}),
        ("gemma3", {"attn_logits_soft_cap": 30.0}),
    ],
    ids=str,
)
def test_what_transformers_lacks_is_refused(kind: str, yml: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        convert(checkpoint(kind, tmp_path / "run", **yml), tmp_path / "out", to="hf")
    found = [(f.code, next(iter(yml)) in f.message) for f in error.value.findings]
    assert found == [("FS514", True)], error.value.findings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_bias": True}, "set of biases"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"] * 4}, "set of layers with a sliding window"),
        ({"layer_types": ["sliding_attention"] * 4}, "set of layers with a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "set of layers with a sliding window"),
        ({"tie_word_embeddings": False}, "final_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "base of rotary"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_maxtext_does_not_compute_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    model("gemma2", **changes).save_pretrained(tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and text in finding.message, finding
    assert finding.message.startswith("MaxText has no Gemma 2")


_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
_DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}


def of_kinds(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_bias": True}, "set of biases"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"] * 12}, "set of layers with a sliding window"),
        ({"layer_types": ["sliding_attention"] * 12}, "set of layers with a sliding window"),
        ({"final_logit_softcapping": 2.0, "tie_word_embeddings": False}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 36}, "query_pre_attn_scalar"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (of_kinds(_DEFAULT, _LINEAR), "rotary embedding of sliding_attention"),
        (of_kinds(_DEFAULT, _DEFAULT | {"rope_theta": 1000.5}), "sliding_attention (base)"),
        (of_kinds(_LINEAR | {"rope_type": "dynamic"}, _DEFAULT), "rope_scaling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_maxtexts_gemma_3_does_not_compute_is_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model("gemma3", **changes).save_pretrained(tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to="maxtext")
    (finding,) = error.value.findings
    assert finding.code == "FS514" and text in finding.message, finding
    assert finding.message.startswith("MaxText has no Gemma 3")


@FAMILIES
def test_a_config_json_of_transformers_4_says_the_same(kind: str, tmp_path: Path) -> None:
    want = files(kind, tmp_path / "hf")[2]
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    if kind == "gemma2":
        config["rope_theta"] = ropes["rope_theta"]
    else:
        config |= {
            "sliding_window_pattern": 6,
            "rope_theta": ropes["full_attention"]["rope_theta"],
            "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": ropes["full_attention"]["factor"]},
        }
    path.write_text(json.dumps(config))
    assert torch.equal(moe_maker.load_logits(tmp_path / "hf"), want)
    tree, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert (compute(tree, written_yml(tmp_path / "out"), moe_maker.TOKENS) - want).abs().max() <= 1e-4


@FAMILIES
def test_an_untied_output_layer_without_a_cap(kind: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": False, "final_logit_softcapping": None}
    want = files(kind, tmp_path / "hf", **changes)[2]
    tree, _ = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    yml = written_yml(tmp_path / "out")
    assert (compute(tree, yml, moe_maker.TOKENS) - want).abs().max() <= 1e-4
    converted(tmp_path / "out", tmp_path / "back", "hf")
    assert torch.equal(moe_maker.load_logits(tmp_path / "back"), want)


def test_an_odd_number_of_layers_is_refused(tmp_path: Path) -> None:
    files("gemma2", tmp_path / "hf", num_hidden_layers=3)
    for to in ("maxtext", "maxtext:unscan"):
        ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", to)
        assert [f["code"] for f in ran.errors] == ["FS514"], ran.out
        assert "multiple of 2" in ran.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["megatron", "gpt_neox", "dcp:torchtitan", "dcp:olmo_core"])
@FAMILIES
def test_other_frameworks_refuse_it_and_name_what_they_lack(kind: str, to: str, tmp_path: Path) -> None:
    source = checkpoint(kind, tmp_path / "run")
    ran = cli("convert", source, tmp_path / "out", "--to", to)
    assert {f["code"] for f in ran.errors} == {"FS514"}, ran.out
    assert kind[:6] in ran.out and not (tmp_path / "out").exists()
    assert to.startswith("dcp") or "scale of embeddings" in ran.out, ran.out


def test_no_order_of_pairs_can_be_chosen(tmp_path: Path) -> None:
    files("gemma2", tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "maxtext", "--rope-type", "llama3.1")
    assert ran.code == 2 and "--rope-type" in ran.out and not (tmp_path / "out").exists()


@FAMILIES
def test_without_a_yml_nothing_is_guessed(kind: str, tmp_path: Path) -> None:
    config, tensors, _ = files(kind)
    source = checkpoint(kind, tmp_path / "run")
    (source / "maxtext_model.yml").unlink()
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert {f["code"] for f in ran.errors} == {"FS209"} and "sliding_window_size" in ran.out, ran.out
    # In MaxText's own forms the arrays say enough.
    out, _ = converted(source, tmp_path / "form", "maxtext:unscan")
    assert_same(without_step(out), arrange(tensors, config, None))
    assert json.loads(json.dumps(written_yml(tmp_path / "form")))["decoder_block"] == kind[:6]
