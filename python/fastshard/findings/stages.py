"""Stages that drop, merge or reweigh findings: two lists, in the order in which the stages run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..common import codes
from ..common.errors import Finding
from ..common.gate import Gate
from ..common.log import is_logged, log
from ..common.records import dataclass, field
from . import effects
from .causes import Causes
from .copied_files import drop_copied
from .grouping import RankFile, group_by_cause
from .missing_parts import PromisedPart, merge_by_part

__all__ = ["READ_STAGES", "STAGES", "TRUST", "Facts", "Judgement", "Stage", "judge"]


#: Advice for a warning about a finding that a manifest inside the checkpoint accepts.
TRUST = "pass a manifest that you trust to silence this: it was accepted when the checkpoint was written"
_WEIGHTS = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Facts:
    """The facts that stages need besides the findings: about the checkpoint, and about the request."""

    #: The findings that explain others.
    causes: Causes = field(default_factory=Causes)
    #: Findings from before the plan. No stage drops one as a consequence, because they include the causes.
    known: frozenset[Finding] = frozenset()
    #: The core's findings about single tensors before merging, which name the ranks of an effect.
    echoes: Sequence[Finding] = ()
    #: Missing, incomplete and unreadable tensors, with their numbers of elements where these are known.
    lost: Mapping[str, int | None] = field(default_factory=dict)
    #: Tensors that can be used; None if the plan has the target's names, which are not those of the files.
    usable: Collection[str] | None = None
    #: Parts of the model that its config promises.
    parts: Sequence[PromisedPart] = ()
    #: Lost tensors that may belong to one of these parts.
    lost_of_parts: Collection[str] = ()
    #: Tensor names in the checkpoint's index.
    index: Collection[str] = ()
    #: The version of transformers that lists the tensors of the model's class; None if nothing lists them.
    listed_by: str | None = None
    #: The files that exist, with their ranks.
    rank_files: Sequence[RankFile] = ()
    #: ``--fail-on``, ``--error`` and ``--ignore``.
    gate: Gate = field(default_factory=Gate)
    #: True if ``--include`` or ``--exclude`` chooses tensors.
    is_narrowed: bool = False
    #: Adds a suggestion for a pattern without matches.
    explain_selection: Callable[[Finding], Finding] = lambda finding: finding
    #: True if rules omit tensors with a reason, as the rules for optimizer state do.
    has_reasons: bool = False
    #: Findings from reading the data.
    read: frozenset[Finding] = frozenset()
    #: Returns the causes among errors about files.
    find_causes: Callable[[Sequence[Finding]], Causes] = lambda findings: Causes()
    #: Words of ``--accept`` that only a manifest inside the checkpoint states.
    untrusted: Collection[str] = ()


def drop_consequences(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings that a lost file, or an error about the complete checkpoint, explains."""
    return [f for f in findings if f in facts.known or facts.causes.of(f) is None]


def explain_empty_selection(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Explain why there is nothing to write: no name matches a pattern, or the files contain no tensors.

    The stage drops the finding if an error from before the plan already reports this.
    """
    if facts.is_narrowed:
        return [facts.explain_selection(f) if f.code == codes.USAGE else f for f in findings]
    if any(f.severity == "error" for f in facts.known):
        return [f for f in findings if f.code != codes.USAGE or f in facts.known]
    help = "copy the files again: they hold no tensors"
    return [f.replace(help=help) if f.code == codes.USAGE and f not in facts.known else f for f in findings]


def merge_reasons(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge notes about tensors that are omitted for the same reason, e.g. two moments of each weight."""
    if not facts.has_reasons:
        return list(findings)
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.code == codes.IGNORED and finding not in facts.known:
            groups.setdefault(finding.message, []).append(finding)
    merged: dict[Finding, Finding | None] = {}
    for reason, group in groups.items():
        merged |= dict.fromkeys(group, None)
        one = group[0] if len(group) == 1 else group[0].replace(message=f"{len(group)} tensors: {reason}")
        merged[group[0]] = one
    return [kept for f in findings if (kept := merged.get(f, f)) is not None]


def attach_effects(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Add to each error the tensors that cannot be used because of it."""
    return effects.attach_effects(findings, facts.causes, facts.lost, facts.usable, facts.echoes)


def apply_gate(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Change the severity of warnings and notes as ``--fail-on``, ``--error`` and ``--ignore`` request."""
    return facts.gate.evaluate(findings)


def merge_parts(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings about missing tensors of one part that the config promises, such as an MTP layer."""
    return merge_by_part(findings, facts.parts, facts.lost_of_parts, facts.index, facts.listed_by)


def merge_causes(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of one cause: missing files of a rank, consecutive layers, files with the same fault."""
    return group_by_cause(findings, facts.rank_files)


def explain_by_copies(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Put findings about copied files first, and drop the findings that they explain."""
    headers = [f for f in findings if f not in facts.read]
    return drop_copied(headers, [f for f in findings if f in facts.read], facts.find_causes)


def distrust_manifest(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Undo the acceptance of findings that only a manifest inside the checkpoint accepts, because the
    checkpoint's author wrote it.

    The finding stays a warning, and the gate may raise it to an error again.
    """
    accepted = {f"accept {word}" for word in facts.untrusted}
    return [
        f.replace(decided=None, help=TRUST, run=["--expect MANIFEST"]) if f.decided in accepted else f
        for f in findings
    ]


def sort_by_severity(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Sort errors before warnings before notes, and drop duplicates."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _WEIGHTS[finding.severity])


@dataclass(frozen=True)
class Stage:
    """A function that drops, merges or reweighs findings, and the reason for its place."""

    name: str
    apply: Callable[[Facts, Sequence[Finding]], list[Finding]]
    #: The reason why it runs after the previous stage, or, for the first stage, why it runs first.
    reason: str


#: The stages for the findings of a plan.
STAGES = (
    Stage("consequences", drop_consequences, "the other stages work on causes alone"),
    Stage("selection", explain_empty_selection, "a consequence is no reason for an empty plan"),
    Stage("reasons", merge_reasons, "the place is free: these notes have no effect and explain nothing"),
    Stage("effects", attach_effects, "a finding that was dropped has no effect"),
    Stage("gate", apply_gate, "a warning that the gate makes an error makes no tensor unusable"),
    Stage("parts", merge_parts, "--ignore names codes, and a merged finding keeps one code of several"),
    Stage("causes", merge_causes, "the layers of a promised part do not count among consecutive layers"),
)
#: The stages for a run that reads the data: for its findings and for the plan's, which have passed `STAGES`.
#: The gate decides each finding only once, so it may run again.
READ_STAGES = (
    Stage("copies", explain_by_copies, "copied files explain other findings, so these need no more work"),
    Stage(
        "trust",
        distrust_manifest,
        "a copied file that explains missing data is an error by now, and no acceptance is undone for it",
    ),
    Stage(
        "gate", apply_gate, "a finding that is not accepted any more is a warning, which the gate may raise"
    ),
    Stage("order", sort_by_severity, "the gate changes severities"),
)
#: The stage before which findings about files or layers are not merged.
_LAST_OF_EACH = "gate"


@dataclass(frozen=True)
class Judgement:
    """The findings after all stages."""

    #: A finding for each cause.
    findings: list[Finding]
    #: A finding for each file and tensor, for counting; only from ``STAGES``.
    each: list[Finding]


def judge(facts: Facts, findings: Sequence[Finding], stages: Sequence[Stage] = STAGES) -> Judgement:
    """Run stages one after another.

    Args:
        facts: facts that the stages need besides the findings.
        findings: the findings of a plan, or of a run that reads the data.
        stages: ``STAGES`` or ``READ_STAGES``.

    Raises:
        FastshardError: ``FS515`` if ``--ignore`` names an error.
    """
    each: list[Finding] = []
    for stage in stages:
        result = stage.apply(facts, findings)
        if is_logged("findings"):
            _log_changes(stage, findings, result)
        findings = result
        if stage.name == _LAST_OF_EACH:
            each = result
    return Judgement(list(findings), each)


def _log_changes(stage: Stage, before: Sequence[Finding], after: Sequence[Finding]) -> None:
    gone, new = set(before) - set(after), set(after) - set(before)
    for finding in gone:
        log("findings", "stage %s takes away %s %s", stage.name, finding.code, finding)
    for finding in new:
        log("findings", "stage %s gives %s %s", stage.name, finding.code, finding)
