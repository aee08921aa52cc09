"""Classes of a ``model_type``, from a table's section ``[model.MODEL_TYPE]``: the class of transformers, what
it computes, and the keys of its ``config.json``. Conversions between frameworks need it; see
``docs/layouts.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core import Table
from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError
from ..common.records import dataclass, field

#: Projections that may have a bias, in the order in which a model tells them: queries, keys and values;
#: attention's output; the first projections of the MLP; its output.
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
    )
)
#: Kinds of attention: heads, or groups of them, with keys and values of their own; keys and values from one
#: latent (MLA); gated delta nets, which carry a state along instead.
ATTENTIONS = ("heads", "latent", "delta")
#: In which layers a window is: in all; in those that the config names; in those of the table's set
#: ``windowed``; or in some, and nothing tells which.
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


#: What an entry of a section must be, in words and as a test.
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
#: Those that every section has.
_NEEDED = ("kind", "architecture", "keys")


@dataclass(frozen=True)
class ModelClass:
    """A checked section of a model class."""

    model_type: str
    #: The table that has it, and its family.
    layout: str
    family: str
    #: As messages call it, e.g. ``Llama``.
    kind: str
    architecture: str
    #: Those of ``KEYS`` that its config has.
    keys: Sequence[str]
    #: Keys that its config has under another name: one of ``KEYS`` by that name.
    own_keys: Mapping[str, str] = field(default_factory=dict)
    #: Of the classes that compute a model, the one with the lowest number is written; None for one that is
    #: only read.
    order: int | None = None
    norm: str = "RMSNorm"
    norm_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    #: False where each head of queries has keys and values of its own.
    grouped: bool = True
    #: The kinds of attention of its layers.
    attentions: Sequence[str] = ("heads",)
    #: A gate, computed together with the queries, scales the heads' output.
    output_gate: bool = False
    #: Each head has a sink: a number that its softmax counts as one more score.
    sinks: bool = False
    #: An indexer chooses the tokens that attention sees.
    indexed: bool = False
    #: The experts of a layer are written as one tensor, as the hub has them.
    stacked: bool = False
    #: How the router of a mixture scores experts.
    scores: str = "softmax"
    #: The router adds a bias to its scores.
    router_bias: bool = False
    #: The function of its MLPs, whatever a config says; None where the config says it.
    activation: str | None = None
    #: Each set of biases that it may have.
    biases: Sequence[Sequence[str]] = ((),)
    #: The layers that see a window only; None where attention takes no notice of one.
    window: str | None = None
    #: Kinds of scaled rotary embeddings; None for all.
    scalings: Sequence[str] | None = None
    #: What a config means that leaves keys out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: What is written besides, whatever the model is.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Keys that are written as null where nothing states them, since the class has other defaults.
    null: Sequence[str] = ()
    #: Keys that a config may state with these values alone: with others it is another computation.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    #: The table of its mixtures with dense layers among the others; None where it has one for both, or has no
    #: such models.
    dense_layout: str | None = None

    @property
    def latent(self) -> bool:
        """True for keys and values from a latent."""
        return "latent" in self.attentions

    @property
    def experts(self) -> bool:
        """True for a mixture of experts."""
        return self.having("num_experts_per_tok")

    def having(self, *keys: str) -> bool:
        """Return True if the class's config has one of these keys."""
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
