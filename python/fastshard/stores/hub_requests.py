"""Requests to the Hugging Face Hub for one model repository.

They use the session of huggingface_hub, with its headers, token, proxies and certificates. This module makes
them itself because huggingface_hub's own calls have no time limit: they wait for an answer, and for as long
as ``Retry-After`` states.

source: huggingface_hub hf_api.py (addresses and answers of the API), file_download.py (``resolve``),
    utils/_http.py (the session, ``X-Error-Code``, redirects), utils/_headers.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from .. import _core
from ..common import codes
from ..common.errors import FastshardError
from ..common.optional_imports import install
from ..common.regex import compile_when_used
from .hub_address import HubAddress, malformed
from .log_filter import filter_logs, secrets_hidden
from .store import StoredFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Result = TypeVar("Result")

__all__ = ["SHA256", "HubRequests", "http_library"]

#: Seconds for which transient errors are retried, and the minimum bytes per second of a slow connection.
_PATIENCE = 60.0
_SLOWEST = 100_000
#: Seconds without data after which a request fails, and seconds to connect.
_SILENCE = 30.0
_CONNECT = 10.0
#: Seconds before the first retry, and maximum before each, if the server does not state a delay.
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 8.0
#: Connection attempts before the first answer; if all fail, usually the name or the port is wrong.
_CONNECT_TRIES = 4
#: Maximum number of redirects of one request.
_MOST_HOPS = 10
#: Maximum numbers of files and pages of a listing, and of bytes of a page.
_MOST_FILES = 200_000
_MOST_PAGES = 10_000
_MOST_BYTES = 64 << 20
#: Maximum number of signed addresses to keep for later reads.
_MOST_KEPT = 4096
#: Status codes for an expired signed address.
_EXPIRED = (400, 401, 403, 404, 410)
#: Maximum number of bytes of an unneeded body to read so that its connection can be reused.
_MOST_UNWANTED = 64 << 10

#: Maximum size in bytes of the Hub's answer about a user.
_MOST_OF_USER = 4 << 20
#: Keys of the name and of the commit of a branch.
_REF = ("name", "targetCommit")

#: A SHA-256 in hexadecimal.
SHA256 = compile_when_used(r"[0-9a-f]{64}")
_COMMIT = compile_when_used(r"[0-9a-f]{40}")
_CONTENT_RANGE = compile_when_used(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
#: Seconds until a rate limit ends. source: draft-ietf-httpapi-ratelimit-headers
_LIMIT_ENDS = compile_when_used(r";\s*r=0\s*;\s*t=(\d+)")

_TRUE = ("1", "ON", "YES", "TRUE")
_LOG_IN = "hf auth login"


class _Retry(Exception):
    """A failure that may be transient."""

    def __init__(self, what: str, *, wait: float = 0.0, is_connecting: bool = False) -> None:
        super().__init__(what)
        self.what, self.wait, self.is_connecting = what, wait, is_connecting


class _Piece(NamedTuple):
    """A requested range of a file."""

    path: str
    file: StoredFile
    start: int
    length: int


class HubRequests:
    """Requests to the Hub for one repository: they are retried if that may help, and failures become errors.

    Texts of HTTP libraries are never repeated, because they contain signed addresses and headers.
    """

    def __init__(
        self,
        address: HubAddress,
        endpoint: str | None,
        token: str | bool | None,
        now: Callable[[], float],
        sleep: Callable[[float], object],
    ) -> None:
        _check_installed(address)
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        self._address, self._token, self._now, self._sleep = address, token, now, sleep
        is_valid = True
        try:
            validate_repo_id(address.repository)
        except HFValidationError:
            is_valid = False
        if not is_valid:
            raise malformed("the address has a name that is not valid for a repository", address.text)
        self._endpoint = _checked_endpoint(endpoint)
        self._origin = _origin_of(self._endpoint)
        self._is_encrypted = self._endpoint.startswith("https:")
        #: True once a request was answered.
        self._has_answered = False
        #: True if the address names a file.
        self.is_one_file = False
        #: Signed addresses by path; a dictionary's own operations are safe between threads.
        self._kept: dict[str, str] = {}

    # --- what is asked

    def resolve(self) -> str:
        """Return the commit of the address's revision."""
        url = self._api(f"revision/{quote(self._address.revision, safe='')}")
        answer, _ = self._ask(url, "revision")
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self.strange("the answer has no commit")
        return commit

    def look_up(self, commit: str, path: str) -> dict[str, Any]:
        """Return the Hub's listing entry for one path, a file or a folder."""
        answer, _ = self._ask(self._api(f"paths-info/{commit}"), "commit", paths=path)
        if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
            raise self.strange("the answer is not a list of files")
        for entry in answer:
            if entry.get("path") == path:
                return dict(entry)
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            f"the repository has no file or directory {path} at commit {commit}",
            file=self._address.text,
            help=f"check the spelling: {self._endpoint}/{self._address.repository}/tree/{commit}",
        )

    def list_tree(self, commit: str, folder: str, *, deep: bool = True) -> list[dict[str, Any]]:
        """List files and folders below a folder, or only directly in it, from all pages."""
        below = f"/{quote(folder)}" if folder else ""
        url: str | None = self._api(f"tree/{commit}{below}?recursive={str(deep).lower()}&expand=false")
        entries: list[dict[str, Any]] = []
        pages: set[str] = set()
        while url is not None:
            if url in pages or len(pages) >= _MOST_PAGES:
                raise self.strange("the pages of the listing do not end")
            pages.add(url)
            answer, url = self._ask(url, "commit")
            if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
                raise self.strange("the answer is not a list of files")
            entries += answer
            if len(entries) > _MOST_FILES:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    f"the repository has more than {_MOST_FILES} files and directories",
                    file=self._address.text,
                    help="pass one of its directories",
                )
        return entries

    def list_refs(self) -> dict[str, dict[str, str]]:
        """Return the commits of ``branches``, ``tags`` and ``pullRequests``, by name."""
        answer, _ = self._ask(self._api("refs?include_prs=1"), "commit")
        refs: dict[str, dict[str, str]] = {}
        for kind in ("branches", "tags", "pullRequests"):
            rows = answer.get(kind) if isinstance(answer, dict) else None
            refs[kind] = {}
            for row in rows or ():
                name, commit = (row.get(key) if isinstance(row, dict) else None for key in _REF)
                if not isinstance(name, str) or not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                    raise self.strange("the answer has a branch without a commit")
                refs[kind][name] = commit
        if not isinstance(answer, dict) or not isinstance(answer.get("branches"), list):
            raise self.strange("the answer is not a list of branches")
        return refs

    def list_commits(self, commit: str) -> list[str]:
        """Return a commit and its ancestors, newest first, as far as they are on one page."""
        answer, _ = self._ask(self._api(f"commits/{commit}"), "commit")
        found = [row.get("id") if isinstance(row, dict) else None for row in answer or ()]
        if not all(isinstance(one, str) for one in found):
            raise self.strange("the answer is not a list of commits")
        return [str(one) for one in found]

    def find_role(self) -> str | None:
        """Return the role of the token, e.g. ``read`` or ``write``; None if the Hub does not state it."""
        import json

        body = bytearray()
        # It is asked once: what the token may do is known at the latest when it is used.
        with contextlib.suppress(_Retry, ValueError, RecursionError):
            with self._request(f"{self._endpoint}/api/whoami-v2", {}) as response:
                if response.status_code != 200:
                    return None
                for part in response.iter_raw():
                    body += part
                    if len(body) > _MOST_OF_USER:
                        return None
            answer: Any = json.loads(body)
            for key in ("auth", "accessToken", "role"):
                answer = answer.get(key) if isinstance(answer, dict) else None
            return answer if isinstance(answer, str) else None
        return None

    def find_token(self) -> str | None:
        """Return this user's token; None if there is none."""
        header = self._headers(with_token=True).get("authorization", "")
        return header.removeprefix("Bearer ") or None

    @property
    def endpoint(self) -> str:
        """The address of the hub."""
        return self._endpoint

    def read_into(self, commit: str, path: str, file: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with a range of a file; after a transient error, only the remaining bytes are
        read."""
        length, done = len(buffer), 0
        deadline = self._now() + _PATIENCE + length / _SLOWEST
        named = self._named(file)

        def attempt() -> None:
            nonlocal done
            piece = _Piece(path, file, offset + done, length - done)
            with self._open_range(commit, piece) as response:
                for part in response.iter_raw():
                    if len(part) > length - done and response.status_code == 206:
                        raise self._unfit(response, file, "the answer is longer than its range")
                    taken = min(len(part), length - done)
                    buffer[done : done + taken] = part[:taken]
                    done += taken
                    if done == length and response.status_code == 200 and length < file.size:
                        # Only the start of the file is wanted. Any other answer is read to its end, since its
                        # connection is used again then.
                        return
                    if done < length and self._now() > deadline:
                        raise _Retry(f"the data arrives too slowly, {done} of {length} bytes")
            if done < length:
                raise _Retry(f"the answer ended after {done} of {length} bytes")

        self._try(attempt, deadline, named)

    # --- requests

    def _api(self, rest: str) -> str:
        return f"{self._endpoint}/api/models/{self._address.repository}/{rest}"

    def _ask(self, url: str, subject: str, paths: str | None = None) -> tuple[Any, str | None]:
        """Query the API, and return the answer and the address of the next page.

        Args:
            url: the address.
            subject: ``revision`` or ``commit``, on which the answer depends.
            paths: body of a POST request, if given.
        """
        import json

        deadline = self._now() + _PATIENCE

        def attempt() -> tuple[bytes, str | None, bool]:
            body, target = bytearray(), url
            for _ in range(_MOST_HOPS):
                with self._request(target, {}, paths) as response:
                    if response.has_redirect_location:
                        # A repository that was renamed.
                        _finish(response)
                        target = self._inside(_joined(target, response.headers["location"]))
                        continue
                    self._check_status(response, subject)
                    for part in response.iter_raw():
                        body += part
                        if len(body) > _MOST_BYTES:
                            raise self.strange(f"the answer has more than {_MOST_BYTES} bytes")
                        if self._now() > deadline:
                            raise _Retry("the answer arrives too slowly")
                    length = _stated_number(response, "content-length")
                    if length is not None and length != len(body):
                        raise _Retry(f"the answer ended after {len(body)} of {length} bytes")
                    following = response.links.get("next", {}).get("url")
                    after = self._inside(_joined(target, following)) if following else None
                    return bytes(body), after, _is_page(response)
            raise self.strange("the redirects do not end")

        body, after, is_page = self._try(attempt, deadline, self._address.text)
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(body), after
        raise self.strange("the answer is an HTML page" if is_page else "the answer is not JSON")

    def _inside(self, url: str) -> str:
        """Return an API address at this endpoint, because a mirror may return the Hub's own addresses."""
        if not _is_web(url):
            raise self.strange("the endpoint names an address that is not a web address")
        named, at = urlsplit(url), urlsplit(self._endpoint)
        if (named.scheme, named.netloc) == (at.scheme, at.netloc):
            return url
        return named._replace(
            scheme=at.scheme, netloc=at.netloc, path=at.path.rstrip("/") + named.path
        ).geturl()

    @contextlib.contextmanager
    def _open_range(self, commit: str, piece: _Piece) -> Iterator[Any]:
        """Request a range and yield the response, from the kept address if that still works."""
        headers = {"Range": f"bytes={piece.start}-{piece.start + piece.length - 1}"}
        kept = self._kept.get(piece.path)
        if kept is not None:
            is_good = False
            try:
                with self._request(kept, headers) as response:
                    if response.status_code not in _EXPIRED and not response.has_redirect_location:
                        self._check_elsewhere(response, kept, piece.file)
                        self._check_range(response, piece)
                        yield response
                        is_good = True
                        return
                    _finish(response)
            finally:
                # It has expired, or its host failed.
                if not is_good and self._kept.get(piece.path) == kept:
                    self._kept.pop(piece.path, None)
        url = f"{self._endpoint}/{self._address.repository}/resolve/{commit}/{quote(piece.path)}"
        for _ in range(_MOST_HOPS):
            is_hub = _origin_of(url) == self._origin
            with self._request(url, headers) as response:
                if is_hub:
                    self._check_commit(response, commit, piece.file)
                if response.has_redirect_location:
                    _finish(response)
                    url = self._checked_target(url, response.headers["location"])
                    continue
                if is_hub:
                    self._check_status(response, "file", piece.file)
                else:
                    self._check_elsewhere(response, url, piece.file)
                self._check_range(response, piece)
                if not is_hub:
                    if len(self._kept) >= _MOST_KEPT:
                        self._kept.clear()
                    self._kept[piece.path] = url
                yield response
                return
        raise self.strange("the redirects do not end", piece.file)

    @contextlib.contextmanager
    def _request(self, url: str, headers: dict[str, str], paths: str | None = None) -> Iterator[Any]:
        """Send a request and yield the response with an unread body; redirects are not followed.

        The token is sent only to the endpoint.
        """
        from huggingface_hub import get_session

        if _is_offline():
            raise self._offline()
        is_hub = _origin_of(url) == self._origin
        sent = {**self._headers(with_token=is_hub), "Accept-Encoding": "identity", **headers}
        library = http_library()
        filter_logs(library.__name__)
        silence = max(_SILENCE, _download_timeout())
        form: dict[str, Any] = {"data": {"paths": paths, "expand": "false"}} if paths is not None else {}
        failure: FastshardError | _Retry | None = None
        try:
            # Asked for each time: a session may be closed meanwhile.
            with (
                secrets_hidden(),
                get_session().stream(
                    "GET" if paths is None else "POST",
                    url,
                    headers=sent,
                    timeout=library.Timeout(silence, connect=_CONNECT),
                    follow_redirects=False,
                    **form,
                ) as response,
            ):
                self._has_answered = True
                yield response
        except (library.HTTPError, library.InvalidURL, RuntimeError) as error:
            failure = self._failure(library, error, url)
        except OSError:
            failure = _Retry(f"{_host(url)} cannot be reached", is_connecting=True)
        if failure is not None:
            # Outside of `except`: the error of the library would stay attached to it.
            raise failure

    def _headers(self, with_token: bool) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        token = self._token if with_token else False
        if token is None and os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
            token = False
        headers = None
        # A saved token may have to be renewed, which fails in many ways.
        with contextlib.suppress(Exception):
            headers = build_hf_headers(
                token=token, library_name="fastshard", library_version=_core.__version__
            )
        if headers is None:
            raise self._denied("this user's token cannot be read or renewed")
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise self._denied("the token has characters that are not valid in a token")
        return dict(headers)

    def _try(self, attempt: Callable[[], Result], deadline: float, named: str) -> Result:
        """Call a function that may fail until it succeeds, or until the deadline."""
        import random

        delay, tries = _FIRST_WAIT, 0
        while True:
            try:
                return attempt()
            except _Retry as error:
                failure = error
            tries += 1
            wait = max(failure.wait, delay * random.uniform(0.5, 1.0))
            is_wrong = failure.is_connecting and not self._has_answered and tries >= _CONNECT_TRIES
            if is_wrong or self._now() + wait > deadline:
                break
            self._sleep(wait)
            delay = min(2 * delay, _LONGEST_WAIT)
        asked = f"; it asks to wait for {failure.wait:.0f} seconds" if failure.wait else ""
        raise FastshardError.of(
            codes.IO,
            f"{failure.what}{asked}",
            file=named,
            got=f"{tries} tries" if tries > 1 else None,
            help="wait that long, and run the command again"
            if failure.wait
            else "check the network and HF_ENDPOINT, and run the command again later",
        )

    # --- answers

    def _check_commit(self, response: Any, commit: str, file: StoredFile) -> None:
        """Check the Hub's statements about the data: the commit, and the hash of a file in LFS."""
        stated = response.headers
        if (got := stated.get("x-repo-commit", commit)) != commit:
            raise self.changed(file, "comes from another commit", got, commit)
        size = _stated_number(response, "x-linked-size")
        if size is not None and size != file.size:
            raise self.changed(file, "has another size now", f"{size} bytes", f"{file.size} bytes")
        got = stated.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if file.sha256 and SHA256.fullmatch(got) and got != file.sha256:
            raise self.changed(file, "has other content now", f"sha256 {got}", f"sha256 {file.sha256}")

    def _checked_target(self, url: str, location: str) -> str:
        target = _joined(url, location)
        if not _is_web(target):
            raise self.strange("the endpoint names an address that is not a web address")
        if target.startswith("http:") and self._is_encrypted:
            raise self.strange("the endpoint redirects to an address without encryption")
        return target

    def _check_range(self, response: Any, piece: _Piece) -> None:
        """Check that the body is the requested range."""
        file, headers = piece.file, response.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise self._unfit(response, file, "the data is compressed, although this was not requested")
        length = _stated_number(response, "content-length")
        if response.status_code == 206:
            stated = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
            wanted = (piece.start, piece.start + piece.length - 1)
            if stated and stated[3] not in ("*", str(file.size)):
                raise self.changed(file, "has another size now", f"{stated[3]} bytes", f"{file.size} bytes")
            if not stated or (int(stated[1]), int(stated[2])) != wanted:
                raise self._unfit(response, file, "the answer has another range than the one requested")
            if length is not None and length != piece.length:
                raise self._unfit(response, file, "the answer has another length than its range")
            return
        if length == file.size and piece.start == 0:
            # The file in full, of which only the start is taken.
            return
        if _is_page(response) and length != file.size:
            raise self._unfit(response, file, "the answer is an HTML page instead of the data")
        if length is not None and length != file.size:
            raise self.changed(file, "has another size now", f"{length} bytes", f"{file.size} bytes")
        raise self._unfit(response, file, "the server ignores ranges, and would send the file from the start")

    def _check_elsewhere(self, response: Any, url: str, file: StoredFile) -> None:
        """Check the status of an answer from the server to which the endpoint redirected."""
        self._check_passing(response, url)
        if response.status_code not in (200, 206):
            raise FastshardError.of(
                codes.IO,
                f"{_host(url)}, to which the hub redirects, answers with status {response.status_code}",
                file=self._named(file),
                help="check that proxies and firewalls allow it, and check the clock of this host",
            )

    def _check_passing(self, response: Any, url: str) -> None:
        status = response.status_code
        if status in (408, 429) or (status >= 500 and status not in (501, 505)):
            after = response.headers.get("retry-after", "").strip()
            limit = _LIMIT_ENDS.search(response.headers.get("ratelimit", "")) if status == 429 else None
            wait = float(after[:9]) if after.isdecimal() else float(limit[1][:9]) if limit else 0.0
            raise _Retry(f"{_host(url)} answers with status {status}", wait=wait)

    def _check_status(self, response: Any, subject: str, file: StoredFile | None = None) -> None:
        """Check the status of an answer of the endpoint.

        Args:
            response: the answer.
            subject: the kind of object requested: ``revision``, ``commit`` or ``file``.
            file: the file, if one was requested.
        """
        self._check_passing(response, self._endpoint)
        status, reason = response.status_code, response.headers.get("x-error-code", "")
        if 200 <= status < 300:
            return
        page = f"{self._endpoint}/{self._address.repository}"
        if reason == "GatedRepo":
            raise FastshardError.of(
                codes.PERMISSION,
                "the repository is gated, and this user has no access to it",
                file=self._address.text,
                help=f"ask for access at {page}, and log in",
                run=[_LOG_IN],
            )
        if response.headers.get("x-error-message", "").startswith("Invalid credentials"):
            raise self._denied("the hub rejects the token as invalid")
        if reason == "RepoNotFound" or (status == 401 and not reason):
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                f"{_host(page)} has no repository {self._address.repository}, or it is private and this user "
                "has no access",
                file=self._address.text,
                help="check the spelling; for a private repository, log in",
                run=[_LOG_IN],
            )
        if status in (401, 403, 451):
            raise self._denied(f"the hub refuses access with status {status}")
        if subject == "revision" and status == 404:
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                f"the repository has no revision {self._address.revision}",
                file=self._address.text,
                help="check the branch, tag or commit; write slashes of a branch as %2F",
            )
        if status == 404:
            if file and reason == "EntryNotFound":
                raise self.changed(file, "is no longer in the repository")
            if reason == "EntryNotFound":
                raise FastshardError.of(
                    codes.NO_SUCH_PATH,
                    "the repository has no files at this path and commit",
                    file=self._address.text,
                    help="check the directory and the revision",
                )
            raise FastshardError.of(
                codes.SOURCE_CHANGED,
                "the commit is no longer in the repository",
                file=self._named(file) if file else self._address.text,
                help="run the command again: the revision is then resolved again",
            )
        if status == 416 and file:
            raise self.changed(file, "is shorter now")
        raise self.strange(f"the status is {status}", file)

    # --- errors

    def strange(self, what: str, file: StoredFile | None = None) -> FastshardError:
        """Make the error for an answer that is not from a Hub."""
        return FastshardError.of(
            codes.IO,
            f"{_host(self._endpoint)} does not answer as a hub: {what}",
            file=self._named(file) if file else self._address.text,
            help="check HF_ENDPOINT, and whether a proxy answers instead of the hub",
        )

    def _unfit(self, response: Any, file: StoredFile, what: str) -> FastshardError:
        return FastshardError.of(
            codes.IO,
            f"{response.url.host} does not send the requested data: {what}",
            file=self._named(file),
            help="check HF_ENDPOINT, and whether a proxy answers instead of the hub",
        )

    def changed(
        self, file: StoredFile, how: str, got: str | None = None, expected: str | None = None
    ) -> FastshardError:
        """Make the error for a file that differs from the listed one."""
        return FastshardError.of(
            codes.SOURCE_CHANGED,
            f"the file {how}",
            file=self._named(file),
            expected=expected,
            got=got,
            help="run the command again: the revision is then resolved again",
        )

    def _denied(self, what: str) -> FastshardError:
        return FastshardError.of(
            codes.PERMISSION,
            what,
            file=self._address.text,
            help="set HF_TOKEN to a token that may read the repository, or log in",
            run=[_LOG_IN],
        )

    def _offline(self) -> FastshardError:
        return FastshardError.of(
            codes.IO,
            "HF_HUB_OFFLINE is set, but the hub must be asked for the commit and its files",
            file=self._address.text,
            help="unset HF_HUB_OFFLINE, or pass the directory of a finished download",
        )

    def _named(self, file: StoredFile) -> str:
        return self._address.text if self.is_one_file else f"{self._address.text}/{file.path}"

    def _failure(self, library: Any, error: Exception, url: str) -> FastshardError | _Retry:
        """Describe a failure by the class of a library's error alone."""
        permanent = (library.InvalidURL, library.UnsupportedProtocol, library.LocalProtocolError)
        if isinstance(error, permanent):
            return self.strange(f"{type(error).__name__} for an address of {_host(url)}")
        if isinstance(error, (library.ConnectError, library.ConnectTimeout, library.ProxyError)):
            return _Retry(f"{_host(url)} cannot be reached", is_connecting=True)
        if isinstance(error, library.TimeoutException):
            return _Retry(f"{_host(url)} does not answer")
        return _Retry(f"{_host(url)} closed the connection")


def _check_installed(address: HubAddress) -> None:
    what = None
    try:
        import huggingface_hub

        if huggingface_hub.__version__.startswith("0."):
            what = f"huggingface_hub {huggingface_hub.__version__} is older than 1.0"
    except ImportError:
        what = "huggingface_hub is not installed"
    if what:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{what}, and fastshard needs it to read repositories of the hub",
            file=address.text,
            help=f"install the extra, pip install 'fastshard[cloud]', or the packages: {install('cloud')}",
        )


def _checked_endpoint(given: str | None) -> str:
    from huggingface_hub import constants

    # huggingface_hub takes it when it is imported, which may have been before it was set.
    endpoint = (given or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if not _is_web(endpoint) or "@" in endpoint or "?" in endpoint:
        raise FastshardError.of(
            codes.USAGE,
            "HF_ENDPOINT is not the address of a hub",
            expected="https://HOST, without a user or a query",
            help="set HF_ENDPOINT to the address of the hub, or unset it",
        )
    return endpoint


def _is_offline() -> bool:
    from huggingface_hub import constants

    named = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return bool(constants.HF_HUB_OFFLINE) or any(value in _TRUE for value in named)


def _download_timeout() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def http_library() -> Any:
    """Return the HTTP library of huggingface_hub: httpx, since version 2 httpx2."""
    from importlib import import_module

    from huggingface_hub.errors import HfHubHTTPError

    base = next(cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError")
    return import_module(base.__module__.partition(".")[0])


def _joined(base: str, reference: str) -> str:
    """Return the target address of a redirect or a link; the empty string for a malformed one."""
    with contextlib.suppress(ValueError):
        # The scheme in lower case, whatever the reference has.
        return urlsplit(urljoin(base, reference)).geturl()
    return ""


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _origin_of(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def _host(url: str) -> str:
    return urlsplit(url).hostname or "an unnamed host"


def _finish(response: Any) -> None:
    """Read the short body of an unneeded answer, so that its connection can be reused."""
    length = _stated_number(response, "content-length")
    if length is not None and length <= _MOST_UNWANTED:
        response.read()


def _stated_number(response: Any, header: str) -> int | None:
    """Return the number of bytes in a header; None if it states none."""
    text = response.headers.get(header, "").strip()
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def _is_page(response: Any) -> bool:
    return bool(response.headers.get("content-type", "").lower().startswith("text/html"))
