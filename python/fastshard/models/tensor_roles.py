"""The layer of a tensor and its role in the layer, from its name alone.

This rule is for people who inspect a checkpoint, and covers all frameworks. It does not affect written
output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..common.regex import compile_when_used
from .tensor_words import WORDS

__all__ = ["layer_of", "order_in_layer", "order_of", "parts_of", "place_of", "role_of"]

#: Words before the number of a layer.
_LAYERS = frozenset(("layers", "layer", "blocks", "block", "h", "x_layers"))
#: A word joined with a layer number, as in MaxText and Paxml.
_JOINED = compile_when_used(r"(layers?|blocks?|h|x_layers)_([0-9]{1,9})")
#: Words before numbers that count something else.
_COUNTED = frozenset(
    ("expert", "experts", "state", "head", "heads", "chunk", "chunks", "params", "param_groups", "groups")
)
#: Paxml's word for a stack; the number after it counts the layers in one iteration of a loop.
_STACK = "repeat"
#: Modules that compute the logits. source: Hugging Face; Megatron-LM, GPT-NeoX, MaxText, Paxml
_HEADS = frozenset((*WORDS["head_modules"], "output_layer", "final_linear", "logits_dense", "logits_ffn"))
_WORD = compile_when_used(r"[^.\W_]+")
#: Words that mark the beginning of a model or of its layers; they are not part of a role.
_WRAPPERS = frozenset(
    (
        "model",
        "module",
        "transformer",
        "language_model",
        "gpt_neox",
        "params",
        "lm",
        "decoder",
        "layers",
        "layer",
        "blocks",
        "block",
        "h",
        "x_layers",
        "repeat",
        "sub",
        "_fsdp_wrapped_module",
        "_orig_mod",
    )
)


#: The steps of a layer in order, and the parts of each step in order, by role.
_STEPS: tuple[tuple[Any, tuple[Any, ...]], ...] = tuple(
    (compile_when_used(form), tuple(map(compile_when_used, parts)))
    for form, parts in (
        (r"^(input_(layer_?)?norm|ln_1|norm_?1|pre_(self_)?attention|attention_norm|norm)\b", ()),
        (
            r"attn|attention\.|mixer|mamba|time_mix",
            (
                r"q_a_proj|wq_a|q_down",
                r"q_a_layernorm|q_down.*norm",
                r"q_b_proj|wq_b|q_up|\bq_proj|\bq\b|\bwq\b|query\b",
                r"qkv|query_key_value|c_attn|in_proj",
                r"\bq_(layer)?norm",
                r"kv_a_proj|wkv_a|kv_down",
                r"kv_a_layernorm|kv_down.*norm",
                r"kv_b_proj|wkv_b|kv_up|\bk_proj|\bk\b|\bwk\b|key\b",
                r"\bk_(layer)?norm",
                r"\bv_proj|\bv\b|\bwv\b|value\b",
                r"conv1d",
                r"a_log|dt_|\bd\b|sink|rot",
                r"norm",
            ),
        ),
        (r"norm|ln_2", ()),
        (r"\b(router|gate)\b", ()),
        (
            r"mlp|ffn|feed_forward|moe|expert",
            (r"gate_proj|\bw1\b|wi_0", r"gate_up|fc1|h_to_4h|c_fc|\bwi", r"up_proj|\bw3\b"),
        ),
    )
)
_NATURAL = compile_when_used(r"\d+|\D+")


def parts_of(name: str) -> tuple[tuple[str | None, ...], list[int]]:
    """Split a name into its parts, with None for each number, and the numbers."""
    parts: list[str | None] = []
    numbers: list[int] = []
    for part in (name.replace("/", ".") if "/" in name else name).split("."):
        if part.isdecimal() and len(part) < 10:
            numbers.append(int(part))
            parts.append(None)
        elif part[-1:].isdecimal() and (joined := _JOINED.fullmatch(part)):
            numbers.append(int(joined[2]))
            parts += (joined[1], None)
        else:
            parts.append(part)
    return tuple(parts), numbers


@lru_cache(maxsize=1 << 14)
def _form(parts: tuple[str | None, ...]) -> tuple[int | None, str]:
    """Return the index of the layer's number among the numbers in a name, and the role.

    Tens of thousands of names have only a few dozen forms.
    """
    at = [i for i, part in enumerate(parts) if part is None]
    layer = next((i for i in at if i and parts[i - 1] in _LAYERS), None)
    if layer is None:
        # Else one with more behind it: the place in a pipeline.
        behind = (i for i in at if i + 1 < len(parts) and not (i and parts[i - 1] in _COUNTED))
        layer = next(behind, None)
    end = len(parts) if layer is None else layer
    head = ["*" if part is None else part for part in parts[:end]]
    kept = [part for part in head if part not in _WRAPPERS]
    kept += ["*" if part is None else part for part in parts[end + 1 :]]
    which = None if layer is None or _STACK in parts[:layer] else at.index(layer)
    return which, ".".join(part for part in kept or head if part)


def place_of(name: str) -> tuple[int | None, str]:
    """Return both :func:`layer_of` and :func:`role_of` of a name."""
    parts, numbers = parts_of(name)
    which, role = _form(parts)
    return None if which is None else numbers[which], role or name


def layer_of(name: str) -> int | None:
    """Return the layer in a tensor's name; None for a tensor outside all layers, and for stacks of layers.

    Numbers are those of the framework: in GPT-NeoX's pipelines, the embedding is 0 and the first layer is 2.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj.weight"), layer_of("lm_head.weight")
    (3, None)
    """
    return place_of(name)[0]


def role_of(name: str) -> str:
    """Return a tensor's role in its layer: its name without wrappers and layer, with other numbers as ``*``.

    Layers of the same structure have the same roles.

    >>> role_of("model.layers.3.mlp.experts.7.up_proj.weight")
    'mlp.experts.*.up_proj.weight'
    """
    return place_of(name)[1]


def order_of(name: str) -> tuple[int, str, int]:
    """Return a sort key by a tensor's place in its model.

    Embeddings come first, then each stack of layers by number, then other tensors, then heads.

    >>> names = ["lm_head.weight", "model.norm.weight", "h.10.w", "h.9.w", "model.embed_tokens.weight"]
    >>> sorted(names, key=order_of)
    ['model.embed_tokens.weight', 'h.9.w', 'h.10.w', 'model.norm.weight', 'lm_head.weight']
    """
    parts, numbers = parts_of(name)
    which, _ = _form(parts)
    if which is not None:
        at = [i for i, part in enumerate(parts) if part is None][which]
        return 1, ".".join("*" if part is None else part for part in parts[:at]), numbers[which]
    if parts[0] == "output" or not _HEADS.isdisjoint(parts):
        return 3, "", 0
    words = set(_WORD.findall(name))
    return (0 if words.intersection(WORDS["tables"]) else 2), "", 0


@lru_cache(maxsize=1 << 14)
def _step_of(role: str) -> tuple[int, int]:
    """Return the step of a layer to which a role belongs, and the position in that step."""
    role = role.lower()
    step = next((at for at, (form, _) in enumerate(_STEPS) if form.search(role)), len(_STEPS))
    parts = _STEPS[step][1] if step < len(_STEPS) else ()
    return step, next((at for at, form in enumerate(parts) if form.search(role)), len(parts))


def order_in_layer(name: str) -> tuple[int, int, list[tuple[int, int, str]]]:
    """Return a sort key by the step in which a layer uses the tensor.

    >>> sorted(["mlp.down_proj.weight", "self_attn.v_proj.weight", "input_norm.weight"], key=order_in_layer)
    ['input_norm.weight', 'self_attn.v_proj.weight', 'mlp.down_proj.weight']
    """
    step, part = _step_of(role_of(name))
    # Experts by number.
    words = [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in _NATURAL.findall(name)]
    return step, part, words
