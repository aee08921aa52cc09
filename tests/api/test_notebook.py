"""What notebooks show: everything that has a table has one, and nothing of a stranger's is more than text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.common import notebook_html
from fastshard.errors import Finding
from helpers import HF, NEOX, TP4, copy
from hostile import NAMES, Parsed, checkpoint

MEMORY = "2GiB"
#: What a repr is made of: a stranger's element would be another one, or have other attributes.
ELEMENTS = {"div", "p", "b", "ul", "li", "br", "small", "table", "tr", "th", "td"}


def shown(value: Any) -> Parsed:
    text = value._repr_html_()
    parsed = Parsed(text)
    assert {tag for tag, _ in parsed.elements} <= ELEMENTS
    assert {name for _, attributes in parsed.elements for name in attributes} <= {"style", "title"}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    return parsed


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda out: fastshard.open(NEOX), "2.attention.dense.weight"),
        (lambda out: fastshard.open(NEOX, to="hf"), "verify() checks it"),
        (lambda out: fastshard.plan(NEOX, "hf"), "gpt_neox.layers.0.attention.dense.weight"),
        (lambda out: fastshard.convert(TP4, out, memory=MEMORY), "fastshard.Manifest hf"),
        (lambda out: fastshard.stats(TP4, memory=MEMORY), "statistics of 21 tensors"),
        (lambda out: fastshard.diff(TP4, TP4, memory=MEMORY), "no difference"),
    ],
    ids=["checkpoint", "view", "plan", "manifest", "stats", "diff"],
)
def test_each_is_a_table(make: Any, says: str, tmp_path: Path) -> None:
    text = "".join(shown(make(tmp_path / "out")).texts)
    assert says in text


def test_a_broken_checkpoint_says_what_is_wrong(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    (root / "tp_rank_02.safetensors").unlink()
    text = "".join(shown(fastshard.open(root)).texts)
    assert "error FS101" in text and "copy tp_rank_02.safetensors" in text


def test_a_difference_shows_its_figures(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    file = root / "model-00001-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\x00\x41")
    found = fastshard.diff(HF, root, memory=MEMORY)
    assert len(found) == 1 and found[0].tensor in "".join(shown(found).texts)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "ckpt")
    ckpt = fastshard.open(root)
    for value in (
        ckpt,
        fastshard.plan(ckpt),
        fastshard.stats(ckpt, memory=MEMORY),
        fastshard.diff(ckpt, checkpoint(tmp_path / "other"), memory=MEMORY),
        fastshard.Manifest(
            {"kind": "<b>", "files": [], "tensors": [{"name": n, "blake3": "<i>"} for n in NAMES]}, []
        ),
    ):
        parsed = shown(value)
        assert "onerror=alert(1)" in "".join(parsed.texts), "the name is not shown at all"


def test_hostile_findings_are_text() -> None:
    finding = Finding.of("FS101", NAMES[0], file=NAMES[1], tensor=NAMES[2], help=NAMES[0])

    parsed = Parsed(
        notebook_html.table(NAMES[0], NAMES[:2], [NAMES[2:4]], 1, findings=[finding], below=NAMES[1])
    )
    assert {tag for tag, _ in parsed.elements} <= ELEMENTS


def test_long_ones_are_cut_and_counted() -> None:
    many = fastshard.Manifest(
        {"kind": "merge", "files": [], "tensors": [{"name": f"t{i}", "blake3": ""} for i in range(1000)]}, []
    )
    parsed = shown(many)
    assert len(parsed.all("tr")) == 201 and "200 of 1,000 shown" in "".join(parsed.texts)


def test_they_are_still_plain_data() -> None:
    found = fastshard.stats(TP4, include=["model.norm.weight"], memory=MEMORY)
    assert isinstance(found, dict) and found == dict(found) and list(found) == ["model.norm.weight"]
    none = fastshard.diff(TP4, TP4, memory=MEMORY)
    assert none == [] and json.dumps(none) == "[]"


def test_nothing_is_imported_for_it_beforehand() -> None:
    script = (
        "import sys, fastshard; print(*(m for m in ('jinja2', 'vl_convert', "
        "'fastshard.common.notebook_html', 'fastshard.reporting.page') if m in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
