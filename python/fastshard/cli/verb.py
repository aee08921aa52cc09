"""Record of a verb: everything that the command line knows of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..common.errors import Finding
from ..common.records import dataclass, field


@dataclass
class Result:
    """Output of a command on stdout: text for people, or the fields of the ``--json`` object."""

    text: str = ""
    document: dict[str, Any] = field(default_factory=dict)
    #: True for a text that is what was asked for, and not about it: it stands alone, and is never kept back.
    product: bool = False
    #: Codes of findings that the text tells of; with -v they are printed besides.
    tells: frozenset[str] = frozenset()
    #: True for a text that people page through.
    paged: bool = False
    #: What was not checked; None for what findings say of it.
    unchecked: tuple[str, ...] | None = None
    #: The same, with what to do about it, for a document; None for ``unchecked``.
    unchecked_with_advice: tuple[str, ...] | None = None
    #: How to go on, below the findings.
    below: str = ""
    #: Why all is well, for the verdict of a verb that judges.
    reason: str = ""
    #: The verdict, where it is not that of the exit code.
    word: str | None = None


Outcome = tuple[Result, list[Finding]]


@dataclass(frozen=True)
class Verb:
    """A command."""

    name: str
    #: Its line in ``fastshard --help``.
    help: str
    #: Adds its arguments to its parser.
    arguments: Callable[[argparse.ArgumentParser], None]
    #: Calls the library and says what came of it.
    run: Callable[[argparse.Namespace], Outcome]
    #: What its own ``--help`` says; as ``help`` if None.
    description: str | None = None
    #: Flags that its ``-h`` lists, besides those that must be given.
    often: tuple[str, ...] = ()
    #: Command lines that help shows and tests run: ``run`` is a checkpoint, ``model`` a converted one.
    examples: tuple[str, ...] = ()
    #: Its result is a deed or a verdict: with ``-q`` only errors are said.
    silent: bool = False
    #: What it finds and its verdict are what was asked for: they go to stdout.
    finds: bool = False
    #: What it could not check of this checkpoint is printed.
    tells_unchecked: bool = False
    #: True if its findings make its exit code; else it is 0 once there is a result.
    judges: Callable[[argparse.Namespace], bool] = lambda a: True
    #: Where its result is published, None if it publishes none. Arguments that could not be parsed are
    #: absent.
    publishes: Callable[[argparse.Namespace], str | None] = lambda a: None
