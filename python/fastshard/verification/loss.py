"""``fastshard.loss``: the loss of a checkpoint's model on a text, from its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common import memory_budget
from ..common.options import StrPath
from ..common.progress import Report
from ..conversion.load_model import open_view
from ..evaluation.loss_figures import LENGTH, MOST, Loss, measure_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..checkpoint.checkpoint import Checkpoint
    from ..common.options import Loading
    from ..conversion.in_memory import View

__all__ = ["loss"]


@memory_budget.kept
def loss(
    *paths: StrPath | Checkpoint | View,
    text: StrPath | None = None,
    tokens: Any = None,
    expect_loss: float | None = None,
    tolerance: float | None = None,
    sequence_length: int = LENGTH,
    max_tokens: int = MOST,
    device: str = "cpu",
    memory: str | int | None = None,
    progress: Report = False,
    **options: Unpack[Loading],
) -> Loss:
    """Computes the loss of a causal language model from the shards of its checkpoint, and writes nothing.

    One decoder layer is in memory at a time, so that even a model that does not fit into memory runs. Each
    weight is read once. A transformers class computes the logits, which equal those of the converted model.

    Args:
        paths: as for :func:`fastshard.open`; or a view from ``fastshard.open(..., to="hf")``.
        text: a text file in UTF-8; default: a page of text in the package. The checkpoint's tokenizer
            tokenizes it.
        tokens: token ids instead of a text: a .json, .npy or .safetensors file, a sequence, an array or a
            tensor, of one dimension or of two (sequences, length).
        expect_loss: the loss that the trainer computed on the same tokens.
        tolerance: maximum difference between the loss and ``expect_loss``; default 0.02.
        sequence_length: maximum number of tokens in a sequence.
        max_tokens: maximum total number of tokens; all are computed in one batch.
        device: the device that computes, e.g. ``cuda``.
        memory: memory limit of the process; a run that needs more is refused before it starts.
        progress: progress of the weights, as for :func:`fastshard.convert`.
        options: as for :func:`fastshard.open` with a target.

    Returns:
        The loss. Its findings have an error (``FS318``) if the loss is that of an untrained model or is NaN,
        and (``FS319``) if it differs from ``expect_loss``.

    Raises:
        FastshardError: as :func:`fastshard.open`; ``FS514`` for a model that is not a causal language model
            of the installed transformers; ``FS209`` without a tokenizer; ``FS512`` if the memory limit is too
            small.
        ImportError: without transformers and torch.

    Examples:
        >>> loss = fastshard.loss("model", tokens=[1, 2, 3, 4])  # an untrained model
        >>> round(loss.loss, 2), round(loss.untrained, 2), loss.ok
        (6.31, 6.21, False)
    """
    return measure_loss(
        open_view(paths, options),
        text,
        tokens,
        expect_loss=expect_loss,
        tolerance=tolerance,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
        device=device,
        progress=progress,
    )
