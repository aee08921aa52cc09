"""Prints how the product is built, in figures: `python scripts/structure.py`. Tests are left out.

What each figure counts:

json crossings        calls of `json.loads` and `json.dumps` in python/fastshard
notes                 uses of an attribute, a parameter or a keyword called `notes`
dict[str, Any]        attributes and parameters with this annotation, or `Mapping[str, Any]`
declared              places that declare the field `copies_accepted` of a source: Python's class, a dict of it, Rust's struct
lines per option      lines that name `expect_processes`, an option of `open`, as a definition: not calls, not attributes
read from messages    a finding's message that is searched, compared or taken apart, in both languages
lists of names        constants at the top of a file that hold a word for embeddings or heads
rooms                 what lies directly in python/fastshard, without forwarding files; arrows: pairs of these of which one
                      imports the other; floors: longest way down; circles: groups that import each other. Types count.
long functions        functions of more than 60 lines that are neither blank, nor a comment, nor the docstring
longest file          its lines, without the tests inside it
lines                 non-blank lines of .py, .pyi and .rs, comments included
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python/fastshard"
LONG = 60
#: Words that tell an embedding or a head in a list.
WORDS = re.compile(
    r"\"(lm_head|embed_tokens|wte|embedding|embeddings|embed_out|word_embeddings|shared_head)\""
)


def python() -> dict[Path, str]:
    """Texts of the Python files."""
    return {
        file: file.read_text() for file in sorted(PACKAGE.rglob("*.py*")) if file.suffix in (".py", ".pyi")
    }


def rust() -> dict[Path, str]:
    """Texts of the Rust files, without the tests inside them."""
    found = {}
    for crate in ("fastshard", "fastshard-py"):
        for file in sorted((ROOT / "rust" / crate / "src").rglob("*.rs")):
            if file.name != "tests.rs" and "tests" not in file.relative_to(ROOT).parts:
                found[file] = re.split(
                    r"^#\[cfg\(test\)\]\nmod \w+ \{", file.read_text(), maxsplit=1, flags=re.M
                )[0]
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a Python file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(text: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a Python function without blank ones, comments and the docstring."""
    lines = text.splitlines()[function.lineno - 1 : function.end_lineno]
    said = ast.get_docstring(function, clean=False)
    told = sum(1 for line in said.splitlines() if line.strip()) if said else 0
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#")) - told


def rust_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lines of code of a Rust file's functions; formatted by rustfmt, so that the end is indented as the beginning."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if match := re.match(r"( *)(?:pub(?:\([^)]*\))? )?(?:const |unsafe |async )*fn (\w+)", line):
            end = next((i for i in range(at, len(lines)) if lines[i] == f"{match[1]}}}"), at)
            code = (one.strip() for one in lines[at : end + 1])
            yield match[2], sum(1 for one in code if one and not one.startswith("//"))


def graph() -> tuple[int, int, int, int]:
    """Rooms, arrows, floors and circles of the imports."""
    files = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        files[parts[:-1] if parts[-1] == "__init__" else parts] = file
    forwarding = {
        name[0]
        for name, file in files.items()
        if len(name) == 1 and "# The public path: " in file.read_text()
    }
    rooms = {name[0] for name in files if name}
    forwarding = {name for name in forwarding if not (PACKAGE / name).is_dir()}
    apart = {"__main__", "_core", *forwarding}
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        folder = name if file.name == "__init__.py" else name[:-1]
        for node in ast.walk(ast.parse(file.read_text())):
            if not name or name[0] in apart or not isinstance(node, ast.ImportFrom):
                continue
            below = tuple(node.module.split(".")) if node.module else ()
            base = folder[: len(folder) - node.level + 1] + below if node.level else below[1:]
            if node.level or below[:1] == ("fastshard",):
                arrows[name[0]] |= {
                    (base or (one.name,))[0] for one in node.names if base or (one.name,) in files
                }
    nodes = sorted(rooms - apart)
    arrows = defaultdict(set, {node: (arrows[node] & set(nodes)) - {node} for node in nodes})
    reach = {node: set(arrows[node]) for node in nodes}
    for _ in nodes:
        for node in nodes:
            reach[node] |= set().union(*(reach[other] for other in reach[node]))
    group = {node: frozenset({node} | {o for o in reach[node] if node in reach[o]}) for node in nodes}
    floor: dict[frozenset[str], int] = {}
    for node in sorted(nodes, key=lambda one: len(reach[one])):
        below_it = (floor[group[o]] for o in reach[node] if group[o] != group[node])
        floor[group[node]] = 1 + max(below_it, default=0)
    return len(nodes), sum(map(len, arrows.values())), max(floor.values()), sum(len(g) > 1 for g in floor)


def from_messages(texts: dict[Path, str], rust_texts: dict[Path, str]) -> list[str]:
    """Where a finding's message is searched, compared or taken apart."""
    places = []
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            taken: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                taken = [node.left, *node.comparators]
            elif isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if called in ("match", "fullmatch", "search", "findall", "sub", "get"):
                    taken = list(node.args)
                elif called in (
                    "startswith",
                    "endswith",
                    "partition",
                    "split",
                    "removeprefix",
                    "removesuffix",
                ):
                    taken = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            if any(isinstance(one, ast.Attribute) and one.attr == "message" for one in taken):
                places.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    for file, text in rust_texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\.message\.(contains|starts_with|ends_with|split|strip)|\.message == ", line):
                places.append(f"{file.relative_to(ROOT)}:{number}")
    return places


def name_lists(texts: dict[Path, str], rust_texts: dict[Path, str]) -> list[str]:
    """Constants that hold words for embeddings or heads."""
    found = []
    for file, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and WORDS.search(
                ast.unparse(node).replace("'", '"')
            ):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    for file, text in rust_texts.items():
        for match in re.finditer(r"^(?:pub )?const (\w+): [^=]*= &?\[(.*?)\];", text, re.M | re.S):
            if WORDS.search(match[2]) or '"embed"' in match[2] or '"head"' in match[2]:
                found.append(f"{file.relative_to(ROOT)}:{match[1]}")
    return found


def main() -> None:
    """Prints the table."""
    texts, core = python(), rust()
    modules = {file: text for file, text in texts.items() if file.suffix == ".py"}
    trees = {file: ast.parse(text) for file, text in modules.items()}
    whole = "\n".join(modules.values())
    annotated = [
        node.annotation
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None
    ]
    bags = sum(bool(re.search(r"(dict|Mapping)\[str, Any\]", ast.unparse(one))) for one in annotated)
    declared = [
        len(re.findall(r"^    copies_accepted: ", whole, re.M)) > 0,
        len(re.findall(r"\"copies_accepted\": ", whole)) > 0,
        any(
            re.search(r"^\s+pub copies_accepted: ", text, re.M)
            for file, text in core.items()
            if file.stem == "request"
        ),
    ]
    option = re.compile(r"expect_processes(:|\"|\)|,$)|--expect-processes|expect_processes = ")
    options = [line for line in whole.splitlines() if option.search(line) and "self." not in line]
    long = [
        n
        for file, tree in trees.items()
        for f in functions(tree)
        if (n := code_lines(modules[file], f)) > LONG
    ]
    long_rust = [n for text in core.values() for _, n in rust_functions(text) if n > LONG]
    longest = max(modules, key=lambda file: modules[file].count("\n"))
    longest_rust = max(core, key=lambda file: core[file].count("\n"))
    rooms, arrows, floors, circles = graph()
    lines = [
        sum(1 for line in text.splitlines() if line.strip()) for text in (*texts.values(), *core.values())
    ]
    places, lists = from_messages(modules, core), name_lists(modules, core)
    rows = [
        ("json crossings", len(re.findall(r"\bjson\.(?:loads|dumps)\(", whole)), "<= 25"),
        ("notes", len(re.findall(r"\bnotes\b(?:\[|\.get|=\{|=dict|: dict)|\.notes\b", whole)), "0"),
        ("dict[str, Any]", bags, "only where JSON is the format"),
        ("declared", sum(declared), "1"),
        ("lines per option", len(options), "<= 3"),
        ("read from messages", len(places), "0"),
        ("lists of names", len(lists), "1"),
        ("rooms, arrows, floors, circles", f"{rooms}, {arrows}, {floors}, {circles}", "12, <= 50, <= 9, 0"),
        ("long functions, Python and Rust", f"{len(long)}, {len(long_rust)}", "<= 10, <= 15"),
        (
            "longest file, Python",
            f"{modules[longest].count(chr(10))} ({longest.relative_to(ROOT)})",
            "<= 450",
        ),
        (
            "longest file, Rust",
            f"{core[longest_rust].count(chr(10))} ({longest_rust.relative_to(ROOT)})",
            "<= 550",
        ),
        ("lines", sum(lines), "<= 62,000"),
    ]
    for name, figure, wanted in rows:
        print(f"{name:<34}{figure!s:<56}{wanted}")
    print("\nread from messages:", *places, sep="\n  ")
    print("\nlists of names:", *lists, sep="\n  ")


if __name__ == "__main__":
    main()
