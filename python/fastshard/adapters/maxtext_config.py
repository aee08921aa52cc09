"""MaxText's yml: what it says about axes and facts, what Hugging Face's ``config.json`` takes of it, and how one
is written.

source: MaxText configs/base.yml and configs/models, configs/types.py, layers/attentions.py, models/{llama2,gpt3}.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..configs import shown
from ..errors import FastshardError, Finding, error_for
from . import hf_config
from .base import Source, positive_number, whole_number

#: MaxText's decoder blocks that the tables hold, and what they compute. source: MaxText layers/decoders.py
BLOCKS = {"llama2": "llama", "mistral": "llama", "gpt3": "gpt3"}
#: Keys that tell MaxText's yml from other configs.
_TELLING = ("decoder_block", "base_config", "logits_via_embedding", "scan_layers", "param_scan_axis",
            "normalization_layer_epsilon", "rope_max_timescale", "fused_qkv", "rope_type", "model_name")  # fmt: skip
#: source: MaxText configs/base.yml
_DEFAULTS = {"rope_max_timescale": 10_000, "normalization_layer_epsilon": 1e-5}
#: Hard-coded in MaxText. source: MaxText layers/embeddings.py, LLaMARotaryEmbedding
LLAMA3_SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_MERGE = "`fastshard merge` writes the tensors under MaxText's own names"


def is_maxtext(config: dict[str, Any]) -> bool:
    """True for what MaxText reads, False for other configs."""
    if "model_type" in config or "architectures" in config:
        return False
    return any(key in config for key in _TELLING) or any(str(key).startswith("base_") for key in config)


def flag(config: dict[str, Any], key: str) -> bool | None:
    """A choice of the config; None where it says nothing.

    Raises:
        FastshardError: ``FS211`` if it is neither on nor off.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise FastshardError.of("FS211", f"config: {key}", expected="true or false", got=shown(value))
    return value


def integer(config: dict[str, Any], key: str) -> int | None:
    """A whole number of the config, negative ones too; None where it says nothing.

    Raises:
        FastshardError: ``FS211`` if it is something else.
    """
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31):
        raise FastshardError.of("FS211", f"config: {key}", expected="a whole number", got=shown(value))
    return value


def _scales(config: dict[str, Any]) -> dict[str, int]:
    """Factors of ``global_parameter_scale``. source: MaxText configs/types.py, get_individual_scales"""
    scale = whole_number(config, "global_parameter_scale", 1)
    if scale & (scale - 1) or scale > 1 << 30:
        raise FastshardError.of(
            "FS211", "config: global_parameter_scale", expected="a power of two", got=str(scale)
        )
    times, rest = divmod(scale.bit_length() - 1, 3)
    heads, width = 1 << times + (rest > 0), 1 << times + (rest > 1)
    return {"emb_dim": width, "num_query_heads": heads, "num_kv_heads": heads, "mlp_dim": heads,
            "num_decoder_layers": 1 << times}  # fmt: skip


def sizes(config: dict[str, Any]) -> dict[str, int]:
    """Sizes that the yml states; those that it leaves to MaxText's defaults are not among them.

    Raises:
        FastshardError: ``FS211`` for one that is no positive whole number.
    """
    out = {}
    for name, times in _scales(config).items():
        if config.get(f"base_{name}") is not None:
            out[name] = whole_number(config, f"base_{name}", 1) * times
        elif config.get(name) is not None:
            # MaxText's own copy of a run's config has the products.
            out[name] = whole_number(config, name, 1)
    out |= {
        key: whole_number(config, key, 1) for key in ("head_dim", "vocab_size") if config.get(key) is not None
    }
    if (integer(config, "trainable_position_size") or -1) > 0:
        out["trainable_position_size"] = whole_number(config, "trainable_position_size", 1)
    return out


def axes_of(config: dict[str, Any], family: str) -> dict[str, int]:
    """Extents of the tables' axes that a yml or a ``config.json`` states.

    Raises:
        FastshardError: ``FS211`` for sizes that are none or do not divide.
    """
    if not is_maxtext(config):
        return hf_config.axes_and_facts(config)[0] if family == "llama" else {}
    have = sizes(config)
    names = {"H": "emb_dim", "F": "mlp_dim", "L": "num_decoder_layers", "d": "head_dim", "V": "vocab_size",
             "P": "vocab_size", "S": "trainable_position_size"}  # fmt: skip
    axes = {axis: have[name] for axis, name in names.items() if name in have}
    heads, groups = have.get("num_query_heads"), have.get("num_kv_heads")
    if family == "gpt3":
        axes |= {"h": heads} if heads else {}
        return axes
    axes.pop("S", None)
    axes |= {"g": groups} if groups else {}
    if heads and groups:
        if heads % groups:
            raise FastshardError.of(
                "FS211",
                "config: base_num_query_heads over base_num_kv_heads",
                expected=f"a multiple of {groups}",
                got=str(heads),
            )
        axes["r"] = heads // groups
    return axes


def facts_of(source: Source) -> tuple[str, dict[str, bool]]:
    """Layout table and facts of the Hugging Face model for a MaxText source.

    Raises:
        FastshardError: ``FS514``, one finding for each thing that no Llama of transformers computes;
            ``FS209`` where the config alone says which of two things a tied model computes.
    """
    if source.family != "llama":
        raise FastshardError.of(
            "FS514",
            "transformers has no model with GPT-3's zero-centred norms: its GPT-2 stores other values",
            expected="--to maxtext, --to maxtext:unscan",
            got="hf",
            help="`fastshard merge` writes the whole tensors under their own names",
        )
    config, tied = source.config or {}, source.facts.get("tied", False)
    if is_maxtext(config) and rope_of(config) is None:
        raise FastshardError.of(
            "FS209",
            "the order of queries and keys depends on `rope_type`, which nothing here states",
            help="give MaxText's yml with --config (it must say rope_type: default or llama3.1, or the model_name)",
        )
    facts = {"tied": tied, "head": not tied}
    facts |= dict.fromkeys(("attention_bias", "out_bias", "mlp_bias", "qk_norm"), False)
    if config and not is_maxtext(config):
        stated = hf_config.axes_and_facts(config)[1] if hf_config.layout_of(config) == "hf.llama" else None
        differing = sorted(key for key in facts if key != "head" and stated and stated[key] != facts[key])
        if stated is None or differing:
            raise FastshardError.of(
                "FS215",
                "the config is of another model than the tensors",
                expected="a Llama or Mistral"
                + (f" with {', '.join(f'{key}: {facts[key]}' for key in differing)}" if differing else ""),
                got=shown(config.get("model_type")),
                help="give the config of this model with --config",
            )
        return "hf.llama", facts
    if reasons := _differences(config, tied):
        raise error_for(
            [
                Finding.of(
                    "FS514",
                    f"transformers has no Llama with this {what}",
                    expected=expected,
                    got=got,
                    help=_MERGE,
                )
                for what, expected, got in reasons
            ]
        )
    return "hf.llama", facts


def _differences(config: dict[str, Any], tied: bool) -> list[tuple[str, str, str]]:
    """What a MaxText model computes and transformers' Llama does not. source: MaxText configs/base.yml"""
    activations = config.get("mlp_activations", ["silu", "linear"])
    linear = config.get("rope_linear_scaling_factor", 1.0)
    checks = [
        ("mlp_activations", "['silu', 'linear']", activations, activations == ["silu", "linear"]),
        ("rope_min_timescale", "1", config.get("rope_min_timescale", 1), config.get("rope_min_timescale", 1) == 1),
        ("rope_linear_scaling_factor", "1.0", linear, linear == 1),
        ("use_qk_norm", "false", config.get("use_qk_norm"), not config.get("use_qk_norm")),
        ("num_experts", "1", config.get("num_experts", 1), config.get("num_experts", 1) == 1),
        ("attn_logits_soft_cap", "none", config.get("attn_logits_soft_cap"), not config.get("attn_logits_soft_cap")),
        ("final_logits_soft_cap", "none", config.get("final_logits_soft_cap"), not config.get("final_logits_soft_cap")),
    ]  # fmt: skip
    if tied:
        normalised = config.get("normalize_embedding_logits", True)
        checks.append(("normalize_embedding_logits", "false", normalised, normalised is False))
    return [(what, expected, shown(got)) for what, expected, got, fits in checks if not fits]


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a MaxText model."""

    #: The two of a pair lie side by side.
    interleaved: bool
    #: Frequencies are scaled as Llama 3.1's are.
    scaled: bool


def rope_of(config: dict[str, Any]) -> Rope | None:
    """What a yml or ``config.json`` says of the rotary embedding, which no checkpoint of MaxText does.

    None where it leaves open which of two orders queries and keys have: in a yml of some ``model_name``
    alone, or a ``config.json`` without scaling, which MaxText can run with either.
    source: MaxText layers/attentions.py (init_rotary_embedding)

    Raises:
        FastshardError: ``FS211`` for values of another kind, ``FS514`` for an embedding that is neither.
    """
    if not config:
        return None
    if not is_maxtext(config):
        return Rope(True, True) if hf_config.rope_of(config, "MaxText", 1.0).kind == "llama3" else None
    kind, model = config.get("rope_type"), str(config.get("model_name") or "")
    if str(kind).lower().startswith("llama3.1") or model.startswith("llama3.1"):
        return Rope(True, flag(config, "rope_use_scale") is not False)
    if kind is None:
        # llama3.2 and later are not told apart by MaxText's own code and its converters alike.
        return Rope(False, False) if model.startswith(("llama2", "llama3-", "mistral")) else None
    if str(kind).lower() != "default":
        raise FastshardError.of(
            "FS514",
            "transformers has no Llama with this rope_type",
            expected="default | llama3.1",
            got=shown(kind),
            help=_MERGE,
        )
    return Rope(False, False)


def config_json(source: Source, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """``config.json`` of the model. What a config states nowhere is left out, and named.

    Raises:
        FastshardError: ``FS211`` for values of another kind.
    """
    config = source.config or {}
    size = hf_config.sizes(axes)
    findings = []
    if rope_of(config) is None:
        findings.append(
            _stated_nowhere(
                "rope_type: taken for llama3.1, whose order of queries and keys MaxText's converter writes; "
                "a run with rope_type default needs its yml with --config",
                "warning",
            )
        )
    if config and not is_maxtext(config):
        return {**config, **size}, findings
    mistral = config.get("decoder_block") == "mistral"
    out: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if mistral else "LlamaForCausalLM"],
        "model_type": "mistral" if mistral else "llama",
        **size,
        "hidden_act": "silu",
        "tie_word_embeddings": source.facts.get("tied", False),
        "use_cache": True,
    }
    if mistral:
        # MaxText's block attends to all positions before. source: MaxText models/mistral.py
        out["sliding_window"] = None
    else:
        out |= {"attention_bias": False, "mlp_bias": False}
    for key, name in (("rope_theta", "rope_max_timescale"), ("rms_norm_eps", "normalization_layer_epsilon")):
        if not config:
            # A guess would be a model that loads and is wrong.
            lacking = (
                f"{key} (MaxText's {name}): config.json lacks it, and transformers takes its own default"
            )
            findings.append(_stated_nowhere(lacking, "warning"))
        elif config.get(name) is None:
            findings.append(_assumed(name))
            out[key] = _DEFAULTS[name]
        else:
            out[key] = positive_number(config, name, _DEFAULTS[name])
    if (rope := rope_of(config)) is not None and rope.scaled:
        out["rope_scaling"] = {"rope_type": "llama3", **LLAMA3_SCALING}
    if config.get("decoder_block") is None:
        findings.append(_stated_nowhere("decoder_block: config.json says Llama", "note"))
    unknown = (
        "max_position_embeddings, bos_token_id, eos_token_id: config.json lacks them, "
        "and transformers takes its own defaults"
    )
    findings.append(_stated_nowhere(unknown, "warning"))
    return out, findings


def _stated_nowhere(what: str, severity: str) -> Finding:
    return Finding.of(
        "FS109",
        f"stated nowhere: {what}",
        severity=severity,
        file="config.json",
        help="give the model's config.json with --config, or correct the one that is written",
    )


def _assumed(key: str) -> Finding:
    return Finding.of(
        "FS109",
        f"config: {key} is stated nowhere; MaxText's default {_DEFAULTS[key]!r} is written",
        severity="note",
        file="config.json",
    )
