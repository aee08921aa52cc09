"""Writing a checkpoint from a script, tensor by tensor: it is checked, and published complete or not at
all."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import downloaded_files
from ..checkpoint.manifests import Manifest
from ..checkpoint.tensor_map import Tensors, TorchTensors
from ..common import codes, config_text, option_checks
from ..common.byte_sizes import parse_size
from ..common.dtypes import ML_DTYPES_NAMES, NUMPY_NAMES, TORCH_NAMES, item_size
from ..common.errors import UNPUBLISHED, FastshardError, Finding, carry, error_for, from_core, raise_errors
from ..common.options import StrPath
from ..common.progress import Progress
from ..common.thread_counts import thread_count
from ..models import tensor_words
from ..models import tokenizer as tokenizers
from . import companion_files

if TYPE_CHECKING:
    from ..checkpoint.mapped_files import Bytes

__all__ = ["Writer"]

_FROM_NUMPY = {name: dtype for dtype, name in (NUMPY_NAMES | ML_DTYPES_NAMES).items()}
_FROM_TORCH = {v: k for k, v in TORCH_NAMES.items()}

#: Expected dtype and shape; None for any.
Wanted = tuple[str | None, tuple[int, ...] | None]


class Writer:
    """Writes tensors one by one into a sharded safetensors checkpoint.

    If the block ends without an exception, the result is checked against ``expected``, gets an index and a
    manifest, and appears at ``out`` in one step. If the block raises an exception, or an expected tensor is
    missing, no result appears.

    Args:
        out: destination directory; must not exist, or be empty, unless ``overwrite``.
        expected: the tensors to write: names mapped to (dtype, shape), to a shape, or to None (any); or just
            names. A :class:`~fastshard.Manifest`, an opened checkpoint without errors, or arrays (a model's
            ``state_dict()``) are accepted too. Dtypes may have their safetensors, torch or numpy names. The
            config.json, tokenizer, generation config and code of an opened checkpoint are copied to the
            result, as in a merge.
        max_shard_size: maximum size of a file, e.g. ``5GB``.
        overwrite: replace ``out`` if it exists.
        fsync: sync everything to disk before the result is published.
        config: written as ``config.json``.
        accept: ``["non-finite"]`` to allow NaN and infinite values, which are otherwise an error (``FS306``);
            the manifest records it.
        check_hub: before the result appears, compare the files of the expected checkpoint with the hashes of
            the download in the Hub's cache (``FS308``); each file is read one more time. Otherwise a note
            reports that they were not compared.

    Raises:
        FastshardError: if ``out`` cannot be written to; ``FS515`` for an invalid value of an option; all
            findings of an opened checkpoint with errors, because it does not state which tensors must be
            written.
        TypeError: for an unknown option.

    Examples:
        >>> import numpy as np
        >>> with fastshard.Writer("out", expected={"w": ("F32", (2, 3))}) as writer:
        ...     writer["w"] = np.zeros((2, 3), np.float32)
        >>> fastshard.verify("out").ok
        True
    """

    @option_checks.checked
    def __init__(
        self,
        out: StrPath,
        *,
        expected: Mapping[str, Any] | list[str] | set[str] | None = None,
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
        fsync: bool = True,
        config: Mapping[str, Any] | None = None,
        accept: Iterable[str] = (),
        check_hub: bool = False,
    ) -> None:
        if config is not None and not isinstance(config, Mapping):
            raise option_checks.refused("config", "a dict", config)
        self._expected = None if expected is None else _expected(expected)
        self._config = None if config is None else dict(config)
        self._accept = _accepted(accept)
        #: The checkpoint whose companion files are copied; None if there is none.
        self._like = expected if isinstance(expected, Tensors) else None
        #: The checkpoint whose files are compared with the hashes of a download, or reported as not compared.
        self._from = expected.tensors if isinstance(expected, TorchTensors) else self._like
        self._check_hub = check_hub
        self._written: set[str] = set()
        #: The result's manifest, once it is published.
        self.manifest: Manifest | None = None
        try:
            self._core = _core.ResultWriter(
                os.fspath(out),
                _bytes_of(self._expected or {}),
                parse_size(max_shard_size, "max_shard_size"),
                overwrite,
                fsync,
            )
        except _core.CoreError as error:
            raise from_core(error) from None

    def __enter__(self) -> Writer:
        return self

    def __setitem__(self, name: str, array: Any) -> None:
        """Write a tensor: a numpy array, a torch tensor, or a :class:`~fastshard.Tensor`.

        The writer reads the bytes only once, so that the hash matches the written bytes even if another
        thread changes them.

        Raises:
            FastshardError: if the tensor is unexpected, or if its dtype or shape is; ``FS514`` if safetensors
                cannot store it, or if its name is too long for a header.
        """
        dtype, shape, data = _raw(name, array)
        if self._expected is not None:
            if name not in self._expected:
                raise FastshardError.of(codes.UNKNOWN_TENSOR, "unexpected tensor", tensor=name)
            want_dtype, want_shape = self._expected[name]
            if want_shape is not None and tuple(want_shape) != shape:
                raise FastshardError.of(
                    codes.SHAPE,
                    "shape",
                    tensor=name,
                    expected=str(list(want_shape)),
                    got=str(list(shape)),
                    help=self._resized(),
                )
            if want_dtype is not None and want_dtype != dtype:
                raise FastshardError.of(codes.DTYPE, "dtype", tensor=name, expected=want_dtype, got=dtype)
        try:
            self._core.add(name, dtype, list(shape), data)
        except _core.CoreError as error:
            raise from_core(error) from None
        self._written.add(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            if left := self._abandon():
                carry(error, left)
            return
        try:
            if not self._written:
                raise FastshardError.of(codes.USAGE, "nothing was written", help="write at least one tensor")
            missing = sorted(set(self._expected or ()) - self._written)
            raise_errors(
                [
                    Finding.of(
                        codes.MISSING_TENSOR,
                        "the tensor is expected, but was never written",
                        tensor=name,
                        help=f"write it before the block ends; {UNPUBLISHED}",
                    )
                    for name in missing
                ]
            )
            downloaded = self._find_damaged_downloads()
            raise_errors(downloaded)
            texts, copies = self._companions()
            values = {"accept": list(self._accept)} if self._accept else None
            document, findings = self._core.finish(
                texts, copies, values, tensor_words.declared(), "non-finite" in self._accept
            )
        except _core.CoreError as core_error:
            raise error_for([*from_core(core_error).findings, *self._abandon()]) from None
        except BaseException as stopped:
            if left := self._abandon():
                carry(stopped, left)
            raise
        self.manifest = Manifest.written(document, [*downloaded, *findings])

    def _find_damaged_downloads(self) -> list[Finding]:
        """Find files of the expected checkpoint that differ from the download or that were not compared."""
        # A script that expects no checkpoint needs none of this.
        from ..checkpoint.checkpoint import Checkpoint
        from .in_memory import View

        checkpoint = self._from.checkpoint if isinstance(self._from, View) else self._from
        if not isinstance(checkpoint, Checkpoint):
            return []
        if not self._check_hub:
            return downloaded_files.find_unchecked(checkpoint)
        with Progress(False) as bar:
            return downloaded_files.compare_download(checkpoint, (1, 1), thread_count(None), bar)

    def _companions(self) -> tuple[dict[str, str], list[companion_files.CopiedFile]]:
        """Return the small files of the result: texts by name, and copies.

        Raises:
            FastshardError: ``FS603``, ``FS601`` if those of the checkpoint are unsafe to read.
        """
        texts: dict[str, str] = {}
        copies: list[tuple[str, str]] = []
        if self._like is not None:
            plan = self._like._plan
            texts |= plan.texts
            copies += companion_files.along(
                plan, tokenizers.find(None, plan.source.files.folders), given=False
            )
        if self._config is not None:
            texts["config.json"] = config_text.written(self._config)
        places = [] if self._like is None else self._like._plan.source.files.folders
        return texts, companion_files.hash_copies(
            [(name, path) for name, path in copies if name not in texts], places
        )

    def _resized(self) -> str | None:
        """Return advice about a tensor of another shape, if the checkpoint's config is part of the result."""
        if self._like is None:
            return None
        return (
            "the config.json of the expected checkpoint is copied and states the old size: pass "
            "expected={**CHECKPOINT, NAME: SHAPE} with the new one, and config= with a config of the new "
            "size"
        )

    def _abandon(self) -> list[Finding]:
        """Remove the written files; a failure to remove them does not hide the original error."""
        try:
            self._core.abort()
        except _core.CoreError as error:
            return from_core(error).findings
        return []


def _accepted(accept: Iterable[str]) -> tuple[str, ...]:
    """Check and return the accepted words.

    Raises:
        FastshardError: ``FS515`` for any word except ``non-finite``.
    """
    words = (accept,) if isinstance(accept, str) else tuple(accept)
    for word in words:
        if word != "non-finite":
            raise option_checks.refused("accept", "non-finite", word)
    return words


def _expected(given: Any) -> dict[str, Wanted]:
    """Return the expected dtype and shape of each name, from any of the supported forms.

    Raises:
        FastshardError: ``FS515`` for an unsupported form.
    """
    if isinstance(given, (str, bytes)):
        raise option_checks.refused("expected", "names, or a dict", given)
    if isinstance(given, TorchTensors):
        given = given.tensors
    if isinstance(given, Tensors):
        raise_errors(given.findings)
    try:
        names = list(given)
    except TypeError:
        raise option_checks.refused("expected", "names, or a dict", given) from None
    if not all(isinstance(name, str) for name in names):
        raise option_checks.refused("expected", "names, or a dict", given)
    return {name: _wanted(name, given[name] if isinstance(given, Mapping) else None) for name in names}


def _bytes_of(expected: Mapping[str, Wanted]) -> int:
    """Return the number of expected bytes as far as it is known, to check the free disk space.

    An element of an unknown dtype counts as one byte.
    """
    known = (
        math.prod(shape) * (item_size(dtype) if dtype else 1) for dtype, shape in expected.values() if shape
    )
    return min(sum(known), (1 << 63) - 1)


def _wanted(name: str, value: Any) -> Wanted:
    if value is None:
        return None, None
    dtype = None
    shape = value
    try:
        if isinstance(value, Mapping):
            dtype, shape = value["dtype"], value["shape"]
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype, shape = value.dtype, value.shape
        elif len(value) == 2 and not hasattr(value[1], "__index__"):
            dtype, shape = value
        extents = tuple(operator.index(n) for n in shape)
    except (TypeError, KeyError):
        raise option_checks.refused(
            f"expected[{name!r}]", "(dtype, shape), a shape, or None", value
        ) from None
    if dtype is None:
        return None, extents
    word = str(dtype).removeprefix("torch.")
    found = word if word in TORCH_NAMES else _FROM_TORCH.get(word) or _FROM_NUMPY.get(word)
    if found is None:
        raise option_checks.refused(f"expected[{name!r}]", f"a dtype: {', '.join(TORCH_NAMES)}", value)
    return found, extents


def _raw(name: str, array: Any) -> tuple[str, tuple[int, ...], Bytes]:
    """Return dtype, shape and C-ordered little-endian bytes of anything array-like, copied at most once.

    Raises:
        FastshardError: ``FS514`` for a dtype that safetensors does not have, and for anything except a full
            array of values (sparse, masked, a rank's part, without memory).
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _raw_torch(name, array)
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        raise FastshardError.of(
            codes.UNSUPPORTED, "a masked array", tensor=name, help="fill the masked elements: .filled()"
        )
    values = np.asarray(array)
    dtype = _FROM_NUMPY.get(values.dtype.name)
    if dtype is None:
        raise FastshardError.of(codes.UNSUPPORTED, f"dtype {values.dtype}", tensor=name)
    big = values.dtype.byteorder == ">"
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<") if big else None)
    return dtype, values.shape, little.reshape(-1).view(np.uint8)


def _raw_torch(name: str, tensor: Any) -> tuple[str, tuple[int, ...], Bytes]:
    import torch

    dtype = _FROM_TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise FastshardError.of(codes.UNSUPPORTED, f"dtype {tensor.dtype}", tensor=name)
    if hasattr(tensor, "full_tensor"):
        raise FastshardError.of(
            codes.UNSUPPORTED, "a DTensor", tensor=name, help="write the result of .full_tensor()"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "a tensor on the meta device" if tensor.is_meta else f"layout {tensor.layout}"
        raise FastshardError.of(
            codes.UNSUPPORTED, kind, tensor=name, help="write a dense tensor that holds values"
        )
    # A conjugated or negated view is one by a flag: its memory holds the other numbers.
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu", memory_format=torch.contiguous_format)
    plain = plain.contiguous()
    return dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()
