"""Data for comparing a checkpoint with a reference, and helpers that all comparisons share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from typing import Any

from ..common.errors import Finding
from ..common.records import dataclass
from ..common.regex import compile_when_used
from .reference import Reference
from .reference_names import Met

__all__ = [
    "HEAD",
    "LAYER",
    "MOST_LISTED",
    "WORDS",
    "Comparison",
    "Missing",
    "extents",
    "more",
    "number",
    "read_setting",
]

#: Maximum number of findings of one kind.
MOST_LISTED = 100
#: A layer number: the first number in a name.
LAYER = compile_when_used(r"^((?:[A-Za-z_]\w*\.)*?)(\d+)\.(.+)$")
#: Tensors with a row for each token, which models tie. source: transformers models/*/modeling_*.py
#: (_tied_weights_keys)
HEAD = compile_when_used(
    r"(^|\.)(lm_head|embed_out|lm_head\.decoder|predictions\.decoder|output_projection)\.(weight|bias)$"
)
WORDS = compile_when_used(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$"
    r"|(^|\.)(predictions|lm_head)\.bias$|" + HEAD.pattern
)

#: Names in the roster and their shapes, as far as known.
Missing = list[tuple[str, "list[int | None] | None"]]


@dataclass(frozen=True)
class Comparison:
    """A checkpoint and a reference under common names, and the tensors that the caller wants."""

    met: Met
    reference: Reference
    #: The reference's tensors, with their shapes as far as known.
    expected: Mapping[str, list[int | None] | None]
    #: Returns True if a tensor is requested, by its name in a result.
    wanted: Callable[[str], bool]
    #: The requested dtype of floating-point tensors; None if they keep their own.
    cast: str | None
    #: Tensors with a known error.
    named: Set[str]

    @property
    def path(self) -> str:
        """Path of the reference, for messages."""
        return self.reference.path

    @property
    def own(self) -> Mapping[str, Any]:
        """The checkpoint's own config; empty if it is the reference's."""
        model = self.met.side.source.model
        is_shared = self.reference.config_file is not None and model.config_file == self.reference.config_file
        return {} if is_shared else model.config or {}

    @property
    def theirs(self) -> Mapping[str, Any]:
        """The reference's config."""
        return self.reference.config or {}

    def is_expected(self, name: str) -> bool:
        """Return True if the caller requests a missing tensor, by its would-be stored name."""
        stored = self.stored(name)
        return self.wanted(stored) and not {name, stored} & self.named

    def stored(self, name: str) -> str:
        """Return the would-be stored name of a tensor in the roster."""
        return self.met.side.outer + self.met.reading.back(name)

    def shape(self, stored: str) -> list[int]:
        """Return the full shape of a stored tensor."""
        return self.met.side.tensors[stored][1]

    @cached_property
    def there(self) -> set[str]:
        """Names in the roster whose tensors exist."""
        return self.expected.keys() - {name for name, _ in self.met.found["missing"]}

    @cached_property
    def stacks(self) -> dict[str, dict[int, set[str]]]:
        """Tensors in the roster's layers, by the part of the name before the layer number, and the number."""
        stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in self.expected:
            if match := LAYER.match(name):
                stacks[match[1]][int(match[2])].add(match[3])
        return stacks


def more(code: str, count: int, what: str, severity: str | None = None) -> list[Finding]:
    """Report how many findings of a kind are not listed individually."""
    if count <= MOST_LISTED:
        return []
    return [Finding.of(code, f"and {count - MOST_LISTED} more {what}", severity=severity)]


def extents(shape: Iterable[int | None]) -> str:
    """Format a shape; unknown dimensions are question marks."""
    return f"[{', '.join('?' if n is None else str(n) for n in shape)}]"


def read_setting(config: Mapping[str, Any], *keys: str) -> Any:
    """Read a setting by the first of some keys that a config, or the config of its language model, has.

    The result is None if the config has none of the keys.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def number(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the integer that a config states under the first of some keys; None if it is not an integer."""
    value = read_setting(config, *keys)
    return value if type(value) is int else None
