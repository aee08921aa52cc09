"""Names, types and shapes that torch.distributed.checkpoint saves, each against what torch itself reads
back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_refused, cli, read_result
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

TYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def check(tensors: dict[str, Any], folder: Path) -> None:
    """A merge gives the same bytes as torch's own reading, under the same names."""
    dcp.save(tensors, checkpoint_id=folder / "ckpt", no_dist=True)
    flat = {n: t for n, t in flatten_state_dict(tensors)[0].items() if torch.is_tensor(t)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    dcp.load(loaded, checkpoint_id=folder / "ckpt", no_dist=True)
    ran = cli("merge", folder / "ckpt", folder / "out")
    assert ran.code == 0, ran.out
    have = read_result(folder / "out")
    assert set(have) == set(loaded)
    for name, tensor in loaded.items():
        assert (have[name].dtype, have[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(have[name]) == raw(tensor) == raw(flat[name]), name


def test_every_type_of_elements(tmp_path: Path) -> None:
    tensors = {}
    for name in TYPES:
        dtype = getattr(torch, name)
        bits = torch.arange(24 * dtype.itemsize, dtype=torch.int64) % (2 if name == "bool" else 120)
        tensors[name] = bits.to(torch.uint8).view(dtype).reshape(4, 6)
    check(tensors, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "a.b",
        "a b",
        "\u00fcn\u00ef",
        "x[0]",
        "x[0,0]",
        "x[0][1]",
        "a/b",
        "..",
        "",
        "a\nb",
        ".hidden",
        "w.",
        '"q"',
        "a\\b",
        "\U0001f600",
        "state",
        "optim.x",
        "very" * 60,
    ],
)
def test_every_name(name: str, tmp_path: Path) -> None:
    check({name: torch.arange(6.0).reshape(2, 3), "other": torch.ones(1)}, tmp_path)


def test_every_shape_and_view(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    tensors = {
        "scalar": torch.tensor(3),
        "none": torch.empty(0),
        "hollow": torch.empty(3, 0, 2),
        "same": weight,
        "again": weight,
        "rows": weight[1:3],
        "turned": weight.t(),
        "spread": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "steps": weight[:, ::2],
        "x": torch.ones(2, 2),
        "x[0,0]": weight,
    }
    check(tensors, tmp_path)


def test_dicts_within_lists_within_dicts(tmp_path: Path) -> None:
    check(
        {
            "a": {"b": [{"c": torch.ones(1)}, [torch.zeros(2), torch.tensor(1)]]},
            "l": [torch.ones(2), [torch.ones(3)]],
        },
        tmp_path,
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.ones(3, dtype=torch.complex128)}, "no complex128"),
        ({"__metadata__": torch.ones(3)}, "keeps this name"),
    ],
)
def test_what_readers_of_safetensors_do_not_take_is_not_written(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    held = {**tensors, "other": torch.ones(2)}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (name,) = tensors
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS514", exit=2, tensor=name, message=message)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out", "--exclude", name)
    assert ran.code == 0, ran.out
    assert set(read_result(tmp_path / "out")) == {"other"}


def test_a_safetensors_file_beside_metadata_is_refused_as_what_it_is(tmp_path: Path) -> None:
    """FileSystemWriter with that form notes places that torch cannot read either."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    form = SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "ckpt", serialization_format=form)
    dcp.save({"a": torch.ones(3), "b": torch.ones(2, 2), "step": 1}, storage_writer=writer, no_dist=True)
    assert_refused(tmp_path / "ckpt", tmp_path / "out", "FS514", exit=2, message="safetensors form")


def test_what_consolidation_made_zero_is_told(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 4), "scale": torch.tensor(2.5)}
    writer = dcp.HuggingFaceStorageWriter(
        str(tmp_path / "ckpt"), save_distributed=True, enable_consolidation=True
    )
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    made = read_result(tmp_path / "out")["scale"]
    if made == 2.5:
        pytest.skip("this torch keeps them")
    (told,) = ran.having("FS313", tensor="scale")
    assert (ran.code, told["severity"]) == (0, "warning")
    ran = cli("merge", tmp_path / "ckpt/sharded", tmp_path / "shards")
    assert ran.code == 0 and not ran.having("FS313"), ran.out
    assert torch.equal(read_result(tmp_path / "shards")["scale"], tensors["scale"])
