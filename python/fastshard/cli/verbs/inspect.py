"""``fastshard inspect``: a description by headers alone."""

from __future__ import annotations

import argparse
from typing import Any

from ...checkpoint.inspection import Inspection, inspect
from ..render import human, table
from ..shared_arguments import add_common, add_exit_zero, add_source, opening
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_common(parser, run=False)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    seen = inspect(a.ckpt, **opening(a))
    document = seen.to_dict()
    degrees = " x ".join(f"{k} {v}" for k, v in seen.topology.items()) or "not sharded"
    rows = [
        ("framework", seen.framework + (f" ({seen.family})" if seen.family else "")),
        ("step", seen.step or "-"),
        ("topology", degrees),
        ("files", f"{seen.files} ({human(seen.file_bytes)})"),
        ("tensors", f"{len(seen.outputs)} whole, from {seen.stored_tensors} stored"),
        ("parameters", f"{seen.parameters:,}"),
        ("dtypes", ", ".join(f"{d} x {n} ({human(b)})" for d, (n, b) in seen.dtypes.items()) or "-"),
        ("axes", ", ".join(f"{k}={v}" for k, v in seen.axes.items()) or "-"),
        *_trained_with(seen.metadata.get("features")),
        *_chunks(seen.metadata.get("completeness")),
        ("complete", _verdict(seen)),
    ]
    text = table(rows, indent="")
    if a.verbose:
        listing = [
            (row.name, row.dtype, str(list(row.shape)), human(row.nbytes), f"{row.pieces} pieces")
            for row in seen.outputs
        ]
        text += "\n\n" + table(listing) if listing else ""
        document["outputs"] = [row.to_dict() for row in seen.outputs]
    return Result(text, document), seen.findings


def _trained_with(features: dict[str, Any] | None) -> list[tuple[str, str]]:
    """One row on what a model was trained with, where its adapter tells."""
    if not features:
        return []
    words = [name for name, value in features.items() if value is True]
    words += [
        f"{name} {value}"
        for name, value in features.items()
        if isinstance(value, (str, int)) and value is not True and value is not False
    ]
    rows = [("features", ", ".join(words))]
    if fp8 := features.get("fp8"):
        rows.append(("fp8 state", ", ".join(f"{k} {v}" for k, v in fp8.items())))
    return rows


def _chunks(judged: dict[str, Any] | None) -> list[tuple[str, str]]:
    """One row on the chunks of a store of arrays."""
    if not judged:
        return []
    absent = judged["absent_chunks"]
    told = f"{judged['verdict']}: {judged['chunks']} called for, " + (
        f"{absent} absent" if absent else "all there"
    )
    return [("chunks", told)]


def _verdict(seen: Inspection) -> str:
    errors = [f for f in seen.findings if f.severity == "error"]
    if errors:
        return f"NO: {len(errors)} findings below"
    return (
        "yes, by headers"
        if seen.provable
        else "nothing missing by headers; not provable (give --expect CONFIG)"
    )


INSPECT = Verb(
    name="inspect",
    help="what it is: framework, step, topology, tensors, bytes, what is missing (headers only)",
    arguments=_arguments,
    run=_run,
)
