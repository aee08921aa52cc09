"""The protocol of an adapter, which recognises a checkpoint's files by name and declares their contents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding, from_core
from ..common.listing import File, Listing
from ..common.near_words import meant
from ..common.options import ACCEPTABLE, MAX_DEGREE, OpenOptions
from ..common.ranks import Coords
from ..common.records import dataclass, field
from ..layouts.declaration import Blocks, Source


def view_of(tensor: _core.StoredTensor) -> tuple[Any, ...]:
    """Return a key that identifies a tensor without reading it: the storage's checksum and size, and the
    view.

    ``torch.save`` stores a slice with its full storage, so two ranks' files may contain the same storage with
    different slices.
    """
    return (
        tensor.get("storage_crc32"),
        tensor["storage_bytes"],
        tensor["dtype"],
        tensor["offset"],
        tuple(tensor["shape"]),
        tuple(tensor["strides"]),
    )


class Contents:
    """The values and tensors that the headers of the files list, by index in :attr:`Found.files`."""

    def __init__(self, catalog: _core.Catalog, readable: list[_core.OpenedFile | None]) -> None:
        self._catalog = catalog
        self._readable = readable
        # Not functools.cache: it would hold the catalog, and its open files, as long as the class lives.
        self._values: dict[int, Any] = {}
        #: Files with more requested values than the limit.
        self.cut: set[int] = set()

    def __call__(self, file: int) -> Any:
        """Return the non-tensor contents of a file; None for an unreadable file."""
        if file not in self._values:
            self._values[file] = None
            if self.readable(file):
                self._values[file], whole = self._catalog.values(file)
                if not whole:
                    self.cut.add(file)
        return self._values[file]

    def readable(self, file: int) -> bool:
        """Return True if the file can be read.

        An unreadable file already has a finding. The result is False for files that an adapter adds later.
        """
        return file < len(self._readable) and self._readable[file] is not None

    def tensors(self, file: int) -> Sequence[_core.StoredTensor]:
        """Return the tensors of a file in its order; each one is built on access."""
        return self._catalog.tensors(file)

    def distributed(self, file: int) -> _core.Distributed:
        """Return the tensors of which the file contains only one rank's part, and the meshes.

        Both are empty for an unreadable file.
        """
        if not self.readable(file):
            return {"meshes": [], "parts": []}
        return self._catalog.distributed(file)

    def partial(self, file: int) -> str | None:
        """Return the first tensor of which a file contains only one rank's part.

        None if all its tensors are full, or if the file cannot be read.
        """
        opened = self._readable[file] if file < len(self._readable) else None
        return None if opened is None else opened["partial"]

    def archive(self, file: int) -> str | None:
        """Return the name of the archive when it was saved; None for other files."""
        opened = self._readable[file]
        return None if opened is None else opened["archive"]

    def listed(self, file: int) -> list[str]:
        """Return the names of a file's tensors in its order."""
        return self._catalog.names(file)

    def names(self) -> set[str]:
        """Return the names of all tensors in the readable files."""
        files = (i for i in range(len(self._readable)) if self.readable(i))
        return {name for i in files for name in self._catalog.names(i)}

    def dtypes(self) -> set[str]:
        """Return the dtypes of all tensors in the readable files."""
        files = (i for i in range(len(self._readable)) if self.readable(i))
        return {dtype for i in files for dtype in self._catalog.dtypes(i)}

    def bytes(self, file: int, tensor: int, limit: int) -> bytes:
        """Return the bytes of a small tensor.

        Raises:
            FastshardError: ``FS515`` if it is larger than ``limit`` bytes.
        """
        try:
            return self._catalog.tensor_bytes(file, tensor, limit)
        except _core.CoreError as error:
            raise from_core(error) from None

    def packed(self, file: int, path: list[str]) -> dict[str, Any] | None:
        """Return an object that the file stores as bytes, converted to plain data: ``values`` and
        ``tensors``.

        Raises:
            FastshardError: if it is malformed or too large.
        """
        try:
            return self._catalog.packed(file, path)
        except _core.CoreError as error:
            raise from_core(error) from None


def checked_accept(what: Iterable[str]) -> frozenset[str]:
    """Check the words passed as ``accept``, and return them as a set.

    Raises:
        FastshardError: ``FS515`` for an unknown word.
    """
    if isinstance(what, str):
        raise FastshardError.of(codes.USAGE, "accept needs a list of values", got=repr(what))
    what = frozenset(what)
    for one in what:
        word, is_given, pattern = one.partition("=")
        if word not in ACCEPTABLE or (is_given and (word != "copies" or not pattern)):
            near = meant(word, ACCEPTABLE)
            raise FastshardError.of(
                codes.USAGE,
                f"accept has no value {one!r}{near}",
                expected=f"{', '.join(ACCEPTABLE)} or copies=GLOB",
            )
    return what


@dataclass(frozen=True)
class Options:
    """The caller's options for reading a source."""

    step: str | None = None
    #: Name below which the model is stored.
    prefix: str | None = None
    config: dict[str, Any] | None = None
    config_path: str | None = None
    accept: frozenset[str] = frozenset()
    layout: str | None = None
    #: Config of a reference and its file, for a checkpoint without a config.
    reference_config: tuple[dict[str, Any], Path] | None = None
    #: All options that were given, by name.
    given: OpenOptions = field(default_factory=OpenOptions)

    @property
    def override_config(self) -> dict[str, Any] | None:
        """The config of ``--config``; None if a reference provides the config."""
        return None if self.given.get("config") is None else self.config

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size without padding."""
        return self.given.get("vocab_size")


#: The information that an adapter derives from names: a frozen record, defined by the adapter or by a
#: container that it reads.
Seen = TypeVar("Seen")
_Seen_co = TypeVar("_Seen_co", covariant=True)


@dataclass(frozen=True)
class Found(Generic[_Seen_co]):
    """Files that an adapter recognised by name."""

    adapter: Adapter[Any]
    framework: str
    #: Files whose headers will be read, in order.
    files: Sequence[File]
    #: Information about the files that :meth:`Adapter.declare` needs.
    seen: _Seen_co
    #: Folder of the checkpoint, relative to its root directory.
    folder: str = ""
    #: Findings derived from names alone.
    findings: Sequence[Finding] = ()
    step: str | None = None
    #: For files of records (``.distcp``), by index in `files`: offset, length and name of each requested
    #: record, and whether it is a Zstandard stream.
    records: Mapping[int, list[tuple[int, int, str, bool]]] = field(default_factory=dict)
    #: True if the adapter supports files that contain parts of tensors.
    reads_parts: bool = False
    #: Stores that files represent (their anchors), by index in `files`.
    blocks: Mapping[int, Blocks] = field(default_factory=dict)


class Adapter(Protocol[Seen]):
    """An adapter, which recognises and declares the checkpoints of one framework."""

    name: str

    def detect(self, listing: Listing, options: Options) -> Found[Seen] | None:
        """Find the files of a checkpoint of this framework by name alone; None if there are none."""

    def declare(self, found: Found[Seen], listing: Listing, values: Contents, options: Options) -> Source:
        """Build the declaration from the files' headers."""


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def counted(text: str, file: File) -> int:
    """Parse a rank, stage or layer number in a file name.

    Raises:
        FastshardError: ``FS106`` for a number higher than in any run.
    """
    number = int(text)
    if number > MAX_DEGREE:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the number in the file's name is higher than any run can have",
            file=file.path,
            expected=f"at most {MAX_DEGREE}",
            got=text if len(text) < 24 else f"{text[:20]}...",
            help="move the file away if it is not part of this save",
        )
    return number


#: Maximum number of missing files to name one by one; above it, ranges are named.
_NAMED = 256


def lacking(have: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """List missing numbers from ``first`` to ``last`` as ranges (first, last), or singly if there are few.

    The running time depends on how many numbers are given, not on their size, because a file name may contain
    any number.
    """
    there = sorted({n for n in have if first <= n <= last})
    bounds = [first - 1, *there, last + 1]
    runs = [(a + 1, b - 1) for a, b in itertools.pairwise(bounds) if b - a > 1]
    if sum(b - a + 1 for a, b in runs) <= _NAMED:
        return [(n, n) for a, b in runs for n in range(a, b + 1)]
    return runs


#: Options that select the parameters if optimizer state is missing.
PARAMETERS_ALONE = ("--weights params",)


def missing(
    path: str,
    coords: Coords,
    why: str,
    help: str,
    *,
    rank: str | None = None,
    upto: str | None = None,
    count: int | None = None,
    run: Sequence[str] = (),
) -> Finding:
    """Report a missing file, or a range of missing files.

    Args:
        path: path of the file, or of the first file of a range.
        coords: the rank that wrote it, by dimension; for a range, the ranks.
        why: what requires it to exist.
        help: what to do.
        rank: the usual name of the rank, if ``coords`` names it differently.
        upto: name of the last file of a range.
        count: how many files the range has, if it is not one file for each rank of ``coords``.
        run: commands that do what ``help`` says.
    """
    what = "the file is missing" if upto is None else f"the files from this one to {upto} are missing"
    more: dict[str, Any] = {} if rank is None else {"rank": rank}
    ranges = [numbers for numbers in coords.values() if isinstance(numbers, range)]
    if upto is not None and (count or ranges):
        more["count"] = count or math.prod(map(len, ranges))
    return Finding.of(
        codes.MISSING_FILE, what, file=path, coords=coords, evidence=why, help=help, run=run, **more
    )


def unexpected(path: str, why: str) -> Finding:
    """Report a file that is not part of this checkpoint and was not read; ``why`` states the evidence."""
    return Finding.of(codes.UNEXPECTED_FILE, why, file=path, help="move the file away if another run left it")
