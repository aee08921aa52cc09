"""What a report tells, as plain data: gathered from a checkpoint, its plan, its manifest and its numbers. Nothing of how it looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import manifests
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.missing_files import absent
from ..checkpoint.planning import Plan, make_plan
from ..checkpoint.proof import not_proven
from ..common.errors import CODES, FastshardError, Finding, from_core
from ..common.formatting import human
from ..common.listing import list_roots
from ..common.options import StrPath
from ..common.progress import Progress
from ..models.tensor_roles import layer_of, parts_of, role_of
from ..targets.request import Request
from ..verification.stats import TensorStats
from .grid import Grid, grid

if TYPE_CHECKING:
    from .._core import RunOptions

__all__ = ["Change", "Comparison", "Family", "Group", "Numbers", "Report", "Tensor", "gathered", "unopened"]


@dataclass(frozen=True)
class Group:
    """Findings of one code and severity."""

    code: str
    #: Its name, in words.
    name: str
    severity: str
    explanation: str
    findings: tuple[Finding, ...]
    #: What to do, each advice once.
    help: tuple[str, ...]


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, or one that is not whole: then its dtype is empty."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    pieces: int = 0
    #: Why it is not whole.
    lacks: str = ""


@dataclass(frozen=True)
class Family:
    """Tensors of one form whose names differ in their numbers alone."""

    #: The name, with each number as the range of it.
    pattern: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


@dataclass(frozen=True)
class Numbers:
    """Statistics, and where they come from."""

    origin: str
    tensors: Mapping[str, TensorStats]
    #: True if all data was read for them now.
    read: bool = False


@dataclass(frozen=True)
class Change:
    """A tensor in which the two differ."""

    name: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """This checkpoint against another."""

    other: str
    #: What was compared, and what was not.
    extent: str
    changes: tuple[Change, ...] = ()
    #: Tensors that both have; None where they could not be compared.
    common: int | None = None
    #: How many of these are known to be equal by their hashes.
    equal: int | None = None
    #: Statistics of both sides, by common names: the other's, and this one's.
    before: Mapping[str, TensorStats] = field(default_factory=dict)
    after: Mapping[str, TensorStats] = field(default_factory=dict)
    #: Why they could not be compared.
    refused: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that a report tells."""

    paths: tuple[str, ...]
    version: str
    #: ``ok``, ``unproven``, ``broken`` or ``unopened``.
    verdict: str
    facts: tuple[tuple[str, str], ...]
    findings: tuple[Group, ...]
    #: What was not proven, as one line.
    not_proven: str
    #: What was read: headers alone, or more.
    read: str
    grid: Grid | None = None
    #: What is elsewhere, and the commands that bring it.
    elsewhere: str = ""
    tensors: tuple[Tensor, ...] = ()
    families: tuple[Family, ...] = ()
    #: Bytes by dtype and role: ``{role: {dtype: (tensors, bytes)}}``.
    sizes: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    numbers: Numbers | None = None
    comparison: Comparison | None = None
    provenance: tuple[tuple[str, str], ...] = ()
    #: Files that lie there, of a checkpoint that cannot be opened.
    files: tuple[tuple[str, int], ...] = ()
    #: Why the distributions have no pictures: it says nothing of the checkpoint.
    undrawn: Finding | None = None

    @property
    def errors(self) -> int:
        """How many errors were found."""
        return sum(len(g.findings) for g in self.findings if g.severity == "error")

    @property
    def warnings(self) -> int:
        """How many warnings."""
        return sum(len(g.findings) for g in self.findings if g.severity == "warning")

    @property
    def all_findings(self) -> list[Finding]:
        """The findings, the worst first, and what the page lacks."""
        found = [finding for group in self.findings for finding in group.findings]
        return found if self.undrawn is None else [*found, self.undrawn]

    @property
    def has_distributions(self) -> bool:
        """True if numbers of tensors are told."""
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
    """Everything that is to be told of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        against: another one, or what kept it from being opened.
        against_path: how the other one is called.
        stats: read all data for statistics; else headers and manifests alone.
        run: options of an engine run.
        bar: how far it is.

    Raises:
        FastshardError: if the data cannot be read at all.
    """
    plan = checkpoint._plan
    findings = list(plan.findings)
    document, about = _manifest(checkpoint)
    findings += about
    numbers: Numbers | None = None
    hashes: Mapping[str, str] = {}
    if stats:
        tensors, hashes, found = _read(plan, run, bar, "reading")
        findings += found
        numbers = Numbers("read for this report", tensors, read=True)
    elif document is not None and (recorded := _recorded(document, plan)):
        numbers = Numbers(f"as {manifests.MANIFEST_NAME} recorded them; not read again", recorded)
    comparison = None
    if against is not None:
        other = _Side(against_path, against)
        own = _Side("", checkpoint, document, numbers.tensors if numbers else {}, hashes)
        comparison = _compared(own, other, stats, run, bar)
    findings = checkpoint.opened.gate.judged(dict.fromkeys(findings))
    grouped = set(plan.findings)
    each = [*plan.each, *(f for f in findings if f not in grouped)]
    echoes = plan.core.findings()
    provable = plan.source.provable
    missing = absent(findings, checkpoint.roots)
    read = "headers and all data" if stats else "headers alone: no value of a tensor was read"
    families = _families(plan)
    broken = any(f.severity == "error" for f in findings)
    return Report(
        paths=tuple(checkpoint.listing.given()),
        version=_core.__version__,
        verdict="broken" if broken else "ok" if provable else "unproven",
        facts=_facts(checkpoint, plan),
        findings=_groups(findings),
        not_proven="; ".join(not_proven(findings)),
        read=read,
        grid=grid(checkpoint, each, echoes),
        elsewhere=missing.told() if missing else "",
        tensors=(*_tensors(plan), *_lacking(plan, [*findings, *echoes])),
        families=families,
        sizes=_sizes(families),
        numbers=numbers,
        comparison=comparison,
        provenance=_provenance(document),
    )


#: Files listed of a checkpoint that cannot be opened.
_LISTED = 500


def unopened(paths: Sequence[StrPath], error: FastshardError) -> Report:
    """What can be told of paths at which no checkpoint can be opened: why, and what lies there."""
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
        facts=(("files", f"{len(files):,} ({human(sum(size for _, size in files))})"),),
        findings=_groups(error.findings),
        not_proven="anything: what lies here could not be opened as a checkpoint",
        read="names of files, and as much of their headers as could be",
        files=tuple(sorted(files)[:_LISTED]),
    )


# --- what it is


def _facts(checkpoint: Checkpoint, plan: Plan) -> tuple[tuple[str, str], ...]:
    summary = plan.summary
    size = sum(f["size"] for f in checkpoint.files)
    degrees = " x ".join(f"{k} {v}" for k, v in checkpoint.topology.items()) or "not sharded"
    rows = [
        ("framework", checkpoint.framework + (f" ({checkpoint.family})" if checkpoint.family else "")),
        ("step", checkpoint.step or ""),
        ("topology", degrees),
        ("files", f"{len(checkpoint.files):,} ({human(size)})"),
        ("tensors", f"{summary['outputs']:,} whole, from {summary['stored_tensors']:,} stored"),
        ("parameters", f"{summary['parameters']:,}"),
        ("dtypes", ", ".join(f"{d} x {n:,} ({human(b)})" for d, (n, b) in summary["dtypes"].items())),
        ("axes", ", ".join(f"{k}={v}" for k, v in summary["axes"].items())),
    ]
    return tuple((key, value) for key, value in rows if value)


def _groups(findings: Iterable[Finding]) -> tuple[Group, ...]:
    """Findings by code, errors first; within them those that stop most."""
    order = {"error": 0, "warning": 1, "note": 2}
    sorted_ = sorted(findings, key=lambda f: order.get(f.severity, 3))
    by_code: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted_:
        by_code.setdefault((finding.severity, finding.code), []).append(finding)
    return tuple(
        Group(
            code,
            CODES[code].title if code in CODES else "",
            severity,
            CODES[code].explanation if code in CODES else "",
            tuple(group),
            tuple(dict.fromkeys(f.help for f in group if f.help)),
        )
        for (severity, code), group in by_code.items()
    )


# --- the tensors


def _tensors(plan: Plan) -> list[Tensor]:
    return [
        Tensor(name, dtype, tuple(shape), size, pieces) for name, dtype, shape, size, pieces in plan.outputs
    ]


def _lacking(plan: Plan, findings: Iterable[Finding]) -> list[Tensor]:
    """Tensors that are not whole, by what was found of them."""
    lacks: dict[str, str] = {}
    for finding in findings:
        if finding.severity == "error" and finding.tensor and finding.tensor not in plan.index:
            where = f" ({finding.rank})" if finding.rank else ""
            lacks.setdefault(finding.tensor, f"{finding.code}: {finding.message}{where}")
    return [Tensor(name, lacks=why) for name, why in lacks.items()]


def _families(plan: Plan) -> tuple[Family, ...]:
    """All tensors, a line for those that are alike: tens of thousands are a few dozen."""
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
    """A name with ranges in the places of its numbers."""
    left = iter(ranges)
    if not ranges:
        return name
    words = [
        next(left) if part.isdecimal() and len(part) < 10
        else f"{part.rpartition('_')[0]}_{next(left)}" if None in parts_of(part)[0]
        else part
        for part in name.split(".")
    ]  # fmt: skip
    return ".".join(words)


def _sizes(families: Iterable[Family]) -> dict[str, dict[str, tuple[int, int]]]:
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for family in families:
        of_role = sizes.setdefault(family.role, {})
        count, total = of_role.get(family.dtype, (0, 0))
        of_role[family.dtype] = (count + family.count, total + family.nbytes)
    return dict(sorted(sizes.items(), key=lambda item: -sum(b for _, b in item[1].values())))


# --- manifests


def _manifest(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The manifest that lies there, and what its list of files says by names and sizes alone."""
    try:
        path = manifests.beside(checkpoint)
        document = None if path is None else manifests.read(path)
    except FastshardError as error:
        return None, [_weaker(f) for f in error.findings]
    if document is None or checkpoint.listing.single:
        return document, []
    have = {file.path: file.size for file in checkpoint.listing.files}
    found = []
    for file in manifests.tensor_files(document):
        name, size = str(file["name"]), file.get("size")
        if name not in have:
            found.append(
                Finding.of(
                    "FS101", "missing file", file=name, expected=f"{manifests.MANIFEST_NAME} names it", got="no such file",
                    help="copy it from where the manifest was made",
                )
            )  # fmt: skip
        elif size is not None and have[name] != size:
            found.append(
                Finding.of(
                    "FS308", "the file has another size than its manifest says", file=name, expected=f"{size} bytes",
                    got=f"{have[name]} bytes", help="restore the file from a good copy",
                )
            )  # fmt: skip
    told = {f.file for f in checkpoint.findings if f.severity == "error"}
    return document, [f for f in found if f.file not in told]


def _weaker(finding: Finding) -> Finding:
    """A manifest that cannot be read says nothing against the checkpoint."""
    return finding.replace(severity="warning")


def _recorded(document: dict[str, Any], plan: Plan) -> dict[str, TensorStats]:
    """The statistics in a manifest, of those tensors that it has as they are."""
    recorded = {}
    named = Counter(t["name"] for t in document["tensors"])
    # Of shards, which may have the whole's name, they are something else.
    entries = {t["name"]: t for t in document["tensors"] if t.get("stats") and named[t["name"]] == 1}
    for name, dtype, shape, _, _ in plan.outputs:
        entry = entries.get(name)
        if entry is not None and (entry.get("dtype"), entry.get("shape")) == (dtype, shape):
            try:
                recorded[name] = TensorStats.from_dict(dtype, shape, entry["stats"])
            except (AttributeError, KeyError, TypeError, ValueError):
                return {}  # Somebody else's, or edited: what is half told misleads.
    return recorded if all(map(_sound, recorded.values())) else {}


def _sound(s: TensorStats) -> bool:
    """False for what no statistics can be: :func:`fastshard.verify` says so, a picture must not be made of it."""
    counts = (s.count, s.zeros, s.nan, s.inf, *s.histogram)
    if len(s.histogram) != 64 or not all(type(n) is int and n >= 0 for n in counts):
        return False
    figures = (s.min, s.max, s.mean, s.std)
    numbers = all(f is None or (type(f) in (int, float) and abs(f) < float("inf")) for f in figures)
    return numbers and sum(counts[1:]) == s.count


#: Sources that a report names.
_SOURCES = 20


def _provenance(document: dict[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if document is None:
        return ()
    sources = document.get("sources") or []
    named = ", ".join(str(s.get("path")) for s in sources[:_SOURCES] if isinstance(s, dict))
    more = f" and {len(sources) - _SOURCES:,} more" if len(sources) > _SOURCES else ""
    made = document.get("provenance") or {}
    parts = [p for p in made.get("parts", ()) if isinstance(p, dict)]
    accepted = [f for f in document.get("findings") or [] if isinstance(f, dict)]
    ops: dict[str, int] = {}
    for of_tensor in (document.get("value_ops") or {}).values():
        for op in of_tensor if isinstance(of_tensor, list) else [of_tensor]:
            word = str(op.get("op", op)) if isinstance(op, dict) else str(op)
            ops[word] = ops.get(word, 0) + 1
    rows = [
        ("made by", str(document.get("tool", ""))),
        ("kind", str(document.get("kind", ""))),
        ("plan", str(document.get("plan") or "")),
        ("sources", f"{len(sources):,} files: {named}{more}" if sources else ""),
        ("their topology", ", ".join(f"{k} {v}" for k, v in (document.get("topology") or {}).items())),
        ("value ops", ", ".join(f"{op} x {n:,}" for op, n in ops.items())),
        ("run", str(made.get("run", ""))),
        ("made on", ", ".join(f"{p.get('host')} ({human(p.get('bytes') or 0)})" for p in parts)),
        ("warnings and notes then", "; ".join(f"{f.get('code')}: {f.get('message')}" for f in accepted[:_SOURCES])),
        ("not proven then", str(document.get("not_proven", ""))),
    ]  # fmt: skip
    return tuple((key, value) for key, value in rows if value)


# --- numbers


def _read(
    plan: Plan, run: RunOptions, bar: Progress, title: str
) -> tuple[dict[str, TensorStats], dict[str, str], list[Finding]]:
    """Statistics and hashes of a plan's outputs, and what came up while they were read."""
    if not plan.outputs:
        return {}, {}, []
    try:
        findings, hashes, found = plan.core.check({**run, "stats": "full"}, bar.phase(title))
    except _core.CoreError as error:
        # A page about it is what is asked for.
        return {}, {}, from_core(error).findings
    tensors = {
        name: TensorStats.from_dict(dtype, shape, found[name])
        for name, dtype, shape, _, _ in plan.outputs
        if name in found
    }
    return tensors, hashes, findings


# --- before against after


class _Side:
    """One of two checkpoints that are compared."""

    def __init__(
        self,
        path: str,
        opened: Checkpoint | FastshardError,
        document: dict[str, Any] | None = None,
        numbers: Mapping[str, TensorStats] | None = None,
        hashes: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.opened = opened
        self.document = document
        self.numbers = numbers or {}
        self.hashes = hashes or {}

    def recorded(self, plan: Plan) -> Mapping[str, str]:
        """Hashes by the manifest that lies there, of tensors that it has under the plan's names."""
        entries = {t["name"]: t for t in (self.document or {}).get("tensors", ())}
        return {
            name: entries[name]["blake3"]
            for name, dtype, shape, _, _ in plan.outputs
            if name in entries and (entries[name].get("dtype"), entries[name].get("shape")) == (dtype, shape)
        }


def _compared(own: _Side, other: _Side, stats: bool, run: RunOptions, bar: Progress) -> Comparison:
    if isinstance(other.opened, FastshardError):
        return Comparison(other.path, "nothing: it cannot be opened", refused=tuple(other.opened.findings))
    assert isinstance(own.opened, Checkpoint)
    other.document, _ = _manifest(other.opened)
    plans = [own.opened._plan, other.opened._plan]
    named = "their own names"
    if not plans[0].index.keys() & plans[1].index.keys():
        named = "the names that they have in their Hugging Face layout"
        try:
            plans = [make_plan(side.opened.opened, Request("hf")) for side in (own, other)]  # type: ignore[union-attr]
        except FastshardError as error:
            return Comparison(
                other.path, "nothing: they have no names in common", refused=tuple(error.findings)
            )
        refused = tuple(f for plan in plans for f in plan.findings if f.severity == "error")
        if refused:
            return Comparison(other.path, "nothing: they cannot be brought to common names", refused=refused)
    after, before = plans
    sides = [(own, after), (other, before)]
    hashes, numbers = [], []
    for side, plan in sides:
        same = isinstance(side.opened, Checkpoint) and plan is side.opened._plan
        if stats and not (same and side.hashes):
            tensors, hashed, found = _read(
                plan, run, bar, f"reading {side.path or 'again, under common names'}"
            )
            if any(f.severity == "error" for f in found):
                return Comparison(other.path, "nothing: not all of it can be read", refused=tuple(found))
            side.numbers, side.hashes = tensors, hashed
        elif not stats:
            side.hashes = side.recorded(plan)
            side.numbers = _recorded(side.document, plan) if side.document is not None else {}
        hashes.append(side.hashes)
        numbers.append(side.numbers)
    mine, theirs = (
        {name: (dtype, tuple(shape)) for name, dtype, shape, _, _ in plan.outputs} for plan in plans
    )
    common = mine.keys() & theirs.keys()
    changes, equal, unknown = _changes((mine, theirs), hashes, numbers)
    if stats:
        extent = "names, dtypes, shapes, and the hash of every tensor: all data of both was read"
    elif unknown == len(common):
        extent = "names, dtypes and shapes, by headers; values were not compared (--stats reads them)"
    else:
        extent = (
            "names, dtypes and shapes, by headers; values by the hashes in their manifests, as they were when these were "
            "made" + (f"; of {unknown:,} tensors no hash is known" if unknown else "")
        )
    return Comparison(
        other.path, f"{extent}; under {named}", changes, len(common), equal,
        {n: numbers[1][n] for n in common if n in numbers[1]}, {n: numbers[0][n] for n in common if n in numbers[0]},
    )  # fmt: skip


#: Dtype and shape of each tensor.
_Forms = dict[str, tuple[str, tuple[int, ...]]]


def _changes(
    forms: tuple[_Forms, _Forms],
    hashes: Sequence[Mapping[str, str]],
    numbers: Sequence[Mapping[str, TensorStats]],
) -> tuple[tuple[Change, ...], int, int]:
    """What differs, by names; and of how many tensors the bytes are equal, and of how many they are not known."""
    mine, theirs = forms
    changes = [
        Change(n, "only in the other", _form(theirs[n]), "absent") for n in theirs.keys() - mine.keys()
    ]
    changes += [Change(n, "only here", "absent", _form(mine[n])) for n in mine.keys() - theirs.keys()]
    equal, unknown = 0, 0
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            what = "shape" if mine[name][1] != theirs[name][1] else "dtype"
            changes.append(Change(name, what, _form(theirs[name]), _form(mine[name])))
        elif name not in hashes[0] or name not in hashes[1]:
            unknown += 1
        elif hashes[0][name] == hashes[1][name]:
            equal += 1
        else:
            changes.append(Change(name, "values", _told(numbers[1].get(name)), _told(numbers[0].get(name))))
    return tuple(sorted(changes, key=lambda c: c.name)), equal, unknown


def _form(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"


def _told(s: TensorStats | None) -> str:
    if s is None:
        return "other bytes"
    return f"mean {s.mean:.4g}, std {s.std:.4g}" if s.mean is not None and s.std is not None else "no numbers"


def by_layer(tensors: Mapping[str, TensorStats]) -> dict[str, list[tuple[int, TensorStats]]]:
    """Statistics by role and layer; roles that have a single layer say nothing over layers and are left out."""
    roles: dict[str, list[tuple[int, TensorStats]]] = {}
    for name, s in tensors.items():
        layer = layer_of(name)
        if layer is not None and s.std is not None:
            roles.setdefault(role_of(name), []).append((layer, s))
    return {role: sorted(of, key=lambda e: e[0]) for role, of in roles.items() if len({n for n, _ in of}) > 1}
