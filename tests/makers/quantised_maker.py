"""Small models whose weights are quantised, in every form that is judged: names, dtypes and shapes as their
tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
#: Rows and columns of the weights of a layer: edges of blocks of 128 among them.
LINEAR = {
    "self_attn.q_proj": (192, 256),
    "self_attn.o_proj": (256, 192),
    "mlp.up_proj": (320, 256),
    "mlp.down_proj": (256, 320),
}
LAYERS = 3
F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)
    if dtype == F8:
        return torch.randn(shape).to(F8)
    return torch.randint(0, 120, shape).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).add(0.1).to(dtype)


def up(n: int, by: int) -> int:
    return -(-n // by)


def fp8_blocks(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight": codes(o, i, dtype=F8),
        f"{name}.weight_scale_inv": scales(up(o, 128), up(i, 128)),
    }


def fp8_tensor(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight": codes(o, i, dtype=F8),
        f"{name}.weight_scale": scales(),
        f"{name}.input_scale": scales(),
    }


def fp8_v4(name: str, o: int, i: int) -> Tensors:
    return {f"{name}.weight": codes(o, i, dtype=F8), f"{name}.scale": scales(up(o, 128), up(i, 128)).to(E8M0)}


def mxfp8(name: str, o: int, i: int) -> Tensors:
    return {f"{name}.weight": codes(o, i, dtype=F8), f"{name}.weight_scale": codes(o, i // 32)}


def ct_pack(bits: int, symmetric: bool = True) -> Callable[[str, int, int], Tensors]:
    def made(name: str, o: int, i: int) -> Tensors:
        found = {
            f"{name}.weight_packed": codes(o, up(i * bits, 32), dtype=torch.int32),
            f"{name}.weight_scale": scales(o, i // 64, dtype=torch.bfloat16),
            f"{name}.weight_shape": torch.tensor([o, i]),
        }
        if not symmetric:
            found[f"{name}.weight_zero_point"] = codes(up(o * bits, 32), i // 64, dtype=torch.int32)
        return found

    return made


def ct_channel(dtype: torch.dtype) -> Callable[[str, int, int], Tensors]:
    return lambda name, o, i: {
        f"{name}.weight": codes(o, i, dtype=dtype),
        f"{name}.weight_scale": scales(o, 1, dtype=torch.bfloat16),
    }


def ct_nvfp4(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight_packed": codes(o, i // 2),
        f"{name}.weight_scale": scales(o, i // 16, dtype=F8),
        f"{name}.weight_global_scale": scales(1),
        f"{name}.input_global_scale": scales(1),
    }


def ct_mxfp4(name: str, o: int, i: int) -> Tensors:
    return {f"{name}.weight_packed": codes(o, i // 2), f"{name}.weight_scale": codes(o, i // 32)}


def modelopt_nvfp4(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight": codes(o, i // 2),
        f"{name}.weight_scale": scales(o, i // 16, dtype=F8),
        f"{name}.weight_scale_2": scales(),
        f"{name}.input_scale": scales(),
    }


def modelopt_awq(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight": codes(o // 2, i),
        f"{name}.weight_scale": scales(o, i // 64),
        f"{name}.pre_quant_scale": scales(i),
    }


def gptq(bits: int) -> Callable[[str, int, int], Tensors]:
    return lambda name, o, i: {
        f"{name}.qweight": codes(i * bits // 32, o, dtype=torch.int32),
        f"{name}.qzeros": codes(up(i, 64), o * bits // 32, dtype=torch.int32),
        f"{name}.scales": scales(up(i, 64), o, dtype=torch.float16),
        f"{name}.g_idx": torch.arange(i, dtype=torch.int32) // 64,
    }


def awq(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.qweight": codes(i, o // 8, dtype=torch.int32),
        f"{name}.qzeros": codes(i // 64, o // 8, dtype=torch.int32),
        f"{name}.scales": scales(i // 64, o, dtype=torch.float16),
    }


def bnb_nf4(nested: bool) -> Callable[[str, int, int], Tensors]:
    def made(name: str, o: int, i: int) -> Tensors:
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [o, i]}
        n = up(o * i, 64)
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        found = {
            f"{name}.weight": codes(o * i // 2, 1),
            f"{name}.weight.absmax": codes(n) if nested else scales(n),
            f"{name}.weight.quant_map": scales(16),
            f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        if nested:
            found |= {
                f"{name}.weight.nested_absmax": scales(up(n, 256)),
                f"{name}.weight.nested_quant_map": scales(256),
            }
        return found

    return made


def bnb_int8(name: str, o: int, i: int) -> Tensors:
    return {
        f"{name}.weight": codes(o, i, dtype=torch.int8),
        f"{name}.SCB": scales(o),
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def ct(format_: str, bits: int, kind: str, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group",
        "group_size": 64,
    } | more
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
#: Forms by name: quantization_config, and the tensors of one weight.
FORMS: dict[str, tuple[dict[str, Any], Callable[[str, int, int], Tensors]]] = {
    "fp8 blocks": (BLOCKS, fp8_blocks),
    "fp8 V4": (BLOCKS | {"scale_fmt": "ue8m0"}, fp8_v4),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_tensor,
    ),
    "mxfp8": (BLOCKS | {"scale_fmt": "ue8m0"}, mxfp8),
    "ct 4 bit": (ct("pack-quantized", 4, "int"), ct_pack(4)),
    "ct 4 bit asymmetric": (ct("pack-quantized", 4, "int", symmetric=False), ct_pack(4, False)),
    "ct 3 bit": (ct("pack-quantized", 3, "int"), ct_pack(3)),
    "ct int8": (ct("int-quantized", 8, "int", strategy="channel"), ct_channel(torch.int8)),
    "ct fp8": (ct("float-quantized", 8, "float", strategy="channel"), ct_channel(F8)),
    "ct nvfp4": (ct("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16), ct_nvfp4),
    "ct mxfp4": (ct("mxfp4-pack-quantized", 4, "float", group_size=32), ct_mxfp4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8_tensor),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        modelopt_nvfp4,
    ),
    "modelopt awq": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64, "ignore": ["lm_head"]},
        modelopt_awq,
    ),
    "gptq 4 bit": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False},
        gptq(4),
    ),
    "gptq 3 bit": (
        {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": True, "desc_act": True},
        gptq(3),
    ),
    "gptq 8 bit": ({"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True}, gptq(8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, awq),
    "bnb nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb_nf4(False)),
    "bnb nf4 nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb_nf4(True)),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
}


def model(form: str) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a model of an unknown family, all of whose layers are quantised."""
    torch.manual_seed(7)
    said, weight = FORMS[form]
    found = {
        "model.embed_tokens.weight": torch.randn(96, 256).bfloat16(),
        "model.norm.weight": torch.ones(256).bfloat16(),
        "lm_head.weight": torch.randn(96, 256).bfloat16(),
    }
    for layer in range(LAYERS):
        for name, (o, i) in LINEAR.items():
            found |= weight(f"model.layers.{layer}.{name}", o, i)
        found[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(256).bfloat16()
    config = {
        "model_type": "pebble",
        "tie_word_embeddings": False,
        "architectures": ["PebbleForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": LAYERS,
        "vocab_size": 96,
        "quantization_config": said,
    }
    return config, found


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
