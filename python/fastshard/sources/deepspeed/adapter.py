"""DeepSpeed checkpoints: ``latest``, ``global_stepN/``, model files, layer files and ZeRO partitions.

GPT-NeoX writes the same files with its own layer names. Such a framework is a :class:`Dialect`.
source: DeepSpeed runtime/engine.py (_get_ckpt_name, _get_zero_ckpt_name), runtime/pipe/module.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.ranks import rank_range
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Binding, Source, SourceFiles, Unit
from .. import hf_config
from ..base import Contents, Found, Options, as_dict, counted, lacking, missing
from ..choose_step import choose
from ..step_trackers import Step
from ..zero import optimizer_state, stage3
from ..zero.cross_checks import same_step
from ..zero.flat_state import tensor_index
from ..zero.pipeline_names import pipeline_names
from ..zero.zero_files import ZeroFiles
from . import autotp, experts
from .step_files import DeepSpeedFiles

#: A pipeline topology without a model axis omits ``-model_TT``.
_LAYER = compile_when_used(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_RANK = compile_when_used(r"^mp_rank_(\d+)_model_states\.pt$")
_ZERO3 = compile_when_used(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_OPTIM = compile_when_used(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_EXPERT = compile_when_used(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_EXPERTS_STATE = compile_when_used(r"^expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
#: Names of expert files before DeepSpeed 0.6, which do not include layers.
_OLD_EXPERT = compile_when_used(r"^expert_\d+_mp_rank_\d+_model_states\.pt$")


def steps_of(listing: Listing) -> dict[str, Step]:
    """Find folders with model files or partitions, by the step in their names.

    Node-local parts may be at any depth.
    """
    places: dict[tuple[int, str], None] = {}
    for file in listing.files:
        if any(pattern.match(file.name) for pattern in (_LAYER, _RANK, _ZERO3, _OPTIM)):
            places[file.root, file.folder] = None
    steps: dict[str, Step] = {}
    for root, folder in places:
        name = folder.rsplit("/", 1)[-1] or listing.roots[root].resolve().name
        steps.setdefault(name, Step()).folders.append((root, folder))
    return steps


@dataclass
class Files:
    """The files of one step, with sorted lists. Several root directories may contain the same file."""

    #: (pipeline layer, tp rank, file)
    layers: list[tuple[int, int, File]] = field(default_factory=list)
    #: (model-parallel rank, file)
    ranks: list[tuple[int, File]] = field(default_factory=list)
    #: ZeRO-3: (data-parallel rank, model-parallel rank, file)
    sliced: list[tuple[int, int, File]] = field(default_factory=list)
    #: (data-parallel rank, model-parallel rank, file)
    optim: list[tuple[int, int, File]] = field(default_factory=list)
    #: (MoE layer, expert, model-parallel rank, file)
    experts: list[tuple[int, int, int, File]] = field(default_factory=list)
    #: (expert-parallel rank, model-parallel rank, file)
    expp: list[tuple[int, int, File]] = field(default_factory=list)

    @classmethod
    def of(cls, inside: list[File]) -> Files:
        """Sort files by name.

        Raises:
            FastshardError: ``FS514`` for experts from before DeepSpeed 0.6.
        """
        files = cls()
        for file in inside:
            if _OLD_EXPERT.match(file.name):
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "experts of DeepSpeed before 0.6 are not supported: their files do not name their layer",
                    file=file.path,
                    help="load the checkpoint with DeepSpeed, which still can, and save it again",
                )
            if match := _LAYER.match(file.name):
                files.layers.append((int(match[1]), int(match[2] or 0), file))
            elif match := _RANK.match(file.name):
                files.ranks.append((int(match[1]), file))
            elif match := _ZERO3.match(file.name):
                files.sliced.append((int(match[1]), int(match[2]), file))
            elif match := _OPTIM.match(file.name):
                files.optim.append((int(match[1]), int(match[2]), file))
            elif match := _EXPERT.match(file.name):
                files.experts.append((counted(match[1], file), counted(match[2], file), int(match[3]), file))
            elif match := _EXPERTS_STATE.match(file.name):
                files.expp.append((counted(match[1], file), int(match[2]), file))
        files.experts.sort(key=lambda t: (*t[:3], t[3].root))
        files.expp.sort(key=lambda t: (t[1], t[0], t[2].root))
        files.layers.sort(key=lambda t: (t[0], t[1], t[2].root))
        files.ranks.sort(key=lambda t: (t[0], t[1].root))
        files.sliced.sort(key=lambda t: (t[1], t[0], t[2].root))
        files.optim.sort(key=lambda t: (t[1], t[0], t[2].root))
        return files


class Dialect(Protocol):
    """A framework whose files DeepSpeed writes, under its own names."""

    def take(
        self,
        found: Found[ZeroFiles],
        listing: Listing,
        contents: Contents,
        states: list[dict[str, Any]],
        options: Options,
    ) -> tuple[Source, optimizer_state.Naming] | None:
        """Declare the parameters and the names of their master weights; None if another framework wrote the
        save.
        """


class DeepSpeed:
    """Checkpoints written by ``engine.save_checkpoint``, with ZeRO stages 0 to 3 and pipelines."""

    name = "deepspeed"

    def __init__(self, dialects: Sequence[Dialect] = ()) -> None:
        self._dialects = dialects

    def detect(self, listing: Listing, options: Options) -> Found[DeepSpeedFiles] | None:
        """Look for ``layer_*``, ``mp_rank_*`` or ``zero_pp_rank_*`` files in any folder."""
        if listing.single:
            return None
        steps = steps_of(listing)
        if not steps:
            return None
        chosen = choose(listing, steps, options, ("latest",))
        places = chosen.step.folders
        files = Files.of([f for f in listing.files if (f.root, f.folder) in places])
        # ZeRO-3 has a model file per data-parallel rank: the first one of each model-parallel rank says
        # what the others say too, and holds the buffers.
        first = {mp: file for _, mp, file in reversed(files.sliced)}
        ranks = files.ranks or [(mp, first[mp]) for mp in sorted(first)]
        others = [t for t in files.sliced if files.ranks or t[2] is not first[t[1]]]
        layer_files = [file for _, _, file in files.layers]
        # The rank files come first: their arguments say what else must be there.
        order = [file for _, file in ranks] + layer_files
        order += [file for _, _, file in [*others, *files.optim]]
        order += [t[-1] for t in files.experts] + [t[-1] for t in files.expp]
        index = {id(file): i for i, file in enumerate(order)}
        seen = DeepSpeedFiles(
            places=tuple(places),
            ranks=tuple((rank, index[id(file)]) for rank, file in ranks),
            sliced=tuple((dp, mp, index[id(file)]) for dp, mp, file in files.sliced),
            layers=tuple((layer, tp, index[id(file)]) for layer, tp, file in files.layers),
            widths=_widths(files.layers),
            optim=tuple((dp, mp, index[id(file)]) for dp, mp, file in files.optim),
            experts=tuple((layer, e, mp, index[id(file)]) for layer, e, mp, file in files.experts),
            expp=tuple((ep, mp, index[id(file)]) for ep, mp, file in files.expp),
        )
        return Found(self, "DeepSpeed", order, seen, places[0][1], list(chosen.findings), step=chosen.name)

    def declare(
        self, found: Found[DeepSpeedFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare the parameters, under GPT-NeoX's or the model's names, and their fp32 master weights."""
        states = [as_dict(contents(file)) for _, file in found.seen.ranks]
        _refuse(found, states)
        experts.refuse(found, states)
        declared = next(
            (
                one
                for d in self._dialects
                if (one := d.take(found, listing, contents, states, options)) is not None
            ),
            None,
        )
        if declared is not None:
            source, name_of = declared
        else:
            source, name_of = _plain(found, listing, contents, states, options)
        if found.seen.sliced:
            # ZeRO-3 leaves only the buffers in `module`; parameters there are empty.
            of_file = dict(zip((file for _, file in found.seen.ranks), states, strict=True))
            for unit in source.files.units:
                state = of_file.get(unit.file, {})
                unit.only = stage3.buffers(contents, unit.file, state)
                source.findings += stage3.buffers_left_out(found, unit, state)
        mixture = experts.take(source, found, contents, states)
        optimizer_state.attach(source, found, contents, states, name_of, mixture)
        return source


def _widths(layers: list[tuple[int, int, File]]) -> tuple[int, int]:
    """Return the numbers of digits of layer and rank numbers in the file names; 0 without ranks."""
    for _, _, file in layers:
        if match := _LAYER.match(file.name):
            return min(2, len(match[1])), min(2, len(match[2])) if match[2] else 0
    return 2, 2


def _refuse(found: Found[DeepSpeedFiles], states: list[dict[str, Any]]) -> None:
    """Refuse unsupported layouts, and name them in the error."""
    for i, state in enumerate(states):
        config = as_dict(state.get("ds_config"))
        zero_config = as_dict(config.get("zero_optimization"))
        mics = zero_config.get("mics_shard_size")
        what = None
        if isinstance(mics, int) and mics > 0:
            what = f"DeepSpeed MiCS (mics_shard_size {mics})"
        if what:
            raise FastshardError.of(codes.UNSUPPORTED, f"{what} is not supported", file=found.files[i].path)


def _plain(
    found: Found[DeepSpeedFiles],
    listing: Listing,
    contents: Contents,
    states: list[dict[str, Any]],
    options: Options,
) -> tuple[Source, optimizer_state.Naming]:
    """Declare a model other than GPT-NeoX under its own names, with full tensors unless a layout states
    otherwise.
    """
    seen = found.seen
    source = Source(
        found.framework,
        step=found.step,
        files=SourceFiles(ranks=seen.list_ranks()),
        binding=Binding(pass_unknown=True),
    )
    source.index.is_provable = any(state.get("param_shapes") for state in states)
    keys = ("iteration", "global_steps", "global_samples", "dp_world_size", "ds_version")
    source.files.values = {k: states[0][k] for k in keys if states and k in states[0]}
    tp = _tensor_parallel(seen, states)
    divided = autotp.degree(states) > 1
    if divided and options.layout is None:
        autotp.take(source, found, contents, states)
    elif tp > 1 and options.layout is None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "tensor-parallel shards of a model with an unknown layout",
            file=found.files[0].path,
            expected="GPT-NeoX's layer names, or one tensor-parallel rank",
            got=f"tp {tp}",
            help="describe in your own layout how its tensors are divided",
            run=["--layout FILE.toml"],
        )
    source.binding.degrees = {"tp": tp} if tp > 1 else {}
    parts = {rank for rank, *_ in (*seen.optim, *seen.sliced)}
    source.binding.other_degrees = {"dp": len(parts)} if parts else {}
    if options.vocab_size:
        source.binding.vocab_size = options.vocab_size
    if seen.pipeline:
        for layer, rank, file in seen.layers:
            source.files.units.append(
                Unit(
                    file=file,
                    prefix=f"{layer}.",
                    coords={"tp": rank} if tp > 1 else {},
                    rank=f"tp {rank}",
                )
            )
        _all_ranks(found, states, source.findings)
        return source, pipeline_names(found, contents)
    for (rank, file), state in zip(seen.ranks, states, strict=True):
        source.files.units.append(
            Unit(file=file, under=["module"], coords={"tp": rank} if tp > 1 else {}, rank=f"mp {rank}")
        )
        values = as_dict(state.get("module")).values()
        if (
            not seen.sliced
            and contents.readable(file)
            and not any(tensor_index(v) is not None for v in values)
        ):
            source.findings.append(_no_tensors(found.files[file].path))
    _all_ranks(found, states, source.findings)
    config, path = hf_config.config_of(listing, found.folder, options)
    names = {str(name) for state in states for name in as_dict(state.get("module"))}
    hf_config.describe(source, listing, config, path, names)
    if divided and source.binding.generic:
        # The model file itself tells how ranks divide each tensor, whatever the model.
        source.binding.layout, source.binding.table = None, None
        why = "merge AutoTP's ranks first, then convert the result"
        source.model = replace(source.model, family=None, no_table=why)
    return source, str


def _tensor_parallel(seen: DeepSpeedFiles, states: list[dict[str, Any]]) -> int:
    """Return the tensor-parallel degree that a file states or that the file names imply."""
    tp_degree = as_dict(states[0].get("checkpoint_parallel_dimensions")).get("tp_degree") if states else None
    if isinstance(tp_degree, int):
        return tp_degree
    if seen.pipeline:
        return max((rank for _, rank, _ in seen.layers), default=0) + 1
    return len({rank for rank, _ in seen.ranks})


def _no_tensors(path: str) -> Finding:
    return Finding.of(
        codes.MISSING_FILE,
        "the rank file holds no tensors, and all layer files are missing",
        file=path,
        expected="layer_LL-model_TT-model_states.pt next to it",
        got="none",
        help="copy the layer files of this step from the nodes that wrote them",
    )


def _all_ranks(found: Found[DeepSpeedFiles], states: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Check that all model-parallel ranks exist and are from the same step."""
    folder = found.folder
    findings += same_step(found, states, "mp")
    worlds = [w for s in states if isinstance(w := s.get("mp_world_size"), int) and 0 < w <= 1 << 20]
    pattern = (
        "zero_pp_rank_0_mp_rank_{:02d}_model_states.pt"
        if found.seen.sliced
        else "mp_rank_{:02d}_model_states.pt"
    )
    for rank, last in lacking((rank for rank, _ in found.seen.ranks), 0, (worlds[0] if worlds else 0) - 1):
        name = pattern.format(rank)
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                {"mp": rank_range(rank, last)},
                f"mp_world_size {worlds[0]} in the other rank files",
                f"copy {name} from the node that ran model-parallel rank {rank}",
                upto=pattern.format(last) if last > rank else None,
            )
        )
