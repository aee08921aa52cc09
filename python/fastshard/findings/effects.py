"""The effects of findings: the tensors that each cause makes unusable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from .._core import Effect
from ..common import codes
from ..common.errors import Finding
from ..common.formatting import runs
from ..models.tensor_roles import layer_of
from .causes import Causes, is_of_layers

__all__ = ["attach_effects", "effect_on", "unite_effects"]

#: Maximum number of names in an effect, because a config may promise any number of layers.
_MOST_NAMES = 256
#: Maximum number of tensors whose causes are searched; no model has so many, but a config may promise them.
_MOST_LOST = 1 << 17
#: Maximum number of layers of a finding that are examined; no model has more.
_MOST_LAYERS = 1 << 16


def attach_effects(
    findings: Iterable[Finding],
    causes: Causes,
    lost: Collection[str],
    whole: Collection[str] | None,
    echoes: Iterable[Finding],
) -> list[Finding]:
    """Attach to each error the tensors that cannot be used because of it.

    Args:
        findings: the findings.
        causes: the causes among them.
        lost: names of all tensors that are missing, incomplete or unreadable.
        whole: names of the tensors that can be used; None if the names are those of a target.
        echoes: the plan's findings about single tensors, with their ranks.
    """
    findings = list(findings)
    lost = set(lost).difference(whole or ())
    if not 0 < len(lost) <= _MOST_LOST:
        return findings
    of = None if whole is None else len(lost) + len(whole)
    about = {f.tensor: f for f in echoes if f.tensor}
    own = {f.tensor for f in findings if f.severity == "error" and f.tensor}
    # A config may promise any number of layers: those that a finding is about need no search.
    layers: dict[int | None, Finding] = {
        layer: f
        for f in findings
        if f.code == codes.MISSING_LAYER and f.severity == "error" and is_of_layers(f)
        for layer in (f.layers or ())[:_MOST_LAYERS]
    }
    of_files = {file.cause for file in causes.files}
    effects: dict[Finding, list[str]] = {}
    left = {layer_of(name) for name in whole or ()}
    for name in sorted(lost):
        if name not in own:
            cause = layers.get(layer_of(name)) or causes.of(
                about.get(name) or Finding.of(codes.MISSING_TENSOR, "missing tensor", tensor=name)
            )
            if cause is not None and (not cause.tensor or cause in of_files):
                effects.setdefault(cause, []).append(name)
                continue
        left.add(layer_of(name))
    # A layer that two of them tear is no whole layer of either.
    torn = Counter(layer for names in effects.values() for layer in set(map(layer_of, names)))
    left.update(layer for layer, count in torn.items() if count > 1)
    return [f.replace(effect=effect_on(effects[f], of, left)) if f in effects else f for f in findings]


def effect_on(names: Sequence[str], of: int | None, left: Collection[int | None] = ()) -> Effect:
    """Build the effect of a finding on these tensors.

    ``of`` is the number of tensors in a complete checkpoint. ``left`` are the layers that keep other tensors.
    """
    layers = [layer_of(name) for name in names]
    outside = [name for name, layer in zip(names, layers, strict=True) if layer is None]
    inside = [name for name, layer in zip(names, layers, strict=True) if layer is not None]
    numbers = [layer for layer in layers if layer is not None]
    whole = [layer for layer in numbers if layer not in left] if of is not None else []
    tensors = [*outside, *inside][:_MOST_NAMES]
    return Effect(len(names), of, len(inside), runs(numbers), tensors, len(whole), runs(whole))


def unite_effects(effects: Sequence[Effect]) -> Effect | None:
    """Combine the effects of several findings; each tensor counts for only one of them."""
    if not effects:
        return None
    names = sorted((name for e in effects for name in e.tensors), key=lambda name: layer_of(name) is not None)
    layered = runs(layer for e in effects for run in e.layers for layer in run)
    whole = runs(layer for e in effects for run in e.missing_layers for layer in run)
    count, inside = sum(e.count for e in effects), sum(e.in_layers for e in effects)
    in_whole = sum(e.in_missing_layers for e in effects)
    return Effect(count, effects[0].of, inside, layered, names[:_MOST_NAMES], in_whole, whole)
