"""What a finding's record says, as short texts: its files, and the tensors that cannot be used because of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import Finding
from .formatting import some

__all__ = ["effect_of", "files_of", "runs_of"]

#: Names that are listed.
_NAMED = 3
#: Codes of what is missing; other causes make tensors unusable that are there.
_ABSENT = ("FS101", "FS102", "FS103", "FS104", "FS111")
_NUMBER = re.compile(r"(\d+)")


def effect_of(finding: Finding) -> str | None:
    """Which tensors cannot be used because of a finding; None where it says of none.

    E.g. ``26 of 40 tensors are missing or incomplete: 24 in layers 2-4, 0.word_embeddings.weight``.
    """
    effect = finding.effect
    if effect is None:
        return None
    of = "" if effect.of is None else f" of {effect.of:,}"
    many = effect.count != 1 or effect.of is not None
    be = "is" if effect.count == 1 else "are"
    are = f"{be} missing or incomplete" if finding.code in _ABSENT else "cannot be used"
    apart = effect.count - effect.in_layers
    parts = [_some(effect.tensors[:apart], apart)] if apart else []
    if effect.layers:
        count = f"{effect.in_layers:,} in " if apart else "in "
        parts.insert(
            0, f"{count}layer{'' if sum(map(len, effect.layers)) == 1 else 's'} {runs_of(effect.layers)}"
        )
    return f"{effect.count:,}{of} tensor{'s' if many else ''} {are}: {', '.join(parts)}"


def _some(names: Sequence[str], count: int) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def runs_of(runs: Sequence[range]) -> str:
    """Ranges of numbers, for people.

    >>> runs_of([range(0, 3), range(5, 6), range(7, 9)])
    '0-2, 5, 7, 8'
    """
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def files_of(files: Sequence[str]) -> str:
    """Names of files in one text: numbers in which all of them differ in braces.

    >>> files_of(["layer_00-model_01.pt", "layer_02-model_01.pt"])
    'layer_{00,02}-model_01.pt'
    """
    split = [_NUMBER.split(file) for file in files]
    if len({tuple(parts[::2]) for parts in split}) == 1:
        differ = [i for i, held in enumerate(zip(*split, strict=True)) if len(set(held)) > 1]
        if len(differ) == 1:
            (at,) = differ
            first = split[0]
            numbers = sorted({parts[at] for parts in split}, key=int)
            return "".join((*first[:at], "{", ",".join(numbers), "}", *first[at + 1 :]))
    return some(files, _NAMED)
