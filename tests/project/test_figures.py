"""What benchmarks make of their figures: verdicts, failures and what was measured beside other work are
written as they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))

import all_bars
from make_figures import BLOCK, PAGES, build_few, build_page, find_objection
from measure import Place, Result, Target, find_lack

ROOT = Path(__file__).parents[2]
LARGE = 2 << 30


def build_result(load: float = 0.0, wall: float = 1.0) -> Result:
    """A case of two rounds."""
    sides = {"fastshard": wall, "cp + fsync": 2.0}
    records = {
        side: [{"wall": value, "cpu": value, "anonymous": 1 << 20, "imports": 0, "load": load}] * 2
        for side, value in sides.items()
    }
    targets = (
        Target("wall_ratio", 0.6, least_bytes=LARGE),
        Target("gb_per_second", 1, at_least=True, least_cores=16),
    )
    return Result(
        "row merge, durable", "fastshard", "cp + fsync", targets, LARGE, records, state="ext4, warm"
    )


def build_document(*bars: dict[str, Any], loaded: bool = False) -> dict[str, Any]:
    machine = {
        "cpu": "A",
        "cores": "2",
        "memory": "24 GiB",
        "kernel": "6.18",
        "filesystem": "ext4",
        "python": "3",
    }
    return {
        "date": "2026-01-01",
        "revision": "abc",
        "core": "optimised",
        "versions": {},
        "machine": machine,
        "size": LARGE,
        "rounds": 5,
        "memory_file_system": "tmpfs",
        "load": 0.0,
        "touch_seconds_per_gib": [1, 1],
        "loaded": loaded,
        "bars": list(bars),
    }


def run_results(monkeypatch: pytest.MonkeyPatch, *results: Result | Exception) -> dict[str, Any]:
    """The record of a bar whose function yields these."""

    def measure(place: Place) -> Iterator[Result]:
        for result in results:
            if isinstance(result, Exception):
                raise result
            yield result

    monkeypatch.setattr("measure.measure_them", measure, raising=False)
    bar = all_bars.Bar("a bar", ("measure.measure_them",), "a limit")
    return all_bars.run_bar("P1", bar, Place(Path(), Path(), LARGE, 2))


def test_verdicts() -> None:
    figures = build_result().figures()
    fast, slow = Target("wall_ratio", 0.5, least_bytes=LARGE), Target("wall_ratio", 0.4)
    assert fast.judge(figures, LARGE, 2) == "reached"
    assert slow.judge(figures, LARGE, 2) == "missed"
    assert fast.judge(figures, LARGE // 2, 2) == "needs 2 GiB"
    assert Target("wall_ratio", 1, least_cores=16).judge(figures, LARGE, 2) == "needs 16 cores"
    assert Target("gb_per_second", 9, at_least=True).judge(figures, LARGE, 2) == "missed"
    assert Target("growth", 1).judge(figures, LARGE, 2) == "not measured"


def test_missed_bar_is_missed_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    page = build_page(build_document(run_results(monkeypatch, build_result(wall=1.6))))
    assert "**missed**: 0.8" in page and "a limit" in page and "no release figures" not in page


def test_loaded_machine_gives_no_release_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = run_results(monkeypatch, build_result(load=0.3))
    assert bar["cases"][0]["loaded"]
    document = build_document(bar, loaded=True)
    page = build_page(document)
    assert "reached; measured beside other work" in page and "These are no release figures" in page
    assert find_objection(document) == "the machine was loaded"


def test_failure_is_recorded_and_missing_peer_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Result("a case", "fastshard", "peer", (), 0, reason=find_lack(package="no_such_package"))
    bar = run_results(monkeypatch, lacking, ValueError("broken"))
    assert bar["failed"] and bar["reason"] == "failed: ValueError: broken"
    assert bar["cases"][0]["reason"] == "not run: needs no_such_package"
    assert not run_results(monkeypatch, ModuleNotFoundError("no torch", name="torch"))["failed"]
    page = build_page(build_document(bar))
    assert "not run: needs no_such_package" in page and "failed: ValueError: broken" in page


def test_few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("make_figures.FEW", (("P1", "row merge, durable", "cp + fsync", "merge"),))
    assert "| merge | **0.50x** | 1 / 1 |" in build_few(
        build_document(run_results(monkeypatch, build_result()))
    )


def test_page_is_made_of_the_figures() -> None:
    document = json.loads((ROOT / "benches/figures.json").read_text())
    assert (ROOT / "docs/figures.md").read_text() == build_page(document)
    assert [bar["bar"] for bar in document["bars"]] == list(all_bars.BARS)
    for page in PAGES:
        assert len(BLOCK.findall((ROOT / page).read_text())) == 1, page
