"""Parts of array stores, which are recognised if no complete item is found."""

from __future__ import annotations

from ...common import codes
from ...common.errors import FastshardError
from ...common.listing import Listing
from .zarr_metadata import METADATA

_MARKS = {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", *METADATA}


def refuse_parts(listing: Listing) -> None:
    """Raise ``FS514`` for a directory that is only one array of a store, or a part of one."""
    hit = next((f for f in listing.files if f.name in _MARKS), None)
    if hit:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "this is only a part of a checkpoint of Orbax, MaxText or Paxml (zarr)",
            file=hit.path,
            expected="the directory that holds all of its arrays",
            help="pass the directory of the item (items, state), the step or the run as CKPT",
        )
