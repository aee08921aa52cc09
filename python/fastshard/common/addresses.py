"""Addresses of stores, where a path of this host may stand."""

from __future__ import annotations

import os
import shlex

from . import codes
from .errors import FastshardError
from .options import StrPath
from .regex import compile_when_used

__all__ = ["check_local", "find_scheme", "is_address", "refuse_address"]

_ADDRESS = compile_when_used(r"^([a-z][a-z0-9+.-]*)://")


def find_scheme(path: StrPath) -> str | None:
    """Return the scheme of an address, such as ``s3``; None for a path of this host."""
    found = _ADDRESS.match(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
    return None if found is None else found[1]


def is_address(path: object) -> bool:
    """Return True for the address of a store, such as ``s3://bucket/run``."""
    return isinstance(path, str) and find_scheme(path) is not None


def check_local(path: object) -> None:
    """Refuse the address of a store where only a path of this host is read.

    Raises:
        FastshardError: ``FS514``.
    """
    if isinstance(path, str) and is_address(path):
        raise refuse_address(path)


def refuse_address(address: str, message: str = "no address of a store is read here yet") -> FastshardError:
    """Make the error for an address, with the command that downloads its content."""
    scheme, _, rest = address.partition("://")
    name = shlex.quote(rest.rstrip("/").rpartition("/")[2] or "checkpoint")
    source = shlex.quote(address)
    help_, run = "copy the checkpoint here, or mount the store", []
    if scheme == "hf":
        # hf://ORG/MODEL, or hf://models/ORG/MODEL as of some tools
        repository = "/".join(rest.removeprefix("models/").strip("/").split("/")[:2])
        folder = shlex.quote(repository.rpartition("/")[2])
        help_, run = "download it", [f"hf download {shlex.quote(repository)} --local-dir {folder}"]
    elif command := {"s3": "aws s3 sync", "gs": "gcloud storage cp -r"}.get(scheme):
        run = [f"{command} {source} {name}"]
    return FastshardError.of(
        codes.UNSUPPORTED,
        message,
        file=address,
        expected="a path on this machine",
        help=help_,
        run=run,
    )
