"""Result of a verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, overload

from ..common.errors import VERDICTS, Finding, error_for, exit_code
from ..common.formatting import counted
from ..common.gate import ignored
from ..findings.proof import Checked

__all__ = ["Verdict"]


class Verdict(Sequence[Finding]):
    """The result of :func:`fastshard.verify`: a sequence of findings, and the verdict on the checkpoint.

    It compares equal to a list of the same findings. It has no truth value, because an empty sequence, which
    is the good case, would be false.

    Examples:
        >>> verdict = fastshard.verify("run")
        >>> verdict.ok
        True
        >>> fastshard.verify("lossy").raise_for_errors()
        Traceback (most recent call last):
            ...
        fastshard.IncompleteError: global_step0/layer_03-model_01-model_states.pt: the file is missing ...
    """

    __slots__ = ("_findings", "checked")

    def __init__(self, findings: Sequence[Finding], checked: Checked | None = None) -> None:
        self._findings = tuple(findings)
        #: The extent of the check; None if something is wrong.
        self.checked = checked

    @property
    def ok(self) -> bool:
        """True if no error was found."""
        return not any(finding.severity == "error" for finding in self._findings)

    @property
    def findings(self) -> list[Finding]:
        """All findings, as a list."""
        return list(self._findings)

    def raise_for_errors(self) -> None:
        """Raises the findings as an exception if one of them is an error.

        Raises:
            IncompleteError: if the checkpoint is only incomplete.
            FastshardError: for any other error, of the class that fits its exit code.
        """
        if not self.ok:
            raise error_for(self.findings)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Verdict, list, tuple)):
            return self.findings == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise TypeError("a Verdict has no truth value: use .ok, or len() to count its findings")

    def __repr__(self) -> str:
        errors = sum(finding.severity == "error" for finding in self._findings)
        warnings = sum(finding.severity == "warning" and not ignored(finding) for finding in self._findings)
        if errors:
            word = VERDICTS[exit_code(self.findings)]
            return f"<fastshard.Verdict {word}: {counted(errors, 'error')}; .findings, .raise_for_errors()>"
        told = "no error" if self.checked is None else self.checked.told()
        return f"<fastshard.Verdict ok: {told}, {counted(warnings, 'warning')}>"

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        rows: list[tuple[Any, ...]] = [
            (f.severity, f.code, f.headline, f.advice or "") for f in self._findings
        ]
        return notebook_html.table(repr(self), ("severity", "code", "what", "help"), rows, len(rows))
