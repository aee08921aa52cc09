"""``fastshard master-weights``: comparison of fp32 master weights with parameters, and repair."""

from __future__ import annotations

import argparse

from ...common import codes
from ...common.errors import FastshardError
from ...common.formatting import counted
from ...conversion.master_weights import master_weights, repair_master_weights
from ..shared_arguments import add_common, add_exit_zero, add_source, looks, opening, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    group = parser.add_argument_group("repair")
    group.add_argument(
        "--repair", metavar="OUT", help="write a copy whose master weights are rebuilt from the parameters"
    )
    group.add_argument(
        "--drop-optimizer",
        action="store_true",
        help="with --repair: leave the optimizer out, for load_module_only=True",
    )
    group.add_argument("--resume", action="store_true", help="continue an interrupted repair")
    group.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    group.add_argument("--fsync", choices=("full", "none"), help="durability (default: full)")
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    if a.repair is None:
        stray = {
            "--drop-optimizer": a.drop_optimizer,
            "--resume": a.resume,
            "--overwrite": a.overwrite,
            "--fsync": a.fsync is not None,
        }
        if flag := next((flag for flag, given in stray.items() if given), None):
            raise FastshardError.of(
                codes.USAGE,
                f"{flag} needs --repair OUT",
                help="pass --repair OUT too; without it nothing is written",
            )
        report = master_weights(a.ckpt, memory=a.memory, progress=progress(a), **opening(a))
        steps = ", ".join(f"{step:g}" for step in report.steps) or "not stated"
        text = (
            f"{counted(report.compared, 'tensor')}, {report.elements:,} elements compared; optimizer step "
            f"{steps}"
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
        reason = (
            "every fp32 master weight rounds to its parameter"
            if report.ok
            else "not every tensor was compared"
        )
        return Result(text, document, reason=reason), report.findings
    looks(a, "--repair")
    manifest = repair_master_weights(
        a.ckpt,
        a.repair,
        drop_optimizer=a.drop_optimizer,
        memory=a.memory,
        resume=a.resume,
        overwrite=a.overwrite,
        fsync=a.fsync != "none",
        progress=progress(a),
        **opening(a),
    )
    count = len(manifest.document["tensors"])
    what = (
        "the optimizer state was left out; load it with load_module_only=True"
        if a.drop_optimizer
        else "master weights rebuilt from the parameters, moments and step set to zero; load it as usual"
    )
    document = {"out": str(a.repair), "tensors": count, "files": manifest.document["files"]}
    return Result(f"{a.repair}: {what}", document), manifest.findings


MASTER_WEIGHTS = Verb(
    name="master-weights",
    help="compare fp32 master weights with parameters; rebuild them",
    description="""\
        Compares the fp32 master weights with the 16-bit parameters: each must round to its parameter.
        --repair assumes that the parameters are right: OUT is the same checkpoint with master weights
        rebuilt from them, and with moments and step set to zero.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    finds=True,
    publishes=lambda a: getattr(a, "repair", None),
    often=("--repair", "--drop-optimizer"),
    examples=("fastshard master-weights zero_run", "fastshard master-weights zero_run --repair repaired"),
)
