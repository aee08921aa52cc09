"""Hosts that wrote to disks of their own: what each left, put together in any order."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from helpers import FIXTURES, assert_refused, at_once, cli, read_result
from orbax_maker import describe, painted, write

#: Name -> shape and chunk; the first axis is divided over the hosts.
ARRAYS = {
    "params.params.a.kernel": ((12, 6), (3, 6)),
    "params.params.b.kernel": ((24,), (2,)),
    "params.params.norm.scale": ((5,), (5,)),
    "step": ((), ()),
}
FORMS = ["zarr2", "zarr3", "ocdbt"]
CHUNK = re.compile(r"(?:c/)?\d+(?:[./]\d+)*$|c$")


def values() -> dict[str, np.ndarray]:
    return {name: painted(*shape) for name, (shape, _) in ARRAYS.items()}


def live(hosts: int, form: str, root: Path, committed: bool) -> list[Path]:
    """Saves the arrays as `hosts` processes do that share nothing; the first describes them."""
    whole = root / "whole"
    zarr = 3 if form == "zarr3" else 2
    for name, array in values().items():
        write(whole, name, array, list(ARRAYS[name][1]), zarr=zarr)
    made = []
    for host in range(hosts):
        first = host == 0
        mark = "" if first and committed else ".orbax-checkpoint-tmp-0"
        item = root / f"node{host}" / "checkpoints" / f"40{mark}" / f"items{mark}"
        made.append(root / f"node{host}")
        for name, array in values().items():
            if form == "ocdbt":
                share(item / f"ocdbt.process_{host}", name, array, host, hosts)
                continue
            files = sorted(f for f in (whole / name).rglob("*") if f.is_file())
            chunks = [f for f in files if CHUNK.match(f.relative_to(whole / name).as_posix())]
            described = [f for f in files if f not in chunks]
            for file in described * first + [c for i, c in enumerate(chunks) if i % hosts == host]:
                to = item / name / file.relative_to(whole / name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)
        if first:
            describe(item, list(ARRAYS), zarr3=zarr == 3)
    if form == "ocdbt" and committed:
        merge_own(made[0] / "checkpoints" / "40" / "items", "ocdbt.process_0")
    shutil.rmtree(whole)
    return made


def share(folder: Path, name: str, array: np.ndarray, host: int, hosts: int) -> None:
    """What one process writes of an array to its own key-value store."""
    import tensorstore as ts

    shape, chunk = ARRAYS[name]
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"},
        "metadata": {"shape": list(shape), "chunks": list(chunk), "fill_value": None, "dtype": "<f4"},
        "store_data_equal_to_fill_value": True,
    }
    parts = list(itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))))
    mine = [lo for i, lo in enumerate(parts) if i % hosts == host]
    if not mine:
        return
    store = ts.open(spec, create=True, open=True).result()
    for lo in mine:
        box = tuple(slice(a, a + c) for a, c in zip(lo, chunk, strict=True))
        store[box].write(array[box]).result()


def merge_own(item: Path, process: str) -> None:
    """As the first process does at the end: all process directories that it can see into one store."""
    import tensorstore as ts

    context = ts.Context()

    def store(path: Path) -> ts.KvStore:
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
        return ts.KvStore.open(spec, context=context).result()

    with ts.Transaction(atomic=True) as transaction:
        child, parent = store(item / process), store(item).with_transaction(transaction)
        child.experimental_copy_range_to(parent).result()


def merged(out: Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in read_result(out).items()}


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hosts", at_once([2, 3, 4], [2, 3]))
def test_hosts_in_any_order_give_what_was_live(
    hosts: int, form: str, committed: bool, tmp_path: Path
) -> None:
    nodes = live(hosts, form, tmp_path, committed)
    accept = () if committed else ("--accept", "uncommitted")
    for number, order in enumerate(itertools.permutations(nodes)):
        out = tmp_path / f"out{number}"
        ran = cli("merge", *order, out, *accept)
        assert ran.code == 0, ran.findings
        # One of another run with the same arrays, and no chunk in common, could not be told.
        assert f"chunks of {hosts} directories" in ran.not_checked
        got = merged(out)
        assert got.keys() == values().keys()
        for name, want in values().items():
            assert got[name].tobytes() == want.tobytes(), (name, order)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_host_that_is_not_given_is_missed(form: str, committed: bool, tmp_path: Path) -> None:
    nodes = live(3, form, tmp_path, committed)
    accept = [] if committed else ["--accept", "uncommitted"]
    for lacking in range(1, 3):
        given = [node for i, node in enumerate(nodes) if i != lacking]
        for order in itertools.permutations(given):
            assert_refused(list(order), tmp_path / "out", "FS111", exit=3, options=accept)
    # One twice is one.
    again = tmp_path / "again"
    shutil.copytree(nodes[1], again)
    for given in ([nodes[0], nodes[1], again], [nodes[0], nodes[1], nodes[1]], [nodes[0], nodes[0]]):
        assert_refused(given, tmp_path / "out", "FS111", exit=3, options=accept)


@pytest.mark.parametrize("form", FORMS[:2])
def test_hosts_without_the_first_are_refused_by_name(form: str, tmp_path: Path) -> None:
    nodes = live(3, form, tmp_path, committed=True)
    for given in (nodes[1:], nodes[1:2]):
        ran = assert_refused(given, tmp_path / "out", "FS104", exit=3)
        assert "process 0" in ran.having("FS104")[0]["help"]


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_host_of_another_step_or_grid_is_refused(form: str, tmp_path: Path) -> None:
    nodes = live(2, form, tmp_path / "one", committed=True)
    steps = nodes[1] / "checkpoints"
    (steps / "40.orbax-checkpoint-tmp-0").rename(steps / "41.orbax-checkpoint-tmp-0")
    assert_refused(nodes, tmp_path / "out", "FS107", exit=1)
    nodes = live(2, form, tmp_path / "two", committed=True)
    array = (
        nodes[1] / "checkpoints/40.orbax-checkpoint-tmp-0/items.orbax-checkpoint-tmp-0/params.params.b.kernel"
    )
    chunk = next(f for f in sorted(array.rglob("*")) if f.is_file())
    chunk.rename(chunk.with_name("999"))
    assert_refused(nodes, tmp_path / "out", "FS107", exit=1)


def test_chunks_of_arrays_that_nobody_describes_are_named(tmp_path: Path) -> None:
    nodes = live(2, "zarr2", tmp_path, committed=True)
    item = nodes[1] / "checkpoints/40.orbax-checkpoint-tmp-0/items.orbax-checkpoint-tmp-0"
    shutil.copytree(item / "params.params.a.kernel", item / "params.params.other.kernel")
    assert_refused(nodes, tmp_path / "out", "FS101", exit=3, tensor="params.params.other.kernel")


@pytest.mark.parametrize("ids", [("0", "1"), ("host", "a1b2")])
@pytest.mark.parametrize("merge", [True, False])
def test_stores_of_replicated_arrays_belong_to_the_item(
    merge: bool, ids: tuple[str, str], tmp_path: Path
) -> None:
    """``enable_replica_parallel_separate_folder``, and ids that a run gave its processes itself."""
    item = tmp_path / "ckpt" / "40" / "items"
    replicated = ("params.params.norm.scale", "step")
    for name, array in values().items():
        for host, process in enumerate(ids):
            store = f"ocdbt.process_{'replica_' if name in replicated else ''}{process}"
            share(item / store, name, array, host, 2)
    describe(item, list(ARRAYS))
    if merge:
        for store in sorted(p.name for p in item.glob("ocdbt.*")):
            merge_own(item, store)
    out = tmp_path / "out"
    ran = cli("merge", tmp_path / "ckpt", out, *(() if merge else ("--accept", "uncommitted")))
    assert ran.code == 0, ran.findings
    got = merged(out)
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in values().items()}
    # One of the stores gone: missed, whichever it is, unless the merged one holds its (small) values itself.
    for number, store in enumerate(sorted(p.name for p in item.glob("ocdbt.*"))):
        aside = (item / store).rename(tmp_path / "aside")
        ran = cli("merge", tmp_path / "ckpt", tmp_path / f"out{number}", "--accept", "uncommitted")
        if merge and ran.code == 0:
            assert {n: a.tobytes() for n, a in merged(tmp_path / f"out{number}").items()} == {
                n: a.tobytes() for n, a in values().items()
            }
        else:
            assert ran.code in (1, 3), (store, ran.findings)
            assert not (tmp_path / f"out{number}").exists()
        aside.rename(item / store)


def test_arrays_inside_of_an_item_are_not_chosen_between(tmp_path: Path) -> None:
    (live_item,) = live(1, "zarr2", tmp_path, committed=True)
    inner = live_item / "checkpoints/40/items/left"
    write(inner, "params.params.a.kernel", painted(12, 6), [3, 6])
    assert_refused(live_item, tmp_path / "out", "FS106", exit=2)


def test_a_chunk_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "orbax/paxml_gpt3_micro_weights", source)
    chunk = max((p for p in source.rglob("*") if p.name[0].isdigit()), key=lambda p: p.stat().st_size)
    from fastshard.conversion import convert as module

    def changed(*arguments: Any, prepared: Any = module.prepared) -> Any:
        job = prepared(*arguments)
        os.utime(chunk)
        return job

    monkeypatch.setattr(module, "prepared", changed)
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 1 and ran.errors[0]["code"] == "FS506" and chunk.name in ran.errors[0]["file"], ran.out
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def stores(root: Path) -> dict[int, Path]:
    """Stores of processes by number."""
    return {int(path.name[-1]): path for path in sorted(root.rglob("ocdbt.process_*")) if path.is_dir()}


def rewritten(store: Path, to: Path) -> None:
    """The same keys and values as another writer would have written them, with names and a manifest of their
    own."""

    def opened(path: Path) -> Any:
        base = {"driver": "file", "path": f"{path}/"}
        return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()

    shutil.rmtree(to)
    source, made = opened(store), opened(to)
    for key in source.list().result():
        made.write(key, source.read(key).result().value).result()


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_store_of_a_process_that_is_a_copy_of_anothers(hosts: int, tmp_path: Path) -> None:
    for number, (source, lost) in enumerate(itertools.permutations(range(hosts), 2)):
        root = tmp_path / str(number)
        nodes = live(hosts, "ocdbt", root, committed=False)
        at = stores(root)
        shutil.rmtree(at[lost])
        shutil.copytree(at[source], at[lost])
        ran = cli("merge", *nodes, root / "out", "--accept", "uncommitted")
        assert ran.code == 1 and not (root / "out").exists(), ran.out
        (told,) = ran.having("FS303")
        assert {f"process {n}" in told["message"] for n in (source, lost)} == {True}, told


SEVERAL = [
    "mp2_local_BROKEN_0128_zarr3_primarynone",
    "mp2_local_BROKEN_063_zarr3",
    "mp2_shared_good_063_zarr3_elided_zeros",
]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("how", ["copied", "rewritten"])
def test_a_process_whose_chunks_are_in_no_store_is_not_there(name: str, how: str, tmp_path: Path) -> None:
    """Its folder is, with what another one has written."""
    for number, (source, lost) in enumerate([(0, 1), (1, 0)]):
        root = shutil.copytree(FIXTURES / "orbax" / name, tmp_path / str(number))
        nodes = sorted(path for path in root.iterdir() if path.name.startswith("node")) or [root]
        good = cli("merge", *nodes, tmp_path / f"good{number}")
        assert good.code == 0, good.out
        at = stores(root)
        if how == "copied":
            shutil.rmtree(at[lost])
            shutil.copytree(at[source], at[lost])
        else:
            rewritten(at[source], at[lost])
        ran = cli("merge", *nodes, tmp_path / f"out{number}")
        assert ran.code == (1 if how == "copied" else 3), ran.out
        assert not (tmp_path / f"out{number}").exists()
        assert ran.having("FS111", severity="error") and bool(ran.having("FS303")) == (how == "copied")


def test_stores_that_were_renamed_into_each_other_lose_nothing(tmp_path: Path) -> None:
    nodes = live(2, "ocdbt", tmp_path, committed=False)
    at = stores(tmp_path)
    for number, path in at.items():
        path.rename(path.with_name(f"ocdbt.process_{1 - number}"))
    ran = cli("merge", *nodes, tmp_path / "out", "--accept", "uncommitted")
    assert ran.code == 0, ran.out
    made = read_result(tmp_path / "out")
    assert all(np.array_equal(made[name].numpy(), array) for name, array in values().items())
