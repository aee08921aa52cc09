"""Stores by the schemes of their addresses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from ..common import codes
from ..common.errors import FastshardError
from ..common.near_words import nearest
from .store import Store, WritableStore

__all__ = ["OPENERS", "WRITERS", "is_written_to", "open_store", "open_writable_store"]

#: Makes a store from an address and options.
Opener = Callable[[str, Mapping[str, str]], Store]
#: Additional stores besides those below, by scheme.
OPENERS: dict[str, Opener] = {}
#: Makes a store to which a result is written.
Writer = Callable[[str, Mapping[str, str]], WritableStore]
#: Additional writable stores besides those below, by scheme.
WRITERS: dict[str, Writer] = {}
#: Module and opener of each store, which are imported when an address has its scheme.
_STORES = {
    **dict.fromkeys(("s3", "gs", "https", "http"), ("objects", "ObjectStore")),
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl", "wasb", "wasbs"), ("objects", "ObjectStore")),
    "hf": ("hub", "open_repository"),
}
#: Schemes that messages suggest.
_READ = ("s3", "gs", "https", "hf")
_WRITTEN = ("s3", "gs")


def open_store(scheme: str, address: str, options: Mapping[str, str]) -> Store:
    """Return the store of an address.

    Raises:
        FastshardError: ``FS514`` for an unknown scheme; otherwise as the opener of the store.
    """
    if (opener := OPENERS.get(scheme)) is not None:
        return opener(address, options)
    if scheme not in _STORES:
        near = nearest(scheme, _READ)
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"fastshard cannot read addresses of {scheme}://",
            file=address,
            expected=", ".join(f"{known}://" for known in _READ),
            help=f"did you mean {near}://" if near else "copy the checkpoint here, or mount the store",
        )
    module, name = _STORES[scheme]
    store: Store = getattr(importlib.import_module(f".{module}", __package__), name)(address, options)
    return store


def is_written_to(scheme: str) -> bool:
    """Return True for the scheme of a store to which results are written object by object."""
    return scheme in WRITERS or scheme in _WRITTEN


def open_writable_store(scheme: str, address: str, options: Mapping[str, str]) -> WritableStore:
    """Return the store for writing a result at an address.

    Raises:
        FastshardError: ``FS514`` for a scheme without a writable store; otherwise as the opener of the store.
    """
    if (writer := WRITERS.get(scheme)) is not None:
        return writer(address, options)
    if scheme not in _WRITTEN:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"fastshard cannot write results to addresses of {scheme}://",
            file=address,
            expected=", ".join(f"{known}://" for known in _WRITTEN),
            help="write the result here, then copy the directory with its fastshard.manifest.json",
        )
    from .object_writer import WritableObjectStore

    return WritableObjectStore(address, options)
