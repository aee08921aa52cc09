"""Opening a checkpoint from its headers; problems become findings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from .. import _core
from ..common import (
    codes,
    file_digests,
    hub_downloads,
    memory_budget,
    option_checks,
    placeholder_files,
    safe_files,
)
from ..common.addresses import check_settings, is_address
from ..common.errors import FastshardError, Finding, error_for, from_core, raise_errors
from ..common.formatting import some
from ..common.gate import Gate
from ..common.listing import File, Listing, holds_weights, list_roots, refuse_unprintable
from ..common.log import log
from ..common.options import OpenOptions, StrPath
from ..common.records import dataclass, replace
from ..common.stored_places import is_stored, show_findings
from ..common.thread_counts import thread_count
from ..layouts import tables
from ..layouts.declaration import Source, TensorIndex, Unit
from ..models import sidecar_files, tensor_words
from ..sources import accepted_copies, hf_config, single_files, stray_tensors
from ..sources.base import Contents, Found, Options
from ..sources.index_files import disagreeing
from ..sources.registry import detect
from ..sources.renamed_files import renamed
from . import quantised_weights, source_options
from .checkpoint import Checkpoint
from .drafting import Opened, full_tensors
from .manifests import find_manifest
from .pickled_calls import calls_for_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..expected.reference import Reference, Whole
    from ..sources.peft.find_files import Files as AdapterFiles
    from .filled_parts import Filled

__all__ = ["CheckpointSource", "as_checkpoint", "open"]

#: Number of headers that are requested from a store at once.
_REQUESTS = 64
#: Options that name files or folders, which may be in a store.
_PATHS = ("like", "config", "adapter", "fill_from")


@option_checks.checked
@file_digests.kept()
def open(*paths: StrPath, **options: Unpack[OpenOptions]) -> Checkpoint:
    """Opens a checkpoint: reads only headers and no tensor data, and needs no torch.

    Args:
        paths: the checkpoint's directory or file; several are node-local parts of one checkpoint.
        options: options for reading the checkpoint.

    Raises:
        TypeError: for an unknown option.
        FastshardError: if there is no checkpoint at the paths. Problems *inside* a checkpoint are listed in
            :attr:`Checkpoint.findings`.
    """
    given: dict[str, Any] = {**options}
    settings = check_settings(given.pop("storage_options", None))
    named = {key: given[key] for key in _PATHS if is_address(given.get(key))}
    if not named and not any(is_address(path) for path in paths):
        return _open(paths, cast("OpenOptions", given))
    from ..stores.placeholders import describe_roots, find_local_paths, note_unseen

    local, roots = find_local_paths([*paths, *named.values()], settings)
    replaced = {**given, **dict(zip(named, local[len(paths) :], strict=True))}
    checkpoint = _open(tuple(local[: len(paths)]), cast("OpenOptions", replaced))
    source = checkpoint.opened.source
    values = {**source.files.values, "stores": describe_roots(roots)}
    source = replace(source, files=replace(source.files, values=values))
    findings = [*checkpoint.opened.findings, *note_unseen(roots)]
    checkpoint.opened = replace(checkpoint.opened, source=source, findings=findings)
    return checkpoint


def _open(paths: tuple[StrPath, ...], options: OpenOptions) -> Checkpoint:
    """Open a checkpoint by local paths; see :func:`open`."""
    request = _read_request(paths, options)
    files = _find_files(request)
    log("open", "%s in %d files", files.found.framework, len(files.found.files))
    headers = _open_headers(files, request)
    source, findings = _declare_source(files, headers, request)
    source, findings = _check_names(source, findings, files, headers, request)
    opened = _attach(source, findings, files, headers, request)
    log("open", "%d findings", len(opened.findings))
    return Checkpoint(files.listing, opened, headers.readable)


@dataclass(frozen=True)
class _Request:
    """The checked options of :func:`open`, before any part of the checkpoint is read."""

    paths: tuple[StrPath, ...]
    options: OpenOptions
    #: The options that adapters receive.
    adapter_options: Options
    gate: Gate
    threads: int
    reference: Reference | None


def _read_request(paths: tuple[StrPath, ...], options: OpenOptions) -> _Request:
    """Check the options, and open the reference.

    Raises:
        FastshardError: ``FS515`` if no path is given; as :func:`open` for the reference.
    """
    if not paths:
        raise FastshardError.of(codes.USAGE, "no path was given")
    gate = Gate.of(options.get("fail_on"), options.get("error", ()), options.get("ignore", ()))
    threads = thread_count(options.get("threads"))
    like = options.get("like")
    reference = None if like is None else _read_reference(like, threads)
    return _Request(paths, options, source_options.of(options, reference), gate, threads, reference)


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint by name, and additional files to read."""

    listing: Listing
    #: Findings for placeholders: pointer files, web pages, empty files.
    placeholders: dict[str, Finding]
    found: Found[Any]
    roots: Sequence[Path]
    adapter: AdapterFiles | None
    fillings: Filled | None
    #: The adapter's weights, and the files from which parts are taken, with the numbers of their roots.
    adapter_files: Sequence[File]
    filling_files: Sequence[File]

    @property
    def with_adapter(self) -> Found[Any]:
        """The files that were found, and the adapter's weights."""
        return replace(self.found, files=[*self.found.files, *self.adapter_files])


def _find_files(request: _Request) -> _Files:
    """List names and sizes, choose the framework and the step, and find additional files to read.

    Raises:
        FastshardError: if there is no checkpoint at the paths, with possible reasons.
    """
    listing, placeholders = placeholder_files.sifted(list_roots(request.paths))
    found = _detect(listing, placeholders, request.adapter_options)
    for file in found.files:
        refuse_unprintable(file.path)
    reference, path = request.reference, request.options.get("adapter")
    if reference is not None:
        read = [listing.roots[file.root] / file.path for file in _behind(found)]
        reference.refuse_itself(listing.roots, read, listing.single)
    adapter = None if path is None else _find_adapter(path)
    fillings = _filled(request.paths, request.options, reference)
    roots = [*listing.roots, *([adapter.folder] if adapter else [])]
    # Adapters of frameworks see their own files alone.
    adapter_files = (
        [File(len(listing.roots), adapter.weights, adapter.size)] if adapter and adapter.weights else []
    )
    filling_files: list[File] = []
    if fillings is not None:
        filling_files = [File(len(roots) + file.root, file.path, file.size) for file in fillings.files]
        roots += fillings.roots
    return _Files(listing, placeholders, found, roots, adapter, fillings, adapter_files, filling_files)


def _detect(listing: Listing, placeholders: dict[str, Finding], options: Options) -> Found[Any]:
    """Detect the framework and the step.

    Raises:
        FastshardError: if there is no checkpoint; unreadable directories and placeholders are reported first.
    """
    try:
        found = detect(listing, options)
    except FastshardError as refused:
        if refused.findings[0].is_a("nothing_found"):
            raise_errors([*listing.closed, *placeholders.values(), *hub_downloads.unfinished(listing)])
        if listing.closed:
            closed = {finding.file for finding in listing.closed}
            others = [f for f in listing.without_hidden(refused.findings) if f.file not in closed]
            raise error_for([*listing.closed, *others]) from None
        raise
    return replace(found, findings=hub_downloads.explain_missing(listing, found.findings))


@dataclass(frozen=True)
class _Headers:
    """The headers of all files."""

    catalog: _core.Catalog
    #: None for a file that cannot be read.
    readable: list[_core.OpenedFile | None]
    #: The headers of the checkpoint's own files, for its source adapter.
    contents: Contents
    findings: Sequence[Finding]


def _open_headers(files: _Files, request: _Request) -> _Headers:
    """Read the headers, but no tensor data.

    Raises:
        FastshardError: ``FS118`` for a rank's part of a tensor in a file that is read as a full model; errors
            of the core.
    """
    found = files.found
    try:
        catalog = _core.Catalog(
            [os.fspath(root) for root in files.roots],
            [(file.root, file.path) for file in (*found.files, *files.adapter_files, *files.filling_files)],
            _count_header_threads(files.roots, request.threads),
            dict(found.records),
            {index: blocks.listed() for index, blocks in found.blocks.items()},
            memory_budget.get_limit(),
            tensor_words.declared(),
        )
    except _core.CoreError as error:
        raise from_core(error) from None
    labels = frozenset(_label_files(found.files, files.roots))
    findings = [_as_listed(finding, files.roots, labels) for finding in _one_limit(catalog.findings())]
    readable = catalog.files()
    called = calls_for_tensors(catalog, readable)
    findings += called.values()
    readable = [None if at in called else file for at, file in enumerate(readable)]
    if not found.reads_parts and not files.listing.single:
        findings += _find_rank_parts(readable, request.adapter_options.accept)
    return _Headers(catalog, readable, Contents(catalog, readable[: len(found.files)]), findings)


def _count_header_threads(roots: Sequence[Path], threads: int) -> int:
    """Return the number of threads for reading headers; each mostly waits for a store."""
    return max(threads, _REQUESTS) if any(is_stored(root) for root in roots) else threads


def _declare_source(files: _Files, headers: _Headers, request: _Request) -> tuple[Source, list[Finding]]:
    """Let the framework's adapter declare the source, and apply the caller's table and adapter.

    Raises:
        FastshardError: as the adapter, with possible causes; ``FS515`` for a prefix that the model does not
            have.
    """
    listing, found, options = files.listing, files.found, request.adapter_options
    folders = {found.folder, *(file.folder for file in _behind(found))}
    placeholders = placeholder_files.near(files.placeholders, folders)
    try:
        source = found.adapter.declare(found, listing, headers.contents, options)
    except FastshardError as refused:
        steps = [finding for finding in found.findings if finding.code == codes.STEP_TAKEN]
        if not (placeholders or steps):
            raise
        # What a config that is not there would have said may be all that is wrong.
        raise error_for([*placeholders, *refused.findings, *steps]) from None
    findings = [*listing.findings, *found.findings, *headers.findings]
    findings.extend(
        Finding.of(
            codes.NOT_PROVABLE,
            "the file holds more data apart from its tensors than fastshard reads; the rest was not read",
            severity="warning",
            file=found.files[file].path,
            help="pass the training config if a setting is missing",
            run=["--config FILE"],
        )
        for file in sorted(headers.contents.cut)
    )
    findings += hf_config.find_overridden(source, listing, found.folder, options)
    if options.prefix is not None and not source.names.is_chosen:
        raise _nothing_below(options.prefix, source.framework)
    if options.layout:
        source = hf_config.by_own_table(source, tables.parse(options.layout), headers.contents.names())
    if files.adapter is not None:
        from ..sources.peft import lora

        contents = Contents(headers.catalog, headers.readable)
        source = lora.merge(source, files.adapter, files.with_adapter, listing, contents)
    source.freeze()
    return source, listing.without_hidden([*findings, *placeholders, *source.findings])


def _check_names(
    source: Source, findings: list[Finding], files: _Files, headers: _Headers, request: _Request
) -> tuple[Source, list[Finding]]:
    """Check the names of files and tensors against an index, their numbering, and the names inside archives.

    Raises:
        FastshardError: ``FS515`` for paths that are not part of this checkpoint.
    """
    found, listing, readable, accept = (
        files.with_adapter,
        files.listing,
        headers.readable,
        request.adapter_options.accept,
    )
    ranks = {unit.file: unit.rank for unit in source.files.units}
    # Leftovers are not read.
    unexpected = {f.file for f in findings if f.code == codes.UNEXPECTED_FILE}
    used = [None if f is None or f["path"] in unexpected else f for f in readable]
    findings = [*findings, *renamed(used, "renamed" in accept, ranks, list(files.roots))]
    index, threads = source.index, request.threads
    stored_names: dict[int, set[str]] = {}
    if index.weight_map is not None or index.names or index.by_numbers:
        opened = (i for i, file in enumerate(readable) if file is not None)
        stored_names = {i: set(headers.catalog.names(i)) for i in opened}
    strays = _strays(found, index, listing, stored_names, list(files.roots), threads)
    findings = strays.left(findings, index.path)
    findings += _expected_names(index, source.files.units, stored_names, readable, strays)
    _refuse_unread(listing, found, findings)
    patterns = accepted_copies.patterns(accept)
    findings = accepted_copies.accepted(findings, patterns)
    # Not even on purpose can a file lack what it is there for.
    copied = {f.file for f in strays.findings if f.code == codes.DUPLICATED_SHARD}
    findings = [f for f in findings if not f.is_a("swapped") or f.file not in copied]
    optimizer = accepted_copies.accepted(source.optimizer.findings, patterns)
    named = (source.index.weight_map or {}).items()
    unreadable = {name: found.files[file].path for name, file in named if readable[file] is None}
    source = replace(
        source,
        optimizer=replace(source.optimizer, findings=optimizer),
        # What a copy holds is taken from the original.
        files=replace(
            source.files, units=[unit for unit in source.files.units if unit.file not in strays.copies]
        ),
        index=replace(source.index, lost={**source.index.lost, **unreadable, **strays.lost}),
        allowances=replace(source.allowances, copies=patterns),
    )
    return source, [*findings, *strays.findings]


def _attach(
    source: Source, findings: list[Finding], files: _Files, headers: _Headers, request: _Request
) -> Opened:
    """Add the parts from another model, the quantised weights, and the reference."""
    found, listing, options = files.found, files.listing, request.options
    places = source.files.folders
    if not places and not listing.single:
        places = sidecar_files.places(listing, found.folder) or sidecar_files.beside_files(listing)
    accept = request.adapter_options.accept
    source = replace(
        source,
        files=replace(source.files, folders=places),
        allowances=replace(
            source.allowances,
            non_finite="non-finite" in accept,
            holes=_choose_holes(listing, request.adapter_options),
        ),
    )
    own_files, contents = files.with_adapter.files, headers.contents
    if files.fillings is not None:
        from . import filled_parts

        source, filled = filled_parts.add(source, files.fillings, len(own_files))
        findings = [*findings, *filled]
        # With the files that parts are taken from.
        contents = Contents(headers.catalog, headers.catalog.files())
    read_files = [*own_files, *files.filling_files]
    quantised = quantised_weights.found_in(source, contents, lambda: full_tensors(headers.catalog, source))
    source = replace(
        source,
        tensor_findings=[*source.tensor_findings, *quantised.findings],
        files=replace(source.files, quantiser_files=quantised.files),
        names=replace(
            source.names,
            beside=frozenset(name for weight in quantised.weights for name in weight.companions.values()),
        ),
    )
    if request.reference is not None:
        source = _attach_reference(request.reference, source)
    besides = (options.get("adapter"), options.get("fill_from"))
    return Opened(
        source=source,
        catalog=headers.catalog,
        findings=show_findings(findings),
        files=read_files,
        labels=_label_files(read_files, files.roots),
        behind=_behind(replace(found, files=read_files)),
        reference=request.reference,
        gate=request.gate,
        asks_transformers="off"
        not in (options.get("transformers"), os.environ.get("FASTSHARD_TRANSFORMERS")),
        quantised=quantised,
        besides=[os.fspath(path) for path in besides if path is not None],
        taken=None if files.fillings is None else files.fillings.taken,
    )


#: :func:`open`, which also opens references.
_opened = open


def _filled(paths: tuple[StrPath, ...], options: OpenOptions, reference: Reference | None) -> Filled | None:
    """Find the parts to take from the model of ``--fill-from``; return None if the option is not given.

    Raises:
        FastshardError: as :func:`.filled_parts.find`; ``FS515`` for ``--fill-only`` without
            ``--fill-from``.
    """
    path, only = options.get("fill_from"), tuple(options.get("fill_only", ()))
    if path is None:
        if only:
            raise FastshardError.of(
                codes.USAGE,
                "--fill-only needs --fill-from",
                help="name the model to take the tensors from",
            )
        return None
    opening = {key: value for key, value in options.items() if key not in ("fill_from", "fill_only")}
    base = _opened(*paths, **{**opening, "transformers": "off", "fail_on": None, "error": ()})  # type: ignore[arg-type]
    original = _opened(path, threads=options.get("threads"))
    listed = None if reference is None else reference.listed
    from . import filled_parts

    return filled_parts.find(base, original, os.fspath(path), only, listed)


def _find_adapter(path: StrPath) -> AdapterFiles:
    from ..sources.peft import lora

    return lora.find(path)


def _read_reference(path: StrPath, threads: int | None) -> Reference:
    from ..expected.reference import read

    return read(path, partial(_whole, threads=threads))


def _choose_holes(listing: Listing, options: Options) -> Literal["refuse", "accept", "compare"]:
    """Choose how to treat large holes in files.

    If there is a manifest, its hashes are compared instead.
    """
    if "holes" in options.accept:
        return "accept"
    return "refuse" if find_manifest(listing.roots) is None else "compare"


def _whole(path: Path, threads: int | None, accept: Iterable[str] = ()) -> Whole:
    """Open a checkpoint as a reference, and return its declaration, findings, tensors and files."""
    from ..expected.reference import Whole

    checkpoint = _opened(path, threads=threads, accept=accept)
    opened = checkpoint.opened
    tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in checkpoint._plan.outputs]
    files = [checkpoint.listing.roots[file.root] / file.path for file in opened.behind]
    return Whole(opened.source, checkpoint.findings, tensors, files)


def _attach_reference(reference: Reference, source: Source) -> Source:
    """Apply a reference to the declaration of a checkpoint.

    The reference states which tensors must exist. If the config is the reference's, the result also takes
    companion files from the reference's folders.
    """
    lent = reference.config_file is not None and source.model.config_file == reference.config_file
    places = [*source.files.folders, *reference.places] if lent else source.files.folders
    if reference.roster is None:
        return replace(source, files=replace(source.files, folders=places))
    return replace(
        source,
        files=replace(source.files, folders=places),
        index=replace(source.index, is_provable=True, is_reference=True),
    )


def _nothing_below(prefix: str, framework: str) -> FastshardError:
    return FastshardError.of(
        codes.USAGE,
        f"prefix: a checkpoint of {framework} holds only one model",
        got=prefix,
        help="leave it out",
    )


def _find_rank_parts(readable: list[_core.OpenedFile | None], accept: frozenset[str]) -> list[Finding]:
    """Refuse a DTensor in a file that is read as a full model, because its slice would be treated as the full
    tensor.

    Return a finding if parts are accepted.

    Raises:
        FastshardError: ``FS118`` for the first DTensor, unless parts are accepted.
    """
    parts = (file for file in readable if file is not None and file["partial"] is not None)
    first = next(parts, None)
    if first is None:
        return []
    finding = Finding.of(
        codes.PART,
        "the file holds one rank's part of the tensor (a DTensor or ShardedTensor), and this format needs "
        "full tensors",
        file=first["path"],
        tensor=first["partial"],
        help="name the directory that holds the files of all ranks; if their names do not number the ranks, "
        "rename them to model_rank_R.pt",
    )
    if "part" not in accept:
        raise error_for([finding])
    return [single_files.accept_part(finding)]


def _refuse_unread(listing: Listing, found: Found[object], findings: list[Finding]) -> None:
    """Refuse tensor files, and directories with a checkpoint, that were given but not read.

    Raises:
        FastshardError: ``FS515`` for paths that are not part of the same checkpoint as the other paths.
    """
    if len(listing.roots) == 1 or any(finding.severity == "error" for finding in findings):
        return
    read = _behind(found)
    roots, paths = {file.root for file in read}, {file.path for file in read}
    said = {finding.file for finding in findings}
    folders = [root for index, root in enumerate(listing.roots) if listing.by_itself(index) is None]
    unread = [
        str(named)
        for file in listing.files
        if (named := listing.by_itself(file.root)) is not None
        # Of a piece that several hosts have, adapters compare the copies.
        and file.path not in paths
        and file.path not in said
        and holds_weights(file.name)
        and not any(named.is_relative_to(folder) for folder in folders)
    ]
    unread += [
        str(root)
        for index, root in enumerate(listing.roots)
        if index not in roots and listing.by_itself(index) is None and _is_checkpoint(root, paths)
    ]
    if unread:
        raise FastshardError.of(
            codes.USAGE,
            f"{some(unread, 3)}: not part of the checkpoint in the other paths",
            expected=f"parts of one checkpoint ({found.framework})",
            help="name one checkpoint at a time: its directory, or the directories of its hosts",
        )


def _is_checkpoint(root: Path, others: set[str]) -> bool:
    """Return True if a directory contains a checkpoint that is not a copy of the files that were read."""
    if _core.is_remote(root):
        return False
    try:
        alone = detect(list_roots([root]), Options())
    except FastshardError:
        # What is not whole may be what one host has: metadata alone, or a rank's files.
        return False
    held = {file.path for file in _behind(alone)}
    return bool(held) and not held & others


def _behind(found: Found[object]) -> list[File]:
    """List all files with data, including every file of a store."""
    stores = [file for blocks in found.blocks.values() for file in blocks.files]
    return [*(file for i, file in enumerate(found.files) if i not in found.blocks), *stores]


def _one_limit(findings: list[Finding]) -> list[Finding]:
    """Merge the findings for files that could not be opened because descriptors ran out."""
    beyond = [f for f in findings if f.code == codes.TOO_MANY_FILES]
    if len(beyond) < 2:
        return findings
    first = beyond[0].replace(message=f"{beyond[0].message}; the same holds for {len(beyond) - 1} more files")
    return [first, *(f for f in findings if f.code != codes.TOO_MANY_FILES)]


def _label_files(files: Sequence[File], roots: Sequence[Path]) -> list[str]:
    """Return the names of files in findings: the path, with the root if several roots have the same path."""
    counts = Counter(file.path for file in files)
    return [
        file.path if counts[file.path] == 1 else os.fspath(roots[file.root] / file.path) for file in files
    ]


def _as_listed(finding: Finding, roots: Sequence[Path], labels: Collection[str]) -> Finding:
    """Rename the file of a finding of the core, which includes the root, to its label."""
    if not finding.file or finding.file in labels:
        return finding
    for root in roots:
        path = finding.file.removeprefix(os.fspath(root) + os.sep)
        if path != finding.file:
            return finding.replace(file=path)
    return finding


def _strays(
    found: Found[Any],
    index: TensorIndex,
    listing: Listing,
    stored_names: Mapping[int, set[str]],
    roots: list[Path],
    threads: int,
) -> stray_tensors.Strays:
    """Find the reasons why tensors are missing from the files that should contain them."""
    stored_names = {i: names for i, names in stored_names.items() if i < len(found.files)}
    paths = {i: found.files[i].path for i in stored_names}

    def same(one: int, other: int) -> bool:
        return safe_files.same(*(roots[found.files[i].root] / found.files[i].path for i in (one, other)))

    def beside() -> dict[str, set[str]]:
        return _names_in(index.unnamed, listing, threads)

    if index.weight_map:
        missing: dict[str, set[str]] = {}
        for name, path in index.lost.items():
            if listing.find(path) is None:
                missing.setdefault(path, set()).add(name)
        file = None if index.path is None else listing.find(index.path)
        index_file = None if file is None else stray_tensors.Index(file.path, roots[file.root] / file.path)
        return stray_tensors.of_index(
            index.weight_map, stored_names, paths, same, beside, missing, index_file
        )
    if index.by_numbers:
        return stray_tensors.of_numbers(stored_names, paths, same)
    return stray_tensors.Strays()


def _names_in(files: Sequence[File], listing: Listing, threads: int) -> dict[str, set[str]]:
    """Return the names of tensors in files outside the checkpoint, by path; skip unreadable files."""
    if not files:
        return {}
    try:
        catalog = _core.Catalog(
            [os.fspath(root) for root in listing.roots],
            [(file.root, file.path) for file in files],
            threads,
            memory=memory_budget.get_limit(),
        )
    except _core.CoreError as error:
        raise from_core(error) from None
    opened = catalog.files()
    return {file.path: set(catalog.names(i)) for i, file in enumerate(files) if opened[i] is not None}


def _expected_names(
    index: TensorIndex,
    units: Iterable[Unit],
    stored_names: Mapping[int, set[str]],
    readable: list[_core.OpenedFile | None],
    strays: stray_tensors.Strays,
) -> list[Finding]:
    """Find tensors that an index or layout.json names but that are missing from the file."""
    findings: list[Finding] = []
    paths = {i: file["path"] for i, file in enumerate(readable) if file is not None}
    if index.weight_map is not None:
        left = {name: file for name, file in index.weight_map.items() if name not in strays.lost}
        findings += disagreeing(left, stored_names, paths, index.path, whole=index.has_whole_files)
    elif index.names:
        for unit in units:
            for tensor in sorted(index.names - stored_names.get(unit.file, index.names)):
                findings.append(
                    Finding.of(
                        codes.MISSING_TENSOR,
                        "named in layout.json, but missing in this rank's file",
                        file=paths[unit.file],
                        rank=unit.rank,
                        tensor=tensor,
                        help="copy the file of this rank from the same save",
                    )
                )
    return findings


#: A checkpoint, as API functions accept it: an opened one, its path, or several node-local paths.
CheckpointSource = Checkpoint | StrPath | Iterable[StrPath]


def as_checkpoint(source: CheckpointSource, **options: Any) -> Checkpoint:
    """Open a checkpoint if it is not open yet; refuse options for an open one."""
    if isinstance(source, Checkpoint):
        late = sorted(
            key for key, value in options.items() if value not in (None, (), []) and key != "threads"
        )
        if late:
            raise FastshardError.of(
                codes.USAGE,
                "the checkpoint is already open",
                got=", ".join(late),
                help="pass these options to fastshard.open",
            )
        file_digests.adopt(source.listing.digests)
        return source
    if isinstance(source, (str, os.PathLike)):
        return _opened(source, **options)
    return _opened(*source, **options)
