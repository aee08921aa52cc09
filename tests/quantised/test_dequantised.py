"""Quantised weights with --dtype: each value is that of its form's reference, and what is written says
nothing of scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import transformers
from dequantised_oracle import E2M1, ORACLES, gptq, modelopt_awq, stream
from helpers import assert_refused, cli, read_result
from quantised_maker import F8, FORMS, LAYERS, LINEAR, Tensors, ct, model, write
from safetensors.torch import load_file, save_file

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    """True for the same bits, NaN apart."""
    bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
    number = ~want.isnan()
    return (
        have.dtype == want.dtype
        and have.shape == want.shape
        and torch.equal(have[number].view(bits), want[number].view(bits))
    )


def parts(tensors: Tensors, module: str) -> Tensors:
    return {
        name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")
    }


@pytest.mark.parametrize("form", ORACLES)
@pytest.mark.parametrize("asked", DTYPES)
def test_values_are_those_of_the_reference(form: str, asked: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config, tensors)
    out = tmp_path / "out"
    ran = cli("merge", folder, out, "--dtype", asked, "--accept", "non-finite")
    assert ran.code == 0, ran.out
    have = read_result(out)
    modules = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEAR]
    assert {f"{module}.weight" for module in modules} <= set(have)
    plain = {name for name in tensors if not name.startswith(tuple(f"{m}." for m in modules))}
    assert set(have) == plain | {f"{module}.weight" for module in modules}
    for module in modules:
        o, i = LINEAR[module.split(".", 3)[3]]
        want = ORACLES[form](parts(tensors, module), o, i, DTYPES[asked])
        assert same(have[f"{module}.weight"], want), module
    written = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in written and written["torch_dtype"] == str(DTYPES[asked])[6:]
    assert ran.having("FS212", message="are dequantised")
    record = json.loads((out / "fastshard.manifest.json").read_text())["values"]["dequantised"]
    assert (record["dtype"], sum(record["forms"].values())) == (asked.upper(), len(modules))
    # What was written is a plain model.
    assert cli("verify", out).code == 0


def written(
    tmp_path: Path, said: dict[str, Any], tensors: Tensors, name: str = "a.weight", asked: str = "bf16"
) -> list[str]:
    """The bits of a weight's values, in hexadecimal."""
    config = {"model_type": "other", "quantization_config": said}
    folder = write(tmp_path / "in", config, {f"a.{key}": t for key, t in tensors.items()})
    ran = cli("merge", folder, tmp_path / "out", "--dtype", asked)
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")[name].flatten()
    return [f"{bits & 0xFFFF:04x}" for bits in have.view(torch.int16).tolist()]


def f8(*codes: int) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(F8)


def words(*numbers: int) -> torch.Tensor:
    return torch.tensor([n - (1 << 32) if n >> 31 else n for n in numbers], dtype=torch.int32)


def bf16(values: list[float]) -> list[str]:
    return [f"{bits & 0xFFFF:04x}" for bits in torch.tensor(values).bfloat16().view(torch.int16).tolist()]


def test_vectors_that_vendors_code_has_made(tmp_path: Path) -> None:
    """source: compressed-tensors 0.20, transformers 5.24, ModelOpt 0.47, run on the CPU."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    of_blocks = {
        "weight": f8(0x7E, 0x80, 1, 0xFE, 0x38, 0x3F, 8)[None],
        "weight_scale_inv": torch.tensor([[0.00012345678]]),
    }
    assert written(tmp_path / "fp8", blocks, of_blocks) == [
        "3d63",
        "8000",
        "3481",
        "bd63",
        "3901",
        "3973",
        "3601",
    ]
    # Rounded as ModelOpt does, before and after.
    algorithm = {"quant_method": "modelopt", "quant_algo": "FP8"}
    of_one = {"weight": of_blocks["weight"], "weight_scale": torch.tensor(0.00012345678)}
    assert written(tmp_path / "modelopt", algorithm, of_one) == [
        "3d62",
        "8000",
        "3481",
        "bd62",
        "3901",
        "3972",
        "3601",
    ]
    tenth = torch.tensor([[0.1]], dtype=torch.bfloat16)
    pack = {
        "weight_packed": words(0x76543210)[None],
        "weight_scale": tenth,
        "weight_shape": torch.tensor([1, 8]),
    }
    want = ["bf4d", "bf33", "bf1a", "bf00", "becd", "be9a", "be4d", "bdcd"]
    assert written(tmp_path / "pack", ct("pack-quantized", 4, "int", strategy="channel"), pack) == want
    straddling = {
        "weight_packed": words(0xC0000000, 1)[None],
        "weight_scale": torch.ones(1, 1).bfloat16(),
        "weight_shape": torch.tensor([1, 16]),
    }
    have = written(tmp_path / "straddle", ct("pack-quantized", 3, "int", strategy="channel"), straddling)
    assert have[9:12] == bf16([-4, 3, -4]) and len(have) == 16
    nvfp4 = ct("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16)
    codes, scale = torch.full((1, 8), 0x33, dtype=torch.uint8), f8(0x20)[None]
    for shape, want in (((1,), "3cc7"), ((), "3cc8")):
        of_all = torch.tensor(7.7).reshape(shape)
        tensors = {
            "weight_packed": codes,
            "weight_scale": scale,
            "weight_global_scale": of_all,
            "input_global_scale": torch.ones(1),
        }
        assert set(written(tmp_path / f"nvfp4{len(shape)}", nvfp4, tensors)) == {want}
    tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(1 / 7.7)}
    assert set(
        written(tmp_path / "nvfp4m", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)
    ) == {"3cc7"}


def test_vectors_of_integers_and_tables(tmp_path: Path) -> None:
    """source: AutoAWQ, AutoGPTQ, GPTQModel, bitsandbytes 0.50.2, transformers 5.24, as their code says it."""
    row = words(0x76543210)[None]
    tensors = {"qweight": row, "qzeros": words(0)[None], "scales": torch.ones(1, 8).half()}
    said = {"quant_method": "awq", "bits": 4, "group_size": 1, "version": "gemm"}
    assert written(tmp_path / "awq", said, tensors) == bf16([0, 4, 1, 5, 2, 6, 3, 7])
    for kind, less in (("gptq", 8), ("gptq_v2", 7)):
        said = {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": kind}
        tensors = {"qweight": row, "qzeros": words(7)[None], "scales": torch.full((1, 1), 0.1).half()}
        have = written(tmp_path / kind, said, tensors, asked="f16")
        want = torch.full((8,), 0.1).half() * (torch.arange(8) - less).half()
        assert have == [f"{bits & 0xFFFF:04x}" for bits in want.view(torch.int16).tolist()]
    nf4 = torch.zeros(16)
    nf4[0], nf4[8], nf4[15] = -1, 0.07958029955625534, 1
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [1, 4]}
    tensors = {
        "weight": torch.tensor([[0x07], [0xF8]], dtype=torch.uint8),
        "weight.absmax": torch.tensor([2.0]),
        "weight.quant_map": nf4,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    assert written(tmp_path / "nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors) == bf16(
        [-2, 0, 2, 0.1591606]
    )
    # gpt-oss: blocks of experts, which lie transposed.
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 0, 0, 1] = 0x21, 0xF8
    tensors = {
        "experts.down_proj_blocks": blocks,
        "experts.down_proj_scales": torch.full((1, 2, 1), 0x7E, dtype=torch.uint8),
    }
    have = written(tmp_path / "mxfp4", {"quant_method": "mxfp4"}, tensors, "a.experts.down_proj")
    assert have[:8:2] == bf16([0.25, 0.5, -0.0, -3]) and have[1::2] == bf16([0.0] * 32)


def test_groups_in_any_order_and_zero_points_without_sign(tmp_path: Path) -> None:
    """Group indices of GPTQ (desc_act) and of compressed-tensors (actorder), and the second version of
    GPTQ."""
    config, tensors = model("gptq 4 bit")
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        torch.manual_seed(len(name))
        tensors[name] = tensors[name][torch.randperm(tensors[name].numel())]
    said = config["quantization_config"] | {"desc_act": True, "checkpoint_format": "gptq_v2"}
    folder = write(tmp_path / "gptq", config | {"quantization_config": said}, tensors)
    assert cli("merge", folder, tmp_path / "out", "--dtype", "f32").code == 0
    have = read_result(tmp_path / "out")
    for name, (o, i) in LINEAR.items():
        module = f"model.layers.1.{name}"
        assert same(have[f"{module}.weight"], gptq(4, 0)(parts(tensors, module), o, i, torch.float32)), name
    config, tensors = model("ct 4 bit")
    said = ct("pack-quantized", 4, "int", actorder="group")
    for layer in range(LAYERS):
        for name, (_, i) in LINEAR.items():
            tensors[f"model.layers.{layer}.{name}.weight_g_idx"] = (torch.arange(i) // 64)[
                torch.randperm(i)
            ].int()
    folder = write(tmp_path / "ct", config | {"quantization_config": said}, tensors)
    assert cli("merge", folder, tmp_path / "ct_out", "--dtype", "bf16").code == 0
    have = read_result(tmp_path / "ct_out")
    for name, (_, i) in LINEAR.items():
        t = parts(tensors, f"model.layers.2.{name}")
        codes = stream(t["weight_packed"], 4, i).float() - 8
        want = codes.bfloat16() * t["weight_scale"][:, t["weight_g_idx"].long()]
        assert same(have[f"model.layers.2.{name}.weight"], want), name


def test_stacked_experts_have_scales_each(tmp_path: Path) -> None:
    torch.manual_seed(3)
    codes = torch.randn(3, 160, 200).to(F8)
    blocks = torch.rand(3, 2, 2) + 0.5
    tensors = {"mlp.experts.gate_up_proj": codes, "mlp.experts.gate_up_proj_scale_inv": blocks}
    folder = write(
        tmp_path / "in",
        {
            "model_type": "other",
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        tensors,
    )
    assert cli("merge", folder, tmp_path / "out", "--dtype", "f32").code == 0
    scales = blocks.repeat_interleave(128, 1)[:, :160].repeat_interleave(128, 2)[:, :, :200]
    assert same(read_result(tmp_path / "out")["mlp.experts.gate_up_proj"], codes.float() * scales)
    packed = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8)
    powers = torch.randint(110, 130, (2, 64, 3), dtype=torch.uint8)
    tensors = {
        "mlp.experts.down_proj_blocks": packed,
        "mlp.experts.down_proj_scales": powers,
        "mlp.experts.down_proj_bias": torch.ones(2, 64),
    }
    folder = write(
        tmp_path / "oss", {"model_type": "other", "quantization_config": {"quant_method": "mxfp4"}}, tensors
    )
    assert cli("merge", folder, tmp_path / "oss_out", "--dtype", "bf16").code == 0
    have = read_result(tmp_path / "oss_out")
    nibbles = torch.stack((packed & 15, packed >> 4), -1).reshape(2, 64, 96)
    scale = torch.ldexp(torch.ones(2, 64, 3), powers.int() - 127).repeat_interleave(32, 2)
    assert set(have) == {"mlp.experts.down_proj", "mlp.experts.down_proj_bias"}
    assert same(
        have["mlp.experts.down_proj"], (E2M1[nibbles.long()] * scale).bfloat16().transpose(1, 2).contiguous()
    )


def test_what_has_no_values_is_refused_by_name(tmp_path: Path) -> None:
    config, tensors = model("bnb int8")
    folder = write(tmp_path / "int8", config, tensors)
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, options=("--dtype", "bf16"), message="int8")
    config, tensors = model("modelopt awq")
    folder = write(tmp_path / "awq", config, tensors)
    assert_refused(
        folder, tmp_path / "out", "FS514", exit=2, options=("--dtype", "bf16"), message="pre_quant_scale"
    )
    plain = {name: t for name, t in tensors.items() if not name.endswith("pre_quant_scale")}
    folder = write(tmp_path / "plain", config, plain)
    assert cli("merge", folder, tmp_path / "plain_out", "--dtype", "bf16").code == 0
    have = read_result(tmp_path / "plain_out")
    for name, (o, i) in LINEAR.items():
        want = modelopt_awq(parts(plain, f"model.layers.0.{name}"), o, i, torch.bfloat16)
        assert same(have[f"model.layers.0.{name}.weight"], want), name


def test_files_of_a_quantiser_go_along_with_its_codes_alone(tmp_path: Path) -> None:
    config, tensors = model("modelopt fp8")
    said = config.pop("quantization_config")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    folder = write(tmp_path / "in", config, tensors)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": said})
    )
    assert cli("merge", folder, tmp_path / "kept").code == 0
    assert (tmp_path / "kept/hf_quant_config.json").read_bytes() == (
        folder / "hf_quant_config.json"
    ).read_bytes()
    ran = cli("merge", folder, tmp_path / "out", "--dtype", "bf16")
    assert ran.code == 0, ran.out
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert not [name for name in read_result(tmp_path / "out") if "scale" in name]
    assert ran.having("FS212", message="scales of activations (1)")


FROM_CONFIG = {
    "gptq": "gptq 4 bit",
    "compressed-tensors": "ct 4 bit",
    "bitsandbytes": "bnb nf4 nested",
    "fp8": "fp8 blocks",
    "awq": "awq",
}


#: Sizes of a Llama.
LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("method", FROM_CONFIG)
def test_values_go_where_plain_weights_go(method: str, tmp_path: Path) -> None:
    """A quantised Llama becomes a plain one that its table proves, loads without a message, and converts as
    any other does."""
    torch.manual_seed(5)
    of = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).bfloat16()
    of.save_pretrained(tmp_path / "plain")
    said, weight = FORMS[FROM_CONFIG[method]]
    tensors, want = {}, {}
    for name, tensor in load_file(tmp_path / "plain/model.safetensors").items():
        want[name] = tensor
        if "_proj" in name:
            module = name.removesuffix(".weight")
            made = weight(module, *tensor.shape)
            tensors |= made
            want[name] = ORACLES[FROM_CONFIG[method]](parts(made, module), *tensor.shape, torch.float32)
        else:
            tensors[name] = tensor
    config = json.loads((tmp_path / "plain/config.json").read_text())
    folder = write(tmp_path / "in", config | {"quantization_config": said}, tensors)
    save_file(
        {name: t.contiguous() for name, t in want.items()},
        tmp_path / "plain/model.safetensors",
        {"format": "pt"},
    )
    for to, options in (
        ("hf", ()),
        ("megatron", ("--tp", "2")),
        ("dcp", ()),
        ("tp-safetensors", ("--tp", "2")),
        ("maxtext", ()),
    ):
        for source, out in ((folder, "values"), (tmp_path / "plain", "expected")):
            ran = cli("convert", source, tmp_path / f"{out}_{to}", "--to", to, "--dtype", "bf16", *options)
            assert ran.code == 0, ran.out
        assert cli("diff", tmp_path / f"values_{to}", tmp_path / f"expected_{to}").code == 0, to
        # Codes alone have no place there, nor where ranks would cut their blocks.
        if to in ("megatron", "tp-safetensors", "maxtext"):
            assert_refused(
                folder,
                tmp_path / f"not_{to}",
                "FS514",
                exit=2,
                command=("convert", "--to", to),
                options=options,
            )
    ran = cli("verify", tmp_path / "values_hf")
    assert ran.code == 0 and not ran.having("FS109", severity="warning"), ran.out
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "values_hf", output_loading_info=True
    )
    assert not any(info.values()), info
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("form", ["gptq 4 bit", "ct 3 bit", "bnb nf4 nested", "fp8 blocks", "modelopt nvfp4"])
def test_weights_are_named_with_their_own_shape(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config, tensors)
    rows = [row for row in fastshard.ls(folder) if row.weight is not None]
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in LINEAR.items()
    }
    assert {row.weight.name: row.weight.shape for row in rows} == shapes
    shown = cli("ls", folder, json_output=False).out
    assert "VALUES" in shown and f"[320, 256], {rows[0].weight.form}" in shown
    up = next(row for row in rows if row.weight.name.endswith("1.mlp.up_proj.weight"))
    assert (
        f"codes of {up.weight.name} [320, 256], {up.weight.form}"
        in cli("trace", folder, up.name, json_output=False).out
    )
    # With a dtype: of what the values are made.
    ran = cli("trace", folder, up.weight.name, "--dtype", "bf16")
    (source,) = json.loads(ran.out)["parts"][0]["sources"]
    assert source["values_of"]["name"] == up.name
    own = {name for name in tensors if name.startswith("model.layers.1.mlp.up_proj.")}
    needless = (".input_scale", ".weight_shape", "bitsandbytes__nf4")
    assert {up.name, *source["made_with"]} == {name for name in own if not name.endswith(needless)}
    assert all(place["file"] == "model.safetensors" and place["bytes"] for place in source["places"])
    assert cli("merge", folder, tmp_path / "kept").code == 0
    manifest = json.loads((tmp_path / "kept/fastshard.manifest.json").read_text())
    assert manifest["values"]["quantised"] == {up.weight.form: len(rows)}
    assert (
        "are dequantised to BF16"
        in cli("merge", folder, tmp_path / "out", "--dtype", "bf16", json_output=False).out
    )


def test_zero_points_of_the_other_version_of_gptq_are_found(tmp_path: Path) -> None:
    """Symmetric weights have all zero points in the middle, stored one too low by the first version."""
    config, tensors = model("gptq 4 bit")
    for kind, middle in (("gptq", 7), ("gptq_v2", 8)):
        word = int(f"{middle:x}" * 8, 16)
        filled = {
            n: torch.full_like(t, word - (1 << 32 if word >> 31 else 0)) if n.endswith("qzeros") else t
            for n, t in tensors.items()
        }
        for said in ("gptq", "gptq_v2"):
            stated = config | {
                "quantization_config": config["quantization_config"] | {"checkpoint_format": said}
            }
            folder = write(tmp_path / f"{kind}-{said}", stated, filled)
            if said == kind:
                assert (
                    cli(
                        "merge", folder, tmp_path / f"out-{kind}", "--dtype", "bf16", "--fail-on", "warning"
                    ).code
                    == 0
                )
            else:
                assert_refused(
                    folder,
                    tmp_path / "not",
                    "FS514",
                    exit=2,
                    options=("--dtype", "bf16"),
                    message=f"are those of {kind}",
                )
    odd = {n: torch.full_like(t, -1) if n.endswith("qzeros") else t for n, t in tensors.items()}
    folder = write(tmp_path / "odd", config, odd)
    ran = cli("merge", folder, tmp_path / "warned", "--dtype", "bf16")
    assert ran.code == 0 and ran.having("FS212", severity="warning", message="some versions of AutoGPTQ as 0")


def plain(folder: Path, said: dict[str, Any], tensors: Tensors, **more: Any) -> Path:
    """A model of one weight, `a`."""
    return write(
        folder,
        {"model_type": "other", "quantization_config": said} | more,
        {f"a.{key}": t for key, t in tensors.items()},
    )


def values(folder: Path, out: Path, *options: str) -> torch.Tensor:
    ran = cli("merge", folder, out, "--dtype", "f32", *options)
    assert ran.code == 0, ran.out
    return read_result(out)["a.weight"]


ROWS, COLUMNS = (16, 2048), (8, 1024)
#: quantization_config, shape of the weight, shape of its scales, and rows and columns of a block: grids that
#: others would fit too.
GRIDS = {
    "fp8 by row, nothing said": ({"quant_method": "fp8"}, ROWS, (16, 1), (1, 2048)),
    "fp8 by row, flat": ({"quant_method": "fp8", "weight_block_size": None}, (2, 256), (2,), (1, 256)),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, COLUMNS, (1, 8), (128, 128)),
    "ct channel": (
        ct("float-quantized", 8, "float", strategy="channel", block_structure=[128, 128]),
        COLUMNS,
        (8, 1),
        (1, 1024),
    ),
    "ct block": (
        ct("float-quantized", 8, "float", strategy="block", block_structure=[128, 128]),
        COLUMNS,
        (1, 8),
        (128, 128),
    ),
    "ModelOpt blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        COLUMNS,
        (1, 1, 8, 1),
        (128, 128),
    ),
    "ModelOpt rows": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        COLUMNS,
        (8,),
        (1, 1024),
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_scales_are_spread_as_their_config_says(name: str, tmp_path: Path) -> None:
    said, shape, grid, (rows, columns) = GRIDS[name]
    torch.manual_seed(11)
    codes, scale = torch.randn(shape).to(F8), torch.rand(grid) + 0.5
    stored = "weight_scale_inv" if name == "fp8 blocks" else "weight_scale"
    folder = plain(tmp_path / "in", said, {"weight": codes, stored: scale})
    high, wide = -(-shape[0] // rows), -(-shape[1] // columns)
    each = (
        scale.reshape(high, wide)
        .repeat_interleave(rows, 0)[: shape[0]]
        .repeat_interleave(columns, 1)[:, : shape[1]]
    )
    assert same(values(folder, tmp_path / "out"), codes.float() * each)


def test_zero_points_of_symmetric_codes_that_older_versions_saved_are_taken(tmp_path: Path) -> None:
    config, tensors = model("ct 4 bit")
    for name in [name for name in tensors if name.endswith("_scale")]:
        shape = tensors[name].shape
        points = torch.zeros(shape) if "layers.0" in name else torch.randint(-3, 4, shape)
        tensors[name.replace("_scale", "_zero_point")] = points.to(torch.int8)
    folder = write(tmp_path / "in", config, tensors)
    assert cli("verify", folder).code == 0
    assert cli("merge", folder, tmp_path / "kept").code == 0
    assert read_result(tmp_path / "kept").keys() == tensors.keys()
    assert cli("merge", folder, tmp_path / "out", "--dtype", "bf16").code == 0
    have = read_result(tmp_path / "out")
    for layer in range(LAYERS):
        for part, (_, i) in LINEAR.items():
            own = parts(tensors, f"model.layers.{layer}.{part}")
            codes = stream(own["weight_packed"], 4, i).float() - 8
            scale = own["weight_scale"].repeat_interleave(64, 1)[:, :i]
            points = own["weight_zero_point"].repeat_interleave(64, 1)[:, :i]
            want = ((codes - points).to(scale.dtype) * scale).bfloat16()
            assert same(have[f"model.layers.{layer}.{part}.weight"], want), part


def test_groups_are_of_the_size_that_is_stated(tmp_path: Path) -> None:
    """Two groups of 128 columns hold 192: the last is short, or it is refused; they are never two of 96."""
    awq = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    codes = torch.randint(0, 256, (64, 192), dtype=torch.uint8)
    folder = plain(tmp_path / "in", awq, {"weight": codes, "weight_scale": torch.rand(128, 2) + 0.5})
    have = values(folder, tmp_path / "out")
    t = parts(read_source(folder), "a")
    each = t["weight_scale"].repeat_interleave(128, 1)[:, :192]
    signed = stream(codes.T, 4, 128).T
    assert same(have, torch.where(signed > 7, signed - 16, signed).float() * each)
    # A size of its own for each layer, and one that only the copy in config.json states.
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "a": {"quant_algo": "W4A16_AWQ", "group_size": 64},
            "b": {"quant_algo": "W4A16_AWQ", "group_size": 32},
        },
    }
    tensors = {f"{m}.weight": codes.clone() for m in "ab"} | {
        "a.weight_scale": torch.rand(128, 3),
        "b.weight_scale": torch.rand(128, 6),
    }
    folder = write(tmp_path / "mixed", {"model_type": "other", "quantization_config": mixed}, tensors)
    assert cli("verify", folder).code == 0
    copied = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"g": {"weights": {"group_size": 32}}},
    }
    nvfp4 = {
        "weight": codes[:, :32],
        "weight_scale": torch.ones(64, 2).to(F8),
        "weight_scale_2": torch.tensor(1.0),
    }
    assert cli("verify", plain(tmp_path / "copied", copied, nvfp4)).code == 0


def read_source(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


MARLIN = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}
#: What is said where, and the weight: no values are made of any of these.
KEPT_ONLY: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "marlin in a part": ({"text_config": {"quantization_config": MARLIN}}, {}, "gptq 4 bit"),
    "marlin in a file": ({}, {"quantize_config.json": MARLIN}, "gptq 4 bit"),
    "gemv": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "format": "gemv"}},
        {},
        "awq",
    ),
    "an algorithm that is not known": (
        {},
        {"hf_quant_config.json": {"quantization": {"quant_algo": "W4A8_AWQ"}}},
        "modelopt awq",
    ),
    "hqq": ({"quantization_config": {"quant_method": "hqq"}}, {}, "ct 4 bit"),
    "codes viewed as floats": (
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_storage": "bfloat16",
            }
        },
        {},
        "bnb nf4",
    ),
    "turned by the model": (
        {
            "quantization_config": ct("float-quantized", 8, "float", strategy="channel")
            | {"transform_config": {"config_groups": {"u": {}}}}
        },
        {},
        "ct fp8",
    ),
}


@pytest.mark.parametrize("name", KEPT_ONLY)
def test_what_has_no_values_here_is_kept_or_refused_and_never_cast(name: str, tmp_path: Path) -> None:
    config, beside, form = KEPT_ONLY[name]
    tensors = {
        f"a.{key}".removesuffix("."): t for key, t in parts(FORMS[form][1]("a", 128, 128), "a").items()
    }
    if name == "codes viewed as floats":
        tensors["a.weight"] = tensors["a.weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    folder = write(
        tmp_path / "in",
        {"model_type": "other"} | config,
        tensors | {"p.weight": torch.randn(4, 4).bfloat16()},
    )
    for file, content in beside.items():
        (folder / file).write_text(json.dumps(content))
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, options=("--dtype", "bf16"))


@pytest.mark.parametrize("also", ["pre_quant_scale", "svdquant_lora_a"])
def test_a_part_of_the_layer_beside_the_weight_is_refused(also: str, tmp_path: Path) -> None:
    for algorithm, stored in (
        ("FP8", {"weight": torch.randn(64, 64).to(F8), "weight_scale": torch.tensor(1.0)}),
        (
            "NVFP4_SVD",
            {
                "weight": torch.zeros(64, 32, dtype=torch.uint8),
                "weight_scale": torch.ones(64, 4).to(F8),
                "weight_scale_2": torch.ones(()),
            },
        ),
    ):
        folder = plain(
            tmp_path / algorithm,
            {"quant_method": "modelopt", "quant_algo": algorithm},
            stored | {also: torch.ones(64)},
        )
        assert_refused(
            folder, tmp_path / "out", "FS514", exit=2, options=("--dtype", "bf16"), message=f"a.{also}"
        )


def test_only_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {
        "a.weight": torch.randn(128, 128).to(F8),
        "a.weight_scale_inv": torch.rand(1, 1),
        "a.qscale_act": torch.ones(()),
        "attn.k_scale": torch.ones(1),
        "attn.v_scale": torch.ones(4, 1, 1),
        # What other modules call so.
        "attn.q_scale": torch.randn(64).bfloat16(),
        "vision.patch.v_scale": torch.randn(16, 16).bfloat16(),
    }
    folder = write(tmp_path / "in", {"model_type": "other", "quantization_config": fp8}, tensors)
    assert cli("merge", folder, tmp_path / "out", "--dtype", "bf16").code == 0
    assert set(read_result(tmp_path / "out")) == {"a.weight", "attn.q_scale", "vision.patch.v_scale"}
    # A cache alone that is quantised.
    cache = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    tensors = {
        "a.weight": torch.randn(8, 8).bfloat16(),
        "attn.k_scale": torch.ones(1),
        "attn.v_scale": torch.ones(1),
    }
    folder = write(tmp_path / "cache", {"model_type": "other", "quantization_config": cache}, tensors)
    assert cli("merge", folder, tmp_path / "kept").code == 0 and set(read_result(tmp_path / "kept")) == set(
        tensors
    )
    assert cli("merge", folder, tmp_path / "plain", "--dtype", "bf16").code == 0
    assert set(read_result(tmp_path / "plain")) == {"a.weight"}


def test_what_is_done_to_values_is_not_done_to_codes(tmp_path: Path) -> None:
    config, tensors = model("fp8 blocks")
    folder = write(tmp_path / "in", config, tensors)
    assert_refused(
        folder, tmp_path / "out", "FS514", exit=2, options=("--vocab-size", "90"), message="--vocab-size"
    )


def test_records_of_a_stranger(tmp_path: Path) -> None:
    """One clear refusal each, whatever numbers they state."""
    good = parts(FORMS["bnb nf4 nested"][1]("a", 64, 64), "a")
    name = "weight.quant_state.bitsandbytes__nf4"
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    record = json.loads(bytes(good[name].tolist()))
    for number, change in enumerate(
        (
            {"nested_offset": 10**400},
            {"blocksize": 2**70},
            {"nested_blocksize": 2**70},
            {"nested_blocksize": 2**20},
            {"shape": [2**40, 2**40]},
            {"shape": [-64, -64]},
            {"blocksize": 0},
            {"dtype": "int8"},
            {"pad": "x" * (1 << 17)},
        )
    ):
        text = json.dumps(record | change).encode()
        stored = good | {name: torch.tensor(list(text), dtype=torch.uint8)}
        folder = plain(tmp_path / str(number), said, stored)
        ran = cli("merge", folder, tmp_path / f"out{number}", "--dtype", "bf16")
        assert ran.code in (0, 1, 2) and not ran.having("FS520") and not ran.having("FS515"), ran.out
        # One block of maxima holds them all.
        assert (ran.code == 0) is (change.get("nested_blocksize") == 2**20), (change, ran.out)
    lying = parts(FORMS["ct 4 bit"][1]("a", 64, 128), "a") | {"weight_shape": torch.tensor([64, 120])}
    folder = plain(tmp_path / "lying", FORMS["ct 4 bit"][0], lying)
    assert cli("verify", folder).code == 1
    wide = {"quant_method": "fp8", "weight_block_size": [10**30, 32]}
    assert cli(
        "verify", plain(tmp_path / "wide", wide, parts(FORMS["fp8 blocks"][1]("a", 64, 64), "a"))
    ).code in (0, 1)
    blocks = ct("float-quantized", 8, "float", strategy="block", block_structure="9" * 5000 + "x3")
    assert cli(
        "verify", plain(tmp_path / "long", blocks, parts(FORMS["ct fp8"][1]("a", 64, 64), "a"))
    ).code in (0, 1)


def test_indices_that_say_in_order_and_rules_that_cannot_be_told(tmp_path: Path) -> None:
    stored = parts(FORMS["ct 4 bit"][1]("a", 64, 128), "a")
    folder = plain(
        tmp_path / "in",
        FORMS["ct 4 bit"][0],
        stored | {"weight_g_idx": torch.full((128,), -1, dtype=torch.int32)},
    )
    assert cli("verify", folder).code == 0
    assert same(values(folder, tmp_path / "out"), ORACLES["ct 4 bit"](stored, 64, 128, torch.float32))
    config, tensors = model("gptq 4 bit")
    rules = {r"+:.*\.(?:1[0-5])\..*(?:down|up).*": {"bits": 8}}
    folder = write(
        tmp_path / "rules",
        config | {"quantization_config": config["quantization_config"] | {"dynamic": rules}},
        tensors,
    )
    assert cli("verify", folder).code == 0


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq 4 bit"])
def test_an_adapter_needs_values(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    folder = write(tmp_path / "in", config, tensors)
    module = "model.layers.1.mlp.up_proj"
    torch.manual_seed(4)
    a, b = torch.randn(4, 256), torch.randn(320, 4)
    (tmp_path / "adapter").mkdir()
    told = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["up_proj"],
        "base_model_name_or_path": "in",
    }
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(told))
    factors = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    options = ("--adapter", str(tmp_path / "adapter"))
    assert_refused(folder, tmp_path / "out", "FS514", exit=2, options=options, message="--adapter")
    assert cli("merge", folder, tmp_path / "out", "--dtype", "f32", *options).code == 0
    want = ORACLES[form](parts(tensors, module), 320, 256, torch.float32) + b @ a
    assert torch.allclose(read_result(tmp_path / "out")[f"{module}.weight"], want, atol=1e-4)


@pytest.mark.parametrize("form", ["fp8 blocks", "ct fp8", "gptq 4 bit"])
def test_parts_that_are_filled_in_are_quantised_alike(form: str, tmp_path: Path) -> None:
    config, tensors = model(form)
    whole = write(tmp_path / "whole", config, tensors)
    lost = "model.layers.1.mlp.down_proj."
    lacking = write(
        tmp_path / "in", config, {name: t for name, t in tensors.items() if not name.startswith(lost)}
    )
    options = ("--fill-from", str(whole), "--fill-only", f"{lost}*")
    assert cli("merge", lacking, tmp_path / "kept", *options).code == 0
    assert cli("diff", whole, tmp_path / "kept").code == 0
    assert cli("merge", lacking, tmp_path / "values", "--dtype", "bf16", *options).code == 0
    assert cli("merge", whole, tmp_path / "want", "--dtype", "bf16").code == 0
    assert cli("diff", tmp_path / "want", tmp_path / "values").code == 0


@pytest.mark.parametrize("form", ["modelopt fp8", "modelopt nvfp4"])
def test_a_model_whose_config_is_silent_gets_the_table_of_plain_weights(form: str, tmp_path: Path) -> None:
    """ModelOpt says in a file of its own what it did, and the names of scales are no table's."""
    torch.manual_seed(6)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).bfloat16().save_pretrained(
        tmp_path / "plain"
    )
    said, weight = FORMS[form]
    tensors: Tensors = {}
    for name, tensor in load_file(tmp_path / "plain/model.safetensors").items():
        tensors |= weight(name.removesuffix(".weight"), *tensor.shape) if "_proj" in name else {name: tensor}
    folder = write(tmp_path / "in", json.loads((tmp_path / "plain/config.json").read_text()), tensors)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    tp = ("--tp", "2")
    assert_refused(
        folder, tmp_path / "not", "FS514", exit=2, command=("convert", "--to", "megatron"), options=tp
    )
    for to, options in (("hf", ()), ("megatron", tp)):
        assert cli("convert", folder, tmp_path / to, "--to", to, "--dtype", "bf16", *options).code == 0
    # Codes go along with what says what they are.
    assert cli("convert", folder, tmp_path / "kept", "--to", "hf").code == 0
    assert set(read_result(tmp_path / "kept")) == set(tensors)
    assert (tmp_path / "kept/hf_quant_config.json").exists() and cli("verify", tmp_path / "kept").code == 0
    assert set(read_result(tmp_path / "hf")) == set(load_file(tmp_path / "plain/model.safetensors"))
    assert not cli("verify", tmp_path / "hf").having("FS109", severity="warning")
