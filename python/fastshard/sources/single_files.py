"""A single file passed as CKPT, which is a complete model or a part of a checkpoint.

A part looks like a model with fewer or smaller tensors. It is recognised by its name, by an index or other
files next to it, or by the values in the file.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _core
from ..common import codes, json_text, memory_budget, safe_files
from ..common.errors import FastshardError, Finding, error_for
from ..common.listing import READABLE_ALONE, File, Listing, is_array
from ..common.regex import compile_when_used
from ..common.stored_places import show_text
from ..layouts import tables
from ..layouts.declaration import is_state
from ..models import config_json
from .base import Contents, as_dict, as_list
from .unsupported_formats import find_unread_format

__all__ = ["accept_part", "find_part", "fits_config", "make_part", "refuse_rank_folder", "refuse_unreadable"]

#: Names that loaders look for by default. source: transformers utils/__init__.py, diffusers
#: utils/constants.py
_LOADED = compile_when_used(r"^(diffusion_)?(pytorch_)?model(\.[\w-]+)?\.(safetensors|bin)$")
#: The name of one of several numbered files.
_COUNTED = compile_when_used(r"-(\d+)-of-(\d+)(\.[\w-]+)*$")
#: Files of DeepSpeed and GPT-NeoX that contain a part of a model in every run.
#: source: DeepSpeed runtime/engine.py (_get_ckpt_name), runtime/pipe/module.py (ckpt_layer_path)
_OF_DEEPSPEED = (
    (compile_when_used(r"^layer_\d+(-model_\d+)?-model_states\.pt$"), "one layer of a pipeline"),
    (
        compile_when_used(r"^(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt$"),
        "one rank's partition of the optimizer state",
    ),
    (
        compile_when_used(r"^expp_rank_\d+_mp_rank_\d+_optim_states\.pt$"),
        "one rank's partition of the optimizer state",
    ),
    (
        compile_when_used(r"^(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt$"),
        "one expert of an MoE model",
    ),
)
#: One tensor of a universal checkpoint, in its folder below ``zero/``. source: DeepSpeed
#: checkpoint/ds_to_universal.py
_OF_UNIVERSAL = compile_when_used(r"/zero/([^/]+/(fp32|exp_avg|exp_avg_sq|step)|optimizer_state)\.pt$")
#: Keys that only an optimizer's partition has. source: DeepSpeed runtime/zero/{stage_1_and_2,stage3}.py,
#: bf16_optimizer.py
_PARTITION = ("single_partition_of_fp32_groups", "fp32_flat_groups", "partition_count", "fp32_groups_flat")
#: Keys of training arguments that divide a model, and the dimension for messages. Data parallelism does not
#: divide a model. source: Megatron-LM training/arguments.py, gpt-neox neox_arguments
_DEGREES = {
    "tensor_model_parallel_size": "tensor-parallel",
    "model_parallel_size": "tensor-parallel",
    "pipeline_model_parallel_size": "pipeline-parallel",
    "pipe_parallel_size": "pipeline-parallel",
    "expert_model_parallel_size": "expert-parallel",
    "mp_world_size": "model-parallel",
    "tp_degree": "tensor-parallel",
    "pp_degree": "pipeline-parallel",
}
#: Keys under which a file stores them.
_ARGUMENTS = ("args", "checkpoint_parallel_dimensions")
#: A number that counts parts in a name: after a word for the counted parts, or at the end of the name.
_NUMBER = compile_when_used(
    r"(?:(?<![A-Za-z])(?P<word>(?:tp|mp|pp|ep)_rank|tp|mp|pp|rank|stage|shard|part)[_-]?|_|-(?=0))"
    r"(?P<n>\d{1,6})(?=[._-]|$)",
    re.IGNORECASE,
)
#: Words for ranks that each have a part of the model.
_DIVIDING = ("tp_rank", "mp_rank", "pp_rank", "ep_rank", "tp", "mp", "pp")
#: The folder of one Megatron-LM rank. source: Megatron-LM training/checkpointing.py (get_checkpoint_name)
_RANK_FOLDER = compile_when_used(r"^mp_rank_\d+(_\d+){0,2}$")
_MEGATRON = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")
#: Files that identify the folder of an array store, and the number of levels from one of its files up to that
#: folder.
_STORE = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "commit_success.txt")
_DEEP = 8
#: Maximum number of sibling files whose headers are read.
_MOST_SIBLINGS = 16


def make_part(path: str, what: str, folder: Path | None, *, tensor: str | None = None) -> Finding:
    """Build the finding for a part of a checkpoint.

    Args:
        path: the file, or the folder of one rank.
        what: the part, and the form of the checkpoint.
        folder: folder of the other parts; None if unknown.
        tensor: a tensor of which it contains a part.
    """
    return Finding.of(
        codes.PART,
        f"only a part of a checkpoint was named: {what}",
        file=path,
        tensor=tensor,
        help="name the directory that holds all parts; to use only this part, accept it",
        run=[
            *([] if folder is None else [f"fastshard verify {shlex.quote(show_text(os.fspath(folder)))}"]),
            "--accept part",
        ],
    )


def accept_part(finding: Finding) -> Finding:
    """Return the finding as a warning, because the caller accepts the part (``accept part``)."""
    return finding.replace(severity="warning", help=None, run=[], decided="accept part")


def refuse_unreadable(listing: Listing) -> None:
    """Refuse a file that no reader can open alone, and describe it.

    Raises:
        FastshardError: ``FS118`` for a part of a store or of a save of torch.distributed.checkpoint,
            ``FS513`` for another format.
    """
    file, path = listing.files[0], _path_of(listing, listing.files[0])
    if file.name.endswith(".distcp"):
        what = "one rank's file of a torch.distributed.checkpoint save, whose .metadata describes it"
        raise error_for([_only_folder(make_part(file.path, what, path.parent))])
    if not file.name.endswith(READABLE_ALONE) and (store := _find_store(path)) is not None:
        what = "one file of a store of arrays (Orbax, zarr)"
        raise error_for([_only_folder(make_part(file.path, what, store))])
    head = safe_files.read_bytes(path, 4, label=file.path, whole=False)
    if (known := find_unread_format(file.name, head)) is not None:
        raise FastshardError.of(
            codes.NOT_A_CHECKPOINT, f"{known[0]} is not supported", file=file.path, help=known[1]
        )


def _only_folder(finding: Finding) -> Finding:
    """Return the finding for a part that no reader can read without the others."""
    return finding.replace(help="name the directory that holds all parts", run=finding.run[:1])


def _find_store(path: Path) -> Path | None:
    """Return the outermost folder of the store that contains a file; None for other files."""
    store = None
    for folder in list(path.absolute().parents)[:_DEEP]:
        if any((folder / name).is_file() for name in _STORE):
            store = folder
        elif is_array(folder):
            # The folder of one array; its store has others beside it.
            store = folder.parent
        elif store not in (None, folder):
            break
    return store


def refuse_rank_folder(listing: Listing) -> None:
    """Refuse the folder of one rank that is next to the folders of other ranks.

    Raises:
        FastshardError: ``FS118``.
    """
    if len(listing.roots) != 1 or listing.by_itself(0) is not None:
        return
    root = listing.roots[0].absolute()
    if _RANK_FOLDER.match(root.name) and any(file.path in _MEGATRON for file in listing.files):
        what = "the directory of one Megatron-LM rank"
        raise error_for([_only_folder(make_part(os.fspath(listing.roots[0]), what, root.parent))])


def find_part(listing: Listing, contents: Contents, accept: frozenset[str]) -> Finding | None:
    """Return the finding for a single file that is a part of a checkpoint; None for a complete model.

    Args:
        listing: the single file.
        contents: contents of its header.
        accept: the conditions that the caller accepts.
    """
    file = listing.files[0]
    path = _path_of(listing, file)
    part = (
        _by_name(file.path, path)
        or _by_index(file.path, path)
        or (_by_contents(file.path, path, contents) if contents.readable(0) else None)
        or (_by_siblings(file.path, path, contents) if contents.readable(0) else None)
    )
    return accept_part(part) if part is not None and "part" in accept else part


def _path_of(listing: Listing, file: File) -> Path:
    return listing.roots[file.root] / file.path


def _by_name(label: str, path: Path) -> Finding | None:
    counted = _COUNTED.search(path.name)
    if counted is not None and int(counted[2]) > 1:
        return make_part(label, f"one of {int(counted[2])} files, by its name", path.parent)
    for pattern, what in _OF_DEEPSPEED:
        if pattern.match(path.name):
            return make_part(label, what, path.parent)
    path = path.absolute()
    if (match := _OF_UNIVERSAL.search(path.as_posix())) is not None:
        step = path.parents[match[0].count("/") - 1]
        return make_part(label, "one file of a universal checkpoint, which has several for each tensor", step)
    return None


def _by_index(label: str, path: Path) -> Finding | None:
    """Find an index next to the file that lists it among other files."""
    for name in sorted(_names_in(path.parent)):
        if not fnmatch.fnmatchcase(name, "*.index*.json"):
            continue
        try:
            text = safe_files.read_text(path.parent / name, safe_files.MAX_INDEX)
        except FastshardError:
            continue
        weight_map = as_dict(json_text.object_in(text).get("weight_map"))
        files = {value for value in weight_map.values() if isinstance(value, str)}
        if path.name in files and len(files) > 1:
            return make_part(label, f"one of {len(files)} files that {name} lists", path.parent)
    return None


def _by_contents(label: str, path: Path, contents: Contents) -> Finding | None:
    """Read the file's own statement about its place among other files."""
    # A rank's folder of Megatron-LM lies beside those of the others.
    folder = path.absolute().parent
    folder = folder.parent if _RANK_FOLDER.match(folder.name) else folder
    if (tensor := contents.partial(0)) is not None:
        what = "one rank's part of the tensor (a DTensor or ShardedTensor)"
        return make_part(label, what, folder, tensor=tensor)
    state = as_dict(contents(0))
    if any(key in as_dict(state.get("optimizer_state_dict")) for key in _PARTITION):
        return make_part(label, "one rank's partition of the optimizer state", folder)
    degrees = _degrees_of(state)
    if degrees:
        key, degree = next(iter(degrees.items()))
        what = f"one of {degree} {_DEGREES[key]} ranks, by {key} in its arguments"
        return make_part(label, what, folder)
    if _is_of_deepspeed(state):
        if state.get("module") is None:
            return make_part(
                label, "a rank file without weights, which are in the files of the pipeline's layers", folder
            )
        if any(isinstance(n, int) and n > 1 for n in as_list(state.get("num_experts"))):
            return make_part(label, "the model without its experts, which are in separate files", folder)
        if (tensor := _partitioned(state, contents)) is not None:
            return make_part(
                label, "one rank's partition of the parameters (ZeRO stage 3)", folder, tensor=tensor
            )
    return None


def _is_of_deepspeed(state: Mapping[str, Any]) -> bool:
    return "module" in state and ("ds_version" in state or "dp_world_size" in state)


def _degrees_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the degrees above 1 that divide the model, by key."""
    found: dict[str, int] = {}
    for part in (state, *(as_dict(state.get(key)) for key in _ARGUMENTS)):
        # A Namespace is an inert record with its state.
        values = as_dict(part.get("state")) if "__class__" in part else part
        for key in _DEGREES:
            degree = values.get(key)
            if isinstance(degree, int) and not isinstance(degree, bool) and degree > 1:
                found.setdefault(key, degree)
    return found


def _partitioned(state: Mapping[str, Any], contents: Contents) -> str | None:
    """Return a parameter whose shape in the file differs from the stated one."""
    shapes = {".".join(tensor["path"]): tensor["shape"] for tensor in contents.tensors(0)}
    for group in as_list(state.get("param_shapes")):
        for name, shape in as_dict(group).items():
            stored = shapes.get(f"module.{name}")
            if stored is not None and isinstance(shape, list) and stored != shape:
                return str(name)
    return None


def _by_siblings(label: str, path: Path, contents: Contents) -> Finding | None:
    """Compare the file with files next to it whose names differ in a number.

    Parts have other tensors, or other boxes of the same tensors. Copies (epochs, moving averages) have the
    same names and shapes.
    """
    path = path.absolute()
    shapes = {".".join(tensor["path"]): tensor["shape"] for tensor in contents.tensors(0)}
    for sibling, is_dividing in _siblings_of(path):
        folder = path.parent if sibling.parent == path.parent else path.parent.parent
        other = sibling.relative_to(folder).as_posix()
        if is_dividing:
            return make_part(label, f"{other} holds another model-parallel rank's part of the model", folder)
        others = _shapes_in(sibling)
        if others is None or (name := _find_divided(shapes, others, _is_numbered_model(path))) is None:
            continue
        how = (
            "holds another part of this tensor"
            if name in shapes
            else "holds this tensor, and this file does not"
        )
        return make_part(label, f"{other} {how}", folder, tensor=name)
    return None


def _siblings_of(path: Path) -> list[tuple[Path, bool]]:
    """Return files whose paths differ from the given path in a number that counts parts.

    The nearest numbers come first. The second value states whether the number belongs to a rank that divides
    the model.
    """
    found = [
        (path.with_name(n), divides) for n, divides in _numbered_alike(path.name, _names_in(path.parent))
    ]
    if _RANK_FOLDER.match(path.parent.name):
        folders = _names_in(path.parent.parent)
        ranks = [name for name in folders if name != path.parent.name and _RANK_FOLDER.match(name)]
        found += [
            (other, True) for name in ranks if (other := path.parent.with_name(name) / path.name).is_file()
        ]
    return found[:_MOST_SIBLINGS]


def _numbered_alike(name: str, others: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the names that differ from the given one in a single number that counts parts.

    The second value states whether the number belongs to a rank that divides the model.
    """
    found: dict[str, tuple[int, bool]] = {}
    for match in _NUMBER.finditer(name):
        start, end = match.span("n")
        word = (match["word"] or "").lower()
        if not word and "." in name[end + 1 :]:
            # A number without a word counts parts at the end of a name alone.
            continue
        pattern = re.compile(rf"{re.escape(name[:start])}(\d{{1,6}}){re.escape(name[end:])}")
        for other in others:
            if other != name and (number := pattern.fullmatch(other)):
                found.setdefault(other, (abs(int(number[1]) - int(match["n"])), word in _DIVIDING))
    return [(other, found[other][1]) for other in sorted(found, key=lambda other: (found[other][0], other))]


def _is_numbered_model(path: Path) -> bool:
    """Return True for an additional model of the same script.

    accelerate saves ``model.safetensors``, ``model_1.safetensors``.
    """
    first = re.sub(r"_\d+(?=\.\w+$)", "", path.name)
    return first != path.name and path.with_name(first).is_file()


def _shapes_in(path: Path) -> dict[str, list[int]] | None:
    """Return the shapes of the tensors in a file, by name; None if it cannot be read."""
    try:
        catalog = _core.Catalog(
            [os.fspath(path.parent)], [(0, path.name)], 1, memory=memory_budget.get_limit()
        )
        if catalog.files()[0] is None:
            return None
        return {".".join(tensor["path"]): tensor["shape"] for tensor in catalog.tensors(0)}
    except _core.CoreError:
        return None


def _find_divided(
    shapes: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]], is_numbered: bool
) -> str | None:
    """Return a tensor that two files of one model divide; None for copies and for files of different models.

    The other file has another box of it, or the full tensor.

    Args:
        shapes: shapes of the file's tensors, by their names.
        others: shapes of the tensors in the other file.
        is_numbered: whether scripts that save several models use such numbers.
    """
    shared = shapes.keys() & others.keys()
    differing = sorted(name for name in shared if shapes[name] != others[name])
    for name in differing:
        one, other = shapes[name], others[name]
        if len(one) != len(other) or sum(a != b for a, b in zip(one, other, strict=True)) > 1:
            # Ranks cut a tensor along one dimension; a model of another size differs in several.
            return None
    if differing:
        return differing[0]
    lacking = sorted(name for name in others.keys() - shapes.keys() if not is_state(name))
    if not lacking or not shapes or (is_numbered and not shared):
        return None
    return lacking[0]


def _names_in(folder: Path) -> list[str]:
    """Return the names of a folder's entries; empty if it cannot be listed."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def fits_config(path: Path, config: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if the config.json next to a file describes the file's model.

    This is the case if loaders look for the file's name, or if more than half of the tensor names are the
    model's.

    Args:
        path: the file.
        config: content of the config.json next to it.
        names: names of the tensors in the file.
    """
    if _LOADED.match(path.name):
        return True
    layout = config_json.layout_of(dict(config))
    if layout is not None:
        table = tables.table(layout)
        fitting = sum(
            any(table.rule_of(one) is not None for one in (name, f"model.{name}")) for name in names
        )
        return 2 * fitting > len(names)
    known = _names_of_model(path)
    return known is None or 2 * len(known.intersection(names)) > len(names)


def _names_of_model(path: Path) -> set[str] | None:
    """Return the tensor names of the model next to a file, from its index or its only file.

    None if there is no model.
    """
    for name in sorted(_names_in(path.parent)):
        if name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            try:
                text = safe_files.read_text(path.parent / name, safe_files.MAX_INDEX)
            except FastshardError:
                continue
            return set(as_dict(json_text.object_in(text).get("weight_map")))
        if (
            _LOADED.match(name)
            and name != path.name
            and (shapes := _shapes_in(path.parent / name)) is not None
        ):
            return set(shapes)
    return None
