"""Whether each word of a tokenizer has its row in the vocabulary that is written."""

from __future__ import annotations

from ..common.errors import Finding
from ..layouts.declaration import Source
from .tokenizer import Tokenizer

__all__ = ["padding", "words"]


def words(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Whether each word of the tokenizer has its row."""
    rows = axes.get("P", axes.get("V"))
    if tokenizer is None or rows is None:
        return []
    kept = min(rows, axes.get("V", rows))
    unproven = _unproven_words(tokenizer, kept, rows)
    if tokenizer.largest is None:
        return unproven
    words = tokenizer.largest + 1
    if kept < min(rows, words):
        beyond = f", more than the {rows} rows that are stored" if words > rows else ""
        return [
            Finding.of(
                "FS211",
                f"the vocabulary is cut to {kept} rows, and the tokenizer's ids go up to {tokenizer.largest}{beyond}",
                file=tokenizer.path,
                expected=f"all {rows} rows stored" if beyond else f"{words} of {rows} rows stored",
                got=str(kept),
                help=f"keep {'every row' if beyond else 'them'}, or pass the tokenizer that belongs to the model with --tokenizer",
                run=[f"--vocab-size {min(words, rows)}"],
            )
        ]
    if rows < words:
        return [
            Finding.of(
                "FS215",
                f"the tokenizer's ids go up to {tokenizer.largest}, and the vocabulary has {rows} rows",
                severity="warning",
                file=tokenizer.path,
                expected=f"{rows - 1} at most",
                got=str(tokenizer.largest),
                help="pass the tokenizer of this model: tokens beyond have no row",
                run=["--tokenizer DIR"],
            )
        ]
    return unproven


def _unproven_words(tokenizer: Tokenizer, kept: int, rows: int) -> list[Finding]:
    """Rows that are dropped though nothing that was read tells whose they are."""
    file = tokenizer.unread or tokenizer.partial
    if file is None or kept >= rows:
        return []
    why = "cannot be read from this file" if tokenizer.unread else "has special tokens that no file lists"
    return [
        Finding.of(
            "FS109",
            f"the tokenizer's vocabulary {why}: "
            f"{rows - kept} of {rows} rows are dropped without proof that no token has one of them",
            severity="warning",
            file=str(file),
            help="pass the tokenizer that belongs to the model, tokenizer_config.json included",
            run=["--tokenizer DIR"],
        )
    ]


def padding(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Padding of a vocabulary whose true size nothing states is taken for words."""
    if "P" not in axes or source.vocab_size is not None or "V" in source.axes:
        return []
    known = tokenizer is not None and tokenizer.unread is None and tokenizer.partial is None
    if tokenizer is not None and known and tokenizer.largest is not None and tokenizer.largest < axes["P"]:
        number = f"--vocab-size {tokenizer.largest + 1}, by {tokenizer.path}"
    else:
        number = "the tokenizer's size with --vocab-size"
    return [
        Finding.of(
            "FS109",
            f"the true size of the vocabulary is not stated: all {axes['P']} rows are kept, padding too if there is any",
            help=f"pass {number}",
        )
    ]
