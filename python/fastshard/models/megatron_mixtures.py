"""Megatron-LM's terms for MoE models, multi-latent attention and gated delta nets.

source: Megatron-LM megatron/core/transformer/transformer_config.py,
megatron/core/transformer/moe/{moe_layer,router,experts}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.config_text import shown
from . import config_fields
from .megatron_heads import LEARNABLE, SOFTMAX
from .megatron_sizes import (
    DELTA_NET,
    DELTA_VALUES,
    INDEXED,
    OF_DELTA,
    OF_INDEXER,
    VARIANT,
    is_indexed,
    list_delta_layers,
    list_layers,
    read_flag,
    read_real,
    size,
)
from .model import (
    LATENT_EPS,
    Block,
    Experts,
    Lack,
    Model,
    Rope,
    change_layers,
    drop_experts,
    take_delta_net,
)

#: Experts that count for a group's score. Megatron-LM counts as many as are chosen per group; transformers
#: counts two.
#: source: group_limited_topk there; transformers models/deepseek_v3 (DeepseekV3TopkRouter)
_BEST_IN_GROUP = 2
#: YaRN settings by transformers' keys: Megatron's arguments, and the values if config.json omits the keys.
YARN: dict[str, tuple[str, float | None]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
}


#: Megatron arguments with the values that transformers' indexer computes; the first value is the one that is
#: written. Files of versions that rotate the last part of each head do not state the first argument.
#: source: transformers models/deepseek_v32; Megatron-LM dsa.py (_apply_rope)
_FIXED_OF_INDEXER: dict[str, tuple[Any, ...]] = {
    "dsa_indexer_rope_interleaved": (False,),
    "dsa_indexer_scoring_relu": (True, None),
    "dsa_indexer_k_norm_epsilon": (LATENT_EPS, None),
    "dsa_indexer_topk_freq": (1, None),
    "dsa_indexer_skip_topk_offset": (0, None),
}


def read_indexed(args: Mapping[str, Any]) -> int | None:
    """Return how many tokens an indexer chooses for each token; None without an indexer.

    Raises:
        FastshardError: ``FS211`` for an invalid number.
    """
    return (size(args, OF_INDEXER["index_topk"]) or 0) if is_indexed(args) else None


def list_lacks_of_indexer(args: Mapping[str, Any]) -> list[Lack]:
    """List differences between an indexer and that of transformers."""
    if not is_indexed(args):
        return []
    found = [
        Lack(key, str(values[0]), str(args.get(key))[:80])
        for key, values in _FIXED_OF_INDEXER.items()
        if args.get(key) not in values
    ]
    best = OF_INDEXER["index_topk"]
    return found if size(args, best) else [*found, Lack(best, "a number of tokens", "None")]


def write_delta(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of gated delta nets, and of attention with an output gate."""
    layers, delta = range(axes.get("L in main", axes["L"])), set(model.delta_layers)
    if not delta and model.experts is not None:
        return {"attention_output_gate": True}
    if not delta:
        # A list says that layers are numbered and not stacked: a mixture has one of its own.
        return {"attention_output_gate": True, "linear_attention_freq": [0 for _ in layers]}
    return {
        "attention_output_gate": True,
        VARIANT: DELTA_NET,
        "linear_attention_freq": [int(layer in delta) for layer in layers],
        **{argument: axes[axis] for axis, argument in OF_DELTA.items()},
        DELTA_VALUES: axes["k"] * axes["u"],
    }


def write_latent(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of multi-latent attention.

    Without YaRN, its scaling factor is written as 1, because the softmax uses the factor in any case.
    source: megatron/core/transformer/multi_latent_attention.py (softmax_scale)
    """
    out: dict[str, Any] = {
        "multi_latent_attention": True,
        "num_attention_heads": axes["a"],
        "group_query_attention": False,
        "num_query_groups": axes["a"],
        "kv_channels": axes["vd"],
        "q_lora_rank": axes["Q"] if model.attention.latent_queries else None,
        "kv_lora_rank": axes["K"],
        "qk_head_dim": axes["nope"],
        "qk_pos_emb_head_dim": axes["rope"],
        "v_head_dim": axes["vd"],
        "qk_layernorm": True,
        "use_rope_scaling": False,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if (best := model.attention.indexed) is not None:
        out |= {
            VARIANT: INDEXED,
            OF_INDEXER["index_n_heads"]: axes["ih"],
            OF_INDEXER["index_head_dim"]: 2 * axes["ic"] + axes["ix"],
            OF_INDEXER["index_topk"]: best,
            **{key: value for key, (value, *_) in _FIXED_OF_INDEXER.items()},
        }
    if model.rope.kind == "yarn":
        scaling = {
            "factor": None,
            "original_max_position_embeddings": model.max_positions,
            **{key: value for key, value in model.rope.scaling.items() if value is not None},
        }
        out["rope_type"] = "yarn"
        for key, (argument, default) in YARN.items():
            out[argument] = config_fields.positive_number(scaling, key, default or 1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            for key in ("mscale", "mscale_all_dim"):
                out[key] = config_fields.positive_number(scaling, key, 1.0)
    return out


def write_experts(model: Model, experts: Experts, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the expert arguments.

    If layers are numbered and not stacked, a list states which layers have experts, even if all have them.
    """
    layers = axes.get("L in main", axes["L"])
    dense = [layer for layer in model.dense_layers if layer < layers]
    out: dict[str, Any] = {
        "num_experts": axes["E"],
        "moe_ffn_hidden_size": axes["M"] if "M" in axes else axes["F"],
        "moe_layer_freq": [int(layer not in dense) for layer in range(layers)] if is_mixed(model) else 1,
        "moe_router_topk": experts.best,
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalised,
        "moe_router_enable_expert_bias": experts.correction,
        "moe_router_topk_scaling_factor": None if experts.scale == 1 else experts.scale,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.best_groups if experts.groups > 1 else None,
        "moe_shared_expert_intermediate_size": axes["S"] if experts.shared else None,
        "moe_shared_expert_gate": experts.shared_gate,
        "mtp_num_layers": axes["L"] - layers or None,
    }
    if experts.scores == "sigmoid":
        # transformers scores in float32.
        out["moe_router_dtype"] = "fp32"
    return out


def find_contradictions(args: Mapping[str, Any], facts: Mapping[str, bool]) -> list[Lack]:
    """Find features that the tensors show although the arguments deny them, and sizes that transformers
    cannot state.
    """
    found = []
    if facts.get("router_correction") and args.get("moe_router_enable_expert_bias") is False:
        found.append(Lack("moe_router_enable_expert_bias", "True: the files have a bias of experts", "False"))
    if facts.get("sinks") and args.get(SOFTMAX) not in (None, LEARNABLE):
        expected = f"{LEARNABLE}: the files have a score of each head"
        found.append(Lack(SOFTMAX, expected, str(args[SOFTMAX])[:80]))
    if facts.get("qk_norm") and args.get("qk_layernorm") is False:
        found.append(Lack("qk_layernorm", "True: the files have norms of queries and keys", "False"))
    if facts.get("mla") and args.get("qk_layernorm") is False:
        found.append(Lack("qk_layernorm", "True: the files have norms of latents", "False"))
    shared, expert = (
        size(args, "moe_shared_expert_intermediate_size"),
        size(args, "moe_ffn_hidden_size") or size(args, "ffn_hidden_size"),
    )
    # transformers counts those without a gate in experts.
    if shared and expert and shared % expert and not args.get("moe_shared_expert_gate"):
        key = "moe_shared_expert_intermediate_size"
        found.append(Lack(key, f"a multiple of {expert}, the size of an expert", str(shared)))
    return found


def list_lacks_of_mixture(model: Model) -> list[Lack]:
    """List MoE features that transformers and Megatron-LM compute differently."""
    experts, lacking = model.experts, []
    if experts is not None and experts.groups > 1 and experts.best // experts.best_groups != _BEST_IN_GROUP:
        got = f"{experts.best} of {experts.best_groups} groups"
        lacking.append(Lack("number of best experts", f"{_BEST_IN_GROUP} for each group", got))
    if experts is not None and experts.best == 1 and (experts.normalised or experts.scores == "sigmoid"):
        # source: transformer_config.py, "Please use --moe-router-pre-softmax when topk is 1."
        expected = "2 or more: Megatron-LM does not normalise the weight of one"
        lacking.append(Lack("number of best experts", expected, "1"))
    if is_latent(model) and model.eps not in (None, LATENT_EPS):
        expected = f"{LATENT_EPS}, which transformers' norms of latents have"
        lacking.append(Lack(model.word("eps"), expected, f"{model.eps}"))
    return lacking


def list_lacks_of_further_layers(model: Model) -> list[Lack]:
    """List reasons why Megatron-LM cannot build the MTP layers, which have the same structure as its last
    layer.

    source: megatron/core/models/gpt/gpt_layer_specs.py (get_gpt_mtp_block_spec)
    """
    kind = _find_last_kind(model) if model.further_layers else None
    if kind is None:
        return []
    expected = "attention and experts in the last layer, as in the MTP layers"
    return [Lack("last layer", expected, kind)]


def _find_last_kind(model: Model) -> str | None:
    """Return what the decoder's last layer has instead of attention or experts; None if it has both."""
    count = max((layer for block in model.blocks for layer in block.layers or ()), default=-1) + 1
    last = count - model.further_layers - 1
    if last in model.delta_layers:
        return "a gated delta net"
    return "an MLP" if last in model.dense_layers else None


def list_lacks_of_yarn(rope: Rope) -> list[Lack]:
    """List features of a scaled rotary embedding for multi-latent attention that Megatron-LM lacks.

    source: megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py; transformers
    modeling_rope_utils.py (_compute_yarn_parameters)
    """
    known = {*YARN, "mscale", "mscale_all_dim", "rope_type", "type", "rope_theta", "truncate"}
    known |= {"partial_rotary_factor"}
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    lacking = [
        Lack(f"rope_scaling ({key})", "none", shown(scaling[key])) for key in sorted(scaling.keys() - known)
    ]
    every, some = scaling.get("mscale_all_dim"), scaling.get("mscale")
    if bool(every) and not some:
        lacking.append(Lack("rope_scaling (mscale)", "a number next to mscale_all_dim", "none"))
    if scaling.get("truncate", True) is not True:
        lacking.append(Lack("rope_scaling (truncate)", "true", shown(scaling["truncate"])))
    if scaling.get("partial_rotary_factor", 1) != 1:
        got = shown(scaling["partial_rotary_factor"])
        lacking.append(Lack("rope_scaling (partial_rotary_factor)", "1", got))
    if scaling.get("factor") is None:
        lacking.append(Lack("rope_scaling (factor)", "a number", "none"))
    return lacking


def _normalised(args: Mapping[str, Any]) -> bool:
    """Return True if the weights of the top k experts are normalised.

    Megatron's softmax over the top k alone equals a softmax over all experts that is normalised afterwards.
    With moe_router_pre_softmax, nothing is normalised.

    source: megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
    """
    return not args.get("moe_router_pre_softmax")


def read_experts(args: Mapping[str, Any], best: int) -> Experts:
    """Return the expert settings that the arguments state.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    scores = str(args.get("moe_router_score_function") or "softmax")
    groups = size(args, "moe_router_num_groups") if args.get("moe_router_group_topk") else None
    return Experts(
        best,
        normalised=best > 1 if scores == "sigmoid" else _normalised(args),
        scores=scores,
        correction=read_flag(args, "moe_router_enable_expert_bias"),
        groups=groups or 1,
        best_groups=size(args, "moe_router_group_topk") or 1 if groups else 1,
        scale=read_real(args, "moe_router_topk_scaling_factor", 1.0),
        shared=args.get("moe_shared_expert_intermediate_size") is not None,
        shared_gate=bool(args.get("moe_shared_expert_gate")),
    )


def list_blocks(args: Mapping[str, Any], block: Block) -> tuple[Block, ...]:
    """Return the kinds of layers: the given block, and the same without experts if the arguments state such
    layers.
    """
    layers = size(args, "num_layers") or 0
    dense = (list_layers(args) or ([], []))[1] if block.experts else []
    blocks = change_layers([block], dense, layers, drop_experts)
    return change_layers(blocks, list_delta_layers(args), layers, take_delta_net)


def is_mixed(model: Model) -> bool:
    """Return True for a model whose layers are numbered because they may differ."""
    shared = model.experts is not None and model.experts.shared
    return is_latent(model) or shared or bool(model.dense_layers) or has_delta_table(model)


def has_delta_table(model: Model) -> bool:
    """Return True for gated delta nets, and for attention with an output gate."""
    return bool(model.delta_layers) or model.attention.output_gate


def is_latent(model: Model) -> bool:
    """Return True for multi-latent attention."""
    return model.attention.kind == "latent"


def read_rope_of_latent(args: Mapping[str, Any], rope: Rope) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of multi-latent attention, and its features that no other framework
    supports.

    source: megatron/core/transformer/multi_latent_attention.py, transformer_config.py (MLATransformerConfig)

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    kind = str(args.get("rope_type") or "yarn")
    factor, every = read_real(args, "rotary_scaling_factor", 40.0), args.get("mscale_all_dim") or 0.0
    some = read_real(args, "mscale", 1.0)
    if kind != "yarn":
        lacking = [] if kind == "rope" else [Lack("rope_type", "rope | yarn", kind[:80])]
        if every and factor > 1:
            lacking.append(Lack("mscale_all_dim", "0 without YaRN", f"{every}"))
        return rope, lacking
    scaling = {
        "factor": factor,
        "original_max_position_embeddings": int(read_real(args, "original_max_position_embeddings", 4096)),
        "beta_fast": read_real(args, "beta_fast", 32.0),
        "beta_slow": read_real(args, "beta_slow", 1.0),
    }
    if every:
        scaling |= {"mscale": some, "mscale_all_dim": read_real(args, "mscale_all_dim", 0.0)}
    lacking = [] if every or some == 1 else [Lack("mscale", "1 without mscale_all_dim", f"{some}")]
    return Rope(rope.base, rope.share, "yarn", scaling), lacking


def list_lacks_of_routing(args: Mapping[str, Any]) -> list[Lack]:
    """List routing features that other frameworks lack."""
    kinds = args.get("moe_router_load_balancing_type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    checks = [
        ("moe_router_topk_limited_devices", "None", args.get("moe_router_topk_limited_devices") or None),
        ("moe_apply_probs_on_input", "False", bool(args.get("moe_apply_probs_on_input"))),
        ("moe_expert_capacity_factor", "None", args.get("moe_expert_capacity_factor")),
        (
            "moe_router_load_balancing_type",
            "no sinkhorn",
            "sinkhorn" if "sinkhorn" in kinds else "no sinkhorn",
        ),
    ]
    return [Lack(key, expected, str(got)[:80]) for key, expected, got in checks if str(got) != expected]
