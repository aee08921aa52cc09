"""``fastshard layers``: where two models begin to differ, by the outputs of their layers."""

from __future__ import annotations

import argparse
import shlex

from ...common.options import Evaluating
from ...verification.layers import LENGTH, MOST, LayerComparison, layers
from ..render import table
from ..shared_arguments import add_common, add_exit_zero, add_opening, add_options, progress
from ..verb import Outcome, Result, Verb
from .loss import add_values, choose_values

#: Options of the text.
_TEXT = ("text", "tokens", "device")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="the reference model: a checkpoint, or a file that a trainer recorded"
    )
    parser.add_argument("b", metavar="B", help="another checkpoint")
    group = parser.add_argument_group("text")
    add_options(group, Evaluating, only=_TEXT)
    for flag, default, what in (
        ("--sequence-length", LENGTH, "maximum number of tokens in a sequence"),
        (
            "--max-tokens",
            MOST,
            "maximum number of tokens in total; the outputs of all layers for them stay in memory",
        ),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="Y",
        help="relative difference up to which outputs count as equal (default: 0 for models of one class "
        "and dtype, else depends on the dtype)",
    )
    add_opening(parser)
    add_values(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    compared = layers(
        a.a,
        a.b,
        **{name: getattr(a, name) for name in _TEXT},
        tolerance=a.tolerance,
        sequence_length=a.sequence_length,
        max_tokens=a.max_tokens,
        memory=a.memory,
        progress=progress(a),
        **choose_values(a),
    )
    return Result(
        _describe(compared),
        compared.to_dict(),
        reason=_conclude(compared),
        unchecked=compared.not_checked,
        word="DIFFERENT" if compared.differing else "EQUAL",
    ), list(compared.findings)


def _conclude(compared: LayerComparison) -> str:
    """State in one line how many units are equal."""
    equal = sum(not unit.differs for unit in compared.units)
    how = "bit for bit" if compared.tolerance == 0 else f"within {compared.tolerance:g}"
    return f"{equal} of {len(compared.units)} units compute the same {how}, on {compared.tokens} tokens"


def _describe(compared: LayerComparison) -> str:
    rows = [("UNIT", "REL DIFF", "LARGEST TOKEN", "")]
    rows += [
        (u.name, f"{u.relative:.3g}", f"{u.largest:.3g}", "differs" if u.differs else "")
        for u in compared.units
    ]
    lines = [table(rows, indent="")]
    if not compared.is_record:
        # It is cheaper, and names the tensor.
        lines.insert(0, f"tensors: fastshard diff {shlex.quote(compared.a)} {shlex.quote(compared.b)}\n")
    if compared.config:
        lines.append("\nsettings of the configs that differ:")
        lines += [
            f"  {key}: {mine!r} in A, {theirs!r} in B" for key, (mine, theirs) in compared.config.items()
        ]
    return "\n".join(lines)


LAYERS = Verb(
    name="layers",
    help="compare what each layer of two models computes",
    description="""\
        Compares what each layer of two models computes, from the shards of their checkpoints. Each layer
        of B gets the input of the same layer of A, so only the damaged layers differ. REL DIFF is the norm
        of the difference over the norm of A's output, over all tokens. Config settings that differ are
        listed, because no tensor shows them. A may be a file that a trainer wrote with
        fastshard.integrations.record: B is then compared with what the trainer computed. If you have both
        checkpoints, `fastshard diff A B` is cheaper and names the tensor.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    finds=True,
    tells_unchecked=True,
    often=("--text", "--tokens", "--tolerance", "--dtype", "--device", "--memory", "--json"),
    examples=("fastshard layers run model --tokens tokens.json",),
)
