"""The state of the stores' files at the time when the stores were opened."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ... import _core
from ...common import codes
from ...common.errors import FastshardError
from ...common.listing import File, Listing

if TYPE_CHECKING:
    import numpy as np


class Files:
    """The files that contain a checkpoint's blocks."""

    def __init__(self, listing: Listing, files: list[File]) -> None:
        self.files = files
        self._roots = [os.fspath(root) for root in listing.roots]
        # Of those on other hosts their owners look whether they are as they were.
        elsewhere = {i for i, root in enumerate(listing.roots) if _core.is_remote(root)}
        import numpy as np

        self._here = np.array([file.root not in elsewhere for file in files], dtype=bool)
        self._then = self._stamps(list(range(len(files))))

    def _path(self, file: File) -> str:
        return os.path.join(self._roots[file.root], file.path)  # noqa: PTH118 - once for every chunk

    def _stamps(self, numbers: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return size, modification time and status time of files; -1 for a missing file.

        Inodes are omitted, because they change over time on filesystems that generate them.
        """
        import numpy as np

        stamps = np.full((len(numbers), 3), -1, dtype=np.int64)
        for row, number in enumerate(numbers):
            try:
                stat = os.stat(self._path(self.files[number]))  # noqa: PTH116 - once for every chunk
            except OSError:
                continue
            stamps[row] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        return stamps

    def identity(self) -> str:
        """Hash the names, sizes and times of all files."""
        digest = hashlib.blake2b(digest_size=32)
        for file, (size, mtime, _) in zip(self.files, self._then.tolist(), strict=True):
            digest.update(os.fsencode(f"{file.path}\0{size}\0{mtime}\n"))
        return digest.hexdigest()

    def look(self, status: bool) -> None:
        """Check that the files are unchanged.

        Args:
            status: whether changes of permissions and names count too.

        Raises:
            FastshardError: ``FS506`` with the first file that changed.
        """
        import numpy as np

        here = np.flatnonzero(self._here)
        fields = 3 if status else 2
        differs = (self._stamps(here.tolist())[:, :fields] != self._then[here, :fields]).any(axis=1)
        if not differs.any():
            return
        path = Path(self._path(self.files[int(here[np.argmax(differs)])]))
        raise FastshardError.of(
            codes.SOURCE_CHANGED,
            "the file changed while it was read",
            file=str(path),
            expected="the size and the times of the first read"
            if status
            else "the size and the modification time of the first read",
            got="others" if path.exists() else "no such file",
            help="wait until nothing changes the checkpoint, then run the command again",
        )
