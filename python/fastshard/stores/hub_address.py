"""Addresses of model repositories on the Hugging Face Hub."""

from __future__ import annotations

from urllib.parse import unquote

from ..common import codes
from ..common.errors import FastshardError
from ..common.records import dataclass

__all__ = ["HubAddress", "malformed"]

#: source: huggingface_hub constants.py (prefixes of addresses)
_OTHER_TYPES = ("datasets", "spaces", "kernels", "buckets")
_FORM = "hf://org/name[@revision][/folder]"


@dataclass(frozen=True)
class HubAddress:
    """The parts of ``hf://org/name[@revision][/folder]``."""

    #: The address as the user gave it, without a trailing slash.
    text: str
    #: ``org/name``.
    repository: str
    #: Branch, tag or commit; ``main`` by default.
    revision: str
    #: Folder or file in the repository; empty for its root.
    path: str

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """Parse an address.

        Raises:
            FastshardError: ``FS515`` if it is malformed, ``FS514`` if it is not a model repository.
        """
        text = text.rstrip("/")
        if not text.isascii():
            # Names outside of UTF-8 have no address.
            try:
                text.encode()
            except UnicodeEncodeError:
                raise malformed("the address is not UTF-8", text) from None
        parts = text.removeprefix("hf://").split("/")
        if not text.startswith("hf://") or "@" in parts[0]:
            # What precedes the @ may be a secret, so it is not repeated.
            raise malformed(f"an address of the hub has the form {_FORM}", None)
        if parts[0] in _OTHER_TYPES:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"fastshard reads only model repositories of the hub, not {parts[0]}",
                file=text,
                help="pass the address of a model repository, hf://org/name",
            )
        if parts[0] == "models":
            parts = parts[1:]
        if len(parts) < 2:
            raise malformed("the address names no repository", text)
        organisation, (name, at, revision), folders = parts[0], parts[1].partition("@"), parts[2:]
        revision = unquote(revision) if at else "main"
        if revision == "refs" and folders:
            named = "%2F".join(("refs", *folders[:2]))
            raise malformed("slashes of a revision have to be percent-encoded", text, f"write @{named}")
        if not revision or any(ord(letter) <= 32 or ord(letter) == 127 for letter in revision):
            raise malformed("the revision is empty or contains a space", text)
        if {"", ".", ".."} & {*folders, organisation, name} or not (organisation + name).isprintable():
            raise malformed("the address has an empty part, `.` or `..` between slashes", text)
        return cls(text, f"{organisation}/{name}", revision, "/".join(folders))


def malformed(what: str, address: str | None, help: str = f"write {_FORM}") -> FastshardError:
    """Make the error for a malformed address of a repository."""
    return FastshardError.of(codes.USAGE, what, file=address, help=help)
