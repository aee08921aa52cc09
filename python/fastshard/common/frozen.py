"""Records that are built step by step and then frozen: later changes are refused."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

_FROZEN = "_is_frozen"

Record = TypeVar("Record", bound="Freezable")


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse a change, because other code shares the record.

    Raises:
        TypeError: always.
    """
    raise TypeError("the record is frozen: make a changed copy with replace()")


class FrozenList(list[Any]):
    """A list that cannot be changed. It is still a list for concatenation, comparison and serialisation."""

    __slots__ = ()
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __delitem__ = __iadd__ = __imul__ = __setitem__ = _refuse


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed."""

    __slots__ = ()
    clear = pop = popitem = setdefault = update = _refuse
    __delitem__ = __ior__ = __setitem__ = _refuse


class Freezable:
    """A dataclass whose fields can be assigned until :meth:`freeze`.

    ``replace`` returns a frozen copy of a frozen record.
    """

    def freeze(self) -> None:
        """Freeze the record, the lists, dicts and sets in its fields, and the records in them."""
        if _FROZEN in self.__dict__:
            return
        for name, value in self.__dict__.items():
            self.__dict__[name] = _freeze_value(value)
        self.__dict__[_FROZEN] = True

    def thaw(self: Record) -> Record:
        """Copy a frozen record, its collections and the records in them, so that the copy can be changed."""
        other = object.__new__(type(self))
        fields = {name: _copy_value(value) for name, value in self.__dict__.items() if name != _FROZEN}
        other.__dict__.update(fields)
        return other

    def __setattr__(self, name: str, value: Any) -> None:
        if _FROZEN in self.__dict__:
            _refuse()
        super().__setattr__(name, value)


#: The frozen type of each type of collection.
_KINDS: dict[type, type] = {list: FrozenList, dict: FrozenDict, set: frozenset}
#: The mutable type of each type of collection, frozen or not.
_THAWED = {frozen: kind for kind, frozen in _KINDS.items()} | {kind: kind for kind in _KINDS}


def _freeze_value(value: Any) -> Any:
    """Freeze the value of a field: a record in place, a collection as a copy."""
    if isinstance(value, Freezable):
        value.freeze()
        return value
    kind = _KINDS.get(type(value))
    return value if kind is None else kind(value)


def _copy_value(value: Any) -> Any:
    """Copy the value of a field, if it is a freezable record or a collection, so that it can be changed."""
    if isinstance(value, Freezable):
        return value.thaw()
    kind = _THAWED.get(type(value))
    return value if kind is None else kind(value)
