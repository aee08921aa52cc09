"""How the product is built: what `scripts/structure.py` measures and must stay as it is."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from fastshard import _core
from fastshard.common import codes

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    return load("structure")


def test_nothing_reads_meaning_from_a_message(structure: ModuleType) -> None:
    """What a finding says in words it says in fields: a better sentence must not change what is done."""
    assert structure.find_parsed_sentences(structure.read_python(), structure.read_rust()) == []


@pytest.mark.parametrize(
    "text",
    [
        "re.search('layer', finding.message)",
        "_LAYER.match(finding.message)",
        "finding.message.startswith('the reference')",
        "finding.message.removeprefix('not provable: ')",
        "'missing' in finding.message",
        "finding.message == 'missing file'",
    ],
)
def test_reading_meaning_from_a_message_is_seen(structure: ModuleType, text: str) -> None:
    assert structure.find_parsed_sentences({structure.ROOT / "a.py": text}, {}) == ["a.py:1"]


def test_words_in_names_stand_in_one_list(structure: ModuleType) -> None:
    """A word that one place knows and another does not makes a tensor an embedding here and none there."""
    (place,) = structure.find_name_lists(structure.read_python(), structure.read_rust())
    assert place.startswith("python/fastshard/models/tensor_words.py:")


@pytest.mark.parametrize(
    ("file", "text"),
    [("a.py", "_HEADS = ('lm_head',)"), ("a.rs", 'pub const TABLES: [&str; 2] = ["embed", "wte"];')],
)
def test_another_list_is_seen(structure: ModuleType, file: str, text: str) -> None:
    texts = {structure.ROOT / file: text}
    assert len(structure.find_name_lists(*((texts, {}) if file.endswith(".py") else ({}, texts)))) == 1


def test_reading_meaning_from_a_message_is_seen_in_the_core(structure: ModuleType) -> None:
    text = 'if finding.message.starts_with("missing") {'
    assert structure.find_parsed_sentences({}, {structure.ROOT / "a.rs": text}) == ["a.rs:1"]


def parse(structure: ModuleType) -> dict[Path, ast.Module]:
    texts = structure.read_python()
    return {file: ast.parse(text) for file, text in texts.items() if file.suffix == ".py"}


def test_codes_have_names(structure: ModuleType) -> None:
    """A code is written by its name, so that a reader need not know its number."""
    assert structure.find_numerals(parse(structure)) == []
    assert all(getattr(codes, row.name) == code for code, row in codes.CODES.items())


def test_sets_of_codes_stand_in_the_table(structure: ModuleType) -> None:
    """Whoever adds a code sees in its row what it has in common with others."""
    assert structure.find_code_sets(parse(structure), structure.read_rust()) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("_LOST = (codes.MISSING_FILE, codes.RENAMED)", 1),
        ("f.code in {codes.MISSING_FILE, *MORE}", 1),
        ("_LOST = ['FS101', 'FS113']", 1),
        ("row = ('missing_keys', codes.MISSING_TENSOR)", 0),
        ("finding.code == codes.MISSING_TENSOR", 0),
    ],
)
def test_another_set_of_codes_is_seen(structure: ModuleType, text: str, count: int) -> None:
    assert len(structure.find_code_sets({structure.ROOT / "a.py": ast.parse(text)}, {})) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("let lost = [codes::MISSING_FILE, codes::RENAMED];", 1),
        ("matches!(code, codes::MISSING_FILE | codes::RENAMED)", 1),
        ("Finding::new(codes::MISSING_FILE, message)", 0),
    ],
)
def test_another_set_of_codes_is_seen_in_the_core(structure: ModuleType, text: str, count: int) -> None:
    assert len(structure.find_code_sets({}, {structure.ROOT / "a.rs": text})) == count


def test_kinds_are_known_by_name() -> None:
    assert _core.Finding.of(codes.MISSING_TENSOR, "").is_a("unproven", "missing_tensor")
    assert not _core.Finding.of(codes.MISSING_TENSOR, "").is_a()
    with pytest.raises(ValueError, match="no kind of codes: missing"):
        _core.Finding.of(codes.MISSING_TENSOR, "").is_a("missing")  # type: ignore[arg-type]


def test_the_tree_of_the_sources_is_made_of_their_first_sentences() -> None:
    """`python scripts/tree.py` writes it again."""
    tree = load("tree")
    page = tree.PAGE.read_text(encoding="utf-8")
    assert tree.write_tree(page) == page


def test_every_line_is_the_formatters() -> None:
    """A table that needs alignment is data; the linter holds the width of lines."""
    marks = ("# fmt: " + "skip", "# fmt: " + "off")
    folders = ("python", "tests", "benches", "docs", "examples", "scripts")
    files = [file for folder in folders for file in (SCRIPTS.parent / folder).rglob("*.py")]
    assert len(files) > 300
    kept = [str(file) for file in files if any(mark in file.read_text(encoding="utf-8") for mark in marks)]
    assert kept == []


#: Names of the dialect that are keys of stored documents, public, or the name by which a released wheel is
#: searched.
KEPT = {"findings/proof.py told", "expected/expected_list.py made", "src/steps.rs held"}


def test_names_say_what_things_are(structure: ModuleType) -> None:
    """Not what happened to them: told, held, said, stated, lent, judged, asked, made."""
    names, _ = structure.find_dialect(parse(structure), structure.read_rust())
    short = {"/".join(name.split(":")[0].split("/")[-2:]) + " " + name.split()[-1] for name in names}
    assert short == KEPT


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def told(): pass", 1),
        ("def find(held): pass", 1),
        ("class Held: pass", 1),
        ("_TOLD = 3", 1),
        ("def find():\n    told = 1", 0),
        ("def tell(findings): pass", 0),
    ],
)
def test_a_name_of_the_dialect_is_seen(structure: ModuleType, text: str, count: int) -> None:
    assert len(structure.find_dialect({structure.ROOT / "a.py": ast.parse(text)}, {})[0]) == count


def test_files_of_the_core_import_in_no_circle(structure: ModuleType) -> None:
    assert structure.find_rust_circles(structure.read_rust()) == []
