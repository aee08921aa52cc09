"""Addresses of object stores, which callers may pass instead of local paths."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from urllib.parse import unquote

from . import codes
from .errors import FastshardError
from .options import StrPath
from .regex import compile_when_used

__all__ = [
    "check_local",
    "check_settings",
    "find_scheme",
    "is_address",
    "make_download_command",
    "make_upload_command",
    "make_write_command",
    "normalise_address",
    "refuse_address",
]

#: Programs that copy a file from or to a store, by scheme.
_COPY_PROGRAMS = {"s3": ["aws", "s3", "cp"], "gs": ["gcloud", "storage", "cp"]}
_ADDRESS = compile_when_used(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def find_scheme(path: StrPath) -> str | None:
    """Return the scheme of an address in lower case, e.g. ``s3``; None for a local path."""
    found = _ADDRESS.match(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None
    return None if found is None else found[1].lower()


def normalise_address(path: StrPath) -> str:
    """Return an address with its scheme in lower case."""
    scheme, separator, rest = os.fspath(path).partition("://")
    return scheme.lower() + separator + rest


def is_address(path: object) -> bool:
    """Return True for the address of a store, e.g. ``s3://bucket/run``."""
    return isinstance(path, str) and find_scheme(path) is not None


def check_local(path: object) -> None:
    """Refuse the address of a store where only a local path is supported.

    Raises:
        FastshardError: ``FS514``.
    """
    if isinstance(path, str) and is_address(path):
        raise refuse_address(path)


def check_settings(settings: object) -> dict[str, str]:
    """Return the settings of stores that a caller passes as ``storage_options``.

    Raises:
        FastshardError: ``FS515`` unless they map names to strings; the message does not repeat values.
    """
    if settings is None:
        return {}
    if isinstance(settings, Mapping) and all(
        isinstance(name, str) and isinstance(value, str) for name, value in settings.items()
    ):
        return dict(settings)
    raise FastshardError.of(
        codes.USAGE,
        "storage_options",
        expected="a mapping of names to texts",
        got=type(settings).__name__,
        help='pass for example {"endpoint": "https://HOST", "region": "eu-central-1"}',
    )


def make_upload_command(source: str, address: str) -> str:
    """Return the command that copies a local file to an address."""
    scheme = address.partition("://")[0]
    if scheme == "hf":
        repository, revision, name = _split_hub_address(address)
        chosen = ["--revision", revision] if revision else []
        return shlex.join(["hf", "upload", repository, source, name, *chosen])
    return shlex.join([*_COPY_PROGRAMS.get(scheme, ["cp"]), source, address])


def _split_hub_address(address: str) -> tuple[str, str, str]:
    """Split ``hf://ORG/NAME[@REVISION]/FILE`` into repository, revision (or an empty string) and file."""
    names = address.partition("://")[2].removeprefix("models/").split("/")
    name, _, revision = names[1].partition("@")
    return f"{names[0]}/{name}", unquote(revision), "/".join(names[2:])


def make_download_command(address: str, path: str) -> str:
    """Return the command that copies a file of a store to a local path."""
    scheme = address.partition("://")[0]
    if scheme == "hf":
        repository, revision, name = _split_hub_address(address)
        chosen = ["--revision", revision] if revision else []
        # It prints the path of the file in the hub's cache.
        download = shlex.join(["hf", "download", repository, name, *chosen, "--quiet"])
        return f'cp "$({download})" {shlex.quote(path)}'
    if scheme in ("https", "http"):
        return shlex.join(["curl", "--fail", "--location", address, "--output", path])
    return shlex.join([*_COPY_PROGRAMS.get(scheme, ["cp"]), address, path])


def make_write_command(text: str, address: str) -> str:
    """Return the command that writes a text to a file of a store."""
    scheme = address.partition("://")[0]
    if scheme == "hf":
        file = address.rpartition("/")[2]
        write = f"printf %s {shlex.quote(text)} > {shlex.quote(file)}"
        return f"{write} && {make_upload_command(file, address)}"
    return f"printf %s {shlex.quote(text)} | {make_upload_command('-', address)}"


def refuse_address(
    address: str, message: str = "fastshard does not read addresses of stores here yet"
) -> FastshardError:
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
