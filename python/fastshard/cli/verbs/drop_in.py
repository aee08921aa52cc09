"""Commands with the arguments of the tools that they replace: DeepSpeed's and torch's."""

from __future__ import annotations

import argparse
import glob
from typing import Any

from ...checkpoint.open_checkpoint import open as open_checkpoint
from ...common import codes
from ...common.errors import FastshardError, Finding
from ...conversion.convert import merge
from ..shared_arguments import add_choosing, add_common, add_gate, add_source, gating, opened, progress
from ..verb import Outcome, Verb
from .convert import destination, published


def _of_zero(parser: argparse.ArgumentParser) -> None:
    # source: DeepSpeed deepspeed/utils/zero_to_fp32.py, its command line (0.18)
    parser.add_argument(
        "ckpt",
        metavar="CKPT",
        help="the directory that holds `latest` and the step directories, or one step directory",
    )
    parser.add_argument("out", metavar="OUT", help="output directory: new or empty")
    group = parser.add_argument_group("options of zero_to_fp32")
    group.add_argument(
        "--max_shard_size",
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum bytes of tensors in a file (default: 5GB)",
    )
    group.add_argument(
        "--safe_serialization",
        "--safe-serialization",
        action="store_true",
        help="accepted for compatibility: fastshard always writes safetensors",
    )
    group.add_argument(
        "-t",
        "--tag",
        metavar="TAG",
        help="step, e.g. global_step1 (default: the step that the file `latest` names)",
    )
    group.add_argument(
        "--exclude_frozen_parameters",
        "--exclude-frozen-parameters",
        action="store_true",
        help="leave out frozen parameters",
    )
    group.add_argument("-d", "--debug", action="count", dest="verbose", default=0, help="as -v")
    _writing(parser)
    add_gate(parser)
    add_common(parser)


def _of_ranks(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("out", metavar="OUT", help="output directory: new or empty")
    group = parser.add_argument_group("result")
    group.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum bytes of tensors in a file (default: 5GB)",
    )
    add_choosing(group)
    _writing(parser)
    add_common(parser)


def _writing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("writing")
    group.add_argument("--resume", action="store_true", help="continue an interrupted run of the same plan")
    group.add_argument("--overwrite", action="store_true", help="replace OUT if it is an earlier result")
    group.add_argument("--fsync", choices=("full", "none"), default="full", help="durability (default: full)")


def _zero(a: argparse.Namespace) -> Outcome:
    checkpoint = open_checkpoint(a.ckpt, step=a.tag, **gating(a))
    optimizer = checkpoint.opened.source.optimizer
    if not optimizer.masters:
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "no fp32 master weights: ZeRO did not write this checkpoint, or ran at stage 0",
            severity="error",
            file=a.ckpt,
            help="run `fastshard merge`, which uses the parameters as stored",
        )
    excluded = [glob.escape(name) for name in sorted(optimizer.frozen)] if a.exclude_frozen_parameters else []
    manifest = merge(
        checkpoint,
        a.out,
        weights="masters",
        exclude=excluded,
        **_list_write_options(a),
    )
    result, findings = published(manifest, a.out)
    if not a.safe_serialization:
        message = (
            "fastshard writes safetensors; zero_to_fp32 writes pytorch_model.bin unless it is given "
            "--safe_serialization"
        )
        findings = [*findings, Finding.of(codes.WEIGHTS_TAKEN, message)]
    return result, findings


def _list_write_options(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options for writing, in the form of :func:`fastshard.merge`."""
    return {
        "max_shard_size": a.max_shard_size,
        "memory": a.memory,
        "threads": a.threads,
        "resume": a.resume,
        "overwrite": a.overwrite,
        "fsync": a.fsync == "full",
        "progress": progress(a),
    }


def _consolidate(a: argparse.Namespace) -> Outcome:
    manifest = merge(
        opened(a),
        a.out,
        include=a.include,
        exclude=a.exclude,
        **_list_write_options(a),
    )
    return published(manifest, a.out)


ZERO_TO_FP32 = Verb(
    name="zero-to-fp32",
    help="drop-in for DeepSpeed's zero_to_fp32.py",
    description="""\
        Accepts the arguments of DeepSpeed's zero_to_fp32.py and writes what it writes with
        --safe_serialization: the merged fp32 master weights of a ZeRO checkpoint, under the model's names,
        in safetensors. Works like `fastshard merge --weights masters`: checked, in bounded memory, all or
        nothing.""",
    arguments=_of_zero,
    run=_zero,
    silent=True,
    tells_unchecked=True,
    publishes=destination,
    often=("--tag", "--max-shard-size", "--exclude-frozen-parameters"),
    examples=("fastshard zero-to-fp32 zero_run fp32",),
)
CONSOLIDATE = Verb(
    name="consolidate",
    help="drop-in for torch's DCP consolidation",
    description="""\
        Merges torch.distributed.checkpoint directories (FSDP) and the rank shards of its Hugging Face
        writer into one set of safetensors files with an index. Works like `fastshard merge`: checked, in
        bounded memory, all or nothing.""",
    arguments=_of_ranks,
    run=_consolidate,
    silent=True,
    tells_unchecked=True,
    publishes=destination,
    often=("--max-shard-size", "--include", "--resume", "--overwrite"),
    examples=("fastshard consolidate dcp_run consolidated",),
)
