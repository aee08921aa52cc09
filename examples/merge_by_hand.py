"""Merges the files of a GPT-NeoX run as the usual script does: `python examples/merge_by_hand.py STEP CONFIG
OUT`.

It looks at nothing. The README shows what comes of that. Needs torch and safetensors.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

NAMES = {"mlp.linear1": "mlp.dense_h_to_4h", "mlp.linear2": "mlp.dense_4h_to_h"}


def main(step: str, config: str, out: str) -> None:
    """Loads all ranks of a layer, joins each tensor, renames it, and saves the model."""
    about = json.loads(Path(config).read_text())
    layers = about["num_hidden_layers"]
    outer = {0: "gpt_neox.embed_in", layers + 3: "gpt_neox.final_layer_norm", layers + 4: "embed_out"}
    model = {}
    for first in sorted(Path(step).glob("layer_*-model_00-*.pt")):
        ranks = [
            torch.load(file)
            for file in sorted(first.parent.glob(first.name.replace("model_00", "model_[0-9][0-9]")))
        ]
        layer = int(re.findall(r"\d+", first.name)[0])
        for key in ranks[0]:
            parts = [rank[key] for rank in ranks]
            module, kind = key.rsplit(".", 1)
            if "norm" in module:
                whole = parts[0]
            elif module in ("attention.dense", "mlp.linear2"):
                whole = torch.cat(parts, dim=1) if kind == "weight" else sum(parts)
            else:
                whole = torch.cat(parts)
            if layer in outer:
                model[f"{outer[layer]}.{kind}"] = whole[: about["vocab_size"]].contiguous()
            else:
                model[f"gpt_neox.layers.{layer - 2}.{NAMES.get(module, module)}.{kind}"] = whole
    Path(out).mkdir()
    save_file(model, Path(out) / "model.safetensors", {"format": "pt"})
    shutil.copy(config, out)
    print(f"saved {len(model)} tensors to {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
