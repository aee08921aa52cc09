"""Comparison of a checkpoint with a reference: differences, their explanations, and the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .. import _core
from ..common import codes
from ..common.errors import Finding
from .comparison import Comparison
from .missing_tensors import further, missing, unexplained
from .reference import Reference
from .reference_names import Met, Side, aligned
from .shapes_and_dtypes import dtypes, shapes, total_bytes

__all__ = ["compare", "fit"]


def compare(
    sides: Iterable[Side],
    reference: Reference,
    wanted: Callable[[str], bool],
    cast: str | None,
    named: Iterable[str | None] = (),
) -> list[Finding]:
    """Compare a checkpoint with a reference, and return findings with their evidence.

    The findings report missing, unexpected and different tensors.

    Args:
        sides: the checkpoint's tensors under candidate names, most likely first.
        reference: the reference.
        wanted: returns True if the caller wants a tensor, by its name in a result.
        cast: the dtype of floating-point tensors in the result; None if they keep their own.
        named: tensors that already have findings.
    """
    roster = reference.roster
    if roster is None:
        return []
    first = None
    for side in sides:
        met = _met(side, roster, reference.path)
        if met.fits(len(roster)):
            expected = {name: shape for name, shape, _, _ in roster.entries()}
            known = frozenset(name for name in named if name)
            return _findings(Comparison(met, reference, expected, wanted, cast, known))
        # Where nothing fits it is said of the tensors as they are stored.
        first = first or met
    return [] if first is None else [_strangers(first, reference)]


def fit(sides: Iterable[Side], reference: Reference) -> float:
    """Return the fraction (0 to 1) of a reference's names that a checkpoint has."""
    roster = reference.roster
    if roster is None or not len(roster):
        return 0.0
    return max((_met(side, roster, reference.path).matched for side in sides), default=0) / len(roster)


def _met(side: Side, roster: _core.Roster, path: str) -> Met:
    """Match a side with a roster.

    If few names match, the function searches for the prefix that makes most names match.
    """
    met = Met(side, side.draft.compared(roster, side.source.names.own, side.outer))
    return met if met.fits(len(roster)) else aligned(met, roster, path) or met


def _findings(compared: Comparison) -> list[Finding]:
    """List all differences; if there are none, state what the reference proves."""
    unmatched = unexplained(compared)
    of_shapes, shape_notes = shapes(compared)
    of_dtypes, dtype_notes = dtypes(compared)
    findings = [
        *missing(compared, unmatched.missing),
        *of_shapes,
        *of_dtypes,
        *further(compared, unmatched.further),
    ]
    findings = findings or total_bytes(compared)
    proven = [] if any(f.severity == "error" for f in findings) else [_proven(compared)]
    return [*findings, *unmatched.remarks, *shape_notes, *dtype_notes, *proven]


def _proven(compared: Comparison) -> Finding:
    # A list has no dtypes to compare.
    kinds = compared.met.found["kinds"]
    odd = compared.reference.listed is not None or any(got != expected for got, expected in kinds)
    proven = "names, shapes and dtypes" if not odd else "names and shapes"
    proven = proven if compared.reference.has_shapes else "names"
    how = str(compared.met.reading) if compared.met.reading.prefix else compared.met.side.how
    how = f", {how}" if how else ""
    return Finding.of(
        codes.NOT_PROVABLE,
        f"the {compared.met.matched} tensors of the reference exist, checked by {proven}{how}; not checked: "
        + ("" if compared.reference.has_shapes else "shapes and dtypes, ")
        + "the order of heads, and values",
        severity="note",
        file=compared.path,
    )


def _strangers(met: Met, reference: Reference) -> Finding:
    lacking = met.found["missing"]
    return Finding.of(
        codes.UNKNOWN_TENSOR,
        f"{met.matched} of {met.matched + len(met.further)} tensors have a name of the reference "
        f"{reference.path}: it is another model, or uses the names of another framework",
        tensor=met.further[0] if met.further else None,
        expected=f"names like {lacking[0][0]}" if lacking else None,
        got=met.further[0] if met.further else "nothing",
        help="pass a reference for the same model, with Hugging Face's names or the checkpoint's names",
    )
