"""`diff` as a gate: how far tensors lie apart, and whether that is close enough."""

from __future__ import annotations

import math
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import cli
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

A = {"a": torch.tensor([1.0, -2.0, 0.0, 100.0]), "b": torch.arange(6.0).reshape(2, 3)}


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(tmp_path: Path, **tensors: torch.Tensor) -> tuple[Path, Path]:
    return saved(tmp_path / "one", A), saved(tmp_path / "two", A | tensors)


def test_figures_are_those_of_torch(tmp_path: Path) -> None:
    other = A["a"] + torch.tensor([0.0, 0.5, 0.25, 0.0])
    (difference,) = fastshard.diff(*changed(tmp_path, a=other), memory="2GiB")
    delta = (A["a"] - other).norm() / A["a"].norm()
    cosine = torch.nn.functional.cosine_similarity(A["a"], other, dim=0)
    assert difference.relative == pytest.approx(delta.item(), rel=1e-6)
    assert difference.cosine == pytest.approx(cosine.item(), rel=1e-6)
    assert (difference.differing, difference.beyond, difference.largest) == (2, 2, 0.5)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12),
    shift=st.floats(0, 2, width=32),
    atol=st.sampled_from([0.0, 0.1, 1.0]),
    rtol=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_what_is_close_is_what_torch_calls_close(
    values: list[float], shift: float, atol: float, rtol: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("close")
    # Without -0.0, whose bytes differ from those of 0.0.
    a = torch.tensor(values, dtype=torch.float64) + 0.0
    b = a + shift
    one, two = saved(folder / "one", {"a": a}), saved(folder / "two", {"a": b})
    differences = fastshard.diff(one, two, atol=atol, rtol=rtol, memory="2GiB")
    assert (not differences) == torch.allclose(a, b, atol=atol, rtol=rtol)
    assert len(differences) + len(differences.close) == int(not torch.equal(a, b))


def test_no_number_is_close_to_nothing(tmp_path: Path) -> None:
    one, two = changed(tmp_path, a=torch.tensor([1.0, math.nan, 0.0, 100.0]))
    (difference,) = fastshard.diff(one, two, atol=1e9, memory="2GiB")
    assert difference.beyond == 1
    one, two = (
        saved(tmp_path / "x", {"a": torch.tensor([math.inf])}),
        saved(tmp_path / "y", {"a": torch.tensor([0.0])}),
    )
    assert len(fastshard.diff(one, two, atol=1e9, rtol=1e9, memory="2GiB")) == 1


def test_other_dtypes_are_compared_by_value_when_asked(tmp_path: Path) -> None:
    one, two = changed(tmp_path, a=A["a"].bfloat16(), b=A["b"].bfloat16())
    assert [d.kind for d in fastshard.diff(one, two, memory="2GiB")] == ["dtype", "dtype"]
    equal = fastshard.diff(one, two, ignore_dtype=True, memory="2GiB")
    assert equal == [] and len(equal.close) == 2 and equal.compared == 2
    rounded = saved(tmp_path / "three", A | {"a": (A["a"] + 0.001).bfloat16()})
    assert [d.tensor for d in fastshard.diff(one, rounded, ignore_dtype=True, memory="2GiB")] == ["a"]
    assert fastshard.diff(one, rounded, ignore_dtype=True, rtol=0.02, memory="2GiB", atol=0.01) == []


def test_shapes_and_missing_tensors_are_never_close(tmp_path: Path) -> None:
    one, two = changed(tmp_path, b=torch.zeros(3, 2), c=torch.zeros(1))
    kinds = {d.tensor: d.kind for d in fastshard.diff(one, two, atol=1e9, ignore_dtype=True, memory="2GiB")}
    assert kinds == {"b": "shape", "c": "only_b"}


def test_the_command_is_a_gate_and_prints_a_table(tmp_path: Path) -> None:
    one, two = changed(tmp_path, a=A["a"] + torch.tensor([0.0, 0.5, 0.0, 0.0]), b=A["b"] + 0.001)
    ran = cli("diff", one, two, "--atol", 0.01, json_output=False)
    lines = ran.out.splitlines()
    assert ran.code == 1 and lines[0].split("  ")[0] == "TENSOR" and "COSINE" in lines[0]
    assert lines[1].split()[:4] == ["a", "values", "25.0%", "0.5"] and len(lines) == 3
    assert (
        lines[2] == f"{one}, {two}: DIFFERENT, 1 of 2 tensors, 1 of 2 tensors within the tolerance (exit 1)"
    )
    close = cli("diff", one, two, "--atol", 0.6)
    assert close.code == 0 and close.doc["equal"] and close.doc["close"] == 2 and close.findings == []
    text = cli("diff", one, two, "--atol", 0.6, json_output=False).out
    assert text == f"{one}, {two}: EQUAL, 2 of 2 tensors within the tolerance (exit 0)\n"


@pytest.mark.parametrize(
    "words", [("--atol", "-1"), ("--rtol", "nan"), ("--rtol", "inf"), ("--atol", "many")]
)
def test_a_tolerance_that_is_none(words: tuple[str, str], tmp_path: Path) -> None:
    ran = cli("diff", *changed(tmp_path), *words)
    assert ran.code == 2 and ran.having("FS515")
