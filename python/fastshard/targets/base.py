"""What a target prescribes: tensors, files, and what a framework looks for first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .._core import Table
from ..configs import shown
from ..declared import MAX_DEGREE
from ..errors import FastshardError, Finding
from ..tokenizer import Tokenizer

#: Multiple of a vocabulary at most.
MAX_MULTIPLE = 1 << 31


#: Files that a target prescribes, small texts besides (by path), and what had to be assumed.
Completed = tuple[list[dict[str, Any]], dict[str, str], list[Finding]]


@dataclass
class Bound:
    """What is known once a plan has bound the axes of a target."""

    #: Extents.
    axes: dict[str, int]
    #: Names of the target's tensors, and the shape that a rank holds of each.
    shapes: dict[str, list[int]]
    #: Names of the source's tensors.
    stored: list[str]
    #: Bytes that a rank holds of each.
    bytes: dict[str, int]
    #: Their dtypes.
    dtypes: dict[str, str]
    #: torch name of the weights' dtype.
    dtype: str | None
    #: Shapes of the whole tensors, by name.
    whole: Callable[[], dict[str, list[int]]]
    #: The model's, if one was given or found.
    tokenizer: Tokenizer | None = None


def positive(options: dict[str, Any], single: str | None = None) -> None:
    """Checks degrees and multiples that a caller gave; ``single`` is the one that the target does not have.

    Raises:
        FastshardError: ``FS515`` for one that is no positive whole number, or beyond what a run has.
    """
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FastshardError.of("FS515", option, expected="a positive whole number", got=shown(value))
        largest = MAX_DEGREE if option in ("--tp", "--pp") else MAX_MULTIPLE
        if value > largest:
            raise FastshardError.of("FS515", option, expected=f"{largest} at most", got=shown(value))
    if single is not None and options[single] != 1:
        raise FastshardError.of(
            "FS515",
            f"{single}: the target has no such parallel dimension",
            expected="1",
            got=str(options[single]),
        )


class Target(Protocol):
    """What a conversion makes of a source; the names of the formats are in :mod:`.targets`."""

    #: As ``--to`` names it.
    name: str

    @property
    def layout(self) -> str:
        """Name of the layout table; empty if names and shapes stay."""

    def request(self, table: Table | None) -> dict[str, Any]:
        """The target's side of the core's request, with the table."""

    def complete(self, bound: Bound) -> Completed:
        """What follows once the plan has bound the axes."""
