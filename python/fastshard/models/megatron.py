"""Megatron-LM's terms for models: the arguments that a checkpoint carries.

source: Megatron-LM megatron/training/arguments.py and checkpointing.py (`check_checkpoint_args`),
megatron/core/transformer/transformer_config.py, megatron/core/transformer/moe/{moe_layer,router,experts}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.config_text import shown
from ..common.errors import Finding
from ..common.records import replace
from ..layouts.declaration import Evidence
from . import config_fields, unsupported
from .config_fields import refused
from .model import Experts, Lack, Model, Rope, unstated
from .overridden_settings import is_config_json, read_settings
from .unsupported import Says

_LABEL = "args."
#: What `--use-rope-scaling` computes besides its factor.
#: source: megatron/core/models/common/embeddings/rotary_pos_embedding.py (`_apply_scaling`)
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Arguments that change what is computed and neither names nor shapes, with the values besides None that do
#: not.
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
        "apply_layernorm_1p",
        "apply_residual_connection_post_layernorm",
        "attention_output_gate",
        "heterogeneous_block_specs",
        "is_hybrid_model",
        "layernorm_zero_centered_gamma",
        "moe_router_force_load_balancing",
        "multi_latent_attention",
        "qk_l2_norm",
        "quick_geglu",
        "retro_add_retriever",
        "rotary_interleaved",
        "squared_relu",
        "use_mup",
    ),
    (False,),
)
_WORDS = {
    "norm": "normalization",
    "gated": "swiglu",
    "positions": "position_embedding_type",
    "rope.share": "rotary_percent",
    "rope.base": "rotary_base",
    "rope.scaling": "use_rope_scaling",
    "window": "window_size",
    "biases": "add_bias_linear",
    "qk_norm": "qk_layernorm",
    "experts": "num_experts",
    "eps": "norm_epsilon",
    "experts.normalised": "moe_router_pre_softmax",
}
#: Settings of the model by their names in :func:`.read_settings`, as arguments.
_OF_CONFIG = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "partial_rotary_factor": "rotary_percent",
    "experts": "num_experts",
    "best_experts": "moe_router_topk",
}
#: The argument of a model whose head is not tied.
UNTIED = "untie_embeddings_and_output_weights"
#: Arguments that are settings of the model, and not of how it is run.
SETTINGS = frozenset(
    {
        *_OF_CONFIG.values(),
        *_NEUTRAL,
        "group_query_attention",
        "moe_ffn_hidden_size",
        "use_rope_scaling",
        "rope_scaling_factor",
        "window_size",
        "window_attn_skip_freq",
        "swiglu",
        "normalization",
        "position_embedding_type",
        "moe_router_pre_softmax",
        UNTIED,
    }
)
_NONE = (False, False, False, False)
_ATTENTION_BIASES = (_NONE, (True, False, False, False))
#: A model as the tables of its layouts have it.
LLAMA = Says(
    kind="Llama",
    activations=("silu",),
    shares=None,
    scalings=("default", "llama3"),
    fixed=tuple(LLAMA3_SCALING.items()),
    whole_base=True,
    window=True,
    biases=(*_ATTENTION_BIASES, (True, True, True, True)),
    qk_norm=(False, True),
)
#: A mixture of experts in every layer; experts have no biases.
MIXTRAL = replace(
    LLAMA,
    kind="Mixtral",
    families=("mixtral", "qwen_moe"),
    biases=_ATTENTION_BIASES,
    experts=True,
    unnormalised=True,
)


class Megatron:
    """The dialect of Megatron-LM."""

    name = "Megatron-LM"

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model of a checkpoint's arguments.

        Raises:
            FastshardError: ``FS211`` for an invalid value.
        """
        facts = evidence.facts
        assumed: dict[str, str] = {}

        def real(field: str, key: str, default: float) -> float:
            if values.get(key) is None:
                assumed[field] = key
            return _real(values, key, default)

        def whole(field: str, key: str, default: int) -> int:
            if values.get(key) is None:
                assumed[field] = key
            return config_fields.count(values, key, _LABEL) or default

        linear, qkv = facts["linear_bias"], facts["qkv_bias"]
        norm = str(values.get("normalization") or "LayerNorm")
        gated = facts.get("gated")
        window, some = window_of(values)
        rope = Rope(real("rope.base", "rotary_base", 10000), real("rope.share", "rotary_percent", 1.0))
        if _flag(values, "use_rope_scaling"):
            factor = real("rope.scaling", "rope_scaling_factor", 8.0)
            rope = Rope(rope.base, rope.share, "llama3", {"factor": factor, **LLAMA3_SCALING})
        # source: transformer_config.py, moe_router_topk = 2
        experts = (
            Experts(whole("experts.best", "moe_router_topk", 2), _normalised(values))
            if facts["moe"]
            else None
        )
        return Model(
            framework=self.name,
            family=evidence.family,
            norm=norm,
            eps=real("eps", "norm_epsilon", 1e-5),
            gated=gated,
            # Of the functions of a plain one no layout here has a place.
            activation="silu" if gated else "gelu",
            unknown={} if gated is not None else {"activation": unstated("swiglu", "")},
            positions=_positions(values),
            rope=rope,
            window=window,
            biases=(qkv, linear, linear, linear),
            qk_norm=facts["qk_norm"],
            grouped=evidence.axes.get("r", 1) > 1,
            tied=facts["tied"],
            experts=experts,
            max_positions=whole("max_positions", "max_position_embeddings", 4096),
            others=(*_besides(values), *some, *(_routing(values) if experts else ())),
            words=_WORDS,
            assumed=assumed,
        )

    def write(self, model: Model, axes: Mapping[str, int], file: str) -> tuple[dict[str, Any], list[Finding]]:
        """Return arguments that describe the model, and the assumptions; those of the run are left out.

        Args:
            model: the model.
            axes: extents that the plan bound.
            file: the arguments' name in messages.

        Raises:
            FastshardError: ``FS514`` for a model that Megatron-LM does not compute, ``FS209`` for a setting
                that affects values and is not stated.
        """
        refuse(model)
        model.settled("parallel", "activation")
        qkv, linear, *_ = model.biases
        positions = model.max_positions or 2048
        out: dict[str, Any] = {
            "num_layers": axes["L"],
            "hidden_size": axes["H"],
            "ffn_hidden_size": axes["F"],
            "num_attention_heads": axes["g"] * axes["r"],
            "group_query_attention": axes["r"] > 1,
            "num_query_groups": axes["g"],
            "kv_channels": axes["d"],
            "max_position_embeddings": positions,
            "seq_length": positions,
            "swiglu": True,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-6 if model.eps is None else model.eps,
            "apply_layernorm_1p": False,
            "add_bias_linear": linear,
            "add_qkv_bias": qkv and not linear,
            "qk_layernorm": model.qk_norm,
            UNTIED: not model.tied,
            "position_embedding_type": "rope",
            "rotary_base": int(model.rope.base or 10000),
            "rotary_percent": model.rope.share,
            "rotary_interleaved": False,
            "use_rope_scaling": model.rope.kind == "llama3",
            "hidden_dropout": 0.0,
            "attention_dropout": (model.config or {}).get("attention_dropout", 0.0),
            "tokenizer_type": "HuggingFaceTokenizer",
        }
        if model.rope.kind == "llama3":
            # transformers has no default for it.
            scaling = {"factor": None, **model.rope.scaling}
            out["rope_scaling_factor"] = config_fields.positive_number(scaling, "factor", 8.0)
        if model.window is not None:
            # Positions to the left besides the token itself, and to the right.
            out["window_size"] = (model.window - 1, 0)
        written = ["eps", "max_positions", "rope.base", "rope.share", "rope.scaling"]
        if model.experts is not None:
            written.append("experts.best")
            out |= {
                "num_experts": axes["E"],
                "moe_ffn_hidden_size": axes["F"],
                "moe_layer_freq": 1,
                "moe_router_topk": model.experts.best,
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": not model.experts.normalised,
                "moe_router_enable_expert_bias": False,
                "moe_shared_expert_intermediate_size": None,
            }
        return out, model.list_assumptions(*written, file=file)


def read_config_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Lack]]:
    """Read the settings that a config states, as arguments, and those that no argument states.

    Args:
        config: arguments of Megatron-LM by their names, or a config.json.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    if not is_config_json(config):
        named = {str(key).replace("-", "_"): value for key, value in config.items()}
        return {key: value for key, value in named.items() if key in SETTINGS and value is not None}, []
    settings = read_settings(config)
    kind, window = settings.get("rope_type", "default"), settings.get("sliding_window")
    lacking = []
    if "rope_by_layers" in settings:
        lacking.append(
            Lack("rope_parameters by kinds of layers", "one set", shown(settings["rope_by_layers"]))
        )
    if kind not in ("default", "llama3"):
        lacking.append(Lack("rope_scaling", "default | llama3", kind))
    if isinstance(window, list):
        lacking.append(Lack("sliding window in some layers", "none", ", ".join(window)))
    found = {key: settings[name] for name, key in _OF_CONFIG.items() if name in settings}
    if isinstance(base := found.get("rotary_base"), float) and base.is_integer():
        found["rotary_base"] = int(base)
    if "experts" in settings:
        size = settings.get("expert_size", settings.get("intermediate_size"))
        found |= {} if size is None else {"moe_ffn_hidden_size": size}
        found.pop("ffn_hidden_size", None)
    if {"num_key_value_heads", "num_attention_heads"} <= settings.keys():
        found["group_query_attention"] = settings["num_key_value_heads"] != settings["num_attention_heads"]
    if "rope_type" in settings:
        found["use_rope_scaling"] = kind == "llama3"
        found |= {"rope_scaling_factor": settings["rope.factor"]} if "rope.factor" in settings else {}
    if "sliding_window" in settings and not isinstance(window, list):
        found["window_size"] = None if window is None else (window - 1, 0)
    if isinstance(tied := config.get("tie_word_embeddings"), bool):
        found[UNTIED] = not tied
    if (act := settings.get("hidden_act")) is not None and str(act) not in ("silu", "swish"):
        lacking.append(Lack("hidden_act", "silu", shown(act)))
    return found, lacking


def size(args: Mapping[str, Any], key: str) -> int | None:
    """Return a size or degree among the arguments; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is not a positive integer.
    """
    return config_fields.count(args, key, _LABEL)


def axes_of(args: Mapping[str, Any], moe: bool) -> dict[str, int]:
    """Return the extents of the tables' axes that the arguments state, to be checked against the tensors.

    Raises:
        FastshardError: ``FS211`` for a value that is not a size.
    """
    heads, groups = size(args, "num_attention_heads"), size(args, "num_query_groups")
    groups = groups if args.get("group_query_attention") and groups else heads
    axes = {
        "L": size(args, "num_layers"),
        "H": size(args, "hidden_size"),
        "g": groups,
        "r": heads // groups if heads and groups and heads % groups == 0 else None,
        "d": size(args, "kv_channels"),
        "P": size(args, "padded_vocab_size"),
        "F": size(args, "ffn_hidden_size"),
    }
    if moe:
        axes["E"] = size(args, "num_experts")
        axes["F"] = size(args, "moe_ffn_hidden_size") or axes["F"]
    if axes["d"] is None and axes["H"] and heads and axes["H"] % heads == 0:
        axes["d"] = axes["H"] // heads
    return {axis: extent for axis, extent in axes.items() if extent is not None}


def refuse(model: Model) -> None:
    """Refuse a model that none of Megatron-LM's tables computes.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    unsupported.refuse("Megatron-LM", [LLAMA, MIXTRAL], model)


def facts_of(model: Model) -> dict[str, bool]:
    """Return the facts of the layout tables."""
    qkv, linear, *_ = model.biases
    return {
        "tied": model.tied,
        "qkv_bias": qkv,
        "linear_bias": linear,
        "qk_norm": model.qk_norm,
        "gated": True,
        "moe": model.experts is not None,
    }


def _real(args: Mapping[str, Any], key: str, default: float) -> float:
    value = args.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 63:
        raise refused(f"{_LABEL}{key}", "a positive number", value)
    return value


def _flag(args: Mapping[str, Any], key: str) -> bool:
    value = args.get(key)
    if value not in (None, True, False):
        raise refused(f"{_LABEL}{key}", "True or False", value)
    return bool(value)


def _positions(args: Mapping[str, Any]) -> str:
    kind = args.get("position_embedding_type") or "rope"
    return "rotary" if kind == "rope" else str(kind)


def window_of(args: Mapping[str, Any]) -> tuple[int | None, list[Lack]]:
    """Return the number of positions that attention sees, and the unsupported parts of a window.

    The token itself counts. The argument has the positions to the left without the token, and those to the
    right; -1 is all of them.
    source: megatron/core/transformer/transformer_config.py (window_size)

    Raises:
        FastshardError: ``FS211`` if it is not a pair of integers.
    """
    value = args.get("window_size")
    if value is None:
        return None, []
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n >= 1 << 48 for n in value)
    ):
        raise refused(f"{_LABEL}window_size", "a pair of integers", value)
    left, right = value
    if left < 0 and right <= 0:
        return None, []
    found = []
    every = args.get("window_attn_skip_freq")
    if right > 0:
        found.append(Lack("window_size", "none to the right", str(value)))
    if every is not None and not (isinstance(every, list) and all(n == 1 for n in every)):
        found.append(Lack("window_attn_skip_freq", "None: in all layers", str(every)[:80]))
    return int(left) + 1, found


def _besides(args: Mapping[str, Any]) -> list[Lack]:
    return [
        Lack(key, str(next(iter(values), None)), str(args[key])[:80])
        for key, values in _NEUTRAL.items()
        if not _neutral(key, args.get(key))
    ]


def _neutral(key: str, value: Any) -> bool:
    if value is None or (key == "no_rope_freq" and isinstance(value, list) and all(n == 0 for n in value)):
        return True
    # False equals 0, which is a number and not the absence of one.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in _NEUTRAL[key])


def _normalised(args: Mapping[str, Any]) -> bool:
    """Return True if the weights of the best k experts are normalised.

    Megatron's softmax over the best k alone gives the same as a softmax over all that is normalised
    afterwards. With moe_router_pre_softmax nothing is normalised.

    source: megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
    """
    return not args.get("moe_router_pre_softmax")


def _routing(args: Mapping[str, Any]) -> list[Lack]:
    """List routing features that other frameworks lack: they take a softmax and the best k."""
    kinds = args.get("moe_router_load_balancing_type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    checks = [
        ("moe_router_score_function", "softmax", args.get("moe_router_score_function") or "softmax"),
        ("moe_router_enable_expert_bias", "False", bool(args.get("moe_router_enable_expert_bias"))),
        ("moe_router_topk_scaling_factor", "None", args.get("moe_router_topk_scaling_factor")),
        ("moe_router_num_groups", "None", args.get("moe_router_num_groups")),
        ("moe_apply_probs_on_input", "False", bool(args.get("moe_apply_probs_on_input"))),
        ("moe_expert_capacity_factor", "None", args.get("moe_expert_capacity_factor")),
        (
            "moe_router_load_balancing_type",
            "no sinkhorn",
            "sinkhorn" if "sinkhorn" in kinds else "no sinkhorn",
        ),
    ]
    return [Lack(key, expected, str(got)[:80]) for key, expected, got in checks if str(got) != expected]


DIALECT = Megatron()
