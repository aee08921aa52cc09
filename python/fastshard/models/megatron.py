"""Megatron-LM's terms for models: the arguments in a checkpoint.

source: Megatron-LM megatron/training/arguments.py and checkpointing.py (`check_checkpoint_args`),
megatron/core/transformer/transformer_config.py, megatron/core/transformer/moe/{moe_layer,router,experts}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.records import dataclass, replace
from ..layouts.declaration import Evidence
from . import config_fields, megatron_heads, unsupported
from .megatron_mixtures import (
    find_contradictions,
    has_delta_table,
    is_latent,
    list_blocks,
    list_lacks_of_further_layers,
    list_lacks_of_indexer,
    list_lacks_of_mixture,
    list_lacks_of_routing,
    list_lacks_of_yarn,
    read_experts,
    read_indexed,
    read_rope_of_latent,
    write_delta,
    write_experts,
    write_latent,
)
from .megatron_sizes import (
    DELTA_NET,
    DELTA_VALUES,
    LABEL,
    OF_DELTA,
    OF_INDEXER,
    VARIANT,
    count_further_layers,
    is_indexed,
    read_flag,
    read_real,
)
from .model import (
    Attention,
    Block,
    Lack,
    Model,
    Rope,
    change_layers,
    take_window,
    unstated,
)
from .unsupported import Says

#: The fixed settings of `--use-rope-scaling`, besides its factor.
#: source: megatron/core/models/common/embeddings/rotary_pos_embedding.py (`_apply_scaling`)
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Arguments that change the computation but neither names nor shapes, with the values besides None that do
#: not change it.
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
        # It computes YaRN with numbers that no argument states.
        # source: megatron/post_training/model_builder.py
        "enable_gpt_oss",
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
    "sinks": megatron_heads.SOFTMAX,
    "biases": "add_bias_linear",
    "qk_norm": "qk_layernorm",
    "experts": "num_experts",
    "eps": "norm_epsilon",
    "experts.router_bias": "add_bias_linear",
    "experts.normalised": "moe_router_pre_softmax",
    "experts.scores": "moe_router_score_function",
    "experts.correction": "moe_router_enable_expert_bias",
    "experts.groups": "moe_router_num_groups",
    "experts.scale": "moe_router_topk_scaling_factor",
    "experts.shared": "moe_shared_expert_intermediate_size",
    "experts.shared_gate": "moe_shared_expert_gate",
    "dense_layers": "moe_layer_freq",
    "attention": "multi_latent_attention",
    "indexed": VARIANT,
    "further_layers": "mtp_num_layers",
}
#: Arguments for the settings that :func:`.read_settings` returns.
OF_CONFIG = {
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
#: Other arguments that determine the experts and multi-latent attention.
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
#: The argument that states that the head is not tied.
UNTIED = "untie_embeddings_and_output_weights"
#: Arguments that are settings of the model, not of the run.
SETTINGS = frozenset(
    {
        *OF_CONFIG.values(),
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
        *OF_DELTA.values(),
        *OF_INDEXER.values(),
        DELTA_VALUES,
        "linear_attention_freq",
        *(argument for argument, _ in megatron_heads.YARN.values()),
        megatron_heads.ROUNDED,
    }
)
_NONE = (False, False, False, False)
_ATTENTION_BIASES = (_NONE, (True, False, False, False))
#: The models that the layout tables describe.
LLAMA = Says(
    kind="Llama",
    activations=("silu",),
    shares=None,
    scalings=("default", "llama3", "yarn"),
    fixed=tuple(LLAMA3_SCALING.items()),
    whole_base=True,
    window=True,
    windowed_layers="any",
    biases=(*_ATTENTION_BIASES, (True, True, True, True)),
    qk_norm=(False, True),
)
#: An MoE model with experts in every layer; experts have no biases.
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
#: MIXTRAL with biases everywhere, sinks, and gpt-oss's activation.
GPT_OSS = replace(
    MIXTRAL,
    kind="gpt-oss",
    families=("gpt_oss",),
    activations=(megatron_heads.CLAMPED_SWIGLU,),
    scalings=("default", "yarn"),
    biases=((True, True, True, True),),
    qk_norm=(False,),
    sinks=(True,),
    router_bias=(True,),
    unnormalised=False,
    shared_experts=False,
    shared_gate=(False,),
    dense_layers="none",
)
#: MIXTRAL with gated delta nets in some layers, and an output gate on the heads in the others.
QWEN3_NEXT = replace(
    MIXTRAL,
    kind="Qwen3-Next",
    families=("qwen3_next", "qwen3_5"),
    scalings=("default", "llama3"),
    window=False,
    attentions=("heads", "delta"),
    output_gate=(True,),
    further_layers=True,
)
#: QWEN3_NEXT with an MLP in every layer.
QWEN3_5 = replace(
    LLAMA,
    kind="Qwen3.5",
    scalings=("default", "llama3"),
    window=False,
    biases=_ATTENTION_BIASES,
    attentions=("heads", "delta"),
    output_gate=(True,),
    further_layers=True,
)
#: An MoE model with multi-latent attention. Only softmax scores have weights that do not add up to 1.
#: source: megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function
DEEPSEEK = replace(
    MIXTRAL,
    kind="DeepSeek",
    families=("deepseek_v3", "deepseek_v32"),
    scalings=("default", "yarn"),
    fixed=(),
    shares=(1.0,),
    window=False,
    biases=(_NONE,),
    qk_norm=(False,),
    attentions=("latent",),
    indexed=(False, True),
    unnormalised=False,
    scores=("sigmoid",),
    corrected=True,
    grouped_experts=True,
    scaled_experts=True,
    shared_gate=(False,),
    further_layers=True,
)
#: DEEPSEEK with heads instead of latents.
GLM = replace(
    DEEPSEEK,
    kind="GLM-4.5",
    families=("glm4_moe",),
    scalings=("default",),
    shares=None,
    biases=_ATTENTION_BIASES,
    qk_norm=(False, True),
    attentions=("heads",),
    indexed=(False,),
)


@dataclass(frozen=True)
class Megatron:
    """The dialect of Megatron-LM."""

    #: The transformers class that ``--config`` names.
    required_class: str | None = None
    name: str = "Megatron-LM"

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model that a checkpoint's arguments describe.

        Raises:
            FastshardError: ``FS211`` for an invalid value.
        """
        facts = evidence.facts
        assumed: dict[str, str] = {}

        def real(field: str, key: str, default: float) -> float:
            if values.get(key) is None:
                assumed[field] = key
            return read_real(values, key, default)

        def whole(field: str, key: str, default: int) -> int:
            if values.get(key) is None:
                assumed[field] = key
            return config_fields.count(values, key, LABEL) or default

        linear, qkv = facts["linear_bias"], facts["qkv_bias"]
        norm = str(values.get("normalization") or "LayerNorm")
        gated = facts.get("gated")
        window, full_layers, some = megatron_heads.read_windows(values)
        rope = Rope(real("rope.base", "rotary_base", 10000), real("rope.share", "rotary_percent", 1.0))
        latent = read_flag(values, "multi_latent_attention")
        if latent:
            rope, unlike = read_rope_of_latent(values, rope)
            some = [*some, *unlike]
        elif values.get("position_embedding_type") == "yarn":
            rope, unlike = megatron_heads.read_yarn(values, rope)
            some = [*some, *unlike]
            if (unstated_key := megatron_heads.find_unstated_of_yarn(values)) is not None:
                assumed["rope.scaling"] = unstated_key
        elif read_flag(values, "use_rope_scaling"):
            factor = real("rope.scaling", "rope_scaling_factor", 8.0)
            rope = Rope(rope.base, rope.share, "llama3", {"factor": factor, **LLAMA3_SCALING})
        # source: transformer_config.py, moe_router_topk = 2
        experts = read_experts(values, whole("experts.best", "moe_router_topk", 2)) if facts["moe"] else None
        if experts is not None:
            experts = replace(experts, router_bias=facts["router_bias"])
        attention = Attention(
            "latent" if latent else "heads",
            window=window,
            qk_norm=facts["qk_norm"],
            grouped=evidence.axes.get("r", 1) > 1,
            latent_queries=latent and values.get("q_lora_rank") is not None,
            output_gate=read_flag(values, "attention_output_gate"),
            sinks=facts["sinks"],
            indexed=read_indexed(values),
        )
        blocks = list_blocks(values, Block(attention, experts, (qkv, linear, linear, linear)))
        layers = evidence.axes.get("L", 0) - count_further_layers(values)
        model = Model(
            framework=self.name,
            family=evidence.family,
            norm=norm,
            eps=real("eps", "norm_epsilon", 1e-5),
            gated=gated,
            activation=_name_activation(values, gated),
            unknown={} if gated is not None else {"activation": unstated("swiglu", "")},
            positions=_positions(values),
            rope=rope,
            blocks=change_layers(blocks, full_layers, layers, take_window(None)),
            further_layers=count_further_layers(values),
            tied=facts["tied"],
            max_positions=whole("max_positions", "max_position_embeddings", 4096),
            required_class=self.required_class,
            others=(
                *_besides(values),
                *some,
                *list_lacks_of_indexer(values),
                *megatron_heads.list_lacks_of_activation(values),
                *(list_lacks_of_routing(values) if experts else ()),
            ),
            words=_WORDS,
            assumed=assumed,
        )
        contradictions = find_contradictions(values, facts)
        return replace(model, others=(*model.others, *list_lacks_of_mixture(model), *contradictions))

    def write(self, model: Model, axes: Mapping[str, int], file: str) -> tuple[dict[str, Any], list[Finding]]:
        """Return arguments that describe the model, and the assumptions made. Arguments of the run are
        omitted.

        Args:
            model: the model.
            axes: extents that the plan bound.
            file: the arguments' name in messages.

        Raises:
            FastshardError: ``FS514`` for a model that Megatron-LM cannot compute, ``FS209`` for a setting
                that affects values and is not stated.
        """
        refuse(model)
        model.settled("parallel", "activation")
        qkv, linear, *_ = model.biases
        positions, layers = model.max_positions or 2048, axes.get("L in main", axes["L"])
        out: dict[str, Any] = {
            "num_layers": layers,
            "hidden_size": axes["H"],
            "ffn_hidden_size": axes["F"] if "F" in axes else axes["M"],
            **(write_latent(model, axes) if is_latent(model) else _write_heads(model, axes)),
            "max_position_embeddings": positions,
            "seq_length": positions,
            "swiglu": model.activation != megatron_heads.CLAMPED_SWIGLU,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-6 if model.eps is None else model.eps,
            "apply_layernorm_1p": has_delta_table(model),
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
        out |= megatron_heads.write_windows(model, layers)
        if model.activation == megatron_heads.CLAMPED_SWIGLU:
            out |= megatron_heads.CLAMPED
        if model.attention.sinks:
            out[megatron_heads.SOFTMAX] = megatron_heads.LEARNABLE
        if model.rope.kind == "yarn" and not is_latent(model):
            out |= megatron_heads.write_yarn(model.rope, model.max_positions)
        written = ["eps", "max_positions", "rope.base", "rope.share", "rope.scaling"]
        if has_delta_table(model):
            out |= write_delta(model, axes)
        if model.experts is not None:
            written.append("experts.best")
            out |= write_experts(model, model.experts, axes)
        elif model.further_layers:
            out["mtp_num_layers"] = axes["L"] - layers
        findings = model.list_assumptions(*written, file=file)
        if model.attention.indexed is not None:
            findings.append(_note_order_of_indexer(file))
        return out, findings


def _note_order_of_indexer(file: str) -> Finding:
    """Build the note about Megatron-LM versions whose indexer computes a different result.

    source: NVIDIA/Megatron-LM issue 2998; with 0.16.1, the logits of the test model differ by 2.
    """
    return Finding.of(
        codes.NOT_PROVABLE,
        "the indexer rotates the first part of each head, like DeepSeek's; megatron-core 0.16.1 rotates the "
        "last part, and chooses other tokens",
        severity="note",
        file=file,
        help="load it with a megatron-core whose config has dsa_indexer_rope_interleaved",
    )


def _write_heads(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of attention whose heads have separate or shared keys and values."""
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


def refuse(model: Model) -> None:
    """Refuse a model that none of Megatron-LM's tables describes.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    kinds = [LLAMA, MIXTRAL, GPT_OSS, DEEPSEEK, GLM, QWEN3_NEXT, QWEN3_5]
    unsupported.refuse("Megatron-LM", kinds, model)
    of_yarn = list_lacks_of_yarn if is_latent(model) else megatron_heads.list_lacks_of_yarn
    lacking = [*list_lacks_of_mixture(model), *(of_yarn(model.rope) if model.rope.kind == "yarn" else ())]
    if lacking := [*lacking, *list_lacks_of_further_layers(model)]:
        kind = next(kind for kind in kinds if model.family in kind.families)
        raise unsupported.refused("Megatron-LM", kind, lacking)


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
        "indexed": model.attention.indexed is not None,
        "sinks": model.attention.sinks,
        "router_bias": model.experts is not None and model.experts.router_bias,
        "router_correction": model.experts is not None and model.experts.correction,
        "shared_experts": model.experts is not None and model.experts.shared,
        "shared_gate": model.experts is not None and model.experts.shared_gate,
    }


def _name_activation(args: Mapping[str, Any], gated: bool | None) -> str:
    """Return the activation by transformers' name. The layouts have no place for a plain MLP's activation."""
    if args.get("quick_geglu"):
        return megatron_heads.CLAMPED_SWIGLU
    return "silu" if gated else "gelu"


def _positions(args: Mapping[str, Any]) -> str:
    kind = args.get("position_embedding_type") or "rope"
    return "rotary" if kind in ("rope", "yarn") else str(kind)


#: The arguments among these that the table for gated delta nets describes.
_OF_DELTA_TABLE = frozenset(
    {
        "apply_layernorm_1p",
        "attention_output_gate",
        "experimental_attention_variant",
        "layernorm_zero_centered_gamma",
    }
)


def is_delta(args: Mapping[str, Any]) -> bool:
    """Return True for arguments of gated delta nets, and of attention with an output gate."""
    return args.get(VARIANT) == DELTA_NET or bool(args.get("attention_output_gate"))


def _besides(args: Mapping[str, Any]) -> list[Lack]:
    described = _OF_DELTA_TABLE if is_delta(args) else frozenset[str]()
    if is_indexed(args):
        described = frozenset({VARIANT})
    described |= megatron_heads.list_described(args)
    return [
        Lack(key, str(next(iter(values), None)), str(args[key])[:80])
        for key, values in _NEUTRAL.items()
        if not _neutral(key, args.get(key)) and key not in described
    ]


def _neutral(key: str, value: Any) -> bool:
    if value is None or (key == "no_rope_freq" and isinstance(value, list) and all(n == 0 for n in value)):
        return True
    # False equals 0, which is a number and not the absence of one.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in _NEUTRAL[key])


DIALECT = Megatron()
