"""Writes what commands print now into pages, where it is not what these show: ``python tests/docs/renew.py
PAGE...``.

The difference is for review. Outputs that still match stay as they are with their ``...``; their lines are
broken anew.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import blocks
from blocks import ROOT, Block
from running import Page, Untrue

#: As wide as an output may be: what a page shows without breaking lines once more.
WIDTH = 84


def shortened(printed: str) -> str:
    """Output without long lists: which files could have been swapped."""
    return "".join(
        f"{re.sub(r'; of [0-9]+ files .*? settles it', '; ...', line)}\n" for line in printed.splitlines()
    )


def lasting(printed: str, folder: Path) -> str:
    """Output without what is another in each run: the folder's path, ids, tokens, and what is free on the
    disk."""
    text = re.sub(
        r"\b[0-9a-f]{16,32}\b|(?<=^digest   )[0-9a-f]{64}$",
        "...",
        printed.replace(os.fspath(folder), "/..."),
        flags=re.M,
    )
    return re.sub(r"(?m)(?<=needed, )[0-9.]+ [kMGT]B(?= free)|(?<=^  found     )[0-9]{10,}$", "...", text)


def as_printed(shown: str, printed: str) -> str:
    """What is shown, with its lines broken where they were printed so; `...` stays as it is."""
    parts = [part for part in re.split(r"(\s+|\.\.\.)", shown.strip()) if part]
    pattern = ""
    for at, part in enumerate(parts):
        if part == "...":
            pattern += r"()\s*.*?\s*"
        elif part.isspace():
            beside = "..." in (parts[at - 1], parts[at + 1])
            pattern += r"()\s*" if beside else r"(\s+)"
        else:
            pattern += f"({re.escape(part)})"
    found = re.fullmatch(rf"\s*{pattern}\s*", printed, re.DOTALL)
    assert found is not None, (shown, printed)
    text = "".join(now or was for now, was in zip(found.groups(), parts, strict=True))
    return f"{text}\n" if text else ""


def wrapped(text: str) -> str:
    """Output with lines that are not too long to read; comparing does not look at where they are broken."""
    lines: list[str] = []
    for line in text.splitlines():
        # Columns stay together, and branches of a tree.
        if len(line) <= WIDTH or "  " in line.strip() or line.lstrip()[:1] in ("│", "├", "└"):
            lines.append(line.rstrip())
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "".join(f"{line}\n" for line in lines)


class Renewing(Page):
    """Keeps what was printed instead of raising."""

    def __init__(self, folder: Path, in_clone: bool) -> None:
        super().__init__(folder, in_clone)
        self.changed: dict[int, dict[int, str]] = {}

    def compare(self, block: Block, at: int, printed: str, code: int) -> None:
        """Notes the command's output."""
        shown = blocks.commands(block)[at].shown
        try:
            super().compare(block, at, printed, code)
            now = as_printed(shown, printed)
        except Untrue as told:
            print(told)
            now = shown if blocks.is_shown(shown, printed) else shortened(lasting(printed, self.folder))
        self.changed.setdefault(block.line, {})[at] = wrapped(now)


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
