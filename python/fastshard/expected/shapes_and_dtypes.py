"""Shapes, dtypes and bytes of tensors that a checkpoint and a reference both have."""

from __future__ import annotations

import math
from collections import Counter

from ..common import codes
from ..common.dtypes import TORCH_FLOATS, item_size
from ..common.errors import Finding
from ..common.records import dataclass
from .comparison import MOST_LISTED, WORDS, Comparison, extents, more, number
from .reference_names import unequal

__all__ = ["dtypes", "shapes", "total_bytes"]

#: Possible size ratios between a checkpoint's and the reference's dtype.
_RATIOS = {2.0, 4.0, 0.5, 0.25}
#: The number to a multiple of which trainers pad a vocabulary. source: Megatron-LM, gpt-neox
#: (make_vocab_size_divisible_by)
_PADDED = 64


# --- shapes


@dataclass(frozen=True)
class _Differing:
    """A tensor whose shape differs from the reference's."""

    stored: str
    got: list[int]
    expected: list[int | None]

    @property
    def at(self) -> int | None:
        """The one dimension that differs; None if several do."""
        apart = unequal(self.got, self.expected)
        return apart[0] if len(apart) == 1 else None

    def has(self, own: int | None, theirs: int | None) -> bool:
        """Return True if exactly one dimension differs and has these two sizes."""
        return self.at is not None and (self.got[self.at], self.expected[self.at]) == (own, theirs)


def shapes(compared: Comparison) -> tuple[list[Finding], list[Finding]]:
    """Report different shapes; those that the checkpoint's vocabulary explains become notes."""
    own, theirs = (number(config, "vocab_size") for config in (compared.own, compared.theirs))
    differing = [
        _Differing(stored, got, expected)
        for stored, got, expected in compared.met.found["differing"]
        if compared.wanted(stored) and expected is not None
    ]
    by_config = own is not None and own != theirs
    resized = [one for one in differing if by_config and one.has(own, theirs)]
    rest = [one for one in differing if not (by_config and one.has(own, theirs))]
    findings = [_shaped(compared, one, own, theirs) for one in rest[:MOST_LISTED]]
    findings += more(codes.SHAPE, len(rest), "tensors with another shape")
    if own is None or theirs is None or own == theirs:
        return findings, []
    kept = _rows(compared, theirs)
    if resized and kept:
        findings.append(
            Finding.of(
                codes.SHAPE,
                f"{len(resized)} tensors have as many rows as the checkpoint's own vocabulary, but this one "
                "has as many as the reference's",
                tensor=kept[0],
                expected=f"{own} rows, as in config.json and {resized[0].stored}",
                got=f"{theirs} rows, as in {compared.path}",
                help="save the model again; only part of the vocabulary tensors was resized",
            )
        )
    elif kept and not rest:
        findings.append(
            Finding.of(
                codes.CONFIG_DISAGREES,
                "the checkpoint's own config states another vocab_size than the rows of the tensor",
                severity="warning",
                tensor=kept[0],
                expected=f"vocab_size {own}",
                got=f"{theirs} rows, as in {compared.path}",
            )
        )
    notes = [
        Finding.of(
            codes.IGNORED,
            f"{len(resized)} tensors have as many rows as the vocab_size of the checkpoint's own config, "
            f"which differs from the reference {compared.path}",
            severity="note",
            tensor=one.stored,
            expected=f"vocab_size {theirs}, by the reference's config",
            got=f"vocab_size {own}, by the checkpoint's own config",
        )
        for one in resized[:1]
        if not kept
    ]
    return findings, notes


def _rows(compared: Comparison, rows: int) -> list[str]:
    """List stored names of tensors that have a row for each token and this number of rows."""
    names = {n for n in compared.there if WORDS.search(n) and rows in (compared.expected[n] or [])}
    return [
        s
        for s, (_, shape) in compared.met.side.tensors.items()
        if compared.met.name(s) in names and rows in shape
    ]


def _shaped(compared: Comparison, one: _Differing, own: int | None, theirs: int | None) -> Finding:
    got, expected, at = one.got, one.expected, one.at
    fields: dict[str, str | None] = {
        "tensor": one.stored,
        "expected": extents(expected),
        "got": extents(got),
    }
    want = None if at is None else expected[at]
    if at is not None and want and got[at] and got[at] < want and want % got[at] == 0:
        return Finding.of(
            codes.SLICE_AS_WHOLE,
            f"dimension {at} has {got[at]} of the {want} that the reference {compared.path} has: it looks "
            "like one of "
            f"{want // got[at]} tensor-parallel slices",
            help="add the slices of the other ranks, or use a checkpoint with full tensors",
            **fields,
        )
    vocabulary_note = ""
    if own != theirs and at is not None and (own in got or theirs in expected):
        vocabulary_note = f" (vocab_size: {own if own is not None else 'no config'} here, {theirs} there)"
    longer = (
        at is not None
        and want is not None
        and got[at] > want
        and bool(WORDS.search(compared.met.name(one.stored)))
    )
    # Rows of words are never cut off by an advice: trainers pad to such numbers, with rows that hold what
    # they began with.
    side = compared.met.side
    is_padded = not side.source.model.hf_names and at == 0 and got[0] % _PADDED == 0
    is_padding = longer and at == 0 and (is_padded or side.ends_in_zeros(one.stored, want or 0))
    turned = len(got) > 1 and got != expected and sorted(got) == sorted(n or 0 for n in expected)
    return Finding.of(
        codes.SHAPE,
        f"the shape differs from that in the reference {compared.path}"
        + (", and is its transpose" if turned else "")
        + vocabulary_note,
        help=_help_with_rows(got[at or 0], is_padding)
        if longer
        else "compare the two configs: the tensor is from another model, or was changed after it was saved",
        run=[f"--vocab-size {want}"] if is_padding else [],
        **fields,
    )


def _help_with_rows(rows: int, is_padding: bool) -> str:
    """Return advice for a tensor with more rows than the reference's."""
    if is_padding:
        return "cut the rows beyond, which are padding, or pass a reference with the same vocabulary"
    return (
        "check how many tokens the tokenizer has: if all rows are tokens, vocab_size of config.json is "
        f"{rows}"
    )


# --- their dtypes


def dtypes(compared: Comparison) -> tuple[list[Finding], list[Finding]]:
    """Report different dtypes; if all floating-point dtypes differ in the same way, add only a note."""
    odd = [
        one
        for one in compared.met.found["dtypes"]
        if compared.wanted(one[0]) and not (one[1] == compared.cast and _kind(one[2]) == "floating")
    ]
    other = [one for one in odd if _kind(one[1]) != _kind(one[2])]
    rest = [one for one in odd if _kind(one[1]) == _kind(one[2])]
    notes = _cast(compared, [one for one in rest if _kind(one[1]) == "floating"])
    if notes:
        rest = [one for one in rest if _kind(one[1]) != "floating"]
    findings = [
        Finding.of(
            codes.DTYPE,
            f"the elements are {_kind(got)}, but {_kind(expected)} in the reference {compared.path}",
            tensor=stored,
            expected=expected,
            got=got,
            help="pass a reference with the same quantisation as the checkpoint",
        )
        for stored, got, expected in other[:MOST_LISTED]
    ]
    findings += more(codes.DTYPE, len(other), "tensors with other elements")
    findings += [
        Finding.of(
            codes.DTYPE,
            f"the dtype differs from that in the reference {compared.path}",
            severity="warning",
            tensor=stored,
            expected=expected,
            got=got,
        )
        for stored, got, expected in rest[:MOST_LISTED]
    ]
    return findings + more(codes.DTYPE, len(rest), "tensors with another dtype", "warning"), notes


def _cast(compared: Comparison, floats: list[tuple[str, str, str]]) -> list[Finding]:
    """Return a note if all floating-point tensors were cast to another dtype."""
    kinds = {
        pair: n
        for pair, n in compared.met.found["kinds"].items()
        if _kind(pair[0]) == _kind(pair[1]) == "floating"
    }
    changed = sum(n for (got, expected), n in kinds.items() if got != expected)
    one_for_each = len({expected for _, expected in kinds}) == len(kinds)
    if not floats or not one_for_each or 2 * changed <= sum(kinds.values()):
        return []
    got, expected = Counter((got, expected) for _, got, expected in floats).most_common(1)[0][0]
    return [
        Finding.of(
            codes.DTYPE,
            f"{len(floats)} floating-point tensors have another dtype than in the reference "
            f"{compared.path}, all of them the same",
            severity="note",
            expected=expected,
            got=got,
        )
    ]


def _kind(dtype: str) -> str:
    """Describe the kind of a dtype's elements."""
    if dtype in TORCH_FLOATS:
        return "floating"
    words = {"F": "8-bit floating-point numbers", "I": "integers", "U": "integers", "B": "booleans"}
    return words.get(dtype[0], "complex")


# --- bytes


def total_bytes(compared: Comparison) -> list[Finding]:
    """Report a total tensor size that differs from the index."""
    total = compared.reference.total
    if total is None:
        return []
    sizes = {s: math.prod(shape) * item_size(kind) for s, (kind, shape) in compared.met.side.tensors.items()}
    mine = {s: n for s, n in sizes.items() if compared.met.side.own(s) is not None}
    if any(not compared.wanted(stored) for stored in mine):
        return []
    stored_bytes = sum(mine.values())
    heads = [n for s, n in mine.items() if WORDS.search(compared.met.name(s))]
    likely = {stored_bytes, *(stored_bytes - n for n in heads), *(stored_bytes + n for n in heads)}
    if total in likely or any(round(total * ratio) in likely for ratio in _RATIOS):
        return []
    return [
        Finding.of(
            codes.SHAPE,
            "the size of the tensors differs from metadata.total_size in the index of the reference "
            f"{compared.path}",
            expected=f"{total} bytes, or a multiple or fraction of that if dtypes differ",
            got=f"{stored_bytes} bytes",
            help="pass the reference's files too, so that their headers are compared; a tensor is truncated "
            "or from another model",
        )
    ]
