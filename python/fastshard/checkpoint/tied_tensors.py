"""Tensors that a model's class ties, but of which the checkpoint stores several copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.regex import compile_when_used
from ..expected.comparison import HEAD, read_setting
from ..expected.expected_list import ExpectedTensors
from ..models.tensor_words import WORDS
from .drafting import Merged, Opened
from .reference_sides import Values

__all__ = ["find_differing_head", "find_differing_ties"]

#: Names of input embeddings and output layers over the same vocabulary, outside all layers.
_EMBEDDING = compile_when_used(rf"(?:[^.\d][^.]*\.)*(?:{'|'.join(WORDS['embedding_modules'])})\.weight")
_HEAD = compile_when_used(
    r"(?:[^.\d][^.]*\.)*(?:lm_head|embed_out|output_projection|output_layer|output)\.weight"
)
_WIDE = ("F64", "F32", "F16", "BF16")


def find_differing_ties(
    called: str,
    listed: ExpectedTensors,
    config: Mapping[str, Any],
    opened: Opened,
    merged: Merged,
    names: Collection[str],
) -> list[Finding]:
    """Find tied tensors with different stored values; a loader that ties them ignores one.

    Args:
        called: the class, in words.
        listed: the tensors that the config promises; its ties are those of the class under this config.
        config: the content of config.json.
        opened: the checkpoint.
        merged: its draft.
        names: the names of the tensors that it stores.
    """
    values = None
    findings = []
    for group in listed.ties:
        spelled = dict.fromkeys(name for one in group for name in (one, *listed.mapping.get(one, ())))
        stored = sorted((name for name in spelled if name in names), key=lambda name: bool(HEAD.search(name)))
        for other in stored[1:]:
            values = values or Values(opened.catalog, merged.core_request)
            if values.same(stored[0], other, True):
                continue
            is_stated = read_setting(config, "tie_word_embeddings") is True
            findings.append(
                Finding.of(
                    codes.TIED_DIFFER,
                    f"{called} ties {other} to {stored[0]}, but the stored tensors differ: a loader ignores "
                    f"{other}",
                    severity="error" if is_stated else "warning",
                    tensor=other,
                    expected=f"the values of {stored[0]}, because tie_word_embeddings is "
                    f"{'true' if is_stated else 'true by default'}",
                    got="other values",
                    help="set tie_word_embeddings to false in config.json if the model was trained with "
                    "both; else restore the file with the correct tensor",
                )
            )
    return findings


def find_differing_head(opened: Opened, merged: Merged) -> list[Finding]:
    """Find an output layer that differs from the input embedding if no list names the tied tensors.

    It is an error if the config ties them, and a warning if the config does not mention it, because
    transformers ties them by default.

    Args:
        opened: a Hugging Face model that no table describes.
        merged: its draft.
    """
    config = opened.source.model.config
    is_tied = read_setting(config or {}, "tie_word_embeddings")
    if config is None or opened.source.model.is_part or is_tied not in (None, True):
        return []
    matrices = {
        name: (shape, dtype) for name, (dtype, _, _, shape, _) in merged.draft.tensors() if dtype in _WIDE
    }
    heads = [name for name in matrices if _HEAD.fullmatch(name)]
    # Of several heads nothing says which one is tied.
    if len(heads) != 1:
        return []
    embeddings = [
        name for name in matrices if _EMBEDDING.fullmatch(name) and matrices[name] == matrices[heads[0]]
    ]
    values = Values(opened.catalog, merged.core_request)
    if not embeddings or any(values.same(name, heads[0], True) for name in embeddings):
        return []
    head, embedding = heads[0], embeddings[0]
    if is_tied:
        message = (
            f"the config ties {head} to {embedding}, but the stored tensors differ: a loader ignores {head}"
        )
    else:
        message = (
            f"{head} differs from {embedding}, and the config does not state whether they are tied: loaders "
            f"that tie them by default ignore {head}"
        )
    return [
        Finding.of(
            codes.TIED_DIFFER,
            message,
            severity="error" if is_tied else "warning",
            tensor=head,
            expected=f"the values of {embedding}, as tie_word_embeddings true states"
            if is_tied
            else "tie_word_embeddings in config.json",
            got="other values" if is_tied else "no such key",
            help="set tie_word_embeddings to false in config.json if the model was trained with both; else "
            "restore the file with the correct tensor",
        )
    ]
