"""Parts of a model that its config promises and that are missing, wholly or partly: one finding, which names
the part."""

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
    """A part that the config promises, and the names of those tensors of it that files hold."""

    part: Part
    names: Sequence[str]

    @property
    def its(self) -> str:
        """The word for what is of it."""
        return "their" if self.part.is_many else "its"


def list_promised_parts(source: Source, names: Iterable[str]) -> list[PromisedPart]:
    """The parts that the config of a model with the names of Hugging Face promises, and what there is of
    each.

    Args:
        source: the declaration.
        names: of all tensors in its files.
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
    """What is said of a checkpoint, with what nothing else says of parts: those of which nothing is there
    (`FS116`), and layers of MTP that are there in part.

    Args:
        source: the declaration.
        parts: its parts.
        names: of all tensors in its files.
        found: what is known to be missing besides.
        findings: what is said.
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
        f"config.json promises {part}, and no file holds a tensor of {them}",
        help=f"copy the files that held {them} from the original checkpoint; if {were} left out on purpose, "
        f"set {part.key} to "
        f"{nothing} in config.json",
    )


def _has_place(part: Part, names: Collection[str]) -> bool:
    """Whether the tensors that there are leave no doubt that this part is one of the model's."""
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
    """The findings, where those of one part are one.

    Args:
        findings: what was found, as it counts.
        parts: the parts.
        lost: names of all tensors that are known to be missing.
        index: names that the checkpoint's own index has.
        listed_by: who lists what the model's class builds, where that is transformers.
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
    """Whether a finding is about tensors of a part that are missing, and about no others."""
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
    """One finding for all that is missing of a part."""
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
    """The findings, where one that counts what is not told one by one counts less."""
    for at, finding in enumerate(findings):
        if finding.is_a("missing_tensor") and not finding.tensor and not finding.file and finding.count:
            left = finding.count - count
            fewer = finding.replace(count=left, message=f"and {left:,} more tensors that are missing")
            return [*findings[:at], *([fewer] if left > 0 else []), *findings[at + 1 :]]
    return list(findings)
