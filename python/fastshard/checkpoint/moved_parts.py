"""The place in a composite model of a part that was trained alone under its own names.

For example, ``model.layers.0`` of a vision model's text part is ``model.language_model.layers.0`` in the
vision model, and ``model.layers.0`` of a thinker is ``thinker.model.layers.0`` in the omni model. Names are
changed by prefix, and only for the complete part: the composite model must have each tensor of the part, with
the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding, raise_errors
from ..common.records import dataclass
from ..expected.missing_tensors import is_buffer
from ..layouts import tables
from ..layouts.prefix_moves import moved, reduce_prefixes
from ..models.overridden_settings import is_equal, read_settings
from ..models.tensor_words import WORDS

__all__ = ["Moves", "find", "is_of_tokens", "is_own_head", "make_shape_finding"]

_HEADS = WORDS["head_modules"]
#: Names of modules whose tensors have a row for each token.
_TABLES = (*WORDS["embedding_modules"], *_HEADS)
#: Maximum nesting of configs that are read.
_DEEPEST = 4

#: Settings that the tensor shapes determine, and the one that does not affect any result.
_SHOWN = frozenset(
    ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings")
)

#: Tensors by name, with dtype and shape.
Tensors = Mapping[str, tuple[str, list[int]]]


@dataclass(frozen=True)
class Moves:
    """The places of a part's tensors in the composite model."""

    #: Names in the composite model by the part's own.
    names: dict[str, str]
    #: Prefixes of names in the part, and the corresponding prefixes in the composite model.
    prefixes: dict[str, str]
    #: Prefixes of the names of all modules in the composite model that belong to the part.
    roots: tuple[str, ...]
    #: Findings about settings that only the part's config states.
    findings: tuple[Finding, ...] = ()

    def holds(self, name: str) -> bool:
        """Return True for a name of the composite model that belongs to the part."""
        return name.startswith(self.roots)

    def find_place(self, name: str) -> str:
        """Find the module of a tensor outside the part: the outermost one that contains nothing of the
        part."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            place = ".".join(parts[:count])
            if not any(root.startswith(f"{place}.") for root in self.roots):
                return place
        return name


def find(
    part: Tensors,
    whole: Tensors,
    configs: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    path: str,
    only: Callable[[str], bool],
) -> Moves | None:
    """Find the places of a part's tensors in the composite model; return None if it is not a part of it.

    Args:
        part: the tensors of the part.
        whole: the tensors of the model.
        configs: the config of the part and of the model, if they have any.
        path: the path of the model, for messages.
        only: returns True for the name of a tensor that is taken from the model on request.

    Raises:
        FastshardError: ``FS106`` if it fits several places; ``FS102`` if the model has more tensors there
            than the part, ``FS201`` for another shape; ``FS215`` if the configs of the part and of the model
            state different settings.
    """
    own, composite = configs
    every = dict(_list_inner(composite or {}))
    inner = every
    if own is not None and composite is not None and own.get("model_type") != composite.get("model_type"):
        kind = own.get("model_type")
        inner = {key: one for key, one in inner.items() if _is_of_one_class(one.get("model_type"), kind)}
    else:
        own = None
    if not inner:
        return None
    way = moved(part.keys(), whole.keys(), lambda name, other: part[name][1] == whole[other][1])
    if way.uncertain:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            f"the checkpoint matches several parts of {path} (--fill-from)",
            got=way.readings,
            help="write the checkpoint under the composite model's names",
        )
    names = {name: way.names.get(name, name) for name in part}
    if not way.names or len(set(names.values()) & whole.keys()) < len(part):
        return None
    findings = () if own is None else _compare_settings(own, inner, every, path)
    prefixes = dict(reduce_prefixes(before, after) for before, after in way.prefixes.items())
    # Modules whose names stay belong to the part too.
    stay = {f"{name.rpartition('.')[0]}." for name in part if name not in way.names and "." in name}
    found = Moves(names, prefixes, (*prefixes.values(), *sorted(stay)), findings)
    placed = {*names.values()}
    is_tied = any(one.get("tie_word_embeddings") is True for one in (composite or {}, *inner.values()))
    raise_errors(
        [
            make_shape_finding(path, name, whole[place][1], part[name][1])
            for name, place in names.items()
            if part[name][1] != whole[place][1]
        ]
        + [
            Finding.of(
                codes.MISSING_TENSOR,
                f"the model {path} (--fill-from) has this tensor in the part that was trained, and the "
                "checkpoint lacks it",
                tensor=name,
                expected=str(shape),
                got="none",
                help="restore the file that held it, or take the tensor from the model",
                run=[f"--fill-only {name}"],
            )
            for name, (_, shape) in whole.items()
            if name not in placed
            and not only(name)
            and not is_buffer(name, shape)
            and (found.holds(name) or (is_own_head(name, part, whole) and not is_tied))
        ]
    )
    return found


def _is_of_one_class(one: Any, other: Any) -> bool:
    """Return True for two model types of one class, e.g. Kimi-K2, which is a DeepSeek-V3 with another
    name."""
    classes = tables.classes()
    found = [classes.get(kind) for kind in (one, other) if isinstance(kind, str)]
    architectures = [of.architecture for of in found if of is not None]
    return bool(one == other) or (len(architectures) == 2 and len(set(architectures)) == 1)


def is_of_tokens(name: str) -> bool:
    """Return True for a tensor with a row for each token: an embedding or a head."""
    return _is_in(name, _TABLES)


def make_shape_finding(path: str, name: str, expected: list[int], got: list[int]) -> Finding:
    """Make the finding for a tensor that has another shape in the model of ``--fill-from``."""
    return Finding.of(
        codes.SHAPE,
        f"the checkpoint and the model {path} (--fill-from) have different shapes of this tensor",
        tensor=name,
        expected=str(expected),
        got=str(got),
        help="pass the model that training began with",
    )


def is_own_head(name: str, part: Tensors, whole: Tensors) -> bool:
    """Return True for a head of the composite model with which a part without a head was trained or tied."""
    if not _is_in(name, _HEADS) or any(_is_in(one, _HEADS) for one in part):
        return False
    return whole[name][1] in [shape for one, (_, shape) in part.items() if is_of_tokens(one)]


def _list_inner(
    config: Mapping[str, Any], path: str = "", depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """List the configs of a model's parts, each with its keys."""
    if depth >= _DEEPEST:
        return
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(key, str):
            if "model_type" in value:
                yield f"{path}{key}", value
            yield from _list_inner(value, f"{path}{key}.", depth + 1)


def _compare_settings(
    own: Mapping[str, Any],
    inner: Mapping[str, Mapping[str, Any]],
    every: Mapping[str, Mapping[str, Any]],
    path: str,
) -> tuple[Finding, ...]:
    """Refuse a part whose config states other settings: the result has the config of the composite model.

    Return warnings if the composite model's config omits settings that the part's config states, because
    then the class's default applies, which no file states.

    Args:
        own: the part's config. A part such as a thinker is composite itself, and has settings of its parts.
        inner: the configs in the composite model that may be the part's, by their keys.
        every: the configs of all parts of the composite model, by their keys.
        path: the path of the model, for messages.
    """
    parts = [("", own), *((f".{where}", config) for where, config in _list_inner(own))]

    def pair_with(where: str) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """Pair the part's settings with the model's, by their keys in the model."""
        return [
            (where + below, read_settings(config), read_settings(every[where + below]))
            for below, config in parts
            if where + below in every
        ]

    pairs = {where: pair_with(where) for where in inner}
    nearest = min(pairs, key=lambda where: sum(len(_list_differing(*pair[1:])) for pair in pairs[where]))
    return tuple(found for pair in pairs[nearest] for found in _compare_part(*pair, path))


def _list_differing(settings: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """List the settings that both state, with different values."""
    return [
        key for key in sorted(settings.keys() & theirs.keys()) if not is_equal(settings[key], theirs[key])
    ]


def _compare_part(
    where: str, settings: Mapping[str, Any], theirs: Mapping[str, Any], path: str
) -> tuple[Finding, ...]:
    """Compare the settings of one part: refuse other values, and warn about those that the model omits."""
    raise_errors(
        [
            Finding.of(
                codes.CONFIG_DISAGREES,
                f"{where}.{key}: the checkpoint and the model {path} (--fill-from) state different values; "
                "the result gets the model's config",
                expected=f"{theirs[key]}, as the model states",
                got=f"{settings[key]}, as the checkpoint states",
                help="pass the model that training began with, and set the value that training changed",
            )
            for key in _list_differing(settings, theirs)
        ]
    )
    unstated = sorted(settings.keys() - theirs.keys() - _SHOWN)
    if not unstated:
        return ()
    finding = Finding.of(
        codes.CONFIG_DISAGREES,
        f"{where}: the model {path} (--fill-from) lacks settings that the checkpoint states; the result "
        "gets the model's config, so the defaults of its class apply",
        severity="warning",
        got=", ".join(f"{key} {settings[key]}" for key in unstated),
        help=f"write settings that are not defaults under {where} in the model's config.json",
    )
    return (finding,)


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in modules
