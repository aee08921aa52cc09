"""Every form of zarr array that is read, written by TensorStore in the test, and those that are refused."""

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
from orbax_maker import describe, painted, write
from safetensors.numpy import load_file

ZSTD = {"name": "zstd", "configuration": {"level": 1}}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def sharded(inner: list[int], *codecs: dict[str, Any]) -> dict[str, Any]:
    index = [LITTLE, {"name": "crc32c"}]
    parts = {"chunk_shape": inner, "codecs": list(codecs or (LITTLE, ZSTD)), "index_codecs": index}
    return {"codecs": [{"name": "sharding_indexed", "configuration": parts}]}


FORMS: dict[str, tuple[np.ndarray, list[int], dict[str, Any]]] = {
    "ragged": (painted(7, 5), [3, 2], {}),
    "whole": (painted(4, 6), [4, 6], {}),
    "larger_chunk_than_array": (painted(2, 3), [8, 8], {}),
    "scalar": (painted(), [], {}),
    "scalar3": (painted(dtype=np.int32), [], {"zarr": 3}),
    "vector": (painted(9, dtype=np.int64), [4], {}),
    "one_each": (painted(3, 2), [1, 1], {}),
    "f_order": (painted(4, 6, 5), [3, 4, 2], {"order": "F"}),
    "f_order_3d_blosc": (
        painted(4, 6),
        [2, 3],
        {"order": "F", "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    ),
    "slashes": (painted(5, 4), [2, 2], {"dimension_separator": "/"}),
    "plain": (painted(5, 4), [2, 2], {"compressor": None}),
    "gzip": (painted(5, 4), [2, 2], {"compressor": {"id": "gzip", "level": 1}}),
    "zlib": (painted(5, 4), [2, 2], {"compressor": {"id": "zlib", "level": 1}}),
    "zstd": (painted(5, 4), [2, 2], {"compressor": {"id": "zstd", "level": 1}}),
    "blosc": (
        painted(64, 4),
        [32, 4],
        {"compressor": {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2}},
    ),
    "bf16": (painted(6, 4, dtype=ml_dtypes.bfloat16), [4, 4], {}),
    "bf16_3": (painted(6, 4, dtype=ml_dtypes.bfloat16), [4, 4], {"zarr": 3, **sharded([4, 4])}),
    "f16": (painted(6, 4, dtype=np.float16), [4, 4], {}),
    "f64": (painted(6, 4, dtype=np.float64), [4, 4], {"zarr": 3}),
    "bool": (painted(6, 4) % 3 == 0, [4, 3], {}),
    "bool3": (painted(6, 4) % 3 == 0, [4, 3], {"zarr": 3}),
    "u8": (painted(6, 4, dtype=np.uint8), [4, 3], {}),
    "i8": (painted(6, 4, dtype=np.int8), [4, 3], {"zarr": 3}),
    "u32": (painted(6, 4, dtype=np.uint32), [4, 3], {}),
    "v3": (painted(7, 5), [3, 2], {"zarr": 3}),
    "v3_zstd": (painted(7, 5), [3, 2], {"zarr": 3, "codecs": [LITTLE, ZSTD]}),
    "v3_dots": (
        painted(7, 5),
        [3, 2],
        {"zarr": 3, "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}},
    ),
    "v3_transposed": (
        painted(7, 5),
        [3, 2],
        {"zarr": 3, "codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE]},
    ),
    "shards": (painted(10, 6), [4, 6], {"zarr": 3, **sharded([2, 3])}),
    "shards_of_one": (painted(10, 6), [5, 3], {"zarr": 3, **sharded([5, 3])}),
    "shards_with_transposed_parts": (
        painted(9, 6),
        [6, 6],
        {"zarr": 3, **sharded([2, 3], {"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE)},
    ),
    "big_endian_codec": (
        painted(5, 4),
        [2, 2],
        {"zarr": 3, "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
    ),
}


def merged(root: Path, out: Path, *options: object) -> dict[str, np.ndarray]:
    ran = cli("merge", root, out, *options)
    assert ran.code == 0, ran.out
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
@pytest.mark.parametrize("form", FORMS)
def test_an_array_is_what_was_written(form: str, ocdbt: bool, tmp_path: Path) -> None:
    values, chunk, how = FORMS[form]
    root = tmp_path / "items"
    write(root, "params.w", values, chunk, ocdbt=ocdbt, **how)
    describe(root, ["params.w"])
    have = merged(root, tmp_path / "out")
    assert set(have) == {"params.w"}
    assert have["params.w"].dtype == values.dtype
    np.testing.assert_array_equal(have["params.w"], values)


def test_parts_of_large_shards_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastshard.sources.orbax.zarr_metadata._SHARD_BYTES", 16)
    root = tmp_path / "items"
    values = painted(10, 7)
    values[:4, :3] = 0
    # The parts of zeros are left out of their shard, which is no loss: the shard was written at once.
    write(root, "w", values, [8, 6], zarr=3, elide=True, **sharded([2, 3]))
    np.testing.assert_array_equal(merged(root, tmp_path / "out")["w"], values)
    describe(root, ["w"])
    # A writer that leaves nothing out left nothing out there either.
    assert_refused(root, tmp_path / "again", "FS601", tensor="w", message="chunk c/0/0: ")


def test_empty_arrays_have_no_chunks(tmp_path: Path) -> None:
    root = tmp_path / "items"
    write(root, "empty", np.zeros((0, 3), np.float32), [1, 3])
    write(root, "w", painted(3), [3])
    describe(root, ["empty", "w"])
    assert merged(root, tmp_path / "out")["empty"].shape == (0, 3)


def test_slices_are_those_of_the_array(tmp_path: Path) -> None:
    values = painted(9, 7, 5)
    write(tmp_path / "items", "w", values, [4, 3, 2])
    tensor = fastshard.open(tmp_path / "items")["w"]
    np.testing.assert_array_equal(tensor[2:8, :, 3], values[2:8, :, 3])
    np.testing.assert_array_equal(tensor[5], values[5])


@pytest.mark.parametrize("fill", [1.5, "NaN", "-Infinity"])
def test_chunks_left_out_hold_the_fill_value(fill: object, tmp_path: Path) -> None:
    root = tmp_path / "items"
    values = painted(6)
    values[2:4] = float(str(fill).replace("Infinity", "inf"))
    write(root, "w", values, [2], fill=fill, elide=True)
    assert not (root / "w/1").exists()
    describe(root, ["w"], stores_fill=False)
    assert_refused(root, tmp_path / "out", "FS111", exit=3, tensor="w")
    have = merged(root, tmp_path / "out", "--accept", "elided-zeros", "--accept", "non-finite")
    np.testing.assert_array_equal(have["w"], values)


def read_by_tensorstore() -> int:
    """Bytes of files so far."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return int(metric["values"][0]["value"])


def test_the_index_is_not_read_again_for_every_chunk(tmp_path: Path) -> None:
    """Orbax writes it as one node, so that this would be quadratic in the number of chunks."""
    values = painted(48, 48)
    write(tmp_path / "items", "w", values, [2, 2], ocdbt=True)
    describe(tmp_path / "items", ["w"])
    stored = sum(f.stat().st_size for f in (tmp_path / "items").rglob("*") if f.is_file())
    before = read_by_tensorstore()
    np.testing.assert_array_equal(merged(tmp_path / "items", tmp_path / "out")["w"], values)
    assert read_by_tensorstore() - before < 8 * stored


def edit(file: Path, **changes: Any) -> None:
    """Changes entries of a JSON file; None of ... removes them."""
    document = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"filters": [{"id": "delta", "dtype": "<f4"}]}, "FS514", "filters"),
        ({"dtype": "<U8"}, "FS514", "dtype"),
        ({"dtype": ">f4"}, "FS514", "dtype"),
        ({"dtype": [["a", "<f4"]]}, "FS514", "dtype"),
        ({"zarr_format": 3}, "FS601", "zarr_format"),
        ({"order": "K"}, "FS601", "order"),
        ({"chunks": [0, 2]}, "FS601", "chunks"),
        ({"chunks": [2]}, "FS601", "chunks"),
        ({"chunks": ...}, "FS601", "chunks"),
        ({"shape": [-1, 4]}, "FS601", "shape"),
        ({"shape": [1 << 40, 1 << 40]}, "FS601", "addressed"),
        ({"shape": [1 << 30, 4], "chunks": [1, 1]}, "FS601", "chunks"),
        ({"shape": [True, 4]}, "FS601", "shape"),
        ({"shape": "54"}, "FS601", "shape"),
        ({"dimension_separator": "x"}, "FS601", "separator"),
        ({"dimension_separator": []}, "FS601", "separator"),
        ({"compressor": {"id": "lzma"}}, "FS601", "cannot be read"),
        ({"compressor": {"id": "gzip"}}, "FS601", "chunk 0.0: the store cannot be read"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused(
    changes: dict[str, Any], code: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "items", "w", painted(5, 4), [2, 2])
    edit(tmp_path / "items/w/.zarray", **changes)
    ran = cli("merge", tmp_path / "items", tmp_path / "out")
    assert ran.code in (1, 2), ran.out
    assert ran.having(code, tensor="w", message=message), ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"storage_transformers": [{"name": "x"}]}, "FS514", "storage_transformers"),
        ({"chunk_key_encoding": {"name": "v2"}}, "FS514", "chunk_key_encoding"),
        ({"chunk_key_encoding": "v2"}, "FS514", "chunk_key_encoding"),
        ({"data_type": "string"}, "FS514", "dtype"),
        ({"chunk_grid": {"name": "rectangular"}}, "FS601", "chunks"),
        ({"codecs": sharded([3, 2])["codecs"]}, "FS601", "divide"),
        ({"codecs": sharded([0, 2])["codecs"]}, "FS601", "chunks"),
        ({"codecs": 7}, "FS601", "cannot be read"),
        (
            {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 34, 4]}},
                "shape": [1 << 34, 4],
                "codecs": sharded([1, 1])["codecs"],
            },
            "FS601",
            "chunks",
        ),
    ],
)
def test_metadata_of_version_3_that_cannot_be_read_is_refused(
    changes: dict[str, Any], code: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "items", "w", painted(5, 4), [2, 2], zarr=3)
    edit(tmp_path / "items/w/zarr.json", **changes)
    ran = cli("merge", tmp_path / "items", tmp_path / "out")
    assert ran.having(code, tensor="w", message=message), ran.out
    assert ran.code in (1, 2)
    assert not (tmp_path / "out").exists()


def test_both_versions_of_metadata_are_two_readings(tmp_path: Path) -> None:
    write(tmp_path / "items", "w", painted(4), [2])
    write(tmp_path / "items", "w", painted(4), [2], zarr=3)
    assert_refused(tmp_path / "items", tmp_path / "out", "FS106", exit=2, tensor="w")


def test_groups_are_no_arrays(tmp_path: Path) -> None:
    write(tmp_path / "items", "w", painted(4), [2], zarr=3)
    (tmp_path / "items/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    np.testing.assert_array_equal(merged(tmp_path / "items", tmp_path / "out")["w"], painted(4))


@pytest.mark.parametrize("name", ["../w", "a/../../w", "/w"])
def test_names_that_leave_the_store_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "items", "fine", painted(4), [2], ocdbt=True)
    write(tmp_path / "items", name, painted(4), [2], ocdbt=True)
    assert_refused(tmp_path / "items", tmp_path / "out", "FS603")


def test_without_tensorstore_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "items", "w", painted(4), [2])
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    ran = assert_refused(tmp_path / "items", tmp_path / "out", "FS514", exit=2)
    assert "pip install 'tensorstore" in ran.errors[0]["help"]
