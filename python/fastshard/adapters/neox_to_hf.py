"""GPT-NeoX models in transformers: which class computes the same, and its ``config.json``.

source: transformers models/{gpt_neox,llama,mistral}; gpt-neox megatron/model, tools/ckpts/convert_neox_to_hf.py
"""

from __future__ import annotations

from typing import Any

from ..configs import shown
from ..errors import FastshardError, Finding, error_for
from .base import Source, positive_number, whole_number
from .neox_features import DEFAULT_ACTIVATION, EPS, activation_of, te_differences

#: GPT-NeoX activation -> transformers'. A gated one by what it applies to the gate.
_ACTIVATIONS = {
    "gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "mish": "mish",
    "swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid", "bilinear": "linear",
}  # fmt: skip

_Reason = tuple[str, str, str]


def facts_of(source: Source) -> tuple[str, dict[str, bool]]:
    """Layout table and facts of the Hugging Face model for a GPT-NeoX source.

    Raises:
        FastshardError: ``FS514``, one finding for each thing that no class of transformers computes;
            ``FS209`` if nothing states the activation of a gated MLP.
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
    activation_of(source)
    tied = source.facts.get("tied", False)
    facts = {"tied": tied, "head": not tied, "attention_bias": features["attention_bias"]}
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
    activation = str(config.get("activation", DEFAULT_ACTIVATION))
    if activation not in _ACTIVATIONS:
        reasons.append(("activation", ", ".join(_ACTIVATIONS), activation))
    if features["attention_bias"] != features["dense_bias"]:
        reasons.append(
            ("attention bias", "on all of its projections or on none", _some(features["attention_bias"]))
        )
    if features["mlp_bias"] != features["mlp_out_bias"]:
        reasons.append(("MLP bias", "on all of its projections or on none", _some(features["mlp_bias"])))
    kinds = attention_kinds(config)
    # Flash and ring attention compute what global attention does.
    if kinds - {"global", "flash", "ring"}:
        reasons.append(("attention_config", "global or flash", ", ".join(sorted(kinds))))
    elif _window(config) is not None and (kinds != {"flash"} or features["te_mha"]):
        # Documented for flash attention alone. The mask of global attention has the window too, but fused
        # kernels do not look at it; Transformer Engine takes another kind of value.
        # source: gpt-neox neox_arguments/neox_args.py, megatron/utils.py get_attn_mask, model/fused_softmax.py
        got = "Transformer Engine's attention" if features["te_mha"] else ", ".join(sorted(kinds))
        reasons.append(("sliding_window_width", "attention_config: flash in all layers", got))
    return reasons


def _window(config: dict[str, Any]) -> int | None:
    """Positions that a token sees besides itself, to its left; None for all.

    source: gpt-neox megatron/model/transformer.py: flash-attn gets ``window_size=(width, -1)``

    Raises:
        FastshardError: ``FS211`` if it is no whole number.
    """
    width = config.get("sliding_window_width")
    if width is None:
        return None
    if not isinstance(width, int) or isinstance(width, bool) or not 0 <= width < 1 << 31:
        raise FastshardError.of(
            "FS211", "config: sliding_window_width", expected="a whole number", got=shown(width)
        )
    return width


def _some(first: bool) -> str:
    return "the first only" if first else "the last only"


def attention_kinds(config: dict[str, Any]) -> set[str]:
    """Kinds of attention in ``attention_config``: ``[[["global", "flash"], 12]]``, or one word per layer.

    Raises:
        FastshardError: ``FS211`` if it is of another form.
    """
    stated = config.get("attention_config")
    if stated is None:
        return {"global"}
    kinds: list[Any] = []
    for block in stated if isinstance(stated, list) else [None]:
        if isinstance(block, list) and len(block) == 2:
            kinds += block[0] if isinstance(block[0], list) else [block[0]]
        else:
            kinds.append(block)
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise FastshardError.of(
            "FS211",
            "config: attention_config",
            expected='kinds and numbers of layers, as [[["flash"], 12]]',
            got=shown(stated),
        )
    return set(kinds)


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
    if _window(config) is not None:
        reasons.append(("sliding_window_width", "none", str(config["sliding_window_width"])))
    return reasons


def _llama(source: Source, features: dict[str, Any]) -> list[_Reason]:
    config = source.config or {}
    reasons = []
    if positive_number(config, "rotary_pct", 1.0) != 1.0:
        reasons.append(("rotary_pct", "1.0", str(config["rotary_pct"])))
    if _window(config) is not None and (features["attention_bias"] or features["mlp_bias"]):
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
        if isinstance(default, int):
            return whole_number(config, key, default)
        if isinstance(default, float):
            return positive_number(config, key, default)
        return config[key]

    activation = activation_of(source)
    known("activation", activation)
    norm = features["norm"]
    eps_key, eps_default = EPS[norm]
    eps = known(eps_key, eps_default)
    if norm == "rmsnorm" and eps > 1e-7:
        note(
            f"config: GPT-NeoX's RMSNorm divides by rms + eps, Llama's by sqrt(rms^2 + eps); {eps_key} is written"
        )
    findings += te_differences(source, "config.json")
    hidden_act = _ACTIVATIONS[activation]
    if activation == "gelu" and not features["gated"] and config.get("bias_gelu_fusion"):
        # source: gpt-neox megatron/model/fused_bias_gelu.py
        hidden_act = "gelu_pytorch_tanh"
        note(f"config: hidden_act {hidden_act} is written, the form of gelu that bias_gelu_fusion computes")
    if "pos_emb" not in config:
        note("config: pos_emb is stated nowhere, and no position embedding is there; rotary is assumed")
    out: dict[str, Any] = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": axes["V"],
        "hidden_size": axes["H"],
        "num_hidden_layers": axes["L"],
        "num_attention_heads": axes["g"] * axes["r"],
        "intermediate_size": axes["F"],
        "hidden_act": hidden_act,
        "max_position_embeddings": known("max_position_embeddings", 2048),
        "tie_word_embeddings": source.facts.get("tied", False),
        "attention_bias": features["attention_bias"],
        "use_cache": True,
    }
    tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
    out |= {key: value for key, value in tokens.items() if isinstance(value, int)}
    if unknown := [key for key, value in tokens.items() if not isinstance(value, int)]:
        note(f"config: left out, since the tokenizer alone knows: {', '.join(unknown)}")
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
    window = _window(config)
    if window is not None:
        # Mistral has no biases; facts_of has seen to it.
        del out["attention_bias"], out["mlp_bias"]
        out |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        # transformers counts the token itself.
        out["sliding_window"] = window + 1
    return out, findings
