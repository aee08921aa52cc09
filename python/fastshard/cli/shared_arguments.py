"""Arguments that verbs share: groups for their parsers, and what the library is called with for them."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint import open as open_checkpoint
from ..checkpoint.planning import thread_count
from ..common.errors import FastshardError
from ..common.gate import FAIL_ON
from ..common.target_options import OPTIONS
from ..conversion.distributed.launcher_env import detect
from ..sources.base import ACCEPTABLE
from ..targets.registry import TARGETS
from .output_formats import DOCUMENTS, FORMATS
from .std_streams import Streams


def add_common(parser: argparse.ArgumentParser, *, run: bool = True) -> None:
    """What every run takes; without ``run``, what reads headers only."""
    group = parser.add_argument_group("common")
    add_format(group)
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


def add_format(parser: argparse._ActionsContainer, formats: tuple[str, ...] = FORMATS) -> None:
    """How it is told what a run came to."""
    parser.add_argument(
        "--output-format",
        choices=formats,
        default="text",
        help="text (default); one JSON object; GitHub annotations; a SARIF log; JUnit XML. The last three tell findings",
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output_format", help="--output-format json"
    )


def add_source(parser: argparse.ArgumentParser, *, like: bool = False) -> None:
    """A checkpoint, and how it is read; with ``like``, for verbs that judge it."""
    parser.add_argument(
        "ckpt",
        nargs="+",
        metavar="CKPT",
        help="checkpoint directory or file; several are node-local parts of one",
    )
    add_opening(parser, like=like)


def add_opening(parser: argparse.ArgumentParser, *, like: bool = False) -> None:
    """How what is at the paths is read: :func:`opening`."""
    group = parser.add_argument_group("source")
    group.add_argument(
        "--step",
        metavar="N",
        help="step to take, by name or number (default: the tracker file's, else the newest)",
    )
    group.add_argument(
        "--under",
        metavar="NAME",
        help="the model that lies below this name in the files, where a trainer saved several (model, ema, state_dict)",
    )
    group.add_argument("--config", metavar="FILE", help="config.json, GPT-NeoX YAML: overrides what is found")
    group.add_argument("--layout", metavar="FILE", help="a layout table (TOML) of your own for the source")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="true vocabulary; rows beyond it are dropped"
    )
    group.add_argument(
        "--adapter",
        metavar="DIR",
        help="a LoRA adapter of PEFT to be merged into the weights: its folder, or its adapter_config.json where CKPT holds it",
    )
    group.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="WHAT",
        help="accept what is not in order: a save that was not committed; absent chunks (FS106) as zeros; an older step "
        "where the newest cannot be used (FS104); files that were renamed on purpose (FS113); NaN and infinite values (FS306); files, or those "
        "that copies=GLOB names, that were copied on purpose (FS303). WHAT: " + ", ".join(ACCEPTABLE),
    )
    group.add_argument(
        "--expect-processes",
        type=int,
        metavar="N",
        help="processes that wrote the checkpoint, where its files do not tell (Orbax)",
    )
    if like:
        group.add_argument(
            "--like",
            metavar="DIR|FILE",
            help="a good checkpoint of the same model: names, shapes and dtypes must be its own. A directory, a file of tensors, an index or "
            "a config.json; by headers alone",
        )
    add_gate(parser)


def add_gate(parser: argparse.ArgumentParser) -> None:
    """What counts as an error: :func:`gating`."""
    group = parser.add_argument_group("verdict")
    group.add_argument(
        "--fail-on", choices=FAIL_ON, help="warning: each warning counts as an error (exit code 1)"
    )
    group.add_argument(
        "--error",
        action="append",
        default=[],
        metavar="CODE",
        help="warnings and notes of this code count as errors (exit code 1)",
    )
    group.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="CODE",
        help="warnings and notes of this code are not shown; --json and manifests have them. An error is not ignored: see --accept",
    )


def add_exit_zero(parser: argparse.ArgumentParser) -> None:
    """``--exit-zero`` of what looks and writes nothing; it goes into the group that :func:`add_gate` has made."""
    group = next(g for g in parser._action_groups if g.title == "verdict")
    group.add_argument(
        "--exit-zero",
        action="store_true",
        help="exit with 0 instead of 1 and 3: for looking at what is broken",
    )


def looks(a: argparse.Namespace, writing: str) -> None:
    """Refuses ``--exit-zero`` of a verb that writes when it is given an option.

    Raises:
        FastshardError: ``FS515``; a script would go on without a result.
    """
    if a.exit_zero:
        raise FastshardError.of("FS515", f"--exit-zero and {writing}", help="leave out one of the two")


def gating(a: argparse.Namespace) -> dict[str, Any]:
    """How findings are judged."""
    return {"fail_on": a.fail_on, "error": a.error, "ignore": a.ignore}


def add_shaping(parser: argparse.ArgumentParser) -> None:
    """What is made of the tensors: :func:`shape`."""
    group = parser.add_argument_group("result")
    group.add_argument("--dtype", choices=("keep", "bf16", "f16", "f32"), default="keep")
    group.add_argument(
        "--replicas",
        choices=("equal", "mean"),
        default="equal",
        help="copies of a replicated tensor that differ: refuse (default), or average in float32",
    )
    add_choosing(group)
    group.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="bytes of tensors in a file, at most (default: 5GB)",
    )
    group.add_argument(
        "--weights",
        choices=("params", "masters"),
        help="which copy of the weights, where fp32 masters are there too (default: params where stored; the two must agree)",
    )
    group.add_argument(
        "--optimizer",
        action="store_true",
        help="optimizer state too (merge; --to dcp, universal, maxtext, orbax)",
    )


def add_choosing(parser: argparse._ActionsContainer) -> None:
    """Which tensors."""
    parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="only these tensors")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="not these tensors")


def add_stats(parser: argparse._ActionsContainer) -> None:
    """``--stats`` of what writes a manifest."""
    parser.add_argument(
        "--stats",
        action="store_true",
        help="statistics of each tensor into the manifest (see `fastshard stats`)",
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """How OUT is written."""
    group = parser.add_argument_group("writing")
    group.add_argument("--expect", metavar="FILE", help="a manifest or config to check the source against")
    add_tokenizer(group)
    group.add_argument("--resume", action="store_true", help="continue an interrupted run of the same plan")
    group.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    group.add_argument("--fsync", choices=("full", "none"), default="full", help="durability (default: full)")
    group.add_argument("--sparse", action="store_true", help="leave holes in files where they hold zeros")
    add_stats(group)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Which of several processes this one is: :func:`ranked`."""
    group = parser.add_argument_group("several processes, on one host or many")
    group.add_argument(
        "--rank",
        type=_rank,
        metavar="I",
        help="this process's rank, from 0, or auto: as torchrun, srun, mpirun or Kubernetes say (default: one process)",
    )
    group.add_argument(
        "--world", type=int, metavar="N", help="how many ranks there are, where no launcher says so"
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long ranks wait for one another (default: 600)",
    )


def add_node_local(parser: argparse.ArgumentParser) -> None:
    """Whether each rank has a part of the checkpoint on its own disk."""
    parser.add_argument(
        "--node-local",
        action="store_true",
        help="with --rank or --ray: CKPT is what this host (each node) has of the checkpoint, on its own disk; what is made of several hosts' "
        "files goes by way of OUT's storage",
    )


def add_ray(parser: argparse.ArgumentParser) -> None:
    """On which cluster the work is done: :func:`spread`."""
    group = parser.add_argument_group("a Ray cluster")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="make the result in parts, one on each node of a Ray cluster: auto, HOST:PORT, or local for a Ray of its own "
        "on this host (pip install 'fastshard[ray]')",
    )


def spread(a: argparse.Namespace) -> dict[str, Any]:
    """Options of a run on a cluster.

    Raises:
        FastshardError: ``FS515`` for options of a process among several.
    """
    given = [f"--{name}" for name, value in ranked(a).items() if value is not None]
    if given:
        raise FastshardError.of(
            "FS515",
            f"--ray and {', '.join(given)}",
            help="with --ray one process is started, and Ray starts the others; without it each rank by itself",
        )
    # All cores of a node are its own affair.
    return {"address": a.ray, "threads": None if a.threads is None else thread_count(a.threads)}


def _rank(text: str) -> int | str:
    return text if text == "auto" else int(text)


def ranked(a: argparse.Namespace) -> dict[str, Any]:
    """Options of a process among several; where a launcher was asked, who it is is said on stderr."""
    if a.rank == "auto" and not (a.quiet or a.output_format != "text"):
        found = detect(a.world)
        Streams().say(f"rank {found.rank} of {found.world} ({found.told})")
    return {"rank": a.rank, "world": a.world, "timeout": a.timeout}


def add_tokenizer(parser: argparse._ActionsContainer) -> None:
    """``--tokenizer`` of what a model is written with."""
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="take tokenizer files from here: a folder, or a file of a vocabulary (default: what lies beside the source)",
    )


def add_target(parser: argparse.ArgumentParser, required: bool) -> None:
    """``--to`` and the options of targets: :func:`placing`."""
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


def opening(a: argparse.Namespace) -> dict[str, Any]:
    """Options of everything that reads a checkpoint."""
    return {
        "step": a.step, "under": a.under, "config": a.config, "layout": a.layout, "vocab_size": a.vocab_size, "adapter": a.adapter, "accept": a.accept,
        "expect_processes": a.expect_processes, "threads": thread_count(a.threads), **gating(a),
    } | ({"like": a.like} if "like" in a else {})  # fmt: skip


def opened(a: argparse.Namespace) -> Checkpoint:
    """The checkpoint, by its headers."""
    return open_checkpoint(*a.ckpt, **opening(a))


def progress(a: argparse.Namespace) -> str | bool:
    """How far a run is, told or not."""
    return False if a.quiet or (a.output_format in DOCUMENTS and a.progress == "auto") else a.progress


def shape(a: argparse.Namespace) -> dict[str, Any]:
    """Options of a result under any names."""
    return {
        "dtype": a.dtype, "replicas": a.replicas, "include": a.include, "exclude": a.exclude,
        "max_shard_size": a.max_shard_size, "weights": a.weights, "optimizer": a.optimizer,
    }  # fmt: skip


def placing(a: argparse.Namespace) -> dict[str, Any]:
    """Options that targets take."""
    return {option.name: getattr(a, option.name) for option in OPTIONS}
