"""MaxText train states, of linen and NNX: the model that names and shapes show, and its table.

source: MaxText common/checkpointing.py (names of a train state), layers/decoders.py (scan), flax
    core/axes_scan.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .._core import Table
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..layouts import nnx_names, tables
from ..layouts.declaration import Description, Optimizer, Source
from ..layouts.jax_train_states import Cycle, Rules, place, stack_layers
from ..layouts.maxtext_names import DECLARED, MOMENT, Arrays, names_of
from ..layouts.nnx_names import NnxNames
from ..models import config_json, maxtext, maxtext_delta, maxtext_gemma, maxtext_sizes
from ..models.config_fields import flag, integer
from ..models.model import unstated

#: Families in the order in which they are tried.
FAMILIES = (
    "llama",
    "gpt3",
    "mixtral",
    "qwen_moe",
    "deepseek_v3",
    "gpt_oss",
    "gemma2",
    "gemma3",
    "qwen3_next",
)
#: Possible axes of layers in a scan, likely ones first.
_SCAN_AXES = (1, 0, -1, 2, 3)
#: A stack of layers: of all layers, or of one kind with its own numbers.
_STACKED = re.compile(r"decoder\.(?:[a-z]+_)?layers\.")
#: A tensor in one kind of layer: the kind, and the number if layers are stored separately.
_OF_KIND = re.compile(r"decoder\.([a-z]+)_layers(?:_(\d{1,9}))?\.")
#: A tensor of a layer in a cycle of different layers: the stack's place in the cycle or the layer's number,
#: and the name within the layer.
_OF_CYCLE = re.compile(r"decoder\.(layers\.)?layers?_(\d{1,9})\.(.*)")
#: A tensor of a layer after the last full cycle of a scan, and the layer's number after it.
_OF_REMAINDER = re.compile(r"decoder\.layers_remainder\.layers_(\d{1,9})\.")
#: Names within a layer that only attention with heads has, and names that only a delta net has.
_OF_FULL, _OF_DELTA = "attention.attention.", ("attention.in_proj_", "attention.conv1d.", "attention.A_log")
#: Maximum number of tensors named in findings.
_NAMED = 20


def is_train_state(names: Any) -> bool:
    """Return True if the names are those of a MaxText train state or its parameters."""
    return nnx_names.read(names) is not None


def describe(
    source: Source,
    arrays: Arrays,
    config: dict[str, Any] | None = None,
    config_path: str | None = None,
    scan_layers: bool | None = None,
) -> None:
    """Declare family, table, axes and facts of a MaxText checkpoint; a model without a table gets none.

    Args:
        source: the declaration.
        arrays: dtype and shape of each array, by name.
        config: MaxText's yml or a Hugging Face ``config.json``.
        config_path: its path, for messages.
        scan_layers: the setting in the checkpoint's own metadata.

    Raises:
        FastshardError: ``FS211`` for values of the config that have the wrong type.
    """
    tree = nnx_names.read(arrays)
    if tree is None:
        return
    root = tree.root
    # From here on by the names of linen: the tables speak of these.
    arrays = {name: arrays[stored] for name, stored in tree.stored.items()}
    shapes = {
        name.removeprefix(root): tuple(shape) for name, (_, shape) in arrays.items() if name.startswith(root)
    }
    stacked = any(_STACKED.match(name) or _OF_REMAINDER.match(name) for name in shapes)
    source.framework, source.binding.pass_unknown = "MaxText", True
    source.tensor_findings += _find_repeated(tree)
    if tree.factors and not shapes:
        source.model = Description(config=config, no_table=f"{tree.factors[0]} is a factor of an adapter")
        return
    length, misfit = _find_cycle_length(shapes, config or {})
    # Where nothing shows the cycle, all layers stand for one: names do not depend on it.
    cycle_length = length or _count_numbers(shapes)
    family = _family(source, shapes, stacked, tree, config or {}, cycle_length)
    if family is None:
        source.model = Description(config=config)
        return
    theirs = ("hf.qwen3_next", "hf.qwen3_5") if maxtext.is_delta(family) else (f"hf.{family}",)
    same = config and not maxtext.is_maxtext(config) and config_json.layout_of(config) in theirs
    facts = config_json.axes_and_facts(config)[1] if config and same else None
    source.model = Description(family, config, dialect=maxtext.MaxText(facts))
    source.binding.layout = f"maxtext.{family}"
    source.binding.axes = maxtext_sizes.axes_of(config or {}, family)
    source.index.is_provable = source.index.is_provable or bool(config)
    _facts(source, shapes, config or {}, config_path)
    claims = [("_CHECKPOINT_METADATA", scan_layers)]
    if config and maxtext.is_maxtext(config):
        claims.append((config_path or "the config", flag(config, "scan_layers")))
    for where, claim in claims:
        if claim not in (None, stacked):
            source.findings.append(_contradiction("scan_layers", claim, stacked, where))
    layout = source.binding.layout
    if maxtext.is_delta(family) and length is None:
        # The last layer of each cycle has attention, so a checkpoint without any has lost it.
        misfit = unstated(maxtext_delta.CYCLE, "", "no layer has attention, and it is not stated")
    cycle = maxtext.find_cycle(family, cycle_length)
    if cycle is not None and cycle.remainder is not None and stacked:
        has_stacks = any(map(_STACKED.match, shapes))
        cycle = cycle.of_layers(source.binding.axes.get("L", cycle.length if has_stacks else 0))
    if cycle is not None and misfit:
        source.findings.append(misfit)
    axis, unclear = (
        _scan_axis(layout, shapes, source.binding.axes, config or {}, cycle) if stacked else (None, None)
    )
    table = tables.table(layout)
    if maxtext.is_latent(family):
        _declare_kinds(source, shapes, axis, config or {})
    if cycle is not None:
        _declare_cycle(source, shapes, axis, cycle)
    is_spelled = any(name != stored for name, stored in tree.stored.items())
    spell = tree.spell if is_spelled else None
    names = names_of(root, arrays)
    rules = Rules(table, names, axis, cycle, _find_obstacle(tree) or unclear, spell, tree.random)
    moments = any(MOMENT.match(name) for name in arrays)
    source.optimizer = Optimizer(moments_named=moments, rules=rules)
    if maxtext.is_delta(family):
        _declare_delta_sizes(source, shapes)
    if maxtext.is_gemma(family):
        _declare_divisor(source, shapes, config or {})
    # What is merged keeps every name, and needs no axis of the layers.
    source.binding.table = table.with_rules([]) if unclear else rules.whole(moments)
    source.files.values["scan_layers"] = stacked
    if stacked and unclear is None:
        source.files.values["param_scan_axis"] = axis
    _groups(source, shapes)


def _weights(layout: str, axis: int | None, cycle: Cycle | None) -> Table:
    """Return the rules of the weights, with names relative to the root, stacked along the axis if it is
    given.
    """
    table = tables.table(layout)
    rules = [rule for rule in table.rules if rule.name.startswith(DECLARED)]
    named = rules if axis is None else [one for rule in rules for one in stack_layers(rule, axis, cycle)]
    return table.with_rules([rule.renamed(rule.name.removeprefix(DECLARED)) for rule in named])


def _find_repeated(tree: NnxNames) -> list[Finding]:
    """Report tensors that the tree contains under two names, such as a linen and an NNX name."""
    findings = [
        Finding.of(
            codes.OVERLAP,
            "the tree holds this tensor twice, under two forms of its name: nothing states which one to use",
            tensor=stored[1],
            expected="one of them",
            got=", ".join(stored),
            help="leave out one of them when merging, or move away the files of another save",
            run=[f"--exclude '{stored[1]}'"],
        )
        for stored in tree.repeated.values()
    ]
    more = len(findings) - _NAMED
    if more <= 0:
        return findings
    return [*findings[:_NAMED], Finding.of(codes.OVERLAP, f"and {more} more tensors that exist twice")]


def _find_obstacle(tree: NnxNames) -> FastshardError | None:
    """Return the reason why a tree can be merged but not converted; None if there is none."""
    if tree.factors:
        return FastshardError.of(
            codes.UNSUPPORTED,
            f"{len(tree.factors)} adapter factors are not merged into the weights: the checkpoint does not "
            "state their scale",
            tensor=tree.factors[0],
            expected="only weights",
            help="merge them in the run that trained them (MaxText's to_huggingface takes lora_alpha and "
            "lora_rank), and save the model; or merge the checkpoint, which keeps all names",
            run=["fastshard merge CKPT OUT"],
        )
    if tree.other_containers:
        containers = (tree.container, *tree.other_containers)
        return FastshardError.of(
            codes.AMBIGUOUS,
            "the checkpoint holds weights in several places: nothing states which model to use",
            expected="one model",
            got=", ".join(f"{container}*" for container in containers),
            help="save only the model; or merge the checkpoint, which keeps all names",
            run=["fastshard merge CKPT OUT"],
        )
    return None


def _family(
    source: Source,
    shapes: Mapping[str, Any],
    stacked: bool,
    tree: NnxNames,
    config: dict[str, Any],
    cycle_length: int,
) -> str | None:
    strange: dict[str, list[str]] = {}
    # The tables have no sets for the places of longer cycles.
    has_sets = not stacked or cycle_length <= maxtext_delta.LONGEST_CYCLE
    for family in FAMILIES:
        # Which axis they are stacked along does not matter for names.
        cycle = maxtext.find_cycle(family, cycle_length if has_sets else None)
        table = _weights(f"maxtext.{family}", 0 if stacked else None, cycle)
        strange[family] = [name for name in shapes if table.rule_of(name) is None]
    fitting = [family for family in FAMILIES if not strange[family]]
    # Tables of one hub differ in the MLP alone. Where all of it is lost, a yml says which one is meant.
    if fitting and len({tables.family(f"maxtext.{family}") for family in fitting}) == 1:
        named = [f for f in fitting if maxtext.names_family(config, f)]
        return (named or fitting)[0]
    likely = min(FAMILIES, key=lambda family: len(strange[family]))
    source.findings.append(
        Finding.of(
            codes.UNSUPPORTED,
            "there is no layout for this MaxText model: its tensors can be merged, but not converted to "
            "other layouts",
            severity="note",
            tensor=tree.spell(tree.root + strange[likely][0]) if strange[likely] else None,
            expected="a model of the " + " or ".join(f"{f} kind" for f in FAMILIES),
            help="describe its tensors in your own layout",
            run=["--layout FILE.toml"],
        )
    )
    return None


def _contradiction(key: str, claim: Any, seen: Any, where: str) -> Finding:
    return Finding.of(
        codes.CONFIG_DISAGREES,
        f"{key}: {where} and the tensors contradict each other",
        expected=str(claim).lower(),
        got=str(seen).lower(),
        help="pass the config of this checkpoint",
        run=["--config FILE"],
    )


def _facts(source: Source, shapes: Mapping[str, Any], config: dict[str, Any], path: str | None) -> None:
    """Declare the facts that names determine, and those that a config states."""
    where = path or "the config"
    if source.model.family == "gpt3":
        source.binding.facts = {"fused_qkv": any(".qkv_proj." in name for name in shapes)}
        fused = flag(config, "fused_qkv") if maxtext.is_maxtext(config) else None
        if fused not in (None, source.binding.facts["fused_qkv"]):
            source.findings.append(
                _contradiction("fused_qkv", fused, source.binding.facts["fused_qkv"], where)
            )
        return
    norms = any(re.search(r"\.self_attention\.(query|key)_norm\.", name) for name in shapes)
    block = maxtext.find_block(str(source.model.family), norms, config)
    named = config.get("decoder_block")
    if named not in block.names.values() and maxtext.is_known(named):
        source.findings.append(
            _contradiction("decoder_block", named, " or ".join(block.names.values()), where)
        )
    if flag(config, "use_qk_norm") is False and block.states_qk_norm:
        source.findings.append(_contradiction("use_qk_norm", False, True, where))
    rope = maxtext.pairs_of(config, block)
    head = "decoder.logits_dense.kernel" in shapes
    key = "logits_via_embedding" if maxtext.is_maxtext(config) else "tie_word_embeddings"
    tied = flag(config, key)
    if tied and head:
        source.findings.append(_contradiction(key, True, False, where))
    # A head that the config calls for and that is not there is missing.
    # Where nothing states the order of pairs: as MaxText's converter writes it; said wherever it matters.
    interleaved = block.interleaved if rope is None else rope.interleaved
    source.binding.facts = {
        "tied": not head if tied is None else tied and not head,
        "interleaved": interleaved,
        "qk_norm": block.qk_norm,
    }
    if block.is_latent:
        _facts_of_latent(source, shapes, config, where)


def _facts_of_latent(source: Source, shapes: Mapping[str, Any], config: dict[str, Any], where: str) -> None:
    """Declare the facts that determine which tensors multi-latent attention and its router have."""
    found = {"query": False, "wq_a": False, "wq_b": False, "bias": False}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        for part in (module.rpartition(".")[2], leaf):
            if part in found:
                found[part] = True
    has_latent = found["wq_a"] or found["wq_b"]
    rank = integer(config, "q_lora_rank")
    q_lora = has_latent or (not found["query"] and (rank is None or rank > 0))
    if rank is not None and has_latent != found["query"] and (rank > 0) != has_latent:
        source.findings.append(_contradiction("q_lora_rank", rank, "wq_a" if has_latent else "query", where))
    # Every model of transformers that has this layout has the bias; where all of it is lost, a yml says so.
    biased = found["bias"] or (
        flag(config, "routed_bias") is True if maxtext.is_maxtext(config) else bool(config)
    )
    source.binding.facts |= {"q_lora": q_lora, "routed_bias": biased, "shared_experts": True}


def _groups(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Declare whether heads share keys and values, from the shapes of two projections.

    Other layouts depend on this fact.
    """
    if source.model.family == "gpt3":
        return
    found: dict[str, Counter[int]] = {"query": Counter(), "key": Counter()}
    for name, shape in shapes.items():
        match = re.search(
            r"\.(?:self_attention(?:_local|_global)?|GptOssAttention|attention\.attention)\.(query|key)\.kernel$",
            name,
        )
        if match and len(shape) >= 3:
            heads = [n for d, n in enumerate(shape) if d != _layers_of(source, shape, name)][-2:-1]
            found[match[1]].update(heads)
    query, key = (found[kind].most_common(1) for kind in ("query", "key"))
    if query and key:
        source.binding.facts["gqa"] = query[0][0] != key[0][0]


def _layers_of(source: Source, shape: tuple[int, ...], name: str) -> int | None:
    rules = source.optimizer.rules
    if not _STACKED.match(name) or not isinstance(rules, Rules) or rules.scan is None:
        return None
    return place(len(shape) - 1, rules.scan)


def _declare_kinds(
    source: Source, shapes: Mapping[str, tuple[int, ...]], axis: int | None, config: dict[str, Any]
) -> None:
    """Declare the kind of each layer, from the config or from the number of layers of each kind.

    Dense layers come first. source: MaxText layers/decoders.py
    """
    counts: dict[str, Counter[int]] = {"dense": Counter(), "moe": Counter()}
    for name, shape in shapes.items():
        match = _OF_KIND.match(name)
        if match is None or match[1] not in counts:
            continue
        if match[2] is not None:
            counts[match[1]][int(match[2]) + 1] += 1
        elif axis is not None and shape:
            counts[match[1]][shape[place(len(shape) - 1, axis)]] += 1
    seen = {kind: _count_layers(found, axis) for kind, found in counts.items()}
    key = "first_num_dense_layers" if maxtext.is_maxtext(config) else "first_k_dense_replace"
    stated = integer(config, key)
    count = source.binding.axes.get("L")
    dense = seen["dense"] if stated is None or stated < 0 else stated
    count = dense + seen["moe"] if count is None else count
    dense = min(dense, count)
    kinds = {"dense": range(dense), "moe": range(dense, count), "main": range(count), "mtp": range(0)}
    kinds["main_moe"] = kinds["moe"]
    source.binding.sets = {kind: ("L", list(layers)) for kind, layers in kinds.items()}
    source.binding.axes["L"] = count


def _find_cycle_length(
    shapes: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int | None, Finding | None]:
    """Return the length of the cycle of delta nets and attention, and a finding if a config contradicts it.

    The config or the layers show it; None if neither does.
    source: MaxText models/qwen3.py (Qwen3NextDecoderLayer)
    """
    full, delta = set(), set()
    for name in shapes:
        if (match := _OF_CYCLE.match(name)) is None:
            continue
        if match[3].startswith(_OF_FULL):
            full.add(int(match[2]))
        elif match[3].startswith(_OF_DELTA):
            delta.add(int(match[2]))
    seen = maxtext_delta.find_cycle(full, delta)
    stated = maxtext_delta.read_cycle(config)
    if stated is None:
        return seen, None
    if maxtext_delta.fits_cycle(stated, full, delta):
        return stated, None
    got = "none" if seen is None else str(seen)
    return seen or stated, _contradiction(maxtext_delta.CYCLE, stated, got, "the config")


def _count_numbers(shapes: Mapping[str, Any]) -> int:
    """Return how many layers, or places of a stack in a cycle, the names number."""
    numbers = [int(match[2]) for name in shapes if (match := _OF_CYCLE.match(name))]
    return max(numbers, default=0) + 1


def _declare_cycle(
    source: Source, shapes: Mapping[str, tuple[int, ...]], axis: int | None, cycle: Cycle
) -> None:
    """Declare the places of layers in a cycle, for the number of layers in the config, or of existing layers.

    source: MaxText models/gpt_oss.py (GptOssScannableBlock), models/qwen3.py (Qwen3NextScannableBlock),
        models/gemma2.py, layers/decoders.py (_apply_gemma3_scanned_blocks)
    """
    stacks: Counter[int] = Counter()
    last: Counter[int] = Counter()
    joined = cycle.length if cycle.stack is None else 1
    for name, shape in shapes.items():
        match = _OF_CYCLE.match(name)
        if match is None and not (cycle.stack is None and _STACKED.match(name)):
            continue
        if match is not None and match[1] is None:
            last[(int(match[2]) + 1) * joined] += 1
        elif axis is not None and shape:
            stacks[cycle.length * shape[place(len(shape) - 1, axis)]] += 1
    numbers = [int(match[1]) + 1 for name in shapes if (match := _OF_REMAINDER.match(name))]
    seen = _count_layers(stacks or last, axis) + max(numbers, default=0)
    count = source.binding.axes.get("L") or seen
    sets = cycle.list_sets(count)
    if "main" in sets:
        # As other tables call them: every layer has experts, and none predicts further tokens.
        sets |= {name: ("L", list(range(count))) for name in ("moe", "main_moe")}
        sets |= {name: ("L", []) for name in ("dense", "mtp")}
    source.binding.sets = sets
    source.binding.axes["L"] = count


def _declare_divisor(
    source: Source, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> None:
    """Declare the number whose root divides the scores: the size of a head if no config states another."""
    if "s" in source.binding.axes or maxtext_gemma.depends_on_width(config):
        return
    found: Counter[int] = Counter()
    for name, shape in shapes.items():
        if name.endswith((".query.kernel", ".key.kernel", ".value.kernel")):
            layers = _layers_of(source, shape, name)
            found.update([n for d, n in enumerate(shape) if d != layers][-1:])
    if found:
        source.binding.axes["s"] = found.most_common(1)[0][0]


def _declare_delta_sizes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Declare sizes of delta nets that no config states.

    Shapes do not show the number of key heads. With one head, every extent is correct; a conversion that
    needs the number asks for the config.
    """
    axes = source.binding.axes
    if "k" not in axes:
        axes["k"] = 1
        axes.pop("u", None)
        axes.pop("kd", None)
    if "kd" in axes:
        return
    # The convolution has all queries, as many keys, and all values, which the output projection reads.
    widths: dict[str, Counter[int]] = {"conv1d": Counter(), "out_proj": Counter()}
    for name, shape in shapes.items():
        module = name.removesuffix(".kernel").rpartition(".")[2]
        if module in widths and shape:
            of_layer = [n for d, n in enumerate(shape) if d != _layers_of(source, shape, name)]
            widths[module].update(of_layer[-1:] if module == "conv1d" else of_layer[:1])
    (every, values) = (counted.most_common(1) for counted in widths.values())
    if every and values and every[0][0] > values[0][0]:
        axes["kd"] = max((every[0][0] - values[0][0]) // 2 // axes["k"], 1)


def _count_layers(found: Counter[int], axis: int | None) -> int:
    """Return the number of layers of a kind: the most frequent stack size, or the count up to the last
    number.
    """
    if not found:
        return 0
    return max(found) if axis is None else found.most_common(1)[0][0]


def _scan_axis(
    layout: str,
    shapes: Mapping[str, tuple[int, ...]],
    axes: dict[str, int],
    config: dict[str, Any],
    cycle: Cycle | None,
) -> tuple[int, FastshardError | None]:
    """Return the axis of the layers: the one that the config states, or the one that fits all shapes."""
    declared_axis = integer(config, "param_scan_axis") if maxtext.is_maxtext(config) else None
    if declared_axis is not None:
        return declared_axis, None
    ranks = [len(shape) for name, shape in shapes.items() if _STACKED.match(name) and shape]
    wrong: dict[int, int] = {}
    seen: set[tuple[int, ...]] = set()
    for axis in _SCAN_AXES:
        places = tuple(place(rank - 1, axis) for rank in ranks)
        if places not in seen:
            seen.add(places)
            wrong[axis] = _weights(layout, axis, cycle).misfits(dict(shapes), axes)
    best = [axis for axis, count in wrong.items() if count == min(wrong.values())]
    if len(best) == 1 or wrong[best[0]]:
        return best[0], None
    return best[0], FastshardError.of(
        codes.AMBIGUOUS,
        "the shapes do not show along which axis the layers are stacked",
        expected="one axis",
        got=" or ".join(map(str, best)),
        help="pass MaxText's yml, which must state param_scan_axis",
        run=["--config FILE"],
    )
