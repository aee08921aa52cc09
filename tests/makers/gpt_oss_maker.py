"""Tiny models of gpt-oss, by transformers: sinks, windows in every second layer, experts with biases, which
may be in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # Fewer tokens than the tests' text has.
    "sliding_window": 5,
    "max_position_embeddings": 64,
}
#: As gpt-oss's own config.json has it, for shorter texts.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def model(**changes: Any) -> GptOssForCausalLM:
    """A model whose parameters, sinks and biases too, differ from what they begin with.

    Some gates and ups are beyond the limit.
    """
    torch.manual_seed(5)
    made = GptOssForCausalLM(GptOssConfig(**{**SIZES, "rope_parameters": YARN, **changes})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scale = 2.0 if "experts.gate_up" in name else 0.3
            parameter.add_(torch.randn_like(parameter) * scale)
    return made


def save_mxfp4(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a model with experts in MXFP4, as it is published, and return the values that it stands for."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **changes}
    model(**sizes).to(torch.bfloat16).save_pretrained(folder)
    values = load_file(folder / "model.safetensors")
    stored = {}
    generator = torch.Generator().manual_seed(5)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in sorted(values):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name]
            continue
        experts, inputs, outputs = values[name].shape
        codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
        powers = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=generator)
        # The first of two elements has the lower half of a byte.
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_blocks"] = packed.to(torch.uint8).reshape(experts, outputs, inputs // 32, 16)
        stored[f"{name}_scales"] = powers.to(torch.uint8)
        scaled = numbers[codes] * torch.exp2(powers - 127.0).repeat_interleave(32, -1)
        values[name] = scaled.transpose(1, 2).contiguous().to(torch.bfloat16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return values
