"""Megatron-LM checkpoints of the legacy form: ``iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

Layer numbers are relative to the pipeline stage (or virtual stage), and expert numbers are relative to the
expert-parallel rank.
source: Megatron-LM megatron/training/checkpointing.py
"""

from __future__ import annotations

import math
import re
from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.ranks import rank_range
from ...common.regex import compile_when_used
from ...layouts import tables
from ...layouts.declaration import Assembled, Binding, Source, Unit
from ...models import megatron, megatron_sizes
from ...models.model import Lack
from ..base import Contents, Found, Options, as_dict, counted, missing, unexpected
from ..choose_step import choose
from ..rank_values import differing
from ..step_trackers import Step
from . import arguments, of_ranks, table_match
from .rank_folders import DISTRIBUTED_OPTIMIZER, MegatronFiles
from .rank_grid import RankGrid

_RANK = compile_when_used(
    r"^(?:(.*)/)?mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/(?:model_optim_rng|model_rng)\.pt$"
)
#: Before this version, the rows of `linear_qkv` were in another order. source: checkpointing.py,
#: fix_query_key_value_ordering
_ROWS_BY_GROUP = 2.0
_TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = compile_when_used(r"^decoder\.layers\.(\d+)\.")
_EXPERT = compile_when_used(r"\.mlp\.experts\.(?:local_experts\.(\d+)\.|linear_fc1\.weight(\d+)$)")
_FLAT = compile_when_used(r"^decoder\.layers\.(\d+)\.mlp\.experts\.weight([12])$")
#: Maximum number of missing files to name one by one.
_NAMED = 100
_MODEL = compile_when_used(r"^model(\d*)$")


class Megatron:
    """Directories with one folder per model-parallel rank."""

    name = "megatron"

    def detect(self, listing: Listing, options: Options) -> Found[MegatronFiles] | None:
        """Look for rank folders; the tracker file selects the step."""
        if listing.single:
            return None
        matched = [(f, m) for f in listing.files if (m := _RANK.match(f.path))]
        if not matched:
            return None
        steps: dict[str, list[tuple[File, re.Match[str]]]] = {}
        for file, match in matched:
            folder = match[1] or ""
            step = folder.rpartition("/")[2] or listing.roots[file.root].resolve().name
            steps.setdefault(step, []).append((file, match))
        taken = choose(
            listing,
            {
                name: Step(list(dict.fromkeys((f.root, m[1] or "") for f, m in files)))
                for name, files in steps.items()
            },
            options,
            (_TRACKER,),
        )
        folders = set(taken.step.folders)
        chosen = sorted(
            (t for t in steps[taken.name] if (t[0].root, t[1][1] or "") in folders),
            key=lambda t: (int(t[1][2]), int(t[1][3] or 0), int(t[1][4] or 0), t[0].root),
        )
        files = [f for f, _ in chosen]
        # Beside a rank file may lie its distributed optimizer.
        own = {(f.root, f.folder): f for f in listing.files if f.name == DISTRIBUTED_OPTIMIZER}
        beside = {n: own[f.root, f.folder] for n, f in enumerate(files) if (f.root, f.folder) in own}
        seen = MegatronFiles(
            suffixes=tuple(tuple(counted(n, f) for n in m.group(2, 3, 4) if n) for f, m in chosen),
            beside={n: len(files) + i for i, n in enumerate(beside)},
        )
        files += beside.values()
        return Found(
            self,
            "Megatron-LM",
            files,
            seen,
            folder=chosen[0][1][1] or "",
            findings=list(taken.findings),
            step=taken.name,
        )

    def declare(
        self, found: Found[MegatronFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare the topology from the arguments, and each stage's first layer from the number of layers
        before it.
        """
        # The optimizer's modules are of use to no other adapter.
        from . import optim_legacy

        states = [contents(i) for i in range(len(found.seen.suffixes))]
        for file, state in zip(found.files, states, strict=False):
            version = as_dict(state).get("checkpoint_version")
            before_core = any(
                str(n).startswith("language_model") for n in as_dict(as_dict(state).get("model"))
            )
            if version is None and before_core and len(states) > 1:
                # Megatron-LM takes it so too. source: megatron/training/checkpointing.py
                # (get_checkpoint_version)
                version = 0
            if isinstance(version, (int, float)) and version < _ROWS_BY_GROUP:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "the rows of queries, keys and values are in the order of old versions",
                    file=file.path,
                    expected=f"checkpoint_version {_ROWS_BY_GROUP} or later",
                    got=str(version),
                    help="load and save it with a current Megatron-LM, which reorders the rows",
                )
        source = Source(found.framework, step=found.step, binding=Binding(layout="megatron.legacy"))
        source.binding.vocab_size = options.vocab_size
        carried = next((a for s in states if (a := arguments.arguments(s))), {})
        args, lacking = arguments.override(source, carried, options, found.files[0].path)
        models = [self._models(s) for s in states]
        names = {name for model in models for _, names in model for name in names}
        grid = RankGrid.of(found, args, arguments.mixture(args, names))
        source.binding.degrees = grid.degrees
        source.files.ranks = {i: grid.coords(place) for i, place in enumerate(grid.places)}
        source.files.ranks |= {file: source.files.ranks[i] for i, file in found.seen.beside.items()}
        source.index.is_provable = bool(args)
        source.files.values = {"iteration": carried.get("iteration"), "args": carried} if carried else {}
        self._ranks(found, states, grid, source)
        chunks = [[own for _, own in model] for model in models]
        files = list(zip(range(len(chunks)), grid.places, chunks, strict=True))
        of_ranks.judge_stages(source, found, files, grid.pp)
        if (mixed := arguments.find_mixed_table(args, names)) is not None:
            source.binding.layout = mixed
        if (lack := _beyond(args, names, grid, str(source.binding.layout))) is not None:
            source.binding.layout = "megatron.legacy"
            _whole(source, found, contents, states, models, args, grid, lack)
            return source
        if grid.is_mixture:
            _refuse_experts(found, grid)
            _check_experts(args, grid, found.files[0].path)
        arguments.describe(source, args, names, lacking, arguments.find_required_class(options))
        self._units(grid, models, _experts_of_rank(args, grid, names), source)
        if source.binding.facts["experts_flat"]:
            _flat_experts(grid, contents, source)
        optim_legacy.attach(source, found, contents, states, args, grid.ep)
        return source

    @staticmethod
    def _models(state: Any) -> list[tuple[str, list[str]]]:
        """Return (key, tensor names) for each model chunk: ``model``, or ``model0``, ``model1``, ...

        The numbered keys belong to virtual stages.
        """
        if not isinstance(state, dict):
            return []
        found = [(key, m) for key in state if (m := _MODEL.match(str(key))) and isinstance(state[key], dict)]
        found.sort(key=lambda t: int(t[1][1] or 0))
        return [(key, [str(name) for name in state[key]]) for key, _ in found]

    @staticmethod
    def _units(
        grid: RankGrid, models: list[list[tuple[str, list[str]]]], experts: int, source: Source
    ) -> None:
        """Add units with the number of their first layer, ordered by virtual stage, then by stage.

        The number of a rank's first expert is the number of experts on the ranks before it.
        """
        counts: dict[tuple[int, int], int] = {}
        for (_, stage, _), model in zip(grid.places, models, strict=True):
            for chunk, (_, names) in enumerate(model):
                layers = [int(m[1]) + 1 for name in names if (m := _LAYER.match(name))]
                counts[chunk, stage] = max(counts.get((chunk, stage), 0), max(layers, default=0))
        bases, at = {}, 0
        for place in sorted(counts):
            bases[place] = at
            at += counts[place]
        for i, (rank, model) in enumerate(zip(grid.places, models, strict=True)):
            tensor_rank, stage, expert_rank = rank
            for chunk, (key, names) in enumerate(model):
                if tensor_rank < grid.tp and expert_rank < grid.ep:
                    flat = any(_FLAT.search(name) for name in names)
                    first = {"E": expert_rank * experts} if grid.ep > 1 else {}
                    source.files.units.append(
                        Unit(
                            file=i,
                            under=[key],
                            coords=grid.coords_of_tensors(rank),
                            bases={"L": bases[chunk, stage]} | first,
                            rank=grid.rank(rank),
                            only=[name for name in names if not _FLAT.search(name)] if flat else None,
                        )
                    )

    @staticmethod
    def _ranks(found: Found[MegatronFiles], states: list[Any], grid: RankGrid, source: Source) -> None:
        """Check that all ranks exist, and that they agree on the iteration and the arguments."""
        folder = found.folder
        degrees = f"tensor_model_parallel_size {grid.tp} x pipeline_model_parallel_size {grid.pp}"
        degrees += f" x expert_model_parallel_size {grid.ep}" if grid.ep > 1 else ""
        gaps = grid.find_gaps()
        for first, last in gaps[:_NAMED]:
            name, end = grid.folder(first), grid.folder(last)
            coords = {**grid.coords(first), "tp": rank_range(first[0], last[0])}
            node = f"the node that ran {grid.long_rank(first)}"
            source.findings.append(
                missing(
                    f"{folder}/{name}/model_optim_rng.pt" if folder else f"{name}/model_optim_rng.pt",
                    coords,
                    f"{degrees} in the arguments",
                    f"copy {name} from {node}"
                    if first == last
                    else f"copy {name} to {end} from the nodes that ran them",
                    upto=None if first == last else f"{end}/model_optim_rng.pt",
                )
            )
        if len(gaps) > _NAMED:
            rest = sum(last[0] - first[0] + 1 for first, last in gaps[_NAMED:])
            source.findings.append(
                Finding.of(
                    codes.MISSING_FILE,
                    f"{rest} more missing files",
                    file=folder or None,
                    expected=f"{degrees} in the arguments",
                    got=f"{len(set(grid.places))} rank files",
                )
            )
        known = [(i, arguments.arguments(s)) for i, s in enumerate(states) if isinstance(s, dict)]
        for i, args in known:
            source.findings += _differs(found, grid, i, (states[known[0][0]], states[i]), (known[0][1], args))
        of_ranks.judge(source, found, [(i, grid.places[i], args) for i, args in known], grid.tp, grid.pp)


def _differs(
    found: Found[MegatronFiles],
    grid: RankGrid,
    i: int,
    states: tuple[dict[str, Any], dict[str, Any]],
    args: tuple[dict[str, Any], dict[str, Any]],
) -> list[Finding]:
    """Report differences between a rank file and the first one, given the state and the arguments of both."""
    findings = []
    first, own = args
    if any(n >= most for n, most in zip(grid.places[i], (grid.tp, grid.pp, grid.ep), strict=True)):
        degrees = f"{grid.tp} x {grid.pp}" + (f" x {grid.ep}" if grid.ep > 1 else "")
        why = f"{grid.long_rank(grid.places[i])} is beyond the {degrees} ranks of this checkpoint"
        findings.append(unexpected(found.files[i].path, why))
    keys: tuple[str, ...] = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "padded_vocab_size",
        "num_experts",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
    )
    keys = (*keys, *sorted(megatron.SETTINGS.difference(keys)))
    findings += differing(
        codes.RANKS_DISAGREE,
        [(f"args.{key}", first.get(key), own.get(key)) for key in keys],
        file=found.files[i].path,
        help="copy all files from one run",
    )
    steps = [("iteration", *states), ("args.iteration", first, own)]
    return findings + differing(
        codes.MIXED_STEPS,
        [(what, here.get("iteration"), there.get("iteration")) for what, here, there in steps],
        file=found.files[i].path,
        rank=grid.rank(grid.places[i]),
        help="copy all files from one step",
    )


def _check_experts(args: dict[str, Any], grid: RankGrid, file: str) -> None:
    """Raise ``FS211`` if experts are not evenly divisible among ranks."""
    experts = megatron_sizes.size(args, "num_experts")
    if experts is not None and experts % grid.ep:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "args.num_experts",
            file=file,
            expected=f"a multiple of {grid.ep}",
            got=str(experts),
        )


def _beyond(args: dict[str, Any], names: set[str], grid: RankGrid, layout: str) -> Lack | None:
    """Find a part of the model, or a division among ranks, for which the table has no rule."""
    if (lack := arguments.find_lack_of_delta(args, names)) is not None:
        return lack
    is_mixed = layout in megatron_sizes.MIXED_TABLES
    table = tables.table(layout)
    strange = sorted(name for name in names if table.rule_of(name) is None)
    strange.sort(key=lambda name: name.endswith("_extra_state"))
    if strange:
        return Lack("tensor", "one that Llama or Mixtral has", strange[0])
    if not is_mixed and arguments.mixture(args, names) and (found := arguments.beyond(args)):
        return Lack(*found)
    axes = megatron_sizes.axes_of(args, False)
    groups, per_group = axes.get("g"), axes.get("r")
    if is_mixed and args.get("multi_latent_attention"):
        if grid.tp > 1 and args.get("transformer_impl") == "local":
            return Lack("transformer_impl", "transformer_engine, which does not divide latents", "local")
    elif groups and groups % grid.tp:
        ranks, rest = divmod(grid.tp, groups)
        if rest or not per_group or per_group % ranks:
            return Lack("num_query_groups", f"a multiple or a divisor of {grid.tp}", str(groups))
    return None


def _refuse_experts(found: Found[MegatronFiles], grid: RankGrid) -> None:
    """Raise an error for experts whose ranks save no files, or save files under the same name."""
    if grid.topology.shares_files:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "more ranks divide the experts than the other tensors: files of several ranks have the same name",
            file=found.files[0].path,
            expected=f"expert_tensor_parallel_size that divides {grid.tp}",
            got=str(grid.etp),
            help="save it in the torch_dist format, which states where each part belongs",
        )
    stray = [i for i, rank in enumerate(grid.places) if grid.of_expert(rank) is None]
    # Such a run saves the files of its first etp x ep ranks only.
    unsaved = grid.etp * grid.ep < grid.tp and len({place[0] for place in grid.places}) < grid.tp
    if stray or unsaved:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "experts with a separate tensor-parallel degree: a run saves other rank files than these",
            file=found.files[stray[0] if stray else 0].path,
            expected=f"the files of the {grid.etp} x {grid.ep} ranks that hold experts",
            got=f"{len(grid.places)} files of {grid.tp} x {grid.ep}",
            help="save it in the torch_dist format, which states where each part belongs",
        )


def _whole(
    source: Source,
    found: Found[MegatronFiles],
    contents: Contents,
    states: list[Any],
    models: list[list[tuple[str, list[str]]]],
    args: dict[str, Any],
    grid: RankGrid,
    lack: Lack,
) -> None:
    """Declare full tensors, using the division among ranks that names and arguments prove."""
    # Few need it, and its patterns take longer to compile than a small checkpoint to open.
    from . import merge_without_table, optim_legacy

    _refuse_experts(found, grid)
    places, tensors = [], {}
    for i, (rank, model) in enumerate(zip(grid.places, models, strict=True)):
        if rank[0] < grid.tp and rank[2] < grid.ep:
            source.files.units.append(Unit(file=i, rank=grid.rank(rank), only=[]))
            tensors[i] = contents.tensors(i)
            places += [
                merge_without_table.Place(
                    i,
                    found.files[i].path,
                    grid.rank(rank),
                    key,
                    n,
                    rank[1],
                    rank[0],
                    grid.of_expert(rank) or 0,
                    rank[2],
                )
                for n, (key, _) in enumerate(model)
            ]
    wholes = merge_without_table.Wholes(args, grid.tp, grid.etp, grid.ep)
    wholes.read(places, tensors)
    absent = any(f.severity == "error" for f in source.findings)
    source.findings += wholes.findings
    for name in [] if absent or wholes.findings else list(wholes.incomplete())[:_NAMED]:
        source.findings.append(
            Finding.of(codes.MISSING_TENSOR, "a rank's slice of this tensor is missing", tensor=name)
        )
    source.files.assembled += wholes.assembled()
    if wholes.left:
        source.findings.append(
            Finding.of(
                codes.IGNORED,
                f"{len(wholes.left)} tensors are FP8 scales and buffers, not weights",
                tensor=wholes.left[0],
            )
        )
    shapes = wholes.shapes()
    arguments.describe(source, args, set(shapes))
    described = table_match.unnamed(
        tables.table("megatron.legacy"), shapes, source.binding.axes, source.binding.facts, args
    )
    if described is None:
        # To the table they are those of one rank.
        source.binding.degrees = {}
    else:
        table_match.leave_unnamed(source, lack, shapes, args)
    optim_legacy.refuse(source, found, states)


def _experts_of_rank(args: dict[str, Any], grid: RankGrid, names: set[str]) -> int:
    experts = megatron_sizes.size(args, "num_experts")
    if experts is not None:
        return experts // grid.ep
    numbers = (m[1] or m[2] for name in names if (m := _EXPERT.search(name)))
    return max((int(n) + 1 for n in numbers), default=0)


def _flat_experts(grid: RankGrid, contents: Contents, source: Source) -> None:
    """Declare GroupedMLP's weights as they are stored: [E, H, 2*F] and [E, F, H], whatever their shapes.

    source: megatron/core/transformer/moe/experts.py, ``self.weight1.view(num_local_experts, hidden_size,
        -1)``
    """
    experts, hidden = source.binding.axes.get("E"), source.binding.axes.get("H")
    if not experts or not hidden:
        raise FastshardError.of(
            codes.FACT_UNKNOWN,
            "the shapes of experts.weight1 and weight2 do not show how many experts they hold",
            help="save the rank files again with their arguments (num_experts, hidden_size)",
        )
    local = experts // grid.ep
    for unit in source.files.units:
        tensors: list[Any] = []
        for number, tensor in enumerate(contents.tensors(unit.file)):
            under, name = [str(p) for p in tensor["path"][:-1]], str(tensor["path"][-1])
            match = _FLAT.search(name)
            if match is None or under != unit.under:
                continue
            total = math.prod(tensor["shape"])
            first = match[2] == "1"
            whole = [hidden, total // hidden] if first else [total // hidden, hidden]
            shape = (
                [local, hidden, total // (local * hidden)]
                if first
                else [local, total // (local * hidden), hidden]
            )
            if tensor["shape"] != whole or math.prod(shape) != total:
                shape = tensor["shape"]
            layer = int(match[1]) + unit.bases["L"]
            named = f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"
            tensors.append((named, shape, [(total, unit.file, number, 0)]))
        if tensors:
            source.files.assembled.append(
                Assembled(unit.file, unit.coords, unit.rank, None, tensors, frozen=True)
            )
