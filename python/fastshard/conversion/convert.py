"""Merging and converting: planning, comparison with the expected tensors, writing and publishing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import (
    adapter_factors,
    downloaded_files,
    expert_values,
    quantised_values,
    superseded_copies,
)
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifests import (
    MANIFEST_NAME,
    MAX_MANIFEST,
    Expected,
    Manifest,
    accepted_before,
    beside,
    compare_taken,
    expected_by,
    run_options,
)
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.planned_view import PlannedView
from ..checkpoint.planning import find_ids_beyond, make_plan, to_be_written
from ..checkpoint.promised import with_promised
from ..common import codes, json_text, memory_budget, safe_files, target_options
from ..common.addresses import is_address
from ..common.errors import FastshardError, Finding, carry, from_core, raise_errors
from ..common.option_checks import checked
from ..common.options import (
    PLANNING,
    Comparing,
    Merging,
    Planned,
    StrPath,
    Uploading,
    WriteOptions,
    split_request,
    table,
)
from ..common.progress import Progress, Report
from ..common.records import replace
from ..layouts.declaration import Source as Declared
from ..models import sidecar_files
from ..models import tokenizer as tokenizers
from ..models.tokenizer import Tokenizer
from ..targets.request import Request
from .companion_files import along, find_damaged, find_left_out, from_above, hash_copies
from .destinations import find_destination_scheme, open_destination
from .distributed import host_parts, rendezvous
from .distributed import node_local as lending
from .job import Job

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._core import RunOptions
    from ..stores.hub_upload import HubUpload

__all__ = ["convert", "merge", "plan"]


@checked
def plan(
    source: CheckpointSource,
    to: str | None = None,
    *,
    vocab_size: int | None = None,
    dtype: str = "keep",
    keep_dtype: str = "auto",
    replicas: str = "equal",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    max_shard_size: str | int = "5GB",
    weights: str | None = None,
    optimizer: bool = False,
    tokenizer: StrPath | None = None,
    **more: Unpack[Planned],
) -> Plan:
    """Plans a merge (``to=None``) or a conversion and writes nothing.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        to: target layout, e.g. ``"hf"``; None merges under the source's own names.
        vocab_size: number of tokens without padding; rows beyond it are dropped.
        dtype: ``keep``, ``bf16``, ``f16`` or ``f32`` for floating tensors.
        keep_dtype: ``auto``: if ``dtype`` is narrower, tensors that a model uses in float32 keep their dtype;
            ``none`` casts all.
        replicas: ``equal`` refuses copies that differ, ``mean`` averages them in float32.
        include: glob patterns of output names to write; all if empty.
        exclude: glob patterns of output names to leave out.
        max_shard_size: maximum total size of the tensors in an output file, e.g. ``5GB``, without its header.
        weights: ``params`` or ``masters`` if a checkpoint has both; default the parameters if they are
            stored. Both must agree; with an explicit ``params`` a difference is only a warning.
        optimizer: include the optimizer state. A merge names it ``NAME.exp_avg`` etc.; ``dcp``,
            ``universal``, ``maxtext`` and ``orbax`` have their own format.
        tokenizer: folder, or file of a vocabulary, with the tokenizer; default the one next to the source.
        more: as for :func:`fastshard.open`, and options of the target: :mod:`fastshard.common.target_options`
            lists them.

    Raises:
        FastshardError: if the call's arguments are invalid. Problems of the checkpoint are in
            :attr:`Plan.findings`.

    Examples:
        >>> plan = fastshard.plan("run", to="hf", vocab_size=500)
        >>> plan.summary["parameters"], plan.summary["changes"]
        (70176, {'sum over ranks': 6})
        >>> plan = fastshard.plan("lossy", to="hf")
        >>> [finding.code for finding in plan.findings if finding.severity == "error"]
        ['FS101']
    """
    opening = dict(more)
    placed = target_options.of(opening)
    checkpoint = as_checkpoint(source, **opening)
    request = Request(
        to,
        vocab_size=vocab_size,
        dtype=dtype,
        keep_dtype=keep_dtype,
        replicas=replicas,
        include=include,
        exclude=exclude,
        max_shard_size=max_shard_size,
        weights=weights,
        optimizer=optimizer,
        options=placed,
        tokenizer=_words(tokenizer, checkpoint.opened.source, to, vocab_size),
        writes=True,
    )
    return _plan_result(checkpoint, request)


def _plan_result(checkpoint: Checkpoint, request: Request) -> Plan:
    """Plan a result, with a warning for companion files in world-writable folders."""
    plan = to_be_written(make_plan(with_promised(checkpoint.opened, for_hf=request.to == "hf"), request))
    plan.findings += checkpoint.opened.gate.evaluate(adapter_factors.find_lacking(checkpoint.opened))
    plan.findings += checkpoint.opened.gate.evaluate(find_ids_beyond(plan, request.tokenizer))
    source, words = plan.source, request.tokenizer
    if plan.target == "merge" and not source.model.hf_names:
        # Nothing goes along but what is given; a config would have told the model's names.
        present = {*sidecar_files.OTHERS, *tokenizers.NAMES}
    else:
        present = {*sidecar_files.beside(source.files.folders, None), *(words.files if words else ())}
    present |= set() if source.model.config is None else {"config.json"}
    plan.findings += sidecar_files.passed_over(source.files.folders, present)
    return plan


def _words(
    given: StrPath | None, source: Declared, to: str | None, vocab_size: int | None
) -> Tokenizer | None:
    """Return the tokenizer that the caller passed, or else the one next to a source.

    Raises:
        FastshardError: if the tokenizer is invalid and the result depends on it or includes it.
    """
    try:
        return tokenizers.find(given, source.files.folders)
    except FastshardError as error:
        # A merge under the framework's own names takes none along, and keeps all rows.
        decides = given is not None or vocab_size is not None or to is not None or source.model.hf_names
        if decides or error.code != codes.UNSAFE_PATH:
            raise
        return None


@memory_budget.kept
def convert(
    source: CheckpointSource,
    out: StrPath,
    to: str | None = "hf",
    *,
    expect: StrPath | Mapping[str, Any] | None = None,
    tokenizer: StrPath | None = None,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    rank: int | str | None = None,
    world: int | None = None,
    timeout: float | None = None,
    node_local: bool = False,
    check_loss: StrPath | None = None,
    expect_loss: float | None = None,
    hf_branch: str | None = None,
    hf_pr: bool = False,
    **options: Unpack[WriteOptions],
) -> Manifest:
    """Converts a checkpoint and writes the result to ``out``, either complete or not at all.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        out: destination directory; must not exist, or be empty, unless ``overwrite``. ``hf://org/name``
            uploads the result as one commit to a model repository on the Hugging Face Hub.
        to: target layout; None merges under the source's own names.
        expect: a manifest to check the source (or the result) against, or a config as for
            :func:`fastshard.open`. A manifest next to the source is used without this option.
        tokenizer: folder, or file of a vocabulary, with the tokenizer; default the one next to the source.
        memory: limit on the anonymous memory of the process, baseline included. Default 256 MiB, or 128 MiB
            more than the process already uses if that is larger.
        threads: worker threads; default all cores.
        progress: True draws a bar on stderr; a function is called with (bytes done, total bytes), which are
            equal in the last call. It may raise an exception to stop the run.
        rank: this process's rank if several write the result together, on one host or many: a number from 0,
            or ``"auto"`` to read it from torchrun, Slurm, Open MPI, PMI or Kubernetes. All ranks make the
            same call. None means one process.
        world: number of ranks, if no launcher states it.
        timeout: seconds that ranks wait for one another; default 600.
        node_local: each rank's ``source`` is its host's part of the checkpoint, and no rank can read the
            complete checkpoint. Data that another host needs is transferred through the destination;
            ``FS525`` reports the number of bytes.
        check_loss: a text, or a file of token ids (.json, .npy or .safetensors): before anything is written,
            the loss of the result on it is computed as by :func:`fastshard.loss`, and recorded in the
            manifest. If the loss is like that of an untrained model, no result is written. Only with
            ``to="hf"`` and without ``rank``.
        expect_loss: the loss that the trainer computed on the same tokens; if the loss differs, no result is
            written.
        hf_branch: with ``out`` on the hub: the branch for the commit; it is created from ``main`` if it is
            missing. Equivalent to ``hf://org/name@branch``.
        hf_pr: with ``out`` on the hub: open a pull request instead of changing the branch.
        options: options for writing, and as for :func:`fastshard.plan` and :func:`fastshard.open`. With
            ``check_hub``, files that were downloaded from the Hugging Face Hub are compared with the hashes
            in its cache or ``--local-dir`` before anything is written (``FS308``); each file is read one more
            time.

    Returns:
        The manifest of the result.

    Raises:
        FastshardError: with all findings; no result is published, unless the exception's ``published`` has a
            path.
        BaseException: the exception from ``progress`` or a signal handler (KeyboardInterrupt), with an
            attribute ``findings``: ``FS510`` if it stopped the run, with the folder from which ``resume``
            continues; ``FS519`` if it arrived too late and the result is published.

    Examples:
        >>> fastshard.convert("run", "out", to="hf", vocab_size=500)
        <fastshard.Manifest hf: 40 tensors in 3 files>
        >>> fastshard.convert("lossy", "other", to="hf", vocab_size=500)  # a rank file is missing
        Traceback (most recent call last):
            ...
        fastshard.IncompleteError: global_step0/layer_03-model_01-model_states.pt: the file is missing ...
    """
    _refuse_loss(to, rank, check_loss, expect_loss)
    if check_loss is not None:
        # Before memory is divided: they have some of it from then on.
        import torch  # noqa: F401
        import transformers  # noqa: F401
    request, others = split_request(options)
    uploading: Uploading = {"hf_branch": hf_branch, "hf_pr": hf_pr}
    find_destination_scheme(out, request, rank is not None or node_local, uploading)
    this, wait = rendezvous.rank_of(rank, world), rendezvous.seconds(timeout)
    arguments = {"to": to, "node_local": node_local, "expect": expect, "tokenizer": tokenizer}
    alike = rendezvous.words_of({**arguments, **request.list_common(), **others, "storage_options": None})
    left = _left(out) if this is not None and not request.overwrite and request.resume else set()
    late = this is not None and not request.overwrite and left is not None and "complete" not in left
    own = (lambda: lending.digest_request(alike, lending.own_files(source))) if node_local else None
    if late and (done := _done(source, out, to, expect, tokenizer, others, own)):
        if left and "removed" in left:
            # Some that have published it were gone before all was removed. What cannot be is left to `clean`,
            # and another rank may be at it.
            with contextlib.suppress(_core.CoreError):
                _core.collect(os.fspath(out), None, rendezvous.patience(wait), False)
        return done
    with (
        rendezvous.met(out, this, wait, alike) as meeting,
        lending.share_files(meeting, source, node_local) as shared,
        Progress(progress) as bar,
    ):
        # Each rank compares a part of the source with its manifest, where it has one.
        share = (this.rank + 1, this.world) if this else (1, 1)
        whole = source if shared is None else shared.sources
        is_decided = to == "hf" or others.get("dtype") in ("bf16", "f16")
        if this is not None and this.rank > 0 and not isinstance(whole, Checkpoint) and not is_decided:
            # What rank 0 finds by the list of transformers stops all. Names on disk and dtypes that are kept
            # follow from it.
            others["transformers"] = "off"
        job = prepared(whole, to, expect, tokenizer, memory, threads, others, bar, share)
        if job.checkpoint.opened.reference is not None and not is_address(out):
            job.checkpoint.opened.reference.refuse_inside(out)
        if check_loss is not None:
            job = _check_loss(job, check_loss, expect_loss, progress)
        settings = job.set_up(request)
        if this is not None:
            settings["patience"] = rendezvous.patience(wait)
        if shared is not None:
            settings["near"] = shared.near
        with (
            open_destination(out, job, request, settings, others | uploading) as destination,
            carrying(job.plan.core),
        ):
            if destination.published is not None:
                return destination.published
            written = job.plan.core.write(
                destination.path,
                settings,
                bar.phase("writing"),
                _find_array_writer(job.plan),
                (job.copies, job.checkpoint.read_from),
                bar.tell,
                meeting=meeting.core if meeting else None,
                about=shared.about(alike, job.checkpoint.opened.behind) if shared else None,
                store=destination.prefix,
            )
            manifest = job.manifest(written)
            if destination.upload is not None:
                _record_outcome(destination.upload)
        manifest.findings += destination.findings
        if shared is not None:
            notes = [shared.report_bytes()] if this is not None and this.rank == 0 else []
            manifest.findings[:] = [*shared.named(manifest.findings), *notes]
        return manifest


def prepared(
    source: CheckpointSource,
    to: str | None,
    expect: StrPath | Mapping[str, Any] | None,
    tokenizer: StrPath | None,
    memory: str | int | None,
    threads: int | None,
    options: Mapping[str, Any],
    bar: Progress,
    share: tuple[int, int] | None,
) -> Job:
    """Open and plan a source, and compare part ``share`` (n of t) of it with the caller's expectations.

    The function compares nothing if ``share`` is None. The other arguments are those of :func:`convert`.

    Raises:
        FastshardError: with all findings that prevent the result.
    """
    expected, checkpoint, plan, words = planned(source, to, expect, tokenizer, options)
    if "part" in accepted_before(checkpoint.roots) and "part" not in options.get("accept", ()):
        plan.findings.append(_part_before(checkpoint))
    raise_errors(plan.findings)
    raise_errors(checkpoint.opened.gate.evaluate(quantised_values.damaged(checkpoint.opened)))
    copies_of_index = superseded_copies.compare_copies(checkpoint.opened, writes=True)
    # The default grows with what the plan takes.
    run = run_options(memory, threads, checkpoint.opened.catalog, plan.core)
    findings = checkpoint.opened.gate.passed([*copies_of_index, *_find_odd_experts(checkpoint, plan, share)])
    findings += [] if share is None else compared(expected, checkpoint, plan, run, bar, share)
    # What was compared with a manifest is where it belongs.
    settled = (expected.manifest or beside(checkpoint)) is not None or host_parts.settled(checkpoint)
    if not options.get("check_hub"):
        findings += [] if settled else downloaded_files.find_unchecked(checkpoint)
    elif share is not None:
        differing = downloaded_files.compare_download(checkpoint, share, run["threads"], bar)
        findings += checkpoint.opened.gate.passed(differing)
    found = [f for f in plan.findings if not settled or not f.is_a("unproven")]
    copies = along(plan, words, given=tokenizer is not None)
    findings += checkpoint.opened.gate.passed(find_damaged(copies))
    given = set(words.files) if words and tokenizer is not None else set()
    # A config that is not given was compared when it was read.
    compared_before = {"config.json", *given}
    findings += checkpoint.opened.gate.passed(
        sidecar_files.differing(
            checkpoint.listing,
            (Path(p) for n, p in copies if n not in compared_before and n not in sidecar_files.DOCUMENTS),
        )
    )
    above, left_out = from_above(plan, copies, given), find_left_out(checkpoint, copies)
    hashed = hash_copies(copies, [*tokenizers.named_folders(tokenizer), *plan.source.files.folders])
    return Job(checkpoint, plan, run, hashed, above, settled, [*found, *findings], left_out)


def _find_odd_experts(checkpoint: Checkpoint, plan: Plan, share: tuple[int, int] | None) -> list[Finding]:
    """Find copied and constant experts among the stored tensors; only the first of several ranks does so."""
    if share is None or share[0] > 1:
        return []
    return expert_values.check_experts(checkpoint, plan.core if plan.target == "merge" else None).findings


def _refuse_loss(
    to: str | None, rank: int | str | None, check_loss: StrPath | None, expect_loss: float | None
) -> None:
    """Refuse incompatible options for the loss before anything is read.

    Raises:
        FastshardError: ``FS515``.
    """
    if check_loss is None and expect_loss is None:
        return
    if check_loss is None:
        raise FastshardError.of(
            codes.USAGE, "--expect-loss needs a text", help="name the text", run=["--check-loss FILE"]
        )
    if to != "hf" or rank is not None:
        raise FastshardError.of(
            codes.USAGE,
            f"--check-loss works only {'in one process' if to == 'hf' else 'with --to hf'}",
            help="run `fastshard loss` on the result",
        )


def _check_loss(job: Job, text: StrPath, expected: float | None, progress: Report) -> Job:
    """Compute the loss of a result before it is written, and return the job with the loss in its records for
    the manifest.

    Raises:
        FastshardError: as :func:`fastshard.loss`; ``FS318`` or ``FS319`` for a loss that is wrong.
    """
    from ..evaluation.loss_figures import measure_loss

    view = PlannedView(job.checkpoint, job.plan, {name: path for name, path, _ in job.copies})
    is_ids = os.fspath(text).endswith((".json", ".npy", ".safetensors"))
    measured = measure_loss(
        view,
        None if is_ids else text,
        os.fspath(text) if is_ids else None,
        expect_loss=expected,
        progress=progress,
    )
    raise_errors(list(measured.findings))
    new = [finding for finding in measured.findings if finding not in job.findings]
    return replace(job, findings=[*job.findings, *new], records={**job.records, "loss": measured.to_dict()})


def _part_before(checkpoint: Checkpoint) -> Finding:
    """Make the finding that the checkpoint was converted from a part of another one.

    Whoever wrote that checkpoint accepted the part by name; this caller has not.
    """
    return Finding.of(
        codes.PART,
        "according to its own manifest, the checkpoint was made from a part of another one",
        file=f"{checkpoint.roots[0]}/{MANIFEST_NAME}",
        help="merge the checkpoint that the part is from; to convert only the part, accept it",
        run=["--accept part"],
    )


def _find_array_writer(plan: Plan) -> Any:
    """Return the writer of a plan's arrays; None if it has none."""
    if not plan.writes_arrays:
        return None
    from ..zarr import array_writer

    return array_writer.writer()


def compared(
    expected: Expected,
    checkpoint: Checkpoint,
    plan: Plan,
    run: RunOptions,
    bar: Progress,
    share: tuple[int, int],
) -> list[Finding]:
    """Compare part ``share`` (n of t) of a source with the manifests that describe it.

    Raises:
        FastshardError: with all findings, if they differ.
    """
    part = run if share == (1, 1) else {**run, "subset": share}
    with carrying(plan.core):
        findings = expected.check(checkpoint, plan, part, bar.phase("verifying the source"))
        if (taken := checkpoint.opened.taken) is not None:
            findings += compare_taken(taken, part, bar.phase("verifying the selected data"))
    findings += host_parts.compared(checkpoint, share, run, bar)
    return checkpoint.opened.gate.passed(findings)


def planned(
    source: CheckpointSource,
    to: str | None,
    expect: StrPath | Mapping[str, Any] | None,
    tokenizer: StrPath | None,
    options: Mapping[str, Any],
) -> tuple[Expected, Checkpoint, Plan, Tokenizer | None]:
    """Return the caller's expectations, the source, the plan, and the tokenizer.

    The arguments are those of :func:`convert`.
    """
    planning: dict[str, Any] = {k: v for k, v in options.items() if k in PLANNING}
    expected = expected_by(expect, options.get("storage_options"))
    opening = expected.opening(
        {k: v for k, v in options.items() if k not in PLANNING | table(Comparing).keys()}
    )
    checkpoint = as_checkpoint(source, **opening)
    words = _words(tokenizer, checkpoint.opened.source, to, planning.get("vocab_size"))
    request = Request(to, options=target_options.of(planning), tokenizer=words, writes=True, **planning)
    return expected, checkpoint, _plan_result(checkpoint, request), words


def _left(out: StrPath) -> set[str] | None:
    """Return the fates of the leftovers of earlier runs; None if they cannot be listed.

    ``complete`` means a result that has yet to be published, or whose run has yet to be cleaned up;
    ``removed`` means files that no run needs. If they cannot be listed, the run itself reports why.
    """
    try:
        found = _core.collect(os.fspath(out), None, 0.0, True)
    except _core.CoreError:
        return None
    return {fate for _, _, fate, *_ in found}


def _done(
    source: CheckpointSource,
    out: StrPath,
    to: str | None,
    expect: StrPath | Mapping[str, Any] | None,
    tokenizer: StrPath | None,
    options: Mapping[str, Any],
    own_digest: Callable[[], str] | None,
) -> Manifest | None:
    """Return the manifest of a result that several processes have published from the same plan.

    A late rank then has nothing to do. A rank with only a part of the sources finds its result by the digest
    of its request and files (``asked``). The function returns None if no such result exists.
    """
    path = Path(out) / MANIFEST_NAME
    if not path.is_file():
        return None
    document = json_text.object_in(
        safe_files.read_bytes(path, MAX_MANIFEST, code=codes.BAD_MANIFEST, may_change=True)
    )
    if not document.get("provenance"):
        return None
    if own_digest is not None:
        # What keeps it from being asked is told to the others once they have met.
        with contextlib.suppress(FastshardError):
            if own_digest() in document["provenance"].get("asked", []):
                return _complete(document, out)
        return None
    _, _, plan, _ = planned(source, to, expect, tokenizer, options)
    return _complete(document, out) if document.get("plan") == plan.digest else None


def _complete(document: dict[str, Any], out: StrPath) -> Manifest:
    finding = Finding.of(
        codes.PUBLISHED, "the result is already complete; nothing is left to do", file=str(out)
    )
    return Manifest(document, [finding])


#: The plan that was written last, or its upload, for :func:`get_last_outcome`.
_latest: _core.Plan | HubUpload | None = None


def _record_outcome(of: HubUpload) -> None:
    """Record that an upload publishes a result: the core has only written it to this host."""
    global _latest
    _latest = of


def get_last_outcome() -> list[Finding]:
    """Return the outcome of this process's last write: ``FS519`` if its result is published.

    The command line needs it if a signal arrives between the end of a call and the use of its result.
    """
    if _latest is None:
        return []
    return _latest.told() if isinstance(_latest, _core.Plan) else _latest.list_outcome()


@contextlib.contextmanager
def carrying(core: _core.Plan) -> Iterator[None]:
    """Convert errors of the core into exceptions; attach the plan's findings to any other exception."""
    global _latest
    _latest = core
    try:
        yield
    except _core.CoreError as error:
        raise from_core(error) from None
    except BaseException as error:
        carry(error, core.told())
        raise


@checked
def merge(source: CheckpointSource, out: StrPath, **options: Unpack[Merging]) -> Manifest:
    """Merges shards into full tensors under the source's names; works for any model family.

    The function takes the arguments of :func:`convert` except ``to``.

    Examples:
        >>> fastshard.merge("run", "merged")
        <fastshard.Manifest merge: 40 tensors in 1 files>
    """
    return convert(source, out, None, **options)
