"""``fastshard trace``: where a tensor of the result comes from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ... import _core
from ...checkpoint.manifests import beside, read, run_options
from ...checkpoint.plan import Plan
from ...common import codes
from ...common.errors import FastshardError, Finding, error_for, from_core
from ...common.near_words import nearest
from ...conversion.convert import plan as plan_of
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

if TYPE_CHECKING:
    from ..._core import RunOptions

#: Branches of one kind that are shown without ``-v``.
_SHOWN = 8


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("tensor", metavar="TENSOR", help="a tensor of the result, by its name there")
    parser.add_argument("--hash", action="store_true", help="read it, for the BLAKE3 of its bytes")
    add_target(parser, required=False)
    add_shaping(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    checkpoint = opened(a)
    plan = plan_of(checkpoint, to=a.to, vocab_size=a.vocab_size, **shape(a), **placing(a))
    if a.tensor not in plan.index:
        raise _unknown(plan, a.tensor, own=a.to is not None and a.tensor in checkpoint)
    document, findings = plan.why(a.tensor), list(plan.findings)
    manifest = None if a.to or a.hash else beside(checkpoint)
    if a.hash:
        document["blake3"], damage = _read(a, plan)
        findings += checkpoint.opened.gate.evaluate(damage)
    elif manifest is not None:
        document["blake3_stated"] = _read_stored_hash(read(manifest), document)
    roots = [str(root) for root in checkpoint.roots] if len(checkpoint.roots) > 1 else None
    text = tree(_tree(document, roots, None if a.verbose else _SHOWN))
    return Result(text, document), findings


def _read_stored_hash(manifest: dict[str, Any], whole: dict[str, Any]) -> str | None:
    """Read the hash of a full tensor from a manifest.

    A shard may have the tensor's name, but its hash differs.
    """
    named = [entry for entry in manifest["tensors"] if entry["name"] == whole["name"]]
    alike = [(entry.get("dtype"), entry.get("shape")) == (whole["dtype"], whole["shape"]) for entry in named]
    return named[0]["blake3"] if alike == [True] else None


def _is_reported(cause: Finding, errors: list[Finding]) -> bool:
    """Return True if an error reports the cause, for its file alone or for several."""
    return any(e.code == cause.code and (e.file == cause.file or cause.file in e.files) for e in errors)


def _unknown(plan: Plan, name: str, own: bool) -> FastshardError:
    """Make the error for a tensor that is not in the result; ``own`` if the source has one with that name."""
    # What follows from another finding is not among the plan's own.
    echoes = plan.core.findings()
    about = [finding for finding in (*plan.each, *echoes) if finding.tensor == name]
    if about:
        first = about[0]
        errors = [finding for finding in plan.findings if finding.severity == "error"]
        cause = plan.causes.of(first) or first
        changed = first.replace(
            code=cause.code,
            message=f"not in the result: {first.message}",
            # What is wrong with the checkpoint makes the exit code: it may be incomplete alone.
            severity="warning" if errors and cause is not first else "error",
            file=cause.file,
            help=None if cause is not first and _is_reported(cause, errors) else first.help,
        )
        return error_for([changed, *(error for error in errors if error is not first)])
    if own:
        return FastshardError.of(
            codes.USAGE,
            f"that is the source's own name, which the result ({plan.target}) does not have",
            tensor=name,
            help="leave out --to, or pass a name of the result; `fastshard plan --to TARGET -v` lists them",
        )
    near = nearest(name, plan.index)
    return FastshardError.of(
        codes.USAGE,
        "the result has no tensor of this name",
        tensor=name,
        help=f"did you mean {near}?" if near else "list the tensors",
        run=[] if near else ["fastshard ls CKPT"],
    )


def _read(a: argparse.Namespace, plan: Plan) -> tuple[str, list[Finding]]:
    """Compute the hash of the tensor, and return it with the findings."""
    run: RunOptions = {**run_options(a.memory, a.threads), "only": [a.tensor]}
    try:
        findings, hashes, _ = plan.core.check(run)
    except _core.CoreError as error:
        raise from_core(error) from None
    (found,) = hashes.values()
    return found, findings


def _tree(document: dict[str, Any], roots: list[str] | None, most: int | None) -> Tree:
    """Convert the document into branches of text."""
    branches: list[Tree] = []
    if place := document["written_to"]:
        at = f", from byte {place['offset']:,}" if "offset" in place else ""
        called = f", as {place['key']}" if place["key"] != document["name"] else ""
        branches.append((f"written to {place['name']}{at}{called}", []))
    if weight := document.get("weight"):
        branches.append((f"codes of {weight['name']} {weight['shape']}, {weight['form']}", []))
    if "blake3" in document:
        branches.append((f"BLAKE3 {document['blake3']}", []))
    elif document.get("blake3_stated"):
        branches.append((f"BLAKE3 {document['blake3_stated']}, by the manifest (--hash reads)", []))
    if document["padding"]:
        branches.append(("zeros where no part reaches: padding", []))
    parts: list[Tree] = [
        (
            f"{part['region']} = {', then '.join([part['made_by'], *part['ops']])}",
            _first([_of_source(source, roots, most) for source in part["sources"]], most, "sources"),
        )
        for part in document["parts"]
    ]
    title = f"{document['name']}  {document['dtype']} {document['shape']}"
    return title, branches + _first(parts, most, "parts")


def _of_source(source: dict[str, Any], roots: list[str] | None, most: int | None) -> Tree:
    rank = f"{source['rank']}: " if source["rank"] else ""
    branches: list[Tree] = []
    if source["rule"] != source["name"]:
        branches.append((f"rule {source['rule']}", []))
    if source_codes := source.get("values_of"):
        branches.append((f"values of {source_codes['name']}, by {', '.join(source['made_with'])}", []))
    if "cast_to" in source:
        branches.append((f"cast from {source['dtype']} to {source['cast_to']}", []))
    branches += [(f"compared with {other}", []) for other in source.get("compared_with", ())]
    places: list[Tree] = [(_of_place(place, roots), []) for place in source["places"]]
    title = f"{rank}{source['name']}{source['region']} of {source['dtype']} {source['shape']}"
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
        One tensor of what merge (or, with --to, convert) would write, as a tree of what it is made of.
        Regions are slices as numpy writes them. Reads headers only; with --hash the tensor too. The exit code
        is that of what is found about the checkpoint.""",
    arguments=_arguments,
    run=_run,
    finds=True,
    often=("--to", "--hash", "--json"),
    examples=(
        "fastshard trace run 2.attention.dense.weight",
        "fastshard trace run gpt_neox.layers.0.attention.dense.weight --to hf",
    ),
)
