"""Rules for counting findings: warnings that count as errors (``fail_on``, ``error``), and ignored warnings
and notes (``ignore``). An error can only be accepted by name (``accept``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .. import _core
from . import codes
from .codes import CODES
from .errors import FastshardError, Finding, from_core, raise_errors
from .near_words import meant
from .options import FAIL_ON
from .records import dataclass

__all__ = ["Gate", "accepted", "ignored", "recorded"]

_ACCEPT = "accept "


@dataclass(frozen=True)
class Gate:
    """Rules that decide how findings count. Each finding records the decision in ``decided``."""

    #: True if each warning counts as an error.
    warnings: bool = False
    #: Codes whose warnings and notes count as errors.
    error: tuple[str, ...] = ()
    #: Codes whose warnings and notes are ignored.
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, fail_on: str | None = None, error: Iterable[str] = (), ignore: Iterable[str] = ()) -> Gate:
        """Make a gate from options.

        Raises:
            FastshardError: ``FS515`` for an unknown word or code, or one that occurs twice.
        """
        if fail_on is not None and fail_on not in FAIL_ON:
            raise FastshardError.of(codes.USAGE, "fail_on", expected=" or ".join(FAIL_ON), got=repr(fail_on))
        raised, aside = _codes("error", error), _codes("ignore", ignore)
        if both := sorted({*raised} & {*aside}):
            raise FastshardError.of(
                codes.USAGE, f"{both[0]} is in both error and ignore", help="pass it to one of them"
            )
        return cls(fail_on == "warning", raised, aside)

    def __bool__(self) -> bool:
        return self.warnings or bool(self.error or self.ignore)

    def evaluate(self, findings: Iterable[Finding]) -> list[Finding]:
        """Decide how each finding counts; findings that have been evaluated before do not change.

        Raises:
            FastshardError: ``FS515`` if the gate would ignore an error.
        """
        findings = list(findings)
        if not self or not findings:
            return findings
        try:
            return _core.judge(findings, self.to_dict())
        except _core.CoreError as error:
            raise from_core(error) from None

    def passed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Evaluate findings and return them; raise if one of them is an error.

        Raises:
            FastshardError: if a finding is an error; the exception has all of them.
        """
        evaluated = self.evaluate(findings)
        raise_errors(evaluated)
        return evaluated

    def to_dict(self, findings: Iterable[Finding] = ()) -> dict[str, Any]:
        """Convert the gate into the dict that the core reads.

        The dict includes the decided findings, which the core records in the manifest.
        """
        decided = [f.to_dict() for f in dict.fromkeys(findings) if f.decided is not None]
        return {"warnings": self.warnings, "error": self.error, "ignore": self.ignore, "decided": decided}


def _codes(option: str, given: Iterable[str]) -> tuple[str, ...]:
    chosen = []
    for word in given:
        code = word.upper() if word.upper().startswith("FS") else f"FS{word}"
        if code not in CODES:
            raise FastshardError.of(
                codes.USAGE,
                f"{option}: no finding has the code {word}{meant(code, CODES)}",
                help="list all codes",
                run=["fastshard explain"],
            )
        chosen.append(code)
    return tuple(dict.fromkeys(chosen))


def accepted(finding: Finding) -> bool:
    """Return True if a finding was accepted by name."""
    return (finding.decided or "").startswith(_ACCEPT)


def ignored(finding: Finding) -> bool:
    """Return True if a warning or note was ignored on request."""
    return (finding.decided or "").startswith("ignore ")


def recorded(document: Mapping[str, Any]) -> list[str]:
    """List the findings that were accepted when a manifest was written, as values for ``accept``."""
    found = document.get("findings") or []
    by = [f.get("decided") for f in found if isinstance(f, dict)]
    words = [word.removeprefix(_ACCEPT) for word in by if isinstance(word, str) and word.startswith(_ACCEPT)]
    # The files of a result have names of their own.
    own = document.get("kind") == "inventory"
    return sorted({word if own else word.partition("=")[0] for word in words})
