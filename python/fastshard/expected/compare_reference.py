"""A checkpoint against the roster of a reference: what differs, what explains it, and what of it is wrong."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import _core
from ..common.dtypes import TORCH_FLOATS, item_size
from ..common.errors import FastshardError, Finding
from ..layouts.declaration import Source, is_state
from ..layouts.prefix_moves import Moved, moved
from .reference import Reference

__all__ = ["Side", "gain", "judged", "moves"]

#: Findings of one kind that are told one by one.
_TOLD = 100
#: Prefixes have as many parts at most: ``model.language_model.``.
_DEEP = 3
#: The number of a layer: the first of a name.
_LAYER = re.compile(r"^((?:[A-Za-z_]\w*\.)*?)(\d+)\.(.+)$")
#: Tensors that have a row for each word, and that models tie. source: transformers models/*/modeling_*.py (_tied_weights_keys)
_HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|lm_head\.decoder|predictions\.decoder|output_projection)\.(weight|bias)$"
)
_WORDS = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$|(^|\.)(predictions|lm_head)\.bias$|"
    + _HEAD.pattern
)
#: Buffers that transformers computes itself, whatever is stored; with the dimensions that tell a mask from a bias.
#: source: transformers 4 models/{gpt2,gpt_neo,gpt_neox,gptj,codegen,llama,bert}/modeling_*.py (register_buffer)
_BUFFERS = (
    (re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"), None),
    (re.compile(r"(^|\.)(attn|attention|self_attention)\.bias$"), 4),
    (re.compile(r"(^|\.)(attn|attention|self_attention)\.masked_bias$"), 0),
    (re.compile(r"(^|\.)embeddings\.position_ids$"), 2),
)  # fmt: skip
#: Numbers of layers and the like.
_UNNUMBERED = re.compile(r"(?<![^.])\d+(?![^.])")
#: Keys by which configs state the layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
#: Bytes of the dtypes that a checkpoint may have instead of the reference's.
_RATIOS = {2.0, 4.0, 0.5, 0.25}


@dataclass(frozen=True)
class Side:
    """Tensors whose names may be the reference's."""

    draft: _core.Draft
    source: Source
    #: True for names that lie below the source's prefix, as a merge has them.
    below: bool
    #: Whether two tensors hold the same bytes, by the names stored; and whether one value all over will do.
    same: Callable[[str, str, bool], bool] = lambda one, other, constant: False
    #: How names became those of the reference, in words.
    how: str = ""

    @property
    def outer(self) -> str:
        """What the names of the model begin with."""
        return self.source.weights_prefix if self.below else ""

    def own(self, stored: str) -> str | None:
        """The model's own name of a tensor; None for what is no part of it: state, and further copies."""
        name = self.source.names.get(stored, stored)
        apart = self.source.other_prefixes if self.below else []
        if is_state(name) or not name.startswith(self.outer) or name.startswith(tuple(apart) or "\0"):
            return None
        return name.removeprefix(self.outer)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and whole shape of each, by the name stored."""
        return {name: (kind, whole) for name, kind, _, _, whole, _ in self.draft.tensors()}


@dataclass(frozen=True)
class _Reading:
    """How the model's own names become the roster's: a prefix is added, or taken off."""

    prefix: str = ""
    adds: bool = False
    #: Names of the roster.
    listed: Set[str] = frozenset()

    def of(self, own: str) -> str:
        """The roster's name. One that it has stays as it is: heads lie beside what has the prefix."""
        if not self.prefix or (own in self.listed and not (self.adds and self.prefix + own in self.listed)):
            return own
        return self.prefix + own if self.adds else own.removeprefix(self.prefix)

    def back(self, name: str) -> str:
        """The own name of a tensor that is not there, as far as that can be told."""
        return name.removeprefix(self.prefix) if self.adds else self.prefix + name

    def __str__(self) -> str:
        return f"with {self.prefix!r} before them" if self.adds else f"without {self.prefix!r}"


@dataclass(frozen=True)
class _Met:
    """A side and a roster under common names."""

    side: Side
    found: _core.Compared
    reading: _Reading = field(default_factory=_Reading)

    def name(self, stored: str) -> str:
        """The roster's name for a tensor that is stored."""
        return self.reading.of(self.side.own(stored) or stored)

    @cached_property
    def further(self) -> list[str]:
        """Names stored of what the roster has not: the model's own tensors alone."""
        return [stored for stored in self.found["further"] if self.side.own(stored) is not None]

    @cached_property
    def matched(self) -> int:
        """Tensors that both have."""
        odd = {name for name, *_ in self.found["differing"]} | {name for name, *_ in self.found["dtypes"]}
        return self.found["same"] + len(odd)

    def fits(self, listed: int) -> bool:
        """True if most names of the smaller side are the other's too."""
        return 2 * self.matched > min(listed, self.matched + len(self.further))


def judged(
    sides: Iterable[Side],
    reference: Reference,
    wanted: Callable[[str], bool],
    cast: str | None,
    named: Iterable[str | None] = (),
) -> list[Finding]:
    """What a checkpoint is found to lack, to have too much, or to have otherwise than a reference; and what that proves.

    Args:
        sides: its tensors under the names that may be the reference's, the likeliest first.
        reference: what it is held against.
        wanted: whether a tensor is asked for, by its name in a result.
        cast: the dtype that floating tensors are to have; None to keep each its own.
        named: tensors of which something is known to be wrong already.
    """
    roster = reference.roster
    if roster is None:
        return []
    met = None
    for side in sides:
        found = side.draft.compared(roster, side.source.names, side.outer)
        one = _Met(side, found)
        if not one.fits(len(roster)):
            one = _aligned(one, roster, reference) or one
        if one.fits(len(roster)):
            return _Judge(one, reference, roster, wanted, cast, {n for n in named if n}).findings()
        # Where nothing fits it is said of the tensors as they are stored.
        met = met or one
    if met is None:
        return []
    return [_strangers(met, reference)]


def moves(side: Side, roster: _core.Roster, path: str) -> Moved | None:
    """The names of a reference for tensors that have others in memory; None where there are none.

    Args:
        side: the tensors under the names that they are to have otherwise.
        roster: that of the reference.
        path: of the reference, for messages.

    Raises:
        FastshardError: ``FS106`` if the names can be read in several ways.
    """
    found = side.draft.compared(roster, side.source.names, side.outer)
    if not found["missing"] or not found["further"] or side.outer:
        return None
    shapes = {own: shape for name, (_, shape) in side.tensors.items() if (own := side.own(name)) is not None}
    listed = {name: shape for name, shape, _, _ in roster.entries()}

    def fits(name: str, other: str) -> bool:
        expected = listed[other]
        return expected is None or not _unequal(shapes[name], expected)

    way = moved(shapes.keys(), listed.keys(), fits)
    known = len(shapes.keys() & listed.keys()) + len(way.names) + way.undecided
    if 2 * known <= min(len(shapes), len(listed)):
        # It is another model.
        return None
    if "" in way.prefixes:
        # The reference lies below a name, which may be a trainer's: the model's own names stay.
        return None
    if way.uncertain:
        help_ = "give a reference with the names of the checkpoint; --under says where one of several models begins"
        raise _ambiguous(path, way.readings, help_)
    return way if way.names else None


def _ambiguous(path: str, readings: str, help_: str) -> FastshardError:
    """That names can be read in several ways."""
    message = f"the names can be read in several ways to fit the reference {path}"
    return FastshardError.of("FS106", message, expected="one", got=readings, help=help_)


def gain(side: Side, other: Side, roster: _core.Roster) -> int:
    """How many more tensors of a roster one side has than another, by names."""
    counts = [
        len(one.draft.compared(roster, one.source.names, one.outer)["missing"]) for one in (other, side)
    ]
    return counts[0] - counts[1]


def _strangers(met: _Met, reference: Reference) -> Finding:
    lacking = met.found["missing"]
    return Finding.of(
        "FS207",
        f"{met.matched} of {met.matched + len(met.further)} tensors have a name of the reference {reference.path}: it is another "
        "model, or has another framework's names",
        tensor=met.further[0] if met.further else None,
        expected=f"names like {lacking[0][0]}" if lacking else None,
        got=met.further[0] if met.further else "nothing",
        help="give a reference of the same model, under Hugging Face's names or those of the checkpoint",
    )


def _aligned(met: _Met, roster: _core.Roster, reference: Reference) -> _Met | None:
    """The comparison with one prefix added to the names or taken off; None where no prefix makes most of them fit.

    Raises:
        FastshardError: ``FS106`` if several do.
    """
    side = met.side
    own = {name: stored for stored in side.tensors if (name := side.own(stored)) is not None}
    listed = {name for name, *_ in roster.entries()}
    least = min(len(own), len(listed))
    readings = [_Reading(prefix, False, listed) for prefix in _prefixes(own, least)]
    readings += [_Reading(prefix, True, listed) for prefix in _prefixes(listed, least)]
    fitting = []
    for reading in readings:
        names = {reading.of(name) for name in own}
        if len(names) == len(own) and 2 * len(names & listed) > least:
            fitting.append(reading)
    if len(fitting) > 1:
        told = "; ".join(map(str, fitting))
        raise _ambiguous(reference.path, told, "say where the model begins with --under")
    if not fitting:
        return None
    # What is no part of the model has no name there.
    same = {stored: f"{side.outer}\0{stored}" for stored in side.tensors}
    same |= {stored: side.outer + fitting[0].of(name) for name, stored in own.items()}
    return _Met(side, side.draft.compared(roster, same, side.outer), fitting[0])


def _prefixes(names: Iterable[str], least: int) -> list[str]:
    """What more than half of ``least`` names begin with, down to a few parts; numbers of layers are no such part."""
    counted = Counter(
        "".join(f"{part}." for part in parts[:depth])
        for parts in (name.split(".") for name in names)
        for depth in range(1, min(_DEEP, len(parts) - 1) + 1)
        if not parts[depth - 1].isdecimal()
    )
    return [prefix for prefix, n in counted.items() if 2 * n > least]


class _Judge:
    """Makes findings of what differs."""

    def __init__(
        self,
        met: _Met,
        reference: Reference,
        roster: _core.Roster,
        wanted: Callable[[str], bool],
        cast: str | None,
        named: set[str],
    ) -> None:
        self._met, self._reference, self._roster = met, reference, roster
        self._wanted, self._cast, self._named = wanted, cast, named
        model = met.side.source.model
        lent = reference.config_file is not None and model.config_file == reference.config_file
        #: The checkpoint's own config; None where it is the reference's.
        self._own: Mapping[str, Any] = {} if lent else model.config or {}
        self._theirs: Mapping[str, Any] = reference.config or {}
        self._path = reference.path

    def findings(self) -> list[Finding]:
        """All that is wrong; where nothing is, what the reference proves."""
        found = self._met.found
        missing = [(name, shape) for name, shape in found["missing"] if self._asked(name)]
        further = [stored for stored in self._met.further if self._wanted(stored)]
        notes: list[Finding] = []
        missing, further = self._without_buffers(missing, further, notes)
        missing, further = self._without_ties(missing, further, notes)
        missing, further = self._without_layers(missing, further, notes)
        told = self._missing(missing)
        told += self._differing(notes)
        told += self._dtypes(notes)
        told += self._further(further)
        if self._reference.total is not None and not told:
            told += self._bytes()
        if not any(f.severity == "error" for f in told):
            notes.append(self._proven())
        return [*told, *notes]

    # --- which tensors

    def _asked(self, name: str) -> bool:
        """Whether a tensor that is not there is asked for: by the name that it would be stored under."""
        stored = self._stored(name)
        return self._wanted(stored) and not {name, stored} & self._named

    def _stored(self, name: str) -> str:
        """The name that a tensor of the roster would be stored under."""
        return self._met.side.outer + self._met.reading.back(name)

    def _shape(self, stored: str) -> list[int]:
        return self._met.side.tensors[stored][1]

    @cached_property
    def _expected(self) -> dict[str, list[int | None] | None]:
        return {name: shape for name, shape, _, _ in self._roster.entries()}

    @cached_property
    def _there(self) -> set[str]:
        """Names of the roster whose tensors are there."""
        return self._expected.keys() - {name for name, _ in self._met.found["missing"]}

    def _without_buffers(
        self, missing: _Missing, further: list[str], notes: list[Finding]
    ) -> tuple[_Missing, list[str]]:
        """Without what transformers computes itself."""
        kept = [s for s in further if not _is_buffer(self._met.name(s), self._shape(s))]
        if left := sorted(set(further) - set(kept)):
            notes.append(
                Finding.of(
                    "FS212",
                    f"{len(left)} tensors that the reference {self._path} has not are buffers, which transformers computes itself",
                    severity="note",
                    tensor=left[0],
                )
            )
        return [(n, shape) for n, shape in missing if not _is_buffer(n, shape)], kept

    def _without_ties(
        self, missing: _Missing, further: list[str], notes: list[Finding]
    ) -> tuple[_Missing, list[str]]:
        """Without tensors that a config ties to one that is there, and without copies of such a one."""
        copies = {stored: of for stored in further if (of := self._copied(stored)) is not None}
        if copies:
            first = next(iter(copies))
            notes.append(
                Finding.of(
                    "FS212",
                    f"{len(copies)} tensors that the reference {self._path} has not have the bytes of tensors that it ties them to",
                    severity="note",
                    tensor=first,
                    got=f"the bytes of {copies[first]}",
                )
            )
        further = [stored for stored in further if stored not in copies]
        if not any(_WORDS.search(n) for n, _ in missing):
            return missing, further
        stated = _stated(self._own, "tie_word_embeddings")
        stated = _stated(self._theirs, "tie_word_embeddings") if stated is None else stated
        words = [(n, self._expected[n]) for n in self._there if _WORDS.search(n)]
        alone: list[str] = []

        def is_missing(name: str, shape: list[int | None] | None) -> bool:
            # What a model that ties nothing lacks is lost: it must be stated.
            if stated is not True or not _WORDS.search(name):
                return True
            partners = [other for other, extents in words if extents == shape]
            if partners and not _HEAD.search(name) and all(_HEAD.search(other) for other in partners):
                alone.append(name)
            return not partners

        missing = [one for one in missing if is_missing(*one)]
        if alone:
            notes.append(
                Finding.of(
                    "FS102",
                    "stored by the name of the output layer alone, to which the config ties it",
                    severity="warning",
                    tensor=self._stored(alone[0]),
                    expected=f"as in {self._path}",
                    help="versions of transformers before 5 look for it by this name, and make it up where it is not there",
                )
            )
        return missing, further

    def _copied(self, stored: str) -> str | None:
        """The tensor that one which the reference lacks is a copy of; None if it is none.

        The same tensor of another layer is a layer that is there twice, and no tie. One value all over, as new biases and norms
        have it, tells of a tie between tensors with a row for each word alone.
        """
        like = _UNNUMBERED.sub("#", self._met.name(stored))
        own = self._met.side.tensors[stored]
        alike = (
            other
            for other, told in self._met.side.tensors.items()
            if told == own
            and (name := self._met.name(other)) in self._there
            and self._met.side.own(other) is not None
            and _UNNUMBERED.sub("#", name) != like
        )
        words = _WORDS.search(self._met.name(stored))
        return next(
            (
                other
                for other in alike
                if self._met.side.same(stored, other, bool(words and _WORDS.search(self._met.name(other))))
            ),
            None,
        )

    def _without_layers(
        self, missing: _Missing, further: list[str], notes: list[Finding]
    ) -> tuple[_Missing, list[str]]:
        """Without the layers that the two configs count differently, if exactly these are missing or further."""
        own, theirs = _layers(self._own), _layers(self._theirs)
        if own is None or theirs is None or own == theirs:
            return missing, further
        stacks = {stack for stack, held in self._stacks.items() if len(held) == theirs}
        beyond = range(min(own, theirs), max(own, theirs))

        def is_beyond(name: str) -> bool:
            found = _LAYER.match(name)
            return found is not None and found[1] in stacks and int(found[2]) in beyond

        if own < theirs:
            gone = {name for name, _ in missing}
            # Of none of these layers is anything there.
            explained = {n for n in gone if is_beyond(n)}
            if not explained or explained != {n for n in self._expected if is_beyond(n)}:
                return missing, further
            rest: tuple[_Missing, list[str]] = ([m for m in missing if m[0] not in explained], further)
        else:
            more = {self._met.name(s) for s in further if is_beyond(self._met.name(s))}
            parts = {(m[1], int(m[2])): set[str]() for n in more if (m := _LAYER.match(n))}
            for name in more:
                if match := _LAYER.match(name):
                    parts[match[1], int(match[2])].add(match[3])
            whole = {(stack, n) for stack in stacks for n in beyond}
            alike = all(
                held in [set(layer) for layer in self._stacks[stack].values()]
                for (stack, _), held in parts.items()
            )
            if not more or parts.keys() != whole or not alike:
                return missing, further
            rest = (missing, [s for s in further if self._met.name(s) not in more])
        notes.append(
            Finding.of(
                "FS212",
                f"the checkpoint's own config says how many layers it has, which are others than those of the reference {self._path}",
                severity="note",
                expected=f"{theirs} layers by the reference's config",
                got=f"{own} layers by the checkpoint's own, and these are there",
            )
        )
        return rest

    @cached_property
    def _stacks(self) -> dict[str, dict[int, set[str]]]:
        """What the layers of the roster hold: by what precedes their number, and the number."""
        stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in self._expected:
            if match := _LAYER.match(name):
                stacks[match[1]][int(match[2])].add(match[3])
        return stacks

    def _missing(self, missing: _Missing) -> list[Finding]:
        """Layers of which nothing is there are a finding each, other tensors too."""
        lost: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, _ in missing:
            if match := _LAYER.match(name):
                lost[match[1], int(match[2])].append(name)
        whole = {
            layer for layer, names in lost.items() if len(names) == len(self._stacks[layer[0]][layer[1]])
        }
        findings = [
            Finding.of(
                "FS103",
                f"layer {self._stored(f'{stack}{number}')}: none of its {len(lost[stack, number])} tensors is there",
                tensor=self._stored(lost[stack, number][0]),
                layers=range(number, number + 1),
                count=len(lost[stack, number]),
                expected=f"{len(self._stacks[stack])} layers, as in {self._path}",
                got=self._counted(),
                help="copy the files of this layer from where the checkpoint was saved",
            )
            for stack, number in sorted(whole)
        ]
        singles = [
            (name, shape)
            for name, shape in missing
            if (match := _LAYER.match(name)) is None or (match[1], int(match[2])) not in whole
        ]
        findings += [
            Finding.of(
                "FS102",
                f"one of {len(singles)} tensors that the reference {self._path} has and the checkpoint lacks"
                if len(singles) > 1
                else f"the reference {self._path} has this tensor, the checkpoint lacks it",
                tensor=self._stored(name),
                expected=None if shape is None else _extents(shape),
                got="in no file",
                help="copy the file that holds it from where the checkpoint was saved",
            )
            for name, shape in singles[:_TOLD]
        ]
        return [*findings, *_more("FS102", len(singles), "tensors that are missing")]

    def _counted(self) -> str | None:
        """What the configs say of the layers."""
        own, theirs = _layers(self._own), _layers(self._theirs)
        if own is None:
            return None
        return f"{own} layers by the checkpoint's own config" + (
            f", {theirs} by the reference's" if theirs else ""
        )

    # --- their shapes

    def _differing(self, notes: list[Finding]) -> list[Finding]:
        own, theirs = (_number(config, "vocab_size") for config in (self._own, self._theirs))
        resized: list[tuple[str, list[int], list[int | None], int | None]] = []
        rest: list[tuple[str, list[int], list[int | None], int | None]] = []
        for stored, got, expected in self._met.found["differing"]:
            if not self._wanted(stored) or expected is None:
                continue
            apart = _unequal(got, expected)
            at = apart[0] if len(apart) == 1 else None
            by_config = at is not None and own is not None and own != theirs
            explained = by_config and at is not None and (got[at], expected[at]) == (own, theirs)
            (resized if explained else rest).append((stored, got, expected, at))
        findings = [self._shaped(*one, own, theirs) for one in rest[:_TOLD]]
        findings += _more("FS201", len(rest), "tensors of another shape")
        if own is None or theirs is None or own == theirs:
            return findings
        kept = self._rows(theirs)
        if resized and kept:
            findings.append(
                Finding.of(
                    "FS201",
                    f"{len(resized)} tensors have the rows of the checkpoint's own vocabulary, and this one has the reference's",
                    tensor=kept[0],
                    expected=f"{own} rows, as config.json and {resized[0][0]} have it",
                    got=f"{theirs} rows, as in {self._path}",
                    help="the vocabulary was resized in part: save the model again",
                )
            )
        elif resized:
            notes.append(
                Finding.of(
                    "FS212",
                    f"{len(resized)} tensors have the rows that the checkpoint's own config gives the vocabulary, and not those of the "
                    f"reference {self._path}",
                    severity="note",
                    tensor=resized[0][0],
                    expected=f"vocab_size {theirs} by the reference's config",
                    got=f"vocab_size {own} by the checkpoint's own",
                )
            )
        elif kept and not rest:
            findings.append(
                Finding.of(
                    "FS215",
                    "the checkpoint's own config gives the vocabulary other rows than the tensor has",
                    severity="warning",
                    tensor=kept[0],
                    expected=f"vocab_size {own}",
                    got=f"{theirs} rows, as in {self._path}",
                )
            )
        return findings

    def _rows(self, rows: int) -> list[str]:
        """Names stored of tensors with a row for each word, that have so many."""
        names = {n for n in self._there if _WORDS.search(n) and rows in (self._expected[n] or [])}
        return [
            s
            for s, (_, shape) in self._met.side.tensors.items()
            if self._met.name(s) in names and rows in shape
        ]

    def _shaped(
        self,
        stored: str,
        got: list[int],
        expected: list[int | None],
        at: int | None,
        own: int | None,
        theirs: int | None,
    ) -> Finding:
        shapes: dict[str, str | None] = {
            "tensor": stored,
            "expected": _extents(expected),
            "got": _extents(got),
        }
        want = None if at is None else expected[at]
        if at is not None and want and got[at] and got[at] < want and want % got[at] == 0:
            return Finding.of(
                "FS208",
                f"dimension {at} has {got[at]} of the {want} that the reference {self._path} has: it looks like one of "
                f"{want // got[at]} tensor-parallel slices",
                help="take the slices of the other ranks too, or a checkpoint that was saved whole",
                **shapes,
            )
        said = ""
        if own != theirs and at is not None and (own in got or theirs in expected):
            said = f" (vocab_size: {own if own is not None else 'no config'} here, {theirs} there)"
        longer = (
            at is not None
            and want is not None
            and got[at] > want
            and bool(_WORDS.search(self._met.name(stored)))
        )
        turned = len(got) > 1 and got != expected and sorted(got) == sorted(n or 0 for n in expected)
        return Finding.of(
            "FS201",
            f"its shape in the reference {self._path} is another one"
            + (", the same turned" if turned else "")
            + said,
            help=f"give --vocab-size {want} if the rows beyond are padding, or a reference with the same vocabulary"
            if longer
            else "it belongs to another model, or was changed after it was saved: compare the two configs",
            **shapes,
        )

    # --- their dtypes

    def _dtypes(self, notes: list[Finding]) -> list[Finding]:
        odd = [
            one
            for one in self._met.found["dtypes"]
            if self._wanted(one[0]) and not (one[1] == self._cast and _kind(one[2]) == "floating")
        ]
        other = [one for one in odd if _kind(one[1]) != _kind(one[2])]
        rest = [one for one in odd if _kind(one[1]) == _kind(one[2])]
        kinds = {
            pair: n
            for pair, n in self._met.found["kinds"].items()
            if _kind(pair[0]) == _kind(pair[1]) == "floating"
        }
        floats = [one for one in rest if _kind(one[1]) == "floating"]
        changed = sum(n for (got, expected), n in kinds.items() if got != expected)
        if (
            floats
            and len({expected for _, expected in kinds}) == len(kinds)
            and 2 * changed > sum(kinds.values())
        ):
            # A cast of them all.
            got, expected = Counter((got, expected) for _, got, expected in floats).most_common(1)[0][0]
            notes.append(
                Finding.of(
                    "FS202",
                    f"{len(floats)} floating tensors have another dtype than in the reference {self._path}, all alike",
                    severity="note",
                    expected=expected,
                    got=got,
                )
            )
            rest = [one for one in rest if _kind(one[1]) != "floating"]
        findings = [
            Finding.of(
                "FS202",
                f"its elements are {_kind(got)}, and {_kind(expected)} in the reference {self._path}",
                tensor=stored,
                expected=expected,
                got=got,
                help="one of the two is quantised: give a reference that is stored alike",
            )
            for stored, got, expected in other[:_TOLD]
        ]
        findings += _more("FS202", len(other), "tensors of other elements")
        findings += [
            Finding.of(
                "FS202",
                f"its dtype is another one than in the reference {self._path}",
                severity="warning",
                tensor=stored,
                expected=expected,
                got=got,
            )
            for stored, got, expected in rest[:_TOLD]
        ]
        return findings + _more("FS202", len(rest), "tensors of another dtype", "warning")

    # --- what is too much

    def _further(self, further: list[str]) -> list[Finding]:
        findings = [
            Finding.of(
                "FS207",
                f"the reference {self._path} has no such tensor",
                tensor=stored,
                got=_extents(self._shape(stored)),
                help="nothing is dropped: leave it out on purpose (--exclude), take a source without it, or do without --like",
            )
            for stored in further[:_TOLD]
        ]
        return findings + _more("FS207", len(further), "tensors that the reference has not")

    # --- what is left

    def _bytes(self) -> list[Finding]:
        """Whether all tensors together have the bytes that the index states."""
        total = self._reference.total or 0
        sizes = {s: math.prod(shape) * item_size(kind) for s, (kind, shape) in self._met.side.tensors.items()}
        mine = {s: n for s, n in sizes.items() if self._met.side.own(s) is not None}
        if any(not self._wanted(stored) for stored in mine):
            return []
        held = sum(mine.values())
        heads = [n for s, n in mine.items() if _WORDS.search(self._met.name(s))]
        likely = {held, *(held - n for n in heads), *(held + n for n in heads)}
        if total in likely or any(round(total * ratio) in likely for ratio in _RATIOS):
            return []
        return [
            Finding.of(
                "FS201",
                f"the tensors have other bytes than the index of the reference {self._path} states (metadata.total_size)",
                expected=f"{total} bytes, or as many times more or less as other dtypes make",
                got=f"{held} bytes",
                help="a tensor is cut or is another model's: give the reference's files too, whose headers tell which",
            )
        ]

    def _proven(self) -> Finding:
        odd = any(got != expected for got, expected in self._met.found["kinds"])
        proven = "names, shapes and dtypes" if not odd else "names and shapes"
        proven = proven if self._reference.has_shapes else "names"
        how = str(self._met.reading) if self._met.reading.prefix else self._met.side.how
        how = f", {how}" if how else ""
        return Finding.of(
            "FS109",
            f"the {self._met.matched} tensors that the reference has are there by their {proven}{how}; what it does not prove: "
            + ("" if self._reference.has_shapes else "shapes and dtypes, ")
            + "the order of heads, and values",
            severity="note",
            file=self._path,
        )


_Missing = list[tuple[str, "list[int | None] | None"]]


def _is_buffer(name: str, shape: Iterable[int | None] | None) -> bool:
    """True for a tensor that transformers computes itself, by its name and the number of its dimensions."""
    dimensions = None if shape is None else len(list(shape))
    return any(
        pattern.search(name) and (known is None or dimensions in (None, known)) for pattern, known in _BUFFERS
    )


def _more(code: str, count: int, what: str, severity: str | None = None) -> list[Finding]:
    if count <= _TOLD:
        return []
    return [Finding.of(code, f"and {count - _TOLD} more {what}", severity=severity)]


def _extents(shape: Iterable[int | None]) -> str:
    return f"[{', '.join('?' if n is None else str(n) for n in shape)}]"


def _unequal(got: list[int], expected: list[int | None]) -> list[int]:
    """Dimensions in which two shapes differ; of shapes with other numbers of them all."""
    if len(got) != len(expected):
        return list(range(max(len(got), len(expected))))
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if b is not None and a != b]


def _kind(dtype: str) -> str:
    """What elements are, in words."""
    if dtype in TORCH_FLOATS:
        return "floating"
    words = {"F": "8-bit floating", "I": "whole numbers", "U": "whole numbers", "B": "truth values"}
    return words.get(dtype[0], "complex")


def _stated(config: Mapping[str, Any], *keys: str) -> Any:
    """What a config, or that of its language model, says by the first of some keys; None if it says nothing."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def _number(config: Mapping[str, Any], *keys: str) -> int | None:
    stated = _stated(config, *keys)
    return stated if type(stated) is int else None


def _layers(config: Mapping[str, Any]) -> int | None:
    return _number(config, *_LAYERS)
