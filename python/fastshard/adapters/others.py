"""Frameworks that are recognised and not read: refused by name rather than mis-read."""

from __future__ import annotations

import re

from ..discover import Listing
from ..errors import FastshardError

_MARKS: list[tuple[str, str]] = [
    (
        r"(^|/)(_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|\.zarray|zarr\.json)$",
        "Orbax / MaxText / Paxml (zarr)",
    ),
]


def refuse_by_name(listing: Listing) -> None:
    """Raises ``FS514`` naming the framework, if the files' names give one away."""
    for pattern, framework in _MARKS:
        hit = next((f for f in listing.files if re.search(pattern, f.path)), None)
        if hit:
            raise FastshardError.of(
                "FS514",
                f"a checkpoint of {framework}: this version of fastshard does not read it yet",
                file=hit.path,
                help="see README.md for the frameworks that this version reads",
            )
