"""Models of Hugging Face that have no table, no head or other tensors than their table: taken, and loaded by
transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zero_maker
from helpers import assert_refused, cli, copy, edit_safetensors, read_result
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, model

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "t5": transformers.T5Config(
        vocab_size=200, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "granite": transformers.GraniteConfig(**{key: n for key, n in SMALL.items() if key != "head_dim"}),
    "gpt2": transformers.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt2_untied": transformers.GPT2Config(
        vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=False
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(7)
    # A copy: `to` and `save_pretrained` write a model's dtype into its config, which is all tests' here.
    config = deepcopy(CONFIGS[name])
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    found = auto.from_config(config)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return found.eval()


def logits(of: Any) -> torch.Tensor:
    ids = torch.arange(3, 15)[None]
    more = {"decoder_input_ids": ids.flip(1)} if of.config.is_encoder_decoder else {}
    with torch.no_grad():
        return of(input_ids=ids, **more).logits


def loaded(folder: Path, like: Any) -> Any:
    found, told = type(like).from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return found.eval()


def as_dcp(of: Any, folder: Path, *, under: str | None, optimizer: bool) -> None:
    state: dict[str, Any] = dict(of.state_dict())
    if under is not None:
        state = {under: state}
    if optimizer:
        moments = {n: {"exp_avg": p * 2 + 1, "exp_avg_sq": p * p + 1} for n, p in of.named_parameters()}
        state["optim"] = {"state": moments}
    dcp.save(state, checkpoint_id=folder / "step_10", no_dist=True)


def as_zero3(of: Any, folder: Path, *, world: int = 2) -> None:
    parameters = {name: tensor.detach().clone() for name, tensor in of.named_parameters()}
    state = of.state_dict()
    owners = {tensor.data_ptr(): name for name, tensor in of.named_parameters()}
    aliases = {
        n: owners[t.data_ptr()] for n, t in state.items() if n not in parameters and t.data_ptr() in owners
    }
    zero_maker.write(folder, zero_maker.Run(3, world, torch.bfloat16, [parameters], aliases=aliases))


def config_at(folder: Path, of: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    of.config.architectures = [type(of).__name__]
    of.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"a": 1}')


FORMS = ("zero3", "dcp", "dcp_model", "dcp_model_optim")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_without_a_table_passes_through_and_loads(name: str, form: str, tmp_path: Path) -> None:
    of = made(name)
    if form == "zero3":
        as_zero3(of, tmp_path / "run")
    else:
        as_dcp(of, tmp_path / "run", under="model" if "model" in form else None, optimizer="optim" in form)
    # Where trainers leave it: beside the step, and in a folder of its own.
    config_at(tmp_path / "run" if form != "dcp" else tmp_path / "run/step_10/huggingface", of)
    source = tmp_path / ("run" if form != "dcp_model" else "run/step_10")
    ran = cli("convert", source, tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    assert ran.having("FS109", message="names and shapes are kept as stored")
    assert torch.equal(logits(loaded(tmp_path / "out", of)), logits(of))
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"a": 1}'
    # A merge takes them along too.
    assert cli("merge", source, tmp_path / "merged").code == 0
    assert json.loads((tmp_path / "merged/config.json").read_text())["model_type"] == of.config.model_type


def test_masters_are_not_cast_back_by_the_config(tmp_path: Path) -> None:
    of = made("gpt2")
    as_zero3(of, tmp_path / "run")
    of.config.dtype = torch.bfloat16
    config_at(tmp_path / "run", of)
    for command in (["merge"], ["convert", "--to", "hf"]):
        out = tmp_path / command[0]
        assert cli(*command, tmp_path / "run", out).code == 0
        config = json.loads((out / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == "float32"
        assert next(iter(read_result(out).values())).dtype == torch.float32


@pytest.mark.parametrize("to", [[], ["--to", "hf"]])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cast_is_what_the_config_says(name: str, to: list[str], tmp_path: Path) -> None:
    of = model(name, tmp_path / "hf") if name == "llama" else made(name)
    of.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    command = "convert" if to else "merge"
    assert cli(command, tmp_path / "hf", tmp_path / "f32", *to, "--dtype", "f32").code == 0
    config = json.loads((tmp_path / "f32/config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    found = type(of).from_pretrained(tmp_path / "f32", dtype="auto")
    assert found.dtype == torch.float32
    assert all(torch.equal(t, found.state_dict()[n]) for n, t in of.float().state_dict().items())
    # Nothing is said anew where nothing is cast.
    assert cli(command, tmp_path / "hf", tmp_path / "kept", *to).code == 0
    same = (tmp_path / "kept/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    assert same or (to and name == "llama")


def test_the_parts_of_a_config_say_the_dtype_too(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(4, 4, dtype=torch.bfloat16)}, tmp_path / "hf/model.safetensors")
    parts = {
        "text_config": {"dtype": "bfloat16", "n": 1},
        "vision_config": {"torch_dtype": "bfloat16"},
        "quiet_config": {"n": 2},
    }
    (tmp_path / "hf/config.json").write_text(json.dumps({"model_type": "x", "dtype": "bfloat16", **parts}))
    assert cli("merge", tmp_path / "hf", tmp_path / "out", "--dtype", "f32").code == 0
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        "model_type": "x",
        "dtype": "float32",
        "text_config": {"dtype": "float32", "n": 1},
        "vision_config": {"torch_dtype": "float32"},
        "quiet_config": {"n": 2},
    }


HEADS = {
    "base": transformers.AutoModel,
    "classification": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "questions": transformers.AutoModelForQuestionAnswering,
}
TYPES = {
    "llama": transformers.LlamaConfig(**SIZES, pad_token_id=0),
    "mistral": transformers.MistralConfig(**SIZES, pad_token_id=0),
    "qwen3": transformers.Qwen3Config(**SIZES, pad_token_id=0),
    "gpt_neox": transformers.GPTNeoXConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        pad_token_id=0,
    ),
}


@pytest.fixture(params=list(HEADS))
def head(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("kind", list(TYPES))
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_other_heads_than_the_causal_one(kind: str, head: str, size: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    of = HEADS[head].from_config(TYPES[kind]).eval()
    of.save_pretrained(tmp_path / "hf", max_shard_size=size)
    for command in (["merge"], ["convert", "--to", "hf"]):
        out = tmp_path / command[0]
        ran = cli(*command, tmp_path / "hf", out)
        assert ran.code == 0, ran.out
        assert cli("verify", out).code == 0
        again = loaded(out, of)
        assert all(torch.equal(t, again.state_dict()[n]) for n, t in of.state_dict().items())
    # Every tensor that the table has is still asked for.
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    file = next(f for f in files if any("layers.1.mlp" in n for n in load_file(f)))
    if size == "1GB":
        edit_safetensors(file, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1.mlp" in n])
        assert_refused(tmp_path / "hf", tmp_path / "not", "FS102", exit=3)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_every_tensor_of_another_head_is_missed(kind: str, head: str, tmp_path: Path) -> None:
    of = HEADS[head].from_config(TYPES[kind])
    of.save_pretrained(tmp_path / "hf")
    heads = [n for n in of.state_dict() if n.startswith(("score.", "classifier.", "qa_outputs."))]
    assert bool(heads) == (head != "base")
    for name in heads:
        copy(tmp_path / "hf", tmp_path / name)
        edit_safetensors(tmp_path / name / "model.safetensors", lambda tensors, name=name: tensors.pop(name))
        assert_refused(tmp_path / name, tmp_path / "out", "FS102", exit=3)


def test_a_lost_head_is_missed(tmp_path: Path) -> None:
    of = HEADS["classification"].from_config(TYPES["llama"])
    of.save_pretrained(tmp_path / "hf")
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop("score.weight"))
    assert_refused(
        tmp_path / "hf",
        tmp_path / "out",
        "FS102",
        exit=3,
        tensor="score.weight",
        message="LlamaForSequenceClassification",
    )
    # A causal model without its output layer is as incomplete as before.
    model("llama", tmp_path / "causal")
    edit_safetensors(tmp_path / "causal/model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(tmp_path / "causal", tmp_path / "out", "FS102", exit=3, tensor="lm_head.weight")


@pytest.mark.parametrize("to", ["gpt_neox", "megatron", "maxtext"])
def test_a_model_without_an_output_layer_becomes_no_causal_one(to: str, tmp_path: Path) -> None:
    HEADS["classification"].from_config(TYPES["llama"]).save_pretrained(tmp_path / "hf")
    assert_refused(
        tmp_path / "hf",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", to),
        message="has no output layer",
    )


@pytest.mark.parametrize("to", ["gpt_neox", "megatron", "maxtext"])
def test_a_model_without_a_table_is_named(to: str, tmp_path: Path) -> None:
    made("gpt2").save_pretrained(tmp_path / "hf")
    assert_refused(
        tmp_path / "hf",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", to),
        message="model_type 'gpt2' has no layout table",
    )


def quantised(method: str, folder: Path) -> None:
    """A Llama as quantisers save it. source: the formats of AutoGPTQ, AutoAWQ, bitsandbytes,
    compressed-tensors"""
    model("llama", folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        base, (rows, columns) = name.removesuffix("weight"), tensor.shape
        if method == "gptq":
            tensors[f"{base}qweight"] = torch.randint(0, 1 << 30, (columns // 8, rows), dtype=torch.int32)
            tensors[f"{base}qzeros"] = torch.randint(0, 1 << 30, (1, rows // 8), dtype=torch.int32)
            tensors[f"{base}scales"] = torch.rand(1, rows).half()
            tensors[f"{base}g_idx"] = torch.zeros(columns, dtype=torch.int32)
        elif method == "bitsandbytes":
            tensors[name] = torch.randint(0, 255, (rows * columns // 2, 1), dtype=torch.uint8)
            tensors[f"{name}.absmax"] = torch.rand(rows * columns // 64)
            tensors[f"{name}.quant_map"] = torch.rand(16)
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
            record = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = record
        else:
            tensors[f"{base}weight_packed"] = torch.randint(
                0, 1 << 30, (rows, columns // 8), dtype=torch.int32
            )
            tensors[f"{base}weight_scale"] = torch.rand(rows, 1).bfloat16()
            tensors[f"{base}weight_shape"] = torch.tensor([rows, columns])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": -1}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "compressed-tensors"])
def test_a_quantised_model_is_kept(method: str, tmp_path: Path) -> None:
    quantised(method, tmp_path / "hf")
    for command in (["merge"], ["convert", "--to", "hf"]):
        assert cli(*command, tmp_path / "hf", tmp_path / command[0]).code == 0
        merged = read_result(tmp_path / command[0])
        stored = load_file(tmp_path / "hf/model.safetensors")
        assert merged.keys() == stored.keys() and all(torch.equal(merged[n], stored[n]) for n in stored)
    # No other layout has a place for such tensors.
    assert_refused(
        tmp_path / "hf",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", "megatron"),
        message="quantization_config",
    )


def renamed(begins: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model without a table, its names behind a wrapper's."""
    of = made("granite")
    state = {f"{begins}{name}": tensor.clone() for name, tensor in of.state_dict().items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    config_at(folder, of)
    return folder, state


@pytest.mark.parametrize("begins", ["base_model.model.", "pretrained_model."])
def test_names_that_an_adapter_changed_are_not_passed_off(begins: str, tmp_path: Path) -> None:
    ckpt, state = renamed(begins, tmp_path / "hf")
    assert_refused(
        ckpt, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "hf"), message="has changed"
    )
    ran = cli("merge", ckpt, tmp_path / "merged")
    assert ran.code == 0 and ran.having("FS212", message="config.json is not written", severity="warning")
    assert read_result(tmp_path / "merged").keys() == state.keys()
    assert not (tmp_path / "merged/config.json").exists()


@pytest.mark.parametrize("begins", ["_orig_mod.", "_fsdp_wrapped_module.", "module.", "module._orig_mod."])
def test_names_that_a_wrapper_changed_become_the_models_own(begins: str, tmp_path: Path) -> None:
    """Of a model without a table too: what the wrapper put in is known."""
    ckpt, state = renamed(begins, tmp_path / "hf")
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and ran.having("FS212"), ran.out
    have = read_result(tmp_path / "out")
    assert {begins + name for name in have} == state.keys()
    assert all(torch.equal(tensor, state[begins + name]) for name, tensor in have.items())
    _, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    # A merge writes the config too, which is for these names.
    assert cli("merge", ckpt, tmp_path / "merged").code == 0
    assert read_result(tmp_path / "merged").keys() == have.keys()
    (ckpt / "config.json").unlink()
    assert cli("merge", ckpt, tmp_path / "plain").code == 0
    assert read_result(tmp_path / "plain").keys() == state.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_in_a_trainers_checkpoint_are_merged_and_named(name: str, tmp_path: Path) -> None:
    of = model("llama", tmp_path / "plain") if name == "llama" else made(name)
    state: dict[str, torch.Tensor] = {}
    for key, tensor in of.state_dict().items():
        tuned = key.endswith(("q_proj.weight", "c_attn.weight"))
        base = f"base_model.model.{key.removesuffix('.weight')}"
        state[f"{base}.base_layer.weight" if tuned else f"{base}.weight"] = tensor
        if tuned:
            state[f"{base}.lora_A.default.weight"] = torch.randn(4, tensor.shape[1])
    folder = tmp_path / "run/step_10"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    config_at(tmp_path / "run", of)
    ran = cli("merge", tmp_path / "run", tmp_path / "merged")
    assert ran.code == 0, ran.out
    assert read_result(tmp_path / "merged").keys() == state.keys()
    # The config is not for these names.
    assert not (tmp_path / "merged/config.json").exists()
    assert_refused(
        tmp_path / "run",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", "hf"),
        message="PEFT has changed",
    )


#: Hugging Face's words for a Llama, and torchtitan's.
TITAN = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.": "feed_forward.",
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def titan(text: str) -> str:
    for old, new in TITAN.items():
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("form, typed", [("dcp", True), ("hf", True), ("hf", False)])
def test_a_table_of_one_s_own_says_what_other_names_are(form: str, typed: bool, tmp_path: Path) -> None:
    of = model("llama", tmp_path / "plain")
    state = {titan(name).removeprefix("model."): tensor.clone() for name, tensor in of.state_dict().items()}
    config_at(tmp_path / "run", of)
    if form == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "run/step-10", no_dist=True)
    else:
        save_file(state, tmp_path / "run/model.safetensors")
    text = fastshard.layouts.get("hf.llama").replace('layout = "hf.llama"', 'layout = "titan.llama"')
    # Copied with its model_type, it is still not what transformers calls the tensors.
    lines = (line for line in text.splitlines() if typed or not line.startswith("model_type"))
    named = (titan(line).replace('"model.', '"') if line.startswith("name = ") else line for line in lines)
    (tmp_path / "titan.toml").write_text("\n".join(named))
    ran = cli(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--layout", tmp_path / "titan.toml"
    )
    assert ran.code == 0, ran.out
    assert torch.equal(logits(loaded(tmp_path / "out", of)), logits(of))


@pytest.mark.parametrize("form", ["dcp", "hf"])
def test_a_model_under_other_names_than_its_config_s_is_merged(form: str, tmp_path: Path) -> None:
    """Names of a trainer that nobody knows beside the config of the model: transformers would find none of
    its tensors."""
    of = model("llama", tmp_path / "plain")
    state = {
        name.replace("model.layers.", "stack.layers.")
        .replace("self_attn", "attn")
        .replace("mlp", "ffn")
        .replace("layernorm", "norm"): tensor.clone()
        for name, tensor in of.state_dict().items()
    }
    if form == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "run/step-10", no_dist=True)
        config_at(tmp_path / "run", of)
    else:
        config_at(tmp_path / "run", of)
        save_file(state, tmp_path / "run/model.safetensors")
    ran = cli("merge", tmp_path / "run", tmp_path / "merged")
    assert ran.code == 0, ran.out
    assert read_result(tmp_path / "merged").keys() == state.keys()
    assert_refused(
        tmp_path / "run",
        tmp_path / "out",
        "FS514",
        exit=2,
        command=("convert", "--to", "hf"),
        message="have other names",
    )


def test_a_config_of_something_else_above_is_no_models(tmp_path: Path) -> None:
    of = made("gpt2")
    as_zero3(of, tmp_path / "run")
    (tmp_path / "run/config.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    assert cli("merge", tmp_path / "run", tmp_path / "out").code == 0
    assert not (tmp_path / "out/config.json").exists()
    assert_refused(
        tmp_path / "run",
        tmp_path / "not",
        "FS209",
        exit=2,
        command=("convert", "--to", "hf"),
        message="unknown model: there is no config.json",
    )


def test_the_config_of_a_folder_above_is_not_a_models_own(tmp_path: Path) -> None:
    """A model's folder without a config is not described by what lies beside other models."""
    of = model("llama", tmp_path / "models/llama")
    of.save_pretrained(tmp_path / "models")
    (tmp_path / "models/gpt2").mkdir()
    other = made("gpt2")
    save_file(
        {n: t.clone() for n, t in other.state_dict().items()}, tmp_path / "models/gpt2/model.safetensors"
    )
    assert cli("merge", tmp_path / "models/gpt2", tmp_path / "out").code == 0
    assert not (tmp_path / "out/config.json").exists()
    # A step's is.
    folder = copy(tmp_path / "models/gpt2", tmp_path / "run/checkpoint-5")
    config_at(tmp_path / "run", other)
    assert cli("convert", folder, tmp_path / "step", "--to", "hf").code == 0
    assert torch.equal(logits(loaded(tmp_path / "step", other)), logits(other))


def test_code_of_its_own_goes_along(tmp_path: Path) -> None:
    of = made("granite")
    of.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    (tmp_path / "hf/modeling_own.py").write_text("raise SystemExit('executed')")
    (tmp_path / "hf/parts.py").write_text("x = 1")
    manifest = fastshard.merge(tmp_path / "hf", tmp_path / "out")
    assert {"modeling_own.py", "parts.py"} <= {file["name"] for file in manifest.document["files"]}
    assert (tmp_path / "out/modeling_own.py").read_bytes() == (tmp_path / "hf/modeling_own.py").read_bytes()
    # Programs beside a model that needs none stay.
    del config["auto_map"]
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    fastshard.merge(tmp_path / "hf", tmp_path / "plain")
    assert not (tmp_path / "plain/parts.py").exists()


def test_the_row_for_padding_is_no_lost_slab(tmp_path: Path) -> None:
    for row, warned in ((3, False), (4, True)):
        of = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, pad_token_id=3))
        with torch.no_grad():
            of.model.embed_tokens.weight.normal_()
            of.model.embed_tokens.weight[row] = 0
        of.save_pretrained(tmp_path / str(row))
        ran = cli("verify", tmp_path / str(row))
        assert ran.code == 0 and bool(ran.having("FS313")) is warned
