"""``fastshard plan``: what would be written."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

from ... import _core
from ...checkpoint.manifests import run_options
from ...common.errors import FastshardError
from ...common.thread_counts import thread_count
from ...conversion.convert import plan as plan_of
from ...conversion.distributed.split_runs import begin
from ..render import human, table
from ..shared_arguments import (
    add_common,
    add_exit_zero,
    add_shaping,
    add_source,
    add_target,
    add_writing,
    looks,
    opened,
    opening,
    placing,
    shape,
)
from ..verb import Outcome, Result, Verb
from .parts import EMITTERS, emitted


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_target(parser, required=False)
    add_shaping(parser)
    group = parser.add_argument_group("a run in parts (with --parts)")
    group.add_argument(
        "--parts", type=int, metavar="N", help="begin a run of N parts towards OUT, and print what makes them"
    )
    group.add_argument(
        "--out", metavar="OUT", help="destination directory, on storage that all who make parts see"
    )
    group.add_argument(
        "--emit", choices=EMITTERS, default="shell", help="what the parts are started by (default: shell)"
    )
    add_writing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _begin(a: argparse.Namespace) -> Outcome:
    """Begins a run in parts: the commands that make them."""
    looks(a, "--parts")
    if a.out is None:
        raise FastshardError.of(
            "FS515", "--parts is given without --out", help="name the destination with --out OUT"
        )
    if a.fsync != "full":
        raise FastshardError.of(
            "FS515", "--fsync", expected="full, for a run of several processes", got=a.fsync
        )
    run = begin(
        a.ckpt, a.out, a.to, parts=a.parts, expect=a.expect, tokenizer=a.tokenizer, memory=a.memory, resume=a.resume,
        overwrite=a.overwrite, sparse=a.sparse, stats=a.stats, **shape(a), **placing(a), **opening(a),
    )  # fmt: skip
    text = emitted(run, a.emit)
    document = {"out": run.out, "run": run.id, "folder": run.folder, "parts": run.bytes, "emitted": text}
    return Result(text, document, proof=False), run.findings


def _run(a: argparse.Namespace) -> Outcome:
    if a.parts is not None:
        return _begin(a)
    checkpoint = opened(a)
    made = plan_of(checkpoint, a.to, tokenizer=a.tokenizer, **placing(a), **shape(a))
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
        "memory": {
            "budget": memory,
            "baseline": _core.anonymous_memory(),
            "threads": thread_count(a.threads),
        },
        "read_amplification": summary["read_amplification"],
    }
    if a.verbose or a.output_format == "json":
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
            f"{human(memory)} at most ({human(_core.anonymous_memory())} baseline, {thread_count(a.threads)} threads)",
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


PLAN = Verb(
    name="plan", help="print what merge or convert would do, write nothing", arguments=_arguments, run=_run
)
