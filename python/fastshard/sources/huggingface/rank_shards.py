"""Rank shards written by torch's ``HuggingFaceStorageWriter``: safetensors with ``DCP_SHARDING_INFO``.

The files state neither the number of ranks nor the shape of the full tensor. The existing boxes must tile it.
Shared axes (or a config) show if the last ranks are missing.
source: torch/distributed/checkpoint/{hf_storage,_consolidate_hf_safetensors}.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.ranks import rank_range
from ...common.records import replace
from ...common.regex import compile_when_used
from ...layouts import tables
from ...layouts.declaration import Binding, Description, Source
from ...models import config_json, huggingface
from .. import hf_config
from ..base import Contents, Found, Options, lacking, missing
from ..box_pieces import Boxes
from ..choose_step import folder_of, within_this
from ..step_names import is_step
from .adapter import slices_as_wholes
from .shard_offsets import INFO, offsets

_SHARD = compile_when_used(r"^shard-(\d+)-(.+)-(\d+)-of-(\d+)\.safetensors$")
#: Maximum number of ranks; no run has as many.
_MAX_RANKS = 100_000


class HfRankShards:
    """Directories of ``shard-RRRRR-model-0000I-of-0000N.safetensors``."""

    name = "hf_rank_shards"

    def detect(self, listing: Listing, options: Options) -> Found[None] | None:
        """Look for shards, unless a folder above them contains a consolidated checkpoint."""
        if listing.single:
            return None
        matched = [(f, m) for f in listing.files if (m := _SHARD.match(f.name))]
        if not matched:
            return None
        above = {f.folder for f in listing.files if f.name == "model.safetensors.index.json"}
        # What was consolidated is read from where it was put together.
        matched = [
            (f, m)
            for f, m in matched
            if not any(f.folder != a and (a == "" or f.folder.startswith(a + "/")) for a in above)
        ]
        if not matched:
            return None
        folder, chosen, within = folder_of(listing, [(f.root, f.folder) for f, _ in matched], options)
        inside = sorted(
            ((f, m) for f, m in matched if f.folder == folder), key=lambda t: (t[0].name, t[0].root)
        )
        findings: list[Finding] = [*chosen.findings, *within_this(within)]
        for file, match in inside:
            if not 1 <= int(match[1]) <= _MAX_RANKS or not 1 <= int(match[3]) <= int(match[4]) <= _MAX_RANKS:
                raise FastshardError.of(
                    codes.AMBIGUOUS,
                    "the numbers in the file's name are not those that torch's writer uses",
                    file=file.path,
                    expected=f"ranks and parts from 1 to at most {_MAX_RANKS}",
                    got=file.name,
                    help="move the file away if it is not part of this save",
                )
        parts: dict[int, set[int]] = {}
        for _, match in inside:
            parts.setdefault(int(match[1]), set()).add(int(match[3]))
        first = inside[0][1]
        each = max(int(m[4]) for _, m in inside)
        gaps = [(rank, last, 1, each) for rank, last in lacking(parts, 1, max(parts))]
        gaps += [
            (r, r, part, last) for r, present in parts.items() for part, last in lacking(present, 1, each)
        ]
        for rank, last_rank, part, last_part in sorted(gaps):

            def name(r: int, p: int, first: re.Match[str] = first) -> str:
                width, digits = len(first[1]), len(first[3])
                return f"shard-{r:0{width}d}-{first[2]}-{p:0{digits}d}-of-{first[4]}.safetensors"

            one, end = name(rank, part), name(last_rank, last_part)
            findings.append(
                missing(
                    f"{folder}/{one}" if folder else one,
                    {"rank": rank_range(rank - 1, last_rank - 1)},
                    "a shard between other shards, by the file names",
                    f"copy {one} from the node that ran rank {rank - 1}",
                    upto=end if end != one else None,
                    count=(last_rank - rank + 1) * (last_part - part + 1),
                )
            )
        files: list[File] = [f for f, _ in inside]
        step = chosen.name if is_step(chosen.name) else None
        return Found(self, "Hugging Face rank shards", files, None, folder, findings, step=step)

    def declare(self, found: Found[None], listing: Listing, contents: Contents, options: Options) -> Source:
        """Declare tensors as boxes; the boxes determine the size of the full tensor."""
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        source.model = Description(dialect=huggingface.DIALECT)
        source.binding.vocab_size = options.vocab_size
        matches = enumerate(_SHARD.match(file.name) for file in found.files)
        source.files.ranks = {i: {"rank": int(match[1]) - 1} for i, match in matches if match}
        boxes = Boxes()
        for i, file in enumerate(found.files):
            begins = _offsets(contents(i), file)
            for number, tensor in enumerate(contents.tensors(i)):
                name = ".".join(tensor["path"])
                lo = begins.get(name, [0] * len(tensor["shape"]))
                if len(lo) != len(tensor["shape"]):
                    raise FastshardError.of(
                        codes.UNSAFE_HEADER,
                        f"{INFO}: offsets of the tensor",
                        file=file.path,
                        tensor=name,
                        expected=f"{len(tensor['shape'])} numbers",
                        got=str(lo),
                    )
                boxes.add(name, lo, tensor["shape"], i, number)
        for name, lo, size, holders in boxes.shared():
            # What no rank divides is in the file of every rank.
            if size != boxes.shape(name):
                raise _twice(found.files, name, lo, holders)
        source.files.assembled += boxes.assembled()
        names = boxes.names()
        config, path = hf_config.config_of(listing, found.folder, options)
        hf_config.describe(source, listing, config, path, names)
        if config is None and (layout := config_json.layout_by_names(names)) is not None:
            source.binding.layout, source.model = (
                layout,
                replace(source.model, family=layout.removeprefix("hf.")),
            )
            facts = tables.table(layout).describe(None, names)[1]
            # Rows of heads are enough to check shapes; how they divide only a config tells, or norms of one
            # head each.
            source.binding.facts = facts | {"tied": not facts["head"]}
            source.binding.axes = {} if facts.get("qk_norm") else {"d": 1}
        if (lost := _ranks_at_the_end(source, boxes, found)) is not None:
            source.findings.append(lost)
            # With the shapes that they should have, what is missing of them is its effect.
            source.files.assembled = boxes.assembled()
        source.findings += slices_as_wholes(listing, found.folder, found.files, contents, "shards of ranks")
        return source


def _ranks_at_the_end(source: Source, boxes: Boxes, found: Found[None]) -> Finding | None:
    """Report missing files of the last ranks, and set the shapes that the tensors should have.

    All tensors that are too short must lack the same number of ranks.
    """
    table = source.binding.usual_table
    named = [match for file in found.files if (match := _SHARD.match(file.name))]
    if table is None or not named:
        return None
    ranks = max(int(match[1]) for match in named)
    axes: dict[str, int] = {}
    for name in boxes.names():
        rule, shape, divided = table.rule_of(name), boxes.shape(name), boxes.divided(name)
        for d, size in enumerate(rule.dimensions or () if rule is not None else ()):
            if size.isalpha() and d < len(shape) and d not in divided:
                # Of one rank alone every dimension looks whole: the longest is.
                axes[size] = max(axes.get(size, 0), shape[d])
    axes |= source.binding.axes
    short: dict[str, list[int]] = {}
    counts: set[int] = set()
    sizes: set[str] = set()
    known: dict[str, list[int | None]] = {}
    for name in boxes.names():
        shape, want = boxes.shape(name), table.shape(name, axes)
        if want is None or len(want) != len(shape):
            continue
        known[name] = want
        full = [have if n is None else n for n, have in zip(want, shape, strict=True)]
        differing = [d for d, n in enumerate(full) if n != shape[d]]
        if not differing:
            continue
        if len(differing) > 1 or full[differing[0]] < shape[differing[0]]:
            # It is not the ranks that this is about.
            return None
        each = boxes.first(name)[differing[0]]
        rule = table.rule_of(name)
        if rule is not None and rule.dimensions is not None:
            sizes.add(rule.dimensions[differing[0]])
        counts.add(-(-full[differing[0]] // max(each, 1)))
        short[name] = full
    if len(counts) != 1 or (of := counts.pop()) <= ranks or not _divided_by(boxes, of, known, sizes):
        return None
    for name, full in short.items():
        boxes.state(name, full)
    first = named[0]

    def file(rank: int) -> str:
        last = f"{first[2]}-{1:0{len(first[3])}d}-of-{first[4]}.safetensors"
        return f"shard-{rank:0{len(first[1])}d}-{last}"

    name, full = next(iter(short.items()))
    lost = f"rank {ranks}" if of == ranks + 1 else f"ranks {ranks} to {of - 1}"
    return missing(
        f"{found.folder}/{file(ranks + 1)}" if found.folder else file(ranks + 1),
        {"rank": rank_range(ranks, of - 1)},
        f"{name} has {full}, but only the files of {ranks} of {of} ranks are present",
        f"copy the files of {lost} from the nodes that ran them",
        rank=lost,
        upto=file(of) if of > ranks + 1 else None,
    )


def _divided_by(
    boxes: Boxes, ranks: int, known: Mapping[str, Sequence[int | None]], sizes: Collection[str]
) -> bool:
    """Return True if all divided tensors have the shards that ``torch.chunk`` gives this number of ranks.

    A vocabulary size that differs from the config's is not sufficient evidence of a missing rank.

    Args:
        boxes: the ranks' boxes.
        ranks: the number of ranks.
        known: known extents of the full tensors.
        sizes: sizes of the table in which tensors are too short.
    """
    if all("V" in size for size in sizes):
        return False
    for name, full in known.items():
        first = boxes.first(name)
        for d in boxes.divided(name):
            extent = full[d]
            if extent is not None and first[d] != -(-extent // ranks):
                return False
    return True


def _twice(files: Sequence[File], name: str, lo: list[int], holders: list[int]) -> FastshardError:
    """Build the error for a part of a tensor that two files contain."""
    return FastshardError.of(
        codes.OVERLAP,
        "two files hold the same part of the tensor",
        file=files[holders[1]].path,
        tensor=name,
        expected=f"only {files[holders[0]].path}",
        got=f"offset {lo} in both",
        help="keep the file of this save: the other is from another save",
    )


def _offsets(metadata: Any, file: File) -> dict[str, list[int]]:
    places = offsets(metadata)
    if places is None:
        raise FastshardError.of(
            codes.UNSAFE_HEADER,
            f"the rank shard has no readable {INFO}",
            file=file.path,
            help="copy the file again; it is damaged, or HuggingFaceStorageWriter did not write it",
        )
    return places
