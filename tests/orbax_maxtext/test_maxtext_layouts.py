"""Llama and GPT-3 between Hugging Face, MaxText and Paxml, against numpy written without the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from fastshard import FastshardError, _core, convert, plan
from fastshard import open as fastshard_open
from fastshard.layouts import jax_train_states, tables
from fastshard.layouts.maxtext_names import default_names
from fastshard.targets.maxtext import MaxTextTarget
from fastshard.targets.request import Request
from helpers import read_result
from jax_maker import (
    LLAMA31,
    SCANS,
    STEP,
    Size,
    Tree,
    as_numpy,
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
    scaled,
    sha,
    target,
)

BF16 = ml_dtypes.bfloat16
SIZE = Size()
LONG = Size(head_dim=128)


def hf_folder(tree: Tree, size: Size, folder: Path, **config: Any) -> Path:
    saved(tree, folder)
    (folder / "config.json").write_text(json.dumps(llama_config(size, **config)))
    return folder


def codes(findings: list[Any], severity: str = "error") -> list[str]:
    return [f.code for f in findings if f.severity == severity]


@pytest.mark.parametrize("rope", ["default", "llama3.1"])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_llama_to_maxtext_and_back(scan: int | None, dtype: Any, rope: str, tmp_path: Path) -> None:
    hf = hf_llama(SIZE, dtype)
    folder = hf_folder(hf, SIZE, tmp_path / "hf")
    have, _ = converted(folder, tmp_path / "out", **target(scan), rope_type=rope)
    assert_same(have, maxtext_llama(hf, SIZE, scan, rope=rope) | STEP)
    yml = yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())
    assert (yml["rope_type"], yml.get("rope_use_scale")) == (rope, {"default": None, "llama3.1": False}[rope])
    source = fastshard_open(tmp_path / "out", config=yml)
    assert source.family == "llama"
    metadata = source.metadata()
    assert metadata.pop("completeness")["verdict"] == "COMPLETE"
    assert metadata == {
        "custom_metadata": {"scan_layers": scan is not None},
        "scan_layers": scan is not None,
        **({} if scan is None else {"param_scan_axis": scan}),
    }
    # Queries of 16 are scaled by a power of two.
    back, findings = converted(source, tmp_path / "back", "hf")
    assert_same(back, hf)
    assert "FS214" not in codes(findings, "note")


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("more", [{}, {"model_type": "mistral"}], ids=["llama", "mistral"])
@pytest.mark.parametrize(
    ("scaling", "asked", "rope"),
    [
        (None, None, "llama3.1"),
        (None, "default", "default"),
        (None, "llama3.1", "llama3.1"),
        (SCALING, None, "llama3.1"),
        (SCALING, "llama3.1", "llama3.1"),
        ({**SCALING, "rope_type": "default"}, None, "llama3.1"),
        ({**SCALING, "rope_type": "default"}, "default", "default"),
    ],
)
def test_the_order_of_pairs_is_the_converters_unless_another_is_asked_for(
    scaling: Any, asked: str | None, rope: str, more: dict[str, Any], tmp_path: Path
) -> None:
    hf = hf_llama(SIZE)
    folder = hf_folder(hf, SIZE, tmp_path / "hf", rope_scaling=scaling, **more)
    have, findings = converted(folder, tmp_path / "out", "maxtext", rope_type=asked)
    assert_same(have, maxtext_llama(hf, SIZE, 1, rope=rope) | STEP)
    said = [f for f in findings if f.code == "FS109" and "queries and keys are in the order" in f.message]
    assert [f.severity for f in said] == (["note"] if rope == "llama3.1" else [])
    yml = yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())
    scaled_frequencies = {"default": None, "llama3.1": scaling is SCALING}[rope]
    assert (yml["rope_type"], yml.get("rope_use_scale")) == (rope, scaled_frequencies)


def test_scaled_frequencies_have_one_order(tmp_path: Path) -> None:
    folder = hf_folder(hf_llama(SIZE), SIZE, tmp_path / "hf", rope_scaling=SCALING)
    with pytest.raises(FastshardError) as error:
        converted(folder, tmp_path / "out", "maxtext", rope_type="default")
    assert error.value.code == "FS514"


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_type": "default"}, "default"),
        ({"rope_type": "llama3.1"}, "llama3.1"),
        ({"rope_type": "Llama3.1", "rope_use_scale": False}, "llama3.1"),
        ({"model_name": "llama3.1-8b"}, "llama3.1"),
        ({"model_name": "llama3.1-8b", "rope_type": "default"}, "llama3.1"),
        ({"model_name": "llama2-7b"}, "default"),
        ({"model_name": "llama3-8b"}, "default"),
        ({"model_name": "mistral-7b"}, "default"),
        (llama_config(SIZE, rope_scaling=SCALING), "llama3.1"),
    ],
)
def test_the_order_that_a_config_states_is_taken(config: Any, rope: str, tmp_path: Path) -> None:
    hf = hf_llama(SIZE)
    folder = saved_orbax(maxtext_llama(hf, SIZE, 1, rope=rope), tmp_path / "maxtext")
    source = fastshard_open(folder, config=config)
    have, findings = converted(source, tmp_path / "hf", "hf")
    assert_same(have, hf)
    assert not [f for f in findings if "rope_type" in f.message]
    if rope == "default":
        have, _ = converted(source, tmp_path / "other", "maxtext", rope_type="llama3.1")
        assert_same(have, maxtext_llama(hf, SIZE, 1) | STEP)


@pytest.mark.parametrize("config", [{"base_emb_dim": SIZE.hidden}, {"model_name": "llama3.3-70b"}])
def test_an_order_that_a_yml_leaves_open_is_not_guessed(config: Any, tmp_path: Path) -> None:
    hf = hf_llama(SIZE)
    folder = saved_orbax(maxtext_llama(hf, SIZE, 1, rope="default"), tmp_path / "maxtext")
    source = fastshard_open(folder, config=config)
    for to, more in (("hf", {}), ("megatron:legacy", {}), ("maxtext", {"rope_type": "default"})):
        with pytest.raises(FastshardError) as error:
            plan(source, to=to, **more)
        assert error.value.code == "FS209"
        assert "rope_type" in str(error.value)
    # From one form of MaxText's to the other it does not matter, and is not stated afterwards either.
    have, _ = converted(source, tmp_path / "apart", "maxtext:unscan")
    assert_same(have, maxtext_llama(hf, SIZE, None, rope="default") | STEP)
    assert "rope_type" not in (tmp_path / "apart/maxtext_model.yml").read_text()


@pytest.mark.parametrize("config", [None, llama_config(SIZE)], ids=["none", "config.json"])
def test_an_order_that_nothing_states_is_the_converters_with_a_warning(config: Any, tmp_path: Path) -> None:
    hf = hf_llama(SIZE)
    folder = saved_orbax(maxtext_llama(hf, SIZE, 1), tmp_path / "maxtext")
    source = fastshard_open(folder, config=config)
    have, findings = converted(source, tmp_path / "hf", "hf")
    assert_same(have, hf)
    warned = [(f.code, f.severity, f.file) for f in findings if "rope_type" in f.message]
    assert warned == [("FS216", "warning", "config.json")]
    # Asked for an order, it must be known which one there is.
    with pytest.raises(FastshardError) as error:
        plan(source, to="maxtext", rope_type="default")
    assert error.value.code == "FS209"
    assert "rope_type" in str(error.value)
    have, _ = converted(source, tmp_path / "apart", "maxtext:unscan")
    assert_same(have, maxtext_llama(hf, SIZE, None) | STEP)
    assert "rope_type" not in (tmp_path / "apart/maxtext_model.yml").read_text()


#: A vocabulary as it is, where a target would pad it.
UNPADDED: dict[str, Any] = {
    key: {"make_vocab_size_divisible_by": 1} for key in ("megatron:legacy", "gpt_neox", "tp-safetensors")
}


@pytest.mark.parametrize("to", ["megatron:legacy", "gpt_neox", "dcp", "tp-safetensors"])
def test_other_targets_warn_of_an_order_that_nothing_states_too(to: str, tmp_path: Path) -> None:
    size = Size(hidden=64)
    folder = saved_orbax(maxtext_llama(hf_llama(size), size, 1), tmp_path / "maxtext")
    findings = plan(fastshard_open(folder), to=to, **UNPADDED.get(to, {})).findings
    assert [f.code for f in findings if "rope_type" in f.message and f.severity == "warning"] == ["FS216"]


def test_queries_are_rounded_once_and_the_way_back_says_that_it_is_not_exact(tmp_path: Path) -> None:
    hf = hf_llama(LONG, BF16)
    folder = hf_folder(hf, LONG, tmp_path / "hf")
    have, findings = converted(folder, tmp_path / "out", "maxtext")
    assert_same(have, maxtext_llama(hf, LONG, 1) | STEP)
    assert any(f.code == "FS214" and "converting back" in f.message for f in findings)
    source = fastshard_open(tmp_path / "out", config=LLAMA31)
    back, findings = converted(source, tmp_path / "back", "hf")
    assert any(f.code == "FS214" and (f.tensor or "").endswith("q_proj.weight") for f in findings)
    changed = {name for name in hf if sha(back[name]) != sha(hf[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(LONG.layers)}
    for name in changed:
        once = scaled(scaled(hf[name], 1 / np.sqrt(128)), np.sqrt(128))
        assert sha(back[name]) == sha(once)


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_cast_and_scale_are_one_rounding(scan: int | None, tmp_path: Path) -> None:
    hf = hf_llama(LONG)
    folder = hf_folder(hf, LONG, tmp_path / "hf")
    have, _ = converted(folder, tmp_path / "out", **target(scan), dtype="bf16")
    assert_same(have, maxtext_llama(hf, LONG, scan, BF16) | STEP)
    twice = {name: a.astype(BF16) for name, a in hf.items()}
    name = next(name for name in have if name.endswith("query.kernel"))
    assert sha(have[name]) != sha(maxtext_llama(twice, LONG, scan)[name])


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_layers_are_stacked_and_taken_apart_without_a_value_op(scan: int | None, tmp_path: Path) -> None:
    step = np.array(7, np.int64)
    first = maxtext_llama(hf_llama(LONG, BF16), LONG, 1) | {"step": step}
    source = fastshard_open(saved_orbax(first, tmp_path / "first"))
    have, findings = converted(source, tmp_path / "out", **target(scan))
    assert_same(have, maxtext_llama(hf_llama(LONG, BF16), LONG, scan) | {"step": step})
    assert "FS214" not in codes(findings, "note")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_paxml_to_maxtext_with_optimizer(scan: int | None, fused: bool, tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    options = target(scan) | {"fused_qkv": fused, "optimizer": True}
    have, _ = converted(source, tmp_path / "out", **options)
    want = maxtext_gpt3_state(SIZE, scan, fused)
    assert_same(have, want)
    assert yaml.safe_load((tmp_path / "out/maxtext_model.yml").read_text())["opt_type"] == "adam_pax"
    # And from there to the other form, moments too.
    again = fastshard_open(tmp_path / "out")
    assert again.opened.source.binding.facts == {"fused_qkv": fused}
    other = target(1 if scan is None else None) | {"fused_qkv": not fused, "optimizer": True}
    have, _ = converted(again, tmp_path / "other", **other)
    assert_same(have, maxtext_gpt3_state(SIZE, 1 if scan is None else None, not fused))


def test_groups_of_paxml_have_any_number(tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE, place=5), tmp_path / "paxml"))
    have, _ = converted(source, tmp_path / "out", "maxtext", optimizer=True)
    assert_same(have, maxtext_gpt3_state(SIZE, 1))


def test_a_group_for_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    tree = {name.replace("p#3#", "p#4#"): a for name, a in paxml_state(SIZE).items()}
    source = fastshard_open(saved_paxml(tree, tmp_path / "paxml"))
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "out", "maxtext", optimizer=True)
    assert error.value.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_the_optimizer_is_left_out_in_one_note(tmp_path: Path) -> None:
    tree = paxml_state(SIZE) | {"opt_states_0.no_prefix_1.strange": np.ones((2, 3), np.float32)}
    source = fastshard_open(saved_paxml(tree, tmp_path / "paxml"))
    have, findings = converted(source, tmp_path / "out", "maxtext")
    assert_same(have, maxtext_gpt3_state(SIZE, 1, optimizer=False))
    notes = [f for f in findings if f.code == "FS212"]
    assert len(notes) == 1
    assert notes[0].message.startswith("34 tensors: optimizer state")
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "more", "maxtext", optimizer=True)
    assert error.value.code == "FS207"
    assert error.value.tensor == "opt_states_0.no_prefix_1.strange"


def test_state_of_optax_keeps_its_names(tmp_path: Path) -> None:
    tree = {}
    for name, a in maxtext_gpt3_state(SIZE, 1).items():
        tree[name.replace("opt_state.", "opt_state.0.")] = a
    tree["opt_state.2.count"] = np.array(11, np.int32)
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    out, _ = converted(source, tmp_path / "apart", "maxtext:unscan", optimizer=True)
    assert "opt_type" not in yaml.safe_load((tmp_path / "apart/maxtext_model.yml").read_text())
    assert out["opt_state.2.count"] == 11
    assert out["opt_state.0.count"] == 4000
    assert "opt_state.0.nu.params.decoder.layers_2.mlp.wi.bias" in out
    apart = fastshard_open(tmp_path / "apart")
    have, _ = converted(apart, tmp_path / "back", "maxtext", optimizer=True)
    assert_same(have, tree)
    weights, _ = converted(apart, tmp_path / "weights", "maxtext:unscan")
    assert set(weights) == {name for name in out if not name.startswith("opt_state")}


def test_moments_scale_inversely(tmp_path: Path) -> None:
    """A target that stores queries as they are computed with takes mu / s and nu / s**2 for weights * s."""
    tree = maxtext_llama(hf_llama(SIZE), SIZE, None)
    for slot in ("mu", "nu"):
        tree |= {
            name.replace("params.params.", f"opt_state.{slot}.params."): a
            for name, a in list(tree.items())
            if name.startswith("params.params.")
        }
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    bare = _core.Table(tables.get("maxtext.llama").replace('scale = "d^-0.5"\n', ""))
    table = jax_train_states.table(bare, default_names())
    assert source.opened.source.optimizer.rules is not None
    request = {
        "source": source.opened.source,
        "optimizer": True,
        "target": {"name": "maxtext", "facts": {"tied": False, "interleaved": False, "qk_norm": False}},
    }
    draft = source.opened.catalog.draft(request, source.opened.source.optimizer.rules(True, True), table)
    made = draft.place({"max_shard_size": 1 << 30})
    document = json.loads(made.to_json())
    ops = {
        output["name"].split("layers_0.")[0]: part["ops"]
        for output in document["outputs"]
        if output["name"].endswith("layers_0.self_attention.query.kernel")
        for part in output["parts"]
    }
    assert ops == {
        "params.params.decoder.": [{"scale": 4.0}],
        "opt_state.mu.params.decoder.": [{"scale": 0.25}],
        "opt_state.nu.params.decoder.": [{"scale": 0.0625}],
    }


def test_merging_keeps_every_name(tmp_path: Path) -> None:
    tree = maxtext_gpt3_state(SIZE, 1)
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    assert_same({name: t.numpy() for name, t in source.items()}, tree)
    assert codes(source.findings) == []


@pytest.mark.parametrize("slots", [(), ("mu",), ("nu",)], ids=["none", "mu", "nu"])
@pytest.mark.parametrize("scan", [1, None], ids=["scan", "apart"])
def test_moments_that_an_optimizer_does_not_have_are_not_missing(
    slots: tuple[str, ...], scan: int | None, tmp_path: Path
) -> None:
    tree = maxtext_gpt3_state(SIZE, scan, optimizer=False)
    whole = maxtext_gpt3_state(SIZE, scan)
    for slot in slots:
        tree |= {name: a for name, a in whole.items() if name.startswith(f"opt_state.{slot}.")}
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    assert codes(source.findings) == []
    assert_same({name: t.numpy() for name, t in source.items()}, tree)
    assert_same(converted(source, tmp_path / "same", "orbax")[0], tree)
    if not slots:
        return
    other = None if scan else 1
    have, _ = converted(source, tmp_path / "other", **target(other), optimizer=True)
    assert {name.split(".")[1] for name in have if name.startswith("opt_state.")} == set(slots)
    have, _ = converted(tmp_path / "other", tmp_path / "back", **target(scan), optimizer=True)
    assert_same(have, tree)
    # Of a kind that there is, every one must be there.
    lost = next(name for name in tree if name.startswith("opt_state."))
    del tree[lost]
    source = fastshard_open(saved_orbax(tree, tmp_path / "lost"))
    assert [(f.code, f.tensor) for f in source.findings if f.severity == "error"] == [("FS102", lost)]


@pytest.mark.parametrize("slot", [None, "m"])
def test_paxml_without_all_moments(slot: str | None, tmp_path: Path) -> None:
    state = paxml_state(SIZE)
    tree = {
        name: a
        for name, a in state.items()
        if not name.startswith("opt_states_0.") or (slot is not None and f".{slot}.params." in name)
    }
    source = fastshard_open(saved_paxml(tree, tmp_path / "paxml"))
    assert codes(source.findings) == []
    assert_same({name: t.numpy() for name, t in source.items()}, tree)
    have, _ = converted(source, tmp_path / "out", "maxtext")
    assert_same(have, maxtext_gpt3_state(SIZE, 1, optimizer=False))
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "more", "maxtext", optimizer=True)
    assert error.value.code == ("FS402" if slot is None else "FS102")
    assert not (tmp_path / "more").exists()


def test_parameters_alone_have_other_roots(tmp_path: Path) -> None:
    hf = hf_llama(SIZE)
    tree = {name.removeprefix("params."): a for name, a in maxtext_llama(hf, SIZE, 1).items()}
    source = fastshard_open(saved_orbax(tree, tmp_path / "params"), config=LLAMA31)
    have, _ = converted(source, tmp_path / "hf", "hf")
    assert_same(have, hf)
    # The same names on the other side.
    have, _ = converted(source, tmp_path / "apart", "maxtext:unscan")
    want = maxtext_llama(hf, SIZE, None)
    assert_same(have, {name.removeprefix("params."): a for name, a in want.items()})
    alone = MaxTextTarget.of(source.opened.source, Request("maxtext:unscan"))
    assert (alone.constants(have), alone.empty) == ({}, [])


def test_the_vocabulary_is_trimmed_and_not_a_constant(tmp_path: Path) -> None:
    hf = hf_llama(SIZE)
    source = fastshard_open(saved_orbax(maxtext_llama(hf, SIZE, 1), tmp_path / "first"), config=LLAMA31)
    have, _ = converted(source, tmp_path / "hf", "hf", vocab_size=47)
    rows = ("lm_head.weight", "model.embed_tokens.weight")
    assert_same(have, {name: a[:47] if name in rows else a for name, a in hf.items()})
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 47


# What the shapes tell of the axis of the layers.

#: As many layers as rows: [L, H] and [H, L] look alike.
SQUARE = Size(layers=4, hidden=4, groups=4, heads=4, head_dim=4, ffn=4)


def test_an_axis_that_the_shapes_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    hf = hf_llama(SQUARE)
    for axis in (0, 1):
        folder = saved_orbax(maxtext_llama(hf, SQUARE, axis), tmp_path / f"scan{axis}")
        unclear = fastshard_open(folder, config=LLAMA31)
        with pytest.raises(FastshardError) as error:
            converted(unclear, tmp_path / "out", "hf")
        assert error.value.code == "FS106" and error.value.exit_code == 2
        assert "param_scan_axis" in str(error.value)
        # Names are enough for a merge.
        assert codes(unclear.findings) == []
        assert set(unclear) == set(maxtext_llama(hf, SQUARE, axis))
        yml = {"param_scan_axis": axis, **LLAMA31}
        told = fastshard_open(folder, config=yml)
        have, _ = converted(told, tmp_path / f"hf{axis}", "hf")
        assert_same(have, hf)


def test_the_config_helps_to_tell_the_axis(tmp_path: Path) -> None:
    size = Size(layers=20, hidden=3, groups=1, heads=20, head_dim=20, ffn=20)
    folder = saved_orbax(maxtext_llama(hf_llama(size), size, 1), tmp_path / "first")
    assert fastshard_open(folder).metadata()["param_scan_axis"] == 1
    wrong = fastshard_open(folder, config={"param_scan_axis": 0, **LLAMA31})
    with pytest.raises(FastshardError) as error:
        converted(wrong, tmp_path / "out", "hf")
    assert error.value.exit_code == 1


def test_one_odd_tensor_does_not_hide_the_axis(tmp_path: Path) -> None:
    tree = maxtext_llama(hf_llama(SIZE), SIZE, 1)
    name = "params.params.decoder.layers.mlp.wi_0.kernel"
    tree[name] = tree[name][:, :, :-1]
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"), config=LLAMA31)
    assert source.metadata()["param_scan_axis"] == 1
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "out", "hf")
    assert {f.tensor for f in error.value.findings if f.code == "FS203"} == {name}


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    tree = maxtext_llama(hf_llama(SIZE), SIZE, None)
    del tree["params.params.decoder.layers_1.mlp.wo.kernel"]
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"), config=LLAMA31)
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "out", "hf")
    assert (error.value.code, error.value.tensor) == (
        "FS102",
        "params.params.decoder.layers_1.mlp.wo.kernel",
    )


@pytest.mark.parametrize(
    "said", [{"scan_layers": False}, {"config": {"scan_layers": False}}], ids=["metadata", "yml"]
)
def test_scan_layers_that_contradicts_the_names(said: dict[str, Any], tmp_path: Path) -> None:
    tree = maxtext_llama(hf_llama(SIZE), SIZE, 1)
    metadata = {key: said[key] for key in said if key != "config"}
    folder = saved_orbax(tree, tmp_path / "first", **metadata)
    source = fastshard_open(folder, config=said.get("config"))
    assert codes(source.findings) == ["FS215"]


def test_other_models_of_maxtext_are_merged_and_not_converted(tmp_path: Path) -> None:
    tree = maxtext_llama(hf_llama(SIZE), SIZE, 1)
    extra = "params.params.decoder.layers.post_ffw_norm.scale"
    tree[extra] = np.ones((SIZE.hidden, SIZE.layers), np.float32)
    source = fastshard_open(saved_orbax(tree, tmp_path / "first"))
    assert_same({name: t.numpy() for name, t in source.items()}, tree)
    assert [f.tensor for f in source.findings if f.code == "FS514"] == [extra]
    with pytest.raises(FastshardError) as error:
        converted(source, tmp_path / "out", "hf")
    assert error.value.code == "FS514"


# Refusals.


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"attention_bias": True}, "on queries, keys and values"),
        ({"mlp_bias": True}, "the MLP's output"),
        ({"model_type": "gpt_neox"}, "other names than a 'gpt_neox'"),
        ({"hidden_act": "gelu"}, "this hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "this rope_scaling"),
    ],
)
def test_what_maxtexts_block_has_no_place_for(config: dict[str, Any], names: str, tmp_path: Path) -> None:
    # These are refused before a tensor is looked at, or (the last two) by what the config says alone.
    folder = hf_folder(hf_llama(SIZE), SIZE, tmp_path / "hf", **config)
    with pytest.raises(FastshardError) as error:
        converted(folder, tmp_path / "out", "maxtext")
    assert error.value.code == "FS514"
    assert names in str(error.value)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"to": "maxtext", "param_scan_axis": 2}, "FS514"),
        ({"to": "maxtext", "param_scan_axis": "x"}, "FS515"),
        ({"to": "maxtext:unscan", "param_scan_axis": 1}, "FS515"),
        ({"to": "maxtext", "fused_qkv": True}, "FS515"),
        ({"to": "maxtext", "rope_type": "yarn"}, "FS515"),
        ({"to": "maxtext", "optimizer": True}, "FS402"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder = hf_folder(hf_llama(SIZE), SIZE, tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        converted(folder, tmp_path / "out", **options)
    assert error.value.code == code


def test_gpt3_has_no_class_in_transformers(tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    with pytest.raises(FastshardError) as error:
        plan(source, to="hf")
    assert error.value.code == "FS514"
    assert "--to maxtext" in str(error.value.expected)
    with pytest.raises(FastshardError) as error:
        plan(source, to="hf", optimizer=True)
    assert error.value.code == "FS514"


def test_what_a_train_state_needs_besides(tmp_path: Path) -> None:
    paxml = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    made = plan(paxml, to="maxtext", optimizer=True)
    kinds = {name: kind for name, kind, *_ in made.outputs}
    assert (kinds["step"], kinds["opt_state.count"]) == ("I32", "I32")
    whole = MaxTextTarget.of(paxml.opened.source, Request("maxtext", optimizer=True))
    assert whole.counters((kinds | {"step": "U32"}).items()) == {"step": ("U32", "I32")}
    assert whole.counters(kinds.items()) == {}
    assert whole.constants(kinds) == {}
    assert (whole.empty, whole.metadata()) == ([], {"scan_layers": True})
    apart = MaxTextTarget.of(paxml.opened.source, Request("maxtext:unscan"))
    assert (apart.empty, apart.metadata()) == ([("opt_state",)], {"scan_layers": False})
    assert apart.constants([]) == {"step": ("I64", 0)}


def test_moments_keep_their_dtype(tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    have, _ = converted(source, tmp_path / "out", "maxtext", optimizer=True, dtype="bf16")
    want = maxtext_gpt3_state(SIZE, 1)
    assert_same(have, {name: a.astype(BF16) if name.startswith("params.") else a for name, a in want.items()})


def test_the_vocabulary_is_padded_if_asked_for(tmp_path: Path) -> None:
    source = fastshard_open(saved_paxml(paxml_state(SIZE), tmp_path / "paxml"))
    have, _ = converted(source, tmp_path / "out", "maxtext", make_vocab_size_divisible_by=64, optimizer=True)
    want = maxtext_gpt3_state(SIZE, 1)
    for name in (name for name in want if name.endswith("token_embedder.embedding")):
        want[name] = np.concatenate([want[name], np.zeros((14, SIZE.hidden), np.float32)])
    assert_same(have, want)
    assert "vocab_size: 64" in (tmp_path / "out/maxtext_model.yml").read_text()


def test_arrays_are_whole(tmp_path: Path) -> None:
    folder = hf_folder(hf_llama(SIZE), SIZE, tmp_path / "hf")
    with pytest.raises(FastshardError) as error:
        converted(folder, tmp_path / "out", "maxtext", tp=2)
    assert error.value.code == "FS514"


@pytest.mark.parametrize("to", ["gpt_neox", "megatron:legacy", "dcp", "tp-safetensors"])
def test_other_targets_take_a_llama_of_maxtext(to: str, tmp_path: Path) -> None:
    # GPT-NeoX has only models whose heads make up the hidden size.
    size = Size(hidden=64)
    hf = hf_llama(size)
    tree = maxtext_llama(hf, size, 0, rope="default") | {"step": np.array(3, np.int32)}
    source = fastshard_open(saved_orbax(tree, tmp_path / "maxtext"), config=llama_yml(size))
    convert(source, tmp_path / "out", to=to, memory="2GiB", **UNPADDED.get(to, {}))
    convert(tmp_path / "out", tmp_path / "hf", to="hf", memory="2GiB", vocab_size=size.vocab)
    have = {k: as_numpy(v) for k, v in read_result(tmp_path / "hf").items()}
    assert_same(have, hf)


def test_a_layout_of_the_users_own_comes_first(tmp_path: Path) -> None:
    """It is the whole truth: what it does not name is refused."""
    (tmp_path / "own.toml").write_text(
        'layout = "own"\nfamily = "own"\n[[tensor]]\nname = "step"\nshape = "[]"\n'
    )
    folder = saved_orbax(
        {"step": np.array(3, np.int32), "other": np.ones(2, np.float32)}, tmp_path / "maxtext"
    )
    findings = fastshard_open(folder, layout=tmp_path / "own.toml").findings
    assert [(f.code, f.tensor) for f in findings if f.severity == "error"] == [("FS207", "other")]
