"""Damage that no shape shows: exactly the damaged units are named, with the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import transformers
from fastshard.integrations import record
from helpers import cli
from safetensors.torch import load_file, save_file
from tiny_models import model
from trained_models import Tensors, damaged, exchange, make_tokens, trained

TOKENS = make_tokens(4, 16, seed=999)
LAYER = "model.layers.{}.{}.weight"
ALL = ["layers.0", "layers.1", "layers.2"]


def swap_gate_and_up(*layers: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for at in layers:
            exchange(tensors, LAYER.format(at, "mlp.gate_proj"), LAYER.format(at, "mlp.up_proj"))

    return change


def swap_norms(tensors: Tensors) -> None:
    for at in range(3):
        exchange(tensors, LAYER.format(at, "self_attn.q_norm"), LAYER.format(at, "self_attn.k_norm"))


def copy_layer(source: int, to: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        own = f"model.layers.{source}."
        copies = {n.replace(own, f"model.layers.{to}."): t.clone() for n, t in tensors.items() if own in n}
        tensors.update(copies)

    return change


def swap_layers(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith("model.layers.0.")]:
        exchange(tensors, name, name.replace(".0.", ".2.", 1))


def regroup_heads(tensors: Tensors) -> None:
    for name in ("q_proj", "k_proj"):
        tensor = tensors[LAYER.format(1, f"self_attn.{name}")]
        # Halves of each head as pairs: the other rotary convention.
        tensors[LAYER.format(1, f"self_attn.{name}")] = (
            tensor.view(-1, 2, 8, 32).transpose(1, 2).reshape(tensor.shape)
        )


DAMAGE: dict[str, tuple[Callable[[Tensors], object] | None, dict[str, Any], list[str]]] = {
    "nothing": (None, {}, []),
    "gate and up exchanged": (swap_gate_and_up(1), {}, ["layers.1"]),
    "gate and up exchanged in all layers": (swap_gate_and_up(0, 1, 2), {}, ALL),
    "q norm and k norm exchanged": (swap_norms, {}, ALL),
    "a layer copied over another": (copy_layer(0, 2), {}, ["layers.2"]),
    "two layers exchanged": (swap_layers, {}, ["layers.0", "layers.2"]),
    "heads regrouped": (regroup_heads, {}, ["layers.1"]),
    "a norm applied twice": (
        lambda t: t.update({LAYER.format(1, "input_layernorm"): t[LAYER.format(1, "input_layernorm")] ** 2}),
        {},
        ["layers.1"],
    ),
    "a row of the embedding": (lambda t: t["model.embed_tokens.weight"][5].zero_(), {}, ["input_embedding"]),
    "final norm": (lambda t: t["model.norm.weight"].mul_(1.1), {}, ["model.norm"]),
    "a row of the head": (lambda t: t["lm_head.weight"][5].zero_(), {}, ["head"]),
    "another rotary base": (
        None,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ALL,
    ),
    "another epsilon": (None, {"rms_norm_eps": 1e-4}, [*ALL, "model.norm"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_exactly_the_damaged_units_differ(case: str, tmp_path: Path) -> None:
    change, settings, expected = DAMAGE[case]
    compared = fastshard.layers(trained(), damaged(tmp_path / "b", change, **settings), tokens=TOKENS)
    assert sorted(compared.differing) == sorted(expected)
    assert compared.tolerance == 0 and compared.tokens == TOKENS.numel()
    assert {unit.name for unit in compared.units} == {"input_embedding", *ALL, "model.norm", "head", "logits"}
    assert bool(compared.config) is bool(settings)
    layers = [name for name in expected if name.startswith("layers.")]
    found = [f for f in compared.findings if f.code == "FS320"]
    assert len(found) == bool(layers) + len(expected) - len(layers)
    assert compared.ok is not bool(expected)
    # In bfloat16 the same.
    again = fastshard.layers(trained(), tmp_path / "b", tokens=TOKENS, dtype="bf16")
    if case != "another epsilon":
        assert sorted(again.differing) == sorted(expected)


def test_settings_that_no_tensor_shows_are_listed_by_their_keys(tmp_path: Path) -> None:
    other = damaged(tmp_path / "b", rms_norm_eps=1e-4, use_cache=False)
    compared = fastshard.layers(trained(), other, tokens=TOKENS)
    assert compared.config == {"rms_norm_eps": (1e-6, 1e-4)}
    assert "rms_norm_eps" in compared.findings[0].message


def test_the_command_names_units_and_has_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    options = ("--tokens", tmp_path / "tokens.json")
    other = damaged(tmp_path / "b", swap_gate_and_up(0, 1))
    ran = cli("layers", trained(), other, *options)
    assert ran.code == 1
    assert ran.having("FS320", message="layers 0-1 compute a different output")
    assert cli("layers", trained(), trained(), *options).code == 0
    document = cli("layers", trained(), other, *options, "--json", "--exit-zero").doc
    assert (document["differing"], document["verdict"]) == (["layers.0", "layers.1"], "DIFFERENT")
    assert len(document["units"]) == 7


def test_models_of_another_dtype_are_compared_within_rounding(tmp_path: Path) -> None:
    half = tmp_path / "half"
    fastshard.convert(trained(), half, to="hf", dtype="bf16")
    compared = fastshard.layers(trained(), half, tokens=TOKENS)
    assert compared.tolerance == pytest.approx(1e-2) and not compared.differing
    fastshard.convert(damaged(tmp_path / "b", swap_gate_and_up(2)), tmp_path / "other", to="hf", dtype="bf16")
    assert fastshard.layers(trained(), tmp_path / "other", tokens=TOKENS).differing == ["layers.2"]


def test_models_with_another_number_of_layers_are_refused(tmp_path: Path) -> None:
    model("llama", tmp_path / "four")
    with pytest.raises(fastshard.FastshardError, match="different numbers of layers"):
        fastshard.layers(trained(), tmp_path / "four", tokens=TOKENS)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt_neox", "mixtral"])
def test_what_a_trainer_recorded_equals_the_layers_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    trainer = model(name, tmp_path / "hf").train()
    tokens = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    record(trainer, tokens, tmp_path / "layers.safetensors")
    assert trainer.training
    to = "gpt_neox" if name == "gpt_neox" else "megatron:torch_dist" if name == "llama" else "dcp"
    fastshard.convert(tmp_path / "hf", tmp_path / "run", to=to)
    compared = fastshard.layers(tmp_path / "layers.safetensors", tmp_path / "run", vocab_size=200)
    assert [u.name for u in compared.units] == [
        "input_embedding",
        *(f"layers.{at}" for at in range(4)),
        "logits",
    ]
    assert not compared.differing and compared.ok
    assert max(unit.largest for unit in compared.units) < 1e-5


def test_a_record_names_the_layer_that_was_converted_wrongly(tmp_path: Path) -> None:
    trainer = transformers.AutoModelForCausalLM.from_pretrained(trained())
    record(trainer, TOKENS, tmp_path / "layers.safetensors")
    for case in ("gate and up exchanged", "heads regrouped", "another rotary base", "a row of the embedding"):
        change, settings, expected = DAMAGE[case]
        other = damaged(tmp_path / case, change, **settings)
        assert fastshard.layers(tmp_path / "layers.safetensors", other).differing == expected
    head = damaged(tmp_path / "head", lambda t: t["lm_head.weight"][5].zero_())
    assert fastshard.layers(tmp_path / "layers.safetensors", head).differing == ["logits"]


class Reversed(torch.nn.Module):
    """A trainer's model whose hidden states have the length first, and whose layers have another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.AutoModelForCausalLM.from_pretrained(trained())
        self.blocks = torch.nn.ModuleList(Block(layer) for layer in self.inner.model.layers)
        self.inner.model.layers = torch.nn.ModuleList()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        inner = self.inner.model
        hidden = inner.embed_tokens(tokens).transpose(0, 1)
        places = torch.arange(tokens.shape[1])[None]
        rotary = inner.rotary_emb(hidden, places)
        for block in self.blocks:
            hidden, _ = block(hidden, rotary)
        return self.inner.lm_head(inner.norm(hidden)).transpose(0, 1), None


class Block(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, None]:
        out = self.layer(hidden.transpose(0, 1), position_embeddings=rotary, attention_mask=None)
        return out.transpose(0, 1), None


def test_outputs_with_the_length_first_are_put_in_order(tmp_path: Path) -> None:
    record(Reversed(), TOKENS, tmp_path / "layers.safetensors")
    compared = fastshard.layers(tmp_path / "layers.safetensors", trained())
    assert not compared.differing and max(u.largest for u in compared.units) < 1e-5


def test_a_record_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    trainer = transformers.AutoModelForCausalLM.from_pretrained(trained())
    for tokens in (TOKENS[:, :4], TOKENS[0]):
        with pytest.raises(fastshard.FastshardError, match="different numbers of sequences"):
            record(trainer, tokens, tmp_path / "r.safetensors")
    with pytest.raises(fastshard.FastshardError, match="no list of layers"):
        record(torch.nn.Linear(2, 2), TOKENS, tmp_path / "r.safetensors")
    with pytest.raises(fastshard.FastshardError, match="did not run"):
        record(trainer, TOKENS, tmp_path / "r.safetensors", layers=[torch.nn.Identity()])
    assert not (tmp_path / "r.safetensors").exists()
    assert not trainer.model.layers[0]._forward_hooks


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("layers.1"),
        lambda tensors: tensors.pop("tokens"),
        lambda tensors: tensors.update({"layers.1": tensors["layers.1"][:, :3].contiguous()}),
    ],
)
def test_a_damaged_record_is_refused(change: Callable[[Tensors], object], tmp_path: Path) -> None:
    from safetensors import safe_open

    file = tmp_path / "layers.safetensors"
    record(transformers.AutoModelForCausalLM.from_pretrained(trained()), TOKENS, file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    with pytest.raises(fastshard.FastshardError, match="record") as error:
        fastshard.layers(file, trained())
    assert error.value.findings[0].code == "FS211"


@pytest.mark.parametrize(
    "values",
    [
        {"layers.1": torch.zeros(4, 16, 0)},
        {"layers.1": torch.zeros(4, 16, 32, dtype=torch.complex64)},
        {"logits": torch.zeros(4, 16, 3)},
        {"tokens": TOKENS.float()},
        {"tokens": -TOKENS},
        {"tokens": torch.zeros(4, 0, dtype=torch.int64)},
    ],
    ids=["no-width", "complex", "narrow-logits", "float-tokens", "negative-tokens", "no-tokens"],
)
def test_a_record_of_what_is_no_output_proves_nothing(values: Tensors, tmp_path: Path) -> None:
    file = tmp_path / "layers.safetensors"
    record(transformers.AutoModelForCausalLM.from_pretrained(trained()), TOKENS, file)
    metadata = {
        "fastshard.record": json.dumps({"version": "1", "class": "", "layers": 3, "dtype": "float32"})
    }
    save_file(load_file(file) | values, file, metadata)
    with pytest.raises(fastshard.FastshardError, match="record of a trainer") as error:
        fastshard.layers(file, trained())
    assert error.value.findings[0].code == "FS211"


@pytest.mark.parametrize("document", ['{"version": "1", "layers": Infinity}', "[" * 100_000])
def test_a_hostile_record_is_refused(document: str, tmp_path: Path) -> None:
    file = tmp_path / "layers.safetensors"
    save_file({"tokens": TOKENS}, file, {"fastshard.record": document})
    with pytest.raises(fastshard.FastshardError, match="record of a trainer"):
        fastshard.layers(file, trained())


def test_hidden_states_of_another_width_differ(tmp_path: Path) -> None:
    file = tmp_path / "layers.safetensors"
    record(transformers.AutoModelForCausalLM.from_pretrained(trained()), TOKENS, file)
    metadata = {
        "fastshard.record": json.dumps({"version": "1", "class": "", "layers": 3, "dtype": "float32"})
    }
    tensors = load_file(file)
    save_file(tensors | {"layers.1": tensors["layers.1"][..., :3].contiguous()}, file, metadata)
    compared = fastshard.layers(file, trained())
    assert "layers.1" in compared.differing and not compared.ok


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1.0])
def test_a_tolerance_that_is_no_number_is_refused(tolerance: float) -> None:
    with pytest.raises(fastshard.FastshardError, match="tolerance") as error:
        fastshard.layers(trained(), trained(), tokens=TOKENS, tolerance=tolerance)
    assert error.value.findings[0].code == "FS515"


def test_a_record_takes_the_place_of_a_record_alone(tmp_path: Path) -> None:
    trainer = transformers.AutoModelForCausalLM.from_pretrained(trained())
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, weights)
    with pytest.raises(fastshard.FastshardError, match="is not a record"):
        record(trainer, TOKENS, weights)
    assert load_file(weights)["a"].tolist() == [1, 1]
    with pytest.raises(fastshard.FastshardError, match="ends with"):
        record(trainer, TOKENS, tmp_path / "record")
    with pytest.raises(fastshard.FastshardError, match="no such directory"):
        record(trainer, TOKENS, tmp_path / "none" / "r.safetensors")
    for _ in range(2):
        record(trainer, TOKENS, tmp_path / "r.safetensors")


def test_a_record_has_its_own_tokens(tmp_path: Path) -> None:
    file = tmp_path / "layers.safetensors"
    record(transformers.AutoModelForCausalLM.from_pretrained(trained()), TOKENS, file)
    with pytest.raises(fastshard.FastshardError, match="own tokens"):
        fastshard.layers(file, trained(), tokens=TOKENS)


def test_what_the_tokens_do_not_reach_is_not_checked(tmp_path: Path) -> None:
    other = damaged(tmp_path / "b", lambda t: t["model.embed_tokens.weight"][31].zero_())
    tokens = TOKENS[:, :4] % 31
    assert 31 not in tokens
    ran = cli("layers", trained(), other, "--tokens", write_tokens(tmp_path, tokens), json_output=False)
    assert (
        ran.code == 0 and "not checked: whether weights that these tokens do not reach" in ran.err + ran.out
    )


def write_tokens(folder: Path, tokens: torch.Tensor) -> Path:
    file = folder / "tokens.json"
    file.write_text(json.dumps(tokens.tolist()))
    return file
