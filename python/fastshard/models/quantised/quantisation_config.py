"""The quantisation of a model, as config.json or a quantiser's own file states it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...common import codes, json_text
from ...common.errors import FastshardError
from ...common.patterns import PatternBudget
from ...common.records import dataclass
from ..config_json import QUANTISED
from . import bitsandbytes, compressed_tensors, fp8, gptq_awq, mlx, modelopt, mxfp4
from .forms import Form, ListedModules

__all__ = ["KNOWN", "QuantisationConfig", "find_in_configs", "find_in_files"]

#: Modules that support forms, by ``quant_method``.
KNOWN = {
    method: module
    for module in (bitsandbytes, compressed_tensors, fp8, gptq_awq, modelopt, mxfp4, mlx)
    for method in module.methods
}
#: Keys that list unquantised modules.
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
#: Methods that quantise weights on loading, so that a config does not describe the stored weights.
_ON_LOADING = ("bitsandbytes", "torchao", "hqq", "quanto", "eetq", "fbgemm_fp8", "comfyui", "mlx")
#: Maximum number of compressed-tensors groups, because each one is compared with each weight.
_MOST_GROUPS = 512
#: The key under which MLX states its quantisation; its copy under other tools' keys names no method.
_MLX = "quantization"
#: The header key, and the tensor suffixes, by which ComfyUI states how it stores weights. source: ComfyUI
#: comfy/quant_ops.py
_COMFYUI, _OF_COMFYUI = "_quantization_metadata", (".comfy_quant", "scaled_fp8")


@dataclass(frozen=True)
class QuantisationConfig:
    """The quantisation that a config declares."""

    method: str
    config: Mapping[str, Any]
    #: The file that states it: ``config.json`` or another one.
    file: str

    @functools.cached_property
    def _budget(self) -> PatternBudget:
        """The work limit shared by its patterns."""
        return PatternBudget(self.file)

    @functools.cached_property
    def _skipped_modules(self) -> ListedModules:
        return ListedModules(self.skipped or (), self._budget)

    @property
    def forms(self) -> list[Form]:
        """The forms that fastshard supports.

        Raises:
            FastshardError: ``FS514`` for more groups than any tool writes.
        """
        if self.method not in KNOWN:
            return []
        groups = self.config.get("config_groups")
        if isinstance(groups, Mapping) and len(groups) > _MOST_GROUPS:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "config_groups has more groups than fastshard reads",
                file=self.file,
                expected=f"at most {_MOST_GROUPS}",
                got=str(len(groups)),
                help="write groups with the same settings as one group with several targets",
            )
        # A file of AWQ's own does not name the method.
        found: list[Form] = KNOWN[self.method].forms(
            {**self.config, "quant_method": self.method}, self._budget
        )
        return found

    @property
    def skipped(self) -> list[str] | None:
        """The modules listed as unquantised; None without such a list."""
        found = [self.config[key] for key in _SKIPPED if isinstance(self.config.get(key), list)]
        rules = self.config.get("dynamic")
        if isinstance(rules, Mapping):
            # GPTQModel: what begins with a minus is not quantised.
            found.append([f"re:{key[2:]}" for key in rules if isinstance(key, str) and key.startswith("-:")])
        return [one for entries in found for one in entries] if found else None

    def skips(self, module: str) -> bool:
        """Return True if the list contains a module."""
        return self._skipped_modules.names(module)

    @property
    def is_of_what_is_stored(self) -> bool:
        """True if the config describes the stored weights: False for methods that also load unquantised
        weights, and for weights saved uncompressed.
        """
        return self.method not in _ON_LOADING and not self.is_before_compression

    @property
    def is_before_compression(self) -> bool:
        """True if compressed-tensors states that weights may be unquantised although they have scales."""
        return self.config.get("quantization_status") in (
            "initialized",
            "calibration",
            "frozen",
            "decompressed",
        )


def find_in_configs(
    config: Mapping[str, Any] | None, beside: Mapping[str, Mapping[str, Any]]
) -> QuantisationConfig | None:
    """Find the quantisation that a model's configs declare.

    Args:
        config: content of config.json.
        beside: contents of other files, by name.
    """
    for part in _parts(config or {}):
        for key in (*QUANTISED, _MLX):
            content = part.get(key)
            if isinstance(content, Mapping) and isinstance(method := _method(content), str):
                return QuantisationConfig(method, content, "config.json")
    for file, content in beside.items():
        inner = content.get("quantization", content)
        if isinstance(inner, Mapping) and isinstance(method := _method(inner, file), str):
            return QuantisationConfig(method, inner, file)
    return None


def find_in_files(headers: Iterable[object], names: Collection[str]) -> QuantisationConfig | None:
    """Find the quantisation that the tensor files themselves declare.

    Args:
        headers: contents of the files' headers other than tensors.
        names: names of all tensors.
    """
    for header in headers:
        for key in (*QUANTISED, _MLX, _COMFYUI):
            text = header.get(key) if isinstance(header, Mapping) else None
            content = json_text.object_in(text) if isinstance(text, str) else {}
            method = "comfyui" if key == _COMFYUI and content else _method(content)
            if method is not None:
                return QuantisationConfig(method, content, "the header of a file")
    if any(name.endswith(_OF_COMFYUI) for name in names):
        return QuantisationConfig("comfyui", {}, "a tensor of ComfyUI")
    return None


def _method(content: Mapping[str, Any], file: str = "") -> str | None:
    method = content.get("quant_method")
    if method is None and ("quant_algo" in content or "quantized_layers" in content):
        return "modelopt"
    if method is None and (content.get("load_in_4bit") or content.get("load_in_8bit")):
        return "bitsandbytes"
    if method is None and not file and "bits" in content and "group_size" in content:
        return "mlx"
    if method is None and file == "quantize_config.json":
        return "gptq"
    if method is None and file == "quant_config.json":
        return "awq"
    return method.lower() if isinstance(method, str) else None


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and the configs of its parts."""
    yield config
    for inner in config.values():
        if isinstance(inner, Mapping) and "quant_method" not in inner:
            yield from _parts(inner)
