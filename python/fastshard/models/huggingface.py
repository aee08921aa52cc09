"""transformers' terms for models: ``config.json``.

The layout tables of its classes state what each class computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding
from ..common.records import replace
from ..layouts import tables
from ..layouts.declaration import Evidence
from ..layouts.model_classes import KEYS, PLACES, ModelClass
from . import unsupported
from .config_fields import positive_number, refused, whole_number
from .config_json import find_text_config
from .model import (
    Attention,
    Block,
    Experts,
    Lack,
    Model,
    Rope,
    change_layers,
    drop_experts,
    take_delta_net,
    take_window,
)
from .unsupported import Says

#: Functions for which transformers has several names. source: transformers activations.py, ACT2FN
_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
_ACTIVATIONS = frozenset({"gelu", "gelu_pytorch_tanh", "relu", "silu", "mish", "sigmoid", "linear", "tanh"})
#: Keys for the fraction of a head that is rotated.
_SHARES = ("partial_rotary_factor", "rotary_pct")
#: Keys for a rotary embedding's settings, in transformers 4 and 5.
_ROPES = frozenset({"rope_scaling", "rope_parameters"})
#: Names of the fields in messages.
_WORDS = {
    "activation": "hidden_act",
    "parallel": "use_parallel_residual",
    "window": "sliding_window",
    "rope.scaling": "rope_scaling",
    "experts.normalised": "norm_topk_prob",
    "divisor": "query_pre_attn_scalar",
    "scores_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
    "local_rope": "rotary embedding of sliding_attention",
}
#: transformers has no GPT-3; its GPT-2 is another model.
_GPT3 = Says(kind="GPT-3")


def _says(of: ModelClass) -> Says:
    """Return the properties that models of a class can have."""
    return Says(
        kind=of.kind,
        families=(of.family,),
        norm=of.norm,
        norm_bias=of.norm_bias,
        gated=of.gated,
        activations=_ACTIVATIONS if of.activation is None else (of.activation,),
        parallel=(False, True) if of.having("use_parallel_residual") else (False,),
        shares=None if of.having(*_SHARES) else (1.0,),
        scalings=of.scalings,
        window=of.window in ("all", "named", "set"),
        windowed_layers="any" if of.window == "set" else "all",
        local_rope=of.local_rope,
        divisor=of.having("query_pre_attn_scalar"),
        scores_cap=of.having("attn_logit_softcapping"),
        logits_cap=of.having("final_logit_softcapping"),
        scaled_embedding=(of.scaled_embedding,),
        norms_after=(of.norms_after,),
        sinks=(of.sinks,),
        router_bias=(of.router_bias,),
        biases=[_places(biases) for biases in of.biases],
        qk_norm=(False, True) if of.having("use_qk_norm") else (of.qk_norm,),
        grouped=(False, True) if of.grouped else (False,),
        further_layers=of.having("num_nextn_predict_layers", "linear_num_key_heads"),
        attentions=of.attentions,
        output_gate=(of.output_gate,),
        indexed=(of.indexed,),
        experts=of.experts,
        unnormalised=of.having("norm_topk_prob"),
        scores=(of.scores,),
        corrected=of.scores == "sigmoid",
        grouped_experts=of.having("n_group"),
        scaled_experts=of.having("routed_scaling_factor"),
        shared_experts=of.having("n_shared_experts", "shared_expert_intermediate_size"),
        # All of GLM's have them; a mixture of heads without them is of other classes.
        needs_shared_experts=of.having("n_shared_experts") and not of.latent,
        shared_gate=(of.having("shared_expert_intermediate_size"),),
        dense_layers="any"
        if of.dense_layout or of.having("mlp_only_layers")
        else "first"
        if of.having("first_k_dense_replace")
        else "none",
    )


def _places(biases: Sequence[str]) -> tuple[bool, bool, bool, bool]:
    qkv, out, mlp, last = (place in biases for place in PLACES)
    return qkv, out, mlp, last


def class_of(model: Model, help: str | None = None) -> ModelClass:
    """Return the transformers class that computes a model.

    Raises:
        FastshardError: ``FS514``, one finding for each feature that no class supports.
    """
    if model.family == "gpt3":
        raise unsupported.refused("transformers", _GPT3, list(model.others), help)
    written = [of for of in tables.classes().values() if of.order is not None]
    mixed = model.experts is not None
    near = [of for of in written if of.experts == mixed and (mixed or of.family == model.family)]
    # Not those that are only read, and no model's parts (text_config).
    if required := [of for of in written if of.model_type == model.required_class]:
        near = required
    if not near:
        unsupported.refuse("transformers", map(_says, written), model)
    # The class that its source names, if that will do, else the plainest.
    near.sort(key=lambda of: of.model_type != model.kin)
    kinds = [_says(of) for of in near]
    found, lacking = unsupported.fitting(model, kinds)
    if lacking:
        raise unsupported.refused("transformers", found, lacking, help)
    return near[kinds.index(found)]


def layout_of(model: Model, of: ModelClass) -> str:
    """Return the name of the table for a class's tensors."""
    return of.dense_layout if model.dense_layers and of.dense_layout else of.layout


def facts_of(model: Model, of: ModelClass) -> dict[str, bool]:
    """Return the facts of the class's layout table."""
    qkv, out, mlp, _ = model.biases
    facts = {"tied": model.tied, "head": not model.tied, "attention_bias": qkv}
    facts |= {"further": model.further_layers > 0, "has_experts": model.experts is not None}
    facts |= {"out_bias": out, "mlp_bias": mlp, "qk_norm": model.attention.qk_norm}
    if of.latent:
        facts["q_lora"] = model.attention.latent_queries
    if model.experts is not None:
        facts |= {"stacked_experts": of.stacked, "stacked_further_experts": False}
        facts |= {"shared_experts": model.experts.shared, "shared_expert": model.experts.shared_gate}
    return facts


def _sizes(axes: Mapping[str, int], further_layers: int = 0) -> dict[str, int]:
    """Return sizes by ``config.json`` key, from sizes by table axis."""
    heads = axes["a"] if "a" in axes else axes["g"] * axes.get("r", 1)
    sizes = {
        "vocab_size": axes["V"],
        "hidden_size": axes["H"],
        "intermediate_size": axes.get("F"),
        "num_hidden_layers": axes["L"] - further_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": axes.get("g", heads),
        "head_dim": axes.get("d"),
        "q_lora_rank": axes.get("Q"),
        "kv_lora_rank": axes.get("K"),
        "qk_nope_head_dim": axes.get("nope"),
        "qk_rope_head_dim": axes.get("rope"),
        "v_head_dim": axes.get("vd"),
        "shared_expert_intermediate_size": axes.get("S"),
        "index_n_heads": axes.get("ih"),
        "index_head_dim": 2 * axes["ic"] + axes["ix"] if "ix" in axes else None,
        "linear_conv_kernel_dim": axes.get("C"),
        "linear_key_head_dim": axes.get("kd"),
        "linear_value_head_dim": axes.get("ud"),
        "linear_num_key_heads": axes.get("k"),
        "linear_num_value_heads": axes["k"] * axes["u"] if "u" in axes else None,
    }
    return {key: size for key, size in sizes.items() if size is not None}


def _values(model: Model, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the model's settings under the keys of all classes, in writing order.

    Settings that are not stated are None.
    """
    scaled = model.rope.kind != "default"
    base, windowed = _whole(model.rope.base), True if model.window is not None else None
    values: dict[str, Any] = _sizes(axes, model.further_layers) | {
        "hidden_act": model.activation,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
        "max_position_embeddings": model.max_positions,
        "layer_norm_eps": model.eps,
        "rms_norm_eps": model.eps,
        "rotary_emb_base": base,
        "rope_theta": base,
        **model.tokens,
        "rotary_pct": model.rope.share,
        "partial_rotary_factor": model.rope.share,
        "use_parallel_residual": model.parallel,
        "attention_bias": model.biases[0],
        "mlp_bias": model.biases[2],
        "query_pre_attn_scalar": model.attention.divisor,
        "attn_logit_softcapping": model.attention.scores_cap,
        "final_logit_softcapping": model.logits_cap,
        "rope_local_base_freq": _whole(model.local_rope.base),
        "rope_scaling": {**model.rope.scaling, "rope_type": model.rope.kind} if scaled else None,
    }
    if (experts := model.experts) is not None:
        size = axes["M"] if "M" in axes else axes["F"]
        values |= {
            "num_local_experts": axes["E"],
            "num_experts": axes["E"],
            "n_routed_experts": axes["E"],
            "n_shared_experts": axes.get("S", 0) // size,
            "num_experts_per_tok": experts.best,
            "moe_intermediate_size": size,
            "norm_topk_prob": experts.normalised,
            "n_group": experts.groups,
            "topk_group": experts.best_groups,
            "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": len(model.dense_layers),
            "mlp_only_layers": list(model.dense_layers),
            "num_nextn_predict_layers": model.further_layers,
            # A model without dense layers has no size for them.
            "intermediate_size": values.get("intermediate_size", size),
            "rope_interleave": True,
        }
    return values | {
        "use_qk_norm": model.attention.qk_norm,
        "index_topk": model.attention.indexed,
        "sliding_window": model.window,
        # A window is in the layers from some number on, and only where the config says so.
        "use_sliding_window": windowed,
        "max_window_layers": windowed and 0,
        "layer_types": windowed and _list_windows(model, axes["L"]),
    }


def _list_windows(model: Model, count: int) -> list[str]:
    """Return the attention of each layer of a model with windows, in transformers' terms."""
    layers = model.windowed_layers
    return [
        "sliding_attention" if layers is None or layer in layers else "full_attention"
        for layer in range(count)
    ]


def _list_layer_types(model: Model, count: int) -> list[str]:
    """Return the attention of each layer of a model with gated delta nets, in transformers' terms."""
    delta = set(model.delta_layers)
    return ["linear_attention" if layer in delta else "full_attention" for layer in range(count)]


def write(
    model: Model, of: ModelClass, axes: Mapping[str, int], file: str
) -> tuple[dict[str, Any], list[Finding]]:
    """Return a model's config without its dtype, and the assumptions; settings that are not stated are
    omitted.

    Args:
        model: the model.
        of: the class that computes it.
        axes: extents that the plan bound.
        file: the config's name in messages.

    Raises:
        FastshardError: ``FS209`` for a setting that affects values and is not stated.
    """
    model.settled("parallel", "activation")
    if model.config is not None:
        return {**model.config, **_sizes(axes)}, model.list_assumptions(file=file)
    written = ["activation", "eps", "max_positions", "rope.base", "rope.share"]
    written += ["parallel"] if of.having("use_parallel_residual") else []
    written += ["rope.scaling"] if model.rope.kind != "default" else []
    written += ["experts.best"] if model.experts is not None else []
    values = _values(model, axes)
    if "delta" in of.attentions:
        # Without it the class takes every fourth layer for one with heads.
        values["layer_types"] = _list_layer_types(model, values["num_hidden_layers"])
    if of.window == "set" and model.window is None:
        # Without it the class takes some layers for windowed ones.
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    if _ROPES & of.defaults.keys() and values["rope_scaling"] is None:
        # Without it the class scales them.
        values["rope_scaling"] = {"rope_type": "default"}
    declared = {
        key: value
        for key, value in values.items()
        if value is not None and (key not in KEYS or key in of.keys)
    }
    declared |= {key: values[field] for key, field in of.own_keys.items() if values[field] is not None}
    out = {"architectures": [of.architecture], "model_type": of.model_type, **declared, **of.config}
    out |= {key: None for key in of.null if key not in out}
    return out, [*model.list_assumptions(*written, file=file), *_outside(model, file)]


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and float(value).is_integer() else value


def _outside(model: Model, file: str) -> list[Finding]:
    """Report the effect of adding eps outside the root."""
    if not model.eps_outside or model.norm != "RMSNorm" or model.eps is None or model.eps <= 1e-7:
        return []
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            f"config: {model.framework}'s RMSNorm divides by rms + eps, Llama's by sqrt(rms^2 + eps); "
            f"{model.word('eps')} is written",
            severity="note",
            file=file,
        )
    ]


class HuggingFace:
    """The dialect of transformers."""

    name = "transformers"

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model of a ``config.json`` whose tensors a table describes.

        Raises:
            FastshardError: ``FS211`` for an invalid value.
        """
        kind, classes = str(values.get("model_type")), {**tables.classes(), **evidence.classes}
        family = evidence.family
        if kind not in classes and (text := find_text_config(values)) is not None:
            # A model of text beside towers: other frameworks have the former.
            of_text = classes.get(str(text.get("model_type")))
            if of_text is not None:
                kind, values, family = of_text.model_type, text, of_text.layout.removeprefix("hf.")
        # Of a model type of which only the tensors are known, no other framework is told what it computes.
        strange = (
            []
            if kind in classes
            else [Lack("model_type", f"one of {', '.join(sorted(classes))}", shown(kind))]
        )
        near = [one for one in classes.values() if one.family == evidence.family] or list(classes.values())
        of = next((one for one in near if one.model_type == kind), near[0])
        settings = add_defaults(values, of)
        settings |= {field: settings[key] for key, field in of.own_keys.items() if key in settings}
        window, some = find_windows(settings, of)
        rope, several = rope_of(_take_kind_of_rope(settings, "full_attention") if of.local_rope else settings)
        local = _read_local_rope(settings, rope) if of.local_rope else None
        if rope.share != 1 and not of.having(*_SHARES):
            # transformers looks at it in the classes alone that have such a key.
            several.append(Lack(_SHARES[0], "1: the class rotates the entire head", f"{rope.share:g}"))
            rope = replace(rope, share=1.0)
        activation = of.activation or str(settings.get("hidden_act", "silu"))
        eps = "layer_norm_eps" if of.having("layer_norm_eps") else "rms_norm_eps"
        return Model(
            framework=self.name,
            # Experts meet in no layout of others that is of the table's family.
            family=of.family if of.model_type == kind and not of.experts else family,
            norm=of.norm,
            norm_bias=of.norm_bias,
            eps=positive_number(settings, eps, 1e-6),
            gated=of.gated,
            activation=_SAME.get(activation, activation),
            parallel=of.having("use_parallel_residual") and bool(settings.get("use_parallel_residual")),
            rope=rope,
            blocks=_blocks(settings, of, evidence, window, local),
            scaled_embedding=of.scaled_embedding,
            norms_after=of.norms_after,
            logits_cap=_read_cap(settings, of, "final_logit_softcapping"),
            further_layers=_count_further_layers(evidence),
            tied=evidence.facts.get("tied", False),
            max_positions=whole_number(settings, "max_position_embeddings", 2048),
            kin=kind,
            others=(*some, *several, *strange, *_besides(settings, of)),
            words=_WORDS | {"eps": eps},
            config=values,
        )


def add_defaults(config: Mapping[str, Any], of: ModelClass) -> dict[str, Any]:
    """Return a config with the class's defaults for the settings that it omits.

    The settings of a rotary embedding may be under either of two keys; null counts as omitted.
    """
    ropes = _ROPES & of.defaults.keys()
    stated = any(config.get(key) is not None for key in _ROPES)
    defaults = {key: value for key, value in of.defaults.items() if not (stated and key in _ROPES)}
    return defaults | {key: value for key, value in config.items() if key not in ropes or value is not None}


def _layers_of(name: str, evidence: Evidence) -> Sequence[int]:
    """Return the layers of a set in the table; none if the table has no such set."""
    return evidence.sets[name][1] if name in evidence.sets else ()


def _count_further_layers(evidence: Evidence) -> int:
    """Count the stored MTP layers."""
    return len(_layers_of("mtp", evidence)) if evidence.facts.get("further") else 0


def _blocks(
    config: Mapping[str, Any],
    of: ModelClass,
    evidence: Evidence,
    window: int | None,
    local_rope: Rope | None,
) -> tuple[Block, ...]:
    """Return the kinds of layers of a model.

    Args:
        config: the settings, with the class's defaults.
        of: the class.
        evidence: what the tensors show.
        window: the window of the layers that have one.
        local_rope: their rotary embedding, if it differs from that of other layers.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    facts = evidence.facts
    attention = Attention(
        next(kind for kind in of.attentions if kind != "delta"),
        window=None if of.window == "set" else window,
        qk_norm=facts.get("qk_norm", of.qk_norm),
        grouped=evidence.axes.get("r", 1) > 1,
        latent_queries=of.latent and facts.get("q_lora", False),
        output_gate=of.output_gate,
        sinks=of.sinks,
        divisor=whole_number(config, "query_pre_attn_scalar", 1)
        if of.having("query_pre_attn_scalar")
        else None,
        scores_cap=_read_cap(config, of, "attn_logit_softcapping"),
        indexed=whole_number(config, "index_topk", 1) if of.indexed else None,
    )
    block = Block(attention, _experts(config, of, evidence), _biases(facts, of))
    # A config states layers that predict further tokens even where none is stored.
    layers = evidence.axes.get("L", 0) - len(_layers_of("mtp", evidence)) + _count_further_layers(evidence)
    dense = _layers_of("dense", evidence) if block.experts else ()
    blocks = change_layers([block], dense, layers, drop_experts)
    windowed = _layers_of("windowed", evidence) if of.window == "set" else ()
    blocks = change_layers(blocks, windowed, layers, take_window(window, local_rope))
    delta = _layers_of("delta", evidence) if "delta" in of.attentions else ()
    return change_layers(blocks, delta, layers, take_delta_net)


def _biases(facts: Mapping[str, bool], of: ModelClass) -> tuple[bool, bool, bool, bool]:
    """Return the biases by the table's facts, or by the class if no fact states them."""
    known = [facts.get(fact) for fact in ("attention_bias", "out_bias", "mlp_bias", "mlp_bias")]
    for biases in map(_places, of.biases):
        if all(fact in (None, has) for fact, has in zip(known, biases, strict=True)):
            return biases
    qkv, out, mlp, last = (bool(fact) for fact in known)
    return qkv, out, mlp, last


def _experts(config: Mapping[str, Any], of: ModelClass, evidence: Evidence) -> Experts | None:
    if not of.experts or evidence.axes.get("E") == 0:
        return None
    # A class whose tables have no fact for it has it always.
    shared_gate = evidence.facts.get("shared_expert", of.having("shared_expert_intermediate_size"))
    normalised = not of.having("norm_topk_prob") or bool(config.get("norm_topk_prob"))
    groups, best_groups = (
        whole_number(config, key, 1) if of.having(key) else 1 for key in ("n_group", "topk_group")
    )
    if groups == best_groups:
        # The best of all groups.
        groups = best_groups = 1
    return Experts(
        whole_number(config, "num_experts_per_tok", 1),
        normalised,
        scores=of.scores,
        correction=of.scores == "sigmoid",
        router_bias=of.router_bias,
        groups=groups,
        best_groups=best_groups,
        scale=positive_number(config, "routed_scaling_factor", 1.0)
        if of.having("routed_scaling_factor")
        else 1.0,
        shared=shared_gate or evidence.facts.get("shared_experts", False),
        shared_gate=shared_gate,
    )


def _besides(config: Mapping[str, Any], of: ModelClass) -> list[Lack]:
    """List features of a class for which no other framework has terms."""
    lacking = []
    if of.having("rope_interleave") and config.get("rope_interleave") is False:
        lacking.append(Lack("rope_interleave", "true: the members of a pair are adjacent", "false"))
    for key, expected in of.fixed.items():
        if config.get(key) not in (None, expected):
            lacking.append(Lack(key, shown(expected), shown(config[key])))
    return lacking


def find_windows(config: Mapping[str, Any], of: ModelClass) -> tuple[int | None, list[Lack]]:
    """Return the window of all layers, and the unsupported windows if only some layers have one."""
    if of.window is None:
        return None, []
    if of.window not in ("all", "set"):
        types, used = config.get("layer_types"), config.get("use_sliding_window")
        seen = [one == "sliding_attention" for one in types] if isinstance(types, list) else []
        # Without types it is in the layers from one on.
        if not used and not any(seen):
            return None, []
        in_all = all(seen) if seen else config.get("max_window_layers") == 0
        if of.window == "unknown" or not used or not in_all:
            return None, [Lack("sliding window in some layers", "none", shown(config.get("sliding_window")))]
    window = config.get("sliding_window")
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 1 << 48
    ):
        raise refused("config: sliding_window", "a positive integer", window)
    return window, []


def _read_cap(config: Mapping[str, Any], of: ModelClass, key: str) -> float | None:
    """Return the number at which tanh caps values; None for a class or a model without a cap."""
    return None if not of.having(key) or config.get(key) is None else positive_number(config, key, 1.0)


def _take_kind_of_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a config with the rotary embedding of one kind of layers, if it states several."""
    return {
        key: value[kind] if key in _ROPES and isinstance(value, dict) and kind in value else value
        for key, value in config.items()
    }


def _read_local_rope(config: Mapping[str, Any], others: Rope) -> Rope | None:
    """Return the rotary embedding of layers with a window; None if it is that of the other layers.

    transformers 4 has ``rope_local_base_freq``, without scaling; transformers 5 has ``rope_parameters`` of
    ``sliding_attention``.

    Raises:
        FastshardError: ``FS211`` for invalid values.
    """
    settings = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    settings = _take_kind_of_rope(settings, "sliding_attention")
    if settings.get("rope_parameters") == config.get("rope_parameters"):
        settings.pop("rope_parameters", None)
    base = positive_number(config, "rope_local_base_freq", 10_000)
    local = rope_of({"rope_theta": base, **settings})[0]
    return None if local == others else local


def rope_of(config: Mapping[str, Any]) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding, and the unsupported settings if they differ between kinds of layers.

    transformers 4 has ``rope_theta`` and ``rope_scaling``; transformers 5 has both in ``rope_parameters``.

    Args:
        config: ``config.json`` of the model.

    Raises:
        FastshardError: ``FS211`` for invalid values.
    """
    tables: dict[str, dict[str, Any]] = {}
    several: list[Lack] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if not isinstance(value, (dict, type(None))):
            raise refused(f"config: {key}", "a table", value)
        tables[key] = value or {}
        if nested := [name for name, value in tables[key].items() if isinstance(value, dict)]:
            several.append(Lack(f"{key} by kinds of layers", f"one set of {key}", ", ".join(nested)))
    if several:
        return Rope(), several
    kinds = [
        str(table.get("rope_type", table.get("type", "default")))
        for table in (tables["rope_scaling"], tables["rope_parameters"])
    ]
    flat = {**config, **tables["rope_parameters"]}
    base = next((key for key in ("rope_theta", "rotary_emb_base") if key in flat), "rope_theta")
    part = next((key for key in _SHARES if key in flat), "rotary_pct")
    kind = next((kind for kind in kinds if kind != "default"), "default")
    scaling = tables["rope_scaling"] or tables["rope_parameters"]
    original = "original_max_position_embeddings"
    if kind == "yarn" and scaling.get(original) is None and config.get(original) is not None:
        # transformers looks for it there, too.
        scaling = {**scaling, original: config[original]}
    return Rope(positive_number(flat, base, 10000), positive_number(flat, part, 1.0), kind, scaling), []


DIALECT = HuggingFace()
