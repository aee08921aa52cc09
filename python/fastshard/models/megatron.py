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
from .model import (
    Attention,
    Block,
    Experts,
    Lack,
    Model,
    Rope,
    change_layers,
    drop_experts,
    take_delta_net,
    unstated,
)
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
    "experts.scores": "moe_router_score_function",
    "experts.correction": "moe_router_enable_expert_bias",
    "experts.groups": "moe_router_num_groups",
    "experts.scale": "moe_router_topk_scaling_factor",
    "experts.shared": "moe_shared_expert_intermediate_size",
    "experts.shared_gate": "moe_shared_expert_gate",
    "dense_layers": "moe_layer_freq",
    "attention": "multi_latent_attention",
    "further_layers": "mtp_num_layers",
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
#: What a mixture of experts and attention over a latent hang on besides.
_OF_EXPERTS = (
    "mtp_num_layers",
    "moe_layer_freq",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
_OF_LATENT = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
#: Sizes of gated delta nets, by the axes of their table. source: transformer_config.py
_OF_DELTA = {
    "k": "linear_num_key_heads",
    "kd": "linear_key_head_dim",
    "ud": "linear_value_head_dim",
    "C": "linear_conv_kernel_dim",
}
_DELTA_VALUES = "linear_num_value_heads"
#: The kind of attention that is one.
DELTA_NET = "gated_delta_net"
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
        *_OF_EXPERTS,
        *_OF_LATENT,
        *_OF_DELTA.values(),
        _DELTA_VALUES,
        "linear_attention_freq",
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
    families=("mixtral", "qwen_moe", "qwen2_moe"),
    biases=_ATTENTION_BIASES,
    experts=True,
    unnormalised=True,
    shared_experts=True,
    shared_gate=(False, True),
    dense_layers="any",
)
#: The same with gated delta nets in some layers, and a gate on what heads give in the others.
QWEN3_NEXT = replace(
    MIXTRAL,
    kind="Qwen3-Next",
    families=("qwen3_next",),
    scalings=("default",),
    window=False,
    attentions=("heads", "delta"),
    output_gate=(True,),
    further_layers=True,
)
#: The same with attention over a latent. Only softmax has weights that do not add up to 1.
#: source: megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
DEEPSEEK = replace(
    MIXTRAL,
    kind="DeepSeek",
    families=("deepseek_v3",),
    scalings=("default", "yarn"),
    fixed=(),
    shares=(1.0,),
    window=False,
    biases=(_NONE,),
    qk_norm=(False,),
    attentions=("latent",),
    unnormalised=False,
    scores=("sigmoid",),
    corrected=True,
    grouped_experts=True,
    scaled_experts=True,
    shared_gate=(False,),
    further_layers=True,
)
#: Of each group as many experts count as these are together, and transformers counts two.
#: source: group_limited_topk there; transformers models/deepseek_v3 (DeepseekV3TopkRouter)
_BEST_IN_GROUP = 2
#: What transformers' and Megatron's norms of latents have in common: the former take their own default.
#: source: transformers models/deepseek_v3 (DeepseekV3Attention: q_a_layernorm, kv_a_layernorm)
_LATENT_EPS = 1e-6
#: What YaRN hangs on, by transformers' keys: Megatron's arguments and the value where config.json has none.
_YARN: dict[str, tuple[str, float | None]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
}


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
        latent = _flag(values, "multi_latent_attention")
        if latent:
            rope, unlike = _read_rope_of_latent(values, rope)
            some = [*some, *unlike]
        elif _flag(values, "use_rope_scaling"):
            factor = real("rope.scaling", "rope_scaling_factor", 8.0)
            rope = Rope(rope.base, rope.share, "llama3", {"factor": factor, **LLAMA3_SCALING})
        # source: transformer_config.py, moe_router_topk = 2
        experts = _read_experts(values, whole("experts.best", "moe_router_topk", 2)) if facts["moe"] else None
        attention = Attention(
            "latent" if latent else "heads",
            window=window,
            qk_norm=facts["qk_norm"],
            grouped=evidence.axes.get("r", 1) > 1,
            latent_queries=latent and values.get("q_lora_rank") is not None,
            output_gate=_flag(values, "attention_output_gate"),
        )
        model = Model(
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
            blocks=_list_blocks(values, Block(attention, experts, (qkv, linear, linear, linear))),
            further_layers=count_further_layers(values),
            tied=facts["tied"],
            max_positions=whole("max_positions", "max_position_embeddings", 4096),
            others=(
                *_besides(values, is_delta=evidence.family == "qwen3_next"),
                *some,
                *(_routing(values) if experts else ()),
            ),
            words=_WORDS,
            assumed=assumed,
        )
        contradictions = _find_contradictions(values, facts) if experts or latent else []
        return replace(model, others=(*model.others, *_lacks_of_mixture(model), *contradictions))

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
            "num_layers": axes.get("L in main", axes["L"]),
            "hidden_size": axes["H"],
            "ffn_hidden_size": axes["F"] if "F" in axes else axes["M"],
            **(_write_latent(model, axes) if is_latent(model) else _write_heads(model, axes)),
            "max_position_embeddings": positions,
            "seq_length": positions,
            "swiglu": True,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-6 if model.eps is None else model.eps,
            "apply_layernorm_1p": bool(model.delta_layers),
            "add_bias_linear": linear,
            "add_qkv_bias": qkv and not linear,
            UNTIED: not model.tied,
            "position_embedding_type": "rope",
            "rotary_base": int(model.rope.base or 10000),
            "rotary_percent": model.rope.share,
            "rotary_interleaved": False,
            "hidden_dropout": 0.0,
            "attention_dropout": (model.config or {}).get("attention_dropout", 0.0),
            "tokenizer_type": "HuggingFaceTokenizer",
        }
        if (window := model.attention.window) is not None:
            # Positions to the left besides the token itself, and to the right.
            out["window_size"] = (window - 1, 0)
        written = ["eps", "max_positions", "rope.base", "rope.share", "rope.scaling"]
        if model.delta_layers:
            out |= _write_delta(model, axes)
        if model.experts is not None:
            written.append("experts.best")
            out |= _write_experts(model, model.experts, axes)
        return out, model.list_assumptions(*written, file=file)


def _write_heads(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of attention whose heads have keys and values of their own, or share them."""
    out: dict[str, Any] = {
        "num_attention_heads": axes["g"] * axes["r"],
        "group_query_attention": axes["r"] > 1,
        "num_query_groups": axes["g"],
        "kv_channels": axes["d"],
        "qk_layernorm": model.attention.qk_norm,
        "use_rope_scaling": model.rope.kind == "llama3",
    }
    if model.rope.kind == "llama3":
        # transformers has no default for it.
        scaling = {"factor": None, **model.rope.scaling}
        out["rope_scaling_factor"] = config_fields.positive_number(scaling, "factor", 8.0)
    return out


def _write_delta(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of layers with gated delta nets."""
    layers = range(axes.get("L in main", axes["L"]))
    return {
        "experimental_attention_variant": DELTA_NET,
        "linear_attention_freq": [int(layer in model.delta_layers) for layer in layers],
        **{argument: axes[axis] for axis, argument in _OF_DELTA.items()},
        _DELTA_VALUES: axes["k"] * axes["u"],
        "attention_output_gate": True,
    }


def _write_latent(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of attention over a latent.

    Without YaRN the factor of its scaling is 1: it counts for the softmax all the same.
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
    if model.rope.kind == "yarn":
        scaling = {
            "factor": None,
            "original_max_position_embeddings": model.max_positions,
            **{key: value for key, value in model.rope.scaling.items() if value is not None},
        }
        out["rope_type"] = "yarn"
        for key, (argument, default) in _YARN.items():
            out[argument] = config_fields.positive_number(scaling, key, default or 1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            for key in ("mscale", "mscale_all_dim"):
                out[key] = config_fields.positive_number(scaling, key, 1.0)
    return out


def _write_experts(model: Model, experts: Experts, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of a mixture of experts.

    A list says which layers have experts, even if all have them, where layers are numbered and not stacked.
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
    is_latent = config.get("kv_lora_rank") is not None
    if kind not in ("default", "llama3") and not (is_latent and kind == "yarn"):
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
    if is_latent:
        of_latent, unlike = _read_config_of_latent(config, settings)
        # The size of a head is that of its rotated part there.
        of_heads = ("kv_channels", "use_rope_scaling", "rope_scaling_factor")
        found = {key: value for key, value in found.items() if key not in of_heads}
        found |= of_latent
        lacking += unlike
    if (act := settings.get("hidden_act")) is not None and str(act) not in ("silu", "swish"):
        lacking.append(Lack("hidden_act", "silu", shown(act)))
    return found, lacking


#: Settings of a DeepSeek by their names in config.json, as arguments.
_OF_DEEPSEEK = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
#: What Megatron-LM computes of such a model, by the keys of config.json.
_FIXED_OF_DEEPSEEK: dict[str, Any] = {
    "norm_topk_prob": True,
    "rope_interleave": True,
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _read_config_of_latent(
    config: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Lack]]:
    """Read the settings of a model with attention over a latent that its config.json states, as arguments.

    Returns the settings, and what no argument states.

    Args:
        config: the content of the file.
        settings: what :func:`.read_settings` found in it.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    found = {to: config[key] for key, to in _OF_DEEPSEEK.items() if config.get(key) is not None}
    lacking = [
        Lack(key, shown(value), shown(config[key]))
        for key, value in _FIXED_OF_DEEPSEEK.items()
        if config.get(key) not in (None, value)
    ]
    layers, dense = settings.get("num_hidden_layers"), config.get("first_k_dense_replace")
    if isinstance(layers, int) and isinstance(dense, int) and 0 <= dense <= layers:
        found["moe_layer_freq"] = [0] * dense + [1] * (layers - dense)
    shared, expert = config.get("n_shared_experts"), settings.get("expert_size")
    if isinstance(shared, int) and isinstance(expert, int):
        found["moe_shared_expert_intermediate_size"] = shared * expert or None
    groups, best = config.get("n_group"), config.get("topk_group")
    if groups is not None and best is not None and groups != best:
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": best}
    if "rope_type" in settings:
        is_scaled = settings["rope_type"] == "yarn"
        found["rope_type"] = "yarn" if is_scaled else "rope"
        for key, (argument, _) in _YARN.items():
            if is_scaled and f"rope.{key}" in settings:
                found[argument] = settings[f"rope.{key}"]
        every = settings.get("rope.mscale_all_dim") or 0.0
        found |= {"mscale_all_dim": every, "mscale": settings.get("rope.mscale", 1.0) if every else 1.0}
    return found, lacking


def size(args: Mapping[str, Any], key: str) -> int | None:
    """Return a size or degree among the arguments; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is not a positive integer.
    """
    return config_fields.count(args, key, _LABEL)


def count_further_layers(args: Mapping[str, Any]) -> int:
    """Count the layers that predict further tokens.

    Raises:
        FastshardError: ``FS211`` if the argument is not a number of layers.
    """
    return size(args, "mtp_num_layers") or 0 if args.get("mtp_num_layers") else 0


#: No model has more layers: a number beyond is not counted through.
_MOST_LAYERS = 1 << 18


def list_layers(args: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """List the layers of a mixture that have experts, and those that have none.

    None if the arguments state no pattern of all layers.
    source: megatron/core/models/gpt/gpt_layer_specs.py (get_gpt_decoder_layer_specs)

    Raises:
        FastshardError: ``FS211`` for a number of layers that is not one.
    """
    layers, every = size(args, "num_layers"), args.get("moe_layer_freq")
    every = 1 if every is None else every
    if layers is None or layers > _MOST_LAYERS:
        return None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        pattern = [int(layer % every == 0) for layer in range(layers)]
    elif isinstance(every, list) and len(every) == layers and all(one in (0, 1) for one in every):
        pattern = every
    else:
        return None
    return [n for n, one in enumerate(pattern) if one], [n for n, one in enumerate(pattern) if not one]


def list_delta_layers(args: Mapping[str, Any]) -> list[int]:
    """List the layers with gated delta nets; none if the arguments state no pattern of all layers.

    source: megatron/core/models/gpt/experimental_attention_variant_module_specs.py
    (get_linear_attention_pattern)

    Raises:
        FastshardError: ``FS211`` for a number of layers that is not one.
    """
    layers, every = size(args, "num_layers"), args.get("linear_attention_freq")
    if args.get("experimental_attention_variant") != DELTA_NET or layers is None or layers > _MOST_LAYERS:
        return []
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return [layer for layer in range(layers) if (layer + 1) % every]
    if isinstance(every, list) and len(every) == layers and all(one in (0, 1) for one in every):
        return [layer for layer, one in enumerate(every) if one]
    return []


def axes_of_mixed(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the extents of the axes of the table for layers that differ, as far as the arguments state them.

    Raises:
        FastshardError: ``FS211`` for a value that is not a size.
    """
    axes = axes_of(args, False)
    latent = _flag(args, "multi_latent_attention")
    if "L" in axes:
        axes["L"] += count_further_layers(args)
    further = {
        "J": axes.get("H"),
        "E": size(args, "num_experts"),
        "M": size(args, "moe_ffn_hidden_size") or axes.get("F"),
        "S": size(args, "moe_shared_expert_intermediate_size"),
    }
    if latent:
        axes = {axis: extent for axis, extent in axes.items() if axis not in ("g", "r", "d")}
        further |= {
            "a": size(args, "num_attention_heads"),
            "Q": size(args, "q_lora_rank"),
            "K": size(args, "kv_lora_rank"),
            "nope": size(args, "qk_head_dim"),
            "rope": size(args, "qk_pos_emb_head_dim"),
            "vd": size(args, "v_head_dim"),
        }
    further |= {axis: size(args, argument) for axis, argument in _OF_DELTA.items()}
    keys, values = further["k"], size(args, _DELTA_VALUES)
    further["u"] = values // keys if keys and values and values % keys == 0 else None
    return axes | {axis: extent for axis, extent in further.items() if extent is not None}


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
    unsupported.refuse("Megatron-LM", [LLAMA, MIXTRAL, DEEPSEEK, QWEN3_NEXT], model)
    if lacking := [*_lacks_of_mixture(model), *_lacks_of_yarn(model.rope)]:
        raise unsupported.refused("Megatron-LM", DEEPSEEK if is_latent(model) else MIXTRAL, lacking)


def facts_of(model: Model) -> dict[str, bool]:
    """Return the facts of the layout tables."""
    qkv, linear, *_ = model.biases
    return {
        "tied": model.tied,
        "qkv_bias": qkv,
        "linear_bias": linear,
        "qk_norm": model.attention.qk_norm,
        "gated": True,
        "moe": model.experts is not None,
        "mla": is_latent(model),
        "q_lora": model.attention.latent_queries,
        "router_correction": model.experts is not None and model.experts.correction,
        "shared_experts": model.experts is not None and model.experts.shared,
        "shared_gate": model.experts is not None and model.experts.shared_gate,
    }


def _find_contradictions(args: Mapping[str, Any], facts: Mapping[str, bool]) -> list[Lack]:
    """Find what the arguments deny and the tensors show, and sizes that transformers cannot state."""
    found = []
    if facts.get("router_correction") and args.get("moe_router_enable_expert_bias") is False:
        found.append(Lack("moe_router_enable_expert_bias", "True: the files have a bias of experts", "False"))
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


def _lacks_of_mixture(model: Model) -> list[Lack]:
    """List what transformers and Megatron-LM compute each in its own way."""
    experts, lacking = model.experts, []
    if experts is not None and experts.groups > 1 and experts.best // experts.best_groups != _BEST_IN_GROUP:
        got = f"{experts.best} of {experts.best_groups} groups"
        lacking.append(Lack("number of best experts", f"{_BEST_IN_GROUP} for each group", got))
    if experts is not None and experts.best == 1 and (experts.normalised or experts.scores == "sigmoid"):
        # source: transformer_config.py, "Please use --moe-router-pre-softmax when topk is 1."
        lacking.append(Lack("number of best experts", "2 or more: the weight of one is not made 1", "1"))
    if is_latent(model) and model.eps not in (None, _LATENT_EPS):
        expected = f"{_LATENT_EPS}, which transformers' norms of latents have"
        lacking.append(Lack(model.word("eps"), expected, f"{model.eps}"))
    return lacking


def _lacks_of_yarn(rope: Rope) -> list[Lack]:
    """List what a scaled rotary embedding of a latent has and Megatron-LM's lacks.

    source: megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py; transformers
    modeling_rope_utils.py (_compute_yarn_parameters)
    """
    if rope.kind != "yarn":
        return []
    known = {*_YARN, "mscale", "mscale_all_dim", "rope_type", "type", "rope_theta", "truncate"}
    known |= {"partial_rotary_factor"}
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    lacking = [
        Lack(f"rope_scaling ({key})", "none", shown(scaling[key])) for key in sorted(scaling.keys() - known)
    ]
    every, some = scaling.get("mscale_all_dim"), scaling.get("mscale")
    if bool(every) and not some:
        lacking.append(Lack("rope_scaling (mscale)", "a number beside mscale_all_dim", "none"))
    if scaling.get("truncate", True) is not True:
        lacking.append(Lack("rope_scaling (truncate)", "true", shown(scaling["truncate"])))
    if scaling.get("partial_rotary_factor", 1) != 1:
        got = shown(scaling["partial_rotary_factor"])
        lacking.append(Lack("rope_scaling (partial_rotary_factor)", "1", got))
    if scaling.get("factor") is None:
        lacking.append(Lack("rope_scaling (factor)", "a number", "none"))
    return lacking


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


#: Of these, what the table of models with gated delta nets describes.
_OF_DELTA_TABLE = frozenset(
    {
        "apply_layernorm_1p",
        "attention_output_gate",
        "experimental_attention_variant",
        "layernorm_zero_centered_gamma",
    }
)


def _besides(args: Mapping[str, Any], *, is_delta: bool) -> list[Lack]:
    return [
        Lack(key, str(next(iter(values), None)), str(args[key])[:80])
        for key, values in _NEUTRAL.items()
        if not _neutral(key, args.get(key)) and not (is_delta and key in _OF_DELTA_TABLE)
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


def _read_experts(args: Mapping[str, Any], best: int) -> Experts:
    """Return the mixture of experts that the arguments state.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    scores = str(args.get("moe_router_score_function") or "softmax")
    groups = size(args, "moe_router_num_groups") if args.get("moe_router_group_topk") else None
    return Experts(
        best,
        normalised=best > 1 if scores == "sigmoid" else _normalised(args),
        scores=scores,
        correction=_flag(args, "moe_router_enable_expert_bias"),
        groups=groups or 1,
        best_groups=size(args, "moe_router_group_topk") or 1 if groups else 1,
        scale=_real(args, "moe_router_topk_scaling_factor", 1.0),
        shared=args.get("moe_shared_expert_intermediate_size") is not None,
        shared_gate=bool(args.get("moe_shared_expert_gate")),
    )


def _list_blocks(args: Mapping[str, Any], block: Block) -> tuple[Block, ...]:
    """Return the kinds of layers: the block, and that without experts where the arguments say so."""
    layers = size(args, "num_layers") or 0
    dense = (list_layers(args) or ([], []))[1] if block.experts else []
    blocks = change_layers([block], dense, layers, drop_experts)
    return change_layers(blocks, list_delta_layers(args), layers, take_delta_net)


def is_mixed(model: Model) -> bool:
    """Return True for a model whose layers are numbered, as they may differ."""
    shared = model.experts is not None and model.experts.shared
    return is_latent(model) or shared or bool(model.dense_layers) or bool(model.delta_layers)


def is_latent(model: Model) -> bool:
    """Return True for attention over a latent."""
    return model.attention.kind == "latent"


def _read_rope_of_latent(args: Mapping[str, Any], rope: Rope) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of attention over a latent, and what no other framework has of it.

    source: megatron/core/transformer/multi_latent_attention.py, transformer_config.py (MLATransformerConfig)

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    kind = str(args.get("rope_type") or "yarn")
    factor, every = _real(args, "rotary_scaling_factor", 40.0), args.get("mscale_all_dim") or 0.0
    some = _real(args, "mscale", 1.0)
    if kind != "yarn":
        lacking = [] if kind == "rope" else [Lack("rope_type", "rope | yarn", kind[:80])]
        if every and factor > 1:
            lacking.append(Lack("mscale_all_dim", "0 without YaRN", f"{every}"))
        return rope, lacking
    scaling = {
        "factor": factor,
        "original_max_position_embeddings": int(_real(args, "original_max_position_embeddings", 4096)),
        "beta_fast": _real(args, "beta_fast", 32.0),
        "beta_slow": _real(args, "beta_slow", 1.0),
    }
    if every:
        scaling |= {"mscale": some, "mscale_all_dim": _real(args, "mscale_all_dim", 0.0)}
    lacking = [] if every or some == 1 else [Lack("mscale", "1 without mscale_all_dim", f"{some}")]
    return Rope(rope.base, rope.share, "yarn", scaling), lacking


def _routing(args: Mapping[str, Any]) -> list[Lack]:
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


DIALECT = Megatron()
