"""Models of many families, run layer by layer: the logits are those of from_pretrained, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import transformers
from fastshard.evaluation.layerwise_model import LayerwiseModel

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: GPT-2's words for sizes.
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64, "n_inner": 48}
MIXTURE = SIZES | {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: Heads whose keys and values are compressed.
LATENT = MIXTURE | {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8}
BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
#: Configs by model type: dense, mixtures of experts, state spaces and hybrids, tied and untied.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi",
            "phi3",
            "falcon",
            "olmo",
            "olmo2",
            "granite",
            "cohere",
            "cohere2",
            "starcoder2",
            "stablelm",
            "nemotron",
            "persimmon",
            "glm",
            "glm4",
            "ernie4_5",
            "smollm3",
            "exaone4",
            "arcee",
            "seed_oss",
            "nanochat",
            "apertus",
            "recurrent_gemma",
            "rwkv",
            "diffllama",
            "doge",
            "bitnet",
            "lfm2",
            "mpt",
            "xglm",
            "opt",
            "bloom",
        ],
        SIZES,
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neox", "biogpt"), SIZES | GPT2),
    **dict.fromkeys(
        [
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "olmoe",
            "granitemoe",
            "glm4_moe",
            "gpt_oss",
            "llama4_text",
            "minimax",
            "jamba",
            "jetmoe",
            "phimoe",
            "ernie4_5_moe",
        ],
        MIXTURE,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    "hunyuan_v1_moe": MIXTURE | {"head_dim": 8},
    "ctrl": SIZES | {"n_embd": 32, "n_layer": 3, "n_head": 4, "dff": 48},
    "mamba": SIZES,
    "falcon_mamba": SIZES,
    "mamba2": SIZES | MAMBA2,
    "bamba": SIZES | BAMBA,
}
#: What every run tries: a tied one, fused experts with a persistent bias, a state space, one without a class
#: of layers, and one that asks where its embedding lies.
CHOSEN = ("gemma2", "glm4_moe", "mamba2", "ctrl", "llama4_text")


def make(family: str, folder: Path) -> tuple[Any, torch.Tensor]:
    """A model with random weights, saved; and tokens for it."""
    kind = transformers.CONFIG_MAPPING[family]
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(kind(**FAMILIES[family])).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
        for name, buffer in model.named_buffers():
            # Routers' biases are saved, and zero when they are made.
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.rand_like(buffer))
    model.save_pretrained(folder)
    return model, torch.randint(3, 90, (2, 16))


def compute(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    # Where weights lie in memory decides how a processor adds: not where a mapped file has them.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    "family", [f if f in CHOSEN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_logits_equal_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    model, tokens = make(family, tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    layerwise = LayerwiseModel(fastshard.open(tmp_path, to="hf"))
    assert torch.equal(layerwise.run(tokens), compute(loaded, tokens))
    # A second run loads everything again, and nothing but the embedding stays in between.
    assert torch.equal(layerwise.run(tokens), compute(loaded, tokens))
    for unit in layerwise.units:
        own = [p for n, p in unit.module.named_parameters() if n in unit.released]
        assert unit.stays or all(p.is_meta for p in own)
    assert len(layerwise.layers) == (0 if family in ("ctrl", "biogpt") else model.config.num_hidden_layers)


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_logits_in_bfloat16_equal_those_of_from_pretrained(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It knows which tensors the class computes with in float32.
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    model, tokens = make(family, tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    layerwise = LayerwiseModel(fastshard.open(tmp_path, to="hf", dtype="bf16"))
    assert torch.equal(layerwise.run(tokens), compute(loaded, tokens))


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_load_model_reads_numbers_that_json_lacks(family: str, tmp_path: Path) -> None:
    model, tokens = make(family, tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert torch.equal(compute(fastshard.load_model(tmp_path), tokens), compute(model, tokens))
