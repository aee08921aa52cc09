"""Settings of a project, which decide which findings count as errors: from ``fastshard.toml``, or
``[tool.fastshard]`` in a pyproject.toml.

Settings contain no paths or programs. They are read from the working directory or a folder above it, up to
the root of its repository. They are never read from a checkpoint or a result, whose author must not decide
how it is checked.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common import codes, safe_files, toml_text
from ..common.byte_sizes import parse_size
from ..common.errors import FastshardError
from ..common.near_words import meant
from ..common.options import Gating, table
from ..common.thread_counts import MAX_THREADS

__all__ = ["apply", "apply_environment", "checked", "find"]

#: Maximum size of a settings file in bytes.
_LARGEST = 1 << 20
_NAMES = ("fastshard.toml", "pyproject.toml")


def find(start: Path, untrusted: Iterable[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Find the nearest file with settings, in ``start`` or above, up to the repository's root.

    The result has the path and the settings.

    Args:
        start: the working directory.
        untrusted: checkpoints and results; the function reads no file there or below.
    """
    refused = [folder for path in untrusted for folder in _folders(path)]
    here = start.resolve()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    for folder in (here, *here.parents):
        if not any(folder == path or folder.is_relative_to(path) for path in refused):
            for name in _NAMES:
                path = folder / name
                if path.is_file() and (section := _section(path)) is not None:
                    return path, section
        if folder == root:
            return None
    return None


def checked(path: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Check the settings of a file and return them by the names of options.

    Raises:
        FastshardError: ``FS515`` for an unknown key or value.
    """
    known = table(Gating)
    settings: dict[str, Any] = {}
    for key, value in section.items():
        name = key.replace("-", "_")
        if name not in known:
            raise _wrong(path, f"there is no setting {key}{meant(name, known)}", ", ".join(known))
        if name == "fail_on":
            if value not in known[name].choices:
                raise _wrong(path, key, " or ".join(known[name].choices), repr(value))
        elif not (isinstance(value, list) and all(isinstance(code, str) for code in value)):
            raise _wrong(path, key, 'a list of codes, e.g. ["FS108"]', repr(value))
        settings[name] = value
    return settings


#: Environment variables with default options for a machine.
ENVIRONMENT = {
    "memory": "FASTSHARD_MEMORY",
    "threads": "FASTSHARD_THREADS",
    "progress": "FASTSHARD_PROGRESS",
}
_PROGRESS = ("auto", "plain", "none")


def apply_environment(arguments: Namespace) -> None:
    """Add the options from environment variables; options on the command line take precedence.

    Raises:
        FastshardError: ``FS515`` for an invalid value of an option.
    """
    for name, variable in ENVIRONMENT.items():
        value = os.environ.get(variable, "")
        if not value or getattr(arguments, name, "other") is not None:
            continue
        if name == "threads":
            if not (value.isascii() and value.isdecimal()) or not 0 < int(value) <= MAX_THREADS:
                raise _refuse_variable(variable, f"a number from 1 to {MAX_THREADS}", value)
            arguments.threads = int(value)
        elif name == "memory":
            try:
                parse_size(value, name)
            except FastshardError:
                raise _refuse_variable(variable, "a size, e.g. 4GiB", value) from None
            arguments.memory = value
        elif value not in _PROGRESS:
            raise _refuse_variable(variable, " or ".join(_PROGRESS), value)
        else:
            arguments.progress = value
    if getattr(arguments, "progress", "other") is None:
        arguments.progress = "auto"


def _refuse_variable(variable: str, expected: str, got: str) -> FastshardError:
    return FastshardError.of(
        codes.USAGE,
        f"the environment variable {variable}",
        expected=expected,
        got=repr(got),
        help=f"correct {variable}, or unset it",
    )


def apply(arguments: Namespace) -> Path | None:
    """Add settings to the arguments of a command whose findings decide its exit code; return the settings
    file.

    ``--fail-on`` on the command line takes precedence; codes from both apply.

    Raises:
        FastshardError: ``FS515`` for an invalid file.
    """
    if not hasattr(arguments, "fail_on") or getattr(arguments, "no_settings", False):
        return None
    found = find(Path.cwd(), _untrusted(arguments))
    if found is None:
        return None
    path, settings = found[0], checked(*found)
    if arguments.fail_on is None:
        arguments.fail_on = settings.get("fail_on")
    arguments.error = [*settings.get("error", ()), *arguments.error]
    # What one asks to see is not put aside.
    requested = {code.upper().removeprefix("FS") for code in arguments.error}
    aside = [code for code in settings.get("ignore", ()) if code.upper().removeprefix("FS") not in requested]
    arguments.ignore = [*aside, *arguments.ignore]
    return path


def _folders(path: Path) -> list[Path]:
    """List the folders of a checkpoint; for a file, its folder and the folder of its link's target."""
    return [path.parent.resolve(), path.resolve().parent] if path.is_file() else [path.resolve()]


def _untrusted(arguments: Namespace) -> list[Path]:
    given = [
        getattr(arguments, name, None) for name in ("ckpt", "out", "a", "b", "like", "against", "repair")
    ]
    paths = [path for value in given for path in (value if isinstance(value, list) else [value])]
    return [Path(path) for path in paths if isinstance(path, (str, os.PathLike))]


def _section(path: Path) -> dict[str, Any] | None:
    """Return the settings in a file; None if it has none."""
    try:
        text = safe_files.read_text(path, _LARGEST, code=codes.USAGE)
        if path.name != "fastshard.toml" and "fastshard" not in text:
            # Most projects': reading TOML takes as long as much else.
            return None
        content = toml_text.load(text)
    except ValueError as error:
        raise _wrong(path, f"not TOML: {error}", None) from None
    if path.name == "fastshard.toml":
        return content
    section = content.get("tool", {}).get("fastshard") if isinstance(content.get("tool"), dict) else None
    return section if isinstance(section, dict) else None


def _wrong(path: Path, what: str, expected: str | None, got: str | None = None) -> FastshardError:
    return FastshardError.of(
        codes.USAGE,
        what,
        file=str(path),
        expected=expected,
        got=got,
        help="correct the file, or ignore settings",
        run=["--no-settings"],
    )
