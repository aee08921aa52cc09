"""Libraries of an extra, imported when they are needed; the error for a missing one names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import codes
from .errors import FastshardError

__all__ = ["EXTRAS", "imported", "install"]

#: Requirements of each extra, the same as in pyproject.toml (tests/project/test_constraints.py), because an
#: installed package does not record its extras.
EXTRAS = {
    "bf16": ("ml-dtypes>=0.4",),
    "orbax": ("tensorstore>=0.1.60", "ml-dtypes>=0.4"),
    "report": ("jinja2>=3.1,<4", "vl-convert-python>=1.7,<2"),
    "sign": ("model-signing>=1.1,<2", "pyopenssl>=24"),
    "ray": ("ray>=2.40,<3",),
    "cloud": ("huggingface_hub>=1.0,<3", 'obstore>=0.12,<0.13; python_version >= "3.11"'),
}


def install(extra: str) -> str:
    """Return the command that installs an extra's packages, however fastshard was installed."""
    packages = (package.partition(";")[0] for package in EXTRAS[extra])
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])


def imported(*modules: str, purpose: str, extra: str) -> Any:
    """Import modules of one library and return the first.

    Args:
        modules: names of modules of one library.
        purpose: purpose of the library, for messages.
        extra: the extra of fastshard that installs it.

    Raises:
        FastshardError: ``FS514`` if the library is not installed.
    """
    try:
        first, *_ = [import_module(name) for name in modules]
    except ImportError as error:
        raise FastshardError.of(
            codes.UNSUPPORTED, f"{purpose}: {error}", help=f"install the missing packages: {install(extra)}"
        ) from None
    return first
