"""What a store on another host's disk holds is here as long as it is read, and no longer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fastshard.external import lent


class Core:
    """Takes note of what is brought and let go."""

    CoreError = lent._core.CoreError

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def bring(self, path: Path, lo: int, hi: int) -> None:
        self.said.append(("bring", path.name, lo, hi))

    def let_go(self, path: Path, lo: int, hi: int) -> None:
        self.said.append(("let go", path.name, lo, hi))

    def will_read(self, path: Path, lo: int, hi: int) -> None:
        self.said.append(("will read", path.name, lo, hi))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    monkeypatch.setattr(lent, "_core", core)
    return core


def test_a_value_is_let_go_of_once_nobody_reads_it(core: Core, tmp_path: Path) -> None:
    (tmp_path / "manifest.ocdbt").write_bytes(b"123")
    store = lent.Lent(tmp_path, ocdbt=True)
    assert core.said == [("bring", "manifest.ocdbt", 0, 3)]
    core.said.clear()
    store.placed({"a": ("d/x", 100, 20), "b": ("d/x", 100, 20)})
    read, ended = threading.Event(), threading.Event()

    def other() -> None:
        # Another key with the same value.
        with store.held("b"):
            read.set()
            assert ended.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert read.wait(10)
    with store.held("a"):
        pass
    assert ("let go", "x", 100, 120) not in core.said
    ended.set()
    thread.join()
    assert core.said == [("bring", "x", 100, 120)] * 2 + [("let go", "x", 100, 120)]
    core.said.clear()
    # What the index itself holds lies nowhere else.
    with store.held("inline"):
        assert core.said == []
    store.send("a")
    assert core.said == [("will read", "x", 100, 120)]


def test_what_fails_is_let_go_of_too(core: Core, tmp_path: Path) -> None:
    (tmp_path / "0.0").write_bytes(bytes(7))
    store = lent.Lent(tmp_path, ocdbt=False)
    with pytest.raises(ZeroDivisionError), store.held("0.0"):
        raise ZeroDivisionError
    assert core.said == [("bring", "0.0", 0, 7), ("let go", "0.0", 0, 7)]
    core.said.clear()
    with store.held("1.0"):
        assert core.said == []
