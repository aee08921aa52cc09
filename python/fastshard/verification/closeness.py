"""Distance between two tensors of the same shape, in bounded memory, and its comparison with a tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor import Tensor
from ..common import codes
from ..common.errors import FastshardError
from ..common.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Distance", "Tolerance", "distance"]

#: Bytes compared at a time.
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Tolerance:
    """The allowed distance of elements: ``|a - b| <= atol + rtol * |b|``, as in numpy and torch."""

    atol: float = 0.0
    rtol: float = 0.0
    #: True to ignore differences in dtype and compare only values.
    ignore_dtype: bool = False

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= value < float("inf"):
                raise FastshardError.of(
                    codes.USAGE, name, expected="a finite number, 0 or more", got=str(value)
                )


@dataclass(frozen=True)
class Distance:
    """The distance between two tensors. Complex numbers are compared as single numbers, not as pairs."""

    #: Number of elements that differ, and of those that differ by more than the tolerance.
    differing: int
    beyond: int
    #: Largest ``|a - b|``, and mean and standard deviation of ``a - b`` over finite elements.
    largest: float
    mean: float
    std: float
    #: ``|a - b| / |a|`` of the full tensors, in Euclidean norms; None if it is undefined.
    relative: float | None
    #: Cosine of the angle between the two tensors; None if it is undefined.
    cosine: float | None


def distance(x: Tensor, y: Tensor, tolerance: Tolerance) -> Distance:
    """Compare two tensors of the same shape, some rows at a time."""
    import numpy as np

    rows = x.shape[0] if x.shape else 1
    step = max(1, rows * _CHUNK // max(1, x.nbytes, y.nbytes))
    differing, beyond, largest, total, squares, count = 0, 0, 0.0, 0.0, 0.0, 0
    of_a, of_b, both = 0.0, 0.0, 0.0
    for start in range(0, rows, step):
        a, b = ((t[start : start + step] if t.shape else t.numpy()).ravel() for t in (x, y))
        p, q = _wide(a, b)
        unequal, delta = _apart(a, b, p, q)
        differing += int(unequal.sum())
        size = np.abs(np.where(np.isnan(delta), np.where(unequal, np.inf, 0.0), delta))
        largest = max(largest, float(size.max(initial=0.0)))
        with np.errstate(invalid="ignore"):
            # Where one of the two is no number no tolerance is enough.
            close = np.isfinite(size) & (size <= tolerance.atol + tolerance.rtol * np.abs(q))
        beyond += int((unequal & ~close).sum())
        finite = np.isfinite(p) & np.isfinite(q)
        p, q = np.where(finite, p, 0), np.where(finite, q, 0)
        of_a += float(np.vdot(p, p).real)
        of_b += float(np.vdot(q, q).real)
        both += float(np.vdot(p, q).real)
        delta = np.where(np.isfinite(delta), delta, 0.0)
        total += float(delta.sum())
        squares += float((delta * delta).sum())
        count += delta.size
    mean = total / max(1, count)
    std = max(0.0, squares / max(1, count) - mean * mean) ** 0.5
    relative = (squares / of_a) ** 0.5 if of_a else None
    cosine = both / (of_a * of_b) ** 0.5 if of_a and of_b else None
    return Distance(differing, beyond, largest, mean, std, relative, cosine)


def _wide(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Convert both arrays to the widest type of numbers."""
    import numpy as np

    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    return a.astype(wide), b.astype(wide)


def _apart(
    a: NDArray[Any], b: NDArray[Any], p: NDArray[Any], q: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the positions at which two arrays differ, and the differences.

    Integers are compared exactly, complex numbers by their distance; ``p`` and ``q`` are both in the widest
    type.
    """
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
    delta = np.abs(p - q) if np.iscomplexobj(p) else p - q
    return ~((p == q) | (np.isnan(p) & np.isnan(q))), delta
