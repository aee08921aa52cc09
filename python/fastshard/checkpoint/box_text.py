"""Strided boxes of a tensor as text, and a test whether a range of elements overlaps a box."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Run", "join_runs", "meets", "of_flat", "slices", "strides"]

#: (extent, step): the number of indices in a dimension, and the distance between them.
Run = tuple[int, int]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a shape in C order, in elements."""
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * max(1, shape[dim + 1])
    return steps


def slices(shape: Sequence[int], base: Sequence[int], runs: Sequence[Sequence[Run]]) -> str:
    """Format a box like a numpy index, e.g. ``[0:16, :]``.

    A dimension that no slice describes is written as, e.g., ``8 runs of 16 every 48 from 0``.
    """
    return f"[{', '.join(_of_dimension(n, at, run) for n, at, run in zip(shape, base, runs, strict=True))}]"


def join_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the widest steps first, with contiguous runs merged."""
    joined: list[Run] = []
    for n, step in sorted((run for run in runs if run[0] > 1), key=lambda run: -run[1]):
        if joined and joined[-1][1] == n * step:
            joined[-1] = (joined[-1][0] * n, step)
        else:
            joined.append((n, step))
    return joined


def _of_dimension(extent: int, first: int, runs: Sequence[Run]) -> str:
    joined = join_runs(runs)
    if not joined:
        return ":" if extent == 1 else str(first)
    (n, step), *outer = joined[::-1]
    if step == 1:
        inner = ":" if n == extent and not outer else f"{first}:{first + n}"
    else:
        inner = f"{first}:{first + (n - 1) * step + 1}:{step}"
    if not outer:
        return inner
    text = f"runs of {n}" if step == 1 else f"runs of {n} with step {step}"
    for count, every in outer:
        text = f"{count} {text} every {every}"
    return f"{text} from {first}"


def of_flat(shape: Sequence[int], base: int, axes: Sequence[Run]) -> str:
    """Format a box in the form of :func:`slices`, from strides over C-ordered elements."""
    steps = strides(shape)
    first = []
    for extent, step in zip(shape, steps, strict=True):
        first.append(base // step % max(1, extent))
    runs: list[list[Run]] = [[] for _ in shape]
    for n, step in axes:
        if n > 1 and not _divided(n, step, shape, steps, runs):
            return f"{n} elements every {step} from element {base}"
    return slices(shape, first, runs)


def _divided(n: int, step: int, shape: Sequence[int], steps: Sequence[int], runs: list[list[Run]]) -> bool:
    """Add an axis to the runs of the dimensions that it spans; return False if it is not aligned."""
    for dim in range(len(shape) - 1, -1, -1):
        whole = steps[dim] * shape[dim]
        if shape[dim] <= 1 or step % steps[dim] or step >= whole:
            continue
        inside = min(n, -(-whole // step))
        if n % inside or (inside < n and whole % step):
            return False
        runs[dim].append((inside, step // steps[dim]))
        n //= inside
        step = whole
        if n == 1:
            return True
    return False


def meets(base: int, axes: Sequence[Run], lo: int, hi: int) -> bool:
    """Return True if a box has an element from ``lo`` up to, but not including, ``hi``.

    The box is given by strides over C-ordered elements.
    """
    ordered = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])

    def span(rest: Sequence[Run]) -> int:
        return sum((n - 1) * step for n, step in rest)

    def any_of(first: int, rest: Sequence[Run]) -> bool:
        if first >= hi or first + span(rest) < lo:
            return False
        if not rest or lo <= first:
            return True
        (n, step), *inner = rest
        # The first index whose box does not end before the range, and the next: one lies in it, or before it,
        # or none does.
        start = max(0, -(-(lo - span(inner) - first) // step))
        return any(any_of(first + i * step, inner) for i in range(start, min(n, start + 2)))

    return lo < hi and any_of(base, ordered)
