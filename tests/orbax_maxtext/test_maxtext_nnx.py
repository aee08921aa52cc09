"""Trees of flax NNX, as SFT and RL of MaxText and Tunix save them, against numpy and MaxText's own converter.

Their layout is that of Orbax's own files, but for the names: tests/real_orbax has Orbax write them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from fastshard.layouts import nnx_names
from helpers import FIXTURES, assert_refused, cli, copy
from jax_maker import (
    LLAMA31,
    STEP,
    Size,
    Tree,
    assert_same,
    converted,
    hf_llama,
    llama_config,
    maxtext_gpt3_state,
    maxtext_llama,
    read,
    saved_orbax,
)
from test_maxtext_fixtures import assert_hashes, described

SIZE = Size()
HF = hf_llama(SIZE)
TWIN = FIXTURES / "maxtext_twins/a_mt_bf16_unscan_noocdbt_zarr2"
#: Streams of random numbers below a module.
RANDOM = {
    "decoder.rngs.params.key": np.array([1, 2], np.uint32),
    "decoder.rngs.params.count": np.array(3, np.uint32),
    "decoder.dropout.rngs.dropout.count": np.array(3, np.uint32),
    "decoder.to_nnx__rngs.aqt.count": np.array(0, np.uint32),
}


def nnx(tree: Tree, container: str = "", value: bool = True, lists: bool = False) -> Tree:
    """The weights of a train state under the names of NNX."""
    out = {}
    for name, array in tree.items():
        name = name.removeprefix("params.params.")
        if lists:
            name = re.sub(r"layers_(\d+)", r"layers.\1", name)
        out[container + name + (".value" if value else "")] = array
    return out


def llama(scan: int | None = None) -> Tree:
    return maxtext_llama(HF, SIZE, scan)


def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(llama_config(SIZE)))
    return file


#: Each with its random numbers: container, `.value`, lists, scan.
FORMS: dict[str, Tree] = {
    "sft": nnx(llama()) | nnx(RANDOM),
    "rl": nnx(llama(), "base.") | nnx(RANDOM, "base."),
    "rl, scanned": nnx(llama(1), "base.") | nnx(RANDOM, "base."),
    "scanned along 0": nnx(llama(0)),
    "lists": nnx(llama(), "base.", lists=True),
    "pure dict of lists": nnx(llama(), value=False, lists=True) | nnx(RANDOM, value=False),
    "model": nnx(llama(1), "model."),
    "model.base": nnx(llama(), "model.base.", lists=True),
    "params": nnx(llama(), "params."),
    "lists below linen's collections": nnx(llama(), "params.params.", value=False, lists=True)
    | nnx(RANDOM, "nnx_aux.model.", value=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_model(form: str, tmp_path: Path) -> None:
    tree = FORMS[form]
    folder, config = saved_orbax(tree, tmp_path / "nnx"), config_file(tmp_path)
    source = fastshard.open(folder)
    assert (source.framework, source.family) == ("MaxText", "llama")
    assert cli("verify", folder).code == 0
    ran = cli("convert", folder, tmp_path / "hf", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "hf"), HF)
    random = [name for name in tree if "rngs" in name]
    left = [f for f in ran.having("FS212") if "random numbers" in f["message"]]
    assert len(left) == bool(random)
    # A merge, and a container of arrays, keep every name.
    assert cli("merge", folder, tmp_path / "merged").code == 0
    assert_same(read(tmp_path / "merged"), tree)
    assert cli("convert", folder, tmp_path / "orbax", "--to", "orbax").code == 0
    assert_same(read(tmp_path / "orbax"), tree)


@pytest.mark.parametrize("to", ["maxtext", "maxtext:unscan"])
@pytest.mark.parametrize("form", ["sft", "rl, scanned", "model.base", "params"])
def test_maxtexts_own_form_comes_of_it(form: str, to: str, tmp_path: Path) -> None:
    have, _ = converted(saved_orbax(FORMS[form], tmp_path / "nnx"), tmp_path / "out", to)
    assert_same(have, llama(1 if to == "maxtext" else None) | STEP)
    (metadata,) = (tmp_path / "out").glob("*/items/_METADATA")
    entries = json.loads(metadata.read_text())["tree_metadata"].values()
    assert {key["key_type"] for entry in entries for key in entry["key_metadata"]} == {2}
    ran = cli("convert", tmp_path / "out", tmp_path / "hf", "--to", "hf", "--config", config_file(tmp_path))
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "hf"), HF)


def train_state(scan: int | None, lists: bool) -> tuple[Tree, Tree]:
    """A TrainStateNNX of GPT-3 with Adam in a chain of optax, and the same as linen's."""
    state = maxtext_gpt3_state(SIZE, scan)
    weights = {name: a for name, a in state.items() if name.startswith("params.")}
    tree = nnx(weights, "model.", lists=lists) | nnx(RANDOM, "model.")
    want = weights | {"step": state["step"]}
    for name, array in state.items():
        if name.startswith("opt_state."):
            bare = name.removeprefix("opt_state.").replace("params.", "")
            bare = re.sub(r"layers_(\d+)", r"layers.\1", bare) if lists else bare
            tree[f"optimizer.opt_state.0.{bare}.value"] = array
            want[name.replace("opt_state.", "opt_state.0.")] = array
    tree["optimizer.step.value"] = state["step"].astype(np.uint32)
    return tree, want


@pytest.mark.parametrize(("scan", "lists"), [(1, False), (None, False), (None, True)])
def test_a_train_state_of_nnx_with_its_optimizer(scan: int | None, lists: bool, tmp_path: Path) -> None:
    tree, want = train_state(scan, lists)
    folder = saved_orbax(tree, tmp_path / "nnx")
    to = "maxtext" if scan is not None else "maxtext:unscan"
    have, _ = converted(folder, tmp_path / "out", to, optimizer=True)
    assert_same(have, want | {"step": want["step"].astype(np.int32)})
    weights, _ = converted(folder, tmp_path / "weights", to)
    assert_same(
        {n: a for n, a in weights.items() if n != "step"},
        {n: a for n, a in want.items() if n.startswith("params.")},
    )


def test_a_twin_of_maxtexts_converter(tmp_path: Path) -> None:
    tree = nnx(
        {name: a for name, a in read(copy(TWIN, tmp_path / "twin")).items() if name != "step"}, "base."
    )
    have, _ = converted(saved_orbax(tree, tmp_path / "nnx"), tmp_path / "hf", "hf", config=LLAMA31)
    assert_hashes(have, described(TWIN)["hf_tensors"])


# What is refused.


@pytest.mark.parametrize(
    "name", ["decoder.layers_1.mlp.wi_0.kernel", "decoder.layers.1.mlp.wi_0.kernel.value"]
)
def test_a_tensor_in_two_forms_is_refused(name: str, tmp_path: Path) -> None:
    tree = nnx(llama())
    tree[name] = tree["decoder.layers_1.mlp.wi_0.kernel.value"] + 1
    folder = saved_orbax(tree, tmp_path / "nnx")
    for command in (("merge",), ("convert", "--to", "hf"), ("convert", "--to", "maxtext")):
        assert_refused(folder, tmp_path / "out", "FS206", command=command, tensor=name)


def test_the_other_form_can_be_left_out(tmp_path: Path) -> None:
    tree = nnx(llama())
    folder = saved_orbax(tree | {"decoder.decoder_norm.scale": np.ones(SIZE.hidden)}, tmp_path / "nnx")
    ran = cli("merge", folder, tmp_path / "out", "--exclude", "decoder.decoder_norm.scale")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "out"), tree)


@pytest.mark.parametrize("lists", [False, True], ids=["names", "lists"])
def test_a_layer_that_is_missing_is_found(lists: bool, tmp_path: Path) -> None:
    layer = r"layers[._]1\."
    tree = {name: a for name, a in nnx(llama(), "base.", lists=lists).items() if not re.search(layer, name)}
    folder = saved_orbax(tree, tmp_path / "nnx")
    assert_refused(folder, tmp_path / "out", "FS103", exit=3, message="layer 1 is missing")
    last = r"layers[._]2\."
    tree = {name: a for name, a in nnx(llama(), "base.", lists=lists).items() if not re.search(last, name)}
    folder = saved_orbax(tree, tmp_path / "last")
    how = ("convert", "--to", "hf", "--config", config_file(tmp_path))
    assert_refused(folder, tmp_path / "out", "FS103", exit=3, command=how, message="layer 2 is missing")


@pytest.mark.parametrize("name", list(nnx(llama(), "base.", lists=True)))
def test_each_tensor_that_is_missing_is_named_as_stored(name: str, tmp_path: Path) -> None:
    tree = nnx(llama(), "base.", lists=True)
    del tree[name]
    folder, config = saved_orbax(tree, tmp_path / "nnx"), config_file(tmp_path)
    how = ("convert", "--to", "hf", "--config", config)
    assert_refused(folder, tmp_path / "out", "FS102", exit=3, command=how, tensor=name)


def test_scan_layers_that_contradicts_the_names(tmp_path: Path) -> None:
    folder = saved_orbax(nnx(llama(), "base.", lists=True), tmp_path / "nnx", scan_layers=True)
    assert_refused(folder, tmp_path / "out", "FS215", command=("convert", "--to", "hf"))


FACTORS = {
    "base.decoder.layers_0.mlp.wi_0.kernel_lora_a.value": np.ones((SIZE.hidden, 2), np.float32),
    "base.decoder.layers_0.mlp.wi_0.kernel_lora_b.value": np.ones((2, SIZE.ffn), np.float32),
}


@pytest.mark.parametrize("to", ["hf", "maxtext"])
def test_factors_of_an_adapter_are_merged_and_not_converted(to: str, tmp_path: Path) -> None:
    tree = nnx(llama(), "base.") | FACTORS
    folder, config = saved_orbax(tree, tmp_path / "nnx"), config_file(tmp_path)
    how = ("convert", "--to", to, "--config", config)
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, command=how, tensor=next(iter(FACTORS)))
    assert cli("merge", folder, tmp_path / "merged").code == 0
    assert_same(read(tmp_path / "merged"), tree)
    del tree["base.decoder.layers_1.mlp.wo.kernel.value"]
    assert_refused(saved_orbax(tree, tmp_path / "less"), tmp_path / "out", "FS102", exit=3)


def test_factors_alone_are_no_model(tmp_path: Path) -> None:
    folder = saved_orbax(FACTORS, tmp_path / "nnx")
    how = ("convert", "--to", "hf")
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, command=how, message="a factor of an adapter")
    assert cli("merge", folder, tmp_path / "merged").code == 0
    assert_same(read(tmp_path / "merged"), FACTORS)


def test_two_models_in_one_tree_are_not_taken_for_one(tmp_path: Path) -> None:
    other = {name: a + 1 for name, a in nnx(llama(1), "model.").items()}
    folder = saved_orbax(nnx(llama(), "base.") | other, tmp_path / "nnx")
    assert_refused(folder, tmp_path / "out", "FS106", exit=2, command=("convert", "--to", "hf"))


@pytest.mark.parametrize(
    "extra",
    [
        "base.decoder.layers_0.post_ffw_norm.scale.value",
        "base.vision_encoder.dense.kernel.value",
        "nnx_aux.model.decoder.layers_0.gate.bias",
    ],
)
def test_what_the_tables_do_not_name_is_not_dropped(extra: str, tmp_path: Path) -> None:
    tree = nnx(llama(), "base.") | {extra: np.ones(SIZE.hidden, np.float32)}
    folder = saved_orbax(tree, tmp_path / "nnx")
    assert [f.tensor for f in fastshard.open(folder).findings if f.code == "FS514"] == [extra]
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "hf"))


@pytest.mark.parametrize(
    "names",
    [
        ["model.decoder.layers.0.self_attn.q_proj.kernel"],
        ["decoder.conv.kernel", "encoder.conv.kernel"],
        ["decoder.conv.kernel.value", "encoder.conv.kernel.value"],
        ["value", "base.value", "step"],
    ],
)
def test_other_trees_with_a_decoder_are_not_maxtexts(names: list[str], tmp_path: Path) -> None:
    assert nnx_names.read(names) is None
    tree: dict[str, Any] = {name: np.full(3, n, np.float32) for n, name in enumerate(names)}
    assert fastshard.open(saved_orbax(tree, tmp_path / "other")).framework == "Orbax"


def test_a_value_within_a_name_stays() -> None:
    """``value`` is also the projection of the values."""
    name = "decoder.layers.0.self_attention.value.kernel.value"
    tree = nnx_names.read([name])
    assert tree is not None
    assert dict(tree.stored) == {"params.params.decoder.layers_0.self_attention.value.kernel": name}
    pattern = "params.params.decoder.layers_{L}.self_attention.value.kernel"
    assert tree.spell(pattern) == "decoder.layers.{L}.self_attention.value.kernel.value"
