"""Optimizers of Megatron-LM: every form gives the masters and moments that were put into it, or says why
not."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from fastshard.sources.megatron.optim_flat import Part, in_buckets, in_vector, runs
from helpers import assert_refused, cli, edit_pt, read_result
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_optimizer_maker import Local, Run, buckets, laid_out, legacy, rank_folder, torch_dist, wanted

FORMS = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space")
#: A bucket that ends in a norm, so that padding lies between buckets.
PADDED = Run(tp=2, bucket=1560)


def same(out: Path, want: dict[str, torch.Tensor]) -> None:
    have = read_result(out)
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name


def check(root: Path, run: Run, out: Path, legacy_names: bool = False) -> None:
    """Weights, weights and moments, masters and moments."""
    for name, flags, kinds in (
        ("weights", (), {"optimizer": False}),
        ("all", ("--optimizer",), {}),
        ("masters", ("--optimizer", "--weights", "masters"), {"masters": True}),
    ):
        ran = cli("merge", root, out / name, *flags)
        assert ran.code == 0, ran.out
        same(out / name, wanted(run, legacy_names=legacy_names, **kinds))


RUNS = {
    "local": Run(tp=2),
    "te": Run(tp=2, spec="transformer_engine"),
    "te_dp3": Run(tp=1, dp=3, spec="transformer_engine", bucket=2000),
    "moe": Run(tp=2, dp=2, ep=2),
    "moe_grouped": Run(tp=1, dp=4, ep=2, spec="transformer_engine", grouped=True),
}


@pytest.mark.parametrize(("form", "name"), list(itertools.product(FORMS, RUNS)))
def test_torch_dist(form: str, name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    if form == "fully_reshardable" and run.bucket:
        run = Run(**{**vars(run), "bucket": None})
    check(torch_dist(tmp_path / "ckpt", run, form), run, tmp_path)


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_sharded_model_space"])
def test_padding_between_buckets_is_nothing(form: str, tmp_path: Path) -> None:
    check(torch_dist(tmp_path / "ckpt", PADDED, form), PADDED, tmp_path)


@pytest.mark.parametrize("name", ["local", "te", "te_dp3", "moe"])
@pytest.mark.parametrize("distributed", [True, False])
def test_rank_files(name: str, distributed: bool, tmp_path: Path) -> None:
    run = RUNS[name]
    check(legacy(tmp_path / "ckpt", run, distributed), run, tmp_path, legacy_names=True)


def test_rank_files_with_padding_between_buckets(tmp_path: Path) -> None:
    check(legacy(tmp_path / "ckpt", PADDED), PADDED, tmp_path, legacy_names=True)


def test_shifted_masters_stop_whoever_takes_them(tmp_path: Path) -> None:
    root = torch_dist(tmp_path / "ckpt", PADDED, "fully_reshardable")
    for flags in ((), ("--optimizer",), ("--weights", "masters"), ("--optimizer", "--weights", "params")):
        ran = cli("merge", root, tmp_path / "none", *flags)
        assert ran.code == 1, (flags, ran.out)
        assert ran.having("FS401", tensor="linear_fc2.weight")
        assert not (tmp_path / "none").exists()
    ran = cli("merge", root, tmp_path / "weights", "--weights", "params")
    assert ran.code == 0, ran.out
    assert ran.having("FS212", message="fully_reshardable")
    same(tmp_path / "weights", wanted(PADDED, optimizer=False))
    told = fastshard.master_weights(root)
    assert len(told.differing) == 7
    assert "--no-load-optim" in told.advice
    with pytest.raises(fastshard.FastshardError, match="FS514"):
        fastshard.repair_master_weights(root, tmp_path / "none")


def test_pickled_state_is_refused_by_name(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = torch_dist(tmp_path / "ckpt", run, "dp_zero_gather_scatter")
    ran = cli("merge", root, tmp_path / "weights")
    assert ran.code == 0, ran.out
    same(tmp_path / "weights", wanted(run, optimizer=False))
    for flags in (("merge", "--optimizer"), ("merge", "--weights", "masters")):
        assert_refused(
            root, tmp_path / "none", "FS514", exit=2, command=flags, message="dp_zero_gather_scatter"
        )


def _damaged(run: Run, **args: Any) -> Run:
    return Run(**{**vars(run), "args": args})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        # The order of the modules is the other one.
        (_damaged(Run(tp=2), transformer_impl="transformer_engine"), "is not at its expected place"),
        (_damaged(Run(tp=2), pipeline_model_parallel_layout="E|t|tL"), "pipeline_model_parallel_layout"),
        (_damaged(Run(tp=2), pipeline_model_parallel_size=2), "other model-parallel ranks"),
        (_damaged(RUNS["moe"], expert_tensor_parallel_size=1), "not divided among 1"),
    ],
    ids=["order", "layout", "stages", "experts"],
)
def test_buckets_whose_parameters_are_not_certain_are_refused(run: Run, message: str, tmp_path: Path) -> None:
    root = torch_dist(tmp_path / "ckpt", run, "dp_reshardable")
    ran = cli("merge", root, tmp_path / "weights")
    assert ran.code == 0, ran.out
    same(tmp_path / "weights", wanted(run, optimizer=False))
    assert_refused(
        root, tmp_path / "none", "FS402", exit=2, command=("merge", "--optimizer"), message=message
    )


def test_an_order_that_is_not_stated_is_found(tmp_path: Path) -> None:
    run = _damaged(RUNS["te"], transformer_impl=None)
    check(torch_dist(tmp_path / "ckpt", run, "dp_reshardable"), run, tmp_path)


def test_a_rank_that_is_gone_is_one_finding(tmp_path: Path) -> None:
    root = torch_dist(tmp_path / "ckpt", RUNS["local"], "dp_reshardable")
    (root / "iter_0000010/__1_0.distcp").unlink()
    ran = assert_refused(
        root, tmp_path / "none", "FS101", exit=3, command=("merge", "--optimizer"), file="__1_0.distcp"
    )
    assert len([f for f in ran.findings if f["severity"] == "error"]) == 1, ran.out


def test_buckets_of_another_step_are_found(tmp_path: Path) -> None:
    run = RUNS["local"]
    # Those of one tensor-parallel rank.
    others = {n: t for n, t in buckets(Run(**{**vars(run), "seed": 1})).items() if "dp_group_idx_1" in n}
    root = torch_dist(tmp_path / "ckpt", run, "dp_reshardable", **others)
    assert_refused(root, tmp_path / "none", "FS401", exit=1, command=("merge", "--optimizer"))
    assert cli("merge", root, tmp_path / "weights", "--weights", "params").code == 0
    same(tmp_path / "weights", wanted(run, optimizer=False))


def change(run: Run, root: Path, how: Callable[[Path], None], tp: int = 0, ep: int = 0) -> Path:
    how(root / "iter_0000010" / rank_folder(run, tp, ep))
    return root


def test_an_optimizer_file_that_is_gone_is_named(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = change(run, legacy(tmp_path / "ckpt", run), lambda f: (f / "distrib_optim.pt").unlink(), tp=1)
    for flags in (("merge",), ("merge", "--optimizer"), ("merge", "--weights", "masters")):
        assert_refused(
            root, tmp_path / "none", "FS101", exit=3, command=flags, file="mp_rank_01/distrib_optim.pt"
        )
    assert cli("merge", root, tmp_path / "weights", "--weights", "params").code == 0
    same(tmp_path / "weights", wanted(run, legacy_names=True, optimizer=False))


def test_optimizer_files_that_are_all_left_out_are_missed_by_nobody(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)
    for path in root.rglob("distrib_optim.pt"):
        path.unlink()
    ran = cli("merge", root, tmp_path / "weights")
    assert ran.code == 0, ran.out
    assert ran.having("FS108", message="distrib_optim.pt")
    assert_refused(root, tmp_path / "none", "FS402", exit=2, command=("merge", "--optimizer"))


def test_an_optimizer_file_of_another_step_is_found(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)
    other = legacy(tmp_path / "other", Run(**{**vars(run), "seed": 1}))
    shutil.copy(
        other / "iter_0000010/mp_rank_01/distrib_optim.pt", root / "iter_0000010/mp_rank_01/distrib_optim.pt"
    )
    for flags in (("merge",), ("merge", "--optimizer"), ("merge", "--optimizer", "--weights", "params")):
        assert_refused(
            root, tmp_path / "none", "FS401", exit=1, command=flags, file="mp_rank_01/distrib_optim.pt"
        )


def test_a_copied_optimizer_file_is_found(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)
    shutil.copy(
        root / "iter_0000010/mp_rank_00/distrib_optim.pt", root / "iter_0000010/mp_rank_01/distrib_optim.pt"
    )
    ran = cli("merge", root, tmp_path / "none", "--optimizer")
    assert ran.code != 0
    assert not (tmp_path / "none").exists()
    assert any(f["code"] in ("FS303", "FS401") and "mp_rank_01" in (f["file"] or "") for f in ran.findings), (
        ran.out
    )


def test_a_cut_optimizer_file_is_named(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)
    path = root / "iter_0000010/mp_rank_00/distrib_optim.pt"
    path.write_bytes(path.read_bytes()[:5000])
    ran = cli("merge", root, tmp_path / "none", "--optimizer")
    assert ran.code != 0
    assert any(
        "mp_rank_00/distrib_optim.pt" in (f["file"] or "") for f in ran.findings if f["severity"] == "error"
    )
    assert cli("merge", root, tmp_path / "weights", "--weights", "params").code == 0


@pytest.mark.parametrize("distributed", [True, False])
def test_steps_that_differ_are_told(distributed: bool, tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run, distributed)

    def later(content: dict[str, Any]) -> None:
        for group in content["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = 9.0

    edit_pt(root / "iter_0000010/mp_rank_01/model_optim_rng.pt", later)
    if not distributed:
        edit_pt(
            root / "iter_0000010/mp_rank_00/model_optim_rng.pt",
            lambda c: c["optimizer"]["optimizer"]["param_groups"][0].update(step=7.0),
        )
    assert_refused(
        root, tmp_path / "none", "FS107", exit=1, command=("merge", "--optimizer"), rank="tp 1", got="9.0"
    )


def test_a_frozen_parameter_makes_the_places_uncertain(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)

    def grown(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.0.mlp.adapter.weight"] = torch.randn(7, 3)

    edit_pt(root / "iter_0000010/mp_rank_00/model_optim_rng.pt", grown)
    ran = cli("merge", root, tmp_path / "none", "--optimizer")
    assert ran.code != 0
    assert ran.having("FS402", file="distrib_optim.pt", rank="tp 0")


def test_vectors_without_a_place_are_refused(tmp_path: Path) -> None:
    run = RUNS["local"]
    root = legacy(tmp_path / "ckpt", run)

    def shorter(content: dict[str, Any]) -> None:
        for vectors in content[0].values():
            for slot in ("param", "exp_avg", "exp_avg_sq"):
                vectors[slot] = vectors[slot][:-64].clone()

    edit_pt(root / "iter_0000010/mp_rank_00/distrib_optim.pt", shorter)
    ran = cli("merge", root, tmp_path / "weights")
    assert ran.code == 0, ran.out
    assert_refused(
        root, tmp_path / "none", "FS402", exit=2, command=("merge", "--optimizer"), file="distrib_optim.pt"
    )


NONSENSE: list[Any] = [None, -1, 1 << 70, "x", [], [[3]], {}, {"0": 1}, float("nan"), True]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_nonsense_is_never_a_wrong_value(value: Any, tmp_path: Path) -> None:
    """Where arguments or the optimizer's own values are nonsense, what is published is right, or nothing
    is."""
    run = RUNS["moe"]
    plain = legacy(tmp_path / "plain", run, distributed=False)
    files = legacy(tmp_path / "files", run)
    flat = torch_dist(tmp_path / "flat", run, "dp_reshardable")

    def argument(name: str) -> Callable[[Any], None]:
        return lambda content: setattr(content["args"], name, value)

    def own(*keys: Any) -> Callable[[Any], None]:
        def put(content: Any) -> None:
            for key in keys[:-1]:
                content = content[key]
            content[keys[-1]] = value

        return put

    model, beside = (
        "iter_0000010/mp_rank_00_000/model_optim_rng.pt",
        "iter_0000010/mp_rank_00_000/distrib_optim.pt",
    )
    names = (
        "transformer_impl",
        "virtual_pipeline_model_parallel_size",
        "decoder_first_pipeline_num_layers",
        "expert_model_parallel_size",
        "moe_grouped_gemm",
        "untie_embeddings_and_output_weights",
        "ddp_num_buckets",
        "pipeline_model_parallel_size",
        "overlap_grad_reduce",
    )
    changes: list[tuple[Path, str, Callable[[Any], None]]] = [
        (flat, "iter_0000010/common.pt", argument(name)) for name in names
    ]
    changes += [(files, model, argument(name)) for name in names[-4:]]
    changes += [(flat, "iter_0000010/common.pt", own("optimizer"))]
    changes += [
        (files, beside, own(0)),
        (files, beside, own(1, 0)),
        (files, beside, own(1, "buckets_coalesced")),
    ]
    changes += [(files, model, own("optimizer")), (plain, model, own("optimizer", 1))]
    held = ("optimizer", 0, "optimizer")
    changes += [
        (plain, model, own(*held, "param_groups")),
        (plain, model, own(*held, "state")),
        (plain, model, own(*held, "param_groups", 0, "params")),
        (plain, model, own(*held, "state", 0)),
        (plain, model, own(*held, "state", 0, "exp_avg")),
        (plain, model, own("optimizer", 0, "fp32_from_fp16_params")),
        (plain, model, own("optimizer", 0, "fp32_from_fp16_params", 0)),
    ]
    for number, (source, file, how) in enumerate(changes):
        root = tmp_path / str(number) / "ckpt"
        shutil.copytree(source, root)
        edit_pt(root / file, how)
        out = tmp_path / str(number) / "out"
        ran = cli("merge", root, out, "--optimizer")
        assert ran.code in (0, 1, 2, 3), (number, file, ran.out, ran.err)
        assert "Traceback" not in ran.out + ran.err, (number, file, ran.err)
        if ran.code == 0:
            same(out, wanted(run, legacy_names=source is not flat))
        else:
            assert not out.exists()


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.data())
def test_a_range_is_the_boxes_that_it_is_cut_into(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    first = data.draw(st.integers(0, whole.numel()))
    count = data.draw(st.integers(0, whole.numel() - first))
    flat = torch.full((count,), -1)
    for lo, size, begin in runs(shape, first, count):
        box = whole[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))].reshape(-1)
        assert (flat[begin : begin + len(box)] == -1).all()
        flat[begin : begin + len(box)] = box
    assert torch.equal(flat, whole.reshape(-1)[first : first + count])
    assert len(list(runs(shape, first, count))) <= 2 * len(shape)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 600)),
    st.integers(1, 5),
)
def test_places_are_those_of_the_buffers(sizes: list[int], bucket: int | None, dp: int) -> None:
    given_ones = [Local(str(n), "", [], "", {"": torch.empty(size)}) for n, size in enumerate(sizes)]
    buckets = laid_out(given_ones, dp, bucket)
    parts = [Part(str(n), [size], "bfloat16") for n, size in enumerate(sizes)]
    found = in_buckets(parts, [one["unpadded"] - one["begin"] for one in buckets])
    assert found is not None
    assert [[(p.name, a, b) for p, a, b in held] for held in found] == [
        [(p.name, a - one["begin"], b - one["begin"]) for p, a, b in one["held"]] for one in buckets
    ]
    before = 0
    want = []
    for one in buckets:
        want += [(p.name, a - one["begin"] + before, b - one["begin"] + before) for p, a, b in one["held"]]
        before += one["unpadded"] - one["begin"]
    places = in_vector(parts, bucket, before)
    assert places is not None
    assert [(p.name, a, b) for p, a, b in places] == want
