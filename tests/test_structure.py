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


def test_reading_meaning_from_a_message_is_seen_in_the_core(structure: ModuleType) -> None:
    text = 'if finding.message.starts_with("missing") {'
    assert structure.from_messages({}, {structure.ROOT / "a.rs": text}) == ["a.rs:1"]
