"""Tables mean what their rules say, however they are written; and rules are derived of rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import pytest
import tomlkit
import torch
from fastshard import _core
from fastshard.layouts import tables
from helpers import FIXTURES, assert_refused
from safetensors.torch import save_file
from tomlkit.items import Item

FOLDERS = ("deepspeed", "gpt_neox", "maxtext_twins", "orbax", "sharded", "universal")
#: What each fixture is planned to be.
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"to": "hf"},
    {"to": "maxtext"},
    {"to": "gpt_neox", "tp": 2},
    {"to": "megatron"},
    {"optimizer": True},
)


def quoted(value: Any) -> Any:
    """A value with literal strings, and inline tables for what holds others."""
    if isinstance(value, str):
        return tomlkit.string(value, literal="'" not in value)
    if isinstance(value, list):
        made = tomlkit.array()
        made.extend(quoted(item) for item in value)
        return made.multiline(True)
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        inline.update({key: quoted(item) for key, item in reversed(value.items())})
        return inline
    return value


def commented(value: Any) -> Item:
    """A table with its keys in the other order, blanks and comments between them."""
    made = tomlkit.table()
    for number, (key, item) in enumerate(reversed(value.items())):
        made.add(tomlkit.comment(f"[[tensor]] {number}"))
        made.add(key, quoted(item))
        made.add(tomlkit.nl())
    return made


def rewritten(text: str, how: str) -> str:
    """The same table by a library: all inline, or in sections of another order."""
    content = tomlkit.parse(text).unwrap()
    made = tomlkit.document()
    made.add(tomlkit.comment("name = 'other'"))

    def is_plain(value: Any) -> bool:
        return not isinstance(value, dict) and not (isinstance(value, list) and isinstance(value[0], dict))

    plain = {k: v for k, v in content.items() if how == "inline" or is_plain(v)}
    for key, value in reversed(plain.items()):
        made.add(key, quoted(value))
    for key, value in reversed(content.items()):
        if key in plain:
            continue
        if isinstance(value, list):
            sections = tomlkit.aot()
            for item in value:
                sections.append(commented(item))
            made.add(key, sections)
        else:
            made.add(key, commented(value))
    written = tomlkit.dumps(made)
    assert tomlkit.parse(written).unwrap() == content
    return written


def outcomes(folder: Path) -> Iterator[tuple[str, str]]:
    """What becomes of every fixture under every plan: the plan's digest, or the findings."""
    for fixture in (f for name in FOLDERS for f in sorted((folder / name).glob("*")) if f.is_dir()):
        roots = sorted(fixture.glob("node*")) or [fixture]
        for options in PLANS:
            try:
                plan = fastshard.plan(fastshard.open(*roots), **options)
                said = json.dumps([f.to_dict() for f in plan.findings]) + plan.core.digest()
            except fastshard.FastshardError as error:
                said = json.dumps([f.to_dict() for f in error.findings])
            yield f"{fixture.name} {options}", said


@pytest.fixture(scope="module")
def fixtures(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--fixtures-dir") or FIXTURES
    return folder


@pytest.fixture(scope="module")
def tidy(fixtures: Path) -> dict[str, str]:
    found = dict(outcomes(fixtures))
    assert sum(not said.startswith("[]") or len(said) > 60 for said in found.values()) > 100
    return found


@pytest.mark.parametrize("how", ["inline", "sections"])
def test_how_a_table_is_written_makes_no_difference(
    how: str, fixtures: Path, tidy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(tables, "_parsed", {})
    for name in tables.names():
        before = tables.get(name)
        assert tables.register(rewritten(before, how)) == name and tables.get(name) != before
    got = dict(outcomes(fixtures))
    assert [key for key in tidy if got[key] != tidy[key]] == [] and len(got) == len(tidy)


def test_no_text_of_a_table_is_built_or_searched() -> None:
    """What tables say is for the core to read: a regular expression over one misses what is written
    otherwise."""
    package = Path(fastshard.__file__).parent
    # Tables that follow from a list, and no table's text, are written there for the core to read.
    made_of_lists = package / "expected/names_on_disk.py"
    for file in set(package.rglob("*.py")) - {made_of_lists}:
        # An example of the public name in a docstring is for readers.
        text = "\n".join(
            line for line in file.read_text().splitlines() if not line.lstrip().startswith(">>> ")
        )
        assert "[[tensor]]" not in text and "layouts.get(" not in text and "tables.get(" not in text, (
            file.relative_to(package)
        )


TABLE = """
layout = "mine"
family = "mine"
vocab = "V"
[shard]
tp = ["V~P"]
[[tensor]]
name = "embed.(weight|w)"
shape = "[V~P, H]"
[[tensor]]
name = "layers.{L}.q"
shape = "[H, (q:h|k:1) * d]"
as = "attention.{}"
when = "bias"
[[tensor]]
name = "layers.{L}.freq"
ignore = "recomputed"
"""


def test_a_table_tells_of_its_rules() -> None:
    table = _core.Table(TABLE)
    assert (table.name, table.family, table.vocab) == ("mine", "mine", "V")
    assert [rule.name for rule in table.rules] == ["embed.(weight|w)", "layers.{L}.q", "layers.{L}.freq"]
    assert [rule.dimensions for rule in table.rules] == [["V~P", "H"], ["H", "(q:h|k:1)*d"], None]
    found = table.rule_of("layers.11.q")
    assert found is not None and found.name == "layers.{L}.q" and found.matches("layers.0.q")
    assert table.rule_of("layers.01.q") is None and not found.matches("layers.q")
    assert table.shape("layers.3.q", {"h": 3, "d": 5}) == [None, 20]
    assert table.shape("embed.w", {"V": 7, "H": 4}) == [None, 4]
    assert table.shape("layers.3.freq", {"h": 3}) is None and table.shape("other", {}) is None


def test_rules_are_made_of_rules() -> None:
    table = _core.Table(TABLE)
    q = table.rules[1]
    stacked = table.with_rules([q.stacked("L", 1).renamed("layers.q"), table.rules[2].left_out("why")])
    assert [rule.dimensions for rule in stacked.rules] == [["H", "L", "(q:h|k:1)*d"], None]
    assert stacked.name == "mine" and len(table.rules) == 3
    with pytest.raises(_core.CoreError, match="FS210"):
        table.with_rules([q.stacked("L", 0)])
    with pytest.raises(_core.CoreError, match="FS210"):
        q.renamed("layers.{L")
    with pytest.raises(_core.CoreError, match="FS210"):
        _core.Rule.literal("a", "[H", "a")
    shapes = {"embed.w": (7, 4), "layers.0.q": (4, 20), "layers.1.q": (20, 4)}
    assert table.misfits(shapes, {"h": 3}) == 1


def test_names_of_a_layout_json_are_no_patterns(tmp_path: Path) -> None:
    """They are what a framework calls its tensors, brackets and all."""
    (tmp_path / "ckpt").mkdir()
    whole = torch.randn(8, 3)
    for rank in range(2):
        rows = torch.cat([whole, torch.zeros(2, 3)]).chunk(2)[rank]
        save_file(
            {"a{0}(b).embed_tokens.weight": rows.contiguous()},
            tmp_path / f"ckpt/tp_rank_{rank:02d}.safetensors",
        )
    described = {
        "tp": 2,
        "tp_dim": {"a{0}(b).embed_tokens.weight": 0},
        "vocab_size": 8,
        "padded_vocab_size": 10,
    }
    (tmp_path / "ckpt/layout.json").write_text(json.dumps(described))
    fastshard.merge(tmp_path / "ckpt", tmp_path / "out")
    (name,) = merged = fastshard.open(tmp_path / "out")
    assert name == "a{0}(b).embed_tokens.weight" and torch.equal(merged[name].torch(), whole)
    (tmp_path / "ckpt/tp_rank_01.safetensors").unlink()
    assert_refused(tmp_path / "ckpt", tmp_path / "not", "FS101", exit=3)
