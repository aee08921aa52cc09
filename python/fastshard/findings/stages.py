"""Judge what was found: the one list of what drops, merges or reweighs the findings of a plan, in the order
in which it is done."""

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


#: What helps against a warning that a manifest inside the checkpoint accepts.
TRUST = "pass a manifest that you trust to silence this: it was accepted when the checkpoint was written"
_WEIGHTS = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Facts:
    """What the stages know of a checkpoint, and of what is asked of it. Nothing changes it."""

    #: What accounts for others.
    causes: Causes = field(default_factory=Causes)
    #: What was found before anything was planned: causes are among it, and nothing accounts for it.
    known: frozenset[Finding] = frozenset()
    #: All that the core says of single tensors, with their ranks.
    echoes: Sequence[Finding] = ()
    #: Tensors that are missing, incomplete or unreadable, with their elements where these are known.
    lost: Mapping[str, int | None] = field(default_factory=dict)
    #: Tensors that can be used; None where the names are a target's.
    usable: Collection[str] | None = None
    #: Parts of the model that its config promises, and the lost tensors that may be of one.
    parts: Sequence[PromisedPart] = ()
    lost_of_parts: Collection[str] = ()
    #: Names that the checkpoint's own index has.
    index: Collection[str] = ()
    #: Who lists what the model's class builds, where that is transformers.
    listed_by: str | None = None
    #: The files that are there.
    rank_files: Sequence[RankFile] = ()
    gate: Gate = field(default_factory=Gate)
    #: True if patterns choose tensors.
    is_narrowed: bool = False
    #: Says what a pattern that takes nothing may be meant for.
    explain_selection: Callable[[Finding], Finding] = lambda finding: finding
    #: True where tensors are left out for one reason each, as the rules of an optimizer's state do.
    has_reasons: bool = False
    #: What was found by reading the data.
    read: frozenset[Finding] = frozenset()
    #: Finds what errors about files account for.
    find_causes: Callable[[Sequence[Finding]], Causes] = lambda findings: Causes()
    #: What a manifest inside the checkpoint alone accepts.
    untrusted: Collection[str] = ()


def drop_consequences(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Drop what a file that is lost, or an error about all of the checkpoint, accounts for."""
    return [f for f in findings if f in facts.known or facts.causes.of(f) is None]


def explain_empty_selection(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Say why nothing is left to write: a pattern takes nothing, or the files hold nothing, which an error
    may say already."""
    if facts.is_narrowed:
        return [facts.explain_selection(f) if f.code == codes.USAGE else f for f in findings]
    if any(f.severity == "error" for f in facts.known):
        return [f for f in findings if f.code != codes.USAGE or f in facts.known]
    help = "copy the files again: they hold no tensors"
    return [f.replace(help=help) if f.code == codes.USAGE and f not in facts.known else f for f in findings]


def merge_reasons(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge notes about tensors that are left out for one reason: a train state has two moments of each
    weight."""
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
    """Give each error the tensors that cannot be used because of it."""
    return effects.attach_effects(findings, facts.causes, facts.lost, facts.usable, facts.echoes)


def apply_gate(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Weigh warnings and notes as the caller asks: ``--fail-on``, ``--error``, ``--ignore``."""
    return facts.gate.evaluate(findings)


def merge_parts(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge what is missing of one part that the config promises."""
    return merge_by_part(findings, facts.parts, facts.lost_of_parts, facts.index, facts.listed_by)


def merge_causes(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of one cause: files of a rank, layers, files of which the same is said."""
    return group_by_cause(findings, facts.rank_files)


def explain_by_copies(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Name files that hold others' data first, and drop what these account for."""
    headers = [f for f in findings if f not in facts.read]
    return drop_copied(headers, [f for f in findings if f in facts.read], facts.find_causes)


def distrust_manifest(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Make what a manifest inside the checkpoint alone accepts a warning that a gate may raise: whoever wrote
    the checkpoint wrote the manifest."""
    accepted = {f"accept {word}" for word in facts.untrusted}
    return [
        f.replace(decided=None, help=TRUST, run=["--expect MANIFEST"]) if f.decided in accepted else f
        for f in findings
    ]


def sort_by_severity(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Sort errors before warnings and notes, and drop repetitions."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _WEIGHTS[finding.severity])


@dataclass(frozen=True)
class Stage:
    """One step of the judgement."""

    name: str
    apply: Callable[[Facts, Sequence[Finding]], list[Finding]]
    #: Why it comes after the one before it.
    reason: str = ""


STAGES = (
    Stage("consequences", drop_consequences),
    Stage(
        "selection", explain_empty_selection, "an error that is no consequence explains why nothing is left"
    ),
    Stage("reasons", merge_reasons, "its place is free: these notes have no effect and explain nothing"),
    Stage("effects", attach_effects, "only what stays has an effect"),
    Stage("gate", apply_gate, "what the gate makes an error is no cause of others, so that it has no effect"),
    Stage("parts", merge_parts, "the gate knows codes, and what is merged has one of them"),
    Stage("causes", merge_causes, "a layer of a part is none of the layers that are missing in a row"),
)
#: What is made of the findings of a plan and those of its data together.
READ_STAGES = (
    Stage("copies", explain_by_copies),
    Stage("trust", distrust_manifest, "an accepted copy that explains what is missing is an error already"),
    Stage("gate", apply_gate, "what is not trusted is a warning, which the gate may raise"),
    Stage("order", sort_by_severity, "the gate changes severities"),
)
#: The stage after which each file has a finding of its own still.
_LAST_OF_EACH = "gate"


@dataclass(frozen=True)
class Judgement:
    """What the stages make of findings."""

    #: One for each cause.
    findings: list[Finding]
    #: One for each file and tensor, as they count.
    each: list[Finding]


def judge(facts: Facts, findings: Sequence[Finding], stages: Sequence[Stage] = STAGES) -> Judgement:
    """Run all stages.

    Args:
        facts: what is known.
        findings: all that was found.
        stages: the list.

    Raises:
        FastshardError: ``FS515`` if an error is to be ignored.
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
