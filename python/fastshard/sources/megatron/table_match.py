"""The choice of a table for the tensors of a torch_dist checkpoint. Without a table, they are merged as
described in ``.metadata``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..._core import Rule, Table
from ...common.records import replace
from ...common.regex import compile_when_used
from ...layouts import tables
from ...layouts.declaration import Source
from ...models import megatron_sizes
from ...models.model import Lack
from . import arguments

#: Layers that may differ are numbered within the full model. source: transformer_block.py
#: (non_homogeneous_layers)
_LAYER = compile_when_used(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
#: Tensors in every block of the tables, by their spellings.
_BLOCK = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("self_attention.linear_qkv.weight",),
    ("self_attention.linear_proj.weight",),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)
_DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
_ROUTER = "mlp.router.weight"
_EXPERTS = "mlp.experts."
_ENDS = (
    ("embedding.word_embeddings.weight",),
    ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
)
#: Tensors that may have one row per token, and their moments. source: megatron/core/models
#: (LanguageModelEmbedding, output_layer, lm_head)
_WORDS = compile_when_used(
    r"(?:^|\.)(?:word_embeddings\.weight|output_layer\.(?:weight|bias))(?:\.[a-z_]+)?$"
)
#: Axes that shapes alone do not determine.
_HEADS = {"g": "num_query_groups", "r": "num_attention_heads", "d": "kv_channels"}
#: Biases that a table has in all such layers or in none of them.
_TOGETHER = (
    (
        "self_attention.linear_proj.bias",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.bias",
        "mlp.experts.experts.linear_fc1.bias",
        "mlp.experts.experts.linear_fc2.bias",
    ),
)


def is_numbered(names: Collection[str]) -> bool:
    """Return True if layers are stored separately, not stacked."""
    return any((match := _LAYER.match(name)) and match[1] for name in names)


def find_mixed_table(shapes: Mapping[str, list[int]], args: Mapping[str, Any]) -> str | None:
    """Return the name of the table for layers that differ, if it has a rule for each weight."""
    name = arguments.find_mixed_table(args, shapes)
    if name is None:
        return None
    table = tables.table(name)
    return name if all(table.rule_of(tensor) is not None for tensor in shapes) else None


def unnamed(
    table: Table,
    shapes: Mapping[str, list[int]],
    axes: Mapping[str, int],
    facts: Mapping[str, bool],
    args: Mapping[str, Any],
) -> Lack | None:
    """Find a part of a model that the table does not describe; None if the table fits the model.

    Args:
        table: the table of Megatron-LM's blocks.
        shapes: shapes of the full weights, by name.
        axes: extents that the arguments state.
        facts: facts of the model.
        args: the run's arguments.
    """
    if (lack := arguments.find_lack_of_delta(args, shapes)) is not None:
        return lack
    for name in shapes:
        if table.rule_of(name) is None:
            return Lack("tensor", "one that Llama or Mixtral has", name)
    if table.name in megatron_sizes.MIXED_TABLES:
        # The sets of layers state which tensors each has.
        return None
    layers: dict[str | None, set[str]] = {}
    for name in shapes:
        if match := _LAYER.match(name):
            layers.setdefault(match[1], set()).add(match[2])
    moe = facts["moe"]
    needed = [*_BLOCK, *((name,) for name in ((_ROUTER,) if moe else _DENSE))]
    for number, present in layers.items():
        first = next(iter(layers.values()))
        where = "" if number is None else f" in layer {number}"
        for names in needed:
            if not present.intersection(names):
                return Lack("set of tensors", f"{names[0]}{where}", "none")
        odd = sorted(present ^ first) or sorted(present.intersection(_DENSE) if moe else ())
        if moe and not any(name.startswith(_EXPERTS) for name in present):
            return Lack("set of tensors", f"experts{where}", "none")
        for together in _TOGETHER:
            biases = {name for name in together if name.removesuffix("bias") + "weight" in present}
            if facts["linear_bias"] and not biases <= present:
                odd += sorted(biases - present)
            elif not facts["linear_bias"]:
                odd += sorted(biases & present)
        if odd:
            return Lack(
                "set of tensors",
                f"the same in all layers, {odd[0]} in each or in none",
                f"one{where or ' only'}",
            )
    for names in _ENDS:
        if not shapes.keys() & set(names):
            return Lack("set of tensors", names[0], "none")
    if missing := [word for axis, word in _HEADS.items() if axis not in axes]:
        # Rows of queries, keys and values tell of no heads.
        return Lack("set of arguments", ", ".join(missing), "none")
    # A shape fits one of two rules, by what the arguments say of the MLP.
    applying = table.with_rules([rule for rule in table.rules if _applies(rule, facts.get("gated"))])
    if applying.misfits({name: tuple(shape) for name, shape in shapes.items()}, dict(axes)):
        for name, shape in shapes.items():
            expected = applying.shape(name, dict(axes)) or []
            if len(expected) != len(shape) or any(
                a not in (None, b) for a, b in zip(expected, shape, strict=True)
            ):
                return Lack(f"shape of {name}", str(expected), str(shape))
        return Lack("set of shapes", "one that a Llama or Mixtral has", "another")
    found = arguments.beyond(args) if facts["moe"] else None
    return Lack(*found) if found else None


def _applies(rule: Rule, gated: bool | None) -> bool:
    """Return False for a rule whose first projection is gated if the model's is not, and vice versa."""
    if "linear_fc1" not in rule.name or rule.dimensions is None or ".layer_norm_" in rule.name:
        return True
    return gated is None or any("gate:" in dimension for dimension in rule.dimensions) == gated


def leave_unnamed(
    source: Source, lack: Lack, shapes: Mapping[str, list[int]], args: Mapping[str, Any]
) -> None:
    """Declare the tensors as they are stored; ``.metadata`` states all shapes.

    Vocabulary rows are declared too.
    """
    source.binding.layout, source.binding.pass_unknown, source.binding.axes = None, True, {}
    source.binding.table = Table.of("megatron.any", "V", {}, list(_words(shapes, args)))
    source.model = replace(source.model, dialect=arguments.Unnamed(lack))


def _words(shapes: Mapping[str, list[int]], args: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield rules for tensors that have one row per token of the padded vocabulary."""
    word_shapes = {name: shape for name, shape in shapes.items() if shape and _WORDS.search(name)}
    embeddings = [shape[0] for name, shape in word_shapes.items() if name.endswith("word_embeddings.weight")]
    padded_size = megatron_sizes.size(args, "padded_vocab_size")
    rows = next(
        iter(
            [
                *embeddings,
                *([padded_size] if padded_size else []),
                *(shape[0] for shape in word_shapes.values()),
            ]
        ),
        None,
    )
    for n, (name, shape) in enumerate(word_shapes.items()):
        if shape[0] == rows:
            others = [f"n{n}d{d}" for d in range(1, len(shape))]
            yield Rule.literal(name, f"[{', '.join(['V~P', *others])}]", name)
