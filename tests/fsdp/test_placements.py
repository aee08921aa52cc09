"""Which box a placement stands for, against what torch itself divides: without processes, by its fake process
group."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fastshard.sources.fsdp.placements import Unreadable, box
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], list[int], list[Any]]:
    """A shape, a mesh and a placement for each of its dimensions."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kinds = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    return shape, mesh, [draw(kinds) for _ in mesh]


def told(dims: list[Any]) -> list[dict[str, Any]]:
    return [{"kind": "replicate"} if d is None else {"kind": "shard", "dim": d} for d in dims]


def local(whole: torch.Tensor, mesh: list[int], dims: list[Any], at: tuple[int, ...]) -> torch.Tensor:
    """What is left of a tensor after each dimension of the mesh has divided it, by torch.chunk alone."""
    for d, dim in enumerate(dims):
        if dim is not None:
            chunks = list(torch.chunk(whole, mesh[d], dim)) if whole.shape[dim] else []
            empty = whole.narrow(dim, 0, 0)
            whole = (chunks + [empty] * mesh[d])[at[d]]
    return whole


@given(divided())
@settings(max_examples=200, deadline=None)
def test_boxes_are_what_chunks_are(case: tuple[list[int], list[int], list[Any]]) -> None:
    shape, mesh, dims = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for at in itertools.product(*map(range, mesh)):
        part = {"placements": told(dims), "order": None}
        lo, size = box(shape, {"shape": mesh, "coordinate": list(at)}, part) or ([], [])
        have = whole[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]
        want = local(whole, mesh, dims, at)
        assert have.shape == want.shape or have.numel() == want.numel() == 0
        assert torch.equal(have.flatten(), want.flatten())


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("rows", [37, 8, 5, 1, 0])
def test_a_strided_shard_divides_what_others_have_left(rows: int, tp: int) -> None:
    """FSDP2 over tensor parallelism: rows are divided over tp first, and what each has over dp; see the
    fixtures of real ranks."""
    whole, dp = torch.arange(rows), 3
    placements = [{"kind": "strided", "dim": 0, "split": tp}, {"kind": "shard", "dim": 0}]
    covered = []
    for d, t in itertools.product(range(dp), range(tp)):
        lo, size = box(
            [rows], {"shape": [dp, tp], "coordinate": [d, t]}, {"placements": placements, "order": None}
        ) or ([], [])
        have = whole[lo[0] : lo[0] + size[0]]
        assert have.tolist() == local(local(whole, [tp], [0], (t,)), [dp], [0], (d,)).tolist()
        covered += have.tolist()
    assert sorted(covered) == whole.tolist()


def test_an_order_that_is_told_counts() -> None:
    mesh = {"shape": [2, 3], "coordinate": [1, 2]}
    part = {"placements": told([0, 0]), "order": [[0, [1, 0]]]}
    assert box([12], mesh, part) == ([10], [2])
    assert box([12], mesh, {**part, "order": [[0, [0, 1]]]}) == ([10], [2])
    assert box([7], mesh, part) == ([7], [0])
    assert box([7], mesh, {**part, "order": [[0, [0, 1]]]}) == ([6], [1])
    assert box([7], {**mesh, "coordinate": [1, 0]}, part) == ([2], [1])
    assert box([7], {**mesh, "coordinate": [1, 0]}, {**part, "order": [[0, [0, 1]]]}) == ([4], [1])


def test_what_tells_no_box_is_refused() -> None:
    mesh = {"shape": [2, 2], "coordinate": [0, 0]}
    for placements, order in (
        ([{"kind": "shard", "dim": 0}, {"kind": "strided", "dim": 0, "split": 2}], None),
        ([{"kind": "strided", "dim": 0, "split": 3}, {"kind": "shard", "dim": 0}], None),
        ([{"kind": "partial"}, {"kind": "replicate"}], None),
        ([{"kind": "shard", "dim": 2}, {"kind": "replicate"}], None),
        (told([0, 1]), [[0, [1]], [1, [0]]]),
    ):
        with pytest.raises(Unreadable):
            box([4, 4], mesh, {"placements": placements, "order": order})
    assert box([4, 4], {**mesh, "coordinate": None}, {"placements": told([0, 1]), "order": None}) is None


def test_torch_divides_as_chunks_do() -> None:
    """The oracle above, against torch's own distribution of a DTensor on each of six ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = torch.arange(7 * 5).view(7, 5)
    for rank in range(6):
        torch.distributed.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 3))
            for dims in itertools.product((None, 0, 1), repeat=2):
                placements = [Replicate() if d is None else Shard(d) for d in dims]
                made = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                want = local(whole, [2, 3], list(dims), (rank // 3, rank % 3))
                assert made.flatten().tolist() == want.flatten().tolist(), (rank, dims)
        finally:
            torch.distributed.destroy_process_group()
