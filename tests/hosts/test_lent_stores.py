"""What a store on another host's disk holds is here as long as it is read, and no longer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.zarr import remote_ranges


class Core:
    """Takes note of what is brought and let go."""

    CoreError = remote_ranges._core.CoreError

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def bring(self, path: Path, lo: int, hi: int) -> None:
        self.said.append(("bring", path.name, lo, hi))

    def let_go(self, path: Path, lo: int, hi: int) -> None:
        self.said.append(("let go", path.name, lo, hi))

    def will_read(self, ranges: list[tuple[Path, int, int]]) -> None:
        self.said += [("will read", path.name, lo, hi) for path, lo, hi in ranges]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    monkeypatch.setattr(remote_ranges, "_core", core)
    # A process keeps the ranges that it read last: those of earlier tests are none of these stores'.
    monkeypatch.setattr(remote_ranges, "_ranges", {})
    monkeypatch.setattr(remote_ranges, "_idle", OrderedDict())
    return core


def database(folder: Path) -> remote_ranges.RemoteStore:
    (folder / "manifest.ocdbt").write_bytes(b"123")
    return remote_ranges.RemoteStore(folder, ocdbt=True)


def test_a_value_is_brought_once_for_all_who_read_it(core: Core, tmp_path: Path) -> None:
    store = database(tmp_path)
    assert core.said == [("bring", "manifest.ocdbt", 0, 3)]
    core.said.clear()
    store.placed({"a": ("d/x", 100, 20), "b": ("d/x", 100, 20)})
    # Another store that has the same file.
    other = database(tmp_path)
    other.placed({"c": ("d/x", 100, 20)})
    core.said.clear()
    with store.fetch("a"), store.fetch("b"), other.fetch("c"):
        pass
    with store.fetch("a"):
        pass
    assert core.said == [("bring", "x", 100, 120)]
    core.said.clear()
    # What the index itself holds lies nowhere else.
    with store.fetch("inline"):
        assert core.said == []
    remote_ranges.send([(store, "a"), (store, "inline"), (other, "c")])
    assert core.said == [("will read", "x", 100, 120)] * 2


def test_no_more_is_kept_than_was_read_last(core: Core, tmp_path: Path) -> None:
    store = database(tmp_path)
    store.placed({str(i): ("d/x", 100 * i, 20) for i in range(50)})
    core.said.clear()
    with store.fetch("0"):
        for key in range(1, 50):
            with store.fetch(str(key)):
                pass
        let_go = [said[2] for said in core.said if said[0] == "let go"]
        # The oldest first, and never what is being read.
        assert let_go == [100 * i for i in range(1, 42)]
    with store.fetch("1"):
        pass
    assert core.said[-2:] == [("bring", "x", 100, 120), ("let go", "x", 4300, 4320)]


def test_what_fails_is_brought_again(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.0").write_bytes(bytes(7))
    store = remote_ranges.RemoteStore(tmp_path, ocdbt=False)

    def fails(path: Path, lo: int, hi: int) -> None:
        raise Core.CoreError([fastshard.Finding.of("FS507", "gone")])

    with monkeypatch.context() as broken:
        broken.setattr(core, "bring", fails)
        with pytest.raises(fastshard.FastshardError), store.fetch("0.0"):
            raise AssertionError
    with pytest.raises(ZeroDivisionError), store.fetch("0.0"):
        raise ZeroDivisionError
    assert core.said == [("bring", "0.0", 0, 7)]
    with store.fetch("1.0"):
        assert len(core.said) == 1


def test_readers_wait_for_one_another(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = database(tmp_path)
    store.placed({"a": ("d/x", 0, 20)})
    here, begun = threading.Event(), threading.Event()

    def slowly(path: Path, lo: int, hi: int) -> None:
        begun.set()
        assert not here.wait(0.2)
        here.set()

    monkeypatch.setattr(core, "bring", slowly)
    seen: list[bool] = []

    def read() -> None:
        with store.fetch("a"):
            seen.append(here.is_set())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3
