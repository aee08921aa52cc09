"""Levanter's train states: the model that their names show, and its table.

source: Levanter trainer_state.py (TrainerState), checkpoint.py (save_checkpoint),
    models/{llama,qwen,mistral}.py; haliax nn/scan.py (Stacked, BlockSeq)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .._core import Table
from ..common import codes
from ..common.config_text import shown
from ..common.errors import Finding
from ..common.regex import compile_when_used
from ..layouts import tables
from ..layouts.declaration import Description, Source
from ..layouts.jax_train_states import RANDOM
from ..layouts.maxtext_names import Arrays
from ..models import config_json, huggingface
from .train_states import RefusedModel, bind_config, bind_model, take_unknown

_LAYOUT = "levanter.llama"
#: Hugging Face tables whose models Levanter computes with its Llama modules.
_OF_CONFIG = ("hf.llama",)
_ROOT = "model/"
#: An array that Levanter's language models have.
_EMBEDDING = "embeddings/token_embeddings/weight"
#: Other contents of a train state. source: Levanter trainer_state.py (TrainerState)
_STATE = ("opt_state/", "model_averaging/", "training_key", "step")
_REASONS = {"training_key": RANDOM}
#: Prefix of separate layers, and prefix of layers that a scan stacks along the first axis.
_APART, _STACKED = "transformer/layers/blocks/{L}/", "transformer/layers/stacked/"
#: Facts of the table, each with the tensors that show it.
_SHOWN = {
    "attention_bias": "self_attn/q_proj/bias",
    "out_bias": "self_attn/o_proj/bias",
    "qk_norm": "self_attn/q_norm/weight",
    "mlp_bias": "mlp/up_proj/bias",
}
#: A moment of Adam and related optimizers.
_MOMENT = compile_when_used(r"^(opt_state/(?:.+/)?)(mu|nu)/(.+)$")
_OF_LLAMA = "a model of the Llama kind (llama, mistral, qwen2, qwen3)"
_EXPORT = (
    "convert the model to Hugging Face with Levanter's own tool (levanter.main.export_lm_to_hf), and pass "
    "the result"
)


def is_train_state(names: Collection[str]) -> bool:
    """Return True if the names are those of a Levanter train state or its model."""
    return any(name in names for name in (_EMBEDDING, _ROOT + _EMBEDDING))


def is_state_of_step(names: Collection[str]) -> bool:
    """Return True if the names are those of a train state, which only a step contains; False for a model
    alone.
    """
    return _ROOT + _EMBEDDING in names


def find_state(names: Collection[str]) -> frozenset[str]:
    """Return the names of a train state's arrays that are not weights."""
    return frozenset(name for name in names if name.startswith(_STATE))


def find_lost_model(names: Collection[str], where: str) -> Finding | None:
    """Report a step that contains the state stored next to a model, but no model."""
    if not names or not all(name.startswith(_STATE) for name in names):
        return None
    return Finding.of(
        codes.MISSING_FILE,
        "the model is missing: there is only the optimizer state and similar data of a Levanter step",
        file=where,
        expected="the directory model next to it",
        got=", ".join(sorted({name.partition("/")[0] for name in names})),
        help="copy the directory model from the node that saved the step, or choose another step with --step",
    )


def find_lost_moments(names: Collection[str], where: str) -> list[Finding]:
    """Report weights for which only one of Adam's two moments exists.

    source: optax _src/transform.py (scale_by_adam): both have the same tree structure as the parameters
    """
    slots: dict[str, dict[str, set[str]]] = {}
    for name in names:
        if match := _MOMENT.match(name):
            slots.setdefault(match[1], {"mu": set(), "nu": set()})[match[2]].add(match[3])
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            "this moment of the optimizer is missing, although the other moment of the same weight exists",
            severity="warning",
            file=where,
            tensor=f"{inner}{lacking}/{name}",
            help="copy it from the node that saved the step: a run cannot continue without it",
        )
        for inner, of in sorted(slots.items())
        if of["mu"] and of["nu"]
        for name in sorted(of["mu"] ^ of["nu"])
        for lacking in [slot for slot in ("mu", "nu") if name not in of[slot]]
    ]


def describe(source: Source, arrays: Arrays, config: dict[str, Any] | None, path: Path | None) -> None:
    """Declare table, axes and facts for a Levanter step; a model without a table gets none.

    Args:
        source: the declaration.
        arrays: dtype and shape of each array, by name.
        config: a Hugging Face ``config.json``; steps state only the shapes of a model.
        path: the file that contains it.

    Raises:
        FastshardError: ``FS211`` for values of the config that have the wrong type.
    """
    source.framework, source.binding.pass_unknown = "Levanter", True
    root = _ROOT if any(name.startswith(_ROOT) for name in arrays) else ""
    beside = tuple(name for name in arrays if root and not name.startswith(root))
    own = {name.removeprefix(root) for name in arrays if name.startswith(root)}
    table = _table(tables.table(_LAYOUT), is_stacked=any(name.startswith(_STACKED) for name in own))
    strange = sorted(name for name in own if table.rule_of(name) is None)
    if strange:
        take_unknown(source, config, "Levanter", root + strange[0], _OF_LLAMA, _EXPORT)
        return
    label = str(path) if path is not None else None
    source.model = _describe_model(source, config, path, label)
    bind_model(source, table, root, beside, _REASONS)
    if source.model.spelling is None or config is None:
        return
    axes, facts, sets = config_json.described(config, label, own, _LAYOUT)
    if differing := _find_contradictions(config, facts, own, root, label or "the config"):
        source.findings += differing
        source.model = Description("llama", config, path, dialect=RefusedModel("Levanter", differing[0]))
        return
    # Levanter pads the vocabulary so that it divides over the devices (round_axis_for_partitioning).
    axes.pop("P", None)
    bind_config(source, axes, facts, sets)


def _table(table: Table, *, is_stacked: bool) -> Table:
    """Return the table for the stored form of the layers."""
    if not is_stacked:
        return table
    rules = [
        rule.stacked("L", 0).renamed(rule.name.replace(_APART, _STACKED)) if _APART in rule.name else rule
        for rule in table.rules
    ]
    return table.with_rules(rules)


def _describe_model(
    source: Source, config: dict[str, Any] | None, path: Path | None, label: str | None
) -> Description:
    """Return a description of the model.

    Names and shapes do not distinguish Llama from Gemma, and do not show the base of rotary embeddings.
    """
    if config is None:
        finding = Finding.of(
            codes.FACT_UNKNOWN,
            "a Levanter step does not state what its model computes (model_type, rope_theta, eps)",
            help="pass the config.json of the model that training started from, or of one of its exports; "
            "or merge, which keeps the names",
            run=["--config FILE", "fastshard merge CKPT OUT"],
        )
        return Description("llama", dialect=RefusedModel("Levanter", finding))
    if config_json.layout_of(config, label) not in _OF_CONFIG:
        finding = Finding.of(
            codes.UNSUPPORTED,
            f"there is no layout for a {shown(config.get('model_type'))} of Levanter",
            file=label,
            expected=_OF_LLAMA,
            got=shown(config.get("model_type")),
            help=_EXPORT,
        )
        return Description("llama", config, path, dialect=RefusedModel("Levanter", finding))
    return Description("llama", config, path, dialect=huggingface.DIALECT, spelling="Levanter")


def _find_contradictions(
    config: dict[str, Any], facts: Mapping[str, bool], names: Collection[str], root: str, where: str
) -> list[Finding]:
    """Report tensors that the config's model does not have."""
    found = {
        fact: next((n for n in sorted(names) if n.endswith(f"/{end}")), None) for fact, end in _SHOWN.items()
    }
    if facts.get("tied") and "lm_head/weight" in names:
        found["untied"] = "lm_head/weight"
    return [
        Finding.of(
            codes.CONFIG_DISAGREES,
            f"the config is for another model: a {shown(config.get('model_type'))} with its settings has no "
            "such tensor",
            file=where,
            tensor=root + name,
            help="pass the config of this checkpoint",
            run=["--config FILE"],
        )
        for fact, name in found.items()
        if name is not None and not facts.get(fact)
    ]
