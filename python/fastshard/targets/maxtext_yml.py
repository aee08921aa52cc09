"""The yml of a MaxText model, made of a Hugging Face config or of what a source says itself.

source: MaxText configs/base.yml, configs/models/{llama2-7b,llama3.1-8b,mistral-7b,gpt3-175b}.yml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Finding
from ..models import maxtext
from ..naming.maxtext import FILE

if TYPE_CHECKING:
    from .maxtext import MaxTextTarget


def of(target: MaxTextTarget, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """What MaxText is to be told of the model, and what had to be assumed.

    Raises:
        FastshardError: ``FS514`` for what MaxText's block does not compute, ``FS211`` for values of
            another kind.
    """
    source = target.source
    gpt3 = "fused_qkv" in target.facts
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
    if target.model is None and maxtext.is_maxtext(given):
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
    if target.model is None:
        rope = maxtext.pairs_of(given)
        if rope is not None:
            out |= maxtext.order(target.facts["interleaved"], rope.scaled)
    else:
        told, findings = maxtext.DIALECT.write(target.model, target.facts["interleaved"], tied, FILE)
        out |= told
    return out, findings


def dump(config: dict[str, Any]) -> str:
    """The text of a yml."""
    import yaml

    head = "# Made of the checkpoint that was converted; overrides MaxText's configs/base.yml.\n"
    return head + str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None))
