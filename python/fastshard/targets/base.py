"""What a target prescribes: tensors, files, and what a framework looks for first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .._core import Table
from ..configs import shown
from ..declared import MAX_DEGREE, Source
from ..errors import FastshardError, Finding
from ..placing import Option, Wanted
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

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


def positive(wanted: Wanted, *options: Option) -> None:
    """Checks degrees and multiples that a caller gave.

    Raises:
        FastshardError: ``FS515`` for one that is no positive whole number, or beyond what a run has.
    """
    for option in options:
        value = wanted[option]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FastshardError.of(
                "FS515", option.flag, expected="a positive whole number", got=shown(value)
            )
        largest = MAX_DEGREE if option.kind == "degree" else MAX_MULTIPLE
        if value > largest:
            raise FastshardError.of("FS515", option.flag, expected=f"{largest} at most", got=shown(value))


class Target(ABC):
    """What a conversion makes of a source. What it can hold and which options it takes, its class says."""

    #: As ``--to`` names it.
    names: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[Option, ...]] = ()
    #: Tensors are written whole.
    is_whole: ClassVar[bool] = False
    #: Names and shapes of any source stay: a merge in another container.
    is_container: ClassVar[bool] = False
    #: It holds a model whatever its head is.
    takes_any_head: ClassVar[bool] = False
    holds_optimizer: ClassVar[bool] = False
    #: It has a place for the step of a train state.
    keeps_step: ClassVar[bool] = False
    #: A result is written by :mod:`fastshard.external.array_writer`.
    writes_arrays: ClassVar[bool] = False
    #: The name that was asked for.
    name: str
    #: Name of the layout table; empty if names and shapes stay.
    layout: str

    @classmethod
    @abstractmethod
    def of(cls, source: Source, to: str, wanted: Wanted) -> Self:
        """What the source allows, under one of the class's names.

        Raises:
            FastshardError: ``FS514`` for a model that the target does not have, ``FS209`` if a fact
                that decides values is unknown, ``FS515`` for values of options that no run has.
        """

    @property
    def keeps_names(self) -> bool:
        """True where no table says what the names of a model mean, so that they stay."""
        return False

    @abstractmethod
    def request(self, table: Table | None) -> dict[str, Any]:
        """The target's side of the core's request, with the table."""

    @abstractmethod
    def complete(self, bound: Bound) -> Completed:
        """What follows once the plan has bound the axes."""

    def dtypes(self, bound: Bound) -> dict[str, str]:
        """Tensors that are written in another type than they were planned in."""
        return {}
