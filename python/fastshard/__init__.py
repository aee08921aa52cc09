"""fastshard: turns the shards that large-model training leaves behind into a checkpoint that is provably whole.

>>> import fastshard
>>> ckpt = fastshard.open("global_step1000")        # headers only
>>> fastshard.convert(ckpt, "out/", to="hf")         # verified, bounded memory, all or nothing
"""

from __future__ import annotations

import warnings as _warnings

from . import _core, layouts, ray
from .checkpoint import Checkpoint, open
from .convert import convert, merge, plan
from .errors import CannotRunError, FastshardError, Finding, IncompleteError, ProblemError
from .manifests import Manifest
from .masters import MastersReport, masters, repair_masters
from .pieces import piece
from .planning import Plan
from .report import report
from .stats import HISTOGRAM_EDGES, TensorStats, ZeroSlab, stats
from .tensor import Tensor
from .verify import Difference, diff, manifest, verify
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
    "Writer",
    "ZeroSlab",
    "convert",
    "diff",
    "layouts",
    "manifest",
    "masters",
    "merge",
    "open",
    "piece",
    "plan",
    "ray",
    "repair_masters",
    "report",
    "stats",
    "verify",
]

if _core.DEBUG_BUILD:
    _warnings.warn(
        "fastshard was built without optimisation: it is slow, do not benchmark it (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
