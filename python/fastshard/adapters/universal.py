"""DeepSpeed universal checkpoints: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``.

source: DeepSpeed checkpoint/ds_to_universal.py (stages 1 and 2 write ``{param: tensor, cat_dim}``,
stage 3 a flat tensor)
"""

from __future__ import annotations

import math
import re
from typing import Any

from ..discover import File, Listing
from ..errors import Finding
from .base import Assembled, Contents, Found, Options, Source, Unit, missing
from .steps import Step, choose
from .zero.model import is_shape, scalar, tensor_index

_PARAMETER = re.compile(r"^(?:(.*)/)?zero/([^/]+)/([^/]+)\.pt$")
_RANK = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
#: The parameter itself among the files of a parameter's folder.
_VALUES = "fp32"
_STEP = "step"


class Universal:
    """What ``ds_to_universal`` writes."""

    name = "universal"

    def detect(self, listing: Listing, options: Options) -> Found | None:
        """Looks for ``zero/<parameter>/fp32.pt``."""
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
        models: list[File] = []
        for file in sorted(listing.files, key=lambda f: (f.path, f.root)):
            match = _PARAMETER.match(file.path)
            if match and (file.root, match[1] or "") in places:
                parts.setdefault((match[2], match[3]), file)
            elif _RANK.match(file.name) and (file.root, file.folder) in places:
                models.append(file)
        files = [*models, *parts.values()]
        notes = {"folder": places[0][1], "models": len(models), "parts": list(parts)}
        findings = list(chosen.findings)
        return Found(self, "DeepSpeed universal", files, findings, step=chosen.name, notes=notes)

    def declare(self, found: Found, listing: Listing, contents: Contents, options: Options) -> Source:
        """Whole fp32 tensors; the model files beside them say which there must be."""
        notes = found.notes
        source = Source(found.framework, units=[], step=found.step, pass_unknown=True)
        source.masters, source.weights, source.vocab_size = True, "masters", options.vocab_size
        states = [s if isinstance(s := contents(i), dict) else {} for i in range(notes["models"])]
        keys = ("iteration", "global_steps", "ds_version")
        source.values = {k: states[0][k] for k in keys if states and k in states[0]}
        shapes, stored = _described(states)
        source.provable = bool(shapes)
        world = states[0].get("dp_world_size") if states else None
        padding = max(0, world - 1) if isinstance(world, int) else 0
        first = notes["models"]
        slots: dict[str, list[Any]] = {}
        steps: dict[int, list[float]] = {}
        have = {name for name, slot in notes["parts"] if slot == _VALUES}
        for i, (name, slot) in enumerate(notes["parts"]):
            index, file = first + i, found.files[first + i]
            tensors = contents.tensors(index)
            content = contents(index)
            number = tensor_index(
                content.get("param") if isinstance(content, dict) and "param" in content else content
            )
            if number is None:
                if contents.readable(index) and slot != _STEP:
                    source.findings.append(_no_tensor(file, name))
                continue
            if slot == _STEP:
                if (step := scalar(contents, index, number, tensors[number]["dtype"])) is not None:
                    steps[index] = [step]
                continue
            shape = tensors[number]["shape"]
            wanted = shapes.get(name)
            if wanted is not None and len(shape) == 1 and 0 <= shape[0] - math.prod(wanted) <= padding:
                # Stage 3 leaves the parameter flat, and may leave the last rank's padding at its end.
                shape = wanted
            if wanted is not None and shape != wanted:
                source.findings.append(_shape(file, name, wanted, shape))
                continue
            slots.setdefault(slot, []).append((name, shape, [(math.prod(shape), index, number, 0)]))
        source.optimizer_findings += _moments_missing(notes, slots, shapes)
        for slot, parts in slots.items():
            source.assembled.append(Assembled(first, {}, None, None if slot == _VALUES else slot, parts))
        self._twins(source, found, states, len(have) > 0)
        for name in sorted(shapes):
            if name not in have:
                path = f"zero/{name}/{_VALUES}.pt"
                source.findings.append(
                    missing(
                        f"{notes['folder']}/{path}" if notes["folder"] else path,
                        None,
                        f"parameter {name} in the model files' param_shapes",
                        "run ds_to_universal again on the whole checkpoint",
                    )
                )
        _steps_agree(found, steps, source)
        source.steps = steps
        if steps:
            source.values["optimizer"] = {"step": max(max(s) for s in steps.values())}
        source.params_stored = bool(stored)
        return source

    @staticmethod
    def _twins(source: Source, found: Found, states: list[dict[str, Any]], whole: bool) -> None:
        """One model-parallel rank's 16-bit parameters are the whole ones, to be compared with."""
        if len(states) == 1 and whole and isinstance(states[0].get("module"), dict):
            source.units.append(Unit(file=0, under=["module"]))


def _described(states: list[dict[str, Any]]) -> tuple[dict[str, list[int]], set[str]]:
    """Shapes of whole parameters, and the names of those that the model files store as well."""
    if len(states) != 1:
        # With several model-parallel ranks the model files describe shards.
        return {}, set()
    groups = states[0].get("param_shapes")
    groups = groups if isinstance(groups, list) else [groups]
    shapes = {
        str(name): shape
        for group in groups
        if isinstance(group, dict)
        for name, shape in group.items()
        if is_shape(shape)
    }
    module = states[0].get("module")
    return shapes, set(map(str, module)) if isinstance(module, dict) else set()


def _moments_missing(
    notes: dict[str, Any], slots: dict[str, list[Any]], shapes: dict[str, list[int]]
) -> list[Finding]:
    """A parameter that is trained has every moment that another one has; frozen ones have none."""
    held = {slot: {name for name, *_ in parts} for slot, parts in slots.items() if slot != _VALUES}
    trained = set(shapes) | set().union(*held.values())
    folder = f"{notes['folder']}/" if notes["folder"] else ""
    return [
        missing(
            f"{folder}zero/{name}/{slot}.pt",
            None,
            f"{slot} as for {len(names)} other parameters",
            "run ds_to_universal again on the whole checkpoint",
        )
        for slot, names in held.items()
        for name in sorted(trained - names)
        if names
    ]


def _no_tensor(file: File, name: str) -> Finding:
    return Finding.of(
        "FS102", "the file holds no tensor", file=file.path, tensor=name, help="run ds_to_universal again"
    )


def _shape(file: File, name: str, expected: list[int], got: list[int]) -> Finding:
    return Finding.of(
        "FS201",
        "shape of the parameter",
        file=file.path,
        tensor=name,
        expected=f"{expected} by param_shapes",
        got=str(got),
        help="the file belongs to another model or was cut short: run ds_to_universal again",
    )


def _steps_agree(found: Found, steps: dict[int, list[float]], source: Source) -> None:
    values = [step for each in steps.values() for step in each]
    usual = max(set(values), key=values.count) if values else None
    for file, each in steps.items():
        if each[0] != usual:
            source.findings.append(
                Finding.of(
                    "FS107",
                    "optimizer step differs between parameters",
                    file=found.files[file].path,
                    expected=f"{usual:g}",
                    got=f"{each[0]:g}",
                    help="take all files from one step",
                )
            )
