"""The site: it builds without a warning, loads nothing from the network, and everything that is public is in
its navigation."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import fastshard
import pytest
from blocks import PAGES, ROOT
from fastshard.cli.parser import build
from fastshard.cli.verbs import VERBS
from fastshard.common import options
from fastshard.common.codes import CODES

#: Codes of a run that another process, a signal, a race, a full disk, other rights or a defect stops, and of
#: numbers that differ from machine to machine: their pages have no example.
WITHOUT_EXAMPLE = {
    f"FS{number}" for number in (502, 503, 506, 509, 510, 511, 512, 516, 517, *range(519, 526))
}


def loaded(name: str) -> ModuleType:
    """A program of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Html(HTMLParser):
    """What a page loads, where its navigation leads, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.nav: list[str] = []
        self.ids: set[str] = set()
        self.classes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        self.classes |= set(given.get("class", "").split())
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "md-nav__link" in given.get("class", ""):
                self.nav.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":  # names the page's address; nothing is loaded
            self.loads.append(given.get("href", ""))
        self.loads += [given[key] for key in ("src", "srcset", "data", "poster") if key in given]
        self.loads += re.findall(r"url\(([^)]*)\)", given.get("style", ""))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install --group docs")
    pytest.importorskip("mkdocstrings", reason="pip install --group docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """By address: the folder that holds the page's index.html."""
    return {
        str(path.parent.relative_to(site)): Html(path.read_text(encoding="utf-8"))
        for path in site.rglob("index.html")
    }


def elsewhere(address: str) -> bool:
    return bool(re.match(r"^\s*['\"]?\s*(https?:)?//", address))


def test_no_page_loads_anything_from_the_network(site: Path, pages: dict[str, Html]) -> None:
    found = {page: [a for a in html.loads if elsewhere(a)] for page, html in pages.items()}
    assert not {page: loads for page, loads in found.items() if loads}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not [a for a in re.findall(r"(?:@import|url\()\s*([^;)]+)", text) if elsewhere(a)], sheet
    # The theme's program fetches a library where a page has one of these.
    assert not [page for page, html in pages.items() if html.classes & {"mermaid", "md-source"}]


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[str, Html]) -> None:
    lost = []
    for page, html in pages.items():
        for link in html.links:
            path, _, anchor = link.partition("#")
            if re.match(r"^\w+:", link):
                continue
            to = (site / page / path).resolve()
            there = pages.get(os.path.relpath(to, site))
            if not to.exists() or (anchor and there is not None and anchor not in there.ids):
                lost.append((page, link))
    assert not lost


def in_nav(pages: dict[str, Html]) -> set[str]:
    return {os.path.normpath(link) for link in pages["."].nav if not link.startswith("#")}


def test_everything_is_in_the_navigation(pages: dict[str, Html]) -> None:
    reached = in_nav(pages)
    assert not {f"reference/cli/{verb.name}" for verb in VERBS} - reached
    assert not {f"reference/python/{name}" for name in fastshard.__all__} - reached
    written = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")}
    assert not {re.sub(r"(^|/)index$", "", page) or "." for page in written} - reached
    # Test bookkeeping, linked from the front page.
    assert set(pages) - reached == {"project/blocks"}


def test_llms_txt_names_every_page_and_has_no_dead_link(site: Path, pages: dict[str, Html]) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# fastshard\n\n> Merge, convert and verify the shards")
    site_url = "https://fastshard.github.io/fastshard/"
    entry = re.compile(rf"^- \[[^\]]+\]\({re.escape(site_url)}([^)#]*)\)(?:: (.+))?$", re.MULTILINE)
    named = dict(entry.findall(text))
    lines = [line for line in text.splitlines()[3:] if line and not line.startswith("## ")]
    assert len(lines) == len(named) and all((site / path / "index.html").is_file() for path in named)
    assert {os.path.normpath(path) for path in named} == in_nav(pages)
    guides = [path for path in named if path.startswith("guides/")]
    assert len(guides) > 20 and all(len(named[path].split()) > 3 for path in guides)


def test_every_code_is_on_the_page_of_findings(pages: dict[str, Html]) -> None:
    assert not [code for code in CODES if code not in pages["findings"].text]
    assert not set(CODES) - pages["findings"].ids
    unsigned = set() if importlib.util.find_spec("model_signing") else {"FS315"}
    for code in CODES:
        text = pages[f"reference/findings/{code}"].text
        parts = ["What it means"] + (["Why it happens", "How to confirm"] if code < "FS500" else [])
        assert all(part in text for part in parts), code
        # What a command prints, by the checkpoints that tests damage.
        assert code in WITHOUT_EXAMPLE | unsigned or "$ fastshard" in text, code


@pytest.mark.parametrize("code", sorted(CODES.keys() - WITHOUT_EXAMPLE))
def test_every_code_that_one_command_shows_has_an_example(code: str) -> None:
    for library in ("torch", "model_signing") if code == "FS315" else ("torch",):
        pytest.importorskip(library, reason=f"{library} is not installed (pip install '.[all]')")
    command, *lines = loaded("finding_pages").example(code)
    assert command.startswith("$ fastshard ") and len(lines) <= 25
    severities = ["error"] if CODES[code].severity == "error" else ["error", "warning", "note"]
    assert [line for line in lines if line.startswith(tuple(f"{word} {code}: " for word in severities))], (
        lines
    )
    # Of what it shows only the checkpoint's own files are of this machine.
    assert not [line for line in lines if tempfile.gettempdir() in line or "--no-settings" in line]


def test_every_flag_is_on_its_commands_page(pages: dict[str, Html]) -> None:
    parser = build()
    own = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    for verb in VERBS:
        text = pages[f"reference/cli/{verb.name}"].text
        told = [a for a in own[verb.name]._actions if a.dest != "help" and a.help is not argparse.SUPPRESS]
        flags = [flag for a in told for flag in a.option_strings if flag != "-h"]
        assert not [flag for flag in flags if flag not in text], verb.name
        assert all(example in text for example in verb.examples) and "Exit codes" in text, verb.name
    assert all(f" {code} " in pages["reference/cli"].text for code in (0, 1, 2, 3))


def test_every_public_name_is_documented_by_its_docstring(pages: dict[str, Html]) -> None:
    for name in fastshard.__all__:
        text = pages[f"reference/python/{name}"].text
        value: Any = getattr(fastshard, name)
        if isinstance(value.__doc__, str) and not isinstance(value, tuple):
            # Up to the first role or code, which is rendered otherwise.
            first = re.split(r"[`:]", value.__doc__.strip().partition("\n")[0])[0]
            assert first.strip()[:60] in text, name
        assert f"fastshard.{name}" in text


def test_every_option_that_is_handed_on_says_what_it_means() -> None:
    pytest.importorskip("griffe", reason="pip install --group docs")
    meanings = loaded("roles")._MEANINGS
    kinds = [value for value in vars(options).values() if hasattr(value, "__total__")]
    assert kinds
    assert not [
        (kind.__name__, name) for kind in kinds for name in kind.__annotations__ if not meanings.get(name)
    ]


def test_pictures_are_what_fastshard_writes() -> None:
    made = loaded("make_pictures").pictures()
    have = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/pictures").glob("*.svg")}
    assert have == made, "run python docs/make_pictures.py"


def test_links_of_files_beside_docs_lead_to_their_pages() -> None:
    site = loaded("site")
    text = "[a](docs/layouts.md#shapes) [b](FORMAT.md) [c](justfile) [d](https://x.y) `[e](FORMAT.md)`\n"
    fenced = "```text\n[f](FORMAT.md)\n```\n"
    made = site.relinked(text + fenced, "CONTRIBUTING.md", "project/contributing.md")
    assert made.startswith("[a](../layouts.md#shapes) [b](../format.md) c [d](https://x.y)")
    assert made.endswith(fenced)
    assert site.with_codes("`FS303`, FS101 `x FS101` [FS101](a) FS999\n# FS303\n", "guides/a.md") == (
        "[`FS303`](../findings.md#FS303), [FS101](../findings.md#FS101) `x FS101` [FS101](a) FS999\n# FS303\n"
    )
    assert "[nowhere](nowhere.md)" in site.relinked("[nowhere](nowhere.md)", "docs/index.md", "index.md")
