"""What a table says of a model's config, as Python sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastshard import _core, layouts

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
    with pytest.raises(_core.CoreError, match=wanted) as caught:
        nested = {"text_config": CONFIG["text_config"] | config}
        _core.Table(TABLE).describe(json.dumps(nested), [], "some/config.json")
    (finding,) = json.loads(str(caught.value))
    assert (finding["code"], finding["file"]) == ("FS211", "some/config.json")


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


def test_no_model_type_has_two_tables() -> None:
    known: dict[str, str] = {}
    for name in layouts.names():
        for model_type in layouts.table(name).model_types:
            assert known.setdefault(model_type, name) == name
