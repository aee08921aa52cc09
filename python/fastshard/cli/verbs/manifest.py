"""``fastshard manifest``: hashes of a checkpoint's tensors and files."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...checkpoint.manifests import MANIFEST_NAME
from ...common.formatting import counted
from ...verification.inventory import manifest as make_manifest
from ..render import human
from ..shared_arguments import add_common, add_source, add_stats, opening, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: fastshard.manifest.json in CKPT")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave out these arrays, which cannot be read, and hash the rest",
    )
    add_stats(parser)
    add_common(parser)


def _run(a: argparse.Namespace) -> Outcome:
    manifest = make_manifest(
        a.ckpt,
        a.output,
        exclude=a.exclude,
        stats=a.stats,
        memory=a.memory,
        progress=progress(a),
        **opening(a),
    )
    document = manifest.document
    path = a.output or Path(a.ckpt[0]) / MANIFEST_NAME
    size = sum(f["size"] for f in document["files"])
    text = (
        f"{path}: {counted(len(document['tensors']), 'tensor')} in "
        f"{counted(len(document['files']), 'file')}, "
        f"{human(size)} hashed"
    )
    return Result(text, {"manifest": str(path), "tensors": len(document["tensors"])}), manifest.findings


MANIFEST = Verb(
    name="manifest",
    help="record hashes now, so that later damage is found",
    arguments=_arguments,
    run=_run,
    silent=True,
    often=("--output", "--stats"),
    examples=(
        "fastshard manifest run -o run.manifest.json",
        "fastshard verify run --expect run.manifest.json",
    ),
)
