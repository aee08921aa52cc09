"""What a function is called with: options that it has, and values that can be meant; all else is refused by name."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from . import options as _options
from .errors import FastshardError
from .options import ALL, meant
from .target_options import OPTIONS

#: Options by the kind of their values.
_LISTS = ("include", "exclude", "accept", "error", "ignore", "certificates")
_NUMBERS = tuple(o.name for o in OPTIONS if o.kind == "degree")
_NUMBERS_OR_NONE = ("vocab_size", "expect_processes", *(o.name for o in OPTIONS if o.kind == "number"))
#: Numbers that say something of the checkpoint.
_OF_CHECKPOINT = ("vocab_size", "expect_processes")
_WORDS = ("dtype", "replicas")
_WORDS_OR_NONE = ("weights", "under", "fail_on", *(o.name for o in OPTIONS if o.kind == "choice"))
_SWITCHES = ("optimizer", "resume", "overwrite", "fsync", "sparse", "stats", "drop_optimizer")
_OF_TARGETS = {o.name: o for o in OPTIONS if o.kind == "switch"}
_PATHS = ("layout", "adapter", "like", "tokenizer", "out", "signature", "public_key")
_PATHS_OR_MAPPINGS = ("config", "expect")
_SOURCES = ("source", "a", "b")

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose options are looked at before it is called. Lists become tuples: they may be read twice.

    Raises:
        TypeError: for an option that it does not have.
        FastshardError: ``FS515`` or ``FS211`` for a value that no such option has, naming the option.
    """
    known = taken(function)
    parameters = inspect.signature(function).parameters.values()
    listed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = {p.name for p in parameters if p.name in listed and p.default is p.empty}

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

    return called


def taken(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the options that a function takes: those it lists, and those of the type that it unpacks."""
    names: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.add(name)
        elif unpacked := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
            names |= getattr(_options, unpacked[1]).__annotations__.keys()
    return frozenset(names)


def _hint(option: str, function: str, known: Iterable[str]) -> str:
    # Of another function it is no slip of the pen: the nearest of this one's would be something else.
    return f": {function}() does not take it" if option in ALL else meant(option, known)


def value(name: str, given: Any) -> Any:
    """A value as the functions take it.

    Raises:
        FastshardError: ``FS515`` for one that no option of this name has, ``FS211`` for a number that is none.
    """
    if name in _LISTS:
        return _words(name, given)
    if name in _NUMBERS or (name in (*_NUMBERS_OR_NONE, "world") and given is not None):
        return _number(name, given)
    if name == "subset" and given is not None:
        return _pair(name, given)
    if (name in _WORDS or (name in _WORDS_OR_NONE and given is not None)) and not isinstance(given, str):
        raise refused(name, "a word", given)
    option = _OF_TARGETS.get(name)
    # One whose default is None may be left to the source.
    switch = name in _SWITCHES or (option is not None and (given is not None or option.default is not None))
    if switch and not isinstance(given, bool):
        # "no" would be taken for yes.
        raise refused(name, "True or False", given)
    if name in _PATHS + _PATHS_OR_MAPPINGS and given is not None:
        of_mapping = name in _PATHS_OR_MAPPINGS and isinstance(given, Mapping)
        if not of_mapping and not isinstance(given, (str, os.PathLike)):
            raise refused(name, "a path or a dict" if name in _PATHS_OR_MAPPINGS else "a path", given)
    if name in _SOURCES and (isinstance(given, bytes) or not isinstance(given, (os.PathLike, Iterable))):
        raise refused(name, "a path, several, or an opened checkpoint", given)
    if given == "" and name in (*_PATHS, *_PATHS_OR_MAPPINGS, "step", "under"):
        raise refused(name, "something", given)
    return given


def _words(name: str, given: Any) -> tuple[str, ...]:
    expected = "a list of words" if name in ("accept", "error", "ignore") else "a list of patterns"
    if isinstance(given, (str, bytes, Mapping)):
        raise refused(name, expected, given)
    try:
        words = tuple(given)
    except TypeError:
        raise refused(name, expected, given) from None
    if not all(isinstance(word, str) for word in words):
        raise refused(name, expected, given)
    return words


def _number(name: str, given: Any) -> int:
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError:
        code = "FS211" if name in _OF_CHECKPOINT else "FS515"
        raise FastshardError.of(code, name, expected="a whole number", got=repr(given)) from None


def _pair(name: str, given: Any) -> tuple[int, int]:
    try:
        numbers = tuple(_number(name, part) for part in given)
    except (TypeError, FastshardError):
        numbers = ()
    if len(numbers) != 2 or max(numbers) >= 1 << 63:
        raise refused(name, "two whole numbers, e.g. (1, 10)", given)
    return numbers


def refused(name: str, expected: str, given: Any) -> FastshardError:
    """What a value is told that cannot be meant."""
    return FastshardError.of("FS515", name, expected=expected, got=repr(given))
