"""Hugging Face ``config.json``: the axes and facts that it states, and functions that write one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .. import _core
from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding, from_core
from ..common.records import dataclass
from ..layouts import tables
from .repeated_settings import find_repeated_settings

#: Maximum nesting depth of a config that a table examines, equal to the depth of its expressions.
_DEPTH = 32
#: Heads that replace the output layer. source: transformers modeling_layers.py (GenericFor...),
#: models/gpt_neox/modeling_gpt_neox.py
_OTHER_HEADS = {
    "ForSequenceClassification": ("score.weight",),
    "ForTokenClassification": ("score.weight", "score.bias"),
    "GPTNeoXForTokenClassification": ("classifier.weight", "classifier.bias"),
    "ForQuestionAnswering": ("qa_outputs.weight", "qa_outputs.bias"),
}


#: Keys of the text model's config in the config of a multimodal model.
TEXT_PARTS = ("text_config", "llm_config", "language_config")


def find_text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config in the config of a multimodal model; None if there is none."""
    text = next((config[key] for key in TEXT_PARTS if isinstance(config.get(key), Mapping)), None)
    if text is None:
        return None
    shared = {key: value for key, value in config.items() if not isinstance(value, (Mapping, list))}
    kind = text.get("model_type") or f"{config.get('model_type')}_text"
    found = {**shared, **text, "model_type": kind}
    if "tie_word_embeddings" in shared:
        # The output layer is that of the whole model. source: transformers modeling_utils.py (tie_weights)
        found["tie_word_embeddings"] = shared["tie_word_embeddings"]
    return found


@dataclass(frozen=True)
class Architecture:
    """The transformers class that a config names."""

    name: str
    #: True for a class with an output layer over the vocabulary.
    is_causal: bool
    #: The tensors that replace this layer, if the class name shows them.
    head: tuple[str, ...] = ()


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """Return the first of a config's ``architectures``; None if it states none."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str):
        return None
    # Code of its own may call things otherwise.
    ends = [end for end in _OTHER_HEADS if name.endswith(end)] if "auto_map" not in config else []
    head = _OTHER_HEADS[max(ends, key=len)] if ends else ()
    is_causal = "ForCausalLM" in name or "LMHeadModel" in name
    # Of a model that has a text model, and of encoders with decoders, which have no such part.
    of_text = name.endswith("ForConditionalGeneration") and find_text_config(config) is not None
    return Architecture(name, is_causal or of_text, head)


def layout_of(config: dict[str, Any], file: str | None = None) -> str | None:
    """Return the name of the layout table for a config; None for a model without one.

    Raises:
        FastshardError: as :func:`fastshard.layouts.of_config`.
    """
    return tables.of_config(_json(config), file)


def is_of_transformers(layout: str | None) -> bool:
    """Return True for a built-in table for a model type of transformers."""
    if layout is None or tables.is_registered(layout) or layout not in tables.names():
        return False
    return bool(tables.table(layout).model_types)


#: Extents of axes, facts, and sets by name (axis and positions).
Described = tuple[dict[str, int], dict[str, bool], dict[str, tuple[str, list[int]]]]


def described(
    config: dict[str, Any],
    file: str | None = None,
    names: Iterable[str] = (),
    layout: str | _core.Table | None = None,
) -> Described:
    """Return a layout's axes (as in one unsharded file), facts and sets, derived from a config.

    Args:
        config: content of ``config.json``.
        file: its path, for messages.
        names: names of the stored tensors, for facts that no config states: whether experts are stacked, and
            whether a tied head is stored too.
        layout: the table, if it is not the model's own; without a table, the result is empty.

    Raises:
        FastshardError: ``FS211`` for a value that does not fit.
    """
    layout = layout or layout_of(config, file)
    if layout is None:
        return {}, {}, {}
    try:
        return _table(layout).describe(_json(config), list(names), file)
    except _core.CoreError as error:
        raise from_core(error) from None


def is_for(table: _core.Table, config: dict[str, Any]) -> bool:
    """Return True if a table is for a model, by its ``[config]``.

    Raises:
        FastshardError: ``FS211`` for a value that does not fit.
    """
    try:
        return table.is_for(_json(config))
    except _core.CoreError as error:
        raise from_core(error) from None


def _table(layout: str | _core.Table) -> _core.Table:
    return tables.table(layout) if isinstance(layout, str) else layout


def _json(config: dict[str, Any]) -> str:
    """Return a config in the form that the core reads.

    A config from YAML may contain dates; their text is not used.
    """
    return json.dumps(_finite(config, _DEPTH), default=str)


def _finite(value: Any, depth: int) -> Any:
    """Remove numbers that JSON cannot represent, and values below the depth that tables examine.

    transformers writes some limits as Infinity.
    """
    if isinstance(value, (dict, list)) and not depth:
        return None
    if isinstance(value, dict):
        return {key: _finite(one, depth - 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one, depth - 1) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode_special_floats(value: Any) -> Any:
    """Decode numbers that JSON cannot represent, in the form that transformers writes: ``{"__float__":
    "Infinity"}``.

    source: transformers 5.24 configuration_utils.py (_encode_special_floats)
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
            return float(value["__float__"])
        return {key: decode_special_floats(inner) for key, inner in value.items()}
    return [decode_special_floats(inner) for inner in value] if isinstance(value, list) else value


#: Keys that select the code to run. If the first one names a Hub repository, transformers downloads a kernel
#: from there and runs it.
#: source: transformers 5.24 modeling_utils.py (_check_and_adjust_attn_implementation), auto_factory.py
_CODE_KEYS = {
    f"{prefix}{kind}_implementation{suffix}"
    for kind in ("attn", "experts")
    for prefix in ("", "_")
    for suffix in ("", "_internal")
} | {
    "auto_map",
    "custom_generate",
    "custom_pipelines",
    "kernel_config",
    "use_kernels",
    "use_pretrained_backbone",
}


def for_construction(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config for the construction of a transformers class, without keys that select code."""
    decoded: dict[str, Any] = decode_special_floats(_without_code(config))
    return decoded


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key not in _CODE_KEYS}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def axes_and_facts(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, bool]]:
    """Return the axes and facts of :func:`described`, regardless of the stored tensors."""
    return described(config)[:2]


#: Keys that state the number of multi-token prediction (MTP) layers.
_FURTHER = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def find_promised_further(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Find the key under which a config states MTP layers, and their number."""
    for key in _FURTHER:
        number = config.get(key)
        if type(number) is int and number > 0:
            return key, number
    return None


#: Keys under which a config states that its weights are quantised.
QUANTISED = ("quantization_config", "compression_config")
#: Files in which quantisers record their settings if config.json does not.
QUANTISER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with unquantised weights, in all its parts."""
    return {
        key: unquantised(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTISED
    }


def quantised_by(config: dict[str, Any]) -> str | None:
    """Return the quantisation method that a config states; None for unquantised weights."""
    quantisation = config.get("quantization_config")
    return shown(quantisation.get("quant_method")) if isinstance(quantisation, dict) else None


def dtype_of(config: dict[str, Any]) -> Any:
    """Return the dtype that a config states for the weights; None if it states none."""
    return config.get("dtype", config.get("torch_dtype"))


def with_rows(config: dict[str, Any], rows: int | None) -> dict[str, Any]:
    """Return the config with the number of vocabulary rows to write, if the config states a number."""
    if rows is None or not isinstance(config.get("vocab_size"), int) or config["vocab_size"] == rows:
        return config
    return {**config, "vocab_size": rows}


def with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the config with the weights' dtype, given by torch's name."""
    if not dtype:
        return config
    # transformers 4 reads torch_dtype, 5 reads dtype and writes only that. Of both spellings neither stays
    # behind.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    # A config of several models (text_config, vision_config) says it for each.
    parts = {
        name: {**part, own: dtype}
        for name, part in config.items()
        if isinstance(part, dict) and name.endswith("_config")
        for own in ("dtype", "torch_dtype")
        if own in part
    }
    return {**config, **parts, **dict.fromkeys(keys, dtype)}


def find_contradictions(config: Mapping[str, Any], file: str) -> list[Finding]:
    """Report contradictions within a config.

    Contradictions are one setting under two keys with different values, and a per-layer list whose length
    differs from the number of layers. transformers refuses such lists.
    source: transformers configuration_utils.py (layer_type_validation)

    Args:
        config: content of config.json.
        file: its path, for messages.
    """
    parts = [("", config), *((f"{key}.", part) for key, part in config.items() if isinstance(part, Mapping))]
    findings = find_repeated_settings(config, file)
    for prefix, part in parts:
        layers, kinds = part.get("num_hidden_layers"), part.get("layer_types")
        if not isinstance(layers, int) or isinstance(layers, bool) or not isinstance(kinds, list):
            continue
        # Layers that predict further tokens may be listed behind the others.
        further = sum(n for key in _FURTHER if isinstance(n := part.get(key), int))
        if layers <= len(kinds) <= layers + further:
            continue
        findings.append(
            Finding.of(
                codes.CONFIG_DISAGREES,
                f"{prefix}layer_types has {len(kinds)} entries, but {prefix}num_hidden_layers is {layers}: "
                "transformers rejects the config",
                severity="warning" if "auto_map" in config else "error",
                file=file,
                expected=f"{layers} entries",
                got=str(len(kinds)),
                help="correct layer_types in config.json: one entry for each remaining layer",
            )
        )
    return findings


def layout_by_names(names: Iterable[str]) -> str | None:
    """Return the layout table that the tensor names imply, for use without a config."""
    have = set(names)
    if "model.embed_tokens.weight" in have and "model.layers.0.mlp.gate_proj.weight" in have:
        return "hf.llama"
    return "hf.gpt_neox" if "gpt_neox.embed_in.weight" in have else None
