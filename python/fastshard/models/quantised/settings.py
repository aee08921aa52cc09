"""A quantiser's settings in a config or in a record next to the codes; each type has one reader."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...common.config_text import shown
from ...common.records import dataclass
from ...common.regex import compile_when_used

__all__ = ["ImpossibleSettingError", "Settings"]

#: The largest extent, count or size: kernels index elements of a row with 31 bits.
LARGEST = (1 << 31) - 1
#: The largest float32 number.
_FLOAT32 = (2 - 2**-23) * 2.0**127
#: Extents of a block as text: ``128x128``.
_AS_TEXT = compile_when_used(r"[0-9]{1,9}x[0-9]{1,9}")
_MISSING = "missing"


class ImpossibleSettingError(Exception):
    """A setting for which codes have no values: its key, the possible values, and the stated value."""

    def __init__(self, key: str, expected: str, got: str) -> None:
        super().__init__(f"{key}: expected {expected}, got {got}")
        self.key, self.expected, self.got = key, expected, got


@dataclass(frozen=True)
class Settings:
    """Settings by key. The readers refuse impossible values and do not convert any."""

    values: Mapping[str, Any]
    #: Prefix of the keys: ``config_groups.group_0.weights.``
    path: str = ""

    def integer(
        self, key: str, low: int = 1, high: int = LARGEST, *, default: int | None = None, besides: str = ""
    ) -> int | None:
        """Read an integer; return the default if it is missing or null.

        Raises:
            ImpossibleSettingError: for another value.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not _is_integer(value, low, high):
            limit = f"from {low} to {high}" if high < LARGEST else f"of at least {low}, and below 2^31"
            raise self.refuse(key, f"an integer {limit}{besides}")
        return int(value)

    def required(self, key: str, low: int = 1, high: int = LARGEST) -> int:
        """Read a required integer.

        Raises:
            ImpossibleSettingError: for another value, and if it is missing.
        """
        value = self.integer(key, low, high)
        if value is None:
            raise self.refuse(key, "an integer")
        return value

    def group_size(self, key: str, default: int) -> int:
        """Read the number of columns in a group; -1 stands for all columns.

        Raises:
            ImpossibleSettingError: for another value, including null.
        """
        if key in self.values and self.values[key] == -1 and type(self.values[key]) is int:
            return -1
        if key in self.values and self.values[key] is None:
            raise self.refuse(key, "an integer of at least 1, or -1 for one group")
        return self.integer(key, default=default, besides=", or -1 for one group") or default

    def number(self, key: str) -> float:
        """Read a required non-negative number within the range of float32.

        Raises:
            ImpossibleSettingError: for another value.
        """
        value = self.values.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _FLOAT32:  # type: ignore[operator]
            raise self.refuse(key, "a finite number, zero or more")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, *, default: bool) -> bool:
        """Read a boolean; return the default if it is missing or null.

        Raises:
            ImpossibleSettingError: for a value that is neither true nor false.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return default if value is None else value

    def word(
        self, key: str, words: Sequence[str], *, default: str | None = None, any_case: bool = False
    ) -> str | None:
        """Read one of several words; return the default if it is missing or null.

        Raises:
            ImpossibleSettingError: for another value.
        """
        value = self.values.get(key)
        if value is None:
            return default
        found = value.lower() if any_case and isinstance(value, str) else value
        if not isinstance(found, str) or found not in words:
            raise self.refuse(key, " or ".join(words))
        return found

    def extents(self, key: str) -> tuple[int, int] | None:
        """Read rows and columns of a block, as a list or as ``128x128``; None if missing or null.

        Raises:
            ImpossibleSettingError: for another value.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and _AS_TEXT.fullmatch(value):
            value = [int(part) for part in value.split("x")]
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(_is_integer(n, 1, LARGEST) for n in value)
        ):
            raise self.refuse(key, "two integers of at least 1, rows and columns of a block")
        return value[0], value[1]

    def shape(self, key: str) -> tuple[int, ...]:
        """Read a required shape: a list of non-negative integers.

        Raises:
            ImpossibleSettingError: for another value.
        """
        value = self.values.get(key)
        if not isinstance(value, list) or not all(_is_integer(n, 0, 1 << 62) for n in value):
            raise self.refuse(key, "a list of integers, zero or more")
        if math.prod(value) >= 1 << 62:
            raise self.refuse(key, "the shape of a weight")
        return tuple(value)

    def below(self, key: str) -> Settings | None:
        """Read the settings below a key; None if missing or null.

        Raises:
            ImpossibleSettingError: if it is not an object.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Settings(value, f"{self.path}{key}.")

    def each(self) -> Iterator[Settings]:
        """Yield the values that are objects."""
        for key, value in self.values.items():
            if isinstance(value, Mapping):
                yield Settings(value, f"{self.path}{key}.")

    def refuse(self, key: str, expected: str) -> ImpossibleSettingError:
        """Build the error for a key with an impossible value."""
        got = _MISSING if key not in self.values else _as_json(self.values[key])
        return ImpossibleSettingError(f"{self.path}{key}", expected, got)


def _is_integer(value: object, low: int, high: int) -> bool:
    """Return True if a value is an integer within limits; a bool or a float is not."""
    return type(value) is int and low <= value <= high


def _as_json(value: object) -> str:
    """Format a value as JSON, shortened to one line."""
    if isinstance(value, list) and len(value) <= 8 and all(not isinstance(n, (list, dict)) for n in value):
        return f"[{', '.join(map(_as_json, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    words: dict[object, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else shown(value)
