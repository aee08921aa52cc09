"""The form of a quantised weight: the tensor with its codes, and the companions that give the codes
values."""

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
#: Powers of two as bytes: torch spells them as a dtype of their own, others as plain bytes.
E8M0 = frozenset(("F8_E8M0", "U8"))
#: Bytes that are read together of what has no bound.
WINDOW = 1 << 20
#: Modules around the layers, which differ between the classes of one model, and ways in which they are
#: stacked.
_AROUND = ("model", "language_model", "text_model")
_STACKED = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class Companion:
    """A tensor that accompanies the codes."""

    #: What people call it: ``scales``.
    role: str
    #: What its name ends with in place of the codes' suffix; several where tools spell it differently.
    suffixes: tuple[str, ...]
    dtypes: frozenset[str]
    #: The shapes that it may have, the usual one first; None for any.
    shapes: Callable[[Sizes], Sequence[tuple[int, ...]]] | None
    required: bool = True
    #: A companion may be needed by what another one is: (suffix of that one, its dtypes).
    where: tuple[str, frozenset[str]] | None = None
    #: True for what a whole model may do without: where one weight has it, all have.
    by_all: bool = False
    #: What people call the form by the suffix that this one has: ``nf4``.
    kinds: Mapping[str, str] = field(default_factory=dict)


def exactly(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Return True for the shape of the codes themselves."""
    return sizes.shape == shape


@dataclass(frozen=True)
class Form:
    """A way in which weights are stored."""

    #: As the field calls it: ``fp8 blocks``.
    name: str
    #: What the name of the codes ends with, and their dtypes.
    suffix: str
    dtypes: frozenset[str]
    #: The weight's extents by the codes' shape; None where that cannot be the shape of such codes.
    sizes: Callable[[tuple[int, ...]], Sizes | None]
    companions: tuple[Companion, ...]
    #: Names for which it is; all where none decides.
    takes: Callable[[str], bool] = lambda name: True
    #: Whether the codes may be of a weight of this shape, by what their own shape says.
    fits: Callable[[Sizes, tuple[int, ...]], bool] = exactly
    #: What makes its values, where they are made here; the reason where they are not.
    values: Callable[[Weight, ValueAccess], Values] | str = "fastshard cannot dequantise them"

    def module(self, name: str) -> str | None:
        """Return the module, or the stack of experts, whose codes a tensor is; None for other tensors."""
        return name.removesuffix(self.suffix) if name.endswith(self.suffix) else None


@dataclass(frozen=True)
class Weight:
    """A quantised weight: its codes and their companions."""

    module: str
    form: Form
    codes: str
    sizes: Sizes
    #: Names of the companions that are there, by role.
    companions: Mapping[str, str]
    #: Dtypes and shapes of the codes and of the companions, by name.
    stored: Mapping[str, Stored]

    @property
    def stored_as(self) -> list[tuple[str, list[str]]]:
        """The names that the weight has without the form, and those of the tensors in it."""
        names = [self.codes, *self.companions.values()]
        return [(name, names) for name in (f"{self.module}.weight", self.module)]

    def values(self, access: ValueAccess) -> Values:
        """Return the computation of the weight's values.

        Raises:
            NoValuesError: if they are not computed here, with the reason.
        """
        if isinstance(self.form.values, str):
            raise NoValuesError(self.form.values)
        return self.form.values(self, access)

    def of(self, role: str) -> tuple[str, str, tuple[int, ...]]:
        """Return name, dtype and shape of a companion."""
        name = self.companions[role]
        return (name, *self.stored[name])


def matrix(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a weight with one element per code, in the same arrangement."""
    return Sizes(shape[:-2], shape[-2], shape[-1]) if len(shape) >= 2 else None


def pairs(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a weight whose bytes each store two neighbours of a row."""
    return Sizes(shape[:-2], shape[-2], 2 * shape[-1]) if len(shape) >= 2 else None


def blocks(rows: int, columns: int) -> Callable[[Sizes], list[tuple[int, ...]]]:
    """Return the shapes of one scale per block; the last block of a row or column may be short."""
    return lambda s: [(*s.lead, ceil_div(s.rows, rows), ceil_div(s.columns, columns))]


def one(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes of one value for the full weight, or for each expert of a stack."""
    return [(), (1,), sizes.lead, (*sizes.lead, 1), (*sizes.lead, 1, 1)]


def each_row(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes of one value per row, or per output channel of a convolution."""
    return [(*sizes.lead, sizes.rows, 1), (*sizes.lead, sizes.rows), *each_channel(sizes)]


def groups(size: int) -> Callable[[Sizes], list[tuple[int, ...]]]:
    """Return the shapes of one value per group of a row."""
    return lambda s: [(*s.lead, s.rows, ceil_div(s.columns, size))]


def spellings(name: str) -> tuple[str, ...]:
    """Return a module's name in the spellings of other classes of its model.

    Quantisers list names in memory, and files have the names on disk.
    """
    inner = name
    while inner.partition(".")[0] in _AROUND and "." in inner:
        inner = inner.partition(".")[2]
    return tuple(dict.fromkeys((name, *(f"{around}{inner}" for around in _STACKED))))


class ListedModules:
    """Modules of a list, in any way in which tools spell one: name, part of it, pattern, expression."""

    def __init__(self, entries: Iterable[object], budget: PatternBudget) -> None:
        texts = [entry for entry in entries if isinstance(entry, str) and entry]
        self._patterns = PatternList(
            (entry[3:] for entry in texts if entry.startswith("re:")), "start", budget
        )
        self._words = [entry for entry in texts if not entry.startswith("re:")]

    def names(self, module: str) -> bool:
        """Return True for a module that the list names."""
        spelled = spellings(module)
        if any(self._patterns.first(one) is not None for one in spelled):
            return True
        return any(
            ("*" in entry and fnmatch.fnmatchcase(one, entry)) or entry.strip("*.") in one
            for entry in self._words
            for one in spelled
        )
