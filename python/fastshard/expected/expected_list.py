"""The list of the tensors that a config promises, as a document and as a roster for comparisons."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .. import _core
from ..common import codes, json_text
from ..common.dtypes import TORCH_NAMES
from ..common.errors import FastshardError
from ..common.records import dataclass, field

__all__ = [
    "ExpectedTensor",
    "ExpectedTensors",
    "Part",
    "document_of",
    "from_document",
    "patterns",
    "roster_of",
    "unexpected_allowed",
]

SCHEMA = "fastshard.expected.v1"
#: Maximum number of digits of a dimension; each has an extent of two or more, and their product is the number
#: of elements.
_MOST_DIGITS = 62
_DTYPES = {torch: name for name, torch in TORCH_NAMES.items()}


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a config promises.

    Examples:
        >>> next(iter(fastshard.expected_tensors("model")))
        ExpectedTensor(name='gpt_neox.embed_in.weight', dtype='F32', shape=(500, 32))
    """

    name: str
    #: Dtype by its safetensors name, e.g. ``BF16``.
    dtype: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A box of a tensor on disk, and the place of its elements in a tensor in memory."""

    #: Name in memory.
    name: str
    #: Offset of its first element in that tensor.
    offset: int
    #: First index of the box in each dimension.
    start: tuple[int, ...]
    #: Digits of each dimension, outermost first: extent, and stride in memory in elements. A dimension of
    #: extent 1 has none.
    dims: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a config promises; iteration yields those on disk, and ``len`` counts them.

    Examples:
        >>> expected = fastshard.expected_tensors("model")
        >>> len(expected), expected.parameters
        (40, 70176)
    """

    #: The model class that was built, and its model_type.
    model_class: str
    model_type: str
    #: Version of transformers.
    transformers: str
    #: The tensors that `save_pretrained` would write.
    tensors: tuple[ExpectedTensor, ...]
    #: The tensors of the model in memory.
    in_memory: tuple[ExpectedTensor, ...]
    #: Names on disk that differ from the tensors in memory, with the parts that tile each tensor; None for a
    #: computed tensor. They include tied tensors that are not written.
    made: Mapping[str, tuple[Part, ...] | None]
    #: Groups of names in memory that share one tensor.
    ties: tuple[tuple[str, ...], ...]
    #: Patterns (regular expressions) of names that may be missing, and of allowed unexpected names.
    may_be_missing: tuple[str, ...]
    may_be_unexpected: tuple[str, ...]
    #: True if the config states that weights are quantised; the list then has the unquantised weights, and no
    #: scales.
    quantised: bool = False
    #: Names of tensors that the class keeps in float32, by the narrower dtype of its other weights.
    keeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<ExpectedTensors {self.model_class}: {len(self)} tensors, transformers {self.transformers}>"

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @cached_property
    def mapping(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors on disk by those in memory, without tensors that have one name in both."""
        found: dict[str, dict[str, None]] = {}
        for name, parts in self.made.items():
            for part in parts or ():
                found.setdefault(part.name, {})[name] = None
        return {name: tuple(disk) for name, disk in found.items() if tuple(disk) != (name,)}

    @cached_property
    def only_in_memory(self) -> frozenset[str]:
        """Names in memory that no tensor on disk has.

        These are the names of fused tensors, of moved parts, and of further copies of tied tensors.
        """
        return frozenset({t.name for t in self.in_memory} - {t.name for t in self.tensors})

    @property
    def authority(self) -> str:
        """Class, version and digest; a run cannot be resumed with another list."""
        import hashlib

        digest = hashlib.sha256(json_text.canonical(self.to_document()).encode()).hexdigest()
        return f"{self.model_class} of transformers {self.transformers}, sha256:{digest}"

    def to_document(self) -> dict[str, Any]:
        """Returns the JSON document that ``--like`` reads."""
        return {
            "schema": SCHEMA,
            "class": self.model_class,
            "model_type": self.model_type,
            "transformers": self.transformers,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "in_memory": [[t.name, t.dtype, list(t.shape)] for t in self.in_memory],
            "made": {name: None if parts is None else list(parts) for name, parts in self.made.items()},
            "ties": [list(group) for group in self.ties],
            "may_be_missing": list(self.may_be_missing),
            "may_be_unexpected": list(self.may_be_unexpected),
            "quantised": self.quantised,
            "keeps": {dtype: list(names) for dtype, names in self.keeps.items()},
        }


def document_of(answer: Mapping[str, Any], quantised: bool = False) -> dict[str, Any]:
    """Make the document from a worker's answer, with safetensors dtype names."""
    tensors = {
        part: [[name, _DTYPES.get(dtype, dtype), shape] for name, dtype, shape in answer[part]]
        for part in ("tensors", "in_memory")
    }
    return {"schema": SCHEMA, **answer, **tensors, "quantised": quantised}


def from_document(document: object, file: str) -> ExpectedTensors:
    """Read a list of expected tensors.

    Args:
        document: parsed JSON.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS211`` if the document is not such a list.
    """
    try:
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return ExpectedTensors(
            _text(document["class"]),
            _text(document["model_type"]),
            _text(document["transformers"]),
            _tensors(document["tensors"]),
            _tensors(document["in_memory"]),
            {_text(name): _parts_of(parts) for name, parts in document["made"].items()},
            tuple(_texts(group) for group in document["ties"]),
            _texts(document["may_be_missing"]),
            _texts(document["may_be_unexpected"]),
            document["quantised"] is True,
            {_text(dtype): _texts(names) for dtype, names in document.get("keeps", {}).items()},
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise FastshardError.of(
            codes.BAD_VALUE,
            f"not a list of expected tensors: {why}",
            file=file,
            help="create the list again",
            run=["fastshard expected CONFIG -o FILE"],
        ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a name in it is not text")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("an entry in it is not a list")
    return tuple(map(_text, value))


def _parts_of(value: object) -> tuple[Part, ...] | None:
    if value is None:
        return None
    try:
        return tuple(
            Part(
                _text(name),
                _number(offset),
                tuple(_number(at) for at in start),
                tuple(
                    tuple((_number(n, least=2), _number(stride)) for n, stride in digits)
                    for digits in _as_many(dims, start)
                ),
            )
            for name, offset, start, dims in value  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"a part in it is invalid: {error}") from None


def _number(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"invalid number: {value!r:.40}")
    return value


def _as_many(dims: list[Any], start: list[Any]) -> list[Any]:
    if len(dims) != len(start):
        raise ValueError(f"{len(dims)} dimensions, but {len(start)} first indices")
    if any(len(digits) > _MOST_DIGITS for digits in dims):
        raise ValueError("more elements than a tensor can have")
    return dims


def _tensors(value: object) -> tuple[ExpectedTensor, ...]:
    if not isinstance(value, list):
        raise ValueError("its tensors are not a list")
    found = {}
    for name, dtype, shape in value:
        if dtype not in TORCH_NAMES or not isinstance(shape, list):
            raise ValueError(f"a tensor in it has no known dtype or no shape: {name!r}")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ValueError(f"a tensor in it has an invalid shape: {name!r}")
        found[_text(name)] = ExpectedTensor(name, dtype, tuple(shape))
    if len(found) < len(value):
        raise ValueError("it names a tensor twice")
    return tuple(found.values())


def roster_of(
    listed: ExpectedTensors, in_memory: bool = False, stored_as: Mapping[str, Sequence[str]] | None = None
) -> _core.Roster:
    """Convert the list into a roster to compare a checkpoint with: names on disk or in memory.

    One of several tied tensors is enough.

    Dtypes are not compared, because a model is saved in the dtype in which it was trained.

    Args:
        listed: the tensors that the config promises.
        in_memory: True for the names in memory.
        stored_as: the stored names of tensors that are stored in another form.
    """
    optional = patterns(listed.may_be_missing)
    shapes = {t.name: t.shape for t in listed.in_memory}
    entries: dict[str, tuple[str, list[int | None] | None, str | None, bool]] = {
        t.name: (t.name, list(t.shape), None, any(p.search(t.name) for p in optional))
        for t in (listed.in_memory if in_memory else listed.tensors)
    }
    for name, others in (stored_as or {}).items():
        if entries.pop(name, None) is not None:
            entries |= {one: (one, None, None, False) for one in others}
    groups: list[list[str]] = []
    for group in listed.ties:
        mapping = {} if in_memory else listed.mapping
        spelled = {one: name for name in group for one in mapping.get(name, (name,))}
        if not spelled.keys() & entries.keys():
            continue
        for one, name in spelled.items():
            if one not in entries and name in shapes:
                entries[one] = (one, list(shapes[name]), None, False)
        groups.append([one for one in spelled if one in entries])
    return _core.Roster(list(entries.values()), groups)


def patterns(texts: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile the patterns of a class, and skip invalid ones."""
    found = []
    for text in texts:
        with contextlib.suppress(re.error):
            found.append(re.compile(text))
    return found


def unexpected_allowed(listed: ExpectedTensors, names: Iterable[str]) -> set[str]:
    """Return the names outside the list that the class accepts as unexpected."""
    allowed = patterns(listed.may_be_unexpected)
    return {name for name in names if any(pattern.search(name) for pattern in allowed)}
