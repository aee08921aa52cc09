"""Index files: JSON that names the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from ..common import codes, json_text, safe_files
from ..common.errors import Finding
from ..common.formatting import counted
from ..common.listing import File, Listing


def read_json(listing: Listing, file: File, limit: int = safe_files.MAX_TEXT) -> Any:
    """Read a JSON file of at most ``limit`` bytes.

    Raises:
        FastshardError: ``FS211`` if it is not JSON.
    """
    return json_text.value(listing.read_text(file, limit), file.path)


def safe_relative(name: object) -> bool:
    """Return True if an index's name stays below its folder: relative, no ``..``, no control characters."""
    return isinstance(name, str) and 0 < len(name) <= 4096 and _stays_below(name)


# An index names a file for each of its tensors.
@lru_cache(maxsize=1024)
def _stays_below(name: str) -> bool:
    return not (
        name.startswith("/")
        or "\\" in name
        or any(ord(c) < 32 or c == "\x7f" for c in name)
        or ".." in PurePosixPath(name).parts
        or (len(name) > 1 and name[1] == ":")
    )


def disagreeing(
    weight_map: Mapping[str, int],
    stored_names: Mapping[int, set[str]],
    paths: Mapping[int, str],
    index: str | None = None,
    *,
    whole: bool,
) -> Iterator[Finding]:
    """Yield findings where an index and its files disagree on names.

    ``FS102`` reports tensors that no file contains. ``FS115`` is a warning for tensors that another file
    contains, or that the same file contains under a name with another prefix. ``FS108`` reports tensors that
    the index does not name.

    Args:
        weight_map: number of the file in which the index places each tensor.
        stored_names: names of the tensors in each readable file.
        paths: paths of the files, by their numbers.
        index: path of the index; None if there are several.
        whole: True if every file contains full tensors, so that it does not matter which file contains a
            tensor.
    """
    ghosts = [
        name for name, file in weight_map.items() if file in stored_names and name not in stored_names[file]
    ]
    unnamed = {file: sorted(names - weight_map.keys()) for file, names in stored_names.items()}
    elsewhere = {name: file for file, names in stored_names.items() for name in names} if whole else {}
    # A file that could not be read may hold the rest.
    moved = [name for name in ghosts if name in elsewhere]
    gone = [name for name in ghosts if name not in elsewhere]
    others = {name: file for file, names in unnamed.items() for name in names}
    prefix = _prefix(gone, others, weight_map) if whole else None
    if moved:
        yield Finding.of(
            codes.INDEX_NAMES_ANOTHER_FILE,
            f"the index sends {counted(len(moved), 'tensor')} to the wrong files; each is read from the file "
            "that holds it",
            severity="warning",
            file=index or paths[weight_map[moved[0]]],
            tensor=moved[0],
            count=len(moved),
            expected=f"{paths[elsewhere[moved[0]]]} in the index",
            got=paths[weight_map[moved[0]]],
            help="write the index again: a loader that follows it does not find the tensors",
        )
    if prefix is not None:
        in_files = f"{prefix[0]}NAME, in the files {prefix[1]}NAME"
        yield Finding.of(
            codes.INDEX_NAMES_ANOTHER_FILE,
            f"the index and the files use different names: {in_files}; the names in the files are used",
            severity="warning",
            file=index or paths[weight_map[gone[0]]],
            tensor=gone[0],
            help="write the index again: a loader that follows it does not find the tensors",
        )
        return
    for name in gone:
        yield Finding.of(
            codes.MISSING_TENSOR,
            "named in the index, but missing in its file",
            file=paths[weight_map[name]],
            tensor=name,
            help="copy the file again: it is truncated, or from another save",
        )
    for file, names in unnamed.items():
        if names:
            many = len(names) > 1
            yield Finding.of(
                codes.UNEXPECTED_FILE,
                f"the index does not name {f'{len(names)} tensors of this file' if many else 'this tensor'}",
                file=paths[file],
                tensor=names[0],
                help="write the index again if the model has them",
            )


def _prefix(
    gone: list[str], unnamed: Mapping[str, int], weight_map: Mapping[str, int]
) -> tuple[str, str] | None:
    """Return the different prefixes of names in an index and in its files, if nothing else differs.

    Each tensor must be in the file in which the index places it.
    """
    if not gone or len(gone) != len(unnamed):
        return None
    first = gone[0]
    for other in unnamed:
        at = first.removesuffix(other), other.removesuffix(first)
        # One of the two is the other's end, from a dot on.
        if (first != at[0] + other or not at[0].endswith(".")) and (
            other != at[1] + first or not at[1].endswith(".")
        ):
            continue
        before = (at[0], "") if len(first) > len(other) else ("", at[1])
        renamed = {
            before[1] + name.removeprefix(before[0]): name for name in gone if name.startswith(before[0])
        }
        if renamed.keys() == unnamed.keys() and all(
            weight_map[own] == unnamed[name] for name, own in renamed.items()
        ):
            return before
    return None
