"""The options of the functions that open, plan and write: their types, and which known word another one was meant for."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

#: A path as callers give it.
StrPath = str | os.PathLike[str]
#: Types of floating tensors in a result.
Dtype = Literal["keep", "bf16", "f16", "f32"]


class Source(TypedDict, total=False):
    """What :func:`fastshard.open` takes, but for the vocabulary."""

    step: str | int | None
    under: str | None
    config: StrPath | Mapping[str, Any] | None
    layout: StrPath | None
    adapter: StrPath | None
    accept: Iterable[str]
    expect_processes: int | None
    fail_on: Literal["error", "warning"] | None
    error: Iterable[str]
    ignore: Iterable[str]


class Opening(Source, total=False):
    """What :func:`fastshard.open` takes, but for the threads."""

    vocab_size: int | None


class Against(TypedDict, total=False):
    """What a checkpoint is held against when it is opened, where functions judge it."""

    like: StrPath | None


class Threaded(Source, total=False):
    """What :func:`fastshard.open` takes, where the vocabulary is another's."""

    threads: int | None


class Placing(TypedDict, total=False):
    """Options of targets, as :mod:`fastshard.common.target_options` declares them."""

    tp: int
    pp: int
    make_vocab_size_divisible_by: int | None
    param_scan_axis: int | None
    fused_qkv: bool | None
    rope_type: Literal["default", "llama3.1"] | None
    stacked_experts: bool
    zarr2: bool


class Planned(Threaded, Against, Placing, total=False):
    """What :func:`fastshard.plan` hands on: to :func:`fastshard.open`, and to the target."""


class Shaping(Placing, total=False):
    """What is made of the tensors."""

    dtype: Dtype
    replicas: Literal["equal", "mean"]
    include: Iterable[str]
    exclude: Iterable[str]
    weights: Literal["params", "masters"] | None
    optimizer: bool


class Viewing(Shaping, total=False):
    """What :func:`fastshard.open` takes with a target."""

    expect: StrPath | Mapping[str, Any] | None
    tokenizer: StrPath | None


class Loading(Opening, Against, Viewing, total=False):
    """What :func:`fastshard.load_model` takes of a checkpoint."""

    threads: int | None


class Writing(Opening, Against, Shaping, total=False):
    """What :func:`fastshard.plan` takes besides the source and the target."""

    max_shard_size: str | int


class Published(Writing, total=False):
    """What all functions take that publish a result, besides the source and the destination."""

    expect: StrPath | Mapping[str, Any] | None
    tokenizer: StrPath | None
    memory: str | int | None
    threads: int | None
    resume: bool
    overwrite: bool
    fsync: bool
    sparse: bool
    stats: bool
    progress: Any


class Merging(Published, total=False):
    """What :func:`fastshard.merge` takes besides the source and the destination."""

    rank: int | Literal["auto"] | None
    world: int | None
    timeout: float | None
    node_local: bool


class Spread(Published, total=False):
    """What :func:`fastshard.ray.merge` takes besides the source and the destination."""

    address: str | None
    parts: int | None
    cpus: int | None
    retries: int
    node_local: bool


#: Options that shape a plan.
PLANNING = (
    frozenset(Writing.__annotations__)
    - frozenset(Source.__annotations__)
    - frozenset(Against.__annotations__)
)
#: Options of any function.
ALL = (
    frozenset(Merging.__annotations__)
    | frozenset(Spread.__annotations__)
    | frozenset(Threaded.__annotations__)
    | {"drop_optimizer", "subset", "to", "out"}
)


#: Known words that are compared letter by letter.
_COMPARED = 256


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that another one was nearly, if there is one."""
    import difflib

    others = [one for one in known if one != word]
    if len(others) > _COMPARED:
        # A checkpoint has a million names: those that begin and end most like it are compared.
        others = heapq.nlargest(_COMPARED, others, key=lambda one: _ends_alike(word, one))
    # A name that is long differs in more letters before it is another one; of a short one half are one letter.
    near = difflib.get_close_matches(word, others, n=1, cutoff=0.5 if len(word) <= 3 else 0.6)
    return near[0] if near else None


def _ends_alike(word: str, other: str) -> int:
    """Letters that two words have in common at both ends."""
    first = len(os.path.commonprefix((word, other)))  # noqa: RUF071 - letters are meant
    return first + len(os.path.commonprefix((word[first:][::-1], other[first:][::-1])))  # noqa: RUF071


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for a word that is nearly one that is known, else nothing."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
