"""How the product is built: what `scripts/structure.py` measures and must stay as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/structure.py"


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_reads_meaning_from_a_message(structure: ModuleType) -> None:
    """What a finding says in words it says in fields: a better sentence must not change what is done."""
    assert structure.from_messages(structure.python(), structure.rust()) == []


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
    assert structure.from_messages({structure.ROOT / "a.py": text}, {}) == ["a.py:1"]


def test_words_in_names_stand_in_one_list(structure: ModuleType) -> None:
    """A word that one place knows and another does not makes a tensor an embedding here and none there."""
    (place,) = structure.name_lists(structure.python(), structure.rust())
    assert place.startswith("python/fastshard/models/tensor_words.py:")


@pytest.mark.parametrize(
    ("file", "text"),
    [("a.py", "_HEADS = ('lm_head',)"), ("a.rs", 'pub const TABLES: [&str; 2] = ["embed", "wte"];')],
)
def test_another_list_is_seen(structure: ModuleType, file: str, text: str) -> None:
    texts = {structure.ROOT / file: text}
    assert len(structure.name_lists(*((texts, {}) if file.endswith(".py") else ({}, texts)))) == 1


def test_reading_meaning_from_a_message_is_seen_in_the_core(structure: ModuleType) -> None:
    text = 'if finding.message.starts_with("missing") {'
    assert structure.from_messages({}, {structure.ROOT / "a.rs": text}) == ["a.rs:1"]
