"""Writes what commands print now into pages, where it is not what these show: ``python tests/docs/renew.py PAGE...``.

The difference is for review. Outputs that still match, with their ``...``, stay as they are.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from pathlib import Path

import blocks
from blocks import ROOT, Block
from running import Page, Untrue

#: As wide as a line of a page may be.
WIDTH = 118
#: Said of all results, and said once on a page if at all.
_EVER = "not proven: that the layout is right for the model"


def wrapped(printed: str) -> str:
    """Output with lines that are not too long to read; comparing does not look at where they are broken."""
    lines: list[str] = []
    for line in printed.splitlines():
        if line.startswith(_EVER):
            lines.append("...")
            continue
        # Which files could have been swapped is a long list.
        line = re.sub(r"; of \d+ files \(.*? settles it", "; ...", line)
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
            replace_whitespace=False, expand_tabs=False,
        ) if len(line) > WIDTH else [line]  # fmt: skip
    return "".join(f"{line.rstrip()}\n" for line in lines)


class Renewing(Page):
    """Keeps what was printed instead of raising."""

    def __init__(self, folder: Path, in_clone: bool) -> None:
        super().__init__(folder, in_clone)
        self.changed: dict[int, dict[int, str]] = {}

    def compare(self, block: Block, at: int, printed: str, code: int) -> None:
        """Notes the command's output."""
        try:
            super().compare(block, at, printed, code)
        except Untrue as told:
            print(told)
            self.changed.setdefault(block.line, {})[at] = wrapped(printed)


def renew(page: str) -> None:
    """Runs a page and writes it anew."""
    with tempfile.TemporaryDirectory() as folder:
        run = Renewing(Path(folder), blocks.in_clone(page))
        for block in blocks.blocks(page):
            try:
                run.run(block)
            except Exception as error:
                print(f"{block.where}: {error}")
        run.kill()
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True)
    for block in reversed(blocks.blocks(page)):
        if block.line in run.changed:
            indent = lines[block.line - 1][: lines[block.line - 1].index("`")]
            now = (
                f"$ {command.text}\n{run.changed[block.line].get(at, command.shown)}"
                for at, command in enumerate(blocks.commands(block))
            )
            body = [indent + line for line in "".join(now).splitlines(keepends=True)]
            lines[block.line : block.line + block.text.count("\n")] = body
    (ROOT / page).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        renew(name)
