"""ZeRO partitions of many shapes and worlds against whole tensors; and what is wrong with them, by name."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_maker as maker
from helpers import assert_refused, at_once, cli, copy, flip_payload, read_result, sha256
from hypothesis import given, settings
from hypothesis import strategies as st
from zero_maker import TAG, Run, Tensors, model_file, optim_file

#: Forms of stage 0, whose optimizers name nothing.
STAGE_0 = (0, "fused", "plain")
#: Empty, one element, odd, around what a world's padding comes to, and some more.
SHAPES = [(), (0,), (1,), (3,), (2, 0), (7, 3), (5,), (16,), (4, 4), (1, 1, 9), (33,), (2, 3, 11)]


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    stage = draw(st.sampled_from([0, "fused", "plain", 1, 2, 3, "bf16"]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    count = draw(st.integers(1, 3))
    # Nothing tells whether what has no elements is in a flat vector.
    sizes = [s for s in SHAPES if stage != "fused" or 0 not in s]
    shapes = draw(st.lists(st.sampled_from(sizes), min_size=count, max_size=9))
    groups: list[Tensors] = [{} for _ in range(count)]
    for i, shape in enumerate(shapes):
        # Every group has a parameter; the others go anywhere.
        g = i if i < count else draw(st.integers(0, count - 1))
        groups[g][f"p{i}.weight"] = values(shape, i)
    names = [name for group in groups for name in group]
    owners = draw(st.lists(st.sampled_from(names), max_size=2))
    frozen = draw(st.lists(st.sampled_from(SHAPES), max_size=2))
    return Run(
        stage=stage,
        world=draw(st.integers(1, 5)),
        dtype=torch.bfloat16 if stage == "bf16" else dtype,
        groups=groups,
        frozen={f"frozen{i}": values(s, 90 + i).to(dtype) for i, s in enumerate(frozen)},
        buffers={"seen": values((3,), 99), "count": torch.tensor(12)} if draw(st.booleans()) else {},
        aliases={f"alias{i}": owner for i, owner in enumerate(owners)},
        alignment=draw(st.sampled_from([1, 4, 8])) if stage in (1, 2) else 1,
        sub_group=draw(st.sampled_from([1, 7, 1 << 60])),
        round_robin=stage in (1, 2) and draw(st.booleans()),
        views=draw(st.booleans()),
    )


def assert_tensors(have: Tensors, wanted: Tensors) -> None:
    assert set(have) == set(wanted)
    for name, tensor in wanted.items():
        assert (have[name].dtype, have[name].shape) == (tensor.dtype, tensor.shape), name
        assert sha256(have[name]) == sha256(tensor), name


def merged(root: Path | list[Path], *options: str) -> Tensors:
    roots = [root] if isinstance(root, Path) else root
    out = Path(tempfile.mkdtemp(dir=roots[0].parent)) / "out"
    ran = cli("merge", *roots, out, *options)
    assert ran.code == 0, ran.out
    return read_result(out)


def unnameable(root: Path) -> bool:
    """Stage 0 names no masters: where shapes fit in several ways, they are not taken."""
    out = root.parent / "unnameable"
    ran = cli("merge", root, out, "--optimizer")
    return bool(ran.code == 2 and ran.having("FS402", message="more than one way") and not out.exists())


@pytest.mark.slow
@settings(max_examples=120)
@given(runs())
def test_any_run_is_merged(run: Run) -> None:
    if run.alignment > 1 and run.round_robin:
        # Only with padding between parameters does DeepSpeed account in the right order: too rare to make.
        run = dataclasses.replace(run, round_robin=False)
    with tempfile.TemporaryDirectory() as folder:
        root = maker.write(Path(folder) / "ckpt", run)
        params = merged(root, "--weights", "params") if run.stage != 3 else merged(root)
        assert_tensors(params, run.params())
        assert run.stage in STAGE_0 or not unnameable(root)
        if run.stage in STAGE_0 and unnameable(root):
            return
        assert_tensors(merged(root), run.params())
        if run.stage == "plain":
            assert_tensors(merged(root, "--optimizer"), run.params() | run.moments())
            for command in (
                ("master-weights", root),
                ("merge", root, Path(folder) / "none", "--weights", "masters"),
            ):
                ran = cli(*command)
                assert (ran.code, bool(ran.having("FS402", message="no fp32 master weights"))) == (2, True), (
                    ran.out
                )
            return
        assert_tensors(merged(root, "--weights", "masters"), run.masters())
        assert_tensors(merged(root, "--optimizer"), run.params() | run.moments())
        ran = cli("master-weights", root)
        assert (ran.code, ran.doc["differing"]) == (2 if run.stage == 3 else 0, []), ran.out


@pytest.mark.slow
@settings(max_examples=60)
@given(runs().filter(lambda run: run.stage not in (3, "plain")))
def test_any_run_is_repaired(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = maker.write(Path(folder) / "ckpt", dataclasses.replace(run, alignment=1))
        # Parameters of other values than the masters': loaded after them, and never refreshed.
        others = [
            {n: values(tuple(t.shape), 50 + i) for i, (n, t) in enumerate(g.items())} for g in run.groups
        ]
        other = dataclasses.replace(run, alignment=1, groups=others)
        source = maker.write(Path(folder) / "other", other)
        module = maker.load(source / model_file())["module"]
        maker.edit(root / model_file(), lambda content: content.update(module=module))
        ran = cli("master-weights", root, "--repair", Path(folder) / "out")
        if run.stage in STAGE_0 and unnameable(root):
            assert (ran.code, (Path(folder) / "out").exists()) == (2, False)
            return
        assert ran.code == 0, ran.out
        have = merged(Path(folder) / "out", "--weights", "masters", "--optimizer")
        untouched = {*run.frozen, *run.buffers}
        wanted = {n: t if n in untouched else t.float() for n, t in other.params().items()}
        assert_tensors(have, wanted | {name: torch.zeros_like(t) for name, t in run.moments().items()})


@pytest.mark.parametrize("views", [True, False])
def test_a_frozen_parameter_as_long_as_a_flat_vector_is_not_taken_for_it(views: bool, tmp_path: Path) -> None:
    """Masters of others would be written as its own: which they are of nothing tells, so they are not
    taken."""
    groups = [{"a.weight": values((4, 2), 1), "b.weight": values((8,), 2)}]
    frozen = {"f": values((16,), 9).bfloat16()}
    root = maker.write(tmp_path / "ckpt", Run("fused", 1, torch.bfloat16, groups, frozen=frozen, views=views))
    assert unnameable(root)
    ran = cli("master-weights", root, "--repair", tmp_path / "out")
    assert ran.code == 2 and ran.having("FS402") and not (tmp_path / "out").exists()


def test_a_group_of_one_parameter_is_told_beside_views(tmp_path: Path) -> None:
    groups = [{"a.weight": values((4, 2), 1), "b.weight": values((8,), 2)}, {"c.weight": values((5,), 3)}]
    run = Run("fused", 1, torch.bfloat16, groups, frozen={"f": values((3,), 9).bfloat16()})
    root = maker.write(tmp_path / "ckpt", run)
    assert_tensors(merged(root, "--weights", "masters"), run.masters())


def plain(stage: int | str = 1, world: int = 3, **more: Any) -> Run:
    groups = [
        {"a.weight": values((17, 5), 1), "a.bias": values((17,), 2), "b.weight": values((9, 17), 3)},
        {"norm.weight": values((12,), 4), "norm.bias": values((13,), 5)},
    ]
    return Run(stage, world, torch.bfloat16, groups, buffers={"seen": torch.zeros(2)}, **more)


STAGES = pytest.mark.parametrize("stage", [1, 2, 3, "bf16"])


@STAGES
def test_ranks_beyond_nine_are_in_order_of_their_numbers(tmp_path: Path, stage: int | str) -> None:
    run = plain(stage, world=12)
    root = maker.write(tmp_path / "ckpt", run)
    assert_tensors(merged(root, "--weights", "masters"), run.masters())


@STAGES
def test_rank_files_of_two_nodes(tmp_path: Path, stage: int | str) -> None:
    run = plain(stage, world=4)
    root = maker.write(tmp_path / "node0", run)
    other = tmp_path / "node1"
    (other / TAG).mkdir(parents=True)
    for dp in (2, 3):
        for name in {optim_file(dp), model_file(dp)}:
            if (root / name).exists():
                shutil.move(root / name, other / name)
    assert_tensors(merged([root, other], "--weights", "masters"), run.masters())
    assert_refused(root, tmp_path / "out", "FS101", exit=3, rank="dp 2")
    # A copy on both is one file; two different files of one rank are not.
    shutil.copy(other / optim_file(2), root / optim_file(2))
    assert_tensors(merged([root, other], "--weights", "masters"), run.masters())
    shutil.copy(root / optim_file(1), root / optim_file(2))
    ran = assert_refused([root, other], tmp_path / "out", "FS302", rank="dp 2")
    assert ran.having("FS302", file="rank_2_")


# -- damage ------------------------------------------------------------------------------------------

#: Changes an optimizer file's state in place.
Change = Callable[[dict[str, Any]], None]


def flats(state: dict[str, Any]) -> list[torch.Tensor]:
    return state[
        "single_partition_of_fp32_groups"
        if "single_partition_of_fp32_groups" in state
        else "fp32_flat_groups"
    ]


def edit_optim(root: Path, dp: int, change: Change) -> None:
    maker.edit(root / optim_file(dp), lambda content: change(content["optimizer_state_dict"]))


def both_refuse(root: Path, out: Path, code: str, **parts: Any) -> None:
    """Refused by default and where the masters are asked for."""
    for options in ((), ("--weights", "masters")):
        assert_refused(root, out, code, options=options, **parts)


@STAGES
@pytest.mark.parametrize("dp", [0, 1, 2])
def test_a_missing_rank(tmp_path: Path, stage: int | str, dp: int) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    (root / optim_file(dp)).unlink()
    both_refuse(root, tmp_path / "out", "FS101", exit=3, file=optim_file(dp), rank=f"dp {dp}")


@STAGES
def test_a_duplicated_rank(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    shutil.copy(root / optim_file(0), root / optim_file(1))
    both_refuse(root, tmp_path / "out", "FS303", file=optim_file(1), rank="dp 1")


# A partition of ZeRO-3 says nowhere which rank it is: only the file's name does.
@pytest.mark.parametrize("stage", [1, 2, "bf16"])
def test_swapped_ranks(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    first, second = root / optim_file(0), root / optim_file(1)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    both_refuse(root, tmp_path / "out", "FS303", file="optim_states", rank="dp 0")


@STAGES
def test_a_rank_from_another_step(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))

    def change(state: dict[str, Any]) -> None:
        base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        for entry in base["state"].values():
            entry["step"] += 1

    edit_optim(root, 1, change)
    both_refuse(root, tmp_path / "out", "FS107", file=optim_file(1), rank="dp 1", got="8")


@STAGES
def test_a_partition_of_another_world(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    other = maker.write(tmp_path / "other", plain(stage, world=4))
    shutil.copy(other / optim_file(1), root / optim_file(1))
    both_refuse(root, tmp_path / "out", "FS110", file=optim_file(1), rank="dp 1", got="4")


@STAGES
def test_leftover_files_of_a_wider_run(tmp_path: Path, stage: int | str) -> None:
    run = plain(stage)
    root = maker.write(tmp_path / "ckpt", run)
    other = maker.write(tmp_path / "other", plain(stage, world=4))
    shutil.copy(other / optim_file(3), root / optim_file(3))
    ran = cli("merge", root, tmp_path / "out", "--weights", "masters")
    assert ran.code == 0, ran.out
    assert ran.having("FS108", severity="warning", file=optim_file(3))
    assert_tensors(read_result(tmp_path / "out"), run.masters())


@pytest.mark.parametrize("stage", [1, 2, "bf16"])
def test_stale_masters_in_one_tensor(tmp_path: Path, stage: int | str) -> None:
    run = plain(stage)
    root = maker.write(tmp_path / "ckpt", run)
    module = maker.load(root / model_file())["module"]
    changed = module["norm.bias"].clone()
    changed[12] += 1
    maker.edit(root / model_file(), lambda content: content["module"].update({"norm.bias": changed}))
    both_refuse(root, tmp_path / "out", "FS401", tensor="norm.bias", got="elements differs")
    ran = cli("master-weights", root)
    assert (ran.code, ran.doc["differing"]) == (1, ["norm.bias"])
    wanted = run.params() | {"norm.bias": changed}
    assert_tensors(merged(root, "--weights", "params"), wanted)


@STAGES
def test_a_truncated_file(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    file = root / optim_file(2)
    file.write_bytes(file.read_bytes()[:-30])
    for options in ((), ("--weights", "masters")):
        ran = cli("merge", root, tmp_path / "out", *options)
        assert (ran.code, (tmp_path / "out").exists()) == (1, False)
        assert any(f.get("file", "").endswith(optim_file(2)) for f in ran.errors), ran.out


@STAGES
def test_a_flipped_bit(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))
    file = root / optim_file(1)
    flip_payload(file, flats(maker.load(file)["optimizer_state_dict"])[0])
    both_refuse(root, tmp_path / "out", "FS301", file=optim_file(1))


@STAGES
def test_param_shapes_in_another_order(tmp_path: Path, stage: int | str) -> None:
    root = maker.write(tmp_path / "ckpt", plain(stage))

    def change(content: dict[str, Any]) -> None:
        for group in content["param_shapes"]:
            items = list(group.items())
            group.clear()
            group.update(reversed(items))

    if stage == 3:
        # One file only: the ranks disagree. Nothing else holds the order.
        maker.edit(root / model_file(1), change)
        ran = cli("merge", root, tmp_path / "out")
        assert (ran.code, (tmp_path / "out").exists()) == (1, False)
        assert ran.having("FS110", file=model_file(1)), ran.out
        return
    maker.edit(root / model_file(), change)
    both_refuse(root, tmp_path / "out", "FS404", message="param_slice_mappings", rank="dp 0")


NONSENSE: list[Any] = [
    None,
    [],
    {},
    "x",
    -1,
    1 << 70,
    3.5,
    float("nan"),
    [[]],
    [None] * 2,
    [-5, -5],
    [1 << 70] * 2,
    ["x", {}],
    [{}, {}],
    [OrderedDict(x=1)] * 2,
    [True, False],
    [[[[[[]]]]]],
]
#: None, a number too large, and dicts where tensors belong.
QUICK_NONSENSE = (0, 5, 13)
#: Keys whose nonsense may leave the checkpoint as it was: nothing rests on them.
KEYS_12 = [
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "param_slice_mappings",
    "zero_stage",
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "loss_scaler",
    "ds_version",
]
KEYS_3 = ["partition_count", "optimizer_state_dict", "fp32_flat_groups", "zero_stage", "loss_scaler"]
MODEL_KEYS = [
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "global_steps",
    "ds_config",
    "optimizer",
    "ds_version",
    "checkpoint_parallel_dimensions",
    "num_experts",
    "args",
    "iteration",
]


def never_wrong(root: Path, run: Run, label: str) -> None:
    """Each way of merging gives the truth, or names a file and publishes nothing."""
    for number, options in enumerate(
        ((), ("--weights", "masters"), ("--weights", "params"), ("--optimizer",))
    ):
        out = root.parent / f"out{number}"
        ran = cli("merge", root, out, *options)
        if ran.code == 0:
            wanted = run.masters() if "masters" in options else run.params()
            wanted |= run.moments() if "--optimizer" in options else {}
            have = read_result(out)
            assert set(have) == set(wanted), (label, options)
            for name, tensor in have.items():
                assert sha256(tensor) == sha256(wanted[name]), (label, options, name)
            shutil.rmtree(out)
        else:
            assert ran.code in (1, 2, 3), (label, ran.out, ran.err)
            assert not out.exists(), (label, options)
            assert ran.errors, (label, ran.out)
    for command in (("master-weights", root), ("verify", root), ("inspect", root)):
        assert cli(*command).code in (0, 1, 2, 3), (label, command)


@pytest.mark.parametrize("stage", [1, 3, "bf16"])
@pytest.mark.parametrize("value", at_once(range(len(NONSENSE)), QUICK_NONSENSE))
def test_nonsense_in_the_optimizer_files(tmp_path: Path, stage: int | str, value: int) -> None:
    run = plain(stage)
    good = maker.write(tmp_path / "good", run)
    for key in KEYS_3 if stage == 3 else KEYS_12:
        root = copy(good, tmp_path / key / "ckpt")
        for dp in range(run.world):
            edit_optim(root, dp, lambda state, key=key: state.update({key: NONSENSE[value]}))
        never_wrong(root, run, f"{key} = {NONSENSE[value]!r}")


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("value", at_once(range(len(NONSENSE)), QUICK_NONSENSE))
def test_nonsense_in_the_model_files(tmp_path: Path, stage: int | str, value: int) -> None:
    run = plain(stage)
    good = maker.write(tmp_path / "good", run)
    for key in MODEL_KEYS:
        root = copy(good, tmp_path / key / "ckpt")
        for file in sorted((root / TAG).glob("*model_states.pt")):
            maker.edit(file, lambda content, key=key: content.update({key: NONSENSE[value]}))
        never_wrong(root, run, f"{key} = {NONSENSE[value]!r}")


def test_slice_mappings_that_do_not_tile(tmp_path: Path) -> None:
    root = maker.write(tmp_path / "ckpt", plain())

    def change(state: dict[str, Any]) -> None:
        state["param_slice_mappings"][0]["a.bias"].start += 1

    edit_optim(root, 1, change)
    both_refuse(root, tmp_path / "out", "FS404", file=optim_file(1), rank="dp 1", message="a.bias")


def test_round_robin_mappings_need_the_setting(tmp_path: Path) -> None:
    run = plain(world=2, round_robin=True)
    assert run.flat_order()[0] != list(run.groups[0])
    root = maker.write(tmp_path / "ckpt", run)
    assert_tensors(merged(root, "--weights", "masters"), run.masters())
    maker.edit(root / model_file(), lambda content: content.update(ds_config={}))
    both_refuse(root, tmp_path / "out", "FS404", message="param_slice_mappings")
