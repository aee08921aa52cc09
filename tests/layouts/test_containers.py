"""Where the model begins: trainers save it inside of dicts of theirs, and a family that no table knows has no
word for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families_maker import FAMILIES, made, results, same_results
from helpers import cli, read_result
from safetensors.torch import load_file

State = dict[str, torch.Tensor]
MOMENTS = {"state": {"w": {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.1}]}
#: What a trainer saves.
SPELLINGS: dict[str, Callable[[State], Any]] = {
    "the state dict itself": lambda s: s,
    "model": lambda s: {"model": s},
    "model and more": lambda s: {"model": s, "optim": MOMENTS, "rng": torch.arange(7), "epoch": 3},
    "app.model": lambda s: {"app": {"model": s, "optim": MOMENTS}},
    "a name of its own": lambda s: {
        "policy": s,
        "opt": {"state": {name: {"exp_avg": t} for name, t in s.items()}},
    },
}


def saved(content: Any, config: transformers.PreTrainedConfig, folder: Path, container: str) -> Path:
    if container == "dcp":
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir(parents=True)
        torch.save(content, folder / "pytorch_model.bin")
    config.save_pretrained(folder)
    return folder


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
        assert same_results(loaded, want), spelling


@pytest.mark.parametrize("container", ["dcp", "torch.save"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_where_the_config_names_no_class_what_lies_around_a_model_tells_of_no_head(
    family: str, container: str, tmp_path: Path
) -> None:
    """A dict that a trainer calls "model" is not the part of that name in a model with a head."""
    model = made(family)
    assert not model.config.architectures
    for number, (spelling, of) in enumerate(SPELLINGS.items()):
        ckpt = saved(of(dict(model.state_dict())), model.config, tmp_path / f"in{number}", container)
        ran = cli("merge", ckpt, tmp_path / f"out{number}")
        assert ran.code == 0, (spelling, ran.out)
        assert read_result(tmp_path / f"out{number}").keys() >= model.state_dict().keys(), spelling
    # The part of that name is without a head all the same where the model with one has lost it.
    flat = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, of in enumerate((SPELLINGS["the state dict itself"], SPELLINGS["model"])):
        ckpt = saved(of(flat), model.config, tmp_path / f"lost{number}", container)
        assert cli("verify", ckpt).having("FS102", tensor="lm_head.weight")


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
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS106"], ran.out
    assert not (tmp_path / "none").exists()
    for verb in ("merge", "convert"):
        out = tmp_path / verb
        ran = cli(verb, ckpt, out, *(["--to", "hf"] if verb == "convert" else []), "--prefix", "teacher")
        assert ran.code == 0, ran.out
        result = load_file(out / "model.safetensors")
        assert result.keys() == state.keys() and all(torch.equal(result[n], state[n] * 2) for n in state)
        assert json.loads((out / "config.json").read_text())["model_type"] == "vit"


def test_without_a_config_names_stay(tmp_path: Path) -> None:
    state = dict(made("vit").state_dict())
    dcp.save({"model": state}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert cli("merge", tmp_path / "in", tmp_path / "out").code == 0
    assert sorted(read_result(tmp_path / "out")) == sorted(f"model.{name}" for name in state)
