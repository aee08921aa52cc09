"""The verdict over chunks, against a naive oracle; and where the arrays of a checkpoint are looked for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from fastshard.common.listing import list_roots
from fastshard.errors import FastshardError
from fastshard.sources.base import Options
from fastshard.sources.orbax.completeness import AMBIGUOUS, COMPLETE, INCOMPLETE, Evidence, judge
from fastshard.sources.orbax.find_items import choose, find
from fastshard.sources.orbax.metadata import Sharding, processes_of
from fastshard.sources.orbax.zarr_metadata import Array
from hypothesis import given, settings
from hypothesis import strategies as st


def array(name: str, shape: tuple[int, ...], chunk: tuple[int, ...], fill: object, zarr: int) -> Array:
    return Array(name, "F32", shape, chunk, chunk, zarr, "." if zarr == 2 else "/", fill, {})


@st.composite
def stores(draw: st.DrawFn) -> tuple[dict[str, Array], set[str]]:
    arrays, keys = {}, set()
    for number in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, 3))
        shape = tuple(draw(st.integers(0, 5)) for _ in range(rank))
        chunk = tuple(draw(st.integers(1, 6)) for _ in range(rank))
        zarr = draw(st.sampled_from([2, 3]))
        one = array(f"a{number}", shape, chunk, draw(st.sampled_from([None, 0.0])), zarr)
        arrays[one.name] = one
        for index in itertools.product(*(range(math.ceil(n / c)) for n, c in zip(shape, chunk, strict=True))):
            if draw(st.booleans()) or draw(st.booleans()):
                text = ".".join(map(str, index)) or "0" if zarr == 2 else "/".join(["c", *map(str, index)])
                keys.add(f"{one.name}/{text}")
    return arrays, keys


def elements(one: Array, keys: set[str]) -> int:
    """Elements whose chunk is there, one by one."""
    held = 0
    for at in itertools.product(*map(range, one.shape)):
        index = [i // c for i, c in zip(at, one.chunk, strict=True)]
        text = ".".join(map(str, index)) or "0" if one.zarr == 2 else "/".join(["c", *map(str, index)])
        held += f"{one.name}/{text}" in keys
    return held


@settings(max_examples=150, deadline=None)
@given(
    store=stores(),
    stores_fill=st.sampled_from([None, False, True]),
    present=st.sets(st.integers(0, 3)),
    expected=st.sampled_from([None, 1, 2, 4]),
    per_process=st.booleans(),
)
def test_the_verdict_is_that_of_an_oracle(
    store: tuple[dict[str, Array], set[str]],
    stores_fill: bool | None,
    present: set[int],
    expected: int | None,
    per_process: bool,
) -> None:
    arrays, keys = store
    verdict = judge(
        arrays, keys, Evidence(stores_fill, {}, present, per_process=per_process, expected=expected)
    )
    lost = {name: math.prod(a.shape) - elements(a, keys) for name, a in arrays.items()}
    assert verdict.lost == sum(lost.values())
    assert set(verdict.missing) == {name for name, n in lost.items() if n}
    if not verdict.lost:
        want = COMPLETE
    elif stores_fill or any(lost[n] and a.fill is None for n, a in arrays.items()):
        want = INCOMPLETE
    elif not per_process or expected is None:
        want = AMBIGUOUS
    else:
        want = COMPLETE if present == set(range(max(expected, len(present)))) else INCOMPLETE
    assert verdict.verdict == want
    errors = [f for f in verdict.findings if f.severity == "error"]
    assert bool(errors) == (want != COMPLETE)
    assert len(verdict.findings) <= 22


def test_findings_are_bounded() -> None:
    arrays = {f"a{n}": array(f"a{n}", (40,), (1,), None, 2) for n in range(50)}
    verdict = judge(arrays, set(), Evidence(None, {}, set()))
    assert len(verdict.findings) == 22
    assert verdict.findings[0].message.endswith("0, 1, 2, 3, 4, 5, 6, 7 and 32 more")
    assert verdict.findings[20].message == "and 30 more arrays"


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ({0, 1, 2, 3}, None),
        (set(), None),
        ({0, 131072}, {0: 0, 131072: 1}),
        ({0, 1, 2048, 2049, 4096}, {0: 0, 1: 0, 2048: 1, 2049: 1, 4096: 2}),
    ],
)
def test_processes_follow_from_gaps_in_device_ids(ids: set[int], want: dict[int, int] | None) -> None:
    assert processes_of(ids) == want


def test_the_owner_of_a_chunk_is_named_where_sharding_and_grid_agree() -> None:
    one = array("w", (4, 4), (2, 4), 0.0, 3)
    sharding = Sharding((2,), ("x",), (0, 2048), (("x",), ()))
    lost = judge({"w": one}, {"w/c/0/0"}, Evidence(None, {"w": sharding}, {0}))
    assert lost.verdict == INCOMPLETE and lost.findings[0].rank == "process 1"
    # Stored in another grid than it was divided: nothing tells whose the chunk was but the absent directory.
    other = array("w", (4, 4), (1, 4), 0.0, 3)
    lost = judge({"w": other}, {f"w/c/{n}/0" for n in range(3)}, Evidence(None, {"w": sharding}, {0}))
    assert lost.findings[0].rank == "process 1"


def touch(root: Path, *files: str) -> Path:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return root


def chosen(root: Path, step: str | None = None) -> list[tuple[str | None, str, bool]]:
    listing = list_roots([root])
    return [(p.step, p.item, p.committed) for p in choose(listing, find(listing), Options(step=step))[0]]


@pytest.mark.parametrize(
    ("files", "step", "want"),
    [
        (["4000/items/manifest.ocdbt"], None, ("4000", "items", True)),
        (
            ["checkpoints/4000/items/_METADATA", "checkpoints/4000/items/w/.zarray"],
            None,
            ("4000", "items", True),
        ),
        (["checkpoint_00004000/w/.zarray"], None, ("checkpoint_00004000", "", True)),
        (["checkpoint_00004000/state/w/.zarray"], "4000", ("checkpoint_00004000", "state", True)),
        (["9/items/manifest.ocdbt", "10/items/manifest.ocdbt"], None, ("10", "items", True)),
        (["9/items/manifest.ocdbt", "10/items/manifest.ocdbt"], "9", ("9", "items", True)),
        (
            ["9/items/manifest.ocdbt", "10.orbax-checkpoint-tmp-3/items/manifest.ocdbt"],
            None,
            ("9", "items", True),
        ),
        (["9.orbax-checkpoint-tmp/items/ocdbt.process_0/manifest.ocdbt"], None, ("9", "items", False)),
        (["9/items/ocdbt.process_0/manifest.ocdbt"], None, ("9", "items", False)),
        (
            ["9/state/manifest.ocdbt", "9/state.orbax-checkpoint-tmp-1/manifest.ocdbt"],
            None,
            ("9", "state", True),
        ),
        (["checkpoint_7.tmp_2/state/w/.zarray"], None, ("checkpoint_7", "state", False)),
        (["run_step_7/default/manifest.ocdbt"], None, ("run_step_7", "default", True)),
        (["manifest.ocdbt"], None, (None, "ckpt", True)),
    ],
)
def test_a_step_and_its_item_are_found(
    files: list[str], step: str | None, want: tuple[str | None, str, bool], tmp_path: Path
) -> None:
    assert chosen(touch(tmp_path / "ckpt", *files), step) == [want]


@pytest.mark.parametrize(
    ("files", "step", "code"),
    [
        (["9/a/manifest.ocdbt", "9/b/manifest.ocdbt"], None, "FS106"),
        (["9/a/manifest.ocdbt", "checkpoint_9/a/manifest.ocdbt"], None, "FS106"),
        # A save that is tried again may still be committed.
        (
            ["9/a.orbax-checkpoint-tmp-1/manifest.ocdbt", "9/a.orbax-checkpoint-tmp-2/manifest.ocdbt"],
            None,
            "FS104",
        ),
        (["9/a/manifest.ocdbt"], "8", "FS501"),
    ],
)
def test_what_is_not_one_checkpoint_is_refused(
    files: list[str], step: str | None, code: str, tmp_path: Path
) -> None:
    with pytest.raises(FastshardError) as refused:
        chosen(touch(tmp_path / "ckpt", *files), step)
    assert refused.value.code == code
