"""Who imports whom: no circles, and no wing of the package reaches where it must not. Read from the files,
never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fastshard
import pytest

PACKAGE = Path(fastshard.__file__).parent

#: The rooms, from the floor up: each imports from those below it alone.
ROOMS = (
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
    "verification",
    "reporting",
    "cli",
)
#: Rooms of one floor.
APART = ("expected", "sources", "targets")
#: Public paths of modules that are elsewhere: for users.
DOORS = ("errors", "examples", "integrations", "manifests", "ray", "testing")
#: Containers of tensors, which any framework may use, and the frameworks.
CONTAINERS = ("sources.dcp", "sources.zero", "sources.orbax")
FRAMEWORKS = (
    "sources.huggingface",
    "sources.megatron",
    "sources.deepspeed",
    "sources.gpt_neox",
    "sources.colossalai",
    "sources.fsdp",
)


class Rule(NamedTuple):
    """A part of the package, the parts that it never imports, and what of these it may."""

    who: str
    never: tuple[str, ...]
    why: str
    but: tuple[str, ...] = ()


RULES = [
    *(
        Rule(room, (*ROOMS[at + 1 :], *DOORS), "a room imports from those below it")
        for at, room in enumerate(ROOMS)
    ),
    *(
        Rule(
            room,
            tuple(other for other in APART if other != room),
            "where a tensor lies, where it goes and what must exist are three questions",
        )
        for room in APART
    ),
    Rule("zarr", ("layouts",), "arrays know no names"),
    Rule(
        "reporting",
        ("sources", "targets", "models"),
        "a page tells what the library says, and knows no framework",
        but=("targets.request", "models.tensor_roles"),
    ),
    Rule(
        "reporting.grid", ("reporting.page", "reporting.charts"), "what is told knows nothing of how it looks"
    ),
    Rule(
        "reporting.report_data",
        ("reporting.page", "reporting.charts"),
        "what is told knows nothing of how it looks",
    ),
    *(
        Rule(container, (*FRAMEWORKS, "sources.registry"), "a container serves every framework")
        for container in CONTAINERS
    ),
    *(
        Rule(
            one,
            (*(other for other in FRAMEWORKS if other != one), "sources.registry"),
            "adding a framework edits no other's file; only the registry knows all",
        )
        for one in FRAMEWORKS
    ),
]
#: (part, name, why): names that nothing of a part imports.
NAMES = [("models", "Contents", "models see names and shapes, never what files hold")]


class Import(NamedTuple):
    """What a module imports while the program runs: a module, or a name of it."""

    module: str
    name: str


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by their names in it; the compiled one and the package itself are `_core` and
    ``""``."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _running(node: ast.AST, typed: bool) -> Iterator[ast.stmt]:
    """Statements that run, those of functions too; what stands under TYPE_CHECKING does not, unless types are
    asked for."""
    for child in ast.iter_child_nodes(node):
        if not typed and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _running(other, typed)
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _running(child, typed)


def imports(package: Path, typed: bool = False) -> dict[str, set[Import]]:
    """Imports within the package, by module; with those for types alone, if asked for."""
    files = modules(package)
    known = {*files, "_core"}
    found: dict[str, set[Import]] = {name: set() for name in files}
    for name, file in files.items():
        here = name.split(".") if name else []
        folder = here if file.name == "__init__.py" else here[:-1]
        for node in _running(ast.parse(file.read_text()), typed):
            targets: list[tuple[list[str], str]] = []
            if isinstance(node, ast.ImportFrom):
                below = node.module.split(".") if node.module else []
                if node.level:
                    base = folder[: len(folder) - (node.level - 1)] + below
                elif below and below[0] == package.name:
                    base = below[1:]
                else:
                    continue
                targets = [(base, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                words = [alias.name.split(".") for alias in node.names]
                targets = [(w[1:-1], w[-1]) for w in words if w[0] == package.name and len(w) > 1]
            for base, wanted in targets:
                full = ".".join([*base, wanted])
                found[name].add(Import(full, "") if full in known else Import(".".join(base), wanted))
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for other in graph.get(left.pop(), set()) - seen:
                seen.add(other)
                left.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    groups: list[set[str]] = []
    for name in sorted(graph):
        if name in reach[name] and not any(name in group for group in groups):
            groups.append({name} | {other for other in reach[name] if name in reach.get(other, ())})
    return groups


def within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def broken(found: dict[str, set[Import]]) -> list[str]:
    """Imports that a rule forbids."""
    said = [
        f"{name} imports {other.module}: {rule.why}"
        for rule in RULES
        for name in found
        if within(name, rule.who)
        for other in sorted(found[name])
        if any(within(other.module, part) for part in rule.never)
        if not any(within(other.module, part) for part in rule.but)
    ]
    said += [
        f"{name} imports {wanted}: {why}"
        for part, wanted, why in NAMES
        for name in found
        if within(name, part) and wanted in {other.name for other in found[name]}
    ]
    return said


def questions(file: Path) -> int:
    """Comparisons of a layout's name, and searches for features, in a file."""
    count = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            layout = any(isinstance(side, ast.Attribute) and side.attr == "layout" for side in sides)
            named = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
            features = isinstance(node.left, ast.Constant) and node.left.value == "features"
            count += (layout and named) or (features and isinstance(node.ops[0], (ast.In, ast.NotIn)))
    return count


def changes(file: Path) -> list[str]:
    """What a file sets of a source, or of a part of one, in place."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
        if re.search(r"\b(source|declared)\b", ast.unparse(node.value))
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, set[Import]]:
    return imports(PACKAGE)


@pytest.mark.parametrize("typed", [False, True], ids=["run", "types"])
def test_there_are_no_circles(typed: bool) -> None:
    found = imports(PACKAGE, typed)
    assert circles({name: {other.module for other in others} for name, others in found.items()}) == []


def test_no_part_imports_what_it_must_not(found: dict[str, set[Import]]) -> None:
    assert broken(found) == []
    assert sum(len(others) for others in found.values()) > 200, "the imports were not read"


def test_which_model_it_is_is_asked_in_models_alone() -> None:
    assert [n for n, file in modules(PACKAGE).items() if questions(file) and not within(n, "models")] == []


def test_nothing_changes_a_source_that_is_declared() -> None:
    assert {
        n: seen for n, f in modules(PACKAGE).items() if (seen := changes(f)) and not within(n, "sources")
    } == {}


# --- the reader itself


def test_circles_and_rules_are_seen(tmp_path: Path) -> None:
    """In a package of files that only this test has."""
    package = tmp_path / "made"
    files = {
        "__init__.py": "from .common.errors import E\n",
        "common/errors.py": "from .. import _core\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
        "from ..models import m\n",
        "common/sizes.py": "def late():\n    from ..sources.hf import x\n",
        "sources/__init__.py": "from .hf import x\n",
        "sources/hf.py": "import made.common.sizes\nx = 1\n",
        "models/__init__.py": "",
        "models/m.py": "from ..layouts.declaration import Contents\nfrom made.targets import t\n",
        "targets/__init__.py": "",
        "targets/t.py": "from ..sources.dcp import d\nfrom ..common import errors\n",
        "sources/dcp.py": "from .megatron.names import d\n",
        "sources/megatron/names.py": "from ...layouts.declaration import Contents\nd = 1\n",
        "layouts/declaration.py": "class Contents: ...\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = imports(package)
    assert circles({n: {o.module for o in others} for n, others in found.items()}) == [
        {"common.sizes", "sources.hf"}
    ]
    said = broken(found)
    for expected in (
        "common.sizes imports sources.hf: a room",
        "models.m imports targets.t: ",
        "models.m imports Contents: ",
        "targets.t imports sources.dcp: ",
        "sources.dcp imports sources.megatron.names: a container",
    ):
        assert any(line.startswith(expected) for line in said), (expected, said)
    assert len(said) == 5


def test_questions_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    file.write_text(
        'a = s.layout == "x"\nb = "features" not in v\nc = s.layout == other\nd = "feature" in v\n'
    )
    assert questions(file) == 2


def test_changes_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "sets.py"
    file.write_text(
        "o.source.step = 1\nself.source = source\nsource.axes['V'] += 1\nx = source.axes\na, source.model.b "
        "= 1, 2\n"
    )
    assert sorted(changes(file)) == ["o.source.step", "source.axes['V']", "source.model.b"]


def test_modules_beside_the_package_have_names_of_their_own() -> None:
    """Benchmarks and tests put folders on the path, where the first module of a name shadows the others."""
    root = Path(__file__).parents[2]
    files: dict[str, list[str]] = {}
    for folder in ("benches", "tests", "scripts", "examples"):
        for file in sorted((root / folder).rglob("*.py")):
            if not file.name.startswith(("__init__", "conftest", "test_")):
                files.setdefault(file.stem, []).append(str(file.relative_to(root)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
