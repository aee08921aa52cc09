"""``fastshard.open`` and ``fastshard.safe_open``: checkpoints as mappings, in their own layout or in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint import open as opened
from ..common import option_checks
from ..common.errors import FastshardError
from ..common.options import StrPath
from .in_memory import View, view

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..common.options import Viewing

__all__ = ["open"]


@overload
def open(
    *paths: StrPath,
    to: None = None,
    step: str | int | None = None,
    under: str | None = None,
    config: StrPath | Mapping[str, Any] | None = None,
    layout: StrPath | None = None,
    vocab_size: int | None = None,
    adapter: StrPath | None = None,
    accept: Iterable[str] = (),
    expect_processes: int | None = None,
    like: StrPath | None = None,
    fail_on: Literal["error", "warning"] | None = None,
    error: Iterable[str] = (),
    ignore: Iterable[str] = (),
    threads: int | None = None,
) -> Checkpoint: ...


@overload
def open(
    *paths: StrPath | Checkpoint,
    to: str,
    step: str | int | None = None,
    under: str | None = None,
    config: StrPath | Mapping[str, Any] | None = None,
    layout: StrPath | None = None,
    vocab_size: int | None = None,
    adapter: StrPath | None = None,
    accept: Iterable[str] = (),
    expect_processes: int | None = None,
    like: StrPath | None = None,
    fail_on: Literal["error", "warning"] | None = None,
    error: Iterable[str] = (),
    ignore: Iterable[str] = (),
    threads: int | None = None,
    **converting: Unpack[Viewing],
) -> View: ...


@option_checks.checked
def open(
    *paths: Any,
    to: str | None = None,
    step: str | int | None = None,
    under: str | None = None,
    config: StrPath | Mapping[str, Any] | None = None,
    layout: StrPath | None = None,
    vocab_size: int | None = None,
    adapter: StrPath | None = None,
    accept: Iterable[str] = (),
    expect_processes: int | None = None,
    like: StrPath | None = None,
    fail_on: Literal["error", "warning"] | None = None,
    error: Iterable[str] = (),
    ignore: Iterable[str] = (),
    threads: int | None = None,
    **converting: Unpack[Viewing],
) -> Checkpoint | View:
    """Opens a checkpoint: headers only, no payload byte is read, no torch is needed.

    Args:
        paths: the checkpoint's directory or file; several are node-local parts of one checkpoint. With ``to``
            one that is open already will do.
        to: a target, e.g. ``"hf"``: the tensors are then those that a conversion would write, each made when
            it is read. Default: the checkpoint's own, whole, under their own names.
        step: step to take where there are several; default the tracker file's, else the newest.
        under: name below which the model lies in the files, where there are several: ``model``, ``ema``, ``state_dict``.
        config: a config that overrides what is found: HF ``config.json``, GPT-NeoX YAML, or a dict.
        layout: a layout table (TOML) of your own for the source.
        vocab_size: true vocabulary; padded rows beyond it are dropped.
        adapter: a LoRA adapter of PEFT to be merged into the weights: its folder, or its adapter_config.json where
            the checkpoint itself holds the adapter's tensors.
        accept: what to accept though it is not in order, e.g. ``"uncommitted"``.
        expect_processes: processes that wrote the checkpoint, where its files do not tell.
        like: a good checkpoint of the same model that this one must be like in names, shapes and dtypes: a directory, a
            file, an index or a config.json.
        fail_on: ``"warning"`` makes each warning count as an error.
        error: codes of findings whose warnings and notes count as errors.
        ignore: codes of findings whose warnings and notes are put aside; an error cannot be (``FS515``).
        threads: threads for reading headers.
        converting: with ``to``: what :func:`fastshard.convert` takes of a conversion (``dtype``, ``weights``,
            ``replicas``, ``expect``, options of the target).

    Raises:
        TypeError: for an option that there is not.
        FastshardError: if nothing there is a checkpoint. What is wrong *inside* one comes as
            :attr:`Checkpoint.findings`; with ``to`` it is raised, as a conversion would.
    """
    given: dict[str, Any] = {
        "step": step,
        "under": under,
        "config": config,
        "layout": layout,
        "vocab_size": vocab_size,
        "adapter": adapter,
        "accept": accept,
        "expect_processes": expect_processes,
        "like": like,
        "fail_on": fail_on,
        "error": error,
        "ignore": ignore,
        "threads": threads,
    }
    if to is None:
        if converting:
            raise FastshardError.of(
                "FS515", f"{', '.join(converting)}: without to", help='name the target, e.g. to="hf"'
            )
        return opened(*paths, **given)
    options: dict[str, Any] = {**given, **converting}
    expect, tokenizer = options.pop("expect", None), options.pop("tokenizer", None)
    already = len(paths) == 1 and isinstance(paths[0], Checkpoint)
    if already:
        # Of what was given on opening nothing can be said again; nothing stands for "as it is".
        options = {k: v for k, v in options.items() if k not in given or v not in (None, (), [])}
    return view(paths[0] if already else paths, to, expect, tokenizer, options)
