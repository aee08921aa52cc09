"""The explanation of a finding's code: meaning, causes, confirmation and fix."""

from __future__ import annotations

from ..common import codes
from ..common.codes import CODES, Code
from ..common.errors import FastshardError
from ..common.records import asdict, dataclass
from .code_pages import PAGES

__all__ = ["Explanation", "explain", "find_codes"]

#: Minimum length of a word to search for in titles.
_SHORTEST = 3


@dataclass(frozen=True)
class Explanation:
    """What a finding's code means, and what to do.

    Examples:
        >>> explanation = fastshard.explain("FS303")
        >>> explanation.name, explanation.exit, explanation.causes
        ('DUPLICATED_SHARD', 1, 'A copy or a rename went wrong, often in a shell loop.')
    """

    #: Stable code, e.g. ``FS303``.
    code: str
    #: Stable name, e.g. ``DUPLICATED_SHARD``.
    name: str
    #: ``error``, ``warning`` or ``note``, unless a finding states its own.
    severity: str
    #: Exit code of a run with this error.
    exit: int
    title: str
    meaning: str
    #: Why it happens; None for a code without a page of its own.
    causes: str | None
    #: How to confirm it; None for a code without a page of its own.
    confirmation: str | None
    #: What to do.
    help: str

    def to_dict(self) -> dict[str, object]:
        """Returns plain data (``fastshard explain CODE --json``)."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def explain(code: str | int) -> Explanation:
    """Explains the code of a finding.

    Args:
        code: e.g. ``FS303``, ``fs303``, ``303`` or 303, or the code's name.

    Raises:
        FastshardError: ``FS515`` if no finding has this code.

    Examples:
        >>> fastshard.explain("FS303").title
        'Copied shard'
    """
    row = _find_row(str(code))
    if row is None:
        raise FastshardError.of(
            codes.USAGE,
            f"no finding has the code {code}, and none has this word in its title",
            help="list all codes",
            run=["fastshard explain"],
        )
    page = PAGES.get(row.code)
    causes, confirmation = (page.why, page.confirm) if page else (None, None)
    return Explanation(
        row.code, row.name, row.severity, row.exit, row.title, row.meaning, causes, confirmation, row.help
    )


def _find_row(code: str) -> Code | None:
    word = code.strip().upper()
    row = CODES.get(word if word.startswith("FS") else f"FS{word}")
    return row or next((row for row in CODES.values() if row.name == word), None)


def find_codes(word: str) -> list[Code]:
    """Find the codes with a word in their titles, or, if there are none, in their meanings."""
    word = word.strip().lower()
    if len(word) < _SHORTEST or word.startswith("fs"):
        return []
    of_titles = [row for _, row in sorted(CODES.items()) if word in row.title.lower()]
    return of_titles or [row for _, row in sorted(CODES.items()) if word in row.meaning.lower()]
