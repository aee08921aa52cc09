"""The fenced blocks of the repository's Markdown: what each is, and how it is held to be true.

| fence | what a test does with it |
|---|---|
| `sh` | runs it with `bash -euo pipefail` in the page's folder |
| `console` | runs the commands after `$`, and compares what they print with what is shown |
| `python`, `pycon` | runs it in the page's one namespace; the output of `pycon` is compared |
| any with `title="FILE"` | writes the file into the page's folder, where a command of the page must use it |
| `toml`, `json`, `yaml` | besides, validates it by the loader or schema that it is for |
| `text` | is shown and says why: `<!-- shown: REASON -->` before it |

Other comments before a block: `<!-- not run: REASON -->` for commands that cannot run here, which are checked
by parser and schema and counted apart; `<!-- stand-in: REASON -->` for those that need a cluster, a
bucket or the hub, for which tests/docs/stand_ins.py stands in; `<!-- ci: NAME -->` for those that `.ci/run`
takes from the README and runs itself; `<!-- run: NAME -->` for those that `tests/real_ray` takes from its
guide.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Docstrings whose examples are run as blocks of pages are.
PACKAGE = ROOT / "python/fastshard"

#: Pages with blocks of their own. The changelog quotes nothing, and `benches/NOTES.md` is a record.
PAGES = [
    *sorted(
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "docs/**/*.md", "fuzz/*.md", "tests/**/*.md")
        for path in ROOT.glob(pattern)
    ),
    *sorted(
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ),
]

COMMANDS = ("sh", "console")
DATA = ("toml", "json", "yaml")


def in_clone(page: str) -> bool:
    """True for a page that is read in a clone of the repository, where its commands are typed: not one of
    `docs/`."""
    return not page.startswith(("docs/", "python/"))


def module(page: str) -> str | None:
    """The module whose docstrings a page is; None for a page."""
    if not page.endswith(".py"):
        return None
    return page.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


#: How a block is held, in the order of the table.
HELD = ("run", "compared", "stood in", "validated", "by another test", "checked only", "shown")
MEANT = {
    "run": "executed; fails the test if it fails",
    "compared": "executed, and its output compared with what is shown",
    "stood in": "executed with processes of one host in the place of a cluster's or a store's; its launcher, "
    "scripts and Jobs are checked besides",
    "validated": "a file that a command of the page reads, or data that a loader or schema has taken",
    "by another test": "taken from the page and executed by `.ci/run` or `tests/real_ray`",
    "checked only": "cannot run here: parsed by the program's own parser or a schema",
    "shown": "no command: a tree, a grammar, an excerpt",
}

_FENCE = re.compile(r"^( *)(`{3,})(\S*)(?: +(.*))?$")
_MARK = re.compile(r"^ *<!-- (not run|stand-in|shown|ci|run): (.+?) -->$")
_TITLE = re.compile(r'^title="([^"]+)"$')


class Unknown(Exception):
    """A block that nothing is known to do with."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    #: Of the fence, from 1.
    line: int
    language: str
    text: str
    title: str | None = None
    #: The comment before it: what it says, and its reason or name.
    mark: str | None = None
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def held(self) -> str:
        """How it is held to be true: one of :data:`HELD`."""
        if self.mark in ("ci", "run"):
            return "by another test"
        if self.mark == "not run" and self.language in COMMANDS:
            return "checked only"
        if self.mark == "stand-in" and self.language in COMMANDS:
            return "stood in"
        if self.mark == "shown" and self.language == "text":
            return "shown"
        if self.mark is None and (self.title is not None or self.language in DATA):
            return "validated"
        if self.mark is None and self.language in ("sh", "python"):
            return "run"
        if self.mark is None and self.language in ("console", "pycon"):
            return "compared"
        raise Unknown(
            f"{self.where}: nothing is done with a block of {self.language or 'no language'!r}"
            + (f" marked {self.mark!r}" if self.mark else "")
            + ": see tests/docs/blocks.py"
        )


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page, in their order."""
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        indent, fence, language, rest = opened.groups()
        mark = _MARK.match(lines[at - 1]) if at else None
        title = _TITLE.match(rest or "")
        if rest and title is None:
            raise Unknown(f'{page}:{at + 1}: {rest!r} after the language: only title="FILE" is known')
        end = next((i for i in range(at + 1, len(lines)) if lines[i] == indent + fence), None)
        if end is None:
            raise Unknown(f"{page}:{at + 1}: a block without an end")
        body = [line.removeprefix(indent) for line in lines[at + 1 : end]]
        found.append(
            Block(
                page,
                at + 1,
                language,
                "".join(f"{line}\n" for line in body),
                title and title[1],
                mark and mark[1],
                mark[2] if mark else "",
            )
        )
        at = end + 1
    return found


def doctests_of(source: str, page: str) -> list[Block]:
    """The examples in the docstrings of a module; test_docstring_examples.py runs those of their sections
    `Examples`."""
    found: list[Block] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").partition("\nExamples:\n")[0]
            if ">>> " in text:
                found.append(Block(page, node.body[0].lineno, "pycon", text))
    return found


def blocks(page: str) -> list[Block]:
    """The blocks of a page of the repository, or of a module's docstrings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return doctests_of(text, page) if page.endswith(".py") else blocks_of(text, page)


def counts(pages: Iterable[str] = PAGES) -> dict[str, Counter[str]]:
    """By page, how many blocks are held how."""
    return {page: found for page in pages if (found := Counter(block.held for block in blocks(page)))}


def table(counted: dict[str, Counter[str]]) -> str:
    """The counts as a Markdown table, with a sum."""
    lines = [f"| page | {' | '.join(HELD)} |", f"|---|{'---:|' * len(HELD)}"]
    rows = [*counted.items(), ("**all**", sum(counted.values(), Counter[str]()))]
    lines += [f"| {page} | {' | '.join(str(found[how] or '') for how in HELD)} |" for page, found in rows]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what is shown below it."""

    text: str
    shown: str


def commands(block: Block) -> list[Command]:
    """The commands of a console block; one that ends with a backslash goes on in the next line."""
    found: list[Command] = []
    goes_on = False
    for line in block.text.splitlines():
        if goes_on:
            found[-1] = Command(f"{found[-1].text}\n{line}", "")
        elif line.startswith("$ "):
            found.append(Command(line[2:], ""))
        elif not found:
            raise Unknown(f"{block.where}: a console block begins with `$ COMMAND`")
        else:
            found[-1] = Command(found[-1].text, f"{found[-1].shown}{line}\n")
        goes_on = line.endswith("\\") and (goes_on or line.startswith("$ "))
    return found


def is_shown(shown: str, printed: str) -> bool:
    """True if what is shown is what was printed: but for where lines are broken, and what `...` stands
    for."""
    pieces = [r"\s+".join(map(re.escape, piece.split())) for piece in shown.split("...")]
    return re.fullmatch(r"\s*" + r"\s*(?:.*?)\s*".join(pieces) + r"\s*", printed, re.DOTALL) is not None
