"""Value distributions of a checkpoint's tensors, from one streaming pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.manifests import ProgressCallback, run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.planning import make_plan
from ..common import codes, memory_budget
from ..common.errors import Finding, from_core, raise_errors
from ..common.formatting import counted
from ..common.options import Opening, StrPath
from ..common.progress import Progress, Report
from ..targets.request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._core import RunOptions

__all__ = ["HISTOGRAM_EDGES", "TensorStats", "ZeroSlab", "stats"]

#: Tensors that ``repr`` shows.
_SHOWN = 5
#: The 63 edges between the 64 bins of every histogram, ascending: ``-2**6 ... -2**-24, 0, 2**-24 ... 2**6``.
#: The first and the last bin are unbounded. A power of two belongs to the bin farther from zero.
HISTOGRAM_EDGES: tuple[float, ...] = tuple(_core.histogram_edges())


@dataclass(frozen=True)
class ZeroSlab:
    """Indices of one dimension at which every element is zero.

    Examples:
        >>> import numpy as np
        >>> with fastshard.Writer("out") as writer:
        ...     writer["weight"] = np.vstack([np.ones((4, 8)), np.zeros((4, 8))])
        >>> fastshard.stats("out")["weight"].zero_slabs
        (ZeroSlab(dim=0, indices=4, ranges=((4, 8),)),)
    """

    dim: int
    #: Number of all-zero indices in the dimension.
    indices: int
    #: Their ranges ``(start, end)``, end exclusive, ascending; the longest 64 if there are more.
    ranges: tuple[tuple[int, int], ...]

    def text(self, rank: int) -> str:
        """Describes the block, for ``rank`` dimensions: ``rows 32-63``, ``indices 4-7 of dim 2``."""
        what = {0: "rows", 1: "columns"}.get(self.dim, "") if rank == 2 else "indices"
        if self.indices == 1:
            what = "index" if what == "indices" else what[:-1]
        shown = [str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in self.ranges[:4]]
        more = self.indices - sum(b - a for a, b in self.ranges[:4])
        counted = f" and {more} more" if more > 0 else ""
        return f"{what} {', '.join(shown)}{counted}" + (f" of dim {self.dim}" if rank != 2 else "")


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of the values of one tensor.

    ``zeros``, ``nan``, ``inf`` and the histogram add up to ``count``. NaN and infinities are excluded from
    all other fields. The two parts of a complex element count as two numbers. Integers are summed as float64,
    so the mean of 64-bit integers is rounded; their ``min`` and ``max`` are exact.

    Examples:
        >>> stats = fastshard.stats("run", include=["2.attention.dense.weight"])["2.attention.dense.weight"]
        >>> stats.count, stats.zeros, stats.nan
        (1024, 0, 0)
    """

    #: Element type under its safetensors name, e.g. ``BF16``.
    dtype: str
    shape: tuple[int, ...]
    #: Number of values.
    count: int
    #: Number of zeros, of either sign.
    zeros: int
    nan: int
    inf: int
    #: Smallest and largest finite value; None if there is none.
    min: float | int | None
    max: float | int | None
    #: Mean and (population) standard deviation of the finite values; None without finite values, or on
    #: overflow.
    mean: float | None
    std: float | None
    #: Counts in the 64 bins between :data:`HISTOGRAM_EDGES`, without zeros.
    histogram: tuple[int, ...]
    #: All-zero blocks, as a lost shard leaves them; empty for an all-zero tensor and for a vector.
    zero_slabs: tuple[ZeroSlab, ...] = ()

    @classmethod
    def from_dict(cls, dtype: str, shape: Iterable[int], data: dict[str, Any]) -> TensorStats:
        """Reads statistics from their JSON form in a manifest."""
        slabs = tuple(
            ZeroSlab(s["dim"], s["indices"], tuple((a, b) for a, b in s["ranges"]))
            for s in data.get("zero_slabs", ())
        )
        rest = {k: v for k, v in data.items() if k not in ("zero_slabs", "histogram")}
        return cls(dtype, tuple(shape), **rest, histogram=tuple(data["histogram"]), zero_slabs=slabs)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, with lists instead of tuples."""
        slabs = [
            {"dim": s.dim, "indices": s.indices, "ranges": [list(r) for r in s.ranges]}
            for s in self.zero_slabs
        ]
        lists = {"shape": list(self.shape), "histogram": list(self.histogram), "zero_slabs": slabs}
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, **lists}

    @property
    def zero_share(self) -> float:
        """Share of zeros, from 0 to 1; 0 without elements."""
        return self.zeros / self.count if self.count else 0.0

    def overlap(self, other: TensorStats) -> float:
        """Measures the overlap of two distributions, from 0 to 1.

        The overlap is the common share of histogram bins, zeros, NaN and infinities.
        """
        own, theirs = ((*s.histogram, s.zeros, s.nan, s.inf) for s in (self, other))
        if not (self.count and other.count):
            return float(self.count == other.count)
        return sum(min(a / self.count, b / other.count) for a, b in zip(own, theirs, strict=True))

    def zero_unlike(self, other: TensorStats) -> list[str]:
        """Lists ranges that are zero here and not in the other tensor: ``["rows 32-63"]``."""
        if other.zeros == other.count:
            return []
        if self.count and self.zeros == self.count:
            return ["all elements"]
        theirs = {s.dim: s.ranges for s in other.zero_slabs} if self.shape == other.shape else {}
        words = []
        for slab in self.zero_slabs:
            left = _without(slab.ranges, theirs.get(slab.dim, ()))
            if left:
                indices = slab.indices if left == slab.ranges else sum(b - a for a, b in left)
                words.append(ZeroSlab(slab.dim, indices, left).text(len(self.shape)))
        return words


def _without(
    ranges: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Return the parts of some ranges that no other range covers."""
    left = []
    for start, end in ranges:
        for a, b in others:
            if b <= start or a >= end:
                continue
            if a > start:
                left.append((start, a))
            start = b
        if start < end:
            left.append((start, end))
    return tuple(left)


class Stats(dict[str, TensorStats]):
    """Statistics by the tensors' names: a dict that a notebook shows as a table."""

    def __repr__(self) -> str:
        told = [
            f"  {name}: {s.dtype} {list(s.shape)}, {_figure(s.min)} to {_figure(s.max)}, mean "
            f"{_figure(s.mean)}, "
            f"std {_figure(s.std)}"
            for name, s in list(self.items())[:_SHOWN]
        ]
        more = [f"  ... {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return "\n".join([f"<fastshard.Stats: {counted(len(self), 'tensor')}>", *told, *more])

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        rows = (
            (
                name,
                s.dtype,
                notebook_html.shape(s.shape),
                *(notebook_html.figure(x) for x in (s.min, s.max, s.mean, s.std)),
                f"{s.zero_share:.2%}" if s.zeros else "",
                f"{s.nan:,} / {s.inf:,}" if s.nan or s.inf else "",
                "; ".join(slab.text(len(s.shape)) for slab in s.zero_slabs),
            )
            for name, s in self.items()
        )
        head = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "zeros", "NaN / inf", "zero blocks")
        return notebook_html.table(f"statistics of {len(self)} tensors", head, rows, len(self))


def _figure(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}"


@memory_budget.kept
def stats(
    source: CheckpointSource,
    *,
    like: StrPath | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> Stats:
    """Computes statistics of every full tensor, by name, in one pass and in bounded memory.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        like: a good checkpoint of the same model, as for :func:`fastshard.open`; a source that differs is
            refused.
        include: glob patterns of names to read; all if empty.
        exclude: glob patterns of names to leave out.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if the checkpoint is damaged or incomplete.

    Examples:
        >>> fastshard.stats("run", include=["2.attention.dense.weight"])
        <fastshard.Stats: 1 tensor>
          2.attention.dense.weight: F32 [32, 32], -0.06416 to 0.06133, mean 0.0005106, std 0.01964
    """
    return with_findings(
        source,
        like=like,
        include=include,
        exclude=exclude,
        memory=memory,
        threads=threads,
        progress=progress,
        **opening,
    )[0]


@memory_budget.kept
def with_findings(
    source: CheckpointSource,
    *,
    like: StrPath | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> tuple[Stats, list[Finding]]:
    """Compute :func:`stats`, and return them with the warnings and notes."""
    checkpoint = as_checkpoint(source, like=like, **opening)
    plan = make_plan(checkpoint.opened, Request(include=include, exclude=exclude))
    raise_errors(plan.findings)
    with Progress(progress) as bar:
        gathered, findings = gather(
            plan, run_options(memory, threads, checkpoint.opened.catalog), bar.phase("reading")
        )
    # The figures say how many there are, and are what is asked for.
    counted = [finding for finding in findings if finding.code == codes.NON_FINITE]
    findings = checkpoint.opened.gate.passed(f for f in findings if f.code != codes.NON_FINITE)
    return gathered, [*plan.findings, *findings, *checkpoint.opened.gate.evaluate(counted)]


def gather(
    plan: Plan, run: RunOptions, progress: ProgressCallback, only: list[str] | None = None
) -> tuple[Stats, list[Finding]]:
    """Compute statistics of a plan's outputs, all or only some, and return them with the findings."""
    try:
        findings, _, found = plan.core.check({**run, "stats": "full", "only": only}, progress)
    except _core.CoreError as error:
        raise from_core(error) from None
    # Nothing is kept twice: of a million tensors it is much.
    gathered = Stats(
        (name, TensorStats.from_dict(dtype, shape, found.pop(name)))
        for name, dtype, shape, _, _ in plan.outputs
        if name in found
    )
    return gathered, findings
