"""``fastshard copy-local``: a host's part of a checkpoint, copied and hashed."""

from __future__ import annotations

import argparse

from ...checkpoint.manifests import MANIFEST_NAME
from ...common.formatting import counted
from ...conversion.distributed.host_parts import copy_local
from ..render import human
from ..shared_arguments import add_common, add_opening, opening, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ckpt", metavar="CKPT", help="the checkpoint files on this host")
    parser.add_argument("out", metavar="PART", help="destination directory")
    add_opening(parser)
    group = parser.add_argument_group("writing")
    group.add_argument("--overwrite", action="store_true", help="replace PART if it exists")
    group.add_argument("--fsync", choices=("full", "none"), default="full", help="durability (default: full)")
    add_common(parser)


def _out(a: argparse.Namespace) -> str | None:
    return getattr(a, "out", "")


def _run(a: argparse.Namespace) -> Outcome:
    manifest = copy_local(
        a.ckpt,
        a.out,
        memory=a.memory,
        overwrite=a.overwrite,
        fsync=a.fsync == "full",
        progress=progress(a),
        **opening(a),
    )
    files = manifest.document["files"]
    size = sum(file["size"] for file in files)
    text = f"{a.out}: {counted(len(files), 'file')}, {human(size)}, every byte hashed in {MANIFEST_NAME}"
    return Result(text, {"out": str(a.out), "files": files, "bytes": size}), manifest.findings


COPY_LOCAL = Verb(
    name="copy-local",
    help="copy this host's files, hashed, for a merge elsewhere",
    arguments=_arguments,
    run=_run,
    silent=True,
    publishes=_out,
    often=("--overwrite",),
    examples=("fastshard copy-local run part",),
)
