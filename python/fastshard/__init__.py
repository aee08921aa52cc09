"""fastshard: merges the shards of a large-model training run into a checkpoint that is provably complete.

>>> import fastshard
>>> from fastshard import examples
>>> examples.make("gpt_neox", "run", to="gpt_neox", tp=2)    # a small checkpoint
>>> ckpt = fastshard.open("run")                             # headers only
>>> manifest = fastshard.convert(ckpt, "out", to="hf")       # verified, bounded memory, all or nothing
"""

from __future__ import annotations

# As type checkers understand it: importing typing would be most of what importing this takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import integrations, layouts, ray
    from .checkpoint.checkpoint import Checkpoint
    from .checkpoint.inspection import Inspection, inspect
    from .checkpoint.manifests import Manifest
    from .checkpoint.plan import Plan
    from .checkpoint.tensor import Tensor
    from .checkpoint.tensor_rows import TensorRow, ls
    from .common.errors import CannotRunError, FastshardError, Finding, IncompleteError, ProblemError
    from .conversion.clean import Leftover, clean
    from .conversion.convert import convert, merge, plan
    from .conversion.distributed.host_parts import copy_local
    from .conversion.distributed.rendezvous import SeenRank, check_storage
    from .conversion.distributed.split_runs import SplitRun, commit, make_part, split
    from .conversion.in_memory import View
    from .conversion.load_model import load_model
    from .conversion.master_weights import MasterWeightsReport, master_weights, repair_master_weights
    from .conversion.open import open
    from .conversion.safe_open import safe_open
    from .conversion.trace import trace
    from .conversion.writer import Writer
    from .evaluation.loss_figures import Loss
    from .expected.expected_list import ExpectedTensor, ExpectedTensors
    from .expected.from_transformers import expected_tensors
    from .findings.explain import Explanation, explain
    from .reporting.report import report
    from .verification.attest import attest
    from .verification.diff import Difference, diff
    from .verification.find_missing import FileSearch, MissingFile, find
    from .verification.inventory import manifest
    from .verification.layers import ComparedUnit, LayerComparison, layers
    from .verification.loss import loss
    from .verification.run_steps import RunStep, RunSteps, judge_step, steps
    from .verification.stats import HISTOGRAM_EDGES, TensorStats, ZeroSlab, stats
    from .verification.tracker_repair import TrackerChange, fix_trackers
    from .verification.verdict import Verdict
    from .verification.verify import verify

__version__: str

__all__ = [
    "HISTOGRAM_EDGES",
    "CannotRunError",
    "Checkpoint",
    "ComparedUnit",
    "Difference",
    "ExpectedTensor",
    "ExpectedTensors",
    "Explanation",
    "FastshardError",
    "FileSearch",
    "Finding",
    "IncompleteError",
    "Inspection",
    "LayerComparison",
    "Leftover",
    "Loss",
    "Manifest",
    "MasterWeightsReport",
    "MissingFile",
    "Plan",
    "ProblemError",
    "RunStep",
    "RunSteps",
    "SeenRank",
    "SplitRun",
    "Tensor",
    "TensorRow",
    "TensorStats",
    "TrackerChange",
    "Verdict",
    "View",
    "Writer",
    "ZeroSlab",
    "attest",
    "check_storage",
    "clean",
    "commit",
    "convert",
    "copy_local",
    "diff",
    "expected_tensors",
    "explain",
    "find",
    "fix_trackers",
    "inspect",
    "integrations",
    "judge_step",
    "layers",
    "layouts",
    "load_model",
    "loss",
    "ls",
    "make_part",
    "manifest",
    "master_weights",
    "merge",
    "open",
    "plan",
    "ray",
    "repair_master_weights",
    "report",
    "safe_open",
    "split",
    "stats",
    "steps",
    "trace",
    "verify",
]

#: The module that defines each name. It is imported when the name is first used, so that a script imports
#: only the modules that it needs.
_HOMES = {
    "verification.attest": ("attest",),
    "checkpoint.checkpoint": ("Checkpoint",),
    "conversion.convert": ("convert", "merge", "plan"),
    "common.errors": ("CannotRunError", "FastshardError", "Finding", "IncompleteError", "ProblemError"),
    "evaluation.loss_figures": ("Loss",),
    "expected.expected_list": ("ExpectedTensor", "ExpectedTensors"),
    "expected.from_transformers": ("expected_tensors",),
    "findings.explain": ("Explanation", "explain"),
    "integrations": (),
    "layouts": (),
    "conversion.load_model": ("load_model",),
    "checkpoint.inspection": ("Inspection", "inspect"),
    "checkpoint.manifests": ("Manifest",),
    "conversion.master_weights": ("MasterWeightsReport", "master_weights", "repair_master_weights"),
    "conversion.distributed.host_parts": ("copy_local",),
    "conversion.distributed.rendezvous": ("SeenRank", "check_storage"),
    "conversion.distributed.split_runs": ("SplitRun", "commit", "make_part", "split"),
    "conversion.clean": ("Leftover", "clean"),
    "conversion.open": ("open",),
    "checkpoint.plan": ("Plan",),
    "ray": (),
    "conversion.safe_open": ("safe_open",),
    "reporting.report": ("report",),
    "verification.run_steps": ("RunStep", "RunSteps", "judge_step", "steps"),
    "verification.stats": ("HISTOGRAM_EDGES", "TensorStats", "ZeroSlab", "stats"),
    "checkpoint.tensor": ("Tensor",),
    "checkpoint.tensor_rows": ("TensorRow", "ls"),
    "conversion.in_memory": ("View",),
    "verification.diff": ("Difference", "diff"),
    "verification.find_missing": ("FileSearch", "MissingFile", "find"),
    "verification.inventory": ("manifest",),
    "verification.layers": ("ComparedUnit", "LayerComparison", "layers"),
    "verification.loss": ("loss",),
    "verification.tracker_repair": ("TrackerChange", "fix_trackers"),
    "verification.verdict": ("Verdict",),
    "verification.verify": ("verify",),
    "conversion.trace": ("trace",),
    "conversion.writer": ("Writer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names or (home,)}


#: Names that are not in `__all__`: the core, and its version.
_CORE = {"_core": "_core", "__version__": "_core"}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name) or _CORE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from sys import modules

    module = import_module(f".{home}", __name__)
    if (checks := modules.get(f"{__name__}.common.option_checks")) is not None:
        # For `help()`: the command line, which starts without this, has no use for it.
        checks.describe_options()
    # From now on it is found without this function.
    value = globals()[name] = module if name == home else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
