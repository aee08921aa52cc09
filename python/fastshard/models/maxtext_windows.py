"""MaxText's terms for gpt-oss: attention sinks, a window in every second layer, experts with biases.

source: MaxText configs/base.yml, configs/models/gpt-oss-20b.yml, models/gpt_oss.py,
    layers/attentions.py (sinks, query_pre_attn_scalar), layers/attention_op.py,
    layers/embeddings.py (YarnRotaryEmbedding), layers/moe.py (RoutedMoE.get_topk, apply_ffn_activation)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.config_text import shown
from ..common.errors import error_for
from ..common.records import replace
from ..layouts.declaration import Evidence
from . import maxtext_latent
from .config_fields import flag, whole_number
from .model import Attention, Block, Experts, Lack, Model, Rope, change_layers, take_window, unstated

#: Settings in a yml of such a block, besides sizes and the rotary embedding.
SETTINGS: dict[str, Any] = {
    "attention_bias": True,
    "attention_sink": True,
    "mlp_activations": ["sigmoid", "linear"],
    "mlp_activations_limit": 7.0,
    "routed_bias": True,
    "mlp_bias": True,
    "inhomogeneous_layer_cycle_interval": 2,
}
#: Settings that these blocks support with one value only, and MaxText's default for each. Names show the
#: cycle.
FIXED: dict[str, tuple[Any, Any]] = {
    "attention_bias": (True, False),
    "attention_sink": (True, False),
    "mlp_activations_limit": (7.0, -1.0),
    "routed_bias": (True, False),
    "mlp_bias": (True, False),
    "inhomogeneous_layer_cycle_interval": (2, 2),
}
#: Settings besides sizes that stay unchanged when a yml is made from another yml.
KEPT = (*maxtext_latent.KEPT, "sliding_window_size", *SETTINGS)


def read_rope(config: Mapping[str, Any], base: float | None) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of a yml, and its features that no other framework supports.

    Raises:
        FastshardError: ``FS209`` for settings that affect values and are not stated, ``FS211`` for
            invalid ones.
    """
    kind = str(config.get("rope_type") or "default").lower()
    if kind == "default":
        return Rope(base), []
    if not kind.startswith("yarn"):
        return Rope(base), [Lack("rope_type", "default | yarn", shown(config["rope_type"]))]
    if flag(config, "rope_interleave") is not False:
        # MaxText takes the two of a pair from places side by side where nothing else is stated.
        return Rope(base), [Lack("rope_interleave", "false", "true")]
    scaling = maxtext_latent.read_yarn(config)
    if not scaling:
        return Rope(base), []
    # transformers scales rotations by 0.1 * ln(factor) + 1 unless another number is stated.
    is_scaled = flag(config, "rope_attention_scaling") is True
    return Rope(base, 1.0, "yarn", scaling if is_scaled else scaling | {"attention_factor": 1.0}), []


def list_blocks(
    config: Mapping[str, Any], experts: Experts | None, evidence: Evidence, grouped: bool
) -> tuple[Block, ...]:
    """Return the kinds of layers: those with a window, starting with the first layer, and those without.

    Raises:
        FastshardError: ``FS209`` for a window that is not stated, ``FS211`` for an invalid one.
    """
    if config.get("sliding_window_size") is None:
        raise error_for([unstated("sliding_window_size", "")])
    window = whole_number(config, "sliding_window_size", 1)
    assert experts is not None
    block = Block(
        Attention(grouped=grouped, sinks=True), replace(experts, router_bias=True), (True, True, True, True)
    )
    count = evidence.axes.get("L", 0)
    return change_layers([block], range(0, count, 2), count, take_window(window))


def list_lacks(model: Model) -> list[Lack]:
    """List features of a model that MaxText's block lacks, besides those that its kind covers."""
    return maxtext_latent.write_yarn(model)[1] if model.rope.kind == "yarn" else []


def write(model: Model) -> dict[str, Any]:
    """Return the yml keys for window and rotary embedding of a model that passes :func:`list_lacks`."""
    if model.rope.kind == "yarn":
        rope = maxtext_latent.write_yarn(model)[0]
    else:
        rope = {"rope_type": "default", "max_position_embeddings": model.max_positions}
    return {"sliding_window_size": model.window, **rope}
