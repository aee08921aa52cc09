"""Names in pipelines: what a module that several stages share is called."""

from __future__ import annotations

from typing import Any

from ..base import Contents, Found, as_dict
from .optimizer_state import Naming


def pipeline_names(found: Found[Any], contents: Contents) -> Naming:
    """``tied_modules.KEY.rest`` lies in the first layer file that holds ``rest``."""
    first = len(found.notes["ranks"])
    holders: dict[str, int] = {}
    for i, (layer, _) in enumerate(found.notes["layers"]):
        for name in as_dict(contents(first + i)):
            holders.setdefault(str(name), layer)

    def name_of(name: str) -> str:
        if not name.startswith("tied_modules."):
            return name
        rest = name.split(".", 2)[-1]
        return f"{holders[rest]}.{rest}" if rest in holders else name

    return name_of
