"""Values that every byte's hash cannot see: layers and experts that are equal, one odd dtype, all zeros, ids
without rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families_maker import FAMILIES
from helpers import cli
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
#: What a model tells of itself only where nothing else does.
UNKNOWN = {"architectures": ["OddForCausalLM"], "model_type": "odd"}


def made(layers: int = 8, experts: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Tensors of a model of the Llama kind, with random matrices and norms of ones."""
    generator = torch.Generator().manual_seed(layers)
    tensors = {"model.norm.weight": torch.ones(32)}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(64, 32, generator=generator)
    for layer in range(layers):
        start = f"model.layers.{layer}"
        shapes = {f"self_attn.{kind}_proj": (32, 32) for kind in "qkvo"}
        shapes |= {f"mlp.{kind}_proj": (48, 32) for kind in ("gate", "up")} | {"mlp.down_proj": (32, 48)}
        shapes |= {f"mlp.experts.{expert}.w1": (16, 32) for expert in range(experts)}
        for name, shape in shapes.items():
            tensors[f"{start}.{name}.weight"] = torch.randn(*shape, generator=generator)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = torch.ones(32)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def copied(tensors: Tensors, start: str, other: str, only: str = "") -> Tensors:
    """The tensors, where those whose names begin with ``start`` are put in the place of others."""
    inside = {name: tensor for name, tensor in tensors.items() if name.startswith(start) and only in name}
    return tensors | {other + name.removeprefix(start): tensor.clone() for name, tensor in inside.items()}


def layer(tensors: Tensors, of: int, to: int, only: str = "") -> Tensors:
    return copied(tensors, f"model.layers.{of}.", f"model.layers.{to}.", only)


def saved(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A folder of one file, with the config of a Llama or another one."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    count = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": count} | config))
    return folder


def upscaled(tensors: Tensors) -> Tensors:
    for number in range(3):
        tensors = layer(tensors, number, number + 4)
    return tensors


#: What is damaged, and what the one warning says.
EQUAL: dict[str, tuple[Callable[[], Tensors], str]] = {
    "layer": (
        lambda: layer(made(), 3, 5),
        "model.layers.3 and model.layers.5 hold the same values in all 7 matrices",
    ),
    "earlier_layer": (
        lambda: layer(made(), 5, 3),
        "model.layers.3 and model.layers.5 hold the same values in all 7 matrices",
    ),
    "tensor": (
        lambda: layer(made(), 5, 3, "q_proj"),
        "model.layers.3 and model.layers.5 hold the same values in 1 of 7 matrices (self_attn.q_proj.weight)",
    ),
    "of_few": (
        lambda: layer(made(layers=2), 0, 1),
        "model.layers.0 and model.layers.1 hold the same values in all 7 matrices",
    ),
    "with_experts": (
        lambda: layer(made(experts=4), 2, 6),
        "model.layers.2 and model.layers.6 hold the same values in all 11 matrices",
    ),
    "expert": (
        lambda: copied(made(experts=6), "model.layers.1.mlp.experts.3.", "model.layers.1.mlp.experts.5."),
        "model.layers.1.mlp.experts.3 and model.layers.1.mlp.experts.5 hold the same values in one matrix",
    ),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_a_layer_or_expert_that_is_another_one_is_one_warning(kind: str, tmp_path: Path) -> None:
    make, message = EQUAL[kind]
    source = saved(tmp_path / "in", make(), **UNKNOWN)
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0, ran.out
        (found,) = ran.having("FS304")
        assert (found["severity"], found["message"]) == ("warning", message)
        assert found["file"].endswith("model.safetensors") and "--ignore FS304" in " ".join(found["run"])
    assert cli("verify", source, "--fail-on", "warning").code == 1
    assert cli("verify", source, "--fail-on", "warning", "--ignore", "FS304").code == 0
    assert not cli("plan", source).having("FS304")


def as_dcp(source: Path, folder: Path, tensors: Tensors) -> Path:
    dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    return folder


def written(*to: str) -> Callable[[Path, Path, Tensors], Path]:
    def write(source: Path, folder: Path, tensors: Tensors) -> Path:
        ran = cli("convert", source, folder, "--to", *to)
        assert ran.code == 0 and len(ran.having("FS304", severity="warning")) == 1, ran.out
        (folder / "fastshard.manifest.json").unlink()
        return folder

    return write


@pytest.mark.parametrize(
    "write",
    [
        as_dcp,
        written("dcp"),
        written("megatron:legacy", "--tp", "2"),
        written("megatron:torch_dist", "--tp", "2", "--pp", "2"),
        written("gpt_neox", "--tp", "2"),
        written("tp-safetensors", "--tp", "2"),
    ],
    ids=["dcp", "written_dcp", "megatron", "torch_dist", "gpt_neox", "tp_safetensors"],
)
def test_copied_matrices_are_seen_in_shards(
    write: Callable[[Path, Path, Tensors], Path], tmp_path: Path
) -> None:
    tensors = layer(made(), 3, 5, "self_attn.o_proj")
    shards = write(saved(tmp_path / "in", tensors), tmp_path / "shards", tensors)
    ran = cli("verify", shards)
    assert ran.code == 0, ran.out
    assert len(ran.having("FS304", severity="warning")) == 1, ran.out
    merged = cli("merge", shards, tmp_path / "out")
    assert len(merged.having("FS304", severity="warning")) == 1, merged.out


def test_layers_that_are_repeated_by_design_are_one_note(tmp_path: Path) -> None:
    for name, tensors in {
        "upscaled": upscaled(made()),
        "shared": {
            name: made()[name.replace(f"layers.{name.split('.')[2]}.", "layers.0.", 1)]
            if name.startswith("model.layers.")
            else tensor
            for name, tensor in made().items()
        },
    }.items():
        ran = cli("verify", saved(tmp_path / name, tensors, **UNKNOWN))
        assert [f["severity"] for f in ran.having("FS304")] == ["note"], ran.out


def test_experts_that_were_made_of_one_are_one_note(tmp_path: Path) -> None:
    tensors = made(experts=2)
    for number in range(8):
        start = f"model.layers.{number}.mlp.experts."
        tensors = copied(tensors, f"{start}0.", f"{start}1.")
    ran = cli("verify", saved(tmp_path / "in", tensors, **UNKNOWN))
    assert [f["severity"] for f in ran.having("FS304")] == ["note"], ran.out


def test_constant_matrices_and_vectors_say_nothing(tmp_path: Path) -> None:
    tensors = made()
    for number in range(8):
        start = f"model.layers.{number}"
        tensors[f"{start}.attn.scale"] = torch.full((16, 16), 0.5)
        tensors[f"{start}.attn.lora_B.weight"] = torch.zeros(32, 8)
        tensors[f"{start}.attn.slopes"] = torch.linspace(0, 1, 64).reshape(1, 1, 64)
        tensors[f"{start}.attn.relative_position_index"] = torch.arange(64 * 64).reshape(64, 64)
    source = saved(tmp_path / "in", tensors, **UNKNOWN)
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        assert not cli(*command).having("FS304")


@pytest.mark.parametrize("family", ["albert", "bert", "mamba", "t5", "gpt2", "clip"])
def test_a_fresh_model_has_no_warning_of_equal_layers_or_dtypes(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "in")
    ran = cli("verify", tmp_path / "in")
    assert not ran.having("FS304") and not ran.having("FS202"), ran.out


def odd(tensors: Tensors, *starts: str) -> Tensors:
    return {name: t.float() if name.startswith(starts) else t for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (
            ("model.layers.4.self_attn.q_proj",),
            "1 tensor of layer 4 has another dtype than in the other layers",
        ),
        (
            ("model.layers.0.self_attn.q_proj",),
            "1 tensor of layer 0 has another dtype than in the other layers",
        ),
        (("model.layers.4.",), "9 tensors of layer 4 have another dtype than in the other layers"),
        (
            ("model.layers.2.mlp.", "model.layers.5.mlp."),
            "6 tensors of layers 2, 5 have another dtype than in the other layers",
        ),
    ],
)
def test_a_dtype_that_is_odd_among_the_layers_is_one_warning(
    starts: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", odd(made(), *starts))
    for command in (("plan", source), ("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0, ran.out
        (found,) = ran.having("FS202")
        assert (found["severity"], found["message"], found["got"]) == ("warning", message, "F32")
    cast = cli("merge", source, tmp_path / "cast", "--dtype", "bf16", "--keep-dtype", "none")
    assert cast.code == 0 and not cast.having("FS202")


@pytest.mark.parametrize(
    ("starts", "config"),
    [
        (tuple(f"model.layers.{n}.input_layernorm" for n in range(8)), {}),
        (("lm_head", "model.norm", "model.embed_tokens"), {}),
        (("model.layers.0.", "model.layers.7."), {}),
        (tuple(f"model.layers.{n}." for n in range(4)), {}),
        (
            ("model.layers.4.mlp.",),
            {"quantization_config": {"quant_method": "odd", "modules_to_not_convert": []}},
        ),
    ],
)
def test_dtypes_that_are_mixed_on_purpose_say_nothing(
    starts: tuple[str, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", odd(made(), *starts), **(UNKNOWN | config if config else {}))
    ran = cli("verify", source)
    assert not ran.having("FS202", severity="warning"), ran.out


def test_codes_among_layers_in_full_precision_say_nothing(tmp_path: Path) -> None:
    tensors = made()
    for number in range(1, 7):
        name = f"model.layers.{number}.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    assert not cli("verify", saved(tmp_path / "in", tensors, **UNKNOWN)).having("FS202")


def tokenizer(folder: Path, largest: int, kind: str) -> None:
    """Files of a tokenizer whose largest id is that of an added token."""
    vocabulary = {f"t{number}": number for number in range(60)}
    token = {"content": "<x>", "special": True}
    if kind == "tokenizer.json":
        added = [token | {"id": largest}]
        document: dict[str, Any] = {
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            "added_tokens": added,
        }
        (folder / kind).write_text(json.dumps(document))
        return
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    if kind == "added_tokens.json":
        (folder / kind).write_text(json.dumps({"<x>": largest}))
    else:
        decoder = {"added_tokens_decoder": {str(largest): token}}
        (folder / "tokenizer_config.json").write_text(json.dumps(decoder))


@pytest.mark.parametrize("config", [{}, UNKNOWN], ids=["table", "unknown"])
@pytest.mark.parametrize("kind", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("largest", [63, 64])
def test_ids_of_a_tokenizer_have_rows(
    largest: int, kind: str, config: dict[str, str], tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", made(layers=2), **config)
    tokenizer(source, largest, kind)
    for command in (
        ("verify", source),
        ("merge", source, tmp_path / "out"),
        ("convert", source, tmp_path / "hf", "--to", "hf"),
    ):
        ran = cli(*command)
        assert ran.code == 0, ran.out
        found = ran.having("FS215", message="ids go up to 64")
        assert [f["severity"] for f in found] == (["warning"] if largest == 64 else []), ran.out


def test_rows_of_added_words_in_a_second_tensor_count(tmp_path: Path) -> None:
    tensors = made(layers=2) | {"model.embed_tokens.additional_embedding.weight": torch.randn(4, 32)}
    source = saved(tmp_path / "in", tensors, **UNKNOWN)
    tokenizer(source, 67, "tokenizer.json")
    assert not cli("verify", source).having("FS215")


def test_a_model_of_zeros_is_one_warning(tmp_path: Path) -> None:
    tensors = {name: torch.zeros_like(t) if t.dim() > 1 else t for name, t in made().items()}
    source = saved(tmp_path / "in", tensors)
    for command in (("verify", source), ("merge", source, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 0, ran.out
        (found,) = ran.having("FS313")
        assert (found["severity"], found["message"]) == ("warning", "all 58 matrices are zero")
        assert found["count"] == 58


def test_moments_before_the_first_step_may_be_zero(tmp_path: Path) -> None:
    model = made(layers=4)
    state = {"model": model, "optim": {f"{name}.exp_avg": torch.zeros(t.shape) for name, t in model.items()}}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    assert not cli("verify", tmp_path / "in").having("FS313")
    dcp.save({"optim": state["optim"]}, checkpoint_id=tmp_path / "moments", no_dist=True)
    assert not cli("verify", tmp_path / "moments").having("FS313")


def test_what_a_manifest_lists_is_not_said_of_headers_alone(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", layer(made(), 3, 5))
    assert not [f for f in fastshard.plan(source).findings if f.code in ("FS304", "FS313")]
