"""What the arguments in a Megatron-LM checkpoint and the names of its tensors say of its table.

source: Megatron-LM megatron/training/arguments.py, megatron/core/transformer/moe/{moe_layer,router,experts}.py;
transformers models/{llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...layouts.declaration import Description, Source
from ...models import megatron

#: Degrees of parallel dimensions by their argument. source: megatron/training/arguments.py
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def arguments(state: Any) -> dict[str, Any]:
    """The arguments of a rank file or ``common.pt``: a Namespace arrives as an inert record."""
    args = state.get("args") if isinstance(state, dict) else None
    if isinstance(args, dict) and "__class__" in args:
        args = args.get("state")
    return args if isinstance(args, dict) else {}


def mixture(args: dict[str, Any], names: Iterable[str]) -> bool:
    """True for a mixture of experts; without arguments the names tell."""
    return bool(args.get("num_experts")) or any(".mlp.experts." in name for name in names)


def beyond(args: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first argument of a mixture of experts that the tables have no names for: the argument, what it must be, what it is."""
    every = args.get("moe_layer_freq", 1)
    dense = every not in (None, 1) and not (isinstance(every, list) and all(n == 1 for n in every))
    reasons = [
        ("moe_layer_freq", "1: experts in every layer", dense),
        ("moe_shared_expert_intermediate_size", "None: no shared experts", args.get("moe_shared_expert_intermediate_size")),
        ("moe_latent_size", "None: experts of the hidden size", args.get("moe_latent_size")),
        ("moe_mlp_glu_interleave_size", "None: all gates before all other rows", args.get("moe_mlp_glu_interleave_size")),
        ("mtp_num_layers", "None: no layers for further tokens", args.get("mtp_num_layers")),
    ]  # fmt: skip
    return next(((name, expected, str(args[name])[:80]) for name, expected, got in reasons if got), None)


def describe(source: Source, args: dict[str, Any], names: set[str]) -> None:
    """Axes and facts: sizes from the arguments, to be held against the tensors; facts from names."""
    moe = mixture(args, names)
    source.axes = megatron.axes_of(args, moe)
    source.model = Description("mixtral" if moe else "llama", dict(args), dialect=megatron.DIALECT)
    said = {dimension: megatron.size(args, key) for dimension, key in _DEGREES.items()}
    source.ranks = {dimension: degree for dimension, degree in said.items() if degree is not None}

    def has(end: str) -> bool:
        return any(name.endswith(end) for name in names)

    untied = args.get("untie_embeddings_and_output_weights")
    head = has("output_layer.weight")
    tied = not untied if isinstance(untied, bool) else not head
    source.facts = {
        "tied": tied,
        # With tied embeddings the last of several stages has a copy of them.
        "output_layer": head or not tied,
        "split_gate": False,
        "qkv_bias": has("self_attention.linear_qkv.bias"),
        "linear_bias": has("self_attention.linear_proj.bias") or has("mlp.linear_fc2.bias"),
        "qk_norm": has("self_attention.q_layernorm.weight"),
        "moe": moe,
        "experts_sequential": any(".mlp.experts.local_experts." in name for name in names),
        "experts_grouped": any(".mlp.experts.linear_fc2.weight" in name for name in names),
        "experts_flat": has(".mlp.experts.weight2"),
        "experts_stacked": has(".mlp.experts.experts.linear_fc2.weight"),
    }
    gated = args.get("swiglu")
    if isinstance(gated, bool):
        source.facts["gated"] = gated
