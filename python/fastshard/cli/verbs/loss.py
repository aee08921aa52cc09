"""``fastshard loss``: the loss of a checkpoint's model on a text, from its shards."""

from __future__ import annotations

import argparse
from typing import Any

from ...common.formatting import human_memory
from ...common.options import Checked, Evaluating, ValueOptions
from ...evaluation.loss_figures import Loss, describe_loss
from ...verification.loss import loss
from ..render import fields
from ..shared_arguments import add_common, add_exit_zero, add_options, add_source, given, opening, progress
from ..verb import Outcome, Result, Verb

#: Options of a conversion that determine the values for the computation.
_VALUES = ("dtype", "replicas", "weights")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_options(parser.add_argument_group("text"), Evaluating)
    add_values(parser)
    add_common(parser)
    add_exit_zero(parser)


def add_values(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine the values with which a model computes: :func:`choose_values`."""
    group = parser.add_argument_group("values")
    add_options(group, ValueOptions, only=_VALUES)
    add_options(group, Checked, only=("tokenizer",))


def choose_values(a: argparse.Namespace) -> dict[str, Any]:
    """Return the options for opening a checkpoint whose model runs."""
    return {**opening(a), "tokenizer": a.tokenizer, **{name: getattr(a, name) for name in _VALUES}}


def _run(a: argparse.Namespace) -> Outcome:
    measured = loss(
        *a.ckpt, **given(a, Evaluating), memory=a.memory, progress=progress(a), **choose_values(a)
    )
    figures = measured.to_dict()
    return Result(
        _describe(measured), figures, unchecked=measured.not_checked, reason=describe_loss(figures)
    ), list(measured.findings)


def _describe(measured: Loss) -> str:
    expected = "none was given (--expect-loss)"
    if measured.expected is not None:
        expected = f"{measured.expected:.4f} +- {measured.tolerance:g}"
    rows = [
        ("loss", f"{measured.loss:.4f} +- {measured.standard_error:.4f} (standard error), in nats per token"),
        ("perplexity", f"{measured.perplexity:.4g}"),
        ("expected", expected),
        ("untrained", f"{measured.untrained:.4f}, the logarithm of the vocabulary"),
        ("frequencies", f"{measured.by_frequency:.4f}, from how often each token occurs in this text"),
        ("text", f"{measured.text}: {measured.tokens} tokens, {measured.sequences} sequences"),
        ("computed by", f"{measured.model_class} of transformers {measured.transformers}, {measured.dtype}"),
        ("memory", f"about {human_memory(measured.memory)}, with one layer at a time"),
    ]
    return fields(rows)


LOSS = Verb(
    name="loss",
    help="compute the loss of the model on a text, from its shards",
    description="""\
        Computes the loss of a causal language model on a text, from any format that converts to Hugging
        Face. The converted model is not written, and one decoder layer is in memory at a time. A class of
        transformers computes the outputs. A loss like that of an untrained model is an error (FS318). Pass
        the loss that the trainer computed on the same tokens with --expect-loss: a different loss is an
        error (FS319). A plausible loss alone proves nothing: damage to one layer may change it by less
        than its standard error.""",
    arguments=_arguments,
    run=_run,
    often=("--text", "--tokens", "--expect-loss", "--tolerance", "--device", "--memory", "--json"),
    tells_unchecked=True,
    examples=(
        "fastshard loss run --tokens tokens.json --exit-zero",
        "fastshard loss run --tokens tokens.json --expect-loss 6.25",
    ),
)
