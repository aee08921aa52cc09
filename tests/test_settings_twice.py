"""One setting stated twice: under two keys of one config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastshard.models.repeated_settings import ALIASES, find_repeated_settings
from helpers import cli
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    ),
    "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, attention_types=[[["global"], 2]]
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=4, head_dim=8)
    ),
}


def save(folder: Path, kind: str, **config: Any) -> Path:
    """A model as save_pretrained writes it, with other keys in its config."""
    torch.manual_seed(5)
    MODELS[kind]().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **values}


@pytest.mark.parametrize(
    ("kind", "config", "keys"),
    [
        ("gpt2", {"hidden_size": 64}, ("hidden_size", "n_embd")),
        ("gpt2", {"num_hidden_layers": 3}, ("n_layer", "num_hidden_layers")),
        ("gpt2", {"num_attention_heads": 8}, ("n_head", "num_attention_heads")),
        ("gpt2", {"max_position_embeddings": 128}, ("max_position_embeddings", "n_positions")),
        ("bloom", {"num_attention_heads": 8}, ("n_head", "num_attention_heads")),
        ("gpt_neo", {"num_hidden_layers": 4}, ("num_hidden_layers", "num_layers")),
        ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, ("dtype", "torch_dtype")),
        ("llama", {"rope_theta": 5e5}, ("rope_theta", "rope_parameters.rope_theta")),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": rope()},
            ("rope_theta", "rope_scaling.rope_theta"),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ("rope_parameters.rope_type", "rope_scaling.rope_type"),
        ),
        (
            "llama",
            {
                "rope_parameters": rope(rope_type="linear", factor=4.0),
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ("rope_parameters.factor", "rope_scaling.factor"),
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_parameters": rope(partial_rotary_factor=1.0)},
            ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
        ),
        ("gemma3", {"rope_theta": 2e6}, ("rope_theta", "rope_parameters.full_attention.rope_theta")),
        (
            "gemma3",
            {"rope_local_base_freq": 2e4},
            ("rope_local_base_freq", "rope_parameters.sliding_attention.rope_theta"),
        ),
    ],
)
def test_two_keys_of_one_setting_must_agree(
    kind: str, config: dict[str, Any], keys: tuple[str, str], tmp_path: Path
) -> None:
    source = save(tmp_path / "in", kind, **config)
    for command in (
        ("verify", source),
        ("merge", source, tmp_path / "out"),
        ("convert", source, tmp_path / "hf", "--to", "hf"),
    ):
        ran = cli(*command)
        assert ran.code == 1, (command[0], ran.out)
        (found,) = ran.having("FS215", severity="error")
        assert found["file"] == "config.json"
        assert (found["expected"].split(":")[0], found["got"].split(":")[0]) == keys
    assert not (tmp_path / "out").exists() and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {"hidden_size": 32, "num_hidden_layers": 2, "n_ctx": 1024, "max_position_embeddings": 64}),
        ("gpt2", {"hidden_size": None}),
        ("llama", {"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"}),
        ("llama", {"rope_theta": 10000}),
        ("llama", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "su", "rope_type": "longrope", "factor": 2.0}}),
        ("llama", {"head_dim": 8, "quantised_from": {"dtype": "float64"}}),
        ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ],
)  # fmt: skip
def test_keys_that_agree_or_mean_other_things_are_taken(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    source = save(tmp_path / "in", kind, **config)
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0, (command[0], ran.out)
        assert not ran.having("FS215")


def test_a_key_that_the_class_passes_over_is_a_warning(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "llama", n_embd=64)
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert [f["got"] for f in ran.having("FS215")] == ["n_embd: 64"]


def test_parts_of_a_config_are_looked_at_one_by_one() -> None:
    inner = {"model_type": "gpt2", "n_embd": 32, "hidden_size": 64, "dtype": "float32"}
    config = {"model_type": "other", "dtype": "bfloat16", "hidden_size": 16, "a_config": {"b_config": inner}}
    (found,) = find_repeated_settings(config, "config.json")
    assert (found.expected, found.got) == (
        "a_config.b_config.hidden_size: 64",
        "a_config.b_config.n_embd: 32",
    )


def test_code_of_its_own_may_read_its_keys_otherwise() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "hidden_size": 64, "auto_map": {"AutoModel": "net.Net"}}
    assert [finding.severity for finding in find_repeated_settings(config, "config.json")] == ["warning"]


def test_aliases_are_those_of_transformers() -> None:
    for pair, types in ALIASES.items():
        for model_type in types.split():
            if model_type in CONFIG_MAPPING:
                found = CONFIG_MAPPING[model_type].attribute_map
                assert pair in found.items() or pair[::-1] in found.items(), (pair, model_type)


def test_no_config_of_transformers_contradicts_itself() -> None:
    accused = {}
    for model_type in CONFIG_MAPPING:
        try:
            made = CONFIG_MAPPING[model_type]()
        except Exception:
            continue
        if found := find_repeated_settings(json.loads(made.to_json_string(use_diff=False)), "config.json"):
            accused[model_type] = found
    assert not accused
