"""MaxText's terms for Qwen3-Next and Qwen3.5: gated delta nets in all layers of a cycle except the last.

source: MaxText configs/base.yml, configs/models/{qwen3-next-80b-a3b,qwen3.5-35b-a3b}.yml,
    configs/types.py (GDN, partial_rotary_factor), models/{qwen3,qwen3_5}.py,
    layers/attentions.py (is_qwen3_hybrid), layers/embeddings.py (PartialRotaryEmbedding)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..common.config_text import shown
from ..common.errors import error_for
from ..common.finding_facts import runs_of
from ..common.formatting import runs
from ..common.records import replace
from ..layouts.declaration import Evidence
from .config_fields import positive_number, refused, whole_number
from .model import Attention, Block, Experts, Lack, Model, Rope, change_layers, take_delta_net, unstated

#: Sizes of delta nets: axes of the tables -> keys of a yml.
SIZES = {
    "k": "gdn_num_key_heads",
    "kd": "gdn_key_head_dim",
    "ud": "gdn_value_head_dim",
    "C": "gdn_conv_kernel_dim",
}
#: The number of value heads; each key head has several.
VALUES = "gdn_num_value_heads"
#: The number of layers in a cycle.
CYCLE = "inhomogeneous_layer_cycle_interval"
#: The fraction of a head that is rotated.
SHARE = "partial_rotary_factor"
#: Maximum length of a cycle that the table describes.
LONGEST_CYCLE = 8
#: Settings in a yml of such a block, besides sizes, the cycle and the rotary embedding.
SETTINGS: dict[str, Any] = {"norm_topk_prob": True, "shared_experts": 1}
#: Settings that these blocks support with one value only, and MaxText's default for each.
FIXED: dict[str, tuple[Any, Any]] = {
    "use_qk_norm_in_gdn": (True, True),
    "attention_bias": (False, False),
    "attention_sink": (False, False),
    "routed_bias": (False, False),
    "mlp_bias": (False, False),
    "mtp_num_layers": (0, 0),
}
#: Settings besides sizes that stay unchanged when a yml is made from another yml.
KEPT = (CYCLE, SHARE, "use_mrope", "mrope_section", *FIXED)


def read_rope(config: Mapping[str, Any], base: float | None) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of a yml, and its features that no other framework supports.

    Raises:
        FastshardError: ``FS209`` for settings that affect values and are not stated, ``FS211`` for
            invalid ones.
    """
    kind = str(config.get("rope_type") or "default").lower()
    if kind != "default":
        return Rope(base), [Lack("rope_type", "default", shown(config["rope_type"]))]
    # MaxText has defaults: the yml of a model states others, or a model_name, whose yml is not here.
    if open_ := list_unstated(config):
        raise error_for([unstated(key, "") for key in open_])
    share = positive_number(config, SHARE, 1.0)
    if share > 1:
        raise refused(f"config: {SHARE}", "1 at most", share)
    return Rope(base, share), []


def list_unstated(config: Mapping[str, Any]) -> list[str]:
    """List settings that determine the model, that no array shows, and that a yml does not state."""
    return [key for key in (SIZES["k"], SHARE) if config.get(key) is None]


def list_blocks(experts: Experts | None, evidence: Evidence, grouped: bool) -> tuple[Block, ...]:
    """Return the kinds of layers: those with delta nets, and those with attention."""
    assert experts is not None
    attention = Attention(qk_norm=True, grouped=grouped, output_gate=True)
    block = Block(attention, replace(experts, shared=True, shared_gate=True))
    delta = evidence.sets["delta"][1] if "delta" in evidence.sets else ()
    return change_layers([block], delta, evidence.axes.get("L", 0), take_delta_net)


def read_cycle(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers in a cycle, from a yml or a ``config.json``; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` for an invalid number.
    """
    types = config.get("layer_types")
    if isinstance(types, list) and "linear_attention" in types:
        # transformers takes these before the interval.
        full = [n for n, kind in enumerate(types) if kind == "full_attention"]
        return find_cycle(full, set(range(len(types))) - set(full))
    for key in (CYCLE, "full_attention_interval"):
        if config.get(key) is not None:
            return whole_number(config, key, 1)
    return None


def find_cycle(full_layers: Iterable[int], delta_layers: Iterable[int]) -> int | None:
    """Return the length of a cycle in which only the last layer has attention; None if the layers form no
    cycle.

    Args:
        full_layers: the known layers with attention.
        delta_layers: the known layers with delta nets.
    """
    full = sorted(full_layers)
    if not full:
        return None
    length = full[0] + 1
    return length if fits_cycle(length, full, delta_layers) else None


def fits_cycle(length: int, full_layers: Iterable[int], delta_layers: Iterable[int]) -> bool:
    """Return True if all layers have the kinds that a cycle of the given length implies."""
    return all((n + 1) % length == 0 for n in full_layers) and all((n + 1) % length for n in delta_layers)


def count_layers_of_cycle(model: Model) -> int | None:
    """Return the length of a model's layer cycle; None if its layers form no cycle."""
    delta = model.delta_layers
    count = sum(len(block.layers or ()) for block in model.blocks)
    return find_cycle(set(range(count)) - set(delta), delta)


def list_lacks(model: Model) -> list[Lack]:
    """List features of a model that MaxText's blocks lack, besides those that its kind covers."""
    length = count_layers_of_cycle(model)
    if length is not None and length <= LONGEST_CYCLE:
        return []
    return [
        Lack(
            model.word("delta_layers", "set of layers with gated delta nets"),
            f"all layers of a cycle but the last, and at most {LONGEST_CYCLE} in a cycle",
            runs_of(runs(model.delta_layers)) or "none",
        )
    ]


def write(model: Model) -> dict[str, Any]:
    """Return the yml keys for cycle and rotary embedding of a model that passes :func:`list_lacks`."""
    return {"rope_type": "default", SHARE: model.rope.share, CYCLE: count_layers_of_cycle(model)}


def write_sizes(axes: Mapping[str, int], *, has_heads: bool) -> dict[str, int]:
    """Return the yml keys for the sizes of experts and delta nets.

    Args:
        axes: the extents that the plan bound.
        has_heads: True if the number of key heads is known.
    """
    sizes = {key: axes[axis] for axis, key in SIZES.items()} | {VALUES: axes["k"] * axes["u"]}
    if not has_heads:
        for axis in ("k", "kd"):
            del sizes[SIZES[axis]]
    return {"base_mlp_dim": axes["M"], "base_moe_mlp_dim": axes["M"], **sizes}
