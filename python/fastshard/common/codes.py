"""The codes of findings, with names and descriptions from the core's table (`rust/fastshard/src/codes.rs`).

The table also groups codes into classes: ``finding.is_a("missing_tensor")``.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _core

__all__ = ["CODES", "Code"]


class Code(NamedTuple):
    """A code of findings and its description."""

    #: E.g. ``FS101``.
    code: str
    #: Short stable name.
    name: str
    #: Default severity of its findings.
    severity: str
    #: Exit code for an error of this code.
    exit: int
    #: A short title.
    title: str
    #: Its meaning.
    meaning: str
    #: What to do, starting with a verb; empty if the advice depends on the finding.
    help: str
    #: The check in a report that fails because of it.
    check: str


#: Every code, in order.
CODES: dict[str, Code] = {row[0]: Code(*row) for row in _core.codes_table()}

# Their names, in the table's order, which a test compares.
(
    MISSING_FILE,
    MISSING_TENSOR,
    MISSING_LAYER,
    UNCOMMITTED,
    TRACKER_POINTS_NOWHERE,
    AMBIGUOUS,
    MIXED_STEPS,
    UNEXPECTED_FILE,
    NOT_PROVABLE,
    RANKS_DISAGREE,
    MISSING_CHUNKS,
    STEP_TAKEN,
    RENAMED,
    LOOKALIKES,
    INDEX_NAMES_ANOTHER_FILE,
    MISSING_PART,
    FILLED,
    PART,
    NOT_LOADED,
    SHAPE,
    DTYPE,
    AXIS_CONFLICT,
    NOT_DIVISIBLE,
    HOLE,
    OVERLAP,
    UNKNOWN_TENSOR,
    SLICE_AS_WHOLE,
    FACT_UNKNOWN,
    BAD_LAYOUT,
    BAD_VALUE,
    IGNORED,
    UNBOUND_AXIS,
    LOSSY,
    CONFIG_DISAGREES,
    DEFAULT_ASSUMED,
    CRC,
    REPLICAS_DIFFER,
    DUPLICATED_SHARD,
    EQUAL_SHARDS,
    SWAPPED_SHARD,
    NON_FINITE,
    PAD_NOT_ZERO,
    HASH,
    DIFFERENT,
    REPLICAS_AVERAGED,
    TIED_DIFFER,
    TRUNCATED,
    ZERO_SLAB,
    NO_CHECKSUMS,
    SIGNATURE,
    NOT_WEIGHTS,
    UNWRITTEN,
    UNTRAINED,
    LOSS_DIFFERS,
    OUTPUTS_DIFFER,
    MASTERS_DIFFER,
    MASTERS_NOT_CHECKABLE,
    WEIGHTS_TAKEN,
    PARTITION,
    NO_SUCH_PATH,
    PERMISSION,
    NO_SPACE,
    OUT_EXISTS,
    OUT_INSIDE_SOURCE,
    SOURCE_CHANGED,
    IO,
    LEFTOVER_RUN,
    LOCKED,
    INTERRUPTED,
    TOO_MANY_FILES,
    MEMORY_BUDGET,
    NOT_A_CHECKPOINT,
    UNSUPPORTED,
    USAGE,
    PUBLISH_CONFLICT,
    WRITTEN_DIFFERS,
    BAD_MANIFEST,
    PUBLISHED,
    INTERNAL,
    IN_STEPS,
    NOT_SHARED,
    PART_MISSING,
    RANKS_DIFFER,
    LENT,
    UNSAFE_HEADER,
    UNSAFE_PICKLE,
    UNSAFE_PATH,
    UNSAFE_ZIP,
) = CODES
