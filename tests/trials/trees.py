"""What is in a folder, and which of the results that are known it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Path relative to the folder -> digest of a file, ``dir``, or ``link:TARGET``.
Tree = dict[str, str]

MANIFEST = "fastshard.manifest.json"
#: Files from which readers start: in a folder that is filled file by file they come last.
POINTERS = (
    "model.safetensors.index.json",
    "latest",
    "latest_checkpointed_iteration.txt",
    ".metadata",
)
#: Fields of a manifest that are no property of the content.
_VOLATILE = ("mtime", "ctime", "created", "written", "inode", "provenance")


def digest(data: bytes) -> str:
    """Digest of a file's bytes; files of zeros are told apart, since lost writes leave them."""
    if data and not data.strip(b"\0"):
        return f"zeros:{len(data)}"
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def raw(folder: Path) -> Tree | None:
    """Everything in a folder, bit for bit; None if it is not there."""
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        return {".": "not a directory"}
    tree: Tree = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            tree[name] = f"link:{path.readlink()}"
        elif path.is_dir():
            tree[name] = "dir"
        else:
            tree[name] = digest(path.read_bytes())
    return tree


def meaning(folder: Path, tree: Tree) -> Tree:
    """The tree without what two right runs may do differently: recorded times, and how OCDBT names its
    files."""
    tree = dict(tree)
    for name in [n for n in tree if n.endswith("manifest.ocdbt")]:
        store = name.removesuffix("manifest.ocdbt")
        own = (f"{store}d", f"{store}d/", f"{store}manifest.ocdbt")
        values = _ocdbt(folder / store)
        tree = {n: d for n, d in tree.items() if n not in own and not n.startswith(own[1])}
        tree[f"{store}@values"] = values
    if MANIFEST in tree and not tree[MANIFEST].startswith("zeros"):
        tree[MANIFEST] = _manifest(folder / MANIFEST, opaque=any(n.endswith("@values") for n in tree))
    return tree


def _ocdbt(store: Path) -> str:
    """Digest of a store's keys and values, read by TensorStore."""
    import tensorstore

    try:
        opened = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{store}/"}).result()
        keys = sorted(opened.list().result())
        values = [opened.read(key).result().value for key in keys]
    except (ValueError, OSError) as error:
        return f"unreadable: {error}"
    return digest(
        b"".join(
            len(part).to_bytes(8, "little") + part for pair in zip(keys, values, strict=True) for part in pair
        )
    )


def _manifest(path: Path, opaque: bool) -> str:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"unreadable: {error}"
    return digest(json.dumps(_stable(document, opaque), sort_keys=True).encode())


def _stable(value: Any, opaque: bool) -> Any:
    """A document without times, what was noticed of sources meanwhile, and files with names of chance."""
    if isinstance(value, dict):
        return {
            k: _stable(v, opaque)
            for k, v in value.items()
            if not k.startswith(_VOLATILE) and not (opaque and by_chance(k))
        }
    if isinstance(value, list):
        kept = [v for v in value if not (isinstance(v, dict) and _is_of_the_run(v, opaque))]
        return [_stable(v, opaque) for v in kept]
    return value


def _is_of_the_run(entry: dict[str, Any], opaque: bool) -> bool:
    """True for an entry that another run of the same command would not have."""
    # That a source's status changed while it was read is told as a finding.
    return entry.get("code") == "FS506" or (opaque and by_chance(str(entry.get("name", ""))))


def by_chance(name: str) -> bool:
    """True for a file of an OCDBT store, whose name or content is another in each run."""
    folder, _, file = name.rpartition("/")
    return file == "manifest.ocdbt" or (folder.rpartition("/")[2] == "d" and len(file) == 32)


@dataclass
class Foreign:
    """Something that the user, and not fastshard, put into OUT."""

    #: Relative to OUT.
    path: str
    #: None for a directory.
    content: bytes | None
    #: False for what may be lost: readers' leavings, and a file that was only touched.
    counts: bool = True

    @property
    def digest(self) -> str:
        """As in a tree."""
        return "dir" if self.content is None else digest(self.content)

    def __str__(self) -> str:
        return self.path + ("/" if self.content is None else "")


@dataclass(frozen=True)
class State:
    """What is at OUT."""

    #: ``absent``, ``empty`` (but for foreign files), ``old``, ``new``, ``partial`` (files of the new result,
    #: and no pointer) or ``mixed``.
    kind: str
    raw: Tree | None
    detail: str = ""


def state(out: Path, known: dict[str, Tree], foreign: Iterable[Foreign], own: str | None = None) -> State:
    """Compares OUT with the results that it may be.

    Args:
        out: the folder.
        known: meaning of the ``old`` and the ``new`` result.
        foreign: what else may be there, also in place of a result's file.
        own: prefix of the names at the top of OUT that belong to a run, where it stages inside.
    """
    found = raw(out)
    if found is None:
        return State("absent", None)
    listed = {n: d for n, d in found.items() if own is None or not n.startswith(own)}
    listed, hidden = without(listed, foreign)
    if not listed:
        return State("empty", found)
    seen = meaning(out, listed)
    differences = {}
    for kind, tree in known.items():
        wanted = {n: d for n, d in tree.items() if n not in hidden}
        if seen == wanted:
            return State(kind, found)
        differences[kind] = difference(seen, wanted)
    new = known["new"]
    if all(new.get(n) == d for n, d in seen.items()) and not any(n in POINTERS for n in seen):
        return State("partial", found)
    return State("mixed", found, "; ".join(f"against the {k} result: {d}" for k, d in differences.items()))


def without(tree: Tree, foreign: Iterable[Foreign]) -> tuple[Tree, set[str]]:
    """The tree without what is foreign, and the paths that it stands at, with directories that hold nothing
    else."""
    hidden = {f.path for f in foreign if tree.get(f.path) == f.digest}
    files = [n for n, d in tree.items() if d != "dir" and n not in hidden]
    above = {str(p) for name in hidden for p in Path(name).parents}
    hidden |= {n for n in above & tree.keys() if not any(f.startswith(f"{n}/") for f in files)}
    return {n: d for n, d in tree.items() if n not in hidden}, hidden


def difference(seen: Tree, wanted: Tree) -> str:
    """A few words on how two trees differ."""
    absent = sorted(wanted.keys() - seen.keys())
    more = sorted(seen.keys() - wanted.keys())
    changed = sorted(n for n in seen.keys() & wanted.keys() if seen[n] != wanted[n])
    words = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in (("lacks", absent), ("has also", more), ("differs in", changed))
        if names
    ]
    zeros = [n for n in changed if seen[n].startswith("zeros")]
    return ", ".join(words) + (f" ({', '.join(zeros)}: nothing but zeros)" if zeros else "")
