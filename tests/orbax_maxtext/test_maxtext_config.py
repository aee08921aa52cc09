"""MaxText's yml and Hugging Face's config.json: sizes, contradictions, and what a checkpoint does not
hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fastshard import FastshardError, plan
from fastshard import open as fastshard_open
from fastshard.checkpoint.checkpoint import Checkpoint
from fastshard.models import maxtext, maxtext_sizes
from jax_maker import (
    STEP,
    Size,
    assert_same,
    converted,
    hf_llama,
    llama_config,
    llama_yml,
    maxtext_gpt3_state,
    maxtext_llama,
    paxml_state,
    saved,
    saved_orbax,
    saved_paxml,
)
from transformers import AutoModelForCausalLM

SIZE = Size()


def llama(folder: Path, config: Any = None, tied: bool = False, scan: int | None = 1) -> Checkpoint:
    tree = maxtext_llama(hf_llama(SIZE, tied=tied), SIZE, scan)
    return fastshard_open(saved_orbax(tree, folder / "maxtext"), config=config)


def config_of(source: Checkpoint, out: Path, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    _, findings = converted(source, out, "hf", **options)
    return json.loads((out / "config.json").read_text()), findings


def test_what_is_stated_nowhere_is_named(tmp_path: Path) -> None:
    config, findings = config_of(llama(tmp_path, {"rope_type": "default"}), tmp_path / "hf")
    # Values for which MaxText's default is written, and those that are left to transformers.
    warned = [f for f in findings if f.severity == "warning"]
    assert [f.code for f in warned] == ["FS216"] * 3
    keys = ("max_position_embeddings", "rope_max_timescale", "normalization_layer_epsilon")
    assert all(sum(key in f.message for f in warned) == 1 for key in keys)
    assert "max_position_embeddings" not in config
    want = llama_config(SIZE)
    assert all(config[key] == want[key] for key in config if key in want)
    assert config["architectures"] == ["LlamaForCausalLM"]
    noted = " ".join(f.message for f in findings if f.severity == "note")
    assert "decoder_block" in noted


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_without_any_config_nothing_is_guessed_but_the_order_of_pairs(dtype: str, tmp_path: Path) -> None:
    config, findings = config_of(llama(tmp_path), tmp_path / "hf", dtype=dtype)
    lacking = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
    assert not set(lacking) & set(config)
    want = llama_config(SIZE)
    assert {key: config[key] for key in want if key not in lacking} == {
        key: want[key] for key in want if key not in lacking
    }
    warned = [f for f in findings if f.severity == "warning"]
    assert [(f.code, f.file) for f in warned] == [("FS216", "config.json")] * 4
    for f, key in zip(warned, ("rope_type", *lacking), strict=True):
        assert f.message.startswith(f"not stated: {key}"), key
    # transformers' own defaults, which the warnings name, are what such a model is computed with.
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.hidden_size == SIZE.hidden


def test_the_yml_gives_what_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    config, findings = config_of(llama(tmp_path, llama_yml(SIZE)), tmp_path / "hf")
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 500_000)
    warned = [f.message for f in findings if f.severity == "warning"]
    assert len(warned) == 1
    assert "max_position_embeddings" in warned[0]
    assert "rms_norm_eps" not in warned[0]


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({"decoder_block": "mistral"}, "architectures", ["MistralForCausalLM"]),
        ({"decoder_block": "mistral"}, "sliding_window", None),
        ({"decoder_block": "mistral", "sliding_window_size": 16}, "sliding_window", None),
        ({"rope_type": "llama3.1"}, "rope_scaling", {"rope_type": "llama3", **maxtext.LLAMA3_SCALING}),
        (
            {"model_name": "llama3.1-8b"},
            "rope_scaling",
            {"rope_type": "llama3", **maxtext.LLAMA3_SCALING},
        ),
        ({"rope_max_timescale": None}, "rope_theta", 10_000),
    ],
)
def test_fields_of_config_json(more: dict[str, Any], field: str, value: Any, tmp_path: Path) -> None:
    config, _ = config_of(llama(tmp_path, llama_yml(SIZE, **more)), tmp_path / "hf")
    assert config[field] == value


def test_scaling_that_is_off_is_no_scaling(tmp_path: Path) -> None:
    yml = llama_yml(SIZE, rope_type="llama3.1", rope_use_scale=False)
    config, _ = config_of(llama(tmp_path, yml), tmp_path / "hf")
    assert "rope_scaling" not in config


def test_transformers_loads_the_result(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", **maxtext.LLAMA3_SCALING}
    given = llama_config(SIZE, rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=9000)
    hf = hf_llama(SIZE)
    tree = maxtext_llama(hf, SIZE, 1, rope="llama3.1")
    source = fastshard_open(saved_orbax(tree, tmp_path / "maxtext"), config=given)
    config, findings = config_of(source, tmp_path / "hf")
    assert config == {**given, "torch_dtype": "float32"}
    assert not [f for f in findings if f.severity == "warning"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    weight = model.state_dict()["model.layers.2.self_attn.q_proj.weight"]
    want = hf["model.layers.2.self_attn.q_proj.weight"]
    assert torch.equal(weight, torch.from_numpy(want))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_emb_dim", 24),
        ("base_mlp_dim", 64),
        ("base_num_decoder_layers", 4),
        ("head_dim", 8),
        ("vocab_size", 60),
        ("base_num_kv_heads", 4),
        ("global_parameter_scale", 2),
    ],
)
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_sizes_that_the_tensors_contradict(key: str, value: int, scan: int | None, tmp_path: Path) -> None:
    source = llama(tmp_path, llama_yml(SIZE, **{key: value}), scan=scan)
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "hf", "hf")
    # Of a model with more layers, the last ones are missing.
    missing = key == "base_num_decoder_layers" and scan is None
    assert error.value.exit_code == (3 if missing else 1)
    assert not (tmp_path / "hf").exists()


def test_a_config_of_another_head_dim_is_one_finding(tmp_path: Path) -> None:
    source = llama(tmp_path, llama_yml(SIZE, head_dim=8))
    errors = [f for f in plan(source, to="hf").findings if f.severity == "error"]
    assert [f.code for f in errors] == ["FS215"]
    assert "the size of a head" in errors[0].message
    assert (errors[0].expected or "").startswith("8 ")
    assert (errors[0].got or "").startswith("16 ")


@pytest.mark.parametrize(
    ("scale", "times"),
    [(1, (1, 1, 1, 1)), (2, (1, 2, 2, 1)), (4, (2, 2, 2, 1)), (8, (2, 2, 2, 2)), (16, (2, 4, 4, 2))],
)
def test_global_parameter_scale(scale: int, times: tuple[int, ...]) -> None:
    """As MaxText rotates: heads and MLP, then the width, then the layers."""
    sizes = maxtext_sizes.sizes(llama_yml(SIZE, global_parameter_scale=scale))
    width, heads, ffn, layers = times
    assert sizes["emb_dim"] == SIZE.hidden * width
    assert sizes["num_query_heads"] == SIZE.heads * heads
    assert sizes["num_kv_heads"] == SIZE.groups * heads
    assert sizes["mlp_dim"] == SIZE.ffn * ffn
    assert sizes["num_decoder_layers"] == SIZE.layers * layers
    assert sizes["head_dim"] == SIZE.head_dim


def test_a_run_states_its_products(tmp_path: Path) -> None:
    assert maxtext_sizes.axes_of({"scan_layers": True, "emb_dim": 40, "vocab_size": 9}, "llama") == {
        "H": 40,
        "V": 9,
        "P": 9,
    }


BAD: list[Any] = ["x", -1, 0, 1.5, True, [1], {"a": 1}, 10**30, float("nan"), float("inf")]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "head_dim",
        "vocab_size",
        "global_parameter_scale",
    ],
)
def test_sizes_that_are_none(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        maxtext_sizes.axes_of(llama_yml(SIZE, **{key: value}), "llama")
    assert error.value.code == "FS211"
    assert key in str(error.value)


@pytest.mark.parametrize("value", ["x", -1, 0, True, [1], {"a": 1}, float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("key", ["rope_max_timescale", "normalization_layer_epsilon"])
def test_numbers_of_config_json_that_are_none(key: str, value: Any, tmp_path: Path) -> None:
    source = llama(tmp_path, llama_yml(SIZE, **{key: value}))
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "hf", "hf")
    assert error.value.code == "FS211"
    assert key in str(error.value)


@pytest.mark.parametrize("key", ["scan_layers", "logits_via_embedding", "param_scan_axis"])
@pytest.mark.parametrize("value", ["x", 1.5, [1], {}], ids=repr)
def test_choices_that_are_none(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        llama(tmp_path, llama_yml(SIZE, **{key: value}))
    assert error.value.code == "FS211"
    assert key in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {"mlp_activations": ["gelu", "linear"]},
        {"rope_min_timescale": 2},
        {"decoder_block": "default"},
        {"decoder_block": ["llama2"]},
        {"use_qk_norm": True},
        {"num_experts": 8},
        {"final_logits_soft_cap": 30.0},
        {"moba": True},
        {"use_untrainable_positional_embedding": True},
        {"rope_linear_scaling_factor": 8},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_transformers_llama_does_not_compute(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        plan(llama(tmp_path, llama_yml(SIZE, **more)), to="hf")
    assert error.value.code == "FS514"
    assert next(iter(more)) in str(error.value)


def test_another_kind_of_rotary_embedding(tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        llama(tmp_path, llama_yml(SIZE, rope_type="yarn"))
    assert error.value.code == "FS514"
    assert "rope_type" in str(error.value)


@pytest.mark.parametrize("positions", [None, 32])
@pytest.mark.parametrize("to", ["maxtext", "maxtext:unscan"])
def test_a_window_that_maxtext_does_not_have(to: str, positions: int | None, tmp_path: Path) -> None:
    saved(hf_llama(SIZE), tmp_path / "hf")
    more = {} if positions is None else {"max_position_embeddings": positions}
    given = llama_config(SIZE, model_type="mistral", sliding_window=16) | more
    (tmp_path / "hf/config.json").write_text(json.dumps(given))
    with pytest.raises(FastshardError) as error:
        converted(tmp_path / "hf", tmp_path / "out", to)
    assert (error.value.code, error.value.got) == ("FS514", "16")
    assert "sliding_window" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("window", "noted"), [(None, False), (64, True), (128, True)])
def test_a_window_that_hides_nothing_is_taken(window: int | None, noted: bool, tmp_path: Path) -> None:
    saved(hf_llama(SIZE), tmp_path / "hf")
    given = llama_config(SIZE, model_type="mistral", sliding_window=window, max_position_embeddings=64)
    (tmp_path / "hf/config.json").write_text(json.dumps(given))
    _, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert any("sliding_window" in f.message for f in findings) == noted
    assert yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())["decoder_block"] == "mistral"


def test_a_tied_head(tmp_path: Path) -> None:
    yml = llama_yml(SIZE, logits_via_embedding=True)
    with pytest.raises(FastshardError) as error:
        plan(llama(tmp_path, yml, tied=True), to="hf")
    assert (error.value.code, "normalize_embedding_logits" in str(error.value)) == ("FS514", True)
    source = llama(tmp_path / "as is", yml | {"normalize_embedding_logits": False}, tied=True)
    config, _ = config_of(source, tmp_path / "hf")
    assert config["tie_word_embeddings"] is True


def test_a_head_that_the_config_calls_for_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as error:
        converted(llama(tmp_path, llama_yml(SIZE), tied=True), tmp_path / "hf", "hf")
    assert (error.value.code, error.value.tensor) == ("FS102", "params.params.decoder.logits_dense.kernel")


def test_a_head_that_the_config_does_not_have(tmp_path: Path) -> None:
    source = llama(tmp_path, llama_yml(SIZE, logits_via_embedding=True))
    assert [f.code for f in source.findings if f.severity == "error"] == ["FS215"]


def test_a_tied_model_of_transformers(tmp_path: Path) -> None:
    hf = hf_llama(SIZE, tied=True)
    saved(hf, tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(llama_config(SIZE, tied=True)))
    have, findings = converted(tmp_path / "hf", tmp_path / "out", "maxtext")
    assert_same(have, maxtext_llama(hf, SIZE, 1) | STEP)
    assert any(f.severity == "warning" and "normalize_embedding_logits" in f.message for f in findings)
    yml = yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())
    assert (yml["logits_via_embedding"], yml["normalize_embedding_logits"]) == (True, False)
    back = fastshard_open(tmp_path / "out", config=yml)
    assert config_of(back, tmp_path / "back")[0]["tie_word_embeddings"] is True


def test_the_yml_that_is_written_reads_back(tmp_path: Path) -> None:
    saved(hf_llama(SIZE), tmp_path / "hf")
    scaling = {"rope_type": "llama3", **maxtext.LLAMA3_SCALING}
    given = llama_config(SIZE, rope_theta=500000.0, rms_norm_eps=1e-6, rope_scaling=scaling)
    (tmp_path / "hf/config.json").write_text(json.dumps(given))
    converted(tmp_path / "hf", tmp_path / "out", "maxtext:unscan")
    yml = yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())
    assert yml["scan_layers"] is False
    config, _ = config_of(fastshard_open(tmp_path / "out", config=yml), tmp_path / "back")
    del given["max_position_embeddings"]
    assert {key: config.get(key) for key in given} == given


def test_gpt3_says_what_it_is(tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    made = plan(source, to="maxtext", fused_qkv=False)
    assert made.summary["texts"]
    converted(source, tmp_path / "out", "maxtext", fused_qkv=False)
    yml = yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())
    want = {
        "base_emb_dim": SIZE.hidden,
        "base_num_query_heads": SIZE.heads,
        "base_mlp_dim": SIZE.ffn,
        "base_num_decoder_layers": SIZE.layers,
        "head_dim": SIZE.head_dim,
        "vocab_size": SIZE.vocab,
        "trainable_position_size": SIZE.positions,
        "fused_qkv": False,
        "decoder_block": "gpt3",
        "scan_layers": True,
    }
    assert {key: yml[key] for key in want} == want
    # With it, everything fits; with another size or form, it does not.
    tree = maxtext_gpt3_state(SIZE, 1, fused=False)
    folder = saved_orbax(tree, tmp_path / "again")
    again = fastshard_open(folder, config=yml)
    assert not [f for f in again.findings if f.severity == "error"]
    fused = fastshard_open(folder, config=yml | {"fused_qkv": True})
    assert [f.code for f in fused.findings if f.severity == "error"] == ["FS215"]
    longer = fastshard_open(folder, config=yml | {"trainable_position_size": 13})
    assert [f.code for f in longer.findings if f.severity == "error"]


def test_moments_of_another_shape_are_found(tmp_path: Path) -> None:
    tree = maxtext_gpt3_state(SIZE, 1)
    name = "opt_state.nu.params.decoder.layers.mlp.wi.kernel"
    tree[name] = np.ascontiguousarray(tree[name][:, :2])
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "out", "maxtext:unscan", optimizer=True)
    assert name in {f.tensor for f in error.value.findings}
