"""The facts for a Megatron-LM checkpoint's table, derived from its arguments and its tensor names.

source: Megatron-LM megatron/training/arguments.py,
    megatron/core/transformer/moe/{moe_layer,router,experts}.py;
transformers models/{llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.records import dataclass, replace
from ...layouts import tables
from ...layouts.declaration import Description, Evidence, Source
from ...models import config_json, megatron, megatron_config, megatron_heads, megatron_sizes
from ...models.model import Lack, Model
from ...models.overridden_settings import find_missing_rows, find_overridden_settings, is_config_json
from ...models.repeated_settings import find_repeated_spellings
from ..base import Options

#: Degrees of parallel dimensions, by their arguments. source: megatron/training/arguments.py
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def arguments(state: Any) -> dict[str, Any]:
    """Return the arguments in a rank file or ``common.pt``, where a Namespace is an inert record."""
    args = state.get("args") if isinstance(state, dict) else None
    if isinstance(args, dict) and "__class__" in args:
        args = args.get("state")
    return args if isinstance(args, dict) else {}


def override(
    source: Source, args: dict[str, Any], options: Options, file: str | None
) -> tuple[dict[str, Any], list[Lack]]:
    """Replace arguments with the settings in ``--config``, and note each difference on the declaration.

    Returns the arguments, and the settings in ``--config`` for which there is no argument. A merge does not
    need the latter.

    Args:
        source: the declaration.
        args: the arguments in the checkpoint.
        options: the caller's options.
        file: the file that contains the arguments.

    Raises:
        FastshardError: ``FS211`` for a config that states no setting of the model.
    """
    config = _find_config_of_text(options)
    if config is None:
        return args, []
    settings, lacking = megatron_config.read_config_settings(config)
    positions = "position_embedding_type"
    if is_config_json(config) and settings.get(positions) == "rope" and args.get(positions) != "yarn":
        # A config.json turns YaRN off, and no other kind of positions.
        del settings[positions]
    if not settings and not lacking:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "--config states no setting of the model",
            file=options.config_path,
            expected="the model's config.json, or Megatron-LM arguments under their own names",
            got=", ".join(map(str, list(config)[:5])),
            help="pass the config of this model, or leave out --config",
        )
    noted = megatron.SETTINGS - {"group_query_attention"}
    if args.get(megatron.UNTIED) is True and settings.get(megatron.UNTIED) is False:
        source.findings.append(_contradict_tie(file))
        noted -= {megatron.UNTIED}
    source.findings += find_overridden_settings(args, settings, noted, file, "args.")
    if is_config_json(config):
        source.findings += config_json.find_contradictions(config, options.config_path or "config.json")
        source.findings += find_missing_rows(config, args.get("padded_vocab_size"), file)
        source.findings += _find_missing_further(config, args, file)
    else:
        source.findings += find_repeated_spellings(config, options.config_path or "config")
    if "rms_norm_eps" in config:
        # A config.json says by this name alone which norm the model has.
        settings.setdefault("normalization", args.get("normalization") or "RMSNorm")
    return {**args, **settings}, lacking


def _find_config_of_text(options: Options) -> dict[str, Any] | None:
    """Return the text model's settings in ``--config``, because Megatron-LM stores no other part."""
    config = options.override_config
    if config is None or not is_config_json(config):
        return config
    return config_json.find_text_config(config) or config


def _find_missing_further(
    config: Mapping[str, Any], args: Mapping[str, Any], file: str | None
) -> list[Finding]:
    """Warn of MTP layers in ``--config`` that the run did not build."""
    promised = config_json.find_promised_further(config)
    # Arguments that do not state their number are of a version without such layers.
    if promised is None or args.get("mtp_num_layers", 1):
        return []
    key, number = promised
    layers = "1 MTP layer" if number == 1 else f"{number} MTP layers"
    return [
        Finding.of(
            codes.MISSING_PART,
            f"--config promises {layers} ({key}), but the run built none: no file holds any of their tensors",
            file=file,
            expected=f"mtp_num_layers {number}",
            got="none in the checkpoint's arguments",
            help=f"convert a save of a run that has them; if they were left out on purpose, set {key} to 0 "
            "in the config",
        )
    ]


def _contradict_tie(file: str | None) -> Finding:
    """Build the finding for a config that ties a head whose weights are stored separately."""
    return Finding.of(
        codes.CONFIG_DISAGREES,
        "--config ties the head to the embedding, but the checkpoint stores separate weights for the two",
        file=file,
        expected="tie_word_embeddings false in --config",
        got=f"args.{megatron.UNTIED} true in the checkpoint",
        help="pass the config of this model, or leave out --config",
    )


def mixture(args: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True for an MoE model; without arguments, the tensor names decide."""
    return bool(args.get("num_experts")) or any(".mlp.experts." in name for name in names)


#: Arguments that change the arrangement of rows, or the layers, so that the table does not apply.
_UNREAD = (
    "moe_latent_size",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "mtp_use_repeated_layer",
)
#: Weights of gated delta nets that torch_dist stores in parts.
_DELTA_PARTS = ("self_attention.in_proj.weight", "self_attention.conv1d.weight")
#: A weight of every gated delta net.
_DELTA_DECAY = ".self_attention.A_log"
#: Spellings of the norm for the latent of keys and values.
_LATENT_NORMS = ("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight")


def _has_dense_layers(args: Mapping[str, Any]) -> bool:
    every = args.get("moe_layer_freq", 1)
    return every not in (None, 1) and not (isinstance(every, list) and all(n == 1 for n in every))


def find_mixed_table(args: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the name of the table for an MoE model's numbered layers, which may differ.

    None for a model whose layers are all alike, and for one without such a table.
    """
    if megatron.is_delta(args):
        return megatron_sizes.DELTA_TABLE if find_lack_of_delta(args, names) is None else None
    if any(args.get(word) for word in _UNREAD) or megatron_sizes.list_layers(args) is None:
        return None
    if not args.get("swiglu") or not mixture(args, names):
        return None
    latent = bool(args.get("multi_latent_attention"))
    # Latents without norms (no qk_layernorm) are another model.
    if latent and not any(name.endswith(_LATENT_NORMS) for name in names):
        return None
    words = ("moe_shared_expert_intermediate_size", "mtp_num_layers")
    differs = _has_dense_layers(args) or any(args.get(word) for word in words)
    return megatron_sizes.MIXED_TABLE if differs or latent else None


def find_lack_of_delta(args: Mapping[str, Any], names: Collection[str]) -> Lack | None:
    """Find the first argument that the table for gated delta nets and output gates does not support.

    None for a model that the table describes, and for one without delta nets and output gates.
    """
    if not megatron.is_delta(args):
        return None
    variant = args.get("experimental_attention_variant")
    has_delta = variant == megatron_sizes.DELTA_NET or any(name.endswith(_DELTA_DECAY) for name in names)
    layers, delta = megatron_sizes.list_layers(args), megatron_sizes.list_delta_layers(args)
    one_for_each = "one number for each of num_layers"
    checks: list[tuple[str, str, bool]] = [
        (
            "experimental_attention_variant",
            megatron_sizes.DELTA_NET,
            variant == (megatron_sizes.DELTA_NET if has_delta else None),
        ),
        ("attention_output_gate", "True", bool(args.get("attention_output_gate"))),
        ("apply_layernorm_1p", "True", bool(args.get("apply_layernorm_1p"))),
        ("swiglu", "True", bool(args.get("swiglu"))),
        ("multi_latent_attention", "False", not args.get("multi_latent_attention")),
        ("moe_layer_freq", one_for_each, layers is not None),
        ("linear_attention_freq", one_for_each, variant is None or bool(delta)),
        *((word, "None", not args.get(word)) for word in _UNREAD),
    ]
    found = next(((key, expected) for key, expected, fits in checks if not fits), None)
    if found is None:
        return None
    if not has_delta:
        return Lack("attention_output_gate", "False", "True")
    return Lack(*found, str(args.get(found[0]))[:80])


def beyond(args: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Find the first argument of an MoE model that the tables do not support.

    Returns the argument, the value that it must have, and its value.
    """
    reasons = [
        ("moe_layer_freq", "1: experts in every layer", _has_dense_layers(args)),
        (
            "moe_shared_expert_intermediate_size",
            "None: no shared experts",
            args.get("moe_shared_expert_intermediate_size"),
        ),
        ("moe_latent_size", "None: experts of the hidden size", args.get("moe_latent_size")),
        (
            "moe_mlp_glu_interleave_size",
            "None: all gates before all other rows",
            args.get("moe_mlp_glu_interleave_size"),
        ),
        (
            "moe_shared_expert_glu_interleave_size",
            "None: all gates before all other rows",
            args.get("moe_shared_expert_glu_interleave_size"),
        ),
        ("mtp_num_layers", "None: no MTP layers", args.get("mtp_num_layers")),
    ]
    return next(((name, expected, str(args[name])[:80]) for name, expected, got in reasons if got), None)


def _find_family(layout: str | None, *, moe: bool, latent: bool, sinks: bool) -> str:
    """Return the family of models to which the tensors belong."""
    if layout == megatron_sizes.DELTA_TABLE:
        return "qwen3_next" if moe else "llama"
    if moe and sinks:
        return "gpt_oss"
    return "deepseek_v3" if latent else "mixtral" if moe else "llama"


@dataclass(frozen=True)
class Unnamed:
    """Megatron-LM's dialect for models beyond its tables; reading such a model reports the unsupported
    setting.
    """

    lack: Lack
    name: str = megatron.DIALECT.name

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model that the arguments describe, with the setting that no other framework supports."""
        model = megatron.DIALECT.read(values, evidence)
        return replace(model, others=(*model.others, self.lack))


def find_required_class(options: Options) -> str | None:
    """Return the ``model_type`` that ``--config`` states; None if it states none."""
    config = _find_config_of_text(options) or {}
    model_type = config.get("model_type") if is_config_json(config) else None
    if not isinstance(model_type, str):
        return None
    classes, of_text = tables.classes(), f"{model_type}_text"
    return of_text if model_type not in classes and of_text in classes else model_type


def describe(
    source: Source,
    args: dict[str, Any],
    names: set[str],
    lacking: Sequence[Lack] = (),
    required_class: str | None = None,
) -> None:
    """Set the declaration's axes and facts: sizes from the arguments, facts from names.

    The sizes are compared with the tensors.

    Args:
        source: the declaration.
        args: the run's arguments.
        names: names of the tensors.
        lacking: properties of the model for which there is no argument.
        required_class: the transformers class that ``--config`` names.
    """
    layout = source.binding.layout
    moe, mixed = mixture(args, names), layout in megatron_sizes.MIXED_TABLES
    latent = mixed and bool(args.get("multi_latent_attention"))
    source.binding.axes = megatron_sizes.axes_of_mixed(args) if mixed else megatron_sizes.axes_of(args, moe)
    sinks = args.get(megatron_heads.SOFTMAX) == megatron_heads.LEARNABLE
    sinks = sinks or any(name.endswith("self_attention.core_attention.softmax_offset") for name in names)
    source.model = Description(
        _find_family(layout, moe=moe, latent=latent, sinks=sinks),
        dict(args),
        dialect=Unnamed(lacking[0]) if lacking else megatron.Megatron(required_class),
    )
    degrees = {dimension: megatron_sizes.size(args, key) for dimension, key in _DEGREES.items()}
    source.binding.other_degrees = {
        dimension: degree for dimension, degree in degrees.items() if degree is not None
    }

    def has(end: str) -> bool:
        return any(name.endswith(end) for name in names)

    def states(key: str) -> bool:
        return bool(args.get(key))

    untied = args.get(megatron.UNTIED)
    head = has("output_layer.weight")
    tied = not untied if isinstance(untied, bool) else not head
    source.binding.facts = {
        "tied": tied,
        # With tied embeddings the last of several stages has a copy of them.
        "output_layer": head or not tied,
        "split_gate": False,
        # What the arguments promise and the files lack is missing.
        "qkv_bias": has("self_attention.linear_qkv.bias")
        or states("add_qkv_bias")
        or states("add_bias_linear"),
        "linear_bias": has("self_attention.linear_proj.bias")
        or has("mlp.linear_fc2.bias")
        or states("add_bias_linear"),
        "qk_norm": not latent and (has("self_attention.q_layernorm.weight") or states("qk_layernorm")),
        "moe": moe,
        "mla": latent,
        "q_lora": latent and args.get("q_lora_rank") is not None,
        "indexed": has("core_attention.indexer.linear_wq_b.weight") or megatron_sizes.is_indexed(args),
        "sinks": sinks,
        # Versions that state the kind of softmax have a bias here, too, where other layers have one.
        "router_bias": has("mlp.router.bias")
        or (moe and states("add_bias_linear") and args.get(megatron_heads.SOFTMAX) is not None),
        "router_correction": has("mlp.router.expert_bias") or states("moe_router_enable_expert_bias"),
        "shared_experts": has("mlp.shared_experts.linear_fc2.weight")
        or states("moe_shared_expert_intermediate_size"),
        "shared_gate": has("mlp.shared_experts.gate_weight") or states("moe_shared_expert_gate"),
        "experts_sequential": any(".mlp.experts.local_experts." in name for name in names),
        "experts_grouped": any(".mlp.experts.linear_fc2.weight" in name for name in names),
        "experts_flat": has(".mlp.experts.weight2"),
        "experts_stacked": has(".mlp.experts.experts.linear_fc2.weight"),
        "split_delta": any(name.rpartition(".")[0].endswith(_DELTA_PARTS) for name in names),
    }
    if mixed and layout is not None:
        experts, dense = megatron_sizes.list_layers(args) or ([], [])
        if not moe:
            experts, dense = [], sorted([*experts, *dense])
        # By the names of all tables that such a model is led to.
        main = sorted([*experts, *dense])
        further = list(range(len(main), len(main) + megatron_sizes.count_further_layers(args)))
        sets = {
            "main": main,
            "main_moe": experts,
            "moe": [*experts, *further],
            "dense": dense,
            "mtp": further,
        }
        if layout == megatron_sizes.DELTA_TABLE:
            delta = megatron_sizes.list_delta_layers(args)
            heads = [layer for layer in main if layer not in delta]
            sets |= {"delta": delta, "main_full": heads, "full": [*heads, *further]}
        source.binding.sets = {name: ("L", layers) for name, layers in sets.items()}
    layers = source.binding.axes.get("L", 0)
    if source.model.family == "gpt_oss" and layers <= megatron_sizes.MOST_LAYERS:
        # The tables of other frameworks name its layers by a cycle of two.
        for first in range(2):
            source.binding.sets[f"cycle_{first}"] = ("L", list(range(first, layers, 2)))
    if (gated := megatron_heads.is_gated(args)) is not None:
        source.binding.facts["gated"] = gated
