"""The target torch.distributed.checkpoint: a model in ``.distcp`` files, as FSDP, torchtitan and OLMo-core
load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _core
from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError
from ..common.records import dataclass, field, replace
from ..common.target_options import STACKED_EXPERTS, TP
from ..layouts import naming_schemes, tables
from ..layouts.dcp_names import METADATA, chunk_name
from ..layouts.declaration import Source
from ..models import config_json, dcp_trainers
from ..models.model import Model, read_model
from .base import Bound, Completed, Target, positive
from .form import Form
from .huggingface import HfTarget
from .optimizer_state import DECOUPLED, State
from .pickle_tree import TensorOf, tree
from .request import Request

#: Targets with other names, and the key under which the trainer looks for the model.
#: source: torchtitan components/checkpoint.py (ModelWrapper, at top level), OLMo-core distributed/checkpoint
#: (prepare_state_dict)
_SPELLED = {"dcp:torchtitan": "torchtitan", "dcp:olmo_core": "olmo_core"}

_BELOW = {"dcp:olmo_core": "model."}
#: Prefixes of a state's parts, if the optimizer is included. source: torch's recipe of DCP, ``{"model": ...,
#: "optim": ...}``
_MODEL, _OPTIMIZER = "model.", "optim."
#: Approximate maximum size of a file with full tensors: readers open few files, and losing one loses little.
_FILE_BYTES = 5 << 30


@dataclass
class Records:
    """Records of ``.distcp`` files, and their entries in ``.metadata``."""

    folder: str = ""
    _files: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = field(default_factory=dict)
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chunk(
        self,
        file: str,
        coords: Mapping[str, int],
        name: str,
        of: str,
        extents: list[int],
        at: list[int],
        shape: list[int],
    ) -> None:
        """Add a chunk.

        Args:
            file: the file's name.
            coords: the rank whose outputs the file contains, by parallel dimension.
            name: name of the output.
            of: fully qualified name of the full tensor.
            extents: shape of the full tensor.
            at: first index of the chunk.
            shape: shape of the chunk.
        """
        entry = self._entries.setdefault(of, {"name": of, "shape": extents, "chunks": []})
        record = {"key": chunk_name(of, at), "value": tree(TensorOf(name)), "shape": shape}
        entry["chunks"].append((record, at))
        self._files.setdefault(file, (dict(coords), []))[1].append(record)

    def scalar(self, file: str, name: str) -> None:
        """Add a scalar that does not come from a tensor of the source, under the name of its constant."""
        self.chunk(file, {}, name, name, [], [], [])

    def value(self, file: str, key: str, value: Any) -> None:
        """Add a record without tensors."""
        self._entries[key] = {"name": key}
        self._files.setdefault(file, ({}, []))[1].append({"key": key, "value": tree(value)})

    def files(self) -> list[_core.PlacedFile]:
        """List the files of the target, ``.metadata`` last."""
        for entry in self._entries.values():
            chunks = entry.get("chunks", [])
            if len(chunks) == 1:
                # A tensor that is stored whole is called by its name alone.
                chunks[0][0]["key"] = entry["name"]
            if chunks:
                entry["chunks"] = [(record["key"], at) for record, at in chunks]
        inside = f"{self.folder}/" if self.folder else ""
        files: list[_core.PlacedFile] = [
            {"name": inside + name, "coords": coords, "content": {"records": records}}
            for name, (coords, records) in self._files.items()
        ]
        metadata = {"dcp_metadata": list(self._entries.values())}
        return [*files, {"name": f"{inside}{METADATA}", "content": metadata}]


def stacked(whole: HfTarget) -> None:
    """Let a target stack experts, as transformers 5 does in memory.

    Raises:
        FastshardError: ``FS515`` for a model without experts.
    """
    if "stacked_experts" not in whole.facts:
        raise FastshardError.of(
            codes.USAGE, f"{STACKED_EXPERTS.flag}: the model has no experts to stack", help="leave it out"
        )
    whole.facts["stacked_experts"] = True


@dataclass
class DcpTarget(Target):
    """A model in chunks that are divided along the layout's axes.

    The names are those of Hugging Face, or those of a trainer that uses different ones.
    """

    whole: HfTarget
    tp: int
    name: str = "dcp"
    #: The framework whose names the tensors have, if not Hugging Face.
    spelling: str | None = None
    #: The model that the trainer must compute, if its transformers class is known.
    model: Model | None = None
    names = ("dcp", *_SPELLED)
    options = (TP, STACKED_EXPERTS)
    takes_any_head = holds_optimizer = takes_slots = True

    @classmethod
    def of(cls, source: Source, request: Request) -> DcpTarget:
        """Make the target for a source.

        Raises:
            FastshardError: as :meth:`.HfTarget.of`, ``FS515`` for impossible degrees, and ``FS514`` for a
                model that the requested trainer does not support.
        """
        positive(request, TP)
        tp, to = request[TP], str(request.to)
        if to not in _SPELLED:
            whole = HfTarget.known(source, "--tp") if tp > 1 else HfTarget.of(source)
            if request[STACKED_EXPERTS]:
                stacked(whole)
            return cls(whole, tp)
        if request.optimizer:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "optimizer state cannot be written in the format of "
                f"{naming_schemes.framework(_SPELLED[to])}",
                expected="--to dcp, or --to universal",
                got=to,
            )
        if request[STACKED_EXPERTS]:
            raise FastshardError.of(
                codes.USAGE,
                f"{STACKED_EXPERTS.flag}: {to} stores experts in its own format",
                help="leave it out",
            )
        whole, spelling = HfTarget.known(source, f"--to {to}"), _SPELLED[to]
        kind = (
            whole.kind.model_type if whole.kind is not None else (source.model.config or {}).get("model_type")
        )
        if naming_schemes.table_of(spelling, whole.layout) is None or kind not in naming_schemes.model_types(
            spelling
        ):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"{naming_schemes.framework(spelling)} has no model of the type {shown(kind)}",
                expected=", ".join(naming_schemes.model_types(spelling)),
                got=shown(kind),
                help="write it under Hugging Face's names",
                run=["--to dcp"],
            )
        model = whole.model
        if model is None and source.model.dialect is not None and kind in tables.classes():
            model = read_model(source)
        if model is not None:
            dcp_trainers.refuse(spelling, model)
        # The order of that framework's rows may depend on what the names of Hugging Face do not.
        config = (source.model.config or {}) if whole.kind is None else {}
        table = str(naming_schemes.table_of(spelling, whole.layout))
        whole.facts = config_json.described(config | {"model_type": kind}, layout=table)[1] | whole.facts
        return cls(whole, tp, to, spelling, model)

    @property
    def keeps_names(self) -> bool:
        """True if no table describes the names, so that they and the model's config stay unchanged."""
        return self.whole.keeps_names

    def form(self) -> Form:
        """Return the form of the result."""
        # torch keeps no padding: chunks of a vocabulary that does not divide are refused.
        form = replace(self.whole.form(), name=self.name, degrees={"tp": self.tp}, chunks=True)
        if form.facts.get("tied"):
            # A state dict has a tied head under its own name too, and torch loads nothing where a name is
            # missing; its optimizer knows the one parameter that the two are.
            form = replace(form, facts={**form.facts, "head": True}, state_facts={"head": False})
        if self.spelling is not None:
            table = tables.table(str(naming_schemes.table_of(self.spelling, self.whole.layout)))
            form = replace(form, table=table)
        return form

    def complete(self, bound: Bound) -> Completed:
        """Return each rank's files (several if a rank has many tensors) and config.json."""
        whole = self.whole.complete(bound)
        records = Records()
        filled = [0] * self.tp
        # By itself a model lies where `dcp.load(model.state_dict())` looks for it.
        below = _BELOW.get(self.name, "") if bound.state is None else _MODEL
        called = {name: below + name for name in bound.weights}
        constants: dict[str, tuple[str, int]] = {}
        values: dict[str, Any] = {}
        if bound.state is not None:
            constants, values = _state(bound.state, called)
        for name, tensor in sorted(bound.tensors.items()):
            for rank in range(self.tp if tensor.cuts else 1):
                file = f"__{rank}_{filled[rank] // _FILE_BYTES}.distcp"
                coords = {"tp": rank}
                at = tensor.first(coords)
                records.chunk(file, coords, name, called[name], tensor.whole, at, tensor.shape)
                filled[rank] += tensor.bytes
        for name in constants:
            records.scalar("__0_0.distcp", name)
        for key, value in values.items():
            records.value("__0_0.distcp", key, value)
        findings = whole.findings
        if self.spelling is not None and self.model is not None:
            findings = [*findings, *dcp_trainers.warn_of_settings(self.spelling, self.model, "config.json")]
        return replace(
            whole, findings=findings, files=records.files(), pointers=(METADATA,), constants=constants
        )


def _state(state: State, called: dict[str, str]) -> tuple[dict[str, tuple[str, int]], dict[str, Any]]:
    """Name the moments after their weights; return the steps and the records of the groups.

    source: torch/distributed/checkpoint/state_dict.py (get_optimizer_state_dict)
    """
    constants: dict[str, tuple[str, int]] = {}
    for weight, slots in state.slots.items():
        begin = f"{_OPTIMIZER}state.{weight}."
        called.update({name: begin + slot for slot, name in slots.items()})
        if state.step is not None:
            constants[f"{begin}step"] = ("F32", state.step)
    values: dict[str, Any] = {}
    for n, (given, weights) in enumerate(state.groups or ()):
        begin = f"{_OPTIMIZER}param_groups.{n}."
        values |= {begin + key: value for key, value in _hyperparameters(given).items()}
        values[f"{begin}params"] = weights
    return constants, values


#: Other AdamW settings that torch stores for a group. A loader asks for those of its version and ignores the
#: others.
#: source: torch/optim/adamw.py, adam.py
_DEFAULTS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    DECOUPLED: True,
}


def _hyperparameters(given: dict[str, Any]) -> dict[str, Any]:
    """Return all hyperparameters of a group that a loader may read, without unknown numbers.

    A loader stops if one of them is missing.
    """
    values: dict[str, Any] = _DEFAULTS | {
        key: value for key, value in given.items() if key != "bias_correction"
    }
    if isinstance(values.get("betas"), list):
        values["betas"] = tuple(values["betas"])
    if "lr" in values:
        values.setdefault("initial_lr", values["lr"])
    return values
