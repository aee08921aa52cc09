"""Arguments of the commands."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn

from .. import _core
from ..options import meant
from ..placing import OPTIONS
from ..sources.base import ACCEPTABLE
from ..targets.registry import TARGETS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EPILOG = """\
exit codes:
  0  done (warnings are listed)
  1  problems found: damage, mismatch or inconsistency; nothing published; diff: they differ
  2  could not run: usage, permission, no such path, not a checkpoint, unsupported
  3  incomplete only: pieces are missing that may still arrive
  130, 143  stopped by Ctrl-C or SIGTERM; what is left and how to resume is said
  A result that was published before what went wrong is named; what cannot be printed is a 2.

`fastshard explain CODE` says what a finding means and what to do.
"""


class UsageError(Exception):
    """The arguments cannot be parsed."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raised, not printed: it may have to be JSON."""
        # argparse lists the choices and leaves the near one to be found.
        wrong = re.match(r"argument [^:]*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += meant(wrong[1], [choice.strip(" '") for choice in wrong[2].split(",")])
        raise UsageError(self, message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own is silent about what it cannot write.
        (file or sys.stderr).write(message)


def _common(parser: argparse.ArgumentParser, *, run: bool = True) -> None:
    group = parser.add_argument_group("common")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    group.add_argument("-q", "--quiet", action="count", default=0, help="errors only")
    group.add_argument("-v", "--verbose", action="count", default=0, help="notes and per-tensor detail")
    group.add_argument("--threads", type=int, metavar="N", help="worker threads (default: all cores)")
    if run:
        group.add_argument(
            "--progress", choices=("auto", "plain", "none"), default="auto", help="on stderr (default: auto)"
        )
        group.add_argument(
            "--memory",
            metavar="SIZE",
            help="anonymous memory of the process, baseline included (default: 256MiB, more if the plan alone needs it)",
        )


def _source(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    parser.add_argument(
        "ckpt",
        nargs=nargs,
        metavar="CKPT",
        help="checkpoint directory or file; several are node-local parts of one",
    )
    _opening(parser)


def _opening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("source")
    group.add_argument(
        "--step",
        metavar="N",
        help="step to take, by name or number (default: the tracker file's, else the newest)",
    )
    group.add_argument("--config", metavar="FILE", help="config.json, GPT-NeoX YAML: overrides what is found")
    group.add_argument("--layout", metavar="FILE", help="a layout table (TOML) of your own for the source")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="true vocabulary; rows beyond it are dropped"
    )
    group.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="WHAT",
        help="accept what is not in order: a save that was not committed; absent chunks (FS106) as zeros; an older step "
        "where the newest cannot be used (FS104); files that were renamed on purpose (FS113); files, or those "
        "that copies=GLOB names, that were copied on purpose (FS303). WHAT: " + ", ".join(ACCEPTABLE),
    )
    group.add_argument(
        "--expect-processes",
        type=int,
        metavar="N",
        help="processes that wrote the checkpoint, where its files do not tell (Orbax)",
    )


def _shaping(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--dtype", choices=("keep", "bf16", "f16", "f32"), default="keep")
    group.add_argument(
        "--replicas",
        choices=("equal", "mean"),
        default="equal",
        help="copies of a replicated tensor that differ: refuse (default), or average in float32",
    )
    _choosing(group)
    group.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest output file (default: 5GB)"
    )
    group.add_argument(
        "--weights",
        choices=("params", "masters"),
        help="which copy of the weights, where fp32 masters are there too (default: params where stored; the two must agree)",
    )
    group.add_argument("--optimizer", action="store_true", help="optimizer state too (merge)")


def _choosing(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="only these tensors")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="not these tensors")


def _stats(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--stats",
        action="store_true",
        help="statistics of each tensor into the manifest (see `fastshard stats`)",
    )


def _writing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("writing")
    group.add_argument("--expect", metavar="FILE", help="a manifest or config to check the source against")
    _tokenizer(group)
    group.add_argument("--resume", action="store_true", help="continue an interrupted run of the same plan")
    group.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    group.add_argument("--fsync", choices=("full", "none"), default="full", help="durability (default: full)")
    group.add_argument("--sparse", action="store_true", help="leave holes in files where they hold zeros")
    _stats(group)


def _tokenizer(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="take tokenizer files from here: a folder, or a file of a vocabulary (default: what lies beside the source)",
    )


def flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """The flags of a command."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [flag for action in commands.choices[command]._actions for flag in action.option_strings]


def build() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="fastshard",
        description="Turns the shards that large-model training leaves behind into a checkpoint that is provably whole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastshard {_core.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, help: str, description: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=textwrap.dedent(description or help),
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    inspect = add(
        "inspect", "what it is: framework, step, topology, tensors, bytes, what is missing (headers only)"
    )
    _source(inspect)
    _common(inspect, run=False)

    merge = add("merge", "whole tensors under the source's own names; needs no known model family")
    _source(merge)
    merge.add_argument("out", metavar="OUT", help="destination directory")
    _shaping(merge)
    _writing(merge)
    _common(merge)

    convert = add("convert", "another layout, e.g. Hugging Face")
    _source(convert)
    convert.add_argument("out", metavar="OUT", help="destination directory")
    _target(convert, required=True)
    _shaping(convert)
    _writing(convert)
    _common(convert)

    plan = add("plan", "print what merge or convert would do, write nothing")
    _source(plan)
    _target(plan, required=False)
    _shaping(plan)
    _tokenizer(plan)
    _common(plan)

    verify = add(
        "verify",
        "completeness and integrity; with a manifest also content",
        """\
        Completeness and integrity; with a manifest also content. Warns (FS313) about rows, columns or other
        slabs of a floating tensor that are zero throughout while the rest is not: lost shards look like that.""",
    )
    _source(verify)
    verify.add_argument("--expect", metavar="FILE", help="a manifest or config")
    verify.add_argument("--subset", metavar="n/t", help="read part n of t of the tensors")
    _choosing(verify)
    _common(verify)

    stats = add(
        "stats",
        "distributions per tensor: extremes, mean, std, zeros, NaN, histogram, zero slabs",
        """\
        One streaming pass over the whole tensors. The histogram has 64 fixed bins, 32 powers of two for each
        sign from 2^-24 to 2^6 (smaller and larger numbers in the first and last of them), so that those of two
        checkpoints can be compared; zeros, NaN and infinities are counted apart. Zero slabs are indices of a
        dimension at which everything is zero: lost shards look like that.""",
    )
    _source(stats)
    _choosing(stats)
    _common(stats)

    diff = add("diff", "two checkpoints, tensor by tensor, across formats and shardings")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    _opening(diff)
    _choosing(diff)
    _common(diff)

    masters = add(
        "masters",
        "fp32 masters against 16-bit parameters; rebuild the masters for a finetune",
        """\
        Checks that every fp32 master of the optimizer rounds to its 16-bit parameter. With --repair the
        parameters are taken to be right: OUT is the same checkpoint with masters made from them, and
        moments and step zero.""",
    )
    _source(masters)
    group = masters.add_argument_group("repair")
    group.add_argument("--repair", metavar="OUT", help="write a copy whose masters are the parameters")
    group.add_argument(
        "--drop-optimizer",
        action="store_true",
        help="with --repair: leave the optimizer out, for load_module_only=True",
    )
    group.add_argument("--resume", action="store_true", help="continue an interrupted repair")
    group.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    group.add_argument("--fsync", choices=("full", "none"), help="durability (default: full)")
    _common(masters)

    manifest = add("manifest", "hash what is there, so that later damage shows")
    _source(manifest)
    manifest.add_argument("-o", "--output", metavar="FILE", help="default: fastshard.manifest.json in CKPT")
    manifest.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="do without these arrays, which cannot be read; all else is hashed",
    )
    _stats(manifest)
    _common(manifest)

    explain = add("explain", "what a finding means and what to do")
    explain.add_argument("code", nargs="?", metavar="CODE", help="e.g. FS101; without it, all codes")
    explain.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _target(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--to",
        required=required,
        metavar="TARGET",
        help=", ".join(TARGETS),
    )
    for option in OPTIONS:
        how: dict[str, Any] = {"help": option.help, "default": option.default}
        if option.kind == "switch":
            how["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
        elif option.kind == "choice":
            how["choices"] = option.choices
        else:
            how |= {"type": int, "metavar": "N"}
        parser.add_argument(option.flag, **how)
