"""Differences between two checkpoints, tensor by tensor, across formats and shardings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifests import run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.planning import make_plan
from ..checkpoint.tensor import Tensor
from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding, from_core, raise_errors
from ..common.formatting import counted
from ..common.options import Opening
from ..common.progress import Progress, Report
from ..common.records import asdict, dataclass, replace
from ..targets.request import Request
from .closeness import Tolerance, distance
from .stats import TensorStats, gather

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Difference", "Differences", "diff"]

#: Differences that ``repr`` shows.
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """A difference in one tensor between two checkpoints.

    ``kind`` is ``only_a``, ``only_b``, ``shape``, ``dtype`` or ``values``; the figures are for the last two.
    Statistics are available if both sides have the tensor.

    Examples:
        >>> difference = fastshard.diff("model", "edited")[0]
        >>> difference.tensor, difference.kind, difference.differing
        ('embed_out.weight', 'values', 16000)
    """

    tensor: str
    kind: str
    a: str
    b: str
    differing: int = 0
    largest: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    #: Number of elements that differ by more than the tolerance.
    beyond: int = 0
    #: ``|a - b| / |a|`` of the full tensors, and the cosine of their angle; None if undefined.
    relative: float | None = None
    cosine: float | None = None
    a_stats: TensorStats | None = None
    b_stats: TensorStats | None = None

    def is_within(self, tolerance: Tolerance) -> bool:
        """Returns True if all elements are within the tolerance, if one was given."""
        if self.kind == "dtype":
            return tolerance.ignore_dtype and not self.beyond
        return self.kind == "values" and bool(tolerance.atol or tolerance.rtol) and not self.beyond

    @property
    def zeros(self) -> str:
        """A description of the ranges that are zero on one side only."""
        if self.a_stats is None or self.b_stats is None:
            return ""
        sides = (("A", self.a_stats, self.b_stats), ("B", self.b_stats, self.a_stats))
        return "; ".join(
            f"{zero} are zero in {name} only" for name, own, other in sides for zero in own.zero_unlike(other)
        )

    @property
    def not_numbers(self) -> str:
        """A description of the sides with NaN or infinite values that the other side lacks."""
        if self.a_stats is None or self.b_stats is None:
            return ""
        told = []
        for word, attribute in (("NaN", "nan"), ("infinite values", "inf")):
            a, b = (getattr(side, attribute) for side in (self.a_stats, self.b_stats))
            if a != b:
                told.append(f"{a:,} {word} in A, {b:,} in B")
        return "; ".join(told)

    @property
    def distributions(self) -> str:
        """Description of both distributions: mean, std, overlap, and zeros on one side only."""
        if self.a_stats is None or self.b_stats is None:
            return ""
        sides = (("A", self.a_stats, self.b_stats), ("B", self.b_stats, self.a_stats))
        words = [f"{name} has mean {_figure(own.mean)}, std {_figure(own.std)}" for name, own, _ in sides]
        overlap = self.a_stats.overlap(self.b_stats)
        # Rounding must not make them equal.
        words.append(
            "the distributions are the same"
            if overlap == 1
            else f"the distributions overlap by {min(overlap, 0.9999):.2%}"
        )
        return "; ".join([*words, *(told for told in (self.not_numbers, self.zeros) if told)])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        sides = {"a_stats": self.a_stats, "b_stats": self.b_stats}
        return {**vars(self), **{key: own.to_dict() if own else None for key, own in sides.items()}}

    def to_finding(self) -> Finding:
        """Returns the difference as a finding."""
        distributions = f"; {self.distributions}" if self.distributions else ""
        if self.kind == "values":
            message = (
                f"{self.differing} elements differ: max |a-b| {self.largest:.6g}, mean {self.mean:.6g}, std "
                f"{self.std:.6g}"
            )
            return Finding.of(codes.DIFFERENT, message + distributions, tensor=self.tensor)
        return Finding.of(
            codes.DIFFERENT,
            self.kind.replace("_", " ") + distributions,
            tensor=self.tensor,
            expected=self.a,
            got=self.b,
        )


class Differences(list[Difference]):
    """The differing tensors, as a list that a notebook shows as a table."""

    def __init__(
        self,
        differences: Iterable[Difference] = (),
        findings: Iterable[Finding] = (),
        close: Iterable[Difference] = (),
        compared: int = 0,
    ) -> None:
        super().__init__(differences)
        #: Tensors whose bytes differ within the tolerance.
        self.close = list(close)
        #: Number of tensors in both checkpoints together.
        self.compared = compared
        #: Warnings and notes about the two checkpoints.
        self.findings = list(dict.fromkeys(findings))

    def __repr__(self) -> str:
        told = [f"  {d.tensor}: {d.kind.replace('_', ' ')}" for d in self[:_SHOWN]]
        more = [f"  ... {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return "\n".join([f"<fastshard.Differences: {counted(len(self), 'tensor')}>", *told, *more])

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        many = f"{len(self)} tensors differ" if self else "no difference: every tensor has the same bytes"
        rows = (
            (
                d.tensor,
                d.kind.replace("_", " "),
                d.a,
                d.b,
                f"{d.differing:,}" if d.differing else "",
                notebook_html.figure(d.largest) if d.differing else "",
                d.distributions,
            )
            for d in self
        )
        head = ("tensor", "what", "A", "B", "elements", "max |a-b|", "distributions")
        return notebook_html.table(many, head, rows, len(self))


def _figure(x: float | None) -> str:
    return "-" if x is None else f"{x:.6g}"


@memory_budget.kept
def diff(
    a: CheckpointSource,
    b: CheckpointSource,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    ignore_dtype: bool = False,
    **opening: Unpack[Opening],
) -> Differences:
    """Compares two checkpoints tensor by tensor, across formats and shardings.

    Tensors are compared under the sources' own names if these have names in common; otherwise both use their
    Hugging Face layout. They also use it if each has names that the other lacks and fewer names differ in
    that layout, e.g. if one side stores experts in one tensor and the other separately. The function compares
    hashes first. It reads only differing tensors again, for the figures and statistics of both sides.

    Args:
        a: an opened checkpoint, a path, or several node-local paths.
        b: the other one.
        include: glob patterns of names to compare; all if empty.
        exclude: glob patterns of names to leave out.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        atol: a tensor is close if for each element ``|a - b| <= atol + rtol * |b|``; close tensors are not
            differences.
        rtol: see ``atol``.
        ignore_dtype: True to compare values if the dtypes differ.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if one of the two is damaged, or if they have no common names.

    Examples:
        >>> fastshard.diff("run", "model", vocab_size=500)  # the formats may differ
        <fastshard.Differences: 0 tensors>
        >>> fastshard.diff("model", "edited")
        <fastshard.Differences: 1 tensor>
          embed_out.weight: values
    """
    tolerance = Tolerance(atol, rtol, ignore_dtype)
    one, two = as_checkpoint(a, **opening), as_checkpoint(b, **opening)
    plans = _comparable((one, two), list(include), list(exclude))
    hashes: list[dict[str, str]] = []
    sides: list[dict[str, TensorStats]] = []
    found = [f for plan in plans for f in plan.findings]
    run = run_options(memory, threads, one.opened.catalog, two.opened.catalog)
    try:
        with Progress(progress) as bar:
            for plan, side, title in zip(plans, (one, two), "ab", strict=True):
                findings, of_side, _ = plan.core.check(run, bar.phase(f"hashing {title}"))
                # What is no number differs from nothing but itself: the comparison says where.
                findings = [
                    f.replace(severity="warning") if f.code == codes.NON_FINITE else f for f in findings
                ]
                found += side.opened.gate.passed(findings)
                hashes.append(of_side)
            both = sorted(set(hashes[0]) & set(hashes[1]))
            unlike = [
                n for n in both if hashes[0][n] != hashes[1][n] or _form(plans[0], n) != _form(plans[1], n)
            ]
            for plan, title in zip(plans, "ab", strict=True):
                sides.append(
                    gather(plan, run, bar.phase(f"statistics of {title}"), unlike)[0] if unlike else {}
                )
    except _core.CoreError as error:
        raise from_core(error) from None
    out = [Difference(name, "only_a", "present", "absent") for name in hashes[0].keys() - hashes[1].keys()]
    close: list[Difference] = []
    out += [Difference(name, "only_b", "absent", "present") for name in hashes[1].keys() - hashes[0].keys()]
    for name in unlike:
        x, y = (Tensor(plan, plan.index[name]) for plan in plans)
        unequal = _compared(name, x, y, tolerance)
        unequal = replace(unequal, a_stats=sides[0].get(name), b_stats=sides[1].get(name))
        (close if unequal.is_within(tolerance) else out).append(unequal)
    out.sort(key=lambda difference: difference.tensor)
    return Differences(out, found, close, len(hashes[0].keys() | hashes[1].keys()))


def _find_one_form(sides: tuple[Checkpoint, Checkpoint], differing: int) -> list[Plan] | None:
    """Plan two checkpoints in their Hugging Face layout, in which separate and fused experts are the same.

    Return None if one of them does not have this layout or is incomplete in it, or if as many names differ.
    """
    try:
        plans = [make_plan(side.opened, Request("hf")) for side in sides]
    except FastshardError:
        return None
    if any(finding.severity == "error" for plan in plans for finding in plan.findings):
        return None
    return plans if len(plans[0].index.keys() ^ plans[1].index.keys()) < differing else None


def _comparable(sides: tuple[Checkpoint, Checkpoint], include: list[str], exclude: list[str]) -> list[Plan]:
    """Plan the chosen tensors of two checkpoints under common names; the plan of one may be empty."""
    chosen: dict[str, Any] = {"include": include, "exclude": exclude}
    plans = [make_plan(side.opened, Request(**chosen)) for side in sides]
    names = [set(plan.index) for plan in plans]
    if (include or exclude) and not names[0] & names[1]:
        # Whether the two have common names does not hang on what is chosen of them.
        names = [have | make_plan(side.opened).index.keys() for have, side in zip(names, sides, strict=True)]
    if not names[0] & names[1]:
        plans = [make_plan(side.opened, Request("hf", **chosen)) for side in sides]
    elif names[0] - names[1] and names[1] - names[0] and not (include or exclude):
        plans = _find_one_form(sides, len(names[0] ^ names[1])) or plans
    for plan in plans:
        # Where nothing is left of one side, that is what they differ in; of both, no name fits the patterns.
        empty = bool(include or exclude) and not plan.outputs and any(other.outputs for other in plans)
        raise_errors([f for f in plan.findings if not (empty and f.code == codes.USAGE)])
    return plans


def _form(plan: Plan, name: str) -> tuple[str, list[int]]:
    """Return (dtype, shape) of an output."""
    _, dtype, shape, _, _ = plan.outputs[plan.index[name]]
    return dtype, shape


def _compared(name: str, x: Tensor, y: Tensor, tolerance: Tolerance) -> Difference:
    if x.shape != y.shape:
        return Difference(name, "shape", str(list(x.shape)), str(list(y.shape)))
    apart = distance(x, y, tolerance)
    kind, a, b = ("dtype", x.dtype, y.dtype) if x.dtype != y.dtype else ("values", "", "")
    # Equal numbers may have other bits: the sign of a zero or the payload of a NaN.
    return Difference(name, kind, a, b, **asdict(apart))
