"""``adapter_config.json``: ranks, scales and what else decides values.

source: peft tuners/lora/config.py, tuners/lora/layer.py (update_layer), utils/other.py (get_pattern_key)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common import json_text, safe_files
from ...common.config_text import shown
from ...common.errors import FastshardError

FILE = "adapter_config.json"
#: Keys that change what is computed, and the values with which they do not.
_UNREAD = {
    "use_qalora": (None, False), "use_bdlora": (None, False), "arrow_config": (None,), "alora_invocation_tokens": (None,),
    "megatron_config": (None,), "corda_config": (None,), "eva_config": (None,), "layer_replication": (None,),
    "velora_config": (None,), "kasa_config": (None,), "monteclora_config": (None,), "lora_ga_config": (None,),
}  # fmt: skip
#: Initialisations that change the base model's weights, so that its own file is not what the adapter is for.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Keys by which mlx-lm's config of an adapter is known (mlx_lm/tuner/utils.py).
_MLX = {"fine_tune_type", "lora_parameters"}
#: Patterns of module names: a group that repeats could take for ever.
_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]")
_MOST_REPEATS = 3
_LONGEST = 512


@dataclass(frozen=True)
class Config:
    """What an adapter's config says of its values."""

    r: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    fan_in_fan_out: bool = False
    #: Ranks and alphas of some modules, by patterns of their names, the first that fits.
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    #: Parameters that are adapted as such (stacked experts).
    parameters: tuple[str, ...] = ()
    #: Rows of the embedding that are trained: by module, or of the embedding.
    token_indices: Any = None
    base: str | None = None
    path: str = FILE
    #: Words that name the adapted modules; none where a pattern or a shorthand does.
    targets: tuple[str, ...] = ()
    #: Modules that are saved as they were trained.
    saved_modules: tuple[str, ...] = ()
    #: The only layers that are adapted; None for all.
    layers: frozenset[int] | None = None
    #: True if modules are left out by name.
    excludes: bool = False
    #: True if every layer is adapted alike, as far as the model has the modules.
    is_of_all_layers: bool = False
    #: The config as it is stored.
    stored: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        """The rank of a module's product."""
        return int(_of(self.ranks, module, self.r))

    def scale(self, module: str) -> float:
        """What a module's product is multiplied with."""
        r, alpha = self.rank(module), float(_of(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(r) if self.rslora else r)

    def parameters_of(self, module: str) -> list[str]:
        """The parameters of a module that are adapted by themselves, by their own names."""
        split = (parameter.rpartition(".") for parameter in self.parameters)
        return [
            own for outer, _, own in split if not outer or module == outer or module.endswith(f".{outer}")
        ]

    def rows(self, module: str) -> list[int] | None:
        """The rows of a module's weight that are trained."""
        if isinstance(self.token_indices, dict):
            found = next(
                (v for k, v in self.token_indices.items() if module == k or module.endswith(f".{k}")), None
            )
            return found if isinstance(found, list) else None
        return self.token_indices if isinstance(self.token_indices, list) else None


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits a module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read(path: Path, label: str) -> Config:
    """The config in a file.

    Raises:
        FastshardError: ``FS211`` if it is none, ``FS514`` for an adapter whose values are computed in another way.
    """
    help = f"pass the adapter's own {FILE}"
    said = json_text.value(safe_files.read_text(path, safe_files.MAX_CONFIG, label=label), label, help=help)
    if isinstance(said, dict) and "peft_type" not in said and _MLX & said.keys():
        raise FastshardError.of(
            "FS514", "an adapter of mlx-lm, which is not read", file=label, expected="an adapter of PEFT",
            help="merge it into its base with mlx_lm.fuse, and convert the result",
        )  # fmt: skip
    if not isinstance(said, dict) or "peft_type" not in said:
        raise FastshardError.of(
            "FS211", "no config of an adapter: it has no peft_type", file=label, help=help
        )
    _refuse(said, label)
    number = _number(said, "r", label)
    if number < 1 or number != int(number):
        raise _bad("r", "an integer from 1", said["r"], label)
    indices = said.get("trainable_token_indices")
    targets, layers = said.get("target_modules"), _layers(said)
    is_shorthand = isinstance(targets, str) and targets.lower() == "all-linear"
    words = _words(targets)
    return Config(
        r=int(number),
        alpha=_number(said, "lora_alpha", label),
        rslora=bool(said.get("use_rslora")),
        dora=bool(said.get("use_dora")),
        fan_in_fan_out=bool(said.get("fan_in_fan_out")),
        ranks={k: int(v) for k, v in _patterns(said, "rank_pattern", label).items()},
        alphas=_patterns(said, "alpha_pattern", label),
        parameters=tuple(map(str, said.get("target_parameters") or ())),
        token_indices=indices if _are_rows(indices, label) else None,
        base=str(said["base_model_name_or_path"]) if said.get("base_model_name_or_path") else None,
        path=label,
        targets=words,
        saved_modules=_words(said.get("modules_to_save")),
        layers=layers,
        excludes=bool(said.get("exclude_modules")),
        is_of_all_layers=(
            (is_shorthand or bool(words))
            # Words with a number may be of single layers.
            and not any(re.search(r"\d+\.", word) for word in words)
            and layers is None
            and not said.get("exclude_modules")
        ),
        stored=said,
    )


def _words(value: Any) -> tuple[str, ...]:
    """The words of a list; none of a pattern."""
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _layers(said: dict[str, Any]) -> frozenset[int] | None:
    """The layers that alone are adapted."""
    found = said.get("layers_to_transform")
    numbers = found if isinstance(found, list) else [found]
    kept = frozenset(n for n in numbers if type(n) is int)
    return kept or None


def _refuse(said: dict[str, Any], label: str) -> None:
    kind = said["peft_type"]
    if kind != "LORA":
        raise FastshardError.of(
            "FS514", "an adapter of another kind", file=label, expected="peft_type LORA", got=shown(kind),
            help="merge it with peft's merge_and_unload",
        )  # fmt: skip
    for key, harmless in _UNREAD.items():
        if key in said and said[key] not in harmless:
            raise FastshardError.of(
                "FS514", f"{key}: a variant of LoRA that is computed in another way", file=label, got=shown(said[key]),
                help="merge it with peft's merge_and_unload",
            )  # fmt: skip
    how = str(said.get("init_lora_weights", True)).lower()
    if how.startswith(_CHANGES_BASE):
        raise FastshardError.of(
            "FS514", f"init_lora_weights {how}: the base was changed when the adapter was made, which no file holds",
            file=label, help="convert it to a plain adapter: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )  # fmt: skip


def _are_rows(indices: Any, label: str) -> bool:
    listed = list(indices.values()) if isinstance(indices, dict) else [indices]
    if all(one is None for one in listed):
        return False
    for one in listed:
        if not isinstance(one, list) or not all(type(n) is int and 0 <= n < 1 << 40 for n in one):
            raise _bad("trainable_token_indices", "lists of rows", indices, label)
        if len(set(one)) < len(one):
            raise _bad("trainable_token_indices", "each row once", indices, label)
    return True


def _patterns(said: dict[str, Any], key: str, label: str) -> dict[str, float]:
    """Numbers by patterns of names, which are tried as regular expressions, as peft does.

    Raises:
        FastshardError: ``FS514`` for a pattern that could take for ever.
    """
    found = said.get(key) or {}
    if not isinstance(found, dict):
        raise _bad(key, "numbers by names of modules", found, label)
    for pattern in found:
        repeats = sum(pattern.count(sign) for sign in "*+{?")
        if len(pattern) > _LONGEST or repeats > _MOST_REPEATS or _REPEATED_GROUP.search(pattern):
            raise FastshardError.of(
                "FS514", f"{key}: a pattern that is not tried", file=label, got=shown(pattern), help="name the modules",
            )  # fmt: skip
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise _bad(key, f"a pattern ({error})", pattern, label) from None
    return {pattern: _number(found, pattern, label) for pattern in found}


def _number(said: dict[str, Any], key: str, label: str) -> float:
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(key, "a number", value, label)
    if key != "lora_alpha" and value <= 0:
        raise _bad(key, "a number above 0", value, label)
    return value


def _bad(key: str, expected: str, got: Any, label: str) -> FastshardError:
    return FastshardError.of(
        "FS211", key, file=label, expected=expected, got=shown(got), help=f"pass the adapter's own {FILE}"
    )
