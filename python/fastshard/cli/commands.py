"""The commands: each calls the library and says what came of it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _core
from ..checkpoint import Checkpoint
from ..checkpoint import open as open_checkpoint
from ..convert import convert as convert_checkpoint
from ..convert import plan as plan_of
from ..errors import CODES, FastshardError, Finding
from ..manifests import MANIFEST_NAME, run_options
from ..masters import masters as compare_masters
from ..masters import repair_masters
from ..placing import OPTIONS
from ..planning import Plan, make_plan, thread_count
from ..stats import HISTOGRAM_EDGES
from ..stats import with_findings as stats_of
from ..verify import diff as diff_checkpoints
from ..verify import manifest as make_manifest
from ..verify import verify as verify_checkpoint
from .render import human, stats_table, table


@dataclass
class Result:
    """What a command puts on stdout: text for people, or the fields of the ``--json`` object."""

    text: str = ""
    document: dict[str, Any] = field(default_factory=dict)


Outcome = tuple[Result, list[Finding]]


def _opening(a: argparse.Namespace) -> dict[str, Any]:
    return {
        "step": a.step, "config": a.config, "layout": a.layout, "vocab_size": a.vocab_size, "accept": a.accept,
        "expect_processes": a.expect_processes, "threads": _threads(a),
    }  # fmt: skip


def _threads(a: argparse.Namespace) -> int:
    return thread_count(a.threads)


def _open(a: argparse.Namespace, **more: Any) -> Checkpoint:
    return open_checkpoint(*a.ckpt, **{**_opening(a), **more})


def _progress(a: argparse.Namespace) -> str | bool:
    return False if a.quiet or (a.json and a.progress == "auto") else a.progress


def _shape(a: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": a.dtype, "replicas": a.replicas, "include": a.include, "exclude": a.exclude,
        "max_shard_size": a.max_shard_size, "weights": a.weights, "optimizer": a.optimizer,
    }  # fmt: skip


def _placing(a: argparse.Namespace) -> dict[str, Any]:
    return {option.name: getattr(a, option.name) for option in OPTIONS}


def inspect(a: argparse.Namespace) -> Outcome:
    """Header-only description."""
    checkpoint = _open(a)
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


def plan(a: argparse.Namespace) -> Outcome:
    """What would be written."""
    checkpoint = _open(a)
    made = plan_of(checkpoint, a.to, tokenizer=a.tokenizer, **_placing(a), **_shape(a))
    summary = made.summary
    memory = run_options(a.memory, a.threads, checkpoint.opened.catalog)["memory"]
    try:
        free = shutil.disk_usage(os.curdir).free
    except OSError as error:
        raise FastshardError.of("FS507", f"the current directory: {error.strerror}") from None
    document: dict[str, Any] = {
        "digest": made.digest,
        "summary": summary,
        "space": {"needed": summary["bytes"], "free_here": free},
        "memory": {"budget": memory, "baseline": _core.anonymous_memory(), "threads": _threads(a)},
        "read_amplification": summary["read_amplification"],
    }
    if a.verbose or a.json:
        document["plan"] = made.to_dict()
    changes = [f"{change} ({count})" for change, count in summary["changes"].items()]
    rows = [
        ("target", made.target),
        ("digest", made.digest),
        (
            "sources",
            f"{summary['sources']} files, {human(summary['source_bytes'])}, {summary['stored_tensors']} tensors",
        ),
        ("outputs", f"{summary['outputs']} tensors, {summary['parameters']:,} parameters"),
        (
            "files",
            ", ".join(f"{f['name']} ({human(f['size'])})" for f in summary["files"][:4])
            + (f", ... {len(summary['files'])} in all" if len(summary["files"]) > 4 else ""),
        ),
        ("dtypes", ", ".join(f"{d} x {n}" for d, (n, _) in summary["dtypes"].items()) or "-"),
        ("value ops", ", ".join(changes) or "none: every bit is kept"),
        ("space", f"{human(summary['bytes'])} needed, {human(free)} free in the current directory"),
        (
            "memory",
            f"{human(memory)} at most ({human(_core.anonymous_memory())} baseline, {_threads(a)} threads)",
        ),
        (
            "reads",
            f"{summary['read_amplification']:.4g} x the bytes of the stored tensors, replicas and checksums included",
        ),
    ]
    if decoding := summary["decoding"]:
        beyond = decoding["live"] > memory
        rows.append(
            (
                "decodes",
                f"{decoding['blocks']} chunks of {human(decoding['largest'])} at most, each once; "
                f"{human(decoding['live'])} of them are needed at a time"
                + (f": what {human(memory)} cannot hold lies on disk meanwhile" if beyond else ""),
            )
        )
    text = table(rows, indent="")
    if a.verbose:
        text += "\n\n" + table([(n, d, str(s), human(b), f"{p} pieces") for n, d, s, b, p in made.outputs])
    return Result(text, document), made.findings


def _write(a: argparse.Namespace, to: str | None) -> Outcome:
    shape = _shape(a)
    if to is not None:
        shape |= _placing(a)
    manifest = convert_checkpoint(
        a.ckpt, a.out, to, expect=a.expect, tokenizer=a.tokenizer, memory=a.memory, resume=a.resume,
        overwrite=a.overwrite, fsync=a.fsync == "full", sparse=a.sparse, stats=a.stats, progress=_progress(a), **shape, **_opening(a),
    )  # fmt: skip
    document = manifest.document
    files = manifest.tensor_files
    size = sum(f["size"] for f in files) if files else manifest.tensor_bytes
    held = f"in {len(files)} files" if files else "of arrays"
    text = (
        f"{a.out}: {len(document['tensors'])} tensors, {human(size)} {held}, "
        f"every byte hashed; manifest {MANIFEST_NAME}"
    )
    summary = {
        "out": str(a.out),
        "tensors": len(document["tensors"]),
        "bytes": size,
        "plan": document["plan"],
    }
    return Result(text, {**summary, "files": document["files"]}), manifest.findings


def merge(a: argparse.Namespace) -> Outcome:
    """Whole tensors under the source's own names."""
    return _write(a, None)


def convert(a: argparse.Namespace) -> Outcome:
    """Another layout."""
    return _write(a, a.to)


def verify(a: argparse.Namespace) -> Outcome:
    """Completeness, integrity, and content against a manifest."""
    subset = None
    if a.subset:
        given = re.fullmatch("([0-9]{1,18})/([0-9]{1,18})", a.subset)
        if given is None:
            raise FastshardError.of("FS515", "--subset", expected="n/t, e.g. 1/10", got=a.subset)
        subset = (int(given[1]), int(given[2]))
    opening = _opening(a)
    if opening["config"] is None:
        del opening["config"]
    findings = verify_checkpoint(
        a.ckpt,
        expect=a.expect,
        subset=subset,
        include=a.include,
        exclude=a.exclude,
        memory=a.memory,
        progress=_progress(a),
        **opening,
    )
    errors = sum(f.severity == "error" for f in findings)
    warnings = sum(f.severity == "warning" for f in findings)
    verdict = "nothing wrong found" if not errors else f"{errors} errors"
    if warnings:
        verdict += f", {warnings} warnings"
    document = {"ok": not errors, "errors": errors, "warnings": warnings}
    return Result(f"{', '.join(map(str, a.ckpt))}: {verdict}", document), findings


def stats(a: argparse.Namespace) -> Outcome:
    """Distributions per tensor."""
    gathered, findings = stats_of(
        a.ckpt, include=a.include, exclude=a.exclude, memory=a.memory, progress=_progress(a), **_opening(a)
    )
    document = {
        "tensors": {name: tensor.to_dict() for name, tensor in gathered.items()},
        "histogram_edges": list(HISTOGRAM_EDGES),
    }
    return Result(stats_table(gathered), document), findings


def diff(a: argparse.Namespace) -> Outcome:
    """Tensor by tensor."""
    differences = diff_checkpoints(
        a.a, a.b, include=a.include, exclude=a.exclude, memory=a.memory, progress=_progress(a), **_opening(a)
    )
    text = (
        f"{len(differences)} tensors differ"
        if differences
        else "no difference: every tensor has the same bytes"
    )
    document = {"equal": not differences, "differences": [d.to_dict() for d in differences]}
    return Result(text, document), [d.to_finding() for d in differences]


def manifest(a: argparse.Namespace) -> Outcome:
    """Hashes what is there."""
    made = make_manifest(
        a.ckpt,
        a.output,
        exclude=a.exclude,
        stats=a.stats,
        memory=a.memory,
        progress=_progress(a),
        **_opening(a),
    )
    document = made.document
    path = a.output or Path(a.ckpt[0]) / MANIFEST_NAME
    size = sum(f["size"] for f in document["files"])
    text = (
        f"{path}: {len(document['tensors'])} tensors in {len(document['files'])} files, {human(size)} hashed"
    )
    return Result(text, {"manifest": str(path), "tensors": len(document["tensors"])}), made.findings


def masters(a: argparse.Namespace) -> Outcome:
    """Masters against parameters, and their repair."""
    if a.repair is None:
        stray = {
            "--drop-optimizer": a.drop_optimizer,
            "--resume": a.resume,
            "--overwrite": a.overwrite,
            "--fsync": a.fsync is not None,
        }
        if flag := next((flag for flag, given in stray.items() if given), None):
            raise FastshardError.of(
                "FS515", f"{flag} goes with --repair OUT", help="nothing is written without --repair"
            )
        report = compare_masters(a.ckpt, memory=a.memory, progress=_progress(a), **_opening(a))
        verdict = (
            "every fp32 master rounds to its parameter"
            if report.ok
            else f"{len(report.differing)} masters are not their parameters"
            if report.differing
            else "not proven, see the findings"
        )
        steps = ", ".join(f"{step:g}" for step in report.steps) or "not told"
        text = (
            f"{', '.join(map(str, a.ckpt))}: {verdict}; {report.compared} tensors, {report.elements:,} elements"
            f" compared; optimizer step {steps}"
        )
        if report.differing:
            text += f"\n\n{report.advice}"
        document = {
            "ok": report.ok,
            "compared": report.compared,
            "elements": report.elements,
            "differing": report.differing,
            "steps": report.steps,
        }
        return Result(text, document), report.findings
    manifest = repair_masters(
        a.ckpt, a.repair, drop_optimizer=a.drop_optimizer, memory=a.memory, resume=a.resume, overwrite=a.overwrite,
        fsync=a.fsync != "none", progress=_progress(a), **_opening(a),
    )  # fmt: skip
    count = len(manifest.document["tensors"])
    what = (
        "the optimizer left out; load it with load_module_only=True"
        if a.drop_optimizer
        else f"{count} tensors rebuilt: masters made from the parameters, moments and step set to zero; load it as usual"
    )
    document = {"out": str(a.repair), "tensors": count, "files": manifest.document["files"]}
    return Result(f"{a.repair}: {what}", document), manifest.findings


def explain(a: argparse.Namespace) -> Outcome:
    """What a code means."""
    if a.code is None:
        rows = [
            (code, row["severity"], row["name"].lower().replace("_", "-"))
            for code, row in sorted(CODES.items())
        ]
        return Result(table(rows, indent=""), {"codes": list(CODES.values())}), []
    code = a.code.upper()
    row = CODES.get(code if code.startswith("FS") else f"FS{code}")
    if row is None:
        raise FastshardError.of(
            "FS515", f"no finding has the code {a.code}", help="`fastshard explain` lists all codes"
        )
    exits = {1: "1 (problem)", 2: "2 (could not run)", 3: "3 (incomplete)"}
    name = row["name"].lower().replace("_", " ")
    text = f"{row['code']} {name} ({row['severity']}; as an error, exit code {exits[row['exit']]})\n\n{row['explanation']}"
    if row["code"] == "FS513":
        text += "\n\nRead: safetensors (single, indexed, per tensor-parallel rank), torch .bin with index, GPT-NeoX."
    return Result(text, row), []


COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    "inspect": inspect, "merge": merge, "convert": convert, "plan": plan, "verify": verify, "stats": stats,
    "diff": diff, "manifest": manifest, "masters": masters, "explain": explain,
}  # fmt: skip
