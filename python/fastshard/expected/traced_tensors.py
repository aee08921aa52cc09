"""Tracing of tensors through views and copies, to find the tensors in memory that make up each one on disk.

This module is part of the program of :mod:`transformers_worker`, so it imports nothing of fastshard. Tensors
are on the ``meta`` device: they have no values to move, and the trace follows each operation by its
arguments. A result has no parts if its operation does more than move elements.

A part is a box of the result, with the place of its elements in one tensor in memory: the name, the first
element, the first index of the box in each dimension of the result, and the digits of each dimension. A digit
is a pair of an extent and a stride in memory, in elements; a dimension iterates over its digits, the
outermost first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Part", "Trace"]

Digits = list[tuple[int, int]]


class Part(NamedTuple):
    """A box of a tensor, and its place in memory."""

    name: str
    offset: int
    start: list[int]
    dims: list[Digits]


class Tiling(NamedTuple):
    """The parts that tile a tensor of a given shape."""

    shape: list[int]
    parts: list[Part]


class Untraceable(Exception):
    """Raised if an operation computes values, or divides a tensor in a way that parts cannot express."""


def count(digits: Digits) -> int:
    """Return the number of indices that digits iterate over."""
    n = 1
    for extent, _ in digits:
        n *= extent
    return n


def joined(digits: Digits) -> Digits:
    """Merge adjacent digits that form one."""
    found: Digits = []
    for extent, stride in digits:
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return found


def whole(name: str, shape: list[int]) -> Tiling:
    """Return the tiling of an unchanged tensor in memory."""
    dims: list[Digits] = []
    stride = 1
    for n in reversed(shape):
        dims.insert(0, [(n, stride)] if n > 1 else [])
        stride *= n
    return Tiling(list(shape), [Part(name, 0, [0] * len(shape), dims)])


def cut(digits: Digits, low: int, high: int) -> tuple[int, Digits]:
    """Return the first element and the digits of the indices from ``low`` up to, but not including,
    ``high``."""
    if low == 0 and high == count(digits):
        return 0, digits
    (_, stride), inner = digits[0], digits[1:]
    width = count(inner)
    if low % width == 0 and high % width == 0:
        n = (high - low) // width
        return low // width * stride, ([(n, stride)] if n > 1 else []) + inner
    if low // width == (high - 1) // width:
        offset, rest = cut(inner, low % width, (high - 1) % width + 1)
        return low // width * stride + offset, rest
    raise Untraceable("a slice across blocks")


def sliced(tiling: Tiling, dim: int, low: int, high: int) -> Tiling:
    """Return the tiling of the indices from ``low`` up to, but not including, ``high`` of one dimension."""
    parts = []
    for part in tiling.parts:
        first = part.start[dim]
        a, b = max(low, first), min(high, first + count(part.dims[dim]))
        if a < b:
            offset, digits = cut(part.dims[dim], a - first, b - first)
            start = [*part.start[:dim], a - low, *part.start[dim + 1 :]]
            dims = [*part.dims[:dim], digits, *part.dims[dim + 1 :]]
            parts.append(Part(part.name, part.offset + offset, start, dims))
    return Tiling([*tiling.shape[:dim], high - low, *tiling.shape[dim + 1 :]], parts)


def permuted(tiling: Tiling, order: list[int]) -> Tiling:
    """Return a tiling with its dimensions in another order."""
    parts = [
        Part(p.name, p.offset, [p.start[i] for i in order], [p.dims[i] for i in order]) for p in tiling.parts
    ]
    return Tiling([tiling.shape[i] for i in order], parts)


def reshaped(tiling: Tiling, shape: list[int]) -> Tiling:
    """Return a tiling with the elements in the same order and another shape."""
    kept = [i for i, n in enumerate(tiling.shape) if n > 1]
    if [tiling.shape[i] for i in kept] == [n for n in shape if n > 1]:
        parts = []
        for part in tiling.parts:
            left = iter(kept)
            at = [next(left) if n > 1 else None for n in shape]
            start = [0 if i is None else part.start[i] for i in at]
            parts.append(Part(part.name, part.offset, start, [[] if i is None else part.dims[i] for i in at]))
        return Tiling(list(shape), parts)
    if len(tiling.parts) != 1:
        raise Untraceable("another shape of concatenated tensors")
    (part,) = tiling.parts
    dims = regrouped([digit for digits in part.dims for digit in digits], shape)
    return Tiling(list(shape), [part._replace(start=[0] * len(shape), dims=dims)])


def regrouped(digits: Digits, shape: list[int]) -> list[Digits]:
    """Divide digits among the dimensions of a shape."""
    left, dims = list(digits), []
    for n in shape:
        taken: Digits = []
        while n > 1:
            extent, stride = left.pop(0)
            if n % extent == 0:
                taken.append((extent, stride))
                n //= extent
            elif extent % n == 0:
                taken.append((n, stride * (extent // n)))
                left.insert(0, (extent // n, stride))
                n = 1
            else:
                raise Untraceable("a shape that cuts blocks")
        dims.append(taken)
    return dims


def put_together(several: list[Tiling], dim: int) -> Tiling:
    """Concatenate tensors along a dimension."""
    at, parts = 0, []
    for tiling in several:
        for part in tiling.parts:
            start = [n + at if i == dim else n for i, n in enumerate(part.start)]
            parts.append(part._replace(start=start))
        at += tiling.shape[dim]
    first = several[0].shape
    return Tiling([*first[:dim], at, *first[dim + 1 :]], parts)


def argument(args: tuple[Any, ...], at: int, default: Any) -> Any:
    """Return a positional argument of an operation, or its default."""
    return args[at] if len(args) > at and args[at] is not None else default


def every(tiling: Tiling, args: tuple[Any, ...]) -> Tiling:
    """Return the tiling that ``aten::slice`` selects: a range, or every n-th index."""
    dim = argument(args, 1, 0) % len(tiling.shape)
    n = tiling.shape[dim]
    low, high, step = argument(args, 2, 0), argument(args, 3, n), argument(args, 4, 1)
    low, high = (max(0, min(n, at + n if at < 0 else at)) for at in (low, high))
    if step == 1:
        return sliced(tiling, dim, low, high)
    if high < n or low >= step or n % step:
        raise Untraceable("steps that do not divide")
    apart = reshaped(tiling, [*tiling.shape[:dim], n // step, step, *tiling.shape[dim + 1 :]])
    taken = sliced(apart, dim + 1, low, low + 1)
    return reshaped(taken, [*tiling.shape[:dim], n // step, *tiling.shape[dim + 1 :]])


class Trace:
    """A context that traces named tensors through operations."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        #: References to all tensors, so that the id of a traced tensor is not reused.
        self._tensors: dict[int, tuple[torch.Tensor, Tiling | None]] = {
            id(tensor): (tensor, whole(name, list(tensor.shape))) for name, tensor in named.items()
        }
        self._mode: Any = None

    def __enter__(self) -> Trace:
        # Who imports this module does not need torch.
        from torch.utils._python_dispatch import TorchDispatchMode

        follow = self._follow

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                return follow(func, args, kwargs or {})

        self._mode = Mode()  # type: ignore[no-untyped-call]
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def parts(self, tensor: torch.Tensor) -> list[Part] | None:
        """Return the parts of a tensor; None for a computed tensor."""
        _, tiling = self._tensors.get(id(tensor), (tensor, None))
        if tiling is None:
            return None
        return [part._replace(dims=[joined(digits) for digits in part.dims]) for part in tiling.parts]

    def is_itself(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is the unchanged tensor of that name in memory."""
        return self.parts(tensor) == whole(name, list(tensor.shape)).parts

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record the parts of its results."""
        import torch

        out = func(*args, **kwargs)
        given = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
        inputs = [self._tensors.get(id(a), (a, None))[1] for a in given if isinstance(a, torch.Tensor)]
        results = [
            o for o in (out if isinstance(out, list | tuple) else (out,)) if isinstance(o, torch.Tensor)
        ]
        if not any(inputs):
            return out
        try:
            shapes = [list(result.shape) for result in results]
            tilings: list[Any] = self._followed(
                func._schema.name.removeprefix("aten::"), inputs, args, shapes
            )
            if [one.shape for one in tilings] != shapes:
                raise Untraceable("another shape")
        except Untraceable:
            tilings = [None] * len(results)
        self._tensors |= {id(result): (result, one) for result, one in zip(results, tilings, strict=True)}
        return out

    @staticmethod
    def _followed(
        name: str, inputs: list[Tiling | None], args: tuple[Any, ...], shapes: list[list[int]]
    ) -> list[Tiling]:
        several = [tiling for tiling in inputs if tiling is not None]
        if len(several) < len(inputs):
            raise Untraceable("a slice of a computed tensor")
        first = several[0]
        dims = len(first.shape)
        match name:
            case "clone" | "detach" | "alias" | "lift_fresh":
                return [first]
            case "view" | "_unsafe_view" | "_reshape_alias" | "squeeze" | "unsqueeze":
                return [reshaped(first, shapes[0])]
            case "transpose":
                order = list(range(dims))
                a, b = args[1] % dims, args[2] % dims
                order[a], order[b] = b, a
                return [permuted(first, order)]
            case "t":
                return [permuted(first, list(range(dims))[::-1])]
            case "permute":
                return [permuted(first, [i % dims for i in args[1]])]
            case "split" | "split_with_sizes":
                dim, ends = argument(args, 2, 0) % dims, [0]
                for shape in shapes:
                    ends.append(ends[-1] + shape[dim])
                return [sliced(first, dim, a, b) for a, b in pairwise(ends)]
            case "unbind" | "select":
                dim = argument(args, 1, 0) % dims
                indices = range(len(shapes)) if name == "unbind" else [args[2] % first.shape[dim]]
                return [reshaped(sliced(first, dim, i, i + 1), shapes[0]) for i in indices]
            case "slice":
                return [every(first, args)]
            case "cat":
                return [put_together(several, argument(args, 1, 0) % dims)]
            case "stack":
                dim = argument(args, 1, 0) % (dims + 1)
                apart = [reshaped(one, [*one.shape[:dim], 1, *one.shape[dim:]]) for one in several]
                return [put_together(apart, dim)]
        raise Untraceable(name)
