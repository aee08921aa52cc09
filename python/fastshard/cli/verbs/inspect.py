"""``fastshard inspect``: a description from headers alone."""

from __future__ import annotations

import argparse
from typing import Any

from ...checkpoint.inspection import Inspection, inspect
from ..render import fields, human, table
from ..shared_arguments import add_common, add_exit_zero, add_source, opening
from ..verb import Outcome, Result, Verb

#: Descriptions of parallel dimensions.
_PARALLEL = {
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "ep": "expert parallel",
    "cp": "context parallel",
    "dp": "data parallel",
}
#: Sizes that the row about the model names.
_SIZES = ("hidden_size", "intermediate_size", "head_dim")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_common(parser, run=False)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    seen = inspect(a.ckpt, memory=a.memory, **opening(a))
    document = seen.to_dict()
    rows = [
        ("framework", seen.framework),
        *([("step", seen.step)] if seen.step else []),
        *([("parallelism", _parallelism(seen.topology))] if seen.topology else []),
        *_model(seen),
        ("tensors", _tensors(seen)),
        ("parameters", _parameters(seen)),
        ("dtypes", ", ".join(f"{d} x {n} ({human(b)})" for d, (n, b) in seen.dtypes.items()) or "-"),
        ("files", f"{seen.files} ({human(seen.file_bytes)})"),
        *_trained_with(seen.metadata.get("features")),
        *_chunks(seen.metadata.get("completeness")),
    ]
    text = fields(rows)
    if a.verbose:
        listing = [
            (row.name, row.dtype, str(list(row.shape)), human(row.nbytes), f"{row.pieces} pieces")
            for row in seen.outputs
        ]
        text += "\n\n" + table(listing) if listing else ""
        document["outputs"] = [row.to_dict() for row in seen.outputs]
    return Result(text, document, reason=_reason(seen)), seen.findings


def _tensors(seen: Inspection) -> str:
    """Describe the number of full tensors, and from how many stored ones they are assembled."""
    stored = f"{seen.stored_tensors:,} stored"
    if not seen.incomplete:
        return f"{len(seen.outputs):,}, from {stored}"
    return f"{len(seen.outputs):,} complete, {seen.incomplete:,} missing or incomplete, from {stored}"


def _parameters(seen: Inspection) -> str:
    """Format the number of parameters, and the expected number if some are missing."""
    if not seen.incomplete:
        return f"{seen.parameters:,}"
    of = "" if seen.expected_parameters is None else f" of {seen.expected_parameters:,}"
    return f"{seen.parameters:,}{of} in complete tensors"


def _parallelism(topology: dict[str, int]) -> str:
    """Describe the parallel dimensions with more than one rank."""
    named = [f"{_PARALLEL.get(name, name)} {degree}" for name, degree in topology.items() if degree > 1]
    return ", ".join(named) or "one rank"


def _model(seen: Inspection) -> list[tuple[str, str]]:
    """Return one row about the model's family and sizes, by their names in configs."""
    dimensions = seen.dimensions
    groups = dimensions.get("num_key_value_heads", 0)
    heads = dimensions.get("num_attention_heads") or groups * dimensions.get(
        "num_attention_heads_per_key_value_head", 0
    )
    sizes = [f"{dimensions['num_layers']} layers"] if "num_layers" in dimensions else []
    sizes += [f"{name} {dimensions[name]}" for name in _SIZES if name in dimensions]
    sizes += [f"{heads} attention heads"] if heads else []
    sizes += [f"{groups} key and value heads"] if groups not in (0, heads) else []
    sizes += [f"{dimensions['num_experts']} experts"] if "num_experts" in dimensions else []
    if "vocab_size" in dimensions:
        rows = dimensions.get("padded_vocab_size", dimensions["vocab_size"])
        padded = f" (padded to {rows} rows)" if rows != dimensions["vocab_size"] else ""
        sizes.append(f"vocab_size {dimensions['vocab_size']}{padded}")
    text = ": ".join(filter(None, [seen.family, ", ".join(sizes)]))
    return [("model", text)] if text else []


def _trained_with(features: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return one row about the features of training, if the adapter reads them."""
    if not features:
        return []
    flags = [name for name, value in features.items() if value is True]
    biases = [name.removesuffix("_bias") for name in flags if name.endswith("_bias")]
    words = [f"biases of {', '.join(biases)}"] if biases else []
    words += [name for name in flags if not name.endswith("_bias")]
    words += [
        f"{name}: {value}"
        for name, value in features.items()
        if isinstance(value, (str, int)) and not isinstance(value, bool)
    ]
    rows = [("features", "; ".join(words))]
    if fp8 := features.get("fp8"):
        rows.append(("fp8 state", ", ".join(f"{k} {v}" for k, v in fp8.items())))
    return rows


def _chunks(store: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return one row about the chunks of an array store."""
    if not store:
        return []
    absent = store["absent_chunks"]
    text = f"{store['verdict']}: {store['chunks']} required, " + (
        f"{absent} missing" if absent else "all present"
    )
    return [("chunks", text)]


def _reason(seen: Inspection) -> str:
    return "complete by headers" if seen.provable else "nothing is missing by headers"


INSPECT = Verb(
    name="inspect",
    help="show what a checkpoint holds and what is missing; headers only",
    arguments=_arguments,
    run=_run,
    finds=True,
    tells_unchecked=True,
    often=("--step", "--like", "--verbose", "--json"),
    examples=("fastshard inspect run", "fastshard inspect run --json"),
)
