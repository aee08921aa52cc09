"""Arguments that verbs share: groups for their parsers, and the corresponding arguments of the library."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.open_checkpoint import open as open_checkpoint
from ..common import codes
from ..common.errors import FastshardError
from ..common.options import (
    Against,
    Checked,
    Choosing,
    Comparing,
    Gating,
    Lending,
    Memory,
    Opening,
    Option,
    Placing,
    Ranked,
    Requested,
    Sharding,
    Source,
    Threads,
    ValueOptions,
    Vocabulary,
    table,
)
from ..common.thread_counts import thread_count
from ..targets.registry import TARGETS
from .output_formats import DOCUMENTS, FORMATS
from .std_streams import Streams
from .styles import WHEN


def _rank(text: str) -> int | str:
    return text if text == "auto" else int(text)


#: Parsers for values other than text.
_TYPES: dict[str, Callable[[str], Any]] = {
    "rank": _rank,
    "timeout": float,
    "threads": int,
    "expect_loss": float,
    "tolerance": float,
}


def add_options(group: argparse._ActionsContainer, *kinds: type, only: Collection[str] | None = None) -> None:
    """Add the options of the given types, as the table defines them; ``only`` selects some."""
    for option in (option for kind in kinds for option in table(kind).values()):
        if option.is_on_command_line and (only is None or option.name in only):
            group.add_argument(option.flag, help=option.help, **_how(option))


def _how(option: Option) -> dict[str, Any]:
    """Return argparse's keyword arguments for an option."""
    if option.kind in ("words", "patterns"):
        return {"action": "append", "default": [], "metavar": option.metavar}
    if option.kind == "choice":
        return {"choices": option.choices, "default": option.default}
    if option.default is False:
        return {"action": "store_true"}
    if option.kind == "switch" and option.choices:
        return {"choices": option.choices, "default": option.choices[not option.default]}
    if option.kind == "switch":
        # It can be turned off, and where the default is None the source decides.
        return {"action": argparse.BooleanOptionalAction, "default": option.default}
    number = int if option.kind in ("degree", "number", "size") else None
    return {"type": _TYPES.get(option.name, number), "default": option.default, "metavar": option.metavar}


def add_common(parser: argparse.ArgumentParser, *, run: bool = True, reads: bool = True) -> None:
    """Add the options of every run.

    Without ``run``, the command only reads headers; without ``reads``, it reads no checkpoint.
    """
    group = parser.add_argument_group("common")
    add_format(group)
    group.add_argument(
        "--color", choices=WHEN, default="auto", help="color the terminal output (default: auto)"
    )
    group.add_argument("-q", "--quiet", action="count", default=0, help="print errors only")
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="show notes and per-tensor detail; -vv also logs each step",
    )
    add_options(group, Threads)
    if run:
        group.add_argument(
            "--progress", choices=("auto", "plain", "none"), help="show progress on stderr (default: auto)"
        )
    if reads:
        add_options(group, Memory)


def add_format(parser: argparse._ActionsContainer, formats: tuple[str, ...] = FORMATS) -> None:
    """Add the options for the output format."""
    parser.add_argument(
        "--output-format",
        choices=formats,
        default="text",
        help="text (default), one JSON object, GitHub annotations, a SARIF log, or JUnit XML. The last "
        "three list only findings",
    )
    parser.add_argument(
        "--summary", metavar="FILE", help="append a Markdown summary to this file, e.g. $GITHUB_STEP_SUMMARY"
    )
    parser.add_argument(
        "--json",
        action="store_const",
        const="json",
        dest="output_format",
        help="same as --output-format json",
    )


def add_source(parser: argparse.ArgumentParser, *, like: bool = False) -> None:
    """Add the checkpoint and the options for reading it; ``like`` is for verbs that check it."""
    parser.add_argument(
        "ckpt",
        nargs="+",
        metavar="CKPT",
        help="checkpoint directory or file; pass several if each node saved its part on a local disk",
    )
    add_opening(parser, like=like)


def add_opening(parser: argparse.ArgumentParser, *, like: bool = False) -> None:
    """Add the options for reading checkpoints: :func:`opening`."""
    group = parser.add_argument_group("source")
    add_options(group, Source, Vocabulary, *([Against] if like else []))
    add_gate(parser)


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Add the options that select which findings are errors: :func:`gating`."""
    group = parser.add_argument_group("verdict")
    add_options(group, Gating)
    group.add_argument(
        "--no-settings",
        action="store_true",
        help="ignore the settings for these options in fastshard.toml and in [tool.fastshard] of "
        "pyproject.toml",
    )


def add_exit_zero(parser: argparse.ArgumentParser) -> None:
    """Add ``--exit-zero`` for commands that write nothing, in the group from :func:`add_gate`."""
    group = next(g for g in parser._action_groups if g.title == "verdict")
    group.add_argument(
        "--exit-zero",
        action="store_true",
        help="exit with 0 instead of 1 or 3, e.g. to look at a broken checkpoint",
    )


def looks(a: argparse.Namespace, writing: str) -> None:
    """Refuse ``--exit-zero`` together with an option that makes a verb write.

    Raises:
        FastshardError: ``FS515``; otherwise a script would continue without a result.
    """
    if a.exit_zero:
        raise FastshardError.of(
            codes.USAGE,
            f"--exit-zero cannot be combined with {writing}",
            help="leave out one of these options",
        )


def given(a: argparse.Namespace, *kinds: type) -> dict[str, Any]:
    """Return the options of the given types, in the form of the library."""
    options = [option for kind in kinds for option in table(kind).values() if option.is_on_command_line]
    return {option.name: _read(a, option) for option in options}


def _read(a: argparse.Namespace, option: Option) -> Any:
    """Read the value of an option; words for True and False become booleans."""
    value = getattr(a, option.name)
    return value == option.choices[0] if option.kind == "switch" and option.choices else value


def gating(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options that decide how findings count."""
    return given(a, Gating)


def add_shaping(parser: argparse.ArgumentParser) -> None:
    """Add the options that control how tensors are converted: :func:`shape`."""
    add_options(parser.add_argument_group("result"), ValueOptions, Sharding)


def add_choosing(parser: argparse._ActionsContainer) -> None:
    """Add the options that select tensors."""
    add_options(parser, Choosing)


def add_stats(parser: argparse._ActionsContainer) -> None:
    """Add ``--stats`` for commands that write a manifest."""
    add_options(parser, Requested, only=("stats",))


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Add the options that control how OUT is written: :func:`writing`."""
    add_options(parser.add_argument_group("writing"), Checked, Requested, Comparing)


def writing(a: argparse.Namespace) -> dict[str, Any]:
    """Read the options that control how OUT is written, and the memory limit."""
    return given(a, Checked, Memory, Requested, Comparing)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options for the rank among several processes: :func:`ranked`."""
    add_options(parser.add_argument_group("several processes, on one host or many"), Ranked)


def add_node_local(parser: argparse.ArgumentParser) -> None:
    """Add the option for checkpoints that are distributed over the ranks' own disks."""
    add_options(parser, Lending)


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the options of a Ray cluster: :func:`spread`."""
    group = parser.add_argument_group("a Ray cluster")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="write the result in parts, one on each node of a Ray cluster: auto, HOST:PORT, or local for a "
        "separate Ray instance on this host (needs the package ray)",
    )


def spread(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run on a cluster.

    Raises:
        FastshardError: ``FS515`` for options of one process among several.
    """
    given = [f"--{name}" for name, value in ranked(a).items() if value is not None]
    if given:
        raise FastshardError.of(
            codes.USAGE,
            f"--ray cannot be combined with {', '.join(given)}",
            help="leave out --ray or these options; with --ray, start one process: Ray starts the others",
        )
    # All cores of a node are its own affair.
    return {"address": a.ray, "threads": None if a.threads is None else thread_count(a.threads)}


def ranked(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options of one process among several.

    If a launcher provides the rank, the function prints it on stderr.
    """
    if a.rank == "auto" and not (a.quiet or a.output_format != "text"):
        from ..conversion.distributed.launcher_env import detect

        found = detect(a.world)
        Streams().say(f"rank {found.rank} of {found.world} ({found.origin})")
    return given(a, Ranked)


def add_tokenizer(parser: argparse._ActionsContainer) -> None:
    """Add ``--tokenizer`` for commands that write a model."""
    add_options(parser, Checked, only=("tokenizer",))


def add_target(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add ``--to`` and the options of targets: :func:`placing`."""
    parser.add_argument(
        "--to",
        required=required,
        metavar="TARGET",
        help=", ".join(TARGETS),
    )
    add_options(parser, Placing)


def opening(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options for opening a checkpoint, which all commands that read one have."""
    like = {"like": a.like} if "like" in a else {}
    return {**given(a, Opening), "threads": thread_count(a.threads), **like}


def opened(a: argparse.Namespace) -> Checkpoint:
    """Open the checkpoint by reading its headers."""
    return open_checkpoint(*a.ckpt, **opening(a))


def progress(a: argparse.Namespace) -> str | bool:
    """Return how to show the progress of a run; False to show none."""
    if a.quiet or (a.output_format in DOCUMENTS and a.progress == "auto"):
        return False
    # The document has all findings.
    return "figures" if a.output_format == "json" and a.progress == "plain" else a.progress


def shape(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a result that are independent of its names."""
    return given(a, ValueOptions, Sharding)


def placing(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options of targets."""
    return given(a, Placing)
