"""The memory budget of a call, for reading and planning before the engine distributes it.

Without an explicit budget the default grows with the size of the plan, and nothing is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from .. import _core
from . import codes, file_digests
from .byte_sizes import parse_size
from .errors import FastshardError
from .option_checks import checked, describe_later

_LIMIT: ContextVar[int | None] = ContextVar("limit", default=None)

#: Maximum number of bytes of a store that are cached between reads, and their share of a memory limit.
#: Requests in flight take the same amount again.
STORE_ROOM = 128 << 20
PART_OF_STORES = 8
#: Files smaller than this are read without a check of the budget.
_SMALL = 1 << 20
#: Minimum bytes of memory per byte of a text: its bytes, the decoded text, and the parsed result.
_PER_BYTE = 3

P = ParamSpec("P")
T = TypeVar("T")


def get_limit() -> int | None:
    """Return the limit in bytes of the process's anonymous memory; None without a limit."""
    return _LIMIT.get()


@contextlib.contextmanager
def of(memory: str | int | None) -> Iterator[None]:
    """Apply a memory budget to the block; None keeps the current budget.

    Raises:
        FastshardError: ``FS515`` if the value is not a valid size.
    """
    if memory is None:
        yield
        return
    token = _LIMIT.set(parse_size(memory, "memory"))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def kept(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that its argument ``memory`` limits all memory for reading and planning.

    The wrapped function also checks its options, and sees the same content of a small file at each read.
    """
    called = checked(function)

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with of(kwargs.get("memory")), file_digests.kept():  # type: ignore[arg-type]
            return called(*args, **kwargs)

    describe_later(within)
    return within


def ask(size: int, file: str | None = None, *, tensor: str | None = None) -> None:
    """Check that the budget suffices to read ``size`` bytes of a file or of a tensor.

    Raises:
        FastshardError: ``FS512`` if the read exceeds the budget.
    """
    limit = get_limit()
    if limit is None or size < _SMALL:
        return
    need = _core.anonymous_memory() + size * _PER_BYTE
    if need > limit:
        raise FastshardError.of(
            codes.MEMORY_BUDGET,
            "the memory budget is too small "
            f"for the contents of the {'file' if tensor is None else 'tensor'}",
            file=file,
            tensor=tensor,
            expected=f"at least {-(-need >> 20)} MiB",
            got=f"{limit >> 20} MiB",
            help="allow more memory",
            run=[f"--memory {-(-need >> 20)}MiB"],
        )
