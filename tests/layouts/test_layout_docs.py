"""What docs/layouts.md shows is what the core takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fastshard import _core, layouts
from fastshard.layouts import model_classes

DOCS = (Path(__file__).parents[2] / "docs/layouts.md").read_text()
BLOCKS = re.findall(r"^```toml\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
CONFIG = {
    "model_type": "example",
    "vocab_size": 40,
    "ffn_ratio": 1.75,
    "text_config": {
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_experts": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "first_dense": 1,
        "sparse_step": 2,
    },
}


def test_the_first_table_is_one() -> None:
    table = _core.Table(BLOCKS[0])
    assert (table.name, table.family, table.vocab, table.has_config) == (
        "megatron.llama",
        "llama",
        "V",
        False,
    )
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert table.shape(qkv, {"g": 2, "r": 3, "c": 4, "H": 16}) == [80, 16]


def test_the_rules_that_hold_again_are_those_of_a_table() -> None:
    have = layouts.table("hf.qwen3_next")
    text = f"layout = 'a'\nfamily = 'llama'\nextends = 'hf.qwen3_next'\n{BLOCKS[1]}"
    name = "mtp.layers.0.post_attention_layernorm.weight"
    again = _core.Table(text, have).rule_of(name)
    assert again is not None and again.dimensions == ["H"]


def test_the_table_with_a_config_is_one() -> None:
    table = _core.Table(BLOCKS[2], layouts.table("hf.llama"))
    axes, facts, sets = table.describe(json.dumps(CONFIG), [])
    assert axes == {"V": 40, "P": 40, "H": 16, "L": 6, "F": 24, "M": 28, "E": 4, "d": 4, "g": 2, "r": 2}
    assert facts == {"tied": False, "head": True}
    assert sets == {"mtp": ("L", [5]), "moe": ("L", [1, 3]), "dense": ("L", [0, 2, 4, 5])}
    assert table.shape("model.layers.0.mlp.gate_up_proj.weight", axes) == [48, 16]
    assert table.shape("model.layers.1.mlp.experts.3.up_proj.weight", axes) == [28, 16]
    assert table.rule_of("model.layers.0.self_attn.q_proj.bias") is None
    assert table.model_types == ["example"] and table.is_for(json.dumps(CONFIG))
    assert not table.is_for(json.dumps(CONFIG | {"text_config": {"num_experts": 0}}))


def test_the_section_of_a_model_is_one() -> None:
    table = _core.Table(BLOCKS[3], layouts.table("hf.qwen_moe"))
    (of,) = model_classes.of_table(table).values()
    assert (of.kind, of.experts, of.order, of.defaults) == ("Example", True, 90, {"num_experts_per_tok": 8})
