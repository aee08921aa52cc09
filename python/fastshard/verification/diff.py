"""What two checkpoints differ in, tensor by tensor, across formats and shardings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.checkpoint import Checkpoint, CheckpointSource, as_checkpoint
from ..checkpoint.manifests import (
    run_options,
)
from ..checkpoint.planning import Plan, make_plan
from ..checkpoint.tensor import Tensor
from ..common import memory_budget
from ..common.errors import Finding, from_core, raise_errors
from ..common.options import Opening
from ..common.progress import Progress, Report
from ..targets.request import Request
from .stats import TensorStats, gather

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

__all__ = ["Difference", "Differences", "diff"]


@dataclass(frozen=True)
class Difference:
    """One tensor in which two checkpoints differ.

    ``kind`` is ``only_a``, ``only_b``, ``shape``, ``dtype`` or ``values``; the figures are for the two
    last. Statistics are there where both sides have the tensor.
    """

    tensor: str
    kind: str
    a: str
    b: str
    differing: int = 0
    largest: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    a_stats: TensorStats | None = None
    b_stats: TensorStats | None = None

    @property
    def distributions(self) -> str:
        """Both distributions in words: mean and std, how far they overlap, and what is zero on one side only."""
        if self.a_stats is None or self.b_stats is None:
            return ""
        sides = (("A", self.a_stats, self.b_stats), ("B", self.b_stats, self.a_stats))
        words = [f"{name} has mean {_figure(own.mean)}, std {_figure(own.std)}" for name, own, _ in sides]
        overlap = self.a_stats.overlap(self.b_stats)
        # Rounding must not make them equal.
        words.append(
            "the distributions are alike"
            if overlap == 1
            else f"the distributions overlap by {min(overlap, 0.9999):.2%}"
        )
        for name, own, other in sides:
            words += [f"{zero} are zero in {name} only" for zero in own.zero_unlike(other)]
        return "; ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        sides = {"a_stats": self.a_stats, "b_stats": self.b_stats}
        return {**vars(self), **{key: own.to_dict() if own else None for key, own in sides.items()}}

    def to_finding(self) -> Finding:
        """The difference as a finding."""
        distributions = f"; {self.distributions}" if self.distributions else ""
        if self.kind == "values":
            message = f"{self.differing} elements differ: max |a-b| {self.largest:.6g}, mean {self.mean:.6g}, std {self.std:.6g}"
            return Finding.of("FS309", message + distributions, tensor=self.tensor)
        return Finding.of(
            "FS309",
            self.kind.replace("_", " ") + distributions,
            tensor=self.tensor,
            expected=self.a,
            got=self.b,
        )


class Differences(list[Difference]):
    """Differences by the tensors' names: a list, which a notebook shows as a table."""

    def __init__(self, differences: Iterable[Difference] = (), findings: Iterable[Finding] = ()) -> None:
        super().__init__(differences)
        #: Warnings and notes about the two checkpoints.
        self.findings = list(dict.fromkeys(findings))

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
    **opening: Unpack[Opening],
) -> Differences:
    """Compares two checkpoints tensor by tensor, across formats and shardings.

    Names are the sources' own where both have the same; otherwise both are seen through their
    Hugging Face layout. Hashes are compared first; only tensors that differ are read again, for the
    figures and for the statistics of both sides. ``include`` and ``exclude`` are glob patterns of names, as for
    :func:`fastshard.plan`.

    Raises:
        FastshardError: if one of the two is damaged or they cannot be brought to common names.
    """
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
                findings = [f.replace(severity="warning") if f.code == "FS306" else f for f in findings]
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
    out += [Difference(name, "only_b", "absent", "present") for name in hashes[1].keys() - hashes[0].keys()]
    for name in unlike:
        x, y = (Tensor(plan, plan.index[name]) for plan in plans)
        unequal = (
            Difference(name, "shape", str(list(x.shape)), str(list(y.shape)))
            if x.shape != y.shape
            else _compare(name, x, y)
        )
        out.append(replace(unequal, a_stats=sides[0].get(name), b_stats=sides[1].get(name)))
    return Differences(sorted(out, key=lambda d: d.tensor), found)


def _comparable(sides: tuple[Checkpoint, Checkpoint], include: list[str], exclude: list[str]) -> list[Plan]:
    """Plans of what is chosen of two checkpoints, under common names; that of one may be empty."""
    chosen: dict[str, Any] = {"include": include, "exclude": exclude}
    plans = [make_plan(side.opened, Request(**chosen)) for side in sides]
    names = [set(plan.index) for plan in plans]
    if (include or exclude) and not names[0] & names[1]:
        # Whether the two have common names does not hang on what is chosen of them.
        names = [have | make_plan(side.opened).index.keys() for have, side in zip(names, sides, strict=True)]
    if not names[0] & names[1]:
        plans = [make_plan(side.opened, Request("hf", **chosen)) for side in sides]
    for plan in plans:
        # Where nothing is left of one side, that is what they differ in; of both, no name fits the patterns.
        empty = bool(include or exclude) and not plan.outputs and any(other.outputs for other in plans)
        raise_errors([f for f in plan.findings if not (empty and f.code == "FS515")])
    return plans


def _form(plan: Plan, name: str) -> tuple[str, list[int]]:
    """(dtype, shape) of an output."""
    _, dtype, shape, _, _ = plan.outputs[plan.index[name]]
    return dtype, shape


#: Bytes compared at a time.
_CHUNK = 16 << 20


def _apart(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where two arrays of numbers differ, and by how much: integers exactly, complex numbers by their distance."""
    import numpy as np

    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        # Of int64 and uint64 numpy would make floats.
        unequal = (
            (a != b)
            if a.dtype.kind == b.dtype.kind
            else (a < 0) | (b < 0) | (a.astype("u8") != b.astype("u8"))
        )
        delta: NDArray[Any] = np.zeros(a.shape)
        delta[unequal] = (a[unequal].astype(object) - b[unequal].astype(object)).astype(np.float64)
        return unequal, delta
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    p, q = a.astype(wide), b.astype(wide)
    delta = np.abs(p - q) if wide is np.complex128 else p - q
    return ~((p == q) | (np.isnan(p) & np.isnan(q))), delta


def _compare(name: str, x: Tensor, y: Tensor) -> Difference:
    """Figures of the difference, in bounded memory. Of complex numbers it is the distance of the two."""
    import numpy as np

    rows = x.shape[0] if x.shape else 1
    step = max(1, rows * _CHUNK // max(1, x.nbytes, y.nbytes))
    differing, largest, total, squares, count = 0, 0.0, 0.0, 0.0, 0
    for start in range(0, rows, step):
        a, b = ((t[start : start + step] if t.shape else t.numpy()).ravel() for t in (x, y))
        unequal, delta = _apart(a, b)
        differing += int(unequal.sum())
        finite = np.abs(np.where(np.isnan(delta), np.where(unequal, np.inf, 0.0), delta))
        largest = max(largest, float(finite.max(initial=0.0)))
        delta = np.where(np.isfinite(delta), delta, 0.0)
        total += float(delta.sum())
        squares += float((delta * delta).sum())
        count += delta.size
    mean = total / max(1, count)
    std = max(0.0, squares / max(1, count) - mean * mean) ** 0.5
    if x.dtype != y.dtype:
        return Difference(name, "dtype", x.dtype, y.dtype, differing, largest, mean, std)
    if differing == 0:
        # Equal numbers with other bits: the sign of a zero or the payload of a NaN.
        return Difference(name, "values", "", "", 0, 0.0, 0.0, 0.0)
    return Difference(name, "values", "", "", differing, largest, mean, std)
