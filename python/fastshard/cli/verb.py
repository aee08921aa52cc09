"""The record of a verb: everything that the command line knows about a command."""

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
    #: True for a text that is the requested product itself, and not a description: it is printed alone and
    #: never suppressed.
    product: bool = False
    #: Codes of findings that the text already reports; with -v they are printed too.
    tells: frozenset[str] = frozenset()
    #: True for a text to show in a pager.
    paged: bool = False
    #: What was not checked; None to derive it from the findings.
    unchecked: tuple[str, ...] | None = None
    #: The same with advice, for a document; None for ``unchecked``.
    unchecked_with_advice: tuple[str, ...] | None = None
    #: Next steps, printed below the findings.
    below: str = ""
    #: The reason for a good verdict, for a verb that checks.
    reason: str = ""
    #: The verdict, if it differs from that of the exit code.
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
    #: Calls the library and returns the outcome.
    run: Callable[[argparse.Namespace], Outcome]
    #: Description in its own ``--help``; ``help`` if None.
    description: str | None = None
    #: Flags that its ``-h`` lists, besides the required ones.
    often: tuple[str, ...] = ()
    #: Command lines that the help shows and tests run; ``run`` is a checkpoint, ``model`` a converted one.
    examples: tuple[str, ...] = ()
    #: True if its result is an action or a verdict; with ``-q``, only errors are printed.
    silent: bool = False
    #: True if its findings and verdict are the requested output, and go to stdout.
    finds: bool = False
    #: True to print the checks that it could not make for this checkpoint.
    tells_unchecked: bool = False
    #: Returns True if its findings decide its exit code; otherwise the code is 0 if there is a result.
    judges: Callable[[argparse.Namespace], bool] = lambda a: True
    #: Returns the destination of its result; None if it publishes none. Arguments that could not be parsed
    #: are absent.
    publishes: Callable[[argparse.Namespace], str | None] = lambda a: None
