"""Config texts, YAML and JSON, as plain data of bounded size."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import json_text

if TYPE_CHECKING:
    import yaml

#: Maximum number of values in a config; an alias counts each time it is used.
_VALUES = 100_000
#: Exceptions that PyYAML raises for values that do not fit their tags, besides its own errors.
_MALFORMED = (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text that consists of one document.

    Raises:
        ValueError: if the document is malformed, is too large with its aliases expanded, or contains a number
            of more than 64 bits.
    """
    import yaml

    loader = None
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _bounded(node, {})
        _refuse_repeated_keys(node, set())
        content = loader.construct_document(node)
        json_text.check_levels(content)
        return checked(content)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None
    except _MALFORMED as error:
        raise ValueError(f"not valid YAML: {_shorten_error(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """Return a loader for plain YAML data with a limit on depth and number of values.

    PyYAML's own loader takes hours for a text with too many levels or values.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            if self.nodes > _VALUES:
                raise ValueError(f"more than {_VALUES} values")
            return super().compose_node(parent, index)

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= json_text.MOST_LEVELS:
                raise ValueError(f"values are nested more than {json_text.MOST_LEVELS} levels deep")
            super().fetch_flow_collection_start(TokenClass)

        def add_indent(self, column: int) -> bool:
            if len(self.indents) > json_text.MOST_LEVELS:
                raise ValueError(f"values are nested more than {json_text.MOST_LEVELS} levels deep")
            return bool(super().add_indent(column))

    return Loader


def _refuse_repeated_keys(node: Any, seen: set[int]) -> None:
    """Refuse a key that occurs twice in one mapping with different values.

    PyYAML itself would use the last value.

    Raises:
        ValueError: with the key.
    """
    if id(node) in seen or not isinstance(node.value, list):
        return
    seen.add(id(node))
    values: dict[tuple[str, str], Any] = {}
    for child in node.value:
        for part in child if isinstance(child, tuple) else (child,):
            _refuse_repeated_keys(part, seen)
        if not isinstance(child, tuple) or not isinstance(child[0].value, str):
            continue
        key, value = child
        # Mappings that `<<` brings in are several, and what they say is written over by the mapping's own
        # keys.
        first: Any = value if key.tag.endswith(":merge") else values.setdefault((key.tag, key.value), value)
        is_equal = isinstance(value.value, str) and (first.tag, first.value) == (value.tag, value.value)
        if first is not value and not is_equal:
            raise ValueError(f"the key {key.value!r} appears twice, with different values")


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: if the text is malformed or contains a number of more than 64 bits.
    """
    try:
        return checked(json_text.load(text, json_text.read_pairs))
    except ValueError as error:
        raise ValueError(f"not valid JSON: {_shorten_error(error)}") from None


def written(config: Mapping[str, Any]) -> str:
    """Format a config as the text of a config.json."""
    return json_text.indented(config, by=2)


def checked(value: Any) -> Any:
    """Check that all integers in a value fit into 64 bits, and return the value.

    Raises:
        ValueError: if an integer has more than 64 bits, because results computed from it would not fit
            either.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number of more than 64 bits")
    if isinstance(value, Mapping):
        for key, item in value.items():
            checked(key)
            checked(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            checked(item)
    return value


def shown(value: Any) -> str:
    """Format a value for a message, on one line."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _shorten_error(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _bounded(node: Any, sizes: dict[int, int]) -> int:
    """Count the nodes below a node, including the node itself.

    Nodes that aliases repeat count each time.
    """
    known = sizes.get(id(node))
    if known is not None:
        if known == 0:
            raise ValueError("an alias that contains itself")
        return known
    sizes[id(node)] = 0
    total = 1
    for child in node.value if isinstance(node.value, list) else ():
        for part in child if isinstance(child, tuple) else (child,):
            total += _bounded(part, sizes)
            if total > _VALUES:
                raise ValueError(f"more than {_VALUES} values, counting those that aliases repeat")
    sizes[id(node)] = total
    return total
