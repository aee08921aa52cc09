"""What is written is within what is read: headers, indices, pickles, by our own readers and the formats'
own."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastshard
import numpy as np
import pytest
import torch
from fastshard.common import safe_files
from helpers import cli
from holding import HANG
from safetensors import SafetensorError, safe_open

#: The format's limit. source: safetensors src/tensor.rs, MAX_HEADER_SIZE
LIMIT = 100_000_000


def write_header(path: Path, names: list[str], fill: int | None = None) -> int:
    """A file of one-element tensors; with ``fill`` the last name is made longer until the header has that
    many bytes."""

    def header() -> bytes:
        entries = {
            n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
        }
        return json.dumps(entries, separators=(",", ":")).encode()

    if fill is not None:
        names[-1] += "y" * (fill - len(header()))
    data = np.arange(len(names), dtype=np.float32)
    content = header()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data.tobytes())
    return len(content)


@pytest.fixture
def big_headers(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()


def test_header_at_the_limit_is_merged_into_files_that_can_be_opened(big_headers: Path) -> None:
    (big_headers / "in").mkdir()
    names = [f"{i}" + "x" * 24_000_000 for i in range(4)]
    source = big_headers / "in/model.safetensors"
    assert write_header(source, names, fill=LIMIT) == LIMIT
    with safe_open(source, "np") as file:
        assert len(list(file.keys())) == 4
    fastshard.merge(big_headers / "in", big_headers / "out", memory="8GiB", fsync=False)
    files = sorted((big_headers / "out").glob("*.safetensors"))
    assert len(files) == 2
    values = {}
    for path in files:
        assert struct.unpack("<Q", path.open("rb").read(8))[0] <= LIMIT
        with safe_open(path, "np") as file:
            values |= {key: float(file.get_tensor(key)[0]) for key in file.keys()}  # noqa: SIM118
    assert values == {name: float(i) for i, name in enumerate(names)}
    again = fastshard.open(big_headers / "out")
    assert set(again) == set(names) and not [f for f in again.findings if f.severity != "note"]


def test_rank_whose_header_would_be_too_large_is_refused_before_anything_is_written(
    big_headers: Path,
) -> None:
    """Ranks are written by a conversion; a file that one tensor alone makes too large, by a merge too."""
    (big_headers / "in").mkdir()
    write_header(big_headers / "in/model.safetensors", ["x"], fill=LIMIT)
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.merge(big_headers / "in", big_headers / "out", memory="8GiB", fsync=False)
    error = caught.value
    assert (error.code, error.expected) == ("FS514", f"{LIMIT} at most")
    assert error.got is not None and int(error.got) > LIMIT
    assert sorted(p.name for p in big_headers.iterdir()) == ["in"]


def test_limit_is_the_formats(big_headers: Path) -> None:
    path = big_headers / "model.safetensors"
    write_header(path, ["x"], fill=LIMIT + 1)
    with pytest.raises(SafetensorError, match=r"[Hh]eader"):
        safe_open(path, "np")
    assert cli("inspect", path).errors[0]["code"] == "FS601"


def test_index_beyond_the_limit_of_other_texts_is_read(big_headers: Path) -> None:
    index = big_headers / "model.safetensors.index.json"
    write_header(big_headers / "model-00001-of-00001.safetensors", ["a"])
    document = {
        "metadata": {"note": "x" * safe_files.MAX_TEXT},
        "weight_map": {"a": "model-00001-of-00001.safetensors"},
    }
    index.write_text(json.dumps(document))
    assert fastshard.open(big_headers)["a"].numpy().tolist() == [0]


def test_text_of_a_target_beyond_what_is_read_is_refused(big_headers: Path) -> None:
    (big_headers / "in").mkdir()
    write_header(big_headers / "in/model.safetensors", ["model.norm.weight"])
    source = fastshard.open(big_headers / "in")
    texts = {"layout.json": "x" * (safe_files.MAX_TEXT + 1)}
    draft = source.opened.catalog.draft({"source": source.opened.source})
    core = draft.place({"max_shard_size": 10, "texts": texts})
    (finding,) = [f for f in core.findings() if f.code == "FS514"]
    assert finding.file == "layout.json" and finding.expected == f"{safe_files.MAX_TEXT} at most"


# --- the writer


def test_array_is_read_once(tmp_path: Path) -> None:
    """Another thread changes it all the time: file and manifest are of the same bytes."""
    script = f"""
import threading
import numpy as np
import fastshard
array, stop = np.zeros(8 << 20, "f4"), threading.Event()
def change():
    i = 1
    while not stop.is_set():
        array[::4096] = i
        i += 1
thread = threading.Thread(target=change)
thread.start()
for i in range(4):
    with fastshard.Writer({str(tmp_path)!r} + f"/out{{i}}", fsync=False) as writer:
        writer["x"] = array
stop.set()
thread.join()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG)
    for i in range(4):
        errors = [f for f in fastshard.verify(tmp_path / f"out{i}", memory="8GiB") if f.severity == "error"]
        assert errors == []


@pytest.mark.parametrize("name", ["x" * 65_500, "\x01" * 11_000, "é" * 40_000])
def test_name_too_long_for_a_header_is_refused_when_it_is_added(name: str, tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = np.zeros(3)
        with pytest.raises(fastshard.CannotRunError) as caught:
            writer[name] = np.zeros(3)
        writer["b"] = np.ones(3)
    assert (caught.value.code, caught.value.tensor is not None) == ("FS514", True)
    assert set(fastshard.open(tmp_path / "out")) == {"a", "b"}


@pytest.mark.parametrize("name", ["x" * 60_000, "\x01" * 10_000, '"\\' * 15_000, "é" * 30_000])
def test_names_that_fill_headers_are_written(name: str, tmp_path: Path) -> None:
    names = [name, "a", name + "2", "b"]
    with fastshard.Writer(tmp_path / "out") as writer:
        for i, one in enumerate(names):
            writer[one] = np.full((1,) * 30, i, np.float32)
    have = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "np") as file:
            have |= {key: file.get_tensor(key).item() for key in file.keys()}  # noqa: SIM118
    assert have == {one: float(i) for i, one in enumerate(names)}


def test_many_files_take_one_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with fastshard.Writer(tmp_path / "out", max_shard_size=4, fsync=False) as writer:
        writer["w0"] = np.zeros(1, np.float32)
        before = descriptors()
        for i in range(1, 200):
            writer[f"w{i}"] = np.full(1, i, np.float32)
        assert descriptors() == before
    assert len(fastshard.open(tmp_path / "out")) == 200


BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
ODD = {
    "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "imaginary_of_conj": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "shared": BASE[0],
    "again": BASE[0],
    "transposed": BASE.permute(2, 0, 1),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(7, dtype=torch.int16),
    "step": BASE[:, ::2],
    "flag": torch.tensor([True, False, True])[::2],
    "requires_grad": torch.ones(3, requires_grad=True) * 2,
    "bf16": torch.randn(3, 5).bfloat16().t(),
}


@pytest.mark.parametrize("name", ODD)
def test_torch_tensors_as_their_values_are(name: str, tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["x"] = ODD[name]
    have, want = fastshard.open(tmp_path / "out")["x"].torch(), ODD[name].detach()
    assert (
        have.dtype == want.dtype
        and have.shape == want.shape
        and torch.equal(have, want.resolve_conj().resolve_neg())
    )


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6.0)[::-1],
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::-1, :, ::-1],
        np.float32(3),
        np.asfortranarray(np.arange(6).reshape(2, 3).astype(">i4")),
        np.zeros((2, 0)),
        np.broadcast_to(np.int8(4), (3, 2)),
        np.arange(6, dtype=">f8")[::-2],
        [[1, 2], [3, 4]],
    ],
    ids=str,
)
def test_numpy_arrays_as_their_values_are(values: object, tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["x"] = values
    have, want = fastshard.open(tmp_path / "out")["x"].numpy(), np.asarray(values)
    assert (
        have.dtype == want.dtype.newbyteorder("=") and have.shape == want.shape and np.array_equal(have, want)
    )


@pytest.mark.parametrize(
    "array",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.zeros(2, dtype=[("a", "f4")]),
        np.array(["text"]),
        np.array(["2020"], dtype="M8[Y]"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "masked", "record", "text", "date", "quantized"],
)
def test_what_is_no_array_of_values_is_refused(array: object, tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught, fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = array
    assert (caught.value.code, caught.value.tensor) == ("FS514", "a")
    assert list(tmp_path.iterdir()) == []
