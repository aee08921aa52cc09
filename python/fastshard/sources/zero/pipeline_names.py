"""Names in pipelines: the name of a module that several stages share."""

from __future__ import annotations

from ..base import Contents, Found, as_dict
from .optimizer_state import Naming
from .zero_files import ZeroFiles


def pipeline_names(found: Found[ZeroFiles], contents: Contents) -> Naming:
    """Return the naming of a pipeline's tensors.

    ``tied_modules.KEY.rest`` is in the first layer file that contains ``rest``.
    """
    holders: dict[str, int] = {}
    for layer, _, file in found.seen.layers:
        for name in as_dict(contents(file)):
            holders.setdefault(str(name), layer)

    def name_of(name: str) -> str:
        if not name.startswith("tied_modules."):
            return name
        rest = name.split(".", 2)[-1]
        return f"{holders[rest]}.{rest}" if rest in holders else name

    return name_of
