"""Rank files of FSDP1 and FSDP2, made by real torch: what is merged is what the model held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import cli, copy, read_result
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

Saved = Callable[..., Path]
WEIGHTS = ("fsdp2", "hsdp", "tp", "fsdp1_mesh", "fsdp1_sharded", "fsdp1_local", "tied", "bf16")
TRAINED = ("fsdp2", "hsdp", "fsdp1_sharded", "tied", "bf16", "lora")


def held(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights by name and moments by ``NAME.SLOT``, as torch gathered them."""
    weights, moments = {}, {}
    for name, tensor in load_file(folder / "expected.safetensors").items():
        if name.startswith("optimizer."):
            _, slot, parameter = name.split(".", 2)
            moments[f"{parameter}.{slot}"] = tensor
        else:
            weights[name] = tensor
    return weights, moments


def equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(have) == set(want)
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name


@pytest.mark.parametrize("case", WEIGHTS)
def test_merged_is_what_the_model_held(case: str, saved: Saved, tmp_path: Path) -> None:
    ran = cli("merge", saved(case), tmp_path / "out")
    assert ran.code == 0, ran.out
    equal(read_result(tmp_path / "out"), held(saved(case))[0])
    assert not ran.having("FS109")


@pytest.mark.parametrize(("case", "world"), [("fsdp2", 2), ("fsdp2", 3), ("tied", 3)])
def test_of_other_numbers_of_ranks(case: str, world: int, saved: Saved, tmp_path: Path) -> None:
    folder = saved(case, world)
    assert cli("merge", folder, tmp_path / "out", "--optimizer").code == 0
    weights, moments = held(folder)
    equal(read_result(tmp_path / "out"), weights | moments)


@pytest.mark.parametrize("case", TRAINED)
def test_moments_are_those_of_their_parameters(case: str, saved: Saved, tmp_path: Path) -> None:
    ran = cli("merge", saved(case), tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    weights, moments = held(saved(case))
    assert moments
    equal(read_result(tmp_path / "out"), weights | moments)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("case", ["fsdp2", "fsdp1_sharded", "tied"])
def test_the_optimizer_goes_on_in_fsdp2(case: str, saved: Saved, tmp_path: Path) -> None:
    """torch loads moments, step and groups under the names that it gives them."""
    ran = cli("convert", saved(case), tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    weights, moments = held(saved(case))
    equal(dict(state["model"]), weights)
    loaded = state["optim"]["state"]
    equal({f"{n}.{s}": t for n, held_ in loaded.items() for s, t in held_.items() if s != "step"}, moments)
    assert {float(one["step"]) for one in loaded.values()} == {2.0}
    (group,) = state["optim"]["param_groups"]
    assert group["lr"] == 1e-2 and set(group["params"]) == set(loaded)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(20)[None]).logits
    return found


@pytest.mark.parametrize("case", [*WEIGHTS, "compiled"])
def test_converted_loads_and_computes_the_same(case: str, saved: Saved, tmp_path: Path) -> None:
    """Between meshes, wrappers and flat parameters the model is one: its logits are those of the weights
    gathered."""
    ran = cli("convert", saved(case), tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    weights, _ = held(saved(case))
    live = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    live.load_state_dict(weights)
    assert model.dtype == weights["model.norm.weight"].dtype
    assert torch.equal(logits(model), logits(live))


def test_a_compiled_models_names_are_kept_by_a_merge(saved: Saved, tmp_path: Path) -> None:
    """Where no config is written beside, which is for others; told of by a conversion."""
    folder = copy(saved("compiled"), tmp_path / "ranks")
    assert cli("merge", folder, tmp_path / "own").code == 0
    assert set(read_result(tmp_path / "own")) == set(held(folder)[0])
    config = next(folder.rglob("config.json"))
    # Not above the checkpoint, where it would be found.
    kept = config.rename(tmp_path / "kept.json")
    assert cli("merge", folder, tmp_path / "out").code == 0
    kept.rename(config)
    have = read_result(tmp_path / "out")
    assert {name.replace("_orig_mod.", "") for name in have} == set(held(folder)[0])
    assert "_orig_mod.model.layers.1._orig_mod.mlp.up_proj.weight" in have
    plan = fastshard.plan(folder, "hf")
    told = [f for f in plan.findings if f.code == "FS212" and "torch.compile" in f.message]
    assert len(told) == 1 and "_orig_mod.model.embed_tokens.weight is" in told[0].message


def test_what_trainers_keep_beside_is_understood(saved: Saved, tmp_path: Path) -> None:
    """As verl lays it out: steps, actor and critic, huggingface/, a tracker, the dataloader's state."""
    run = tmp_path / "run"
    for step, parts in ((5, ("actor", "critic")), (10, ("actor", "critic"))):
        for part in parts:
            copy(saved("fsdp2" if part == "actor" else "tied"), run / f"global_step_{step}" / part)
        torch.save({"epoch": 1}, run / f"global_step_{step}/data.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    both = cli("inspect", run)
    assert both.code == 2 and both.errors[0]["code"] == "FS106"
    assert "actor, critic" in both.errors[0]["got"] and "--step actor" in both.errors[0]["run"][0]
    for choice, case, step in (("critic", "tied", "5"), ("global_step_10/actor", "fsdp2", "10")):
        with fastshard.open(run, step=choice) as checkpoint:
            assert checkpoint.step == f"global_step_{step}"
            equal({n: t.torch() for n, t in checkpoint.items()}, held(saved(case))[0])
    ran = cli("convert", run / "global_step_10/actor", tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    with fastshard.open(run / "global_step_5/actor") as checkpoint:
        assert checkpoint.metadata()["lr_scheduler"] == {"last_epoch": 2}
        assert checkpoint.metadata()["optimizer"]["param_groups"][0]["lr"] == 1e-2


def test_ranks_on_several_nodes(saved: Saved, tmp_path: Path) -> None:
    for node, ranks in (("a", "01"), ("b", "23")):
        (tmp_path / node / "actor").mkdir(parents=True)
        for file in saved("fsdp2").glob("*_rank_*.pt"):
            if file.stem[-1] in ranks:
                copy_of = tmp_path / node / "actor" / file.name
                copy_of.write_bytes(file.read_bytes())
    ran = cli("merge", tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert ran.code == 0, ran.out
    equal(read_result(tmp_path / "out"), held(saved("fsdp2"))[0])
    half = cli("verify", tmp_path / "a")
    assert half.code == 3
    (lost,) = half.having("FS101", rank="rank 2 to 3", file="model_")
    models = [f"actor/model_world_size_4_rank_{rank}.pt" for rank in (2, 3)]
    assert [file for file in lost["files"] if "model_" in file] == models


@pytest.mark.parametrize("name", ["rank{}.pt", "fsdp_model_rank_{}.bin", "pytorch_model_fsdp_0_rank{}.bin"])
def test_files_by_other_names(name: str, saved: Saved, tmp_path: Path) -> None:
    """Those of accelerate, and of any trainer that counts ranks in names."""
    for rank in range(4):
        target = tmp_path / "ckpt" / name.format(rank)
        target.parent.mkdir(exist_ok=True)
        torch.save(
            torch.load(saved("fsdp2") / f"model_world_size_4_rank_{rank}.pt", weights_only=False), target
        )
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    equal(read_result(tmp_path / "out"), held(saved("fsdp2"))[0])
    (tmp_path / "ckpt" / name.format(1)).unlink()
    gone = cli("merge", tmp_path / "ckpt", tmp_path / "other")
    assert gone.code == 3 and [f["file"] for f in gone.errors] == [name.format(1)]


def test_one_ranks_file_is_no_whole_model(saved: Saved, tmp_path: Path) -> None:
    """Given alone, or under a name that counts no rank, a slice would pose as the tensor."""
    file = saved("fsdp2") / "model_world_size_4_rank_1.pt"
    (tmp_path / "pytorch_model.bin").write_bytes(file.read_bytes())
    for ckpt in (file, tmp_path / "pytorch_model.bin", tmp_path):
        ran = cli("merge", ckpt, tmp_path / "out")
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS118"], ran.out
        assert "one rank's part" in ran.errors[0]["message"]
        assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_is_refused(saved: Saved, tmp_path: Path) -> None:
    for case, words in (("partial", "a term of a sum"), ("fsdp1_flat", "flat parameters of FSDP1")):
        ran = cli("merge", saved(case), tmp_path / "out")
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"]
        assert words in ran.errors[0]["message"]
    folder = copy(saved("fsdp1_local"), tmp_path / "local")
    (folder / "huggingface/config.json").unlink()
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS209"]
    assert "--config" in ran.errors[0]["run"][0]


def test_an_adapter_in_training_is_not_taken_for_a_model(saved: Saved, tmp_path: Path) -> None:
    ran = cli("convert", saved("lora"), tmp_path / "out", "--to", "hf")
    assert ran.code == 2 and "PEFT has changed the names" in ran.errors[0]["message"]
    assert "lora_A" in ran.errors[0]["message"] and "--adapter" in ran.errors[0]["run"][0]
    assert json.loads(cli("inspect", saved("lora")).out)["complete"]


def test_an_adapter_in_training_is_merged_by_its_config(saved: Saved, tmp_path: Path) -> None:
    """Factors and base in the ranks' files; what peft would make of them, by its formula, in float32."""
    folder = saved("lora")
    ran = cli(
        "convert",
        folder,
        tmp_path / "out",
        "--to",
        "hf",
        "--adapter",
        folder / "lora_adapter/adapter_config.json",
    )
    assert ran.code == 0, ran.out
    held_, _ = held(folder)
    outer = "base_model.model."
    want = {
        name.removeprefix(outer).replace(".base_layer", ""): tensor
        for name, tensor in held_.items()
        if ".lora_" not in name
    }
    for name in [n for n in held_ if "lora_A" in n]:
        a, b = held_[name], held_[name.replace("lora_A", "lora_B")]
        want[f"{name.removeprefix(outer).partition('.lora_A')[0]}.weight"] += (b @ a) * (16 / 2)
    equal(read_result(tmp_path / "out"), want)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    # The whole folder will do: it has no tensors.
    assert cli("merge", folder, tmp_path / "merged", "--adapter", folder / "lora_adapter").code == 0
    equal(read_result(tmp_path / "merged"), want)
