"""The check that each token of a tokenizer has a row in the vocabulary that is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..common import codes
from ..common.errors import Finding
from ..common.regex import compile_when_used
from ..layouts.declaration import Source
from .tensor_words import WORDS
from .tokenizer import Tokenizer

__all__ = ["find_ids_beyond_embedding", "padding", "words"]

#: The weight of a token embedding outside all layers, and its module.
_EMBEDDING = compile_when_used(
    rf"((?:[^.\d][^.]*\.)*(?:{'|'.join(WORDS['embedding_modules'])}|embeddings?|token_embedding))"
    # source: transformers models/idefics (IdeficsDecoupledEmbedding)
    r"(?:\.additional_embedding)?\.weight"
)


def words(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Check that each token of the tokenizer has a row."""
    rows = axes.get("P", axes.get("V"))
    if tokenizer is None or rows is None:
        return []
    kept = min(rows, axes.get("V", rows))
    unproven = _unproven_words(tokenizer, kept, rows)
    if tokenizer.largest is None:
        return unproven
    words = tokenizer.largest + 1
    if kept < min(rows, words):
        beyond = f", more than the {rows} stored rows" if words > rows else ""
        return [
            Finding.of(
                codes.BAD_VALUE,
                f"the vocabulary is cut to {kept} rows, but the tokenizer's ids go up to "
                f"{tokenizer.largest}{beyond}",
                file=tokenizer.path,
                expected=f"all {rows} rows stored" if beyond else f"{words} of {rows} rows stored",
                got=str(kept),
                help=f"keep {'every row' if beyond else 'them'}, or pass the tokenizer that belongs to the "
                "model with --tokenizer",
                run=[f"--vocab-size {min(words, rows)}"],
            )
        ]
    return _find_ids_beyond(rows, tokenizer) or unproven


def find_ids_beyond_embedding(
    shapes: Mapping[str, Sequence[int]], tokenizer: Tokenizer | None
) -> list[Finding]:
    """Find ids of a tokenizer that have no row in the input embedding, which is identified by name.

    Args:
        shapes: shapes of the full tensors, by name.
        tokenizer: the tokenizer that was given, or found next to the model.
    """
    if tokenizer is None or tokenizer.largest is None:
        return []
    # Rows of words that were added may lie in a second tensor of the module.
    modules: Counter[str] = Counter()
    for name, shape in shapes.items():
        if (found := _EMBEDDING.fullmatch(name)) is not None and len(shape) == 2:
            modules[found[1]] += shape[0]
    return _find_ids_beyond(max(modules.values()), tokenizer) if modules else []


def _find_ids_beyond(rows: int, tokenizer: Tokenizer) -> list[Finding]:
    """Report that a tokenizer's largest id has no row."""
    if tokenizer.largest is None or tokenizer.largest < rows:
        return []
    return [
        Finding.of(
            codes.CONFIG_DISAGREES,
            f"the tokenizer's ids go up to {tokenizer.largest}, but the vocabulary has {rows} rows",
            severity="warning",
            file=tokenizer.path,
            expected=f"at most {rows - 1}",
            got=str(tokenizer.largest),
            help="pass the tokenizer of this model: higher ids have no row",
            run=["--tokenizer DIR"],
        )
    ]


def _unproven_words(tokenizer: Tokenizer, kept: int, rows: int) -> list[Finding]:
    """Report dropped rows for which no file shows their tokens."""
    file = tokenizer.unread or tokenizer.partial
    if file is None or kept >= rows:
        return []
    why = "cannot be read from this file" if tokenizer.unread else "has special tokens that no file lists"
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            f"the tokenizer's vocabulary {why}: {rows - kept} of {rows} rows are dropped, and a token may "
            "use one of them",
            severity="warning",
            file=str(file),
            help="pass the model's tokenizer, including tokenizer_config.json",
            run=["--tokenizer DIR"],
        )
    ]


def padding(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Report that padding may be counted as tokens, because the true vocabulary size is not stated."""
    if "P" not in axes or source.binding.vocab_size is not None or "V" in source.binding.axes:
        return []
    known = tokenizer is not None and tokenizer.unread is None and tokenizer.partial is None
    if tokenizer is not None and known and tokenizer.largest is not None and tokenizer.largest < axes["P"]:
        number = f"--vocab-size {tokenizer.largest + 1}, by {tokenizer.path}"
    else:
        number = "the tokenizer's size with --vocab-size"
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            f"the true size of the vocabulary is not stated: all {axes['P']} rows are kept, including any "
            "padding",
            help=f"pass {number}",
        )
    ]
