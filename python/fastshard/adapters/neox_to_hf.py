"""GPT-NeoX models in transformers: which class computes the same, and its ``config.json``.

source: transformers models/{gpt_neox,llama,mistral}; gpt-neox megatron/model, tools/ckpts/convert_neox_to_hf.py
"""

from __future__ import annotations

from typing import Any

from ..errors import FastshardError, Finding, error_for
from .base import Source

#: GPT-NeoX activation -> transformers'. A gated one by what it applies to the gate.
_ACTIVATIONS = {
    "gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "mish": "mish",
    "swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid", "bilinear": "linear",
}  # fmt: skip
#: eps by kind of norm: key and default. source: gpt-neox megatron/neox_arguments/neox_args.py
_EPS = {
    "layernorm": ("layernorm_epsilon", 1e-5), "te_layernorm": ("layernorm_epsilon", 1e-5),
    "rmsnorm": ("rms_norm_epsilon", 1e-8), "te_rmsnorm": ("rms_norm_epsilon", 1e-8),
}  # fmt: skip
#: What LayerNormMLP uses, whatever the config says. source: gpt-neox megatron/model/transformer_engine.py
_TE_EPS = {"layernorm": 1e-5, "te_layernorm": 1e-5, "rmsnorm": 1e-8, "te_rmsnorm": 1e-8}

_Reason = tuple[str, str, str]


def facts_of(source: Source) -> tuple[str, dict[str, bool]]:
    """Layout table and facts of the Hugging Face model for a GPT-NeoX source.

    Raises:
        FastshardError: ``FS514``, one finding for each thing that no class of transformers computes.
    """
    features = source.values["features"]
    llama = source.family == "llama"
    reasons = [*_common(source, features), *(_llama if llama else _gpt_neox)(source, features)]
    if reasons:
        name = "Llama" if llama else "GPT-NeoX"
        raise error_for(
            [
                Finding.of(
                    "FS514",
                    f"transformers has no {name} model with this {what}",
                    expected=expected,
                    got=got,
                    help="`fastshard merge` writes the whole tensors under GPT-NeoX's own names",
                )
                for what, expected, got in reasons
            ]
        )
    facts = {"tied": source.facts.get("tied", False), "attention_bias": features["attention_bias"]}
    if llama:
        facts |= {"mlp_bias": features["mlp_bias"], "out_bias": features["attention_bias"], "qk_norm": False}
    return ("hf.llama" if llama else "hf.gpt_neox"), facts


def _common(source: Source, features: dict[str, Any]) -> list[_Reason]:
    """What neither class has."""
    config = source.config or {}
    reasons = []
    positions = "learned" if features["learned_positions"] else str(config.get("pos_emb", "rotary"))
    if positions != "rotary":
        reasons.append(("pos_emb", "rotary", positions))
    if features["qk_layernorm"]:
        reasons.append(("use_qk_layernorm", "no norm of queries and keys", "attention.qk_layernorm"))
    if features["reward_head"]:
        reasons.append(("head", "final_linear", "rm_linear"))
    if config.get("use_mup"):
        reasons.append(("use_mup", "no scaling of what layers give", "true"))
    activation = str(config.get("activation", "gelu"))
    if activation not in _ACTIVATIONS:
        reasons.append(("activation", ", ".join(_ACTIVATIONS), activation))
    if features["attention_bias"] != features["dense_bias"]:
        reasons.append(
            ("attention bias", "on all of its projections or on none", _some(features["attention_bias"]))
        )
    if features["mlp_bias"] != features["mlp_out_bias"]:
        reasons.append(("MLP bias", "on all of its projections or on none", _some(features["mlp_bias"])))
    kinds = {kind for block in config.get("attention_config") or [] for kind in _kinds(block)}
    # Flash and ring attention compute what global attention does.
    if kinds - {"global", "flash", "ring"}:
        reasons.append(("attention_config", "global or flash", ", ".join(sorted(kinds))))
    return reasons


def _number(config: dict[str, Any], key: str, default: float) -> float:
    """A positive number of the config; YAML reads `1e-5` as text.

    Raises:
        FastshardError: ``FS211`` if it is none.
    """
    value = config.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf") or isinstance(value, bool):
        raise FastshardError.of("FS211", f"config: {key}", expected="a positive number", got=repr(value))
    return number


def _some(first: bool) -> str:
    return "the first only" if first else "the last only"


def _kinds(block: Any) -> list[str]:
    """Kinds of attention in one entry of ``attention_config``, e.g. ``[["global", "flash"], 12]``."""
    inner = block[0] if isinstance(block, list) and block else block
    return [str(kind) for kind in (inner if isinstance(inner, list) else [inner])]


def _gpt_neox(source: Source, features: dict[str, Any]) -> list[_Reason]:
    config = source.config or {}
    reasons = []
    if features["norm"] not in ("layernorm", "te_layernorm"):
        reasons.append(("norm", "layernorm, or rmsnorm with all of Llama", features["norm"]))
    elif not features["norm_bias"]:
        reasons.append(("norm", "layernorm with biases", "no biases (use_bias_in_norms: false)"))
    if features["gated"]:
        reasons.append(
            ("MLP", "a plain one, or a gated one with all of Llama", str(config.get("activation", "gated")))
        )
    elif not features["mlp_bias"]:
        reasons.append(("MLP", "one with biases", "no biases (use_bias_in_mlp: false)"))
    if features["gqa"]:
        reasons.append(
            (
                "num_kv_heads",
                f"{source.axes['g'] * source.axes['r']}, as many as heads",
                str(source.axes["g"]),
            )
        )
    if config.get("gpt_j_tied") and source.facts.get("gpt_j_residual"):
        reasons.append(("gpt_j_tied", "a norm of its own before the MLP", "true"))
    if config.get("sliding_window_width"):
        reasons.append(("sliding_window_width", "none", str(config["sliding_window_width"])))
    return reasons


def _llama(source: Source, features: dict[str, Any]) -> list[_Reason]:
    config = source.config or {}
    reasons = []
    if _number(config, "rotary_pct", 1.0) != 1.0:
        reasons.append(("rotary_pct", "1.0", str(config["rotary_pct"])))
    if config.get("sliding_window_width") and (features["attention_bias"] or features["mlp_bias"]):
        reasons.append(("sliding_window_width", "no biases, as in Mistral", "biases"))
    return reasons


def config_json(source: Source, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """The config.json without its dtype, and what had to be assumed.

    Args:
        source: the declaration of the source.
        axes: extents that the plan bound, e.g. ``F``; sizes come from tensors.

    Raises:
        FastshardError: ``FS209`` if the form of the residual is stated nowhere.
    """
    config, features = source.config or {}, source.values["features"]
    residual = source.facts.get("gpt_j_residual")
    if residual is None:
        raise error_for(
            [
                Finding.of(
                    "FS209",
                    "the model depends on `gpt_j_residual`, which nothing here states",
                    help="give the training config with --config (it must say gpt_j_residual: true or false)",
                )
            ]
        )
    findings: list[Finding] = []

    def note(message: str, severity: str = "note", code: str = "FS109", **more: str) -> None:
        findings.append(Finding.of(code, message, severity=severity, file="config.json", **more))

    def known(key: str, default: Any) -> Any:
        if config.get(key) is None:
            note(f"config: {key} is stated nowhere; GPT-NeoX's default {default!r} is written")
            return default
        if isinstance(default, (int, float)):
            number = _number(config, key, default)
            return int(number) if number.is_integer() and isinstance(default, int) else number
        return config[key]

    activation = str(known("activation", "gelu"))
    norm = features["norm"]
    eps_key, eps_default = _EPS[norm]
    eps = known(eps_key, eps_default)
    if norm == "rmsnorm" and eps > 1e-7:
        note(
            f"config: GPT-NeoX's RMSNorm divides by rms + eps, Llama's by sqrt(rms^2 + eps); {eps_key} is written"
        )
    if features["te_layernorm_mlp"] and eps != _TE_EPS[norm]:
        note(
            f"config: transformers has one eps for all norms; {eps_key} is written",
            "warning",
            "FS215",
            expected=f"{_TE_EPS[norm]:g}, as Transformer Engine's LayerNormMLP used before each MLP",
            got=f"{eps:g}",
            help="compare logits with the run's own; the norms before attention and the last one used it",
        )
    tanh = "bias_gelu_fusion" if config.get("bias_gelu_fusion") else ""
    tanh = "Transformer Engine" if features["te_layernorm_mlp"] else tanh
    if activation == "gelu" and tanh:
        note(
            "config: hidden_act gelu is written, as GPT-NeoX's own converter does; "
            f"{tanh} computes its tanh form, gelu_pytorch_tanh"
        )
    out: dict[str, Any] = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": axes["V"],
        "hidden_size": axes["H"],
        "num_hidden_layers": axes["L"],
        "num_attention_heads": axes["g"] * axes["r"],
        "intermediate_size": axes["F"],
        "hidden_act": _ACTIVATIONS[activation],
        "max_position_embeddings": known("max_position_embeddings", 2048),
        "tie_word_embeddings": source.facts.get("tied", False),
        "attention_bias": features["attention_bias"],
        "use_cache": True,
        "bos_token_id": config.get("bos_token_id", 0),
        "eos_token_id": config.get("eos_token_id", 0),
    }
    base = known("rotary_emb_base", 10000)
    if source.family == "gpt_neox":
        out |= {
            "layer_norm_eps": eps,
            "rotary_pct": known("rotary_pct", 1.0),
            "rotary_emb_base": base,
            "use_parallel_residual": residual,
        }
        return out, findings
    out |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": eps,
        "rope_theta": base,
        "num_key_value_heads": axes["g"],
        "head_dim": axes["d"],
        "mlp_bias": features["mlp_bias"],
    }
    if window := config.get("sliding_window_width"):
        # Mistral has no biases; facts_of has seen to it.
        del out["attention_bias"], out["mlp_bias"]
        out |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return out, findings
