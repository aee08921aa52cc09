"""Stores by the schemes of their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..common import codes
from ..common.errors import FastshardError
from ..common.near_words import nearest
from .store import Store

__all__ = ["OPENERS", "open_store"]

#: Makes a store of an address and of options.
Opener = Callable[[str, Mapping[str, str]], Store]
OPENERS: dict[str, Opener] = {}


def open_store(scheme: str, address: str, options: Mapping[str, str]) -> Store:
    """Return the store of an address.

    Raises:
        FastshardError: ``FS514`` for a scheme that no store here has; otherwise as the opener of the store.
    """
    opener = OPENERS.get(scheme)
    if opener is None:
        near = nearest(scheme, OPENERS)
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"no store here is read by addresses of {scheme}://",
            file=address,
            expected=", ".join(f"{known}://" for known in OPENERS) or "a path on this machine",
            help=f"did you mean {near}://" if near else "copy the checkpoint here, or mount the store",
        )
    return opener(address, options)
