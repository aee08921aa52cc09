"""Names that strangers could give, a checkpoint that bears them, and what an HTML parser makes of a text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch
from safetensors.torch import save_file

#: What would end an element, an attribute, a string, a comment, or turn the text around.
NAMES = (
    "</script><img src=x onerror=alert(1)>",
    "\"><svg onload=alert(2)>'",
    "' onmouseover='alert(3)",
    "-->]]><!--",
    "javascript:alert(4)",
    "a\u202egpj.exe",
    "two\nlines\r\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "\u2028\u2029",
    "</style><style>*{display:none}",
    "</title><base href=//evil.example>",
    "x" * 5000,
)


def checkpoint(root: Path) -> Path:
    """A Hugging Face folder whose tensors bear the names, one with NaN; its index calls for files of such
    names."""
    root.mkdir(parents=True)
    tensors = {name: torch.randn(8, 8) for name in NAMES}
    tensors[NAMES[0]][0, 0] = float("nan")
    save_file(tensors, root / "model.safetensors")
    return root


class Parsed(HTMLParser):
    """Elements and attributes of a page, and its text."""

    #: Elements that have no end.
    VOID = ("meta", "link", "br", "input", "rect", "path", "line", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.contents: dict[int, str] = {}
        self.open: list[tuple[str, int]] = []
        self.mismatched: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        # td, th, tr and li may be left open.
        while self.open and self.open[-1][0] != tag and self.open[-1][0] in ("td", "th", "tr", "li", "p"):
            self.open.pop()
        if not self.open or self.open[-1][0] != tag:
            self.mismatched.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open:
            index = self.open[-1][1]
            self.contents[index] = self.contents.get(index, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def content(self, tag: str) -> list[str]:
        """Texts right within the elements of a kind."""
        return [self.contents.get(i, "") for i, (name, _) in enumerate(self.elements) if name == tag]
