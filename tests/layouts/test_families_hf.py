"""Families that are one table each, against the tensors that transformers makes of tiny models of them."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastshard
import pytest
import torch
import transformers
from fastshard.layouts import tables
from helpers import TYPES_WITH_OWN_CODE, assert_refused, cli, read_result
from safetensors.torch import load_file, save_file

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
DEEPSEEK: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 7,
}
EXPERTS: dict[str, Any] = SMALL | {
    "moe_intermediate_size": 10,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[str, transformers.PretrainedConfig]] = {
    "deepseek": ("hf.deepseek_v3", transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=6)),
    "deepseek_biases": (
        "hf.deepseek_v3",
        transformers.DeepseekV3Config(
            **DEEPSEEK | {"first_k_dense_replace": 2}, q_lora_rank=6, attention_bias=True
        ),
    ),
    "deepseek_no_lora": ("hf.deepseek_v3", transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=None)),
    "ernie": (
        "hf.ernie4_5_moe",
        transformers.Ernie4_5_MoeConfig(
            **SMALL,
            moe_intermediate_size=10,
            moe_num_experts=4,
            moe_k=2,
            moe_layer_start_index=1,
            moe_layer_interval=2,
        ),
    ),
    "gemma2": ("hf.gemma2", transformers.Gemma2Config(**SMALL, head_dim=6)),
    "gemma3": ("hf.gemma3", transformers.Gemma3TextConfig(**SMALL, head_dim=6)),
    "gemma2_biases": ("hf.gemma2", transformers.Gemma2Config(**SMALL, head_dim=6, attention_bias=True)),
    "gpt_oss": (
        "hf.gpt_oss",
        transformers.GptOssConfig(**SMALL, head_dim=6, num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt_oss_no_biases": (
        "hf.gpt_oss",
        transformers.GptOssConfig(
            **SMALL, head_dim=6, num_local_experts=4, num_experts_per_tok=2, attention_bias=False
        ),
    ),
    "phi3": ("hf.phi3", transformers.Phi3Config(**SMALL, pad_token_id=0, eos_token_id=1)),
    "qwen2_moe": (
        "hf.qwen2_moe",
        transformers.Qwen2MoeConfig(**EXPERTS, mlp_only_layers=[1], shared_expert_intermediate_size=14),
    ),
    "qwen2_moe_step": (
        "hf.qwen2_moe",
        transformers.Qwen2MoeConfig(
            **EXPERTS, decoder_sparse_step=2, shared_expert_intermediate_size=14, qkv_bias=False
        ),
    ),
    "qwen3_moe": ("hf.qwen2_moe", transformers.Qwen3MoeConfig(**EXPERTS, head_dim=6, mlp_only_layers=[0, 3])),
    "qwen3_next": (
        "hf.qwen3_next",
        transformers.Qwen3NextConfig(
            **EXPERTS,
            head_dim=6,
            mlp_only_layers=[1],
            shared_expert_intermediate_size=14,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=5,
            linear_value_head_dim=7,
            linear_conv_kernel_dim=3,
            attention_bias=True,
        ),
    ),
}
#: A layer of each set that a model has, and a tensor of the other set there.
STRAY = {
    "deepseek": [
        ("dense", 0, "mlp.experts.0.up_proj.weight", (10, 16)),
        ("moe", 1, "mlp.up_proj.weight", (24, 16)),
    ],
    "ernie": [("dense", 2, "mlp.gate.weight", (4, 16)), ("moe", 1, "mlp.down_proj.weight", (16, 24))],
    "qwen2_moe": [("dense", 1, "mlp.gate.weight", (4, 16)), ("moe", 0, "mlp.down_proj.weight", (16, 24))],
    "qwen3_next": [
        ("delta", 0, "self_attn.q_proj.weight", (48, 16)),
        ("main_full", 3, "linear_attn.A_log", (6,)),
    ],
}


@cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    """What transformers saves of a model."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name][1])
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def saved(name: str, folder: Path, of: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir()
    config = MODELS[name][1].to_dict() | {"architectures": [_architecture(name)]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(name) if of is None else of, folder / "model.safetensors", {"format": "pt"})
    return folder


def _architecture(name: str) -> str:
    return type(transformers.AutoModelForCausalLM.from_config(MODELS[name][1])).__name__


def further(name: str) -> dict[str, torch.Tensor]:
    """The layer of a DeepSeek model that predicts one more token, as it is published."""
    have = tensors(name)
    layer = {n.replace("layers.3.", "layers.4."): t + 2 for n, t in have.items() if ".layers.3." in n}
    sizes = {
        "enorm": (16,),
        "hnorm": (16,),
        "eh_proj": (16, 32),
        "embed_tokens": (40, 16),
        "shared_head.norm": (16,),
        "shared_head.head": (40, 16),
    }
    return layer | {f"model.layers.4.{n}.weight": torch.randn(size) for n, size in sizes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_table_names_what_transformers_saves(name: str) -> None:
    layout, config = MODELS[name]
    table, have = tables.table(layout), tensors(name)
    axes, facts, _ = table.describe(config.to_json_string(use_diff=False), list(have))
    assert all(facts[fact] in (True, False) for fact in ("tied", "head"))
    for tensor, values in have.items():
        assert table.rule_of(tensor) is not None, tensor
        assert table.shape(tensor, axes) == list(values.shape), tensor
    assert table.misfits({tensor: tuple(values.shape) for tensor, values in have.items()}, axes) == 0


KNOWN = {t for name in tables.names() for t in tables.table(name).model_types} - TYPES_WITH_OWN_CODE


@pytest.mark.parametrize("model_type", sorted(KNOWN))
def test_what_a_config_leaves_out_is_what_transformers_has_for_it(model_type: str) -> None:
    """Or is left to the tensors. Heads of a size that is none of the defaults tell these apart."""
    heads: dict[str, Any] = {"num_attention_heads": 64}
    if "text_config" in transformers.AutoConfig.for_model(model_type).to_dict():
        # Of a text model beside a tower the heads are its own.
        kind = transformers.AutoConfig.for_model(model_type).text_config.model_type
        heads = {"text_config": heads | {"model_type": kind}}
    whole = json.loads(transformers.AutoConfig.for_model(model_type, **heads).to_json_string(False))
    layout = tables.of_config(json.dumps(whole))
    assert layout is not None
    axes, facts, sets = tables.table(layout).describe(json.dumps(whole), [])
    for key in sorted(whole.keys() - {"model_type"}):
        part = json.dumps({k: value for k, value in whole.items() if k != key})
        assert tables.of_config(part) == layout, key
        told = tables.table(layout).describe(part, [])
        assert (axes | told[0], facts | told[1], sets | told[2]) == (axes, facts, sets), key


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3"])
def test_key_value_heads_that_are_null_are_as_many_as_heads(model_type: str) -> None:
    config = {"model_type": model_type, "num_attention_heads": 12, "num_key_value_heads": None}
    axes = tables.table(tables.of_config(json.dumps(config)) or "").describe(json.dumps(config), [])[0]
    assert (axes["g"], axes["r"]) == (12, 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_proven_whole(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "in")
    planned = fastshard.plan(fastshard.open(source))
    # Of DeepSeek the config promises a layer that transformers leaves out.
    left_out = ["FS116"] if name.startswith("deepseek") else []
    assert [f.code for f in planned.findings] == left_out and planned.source.binding.layout == MODELS[name][0]
    for verb, out in ((fastshard.merge, "merged"), (fastshard.convert, "converted")):
        verb(source, tmp_path / out, **({"to": "hf"} if out == "converted" else {}))
        made = {t: v for f in (tmp_path / out).glob("*.safetensors") for t, v in load_file(f).items()}
        assert sorted(made) == sorted(tensors(name))
        assert all(torch.equal(made[t], v) for t, v in tensors(name).items())


@pytest.mark.parametrize("name", ["deepseek", "ernie", "gemma2", "gpt_oss", "phi3", "qwen2_moe", "qwen3_moe"])
def test_every_lost_tensor_is_named(name: str, tmp_path: Path) -> None:
    """One of each rule, so one of each set."""
    table, have = tables.table(MODELS[name][0]), tensors(name)
    of_rule = {rule.name: tensor for tensor in have if (rule := table.rule_of(tensor)) is not None}
    assert len(of_rule) >= (9 if name == "phi3" else 10)
    for i, lost in enumerate(of_rule.values()):
        source = saved(name, tmp_path / str(i), {t: v for t, v in have.items() if t != lost})
        errors = [f for f in fastshard.plan(fastshard.open(source)).findings if f.severity == "error"]
        assert [(f.code, f.tensor) for f in errors] == [("FS102", lost)]


@pytest.mark.parametrize(("name", "stray"), [(name, stray) for name, all_ in STRAY.items() for stray in all_])
def test_a_tensor_of_the_other_kind_of_layer_is_refused(
    name: str, stray: tuple[str, int, str, tuple[int, ...]], tmp_path: Path
) -> None:
    _, layer, tensor, shape = stray
    full = f"model.layers.{layer}.{tensor}"
    source = saved(name, tmp_path / "in", tensors(name) | {full: torch.zeros(shape)})
    assert_refused(source, tmp_path / "out", "FS207", tensor=full)


def test_layers_that_predict_further_tokens_are_whole_or_not_there(tmp_path: Path) -> None:
    more = tensors("deepseek") | further("deepseek")
    source = saved("deepseek", tmp_path / "in", more)
    assert fastshard.plan(fastshard.open(source)).findings == []
    fastshard.merge(source, tmp_path / "out")
    merged = fastshard.open(tmp_path / "out")
    assert all(torch.equal(merged[t].torch(), v) for t, v in more.items()) and len(merged) == len(more)
    for i, lost in enumerate(further("deepseek")):
        part = saved("deepseek", tmp_path / str(i), {t: v for t, v in more.items() if t != lost})
        errors = [f for f in fastshard.plan(fastshard.open(part)).findings if f.severity == "error"]
        assert [(f.code, f.tensor) for f in errors] == [("FS102", lost)]


def quantised(folder: Path, of: dict[str, torch.Tensor]) -> Path:
    """The DeepSeek model with projections in FP8, as it is published, in blocks of 4 by 4."""
    made = {}
    for name, values in of.items():
        if not name.endswith("_proj.weight") or "layers.3." in name:
            made[name] = values.to(torch.bfloat16)
            continue
        rows, columns = (-(-n // 4) for n in values.shape)
        made[name] = values.to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = 1 + torch.arange(rows * columns, dtype=torch.float32).reshape(
            rows, columns
        )
    source = saved("deepseek", folder, made)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (source / "config.json").write_text(json.dumps(config))
    return source


def test_every_tensor_in_fp8_has_its_scales(tmp_path: Path) -> None:
    source = quantised(tmp_path / "in", tensors("deepseek"))
    have = load_file(source / "model.safetensors")
    assert [f for f in fastshard.plan(fastshard.open(source)).findings if f.severity == "error"] == []
    fastshard.merge(source, tmp_path / "merged")
    merged = fastshard.open(tmp_path / "merged")
    assert len(merged) == len(have) and all(torch.equal(merged[t].torch(), v) for t, v in have.items())
    # By value there are none, and the values are those of the blocks.
    fastshard.merge(source, tmp_path / "values", dtype="f32")
    values = fastshard.open(tmp_path / "values")
    assert sorted(values) == sorted(tensors("deepseek"))
    name = "model.layers.1.self_attn.q_b_proj.weight"
    scales = have[f"{name}_scale_inv"].repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(values[name].torch(), have[name].float() * scales[:20, :6])
    edited = load_file(source / "model.safetensors")
    lost = edited.pop(f"{name}_scale_inv")
    save_file(edited, source / "model.safetensors")
    for dtype in ("keep", "f32"):
        options = ("--dtype", dtype)
        assert_refused(source, tmp_path / "out", "FS102", tensor=f"{name}_scale_inv", exit=3, options=options)
    plain = "model.layers.3.self_attn.q_b_proj.weight"
    save_file(
        edited | {f"{name}_scale_inv": lost, f"{plain}_scale_inv": lost.clone()}, source / "model.safetensors"
    )
    assert_refused(source, tmp_path / "out", "FS207", tensor=f"{plain}_scale_inv")


@pytest.mark.parametrize(
    ("name", "to"),
    [("qwen2_moe", "maxtext"), ("qwen2_moe", "gpt_neox"), ("deepseek", "gpt_neox")]
    + [(name, to) for name in ("gemma2", "gemma3") for to in ("megatron", "gpt_neox")],
)
def test_no_other_framework_is_told_what_is_not_known(name: str, to: str, tmp_path: Path) -> None:
    """A table says where tensors lie, not what is computed of them."""
    source = saved(name, tmp_path / "in")
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.convert(source, tmp_path / "out", to=to)
    assert {f.code for f in caught.value.findings} == {"FS514"}


@pytest.mark.parametrize(
    ("to", "form", "back"),
    [("megatron", {}, "llama"), ("gpt_neox", {}, "llama"), ("maxtext", {}, "llama")]
    + [(to, form, "phi3") for to in ("megatron", "gpt_neox") for form in ({}, {"sliding_window": 5})],
)
def test_phi3_goes_to_other_frameworks_and_comes_back(
    to: str, form: dict[str, Any], back: str, tmp_path: Path
) -> None:
    """As Phi-3 where no plainer class of transformers computes it: where a part of each head is rotated."""
    torch.manual_seed(5)
    config = transformers.Phi3Config(
        **SMALL | {"hidden_size": 32},
        **form,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5 if back == "phi3" else 1.0,
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path / "in")
    fastshard.convert(tmp_path / "in", tmp_path / to, to=to, **({"tp": 2} if to != "maxtext" else {}))
    fastshard.convert(tmp_path / to, tmp_path / "out", to="hf", vocab_size=SMALL["vocab_size"])
    stated = json.loads((tmp_path / "out/config.json").read_text())
    assert stated["model_type"] == back
    if back == "phi3":
        # Its own default is a row that a small vocabulary does not have.
        assert stated["pad_token_id"] is stated["eos_token_id"] is stated["bos_token_id"] is None
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert found.config.model_type == back
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        want = model(input_ids=ids).logits
        assert torch.allclose(found(input_ids=ids).logits, want, atol=1e-4)
        found.model.rotary_emb.inv_freq *= 1.1
        assert not torch.allclose(found(input_ids=ids).logits, want, atol=1e-3)


@pytest.mark.parametrize(
    ("to", "rope", "named"),
    [
        ("maxtext", {"rope_type": "default", "partial_rotary_factor": 0.5}, "share of a head"),
        *(
            (
                to,
                {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 4.0]},
                "rope_scaling",
            )
            for to in ("megatron", "gpt_neox", "maxtext")
        ),
    ],
)
def test_what_others_cannot_say_of_phi3_is_refused(
    to: str, rope: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = saved("phi3", tmp_path / "in")
    config = json.loads((source / "config.json").read_text()) | {
        "rope_parameters": {"rope_theta": 1e4, **rope}
    }
    (source / "config.json").write_text(json.dumps(config))
    assert_refused(
        source, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", to), message=f"this {named}"
    )


OWN = """
layout = "mine.granite"
family = "llama"
extends = "hf.llama"
drop = ["attention.*.bias", "attention.?_norm.*", "mlp.*.bias"]
[config]
model_type = ["granite"]
[config.axes]
V = "vocab_size"
P = "vocab_size"
H = "hidden_size"
L = "num_hidden_layers"
F = "intermediate_size"
d = "hidden_size / num_attention_heads"
g = "num_key_value_heads"
r = "num_attention_heads / g"
[config.facts]
tied = "tie_word_embeddings ?? false"
head = "not tied"
"""


@pytest.mark.parametrize("how", ["registered", "given"])
def test_a_family_of_ones_own_is_one_file(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its model type once it is registered, or named for one run."""
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(tables, "_parsed", {})
    file = tmp_path / "granite.toml"
    file.write_text(OWN)
    options: dict[str, Any] = {"layout": str(file)} if how == "given" else {}
    config = transformers.GraniteConfig(**SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    # Without a table the names stay, and nothing is proven.
    assert [f.code for f in fastshard.plan(fastshard.open(tmp_path / "in")).findings] == ["FS109"]
    if how == "registered":
        tables.register(file)
    planned = fastshard.plan(fastshard.open(tmp_path / "in", **options))
    assert planned.findings == [] and planned.source.binding.layout == "mine.granite"
    have = load_file(tmp_path / "in/model.safetensors")
    lost = "model.layers.2.post_attention_layernorm.weight"
    del have[lost]
    save_file(have, tmp_path / "in/model.safetensors", {"format": "pt"})
    (error,) = fastshard.plan(fastshard.open(tmp_path / "in", **options)).findings
    assert (error.code, error.tensor) == ("FS102", lost)


def test_norms_of_gemma_are_stored_less_one() -> None:
    norm = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(4)
    torch.nn.init.zeros_(norm.weight)
    x = torch.tensor([3.0, -3.0, 3.0, 3.0])
    assert torch.allclose(norm(x), x / 3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_after_it_was_merged_and_cast(name: str, tmp_path: Path) -> None:
    """Of a save in several files: bit for bit, and as transformers' own rounding of the values."""
    torch.manual_seed(5)
    config = deepcopy(MODELS[name][1])
    if hasattr(config, "moe_intermediate_size"):
        # torch multiplies experts on a CPU only where their rows take multiples of 16 bytes.
        config.moe_intermediate_size = 12
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "in", max_shard_size="8KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    ids = torch.arange(2, 14)[None]

    def logits(folder: Path) -> torch.Tensor:
        found, told = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        with torch.no_grad():
            return found.eval()(input_ids=ids).logits

    with torch.no_grad():
        want = model(input_ids=ids).logits
    fastshard.merge(tmp_path / "in", tmp_path / "merged")
    assert torch.equal(logits(tmp_path / "merged"), want)
    fastshard.merge(tmp_path / "in", tmp_path / "bf16", dtype="bf16")
    fastshard.merge(tmp_path / "bf16", tmp_path / "back", dtype="f32")
    # What stays in float32 whatever the model's dtype is.
    ends = ["A_log", "dt_bias", *(type(model)._keep_in_fp32_modules_strict or ())]
    kept = {n for n in model.state_dict() if n.endswith(tuple(f".{end}" for end in ends))}
    with torch.no_grad():
        for tensor_name, values in model.state_dict().items():
            if tensor_name not in kept:
                values.copy_(values.bfloat16().float())
        rounded = model(input_ids=ids).logits
    assert torch.equal(logits(tmp_path / "back"), rounded) and not torch.equal(rounded, want)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "qwen2_moe"])
def test_names_below_a_trainers_key_become_the_models(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "in", {f"zoo.{n}": values for n, values in tensors(name).items()})
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and any("'zoo.'" in f["message"] for f in ran.having("FS212")), ran.out
    assert read_result(tmp_path / "out").keys() == tensors(name).keys()
