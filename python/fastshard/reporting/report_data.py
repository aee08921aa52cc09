"""Content of a report as plain data, from a checkpoint, its plan, its manifest and its statistics,
independent of the page's appearance."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import manifests
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.missing_files import absent
from ..checkpoint.plan import Plan
from ..common.codes import CODES
from ..common.errors import FastshardError, Finding, exit_code
from ..common.formatting import human
from ..common.listing import list_roots
from ..common.options import StrPath
from ..common.progress import Progress
from ..common.records import dataclass, field, replace
from ..common.stored_places import is_stored, show_text
from ..findings.proof import LIMIT, list_unchecked
from ..models.tensor_roles import parts_of, role_of
from ..verification.stats import TensorStats
from .checks import FAILED, Check, Read, checks
from .comparison_data import Change, Comparison, Side, compared
from .facts import Counts, Fact, counts_of, facts_of, turned
from .grid import Grid, grid
from .largest_values import Place, largest
from .manifest_data import (
    assumed_values,
    describe_recorded_loss,
    manifest_of,
    provenance,
    recorded_numbers,
)
from .tensor_numbers import read_through, worth_a_look

if TYPE_CHECKING:
    from .._core import RunOptions

__all__ = [
    "Change",
    "Check",
    "Comparison",
    "Counts",
    "Fact",
    "Family",
    "Group",
    "Numbers",
    "Report",
    "Tensor",
    "gathered",
    "unopened",
]


@dataclass(frozen=True)
class Group:
    """Findings of one code and severity."""

    code: str
    #: A short title.
    name: str
    severity: str
    #: What the code means, and what to do.
    explanation: str
    findings: tuple[Finding, ...]
    #: What to do, without duplicates.
    help: tuple[str, ...]


@dataclass(frozen=True)
class Tensor:
    """A full tensor, or an incomplete one, whose dtype is empty."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    pieces: int = 0
    #: The reason why it is incomplete.
    lacks: str = ""


@dataclass(frozen=True)
class Family:
    """Tensors of the same form whose names differ only in their numbers."""

    #: The name, with ranges instead of numbers.
    pattern: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


@dataclass(frozen=True)
class Numbers:
    """Statistics and their origin."""

    origin: str
    tensors: Mapping[str, TensorStats]
    #: True if all data was read for this report.
    read: bool = False
    #: Positions of the largest values in notable tensors.
    largest: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    paths: tuple[str, ...]
    version: str
    #: ``ok``, ``unproven``, ``broken`` or ``unopened``.
    verdict: str
    facts: tuple[Fact, ...]
    findings: tuple[Group, ...]
    #: One line about what was not checked.
    not_checked: str
    #: Description of what was read: only headers, or more.
    read: str
    grid: Grid | None = None
    #: Commands that copy missing files from other hosts.
    commands: tuple[str, ...] = ()
    #: How much of it exists; None for a checkpoint that cannot be opened.
    counts: Counts | None = None
    checks: tuple[Check, ...] = ()
    #: The directory for commands on another host; empty for several.
    folder: str = ""
    #: True if it can be converted to the Hugging Face format and does not have it yet.
    converts: bool = False
    #: Values that a conversion assumed: the value, and the message about it.
    assumed: tuple[tuple[str, str], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    families: tuple[Family, ...] = ()
    #: Bytes by dtype and role: ``{role: {dtype: (tensors, bytes)}}``.
    sizes: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    numbers: Numbers | None = None
    comparison: Comparison | None = None
    provenance: tuple[tuple[str, str], ...] = ()
    #: Existing files of a checkpoint that cannot be opened.
    files: tuple[tuple[str, int], ...] = ()
    #: The reason why the distributions have no charts, which does not concern the checkpoint.
    undrawn: Finding | None = None

    @property
    def errors(self) -> int:
        """Number of errors."""
        return sum(len(g.findings) for g in self.findings if g.severity == "error")

    @property
    def warnings(self) -> int:
        """Number of warnings."""
        return sum(len(g.findings) for g in self.findings if g.severity == "warning")

    @property
    def all_findings(self) -> list[Finding]:
        """The findings, the worst first, and what the page omits."""
        found = [finding for group in self.findings for finding in group.findings]
        return found if self.undrawn is None else [*found, self.undrawn]

    @property
    def has_distributions(self) -> bool:
        """True if the page shows statistics of tensors."""
        return bool(self.numbers or (self.comparison and self.comparison.before))


def gathered(
    checkpoint: Checkpoint,
    against: Checkpoint | FastshardError | None,
    against_path: str,
    *,
    stats: bool,
    run: RunOptions,
    bar: Progress,
) -> Report:
    """Gather everything that the page shows about a checkpoint.

    Args:
        checkpoint: the checkpoint.
        against: another one, or the error that prevented opening it.
        against_path: name of the other one.
        stats: read all data for statistics; else only headers and manifests.
        run: options of an engine run.
        bar: shows the progress.

    Raises:
        FastshardError: if the data cannot be read at all.
    """
    plan = checkpoint._plan
    findings = list(plan.findings)
    document, about = manifest_of(checkpoint)
    findings += about
    numbers: Numbers | None = None
    hashes: Mapping[str, str] = {}
    if stats:
        tensors, hashes, found = read_through(plan, run, bar, "reading")
        findings += found
        numbers = Numbers("read for this report", tensors, read=True)
    elif document is not None and (recorded := recorded_numbers(document, plan)):
        numbers = Numbers(f"as {manifests.MANIFEST_NAME} recorded them; not read again", recorded)
    comparison = None
    if against is not None:
        other = Side(against_path, against)
        own = Side("", checkpoint, document, numbers.tensors if numbers else {}, hashes)
        comparison = compared(own, other, stats, run, bar)
    if numbers is not None and numbers.read:
        before = (comparison.before if comparison else None) or {}
        names = [name for name, _ in worth_a_look(numbers.tensors, before)]
        numbers = replace(numbers, largest=largest(plan, names))
    findings = checkpoint.opened.gate.evaluate(dict.fromkeys(findings))
    grouped = set(plan.findings)
    each = [*plan.each, *(f for f in findings if f not in grouped)]
    echoes = plan.core.findings()
    provable = plan.source.index.is_provable
    missing = absent(findings, checkpoint.roots)
    read = "headers and all data" if stats else "headers alone: no value of a tensor was read"
    counts = counts_of(checkpoint, plan, missing)
    facts = facts_of(checkpoint, plan, counts, stats)
    made = Read(
        " ".join(shlex.quote(show_text(path)) for path in checkpoint.listing.given()),
        counts.files,
        counts.tensors,
        provable,
        stats,
        document is not None,
        numbers is not None,
        describe_recorded_loss(document),
    )
    families = _families(plan)
    broken = any(f.severity == "error" for f in findings)
    return Report(
        paths=tuple(map(show_text, checkpoint.listing.given())),
        version=_core.__version__,
        verdict="broken" if broken else "ok" if provable else "unproven",
        facts=turned(facts, against, checkpoint) if isinstance(against, Checkpoint) else facts,
        findings=_groups(findings),
        not_checked="; ".join([LIMIT, *list_unchecked(findings, with_advice=True)]),
        read=read,
        grid=grid(checkpoint, each, echoes),
        commands=tuple(missing.commands) if missing and not is_stored(checkpoint.roots[0]) else (),
        counts=counts,
        checks=checks(findings, made),
        folder=_folder(checkpoint),
        converts=checkpoint.family is not None and not checkpoint.framework.startswith("Hugging Face"),
        assumed=assumed_values(document, findings),
        tensors=(*_tensors(plan), *_lacking(plan, [*findings, *echoes])),
        families=families,
        sizes=_sizes(families),
        numbers=numbers,
        comparison=comparison,
        provenance=provenance(document),
    )


#: Maximum number of files to list for a checkpoint that cannot be opened.
_LISTED = 500


def unopened(paths: Sequence[StrPath], error: FastshardError) -> Report:
    """Describe paths that cannot be opened as a checkpoint: the reason, and the files there."""
    files: list[tuple[str, int]] = []
    try:
        listing = list_roots(paths)
        files = [(file.path, file.size) for file in listing.files]
    except FastshardError:
        pass  # Why is among the findings, or it would be told of twice.
    return Report(
        paths=tuple(str(path) for path in paths),
        version=_core.__version__,
        verdict="unopened",
        facts=(Fact("Files", f"{len(files):,}", human(sum(size for _, size in files))),),
        findings=_groups(error.findings),
        not_checked="anything: the path could not be opened as a checkpoint",
        read="names of files, and as much of their headers as could be",
        checks=(Check("Opened as a checkpoint", FAILED, "Nothing else could be checked."),),
        files=tuple(sorted(files)[:_LISTED]),
    )


def _folder(checkpoint: Checkpoint) -> str:
    """Return the single directory of a checkpoint as a full path; not for a store, because nothing is copied
    to it."""
    roots = [Path(root).absolute() for root in checkpoint.roots]
    return str(roots[0]) if len(roots) == 1 and roots[0].is_dir() and not is_stored(roots[0]) else ""


def _groups(findings: Iterable[Finding]) -> tuple[Group, ...]:
    """Group findings by code, errors first; within them those that decide the exit code."""
    order = {"error": 0, "warning": 1, "note": 2}
    findings = list(findings)
    decides = exit_code(findings)

    def rank(f: Finding) -> tuple[int, bool]:
        # As for the exit code: damage comes before what is missing.
        return order.get(f.severity, 3), f.code not in CODES or CODES[f.code].exit != decides

    sorted_ = sorted(findings, key=rank)
    by_code: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted_:
        by_code.setdefault((finding.severity, finding.code), []).append(finding)
    return tuple(
        Group(
            code,
            CODES[code].title if code in CODES else "",
            severity,
            f"{CODES[code].meaning} {CODES[code].help}".rstrip() if code in CODES else "",
            tuple(group),
            tuple(dict.fromkeys(f.advice for f in group if f.advice)),
        )
        for (severity, code), group in by_code.items()
    )


# --- the tensors


def _tensors(plan: Plan) -> list[Tensor]:
    return [
        Tensor(name, dtype, tuple(shape), size, pieces) for name, dtype, shape, size, pieces in plan.outputs
    ]


def _lacking(plan: Plan, findings: Iterable[Finding]) -> list[Tensor]:
    """Return incomplete tensors, from the findings about them."""
    lacks: dict[str, str] = {}
    for finding in findings:
        if finding.severity == "error" and finding.tensor and finding.tensor not in plan.index:
            where = f" ({finding.rank})" if finding.rank else ""
            lacks.setdefault(finding.tensor, f"{finding.code}: {finding.message}{where}")
    return [Tensor(name, lacks=why) for name, why in lacks.items()]


def _families(plan: Plan) -> tuple[Family, ...]:
    """Summarize all tensors, with one line for similar ones.

    Tens of thousands of tensors need a few dozen lines.
    """
    found: dict[tuple[tuple[str | None, ...], str, tuple[int, ...]], list[Any]] = {}
    for name, dtype, shape, size, _ in plan.outputs:
        # Of a path the parts could not be put together again.
        parts, numbers = parts_of(name) if "/" not in name else ((name,), [])
        entry = found.setdefault((parts, dtype, tuple(shape)), [0, 0, numbers, numbers, name])
        entry[0] += 1
        entry[1] += size
        entry[2] = list(map(min, entry[2], numbers))
        entry[3] = list(map(max, entry[3], numbers))
    families = []
    for (_, dtype, extents), (count, size, low, high, name) in found.items():
        ranges = [str(a) if a == b else f"{{{a}-{b}}}" for a, b in zip(low, high, strict=True)]
        families.append(Family(_spread(name, ranges), role_of(name), dtype, extents, count, size))
    return tuple(families)


def _spread(name: str, ranges: list[str]) -> str:
    """Replace the numbers of a name by ranges."""
    left = iter(ranges)
    if not ranges:
        return name
    words = [
        next(left)
        if part.isdecimal() and len(part) < 10
        else f"{part.rpartition('_')[0]}_{next(left)}"
        if None in parts_of(part)[0]
        else part
        for part in name.split(".")
    ]
    return ".".join(words)


def _sizes(families: Iterable[Family]) -> dict[str, dict[str, tuple[int, int]]]:
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for family in families:
        of_role = sizes.setdefault(family.role, {})
        count, total = of_role.get(family.dtype, (0, 0))
        of_role[family.dtype] = (count + family.count, total + family.nbytes)
    return dict(sorted(sizes.items(), key=lambda item: -sum(b for _, b in item[1].values())))
