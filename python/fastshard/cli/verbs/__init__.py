"""All verbs: a file for each, and its place here."""

from __future__ import annotations

from ..verb import Verb
from .convert import CONVERT, MERGE
from .diff import DIFF
from .explain import EXPLAIN
from .gc import GC
from .inspect import INSPECT
from .manifest import MANIFEST
from .masters import MASTERS
from .parts import COMMIT, RUN_PART
from .piece import PIECE
from .plan import PLAN
from .probe import PROBE
from .report import REPORT
from .stats import STATS
from .verify import VERIFY

#: In the order of ``fastshard --help``.
VERBS: tuple[Verb, ...] = (
    INSPECT, MERGE, CONVERT, PLAN, PROBE, RUN_PART, COMMIT, GC, PIECE, VERIFY, STATS, DIFF, REPORT, MASTERS, MANIFEST, EXPLAIN,
)  # fmt: skip
