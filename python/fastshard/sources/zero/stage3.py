"""Stage 3: every parameter is divided into one part per data-parallel rank, the last one padded.

A rank's parts are concatenated in its flat groups, at offsets common to all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.ranks import rank_range
from ...layouts.declaration import Assembled, Unit
from ..base import Contents, Found, lacking, missing
from .flat_state import Flat, Model, Named, Parts, Range, cut, ints, is_shape, name_list, tensor_index
from .partitions import Partitions
from .zero_files import ZeroFiles


def slices(partitions: Partitions, shapes: list[dict[str, list[int]]]) -> Named | None:
    """Locate each parameter's parts in the partitions; None, with a finding, if parts are missing."""
    order, model = partitions.order, partitions.model
    world = len(order)
    parameters = {name: shape for group in shapes for name, shape in group.items()}
    needed = sum(-(-math.prod(shape) // world) for shape in parameters.values())
    starts: list[tuple[list[int], list[int]]] = []
    for rank in order:
        sizes = [flat.numel for flat in rank.masters]
        starts.append(([sum(sizes[:i]) for i in range(len(sizes))], sizes))
        if sum(sizes) != needed:
            partitions.problem(
                codes.PARTITION,
                "elements in fp32_flat_groups",
                rank.path,
                rank.dp,
                f"{needed}, one of {world} parts of each parameter of {model.path}",
                str(sum(sizes)),
                "copy the file of this rank again: it is from another model, step or number of ranks",
            )
            return None

    def ranges(vectors: list[list[Flat | None]], at: int, count: int) -> list[Range] | None:
        part = -(-count // world)
        out: list[Range] = []
        for r in range(world):
            size = min(part, count - r * part)
            for length, k, first in cut(at, size, *starts[r]) if size > 0 or r == 0 else ():
                vector = vectors[r][k]
                if vector is None:
                    return None
                out.append((length, order[r].file, vector.tensor, first))
        return out

    masters: list[Parts] = []
    slots: dict[str, list[Parts]] = {}
    at = 0
    for name, shape in parameters.items():
        count = math.prod(shape)
        masters.append((name, shape, ranges([list(rank.masters) for rank in order], at, count) or []))
        for slot in order[0].slots:
            empty: list[Flat | None] = [None] * len(order[0].masters)
            found = ranges([rank.slots.get(slot, empty) for rank in order], at, count)
            if found is not None:
                slots.setdefault(slot, []).append((name, shape, found))
        at += -(-count // world)
    return masters, slots


def buffers(contents: Contents, file: int, state: dict[str, Any]) -> list[str]:
    """Return the names in `module` except empty parameters, and the names of the required buffers."""
    listed = name_list(state.get("buffer_names"))
    tensors = contents.tensors(file) if state else []
    module = state.get("module")
    stored = [
        name
        for name, value in (module.items() if isinstance(module, dict) else ())
        if (index := tensor_index(value)) is not None and tensors[index]["shape"] != [0]
    ]
    return list(dict.fromkeys([*listed, *stored]))


def buffers_left_out(found: Found[ZeroFiles], unit: Unit, state: dict[str, Any]) -> list[Finding]:
    """Report buffers that a model file lists and does not store, because nothing else requires them."""
    module = state.get("module")
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            "the buffer is missing: the model file lists it but does not hold it",
            file=found.files[unit.file].path,
            rank=unit.rank,
            tensor=name,
            help="copy the model file from the node that wrote it",
        )
        for name in unit.only or []
        if tensor_index(module.get(name) if isinstance(module, dict) else None) is None
    ]


def frozen(model: Model, sliced: Sequence[tuple[int, int, int]]) -> list[Assembled]:
    """Return frozen parameters of stage 3: one fragment per rank in its model file, in their own dtype."""
    shapes = _frozen_shapes(model)
    if not shapes:
        return []
    files = {dp: file for dp, mp, file in reversed(sliced) if mp == model.mp}
    if len(files) < (ints([model.state.get("dp_world_size")]) or [0])[0]:
        # Said of the file that is missing.
        return []
    tensors: list[Parts] = []
    for name, shape in shapes.items():
        count, world = math.prod(shape), len(files)
        part = -(-count // world)
        ranges: list[Range] = []
        for r, dp in enumerate(sorted(files)):
            content = model.contents(files[dp])
            fragments = content.get("frozen_param_fragments") if isinstance(content, dict) else None
            index = tensor_index(fragments.get(name)) if isinstance(fragments, dict) else None
            if index is not None and (r * part < count or r == 0):
                ranges.append((min(part, count - r * part), files[dp], index, 0))
        tensors.append((name, shape, ranges))
    # A frozen parameter has further names too: the head of a base model that is tied and tuned by adapters.
    owned = {name: (shape, ranges) for name, shape, ranges in tensors}
    tensors += [(alias, *owned[owner]) for alias, owner in model.aliases().items() if owner in owned]
    assembled = model.assembled(None, tensors, model.file)
    assembled.frozen = True
    return [assembled]


def frozen_names(model: Model) -> set[str]:
    """Return the parameters that were not trained, including aliases."""
    shapes = _frozen_shapes(model)
    return {*shapes, *(alias for alias, owner in model.aliases().items() if owner in shapes)}


def _frozen_shapes(model: Model) -> dict[str, list[int]]:
    shapes = model.state.get("frozen_param_shapes")
    shapes = shapes if isinstance(shapes, dict) else {}
    return {name: shape for name, shape in shapes.items() if is_shape(shape)}


def left_out(model: Model, stored: set[str]) -> list[Finding]:
    """Report parameters that are empty in `module` and that are in no partition or fragment.

    Args:
        model: the model-parallel rank.
        stored: names of parameters that `module` stores in full.
    """
    groups = model.shapes()
    if groups is None:
        return []
    known = {name for group in groups for name in group} | set(_frozen_shapes(model)) | set(model.aliases())
    module = model.state.get("module")
    fragments = model.state.get("frozen_param_fragments")
    named = [
        *(module if isinstance(module, dict) else ()),
        *(fragments if isinstance(fragments, dict) else ()),
    ]
    # Before DeepSpeed 0.8 tied names were not told.
    has_ties = isinstance(model.state.get("shared_params"), dict)
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            "the parameter is missing: the model file lists it, but no partition holds it",
            severity="error" if has_ties else "warning",
            file=model.path,
            rank=model.label,
            tensor=name,
            expected="its shape in param_shapes or frozen_param_shapes, or its owner in shared_params",
            got="none",
            help="copy the model file from the node that wrote it",
        )
        for name in dict.fromkeys(named)
        if name not in known and name not in stored
    ]


def ranks_agree(model: Model, sliced: Sequence[tuple[int, int, int]]) -> list[Finding]:
    """Check the ZeRO-3 model files: one per data-parallel rank, all from the same step."""
    findings = []
    files = {dp: file for dp, mp, file in reversed(sliced) if mp == model.mp}
    world = model.state.get("dp_world_size")
    folder = model.found.folder
    ranks = world if isinstance(world, int) and 0 < world <= 1 << 20 else 0
    for dp, last in lacking(files, 0, ranks - 1):
        name, end = (f"zero_pp_rank_{n}_mp_rank_{model.mp:02d}_model_states.pt" for n in (dp, last))
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                {"dp": rank_range(dp, last), **model.place},
                f"dp_world_size {world} in {model.path}",
                f"copy {name} from the node that ran data-parallel rank {dp}",
                upto=end if last > dp else None,
            )
        )
    for dp, file in sorted(files.items()):
        content = model.contents(file)
        if not isinstance(content, dict) and model.contents.readable(file):
            content = {}
        for key in ("global_steps", "param_shapes", "dp_world_size"):
            if isinstance(content, dict) and _ordered(content.get(key)) != _ordered(model.state.get(key)):
                code = codes.MIXED_STEPS if key == "global_steps" else codes.RANKS_DISAGREE
                findings.append(
                    Finding.of(
                        code,
                        f"{key} differs between ranks",
                        file=model.found.files[file].path,
                        rank=f"dp {dp}, {model.label}",
                        expected=f"the value in {model.path}"
                        if key == "param_shapes"
                        else str(model.state.get(key)),
                        got="others" if key == "param_shapes" else str(content.get(key)),
                        help="copy all files from one step",
                    )
                )
    return findings


def _ordered(value: Any) -> Any:
    """Convert dictionaries to lists in order to compare their order, because that of `param_shapes`
    determines the places of parameters.
    """
    if isinstance(value, list):
        return [_ordered(v) for v in value]
    return list(value.items()) if isinstance(value, dict) else value
