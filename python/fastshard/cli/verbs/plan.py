"""``fastshard plan``: what would be written."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

from ... import _core
from ...checkpoint.manifests import run_options
from ...common import codes
from ...common.errors import FastshardError
from ...common.formatting import counted, human_memory
from ...common.thread_counts import thread_count
from ...conversion.convert import plan as plan_of
from ..render import fields, human, table
from ..shared_arguments import (
    add_common,
    add_exit_zero,
    add_shaping,
    add_source,
    add_target,
    add_writing,
    opened,
    placing,
    shape,
)
from ..verb import Outcome, Result, Verb

#: Maximum number of files to name.
_FILES = 4


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_target(parser, required=False)
    add_shaping(parser)
    add_writing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    checkpoint = opened(a)
    plan = plan_of(checkpoint, a.to, tokenizer=a.tokenizer, **placing(a), **shape(a))
    summary = plan.summary
    memory = run_options(a.memory, a.threads, checkpoint.opened.catalog)["memory"]
    try:
        free = shutil.disk_usage(os.curdir).free
    except OSError as error:
        raise FastshardError.of(codes.IO, f"the current directory cannot be read: {error.strerror}") from None
    document: dict[str, Any] = {
        "digest": plan.digest,
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
        document["plan"] = plan.to_dict()
    changes = [f"{change} ({count})" for change, count in summary["changes"].items()]
    files = [f"{f['name']} ({human(f['size'])})" for f in summary["files"]]
    step = f", step {checkpoint.step}" if checkpoint.step else ""
    rows = [
        (
            "from",
            f"{checkpoint.framework}{step}: {counted(summary['sources'], 'file')}, "
            f"{counted(summary['stored_tensors'], 'stored tensor')}, {human(summary['source_bytes'])}",
        ),
        (
            "to",
            f"{plan.target}: {counted(len(files), 'file')}, {counted(summary['outputs'], 'tensor')}, "
            f"{summary['parameters']:,} parameters, {human(summary['bytes'])}",
        ),
        (
            "files",
            ", ".join(files[:_FILES]) + (f" and {len(files) - _FILES} more" if len(files) > _FILES else ""),
        ),
        ("dtypes", ", ".join(f"{d} x {n}" for d, (n, _) in summary["dtypes"].items()) or "-"),
        ("changes", ", ".join(changes) or "none: every bit is kept"),
        ("storage", f"{human(summary['bytes'])} needed, {human(free)} free in the current directory"),
        (
            "memory",
            f"{human_memory(memory)} at most ({human_memory(_core.anonymous_memory())} baseline, "
            f"{counted(thread_count(a.threads), 'thread')})",
        ),
        (
            "reads",
            f"{summary['read_amplification']:.4g} x the bytes of the stored tensors, replicas and checksums "
            "included",
        ),
        ("digest", plan.digest),
    ]
    if decoding := summary["decoding"]:
        beyond = decoding["live"] > memory
        rows.append(
            (
                "decodes",
                f"{decoding['blocks']} chunks of at most {human(decoding['largest'])}, each decoded once; "
                f"{human_memory(decoding['live'])} of them are needed at a time"
                + (f": what does not fit in {human_memory(memory)} is kept on disk" if beyond else ""),
            )
        )
    text = fields(rows)
    if a.verbose:
        text += "\n\n" + table([(n, d, str(s), human(b), f"{p} pieces") for n, d, s, b, p in plan.outputs])
    return Result(text, document), plan.findings


PLAN = Verb(
    name="plan",
    help="show what merge or convert would do; write nothing",
    arguments=_arguments,
    run=_run,
    tells_unchecked=True,
    often=("--to", "--tp", "--pp", "--vocab-size", "--dtype", "--json"),
    examples=("fastshard plan run --to hf", "fastshard plan model --to gpt_neox --tp 4"),
)
