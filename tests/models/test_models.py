"""The model in the middle: each dialect reads what it writes, and refuses what it has no words for."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from fastshard import FastshardError
from fastshard.layouts.declaration import Evidence
from fastshard.models import gpt_neox, huggingface, maxtext, megatron, megatron_config
from fastshard.models.model import Attention, Block, Experts, Model, Rope, change_layers

AXES = {"V": 512, "H": 64, "F": 96, "L": 2, "g": 2, "r": 2, "d": 16, "E": 4}
NONE, QKV, ALL = (False,) * 4, (True, False, False, False), (True,) * 4
ATTENTION, MLP = (True, True, False, False), (False, False, True, True)
LLAMA3 = Rope(500_000, 1.0, "llama3", maxtext.LLAMA3_SCALING)
#: What a Llama may be, field by field.
CHOICES: dict[str, list[Any]] = {
    "eps": [1e-5, 1e-6],
    "rope": [Rope(10_000), Rope(500_000), LLAMA3, Rope(10_000, 0.5)],
    "window": [None, 33],
    "biases": [NONE, QKV, ATTENTION, MLP, ALL],
    "qk_norm": [False, True],
    "tied": [False, True],
    "activation": ["silu", "gelu"],
    "max_positions": [64, 4096],
    "grouped": [True],
}
#: Fields of attention, and of a kind of layers.
OF_ATTENTION, OF_BLOCK = ("window", "qk_norm", "grouped"), ("biases", "experts")
LLAMA = Model(
    "somewhere",
    "llama",
    eps=1e-5,
    rope=Rope(10_000),
    max_positions=64,
    blocks=(Block(Attention(grouped=True)),),
)


def make_model(**fields: Any) -> Model:
    """Return the Llama with other values of some fields, wherever these are."""
    (block,) = LLAMA.blocks
    attention = {key: fields.pop(key) for key in OF_ATTENTION if key in fields}
    of_block = {key: fields.pop(key) for key in OF_BLOCK if key in fields}
    block = replace(block, attention=replace(block.attention, **attention), **of_block)
    return replace(LLAMA, blocks=(block,), **fields)


def values_of(model: Model) -> dict[str, Any]:
    """Return what a model of one kind of layers computes, by field."""
    (block,) = model.blocks
    values = {name: getattr(model, name) for name in ("norm", "norm_bias", "gated", "parallel", "positions")}
    values |= {name: getattr(model, name) for name in CHOICES if name not in (*OF_ATTENTION, *OF_BLOCK)}
    return values | {name: getattr(block.attention, name) for name in OF_ATTENTION} | {"biases": block.biases}


def models() -> list[Model]:
    random.seed(5)
    everything = list(itertools.product(*CHOICES.values()))
    return [make_model(**dict(zip(CHOICES, one, strict=True))) for one in random.sample(everything, 300)]


def facts(model: Model, **names: str) -> dict[str, bool]:
    qkv, out, mlp, _ = model.biases
    return {
        "tied": model.tied,
        "attention_bias": qkv,
        "out_bias": out,
        "mlp_bias": mlp,
        "qk_norm": model.attention.qk_norm,
    }


def through_transformers(model: Model) -> Model:
    config, _ = huggingface.write(model, huggingface.class_of(model), AXES, "config.json")
    return huggingface.DIALECT.read(config, Evidence("llama", facts(model), AXES))


def through_megatron(model: Model) -> Model:
    args, _ = megatron.DIALECT.write(model, AXES, "args")
    return megatron.DIALECT.read(args, Evidence("llama", megatron.facts_of(model), AXES))


def through_neox(model: Model) -> Model:
    config, _ = gpt_neox.DIALECT.write(model, AXES, "yml")
    qkv, out, mlp, last = model.biases
    features = gpt_neox.Features(
        norm=config["norm"],
        norm_bias=False,
        residual="sequential",
        gated=True,
        kv_heads=2,
        gqa=True,
        attention_bias=qkv,
        dense_bias=out,
        mlp_bias=mlp,
        mlp_out_bias=last,
        te_layernorm_mlp=False,
        te_mha=False,
        stale_norm=False,
        te_parallel_linear=False,
        learned_positions=False,
        qk_layernorm=False,
        reward_head=False,
        legacy_names=False,
    )
    told = Evidence("llama", {"tied": model.tied, "gpt_j_residual": False}, AXES)
    return gpt_neox.GptNeoX(features).read(config, told)


def through_maxtext(model: Model) -> Model:
    yml, _ = maxtext.DIALECT.write(model, True, model.tied, "yml")
    return maxtext.DIALECT.read(yml | {"base_emb_dim": 64}, Evidence("llama", {"tied": model.tied}, AXES))


WAYS = {
    "transformers": (through_transformers, lambda m: huggingface.class_of(m), ()),
    "megatron": (through_megatron, megatron.refuse, ()),
    "gpt_neox": (through_neox, gpt_neox.refuse, ()),
    # Its yml does not say them, nor a window that is as long.
    "maxtext": (through_maxtext, maxtext.block_of, ("max_positions", "window")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_dialect_reads_what_it_writes(way: str) -> None:
    """All of what is computed, for any model that it does not refuse."""
    there, refuse, untold = WAYS[way]
    taken = 0
    for model in models():
        try:
            refuse(model)
        except FastshardError as error:
            assert error.code == "FS514" and all(f.expected and f.got for f in error.findings)
            continue
        taken += 1
        got = there(model)
        have_all = values_of(got)
        for field, want in values_of(model).items():
            if field in untold:
                continue
            have = have_all[field]
            if field == "rope":
                have, want = ((r.base, r.share, r.kind) for r in (have, want))
                assert model.rope.kind == "default" or all(
                    got.rope.scaling[key] == value for key, value in model.rope.scaling.items()
                )
            assert have == want, (field, model)
    assert 5 < taken < 300


def test_each_thing_that_a_format_lacks_is_named_by_its_sources_word() -> None:
    values = {"hidden_act": "gelu", "mlp_bias": True, "model_type": "llama", "rope_scaling": {"type": "yarn"}}
    evidence = Evidence("llama", facts(make_model(biases=MLP)), AXES)
    model = huggingface.DIALECT.read(values, evidence)
    with pytest.raises(FastshardError) as error:
        maxtext.block_of(model)
    assert [f.message.partition("with this ")[2] for f in error.value.findings] == [
        "hidden_act",
        "rope_scaling",
        "set of biases",
    ]


def test_what_some_layers_have_is_named_with_these_layers() -> None:
    windowed = replace(LLAMA.blocks[0], attention=Attention(grouped=True, window=9))
    for layers, named in (
        ((0, 1, 2, 5), "sliding_window (layers 0-2, 5)"),
        (tuple(range(6)), "sliding_window"),
    ):
        blocks = change_layers(LLAMA.blocks, layers, 6, lambda _: windowed)
        model = replace(LLAMA, blocks=blocks, words={"window": "sliding_window"})
        with pytest.raises(FastshardError) as error:
            maxtext.block_of(replace(model, max_positions=64))
        (finding,) = error.value.findings
        assert finding.message.endswith(f"with this {named}")


@pytest.mark.parametrize(
    ("stated", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_mistrals_window_is_what_transformers_takes(stated: dict[str, Any], window: int | None) -> None:
    import transformers

    assert transformers.MistralConfig(**stated).sliding_window == window
    values = {"model_type": "mistral", **stated}
    model = huggingface.DIALECT.read(values, Evidence("llama", facts(LLAMA), AXES))
    args, _ = megatron.DIALECT.write(model, AXES, "args")
    assert args.get("window_size") == (None if window is None else (window - 1, 0))
    config, _ = gpt_neox.DIALECT.write(model, AXES, "yml")
    assert config.get("sliding_window_width") == (None if window is None else window - 1)
    if window is None:
        maxtext.DIALECT.write(model, True, False, "yml")
    else:
        with pytest.raises(FastshardError, match=f"sliding_window: expected none, got {window}"):
            maxtext.DIALECT.write(model, True, False, "yml")


def test_a_window_of_megatron_reaches_gpt_neox() -> None:
    args, _ = megatron.DIALECT.write(make_model(window=9), AXES, "args")
    model = megatron.DIALECT.read(args, Evidence("llama", megatron.facts_of(LLAMA), AXES))
    config, _ = gpt_neox.DIALECT.write(model, AXES, "yml")
    assert config["sliding_window_width"] == 8 and config["attention_config"] == [[["flash"], 2]]


def test_classes_of_transformers_are_the_plainest_that_compute_the_model() -> None:
    def kind(**fields: Any) -> str:
        return huggingface.class_of(make_model(**fields)).model_type

    assert kind() == kind(biases=ALL) == "llama"
    assert kind(window=5) == kind(kin="mistral") == "mistral"
    assert kind(biases=QKV) == "qwen2"
    assert kind(qk_norm=True) == kind(qk_norm=True, biases=ATTENTION) == "qwen3"
    assert kind(experts=Experts(2)) == "mixtral"
    assert (
        kind(experts=Experts(2), qk_norm=True) == kind(experts=Experts(2, False), qk_norm=True) == "qwen3_moe"
    )
    for lacking in (
        {"qk_norm": True, "biases": QKV},
        {"experts": Experts(2, False)},
        {"window": 5, "biases": ALL},
    ):
        with pytest.raises(FastshardError):
            kind(**lacking)


@pytest.mark.parametrize("family", [{"num_experts": 4}, {"n_routed_experts": 4, "kv_lora_rank": 8}])
def test_no_list_is_made_of_layers_that_no_model_has(family: dict[str, int]) -> None:
    config = {"num_hidden_layers": 10**12, "mlp_only_layers": [1], "first_k_dense_replace": 1} | family
    settings, _ = megatron_config.read_config_settings({"model_type": "any", **config})
    assert settings["num_layers"] == 10**12 and "moe_layer_freq" not in settings
