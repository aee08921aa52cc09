"""Quantised weights of which no config says that they are, and what other models have that looks like
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli
from quantised_maker import FORMS, LAYERS, LINEAR, Tensors, codes, model, scales, write
from safetensors.torch import save_file

AT = "model.layers.1.mlp.up_proj"
#: Words of the finding, by the beginning of the form's name.
CALLED = {
    "fp8": "fp8",
    "mxfp8": "fp8",
    "ct 4": "packed integers of compressed-tensors",
    "ct 3": "packed integers of compressed-tensors",
    "ct int8": "int8 of compressed-tensors",
    "ct fp8": "fp8",
    "ct nvfp4": "NVFP4 of compressed-tensors",
    "ct mxfp4": "MXFP4 of compressed-tensors",
    "modelopt fp8": "fp8",
    "modelopt nvfp4": "NVFP4 of ModelOpt",
    "modelopt awq": "4 bit AWQ of ModelOpt",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bnb nf4": "nf4 of bitsandbytes",
    "bnb int8": "int8 of bitsandbytes",
    "mlx": "MLX",
    "mxfp4": "MXFP4",
}
#: What asks for the tensors of a model.
COMMANDS = (
    ["verify"],
    ["merge", "out"],
    ["merge", "out", "--dtype", "bf16"],
    ["convert", "out", "--to", "hf"],
    ["convert", "out", "--to", "hf", "--dtype", "f32"],
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}


def bare(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "quantization")}


def mlx() -> tuple[dict[str, Any], Tensors]:
    """A model of MLX: words of 32 bits, scales and biases."""
    config, tensors = model("fp8 blocks")
    found = {n: t for n, t in tensors.items() if not n.startswith("model.layers.") or "layernorm" in n}
    for layer in range(LAYERS):
        for name, (o, i) in LINEAR.items():
            at = f"model.layers.{layer}.{name}"
            found[f"{at}.weight"] = codes(o, i // 8, dtype=torch.int32).view(torch.uint32)
            found[f"{at}.scales"] = scales(o, i // 64, dtype=torch.bfloat16)
            found[f"{at}.biases"] = scales(o, i // 64, dtype=torch.bfloat16)
    return bare(config) | {"quantization": {"group_size": 64, "bits": 4}}, found


def mxfp4() -> tuple[dict[str, Any], Tensors]:
    """Experts as gpt-oss has them."""
    config, tensors = model("fp8 blocks")
    found = {n: t for n, t in tensors.items() if not n.startswith("model.layers.") or "layernorm" in n}
    for layer in range(LAYERS):
        for name, (o, i) in {"gate_up_proj": (64, 256), "down_proj": (256, 32)}.items():
            at = f"model.layers.{layer}.mlp.experts.{name}"
            found[f"{at}_blocks"], found[f"{at}_scales"] = codes(4, o, i // 32, 16), codes(4, o, i // 32)
    return bare(config) | {"quantization_config": {"quant_method": "mxfp4"}}, found


MAKERS = {form: lambda form=form: model(form) for form in FORMS} | {"mlx": mlx, "mxfp4": mxfp4}


def errors(*argv: object) -> list[dict[str, Any]]:
    return [f for f in cli(*argv).findings if f["severity"] == "error"]


def assert_refused_everywhere(folder: Path, out: Path, *words: str) -> None:
    """That each command names the same one finding and leaves nothing."""
    for verb, *rest in COMMANDS:
        ran = cli(verb, folder, *(out if one == "out" else one for one in rest))
        assert ran.code == 1 and not out.exists(), (verb, rest, ran.out)
        found = [f for f in ran.findings if f["severity"] == "error" and f["code"] == "FS215"]
        assert len(found) == 1, (verb, rest, ran.out)
        assert all(word in found[0]["message"] + found[0]["help"] for word in (*words, "quantization_config"))


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("form", MAKERS)
def test_weights_whose_config_is_lost_are_refused(
    form: str, off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off:
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    config, tensors = MAKERS[form]()
    called = next(word for start, word in CALLED.items() if form.startswith(start))
    assert_refused_everywhere(write(tmp_path / "in", bare(config), tensors), tmp_path / "out", called)
    # The same where a table and transformers know the class.
    folder = write(tmp_path / "llama", LLAMA, tensors)
    for verb, *rest in COMMANDS[:3]:
        ran = cli(verb, folder, *(tmp_path / "out" if one == "out" else one for one in rest))
        found = [f for f in ran.findings if f["severity"] == "error"]
        assert found and found[0]["code"] == "FS215" and called in found[0]["message"], ran.out
        assert ran.code == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["gptq 4 bit", "awq", "modelopt nvfp4", "mlx", "bnb int8"])
def test_a_statement_anywhere_counts(form: str, tmp_path: Path) -> None:
    config, tensors = MAKERS[form]()
    content = config.get("quantization_config", config.get("quantization"))
    inner = {key: value for key, value in content.items() if key != "quant_method"}
    name = {
        "gptq 4 bit": "quantize_config.json",
        "awq": "quant_config.json",
        "modelopt nvfp4": "hf_quant_config.json",
    }.get(form)
    if name is not None:
        folder = write(tmp_path / "file", bare(config), tensors)
        (folder / name).write_text(json.dumps({"quantization": inner} if name.startswith("hf") else inner))
        assert cli("verify", folder).code == 0
    # In the header of the file.
    folder = write(tmp_path / "header", bare(config), tensors)
    header = {"format": "pt", "quantization" if form == "mlx" else "quantization_config": json.dumps(content)}
    save_file(tensors, folder / "model.safetensors", header)
    assert cli("verify", folder).code == 0
    # In a part of the config, as models with a tower have it.
    key = "quantization" if form == "mlx" else "quantization_config"
    assert (
        cli("verify", write(tmp_path / "part", bare(config) | {"text_config": {key: content}}, tensors)).code
        == 0
    )


def test_a_file_that_says_itself_what_its_codes_are_needs_no_config(tmp_path: Path) -> None:
    config, tensors = model("bnb nf4")
    whole = write(tmp_path / "whole", config, tensors)
    assert cli("merge", whole, tmp_path / "values", "--dtype", "bf16").code == 0
    folder = write(tmp_path / "single", config, tensors)
    (folder / "config.json").unlink()
    assert cli("merge", folder, tmp_path / "kept").code == 0
    assert cli("diff", folder, tmp_path / "kept").code == 0
    # With a dtype the values are those of the record, never rounded maxima.
    assert cli("merge", folder, tmp_path / "out", "--dtype", "bf16").code == 0
    assert cli("diff", tmp_path / "values", tmp_path / "out").code == 0
    record = f"{AT}.weight.absmax"
    save_file({n: t for n, t in tensors.items() if n != record}, folder / "model.safetensors")
    assert [(f["code"], f["tensor"]) for f in errors("verify", folder)] == [("FS102", record)]


@pytest.mark.parametrize("how", ["tensor", "header", "marker"])
def test_what_comfyui_says_counts(how: str, tmp_path: Path) -> None:
    one = {
        "blocks.0.fc1.weight": codes(64, 32),
        "blocks.0.fc1.weight_scale": codes(64, 4, dtype=torch.float8_e4m3fn),
        "blocks.0.fc1.weight_scale_2": scales(),
        "blocks.0.norm.weight": torch.ones(64),
    }
    header = {}
    if how == "tensor":
        one["blocks.0.fc1.comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    elif how == "header":
        header = {
            "_quantization_metadata": json.dumps(
                {"format_version": "1.0", "layers": {"blocks.0.fc1": {"format": "nvfp4"}}}
            )
        }
    else:
        one["scaled_fp8"] = torch.zeros(2)
    file = tmp_path / "unet.safetensors"
    save_file(one, file, header)
    assert cli("verify", file).code == 0
    assert cli("merge", file, tmp_path / "kept").code == 0
    # No scale is rounded.
    assert (
        cli("merge", file, tmp_path / "out", "--dtype", "bf16").code == 2 and not (tmp_path / "out").exists()
    )
    save_file({n: t for n, t in one.items() if not n.endswith(("comfy_quant", "scaled_fp8"))}, file)
    assert [f["code"] for f in errors("verify", file)] == ["FS215"]


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("form", MAKERS)
def test_companions_without_their_weight_are_named(
    form: str, off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off:
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    config, tensors = MAKERS[form]()
    at = "model.layers.1.mlp.experts.gate_up_proj" if form == "mxfp4" else AT
    code = next(n for n in tensors if n.startswith(at))
    role = code.removeprefix("model.layers.1")
    # Those of one weight, and those of a role in all layers, which no other layer tells.
    for n, gone in enumerate(({code}, {name for name in tensors if name.endswith(role)})):
        folder = write(tmp_path / str(n), config, {n: t for n, t in tensors.items() if n not in gone})
        ran = cli("verify", folder)
        assert ran.code == 3 and {f["tensor"] for f in ran.findings if f["code"] == "FS102"} == gone, ran.out
        assert cli("merge", folder, tmp_path / "out").code == 3 and not (tmp_path / "out").exists()


def test_plain_models_with_such_names_are_no_quantised_ones(tmp_path: Path) -> None:
    plain = {n: t for n, t in model("fp8 blocks")[1].items() if not n.startswith("model.layers.")}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, (o, i) in LINEAR.items():
            plain[f"{at}.{name}.weight"] = torch.randn(o, i).bfloat16()
        plain |= {
            f"{at}.self_attn.q_scale": torch.ones(4),
            f"{at}.self_attn.k_scale": torch.ones(4),
            f"{at}.layer_scale": torch.ones(256),
            f"{at}.mlp.scales": torch.ones(4, 4),
            f"{at}.mlp.zeros": torch.zeros(4),
            f"{at}.self_attn.relative_position_index": torch.arange(16).reshape(4, 4),
            f"{at}.self_attn.mask": torch.ones(8, 8, dtype=torch.uint8),
            f"{at}.g_idx": torch.arange(8, dtype=torch.int32),
            f"{at}.self_attn.position_ids": torch.arange(8)[None],
        }
    plain |= {"logit_scale": torch.tensor(2.0), "small.weight": codes(96, 16, dtype=torch.int8)}
    plain |= {"table.weight": codes(96, 16), "image.weight_scale": torch.ones(3)}
    config = bare(model("fp8 blocks")[0])
    folder = write(tmp_path / "in", config, plain)
    assert cli("verify", folder).code == 0
    assert cli("merge", folder, tmp_path / "out", "--dtype", "f32").code == 0


def test_parts_of_torchao_without_their_header_are_refused(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    found = {n: t for n, t in tensors.items() if not n.startswith("model.layers.")}
    found |= {f"{AT}._weight_qdata": codes(64, 32, dtype=torch.int8), f"{AT}._weight_scale": scales(64, 1)}
    for content in ({}, {"quantization_config": {"quant_method": "torchao", "quant_type": {}}}):
        folder = write(tmp_path / f"in{len(content)}", bare(config) | content, found)
        assert_refused_everywhere(folder, tmp_path / "out", "torchao")
