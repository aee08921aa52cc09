"""What crosses between Python and the core: findings as one class, records as dicts."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from fastshard import _core
from fastshard.models import tensor_words

FULL: dict[str, Any] = {
    "file": "a/b",
    "rank": "tp 1",
    "host": "n0",
    "tensor": "w",
    "layers": range(3, 5),
    "axis": "L",
    "count": 7,
    "expected": "x",
    "got": "y",
    "help": "z",
    "decided": "accept copies",
    "unnoticed": "u",
}


def test_a_finding_says_what_it_was_made_of() -> None:
    finding = fastshard.Finding("FS103", "warning", "gone", **FULL)
    assert {key: getattr(finding, key) for key in FULL} == FULL
    assert str(finding) == "a/b: w: gone (tp 1 on n0): expected x, got y"
    assert finding == fastshard.Finding.from_dict(json.loads(json.dumps(finding.to_dict())))
    for again in (pickle.loads(pickle.dumps(finding)), copy.deepcopy(finding), finding.replace()):
        assert again == finding and hash(again) == hash(finding) and again in {finding}


@pytest.mark.parametrize("field", FULL)
def test_findings_that_differ_in_a_field_are_not_equal(field: str) -> None:
    finding = fastshard.Finding("FS103", "warning", "gone", **FULL)
    less = finding.replace(**{field: None})
    assert getattr(less, field) is None and less != finding
    assert field not in less.to_dict() and less.replace(**{field: FULL[field]}) == finding


def test_a_finding_does_not_change() -> None:
    finding = fastshard.Finding.of("FS101", "gone")
    assert finding.severity == "error"
    with pytest.raises(AttributeError):
        finding.message = "here"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: fastshard.Finding.of("FS999", "x"), ValueError),
        (lambda: fastshard.Finding("FS101", "fatal", "x"), ValueError),
        (lambda: fastshard.Finding.of("FS101", "x", colour="red"), TypeError),
        (lambda: fastshard.Finding.of("FS101", 5), TypeError),  # type: ignore[arg-type]
        (lambda: fastshard.Finding.of("FS101", "x", layers=range(0)), ValueError),
        (lambda: fastshard.Finding.of("FS101", "x", layers=range(0, 9, 2)), ValueError),
    ],
)
def test_what_no_finding_can_be_is_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_names_that_are_no_text_are_kept_with_escapes() -> None:
    name = b"a\xff".decode("utf-8", "surrogateescape")
    assert fastshard.Finding.of("FS101", name, file=name).file == r"a\udcff"


def _kept(tmp_path: Path, values: Any) -> Any:
    """What a manifest has of values that were handed to the core."""
    writer = _core.ResultWriter(str(tmp_path / "out"), 4, 1 << 20, False, False)
    writer.add("w", "F32", [1], np.zeros(4, np.uint8))
    manifest, findings = writer.finish({}, [], {"given": values}, tensor_words.declared(), False)
    assert findings == []
    return json.loads(manifest)["values"]["given"]


def test_a_record_is_what_json_would_make_of_it(tmp_path: Path) -> None:
    given = {
        "whole": [0, -1, 2**63, 2**64 - 1, -(2**63)],
        "large": 10**30,
        "real": [0.0, -0.5, 1e300],
        "words": ("a", "ü", ""),
        "nested": {"true": True, "none": None, "empty": [], "deep": {"x": [{}]}},
        True: 1,
        None: 2,
        7: 3,
    }
    assert _kept(tmp_path, given) == json.loads(
        json.dumps(given), parse_int=lambda n: int(n) if abs(int(n)) < 2**64 else float(n)
    )


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 10**400, "a\udc80", {"a\udc80": 1}, object(), {1, 2}, b"x", _deep()]
)
def test_what_no_record_can_hold_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(_core.CoreError) as raised:
        _kept(tmp_path, value)
    assert [finding.code for finding in raised.value.args[0]] == ["FS515"]
