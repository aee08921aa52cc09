"""Where the model begins: trainers save it inside of dicts of theirs, and a family that no table knows has no word for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import cli, read_result
from safetensors.torch import load_file

State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
          "patch_size": 8}  # fmt: skip
#: Families by the sizes of their config: most have no table, and many call a part of theirs "model".
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": SIZES | {"embedding_size": 16},
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96},
    "bert": SIZES,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "clip": {"text_config": SIZES, "vision_config": VISION, "projection_dim": 16},
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "image_size": 32},
    "deberta-v2": SIZES,
    "dinov2": VISION | {"mlp_ratio": 2},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 96},
    "electra": SIZES | {"embedding_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "llama": SIZES | {"num_key_value_heads": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
    "qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "roberta": SIZES,
    "siglip": {"text_config": SIZES, "vision_config": VISION},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    "vit": VISION,
    "wav2vec2": {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"conv_dim": [16, 16], "conv_stride": [5, 2],
                 "conv_kernel": [10, 3], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
}  # fmt: skip
MOMENTS = {"state": {"w": {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.1}]}
#: What a trainer saves.
SPELLINGS: dict[str, Callable[[State], Any]] = {
    "the state dict itself": lambda s: s,
    "model": lambda s: {"model": s},
    "model and more": lambda s: {"model": s, "optim": MOMENTS, "rng": torch.arange(7), "epoch": 3},
    "app.model": lambda s: {"app": {"model": s, "optim": MOMENTS}},
    "a name of its own": lambda s: {"policy": s, "opt": {"state": {name: {"exp_avg": t} for name, t in s.items()}}},
}  # fmt: skip


def made(family: str) -> Any:
    """A model without a head, whose names begin with no word for all of it."""
    torch.manual_seed(5)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def saved(content: Any, config: transformers.PreTrainedConfig, folder: Path, container: str) -> Path:
    if container == "dcp":
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir(parents=True)
        torch.save(content, folder / "pytorch_model.bin")
    config.save_pretrained(folder)
    return folder


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What the model takes first."""
    torch.manual_seed(6)
    ids = torch.randint(3, 90, (1, 9))
    pixels = torch.randn(1, 3, 32, 32)
    if model.config.model_type in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": pixels}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": pixels}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 400)}
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, **decoder}


def results(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        out = model(**inputs(model))
    return [value for value in out.to_tuple() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("container", ["dcp", "torch.save"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_tensor_of_a_merge(family: str, container: str, tmp_path: Path) -> None:
    model = made(family)
    model.config.architectures = [type(model).__name__]
    want = results(model)
    for number, (spelling, of) in enumerate(SPELLINGS.items()):
        out = tmp_path / f"out{number}"
        ckpt = saved(of(dict(model.state_dict())), model.config, tmp_path / f"in{number}", container)
        ran = cli("merge", ckpt, out)
        assert ran.code == 0, (spelling, ran.out)
        loaded, told = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
        assert not told["missing_keys"] and not told["mismatched_keys"], (spelling, told)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), (spelling, name)
        # Where tensors lie in memory decides how a processor adds.
        loaded.load_state_dict(
            {name: tensor.clone() for name, tensor in loaded.state_dict().items()}, assign=True
        )
        assert all(map(torch.equal, results(loaded.eval()), want)), spelling


@pytest.mark.parametrize("container", ["dcp", "torch.save"])
def test_of_several_models_none_is_taken_for_that_of_the_config(container: str, tmp_path: Path) -> None:
    model = made("vit")
    state = dict(model.state_dict())
    both = {"student": state, "teacher": {name: tensor * 2 for name, tensor in state.items()}}
    ckpt = saved(both, model.config, tmp_path / "in", container)
    # All is kept, under the names stored: the config is for none of them.
    ran = cli("merge", ckpt, tmp_path / "both")
    assert ran.code == 0, ran.out
    assert sorted(read_result(tmp_path / "both")) == sorted(f"{top}.{name}" for top in both for name in state)
    assert not (tmp_path / "both/config.json").exists()
    assert ran.having("FS212", message="several copies", severity="warning", got="student.*, teacher.*")
    ran = cli("convert", ckpt, tmp_path / "none", "--to", "hf")
    assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS106"], ran.out
    assert not (tmp_path / "none").exists()
    for verb in ("merge", "convert"):
        out = tmp_path / verb
        ran = cli(verb, ckpt, out, *(["--to", "hf"] if verb == "convert" else []), "--under", "teacher")
        assert ran.code == 0, ran.out
        result = load_file(out / "model.safetensors")
        assert result.keys() == state.keys() and all(torch.equal(result[n], state[n] * 2) for n in state)
        assert json.loads((out / "config.json").read_text())["model_type"] == "vit"


def test_without_a_config_names_stay(tmp_path: Path) -> None:
    state = dict(made("vit").state_dict())
    dcp.save({"model": state}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert cli("merge", tmp_path / "in", tmp_path / "out").code == 0
    assert sorted(read_result(tmp_path / "out")) == sorted(f"model.{name}" for name in state)
