"""deepspeed.moe: one file per expert and layer, ``layer_L_expert_E_mp_rank_TT_model_states.pt``.

In file names and tensor names, experts are numbered among all experts. L counts the MoE layers. The model
file contains the remaining tensors and the number of experts in each MoE layer.
source: DeepSpeed runtime/engine.py (_save_moe_checkpoint, _get_expert_ckpt_name, num_experts)
"""

from __future__ import annotations

from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.ranks import rank_range
from ...layouts.declaration import Source, Unit
from ..base import Contents, Found, as_dict, lacking, missing
from ..zero.experts import Experts
from .step_files import DeepSpeedFiles


def counts(states: list[dict[str, Any]]) -> list[int]:
    """Return the number of experts in each MoE layer, from the model file; empty without experts."""
    num_experts = states[0].get("num_experts") if states else None
    num_experts = num_experts if isinstance(num_experts, list) else [num_experts]
    return [n for n in num_experts if isinstance(n, int) and 0 < n <= 1 << 20]


def refuse(found: Found[DeepSpeedFiles], states: list[dict[str, Any]]) -> None:
    """Refuse MoE models that the files describe incompletely.

    Raises:
        FastshardError: ``FS514`` for MoE models with several model-parallel ranks, and for AutoEP.
    """
    seen = found.seen
    what = None
    if any(state.get("ds_autoep_layers") for state in states):
        what = "an MoE checkpoint of DeepSpeed's AutoEP (expert_parallel.autoep_size)"
    elif any(state.get("moe") is True for state in states):
        what = "an MoE checkpoint of DeepSpeed"
    elif counts(states) or seen.experts:
        ranks = {*(mp for mp, _ in seen.ranks), *(mp for _, _, mp, _ in seen.experts)}
        if seen.pipeline or len(ranks) > 1:
            what = f"an MoE checkpoint of DeepSpeed over {len(ranks)} model-parallel ranks or pipeline stages"
        elif seen.sliced:
            what = "an MoE checkpoint of DeepSpeed in ZeRO-3"
    if what:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{what} is not supported",
            file=found.files[0].path,
            expected="deepspeed.moe in ZeRO 0 to 2, one model-parallel rank",
            help="load it with DeepSpeed and save the engine's module with one expert-parallel rank",
        )


def take(
    source: Source, found: Found[DeepSpeedFiles], contents: Contents, states: list[dict[str, Any]]
) -> Experts | None:
    """Add the experts' files to a declaration, and report missing ones; None for a model without experts."""
    seen = found.seen
    wanted = counts(states)
    if not seen.experts and not wanted:
        return None
    config = as_dict(states[0].get("ds_config"))
    experts = Experts(data_first=config.get("use_data_before_expert_parallelism") is True)
    experts.optimizers = list({rank: (rank, file) for rank, _, file in reversed(seen.expp)}.values())[::-1]
    present: dict[int, set[int]] = {}
    for layer, expert, _, file in seen.experts:
        present.setdefault(layer, set()).add(expert)
        source.files.units.append(Unit(file=file, rank=f"expert {expert} of MoE layer {layer}"))
        for tensor in contents.tensors(file) if contents.readable(file) else ():
            experts.add(".".join(tensor["path"]), tensor["shape"])
    for layer, count in enumerate(wanted):
        absent = _missing(found, layer, present.get(layer, set()), count)
        source.findings += absent
        experts.whole = experts.whole and not absent
    extra = [
        (layer, max(have))
        for layer, have in present.items()
        if max(have) >= [*wanted, *[0] * (layer + 1)][layer]
    ]
    for layer, expert in extra if wanted else ():
        name = next(found.files[file].path for n, e, _, file in seen.experts if (n, e) == (layer, expert))
        source.findings.append(
            Finding.of(
                codes.RANKS_DISAGREE,
                "more experts than the model file states",
                file=name,
                expected=f"num_experts {wanted} in {found.files[0].name}",
                got=f"expert {expert} of MoE layer {layer}",
                help="copy only the files of one step into an empty directory",
            )
        )
    return experts


def _missing(found: Found[DeepSpeedFiles], layer: int, present: set[int], count: int) -> list[Finding]:
    folder, findings = found.folder, []
    for first, last in lacking(present, 0, count - 1):
        name, end = (f"layer_{layer}_expert_{n}_mp_rank_00_model_states.pt" for n in (first, last))
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                {"mixture": layer, "expert": rank_range(first, last)},
                f"num_experts {count} of this layer in {found.files[0].name}",
                "copy it from the node that ran the expert-parallel rank with this expert",
                rank=f"expert {first} of MoE layer {layer}",
                upto=end if last > first else None,
            )
        )
    return findings
