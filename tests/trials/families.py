"""Models of many families as transformers saves them: none may be accused of holding copies.

    python tests/trials/families.py --count 40 --folder /dev/shm/families

A small model of each family of causal language models that transformers can make without a download, with random
weights in every tensor, saved as one file and in shards.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastshard
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "ffn_dim": 96, "n_positions": 64, "max_position_embeddings": 64, "vocab_size": 160, "head_dim": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "decoder_layers": 3, "encoder_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(model_type: str) -> Any:
    """A small model; None where the family cannot be made so."""
    with contextlib.suppress(Exception):
        config = transformers.AutoConfig.for_model(model_type)
        for key, value in SMALL.items():
            if hasattr(config, key):
                setattr(config, key, value)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:3]
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if size > 20_000_000:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.config.validate()
        return model
    return None


def accused(path: Path) -> list[str]:
    findings = fastshard.verify(path)
    return [f"{f.code} {f.severity}: {f.message}" for f in findings if f.code in ("FS303", "FS304")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40, metavar="N", help="families (default: 40)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "families", metavar="DIR"
    )
    a = parser.parse_args()
    tried, bad = [], 0
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        model = made(model_type) if len(tried) < a.count else None
        if model is None:
            continue
        tried.append(model_type)
        for shards in ("1GB", "100KB"):
            place = a.folder / f"{model_type}-{shards}"
            shutil.rmtree(place, ignore_errors=True)
            model.save_pretrained(place, max_shard_size=shards)
            for line in accused(place):
                bad += 1
                print(f"{model_type}, shards of {shards}: {line}")
            shutil.rmtree(place)
    print(f"{len(tried)} families, accused: {bad}: {' '.join(tried)}")
    shutil.rmtree(a.folder, ignore_errors=True)
    return 1 if bad or len(tried) < a.count else 0


if __name__ == "__main__":
    sys.exit(main())
