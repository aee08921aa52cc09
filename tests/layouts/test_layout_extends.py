"""Tables that extend others: what is taken over, what must be dropped first, and what a registered parent
does."""

from __future__ import annotations

from collections.abc import Iterator

import fastshard
import pytest
from fastshard import _core
from fastshard.layouts import tables

PARENT = """
layout = "mine.parent"
family = "mine"
[[tensor]]
name = "layers.{L}.q"
shape = "[h*d, H]"
as = "attention.q"
[[tensor]]
name = "layers.{L}.mlp"
shape = "[F, H]"
as = "mlp.up"
"""
CHILD = """
layout = "mine.child"
family = "mine"
extends = "mine.parent"
drop = ["mlp.*"]
[axes]
J = "=H"
[[tensor]]
name = "layers.{L}.join"
shape = "[H, (a:J|b:J)]"
as = "join.{}"
"""


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(tables, "_parsed", {})
    yield


def refused(text: str, wanted: str) -> None:
    with pytest.raises(fastshard.FastshardError, match=wanted) as caught:
        tables.register(text)
    assert caught.value.findings[0].code == "FS210"


def names(layout: str) -> list[str]:
    return [rule.name for rule in tables.table(layout).rules]


def test_a_registered_table_extends_another() -> None:
    refused(CHILD, "no registered layout")
    assert tables.names() and "mine.child" not in tables.names()
    tables.register(PARENT)
    assert tables.register(CHILD) == "mine.child"
    assert names("mine.child") == ["layers.{L}.q", "layers.{L}.join"]
    table = tables.table("mine.child")
    assert table.shape("layers.0.join", {"H": 4}) == [4, 8]
    # The parent registered anew: its children are made of what it is now.
    tables.register(PARENT.replace("layers.{L}.q", "h.{L}.q"))
    assert names("mine.child") == ["h.{L}.q", "layers.{L}.join"]


def test_a_built_in_table_is_extended() -> None:
    tables.register(
        'layout = "mine.llama"\nfamily = "llama"\nextends = "hf.llama"\ndrop = ["attention.*.bias"]\n'
    )
    dropped = set(names("hf.llama")) - set(names("mine.llama"))
    assert len(dropped) == 4 and all(name.endswith("_proj.bias") for name in dropped)
    assert tables.table("mine.llama").vocab == "V"


def test_nothing_is_replaced_silently() -> None:
    tables.register(PARENT)
    refused(CHILD.replace('drop = ["mlp.*"]', 'drop = ["mlp.*", "moe.*"]'), "moe")
    again = '[[tensor]]\nname = "layers.{L}.query"\nshape = "[h*d, H]"\nas = "attention.q"\n'
    refused(CHILD + again, "attention.q is inherited .*drop it first")
    # Two spellings of one tensor: the one with alternatives holds it too.
    refused(
        CHILD + again.replace("[h*d, H]", "[(q:h|k:g)*d, H]").replace("attention.q", "attention.{}"), "drop"
    )
    refused(CHILD + again.replace(".query", ".q").replace("attention.q", "other"), "drop it first")


def test_no_table_extends_itself() -> None:
    tables.register(PARENT)
    tables.register(CHILD)
    refused('layout = "mine.parent"\nfamily = "mine"\nextends = "mine.child"\n', "extends itself")
    # What was refused is not registered, and what was is as it was.
    assert names("mine.child") == ["layers.{L}.q", "layers.{L}.join"]
    itself = 'layout = "mine.child"\nfamily = "mine"\nextends = "mine.child"\n'
    refused(itself, "itself")
    with pytest.raises(_core.CoreError, match="FS210"):
        _core.Table(CHILD)
    assert _core.Table.extends_of(CHILD) == "mine.parent"
