"""EasyLM's streams: the choice of the stream, and its arrays as blocks that are read in place."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ... import _core
from ...common import codes, safe_files
from ...common.dtypes import item_size
from ...common.errors import FastshardError, Finding, error_for, from_core
from ...common.listing import READABLE_ALONE, File, Listing
from ...common.records import dataclass
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Binding, Blocks, Source
from ...zarr.remote_ranges import fetch_range
from .. import hf_config
from ..base import Contents, Found, Options
from ..choose_step import SeveralModels
from ..orbax.file_snapshot import Files
from . import llama
from .streams import StoredArray, is_stream, scan

#: source: EasyLM checkpoint.py (StreamingCheckpointer.save_all)
_STREAM = compile_when_used(r"^streaming_(?P<what>train_state|params)(?:_(?P<step>\d{1,18}))?$")
#: Weights of Hugging Face. A stream next to them was converted from them, or they from it.
_WEIGHTS = compile_when_used(r".*\.safetensors$|pytorch_model.*\.bin$")
#: Size of a block in bytes; large arrays are read by rows.
_BLOCK = 32 << 20
#: Maximum number of streams in a message.
_NAMED = 8


@dataclass(frozen=True)
class StreamFile:
    """A stream and its contents."""

    arrays: Sequence[StoredArray]
    #: The blocks of each array: first index, extent, number of the block.
    pieces: Sequence[list[tuple[list[int], list[int], int, int]]]


class EasyLM:
    """Files ``streaming_params`` and ``streaming_train_state``, or a single stream of another name."""

    name = "easylm"

    def detect(self, listing: Listing, options: Options) -> Found[StreamFile] | None:
        """Choose the stream, and find the places of its arrays.

        Raises:
            FastshardError: ``FS106`` for several streams if nothing determines which one to use, and as
                :func:`~fastshard.sources.easylm.streams.scan`.
        """
        if not listing.single and any(_WEIGHTS.match(file.name) for file in listing.files):
            return None
        streams = [file for file in listing.files if _STREAM.match(file.name)]
        if listing.single and not streams:
            streams = [file for file in listing.files if _is_stream_by_bytes(listing, file)]
        if not streams:
            return None
        file, findings = _choose(listing, streams, options)
        path = _path_of(listing, file)
        # Some files of other formats may be empty; a stream is not.
        empty = None if file.size else _core.stand_in(file.path, b"", 0)
        if stand_in := empty or safe_files.stand_in(path, file.path):
            raise error_for([stand_in])
        reader = _Reader(path, file.path, is_remote=_core.is_remote(listing.roots[file.root]))
        arrays = scan(path, file.path)
        if not arrays:
            raise FastshardError.of(
                codes.NOT_A_CHECKPOINT,
                "the EasyLM stream holds no arrays",
                file=file.path,
                help="name a stream that holds the model",
            )
        pieces = [reader.add(array) for array in arrays]
        apart = ([file.root] * len(reader.tensors), reader.send) if reader.is_remote else None
        files = Files(listing, [file])
        blocks = Blocks(reader.tensors, reader, files.identity(), files.files, files.look, apart)
        match = _STREAM.match(file.name)
        return Found(
            self,
            "EasyLM",
            [file],
            StreamFile(arrays, pieces),
            file.folder,
            findings,
            step=match["step"] if match else None,
            blocks={0: blocks},
        )

    def declare(
        self, found: Found[StreamFile], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare every array as boxes of its blocks, and the model if it is a LLaMA."""
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        source.binding.vocab_size = options.vocab_size
        tensors = [
            (array.name, list(array.shape), list(pieces))
            for array, pieces in zip(found.seen.arrays, found.seen.pieces, strict=True)
        ]
        source.files.assembled.append(Assembled(0, {}, None, None, tensors, frozen=True))
        names = [array.name for array in found.seen.arrays]
        llama.describe(source, names, *hf_config.config_of(listing, found.folder, options))
        return source


def _is_stream_by_bytes(listing: Listing, file: File) -> bool:
    return not file.name.endswith(READABLE_ALONE) and is_stream(_path_of(listing, file))


def _path_of(listing: Listing, file: File) -> Path:
    return listing.roots[file.root] / file.path


def _choose(listing: Listing, streams: Sequence[File], options: Options) -> tuple[File, list[Finding]]:
    """Choose the requested stream, or the only one, or the one with the highest number.

    Raises:
        FastshardError: ``FS106`` if nothing determines which one to use, ``FS501`` for a missing step.
    """
    by_step = {file: match["step"] for file in streams if (match := _STREAM.match(file.name))}
    if options.step is not None:
        wanted = [file for file in streams if options.step in (file.path, file.name, by_step.get(file))]
        if not wanted:
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                f"there is no stream for step {options.step!r}",
                expected=", ".join(file.path for file in streams[:_NAMED]),
                help="choose another step",
                run=["--step NAME"],
            )
        streams = wanted
    if len(streams) == 1:
        return streams[0], []
    kinds = {(file.root, file.folder, (_STREAM.match(file.name) or {"what": ""})["what"]) for file in streams}
    if len(kinds) == 1 and all(by_step.values()):
        newest = max(streams, key=lambda file: int(by_step[file]))
        note = Finding.of(
            codes.STEP_TAKEN,
            f"{newest.path} is used, the newest by number; {_count_more(len(streams) - 1)} available",
            help="choose another stream",
            run=["--step NUMBER"],
        )
        return newest, [note]
    # The one without a number is written over again and again: only a pickle beside it tells its step.
    named = [file.path for file in streams[:_NAMED]]
    finding = Finding.of(
        codes.AMBIGUOUS,
        "there are several EasyLM streams, and nothing states which one to use",
        got=", ".join(named),
        help="pass the file of one stream as CKPT",
        run=[f"fastshard inspect {shlex.quote(str(_path_of(listing, file)))}" for file in streams[:_NAMED]],
    )
    raise SeveralModels(finding, files=named)


def _count_more(count: int) -> str:
    return "1 more is" if count == 1 else f"{count} more are"


def list_streams(folder: Path) -> list[Path]:
    """List the streams in a folder, oldest first; those without a number come last."""
    found = [(match, path) for path in folder.iterdir() if (match := _STREAM.match(path.name))]
    found.sort(key=lambda each: (each[0]["step"] is None, int(each[0]["step"] or 0), each[1].name))
    return [path for _, path in found if path.is_file()]


class _Reader:
    """A reader that reads blocks directly into the given buffer."""

    def __init__(self, path: Path, label: str, *, is_remote: bool) -> None:
        self._path, self._label, self.is_remote = path, label, is_remote
        self._extents: dict[str, list[tuple[int, int]]] = {}
        #: Key, dtype, shape and additional bytes of each block.
        self.tensors: list[tuple[str, str, list[int], int]] = []

    def add(self, array: StoredArray) -> list[tuple[list[int], list[int], int, int]]:
        """Divide an array into blocks of rows, and return its pieces."""
        row = math.prod(array.shape[1:]) * item_size(array.dtype)
        count = array.shape[0] if array.shape and row else 1
        step = max(1, _BLOCK // row) if row else 1
        pieces = []
        for first in range(0, count, step) if count else (0,):
            rows = min(step, count - first)
            lo, extent = [0] * len(array.shape), list(array.shape)
            if array.shape and row:
                lo[0], extent[0] = first, rows
            key = array.name if step >= count else f"{array.name}#{first}"
            self._extents[key] = list(_find_within(array.extents, first * row, rows * row))
            pieces.append((lo, extent, 0, len(self.tensors)))
            self.tensors.append((key, array.dtype, extent, 0))
        return pieces

    def __call__(self, block: str, view: memoryview) -> None:
        """Fill ``view`` with the elements of a block.

        Raises:
            FastshardError: ``FS506`` for a file that has been truncated, ``FS507`` if it cannot be read.
        """
        done = 0
        with safe_files.opened(self._path, label=self._label, most=0) as descriptor:
            for start, length in self._extents[block]:
                part = view[done : done + length]
                if self.is_remote:
                    with fetch_range((self._path, start, start + length)):
                        self._fill(descriptor, start, part)
                else:
                    self._fill(descriptor, start, part)
                done += length

    def _fill(self, descriptor: int, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], start + done)
            except OSError as error:
                raise FastshardError.of(
                    codes.IO, f"cannot read: {error.strerror}", file=self._label
                ) from None
            if not count:
                raise FastshardError.of(
                    codes.SOURCE_CHANGED,
                    "the file became shorter while it was read",
                    file=self._label,
                    help="wait until nothing changes the checkpoint, then run the command again",
                )
            done += count

    def send(self, blocks: Iterable[str]) -> None:
        """Announce that blocks on another host will be read.

        Raises:
            FastshardError: if the announcement fails.
        """
        ranges = [
            (self._path, start, start + length)
            for block in dict.fromkeys(blocks)
            for start, length in self._extents[block]
        ]
        try:
            _core.will_read(ranges)
        except _core.CoreError as error:
            raise from_core(error) from None


def _find_within(extents: Iterable[tuple[int, int]], first: int, length: int) -> Iterable[tuple[int, int]]:
    """Yield the ranges of a file that contain a range of an array's bytes."""
    for start, size in extents:
        if first < size and length:
            part = min(size - first, length)
            yield start + first, part
            length -= part
            first = 0
        else:
            first = max(0, first - size)
