"""What `verify` returns: the sequence of its findings, which says whether all is well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fastshard
import pytest
from helpers import HF, NEOX, STEP, copy, layer_file

MEMORY = "2GiB"


@pytest.mark.parametrize("subset", [None, (1, 2)])
def test_a_selection_says_how_much_it_is_of_the_checkpoint(subset: tuple[int, int] | None) -> None:
    chosen = [name for name in fastshard.open(HF) if name.endswith("q_proj.weight")]
    verdict = fastshard.verify(HF, memory=MEMORY, include=["*q_proj*"], subset=subset)
    assert verdict.checked is not None and verdict.checked.part is not None
    assert f"a selection: {len(chosen)} of {len(fastshard.open(HF))} tensors" in verdict.checked.part
    assert len(chosen) == 4


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = copy(NEOX, tmp_path / "ckpt")
    (root / STEP / layer_file(3, 1)).unlink()
    return root


def test_a_good_checkpoint_is_ok() -> None:
    verdict = fastshard.verify(HF, memory=MEMORY)
    assert verdict.ok and verdict.checked is not None and verdict.checked.ending == "complete"
    verdict.raise_for_errors()
    assert repr(verdict) == f"<fastshard.Verdict ok: complete, {len(verdict)} warnings>"


def test_a_broken_one_raises_when_it_is_asked_to(broken: Path) -> None:
    verdict = fastshard.verify(broken, memory=MEMORY)
    assert not verdict.ok and verdict.checked is None
    assert repr(verdict).startswith("<fastshard.Verdict INCOMPLETE: 1 error; ")
    with pytest.raises(fastshard.IncompleteError, match=layer_file(3, 1)):
        verdict.raise_for_errors()


def test_it_is_the_sequence_of_its_findings(broken: Path) -> None:
    verdict = fastshard.verify(broken, memory=MEMORY)
    assert isinstance(verdict, Sequence) and len(verdict) == len(verdict.findings) > 0
    assert verdict == verdict.findings == list(verdict) == [*verdict[:1], *verdict[1:]]
    assert verdict[0] in verdict and verdict != [] and verdict != "a"
    assert [f.code for f in verdict if f.severity == "error"] == ["FS101"]


def test_it_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match=r"use \.ok"):
        bool(fastshard.verify(HF, memory=MEMORY))
    with pytest.raises(TypeError):
        hash(fastshard.verify(HF, memory=MEMORY))


def test_a_notebook_shows_it(broken: Path) -> None:
    page = fastshard.verify(broken, memory=MEMORY)._repr_html_()
    assert "INCOMPLETE" in page and layer_file(3, 1) in page


# --- the rest of what people see at a prompt


def test_names_are_completed_between_brackets() -> None:
    checkpoint = fastshard.open(NEOX)
    assert checkpoint._ipython_key_completions_() == list(checkpoint)


def test_public_names_alone_are_listed() -> None:
    fastshard.open(NEOX)
    assert dir(fastshard) == sorted(fastshard.__all__)


def test_long_results_are_short_at_the_prompt(tmp_path: Path) -> None:
    stats = repr(fastshard.stats(NEOX, memory=MEMORY))
    assert stats.startswith("<fastshard.Stats: 40 tensors>\n  ") and stats.endswith("\n  ... 35 more")
    fastshard.merge(HF, tmp_path / "a", memory=MEMORY, dtype="f32")
    different = repr(fastshard.diff(HF, tmp_path / "a", memory=MEMORY))
    assert different.startswith("<fastshard.Differences: 39 tensors>") and len(different.splitlines()) == 7
