"""The four kinds of pages in a real Chromium: broken, healthy with 80 layers and 32 ranks, a conversion, 512
ranks and 128 layers."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard import Finding
from fastshard.common.codes import CODES
from fastshard.reporting import page
from fastshard.reporting.checks import FAILED, NOT_CHECKED, PASSED, Check, Read, checks
from fastshard.reporting.facts import Counts, Fact
from fastshard.reporting.grid import Grid, _Filling, banded
from fastshard.reporting.grid_cells import COPIED, DAMAGED, DOUBTFUL, Key, Row
from fastshard.reporting.report_data import Report, _groups
from helpers import FIXTURES, NEOX, copy
from test_browser import CONTRAST, MEMORY, Shown, browser, overflow
from test_page import safe

__all__ = ["browser"]

KINDS = ("broken", "healthy", "conversion", "damaged")
LEGACY = FIXTURES / "sharded/megatron_legacy_tp2_pp2"


def meshed(pp: int, tp: int, ep: int, layers: int) -> _Filling:
    """Rows as those of a checkpoint of so many ranks and layers, before anything is said of them."""
    filling = _Filling.__new__(_Filling)
    filling.rows, filling.inferred = {}, False
    for stage in range(pp):
        keys: list[Key] = [(layer, "w") for layer in range(stage * layers // pp, (stage + 1) * layers // pp)]
        keys += [(None, "embed_tokens.weight")] if stage == 0 else []
        keys += [(None, "norm.weight"), (None, "lm_head.weight")] if stage == pp - 1 else []
        held = Counter(dict.fromkeys(keys, 12))
        for t, e in itertools.product(range(tp), range(ep)):
            name = f"tp {t}, pp {stage}" + (f", ep {e}" if ep > 1 else "")
            rank = {"tp": t, "pp": stage} | ({"ep": e} if ep > 1 else {})
            filling.rows[name] = Row(rank=rank, files=[f"{name}.pt"], counts=[held])
    filling.ranks = set(filling.rows)
    return filling


def gridded(filling: _Filling) -> Grid:
    return banded(filling.rows, filling.ranks)


def report(grid: Grid, findings: list[Finding], **fields: Any) -> Report:
    counts = Counts(1000, 0, 4000, 10**9, 10**9, grid.rows, 0, 10**12)
    facts = tuple(Fact(name, "Megatron-LM", "") for name in ("Framework", "Step", "Topology", "Checked"))
    facts += (Fact("Tensors in full", "1,000 of 1,000", "from 4,000 stored", 1000, 1000),)
    return Report(
        paths=("ckpt",),
        version="1",
        facts=facts,
        findings=_groups(findings),
        not_checked="logits",
        read="all data",
        grid=grid,
        counts=counts,
        folder="/ckpt",
        checks=(Check("Files present", FAILED if findings else PASSED, "By the headers."),),
        **fields,
    )


def healthy() -> Report:
    return report(gridded(meshed(4, 8, 1, 80)), [], verdict="ok")


def damaged() -> Report:
    """A file that is truncated, a tensor with a wrong checksum, a copied file, and a doubtful expert on all
    tp ranks."""
    filling = meshed(8, 8, 8, 128)
    for name, layers, state in (
        ("tp 0, pp 5, ep 4", range(80, 96), DAMAGED),
        ("tp 7, pp 2, ep 1", (37,), DAMAGED),
        ("tp 6, pp 1, ep 3", range(16, 32), COPIED),
        *((f"tp {t}, pp 6, ep 2", (101,), DOUBTFUL) for t in range(8)),
    ):
        for layer in layers:
            filling.rows[name].mark((layer, "w"), state)
    findings = [
        Finding.of("FS101", "the file is missing", file="lost.pt", help="copy lost.pt"),
        Finding.of("FS312", "the file is truncated", file="tp 0, pp 5, ep 4.pt", rank="tp 0, pp 5, ep 4"),
        Finding.of(
            "FS301", "the checksum differs", file="tp 7, pp 2, ep 1.pt", rank="tp 7, pp 2, ep 1", tensor="a"
        ),
        Finding.of("FS303", "copied shard", file="tp 6, pp 1, ep 3.pt", rank="tp 6, pp 1, ep 3"),
        Finding.of("FS313", "rows are all zero", tensor="layers.101.w"),
    ]
    return report(gridded(filling), findings, verdict="broken")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    broken = copy(NEOX, root / "broken-ckpt")
    for file in broken.rglob("*model_01*"):
        file.unlink()
    fastshard.convert(LEGACY, root / "out", to="hf", memory=MEMORY)
    made = {
        "broken": fastshard.report(broken),
        "healthy": page.rendered(healthy()),
        "conversion": fastshard.report(root / "out", against=LEGACY, stats=True, memory=MEMORY),
        "damaged": page.rendered(damaged()),
    }
    for name, html in made.items():
        safe(html)
        (root / f"{name}.html").write_text(html)
    return {name: root / f"{name}.html" for name in made}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", KINDS)
def test_it_fits_and_can_be_read(
    browser: Any, kinds: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    view = {"width": width, "height": 900}
    with Shown(browser, kinds[name], viewport=view, color_scheme=scheme) as shown:
        assert overflow(shown) == 0
        for summary in shown.locator("summary").all():
            summary.click()
        assert overflow(shown) == 0
        assert shown.evaluate(CONTRAST, 4.5) == []
        assert shown.locator("[style]:not(.card)").count() == 0
        top = shown.locator("#cells").bounding_box()["y"] + shown.evaluate("scrollY")
        assert width < 1000 or top < 700, "the grid begins in the first screen"


@pytest.mark.parametrize("name", KINDS)
def test_it_can_be_printed(browser: Any, kinds: dict[str, Path], name: str) -> None:
    with Shown(browser, kinds[name], color_scheme="dark", viewport={"width": 720, "height": 1000}) as shown:
        shown.emulate_media(media="print")
        assert overflow(shown) == 0 and shown.evaluate(CONTRAST, 4.5) == []
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not shown.locator("button:visible").count() and shown.locator("#cells").is_visible()
        assert len(shown.pdf()) > 10_000


def test_damage_outranks_what_is_missing(kinds: dict[str, Path]) -> None:
    html = kinds["damaged"].read_text()
    assert '<h2 id="verdict">BROKEN</h2>' in html and 'class="say hurt"' in html
    assert html.index("FS312 #") < html.index("FS101 #"), "and its findings come first"
    # Equal sizes and times say nothing of flipped bits: the copy compares checksums.
    assert "3 files again from the nodes that wrote them (HOST):" in html and "rsync -acR HOST:" in html
    broken = kinds["broken"].read_text()
    assert '<h2 id="verdict">INCOMPLETE</h2>' in broken and 'class="say bad"' in broken
    assert "14 of 40 tensors can be read in full" in broken and "rsync -a --ignore-existing" in broken


def test_many_ranks_and_layers_are_about_a_hundred_cells(kinds: dict[str, Path]) -> None:
    html = kinds["damaged"].read_text()
    assert html.count('<td class="c ') <= 120 and html.count("<tr class=") <= 20
    assert "512 ranks, 128 layers" in html
    for label in (
        "pp 0 · tp 0-7 · ep 0-7",
        "pp 6 · tp 0-7 · ep 2",
        "pp 5 · tp 0 · ep 4",
        "pp 1 · tp 0 ep 0 - tp 5 ep 3",
    ):
        assert f'data-name="{label}"' in html, label
    assert kinds["healthy"].read_text().count('data-name="pp ') == 4


def test_a_band_opens_and_a_cell_filters_the_findings(browser: Any, kinds: dict[str, Path]) -> None:
    with Shown(browser, kinds["damaged"]) as shown:
        shown.get_by_role("button", name="Show the 64 rows of pp 0").click()
        assert shown.locator("#cells tr.one").count() == 64
        shown.get_by_role("button", name="Show the 64 rows of pp 0").click()
        assert shown.locator("#cells tr.one").count() == 0
        shown.locator("#cells td.s2").focus()
        shown.keyboard.press("Enter")
        assert [a.get_attribute("id") for a in shown.locator(".cause:visible").all()] == [
            a.get_attribute("id") for a in shown.locator(".cause:has-text('FS303')").all()
        ]
        assert "pp 1 · tp 6 · ep 3" in shown.locator("#chosen").text_content()
        shown.locator("#cells td.s2").focus()
        shown.keyboard.press("Escape")
        assert shown.locator(".cause:visible").count() == 5


def test_the_summary_is_copied_and_the_data_saved(browser: Any, kinds: dict[str, Path]) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with Shown(browser, kinds["broken"], permissions=permissions, accept_downloads=True) as shown:
        shown.get_by_role("button", name="Copy summary").click()
        shown.get_by_role("button", name="Copied").wait_for()
        text = shown.evaluate("navigator.clipboard.readText()")
        assert text.startswith("**INCOMPLETE: ") and "| Tensors in full | 14 of 40 |" in text
        with shown.expect_download() as download:
            shown.get_by_role("button", name="Download JSON").click()
        data = json.loads(Path(download.value.path()).read_text())
        assert data["verdict"] == "INCOMPLETE" and data["findings"][0]["code"] == "FS101"
        assert len(data["rows"]) == 40 and len(data["checks"]) == 9


def test_a_link_to_a_tensor_opens_the_list(browser: Any, kinds: dict[str, Path]) -> None:
    with Shown(browser, kinds["conversion"]) as shown:
        name = "model.layers.1.mlp.down_proj.weight"
        assert not shown.locator("#hits").is_visible()
        shown.evaluate(f"location.hash = 't-{name}'")
        shown.locator(f"[id='t-{name}']").wait_for()
        assert shown.locator("#hits").is_visible()


def test_without_script_the_tensors_and_findings_are_there(browser: Any, kinds: dict[str, Path]) -> None:
    with Shown(browser, kinds["conversion"], java_script_enabled=False) as shown:
        assert shown.locator("#hits tbody tr").count() == 39
        assert shown.locator(".map > li").count() >= 8 and not shown.locator("[data-save]").is_visible()
    with Shown(browser, kinds["damaged"], java_script_enabled=False) as shown:
        assert shown.locator("#cells a[href^='#f']").count() == 4


def test_a_conversion_says_what_became_of_what(kinds: dict[str, Path]) -> None:
    html = kinds["conversion"].read_text()
    for words in (
        "What became of what",
        "columns joined",
        "rows joined",
        "equal on all ranks, one kept",
        "bit for bit",
    ):
        assert words in html, words


@pytest.mark.parametrize("made", [healthy, damaged])
def test_the_same_data_is_the_same_page(made: Any) -> None:
    assert page.rendered(made()) == page.rendered(made())


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_fails_a_check(code: str) -> None:
    """A page with an error has no list in which all is well."""
    read = Read("ckpt", 1, 1, provable=True, data=True, manifest=False)
    failed = [c for c in checks([Finding.of(code, "x", severity="error")], read) if c.state == FAILED]
    assert len(failed) == 1 and code in failed[0].text
    assert not [c for c in checks([], read) if c.state == FAILED]


def test_what_was_not_read_is_not_passed() -> None:
    read = Read("ckpt", 1, 1, provable=False, data=False, manifest=False)
    made = {c.name: c for c in checks([], read)}
    for name in (
        "Files present",
        "No copies or swaps",
        "Data readable, checksums",
        "Equal replicas",
        "Values",
    ):
        assert made[name].state == NOT_CHECKED, name
    assert made["Values"].command == "fastshard report ckpt --stats"
