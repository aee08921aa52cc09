"""Names as trainers and wrappers leave them: each form becomes the model's own names, or is refused with the
choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from helpers import cli, read_result
from transformers import AutoModelForCausalLM

State = dict[str, torch.Tensor]
STATE = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"params": [0]}]}


def with_prefix(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


def inside(state: State) -> State:
    """Some layers compiled, others' MLPs checkpointed: the wrappers' names stand inside of the model's."""
    return {
        name.replace("layers.1.", "layers.1._orig_mod.").replace(
            "mlp.", "_checkpoint_wrapped_module.mlp."
        ): tensor
        for name, tensor in state.items()
    }


def halved(state: State) -> State:
    return {name: tensor * 0.5 for name, tensor in state.items()}


#: What is saved, of a state dict.
FORMS: dict[str, Callable[[State], Any]] = {
    "the state dict itself": lambda s: s,
    "DDP": with_prefix("module."),
    "a key": lambda s: {"state_dict": s, "epoch": 3},
    "model and optimizer": lambda s: {"model": s, "optimizer": STATE, "step": 4},
    "Lightning": lambda s: {
        "state_dict": with_prefix("model.")(s),
        "optimizer_states": [STATE],
        "epoch": 1,
        "pytorch-lightning_version": "2.6",
    },
    "Lightning, compiled": lambda s: {
        "state_dict": with_prefix("model._orig_mod.")(s),
        "optimizer_states": [STATE],
    },
    "compiled": with_prefix("_orig_mod."),
    "compiled DDP": lambda s: {"model": with_prefix("_orig_mod.module.")(s)},
    "DDP of a compiled model": lambda s: {"model_state_dict": with_prefix("module._orig_mod.")(s)},
    "FSDP1 by named_parameters": with_prefix("_fsdp_wrapped_module."),
    "wrappers inside": lambda s: {"model": inside(s)},
    "any name of a trainer's": lambda s: {"app": {"generator": s}, "optim": STATE},
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, Path]:
    folder = tmp_path_factory.mktemp("model")
    return dict(tiny_models.model("qwen3", folder).state_dict()), folder / "config.json"


def save(content: Any, folder: Path, container: str) -> Path:
    folder.mkdir()
    if container == "dcp":
        dcp.save(content, checkpoint_id=folder / "ckpt", no_dist=True)
        return folder / "ckpt"
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.mark.parametrize("container", ["torch.save", "dcp"])
@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_gives_the_models_own_names(
    form: str, container: str, state: Any, tmp_path: Path
) -> None:
    want, config = state
    ckpt = save(FORMS[form](want), tmp_path / "in", container)
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == set(want)
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    # What was not taken as it is called is told.
    assert form == "the state dict itself" or ran.having("FS212")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("form", FORMS)
def test_a_merge_keeps_every_tensor(form: str, state: Any, tmp_path: Path) -> None:
    """Beside a config the model has the names that this is for, and is proven complete; without one all names
    stay."""
    want, config = state
    content = FORMS[form](want)
    ckpt = save(content, tmp_path / "in", "torch.save")
    assert cli("merge", ckpt, tmp_path / "out", "--config", config).code == 0
    assert cli("merge", ckpt, tmp_path / "plain").code == 0
    flat = torch.load(ckpt, weights_only=True)

    def leaves(at: Any, path: str = "") -> set[str]:
        if isinstance(at, torch.Tensor):
            return {path[:-1]}
        items = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        return set().union(*(leaves(value, f"{path}{key}.") for key, value in items))

    states = {name for name in leaves(flat) if name.startswith(("optim", "lr_sched"))}
    assert set(read_result(tmp_path / "plain")) == leaves(flat)
    made = read_result(tmp_path / "out")
    assert set(made) == set(want) | states
    assert all(torch.equal(made[name], tensor) for name, tensor in want.items())
    assert (tmp_path / "out/config.json").exists() and not (tmp_path / "plain/config.json").exists()


@pytest.mark.parametrize("form", ["Lightning, compiled", "wrappers inside", "compiled DDP"])
def test_what_is_missing_is_found_under_any_names(form: str, state: Any, tmp_path: Path) -> None:
    want, config = state
    lacking = {name: tensor for name, tensor in want.items() if "layers.1.mlp.up_proj" not in name}
    ckpt = save(FORMS[form](lacking), tmp_path / "in", "torch.save")
    for command in (("merge",), ("convert", "--to", "hf")):
        ran = cli(command[0], ckpt, tmp_path / "out", *command[1:], "--config", config)
        assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS102"], ran.out
        assert "layers.1." in ran.errors[0]["tensor"] and "mlp.up_proj" in ran.errors[0]["tensor"]


COPIES = {
    "model and ema": (lambda s: {"model": s, "ema": halved(s), "optimizer": STATE}, "model", "ema"),
    "Lightning's ema": (
        lambda s: {"state_dict": with_prefix("net.")(s) | with_prefix("net_ema.module.")(halved(s))},
        "state_dict.net",
        "state_dict.net_ema",
    ),
    "teacher and student": (lambda s: {"teacher": s, "student": halved(s)}, "teacher", "student"),
    "the model itself and its ema": (lambda s: s | with_prefix("ema.")(halved(s)), None, "ema"),
}


@pytest.mark.parametrize("container", ["torch.save", "dcp"])
@pytest.mark.parametrize("copies", COPIES)
def test_of_several_copies_one_is_chosen(copies: str, container: str, state: Any, tmp_path: Path) -> None:
    want, config = state
    form, first, second = COPIES[copies]
    ckpt = save(form(want), tmp_path / "in", container)
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS106"], ran.out
    assert f"{second}." in ran.errors[0]["got"] and "--prefix" in ran.errors[0]["run"][0]
    for under, factor in ((first, 1.0), (second, 0.5)):
        if under is None:
            continue
        for command in ("convert", "merge"):
            out = tmp_path / f"{command}-{under}"
            to = ("--to", "hf") if command == "convert" else ()
            ran = cli(command, ckpt, out, *to, "--config", config, "--prefix", under)
            assert ran.code == 0, ran.out
            have = read_result(out)
            assert set(have) == set(want)
            assert all(torch.equal(have[name], tensor * factor) for name, tensor in want.items())
        with fastshard.open(ckpt, to="hf", prefix=under, config=config) as view:
            assert torch.equal(view["model.norm.weight"].torch(), want["model.norm.weight"] * factor)


def test_a_name_below_which_nothing_lies(state: Any, tmp_path: Path) -> None:
    want, config = state
    ckpt = save({"model": want, "optimizer": STATE}, tmp_path / "in", "torch.save")
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", config, "--prefix", "ema")
    assert ran.code == 2 and ran.errors[0]["code"] == "FS515" and "model" in ran.errors[0]["expected"]
    whole = cli(
        "merge",
        Path(__file__).parents[1] / "fixtures/gpt_neox/neox_pp_tp2",
        tmp_path / "out",
        "--prefix",
        "ema",
    )
    assert whole.code == 2 and "holds only one model" in whole.errors[0]["message"]


def test_a_copy_needs_no_known_model(tmp_path: Path) -> None:
    torch.save({"net": {"a.w": torch.ones(2)}, "ema": {"a.w": torch.zeros(2)}}, tmp_path / "x.pt")
    assert cli("merge", tmp_path / "x.pt", tmp_path / "all").code == 0
    assert set(read_result(tmp_path / "all")) == {"net.a.w", "ema.a.w"}
    assert cli("merge", tmp_path / "x.pt", tmp_path / "one", "--prefix", "ema.").code == 0
    one = read_result(tmp_path / "one")
    assert set(one) == {"a.w"} and torch.equal(one["a.w"], torch.zeros(2))


def test_names_that_would_be_one_are_not_made_one(state: Any, tmp_path: Path) -> None:
    """A wrapped model saved beside itself: without the wrapper's part two tensors would have one name."""
    want, config = state
    both = want | with_prefix("_orig_mod.")(halved(want))
    ckpt = save(both, tmp_path / "in", "torch.save")
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code != 0 and not (tmp_path / "out").exists(), ran.out
    assert cli("merge", ckpt, tmp_path / "all").code == 0
    assert set(read_result(tmp_path / "all")) == set(both)
