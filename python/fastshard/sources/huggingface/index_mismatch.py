"""Index files that do not match their files: wrong files, wrong numbers of files, wrong sizes.

docs/guides/index_files.md describes how transformers treats each case.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ...common import codes, safe_files
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used
from ...models.tensor_words import WORDS
from ..base import Contents, lacking
from ..index_files import read_json

#: Names that state the number of files.
_SHARD = compile_when_used(r"^(.+)-(\d+)-of-(\d+)\.(safetensors|bin)$")
#: The highest number accepted in a name; names with higher numbers are not those of shards.
_MOST = 100_000


def is_for(listing: Listing, inside: Mapping[str, File], index: str, single: str) -> bool:
    """Return True if an index next to a full model file names that file, False if none of its files exist.

    Raises:
        FastshardError: ``FS106`` if it names other files that exist: transformers loads the single file, and
            readers of the index load the others. ``FS211`` if it is not JSON.
    """
    content = read_json(listing, inside[index], safe_files.MAX_INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        return True
    named = sorted({name for name in weight_map.values() if isinstance(name, str)})
    if named == [single]:
        return True
    there = [name for name in named if name in inside and name != single]
    if not there:
        return single in named
    raise FastshardError.of(
        codes.AMBIGUOUS,
        f"{single} and an index of other files are in one directory: transformers loads {single}, and other "
        "loaders follow the index",
        file=inside[index].path,
        got=f"{single}, and {there[0]} with {len(named) - 1} more by the index",
        help=f"move the stale one away, or name the file itself: {inside[single].path}",
    )


def without_files(index: File, single: str) -> Finding:
    """Report an obsolete index: a full model file was saved later and replaced the files that it names."""
    return Finding.of(
        codes.UNEXPECTED_FILE,
        f"the index names files that are missing; {single} is used, as by transformers",
        file=index.path,
        help="move the index away",
    )


def like_named(inside: Mapping[str, File], named: Container[str]) -> list[File]:
    """Return files next to an index that it does not name, from the same numbered set as its files.

    Args:
        inside: files in the index's folder, by name.
        named: names of the files that it names.
    """
    shards = {name: match for name in inside if (match := _SHARD.match(name))}
    counted = {m.group(1, 3, 4) for name, m in shards.items() if name in named}
    return [inside[name] for name, m in shards.items() if name not in named and m.group(1, 3, 4) in counted]


def numbers(index: File, named: Iterable[str], inside: Container[str]) -> list[Finding]:
    """Warn of an index that names fewer files than their numbers state.

    The finding names one missing file, if there is any.

    Args:
        index: the index.
        named: names of the files that it names.
        inside: names of the files in its folder.
    """
    shards: dict[tuple[str, str, str], set[int]] = {}
    for name in named:
        if match := _SHARD.match(name):
            shards.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    findings = []
    for (stem, total, suffix), have in shards.items():
        first = 0 if 0 in have else 1
        if not 0 < int(total) <= _MOST:
            continue
        absent = [
            f"{stem}-{n:05d}-of-{total}.{suffix}"
            for n, _ in lacking(dict.fromkeys(have), first, first + int(total) - 1)
        ]
        if absent:
            name = next((name for name in absent if name not in inside), absent[0])
            findings.append(
                Finding.of(
                    codes.MISSING_FILE,
                    "the file names state more files than the index names",
                    severity="warning",
                    file=f"{index.folder}/{name}" if index.folder else name,
                    expected=f"{int(total)} files, by their names",
                    got=f"{len(have)} in {index.name}",
                    help="compare the tensors with the model's; an export that dropped files writes such an "
                    "index",
                )
            )
    return findings


def sizes(
    index: str, counted: Any, files: Sequence[File], contents: Contents, config: Mapping[str, Any] | None
) -> list[Finding]:
    """Warn if the files have fewer tensor bytes than the index states, and note if they have more.

    Args:
        index: path of the index.
        counted: its ``total_size``.
        files: the files that it names.
        contents: contents of the files.
        config: content of the model's config.json, if there is one.
    """
    number = isinstance(counted, int | float) and not isinstance(counted, bool)
    if not number or not all(contents.readable(i) for i in range(len(files))):
        return []
    each: list[tuple[str, str, int]] = []
    storages: dict[tuple[int, int], int] = {}
    for i in range(len(files)):
        for tensor in contents.tensors(i):
            each.append((".".join(tensor["path"]), tensor["dtype"], tensor["storage_bytes"]))
            storages[i, tensor["storage"]] = tensor["storage_bytes"]
    stored_bytes, once = sum(size for *_, size in each), sum(storages.values())
    flags = sum(size for _, dtype, size in each if dtype == "BOOL")
    # Older versions of transformers count an eighth of a byte for a bool, mlx-lm the files.
    usual = {
        stored_bytes,
        once,
        stored_bytes - flags + flags / 8,
        once - flags + flags / 8,
        sum(file.size for file in files),
    }
    if config is None or config.get("tie_word_embeddings") is not False:
        usual |= {
            stored_bytes + size for name, _, size in each if any(word in name for word in WORDS["tied"])
        }
    if any(abs(counted - size) < 1 for size in usual):
        return []
    lacks = counted > max(stored_bytes, once)
    if counted in (2 * stored_bytes, 4 * stored_bytes, stored_bytes / 2, stored_bytes / 4):
        message = "the index counts the bytes of another dtype than its files hold"
    elif lacks:
        message = "the index counts more bytes of tensors than its files hold"
    else:
        message = "the index counts fewer bytes of tensors than its files hold"
    return [
        Finding.of(
            codes.MISSING_TENSOR if lacks else codes.CONFIG_DISAGREES,
            message,
            severity="warning" if lacks else "note",
            file=index,
            expected=f"{counted:,} bytes (total_size)",
            got=f"{stored_bytes:,} bytes, {abs(counted - stored_bytes):,} {'fewer' if lacks else 'more'}",
            help="compare the tensors with the model's; the index and the files may both lack some"
            if lacks
            else "write the index again",
        )
    ]
