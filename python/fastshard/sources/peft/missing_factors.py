"""Missing parts of an adapter, determined by its config, by the other factor of each product, and by its
other layers.

peft itself is not used.

source: peft tuners/tuners_utils.py (inject_adapter, check_target_module_exists), utils/other.py
    (ModulesToSaveWrapper)
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ...common import codes
from ...common.errors import Finding
from ...common.formatting import counted, some
from ...common.listing import Folder
from ...common.regex import compile_when_used
from ...models.tensor_words import WORDS
from .adapter_config import Config
from .tensor_names import OUTER, AdapterNames, Module

#: Factors that belong together.
PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
#: Names that different models have for the same role. A `modules_to_save` list often contains several of
#: them, to suit any model.
_ONE_OF = (
    frozenset({"classifier", "score"}),
    frozenset(WORDS["embedding_modules"]),
    frozenset(WORDS["head_modules"]),
)
_LAYER = compile_when_used(r"^(?P<before>(?:[^.\d]+\.)+)(?P<layer>\d+)(?P<after>\.[^\d].*)$")
_COPY = "copy the adapter again from the host that saved it"
#: Maximum number of names in a finding.
_MOST = 3


def find_missing_halves(
    adapter: AdapterNames, config: Config, shapes: Mapping[str, list[int]], file: str, path: Path
) -> list[Finding]:
    """List missing parts, based on an adapter's names and shapes: all factors, one of two, or a tensor's
    values.

    Args:
        adapter: its tensors by its own names.
        config: its config.
        shapes: shapes of its tensors, by the stored names.
        file: its tensor file, as named in messages.
        path: its config's file.
    """
    if not adapter.modules:
        run = find_run_beside(path)
        return [
            Finding.of(
                codes.MISSING_TENSOR,
                "the file of the adapter holds none of its factors",
                file=file,
                expected="tensors named lora_A and lora_B",
                got=some(sorted(adapter.whole.values()), _MOST) if adapter.whole else "no tensors",
                help="save the adapter again, gathered from all ranks"
                if run is None
                else "merge the factors in the DeepSpeed checkpoint next to it",
                run=[] if run is None else [run],
            )
        ]
    return [*_find_without_values(adapter, shapes, file), *_find_without_counterpart(adapter, config, file)]


def find_missing_modules(
    adapter: AdapterNames, config: Config, file: str, base: Collection[str] | None = None
) -> list[Finding]:
    """List the modules that an adapter lacks, based on its config or its other layers.

    Args:
        adapter: its tensors by its own names; modules by the base's names if a base is given.
        config: its config.
        file: its tensor file.
        base: names of the base's tensors; None for an adapter alone.
    """
    found = [
        *_find_unsaved_modules(adapter, config, file, base),
        *_find_unmatched_targets(adapter, config, file, base),
    ]
    return [*found, *_find_gaps(adapter, config, file, base)]


def find_run_beside(config: Path) -> str | None:
    """Return the command that extracts an adapter's factors from a DeepSpeed checkpoint in or near its
    folder.

    None if there is no such checkpoint in, above or next to the folder.
    """
    folder = config.absolute().parent
    for place in (folder, folder.parent):
        for at in (place, *(place / name for name in Folder.named(place).names())):
            steps = Folder.named(at).names() if at.is_dir() else []
            if any(name.startswith("global_step") and (at / name).is_dir() for name in steps):
                return shlex.join(
                    ["fastshard", "convert", str(at), "OUT", "--to", "hf", "--adapter", str(config)]
                )
    return None


def _find_without_values(
    adapter: AdapterNames, shapes: Mapping[str, list[int]], file: str
) -> Iterator[Finding]:
    """Yield a finding for tensors of size 0, which ZeRO-3 leaves if tensors are saved without gathering."""
    names = [name for module in adapter.modules.values() for name in module.factors.values()]
    empty = sorted(name for name in (*names, *adapter.whole.values()) if 0 in shapes.get(name, ()))
    if empty:
        yield Finding.of(
            codes.MISSING_TENSOR,
            f"{counted(len(empty), 'tensor')} of the adapter hold no values",
            file=file,
            tensor=empty[0],
            expected="tensors of at least one element",
            got=f"{shapes[empty[0]]} in {some(empty, _MOST)}",
            help="save the adapter again with its weights gathered from all ranks (ZeRO-3 and FSDP divide "
            "them)",
        )


def _find_without_counterpart(adapter: AdapterNames, config: Config, file: str) -> Iterator[Finding]:
    """Yield findings for factors without their counterpart, and products without DoRA's magnitude."""
    lacking: dict[str, list[str]] = {}
    for module in adapter.modules.values():
        for pair in PAIRS:
            for kind, other in (pair, pair[::-1]):
                if kind not in module.factors:
                    continue
                if other not in module.factors:
                    lacking.setdefault(other, []).append(module.factors[kind].replace(kind, other))
                if config.dora and "lora_magnitude_vector" not in module.factors:
                    name = f"{OUTER}{module.name}.lora_magnitude_vector"
                    lacking.setdefault("lora_magnitude_vector", []).append(name)
    for names in lacking.values():
        names = sorted(set(names))
        yield _missing("one of the adapter's two factors is missing", names, file)


def _missing(message: str, names: list[str], file: str, expected: str | None = None) -> Finding:
    """Build one finding for tensors or modules that are missing for the same reason."""
    several = f": {some(names, _MOST)}" if len(names) > 1 else ""
    return Finding.of(
        codes.MISSING_TENSOR,
        message + several,
        file=file,
        tensor=names[0],
        expected=expected,
        got="no such tensor",
        help=_COPY,
    )


def _is_module(name: str, word: str) -> bool:
    """Return True if a word in a list names a module, by peft's rule for lists."""
    return name == word or name.endswith(f".{word}")


def _find_unsaved_modules(
    adapter: AdapterNames, config: Config, file: str, base: Collection[str] | None
) -> Iterator[Finding]:
    """Yield findings for entries of `modules_to_save` that the file lacks and the base, if known, has."""
    saved = [f".{own}" for own in adapter.whole]

    def is_there(word: str) -> bool:
        return any(f".{word}." in own for own in saved)

    for word in config.saved_modules:
        if is_there(word):
            continue
        if base is None:
            others = next((names for names in _ONE_OF if word in names), frozenset())
            if any(map(is_there, others)):
                continue
        elif not any(f".{word}." in f".{name}" for name in base):
            continue
        yield _missing(
            "the adapter lacks a module that its config saves",
            [f"{word}.weight"],
            file,
            f"a module {word} (modules_to_save of {config.path})",
        )


def _find_unmatched_targets(
    adapter: AdapterNames, config: Config, file: str, base: Collection[str] | None
) -> Iterator[Finding]:
    """Yield findings for words in `target_modules` that match no module with factors.

    Without a base, each one is a warning, because the model may not have such a module.
    """
    if base is not None and config.excludes:
        return
    names = [name for module in adapter.modules.values() for name in (module.name, module.at)]
    names += [own.rpartition(".")[0] for own in adapter.whole]
    for word in config.targets:
        if any(_is_module(name, word) for name in names):
            continue
        modules = [] if base is None else _list_targets(word, config, base)
        if base is not None and not modules:
            continue
        finding = _missing(
            f"no module {word} has factors in the adapter",
            modules or [word],
            file,
            f"factors of {word} (target_modules of {config.path})",
        )
        # A list may have words for other models too; peft passes over these.
        yield finding if base is not None else finding.replace(severity="warning")


def _list_targets(word: str, config: Config, base: Iterable[str]) -> list[str]:
    """Return the base's modules that a word in a list names.

    Experts may be stacked in memory, so that no word matches them.
    """
    found = []
    for name in base:
        module, _, own = name.rpartition(".")
        layer = _LAYER.match(module)
        limited = config.layers is not None and (layer is None or int(layer["layer"]) not in config.layers)
        if own == "weight" and _is_module(module, word) and ".experts." not in module and not limited:
            found.append(module)
    return sorted(found)


def _find_gaps(
    adapter: AdapterNames, config: Config, file: str, base: Collection[str] | None
) -> Iterator[Finding]:
    """Yield a finding for intermediate layers without a module's factors, unless a config limits layers."""
    if not config.is_of_all_layers:
        return
    modules: dict[str, Module | None] = {module.at: module for module in adapter.modules.values()}
    for own in adapter.whole:
        name = own.rpartition(".")[0]
        if any(_is_module(name, word) for word in config.saved_modules):
            modules.setdefault(name, None)
    roles: dict[tuple[str, str], set[int]] = {}
    for name in modules:
        if match := _LAYER.match(name):
            roles.setdefault((match["before"], match["after"]), set()).add(int(match["layer"]))
    missing = []
    for (before, after), layers in roles.items():
        gaps = [n for n in range(min(layers), max(layers)) if n not in layers]
        if base is not None:
            gaps = [
                n for n in gaps if _has_module(f"{before}{n}{after}", f"{before}{min(layers)}{after}", base)
            ]
        elif _are_of_other_kind(before, gaps, layers, roles):
            gaps = []
        missing += [f"{before}{n}{after}" for n in gaps]
    if missing:
        missing.sort(key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")])
        yield _missing(
            "the adapter lacks modules that its other layers have", missing, file, "factors of each layer"
        )


def _has_module(name: str, other: str, base: Collection[str]) -> bool:
    """Return True if the base has a module in the same form as another, adapted module."""
    if f"{other}.weight" in base:
        return f"{name}.weight" in base
    return any(tensor.startswith(f"{name}.") for tensor in base)


def _are_of_other_kind(
    before: str, gaps: list[int], layers: set[int], roles: Mapping[tuple[str, str], set[int]]
) -> bool:
    """Return True if layers may lack a module because the model has other modules there, as hybrid models do.

    This is the case if such layers are in the majority, are at regular intervals, or have other modules in
    its place.
    """
    steps = {b - a for a, b in itertools.pairwise(gaps)}
    in_turn = len(gaps) > 2 and len(steps) == 1
    # Modules that only these layers have.
    instead = any(
        start == before and others & set(gaps) and not others & layers for (start, _), others in roles.items()
    )
    return len(gaps) >= len(layers) or in_turn or instead
