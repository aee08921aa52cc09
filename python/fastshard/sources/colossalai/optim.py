"""ColossalAI's optimizer shards: states by parameter number, which is the place in the optimizer's groups.

source: colossalai/checkpoint_io/{hybrid_parallel_checkpoint_io,moe_checkpoint}.py (_optimizer_sharder),
    booster/plugin/
hybrid_parallel_plugin.py (get_param_info: numbers run through the groups, of all experts, before any is taken
away), utils/safetensors.py (async: ``state.<number>.<name>``)
"""

from __future__ import annotations

import math
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.listing import File, Listing
from ...common.records import dataclass, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Optimizer, Source
from ..base import Contents, Found, missing
from ..match_by_order import by_shape
from ..param_groups import listed
from ..zero.flat_state import ints, scalar
from .index import PARTIAL, coords_of, join, read_indexes
from .save_files import ColossalFiles, OptimFiles

_INDEX = compile_when_used(
    r"^(?:pytorch_optim\.bin|optimizer\.safetensors)\.index(?:\.[^.]+?)?(-stage-\d{5}(?:-\d{5})?)?\.json$"
)
SHARD = compile_when_used(
    r"^(?:pytorch_optim|optimizer)(?:\.[^.]+)?(?:-stage-(?P<stage>\d{5})(?:-(?P<ep>\d{5}))?-shard)?-\d{5}"
    r"\.(?:safetensors|bin)$"
)
_GROUPS = compile_when_used(r"^pytorch_optim_group(?:\.[^.]+)?\.bin$")
_STATE = compile_when_used(r"^(?:state\.)?(\d+)\.(\w+)$")
_STEP = "step"
#: States of Adam, LAMB and SGD that have the parameter's shape.
_SLOTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}

_ATTENTION = [
    *(f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
]
_MLP = [f"mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")]
_NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
#: Placeholder in a layer's list for a name that each expert has.
_EXPERT = "experts.*."
_MIXTRAL = ["block_sparse_moe.gate.weight", *(f"block_sparse_moe.{_EXPERT}w{i}.weight" for i in (1, 2, 3))]
_NEOX = [
    f"{part}.{kind}"
    for part in (
        "input_layernorm",
        "post_attention_layernorm",
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    )
    for kind in ("weight", "bias")
]
#: Family -> parameters before the layers, of a layer, and after them, in the order of named_parameters().
#: source: transformers models/{llama,mistral,qwen2,qwen3,mixtral,gpt_neox}/modeling_*.py (4.51, the newest
#: that ColossalAI takes)
_FIRST, _LAST = ["model.embed_tokens.weight"], ["model.norm.weight", "lm_head.weight"]
_ORDER = {
    "llama": (_FIRST, "model.layers", [*_ATTENTION, *_MLP, *_NORMS], _LAST),
    "mixtral": (_FIRST, "model.layers", [*_ATTENTION, *_MIXTRAL, *_NORMS], _LAST),
    "gpt_neox": (
        ["gpt_neox.embed_in.weight"],
        "gpt_neox.layers",
        _NEOX,
        [
            "gpt_neox.final_layer_norm.weight",
            "gpt_neox.final_layer_norm.bias",
            "embed_out.weight",
            "lm_head.weight",
        ],
    ),
}


#: Fused tensors that are gathered part by part, whereas their moments are concatenated rank by rank.
#: source: shardformer/policies/gpt2.py (GPT2FusedLinearConv1D), checkpoint_io
#: (gather_from_sharded_optimizer_state)
_FUSED = (".attn.c_attn.weight", ".attn.c_attn.bias")


def parameter_order(
    family: str | None, names: set[str], layers: int, tied: bool, experts: int = 0
) -> list[str] | None:
    """Return the names in the order of ``named_parameters()``.

    None if the family's order is unknown, or the place of a name in it.
    """
    if family not in _ORDER:
        return None
    first, stack, layer, last = _ORDER[family]
    one = [part for part in layer if _EXPERT in part]
    at = layer.index(one[0]) if one else len(layer)
    of_experts = [part.replace("*", str(e)) for e in range(experts) for part in one]
    layer = [*layer[:at], *of_experts, *layer[at + len(one) :]]
    order = [*first, *(f"{stack}.{i}.{part}" for i in range(layers) for part in layer), *last]
    heads = {"lm_head.weight", "embed_out.weight"}
    known = set(order)
    buffers = ("inv_freq", ".attention.bias", ".masked_bias")
    if any(name not in known and not name.endswith(buffers) for name in names):
        return None
    return [name for name in order if name in names and not (tied and name in heads)]


def detect(listing: Listing, model: str, first: int) -> tuple[OptimFiles, list[File]] | None:
    """Find optimizer files near the model's folder, numbered from ``first``; None if there are none."""
    folders = []
    for folder in listing.folders():
        names = [f.name for f in listing.within(folder)]
        if any(_INDEX.match(n) or SHARD.match(n) or _GROUPS.match(n) for n in names):
            folders.append(folder.removesuffix(PARTIAL).rstrip("/"))
    near = [
        f for f in dict.fromkeys(folders) if f == model or f.rpartition("/")[0] == model.rpartition("/")[0]
    ]
    if not near:
        return None
    folder = model if model in near else near[0]
    findings: list[Finding] = []
    if len(near) > 1 and folder != model:
        findings.append(
            Finding.of(
                codes.AMBIGUOUS,
                "several optimizers are next to the model",
                got=", ".join(near[:8]),
                help="name the directory of the model and the directory of one optimizer",
            )
        )
    inside: dict[str, File] = {}
    for file in listing.within(folder):
        inside.setdefault(file.name, file)
    indexes = [f for f in [*inside.values(), *listing.within(join(folder, PARTIAL))] if _INDEX.match(f.name)]
    weight_map = read_indexes(listing, indexes, findings)
    if not any(f in inside.values() for f in indexes):
        findings.append(
            Finding.of(
                codes.UNCOMMITTED,
                "the optimizer's merged index, which is written last, is missing",
                file=folder or ".",
                help="name the directory of the node that ran rank 0 as another CKPT",
            )
        )
    files: list[File] = []
    for name in dict.fromkeys(weight_map.values()):
        if name in inside:
            files.append(inside[name])
            continue
        coords = coords_of(SHARD.match(name))
        count = sum(1 for other in weight_map.values() if other == name)
        findings.append(
            missing(
                join(folder, name),
                coords,
                f"states of {count} parameters, by the optimizer's index",
                "copy it from the node that wrote it, or name that node's directory as another CKPT",
            )
        )
    shards = range(first, first + len(files))
    groups = next((f for f in inside.values() if _GROUPS.match(f.name)), None)
    if groups is None:
        findings.append(
            missing(
                join(folder, "pytorch_optim_group.bin"),
                {},
                "the param groups, which number the parameters",
                "copy it from the node that saved the optimizer",
            )
        )
    else:
        files.append(groups)
    at = None if groups is None else shards.stop
    return OptimFiles(folder, shards, at, tuple(findings)), files


#: File, number in the file, and shape of a moment.
_Moment = tuple[int, int, list[int]]


@dataclass(frozen=True)
class _States:
    """The contents of the optimizer's shards."""

    #: Moments by parameter number and slot.
    moments: dict[int, dict[str, _Moment]]
    #: Steps by file.
    steps: dict[int, list[float]]
    #: Unsupported states, each with a file that contains one.
    unknown: dict[str, int]


def declare(
    source: Source, found: Found[ColossalFiles], contents: Contents, shapes: dict[str, list[int]]
) -> None:
    """Add the moments under the parameters' names, and findings about them."""
    seen = found.seen.optim
    if seen is None:
        return
    states = _states(contents, seen.shards)
    findings = [*seen.findings, *_not_read(found, states.unknown)]
    files = {f.path for f in found.files[seen.shards.start :]}
    source.optimizer = Optimizer(moments_only=True, findings=findings, files=files, steps=states.steps)
    if seen.groups is None:
        return
    path = found.files[seen.groups].path
    groups = _groups(contents(seen.groups))
    if groups is None and contents.readable(seen.groups):
        findings.append(
            Finding.of(
                codes.BAD_VALUE,
                "the file has no list of param groups with their parameters' numbers",
                file=path,
            )
        )
    if groups is None or any(f.severity == "error" for f in findings):
        return
    steps = {step for each in states.steps.values() for step in each}
    findings += _steps_differ(seen.folder, steps)
    source.files.values["optimizer"] = {"step": max(steps)} if steps else {}
    names = _names(source, found, groups, states.moments, shapes)
    if names is None:
        findings.append(_no_names(source, path, groups, shapes))
        return
    if fused := next((name for name in names.values() if name.endswith(_FUSED)), None):
        findings.append(_fused(path, fused))
        return
    slots = {slot for state in states.moments.values() for slot in state}
    findings += _moments_differ(found, states, names, slots, shapes)
    first = next(iter(seen.shards), 0)
    for slot in sorted(slots):
        taken = _assembled(states, names, slot, shapes)
        source.files.assembled += [Assembled(first, {}, None, slot, taken)] if taken else []
    given = listed(_listed(contents(seen.groups)), {str(number): [name] for number, name in names.items()})
    source.optimizer = replace(source.optimizer, unstepped=not slots, groups=given)


def _states(contents: Contents, shards: range) -> _States:
    """Read the states in the readable shards, from their tensors' names."""
    states = _States({}, {}, {})
    for i in shards:
        if not contents.readable(i):
            continue
        metadata = contents(i)
        objects = str(metadata.get("non_tensor_keys", "")) if isinstance(metadata, dict) else ""
        for number, tensor in enumerate(contents.tensors(i)):
            key = ".".join(tensor["path"])
            match = _STATE.match(key)
            if match is None:
                states.unknown.setdefault(key, i)
            elif match[2] == _STEP:
                if f'"{key}"' not in objects and not tensor["shape"]:
                    step = scalar(contents, i, number, tensor["dtype"])
                    states.steps.setdefault(i, []).extend([] if step is None else [step])
                states.moments.setdefault(int(match[1]), {})
            elif match[2] not in _SLOTS:
                states.unknown.setdefault(match[2], i)
            else:
                states.moments.setdefault(int(match[1]), {})[match[2]] = (i, number, tensor["shape"])
    return states


def _assembled(
    states: _States, names: dict[int, str], slot: str, shapes: dict[str, list[int]]
) -> list[tuple[str, list[int], list[tuple[int, int, int, int]]]]:
    """Return the moments of one slot that fit their parameters: name, shape, and ranges of elements."""
    return [
        (name, shapes[name], [(math.prod(shapes[name]), moment[0], moment[1], 0)])
        for place, name in sorted(names.items())
        if (moment := states.moments.get(place, {}).get(slot)) and _fits(moment[2], shapes[name])
    ]


def _fits(shape: list[int], whole: list[int]) -> bool:
    """Return True for the parameter's shape, and for a row of elements as ZeRO stores it.

    A row is stored if only one data-parallel rank has a parameter, for example an expert.

    source: checkpoint_io/moe_checkpoint.py (gather_from_sharded_optimizer_state reshapes what it gathers)
    """
    return shape in (whole, [math.prod(whole)])


# --- what is wrong


def _not_read(found: Found[ColossalFiles], unknown: dict[str, int]) -> list[Finding]:
    return [
        Finding.of(
            codes.UNSUPPORTED,
            f"optimizer state {what!r} is not supported",
            file=found.files[at].path,
            expected=" | ".join(sorted(_SLOTS)),
            help="merge without --optimizer to use only the parameters",
        )
        for what, at in unknown.items()
    ]


def _steps_differ(folder: str, steps: set[float]) -> list[Finding]:
    if len(steps) < 2:
        return []
    text = ", ".join(f"{step:g}" for step in sorted(steps))
    return [
        Finding.of(
            codes.MIXED_STEPS,
            "the optimizer step differs between parameters",
            file=folder or ".",
            got=text,
            help="copy all optimizer files from one save",
        )
    ]


def _no_names(source: Source, path: str, groups: list[list[int]], shapes: dict[str, list[int]]) -> Finding:
    return Finding.of(
        codes.MASTERS_NOT_CHECKABLE,
        f"the optimizer states have numbers instead of names, and no file states how the {len(groups)} "
        f"param groups of model_type {(source.model.config or {}).get('model_type')!r} follow the parameters",
        file=path,
        expected=f"{len(shapes)} parameters",
        got=f"{sum(map(len, groups))} numbers",
        help="merge without --optimizer to use only the parameters; or pass the model's config.json",
        run=["--config FILE"],
    )


def _fused(path: str, name: str) -> Finding:
    return Finding.of(
        codes.UNSUPPORTED,
        "moments of a fused projection were saved in the order of the tensor-parallel ranks, each with a "
        "part of query,"
        " key and value: no file states how many ranks there were",
        file=path,
        tensor=name,
        help="merge without --optimizer to use only the parameters, which are in order",
    )


def _moments_differ(
    found: Found[ColossalFiles],
    states: _States,
    names: dict[int, str],
    slots: set[str],
    shapes: dict[str, list[int]],
) -> list[Finding]:
    """Report moments that are missing, or do not fit their parameters."""
    findings = []
    for place, name in sorted(names.items()):
        for slot in sorted(slots):
            moment = states.moments.get(place, {}).get(slot)
            if moment is None:
                findings.append(
                    Finding.of(
                        codes.MISSING_TENSOR,
                        f"no optimizer shard has {slot} of parameter {place}",
                        tensor=name,
                        help="name the directory of the pipeline stage's node as another CKPT; its shards "
                        "are missing, or the"
                        " parameter was not trained",
                    )
                )
            elif not _fits(moment[2], shapes[name]):
                findings.append(
                    Finding.of(
                        codes.SHAPE,
                        f"{slot} of parameter {place} and the parameter differ in shape",
                        file=found.files[moment[0]].path,
                        tensor=name,
                        expected=f"{shapes[name]}, the shape of {name}",
                        got=str(moment[2]),
                        help="copy the optimizer of this model; this one is from another model, or its "
                        "groups are in another order",
                    )
                )
    return findings


# --- whose numbers these are


def _listed(content: Any) -> Any:
    """Return the groups as stored."""
    if isinstance(content, dict):
        return content.get("param_groups", list(content.values()) if "params" not in content else None)
    return content


def _groups(content: Any) -> list[list[int]] | None:
    """Return the parameters' numbers by group."""
    content = _listed(content)
    if not isinstance(content, list) or not content:
        return None
    groups = [ints(group.get("params")) if isinstance(group, dict) else None for group in content]
    found = [group for group in groups if group is not None]
    return found if len(found) == len(groups) else None


def _names(
    source: Source,
    found: Found[ColossalFiles],
    groups: list[list[int]],
    moments: dict[int, dict[str, _Moment]],
    shapes: dict[str, list[int]],
) -> dict[int, str] | None:
    """Return the name of each numbered parameter."""
    layers = source.binding.axes.get("L", 0)
    tied, experts = source.binding.facts.get("tied", False), source.binding.axes.get("E", 0)
    order = parameter_order(source.model.family, set(shapes), layers, tied, experts)
    order = order or [name for name in found.seen.order if name in shapes]
    if not order:
        return None
    if len(groups) == 1 and len(groups[0]) == len(order):
        return dict(zip(groups[0], order, strict=True))
    # Several groups (with weight decay and without) are each in order: shapes decide, if they do.
    shaped = [[next((s for _, _, s in moments.get(n, {}).values()), None) for n in group] for group in groups]
    if any(shape is None for group in shaped for shape in group):
        return None
    sizes = {name: shapes[name] for name in order}
    if any(shape not in sizes.values() for group in shaped for shape in group):
        # Some lie in a row: their sizes decide.
        sizes = {name: [math.prod(shape)] for name, shape in sizes.items()}
        shaped = [[[math.prod(shape or [])] for shape in group] for group in shaped]
    assigned = by_shape(list(sizes.items()), shaped)
    if assigned is None:
        return None
    return {
        n: name for g, named in zip(groups, assigned, strict=True) for n, name in zip(g, named, strict=True)
    }
