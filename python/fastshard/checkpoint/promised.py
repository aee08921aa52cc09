"""Tensors that the config of a checkpoint promises according to the installed transformers, if no layout
table lists them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, replace
from ..findings.proof import listed_by
from ..layouts.declaration import is_state
from ..layouts.wrapper_names import wrapped
from ..models.config_json import QUANTISED
from ..sources.hf_config import AUTO_MAP
from .drafting import Merged, Opened, Promised

if TYPE_CHECKING:
    from ..expected.expected_list import ExpectedTensors
    from ..expected.from_transformers import LoadReport
    from ..expected.promised_parts import Part
    from ..expected.reference import Reference
    from ..expected.reference_names import Side
    from ..models.quantised.forms import Weight
    from ..targets.request import Request

__all__ = ["beside_list", "compare_with_list", "refuse_missing_code", "refused_names", "with_promised"]

#: Bytes of memory that building a model takes, mostly for the import of torch and transformers.
_NEEDED = 1 << 30


def with_promised(opened: Opened, only_kept: bool = False, for_hf: bool = False) -> Opened:
    """Attach the list of what the config promises to an opened checkpoint.

    The checkpoint is unchanged if the list is not wanted, or if another source states more.

    Args:
        opened: the checkpoint.
        only_kept: True to use only a cached list.
        for_hf: True for a result with the names on disk, which the table of a class with another head does
            not list.
    """
    if not _is_wanted(opened, for_hf):
        return opened
    # What few checkpoints need is imported for these.
    from ..expected.from_transformers import class_name, list_for

    config, file = opened.source.model.config or {}, opened.source.model.config_file
    if class_name(config) is None:
        return opened

    def listing() -> ExpectedTensors:
        if not only_kept and (free := _available()) is not None and free < _NEEDED:
            raise FastshardError.of(
                codes.UNSUPPORTED, "transformers was not used: less than 1 GiB of memory is free"
            )
        return list_for(config, str(file or "config.json"), only_kept=only_kept)

    promised = Promised(listing)
    return opened if only_kept and promised.listed is None else replace(opened, promised=promised)


def _is_wanted(opened: Opened, for_hf: bool) -> bool:
    """Return True for a complete Hugging Face model whose config names a class and that no table describes.

    For a model with towers, a table describes only the text model.
    """
    model = opened.source.model
    config = model.config or {}
    return (
        opened.asks_transformers
        and opened.promised is None
        and opened.reference is None
        and (not opened.is_described or (for_hf and model.headless is not None))
        and not model.is_part
        and not opened.quantised.is_unstated
        and bool(model.hf_names or model.no_table)
        and isinstance(config.get("model_type"), str)
        # Of a form that is known the list tells, as it is without that.
        and (bool(opened.quantised.weights) or not any(config.get(key) for key in QUANTISED))
    )


def _available() -> int | None:
    """Return the available memory of the system in bytes; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def compare_with_list(
    opened: Opened, request: Request, merged: Merged, named: list[str | None]
) -> tuple[list[Finding], str]:
    """Compare the tensors with the list; return findings, and the reason if nothing can be concluded.

    The names of the list are those on disk or those in memory. If nothing differs, the findings include one
    that states this (`FS109`; its evidence names the source of the list). An unexpected tensor is a note,
    because a load ignores it. A loader knows more spellings than a list, so a tensor is missing only if
    neither finds it.
    """
    listed = opened.listed
    if listed is None or request.is_narrowed:
        return [], ""
    from ..expected.from_config import holds_embedding
    from ..expected.from_transformers import try_load
    from ..expected.promised_parts import promised as parts_of
    from .loaded_names import is_named_as_listed, not_loaded, severity_of
    from .reference_sides import judged_of
    from .tied_tensors import find_differing_ties

    called = f"{listed.model_class} of transformers {listed.transformers}"
    model = opened.source.model
    tensors = merged.draft.full_tensors()
    if (changed := wrapped(tensors)) is not None:
        return [], f"{called} was not used: {changed[1]} has changed names ({changed[0]})"
    # With a dtype they are written as their values, under the names that these have.
    kept = () if merged.core_request.coded else opened.quantised.weights
    stored_as = {name: names for weight in kept for name, names in weight.stored_as}
    try:
        spelling = _choose_spelling(opened, request, merged, listed, called, stored_as)
        findings = judged_of(spelling.sides, spelling.reference, request, named)
    except FastshardError as error:
        return [], f"{called}: {error.findings[0].message}"
    on_disk = spelling.on_disk
    shapes = {name: stored for name, stored in tensors.items() if not is_state(name)}
    partial = not model.saved_whole and not holds_embedding(shapes)
    # Where none of the list is missing it is no part, whatever its embedding is called.
    partial = partial and any(f.is_a("missing_tensor") for f in findings)
    findings = [_counted(f, shapes if partial else None) for f in findings]
    findings += _misshapen(opened.quantised.weights, listed, called)
    findings += find_differing_ties(called, listed, model.config or {}, opened, merged, shapes)
    # What the config promises besides is no surprise.
    parts = parts_of(model.config or {})
    findings = [
        f
        for f in findings
        if f.severity != "note" or f.code != codes.UNKNOWN_TENSOR or not _is_of(parts, f.tensor)
    ]
    wrong = [f for f in findings if f.severity == "error"]
    count = len(spelling.reference.roster or ())
    others = listed.only_in_memory & spelling.own_names
    # A further copy of a tied tensor is no other name.
    has_copies_only = bool(others) and others <= {name for group in listed.ties for name in group}
    if not wrong and not on_disk and request.to == "hf" and not has_copies_only:
        return [_names_in_memory(called, listed, list(tensors), model.config_file)], ""
    has_others = any(f.code == codes.UNKNOWN_TENSOR for f in findings)
    if has_others and listed.quantised:
        # Quantisers take modules apart, and name them as they like.
        return [], f"{called} has other names than the quantised model"
    if "auto_map" in (model.config or {}) and wrong:
        # The list is of another class that is called so.
        return [], f"{called} differs, and the checkpoint may need the model's own code (auto_map)"
    is_odd = has_others if wrong else not is_named_as_listed(listed, shapes, stored_as)
    # Where an error is known already, what is missing follows from it.
    if kept or partial or named or "auto_map" in (model.config or {}) or not is_odd:
        return _concluded(findings, called, count, "" if on_disk else "by their names in memory")
    # Some names are others: a loader knows those that earlier versions and other vendors spelled.
    stored = [(name, kind, whole) for name, (whole, kind) in shapes.items()]
    report = try_load(model.config or {}, stored)
    if report is not None and not report.missing:
        return [_proven(called, len(stored), "as from_pretrained reads their names")], ""
    severity = severity_of(request, merged.source.model)
    odd = not_loaded(called, listed, shapes, report, severity, allows_headless=not request.writes)
    if wrong and not _accounts_for(odd, wrong, listed, shapes, report):
        return findings, ""
    return odd, ""


@dataclass(frozen=True)
class _Spelling:
    """The names of a list, on disk or in memory, that fit a checkpoint best."""

    sides: Sequence[Side]
    reference: Reference
    on_disk: bool
    #: The model's own names of the checkpoint's tensors.
    own_names: set[str]


def _choose_spelling(
    opened: Opened,
    request: Request,
    merged: Merged,
    listed: ExpectedTensors,
    called: str,
    stored_as: Mapping[str, Sequence[str]],
) -> _Spelling:
    """Choose the names of a list that a checkpoint uses: those on disk, or those in memory.

    Args:
        called: the name of the list in messages.
        stored_as: the names of the tensors that each quantised weight is stored as.
    """
    from ..expected.expected_list import roster_of
    from ..expected.names_on_disk import are_in_memory
    from ..expected.reference import Reference
    from .reference_sides import fitting, own_names

    model = opened.source.model
    fits = []
    for in_memory in (False, True):
        roster = roster_of(listed, in_memory, stored_as)
        # Which names there are is asked: what would write it under others is not.
        as_it_is = replace(listed, made={})
        reference = Reference(called, roster, model.config, model.config_file, listed=as_it_is)
        at = replace(opened, reference=reference, asks_transformers=False)
        fits.append((*fitting(at, reference, request, merged), not in_memory, reference))
    # Prefixes that move would make those in memory fit those on disk.
    own = own_names(opened, merged)
    in_memory = are_in_memory(listed, own)
    _, sides, on_disk, reference = max(fits, key=lambda one: (one[0], one[2] is not in_memory))
    return _Spelling(sides, reference, on_disk, own)


def _concluded(findings: list[Finding], called: str, count: int, spelling: str) -> tuple[list[Finding], str]:
    """Add a finding with the proof of a list to its findings, if they contain no errors."""
    if any(f.severity == "error" for f in findings):
        return findings, ""
    rest = [f for f in findings if f.code != codes.NOT_PROVABLE]
    partly = any(f.severity == "warning" for f in findings)
    return (rest if partly else [*rest, _proven(called, count, spelling)]), ""


def _accounts_for(
    odd: list[Finding],
    wrong: list[Finding],
    listed: ExpectedTensors,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    report: LoadReport | None,
) -> bool:
    """Return True if different names explain all errors.

    This is the case if no name matches, or if each missing tensor exists under another name with the same
    shape.
    """
    from .loaded_names import count_ties_once

    if not odd:
        return False
    if any(f.code == codes.UNKNOWN_TENSOR for f in wrong):
        return True
    known = {tensor.name: tensor.shape for tensor in (*listed.tensors, *listed.in_memory)}
    others = Counter(shape for name, (shape, _) in shapes.items() if name not in known)
    lacking = [f.tensor or "" for f in wrong] if report is None else count_ties_once(listed, report.missing)
    missing = Counter(known.get(name) for name in lacking)
    return all(shape is not None and others[shape] >= n for shape, n in missing.items())


def _misshapen(weights: Iterable[Weight], listed: ExpectedTensors, called: str) -> Iterator[Finding]:
    """Yield a finding for each quantised weight whose codes have another shape than in the list."""
    shapes = {t.name: t.shape for t in (*listed.in_memory, *listed.tensors)}
    for weight in weights:
        shape = next((shapes[name] for name, _ in weight.stored_as if name in shapes), None)
        if shape is not None and not weight.form.fits(weight.sizes, shape):
            yield Finding.of(
                codes.SHAPE,
                f"the codes encode a weight {list(weight.sizes.shape)}, and {called} has another shape",
                tensor=weight.codes,
                expected=f"codes of {list(shape)}",
                got=str(list(weight.sizes.shape)),
                help="copy the file that holds it from the original checkpoint",
            )


def _is_of(parts: Iterable[Part], name: str | None) -> bool:
    return name is not None and any(part.holds(name) for part in parts)


def _counted(finding: Finding, part: Collection[str] | None) -> Finding:
    """Set the severity of a finding of the list.

    ``part`` lists the tensors of a trainer that may have saved only what it trained.
    """
    if finding.severity != "error":
        return finding
    if finding.code == codes.UNKNOWN_TENSOR and finding.expected is None:
        return finding.replace(severity="note", help=None)
    if part is not None and finding.is_a("missing_tensor"):
        from ..expected.comparison import LAYER

        layer = LAYER.match(finding.tensor or "")
        near = f"{layer[1]}{layer[2]}." if layer else f"{(finding.tensor or '').rpartition('.')[0]}."
        if finding.code == codes.MISSING_LAYER or not any(name.startswith(near) for name in part):
            return finding.replace(severity="warning")
    return finding


def _proven(called: str, count: int, spelling: str = "") -> Finding:
    return Finding.of(
        codes.NOT_PROVABLE,
        f"checked against {called}: {count:,} tensors" + (f", {spelling}" if spelling else ""),
        severity="note",
        file="config.json",
        evidence=f"{called} ({count:,} tensors)",
    )


def refuse_missing_code(findings: Iterable[Finding], opened: Opened) -> list[Finding]:
    """Return the findings of a conversion for transformers.

    Missing code is an error if transformers has no class for the model.
    """
    from ..expected.from_transformers import UNKNOWN_CLASS

    promised = opened.promised
    is_known = promised is None or promised.listed is not None or UNKNOWN_CLASS not in promised.why
    return [f if is_known or f.evidence != AUTO_MAP else f.replace(severity="error") for f in findings]


def refused_names(opened: Opened, request: Request, merged: Merged) -> list[Finding]:
    """Report a class whose names on disk no table lists: its result would have the names in memory."""
    from ..expected.names_on_disk import are_in_memory
    from .reference_sides import own_names

    listed = opened.listed
    if listed is None or request.to != "hf" or not are_in_memory(listed, own_names(opened, merged)):
        return []
    called = f"{listed.model_class} of transformers {listed.transformers}"
    names = sorted(merged.draft.names())
    return [_names_in_memory(called, listed, names, opened.source.model.config_file)]


def _names_in_memory(called: str, listed: ExpectedTensors, names: list[str], config: Path | None) -> Finding:
    """Report names in memory in a result that cannot be changed to the names on disk."""
    odd = sorted(listed.only_in_memory & set(names)) or [name for name in names if not is_state(name)]
    return Finding.of(
        codes.FACT_UNKNOWN,
        f"{len(odd)} tensors have the names that {called} has in memory; save_pretrained writes other names",
        tensor=odd[0] if odd else None,
        help="write the names on disk, or merge, which keeps the names in memory",
        run=[f"--like {shlex.quote(str(config or 'config.json'))}", "fastshard merge CKPT OUT"],
    )


def beside_list(seen: list[Finding], by_list: list[Finding]) -> list[Finding]:
    """Adapt the findings from a model's own layers to the findings from a list, which states more.

    Tensors that the list finds missing are not reported twice. If the list proves that all tensors exist, an
    error becomes a warning that names both.
    """
    if any(f.severity == "error" and f.is_a("missing_tensor") for f in by_list):
        return [f for f in seen if not f.is_a("missing_tensor")]
    by = listed_by(by_list)
    if by is None:
        return seen
    says = f"the checkpoint's other layers show this, but according to {by} nothing is missing"
    return [
        f.replace(severity="warning", message=f"{f.message}; {says}") if f.severity == "error" else f
        for f in seen
    ]
