"""Hugging Face ``config.json``: the axes and facts that it states, and the writing of one."""

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

#: Parts within parts of a config at most that a table looks at: as deep as its expressions nest.
_DEPTH = 32
#: What takes the place of the output layer. source: transformers modeling_layers.py (GenericFor...),
#: models/gpt_neox/modeling_gpt_neox.py
_OTHER_HEADS = {
    "ForSequenceClassification": ("score.weight",),
    "ForTokenClassification": ("score.weight", "score.bias"),
    "GPTNeoXForTokenClassification": ("classifier.weight", "classifier.bias"),
    "ForQuestionAnswering": ("qa_outputs.weight", "qa_outputs.bias"),
}


#: Keys of the text model's config in that of a model with towers.
TEXT_PARTS = ("text_config", "llm_config", "language_config")


def find_text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config in that of a model with towers; None where there is none."""
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
    """The class of transformers that a config names."""

    name: str
    #: True for one with an output layer over the vocabulary.
    is_causal: bool
    #: The tensors that it has in the place of one, if its name tells.
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
    """Return True for a table that comes with fastshard and is for a model type of transformers."""
    if layout is None or tables.is_registered(layout) or layout not in tables.names():
        return False
    return bool(tables.table(layout).model_types)


#: Extents of axes, facts, and sets by name: the axis and the positions.
Described = tuple[dict[str, int], dict[str, bool], dict[str, tuple[str, list[int]]]]


def described(
    config: dict[str, Any],
    file: str | None = None,
    names: Iterable[str] = (),
    layout: str | _core.Table | None = None,
) -> Described:
    """Return the axes (as one unsharded file stores them), facts and sets of a layout by a config.

    Args:
        config: content of ``config.json``.
        file: its path, for messages.
        names: names of the stored tensors, for what no config states: whether experts are stacked, and
            whether a tied head is stored too.
        layout: the table, if it is not the model's; without a table, all are empty.

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
    """Return a config as the core reads it.

    A config from YAML may have dates, whose text is not used.
    """
    return json.dumps(_finite(config, _DEPTH), default=str)


def _finite(value: Any, depth: int) -> Any:
    """Remove numbers that JSON lacks, and values deeper than any table looks.

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
    """Decode numbers that JSON lacks, as transformers writes them in a config: ``{"__float__": "Infinity"}``.

    source: transformers 5.24 configuration_utils.py (_encode_special_floats)
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
            return float(value["__float__"])
        return {key: decode_special_floats(inner) for key, inner in value.items()}
    return [decode_special_floats(inner) for inner in value] if isinstance(value, list) else value


#: Keys that choose the code that computes. transformers downloads a kernel, and runs it, where a value of the
#: first names a repository of the hub.
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
    """Return a config as a class of transformers takes it: without keys that choose the code."""
    decoded: dict[str, Any] = decode_special_floats(_without_code(config))
    return decoded


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key not in _CODE_KEYS}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def axes_and_facts(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, bool]]:
    """Return axes and facts of :func:`described`, whatever is stored."""
    return described(config)[:2]


#: Keys that say how many layers predict further tokens.
_FURTHER = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def find_promised_further(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Find the key under which a config promises layers that predict further tokens, and their number."""
    for key in _FURTHER:
        number = config.get(key)
        if type(number) is int and number > 0:
            return key, number
    return None


#: Keys under which a config says that its weights are quantised.
QUANTISED = ("quantization_config", "compression_config")
#: Files in which quantisers say what they did, where config.json does not.
QUANTISER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with plain weights, in all its parts."""
    return {
        key: unquantised(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTISED
    }


def quantised_by(config: dict[str, Any]) -> str | None:
    """Return the quantisation method of a model's weights by its config; None for plain weights."""
    quantisation = config.get("quantization_config")
    return shown(quantisation.get("quant_method")) if isinstance(quantisation, dict) else None


def dtype_of(config: dict[str, Any]) -> Any:
    """Return the dtype that a config states for the weights; None if it states none."""
    return config.get("dtype", config.get("torch_dtype"))


def with_rows(config: dict[str, Any], rows: int | None) -> dict[str, Any]:
    """Return the config with the number of vocabulary rows that are written, if it states one."""
    if rows is None or not isinstance(config.get("vocab_size"), int) or config["vocab_size"] == rows:
        return config
    return {**config, "vocab_size": rows}


def with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the config with the weights' dtype, by its torch name."""
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

    They are settings under two keys with different values, and lists with an entry for each layer whose
    length differs from the number of layers. transformers refuses such lists.
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
    """Return the layout table that a model's names imply, if there is no config."""
    have = set(names)
    if "model.embed_tokens.weight" in have and "model.layers.0.mlp.gate_proj.weight" in have:
        return "hf.llama"
    return "hf.gpt_neox" if "gpt_neox.embed_in.weight" in have else None
