"""Classes of a ``model_type``, from a table's section ``[model.MODEL_TYPE]``: the transformers class, what it
computes, and the keys of its ``config.json``. Conversions between frameworks need these; see
``docs/layouts.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core import Table
from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError
from ..common.records import dataclass, field

#: Projections that may have a bias, in the order in which a model lists them: queries, keys and values;
#: attention output; the first MLP projections; MLP output.
PLACES = ("qkv", "out", "mlp", "mlp_out")
#: Keys of ``config.json`` that some classes have and others do not.
KEYS = frozenset(
    (
        "num_key_value_heads",
        "head_dim",
        "layer_norm_eps",
        "rms_norm_eps",
        "rotary_emb_base",
        "rope_theta",
        "rotary_pct",
        "partial_rotary_factor",
        "use_parallel_residual",
        "attention_bias",
        "mlp_bias",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "num_nextn_predict_layers",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_interleave",
        "mlp_only_layers",
        "shared_expert_intermediate_size",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "index_topk",
        "index_n_heads",
        "index_head_dim",
        "use_qk_norm",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope_local_base_freq",
    )
)
#: Kinds of attention: heads, or groups of heads, with separate keys and values; keys and values from one
#: latent (MLA); gated delta nets, which carry a state instead.
ATTENTIONS = ("heads", "latent", "delta")
#: Which layers have a window: all; those that the config names; those of the table's set ``windowed``; or
#: some that nothing identifies.
WINDOWS = ("all", "named", "set", "unknown")
#: Functions by which a router scores experts.
SCORES = ("softmax", "sigmoid")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_biases(value: Any) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(_are_texts(one) and set(one) <= set(PLACES) for one in value)
    )


def _are_attentions(value: Any) -> bool:
    return _are_texts(value) and value != [] and set(value) <= set(ATTENTIONS)


def _are_own_keys(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(key) for key in value) and _are_keys([*value.values()])


def _are_keys(value: Any) -> bool:
    return _are_texts(value) and set(value) <= KEYS


#: Requirements for the entries of a section: the text for messages, and a test.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("a text", _is_text),
    "architecture": ("a text", _is_text),
    "keys": (f"a list of {', '.join(sorted(KEYS))}", _are_keys),
    "own_keys": (f"a table of keys by their own names, each one of {', '.join(sorted(KEYS))}", _are_own_keys),
    "order": ("an integer", _is_number),
    "norm": ("a text", _is_text),
    "norm_bias": ("true or false", _is_flag),
    "gated": ("true or false", _is_flag),
    "qk_norm": ("true or false", _is_flag),
    "grouped": ("true or false", _is_flag),
    "biases": (f"a list of lists of {', '.join(PLACES)}", _are_biases),
    "attentions": (f"a list of {', '.join(ATTENTIONS)}", _are_attentions),
    "output_gate": ("true or false", _is_flag),
    "sinks": ("true or false", _is_flag),
    "indexed": ("true or false", _is_flag),
    "stacked": ("true or false", _is_flag),
    "router_bias": ("true or false", _is_flag),
    "scaled_embedding": ("true or false", _is_flag),
    "norms_after": ("true or false", _is_flag),
    "activation": ("a text", _is_text),
    "scores": (f"one of {', '.join(SCORES)}", lambda value: value in SCORES),
    "window": (f"one of {', '.join(WINDOWS)}", lambda value: value in WINDOWS),
    "scalings": ("a list of texts", _are_texts),
    "defaults": ("a table", _is_table),
    "config": ("a table", _is_table),
    "null": ("a list of texts", _are_texts),
    "fixed": ("a table", _is_table),
    "dense_layout": ("a text", _is_text),
}
#: Entries that every section must have.
_NEEDED = ("kind", "architecture", "keys")


@dataclass(frozen=True)
class ModelClass:
    """A validated section of a model class."""

    model_type: str
    #: The table that contains the section, and the table's family.
    layout: str
    family: str
    #: The class's name in messages, e.g. ``Llama``.
    kind: str
    architecture: str
    #: The keys among ``KEYS`` that its config has.
    keys: Sequence[str]
    #: Keys that its config has under other names: that name -> the key in ``KEYS``.
    own_keys: Mapping[str, str] = field(default_factory=dict)
    #: Rank among the classes that compute the same model: the class with the lowest number is written. None
    #: for a class that is only read.
    order: int | None = None
    norm: str = "RMSNorm"
    norm_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    #: False if each query head has its own keys and values.
    grouped: bool = True
    #: The kinds of attention in its layers.
    attentions: Sequence[str] = ("heads",)
    #: True if a gate, computed together with the queries, scales the heads' output.
    output_gate: bool = False
    #: True if each head has a sink: a number that its softmax counts as one more score.
    sinks: bool = False
    #: True if an indexer chooses the tokens that attention sees.
    indexed: bool = False
    #: True if the experts of a layer are written as one tensor, as on the Hub.
    stacked: bool = False
    #: How the router scores experts.
    scores: str = "softmax"
    #: True if the router adds a bias to its scores.
    router_bias: bool = False
    #: True if embeddings are multiplied by the root of their size.
    scaled_embedding: bool = False
    #: True if there are norms after attention and MLP, besides those before.
    norms_after: bool = False
    #: The MLP activation, whatever the config states; None if the config states it.
    activation: str | None = None
    #: The sets of biases that a model may have.
    biases: Sequence[Sequence[str]] = ((),)
    #: Which layers have a window; None if attention ignores windows.
    window: str | None = None
    #: Supported kinds of rotary scaling; None for all.
    scalings: Sequence[str] | None = None
    #: The values of keys that a config omits.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Values that are also written, for every model.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Keys that are written as null if nothing states them, because the class has other defaults.
    null: Sequence[str] = ()
    #: Keys that a config may state only with these values. Other values change the computation.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    #: The table of its MoE models that also have dense layers; None if it has one table for both, or no such
    #: models.
    dense_layout: str | None = None

    @property
    def latent(self) -> bool:
        """True if keys and values come from a latent."""
        return "latent" in self.attentions

    @property
    def local_rope(self) -> bool:
        """True if layers with a window have their own rotary embedding."""
        return self.having("rope_local_base_freq")

    @property
    def experts(self) -> bool:
        """True for an MoE model."""
        return self.having("num_experts_per_tok")

    def having(self, *keys: str) -> bool:
        """Return True if the class's config has one of the given keys."""
        return not set(keys).isdisjoint({*self.keys, *self.own_keys.values()})


def of_table(table: Table, file: str | None = None) -> dict[str, ModelClass]:
    """Read the classes that a table describes, by ``model_type``.

    Args:
        table: the table.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS210`` for an invalid entry, which the message names.
    """
    return {kind: _read(kind, section, table, file) for kind, section in table.models.items()}


def _read(kind: str, section: Any, table: Table, file: str | None) -> ModelClass:
    # A copy of another table may be for no config, and is used for what it says of tensors.
    if table.model_types and kind not in table.model_types:
        raise _bad(
            table, kind, file, "", f"one of {', '.join(table.model_types)}, which [config] names", kind
        )
    if not isinstance(section, dict):
        raise _bad(table, kind, file, "", "a table", section)
    for name, value in section.items():
        if name not in _CHECKS:
            raise _bad(table, kind, file, "", f"one of {', '.join(_CHECKS)}", name)
        expected, holds = _CHECKS[name]
        if not holds(value):
            raise _bad(table, kind, file, f": {name}", expected, value)
    for name in _NEEDED:
        if name not in section:
            raise _bad(table, kind, file, f": {name}", _CHECKS[name][0], None)
    return ModelClass(model_type=kind, layout=table.name, family=table.family, **section)


def _bad(table: Table, kind: str, file: str | None, entry: str, expected: str, got: Any) -> FastshardError:
    return FastshardError.of(
        codes.BAD_LAYOUT,
        f"layout {table.name}: [model.{kind}]{entry}",
        file=file,
        expected=expected,
        got="nothing" if got is None else shown(got),
        help="see the sections about models in docs/layouts.md",
    )
