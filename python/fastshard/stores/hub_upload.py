"""Publishing a result on the Hugging Face Hub, as one commit to a model repository.

The result is first written to a local folder. huggingface_hub uploads its files, which stay invisible until
the commit names them. The commit's parent is the head of the branch before the run. If the branch has moved
since, the Hub refuses the commit.

source: huggingface_hub hf_api.py (``create_commit``, ``preupload_lfs_files``), _commit_api.py, utils/_http.py
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .. import _core
from ..common import codes, json_text
from ..common.errors import FastshardError, Finding, carry, error_for
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from .hub_address import HubAddress
from .hub_requests import HubRequests, http_library
from .log_filter import filter_logs, secrets_hidden_everywhere
from .retries import TRIES, look_again
from .store import StoredFile

if TYPE_CHECKING:
    from typing import Any

    from huggingface_hub import HfApi

__all__ = ["HubUpload", "parse_target"]

#: Names of files that do not belong to a checkpoint and are kept when a result is published.
_STAYS = compile_when_used(r"(?i)\.gitattributes|(LICEN[CS]E|NOTICE).*|.*\.(md|png|jpe?g|gif|svg|webp)")
#: Maximum size in bytes of the manifest of an older result.
_MOST_OF_MANIFEST = 1 << 30
#: The attributes file of a repository, which the Hub extends itself when it receives large files.
_ATTRIBUTES = ".gitattributes"
_COMMIT = compile_when_used(r"[0-9a-f]{40}")
#: Seconds between two attempts to make a commit, and between two checks of it.
_PAUSE = 2.0
#: Seconds without data after which a request fails; the Hub may take long for a large commit.
_SILENCE = 300.0
_CONNECT = 30.0
#: Number of files that are uploaded or hashed at a time.
_AT_ONCE = 4
_CHUNK = 1 << 20
#: Maximum number of files in a command for an upload.
_MOST_NAMED = 50
#: Status codes of refusals: the Hub has made no commit, and a retry would not help.
_REFUSALS = (400, 401, 403, 404, 413, 422)

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """A failed call of huggingface_hub, with the status of the Hub's answer."""

    error: FastshardError
    status: int | None


@dataclass(frozen=True)
class _LocalFile:
    """A file of the result on this host."""

    path: Path
    size: int
    sha256: str

    def is_listed_as(self, entry: dict[str, Any]) -> bool:
        """Return True if an entry in the Hub's listing has this content."""
        lfs = entry.get("lfs")
        if isinstance(lfs, dict) and lfs:
            return bool((lfs.get("oid"), lfs.get("size")) == (self.sha256, self.size))
        return bool(entry.get("size") == self.size and entry.get("oid") == self.compute_blob_id())

    def compute_blob_id(self) -> str:
        """Compute git's object id of the content."""
        digest = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


def parse_target(address: str, branch: str | None) -> HubAddress:
    """Return the parts of a destination's address, with the branch as its revision.

    Raises:
        FastshardError: ``FS515`` for a malformed address, or for two branches; ``FS514`` if it is not a model
            repository, or not a branch.
    """
    parts = HubAddress.parse("hf" + address[2:])
    if branch is not None:
        is_named = "@" in parts.text.removeprefix("hf://").removeprefix("models/").split("/")[1]
        if is_named and parts.revision != branch:
            raise FastshardError.of(
                codes.USAGE,
                "the address and --hf-branch name different branches",
                file=parts.text,
                expected=parts.revision,
                got=branch,
                help="name the branch once",
            )
        if not branch or any(ord(letter) <= 32 or ord(letter) == 127 for letter in branch):
            raise FastshardError.of(
                codes.USAGE,
                "the branch is empty or contains a space",
                file=parts.text,
                help="name a branch",
                run=["--hf-branch BRANCH"],
            )
        parts = replace(parts, revision=branch)
    kind = "a commit" if _COMMIT.fullmatch(parts.revision) else None
    if parts.revision.startswith("refs/"):
        kind = "a reference of the hub's own"  # A pull request, or a conversion.
    if kind is not None:
        raise _not_a_branch(parts, kind)
    return parts


def _not_a_branch(parts: HubAddress, kind: str) -> FastshardError:
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"{parts.revision} is {kind}, and a result must be a commit on a branch",
        file=parts.text,
        help="name a branch after the @, or leave it out for main; --hf-pr opens a pull request",
    )


class HubUpload:
    """The upload of one result to a branch of a model repository, or to a folder in it."""

    def __init__(
        self,
        address: str,
        manifest: str,
        *,
        branch: str | None = None,
        is_pull_request: bool = False,
        overwrite: bool = False,
        endpoint: str | None = None,
        token: str | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Check whether the result can be published, and list the existing files.

        Args:
            address: ``hf://org/name[@branch][/folder]``.
            manifest: name of the manifest in a result.
            branch: the branch, if the address names none.
            is_pull_request: open a pull request instead of a commit on the branch.
            overwrite: replace an older result.
            endpoint: address of the hub; default ``HF_ENDPOINT``.
            token: default the user's.
            now: the clock for deadlines, in seconds.
            sleep: called with the seconds to wait.

        Raises:
            FastshardError: ``FS501`` if the repository is missing; ``FS502`` without a token, or with one
                without write permission; ``FS504`` if other files are there; ``FS514`` for a tag; ``FS515``
                for a malformed address; ``FS507`` if the hub does not answer.
        """
        self._parts = parse_target(address, branch)
        self._manifest = manifest
        self._is_pull_request, self._sleep = is_pull_request, sleep
        self._hub = HubRequests(self._parts, endpoint, token, now, sleep)
        #: Findings for the result.
        self.findings: list[Finding] = []
        #: The new commit.
        self._new_commit: str | None = None
        self._has_begun = False
        self._staged: Path | None = None
        if self._hub.find_token() is None:
            raise self._refuse_token("publishing on the hub needs a token, and none was found")
        refs = self._list_refs()
        self._requests_before = refs["pullRequests"]
        self._parent, self._is_new = self._find_parent(refs)
        if self._hub.find_role() == "read":
            raise self._refuse_token("this user's token can only read")
        self._folder = f"{self._parts.path}/" if self._parts.path else ""
        #: Entries of all files before the upload, by path in the repository.
        self._before = self._list_files(self._parent)
        self._removable = self._check_occupied(overwrite)

    @property
    def address(self) -> str:
        """The address as the user gave it."""
        return self._parts.text

    @property
    def name(self) -> str:
        """The name of the folder to which the result is written."""
        return (self._parts.path or self._parts.repository).rpartition("/")[2]

    def refuse_nested(self, sources: Iterable[str]) -> None:
        """Refuse a destination that contains, or is contained in, a source's folder on the same branch.

        Raises:
            FastshardError: ``FS505``.
        """
        for text in sources:
            if not text.startswith("hf://"):
                continue
            source = HubAddress.parse(text)
            one, other = f"{source.path}/".lstrip("/"), self._folder
            is_same = (source.repository, source.revision) == (self._parts.repository, self._parts.revision)
            if is_same and (one.startswith(other) or other.startswith(one)):
                raise FastshardError.of(
                    codes.OUT_INSIDE_SOURCE,
                    "the destination and the source overlap",
                    file=self.address,
                    expected=f"a directory outside {text}",
                    help="choose another directory, branch or repository",
                )

    def list_outcome(self) -> list[Finding]:
        """Return the findings about the outcome."""
        if self.findings or self._staged is None or not self._staged.is_dir():
            return self.findings
        return [self._describe_kept(self._staged)]

    # --- before the work

    def _refuse_token(self, what: str) -> FastshardError:
        return FastshardError.of(
            codes.PERMISSION,
            what,
            file=self.address,
            help="set HF_TOKEN to a token that may write to the repository, or log in",
            run=["hf auth login"],
        )

    def _list_refs(self) -> dict[str, dict[str, str]]:
        missing: FastshardError | None = None
        try:
            return self._hub.list_refs()
        except FastshardError as error:
            if error.code != codes.NO_SUCH_PATH:
                raise
            missing = FastshardError.of(
                codes.NO_SUCH_PATH,
                f"the hub has no repository {self._parts.repository}, or it is private and the token has no "
                "access",
                file=self.address,
                help="check the spelling and the token; create the repository if it does not exist",
                run=[f"hf repos create {shlex.quote(self._parts.repository)} --private"],
            )
        raise missing

    def _find_parent(self, refs: dict[str, dict[str, str]]) -> tuple[str, bool]:
        """Return the parent of the new commit, and whether the branch must be created."""
        branch = self._parts.revision
        if branch in refs["tags"]:
            raise _not_a_branch(self._parts, "a tag")
        if branch in refs["branches"]:
            return refs["branches"][branch], False
        if self._is_pull_request or "main" not in refs["branches"]:
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                f"the repository has no branch {branch}",
                file=self.address,
                expected=", ".join(sorted(refs["branches"])) or None,
                help="name a branch of the repository",
            )
        return refs["branches"]["main"], True

    def _list_files(self, commit: str) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {}
        for entry in self._hub.list_tree(commit, ""):
            if entry.get("type") == "directory":
                continue
            if not isinstance(entry.get("path"), str) or not isinstance(entry.get("oid"), str):
                raise self._hub.strange("an entry of the listing has no path or no blob")
            files[entry["path"]] = entry
        return files

    def _check_occupied(self, overwrite: bool) -> set[str]:
        """Refuse a folder with files of a checkpoint; return the files of an older result to replace."""
        path = self._parts.path
        above = {"/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 2)} - {""}
        if is_file := sorted(above & self._before.keys()):
            raise self._refuse_occupied(f"{is_file[0]} is a file", "choose another directory")
        here = {one for one in self._before if one.startswith(self._folder)}
        others = {one for one in here if not _STAYS.fullmatch(one.rpartition("/")[2])}
        if not others:
            return set()
        manifest = self._folder + self._manifest
        if not overwrite:
            help_ = "choose another repository, branch or directory"
            if manifest in here:
                help_ = "choose another repository, branch or directory, or replace the older result"
            raise self._refuse_occupied(
                _list_some(others), help_, ["--overwrite"] if manifest in here else []
            )
        help_ = "choose another repository, branch or directory: fastshard replaces only its own results"
        if manifest not in here:
            raise self._refuse_occupied(_list_some(others), help_)
        named = {self._folder + one for one in self._read_names(manifest)} | {manifest}
        if unnamed := others - named:
            raise self._refuse_occupied(
                f"{_list_some(unnamed)}, which the manifest of the older result does not name", help_
            )
        return named & here

    def _refuse_occupied(self, got: str, help_: str, run: Iterable[str] = ()) -> FastshardError:
        return FastshardError.of(
            codes.OUT_EXISTS,
            "the destination is not empty",
            file=self.address,
            expected="no files but README.md, licences, images and .gitattributes",
            got=got,
            help=help_ if help_ else None,
            run=list(run),
        )

    def _read_names(self, path: str) -> list[str]:
        """Read the names of an older result's files from its manifest."""
        entry = self._before[path]
        size = (entry.get("lfs") or entry).get("size")
        about = f"{self.address}/{self._manifest}"
        names: list[Any] = [None]
        if type(size) is int and 0 < size <= _MOST_OF_MANIFEST:
            file = StoredFile(path, size, f"{self._parent}/{entry['oid']}")
            content = bytearray(size)
            self._hub.read_into(self._parent, path, file, 0, memoryview(content))
            document = json_text.value(
                bytes(content),
                about,
                "cannot read the manifest",
                code=codes.BAD_MANIFEST,
            )
            rows = document.get("files") if isinstance(document, dict) else None
            if isinstance(rows, list) and document.get("format") == "fastshard.manifest":
                names = [row.get("name") if isinstance(row, dict) else None for row in rows]
        if not all(isinstance(name, str) for name in names):
            raise FastshardError.of(
                codes.BAD_MANIFEST,
                "not a fastshard manifest",
                file=about,
                help="choose another repository, branch or directory",
            )
        return names

    # --- the upload

    def publish(self, folder: Path) -> None:
        """Commit the files of a folder, and compare the commit with them.

        Raises:
            FastshardError: ``FS516`` if the branch has moved; ``FS517`` if the commit has other contents;
                ``FS502`` if the token lacks write permission; otherwise ``FS507``.
        """
        self._staged = folder
        with self._keep_quiet():
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

            token = self._hub.find_token()
            if token is None:
                raise self._refuse_token("this user's token no longer exists")
            api = HfApi(
                endpoint=self._hub.endpoint,
                token=token,
                library_name="fastshard",
                library_version=_core.__version__,
            )
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            additions = [
                CommitOperationAdd(self._folder + path.relative_to(folder).as_posix(), os.fspath(path))
                for path in paths
            ]
            files = _hash_files(paths, additions)
            removed = sorted(self._removable - files.keys())
            deletions = [CommitOperationDelete(path, is_folder=False) for path in removed]
            self._send_files(api, additions)
            self._has_begun = True
            if self._is_new:
                self._make_branch(api)
            try:
                commit, request = self._commit(api, [*additions, *deletions], files, removed)
            except BaseException:
                self._remove_branch(api)
                raise
        self._new_commit = commit
        self._check_commit(commit, files, removed)
        replaced = sorted(files.keys() & self._before.keys() - self._removable)
        kept = f"; it replaces {_list_some({*replaced})}" if replaced else ""
        where = f"of a pull request, {request}" if request else f"of the branch {self._parts.revision}"
        self.findings.append(
            Finding.of(
                codes.PUBLISHED,
                f"the result is one commit {where}{kept}",
                severity="note",
                file=self._name_commit(commit),
            )
        )

    def _send_files(self, api: HfApi, additions: list[Any]) -> None:
        """Upload the large files, which stay invisible until a commit names them."""

        def send() -> None:
            api.preupload_lfs_files(
                self._parts.repository,
                additions,
                # A branch that is still to be made begins at main.
                revision="main" if self._is_new else self._parts.revision,
                create_pr=self._is_pull_request,
                num_threads=_AT_ONCE,
                free_memory=False,
            )

        self._call(send)
        # The hub leaves such files out of the commit without a word.
        ignored = {one.path_in_repo for one in additions if getattr(one, "_should_ignore", False)}
        if ignored:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the repository's .gitignore excludes files of the result",
                file=self.address,
                got=_list_some(ignored),
                help="correct .gitignore, or choose another repository",
            )

    def _make_branch(self, api: HfApi) -> None:
        """Create the branch at the parent of the new commit."""
        branch = self._parts.revision
        try:
            self._call(
                lambda: api.create_branch(self._parts.repository, branch=branch, revision=self._parent)
            )
        except FastshardError:
            # The answer may be lost, or another run has just made the same branch.
            if self._hub.list_refs()["branches"].get(branch) != self._parent:
                raise

    def _remove_branch(self, api: HfApi) -> None:
        """Remove the branch that this run created for a commit that then failed."""
        if not self._is_new:
            return
        with contextlib.suppress(Exception):
            if self._hub.list_refs()["branches"].get(self._parts.revision) == self._parent:
                api.delete_branch(self._parts.repository, branch=self._parts.revision)

    def _commit(
        self, api: HfApi, operations: list[Any], files: dict[str, _LocalFile], removed: list[str]
    ) -> tuple[str, str | None]:
        """Make the commit; return it, and the address of a pull request.

        It is retried if that may help; because of its parent it cannot be made twice on a branch.
        """

        def commit() -> tuple[str, str | None]:
            info = api.create_commit(
                self._parts.repository,
                operations,
                commit_message=f"Publish a checkpoint with fastshard {_core.__version__}",
                revision=self._parts.revision,
                parent_commit=self._parent,
                create_pr=self._is_pull_request,
                num_threads=_AT_ONCE,
            )
            return info.oid, info.pr_url

        for attempt in range(TRIES):
            outcome = self._attempt(commit)
            if not isinstance(outcome, _Failure):
                return outcome
            failure = outcome
            if failure.status in _REFUSALS:
                break
            try:
                found = self._find_made(files, removed)
            except FastshardError as error:
                raise FastshardError.of(
                    codes.IO,
                    f"{failure.error.findings[0].message}, and whether it made the commit is unknown",
                    file=self.address,
                    got=error.findings[0].message,
                    help="look at the commits of the repository first",
                ) from None
            if found is not None:
                return found
            if failure.status in (409, 412):
                break
            if attempt + 1 < TRIES:
                self._sleep(_PAUSE)
        raise failure.error

    def _find_made(self, files: dict[str, _LocalFile], removed: list[str]) -> tuple[str, str | None] | None:
        """Find the commit whose answer was lost; None if the Hub has not made it."""
        refs = self._hub.list_refs()
        if self._is_pull_request:
            new = {n: c for n, c in refs["pullRequests"].items() if n not in self._requests_before}
            heads: dict[str, str | None]
            heads = {commit: self._name_request(name) for name, commit in new.items()}
        else:
            heads = dict.fromkeys([refs["branches"].get(self._parts.revision, self._parent)])
        for head, request in heads.items():
            if head == self._parent:
                continue
            commits = self._hub.list_commits(head)
            for commit, parent in itertools.pairwise(commits):
                if parent == self._parent and not self._compare(commit, files, removed):
                    return commit, request
        return None

    def _name_request(self, name: str) -> str:
        number = name.rpartition("/")[2]
        return f"{self._hub.endpoint}/{self._parts.repository}/discussions/{number}"

    # --- after the commit

    def _check_commit(self, commit: str, files: dict[str, _LocalFile], removed: list[str]) -> None:
        def compare() -> list[Finding]:
            try:
                return self._compare(commit, files, removed)
            except FastshardError as error:
                return [
                    error.findings[0].replace(
                        message=f"the commit was made, but cannot be compared: {error.findings[0].message}",
                        file=self._name_commit(commit),
                        help="compare it later",
                        run=[f"fastshard verify {shlex.quote(self._name_commit(commit))}"],
                    )
                ]

        findings = look_again(compare, lambda findings: not findings, lambda: self._sleep(_PAUSE))
        if findings:
            raise error_for(findings)

    def _compare(self, commit: str, files: dict[str, _LocalFile], removed: list[str]) -> list[Finding]:
        """Compare a commit with the local files and with the earlier files of the repository."""
        there = self._list_files(commit)
        stays = {path: entry for path, entry in self._before.items() if path not in {*files, *removed}}
        found: list[tuple[str, str]] = []
        for path in sorted({*files, *stays, *there} - {_ATTRIBUTES}):
            entry, file, old = there.get(path), files.get(path), stays.get(path)
            if entry is None:
                found.append((path, "is missing in the commit"))
            elif file is not None:
                if not file.is_listed_as(entry):
                    found.append((path, "has other content in the commit than was uploaded"))
            elif old is None:
                found.append((path, "is in the commit, but was not uploaded"))
            elif entry["oid"] != old["oid"]:
                found.append((path, "was changed by the commit, but not uploaded"))
        where = f"hf://{self._parts.repository}@{commit}"
        help_, run = (
            "revert the commit in a git clone of the repository, because it has already been made",
            commit,
        )
        if self._is_pull_request:
            help_, run = "ignore the pull request and close it, because its commit has already been made", ""
        return [
            Finding.of(
                codes.WRITTEN_DIFFERS,
                f"after publishing: the file {what}",
                file=f"{where}/{path}",
                help=help_,
                run=[f"git revert {run}"] if run else [],
            )
            for path, what in found
        ]

    def _name_commit(self, commit: str) -> str:
        return f"hf://{self._parts.repository}@{commit}/{self._folder}".rstrip("/")

    # --- failures

    def explain_failure(self, error: BaseException, folder: Path) -> None:
        """Add to an error what remains of a run: the folder with the complete result, or nothing."""
        is_complete = folder.is_dir()
        if self.findings:
            # The result was published before.
            carry(error, self.findings)
            return
        findings: list[Finding] = getattr(error, "findings", [])
        # What the core says of its own destination is no word about the hub.
        findings = [finding for finding in findings if finding.code != codes.PUBLISHED]
        if not is_complete:
            findings = [self._without_resume(finding) for finding in findings]
        elif any(finding.severity == "error" for finding in findings):
            first = next(finding for finding in findings if finding.severity == "error")
            help_ = f"{first.help or 'run the command again'}; the complete result is kept in {folder}"
            kept = first.replace(help=help_, run=[*first.run, self._make_command(folder)])
            findings = [kept if finding is first else finding for finding in findings]
        else:
            findings = [self._describe_kept(folder)]
        if isinstance(error, FastshardError):
            error.findings[:] = findings
            return
        if hasattr(error, "__notes__"):
            error.__notes__.clear()
        carry(error, findings)

    def _without_resume(self, finding: Finding) -> Finding:
        run = [line for line in finding.run if "--resume" not in line]
        if finding.code == codes.INTERRUPTED:
            help_ = "run the command again; this run left nothing behind"
            return finding.replace(file=self.address, help=help_, run=run)
        return finding.replace(run=run)

    def _describe_kept(self, folder: Path) -> Finding:
        doubt = "; the hub may already have made the commit" if self._has_begun else ""
        return Finding.of(
            codes.INTERRUPTED,
            f"stopped before the result on the hub was compared{doubt}",
            file=self._name_commit(self._new_commit) if self._new_commit else self.address,
            help=f"run the command, or remove the complete result, which is kept in {folder}"
            if not doubt
            else f"look at the commits of the repository first; the complete result is kept in {folder}",
            run=[self._make_command(folder)],
        )

    def _make_command(self, folder: Path) -> str:
        """Return the command that uploads a folder."""
        words = ["hf", "upload", self._parts.repository, os.fspath(folder), self._parts.path or "."]
        words += ["--revision", self._parts.revision]
        if self._is_pull_request:
            words.append("--create-pr")
        here = {self._folder + path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        removed = sorted(self._removable - here)
        for path in removed if len(removed) <= _MOST_NAMED else ():
            words += ["--delete", path.removeprefix(self._folder)]
        return shlex.join(words)

    @contextlib.contextmanager
    def _keep_quiet(self) -> Iterator[None]:
        """Hide huggingface_hub's progress bars and secrets, and give every request a timeout."""
        import warnings

        from huggingface_hub import get_session
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        library = http_library()
        filter_logs(library.__name__)
        session = get_session()
        timeout = session.timeout
        with warnings.catch_warnings(), secrets_hidden_everywhere():
            warnings.simplefilter("ignore")
            had_bars = not are_progress_bars_disabled()
            disable_progress_bars()
            if timeout == library.Timeout(None):
                session.timeout = library.Timeout(_SILENCE, connect=_CONNECT)
            try:
                yield
            finally:
                session.timeout = timeout
                if had_bars:
                    enable_progress_bars()

    def _call(self, function: Callable[[], T]) -> T:
        """Call huggingface_hub; raise a failure as an error of this package."""
        done = self._attempt(function)
        if isinstance(done, _Failure):
            raise done.error
        return done

    def _attempt(self, function: Callable[[], T]) -> T | _Failure:
        """Call huggingface_hub; return a failure in a description that does not repeat its text.

        An error that is raised later must not carry the library's error, which contains signed addresses.
        """
        try:
            return function()
        except Exception as error:
            return self._describe(error)

    def _describe(self, error: Exception) -> _Failure:
        """Make the error for an exception of huggingface_hub, by its class and status alone."""
        library = http_library()
        response, causes = None, []
        one: BaseException | None = error
        while one is not None and one not in causes:
            causes.append(one)
            response = getattr(one, "response", None) if response is None else response
            one = one.__cause__ or one.__context__
        status = getattr(response, "status_code", None)
        reason = "" if response is None else response.headers.get("x-error-code", "")
        if status is None:
            what = f"the upload ended with {type(causes[-1]).__name__}"
            if any(isinstance(cause, library.TimeoutException) for cause in causes):
                what = "the hub does not answer"
            elif any(isinstance(cause, (library.HTTPError, OSError)) for cause in causes):
                what = "the connection to the hub was closed"
            help_ = "check the network, and run the command again later"
            if "README.md" in str(error) and isinstance(error, ValueError):
                what, help_ = "the hub rejects the metadata of README.md", "correct the card's metadata"
            return _Failure(self._make_error(codes.IO, what, help_), None)
        code, what, help_ = _ANSWERS.get(status, (codes.IO, "the hub answers", "run again later"))
        if reason == "GatedRepo":
            what, help_ = "the repository is gated, and access was not granted", "ask for access on its page"
        return _Failure(self._make_error(code, f"{what} (status {status})", help_), status)

    def _make_error(self, code: str, what: str, help_: str) -> FastshardError:
        expected = f"{self._parts.revision} at {self._parent}" if code == codes.PUBLISH_CONFLICT else None
        return error_for([Finding.of(code, what, file=self.address, expected=expected, help=help_)])


#: Meanings of the Hub's refusals: the code, the message, and the advice.
_ANSWERS = {
    400: (codes.IO, "the hub rejects the upload", "check the repository's settings"),
    401: (codes.PERMISSION, "the hub rejects the token", "log in again with `hf auth login`"),
    403: (
        codes.PERMISSION,
        "the hub does not let this token write to the repository",
        "use a token that may write to it; create one at https://huggingface.co/settings/tokens",
    ),
    404: (codes.NO_SUCH_PATH, "the repository or the branch no longer exists", "check it on the hub"),
    409: (
        codes.PUBLISH_CONFLICT,
        "the branch moved while the result was written",
        "look at the branch, then run the command again",
    ),
    413: (codes.IO, "a file is too large for the hub", "lower --max-shard-size, and run again"),
    429: (codes.IO, "the hub limits this user's requests", "wait some minutes"),
}
_ANSWERS[412] = _ANSWERS[409]


def _hash_files(paths: list[Path], additions: list[Any]) -> dict[str, _LocalFile]:
    """Hash files, several at a time; huggingface_hub sends the same hashes to the Hub."""
    from concurrent.futures import ThreadPoolExecutor

    def hash_file(path: Path, addition: Any) -> tuple[str, _LocalFile]:
        info = addition.upload_info
        return addition.path_in_repo, _LocalFile(path, info.size, info.sha256.hex())

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(pool.map(hash_file, paths, additions))


def _list_some(paths: set[str]) -> str:
    """Name the first few files, and the number of the others."""
    first = min(paths)
    return f"{first} and {len(paths) - 1} more" if len(paths) > 1 else first
