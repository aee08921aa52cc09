"""Optimizer state of rank files: ``distrib_optim.pt`` next to them, or undistributed state in the rank files.

``distrib_optim.pt`` has one flat vector per buffer, with concatenated buckets, without padding and without
names. An MoE model has a list of two optimizers; only one of several ranks stores the first one. Parameters
are in the order of the model file, and the arguments determine the ends of buckets. The core compares master
weights with the parameters.
source: megatron/core/optimizer/{optimizer,distrib_optimizer}.py (save_parameter_state,
    get_parameter_state_dp_zero, state_dict),
megatron/training/checkpointing.py (get_distributed_optimizer_checkpoint_name)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import Finding
from ...common.ranks import format_rank
from ...common.records import dataclass, field
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Optimizer, Source, Unit
from ..base import PARAMETERS_ALONE, Contents, Found, as_dict, as_list, missing
from ..match_by_order import by_shape
from ..param_groups import by_decay
from .optim import MASTERS, param_groups, steps
from .optim_flat import Part, Place, UnknownPlaces, in_vector
from .optim_order import BUFFERS, count
from .rank_folders import DISTRIBUTED_OPTIMIZER, MegatronFiles

_EXPERT = compile_when_used(r"\.mlp\.experts\.")
#: source: megatron/core/distributed/distributed_data_parallel.py
_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000


@dataclass
class _Chunk:
    """A model, or the part of it in one virtual stage: its unit, and its parameters in order."""

    unit: Unit
    parts: list[Part]
    #: Names and shapes of tensors that are not declared as stored.
    flat: dict[str, tuple[str, list[int]]]


@dataclass
class _Rank:
    """The files of one rank."""

    file: int
    path: str
    coords: dict[str, int]
    chunks: list[_Chunk]
    #: The file of its distributed optimizer.
    beside: int | None
    state: dict[str, Any]

    @property
    def label(self) -> str:
        """The rank as named in messages."""
        return format_rank(self.coords)


#: Slot -> chunk -> name, shape, and ranges.
_Slots = dict[str, dict[int, list[tuple[str, list[int], list[Any]]]]]


@dataclass
class _Reading:
    found: Found[MegatronFiles]
    contents: Contents
    args: dict[str, Any]
    #: True if experts are in separate buffers.
    apart: bool
    assembled: list[Assembled] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def refuse(source: Source, found: Found[MegatronFiles], states: list[Any]) -> None:
    """Report that the optimizer state of a model without a table is not read, if there is any.

    It is in the order of the model's modules.
    """
    beside = found.seen.beside
    with_state = [n for n, state in enumerate(states) if n in beside or _list_optimizers(as_dict(state))]
    if not with_state:
        return
    first = next((n for n in with_state if n in beside), with_state[0])
    finding = _no_places(
        found.files[beside.get(first, first)].path,
        next((unit.rank for unit in source.files.units if unit.file == first), None),
        UnknownPlaces("no table states the order for this model"),
    )
    source.optimizer = Optimizer(
        moments_only=True, findings=[finding], files={found.files[file].path for file in beside.values()}
    )


def attach(
    source: Source,
    found: Found[MegatronFiles],
    contents: Contents,
    states: list[Any],
    args: dict[str, Any],
    ep: int,
) -> None:
    """Add master weights, slots and findings about them to a declaration."""
    beside = found.seen.beside
    ranks = [_rank(source, found, contents, n, as_dict(state), beside) for n, state in enumerate(states)]
    ranks = [rank for rank in ranks if rank.chunks]
    reading = _Reading(found, contents, args, ep > 1)
    within = any(_list_optimizers(rank.state) for rank in ranks)
    if not (beside or within):
        source.findings += _files_elsewhere(found.folder, args, ranks)
        return
    steps_by_file: dict[int, list[float]] = {}
    values: list[dict[str, Any]] = []
    for rank in ranks:
        groups = list(param_groups(rank.state.get("optimizer")))
        values += [group for group in groups if group not in values]
        steps_by_file[rank.file] = sorted(set(steps(groups)))
        try:
            if beside:
                _distributed(reading, rank, ranks)
            else:
                _whole(reading, rank)
        except UnknownPlaces as error:
            path = found.files[rank.beside if rank.beside is not None else rank.file].path
            reading.findings.append(_no_places(path, rank.label, error))
    reading.findings += _steps_agree(found, ranks, steps_by_file)
    absent = any(f.code == codes.MISSING_FILE for f in reading.findings)
    unknown = any(f.code != codes.MISSING_FILE for f in reading.findings)
    masters = not unknown and (absent or any(a.slot is None for a in reading.assembled))
    source.optimizer = Optimizer(
        masters=masters,
        moments_only=not masters,
        findings=reading.findings,
        files={found.files[file].path for file in beside.values()},
        steps={} if unknown else steps_by_file,
        groups=by_decay(values, args),
    )
    if values:
        source.files.values["optimizer"] = {"param_groups": values}
    if unknown or absent:
        # What is there of some ranks would be held against nothing of others.
        return
    source.files.assembled += reading.assembled
    every = {p.name for rank in ranks for chunk in rank.chunks for p in chunk.parts}
    source.optimizer.untrained.update(name for name in _buffers(source, contents) if name not in every)
    slots = sorted({a.slot for a in reading.assembled if a.slot})
    if slots:
        source.findings.append(
            Finding.of(
                codes.IGNORED, f"the optimizer state ({', '.join(slots)}) is only read with --optimizer"
            )
        )


def _files_elsewhere(folder: str, args: dict[str, Any], ranks: list[_Rank]) -> list[Finding]:
    if not args.get("use_distributed_optimizer") or not any("optimizer" in rank.state for rank in ranks):
        return []
    return [
        Finding.of(
            codes.UNEXPECTED_FILE,
            f"the distributed optimizer keeps its state in separate files ({DISTRIBUTED_OPTIMIZER}), and "
            "all of them are missing",
            severity="note",
            file=folder or None,
        )
    ]


def _no_places(path: str, rank: str | None, error: UnknownPlaces) -> Finding:
    return Finding.of(
        codes.MASTERS_NOT_CHECKABLE,
        f"the optimizer state has no names, and the positions of the parameters in it are uncertain: {error}",
        severity="error",
        file=path,
        rank=rank,
        expected=error.expected,
        got=error.got,
        help="leave out --optimizer, or load it with Megatron-LM and save it as torch_dist "
        "(fully_reshardable)",
    )


def _rank(
    source: Source,
    found: Found[MegatronFiles],
    contents: Contents,
    n: int,
    state: dict[str, Any],
    beside: Mapping[int, int],
) -> _Rank:
    """Return the rank's parameters in file order, which is the module's order without buffers."""
    units = [unit for unit in source.files.units if unit.file == n]
    declared = {
        pieces[0][2]: (name, shape)
        for group in source.files.assembled
        if group.file == n
        for name, shape, pieces in group.tensors
    }
    chunks: list[_Chunk] = []
    tensors = contents.tensors(n) if contents.readable(n) else []
    for unit in units:
        chunk = _Chunk(unit, [], {})
        for number, tensor in enumerate(tensors):
            path = [str(p) for p in tensor["path"]]
            if path[: len(unit.under)] != unit.under or len(path) != len(unit.under) + 1:
                continue
            name = path[-1]
            if BUFFERS.search(name):
                continue
            chunk.parts.append(Part(name, tensor["shape"], tensor["torch_dtype"]))
            if number in declared:
                chunk.flat[name] = declared[number]
        chunks.append(chunk)
    coords = units[0].coords if units else {}
    return _Rank(n, found.files[n].path, coords, chunks, beside.get(n), state)


def _list_optimizers(state: dict[str, Any]) -> list[dict[str, Any]]:
    """List the non-distributed optimizers in a rank file: one, or one for dense parameters and one for
    experts.
    """
    stored = state.get("optimizer")
    several = stored if isinstance(stored, list) else [stored]
    found = [one for one in several if isinstance(one, dict)]
    inner = [as_dict(one.get("optimizer")) or one for one in found]
    return found if any(isinstance(one.get("state"), dict) and one["state"] for one in inner) else []


def _buffers(source: Source, contents: Contents) -> Iterator[str]:
    """Yield the names of tensors in the rank files that are not parameters."""
    for unit in source.files.units:
        for tensor in contents.tensors(unit.file) if contents.readable(unit.file) else []:
            path = [str(p) for p in tensor["path"]]
            if path[:-1] == unit.under and BUFFERS.search(path[-1]):
                yield path[-1]


def _divided(rank: _Rank, apart: bool) -> tuple[list[list[Part]], list[list[Part]]]:
    """Divide each chunk's parameters into those of the first optimizer and those of the second one, for
    experts.
    """
    chunks = [chunk.parts for chunk in rank.chunks]
    dense = [[p for p in parts if not (apart and _EXPERT.search(p.name))] for parts in chunks]
    return dense, [[p for p in parts if apart and _EXPERT.search(p.name)] for parts in chunks]


def _keep(reading: _Reading, rank: _Rank, slots: _Slots, file: int) -> None:
    """Declare the state that was found, under the names of the unit with the parameters."""
    for kind, chunks in slots.items():
        slot = None if kind in MASTERS else kind
        for n, tensors in chunks.items():
            chunk = rank.chunks[n]
            own = [t for t in tensors if t[0] not in chunk.flat]
            renamed = [(*chunk.flat[t[0]], t[2]) for t in tensors if t[0] in chunk.flat]
            for stored, bases in ((own, chunk.unit.bases), (renamed, {})):
                if stored:
                    reading.assembled.append(
                        Assembled(file, chunk.unit.coords, chunk.unit.rank, slot, stored, bases=dict(bases))
                    )


def _distributed(reading: _Reading, rank: _Rank, ranks: list[_Rank]) -> None:
    """Read the flat vectors of ``distrib_optim.pt``."""
    found = reading.found
    if rank.beside is None:
        path = f"{rank.path.rpartition('/')[0]}/{DISTRIBUTED_OPTIMIZER}"
        why = f"{DISTRIBUTED_OPTIMIZER} next to each rank file, as for the others"
        help_ = "copy it from the node that wrote it, or take the parameters alone"
        reading.findings.append(missing(path, rank.coords, why, help_, run=PARAMETERS_ALONE))
        return
    stored = reading.contents(rank.beside)
    if stored is None:
        # An unreadable file is a finding already.
        return
    parts = stored if isinstance(stored, list) else [stored]
    dense, experts = _divided(rank, reading.apart)
    wanted = [dense, experts] if any(experts) else [dense]
    if len(parts) != len(wanted):
        raise UnknownPlaces("optimizers in the file", str(len(wanted)), str(len(parts)))
    for n, (part, chunks) in enumerate(zip(parts, wanted, strict=True)):
        if part is not None:
            slots = _vectors(reading, rank, as_dict(part), chunks, rank.beside)
            _keep(reading, rank, slots, rank.beside)
        elif n or not (first := _same_dense(reading, rank, ranks)):
            raise UnknownPlaces(f"no state of optimizer {n} in {found.files[rank.beside].path}")
        else:
            # Other ranks of the same parameters keep them: held against this rank's copies too.
            owner, content = first
            slots = _vectors(reading, rank, content, chunks, owner)
            _keep(reading, rank, slots, owner)


def _same_dense(reading: _Reading, rank: _Rank, ranks: list[_Rank]) -> tuple[int, dict[str, Any]] | None:
    """Find another rank's file with the same dense parameters, and return it with their state."""

    def place(one: _Rank) -> list[dict[str, int]]:
        return [{d: n for d, n in chunk.unit.coords.items() if d != "ep"} for chunk in one.chunks]

    for other in ranks:
        if other.beside is not None and other is not rank and place(other) == place(rank):
            stored = reading.contents(other.beside)
            if isinstance(stored, list) and stored and isinstance(stored[0], dict):
                return other.beside, stored[0]
    return None


def _vectors(
    reading: _Reading, rank: _Rank, buffers: dict[str, Any], chunks: list[list[Part]], file: int
) -> _Slots:
    """Read buffers by number: those of the first chunk, one per dtype, then those of the next chunk."""
    wanted: list[tuple[int, str, list[Part]]] = []
    for n, parts in enumerate(chunks):
        by_dtype: dict[str, list[Part]] = {}
        for part in parts:
            by_dtype.setdefault(part.dtype, []).append(part)
        wanted += [(n, dtype, of_one) for dtype, of_one in by_dtype.items()]
    numbers = sorted(int(key) for key in buffers if key.isdecimal())
    if buffers.get("buckets_coalesced") is not True:
        raise UnknownPlaces("separate buckets, as written before core 0.7, are not supported")
    if numbers != list(range(len(wanted))):
        raise UnknownPlaces("buffers of the rank", str(len(wanted)), str(len(numbers)))
    slots: _Slots = {}
    lengths = {i: t["shape"] for i, t in enumerate(reading.contents.tensors(file))}
    for number, (n, dtype, parts) in enumerate(wanted):
        buffer = as_dict(buffers[str(number)])
        if len(buffer) != 1 or not next(iter(buffer)).startswith(f"(torch.{dtype}, "):
            raise UnknownPlaces(f"buffer {number}", f"of {dtype}", ", ".join(buffer))
        vectors = {
            slot: index
            for slot, value in as_dict(next(iter(buffer.values()))).items()
            if (index := _tensor(value, len(lengths))) is not None
        }
        sizes = {tuple(lengths[index]) for index in vectors.values()}
        if "param" not in vectors:
            raise UnknownPlaces("no master weights show the positions of the parameters")
        if len(sizes) != 1 or len(next(iter(sizes))) != 1:
            raise UnknownPlaces(f"vectors of buffer {number}", "vectors of equal length", str(sorted(sizes)))
        for part, start, end in _placed(reading, rank, n, parts, next(iter(sizes))[0]):
            for slot, index in vectors.items():
                entry = (part.name, part.shape, [(end - start, file, index, start)])
                slots.setdefault(slot, {}).setdefault(n, []).append(entry)
    return slots


def _placed(reading: _Reading, rank: _Rank, chunk: int, parts: list[Part], length: int) -> list[Place]:
    """Locate parameters in a vector, by the arguments or, if these are not sufficient, by its length."""
    stage = rank.chunks[chunk].unit.coords.get("pp", 0)
    pp = count(reading.args, "pipeline_model_parallel_size") or 1
    tied = reading.args.get("untie_embeddings_and_output_weights") is False
    for part in parts:
        part.shared = (
            tied and pp > 1 and part.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        )
    for bucket in dict.fromkeys((_bucket(reading.args, rank) if stage == 0 and chunk == 0 else None, None)):
        places = in_vector(parts, bucket, length)
        if places is not None:
            return places
    raise UnknownPlaces(
        "the vector does not fit the model",
        f"{sum(p.numel for p in parts)} elements of {len(parts)} parameters, and alignment padding",
        f"{length} elements",
    )


def _bucket(args: dict[str, Any], rank: _Rank) -> int | None:
    """Return the number of elements after which a bucket is closed.

    source: megatron/training/training.py (get_model)
    """
    if not args.get("overlap_grad_reduce"):
        return None
    if number := count(args, "ddp_num_buckets"):
        return sum(part.numel for chunk in rank.chunks for part in chunk.parts) // number
    if size := count(args, "ddp_bucket_size"):
        return size
    world = count(args, "world_size") or 1
    model = prod(
        count(args, f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model", "context")
    )
    return max(_BUCKET, _BUCKET_OF_RANK * (world // model))


def _whole(reading: _Reading, rank: _Rank) -> None:
    """Read master weights and moments by parameter number, from a non-distributed optimizer.

    source: megatron/core/optimizer/optimizer.py (Float16OptimizerWithFloat16Params, FP32Optimizer)
    """
    optimizers = _list_optimizers(rank.state)
    dense, experts = _divided(rank, reading.apart)
    wanted = [dense, experts] if any(experts) else [dense]
    if len(optimizers) != len(wanted):
        raise UnknownPlaces("optimizers in the file", str(len(wanted)), str(len(optimizers)))
    tensors = reading.contents.tensors(rank.file)
    for one, chunks in zip(optimizers, wanted, strict=True):
        masters = one.get("fp32_from_fp16_params")
        base = as_dict(one.get("optimizer")) or one
        numbered = [as_list(as_dict(group).get("params")) for group in as_list(base.get("param_groups"))]
        states = as_dict(base.get("state"))
        groups = [[_stepped(states.get(str(n)), tensors) for n in group] for group in numbered]
        names = [(f"{n}:{p.name}", p.shape) for n, parts in enumerate(chunks) for p in parts]
        parts = {f"{n}:{p.name}": p for n, parts in enumerate(chunks) for p in parts}
        whole = sum(map(len, groups)) == len(names) and not any(None in group for group in groups)
        assigned = by_shape(names, groups) if whole else None
        if assigned is None:
            raise UnknownPlaces(
                "the shapes of its moments do not match the parameters in exactly one way",
                f"{len(names)} parameters",
                f"moments of {sum(map(len, groups))}",
            )
        slots: _Slots = {}
        for g, group in enumerate(assigned):
            firsts = as_list(masters[g]) if isinstance(masters, list) and g < len(masters) else []
            if masters is not None and len(firsts) != len(group):
                raise UnknownPlaces(f"master weights of group {g}", str(len(group)), str(len(firsts)))
            for at, key in enumerate(group):
                kept = {s: v for s, v in as_dict(states.get(str(numbered[g][at]))).items() if s != "step"}
                kept |= {"param": firsts[at]} if masters is not None else {}
                for slot, value in kept.items():
                    index = _tensor(value, len(tensors))
                    part = parts[key]
                    if index is None or tensors[index]["shape"] != part.shape:
                        raise UnknownPlaces(f"{slot} of {part.name} does not have the parameter's layout")
                    chunk = int(key.partition(":")[0])
                    entry = (part.name, part.shape, [(part.numel, rank.file, index, 0)])
                    slots.setdefault(slot, {}).setdefault(chunk, []).append(entry)
        _keep(reading, rank, slots, rank.file)


def _tensor(value: Any, most: int) -> int | None:
    """Return the index of the tensor to which a value refers."""
    index = as_dict(value).get("__tensor__")
    return index if isinstance(index, int) and 0 <= index < most else None


def _stepped(state: Any, tensors: Sequence[_core.StoredTensor]) -> list[int] | None:
    """Return the shape of a parameter, from its moments."""
    shapes = [
        tensors[index]["shape"]
        for slot, value in as_dict(state).items()
        if slot != "step" and (index := _tensor(value, len(tensors))) is not None
    ]
    return shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None


def _steps_agree(
    found: Found[MegatronFiles], ranks: list[_Rank], steps_by_file: dict[int, list[float]]
) -> list[Finding]:
    """Check that the optimizers of all ranks have taken the same number of steps."""
    first = next((steps_by_file[rank.file] for rank in ranks if steps_by_file[rank.file]), None)
    return [
        Finding.of(
            codes.MIXED_STEPS,
            "the optimizer steps differ between ranks",
            file=found.files[rank.file].path,
            rank=rank.label,
            expected=str(first),
            got=str(steps_by_file[rank.file]),
            help="copy all files from one step",
        )
        for rank in ranks
        if steps_by_file[rank.file] and steps_by_file[rank.file] != first
    ]
