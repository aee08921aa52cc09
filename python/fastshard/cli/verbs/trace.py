"""``fastshard trace``: where a tensor of the result comes from."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ...conversion.trace import trace
from ..render import Tree, human, tree
from ..shared_arguments import (
    add_common,
    add_exit_zero,
    add_shaping,
    add_source,
    add_target,
    opened,
    placing,
    shape,
)
from ..verb import Outcome, Result, Verb

#: Maximum number of branches of one kind to show without ``-v``.
_SHOWN = 8


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("tensor", metavar="TENSOR", help="name of a tensor in the result")
    parser.add_argument(
        "--hash", action="store_true", help="read the tensor and print the BLAKE3 of its bytes"
    )
    add_target(parser, required=False)
    add_shaping(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    checkpoint = opened(a)
    traced = trace(
        checkpoint,
        a.tensor,
        a.to,
        reads=a.hash,
        memory=a.memory,
        threads=a.threads,
        vocab_size=a.vocab_size,
        **shape(a),
        **placing(a),
    )
    document = traced.to_dict()
    roots = [str(root) for root in checkpoint.roots] if len(checkpoint.roots) > 1 else None
    branches = _tree(document, traced.heads, roots, None if a.verbose else _SHOWN)
    text = tree(branches, wraps=sys.stdout.isatty())
    return Result(text, document), traced.findings


def _tree(
    document: dict[str, Any], heads: dict[tuple[str, str], str], roots: list[str] | None, most: int | None
) -> Tree:
    """Convert the document into branches of text; ``heads`` has descriptions of regions."""
    branches: list[Tree] = []
    if place := document["written_to"]:
        at = f", from byte {place['offset']:,}" if "offset" in place else ""
        called = f", as {place['key']}" if place["key"] != document["name"] else ""
        branches.append((f"would be written to {place['name']}{at}{called}", []))
    if weight := document.get("weight"):
        branches.append((f"codes of {weight['name']} {weight['shape']}, {weight['form']}", []))
    if "blake3" in document:
        branches.append((f"BLAKE3 {document['blake3']}", []))
    elif document.get("blake3_stated"):
        branches.append(
            (f"BLAKE3 {document['blake3_stated']}, from the manifest (--hash reads the tensor)", [])
        )
    if document["padding"]:
        branches.append(("zeros outside all parts: padding", []))
    parts: list[Tree] = [
        (
            f"{part['region']} = {', then '.join([part['made_by'], *part['ops']])}",
            _first([_of_source(source, heads, roots, most) for source in part["sources"]], most, "sources"),
        )
        for part in document["parts"]
    ]
    title = f"{document['name']}  {document['dtype']} {document['shape']}"
    return title, branches + _first(parts, most, "parts")


def _of_source(
    source: dict[str, Any], heads: dict[tuple[str, str], str], roots: list[str] | None, most: int | None
) -> Tree:
    rank = f"{source['rank']}: " if source["rank"] else ""
    words = heads.get((source["name"], source["region"]))
    branches: list[Tree] = [] if words is None else [(words, [])]
    if source["rule"] != source["name"]:
        branches.append((f"rule {source['rule']}", []))
    if source_codes := source.get("values_of"):
        branches.append((f"values of {source_codes['name']}, by {', '.join(source['made_with'])}", []))
    if "cast_to" in source:
        branches.append((f"cast from {source['dtype']} to {source['cast_to']}", []))
    branches += [(f"compared with {other}", []) for other in source.get("compared_with", ())]
    places: list[Tree] = [(_of_place(place, roots), []) for place in source["places"]]
    # Words describe the first dimension completely, but not a region of further ones.
    is_described = words is not None and set(source["region"][1:-1].split(", ")[1:]) <= {":"}
    region = "" if is_described else source["region"]
    title = f"{rank}{source['name']}{region} of {source['dtype']} {source['shape']}"
    return title, branches + _first(places, most, "places")


def _of_place(place: dict[str, Any], roots: list[str] | None) -> str:
    words = [place["file"] if roots is None else f"{roots[place['root']]}/{place['file']}"]
    if "member" in place:
        words.append(f"member {place['member']}")
    if "offset" in place:
        packed = " compressed" if "decoded" in place else ""
        first = place["offset"]
        words.append(f"bytes {first:,} to {first + place['bytes']:,}{packed} ({human(place['bytes'])})")
    if "crc32" in place:
        words.append(f"CRC32 {place['crc32']}")
    return ", ".join(words)


def _first(branches: list[Tree], most: int | None, what: str) -> list[Tree]:
    if most is None or len(branches) <= most:
        return branches
    return [*branches[:most], (f"... and {len(branches) - most} more {what} (-v shows all)", [])]


TRACE = Verb(
    name="trace",
    help="show which files and bytes one tensor comes from",
    description="""\
        Shows one tensor that merge (or, with --to, convert) would write, as a tree of its sources. Regions
        are slices in numpy notation; for tensors that fuse queries, keys and values, the heads are named.
        Reads headers only; --hash reads the tensor too. The exit code is
        that of the findings about the checkpoint.""",
    arguments=_arguments,
    run=_run,
    finds=True,
    often=("--to", "--hash", "--json"),
    examples=(
        "fastshard trace run 2.attention.dense.weight",
        "fastshard trace run gpt_neox.layers.0.attention.dense.weight --to hf",
    ),
)
