"""Destinations of results: a local directory, a prefix in a store, or a repository on the Hub."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.manifests import MANIFEST_NAME, Manifest
from ..common import codes, memory_budget
from ..common.addresses import check_settings, find_scheme, normalise_address
from ..common.errors import FastshardError, Finding, carry
from ..common.options import StrPath, WriteRequest
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..common.stored_places import record_place, show_text

if TYPE_CHECKING:
    from .._core import WriteSettings
    from ..common.options import Uploading
    from ..stores.hub_upload import HubUpload
    from ..stores.result_prefix import ResultPrefix
    from .job import Job

__all__ = ["Destination", "find_destination_scheme", "open_destination"]

#: The divisor of a memory limit that gives the share of uploads, and the number of parts that an upload sends
#: at a time.
_PART_OF_UPLOADS = 4
_MOST_AT_ONCE = 8
#: Minimum bytes of a memory limit for a run, apart from uploads.
_LEAST_REST = 24 << 20
_NAME = "result"
#: Name of the file by which Orbax knows a complete folder in a bucket.
#: source: orbax/checkpoint/_src/path/atomicity.py
_COMMIT_MARKER = "commit_success.txt"
#: An address that `pathlib` has reduced to one slash.
_CUT_ADDRESS = compile_when_used(r"(s3|gs|hf):/")


@dataclass
class Destination:
    """The destination of one run, open."""

    #: The directory on this host that the core writes to.
    path: str
    #: The prefix of the store at which the result is published.
    prefix: ResultPrefix | None = None
    #: The manifest of a result that an earlier run published, if nothing is left to write.
    published: Manifest | None = None
    #: The upload that publishes the result on the hub.
    upload: HubUpload | None = None

    @property
    def findings(self) -> list[Finding]:
        """Findings about the store."""
        if self.upload is not None:
            return self.upload.findings
        return [] if self.prefix is None else self.prefix.findings


def find_destination_scheme(
    out: StrPath, request: WriteRequest, is_shared: bool, uploading: Uploading
) -> str | None:
    """Return the scheme of a destination in a store; None for a local directory.

    Args:
        out: the destination.
        request: how the result is written.
        is_shared: whether several processes write it together.
        uploading: the options of a destination on the hub.

    Raises:
        FastshardError: ``FS514`` for an option that a store does not support; ``FS515`` for a Hub option with
            another kind of destination, or for a malformed address.
    """
    scheme = find_scheme(out)
    if scheme == "hf":
        from ..stores.hub_upload import parse_target

        parse_target(os.fspath(out), uploading.get("hf_branch"))
    elif uploading.get("hf_branch") is not None or uploading.get("hf_pr"):
        raise FastshardError.of(
            codes.USAGE,
            "--hf-branch and --hf-pr need a destination on the hub",
            file=os.fspath(out),
            expected="hf://ORG/NAME",
            help="leave them out, or pass hf://ORG/NAME as OUT",
        )
    if scheme is None:
        return None
    is_hub = scheme == "hf"
    refused = [
        (
            "--resume",
            is_hub and request.resume,
            "leave it out: a result on the hub is a single commit, or nothing",
        ),
        (
            "--overwrite",
            request.overwrite and not is_hub,
            "choose another prefix",
        ),
        ("--rank and --node-local", is_shared, "write with one process, or to a shared file system"),
        ("--sparse", request.sparse, "leave it out: objects cannot have holes"),
    ]
    for option, is_given, help_ in refused:
        if is_given:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"{option} cannot be used with a destination in a store",
                file=os.fspath(out),
                help=help_,
            )
    return scheme


@contextlib.contextmanager
def open_destination(
    out: StrPath,
    job: Job,
    request: WriteRequest,
    settings: WriteSettings,
    options: Mapping[str, Any],
) -> Iterator[Destination]:
    """Open the destination of a run; at the end the result is published there, or the destination is
    unchanged.

    Args:
        out: a local directory, or an address.
        job: the run.
        request: how its result is written.
        settings: the settings of the write; changed in place for a store.
        options: the other options of the call.

    Raises:
        FastshardError: if a store cannot be written to.
    """
    scheme = find_scheme(out)
    if scheme is None:
        yield Destination(os.fspath(out))
        return
    if scheme == "hf":
        with _stage_upload(os.fspath(out), job, request, settings, options) as destination:
            yield destination
        return
    from ..stores import registry
    from ..stores.result_prefix import ResultPrefix

    store = registry.open_writable_store(
        scheme, normalise_address(out), check_settings(options.get("storage_options"))
    )
    _refuse_inside(store.address, job)
    names, pointers = job.plan.core.written_names()
    names += [MANIFEST_NAME, *(name for name, _, _ in job.copies)]
    last = _choose_last(names, pointers)
    settings["publish"] = request.to_dict() | {
        "resume": False,
        "fsync": False,
        "sparse": True,
        "io": "buffered",
    }
    at_once = _divide_memory(settings, store.address)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fastshard-") as folder:
        prefix = ResultPrefix(
            store,
            job.plan.core.digest(),
            names,
            last,
            resume=request.resume,
            unconditional="unconditional" in options.get("accept", ()),
            at_once=at_once,
        )
        try:
            path = Path(folder, _NAME)
            record_place(path, store.address)
            published = None
            if prefix.is_published:
                found = store.fetch(MANIFEST_NAME)
                published = Manifest.written("" if found is None else found[0].decode(), prefix.findings)
            yield Destination(os.fspath(path), prefix, published)
        except BaseException as error:
            _end_failed(error, prefix, store.address)
            raise
    prefix.findings += prefix.finish()


def _choose_last(names: list[str], pointers: list[str]) -> str:
    """Return the name from which readers start: Orbax's outermost marker, a pointer, or the manifest."""
    markers = [name for name in names if PurePosixPath(name).name == _COMMIT_MARKER]
    if markers:
        return min(markers, key=lambda name: name.count("/"))
    return next((name for name in reversed(pointers) if name in names), MANIFEST_NAME)


@contextlib.contextmanager
def _stage_upload(
    address: str, job: Job, request: WriteRequest, settings: WriteSettings, options: Mapping[str, Any]
) -> Iterator[Destination]:
    """Stage a result in a local folder, and upload it to the Hub as one commit at the end.

    The folder is kept if the result is complete but its upload failed.
    """
    from ..stores.hub_upload import HubUpload

    store_settings = check_settings(options.get("storage_options"))
    upload = HubUpload(
        address,
        MANIFEST_NAME,
        branch=options.get("hf_branch"),
        is_pull_request=options.get("hf_pr", False),
        overwrite=request.overwrite,
        endpoint=store_settings.get("endpoint"),
        token=store_settings.get("token"),
    )
    upload.refuse_nested([show_text(os.fspath(root)) for root in job.checkpoint.roots])
    # The folder is new; what is replaced lies on the hub.
    settings["publish"] = request.to_dict() | {"overwrite": False}
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="fastshard-"))
    path = folder / upload.name
    try:
        yield Destination(os.fspath(path), upload=upload)
        upload.publish(path)
    except BaseException as error:
        if not path.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        upload.explain_failure(error, path)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _divide_memory(settings: WriteSettings, address: str) -> int:
    """Reserve memory for uploads from a limit; return the number of parts that each upload sends at a time.

    Raises:
        FastshardError: ``FS512`` if the limit is too small for uploads.
    """
    from ..stores.result_prefix import upload_memory

    limit = memory_budget.get_limit()
    at_once = _MOST_AT_ONCE
    while at_once > 1 and upload_memory(at_once) > (limit or settings["memory"]) // _PART_OF_UPLOADS:
        at_once -= 1
    if limit is None:
        return at_once
    settings["memory"] -= upload_memory(at_once)
    needed = _core.anonymous_memory() + _LEAST_REST
    if settings["memory"] < needed:
        least = needed + upload_memory(1) + _LEAST_REST
        raise FastshardError.of(
            codes.MEMORY_BUDGET,
            "the memory budget is too small for uploads",
            file=address,
            expected=f"at least {-(-least >> 20)} MiB",
            got=f"{limit >> 20} MiB",
            help="allow more memory",
            run=[f"--memory {-(-least >> 20)}MiB"],
        )
    return at_once


def _refuse_inside(address: str, job: Job) -> None:
    """Refuse a destination below a source, because a later run would read it as a part of that source."""
    for root in job.checkpoint.roots:
        source = show_text(os.fspath(root))
        if f"{address}/".startswith(f"{source}/") or f"{source}/".startswith(f"{address}/"):
            raise FastshardError.of(
                codes.OUT_INSIDE_SOURCE,
                "the destination and the source overlap",
                file=address,
                expected=f"a prefix outside {source}",
                help="choose another destination",
            )


def _end_failed(error: BaseException, prefix: ResultPrefix, address: str) -> None:
    """Clean up after a failed run: keep files that can be resumed, and remove the others."""
    findings: list[Finding] = getattr(error, "findings", [])
    is_interrupt = not isinstance(error, FastshardError) or any(
        finding.code == codes.INTERRUPTED for finding in findings
    )
    may_continue = all(finding.is_a("resumable") for finding in findings if finding.severity == "error")
    if may_continue or is_interrupt:
        complete = prefix.leave()
        if complete or is_interrupt:
            clean = f"fastshard clean {shlex.quote(address)} --abandon {prefix.run[:16]}"
            carry(
                error,
                [
                    Finding.of(
                        codes.LEFTOVER_RUN,
                        f"the store has {len(complete)} complete files of this run, and its claim",
                        severity="warning",
                        file=address,
                        help="continue the run, or remove what it left behind",
                        run=["--resume", clean],
                    )
                ],
            )
            return
    carry(error, prefix.abandon())
