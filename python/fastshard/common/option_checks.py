"""Checks of a function's options: unknown options and invalid values are refused by name."""

from __future__ import annotations

import functools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from . import codes
from . import options as _options
from .errors import FastshardError
from .near_words import meant
from .options import ALL, Option, table

P = ParamSpec("P")
T = TypeVar("T")


#: Functions of which ``help()`` does not show the options yet.
_undescribed: list[Callable[..., Any]] = []


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it checks its options before it runs.

    Lists become tuples, because the function may read them twice.

    Raises:
        TypeError: for an option that the function does not have.
        FastshardError: ``FS515`` or ``FS211`` for an invalid value; the message names the option.
    """
    # Once: this runs when the package is imported, and `inspect` would take a tenth of every start.
    plain = _unwrap(function)
    code = plain.__code__
    known = taken(plain)
    listed = code.co_varnames[code.co_posonlyargcount : code.co_argcount]
    needed = listed[: len(listed) - len(plain.__defaults__ or ())]

    def fitting(name: str, given: Any) -> Any:
        if given is None and name in needed:
            raise refused(name, "a path", given)
        return value(name, given)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for option in kwargs:
            if option not in known and option not in listed:
                called_as = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"unknown option {option!r}{_hint(option, called_as, known)}")
        for name, given in zip(listed, args, strict=False):
            fitting(name, given)
        return function(*args, **{name: fitting(name, given) for name, given in kwargs.items()})

    describe_later(called)
    return called


def describe_later(called: Callable[..., Any]) -> None:
    """Register a checked function, or its wrapper, so that :func:`describe_options` describes its options."""
    _undescribed.append(called)


def describe_options() -> None:
    """Make ``help()`` also list the options of the types that functions unpack."""
    import inspect

    while _undescribed:
        called = _undescribed.pop()
        signature = inspect.signature(called)
        listed = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        more = [ALL[name] for name in _unpacked(_unwrap(called)) if name not in listed]
        if not more:
            continue
        by_name = [inspect.Parameter(o.name, inspect.Parameter.KEYWORD_ONLY, default=o.default) for o in more]
        called.__signature__ = signature.replace(parameters=[*listed.values(), *by_name])  # type: ignore[attr-defined]
        lines = "".join(f"\n        {option.name}: {option.meaning or option.help}" for option in more)
        called.__doc__ = f"{(called.__doc__ or '').rstrip()}\n\n    Options:{lines}\n    "


def _unwrap(function: Callable[..., Any]) -> FunctionType:
    """Return the function that decorators have wrapped."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    assert isinstance(function, FunctionType)
    return function


def _unpacked(function: FunctionType) -> list[str]:
    """List the names of the options of the types that a function unpacks."""
    names: list[str] = []
    for annotation in function.__annotations__.values():
        if found := re.fullmatch(r"Unpack\[(\w+)\]", str(annotation)):
            names += table(getattr(_options, found[1]))
    return names


def taken(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's options: its own, and those of the type that it unpacks."""
    plain = _unwrap(function)
    code = plain.__code__
    listed = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    return frozenset({*listed, *_unpacked(plain)})


def _hint(option: str, function: str, known: Iterable[str]) -> str:
    # Of another function it is no slip of the pen: the nearest of this one's would be something else.
    return f": {function}() does not take it" if option in ALL else meant(option, known)


def value(name: str, given: Any) -> Any:
    """Check the value of an option and return it in the form that functions expect.

    Raises:
        FastshardError: ``FS515`` for an invalid value, ``FS211`` for a text that is not a number.
    """
    option = ALL.get(name)
    if option is None or (given is None and option.default is None and option.kind != "source"):
        return given
    if (
        isinstance(given, str)
        and not given
        and (option.kind in ("path", "mapping", "word") or name == "step")
    ):
        raise refused(name, "something", given)
    check = _CHECKS.get(option.kind)
    return given if check is None else check(option, given)


def check_finite(name: str, given: float | None, *, least: float = -math.inf) -> None:
    """Check that the number of an option is not below its minimum and not NaN, which passes every comparison.

    Raises:
        FastshardError: ``FS515``.
    """
    if given is None:
        return
    if not isinstance(given, (int, float)) or not math.isfinite(given) or given < least:
        expected = "a number" if least == -math.inf else f"a number from {least:g}"
        raise refused(name, expected, given)


def _switch(option: Option, given: Any) -> bool:
    if not isinstance(given, bool):
        # "no" would be taken for yes.
        raise refused(option.name, "True or False", given)
    return given


def _word(option: Option, given: Any) -> str:
    if not isinstance(given, str):
        raise refused(option.name, "a word", given)
    return given


def _path(option: Option, given: Any) -> Any:
    takes_dicts = option.kind == "mapping"
    if not isinstance(given, (str, os.PathLike)) and not (takes_dicts and isinstance(given, Mapping)):
        raise refused(option.name, "a path or a dict" if takes_dicts else "a path", given)
    return given


def _source(option: Option, given: Any) -> Any:
    if isinstance(given, bytes) or not isinstance(given, (os.PathLike, Iterable)):
        raise refused(option.name, "a path, several paths, or an opened checkpoint", given)
    return given


def _words(option: Option, given: Any) -> tuple[str, ...]:
    name, expected = option.name, f"a list of {option.kind}"
    if isinstance(given, (str, bytes, Mapping)):
        raise refused(name, expected, given)
    try:
        words = tuple(given)
    except TypeError:
        raise refused(name, expected, given) from None
    if not all(isinstance(word, str) for word in words):
        raise refused(name, expected, given)
    return words


def _number(option: Option, given: Any) -> int:
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError:
        code = codes.BAD_VALUE if option.kind == "size" else codes.USAGE
        raise FastshardError.of(code, option.name, expected="an integer", got=repr(given)) from None


def _size(option: Option, given: Any) -> int:
    number = _number(option, given)
    if not 0 < number <= option.most:
        expected = "a positive integer" if number < 1 else f"at most {option.most}"
        raise FastshardError.of(codes.BAD_VALUE, option.name, expected=expected, got=repr(given))
    return number


def _pair(option: Option, given: Any) -> tuple[int, int]:
    try:
        numbers = tuple(_number(option, part) for part in given)
    except (TypeError, FastshardError):
        numbers = ()
    if len(numbers) != 2 or max(numbers) >= 1 << 63:
        raise refused(option.name, "two integers, e.g. (1, 10)", given)
    return numbers


#: The function that checks values of each kind.
_CHECKS: dict[str, Callable[[Option, Any], Any]] = {
    "words": _words,
    "patterns": _words,
    "degree": _number,
    "number": _number,
    "size": _size,
    "pair": _pair,
    "choice": _word,
    "word": _word,
    "switch": _switch,
    "path": _path,
    "mapping": _path,
    "source": _source,
}


def refused(name: str, expected: str, given: Any) -> FastshardError:
    """Make the error for an invalid value of an option."""
    return FastshardError.of(codes.USAGE, name, expected=expected, got=repr(given))
