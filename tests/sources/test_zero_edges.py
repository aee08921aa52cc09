"""Checkpoints of ZeRO that were once read wrongly, each the smallest that shows it."""

from __future__ import annotations

import gc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_maker as maker
from helpers import FIXTURES, cli, copy, read_result
from zero_maker import Run, model_file, optim_file


def test_moments_of_a_single_element(tmp_path: Path) -> None:
    run = Run(3, 1, torch.bfloat16, [{"gain": torch.tensor([0.5])}])
    root = maker.write(tmp_path / "ckpt", run)
    assert cli("merge", root, tmp_path / "out", "--optimizer").code == 0
    assert set(read_result(tmp_path / "out")) == {"gain", "gain.exp_avg", "gain.exp_avg_sq"}


@pytest.mark.parametrize("stage", [1, 3, "bf16"])
def test_empty_parameters_are_not_left_out(tmp_path: Path, stage: int | str) -> None:
    group = {"empty": torch.zeros(0, 3), "full": torch.rand(5)}
    run = Run(stage, 2, torch.bfloat16, [group], frozen={"fixed": torch.zeros(2, 0).bfloat16()})
    root = maker.write(tmp_path / "ckpt", run)
    assert cli("merge", root, tmp_path / "out", "--weights", "masters", "--optimizer").code == 0
    have = read_result(tmp_path / "out")
    assert {n: tuple(t.shape) for n, t in have.items() if not t.numel()} == {
        "empty": (0, 3),
        "empty.exp_avg": (0, 3),
        "empty.exp_avg_sq": (0, 3),
        "fixed": (2, 0),
    }


def test_masters_without_names_are_told_of(tmp_path: Path) -> None:
    # One frozen among three of one shape: nothing says which two the masters are.
    same = {name: torch.rand(4) for name in "ab"}
    run = Run(0, 1, torch.bfloat16, [same], frozen={"c": torch.rand(4).bfloat16()})
    root = maker.write(tmp_path / "ckpt", run)
    ran = cli("merge", root, tmp_path / "masters", "--weights", "masters")
    assert (ran.code, (tmp_path / "masters").exists()) == (2, False)
    assert ran.having("FS402", message="more than one way", file=model_file())
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, len(ran.having("FS402", severity="warning", message="more than one way"))) == (0, 1)
    assert cli("master-weights", root).code == 2


def test_the_order_of_param_shapes_is_compared_between_ranks(tmp_path: Path) -> None:
    run = Run(3, 2, torch.bfloat16, [{"a": torch.rand(4), "b": torch.rand(4)}])
    root = maker.write(tmp_path / "ckpt", run)
    maker.edit(root / model_file(1), lambda content: content["param_shapes"][0].move_to_end("a"))
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert ran.having("FS110", file=model_file(1), rank="dp 1", message="param_shapes")


@pytest.mark.parametrize(
    "change", [{"module": None}, {"buffer_names": ["seen", "gone"]}, {"buffer_names": None}]
)
def test_buffers_of_zero3_are_not_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    run = Run(3, 2, torch.bfloat16, [{"a": torch.rand(4)}], buffers={"seen": torch.ones(3)})
    root = maker.write(tmp_path / "ckpt", run)
    maker.edit(root / model_file(0), lambda content: content.update(change))
    ran = cli("merge", root, tmp_path / "out")
    if change == {"buffer_names": None}:
        # The list is not needed to see what is there.
        assert (ran.code, set(read_result(tmp_path / "out"))) == (0, {"a", "seen"})
    else:
        assert (ran.code, (tmp_path / "out").exists()) == (3, False)
        assert ran.having("FS102", file=model_file(0))


@pytest.mark.parametrize("stage", [1, 3])
def test_moments_that_cannot_be_read_are_not_left_out(tmp_path: Path, stage: int) -> None:
    run = Run(stage, 2, torch.bfloat16, [{"a": torch.rand(4), "b": torch.rand(9)}])
    root = maker.write(tmp_path / "ckpt", run)
    base = "base_optimizer_state" if stage == 1 else "optimizer_state_dict"
    state = maker.load(root / optim_file(1))["optimizer_state_dict"][base]["state"]
    steps: list[tuple[int, Any]] = [
        (1, {0: {"step": state[0]["step"], "exp_avg": state[0]["exp_avg"]}}),
        (1, {}),
        (0, {}),
        (0, "x"),
        (1, "x"),
    ]
    codes = []
    for number, (dp, given) in enumerate(steps):
        maker.edit(
            root / optim_file(dp), lambda c, given=given: c["optimizer_state_dict"][base].update(state=given)
        )
        out = tmp_path / f"out{number}"
        ran = cli("merge", root, out, "--optimizer")
        codes.append(ran.code)
        assert out.exists() == (ran.code == 0)
        severity = "warning" if ran.code == 0 else "error"
        code = "FS404" if ran.code == 1 else "FS402"
        assert ran.having(code, severity=severity), ran.out
    # A state with nothing in it is that of an optimizer that never took a step.
    assert codes == [1, 1, 0, 2, 2]


@pytest.mark.parametrize("key", ["frozen_param_shapes", "shared_params"])
@pytest.mark.parametrize("value", [None, {}, "x", [1]])
def test_parameters_of_zero3_are_not_left_out(tmp_path: Path, key: str, value: Any) -> None:
    frozen = {"fixed": torch.ones(3).bfloat16()}
    run = Run(3, 2, torch.bfloat16, [{"a": torch.rand(4)}], frozen=frozen, aliases={"tied": "a"})
    root = maker.write(tmp_path / "ckpt", run)
    for dp in range(2):
        maker.edit(root / model_file(dp), lambda content: content.update({key: value}))
    ran = cli("merge", root, tmp_path / "out")
    told = key != "shared_params" or value == {}
    name = "tied" if key == "shared_params" else "fixed"
    assert (ran.code, (tmp_path / "out").exists()) == ((3, False) if told else (0, True)), ran.out
    assert ran.having("FS102", severity="error" if told else "warning", file=model_file(0), tensor=name)


@pytest.mark.parametrize("shape", [[True, 4], [1 << 39, 1 << 39], [-2, -2], "x", [2.0, 2]])
@pytest.mark.parametrize("key", ["param_shapes", "frozen_param_shapes"])
def test_shapes_that_are_none(tmp_path: Path, key: str, shape: Any) -> None:
    run = Run(3, 1, torch.bfloat16, [{"a": torch.rand(4)}], frozen={"fixed": torch.ones(4).bfloat16()})
    root = maker.write(tmp_path / "ckpt", run)
    shapes: Any = {"fixed": shape} if key == "frozen_param_shapes" else [{"a": shape}]
    maker.edit(root / model_file(0), lambda content: content.update({key: shapes}))
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code in (1, 2, 3)
    assert not (tmp_path / "out").exists()
    assert any(f.get("file", "").endswith(model_file(0)) for f in ran.errors), ran.out


@pytest.mark.parametrize("content", [None, 7, {}])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_file_of_something_else(tmp_path: Path, stage: int, content: Any) -> None:
    run = Run(stage, 2, torch.bfloat16, [{"a": torch.rand(4)}])
    for name in (optim_file(1), model_file(1 if stage == 3 else None)):
        root = maker.write(tmp_path / name.replace("/", "_") / "ckpt", run)
        torch.save(content, root / name)
        ran = cli("merge", root, tmp_path / "out")
        assert (ran.code in (1, 3), (tmp_path / "out").exists()) == (True, False), ran.out
        assert any(f.get("file", "").endswith(name) for f in ran.errors), ran.out


UNIVERSAL = FIXTURES / "universal/zero1_bf16_dp2"


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("fp32", None, "FS102"),
        ("fp32", torch.zeros(40 * 24 + 2), "FS201"),
        ("exp_avg", None, "FS102"),
        ("exp_avg", "gone", "FS101"),
    ],
)
def test_universal_parameters_are_not_left_out(tmp_path: Path, file: str, content: Any, code: str) -> None:
    root = copy(UNIVERSAL, tmp_path / "ckpt")
    path = next(root.glob(f"*/zero/up.weight/{file}.pt"))
    if content == "gone":
        path.unlink()
    else:
        torch.save(content, path)
    ran = cli("merge", root, tmp_path / "out", "--optimizer")
    assert (ran.code in (1, 3), (tmp_path / "out").exists()) == (True, False), ran.out
    assert ran.having(code, severity="error", file=f"zero/up.weight/{file}.pt")


def test_repair_of_a_partition_that_is_all_padding(tmp_path: Path) -> None:
    # BF16_Optimizer keeps the padding; of a group of one element, rank 1 holds nothing else.
    root = maker.write(tmp_path / "ckpt", Run("bf16", 2, torch.bfloat16, [{"gain": torch.rand(1)}]))
    ran = cli("master-weights", root, "--repair", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert cli("master-weights", tmp_path / "out").code == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_buffer_names_that_are_no_list(tmp_path: Path, stage: int) -> None:
    root = maker.write(tmp_path / "ckpt", Run(stage, 1, torch.bfloat16, [{"a": torch.rand(4)}]))
    maker.edit(root / model_file(0 if stage else None), lambda content: content.update(buffer_names=-1))
    assert cli("merge", root, tmp_path / "out").code == 0


def test_opening_a_checkpoint_leaves_no_file_open() -> None:
    def opened() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    root = FIXTURES / "deepspeed/zero1_bf16_dp2"
    assert cli("verify", root).code == 0
    before = opened()
    for _ in range(3):
        assert cli("verify", root).code == 0
    assert opened() <= before


# -- stage 0: an optimizer's state in the model file, without names ------------------------------------


def transformer(stage: str, **more: Any) -> Run:
    """Weights with decay, biases and norms without, as trainers group them."""
    shapes = {
        f"{i}.{n}": s
        for i in range(3)
        for n, s in {"norm.weight": (5,), "qkv.weight": (15, 5), "qkv.bias": (15,)}.items()
    }
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    groups = [{n: t for n, t in tensors.items() if t.dim() == d} for d in (2, 1)]
    return Run(stage, 1, torch.bfloat16, groups, aliases={"head.weight": "0.qkv.weight"}, **more)


def in_module_order(root: Path, change: Any = None) -> Path:
    """Orders the module as a model registers its parameters: layer by layer, whatever their groups are."""

    def reorder(content: Any) -> None:
        items = sorted(content["module"].items(), key=lambda item: item[0])
        content["module"] = OrderedDict(change(items) if change else items)

    maker.edit(root / model_file(), reorder)
    return root


@pytest.mark.parametrize("views", [True, False])
def test_flat_masters_of_stage_0(tmp_path: Path, views: bool) -> None:
    run = transformer("fused", views=views)
    root = in_module_order(maker.write(tmp_path / "ckpt", run))
    ran = cli("master-weights", root)
    assert (ran.code, ran.doc["differing"], ran.doc["compared"], ran.doc["steps"]) == (0, [], 10, [7.0])
    assert cli("merge", root, tmp_path / "out", "--weights", "masters", "--optimizer").code == 0
    have, wanted = read_result(tmp_path / "out"), run.masters() | run.moments()
    assert set(have) == set(wanted)
    assert all(torch.equal(have[name], tensor) for name, tensor in wanted.items())


def test_stale_flat_masters_of_stage_0_are_refused(tmp_path: Path) -> None:
    root = in_module_order(maker.write(tmp_path / "ckpt", transformer("fused")))
    maker.edit(root / model_file(), lambda content: content["module"]["1.norm.weight"].add_(1))
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert [f["tensor"] for f in ran.having("FS401", severity="error")] == ["1.norm.weight"]


def test_flat_masters_are_named_by_place_not_by_order(tmp_path: Path) -> None:
    """The order of the optimizer's groups is the user's; the module's tensors lie in the flat vectors."""
    run = transformer("fused")
    root = in_module_order(maker.write(tmp_path / "ckpt", run), lambda items: reversed(items))
    assert cli("master-weights", root).doc["differing"] == []
    assert cli("merge", root, tmp_path / "out", "--weights", "masters").code == 0
    have = read_result(tmp_path / "out")
    assert all(torch.equal(have[name], tensor) for name, tensor in run.masters().items())


def test_flat_masters_that_fit_in_several_ways_are_told_of(tmp_path: Path) -> None:
    groups = [{"a": torch.rand(4)}, {"b": torch.rand(4)}]
    root = maker.write(tmp_path / "ckpt", Run("fused", 1, torch.bfloat16, groups))
    ran = cli("merge", root, tmp_path / "masters", "--weights", "masters")
    assert (ran.code, (tmp_path / "masters").exists()) == (2, False)
    assert ran.having("FS402", message="more than one way", file=model_file())
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, len(ran.having("FS402", severity="warning", message="more than one way"))) == (0, 1)
    assert (
        cli("master-weights", root).code,
        cli("master-weights", root, "--repair", tmp_path / "x").code,
    ) == (2, 2)


def test_moments_of_an_optimizer_that_was_not_wrapped(tmp_path: Path) -> None:
    run = transformer("plain")
    root = in_module_order(maker.write(tmp_path / "ckpt", run))
    assert cli("merge", root, tmp_path / "out", "--optimizer").code == 0
    have, wanted = read_result(tmp_path / "out"), run.params() | run.moments()
    assert set(have) == set(wanted)
    assert all(torch.equal(have[name], tensor) for name, tensor in wanted.items())
    ran = cli("master-weights", root)
    assert (ran.code, bool(ran.having("FS402", message="no fp32 master weights"))) == (2, True)


@pytest.mark.parametrize("stage", [0, "plain"])
def test_moments_that_no_parameter_has_are_told_of_where_they_are_asked_for(
    tmp_path: Path, stage: int | str
) -> None:
    root = maker.write(tmp_path / "ckpt", Run(stage, 1, torch.bfloat16, [{"a": torch.rand(4, 6)}]))

    def factored(content: Any) -> None:
        optimizer = content["optimizer"].get("optimizer_state_dict", content["optimizer"])
        optimizer["state"][0] = {"step": 7, "exp_avg": torch.rand(4, 6), "exp_avg_sq_row": torch.rand(4)}

    maker.edit(root / model_file(), factored)
    for options in ((), *([("--weights", "masters")] if stage == 0 else [])):
        ran = cli("merge", root, tmp_path / f"out{len(options)}", *options)
        assert (ran.code, ran.having("FS402")) == (0, []), ran.out
    ran = cli("merge", root, tmp_path / "state", "--optimizer")
    assert (ran.code, (tmp_path / "state").exists()) == (2, False)
    assert ran.having("FS402", severity="error", message="exp_avg_sq_row", tensor="a")


def test_partitions_that_name_their_parameters_themselves(tmp_path: Path) -> None:
    """BF16_Optimizer in a pipeline of stage 0: no param_shapes, the first rank's partition in the model file
    too."""
    groups = [{"a": torch.rand(5, 7), "b": torch.rand(3)}, {"c": torch.rand(11)}]
    run = Run("bf16", 3, torch.bfloat16, groups)
    root = maker.write(tmp_path / "ckpt", run)
    first = maker.load(root / optim_file(0))["optimizer_state_dict"]
    maker.edit(root / model_file(), lambda content: content.update(param_shapes=None, optimizer=first))
    assert cli("master-weights", root).doc["compared"] == 3
    assert cli("merge", root, tmp_path / "out", "--weights", "masters", "--optimizer").code == 0
    have, wanted = read_result(tmp_path / "out"), run.masters() | run.moments()
    assert set(have) == set(wanted)
    assert all(torch.equal(have[name], tensor) for name, tensor in wanted.items())
    for dp in range(3):
        (root / optim_file(dp)).unlink()
    ran = cli("merge", root, tmp_path / "none")
    assert (ran.code, (tmp_path / "none").exists()) == (3, False), ran.out
    assert ran.having("FS101", severity="error", file=optim_file(0))
