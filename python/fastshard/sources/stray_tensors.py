"""Tensors that are missing from the file that an index names, because of a copied file or a file outside the
index.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted, some
from ..common.records import dataclass, field

#: Maximum number of files in a message.
_NAMED = 3


class Index(NamedTuple):
    """An index: its path in the checkpoint, and its full path."""

    path: str
    full: Path


@dataclass(frozen=True)
class Strays:
    """The explanation for tensors that are missing from their files."""

    findings: list[Finding] = field(default_factory=list)
    #: Tensors that cannot be used for that reason, and the file to which the finding refers.
    lost: Mapping[str, str] = field(default_factory=dict)
    #: Numbers of copied files, which are not read.
    copies: frozenset[int] = frozenset()
    #: Paths of files with tensors that the index does not name.
    holders: frozenset[str] = frozenset()
    #: Paths in the index that do not exist, whose tensors are in ``holders``.
    absent: frozenset[str] = frozenset()

    def left(self, findings: Iterable[Finding], index: str | None) -> list[Finding]:
        """Remove findings that only repeat this explanation.

        Such findings report that the index does not name a file with the tensors, or that the index states
        another number of bytes than its files contain.

        Args:
            findings: findings about the checkpoint.
            index: path of the index.
        """
        if not self.findings:
            return list(findings)
        holders = {(codes.MISSING_FILE, path) for path in self.holders} | {
            (codes.UNEXPECTED_FILE, path) for path in self.holders
        }
        counts = {(codes.MISSING_TENSOR, index), (codes.CONFIG_DISAGREES, index)}
        absent = {(codes.MISSING_FILE, path) for path in self.absent}
        return [
            f
            for f in findings
            if (f.code, f.file) not in absent
            and (f.severity == "error" or (f.code, f.file) not in holders | counts)
        ]


def of_index(
    weight_map: Mapping[str, int],
    stored_names: Mapping[int, set[str]],
    paths: Mapping[int, str],
    same: Callable[[int, int], bool],
    beside: Callable[[], Mapping[str, set[str]]],
    missing: Mapping[str, set[str]],
    index: Index | None = None,
) -> Strays:
    """Explain tensors that the index names and no file contains.

    Args:
        weight_map: number of the file in which the index places each tensor.
        missing: names of the tensors that it places in each missing file, by the file's path.
        stored_names: names of the tensors in each readable file.
        paths: paths of the files, by their numbers.
        same: whether two files have the same bytes.
        beside: opens the files that the index does not name, and returns the names of the tensors in each, by
            path.
        index: the index; None if there are several files.
    """
    everywhere = set().union(*stored_names.values())
    sent: dict[int, set[str]] = {}
    for name, file in weight_map.items():
        sent.setdefault(file, set()).add(name)
    gone = {file: sent[file] - everywhere for file in sorted(sent) if file in stored_names}
    # Of a file that was copied over another the index says rightly what it holds.
    wrong = [file for file, names in gone.items() if names and not sent[file] & stored_names[file]]
    right = [file for file in sorted(stored_names) if stored_names[file] and file not in wrong]
    findings: list[Finding] = []
    lost: dict[str, str] = {}
    copies: set[int] = set()
    for file in wrong:
        original = next((i for i in right if stored_names[i] == stored_names[file] and same(i, file)), None)
        if original is not None:
            expected = f"{counted(len(sent[file]), 'tensor')} that the index sends here"
            findings.append(_copy(paths[file], paths[original], "it was copied over this file", expected))
            lost |= dict.fromkeys(gone.pop(file), paths[file])
            copies.add(file)
    holders: set[str] = set()
    left = {**{paths[file]: names for file, names in gone.items()}, **missing}
    names_beside = beside() if any(left.values()) else {}
    named: list[str] = []
    astray: set[str] = set()
    for path, names in sorted(names_beside.items()):
        found = {name for of in left.values() for name in of & names}
        if found:
            named += [sent_to for sent_to, of in left.items() if of & names]
            astray |= found
            holders.add(path)
    if astray:
        findings.append(_elsewhere(index, sorted(holders), len(astray), list(dict.fromkeys(named))))
        lost |= dict.fromkeys(astray, index.path if index else min(holders))
    absent = {path for path, names in missing.items() if names <= lost.keys()}
    return Strays(findings, lost, frozenset(copies), frozenset(holders), frozenset(absent))


def of_numbers(
    stored_names: Mapping[int, set[str]], paths: Mapping[int, str], same: Callable[[int, int], bool]
) -> Strays:
    """Find copies among files whose names differ only in their numbers.

    Args:
        stored_names: names of the tensors in each readable file.
        paths: paths of the files, by their numbers.
        same: whether two files have the same bytes.
    """
    findings: list[Finding] = []
    originals: dict[frozenset[str], list[int]] = {}
    copies: set[int] = set()
    for file in sorted(stored_names):
        alike = originals.setdefault(frozenset(stored_names[file]), [])
        original = next((i for i in alike if same(i, file)), None) if stored_names[file] else None
        if original is None:
            alike.append(file)
        else:
            how = "one file was copied over the other"
            findings.append(_copy(paths[file], paths[original], how, "other tensors"))
            copies.add(file)
    return Strays(findings, copies=frozenset(copies))


def _copy(copy: str, original: str, how: str, expected: str) -> Finding:
    return Finding.of(
        codes.DUPLICATED_SHARD,
        f"a copy of {original}: {how}",
        file=copy,
        expected=expected,
        got=f"the tensors of {original}",
        help="copy the file again from the original checkpoint",
    )


def _elsewhere(index: Index | None, holders: list[str], count: int, named: list[str]) -> Finding:
    many = len(holders) > 1
    where = f"{some(holders, _NAMED)} {'hold' if many else 'holds'} {'it' if count == 1 else 'them'}"
    fields: dict[str, Any] = {"file": index.path} if index else {"files": holders}
    # Moved to a name that no reader looks for.
    move = [f"mv {shlex.quote(str(index.full))} {shlex.quote(f'{index.full}.old')}"] if index else []
    return Finding.of(
        codes.INDEX_NAMES_ANOTHER_FILE,
        f"the index sends {counted(count, 'tensor')} to the wrong file{'s' if len(named) > 1 else ''}",
        count=count,
        expected=some(holders, _NAMED),
        got=some(named, _NAMED),
        evidence=f"{where}, and the index does not name {'these files' if many else 'this file'}",
        help="move the index away, then write a new one",
        run=[*move, "fastshard merge CKPT OUT"],
        **fields,
    )
