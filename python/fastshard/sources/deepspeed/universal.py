"""DeepSpeed universal checkpoints: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``.

Stages 1 and 2 write ``{param: tensor, cat_dim}``, stage 3 a flat tensor. The model files are copied next to
them; they state shapes, frozen parameters and aliases.
source: DeepSpeed checkpoint/ds_to_universal.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.listing import File, Listing
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Binding, Optimizer, Source, Unit
from .. import hf_config
from ..base import Contents, Found, Options, as_dict, counted, missing
from ..choose_step import choose
from ..param_groups import joined, numbered
from ..step_trackers import Step
from ..zero import stage3
from ..zero.flat_state import Model, name_list, scalar, tensor_index
from ..zero.zero_files import ZeroFiles

_PARAMETER = compile_when_used(r"^(?:(.*)/)?zero/([^/]+)/([^/]+)\.pt$")
#: Stage 3 has one model file per data-parallel rank.
_MODEL = compile_when_used(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
#: The parameter's values among the files in its folder.
_VALUES = "fp32"
_STEP = "step"
#: Optimizer state common to all parameters.
_OF_ALL = "zero/optimizer_state.pt"


@dataclass(frozen=True)
class UniversalFiles(ZeroFiles):
    """The files of parameters, and the model files next to them."""

    #: (parameter, kind, file): the kind is ``fp32``, ``exp_avg``, ``step`` etc.
    parts: tuple[tuple[str, str, int], ...] = ()
    #: The file of the optimizer state common to all parameters.
    of_all: int | None = None


class Universal:
    """Checkpoints written by ``ds_to_universal``."""

    name = "universal"

    def detect(self, listing: Listing, options: Options) -> Found[UniversalFiles] | None:
        """Look for ``zero/<parameter>/fp32.pt``."""
        if listing.single:
            return None
        folders: dict[str, Step] = {}
        for file in listing.files:
            match = _PARAMETER.match(file.path)
            if match and match[3] == _VALUES:
                folder = match[1] or ""
                step = folder.rsplit("/", 1)[-1] or listing.roots[file.root].resolve().name
                places = folders.setdefault(step, Step()).folders
                if (file.root, folder) not in places:
                    places.append((file.root, folder))
        if not folders:
            return None
        chosen = choose(listing, folders, options, ("latest_universal",))
        places = chosen.step.folders
        parts: dict[tuple[str, str], File] = {}
        models: dict[tuple[int, int], File] = {}
        sliced: set[tuple[int, int]] = set()
        others: list[File] = []
        of_all: list[File] = []
        for file in sorted(listing.files, key=lambda f: (f.path, f.root)):
            folder = file.path.removesuffix(_OF_ALL).rstrip("/")
            if file.path.endswith(_OF_ALL) and (file.root, folder) in places:
                of_all.append(file)
            match = _PARAMETER.match(file.path)
            if match and (file.root, match[1] or "") in places:
                parts.setdefault((match[2], match[3]), file)
            elif (match := _MODEL.match(file.name)) and (file.root, file.folder) in places:
                place = counted(match[2], file), counted(match[1] or "0", file)
                known = models.setdefault(place, file)
                if known is file and match[1]:
                    sliced.add(place)
                elif known is not file and known.root == file.root:
                    # A checkpoint for all stages has a model file by either name.
                    others.append(file)
        ordered = sorted(models)
        files = [*(models[place] for place in ordered), *parts.values(), *of_all[:1], *others]
        # The first model file of each model-parallel rank says what the others say too.
        first = {mp: i for i, (mp, _) in reversed(list(enumerate(ordered)))}
        seen = UniversalFiles(
            places=tuple(places),
            ranks=tuple(sorted(first.items())),
            sliced=tuple((dp, mp, i) for i, (mp, dp) in enumerate(ordered) if (mp, dp) in sliced),
            parts=tuple((*part, len(ordered) + i) for i, part in enumerate(parts)),
            of_all=len(ordered) + len(parts) if of_all else None,
        )
        findings = list(chosen.findings)
        return Found(self, "DeepSpeed universal", files, seen, places[0][1], findings, step=chosen.name)

    def declare(
        self, found: Found[UniversalFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare full fp32 tensors; the model files next to them state which tensors must exist."""
        seen = found.seen
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        source.binding.vocab_size = options.vocab_size
        ranks = [
            Model(found, contents, as_dict(contents(i)), i, mp, {}, {"mp": mp}, str) for mp, i in seen.ranks
        ]
        # With several model-parallel ranks the model files describe shards.
        model = ranks[0] if len(ranks) == 1 else None
        state = ranks[0].state if ranks else {}
        keys = ("iteration", "global_steps", "ds_version")
        source.files.values = {k: state[k] for k in keys if k in state}
        listed = {
            name: shape for rank in ranks for group in rank.shapes() or [] for name, shape in group.items()
        }
        shapes = listed if model else {}
        aliases = model.aliases() if model else {}
        source.index.is_provable = bool(shapes)
        have = {name for name, slot, _ in seen.parts if slot == _VALUES}
        # A copy of the 16-bit one, where the owner's is what was trained; or a buffer, widened whatever its
        # dtype was, that the model file holds as it is.
        apart = {alias for alias, owner in aliases.items() if owner in have}
        apart |= _buffers(model) if model else set()
        world = state.get("dp_world_size")
        padding = max(0, world - 1) if isinstance(world, int) else 0
        parts = _parts(found, contents, apart, shapes, padding)
        source.findings += parts.findings
        values = parts.slots.setdefault(_VALUES, [])
        trained = {name: (shape, ranges) for name, shape, ranges in values}
        stored = bool(model and state.get("module")) and not seen.sliced
        source.optimizer = Optimizer(
            masters=True,
            weights="masters",
            params_stored=stored,
            findings=_moments_missing(found.folder, parts.slots, shapes),
            steps=parts.steps,
        )
        values += [(alias, *trained[owner]) for alias, owner in aliases.items() if owner in trained]
        source.optimizer.untrained.update({name for name, *_ in values} - set(shapes) if shapes else ())
        source.files.assembled += [
            Assembled(seen.parts[0][2], {}, None, None if slot == _VALUES else slot, tensors)
            for slot, tensors in parts.slots.items()
        ]
        if len(ranks) > 1:
            source.findings += _frozen_shards(ranks, have)
        if model:
            self._beside(source, model, contents, seen.sliced)
        config, config_file = hf_config.config_of(listing, found.folder, options)
        names = have.union(*(rank.names() for rank in ranks))
        hf_config.describe(source, listing, config, config_file, names)
        source.findings += _report_unknown_shapes(found.folder, parts.flat)
        source.findings += _parameters_missing(found.folder, set(listed) - have)
        source.findings += _steps_differ(found, parts.steps)
        if seen.of_all is not None:
            # A number stands for a group as the model files list them. source: ds_to_universal.py
            # (_save_optimizer_state)
            groups = as_dict(contents(seen.of_all)).get("param_groups")
            each = [numbered(groups, [list(group) for group in rank.shapes() or []]) for rank in ranks]
            source.optimizer = replace(source.optimizer, groups=joined(each))
        if parts.steps:
            source.files.values["optimizer"] = {"step": max(max(s) for s in parts.steps.values())}
        return source

    @staticmethod
    def _beside(
        source: Source, model: Model, contents: Contents, sliced: Sequence[tuple[int, int, int]]
    ) -> None:
        """Declare the other contents of the model files.

        For stages 1 and 2, these are the 16-bit parameters, which are compared. For stage 3, they are frozen
        parameters and buffers.
        """
        if not isinstance(model.state.get("module"), dict):
            return
        unit = Unit(file=0, under=["module"])
        source.files.units.append(unit)
        if sliced:
            unit.only = stage3.buffers(contents, model.file, model.state)
            source.findings += stage3.buffers_left_out(model.found, unit, model.state)
            source.files.assembled += stage3.frozen(model, sliced)
            source.optimizer.frozen.update(stage3.frozen_names(model))
            source.optimizer.untrained.update(source.optimizer.frozen)
            if model.state.get("frozen_param_shapes"):
                # Of the other ranks' files only the fragments are wanted.
                source.findings += stage3.ranks_agree(model, sliced)
            source.findings += stage3.left_out(model, set(unit.only))


@dataclass(frozen=True)
class _Parts:
    """The contents of the parameters' folders."""

    #: Name, shape and place of each tensor, by slot; the parameters' own values count as one slot.
    slots: dict[str, list[Any]] = field(default_factory=dict)
    #: Steps by file.
    steps: dict[int, list[float]] = field(default_factory=dict)
    #: Files of flat parameters whose shape is unknown.
    flat: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def _parts(
    found: Found[UniversalFiles],
    contents: Contents,
    apart: set[str],
    shapes: dict[str, list[int]],
    padding: int,
) -> _Parts:
    """Read the folders of all parameters except ``apart``; ``padding`` is the maximum padding of stage 3."""
    parts = _Parts()
    for name, slot, index in found.seen.parts:
        if name in apart:
            continue
        file = found.files[index]
        tensors = contents.tensors(index)
        content = contents(index)
        number = tensor_index(
            content.get("param") if isinstance(content, dict) and "param" in content else content
        )
        if number is None:
            if contents.readable(index) and slot != _STEP:
                parts.findings.append(_no_tensor(file, name))
            continue
        if slot == _STEP:
            if (step := scalar(contents, index, number, tensors[number]["dtype"])) is not None:
                parts.steps[index] = [step]
            continue
        shape = tensors[number]["shape"]
        wanted = shapes.get(name)
        if wanted is not None and len(shape) == 1 and 0 <= shape[0] - math.prod(wanted) <= padding:
            # Stage 3 leaves the parameter flat, and may leave the last rank's padding at its end.
            shape = wanted
        if wanted is None and slot == _VALUES and content == {"__tensor__": number}:
            parts.flat.append(file.path)
        if wanted is not None and shape != wanted:
            parts.findings.append(_shape(file, name, wanted, shape))
            continue
        parts.slots.setdefault(slot, []).append((name, shape, [(math.prod(shape), index, number, 0)]))
    return parts


def _buffers(model: Model) -> set[str]:
    """Return the names of buffers in the model file."""
    module = model.state.get("module")
    tensors = module if isinstance(module, dict) else {}
    return {
        name
        for name in name_list(model.state.get("buffer_names"))
        if tensor_index(tensors.get(name)) is not None
    }


def _frozen_shards(ranks: list[Model], have: set[str]) -> list[Finding]:
    """Report frozen parameters that ds_to_universal leaves in the model files of several ranks.

    Each of these files contains a slice of a shard.
    """
    return [
        Finding.of(
            codes.UNSUPPORTED,
            "a frozen parameter in the model files of several model-parallel ranks is not supported",
            severity="error",
            file=rank.path,
            rank=rank.label,
            tensor=name,
            help="merge the ZeRO checkpoint that this one was made from",
        )
        for rank in ranks
        for name in sorted(stage3.frozen_names(rank) - have)[:1]
    ]


def _report_unknown_shapes(folder: str, flat: list[str]) -> list[Finding]:
    """Report parameters that stage 3 stored flat; without a model file, their shapes are unknown."""
    if not flat:
        return []
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path = f"{folder}/{name}" if folder else name
    why = (
        f"{len(flat)} parameters are flat, as in ZeRO-3 ({flat[0]}); only the model file states their shapes"
    )
    return [missing(path, {}, why, "copy the model files of this step next to the directory zero/")]


def _moments_missing(folder: str, slots: dict[str, list[Any]], shapes: dict[str, list[int]]) -> list[Finding]:
    """Report trained parameters without moments that others have; frozen parameters have none."""
    names_by_slot = {slot: {name for name, *_ in parts} for slot, parts in slots.items() if slot != _VALUES}
    trained = set(shapes) | set().union(*names_by_slot.values())
    start = f"{folder}/" if folder else ""
    return [
        missing(
            f"{start}zero/{name}/{slot}.pt",
            {},
            f"{slot}, as for {len(names)} other parameters",
            "run ds_to_universal again on the complete checkpoint",
        )
        for slot, names in names_by_slot.items()
        for name in sorted(trained - names)
        if names
    ]


def _parameters_missing(folder: str, names: set[str]) -> list[Finding]:
    start = f"{folder}/" if folder else ""
    return [
        missing(
            f"{start}zero/{name}/{_VALUES}.pt",
            {},
            f"parameter {name} in the model files' param_shapes",
            "run ds_to_universal again on the complete checkpoint",
        )
        for name in sorted(names)
    ]


def _no_tensor(file: File, name: str) -> Finding:
    return Finding.of(
        codes.MISSING_TENSOR,
        "the file holds no tensor",
        file=file.path,
        tensor=name,
        help="run ds_to_universal again",
    )


def _shape(file: File, name: str, expected: list[int], got: list[int]) -> Finding:
    return Finding.of(
        codes.SHAPE,
        "the parameter has the wrong shape",
        file=file.path,
        tensor=name,
        expected=f"{expected}, by param_shapes",
        got=str(got),
        help="run ds_to_universal again: the file is from another model, or truncated",
    )


def _steps_differ(found: Found[UniversalFiles], steps: dict[int, list[float]]) -> list[Finding]:
    values = [step for each in steps.values() for step in each]
    usual = max(set(values), key=values.count) if values else None
    return [
        Finding.of(
            codes.MIXED_STEPS,
            "the optimizer step differs between parameters",
            file=found.files[file].path,
            expected=f"{usual:g}",
            got=f"{each[0]:g}",
            help="copy all files from one step",
        )
        for file, each in steps.items()
        if each[0] != usual
    ]
