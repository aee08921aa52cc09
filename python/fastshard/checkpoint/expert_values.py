"""Experts whose values show that they were never written or loaded: copies of other experts, zeros, and
constants.

The core compares tensors with each other; this module also compares experts inside a tensor, and experts of
different layers. It finds suspects by a few bytes of each expert, and then compares all bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..common import codes, memory_budget
from ..common.dtypes import item_size, numpy_dtype
from ..common.errors import Finding, from_core
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..models.tensor_words import WORDS
from .drafting import UNPLACED, CoreRequest, Opened, draft_of

if TYPE_CHECKING:
    import numpy as np

    from .checkpoint import Checkpoint

__all__ = ["ExpertCheck", "check_experts"]

#: Number of bytes of an expert's matrix to read when searching for suspects.
_SAMPLE = 1 << 10
#: Number of bytes of a suspect to read at a time.
_WINDOW = 4 << 20
#: Maximum size in bytes of an encoded tensor that is decoded again; decoding a part costs as much as decoding
#: all.
_DECODED = 64 << 20
#: Minimum number of distinct values in a sample for equal samples to count as evidence, as in the core.
_VALUES = 64
#: Maximum number of open files.
_OPEN = 64
#: Maximum number of experts that findings name individually.
_NAMED = 4
#: Suffixes of files that store a tensor's bytes unencoded.
_PLAIN = (".pt", ".pth", ".bin", ".safetensors", ".distcp", ".ckpt")
#: Name patterns of tensors that accompany a weight and may be equal for many experts.
_BESIDE = ("*bias*", "*scale*", "*zero*", "*norm*", "*shape*", "*absmax*", "*amax*", "*g_idx*", "*lora*")
_COUNTED = compile_when_used(r"(?:.*_)?(\d+)")
_PARAMETER = compile_when_used(rf"(?:{'|'.join(WORDS['parameters'])})(\d+)")
_WORD = compile_when_used(r"[^\W_]+")
_FLOATS = ("F64", "F32", "F16", "BF16")
_HELP = "copy the file that holds it again, or compare it with a good copy: `fastshard diff GOOD CKPT`"


@dataclass(frozen=True)
class ExpertCheck:
    """The outcome of comparing experts."""

    findings: list[Finding]
    #: Descriptions of damage that would not be noticed.
    unnoticed: list[str]


@dataclass(frozen=True)
class _Name:
    """The parsed name of an expert's tensor."""

    #: The name with ``#`` for the numbers of layer and expert.
    pattern: str
    #: The pattern up to the word for experts, which all matrices of an expert share.
    stack: str
    layer: int | None
    expert: int | None


class _Expert(NamedTuple):
    """An expert: its stack, and its layer and expert numbers as far as known."""

    stack: str
    #: Layer number; -1 if the name has none.
    layer: int
    number: int
    #: False if the numbers are indices of two dimensions and it is unknown which dimension counts experts.
    is_known: bool = True

    @property
    def text(self) -> str:
        if not self.is_known:
            return f"index [{self.layer}, {self.number}] of {self.stack}"
        of = f" of layer {self.layer}" if self.layer >= 0 else ""
        return f"expert {self.number}{of}"


@dataclass(frozen=True)
class _Matrix:
    """One matrix of one expert: a range of bytes of an output."""

    expert: _Expert
    output: int
    start: int
    size: int


@dataclass(frozen=True)
class _Family:
    """The same matrix of all experts of all layers."""

    pattern: str
    dtype: str
    #: True if each expert is a separate tensor.
    is_apart: bool
    #: True if one tensor contains the experts of all layers.
    has_layers: bool
    matrices: list[_Matrix]


def check_experts(
    checkpoint: Checkpoint, plan: _core.Plan | None = None, *, reports_zeros: bool = False
) -> ExpertCheck:
    """Find duplicate, all-zero and constant experts that the core does not report.

    All findings are warnings or notes, because a good model may contain them: a MoE model that was
    initialised from a dense model starts with equal experts.

    Args:
        checkpoint: the checkpoint.
        plan: a plan whose outputs are the stored tensors; None to make one if necessary.
        reports_zeros: True if the core reports all-zero parts of tensors, as it does in a verification.

    Raises:
        FastshardError: if the stored tensors cannot be planned.
    """
    opened = checkpoint.opened
    if not _may_have_experts(opened):
        return ExpertCheck([], [])
    plan = _plan_stored(opened) if plan is None else plan
    families = _list_families(plan)
    if not families:
        return ExpertCheck([], [])
    if opened.catalog.reads_store() or any(map(_core.is_remote, checkpoint.roots)):
        # Each of the samples would be a request.
        return ExpertCheck([], ["copied experts inside a tensor would not be noticed (files of a store)"])
    names = [output[0] for output in plan.outputs()]
    reader = _Reader(plan, names)
    try:
        found = [_compare_family(family, reader, names, reports_zeros) for family in families]
    except _core.CoreError as error:
        # What cannot be read is told where all of it is read.
        del error
        return ExpertCheck([], [])
    finally:
        reader.close()
    findings = [
        *_report_copies([one for one in found if one.pairs], names),
        *_report_copies_by_design([one for one in found if one.by_design], names),
        *_report_constants(found, names),
    ]
    unnoticed = [
        f"copied experts inside {names[output]} would not be noticed (too large to be decoded again)"
        for output in reader.skipped
    ]
    return ExpertCheck(findings, unnoticed[:1])


def _may_have_experts(opened: Opened) -> bool:
    """Return True if a name in the files contains a word for experts, without parsing names."""
    names = (name for file in range(len(opened.files)) for name in opened.catalog.names(file))
    return any("expert" in name or "moe" in name for name in map(str.lower, names))


def _plan_stored(opened: Opened) -> _core.Plan:
    """Plan the stored tensors without changes.

    Raises:
        FastshardError: if they cannot be planned.
    """
    try:
        return draft_of(opened.catalog, CoreRequest(opened.source)).place(UNPLACED)
    except _core.CoreError as error:
        raise from_core(error) from None


def _list_families(plan: _core.Plan) -> list[_Family]:
    """List the matrices of experts, by name and dtype."""
    sizes = plan.summary()["dimensions"]
    families: dict[tuple[str, str, tuple[int, ...]], _Family] = {}
    for number, (name, dtype, shape, size, _) in enumerate(plan.outputs()):
        known = _take_apart(name, len(shape))
        if known is None or not size:
            continue
        leading = 0 if known.expert is not None else 1 if known.layer is not None else 2
        matrix = tuple(shape[leading:])
        if sum(extent > 1 for extent in matrix) < 2 or 0 in shape:
            continue
        experts = list(_list_experts(known, tuple(shape[:leading]), sizes))
        if not experts:
            continue
        key = (known.pattern, dtype, matrix)
        family = families.setdefault(key, _Family(known.pattern, dtype, leading == 0, leading == 2, []))
        width = size // len(experts)
        family.matrices.extend(
            _Matrix(expert, number, at * width, width) for at, expert in enumerate(experts)
        )
    return [family for family in families.values() if len(family.matrices) > 1]


def _list_experts(name: _Name, leading: tuple[int, ...], sizes: dict[str, int]) -> Iterator[_Expert]:
    """Yield the experts in a tensor, in the order of its bytes; none if its dimensions do not match."""
    layer = -1 if name.layer is None else name.layer
    if name.expert is not None:
        yield _Expert(name.stack, layer, name.expert)
        return
    count = sizes.get("num_experts")
    if len(leading) == 1:
        if leading[0] > 1 and count in (None, leading[0]):
            yield from (_Expert(name.stack, layer, number) for number in range(leading[0]))
        return
    first, second = leading
    if first < 2 or second < 2 or count not in (None, first, second):
        return
    is_known = count is not None and first != second
    for one in range(first):
        for other in range(second):
            of_layer, number = (other, one) if is_known and first == count else (one, other)
            yield _Expert(name.stack, of_layer, number, is_known)


def _take_apart(name: str, dimensions: int) -> _Name | None:
    """Find the numbers of layer and expert in a name; None for a name that is not an expert's weight.

    ``weight1`` is the first of two matrices of all experts if the tensor has more than two dimensions.
    """
    parts = name.split(".")
    at = max((place for place, part in enumerate(parts) if _is_of_experts(part)), default=None)
    if at is None or any(part in WORDS["moments"] for part in parts):
        return None
    rest = parts[at + 1 :]
    if any("shared" in part or part in ("gate", "router") for part in parts[at:]):
        return None
    if any(_is_beside(part) for part in rest):
        return None
    layer = expert = None
    before = list(parts[:at])
    for place in range(at - 1, -1, -1):
        match = _COUNTED.fullmatch(parts[place])
        if match:
            layer = int(match[1])
            before[place] = parts[place][: match.start(1)] + "#"
            break
    for place, part in enumerate(rest):
        match = (_COUNTED if part.isdigit() else _PARAMETER).fullmatch(part)
        if match and dimensions == 2:
            expert = int(match[1])
            rest[place] = part[: match.start(1)] + "#"
            break
    stack = ".".join([*before, parts[at]])
    return _Name(".".join([stack, *rest]), stack, layer, expert)


@lru_cache(1024)
def _is_beside(part: str) -> bool:
    """Return True if a part of a name marks a tensor that accompanies a weight."""
    return any(fnmatchcase(part.lower(), one) for one in _BESIDE)


@lru_cache(1024)
def _is_of_experts(part: str) -> bool:
    """Return True if a part of a name contains a word for experts."""
    words = _WORD.findall(part.lower())
    return any(fnmatchcase(word, one) for word in words for one in WORDS["experts"])


class _Reader:
    """A reader for parts of outputs; it decodes encoded outputs once, if they are not too large."""

    def __init__(self, plan: _core.Plan, names: Sequence[str]) -> None:
        self._plan = plan
        self._names = names
        self._sizes = [output[3] for output in plan.outputs()]
        self._decoded: tuple[int, np.ndarray[Any, Any]] | None = None
        self._plain: dict[int, bool] = {}
        self._files: dict[int, int | None] = {}
        self._places: dict[int, tuple[int, int] | None] = {}
        #: Encoded outputs that are too large.
        self.skipped: list[int] = []

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            if descriptor is not None:
                os.close(descriptor)
        self._files.clear()
        self._places.clear()

    def can_read(self, output: int) -> bool:
        """Return False for an encoded output that is too large, and add it to ``skipped``."""
        if self._is_plain(output):
            return True
        limit = memory_budget.get_limit()
        if self._sizes[output] <= (_DECODED if limit is None else min(_DECODED, limit // 4)):
            return True
        if output not in self.skipped:
            self.skipped.append(output)
        return False

    def announce(self, matrices: Sequence[_Matrix]) -> None:
        """Request the samples of all matrices from storage at once, to avoid waiting for each in turn."""
        for matrix in matrices:
            place = self._find_place(matrix.output)
            if place is not None:
                length = min(_SAMPLE, matrix.size)
                os.posix_fadvise(place[0], place[1] + matrix.start, length, os.POSIX_FADV_WILLNEED)

    def read(self, output: int, start: int, length: int) -> np.ndarray[Any, Any]:
        """Read bytes of an output."""
        import numpy as np

        # The core takes far longer to begin than to read a few bytes.
        place = self._find_place(output)
        if place is not None:
            raw = os.pread(place[0], length, place[1] + start)
            if len(raw) == length:
                return np.frombuffer(raw, dtype=np.uint8)
        if self._is_plain(output):
            buffer = np.empty(length, dtype=np.uint8)
            self._plan.read(output, start, buffer, 1)
            return buffer
        if self._decoded is None or self._decoded[0] != output:
            self._decoded = None
            full = np.empty(self._sizes[output], dtype=np.uint8)
            self._plan.read(output, 0, full, 1)
            self._decoded = (output, full)
        return self._decoded[1][start : start + length]

    def windows(self, matrix: _Matrix) -> Iterator[np.ndarray[Any, Any]]:
        """Yield all bytes of a matrix, in pieces."""
        for at in range(0, matrix.size, _WINDOW):
            yield self.read(matrix.output, matrix.start + at, min(_WINDOW, matrix.size - at))

    def _find_place(self, output: int) -> tuple[int, int] | None:
        """Return the descriptor of the file that contains an output contiguously, and the offset of its first
        byte."""
        if output not in self._places:
            found = self._plan.contiguous(output)
            descriptor = None
            if found is not None:
                file = found[0]
                if file not in self._files:
                    if len(self._files) >= _OPEN:
                        self.close()
                    self._files[file] = self._plan.descriptor(file)
                descriptor = self._files[file]
            self._places[output] = None if found is None or descriptor is None else (descriptor, found[1])
        return self._places[output]

    def _is_plain(self, output: int) -> bool:
        if output not in self._plain:
            self._plain[output] = all(file.endswith(_PLAIN) for file in self._plan.sources(output))
        return self._plain[output]


@dataclass(frozen=True)
class _Compared:
    """A family, and its suspicious experts."""

    family: _Family
    #: Pairs of equal experts.
    pairs: list[tuple[_Matrix, _Matrix]]
    #: Pairs of equal experts if so many are equal that it must be by design.
    by_design: list[tuple[_Matrix, _Matrix]]
    #: Constant experts with their value, without those that the core reports.
    constants: list[tuple[_Matrix, float]]


def _compare_family(family: _Family, reader: _Reader, names: Sequence[str], reports_zeros: bool) -> _Compared:
    """Compare the experts of a family."""
    matrices = [matrix for matrix in family.matrices if reader.can_read(matrix.output)]
    reader.announce(matrices)
    samples: dict[bytes, list[_Matrix]] = {}
    constants: list[tuple[_Matrix, float]] = []
    for matrix in matrices:
        raw = reader.read(matrix.output, matrix.start, min(_SAMPLE, matrix.size))
        item = item_size(family.dtype)
        if _is_constant(raw, item):
            value = _find_constant(matrix, family, reader)
            if value is not None:
                constants.append((matrix, value))
        else:
            samples.setdefault(hashlib.blake2b(raw.data, digest_size=16).digest(), []).append(matrix)
    pairs = [
        (group[0], other)
        for suspects in samples.values()
        if len(suspects) > 1
        for group in _group_equal(suspects, family, reader)
        for other in group[1:]
    ]
    by_design = _is_by_design(pairs, matrices)
    reported = _list_pairs_of_core(family, pairs)
    kept = [pair for pair in pairs if pair not in reported]
    return _Compared(
        family,
        [] if by_design else kept,
        kept if by_design else [],
        _drop_reported_zeros(family, constants, matrices, names, reports_zeros),
    )


def _is_constant(raw: np.ndarray[Any, Any], item: int) -> bool:
    """Return True if all elements are bytewise equal."""
    elements = raw[: raw.size // item * item].reshape(-1, item)
    return bool((elements == elements[0]).all())


def _find_constant(matrix: _Matrix, family: _Family, reader: _Reader) -> float | None:
    """Return the value of a constant floating-point matrix; None if it has several values."""
    if family.dtype not in _FLOATS:
        return None
    first = None
    item = item_size(family.dtype)
    for raw in reader.windows(matrix):
        first = raw[:item].tobytes() if first is None else first
        if not _is_constant(raw, item) or raw[:item].tobytes() != first:
            return None
    if first is None:
        return None
    import numpy as np

    return float(np.frombuffer(first, dtype=numpy_dtype(family.dtype))[0])


def _group_equal(suspects: Sequence[_Matrix], family: _Family, reader: _Reader) -> list[list[_Matrix]]:
    """Group the matrices that are equal in all bytes, without matrices with few distinct values."""
    contents: dict[bytes, list[_Matrix]] = {}
    for matrix in suspects:
        digest = hashlib.blake2b(digest_size=32)
        for raw in reader.windows(matrix):
            digest.update(raw.data)
        contents.setdefault(digest.digest(), []).append(matrix)
    return [
        sorted(group, key=lambda matrix: matrix.expert)
        for group in contents.values()
        if len(group) > 1 and _has_values(group[0], family, reader)
    ]


def _has_values(matrix: _Matrix, family: _Family, reader: _Reader) -> bool:
    """Return True if a matrix has so many distinct values that equality cannot be a coincidence."""
    import numpy as np

    item = item_size(family.dtype)
    wanted = min(_VALUES, max(2, matrix.size // item // 2))
    seen: set[bytes] = set()
    for raw in reader.windows(matrix):
        elements = raw[: raw.size // item * item].view(np.dtype((np.void, item)))
        seen |= {bytes(one) for one in np.unique(elements[: 1 << 14])}
        if len(seen) >= wanted:
            return True
    return False


def _is_by_design(pairs: Sequence[tuple[_Matrix, _Matrix]], matrices: Sequence[_Matrix]) -> bool:
    """Return True if more than a third of all experts, or of a layer's experts, equal another one."""
    if len(pairs) < 2:
        return False
    equal = {matrix.expert for pair in pairs for matrix in pair}
    if len(equal) * 3 > len(matrices):
        return True
    counts: dict[tuple[str, int], list[int]] = {}
    for matrix in matrices:
        of = counts.setdefault((matrix.expert.stack, matrix.expert.layer), [0, 0])
        of[0] += 1
        of[1] += matrix.expert in equal
    touched = [of for of in counts.values() if of[1]]
    return all(of[1] * 3 > of[0] and of[1] > 2 for of in touched)


def _list_pairs_of_core(
    family: _Family, pairs: Sequence[tuple[_Matrix, _Matrix]]
) -> list[tuple[_Matrix, _Matrix]]:
    """List the pairs that the core reports: names that differ in one number, and layers that are equal."""
    if family.is_apart:
        return [
            (one, other)
            for one, other in pairs
            if one.expert.layer == other.expert.layer or one.expert.number == other.expert.number
        ]
    layers: dict[tuple[int, int], int] = {}
    for one, other in pairs:
        if one.expert.number == other.expert.number:
            key = (one.expert.layer, other.expert.layer)
            layers[key] = layers.get(key, 0) + 1
    count = len({matrix.expert.number for matrix in family.matrices})
    return [
        (one, other)
        for one, other in pairs
        if one.expert.number == other.expert.number and layers[one.expert.layer, other.expert.layer] == count
    ]


def _drop_reported_zeros(
    family: _Family,
    constants: list[tuple[_Matrix, float]],
    matrices: Sequence[_Matrix],
    names: Sequence[str],
    reports_zeros: bool,
) -> list[tuple[_Matrix, float]]:
    """Drop zeros that the core reports, and constants if all experts are constant."""
    others = [(matrix, value) for matrix, value in constants if value != 0]
    zeros = [(matrix, value) for matrix, value in constants if value == 0]
    if len(others) == len(matrices):
        others = []
    if len(zeros) == len(matrices):
        # A name without a word for a projection tells the core nothing.
        zeros = [one for one in zeros if not _is_projection(names[one[0].output])]
    elif family.is_apart:
        # The same tensor of another expert is not zero, so the core reports it.
        zeros = []
    elif not reports_zeros:
        zeros = _drop_full_tensors(zeros, matrices)
    else:
        zeros = _drop_planes(zeros, matrices) if family.has_layers else []
    return [*zeros, *others]


def _is_projection(name: str) -> bool:
    """Return True if the core treats a tensor as a projection, by its name."""
    words = _WORD.findall(".".join(name.lower().split(".")[-2:]))
    return any(fnmatchcase(word, one) for word in words for one in WORDS["projections"])


def _drop_full_tensors(
    zeros: list[tuple[_Matrix, float]], matrices: Sequence[_Matrix]
) -> list[tuple[_Matrix, float]]:
    """Drop all-zero tensors, which the core reports."""
    counts = Counter(matrix.output for matrix in matrices)
    counts.subtract(matrix.output for matrix, _ in zeros)
    return [one for one in zeros if counts[one[0].output]]


def _drop_planes(
    zeros: list[tuple[_Matrix, float]], matrices: Sequence[_Matrix]
) -> list[tuple[_Matrix, float]]:
    """Drop experts that are zero in all layers, and layers whose experts are all zero."""
    cells = {(matrix.expert.layer, matrix.expert.number) for matrix, _ in zeros}
    layers = {matrix.expert.layer for matrix in matrices}
    numbers = {matrix.expert.number for matrix in matrices}
    full_layers = {layer for layer in layers if all((layer, number) in cells for number in numbers)}
    full_numbers = {number for number in numbers if all((layer, number) in cells for layer in layers)}
    return [
        one
        for one in zeros
        if one[0].expert.layer not in full_layers and one[0].expert.number not in full_numbers
    ]


def _report_copies(found: Sequence[_Compared], names: Sequence[str]) -> list[Finding]:
    """Report experts that equal another one, individually or, if there are many, in one finding."""
    pairs: dict[tuple[_Expert, _Expert], list[_Matrix]] = {}
    for one in found:
        for first, other in one.pairs:
            pairs.setdefault((first.expert, other.expert), []).append(other)
    ordered = sorted(pairs.items())
    if len(ordered) > _NAMED:
        pair, matrices = ordered[0]
        text = "; ".join(f"{two.text} holds those of {one.text}" for (one, two), _ in ordered[:_NAMED])
        message = f"{len(ordered)} experts hold the values of another expert: {text}"
        message += f"; and {len(ordered) - _NAMED} more"
        return [_warn_of_copies(message, names[matrices[0].output], len(ordered), pair)]
    return [
        _warn_of_copies(
            f"{pair[1].text} holds the same values as {pair[0].text}, in {_count_matrices(matrices)}",
            names[matrices[0].output],
            len(matrices),
            pair,
        )
        for pair, matrices in ordered
    ]


def _count_matrices(matrices: Sequence[_Matrix]) -> str:
    return "one matrix" if len(matrices) == 1 else f"{len(matrices)} matrices"


def _warn_of_copies(message: str, tensor: str, count: int, pair: tuple[_Expert, _Expert]) -> Finding:
    return Finding.of(
        codes.EQUAL_SHARDS,
        message,
        severity="warning",
        tensor=tensor,
        count=count,
        expected=f"other values in {pair[1].text}",
        got=f"those of {pair[0].text}",
        help=f"{_HELP}; if they are meant to be equal, ignore the warning",
        run=["--ignore FS304"],
    )


def _report_copies_by_design(found: Sequence[_Compared], names: Sequence[str]) -> list[Finding]:
    """Note that so many experts equal another one that it must be by design."""
    if not found:
        return []
    experts: Collection[_Expert] = {m.expert for one in found for pair in one.by_design for m in pair}
    total = {matrix.expert for one in found for matrix in one.family.matrices}
    first, other = found[0].by_design[0]
    return [
        Finding.of(
            codes.EQUAL_SHARDS,
            f"{len(experts)} of {len(total)} experts hold matrices of another expert, e.g. "
            f"{other.expert.text} those of {first.expert.text}",
            severity="note",
            tensor=names[other.output],
            count=len(experts),
            evidence="more than a third of the experts are equal, as in MoE models that were made from a "
            "dense model",
        )
    ]


def _report_constants(found: Sequence[_Compared], names: Sequence[str]) -> list[Finding]:
    """Report constant experts, individually or, if there are many, in one finding per value."""
    experts: dict[tuple[float, _Expert], list[_Matrix]] = {}
    for one in found:
        for matrix, value in one.constants:
            experts.setdefault((value, matrix.expert), []).append(matrix)
    ordered = sorted(experts.items())
    if len(ordered) > _NAMED:
        (value, _), matrices = ordered[0]
        text = ", ".join(expert.text for (_, expert), _ in ordered[:_NAMED])
        message = f"{len(ordered)} experts are constant: {text}, and {len(ordered) - _NAMED} more"
        return [_warn_of_constant(message, names[matrices[0].output], len(ordered), value)]
    return [
        _warn_of_constant(
            f"{expert.text} is constant, in {_count_matrices(matrices)}",
            names[matrices[0].output],
            len(matrices),
            value,
        )
        for (value, expert), matrices in ordered
    ]


def _warn_of_constant(message: str, tensor: str, count: int, value: float) -> Finding:
    return Finding.of(
        codes.ZERO_SLAB,
        message,
        severity="warning",
        tensor=tensor,
        count=count,
        expected="different values, as in other experts",
        got=f"{value:g} everywhere" if value else "zeros",
        help=f"{_HELP}; an expert that was never written or loaded looks like that",
        run=["--ignore FS313"],
    )
