"""The origin of one tensor of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.manifests import beside, read, run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.provenance import excerpt_of, find_heads
from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding, error_for, from_core
from ..common.near_words import nearest
from ..common.options import Shaping, Sharding, table
from ..common.records import dataclass, field
from .convert import plan as plan_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._core import RunOptions
    from ..common.options import Traced

__all__ = ["TensorTrace", "trace"]

#: Options for the plan and not for opening the checkpoint.
_PLANNING = table(Shaping).keys() | table(Sharding).keys() | {"vocab_size"}


@dataclass(frozen=True)
class TensorTrace:
    """The origin of one tensor of a result."""

    name: str
    #: Dtype by its safetensors name, e.g. ``BF16``.
    dtype: str
    shape: list[int]
    #: Parts of the tensor, each with its ``region``, the operations on its values (``made_by``, ``ops``) and
    #: its ``sources``: rank, stored tensor, file, offset and bytes of each.
    parts: list[dict[str, Any]]
    #: File, key and offset in the result; None for a plan without files.
    written_to: dict[str, Any] | None
    #: True if elements without a source are zeros.
    padding: bool
    #: The weight whose codes the tensor holds; None for other tensors.
    weight: dict[str, Any] | None = None
    #: BLAKE3 of its bytes; None if it was not read.
    blake3: str | None = None
    #: BLAKE3 according to the manifest next to the checkpoint; None if no manifest states it.
    blake3_stated: str | None = None
    #: Findings about the checkpoint, and about the tensor if it was read.
    findings: list[Finding] = field(default_factory=list)
    #: Descriptions of the heads taken from fused tensors, by the stored tensor's name and the region.
    heads: dict[tuple[str, str], str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data without findings and heads, as ``fastshard trace --json`` prints it."""
        optional = {"weight": self.weight, "blake3": self.blake3, "blake3_stated": self.blake3_stated}
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "written_to": self.written_to,
            "padding": self.padding,
            "parts": self.parts,
            **{key: value for key, value in optional.items() if value is not None},
        }


@memory_budget.kept
def trace(
    source: CheckpointSource,
    tensor: str,
    to: str | None = None,
    *,
    reads: bool = False,
    memory: str | int | None = None,
    threads: int | None = None,
    **options: Unpack[Traced],
) -> TensorTrace:
    """Traces one tensor of a result to ranks, files and offsets, with the operations on its values.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        tensor: name of the tensor in the result.
        to: target layout, as for :func:`fastshard.plan`; None traces a merge.
        reads: read the tensor and compute the BLAKE3 of its bytes; otherwise only headers are read.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads for reading the tensor.
        options: as for :func:`fastshard.plan`.

    Raises:
        FastshardError: ``FS515`` if the result has no tensor with this name; if a finding about the
            checkpoint explains why, that finding.

    Examples:
        >>> trace = fastshard.trace("run", "gpt_neox.layers.0.attention.dense.weight", to="hf")
        >>> [(part["region"], part["sources"][0]["rank"]) for part in trace.parts]
        [('[:, 0:16]', 'tp 0'), ('[:, 16:32]', 'tp 1')]
    """
    opening: dict[str, Any] = {key: value for key, value in options.items() if key not in _PLANNING}
    planning: dict[str, Any] = {key: value for key, value in options.items() if key in _PLANNING}
    checkpoint = as_checkpoint(source, **opening)
    plan = plan_of(checkpoint, to, **planning)
    if tensor not in plan.index:
        raise _explain_unknown(plan, tensor, own=to is not None and tensor in checkpoint)
    findings = list(plan.findings)
    computed_hash = recorded_hash = None
    document = plan.trace(tensor)
    if reads:
        computed_hash, damage = _compute_hash(plan, tensor, memory, threads)
        findings += checkpoint.opened.gate.evaluate(damage)
    elif to is None and (manifest := beside(checkpoint)) is not None:
        recorded_hash = _read_stored_hash(read(manifest), document)
    return TensorTrace(
        **document,
        blake3=computed_hash,
        blake3_stated=recorded_hash,
        findings=findings,
        heads=find_heads(excerpt_of(plan.core, plan.position(tensor)), checkpoint.opened.source.binding),
    )


def _read_stored_hash(manifest: dict[str, Any], whole: dict[str, Any]) -> str | None:
    """Read the hash of a full tensor from a manifest.

    A shard may have the same name as the full tensor, but another hash.
    """
    named = [entry for entry in manifest["tensors"] if entry["name"] == whole["name"]]
    alike = [(entry.get("dtype"), entry.get("shape")) == (whole["dtype"], whole["shape"]) for entry in named]
    return named[0]["blake3"] if alike == [True] else None


def _is_reported(cause: Finding, errors: list[Finding]) -> bool:
    """Return True if an error reports the cause, for its file alone or for several files."""
    return any(e.code == cause.code and (e.file == cause.file or cause.file in e.files) for e in errors)


def _explain_unknown(plan: Plan, name: str, own: bool) -> FastshardError:
    """Make the error for a tensor that is not in the result; ``own`` is true if the source has one with that
    name."""
    # What follows from another finding is not among the plan's own.
    echoes = plan.core.findings()
    about = [finding for finding in (*plan.each, *echoes) if finding.tensor == name]
    if about:
        first = about[0]
        errors = [finding for finding in plan.findings if finding.severity == "error"]
        cause = plan.causes.of(first) or first
        changed = first.replace(
            code=cause.code,
            message=f"not in the result: {first.message}",
            # What is wrong with the checkpoint makes the exit code: it may be incomplete alone.
            severity="warning" if errors and cause is not first else "error",
            file=cause.file,
            help=None if cause is not first and _is_reported(cause, errors) else first.help,
        )
        return error_for([changed, *(error for error in errors if error is not first)])
    if own:
        return FastshardError.of(
            codes.USAGE,
            f"this is the source's own name, and the result ({plan.target}) has no tensor of that name",
            tensor=name,
            help="leave out --to, or pass a name of the result; `fastshard plan --to TARGET -v` lists them",
        )
    near = nearest(name, plan.index)
    return FastshardError.of(
        codes.USAGE,
        "the result has no tensor of this name",
        tensor=name,
        help=f"did you mean {near}?" if near else "list the tensors",
        run=[] if near else ["fastshard ls CKPT"],
    )


def _compute_hash(
    plan: Plan, tensor: str, memory: str | int | None, threads: int | None
) -> tuple[str, list[Finding]]:
    """Compute the hash of a tensor, and return it with the findings."""
    run: RunOptions = {**run_options(memory, threads), "only": [tensor]}
    try:
        findings, hashes, _ = plan.core.check(run)
    except _core.CoreError as error:
        raise from_core(error) from None
    (found,) = hashes.values()
    return found, findings
