"""The loss of a model on a text, and reference values for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding
from ..common.log import log
from ..common.option_checks import check_finite
from ..common.options import StrPath
from ..common.progress import Progress, Report
from ..common.records import asdict, dataclass
from ..findings.proof import list_unchecked
from .layerwise_model import LayerwiseModel
from .token_batches import make_batch

if TYPE_CHECKING:
    import torch

    from ..checkpoint.planned_view import PlannedView
    from .token_batches import Batch

__all__ = ["LENGTH", "MOST", "Loss", "describe_loss", "measure_loss"]

#: Share of ``ln(vocabulary)`` above which a loss is that of an untrained model.
_UNTRAINED = 0.9
#: Allowed difference from the trainer's loss on the same tokens, because of bfloat16 and other kernels.
TOLERANCE = 0.02
#: Default maximum numbers of tokens: in a sequence, and in total.
LENGTH, MOST = 512, 2048


@dataclass(frozen=True)
class Loss:
    """The mean cross-entropy of a model on a text, in nats per token, and reference values for it.

    A plausible loss proves nothing by itself: damage to one layer may change it by less than its standard
    error.

    Examples:
        >>> loss = fastshard.loss("model", tokens=[1, 2, 3, 4])  # an untrained model
        >>> [finding.message for finding in loss.findings]
        ['the model predicts this text no better than an untrained model']
    """

    #: Mean over all predicted tokens; NaN if a logit is NaN.
    loss: float
    #: Standard error of the mean, which shows how much the loss on another text of this kind may differ.
    standard_error: float
    #: Number of predicted tokens.
    tokens: int
    #: Number of sequences, all of the same length.
    sequences: int
    #: Loss of an untrained model: the logarithm of the vocabulary size.
    untrained: float
    #: Loss of a model that knows only the frequency of each token in this text.
    by_frequency: float
    #: The expected loss, and the allowed difference; None if none was given.
    expected: float | None
    tolerance: float
    #: The class of transformers that computed it, the version of transformers, and the dtype.
    model_class: str
    transformers: str
    dtype: str
    #: Origin of the tokens.
    text: str
    #: Estimated peak of the process's anonymous memory, in bytes.
    memory: int
    #: Warnings and notes from opening the checkpoint, and errors about the loss.
    findings: tuple[Finding, ...]
    #: What this run did not check, a line each.
    not_checked: tuple[str, ...]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def ok(self) -> bool:
        """True if no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as plain data, without the findings."""
        figures = {k: v for k, v in asdict(self).items() if k not in ("findings", "not_checked")}
        # JSON has no NaN.
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in {**figures, "perplexity": self.perplexity}.items()
        }


def describe_loss(record: Mapping[str, Any]) -> str:
    """Describe a loss in one line, from the figures of :meth:`Loss.to_dict`, which a manifest contains."""
    if record["loss"] is None:
        return f"the loss is not a number, on {record['tokens']} tokens of {record['text']}"
    # One token has no standard error.
    error = "" if record["standard_error"] is None else f" +- {record['standard_error']:.4f}"
    return (
        f"loss {record['loss']:.4f}{error} over {record['tokens']} tokens of "
        f"{record['text']}, by {record['model_class']} of transformers {record['transformers']}"
    )


def measure_loss(
    view: PlannedView,
    text: StrPath | None = None,
    tokens: Any = None,
    *,
    expect_loss: float | None = None,
    tolerance: float | None = None,
    sequence_length: int = LENGTH,
    max_tokens: int = MOST,
    device: Any = "cpu",
    progress: Report = False,
) -> Loss:
    """Compute the loss of a view's model; see :func:`fastshard.loss`.

    Raises:
        FastshardError: as :func:`fastshard.loss`.
    """
    if sequence_length < 2 or max_tokens < 2:
        raise FastshardError.of(codes.USAGE, "a loss needs sequences of at least two tokens")
    check_finite("expect_loss", expect_loss)
    check_finite("tolerance", tolerance, least=0)
    if tolerance is not None and expect_loss is None:
        raise FastshardError.of(
            codes.USAGE, "a tolerance was passed without the expected loss", run=["--expect-loss X"]
        )
    model = LayerwiseModel(view, device)
    batch = make_batch(model, text, tokens, sequence_length, max_tokens)
    model.check_memory(memory_budget.get_limit(), batch.ids.numel())
    memory = model.estimate_memory(batch.ids.numel())
    log("evaluation", "about %d MiB of memory for %d tokens", memory >> 20, batch.ids.numel())
    try:
        losses = _run(model, batch, progress)
    finally:
        model.release()
    return _judge(model, batch, losses, memory, expect_loss, TOLERANCE if tolerance is None else tolerance)


def _run(model: LayerwiseModel, batch: Batch, progress: Report) -> torch.Tensor:
    """Run the model and return the loss of each predicted token, as float64."""
    import torch

    with Progress(progress) as bar:
        report, done = bar.phase("running"), 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if report is not None:
                report(done, model.nbytes)

        logits = model.run(batch.ids, on_load=count)
    # A row at a time: in float32 the logits of all would take twice their memory again.
    first = max(batch.prefix, 1)
    rows = [
        torch.nn.functional.cross_entropy(
            row[first - 1 : -1].float(), ids[first:].to(row.device), reduction="none"
        )
        for row, ids in zip(logits, batch.ids, strict=True)
    ]
    return torch.cat(rows).to("cpu", torch.float64)


def _judge(
    model: LayerwiseModel,
    batch: Batch,
    losses: torch.Tensor,
    memory: int,
    expected: float | None,
    tolerance: float,
) -> Loss:
    """Compare the loss with the expected loss, and with the loss of untrained models."""
    import transformers

    mean, count = float(losses.mean()), losses.numel()
    error = float(losses.std() / math.sqrt(count)) if count > 1 else math.inf
    untrained = math.log(model.vocab_size)
    by_frequency = _entropy(batch.ids[:, max(batch.prefix, 1) :].flatten().tolist())
    findings = _find(mean, untrained, by_frequency, expected, tolerance, batch)
    gate = model.view.checkpoint.opened.gate
    return Loss(
        loss=mean,
        standard_error=error,
        tokens=count,
        sequences=int(batch.ids.shape[0]),
        untrained=untrained,
        by_frequency=by_frequency,
        expected=expected,
        tolerance=tolerance,
        model_class=model.class_name,
        transformers=transformers.__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        text=batch.origin,
        memory=memory,
        findings=(*model.view.findings, *gate.evaluate(findings)),
        not_checked=(
            "whether the weights are right: damage to one layer may change the loss by less than its "
            "standard error",
            *(f"{line}; fastshard verify checks it" for line in model.view.unread),
            *list_unchecked(model.view.findings, with_advice=True),
        ),
    )


def _find(
    mean: float,
    untrained: float,
    by_frequency: float,
    expected: float | None,
    tolerance: float,
    batch: Batch,
) -> list[Finding]:
    """Find what is wrong with a loss; if an expected loss is given, it alone decides."""
    origin = batch.origin
    if not math.isfinite(mean):
        return [Finding.of(codes.UNTRAINED, "the loss is not a number", got=str(mean), file=origin)]
    if expected is not None:
        if abs(mean - expected) <= tolerance:
            return []
        return [
            Finding.of(
                codes.LOSS_DIFFERS,
                "the loss differs from the expected loss",
                expected=f"{expected:.4f} +- {tolerance:g}",
                got=f"{mean:.4f}",
                file=origin,
                help=f"{batch.left_out} tokens were left out (sequence_length, max_tokens, the model's "
                "positions): pass the loss of the remaining tokens, or raise the limits"
                if batch.left_out
                else None,
            )
        ]
    if mean >= _UNTRAINED * untrained:
        return [
            Finding.of(
                codes.UNTRAINED,
                "the model predicts this text no better than an untrained model",
                expected=f"less than {untrained:.2f}, the logarithm of the vocabulary",
                got=f"{mean:.4f}",
                file=origin,
            )
        ]
    if mean > by_frequency:
        return [
            Finding.of(
                codes.UNTRAINED,
                "the model predicts this text worse than the frequencies of its tokens do",
                severity="warning",
                expected=f"less than {by_frequency:.2f}",
                got=f"{mean:.4f}",
                file=origin,
            )
        ]
    return []


def _entropy(tokens: Iterable[int]) -> float:
    """Compute the entropy of a text's tokens by their frequencies, in nats per token."""
    counts = Counter(tokens)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values()) if total else 0.0
