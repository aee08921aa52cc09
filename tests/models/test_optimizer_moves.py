"""Optimizer state under other names: what torch loads of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero_maker
from fastshard.sources.param_groups import by_decay
from helpers import Ran, assert_refused, cli, read_result
from tiny_models import model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
VALUES = (
    {"lr": 0.013, "weight_decay": 0.11, "betas": (0.8, 0.95), "eps": 1e-5},
    {"lr": 0.007, "weight_decay": 0.0, "betas": (0.7, 0.9), "eps": 1e-6},
)
STEPS = 3
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def by_rank(live: Any, values: tuple[dict[str, Any], ...] = VALUES) -> list[dict[str, Any]]:
    """Matrices in one group, vectors in the other."""
    every = list(live.parameters())
    return [
        {"params": [p for p in every if p.requires_grad and (p.dim() > 1) is m], **given}
        for m, given in zip((True, False), values, strict=True)
    ]


def trained(live: Any, make: Make = torch.optim.AdamW, groups: Any = None) -> torch.optim.Optimizer:
    """An optimizer that took steps by gradients that were drawn."""
    optimizer = make(groups or by_rank(live))
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
    return optimizer


def torch_state(live: Any, optimizer: torch.optim.Optimizer, flat: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(live),
        "optim": get_optimizer_state_dict(live, optimizer, options=options),
    }


def put(folder: Path, state: dict[str, Any], live: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    live.config.save_pretrained(folder)
    return folder


def saved(folder: Path, live: Any, optimizer: torch.optim.Optimizer, flat: bool = False) -> Path:
    """The checkpoint of torch's recipe, with the model's config."""
    return put(folder, torch_state(live, optimizer, flat), live)


def loaded(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """A new model and optimizer, filled by torch."""
    live = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    optimizer = torch.optim.AdamW(by_rank(live, ({}, {})))
    state = torch_state(live, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    live.load_state_dict(state["model"])
    set_optimizer_state_dict(live, optimizer, state["optim"])
    return live, optimizer


def assert_same_state(have: Any, optimizer: Any, want: Any, first: Any) -> None:
    """Weights, moments, steps and groups, by the parameters' names."""
    names = dict(want.named_parameters())
    for name, parameter in have.named_parameters():
        assert torch.equal(parameter, names[name]), name
        theirs = first.state[names[name]]
        assert theirs, name
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(value, theirs[slot]), (name, slot)
    for group, given in zip(optimizer.param_groups, first.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k in VALUES[0]} == {
            k: v for k, v in given.items() if k in VALUES[0]
        }
        assert len(group["params"]) == len(given["params"])


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_torch_loads_what_it_saved(tmp_path: Path, name: str, flat: bool) -> None:
    live = model(name, tmp_path / "model")
    optimizer = trained(live)
    saved(tmp_path / "ckpt", live, optimizer, flat)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    assert_same_state(*loaded(tmp_path / "out"), live, optimizer)
    # And through a universal checkpoint.
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "universal", "--to", "universal")
    assert ran.code == 0, ran.out
    ran = cli("convert", tmp_path / "universal", tmp_path / "back", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    assert_same_state(*loaded(tmp_path / "back"), live, optimizer)


def test_weights_alone_are_taken_without_asking(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    saved(tmp_path / "ckpt", live, trained(live))
    assert cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "hf").code == 0
    have = read_result(tmp_path / "out")
    assert have.keys() == live.state_dict().keys()


def test_moments_keep_their_type(tmp_path: Path) -> None:
    """--dtype is of the weights."""
    live = model("llama", tmp_path / "model")
    optimizer = trained(live)
    saved(tmp_path / "ckpt", live, optimizer)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer", "--dtype", "bf16")
    assert ran.code == 0, ran.out
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    name = "model.layers.0.mlp.up_proj.weight"
    assert stored[f"model.{name}"].properties.dtype == torch.bfloat16
    assert stored[f"optim.state.{name}.exp_avg"].properties.dtype == torch.float32


def test_frozen_parameters_have_no_moments(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    live.model.embed_tokens.weight.requires_grad_(False)
    saved(tmp_path / "ckpt", live, trained(live))
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert "model.model.embed_tokens.weight" in stored
    assert "optim.state.model.embed_tokens.weight.exp_avg" not in stored
    assert "optim.state.lm_head.weight.exp_avg" in stored
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "universal", "--to", "universal")
    assert ran.code == 0, ran.out
    folder = tmp_path / "universal/global_step3"
    assert not (folder / "zero/model.embed_tokens.weight/exp_avg.pt").exists()
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert set(state["frozen_param_shapes"]) == {"model.embed_tokens.weight"}
    assert cli("merge", tmp_path / "universal", tmp_path / "merged").code == 0
    assert read_result(tmp_path / "merged").keys() == live.state_dict().keys()


def test_query_key_and_value_of_several_groups_are_kept_apart(tmp_path: Path) -> None:
    """Experts that a target stacks must be of one group: one tensor has one learning rate."""
    live = model("mixtral", tmp_path / "model")
    state = read_result(tmp_path / "model")
    moments = {
        f"{name}.{slot}": torch.full_like(tensor, n + 1.0)
        for name, tensor in state.items()
        for n, slot in enumerate(("exp_avg", "exp_avg_sq"))
    }
    first = [name for name in state if ".experts.0." in name]
    groups = [
        {**VALUES[0], "params": [name for name in state if name not in first]},
        {**VALUES[1], "params": first},
    ]
    steps = {f"{name}.step": torch.tensor(7.0) for name in state}
    whole = {"model": state, "optim": {"state": moments | steps, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    live.config.save_pretrained(tmp_path / "ckpt")
    refused(tmp_path / "ckpt", tmp_path / "out", "FS514", "--to", "dcp", "--stacked-experts")
    apart = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert apart.code == 0, apart.out
    groups = [{**VALUES[0], "params": list(state)}]
    whole["optim"]["param_groups"] = groups
    dcp.save(whole, checkpoint_id=tmp_path / "one", no_dist=True)
    live.config.save_pretrained(tmp_path / "one")
    ran = cli(
        "convert", tmp_path / "one", tmp_path / "stacked", "--to", "dcp", "--optimizer", "--stacked-experts"
    )
    assert ran.code == 0, ran.out
    stored = dcp.FileSystemReader(tmp_path / "stacked").read_metadata().state_dict_metadata
    name = "model.layers.0.mlp.experts.down_proj"
    assert stored[f"optim.state.{name}.exp_avg"].size == stored[f"model.{name}"].size


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda groups: torch.optim.AdamW(groups, amsgrad=True), "max_exp_avg_sq"),
        (
            lambda groups: torch.optim.SGD(
                [{"params": g["params"], "lr": 0.1} for g in groups], momentum=0.9
            ),
            "momentum_buffer",
        ),
    ],
    ids=["amsgrad", "sgd"],
)
def test_state_of_other_optimizers_is_refused(tmp_path: Path, make: Make, kept: str) -> None:
    live = model("llama", tmp_path / "model")
    saved(tmp_path / "ckpt", live, trained(live, make))
    ran = refused(tmp_path / "ckpt", tmp_path / "out", "FS514", "--to", "dcp")
    assert kept in ran.out
    merged = cli("merge", tmp_path / "ckpt", tmp_path / "merged", "--optimizer")
    assert merged.code == 0, merged.out


def refused(ckpt: Path, out: Path, code: str, *options: object, **parts: str) -> Ran:
    """A conversion with the optimizer that cannot be, which leaves nothing."""
    return assert_refused(
        ckpt, out, code, exit=2, command=("convert",), options=("--optimizer", *options), **parts
    )


def zero2(root: Path, **more: Any) -> Path:
    """A checkpoint of ZeRO-2 of a Llama, two ranks."""
    live = model("llama", root / "model")
    run = zero_maker.Run(2, 2, torch.bfloat16, [{n: t.float() for n, t in live.state_dict().items()}], **more)
    zero_maker.write(root / "ckpt", run)
    live.config.save_pretrained(root / "ckpt")
    return root / "ckpt"


@pytest.mark.parametrize(
    "to", ["hf", "gpt_neox", "megatron", "tp-safetensors", "maxtext", "dcp:torchtitan", "dcp:olmo_core"]
)
def test_targets_that_hold_none_say_so(tmp_path: Path, to: str) -> None:
    ran = refused(zero2(tmp_path), tmp_path / "out", "FS514", "--to", to)
    assert "--to dcp" in ran.out and "universal" in ran.out


def test_parameters_at_several_steps_are_refused(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    optimizer = trained(live)
    optimizer.state[live.lm_head.weight]["step"].add_(1)
    saved(tmp_path / "ckpt", live, optimizer)
    refused(tmp_path / "ckpt", tmp_path / "out", "FS514", "--to", "dcp")
    assert cli("merge", tmp_path / "ckpt", tmp_path / "merged", "--optimizer").code == 0


def test_a_moment_that_is_not_there_is_missed(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    state = torch_state(live, trained(live))
    del state["optim"]["state"]["model.norm.weight"]["exp_avg_sq"]
    put(tmp_path / "ckpt", state, live)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 3 and ran.having("FS102", tensor="model.norm.weight.exp_avg_sq"), ran.out
    assert not (tmp_path / "out").exists()


def test_groups_that_nothing_tells_of(tmp_path: Path) -> None:
    """DCP goes without them, and says so; DeepSpeed loads no universal checkpoint without."""
    live = model("llama", tmp_path / "model")
    state = torch_state(live, trained(live))
    del state["optim"]["param_groups"]
    root = put(tmp_path / "ckpt", state, live)
    ran = cli("convert", root, tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    (told,) = [f for f in ran.having("FS212") if "groups" in f["message"]]
    assert told["severity"] == "warning"
    refused(root, tmp_path / "universal", "FS514", "--to", "universal")


def test_a_part_of_a_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(zero2(tmp_path), tmp_path / "out", "FS515", "--to", "universal", "--include", "model.layers.0.*")


def test_masters_go_with_their_moments(tmp_path: Path) -> None:
    """The weights of a run that goes on are those that the optimizer steps, not their roundings."""
    root = zero2(tmp_path)
    ran = cli("convert", root, tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert stored["model.lm_head.weight"].properties.dtype == torch.float32


def test_a_universal_checkpoint_is_of_fp32(tmp_path: Path) -> None:
    """Where there are no masters the weights are widened; nobody gets another type by --dtype."""
    live = model("llama", tmp_path / "model").to(torch.bfloat16)
    saved(tmp_path / "ckpt", live, trained(live))
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "universal")
    assert ran.code == 0, ran.out
    stored = torch.load(tmp_path / "out/global_step3/zero/lm_head.weight/fp32.pt")["param"]
    assert torch.equal(stored, live.lm_head.weight.float()) and stored.dtype == torch.float32
    refused(tmp_path / "ckpt", tmp_path / "other", "FS515", "--to", "universal", "--dtype", "bf16")


def test_a_step_that_nothing_tells_is_not_made_up(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    state = torch_state(live, trained(live))
    for entry in state["optim"]["state"].values():
        del entry["step"]
    put(tmp_path / "ckpt", state, live)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    (told,) = [f for f in ran.having("FS212") if "step" in f["message"]]
    assert told["severity"] == "warning"
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert not [name for name in stored if name.endswith(".step")]
    refused(tmp_path / "ckpt", tmp_path / "universal", "FS514", "--to", "universal")


def test_the_manifest_vouches_for_moments(tmp_path: Path) -> None:
    root = zero2(tmp_path)
    assert cli("convert", root, tmp_path / "out", "--to", "universal").code == 0
    document = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    hashed = {tensor["file"] for tensor in document["tensors"]}
    folder = f"global_step{zero_maker.STEP:g}/zero/lm_head.weight"
    assert {f"{folder}/{slot}.pt" for slot in ("fp32", "exp_avg", "exp_avg_sq", "step")} <= hashed
    file = next((tmp_path / "out").rglob("lm_head.weight/exp_avg.pt"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert cli("verify", tmp_path / "out").code == 1


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_a_learning_rate_that_is_a_tensor(tmp_path: Path, flat: bool) -> None:
    """Compiled optimizers have it so: no loader is given another one."""
    live = model("llama", tmp_path / "model")
    optimizer = trained(live)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    saved(tmp_path / "ckpt", live, optimizer, flat)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    _, again = loaded(tmp_path / "out")
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.013, 0.007])
    assert cli("convert", tmp_path / "ckpt", tmp_path / "universal", "--to", "universal").code == 0
    file = tmp_path / "universal/global_step3/zero/optimizer_state.pt"
    groups = torch.load(file, weights_only=False)["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.013, 0.007])


def test_what_a_group_does_not_tell_is_not_made_up(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    state = torch_state(live, trained(live))
    for group in state["optim"]["param_groups"]:
        for key in ("eps", "decoupled_weight_decay"):
            group.pop(key, None)
    put(tmp_path / "ckpt", state, live)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert ran.code == 0, ran.out
    warned = [f["message"] for f in ran.having("FS212") if f["severity"] == "warning"]
    assert any("eps" in message for message in warned) and any("decoupled" in message for message in warned)
    with pytest.raises(CheckpointException, match="eps"):
        loaded(tmp_path / "out")


def without_second(state: dict[str, Any]) -> None:
    for entry in state["optim"]["state"].values():
        del entry["exp_avg_sq"]


def factored(state: dict[str, Any]) -> None:
    for entry in state["optim"]["state"].values():
        if entry["exp_avg_sq"].dim() > 1:
            entry["exp_avg_sq_row"] = entry.pop("exp_avg_sq")[:, 0].clone()


def flattened_moment(state: dict[str, Any]) -> None:
    entry = state["optim"]["state"]["model.layers.1.mlp.up_proj.weight"]
    entry["exp_avg"] = entry["exp_avg"].flatten()


def averaged(state: dict[str, Any]) -> None:
    state["ema"] = {name: tensor * 0.5 for name, tensor in state["model"].items()}


def two_optimizers(state: dict[str, Any]) -> None:
    held = state.pop("optim")
    halves = [{n: s for k, (n, s) in enumerate(held["state"].items()) if k % 2 is m} for m in (0, 1)]
    for name, half in zip(("optim_a", "optim_b"), halves, strict=True):
        state[name] = {"state": half, "param_groups": [{**held["param_groups"][0], "params": list(half)}]}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (without_second, ()),
        (factored, ()),
        (flattened_moment, ()),
        (averaged, ("--prefix", "ema")),
        (two_optimizers, ()),
    ],
    ids=["Lion", "Adafactor", "a flat moment", "averaged weights", "two optimizers"],
)
@pytest.mark.parametrize("to", ["dcp", "universal"])
def test_what_is_not_adams_state_of_the_model_is_refused(
    change: Callable[[dict[str, Any]], None], options: tuple[str, ...], to: str, tmp_path: Path
) -> None:
    live = model("llama", tmp_path / "model")
    state = torch_state(live, trained(live))
    change(state)
    put(tmp_path / "ckpt", state, live)
    refused(tmp_path / "ckpt", tmp_path / "out", "FS514", "--to", to, *options)
    # The weights alone are nobody's problem.
    ran = cli(
        "convert", tmp_path / "ckpt", tmp_path / "weights", "--to", "hf", *(options or ("--prefix", "model"))
    )
    assert ran.code == 0, ran.out


def test_moments_of_the_model_beside_averaged_weights(tmp_path: Path) -> None:
    live = model("llama", tmp_path / "model")
    optimizer = trained(live)
    state = torch_state(live, optimizer)
    averaged(state)
    put(tmp_path / "ckpt", state, live)
    ran = cli(
        "convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer", "--prefix", "model"
    )
    assert ran.code == 0, ran.out
    assert_same_state(*loaded(tmp_path / "out"), live, optimizer)


def test_groups_by_weight_decay() -> None:
    """Megatron-LM lists no parameters; runs that divide them otherwise are not guessed at."""
    groups = [
        {"wd_mult": 1.0, "lr": 0.1, "weight_decay": 0.1},
        {"wd_mult": 0.0, "lr": 0.1, "weight_decay": 0.0},
    ]
    found = by_decay(groups, {"no_weight_decay_cond_type": None})
    assert found is not None and [group.decays for group in found] == [True, False]
    experts = [{**group, "is_expert_parallel": True} for group in groups]
    assert by_decay([*groups, *experts], {}) == found
    for other in ("apply_wd_to_qk_layernorm", "embedding_init_method_std", "no_weight_decay_cond_type"):
        assert by_decay(groups, {other: 0.02}) is None
    assert by_decay([*groups, {**groups[0], "lr": 0.5}], {}) is None
    assert by_decay(groups[:1], {"pipeline_model_parallel_size": 2}) is None
    assert by_decay(groups[:1], {"pipeline_model_parallel_size": 1}) is not None
