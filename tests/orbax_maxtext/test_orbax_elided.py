"""Chunks of zeros that Orbax before 0.10 leaves out, told from those that a process wrote elsewhere."""

from __future__ import annotations

import base64
import itertools
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fastshard.sources.orbax.completeness import AMBIGUOUS, COMPLETE, INCOMPLETE, Evidence, Verdict, judge
from fastshard.sources.orbax.metadata import Sharding, parse_shardings
from fastshard.sources.orbax.zarr_metadata import Array
from helpers import FIXTURES, assert_refused, cli, copy
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax_maker import describe, painted, write
from safetensors.numpy import load_file

ELIDED = FIXTURES / "orbax/mp2_shared_good_063_zarr3_elided_zeros"
BROKEN = FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3"
ITEMS = "checkpoints/4000/items"


def array(name: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Array:
    return Array(name, "F32", shape, chunk, chunk, 3, "/", 0.0, {})


#: Two by four devices, numbered without gaps, as GPUs and TPUs are.
IDS = tuple(range(8))


def sharded(*spec: str | None) -> Sharding:
    return Sharding((2, 4), ("data", "fsdp"), IDS, tuple((s,) if s else () for s in spec))


def judged(
    arrays: list[Array], keys: set[str], shardings: dict[str, Sharding], **evidence: object
) -> Verdict:
    told = Evidence(None, shardings, evidence.pop("present", {0}), **evidence)  # type: ignore[arg-type]
    return judge({a.name: a for a in arrays}, keys, told)


WEIGHT, ZERO = array("w", (8, 4), (2, 4)), array("zero", (8, 4), (2, 4))
ROWS = {f"w/c/{i}/0" for i in range(4)}
BOTH = {"w": sharded("fsdp"), "zero": sharded("fsdp")}


def test_zeros_of_devices_that_wrote_others_were_left_out() -> None:
    verdict = judged([WEIGHT, ZERO], ROWS, BOTH)
    assert verdict.verdict == COMPLETE and verdict.elided == {"zero": [(i, 0) for i in range(4)]}
    assert [f.severity for f in verdict.findings] == ["note"]
    # A replicated array, and one cut finer than it was divided.
    bias, fine = array("bias", (8,), (8,)), array("fine", (8, 4), (1, 4))
    shardings = BOTH | {"bias": sharded(), "fine": sharded("fsdp")}
    one_each = Sharding((8,), ("x",), IDS, (("x",),))
    assert judged([WEIGHT, ZERO, bias], ROWS, shardings).verdict == COMPLETE
    assert judged([WEIGHT, fine], ROWS, shardings).verdict == AMBIGUOUS
    more = {f"v/c/{i}/0" for i in range(8)}
    arrays = [WEIGHT, fine, array("v", (8, 4), (1, 4))]
    assert judged(arrays, ROWS | more, shardings | {"v": one_each}).verdict == COMPLETE


def test_a_device_of_which_nothing_is_here_is_named() -> None:
    keys = {f"w/c/{i}/0" for i in range(3)}
    verdict = judged([WEIGHT, ZERO], keys, BOTH)
    assert verdict.verdict == AMBIGUOUS
    (finding,) = verdict.findings
    assert finding.tensor == "w"
    assert finding.got == (
        "3 were probably zeros, because other chunks of the same writer are present; "
        "2 were probably lost, because all chunks that device 3 wrote are missing"
    )
    assert finding.help is not None and "device 3 wrote on the disks of the hosts" in finding.help


def test_plain_files_say_what_speaks_for_what() -> None:
    (finding,) = judged([WEIGHT, ZERO], ROWS, BOTH, present=set(), per_process=False).findings
    assert finding.code == "FS111" and finding.severity == "error"
    assert finding.got == "4 were probably zeros, because other chunks of the same writer are present"
    assert finding.help is not None and "the hosts that ran devices 0 to 3" in finding.help
    (finding,) = judged([WEIGHT, ZERO], ROWS, {}, present=set(), per_process=False).findings
    assert finding.got == "4 have no known writer"


def test_zeros_of_a_process_that_is_here_are_not_blamed_on_it() -> None:
    """Process 1 is missing: what process 0 left out is neither lost nor to be fetched."""
    two = Sharding((2,), ("x",), (0, 131072), (("x",), ()))
    weight, zero = array("w", (4, 4), (2, 4)), array("zero", (4, 4), (2, 4))
    alone = array("bias", (4,), (4,))
    shardings = {"w": two, "zero": two, "bias": Sharding((2,), ("x",), (0, 131072), ())}
    verdict = judged([weight, zero, alone], {"w/c/0/0"}, shardings)
    assert verdict.verdict == INCOMPLETE
    assert verdict.elided == {"zero": [(0, 0)], "bias": [(0,)]}
    assert verdict.gone == {"w": [(1, 0)], "zero": [(1, 0)]}
    assert {f.rank for f in verdict.findings} == {"process 1"}
    assert all("process 0" not in (f.help or "") for f in verdict.findings)
    assert "2 more were left out by processes that are present" in verdict.findings[-1].message


def test_an_array_of_one_device_was_saved_by_one_process() -> None:
    entry = {"sharding_type": "SingleDeviceSharding", "device_str": "cuda:0"}
    text = json.dumps({base64.b64encode(b"w").decode(): json.dumps(entry)})
    shardings = parse_shardings(text)
    assert judged([WEIGHT, ZERO], ROWS, shardings).verdict == COMPLETE
    assert judged([WEIGHT, ZERO], ROWS, {}).verdict == AMBIGUOUS
    # A second directory contradicts it.
    assert judged([WEIGHT], set(), shardings, present=set()).verdict == INCOMPLETE


def test_what_is_no_array_of_jax_is_written_with_its_metadata() -> None:
    step = array("step", (), ())
    assert judged([WEIGHT, step], ROWS, BOTH, by_primary={"step"}).verdict == COMPLETE
    assert judged([WEIGHT, step], ROWS, BOTH, by_primary={"step"}, committed=False).verdict == AMBIGUOUS


def test_own_replicas_of_one_process_do_not_vouch_for_another() -> None:
    """``primary_host=None``: each process writes what it holds. The second, alone: its replicas of ``b`` are
    not those of the first one's devices, though they are what the first would have written."""
    mesh = Sharding((2, 2), ("a", "b"), (0, 1, 2, 3), (("a",),))
    a, b = array("a", (2,), (1,)), array("b", (2,), (1,))
    shardings = {"a": mesh, "b": Sharding(mesh.mesh, mesh.axes, mesh.ids, (("b",),))}
    assert judged([a, b], {"a/c/1", "b/c/0", "b/c/1"}, shardings, present={1}).verdict == AMBIGUOUS


@dataclass
class Save:
    """What processes wrote of some arrays, worked out device by device."""

    arrays: dict[str, Array]
    shardings: dict[str, Sharding]
    #: Keys that each process wrote, and those that hold zeros.
    wrote: list[set[str]]
    zeros: set[str]


@st.composite
def saves(draw: st.DrawFn) -> Save:
    mesh = draw(st.sampled_from([(2,), (4,), (2, 2), (4, 2), (2, 4)]))
    axes = ("a", "b")[: len(mesh)]
    n = math.prod(mesh)
    per = draw(st.sampled_from([p for p in (1, 2, 4, 8) if n % p == 0]))
    gaps = draw(st.booleans())
    order = draw(st.permutations(range(n))) if draw(st.booleans()) else range(n)
    ids = [d // per * 2048 + d % per if gaps else d for d in order]
    process = [d // per for d in order]
    own = draw(st.booleans())
    save = Save({}, {}, [set() for _ in range(n // per)], set())
    for number in range(draw(st.integers(1, 4))):
        spec = draw(st.permutations([(), *((a,) for a in axes)]))[: draw(st.integers(0, 2))]
        parts = [math.prod(mesh[axes.index(x)] for x in s) for s in spec]
        name = f"w{number}"
        save.arrays[name] = array(name, tuple(2 * p for p in parts), (2,) * len(parts))
        save.shardings[name] = Sharding(mesh, axes, tuple(ids), tuple(spec))
        written: set[str] = set()
        for at, place in enumerate(itertools.product(*map(range, mesh))):
            index = [place[axes.index(s[0])] if s else 0 for s in spec]
            key = f"{name}/{'/'.join(['c', *map(str, index)])}"
            first = key not in written
            written.add(key)
            if first and draw(st.integers(0, 2)) == 0:
                save.zeros.add(key)
            if key not in save.zeros and (own or first):
                save.wrote[process[at]].add(key)
    return save


@settings(max_examples=400, deadline=None)
@given(save=saves(), data=st.data())
def test_nothing_that_was_written_is_taken_for_zeros(save: Save, data: st.DataObject) -> None:
    here = data.draw(st.sets(st.integers(0, len(save.wrote) - 1), min_size=1))
    keys = set().union(*(save.wrote[p] for p in here))
    lost = set().union(*save.wrote) - keys
    present = {p for p in here if save.wrote[p]}
    verdict = judge(save.arrays, keys, Evidence(None, save.shardings, present))
    left_out = {f"{n}/{save.arrays[n].key(i)}" for n, of in verdict.elided.items() for i in of}
    assert not left_out & lost
    assert not (verdict.verdict == COMPLETE and lost)
    if verdict.verdict == INCOMPLETE:
        assert len(here) < len(save.wrote) or present != here


def stored(root: Path, **options: object) -> dict[str, np.ndarray]:
    """A save of four devices of one process: weights, zeros, half of both, a bias of zeros, numpy's and a
    number."""
    weight, half = painted(8, 4), painted(8, 4)
    half[:4] = 0
    tree = {
        "w": weight,
        "half": half,
        "zero": np.zeros((8, 4), np.float32),
        "bias": np.zeros(4, np.float32),
        "step": np.zeros((), np.int32),
        "table": np.zeros(5, np.float64),
    }
    shardings = {}
    for name, values in tree.items():
        divided = name in ("w", "half", "zero")
        chunk = [2, 4] if divided else list(values.shape)
        write(root, name, values, chunk, zarr=3, elide=True, **options)  # type: ignore[arg-type]
        if name == "table":
            continue
        described = {
            "sharding_type": "NamedSharding",
            "shape": [4],
            "axis_names": ["x"],
            "partition_spec": ["x"] if divided else [],
            "device_mesh": {"mesh": [{"id": i} for i in range(4)]},
        }
        shardings[base64.b64encode(name.encode()).decode()] = json.dumps(described)
    describe(root, list(tree), stores_fill=None, zarr3=True)
    document = json.loads((root / "_METADATA").read_text())
    document["tree_metadata"]["('table',)"]["value_metadata"]["value_type"] = "np.ndarray"
    (root / "_METADATA").write_text(json.dumps(document))
    (root / "_sharding").write_text(json.dumps(shardings))
    return tree


def test_a_save_of_one_process_with_zeros_is_whole(tmp_path: Path) -> None:
    tree = stored(tmp_path / "3/items", ocdbt=True)
    ran = cli("merge", tmp_path / "3/items", tmp_path / "out")
    assert ran.code == 0, ran.findings
    have = load_file(tmp_path / "out/model.safetensors")
    assert {n: a.tobytes() for n, a in have.items()} == {n: a.tobytes() for n, a in tree.items()}


def test_plain_files_with_zeros_are_accepted_by_the_user_alone(tmp_path: Path) -> None:
    tree = stored(tmp_path / "3/items")
    ran = assert_refused(tmp_path / "3/items", tmp_path / "out", "FS111", exit=3)
    assert "9 were probably zeros" in ran.errors[0]["got"]
    assert cli("merge", tmp_path / "3/items", tmp_path / "out", "--accept", "elided-zeros").code == 0
    have = load_file(tmp_path / "out/model.safetensors")
    assert {n: a.tobytes() for n, a in have.items()} == {n: a.tobytes() for n, a in tree.items()}


def renumbered(root: Path) -> Path:
    """Device ids as GPUs and TPUs have them."""
    file = next(root.rglob("_sharding"))
    file.write_text(file.read_text().replace("131072", "1"))
    return root


@pytest.mark.skipif(not ELIDED.is_dir(), reason="no fixtures")
def test_what_orbax_saved_is_told_by_devices(tmp_path: Path) -> None:
    root = renumbered(copy(ELIDED, tmp_path / "good"))
    assert cli("merge", root, tmp_path / "out").code == 0
    # The other process' data is gone: its index, which is merged, says so.
    shutil.rmtree(root / ITEMS / "ocdbt.process_1")
    assert_refused(root, tmp_path / "out1", "FS111", exit=3)
    # Never merged: nothing names what the other host holds, and which devices are its own.
    node = renumbered(copy(BROKEN / "node0", tmp_path / "node0"))
    ran = assert_refused(node, tmp_path / "out2", "FS111", exit=3)
    assert "8 were probably lost, because all chunks that device 1 wrote are missing" in ran.errors[0]["got"]
    assert cli("merge", node, BROKEN / "node1", tmp_path / "out3").code == 0
