"""fastshard: turns the shards that large-model training leaves behind into a checkpoint that is provably whole.

>>> import fastshard
>>> from fastshard import examples
>>> examples.make("gpt_neox", "run", to="gpt_neox", tp=2)    # a small checkpoint
>>> ckpt = fastshard.open("run")                             # headers only
>>> manifest = fastshard.convert(ckpt, "out", to="hf")       # verified, bounded memory, all or nothing
"""

from __future__ import annotations

from . import _core

# As type checkers understand it: importing typing would be most of what importing this takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import layouts, ray
    from .attestation import attest
    from .checkpoint import Checkpoint
    from .conversion import convert, merge, plan
    from .errors import CannotRunError, FastshardError, Finding, IncompleteError, ProblemError
    from .hf_loading import load_model
    from .manifests import Manifest
    from .master_weights import MastersReport, masters, repair_masters
    from .opening import open
    from .pieces import piece
    from .planning import Plan
    from .reader import safe_open
    from .reporting import report
    from .statistics import HISTOGRAM_EDGES, TensorStats, ZeroSlab, stats
    from .tensor import Tensor
    from .verification import Difference, diff, manifest, verify
    from .views import View
    from .writer import Writer

__version__: str = _core.__version__

__all__ = [
    "HISTOGRAM_EDGES",
    "CannotRunError",
    "Checkpoint",
    "Difference",
    "FastshardError",
    "Finding",
    "IncompleteError",
    "Manifest",
    "MastersReport",
    "Plan",
    "ProblemError",
    "Tensor",
    "TensorStats",
    "View",
    "Writer",
    "ZeroSlab",
    "attest",
    "convert",
    "diff",
    "layouts",
    "load_model",
    "manifest",
    "masters",
    "merge",
    "open",
    "piece",
    "plan",
    "ray",
    "repair_masters",
    "report",
    "safe_open",
    "stats",
    "verify",
]

#: Where each name is. Its module is imported when it is asked for: a script that wants one of them waits for no other.
_HOMES = {
    "attestation": ("attest",),
    "checkpoint": ("Checkpoint",),
    "conversion": ("convert", "merge", "plan"),
    "errors": ("CannotRunError", "FastshardError", "Finding", "IncompleteError", "ProblemError"),
    "layouts": (),
    "hf_loading": ("load_model",),
    "manifests": ("Manifest",),
    "master_weights": ("MastersReport", "masters", "repair_masters"),
    "pieces": ("piece",),
    "opening": ("open",),
    "planning": ("Plan",),
    "ray": (),
    "reader": ("safe_open",),
    "reporting": ("report",),
    "statistics": ("HISTOGRAM_EDGES", "TensorStats", "ZeroSlab", "stats"),
    "tensor": ("Tensor",),
    "views": ("View",),
    "verification": ("Difference", "diff", "manifest", "verify"),
    "writer": ("Writer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names or (home,)}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".{home}", __name__)
    # From now on it is found without this function.
    value = globals()[name] = module if name == home else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _core.DEBUG_BUILD:
    import warnings

    warnings.warn(
        "fastshard was built without optimisation: it is slow, do not benchmark it (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
