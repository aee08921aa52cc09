"""A prefix of S3 or Google Cloud Storage to which a result is written, with obstore.

Behaviour of obstore 0.12, each point checked by a test in ``tests/stores``:

- ``mode="create"`` is always a single PUT, whatever the size; so it is used only for small objects.
- A put from an iterator is a multipart upload that appears atomically. If the iterator raises, the upload is
aborted and the exception is propagated. - A put with a condition is not retried after its answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..common import codes
from ..common.errors import FastshardError
from .objects import DEADLINE, ObjectStore
from .store import NEW, ConditionFailed, Mark, StoredFile

__all__ = ["WritableObjectStore"]

#: Deadline in seconds for a part of an upload, including retries; parts are large.
UPLOAD_DEADLINE = 360.0
#: Permissions that the credentials of a destination need.
_RIGHTS = "list, read, put and delete objects there"


class WritableObjectStore(ObjectStore):
    """A prefix of S3 or Google Cloud Storage to which a result is written; see :class:`WritableStore`."""

    def __init__(
        self,
        address: str,
        options: Mapping[str, str] | None = None,
        *,
        deadline: float = DEADLINE,
        upload_deadline: float = UPLOAD_DEADLINE,
    ) -> None:
        """Opens an address as :class:`ObjectStore` does, without any request.

        Raises:
            FastshardError: as :class:`ObjectStore`; ``FS514`` for the address of a web server.
        """
        super().__init__(address, options, deadline=deadline)
        if self._at.is_web:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "fastshard cannot write results to web servers",
                file=self.address,
                expected="s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
                help="write the result here, then copy the directory with its fastshard.manifest.json",
            )
        self._is_file = False
        self._uploads = ObjectStore(address, options, deadline=upload_deadline)._store

    def list_objects(self) -> list[StoredFile]:
        """Lists all objects below the prefix; see :meth:`WritableStore.list_objects`."""
        found, refused = self._list_folder()
        if refused is not None:
            raise refused
        return found

    def fetch(self, path: str) -> tuple[bytes, Mark] | None:
        """Reads a small object completely; see :meth:`WritableStore.fetch`."""

        def get() -> tuple[bytes, Mark]:
            result = self._obstore.get(self._store, self._key_below(path))
            return bytes(result.bytes()), _mark(result.meta)

        try:
            fetched: tuple[bytes, Mark] = self._call(get, about=self._address_of(path))
        except FastshardError as error:
            if error.code == codes.NO_SUCH_PATH:
                return None
            raise
        return fetched

    def find(self, path: str) -> StoredFile | None:
        """Returns the record of an object; see :meth:`WritableStore.find`."""
        about = self._address_of(path)
        try:
            meta = self._call(self._obstore.head, self._store, self._key_below(path), about=about)
        except FastshardError as error:
            if error.code == codes.NO_SUCH_PATH:
                return None
            raise
        return self._as_file(meta, path, about)

    def put(self, path: str, content: bytes, condition: Mark | None = None) -> Mark:
        """Puts a small object; see :meth:`WritableStore.put`."""
        mode = "create" if condition is NEW else "overwrite" if condition is None else condition
        key = self._key_below(path)
        result = self._write(
            lambda: self._obstore.put(self._store, key, content, mode=mode, use_multipart=False), path
        )
        return _mark(result)

    def upload(self, path: str, parts: Iterator[bytes], size: int, part_size: int, at_once: int) -> None:
        """Puts a large object; see :meth:`WritableStore.upload`."""
        key = self._key_below(path)
        if size <= part_size:
            content = b"".join(parts)
            self._write(lambda: self._obstore.put(self._uploads, key, content, use_multipart=False), path)
            return
        self._write(
            lambda: self._obstore.put(
                self._uploads,
                key,
                parts,
                use_multipart=True,
                chunk_size=part_size,
                max_concurrency=at_once,
            ),
            path,
        )

    def remove(self, path: str) -> None:
        """Removes an object; see :meth:`WritableStore.remove`."""
        key = self._key_below(path)
        try:
            self._write(lambda: self._obstore.delete(self._store, key), path)
        except FastshardError as error:
            if error.code != codes.NO_SUCH_PATH:
                raise

    def _address_of(self, path: str) -> str:
        return f"{self.address}/{path}"

    def _write(self, call: Callable[[], Any], path: str) -> Any:
        """Call a function that writes, and convert exceptions of obstore into a finding about an object.

        Raises:
            ConditionFailed: the condition of a put is not met.
        """
        kinds, about = self._obstore.exceptions, self._address_of(path)
        try:
            return call()
        except FastshardError:
            raise
        except (kinds.AlreadyExistsError, kinds.PreconditionError):
            is_refused, error = True, None
        except Exception as failed:
            is_refused, error = False, self._explain(failed, about, "written", _RIGHTS)
        if is_refused or error is None:
            raise ConditionFailed(about)
        raise error


def _mark(meta: Mapping[str, Any]) -> Mark:
    """Return the mark of an object's content for obstore: an ETag for S3, a generation for Google."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
