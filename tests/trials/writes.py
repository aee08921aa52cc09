"""What a run wrote, call by call, and the states that a power cut may leave of it.

A :class:`Record` follows the calls of a run that change a folder, with their contents, in a model of that
folder. A :class:`Cut` takes the record at an instant: what was synced before is there, of the rest a part
that chance chooses.

What a filesystem promises, and no more:

- ``fsync`` and ``fdatasync`` of a file bring its content and size to disk, not its name; ``fsync`` its time
  as well.
- ``fsync`` of a directory brings its entries to disk; of a rename, that of the directory with the new name.
- A rename is there as a whole or not at all, and so is an exchange.
- Of a file's content that was not synced, each block of 4 KiB is there, absent (what was there before, or
  zeros), or torn between two sectors; of its sizes, one of those that it had.
- Of a directory's changes that were not synced, those up to some instant are there (``ordered``), or any of
  them, except that changes of one entry and of one file keep their order, and a directory is removed after
  what was in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from intercept import Call
from runner import Run

BLOCK, SECTOR = 4096, 512
_AT_REMOVEDIR = 0x200
_NOREPLACE, _EXCHANGE = 1, 2
_FALLOC_KEEP_SIZE = 1


@dataclass(eq=False)
class Node:
    """A file or directory."""

    is_folder: bool
    #: Number that the filesystem gave it, and its permissions; 0 until they are looked up.
    inode: int = 0
    mode: int = 0
    #: Content and time (nanoseconds since the epoch) before the run.
    before: bytes = b""
    time: int = 0
    #: Size in bytes now.
    size: int = 0


#: A name in a directory.
Entry = tuple[Node, str]


@dataclass(frozen=True)
class Write:
    """Bytes of a file at an offset, or a new size without bytes."""

    node: Node
    offset: int
    data: bytes
    #: Size of the file afterwards.
    size: int


@dataclass(frozen=True)
class Names:
    """Entries of directories that change in one step."""

    changes: dict[Entry, Node | None]
    #: The directory whose sync brings it to disk.
    folder: Node
    #: The directory that is removed.
    removed: Node | None = None


@dataclass(frozen=True)
class Sync:
    """A file or directory is brought to disk; all of them without one."""

    node: Node | None
    #: Time of the file, if that is brought to disk too.
    time: int | None = None


Event = Write | Names | Sync


class Record:
    """The calls of a run on a folder: the hook of a run (:meth:`runner.Zygote.start`)."""

    def __init__(self, area: Path) -> None:
        self.area = area
        self.events: list[Event] = []
        self.root = Node(is_folder=True)
        #: Entries before the run, and now.
        self.before: dict[Entry, Node] = {}
        self._load(self.root, area)
        self.now = dict(self.before)
        #: What was called, by event.
        self.calls: list[str] = []

    def _load(self, folder: Node, path: Path) -> None:
        for entry in sorted(path.iterdir()):
            status = entry.lstat()
            if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
                raise ValueError(f"{entry}: neither a file nor a directory")
            mode = stat.S_IMODE(status.st_mode)
            node = Node(entry.is_dir(), status.st_ino, mode, time=status.st_mtime_ns)
            self.before[folder, entry.name] = node
            if node.is_folder:
                self._load(node, entry)
            else:
                node.before = entry.read_bytes()
                node.size = len(node.before)

    def __call__(self, run: Run, call: Call) -> None:
        """Takes a call that is about to be done. All calls before have been done."""
        self._look_up()
        take = getattr(self, f"on_{call.kind}", None)
        if take is not None:
            take(call)

    def check(self) -> None:
        """Compares the model with the folder once the run has ended; raises what the record does not
        explain."""
        self._look_up()
        cut = Cut(self, len(self.events), random.Random(0), lost=False)
        found = {str(p.relative_to(self.area)): p for p in self.area.rglob("*")}
        known = dict(cut.walk())
        if found.keys() != known.keys():
            raise SystemExit(f"the record does not explain {sorted(found.keys() ^ known.keys())}")
        for name, node in known.items():
            if not node.is_folder and found[name].read_bytes() != cut.content(node):
                raise SystemExit(f"the record does not explain the content of {name}")

    def forget(self, pattern: re.Pattern[str]) -> int:
        """Leaves out the syncs whose call matches, as if the program did without; how many they are."""
        events = zip(self.events, self.calls, strict=True)
        kept = [(e, call) for e, call in events if not (isinstance(e, Sync) and pattern.search(call))]
        forgotten = len(self.events) - len(kept)
        self.events, self.calls = [e for e, _ in kept], [call for _, call in kept]
        return forgotten

    def _look_up(self) -> None:
        """Inode numbers and modes of what was made by the calls before."""
        if all(node.inode for node in self.now.values()):
            return
        for path, node in walk(self.root, self.now):
            # Another thread may have been asked about, and not have gone on yet.
            with contextlib.suppress(FileNotFoundError):
                status = (self.area / path).lstat()
                node.inode, node.mode = status.st_ino, stat.S_IMODE(status.st_mode)

    def _entry(self, path: str) -> Entry | None:
        """The directory and the name of a path, if it lies in the folder."""
        if not path.startswith(f"{self.area}/"):
            return None
        *above, name = path.removeprefix(f"{self.area}/").split("/")
        folder = self.root
        for part in above:
            found = self.now.get((folder, part))
            if found is None or not found.is_folder:
                return None
            folder = found
        return folder, name

    def _node(self, path: str) -> Node | None:
        """What lies at a path, or is open from there; None for what has no name any more."""
        if path == str(self.area):
            return self.root
        entry = self._entry(path)
        return self.now.get(entry) if entry else None

    def _note(self, call: Call, event: Event) -> None:
        self.events.append(event)
        path = os.path.relpath(call.path, self.area)
        self.calls.append(f"{call.kind} {path}")

    def _change(
        self, call: Call, changes: dict[Entry, Node | None], folder: Node, removed: Node | None = None
    ) -> None:
        self._note(call, Names(changes, folder, removed))
        for entry, node in changes.items():
            if node is None:
                del self.now[entry]
            else:
                self.now[entry] = node

    # --- calls, by their names

    def on_openat(self, call: Call) -> None:
        flags = call.arguments[2]
        entry = self._entry(call.path)
        if entry is None:
            return
        node = self.now.get(entry)
        if flags & os.O_CREAT and node is None:
            self._change(call, {entry: Node(is_folder=False)}, entry[0])
        elif flags & os.O_TRUNC and node is not None and not flags & os.O_EXCL:
            self._write(call, node, 0, b"", 0)

    def on_mkdir(self, call: Call) -> None:
        entry = self._entry(call.path)
        if entry is not None and entry not in self.now:
            self._change(call, {entry: Node(is_folder=True)}, entry[0])

    on_mkdirat = on_mkdir

    def _remove(self, call: Call, is_folder: bool) -> None:
        entry = self._entry(call.path)
        node = self.now.get(entry) if entry else None
        if entry is None or node is None or node.is_folder != is_folder:
            return
        if not any(folder is node for folder, _ in self.now):
            self._change(call, {entry: None}, entry[0], node if is_folder else None)

    def on_unlinkat(self, call: Call) -> None:
        self._remove(call, bool(call.arguments[2] & _AT_REMOVEDIR))

    def on_unlink(self, call: Call) -> None:
        self._remove(call, is_folder=False)

    def on_rmdir(self, call: Call) -> None:
        self._remove(call, is_folder=True)

    def _move(self, call: Call, flags: int) -> None:
        first, second = map(self._entry, call.paths())
        if first is None or second is None:
            raise SystemExit(f"{call}: from or to another folder")
        moved, there = self.now.get(first), self.now.get(second)
        if moved is None or (flags & _NOREPLACE and there) or (flags & _EXCHANGE and not there):
            return
        if there is not None and not flags & _EXCHANGE and any(folder is there for folder, _ in self.now):
            return
        self._change(call, {first: there if flags & _EXCHANGE else None, second: moved}, second[0])

    def on_rename(self, call: Call) -> None:
        self._move(call, 0)

    def on_renameat(self, call: Call) -> None:
        self._move(call, 0)

    def on_renameat2(self, call: Call) -> None:
        self._move(call, call.arguments[4])

    def on_fchmod(self, call: Call) -> None:
        if node := self._node(call.path):
            node.mode = call.arguments[1]

    def _write(self, call: Call, node: Node, offset: int, data: bytes, size: int) -> None:
        self._note(call, Write(node, offset, data, size))
        node.size = size

    def _put(self, call: Call, offset: int, data: bytes) -> None:
        node = self._node(call.path)
        if node is not None and data:
            self._write(call, node, offset, data, max(node.size, offset + len(data)))

    def on_pwrite64(self, call: Call) -> None:
        _, address, size, offset, *_ = call.arguments
        self._put(call, offset, call.memory(address, size))

    def _position(self, call: Call) -> int:
        """Where the next bytes of an open file go."""
        lines = Path(f"/proc/{call.thread}/fdinfo/{call.arguments[0]}").read_text().split("\n")
        values = dict(line.split(":\t") for line in lines if ":\t" in line)
        node = self._node(call.path)
        return node.size if node and int(values["flags"], 8) & os.O_APPEND else int(values["pos"])

    def _vectors(self, call: Call) -> bytes:
        _, address, count, *_ = call.arguments
        pairs = struct.iter_unpack("<QQ", call.memory(address, 16 * count))
        return b"".join(call.memory(start, size) for start, size in pairs)

    def on_pwritev(self, call: Call) -> None:
        self._put(call, call.arguments[3], self._vectors(call))

    def on_write(self, call: Call) -> None:
        _, address, size, *_ = call.arguments
        self._put(call, self._position(call), call.memory(address, size))

    def on_writev(self, call: Call) -> None:
        self._put(call, self._position(call), self._vectors(call))

    def on_ftruncate(self, call: Call) -> None:
        if node := self._node(call.path):
            self._write(call, node, 0, b"", call.arguments[1])

    def on_fallocate(self, call: Call) -> None:
        _, mode, offset, size, *_ = call.arguments
        node = self._node(call.path)
        if mode & ~_FALLOC_KEEP_SIZE:
            raise SystemExit(f"{call}: only the reservation of space is known")
        if node is not None and not mode:
            self._write(call, node, 0, b"", max(node.size, offset + size))

    def _sync(self, call: Call) -> None:
        if call.kind == "syncfs":
            self._note(call, Sync(None))
        elif node := self._node(call.path):
            is_full = call.kind == "fsync" and not node.is_folder
            time = Path(call.path).stat().st_mtime_ns if is_full else None
            self._note(call, Sync(node, time))

    on_fsync = on_fdatasync = on_syncfs = _sync


def walk(folder: Node, entries: dict[Entry, Node], above: str = "") -> Iterator[tuple[str, Node]]:
    """All below a folder, by path, a directory before what is in it."""
    for (parent, name), node in list(entries.items()):
        if parent is folder:
            yield f"{above}{name}", node
            if node.is_folder:
                yield from walk(node, entries, f"{above}{name}/")


@dataclass
class Cut:
    """What a power cut leaves when the first ``instant`` events of a record were done."""

    record: Record
    instant: int
    rng: random.Random
    #: False for what a machine shows that keeps running: all that was written.
    lost: bool = True
    #: True if the changes of a directory that were not synced are there in their order.
    ordered: bool = True
    #: Shares of the changes of names, and of the blocks, that were not synced and are there nevertheless.
    names: float = 0.5
    blocks: float = 0.5
    entries: dict[Entry, Node] = field(init=False)

    def __post_init__(self) -> None:
        self._events = self.record.events[: self.instant]
        self.entries = self._names()

    def _synced(self, node: Node) -> int:
        """How many events there were when a file or directory was last brought to disk."""
        found = (i + 1 for i, e in enumerate(self._events) if isinstance(e, Sync) and e.node in (node, None))
        return self.instant if not self.lost else max(found, default=0)

    def _names(self) -> dict[Entry, Node]:
        changes = [(i, event) for i, event in enumerate(self._events) if isinstance(event, Names)]
        folders = dict.fromkeys(folder for _, event in changes for folder, _ in event.changes)
        cuts = {folder: self._up_to(folder) for folder in folders}
        there = set()
        for i, event in changes:
            if self.ordered:
                is_there = all(i < cuts[folder] for folder, _ in event.changes)
            else:
                is_there = self.rng.random() < self.names
            if is_there or i < self._synced(event.folder):
                there.add(i)
        # What a change that is there comes after is there as well.
        for at in range(len(changes) - 1, -1, -1):
            i, event = changes[at]
            if i in there:
                there |= {j for j, earlier in changes[:at] if _comes_after(event, earlier, self.ordered)}
        entries = dict(self.record.before)
        for i, event in changes:
            if i in there:
                for entry, node in event.changes.items():
                    if node is None:
                        entries.pop(entry, None)
                    else:
                        entries[entry] = node
        return entries

    def _up_to(self, folder: Node) -> int:
        """The instant up to which the changes of a directory are there."""
        synced = self._synced(folder)
        if self.names in (0, 1):
            return self.instant if self.names else synced
        return self.rng.randint(synced, self.instant)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """All that is there, by path, a directory before what is in it."""
        return walk(self.record.root, self.entries)

    def content(self, node: Node) -> bytes:
        """The bytes of a file."""
        synced = self._synced(node)
        writes = [(i, e) for i, e in enumerate(self._events) if isinstance(e, Write) and e.node is node]
        content = bytearray(node.before)
        for _, event in (w for w in writes if w[0] < synced):
            _resize(content, event.size)
            content[event.offset : event.offset + len(event.data)] = event.data
        late = [w for w in writes if w[0] >= synced]
        sizes = self._sizes(synced)
        size = next((e.size for i, e in reversed(late) if i < sizes), len(content))
        until: dict[int, tuple[int, int]] = {}
        for i, event in late:
            if i < sizes:
                _resize(content, event.size)
            for start in range(event.offset // BLOCK * BLOCK, event.offset + len(event.data), BLOCK):
                last, sector = until.setdefault(start, self._block(synced))
                lo, hi = max(start, event.offset), min(start + BLOCK, event.offset + len(event.data))
                # Of the last write that is there, a block that is torn has the sectors before one.
                hi = hi if i < last else min(hi, start + sector) if i == last else lo
                if lo < hi:
                    _resize(content, max(hi, len(content)))
                    content[lo:hi] = event.data[lo - event.offset : hi - event.offset]
        _resize(content, size)
        return bytes(content)

    def _sizes(self, synced: int) -> int:
        """The instant up to which the sizes of a file are there."""
        if self.blocks == 1:
            return self.instant
        return synced if self.rng.random() < 0.25 else self.rng.randint(synced, self.instant)

    def _block(self, synced: int) -> tuple[int, int]:
        """Which events a block has: all before this one, and of this one the bytes before a sector."""
        if self.rng.random() < self.blocks:
            return self.instant, 0
        if self.rng.random() < 0.5:
            return synced, 0
        return self.rng.randint(synced, self.instant), SECTOR * self.rng.randrange(BLOCK // SECTOR)

    def time(self, node: Node) -> int | None:
        """When a file was last changed, as the disk has it; None if that was not brought to disk since."""
        events = [e for e in self._events if isinstance(e, Write | Sync) and e.node is node]
        if not events:
            return node.time or None
        last = events[-1]
        return last.time if isinstance(last, Sync) else None

    def make(self) -> None:
        """Puts this state into the folder, which is empty."""
        area, inodes = self.record.area, {}
        nodes = list(self.walk())
        for path, node in nodes:
            place = area / path
            if node.is_folder:
                place.mkdir()
            else:
                place.write_bytes(self.content(node))
                if (time := self.time(node)) is not None:
                    os.utime(place, ns=(time, time))
            inodes[node.inode] = place.lstat().st_ino
        for path, node in reversed(nodes):
            place = area / path
            if place.name in ("sealed", "sealed.new"):
                _renumber(place, inodes)
            place.chmod(node.mode)


def _comes_after(later: Names, earlier: Names, ordered: bool) -> bool:
    """True if a change of names is on disk only when an earlier one is."""
    if later.changes.keys() & earlier.changes.keys():
        return True
    if set(later.changes.values()) & set(earlier.changes.values()) - {None}:
        return True
    folders = {folder for folder, _ in earlier.changes}
    if later.removed in folders:
        return True
    return ordered and bool(folders & {folder for folder, _ in later.changes})


def _resize(content: bytearray, size: int) -> None:
    """Cuts a content, or adds zeros."""
    del content[size:]
    content.extend(bytes(size - len(content)))


def _renumber(seal: Path, inodes: dict[int, int]) -> None:
    """Gives a seal the inode number that its directory has in this state: a power cut changes none."""
    try:
        document = json.loads(seal.read_bytes())
        document["inode"] = inodes.get(document["inode"], document["inode"])
    except (ValueError, KeyError, TypeError):
        # Torn, as a seal may be that was not brought to disk.
        return
    seal.write_text(json.dumps(document))
