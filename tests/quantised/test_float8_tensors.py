"""Weights that Transformer Engine keeps in eight bits, as torch.save pickles them: they are read as the
values that they stand for.

The classes here pickle as Transformer Engine's do, whose own package needs a GPU: ``__reduce_ex__`` of
transformer_engine/pytorch/tensor/float8_tensor.py, and an enumeration of pybind11's or of Python's for the
format.
"""

from __future__ import annotations

import copyreg
import enum
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DCP, LEGACY, NEOX, ZERO
from helpers import FIXTURES, Ran, assert_refused, cli, read_result
from zero_maker import load, save

MODULE = "transformer_engine.pytorch.tensor.float8_tensor"
LINEAR = "linear", "dense", "query_key_value", ".up.", ".down."
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class DType:
    """As pybind11 makes it: an object with a number as its state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return copyreg.__newobj__, (DType,), self.number  # type: ignore[attr-defined]

    def __setstate__(self, number: int) -> None:
        self.number = number


class Native(enum.Enum):
    """As newer versions of pybind11 make it."""

    E4M3 = 7


class Float8Tensor:
    """What a weight is pickled as."""

    def __init__(
        self, codes: torch.Tensor, number: Any, scale: torch.Tensor, dtype: torch.dtype, *shape: Any
    ) -> None:
        self.arguments = (codes, number, scale, dtype, *shape)

    @classmethod
    def _make_in_reduce_ex(cls, *arguments: Any) -> Float8Tensor:
        return cls(*arguments)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self)._make_in_reduce_ex, self.arguments


class MXFP8Tensor(Float8Tensor):
    """Another class of the same package."""


@pytest.fixture(autouse=True)
def _named_as_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parts = MODULE.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", types.ModuleType("transformer_engine_torch"))
    for kind in (Float8Tensor, MXFP8Tensor):
        monkeypatch.setattr(kind, "__module__", MODULE)
        monkeypatch.setattr(sys.modules[MODULE], kind.__name__, kind, raising=False)
    for kind in (DType, Native):
        monkeypatch.setattr(kind, "__module__", "transformer_engine_torch")
        monkeypatch.setattr(sys.modules["transformer_engine_torch"], kind.__name__, kind, raising=False)
    yield


def quantised(
    weight: torch.Tensor, number: Any, form: torch.dtype = E4M3
) -> tuple[Float8Tensor, torch.Tensor]:
    """A weight in eight bits, and the values that it stands for: their product in float32, rounded."""
    scale = (weight.float().abs().max() / torch.finfo(form).max).reshape(1)
    codes = (weight.float() / scale).to(form)
    values = (codes.float() * scale).to(weight.dtype)
    return Float8Tensor(codes.view(torch.uint8), number, scale, weight.dtype, weight.shape), values


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and any(part in name for part in LINEAR)


def two_checkpoints(
    fixture: str, folder: Path, number: Any = None, form: torch.dtype = E4M3
) -> tuple[Path, Path, set[str]]:
    """A fixture with its matrices in eight bits, one with the values of these, and the names of the
    matrices."""
    number = DType(7) if number is None else number
    for kind in ("codes", "values"):
        shutil.copytree(
            FIXTURES / fixture, folder / kind, ignore=shutil.ignore_patterns("expected*.json", "holes.json")
        )
    names = set()

    def change(tree: Any, kind: int) -> None:
        for key, value in tree.items():
            if isinstance(value, torch.Tensor) and value.dim() == 2 and is_linear(f".{key}"):
                names.add(key)
                tree[key] = quantised(value, number, form)[kind]
            elif isinstance(value, dict) and key != "optimizer":
                change(value, kind)

    for at, kind in enumerate(("codes", "values")):
        for file in (folder / kind).rglob("*.pt"):
            content = load(file)
            change(content, at)
            save(content, file)
    return folder / "codes", folder / "values", names


def assert_equal(one: Path, other: Path) -> None:
    a, b = read_result(one), read_result(other)
    assert a.keys() == b.keys() and a
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


def run(*words: object) -> Ran:
    ran = cli(*words)
    assert ran.code == 0, ran.out
    return ran


@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")], ids=["merge", "hf"])
@pytest.mark.parametrize("fixture", [LEGACY, NEOX], ids=["megatron", "neox"])
def test_each_rank_has_its_own_scale(fixture: str, command: tuple[str, ...], tmp_path: Path) -> None:
    codes, values, names = two_checkpoints(fixture, tmp_path)
    assert len(names) >= 4
    verb, *options = command
    if options and fixture == LEGACY:
        options += ["--vocab-size", "1000"]
    for kind in (codes, values):
        run(verb, kind, tmp_path / f"of_{kind.name}", *options)
    assert_equal(tmp_path / "of_codes", tmp_path / "of_values")
    run("verify", tmp_path / "of_codes")
    (note,) = run("verify", codes).having("FS214")
    assert note["severity"] == "note" and "Float8Tensor" in note["message"]


def test_master_weights_are_not_held_against_eight_bits(tmp_path: Path) -> None:
    codes, values, names = two_checkpoints(ZERO, tmp_path)
    assert names
    told = run("verify", codes)
    (note,) = told.having("FS402")
    assert note["severity"] == "note" and f"of {len(names)} parameters" in note["message"]
    # Of the values they are, and differ: the case shows something.
    assert {found["code"] for found in cli("verify", values).errors} == {"FS401"}
    for weights in ("params", "masters"):
        run("merge", codes, tmp_path / weights, "--weights", weights)
    run("merge", values, tmp_path / "of_values", "--weights", "params")
    assert_equal(tmp_path / "params", tmp_path / "of_values")


@pytest.mark.parametrize(
    ("number", "form"),
    [(DType(5), E4M3), (DType(6), E4M3), (DType(8), E5M2), (7, E4M3), (Native.E4M3, E4M3)],
    ids=["first", "second", "e5m2", "number", "native"],
)
def test_formats_are_told_by_their_numbers(number: Any, form: torch.dtype, tmp_path: Path) -> None:
    codes, values, _ = two_checkpoints(LEGACY, tmp_path, number, form)
    for kind in (codes, values):
        run("merge", kind, tmp_path / f"of_{kind.name}")
    assert_equal(tmp_path / "of_codes", tmp_path / "of_values")


def test_a_manifest_hashes_codes_and_scales(tmp_path: Path) -> None:
    codes, _, _ = two_checkpoints(LEGACY, tmp_path)
    run("manifest", codes)
    run("verify", codes)
    file = next(codes.rglob("mp_rank_00_000/*.pt"))
    content = torch.load(file, weights_only=False)
    weights = [value for value in content["model"].values() if isinstance(value, Float8Tensor)]
    weights[0].arguments[2].mul_(2)
    torch.save(content, file)
    assert cli("verify", codes).code == 1


def _with(
    change: Callable[[tuple[Any, ...]], tuple[Any, ...]], kind: type = Float8Tensor
) -> Callable[[Any], Any]:
    def changed(weight: Float8Tensor) -> Any:
        return kind(*change(weight.arguments))

    return changed


REFUSED: dict[str, Callable[[Any], Any]] = {
    "another class": _with(lambda a: a, MXFP8Tensor),
    "no scale": _with(lambda a: (a[0], a[1], None, *a[3:])),
    "two scales": _with(lambda a: (a[0], a[1], torch.ones(2), *a[3:])),
    "a scale of 64 bits": _with(lambda a: (a[0], a[1], a[2].double(), *a[3:])),
    "another format": _with(lambda a: (a[0], DType(10), *a[2:])),
    "another shape": _with(lambda a: (*a[:4], torch.Size([1, 2]))),
    "codes of 16 bits": _with(lambda a: (a[0].short(), *a[1:])),
    "codes transposed": _with(lambda a: (a[0].t().contiguous().t(), *a[1:])),
    "an integer dtype": _with(lambda a: (*a[:3], torch.int32, *a[4:])),
    "more arguments": _with(lambda a: (*a, 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_such_tensor_is_refused_by_name(case: str, tmp_path: Path) -> None:
    codes, _, _ = two_checkpoints(NEOX, tmp_path)
    file = next(codes.rglob("layer_03-model_01*"))
    content = torch.load(file, weights_only=False)
    content["attention.dense.weight"] = REFUSED[case](content["attention.dense.weight"])
    torch.save(content, file)
    for command in (("merge",), ("convert", "--to", "hf")):
        ran = assert_refused(codes, tmp_path / "out", "FS514", exit=2, command=command)
        assert ran.errors[0]["tensor"] == "attention.dense.weight" and file.name in ran.errors[0]["file"]
        assert "8Tensor" in ran.errors[0]["message"]


def test_a_record_of_one_is_refused(tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves what it holds as it is: its metadata speaks of values, and the
    record has codes."""
    root = tmp_path / "dcp"
    shutil.copytree(FIXTURES / DCP, root, ignore=shutil.ignore_patterns("expected*.json"))
    content = pickle.loads((root / ".metadata").read_bytes())
    index, place = next((i, s) for i, s in content.storage_data.items() if i.fqn.endswith("down_proj.weight"))
    path = root / place.relative_path
    weight = torch.ones(content.state_dict_metadata[index.fqn].chunks[0].sizes, dtype=torch.bfloat16)
    at = path.stat().st_size
    with path.open("ab") as file:
        torch.save(quantised(weight, DType(7))[0], file)
    place.offset, place.length = at, path.stat().st_size - at
    (root / ".metadata").write_bytes(pickle.dumps(content))
    assert_refused(root, tmp_path / "out", "FS514", exit=2, command=("merge",))
