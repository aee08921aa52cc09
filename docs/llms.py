"""The file `llms.txt` of the site: its pages in the order of the navigation, each with its first sentence.

source: https://llmstxt.org
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page


class _FirstParagraph(HTMLParser):
    """The text of a page's first paragraph that begins with text: not with a link, and not in italics."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self._is_inside = self._is_done = False
        self.feed(html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._is_inside = not self._is_done
        elif tag in ("em", "a") and not self.text:
            self._is_inside = False

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._is_inside, self._is_done = False, bool(self.text)

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.text += data


def make_text(home: Page, config: MkDocsConfig) -> str:
    """Returns the file, once the pages' contents are known."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = None
    for page in _in_order(home):
        if page.ancestors and page.ancestors[-1].title != section:
            section = page.ancestors[-1].title
            lines += ["", f"## {section}", ""]
        sentence = first_sentence(page.content or "")
        lines.append(f"- [{page.title}]({page.canonical_url})" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines) + "\n"


def _in_order(page: Page | None) -> Iterator[Page]:
    while page is not None:
        yield page
        page = page.next_page


def first_sentence(html: str) -> str:
    """Returns the first sentence of a page's first paragraph, and an empty text for a page without one."""
    text = _FirstParagraph(html).text
    found = re.match(r".+?(?<!e\.g)(?<!i\.e)[.!?](?=\s|$)", text)
    return (found[0] if found else text).removesuffix(":")
