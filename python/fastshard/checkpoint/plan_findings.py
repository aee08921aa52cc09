"""Findings about a plan beyond the core's, e.g. about the choice of weights, proof and casts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..common import codes
from ..common.errors import FastshardError, Finding, raise_errors
from ..common.formatting import counted
from ..common.regex import compile_when_used
from ..expected import heuristics
from ..expected.promised_parts import LAYERS
from ..layouts.declaration import Description, Optimizer, is_state
from ..models.tensor_roles import layer_of
from ..targets.base import Drafted
from ..targets.request import Request
from .drafting import CoreRequest, Merged, Opened, draft_of

#: Names of tensors that accompany codes; plain weights have none of them.
_COMPANION = compile_when_used(
    r"(\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|qweight|qzeros|scales|g_idx)|\.quant_state\..*"
    r"|\.comfy_quant|weight_(scale|scale_inv|scale_2|zero_point|packed|global_scale|shape|g_idx)"
    r"|_(blocks|scales|scale_inv))$"
)


def weights_taken(
    state: Optimizer,
    has_slots: bool,
    opened: list[Finding],
    weights: str | None,
    optimizer: bool,
    needed_by: str | None = None,
) -> list[Finding]:
    """Report which copy of the weights is used, and adapt the findings about optimizer files to it.

    Args:
        state: the optimizer state in the checkpoint.
        has_slots: True if moments can be read from it.
        opened: the findings of opening the checkpoint.
        weights: the requested copy of the weights.
        optimizer: True if the optimizer state is requested.
        needed_by: the target that requires this state.
    """
    has_state = state.masters or state.moments_only or state.moments_named
    _refuse_missing_copy(state, weights, optimizer, needed_by)
    if not has_state or state.moments_named:
        return list(opened)
    unread: list[Finding] = []
    if optimizer and not has_slots:
        unread = [
            Finding.of(
                codes.MASTERS_NOT_CHECKABLE,
                "the optimizer holds no moments: it never took a step",
                severity="warning",
            )
            if state.unstepped
            else Finding.of(
                codes.MASTERS_NOT_CHECKABLE,
                "the checkpoint holds no readable moments",
                severity="error",
            )
        ]
    taken = weights or state.weights
    # Masters are compared with the parameters unless that is declined; moments alone are compared with
    # nothing.
    lenient = not optimizer and (weights == "params" or state.moments_only)

    def weighed(finding: Finding, about_optimizer: bool) -> Finding:
        if lenient and about_optimizer and finding.severity == "error":
            return finding.replace(severity="warning")
        # What cannot be named cannot be taken either.
        if (taken == "masters" or optimizer) and finding.code == codes.MASTERS_NOT_CHECKABLE:
            return finding.replace(severity="error")
        return finding

    found = [weighed(f, f.file in state.files) for f in opened]
    found += [weighed(f, True) for f in state.findings]
    found += state.unread if optimizer else []
    texts = {
        "params": "the parameters as stored; the fp32 master weights are compared with them",
        "masters": "the fp32 master weights; the parameters stored next to them are compared with them"
        if state.params_stored
        else "the fp32 master weights, the only copy of the weights",
    }
    if not any(f.severity == "error" for f in found):
        # Otherwise what is wrong with the optimizer files is the cause.
        found += unread
    if state.moments_only:
        return found
    return [*found, Finding.of(codes.WEIGHTS_TAKEN, f"weights used: {texts[taken]}")]


def _refuse_missing_copy(
    state: Optimizer, weights: str | None, optimizer: bool, needed_by: str | None
) -> None:
    """Refuse a request for a copy of the weights, or optimizer state, that the checkpoint does not contain.

    Raises:
        FastshardError: if the optimizer's files cannot be read; ``FS402`` if there are none.
    """
    has_state = state.masters or state.moments_only or state.moments_named
    if (weights == "masters" and not state.masters) or (optimizer and not has_state):
        # Why what is there cannot be read, if it cannot.
        raise_errors(state.findings)
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "the checkpoint holds no fp32 master weights or optimizer state",
            severity="error",
            help=_without_state(optimizer, needed_by),
        )
    if weights == "params" and not state.params_stored:
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "the checkpoint holds its parameters only as fp32 master weights (ZeRO stage 3)",
            severity="error",
            help="pass --weights masters (the default here) to use the master weights; --dtype bf16 rounds "
            "them",
        )


def _without_state(optimizer: bool, needed_by: str | None) -> str:
    """Return the help for a missing optimizer state, according to what requires the state."""
    add = "add the directory of the optimizer files as another CKPT"
    if needed_by is not None:
        return f"{add}, or choose another format: --to {needed_by} needs the optimizer state"
    if optimizer:
        return f"leave out --optimizer, or {add}"
    return "pass --weights params; the checkpoint has only its parameters"


def evidence(opened: Opened, merged: Merged, request: Request) -> heuristics.Evidence | None:
    """Collect what a Hugging Face model that no table describes states about itself; return None for others.

    For a model with towers, a table describes only the text model.
    """
    model, source, draft = opened.source.model, merged.source, merged.draft
    by_config = model.no_table and (model.config or {}).keys() & {"model_type", "architectures"}
    if opened.is_described or model.is_part or not (model.hf_names or by_config):
        return None
    if request.include or request.exclude or request.optimizer:
        # All of the model, and nothing else.
        draft = draft_of(opened.catalog, CoreRequest(source, request.weights, mean_replicas=True))
    tensors = draft.full_tensors()
    for name in [name for name in tensors if is_state(name)]:
        del tensors[name]
    return heuristics.judge(
        tensors,
        model.config,
        saved_whole=model.saved_whole,
        in_files=len(opened.behind) > 1,
        lost=source.index.lost,
    )


def unproven(has_config: bool, is_indexed: bool, seen: heuristics.Evidence | None, why: str = "") -> Finding:
    """Build the finding that the list of required tensors is unknown or partial.

    The finding names the tensors that no list covers; ``why`` is the reason why transformers does not list
    them either.
    """
    if not has_config:
        help_ = "pass --expect CONFIG (a config.json or the training config)"
    else:
        help_ = (
            "pass --like with a good checkpoint of the model, --expect with a manifest, or --layout with "
            "your own table"
        )
    unnoticed = "nothing outside the files states which tensors must exist"
    if seen is not None:
        if is_indexed:
            unnoticed = "only the index states which tensors must exist"
        if seen.alone:
            unnoticed += f"; {heuristics.unheld(seen)}"
    if why:
        unnoticed += f"; {why}"
    return Finding.of(
        codes.NOT_PROVABLE,
        f"completeness is only partly checked: {unnoticed}",
        unnoticed=unnoticed,
        help=help_,
    )


def asked_for(finding: Finding, request: Request) -> Finding:
    """Turn a finding about a tensor into a note if the request excludes the tensor.

    Patterns match as in the core.
    """
    if request.wants(finding.tensor or ""):
        return finding
    return finding.replace(message=f"left out, as requested: {finding.message}", severity="note", help=None)


def beyond_config(finding: Finding, model: Description) -> Finding:
    """Add the config's number of layers to the finding for a tensor in a layer beyond it."""
    layer = layer_of(finding.tensor) if finding.code == codes.CONFIG_DISAGREES and finding.tensor else None
    if layer is None or finding.evidence or model.config_file is None:
        return finding
    config = model.config or {}
    key = next((k for k in LAYERS if isinstance(config.get(k), int) and config[k] <= layer), None)
    return (
        finding
        if key is None
        else finding.replace(evidence=f"{model.config_file.name} says {key} {config[key]}")
    )


def torn(names: Sequence[Sequence[str]], taken: Collection[str]) -> list[Finding]:
    """Warn if patterns select only a part of a quantised weight, because codes are useless without their
    scales.

    Args:
        names: the names of the tensors of each weight.
        taken: the model's own names of the selected tensors.
    """
    parts = [[name for name in of if name in taken] for of in names]
    apart = [at for at, of in enumerate(names) if 0 < len(parts[at]) < len(of)]
    if not apart:
        return []
    first = names[apart[0]]
    lacks = next(name for name in first if name not in taken)
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            f"parts of {counted(len(apart), 'quantised weight')} are left out, as requested",
            severity="warning",
            tensor=lacks,
            got=parts[apart[0]][0],
            count=len(apart),
            help="pass patterns that match complete modules, e.g. 'model.layers.0.*': codes and scales "
            "belong together",
        )
    ]


def quantised(tensors: dict[str, Drafted], dtype: str, method: str | None) -> list[Finding]:
    """Report quantised weights whose values are not computed, because the requested cast would skip them."""
    left = [
        (name, t.dtype)
        for name, t in tensors.items()
        if t.dtype.startswith("F8_")
        or (method is not None and ((t.dtype[0] in "IU" and len(t.shape) > 1) or _COMPANION.search(name)))
    ]
    if not left:
        return []
    how = f"quantised by {method}" if method else "stored in FP8"
    why = (
        "fastshard cannot compute their values"
        if method
        else "no scales are stored next to them (NAME_scale_inv, NAME_scale)"
    )
    name, kind = left[0]
    return [
        Finding.of(
            codes.UNSUPPORTED,
            f"{counted(len(left), 'tensor')} of weights are {how}, and {why}",
            tensor=name,
            expected=f"floating-point tensors that can be cast to {dtype}",
            got=kind,
            help="leave out --dtype to keep them, or dequantise them with the tool that quantised them",
        )
    ]
