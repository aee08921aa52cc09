"""MaxText's terms for multi-latent attention, its YaRN, and DeepSeek-V3's choice of experts.

source: MaxText configs/base.yml, configs/types.py (YarnRope, DeepSeekMoE), models/deepseek.py,
    layers/attention_mla.py (MLA), layers/embeddings.py (YarnRotaryEmbedding),
    layers/moe.py (GateLogit, RoutedMoE)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding, error_for
from .config_fields import flag, integer, positive_number, refused, whole_number
from .model import LATENT_EPS, Experts, Lack, Model, Rope, unstated

#: Sizes that only this attention has: axes of the tables -> keys of a yml.
SIZES = {
    "Q": "q_lora_rank",
    "K": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "vd": "v_head_dim",
}
#: MaxText chooses among groups, and weights experts by scores without the bias, only under a name that starts
#: like this.
#: source: MaxText layers/moe.py (GateLogit.__call__, RoutedMoE.get_topk)
_ROUTED_NAME = "deepseek3"
#: YaRN settings that the other ones depend on.
_YARN_SIZES = ("rope_factor", "max_position_embeddings", "original_max_position_embeddings")
_YARN = (*_YARN_SIZES, "beta_fast", "beta_slow", "mscale", "rope_interleave", "rope_truncate")
_ROUTING = ("routed_scaling_factor", "n_routing_groups", "topk_routing_group")
#: Settings besides sizes that stay unchanged when a yml is made from another yml.
KEPT = ("rope_type", *_YARN, "rope_attention_scaling", "rope_pairwise", *_ROUTING, "model_name")
#: Settings that these blocks support with one value only, and MaxText's default for each.
FIXED: dict[str, tuple[Any, Any]] = {
    "routed_score_func": ("sigmoid", ""),
    "routed_bias": (True, False),
    "attention_type": ("mla", "global"),
    "use_random_routing": (False, False),
    "use_indexer": (False, False),
    "rope_interleave": (True, True),
    "mtp_num_layers": (0, 0),
    "mhc_expansion_rate": (1, 1),
}


def read_rope(config: Mapping[str, Any], base: float | None) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of a yml, and its features that no other framework supports.

    Raises:
        FastshardError: ``FS209`` for settings that affect values and are not stated, ``FS211`` for
            invalid ones.
    """
    kind = config.get("rope_type")
    if kind is not None and not str(kind).lower().startswith("yarn"):
        # Its other embeddings rotate halves, and the scale of the softmax is YaRN's all the same.
        return Rope(base), [Lack("rope_type", "yarn", shown(kind))]
    scaling = read_yarn(config)
    if not scaling:
        return Rope(base), []
    positions, original = (whole_number(config, key, 1) for key in _YARN_SIZES[1:])
    # The softmax is scaled by the square of 0.1 * mscale * ln(factor) + 1, within longer windows alone.
    mscale = _number(config, "mscale", 1.0) if positions > original else 0.0
    is_rotation_scaled = flag(config, "rope_attention_scaling") is True
    if mscale:
        # Without mscale beside it, transformers scales rotations, too: by 0.1 * ln(factor) + 1, as MaxText.
        scaling |= {"mscale_all_dim": mscale} if is_rotation_scaled else _equal(mscale)
    elif not is_rotation_scaled:
        scaling["attention_factor"] = 1.0
    return Rope(base, 1.0, "yarn", scaling), []


def read_yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the YaRN settings by transformers' keys; none for a factor of 1, which does not scale.

    Raises:
        FastshardError: ``FS209`` for settings that affect values and are not stated, ``FS211`` for
            invalid ones.
    """
    lacking = [key for key in ("rope_type", *_YARN_SIZES) if config.get(key) is None]
    if lacking:
        raise error_for([unstated(key, "") for key in lacking])
    factor, _, original = (whole_number(config, key, 1) for key in _YARN_SIZES)
    if factor == 1:
        return {}
    scaling: dict[str, Any] = {
        "factor": float(factor),
        "original_max_position_embeddings": original,
        "beta_fast": whole_number(config, "beta_fast", 32),
        "beta_slow": whole_number(config, "beta_slow", 1),
    }
    if flag(config, "rope_truncate") is False:
        scaling["truncate"] = False
    return scaling


def _equal(mscale: float) -> dict[str, float]:
    return {"mscale": mscale, "mscale_all_dim": mscale}


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number, which may be zero or negative.

    Raises:
        FastshardError: ``FS211`` if it is not a number.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise refused(f"config: {key}", "a number", value)
    return float(value)


def read_max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of positions that a yml states."""
    key = "max_position_embeddings"
    return whole_number(config, key, 1) if config.get(key) is not None else None


def read_experts(config: Mapping[str, Any], best: int) -> Experts:
    """Return the expert settings of a yml.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    groups, best_groups = (integer(config, key) for key in ("n_routing_groups", "topk_routing_group"))
    if groups in (None, -1, best_groups):
        groups = best_groups = 1
    for key, number in (("n_routing_groups", groups), ("topk_routing_group", best_groups)):
        if number is None or number < 1:
            raise refused(f"config: {key}", "a positive integer", config.get(key))
    return Experts(
        best,
        scores="sigmoid",
        correction=True,
        groups=int(groups or 1),
        best_groups=int(best_groups or 1),
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        shared=True,
    )


def list_lacks(model: Model) -> list[Lack]:
    """List features of a model that MaxText's blocks lack, besides those that its kind covers."""
    lacking = write_yarn(model)[1]
    if not model.dense_layers or all(block.layers == () for block in model.blocks if block.experts):
        # Each kind of layers is a stack: MaxText has none of no layers.
        word = model.word("dense_layers", "set of layers without experts")
        lacking.append(Lack(word, "some of the layers, not all", "all" if model.dense_layers else "none"))
    if model.experts is not None and not model.experts.shared:
        lacking.append(Lack(model.word("experts.shared", "number of shared experts"), "at least 1", "none"))
    return lacking


def write(model: Model) -> dict[str, Any]:
    """Return the yml keys for the rotary embedding and the routing of a model that :func:`list_lacks`
    accepts.
    """
    experts = model.experts
    assert experts is not None
    # Of the best of all groups MaxText speaks by -1.
    groups = (experts.groups, experts.best_groups) if experts.groups > 1 else (-1, -1)
    return {
        **write_yarn(model)[0],
        "routed_scaling_factor": experts.scale,
        "n_routing_groups": groups[0],
        "topk_routing_group": groups[1],
    }


def write_yarn(model: Model) -> tuple[dict[str, Any], list[Lack]]:
    """Return the yml keys for a rotary embedding, and its features that MaxText's YaRN lacks.

    An embedding without scaling is written as YaRN with a factor of 1, because MaxText's other embeddings
    rotate halves and its converter keeps the order of pairs. For heads with separate keys and values, pairs
    are halves, and attention is not scaled.
    source: MaxText layers/attentions.py (init_rotary_embedding)
    """
    is_latent = model.attention.kind == "latent"
    scaling = {key: value for key, value in model.rope.scaling.items() if value is not None}
    is_scaled, lacking = model.rope.kind == "yarn", []
    positions = model.max_positions or 4096
    original = scaling.get("original_max_position_embeddings") if is_scaled else positions
    if not isinstance(original, int) or original < 1:
        return {}, [_lack(model, "original_max_position_embeddings", "an integer", original)]
    factor = scaling.get("factor", positions / original) if is_scaled else 1
    fast, slow = (scaling.get(key) or default for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    for key, number in (("factor", factor), ("beta_fast", fast), ("beta_slow", slow)):
        # source: MaxText configs/types.py (YarnRope)
        if not isinstance(number, (int, float)) or number < 1 or number != int(number):
            return {}, [_lack(model, key, "an integer", number)]
    every, some, rotation = (scaling.get(key) for key in ("mscale_all_dim", "mscale", "attention_factor"))
    # source: transformers modeling_rope_utils.py (_compute_yarn_parameters)
    full = 0.1 * math.log(factor) + 1
    if rotation is None:
        own = (0.1 * (some or 0) * math.log(factor) + 1) / (0.1 * (every or 0) * math.log(factor) + 1)
        rotation = own if some and every else full
    if not math.isclose(rotation, 1) and not math.isclose(rotation, full):
        key = "attention_factor" if scaling.get("attention_factor") is not None else "mscale"
        expected = "a factor that scales rotations by 1 or by 0.1*ln(factor)+1"
        lacking.append(_lack(model, key, expected, scaling[key]))
    if is_latent and every and factor > 1 and positions <= original:
        word = model.word("max_positions", "max_position_embeddings")
        lacking.append(Lack(word, f"more than {original}, beyond which it scales attention", str(positions)))
    return {
        "rope_type": "yarn",
        "rope_factor": int(factor),
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original,
        "beta_fast": int(fast),
        "beta_slow": int(slow),
        **({"mscale": float(every or 0)} if is_latent else {}),
        "rope_interleave": is_latent,
        "rope_truncate": scaling.get("truncate", True) is not False,
        "rope_attention_scaling": not math.isclose(rotation, 1),
    }, lacking


def _lack(model: Model, key: str, expected: str, got: Any) -> Lack:
    return Lack(f"{model.word('rope.scaling', 'rope_scaling')} ({key})", expected, shown(got))


def list_warnings(eps: float | None, model_name: str | None, file: str | None = None) -> list[Finding]:
    """Warn of differences between MaxText's and transformers' computation that no setting can change.

    Args:
        eps: eps of all MaxText norms.
        model_name: its value in the yml; None if it is unknown.
        file: the yml to write.
    """
    findings = []
    if model_name is not None and not model_name.startswith(_ROUTED_NAME):
        findings.append(
            Finding.of(
                codes.NOT_PROVABLE,
                "MaxText routes like DeepSeek-V3 only if model_name begins with deepseek3. Under another "
                "model_name, including kimi-k2-1t, it ignores groups of experts, and adds the bias for the "
                "choice to the weights",
                severity="warning",
                file=file,
                got=model_name and shown(model_name),
                help="run MaxText with model_name=deepseek3-671b; for other sizes, also pass "
                "override_model_config=true and the settings of the yml as arguments",
            )
        )
    if eps is not None and not math.isclose(eps, LATENT_EPS):
        findings.append(
            Finding.of(
                codes.NOT_PROVABLE,
                f"the norms of the latents use epsilon {eps:g} in MaxText, like all of its norms, but "
                f"{LATENT_EPS:g} in transformers, regardless of the config",
                severity="warning",
                file=file,
            )
        )
    return findings
