"""``fastshard.open`` and ``fastshard.safe_open``: checkpoints as mappings, in their own layout or another
one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.open_checkpoint import open as opened
from ..common import codes, option_checks
from ..common.errors import FastshardError
from ..common.options import OpenOptions, StrPath, table
from .in_memory import View, view

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..common.options import Viewed

__all__ = ["open"]


@overload
def open(*paths: StrPath, to: None = None, **options: Unpack[OpenOptions]) -> Checkpoint: ...


@overload
def open(*paths: StrPath | Checkpoint, to: str, **options: Unpack[Viewed]) -> View: ...


@option_checks.checked
def open(*paths: Any, to: str | None = None, **options: Unpack[Viewed]) -> Checkpoint | View:
    """Opens a checkpoint: reads headers only, no tensor data, and needs no torch.

    Args:
        paths: the checkpoint's directory or file; several are node-local parts of one checkpoint. With
            ``to``, an opened checkpoint is also accepted.
        to: a target, e.g. ``"hf"``: the mapping then has the tensors that a conversion would write, each
            computed when it is read. Default: the checkpoint's own full tensors under their own names.
        options: options for reading; with ``to``, also those of :func:`fastshard.convert`
            (``dtype``, ``weights``, ``replicas``, ``expect``, options of the target).

    Raises:
        TypeError: for an unknown option.
        FastshardError: if the paths contain no checkpoint. Problems *inside* one are in
            :attr:`Checkpoint.findings`; with ``to`` they are raised, as by a conversion.

    Examples:
        >>> checkpoint = fastshard.open("run")
        >>> checkpoint["2.attention.dense.weight"].numpy().shape
        (32, 32)
        >>> view = fastshard.open("run", to="hf", vocab_size=500)
        >>> view["embed_out.weight"].shape
        (500, 32)
    """
    given: dict[str, Any] = dict(options)
    if to is None:
        if converting := [name for name in given if name not in table(OpenOptions)]:
            raise FastshardError.of(
                codes.USAGE,
                f"{', '.join(converting)}: these options need to=",
                help='name the target, e.g. to="hf"',
            )
        return opened(*paths, **given)
    already = len(paths) == 1 and isinstance(paths[0], Checkpoint)
    if already:
        # Of what was given on opening nothing can be said again; nothing stands for "as it is".
        given = {k: v for k, v in given.items() if k not in table(OpenOptions) or v not in (None, (), [])}
    expect, tokenizer = given.pop("expect", None), given.pop("tokenizer", None)
    return view(paths[0] if already else paths, to, expect, tokenizer, given)
