"""Models with quantised weights, loaded by transformers after --dtype and as they are: the logits must be the
same bits. One of torchao, whose values are not made, is merged as it is.

    python tests/trials/dequantised_models.py [--packages DIR]

Needs compressed-tensors, bitsandbytes and torchao (DIR is put before the path of modules).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "makers"))
from quantised_maker import FORMS

Tensors = dict[str, torch.Tensor]
#: Forms of the maker that transformers loads on the CPU, with compressed-tensors.
_MADE = ("ct 4 bit", "ct nvfp4")


def saved(of: transformers.PreTrainedModel, folder: Path) -> tuple[dict[str, Any], Tensors]:
    of.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], said: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def quantised(tensors: Tensors, made: Callable[[str, torch.Tensor], Tensors]) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        found |= made(name.removesuffix(".weight"), tensor) if "_proj" in name else {name: tensor}
    return found


def fp8(name: str, tensor: torch.Tensor) -> Tensors:
    o, i = tensor.shape
    scale = torch.rand(-(-o // 128), -(-i // 128)) * 0.01 + 0.001
    each = scale.repeat_interleave(128, 0)[:o].repeat_interleave(128, 1)[:, :i]
    codes = (tensor.float() / each).clamp(-400, 400).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def nf4(name: str, tensor: torch.Tensor) -> Tensors:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(tensor, blocksize=64, compress_statistics=True, quant_type="nf4")
    return {f"{name}.weight": codes} | {
        f"{name}.weight.{key}": t for key, t in state.as_dict(packed=True).items()
    }


def blocks(tensors: Tensors) -> Tensors:
    """The experts of gpt-oss in MXFP4."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.ndim == 3:
            experts, i, o = tensor.shape
            found[f"{name}_blocks"] = torch.randint(0, 256, (experts, o, i // 32, 16), dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(115, 122, (experts, o, i // 32), dtype=torch.uint8)
        else:
            found[name] = tensor
    return found


def models(root: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """Names, folders, and how transformers is asked for values."""
    llama = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config, plain = saved(transformers.LlamaForCausalLM(llama).bfloat16(), root / "llama")
    oss = transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    of_oss, experts = saved(transformers.GptOssForCausalLM(oss).bfloat16(), root / "oss")
    of_blocks = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    of_bits = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    found: list[tuple[str, Path, dict[str, Any]]] = [
        (
            "fp8 blocks",
            write(root / "fp8", config, of_blocks, quantised(plain, fp8)),
            {
                "quantization_config": transformers.FineGrainedFP8Config(
                    dequantize=True, weight_block_size=(128, 128)
                )
            },
        ),
        ("nf4, nested", write(root / "nf4", config, of_bits, quantised(plain, nf4)), {}),
        (
            "MXFP4",
            write(
                root / "mxfp4",
                of_oss,
                {"quant_method": "mxfp4", "modules_to_not_convert": skipped},
                blocks(experts),
            ),
            {"quantization_config": transformers.Mxfp4Config(dequantize=True)},
        ),
    ]
    for number, form in enumerate(_MADE):
        said, weight = FORMS[form]
        tensors = quantised(plain, lambda name, t, weight=weight: weight(name, *t.shape))
        found.append((form, write(root / f"made{number}", config, said, tensors), {}))
    return found


def torchao(root: Path) -> list[tuple[str, Path]]:
    """The Llama in forms of torchao, as transformers saves it."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    found = []
    for kind in (Int8WeightOnlyConfig, Float8WeightOnlyConfig):
        asked = transformers.TorchAoConfig(kind(version=2))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(root / "llama", quantization_config=asked, dtype=torch.bfloat16)
        model.save_pretrained(root / kind.__name__, max_shard_size="1MB")
        found.append((f"torchao {kind.__name__}", root / kind.__name__))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", help="folder of packages")
    options = parser.parse_args()
    if options.packages:
        sys.path.insert(0, options.packages)
    torch.manual_seed(5)
    wrong = 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(12)[None]
    with tempfile.TemporaryDirectory() as place:
        of_values = [(*model, {"dtype": "bf16"}) for model in models(Path(place))]
        kept = [(name, folder, {}, {"max_shard_size": "500KB"}) for name, folder in torchao(Path(place))]
        for name, folder, asked, options in [*of_values, *kept]:
            out = Path(place) / f"{folder.name}_merged"
            fastshard.merge(folder, out, **options)
            ours, info = load(out, output_loading_info=True)
            same = torch.equal(ours(ids).logits.float(), load(folder, **asked)(ids).logits.float())
            messages = {kind: told for kind, told in info.items() if told}
            wrong += not same or bool(messages)
            print(f"{name}: logits {'equal' if same else 'DIFFER'}, {messages or 'no message'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
