"""The form of a quantised weight: the tensor of codes, and its companions, which give the codes values."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...common.patterns import PatternBudget, PatternList
from ...common.records import dataclass, field
from .sizes import Sizes, Stored, ceil_div, each_channel
from .values import NoValuesError, ValueAccess, Values

__all__ = [
    "Companion",
    "Form",
    "ListedModules",
    "Sizes",
    "Stored",
    "Weight",
    "blocks",
    "ceil_div",
    "each_row",
    "groups",
    "matrix",
    "one",
    "pairs",
    "spellings",
]

FLOATS = frozenset(("F16", "BF16", "F32"))
F8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
E4M3 = frozenset(("F8_E4M3",))
#: Dtypes of powers of two stored as bytes: torch's own dtype, or plain bytes.
E8M0 = frozenset(("F8_E8M0", "U8"))
#: Number of bytes to read at once from tensors of unlimited size.
WINDOW = 1 << 20
#: Modules around the layers, which differ between the classes of one model, and the ways in which they are
#: nested.
_AROUND = ("model", "language_model", "text_model")
_STACKED = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class Companion:
    """A tensor that accompanies the codes."""

    #: Its name in messages: ``scales``.
    role: str
    #: Suffixes of its name, in place of the codes' suffix; several if tools use different ones.
    suffixes: tuple[str, ...]
    dtypes: frozenset[str]
    #: Its possible shapes, the usual one first; None for any shape.
    shapes: Callable[[Sizes], Sequence[tuple[int, ...]]] | None
    required: bool = True
    #: Condition under which it is required: another companion with this suffix has one of these dtypes.
    where: tuple[str, frozenset[str]] | None = None
    #: True if it is required only in a model that has it for any weight.
    by_all: bool = False
    #: Names of the form for messages, by the suffix of this companion: ``nf4``.
    kinds: Mapping[str, str] = field(default_factory=dict)


def exactly(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Return True for the exact shape of the codes."""
    return sizes.shape == shape


@dataclass(frozen=True)
class Form:
    """A way of storing weights."""

    #: The field's name for it: ``fp8 blocks``.
    name: str
    #: Suffix of the codes' names, and their dtypes.
    suffix: str
    dtypes: frozenset[str]
    #: Returns the weight's extents from the codes' shape; None if codes cannot have that shape.
    sizes: Callable[[tuple[int, ...]], Sizes | None]
    companions: tuple[Companion, ...]
    #: Returns True for the names to which it applies; by default for all.
    takes: Callable[[str], bool] = lambda name: True
    #: Returns True if codes of the given shape may belong to a weight of the given sizes.
    fits: Callable[[Sizes, tuple[int, ...]], bool] = exactly
    #: Computes the values if fastshard supports this; otherwise the reason why not.
    values: Callable[[Weight, ValueAccess], Values] | str = "fastshard cannot dequantise them"

    def module(self, name: str) -> str | None:
        """Return the module, or the stack of experts, to which a tensor of codes belongs; None for other
        tensors.
        """
        return name.removesuffix(self.suffix) if name.endswith(self.suffix) else None


@dataclass(frozen=True)
class Weight:
    """A quantised weight: its codes and their companions."""

    module: str
    form: Form
    codes: str
    sizes: Sizes
    #: Names of the companions that exist, by role.
    companions: Mapping[str, str]
    #: Dtypes and shapes of the codes and the companions, by name.
    stored: Mapping[str, Stored]

    @property
    def stored_as(self) -> list[tuple[str, list[str]]]:
        """The names that the weight would have without quantisation, and the names of its tensors."""
        names = [self.codes, *self.companions.values()]
        return [(name, names) for name in (f"{self.module}.weight", self.module)]

    def values(self, access: ValueAccess) -> Values:
        """Return the computation of the weight's values.

        Raises:
            NoValuesError: if fastshard does not compute them; the message gives the reason.
        """
        if isinstance(self.form.values, str):
            raise NoValuesError(self.form.values)
        return self.form.values(self, access)

    def of(self, role: str) -> tuple[str, str, tuple[int, ...]]:
        """Return the name, dtype and shape of a companion."""
        name = self.companions[role]
        return (name, *self.stored[name])


def matrix(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a weight with one element per code, in the same arrangement."""
    return Sizes(shape[:-2], shape[-2], shape[-1]) if len(shape) >= 2 else None


def pairs(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a weight whose bytes each store two adjacent elements of a row."""
    return Sizes(shape[:-2], shape[-2], 2 * shape[-1]) if len(shape) >= 2 else None


def blocks(rows: int, columns: int) -> Callable[[Sizes], list[tuple[int, ...]]]:
    """Return the shapes for one scale per block; the last block of a row or column may be shorter."""
    return lambda s: [(*s.lead, ceil_div(s.rows, rows), ceil_div(s.columns, columns))]


def one(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes for one value per weight, or per expert of a stack."""
    return [(), (1,), sizes.lead, (*sizes.lead, 1), (*sizes.lead, 1, 1)]


def each_row(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes for one value per row, or per output channel of a convolution."""
    return [(*sizes.lead, sizes.rows, 1), (*sizes.lead, sizes.rows), *each_channel(sizes)]


def groups(size: int) -> Callable[[Sizes], list[tuple[int, ...]]]:
    """Return the shapes for one value per group of a row."""
    return lambda s: [(*s.lead, s.rows, ceil_div(s.columns, size))]


def spellings(name: str) -> tuple[str, ...]:
    """Return a module's name in the spellings of other classes of its model.

    Quantisers list the names in memory, while files contain the names on disk.
    """
    inner = name
    while inner.partition(".")[0] in _AROUND and "." in inner:
        inner = inner.partition(".")[2]
    return tuple(dict.fromkeys((name, *(f"{around}{inner}" for around in _STACKED))))


class ListedModules:
    """Modules in a list, in any notation that tools use: full name, part of a name, pattern, expression."""

    def __init__(self, entries: Iterable[object], budget: PatternBudget) -> None:
        texts = [entry for entry in entries if isinstance(entry, str) and entry]
        self._patterns = PatternList(
            (entry[3:] for entry in texts if entry.startswith("re:")), "start", budget
        )
        self._words = [entry for entry in texts if not entry.startswith("re:")]

    def names(self, module: str) -> bool:
        """Return True if the list contains the module."""
        spelled = spellings(module)
        if any(self._patterns.first(one) is not None for one in spelled):
            return True
        return any(
            ("*" in entry and fnmatch.fnmatchcase(one, entry)) or entry.strip("*.") in one
            for entry in self._words
            for one in spelled
        )
