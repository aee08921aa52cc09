"""Settings that config.json may state under two keys, and the check for configs in which the two values
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding

#: Two keys of one setting -> the model types whose class treats both as one. Only settings that affect the
#: computation.
#: source: transformers 5.24 models/*/configuration_*.py (attribute_map)
ALIASES: dict[tuple[str, str], str] = {
    ("activation_function", "hidden_act"): "exaone",
    ("attention_bias", "qkv_bias"): "internlm3 molmo2_text",
    ("attention_bias", "use_qkv_bias"): "sarvam_moe",
    ("attention_heads", "num_attention_heads"): (
        "hunyuan_vl_vision hy_v4_vl_vision kosmos_2_5_text_model kosmos_2_text_model mllama_vision_model xglm"
    ),
    ("attention_window_size", "sliding_window"): "recurrent_gemma",
    ("bias", "mlp_bias"): "internlm3",
    ("context_length", "max_position_embeddings"): "rwkv",
    ("d_kv", "head_dim"): "longt5 mt5 t5 umt5",
    ("d_model", "encoder_hidden_dim"): "omdet-turbo",
    ("d_model", "hidden_size"): (
        "audioflamingo3_encoder autoformer bart bigbird_pegasus blenderbot blenderbot-small conditional_detr "
        "d_fine dbrx deformable_detr deimv2 detr fsmt funnel grounding-dino informer led longt5 m2m_100 "
        "marian mbart mm-grounding-dino moss_transcribe_diarize_audio mpt mt5 mvp nllb-moe patchtsmixer "
        "patchtst pegasus pegasus_x plbart pop2piano pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 "
        "pp_formulanet_text qwen2_5_omni_audio_encoder qwen2_audio_encoder qwen3_asr_encoder "
        "qwen3_omni_moe_audio_encoder rt_detr rt_detr_v2 speech_to_text switch_transformers t5 "
        "table-transformer "
        "time_series_transformer trocr udop umt5 voxtral_encoder voxtral_realtime_encoder whisper "
        "xglm xlnet"
    ),
    ("decoder_attention_heads", "num_attention_heads"): "seamless_m4t seamless_m4t_v2 trocr",
    ("decoder_hidden_act", "hidden_act"): "moonshine",
    ("decoder_layers", "num_hidden_layers"): "mask2former oneformer seamless_m4t seamless_m4t_v2 trocr",
    ("decoder_layers", "num_layers"): "pix2struct_text_model",
    ("decoder_num_attention_heads", "num_attention_heads"): "moonshine",
    ("decoder_num_hidden_layers", "num_hidden_layers"): "moonshine",
    ("decoder_num_key_value_heads", "num_key_value_heads"): "moonshine",
    ("depth", "num_hidden_layers"): (
        "cohere_compass_vision ernie4_5_vl_moe_vision exaone4_5_vision glm4v_moe_vision glm4v_vision "
        "glm5_next_vision glm_image_vision glm_ocr_vision pp_ocrv5_mobile_rec pp_ocrv5_server_rec "
        "pp_ocrv6_small_rec pp_ocrv6_tiny_rec qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision "
        "qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision "
        "qwen4_exp_vision"
    ),
    ("dim", "hidden_size"): "distilbert",
    ("emb_dim", "hidden_size"): "flaubert xlm",
    ("embed_dim", "hidden_size"): "idefics_vision kosmos_2_5_text_model kosmos_2_text_model swin2sr",
    ("embedding_multiplier", "logits_mup_width_multiplier"): "inkling_text",
    ("encoder_attention_heads", "num_attention_heads"): (
        "audioflamingo3_encoder autoformer bart bigbird_pegasus blenderbot blenderbot-small conditional_detr "
        "d_fine dab-detr deformable_detr deimv2 detr fsmt grounding-dino informer led m2m_100 marian mbart "
        "mm-grounding-dino moss_transcribe_diarize_audio mvp nllb-moe omdet-turbo pegasus pegasus_x plbart "
        "pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_formulanet_text qwen2_5_omni_audio_encoder "
        "qwen2_audio_encoder qwen3_asr_encoder qwen3_omni_moe_audio_encoder rt_detr rt_detr_v2 "
        "speech_to_text "
        "speecht5 table-transformer time_series_transformer voxtral_encoder voxtral_realtime_encoder whisper"
    ),
    ("encoder_ffn_dim", "intermediate_size"): (
        "audioflamingo3_encoder moss_transcribe_diarize_audio qwen2_5_omni_audio_encoder qwen2_audio_encoder "
        "qwen3_asr_encoder qwen3_omni_moe_audio_encoder voxtral_encoder voxtral_realtime_encoder"
    ),
    ("encoder_layers", "num_hidden_layers"): (
        "audioflamingo3_encoder autoformer bart bigbird_pegasus blenderbot blenderbot-small conditional_detr "
        "dab-detr detr fastspeech2_conformer fsmt informer led m2m_100 marian mbart "
        "moss_transcribe_diarize_audio mvp nllb-moe pegasus pegasus_x plbart pp_formulanet_text "
        "qwen2_5_omni_audio_encoder qwen2_audio_encoder qwen3_asr_encoder qwen3_omni_moe_audio_encoder "
        "speech_to_text speecht5 table-transformer time_series_transformer voxtral_encoder "
        "voxtral_realtime_encoder whisper"
    ),
    ("encoder_layers", "num_layers"): "pix2struct_text_model",
    ("encoder_num_attention_heads", "num_attention_heads"): "fastspeech2_conformer",
    ("expert_ffn_hidden_size", "moe_intermediate_size"): "longcat_flash",
    ("ffn_hidden_size", "intermediate_size"): "longcat_flash",
    ("head_dim", "kv_channels"): "jetmoe",
    ("hidden_dim", "hidden_size"): (
        "granite_speech_encoder granite_speech_plus_encoder mask2former oneformer"
    ),
    ("hidden_size", "mask_feature_size"): "maskformer",
    ("hidden_size", "n_embd"): "codegen ctrl gpt-sw3 gpt2 gpt_bigcode gptj imagegpt openai-gpt",
    ("layer_norm_eps", "rms_norm_eps"): "hunyuan_vl_vision hy_v4_vl_vision molmo2_text",
    ("layer_norm_epsilon", "rms_norm_eps"): "exaone",
    ("layers", "num_hidden_layers"): "kosmos_2_5_text_model kosmos_2_text_model",
    ("max_position_embeddings", "max_seq_len"): "dbrx",
    ("max_position_embeddings", "model_max_length"): (
        "bailing_hybrid inkling2_loop_text inkling2_text inkling_text kimi_linear"
    ),
    ("max_position_embeddings", "n_positions"): (
        "codegen ctrl decision_transformer gpt-sw3 gpt2 gpt_bigcode gptj imagegpt openai-gpt"
    ),
    ("moe_k", "num_experts_per_tok"): "ernie4_5_moe ernie4_5_vl_moe_text",
    ("moe_num_experts", "n_routed_experts"): "step3p5",
    ("moe_num_experts", "num_experts"): "ernie4_5_moe ernie4_5_vl_moe_text",
    ("moe_renormalize", "norm_topk_prob"): "bailing_hybrid kimi_linear",
    ("moe_top_k", "num_experts_per_tok"): "step3p5",
    ("moe_topk", "num_experts_per_tok"): "hunyuan_v1_moe longcat_flash",
    ("n_group", "num_expert_group"): "bailing_hybrid kimi_linear",
    ("n_head", "num_attention_heads"): (
        "bloom codegen ctrl decision_transformer funnel gpt-sw3 gpt2 gpt_bigcode gptj imagegpt openai-gpt "
        "xlnet"
    ),
    ("n_heads", "num_attention_heads"): "dbrx distilbert flaubert mpt xlm",
    ("n_layer", "num_hidden_layers"): (
        "bloom codegen ctrl decision_transformer gpt-sw3 gpt2 gpt_bigcode gptj imagegpt openai-gpt xlnet"
    ),
    ("n_layers", "num_hidden_layers"): "dbrx distilbert flaubert inkling_vision mpt xlm",
    ("n_routed_experts", "num_experts"): (
        "deepseek_ocr2_text deepseek_v2 sarvam_mla sarvam_moe unlimited_ocr_text"
    ),
    ("n_routed_experts", "num_local_experts"): (
        "axk1 axk2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 dots3_note_text glm4_moe glm4_moe_lite "
        "glm4v_moe_text glm5_next_text glm_moe_dsa hy_v4 hy_v4_vl_text inkling2_loop_text inkling2_text "
        "inkling_text longcat_flash mimo_v2_flash mistral4 mistral_large4_text nemotron_h sarvam_mla "
        "sarvam_moe solar_open step3p5"
    ),
    ("n_shared_experts", "num_shared_experts"): "bailing_hybrid kimi_linear sarvam_mla sarvam_moe",
    ("n_token", "vocab_size"): "xlnet",
    ("n_words", "vocab_size"): "flaubert xlm",
    ("norm_eps", "rms_norm_eps"): "lfm3",
    ("num_attention_groups", "num_key_value_heads"): "step3p5",
    ("num_attention_heads", "num_encoder_attention_heads"): "prophetnet",
    ("num_attention_heads", "num_heads"): (
        "cohere_compass_vision dinat donut-swin ernie4_5_vl_moe_vision exaone4_5_vision glm4v_moe_vision "
        "glm4v_vision glm5_next_vision glm_image_vision glm_ocr_vision gpt_neo granite_speech_encoder "
        "granite_speech_plus_encoder longt5 maskformer-swin mt5 pix2struct_text_model pop2piano "
        "qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision "
        "qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision swin swin2sr "
        "swinv2 switch_transformers t5 udop umt5"
    ),
    ("num_encoder_blocks", "num_hidden_layers"): "segformer",
    ("num_experts", "num_local_experts"): (
        "bailing_hybrid flex_olmo gpt_oss hunyuan_v1_moe hy_v3 jamba kimi_linear kolibri1 mellum minimax "
        "minimax_m2 minimax_m3_vl_text mixtral olmoe openai_privacy_filter qwen3_moe "
        "qwen3_omni_moe_talker_text qwen3_vl_moe_text"
    ),
    ("num_experts_per_tok", "num_experts_per_token"): "bailing_hybrid kimi_linear",
    ("num_hidden_layers", "num_layers"): (
        "dinat donut-swin exaone gpt_neo granite_speech_encoder granite_speech_plus_encoder hiera longt5 "
        "maskformer-swin mt5 patchtsmixer pix2struct_text_model pop2piano sam3_detr_decoder "
        "sam3_detr_encoder "
        "sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder swin swin2sr swinv2 switch_transformers t5 "
        "udop umt5 xglm"
    ),
    ("num_hidden_layers", "num_stages"): "convnext convnextv2",
    ("num_mtp_layers", "num_nextn_predict_layers"): (
        "bailing_hybrid deepseek_v3 glm4_moe mellum sarvam_mla sarvam_moe step3p5"
    ),
    ("route_scale", "routed_scaling_factor"): "inkling2_loop_text inkling2_text",
    ("sliding_window", "sliding_window_size"): "inkling2_loop_text inkling2_text inkling_text",
    ("tgt_vocab_size", "vocab_size"): "fsmt",
}
#: GPT-2's names for its sizes. Classes without these names ignore them, but other readers may not.
_PASSED_OVER = (
    ("hidden_size", "n_embd"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("max_position_embeddings", "n_positions"),
)
_ROPE = ("rope_parameters", "rope_scaling")
#: Keys next to the rotary embedding's settings that repeat one of them, and the name in these settings.
#: source: transformers modeling_rope_utils.py (convert_rope_params_to_dict)
_BESIDE_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
#: The same for settings by kind of layer: the kind to which the key applies.
#: source: transformers models/{gemma3,modernbert,deepseek_v4}/configuration_*.py
_BESIDE_KINDS = {
    "rope_theta": ("full_attention", "main"),
    "global_rope_theta": ("full_attention",),
    "rope_local_base_freq": ("sliding_attention",),
    "local_rope_theta": ("sliding_attention",),
}
#: Kinds of scaling with two names, and a kind that includes another one. source: modeling_rope_utils.py
_SAME_KINDS = {"su": "longrope", "mrope": "default"}
#: Aliases of dtypes. source: torch
_SAME_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}
#: Maximum nesting depth of the examined parts of a config.
_DEPTH = 4

#: A key as named in messages, its value, and the value used for comparison.
Statement = tuple[str, Any, Any]


def find_repeated_settings(config: Mapping[str, Any], file: str) -> list[Finding]:
    """Find settings that one object of a config states under two keys with different values.

    Args:
        config: content of config.json.
        file: its path, for messages.
    """
    findings = []
    for prefix, part in _parts(config, "", _DEPTH):
        known = part.get("model_type", config.get("model_type") if not prefix else None)
        for severity, statements in _settings(part, known):
            for (key, value, one), (other, second, two) in pairwise(statements):
                if one == two:
                    continue
                is_code = "auto_map" in config
                findings.append(
                    Finding.of(
                        codes.CONFIG_DISAGREES,
                        f"{prefix}{key} is {shown(value)}, but {prefix}{other} is {shown(second)}: the "
                        "config states two values of one setting",
                        severity="warning" if is_code else severity,
                        file=file,
                        expected=f"{prefix}{key}: {shown(value)}",
                        got=f"{prefix}{other}: {shown(second)}",
                        help=f"correct {file}: keep {prefix}{key} or {prefix}{other}, with the value that "
                        "the model was trained with",
                    )
                )
    return findings


def find_repeated_spellings(config: Mapping[str, Any], file: str) -> list[Finding]:
    """Find keys of a training config that occur with both ``-`` and ``_``, with different values.

    Args:
        config: the config as read.
        file: its path, for messages.
    """
    return [
        Finding.of(
            codes.CONFIG_DISAGREES,
            f"{key} is {shown(value)}, but {other} is {shown(config[other])}: the config states two values "
            "of one setting",
            file=file,
            expected=f"{key}: {shown(value)}",
            got=f"{other}: {shown(config[other])}",
            help=f"correct {file}: keep {key} or {other}, with the value that the model was trained with",
        )
        for key, value in config.items()
        if (other := str(key).replace("-", "_")) != key and other in config and config[other] != value
    ]


def _parts(part: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a config and the configs of its parts, each with the prefix for its keys in messages."""
    yield prefix, part
    for key, value in part.items() if depth else ():
        if isinstance(value, Mapping) and str(key).endswith("_config"):
            yield from _parts(value, f"{prefix}{key}.", depth - 1)


def _settings(part: Mapping[str, Any], model_type: Any) -> Iterator[tuple[str, list[Statement]]]:
    """Yield the statements about each setting, and the severity of a difference."""
    yield (
        "error",
        [
            (key, part[key], _dtype(part[key]))
            for key in ("dtype", "torch_dtype")
            if _is_single(part.get(key))
        ],
    )
    for pair, types in ALIASES.items():
        if model_type in types.split():
            yield "error", _plain(part, pair)
        elif pair in _PASSED_OVER:
            yield "warning", _plain(part, pair)
    for statements in _rope(part):
        yield "error", statements


def _rope(part: Mapping[str, Any]) -> Iterator[list[Statement]]:
    """Yield the statements about each setting of the rotary embedding."""
    tables = {key: table for key in _ROPE if isinstance(table := part.get(key), Mapping)}
    settings: dict[str, list[Statement]] = {}
    for key, name in _BESIDE_ROPE.items():
        if _is_single(part.get(key)):
            settings.setdefault(name, []).append((key, part[key], part[key]))
    for where, table in tables.items():
        for key, value in table.items():
            if _is_single(value):
                name = "rope_type" if key == "type" else str(key)
                same = _SAME_KINDS.get(value, value) if name == "rope_type" else value
                settings.setdefault(name, []).append((f"{where}.{key}", value, same))
    yield from settings.values()
    for key, kinds in _BESIDE_KINDS.items():
        for where, table in tables.items():
            inner = [kind for kind in kinds if isinstance(table.get(kind), Mapping)]
            named = [(f"{where}.{kind}.rope_theta", table[kind].get("rope_theta")) for kind in inner]
            bases = [(key, part.get(key)), *named]
            yield [(name, value, value) for name, value in bases if _is_single(value)]


def _plain(part: Mapping[str, Any], keys: tuple[str, str]) -> list[Statement]:
    return [(key, part[key], part[key]) for key in keys if _is_single(part.get(key))]


def _is_single(value: Any) -> bool:
    """Return True for a value that can be compared; a list with one value per layer cannot."""
    return isinstance(value, (str, int, float))


def _dtype(value: Any) -> str:
    """Return the canonical name of a dtype."""
    name = str(value).removeprefix("torch.")
    return _SAME_DTYPES.get(name, name)
