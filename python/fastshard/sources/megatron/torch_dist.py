"""Megatron-LM's torch_dist: torch.distributed.checkpoint with the arguments in ``common.pt`` and layers stacked.

source: megatron/core/dist_checkpointing (strategies/torch.py)
"""

from __future__ import annotations

from typing import Any

from ...declared import Source
from ...discover import Listing
from ..base import Contents, Found, as_dict
from . import arguments, optim


class TorchDist:
    """A directory with ``metadata.json`` beside ``.metadata``."""

    def take(
        self,
        source: Source,
        found: Found,
        listing: Listing,
        contents: Contents,
        tensors: list[tuple[str, list[int], list[Any]]],
    ) -> list[tuple[str, list[int], list[Any]]] | None:
        """Table, axes and facts from the arguments; the optimizer's state becomes slots of the source."""
        folder = found.notes["folder"]
        if listing.find(f"{folder}/metadata.json" if folder else "metadata.json") is None:
            return None
        common = next((i for i, f in enumerate(found.files) if f.name == "common.pt"), None)
        state = as_dict(contents(common)) if common is not None else {}
        args = arguments.arguments(state)
        names = {entry["name"] for entry in found.notes["described"]["tensors"]}
        weights = optim.divide(source, tensors, found.notes["described"], args, state)
        source.framework, source.pass_unknown = "Megatron-LM (torch_dist)", False
        # Layers that may differ are not stacked: numbered from the first of all, whole, as one rank has them.
        # source: megatron/core/transformer/transformer_block.py, non_homogeneous_layers
        numbered = any(name.startswith("decoder.layers.0.") for name in names)
        source.layout = "megatron.legacy" if numbered else "megatron.dist"
        source.values |= {"iteration": args.get("iteration"), "args": args}
        if arguments.mixture(args, names):
            arguments.refuse_mixtures(args, folder or None)
        arguments.describe(source, args, names)
        return weights
