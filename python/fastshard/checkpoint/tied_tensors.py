"""Tensors that a model's class ties, where the checkpoint stores more than one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..common.errors import Finding
from ..expected.comparison import HEAD, stated
from ..expected.expected_list import ExpectedTensors
from .drafting import Merged, Opened
from .reference_sides import Values

__all__ = ["find_differing_ties"]


def find_differing_ties(
    called: str,
    listed: ExpectedTensors,
    config: Mapping[str, Any],
    opened: Opened,
    merged: Merged,
    names: Collection[str],
) -> list[Finding]:
    """Finds tied tensors of which two are stored with other values: a loader that ties them ignores one.

    Args:
        called: the class, in words.
        listed: what the config promises; its ties are those of the class under this config.
        config: content of config.json.
        opened: the checkpoint.
        merged: its draft.
        names: of the tensors that it stores.
    """
    values = None
    findings = []
    for group in listed.ties:
        spelled = dict.fromkeys(name for one in group for name in (one, *listed.mapping.get(one, ())))
        stored = sorted((name for name in spelled if name in names), key=lambda name: bool(HEAD.search(name)))
        for other in stored[1:]:
            values = values or Values(opened.catalog, merged.asked)
            if values.same(stored[0], other, True):
                continue
            is_stated = stated(config, "tie_word_embeddings") is True
            findings.append(
                Finding.of(
                    "FS311",
                    f"{called} ties {other} to {stored[0]}, and the stored tensors differ: a loader ignores {other}",
                    severity="error" if is_stated else "warning",
                    tensor=other,
                    expected=f"the values of {stored[0]}, as tie_word_embeddings {'true' if is_stated else 'by default'} says",
                    got="other values",
                    help="set tie_word_embeddings to false in config.json if the model was trained with both, or restore the right tensor",
                )
            )
    return findings
