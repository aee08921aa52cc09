"""Paxml's GPT-3 from MLPerf, and the table for its names.

source: paxml train_states.py, checkpoint_paths.py; praxis optimizer_prefix_vectorization.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.regex import compile_when_used
from ..layouts import tables
from ..layouts.declaration import Description, Optimizer, Source
from ..layouts.jax_train_states import Names, Rules
from ..layouts.maxtext_names import Arrays
from ..models import maxtext, maxtext_sizes

ROOT = "mdl_vars.params.lm."
_STACKED = "transformer.repeat.sub."
#: Moments are grouped by equal prefixes of their shapes: `p#96#i-1_2` (96 layers stacked, the axis not
#: sharded, state 2 of the optimizer's chain) and `no_prefix_2`.
_MOMENT = compile_when_used(r"^(opt_states_\d+)\.(p#\d+#i-?\d+|no_prefix)_(\d+)\.([mv])\.params\.lm\.(.*)$")
_SLOTS = {"mu": "m", "nu": "v"}


def is_train_state(names: Iterable[str]) -> bool:
    """Return True if the names are those of a Paxml language model's train state."""
    return any(name.startswith(ROOT) for name in names)


def describe(
    source: Source, arrays: Arrays, config: dict[str, Any] | None = None, config_path: str | None = None
) -> None:
    """Declare family, table and axes of a Paxml checkpoint; a model that the table lacks gets none.

    Args:
        source: the declaration.
        arrays: dtype and shape of each array, by name.
        config: MaxText's yml for the same model.
        config_path: its path, for messages.

    Raises:
        FastshardError: ``FS211`` for values of the config that have the wrong type.
    """
    if not is_train_state(arrays):
        return
    source.framework, source.binding.pass_unknown, source.model = "Paxml", True, Description(config=config)
    table = tables.table("paxml.gpt3")
    strange = [name for name in arrays if name.startswith(ROOT) and table.rule_of(name) is None]
    if strange:
        source.findings.append(
            Finding.of(
                codes.UNSUPPORTED,
                "there is no layout for this Paxml model: its tensors can be merged, but not converted to "
                "other layouts",
                severity="note",
                tensor=strange[0],
                expected="GPT-3 as in MLPerf, with repeated layers",
                help="describe its tensors in your own layout",
                run=["--layout FILE.toml"],
            )
        )
        return
    source.binding.layout, source.model = "paxml.gpt3", Description("gpt3", config, dialect=maxtext.DIALECT)
    source.binding.axes = maxtext_sizes.axes_of(config or {}, "gpt3")
    source.index.is_provable = source.index.is_provable or bool(config)
    rules, moments = Rules(table, _names(arrays)), any(_MOMENT.match(name) for name in arrays)
    source.optimizer = Optimizer(moments_named=moments, rules=rules)
    source.binding.table = rules.whole(moments)


def _names(arrays: Arrays) -> Names:
    stored = {(m[4], m[5]): m for name in sorted(arrays) if (m := _MOMENT.match(name))}
    groups: dict[bool, str] = {}
    for (_, inner), match in stored.items():
        groups.setdefault(inner.startswith(_STACKED), _group(match))
    state = tuple(name for name in arrays if name.startswith("opt_states_"))
    chain = next((m[1] for m in stored.values()), "opt_states_0")
    counts = sorted(name for name in state if re.fullmatch(rf"{chain}\.no_prefix_\d+\.count", name))
    count = counts[0] if counts else f"{chain}.no_prefix_0.count"
    scalars = tuple(name for name in state if name != count and not arrays[name][1])
    own = {key: _group(match) for key, match in stored.items()}
    slots = tuple(slot for slot, letter in _SLOTS.items() if any(kind == letter for kind, _ in stored))
    return Names(ROOT, ROOT, partial(_moment, own, groups), count, slots, scalars, state)


def _group(match: re.Match[str]) -> str:
    """Return the name of the group, including the number of layers in it."""
    prefix = re.sub(r"^p#\d+#", "p#{#L}#", match[2])
    return f"{match[1]}.{prefix}_{match[3]}"


def _moment(own: dict[tuple[str, str], str], groups: dict[bool, str], slot: str, inner: str) -> str:
    """Return the name of a moment: in its own group, or in the group of other moments of its kind."""
    stacked = inner.startswith(_STACKED)
    usual = groups.get(stacked, "opt_states_0.p#{#L}#i-1_2" if stacked else "opt_states_0.no_prefix_2")
    return f"{own.get((_SLOTS[slot], inner), usual)}.{_SLOTS[slot]}.params.lm.{inner}"
