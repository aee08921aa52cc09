"""The places of an adapter's modules in its base. An adapter uses names in memory, and a base often uses the
names in its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..._core import Table
from ...common import codes
from ...common.errors import FastshardError
from ...layouts.prefix_moves import moved
from .adapter_config import Config
from .tensor_names import AdapterNames, Module

Shapes = Mapping[str, list[int]]


def place(adapter: AdapterNames, config: Config, base: Shapes, factors: Shapes, table: Table | None) -> None:
    """Rename an adapter's modules and tensors to the base's names.

    Names that both have stay unchanged. The table or prefixes determine the others.

    Args:
        adapter: its tensors by its own names.
        config: its config.
        base: shapes of the base's tensors, by the model's own names.
        factors: shapes of the adapter's tensors, by the stored names.
        table: the base's table, if it has one.

    Raises:
        FastshardError: ``FS106`` if several prefixes fit.
    """
    modules = {f"{module.name}.weight": module for module in adapter.modules.values()}
    names = [
        name for name, module in modules.items() if not config.parameters_of(module.name) or name in base
    ]
    called = _by_table([*names, *adapter.whole], base, table)
    mine = [called.get(name, name) for name in (*names, *adapter.whole)]

    def fits(name: str, other: str) -> bool:
        if name in adapter.whole:
            return factors[adapter.whole[name]] == base[other]
        return _fits(modules[name], factors, base[other])

    way = moved(mine, base.keys(), fits)
    if way.uncertain:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the adapter's names match the base in several ways",
            file=config.path,
            got=way.readings,
            help="pass a base with the adapter's names: one that was saved from the same class",
        )
    called |= way.names
    for name, module in modules.items():
        module.at = called.get(name, way.of(name)).removesuffix(".weight")
    adapter.whole = {called.get(name, name): stored for name, stored in adapter.whole.items()}


def _by_table(names: list[str], base: Shapes, table: Table | None) -> dict[str, str]:
    """Map names that the base lacks to its tensors for the same table rule and indices."""
    if table is None:
        return {}

    def same(name: str) -> tuple[str, ...] | None:
        rule = table.rule_of(name)
        return None if rule is None else (rule.name, *(part for part in name.split(".") if part.isdecimal()))

    lacking = [(name, key) for name in names if name not in base and (key := same(name)) is not None]
    if not lacking:
        return {}
    by_key = {key: name for name in base if (key := same(name)) is not None}
    return {name: by_key[key] for name, key in lacking if key in by_key}


def _fits(module: Module, factors: Shapes, shape: list[int]) -> bool:
    """Return True if a module's factors fit a tensor of this shape."""
    extents = {kind: factors[name] for kind, name in module.factors.items()}
    pairs = [("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")]
    sizes = {
        (extents[b][0], prod(extents[a][1:]))
        for a, b in pairs
        if a in extents and b in extents and extents[b]
    }
    tokens = extents.get("tokens")
    if tokens is not None and (len(shape) != 2 or tokens[-1:] != shape[-1:]):
        return False
    if len(shape) < 2:
        return False
    outputs, inputs = shape[0], prod(shape[1:])
    return all(size in ((outputs, inputs), (inputs, outputs)) for size in sizes)
