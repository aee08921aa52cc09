"""The target DeepSpeed universal: one folder of files per parameter, which DeepSpeed loads on any number of
ranks.

source: DeepSpeed checkpoint/ds_to_universal.py (written files), runtime/base_optimizer.py and
    runtime/zero/stage3.py (read files: stages 1 and 2 require ``{"param": tensor}``, stage 3 accepts it since
    0.18), runtime/engine.py (required contents of a model file)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, replace
from ..common.target_options import STACKED_EXPERTS
from ..layouts.declaration import Source
from .base import Bound, Completed, Target
from .dcp import stacked
from .form import Form
from .huggingface import HfTarget
from .optimizer_state import ADAM, State
from .pickle_tree import Size, TensorOf, tree
from .request import Request

#: The file that names the step that DeepSpeed loads.
_TRACKER = "latest_universal"
#: Model files: stages 1 and 2 look for the first one, stage 3 for the second one.
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
#: The DeepSpeed version whose form is written. DeepSpeed refuses a state without a version.
_VERSION = "0.19.0"


@dataclass
class UniversalTarget(Target):
    """A model and its optimizer under Hugging Face names, as DeepSpeed's converter writes them."""

    source: Source
    whole: HfTarget
    name: str = "universal"
    names = ("universal",)
    options = (STACKED_EXPERTS,)
    takes_any_head = is_whole = holds_optimizer = takes_slots = True
    # DeepSpeed loads no universal checkpoint without one.
    needs_optimizer = True

    @classmethod
    def of(cls, source: Source, request: Request) -> UniversalTarget:
        """Make the target for a source.

        Raises:
            FastshardError: as :meth:`.HfTarget.of`, and ``FS515`` for a part of the tensors or for another
                dtype.
        """
        if request.dtype != "f32":
            raise FastshardError.of(
                codes.USAGE,
                "a universal checkpoint holds its weights in fp32",
                expected="--dtype f32",
                got=request.dtype,
            )
        if request.is_narrowed:
            raise FastshardError.of(
                codes.USAGE,
                "a universal checkpoint must be complete",
                got="--include or --exclude",
                help="narrow a merge or a conversion to hf instead",
            )
        whole = HfTarget.of(source)
        if request[STACKED_EXPERTS]:
            stacked(whole)
        return cls(source, whole)

    @property
    def keeps_names(self) -> bool:
        """True if no table describes the names, so that they and the model's config stay unchanged."""
        return self.whole.keeps_names

    def form(self) -> Form:
        """Return the form of the result."""
        return replace(self.whole.form(), name=self.name)

    def complete(self, bound: Bound) -> Completed:
        """Return one folder per parameter, the common optimizer state, and model files without tensors."""
        whole, state = self.whole.complete(bound), bound.state
        assert state is not None, "requested when the target was made"
        if state.step is None or state.groups is None:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "a universal checkpoint needs the optimizer's step and param groups, which the source does "
                "not state",
                help="merge it, which keeps the moments under their own names",
                run=["fastshard merge CKPT OUT --optimizer"],
            )
        findings = [*whole.findings, *_one_for_all(state)]
        folder = f"global_step{state.step}"
        constants: dict[str, tuple[str, int]] = {}
        files: list[_core.PlacedFile] = []

        def add(name: str, value: Any) -> None:
            files.append({"name": f"{folder}/{name}", "content": {"torch_zip": tree(value)}})

        for weight in sorted(bound.weights):
            add(f"zero/{weight}/fp32.pt", {"param": TensorOf(weight)})
            if weight not in state.slots:
                continue
            for slot in ADAM:
                add(f"zero/{weight}/{slot}.pt", {"param": TensorOf(state.slots[weight][slot])})
            step = f"{weight}.step"
            constants[step] = ("F32", state.step)
            add(f"zero/{weight}/step.pt", TensorOf(step))
        add("zero/optimizer_state.pt", _optimizer(state))
        for name in _MODEL_FILES:
            add(name, self._model(bound, state))
        return replace(
            whole,
            texts=whole.texts | {_TRACKER: folder},
            files=files,
            pointers=(_TRACKER,),
            constants=constants,
            findings=findings,
        )

    def _model(self, bound: Bound, state: State) -> dict[str, Any]:
        """Return the content of a model file; DeepSpeed reads the parameters themselves from the folders."""
        shapes = [
            OrderedDict((name, Size(bound.tensors[name].whole)) for name in names)
            for _, names in state.groups or ()
        ]
        frozen = {n: Size(t.whole) for n, t in bound.weights.items() if n not in state.slots}
        return {
            "module": {},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": frozen or None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            "skipped_steps": 0,
            "global_steps": state.step,
            "global_samples": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": _VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }


def _one_for_all(state: State) -> list[Finding]:
    """Return a note that ZeRO-3 gives every group the hyperparameters of the first one.

    source: stage3.py (load_hp_checkpoint_state_from_checkpoint_dir_stage3), 0.19
    """
    groups = [given for given, _ in state.groups or ()]
    if all(given == groups[0] for given in groups):
        return []
    message = (
        "when ZeRO-3 loads this, it gives all param groups the hyperparameters of the first: set them in "
        "the run that continues; stages 1 and 2 use those of each group"
    )
    return [Finding.of(codes.IGNORED, message, severity="note")]


def _optimizer(state: State) -> dict[str, Any]:
    """Return the optimizer state common to all parameters.

    ZeRO stages 1 and 2 read it at the top level, stage 3 below ``optimizer_state_dict``.
    """
    groups = []
    for n, (given, _) in enumerate(state.groups or ()):
        values = dict(given)
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        groups.append({**values, "params": [n]})
    steps = {n: {"step": state.step} for n in range(len(groups))}
    return {
        "param_groups": groups,
        "optimizer_state_dict": {"state": steps, "param_groups": groups},
        "ds_version": _VERSION,
        "zero_stage": 1,
        "overflow": False,
    }
