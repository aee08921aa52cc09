"""Models whose names in memory differ from those on disk: what a trainer saves becomes what transformers
loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zero_maker
from helpers import Ran, assert_refused, cli, edit_safetensors, read_result
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llava": lambda **more: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=TEXT | {"model_type": "llama"} | more,
            vision_config=VISION | {"model_type": "clip_vision_model"},
            image_token_index=95,
        )
    ),
    "qwen2_5_vl": lambda **more: transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE} | more,
            image_token_id=93,
            video_token_id=94,
            vision_start_token_id=92,
            vision_end_token_id=91,
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "patch_size": 8,
                "spatial_merge_size": 2,
                "fullatt_block_indexes": [1],
                "window_size": 32,
            },
        )
    ),
    "gemma3": lambda **more: transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=TEXT | {"head_dim": 8} | more,
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=95,
        )
    ),
    "whisper": lambda **more: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **{
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "vocab_size": 96,
                "num_mel_bins": 8,
                "max_source_positions": 16,
                "max_target_positions": 16,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
                **more,
            }
        )
    ),
    "t5": lambda **more: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **{
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": 96,
                "decoder_start_token_id": 0,
                **more,
            }
        )
    ),
    "mixtral": lambda **more: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT | {"num_local_experts": 4} | more)
    ),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **TEXT
            | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            | more,
        )
    ),
}
#: Families whose parts lie elsewhere in memory.
MOVED = ["llava", "qwen2_5_vl", "gemma3"]


def made(family: str, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = FAMILIES[family](**more)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases that are not one and zero show where they belong.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def of_dcp(content: Any, folder: Path) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def of_torch(content: Any, folder: Path) -> Path:
    folder.mkdir()
    torch.save(content, folder / "pytorch_model.bin")
    return folder


#: What a trainer saves, and how it is made a model again.
FORMS: dict[str, tuple[Callable[[State, Path], Path], tuple[str, ...]]] = {
    "dcp, below model": (lambda state, at: of_dcp({"model": state}, at), ("merge",)),
    "dcp, the state dict itself": (of_dcp, ("convert", "--to", "hf")),
    "torch.save": (of_torch, ("merge",)),
}


def outputs(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 12)[None]
    if model.config.model_type == "whisper":
        torch.manual_seed(6)
        given = {"input_features": torch.randn(1, 8, 32), "decoder_input_ids": ids}
    else:
        given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        return model(**given).logits


def run(command: tuple[str, ...], source: Path, out: Path, like: Path) -> Ran:
    return cli(command[0], source, out, *command[1:], "--like", like)


def reference(family: str, folder: Path, **more: Any) -> Path:
    made(family, 1, **more).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_is_written_like_a_reference(family: str, tmp_path: Path) -> None:
    like, model = reference(family, tmp_path / "like"), made(family, 2)
    state, want = dict(model.state_dict()), outputs(model)
    for number, (form, (save, command)) in enumerate(FORMS.items()):
        out = tmp_path / f"out{number}"
        ran = run(command, save(state, tmp_path / f"in{number}"), out, like)
        assert ran.code == 0 and ran.having("FS109", message="order of heads, and values"), (form, ran.out)
        assert read_result(like).keys() <= read_result(out).keys(), form
        loaded, told = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(told.values()), (form, told)
        have = loaded.eval().state_dict()
        assert have.keys() == state.keys() and all(torch.equal(have[n], t) for n, t in state.items()), form
        assert torch.equal(outputs(loaded), want), form


def test_zero_saves_take_the_names_of_the_reference(tmp_path: Path) -> None:
    """Masters are put together of ranges: they take them as whole tensors do, and so do their moments."""
    like, model = reference("llava", tmp_path / "like"), made("llava", 2)
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    (tmp_path / "zero").mkdir()
    source = zero_maker.write(tmp_path / "zero", zero_maker.Run(2, 2, torch.float32, [state]))
    ran = cli("merge", source, tmp_path / "out", "--like", like)
    assert ran.code == 0, ran.out
    _, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told


@pytest.mark.parametrize("family", MOVED)
def test_a_wrong_reference_is_refused(family: str, tmp_path: Path) -> None:
    state = dict(made(family, 2).state_dict())
    ckpt = of_dcp({"model": state}, tmp_path / "in")
    other = reference("gemma3" if family == "llava" else "llava", tmp_path / "other")
    assert_refused(ckpt, tmp_path / "out", "FS207", exit=1, options=("--like", other))
    # A layer more, or a layer less, than the reference has.
    longer = reference(family, tmp_path / "longer", num_hidden_layers=3)
    ran = cli("merge", ckpt, tmp_path / "out", "--like", longer)
    assert ran.code != 0 and {f["code"] for f in ran.errors} <= {"FS102", "FS103"}, ran.findings
    (longer / "config.json").unlink()
    deeper = of_dcp({"model": dict(made(family, 2, num_hidden_layers=3).state_dict())}, tmp_path / "deep")
    like = reference(family, tmp_path / "like")
    ran = cli("merge", deeper, tmp_path / "out", "--like", like)
    assert ran.code == 1 and {f["code"] for f in ran.errors} == {"FS207"}, ran.findings
    assert all(".layers.2." in f["tensor"] for f in ran.errors)
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_told_by_the_name_of_the_reference(tmp_path: Path) -> None:
    state = dict(made("llava", 2).state_dict())
    like = reference("llava", tmp_path / "like")
    lost = state.pop("model.language_model.layers.1.mlp.up_proj.weight")
    cut = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    state[cut] = state[cut][:24].clone()
    ran = cli("merge", of_dcp({"model": state}, tmp_path / "in"), tmp_path / "out", "--like", like)
    assert lost.shape and sorted((f["code"], f["tensor"]) for f in ran.errors) == [
        ("FS102", "language_model.model.layers.1.mlp.up_proj.weight"),
        ("FS208", "vision_tower.encoder.layers.0.mlp.fc1.weight"),
    ], ran.findings


def flat(folder: Path, names: dict[str, tuple[int, ...]], seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_file({n: torch.randn(shape) for n, shape in names.items()}, folder)
    return folder


#: A part, by what follows its prefix.
PART = {"layers.0.fc.weight": (3, 4), "layers.1.fc.weight": (3, 4), "norm.weight": (4,)}
REST = {"head.weight": (2, 4), "head.bias": (2,), "embed.weight": (5, 4), "pos.weight": (6, 4)}


def parts(*prefixes: str) -> dict[str, tuple[int, ...]]:
    return REST | {f"{prefix}.{n}": shape for prefix in prefixes for n, shape in PART.items()}


@pytest.mark.parametrize(
    ("here", "there", "got"),
    [
        (("tower",), ("left.tower", "right.tower"), ("with 'left.'", "with 'right.'")),
        (("left.tower", "right.tower"), ("tower",), ("without 'left.'", "without 'right.'")),
    ],
)
def test_of_two_prefixes_that_fit_none_is_taken(
    here: tuple[str, ...], there: tuple[str, ...], got: tuple[str, ...], tmp_path: Path
) -> None:
    source = flat(tmp_path / "in.safetensors", parts(*here))
    like = flat(tmp_path / "like.safetensors", parts(*there), 1)
    ran = cli("merge", source, tmp_path / "out", "--like", like)
    assert [f["code"] for f in ran.errors] == ["FS106"] and ran.code == 2, ran.findings
    assert all(one in ran.errors[0]["got"] for one in got), ran.errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [
        # What a part is called tells it from another of the same shapes.
        (("model.text", "model.sight"), ("text.model", "sight"), True),
        (("model.visual", "model.language_model"), ("visual", "model"), True),
        # Nothing says that one part is another, whatever its shapes.
        (("sight",), ("text",), False),
        (("model.sight",), ("model.text",), False),
    ],
)
def test_parts_of_one_shape_are_told_by_their_names(
    here: tuple[str, ...], there: tuple[str, ...], fits: bool, tmp_path: Path
) -> None:
    source = flat(tmp_path / "in.safetensors", parts(*here))
    like = flat(tmp_path / "like.safetensors", parts(*there), 1)
    ran = cli("merge", source, tmp_path / "out", "--like", like)
    if not fits:
        assert ran.code != 0 and {f["code"] for f in ran.errors} <= {"FS102", "FS103", "FS207"}, ran.findings
        return
    assert ran.code == 0, ran.out
    have, stored = read_result(tmp_path / "out"), load_file(source)
    for own, other in zip(here, there, strict=True):
        assert all(torch.equal(have[f"{other}.{n}"], stored[f"{own}.{n}"]) for n in PART)


def test_a_tie_is_told_by_bytes(tmp_path: Path) -> None:
    """Whatever the two are called; a tensor that has changed since is none."""
    like = reference("whisper", tmp_path / "like")
    state = dict(made("whisper", 2).state_dict())
    assert "proj_out.weight" in state and "proj_out.weight" not in read_result(like)
    good = of_dcp(state, tmp_path / "good")
    ran = cli("inspect", good, "--like", like)
    (told,) = ran.having("FS212", message="ties them to")
    assert told["tensor"] == "proj_out.weight" and "model.decoder.embed_tokens.weight" in told["got"]
    state["proj_out.weight"] = state["proj_out.weight"].clone()
    state["proj_out.weight"][-1, -1] += 1
    bad = of_dcp(state, tmp_path / "bad")
    assert_refused(bad, tmp_path / "out", "FS207", exit=1, options=("--like", like), tensor="proj_out.weight")


def test_a_head_that_differs_from_what_the_reference_ties_it_to_is_refused(tmp_path: Path) -> None:
    like = reference("t5", tmp_path / "like")
    state = dict(made("t5", 2).state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] * 2
    bad = of_dcp(state, tmp_path / "bad")
    assert_refused(bad, tmp_path / "out", "FS207", exit=1, options=("--like", like), tensor="lm_head.weight")


@pytest.mark.parametrize("what", ["one value", "another layer"])
def test_the_same_bytes_by_chance_are_no_tie(what: str, tmp_path: Path) -> None:
    flat(tmp_path / "like.safetensors", parts("model"))
    source = flat(tmp_path / "in.safetensors", parts("model"))
    if what == "one value":
        name = "extra.weight"
        for file in (source, tmp_path / "like.safetensors"):
            edit_safetensors(file, lambda t: t.update({"model.norm.weight": torch.ones(4)}))
        edit_safetensors(source, lambda t: t.update({name: torch.ones(4)}))
    else:
        name = "model.layers.2.fc.weight"
        edit_safetensors(source, lambda t: t.update({name: t["model.layers.1.fc.weight"].clone()}))
    ran = cli("inspect", source, "--like", tmp_path / "like.safetensors")
    assert [(f["code"], f["tensor"]) for f in ran.errors] == [("FS207", name)], ran.findings


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_lost_tensor_beside_fused_experts_is_told_by_its_name(family: str, tmp_path: Path) -> None:
    like = reference(family, tmp_path / "like")
    state = dict(made(family, 2).state_dict())
    del state["model.layers.1.self_attn.k_proj.weight"]
    ran = cli("merge", of_dcp({"model": state}, tmp_path / "in"), tmp_path / "out", "--like", like)
    assert {(f["code"], f["tensor"]) for f in ran.errors} == {
        ("FS102", "model.layers.1.self_attn.k_proj.weight")
    }


def test_what_lies_beside_the_model_stays_in_a_merge(tmp_path: Path) -> None:
    """A trainer's own tensors, beside names that move and beside experts that are taken apart."""
    for family in ("llava", "mixtral"):
        like, state = reference(family, tmp_path / family), dict(made(family, 2).state_dict())
        content = {"model": state, "dataloader": {"seen": torch.arange(7)}}
        out = tmp_path / f"{family}_out"
        ran = cli("merge", of_dcp(content, tmp_path / f"{family}_in"), out, "--like", like)
        assert ran.code == 0, ran.out
        assert read_result(out).keys() == {*read_result(like), "dataloader.seen"}
        assert json.loads((out / "config.json").read_text())["model_type"] == family


#: Adapters whose modules lie elsewhere in the files of their base.
ADAPTERS: dict[str, dict[str, Any]] = {
    "llava": {"target_modules": ["q_proj", "fc1", "linear_1"], "modules_to_save": ["lm_head"]},
    "qwen2_5_vl": {
        "target_modules": ["q_proj", "qkv"],
        "rank_pattern": {"language_model.layers.1.self_attn.q_proj": 3},
    },
    "gemma3": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "whisper": {"target_modules": ["q_proj"]},
    "mixtral": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["gate"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
    "qwen3_moe": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}


@pytest.mark.parametrize("family", ADAPTERS)
def test_an_adapter_finds_its_modules_in_the_files_of_its_base(family: str, tmp_path: Path) -> None:
    model = made(family, 1)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **ADAPTERS[family]))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "want")
    ran = cli("merge", tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "adapter")
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), read_result(tmp_path / "want")
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        # DoRA sums norms in another order.
        close = ADAPTERS[family].get("use_dora")
        torch.testing.assert_close(have[name], tensor, rtol=5e-7 if close else 0, atol=0)


@pytest.mark.parametrize(
    ("held", "code"),
    [
        (("language_model.model", "vision_tower.model"), None),
        (("left.language_model", "right.language_model"), "FS106"),
        (("text.layers", "vision.layers"), "FS102"),
    ],
)
def test_towers_of_equal_shapes_are_told_by_what_is_kept(
    held: tuple[str, str], code: str | None, tmp_path: Path
) -> None:
    """An adapter of `language_model`, on a base of two towers that look alike."""
    inner = "layers.0.self_attn.q_proj"
    base = {f"{tower}.{inner}.weight": torch.zeros(6, 4) for tower in held}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/model.safetensors")
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "of two towers"}))
    at = f"base_model.model.model.language_model.{inner}"
    factors = {f"{at}.lora_A.weight": torch.ones(2, 4), f"{at}.lora_B.weight": torch.ones(6, 2)}
    if code == "FS106":
        factors = {
            n.replace("model.model.language_model", "model.language_model"): t for n, t in factors.items()
        }
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    ran = cli("merge", tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "adapter")
    if code is not None:
        assert [f["code"] for f in ran.errors] == [code], ran.findings
        assert not (tmp_path / "out").exists()
        return
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert torch.equal(have[f"{held[0]}.{inner}.weight"], torch.full((6, 4), 4.0))
    assert not have[f"{held[1]}.{inner}.weight"].any()


def test_a_run_that_holds_its_adapter_takes_the_names_of_the_reference(tmp_path: Path) -> None:
    """Factors and what they change move alike."""
    like, model = reference("llava", tmp_path / "like"), made("llava", 2)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    ckpt = of_dcp(dict(adapted.state_dict()), tmp_path / "in")
    adapted.merge_and_unload().save_pretrained(tmp_path / "want")
    config = tmp_path / "adapter/adapter_config.json"
    ran = cli("merge", ckpt, tmp_path / "out", "--adapter", config, "--like", like)
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), read_result(tmp_path / "want")
    assert have.keys() == want.keys() and all(torch.equal(have[n], t) for n, t in want.items())
