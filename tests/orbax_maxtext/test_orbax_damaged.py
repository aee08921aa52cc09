"""Damaged checkpoints of Orbax and Paxml, and what is given in other ways than as one committed directory."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from helpers import FIXTURES, assert_refused, cli, copy, flip_bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax_maker import describe, painted, write
from test_orbax_fixtures import merged, wanted

ORBAX = FIXTURES / "orbax"
BROKEN = ORBAX / "mp2_local_BROKEN_063_zarr3"
BOTH = ORBAX / "mp2_local_BROKEN_0128_zarr3_primarynone"
ELIDED = ORBAX / "mp2_shared_good_063_zarr3_elided_zeros"
PAXML = ORBAX / "paxml_gpt3_micro_weights"
ITEMS = "checkpoints/4000/items"
STATE = "checkpoints/checkpoint_00004000/state"
QKV = "mdl_vars.params.lm.transformer.repeat.sub.x_layers_0.self_attention.combined_qkv.w"


def test_a_chunk_that_is_gone_is_named(tmp_path: Path) -> None:
    root = copy(PAXML, tmp_path / "ckpt")
    victim = sorted(p for p in (root / STATE / QKV).iterdir() if p.name != ".zarray")[1]
    victim.unlink()
    ran = assert_refused(
        root, tmp_path / "out", "FS111", exit=3, tensor=QKV, message=f"missing: {victim.name}"
    )
    assert "25 % of them lost" in ran.having("FS111", tensor=QKV)[0]["got"]


def test_metadata_that_is_gone_is_named(tmp_path: Path) -> None:
    root = copy(PAXML, tmp_path / "ckpt")
    (root / STATE / QKV / ".zarray").unlink()
    assert_refused(root, tmp_path / "out", "FS101", exit=3, tensor=QKV)


def test_a_chunk_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    root = copy(PAXML, tmp_path / "ckpt")
    victim = sorted(p for p in (root / STATE / QKV).iterdir() if p.name != ".zarray")[1]
    victim.write_bytes(victim.read_bytes()[:-40])
    assert_refused(root, tmp_path / "out", "FS601", tensor=QKV, message=f"chunk {victim.name}: ")


@pytest.mark.parametrize(
    ("chunk", "code", "exit"), [(1 << 31, "FS512", 2), (1 << 53, "FS512", 2), (1 << 61, "FS601", 1)]
)
def test_a_chunk_larger_than_memory_is_not_decoded(chunk: int, code: str, exit: int, tmp_path: Path) -> None:
    """Chunks may reach beyond their array, and are decoded whole: the library that does it ends the process
    otherwise."""
    root = tmp_path / "items"
    write(root, "w", painted(4), [4])
    metadata = root / "w/.zarray"
    described = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(described | {"chunks": [chunk]}))
    assert_refused(root, tmp_path / "out", code, exit=exit)


def test_an_array_that_the_tree_names_is_missed(tmp_path: Path) -> None:
    root = tmp_path / "items"
    write(root, "w", painted(4), [2])
    describe(root, ["w", "gone"])
    assert_refused(root, tmp_path / "out", "FS102", exit=3, tensor="gone")


def test_left_out_zeros_are_zeros_where_all_processes_are_here(tmp_path: Path) -> None:
    ran = cli("merge", ELIDED, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(ELIDED)
    (note,) = ran.having("FS111")
    assert note["severity"] == "note" and "10 of 25 chunks" in note["message"]


def test_left_out_zeros_are_lost_where_a_process_is_not_here(tmp_path: Path) -> None:
    root = copy(ELIDED, tmp_path / "ckpt")
    shutil.rmtree(root / ITEMS / "ocdbt.process_1")
    assert_refused(root, tmp_path / "out", "FS111", exit=3, rank="process 1")


def test_left_out_zeros_are_ambiguous_where_nothing_tells(tmp_path: Path) -> None:
    root = copy(ELIDED, tmp_path / "ckpt")
    (root / ITEMS / "_sharding").unlink()
    refused = assert_refused(root, tmp_path / "out", "FS111", exit=3, message="nothing shows whether")
    assert "--expect-processes" in refused.errors[0]["help"]
    assert_refused(
        root, tmp_path / "out", "FS111", exit=3, options=("--expect-processes", 3), rank="process 2"
    )
    for number, options in enumerate((("--expect-processes", 2), ("--accept", "elided-zeros"))):
        ran = cli("merge", root, tmp_path / f"out{number}", *options)
        assert ran.code == 0, ran.out
        assert merged(tmp_path / f"out{number}") == wanted(ELIDED)


def test_a_process_directory_copied_beside_a_merged_store_is_read(tmp_path: Path) -> None:
    root = copy(BROKEN / "node0", tmp_path / "ckpt")
    (other,) = (BROKEN / "node1").rglob("ocdbt.process_1")
    copy(other, root / ITEMS / "ocdbt.process_1")
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(BROKEN)
    assert ran.having("FS111", message="8 keys are only in the directories of processes")


@pytest.mark.parametrize("depth", ["", "checkpoints", "checkpoints/4000", ITEMS])
def test_hosts_are_given_at_any_depth(depth: str, tmp_path: Path) -> None:
    ran = cli("merge", BOTH / "node0" / depth, BOTH / "node1", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(BOTH)


def test_a_directory_given_twice_counts_once(tmp_path: Path) -> None:
    assert_refused([BROKEN / "node0", BROKEN / "node0"], tmp_path / "out", "FS111", exit=3)


def test_folders_of_hosts_are_no_steps(tmp_path: Path) -> None:
    hosts = [copy(BOTH / f"node{n}" / ITEMS, tmp_path / f"host_{n}") for n in range(2)]
    ran = cli("merge", *hosts, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(BOTH)


def test_hosts_of_different_steps_are_refused(tmp_path: Path) -> None:
    other = copy(BOTH / "node1", tmp_path / "node1")
    (other / "checkpoints/4000").rename(other / "checkpoints/5000")
    assert_refused([BOTH / "node0", other], tmp_path / "out", "FS107")


def test_temporary_directories_of_another_step_are_left_alone(tmp_path: Path) -> None:
    root = copy(ELIDED, tmp_path / "ckpt")
    shutil.copytree(root / ITEMS, root / "checkpoints/5000.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp")
    assert fastshard.open(root).step == "4000"
    assert_refused(root, tmp_path / "out", "FS104", exit=3, options=("--step", "5000"))


def test_a_save_without_arrays_was_not_finished(tmp_path: Path) -> None:
    root = tmp_path / "ckpt/4000.orbax-checkpoint-tmp"
    root.mkdir(parents=True)
    (root / "_CHECKPOINT_METADATA").write_text("{}")
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS104", exit=3)


def test_several_items_are_not_chosen_between(tmp_path: Path) -> None:
    for item in ("params", "state"):
        write(tmp_path / "4000" / item, "w", painted(4), [2])
    ran = assert_refused(tmp_path / "4000", tmp_path / "out", "FS106", exit=2)
    assert ran.errors[0]["got"] == "params, state"
    assert cli("merge", tmp_path / "4000/state", tmp_path / "out").code == 0


def test_hosts_that_hold_other_elements_are_refused(tmp_path: Path) -> None:
    for host in range(2):
        write(tmp_path / f"node{host}/4000/items", "w", painted(4) + host, [4])
    hosts = [tmp_path / f"node{n}" for n in range(2)]
    assert_refused(hosts, tmp_path / "out", "FS302", tensor="w", message="chunk 0: ")
    # Compressed in another way they are the same.
    shutil.rmtree(tmp_path / "node1")
    write(tmp_path / "node1/4000/items", "w", painted(4), [4], ocdbt=True)
    ran = cli("merge", *hosts, tmp_path / "out")
    assert ran.code == 0, ran.out


def test_hosts_that_describe_an_array_differently_are_refused(tmp_path: Path) -> None:
    for host in range(2):
        write(tmp_path / f"node{host}/4000/items", "w", painted(4 + host), [4])
    hosts = [tmp_path / f"node{n}" for n in range(2)]
    assert_refused(hosts, tmp_path / "out", "FS107", tensor="w")


def test_a_truncated_tree_is_refused(tmp_path: Path) -> None:
    root = copy(ELIDED, tmp_path / "ckpt")
    file = root / ITEMS / "_METADATA"
    file.write_text(file.read_text()[:-100])
    assert_refused(root, tmp_path / "out", "FS601", file="_METADATA")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "7", "[" * 100_000, '{"a": 1}', json.dumps({base64.b64encode(b"step").decode(): "{}"})],
)
def test_shardings_are_evidence_and_no_more(content: str, tmp_path: Path) -> None:
    root = copy(ELIDED, tmp_path / "ckpt")
    (root / ITEMS / "_sharding").write_text(content)
    assert_refused(root, tmp_path / "out", "FS111", exit=3, message="nothing shows whether")


#: Files that are read while a checkpoint is opened.
TARGETS = [
    (ELIDED, f"{ITEMS}/_METADATA"),
    (ELIDED, f"{ITEMS}/_sharding"),
    (ELIDED, f"{ITEMS}/manifest.ocdbt"),
    (PAXML, f"{STATE}/{QKV}/.zarray"),
    (ELIDED, "checkpoints/4000/_CHECKPOINT_METADATA"),
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(target=st.sampled_from(TARGETS), data=st.data())
def test_no_damage_makes_more_than_a_finding(
    target: tuple[Path, str], data: st.DataObject, tmp_path: Path
) -> None:
    fixture, name = target
    root = tmp_path / "ckpt"
    if root.exists():
        shutil.rmtree(root)
    copy(fixture, root)
    file = root / name
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "digits", "put"]))
    if kind == "cut":
        file.write_bytes(whole[:at])
    elif kind == "flip":
        flip_bit(file, at, data.draw(st.integers(0, 7)))
    elif kind == "digits":
        file.write_bytes(whole[:at] + b"9" * data.draw(st.integers(1, 30)) + whole[at:])
    else:
        file.write_bytes(
            whole[:at]
            + data.draw(st.sampled_from([b"null", b"{", b"\xff", b"[[", b"-1", b"\0"]))
            + whole[at + 1 :]
        )
    try:
        checkpoint = fastshard.open(root)
        for tensor in list(checkpoint.values())[:3]:
            np.asarray(tensor)
    except fastshard.FastshardError as error:
        assert error.findings


#: A save of two processes on disks of their own, by a writer that leaves out chunks of zeros.
ELIDING = "mp2_local_BROKEN_063_zarr3"


def test_a_directory_alone_does_not_show_that_its_process_wrote(tmp_path: Path) -> None:
    root = copy(ORBAX / ELIDING / "node0", tmp_path / "node0")
    stray = next(root.glob("checkpoints/*/items")) / "ocdbt.process_1"
    stray.mkdir()
    (stray / "manifest.ocdbt").write_bytes(b"garbage")
    assert_refused(root, tmp_path / "out", "FS111", exit=3)


def test_fewer_processes_than_the_files_tell_of_are_not_believed(tmp_path: Path) -> None:
    options = ("--expect-processes", "1")
    assert_refused(ORBAX / ELIDING / "node0", tmp_path / "out", "FS111", options=options, exit=3)


def test_a_chunk_outside_the_grid_is_of_another_save(tmp_path: Path) -> None:
    write(tmp_path / "items", "w", painted(4, 4), [2, 4])
    (tmp_path / "items" / "w" / "7.9").write_bytes(b"abc")
    ran = assert_refused(tmp_path / "items", tmp_path / "out", "FS107", exit=1)
    assert ran.errors[0]["tensor"] == "w"


@pytest.mark.parametrize(
    "sharding",
    [
        {"device_mesh": {"mesh": "a"}},
        {"device_mesh": {"mesh": [{"id": 1e999}]}},
        {"shape": [1e999]},
        {"axis_names": ["a", "b", "c"]},
        {"device_mesh": {"mesh": [[[]], {"id": 0}]}},
    ],
)
def test_a_sharding_that_cannot_be_understood_says_nothing(sharding: dict[str, Any], tmp_path: Path) -> None:
    root = copy(ORBAX / "mp2_shared_good_063_zarr3_elided_zeros", tmp_path / "ckpt")
    file = next(root.glob("checkpoints/*/items/_sharding"))
    entries = {k: json.dumps({**json.loads(v), **sharding}) for k, v in json.loads(file.read_text()).items()}
    file.write_text(json.dumps(entries))
    assert_refused(root, tmp_path / "out", "FS111", exit=3, message="nothing shows whether")


def test_an_absurd_number_of_processes_is_refused(tmp_path: Path) -> None:
    options = ("--expect-processes", "1000000000")
    assert_refused(ORBAX / ELIDING / "node0", tmp_path / "out", "FS211", options=options, exit=2)


def test_paths_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(ORBAX / "mp2_shared_good_063_zarr3_elided_zeros", tmp_path / "ckpt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fastshard.convert("../ckpt", "../out", to="orbax")
    fastshard.convert("../out", "../back", to=None)
    assert merged(tmp_path / "back") == wanted(tmp_path / "ckpt")


def test_one_array_is_told_from_the_whole(tmp_path: Path) -> None:
    write(tmp_path / "items", "w", painted(4), [2])
    ran = assert_refused(tmp_path / "items" / "w", tmp_path / "out", "FS514", exit=2)
    assert "items" in ran.errors[0]["help"]
