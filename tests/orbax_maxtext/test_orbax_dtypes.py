"""Arrays of every dtype that TensorStore has: kept where a result can hold them, else named, and left out
when asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from helpers import assert_refused, cli
from jax_maker import read
from orbax_maker import ZARR2, describe, painted, write

KEPT = {
    "C64": np.complex64,
    "C128": np.complex128,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
#: What safetensors has not: its type, and the dtype that has all its values.
WIDENED = {
    "int4": (ml_dtypes.int4, "I8"),
    "int2": (ml_dtypes.int2, "I8"),
    "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, "BF16"),
    "float8_e3m4": (ml_dtypes.float8_e3m4, "BF16"),
    "float8_e4m3b11fnuz": (ml_dtypes.float8_e4m3b11fnuz, "BF16"),
}
#: What no TensorStore writes.
UNREAD = ["uint4", "|S4"]


def values(dtype: Any) -> np.ndarray:
    numbers = 2.0 ** (np.arange(24).reshape(6, 4) % 5)
    if np.dtype(dtype).kind == "c":
        return (numbers + 1j * np.arange(24).reshape(6, 4)).astype(dtype)
    return numbers.astype(dtype)


def put(root: Path, name: str, array: np.ndarray, zarr: int = 2, **how: Any) -> None:
    """Writes an array whose dtype TensorStore names as numpy does."""
    known = dict(ZARR2)
    if array.dtype.kind not in "fiubc" or array.dtype.itemsize == 1:
        ZARR2[array.dtype] = array.dtype.name
    fill = [0.0, 0.0] if zarr == 3 and array.dtype.kind == "c" else None
    write(root, name, array, [4, *array.shape[1:]], zarr=zarr, fill=fill, **how)
    ZARR2.clear()
    ZARR2.update(known)


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("dtype", KEPT)
def test_a_dtype_is_kept(dtype: str, zarr: int, tmp_path: Path) -> None:
    array = values(KEPT[dtype])
    put(tmp_path / "3/items", "w", array, zarr)
    describe(tmp_path / "3/items", ["w"], zarr3=zarr == 3)
    source = fastshard.open(tmp_path / "3/items")
    assert source["w"].dtype == dtype and source["w"].numpy().tobytes() == array.tobytes()
    whole = tmp_path / "st"
    if dtype == "C128":
        # safetensors has no such type: what none of its readers opens is not written.
        assert_refused(tmp_path / "3/items", whole, "FS514", exit=2)
        whole = tmp_path / "3/items"
    else:
        fastshard.convert(source, whole, to=None, memory="2GiB")
        again = fastshard.open(whole)["w"]
        assert again.dtype == dtype and again.numpy().tobytes() == array.tobytes()
    for zarr2 in (False, True):
        out = tmp_path / f"out{zarr2}"
        fastshard.convert(whole, out, to="orbax", zarr2=zarr2, memory="2GiB")
        have = read(out)["w"]
        assert have.dtype == array.dtype and have.tobytes() == array.tobytes()
        assert cli("verify", out).code == 0


def test_complex_numbers_have_a_fill_value_of_two_parts(tmp_path: Path) -> None:
    for name, dtype in (("w", np.complex64), ("v", np.complex128)):
        put(tmp_path / "3/items", name, values(dtype))
    describe(tmp_path / "3/items", ["w", "v"])
    fastshard.convert(tmp_path / "3/items", tmp_path / "out", to="orbax", memory="2GiB")
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/out/3/items/"}).result()
    for name in ("w", "v"):
        described = json.loads(store.read(f"{name}/zarr.json").result().value)
        assert described["fill_value"] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", KEPT)
def test_chunks_left_out_hold_the_fill_value(dtype: str, tmp_path: Path) -> None:
    root = tmp_path / "3/items"
    array = values(KEPT[dtype])
    put(root, "w", array, 3, elide=True)
    (root / "w/c/1/0").unlink()
    describe(root, ["w"], stores_fill=None, zarr3=True)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root}/w/"}}
    want = ts.open(spec).result().read().result()
    have = fastshard.open(root, accept=["elided-zeros"])["w"].numpy()
    assert have.tobytes() == want.tobytes()


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("dtype", WIDENED)
def test_an_array_of_a_dtype_that_safetensors_has_not_is_widened(
    dtype: str, zarr: int, tmp_path: Path
) -> None:
    """All its values, negative ones and those that are no number too, as they are cast by ml_dtypes."""
    narrow, wide = WIDENED[dtype]
    root = tmp_path / "3/items"
    # A byte for each element: of fewer bits all there are, of eight all bytes.
    bits = ml_dtypes.iinfo(narrow).bits if wide == "I8" else ml_dtypes.finfo(narrow).bits
    array = np.tile(np.arange(1 << bits, dtype=np.uint8), 64 >> min(bits, 6)).view(narrow).reshape(-1, 16)
    want = array.astype(np.int8 if wide == "I8" else ml_dtypes.bfloat16)
    assert wide == "BF16" or want.min() < 0
    put(root, "params.q", array, zarr)
    put(root, "params.w", painted(6, 4), zarr)
    put(root, "params.zero", np.zeros((8, 4), narrow), zarr, elide=True)
    describe(root, ["params.w", "params.q", "params.zero"], stores_fill=None, zarr3=zarr == 3)
    for number, to in enumerate([(), ("--to", "orbax")]):
        out = tmp_path / f"out{number}"
        accepted = ("--accept", "elided-zeros", "--accept", "non-finite")
        ran = cli("convert" if to else "merge", root, out, *to, *accepted)
        assert ran.code == 0 and not ran.errors, ran.findings
        notes = [note for note in ran.having("FS514") if note["tensor"] == "params.q"]
        assert [n["severity"] for n in notes] == ["note"] and wide in notes[0]["message"]
        got = read(out)
        assert got["params.q"].dtype == want.dtype and got["params.q"].tobytes() == want.tobytes()
        assert not got["params.zero"].any() and got["params.zero"].dtype == want.dtype
        np.testing.assert_array_equal(got["params.w"], painted(6, 4))
        assert cli("verify", out).code == cli("diff", root, out, "--accept", "elided-zeros").code == 0


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("dtype", UNREAD)
def test_an_array_that_no_result_can_hold_is_named_and_can_be_left_out(
    dtype: str, zarr: int, tmp_path: Path
) -> None:
    root = tmp_path / "3/items"
    put(root, "params.w", painted(6, 4), zarr)
    unread(root, "params.q", dtype, zarr)
    describe(root, ["params.w", "params.q"], zarr3=zarr == 3)
    ran = assert_refused(root, tmp_path / "out", "FS514", exit=2, tensor="params.q")
    assert len(ran.errors) == 1 and ran.errors[0]["got"] == f'"{dtype}"'
    assert "--exclude 'params.q'" in ran.errors[0]["help"]
    told = cli("inspect", root)
    assert told.code == 2 and told.doc["complete"] is False and told.having("FS514", tensor="params.q")
    for number, (to, options) in enumerate(
        [
            ([], ["--exclude", "params.q"]),
            ([], ["--include", "*.w"]),
            (["--to", "orbax"], ["--exclude", "*q"]),
        ]
    ):
        out = tmp_path / f"out{number}"
        ran = cli("convert" if to else "merge", root, out, *to, *options)
        assert ran.code == 0, ran.findings
        (note,) = ran.having("FS514")
        assert note["severity"] == "note" and note["tensor"] == "params.q"
        np.testing.assert_array_equal(read(out)["params.w"], painted(6, 4))
    for argv in (
        ("verify", root),
        ("diff", root, root),
        ("manifest", root, "-o", tmp_path / "m.json"),
        ("stats", root),
    ):
        refused = cli(*argv)
        assert refused.code == 2 and refused.having("FS514", severity="error", tensor="params.q"), argv
        ran = cli(*argv, "--exclude", "params.q")
        assert ran.code == 0 and not ran.errors, (argv, ran.findings)
    expect = ("--exclude", "params.q", "--expect", tmp_path / "m.json")
    assert cli("verify", root, *expect).code == cli("merge", root, tmp_path / "sure", *expect).code == 0
    # Of one that is left out no chunk need be there.
    (root / "params.q" / ("c/1/0" if zarr == 3 else "1.0")).unlink()
    assert cli("merge", root, tmp_path / "gone", "--exclude", "params.q").code == 0
    assert_refused(root, tmp_path / "out", "FS514", exit=2, options=("--exclude", "params.w"))


def unread(root: Path, name: str, dtype: str, zarr: int = 2) -> None:
    put(root, name, values(np.int32), zarr)
    file = root / name / (".zarray" if zarr == 2 else "zarr.json")
    described = json.loads(file.read_text())
    described["dtype" if zarr == 2 else "data_type"] = dtype
    file.write_text(json.dumps(described))


def test_a_store_of_nothing_else_is_refused(tmp_path: Path) -> None:
    unread(tmp_path / "3/items", "q", "uint4")
    describe(tmp_path / "3/items", ["q"])
    assert_refused(tmp_path / "3/items", tmp_path / "out", "FS514", exit=2, tensor="q")


def entry(*keys: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }


def tree(root: Path, *entries: tuple[str, ...]) -> None:
    described = {str(keys): entry(*keys) for keys in entries}
    (root / "_METADATA").write_text(json.dumps({"tree_metadata": described, "use_zarr3": False}))


def test_two_entries_of_one_array_are_refused(tmp_path: Path) -> None:
    """As Orbax saves ``{"a": {"b": x}, "a.b": y}``: one of the two is lost."""
    root = tmp_path / "3/items"
    for name in ("a.b", "w"):
        put(root, name, painted(6, 4))
    tree(root, ("a", "b"), ("a.b",), ("w",))
    ran = assert_refused(root, tmp_path / "out", "FS206", exit=1, tensor="a.b")
    assert "('a.b',)" in ran.errors[0]["got"]
    ran = cli("merge", root, tmp_path / "out", "--exclude", "a.b")
    assert ran.code == 0 and set(read(tmp_path / "out")) == {"w"}


def test_a_key_with_a_dot_is_no_child(tmp_path: Path) -> None:
    root = tmp_path / "3/items"
    arrays = {"a": painted(6, 4), "a.b": painted(6, 4) + 1}
    for name, array in arrays.items():
        put(root, name, array)
    tree(root, ("a",), ("a.b",))
    fastshard.convert(root, tmp_path / "out", to="orbax", memory="2GiB")
    assert {n: a.tobytes() for n, a in read(tmp_path / "out").items()} == {
        n: a.tobytes() for n, a in arrays.items()
    }
    tree(root, ("a",), ("a", "b"))
    assert_refused(root, tmp_path / "out2", "FS514", exit=2, command=("convert", "--to", "orbax"))
