"""What tables say of the classes of transformers: held against transformers itself, and refused where it is
no such thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastshard
import pytest
import tomlkit
import torch
import transformers
from fastshard import FastshardError
from fastshard.layouts import tables
from fastshard.layouts.declaration import Evidence
from fastshard.layouts.model_classes import KEYS
from fastshard.models import huggingface
from fastshard.models.model import Attention, Block, Experts, Model, Rope
from fastshard.models.tensor_words import WORDS
from helpers import TYPES_WITH_OWN_CODE

CLASSES = tables.classes()
OF_TRANSFORMERS = sorted(CLASSES.keys() - TYPES_WITH_OWN_CODE)
SECTION = """
[model.pebble]
kind = "Pebble"
architecture = "LlamaForCausalLM"
keys = ["rms_norm_eps", "rope_theta", "num_key_value_heads", "head_dim"]
"""
PEBBLE = """
layout = "mine.pebble"
family = "llama"
extends = "hf.llama"
drop = ["attention.*.bias", "attention.?_norm.*", "mlp.*.bias"]
[config]
model_type = ["pebble"]
"""


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(tables, "_parsed", {})
    yield


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_a_section_is_of_a_class_of_transformers(kind: str) -> None:
    of, config = CLASSES[kind], transformers.AutoConfig.for_model(kind)
    made = getattr(transformers, of.architecture)
    assert made.config_class is type(config)
    stated = config.to_dict()
    ropes = stated.get("rope_parameters") or {}
    stated |= ropes | (ropes.get("full_attention") or {})
    # What transformers 5 reads under these names it keeps under others; a head_dim is read wherever it is
    # stated.
    other = {"rotary_emb_base", "rotary_pct", "num_local_experts", "head_dim", "rope_local_base_freq"}
    # Of layers that it leaves out when it saves.
    other |= {"num_nextn_predict_layers"}
    assert set(of.keys) - other <= set(stated) | set(type(config).attribute_map)
    assert set(of.null) <= stated.keys()


def kept_names(layout: str) -> list[str]:
    """The tensors that a table keeps in their dtype, those of the tables that it extends among them."""
    text = (Path(tables.__file__).parent / f"{layout}.toml").read_text()
    table = tomlkit.parse(text).unwrap()
    own = [rule["name"] for rule in table.get("tensor", ()) if rule.get("keep_dtype")]
    return own + (kept_names(table["extends"]) if "extends" in table else [])


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_what_transformers_computes_with_in_float32_keeps_its_dtype(kind: str) -> None:
    of = CLASSES[kind]
    words = set(getattr(transformers, of.architecture)._keep_in_fp32_modules_strict or ())
    kept = kept_names(of.layout)
    assert {word for word in words if not any(name.endswith(f".{word}") for name in kept)} == set()
    words |= set(WORDS["kept"])
    assert [name for name in kept if not name.endswith(tuple(f".{word}" for word in words))] == []


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_what_a_config_leaves_out_means_what_it_does_in_transformers(kind: str) -> None:
    whole = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
    # Both keys hold one thing.
    whole.pop("layer_types", None)

    def read(config: dict[str, Any]) -> Model:
        model = huggingface.DIALECT.read(config, Evidence(CLASSES[kind].family))
        return replace(model, config=None, rope=replace(model.rope, scaling={}))

    for key in whole.keys() - {"model_type"}:
        assert read({name: value for name, value in whole.items() if name != key}) == read(whole), key


def test_every_key_has_a_value() -> None:
    """Of a model that has all that there is."""
    block = Block(Attention(window=9, indexed=3, scores_cap=50.0, divisor=64), Experts(2))
    rope = Rope(10_000)
    model = Model(
        "somewhere", "llama", eps=1e-5, rope=rope, max_positions=64, blocks=(block,), logits_cap=30.0
    )
    axes = dict.fromkeys([*"VHFLgrdEQKMSCku", "nope", "rope", "vd", "kd", "ud", "ih", "ic", "ix"], 2)
    for key in KEYS:
        of = replace(CLASSES["llama"], keys=[key])
        config, _ = huggingface.write(model, of, axes, "config.json")
        assert config.pop(key) is not None and not config.keys() & KEYS


@pytest.mark.parametrize(
    ("entry", "value", "named", "expected"),
    [
        ("order", '"first"', "[model.pebble]: order", "an integer"),
        ("order", "true", "[model.pebble]: order", "an integer"),
        ("biases", '["qkv"]', "[model.pebble]: biases", "a list of lists of qkv, out, mlp, mlp_out"),
        ("biases", '[["query"]]', "[model.pebble]: biases", "a list of lists of qkv, out, mlp, mlp_out"),
        ("biases", "[]", "[model.pebble]: biases", "a list of lists of qkv, out, mlp, mlp_out"),
        ("window", '"some"', "[model.pebble]: window", "one of all, named, set, unknown"),
        ("qk_norm", "1", "[model.pebble]: qk_norm", "true or false"),
        ("scalings", "[1]", "[model.pebble]: scalings", "a list of texts"),
        ("null", '"eos_token_id"', "[model.pebble]: null", "a list of texts"),
        ("defaults", "[]", "[model.pebble]: defaults", "a table"),
        ("colour", '"red"', "[model.pebble]", "one of kind, architecture, keys"),
        ("keys", '["hidden_size"]', "[model.pebble]: keys", "a list of attention_bias"),
        ("keys", None, "[model.pebble]: keys", "a list of attention_bias"),
        (
            "own_keys",
            '{ bias = "hidden_size" }',
            "[model.pebble]: own_keys",
            "a table of keys by their own names",
        ),
        ("own_keys", '["attention_bias"]', "[model.pebble]: own_keys", "a table of keys by their own names"),
        ("attentions", '["softmax"]', "[model.pebble]: attentions", "a list of heads, latent, delta"),
        ("attentions", "[]", "[model.pebble]: attentions", "a list of heads, latent, delta"),
        ("kind", '""', "[model.pebble]: kind", "a text"),
        ("pebble", "1", "[model.granite]", "one of pebble, which [config] names"),
        ("pebble", "2", "[model.pebble]", "a table"),
    ],
)
@pytest.mark.usefixtures("own_tables")
def test_an_entry_that_is_none_is_named(
    entry: str, value: str | None, named: str, expected: str, tmp_path: Path
) -> None:
    lines = [line for line in SECTION.splitlines() if not line.startswith(f"{entry} =")]
    text = PEBBLE + "\n".join([*lines, "" if value is None else f"{entry} = {value}"])
    if entry == "pebble":
        text = PEBBLE + (
            SECTION.replace("model.pebble", "model.granite") if value == "1" else "[model]\npebble = 2\n"
        )
    (tmp_path / "pebble.toml").write_text(text)
    with pytest.raises(FastshardError) as error:
        tables.register(tmp_path / "pebble.toml")
    (finding,) = error.value.findings
    assert (finding.code, finding.file) == ("FS210", str(tmp_path / "pebble.toml"))
    assert finding.message == f"layout mine.pebble: {named}"
    assert finding.expected is not None and finding.expected.startswith(expected)
    assert "mine.pebble" not in tables.names()


@pytest.mark.parametrize("how", ["registered", "given"])
@pytest.mark.usefixtures("own_tables")
def test_a_table_of_ones_own_says_what_its_models_compute(how: str, tmp_path: Path) -> None:
    """Without a section no other framework is told."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "in")
    stated = json.loads((tmp_path / "in/config.json").read_text()) | {"model_type": "pebble"}
    (tmp_path / "in/config.json").write_text(json.dumps(stated))
    file, options = tmp_path / "pebble.toml", {}
    for section in ("", SECTION):
        file.write_text(PEBBLE + section)
        if how == "registered":
            tables.register(file)
        else:
            options = {"layout": str(file)}
        try:
            fastshard.convert(tmp_path / "in", tmp_path / "neox", to="gpt_neox", **options)
        except FastshardError as error:
            assert (section, error.code) == ("", "FS514")
    fastshard.convert(tmp_path / "neox", tmp_path / "out", to="hf", vocab_size=40)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
