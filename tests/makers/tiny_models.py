"""Tiny models, most of the Llama kind, made by transformers, with weights that show where they belong."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "phi3_part_rotated": Phi3Config(
        **SIZES,
        # Wider than what tests put through it: Megatron's local attention has none.
        sliding_window=32,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
}
#: Models of other kinds, which other layouts hold.
OTHERS = {
    "gpt_neox": GPTNeoXConfig(
        **{k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


def model(name: str, folder: Path) -> Any:
    """One of these models, saved in a folder."""
    torch.manual_seed(3)
    # A copy: `to` and `save_pretrained` write a model's dtype into its config, which is all tests' here.
    made = AutoModelForCausalLM.from_config(deepcopy((MODELS | OTHERS)[name]))
    with torch.no_grad():
        for parameter in made.parameters():
            # Norms and biases that are not one and zero show where they belong.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    return made.eval()
