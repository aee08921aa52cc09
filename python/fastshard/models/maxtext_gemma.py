"""MaxText's terms for Gemma 2 and Gemma 3: norms after attention and MLP, windows in some layers, caps, and
embeddings that are multiplied by the root of their size.

source: MaxText configs/base.yml, configs/models/gemma{2,3}-*.yml, models/{gemma2,gemma3}.py,
    layers/attentions.py (init_rotary_embedding, query_pre_attn_scalar), layers/decoders.py
    (apply_output_head), layers/normalizations.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding, error_for
from ..common.records import replace
from ..layouts.declaration import Evidence
from .config_fields import positive_number, whole_number
from .model import Attention, Block, Lack, Model, Rope, change_layers, take_window, unstated

#: Settings in a yml of such a block, besides sizes, caps and the rotary embeddings.
SETTINGS: dict[str, Any] = {
    "mlp_activations": ["gelu", "linear"],
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
}
#: Settings that these blocks support with one value only, and MaxText's default for each.
FIXED: dict[str, tuple[Any, Any]] = {
    "use_post_attn_norm": (True, False),
    "use_post_ffw_norm": (True, False),
    "rope_type": ("default", "default"),
}
#: eps of the norms around attention and MLP, whatever the yml states.
#: source: MaxText models/{gemma2,gemma3}.py (RMSNorm without epsilon)
EPS = 1e-6
#: MaxText's function of the gate (an approximation by tanh), by transformers' name. source: flax linen.gelu
ACTIVATION = "gelu_pytorch_tanh"
#: Keys of a yml for the caps of scores and logits; 0 for none.
SCORES_CAP, LOGITS_CAP = "attn_logits_soft_cap", "final_logits_soft_cap"
#: Base of the rotary embedding in layers with a window; MaxText's default of -1 means that of other layers.
LOCAL_BASE = "local_rope_max_timescale"
#: Factor by which the positions of layers without a window are divided.
LINEAR = "rope_linear_scaling_factor"
#: The model_name under which MaxText divides scores by sqrt(head_dim), and by sqrt(emb_dim / heads).
#: source: MaxText models/gemma3.py (get_query_pre_attn_scalar)
_OF_HEADS, _OF_WIDTH = ("gemma3-4b", "gemma3-12b"), "gemma3-27b"
NAMES = (*_OF_HEADS, _OF_WIDTH)
#: The sizes on which the division under the latter name depends.
_WIDTH = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads")
#: Settings besides sizes that stay unchanged when a yml is made from another yml.
KEPT = ("model_name", "sliding_window_size", LOCAL_BASE, "use_post_attn_norm", "use_post_ffw_norm")


def list_unstated(config: Mapping[str, Any], has_local_rope: bool) -> list[str]:
    """List settings that determine the model, that no array shows, and that a yml does not state.

    MaxText has defaults for them: the yml of a model states others, or a ``model_name``, whose yml is not
    known.
    """
    keys = ["sliding_window_size", "normalization_layer_epsilon"]
    keys += (
        ["rope_max_timescale", LOCAL_BASE, LINEAR, "model_name"]
        if has_local_rope
        else [SCORES_CAP, LOGITS_CAP]
    )
    return [key for key in keys if config.get(key) is None]


def read_rope(
    config: Mapping[str, Any], base: float | None, has_local_rope: bool
) -> tuple[Rope, Rope | None]:
    """Return the rotary embedding of a yml, and that of layers with a window; None if it is the same.

    Raises:
        FastshardError: ``FS209`` for settings that affect values and are not stated, ``FS211`` for
            invalid ones.
    """
    if open_ := list_unstated(config, has_local_rope):
        raise error_for([unstated(key, "") for key in open_])
    if not has_local_rope:
        return Rope(base), None
    factor = positive_number(config, LINEAR, 1.0)
    rope = Rope(base) if factor == 1 else Rope(base, 1.0, "linear", {"factor": factor})
    local = Rope(base if is_off(config[LOCAL_BASE]) else positive_number(config, LOCAL_BASE, 1.0))
    return rope, None if local == rope else local


def is_off(value: Any) -> bool:
    """Return True for a setting that MaxText ignores unless it is positive."""
    return value is None or (isinstance(value, (int, float)) and value <= 0)


def read_cap(config: Mapping[str, Any], key: str) -> float | None:
    """Return the number at which tanh caps values; None for none."""
    return positive_number(config, key, 1.0) if config.get(key) else None


def list_blocks(
    config: Mapping[str, Any], evidence: Evidence, attention: Attention, local_rope: Rope | None, cycle: int
) -> tuple[Block, ...]:
    """Return the kinds of layers: those with a window (all in a cycle but the last), and the others."""
    cap, divisor = read_cap(config, SCORES_CAP), evidence.axes.get("s")
    if divisor is None and depends_on_width(config):
        raise error_for([unstated(key, "") for key in _WIDTH if _is_unstated(config, key)])
    block = Block(replace(attention, scores_cap=cap, divisor=divisor))
    window = whole_number(config, "sliding_window_size", 1)
    count = evidence.axes.get("L", 0)
    windowed = [layer for layer in range(count) if (layer + 1) % cycle]
    return change_layers([block], windowed, count, take_window(window, local_rope))


def list_lacks(model: Model) -> list[Lack]:
    """List features of a model that MaxText's blocks lack, besides those that their kind covers."""
    lacks = []
    if model.eps is not None and not math.isclose(model.eps, EPS):
        lacks.append(Lack(model.word("eps"), f"{EPS:g}", f"{model.eps:g}"))
    if model.logits_cap is not None and not model.tied:
        word = model.word("logits_cap", "cap of logits")
        lacks.append(Lack(word, "none without a tied output layer", f"{model.logits_cap:g}"))
    base = model.local_rope.base
    if base is not None and not float(base).is_integer():
        word = model.word("local_rope", "rotary embedding of layers with a window")
        lacks.append(Lack(f"{word} (base)", "an integer", repr(base)))
    return lacks


def list_own_lacks(config: Mapping[str, Any]) -> list[Lack]:
    """List settings of a yml that no other framework computes."""
    eps = config.get("normalization_layer_epsilon")
    if eps is None or math.isclose(positive_number(config, "normalization_layer_epsilon", EPS), EPS):
        return []
    return [Lack("normalization_layer_epsilon", f"{EPS:g}, which the other norms have", shown(eps))]


def write(model: Model, has_local_rope: bool) -> dict[str, Any]:
    """Return the yml keys for window, caps and rotary embeddings of a model that passes
    :func:`list_lacks`.
    """
    out: dict[str, Any] = {
        "sliding_window_size": model.window,
        SCORES_CAP: model.attention.scores_cap or 0.0,
        LOGITS_CAP: model.logits_cap or 0.0,
        "rope_type": "default",
    }
    if has_local_rope:
        base, factor = model.local_rope.base, model.rope.scaling.get("factor", 1.0)
        out |= {LOCAL_BASE: int(base or 0) or -1, LINEAR: float(factor)}
    return out


def read_divisor(config: Mapping[str, Any], axes: Mapping[str, int], has_local_rope: bool) -> int | None:
    """Return the number whose root divides the scores, for a yml; None if it is unknown.

    A Gemma 2 has the division in its weights, so that any number describes it: the size of a head is taken.
    """
    if has_local_rope and depends_on_width(config):
        return axes["H"] // (axes["g"] * axes["r"]) if {"H", "g", "r"} <= axes.keys() else None
    return axes.get("d")


def depends_on_width(config: Mapping[str, Any]) -> bool:
    """Return True if the root of emb_dim / heads divides the scores under the ``model_name`` of a yml."""
    return config.get("model_name") == _OF_WIDTH


def _is_unstated(config: Mapping[str, Any], key: str) -> bool:
    return config.get(key) is None and config.get(key.removeprefix("base_")) is None


def find_model_name(divisor: int | None, axes: Mapping[str, int]) -> str | None:
    """Return the model_name under which MaxText divides the scores as the model does; None if none does."""
    if divisor in (None, axes["d"]):
        return _OF_HEADS[0]
    return _OF_WIDTH if divisor == axes["H"] // (axes["g"] * axes["r"]) else None


def warn_of_name(name: str, file: str) -> Finding:
    """Build the warning that MaxText computes Gemma 3 under certain names only."""
    return Finding.of(
        codes.NOT_PROVABLE,
        f"MaxText divides the scores of Gemma 3 as this model does only under model_name {name}, whose own "
        "sizes replace those of this yml",
        severity="warning",
        file=file,
        help=f"run MaxText with model_name={name}; for other sizes, also pass override_model_config=true and "
        "the settings of the yml as arguments",
    )
