"""Dataclasses that cost almost nothing until the first instance is created.

The standard library's decorator compiles six methods for each class at import, which takes half a millisecond
per class, although a run uses few of the classes. This one compiles ``__init__`` when the first instance is
created; all other methods are shared. The functions of the module ``dataclasses`` (``fields``, ``asdict``,
``replace``) accept these classes.
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import asdict, dataclass, field, fields, replace
else:

    class _Missing:
        """A marker for a missing value."""

        def __repr__(self):
            return "<factory>"

    _MISSING = _Missing()

    class _Options:
        """Options of a field, the arguments of :func:`field`."""

        __slots__ = ("compare", "default", "factory", "repr")

        def __init__(self, default, factory=_MISSING, repr=True, compare=True):
            self.default, self.factory, self.repr, self.compare = default, factory, repr, compare

    def field(*, default=_MISSING, default_factory=_MISSING, repr=True, compare=True):
        """Describe a field, like :func:`dataclasses.field`, but with only these options."""
        return _Options(default, default_factory, repr, compare)

    def dataclass(cls=None, /, *, frozen=False):
        """Make a class a dataclass, like :func:`dataclasses.dataclass`, but with only these options."""
        return _prepare(cls, frozen) if cls is not None else lambda cls: _prepare(cls, frozen)

    def replace(record, /, **changes):
        """Copy a record with changes, like :func:`dataclasses.replace`."""
        for name in record.__match_args__:
            if name not in changes:
                changes[name] = getattr(record, name)
        other = record.__class__(**changes)
        # Of a frozen record another frozen one: `common.frozen`.
        if "_is_frozen" in record.__dict__:
            other.freeze()
        return other

    def asdict(record):
        """Convert a record into a dict, like :func:`dataclasses.asdict`.

        The function copies only records and collections.
        """
        return {name: _plain(getattr(record, name)) for name in record.__match_args__}

    def _plain(value):
        """Replace records in a value by dicts."""
        if hasattr(type(value), "__record__"):
            return asdict(value)
        if hasattr(value, "_fields"):
            return type(value)(*map(_plain, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(_plain, value))
        if isinstance(value, dict):
            return type(value)((_plain(key), _plain(one)) for key, one in value.items())
        return value

    def fields(record):
        """Return the fields of a record, like :func:`dataclasses.fields`."""
        import dataclasses

        return dataclasses.fields(record)

    def _prepare(cls, frozen):
        options = {}
        for base in cls.__mro__[-1:0:-1]:
            options.update(base.__dict__.get("__record__", ()))
        for name, hint in getattr(cls, "__annotations__", {}).items():
            if str(hint).startswith(("ClassVar", "typing.ClassVar")):
                continue
            given = cls.__dict__.get(name, _MISSING)
            options[name] = given if isinstance(given, _Options) else _Options(given)
            if isinstance(given, _Options):
                if given.default is _MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, given.default)
        cls.__record__ = options
        cls.__match_args__ = tuple(options)
        cls.__values__ = _values_of([name for name, of in options.items() if of.compare])
        cls.__dataclass_fields__ = _Described(cls, frozen, "__dataclass_fields__")
        cls.__dataclass_params__ = _Described(cls, frozen, "__dataclass_params__")
        own = cls.__dict__
        if "__init__" not in own:
            cls.__init__ = _first_init(cls, frozen)
            cls.__signature__ = _Signature(cls, frozen)
        if "__repr__" not in own:
            cls.__repr__ = _repr
        if "__eq__" not in own:
            cls.__eq__ = _eq
        if "__hash__" not in own or own["__hash__"] is None:
            cls.__hash__ = _hash if frozen else None
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse_changes(cls)
        return cls

    def _first_init(cls, frozen):
        def __init__(self, /, *args, **kwargs):
            _compile_init(cls, frozen)
            cls.__init__(self, *args, **kwargs)

        return __init__

    def _compile_init(cls, frozen):
        """Compile the method that sets the fields."""
        # Names that no field has.
        values = {"_MISSING": _MISSING}
        parameters, lines = ["self"], ["_fields = self.__dict__"] if frozen else []
        for name, options in cls.__record__.items():
            parameter, value = name, name
            if options.factory is not _MISSING:
                values[f"_make_{name}"] = options.factory
                parameter, value = f"{name}=_MISSING", f"_make_{name}() if {name} is _MISSING else {name}"
            elif options.default is not _MISSING:
                values[f"_default_{name}"] = options.default
                parameter = f"{name}=_default_{name}"
            parameters.append(parameter)
            lines.append(f"_fields[{name!r}] = {value}" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        body = "\n    ".join(lines or ["pass"])
        exec(f"def __init__({', '.join(parameters)}):\n    {body}", values)
        init = cls.__init__ = values["__init__"]
        init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
        init.__annotations__ = {**_hints(cls), "return": None}
        if "__signature__" in cls.__dict__:
            del cls.__signature__

    def _hints(cls):
        """Return the annotations of the fields."""
        every = {}
        for base in cls.__mro__[::-1]:
            every |= getattr(base, "__annotations__", {})
        return {name: every[name] for name in cls.__record__}

    def _values_of(names):
        """Return a function that reads the values of fields from a record, as a tuple."""
        return (
            attrgetter(*names) if len(names) > 1 else lambda record: tuple(getattr(record, n) for n in names)
        )

    def _eq(self, other):
        cls = self.__class__
        return cls.__values__(self) == cls.__values__(other) if other.__class__ is cls else NotImplemented

    def _hash(self):
        return hash(self.__class__.__values__(self))

    def _repr(self):
        shown = (
            f"{name}={getattr(self, name)!r}" for name, options in self.__record__.items() if options.repr
        )
        return f"{self.__class__.__qualname__}({', '.join(shown)})"

    def _refuse_changes(cls):
        def refuse(record, name, verb):
            if type(record) is cls or name in cls.__record__:
                from dataclasses import FrozenInstanceError

                raise FrozenInstanceError(f"cannot {verb} field {name!r}")

        def __setattr__(self, name, value):
            refuse(self, name, "assign to")
            super(cls, self).__setattr__(name, value)

        def __delattr__(self, name):
            refuse(self, name, "delete")
            super(cls, self).__delattr__(name)

        return __setattr__, __delattr__

    class _Signature:
        """A descriptor that the module ``inspect`` reads first, and that then compiles the method."""

        def __init__(self, cls, frozen):
            self.cls, self.frozen = cls, frozen

        def __get__(self, record, owner):
            _compile_init(self.cls, self.frozen)
            raise AttributeError("__signature__")

    class _Described:
        """A descriptor of an attribute that ``dataclasses`` looks for in a class.

        It computes the value from an equivalent dataclass on first access.
        """

        def __init__(self, cls, frozen, attribute):
            self.cls, self.frozen, self.attribute = cls, frozen, attribute

        def __get__(self, record, owner):
            import dataclasses

            known = {"__module__": self.cls.__module__, "__annotations__": _hints(self.cls)}
            for name, options in self.cls.__record__.items():
                given = {"repr": options.repr, "compare": options.compare}
                if options.factory is not _MISSING:
                    given["default_factory"] = options.factory
                elif options.default is not _MISSING:
                    given["default"] = options.default
                known[name] = dataclasses.field(**given)
            described = dataclasses.dataclass(frozen=self.frozen)(type(self.cls.__name__, (), known))
            for attribute in ("__dataclass_fields__", "__dataclass_params__"):
                setattr(self.cls, attribute, getattr(described, attribute))
            return getattr(described, self.attribute)


__all__ = ["asdict", "dataclass", "field", "fields", "replace"]
