"""Object stores (S3, Google Cloud Storage) and single files on web servers, read with obstore.

Behaviour of obstore 0.12 (object_store 0.14), each point checked by a test in ``tests/stores``:

- It follows redirects. A redirect to another host drops the signature and a bearer token, but keeps a session
token of temporary S3 credentials, which is useless without the secret key. It keeps the query of an address
in ``Referer``, so this module refuses an address with a query that redirects. - It retries a request for a
truncated body with ``If-Match``, so that two objects are never mixed. - It does not compare the length of a
body with the range. - It refuses a partial body with status 200, as ``rclone serve s3`` sends it. - It reads
an HTML page as an empty S3 listing. - It lists the key ``a/b/`` (the marker of a folder) as if it were
``a/b``. - Explicit client options replace those of the environment (``AWS_ALLOW_HTTP``). - Its errors quote
addresses and server answers; findings must contain neither.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import unquote, urlsplit

from ..common import codes
from ..common.errors import FastshardError
from ..common.optional_imports import imported
from ..common.records import dataclass
from .store import StoredFile

__all__ = ["DEADLINE", "MOST_FILES", "ObjectStore"]

#: Maximum number of objects below one address.
MOST_FILES = 1_000_000
#: Deadline in seconds for a request, including retries.
DEADLINE = 60.0
#: Bytes of one request; larger ranges are read in several, each with its own deadline.
PIECE = 32 << 20
#: Approximate size in bytes of a part of a body; smaller parts are joined.
PART = 256 << 10
#: Maximum length in bytes of a file name on Linux.
LONGEST_NAME = 255
#: Number of parallel requests that check whether an empty object is a folder marker.
PARALLEL = 8
#: Number of attempts at a listing: obstore retries failed requests, but not truncated answers.
LISTINGS = 3

#: Client options, which obstore takes separately from store options.
CLIENT_OPTIONS = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "read_timeout",
        "timeout",
        "user_agent",
    )
)
SCHEMES = ("s3", "gs", "https", "http")
AZURE = ("az", "azure", "abfs", "abfss", "adl", "wasb", "wasbs")
#: Places from which object_store requests credentials if the environment has none.
ASKED_FOR_CREDENTIALS = re.compile(
    r"/latest/api/token|/latest/meta-data|169\.254\.1[67]\d\.\d+|computeMetadata|metadata\.google|"
    r"TokenRequest|AssumeRoleWithWebIdentity|DecodeCredentials|OpenCredentials"
)
#: Codes of S3 for a bucket in another region.
REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class _Address:
    """An address in parts."""

    scheme: str
    #: The bucket of an object store.
    bucket: str
    #: The key of a file or a folder without leading or trailing slashes; the file's name for a web server.
    key: str
    #: True if the user states that it is a folder.
    is_folder: bool
    #: The address for messages.
    shown: str
    #: The address for a web server, with its query.
    full: str = ""

    @property
    def is_web(self) -> bool:
        return self.scheme in ("https", "http")

    @property
    def service(self) -> str:
        """The name of the store in messages."""
        return {"s3": "S3", "gs": "Google Cloud Storage"}.get(self.scheme, "the server")


class ObjectStore:
    """Reads a folder or a file of S3 or Google Cloud Storage, or one file of a web server.

    Addresses are ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX`` and ``https://HOST/PATH``. Credentials,
    region and endpoint are those of the environment (``AWS_ACCESS_KEY_ID``, ``AWS_REGION``,
    ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ...) and of instance roles; profiles of
    ``~/.aws`` are not read.
    """

    def __init__(
        self, address: str, options: Mapping[str, str] | None = None, *, deadline: float = DEADLINE
    ) -> None:
        """Opens an address without any request.

        Args:
            address: the address; one with a user name or a password is refused.
            options: options of obstore (``region``, ``endpoint``, ``skip_signature``, ``allow_http``, ...);
                they take precedence over the environment.
            deadline: deadline in seconds for each request, including retries.

        Raises:
            FastshardError: ``FS514`` for an address of another kind, or without obstore; ``FS515`` for an
                address or an option that is not valid.
        """
        self._at = _parse(address)
        self._deadline = deadline
        if sys.version_info < (3, 11):
            raise _error(
                codes.UNSUPPORTED,
                f"reading {self._at.scheme}:// addresses needs obstore, which needs Python 3.11",
                help="run fastshard with Python 3.11 or newer",
            )
        self._obstore = imported(
            "obstore", "obstore.store", purpose=f"reading {self._at.scheme}:// addresses", extra="cloud"
        )
        self._store = self._open(dict(options or {}))
        self._lock = threading.Lock()
        #: Whether the address names one file; None until the store was queried.
        self._is_file: bool | None = True if self._at.is_web else False if self._at.is_folder else None
        self._is_query_safe = "?" not in self._at.full

    def __repr__(self) -> str:
        return f"ObjectStore({self._at.shown!r})"

    @property
    def address(self) -> str:
        """The address for messages, without credentials and without a query."""
        return self._at.shown

    @property
    def revision(self) -> str | None:
        """Always None, because these stores have no commits."""
        return None

    def list_files(self) -> list[StoredFile]:
        """Lists all files below the root, sorted by path; see :meth:`Store.list_files`."""
        if self._at.is_web:
            return [self._find_web_file()]
        alone, denied = self._find_file()
        found, refused = self._list_folder()
        if refused is not None and alone is None:
            raise refused
        if alone is not None and found and alone.size:
            raise _error(
                codes.UNSUPPORTED,
                "is both a file and a directory",
                file=self.address,
                help="choose one: end the address with / for the directory",
            )
        self._is_file = alone is not None and not found
        if self._is_file and alone is not None:
            return [alone]
        if found:
            return found
        raise denied or self._missing()

    def list_children(self) -> list[StoredFile]:
        """Lists the files in the root itself; see :meth:`Store.list_children`."""
        if self._at.is_web:
            return []
        self._is_file = False
        found = self._call(
            self._obstore.list_with_delimiter, self._store, self._at.key or None, about=self.address
        )
        skipped = len(self._at.key) + 1 if self._at.key else 0
        # An empty object may be the marker of a folder.
        objects = {meta["path"][skipped:]: meta for meta in found["objects"] if meta["size"]}
        return [
            self._as_file(objects[path], path, f"{self.address}/{path}")
            for path in sorted(objects)
            if "/" not in path and _refuse_path(path) is None
        ]

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes of a file from ``offset``; see :meth:`Store.read_into`.

        Raises:
            ValueError: the range is not inside the listed size of the file.
        """
        if offset < 0 or offset + len(buffer) > file.size:
            raise ValueError(f"bytes {offset} to {offset + len(buffer)} of a file of {file.size} bytes")
        for at in range(0, len(buffer), PIECE):
            self._read_piece(file, offset + at, buffer[at : at + PIECE])

    # --- obstore

    def _open(self, options: dict[str, str]) -> Any:
        """Make obstore's store from the environment and options."""
        timeout = timedelta(seconds=self._deadline / 3)
        client: dict[str, Any] = {
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=5)),
        }
        if self._at.scheme == "http":
            client["allow_http"] = True
        if self._at.scheme == "s3" and "AWS_ALLOW_HTTP" in os.environ:
            client["allow_http"] = os.environ["AWS_ALLOW_HTTP"]
        config: dict[str, str] = {}
        for name, value in options.items():
            short = re.sub(r"^(aws|google)_", "", name.lower())
            if short in CLIENT_OPTIONS:
                client[short] = value
            elif short in ("bucket", "bucket_name") and value == self._at.bucket:
                # The settings of a store of obstore name it too.
                continue
            elif self._at.is_web or short in ("bucket", "bucket_name"):
                raise _error(
                    codes.USAGE,
                    f"storage option {name!a} does not apply to {self._at.scheme}:// addresses",
                    help="leave it out",
                )
            else:
                config[name.lower()] = value
        self._allows_http = str(client.get("allow_http", "")).lower() in ("true", "1", "on", "yes", "y")
        # A request begins before 7/12 of the deadline, waits 1/12, and takes 1/3.
        retry = {
            "max_retries": 10,
            "retry_timeout": timedelta(seconds=self._deadline * 7 / 12),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=self._deadline / 12),
                "base": 2,
            },
        }
        failed: Exception
        try:
            if self._at.is_web:
                return self._obstore.store.HTTPStore(self._at.full, client_options=client, retry_config=retry)
            kind = self._obstore.store.S3Store if self._at.scheme == "s3" else self._obstore.store.GCSStore
            return kind(self._at.bucket, config=config, client_options=client, retry_config=retry)
        except Exception as error:
            failed = error
        raise self._invalid_options(failed, options)

    def _invalid_options(self, error: Exception, options: Mapping[str, str]) -> FastshardError:
        """Return the error for options or an environment that obstore does not accept, without values."""
        named = re.search(r"key: '?(\w+)", str(error))
        known = {name.lower(): name for name in options}
        if named and named[1] in known:
            what = f"storage option {known[named[1]]!a} is unknown"
        elif options:
            what = f"one of the storage options is not valid: {', '.join(sorted(map(ascii, options)))}"
        else:
            what = f"the environment's settings for {self._at.service} are not valid"
        return _error(
            codes.USAGE,
            what,
            file=self.address,
            help="check the spelling of names and values: they are those of obstore",
        )

    def _call(self, function: Any, *args: Any, about: str, **kwargs: Any) -> Any:
        """Call a function of obstore, and convert its exceptions into a finding about an address.

        The error has no context: obstore's texts quote addresses and answers.
        """
        try:
            return function(*args, **kwargs)
        except FastshardError:
            raise
        except Exception as error:
            failed = self._explain(error, about)
        raise failed

    # --- finding files

    def _find_file(self) -> tuple[StoredFile | None, FastshardError | None]:
        """Return the file that the address names, or the error if the store denies access to it."""
        if self._is_file is False:
            return None, None
        try:
            meta = self._call(self._obstore.head, self._store, self._at.key, about=self.address)
        except FastshardError as error:
            if error.code == codes.NO_SUCH_PATH:
                return None, None
            if error.got is not None and error.got.startswith(("status 403", "status 400")):
                # Without the right to list, S3 answers 403 for a missing object too. Answers to HEAD have no
                # body, so that of the list explains 400 better.
                return None, error
            raise
        name = self._at.key.rpartition("/")[2]
        return self._as_file(meta, name, self.address), None

    def _list_folder(self) -> tuple[list[StoredFile], FastshardError | None]:
        """Return the files of the folder that the address names, or the error if listing is not permitted."""
        try:
            metas = self._list_objects()
        except FastshardError as error:
            if error.code == codes.PERMISSION:
                return [], error
            raise
        objects: dict[str, dict[str, Any]] = {}
        for meta in metas:
            if meta["path"] == self._at.key and not meta["size"]:
                # The marker of the root.
                continue
            path = self._path_of(meta["path"])
            other = objects.get(path)
            if other is not None and other["size"] and meta["size"]:
                raise self._unusable(meta["path"], "two objects have this name, one with a slash at the end")
            if other is None or meta["size"]:
                objects[path] = meta
        folders = {path[:at] for path in objects for at, character in enumerate(path) if character == "/"}
        markers = self._find_markers([path for path, meta in objects.items() if not meta["size"]], folders)
        for path, meta in objects.items():
            if path in folders and path not in markers:
                raise self._unusable(meta["path"], "it is both a file and a directory")
        return [
            self._as_file(objects[path], path, f"{self.address}/{path}")
            for path in sorted(objects)
            if path not in markers
        ], None

    def _list_objects(self) -> list[dict[str, Any]]:
        """Return obstore's listing below the root; a truncated listing is restarted."""

        def collect() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            for page in self._obstore.list(self._store, self._at.key or None, chunk_size=1000):
                found += page
                if len(found) > MOST_FILES:
                    raise _error(
                        codes.UNSUPPORTED,
                        f"has more than {MOST_FILES} objects",
                        file=self.address,
                        expected=f"at most {MOST_FILES}",
                        help="name a narrower prefix: the directory of one checkpoint",
                    )
            return found

        left = LISTINGS
        while True:
            left -= 1
            try:
                return collect()
            except FastshardError:
                raise
            except Exception as error:
                if left and "ListResponseBody" in str(error):
                    continue
                failed = self._explain(error, self.address)
            raise failed

    def _path_of(self, key: str) -> str:
        """Return the path below the root for a key.

        Raises:
            FastshardError: ``FS514`` if it is not a possible path of a local file.
        """
        path = key[len(self._at.key) + 1 :] if self._at.key else key
        reason = _refuse_path(path)
        if reason is not None:
            raise self._unusable(key, reason)
        return path

    def _find_markers(self, empty: list[str], folders: set[str]) -> set[str]:
        """Return the empty objects that are folder markers: their keys end in a slash that is not listed."""
        markers = {path for path in empty if path in folders}
        others = [path for path in empty if path not in folders]

        def is_marker(path: str) -> bool:
            try:
                self._call(self._obstore.head, self._store, self._key_below(path), about=self.address)
            except FastshardError as error:
                if error.code == codes.NO_SUCH_PATH:
                    return True
                raise
            return False

        if others:
            with ThreadPoolExecutor(PARALLEL) as pool:
                markers |= {
                    path for path, marks in zip(others, pool.map(is_marker, others), strict=True) if marks
                }
        return markers

    def _find_web_file(self) -> StoredFile:
        """Return the file of a web server. One byte is read, because some addresses are signed only for
        reading."""
        self._refuse_redirect()

        def ask() -> tuple[dict[str, Any], str]:
            result = self._obstore.get(self._store, "", options={"range": (0, 1)})
            kind = str(result.attributes.get("Content-Type", ""))
            result.bytes()
            return result.meta, kind

        try:
            meta, kind = self._call(ask, about=self.address)
        except FastshardError as error:
            if error.got != "status 416":
                raise
            # An empty file has no first byte.
            meta, kind = self._call(self._obstore.head, self._store, "", about=self.address), ""
        if kind.startswith("text/html") and not self._at.key.endswith((".html", ".htm")):
            raise _error(
                codes.IO,
                "is a web page, not data",
                file=self.address,
                expected="a file",
                got="text/html",
                help="check the address in a browser: pass the address of the file itself",
            )
        return self._as_file(meta, self._at.key, self.address)

    def _refuse_redirect(self) -> None:
        """Refuse an address with a query that redirects, because the query, often a signature, would be
        passed on."""
        if self._is_query_safe:
            return
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        class Stay(HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None

        request = Request(self._at.full, headers={"Range": "bytes=0-0"})
        status = 0
        try:
            build_opener(Stay()).open(request, timeout=self._deadline / 3).close()
        except HTTPError as error:
            status = error.code
            error.close()
        except (OSError, HTTPException):
            # The next request finds out, and is repeated.
            return
        if 300 <= status < 400:
            raise _error(
                codes.UNSUPPORTED,
                "redirects, and the query of the address would be sent to another server",
                file=self.address,
                got=f"status {status}",
                help="pass the address that it redirects to, or leave out the query",
            )
        self._is_query_safe = True

    def _as_file(self, meta: dict[str, Any], path: str, address: str) -> StoredFile:
        """Make the record of a file from obstore's description of an object."""
        return StoredFile(
            path=path,
            size=int(meta["size"]),
            identity=self._identify(meta, address),
            modified_ns=_nanoseconds(meta["last_modified"]),
        )

    def _identify(self, meta: dict[str, Any], address: str) -> str:
        """Return the mark of an object's content.

        Listings of Google Cloud Storage through obstore have ETags and no generations.
        """
        if meta["e_tag"]:
            # Lists of some servers (rclone) have it without quotes.
            tag = str(meta["e_tag"])
            return tag if tag.endswith('"') else f'"{tag}"'
        if _nanoseconds(meta["last_modified"]):
            return f"modified {meta['last_modified'].isoformat()}"
        raise _error(
            codes.UNSUPPORTED,
            "has neither an ETag nor a modification time, so a replaced file would go unnoticed",
            file=address,
            help="copy the file, and pass the copy",
        )

    # --- reading

    def _key_below(self, path: str) -> str:
        return f"{self._at.key}/{path}" if self._at.key else path

    def _key_of(self, file: StoredFile) -> str:
        """Return the key of a file that this or another process listed."""
        if self._at.is_web:
            self._refuse_redirect()
            return ""
        if self._is_file is None and file.path != self._at.key.rpartition("/")[2]:
            self._is_file = False
        if self._is_file is None:
            with self._lock:
                if self._is_file is None:
                    alone, denied = self._find_file()
                    if denied is not None:
                        raise denied
                    self._is_file = alone is not None
        return self._at.key if self._is_file else self._key_below(file.path)

    def _read_piece(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        key, length = self._key_of(file), len(buffer)
        about = self.address if key in ("", self._at.key) else f"{self.address}/{file.path}"
        options: dict[str, Any] = {"range": (offset, offset + length)}
        if file.identity.startswith("modified "):
            options["if_unmodified_since"] = datetime.fromisoformat(file.identity.removeprefix("modified "))
        elif not file.identity.startswith("W/"):
            # A weak ETag never matches: it is compared below.
            options["if_match"] = file.identity

        def get() -> int:
            result = self._obstore.get(self._store, key, options=options)
            meta = result.meta
            if self._identify(meta, about) != file.identity or meta["size"] != file.size:
                # Not every server knows conditions.
                raise self._changed(about, file, f"{meta['size']} bytes, {self._identify(meta, about)}")
            # In parts, as they come: the complete body would be copied once more.
            count = 0
            for part in result.stream(min_chunk_size=PART):
                if count + len(part) <= length:
                    buffer[count : count + len(part)] = part
                count += len(part)
            return count

        try:
            count = self._call(get, about=about)
        except FastshardError as error:
            if error.code == codes.NO_SUCH_PATH or error.got in ("status 412", "status 416"):
                changed = self._changed(about, file, error.got or "status 404")
            else:
                raise
        else:
            if count == length:
                return
            raise _error(
                codes.IO,
                "has another length than requested",
                file=about,
                expected=f"{length} bytes from {offset}",
                got=f"{count} bytes",
                help="check the server, and any proxy in front of it",
            )
        raise changed

    # --- errors

    def _changed(self, about: str, file: StoredFile, got: str) -> FastshardError:
        return _error(
            codes.SOURCE_CHANGED,
            "is no longer the file that was listed",
            file=about,
            help="wait until the save has finished, and run the command again",
            expected=f"{file.size} bytes, {file.identity}",
            got=got,
        )

    def _missing(self) -> FastshardError:
        return _error(
            codes.NO_SUCH_PATH,
            "has no files",
            file=self.address,
            help="check the bucket, the prefix and the endpoint",
        )

    def _unusable(self, key: str, reason: str) -> FastshardError:
        return _error(
            codes.UNSUPPORTED,
            f"key {key!a} cannot be a file name here: {reason}",
            file=self.address,
            help="rename the object, or name a narrower prefix",
        )

    def _explain(
        self, error: Exception, about: str, done: str = "read", rights: str = "list and read it"
    ) -> FastshardError:
        """Return the finding for an exception of obstore, with only the numbers and codes from its text.

        Args:
            error: the exception of obstore.
            about: the address of the object.
            done: the failed action: ``read`` or ``written``.
            rights: permissions that the credentials need.
        """
        text = str(error)
        kinds = self._obstore.exceptions
        at = self._at
        status = _number(r"status code: (\d{3})", text)
        code = _word(r"<Code>(\w{1,64})</Code>", text)
        got = None if status is None else f"status {status}" + (f" ({code})" if code else "")

        def of(which: str, message: str, help: str, **fields: Any) -> FastshardError:
            return _error(which, message, file=about, help=help, **fields)

        if isinstance(error, FileNotFoundError):
            return of(codes.NO_SUCH_PATH, "does not exist", "check the bucket and the path", got="status 404")
        if isinstance(error, kinds.InvalidPathError):
            return self._unusable(
                _quoted_path(text), "a part of it is empty, . or .., or has a control character"
            )
        if isinstance(error, kinds.PreconditionError):
            return of(codes.SOURCE_CHANGED, "changed", "run the command again", got="status 412")
        if ASKED_FOR_CREDENTIALS.search(text):
            return of(
                codes.PERMISSION,
                f"needs credentials for {at.service}, and none were found",
                self._credentials_help(),
                expected="credentials in the environment, or the role of an instance",
            )
        if at.scheme == "s3" and (
            "without LOCATION" in text or status == 301 or code in REGION_CODES or "BareRedirect" in text
        ):
            region = _word(r"<Region>([a-z0-9-]{1,32})</Region>", text) or _word(
                r"expecting '([a-z0-9-]{1,32})'", text
            )
            return of(
                codes.PERMISSION,
                "is in another region than the one requested",
                f"set AWS_REGION={region}" if region else "set AWS_REGION to the region of the bucket",
                got=got,
                expected=region,
            )
        if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)) or status in (
            401,
            403,
        ):
            return of(
                codes.PERMISSION,
                f"is refused by {at.service}",
                f"check that these credentials may {rights}"
                if not at.is_web
                else "check the address: a signed address may have expired",
                got=got or "no permission to read",
            )
        if status == 404:
            what = "does not exist" if code != "NoSuchBucket" else "is in a bucket that does not exist"
            return of(codes.NO_SUCH_PATH, what, "check the bucket and the path", got=got)
        if status in (412, 416):
            return of(codes.IO, "has no such range", "run the command again", got=f"status {status}")
        if status is not None and 300 <= status < 400:
            return of(
                codes.IO,
                "redirects to an address that fastshard does not follow",
                "pass the address that it redirects to",
                got=got,
            )
        if status is not None:
            help = (
                "wait, and run the command again"
                if status >= 500 or status == 429
                else "check the address and the endpoint"
            )
            return of(codes.IO, f"cannot be {done}: {at.service} reports an error", help, got=got)
        if "NotPartial" in text or isinstance(error, kinds.NotSupportedError):
            return of(
                codes.IO,
                "was sent with status 200, as a complete file or a page, although a range was requested",
                "check the address; fastshard cannot read from a server or proxy that ignores ranges, so "
                "copy the file",
                expected="a range of bytes (status 206)",
                got="status 200",
            )
        between = re.search(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text)
        if between:
            first, last, other_first, other_last = between.groups()
            return of(
                codes.IO,
                "was sent with another range than the one requested",
                "check the server, and any proxy in front of it",
                expected=f"bytes {first} to {last}",
                got=f"bytes {other_first} to {other_last}",
            )
        if "BadScheme" in text and (self._allows_http or not re.search(r"performing [A-Z]+ http://", text)):
            return of(
                codes.IO,
                "redirects to an address that fastshard does not follow",
                "pass the address that it redirects to",
            )
        if "BadScheme" in text:
            return of(
                codes.USAGE,
                "would be read over http://, which is not encrypted",
                "set AWS_ALLOW_HTTP=true (storage option allow_http=true) for a host that you trust",
            )
        if "kind: Timeout" in text or "TimedOut" in text:
            return of(
                codes.IO,
                f"did not arrive within {self._deadline:g} seconds",
                "check the network and the endpoint, and run the command again",
            )
        if "kind: Connect," in text:
            return of(
                codes.IO,
                "cannot be reached: no connection to the server",
                "check the endpoint, the network and its proxy",
            )
        if "InvalidListResponse" in text:
            return of(
                codes.IO,
                f"has no list of files: the answer is not from {at.service}",
                "check the endpoint: the answer may be the page of a proxy",
            )
        if "kind: Interrupted" in text or "response body error" in text:
            return of(
                codes.IO,
                f"was interrupted while it was {done}, each time",
                "check the network, and run the command again",
            )
        kind = _word(r"kind: (\w{1,32})", text) or type(error).__name__
        where = "read from" if done == "read" else "written to"
        return of(
            codes.IO,
            f"cannot be {where} {at.service}",
            "check the network and run the command again",
            got=kind,
        )

    def _credentials_help(self) -> str:
        if self._at.scheme == "gs":
            return "set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket pass skip_signature=true"
        if "AWS_PROFILE" in os.environ:
            return (
                "run `aws configure export-credentials --format env` and set the variables that it prints: "
                "fastshard does not read profiles (AWS_PROFILE)"
            )
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket AWS_SKIP_SIGNATURE=true"


def _error(code: str, message: str, **fields: Any) -> FastshardError:
    """Make an error, without fields that are None."""
    return FastshardError.of(
        code, message, **{name: value for name, value in fields.items() if value is not None}
    )


def _parse(address: str) -> _Address:
    """Split an address into its parts.

    Raises:
        FastshardError: it is not one of these stores, or it contains credentials.
    """
    scheme, separator, rest = address.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise _error(codes.USAGE, "the address has no scheme", expected=_SHOWN, help=f"pass {_SHOWN}")
    if scheme in AZURE:
        raise _error(
            codes.UNSUPPORTED,
            f"{scheme}:// addresses are not supported: reading from Azure is not tested",
            help="copy the checkpoint to this host, S3 or Google Cloud Storage",
        )
    if scheme not in SCHEMES:
        raise _error(codes.UNSUPPORTED, f"{scheme!a} addresses are not supported", help=f"pass {_SHOWN}")
    return _parse_web(scheme, address) if scheme in ("https", "http") else _parse_bucket(scheme, rest)


_SHOWN = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or https://HOST/FILE"


def _parse_bucket(scheme: str, rest: str) -> _Address:
    bucket, _, key = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", bucket):
        # It is not shown: before an @ stand credentials.
        raise _error(
            codes.USAGE,
            f"the {scheme}:// address has no valid bucket name",
            expected=f"{scheme}://BUCKET/PREFIX",
            help="pass credentials in the environment, and the endpoint in AWS_ENDPOINT_URL",
        )
    is_folder = not key or key.endswith("/")
    key = key.rstrip("/")
    reason = _refuse_path(key) if key else None
    if reason is not None:
        raise _error(
            codes.USAGE,
            f"{f'{scheme}://{bucket}/{key}'!a} is not valid: {reason}",
            help="correct the path",
        )
    return _Address(scheme, bucket, key, is_folder, f"{scheme}://{bucket}/{key}".rstrip("/"))


def _parse_web(scheme: str, address: str) -> _Address:
    try:
        split = urlsplit(address)
        host, _ = split.hostname, split.port
    except ValueError:
        split, host = None, None
    if split is None or not host:
        raise _error(codes.USAGE, f"the {scheme}:// address is not valid", help=f"pass {scheme}://HOST/FILE")
    if "@" in split.netloc:
        raise _error(
            codes.USAGE,
            f"the {scheme}:// address of {host!a} contains a user name or a password",
            help="pass an address without them: fastshard does not support them",
        )
    shown = f"{scheme}://{split.netloc}{split.path}"
    name = unquote(split.path.rpartition("/")[2])
    reason = _refuse_path(name) if "/" not in name else "it has a slash"
    if reason is not None:
        raise _error(
            codes.USAGE,
            f"{shown!a} does not name a file: {reason}",
            help="pass the address of one file; directories of web servers cannot be listed",
        )
    full = shown + (f"?{split.query}" if split.query else "")
    return _Address(scheme, "", name, False, shown, full)


def _refuse_path(path: str) -> str | None:
    """Return why a path is impossible for a local file; None if it is possible."""
    if "\0" in path:
        return "it has a NUL"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "a part of it is empty" if not part else f"a part of it is {part}"
        if len(part.encode("utf-8", "surrogatepass")) > LONGEST_NAME:
            return f"a part of it has more than {LONGEST_NAME} bytes"
    return None


def _quoted_path(text: str) -> str:
    """Return the key quoted in obstore's error about an invalid path."""
    found = re.search(r'^\s+path: "((?:[^"\\\n]|\\.)*)"', text, re.M)
    if found is None:
        return "?"
    plain = re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: chr(int(match[1], 16)), found[1])
    escapes = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[1]), plain)


def _nanoseconds(time: datetime) -> int:
    """Return a time in nanoseconds since 1970; obstore returns 0 if the server states none."""
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def _word(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _number(pattern: str, text: str) -> int | None:
    word = _word(pattern, text)
    return int(word) if word else None
