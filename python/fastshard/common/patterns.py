"""Regular expressions of unknown origin. The core matches them with a budget of steps for each file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .. import _core
from .._core import PatternBudget
from .errors import from_core

__all__ = ["PatternBudget", "PatternList"]


class PatternList:
    """An ordered list of patterns.

    Args:
        texts: the patterns.
        how: ``start`` for ``re.match``, ``full`` for ``re.fullmatch``, ``module`` for a name or the part of a
            name after one of its dots.
        budget: budget of their file.

    Raises:
        FastshardError: ``FS211`` for an invalid regular expression of Python, ``FS514`` for one with a
            construct that is not supported.
    """

    def __init__(
        self, texts: Iterable[str], how: Literal["start", "full", "module"], budget: PatternBudget
    ) -> None:
        try:
            self._core = _core.Patterns(list(texts), how, budget)
        except _core.CoreError as error:
            raise from_core(error) from None

    def first(self, name: str) -> int | None:
        """Return the number of the first pattern that matches a name.

        Raises:
            FastshardError: ``FS514`` if the patterns of the file exceed its budget of steps.
        """
        try:
            return self._core.first(name)
        except _core.CoreError as error:
            raise from_core(error) from None
