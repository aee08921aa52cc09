"""Layers and roles by names, for all frameworks that are read."""

from __future__ import annotations

import re

import fastshard
import pytest
from fastshard.models.tensor_roles import layer_of, role_of
from helpers import HF, NEOX, TP4
from hypothesis import given
from hypothesis import strategies as st

#: (name, layer, role)
NAMES = [
    # Hugging Face
    ("model.layers.3.self_attn.q_proj.weight", 3, "self_attn.q_proj.weight"),
    ("model.layers.60.mlp.experts.383.gate_proj.weight", 60, "mlp.experts.*.gate_proj.weight"),
    ("model.embed_tokens.weight", None, "embed_tokens.weight"),
    ("lm_head.weight", None, "lm_head.weight"),
    ("transformer.h.11.attn.c_attn.bias", 11, "attn.c_attn.bias"),
    ("gpt_neox.layers.0.attention.query_key_value.weight", 0, "attention.query_key_value.weight"),
    ("visual.blocks.5.attn.qkv.weight", 5, "visual.attn.qkv.weight"),
    # GPT-NeoX and DeepSpeed pipelines: numbers are places in the pipeline.
    ("2.attention.dense.weight", 2, "attention.dense.weight"),
    ("0.word_embeddings.weight", 0, "word_embeddings.weight"),
    ("2.mlp.dense_h_to_4h.weight", 2, "mlp.dense_h_to_4h.weight"),
    ("tied_modules.embed.word_embeddings.weight", None, "tied_modules.embed.word_embeddings.weight"),
    # Megatron-LM, stacked and not
    ("decoder.layers.0.self_attention.linear_qkv.weight", 0, "self_attention.linear_qkv.weight"),
    ("decoder.layers.mlp.linear_fc1.weight", None, "mlp.linear_fc1.weight"),
    ("embedding.word_embeddings.weight", None, "embedding.word_embeddings.weight"),
    # MaxText, stacked and not; wi_0 is no layer
    ("params.params.decoder.layers.mlp.wi_0.kernel", None, "mlp.wi_0.kernel"),
    ("params.params.decoder.layers_7.mlp.wo.kernel", 7, "mlp.wo.kernel"),
    ("opt_state.mu.params.decoder.layers_7.mlp.wo.kernel", 7, "opt_state.mu.mlp.wo.kernel"),
    # Paxml: a stack is a loop whose layers are counted within one step
    (
        "mdl_vars.params.lm.transformer.repeat.sub.x_layers_0.ff_layer.bias.b",
        None,
        "mdl_vars.ff_layer.bias.b",
    ),
    # torch.distributed.checkpoint with optimizer state
    ("optim.state.model.layers.1.mlp.up_proj.weight.exp_avg", 1, "optim.state.mlp.up_proj.weight.exp_avg"),
    ("optim.param_groups.0.lr", None, "optim.param_groups.*.lr"),
    # Odd ones
    ("3", None, "*"),
    ("", None, ""),
    ("model", None, "model"),
    ("experts.4.w1.weight", None, "experts.*.w1.weight"),
]


@pytest.mark.parametrize("name, layer, role", NAMES, ids=[name or "empty" for name, *_ in NAMES])
def test_names(name: str, layer: int | None, role: str) -> None:
    assert (layer_of(name), role_of(name)) == (layer, role)


@given(st.text())
def test_any_name_has_a_role(name: str) -> None:
    assert role_of(name) or not name
    assert layer_of(name) is None or re.search(r"\d", name)


@pytest.mark.parametrize("source, layers", [(NEOX, 3), (TP4, 2), (HF, 4)])
def test_layers_that_are_built_alike_have_the_same_roles(source: object, layers: int) -> None:
    roles: dict[int | None, set[str]] = {}
    for name in fastshard.open(source):
        roles.setdefault(layer_of(name), set()).add(role_of(name))
    sizes = sorted(len(of) for layer, of in roles.items() if layer is not None)
    assert len(sizes) >= layers and sizes[-layers:] == [sizes[-1]] * layers
    alike = [of for layer, of in roles.items() if layer is not None and len(of) == sizes[-1]]
    assert all(of == alike[0] for of in alike)
