"""Quantised models against what their config promises: the list of the class, with each weight in its
form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastshard.expected import transformers_process, transformers_worker
from helpers import cli
from quantised_maker import FORMS, Tensors, write

EXPERT, UP = "model.layers.1.mlp.experts.2.", "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def olmoe() -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a model, as save_pretrained writes them."""
    config = transformers.OlmoeConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=4,
        eos_token_id=2,
        architectures=["OlmoeForCausalLM"],
    )
    told = transformers_worker.listed(
        {"config": json.loads(config.to_json_string()), "class": "OlmoeForCausalLM"}
    )
    torch.manual_seed(3)
    return json.loads(config.to_json_string()), {
        name: torch.randn(shape) for name, _, shape in told["tensors"]
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_is_held_against_its_config(
    form: str, olmoe: tuple[dict[str, Any], Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        transformers_process, "answer_of", lambda asked, *_: transformers_worker.listed(asked)
    )
    config, plain = olmoe
    said, weight = FORMS[form]
    tensors: Tensors = {}
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        tensors |= weight(module, *tensor.shape) if module.endswith("_proj") else {name: tensor}

    def made(name: str, content: Tensors) -> Path:
        return write(tmp_path / name, config | {"quantization_config": said}, content)

    ran = cli("verify", made("good", tensors), "--fail-on", "warning")
    assert ran.code == 0 and ran.doc["checked"]["by"].startswith("OlmoeForCausalLM"), ran.out
    # An expert with all that belongs to it, and a norm.
    gone = {
        name: t for name, t in tensors.items() if not name.startswith(EXPERT) and name != "model.norm.weight"
    }
    ran = cli("verify", made("lost", gone))
    lost = {f"{EXPERT}{part}_proj.weight" for part in ("up", "gate", "down")} | {"model.norm.weight"}
    assert ran.code == 3 and {f["tensor"] for f in ran.findings if f["severity"] == "error"} == lost, ran.out
    # One that is whole in itself, and half as high.
    ran = cli("verify", made("half", tensors | weight(UP, 64, 256)))
    (found,) = (f for f in ran.findings if f["severity"] == "error")
    assert found["code"] == "FS201" and found["tensor"].startswith(UP), ran.out
