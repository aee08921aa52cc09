"""Megatron-LM's torch_dist: torch.distributed.checkpoint with arguments in ``common.pt`` and stacked layers.

source: megatron/core/dist_checkpointing (strategies/torch.py)
"""

from __future__ import annotations

from typing import Any

from ...common import json_text
from ...common.listing import Listing
from ...common.records import replace
from ...common.regex import compile_when_used
from ...layouts import tables
from ...layouts.declaration import Source
from ...models.model import Lack
from ..base import Contents, Found, Options, as_dict, missing
from ..dcp.dcp_files import DcpFiles
from ..dcp.optim import read_object
from . import arguments, nemo, optim, table_match

#: source: megatron/core/dist_checkpointing/serialization.py (load_common_state_dict), 0.19
_COMMON = "common_state/shard_0_1"
#: Prefix of the model in a state, or of a virtual stage's model.
_MODEL = compile_when_used(r"^model\d*\.")


class TorchDist:
    """A directory with both ``metadata.json`` and ``.metadata``."""

    def take(
        self,
        source: Source,
        found: Found[DcpFiles],
        listing: Listing,
        contents: Contents,
        tensors: list[tuple[str, list[int], list[Any]]],
        options: Options,
    ) -> list[tuple[str, list[int], list[Any]]] | None:
        """Declare table, axes and facts from the arguments, and the optimizer's state as slots."""
        if not _is_torch_dist(found, listing):
            return _of_torch(source, found, tensors)
        state = _common(source, found, contents)
        args = arguments.arguments(state)
        settings = None if args else nemo.read_settings(listing, found.folder)
        weights = optim.divide(
            source,
            tensors,
            found.seen.metadata,
            args if settings is None else settings.of_optimizer(),
            state,
        )
        stored = {name: shape for name, shape, _ in weights}
        # What lies in a file that is gone belongs to the model all the same.
        stored |= {
            entry["name"]: entry["shape"]
            for entry in found.seen.metadata["tensors"]
            if entry["name"] in found.seen.lacking and not optim.is_state(entry["name"])
        }
        prefix = nemo.prefix_of(stored)
        names = {entry["name"].removeprefix(prefix) for entry in found.seen.metadata["tensors"]}
        shapes = {name.removeprefix(prefix): shape for name, shape in stored.items()}
        source.binding.pass_unknown = False
        source.framework = (
            f"{settings.framework if settings else 'NeMo' if prefix else 'Megatron-LM'} (torch_dist)"
        )
        # Layers that may differ are not stacked: numbered from the first of all, whole, as one rank has them.
        is_numbered = table_match.is_numbered(names)
        source.binding.layout = "megatron.legacy" if is_numbered else "megatron.dist"
        file = next((f.path for f in found.files if f.name == "common.pt"), None)
        unstated: list[Lack] = []
        if settings is not None:
            args, unstated, file = {**settings.args, **_iteration(state)}, settings.lacking, settings.file
            source.files.folders = settings.folders
        source.files.values |= {"iteration": args.get("iteration"), "args": args}
        args, lacking = arguments.override(source, args, options, file)
        if is_numbered and (mixed := table_match.find_mixed_table(shapes, args)) is not None:
            source.binding.layout = mixed
        required_class = arguments.find_required_class(options)
        arguments.describe(source, args, names, [*unstated, *lacking], required_class)
        # What is stored is all that there is: no arguments call for more.
        source.binding.facts["output_layer"] = "output_layer.weight" in names
        if "gated" not in source.binding.facts and (gated := _gated(shapes)) is not None:
            source.binding.facts["gated"] = gated
        table = source.binding.table or tables.table(source.binding.layout)
        lack = table_match.unnamed(table, shapes, source.binding.axes, source.binding.facts, args)
        if lack is not None:
            table_match.leave_unnamed(source, lack, stored, args)
            if prefix and not args:
                unstated_model = nemo.Unstated(nemo.name_settings(found.folder))
                source.model = replace(source.model, dialect=unstated_model)
        elif prefix:
            source.binding.table = table.with_rules(
                [rule.renamed(prefix + rule.name) for rule in table.rules]
            )
        return weights


def _iteration(state: dict[str, Any]) -> dict[str, int]:
    """Return the iteration in the common part: Megatron's count, or Lightning's."""
    value = state.get("iteration", state.get("global_step"))
    return {"iteration": value} if isinstance(value, int) and not isinstance(value, bool) else {}


def _is_torch_dist(found: Found[DcpFiles], listing: Listing) -> bool:
    """Return True if ``metadata.json`` names a Megatron-LM backend; other trainers have a file of that name
    too.

    If the file is not JSON, the common part of the state decides.
    source: megatron/core/dist_checkpointing/core.py (CheckpointingConfig)
    """
    file = listing.find(f"{found.folder}/metadata.json" if found.folder else "metadata.json")
    if file is None:
        return False
    content = json_text.object_in(listing.read_text(file))
    is_common = any(f.name == "common.pt" for f in found.files) or _COMMON in found.seen.objects
    return "sharded_backend" in content or (not content and is_common)


def _of_torch(
    source: Source, found: Found[DcpFiles], tensors: list[tuple[str, list[int], list[Any]]]
) -> list[tuple[str, list[int], list[Any]]] | None:
    """Declare ``fsdp_dtensor`` and ``torch_dcp``, torch's forms of the full state including arguments.

    All tensors keep their stored names in a merge. No table fits them, because Megatron-FSDP splits gated
    projections into ``weight_w`` and ``weight_v``, and the names are those of its wrappers.
    source: megatron/training/checkpointing.py (generate_state_dict),
        megatron/core/transformer/fsdp_dtensor_checkpoint.py
    """
    objects = found.seen.objects
    names = {name for name, *_ in tensors}
    if not {"args", "iteration", "checkpoint_version"} <= objects.keys() or not any(map(_MODEL.match, names)):
        return None
    args = arguments.arguments({"args": read_object(objects["args"])})
    form = str(args.get("ckpt_format") or "fsdp_dtensor")[:80]
    source.framework = f"Megatron-LM ({form if form.isidentifier() else 'torch DCP'})"
    source.files.values |= {"iteration": args.get("iteration"), "args": args}
    arguments.describe(source, args, names)
    shapes = {name: shape for name, shape, _ in tensors}
    table_match.leave_unnamed(source, Lack("ckpt_format", "torch_dist or torch", form), shapes, args)
    return tensors


def _common(source: Source, found: Found[DcpFiles], contents: Contents) -> dict[str, Any]:
    """Read the non-tensor part of the state: from a file or, since 0.19, from an object among the records.

    Raises:
        FastshardError: if the object cannot be read.
    """
    file = next((i for i, f in enumerate(found.files) if f.name == "common.pt"), None)
    if file is not None:
        return as_dict(contents(file))
    if _COMMON not in found.seen.objects:
        if _COMMON not in found.seen.lacking:
            folder = found.folder
            source.findings.append(
                missing(
                    f"{folder}/common.pt" if folder else "common.pt",
                    {},
                    f"the common part of the state, which metadata.json requires, or {_COMMON} among the "
                    "records",
                    "copy common.pt from the node that ran rank 0, or name that node's directory as another "
                    "CKPT",
                )
            )
        return {}
    value = read_object(found.seen.objects[_COMMON])
    # An object's value is kept as the only item of a list.
    return as_dict(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _gated(shapes: dict[str, list[int]]) -> bool | None:
    """Return True if the first projection has a gate, based on the columns of the second projection.

    None if the shapes do not show it.
    """
    found = set()
    for name, first in shapes.items():
        second = shapes.get(name.replace("linear_fc1.weight", "linear_fc2.weight"))
        if name.endswith("linear_fc1.weight") and first and second:
            rows, columns = first[-2] if len(first) > 1 else 0, second[-1]
            found.add(2 if rows == 2 * columns else 1 if rows == columns else 0)
    return {1: False, 2: True}.get(found.pop()) if len(found) == 1 else None
