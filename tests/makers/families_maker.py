"""Small models of families of transformers, most of which have no table, with what they take and what they
compute of it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
#: Families by the sizes of their config: most have no table, and many call a part of theirs "model".
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": SIZES | {"embedding_size": 16},
    "bart": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 96,
    },
    "bert": SIZES,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "clip": {"text_config": SIZES, "vision_config": VISION, "projection_dim": 16},
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "image_size": 32},
    "deberta-v2": SIZES,
    "dinov2": VISION | {"mlp_ratio": 2},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 96},
    "electra": SIZES | {"embedding_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "llama": SIZES | {"num_key_value_heads": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 96,
    },
    "qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "roberta": SIZES,
    "siglip": {"text_config": SIZES, "vision_config": VISION},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    "vit": VISION,
    "wav2vec2": {k: v for k, v in SIZES.items() if k != "vocab_size"}
    | {
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
    },
}
#: Those that every run tries where each takes long: of two models, of pictures, with tied and with
#: parametrised weights.
CHOSEN = ("clip", "t5", "vit", "wav2vec2")


#: Classes with heads, most of whose names in memory are others than on disk, by the sizes of their configs.
WHOLE: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": SIZES | {"num_key_value_heads": 2, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": SIZES
    | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "OlmoeForCausalLM": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2, "tie_word_embeddings": True},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": SIZES
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    },
    "LlavaForConditionalGeneration": {
        "text_config": SIZES | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "WhisperForConditionalGeneration": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "vocab_size": 96,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "T5ForConditionalGeneration": FAMILIES["t5"],
}
#: Of these: experts that are fused, and another prefix.
WHOLE_CHOSEN = ("OlmoeForCausalLM", "LlavaForConditionalGeneration")


def made(family: str) -> Any:
    """A model of a family without a head, whose names begin with no word for all of it; or one of a class
    with a head."""
    torch.manual_seed(5)
    if family in WHOLE:
        kind = getattr(transformers, family)
        model = kind(kind.config_class(**WHOLE[family]))
    else:
        config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
        model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What the model takes first."""
    torch.manual_seed(6)
    ids = torch.randint(3, 90, (1, 9))
    pixels = torch.randn(1, 3, 32, 32)
    if model.config.model_type in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": pixels}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": pixels}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 400)}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(1, 8, 32), "decoder_input_ids": ids}
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, **decoder}


def results(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        out = model(**inputs(model))
    return [value for value in out.to_tuple() if isinstance(value, torch.Tensor)]


def same_results(loaded: Any, want: list[torch.Tensor]) -> bool:
    """True if a model computes the same, bit for bit."""
    # Where tensors lie in memory decides how a processor adds.
    loaded.load_state_dict(
        {name: tensor.clone() for name, tensor in loaded.state_dict().items()}, assign=True
    )
    return all(map(torch.equal, results(loaded.eval()), want))
