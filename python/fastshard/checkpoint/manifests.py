"""Manifests, and the comparison of a checkpoint with a caller's expectations."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import codes, json_text, memory_budget, safe_files
from ..common.addresses import check_settings, is_address
from ..common.byte_sizes import parse_size
from ..common.dtypes import item_size
from ..common.errors import FastshardError, Finding, from_core
from ..common.gate import recorded
from ..common.options import ACCEPTABLE, StrPath
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..common.thread_counts import thread_count
from . import manifest_files

if TYPE_CHECKING:
    from .._core import RunOptions
    from .checkpoint import Checkpoint
    from .plan import Plan
    from .taken_tensors import TakenTensors

#: Name of the manifest in a result, and next to a source.
MANIFEST_NAME = "fastshard.manifest.json"

#: Maximum size of a manifest in bytes, as in the core.
MAX_MANIFEST = 1 << 30

ProgressCallback = Callable[[int, int], object] | None


class Manifest(Mapping[str, Any]):
    """A record, with hashes, of a result and its sources; it maps tensor names to their entries.

    A name that occurs in several files denotes a shard; its key is ``FILE:NAME``.

    Examples:
        >>> manifest = fastshard.convert("run", "out", to="hf", vocab_size=500)
        >>> len(manifest), manifest["embed_out.weight"]["shape"]
        (40, [500, 32])
    """

    def __init__(self, document: dict[str, Any], findings: list[Finding]) -> None:
        #: The manifest as plain data, as in ``fastshard.manifest.json``.
        self.document = document
        #: Warnings and notes of the run.
        self.findings = findings
        #: Files of the source from which the run took nothing, relative to their root.
        self.left_out: list[str] = []
        names = Counter(t["name"] for t in document["tensors"])
        self._tensors = {
            t["name"] if names[t["name"]] == 1 else f"{t['file']}:{t['name']}": t for t in document["tensors"]
        }

    @classmethod
    def written(cls, text: str, findings: list[Finding]) -> Manifest:
        """Reads a manifest from its JSON text."""
        return cls(json.loads(text), findings)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def tensor_files(self) -> list[dict[str, Any]]:
        """Entries of the tensor files; none for an array store."""
        return tensor_files(self.document)

    @property
    def tensor_bytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(math.prod(t["shape"]) * item_size(t["dtype"]) for t in self.document["tensors"])

    def __repr__(self) -> str:
        d = self.document
        return f"<fastshard.Manifest {d['kind']}: {len(d['tensors'])} tensors in {len(d['files'])} files>"

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        rows = (
            (
                t["name"],
                t.get("dtype", ""),
                notebook_html.shape(t.get("shape", ())),
                t.get("file", ""),
                t["blake3"][:12],
            )
            for t in self.document["tensors"]
        )
        head = ("tensor", "dtype", "shape", "file", "BLAKE3 (begins)")
        below = f"not checked: {'; '.join(map(str, self.document.get('not_checked', [])))}"
        return notebook_html.table(repr(self), head, rows, len(self), findings=self.findings, below=below)


def tensor_files(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a manifest's entries for tensor files, which are the entries with an identity."""
    return [file for file in document["files"] if file.get("identity")]


#: Default budget in bytes, and the bytes added for a process that already uses more (with torch, it may).
_DEFAULT_MEMORY = 256 << 20
_HEADROOM = 128 << 20
#: Memory in bytes for headers, a manifest and its text per byte of a name, and for statistics per tensor;
#: twice the core's estimates.
_PER_NAME_BYTE = 8
_PER_TENSOR = 6600


def run_options(
    memory: str | int | None, threads: int | None, *holders: _core.Catalog | _core.Plan
) -> RunOptions:
    """Return the options of an engine run, in the form that the core reads.

    The default memory budget grows with the number of tensors in ``holders`` and the length of their names.
    """
    counts = [holder.named() for holder in holders]
    needed = sum(tensors * _PER_TENSOR + name_bytes * _PER_NAME_BYTE for tensors, name_bytes in counts)
    budget = (
        max(_DEFAULT_MEMORY, _core.anonymous_memory() + _HEADROOM + needed)
        if memory is None
        else parse_size(memory, "memory")
    )
    if any(h.reads_store() for h in holders if isinstance(h, _core.Catalog)):
        # What requests bring, and what is kept of it: it is there before the engine divides the rest.
        if memory is None:
            budget += 2 * memory_budget.STORE_ROOM
        else:
            budget -= 2 * (budget // memory_budget.PART_OF_STORES)
    return {"memory": budget, "threads": thread_count(threads), "scratch_dir": _find_scratch_folder()}


def _find_scratch_folder() -> str:
    """Return the folder for temporary files.

    `tempfile` would find it too, but importing it loads OpenSSL for random numbers.
    """
    if "tempfile" not in sys.modules:
        named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
        for folder in filter(None, (*named, "/tmp", "/var/tmp", "/usr/tmp")):
            path = Path(folder)
            if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
                return os.fspath(path.absolute())
    import tempfile

    return tempfile.gettempdir()


def is_manifest(path: Path) -> bool:
    """Return True if a file is a fastshard manifest, judging by its first bytes."""
    return b'"fastshard.manifest"' in safe_files.read_bytes(path, 256, code=codes.BAD_VALUE, whole=False)


@dataclass
class Expected:
    """A caller's expectation: a config for opening, a manifest for checking, or neither."""

    config: StrPath | Mapping[str, Any] | None = None
    manifest: Path | None = None

    def opening(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options for opening the source, with the expected config.

        Raises:
            FastshardError: ``FS515`` if the options name another config.
        """
        if self.config is None:
            return options
        if options.get("config") is not None:
            raise FastshardError.of(
                codes.USAGE, "both --config and --expect pass a config", help="pass it once"
            )
        return {**options, "config": self.config}

    def check(
        self, checkpoint: Checkpoint, plan: Plan, run: RunOptions, progress: ProgressCallback
    ) -> list[Finding]:
        """Compare a checkpoint with the given manifest, or otherwise with the one in its roots."""
        path = self.manifest or beside(checkpoint)
        if path is None:
            return []
        document = read(path)
        named = {file["name"] for file in tensor_files(document)}
        have = {file["path"] for file in checkpoint.files}
        about = manifest_files.compare(path, document, checkpoint, run)
        if self.manifest is None:
            # Found by itself: a tokenizer that was added or a config that was edited is the user's business.
            about = [f.replace(severity="warning") if f.severity == "error" else f for f in about]
        try:
            tensors = {t["name"] for t in document["tensors"]}
            own = manifest_files.root_of(path, document, checkpoint) is not None
            if (own and named & have) or not tensors:
                own_roots = len(checkpoint.listing.roots)
                found = checkpoint.opened.catalog.against(str(path), own_roots, run, progress)
                return [*about, *found]
            if not named and not tensors - checkpoint.keys():
                # Of a store of arrays: its arrays are the source's.
                return [*about, *against_result(path, checkpoint._plan, run, progress, severity="error")]
            # A manifest of another layout of the same model: its tensors are the ones to come out. Or it is
            # one of the source's, where only those have the form.
            if not manifest_files.fits(document, plan) and manifest_files.fits(document, checkpoint._plan):
                plan = checkpoint._plan
            return [*about, *against_result(path, plan, run, progress)]
        except _core.CoreError as error:
            raise from_core(error) from None


def compare_taken(taken: TakenTensors, run: RunOptions, progress: ProgressCallback) -> list[Finding]:
    """Compare tensors of another model, by hash, with the manifest next to it, if there is one.

    Args:
        taken: the tensors.
        run: the options of an engine run, including those that select a part of the tensors.
        progress: called with the progress.

    Raises:
        FastshardError: ``FS518`` if the manifest cannot be read; other codes if a file cannot be read.
    """
    path = find_manifest(taken.roots) if taken.names else None
    if path is None:
        return []
    read(path)
    try:
        found = taken.catalog.against(
            str(path), len(taken.roots), {**run, "only": sorted(taken.names)}, progress
        )
    except _core.CoreError as error:
        raise from_core(error) from None
    return [one.replace(message=f"the model {taken.path} (--fill-from): {one.message}") for one in found]


def expected_by(expect: StrPath | Mapping[str, Any] | None, storage_options: object = None) -> Expected:
    """Determine whether ``--expect`` names a manifest or a config.

    Args:
        expect: the option's value.
        storage_options: settings of the store that an address names.

    Raises:
        FastshardError: ``FS515`` for settings that are not texts by name; errors of the store.
    """
    if expect is None:
        return Expected()
    if isinstance(expect, Mapping):
        return Expected(config=expect)
    if is_address(expect):
        from ..stores.placeholders import find_local_paths

        (expect,), _ = find_local_paths([expect], check_settings(storage_options))
    path = Path(expect)
    if path.is_dir():
        path = path / MANIFEST_NAME
    return Expected(manifest=path) if is_manifest(path) else Expected(config=expect)


def beside(checkpoint: Checkpoint) -> Path | None:
    """Return the manifest in one of the roots; ignore the manifest of a piece, which lists only files."""
    return find_manifest(checkpoint.roots)


def find_manifest(roots: Iterable[Path]) -> Path | None:
    """Find the manifest in one of the directories; ignore the manifest of a piece, which lists only files."""
    paths = [root / MANIFEST_NAME for root in roots]
    return next((path for path in paths if safe_files.is_file(path) and not is_piece(path)), None)


#: The kind in the manifest of a piece (:mod:`fastshard.conversion.distributed.host_parts`).
_PIECE = compile_when_used(rb'"kind"\s*:\s*"piece"')


def is_piece(path: Path) -> bool:
    """Return True if a manifest describes one host's part of a checkpoint."""
    return _PIECE.search(safe_files.read_bytes(path, 256, code=codes.BAD_MANIFEST, whole=False)) is not None


def accepted_before(paths: Iterable[StrPath]) -> list[str]:
    """Return the accepted words that the manifests of these checkpoints record, in the form of ``accept``.

    The files are compared with their entries in the manifest, so nothing else is accepted.
    """
    words: list[str] = []
    for root in paths:
        path = Path(root) / MANIFEST_NAME
        try:
            words += accepted_by(path) if safe_files.is_file(path) else []
        except FastshardError:
            continue  # Why it cannot be read is told when it is compared.
    return list(dict.fromkeys(words))


def accepted_by(path: Path) -> list[str]:
    """Return the accepted words that a manifest records, in the form of ``accept``.

    Raises:
        FastshardError: ``FS518`` if it cannot be read.
    """
    # Of a million tensors it is long, and hardly any says so.
    if b'"decided"' not in safe_files.read_bytes(path, MAX_MANIFEST, code=codes.BAD_MANIFEST):
        return []
    return [word for word in recorded(read(path)) if word.partition("=")[0] in ACCEPTABLE]


def read(path: Path) -> dict[str, Any]:
    """Read the manifest at a path as plain data.

    Raises:
        FastshardError: ``FS518`` if the file is not a manifest.
    """
    text = safe_files.read_bytes(path, MAX_MANIFEST, code=codes.BAD_MANIFEST)
    document = json_text.value(text, str(path), "cannot read the manifest", code=codes.BAD_MANIFEST)
    if not isinstance(document, dict) or document.get("format") != "fastshard.manifest":
        raise FastshardError.of(codes.BAD_MANIFEST, "not a fastshard manifest", file=str(path))
    for key, needed in (("files", {"name"}), ("tensors", {"name", "blake3"})):
        if not _rows(document.get(key), needed):
            raise FastshardError.of(
                codes.BAD_MANIFEST, f"the manifest's list of {key} cannot be read", file=str(path)
            )
    if not all(isinstance(row.get("file") or "", str) for row in document["tensors"]):
        raise FastshardError.of(
            codes.BAD_MANIFEST, "the manifest's list of tensors cannot be read", file=str(path)
        )
    # A tensor may be called so, and no file.
    if any("\0" in row["name"] for row in document["files"]):
        raise FastshardError.of(
            codes.BAD_MANIFEST, "the manifest's list of files cannot be read", file=str(path)
        )
    odd = [key for key, kind in _FORMS.items() if not isinstance(document.get(key) or kind(), kind)]
    odd += [key for key in ("sources", "findings") if not _rows(document.get(key) or [])]
    made = document.get("provenance") or {}
    if (
        odd
        or not _rows(made.get("parts") or [])
        or not all(_is_size(p.get("bytes", 0)) for p in made.get("parts") or [])
    ):
        told = ", ".join(dict.fromkeys(odd)) or "provenance"
        raise FastshardError.of(codes.BAD_MANIFEST, f"the manifest's {told} cannot be read", file=str(path))
    return document


#: Types of the optional entries of a manifest, besides files and tensors.
_FORMS: dict[str, type] = {
    "sources": list,
    "findings": list,
    "value_ops": dict,
    "topology": dict,
    "dimensions": dict,
    "not_checked": list,
    "provenance": dict,
}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _rows(rows: object, needed: Collection[str] = ()) -> bool:
    """Return True for a list of objects that have strings under these keys."""
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(row.get(key), str) for key in needed) for row in rows
    )


def against_result(
    path: Path,
    plan: Plan,
    run: RunOptions,
    progress: ProgressCallback,
    *,
    severity: str = "warning",
    left_out: Collection[str] = (),
) -> list[Finding]:
    """Compare a plan's outputs with the tensors of a manifest, by name and hash.

    A tensor that is not in the manifest is a finding of ``severity``. Tensors in ``left_out`` are not
    checked.
    """
    findings, hashes, _ = plan.core.check(run, progress)
    unnamed = set(hashes)
    for tensor in read(path)["tensors"]:
        # A shard is known by its file and its name there.
        name = f"{tensor.get('file')}:{tensor['name']}"
        name = name if name in hashes else tensor["name"]
        unnamed.discard(name)
        if name not in hashes and (name in plan.index or name in left_out):
            continue  # Of another part of the tensors than was asked for.
        if name not in hashes:
            findings.append(
                Finding.of(
                    codes.MISSING_TENSOR,
                    "named in the manifest, but missing",
                    tensor=name,
                    file=os.fspath(path),
                )
            )
        elif hashes[name] != tensor["blake3"]:
            findings.append(
                Finding.of(
                    codes.HASH,
                    "content differs from the manifest",
                    tensor=name,
                    expected=f"BLAKE3 {tensor['blake3']}",
                    got=hashes[name],
                    help="restore the file that holds it from a good copy; it was changed or damaged later, "
                    "or has the values of another layout",
                )
            )
    findings += [
        Finding.of(codes.HASH, "the manifest does not name this tensor", tensor=name, severity=severity)
        for name in sorted(unnamed)
    ]
    return findings
