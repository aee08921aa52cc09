"""What a user does to OUT, before a run and while it goes on."""

from __future__ import annotations

import os
import random
from pathlib import Path

from trees import Foreign, by_chance

#: Kinds of change.
KINDS = ("added", "below", "edited", "replaced", "touched", "folder")
#: What readers leave behind; it does not count.
LEAVINGS = (
    ".cache/huggingface/download/model.metadata",
    ".gitattributes",
    "__pycache__/model.cpython-311.pyc",
    ".nfs000000000001",
)


def leave(out: Path) -> list[Foreign]:
    """Readers' leavings in a result."""
    left = [Foreign(name, b"left by a reader\n", counts=False) for name in LEAVINGS]
    for thing in left:
        (out / thing.path).parent.mkdir(parents=True, exist_ok=True)
        (out / thing.path).write_bytes(thing.content or b"")
    return left


def disturb(out: Path, foreign: list[Foreign], kind: str, rng: random.Random) -> None:
    """Changes OUT and adds what is there now to the list; what the user puts another file over is no loss."""
    was = {f.path: _read(out / f.path) for f in foreign if f.content is not None}
    made = _change(out, kind, rng)
    for thing in foreign:
        if made.counts and thing.path == made.path and was.get(thing.path) == thing.content is not None:
            thing.counts = False
    foreign.append(made)


def _change(out: Path, kind: str, rng: random.Random) -> Foreign:
    """Changes OUT, which is made if it is not there; files appear by a rename, as editors write them."""
    mark = rng.randbytes(8).hex()
    files = sorted((p for p in _below(out) if _kept(p, out)), key=_size)
    if kind == "folder":
        out.mkdir(exist_ok=True)
        (out / "empty-folder").mkdir(exist_ok=True)
        return Foreign("empty-folder", None)
    if kind == "touched" and files:
        name, content = str(files[-1].relative_to(out)), _read(files[-1])
        os.utime(files[-1]) if content is not None else None
        return Foreign(name, content or b"", counts=False)
    if kind == "replaced" and files:
        size = _size(files[-1])
        return _put(out, str(files[-1].relative_to(out)), (mark.encode() * (size // 16 + 1))[: max(size, 16)])
    if kind == "edited":
        texts = [p for p in files if p.suffix in (".json", ".txt", "") and "manifest" not in p.name]
        name = (
            "config.json" if (out / "config.json") in texts or not texts else str(texts[0].relative_to(out))
        )
        return _put(out, name, b'{"edited": "%s"}' % mark.encode())
    return _put(
        out, "src/train.py" if kind == "below" else f"notes-{mark[:4]}.txt", f"precious {mark}\n".encode()
    )


def _below(out: Path) -> list[Path]:
    """What is in OUT, of which a run that is going on may take away folders meanwhile."""
    found = []
    for folder, _, names in os.walk(out):
        found += [Path(folder) / name for name in names]
    return found


def _kept(path: Path, out: Path) -> bool:
    """True for a file of a result that may be changed: not in a staging folder, and no two runs make it
    differ."""
    name = str(path.relative_to(out))
    return path.is_file() and ".fastshard-" not in name and not by_chance(name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _put(out: Path, name: str, content: bytes) -> Foreign:
    ready = out.parent.parent / f"ready-{out.parent.name}"
    ready.write_bytes(content)
    # Between two renames of a publishing without an exchange, the folder is not there.
    for _ in range(100):
        try:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            ready.rename(out / name)
            return Foreign(name, content)
        except (FileNotFoundError, FileExistsError):
            continue
    raise OSError(f"{out / name}: cannot be put there")
