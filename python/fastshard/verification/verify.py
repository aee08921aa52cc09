"""Verification that a checkpoint is complete and undamaged."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import (
    adapter_factors,
    expert_values,
    manifest_files,
    quantised_values,
    superseded_copies,
)
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.downloaded_files import Downloaded, compare_files
from ..checkpoint.loaded_names import unloaded_prefix
from ..checkpoint.manifests import (
    MANIFEST_NAME,
    accepted_before,
    accepted_by,
    against_result,
    beside,
    compare_taken,
    expected_by,
    read,
    run_options,
    tensor_files,
)
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.planning import find_ids_beyond, make_plan
from ..checkpoint.promised import with_promised
from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding, from_core
from ..common.options import Opening, StrPath
from ..common.progress import Progress, Report
from ..conversion.companion_files import along, find_damaged
from ..conversion.distributed import host_parts
from ..findings import proof
from ..findings.stages import READ_STAGES, TRUST, Facts, judge
from ..models import sidecar_files
from ..models.tokenizer import Tokenizer
from ..models.tokenizer import find as find_tokenizer
from ..targets.request import Request
from .verdict import Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._core import RunOptions

__all__ = ["verify"]

#: The model card, which accompanies weights.
_CARD = "README.md"


@memory_budget.kept
def verify(
    source: CheckpointSource,
    *,
    expect: StrPath | Mapping[str, Any] | None = None,
    like: StrPath | None = None,
    subset: tuple[int, int] | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    signature: StrPath | None = None,
    public_key: StrPath | None = None,
    certificates: Iterable[StrPath] = (),
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> Verdict:
    """Checks a checkpoint's completeness and integrity, and, with a manifest, its content.

    Files that were downloaded from the Hugging Face Hub are compared with the hashes in its cache or
    ``--local-dir``. Without a manifest, the function checks structure, zip CRC32, expected tensors and
    shapes, replicas, copied files, padding, NaN, and all-zero blocks (``FS313``), which are typical of a lost
    shard.

    A manifest from :func:`fastshard.manifest`, or one inside the checkpoint, is compared file by file. The
    manifest of a result in another folder is compared tensor by tensor if it lists full tensors; this checks
    the sources of that result.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        expect: a manifest or a config; a manifest next to the source is used without this option.
        like: a known-good checkpoint of the same model, as for :func:`fastshard.open`: names, shapes and
            dtypes must be the same.
        subset: (n, t) reads only part n of t of the tensors; n = 1..t together read all tensors.
        include: glob patterns of names to read; all if empty. A comparison of files always reads complete
            files.
        exclude: glob patterns of names to leave out.
        signature: an OpenSSF model-signing signature of the folder (``model.sig``): each file, including the
            manifest, must be as signed (``FS315``). Needs ``public_key`` or ``certificates``.
        public_key: PEM of the public key of the signer.
        certificates: PEMs of the chain of the signing certificate.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Returns:
        The findings and the verdict; ``.ok`` is True if no finding is an error.

    Raises:
        FastshardError: if the path cannot be checked at all.

    Examples:
        >>> fastshard.verify("model")
        <fastshard.Verdict ok: contents checked: against the manifest fastshard.manifest.json, 0 warnings>
        >>> verdict = fastshard.verify("lossy")
        >>> verdict.ok, verdict[0].headline
        (False, 'global_step0/layer_03-model_01-model_states.pt: the file is missing (tp 1)')
    """
    if subset is not None and not (1 <= subset[0] <= subset[1]):
        raise FastshardError.of(
            codes.USAGE, "subset", expected="n/t with 1 <= n <= t", got=f"{subset[0]}/{subset[1]}"
        )
    include, exclude = list(include), list(exclude)
    certificates = list(certificates)
    expected = expected_by(expect, opening.get("storage_options"))
    options = expected.opening(dict(opening))
    inside: list[str] = []
    if not isinstance(source, Checkpoint):
        source = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        trusted = [*options.get("accept", ()), *(accepted_by(expected.manifest) if expected.manifest else ())]
        inside = [word for word in accepted_before(source) if word not in trusted]
        options["accept"] = [*trusted, *inside]
    checkpoint = as_checkpoint(source, like=like, **options)
    plan = make_plan(with_promised(checkpoint.opened), Request(include=include, exclude=exclude))
    findings = [*plan.findings, *_find_unloaded_prefix(checkpoint, plan)]
    findings += find_ids_beyond(plan, _find_tokenizer(checkpoint))
    findings += adapter_factors.find_lacking(checkpoint.opened)
    signed = _signed(checkpoint, signature, public_key, certificates)
    findings += signed
    run: RunOptions = {**run_options(memory, threads, checkpoint.opened.catalog), "subset": subset}
    findings += _check_companions(checkpoint, plan)
    path = expected.manifest or beside(checkpoint)
    # To read the ranks' files is right all the same; to follow the index is not.
    findings = [f.replace(severity="error") if f.code == codes.SLICE_AS_WHOLE else f for f in findings]
    if path is not None or host_parts.settled(checkpoint):
        # The manifest states what must exist, and where.
        findings = [f for f in findings if f.file or not (f.code == codes.NOT_PROVABLE or f.is_a("unproven"))]
    all_names = make_plan(checkpoint.opened).index.keys() if include or exclude else plan.index.keys()
    left_out = () if path is None else all_names - plan.index.keys()
    differing, downloaded, unnoticed = _differing(checkpoint, plan, path, left_out, run, progress)
    findings += _find_accepted_part(inside)
    opened = checkpoint.opened
    facts = Facts(
        gate=opened.gate, read=frozenset(differing), find_causes=opened.find_causes, untrusted=inside
    )
    found = judge(facts, [*findings, *differing], READ_STAGES).findings
    if downloaded is None or any(f.severity == "error" for f in found):
        return Verdict(found, None)
    by = None if path is None else path.name
    keys = certificates if public_key is None else [public_key]
    vouched = _vouched(checkpoint, by, None if signature is None else _signed_by(Path(signature), keys))
    partial: list[str] = []
    if downloaded.files:
        (vouched if downloaded.is_whole else partial).append(downloaded.describe())
    partial += _own_checksums(checkpoint, found)
    part = None if subset is None else f"part {subset[0]} of {subset[1]}"
    if include or exclude:
        selection = f"a selection: {len(plan.index)} of {len(all_names)} tensors"
        part = f"{part}, {selection}" if part else selection
    unnoticed = [*([_NEVER_SAVED] if _lists_itself(plan) else []), *unnoticed]
    return Verdict(found, proof.checked(found, vouched, partial, unnoticed, part))


def _find_accepted_part(words: Collection[str]) -> list[Finding]:
    """Return a warning if the manifest states that the checkpoint is a converted part of another one."""
    if "part" not in words:
        return []
    message = "the checkpoint was made from a part of another one, according to its own manifest"
    return [
        Finding.of(
            codes.PART,
            message,
            severity="warning",
            file=MANIFEST_NAME,
            help=TRUST,
            run=["--expect MANIFEST"],
        )
    ]


def _find_unloaded_prefix(checkpoint: Checkpoint, plan: Plan) -> list[Finding]:
    """Find tensor names in a model's folder to which a trainer added a prefix that does not match
    config.json."""
    source = checkpoint.opened.source
    renamed = plan.source.names.own if plan.source.names.renames else {}
    # Names of an adapter are the trainer's own.
    return (
        []
        if source.names.is_chosen or source.files.adapter is not None
        else unloaded_prefix(source.model, renamed)
    )


def _differing(
    checkpoint: Checkpoint,
    plan: Plan,
    manifest: Path | None,
    left_out: Collection[str],
    run: RunOptions,
    progress: Report,
) -> tuple[list[Finding], Downloaded | None, list[str]]:
    """Read the tensors; return findings, the record of downloaded files, and the damage that would go
    unnoticed.

    The record is None if it was not made.
    """
    findings: list[Finding] = []
    unnoticed: list[str] = []
    downloaded = None
    part = run["subset"] or (1, 1)
    try:
        with Progress(progress) as bar:
            plan.core.refuse_unwritten()
            findings += host_parts.compared(checkpoint, part, run, bar)
            downloaded, differing = compare_files(checkpoint, part, run["threads"], bar)
            findings += differing
            findings += quantised_values.damaged(checkpoint.opened)
            findings += superseded_copies.compare_copies(checkpoint.opened, writes=False)
            # Replicas and duplicates can only be judged over tensors that are whole.
            found, _, _ = plan.core.check({**run, "stats": "zero_slabs"}, bar.phase("verifying"))
            findings += [f for f in found if not _is_padding(f, checkpoint.opened.source.model.config)]
            if part[0] == 1:
                experts = expert_values.check_experts(checkpoint, plan.core, reports_zeros=True)
                findings += experts.findings
                unnoticed += experts.unnoticed
            if (taken := checkpoint.opened.taken) is not None:
                findings += compare_taken(taken, run, bar.phase("verifying the selected data"))
            if manifest is not None:
                against = _against(manifest, checkpoint, plan, run, bar.phase("hashing"), left_out)
                # A model card is written on after the conversion.
                findings += [f.replace(severity="note") if f.file == _CARD else f for f in against]
    except _core.CoreError as error:
        findings += from_core(error).findings
    return findings, downloaded, unnoticed


def _check_companions(checkpoint: Checkpoint, plan: Plan) -> list[Finding]:
    """Check the files that a result would include: damaged ones, and those that differ between roots."""
    several = len(checkpoint.listing.roots) > 1
    try:
        tokenizer = find_tokenizer(None, checkpoint.opened.source.files.folders)
        copies = along(plan, tokenizer, given=True)
        findings = find_damaged(copies)
        if several:
            others = (Path(path) for name, path in copies if name != "config.json")
            findings += sidecar_files.differing(checkpoint.listing, others)
        return findings
    except FastshardError as error:
        # Only a conversion needs them.
        return error.findings if several else []


def _find_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer next to the model; None if it cannot be read, which its own finding reports."""
    try:
        return find_tokenizer(None, checkpoint.opened.source.files.folders)
    except FastshardError:
        return None


def _vouched(checkpoint: Checkpoint, manifest: str | None, signature: str | None) -> list[str]:
    """Describe what confirms the content besides the checkpoint itself."""
    vouched = []
    if manifest is not None:
        vouched.append(f"against the manifest {manifest}")
    elif host_parts.settled(checkpoint):
        vouched.append("against the manifests of the pieces")
    if signature is not None:
        vouched.append(f"against {signature}")
    return vouched


def _signed_by(signature: Path, keys: Iterable[StrPath]) -> str:
    """Describe the signature and its keys."""
    return f"the signature {signature.name} by the key of {' and '.join(Path(key).name for key in keys)}"


#: The limit of a checkpoint's own list of its tensors, for messages.
_NEVER_SAVED = (
    "tensors that were never saved would not be noticed (only the checkpoint itself states which tensors "
    "exist)"
)


def _lists_itself(plan: Plan) -> bool:
    """Return True if only the checkpoint's own metadata lists the tensors: no table and no reference."""
    source = plan.source
    tables = (source.binding.layout, source.binding.table, source.binding.own_table)
    return (
        source.index.is_provable and not source.index.is_reference and all(table is None for table in tables)
    )


def _own_checksums(checkpoint: Checkpoint, findings: Iterable[Finding]) -> list[str]:
    """Return a statement that the files' own checksums match, if all files have them.

    Checksums detect damage, but not a replaced file.
    """
    held = [file for file in checkpoint.files if file["tensors"]]
    if (
        held
        and all(file["checksums"] for file in held)
        and not any(f.code == codes.NO_CHECKSUMS for f in findings)
    ):
        return ["the CRC32 checksums in the files"]
    return []


def _signed(
    checkpoint: Checkpoint,
    signature: StrPath | None,
    public_key: StrPath | None,
    certificates: list[StrPath],
) -> list[Finding]:
    """Report mismatches with the signature; no findings without one.

    Raises:
        FastshardError: ``FS515`` for a key without a signature, or for a checkpoint in several folders.
    """
    if signature is None:
        if public_key is not None or certificates:
            raise FastshardError.of(
                codes.USAGE, "a key was passed without a signature", help="pass --signature FILE"
            )
        return []
    if len(checkpoint.roots) > 1:
        raise FastshardError.of(
            codes.USAGE, "a signature covers only one directory", got=f"{len(checkpoint.roots)} directories"
        )
    from . import signatures

    key = None if public_key is None else Path(public_key)
    return signatures.check(checkpoint.roots[0], Path(signature), key, map(Path, certificates))


def _is_padding(finding: Finding, config: dict[str, Any] | None) -> bool:
    """Return True for the one row of an embedding that is padding: torch keeps it zero (``padding_idx``)."""
    if finding.code != codes.ZERO_SLAB or "embed" not in (finding.tensor or ""):
        return False
    parts = [config or {}, *(part for part in (config or {}).values() if isinstance(part, dict))]
    ids = {part.get("pad_token_id") for part in parts} - {None}
    return any(finding.got == f"zeros in row {number}" for number in ids)


def _against(
    path: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    run: RunOptions,
    progress: Any,
    left_out: Collection[str] = (),
) -> list[Finding]:
    """Report differences from the manifest at ``path``."""
    document = read(path)
    findings = manifest_files.compare(path, document, checkpoint, run)
    named = {file["name"] for file in tensor_files(document)}
    own = manifest_files.root_of(path, document, checkpoint) is not None
    if (own and named & {file["path"] for file in checkpoint.files}) or not plan.outputs:
        own_roots = len(checkpoint.listing.roots)
        found = checkpoint.opened.catalog.against(str(path), own_roots, run, progress, plan.core)
        # What is there and cannot be opened has been told of.
        there = {file.path for file in checkpoint.listing.files}
        return findings + [f for f in found if f.code != codes.MISSING_FILE or not there.issuperset(f.files)]
    severity = "error" if own else "warning"
    return findings + against_result(path, plan, run, progress, severity=severity, left_out=left_out)
