"""Parts that config.json promises, such as MTP layers or a vision tower, and of which nothing or not all is
there: one finding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.expected.promised_parts import lacking, promised
from helpers import ask_transformers_here, cli
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = SIZES | {
    "moe_intermediate_size": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 7,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
MODELS: dict[str, Callable[[], Any]] = {
    # With a table, which knows of MTP layers and of shared experts.
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**EXPERTS | LATENT)),
    # Without.
    "glm": lambda: transformers.Glm4MoeLiteForCausalLM(
        transformers.Glm4MoeLiteConfig(
            **EXPERTS | LATENT, mlp_layer_types=["dense", "sparse", "sparse"], num_nextn_predict_layers=1
        )
    ),
    "qwen": lambda: transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **SIZES,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            mtp_num_hidden_layers=1,
        )
    ),
    "llava": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**SIZES),
            vision_config=transformers.CLIPVisionConfig(**VISION),
        )
    ),
    "qwen_vl": lambda: transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=SIZES
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}},
            # Of so many layers that the list of what is missing ends before.
            vision_config={
                "depth": 12,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 4,
                "out_hidden_size": 16,
            },
        )
    ),
}
ONE_MTP = "config.json promises 1 MTP layer (num_nextn_predict_layers)"


@cache
def made(name: str) -> tuple[Tensors, dict[str, Any]]:
    """What transformers saves of a model: tensors and config."""
    torch.manual_seed(5)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return load_file(Path(folder) / "model.safetensors"), config


def saved(folder: Path, tensors: Tensors, config: dict[str, Any], index: Iterable[str] = ()) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    index = list(index)
    file = "model-00001-of-00001.safetensors" if index else "model.safetensors"
    save_file({n: t.clone() for n, t in tensors.items()}, folder / file, {"format": "pt"})
    if index:
        named = {"metadata": {}, "weight_map": dict.fromkeys([*tensors, *index], file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    return folder


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {name: t for name, t in tensors.items() if not any(part in name for part in parts)}


def mtp_of(name: str) -> Tensors:
    """The layer that predicts one more token, as it is published."""
    have, _ = made(name)
    if name == "qwen":
        layer = {
            n.replace("model.layers.2.", "mtp.layers.0."): t + 1 for n, t in have.items() if ".layers.2." in n
        }
        sizes = {"fc": (16, 32), "pre_fc_norm_embedding": (16,), "pre_fc_norm_hidden": (16,), "norm": (16,)}
        return layer | {f"mtp.{n}.weight": torch.randn(size) for n, size in sizes.items()}
    layer = {n.replace("layers.2.", "layers.3."): t + 1 for n, t in have.items() if ".layers.2." in n}
    sizes = {
        "enorm": (16,),
        "hnorm": (16,),
        "eh_proj": (16, 32),
        "embed_tokens": (40, 16),
        "shared_head.norm": (16,),
        "shared_head.head": (40, 16),
    }
    return layer | {f"model.layers.3.{n}.weight": torch.randn(size) for n, size in sizes.items()}


def half(tensors: Tensors) -> Tensors:
    return dict(sorted(tensors.items())[::2])


def told(path: Path) -> list[fastshard.Finding]:
    """Errors and warnings of verifying what lies there."""
    try:
        findings = list(fastshard.verify(path))
    except fastshard.FastshardError as error:
        findings = list(error.findings)
    return [f for f in findings if f.severity != "note"]


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")


# --- MTP layers


@pytest.mark.parametrize("name", ["deepseek", "glm", "qwen"])
def test_mtp_layers_that_are_missing_are_a_warning(name: str, tmp_path: Path) -> None:
    """transformers drops them when it loads, and saves such checkpoints."""
    tensors, config = made(name)
    key = "mtp_num_hidden_layers" if name == "qwen" else "num_nextn_predict_layers"
    assert config[key] == 1
    source = saved(tmp_path / "in", tensors, config)
    (found,) = told(source)
    assert (found.code, found.severity, found.tensor) == ("FS116", "warning", None)
    assert found.message == f"config.json promises 1 MTP layer ({key}), and no file holds any of it"
    assert key in (found.help or "")
    ran = cli("verify", source)
    assert ran.code == 0 and [f["message"] for f in ran.having("FS116")] == [found.message]
    for i, command in enumerate((["verify"], ["merge"], ["convert", "--to", "hf"])):
        out = [] if command == ["verify"] else [tmp_path / str(i)]
        ran = cli(command[0], source, *out, *command[1:], "--error", "FS116")
        assert (ran.code, [f["code"] for f in ran.errors]) == (1, ["FS116"]), ran.out
        assert not any(path.exists() for path in out)
        if out:
            ran = cli(command[0], source, *out, *command[1:])
            assert ran.code == 0 and len(ran.having("FS116")) == 1, ran.out
    assert cli("verify", source, "--ignore", "FS116", "--fail-on", "warning").code == 0


@pytest.mark.parametrize("name", ["deepseek", "glm", "qwen"])
def test_mtp_layers_that_are_there_are_no_finding(name: str, tmp_path: Path) -> None:
    tensors, config = made(name)
    assert told(saved(tmp_path / "in", tensors | mtp_of(name), config)) == []
    for i, value in enumerate((0, None)):
        key = "mtp_num_hidden_layers" if name == "qwen" else "num_nextn_predict_layers"
        assert told(saved(tmp_path / str(i), tensors, config | {key: value})) == []


def test_a_model_without_an_output_layer_predicts_no_further_tokens(tmp_path: Path) -> None:
    tensors, config = made("deepseek")
    base = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    assert told(saved(tmp_path / "in", base, config | {"architectures": ["DeepseekV3Model"]})) == []


def test_mtp_layers_that_the_index_names_are_an_error(tmp_path: Path) -> None:
    for name in ("deepseek", "glm"):
        tensors, config = made(name)
        source = saved(tmp_path / name, tensors, config, list(mtp_of(name))[:5])
        (found,) = told(source)
        assert (found.code, found.severity, found.count) == ("FS102", "error", 5)
        assert found.message == f"{ONE_MTP}; its 5 tensors that the index names are missing"
        assert found.effect is not None and set(found.effect.tensors) == set(list(mtp_of(name))[:5])
        assert cli("verify", source).code == cli("merge", source, tmp_path / "out").code == 3


@pytest.mark.parametrize("name", ["deepseek", "glm", "qwen"])
def test_half_of_the_mtp_layers_is_an_error(name: str, tmp_path: Path) -> None:
    tensors, config = made(name)
    source = saved(tmp_path / "in", tensors | half(mtp_of(name)), config)
    (found,) = [f for f in told(source) if f.severity == "error"]
    assert found.code == "FS102" and found.message.startswith("config.json promises 1 MTP layer ("), found
    assert "are missing" in found.message
    if name == "deepseek":
        # The table knows each of them.
        gone = set(mtp_of(name)) - set(half(mtp_of(name)))
        assert {part.tensor for part in found.parts} == gone and found.count == len(gone)
        assert f"{len(gone)} of its {len(mtp_of(name))} tensors are missing" in found.message


def test_fewer_mtp_layers_than_promised_are_an_error(tmp_path: Path) -> None:
    tensors, config = made("glm")
    source = saved(tmp_path / "glm", tensors | mtp_of("glm"), config | {"num_nextn_predict_layers": 2})
    (found,) = told(source)
    assert (found.code, found.severity) == ("FS102", "error") and "2 MTP layers" in found.message
    assert "MTP layer 2" in (found.got or "")
    # Of a table it is one of the layers that it counts.
    tensors, config = made("deepseek")
    tensors = tensors | mtp_of("deepseek")
    source = saved(tmp_path / "deepseek", tensors, config | {"num_nextn_predict_layers": 2})
    (found,) = told(source)
    assert (found.code, found.severity) == ("FS103", "error") and found.message.startswith(
        "layer 4 is missing"
    )


# --- towers


@pytest.mark.parametrize(
    ("name", "part", "count"), [("llava", "vision_tower.", 39), ("qwen_vl", "visual.", None)]
)
def test_a_tower_that_is_missing_is_one_error(
    name: str, part: str, count: int | None, tmp_path: Path
) -> None:
    tensors, config = made(name)
    assert told(saved(tmp_path / "good", tensors, config)) == []
    left = without(tensors, part)
    count = count or len(tensors) - len(left)
    assert len(tensors) - len(left) == count and (count > 100) == (name == "qwen_vl")
    source = saved(tmp_path / "in", left, config)
    (found,) = told(source)
    assert (found.code, found.severity, found.count) == ("FS102", "error", count)
    assert (
        found.message
        == f"config.json promises a vision tower (vision_config); its {count} tensors are missing"
    )
    assert found.effect is not None and found.effect.count == count
    assert (
        found.evidence == f"{config['architectures'][0]} of transformers {transformers.__version__} has them"
    )
    assert cli("merge", source, tmp_path / "out").code == 3
    # The same where an index names them.
    (found,) = told(saved(tmp_path / "index", left, config, tensors.keys() - left.keys()))
    assert (found.code, found.severity, found.count) == ("FS102", "error", count)


def test_a_tower_of_which_something_is_there_is_named_with_its_tensors(tmp_path: Path) -> None:
    tensors, config = made("llava")
    lost = ("vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.bias")
    (found,) = told(saved(tmp_path / "in", without(tensors, *lost), config))
    assert (
        found.message
        == "config.json promises a vision tower (vision_config); 2 of its 39 tensors are missing"
    )
    assert {part.tensor for part in found.parts} == set(lost)
    (found,) = told(saved(tmp_path / "one", without(tensors, lost[0]), config))
    assert (found.code, found.tensor) == ("FS102", lost[0])


def test_a_class_without_the_tower_needs_none(tmp_path: Path) -> None:
    """The language model of a model that sees, by itself."""
    tensors, config = made("llava")
    text = {
        n.replace("language_model.", "", 1): t for n, t in tensors.items() if n.startswith("language_model.")
    }
    own = config["text_config"] | {
        "architectures": ["LlamaForCausalLM"],
        "vision_config": config["vision_config"],
    }
    assert told(saved(tmp_path / "in", text, own)) == []


def test_a_trainer_that_left_out_a_frozen_tower_is_not_accused_anew(tmp_path: Path) -> None:
    """What is saved of a part that was trained, as DCP, without the embedding: warnings, as before."""
    tensors, config = made("llava")
    trained = {n: t for n, t in tensors.items() if n.startswith("multi_modal_projector.")}
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    assert not [f for f in told(tmp_path / "in") if f.severity == "error" and f.code != "FS515"]
    assert not [f for f in told(tmp_path / "in") if f.code == "FS116"]


def test_a_quantised_model_without_its_tower_is_a_warning(tmp_path: Path) -> None:
    """Nothing lists the tensors of what is quantised."""
    tensors, config = made("llava")
    config = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    assert [f for f in told(saved(tmp_path / "good", tensors, config)) if f.code == "FS116"] == []
    (found,) = [
        f
        for f in told(saved(tmp_path / "in", without(tensors, "vision_tower."), config))
        if f.code == "FS116"
    ]
    assert "promises a vision tower (vision_config)" in found.message and "null" in (found.help or "")


# --- shared experts, and what else


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_shared_experts_that_are_missing_are_one_error(name: str, tmp_path: Path) -> None:
    tensors, config = made(name)
    config = config | {"num_nextn_predict_layers": 0}
    left = without(tensors, ".shared_experts.")
    (found,) = told(saved(tmp_path / "in", left, config))
    assert (found.code, found.severity, found.count) == ("FS102", "error", 6)
    assert (
        found.message == "config.json promises shared experts (n_shared_experts); their 6 tensors are missing"
    )


def test_very_many_tensors_of_a_part_are_counted(tmp_path: Path) -> None:
    """More than are told one by one."""
    tensors, config = made("deepseek")
    config = config | {"num_nextn_predict_layers": 0, "num_hidden_layers": 60}
    layer = {n: t for n, t in tensors.items() if ".layers.2." in n and ".shared_experts." not in n}
    left = without(tensors, ".shared_experts.")
    for i in range(3, 60):
        left |= {n.replace(".layers.2.", f".layers.{i}."): t for n, t in layer.items()}
    (found,) = told(saved(tmp_path / "in", left, config))
    assert (found.count, found.code) == (59 * 3, "FS102") and "their 177 tensors are missing" in found.message
    ran = cli("convert", tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert [f["message"] for f in ran.errors] == [found.message]


def test_a_file_that_is_missing_accounts_for_the_part(tmp_path: Path) -> None:
    tensors, config = made("deepseek")
    source = saved(tmp_path / "in", tensors, config, mtp_of("deepseek"))
    index = source / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"] |= dict.fromkeys(mtp_of("deepseek"), "model-00002-of-00002.safetensors")
    index.write_text(json.dumps(named))
    assert {f.code for f in told(source)} == {"FS101"}


def test_a_tensor_of_a_part_can_be_traced(tmp_path: Path) -> None:
    tensors, config = made("deepseek")
    source = saved(tmp_path / "in", without(tensors, ".shared_experts."), config)
    ran = cli("trace", source, "model.layers.1.mlp.shared_experts.up_proj.weight", json_output=False)
    assert ran.code == 3 and "not in the result" in ran.out + ran.err


# --- the table of parts


def test_a_config_promises_what_it_says() -> None:
    def of(**config: Any) -> list[str]:
        return [str(part) for part in promised(config)]

    assert of(num_nextn_predict_layers=2, index_n_heads=4) == [
        "2 MTP layers (num_nextn_predict_layers)",
        "an indexer (index_n_heads)",
    ]
    assert of(num_nextn_predict_layers=0, index_n_heads=None, vision_config=None, n_shared_experts=0) == []
    assert of(num_nextn_predict_layers=True, num_mtp_layers="1", vision_config={}) == []
    assert of(text_config={"mtp_num_hidden_layers": 1, "shared_expert_intermediate_size": 8}) == [
        "1 MTP layer (text_config.mtp_num_hidden_layers)",
        "shared experts (text_config.shared_expert_intermediate_size)",
    ]
    assert of(audio_config={"d_model": 8}, vision_config={"depth": 1}) == [
        "a vision tower (vision_config)",
        "an audio tower (audio_config)",
    ]
    # A class of text alone, and one that predicts no tokens.
    assert of(architectures=["Gemma3ForCausalLM"], vision_config={"depth": 1}) == []
    assert of(architectures=["DeepseekV3ForSequenceClassification"], num_nextn_predict_layers=1) == []


NAMES = {
    "MTP layer": [
        "mtp.fc.weight",
        "model.mtp_layers.0.eh_proj.weight",
        "model.mtp_block.0.mlp.up_proj.weight",
        "mtp.0.attn.wq",
        "model.layers.2.enorm.weight",
        "language_model.model.layers.61.mlp.gate.weight",
        "model.mtp_emb_norm.0.weight",
    ],
    "vision tower": [
        "visual.blocks.0.attn.qkv.weight",
        "model.vision_tower.vision_model.embeddings.weight",
        "vision_model.x.weight",
        "model.visual.merger.mlp.weight",
        "vit.layers.0.weight",
        "vpm.encoder.weight",
        "img_processor.x.weight",
    ],
    "audio tower": [
        "audio_tower.layers.0.fc1.weight",
        "model.audio_encoder.conv1.weight",
        "apm.layers.0.weight",
    ],
    "indexer": ["model.layers.0.self_attn.indexer.wk.weight"],
    "shared experts": [
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.shared_mlp.input_linear.weight",
        "model.layers.4.share_expert.up_proj.weight",
    ],
}
NEITHER = [
    "model.layers.60.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "multi_modal_projector.linear_1.weight",
    "model.vision_projection.weight",
    "model.embed_vision.weight",
    "model.layers.3.mlp.experts.7.up_proj.weight",
    "model.image_newline",
    "model.layers.0.self_attn.q_proj.weight",
]


def test_tensors_of_parts_are_known_by_their_names() -> None:
    config = {
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "vision_config": {"depth": 1},
        "audio_config": {"d_model": 8},
        "index_n_heads": 2,
        "n_shared_experts": 1,
    }
    parts = {part.kind.word: part for part in promised(config)}
    assert parts.keys() == NAMES.keys()
    for word, names in NAMES.items():
        for name in names:
            assert [w for w, part in parts.items() if part.holds(name)] == [word], name
    assert [name for name in NEITHER if any(part.holds(name) for part in parts.values())] == []
    # A tower may have more layers than words go through.
    assert not parts["MTP layer"].holds("vision_tower.encoder.layers.62.mlp.fc1.weight")


def test_configs_and_names_may_say_anything(tmp_path: Path) -> None:
    """Of any length and any number: none takes long."""
    long = "vision" * 200_000
    config = {
        "architectures": ["For" * 200_000],
        "num_nextn_predict_layers": 10**12,
        "num_hidden_layers": 1,
        "mtp" * 200_000: 1,
        "vision_config": {"vision_config": {}, "depth": 2},
        "index_n_heads": 1,
        "n_shared_experts": 1,
    }
    parts = promised(config)
    assert [part.kind.word for part in parts] == ["MTP layer", "vision tower", "indexer", "shared experts"]
    names = [
        long,
        f"{long}.weight",
        "indexer" * 200_000,
        "mtp" * 200_000,
        "mtp.layers.0.x.weight",
        "a." * 200_000,
        "layers." * 200_000,
    ]
    assert [sum(map(part.holds, names)) for part in parts] == [1, 1, 0, 0]
    assert len(lacking(parts[0], names)) == 100


def test_layers_of_mtp_are_judged_by_the_layers_of_the_model() -> None:
    (part,) = promised({"num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    modules = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    body = [f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in modules]
    for prefix in ("model.layers.2.", "mtp.layers.0.", "model.mtp_block.0."):
        block = [f"{prefix}{module}.weight" for module in modules]
        assert lacking(part, body + block) == [] and lacking(part, body) == []
        assert lacking(part, body + block[:4]) == [
            "mlp.down_proj of MTP layer 1",
            "mlp.up_proj of MTP layer 1",
        ]
        # One that has a little less may be made so; of what joins it to the layers before all is needed.
        assert lacking(part, body + block[:5]) == []
        assert lacking(part, [*body, *block, f"{prefix}enorm.weight"]) == [
            "hnorm of MTP layer 1",
            "eh_proj of MTP layer 1",
        ]
    (several,) = promised({"num_hidden_layers": 2, "num_mtp_layers": 3, "mtp_use_repeated_layer": True})
    assert lacking(several, body + [f"mtp.layers.0.{module}.weight" for module in modules]) == []
