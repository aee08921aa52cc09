"""What a table says of a model's config, as Python sees it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastshard import _core
from fastshard.errors import FastshardError
from fastshard.layouts import tables
from fastshard.models import config_json

TABLE = """
layout = "mine"
family = "mine"
[config]
model_type = ["mine", "mine_text"]
within = ["text_config"]
[config.axes]
L = "num_hidden_layers"
d = "head_dim ?? hidden_size / num_attention_heads"
[config.facts]
tied = "tie_word_embeddings ?? false"
head = "not tied or stored('lm_head.weight')"
[sets]
moe = "not dense"
dense = "L < first_dense"
[[tensor]]
name = "layers.{L}.q"
shape = "[d, H]"
[[tensor]]
name = "lm_head.weight"
shape = "[V, H]"
when = "head"
"""
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 40,
    "text_config": {"num_hidden_layers": 4, "hidden_size": 12, "num_attention_heads": 3, "first_dense": 1},
}


def test_a_config_is_described() -> None:
    table = _core.Table(TABLE)
    assert table.model_types == ["mine", "mine_text"] and table.has_config
    axes, facts, sets = table.describe(json.dumps(CONFIG), [])
    assert axes == {"L": 4, "d": 4}
    assert facts == {"tied": False, "head": True}
    assert sets == {"dense": ("L", [0]), "moe": ("L", [1, 2, 3])}
    tied = json.dumps(CONFIG | {"tie_word_embeddings": True})
    assert table.describe(tied, [])[1] == {"tied": True, "head": False}
    assert table.describe(tied, ["lm_head.weight"])[1] == {"tied": True, "head": True}
    # Without a config the names tell, and the tensors do the rest.
    assert table.describe(None, ["lm_head.weight"]) == ({}, {"head": True}, {})
    assert table.describe("{}", []) == ({}, {"tied": False, "head": True}, {})


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "a multiple of 3.*hidden_size / num_attention_heads"),
        ({"num_hidden_layers": "x"}, "config: num_hidden_layers "),
        ({"num_hidden_layers": -1}, "config: num_hidden_layers "),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"num_hidden_layers": 3, "first_dense": True}, "first_dense.*set dense of layout mine"),
    ],
)
def test_a_value_that_does_not_fit_is_named(config: dict[str, Any], wanted: str) -> None:
    with pytest.raises(_core.CoreError) as caught:
        nested = {"text_config": CONFIG["text_config"] | config}
        _core.Table(TABLE).describe(json.dumps(nested), [], "some/config.json")
    (finding,) = caught.value.args[0]
    assert (finding.code, finding.file) == ("FS211", "some/config.json")
    assert re.search(wanted, f"{finding.expected}: {finding.message}")


def test_no_value_is_needed() -> None:
    with pytest.raises(_core.CoreError, match="FS211"):
        _core.Table(TABLE).describe("{", [], "config.json")
    with pytest.raises(_core.CoreError, match="FS210"):
        _core.Table(TABLE.replace("first_dense", "first_dense("))


def test_tables_without_a_config_say_so() -> None:
    assert not _core.Table(TABLE.split("[config]")[0]).has_config
    child = 'layout = "child"\nfamily = "mine"\nextends = "mine"\n[config]\nmodel_type = ["child"]\n'
    table = _core.Table(child, _core.Table(TABLE))
    assert table.model_types == ["child"] and table.describe(json.dumps(CONFIG), [])[0]["d"] == 4


MORE = """
layout = "mine.{name}"
family = "llama"
extends = "hf.llama"
[config]
model_type = ["{of}"]
{when}
"""


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(tables, "_parsed", {})


def test_layers_without_experts_have_a_table_of_their_own() -> None:
    of = {"model_type": "qwen3_moe", "num_experts": 4}
    for more in ({}, {"mlp_only_layers": []}, {"mlp_only_layers": None}, {"decoder_sparse_step": 1}):
        assert tables.of_config(json.dumps(of | more)) == "hf.qwen_moe"
    for more in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"num_experts": 0}):
        assert tables.of_config(json.dumps(of | more)) == "hf.qwen2_moe"
    assert tables.of_config('{"model_type": "qwen2_moe", "num_experts": 4}') == "hf.qwen2_moe"
    with pytest.raises(FastshardError, match=r"c\.json: config: .*decoder_sparse_step") as caught:
        tables.of_config(json.dumps(of | {"decoder_sparse_step": "x"}), "c.json")
    assert caught.value.code == "FS211"


@pytest.mark.usefixtures("own_tables")
def test_a_users_own_table_goes_first_and_two_are_refused() -> None:
    llama = json.dumps({"model_type": "llama", "odd": True})
    assert tables.of_config(llama) == "hf.llama" and tables.of_config(json.dumps({})) is None
    tables.register(MORE.format(name="odd", of="llama", when='when = "odd"'))
    assert tables.of_config(llama) == "mine.odd"
    assert tables.of_config(json.dumps({"model_type": "llama"})) == "hf.llama"
    tables.register(MORE.format(name="even", of="llama", when='when = "not odd"'))
    assert tables.of_config(llama) == "mine.odd"
    assert tables.of_config(json.dumps({"model_type": "llama", "odd": False})) == "mine.even"
    tables.register(MORE.format(name="all", of="llama", when=""))
    with pytest.raises(
        FastshardError, match=r"layouts mine\.all and mine\.odd are for the same model"
    ) as caught:
        tables.of_config(llama, "c.json")
    assert (caught.value.code, caught.value.findings[0].file) == ("FS210", "c.json")
    assert tables.of_config(json.dumps({"model_type": "mistral"})) == "hf.llama"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"hidden_size": 0}, "config: hidden_size .*expected a positive integer, got 0"),
        ({"vocab_size": "x"}, 'config: vocab_size .*expected a positive integer, got "x"'),
        ({"num_hidden_layers": 2.0}, "config: num_hidden_layers .*expected a positive integer, got 2.0"),
        (
            {"intermediate_size": True},
            "config: intermediate_size .*expected a positive integer, got true",
        ),
        ({"hidden_size": -8}, "config: hidden_size .*expected a positive integer, got -8"),
        ({"num_attention_heads": 3}, "config: hidden_size / num_attention_heads .*a multiple of 3, got 8"),
        (
            {"num_key_value_heads": 3},
            "config: num_attention_heads / .num_key_value_heads .*a multiple of 3, got 2",
        ),
    ],
)
def test_sizes_that_are_none_and_heads_that_do_not_divide(change: dict[str, Any], wanted: str) -> None:
    config = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 4,
        "num_attention_heads": 2,
    }
    with pytest.raises(FastshardError, match=wanted) as caught:
        config_json.described({"model_type": "llama"} | config | change, "some/config.json")
    assert (caught.value.code, caught.value.findings[0].file) == ("FS211", "some/config.json")


def test_no_table_is_passed_over() -> None:
    """Only tables whose text has the model type are parsed: they are all that are for it."""
    kinds = {kind for name in tables.names() for kind in re.findall(r"[\w.-]+", tables.get(name))}
    for name in tables.names():
        states = "\nmodel_type = " in tables.get(name)
        assert bool(tables._model_types(name)) == states, name
        found = {kind for kind in kinds if tables.table(name).is_for(json.dumps({"model_type": kind}))}
        # A table with a condition is for some of its types.
        assert found <= set(tables._model_types(name)), name
        assert found or not states or "\nwhen = " in tables.get(name), name
    assert tables.of_config('{"model_type": "ll\\u0061ma"}') == "hf.llama"
