"""What the arguments in a Megatron-LM checkpoint say of its model, and the Hugging Face config of the same.

source: Megatron-LM megatron/training/arguments.py, megatron/core/transformer/moe/{moe_layer,router,experts}.py;
transformers models/{llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..configs import shown
from ..errors import FastshardError, Finding
from . import hf_config
from .base import Source

_ACTIVATION = "silu"
_WHOLE = ("max_position_embeddings", "moe_router_topk")
#: What `--use-rope-scaling` computes besides its factor.
#: source: megatron/core/models/common/embeddings/rotary_pos_embedding.py (`_apply_scaling`)
LLAMA3_SCALING = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
#: Arguments that change what is computed and neither names nor shapes, with the values besides None that do not.
#: source: megatron/core/transformer/transformer_config.py, Megatron-LM megatron/training/arguments.py
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rotary_seq_len_interpolation_factor": (1,),
    "no_rope_freq": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "activation_func_clamp_value": (),
    "glu_linear_offset": (0,),
    "mtp_num_layers": (0,),
    "experimental_attention_variant": (),
    "linear_attention_type": (),
    "hybrid_override_pattern": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
} | dict.fromkeys(
    (
        "apply_layernorm_1p", "apply_residual_connection_post_layernorm", "attention_output_gate",
        "heterogeneous_block_specs", "is_hybrid_model", "layernorm_zero_centered_gamma",
        "moe_router_force_load_balancing", "multi_latent_attention", "qk_l2_norm", "quick_geglu",
        "retro_add_retriever", "rotary_interleaved", "squared_relu", "use_mup",
    ),
    (False,),
)  # fmt: skip


def arguments(state: Any) -> dict[str, Any]:
    """The arguments of a rank file or ``common.pt``: a Namespace arrives as an inert record."""
    args = state.get("args") if isinstance(state, dict) else None
    if isinstance(args, dict) and "__class__" in args:
        args = args.get("state")
    return args if isinstance(args, dict) else {}


def number(args: dict[str, Any], key: str) -> int | None:
    """A positive whole number among the arguments.

    Raises:
        FastshardError: ``FS211`` if it is something else.
    """
    value = args.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 48:
        raise FastshardError.of("FS211", f"args.{key}", expected="a positive whole number", got=shown(value))
    return value


def real(args: dict[str, Any], key: str, default: float) -> float:
    """A finite positive number among the arguments.

    Raises:
        FastshardError: ``FS211`` if it is something else.
    """
    value = args.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 63:
        raise FastshardError.of("FS211", f"args.{key}", expected="a positive number", got=shown(value))
    return value


def flag(args: dict[str, Any], key: str) -> bool:
    """A choice among the arguments that is off where nothing is said.

    Raises:
        FastshardError: ``FS211`` if it is neither on nor off.
    """
    value = args.get(key)
    if value not in (None, True, False):
        raise FastshardError.of("FS211", f"args.{key}", expected="True or False", got=shown(value))
    return bool(value)


def window(args: dict[str, Any]) -> int | None:
    """The positions that attention sees, the token itself among them; None for all before it.

    The argument has those to the left besides the token, and those to the right; -1 is all of them.
    source: megatron/core/transformer/transformer_config.py (window_size)

    Raises:
        FastshardError: ``FS211`` if it is no pair of whole numbers, ``FS514`` for one to the right or in
            some layers.
    """
    value = args.get("window_size")
    if value is None:
        return None
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n >= 1 << 48 for n in value)
    ):
        raise FastshardError.of(
            "FS211", "args.window_size", expected="a pair of whole numbers", got=str(value)[:80]
        )
    left, right = value
    if left < 0 and right <= 0:
        return None
    every = args.get("window_attn_skip_freq")
    for key, expected, wrong in (
        ("window_size", "none to the right", right > 0),
        (
            "window_attn_skip_freq",
            "None: in all layers",
            every is not None and not (isinstance(every, list) and all(n == 1 for n in every)),
        ),
    ):
        if wrong:
            raise FastshardError.of(
                "FS514",
                f"transformers has no model of the Llama kind with this {key}",
                expected=expected,
                got=str(args[key])[:80],
                help="`fastshard merge` writes the whole tensors under Megatron's own names",
            )
    return int(left) + 1


def _neutral(key: str, value: Any) -> bool:
    if value is None or (key == "no_rope_freq" and isinstance(value, list) and all(n == 0 for n in value)):
        return True
    # False equals 0, which is a number and not the absence of one.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in _NEUTRAL[key])


def mixture(args: dict[str, Any], names: Iterable[str]) -> bool:
    """True for a mixture of experts; without arguments the names tell."""
    return bool(args.get("num_experts")) or any(".mlp.experts." in name for name in names)


def refuse_mixtures(args: dict[str, Any], file: str | None) -> None:
    """Mixtures of experts that the tables have no names for.

    Raises:
        FastshardError: ``FS514`` naming the argument.
    """
    every = args.get("moe_layer_freq", 1)
    dense = every not in (None, 1) and not (isinstance(every, list) and all(n == 1 for n in every))
    reasons = [
        ("moe_layer_freq", "1: experts in every layer", dense),
        ("moe_shared_expert_intermediate_size", "None: no shared experts", args.get("moe_shared_expert_intermediate_size")),
        ("moe_latent_size", "None: experts of the hidden size", args.get("moe_latent_size")),
        ("mtp_num_layers", "None: no layers for further tokens", args.get("mtp_num_layers")),
    ]  # fmt: skip
    for name, expected, got in reasons:
        if got:
            raise FastshardError.of(
                "FS514",
                f"a mixture of experts with this {name}: not read",
                file=file,
                expected=expected,
                got=str(args[name]),
                help="describe its tensors in a layout of your own (--layout)",
            )


def describe(source: Source, args: dict[str, Any], names: set[str]) -> None:
    """Axes and facts: sizes from the arguments, to be held against the tensors; facts from names."""
    heads, groups = number(args, "num_attention_heads"), number(args, "num_query_groups")
    groups = groups if args.get("group_query_attention") and groups else heads
    axes = {
        "L": number(args, "num_layers"),
        "H": number(args, "hidden_size"),
        "g": groups,
        "r": heads // groups if heads and groups and heads % groups == 0 else None,
        "d": number(args, "kv_channels"),
        "P": number(args, "padded_vocab_size"),
        "F": number(args, "ffn_hidden_size"),
    }
    moe = mixture(args, names)
    if moe:
        axes["E"] = number(args, "num_experts")
        axes["F"] = number(args, "moe_ffn_hidden_size") or axes["F"]
    if axes["d"] is None and axes["H"] and heads and axes["H"] % heads == 0:
        axes["d"] = axes["H"] // heads
    source.axes = {k: v for k, v in axes.items() if v is not None}
    source.family = "mixtral" if moe else "llama"

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
    source.config = dict(args)


def facts_of(source: Source) -> tuple[str, dict[str, bool]]:
    """Layout table and facts of the Hugging Face model for a Megatron source.

    Raises:
        FastshardError: ``FS514`` for what no class of transformers with these names computes.
    """
    config, facts = source.config or {}, source.facts
    reasons = [
        ("normalization", "RMSNorm", config.get("normalization", "LayerNorm")),
        ("swiglu", "True", facts.get("gated")),
        ("add_bias_linear", "False", facts["linear_bias"] and (not facts["qkv_bias"] or facts["qk_norm"])),
        ("rotary_percent", "1.0", float(real(config, "rotary_percent", 1.0))),
        ("position_embedding_type", "rope", config.get("position_embedding_type", "rope")),
    ]
    for key, values in _NEUTRAL.items():
        if not _neutral(key, config.get(key)):
            reasons.append((key, str(next(iter(values), None)), config[key]))
    if window(config) is not None:
        # Llama, which alone has all biases, has no window; that of Qwen3 with experts is not known to be the same.
        reasons += [
            ("window_size and add_bias_linear", "False", facts["linear_bias"]),
            ("window_size, num_experts and qk_layernorm", "False", facts["moe"] and facts["qk_norm"]),
        ]
    if facts["moe"]:
        reasons += _routing(config, facts)
    for what, expected, got in reasons:
        if str(got) != expected:
            kind = "Mixtral" if facts["moe"] else "Llama"
            raise FastshardError.of(
                "FS514",
                f"transformers has no model of the {kind} kind with this {what}",
                expected=expected,
                got=str(got)[:80],
                help="`fastshard merge` writes the whole tensors under Megatron's own names",
            )
    wanted = {
        "tied": facts["tied"],
        "head": not facts["tied"],
        "attention_bias": facts["qkv_bias"],
        "out_bias": facts["linear_bias"],
        "mlp_bias": facts["linear_bias"],
        "qk_norm": facts["qk_norm"],
    }
    if facts["moe"]:
        # Mixtral has no norms of queries and keys, Qwen3 has them always.
        wanted |= {"stacked_experts": False, "shared_expert": False}
        return ("hf.qwen_moe" if facts["qk_norm"] else "hf.mixtral"), wanted
    return "hf.llama", wanted


def _routing(config: dict[str, Any], facts: dict[str, bool]) -> list[tuple[str, str, Any]]:
    """What transformers' routers do: softmax, the best k, and (Mixtral always) weights that add up to 1.

    Megatron's softmax over the best k alone gives the same as one over all, normalised afterwards; with
    moe_router_pre_softmax nothing is normalised, which only Qwen can do.
    source: megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
    """
    reasons: list[tuple[str, str, Any]] = [
        ("moe_router_score_function", "softmax", config.get("moe_router_score_function") or "softmax"),
        ("moe_router_enable_expert_bias", "False", bool(config.get("moe_router_enable_expert_bias"))),
        ("moe_router_topk_scaling_factor", "None", config.get("moe_router_topk_scaling_factor")),
        ("moe_router_num_groups", "None", config.get("moe_router_num_groups")),
        ("moe_apply_probs_on_input", "False", bool(config.get("moe_apply_probs_on_input"))),
        ("moe_expert_capacity_factor", "None", config.get("moe_expert_capacity_factor")),
        ("moe_router_load_balancing_type", "no sinkhorn", _balancing(config)),
    ]
    if not facts["qk_norm"]:
        reasons += [
            ("add_qkv_bias", "False", facts["qkv_bias"]),
            ("moe_router_pre_softmax", "False", bool(config.get("moe_router_pre_softmax"))),
        ]
    return reasons


def _balancing(config: dict[str, Any]) -> str:
    kinds = config.get("moe_router_load_balancing_type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "sinkhorn" if "sinkhorn" in kinds else "no sinkhorn"


def config_json(source: Source, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """``config.json`` of the model: Qwen3 with norms of q and k, Qwen2 with biases, else Llama or Mistral."""
    config, facts = source.config or {}, source.facts
    findings: list[Finding] = []

    def known(key: str, default: float) -> float:
        if config.get(key) is None:
            findings.append(
                Finding.of(
                    "FS109",
                    f"config: {key} is stated nowhere; Megatron's default {default!r} is written",
                    severity="note",
                    file="config.json",
                )
            )
            return default
        return number(config, key) or default if key in _WHOLE else real(config, key, default)

    seen = window(config)
    kind, name = "llama", "LlamaForCausalLM"
    if facts["qk_norm"]:
        kind, name = "qwen3", "Qwen3ForCausalLM"
    elif facts["qkv_bias"] and not facts["linear_bias"]:
        kind, name = "qwen2", "Qwen2ForCausalLM"
    elif seen is not None:
        kind, name = "mistral", "MistralForCausalLM"
    if facts["moe"]:
        kind, name = "mixtral", "MixtralForCausalLM"
        if facts["qk_norm"]:
            kind, name = "qwen3_moe", "Qwen3MoeForCausalLM"
    out = {
        "architectures": [name],
        "model_type": kind,
        **hf_config.sizes(axes),
        "hidden_act": _ACTIVATION,
        "max_position_embeddings": known("max_position_embeddings", 4096),
        "rms_norm_eps": known("norm_epsilon", 1e-5),
        "rope_theta": known("rotary_base", 10000),
        "tie_word_embeddings": facts["tied"],
        "use_cache": True,
    }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        out["attention_bias"] = facts["qkv_bias"]
    if kind == "llama":
        out["mlp_bias"] = facts["linear_bias"]
    if flag(config, "use_rope_scaling"):
        factor = known("rope_scaling_factor", 8.0)
        out["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}
    if facts["moe"]:
        # source: megatron/core/transformer/transformer_config.py, moe_router_topk = 2
        out["num_experts_per_tok"] = known("moe_router_topk", 2)
    if kind == "mixtral":
        out["num_local_experts"] = axes["E"]
    if kind == "qwen3_moe":
        out |= {
            "num_experts": axes["E"],
            "moe_intermediate_size": axes["F"],
            "norm_topk_prob": not config.get("moe_router_pre_softmax"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if seen is not None:
        out["sliding_window"] = seen
        if kind in ("qwen2", "qwen3"):
            # Both have it in the layers from some number on, and only where they say so.
            out |= {
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention"] * axes["L"],
            }
    return out, findings
