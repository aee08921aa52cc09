"""The page in a real Chromium: no error, nothing loaded, search and keyboard, phone, dark, print, contrast.

Skipped where there is no Chromium; with ``FASTSHARD_NEED_BROWSER`` set, as in CI, that is an error.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from helpers import NEOX, TP4, copy
from hostile import NAMES, checkpoint
from safetensors.torch import save_file

MEMORY = "2GiB"
CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
NEEDED = bool(os.environ.get("FASTSHARD_NEED_BROWSER"))

if not NEEDED:
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium; set FASTSHARD_NEED_BROWSER to fail instead", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "FASTSHARD_NEED_BROWSER is set and there is no Chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a good, a broken, a converted, a changed, a hostile and an unreadable checkpoint."""
    root = tmp_path_factory.mktemp("pages")
    broken = copy(TP4, root / "broken")
    (broken / "tp_rank_02.safetensors").unlink()
    fastshard.convert(NEOX, root / "converted", stats=True, memory=MEMORY)
    torch.manual_seed(0)
    for name in ("before", "after"):
        tensors = {
            f"model.layers.{i}.{r}.weight": torch.randn(64, 96) * 0.02
            for i in range(6)
            for r in ("up", "down", "norm")
        }
        if name == "after":
            tensors["model.layers.3.up.weight"] *= 6
            tensors["model.layers.4.down.weight"][8:24] = 0
            tensors["model.layers.5.norm.weight"][0, 0] = float("nan")
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors")
    evil = checkpoint(root / "evil")
    (root / "nothing").mkdir()
    made = {
        "good": fastshard.report(NEOX),
        "broken": fastshard.report(broken),
        "converted": fastshard.report(root / "converted", against=NEOX, stats=True, memory=MEMORY),
        "changed": fastshard.report(root / "after", against=root / "before", stats=True, memory=MEMORY),
        "evil": fastshard.report(evil, stats=True, memory=MEMORY),
        "unopened": fastshard.report(root / "nothing"),
    }
    for name, html in made.items():
        (root / f"{name}.html").write_text(html)
    return {name: root / f"{name}.html" for name in made}


ALL = ("good", "broken", "converted", "changed", "evil", "unopened")


class Shown:
    """A page in the browser, with all that it says on the console and all that it asks for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("dialog", lambda d: (self.said.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: object, *rest: object) -> None:
        asked = [url for url in self.asked if not url.startswith(("file:", "data:,"))]
        files = [url for url in self.asked if url.startswith("file:")]
        self.context.close()
        if kind is None:
            assert self.said == [], "the page says something on the console"
            assert asked == [] and len(files) == 1, "the page loads something"


def overflow(page: Any) -> int:
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_loaded_said_or_wider_than_the_screen(
    browser: Any, pages: dict[str, Path], name: str, width: int, tmp_path: Path
) -> None:
    with Shown(browser, pages[name], viewport={"width": width, "height": 780}) as page:
        assert overflow(page) == 0
        # What is wide is scrolled within its own box, and none of it is cut off.
        cut = page.evaluate(
            """[...document.querySelectorAll("p, h1, h2, h3, li, dd, figcaption, pre")]
               .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && !e.closest(".scroll"))
               .map(e => e.textContent)"""
        )
        assert cut == []
        shot = page.screenshot(path=tmp_path / "shot.png", full_page=True)
        assert len(shot) > 10_000


def test_hostile_names_do_nothing(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["evil"]) as page:
        assert (
            page.evaluate(
                "document.images.length + document.querySelectorAll('svg[onload], base, iframe').length"
            )
            == 0
        )
        page.keyboard.press("/")
        page.keyboard.type("onerror")
        row = page.locator("#hits tbody tr").first
        assert NAMES[0] in row.locator("th").text_content()
        row.click()
        page.wait_for_selector("#hits td.open svg")
        for cell in page.locator("#cells tbody td").all()[:20]:
            cell.hover()
        assert page.evaluate("document.images.length") == 0


def test_the_policy_holds(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    """A page into which something was injected all the same does not run or load it."""
    injected = (
        "<script>document.title='run'</script><img src='https://evil.example/x.png'><p "
        "style='position:fixed'>x</p>"
    )
    (tmp_path / "bad.html").write_text(pages["good"].read_text().replace("<main", f"{injected}<main"))
    shown = Shown(browser, tmp_path / "bad.html")
    assert "run" not in shown.page.title()[:4] and shown.page.title().startswith("OK")
    assert sum("Content Security Policy" in text for text in shown.said) == 3
    shown.context.close()


def test_search_sort_and_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["changed"]) as page:
        lines = page.locator("#hits tbody tr")
        assert lines.count() == 18
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type("LAYERS.3 up")
        assert lines.count() == 1 and "1 tensor." in page.locator("#found").text_content()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator("#hits td.open svg path").count() == 1
        assert "linear axis" in page.locator("#hits td.open").text_content()
        page.keyboard.press("Enter")
        assert page.locator("#hits td.open").count() == 0
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Escape")
        assert lines.count() == 18
        page.get_by_role("button", name="std").click()
        assert "model.layers.3.up.weight" in lines.first.text_content()
        assert page.locator("#hits th[aria-sort=descending]").count() == 1
        page.get_by_role("button", name="tensor").click()
        assert "model.layers.0.down.weight" in lines.first.text_content()


def test_the_grid_is_read_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["broken"]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip", (
            "the first stop leads past the head"
        )
        assert page.locator("#cells td[tabindex='0']").count() == 1, "the grid is one stop of the tab order"
        page.locator("#cells td[tabindex='0']").focus()
        readout = page.locator("#readout")
        assert readout.text_content() == "tp 2, embedding: missing, 1 tensor"
        page.keyboard.press("ArrowRight")
        assert readout.text_content() == "tp 2, layer 0: missing, 9 tensors"
        page.keyboard.press("ArrowDown")
        assert readout.text_content() == "tp 3, layer 0: complete, 9 tensors"
        page.keyboard.press("End")
        assert ", head: complete" in readout.text_content()
        for _ in range(5):
            page.keyboard.press("ArrowUp")
        assert readout.text_content().startswith("tp 0-1")


def test_the_bins_as_they_are_on_request(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["changed"]) as page:
        seen = lambda kind: [s.is_visible() for s in page.locator(f".dist svg.{kind}").all()]  # noqa: E731
        page.locator("#numbers summary").click()
        assert all(seen("lin")) and not any(seen("log")) and seen("lin")
        page.locator("#logarithmic").check()
        assert all(seen("log")) and not any(seen("lin"))


def test_without_script_all_is_there(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["broken"], java_script_enabled=False) as page:
        assert page.locator("#cells td.s0").count() == 5 and page.locator("#cells td.s0").first.is_visible()
        assert page.get_by_text("copy tp_rank_02.safetensors from the node").first.is_visible()
        assert not page.locator("#search").is_visible(), "what needs the script is not shown"
    with Shown(browser, pages["changed"], java_script_enabled=False) as page:
        assert page.locator(".dist svg.lin").first.is_visible()


def test_in_print_all_is_shown_and_light(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["changed"], color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("nav").is_visible() and not page.locator("#search").is_visible()
        assert page.locator("#cells").is_visible() and page.locator(".dist svg.lin").first.is_visible()
        scrolled = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.offsetParent && "
            "getComputedStyle(e).overflowX !== 'visible').length"
        )
        assert scrolled == 0
        assert len(page.pdf()) > 10_000


#: Luminance and contrast by WCAG 2, over all texts that are seen: (contrast, text) of those below the limit.
CONTRAST = """(limit) => {
  const parse = (c) => (c.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
  const lum = ([r, g, b]) => [r, g, b]
    .map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const below = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("script, style")) continue;
    if (!element.getClientRects().length) continue;
    let back = element;
    while (back && (parse(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0) back = back.parentElement;
    const ground = parse(getComputedStyle(back || document.body).backgroundColor);
    const style = getComputedStyle(element);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [lum(ink), lum(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const text = walker.currentNode.textContent.trim().slice(0, 40);
    if (ratio < limit) below.push([ratio.toFixed(2), text, element.className.toString()]);
  }
  return below;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ALL)
def test_texts_have_contrast(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    with Shown(browser, pages[name], color_scheme=scheme) as page:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        assert page.evaluate(CONTRAST, 4.5) == []


def test_states_are_told_without_colour(pages: dict[str, Path]) -> None:
    """Each state has a mark of its own, in the grid and in the legend, and its background has contrast to
    it."""
    from fastshard.reporting.grid_cells import STATES

    assert len({state.mark for state in STATES}) == len({state.name for state in STATES}) == len(STATES)
    html = pages["broken"].read_text()
    assert re.search(r'<td class="c s0"[^>]*><a href="#f1"><b aria-hidden="true">✕', html)
    assert '<td class="c s6"' in html
    css = html.split("<style>")[1].split("</style>")[0]
    assert all(f".s{i} {{ background" in css for i in range(len(STATES)))


def test_motion_is_reduced_where_asked(browser: Any, pages: dict[str, Path]) -> None:
    for motion, behaviour in (("reduce", "auto"), ("no-preference", "smooth")):
        with Shown(browser, pages["good"], reduced_motion=motion) as page:
            assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == behaviour


def test_focus_is_seen(browser: Any, pages: dict[str, Path]) -> None:
    with Shown(browser, pages["changed"]) as page:
        for _ in range(12):
            page.keyboard.press("Tab")
            style = page.evaluate(
                "(s => s.outlineStyle + s.outlineWidth)(getComputedStyle(document.activeElement))"
            )
            assert style != "none0px" and "none" not in style
