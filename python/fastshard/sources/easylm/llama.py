"""EasyLM's LLaMA: the recognition of a stream's model by its names, and requirements for its config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common import codes
from ...common.config_text import shown
from ...common.errors import Finding
from ...layouts import tables
from ...layouts.declaration import Description, Source
from ...models import config_json, huggingface
from ..train_states import RefusedModel, bind_config, bind_model, take_unknown

_NAME = "EasyLM"
_LAYOUT, _OF_CONFIG, _MODEL_TYPE = "easylm.llama", "hf.llama", "llama"
#: Prefixes of the model's names: in a train state, in its parameters, and in a save of parameters alone by
#: newer versions.
#: source: EasyLM checkpoint.py (StreamingCheckpointer.save_all)
_ROOTS = ("params.params.", "params.", "")
#: The first module of every EasyLM model.
_MODULE = "transformer."
_HEAD = "lm_head.kernel"
_EXPORT = (
    "convert the model to Hugging Face with EasyLM (EasyLM.models.llama.convert_easylm_to_hf for a LLaMA), "
    "and pass the result"
)


def describe(source: Source, names: Sequence[str], config: dict[str, Any] | None, path: Path | None) -> None:
    """Declare table, axes and facts for the model in a stream; a model without a table gets none.

    Args:
        source: the declaration.
        names: names of all arrays.
        config: a Hugging Face ``config.json``; streams state only the shapes of a model.
        path: its file.

    Raises:
        FastshardError: ``FS211`` for values of the config that have the wrong type.
    """
    root = next((r for r in _ROOTS if any(name.startswith(r + _MODULE) for name in names)), "")
    own = {name.removeprefix(root) for name in names if name.startswith(root)}
    beside = tuple(name for name in names if not name.startswith(root))
    if not root:
        # Keys of a train state lie beside the model's here, if they are there at all.
        beside = tuple(sorted(name for name in own if name.startswith("opt_state.") or name == "step"))
        own -= set(beside)
    table = tables.table(_LAYOUT)
    label = str(path) if path is not None else None
    if strange := sorted(name for name in own if table.rule_of(name) is None):
        take_unknown(source, config, _NAME, root + strange[0], "a LLaMA", _EXPORT)
        return
    refused = _find_unknown(config, label) or _find_contradiction(config, own, root, label)
    if refused is not None or config is None:
        # Without the heads nothing says which rows of a weight are a pair's: names and bytes alone are known.
        dialect = RefusedModel(_NAME, refused) if refused is not None else None
        source.model = Description(_MODEL_TYPE, config, path, dialect=dialect)
        source.findings += [refused] if refused is not None and refused.is_a("whole_checkpoint") else []
        return
    bind_model(source, table, root, beside, {})
    source.model = Description(_MODEL_TYPE, config, path, dialect=huggingface.DIALECT, spelling=_NAME)
    bind_config(source, *config_json.described(config, label, own, _LAYOUT))


def _find_unknown(config: dict[str, Any] | None, label: str | None) -> Finding | None:
    """Report unknown properties of the model, or a config for another kind of model."""
    if config is None:
        return Finding.of(
            codes.FACT_UNKNOWN,
            "a stream of EasyLM does not state what its model computes (heads, rope_theta, eps)",
            help="pass the config.json of the model in Hugging Face format; or merge, which keeps the names",
            run=["--config FILE", "fastshard merge CKPT OUT"],
        )
    kind = config.get("model_type")
    if kind == _MODEL_TYPE and config_json.layout_of(config, label) == _OF_CONFIG:
        return None
    return Finding.of(
        codes.UNSUPPORTED,
        f"there is no layout for a {shown(kind)} of EasyLM",
        file=label,
        expected="model_type llama",
        got=shown(kind),
        help="pass the config.json of the LLaMA that the stream holds",
        run=["--config FILE"],
    )


def _find_contradiction(
    config: dict[str, Any] | None, own: set[str], root: str, label: str | None
) -> Finding | None:
    """Report an output layer that the config's model does not have; EasyLM's always has one."""
    if config is None or not config.get("tie_word_embeddings") or _HEAD not in own:
        return None
    return Finding.of(
        codes.CONFIG_DISAGREES,
        "the config is for another model: a model with tie_word_embeddings has no such tensor",
        file=label or "the config",
        tensor=root + _HEAD,
        help="pass the config of this checkpoint",
        run=["--config FILE"],
    )
