"""Every layout table of Hugging Face against the list that transformers makes of the same config: neither
names more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import transformers
from fastshard.expected import expected_list, from_transformers, transformers_worker
from fastshard.layouts import tables
from helpers import TYPES_WITH_OWN_CODE
from safetensors.torch import save_file

#: What makes a config small, in every class that has the key.
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "moe_intermediate_size": 10,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 5,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 8,
    "head_dim": 8,
    "shared_expert_intermediate_size": 14,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: The same of towers that see.
TOWER: dict[str, Any] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
#: Where these lie.
TOWERS = ("model.visual.", "model.vision_tower.", "model.mm_projector.")
#: Three configs of each: sizes alone, others of everything that a config may turn, and the other way of
#: tying.
OTHERS: dict[str, dict[str, Any]] = {
    "small": {},
    "turned": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "qkv_bias": False,
        "first_k_dense_replace": 2,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "use_parallel_residual": False,
    },
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 2, "intermediate_size": 64},
}
#: transformers 5.24 lists the layers of its text model, and saves them, under the name of the tower's layers.
MISNAMED = {"kimi_k25"}
TYPES = sorted(
    {kind for name in tables.names() if name.startswith("hf.") for kind in tables.table(name).model_types}
    - TYPES_WITH_OWN_CODE
    - MISNAMED
)


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_table_and_a_list_say_the_same(model_type: str, which: str, tmp_path: Path) -> None:
    kind = transformers.CONFIG_MAPPING[model_type]
    known, small = kind().to_dict(), SMALL | OTHERS[which]
    if model_type == "deepseek_v32":
        # Its queries always come from a latent.
        small["q_lora_rank"] = 6
    keys: dict[str, Any] = {key: value for key, value in small.items() if key in known}
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if (text := known.get("text_config")) is not None:
        # A text model beside a tower that sees.
        keys["text_config"] = {key: value for key, value in small.items() if key in text}
        keys["text_config"]["model_type"] = text["model_type"]
        keys["vision_config"] = {key: n for key, n in TOWER.items() if key in known["vision_config"]}
        classes = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    config = json.loads(kind(**keys).to_json_string(use_diff=False))
    config["architectures"] = [classes.__name__]
    told = transformers_worker.listed(
        {"config": from_transformers.cleaned(config), "class": classes.__name__}
    )
    listed = expected_list.from_document(expected_list.document_of(json.loads(json.dumps(told))), "memory")

    torch.manual_seed(1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {tensor.name: torch.randn(tensor.shape) for tensor in listed},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    planned = fastshard.plan(fastshard.open(tmp_path))
    assert planned.source.binding.layout in tables.names()
    # transformers writes no layer that predicts further tokens, whatever the config promises.
    assert [f for f in planned.findings if f.severity != "note" and f.code != "FS116"] == []
    # And each that the table may not miss is listed.
    table = tables.table(planned.source.binding.layout or "")
    text = [tensor.name for tensor in listed if not tensor.name.startswith(TOWERS)]
    assert all(table.rule_of(name) is not None for name in text)
