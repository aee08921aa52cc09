"""Print how the product is built, in figures: `python scripts/structure.py [--list ROW]`. Tests are left out
unless a row names them.

What each row counts:

open                  lines of code of `fastshard.open`, and of the longest function of checkpoint/ (no blank
                      lines, comments, docstrings)
change findings       functions that take findings and return findings: each of them may drop, merge or
                      reweigh one. Those that stand in the list `STAGES` are counted apart
numerals of codes     texts such as "FS102" in Python, outside the module that names the codes
sets of codes         collections of two codes or more that are written by hand, in both languages
parsed texts          places that take a message, a help or a rank of a finding apart, and that read ranks out
                      of digits of names
files of an option    files that name `sparse`, an option of writing, in both languages
Source                fields of the record that an adapter declares; functions of checkpoint/ that take it
local imports         imports of the package itself inside functions
small modules         modules below 100 lines that one other module of their own folder imports, and nothing
                      else
Rust circles          groups of Rust files that import each other
dialect               names told, held, said, stated, lent, judged, asked, made: of functions, classes,
                      modules, parameters and attributes (a test wants none); of local variables
formatting            marks that keep lines from the formatter; lines over 110 columns in Python
tests in one folder   test files directly in tests/
rooms                 what lies directly in python/fastshard, without forwarding files; arrows: pairs of these
                      of which one imports the other; floors: the longest way down; circles: groups that
                      import each other. Imports for types count
lines                 lines of .py, .pyi and .rs that are not blank
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python/fastshard"
#: Words for what happened to a value, in the place of a name for what it is.
DIALECT = frozenset({"told", "held", "said", "stated", "lent", "judged", "asked", "made"})
#: Words that mark a list of tensor names as one for embeddings or heads.
EMBEDDING_WORDS = re.compile(
    r"\"(lm_head|embed_tokens|wte|embedding|embeddings|embed_out|word_embeddings|shared_head)\""
)
CODE = re.compile(r"FS\d{3}")
#: The module in which each code gets its name.
CODE_NAMES = "common/codes.py"
#: Fields of a finding that are sentences for people.
SENTENCES = ("message", "help", "advice", "rank")
WIDTH = 110
#: A comment that is for a tool, which the linter does not count.
PRAGMA = re.compile(r"\s*# (noqa|type: ignore).*$")


def read_python() -> dict[Path, str]:
    """Read the Python files of the package."""
    files = (file for file in sorted(PACKAGE.rglob("*.py*")) if file.suffix in (".py", ".pyi"))
    return {file: file.read_text(encoding="utf-8") for file in files}


def read_rust() -> dict[Path, str]:
    """Read the Rust files of the core and its binding, without the tests inside them."""
    texts = {}
    for crate in ("fastshard", "fastshard-py"):
        for file in sorted((ROOT / "rust" / crate / "src").rglob("*.rs")):
            if file.name != "tests.rs" and "tests" not in file.relative_to(ROOT).parts:
                text = file.read_text(encoding="utf-8")
                texts[file] = re.split(r"^#\[cfg\(test\)\]\nmod \w+ \{", text, maxsplit=1, flags=re.M)[0]
    return texts


def place(file: Path, line: int) -> str:
    """Format a place as `path:line`."""
    return f"{file.relative_to(ROOT)}:{line}"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_functions(tree: ast.AST) -> Iterator[Function]:
    """Find all functions of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def count_code_lines(text: str, function: Function) -> int:
    """Count the lines of a function without blank ones, comments and the docstring."""
    lines = text.splitlines()[function.lineno - 1 : function.end_lineno]
    docstring = ast.get_docstring(function, clean=False) or ""
    documented = sum(1 for line in docstring.splitlines() if line.strip())
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#")) - documented


def find_finding_functions(trees: Mapping[Path, ast.AST]) -> list[str]:
    """Find the functions that take findings and return findings."""
    is_list = re.compile(r"(list|Iterable|Sequence)\[Finding\]")
    places = []
    for file, tree in trees.items():
        for function in find_functions(tree):
            returned = function.returns and ast.unparse(function.returns)
            parameters = (a.annotation for a in (*function.args.args, *function.args.kwonlyargs))
            if (
                returned
                and is_list.search(returned)
                and any(p and is_list.search(ast.unparse(p)) for p in parameters)
            ):
                places.append(f"{place(file, function.lineno)} {function.name}")
    return places


def find_numerals(trees: Mapping[Path, ast.AST]) -> list[str]:
    """Find the codes that are written as a number."""
    return [
        place(file, node.lineno)
        for file, tree in trees.items()
        if not file.as_posix().endswith(CODE_NAMES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    ]


def _is_code(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and CODE.fullmatch(node.value) is not None
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "codes"
        and node.attr.isupper()
    )


def find_code_sets(trees: Mapping[Path, ast.AST], core: Mapping[Path, str]) -> list[str]:
    """Find the collections of codes that are written by hand, outside the table."""
    places = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple | ast.List | ast.Set) and isinstance(
                getattr(node, "ctx", ast.Load()), ast.Load
            ):
                codes = sum(map(_is_code, node.elts))
                is_set = (
                    all(_is_code(e) or isinstance(e, ast.Starred) for e in node.elts) and len(node.elts) > 1
                )
                if codes and is_set:
                    places.append(place(file, node.lineno))
    rust = re.compile(
        r"\[\s*(?:codes::)?[A-Z_]{3,}(?:,\s*(?:codes::)?[A-Z_]{3,})+,?\s*\]|codes::[A-Z_]+\s*\|\s*codes::"
    )
    for file, text in core.items():
        for match in rust.finditer(text):
            if "codes::" in match[0] or file.name == "codes.rs":
                places.append(place(file, text[: match.start()].count("\n") + 1))
    return places


def find_parsed_sentences(
    texts: Mapping[Path, str], core: Mapping[Path, str], fields: Iterable[str] = SENTENCES
) -> list[str]:
    """Find where sentences of a finding are searched, compared or taken apart, and where ranks are read from
    names."""
    searches = ("match", "fullmatch", "search", "findall", "finditer", "sub", "get")
    cuts = ("startswith", "endswith", "partition", "split", "removeprefix", "removesuffix", "replace")
    places = []
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            operands: list[ast.AST] = []
            if isinstance(node, ast.Compare) and not any(
                isinstance(op, ast.Is | ast.IsNot) for op in node.ops
            ):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Call):
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if called in searches or called == "ranks_of":
                    operands = list(node.args)
                elif called in cuts and isinstance(node.func, ast.Attribute):
                    operands = [node.func.value]
            named = {attribute for operand in operands for attribute in _find_attributes(operand)}
            # Two ranks may be compared; a rank is not taken apart.
            named -= {"rank"} if isinstance(node, ast.Compare) else set()
            if not named.isdisjoint(fields):
                places.append(place(file, getattr(node, "lineno", 0)))
    for file, text in core.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\.message\.(contains|starts_with|ends_with|split|strip)|\.message == ", line):
                places.append(place(file, number))
    return places


def _find_attributes(node: ast.AST) -> Iterator[str]:
    """Find the attributes that an expression reads as texts: what a function makes of one is not its
    words."""
    if isinstance(node, ast.Call):
        return
    if isinstance(node, ast.Attribute):
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _find_attributes(child)


def find_name_lists(texts: Mapping[Path, str], core: Mapping[Path, str]) -> list[str]:
    """Find constants that hold words for embeddings or heads."""
    places = []
    for file, text in texts.items():
        for node in ast.parse(text).body:
            is_constant = isinstance(node, ast.Assign | ast.AnnAssign)
            if is_constant and EMBEDDING_WORDS.search(ast.unparse(node).replace("'", '"')):
                places.append(place(file, node.lineno))
    for file, text in core.items():
        for match in re.finditer(r"^(?:pub )?const (\w+): [^=]*= &?\[(.*?)\];", text, re.M | re.S):
            if EMBEDDING_WORDS.search(match[2]) or '"embed"' in match[2] or '"head"' in match[2]:
                places.append(f"{file.relative_to(ROOT)}:{match[1]}")
    return places


def find_local_imports(trees: Mapping[Path, ast.AST]) -> list[str]:
    """Find imports of the package inside functions."""
    return [
        place(file, node.lineno)
        for file, tree in trees.items()
        for function in find_functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fastshard"))
    ]


def resolve_imports(file: Path, tree: ast.AST, modules: Mapping[tuple[str, ...], Path]) -> set[Path]:
    """Resolve what a module of the package imports of it."""
    folder = file.relative_to(PACKAGE).parent.parts
    imported = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        below = tuple(node.module.split(".")) if node.module else ()
        if not node.level and below[:1] != ("fastshard",):
            continue
        base = (*folder[: len(folder) - node.level + 1], *below) if node.level else below[1:]
        for name in node.names:
            target = modules.get((*base, name.name)) or modules.get(base)
            if target is not None and target != file:
                imported.add(target)
    return imported


def index_modules(files: Iterable[Path]) -> dict[tuple[str, ...], Path]:
    """Index the modules of the package by the parts of their names."""
    modules = {}
    for file in files:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        modules[parts[:-1] if parts[-1] == "__init__" else parts] = file
    return modules


def find_small_modules(texts: Mapping[Path, str], trees: Mapping[Path, ast.AST]) -> list[str]:
    """Find modules below 100 lines that only one module of their own folder imports."""
    modules = index_modules(texts)
    users: dict[Path, set[Path]] = defaultdict(set)
    for file, tree in trees.items():
        for target in resolve_imports(file, tree, modules):
            users[target].add(file)
    return [
        f"{file.relative_to(ROOT)} ({text.count(chr(10))} lines)"
        for file, text in texts.items()
        if text.count("\n") < 100 and file.name != "__init__.py" and len(users[file]) == 1
        if {user.parent for user in users[file]} == {file.parent}
    ]


def find_groups(arrows: Mapping[Path, set[Path]]) -> list[list[Path]]:
    """Find groups of files that reach each other."""
    reached: dict[Path, set[Path]] = {}
    for start in arrows:
        seen: set[Path] = set()
        waiting = list(arrows[start])
        while waiting:
            file = waiting.pop()
            if file not in seen:
                seen.add(file)
                waiting += arrows.get(file, ())
        reached[start] = seen
    groups = {
        frozenset(o for o in reached[file] if file in reached[o]) for file in arrows if file in reached[file]
    }
    return sorted(sorted(group) for group in groups)


def find_rust_circles(core: Mapping[Path, str]) -> list[list[Path]]:
    """Find groups of Rust files that import each other. A module and what lies below it count as one where it
    declares that."""
    modules: dict[tuple[str, ...], Path] = {}
    for file in core:
        parts = file.relative_to(ROOT / "rust").parts
        crate, names = parts[0], [*parts[2:-1], Path(parts[-1]).stem]
        modules[(crate, *(name for name in names if name not in ("lib", "mod")))] = file
    by_file = {file: name for name, file in modules.items()}
    arrows: dict[Path, set[Path]] = {file: set() for file in core}
    for file, text in core.items():
        own = by_file[file]
        for path in _find_use_paths(text):
            parts = path.split("::")
            if parts[0] == "crate":
                name = (own[0], *parts[1:])
            elif parts[0] == "self":
                name = (*own, *parts[1:])
            elif parts[0] == "super":
                up = next((i for i, part in enumerate(parts) if part != "super"), len(parts))
                name = (*own[: len(own) - up], *parts[up:])
            else:
                continue
            while len(name) > 1 and name not in modules:
                name = name[:-1]
            target = modules.get(name)
            # A file and its own folder are one module: a parent that gathers what lies below it is no circle.
            if (
                target is None
                or target == file
                or len(name) == 1
                or by_file[target] == own[: len(by_file[target])]
            ):
                continue
            if own != by_file[target][: len(own)]:
                arrows[file].add(target)
    return find_groups(arrows)


def _find_use_paths(text: str) -> Iterator[str]:
    """Find the paths that a Rust file uses: those of `use`, braces resolved, and those within expressions."""
    for match in re.finditer(r"^\s*(?:pub(?:\([^)]*\))? )?use ([^;]+);", text, re.M):
        yield from _resolve_braces(re.sub(r"\s+", "", match[1].replace(" as ", "@")))
    for match in re.finditer(r"\b((?:crate|super)(?:::\w+)+)", re.sub(r"^\s*//.*$", "", text, flags=re.M)):
        yield match[1]


def _resolve_braces(path: str) -> Iterator[str]:
    if "{" not in path:
        yield path.partition("@")[0]
        return
    before, _, rest = path.partition("{")
    depth, start = 0, 0
    inner = rest[: rest.rindex("}")]
    for at, char in enumerate(f"{inner},"):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if at > start:
                yield from _resolve_braces(before + inner[start:at])
            start = at + 1


def _is_dialect(name: str) -> bool:
    return name.strip("_").lower() in DIALECT


def find_dialect(trees: Mapping[Path, ast.AST], core: Mapping[Path, str]) -> tuple[list[str], list[str]]:
    """Find names that are words of the dialect: those that other places see, and local variables."""
    names, variables = [], []
    for file, tree in trees.items():
        if _is_dialect(file.stem):
            names.append(str(file.relative_to(ROOT)))
        of_classes = {id(s) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for s in node.body}
        of_classes |= {id(statement) for statement in getattr(tree, "body", [])}
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef) and _is_dialect(node.name):
                names.append(f"{place(file, node.lineno)} {node.name}")
            elif isinstance(node, ast.arg) and _is_dialect(node.arg):
                names.append(f"{place(file, node.lineno)} {node.arg}")
            elif (
                isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_dialect(node.attr)
            ):
                names.append(f"{place(file, node.lineno)} .{node.attr}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_dialect(node.id):
                variables.append(f"{place(file, node.lineno)} {node.id}")
            if id(node) in of_classes and isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                for target in targets:
                    if isinstance(target, ast.Name) and _is_dialect(target.id):
                        names.append(f"{place(file, node.lineno)} {target.id}")
                        variables = [v for v in variables if v != names[-1]]
    words = "|".join(DIALECT)
    seen = re.compile(
        rf"\b(?:fn|mod|struct|enum|trait|type|const|static) _?({words})\b|(?:^|[(,])\s*(?:pub(?:\([^)]*\))? "
        rf")?(?:mut )?_?({words}): ",
        re.M | re.I,
    )
    local = re.compile(rf"\blet (?:mut )?_?({words})\b")
    for file, text in core.items():
        code = re.sub(r"//.*$", "", text, flags=re.M)
        names += [
            f"{place(file, code[: m.end()].count(chr(10)) + 1)} {m[1] or m[2]}" for m in seen.finditer(code)
        ]
        variables += [
            f"{place(file, code[: m.start()].count(chr(10)) + 1)} {m[1]}" for m in local.finditer(code)
        ]
        if _is_dialect(file.stem):
            names.append(str(file.relative_to(ROOT)))
    return names, variables


def measure_rooms(trees: Mapping[Path, ast.AST], texts: Mapping[Path, str]) -> tuple[int, int, int, int]:
    """Measure rooms, arrows, floors and circles of the imports."""
    modules = index_modules(trees)
    apart = {"__main__", "_core"}
    apart |= {
        name[0]
        for name, file in modules.items()
        if len(name) == 1 and file.name != "__init__.py" and "# The public path: " in texts[file]
    }
    rooms = sorted({name[0] for name in modules if name} - apart)
    rooms_of = {file: name[0] for name, file in modules.items() if name}
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for file, tree in trees.items():
        if (room := rooms_of.get(file)) in arrows:
            found = {rooms_of.get(target) for target in resolve_imports(file, tree, modules)}
            arrows[room] |= {other for other in found if other in arrows and other != room}
    reach = {room: set(arrows[room]) for room in rooms}
    for _ in rooms:
        for room in rooms:
            reach[room] |= set().union(*(reach[other] for other in reach[room]))
    group = {room: frozenset({room} | {o for o in reach[room] if room in reach[o]}) for room in rooms}
    floor: dict[frozenset[str], int] = {}
    for room in sorted(rooms, key=lambda one: len(reach[one])):
        below = (floor[group[o]] for o in reach[room] if group[o] != group[room])
        floor[group[room]] = 1 + max(below, default=0)
    return len(rooms), sum(map(len, arrows.values())), max(floor.values()), sum(len(g) > 1 for g in floor)


def _measure_source(trees: Mapping[Path, ast.AST]) -> tuple[int, list[str]]:
    """Count the fields of `Source`, and find the functions of checkpoint/ that take one."""
    fields, users = 0, []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == "Source" and file.stem == "declaration":
                fields = sum(isinstance(one, ast.AnnAssign) for one in node.body)
        if "checkpoint" in file.relative_to(PACKAGE).parts[:1]:
            for function in find_functions(tree):
                if any(a.annotation and ast.unparse(a.annotation) == "Source" for a in function.args.args):
                    users.append(f"{place(file, function.lineno)} {function.name}")
    return fields, users


def _find_option(texts: Mapping[Path, str], core: Mapping[Path, str]) -> list[str]:
    """Find the files that name `sparse` as an option: code, not sentences."""
    python = [
        file
        for file, text in texts.items()
        if re.search(r"\bsparse\b(?:[:=]|\"|\)|,$)|\.sparse\b", text, re.M)
    ]
    rust = [
        file
        for file, text in core.items()
        if re.search(r"\bsparse(?::|,)|\.sparse\b", re.sub(r"//.*", "", text))
    ]
    return [str(file.relative_to(ROOT)) for file in (*python, *rust)]


def main(arguments: list[str]) -> None:
    """Print the table, or the places that one row counts."""
    texts, core = read_python(), read_rust()
    modules = {file: text for file, text in texts.items() if file.suffix == ".py"}
    trees = {file: ast.parse(text) for file, text in modules.items()}
    lengths = {
        f"{place(file, f.lineno)} {f.name}": count_code_lines(modules[file], f)
        for file, tree in trees.items()
        if file.relative_to(PACKAGE).parts[0] == "checkpoint"
        for f in find_functions(tree)
    }
    longest = max(lengths, key=lambda name: lengths[name])
    is_open = (n for name, n in lengths.items() if name.endswith(" open"))
    finding_functions = find_finding_functions(trees)
    stages = [one for one in finding_functions if one.startswith("python/fastshard/findings/")]
    fields, source_users = _measure_source(trees)
    circles = find_rust_circles(core)
    names, variables = find_dialect(trees, core)
    skips = [
        place(f, n)
        for f, text in texts.items()
        for n, line in enumerate(text.splitlines(), 1)
        if "# fmt: " + "skip" in line
    ]
    wide = [
        place(f, n)
        for f, text in texts.items()
        for n, line in enumerate(text.splitlines(), 1)
        if len(PRAGMA.sub("", line)) > WIDTH
    ]
    tests = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").glob("test_*.py"))]
    every = [*texts.values(), *core.values()]
    rows: list[tuple[str, object, str, list[str]]] = [
        ("open", f"{max(is_open, default=0)} / {lengths[longest]} ({longest})", "<= 40 / <= 60", []),
        (
            "change findings",
            f"{len(finding_functions) - len(stages)}, and {len(stages)} in findings/",
            "in one list, <= 8 stages",
            finding_functions,
        ),
        ("numerals of codes", len(found := find_numerals(trees)), "<= 30", found),
        ("sets of codes", len(found := find_code_sets(trees, core)), "0", found),
        ("parsed texts", len(found := find_parsed_sentences(modules, core)), "0", found),
        ("files of an option", len(found := _find_option(modules, core)), "<= 5", found),
        ("Source", f"{fields}; {len(source_users)}", "five records; <= 12", source_users),
        ("local imports", len(found := find_local_imports(trees)), "<= 10", found),
        ("small modules", len(found := find_small_modules(modules, trees)), "<= 8", found),
        (
            "Rust circles",
            len(circles),
            "0",
            [", ".join(str(f.relative_to(ROOT / "rust")) for f in g) for g in circles],
        ),
        (
            "dialect",
            f"{len(names)}; {len(variables)}",
            "0; only where a file is touched",
            [*names, *variables],
        ),
        ("formatting", f"{len(skips)}; {len(wide)}", "0; 0", [*skips, *wide]),
        ("tests in one folder", len(tests), "<= 5", tests),
        (
            "rooms, arrows, floors, circles",
            ", ".join(map(str, measure_rooms(trees, modules))),
            "13, <= 55, <= 10, 0",
            [],
        ),
        ("lines", f"{sum(1 for text in every for line in text.splitlines() if line.strip()):,}", "", []),
    ]
    if arguments[:1] == ["--list"]:
        wanted = " ".join(arguments[1:])
        print(*next(places for name, _, _, places in rows if name == wanted), sep="\n")
        return
    for name, figure, goal, _ in rows:
        print(f"{name:<32}{figure!s:<72}{goal}")


if __name__ == "__main__":
    main(sys.argv[1:])
