"""Missing and unexpected tensors of a checkpoint in comparison with a reference, and the reasons for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set

from ..common import codes
from ..common.errors import Finding
from ..common.records import dataclass
from ..common.regex import compile_when_used
from .comparison import (
    HEAD,
    LAYER,
    MOST_LISTED,
    WORDS,
    Comparison,
    Missing,
    extents,
    more,
    number,
    read_setting,
)
from .expected_list import unexpected_allowed
from .promised_parts import promised

__all__ = ["Unmatched", "further", "is_buffer", "missing", "unexplained"]

#: Buffers that transformers computes itself regardless of what is stored; the number of dimensions
#: distinguishes a mask from a bias. source: transformers 4
#: models/{gpt2,gpt_neo,gpt_neox,gptj,codegen,llama,bert}/modeling_*.py (register_buffer)
_BUFFERS = (
    (compile_when_used(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"), None),
    (compile_when_used(r"(^|\.)(attn|attention|self_attention)\.bias$"), 4),
    (compile_when_used(r"(^|\.)(attn|attention|self_attention)\.masked_bias$"), 0),
    (compile_when_used(r"(^|\.)embeddings\.position_ids$"), 2),
    (compile_when_used(r"(^|\.)num_batches_tracked$"), 0),
)
#: Numbers of layers and the like.
_UNNUMBERED = compile_when_used(r"(?<![^.])\d+(?![^.])")
#: Config keys for the number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")


@dataclass(frozen=True)
class Unmatched:
    """Tensors that only one side has, and notes about those with a known explanation."""

    #: Missing tensors, by the roster's names.
    missing: Missing
    #: Unexpected tensors, by their stored names.
    further: list[str]
    remarks: tuple[Finding, ...] = ()


def unexplained(compared: Comparison) -> Unmatched:
    """Find missing and unexpected tensors without a known explanation."""
    met = compared.met
    unmatched = Unmatched(
        [(name, shape) for name, shape in met.found["missing"] if compared.is_expected(name)],
        [stored for stored in met.further if compared.wanted(stored)],
    )
    for without in (_without_buffers, _without_copies, _without_ties, _without_layers):
        rest = without(compared, unmatched)
        unmatched = Unmatched(rest.missing, rest.further, (*unmatched.remarks, *rest.remarks))
    return unmatched


# --- what explains it


def _without_buffers(compared: Comparison, unmatched: Unmatched) -> Unmatched:
    """Drop buffers that transformers computes itself."""
    kept = [s for s in unmatched.further if not is_buffer(compared.met.name(s), compared.shape(s))]
    left = sorted(set(unmatched.further) - set(kept))
    notes = [
        Finding.of(
            codes.IGNORED,
            f"{len(left)} tensors that the reference {compared.path} lacks are buffers, which transformers "
            "computes itself",
            severity="note",
            tensor=first,
        )
        for first in left[:1]
    ]
    lacking = [(name, shape) for name, shape in unmatched.missing if not is_buffer(name, shape)]
    return Unmatched(lacking, kept, tuple(notes))


def is_buffer(name: str, shape: Iterable[int | None] | None) -> bool:
    """Return True for a tensor that transformers computes itself, by its name and number of dimensions."""
    dimensions = None if shape is None else len(list(shape))
    return any(
        pattern.search(name) and (known is None or dimensions in (None, known)) for pattern, known in _BUFFERS
    )


def _without_copies(compared: Comparison, unmatched: Unmatched) -> Unmatched:
    """Drop copies of tensors that the reference ties."""
    copies = {stored: of for stored in unmatched.further if (of := _copied(compared, stored)) is not None}
    notes = [
        Finding.of(
            codes.IGNORED,
            f"{len(copies)} tensors that the reference {compared.path} lacks are copies of the tensors that "
            "it ties them to",
            severity="note",
            tensor=first,
            got=f"a copy of {copies[first]}",
        )
        for first in list(copies)[:1]
    ]
    kept = [stored for stored in unmatched.further if stored not in copies]
    return Unmatched(unmatched.missing, kept, tuple(notes))


def _copied(compared: Comparison, stored: str) -> str | None:
    """Return the tensor of which an unexpected tensor is a copy; None if it is not a copy.

    An equal tensor in another layer is a duplicate layer, not a tie. If all elements are equal, as in new
    biases and norms, only tensors with a row for each token count as tied.
    """
    met = compared.met
    like = _UNNUMBERED.sub("#", met.name(stored))
    own = met.side.tensors[stored]
    alike = (
        other
        for other, entry in met.side.tensors.items()
        if entry == own
        and (name := met.name(other)) in compared.there
        and met.side.own(other) is not None
        and _UNNUMBERED.sub("#", name) != like
    )
    words = WORDS.search(met.name(stored))
    return next(
        (
            other
            for other in alike
            if met.side.same(stored, other, bool(words and WORDS.search(met.name(other))))
        ),
        None,
    )


def _without_ties(compared: Comparison, unmatched: Unmatched) -> Unmatched:
    """Drop tensors that a config ties to an existing one."""
    tied = read_setting(compared.own, "tie_word_embeddings")
    tied = read_setting(compared.theirs, "tie_word_embeddings") if tied is None else tied
    if tied is not True:
        # What a model that ties nothing lacks is lost: it must be stated.
        return Unmatched(unmatched.missing, unmatched.further)
    words = [(n, compared.expected[n]) for n in compared.there if WORDS.search(n)]
    partners = {
        name: [other for other, other_shape in words if other_shape == shape]
        for name, shape in unmatched.missing
        if WORDS.search(name)
    }
    alone = [
        name
        for name, others in partners.items()
        if others and not HEAD.search(name) and all(HEAD.search(other) for other in others)
    ]
    notes = [
        Finding.of(
            codes.MISSING_TENSOR,
            "the tensor is stored only under the name of the output layer, which the config ties to it",
            severity="warning",
            tensor=compared.stored(name),
            expected=f"as in {compared.path}",
            help="load it with transformers 5 or later: earlier versions look for this name, and initialise "
            "the tensor if it is missing",
        )
        for name in alone[:1]
    ]
    lacking = [(name, shape) for name, shape in unmatched.missing if not partners.get(name)]
    return Unmatched(lacking, unmatched.further, tuple(notes))


def _without_layers(compared: Comparison, unmatched: Unmatched) -> Unmatched:
    """Drop layers that only one of the two configs counts, if exactly these layers are missing or
    unexpected."""
    own, theirs = number(compared.own, *_LAYERS), number(compared.theirs, *_LAYERS)
    if own is None or theirs is None or own == theirs:
        return Unmatched(unmatched.missing, unmatched.further)
    stacks = {stack for stack, members in compared.stacks.items() if len(members) == theirs}
    beyond = range(min(own, theirs), max(own, theirs))

    def is_beyond(name: str) -> bool:
        found = LAYER.match(name)
        return found is not None and found[1] in stacks and int(found[2]) in beyond

    if own < theirs:
        gone = {name for name, _ in unmatched.missing if is_beyond(name)}
        # Of none of these layers is anything there.
        explained = bool(gone) and gone == {n for n in compared.expected if is_beyond(n)}
        rest = [one for one in unmatched.missing if one[0] not in gone], unmatched.further
    else:
        added = {name for stored in unmatched.further if is_beyond(name := compared.met.name(stored))}
        explained = bool(added) and _are_whole_layers(compared, added, stacks, beyond)
        rest = (
            unmatched.missing,
            [stored for stored in unmatched.further if compared.met.name(stored) not in added],
        )
    if not explained:
        return Unmatched(unmatched.missing, unmatched.further)
    note = Finding.of(
        codes.IGNORED,
        f"the checkpoint's own config and the reference {compared.path} state different numbers of layers",
        severity="note",
        expected=f"{theirs} layers, by the reference's config",
        got=f"{own} layers, by the checkpoint's own config; these exist",
    )
    return Unmatched(*rest, (note,))


def _are_whole_layers(compared: Comparison, names: Set[str], stacks: Set[str], numbers: range) -> bool:
    """Return True if names make up complete layers of the given numbers in each stack.

    Each layer must have the same tensors as another layer of its stack.
    """
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        if match := LAYER.match(name):
            layers[match[1], int(match[2])].add(match[3])
    alike = all(members in compared.stacks[stack].values() for (stack, _), members in layers.items())
    return alike and layers.keys() == {(stack, n) for stack in stacks for n in numbers}


# --- what nothing explains


def missing(compared: Comparison, names: Missing) -> list[Finding]:
    """Report missing tensors, with one finding for a layer without any tensors."""
    lost: dict[tuple[str, int], list[str]] = defaultdict(list)
    aside = _of_parts(compared, names)
    for name, _ in names:
        if name not in aside and (match := LAYER.match(name)):
            lost[match[1], int(match[2])].append(name)
    whole = {
        layer: members
        for layer, members in lost.items()
        if len(members) == len(compared.stacks[layer[0]][layer[1]])
    }
    in_layers = {name for members in whole.values() for name in members}
    singles = [one for one in names if one[0] not in in_layers]
    others = [one for one in singles if one[0] not in aside]
    message = (
        f"one of {len(singles)} tensors that the reference {compared.path} has and the checkpoint lacks"
        if len(singles) > 1
        else f"the reference {compared.path} has this tensor, and the checkpoint lacks it"
    )
    return [
        *(_layer_missing(compared, *layer, whole[layer]) for layer in sorted(whole)),
        *(
            Finding.of(
                codes.MISSING_TENSOR,
                message,
                tensor=compared.stored(name),
                expected=None if shape is None else extents(shape),
                got="missing",
                help="copy the file that holds it from the original checkpoint",
            )
            for name, shape in (*(one for one in singles if one[0] in aside), *others[:MOST_LISTED])
        ),
        *more(codes.MISSING_TENSOR, len(others), "tensors that are missing"),
    ]


def _of_parts(compared: Comparison, names: Missing) -> set[str]:
    """Return missing tensors of completely missing promised parts; each part becomes one finding.

    This applies only to a list from transformers.
    """
    if compared.reference.listed is None:
        return set()
    parts = [p for p in promised(compared.theirs) if not any(map(p.holds, compared.there))]
    return {name for name, _ in names if any(part.holds(name) for part in parts)}


def _layer_missing(compared: Comparison, stack: str, layer: int, names: list[str]) -> Finding:
    own, theirs = number(compared.own, *_LAYERS), number(compared.theirs, *_LAYERS)
    by_theirs = f", {theirs} by the reference's" if theirs else ""
    return Finding.of(
        codes.MISSING_LAYER,
        f"layer {compared.stored(f'{stack}{layer}')}: all of its {len(names)} tensors are missing",
        tensor=compared.stored(names[0]),
        layers=range(layer, layer + 1),
        count=len(names),
        expected=f"{len(compared.stacks[stack])} layers, as in {compared.path}",
        got=None if own is None else f"{own} layers, by the checkpoint's own config{by_theirs}",
        help="copy the files of this layer from the original checkpoint",
    )


def further(compared: Comparison, names: list[str]) -> list[Finding]:
    """Report unexpected tensors, except those that the reference's class accepts."""
    if compared.reference.listed is not None:
        allowed = unexpected_allowed(compared.reference.listed, map(compared.met.name, names))
        names = [stored for stored in names if compared.met.name(stored) not in allowed]
    findings = [
        Finding.of(
            codes.UNKNOWN_TENSOR,
            f"unexpected tensor: the reference {compared.path} lacks it",
            tensor=stored,
            got=extents(compared.shape(stored)),
            help="leave it out on purpose (--exclude), choose a source without it, or leave out --like; "
            "fastshard drops nothing by itself",
        )
        for stored in names[:MOST_LISTED]
    ]
    return findings + more(codes.UNKNOWN_TENSOR, len(names), "tensors that the reference lacks")
