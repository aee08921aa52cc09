"""Parts of a model that its config promises but that are missing or incomplete: one finding for each part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted, printable, some
from ..common.records import dataclass
from ..expected.promised_parts import Part, lacking, promised
from ..layouts.declaration import Source, is_state
from .effects import effect_on

__all__ = ["PromisedPart", "find_missing_parts", "list_promised_parts", "merge_by_part"]

_NAMED = 4
_WEIGHTS = {"note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True)
class PromisedPart:
    """A part that the config promises, and the names of its tensors in the files."""

    part: Part
    names: Sequence[str]

    @property
    def its(self) -> str:
        """The possessive pronoun for the part: "its" or "their"."""
        return "their" if self.part.is_many else "its"


def list_promised_parts(source: Source, names: Iterable[str]) -> list[PromisedPart]:
    """List the parts that a config promises, each with its tensors in the files.

    The list is empty for a model without the names of Hugging Face, and for a part of a model.

    Args:
        source: the declaration.
        names: the names of all tensors in its files.
    """
    model = source.model
    if model.config is None or model.is_part or not (model.hf_names or model.no_table):
        return []
    parts = promised(model.config)
    if not parts:
        return []
    names = [name for name in dict.fromkeys(names) if not is_state(name)]
    return [PromisedPart(part, [name for name in names if part.holds(name)]) for part in parts]


def find_missing_parts(
    source: Source,
    parts: Sequence[PromisedPart],
    names: Collection[str],
    found: Iterable[Finding],
    findings: Sequence[Finding],
    *,
    listed: bool,
) -> list[Finding]:
    """Add findings about missing parts without another finding.

    These are parts without any tensor (`FS116`), and incomplete layers of multi-token prediction.

    Args:
        source: the declaration.
        parts: the promised parts.
        names: the names of all tensors in its files.
        found: other findings about missing tensors, which are not returned.
        findings: the findings to add to.
        listed: whether a table or transformers lists what the model's class builds.
    """
    found, findings = list(found), list(findings)
    for one in parts:
        part = one.part
        about = [f for f in (*found, *findings) if _is_of(part, f)]
        errors = any(f.severity == "error" for f in about)
        if (
            errors
            or any(map(part.holds, source.index.lost))
            or (part.kind.left_out and source.model.headless)
        ):
            continue
        if one.names and (more := _incomplete(one, names)):
            # It says more than what is a warning because the list knows nothing of it.
            findings = [f for f in findings if f not in about] + more
        elif not one.names and not about and (part.kind.left_out or (not listed and _has_place(part, names))):
            findings.append(_not_there(part))
    return findings


def _not_there(part: Part) -> Finding:
    them, were = ("them", "they were") if part.is_many else ("it", "it was")
    nothing = 0 if part.kind.counted or part.kind.within else "null"
    return Finding.of(
        codes.MISSING_PART,
        f"config.json promises {part}, and no file holds any of {them}",
        help=f"copy the files that held {them} from the original checkpoint; if {were} left out on purpose, "
        f"set {part.key} to "
        f"{nothing} in config.json",
    )


def _has_place(part: Part, names: Collection[str]) -> bool:
    """Return True if the existing tensors show that the part belongs to the model."""
    kind = part.kind
    if kind.may_be is not None and any(map(kind.may_be.search, names)):
        return False
    return kind.beside is None or any(map(kind.beside.search, names))


def _incomplete(one: PromisedPart, names: Collection[str]) -> list[Finding]:
    gone = lacking(one.part, names)
    if not gone:
        return []
    message = f"config.json promises {one.part}; some of {one.its} tensors are missing"
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            message,
            got=f"without {printable(some(gone, _NAMED))}",
            expected="modules like those of the other layers",
            help="copy the files that held them from the original checkpoint",
        )
    ]


def merge_by_part(
    findings: Sequence[Finding],
    parts: Sequence[PromisedPart],
    lost: Collection[str],
    index: Collection[str],
    listed_by: str | None = None,
) -> list[Finding]:
    """Merge the findings about each part into one.

    Args:
        findings: the findings, with their final severities.
        parts: the promised parts.
        lost: names of all tensors that are known to be missing.
        index: names in the checkpoint's own index.
        listed_by: the source of the list of the model class's tensors, if it is transformers.
    """
    findings = list(findings)
    for one in parts:
        about = [f for f in findings if _is_of(one.part, f)]
        whole = not one.names
        if not about or (not whole and (len(about) == 1 or any(f.rank for f in about))):
            continue
        # Each of several ranks may say it.
        count_of_findings = len({f.tensor for f in about if f.tensor and not f.count})
        count_of_findings += sum(f.count or 1 for f in about if f.count or not f.tensor)
        names = {f.tensor for f in about if f.tensor and f.code == codes.MISSING_TENSOR}
        names |= {name for name in lost if one.part.holds(name)} - set(one.names)
        count = max(count_of_findings, len(names))
        merged = _merged(one, about, count, names, index, listed_by)
        at = findings.index(about[0])
        rest = set(about)
        findings = [*findings[:at], merged, *(f for f in findings[at:] if f not in rest)]
        if count > count_of_findings:
            findings = _fewer(findings, count - count_of_findings)
    return findings


def _is_of(part: Part, finding: Finding) -> bool:
    """Return True if a finding is about missing tensors of a part, and about no other tensors."""
    if not finding.is_a("missing_tensor") or finding.severity == "note":
        return False
    if finding.tensor:
        return part.holds(finding.tensor) and not (finding.code == codes.MISSING_LAYER and part.kind.within)
    return (
        finding.code == codes.MISSING_LAYER
        and part.kind.counted
        and part.layers is not None
        and finding.axis in ("L", None)
        and bool(finding.layers)
        and min(finding.layers or ()) >= part.layers
    )


def _merged(
    one: PromisedPart,
    about: Sequence[Finding],
    count: int,
    names: Collection[str],
    index: Collection[str],
    listed_by: str | None,
) -> Finding:
    """Build one finding for everything that is missing from a part."""
    first = max(about, key=lambda f: _WEIGHTS[f.severity])
    by_index = bool(names) and all(name in index for name in names)
    if one.names:
        what = f"{count:,} of {one.its} {count + len(one.names):,} tensors are missing"
    else:
        tensors = counted(count, "tensor") + (" that the index names" if by_index else "")
        what = f"{one.its} {tensors} {'is' if count == 1 else 'are'} missing"
    files = list(dict.fromkeys(file for f in about for file in f.files))
    return first.replace(
        code=codes.MISSING_TENSOR if any(f.code == codes.MISSING_TENSOR for f in about) else first.code,
        message=f"config.json promises {one.part}; {what}",
        tensor=None,
        files=files,
        layers=None,
        axis=None,
        rank=None,
        count=count,
        expected=None,
        got=None,
        evidence=None if by_index or one.part.kind.left_out or not listed_by else f"{listed_by} has them",
        effect=effect_on(sorted(names), None) if len(names) == count else None,
        help="copy the files that held them from the original checkpoint",
        parts=[f.replace(help=None, effect=None) for f in about if f.tensor] if one.names else [],
    )


def _fewer(findings: Sequence[Finding], count: int) -> list[Finding]:
    """Reduce the count in the finding that represents further missing tensors.

    Drop this finding if no tensors are left.
    """
    for at, finding in enumerate(findings):
        if finding.is_a("missing_tensor") and not finding.tensor and not finding.file and finding.count:
            left = finding.count - count
            fewer = finding.replace(count=left, message=f"and {left:,} more tensors that are missing")
            return [*findings[:at], *([fewer] if left > 0 else []), *findings[at + 1 :]]
    return list(findings)
