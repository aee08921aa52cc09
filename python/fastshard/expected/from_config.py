"""Comparison of a model's config with its tensors: vocabulary rows, columns, and numbers of layers and
experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.regex import compile_when_used
from ..models.tensor_words import WORDS
from .from_layers import ShapeDtype, Stack, sliced

#: Possible tensor-parallel degrees of a slice.
_DEGREES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
#: Maximum number of padding rows per rank. source: Megatron-LM --make-vocab-size-divisible-by, NeMo
_PADDING = 1024
#: Keys of a config that state how many layers a stack has.
_LAYERS = frozenset(
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
        "encoder_num_hidden_layers",
        "decoder_num_hidden_layers",
        "depth",
        "num_blocks",
        "layers",
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
    )
)
#: The keys among these that list the kind of each layer.
_KINDS = frozenset(("layer_types", "layers_block_type", "hybrid_override_pattern"))
#: Names of MLP modules and layer kinds, and of modules that mix tokens.
_MLP = compile_when_used(r"mlp|ffn|feed_forward|moe")
_OF_EXPERTS = compile_when_used(r"\.experts\.")
_MIXER = compile_when_used(r"attn|attention|mixer|mamba|ssm|conv|rnn")
#: Keys for layers after the last one, which predict further tokens.
_FURTHER = frozenset(
    ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers")
)
#: Keys that state how many experts a layer has.
_EXPERTS = frozenset(
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
)
#: Maximum nesting of keys, and maximum number of list items, that are read.
_DEEP, _LONG = 16, 1024
#: Parts of a model, with the words for them in names and configs.
_PARTS = (
    ("decoder", "generator"),
    ("encoder",),
    ("vision", "visual", "image", "vit"),
    ("audio", "speech"),
    ("text", "language", "llm", "lm"),
)


class ConfigNumbers:
    """All numbers in a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        #: (path of keys, value) of each integer.
        self.numbers: list[tuple[tuple[str, ...], int]] = list(_numbers(config))
        #: Possible numbers of blocks if the config lists each MLP as a separate layer but a block contains an
        #: MLP and a token mixer.
        self.parts: set[int] = set(_parts(config))
        #: True if blocks are listed individually, as for architectures from a search.
        self.lists_blocks = "block_configs" in config or "auto_map" in config

    def of(self, keys: Iterable[str]) -> dict[tuple[str, ...], int]:
        """Return the values of some keys, by their key paths."""
        wanted = frozenset(keys)
        return {path: value for path, value in self.numbers if path[-1] in wanted}

    def has(self, value: int, *words: str) -> bool:
        """Return True if a number with this value has a key that contains one of the words.

        Without words, any key matches.
        """
        return any(
            n == value and (not words or any(w in path[-1] for w in words)) for path, n in self.numbers
        )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the integers of a config with the keys that lead to them.

    For a list of layer kinds, the integer is the length of the list.
    """
    left: list[tuple[Any, tuple[str, ...]]] = [(config, ())]
    while left:
        value, path = left.pop()
        if path and path[-1] in _KINDS and isinstance(value, list | str):
            yield path, len(value)
        elif isinstance(value, Mapping) and len(path) < _DEEP:
            left += [(inner, (*path, str(key))) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(inner, path) for inner in value[:_LONG]]
        elif isinstance(value, int) and not isinstance(value, bool) and path:
            yield path, value


def _parts(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the number of layers that are not MLPs, for lists of layer kinds that contain MLPs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _parts(value)
        elif key in _KINDS and isinstance(value, list):
            others = [kind for kind in value if not _MLP.fullmatch(str(kind))]
            if 2 * len(others) == len(value):
                yield len(others)


def rows(tensors: Mapping[str, ShapeDtype], numbers: ConfigNumbers) -> Iterator[Finding]:
    """Compare the rows of embeddings and output layers with ``vocab_size``.

    The findings are ``FS208`` for slices, ``FS201`` for transposed tensors, and ``FS215``.
    """
    sizes = set(numbers.of(("vocab_size",)).values())
    if not sizes:
        return
    for name, (shape, dtype) in tensors.items():
        if len(shape) != 2 or not _of_words(name) or not dtype.upper().startswith(("F", "BF")):
            continue
        yield from _row(name, shape, sizes, numbers)


def _of_words(name: str) -> bool:
    """Return True for a weight with a row for each token of the vocabulary."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-1] != "weight" or any(part.isdecimal() for part in parts):
        return False
    return parts[-2] in WORDS["embedding_modules"] or parts[-2] in WORDS["head_modules"]


def _row(name: str, shape: tuple[int, ...], sizes: set[int], numbers: ConfigNumbers) -> Iterator[Finding]:
    count, columns = shape
    widths = set(numbers.of(("hidden_size", "d_model", "n_embd", "dim", "embedding_size")).values())
    if count in sizes or numbers.has(count, "vocab", "token", "codebook", "embeddings"):
        if not numbers.has(columns):
            yield from _columns(name, shape, widths)
        return
    if columns in sizes and (count in widths or numbers.has(count)):
        yield Finding.of(
            codes.SHAPE,
            "the matrix is transposed: its columns are the vocabulary",
            tensor=name,
            expected=f"{columns} rows (vocab_size)",
            got=str(list(shape)),
            help="save the tensor again: it was saved transposed",
        )
        return
    near = min(sizes, key=lambda size: abs(size - count))
    if count > max(sizes):
        # Padding does no harm, and many more are several vocabularies in one.
        if count % 8 and max(sizes) + 8 <= count < 5 * max(sizes) // 4:
            yield _differs(name, count, near, "warning")
        return
    of = next((n for size in sizes for n in _DEGREES if size <= n * count < size + n * _PADDING // 8), 0)
    exact = next((n for size in sizes for n in _DEGREES if size == n * count), of)
    if exact:
        size = max(s for s in sizes if s <= exact * count)
        yield Finding.of(
            codes.SLICE_AS_WHOLE,
            f"the tensor holds only one of {exact} slices of the vocabulary",
            tensor=name,
            expected=f"{size} rows (vocab_size)",
            got=str(list(shape)),
            help="copy the slices of the other ranks from the checkpoint that this one was made from",
        )
    else:
        yield _differs(name, count, near, "warning" if numbers.lists_blocks else "error")


def _columns(name: str, shape: tuple[int, ...], widths: set[int]) -> Iterator[Finding]:
    """Yield a finding for a number of columns that divides the hidden size and that no config key states."""
    if any(sliced(shape, (shape[0], width)) > 1 for width in widths):
        yield Finding.of(
            codes.SLICE_AS_WHOLE,
            "according to the config, the columns are one slice of hidden_size",
            tensor=name,
            expected=" or ".join(str(w) for w in sorted(widths)),
            got=str(list(shape)),
            help="copy the slices of the other ranks from the checkpoint that this one was made from",
        )


def _differs(name: str, count: int, size: int, severity: str) -> Finding:
    return Finding.of(
        codes.CONFIG_DISAGREES,
        "the config states another vocabulary size than the tensor has",
        severity=severity,
        tensor=name,
        expected=f"{size} rows (vocab_size)",
        got=str(count),
        help="check in the tokenizer which value is right, and correct the config or restore the file",
    )


def ends(tensors: Mapping[str, ShapeDtype], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield ``FS102`` if a causal model without tied embeddings lacks its output layer or its embedding."""
    kinds, words = config.get("architectures"), config.get("vocab_size")
    causal = isinstance(kinds, list) and any(str(kind).endswith("ForCausalLM") for kind in kinds)
    if not causal or config.get("tie_word_embeddings") is not False or not isinstance(words, int):
        return
    outside = [name for name in tensors if not any(part.isdecimal() for part in name.split("."))]
    matrices = [name for name in outside if len(shape := tensors[name][0]) == 2 and shape[0] >= words]
    if len(matrices) != 1 or matrices[0].count(".") < 1:
        return
    module = matrices[0].split(".")[-2]
    # Without a prefix it is the model below the output layer, saved by itself.
    if module in WORDS["embedding_modules"] and matrices[0].count(".") > 1:
        lacking, there = "output layer", any(word in name for name in outside for word in ("head", "output"))
    elif module in WORDS["head_modules"]:
        lacking, there = "embedding", any("emb" in name or "wte" in name for name in outside)
    else:
        return
    if not there:
        yield Finding.of(
            codes.MISSING_TENSOR,
            f"the {lacking} is missing, and the config states that it is not tied to {matrices[0]}",
            expected=f"another matrix of {words} rows (tie_word_embeddings false)",
            got="nothing",
            help="copy the file that held it, which the index lacks too; if the two are tied, correct "
            "tie_word_embeddings",
        )


def holds_embedding(tensors: Iterable[str]) -> bool:
    """Return True if one of the tensors is a token embedding, which is absent if only a few layers were
    saved."""
    return any(
        name.split(".")[-2:-1] == [module] for name in tensors for module in WORDS["embedding_modules"]
    )


def counts(
    stacks: Iterable[Stack],
    numbers: ConfigNumbers | None,
    tensors: Mapping[str, ShapeDtype],
    *,
    in_files: bool,
) -> Iterator[Finding]:
    """Yield findings about gaps in numbered layers and experts, and about counts that differ from the config.

    The codes are ``FS103`` and ``FS102``.

    If only the config contradicts a number, the finding is a warning. It is an error if one of several files
    may be lost, or if the router of the same layer has the number of rows that the config states.
    """
    for stack in stacks:
        if stack.is_layers and len(stack.elements) > 1:
            yield from _gap(stack, codes.MISSING_LAYER, "layer", numbers)
            if numbers is not None:
                yield from _ends(stack, numbers, in_files)
        elif stack.is_experts and len(stack.elements) > 1:
            yield from _gap(stack, codes.MISSING_TENSOR, "expert", numbers)
            if numbers is not None:
                yield from _experts(stack, numbers, tensors, in_files)
    if numbers is not None:
        yield from _stacked_experts(numbers, tensors)


def _gap(stack: Stack, code: str, what: str, numbers: ConfigNumbers | None) -> Iterator[Finding]:
    gaps = stack.gaps()
    if not gaps:
        return
    meant = numbers is not None and numbers.lists_blocks
    yield Finding.of(
        code,
        f"the {what}s are numbered up to {stack.count - 1}, but some numbers below have no tensor",
        severity="warning" if meant else "error",
        tensor=f"{stack.prefix}{gaps[0]}",
        expected=f"{stack.count} {what}s",
        got=f"all but {_ranges(gaps)}",
        help="copy the files that held them from the original checkpoint; the index lacks them too",
    )


def _ends(stack: Stack, numbers: ConfigNumbers, in_files: bool) -> Iterator[Finding]:
    """Compare the number of layers with the config's number for this part of the model."""
    sizes = _layers_of(stack.prefix, numbers)
    if numbers.parts and all(_has_both(element) for element in stack.elements.values()):
        sizes |= numbers.parts
    if not sizes or not numbers.of(("vocab_size",)) or numbers.has(stack.count, "layer", "depth", "block"):
        # Towers that no words go through count otherwise: by one less, by multipliers.
        return
    if stack.count < min(sizes):
        yield Finding.of(
            codes.MISSING_LAYER,
            "the last layers are missing",
            severity="error" if in_files else "warning",
            tensor=f"{stack.prefix}{stack.count}",
            expected=f"{' or '.join(map(str, sorted(sizes)))} layers, according to the config",
            got=f"{stack.count}",
            help="copy the files that held them from the original checkpoint; the index lacks them too",
        )
    elif stack.count > max(sizes) + sum(numbers.of(_FURTHER).values()):
        yield Finding.of(
            codes.CONFIG_DISAGREES,
            "the checkpoint has more layers than the config states",
            severity="warning",
            tensor=f"{stack.prefix}{stack.count - 1}",
            expected=f"{max(sizes)} layers",
            got=f"{stack.count}",
            help="check the config: it describes another model, or the layers belong to another stack; "
            "fastshard keeps them",
        )


def _has_both(names: Iterable[str]) -> bool:
    """Return True if a layer contains both an MLP and a module that mixes tokens."""
    modules = {name.partition(".")[0] for name in names}
    modules -= {module for module in modules if "norm" in module}
    return any(_MLP.search(module) for module in modules) and any(_MIXER.search(module) for module in modules)


def _layers_of(prefix: str, numbers: ConfigNumbers) -> set[int]:
    """Return the numbers of layers that a config may state for a stack, by words in common."""
    found = numbers.of(_LAYERS)
    words = {part for part in _PARTS if any(word in prefix for word in part)}
    if not words:
        others = {path: n for path, n in found.items() if not _part_of(path)}
        return set((others or found).values())
    shared = {path: n for path, n in found.items() if _part_of(path) & words}
    return set((shared or found).values())


def _part_of(path: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {part for part in _PARTS if any(word in key for word in part for key in path)}


def _experts(
    stack: Stack, numbers: ConfigNumbers, tensors: Mapping[str, ShapeDtype], in_files: bool
) -> Iterator[Finding]:
    sizes = set(numbers.of(_EXPERTS).values())
    if len(sizes) == 1 and stack.count < min(sizes) and not numbers.lists_blocks:
        beside = stack.prefix[: -len(stack.word) - 1]
        routed = any(
            shape[:1] == (min(sizes),) and name.startswith(beside) and not name.startswith(stack.prefix)
            for name, (shape, _) in tensors.items()
        )
        yield Finding.of(
            codes.MISSING_TENSOR,
            "the last experts are missing",
            severity="error" if in_files or routed else "warning",
            tensor=f"{stack.prefix}{stack.count}",
            expected=f"{min(sizes)} experts, according to the config",
            got=f"{stack.count}",
            help="copy the files of other expert-parallel ranks; the index lacks them too",
        )


def _stacked_experts(numbers: ConfigNumbers, tensors: Mapping[str, ShapeDtype]) -> Iterator[Finding]:
    """Warn of a tensor that holds fewer experts of a layer than its router and the config count."""
    sizes = set(numbers.of(_EXPERTS).values())
    if len(sizes) != 1 or numbers.lists_blocks:
        return
    (count,) = sizes
    routed = {
        name.rpartition(".")[0].rpartition(".")[0]
        for name, (shape, _) in tensors.items()
        if len(shape) == 2 and shape[0] == count and not _OF_EXPERTS.search(name)
    }
    for name, (shape, _) in tensors.items():
        match = _OF_EXPERTS.search(name)
        if match is None or len(shape) < 3 or count in shape or name[: match.start()] not in routed:
            continue
        if shape[0] < count:
            yield Finding.of(
                codes.SHAPE,
                f"the tensor holds {shape[0]} experts, but the router of its layer has {count}",
                severity="warning",
                tensor=name,
                expected=f"{count} experts, as the config states",
                got=f"{list(shape)}",
                help="write the tensor again with the experts of all expert-parallel ranks",
            )


def _ranges(numbers: list[int]) -> str:
    """Format ranges of numbers, e.g. ``3, 5-8``."""
    parts: list[str] = []
    start = numbers[0]
    for n, after in zip(numbers, [*numbers[1:], -1], strict=True):
        if after != n + 1:
            parts.append(str(n) if start == n else f"{start}-{n}")
            start = after
    return ", ".join(parts[:8]) + (" ..." if len(parts) > 8 else "")
