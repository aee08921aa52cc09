"""DeepSpeed's own checkpoints: both copies of the weights, moments, universal form, masters and repair."""

from __future__ import annotations

import contextlib
import enum
import json
import re
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
import torch
from helpers import FIXTURES, assert_refused, cli, copy, edit_pt, flip_payload, load_pt, read_result, sha256

DEEPSPEED = FIXTURES / "deepspeed"
ZERO1 = DEEPSPEED / "zero1_bf16_dp2"
ZERO3 = DEEPSPEED / "zero3_bf16_dp2"
STALE = FIXTURES / "stale_masters_zero1_bf16_dp2"
STEP = "global_step4"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def own_name(name: str) -> str:
    """Expected names of pipeline parameters carry the layer file: `layer_02.lin.weight` is `2.lin.weight`."""
    return re.sub(r"^layer_0*(\d+)\.", r"\1.", name)


def assert_tensors(out: Path, wanted: dict[str, Any], *, besides: set[str] = frozenset()) -> None:
    have = read_result(out)
    assert set(have) - besides == {own_name(name) for name in wanted}
    for name, entry in wanted.items():
        tensor = have[own_name(name)]
        assert (list(tensor.shape), tensor.dtype) == (entry["shape"], DTYPES[entry["dtype"]]), name
        assert sha256(tensor) == entry["sha256"], name


def optim_file(dp: int) -> str:
    return f"{STEP}/bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"


@contextlib.contextmanager
def stub_classes() -> Iterator[None]:
    """Stands in for the classes of DeepSpeed that its files name, so that torch can load and save them."""
    stages = enum.IntEnum("ZeroStageEnum", {"disabled": 0, "one": 1, "two": 2, "three": 3})
    classes = {
        "deepspeed.runtime.fp16.loss_scaler": type("LossScaler", (), {}),
        "deepspeed.utils.tensor_fragment": type("fragment_address", (), {}),
        "deepspeed.runtime.zero.config": stages,
    }
    parents = {name.rsplit(".", n)[0] for name in classes for n in range(1, name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in (*parents, *classes)}
    for name in before:
        sys.modules[name] = types.ModuleType(name)
    for name, made in classes.items():
        made.__module__ = name
        setattr(sys.modules[name], made.__name__, made)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def test_masters_are_merged(deepspeed_fixture: Path, tmp_path: Path) -> None:
    ran = cli("merge", deepspeed_fixture, tmp_path / "out", "--weights", "masters")
    assert ran.code == 0, ran.out
    assert ran.having("FS403", message="fp32 master weights")
    wanted = json.loads((deepspeed_fixture / "expected.json").read_text())["tensors"]
    # A pipeline's tied tensor keeps the name of its layer file besides that of the optimizer.
    assert_tensors(tmp_path / "out", wanted, besides={"0.word_embeddings.weight"})


def test_parameters_are_merged(deepspeed_fixture: Path, tmp_path: Path) -> None:
    wanted = json.loads((deepspeed_fixture / "expected.json").read_text())
    ran = cli("merge", deepspeed_fixture, tmp_path / "out")
    assert ran.code == 0, ran.out
    # ZeRO-3 has no second copy.
    assert_tensors(tmp_path / "out", wanted.get("params_16bit", wanted["tensors"]))
    assert ran.having("FS403", message="as stored" if "params_16bit" in wanted else "only copy")


def test_verify_finds_nothing_wrong(deepspeed_fixture: Path) -> None:
    ran = cli("verify", deepspeed_fixture)
    assert (ran.code, ran.doc["ok"]) == (0, True), ran.out


def test_masters_of_good_checkpoints_agree(deepspeed_fixture: Path) -> None:
    ran = cli("master-weights", deepspeed_fixture)
    if "zero3" in deepspeed_fixture.name:
        assert ran.code == 2
        assert ran.having("FS402", message="not checkable")
    else:
        wanted = json.loads((deepspeed_fixture / "expected.json").read_text())
        assert (ran.code, ran.doc["differing"]) == (0, []), ran.out
        assert ran.doc["compared"] >= len(wanted["master_rounded_differs_from_param_elements"])


def test_universal_is_merged_with_its_moments(universal_fixture: Path, tmp_path: Path) -> None:
    wanted = json.loads((universal_fixture / "expected.json").read_text())
    ran = cli("merge", universal_fixture, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    # What the run held: its ZeRO files have frozen parameters and buffers, and one fp32 value for both names
    # of a tied parameter, where the universal ones have a copy of the 16-bit one, or none.
    run = universal_fixture.parents[1] / "deepspeed" / universal_fixture.name / "expected.json"
    held = json.loads(run.read_text())["tensors"]
    tensors = held | wanted["tensors"] | {"head.weight": held["embed.weight"]}
    assert_tensors(tmp_path / "out", tensors | wanted["optimizer"])


def test_universal_without_a_parameter_is_incomplete(tmp_path: Path) -> None:
    root = copy(FIXTURES / "universal/zero1_bf16_dp2", tmp_path / "ckpt")
    (root / STEP / "zero/up.weight/fp32.pt").unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="zero/up.weight/fp32.pt")


def test_moments_are_those_of_the_universal_form(tmp_path: Path) -> None:
    ran = cli("merge", ZERO1, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    universal = json.loads((FIXTURES / "universal/zero1_bf16_dp2/expected.json").read_text())["optimizer"]
    moments = {name: sha256(tensor) for name, tensor in have.items() if "exp_avg" in name}
    assert moments == {name: entry["sha256"] for name, entry in universal.items()}


def test_a_model_of_hugging_face_is_converted_by_its_config(tmp_path: Path) -> None:
    ran = cli("convert", ZERO1, tmp_path / "out", "--to", "hf")
    assert ran.code == 2
    assert ran.having("FS209", message="no config.json")


# -- masters that are not the parameters -----------------------------------------------------------


def test_stale_masters_are_refused_unless_a_side_is_named(tmp_path: Path) -> None:
    assert_refused(STALE, tmp_path / "out", "FS401", tensor="embed.weight", file="optim_states")
    assert_refused(STALE, tmp_path / "out", "FS401", options=("--weights", "masters"))
    ran = cli("merge", STALE, tmp_path / "out", "--weights", "params")
    assert ran.code == 0
    assert ran.having("FS401", severity="warning", tensor="embed.weight")
    module = load_pt(STALE / STEP / "mp_rank_00_model_states.pt")["module"]
    have = read_result(tmp_path / "out")
    assert {name: sha256(tensor) for name, tensor in module.items()} == {
        n: sha256(t) for n, t in have.items()
    }


def test_masters_says_which_tensors_differ(tmp_path: Path) -> None:
    ran = cli("master-weights", STALE)
    assert ran.code == 1
    assert {"embed.weight", "up.weight", "down.bias"} <= set(ran.doc["differing"])
    assert "load_module_only" in cli("master-weights", STALE, json_output=False).out
    with pytest.raises(fastshard.FastshardError):
        fastshard.merge(STALE, tmp_path / "out", memory="2GiB")


def test_one_stale_tensor_is_found(tmp_path: Path) -> None:
    root = copy(ZERO1, tmp_path / "ckpt")

    def change(content: dict[str, Any]) -> None:
        content["module"]["norm.weight"][3] += 1

    edit_pt(root / STEP / "mp_rank_00_model_states.pt", change)
    ran = cli("master-weights", root)
    assert (ran.code, ran.doc["differing"]) == (1, ["norm.weight"])
    assert ran.having("FS401", got="1 of 24 elements differs")


def test_repair_makes_masters_of_the_parameters(tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    before = cli("master-weights", STALE)
    assert before.code == 1
    ran = cli("master-weights", STALE, "--repair", out)
    assert ran.code == 0, ran.out
    assert cli("master-weights", out).code == 0
    assert cli("verify", out).code == 0
    module = load_pt(STALE / STEP / "mp_rank_00_model_states.pt")["module"]
    assert cli("merge", out, tmp_path / "merged", "--weights", "masters").code == 0
    for name, tensor in read_result(tmp_path / "merged").items():
        frozen = name in ("frozen.weight", "steps_seen")
        assert torch.equal(tensor, module[name] if frozen else module[name].float()), name
    # The model file is the same, the optimizer's other values too, and every checksum holds.
    model = Path(STEP) / "mp_rank_00_model_states.pt"
    assert (out / model).read_bytes() == (STALE / model).read_bytes()
    for file in out.rglob("*.pt"):
        assert zipfile.ZipFile(file).testzip() is None, file
    assert (out / "latest").read_text() == STEP


def test_repair_sets_moments_and_steps_to_zero(deepspeed_fixture: Path, tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    ran = cli("master-weights", deepspeed_fixture, "--repair", out)
    if "zero3" in deepspeed_fixture.name:
        assert ran.code == 2
        assert ran.having("FS402")
        assert not out.exists()
        return
    assert ran.code == 0, ran.out
    again = cli("master-weights", out)
    assert (again.code, again.doc["differing"]) == (0, [])
    assert set(again.doc["steps"]) <= {0.0}
    # A checkpoint that was saved before its first step has no moments, and neither has its copy.
    assert (
        cli("merge", deepspeed_fixture, tmp_path / "before", "--weights", "params", "--optimizer").code == 0
    )
    assert cli("merge", out, tmp_path / "state", "--optimizer").code == 0
    had = {n for n in read_result(tmp_path / "before") if ".exp_avg" in n}
    moments = {n: t for n, t in read_result(tmp_path / "state").items() if ".exp_avg" in n}
    assert moments.keys() == had
    assert bool(had) == (deepspeed_fixture.name != "repaired_from_stale_masters_zero1_bf16_dp2")
    assert all(not t.any() for t in moments.values())
    params = json.loads((deepspeed_fixture / "expected.json").read_text())["params_16bit"]
    assert cli("merge", out, tmp_path / "params").code == 0
    assert_tensors(tmp_path / "params", params)


def test_repair_can_leave_the_optimizer_out(tmp_path: Path) -> None:
    out = tmp_path / "module_only"
    ran = cli("master-weights", STALE, "--repair", out, "--drop-optimizer")
    assert ran.code == 0, ran.out
    assert sorted(p.name for p in (out / STEP).iterdir()) == ["mp_rank_00_model_states.pt"]
    assert cli("merge", out, tmp_path / "merged").code == 0


def with_steps(root: Path, step: int | float) -> Path:
    """Lets the optimizer count its steps in numbers, in the state as in the groups (FusedAdam, CPUAdam,
    Apex)."""

    def change(content: dict[str, Any]) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for entry in (*base["state"].values(), *base["param_groups"]):
            # The neighbours show whether only the step was changed.
            entry.update(before=step, step=step, after=step)

    with stub_classes():
        for dp in range(2):
            edit_pt(root / optim_file(dp), change)
    return root


# BININT1, BININT2, BININT, LONG1, BINFLOAT
@pytest.mark.parametrize("step", [4, 255, 300, 70_000, -5, 1 << 40, 4.5])
def test_repair_sets_a_step_in_the_pickle_to_zero(tmp_path: Path, step: int | float) -> None:
    root, out = with_steps(copy(ZERO1, tmp_path / "ckpt"), step), tmp_path / "out"
    ran = cli("master-weights", root, "--repair", out)
    assert ran.code == 0, ran.out
    again = cli("master-weights", out)
    assert (again.code, set(again.doc["steps"])) == (0, {0.0})
    assert cli("verify", out).code == 0
    for dp in range(2):
        path = out / optim_file(dp)
        assert zipfile.ZipFile(path).testzip() is None
        before, after = ((root / optim_file(dp)).read_bytes(), path.read_bytes())
        assert len(before) == len(after)
        with stub_classes():
            base = load_pt(path)["optimizer_state_dict"]["base_optimizer_state"]
        for entry in (*base["state"].values(), *base["param_groups"]):
            assert [entry[key] for key in ("before", "step", "after")] == [step, 0, step]
            assert type(entry["step"]) is type(step)


def rewritten(path: Path, change: Any) -> None:
    """Changes the bytes of a torch file's pickle."""
    with zipfile.ZipFile(path) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members:
            new.writestr(name, change(data) if name.endswith("/data.pkl") else data)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("binary opcode", lambda pkl: pkl.replace(b"M\xe7\x03", b"I999\n")),
        # The first number is remembered, and the others are it.
        (
            "refers to it",
            lambda pkl: (
                pkl.replace(b"M\xe7\x03", b"M\xe7\x03q\xff", 1)[::-1]
                .replace(b"\x03\xe7M", b"\xffh")[::-1]
                .replace(b"h\xffq\xff", b"M\xe7\x03q\xff")
            ),
        ),
    ],
)
def test_repair_refuses_a_step_it_cannot_set(tmp_path: Path, why: str, change: Any) -> None:
    root = with_steps(copy(ZERO1, tmp_path / "ckpt"), 999)
    for dp in range(2):
        rewritten(root / optim_file(dp), change)
        with stub_classes():
            state = load_pt(root / optim_file(dp))["optimizer_state_dict"]["base_optimizer_state"]
        assert {entry["step"] for entry in (*state["state"].values(), *state["param_groups"])} == {999}
    ran = cli("master-weights", root, "--repair", tmp_path / "out")
    assert (ran.code, not (tmp_path / "out").exists()) == (2, True), ran.out
    assert ran.having("FS514", message=why, help="--drop-optimizer", file="optim_states", tensor="step")


def with_state(root: Path, change: Any) -> Path:
    """Changes what the optimizer's files hold of torch's optimizer."""
    with stub_classes():
        for dp in range(2):
            edit_pt(root / optim_file(dp), lambda c: change(c["optimizer_state_dict"]))
    return root


@pytest.mark.parametrize("step", [np.int64(7), np.array(7), "7", True, [7]], ids=repr)
@pytest.mark.parametrize("where", ["state", "param_groups"])
def test_repair_keeps_no_step_of_another_kind(tmp_path: Path, where: str, step: Any) -> None:
    def change(state: dict[str, Any]) -> None:
        base = state["base_optimizer_state"]
        (base["state"][0] if where == "state" else base["param_groups"][0])["step"] = step

    root = with_state(copy(ZERO1, tmp_path / "ckpt"), change)
    ran = cli("master-weights", root, "--repair", tmp_path / "out")
    assert (ran.code, not (tmp_path / "out").exists()) == (2, True), ran.out
    assert ran.having("FS514", help="--drop-optimizer", file="optim_states", tensor=f"{where}.0.step")
    assert cli("master-weights", root, "--repair", tmp_path / "out", "--drop-optimizer").code == 0


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 1 << 70, torch.tensor(9.0)], ids=str)
def test_repair_sets_the_step_of_a_group_to_zero(tmp_path: Path, step: Any) -> None:
    def change(state: dict[str, Any]) -> None:
        for entry in state["base_optimizer_state"]["param_groups"]:
            entry.update(step=step, lr=torch.tensor(0.5))

    root, out = with_state(copy(ZERO1, tmp_path / "ckpt"), change), tmp_path / "out"
    ran = cli("master-weights", root, "--repair", out)
    assert ran.code == 0, ran.out
    with stub_classes():
        for dp in range(2):
            for entry in load_pt(out / optim_file(dp))["optimizer_state_dict"]["base_optimizer_state"][
                "param_groups"
            ]:
                assert (float(entry["step"]), float(entry["lr"])) == (0.0, 0.5)


def test_repair_keeps_no_moments_of_an_elastic_checkpoint(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        states = state["base_optimizer_state"]["state"]
        state["base_optimizer_state"] = [{**entry, "step": 4} for entry in states.values()]

    root, out = with_state(copy(ZERO1, tmp_path / "ckpt"), change), tmp_path / "out"
    ran = cli("master-weights", root, "--repair", out)
    assert ran.code == 0, ran.out
    with stub_classes():
        for dp in range(2):
            for entry in load_pt(out / optim_file(dp))["optimizer_state_dict"]["base_optimizer_state"]:
                assert entry["step"] == 0 and {"exp_avg", "exp_avg_sq"} <= entry.keys()
                assert not any(value.any() for value in entry.values() if torch.is_tensor(value))


def test_repair_reads_no_damaged_parameter(tmp_path: Path) -> None:
    root = copy(STALE, tmp_path / "ckpt")
    model = root / STEP / "mp_rank_00_model_states.pt"
    flip_payload(model, load_pt(model)["module"]["up.weight"])
    ran = cli("master-weights", root, "--repair", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert ran.having("FS301", file="mp_rank_00_model_states.pt")


# -- partitions that do not fit ---------------------------------------------------------------------


def test_a_copied_partition_is_named(tmp_path: Path) -> None:
    root = copy(ZERO1, tmp_path / "ckpt")
    (root / optim_file(1)).write_bytes((root / optim_file(0)).read_bytes())
    for weights in ((), ("--weights", "masters")):
        assert_refused(root, tmp_path / "out", "FS303", options=weights, rank="dp 1")


def test_a_copied_partition_of_zero3_is_named(tmp_path: Path) -> None:
    root = copy(ZERO3, tmp_path / "ckpt")
    (root / optim_file(1)).write_bytes((root / optim_file(0)).read_bytes())
    assert_refused(root, tmp_path / "out", "FS303", rank="dp 1", message="a copy of")


def test_a_missing_partition_is_named(tmp_path: Path) -> None:
    root = copy(ZERO3, tmp_path / "ckpt")
    (root / optim_file(0)).unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file=optim_file(0), rank="dp 0")


def test_parameters_can_be_taken_without_the_optimizer(tmp_path: Path) -> None:
    root = copy(ZERO1, tmp_path / "ckpt")
    (root / optim_file(1)).unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, help="take the parameters alone")
    ran = cli("merge", root, tmp_path / "out", "--weights", "params")
    assert ran.code == 0
    assert ran.having("FS101", severity="warning", file=optim_file(1))


def test_masters_cannot_be_taken_where_there_are_none(tmp_path: Path) -> None:
    root = copy(ZERO1, tmp_path / "ckpt")
    for dp in range(2):
        (root / optim_file(dp)).unlink()
    assert_refused(root, tmp_path / "out", "FS402", exit=2, options=("--weights", "masters"))
    assert cli("master-weights", root).code == 2
    assert cli("merge", root, tmp_path / "out").code == 0


def test_partitions_without_an_order_are_not_taken(tmp_path: Path) -> None:
    root = copy(ZERO1, tmp_path / "ckpt")

    def change(content: dict[str, Any]) -> None:
        content["param_shapes"] = None

    edit_pt(root / STEP / "mp_rank_00_model_states.pt", change)
    assert_refused(root, tmp_path / "out", "FS402", exit=2, options=("--weights", "masters"))


def test_a_model_file_of_another_model_is_refused(tmp_path: Path) -> None:
    root = copy(ZERO3, tmp_path / "ckpt")

    def change(content: dict[str, Any]) -> None:
        content["param_shapes"][0]["up.weight"] = torch.Size([41, 24])

    for dp in range(2):
        edit_pt(root / f"{STEP}/zero_pp_rank_{dp}_mp_rank_00_model_states.pt", change)
    assert_refused(root, tmp_path / "out", "FS404", got="1464")
