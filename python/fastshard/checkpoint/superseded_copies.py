"""Tensors that several files of an index contain. The index names the valid copy; the copies are compared
when files are read."""

from __future__ import annotations

from collections.abc import Sequence

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted
from ..common.records import replace
from ..layouts.declaration import Binding, Source, SourceFiles, Superseded, Unit
from .drafting import Opened
from .stored_bytes import StoredBytes

__all__ = ["compare_copies"]

#: Number of bytes of two copies to compare at a time.
_WINDOW = 4 << 20


def compare_copies(opened: Opened, *, writes: bool) -> list[Finding]:
    """Compare the copies of tensors that several files of an index contain.

    Loaders of transformers read every tensor of every file that an index lists, in the order of the files'
    names, and keep the last copy. source: transformers modeling_utils.py (load_state_dict, checkpoint_files)

    Args:
        opened: the checkpoint.
        writes: True for a result, which has the copy that the index names; False for the folder itself, from
            which a loader may use the other copy.

    Raises:
        FastshardError: if a file cannot be read.
    """
    findings = []
    for group in opened.source.index.superseded:
        differing = _list_differing(opened, group)
        holder, other = opened.files[group.file].path, opened.files[group.other].path
        if not differing:
            continue
        is_loaded = writes or holder > other
        findings.append(
            Finding.of(
                codes.OVERLAP,
                f"{counted(len(differing), 'tensor')} of this file are also in {other}, with other values: "
                "the index names this file"
                + (
                    ", whose copy is used"
                    if is_loaded
                    else ", and transformers loads the copy in the other one"
                ),
                severity="warning" if is_loaded else "error",
                file=holder,
                tensor=differing[0],
                count=len(differing),
                expected="one copy of each tensor in the files of an index",
                got=f"copies in {holder} and {other}",
                help="write the checkpoint again: the result has the copies that the index names",
                run=[] if writes else ["fastshard merge CKPT OUT"],
            )
        )
    return findings


def _list_differing(opened: Opened, group: Superseded) -> list[str]:
    """Return the names of the tensors whose two copies differ."""
    copies = [_open_copies(opened, file, group.names) for file in (group.file, group.other)]
    return [name for name in group.names if not _are_equal(copies[0], copies[1], name)]


def _open_copies(opened: Opened, file: int, names: Sequence[str]) -> StoredBytes:
    source = Source(
        opened.source.framework,
        files=SourceFiles(units=[Unit(file=file, only=list(names))]),
        binding=Binding(pass_unknown=True),
    )
    return StoredBytes(replace(opened, source=source))


def _are_equal(one: StoredBytes, other: StoredBytes, name: str) -> bool:
    if (one.dtype(name), one.shape(name)) != (other.dtype(name), other.shape(name)):
        return False
    size = one.size(name)
    return all(
        one.raw(name, start, min(_WINDOW, size - start)).tobytes()
        == other.raw(name, start, min(_WINDOW, size - start)).tobytes()
        for start in range(0, size, _WINDOW)
    )
