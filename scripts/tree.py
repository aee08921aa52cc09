"""Write the tree of the sources into ARCHITECTURE.md, made from the first sentences of modules: `python
scripts/tree.py`.

A module or a package says in its first sentence what it is for; the tree is these sentences, of the modules
of the core and of the rooms.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
CORE, PACKAGE = ROOT / "rust/fastshard/src", ROOT / "python/fastshard"
#: The rooms of the package, from the floor up.
ROOMS = (
    *(
        "common",
        "stores",
        "layouts",
        "zarr",
        "models",
        "expected",
        "sources",
        "targets",
        "findings",
        "checkpoint",
        "evaluation",
        "conversion",
    ),
    *("verification", "reporting", "cli", "integrations"),
)
BLOCK = re.compile(r"(<!-- shown: the tree of the sources -->\n```text\n)(.*?)(```)", re.S)
WIDTH, INDENT = 130, 26


def read_first_sentence(text: str) -> str:
    """Read the first sentence of a documentation text, in one line, without marks of its format."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.match(r".*?\.(?=\s|$)", paragraph)
    return re.sub(r":\w+:`~?([^`]*)`|`([^`]*)`", r"\1\2", sentence[0] if sentence else paragraph).rstrip(".")


def read_rust(file: Path) -> str:
    """Read the first sentence of a Rust module."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines())
    comment = [line[3:].strip() for line in lines if line.startswith("//!")]
    return read_first_sentence("\n".join(comment))


def read_python(file: Path) -> str:
    """Read the first sentence of a Python module."""
    return read_first_sentence(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")


def format_line(name: str, text: str, indent: int = 2) -> str:
    """Format a name and its sentence, which goes on below itself."""
    head = f"{' ' * indent}{name}".ljust(INDENT - 1) + " "
    return textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * INDENT, break_on_hyphens=False
    )


def build_tree() -> Iterator[str]:
    """Build the lines of the tree."""
    yield "rust/fastshard/src/"
    for file in sorted(CORE.glob("*.rs")):
        if file.stem != "lib":
            is_folder = (CORE / file.stem).is_dir() and any(
                f.name != "tests.rs" for f in (CORE / file.stem).glob("*.rs")
            )
            yield format_line(file.stem + ("/" if is_folder else ""), read_rust(file))
    yield "rust/fastshard-py/src/"
    yield format_line("lib", read_rust(ROOT / "rust/fastshard-py/src/lib.rs"))
    yield "python/fastshard/"
    for room in ROOMS:
        yield format_line(f"{room}/", read_python(PACKAGE / room / "__init__.py"))
        for folder in sorted(path.parent for path in (PACKAGE / room).glob("*/__init__.py")):
            yield format_line(f"{folder.name}/", read_python(folder / "__init__.py"), 4)


def write_tree(page: str) -> str:
    """Put the tree into the page's block."""
    tree = "".join(f"{line}\n" for line in build_tree())
    return BLOCK.sub(lambda block: block[1] + tree + block[3], page)


if __name__ == "__main__":
    PAGE.write_text(write_tree(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
