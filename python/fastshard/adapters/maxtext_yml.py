"""The yml of a MaxText model, made of a Hugging Face config or of what a source says itself.

source: MaxText configs/base.yml, configs/models/{llama2-7b,llama3.1-8b,mistral-7b,gpt3-175b}.yml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..configs import shown
from ..errors import FastshardError, Finding
from . import maxtext_config
from .base import positive_number, whole_number
from .hf_config import rope_of

if TYPE_CHECKING:
    from .maxtext_target import MaxTextTarget

#: Name of the file.
FILE = "maxtext_model.yml"


def of(target: MaxTextTarget, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """What MaxText is to be told of the model, and what had to be assumed.

    Raises:
        FastshardError: ``FS514`` for what MaxText's block does not compute, ``FS211`` for values of
            another kind.
    """
    source = target.source
    gpt3 = target.layout == "maxtext.gpt3"
    heads = axes["h"] if gpt3 else axes["g"] * axes["r"]
    out: dict[str, Any] = {
        "base_emb_dim": axes["H"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads if gpt3 else axes["g"],
        "base_mlp_dim": axes["F"],
        "base_num_decoder_layers": axes["L"],
        "head_dim": axes["d"],
        "vocab_size": target.vocabulary(axes),
        "scan_layers": target.scan is not None,
        **({} if target.scan is None else {"param_scan_axis": target.scan}),
    }
    if target.optimizer and target.names.count == "opt_state.count":
        # Optax numbers the states of its chain; this optimizer alone has these names. source: MaxText optimizers
        out["opt_type"] = "adam_pax"
    findings: list[Finding] = []
    given = source.config or {}
    if target.whole is None and maxtext_config.is_maxtext(given):
        kept = ("decoder_block", "mlp_activations", "normalization_layer_epsilon", "rope_max_timescale",
                "normalize_embedding_logits")  # fmt: skip
        out |= {key: given[key] for key in kept if given.get(key) is not None}
    if gpt3:
        out |= {
            "decoder_block": "gpt3",
            "mlp_activations": ["gelu"],
            "trainable_position_size": axes["S"],
            "fused_qkv": target.facts["fused_qkv"],
            "logits_via_embedding": True,
            "normalize_embedding_logits": False,
        }
        return out, findings
    tied = target.facts["tied"]
    out["logits_via_embedding"] = tied
    if target.whole is None:
        rope = maxtext_config.rope_of(given)
        if rope is not None:
            out |= _rope(target.facts["interleaved"], rope.scaled)
    else:
        config, findings = target.whole.config(axes)
        out |= _from_hf(config, target.facts["interleaved"], findings)
        if tied:
            # MaxText would divide the logits by sqrt(emb_dim). source: MaxText configs/base.yml
            out["normalize_embedding_logits"] = False
            findings.append(
                Finding.of(
                    "FS109",
                    "the output layer is the embedding: MaxText computes the same only with "
                    "logits_via_embedding: true and normalize_embedding_logits: false",
                    severity="warning",
                    file=FILE,
                )
            )
    return out, findings


def _from_hf(config: dict[str, Any], interleaved: bool, findings: list[Finding]) -> dict[str, Any]:
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise _refuse("activation of a gated MLP", "silu", activation)
    rope = rope_of(config, "MaxText", 1.0)
    if rope.share != 1:
        raise _refuse("share of a head that is rotated", "1", str(rope.share))
    if rope.kind not in ("default", "llama3"):
        raise _refuse("scaling of rotary embeddings", "default | llama3", rope.kind)
    if rope.kind == "llama3":
        for key, value in maxtext_config.LLAMA3_SCALING.items():
            if rope.scaling.get(key, value) != value:
                raise _refuse(f"scaling of rotary embeddings ({key})", str(value), shown(rope.scaling[key]))
    if config.get("model_type") == "mistral" and config.get("sliding_window") is not None:
        seen = whole_number(config, "sliding_window", 1)
        findings.append(
            Finding.of(
                "FS109",
                f"the model attends to {seen} positions, MaxText's block to all before: they differ beyond these",
                severity="warning",
                file=FILE,
            )
        )
    return {
        "mlp_activations": ["silu", "linear"],
        "rope_max_timescale": rope.base,
        # source: transformers models/{llama,mistral}/configuration_*.py
        "normalization_layer_epsilon": positive_number(config, "rms_norm_eps", 1e-6),
        "decoder_block": "mistral" if config.get("model_type") == "mistral" else "llama2",
        **_rope(interleaved, rope.kind == "llama3"),
    }


def _rope(interleaved: bool, scaled: bool) -> dict[str, Any]:
    """The order of pairs, which decides what the values mean, is always stated."""
    return {"rope_type": "llama3.1", "rope_use_scale": scaled} if interleaved else {"rope_type": "default"}


def _refuse(what: str, expected: str, got: str) -> FastshardError:
    return FastshardError.of("FS514", f"MaxText's Llama block has no such {what}", expected=expected, got=got)


def dump(config: dict[str, Any]) -> str:
    """The text of a yml."""
    import yaml

    head = "# Made of the checkpoint that was converted; overrides MaxText's configs/base.yml.\n"
    return head + str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None))
