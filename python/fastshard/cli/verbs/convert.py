"""``fastshard merge`` and ``convert``: write a checkpoint under its own names or in another layout."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

from ...checkpoint.dequantised import describe_record
from ...checkpoint.manifests import MANIFEST_NAME, Manifest
from ...common import codes
from ...common.addresses import find_scheme
from ...common.errors import FastshardError
from ...common.formatting import counted
from ...common.options import CheckingLoss, Uploading
from ...conversion.convert import convert as convert_checkpoint
from ...conversion.distributed.node_local import SHARED_BYTES
from ..render import human
from ..shared_arguments import (
    add_common,
    add_node_local,
    add_options,
    add_ranks,
    add_ray,
    add_shaping,
    add_source,
    add_target,
    add_writing,
    given,
    opening,
    placing,
    progress,
    ranked,
    shape,
    spread,
    writing,
)
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser, to: bool) -> None:
    add_source(parser, like=True)
    parser.add_argument("out", metavar="OUT", help="destination directory")
    if to:
        add_target(parser, required=True)
        add_options(parser.add_argument_group("loss"), CheckingLoss)
    add_shaping(parser)
    add_writing(parser)
    add_options(parser.add_argument_group("hub"), Uploading)
    add_ranks(parser)
    add_node_local(parser)
    add_ray(parser)
    add_common(parser)


def destination(a: argparse.Namespace) -> str | None:
    """Return OUT; an empty text if the arguments could not be parsed, because the verb still publishes."""
    return getattr(a, "out", "")


def _refuse_source_as_out(a: argparse.Namespace) -> None:
    """Raise an error if the last path is a checkpoint and not a new folder, because OUT was probably
    forgotten.

    Raises:
        FastshardError: ``FS504``.
    """
    out = Path(a.out)
    if a.overwrite or a.resume or a.rank is not None or not out.is_dir() or (out / MANIFEST_NAME).exists():
        return
    if any(out.resolve() == Path(path).resolve() for path in a.ckpt):
        return
    from ...common.listing import list_roots
    from ...sources.base import Options
    from ...sources.registry import detect

    try:
        framework = detect(list_roots([a.out]), Options()).framework
    except FastshardError:
        return
    command = shlex.join(["fastshard", a.command, *map(str, a.ckpt), a.out, "OUT"])
    raise FastshardError.of(
        codes.OUT_EXISTS,
        "OUT, the last path, already holds a checkpoint",
        file=a.out,
        expected="an empty or absent directory",
        got=f"a checkpoint of {framework}",
        help="add the destination as the last path if this directory is a source too",
        run=[command],
    )


def _write(a: argparse.Namespace, to: str | None) -> Outcome:
    _refuse_source_as_out(a)
    shaping = shape(a)
    if to is not None:
        shaping |= placing(a)
    options: dict[str, Any] = {
        "progress": progress(a),
        **writing(a),
        **shaping,
        **opening(a),
    }
    if a.ray is None:
        checking = {} if to is None else given(a, CheckingLoss)
        manifest = convert_checkpoint(
            a.ckpt,
            a.out,
            to,
            **options,
            **checking,
            **given(a, Uploading),
            **ranked(a),
            node_local=a.node_local,
        )
    else:
        if to is not None and a.check_loss is not None:
            raise FastshardError.of(
                codes.USAGE,
                "--check-loss cannot be combined with --ray",
                help="run `fastshard loss` on the result",
            )
        if a.hf_branch is not None or a.hf_pr:
            raise FastshardError.of(
                codes.USAGE,
                "--hf-branch and --hf-pr cannot be combined with --ray",
                help="write the result to storage that all nodes see, then run `hf upload`",
            )
        from ...conversion.distributed.ray.convert import convert as convert_on_ray

        options |= {**spread(a), "node_local": a.node_local}
        # What Ray has to say of workers and nodes that die it prints on stdout, which is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            manifest = convert_on_ray(a.ckpt, a.out, to, **options)
    return published(manifest, a.out, a.verbose)


def published(manifest: Manifest, out: str, verbose: int = 0) -> Outcome:
    """Return the output for a published result."""
    document = manifest.document
    files = manifest.tensor_files
    size = sum(f["size"] for f in files) if files else manifest.tensor_bytes
    container = f"in {counted(len(files), 'file')}" if files else "of arrays"
    tensors = counted(len(document["tensors"]), "tensor")
    text = f"{out}: {tensors}, {human(size)} {container}, every byte hashed in {MANIFEST_NAME}"
    if record := document["values"].get("dequantised"):
        text = f"{text}\n{describe_record(record)}"
    if record := document["values"].get("loss"):
        # Loaded where a loss was computed: every conversion would wait for it.
        from ...evaluation.loss_figures import describe_loss

        text = f"{text}\n{describe_loss(record)}"
    if verbose and manifest.left_out:
        text = "\n".join(
            [text, "not carried over from the source:", *(f"  {path}" for path in manifest.left_out)]
        )
    text = "\n".join([text, *(f"{f.message}: {f.got}" for f in manifest.findings if f.code == SHARED_BYTES)])
    commits = [
        f for f in manifest.findings if f.code == codes.PUBLISHED and find_scheme(f.file or "") == "hf"
    ]
    text = "\n".join([text, *(f"{finding.message}: {finding.file}" for finding in commits)])
    summary = {
        "out": str(out),
        "tensors": len(document["tensors"]),
        "bytes": size,
        "plan": document["plan"],
    }
    if manifest.left_out:
        summary["left_out"] = manifest.left_out
    return Result(text, {**summary, "files": document["files"]}), manifest.findings


MERGE = Verb(
    name="merge",
    help="merge shards into full tensors; keep their names",
    arguments=lambda parser: _arguments(parser, to=False),
    run=lambda a: _write(a, None),
    silent=True,
    tells_unchecked=True,
    publishes=destination,
    often=(
        "--dtype",
        "--step",
        "--weights",
        "--optimizer",
        "--include",
        "--exclude",
        "--max-shard-size",
        "--resume",
        "--overwrite",
        "--memory",
    ),
    examples=("fastshard merge run merged", "fastshard merge run merged_bf16 --dtype bf16"),
)
CONVERT = Verb(
    name="convert",
    help="convert to Hugging Face, Megatron, NeoX, DCP, MaxText, Orbax",
    arguments=lambda parser: _arguments(parser, to=True),
    run=lambda a: _write(a, a.to),
    silent=True,
    tells_unchecked=True,
    publishes=destination,
    often=(
        "--to",
        "--tp",
        "--pp",
        "--vocab-size",
        "--dtype",
        "--config",
        "--adapter",
        "--optimizer",
        "--resume",
        "--overwrite",
        "--memory",
    ),
    examples=(
        "fastshard convert run model --to hf --vocab-size 500",
        "fastshard convert model run_tp4 --to gpt_neox --tp 4",
    ),
)
