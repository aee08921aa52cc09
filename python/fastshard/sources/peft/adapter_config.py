"""``adapter_config.json``: ranks, scales and other settings that affect values.

source: peft tuners/lora/config.py, tuners/lora/layer.py (update_layer), utils/other.py (get_pattern_key)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from ...common import codes, json_text, safe_files
from ...common.config_text import shown
from ...common.errors import FastshardError
from ...common.patterns import PatternBudget, PatternList
from ...common.records import dataclass, field

FILE = "adapter_config.json"
#: Keys that change the computation, and the values with which they do not.
_UNREAD = {
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "alora_invocation_tokens": (None,),
    "megatron_config": (None,),
    "corda_config": (None,),
    "eva_config": (None,),
    "layer_replication": (None,),
    "velora_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "lora_ga_config": (None,),
}
_FLAG, _LIST = ((bool, NoneType), "true or false"), ((list, NoneType), "a list of names")
_WORDS_OR_PATTERN = (str, list, NoneType), "a pattern or a list of names"
#: Keys that determine what is adapted and how, the types of their values, and the names of these types.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "use_rslora": _FLAG,
    "use_dora": _FLAG,
    "fan_in_fan_out": _FLAG,
    "target_parameters": _LIST,
    "modules_to_save": _LIST,
    "target_modules": _WORDS_OR_PATTERN,
    "exclude_modules": _WORDS_OR_PATTERN,
    "layers_pattern": _WORDS_OR_PATTERN,
    "layers_to_transform": ((int, list, NoneType), "the number of a layer, or a list of them"),
    "base_model_name_or_path": ((str, NoneType), "a name or a path"),
}
_OF_NUMBERS = ("layers_to_transform",)
#: Initialisations that change the base model's weights, so that the adapter does not fit the base's own file.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Keys that identify mlx-lm's adapter config (mlx_lm/tuner/utils.py).
_MLX = {"fine_tune_type", "lora_parameters"}


class _ByModule:
    """Numbers of modules, by patterns of their names; the first matching pattern applies."""

    def __init__(self, numbers: Mapping[str, float], budget: PatternBudget) -> None:
        self._numbers = list(numbers.values())
        self._patterns = PatternList(numbers, "module", budget)

    def of(self, module: str, default: float) -> float:
        """Return the number of a module."""
        found = self._patterns.first(module)
        return default if found is None else self._numbers[found]


@dataclass(frozen=True)
class Config:
    """The settings of an adapter's config that affect its values."""

    r: int
    alpha: float
    #: Ranks and alphas of some modules, by patterns of their names; the first matching pattern applies.
    ranks: _ByModule
    alphas: _ByModule
    rslora: bool = False
    dora: bool = False
    fan_in_fan_out: bool = False
    #: Parameters that are adapted directly (stacked experts).
    parameters: tuple[str, ...] = ()
    #: Trained rows of the embedding: by module, or for the embedding.
    token_indices: Any = None
    base: str | None = None
    path: str = FILE
    #: Words that name the adapted modules; empty if a pattern or a shorthand selects them.
    targets: tuple[str, ...] = ()
    #: Modules that are saved in full after training.
    saved_modules: tuple[str, ...] = ()
    #: The only layers that are adapted; None for all.
    layers: frozenset[int] | None = None
    #: True if modules are excluded by name.
    excludes: bool = False
    #: True if every layer is adapted in the same way, where the model has the modules.
    is_of_all_layers: bool = False
    #: The config as stored.
    stored: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        """Return the rank of a module's product."""
        return int(self.ranks.of(module, self.r))

    def scale(self, module: str) -> float:
        """Return the scale of a module's product."""
        r, alpha = self.rank(module), self.alphas.of(module, self.alpha)
        return alpha / (math.sqrt(r) if self.rslora else r)

    def parameters_of(self, module: str) -> list[str]:
        """Return the own names of a module's parameters that are adapted directly."""
        split = (parameter.rpartition(".") for parameter in self.parameters)
        return [
            own for outer, _, own in split if not outer or module == outer or module.endswith(f".{outer}")
        ]

    def rows(self, module: str) -> list[int] | None:
        """Return the trained rows of a module's weight."""
        if isinstance(self.token_indices, dict):
            found = next(
                (v for k, v in self.token_indices.items() if module == k or module.endswith(f".{k}")), None
            )
            return found if isinstance(found, list) else None
        return self.token_indices if isinstance(self.token_indices, list) else None


def read(path: Path, label: str) -> Config:
    """Read the config in a file.

    Raises:
        FastshardError: ``FS211`` if it is not a config, ``FS514`` for an adapter whose values are computed in
            an unsupported way.
    """
    help = f"pass the adapter's own {FILE}"
    stored = json_text.value(safe_files.read_text(path, safe_files.MAX_CONFIG, label=label), label, help=help)
    if isinstance(stored, dict) and "peft_type" not in stored and _MLX & stored.keys():
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "adapters of mlx-lm are not supported",
            file=label,
            expected="a PEFT adapter",
            help="merge it into its base with mlx_lm.fuse, and convert the result",
        )
    if not isinstance(stored, dict) or "peft_type" not in stored:
        raise FastshardError.of(
            codes.BAD_VALUE, "the file is not an adapter config: it has no peft_type", file=label, help=help
        )
    _refuse(stored, label)
    _check_types(stored, label)
    indices = stored.get("trainable_token_indices")
    targets, layers = stored.get("target_modules"), _layers(stored)
    is_shorthand = isinstance(targets, str) and targets.lower() == "all-linear"
    words = _words(targets)
    budget = PatternBudget(label)
    return Config(
        r=_rank(stored, "r", label),
        alpha=_number(stored, "lora_alpha", label),
        rslora=bool(stored.get("use_rslora")),
        dora=bool(stored.get("use_dora")),
        fan_in_fan_out=bool(stored.get("fan_in_fan_out")),
        ranks=_ByModule(_numbers_by_pattern(stored, "rank_pattern", _rank, label), budget),
        alphas=_ByModule(_numbers_by_pattern(stored, "alpha_pattern", _number, label), budget),
        parameters=_words(stored.get("target_parameters")),
        token_indices=indices if _are_rows(indices, label) else None,
        base=stored.get("base_model_name_or_path") or None,
        path=label,
        targets=words,
        saved_modules=_words(stored.get("modules_to_save")),
        layers=layers,
        excludes=bool(stored.get("exclude_modules")),
        is_of_all_layers=(
            (is_shorthand or bool(words))
            # Words with a number may be of single layers.
            and not any(re.search(r"\d+\.", word) for word in words)
            and layers is None
            and not stored.get("exclude_modules")
        ),
        stored=stored,
    )


def _check_types(stored: dict[str, Any], label: str) -> None:
    """Refuse values whose types do not occur in peft's own config."""
    for key, (kinds, expected) in _TYPES.items():
        value = stored.get(key)
        words = value if isinstance(value, list) and key not in _OF_NUMBERS else ()
        if not isinstance(value, kinds) or not all(isinstance(word, str) for word in words):
            raise _bad(key, expected, value, label)


def _words(value: Any) -> tuple[str, ...]:
    """Return the words of a list; empty for a pattern."""
    return tuple(value) if isinstance(value, list) else ()


def _layers(stored: dict[str, Any]) -> frozenset[int] | None:
    """Return the layers to which the adapter is limited, if any."""
    found = stored.get("layers_to_transform")
    numbers = found if isinstance(found, list) else [found]
    kept = frozenset(n for n in numbers if type(n) is int)
    return kept or None


def _refuse(stored: dict[str, Any], label: str) -> None:
    kind = stored["peft_type"]
    if kind != "LORA":
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "this kind of adapter is not supported",
            file=label,
            expected="peft_type LORA",
            got=shown(kind),
            help="merge it with peft's merge_and_unload",
        )
    for key, harmless in _UNREAD.items():
        if key in stored and stored[key] not in harmless:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"{key}: this variant of LoRA computes its update differently",
                file=label,
                got=shown(stored[key]),
                help="merge it with peft's merge_and_unload",
            )
    how = str(stored.get("init_lora_weights", True)).lower()
    if how.startswith(_CHANGES_BASE):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"init_lora_weights {how}: creating the adapter changed the base, and no file holds the changed "
            "base",
            file=label,
            help="convert it to a plain adapter: "
            "save_pretrained(path_initial_model_for_weight_conversion=...)",
        )


def _are_rows(indices: Any, label: str) -> bool:
    listed = list(indices.values()) if isinstance(indices, dict) else [indices]
    if all(one is None for one in listed):
        return False
    for one in listed:
        if not isinstance(one, list) or not all(type(n) is int and 0 <= n < 1 << 40 for n in one):
            raise _bad("trainable_token_indices", "lists of rows", indices, label)
        if len(set(one)) < len(one):
            raise _bad("trainable_token_indices", "each row only once", indices, label)
    return True


def _numbers_by_pattern(
    stored: dict[str, Any], key: str, read_number: Callable[[dict[str, Any], str, str], float], label: str
) -> dict[str, float]:
    """Return numbers by patterns of names, which peft uses as regular expressions."""
    found = stored.get(key) or {}
    if not isinstance(found, dict):
        raise _bad(key, "numbers by names of modules", found, label)
    return {pattern: read_number(found, pattern, label) for pattern in found}


def _rank(stored: dict[str, Any], key: str, label: str) -> int:
    value = _number(stored, key, label)
    if not 1 <= value < 1 << 31 or value != int(value):
        raise _bad(key, "an integer from 1, with at most 31 bits", value, label)
    return int(value)


def _number(stored: dict[str, Any], key: str, label: str) -> float:
    value = stored.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(key, "a number", value, label)
    if key != "lora_alpha" and value <= 0:
        raise _bad(key, "a number above 0", value, label)
    return float(value)


def _bad(key: str, expected: str, got: Any, label: str) -> FastshardError:
    return FastshardError.of(
        codes.BAD_VALUE,
        key,
        file=label,
        expected=expected,
        got=shown(got),
        help=f"pass the adapter's own {FILE}",
    )
