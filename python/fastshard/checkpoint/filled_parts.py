"""Parts of a model that a checkpoint lacks, taken from the model from which training started
(``--fill-from``).

Trainers that freeze a tower often save only the weights that they train, and transformers drops the layers
for multi-token prediction. Complete parts are taken, byte for byte. A single missing tensor of an existing
part may have been lost, so it is taken only if its name is given (``--fill-only``).
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import codes
from ..common.dtypes import TORCH_FLOATS
from ..common.errors import FastshardError, Finding, error_for
from ..common.formatting import counted
from ..common.listing import File
from ..common.records import dataclass, replace
from ..expected.missing_tensors import is_buffer
from ..expected.promised_parts import promised
from ..layouts.declaration import Source, Unit, is_state
from . import moved_parts
from .drafting import CoreRequest, draft_of
from .taken_tensors import TakenTensors

if TYPE_CHECKING:
    from ..common.listing import Folder
    from ..expected.expected_list import ExpectedTensors
    from ..layouts.declaration import Binding
    from ..layouts.declared_model import Description
    from .checkpoint import Checkpoint
    from .moved_parts import Moves

__all__ = ["Filled", "add", "find"]


#: Dtypes of quantised weights.
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32")


@dataclass(frozen=True)
class MovedPart:
    """A part of a model that was trained alone: its place in the composite model, and the description of that
    model."""

    moves: Moves
    model: Description
    binding: Binding
    folders: list[Folder]


@dataclass(frozen=True)
class Filled:
    """The parts that are taken from a model, by file."""

    #: The path of the model, as given.
    path: str
    roots: list[Path]
    #: Files with the taken tensors; their roots are numbered from 0.
    files: list[File]
    #: For each file, the names of the taken tensors, mapped to their names in the checkpoint.
    names: list[dict[str, str]]
    #: Names of the taken tensors, by part.
    parts: dict[str, list[str]]
    #: Names of tensors that were requested individually.
    single: list[str]
    #: All taken tensors.
    taken: TakenTensors
    #: The places of the checkpoint's tensors in the model, for a part that was trained alone.
    moved: MovedPart | None = None


@dataclass(frozen=True)
class _Model:
    """The tensors of a model by its own names, with dtype and shape."""

    tensors: dict[str, tuple[str, list[int]]]
    #: Names of the tensors in each file, by the file's number.
    of_file: dict[int, list[str]]


def find(
    base: Checkpoint, original: Checkpoint, path: str, only: Iterable[str], listed: ExpectedTensors | None
) -> Filled:
    """Find the parts that a checkpoint lacks and a model has.

    Args:
        base: the checkpoint.
        original: the model.
        path: the path of the model, as given.
        only: patterns of single tensors.
        listed: the list with which the checkpoint is compared, for a checkpoint with the names in memory.

    Raises:
        FastshardError: if the model has errors; ``FS514`` if its tensors, or those of the checkpoint, are
            divided; ``FS201`` and ``FS202`` if the shapes or dtypes do not fit; ``FS515`` for another model,
            or a pattern that matches nothing.
    """
    errors = [finding for finding in original.findings if finding.severity == "error"]
    if errors:
        raise error_for([f.replace(message=f"the model {path} (--fill-from): {f.message}") for f in errors])
    for one, whose in ((original.opened.source, path), (base.opened.source, "the checkpoint")):
        if any(degree > 1 for degree in one.binding.degrees.values()) or (
            one is original.opened.source and one.files.assembled
        ):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"the tensors of {whose} are stored in parts, and --fill-from needs full tensors",
                help="merge it first, and use the result",
                run=["fastshard merge CKPT OUT"],
            )
    (have, lost), whole = _list_tensors(base), _model(original)
    called = _spelled(whole.tensors, have, listed)
    own = {called[name]: tensor for name, tensor in whole.tensors.items()}
    only = tuple(only)
    configs = base.opened.source.model.config, original.opened.source.model.config
    moved = None
    if _count_common(own, have) == 0:
        moved = moved_parts.find(have, whole.tensors, configs, path, partial(_is_like, only))
    if moved is None:
        _is_of_that_kind(own, have, path)
        by_name = {name: called[name] for name in whole.tensors if called[name] not in have}
        parts = _find_promised(configs[0] or configs[1] or {}, by_name, (*have, *lost))
    else:
        called = {name: name for name in whole.tensors}
        placed = {*moved.names.values()}
        by_name = {name: name for name in whole.tensors if name not in placed}
        parts = defaultdict(list)
        for name in by_name:
            if not moved.holds(name) and not moved_parts.is_own_head(name, have, whole.tensors):
                parts[moved.find_place(name)].append(name)
    buffers = [name for name in by_name.keys() - lost if is_buffer(name, whole.tensors[name][1])]
    if buffers:
        parts["buffers"] = sorted(buffers)
    taken = {name for names in parts.values() for name in names}
    single: list[str] = []
    for pattern in only:
        matching = [name for name in whole.tensors if fnmatchcase(name, pattern)]
        if not matching:
            raise FastshardError.of(
                codes.USAGE,
                f"no tensor of {path} has a name like --fill-only {pattern}",
                help="list the names",
                run=[f"fastshard ls {shlex.quote(str(path))}"],
            )
        single += [name for name in matching if name in by_name and name not in taken and name not in single]
    taken |= set(single)
    _dtypes_fit([whole.tensors[name] for name in sorted(taken)], have.values(), path)
    files = [number for number, names in whole.of_file.items() if taken & set(names)]
    found = original.opened.files
    source = original.opened.source
    return Filled(
        path,
        list(original.listing.roots),
        [found[number] for number in files],
        [{name: called[name] for name in whole.of_file[number] if name in taken} for number in files],
        dict(parts),
        single,
        TakenTensors(path, original.listing.roots, original.opened.catalog, frozenset(taken)),
        None if moved is None else MovedPart(moved, source.model, source.binding, source.files.folders),
    )


def add(source: Source, filled: Filled, first: int) -> tuple[Source, list[Finding]]:
    """Add the parts that were found to a declaration, and return it with the findings about them.

    Args:
        source: the declaration of the checkpoint.
        filled: the parts to add.
        first: number of the first file of the parts.
    """
    findings = []
    if filled.moved is not None:
        source, note = _move(source, filled.moved, filled.path)
        findings += [note, *filled.moved.moves.findings]
    if not filled.files:
        message = f"nothing is taken from {filled.path} (--fill-from): it has none of the missing parts"
        return source, [*findings, Finding.of(codes.FILLED, message, severity="warning")]
    prefix = source.names.prefix
    units: list[Unit] = []
    renamed: dict[str, str] = {}
    for number, names in enumerate(filled.names):
        units.append(Unit(file=first + number, only=list(names), prefix=prefix))
        renamed |= {prefix + name: prefix + own for name, own in names.items() if name != own}
    parts = {part: sorted(names) for part, names in filled.parts.items()}
    changed = replace(
        source,
        files=replace(
            source.files,
            units=[*source.files.units, *units],
            values={**source.files.values, "filled": {"parts": parts, "single": sorted(filled.single)}},
        ),
        names=replace(source.names, own=source.names.own | renamed),
    )
    findings += [
        Finding.of(
            codes.FILLED,
            f"{part}: {counted(len(names), 'tensor')} taken from {filled.path}",
            severity="note",
            tensor=names[0],
        )
        for part, names in filled.parts.items()
    ]
    findings += [
        Finding.of(
            codes.FILLED,
            f"the tensor is taken from {filled.path}, but the rest of its part is from the checkpoint",
            severity="warning",
            tensor=name,
            help="restore the file that held it, if training changed this tensor",
        )
        for name in filled.single
    ]
    return changed, findings


def _move(source: Source, moved: MovedPart, path: str) -> tuple[Source, Finding]:
    """Rename the tensors of a part to their names in the model; return the composite model's declaration, and
    a note."""
    prefix, names = source.names.prefix, moved.moves.names
    places = ", ".join(f"{part}* as {whole}*" for part, whole in moved.moves.prefixes.items())
    note = Finding.of(
        codes.FILLED,
        f"the checkpoint is a part of {path}, trained alone: {counted(len(names), 'tensor')} replace "
        f"tensors of it, {places}",
        severity="note",
        tensor=next(iter(names)),
    )
    source = source.as_called({prefix + name: prefix + whole for name, whole in names.items()}, note)
    values = {**source.files.values, "moved": moved.moves.prefixes}
    files = replace(source.files, values=values, folders=[*source.files.folders, *moved.folders])
    return replace(source, model=moved.model, binding=moved.binding, files=files), note


def _find_promised(
    config: Mapping[str, Any], by_name: Mapping[str, str], present: Iterable[str]
) -> dict[str, list[str]]:
    """Find the names of promised parts that are missing completely."""
    present = list(present)
    parts = {}
    for part in promised(config):
        if part.kind.within or any(part.holds(name) for name in present):
            continue
        if names := [name for name in by_name if part.holds(name)]:
            parts[str(part)] = names
    return parts


def _is_like(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _list_tensors(base: Checkpoint) -> tuple[dict[str, tuple[str, list[int]]], set[str]]:
    """List the model's tensors in a checkpoint by its own names, and the names of lost tensors."""
    opened, source = base.opened, base.opened.source
    draft = draft_of(opened.catalog, CoreRequest(source))

    def own(stored: str) -> str | None:
        name = source.names.own.get(stored, stored)
        inside = name.startswith(source.names.prefix) and not is_state(name)
        return name.removeprefix(source.names.prefix) if inside else None

    tensors = {own(name): (dtype, list(whole)) for name, (dtype, _, _, whole, _) in draft.tensors()}
    lost = {own(name) for name in (*draft.lost(), *source.index.lost)}
    own_tensors = {name: kind for name, kind in tensors.items() if name is not None}
    return own_tensors, {name for name in lost if name is not None}


def _model(original: Checkpoint) -> _Model:
    """List the tensors of a model that stores full tensors, with their files."""
    opened = original.opened
    tensors = {name: (dtype, list(shape)) for name, dtype, shape, _, _ in original._plan.outputs}
    of_file = {}
    for unit in opened.source.files.units:
        if unit.under or unit.strip or unit.prefix or opened.source.names.prefix or opened.source.names.own:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "--fill-from needs a model as save_pretrained writes it",
                file=original.opened.files[unit.file].path,
                expected="tensors under the model's own names",
                got="names with another prefix",
                help="convert it first",
                run=["fastshard convert CKPT OUT --to hf"],
            )
        of_file[unit.file] = [name for name in opened.catalog.names(unit.file) if name in tensors]
    return _Model(tensors, of_file)


def _spelled(
    names: Iterable[str], have: Mapping[str, object], listed: ExpectedTensors | None
) -> dict[str, str]:
    """Map the names of a model's tensors to the names in the checkpoint, which may be the names in memory."""
    called = {name: name for name in names}
    if listed is None:
        return called
    from ..expected.names_on_disk import are_in_memory

    if are_in_memory(listed, set(have)):
        for name in called.keys() & listed.made.keys():
            parts = listed.made[name]
            if parts is not None and len(parts) == 1:
                called[name] = parts[0].name
    return called


def _count_common(own: Mapping[str, object], have: Mapping[str, object]) -> int:
    """Count the names that a checkpoint and a model have in common; 0 if most differ."""
    common = len(own.keys() & have.keys())
    return common if 2 * common > min(len(own), len(have)) else 0


def _is_of_that_kind(
    own: Mapping[str, tuple[str, list[int]]], have: Mapping[str, tuple[str, list[int]]], path: str
) -> None:
    """Refuse a model of another kind.

    The checkpoint and the model must share most names of the smaller one, and common tensors must have the
    same shape.
    """
    common = own.keys() & have.keys()
    if not _count_common(own, have):
        raise FastshardError.of(
            codes.USAGE,
            f"the model {path} (--fill-from) has other names than the checkpoint: {len(common)} of "
            f"{len(have)} are in both",
            help="pass the model that training began with; if the checkpoint has names in memory, also pass "
            "its config.json with --like",
        )
    for name in sorted(common):
        # Tokens may have been added.
        rows = int(moved_parts.is_of_tokens(name))
        if own[name][1][rows:] != have[name][1][rows:] or len(own[name][1]) != len(have[name][1]):
            raise error_for([moved_parts.make_shape_finding(path, name, own[name][1], have[name][1])])


def _dtypes_fit(
    taken: Iterable[tuple[str, list[int]]], have: Iterable[tuple[str, list[int]]], path: str
) -> None:
    """Refuse floats whose dtype differs from most of the checkpoint's, and codes if the checkpoint has none.

    The config of the checkpoint does not describe such codes.
    """
    taken, have = list(taken), list(have)
    ours, theirs = _main(have), _main(taken)
    code_dtypes = {dtype for dtype, shape in taken if dtype in _CODES and len(shape) >= 2}
    if code_dtypes and not any(dtype in _CODES and len(shape) >= 2 for dtype, shape in have):
        raise FastshardError.of(
            codes.DTYPE,
            f"the missing part is quantised in {path} (--fill-from), and the checkpoint is not",
            expected=str(ours),
            got=", ".join(sorted(code_dtypes)),
            help="dequantise that model first",
            run=[
                f"fastshard convert {shlex.quote(str(path))} OUT --to hf --dtype {(ours or 'bf16').lower()}"
            ],
        )
    # Beside codes most floats are scales.
    if not code_dtypes and ours != theirs and ours is not None and theirs is not None:
        raise FastshardError.of(
            codes.DTYPE,
            f"the missing part is {theirs} in {path} (--fill-from), and the checkpoint is {ours}",
            expected=ours,
            got=theirs,
            help="convert that model to this dtype first",
            run=[f"fastshard merge {shlex.quote(str(path))} OUT --dtype {ours.lower()}"],
        )


def _main(tensors: Iterable[tuple[str, list[int]]]) -> str | None:
    """Return the floating-point dtype of most elements; None if there are no floats."""
    counts: Counter[str] = Counter()
    for dtype, shape in tensors:
        if dtype in TORCH_FLOATS:
            counts[dtype] += math.prod(shape)
    return counts.most_common(1)[0][0] if counts else None
