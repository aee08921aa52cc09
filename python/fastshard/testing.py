"""Checks that every adapter must pass, for the tests of a package that registers one.

>>> from fastshard import examples, testing
>>> examples.make("llama", "run", to="megatron:legacy", tp=2)
>>> testing.list_adapters("run")
['megatron']
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from .common.errors import FastshardError, Finding
from .common.listing import list_roots
from .common.options import StrPath
from .sources.base import Options
from .sources.registry import load_adapters
from .verification.verify import verify

__all__ = [
    "DAMAGES",
    "check_adapter",
    "find_needed_files",
    "list_adapters",
    "list_silent_damages",
    "restore_content",
]

#: Kinds of damage to a file, by name: each is a function of the file's content.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) * 3 // 5],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


def list_adapters(checkpoint: StrPath) -> list[str]:
    """Lists the adapters that recognise or refuse a checkpoint, in the order in which they are tried.

    Args:
        checkpoint: the directory of a checkpoint.
    """
    names, listing = [], list_roots([checkpoint])
    for adapter in load_adapters():
        try:
            if adapter.detect(listing, Options()) is None:
                continue
        except FastshardError:
            pass
        names.append(adapter.name)
    return names


def find_needed_files(checkpoint: StrPath, spare: Iterable[str] = ()) -> list[Path]:
    """Finds the files of a checkpoint that a merge needs, the largest first.

    Args:
        checkpoint: the directory of a checkpoint.
        spare: glob patterns of names of files that a merge does not need.
    """
    patterns = tuple(spare)
    files = [
        path
        for path in Path(checkpoint).rglob("*")
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    return sorted(files, key=lambda path: (-path.stat().st_size, path))


def list_silent_damages(checkpoint: StrPath, spare: Iterable[str] = ()) -> list[str]:
    """Lists the damage to needed files that ``fastshard verify`` does not report, one line each.

    In a copy of the checkpoint, the function deletes, truncates, empties and zero-fills each file in turn.

    Args:
        checkpoint: the directory of a checkpoint without errors.
        spare: as for :func:`find_needed_files`.
    """
    silent = []
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(checkpoint, Path(folder, "checkpoint"))
        before = _find_problems(copy)
        for path in find_needed_files(copy, spare):
            for damage in ("lost", *DAMAGES):
                with restore_content(path) as content:
                    if damage == "lost":
                        path.unlink()
                    else:
                        path.write_bytes(DAMAGES[damage](content))
                    findings = [finding for finding in _find_problems(copy) if finding not in before]
                if not any(_names(finding, path) for finding in findings):
                    silent.append(f"{path.relative_to(copy)} is {damage}, and no finding names it")
    return silent


def check_adapter(checkpoint: StrPath, name: str, spare: Iterable[str] = ()) -> None:
    """Checks that an adapter is the first to recognise a checkpoint, and that damage is reported.

    Args:
        checkpoint: the directory of a checkpoint without errors.
        name: name of the adapter.
        spare: as for :func:`find_needed_files`.

    Raises:
        AssertionError: with each check that the adapter fails.
    """
    broken = []
    found = list_adapters(checkpoint)
    if found[:1] != [name]:
        broken.append(f"the first adapter that finds it is {found[0] if found else 'none'}, expected {name}")
    errors = [finding for finding in _find_problems(checkpoint) if finding.severity == "error"]
    broken += [f"it is called broken: {finding}" for finding in errors]
    broken += [] if errors else list_silent_damages(checkpoint, spare)
    assert not broken, "\n".join(broken)


def _find_problems(checkpoint: StrPath) -> list[Finding]:
    """Return the errors and warnings of a verification."""
    try:
        findings = list(verify(checkpoint).findings)
    except FastshardError as error:
        findings = list(error.findings)
    return [finding for finding in findings if finding.severity != "note"]


def _names(finding: Finding, path: Path) -> bool:
    # Chunks of an array are named by the array.
    return path.name in json.dumps(finding.to_dict()) or finding.tensor is not None


@contextmanager
def restore_content(path: Path) -> Iterator[bytes]:
    """Yields a file's content, and restores it at the end."""
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)
