"""The in-toto statement about a result: SHA-256 of each file, BLAKE3 of each tensor, and its origin."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import _core
from ..checkpoint.manifests import MANIFEST_NAME, read
from ..common import codes, json_text, memory_budget, safe_files
from ..common.addresses import check_settings, is_address
from ..common.errors import FastshardError
from ..common.options import StrPath
from ..common.progress import Progress, Report
from ..common.thread_counts import thread_count
from ..common.thread_pools import stoppable_pool
from .file_pieces import read_pieces
from .verify import verify as verify_checkpoint

__all__ = ["PREDICATE", "STATEMENT_NAME", "attest"]

#: Name of the statement, in the folder that it describes.
STATEMENT_NAME = "fastshard.intoto.json"
#: Type of the statement's predicate about its subjects. See FORMAT.md.
PREDICATE = "https://github.com/fastshard/fastshard/attestation/v1"
_STATEMENT = "https://in-toto.io/Statement/v1"


@memory_budget.kept
def attest(
    path: StrPath,
    out: StrPath | None = None,
    *,
    verify: bool = True,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Makes an in-toto statement (v1) about a result and its manifest, and writes it.

    Its subjects are the files with their SHA-256, which is also their id in Git LFS and on the Hugging Face
    Hub, and the tensors (``FILE#NAME``) with the BLAKE3 of their logical bytes, which does not depend on
    container or sharding. The statement is not signed: sign it, or the folder (``model_signing sign``), with
    your own key.

    Args:
        path: a result of fastshard, or a folder with the manifest of :func:`fastshard.manifest`; or the
            address of one in a store.
        out: file to write; default ``fastshard.intoto.json`` in ``path``. An address needs it.
        verify: first compare everything with the manifest; otherwise the statement repeats the manifest.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        storage_options: settings of the store that an address names, as for :func:`fastshard.open`.

    Returns:
        The statement, as plain data.

    Raises:
        FastshardError: ``FS518`` without a manifest; the findings of :func:`fastshard.verify`; ``FS506`` for
            a file that changes meanwhile; ``FS504`` if ``out`` exists and is not a statement.

    Examples:
        >>> statement = fastshard.attest("model")  # writes model/fastshard.intoto.json
        >>> [subject["name"] for subject in statement["subject"]][:2]
        ['README.md', 'config.json']
    """
    if is_address(path):
        from ..stores.placeholders import find_local_paths

        if out is None:
            raise FastshardError.of(
                codes.USAGE,
                "the statement about a checkpoint in a store needs a path on this machine",
                file=os.fspath(path),
                help=f"pass -o {STATEMENT_NAME}, and upload the file yourself",
            )
        (path,), _ = find_local_paths([path], check_settings(storage_options))
    root = Path(path)
    if not safe_files.is_file(root / MANIFEST_NAME):
        raise FastshardError.of(
            codes.BAD_MANIFEST,
            "the checkpoint has no manifest to compare it with",
            file=str(root / MANIFEST_NAME),
            help="make a manifest; every result of fastshard has one",
            run=["fastshard manifest CKPT"],
        )
    # Before it is read: one that takes its place meanwhile is found.
    first = _stamp(root / MANIFEST_NAME)
    names = sorted({*(file["name"] for file in read(root / MANIFEST_NAME)["files"]), MANIFEST_NAME})
    _target(root, out)
    for name in names:
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise FastshardError.of(
                codes.BAD_MANIFEST, "the manifest names a file outside its directory", file=name
            )
    files = {name: root / name for name in names}
    before = {name: _stamp(file) for name, file in files.items()} | {MANIFEST_NAME: first}
    if verify:
        verify_checkpoint(root, memory=memory, threads=threads, progress=progress).raise_for_errors()
    digests = _digests(files, thread_count(threads), progress)
    # Again, so that it is not in memory twice while it is verified; the same file, as its stamp says.
    manifest = read(root / MANIFEST_NAME)
    for name, file in files.items():
        if _stamp(file) != before[name]:
            raise FastshardError.of(codes.SOURCE_CHANGED, "the file changed while it was read", file=name)
    statement = {
        "_type": _STATEMENT,
        "subject": [
            *({"name": name, "digest": {"sha256": digests[name]}} for name in names),
            *(
                {"name": f"{tensor['file']}#{tensor['name']}", "digest": {"blake3": tensor["blake3"]}}
                for tensor in manifest["tensors"]
            ),
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "tool": f"fastshard {_core.__version__}",
            "verified": verify,
            "made_by": manifest.get("tool"),
            "kind": manifest.get("kind"),
            "plan": manifest.get("plan") or None,
            "value_ops": manifest.get("value_ops", []),
            "sources": [
                {"name": source["path"], "size": source["size"], "header_blake3": source["header"]}
                for source in manifest.get("sources", [])
            ],
            "accepted": [f for f in manifest.get("findings", []) if f["severity"] != "note"],
            "not_checked": manifest.get("not_checked", []),
        },
    }
    # What somebody has put there while all was read stays too.
    safe_files.replace(_target(root, out), json_text.indented_pieces(statement))
    return statement


def _target(root: Path, out: StrPath | None) -> Path:
    """Return the path at which to write the statement.

    Raises:
        FastshardError: ``FS504`` if another file has that path.
    """
    target = safe_files.replaceable(out if out is not None else root / STATEMENT_NAME)
    if safe_files.is_file(target) and target.stat().st_size and not _is_statement(target):
        raise FastshardError.of(
            codes.OUT_EXISTS,
            "exists and is not a statement",
            file=str(target),
            help="choose another file with -o FILE",
        )
    return target


def _is_statement(path: Path) -> bool:
    """Return True for a statement of this type; a text that only mentions the type is not a statement."""
    found = json_text.object_in(safe_files.read_bytes(path, 1 << 30, code=codes.OUT_EXISTS))
    return found.get("_type") == _STATEMENT and found.get("predicateType") == PREDICATE


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path, follow_symlinks=True)  # noqa: PTH116
    except OSError as error:
        code = codes.MISSING_FILE if isinstance(error, FileNotFoundError) else codes.IO
        raise FastshardError.of(
            code, error.strerror or str(error), file=str(path), severity="error"
        ) from None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _digests(files: dict[str, Path], threads: int, progress: Report) -> dict[str, str]:
    """Hash files with SHA-256 on several threads; hashing releases the interpreter's lock."""
    done, total, digests = 0, sum(path.stat().st_size for path in files.values()), {}
    with Progress(progress) as bar, stoppable_pool(threads) as (pool, is_stopped):
        report = bar.phase("SHA-256")

        def read(path: Path) -> str:
            nonlocal done
            hasher = hashlib.sha256()
            for piece in read_pieces(path):
                if is_stopped.is_set():
                    break
                hasher.update(piece)
                done += len(piece)
            return hasher.hexdigest()

        largest_first = sorted(files, key=lambda name: -files[name].stat().st_size)
        running = {name: pool.submit(read, files[name]) for name in largest_first}
        for name, one in running.items():
            digests[name] = one.result()
            if report is not None:
                report(done, total)
        if report is not None:
            report(total, total)
    return digests
