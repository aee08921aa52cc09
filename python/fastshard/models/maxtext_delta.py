"""MaxText's terms for Qwen3-Next and Qwen3.5: gated delta nets in all layers of a cycle but the last.

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
from .config_fields import positive_number, whole_number
from .model import Attention, Block, Experts, Lack, Model, Rope, change_layers, take_delta_net, unstated

#: Sizes of delta nets in a yml, by the tables' axes.
SIZES = {
    "k": "gdn_num_key_heads",
    "kd": "gdn_key_head_dim",
    "ud": "gdn_value_head_dim",
    "C": "gdn_conv_kernel_dim",
}
#: The number of heads of values: several for each head of keys.
VALUES = "gdn_num_value_heads"
#: The number of layers in a cycle.
CYCLE = "inhomogeneous_layer_cycle_interval"
#: The part of a head that is rotated.
SHARE = "partial_rotary_factor"
#: Cycles that the table describes are at most so long.
LONGEST_CYCLE = 8
#: What a yml of such a block states besides sizes, the cycle and the rotary embedding.
SETTINGS: dict[str, Any] = {"norm_topk_prob": True, "shared_experts": 1}
#: Settings besides sizes that a yml made of another yml keeps.
KEPT = (CYCLE, SHARE, "use_mrope", "mrope_section")
#: Settings that these blocks compute with one value alone, and what MaxText takes where none is stated.
_FIXED: dict[str, tuple[Any, Any]] = {
    "use_qk_norm_in_gdn": (True, True),
    "shared_experts": (1, 0),
    "attention_bias": (False, False),
    "attention_sink": (False, False),
    "routed_bias": (False, False),
    "mlp_bias": (False, False),
    "routed_scaling_factor": (1.0, 1.0),
    "mtp_num_layers": (0, 0),
}


def read_rope(config: Mapping[str, Any], base: float | None) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of a yml, and what no other framework has of it.

    Raises:
        FastshardError: ``FS209`` for settings that decide values and are not stated, ``FS211`` for
            invalid ones.
    """
    kind = str(config.get("rope_type") or "default").lower()
    if kind != "default":
        return Rope(base), [Lack("rope_type", "default", shown(config["rope_type"]))]
    # MaxText has defaults: the yml of a model states others, or a model_name, whose yml is not here.
    if open_ := list_unstated(config):
        raise error_for([unstated(key, "") for key in open_])
    return Rope(base, positive_number(config, SHARE, 1.0)), []


def list_unstated(config: Mapping[str, Any]) -> list[str]:
    """List settings that decide the model, that no array shows, and that a yml does not state."""
    return [key for key in (SIZES["k"], SHARE) if config.get(key) is None]


def list_blocks(experts: Experts | None, evidence: Evidence, grouped: bool) -> tuple[Block, ...]:
    """Return the kinds of layers: those with delta nets, and those with attention."""
    assert experts is not None
    attention = Attention(qk_norm=True, grouped=grouped, output_gate=True)
    block = Block(attention, replace(experts, shared=True, shared_gate=True))
    delta = evidence.sets["delta"][1] if "delta" in evidence.sets else ()
    return change_layers([block], delta, evidence.axes.get("L", 0), take_delta_net)


def list_lacks_of_yml(config: Mapping[str, Any]) -> list[Lack]:
    """List what a yml computes and no other framework does."""
    return [
        Lack(key, shown(expected), shown(got))
        for key, (expected, default) in _FIXED.items()
        if (got := default if config.get(key) is None else config[key]) != expected
    ]


def read_cycle(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers in a cycle that a yml or a ``config.json`` states; None if none does.

    Raises:
        FastshardError: ``FS211`` for an invalid number.
    """
    for key in (CYCLE, "full_attention_interval"):
        if config.get(key) is not None:
            return whole_number(config, key, 1)
    types = config.get("layer_types")
    if not isinstance(types, list) or "linear_attention" not in types:
        return None
    full = [n for n, kind in enumerate(types) if kind == "full_attention"]
    return find_cycle(full, set(range(len(types))) - set(full))


def find_cycle(full_layers: Iterable[int], delta_layers: Iterable[int]) -> int | None:
    """Return the number of layers in a cycle, of which the last alone has attention; None if it is no cycle.

    Args:
        full_layers: the layers with attention that are known.
        delta_layers: the layers with delta nets that are known.
    """
    full = sorted(full_layers)
    if not full:
        return None
    length = full[0] + 1
    return length if fits_cycle(length, full, delta_layers) else None


def fits_cycle(length: int, full_layers: Iterable[int], delta_layers: Iterable[int]) -> bool:
    """Return True if layers are of the kinds that a cycle of a length gives them."""
    return all((n + 1) % length == 0 for n in full_layers) and all((n + 1) % length for n in delta_layers)


def count_layers_of_cycle(model: Model) -> int | None:
    """Return the number of layers in the cycle of a model; None if its layers form none."""
    delta = model.delta_layers
    count = sum(len(block.layers or ()) for block in model.blocks)
    return find_cycle(set(range(count)) - set(delta), delta)


def list_lacks(model: Model) -> list[Lack]:
    """List what a model has and MaxText's blocks lack, besides what its kind says."""
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
    """Return the keys of a yml for cycle and rotary embedding of a model that :func:`list_lacks` passes."""
    return {"rope_type": "default", SHARE: model.rope.share, CYCLE: count_layers_of_cycle(model)}


def write_sizes(axes: Mapping[str, int], *, has_heads: bool) -> dict[str, int]:
    """Return the keys of a yml for the sizes of experts and delta nets.

    Args:
        axes: the extents that the plan bound.
        has_heads: the number of heads of keys is known.
    """
    sizes = {key: axes[axis] for axis, key in SIZES.items()} | {VALUES: axes["k"] * axes["u"]}
    if not has_heads:
        for axis in ("k", "kd"):
            del sizes[SIZES[axis]]
    return {"base_mlp_dim": axes["M"], "base_moe_mlp_dim": axes["M"], **sizes}
