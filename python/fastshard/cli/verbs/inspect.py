"""``fastshard inspect``: a description by headers alone."""

from __future__ import annotations

import argparse
from typing import Any

from ...checkpoint.planning import Plan, make_plan
from ..render import human, table
from ..shared_arguments import add_common, add_exit_zero, add_source, opened
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_common(parser, run=False)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    checkpoint = opened(a)
    plan = make_plan(checkpoint.opened)
    summary = plan.summary
    document = {
        "framework": checkpoint.framework,
        "family": checkpoint.family,
        "step": checkpoint.step,
        "topology": checkpoint.topology,
        "files": len(checkpoint.files),
        "file_bytes": sum(f["size"] for f in checkpoint.files),
        "stored_tensors": summary["stored_tensors"],
        "tensors": summary["outputs"],
        "parameters": summary["parameters"],
        "dtypes": {d: {"tensors": n, "bytes": b} for d, (n, b) in summary["dtypes"].items()},
        "axes": summary["axes"],
        "metadata": checkpoint.metadata(),
        "complete": not any(f.severity == "error" for f in plan.findings),
    }
    degrees = " x ".join(f"{k} {v}" for k, v in checkpoint.topology.items()) or "not sharded"
    rows = [
        ("framework", checkpoint.framework + (f" ({checkpoint.family})" if checkpoint.family else "")),
        ("step", checkpoint.step or "-"),
        ("topology", degrees),
        ("files", f"{document['files']} ({human(document['file_bytes'])})"),
        ("tensors", f"{summary['outputs']} whole, from {summary['stored_tensors']} stored"),
        ("parameters", f"{summary['parameters']:,}"),
        ("dtypes", ", ".join(f"{d} x {n} ({human(b)})" for d, (n, b) in summary["dtypes"].items()) or "-"),
        ("axes", ", ".join(f"{k}={v}" for k, v in summary["axes"].items()) or "-"),
        *_trained_with(document["metadata"].get("features")),
        *_chunks(document["metadata"].get("completeness")),
        ("complete", _verdict(plan)),
    ]
    text = table(rows, indent="")
    if a.verbose:
        listing = [
            (name, dtype, str(shape), human(size), f"{n} pieces")
            for name, dtype, shape, size, n in plan.outputs
        ]
        text += "\n\n" + table(listing) if listing else ""
        document["outputs"] = [
            {"name": name, "dtype": dtype, "shape": shape, "bytes": size, "pieces": n}
            for name, dtype, shape, size, n in plan.outputs
        ]
    return Result(text, document), plan.findings


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


def _verdict(plan: Plan) -> str:
    errors = [f for f in plan.findings if f.severity == "error"]
    if errors:
        return f"NO: {len(errors)} findings below"
    return (
        "yes, by headers"
        if plan.source.provable
        else "nothing missing by headers; not provable (give --expect CONFIG)"
    )


INSPECT = Verb(
    name="inspect",
    help="what it is: framework, step, topology, tensors, bytes, what is missing (headers only)",
    arguments=_arguments,
    run=_run,
)
